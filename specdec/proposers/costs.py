"""The measured cost curve: seconds of the target's pass by batch size and nodes.

Costs are measured once on a device and kept on disk. While decoding, the observed seconds of every round correct them.
"""

import bisect
import collections
import copy
import functools
import hashlib
import json
import math
import platform
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy
import torch

from specdec.core import devices, rules
from specdec.core.digests import digest_sources
from specdec.core.files import cache_document, find_cache_folder, lock_cached
from specdec.core.sampling import AnySampling, Sampling
from specdec.core.tree import Tree
from specdec.core.untrusted import read_json
from specdec.core.wording import format_count
from specdec.proposers.candidates import DECAY
from specdec.target.verifier import Verifier

SIZES = (1, 2, 4, 6, 8, 12, 16, 24, 32)  # nodes of the measured passes, with the root
ROWS = (1, 8, 32, 64)  # measured batch sizes; costs of others are interpolated
CONTEXT = 128  # tokens in the cache during the measurement
SECONDS = 1.5  # time budget of one measurement, in which each size is timed at least three times
LOAD_RATE = 0.08  # share of an unexplained error that the load takes over, see Correction
SIZE_RATE = 0.15  # share that the ratio of the observed size takes over
MAX_ERROR = 0.4  # largest error that counts, as a logarithm: machines pause

TIMED_CODE = ("specdec.core", "specdec.target", "specdec.proposers.costs")  # code of passes and of their measurement

Curve = dict[int, float]  # seconds of a pass by its nodes
Progress = Callable[[list, str], Iterable]


def describe_conditions(verifier: Verifier, sampling: AnySampling) -> dict[str, object]:
    """The conditions on which costs depend."""
    target = verifier.target
    on_cuda = target.device.type == "cuda"
    return {
        "machine": torch.cuda.get_device_name(target.device) if on_cuda else describe_processor(),
        "threads": 0 if on_cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "code": digest_sources(*TIMED_CODE),
        "target": target.fingerprint(),
        "dtype": str(target.dtype),
        "compiled": verifier.runner.compile,
        "cuda_graphs": verifier.capturable,
        "sampling": sampling.kind,  # greedy, sampled, or cut: with top-k, top-p or a penalty
    }


def find_costs_file(conditions: dict[str, object]) -> Path:
    """The file of the costs under these conditions, in $SPECDEC_CACHE or `specdec` in the user's cache folder."""
    return find_cache_folder() / f"{hashlib.sha256(json.dumps(conditions).encode()).hexdigest()[:16]}.json"


class Correction:
    """The factor by which rounds take longer now than measured: the load of the machine times each size's own ratio.

    A logarithm of observed over measured seconds that is not explained yet moves the load by the share LOAD_RATE. It
    moves the ratios by SIZE_RATE, those of far sizes less than those of near ones. It counts as MAX_ERROR at most.
    Ratios fade, so that a size that looked expensive is tried again.
    """

    def __init__(self, sizes: Iterable[int]):
        self.load, self.size_ratios = 0.0, dict.fromkeys(sizes, 0.0)  # logarithms

    def factor(self, num: int) -> float:
        """Expected seconds of a pass of `num` nodes over its measured seconds."""
        return math.exp(self.load + self.size_ratios[num])

    def observe(self, num: int, ratio: float) -> None:
        """Learns from a round of `num` nodes. ratio: observed over measured seconds"""
        error = math.log(ratio) - self.load - self.size_ratios[num]
        error = min(max(error, -MAX_ERROR), MAX_ERROR)
        self.load += LOAD_RATE * error
        for size, size_ratio in self.size_ratios.items():
            self.size_ratios[size] = DECAY * size_ratio + SIZE_RATE * error * min(size, num) / max(size, num)


