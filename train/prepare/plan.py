"""Plans of runs: what a run will read, need and take. `train.py plan=true` prints it, and what cannot fit is refused.

Memory is counted on tensors without values (train/prepare/count_tensors.py). The time on this machine follows from a
few steps that are thrown away (train/prepare/facts.py). The time on another machine is a roofline from its figures in
conf/machine, and was never measured.
"""

import contextlib
import math
import os
import pkgutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedConfig

from specdec.core import fast, files, progress
from specdec.heads.base import Drafter, Head
from specdec.target.loading import load_config
from specdec.target.model import Target, TargetOutput
from specdec.target.structure import count_weights, find_experts
from specdec.text.conversations import Row
from train.data.batches import collate
from train.loop.optimizer import divide_matrices, list_hidden_matrices
from train.loop.trainer import START_SLOTS, read_peak_memory
from train.prepare.count_tensors import H100_BANDWIDTH, H100_PEAK, Autocast, OperationCount
from train.prepare.exchanges import CountedShare, count_exchanges, describe_exchanges, list_layer_bytes
from train.processes import check_groups
from train.settings.decide import GB, Cost, Hardware, Memory, Pace, RunSizes, TextLengths, find_problems
from train.settings.options import CHECKPOINTING, THIS_MACHINE, MachineOptions, RunConfig, RunOptions

CUDA_CONTEXT_BYTES = 0.8 * GB  # bytes of a GPU that CUDA and the libraries take
PRODUCT_SHARE = 0.65  # share of the peak that a target's products reach
PASS_TIME_RATIO = 1.3  # time of a target's pass over that of its products
PYTHON_BYTES = 0.55 * GB  # bytes of Python and its libraries on a CPU
READ_AHEAD_RATIO = (
    1.8  # memory of a step on a CPU with its read-ahead over that of a step (results/47-right-by-default.md)
)
QUANTISED_RATIO = 0.3  # bytes of quantised weights over those in 16 bits, where the files are not here
META_ERRORS = (ValueError, RuntimeError, TypeError)  # errors of operations on tensors without values


# Machines


def find_hardware(options: RunOptions, device: torch.device, num_processes: int) -> Hardware:
    """The devices of this machine, or of the machine of a plan. num_processes: processes of this run"""
    machine, cuda = options.machine, device.type == "cuda"
    if machine.name != THIS_MACHINE and not options.plans_other_machine:  # a run is where it is
        machine = MachineOptions(name=machine.name)
    elif machine.name == THIS_MACHINE:
        machine = machine.model_copy(update={"device": None, "num": None})
    kind = machine.device or ("cuda" if cuda else "cpu")
    if machine.memory:
        memory = machine.memory * GB
    elif cuda:
        memory = torch.cuda.get_device_properties(device).total_memory
    else:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / num_processes
    disk = machine.disk * GB if machine.disk else files.count_free_bytes(Path(options.features.folder))
    return Hardware(kind, machine.num or num_processes, memory, disk, options.train.context_parallel)


def check_plan(options: RunOptions, hardware: Hardware) -> None:
    """Raises ValueError if the processes of a plan cannot be divided as the options ask."""
    shard, size, nodes = options.target.shard, options.train.context_parallel, options.machine.nodes
    num = hardware.num_processes
    if shard:
        check_groups(num, num if shard is True else shard, f"target.shard={shard}".lower())
    if size > 1:
        check_groups(num, size, f"train.context_parallel={size}")
    if num % nodes:
        raise ValueError(f"machine.nodes={nodes} must divide the {num} processes equally: change one of them.")


# Memory


def count_target_bytes(options: RunOptions, target: Target, num: int) -> float:
    """Bytes of the target in a process. target: outline"""
    weights = {id(value): value.nbytes for value in target.model.parameters()}
    if options.features.urls:
        ends = {id(part.weight): part.weight.nbytes for part in (target.embed, target.lm_head)}
        return float(sum(ends.values()))
    num = count_target_devices(options, num)
    if target.quantisation is not None:  # an outline has the shapes of weights that are not quantised
        stored = sum(file.stat().st_size for file in Path(options.target.name).glob("*.safetensors"))
        return float(stored or QUANTISED_RATIO * sum(weights.values())) / num
    total = float(sum(weights.values()))
    if options.target.shard:  # all but the layers is whole
        layers = sum(list_layer_bytes(target, num))
        return total - layers + layers / num
    return total / num


