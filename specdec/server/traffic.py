"""Records conversations that are served, as rows to train on. Nothing is recorded unless somebody asks for it. docs/traffic.md"""

import copy
import dataclasses
import hashlib
import importlib
import json
import logging
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.core import token_text
from specdec.proposers import datastore
from specdec.server.traffic_files import TrafficFiles
from specdec.server.traffic_files import read as read

LOG = logging.getLogger(__name__)
MOST_WAITING = 1_000  # rows that wait to be written; further ones are dropped
MOST_BYTES = 64 << 20  # of the rows that wait, roughly; a longer one waits alone
LONGEST_NAME = 200  # characters of a conversation's id and of a tag
OPT_OUT = "x-record"  # a request with this header and the value `false` is not recorded
CATEGORY = "traffic"
Hook = Callable[[dict], dict | None]


@dataclass(frozen=True)
class Recording:
    """What is recorded, and where. Raises ValueError for settings that cannot be.

    folder: gets the files traffic-000001.jsonl, ..., and is made if it is missing
    rate: share of the conversations; all turns of a conversation are recorded, or none
    max_file_bytes: of one file, and at most a quarter of max_bytes
    max_bytes: of all files; the oldest are deleted
    redact: called with each row -> the row to write, or None to drop it
    tags: of every row, behind those of its request
    """

    folder: Path
    rate: float = 1.0
    max_file_bytes: int = 64 << 20
    max_bytes: int = 1 << 30
    redact: Hook | None = None
    tags: tuple[str, ...] = ()

    def __post_init__(self):
        if not 0 <= self.rate <= 1:
            raise ValueError(f"record_rate={self.rate} must be a share from 0 to 1.")
        if self.max_file_bytes < 1 or self.max_bytes < 4:
            raise ValueError(f"record_max_bytes={self.max_bytes} must be room for some rows: give 1000000 or more.")


@dataclass(frozen=True)
class Origin:
    """Where rows come from. source: server, generate or proxy; head: name of the checkpoint that drafts"""

    source: str
    target: str | None = None
    target_fingerprint: str | None = None
    head: str | None = None


@dataclass(frozen=True)
class Asked:
    """A request.

    messages: the conversation up to the answer; None: a bare prompt
    prompt: the text of a bare prompt; None: it is not known
    sampling: temperature, top_k, top_p, repetition_penalty, as far as they are known
    other_law: whether answers are drawn by more than the sampling settings and the grammar, such as by min_p
    own_prompt: whether the ids of the prompt do not follow from its texts, such as with a template of the request's own
    metadata: of the request, with `conversation` (a text) and `tags` (a comma list or a list) if the client gives them
    """

    messages: list[dict] | None
    prompt: str | None
    sampling: dict[str, Any]
    metadata: Any = None
    seed: int | None = None
    grammar: Any = None
    thinking: bool | None = None
    tools: list[dict] | None = None
    other_law: bool = False
    own_prompt: bool = False

    def conversation(self, tokens: list[int] | None) -> str:
        """The id that all turns of a conversation share. tokens: of the row, for prompts of which nothing else is known"""
        if given := self._given("conversation"):
            return str(given)[:LONGEST_NAME]
        start: Any = tokens if self.prompt is None else self.prompt
        if self.messages:
            roles = [message["role"] for message in self.messages]
            start = self.messages[: roles.index("user") + 1] if "user" in roles else self.messages
        return hashlib.sha256(json.dumps(start).encode()).hexdigest()[:16]

    @property
    def tags(self) -> list[str]:
        given = self._given("tags") or []
        given = given.split(",") if isinstance(given, str) else given
        return [str(tag).strip()[:LONGEST_NAME] for tag in given if str(tag).strip()] if isinstance(given, list) else []

    def _given(self, name: str) -> Any:
        return self.metadata.get(name) if isinstance(self.metadata, dict) else None


@dataclass(frozen=True)
class Answered:
    """An answer that has ended.

    text: None if it is not known; finish: stop or length
    tokens: prompt and answer; None: they are made of the text; num_prompt: how many are the prompt
    end: the token behind the text of an answer that was not cut, None without one
    accepted: drafts that each round kept; None where nobody counted
    name: the id of the row; None: any
    """

    text: str | None
    finish: str
    tokens: list[int] | None
    num_prompt: int = 0
    end: int | None = None
    rounds: int | None = None
    drafted: int | None = None
    accepted: list[int] | None = None
    name: str | None = None