class Costs:
    """Seconds of a pass over trees of N nodes in each of B rows.

    table: curves by batch size; sizes: numbers of nodes that a pass may have
    steps: user-supplied seconds of a head's first step ("absorb") and of each later one ("step"); such costs are never
        corrected. None: the head is timed
    """

    def __init__(
        self, table: Mapping[int, Curve], *, sizes: Iterable[int] = SIZES, steps: dict[str, float] | None = None
    ):
        self.table = {rows: dict(curve) for rows, curve in table.items()}
        self.sizes, self.steps = tuple(sizes), steps
        self.corrections: dict[int, Correction] = {}  # corrections by batch size

    def prepare(self, batch_size: int, progress: Progress = lambda items, _: items) -> None:
        """Measures the costs that a batch needs, which may lose rows, now and not within a round.

        progress: wrapper of the sizes that are measured; its second argument is a title
        """

    def curve(self, batch_size: int) -> Curve:
        """Seconds by nodes, as they are now."""
        correction = self._correction(batch_size)
        return {num: seconds * correction.factor(num) for num, seconds in self._measured(batch_size).items()}

    def observe(self, batch_size: int, num: int, seconds: float) -> None:
        """Learns from the seconds of a round. A size that looks too cheap is chosen until it is corrected."""
        measured = self._measured(batch_size)
        if self.steps is None and num in measured:
            if batch_size not in self.corrections:
                self.corrections[batch_size] = copy.deepcopy(self._correction(batch_size))
            self.corrections[batch_size].observe(num, seconds / measured[num])

    def _correction(self, batch_size: int) -> Correction:
        """The correction at the nearest batch size that was observed."""
        nearest = min(self.corrections, key=lambda size: abs(size - batch_size), default=None)
        return Correction(self.sizes) if nearest is None else self.corrections[nearest]

    def _measured(self, batch_size: int) -> Curve:
        """The curve without corrections: interpolated between measured batch sizes, proportional beyond them."""
        batch_sizes = sorted(self.table)
        position = bisect.bisect(batch_sizes, batch_size)
        low, high = batch_sizes[max(0, position - 1)], batch_sizes[min(position, len(batch_sizes) - 1)]
        share = (batch_size - low) / (high - low) if low < batch_size < high else 0.0
        times = 1.0 if low < high else batch_size / low
        low_curve, high_curve = self.table[low], self.table[high if share else low]
        shared_sizes = [num for num in self.sizes if num in low_curve and num in high_curve]
        return {num: times * ((1 - share) * low_curve[num] + share * high_curve[num]) for num in shared_sizes}


class MeasuredCosts(Costs):
    """The costs of this device, read from disk, and measured if they are missing."""

    def __init__(self, verifier: Verifier, sampling: Sampling, *, linear: bool):
        self.make_timer = functools.partial(PassTimer, verifier, sampling, linear=linear)
        self.by_shape = verifier.runner.by_shape  # whether every shape is compiled
        self.limit = verifier.target.max_positions or sys.maxsize
        self.conditions = describe_conditions(verifier, sampling)
        # Several processes that hold one target may see different files, and must decide alike
        self.path = find_costs_file(self.conditions) if verifier.target.share.size == 1 else None
        super().__init__(self._read(), sizes=SIZES if self.by_shape else sorted({*range(1, 10), *SIZES}))

    def prepare(self, batch_size, progress=lambda items, _: items):
        standard_sizes = () if self.by_shape else ROWS
        smaller_sizes = [size for size in standard_sizes if size < batch_size]
        for size in [*smaller_sizes, min(batch_size, max(standard_sizes, default=batch_size))]:
            if self._lacks(size):
                with lock_cached(self.path):  # another process may measure it now
                    self.table = self._read() | self.table
                    if self._lacks(size):
                        self._measure(size, progress)

    def _lacks(self, batch_size: int) -> bool:
        """Whether a batch size must be measured. Where shapes are not compiled, others are interpolated."""
        between = not self.by_shape and self.table and min(self.table) <= batch_size <= max(self.table)
        return batch_size not in self.table and not between

    def _measure(self, batch_size: int, progress: Progress) -> None:
        timed_sizes = progress(
            [num for num in SIZES if 2 * num < self.limit], f"costs of {format_count(batch_size, 'row')}"
        )
        measured = self.make_timer(batch_size).measure(timed_sizes)
        sizes = [num for num in self.sizes if num <= max(measured)]
        seconds = numpy.interp(sizes, list(measured), list(measured.values()))
        self.table[batch_size] = dict(zip(sizes, map(float, seconds)))
        if self.path is not None:
            cache_document(self.path, {"conditions": self.conditions, "seconds": self.table}, "The measured costs")

    def _read(self) -> dict[int, Curve]:
        """The curves on disk by batch size; empty without a file, or for a damaged one: costs are measured again."""
        try:
            curves = read_json(self.path)["seconds"] if self.path else {}
            return {int(batch_size): _read_curve(curve) for batch_size, curve in curves.items()}
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return {}


def _read_curve(document: dict) -> Curve:
    """A curve, or ratios, from JSON, whose keys are text."""
    return {int(num): float(value) for num, value in document.items()}


