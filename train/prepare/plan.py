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
from specdec.target.structure import count_weights, experts_of
from specdec.text.conversations import Row
from train.data.batches import collate
from train.loop.optimizer import hidden_matrices
from train.loop.trainer import LEAST_SLOTS, read_peak_memory
from train.prepare.count_tensors import BANDWIDTH, PEAK, Autocast, Count
from train.settings.decide import GB, Cost, Memory, Pace, Place, RunSizes, TextLengths, find_problems
from train.settings.options import HERE, MachineOptions, RunConfig, RunOptions

CONTEXT = 0.8 * GB  # of a GPU, that CUDA and the libraries take
PRODUCTS, BESIDE = 0.65, 1.3  # share of the peak of a target's products; its time with all else, over theirs
PROCESS = 0.55 * GB  # of Python and its libraries, on a CPU
# Of a CPU: a step and what is read ahead meanwhile, over a step alone (results/47-right-by-default.md)
BESIDE_STEPS = 1.8
MUON_STEPS = 5  # steps of Muon
QUANTISED = 0.3  # bytes of quantised weights over those in 16 bits, where the files are not here
WITHOUT_VALUES = (ValueError, RuntimeError, TypeError)  # what tensors without values may raise


# Machines


def find_place(options: RunOptions, device: torch.device, num: int) -> Place:
    """This machine, or the one that is planned for."""
    machine, cuda = options.machine, device.type == "cuda"
    if machine.name != HERE and not options.elsewhere:  # a run is where it is
        machine = MachineOptions(name=machine.name)
    elif machine.name == HERE:
        machine = machine.model_copy(update={"device": None, "num": None})
    kind = machine.device or ("cuda" if cuda else "cpu")
    here = (
        torch.cuda.get_device_properties(device).total_memory
        if cuda
        else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )
    memory = machine.memory * GB if machine.memory else here / (1 if cuda else num)
    disk = machine.disk * GB if machine.disk else files.free_bytes(Path(options.features.folder))
    return Place(kind, machine.num or num, memory, disk)


# Memory


def target_bytes(options: RunOptions, target: Target, num: int) -> float:
    """Of a process. target: an outline"""
    weights = {id(value): value.nbytes for value in target.model.parameters()}
    if options.features.urls:
        ends = {id(part.weight): part.weight.nbytes for part in (target.embed, target.lm_head)}
        return float(sum(ends.values()))
    if options.target.device == "auto":
        num = (options.machine.num if options.elsewhere else torch.cuda.device_count()) or 1
    elif not options.target.shard:
        num = 1
    if target.quantisation is not None:  # an outline has the shapes of weights that are not quantised
        stored = sum(file.stat().st_size for file in Path(options.target.name).glob("*.safetensors"))
        return float(stored or QUANTISED * sum(weights.values())) / num
    return sum(weights.values()) / num


@dataclass(frozen=True)
class Counted:
    """drafter: without values; memory: of a process; pace: of a machine with these figures, by a roofline"""

    drafter: Head
    memory: Memory
    pace: Pace


def count_run(options: RunOptions, sizes: RunSizes, target: Target, texts: TextLengths, place: Place) -> Counted:
    """What a process needs, for heads that leave the target as it is. target: an outline"""
    machine, tokens = options.machine, sizes.batch * sizes.length
    peak, bandwidth = 1e12 * (machine.flops or 0) or PEAK, GB * (machine.bandwidth or 0) or BANDWIDTH
    drafter = build_outline_drafter(sizes, target)
    muon = hidden_matrices(drafter) if options.optimizer.name == "muon" else []
    with fast.forced("loss", *(["varlen"] if place.device == "cuda" else [])):
        count = count_step(options, sizes, drafter, texts, peak=peak, bandwidth=bandwidth)
    memory = Memory(
        target=target_bytes(options, target, place.num),
        drafter=optimizer_bytes(drafter, muon, ema=options.train.ema is not None),
        step=max(float(count.live), reading_bytes(target, tokens)),
        start=start_bytes(options, sizes.solve_packs, drafter, texts),
        other=CONTEXT if place.device == "cuda" else PROCESS,
    )
    pace = Pace(
        read=reading_seconds(options, target, drafter, peak),
        step=count.seconds / tokens,
        update=update_seconds(drafter, muon, peak=peak, bandwidth=bandwidth),
    )
    return Counted(drafter, memory, pace)


def make(settings: dict, *arguments: Any, **more: Any) -> Any:
    """What `_target_` names, made with the other settings. Raises ValueError for one that it does not have."""
    others = {key: value for key, value in settings.items() if key != "_target_"}
    try:
        return pkgutil.resolve_name(settings["_target_"])(*arguments, **others, **more)
    except TypeError as error:
        raise ValueError(str(error)) from error


