"""Measures a training step by length: tokens/s, memory above the weights, and model FLOPs utilisation (MFU).

    python -m benchmarks.training_step heads=eagle3,dflash lengths=512,1024,2048 out=after.json
    python -m benchmarks.training_step shape=8b lengths=2048,8192 features=given      # a random target

A step is made of the parts of train.py: the head, objective and optimizer of conf/, on random text. Reading data, the
closed-form start, logging and saving are left out. Memory is the most that was in use at once above target and head:
activations, gradients and the optimizer's state. For exact figures of it on a CPU give one head and one length, because
allocators keep memory. MFU is the FLOPs that a step needs, without what is computed again in backward passes, over its
time and the device's peak FLOP/s.
"""

import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import hydra
import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks import common, hardware
from specdec.core import devices, fast, files, precision
from specdec.heads.base import Drafter
from specdec.target.model import Target
from specdec.text.conversations import Row
from train.data.batches import TrainingBatch, collate
from train.features.outputs import ComputedFeatures
from train.loop.optimizer import make_optimizer
from train.settings.decide import VOCABULARY_BOUNDS
from train.settings.hydra_text import make_search_path
from train.settings.options import OptimizerOptions, fill_arguments

RAGGED = (2600, 1900, 1300, 900, 620, 410, 260, 190)  # tokens of the conversations in a pack of 8,192
PROMPT = 16  # tokens at the beginning of each document that nothing has to guess
PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}  # matrix products, by the place of their first factor


@dataclass(frozen=True)
class StepOptions:
    heads: str = "eagle3"  # comma list of heads, by their files in conf/head
    lengths: str = "512,1024,2048"  # comma list of tokens in a pack
    # tokens of a conversation, or ragged for several lengths; null: one conversation a pack, which costs attention most
    document: str | None = None
    batch: int = 1  # packs in a step
    shape: str | None = None  # a random target instead: 8b, qwen3-8b, 1b, tiny
    without: str = ""  # comma list of fast paths that are left out, on devices that have them
    features: str = "target"  # target: the target reads every batch; given: its outputs are known
    precision: str = "auto"  # bf16 or fp32; auto: bf16 where the device computes in bfloat16
    steps: int = 3  # timings; their median counts
    together: int = 1  # steps of each timing, with one wait for the device at its end
    warmup: int = 1  # steps before them
    peak_flops: float | None = None  # FLOP/s of the device at best, for MFU; null: by its name, if it is known
    out: str | None = None  # JSON file for the figures
    target_name: str = common.TARGET
    target_dtype: str = "auto"
    train: tuple[str, ...] = ()  # further options of train.py: train.head.objective.depth=3


@dataclass(frozen=True)
class StepCost:
    """Figures of one step."""

    tokens: int  # tokens that the step reads
    parameters: int  # trained parameters
    seconds: list[float]  # seconds of a step, one for each timing
    peak_bytes: int  # peak memory above target and head: activations, gradients, the optimizer's state
    total_bytes: int  # peak memory with target and head; 0 on a CPU
    state_bytes: int  # memory of gradients and the optimizer's state
    flops: float  # FLOPs that the step needs
    depth: int | None  # depth of the objective's unroll; None: the head has none
    supervise: str  # goals: answers, or text
    optimizer: str

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / statistics.median(self.seconds)

    def mfu(self, peak: float | None) -> float | None:
        return None if peak is None else self.flops / statistics.median(self.seconds) / peak


