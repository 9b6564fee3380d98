"""Decides what a run leaves to `auto`, by device, target and data. docs/defaults.md has the rules, and where each one comes from.

Three times, as what is known grows: how texts are read, before the target is loaded (`reading`); the draft vocabulary, from packs
(`vocabulary`); and steps, from the speed of this device (`training`). A value that the user gives is never changed. What was decided is
in config.yaml, from which a resumed run takes it, so it is the same run on a faster machine too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy import ndarray

from specdec.core import ranges
from train.data.packing import Packs, first_fit
from train.settings.options import RunConfig

FEW_CUT = 0.995  # of the rows, that are not cut
SHORTEST, LONGEST = {"cpu": 512, "cuda": 2048}, {"cpu": 4096, "cuda": 16384}  # tokens of a pack
ROUND = 64  # tokens, that a length is a multiple of
TOGETHER = 8192  # tokens of a micro-batch on a GPU (docs/gpu.md)
ON_CPU = 1024  # tokens of a micro-batch on a CPU, above which nothing is won
STEPS = 1000  # towards which the tokens of a step are chosen
STEP_TOKENS = (512, 32768)  # tokens of a step, at least and at most
UPDATE = 4.0  # times as long as the optimizer's work, that the rest of a step is to take
LEAST_MOST = 2048  # tokens of a step, that this may ask for
EPOCHS = 4  # beyond which reading the same texts again brings little (2305.16264)
ENOUGH = 1e9  # tokens, that published heads read at least; more data are read once
CPU_HOURS = 1.0
LONG_RUN = 0.7e6  # tokens, from which norms are worth more than a closed-form start (results/47-right-by-default.md)
COVERED = 0.985  # share of the answers' tokens that can be drafted
VOCABULARY = (8192, 32768)  # bounds of a draft vocabulary
DISK = 0.25  # share of the free disk that features may take
VALIDATE = 600.0  # seconds between two validations
VALIDATIONS = (4, 20)  # in a run, at least and at most


@dataclass(frozen=True)
class Place:
    """Where a run trains. device: cpu or cuda; num: processes; memory, disk: bytes of a device, and that are free"""

    device: str
    num: int
    memory: float
    disk: float


@dataclass(frozen=True)
class TextLengths:
    """The data in packs. lengths: tokens of each row, cut; counts: how often each token is supervised, as far as is known"""

    lengths: ndarray
    num_packs: int
    counts: ndarray

    @property
    def num_tokens(self) -> int:
        """Without padding."""
        return int(self.lengths.sum())

    @classmethod
    def of(cls, packs: Packs) -> "TextLengths":
        lengths = numpy.minimum(packs.rows.lengths[packs.members], packs.length)
        return cls(lengths, len(packs), packs.supervised_counts.numpy())

    @classmethod
    def guessed(cls, lengths: ndarray, length: int) -> "TextLengths":
        """Of rows that were not encoded."""
        cut = numpy.minimum(lengths, length)
        return cls(cut, int(first_fit(cut.tolist(), length).max(initial=0)) + 1, numpy.zeros(0, dtype=numpy.int64))


@dataclass(frozen=True)
class Pace:
    """Seconds on a device. read: of the target, for a token; step: of training, for a token; update: of the optimizer, for a step"""

    read: float
    step: float
    update: float


@dataclass(frozen=True)
class Decision:
    """reason: is printed with it; empty: nothing is"""

    name: str  # of the option
    value: Any
    reason: str

    def __str__(self) -> str:
        return f"{self.name}={ranges.show(self.value)} ({self.reason})"


def settle(config: RunConfig, decisions: Sequence[Decision]) -> RunConfig:
    return config.settle({decision.name: decision.value for decision in decisions})


def _open(config: RunConfig, decisions: Sequence[Decision]) -> list[Decision]:
    """Those that the user left open."""
    return [decision for decision in decisions if decision.name in config.open]


# Before the target is loaded


def reading(
    config: RunConfig, place: Place, lengths: ndarray, *, most: int | None, packed: bool = True, depth: int = 4
) -> list[Decision]:
    """How texts are read, and how the drafter is judged.

    lengths: tokens of each row; most: that the target can read; None: any; packed: whether rows share a pack
    depth: drafts that the head can make
    """
    on_gpu = place.device == "cuda"
    where = "a GPU" if on_gpu else "a CPU"
    shortest = SHORTEST[place.device]
    quantile = int(numpy.quantile(lengths, FEW_CUT, method="higher")) if len(lengths) else shortest
    share = step_aim(config, max(1, int(lengths.sum())) * EPOCHS) / place.num  # tokens of a step in one process
    least = min(max(shortest, 2 ** round(math.log2(share))), TOGETHER) if on_gpu else shortest
    least = least if packed else ROUND  # the rest of a pack would be padding
    length = min(max(least, -(-quantile // ROUND) * ROUND), LONGEST[place.device])
    limit = f"from {least:,} to {LONGEST[place.device]:,} on {where}"
    if most is not None and most < length:
        length, limit = most, f"the target reads at most {most:,}"
    cut = int((lengths > length).sum())
    block = getattr(config.drafter_class, "attends", None) == "block"  # whose pass makes all drafts
    drafts = (depth if block else 4) if on_gpu else 2
    reason = f"{FEW_CUT:.1%} of {len(lengths):,} rows have at most {quantile:,} tokens; {limit}; cut: {cut:,}"
    found = [
        Decision("data.length", length, reason),
        Decision("decode.depth", min(depth, drafts), f"drafts of a round in validations on {where}"),
        Decision("validation.num_prompts", 64 if on_gpu else 8, f"on {where}"),
        Decision("validation.max_new_tokens", 256 if on_gpu else 48, f"on {where}"),
    ]
    return _open(config, found)


def vocabulary(config: RunConfig, texts: TextLengths, *, all_tokens: int) -> list[Decision]:
    """The size of the draft vocabulary."""
    ranked = numpy.sort(texts.counts)[::-1]
    shares = ranked.cumsum() / max(1, ranked.sum())
    wanted = int(numpy.searchsorted(shares, COVERED)) + 1
    least, most = VOCABULARY
    size = min(max(least, -(-wanted // 1024) * 1024), most)
    kept = config.start is not None and config.start_vocab == "keep"
    if size >= all_tokens:
        return _open(
            config, [Decision("head.vocab_size", None, "" if kept else f"all {all_tokens:,} tokens of the target")]
        )
    if not len(shares):
        return _open(config, [Decision("head.vocab_size", most, "the most, as the answers were not encoded")])
    share = shares[min(size, len(shares)) - 1]
    reason = f"{wanted:,} tokens cover {COVERED:.1%} of the answers, these {share:.1%}; from {least:,} to {most:,}"
    return _open(config, [Decision("head.vocab_size", size, "" if kept else reason)])


def features(config: RunConfig, place: Place, texts: TextLengths, *, bytes_per_token: int) -> list[Decision]:
    """Where the target's outputs come from: a GPU computes them anew, as reading them from a disk would be slower."""
    size = texts.num_tokens * bytes_per_token
    again = tokens_wanted(config, texts) > 1.2 * texts.num_tokens
    if config.features.urls:
        fits = size <= DISK * place.disk
        mode, reason = ("cached" if fits else "engine"), f"what the engine reads has {size / 1e9:.1f} GB"
    elif place.device == "cuda":
        mode, reason = "online", "the target's pass is a small part of a step on a GPU"
    elif not again:
        mode, reason = "online", "each text is read once"
    elif size > DISK * place.disk:
        mode, reason = "online", f"{size / 1e9:.1f} GB are more than a quarter of the free disk"
    else:
        mode, reason = "cached", f"texts are read again, and {size / 1e9:.2f} GB fit on the disk"
    return _open(config, [Decision("features.mode", mode, reason)])


