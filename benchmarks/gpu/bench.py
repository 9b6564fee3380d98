"""What the measurements of one process share: the device, a random target, an untrained head, and modes of passes."""

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from benchmarks import common, hardware, training_step
from benchmarks.gpu.machine import Machine
from benchmarks.gpu.options import GpuReportOptions
from benchmarks.training_step import StepOptions, compose_settings
from specdec.core import compile, fast
from specdec.decoding.drafting import Drafting
from specdec.heads.eagle import Eagle3
from specdec.target.model import Target

DRAFTED = 32_000  # tokens that heads draft from, as published ones do
WARM_UP, MIN_ROUNDS = 3, 10  # rounds before those that are timed; rounds that every batch has room for
DESCENT, PDL = "coordinate_descent_tuning", "triton.enable_pdl"  # options of inductor
ABLATED = ("tree", "write")  # fast paths of decoding that are also left out, where specdec has them


@dataclass(frozen=True)
class Mode:
    """How passes run: compile and cuda_graphs of decoding, options of inductor, fast paths that are left out."""

    name: str
    compile: bool = True
    graphs: bool = True
    options: dict = field(default_factory=dict)
    without: tuple[str, ...] = ()

    def make_drafting(self, depth: int, *, width: int = 1, nodes: int | None = None) -> Drafting:
        return Drafting(depth=depth, width=width, nodes=nodes, compile=self.compile, cuda_graphs=self.graphs)


CAPTURED = Mode("captured", compile=False)
# Coordinate descent makes loops of products of one row; with PDL a kernel starts before its predecessor has ended
COMPILED = Mode("compiled", options={DESCENT: False, PDL: False})
TUNED = Mode("tuned", options={DESCENT: True, PDL: False})
TUNED_PDL = Mode("tuned, PDL", options={DESCENT: True, PDL: True})
EAGER = Mode("eager", compile=False, graphs=False)


def list_modes_without(mode: Mode) -> list[Mode]:
    """A mode without each fast path of decoding that specdec has."""
    paths = [path for path in ABLATED if path in fast.PATHS]
    return [replace(mode, name=f"{mode.name} without {path}", without=(path,)) for path in paths]


def drop_missing_options(options: dict) -> dict:
    """Options that this torch has. Raises ValueError if an option that is on is missing."""
    config = torch._inductor.config
    known = {name for name in options if _has_option(config, name)}
    if wanted := [name for name, value in options.items() if value and name not in known]:
        raise ValueError(f"inductor of torch {torch.__version__} has no option {', '.join(wanted)}")
    return {name: value for name, value in options.items() if name in known}


def _has_option(config: object, name: str) -> bool:
    for word in name.split("."):
        if not hasattr(config, word):
            return False
        config = getattr(config, word)
    return True


class Bench:
    """What the figures of a process share. The target and the head are made at their first use."""

    def __init__(self, options: GpuReportOptions, machine: Machine):
        self.options, self.machine, self.device = options, machine, machine.device
        self.left_out: tuple[str, ...] = ()  # fast paths that the target has never used

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
        """Within, inductor has the mode's options, and its fast paths are left out.

        A target keeps what it has decided about fast paths. So for others of them it is made again.
        """
        if mode.without != self.left_out:
            self.__dict__.pop("head", None)
            self.__dict__.pop("target", None)
            self.machine.free_memory()
            self.left_out = mode.without
        self.machine.options = drop_missing_options(mode.options)
        try:
            with training_step.leave_out(list(mode.without), self.target):
                yield
        finally:
            self.machine.options = None

    def random_tokens(self, num: int, *, seed: int = 1) -> list[int]:
        return torch.randint(self.target.vocab_size, (num,), generator=torch.Generator().manual_seed(seed)).tolist()