class NeededFlops(TorchDispatchMode):
    """Counts the FLOPs that a step needs in its matrix products and its attention: `flops`.

    Only forward passes are looked at, so what is computed again in a backward pass is not counted. A product counts
    once for its result, and once more for each factor that needs a gradient; attention counts as its two products,
    over the keys that a text shows to each query. What an autograd.Function computes from its inputs counts as needing
    a gradient.
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
            self._frozen = {_memory_location(value) for value in tensors if not value.requires_grad}
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
            self.flops += (
                2 * first.numel() * second.shape[-1] * (1 + self._needs_gradient(first) + self._needs_gradient(second))
            )
        elif name.startswith("_scaled_dot_product") or name == "attend_segments":
            query, key, value = args[:3]
            passes = 3 if query.requires_grad or self._frozen is not None else 1
            if name == "attend_segments":  # of texts side by side, each behind the keys that it has alone
                heads, (queries, keys) = query.shape[-2], (starts.diff().cpu().double() for starts in args[3:5])
            else:
                heads, (queries, keys) = (
                    query[..., 0, 0].numel(),
                    (torch.tensor([float(x.shape[-2])]) for x in (query, key)),
                )
            pairs = float((queries * (keys - queries) + queries * (queries + 1) / 2).sum())
            self.flops += 2 * heads * pairs * (query.shape[-1] + value.shape[-1]) * passes
        return out

    def _needs_gradient(self, factor: Tensor) -> bool:
        return factor.requires_grad if self._frozen is None else _memory_location(factor) not in self._frozen


def _memory_location(value: Tensor) -> int:
    return value.untyped_storage().data_ptr()


def compose_settings(options: StepOptions, head: str) -> DictConfig:
    """The settings of train.py for a head."""
    with hydra.initialize_config_dir(str(common.ROOT / "conf"), version_base="1.3"):
        settings = hydra.compose(
            "train", overrides=[f"head={head}", "run=benchmark", *options.train, make_search_path()]
        )
    settings.head.drafter = fill_arguments(dict(settings.head.drafter))
    return settings


def make_batch(options: StepOptions, length: int, vocab_size: int) -> TrainingBatch:
    """Packs of random text."""
    generator = torch.Generator().manual_seed(0)
    if options.document == "ragged":
        sizes = [max(1, num * length // 8192) for num in RAGGED]
    else:
        size = min(int(options.document or length), length)
        sizes = [size] * (length // size)

    def make_row(size: int) -> Row:
        tokens = torch.randint(vocab_size, (size,), generator=generator).tolist()
        return Row("", "all", tokens, [place >= min(PROMPT, size // 2) for place in range(size)])

    packs = [list(map(make_row, sizes)) for _ in range(options.batch)]
    return collate(packs, length=length, pad_token=0)


@contextlib.contextmanager
def leave_out(paths: list[str], target: Target) -> Iterator[None]:
    """Within, these fast paths are not used."""
    on = fast.allows
    target.__dict__.pop("reads_segments", None)  # what it has asked once
    with mock.patch.object(fast, "allows", lambda path, *arguments: path not in paths and on(path, *arguments)):
        _ = target.reads_segments  # tries it, which is no part of a step
        yield
    target.__dict__.pop("reads_segments", None)


def make_drafter(config: DictConfig, head: str, target: Target) -> Drafter:
    """The head of these settings, with random weights. Raises ValueError for one that changes its target."""
    torch.manual_seed(0)
    size = VOCABULARY_BOUNDS[0] if config.head.vocab_size == precision.AUTO else config.head.vocab_size
    vocab = None if size is None or size >= target.vocab_size else torch.arange(size)
    drafter = instantiate(config.head.drafter, target, vocab=vocab, _convert_="all").to(target.device)
    if drafter.adapts_target:
        raise ValueError(f"heads={head}: a head that changes its target is not measured.")
    return drafter


def is_mixed(options: StepOptions, device: torch.device) -> bool:
    """Whether steps compute in bfloat16."""
    chosen_here = precision.choose_dtype(device).dtype == "bfloat16" if options.precision == "auto" else False
    return options.precision == "bf16" or chosen_here


def list_moments(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All tensors of the optimizer's state."""
    values = itertools.chain.from_iterable(state.values() for state in optimizer.state.values())
    return [value for value in values if isinstance(value, Tensor)]


@dataclass(frozen=True)
class PreparedStep:
    """A head, its objective and its optimizer, as train.py makes them, and one batch that every step reads."""

    config: DictConfig  # settings of train.py
    drafter: Drafter
    objective: Any
    optimizer: torch.optim.Optimizer
    batch: TrainingBatch
    online: ComputedFeatures
    output: Any  # the target's outputs, where they are given; None: each step computes them
    num_goals: Tensor
    mixed: bool  # whether steps compute in bfloat16

    def __call__(self) -> None:
        """Takes a step."""
        output = self.online(self.batch) if self.output is None else self.output
        with torch.autocast(self.num_goals.device.type, torch.bfloat16, enabled=self.mixed):
            loss = self.objective(self.batch, output, compare=False)
        (loss.total / self.num_goals).backward()
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), self.config.train.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()


