"""The rows of an adaptation: answers of recorded traffic and of older data, and which of them are held out."""

import collections
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec.core import row_files
from specdec.server import traffic_files
from train.data import reading
from train.data import rows as data

ENDING = ".jsonl"
UNSEEN = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]  # of rows that have token ids only


class TooFew(ValueError):
    """There are not enough rows yet; more may come."""


@dataclass(frozen=True)
class Answer:
    """One answer of the target, with what was known when it was written."""

    id: str
    conversation: str
    time: float  # seconds
    category: str
    tags: tuple[str, ...]
    temperature: float
    prompt: list[int]
    answer: list[int]
    exact: bool  # whether its ids were drawn at a known temperature, and by that alone, as replay takes it
    messages: list[dict]

    def to_row(self, tokenizer: str) -> dict:
        """As train.py reads it. tokenizer: `datastore.fingerprint`"""
        return {
            "id": self.id,
            "conversation": self.conversation,
            "time": self.time,
            "category": self.category,
            "tags": list(self.tags),
            "temperature": self.temperature,
            "exact": self.exact,
            "messages": self.messages,
            "tokens": self.prompt + self.answer,
            "prompt_tokens": len(self.prompt),
            "tokenizer": tokenizer,
        }

    @classmethod
    def of(cls, row: dict, *, place: str, time: float = 0.0) -> "Answer":
        """Of a row with token ids. place: its id, if it has none. Raises KeyError, TypeError, ValueError for another."""
        tokens, num = row["tokens"], row["prompt_tokens"]
        if not all(type(token) is int and token >= 0 for token in tokens) or type(num) is not int or num < 1:
            raise ValueError("not a list of token ids")
        name = str(place if row.get("id") is None else row["id"])
        drawn = row.get("top_k") in (None, 0, -1) and all(
            row.get(key) in (None, 1) for key in ("top_p", "repetition_penalty")
        )
        free = row.get("grammar") is None and not row.get("other_law")
        as_written = free and row.get("ids") != "retokenised" and row.get("temperature") is not None
        return cls(
            id=name,
            conversation=str(name if row.get("conversation") is None else row["conversation"]),
            time=float(row.get("time") or time),
            category=str(row.get("category") or "all"),
            tags=tuple(map(str, row.get("tags") or ())),
            temperature=float(row.get("temperature") or 0.0),
            prompt=tokens[:num],
            answer=tokens[num:],
            exact=row.get("exact", drawn and as_written),
            messages=row.get("messages") or UNSEEN,
        )


@dataclass(frozen=True)
class Source:
    """Whose answers are wanted. tokenizer: `datastore.fingerprint`; target: its name"""

    tokenizer: str
    target: str
    target_fingerprint: str | None = None

    def wrote(self, row: dict) -> bool:
        """By fingerprints, or by names where one is unknown or of quantised weights. A row may leave out its target."""
        prints = row.get("target_fingerprint"), self.target_fingerprint
        if all(each is not None and "-" not in str(each) for each in prints):
            return prints[0] == prints[1]
        return row.get("target") is None or Path(str(row["target"])).name == Path(self.target).name


def read_traffic(folder: Path, wanted: Source) -> tuple[list[Answer], dict[str, int]]:
    """-> the answers in a folder of traffic, in the order of their times; why rows were left out, and how many each.

    A last line without its end is being written, and is not looked at.
    Raises ValueError if there is no such folder, TooFew if it has no row that can be used.
    """
    if not folder.is_dir():
        raise ValueError(f"traffic={folder} is not a folder: give the one that recorded answers are written to.")
    found: list[Answer] = []
    left_out: collections.Counter[str] = collections.Counter()
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(ENDING))
    for place, row in traffic_files.read_lines(paths):
        answer = "damaged" if row is None else parse(row, wanted, place=place)
        if isinstance(answer, str):
            left_out[answer] += 1
        else:
            found.append(answer)
    if not found:
        why = " and ".join(f"{num} {reason}" for reason, num in left_out.items()) or "there are none"
        raise TooFew(f"traffic={folder} has no row of {wanted.target} that can be used: {why}. {ADVICE}")
    return sorted(found, key=lambda answer: answer.time), dict(left_out)


ADVICE = "Rows need token ids of this target (tokens, prompt_tokens, tokenizer, target) and a time."


def parse(row: dict, wanted: Source, *, place: str) -> Answer | str:
    """The answer in a row of traffic, or why it is left out."""
    try:
        if not reading.has_ids(row):
            return "without token ids"
        if row.get("tokenizer") != wanted.tokenizer:
            return "with ids of another tokenizer"
        if not wanted.wrote(row):
            return "of another target"
        if row.get("time") is None:
            return "without a time"
        answer = Answer.of(row, place=place)
    except (ValueError, TypeError, KeyError, RecursionError):
        return "damaged"
    return answer if len(answer.answer) > 1 else "shorter than two tokens"


def read_answers(path: Path) -> list[Answer]:
    """Of a file of `Answer.to_row`; none if there is no such file."""
    if not path.exists():
        return []
    return [Answer.of(row_files.parse_line(place, line), place=place) for place, line in row_files.read_lines(path)]


