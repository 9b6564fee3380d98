"""Adapting a head to recorded answers: the rows, the gate, and the mixing of weights."""

import collections
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.heads.base import Drafter
from specdec.measuring import report as figures
from specdec.measuring.report import PromptCounts
from specdec.server import record
from train import validate
from train.data import reading
from train.data import rows as data

ALL = "all"
ENOUGH = 8  # conversations, below which neither a slice is judged nor a category of it
FEWER = 2  # times the tolerance of all old answers: what a category of them may fall
NEEDED = "Rows need token ids of this target (tokens, prompt_tokens, tokenizer, target) and a time."
UNSEEN = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]  # of rows that have token ids only
PartTable = dict[str, dict[str, Any]]  # by part: `all`, `category NAME`, `tag NAME`, `temperature T`
Tensors = dict[str, Tensor]


class TooFew(ValueError):
    """There are not enough rows yet; more may come."""


# Rows


@dataclass(frozen=True)
class RecordedAnswer:
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
        row = {**asdict(self), "tokens": self.prompt + self.answer, "prompt_tokens": len(self.prompt)}
        del row["prompt"], row["answer"]
        return {**row, "tokenizer": tokenizer}

    @classmethod
    def from_row(cls, row: dict, *, place: str) -> "RecordedAnswer":
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
            time=float(row.get("time") or 0.0),
            category=str(row.get("category") or ALL),
            tags=tuple(map(str, row.get("tags") or ())),
            temperature=float(row.get("temperature") or 0.0),
            prompt=tokens[:num],
            answer=tokens[num:],
            exact=row.get("exact", drawn and as_written),
            messages=row.get("messages") or UNSEEN,
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
        try:
            if row is None or not reading.has_ids(row):
                return "damaged" if row is None else "without token ids"
            if row.get("tokenizer") != self.tokenizer:
                return "with ids of another tokenizer"
            if not self.wrote(row):
                return "of another target"
            if row.get("time") is None:
                return "without a time"
            answer = RecordedAnswer.from_row(row, place=place)
        except (ValueError, TypeError, KeyError, RecursionError):
            return "damaged"
        return answer if len(answer.answer) > 1 else "shorter than two tokens"


def read_traffic(folder: Path, wanted: TrafficSource) -> tuple[Answers, dict[str, int]]:
    """-> the answers in a folder of traffic, in the order of their times; why rows were left out, and how many each.

    A last line without its end is being written, and is not looked at.
    Raises ValueError if there is no such folder, TooFew if it has no row that can be used.
    """
    if not folder.is_dir():
        raise ValueError(f"traffic={folder} is not a folder: give the one that recorded answers are written to.")
    paths = sorted(path for path in folder.iterdir() if path.name.endswith(".jsonl"))
    parsed = [wanted.parse(row, place=place) for place, row in record.read_lines(paths)]
    left_out = collections.Counter(each for each in parsed if isinstance(each, str))
    found = [each for each in parsed if isinstance(each, RecordedAnswer)]
    if not found:
        why = " and ".join(f"{num} {reason}" for reason, num in left_out.items()) or "there are none"
        raise TooFew(f"traffic={folder} has no row of {wanted.target} that can be used: {why}. {NEEDED}")
    return sorted(found, key=lambda answer: answer.time), dict(left_out)


def read_answers(path: Path) -> Answers:
    """A file that `to_lines` has written. Raises ValueError if it is damaged."""
    try:
        return [RecordedAnswer.from_row(json.loads(line), place="") for line in path.read_bytes().splitlines()]
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
    training = without_prompts([answer for answer in answers if answer.conversation not in held], heldout)
    if not training:
        raise TooFew(
            f"{len(order)} conversations, of which {len(held)} are held out, leave nothing to train on: record more, "
            "lower heldout_share=, or look whether all of them have the same prompt."
        )
    return training, heldout


def without_prompts(answers: Iterable[RecordedAnswer], others: Iterable[RecordedAnswer]) -> Answers:
    """Those whose prompt, and whose conversation, is none of the others'."""
    return list(filter(_unlike(others), answers))


def _unlike(others: Iterable[RecordedAnswer]) -> Callable[[RecordedAnswer], bool]:
    others = list(others)
    prompts, conversations = {tuple(other.prompt) for other in others}, {other.conversation for other in others}
    return lambda answer: tuple(answer.prompt) not in prompts and answer.conversation not in conversations


def keep_newest(answers: Answers, most: int | None) -> Answers:
    """The newest answers with at most so many tokens; answers [..] in the order of their times"""
    kept, total = len(answers), 0
    while kept and most is not None and (total := total + len(answers[kept - 1].answer)) <= most:
        kept -= 1
    return answers if most is None else answers[kept:]


