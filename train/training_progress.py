"""What a training run shows of its steps, and what it counts: text tau, memory, cost."""

import collections
import contextlib
import resource
import sys
import time

import torch
from accelerate import Accelerator

from specdec.heads.base import Head
from specdec.measuring.report import Training
from specdec.unroll import replay
from train import progress
from train.data.rows import Batch, answers
from train.objective import by_start

STEPS = 10  # text tau is taken over the last steps that were shown: that of a single batch says little


class TrainingProgress:
    """Loss, text tau over the last shown steps, tokens/s since the last validation, time left. shown: whether anybody sees them"""

    def __init__(self, *, steps: int, done: int, shown: bool):
        self.steps, self.first, self.shown = steps, done, shown
        self.counts: collections.deque[tuple[int, float]] = collections.deque(maxlen=STEPS)
        self.training_seconds = 0.0
        self.restart()

    def __enter__(self) -> "TrainingProgress":
        self.task: progress.Task | None = None
        self.stack = contextlib.ExitStack()
        if self.shown:
            task = progress.start("training", self.steps, unit="steps", done=self.first, own_lines=False)
            self.task = self.stack.enter_context(task)
        return self

    def __exit__(self, *_) -> None:
        self.stack.close()

    def restart(self) -> None:
        """Tokens/s count from here."""
        self.clock, self.tokens = time.perf_counter(), 0

    @property
    def rate(self) -> float:
        return self.tokens / (time.perf_counter() - self.clock)

    @property
    def text_tau(self) -> float | None:
        """Over the last steps whose text could be replayed."""
        emitted, rounds = (sum(counts) for counts in zip(*self.counts)) if self.counts else (0, 0.0)
        return emitted / rounds if rounds else None

    def advance(self, step: int, *, loss: float, tokens: int, seconds: float, counts: tuple[int, float] | None) -> str:
        """One step is done; counts: of `text_rounds`. -> the line"""
        self.tokens += tokens
        self.training_seconds += seconds
        if counts is not None:
            self.counts.append(counts)
        left = (self.steps - step) * self.training_seconds / (step - self.first)
        worth = "" if self.text_tau is None else f"text tau {self.text_tau:.3f}  "
        line = f"loss {loss:.4f}  {worth}{self.rate:,.0f} tokens/s  {progress.duration(left)} left"
        if self.task is not None:
            self.task.update(step, figures=line)
        return line


def clipping(norms: dict[str, float]) -> str:
    """The end of the line: of `GradientNorms.read`."""
    return f"  gradient {norms['grad_norm']:.2f}, {norms['clipped']:.0%} clipped" if norms else ""


def text_rounds(batch: Batch, matches: torch.Tensor) -> tuple[int, float]:
    """A greedy chain over the batch's own text, in which a draft counts if it is the text's token; matches [K, B, T].

    -> emitted tokens and rounds, whose ratio is tau
    """
    emitted, rounds = 0, 0.0
    matches = matches.cpu().float()
    for row in range(batch.tokens.shape[0]):
        for start, stop in answers(batch.on_host, row):
            emitted += stop - start - 1
            rounds += replay.rounds(by_start(matches[:, row, start:stop]))[0]
    return emitted, rounds


def peak_memory(device: torch.device) -> int:
    """Most bytes so far: of the device, on a CPU of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def training_cost(
    accelerator: Accelerator, drafter: Head, *, tokens: int, seconds: float, unique: int | None = None
) -> Training:
    """tokens, seconds: of training so far, in all processes; unique: tokens of the data set, None for a stream"""
    return Training(
        parameters=drafter.num_parameters(),
        tokens=tokens,
        seconds=seconds,
        tokens_per_second=tokens / seconds if seconds else None,
        peak_memory=peak_memory(accelerator.device),
        processes=accelerator.num_processes,
        unique_tokens=unique,
    )


def other_processes(before: int, here: int, *, then: int, now: int) -> str:
    """One sentence for a run that goes on with another number of processes. then, now: packs of a step"""
    return (
        f"The run was begun by {before} processes and goes on with {here}: a step now has {now} packs instead of {then}. The order "
        "of packs goes on; train.batch and train.accumulation could keep the packs of a step."
    )