def to_lines(answers: Iterable[Answer], tokenizer: str) -> str:
    """The content of a file of rows."""
    return "".join(json.dumps(answer.to_row(tokenizer), ensure_ascii=False) + "\n" for answer in answers)


def num_tokens(answers: Iterable[Answer]) -> int:
    """Of the answers, without their prompts."""
    return sum(len(answer.answer) for answer in answers)


def split(answers: list[Answer], share: float) -> tuple[list[Answer], list[Answer]]:
    """-> answers to train on, and those of the newest conversations. A conversation is as new as its newest answer.

    share: of the conversations that are held out. Training loses the answers to prompts that are held out too.
    Raises TooFew if nothing is left to train on.
    """
    newest: dict[str, float] = {}
    for answer in answers:
        newest[answer.conversation] = max(answer.time, newest.get(answer.conversation, answer.time))
    order = sorted(newest, key=lambda name: (newest[name], name))
    held = set(order[len(order) - max(1, round(share * len(order))) :])
    heldout = [answer for answer in answers if answer.conversation in held]
    training = without_prompts([answer for answer in answers if answer.conversation not in held], heldout)
    if not training:
        raise TooFew(
            f"{len(order)} conversations, of which {len(held)} are held out, leave nothing to train on: record more, "
            "lower heldout_share=, or look whether all of them have the same prompt."
        )
    return training, heldout


def without_prompts(answers: Iterable[Answer], others: Iterable[Answer]) -> list[Answer]:
    """Those whose prompt, and whose conversation, is none of the others'."""
    return list(filter(unlike(others), answers))


def unlike(others: Iterable[Answer]) -> Callable[[Answer], bool]:
    """Tells whether an answer's prompt, and its conversation, is none of the others'."""
    others = list(others)
    prompts, conversations = {tuple(other.prompt) for other in others}, {other.conversation for other in others}
    return lambda answer: tuple(answer.prompt) not in prompts and answer.conversation not in conversations


def newest_tokens(answers: list[Answer], most: int | None) -> list[Answer]:
    """The newest answers with at most so many tokens; answers [..] in the order of their times"""
    kept, total = len(answers), 0
    while kept and most is not None and (total := total + len(answers[kept - 1].answer)) <= most:
        kept -= 1
    return answers if most is None else answers[kept:]


class Older:
    """Rows that the head was trained on before, encoded when they are needed. Their order follows from the seed and their ids.

    sources: as data.train; further: answers of earlier adaptations
    """

    def __init__(
        self,
        sources: list[str],
        tokenizer: PreTrainedTokenizerBase,
        *,
        split: str | None = None,
        seed: int,
        further: list[Answer],
    ):
        self.tokenizer, self.seed, self.further = tokenizer, seed, further
        self.name = f"old={','.join(sources)}"
        self.rows: list[dict | Answer] = [
            row for source in sources for row in reading.load_conversations(source, split=split)
        ]

    def hold_out(self, num: int, *, without: list[Answer]) -> list[Answer]:
        """`num` rows of the sources, evenly from their categories: the same ones at every adaptation."""
        return list(itertools.islice(self._encoded(in_turns(self._drawn(self.rows)), without), num))

    def sample(self, tokens: int, *, without: list[Answer]) -> list[Answer]:
        """Rows with so many tokens of answers, of the sources and of earlier adaptations."""
        found: list[Answer] = []
        encoded, total = self._encoded(self._drawn([*self.rows, *self.further]), without), 0
        while total < tokens and (answer := next(encoded, None)) is not None:
            found.append(answer)
            total += len(answer.answer)
        return found

    def _drawn(self, rows: Iterable[dict | Answer]) -> list[dict | Answer]:
        name = lambda row: row.id if isinstance(row, Answer) else row["id"]
        return sorted(rows, key=lambda row: hashlib.sha256(f"{self.seed} {name(row)}".encode()).digest())

    def _encoded(self, rows: list[dict | Answer], without: list[Answer]) -> Iterator[Answer]:
        wanted = unlike(without)
        for row in rows:
            with reading.at(self.name):
                answer = row if isinstance(row, Answer) else encode(self.tokenizer, row)
            if answer is not None and wanted(answer):
                yield answer


def in_turns(rows: list[Any]) -> list[Any]:
    """The rows of each category in turn."""
    groups: dict[str, list[Any]] = {}
    for row in rows:
        groups.setdefault(row.category if isinstance(row, Answer) else str(row["category"]), []).append(row)
    order = [(place, name) for name, group in groups.items() for place in range(len(group))]
    return [groups[name][place] for place, name in sorted(order)]


def encode(tokenizer: PreTrainedTokenizerBase, row: dict) -> Answer | None:
    """The last answer of a row of `reading.load_conversations`; None if it has fewer than two tokens.

    Answers to one prompt, which scripts/answer.py calls PROMPT@TEMPERATURE, are one conversation.
    """
    encoded = data.encode(tokenizer, row)
    start, stop = data.last_answer(encoded)
    tokens: dict = {"tokens": encoded.tokens[:stop], "prompt_tokens": start}
    tokens["conversation"] = row.get("conversation") or f"old {encoded.id.rpartition('@')[0] or encoded.id}"
    return Answer.of({**row, **tokens}, place=encoded.id) if stop - start > 1 else None
