"""What a run will read, need and take, before it is begun: `train.py plan=true`, and the refusal of what cannot fit.

Memory is counted on tensors without values (train/prepare/count_tensors.py). The time on this machine follows from a few steps that are taken and
thrown away (train/prepare/facts.py), on another machine from its figures in conf/machine: a roofline, never measured.
"""

import contextlib
import math
import os
import pkgutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig

from specdec.core import fast, files, progress
from specdec.heads.base import Drafter, Head
from specdec.target.loading import load_config
from specdec.target.model import Target, TargetOutput
from specdec.target.structure import count_weights, find_experts
from specdec.text.conversations import Row
from train.data.batches import collate
from train.loop.optimizer import list_hidden_matrices
from train.loop.trainer import START_SLOTS, read_peak_memory
from train.prepare.count_tensors import H100_BANDWIDTH, H100_PEAK, Autocast, OperationCount
from train.settings.decide import GB, Cost, Hardware, Memory, Pace, RunSizes, TextLengths, find_problems
from train.settings.options import THIS_MACHINE, MachineOptions, RunConfig, RunOptions

CUDA_CONTEXT_BYTES = 0.8 * GB  # of a GPU, that CUDA and the libraries take
PRODUCT_SHARE, PASS_TIME_RATIO = (
    0.65,
    1.3,
)  # share of the peak of a target's products; its time with all else, over theirs
PYTHON_BYTES = 0.55 * GB  # of Python and its libraries, on a CPU
# Of a CPU: a step and what is read ahead meanwhile, over a step alone (results/47-right-by-default.md)
READ_AHEAD_RATIO = 1.8
MUON_STEPS = 5  # steps of Muon
QUANTISED_RATIO = 0.3  # bytes of quantised weights over those in 16 bits, where the files are not here
META_ERRORS = (ValueError, RuntimeError, TypeError)  # what tensors without values may raise


# Machines


