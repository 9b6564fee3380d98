"""Rows to adapt a head to: recorded answers, those written for the purpose, and old ones; and how they are split."""

import collections
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdec.measuring import replay
from specdec.target.fingerprint import VERSION, Fingerprint
from specdec.text import conversations as data
from specdec.text.messages import read_arguments, select_variables, write_arguments
from specdec.tools.server import record


class TooFewAnswers(ValueError):
    """There are not enough rows yet; more may come."""


# Rows


@dataclass(frozen=True)
class RecordedAnswer(replay.AnsweredPrompt):
    """One answer of the target.

    time: when it was written, in seconds; arguments: of the chat template of its prompt; target_fingerprint: of the weights that wrote it; None: not known
    """

    id: str
    conversation: str
    time: float
    target_fingerprint: str | None = None
    category: str = "all"
    arguments: dict = field(default_factory=dict)

    def to_row(self, tokenizer: str) -> dict:
        """As train.py reads it. tokenizer: `datastore.fingerprint`"""
        row = {**asdict(self), "tokens": self.prompt + self.answer, "prompt_tokens": len(self.prompt)}
        del row["prompt"], row["answer"], row["arguments"]
        return {**row, **write_arguments(self.arguments), "tokenizer": tokenizer}

    @classmethod
    def from_row(cls, row: dict, *, default_id: str = "") -> "RecordedAnswer":
        """Of a row with token ids. place: its id, if it has none. Raises KeyError, TypeError, ValueError for another."""
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


Answers = list[RecordedAnswer]


@dataclass(frozen=True)
class TrafficSource:
    """Whose answers are wanted. tokenizer: `datastore.fingerprint`; target: its name

    read: gives the target's fingerprint from its files, for rows of another version
    """

    tokenizer: str
    target: str
    target_fingerprint: str | None = None
    read_fingerprint: Callable[[], Fingerprint] | None = None

    def accepts_writer(self, row: dict) -> bool:
        """By fingerprints, or by names where one is unknown, or of a file of llama.cpp. A row may leave out its target."""
        stored, expected = row.get("target_fingerprint"), self.target_fingerprint
        if stored is not None and expected is not None and "-gguf-" not in f"{stored} {expected}":
            same_form = str(stored).startswith(VERSION) == expected.startswith(VERSION)
            fingerprint = (
                Fingerprint.from_text(expected)
                if same_form or self.read_fingerprint is None
                else self.read_fingerprint()
            )
            if fingerprint.covers_layers(str(stored)):
                return fingerprint.matches(str(stored))
        return row.get("target") is None or Path(str(row["target"])).name == Path(self.target).name

    def parse_row(self, row: dict | None, *, location: str) -> RecordedAnswer | str:
        """The answer in a row of traffic, or why it is left out."""
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
    """-> the answers in a folder of traffic, in the order of their times; how many rows were left out, and why, in words.

    A last line without its end is being written, and is not looked at.
    Raises ValueError if there is no such folder, TooFew if it has no row that can be used.
    """
    if not folder.is_dir():
        raise ValueError(f"traffic={folder} is not a folder: give the one that recorded answers are written to.")
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(".jsonl"))
    parsed = [source.parse_row(row, location=place) for place, row in record.read_lines(paths)]
    left_out = collections.Counter(each for each in parsed if isinstance(each, str))
    reasons = " and ".join(f"{num} {reason}" for reason, num in left_out.items())
    answers = [answer for answer in parsed if isinstance(answer, RecordedAnswer)]
    if not answers:
        raise TooFewAnswers(
            f"traffic={folder} has no row of {source.target} that can be used: {reasons or 'there are none'}. Rows need token ids "
            "of this target (tokens, prompt_tokens, tokenizer, target) and a time."
        )
    return sorted(answers, key=lambda answer: answer.time), reasons


