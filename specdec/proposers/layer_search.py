"""Which of a target's layers to draft with, for self-speculation (Draft & Verify, 2309.08168).

A greedy search: from all layers on, it removes one layer at a time, each time the layer whose removal leaves most first
drafts right. For every number of layers left, replay gives the tau of greedy decoding with these layers exactly, and
measured times of passes turn it into a predicted speedup.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core import masks
from specdec.core.compile import Runner
from specdec.proposers.layerskip import num_shared
from specdec.target.compiled import CompiledTarget
from specdec.target.experts import experts_of, share_of_growth
from specdec.target.model import Target
from specdec.unroll import replay

REPEATS = 10  # of every timed pass
Progress = Callable[[Iterable, str], Iterable]  # wraps what is iterated over; the text says what that is


class AnsweredPrompt:
    """A prompt with the target's answer of n tokens, and all rounds that could start in it, at once.

    Round s, for s in 1 .. n-1, starts when s tokens of the answer exist: its step d reads token s + d - 2 of the answer and
    drafts token s + d - 1. It sees what the whole target wrote of the tokens before its root, and its own steps:

        entries   prompt and answer, by the target | step 1: rounds 1 .. n-1 | step 2: rounds 1 .. n-1 | ...
        round s   those before answer token s - 1  | its own                 | its own                 |
    """

    def __init__(self, target: Target, prompt: list[int], answer: list[int]):
        device = target.device
        self.target, self.num_prompt = target, len(prompt)
        self.compiled = CompiledTarget(target, Runner())
        self.answer = torch.tensor(answer, device=device)  # [n]
        self.starts = torch.arange(1, len(answer), device=device)  # [S], S = n - 1
        tokens = torch.tensor([prompt + answer[:-1]], device=device)  # [1, T]
        self.length = tokens.shape[1]
        self.cache = target.cache(1)
        self.cache.reserve(self.length)
        mask = masks.pending(masks.causal(self.length, device), self.cache.lengths, self.cache.visible)
        target.read(tokens, (), positions=self.cache.slots, mask=mask, cache=self.cache)
        self.cache.commit(torch.tensor([self.length], device=device), [self.length])

    def first_step(self, numbers: Sequence[int]) -> list[Tensor]:
        """h [1, S, D] before each of these layers and after the last, in step 1"""
        self.cache.drop_pending()
        return self.run_layers(self.begin(1), numbers)

    def begin(self, d: int) -> Tensor:
        """-> h [1, S, D] that the first layer reads in step d; `run_layers` runs layers on step d from now on"""
        num = len(self.starts)
        places = (self.starts + d - 2).clamp(max=num)  # [S] in the answer; steps past its end are not counted
        self.cache.reserve(num)
        entry = torch.arange(self.cache.visible, device=places.device)
        before = entry < (self.num_prompt + self.starts - 1)[:, None]  # [S, C]
        drafted = entry - self.length
        own = (drafted >= 0) & (drafted < d * num) & (drafted % num == (self.starts - 1)[:, None])
        self.mask = (before | own)[None, None]
        self.positions = (self.num_prompt + places)[None]
        h, *self.rotary = self.compiled.begin(self.answer[None, places], self.positions)
        return h

    def run_layers(self, h: Tensor, numbers: Sequence[int]) -> list[Tensor]:
        """h [1, S, D] of the current step -> h before each of these layers and after the last"""
        rotary, positions, mask = self.rotary, self.positions, self.mask
        return self.compiled.run_layers(h, numbers, rotary=rotary, positions=positions, mask=mask, cache=self.cache)

    def right(self, h: Tensor, d: int) -> Tensor:
        """h [1, S, D] after the last layer of step d -> [S] bool: whether each round's draft is the answer's token"""
        guess = self.target.logits(self.target.norm(h))[0].argmax(-1)  # [S]
        places = self.starts + d - 1
        return (places < len(self.answer)) & (guess == self.answer[places.clamp(max=len(self.answer) - 1)])

    def accept(self, numbers: Sequence[int], depth: int) -> Tensor:
        """[K, n] for replay.rounds, if these layers draft"""
        self.cache.drop_pending()
        accept = torch.zeros(depth, len(self.answer), device=self.answer.device)
        for d in range(1, depth + 1):
            accept[d - 1, 1:] = self.right(self.run_layers(self.begin(d), numbers)[-1], d)
        return accept


def share_right(texts: list[AnsweredPrompt], ends: Iterable[Tensor]) -> float:
    """The share of first drafts that are right; ends: for each text, h [1, S, D] after the last layer of step 1"""
    right = torch.cat([text.right(h, 1) for text, h in zip(texts, ends)])
    return float(right.double().mean())


def search(
    texts: list[AnsweredPrompt], tries: int, progress: Callable[[Iterable], Iterable] = iter
) -> dict[int, tuple[tuple[int, ...], float]]:
    """By number of layers: the layers that are left, and the share of first drafts that they have right.

    tries: in each step, only so many layers are tried: those whose removal cost least when it was last tried; the first
        step tries all
    Removing a layer changes nothing before it, so that a trial starts from the state before the removed layer.
    """
    chosen = tuple(range(texts[0].target.num_layers))
    states = [text.first_step(chosen) for text in texts]  # of each text, h before every chosen layer and after the last
    best_by_size = {len(chosen): (chosen, share_right(texts, (of_text[-1] for of_text in states)))}
    right_without = dict.fromkeys(chosen, 1.0)  # share of first drafts right without the layer, when last tried
    for step in progress(range(len(chosen) - 1)):
        tried = sorted(chosen, key=lambda number: -right_without[number])[: tries if step else None]
        for number in tried:
            place = chosen.index(number)
            ends = (text.run_layers(h[place], chosen[place + 1 :])[-1] for text, h in zip(texts, states))
            right_without[number] = share_right(texts, ends)
        removed = max(tried, key=lambda number: right_without[number])
        place = chosen.index(removed)
        for text, of_text in zip(texts, states):
            of_text[place:] = text.run_layers(of_text[place], chosen[place + 1 :])
        chosen = chosen[:place] + chosen[place + 1 :]
        best_by_size[len(chosen)] = chosen, right_without[removed]
    return best_by_size


class Clock:
    """Seconds of a pass over some tokens through some layers down to the most likely token.

    Measured at the four corners (1 or `num_tokens` tokens, 1 or all layers) and interpolated between them: linearly, but
    in a mixture by the number of experts that the tokens use (experts.py).
    """

    def __init__(self, target: Target, num_tokens: int, *, compile: bool):
        self.num_tokens, self.num_layers, runner = num_tokens, target.num_layers, Runner(compile)
        self.experts = experts_of(target.config.to_dict())
        corners = [(width, layers) for width in sorted({1, num_tokens}) for layers in sorted({1, target.num_layers})]
        seconds = [[time_pass(target, runner, *corner) for corner in corners] for _ in range(2 + REPEATS)]
        # The corners take turns and each counts with its fastest pass, so that other work on the machine does not
        # appear as a speedup. The first two passes warm up.
        self.corners = dict(zip(corners, map(min, zip(*seconds[2:]))))

    def __call__(self, num_tokens: int, num_layers: int) -> float:
        wide = share_of_growth(self.experts, 1, num_tokens, self.num_tokens)
        deep = (num_layers - 1) / max(1, self.num_layers - 1)
        low, high = (
            (1 - deep) * self.corners[width, 1] + deep * self.corners[width, self.num_layers]
            for width in (1, self.num_tokens)
        )
        return (1 - wide) * low + wide * high

    def speedup(self, tau: float, depth: int, numbers: tuple[int, ...]) -> float:
        """Over plain decoding, for rounds of `depth` drafts by these layers."""
        reused = num_shared(numbers)
        drafting = depth * self(1, len(numbers)) + self(1, reused) - self(1, 0)  # the last draft runs what is reused
        return tau * self(1, self.num_layers) / (drafting + self(1 + depth, self.num_layers - reused))


def time_pass(target: Target, runner: Runner, num_tokens: int, num_layers: int) -> float:
    """Seconds of one pass, after 128 committed tokens"""
    device = target.device
    cache = target.cache(1)
    cache.commit(torch.tensor([128], device=device), [128])
    tokens = torch.arange(num_tokens, device=device)[None] % target.vocab_size  # different ones, for different experts
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    cache.reserve(num_tokens)
    mask = masks.pending(masks.causal(num_tokens, device), cache.lengths, cache.visible)
    compiled = CompiledTarget(target, runner)
    h, *rotary = runner("begin", compiled.begin, tokens, cache.slots)
    *_, h = compiled.run_layers(h, range(num_layers), rotary=rotary, positions=cache.slots, mask=mask, cache=cache)
    runner("end", lambda h: target.logits(target.norm(h)).argmax(-1), h).tolist()
    return time.perf_counter() - start


@dataclass(frozen=True)
class Choice:
    """Layers to draft with, at their best depth, and what they promise.

    right, first_right: the share of first drafts that these layers have right, and that as many of the first layers have
    """

    numbers: tuple[int, ...]
    right: float
    first_right: float
    depth: int
    tau: float
    speedup: float

    def __str__(self) -> str:
        return (
            f"{len(self.numbers)} layers: {self.right:.3f} of first drafts right; at depth {self.depth} tau "
            f"{self.tau:.3f}, predicted speedup {self.speedup:.2f}"
        )


def choices(
    texts: list[AnsweredPrompt],
    *,
    depth: int,
    tries: int,
    clock: Clock,
    progress: Progress = lambda items, description: items,
) -> list[Choice]:
    """The best layers for every number of layers, from one up, each at its best depth, at most `depth`."""
    best_by_size = search(texts, tries, lambda items: progress(items, "layers"))
    return [judge(texts, *best_by_size[size], depth, clock) for size in progress(sorted(best_by_size), "rounds")]


def judge(texts: list[AnsweredPrompt], numbers: tuple[int, ...], right: float, depth: int, clock: Clock) -> Choice:
    accepts = [text.accept(numbers, depth) for text in texts]
    emitted = sum(len(text.starts) for text in texts)
    candidates = []
    for num in range(1, depth + 1):
        tau = emitted / sum(replay.rounds(accept[:num])[0] for accept in accepts)
        candidates.append((clock.speedup(tau, num, numbers), num, tau))
    speedup, num, tau = max(candidates)
    first_right = share_right(texts, (text.first_step(range(len(numbers)))[-1] for text in texts))
    return Choice(numbers, right, first_right, num, tau, speedup)


def ranges(numbers: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> 0-2 5"""
    runs = [
        [number for _, number in run]
        for _, run in itertools.groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0])
    ]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
