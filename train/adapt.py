"""Adapting a head to recorded answers: the rows, and the gate that decides whether the new head is used."""

import collections
import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdec.heads.base import Drafter, Head
from specdec.measuring import report as figures
from specdec.measuring.report import PromptCounts
from specdec.server import record
from train import validate
from train.data import rows as data

ENOUGH = 8  # conversations, below which no head is judged
DEPTH = 4  # drafts of the chain that heads are judged with
JUDGED = 100  # answers of new and of old rows that are judged, at most


class TooFew(ValueError):
    """There are not enough rows yet; more may come."""


# Rows


@dataclass(frozen=True)
class RecordedAnswer(validate.Written):
    """One answer of the target. time: when it was written, in seconds; target_fingerprint: of the weights that wrote it"""

    id: str
    conversation: str
    time: float
    target_fingerprint: str | None = None

    def to_row(self, tokenizer: str) -> dict:
        """As train.py reads it. tokenizer: `datastore.fingerprint`"""
        row = {**asdict(self), "tokens": self.prompt + self.answer, "prompt_tokens": len(self.prompt)}
        del row["prompt"], row["answer"]
        return {**row, "tokenizer": tokenizer}

    @classmethod
    def from_row(cls, row: dict, *, place: str = "") -> "RecordedAnswer":
        """Of a row with token ids. place: its id, if it has none. Raises KeyError, TypeError, ValueError for another."""
        tokens, num = row["tokens"], row["prompt_tokens"]
        if not all(type(token) is int and token >= 0 for token in tokens) or type(num) is not int or num < 1:
            raise ValueError("not a list of token ids")
        name = str(place if row.get("id") is None else row["id"])
        return cls(
            id=name,
            conversation=str(name if row.get("conversation") is None else row["conversation"]),
            time=float(row.get("time") or 0.0),
            temperature=float(row.get("temperature") or 0.0),
            prompt=tokens[:num],
            answer=tokens[num:],
            target_fingerprint=None if row.get("target_fingerprint") is None else str(row["target_fingerprint"]),
        )


Answers = list[RecordedAnswer]


@dataclass(frozen=True)
class TrafficSource:
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

    def parse(self, row: dict | None, *, place: str) -> RecordedAnswer | str:
        """The answer in a row of traffic, or why it is left out."""
        if row is None:
            return "damaged"
        if any(row.get(key) is None for key in ("tokens", "prompt_tokens", "time")):
            return "without token ids or a time"
        if row.get("tokenizer") != self.tokenizer or not self.wrote(row):
            return "of another target or tokenizer"
        try:
            answer = RecordedAnswer.from_row(row, place=place)
        except (ValueError, TypeError, KeyError, RecursionError):
            return "damaged"
        return answer if len(answer.answer) > 1 else "shorter than two tokens"


def read_traffic(folder: Path, wanted: TrafficSource) -> tuple[Answers, str]:
    """-> the answers in a folder of traffic, in the order of their times; how many rows were left out, and why, in words.

    A last line without its end is being written, and is not looked at.
    Raises ValueError if there is no such folder, TooFew if it has no row that can be used.
    """
    if not folder.is_dir():
        raise ValueError(f"traffic={folder} is not a folder: give the one that recorded answers are written to.")
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(".jsonl"))
    parsed = [wanted.parse(row, place=place) for place, row in record.read_lines(paths)]
    left_out = collections.Counter(each for each in parsed if isinstance(each, str))
    why = " and ".join(f"{num} {reason}" for reason, num in left_out.items())
    found = [each for each in parsed if isinstance(each, RecordedAnswer)]
    if not found:
        raise TooFew(
            f"traffic={folder} has no row of {wanted.target} that can be used: {why or 'there are none'}. Rows need token ids "
            "of this target (tokens, prompt_tokens, tokenizer, target) and a time."
        )
    return sorted(found, key=lambda answer: answer.time), why


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
    training = drop_known(answers, heldout)
    if not training:
        raise TooFew(
            f"{len(order)} conversations, of which {len(held)} are held out, leave nothing to train on: record more, "
            "lower heldout_share=, or look whether all of them have the same prompt."
        )
    return training, heldout


def drop_known(answers: Iterable[RecordedAnswer], known: Iterable[RecordedAnswer]) -> Answers:
    """The answers whose prompt and whose conversation is none of the known ones."""
    known = list(known)
    prompts, conversations = {tuple(each.prompt) for each in known}, {each.conversation for each in known}
    return [each for each in answers if tuple(each.prompt) not in prompts and each.conversation not in conversations]


def take_tokens(answers: Iterable[RecordedAnswer], most: int) -> Answers:
    """The first answers, up to the one that exceeds so many tokens."""
    found: Answers = []
    total = 0
    for answer in answers:
        total += len(answer.answer)
        if total > most:
            break
        found.append(answer)
    return found


