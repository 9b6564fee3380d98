"""The measured cost curve: seconds of the target's pass by rows and nodes.

Costs are measured once on a device and kept on disk. While decoding, every pass corrects them.
"""

import bisect
import copy
import functools
import hashlib
import json
import math
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy
import torch

from specdec.core import masks, rules
from specdec.core.files import write_text
from specdec.core.sampling import AnySampling, Sampling
from specdec.core.tree import Tree
from specdec.core.untrusted import read_json
from specdec.target.model import Target
from specdec.target.verifier import Verifier

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32)  # nodes of the measured passes of one row, with the root
BATCH_SIZES = (1, 2, 4, 8, 16, 32)  # the same for several rows
FEW_SIZES = (1, 2, 4, 6, 8, 12, 16, 24)  # where every size is compiled
ROWS = (1, 8, 32, 64)  # measured numbers of rows; others are interpolated
CONTEXT, LONG_CONTEXT = 128, 700  # tokens in the cache during the measurement, and for the cost of longer contexts
SECONDS = 1.5  # time budget of one measurement; each size is measured at least twice
CLOSE = 1.05  # a size is not repeated once its two fastest passes agree up to this ratio
NOISE, LOAD, OWN, FADE = 0.1, 0.03, 0.25, 0.005  # see Correction

Curve = dict[int, float]  # seconds of a pass by its nodes
Progress = Callable[[list, str], Iterable]


def describe_conditions(verifier: Verifier, sampling: AnySampling) -> dict[str, object]:
    """What costs depend on."""
    target = verifier.target
    on_cuda = target.device.type == "cuda"
    return {
        "machine": torch.cuda.get_device_name(target.device) if on_cuda else _processor(),
        "threads": 0 if on_cuda else torch.get_num_threads(),
        "torch": torch.__version__,
        "target": target.fingerprint(),
        "dtype": str(target.dtype),
        "compiled": verifier.runner.compile,
        "cuda_graphs": verifier.capturable and sampling.kind == "greedy",
        "sampling": sampling.kind,  # greedy, sampled, or cut: with top-k, top-p or a penalty
    }


def find_file(conditions: dict[str, object]) -> Path:
    """The file of their costs, in $SPECDEC_CACHE or `specdec` in the user's cache folder."""
    given, usual = os.environ.get("SPECDEC_CACHE"), os.environ.get("XDG_CACHE_HOME", "~/.cache")
    folder = Path(given) if given else Path(usual) / "specdec"
    return folder.expanduser() / f"{hashlib.sha256(json.dumps(conditions).encode()).hexdigest()[:16]}.json"


class Correction:
    """By how much passes take longer now than measured: a Kalman filter over logarithms.

    The logarithm of observed over measured seconds is the load of the machine, which all sizes share, plus the size's own
    error. NOISE is the standard deviation of one pass, LOAD that of the load's change from pass to pass, OWN that of own
    errors. Sizes that are near have similar own errors, so one observation also moves its neighbours. In each pass the
    share FADE of what is known is forgotten, so that a size that looked expensive is tried again.
    """

    def __init__(self, sizes: Iterable[int]):
        self.places = {num: place for place, num in enumerate(sizes, start=1)}  # place 0 is the load
        logs = numpy.log(list(self.places))
        self.prior = numpy.zeros((1 + len(logs), 1 + len(logs)))
        self.prior[0, 0] = LOAD**2 / (1 - (1 - FADE) ** 2)
        self.prior[1:, 1:] = OWN**2 * numpy.exp(-abs(logs[:, None] - logs))
        self.mean, self.covariance = numpy.zeros(1 + len(logs)), self.prior

    def factor(self, num: int) -> float:
        return math.exp(self.mean[0] + self.mean[self.places[num]])

    def observe(self, num: int, ratio: float) -> None:
        """ratio: observed over measured seconds. More than a standard deviation counts as one, as machines pause."""
        keep, place = 1 - FADE, self.places[num]
        covariance = keep**2 * self.covariance + (1 - keep**2) * self.prior
        gain = covariance[0] + covariance[place]
        variance = gain[0] + gain[place] + NOISE**2
        error, most = math.log(ratio) - keep * math.log(self.factor(num)), math.sqrt(variance)
        self.mean = keep * self.mean + gain / variance * min(max(error, -most), most)
        self.covariance = covariance - numpy.outer(gain, gain) / variance


