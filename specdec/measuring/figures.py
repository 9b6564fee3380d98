"""Figures over prompts, and their 95 % bootstrap intervals (docs/figures.md)."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from specdec.measuring.measurement import PromptReplay, PromptResult

TAU = "tokens emitted per target pass of a round, bonus or correction token counted; the prompt's own pass is no round"
RESAMPLES = 1000


@dataclass(frozen=True)
class PromptCounts:
    """What tau is made of, of one prompt; expected numbers if it was replayed at a temperature."""

    num_rounds: float
    num_emitted: float


def tau(results: Sequence[PromptResult | PromptCounts]) -> float:
    """Tokens emitted per round; nan without a round."""
    rounds = sum(result.num_rounds for result in results)
    return sum(result.num_emitted for result in results) / rounds if rounds else float("nan")


def replayed_tau(results: Sequence[PromptResult | PromptReplay]) -> float:
    """tau by replay along the plain answers; nan without a round."""
    rounds = sum(result.replayed_rounds for result in results)
    return 1 + sum(sum(result.replayed_accepted) for result in results) / rounds if rounds else float("nan")


def rate(results: list[PromptResult], kind: Literal["plain", "drafted", "auto"]) -> float:
    """Tokens/s: the tokens of all rounds over the seconds of all rounds; nan without a second."""
    generations = [generation for result in results if (generation := getattr(result, kind)) is not None]
    seconds = sum(generation.seconds for generation in generations)
    return sum(len(generation.tokens[0]) - 1 for generation in generations) / seconds if seconds else float("nan")


def speedup(results: list[PromptResult]) -> float:
    return rate(results, "drafted") / rate(results, "plain")


def auto_speedup(results: list[PromptResult]) -> float:
    return rate(results, "auto") / rate(results, "plain")


def interval(items: Sequence, statistic: Callable[[list], float], seed: int) -> list[float]:
    """95 % percentile bootstrap over `items`, which are prompts: tokens of one prompt are strongly correlated."""
    generator = torch.Generator().manual_seed(seed)
    draws = (torch.randint(len(items), (len(items),), generator=generator).tolist() for _ in range(RESAMPLES))
    values = sorted(statistic([items[i] for i in draw]) for draw in draws)
    cuts = statistics.quantiles(values, n=40)
    return [cuts[0], cuts[-1]]


def tau_difference(
    results: Sequence[PromptResult | PromptCounts], others: Sequence[PromptResult | PromptCounts], *, seed: int = 0
) -> tuple[float, list[float]]:
    """tau of `results` minus tau of `others`, the same prompts in the same order, and the paired 95 % interval."""

    def statistic(pairs: Sequence[tuple[PromptResult | PromptCounts, PromptResult | PromptCounts]]) -> float:
        return tau([result for result, _ in pairs]) - tau([other for _, other in pairs])

    pairs = list(zip(results, others, strict=True))
    return statistic(pairs), interval(pairs, statistic, seed)


def rate_ratio_interval(results: list[PromptResult], others: list[PromptResult]) -> list[float]:
    """95 % interval over prompts of the drafted tokens/s of `results` over that of `others`, the same prompts in order."""

    def statistic(pairs: list[tuple[PromptResult, PromptResult]]) -> float:
        numerator, denominator = (rate([pair[side] for pair in pairs], "drafted") for side in (0, 1))
        return numerator / denominator if denominator else float("nan")

    return interval(list(zip(results, others, strict=True)), statistic, 0)
