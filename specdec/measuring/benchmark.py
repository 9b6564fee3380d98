"""Rates of several ways to generate, greedy and one prompt at a time, timed in turn.

A way to generate is a function: prompt -> the new tokens, seconds. Seconds include the prompt's pass, not compiling.
"""

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch

from specdec.core.generation import STAGES, Generation
from specdec.core.timing import interleave
from specdec.decoding.decoder import Decoder

Generate = Callable[[list[int]], tuple[list[int], float]]


class Timed(ABC):
    """A way to generate that keeps figures of what it did."""

    @abstractmethod
    def __call__(self, prompt: list[int]) -> tuple[list[int], float]:
        """-> the new tokens, seconds"""

    def restart(self) -> None:  # noqa: B027  # most have nothing to do
        """Forgets what it learned from the prompts so far."""

    def clear(self) -> None:  # noqa: B027  # some have nothing to do
        """Sets its figures back."""

    def figures(self) -> dict:
        """tau, where it is known, and others."""
        return {}


class TimedDecoder(Timed):
    """Generates with a decoder, and keeps the generations."""

    def __init__(self, decoder: Decoder, max_new_tokens: int):
        self.decoder, self.max_new_tokens = decoder, max_new_tokens
        self.generations: list[Generation] = []

    def __call__(self, prompt: list[int]) -> tuple[list[int], float]:
        start = time.perf_counter()
        generation = self.decoder.generate([prompt], self.max_new_tokens)
        self.generations.append(generation)
        return generation.tokens[0], time.perf_counter() - start - generation.compile_seconds

    def restart(self) -> None:
        if self.decoder.proposer:
            self.decoder.proposer.forget()

    def clear(self) -> None:
        self.generations.clear()

    def figures(self) -> dict:
        """tau, and milliseconds a round by decode.STAGES, over the generations so far."""
        num_rounds = sum(len(generation.accepted[0]) for generation in self.generations)
        num_emitted = sum(len(generation.tokens[0]) - 1 for generation in self.generations)
        seconds = {stage: sum(generation.stages[stage] for generation in self.generations) for stage in STAGES}
        ms_per_round = {stage: 1e3 * spent / num_rounds for stage, spent in seconds.items()}
        return {"tau": num_emitted / num_rounds, "ms_per_round": ms_per_round}


class TimedModel(Timed):
    """Generates with the `generate` of a transformers model; arguments: further ones of it."""

    def __init__(self, model: Any, *, stop: set[int], max_new_tokens: int, **arguments):
        self.model, self.arguments = model, arguments
        self.arguments |= {"eos_token_id": sorted(stop), "max_new_tokens": max_new_tokens, "do_sample": False}
        self.clear()

    def __call__(self, prompt: list[int]) -> tuple[list[int], float]:
        tokens = torch.tensor([prompt], device=self.model.device)
        hook = self.model.register_forward_pre_hook(self._count)
        start = time.perf_counter()
        try:
            text = self.model.generate(tokens, attention_mask=torch.ones_like(tokens), **self.arguments)
        finally:
            hook.remove()
        seconds = time.perf_counter() - start
        custom = self.arguments.get("custom_generate")
        answer = text[0, len(prompt) :].tolist()
        self.num_tokens += len(answer)
        return answer, seconds - (custom.last.compile_seconds if custom else 0.0)

    def _count(self, *_: Any) -> None:
        self.num_passes += 1

    def clear(self) -> None:
        self.num_tokens = self.num_passes = 0

    def figures(self) -> dict:
        """tau of transformers' own methods: tokens by passes of the target. The prompt's pass counts: it verifies drafts too."""
        own = "custom_generate" not in self.arguments and self.num_passes
        return {"tau": self.num_tokens / self.num_passes} if own else {}


def measure(
    functions: dict[str, Generate],
    prompts: list[list[int]],
    *,
    repeats: int,
    progress: Callable[[list, str], Iterable] = lambda items, description: items,
) -> tuple[dict[str, list[float]], dict[str, list[list[int]]]]:
    """Times every function for every prompt, `repeats` times, after a warm-up with the longest and shortest prompt.

    progress: takes a list and a description, and yields the items
    -> tokens/s [repeats * prompts], and the answers of the first repeat [prompts][.], both by the names of `functions`
    """
    for function in progress(list(functions.values()), "warm-up and compiling"):
        for prompt in (min(prompts, key=len), max(prompts, key=len)):  # the smallest and the largest cache
            function(prompt)
    timed = [function for function in functions.values() if isinstance(function, Timed)]
    for method in timed:
        method.clear()
    rates: dict[str, list[float]] = {name: [] for name in functions}
    answers: dict[str, list[list[int]]] = {name: [] for name in functions}
    for number, prompt in enumerate(progress(prompts * repeats, "timing")):
        if number % len(prompts) == 0:  # the same prompts come again, so all forget the answers
            for method in timed:
                method.restart()
        for name, (tokens, seconds) in interleave(functions, prompt, number).items():
            rates[name].append(len(tokens) / seconds)
            if number < len(prompts):
                answers[name].append(tokens)
    return rates, answers


def median_ratio(rates: list[float], others: list[float]) -> float:
    """The median of the ratios of rates that were measured next to each other."""
    return statistics.median(rate / other for rate, other in zip(rates, others, strict=True))
