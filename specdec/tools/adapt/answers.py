"""Rows to adapt a head to: recorded answers, answers to prompts, and old ones; and the split of them."""

import collections
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdec.core.wording import format_count
from specdec.measuring import replay
from specdec.target.fingerprint import Fingerprint
from specdec.text import conversations as data
from specdec.text.messages import read_arguments, select_variables, write_arguments
from specdec.tools.server import record


class TooFewAnswers(ValueError):
    """There are not enough rows yet; more may come."""


# Rows


@dataclass(frozen=True)
class RecordedAnswer(replay.AnsweredPrompt):
    """One answer of the target.

    time: seconds since 1970; arguments: variables of the chat template
    target_fingerprint: fingerprint of the weights that wrote it; None where it is not known
    """

    id: str
    conversation: str
    time: float
    target_fingerprint: str | None = None
    category: str = "all"
    arguments: dict = field(default_factory=dict)

    def to_row(self, tokenizer: str) -> dict:
        """The row as train.py reads it. tokenizer: fingerprint as of token_text.digest_vocabulary"""
        row = {**asdict(self), "tokens": self.prompt + self.answer, "prompt_tokens": len(self.prompt)}
        del row["prompt"], row["answer"], row["arguments"]
        return {**row, **write_arguments(self.arguments), "tokenizer": tokenizer}

    @classmethod
    def from_row(cls, row: dict, *, default_id: str = "") -> "RecordedAnswer":
        """The answer of a row with token ids. default_id: id of a row without one

        Raises KeyError, TypeError, ValueError for another row.
        """
        tokens, num = row["tokens"], row["prompt_tokens"]
        if not all(type(token) is int and token >= 0 for token in tokens) or type(num) is not int or num < 1:
            raise ValueError("not a list of token ids")
        name = str(default_id if row.get("id") is None else row["id"])
        return cls(
            id=name,
            conversation=str(name if row.get("conversation") is None else row["conversation"]),
            time=float(row.get("time") or 0.0),
            category=str(row.get("category") or "all"),
            arguments=select_variables(read_arguments(row)),
            temperature=float(row.get("temperature") or 0.0),
            prompt=tokens[:num],
            answer=tokens[num:],
            target_fingerprint=None if row.get("target_fingerprint") is None else str(row["target_fingerprint"]),
        )

    def cut(self, length: int) -> "RecordedAnswer":
        """The answer with at most `length` tokens of it and its prompt."""
        return replace(self, answer=self.answer[: length - len(self.prompt)])


Answers = list[RecordedAnswer]


@dataclass(frozen=True)
class TrafficSource:
    """The target whose answers are wanted.

    tokenizer: fingerprint as of token_text.digest_vocabulary; target: name
    """

    tokenizer: str
    target: str
    target_fingerprint: str | None = None

    def accepts_writer(self, row: dict) -> bool:
        """Whether the target wrote a row: by fingerprints, or by names where one is unknown or of a file of llama.cpp.

        A row may leave out its target.
        """
        stored, expected = row.get("target_fingerprint"), self.target_fingerprint
        if stored is not None and expected is not None and "-gguf-" not in f"{stored} {expected}":
            fingerprint = Fingerprint.from_text(expected)
            if fingerprint.is_comparable(str(stored)):
                return fingerprint.matches(stored)
        return row.get("target") is None or Path(str(row["target"])).name == Path(self.target).name

    def parse_row(self, row: dict | None, *, location: str) -> RecordedAnswer | str:
        """The answer in a row of traffic, or the reason for which it is left out. location: name of a row without id"""
        if row is None:
            return "damaged"
        if any(row.get(key) is None for key in ("tokens", "prompt_tokens", "time")):
            return "without token ids or a time"
        if row.get("tokenizer") != self.tokenizer or not self.accepts_writer(row):
            return "of another target or tokenizer"
        try:
            answer = RecordedAnswer.from_row(row, default_id=location)
        except (ValueError, TypeError, KeyError, RecursionError):
            return "damaged"
        return answer if len(answer.answer) > 1 else "shorter than two tokens"


def read_traffic(folder: Path, source: TrafficSource) -> tuple[Answers, str]:
    """The answers in a folder of traffic by time, and in words the rows that were left out.

    A last line without its end is still being written, and is not read.
    Raises ValueError if there is no such folder, TooFewAnswers if it has no row that can be used.
    """
    if not folder.is_dir():
        raise ValueError(f"traffic={folder} is not a folder: give the one that recorded answers are written to.")
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(".jsonl"))
    parsed = [source.parse_row(row, location=location) for location, row in record.read_lines(paths)]
    answers, reasons = split_parsed(parsed)
    if not answers:
        raise TooFewAnswers(
            f"traffic={folder} has no row of {source.target} that can be used: {reasons or 'there are none'}. Rows "
            "need token ids of this target (tokens, prompt_tokens, tokenizer, target) and a time."
        )
    return sorted(answers, key=lambda answer: answer.time), reasons


