"""Decides the options that a run leaves to `auto`, by device, target and data. docs/defaults.md has rules and sources.

A value that the user gives is never changed. config.yaml keeps the decisions. A resumed run takes them from there, so
it is the same run on another machine.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol, cast

import numpy
from numpy import ndarray

from specdec import checkpoint
from specdec.core.option_types import format_value, read_options
from specdec.core.precision import AUTO, DtypeChoice
from specdec.options.config_files import fill, flatten
from train.settings.options import CHECKPOINTING, NORM_OPTIONS, RunConfig, RunOptions

UNCUT_SHARE = 0.995  # share of the rows that a pack must hold whole
MIN_LENGTH = {"cpu": 512, "cuda": 2048}  # tokens of a pack, at least
MAX_CPU_LENGTH = 4096  # tokens of a pack on a CPU, at most: a step takes a minute
LENGTH_MULTIPLE = 64  # tokens: lengths of packs are rounded up to a multiple
GPU_BATCH_TOKENS = 8192  # tokens of a micro-batch on a GPU, at most (docs/gpu.md)
CPU_BATCH_TOKENS = 1024  # tokens of a micro-batch on a CPU, at most: larger ones are no faster
AIMED_STEPS = 1000  # steps of a run, as long as STEP_TOKEN_BOUNDS allow it
STEP_TOKEN_BOUNDS = (512, 32768)  # tokens of a step, at least and at most
PASS_TO_UPDATE_RATIO = 4.0  # time of a step's passes over that of its update, at least
MAX_UPDATE_TOKENS = 2048  # tokens of a step that PASS_TO_UPDATE_RATIO may demand, at most
MAX_EPOCHS = 4  # reading the same texts more often brings little (2305.16264)
ENOUGH_TOKENS = 1e9  # tokens that published heads read, at least: more data are read once
CPU_HOURS = 1.0  # hours of a run on a CPU whose length nobody gives
LONG_RUN_TOKENS = (
    0.7e6  # tokens above which norms are worth more than a closed-form start (results/47-right-by-default.md)
)
COVERED_SHARE = 0.985  # share of the answers' tokens that a draft vocabulary covers
VOCABULARY_BOUNDS = (8192, 32768)  # tokens of a draft vocabulary, at least and at most
DISK_SHARE = 0.25  # share of the free disk that features may take
VALIDATION_SECONDS = 600.0  # seconds of training between two validations
VALIDATION_BOUNDS = (4, 20)  # validations of a run, at least and at most
SHORT_RUN_STEPS = 50  # steps below which the speed of the device is not measured
GB = 1e9
STEP_MARGIN = 0.95  # a step's memory is linear in its length, and some of it stays
MEMORY_SHARE = 0.92  # share of a device's memory that may be planned: the allocator loses the rest between tensors
PRECISION_BY_DTYPE = {"bfloat16": "bf16", "float32": "fp32"}  # precision of training by dtype of the device


# Facts


@dataclass(frozen=True)
class Hardware:
    """The devices of a run. device: cpu or cuda; memory: bytes of a device; disk: free bytes

    group_size: processes that divide each text
    """

    device: str
    num_processes: int
    memory: float
    disk: float
    group_size: int = 1

    @property
    def num_groups(self) -> int:
        """Groups of processes that read packs of their own."""
        return max(1, self.num_processes // self.group_size)


@dataclass(frozen=True)
class TargetFacts:
    """Limits of a target and of its head."""

    vocab_size: int
    max_positions: int | None  # tokens of a text, at most; None: no limit
    packed: bool  # whether rows share a pack
    max_drafts: int  # drafts of the head in a row


@dataclass(frozen=True)
class TextLengths:
    """The data in packs. lengths: tokens of each row, cut; counts: how often each token is supervised, if known"""

    lengths: ndarray
    num_packs: int
    counts: ndarray

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows, without padding."""
        return int(self.lengths.sum())

    @property
    def pack_tokens(self) -> float:
        """Tokens of a pack, on average."""
        return self.num_tokens / self.num_packs


@dataclass(frozen=True)
class RunSizes:
    """The decisions on which memory and speed of a run depend.

    drafter: `head.drafter`; recompute: whether the backward pass computes activations again
    """

    precision: str
    length: int
    batch: int
    vocab_size: int | None
    solve_packs: int
    drafter: dict
    recompute: bool = False


