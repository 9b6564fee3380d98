"""What more data would bring: a law fitted to a run's own validations, and said with what it cannot know.

The log-odds of acceptance against the logarithm of the tokens: log(a / (1 - a)) = level + slope log(tokens), with one acceptance
rate a for all depths. Tokens that are read again count less than new ones: E times U tokens count as
U (1 + R (1 - exp(-(E - 1) / R))) new ones (2305.16264, equation 5, with its R of 15.4, which was measured on language models).
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

MIN_POINTS, MIN_SPAN = 4, 3.0  # validations; most tokens over fewest
TOKEN_FACTORS = (2, 4)  # times the tokens so far, of which the law tells
REPEAT_DECAY = 15.4  # R above


def tau_of(rate: float, depth: int) -> float:
    return 1 + sum(rate**d for d in range(1, depth + 1))


def rate_of(tau: float, depth: int) -> float:
    """The acceptance rate, alike at all depths, that explains tau."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tau_of(middle, depth) < tau else (low, middle)
    return (low + high) / 2


def count_new_tokens(num_read: float, num_unique: float) -> float:
    """As how many new tokens these count, of a data set with so many."""
    num_repeats = max(0.0, num_read / num_unique - 1)
    return min(num_read, num_unique) + (
        num_unique * REPEAT_DECAY * (1 - math.exp(-num_repeats / REPEAT_DECAY)) if num_repeats else 0.0
    )


def describe_more_data(log: Iterable[dict[str, Any]], *, depth: int) -> str | None:
    """A sentence from the rows of a run's log.jsonl; None where too little is known. depth: of the chain"""
    validations = [row["validation"] for row in log if "validation" in row and not row.get("last")]
    points = [(report.get("training") or {}, report.get("replayed_tau")) for report in validations]
    points = [
        (training, tau)
        for training, tau in points
        if tau and 1 < tau < 1 + depth and training.get("tokens") and training.get("unique_tokens")
    ]
    tokens_read = [float(training["tokens"]) for training, _ in points]
    if len(set(tokens_read)) < MIN_POINTS or max(tokens_read) < MIN_SPAN * min(tokens_read):
        return None
    num_unique = float(points[-1][0]["unique_tokens"])
    new_counts = [count_new_tokens(num_read, num_unique) for num_read in tokens_read]
    log_odds = [math.log(rate / (1 - rate)) for rate in (rate_of(tau, depth) for _, tau in points)]
    slope, level = statistics.linear_regression([math.log(count) for count in new_counts], log_odds)

    def tau_after(tokens: float) -> float:
        return tau_of(1 / (1 + math.exp(-level - slope * math.log(tokens))), depth)

    largest_error = max(abs(tau_after(count) - tau) for count, (_, tau) in zip(new_counts, points))
    current_tau = tau_after(new_counts[-1])
    gains = _describe_gains(tokens_read[-1], num_unique, current_tau, tau_after)
    return (
        f"More data: {gains}. This is a trend of {len(points)} validations of one run, which it misses by up to {largest_error:.2f}; within a "
        "run the falling learning rate helps too, so it is more likely too high than too low."
    )


def _describe_gains(num_read: float, num_unique: float, current_tau: float, tau_after) -> str:
    """The gains, for new texts and for the same ones."""
    gains: Sequence[str] = [
        f"{factor} times the tokens {tau_after(count_new_tokens(num_read, num_unique) + (factor - 1) * num_read) - current_tau:+.2f} with new texts and "
        f"{tau_after(count_new_tokens(factor * num_read, num_unique)) - current_tau:+.2f} with the same ones again"
        for factor in TOKEN_FACTORS
    ]
    return (
        f"tau {current_tau:.2f} after {num_read / 1e6:.3g} M tokens, {num_read / num_unique:.1f} times the {num_unique / 1e6:.3g} M of the data; "
        + ", ".join(gains)
    )