class Costs:
    """Seconds of a pass over trees of N nodes in each of B rows.

    table: by rows, then by nodes; sizes: numbers of nodes that a pass may have
    steps: user-supplied seconds of a head's first step ("absorb") and of each further one ("step"); such costs are
        never corrected. None: the head is timed
    entries, per_entry: cache entries of a row in the measurement, and seconds that each further one adds to a pass. A
        pass reads the whole cache, so a longer context adds the same to all sizes
    """

    def __init__(
        self,
        table: Mapping[int, Curve],
        *,
        sizes: Iterable[int] = SIZES,
        steps: dict[str, float] | None = None,
        entries: int = 0,
        per_entry: float = 0.0,
    ):
        self.table = {rows: dict(curve) for rows, curve in table.items()}
        self.sizes, self.steps = tuple(sizes), steps
        self.entries, self.per_entry = entries, per_entry
        self.corrections: dict[int, Correction] = {}  # by rows

    def prepare(self, rows: int) -> None:
        """Measures what a batch of `rows` rows needs, which may lose rows: now, not within a round."""

    def curve(self, rows: int, entries: int | None = None) -> Curve:
        """Seconds by nodes as they are now. entries: of each row's cache; None: as many as in the measurement"""
        curve = self._measured(rows, entries)
        if not self.corrections:
            return curve
        correction = self.corrections[min(self.corrections, key=lambda known: abs(known - rows))]
        return {num: seconds * correction.factor(num) for num, seconds in curve.items() if num in correction.places}

    def observe(self, rows: int, num: int, seconds: float, entries: int | None = None) -> None:
        """Takes in the seconds of a pass. A size that looked too cheap is chosen until it is corrected."""
        measured = self._measured(rows, entries)
        if self.steps is not None or num not in measured:
            return
        if rows not in self.corrections:
            nearest = min(self.corrections, key=lambda known: abs(known - rows), default=None)
            known = None if nearest is None else self.corrections[nearest]
            same = known is not None and known.places.keys() >= measured.keys()
            self.corrections[rows] = copy.copy(known) if known and same else Correction(measured)
        self.corrections[rows].observe(num, seconds / measured[num])

    def _measured(self, rows: int, entries: int | None = None) -> Curve:
        """The curve without corrections: interpolated between known numbers of rows, proportional beyond them."""
        known = sorted(self.table)
        place = bisect.bisect(known, rows)
        low, high = known[max(0, place - 1)], known[min(place, len(known) - 1)]
        share = (rows - low) / (high - low) if low < rows < high else 0.0
        times = 1.0 if low < high else rows / low
        few, many = self.table[low], self.table[high if share else low]
        more = 0.0 if entries is None else rows * self.per_entry * (entries - self.entries)
        curve = {num: times * ((1 - share) * few[num] + share * many[num]) for num in few if num in many}
        return {num: max(0.1 * seconds, seconds + more) for num, seconds in curve.items()}


class MeasuredCosts(Costs):
    """The costs of this device, read from disk, and measured where they are missing.

    progress: wraps the sizes that are measured, with a title
    """

    def __init__(self, verifier: Verifier, sampling: Sampling, *, linear: bool, progress: Progress):
        self.timer = functools.partial(PassTimer, verifier, sampling, linear=linear)
        self.by_shape, self.progress = verifier.runner.by_shape, progress  # by_shape: every shape is compiled
        self.limit = verifier.target.max_positions or sys.maxsize
        self.longer = not (verifier.target.windowed or verifier.target.recurrent or self.by_shape)
        self.conditions = describe_conditions(verifier, sampling)
        # Several processes that hold one target may see different files, and must decide alike
        self.path = find_file(self.conditions) if verifier.target.share.size == 1 else None
        super().__init__(**self._read(), sizes=FEW_SIZES if self.by_shape else SIZES)

    def prepare(self, rows):
        usual = () if self.by_shape else ROWS
        for each in [*(each for each in usual if each < rows), min(rows, max(usual, default=rows))]:
            between = usual and self.table and min(self.table) <= each <= max(self.table)
            if each not in self.table and not between:
                self._measure(each)

    def _measure(self, rows: int) -> None:
        some = FEW_SIZES if self.by_shape else BATCH_SIZES if rows > 1 else SIZES
        timer = self.timer(rows)
        title = f"costs of {rows} rows"
        measured = timer.measure(self.progress([num for num in some if 2 * num < self.limit], title))
        sizes = [num for num in self.sizes if num <= max(measured)]
        seconds = numpy.interp(sizes, list(measured), list(measured.values()))
        self.table[rows] = dict(zip(sizes, map(float, seconds)))
        if rows == 1 and self.longer and self.limit > 2 * LONG_CONTEXT:
            other = self.timer(1, context=LONG_CONTEXT)
            self.entries = timer.cache.visible
            more = max(0.0, other.measure([1])[1] - self.table[1][1])
            self.per_entry = more / (other.cache.visible - self.entries)
        self._write()

    def _read(self) -> dict:
        """Empty without a file, or for a damaged one: costs are measured again."""
        if self.path is None:
            return {"table": {}}
        try:
            document = read_json(self.path)
            table = {
                int(rows): {int(num): float(seconds) for num, seconds in curve.items()}
                for rows, curve in document["seconds"].items()
            }
            return {"table": table, "entries": int(document["entries"]), "per_entry": float(document["per_entry"])}
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            return {"table": {}}

    def _write(self) -> None:
        """Warns if the folder cannot be written."""
        if self.path is None:
            return
        document = {"conditions": self.conditions, "seconds": self.table}
        document |= {"entries": self.entries, "per_entry": self.per_entry}
        own = self.path.with_suffix(f".{os.getpid()}")  # another process may measure the same now
        try:
            own.parent.mkdir(parents=True, exist_ok=True)
            write_text(own, json.dumps(document, indent=1) + "\n")
            own.replace(self.path)
        except (OSError, ValueError) as error:
            warnings.warn(
                f"The measured costs cannot be kept in {own.parent} ({error}); they will be measured again.",
                stacklevel=2,
            )