@dataclass(frozen=True)
class Memory:
    """Bytes of one process."""

    target: float
    drafter: float  # bytes of its weights and of the optimizer's state
    step: float  # bytes of gradients and of tensors for the backward pass
    start: float  # bytes of the closed-form start, before the first step
    overhead: float = 0.0

    @property
    def fixed(self) -> float:
        """Bytes that no shorter pack saves."""
        return self.overhead + self.target + self.drafter

    @property
    def total(self) -> float:
        return self.overhead + self.target + max(self.drafter + self.step, self.start)

    def fits(self, hardware: Hardware) -> bool:
        return self.total <= MEMORY_SHARE * hardware.memory

    def starts_too_large(self, hardware: Hardware) -> bool:
        """Whether all but the closed-form start fits."""
        return replace(self, start=0.0).fits(hardware) and not self.fits(hardware)

    def __str__(self) -> str:
        parts = {"target": self.target, "drafter and optimizer": self.drafter, "a step": self.step}
        if self.start > self.drafter + self.step:
            parts = {"target": self.target, "the closed-form start": self.start}
        return f"{self.total / GB:.2f} GB ({', '.join(f'{name} {value / GB:.2f}' for name, value in parts.items())})"


@dataclass(frozen=True)
class Pace:
    """Seconds on a device. read: target, for a token; step: training, for a token; update: optimizer, for a step"""

    read: float = 0.0
    step: float = 0.0
    update: float = 0.0


class Facts(Protocol):
    """The facts on which decisions rest."""

    hardware: Hardware

    @property
    def row_lengths(self) -> ndarray:
        """Tokens of each row, [R]"""

    def choose_dtype(self) -> DtypeChoice:
        """The dtype that the device computes in, and the reason."""

    def read_target(self, dtype: str) -> TargetFacts:
        """Limits of the target. dtype: dtype of its weights"""

    def pack_rows(self, length: int) -> TextLengths:
        """The data in packs of this length. Raises ValueError for a length that the target cannot read."""

    def cut_rows(self, length: int) -> TextLengths:
        """The data cut to fewer tokens, for counts, with the fewest packs that can hold it."""

    def count_memory(self, sizes: RunSizes) -> Memory | None:
        """Bytes of one process; None for heads and targets that cannot be counted."""

    def count_features(self) -> int:
        """Bytes of the target's outputs that the head reads for a token."""

    def measure_pace(self, sizes: RunSizes) -> Pace:
        """The pace of this device, or of the machine of a plan."""


# Decisions


@dataclass(frozen=True)
class Decision:
    """The value of an option. reason: words that are printed with it; empty: nothing is printed"""

    name: str
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={format_value(self.value)} ({self.reason})"


@dataclass(frozen=True)
class Decided:
    config: RunConfig
    decisions: list[Decision]


def decide(options: RunOptions, facts: Facts) -> Decided:
    """Decides all options that are auto, in the order of their dependence. Raises ValueError if the run cannot fit."""
    precision = decide_precision(options, facts)
    target = facts.read_target(precision[1].value)
    length = decide_length(options, facts.hardware, facts.row_lengths, target)
    validation = decide_validation(options, facts.hardware, target.max_drafts)
    texts, sizes, size_decisions = fit_memory(options, facts, target, precision[0].value, length)
    features = decide_features(options, facts.hardware, texts, sizes.batch, bytes_per_token=facts.count_features())
    pace = facts.measure_pace(sizes) if needs_pace(options) else Pace()
    cost = Cost(pace, texts.num_tokens, facts.hardware.num_groups, cached=features.value == "cached")
    steps, tokens = decide_steps(options, facts.hardware, texts, cost, sizes.batch)
    decisions = [*precision, *size_decisions, *validation, features, *steps, *decide_start(options, tokens)]
    return Decided(read_options(RunConfig, apply_decisions(options, decisions)), decisions)


def apply_decisions(options: RunOptions, decisions: list[Decision]) -> dict:
    """The options as a document, with these decisions in place of auto."""
    return fill(options.document(), {decision.name: decision.value for decision in decisions})