def count_target_devices(options: RunOptions, num: int) -> int:
    """The devices that hold a target together. num: processes of the run"""
    if options.target.device == "auto":
        return (options.machine.num if options.plans_other_machine else torch.cuda.device_count()) or 1
    return num if options.target.shard is True else max(1, options.target.shard)


@dataclass(frozen=True)
class RunCount:
    """Counts of a run. drafter: outline; memory: bytes of a process; pace: pace of the machine, by a roofline

    gathered: bytes of each gather of keys in a micro-batch, where processes divide texts
    """

    drafter: Head
    memory: Memory
    pace: Pace
    gathered: list[int]


def count_run(options: RunOptions, sizes: RunSizes, target: Target, texts: TextLengths, hardware: Hardware) -> RunCount:
    """Counts what a process needs, for heads that leave the target as it is. target: outline"""
    machine, tokens = options.machine, sizes.batch * sizes.length
    peak, bandwidth = 1e12 * (machine.flops or 0) or H100_PEAK, GB * (machine.bandwidth or 0) or H100_BANDWIDTH
    drafter = build_outline_drafter(sizes, target)
    muon = list_hidden_matrices(drafter) if options.optimizer.name == "muon" else []
    share = CountedShare(hardware.group_size - 1, hardware.group_size)  # the last part of a text, which is all answer
    with fast.force_paths("loss", *(["varlen"] if hardware.device == "cuda" else [])):
        count = count_step(options, sizes, drafter, texts, share, peak=peak, bandwidth=bandwidth)
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
        update=estimate_update_seconds(drafter, muon, hardware.num_processes, peak=peak, bandwidth=bandwidth),
    )
    return RunCount(drafter, memory, pace, share.gathered)


def instantiate(settings: dict, *arguments: Any, **keywords: Any) -> Any:
    """An instance of the class that `_target_` names. Raises ValueError for a setting that its constructor lacks."""
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


def make_objective(options: RunOptions, sizes: RunSizes, drafter: Head) -> nn.Module:
    """The objective of a run of these sizes."""
    recompute = {CHECKPOINTING: sizes.recompute} if CHECKPOINTING in options.head.objective else {}
    return instantiate(options.head.objective | recompute, drafter)


def count_optimizer_bytes(drafter: Head, muon: list[nn.Parameter], *, ema: bool) -> float:
    """Bytes of a drafter's weights, their average, and the optimizer's state.

    muon: matrices that Muon trains, with one moment for each weight, where AdamW has two
    """
    return 4.0 * drafter.num_parameters() * (4 if ema else 3) - 4.0 * sum(value.numel() for value in muon)


def count_reading_bytes(target: Target, tokens: int) -> float:
    """Bytes of the target's own pass over a micro-batch, at most."""
    hidden_width = getattr(target.config, "intermediate_size", None) or 4 * target.width
    return (
        tokens * 2.0 * (8 * target.width + 3 * (max(hidden_width) if isinstance(hidden_width, list) else hidden_width))
    )


def estimate_reading_seconds(options: RunOptions, target: Target, drafter: Head, peak: float) -> float:
    """Seconds of the target's own pass for a token, or of its outputs over the network. peak: FLOP/s"""
    if options.features.urls:
        return count_bytes_per_token(target, len(drafter.target_layers)) / (GB * (options.machine.network or 1.0))
    experts = find_experts(target.config.to_dict())
    dense, mixed = count_weights(target.decoder, target.embed.weight, experts)
    used = dense + (mixed * experts.per_token / experts.num if experts else 0.0)
    return 2 * used / (PRODUCT_SHARE * peak) * PASS_TIME_RATIO