def read_written(path: Path, source: TrafficSource, ends: Iterable[float]) -> tuple[Answers, str]:
    """The answers to a file of prompts, as scripts/answer.py writes them, and in words the rows that were left out.

    Their `time` is the number of rows with which their adaptation ended: answers of one adaptation are equally new.

    ends: numbers of rows with which earlier adaptations ended
    """
    lines = list(record.read_lines([path]))
    ends = sorted({*ends, float(len(lines))})
    parsed = []
    for number, (location, row) in enumerate(lines, start=1):
        if row:
            name = str(row.get("id")).rpartition("@")[0]
            row = {**row, "time": next(end for end in ends if number <= end), "conversation": name}
        parsed.append(source.parse_row(row, location=location))
    return split_parsed(parsed)


def split_parsed(parsed: list[RecordedAnswer | str]) -> tuple[Answers, str]:
    """The answers among parsed rows, and in words the reasons for which the others are left out."""
    left_out = collections.Counter(reason for reason in parsed if isinstance(reason, str))
    reasons = " and ".join(f"{num} {reason}" for reason, num in left_out.items())
    return [answer for answer in parsed if isinstance(answer, RecordedAnswer)], reasons


def read_answers(path: Path) -> Answers:
    """Reads a file that `to_lines` has written. Raises ValueError if it is damaged."""
    try:
        return [RecordedAnswer.from_row(json.loads(line)) for line in path.read_bytes().splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): take another copy of it.") from None


def to_lines(answers: Iterable[RecordedAnswer], tokenizer: str) -> str:
    """The content of a file of rows. tokenizer: fingerprint as of token_text.digest_vocabulary"""
    return "".join(json.dumps(answer.to_row(tokenizer), ensure_ascii=False) + "\n" for answer in answers)


def count_tokens(answers: Iterable[RecordedAnswer]) -> int:
    """The tokens of the answers, without their prompts."""
    return sum(len(answer.answer) for answer in answers)


def split_newest(answers: Answers, share: float) -> tuple[Answers, Answers]:
    """Answers to train on, and those of the newest conversations, which are held out.

    A conversation is as new as its newest answer; equally new ones are drawn. Answers to prompts that are held out are
    not trained on.

    share: share of the conversations that are held out
    Raises TooFewAnswers if nothing is left to train on.
    """
    newest: dict[str, float] = {}
    for answer in answers:
        newest[answer.conversation] = max(answer.time, newest.get(answer.conversation, answer.time))
    order = sorted(newest, key=lambda name: (newest[name], _hash_name(name)))
    heldout_names = set(order[len(order) - max(1, round(share * len(order))) :])
    heldout = [answer for answer in answers if answer.conversation in heldout_names]
    training = drop_known_answers(answers, heldout)
    if not training:
        raise TooFewAnswers(
            f"Nothing is left to train on, with {len(heldout_names)} of {format_count(len(order), 'conversation')} "
            "held out: record more, lower heldout_share=, or look whether all of them have the same prompt."
        )
    return training, heldout


def drop_known_answers(answers: Iterable[RecordedAnswer], known_answers: Iterable[RecordedAnswer]) -> Answers:
    """The answers whose prompt and conversation differ from all known ones."""
    known_answers = list(known_answers)
    prompts, conversations = (
        {tuple(known_answer.prompt) for known_answer in known_answers},
        {each.conversation for each in known_answers},
    )
    return [
        answer for answer in answers if tuple(answer.prompt) not in prompts and answer.conversation not in conversations
    ]


def limit_tokens(answers: Iterable[RecordedAnswer], max_tokens: int) -> Answers:
    """The first answers, as long as they have at most `max_tokens` tokens together."""
    limited: Answers = []
    total = 0
    for answer in answers:
        total += len(answer.answer)
        if total > max_tokens:
            break
        limited.append(answer)
    return limited


def draw_old_answers(rows: Iterable[dict], tokenizer: PreTrainedTokenizerBase) -> Iterator[RecordedAnswer]:
    """Yields the answers of rows in an order that follows from their ids alone. Rows are encoded one after the other.

    rows: rows as of `reading.load_conversations`
    """
    order = sorted(rows, key=lambda row: _hash_name(row["id"]))
    return filter(None, (encode_answer(tokenizer, row) for row in order))


def _hash_name(name: str) -> bytes:
    """The key of a name in an order that is random, and always the same."""
    return hashlib.sha256(f"0 {name}".encode()).digest()


def encode_answer(tokenizer: PreTrainedTokenizerBase, row: dict) -> RecordedAnswer | None:
    """The last answer of a row of `reading.load_conversations`; None for one of fewer than two tokens.

    Answers to one prompt, which scripts/answer.py calls PROMPT@TEMPERATURE, are one conversation.
    """
    encoded = data.encode(tokenizer, row)
    start, stop = data.find_last_answer(encoded)
    tokens: dict = {"tokens": encoded.tokens[:stop], "prompt_tokens": start}
    tokens["conversation"] = row.get("conversation") or f"old {encoded.id.rpartition('@')[0] or encoded.id}"
    return RecordedAnswer.from_row({**row, **tokens}, default_id=encoded.id) if stop - start > 1 else None
