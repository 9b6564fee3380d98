"""What more data would bring: a law fitted to a run's own validations, and said with what it cannot know.

The log-odds of acceptance against the logarithm of the tokens: log(a / (1 - a)) = level + slope log(tokens), with one acceptance
rate a for all depths. Tokens that are read again count less than new ones: E times U tokens count as
U (1 + R (1 - exp(-(E - 1) / R))) new ones (2305.16264, equation 5, with its R of 15.4, which was measured on language models).
"""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

LEAST_POINTS, LEAST_SPAN = 4, 3.0  # validations; most tokens over fewest
FACTORS = (2, 4)  # times the tokens so far, of which the law tells
REPEATED = 15.4  # R above


def tau_of(rate: float, depth: int) -> float:
    return 1 + sum(rate**d for d in range(1, depth + 1))


def rate_of(tau: float, depth: int) -> float:
    """The acceptance rate, alike at all depths, that explains tau."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tau_of(middle, depth) < tau else (low, middle)
    return (low + high) / 2


def new_tokens(read: float, unique: float) -> float:
    """As how many new tokens these count, of a data set with so many."""
    again = max(0.0, read / unique - 1)
    return min(read, unique) + (unique * REPEATED * (1 - math.exp(-again / REPEATED)) if again else 0.0)


def outlook(log: Iterable[dict[str, Any]], *, depth: int) -> str | None:
    """A sentence from the rows of a run's log.jsonl; None where too little is known. depth: of the chain"""
    found = [row["validation"] for row in log if "validation" in row and not row.get("last")]
    points = [(each.get("training") or {}, each.get("replayed_tau")) for each in found]
    points = [
        (made, tau)
        for made, tau in points
        if tau and 1 < tau < 1 + depth and made.get("tokens") and made.get("unique_tokens")
    ]
    read = [float(made["tokens"]) for made, _ in points]
    if len(set(read)) < LEAST_POINTS or max(read) < LEAST_SPAN * min(read):
        return None
    unique = float(points[-1][0]["unique_tokens"])
    counted = [new_tokens(each, unique) for each in read]
    odds = [math.log(rate / (1 - rate)) for rate in (rate_of(tau, depth) for _, tau in points)]
    slope, level = statistics.linear_regression([math.log(each) for each in counted], odds)

    def tau_after(tokens: float) -> float:
        return tau_of(1 / (1 + math.exp(-level - slope * math.log(tokens))), depth)

    error = max(abs(tau_after(each) - tau) for each, (_, tau) in zip(counted, points))
    now = tau_after(counted[-1])
    said = _say(read[-1], unique, now, tau_after)
    return (
        f"More data: {said}. This is a trend of {len(points)} validations of one run, which it misses by up to {error:.2f}; within a "
        "run the falling learning rate helps too, so it is more likely too high than too low."
    )


def _say(read: float, unique: float, now: float, tau_after) -> str:
    """The gains, for new texts and for the same ones."""
    parts: Sequence[str] = [
        f"{factor} times the tokens {tau_after(new_tokens(read, unique) + (factor - 1) * read) - now:+.2f} with new texts and "
        f"{tau_after(new_tokens(factor * read, unique)) - now:+.2f} with the same ones again"
        for factor in FACTORS
    ]
    return (
        f"tau {now:.2f} after {read / 1e6:.3g} M tokens, {read / unique:.1f} times the {unique / 1e6:.3g} M of the data; "
        + ", ".join(parts)
    )
