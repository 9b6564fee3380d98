"""Acceptance by context: tau of rounds by the tokens before them, and by those that are of the answer.

A round that begins behind a prompt of P tokens and A tokens of the answer has the context P + A and the position A.
Buckets are powers of two of each. Their rounds and emitted tokens add up to those of the pooled tau.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy
from markupsafe import Markup

from specdec.measuring.certainty import MIN_ANSWERS, draw_questions, find_bounds
from specdec.measuring.charts import ChartCurve, chart_lines
from specdec.measuring.page import Section, Table, drop_empty_columns, format_figure

Axis = Literal["context", "answer"]
AXES: dict[Axis, str] = {"context": "tokens before a round", "answer": "tokens of the answer before a round"}
# First tokens of the second bucket: answers have a few hundred tokens, so that coarser buckets would be one
FIRST: dict[Axis, int] = {"context": 256, "answer": 32}
LAST = 32768  # first token of the last bucket, which has no end
Contexts = dict[Axis, list[dict[str, Any]]]  # fields of ContextBucket, by axis
FEW = f"Buckets of fewer than {MIN_ANSWERS} questions (n) have no interval."


@dataclass(frozen=True)
class AnswerContexts:
    """The rounds of one answer by bucket: {axis: {first token of the bucket: (rounds, emitted tokens)}}."""

    question: str
    counts: dict[Axis, dict[int, tuple[float, float]]]


@dataclass(frozen=True)
class ContextBucket:
    """The rounds of one bucket. rounds, emitted: expected numbers, where answers were replayed at a temperature

    first, end: tokens before these rounds, end not included, None: no end
    tau_ci: 95 % interval over questions; None for fewer than MIN_ANSWERS questions
    """

    first: int
    end: int | None
    questions: int
    rounds: float
    emitted: float
    tau: float
    tau_ci: list[float] | None

    @property
    def name(self) -> str:
        return name_bucket(self.first, self.end)

    def __str__(self) -> str:
        return format_figure(self.tau, self.tau_ci) + ("" if self.tau_ci else f", n {self.questions}")


def find_bucket(num: int, axis: Axis) -> int:
    """The first number of the bucket of a number of tokens."""
    return 0 if num < FIRST[axis] else min(1 << (num.bit_length() - 1), LAST)


def find_end(first: int, axis: Axis) -> int | None:
    """The end of a bucket; None of the last one."""
    if first == LAST:
        return None
    return 2 * first or FIRST[axis]


def name_bucket(first: int, end: int | None) -> str:
    """The range of tokens of a bucket, such as 256-511, or 32768- of the last one."""
    return f"{first}-{end - 1 if end else ''}"


def count_contexts(
    question: str, prompt_tokens: int | None, rounds: Iterable[tuple[int, float, float]]
) -> AnswerContexts:
    """The rounds of an answer by bucket. rounds: tokens of the answer before it, number of rounds, emitted tokens

    prompt_tokens: tokens of the prompt; None: unknown, which leaves out the context
    """
    counts: dict[Axis, dict[int, tuple[float, float]]] = {axis: {} for axis in AXES}
    for position, num_rounds, emitted in rounds:
        places: dict[Axis, int | None] = {
            "context": None if prompt_tokens is None else prompt_tokens + position,
            "answer": position,
        }
        for axis, place in places.items():
            if place is not None and num_rounds:
                bucket = find_bucket(place, axis)
                earlier_rounds, earlier_emitted = counts[axis].get(bucket, (0.0, 0.0))
                counts[axis][bucket] = earlier_rounds + num_rounds, earlier_emitted + emitted
    return AnswerContexts(question, counts)


def count_decoded(question: str, prompt_tokens: int | None, emitted: Iterable[int]) -> AnswerContexts:
    """The rounds of a decoded answer by bucket. emitted: tokens of each round, behind the first token of the answer"""
    position, rounds = 1, []
    for num in emitted:
        rounds.append((position, 1.0, float(num)))
        position += num
    return count_contexts(question, prompt_tokens, rounds)


def summarise_contexts(answers: Sequence[AnswerContexts], seed: int = 0) -> Contexts:
    """The buckets that have rounds, as in a report. seed: seed of the bootstrap"""
    numbers = {question: number for number, question in enumerate(dict.fromkeys(answer.question for answer in answers))}
    contexts: Contexts = {}
    for axis in AXES:
        counts: dict[int, numpy.ndarray] = {}  # rounds and emitted tokens of each question [Q, 2], by bucket
        for answer in answers:
            for bucket, values in answer.counts[axis].items():
                counts.setdefault(bucket, numpy.zeros((len(numbers), 2)))[numbers[answer.question]] += values
        contexts[axis] = [asdict(_summarise_bucket(first, axis, counts[first], seed)) for first in sorted(counts)]
    return contexts


def _summarise_bucket(first: int, axis: Axis, counts: numpy.ndarray, seed: int) -> ContextBucket:
    """One bucket. counts [Q, 2]: rounds and emitted tokens of each question"""
    counts = counts[counts[:, 0] > 0]  # [questions with rounds here, 2]
    num, interval = len(counts), None
    if num >= MIN_ANSWERS:
        sums = [counts[draw.numpy()].sum(0) for draw in draw_questions(num, seed)]
        interval = find_bounds([float(emitted / rounds) for rounds, emitted in sums])
    rounds, emitted = map(float, counts.sum(0))
    return ContextBucket(first, find_end(first, axis), num, rounds, emitted, emitted / rounds, interval)


@dataclass(frozen=True)
class TrainedLength:
    """The longest text that a head was trained on.

    name: name of the head; tokens: of that text; None: unknown, or the head sees no more than these
    takes_window: whether the head can have another window
    """

    name: str
    tokens: int | None
    takes_window: bool

    @classmethod
    def from_head(cls, name: str, tokens: int | None, drafter: object) -> "TrainedLength":
        """That of a head, whose windows may be no longer."""
        windows = getattr(drafter, "windows", ())
        is_bounded = tokens is not None and all(window is not None and window <= tokens for window in windows)
        takes_window = bool(windows) and getattr(drafter, "layout_window", None) is None
        return cls(name, None if windows and is_bounded else tokens, takes_window)

    def describe_longer(self, lengths: Sequence[int]) -> list[str]:
        """A sentence where prompts are longer. lengths: tokens of each prompt"""
        num_longer = sum(length > self.tokens for length in lengths) if self.tokens else 0
        if not num_longer:
            return []
        longest = max(lengths)
        subject = f"{num_longer} of {len(lengths):,} prompts are" if len(lengths) > 1 else "A prompt is"
        windowed = f"set decode.window={self.tokens}, or " if self.takes_window else ""
        return [
            f"{subject} longer than all texts that {self.name} was trained on ({longest:,} against {self.tokens:,} "
            f"tokens), so tau may be lower there: {windowed}train with longer texts (data.length={longest})."
        ]


# On a page


def list_context_sections(contexts: Mapping[str, Contexts | None]) -> list[Section]:
    """A table and a chart for each axis with rounds in several buckets. contexts: figures by name of method"""
    sections = []
    for axis, unit in AXES.items():
        buckets_by_name = {name: read_buckets(values, axis) for name, values in contexts.items()}
        buckets_by_name = {name: buckets for name, buckets in buckets_by_name.items() if buckets}
        firsts = sorted({bucket.first for buckets in buckets_by_name.values() for bucket in buckets})
        if len(firsts) > 1:
            table = _tabulate_buckets(buckets_by_name, firsts)
            chart = _chart_buckets(buckets_by_name, firsts, axis)
            is_known = all(bucket.tau_ci for buckets in buckets_by_name.values() for bucket in buckets)
            points = [] if is_known else [FEW]
            sections.append(Section(f"Acceptance length by {unit}", points=points, table=table, charts=[chart]))
    return sections


def read_buckets(contexts: Contexts | None, axis: Axis) -> list[ContextBucket]:
    """The buckets of an axis; none of a report without contexts, as older ones are."""
    return [ContextBucket(**fields) for fields in (contexts or {}).get(axis, [])]


def _tabulate_buckets(buckets_by_name: Mapping[str, Sequence[ContextBucket]], firsts: Sequence[int]) -> Table:
    """tau of each method and bucket. firsts: first tokens of the buckets that are shown"""
    rows, heads = [], dict.fromkeys(firsts, "")
    for name, buckets in buckets_by_name.items():
        heads |= {bucket.first: bucket.name for bucket in buckets}
        cells = {bucket.first: str(bucket) for bucket in buckets}
        rows.append([name, *(cells.get(first, "") for first in firsts)])
    return drop_empty_columns(["method", *heads.values()], rows)


def _chart_buckets(buckets_by_name: Mapping[str, Sequence[ContextBucket]], firsts: Sequence[int], axis: Axis) -> Markup:
    """A curve for each method, each bucket in its middle on a logarithmic axis."""
    curves = []
    for name, buckets in buckets_by_name.items():
        points = [(_find_middle(bucket), bucket.tau) for bucket in buckets]
        spans = [
            (bucket.tau_ci[0], bucket.tau_ci[1]) if bucket.tau_ci else (bucket.tau, bucket.tau) for bucket in buckets
        ]
        curves.append(ChartCurve(name, points, marks=True, spans=spans))
    ends = [end for end in (find_end(first, axis) for first in firsts) if end]
    title = f"tau by {AXES[axis]}, with 95 % intervals over questions"
    ticks = {float(num): f"{num // 1024}K" if num >= 1024 else str(num) for num in sorted({*firsts, *ends} - {0})}
    return chart_lines(curves, x=AXES[axis], y="tau, tokens a round", title=title, log_ticks=ticks)


def _find_middle(bucket: ContextBucket) -> float:
    """The geometric middle of a bucket; the first and the last count as one power of two, too."""
    return (bucket.first or (bucket.end or 0) / 2) * math.sqrt(2)