def build_outline_drafter(sizes: RunSizes, target: Target) -> Drafter:
    size = sizes.vocab_size
    vocab = None if size is None or size >= target.vocab_size else torch.arange(size)
    with torch.device("meta"), Count():
        return make(sizes.drafter, target, vocab=vocab).to("meta")


def optimizer_bytes(drafter: Head, muon: list[nn.Parameter], *, ema: bool) -> float:
    """Of a drafter's weights, their average, and the optimizer's state. muon: matrices with one number for each, where AdamW has two"""
    return 4.0 * drafter.num_parameters() * (4 if ema else 3) - 4.0 * sum(value.numel() for value in muon)


def reading_bytes(target: Target, tokens: int) -> float:
    """Of the target's own pass over a micro-batch, at most."""
    inner = getattr(target.config, "intermediate_size", None) or 4 * target.width
    return tokens * 2.0 * (8 * target.width + 3 * (max(inner) if isinstance(inner, list) else inner))


def reading_seconds(options: RunOptions, target: Target, drafter: Head, peak: float) -> float:
    """Of the target's own pass for a token, or of its outputs over the network. peak: FLOP/s"""
    if options.features.urls:
        return bytes_per_token(target, len(drafter.target_layers)) / (GB * (options.machine.network or 1.0))
    experts = experts_of(target.config.to_dict())
    dense, mixed = count_weights(target.decoder, target.embed.weight, experts)
    used = dense + (mixed * experts.per_token / experts.num if experts else 0.0)
    return 2 * used / (PRODUCTS * peak) * BESIDE


def update_seconds(drafter: Head, muon: list[nn.Parameter], *, peak: float, bandwidth: float) -> float:
    """Of the optimizer. peak, bandwidth: FLOP/s and bytes/s"""
    seconds = 28.0 * drafter.num_parameters() / bandwidth
    for low, high in (sorted(matrix.shape) for matrix in muon):
        seconds += MUON_STEPS * (4.0 * low * low * high + 2.0 * low**3) / (0.5 * peak)
    return seconds


def bytes_per_token(target: Target, layers: int) -> int:
    """Of so many hidden states and the final one."""
    return (layers + 1) * target.width * target.embed.weight.element_size()


def start_bytes(options: RunOptions, solve_packs: int, drafter: Head, texts: TextLengths) -> float:
    """Of the closed-form start: the slots that it holds, once as they are read and once in float32, and two square matrices."""
    if options.start is not None or not isinstance(drafter, Drafter) or not solve_packs or not drafter.solves:
        return 0.0
    width, layers = drafter.target.width, len(drafter.target_layers)
    num = start_tokens(solve_packs, texts, width)
    depth = 1 if drafter.depth is None else options.head.objective["depth"]
    wide = (layers + 2) * width
    return num * width * (layers + 1 + depth) * (2 + 4) + 2 * 4.0 * wide * wide


def start_tokens(solve_packs: int, texts: TextLengths, width: int) -> float:
    """That the closed-form start reads. width: of the target"""
    return min(max(LEAST_SLOTS, 6 * width), min(solve_packs, texts.num_packs) * texts.num_tokens / texts.num_packs)


