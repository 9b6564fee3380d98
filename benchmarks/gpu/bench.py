"""What the measurements of one process share: the device, a random target, an untrained head, and modes of passes."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from benchmarks import common, hardware
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.options import GpuReportOptions
from benchmarks.training_step import StepOptions, compose_settings
from specdec.core import compile
from specdec.decoding.drafting import Drafting
from specdec.heads.eagle import Eagle3
from specdec.target.model import Target

DRAFTED = 32_000  # tokens that heads draft from, as published ones do
WARM_UP, MIN_ROUNDS = 3, 10  # rounds before those that are timed; rounds that every batch has room for
DESCENT = "coordinate_descent_tuning"  # option of inductor: it makes loops of products of one row


@dataclass(frozen=True)
class Mode:
    """How passes run: compile and cuda_graphs of decoding, and options of inductor."""

    name: str
    compile: bool = True
    graphs: bool = True
    options: dict = field(default_factory=dict)

    def make_drafting(self, depth: int, *, width: int = 1, nodes: int | None = None) -> Drafting:
        return Drafting(depth=depth, width=width, nodes=nodes, compile=self.compile, cuda_graphs=self.graphs)


CAPTURED = Mode("captured", compile=False)
COMPILED = Mode("compiled", options={DESCENT: False})
TUNED = Mode("tuned", options={DESCENT: True})
EAGER = Mode("eager", compile=False, graphs=False)


class Bench:
    """What the figures of a process share. The target and the head are made at their first use."""

    def __init__(self, options: GpuReportOptions, machine: Machine):
        self.options, self.machine, self.device = options, machine, machine.device

    @functools.cached_property
    def positions(self) -> int:
        """Tokens that the target has to read: the longest context with all rounds, twice (PassTimer uses a half)."""
        options = self.options
        longest = max(options.context, *common.read_numbers("contexts", options.contexts))
        return 2 * (longest + self.count_room(options.depth) + 128)

    def count_room(self, depth: int) -> int:
        """Tokens that the rounds of one figure may emit."""
        return 1 + (depth + 1) * (max(self.options.rounds, MIN_ROUNDS) + WARM_UP)

    @functools.cached_property
    def target(self) -> Target:
        """A random target with joined products, as users load one."""
        return hardware.make_random_target(
            self.options.shape, device=self.device, positions=max(self.positions, self.options.length)
        )

    @functools.cached_property
    def head(self) -> Eagle3:
        """An untrained EAGLE-3 with the settings of conf/head."""
        vocab = torch.arange(min(DRAFTED, self.target.vocab_size))
        settings = compose_settings(StepOptions(), "eagle3").head.drafter
        layers = {key: settings[key] for key in ("num_layers", "own_output")}
        torch.manual_seed(0)
        head = Eagle3(self.target, vocab=vocab, **layers).to(self.device, self.target.dtype)
        compile.join_products(head)  # as a head is that decodes on a GPU
        return head.eval().requires_grad_(False)

    @contextlib.contextmanager
    def using(self, mode: Mode) -> Iterator[None]:
        """Within, inductor has the mode's options."""
        self.machine.options = mode.options
        try:
            yield
        finally:
            self.machine.options = None

    def random_tokens(self, num: int, *, seed: int = 1) -> list[int]:
        return torch.randint(self.target.vocab_size, (num,), generator=torch.Generator().manual_seed(seed)).tolist()
