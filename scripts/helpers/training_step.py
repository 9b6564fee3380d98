"""One training step of a head, taken as train.py takes it, on random text: its time, its memory and its arithmetic.

This module depends only on train.py, Trainer and Packs, and on few of their arguments, so that it also measures older
commits (scripts/bench_training.py trees=).
"""

from helpers.hardware import PeakMemory, synchronize
from helpers.random_target import random_target, read_shape

import contextlib
import functools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import hydra
import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.target.model import Target, TargetOutput
from train import build
from train.config import RunConfig
from train.data.loader import Material
from train.data.rows import Batch, Row
from train.features.outputs import Online
from train.optimization import make_optimizer, schedule
from train.state import RunFolder
from train.trainer import Trainer

try:
    from train.data.packing import Packs, Rows

    hold = Rows.of
except ImportError:  # an older version
    from train.data.rows import Packs

    hold = list

PROMPT = 16  # tokens at the beginning of each document that nothing has to guess
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # matrix products, by the place of their first factor


@dataclass(frozen=True)
class Work:
    """What is measured: steps of one head over packs of `length` tokens."""

    head: str
    length: int
    document: int | None = None  # tokens of a conversation; None: each pack is one
    batch: int = 1
    features: str = "target"  # target: read by the target in every step; given: known, as from a cache
    precision: str = "bf16"
    overrides: tuple[str, ...] = ()  # further options of train.py
    warmup: int = 1  # steps before the clock starts
    steps: int = 3  # timings; the median counts
    together: int = 1  # steps of each timing, with one wait for the device at its end
    count: bool = False  # whether to count FLOPs, in a step more


@dataclass(frozen=True)
class Cost:
    """Of one step."""

    tokens: int  # that the step reads
    parameters: int  # that are trained
    seconds: list[float]  # of a step, by timing
    peak_bytes: int  # at once above target and head: activations, gradients, the optimizer's state
    state_bytes: int  # of these, gradients and the optimizer's state
    flops: float | None  # that the step needs; None: not counted

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    def mfu(self, peak: float | None) -> float | None:
        """Model FLOPs utilisation: needed FLOPs over what the device could do in that time; None if either is not known."""
        if peak is None or self.flops is None:
            return None
        return self.flops / statistics.median(self.seconds) / peak


class Needed(TorchDispatchMode):
    """Counts the FLOPs that a step needs in its matrix products and its attention: `flops`.

    Only forward passes are looked at. A product counts once for its result, and once more for each of its factors that
    needs a gradient; attention of the target counts as its two products over all keys. So what is computed again in a
    backward pass is not counted. Inside an autograd.Function only its inputs are known to need a gradient or not; what
    it computes from them counts as needing one.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.off = 0.0, False
        self._frozen: set[int] | None = None  # inside a Function: where its inputs without gradients are in memory

    @contextlib.contextmanager
    def watching(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Within, the steps that this optimizer ends are counted; its own arithmetic is not."""
        apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

        def noted(function, *args, **kwargs):
            tensors = [value for value in args if isinstance(value, Tensor)]
            self._frozen = {_place(value) for value in tensors if not value.requires_grad}
            try:
                return apply(function, *args, **kwargs)
            finally:
                self._frozen = None

        hooks = [
            optimizer.register_step_pre_hook(lambda *_: setattr(self, "off", True)),
            optimizer.register_step_post_hook(lambda *_: setattr(self, "off", False)),
        ]
        try:
            with mock.patch.object(torch.autograd.Function, "apply", classmethod(noted)), self:
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.off or torch._C._current_graph_task_id() != -1:  # -1: not in a backward pass
            return out
        packet = getattr(func, "overloadpacket", func)
        name = packet.__name__
        if name in PRODUCTS:
            first, second = args[PRODUCTS[name] : PRODUCTS[name] + 2]
            self.flops += 2 * first.numel() * second.shape[-1] * (1 + self._need(first) + self._need(second))
        elif name.startswith("_scaled_dot_product") or name == "flex_attention":
            query, key, value = args[:3]
            passes = 3 if query.requires_grad or self._frozen is not None else 1
            width = query.shape[-1] + value.shape[-1]
            self.flops += 2 * query[..., 0].numel() * key.shape[-2] * width * passes
        return out

    def _need(self, factor: Tensor) -> bool:
        return factor.requires_grad if self._frozen is None else _place(factor) not in self._frozen


