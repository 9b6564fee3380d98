"""The gain from more data: a law fitted to a run's own validations, and the sentence that names its limits.

The law is log(a / (1 - a)) = level + slope log(tokens), with one acceptance rate a for all depths. Tokens that are read
again count less than new ones. E epochs of U tokens count as U (1 + R (1 - exp(-(E - 1) / R))) new ones (2305.16264,
equation 5; its R of 15.4 was measured on language models).
"""

import math
import statistics
from collections.abc import Iterable
from typing import Any

MIN_POINTS = 4  # validations that a line needs, so that its error says something
MIN_SPAN = 3.0  # largest number of tokens over the smallest; a shorter line says little about twice as many
TOKEN_FACTORS = (2, 4)  # multiples of the tokens so far that the sentence is about
REPEAT_DECAY = 15.4  # R of the law


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


def list_points(log: Iterable[dict[str, Any]], depth: int) -> list[tuple[float, float, float]]:
    """The validations that a law can be fitted to: tokens read, tokens of the data, replayed tau of a chain."""
    points = []
    for row in log:
        validation = row.get("validation")
        if validation is None or row.get("last"):
            continue
        training, tau = validation.get("training") or {}, validation.get("replayed_tau")
        num_read, num_unique = training.get("tokens"), training.get("unique_tokens")
        if num_read and num_unique and tau and 1 < tau < 1 + depth:
            points.append((float(num_read), float(num_unique), tau))
    return points


def describe_more_data(log: Iterable[dict[str, Any]], *, depth: int) -> str | None:
    """A sentence from the rows of a run's log.jsonl; None for too few validations. depth: drafts of the chain"""
    points = list_points(log, depth)
    distinct_reads = {num_read for num_read, _, _ in points}
    if len(distinct_reads) < MIN_POINTS or max(distinct_reads) < MIN_SPAN * min(distinct_reads):
        return None

    # The law
    num_read, num_unique, _ = points[-1]
    new_counts = [count_new_tokens(num_read_then, num_unique) for num_read_then, _, _ in points]
    rates = [rate_of(tau, depth) for _, _, tau in points]
    log_odds = [math.log(rate / (1 - rate)) for rate in rates]
    slope, level = statistics.linear_regression([math.log(count) for count in new_counts], log_odds)

    def tau_after(num_tokens: float) -> float:
        return tau_of(1 / (1 + math.exp(-level - slope * math.log(num_tokens))), depth)

    # The gains that it predicts, and its error
    tau_today = tau_after(new_counts[-1])
    gains = []
    for factor in TOKEN_FACTORS:
        with_new = tau_after(new_counts[-1] + (factor - 1) * num_read) - tau_today
        with_same = tau_after(count_new_tokens(factor * num_read, num_unique)) - tau_today
        gains.append(
            f"{factor} times the tokens {with_new:+.2f} with new texts and {with_same:+.2f} with the same ones again"
        )
    largest_error = max(abs(tau_after(count) - tau) for count, (_, _, tau) in zip(new_counts, points))
    return (
        f"More data: tau {tau_today:.2f} after {num_read / 1e6:.3g} M tokens, {num_read / num_unique:.1f} times the "
        f"{num_unique / 1e6:.3g} M of the data; {', '.join(gains)}. This is a trend of {len(points)} validations of "
        f"one run, which it misses by up to {largest_error:.2f}; within a run the falling learning rate helps too, so "
        "it is more likely too high than too low."
    )