class PassTimer:
    """Times passes of the target over trees of random tokens, which follow a text of random tokens.

    linear: whether the trees are chains, for a target that reads nothing else
    context: number of tokens of the text; at most half of the target's positions are used
    """

    def __init__(
        self, verifier: Verifier, sampling: Sampling, batch_size: int, *, linear: bool, context: int = CONTEXT
    ):
        self.target, self.verifier, self.sampling, self.linear = verifier.target, verifier, sampling, linear
        target, device = self.target, self.target.device
        self.batch_size, self.cache = batch_size, target.cache(batch_size)
        self.generator = torch.Generator().manual_seed(0)
        self.draws = rules.Draws(torch.Generator(device).manual_seed(0))
        length = min(context, (target.max_positions or 2 * context) // 2)
        target.read_piece(self._tokens(length), (), self.cache)

    def seconds(self, num: int) -> float:
        """Seconds of one pass of `num` nodes."""
        return self.time_pass(num)[0]

    def make_tree(self, num: int) -> Tree:
        """Trees of `num` random tokens: two chains, or one if `linear`."""
        parents = torch.arange(-1, num - 1, device=self.target.device).repeat(self.batch_size, 1)
        if not self.linear and num > 2:
            parents[:, 2:] = parents[:, 2:] - 1
        return Tree(self._tokens(num), parents, None, linear=self.linear)

    def time_pass(self, num: int) -> tuple[float, float]:
        """Seconds of one pass of `num` nodes, and of its work: without those in which other processes ran."""
        target, cache = self.target, self.cache
        tree = self.make_tree(num)
        devices.wait_for_device(target.device)
        start, start_work = time.perf_counter(), time.process_time()
        path, following = self.verifier(tree, cache, self.draws, sampling=self.sampling).follow_path(tree, num - 1)
        following.tolist()
        if not self.linear:
            cache.keep_path(path)
        devices.wait_for_device(target.device)
        times = time.perf_counter() - start, time.process_time() - start_work
        seconds, work = (target.share.gather_values(spent)[0] for spent in times)
        if cache.states is None:
            cache.drop_pending()
        else:
            self._commit(1)
        one_thread = target.device.type == "cpu" and torch.get_num_threads() == 1
        return seconds, work if one_thread else seconds

    def measure(self, sizes: Iterable[int]) -> Curve:
        """The lower quartile of each size's work: other work on the machine only adds time. Passes are interleaved.

        It is scaled by the seconds over the work of all passes, so that it is in seconds of the machine as it is.
        Larger sizes are left out if the budget is spent, and a pass of `num` nodes costs about num / 2 passes of one.
        """
        times, works = collections.defaultdict[int, list[float]](list), collections.defaultdict[int, list[float]](list)

        def add_pass(num: int) -> None:
            seconds, work = self.time_pass(num)
            times[num].append(seconds)
            works[num].append(work)

        for num in sizes:
            if self.verifier.runner.by_shape:
                self.seconds(num)  # compiles
            add_pass(num)
            spent, plain = sum(map(sum, times.values())), next(iter(times.values()))[0]
            if spent > SECONDS and min(times[num][0], self.seconds(num)) > 0.5 * (num + 1) * plain:
                break
        while min(map(len, times.values())) < 3 or sum(map(sum, times.values())) < SECONDS:
            for num in times:
                add_pass(num)
        load = sum(map(sum, times.values())) / sum(map(sum, works.values()))
        return {num: load * float(numpy.quantile(work, 0.25)) for num, work in works.items()}

    def _tokens(self, num: int) -> torch.Tensor:
        tokens = torch.randint(0, self.target.vocab_size, (self.batch_size, num), generator=self.generator)
        return tokens.to(self.target.device)

    def _commit(self, num: int) -> None:
        self.cache.commit(torch.full((self.batch_size,), num, device=self.target.device), [num] * self.batch_size)


def make_costs(ratios: dict[int, float], *, plain: float, absorb: float, step: float) -> Costs:
    """User-supplied costs.

    ratios: seconds of a pass by nodes, over the pass of one node, which takes `plain` seconds
    absorb, step: seconds of a head's first step, and of each later one
    """
    curve = {num: ratio * plain for num, ratio in ratios.items()}
    return Costs({1: curve}, sizes=sorted(curve), steps={"absorb": absorb, "step": step})


def read_costs(path: Path) -> Costs:
    """Reads user-supplied costs: {"plain_ms": 23.5, "ratios": {"1": 1, "4": 1.14}, "absorb_ms": 2, "step_ms": 1.2}

    Raises ValueError for a file that is missing or holds something else.
    """
    try:
        document = read_json(path)
        ratios = _read_curve(document["ratios"])
        plain, absorb, step = (float(document[name]) / 1e3 for name in ("plain_ms", "absorb_ms", "step_ms"))
        if 1 not in ratios or not all(0 < ratio < 1e6 for ratio in ratios.values()) or min(ratios) < 1 or plain <= 0:
            raise ValueError("ratios must have 1 and numbers above 0, and plain_ms must be above 0")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"costs={path} must be a JSON file with plain_ms, absorb_ms, step_ms and ratios by the nodes of a pass, "
            "such as "
            f'{{"1": 1, "4": 1.14}} ({type(error).__name__}: {error}).'
        ) from error
    return make_costs(ratios, plain=plain, absorb=absorb, step=step)


def describe_processor() -> str:
    """The name of the CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