def read_written(path: Path, source: TrafficSource, ends: Iterable[float]) -> tuple[Answers, str]:
    """-> the answers to a file of prompts, as scripts/answer.py writes them; how many are left out, and why, in words

    Their `time` says which adaptation came first.

    ends: numbers of rows that earlier adaptations ended with; answers of one adaptation are equally new
    """
    lines = list(record.read_lines([path]))
    ends = sorted({*ends, float(len(lines))})
    answers: Answers = []
    left_out: collections.Counter[str] = collections.Counter()
    for number, (location, row) in enumerate(lines, start=1):
        time = next(end for end in ends if number <= end)
        name = str((row or {}).get("id")).rpartition("@")[0]
        answer = source.parse_row(row and {**row, "time": time, "conversation": name}, location=location)
        if isinstance(answer, RecordedAnswer):
            answers.append(answer)
        else:
            left_out[answer] += 1
    return answers, " and ".join(f"{num} {reason}" for reason, num in left_out.items())


def read_answers(path: Path) -> Answers:
    """A file that `to_lines` has written. Raises ValueError if it is damaged."""
    try:
        return [RecordedAnswer.from_row(json.loads(line)) for line in path.read_bytes().splitlines()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}): take another copy of it.") from None


def to_lines(answers: Iterable[RecordedAnswer], tokenizer: str) -> str:
    """The content of a file of rows."""
    return "".join(json.dumps(answer.to_row(tokenizer), ensure_ascii=False) + "\n" for answer in answers)


def count_tokens(answers: Iterable[RecordedAnswer]) -> int:
    """Of the answers, without their prompts."""
    return sum(len(answer.answer) for answer in answers)


def split_newest(answers: Answers, share: float) -> tuple[Answers, Answers]:
    """-> answers to train on, and those of the newest conversations. A conversation is as new as its newest answer; those
    that are equally new are drawn.

    share: of the conversations that are held out. Training loses the answers to prompts that are held out too.
    Raises TooFew if nothing is left to train on.
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
            f"{len(order)} conversations, of which {len(heldout_names)} are held out, leave nothing to train on: record more, "
            "lower heldout_share=, or look whether all of them have the same prompt."
        )
    return training, heldout


def drop_known_answers(answers: Iterable[RecordedAnswer], known_answers: Iterable[RecordedAnswer]) -> Answers:
    """The answers whose prompt and whose conversation is none of the known ones."""
    known_answers = list(known_answers)
    prompts, conversations = (
        {tuple(known_answer.prompt) for known_answer in known_answers},
        {each.conversation for each in known_answers},
    )
    return [
        answer for answer in answers if tuple(answer.prompt) not in prompts and answer.conversation not in conversations
    ]


def limit_tokens(answers: Iterable[RecordedAnswer], max_tokens: int) -> Answers:
    """The first answers, up to the one that exceeds so many tokens."""
    limited: Answers = []
    total = 0
    for answer in answers:
        total += len(answer.answer)
        if total > max_tokens:
            break
        limited.append(answer)
    return limited


def draw_old_answers(rows: Iterable[dict], tokenizer: PreTrainedTokenizerBase) -> Iterator[RecordedAnswer]:
    """Answers that the head was trained on before, in an order that follows from their ids alone.

    rows: as of `reading.load_conversations`; each is encoded when it is needed
    """
    order = sorted(rows, key=lambda row: _hash_name(row["id"]))
    return (answer for row in order if (answer := encode_answer(tokenizer, row)) is not None)


def _hash_name(name: str) -> bytes:
    """The place of a name in an order that is random, and always the same."""
    return hashlib.sha256(f"0 {name}".encode()).digest()


def encode_answer(tokenizer: PreTrainedTokenizerBase, row: dict) -> RecordedAnswer | None:
    """The last answer of a row of `reading.load_conversations`; None if it has fewer than two tokens.

    Answers to one prompt, which scripts/answer.py calls PROMPT@TEMPERATURE, are one conversation.
    """
    encoded = data.encode(tokenizer, row)
    start, stop = data.find_last_answer(encoded)
    tokens: dict = {"tokens": encoded.tokens[:stop], "prompt_tokens": start}
    tokens["conversation"] = row.get("conversation") or f"old {encoded.id.rpartition('@')[0] or encoded.id}"
    return RecordedAnswer.from_row({**row, **tokens}, default_id=encoded.id) if stop - start > 1 else None