def list_arguments(decisions: list[Decision]) -> dict[str, Any]:
    """Arguments of a class, by their own names."""
    return {decision.name.rpartition(".")[2]: decision.value for decision in decisions}


def choose_value(options: RunOptions, name: str, value: Any, reason: str) -> Decision:
    """The value that the user gives to an option, or this one in the place of auto."""
    current = flatten(options.document())[name]
    return Decision(name, value, reason) if current == AUTO else Decision(name, current, "")


def decide_precision(options: RunOptions, facts: Facts) -> list[Decision]:
    """The precision of training, and the target's dtype."""
    is_open = AUTO in (options.precision, options.target.dtype)
    choice = facts.choose_dtype() if is_open else DtypeChoice("float32", "")
    return [
        choose_value(options, "precision", PRECISION_BY_DTYPE[choice.dtype], choice.reason),
        choose_value(options, "target.dtype", choice.dtype, choice.reason),
    ]


def decide_length(options: RunOptions, hardware: Hardware, lengths: ndarray, target: TargetFacts) -> Decision:
    """The tokens of a pack. lengths [R]: tokens of each row"""
    on_gpu = hardware.device == "cuda"
    shortest = MIN_LENGTH[hardware.device]
    quantile = int(numpy.quantile(lengths, UNCUT_SHARE, method="higher")) if len(lengths) else shortest
    lower = shortest
    if on_gpu:
        share = (
            aim_step_tokens(options, max(1, int(lengths.sum())) * MAX_EPOCHS) / hardware.num_groups
        )  # tokens of a step in one process
        lower = min(max(shortest, 2 ** round(math.log2(share))), GPU_BATCH_TOKENS)
    if not target.packed:  # the rest of a pack would be padding
        lower = LENGTH_MULTIPLE
    wanted = -(-quantile // LENGTH_MULTIPLE) * LENGTH_MULTIPLE
    length, limit = max(lower, wanted), f"at least {lower:,} on {describe_device(hardware)}; " if wanted < lower else ""
    if not on_gpu and length > MAX_CPU_LENGTH:
        length, limit = MAX_CPU_LENGTH, f"at most {MAX_CPU_LENGTH:,} on a CPU, for the time; "
    if target.max_positions is not None and target.max_positions < length:
        length, limit = target.max_positions, f"the target reads at most {target.max_positions:,}; "
    cut = int((lengths > length).sum())
    reason = f"{UNCUT_SHARE:.1%} of {len(lengths):,} rows have at most {quantile:,} tokens; {limit}cut: {cut:,}"
    return choose_value(options, "data.length", length, reason)


def describe_device(hardware: Hardware) -> str:
    return "a GPU" if hardware.device == "cuda" else "a CPU"


def decide_validation(options: RunOptions, hardware: Hardware, max_drafts: int) -> list[Decision]:
    """Drafts, prompts and tokens of a validation."""
    reason = f"on {describe_device(hardware)}"
    drafts, num_prompts, tokens = (4, 64, 256) if hardware.device == "cuda" else (2, 8, 48)
    if hardware.device == "cuda" and getattr(options.head.drafter_class, "context_kind", None) == "block":
        drafts = max_drafts  # a block's drafts come from one pass
    return [
        choose_value(options, "decode.depth", min(max_drafts, drafts), f"drafts of a round in validations {reason}"),
        choose_value(options, "validation.num_prompts", num_prompts, reason),
        choose_value(options, "validation.max_new_tokens", tokens, reason),
    ]


def fit_memory(
    options: RunOptions, facts: Facts, target: TargetFacts, precision: str, length: Decision
) -> tuple[TextLengths, RunSizes, list[Decision]]:
    """Decides length, vocabulary, batch, and what is computed again, so that the run fits into the memory.

    -> packs, sizes, decisions. Raises ValueError if the run cannot fit.
    """
    packed_length, texts = length.value, facts.pack_rows(length.value)
    vocabulary = decide_vocabulary(options, texts, target.vocab_size)
    start = decide_start(options, count_tokens_to_read(options, texts, batch=1))  # said with the steps
    start_options = list_arguments(start)
    solve_packs = start_options.pop("solve_packs")
    chosen = [length, decide_batch(options, facts.hardware, texts, length.value)]
    if CHECKPOINTING in options.head.objective:
        chosen.append(choose_value(options, f"head.objective.{CHECKPOINTING}", False, ""))
    decisions = {decision.name: decision for decision in chosen}
    while True:
        tokens, batch, *recompute = (decision.value for decision in decisions.values())
        window = decide_window(options, texts, target.max_drafts)
        drafter = options.head.drafter | start_options | list_arguments(window)
        sizes = RunSizes(precision, tokens, batch, vocabulary.value, solve_packs, drafter, recompute == [True])
        size_decisions = [*decisions.values(), *window, vocabulary]
        smaller = find_smaller_step(options, facts, sizes, [*size_decisions, *start])
        if smaller is not None:
            decisions[smaller.name] = smaller
            texts = facts.cut_rows(decisions[length.name].value)
        elif tokens == packed_length:
            return texts, sizes, size_decisions
        else:  # packed once, and counted with the packs
            packed_length, texts = tokens, facts.pack_rows(tokens)


def find_smaller_step(options: RunOptions, facts: Facts, sizes: RunSizes, decisions: list[Decision]) -> Decision | None:
    """What a run that does not fit into the memory lowers next; None: it fits, or it is a plan, which says so.

    decisions: decisions behind `sizes`. Raises ValueError if nothing helps.
    """
    memory = facts.count_memory(sizes)
    if memory is None or memory.fits(facts.hardware):
        return None
    smaller = shrink_step(options, memory, facts.hardware, sizes)
    if smaller is None and not options.plan:
        refuse_run(options, memory, facts.hardware, decisions)
    return smaller


def refuse_run(options: RunOptions, memory: Memory, hardware: Hardware, decisions: list[Decision]) -> NoReturn:
    """Raises ValueError: the run of these decisions does not fit."""
    decided_options = read_options(RunOptions, apply_decisions(options, decisions))
    (problem,) = find_problems(decided_options, memory, hardware)
    raise ValueError(f"This run does not fit: {problem} plan=true shows what it needs.")


def shrink_step(options: RunOptions, memory: Memory, hardware: Hardware, sizes: RunSizes) -> Decision | None:
    """Half the batch, or activations that are computed again, or the length that fits; None if none is auto or helps.

    memory: bytes of a run with `sizes`, too many for the device
    """
    room = MEMORY_SHARE * hardware.memory - memory.fixed
    if memory.starts_too_large(hardware) or room < 0:
        return None
    reason = f"{memory} were too much for {hardware.memory / GB:.1f} GB"
    if options.train.batch == AUTO and sizes.batch > 1:
        return Decision("train.batch", sizes.batch // 2, reason)
    # A block drafter has one step, and its loss needs more than its activations
    is_block_drafter = getattr(options.head.drafter_class, "context_kind", None) == "block"
    is_open = options.head.objective.get(CHECKPOINTING) == AUTO
    if is_open and not sizes.recompute and not is_block_drafter:
        return Decision(f"head.objective.{CHECKPOINTING}", True, reason)
    shortest = MIN_LENGTH[hardware.device]
    if options.data.length == AUTO and sizes.length > shortest:
        fitting = int(STEP_MARGIN * sizes.length * room / memory.step) // LENGTH_MULTIPLE * LENGTH_MULTIPLE
        return Decision("data.length", max(shortest, min(fitting, sizes.length - LENGTH_MULTIPLE)), reason)
    return None


def find_problems(options: RunOptions, memory: Memory, hardware: Hardware) -> list[str]:
    """Reasons why a run does not fit into the memory, with what to change; empty if it fits."""
    if memory.fits(hardware):
        return []
    if memory.starts_too_large(hardware):
        return [
            f"the closed-form start needs {(memory.overhead + memory.target + memory.start) / GB:.1f} GB in a process "
            f"that has {hardware.memory / GB:.1f} GB: lower solve_packs={options.solve_packs}, or set it to 0 for "
            "random weights."
        ]
    need = f"a process needs {memory} and has {hardware.memory / GB:.1f} GB: "
    if memory.target > 0.8 * MEMORY_SHARE * hardware.memory:
        alternatives = (
            "target.shard=true over more GPUs, target.device=auto, or an engine on other GPUs (features.mode=engine)"
        )
        return [f"{need}the target alone is too large. Give {alternatives}, or a smaller or quantised target."]
    return [f"{need}{options.describe_remedies()}."]


def decide_vocabulary(options: RunOptions, texts: TextLengths, num_tokens: int) -> Decision:
    """The size of the draft vocabulary; None: all tokens. num_tokens: tokens of the target"""
    sorted_counts = numpy.sort(texts.counts)[::-1]
    shares = sorted_counts.cumsum() / max(1, sorted_counts.sum())
    num_covering = int(numpy.searchsorted(shares, COVERED_SHARE)) + 1
    lower, upper = VOCABULARY_BOUNDS
    size = min(max(lower, -(-num_covering // 1024) * 1024), upper)
    if size >= num_tokens:
        value, reason = None, f"all {num_tokens:,} tokens of the target"
    elif not len(shares):
        value, reason = upper, "the most, as the answers were not encoded"
    else:
        share = shares[min(size, len(shares)) - 1]
        value = size
        covering = f"{num_covering:,} tokens cover {COVERED_SHARE:.1%} of the answers, these {share:.1%}"
        reason = f"{covering}; from {lower:,} to {upper:,}"
    if options.start is not None and options.start_vocab == "keep":
        reason = ""
    return choose_value(options, "head.vocab_size", value, reason)


def decide_features(
    options: RunOptions, hardware: Hardware, texts: TextLengths, batch: int, *, bytes_per_token: int
) -> Decision:
    """The source of the target's outputs. A GPU computes them anew, because reading them from a disk is slower."""
    size = texts.num_tokens * bytes_per_token
    fits = size <= DISK_SHARE * hardware.disk
    reads_again = count_tokens_to_read(options, texts, batch) > 1.2 * texts.num_tokens
    if options.features.urls:
        mode, reason = ("cached" if fits else "engine"), f"what the engine reads has {size / GB:.1f} GB"
    elif hardware.device == "cuda":
        mode, reason = "online", "the target's pass is a small part of a step on a GPU"
    elif not reads_again:
        mode, reason = "online", "each text is read once"
    elif not fits:
        mode, reason = "online", f"{size / GB:.1f} GB are more than a quarter of the free disk"
    else:
        mode, reason = "cached", f"texts are read again, and {size / GB:.2f} GB fit on the disk"
    return choose_value(options, "features.mode", mode, reason)


def decide_norms(options: RunOptions, names: list[str], tokens: float) -> tuple[bool, str]:
    """Whether the head has norms, and the reason. names: norms that its class has; tokens: tokens to read"""
    if options.start is not None:
        return False, ""
    values = [options.head.drafter[name] for name in names]
    if set(values) != {AUTO} or options.solve_packs not in (AUTO, 0) or tokens <= LONG_RUN_TOKENS:
        return True in values, ""
    return True, f"{tokens / 1e6:.2g} M tokens to read, more than {LONG_RUN_TOKENS / 1e6:g} M"


def decide_start(options: RunOptions, tokens: float) -> list[Decision]:
    """Whether a head has a closed-form start, or norms, which do not go with such a start. tokens: tokens to read"""
    names = [name for name in NORM_OPTIONS if name in options.head.drafter]
    norms, reason = decide_norms(options, names, tokens)
    decisions = [choose_value(options, f"head.drafter.{name}", norms, reason) for name in names]
    solved = choose_value(options, "solve_packs", 0 if norms else 200, "random weights, with norms" if norms else "")
    return [*decisions, solved]


def decide_window(options: RunOptions, texts: TextLengths, max_drafts: int) -> list[Decision]:
    """The window of a head: no text of training is longer, so training is as without one.

    max_drafts: drafts of the head in a row, at most
    It exceeds the drafts of a round, and the steps of training. A checkpoint keeps its window unless that is the
    longest text of its own training, in all layers.
    """
    drafter, depths = options.head.drafter, (max_drafts, options.decode.depth, options.head.objective.get("depth"))
    shortest = 1 + max(depth for depth in depths if isinstance(depth, int))
    longest = max(shortest, int(texts.lengths.max(initial=2)))
    value = cast(int | None, longest)
    if options.start is not None:
        start = checkpoint.resolve(options.start)
        document, trained_length = checkpoint.read_document(start), checkpoint.find_trained_length(start)
        window, is_uniform = document.get("window"), not document.get("full_layers")
        is_kept = window is None or window != trained_length or not is_uniform
        value = None if is_kept else max(window or 0, longest)
    reason = "" if value is None else f"a layer sees at most as many positions as in training: {value:,}"
    decisions = [choose_value(options, "head.drafter.window", value, reason)] if "window" in drafter else []
    if "window_causal" in drafter:  # without a window, full_causal holds
        is_causal = drafter["window"] != AUTO or drafter.get("full_causal", False)
        decisions.append(choose_value(options, "head.drafter.window_causal", is_causal, ""))
    return decisions


def decide_batch(options: RunOptions, hardware: Hardware, texts: TextLengths, length: int) -> Decision:
    """The packs of a micro-batch."""
    upper = max(1, (GPU_BATCH_TOKENS if hardware.device == "cuda" else CPU_BATCH_TOKENS) // length)
    accumulation = options.train.accumulation
    times = 1 if isinstance(accumulation, str) else accumulation
    aim = aim_step_tokens(options, count_tokens_to_read(options, texts, batch=1)) / times / hardware.num_groups
    batch = min(upper, max(1, round(aim / texts.pack_tokens)))
    reason = f"packs of {length:,} tokens at once on {describe_device(hardware)}"
    return choose_value(options, "train.batch", batch, reason)


# Steps


@dataclass(frozen=True)
class Cost:
    """The seconds of training. text_tokens: tokens of the data; cached: whether the target reads each text once"""

    pace: Pace
    text_tokens: int
    num_groups: int
    cached: bool

    def count_seconds(self, tokens: float, step_tokens: float) -> float:
        """Seconds of a run. tokens, step_tokens: tokens of the run and of a step"""
        read = min(tokens, self.text_tokens) if self.cached else tokens
        return (
            read * self.pace.read + tokens * self.pace.step
        ) / self.num_groups + tokens / step_tokens * self.pace.update

    def find_affordable_share(self, tokens: float, step_tokens: float, limit: float) -> float:
        """The largest share of the tokens that takes at most `limit` seconds, by bisection."""
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            if self.count_seconds(middle * tokens, step_tokens) <= limit:
                low = middle
            else:
                high = middle
        return low


def aim_step_tokens(options: RunOptions, tokens: float, lower: float = STEP_TOKEN_BOUNDS[0]) -> float:
    """The tokens of a step. tokens: tokens of the run; lower: tokens of a step, at least"""
    steps = options.train.steps
    return min(max(lower, tokens / (AIMED_STEPS if isinstance(steps, str) else steps)), STEP_TOKEN_BOUNDS[1])


def count_tokens_to_read(options: RunOptions, texts: TextLengths, batch: int) -> float:
    """The tokens to read without a limit of time. batch: packs of a micro-batch where it is auto"""
    train = options.train
    if isinstance(train.steps, str):
        return train.tokens or count_epochs(options, texts) * texts.num_tokens
    batch = batch if isinstance(train.batch, str) else train.batch
    accumulation = 1 if isinstance(train.accumulation, str) else train.accumulation
    return train.steps * max(batch * accumulation * texts.pack_tokens, STEP_TOKEN_BOUNDS[0])


def count_epochs(options: RunOptions, texts: TextLengths) -> float:
    """The times that the data is read."""
    epochs = options.train.epochs
    return min(MAX_EPOCHS, max(1.0, ENOUGH_TOKENS / texts.num_tokens)) if isinstance(epochs, str) else epochs


def needs_pace(options: RunOptions) -> bool:
    """Whether a decision depends on the speed of this device."""
    train = options.train
    is_short = isinstance(train.steps, int) and train.steps < SHORT_RUN_STEPS
    return options.plan or (AUTO in (train.steps, train.accumulation, train.validate_every) and not is_short)


def decide_steps(
    options: RunOptions, hardware: Hardware, texts: TextLengths, cost: Cost, batch: int
) -> tuple[list[Decision], float]:
    """Decides epochs, hours, accumulation, steps and validations. -> decisions, and the tokens that all steps read"""
    train, is_open = options.train, isinstance(options.train.steps, str)
    tokens_to_read, pack_tokens = (
        count_tokens_to_read(options, texts, batch),
        batch * hardware.num_groups * texts.pack_tokens,
    )
    lower = count_min_step_tokens(cost.pace, hardware.num_groups)
    read_again = f"1 to {MAX_EPOCHS}, fewer for more than {ENOUGH_TOKENS / MAX_EPOCHS / 1e6:,.0f} M tokens"
    epochs = choose_value(options, "train.epochs", float(count_epochs(options, texts)), read_again)
    hours = decide_hours(options, hardware)
    tokens, reason = tokens_to_read, ""
    if is_open:
        reason = (
            f"train.tokens={train.tokens:,}"
            if train.tokens
            else f"{epochs.value:.3g} times {texts.num_tokens:,} tokens"
        )
        if hours.value is not None:
            tokens = limit_tokens(options, cost, tokens_to_read, pack_tokens, lower, seconds=hours.value * 3600)
        if tokens < tokens_to_read:
            allowed = f"train.hours={hours.value:g} allows {tokens:,.0f} tokens at this speed"
            reason = f"{allowed}; {reason} would take {tokens_to_read / tokens:.1f} times as long"
    if not is_open or train.tokens:  # nothing depends on it
        epochs = replace(epochs, reason="")
    micro_batches = max(1, round(aim_step_tokens(options, tokens, lower) / pack_tokens))
    step_reason = f"{micro_batches * pack_tokens:,.0f} tokens a step"
    if is_open:
        step_reason += f": {AIMED_STEPS:,} steps, but {STEP_TOKEN_BOUNDS[0]:,.0f} to {STEP_TOKEN_BOUNDS[1]:,} tokens"
    accumulation = choose_value(options, "train.accumulation", micro_batches, step_reason)
    step_tokens = accumulation.value * pack_tokens
    steps = choose_value(options, "train.steps", max(1, math.ceil(tokens / step_tokens - 0.01)), reason)
    tokens = steps.value * step_tokens
    validations = decide_validations(options, steps.value, cost.count_seconds(tokens, step_tokens))
    return [epochs, hours, accumulation, steps, validations], tokens


def count_min_step_tokens(pace: Pace, num_groups: int) -> float:
    """The tokens of a step, at least, for which the optimizer's update is a small part of the step."""
    return max(
        STEP_TOKEN_BOUNDS[0],
        min(PASS_TO_UPDATE_RATIO * pace.update * num_groups / max(1e-9, pace.read + pace.step), MAX_UPDATE_TOKENS),
    )


def decide_hours(options: RunOptions, hardware: Hardware) -> Decision:
    train = options.train
    limited = train.steps == AUTO and train.tokens is None and train.epochs == AUTO and hardware.device == "cpu"
    return choose_value(
        options, "train.hours", CPU_HOURS if limited else None, "of training at most" if limited else ""
    )


def decide_validations(options: RunOptions, steps: int, seconds: float) -> Decision:
    """The steps between two validations. seconds: seconds of training"""
    lower, upper = VALIDATION_BOUNDS
    every = math.ceil(steps / min(max(lower, round(seconds / VALIDATION_SECONDS)), upper))
    reason = f"{math.ceil(steps / every)} validations"
    if seconds:
        reason += f" of a run of {seconds / 60:,.1f} minutes"
    return choose_value(options, "train.validate_every", every, reason)


def limit_tokens(
    options: RunOptions, cost: Cost, tokens_to_read: float, pack_tokens: float, lower: float, *, seconds: float
) -> float:
    """The tokens that the time allows.

    pack_tokens: tokens of a micro-batch of all processes; lower: tokens of a step, at least; seconds: limit of the time
    """
    accumulation = options.train.accumulation
    fixed_step_tokens = None if isinstance(accumulation, str) else accumulation * pack_tokens
    step_tokens = fixed_step_tokens or max(pack_tokens, aim_step_tokens(options, tokens_to_read, lower))
    if cost.count_seconds(tokens_to_read, step_tokens) <= seconds:
        return tokens_to_read
    tokens = tokens_to_read * cost.find_affordable_share(tokens_to_read, step_tokens, seconds)
    step_tokens = fixed_step_tokens or max(pack_tokens, aim_step_tokens(options, tokens, lower))
    return tokens_to_read * cost.find_affordable_share(tokens_to_read, step_tokens, seconds)