def start(config: RunConfig, tokens: float) -> list[Decision]:
    """Whether a head begins with a closed-form start, or with norms that such a start does not go with. tokens: to be read"""
    spec = config.head["drafter"]
    names = {f"head.drafter.{name}": spec[name] for name in ("norm_features", "norm_output") if name in spec}
    given = [value for name, value in names.items() if name not in config.open]
    free = "solve_packs" in config.open or config.solve_packs == 0
    norms = bool(names) and config.start is None and (any(given) if given else free and tokens > LONG_RUN)
    why = f"{tokens / 1e6:.2g} M tokens to read, more than {LONG_RUN / 1e6:g} M" if norms and not given else ""
    found = [Decision(name, norms, why) for name in names]
    solved = Decision("solve_packs", 0 if norms else 200, "random weights, with norms" if norms else "")
    return _open(config, [*found, solved])


def batches(config: RunConfig, place: Place, texts: TextLengths) -> list[Decision]:
    """Packs that are in memory at once."""
    together = max(1, (TOGETHER if place.device == "cuda" else ON_CPU) // config.data.length)
    times = 1 if "train.accumulation" in config.open else config.train.accumulation
    aim = step_aim(config, tokens_wanted(config, texts)) / times / place.num
    batch = min(together, max(1, round(aim * texts.num_packs / texts.num_tokens)))
    reason = f"packs of {config.data.length:,} tokens at once on a {'GPU' if place.device == 'cuda' else 'CPU'}"
    return _open(config, [Decision("train.batch", batch, reason)])


def step_aim(config: RunConfig, tokens: float, least: float = STEP_TOKENS[0]) -> float:
    """Tokens of a step, of a run that reads so many. least: at least"""
    most = STEP_TOKENS[1]
    return min(max(least, tokens / (STEPS if "train.steps" in config.open else config.train.steps)), most)


# Once the speed is known


def tokens_wanted(config: RunConfig, texts: TextLengths) -> float:
    """Tokens to read without regard to time."""
    train = config.train
    if "train.steps" not in config.open:
        return train.steps * max(tokens_of_step(config, texts, 1), STEP_TOKENS[0])
    return train.tokens or epochs(config, texts) * texts.num_tokens


def tokens_of_step(config: RunConfig, texts: TextLengths, num: int) -> float:
    """That all processes read in a step of the settled options."""
    return config.train.batch * config.train.accumulation * num * texts.num_tokens / texts.num_packs


def epochs(config: RunConfig, texts: TextLengths) -> float:
    """How often the data is read."""
    if "train.epochs" not in config.open:
        return config.train.epochs
    return min(EPOCHS, max(1.0, ENOUGH / texts.num_tokens))


def seconds(pace: Pace, tokens: float, *, texts: TextLengths, step_tokens: float, cached: bool, num: int) -> float:
    """Of a run that reads so many tokens, in `num` processes."""
    read = min(tokens, texts.num_tokens) if cached else tokens
    return (read * pace.read + tokens * pace.step) / num + tokens / step_tokens * pace.update


def training(config: RunConfig, place: Place, texts: TextLengths, pace: Pace) -> list[Decision]:
    """Steps, what is in them, and validations."""
    train, given = config.train, config.open
    steps_open, epochs_open = "train.steps" in given, "train.epochs" in given
    times, wanted, reason = epochs(config, texts), tokens_wanted(config, texts), ""
    pack_tokens = train.batch * place.num * texts.num_tokens / texts.num_packs
    cost: dict[str, Any] = {"texts": texts, "cached": config.features.mode == "cached", "num": place.num}
    # The optimizer's own work is to be a small part of a step
    least = max(STEP_TOKENS[0], min(UPDATE * pace.update * place.num / max(1e-9, pace.read + pace.step), LEAST_MOST))
    # As many tokens as the time allows
    limited = steps_open and train.tokens is None and epochs_open and place.device == "cpu"
    hours = train.hours if "train.hours" not in given else CPU_HOURS if limited else None
    tokens = wanted
    if steps_open:
        reason = f"train.tokens={train.tokens:,}" if train.tokens else f"{times:.3g} times {texts.num_tokens:,} tokens"
        fixed = None if "train.accumulation" in given else train.accumulation * pack_tokens
        cost["step_tokens"] = fixed or max(pack_tokens, step_aim(config, wanted, least))
        if hours is not None and seconds(pace, wanted, **cost) > hours * 3600:
            tokens *= _share_that_fits(pace, wanted, hours * 3600, cost)
            cost["step_tokens"] = fixed or max(pack_tokens, step_aim(config, tokens, least))
            tokens = wanted * _share_that_fits(pace, wanted, hours * 3600, cost)
            reason = f"train.hours={hours:g} allows {tokens:,.0f} tokens at this speed; {reason} would take {wanted / tokens:.1f} times as long"
    accumulation = max(1, round(step_aim(config, tokens, least) / pack_tokens))
    if "train.accumulation" not in given:
        accumulation = train.accumulation
    step_tokens = cost["step_tokens"] = accumulation * pack_tokens
    steps = max(1, math.ceil(tokens / step_tokens - 0.01)) if steps_open else train.steps
    spent = seconds(pace, steps * step_tokens, **cost)
    fewest, largest = VALIDATIONS
    every = math.ceil(steps / min(max(fewest, round(spent / VALIDATE)), largest))
    least, most = STEP_TOKENS
    more = f"1 to {EPOCHS}, fewer for more than {ENOUGH / EPOCHS / 1e6:,.0f} M tokens"
    found = [
        Decision("train.epochs", float(times), more if steps_open and not train.tokens else ""),
        Decision("train.hours", hours, "of training at most" if hours else ""),
        Decision(
            "train.accumulation",
            accumulation,
            f"{step_tokens:,.0f} tokens a step"
            + (f": {STEPS:,} steps, but {least:,.0f} to {most:,} tokens" if steps_open else ""),
        ),
        Decision("train.steps", steps, reason),
        Decision(
            "train.validate_every",
            every,
            f"{math.ceil(steps / every)} validations" + (f" of a run of {spent / 60:,.1f} minutes" if spent else ""),
        ),
    ]
    return _open(config, found)


def _share_that_fits(pace: Pace, tokens: float, limit: float, cost: dict) -> float:
    """The largest share of the tokens that takes no longer than `limit` seconds."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if seconds(pace, middle * tokens, **cost) <= limit else (low, middle)
    return low