class PassTimer:
    """Times passes of the target over trees of random tokens, behind a text of random tokens.

    context: tokens in the cache; those after the first CONTEXT are empty entries, as only the time counts
    linear: chains, for a target that reads nothing else
    """

    def __init__(self, verifier: Verifier, sampling: Sampling, rows: int, *, linear: bool, context: int = CONTEXT):
        self.target, self.verifier, self.sampling, self.linear = verifier.target, verifier, sampling, linear
        target, device = self.target, self.target.device
        self.rows, self.cache = rows, target.cache(rows)
        self.generator = torch.Generator().manual_seed(0)
        self.draws = rules.Draws(torch.Generator(device).manual_seed(0))
        length = min(CONTEXT, (target.max_positions or 2 * CONTEXT) // 2)
        positions = torch.arange(length, device=device).expand(rows, -1)
        self.cache.reserve(length, [length] * rows)
        mask = masks.pending_mask(masks.causal_mask(length, device), self.cache.lengths, self.cache.visible)
        target.read(self._tokens(length), (), positions=positions, mask=mask, cache=self.cache)
        self._commit(length)
        if context > CONTEXT:
            self.cache.reserve(context - CONTEXT)
            self._commit(context - CONTEXT)

    def seconds(self, num: int) -> float:
        """Of one pass of `num` nodes."""
        target, cache, linear = self.target, self.cache, self.linear
        parents = torch.arange(-1, num - 1, device=target.device).repeat(self.rows, 1)
        if not linear and num > 2:
            parents[:, 2:] = parents[:, 2:] - 1  # two chains
        tree = Tree(self._tokens(num), parents, None, linear=linear)
        _synchronise(target)
        start = time.perf_counter()
        path, following = self.verifier(tree, cache, self.draws, sampling=self.sampling).along(tree, num - 1)
        following.tolist()
        if not linear:
            cache.keep(path)
        _synchronise(target)
        seconds = target.share.all_say(time.perf_counter() - start)[0]
        if cache.states is None:
            cache.drop_pending()
        else:
            self._commit(1)
        return seconds

    def measure(self, sizes: Iterable[int]) -> Curve:
        """The lower quartile of each size's passes, which are interleaved: other work on the machine only adds time.

        Larger sizes are left out once the budget is spent and a pass costs about half as much as that many one-node passes.
        """
        times = dict[int, list[float]]()
        for num in sizes:
            if self.verifier.runner.by_shape:
                self.seconds(num)  # compiles
            times[num] = [self.seconds(num)]
            spent, plain = sum(map(sum, times.values())), next(iter(times.values()))[0]
            if spent > SECONDS and min(times[num][0], self.seconds(num)) > 0.5 * (num + 1) * plain:
                break
        again = list(times)
        while again and (len(times[again[0]]) < 3 or sum(map(sum, times.values())) < SECONDS):
            for num in again:
                times[num].append(self.seconds(num))
            again = [num for num in again if len(times[num]) < 40 and sorted(times[num])[1] > CLOSE * min(times[num])]
        return {num: float(numpy.quantile(each, 0.25)) for num, each in times.items()}

    def _tokens(self, num: int) -> torch.Tensor:
        tokens = torch.randint(0, self.target.vocab_size, (self.rows, num), generator=self.generator)
        return tokens.to(self.target.device)

    def _commit(self, num: int) -> None:
        self.cache.commit(torch.full((self.rows,), num, device=self.target.device), [num] * self.rows)


def told(ratios: dict[int, float], *, plain: float, absorb: float, step: float) -> Costs:
    """User-supplied costs. ratios: by nodes, of a pass over the pass of one node, which takes `plain` seconds

    absorb, step: seconds of a head's first step and of each further one
    """
    curve = {num: ratio * plain for num, ratio in ratios.items()}
    return Costs({1: curve}, sizes=sorted(curve), steps={"absorb": absorb, "step": step})


def read_told(path: Path) -> Costs:
    """User-supplied costs: {"plain_ms": 23.5, "ratios": {"1": 1, "4": 1.14}, "absorb_ms": 2, "step_ms": 1.2}

    Raises ValueError for a file that is missing or holds something else.
    """
    try:
        document = read_json(path)
        ratios = {int(num): float(ratio) for num, ratio in document["ratios"].items()}
        plain, absorb, step = (float(document[name]) / 1e3 for name in ("plain_ms", "absorb_ms", "step_ms"))
        if 1 not in ratios or not all(0 < ratio < 1e6 for ratio in ratios.values()) or min(ratios) < 1 or plain <= 0:
            raise ValueError("ratios must have 1 and numbers above 0, and plain_ms must be above 0")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(
            f"costs={path} must be a JSON file with plain_ms, absorb_ms, step_ms and ratios by the nodes of a pass, such as "
            f'{{"1": 1, "4": 1.14}} ({type(error).__name__}: {error}).'
        ) from error
    return told(ratios, plain=plain, absorb=absorb, step=step)


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _synchronise(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