class Recorder:
    """Appends rows to the files of a folder, in a thread of its own. No failure of it reaches those who answer.

    origin: of the rows that follow; it may be replaced, when the head is
    tokenizer: whose ids the rows hold; a copy that nothing else uses
    encode_chat: messages, `enable_thinking` and, if there are any, tools= -> token ids, for rows whose ids must be made of their messages

    Raises ValueError if the folder cannot be used. If a row cannot be written, recording stops, which is logged once.
    """

    def __init__(
        self,
        settings: Recording,
        *,
        origin: Origin | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        encode_chat: Callable[..., list[int]] | None = None,
    ):
        self.settings, self.origin, self.tokenizer, self.encode_chat = settings, origin, tokenizer, encode_chat
        self.fingerprint = None if tokenizer is None else datastore.fingerprint(tokenizer)
        most = min(settings.max_file_bytes, settings.max_bytes // 4)
        self.files = TrafficFiles(settings.folder, max_file_bytes=most, max_bytes=settings.max_bytes)
        self.stopped = self.closed = False  # by a failure; by `close`
        self.num_written = 0
        self._thread = ThreadPoolExecutor(1, "recorder")  # a program that ends waits for what is left
        self._waiting, self._bytes, self._guard = 0, 0, threading.Lock()
        self._said: set[str] = set()

    @property
    def alive(self) -> bool:
        return not (self.stopped or self.closed)

    def record(self, asked: Asked, answered: Answered, origin: Origin | None = None) -> None:
        """Returns at once. The lists must not be changed any more. origin: of this row; None: that of all"""
        size = _size(asked, answered)
        with self._guard:
            if not self.alive:
                return
            if self._waiting < MOST_WAITING and (self._waiting == 0 or self._bytes + size <= MOST_BYTES):
                self._waiting, self._bytes = self._waiting + 1, self._bytes + size
                self._thread.submit(self._write, origin or self.origin, asked, answered, time.time(), size)
                return
        most = f"{MOST_WAITING:,} rows or {MOST_BYTES >> 20} MiB"
        self.say("slow", f"Rows come faster than they are written: those beyond {most} are dropped.")

    def close(self) -> None:
        """Writes what waits, and ends."""
        with self._guard:
            self.closed = True
        self._thread.shutdown()
        self.files.close()

    def flush(self) -> None:
        """Waits until the rows so far are written."""
        self._thread.submit(lambda: None).result()

    def _write(self, origin: Origin | None, asked: Asked, answered: Answered, now: float, size: int) -> None:
        try:
            row = self._row(origin, asked, answered, now)
            line = json.dumps(row, ensure_ascii=False, default=str) + "\n"
            line.encode()  # half a surrogate pair, which JSON can hold, is no text
        except _Dropped:
            return
        except Exception as error:
            self.say(type(error).__name__, f"A row was not recorded ({type(error).__name__}: {error}).")
            return
        finally:
            with self._guard:
                self._waiting, self._bytes = self._waiting - 1, self._bytes - size
        if self.stopped:
            return
        try:
            if self.files.append(line):
                self.num_written += 1
            else:
                self.say("room", "A row was not recorded: it is longer than a file may be, or others fill the folder.")
        except (OSError, ValueError) as error:
            self.stopped = True
            self.say("stopped", f"Recording has stopped ({error}). Answers go on; start again to record.")

    def _row(self, origin: Origin | None, asked: Asked, answered: Answered, now: float) -> dict:
        """Raises _Dropped for a row that nobody wants, and any error for one that cannot be made."""
        assert origin is not None
        tokens, num_prompt = answered.tokens, answered.num_prompt
        if asked.messages is None and asked.prompt is None and self.tokenizer is not None and tokens is not None:
            asked, answered = self._decode(asked, answered, tokens)
        conversation = asked.conversation(tokens)
        if not self._chosen(conversation):
            raise _Dropped
        tags = list(dict.fromkeys([*asked.tags, *self.settings.tags]))
        messages, texts = asked.messages, None
        if messages is not None:
            messages = [*messages, {"role": "assistant", "content": answered.text}]
        elif asked.prompt is not None:
            texts = [asked.prompt, answered.text]
        row = {
            "id": answered.name or uuid.uuid4().hex,
            "time": now,
            "conversation": conversation,
            "category": tags[0] if tags else CATEGORY,
            "tags": tags,
            "messages": messages,
            "texts": texts,
            "tokens": tokens,
            "prompt_tokens": num_prompt,
            "tokenizer": self.fingerprint,
            "ids": "given",
            "target": origin.target,
            "target_fingerprint": origin.target_fingerprint,
            **dict.fromkeys(("temperature", "top_k", "top_p", "repetition_penalty")),
            **asked.sampling,
            "seed": asked.seed,
            "grammar": asked.grammar,
            "other_law": asked.other_law,
            "finish": answered.finish,
            "thinking": asked.thinking,
            **({"tools": asked.tools} if asked.tools else {}),
            "rounds": answered.rounds,
            "drafted": answered.drafted,
            "accepted": answered.accepted,
            "head": origin.head,
            "source": origin.source,
        }
        row = self._redact(row)
        if row["tokens"] is None:
            if asked.own_prompt:
                raise ValueError("its ids do not follow from its text, so they cannot be made again")
            row |= self._encode(row, answered.end)
        return row

    def _decode(self, asked: Asked, answered: Answered, tokens: list[int]) -> tuple[Asked, Answered]:
        """The same with the texts of which only the ids were given."""
        assert self.tokenizer is not None
        said = tokens[answered.num_prompt : None if answered.end is None else -1]
        text = str(self.tokenizer.decode(said)) if answered.text is None else answered.text
        prompt = str(self.tokenizer.decode(tokens[: answered.num_prompt]))
        return dataclasses.replace(asked, prompt=prompt), dataclasses.replace(answered, text=text)

    def _chosen(self, conversation: str) -> bool:
        digest = hashlib.sha256(conversation.encode("utf-8", "replace")).digest()
        return int.from_bytes(digest[:8], "big") < self.settings.rate * 2**64

    def _redact(self, row: dict) -> dict:
        """What the hook makes of the row. If it changed the text, the old ids are left out, as they hold the old text."""
        if self.settings.redact is None:
            return row
        if row["messages"] is None and row["texts"] is None:
            raise ValueError(
                "only its token ids are known, which record_redact= cannot read: give the recorder a tokenizer"
            )
        try:
            changed = self.settings.redact(copy.deepcopy(row))
        except Exception as error:  # its message is not repeated, as it may hold what is to be kept out
            raise ValueError(f"record_redact= raised {type(error).__name__}: repair it") from None
        if changed is None:
            raise _Dropped
        if not isinstance(changed, dict) or not row.keys() <= changed.keys():
            raise ValueError("record_redact= must return the row with all of its fields, or None")
        if any(changed.get(name) != row.get(name) for name in ("messages", "texts", "tools")):
            changed["tokens"] = None
        return changed

    def _encode(self, row: dict, end: int | None) -> dict:
        """The ids of a row, made of its text. Raises ValueError if that cannot be done."""
        if self.tokenizer is None or (row["messages"] is not None and self.encode_chat is None):
            raise ValueError("its ids must be made of its text: give the recorder a tokenizer and its chat template")
        if row["messages"] is not None:
            *before, last = row["messages"]
            if not before or last.get("role") != "assistant":
                raise ValueError("its messages must be a conversation that ends with the answer")
            assert self.encode_chat is not None
            tools = {"tools": row["tools"]} if row.get("tools") else {}
            prompt, said = self.encode_chat(before, row["thinking"], **tools), last["content"]
        else:
            text, said = row["texts"]
            prompt = token_text.encode_text(self.tokenizer, text)
        answer = self.tokenizer(said, add_special_tokens=False)["input_ids"] + ([] if end is None else [end])
        if not prompt or not answer:
            raise ValueError("its prompt or its answer has no tokens")
        return {"tokens": [*prompt, *answer], "prompt_tokens": len(prompt), "ids": "retokenised"}

    def say(self, kind: str, sentence: str) -> None:
        """Logs a sentence, the first of each kind only."""
        if kind not in self._said:
            self._said.add(kind)
            LOG.warning("%s: %s", self.settings.folder, sentence)


class _Dropped(Exception):
    """A row that is not recorded, on purpose."""


def _size(asked: Asked, answered: Answered) -> int:
    """Bytes that a row takes while it waits, roughly."""
    total = 36 * (len(answered.tokens or []) + len(answered.accepted or []))  # a place in the list and a number
    left: list[Any] = [asked.messages, asked.prompt, asked.metadata, asked.grammar, asked.tools, answered.text]
    while left:
        each = left.pop()
        total += sys.getsizeof(each)
        if isinstance(each, dict):
            left += [*each.keys(), *each.values()]
        elif isinstance(each, list):
            left += each
    return total


def allowed(headers: Mapping[str, str], store: Any) -> bool:
    """Whether the client of a request lets it be recorded. store: the field of OpenAI; False: it does not"""
    return store is not False and headers.get(OPT_OUT, "").strip().lower() != "false"


def find_hook(name: str | None) -> Hook | None:
    """The function that module:function names. Raises ValueError, with what to do, if there is none."""
    if name is None:
        return None
    module, _, function = name.partition(":")
    try:
        found = vars(importlib.import_module(module))[function]
    except (ImportError, KeyError, ValueError) as error:
        raise ValueError(
            f"record_redact={name} cannot be found ({type(error).__name__}: {error}): give module:function, and put the folder "
            "of module.py on PYTHONPATH."
        ) from error
    if not callable(found):
        raise ValueError(f"record_redact={name} is no function: give one that takes a row and returns a row or None.")
    return found