def list_left_out(options: StepOptions) -> list[str]:
    """The fast paths that are left out. Raises ValueError for one that does not exist."""
    without = common.split_list(options.without)
    if unknown := set(without) - set(fast.PATHS):
        raise ValueError(f"without={','.join(unknown)} must be a comma list of {', '.join(fast.PATHS)}.")
    return without


def prepare_step(options: StepOptions, head: str, length: int, target: Target) -> PreparedStep:
    """Makes the parts of a step. Raises ValueError for wrong options."""
    config, device, without = compose_settings(options, head), target.device, list_left_out(options)
    drafter = make_drafter(config, head, target)
    objective = instantiate(config.head.objective, drafter, _convert_="all").train()
    optimizer_settings: Any = OmegaConf.to_container(config.optimizer, resolve=True)
    optimizer = make_optimizer(drafter, OptimizerOptions(**optimizer_settings))
    online = ComputedFeatures(target, drafter.target_layers)
    batch = make_batch(options, length, target.vocab_size).move_to(device)
    with leave_out(without, target):
        output = online(batch) if options.features == "given" else None
    num_goals = batch.goal_mask(objective.supervise).sum()
    mixed = is_mixed(options, device)
    return PreparedStep(config, drafter, objective, optimizer, batch, online, output, num_goals, mixed)


def measure_step(options: StepOptions, head: str, length: int, target: Target) -> StepCost:
    """Takes steps and measures them. Raises an error of torch if memory does not suffice, ValueError for wrong options.

    The needed FLOPs are those of the reference without compiled blocks, which hide products.
    """
    step, device = prepare_step(options, head, length, target), target.device

    # Time the steps, and note their memory.
    seconds, memory = [], hardware.PeakMemory(device)
    with leave_out(list_left_out(options), target), memory.measured():
        for _ in range(options.warmup + options.steps):
            devices.wait_for_device(device)
            start = time.perf_counter()
            for _ in range(options.together):
                step()
            devices.wait_for_device(device)
            seconds.append((time.perf_counter() - start) / options.together)

    # Count the FLOPs last, because counting costs time and memory. Texts in a pack show only what they see.
    needed = NeededFlops()
    packed = fast.force_paths("varlen") if device.type == "cpu" else contextlib.nullcontext()
    with packed, leave_out(["loss", "blocks", "graphs"], target), needed.watching(step.optimizer):
        step()
    trained = [parameter for parameter in step.drafter.parameters() if parameter.requires_grad]
    return StepCost(
        tokens=int((step.batch.documents >= 0).sum()),
        parameters=sum(parameter.numel() for parameter in trained),
        seconds=seconds[options.warmup :],
        peak_bytes=memory.bytes,
        total_bytes=memory.total,
        state_bytes=sum(value.nbytes for value in [*trained, *list_moments(step.optimizer)]),
        flops=needed.flops,
        depth=step.config.head.objective.get("depth"),
        supervise=step.objective.supervise,
        optimizer=step.config.optimizer.name,
    )


def main(arguments: list[str]) -> None:
    options = common.read_options(StepOptions, __doc__, arguments)
    lengths, heads = common.read_numbers("lengths", options.lengths, least=32), common.split_list(options.heads)
    for name, allowed in {"features": ("target", "given"), "precision": ("auto", "bf16", "fp32")}.items():
        if getattr(options, name) not in allowed:
            raise ValueError(f"{name}={getattr(options, name)} must be one of {', '.join(allowed)}.")
    device, rows = hardware.find_device(), []
    if options.shape:
        dtype = precision.resolve_dtype(options.target_dtype, device)
        target = hardware.make_random_target(options.shape, device=device, positions=max(lengths), dtype=dtype)
    else:
        target = Target.load(options.target_name, dtype=options.target_dtype, device=device)
    print(f"{hardware.describe_device(device)}; {target.name}, {target.dtype}".replace("torch.", ""), flush=True)
    peak = options.peak_flops or hardware.find_peak(device).flops
    for head, length in itertools.product(heads, lengths):
        row = {"head": head, "length": length}
        try:
            cost = measure_step(options, head, length, target)
            row |= asdict(cost) | {"tokens_per_second": cost.tokens_per_second, "mfu": cost.mfu(peak)}
        except (RuntimeError, MemoryError) as error:
            if devices.describe_out_of_memory(error) is None:
                raise
            row["error"] = "out of memory"
        rows.append(row)
    print(common.format_rows(rows))
    if options.out:
        files.write_text(Path(options.out), json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    common.run_main(main)
