"""Rates of several ways to generate, greedy and one prompt at a time, timed in turn.

A way to generate is a function: prompt -> number of new tokens, seconds. Seconds include the prompt's pass, not compiling.
"""

import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch

from specdec.decode import Decoder
from specdec.generation import STAGES, Generation
from specdec.timing import interleave

Generate = Callable[[list[int]], tuple[int, float]]


class TimedDecoder:
    """Generates with a decoder, and keeps the generations."""

    def __init__(self, decoder: Decoder, max_new_tokens: int):
        self.decoder, self.max_new_tokens = decoder, max_new_tokens
        self.generations: list[Generation] = []

    def __call__(self, prompt: list[int]) -> tuple[int, float]:
        start = time.perf_counter()
        generation = self.decoder.generate([prompt], self.max_new_tokens)
        self.generations.append(generation)
        return len(generation.tokens[0]), time.perf_counter() - start - generation.compile_seconds

    def figures(self) -> dict:
        """tau, and milliseconds a round by decode.STAGES, over the generations so far."""
        num_rounds = sum(len(generation.accepted[0]) for generation in self.generations)
        num_emitted = sum(len(generation.tokens[0]) - 1 for generation in self.generations)
        seconds = {stage: sum(generation.stages[stage] for generation in self.generations) for stage in STAGES}
        ms_per_round = {stage: 1e3 * spent / num_rounds for stage, spent in seconds.items()}
        return {"tau": num_emitted / num_rounds, "ms_per_round": ms_per_round}


class TimedModel:
    """Generates with the `generate` of a transformers model; arguments: further ones of it."""

    def __init__(self, model: Any, *, stop: set[int], max_new_tokens: int, **arguments):
        self.model, self.arguments = model, arguments
        self.arguments |= {"eos_token_id": sorted(stop), "max_new_tokens": max_new_tokens, "do_sample": False}

    def __call__(self, prompt: list[int]) -> tuple[int, float]:
        tokens = torch.tensor([prompt], device=self.model.device)
        start = time.perf_counter()
        text = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), **self.arguments)
        seconds = time.perf_counter() - start
        custom = self.arguments.get("custom_generate")
        return text.shape[1] - len(prompt), seconds - (custom.last.compile_seconds if custom else 0.0)


def measure(
    functions: dict[str, Generate],
    prompts: list[list[int]],
    *,
    repeats: int,
    progress: Callable[[list, str], Iterable] = lambda items, description: items,
) -> dict[str, list[float]]:
    """tokens/s of every function for every prompt, `repeats` times, after a warm-up with the longest and shortest prompt.

    progress: takes a list and a description, and yields the items
    """
    for function in progress(list(functions.values()), "warm-up and compiling"):
        for prompt in (min(prompts, key=len), max(prompts, key=len)):  # the smallest and the largest cache
            function(prompt)
    decoders = [function for function in functions.values() if isinstance(function, TimedDecoder)]
    for timed in decoders:
        timed.generations.clear()
    rates: dict[str, list[float]] = {name: [] for name in functions}
    for number, prompt in enumerate(progress(prompts * repeats, "timing")):
        if number % len(prompts) == 0:  # the same prompts come again, so proposers forget the answers
            for timed in decoders:
                if timed.decoder.proposer:
                    timed.decoder.proposer.forget()
        for name, (num_tokens, seconds) in interleave(functions, prompt, number).items():
            rates[name].append(num_tokens / seconds)
    return rates


def median_ratio(rates: list[float], others: list[float]) -> float:
    """The median of the ratios of rates that were measured next to each other."""
    return statistics.median(rate / other for rate, other in zip(rates, others, strict=True))