class OldRows:
    """Rows that the head was trained on before, encoded when they are needed. Their order follows from the seed and their ids.

    sources: as data.train; further: answers of earlier adaptations
    """

    def __init__(
        self, sources: list[str], tokenizer: PreTrainedTokenizerBase, *, split: str | None, seed: int, further: Answers
    ):
        self.tokenizer, self.seed, self.further = tokenizer, seed, further
        self.name = f"old={','.join(sources)}"
        self.rows: list[dict | RecordedAnswer] = [
            row for source in sources for row in reading.load_conversations(source, split=split)
        ]

    def hold_out(self, num: int, *, without: Answers) -> Answers:
        """`num` rows of the sources, evenly from their categories: the same ones at every adaptation."""
        places: collections.Counter[str] = collections.Counter()
        order = []
        for row in self._drawn(self.rows):
            category = row.category if isinstance(row, RecordedAnswer) else str(row["category"])
            order.append((places[category], category, row))
            places[category] += 1
        encoded = self._encoded([row for _, _, row in sorted(order, key=lambda each: each[:2])], without)
        return [answer for _, answer in zip(range(num), encoded)]

    def sample(self, tokens: int, *, without: Answers) -> Answers:
        """Rows with so many tokens of answers, of the sources and of earlier adaptations."""
        found: Answers = []
        encoded, total = self._encoded(self._drawn([*self.rows, *self.further]), without), 0
        while total < tokens and (answer := next(encoded, None)) is not None:
            found.append(answer)
            total += len(answer.answer)
        return found

    def _drawn(self, rows: Iterable[dict | RecordedAnswer]) -> list[dict | RecordedAnswer]:
        name = lambda row: row.id if isinstance(row, RecordedAnswer) else row["id"]
        return sorted(rows, key=lambda row: hashlib.sha256(f"{self.seed} {name(row)}".encode()).digest())

    def _encoded(self, rows: Iterable[dict | RecordedAnswer], without: Answers) -> Iterator[RecordedAnswer]:
        wanted = _unlike(without)
        for row in rows:
            with reading.at(self.name):
                answer = row if isinstance(row, RecordedAnswer) else encode_answer(self.tokenizer, row)
            if answer is not None and wanted(answer):
                yield answer


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


@dataclass(frozen=True)
class Limits:
    """How much is judged. depth: of the chain; num: answers of a slice; length: tokens of an answer with its prompt"""

    depth: int
    num: int
    length: int

    def choose(self, answers: Answers) -> Answers:
        """Those that are judged, spread over the list. Too long prompts are left out; long answers are cut later."""
        fit = [answer for answer in answers if len(answer.prompt) + 2 <= self.length]
        step = max(1.0, len(fit) / self.num)
        return [fit[int(place * step)] for place in range(min(self.num, len(fit)))]

    def judge(self, drafter: Drafter, answers: Answers, *, what: str) -> list[PromptCounts]:
        """What tau is made of, of each answer, by replay at the temperature that it was written at. what: is shown"""
        texts = [
            validate.Written(each.prompt, each.answer[: self.length - len(each.prompt)], each.temperature)
            for each in answers
        ]
        return validate.count_replays(validate.replay_texts(drafter, texts, depth=self.depth, what=what))


def compare_parts(answers: Answers, before: list[PromptCounts], after: list[PromptCounts]) -> PartTable:
    """tau of all answers, each category, tag and temperature, before and after, with 95 % intervals over conversations.

    Categories, tags and temperatures that all answers have are left out.
    """
    parts: dict[str, list[int]] = {ALL: list(range(len(answers)))} if answers else {}
    for number, answer in enumerate(answers):
        temperature = f"temperature {answer.temperature:g}"
        for name in (f"category {answer.category}", *(f"tag {tag}" for tag in answer.tags), temperature):
            parts.setdefault(name, []).append(number)
    found: PartTable = {}
    for name in sorted(parts, key=lambda name: (name != ALL, name)):
        numbers = parts[name]
        if name != ALL and len(numbers) == len(answers):
            continue
        then, now = (_by_conversation(answers, counts, numbers) for counts in (before, after))
        change, span = figures.tau_difference(now, then)
        found[name] = {
            "conversations": len(then),
            "answers": len(numbers),
            "tokens": count_tokens(answers[number] for number in numbers),
            "before": figures.tau(then),
            "before_ci": figures.interval(then, figures.tau, 0),
            "after": figures.tau(now),
            "after_ci": figures.interval(now, figures.tau, 0),
            "change": change,
            "change_ci": span,
        }
    return found