def estimate_update_seconds(
    drafter: Head, muon: list[nn.Parameter], num_processes: int, *, peak: float, bandwidth: float
) -> float:
    """Seconds of the optimizer's update, without exchanges. peak, bandwidth: FLOP/s and bytes/s"""
    _, loads = divide_matrices(muon, num_processes)
    return 28.0 * drafter.num_parameters() / bandwidth + max(loads) / (0.5 * peak)


def count_bytes_per_token(target: Target, num_layers: int) -> int:
    """Bytes of a token's hidden states and of its final one. num_layers: hidden states"""
    return (num_layers + 1) * target.width * target.embed.weight.element_size()


def count_start_bytes(options: RunOptions, solve_packs: int, drafter: Head, texts: TextLengths) -> float:
    """Bytes of the closed-form start: its slots, as they are read and in float32, and two square matrices."""
    if options.start is not None or not isinstance(drafter, Drafter) or not solve_packs or not drafter.solves:
        return 0.0
    width, layers = drafter.target.width, len(drafter.target_layers)
    num = count_start_tokens(solve_packs, texts, width)
    depth = 1 if drafter.depth is None else options.head.objective["depth"]
    wide = (layers + 2) * width
    return num * width * (layers + 1 + depth) * (2 + 4) + 2 * 4.0 * wide * wide


def count_start_tokens(solve_packs: int, texts: TextLengths, width: int) -> float:
    """Tokens that the closed-form start reads. width: width of the target"""
    return min(max(START_SLOTS, 6 * width), min(solve_packs, texts.num_packs) * texts.num_tokens / texts.num_packs)


