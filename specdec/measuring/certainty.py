"""Bootstrap intervals, and verdicts: whether a gain is certain, and how many answers would make it so."""

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core.wording import format_count

# Answers below which nothing is certain: in simulated draws a 95 % bootstrap interval over 2, 5 and 8 answers holds the
# true value in 49, 84 and 88 % of them
MIN_ANSWERS = 8
RESAMPLES = 1000  # draws of a bootstrap; their own error of a bound is then about 2 % of the interval's width
MAX_ANSWERS = 1000  # most answers that a verdict advises
MIN_SPEEDUP = 1.05  # lower bound of the speedup's interval for the answer yes: plain decoding is simpler to serve
STANDARD_ERRORS = 1.96  # half of a 95 % interval in standard errors, of a normal distribution


@dataclass(frozen=True)
class Gain:
    """A speedup over plain decoding.

    name: name of the drafter and its shape; span: bounds of the 95 % interval, nan if unknown
    num: answers under the interval
    """

    name: str
    speedup: float
    span: Sequence[float]
    num: int

    @property
    def error(self) -> float:
        """The standard error of the speedup's logarithm."""
        low, high = self.span
        return math.log(high / low) / (2 * STANDARD_ERRORS) if 0 < low <= high else math.inf

    def __str__(self) -> str:
        interval = f" ({self.span[0]:.2f} .. {self.span[1]:.2f})" if math.isfinite(self.error) else ""
        return f"{self.speedup:.2f} times as fast as plain decoding{interval}"


def rate_gains(
    gains: Sequence[Gain], *, unit: str, remedy: str, condition: str = "", choosing: bool = False
) -> tuple[str, str]:
    """Whether the fastest drafts pay: yes, no or unsure, and a sentence. Errors of two gains count as independent.

    unit: name of what `num` counts; remedy: names of the options that give more of it
    condition: words behind the answer, such as " at load 4"; choosing: unsure, too, where another may be faster
    """
    best, *rivals = sorted(gains, key=lambda gain: gain.speedup, reverse=True)
    sentence = f"{condition}: {best} with {best.name}, on {format_count(best.num, unit.removesuffix('s'))}"
    advice = f"({remedy})"
    low, high = best.span
    if best.num >= MIN_ANSWERS and high < 1:
        return "no", f"No{sentence}."
    if best.num < MIN_ANSWERS or not low >= MIN_SPEEDUP:
        bound = 1.0 if best.speedup < 1 else MIN_SPEEDUP
        return "unsure", f"Not sure{sentence}. {describe_need(best, bound, best.error, unit)} {advice}."
    for rival in rivals:
        error = math.hypot(best.error, rival.error)
        if math.log(best.speedup / rival.speedup) < STANDARD_ERRORS * error:
            need = describe_need(best, rival.speedup, error, unit)
            doubt = f"whether {rival.name} is slower is not sure ({rival.speedup:.2f} times). {need} {advice}."
            return ("unsure", f"Not sure{sentence}; {doubt}") if choosing else ("yes", f"Yes{sentence}; {doubt}")
    return "yes", f"Yes{sentence}."


def describe_need(gain: Gain, bound: float, error: float, unit: str) -> str:
    """How many answers would tell a gain from a bound, if the figures stay. error: standard error of their log ratio"""
    if math.isinf(error):
        return f"More {unit} would tell"
    distance = abs(math.log(gain.speedup / bound)) if gain.speedup > 0 else 0.0
    if STANDARD_ERRORS * error >= distance * math.sqrt(MAX_ANSWERS / gain.num):
        return f"Even {MAX_ANSWERS:,} {unit} may not tell"
    num = gain.num * (STANDARD_ERRORS * error / distance) ** 2
    unit_size = 10 ** max(0, math.floor(math.log10(max(1.0, num))) - 1)  # two digits are known at best
    quantity = "About" if gain.num >= MIN_ANSWERS else "At least"
    return f"{quantity} {max(MIN_ANSWERS, math.ceil(num / unit_size) * unit_size)} {unit} would tell"


# Intervals


def draw_questions(num: int, seed: int) -> Iterator[Tensor]:
    """Yields the draws of a bootstrap: `num` indices of questions, [num], RESAMPLES times."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(RESAMPLES):
        yield torch.randint(num, (num,), generator=generator)


def find_bounds(estimates: Iterable[float]) -> list[float]:
    """The bounds of the 95 % percentile interval; [nan, nan] where estimates are nearly always nan."""
    values = sorted(value for value in estimates if not math.isnan(value))  # a draw may have no round
    if len(values) < 2:
        return [math.nan, math.nan]
    cuts = statistics.quantiles(values, n=40)
    return [cuts[0], cuts[-1]]