def find_hardware(options: RunOptions, device: torch.device, num_processes: int) -> Hardware:
    """This machine, or the one that is planned for."""
    machine, cuda = options.machine, device.type == "cuda"
    if machine.name != THIS_MACHINE and not options.plans_other_machine:  # a run is where it is
        machine = MachineOptions(name=machine.name)
    elif machine.name == THIS_MACHINE:
        machine = machine.model_copy(update={"device": None, "num": None})
    kind = machine.device or ("cuda" if cuda else "cpu")
    own_memory = (
        torch.cuda.get_device_properties(device).total_memory
        if cuda
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    memory = machine.memory * GB if machine.memory else own_memory / (1 if cuda else num_processes)
    disk = machine.disk * GB if machine.disk else files.count_free_bytes(Path(options.features.folder))
    return Hardware(kind, machine.num or num_processes, memory, disk)


# Memory


def count_target_bytes(options: RunOptions, target: Target, num: int) -> float:
    """Of a process. target: an outline"""
    weights = {id(value): value.nbytes for value in target.model.parameters()}
    if options.features.urls:
        ends = {id(part.weight): part.weight.nbytes for part in (target.embed, target.lm_head)}
        return float(sum(ends.values()))
    if options.target.device == "auto":
        num = (options.machine.num if options.plans_other_machine else torch.cuda.device_count()) or 1
    elif not options.target.shard:
        num = 1
    if target.quantisation is not None:  # an outline has the shapes of weights that are not quantised
        stored = sum(file.stat().st_size for file in Path(options.target.name).glob("*.safetensors"))
        return float(stored or QUANTISED_RATIO * sum(weights.values())) / num
    return sum(weights.values()) / num


@dataclass(frozen=True)
class RunCount:
    """drafter: without values; memory: of a process; pace: of a machine with these figures, by a roofline"""

    drafter: Head
    memory: Memory
    pace: Pace


def count_run(options: RunOptions, sizes: RunSizes, target: Target, texts: TextLengths, hardware: Hardware) -> RunCount:
    """What a process needs, for heads that leave the target as it is. target: an outline"""
    machine, tokens = options.machine, sizes.batch * sizes.length
    peak, bandwidth = 1e12 * (machine.flops or 0) or H100_PEAK, GB * (machine.bandwidth or 0) or H100_BANDWIDTH
    drafter = build_outline_drafter(sizes, target)
    muon = list_hidden_matrices(drafter) if options.optimizer.name == "muon" else []
    with fast.force_paths("loss", *(["varlen"] if hardware.device == "cuda" else [])):
        count = count_step(options, sizes, drafter, texts, peak=peak, bandwidth=bandwidth)
    memory = Memory(
        target=count_target_bytes(options, target, hardware.num_processes),
        drafter=count_optimizer_bytes(drafter, muon, ema=options.train.ema is not None),
        step=max(float(count.live), count_reading_bytes(target, tokens)),
        start=count_start_bytes(options, sizes.solve_packs, drafter, texts),
        overhead=CUDA_CONTEXT_BYTES if hardware.device == "cuda" else PYTHON_BYTES,
    )
    pace = Pace(
        read=estimate_reading_seconds(options, target, drafter, peak),
        step=count.seconds / tokens,
        update=estimate_update_seconds(drafter, muon, peak=peak, bandwidth=bandwidth),
    )
    return RunCount(drafter, memory, pace)


def instantiate(settings: dict, *arguments: Any, **keywords: Any) -> Any:
    """What `_target_` names, made with the other settings. Raises ValueError for one that it does not have."""
    options = {key: value for key, value in settings.items() if key != "_target_"}
    try:
        return pkgutil.resolve_name(settings["_target_"])(*arguments, **options, **keywords)
    except TypeError as error:
        raise ValueError(str(error)) from error


def build_outline_drafter(sizes: RunSizes, target: Target) -> Drafter:
    size = sizes.vocab_size
    vocab = None if size is None or size >= target.vocab_size else torch.arange(size)
    with torch.device("meta"), OperationCount():
        return instantiate(sizes.drafter, target, vocab=vocab).to("meta")


def count_optimizer_bytes(drafter: Head, muon: list[nn.Parameter], *, ema: bool) -> float:
    """Of a drafter's weights, their average, and the optimizer's state. muon: matrices with one number for each, where AdamW has two"""
    return 4.0 * drafter.num_parameters() * (4 if ema else 3) - 4.0 * sum(value.numel() for value in muon)


def count_reading_bytes(target: Target, tokens: int) -> float:
    """Of the target's own pass over a micro-batch, at most."""
    hidden_width = getattr(target.config, "intermediate_size", None) or 4 * target.width
    return (
        tokens * 2.0 * (8 * target.width + 3 * (max(hidden_width) if isinstance(hidden_width, list) else hidden_width))
    )


def estimate_reading_seconds(options: RunOptions, target: Target, drafter: Head, peak: float) -> float:
    """Of the target's own pass for a token, or of its outputs over the network. peak: FLOP/s"""
    if options.features.urls:
        return count_bytes_per_token(target, len(drafter.target_layers)) / (GB * (options.machine.network or 1.0))
    experts = find_experts(target.config.to_dict())
    dense, mixed = count_weights(target.decoder, target.embed.weight, experts)
    used = dense + (mixed * experts.per_token / experts.num if experts else 0.0)
    return 2 * used / (PRODUCT_SHARE * peak) * PASS_TIME_RATIO


def estimate_update_seconds(drafter: Head, muon: list[nn.Parameter], *, peak: float, bandwidth: float) -> float:
    """Of the optimizer. peak, bandwidth: FLOP/s and bytes/s"""
    seconds = 28.0 * drafter.num_parameters() / bandwidth
    for low, high in (sorted(matrix.shape) for matrix in muon):
        seconds += MUON_STEPS * (4.0 * low * low * high + 2.0 * low**3) / (0.5 * peak)
    return seconds


def count_bytes_per_token(target: Target, num_layers: int) -> int:
    """Of so many hidden states and the final one."""
    return (num_layers + 1) * target.width * target.embed.weight.element_size()


def count_start_bytes(options: RunOptions, solve_packs: int, drafter: Head, texts: TextLengths) -> float:
    """Of the closed-form start: the slots that it holds, once as they are read and once in float32, and two square matrices."""
    if options.start is not None or not isinstance(drafter, Drafter) or not solve_packs or not drafter.solves:
        return 0.0
    width, layers = drafter.target.width, len(drafter.target_layers)
    num = count_start_tokens(solve_packs, texts, width)
    depth = 1 if drafter.depth is None else options.head.objective["depth"]
    wide = (layers + 2) * width
    return num * width * (layers + 1 + depth) * (2 + 4) + 2 * 4.0 * wide * wide


def count_start_tokens(solve_packs: int, texts: TextLengths, width: int) -> float:
    """That the closed-form start reads. width: of the target"""
    return min(max(START_SLOTS, 6 * width), min(solve_packs, texts.num_packs) * texts.num_tokens / texts.num_packs)


def count_step(
    options: RunOptions, sizes: RunSizes, drafter: Drafter, texts: TextLengths, **machine: float
) -> OperationCount:
    """A step of the drafter, from given features, of packs with texts of these lengths, of which 30 % are prompt."""
    length, num = sizes.length, sizes.batch
    mean_length = max(2, int(texts.lengths.mean())) if len(texts.lengths) else length
    mean_length = min(mean_length, length)
    texts_of_pack = [mean_length] * (length // mean_length)
    rows = [
        [
            Row(str(i), "all", [1] * size, [place >= 0.3 * size for place in range(size)])
            for i, size in enumerate(texts_of_pack)
        ]
    ] * num
    objective: nn.Module = instantiate(options.head.objective, drafter)
    batch = collate(rows, length=length, pad_token=0).move_to(torch.device("meta"))
    width = drafter.target.width
    empty: Callable[[int], Tensor] = lambda w: torch.empty(num, length, w, dtype=torch.bfloat16, device="meta")
    with OperationCount(texts_of_pack * num, **machine) as count:
        output = TargetOutput(empty(len(drafter.target_layers) * width), empty(width))
        with Autocast() if sizes.precision != "fp32" else contextlib.nullcontext():
            loss = objective(batch, output, compare=False)
        (loss.total / 100).backward()
    return count


# Speed, measured


def measure_pace(
    read: Callable[[int], Any],
    step: Callable[[int], Any],
    update: Callable[[], Any],
    tokens: list[int],
    wait: Callable[[], None],
    *,
    patient: bool,
) -> Pace:
    """The pace of three functions on this device. read, step: take the number of a batch; tokens: of each batch

    The first batch warms up. patient: whether all batches are measured; else few where they take longer than ten seconds
    """
    timings = []
    for number, num in enumerate(tokens):
        moments = [time.perf_counter()]
        for work in (lambda n=number: read(n), lambda n=number: step(n), update):
            work()
            wait()
            moments.append(time.perf_counter())
        timings.append([(b - a) / each for a, b, each in zip(moments, moments[1:], (num, num, 1))])
        if not patient and moments[-1] - moments[0] > 10:
            break
    timings = timings[1:] or timings
    return Pace(*(sum(column) / len(column) for column in zip(*timings)))


def measure_memory(counted_memory: Memory, device: torch.device) -> Memory:
    """The most that this process has held after a few steps, in the place of what was counted; the start is left as counted."""
    ratio, overhead = (1.0, CUDA_CONTEXT_BYTES) if device.type == "cuda" else (READ_AHEAD_RATIO, 0.0)
    return replace(counted_memory, step=ratio * max(0.0, overhead + read_peak_memory(device) - counted_memory.fixed))


# The plan


@dataclass
class Plan:
    """What is printed. problems: why it cannot run, with what to change"""

    lines: list[tuple[str, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{name:<9}{text}" for name, text in self.lines]
        return "\n".join([*lines, *(f"does not fit: {text}" for text in self.problems)])


def make_plan(
    config: RunConfig, drafter: Head, texts: TextLengths, hardware: Hardware, memory: Memory, pace: Pace | None
) -> Plan:
    """drafter: of the run, or of an outline; pace: None: not known, as the run does not fit here"""
    train, plan = config.train, Plan()
    step_tokens = train.batch * train.accumulation * hardware.num_processes * texts.pack_tokens
    tokens = train.steps * step_tokens
    cached = config.features.mode == "cached"
    spent = start = 0.0
    if pace is not None:
        spent = Cost(pace, texts.num_tokens, hardware.num_processes, cached).count_seconds(tokens, step_tokens)
        if count_start_bytes(config, config.solve_packs, drafter, texts) and not cached:
            start = count_start_tokens(config.solve_packs, texts, drafter.target.width) * pace.read
    describe_duration, engine_condition = (
        progress.format_duration,
        " if the engine keeps up" if config.features.urls else "",
    )
    time_taken = (
        f"{describe_duration(spent + start)} of training at {tokens / (spent or 1.0):,.0f} tokens/s{engine_condition}"
    )
    time_taken += f", {describe_duration(start)} of them before the first step" if start else ""
    size = drafter.num_parameters()
    per_token = count_bytes_per_token(drafter.target, len(drafter.target_layers))
    features = min(tokens, texts.num_tokens) * per_token if cached else 0.0
    validations = math.ceil(train.steps / train.validate_every) if train.validate_every else 1
    disk = features + 2 * 16.0 * size + 2.0 * size * validations
    sent = tokens * per_token if config.features.urls else 0.0
    rows = f"{len(texts.lengths):,} rows, in {texts.num_packs:,} packs of {config.data.length:,}"
    parts = f"{train.batch} packs x {train.accumulation} micro-batches x {hardware.num_processes} processes"
    vocab = drafter.vocab_size
    plan.lines += [
        ("reads", f"{tokens:,.0f} tokens, {tokens / texts.num_tokens:.2g} times the {texts.num_tokens:,} of {rows}"),
        ("steps", f"{train.steps:,} of {step_tokens:,.0f} tokens: {parts}"),
        ("drafter", f"{type(drafter).__name__}, {size / 1e6:.1f} M trained parameters, drafts from {vocab:,} tokens"),
        ("memory", f"{memory} of {hardware.memory / GB:.1f} GB in each process"),
        ("time", time_taken if pace else "not measured"),
        ("disk", f"{disk / GB:.2f} GB ({features / GB:.2f} of features) of {hardware.disk / GB:,.0f} GB that are free"),
        ("network", f"{sent / GB:,.1f} GB from the engine" if sent else "none"),
    ]
    plan.problems += find_problems(config, memory, hardware)
    if disk > hardware.disk:
        plan.problems.append(
            f"{disk / GB:.1f} GB are written and {hardware.disk / GB:.1f} GB are free: use features.mode=online."
        )
    return plan


def read_target_config(options: RunOptions) -> PreTrainedConfig:
    """The target's config.json, or what conf/target has of it where a plan for another machine cannot reach it."""
    target_options = options.target
    outline = dict(target_options.outline or {})
    if (
        options.plans_other_machine
        and outline.pop("of", None) == target_options.name
        and not Path(target_options.name).is_dir()
    ):
        return AutoConfig.for_model(**outline)
    return load_config(
        target_options.name, revision=target_options.revision, trust_remote_code=target_options.trust_remote_code
    )


def make_outline(options: RunOptions, config: PreTrainedConfig, dtype: str) -> Target | None:
    """The shapes of the target. None for families whose shapes cannot be told without values: these are not counted."""
    dtype = "float32" if dtype == "float32" else "bfloat16"
    if options.target.trust_remote_code:  # whose code runs once, when the target is loaded
        return None
    try:
        return Target.outline(config, name=options.target.name, dtype=dtype)
    except META_ERRORS:
        return None


def describe_plan(config: RunConfig, path: Path, hardware: Hardware) -> str:
    machine, target, where = config.machine, config.target, "this machine"
    if machine.name != THIS_MACHINE:
        where = f"{machine.name}: {hardware.num_processes} x {machine.memory:g} GB, from data sheets and a roofline, not measured"
    tried = "" if target.tried or not target.outline else f"; {target.name} was never run by this project"
    return f"plan for {path} on {where}{tried}"