def count_step(
    options: RunOptions, sizes: RunSizes, drafter: Drafter, texts: TextLengths, share: CountedShare, **machine: float
) -> OperationCount:
    """Counts a step of the drafter, from features. texts: texts of the data, of which 30 % are taken as prompt

    share: the part of each text; it takes the gathers of keys
    """
    length, num = sizes.length, sizes.batch
    is_whole = share.size > 1 or not len(texts.lengths)  # else the last part would be padding
    text_length = length if is_whole else min(max(2, int(texts.lengths.mean())), length)
    texts_of_pack = length // text_length
    mask = [position >= 0.3 * text_length for position in range(text_length)]
    rows = [Row(str(number), "all", [1] * text_length, mask) for number in range(texts_of_pack)]
    objective: Any = make_objective(options, sizes, drafter)
    objective.text_share = share
    batch = collate([rows] * num, length=length, pad_token=0).move_to(torch.device("meta"))
    width, num_layers = drafter.target.width, len(drafter.target_layers)
    with OperationCount([text_length] * texts_of_pack * num, **machine) as count:
        count.pairs *= (2 * share.size - 1) / share.size**2  # of the last part of one text
        sizes_of_output = [(num, length, layers * width) for layers in (num_layers, 1)]
        output = TargetOutput(*(torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes_of_output))
        with Autocast() if sizes.precision != "fp32" else contextlib.nullcontext():
            loss = objective(batch, output, compare=False)
            # Of an edge: no mode takes the call, so activations that are computed again are counted, too
            torch.autograd.backward(torch.autograd.graph.get_gradient_edge(loss.total / 100))
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
    """The pace of three functions on this device. The first batch warms up.

    read, step: functions of the number of a batch; tokens: tokens of each batch; wait: wait for the device
    patient: whether all batches are measured; else a batch of more than ten seconds is the last
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
    """The memory with the most bytes that this process has held for a step. The start stays as it was counted."""
    ratio, overhead = (1.0, CUDA_CONTEXT_BYTES) if device.type == "cuda" else (READ_AHEAD_RATIO, 0.0)
    return replace(counted_memory, step=ratio * max(0.0, overhead + read_peak_memory(device) - counted_memory.fixed))


# The plan


@dataclass(frozen=True)
class Plan:
    """A printed plan. lines: texts by heading; problems: reasons why the run cannot start, with what to change"""

    lines: dict[str, str]
    problems: list[str]

    def __str__(self) -> str:
        lines = [f"{heading:<9}{text}" for heading, text in self.lines.items()]
        return "\n".join([*lines, *(f"does not fit: {problem}" for problem in self.problems)])


def make_plan(
    config: RunConfig, run_count: RunCount, texts: TextLengths, hardware: Hardware, memory: Memory, pace: Pace | None
) -> Plan:
    """The plan of a run. run_count: drafter, and gathers of keys; pace: None where the run does not fit here"""
    train, features, drafter = config.train, config.features, run_count.drafter
    step_tokens = train.batch * train.accumulation * hardware.num_groups * texts.pack_tokens
    tokens = train.steps * step_tokens
    time_taken = "not measured"
    if pace is not None:
        cost = Cost(pace, texts.num_tokens, hardware.num_groups, cached=features.mode == "cached")
        time_taken = describe_time(config, drafter, texts, cost, tokens, step_tokens)
    size = drafter.num_parameters()
    per_token = count_bytes_per_token(drafter.target, len(drafter.target_layers))
    feature_bytes = min(tokens, texts.num_tokens) * per_token if features.mode == "cached" else 0.0
    validations = math.ceil(train.steps / train.validate_every) if train.validate_every else 1
    disk = feature_bytes + 2 * 16.0 * size + 2.0 * size * validations
    num_reads = hardware.group_size if features.mode == "engine" else 1  # each process of a group reads whole texts
    sent = f"{tokens * num_reads * per_token / GB:,.1f} GB from the engine" if features.urls else "none"
    rows = f"{len(texts.lengths):,} rows, in {texts.num_packs:,} packs of {config.data.length:,}"
    readers = f"{hardware.num_groups} {'processes' if hardware.group_size == 1 else 'groups of processes'}"
    parts = f"{train.batch} packs x {train.accumulation} micro-batches x {readers}"
    vocab = drafter.vocab_size
    lines = {
        "reads": f"{tokens:,.0f} tokens, {tokens / texts.num_tokens:.2g} times the {texts.num_tokens:,} of {rows}",
        "steps": f"{train.steps:,} of {step_tokens:,.0f} tokens: {parts}",
        "drafter": f"{type(drafter).__name__}, {size / 1e6:.1f} M trained parameters, drafts from {vocab:,} tokens",
        "memory": f"{memory} of {hardware.memory / GB:.1f} GB in each process",
        "time": time_taken,
        "disk": f"{disk / GB:.2f} GB ({feature_bytes / GB:.2f} of features) of {hardware.disk / GB:,.0f} GB that are "
        "free",
        "network": sent,
    }
    if hardware.num_processes > 1:
        exchanges = count_exchanges(config, drafter, hardware, run_count.gathered)
        lines["sent"] = describe_exchanges(exchanges, config.machine, hardware)
    problems = find_problems(config, memory, hardware)
    if disk > hardware.disk:
        problems.append(
            f"{disk / GB:.1f} GB are written and {hardware.disk / GB:.1f} GB are free: use features.mode=online."
        )
    return Plan(lines, problems)


def describe_time(
    config: RunConfig, drafter: Head, texts: TextLengths, cost: Cost, tokens: float, step_tokens: float
) -> str:
    """The time of a run, with its closed-form start. tokens, step_tokens: tokens of the run and of a step"""
    spent, start = cost.count_seconds(tokens, step_tokens), 0.0
    if count_start_bytes(config, config.solve_packs, drafter, texts) and not cost.cached:
        start = count_start_tokens(config.solve_packs, texts, drafter.target.width) * cost.pace.read
    total = progress.format_duration(spent + start)
    condition = " if the engine keeps up" if config.features.urls else ""
    before = f", {progress.format_duration(start)} of them before the first step" if start else ""
    return f"{total} of training at {tokens / (spent or 1.0):,.0f} tokens/s{condition}{before}"


def read_target_config(options: RunOptions) -> PreTrainedConfig:
    """The target's config.json, or its outline in conf/target where a plan for another machine cannot reach it."""
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
    """The target's shapes; None for families whose shapes depend on values, which are not counted."""
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
        devices = f"{hardware.num_processes} x {machine.memory:g} GB"
        where = f"{machine.name}: {devices}, from data sheets and a roofline, not measured"
    tried = "" if target.tried or not target.outline else f"; {target.name} was never run by this project"
    return f"plan for {path} on {where}{tried}"