def _by_conversation(answers: Answers, counts: list[PromptCounts], numbers: list[int]) -> list[PromptCounts]:
    """Answers of one conversation are alike, so intervals are over conversations."""
    sums: dict[str, list[float]] = {}
    for number in numbers:
        total = sums.setdefault(answers[number].conversation, [0.0, 0.0])
        total[0] += counts[number].num_rounds
        total[1] += counts[number].num_emitted
    return [PromptCounts(*total) for total in sums.values()]


def decide(new: PartTable, old: PartTable, *, tolerance: float) -> tuple[bool, list[str]]:
    """Whether the new head is taken: there are ENOUGH new conversations, the tau of their answers rises, its whole interval
    above 0, and nothing is forgotten (`find_forgotten`).

    -> the decision, with every reason against it, or else the reason for it
    """
    change, (low, high) = new[ALL]["change"], new[ALL]["change_ci"]
    rise = f"tau of the new answers changes by {change:+.3f} ({low:+.3f} .. {high:+.3f})"
    against = [] if low > 0 else [f"{rise}, which is not surely a rise."]
    if (num := new[ALL]["conversations"]) < ENOUGH:  # whose interval says little
        against.append(f"{num} held-out conversations are too few to judge a head by: {ENOUGH} are needed.")
    against += find_forgotten(old, tolerance)
    kept = (
        f"old answers fall by no more than {tolerance:.0%}, and no category of them by more than {FEWER * tolerance:.0%}"
        if old
        else "there are no old answers, so what it forgot is not known"
    )
    return not against, against or [f"{rise}, and {kept}."]


def find_forgotten(old: PartTable, tolerance: float) -> list[str]:
    """What fell too far: tau of all old answers by more than a share `tolerance`, that of a category with ENOUGH conversations by
    more than FEWER times as much.

    A category is measured on a part of the conversations. In two adaptations of seven categories with 24 each, the standard errors of their
    changes were 0.8 to 2.1 %: if all of them fall by 1.5 %, one falls by more than 3 % for about every second head.
    """
    found = []
    for name, part in old.items():
        fall = 1 - part["after"] / part["before"]
        if name != ALL and not (name.startswith("category ") and part["conversations"] >= ENOUGH):
            continue
        most = tolerance if name == ALL else FEWER * tolerance
        if fall > most:
            found.append(
                f"tau of old answers ({name}) falls by {fall:.1%}, from {part['before']:.2f} to {part['after']:.2f}: "
                f"more than {most:.0%} (tolerance={tolerance:g}{'' if name == ALL else f', {FEWER} times that for a category'})."
            )
    return found


# Weights between the head in use and the trained one (WiSE-FT, 2109.01903): a part of what was forgotten comes back


def mix_weights(start: Tensors, trained: Tensors, share: float) -> Tensors:
    """(1 - share) * start + share * trained, in the types of `trained`. Tensors of integers are those of `trained`.

    Raises ValueError if names or shapes differ.
    """
    if {name: each.shape for name, each in start.items()} != {name: each.shape for name, each in trained.items()}:
        raise ValueError("The trained head has other tensors than the one it comes from: give shares=1.")
    return {
        name: start[name].double().lerp(new.double(), share).to(new.dtype) if new.is_floating_point() else new
        for name, new in trained.items()
    }


def describe_share(share: float, answers: str, table: PartTable, tolerance: float) -> dict[str, Any]:
    """What a share of the trained weights forgets, as JSON. answers: whose table it is; table: {} without old answers"""
    fall = 1 - table[ALL]["after"] / table[ALL]["before"] if table else None
    return {"share": share, "answers": answers, "fall": fall, "forgotten": find_forgotten(table, tolerance)}


def try_shares(
    shares: Sequence[float], judge: Callable[[float, str], PartTable], *, tolerance: float, choosing: bool
) -> tuple[float, dict[str, PartTable], tuple[bool, list[str]], list[dict[str, Any]]]:
    """The largest share of the trained weights that forgets little enough, and what the gate says of it.

    With `choosing`, a share is judged by the gate only if it forgets little on answers that are kept for that, or is the
    last one. If the gate refuses a share for nothing but forgetting, the next smaller one is tried.

    shares: the largest first; judge(share, kind) -> the table of the held-out answers of that kind
    -> the share, the tables that the gate saw, its decision with reasons, and all looks as JSON
    """
    looks = []
    for share in shares:
        if choosing:
            looks.append(describe_share(share, "to choose by", judge(share, "mix"), tolerance))
            if looks[-1]["forgotten"] and share != shares[-1]:
                continue
        tables = {kind: judge(share, kind) for kind in ("new", "old")}
        decision = decide(tables["new"], tables["old"], tolerance=tolerance)
        looks.append(describe_share(share, "the gate's", tables["old"], tolerance))
        if (
            decision[0] or decision[1] != looks[-1]["forgotten"]
        ):  # less of the new weights helps against forgetting alone
            break
    return share, tables, decision, looks
