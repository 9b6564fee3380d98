"""Records conversations that are served, as rows to train on. Nothing is recorded unless somebody asks for it. docs/adapting.md

Rows are appended to the newest of the files traffic-000001.jsonl, ... of a folder, by one recorder at a time.
"""

import dataclasses
import hashlib
import json
import logging
import re
import threading
import time
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import filelock
from transformers import PreTrainedTokenizerBase

from specdec.core import files, row_files
from specdec.core.sampling import Sampling
from specdec.proposers import datastore
from specdec.target.model import Target

LOG = logging.getLogger(__name__)
MOST_WAITING = 1_000  # rows that wait to be written; further ones are dropped
LONGEST_NAME = 200  # characters of a conversation's id and of a tag
OPT_OUT = "x-record"  # a request with this header and the value `false` is not recorded
CATEGORY = "traffic"
NAME = re.compile(r"traffic-\d{6,}\.jsonl")


@dataclass(frozen=True)
class Exchange:
    """A request and its answer, which has ended.

    tokens: ids of the prompt and of the answer; num_prompt: how many are the prompt
    end: the token behind the text of an answer that was not cut, None without one
    messages: the conversation up to the answer; None: a bare prompt
    prompt, text: of a bare prompt and of the answer; None: the recorder decodes them
    metadata: of the request, with `conversation` (a text) and `tags` (a comma list or a list) if the client gives them
    accepted: drafts that each round kept; drafted: in all rounds
    head: name of the checkpoint that drafted; name: the id of the row; None: any
    """

    tokens: list[int]
    num_prompt: int
    end: int | None
    finish: str
    sampling: Sampling
    accepted: list[int]
    drafted: int
    messages: list[dict] | None = None
    prompt: str | None = None
    text: str | None = None
    metadata: Any = None
    seed: int | None = None
    grammar: dict | None = None
    thinking: bool | None = None
    tools: list[dict] | None = None
    head: str | None = None
    name: str | None = None

    @property
    def conversation(self) -> str:
        """The id that all turns of a conversation share; of a bare prompt without a given one, a digest of its text."""
        if given := self._find("conversation"):
            return str(given)[:LONGEST_NAME]
        start: Any = self.prompt
        if self.messages:
            roles = [message["role"] for message in self.messages]
            start = self.messages[: roles.index("user") + 1] if "user" in roles else self.messages
        return hashlib.sha256(json.dumps(start).encode()).hexdigest()[:16]

    @property
    def tags(self) -> list[str]:
        given = self._find("tags") or []
        given = given.split(",") if isinstance(given, str) else given
        return [str(tag).strip()[:LONGEST_NAME] for tag in given if str(tag).strip()] if isinstance(given, list) else []

    def decode(self, tokenizer: PreTrainedTokenizerBase) -> "Exchange":
        """The same with the texts of a bare prompt of which only the ids were given."""
        if self.messages is not None or self.prompt is not None:
            return self
        said = self.tokens[self.num_prompt : None if self.end is None else -1]
        text = str(tokenizer.decode(said)) if self.text is None else self.text
        return dataclasses.replace(self, prompt=str(tokenizer.decode(self.tokens[: self.num_prompt])), text=text)

    def _find(self, name: str) -> Any:
        return self.metadata.get(name) if isinstance(self.metadata, dict) else None