def count_step(options: RunOptions, sizes: RunSizes, drafter: Drafter, texts: TextLengths, **machine: float) -> Count:
    """A step of the drafter, from given features, of packs with texts of these lengths, of which 30 % are prompt."""
    length, num = sizes.length, sizes.batch
    mean = max(2, int(texts.lengths.mean())) if len(texts.lengths) else length
    mean = min(mean, length)
    texts_of_pack = [mean] * (length // mean)
    rows = [
        [
            Row(str(i), "all", [1] * size, [place >= 0.3 * size for place in range(size)])
            for i, size in enumerate(texts_of_pack)
        ]
    ] * num
    objective: nn.Module = make(options.head.objective, drafter)
    batch = collate(rows, length=length, pad_token=0).to(torch.device("meta"))
    width = drafter.target.width
    empty: Callable[[int], Tensor] = lambda w: torch.empty(num, length, w, dtype=torch.bfloat16, device="meta")
    with Count(texts_of_pack * num, **machine) as count:
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
    found = []
    for number, num in enumerate(tokens):
        moments = [time.perf_counter()]
        for work in (lambda n=number: read(n), lambda n=number: step(n), update):
            work()
            wait()
            moments.append(time.perf_counter())
        found.append([(b - a) / each for a, b, each in zip(moments, moments[1:], (num, num, 1))])
        if not patient and moments[-1] - moments[0] > 10:
            break
    found = found[1:] or found
    return Pace(*(sum(column) / len(column) for column in zip(*found)))


def measured_memory(counted: Memory, device: torch.device) -> Memory:
    """The most that this process has held after a few steps, in the place of what was counted; the start is left as counted."""
    beside, other = (1.0, CONTEXT) if device.type == "cuda" else (BESIDE_STEPS, 0.0)
    return replace(counted, step=beside * max(0.0, other + read_peak_memory(device) - counted.fixed))


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
    config: RunConfig, drafter: Head, texts: TextLengths, place: Place, memory: Memory, pace: Pace | None
) -> Plan:
    """drafter: of the run, or of an outline; pace: None: not known, as the run does not fit here"""
    train, plan = config.train, Plan()
    step_tokens = train.batch * train.accumulation * place.num * texts.pack_tokens
    tokens = train.steps * step_tokens
    cached = config.features.mode == "cached"
    spent = start = 0.0
    if pace is not None:
        spent = Cost(pace, texts.num_tokens, place.num, cached).seconds(tokens, step_tokens)
        if start_bytes(config, config.solve_packs, drafter, texts) and not cached:
            start = start_tokens(config.solve_packs, texts, drafter.target.width) * pace.read
    length, served = progress.duration, " if the engine keeps up" if config.features.urls else ""
    time_taken = f"{length(spent + start)} of training at {tokens / (spent or 1.0):,.0f} tokens/s{served}"
    time_taken += f", {length(start)} of them before the first step" if start else ""
    size = drafter.num_parameters()
    per_token = bytes_per_token(drafter.target, len(drafter.target_layers))
    features = min(tokens, texts.num_tokens) * per_token if cached else 0.0
    validations = math.ceil(train.steps / train.validate_every) if train.validate_every else 1
    disk = features + 2 * 16.0 * size + 2.0 * size * validations
    sent = tokens * per_token if config.features.urls else 0.0
    rows = f"{len(texts.lengths):,} rows, in {texts.num_packs:,} packs of {config.data.length:,}"
    parts = f"{train.batch} packs x {train.accumulation} micro-batches x {place.num} processes"
    vocab = drafter.vocab_size
    plan.lines += [
        ("reads", f"{tokens:,.0f} tokens, {tokens / texts.num_tokens:.2g} times the {texts.num_tokens:,} of {rows}"),
        ("steps", f"{train.steps:,} of {step_tokens:,.0f} tokens: {parts}"),
        ("drafter", f"{type(drafter).__name__}, {size / 1e6:.1f} M trained parameters, drafts from {vocab:,} tokens"),
        ("memory", f"{memory} of {place.memory / GB:.1f} GB in each process"),
        ("time", time_taken if pace else "not measured"),
        ("disk", f"{disk / GB:.2f} GB ({features / GB:.2f} of features) of {place.disk / GB:,.0f} GB that are free"),
        ("network", f"{sent / GB:,.1f} GB from the engine" if sent else "none"),
    ]
    plan.problems += find_problems(config, memory, place)
    if disk > place.disk:
        plan.problems.append(
            f"{disk / GB:.1f} GB are written and {place.disk / GB:.1f} GB are free: use features.mode=online."
        )
    return plan


def read_config(options: RunOptions) -> PreTrainedConfig:
    """The target's config.json, or what conf/target has of it where a plan for another machine cannot reach it."""
    given = options.target
    known = dict(given.outline or {})
    if options.elsewhere and known.pop("of", None) == given.name and not Path(given.name).is_dir():
        return AutoConfig.for_model(**known)
    return load_config(given.name, revision=given.revision, trust_remote_code=given.trust_remote_code)


def make_outline(options: RunOptions, found: PreTrainedConfig, dtype: str) -> Target | None:
    """The shapes of the target. None for families whose shapes cannot be told without values: these are not counted."""
    dtype = "float32" if dtype == "float32" else "bfloat16"
    if options.target.trust_remote_code:  # whose code runs once, when the target is loaded
        return None
    try:
        return Target.outline(found, name=options.target.name, dtype=dtype)
    except WITHOUT_VALUES:
        return None


def heading(config: RunConfig, path: Path, place: Place) -> str:
    machine, target, where = config.machine, config.target, "this machine"
    if machine.name != HERE:
        where = f"{machine.name}: {place.num} x {machine.memory:g} GB, from data sheets and a roofline, not measured"
    tried = "" if target.tried or not target.outline else f"; {target.name} was never run by this project"
    return f"plan for {path} on {where}{tried}"