def _place(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


class Known:
    """The target's outputs, computed once: steps then cost what they cost with cached features in memory."""

    def __init__(self, features: Callable[..., TargetOutput]):
        self.features, self.known = features, {}

    def __call__(self, *given) -> TargetOutput:
        """given: a batch; earlier commits give the numbers of its packs before it, later ones what was read ahead behind it"""
        batch = next(each for each in given if isinstance(each, Batch))
        key = batch.on_host.tokens.numpy().tobytes()
        if key not in self.known:
            self.known[key] = self.features(*given)
        return self.known[key]

    def begin(self, batch: Batch) -> None:
        return None


def compose(root: Path, work: Work, run: Path) -> DictConfig:
    options = [f"head={work.head}", f"run={run}", f"precision={work.precision}", f"train.batch={work.batch}"]
    options += [f"data.length={work.length}", "optimizer.warmup=1", *work.overrides]
    with hydra.initialize_config_dir(str(root / "conf"), version_base="1.3"):
        return hydra.compose("train", overrides=options)


def random_rows(work: Work, vocab_size: int) -> list[Row]:
    """Conversations that fill `batch` packs."""
    generator = torch.Generator().manual_seed(0)
    size = work.document or work.length
    rows = []
    for number in range(work.batch * (work.length // size)):
        tokens = torch.randint(vocab_size, (size,), generator=generator, device="cpu").tolist()
        num_prompt = min(PROMPT, size // 2)
        rows.append(Row(str(number), "all", tokens, [False] * num_prompt + [True] * (size - num_prompt)))
    return rows


def make_trainer(root: Path, work: Work, target: Target, run: Path) -> Trainer:
    """A trainer as train.py makes it, on random text."""
    config = RunConfig.of(OmegaConf.to_container(compose(root, work, run), resolve=True))
    accelerator, config = build.start_processes(config)
    packs = Packs(hold(random_rows(work, target.vocab_size)), length=work.length)
    drafter, spec = build.make_drafter(config, target, packs)
    drafter.to(accelerator.device)
    objective = build.make(config.head["objective"], drafter)
    optimizer = make_optimizer(drafter, config.optimizer, adapter=config.head.get("adapter"))
    online = None if drafter.adapts_target else Online(target, drafter.target_layers)  # else the objective reads it
    features = Known(online) if online is not None and work.features == "given" else online
    return Trainer(
        accelerator,
        objective,
        optimizer,
        schedule(optimizer, config.optimizer, steps=config.train.steps),
        material=Material(packs, work.length, features),  # type: ignore[arg-type]
        validation=None,  # type: ignore[arg-type]
        settings=config.train,
        folder=RunFolder(run, spec, {}),
    )


def measure(root: Path, work: Work, target: Target) -> Cost:
    """Takes steps and measures them. root: the working tree whose train.py and conf are used

    Raises torch.OutOfMemoryError, or RuntimeError on a CPU, where memory does not suffice.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(root, work, target, Path(folder))
    device, optimizer = trainer.accelerator.device, trainer.optimizer.optimizer
    trainer.objective.train()
    step = functools.partial(trainer.take_step, compare=False)
    needed = Needed()
    if isinstance(trainer.material.features, Known):  # computed here, so that they are not part of a step
        indices = trainer.indices(0, 0)
        trainer.material.features(trainer.material.collate(indices).to(device))
    seconds = []
    memory = PeakMemory(device)
    with memory.measured():
        for _ in range(work.warmup):
            step()
        for _ in range(work.steps):
            synchronize(device)
            start = time.perf_counter()
            for _ in range(work.together):
                step()
            synchronize(device)
            seconds.append((time.perf_counter() - start) / work.together)
    if work.count:  # after the others, because its memory and its time are not those of a step
        with needed.watching(optimizer):
            step()
    trained = [p for p in trainer.drafter.parameters() if p.requires_grad]
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return Cost(
        tokens=sum(len(row.tokens) for index in trainer.indices(0, 0) for row in trainer.material.packs[index]),
        parameters=sum(p.numel() for p in trained),
        seconds=seconds,
        peak_bytes=memory.bytes,
        state_bytes=sum(value.nbytes for value in [*trained, *moments]),
        flops=needed.flops if work.count else None,
    )


def load_target(name: str, dtype: str, shape: str | None, *, positions: int) -> Target:
    """The named target, or one of this shape with random weights, where train.py trains: on a GPU if there is one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    device = found.type if found else "cpu"
    if shape is None:
        return Target.load(name, dtype=dtype, device=device)
    return random_target(read_shape(shape), device=device, positions=positions, dtype=dtype)


def main() -> None:
    """The process of one cell: reads what to measure as JSON from the command line, prints the cost as JSON."""
    document = json.loads(sys.argv[-1])
    limit = document.pop("most_memory")
    if limit is not None and torch.cuda.is_available() is False:
        import resource  # not on Windows

        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    work = Work(**{**document["work"], "overrides": tuple(document["work"]["overrides"])})
    try:
        target = load_target(**document["target"], positions=work.length)
        cost = asdict(measure(Path.cwd(), work, target))
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "allocate memory" not in str(error):
            raise
        cost = {"error": "out of memory"}
    print(json.dumps(cost))