class Recorder:
    """Appends rows to a file of a folder, in a thread of its own. No failure of it reaches those who answer.

    folder: is made if it is missing, readable for its owner only
    rate: share of the conversations; all turns of a conversation are recorded, or none
    max_bytes: of all files in the folder; recording stops when the next row would exceed it
    tags: of every row, behind those of its request

    A damaged last line, which a killed writer leaves behind, is cut off, and that is logged. Raises ValueError if the folder
    cannot be used. If a row cannot be written, or the folder is full, recording stops, which is logged once.
    """

    def __init__(self, folder: str | Path, *, rate: float = 1.0, max_bytes: int = 1 << 30, tags: Sequence[str] = ()):
        if not 0 <= rate <= 1:
            raise ValueError(f"record_rate={rate} must be a share from 0 to 1.")
        if max_bytes < 1000:
            raise ValueError(f"record_max_bytes={max_bytes} must be room for some rows: give 1000000 or more.")
        self.folder, self.rate, self.max_bytes, self.tags = Path(folder), rate, max_bytes, tags
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.origin: dict[str, str | None] = {}  # fields of every row
        self.stopped = self.closed = False  # by a failure; by `close`
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = filelock.FileLock(
                self.folder / ".lock", thread_local=False
            )  # `close` may come from any thread
            self._lock.acquire(timeout=0)
            self.path = (list_files(self.folder) or [self.folder / "traffic-000001.jsonl"])[-1]
            self.path.touch(mode=0o600)
            if cut := row_files.cut_damaged_end(self.path):
                LOG.warning("%s ended with a damaged line, which was cut off (%d bytes).", self.path, cut)
        except filelock.Timeout:
            raise ValueError(f"Another recorder writes in {folder}: choose another folder.") from None
        except (OSError, NotImplementedError) as error:  # the second: filelock, where a file system has no locks
            raise ValueError(f"Nothing can be recorded in {folder} ({error}): choose another folder.") from error
        self._thread = ThreadPoolExecutor(1, "recorder")  # a program that ends waits for what is left
        self._waiting, self._guard = 0, threading.Lock()
        self._said: set[str] = set()

    def set_origin(self, source: str, target: Target, tokenizer: PreTrainedTokenizerBase) -> None:
        """Of the rows that follow. source: server or generate; tokenizer: a copy that nothing else uses"""
        self.tokenizer = tokenizer
        self.origin = {
            "tokenizer": datastore.fingerprint(tokenizer),
            "target": target.name,
            "target_fingerprint": target.fingerprint(),
            "source": source,
        }

    @property
    def alive(self) -> bool:
        return not (self.stopped or self.closed)

    def record(self, exchange: Exchange) -> None:
        """Returns at once. The lists must not be changed any more."""
        with self._guard:
            if not self.alive:
                return
            if self._waiting < MOST_WAITING:
                self._waiting += 1
                row = {"time": time.time(), **self.origin}
                self._thread.submit(self._write, exchange, row, self.tokenizer)
                return
        self._say("slow", f"Rows come faster than they are written: those beyond {MOST_WAITING:,} are dropped.")

    def close(self) -> None:
        """Writes what waits, and ends."""
        with self._guard:
            self.closed = True
        self._thread.shutdown()
        self._lock.release()

    def flush(self) -> None:
        """Waits until the rows so far are written."""
        self._thread.submit(lambda: None).result()

    def _write(self, exchange: Exchange, row: dict, tokenizer: PreTrainedTokenizerBase | None) -> None:
        """row: the fields that the exchange does not know"""
        try:
            assert tokenizer is not None, "set_origin comes first"
            exchange = exchange.decode(tokenizer)
            if self.stopped or not self._chooses(exchange.conversation):
                return
            line = json.dumps(row | self._make_row(exchange), ensure_ascii=False, default=str) + "\n"
            length = len(line.encode())  # half a surrogate pair, which JSON can hold, is no text
        except Exception as error:
            self._say(type(error).__name__, f"A row was not recorded ({type(error).__name__}: {error}).")
            return
        finally:
            with self._guard:
                self._waiting -= 1
        try:
            self.path.touch(mode=0o600)  # if it was moved away
            if length + sum(path.stat().st_size for path in list_files(self.folder)) > self.max_bytes:
                raise ValueError(f"the folder has record_max_bytes={self.max_bytes}: move its files away")
            files.append(self.path, line, synced=False)
        except (OSError, ValueError) as error:
            self.stopped = True
            self._say("stopped", f"Recording has stopped ({error}). Answers go on; start again to record.")

    def _make_row(self, exchange: Exchange) -> dict:
        tags = list(dict.fromkeys([*exchange.tags, *self.tags]))
        messages = exchange.messages and [*exchange.messages, {"role": "assistant", "content": exchange.text}]
        return {
            "id": exchange.name or uuid.uuid4().hex,
            "conversation": exchange.conversation,
            "category": tags[0] if tags else CATEGORY,
            "tags": tags,
            "messages": messages,
            "texts": None if exchange.prompt is None else [exchange.prompt, exchange.text],
            "tokens": exchange.tokens,
            "prompt_tokens": exchange.num_prompt,
            "ids": "given",
            **dataclasses.asdict(exchange.sampling),
            "seed": exchange.seed,
            "grammar": exchange.grammar,
            "other_law": False,
            "finish": exchange.finish,
            "thinking": exchange.thinking,
            **({"tools": exchange.tools} if exchange.tools else {}),
            "rounds": len(exchange.accepted),
            "drafted": exchange.drafted,
            "accepted": exchange.accepted,
            "head": exchange.head,
        }

    def _chooses(self, conversation: str) -> bool:
        digest = hashlib.sha256(conversation.encode("utf-8", "replace")).digest()
        return int.from_bytes(digest[:8], "big") < self.rate * 2**64

    def _say(self, kind: str, sentence: str) -> None:
        """Logs a sentence, the first of each kind only."""
        if kind not in self._said:
            self._said.add(kind)
            LOG.warning("%s: %s", self.folder, sentence)


def allows_recording(headers: Mapping[str, str], store: Any) -> bool:
    """Whether the client of a request lets it be recorded. store: the field of OpenAI; False: it does not"""
    return store is not False and headers.get(OPT_OUT, "").strip().lower() != "false"


def list_files(folder: Path) -> list[Path]:
    """The files of recorded rows in a folder, oldest first."""
    return sorted(
        (path for path in folder.glob("traffic-*.jsonl") if NAME.fullmatch(path.name)),
        key=lambda path: int(path.stem[8:]),
    )


def read_rows(folder: str | Path) -> Iterator[dict]:
    """Yields the rows of all files, oldest first. Damaged lines are skipped, with a warning at the end that counts them.

    Raises ValueError if the folder has no such files.
    """
    paths, damaged = list_files(Path(folder)), 0
    if not paths:
        raise ValueError(
            f"{folder} has no recorded conversations (traffic-000001.jsonl, ...): give the folder of record=."
        )
    for _, row in read_lines(paths):
        damaged += row is None
        if row is not None:
            yield row
    if damaged:
        warnings.warn(f"{folder}: {damaged} damaged lines were skipped.", stacklevel=2)


def read_lines(paths: list[Path]) -> Iterator[tuple[str, dict | None]]:
    """Yields where a line is and its row, None for a damaged one. A last line without its end is being written: it is left out."""
    for path in paths:
        yield from ((f"{path.name}:{number}", row) for number, row in row_files.read_own_lines(path))
