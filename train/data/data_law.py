"""What more data would bring: tau against the tokens that training has read, and a law that is fitted to it."""

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

LEAST_POINTS = 4
LEAST_SPAN = 4.0  # most tokens over fewest: the law says nothing about a range that was hardly seen
FACTORS = (2, 5, 10)  # times the tokens so far, of which the trainer tells


@dataclass(frozen=True)
class Point:
    """A drafter that was judged once."""

    tokens: float  # read in training, those of prompts counted too
    tau: float  # at `depth` drafts in a row


def acceptance(tau: float, depth: int) -> float:
    """The acceptance rate a, alike at all depths, that explains tau = 1 + a + a^2 + .. + a^depth."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tau_of(middle, depth) < tau else (low, middle)
    return (low + high) / 2


def tau_of(rate: float, depth: int) -> float:
    return 1 + sum(rate**d for d in range(1, depth + 1))


@dataclass(frozen=True)
class DataLaw:
    """The log-odds of `acceptance` against the tokens: log(a / (1 - a)) = level + slope log(tokens)."""

    level: float
    slope: float
    depth: int
    error: float  # the largest difference between the law's tau and a point it was fitted to

    def tau(self, tokens: float) -> float:
        odds = math.exp(self.level + self.slope * math.log(tokens))
        return tau_of(odds / (1 + odds), self.depth)


def fit(points: Sequence[Point], *, depth: int) -> DataLaw | None:
    """Least squares. None where points are too few, or lie too close together: see LEAST_POINTS, LEAST_SPAN."""
    usable = [point for point in points if point.tokens > 0 and 1 < point.tau < 1 + depth]
    tokens = [point.tokens for point in usable]
    if len(set(tokens)) < LEAST_POINTS or max(tokens) < LEAST_SPAN * min(tokens):
        return None
    xs = [math.log(point.tokens) for point in usable]
    rates = [acceptance(point.tau, depth) for point in usable]
    slope, level = statistics.linear_regression(xs, [math.log(rate / (1 - rate)) for rate in rates])
    law = DataLaw(level, slope, depth, error=0.0)
    return DataLaw(law.level, slope, depth, error=max(abs(law.tau(point.tokens) - point.tau) for point in usable))


def points_of(log: Iterable[dict[str, Any]]) -> list[Point]:
    """The validations of a run, from the rows of its log.jsonl."""
    reports = [row["validation"] for row in log if "validation" in row and not row.get("last")]
    taus = [(report.get("training", {}).get("tokens"), report.get("replayed_tau", report["tau"])) for report in reports]
    return [Point(tokens, tau) for tokens, tau in taus if tokens and tau]


def outlook(points: Sequence[Point], *, depth: int, unique: int | None) -> str | None:
    """A sentence on what more tokens would bring; None where nothing can be said. unique: tokens of the data set"""
    law = fit(points, depth=depth)
    if law is None:
        return None
    seen = max(point.tokens for point in points)
    low, high = min(point.tokens for point in points), seen
    more = ", ".join(f"{law.tau(seen * factor):.2f} with {factor} times as many" for factor in FACTORS)
    epochs = "" if not unique or seen <= unique else f" (each was read {seen / unique:.1f} times; new ones bring more)"
    return (
        f"what more data would bring: tau {law.tau(seen):.2f} with the {in_millions(seen)} tokens read{epochs}, "
        f"{more}. The law was fitted to {len(points)} validations from {in_millions(low)} to {in_millions(high)} tokens and "
        f"misses them by at most {law.error:.2f}."
    )


def in_millions(tokens: float) -> str:
    return f"{tokens / 1e6:.3g} M"
