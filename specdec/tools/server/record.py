"""Records conversations that are served, as rows to train on (docs/adapting.md). Nothing is recorded unless asked for.

A recorder appends whole rows to a file of its own, traffic-000001.jsonl, ..., in a folder.
"""

import dataclasses
import hashlib
import json
import logging
import re
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.core import files, row_files
from specdec.core.answer_text import TextDecoder
from specdec.core.sampling import Sampling
from specdec.target.model import Target
from specdec.text import token_text

LOG = logging.getLogger(__name__)
LONGEST_NAME = 200  # characters of a conversation's id, which each of its rows holds
NAME = re.compile(r"traffic-(\d{6,})\.jsonl")


@dataclass(frozen=True)
class Exchange:
    """A request and its answer, which has ended.

    tokens: ids of the prompt and of the answer; num_prompt: tokens of the prompt
    accepted: accepted drafts of each round; drafted: drafts of all rounds
    fields: further fields of the row: `finish`, `grammar`, `head`, id, seed, chat_template_kwargs and tools
    text: text of the answer
    messages: conversation up to the answer; None for a bare prompt
    conversation: id by the client; None: a digest of the conversation's beginning
    """

    tokens: list[int]
    num_prompt: int
    sampling: Sampling
    accepted: list[int]
    drafted: int
    fields: dict[str, Any]
    text: str
    messages: list[dict] | None = None
    conversation: Any = None


class Recorder:
    """Appends rows to a new file of a folder.

    folder: folder that is made if it is missing, readable for its owner alone

    Raises ValueError if the folder cannot be used. If a row cannot be written, recording stops, which is logged once,
    and answers go on.
    """

    def __init__(self, folder: str | Path):
        self.folder, self.stopped = Path(folder), False
        self.decoder: TextDecoder | None = None
        self.origin: dict[str, str | None] = {}  # fields of every row
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            matches = [NAME.fullmatch(path.name) for path in self.folder.iterdir()]
            numbers = [int(match[1]) for match in matches if match]
            self.path = self.folder / f"traffic-{max(numbers, default=0) + 1:06}.jsonl"
            self.path.touch(mode=0o600, exist_ok=False)
        except OSError as error:
            raise ValueError(f"Nothing can be recorded in {folder} ({error}): choose another folder.") from error

    def set_origin(self, target: Target, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets the target and the tokenizer that later rows name."""
        self.decoder = TextDecoder.from_tokenizer(tokenizer, special=True)
        self.origin = {
            "tokenizer": token_text.digest_vocabulary(tokenizer),
            "target": target.name,
            "target_fingerprint": target.fingerprint(),
            "source": "server",
        }

    def record(self, exchange: Exchange) -> None:
        """Writes a row, unless recording has stopped."""
        if self.stopped:
            return
        try:
            self.path.touch(mode=0o600)  # if it was moved away
            line = json.dumps(self._make_row(exchange), ensure_ascii=False, default=str) + "\n"
            files.append_text(self.path, line, synced=False)
        except Exception as error:  # answers go on, whatever it is
            self.stopped = True
            sentence = "%s: recording has stopped (%s: %s). Answers go on; start again to record."
            LOG.warning(sentence, self.folder, type(error).__name__, error)

    def _make_row(self, exchange: Exchange) -> dict:
        text, num, decoder = exchange.text, exchange.num_prompt, self.decoder
        assert decoder is not None, "set_origin comes first"
        content: dict[str, list | None] = {"messages": None, "texts": None}
        if exchange.messages is not None:
            content["messages"] = [*exchange.messages, {"role": "assistant", "content": text}]
        else:
            content["texts"] = [decoder.text(exchange.tokens[:num]), text]
        return {
            "id": uuid.uuid4().hex,
            "time": time.time(),
            **self.origin,
            "conversation": _name_conversation(exchange.conversation, exchange.messages or exchange.tokens[:num]),
            "category": "traffic",
            **content,
            "tokens": exchange.tokens,
            "prompt_tokens": num,
            **dataclasses.asdict(exchange.sampling),
            "seed": None,
            "rounds": len(exchange.accepted),
            "drafted": exchange.drafted,
            "accepted": exchange.accepted,
            **exchange.fields,
        }


def _name_conversation(client_id: Any, start: list) -> str:
    """The id that all turns of a conversation share.

    It is the client's id, or else a digest of the messages up to the first one of a user, or of the bare prompt.
    """
    if client_id:
        return str(client_id)[:LONGEST_NAME]
    users = [index for index, message in enumerate(start) if isinstance(message, dict) and message["role"] == "user"]
    start = start[: users[0] + 1] if users else start
    return hashlib.sha256(json.dumps(start).encode()).hexdigest()[:16]


def read_lines(paths: list[Path]) -> Iterator[tuple[str, dict | None]]:
    """Yields the location and the row of each line, None for a damaged one.

    A last line without its end is still being written, and is left out.
    """
    for path in paths:
        yield from ((f"{path.name}:{number}", row) for number, row in row_files.read_own_lines(path))