def draw_old(rows: Iterable[dict], tokenizer: PreTrainedTokenizerBase) -> Iterator[RecordedAnswer]:
    """Answers that the head was trained on before, in an order that follows from their ids alone.

    rows: as of `reading.load_conversations`; each is encoded when it is needed
    """
    order = sorted(rows, key=lambda row: hashlib.sha256(f"0 {row['id']}".encode()).digest())
    return (answer for row in order if (answer := encode_answer(tokenizer, row)) is not None)


def encode_answer(tokenizer: PreTrainedTokenizerBase, row: dict) -> RecordedAnswer | None:
    """The last answer of a row of `reading.load_conversations`; None if it has fewer than two tokens.

    Answers to one prompt, which scripts/answer.py calls PROMPT@TEMPERATURE, are one conversation.
    """
    encoded = data.encode(tokenizer, row)
    start, stop = data.last_answer(encoded)
    tokens: dict = {"tokens": encoded.tokens[:stop], "prompt_tokens": start}
    tokens["conversation"] = row.get("conversation") or f"old {encoded.id.rpartition('@')[0] or encoded.id}"
    return RecordedAnswer.from_row({**row, **tokens}, place=encoded.id) if stop - start > 1 else None


# The gate: tau by replay, and whether the new head is taken


def choose_judged(answers: Answers, length: int) -> Answers:
    """At most JUDGED of the answers, spread over the list. length: tokens of an answer with its prompt; long answers are cut later"""
    fit = [answer for answer in answers if len(answer.prompt) + 2 <= length]
    step = max(1.0, len(fit) / JUDGED)
    return [fit[int(place * step)] for place in range(min(JUDGED, len(fit)))]


def judge(drafter: Head, answers: Answers, *, length: int, what: str) -> list[PromptCounts]:
    """What tau of each answer is made of, by replay at the temperature that it was written at.

    length: tokens of an answer with its prompt, beyond which it is cut; what: is shown
    """
    assert isinstance(drafter, Drafter)
    texts = [replace(each, answer=each.answer[: length - len(each.prompt)]) for each in answers]
    return validate.count_replays(validate.replay_texts(drafter, texts, depth=DEPTH, what=what))


@dataclass(frozen=True)
class TauChange:
    """tau of held-out answers before and after training, with 95 % intervals over conversations."""

    conversations: int
    answers: int
    tokens: int
    before: float
    before_ci: list[float]
    after: float
    after_ci: list[float]
    change: float
    change_ci: list[float]  # paired

    @classmethod
    def of(cls, answers: Answers, before: list[PromptCounts], after: list[PromptCounts]) -> "TauChange | None":
        """before, after: of each answer. None without answers."""
        if not answers:
            return None
        then, now = _by_conversation(answers, before), _by_conversation(answers, after)
        spans = [figures.interval(each, figures.tau, 0) for each in (then, now)]
        difference = figures.tau_difference(now, then)
        num = len(answers), count_tokens(answers)
        return cls(len(then), *num, figures.tau(then), spans[0], figures.tau(now), spans[1], *difference)


def _by_conversation(answers: Answers, counts: list[PromptCounts]) -> list[PromptCounts]:
    """Answers of one conversation are alike, so intervals are over conversations."""
    sums: dict[str, list[float]] = {}
    for answer, each in zip(answers, counts, strict=True):
        total = sums.setdefault(answer.conversation, [0.0, 0.0])
        total[0] += each.num_rounds
        total[1] += each.num_emitted
    return [PromptCounts(*total) for total in sums.values()]


def decide(new: TauChange, old: TauChange | None, *, tolerance: float) -> tuple[bool, list[str]]:
    """Whether the new head is taken: there are ENOUGH new conversations, tau of their answers rises, its whole interval
    above 0, and that of old answers falls by no more than a share `tolerance`.

    -> the decision, with every reason against it, or else the reason for it
    """
    low, high = new.change_ci
    rise = f"tau of the new answers changes by {new.change:+.3f} ({low:+.3f} .. {high:+.3f})"
    against = [] if low > 0 else [f"{rise}, which is not surely a rise."]
    if new.conversations < ENOUGH:  # whose interval says little
        against.append(
            f"{new.conversations} held-out conversations are too few to judge a head by: {ENOUGH} are needed."
        )
    if old and (fall := 1 - old.after / old.before) > tolerance:
        against.append(
            f"tau of old answers falls by {fall:.1%}, from {old.before:.2f} to {old.after:.2f}: more than {tolerance:.0%} "
            f"(tolerance={tolerance:g})."
        )
    kept = f"old answers fall by no more than {tolerance:.0%}"
    return not against, against or [
        f"{rise}, and {kept if old else 'there are no old answers, so what it forgot is not known'}."
    ]
