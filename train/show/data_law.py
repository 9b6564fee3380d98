"""What a run's log says about its data: that they are too few, or the gain from more by a law of its validations.

The law is log(a / (1 - a)) = level + slope log(tokens), with one acceptance rate a for all depths. Tokens that are read
again count less than new ones. E epochs of U tokens count as U (1 + R (1 - exp(-(E - 1) / R))) new ones (2305.16264,
equation 5; its R of 15.4 was measured on language models).

Fitted to the first validations of five recorded runs, it misses later ones by .019 to .073 on average, a run; the last
value misses them by .064 to .095. Validations of the first tenth of a run predict no better than the last value does.
A law with a line for each depth's survival is no better, so there is one rate.
"""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

MIN_POINTS = 4  # validations that a line needs, so that its error says something
MIN_SPAN = 3.0  # largest number of tokens over the smallest; a shorter line says little about twice as many
MAX_SPAN = 10.0  # earlier validations, in the warm-up or just after a closed-form start, make the line too flat
TOKEN_FACTORS = (2, 4)  # multiples of the tokens so far that the sentence is about
REPEAT_DECAY = 15.4  # R of the law
MIN_READS = 4 / 3  # times that the data are read, above which all texts of text tau were read before: the last quarter
SHORTAGE_RATIO = 1.5  # drafts accepted in training texts over those in held-out prompts, for data that are too few
RECORD = "Such trends missed later validations of five recorded runs by 0.02 to 0.07 on average, and by 0.14 at most."
# results/47-right-by-default.md, and checkpoints/shipped/mtp/README.md
KNOWN = "On the default target, chains of 4 had tau 1.5 from 0.1 M tokens, 1.8 from 0.8 M and 2.2 from 5.5 M."


def tau_of(rate: float, depth: int) -> float:
    """tau of a chain whose drafts are all accepted at this rate, given the drafts before."""
    return 1 + sum(rate**d for d in range(1, depth + 1))


def rate_of(tau: float, depth: int) -> float:
    """The acceptance rate, equal at all depths, that explains tau."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tau_of(middle, depth) < tau else (low, middle)
    return (low + high) / 2


def count_new_tokens(num_read: float, num_unique: float) -> float:
    """The number of new tokens that teach as much as `num_read` tokens of a data set with `num_unique`."""
    if num_read <= num_unique:
        return num_read
    num_repeats = num_read / num_unique - 1
    return num_unique * (1 + REPEAT_DECAY * (1 - math.exp(-num_repeats / REPEAT_DECAY)))


class Point(NamedTuple):
    """A validation. num_read, num_unique: tokens read and tokens of the data; highest: upper end of tau's interval"""

    num_read: float
    num_unique: float
    tau: float
    highest: float


def list_points(log: Iterable[dict[str, Any]]) -> list[Point]:
    """The validations of a log that have a replayed tau and count tokens."""
    points = []
    for row in log:
        validation = row.get("validation")
        if validation is None or row.get("last"):
            continue
        training, tau = validation.get("training") or {}, validation.get("replayed_tau")
        num_read, num_unique = training.get("tokens"), training.get("unique_tokens")
        if num_read and num_unique and tau:
            _, highest = validation.get("replayed_tau_ci") or (tau, tau)
            points.append(Point(num_read, num_unique, tau, highest))
    return points


@dataclass(frozen=True)
class Law:
    """The law of a run's validations. points: the validations; depth: drafts of the chain"""

    points: list[Point]
    depth: int
    slope: float
    level: float

    @property
    def new_counts(self) -> list[float]:
        """The new tokens that each validation's tokens are worth."""
        num_unique = self.points[-1].num_unique
        return [count_new_tokens(point.num_read, num_unique) for point in self.points]

    def predict_tau(self, num_tokens: float) -> float:
        """tau after so many new tokens."""
        return tau_of(1 / (1 + math.exp(-self.level - self.slope * math.log(num_tokens))), self.depth)


def fit_law(points: list[Point], depth: int) -> Law | None:
    """The law of these validations; None for too few, or too short a line. depth: drafts of the chain"""
    earliest = max((point.num_read for point in points), default=0.0) / MAX_SPAN
    points = [point for point in points if 1 < point.tau < 1 + depth and point.num_read >= earliest]
    distinct_reads = {point.num_read for point in points}
    if len(distinct_reads) < MIN_POINTS or max(distinct_reads) < MIN_SPAN * min(distinct_reads):
        return None
    law = Law(points, depth, 0.0, 0.0)
    rates = [rate_of(point.tau, depth) for point in points]
    log_odds = [math.log(rate / (1 - rate)) for rate in rates]
    slope, level = statistics.linear_regression([math.log(count) for count in law.new_counts], log_odds)
    return replace(law, slope=slope, level=level)


def describe_data(log: Iterable[dict[str, Any]], *, depth: int) -> str | None:
    """What the rows of a run's log.jsonl say about its data: that they are too few, else the gain from more.

    None where the validations are too few to say. depth: drafts of the chain
    """
    rows = list(log)
    points = list_points(rows)
    text_taus = [row["tau"] for row in rows if "tau" in row]
    if points and text_taus and is_short(points[-1], text_taus[-1]):
        return describe_shortage(points[-1], text_taus[-1])
    law = fit_law(points, depth)
    return None if law is None else describe_more_data(law)


def is_short(newest: Point, text_tau: float) -> bool:
    """Whether a head knows the texts that it has read again, and held-out prompts much less.

    It then accepts SHORTAGE_RATIO times as many drafts in its texts, and their tau is above the interval of the others.
    """
    is_read_again = newest.num_read >= MIN_READS * newest.num_unique
    return is_read_again and text_tau > max(newest.highest, 1 + SHORTAGE_RATIO * (newest.tau - 1))


def describe_shortage(newest: Point, text_tau: float) -> str:
    """Sentences for a run whose data are too few, with what is known of more."""
    return (
        "Too little data, or held-out prompts of another kind: the head drafts its training texts at tau "
        f"{text_tau:.2f} and held-out prompts at {newest.tau:.2f}. It has read {newest.num_unique:,.0f} tokens "
        f"{newest.num_read / newest.num_unique:.1f} times. {KNOWN}"
    )


def describe_more_data(law: Law) -> str:
    """The gains that a law predicts, and its error."""
    new_counts, (num_read, num_unique, *_) = law.new_counts, law.points[-1]
    tau_today = law.predict_tau(new_counts[-1])
    gains = []
    for factor in TOKEN_FACTORS:
        with_new = law.predict_tau(new_counts[-1] + (factor - 1) * num_read) - tau_today
        with_same = law.predict_tau(count_new_tokens(factor * num_read, num_unique)) - tau_today
        gains.append(
            f"{factor} times the tokens {with_new:+.2f} with new texts and {with_same:+.2f} with the same ones again"
        )
    largest_error = max(abs(law.predict_tau(count) - point.tau) for count, point in zip(new_counts, law.points))
    return (
        f"More data: tau {tau_today:.2f} after {num_read / 1e6:.3g} M tokens, {num_read / num_unique:.1f} times the "
        f"{num_unique / 1e6:.3g} M of the data; {', '.join(gains)}. This is a trend of {len(law.points)} validations "
        f"of one run, which it misses by up to {largest_error:.2f}. {RECORD}"
    )
