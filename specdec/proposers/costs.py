"""What a round costs here: seconds of the target's pass by its rows and nodes, measured once and kept on disk."""

import bisect
import hashlib
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy
import torch

from specdec.core import masks, rules
from specdec.core.files import write_text
from specdec.core.sampling import AnySampling, Sampling
from specdec.core.tree import Tree
from specdec.core.untrusted import read_json
from specdec.proposers.corrections import Corrections
from specdec.target.model import Target
from specdec.target.verifier import Verifier

SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 32)  # nodes of a pass that are measured, the root included
BATCH_SIZES = (1, 2, 4, 8, 16, 32)  # those of several rows; others are taken to be between them
COMPILED_SIZES = (1, 2, 4, 6, 8, 12, 16, 24)  # fewer: each is compiled
ROWS = (1, 8, 32, 64)  # other numbers of rows are taken to be between them, until their rounds correct that
CONTEXT = 128  # tokens in the cache while it is measured
LONG = 700  # tokens in the cache for what longer contexts cost, which is measured for LONG_SIZES only
LONG_SIZES = (1, 8)
LONG_ROWS = 8  # most of them; more rows are taken to cost in proportion, as their caches would take much memory
BUSY = 0.5  # share of the cost of as many passes of one node, from which a slow pass is not followed by larger ones
SECONDS = 1.5  # of measuring for one number of rows, from which passes are repeated no more than they must be
LEAST, MOST = 3, 40  # passes of each size, unless
CLOSE = 1.05  # two of them agree up to this ratio
FEW = 5  # passes of each size, where two sizes are checked
CHECKED = (1, 4)  # nodes of the passes that show whether costs from the disk still hold
DRIFT = 1.3  # ratio between a cost on the disk and what is measured now from which all of them are measured again


@dataclass(frozen=True)
class Conditions:
    """What costs depend on."""

    machine: str
    threads: int
    torch: str
    target: str  # its fingerprint
    dtype: str
    compiled: bool
    cuda_graphs: bool
    law: str  # greedy, sampled, or cut: with top-k, top-p or a penalty

    @classmethod
    def of(cls, verifier: Verifier, sampling: AnySampling) -> "Conditions":
        target = verifier.target
        on_cuda = target.device.type == "cuda"
        return cls(
            machine=torch.cuda.get_device_name(target.device) if on_cuda else _processor(),
            threads=0 if on_cuda else torch.get_num_threads(),
            torch=torch.__version__,
            target=target.fingerprint(),
            dtype=str(target.dtype),
            compiled=verifier.runner.compile,
            cuda_graphs=verifier.capturable and sampling.kind == "greedy",
            law=sampling.kind,
        )

    @property
    def path(self) -> Path:
        name = hashlib.sha256(json.dumps(asdict(self)).encode()).hexdigest()[:16]
        return folder() / f"{name}.json"


def folder() -> Path:
    """Where costs are kept: $SPECDEC_CACHE, or specdec in the user's cache folder."""
    given = os.environ.get("SPECDEC_CACHE")
    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return Path(given).expanduser() if given else cache / "specdec"


class Costs:
    """Seconds of a pass over trees of N nodes in each of B rows.

    A pass reads all entries of the cache, so it takes longer with a longer context, whatever its nodes.
    table: by rows, then by nodes; sizes: the numbers of nodes that a pass may have
    rows: numbers of rows that are measured beside that of a batch
    measure: gives the table of a number of rows that is missing; None: nothing is measured
    holds: whether the given costs of a number of rows still hold, asked before they are used first
    steps: seconds of a head's first step ("absorb") and of each further one ("step"), where all costs are told and none is
        measured; None: the drafting proposer measures them
    longer: by rows, what longer contexts add; `measure` adds to it
    """

    def __init__(
        self,
        table: dict[int, dict[int, float]],
        *,
        sizes: Iterable[int] = SIZES,
        rows: Iterable[int] = (),
        measure: Callable[[int], dict[int, float]] | None = None,
        holds: Callable[[int], bool] | None = None,
        steps: dict[str, float] | None = None,
        longer: dict[int, "Longer"] | None = None,
    ):
        self.longer = {} if longer is None else longer
        self.table = {rows: dict(curve) for rows, curve in table.items()}
        self.sizes, self.rows, self.measure, self.steps = tuple(sizes), tuple(rows), measure, steps
        self.holds, self.checked = holds, not table
        self.corrections: dict[int, Corrections] = {}  # by rows

    def prepare(self, rows: int) -> None:
        """Measures what a batch of so many rows needs, which may lose rows: now, not within a round."""
        if self.measure is None:
            return
        most = max(self.rows, default=rows)
        needed = [*(each for each in self.rows if each < rows), min(rows, most)]  # beyond `most`: in proportion
        known = min((each for each in self.table if each >= needed[-1]), default=None)
        if not self.checked and known is not None and self.holds is not None:
            self.checked = True
            if not self.holds(known):
                self.table = {}
        for each in needed:
            between = self.rows and self.table and min(self.table) <= each <= max(self.table)
            if each not in self.table and not between:
                self.table[each] = self.measure(each)

    def curve(self, rows: int, entries: int | None = None) -> dict[int, float]:
        """Seconds by nodes as they are now, for this number of rows.

        entries: of the cache, of each row; None: as many as while it was measured
        """
        curve = self.measured(rows, entries)
        if not self.corrections:
            return curve
        corrections = self.corrections[min(self.corrections, key=lambda known: abs(known - rows))]
        return {num: seconds * corrections.factor(num) for num, seconds in curve.items()}

    def measured(self, rows: int, entries: int | None = None) -> dict[int, float]:
        """`curve` as it was measured: between the rows that are known, and in proportion beyond them."""
        curve, longer = self._table(rows), self._longer(rows)
        if entries is None or longer is None:
            return curve
        return {num: max(0.1 * seconds, seconds + longer.seconds(num, entries)) for num, seconds in curve.items()}

    def _longer(self, rows: int) -> "Longer | None":
        """That of the next smaller number of rows which is known, in proportion."""
        known = max((each for each in self.longer if each <= rows), default=None)
        return None if known is None else self.longer[known].times(rows / known)

    def _table(self, rows: int) -> dict[int, float]:
        if rows in self.table:
            return self.table[rows]
        known = sorted(self.table)
        place = bisect.bisect(known, rows)
        low, high = known[max(0, place - 1)], known[min(place, len(known) - 1)]
        if low == high:
            return {num: seconds * rows / low for num, seconds in self.table[low].items()}
        share = (rows - low) / (high - low)
        both = self.table[low].keys() & self.table[high].keys()
        return {num: (1 - share) * self.table[low][num] + share * self.table[high][num] for num in both}

    def best_size(self, rows: int, least: int, entries: int | None = None) -> tuple[int, float]:
        """The cheapest size of at least so many nodes, and its seconds."""
        curve = self.curve(rows, entries)
        seconds, num = min((seconds, num) for num, seconds in curve.items() if num >= least and num in self.sizes)
        return num, seconds

    def saw(self, rows: int, num: int, seconds: float, entries: int | None = None) -> None:
        """Takes in the seconds of a pass that was made. A size whose cost was too low is chosen until it is corrected."""
        measured = self.measured(rows, entries).get(num)
        if self.steps is not None or not measured:
            return
        if rows not in self.corrections:
            nearest = min(self.corrections, key=lambda known: abs(known - rows), default=None)
            self.corrections[rows] = Corrections() if nearest is None else self.corrections[nearest].copy()
        self.corrections[rows].saw(num, seconds / measured)


@dataclass(frozen=True)
class Longer:
    """What each further entry of the cache adds to a pass: seconds for LONG_SIZES nodes; entries: where that begins."""

    entries: int
    few: float
    many: float

    def seconds(self, num: int, entries: int) -> float:
        low, high = LONG_SIZES
        each = self.few + (num - low) / (high - low) * (self.many - self.few)
        return each * (entries - self.entries)

    def times(self, factor: float) -> "Longer":
        return Longer(self.entries, self.few * factor, self.many * factor)


@torch.inference_mode()
def measure(
    target: Target,
    verifier: Verifier,
    sampling: Sampling,
    rows: int,
    sizes: Iterable[int],
    *,
    linear: bool,
    most: int = MOST,
    context: int = CONTEXT,
    progress: Callable[[list, str], Iterable] = lambda items, _: items,
) -> tuple[dict[int, float], int]:
    """Seconds of a pass by its number of nodes, in turn, the lower quartiles: other work on the machine only adds to them.

    linear: chains, for a target that reads nothing else; most: passes of each size
    context: tokens in the cache; those after the first CONTEXT are empty entries, as only time counts
    -> the seconds, and the entries of the cache
    """
    sizes = [num for num in sizes if target.max_positions is None or num < target.max_positions // 2]
    device = target.device
    wanted, context = context, min(CONTEXT, (target.max_positions or 2 * CONTEXT) // 2)
    cache, generator = target.cache(rows), torch.Generator().manual_seed(0)
    text = torch.randint(0, target.vocab_size, (rows, context), generator=generator).to(device)
    positions = torch.arange(context, device=device).expand(rows, -1)
    cache.reserve(context, [context] * rows)
    mask = masks.pending(masks.causal(context, device), cache.lengths, cache.visible)
    target.read(text, (), positions=positions, mask=mask, cache=cache)
    cache.commit(torch.full((rows,), context, device=device), [context] * rows)
    if wanted > CONTEXT:
        empty = wanted - context
        cache.reserve(empty)
        cache.commit(torch.full((rows,), empty, device=device), [empty] * rows)
    draws = rules.Draws(torch.Generator(device).manual_seed(0))

    def once(num: int) -> float:
        tokens = torch.randint(0, target.vocab_size, (rows, num), generator=generator).to(device)
        parents = torch.arange(-1, num - 1, device=device).repeat(rows, 1)
        if not linear and num > 2:
            parents[:, 2:] = parents[:, 2:] - 1  # two chains
        _wait(target)
        start = time.perf_counter()
        tree = Tree(tokens, parents, None, linear=linear)
        verdict = verifier(tree, cache, draws, sampling=sampling)
        path, following = verdict.along(tree, num - 1)
        following.tolist()
        if not linear:
            cache.keep(path)
        _wait(target)
        seconds = target.share.all_say(time.perf_counter() - start)[0]
        if cache.states is None:
            cache.drop_pending()
        else:
            ones = torch.ones_like(cache.lengths)
            cache.commit(ones, [1] * rows)
        return seconds

    first: dict[int, float] = {}

    def busy(num: int) -> bool:
        return sum(first.values()) > SECONDS and first[num] > BUSY * num * first[sizes[0]]

    for num in progress(list(sizes), f"costs of {rows} rows"):
        if verifier.runner.by_shape:
            once(num)  # it is compiled
        first[num] = once(num)
        if busy(num):
            first[num] = min(first[num], once(num))  # perhaps the machine paused
            if busy(num):
                break  # larger trees are left out: they do not pay where nodes cost nearly as much as rows
    times = {num: [seconds] for num, seconds in first.items()}
    again = list(first)
    while again and (len(times[again[0]]) < LEAST or sum(map(sum, times.values())) < SECONDS):
        again.reverse()
        for num in again:
            times[num].append(once(num))
        again = [num for num in again if len(times[num]) < most and sorted(times[num])[1] > CLOSE * min(times[num])]
    return {num: float(numpy.quantile(each, 0.25)) for num, each in times.items()}, cache.visible


def filled(curve: dict[int, float], sizes: Iterable[int]) -> dict[int, float]:
    """With those of the sizes that lie between measured ones, in proportion."""
    known, seconds = zip(*curve.items())
    return {num: float(numpy.interp(num, known, seconds)) for num in sizes if num <= known[-1]}


def open_costs(
    target: Target,
    verifier: Verifier,
    sampling: Sampling,
    *,
    linear: bool,
    longer: dict[int, Longer],
    progress: Callable[[list, str], Iterable] = lambda items, _: items,
) -> Costs:
    """The costs of this device, from the disk where they were measured before.

    longer: what longer contexts add, as far as it is known from laws of another kind; what is measured is added to it
    """
    conditions = Conditions.of(verifier, sampling)
    sizes = COMPILED_SIZES if verifier.runner.by_shape else SIZES
    path, alone = conditions.path, target.share.size == 1
    # several processes may see other files, and must decide alike
    table, own = _read(path) if alone else ({}, {})
    longer.update(own)
    room = target.max_positions is None or target.max_positions > 2 * LONG
    plain_cache = not (target.windowed or target.recurrent)

    def missing(rows: int) -> dict[int, float]:
        some = sizes if rows == 1 or verifier.runner.by_shape else [num for num in sizes if num in BATCH_SIZES]
        curve, entries = measure(target, verifier, sampling, rows, some, linear=linear, progress=progress)
        table[rows] = filled(curve, sizes)
        if room and plain_cache and rows <= LONG_ROWS and rows not in longer and not verifier.runner.by_shape:
            long, most = measure(target, verifier, sampling, rows, LONG_SIZES, linear=linear, most=FEW, context=LONG)
            if set(LONG_SIZES) <= set(long):  # a busy pass is not followed by larger ones
                few, many = (max(0.0, long[num] - table[rows].get(num, long[num])) for num in LONG_SIZES)
                longer[rows] = Longer(entries, few / (most - entries), many / (most - entries))
        if alone:
            _write(path, conditions, table, longer)
        return table[rows]

    def holds(rows: int) -> bool:
        known = [num for num in CHECKED if num in table[rows]]
        now = measure(target, verifier, sampling, rows, known, linear=linear, most=FEW)[0] if known else {}
        if all(1 / DRIFT < seconds / table[rows][num] < DRIFT for num, seconds in now.items()):
            return True
        table.clear()
        longer.clear()
        return False

    rows = () if verifier.runner.by_shape else ROWS  # every shape would be compiled
    return Costs(dict(table), sizes=sizes, rows=rows, measure=missing, holds=holds, longer=longer)


def told(ratios: dict[int, float], *, plain: float, absorb: float, step: float) -> Costs:
    """Costs of another machine. ratios: by nodes, of a pass over the pass of one node, which takes `plain` seconds

    absorb, step: seconds of a head's first step and of each further one
    """
    curve = {num: ratio * plain for num, ratio in ratios.items()}
    return Costs({1: curve}, sizes=sorted(curve), steps={"absorb": absorb, "step": step})


def read_told(path: Path) -> Costs:
    """Costs of another machine from a JSON file: {"plain_ms": 23.5, "ratios": {"1": 1, "4": 1.14}, "absorb_ms": 2, "step_ms": 1.2}

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


def _read(path: Path) -> tuple[dict[int, dict[int, float]], dict[int, Longer]]:
    """Empty for a file that is missing or damaged: costs are measured again."""
    try:
        document = read_json(path)
        table = {
            int(rows): {int(num): float(seconds) for num, seconds in curve.items()}
            for rows, curve in document["seconds"].items()
        }
        return table, {int(rows): Longer(**values) for rows, values in document["longer"].items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return {}, {}


def _write(path: Path, conditions: Conditions, table: dict[int, dict[int, float]], longer: dict[int, Longer]) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        document = {
            "conditions": asdict(conditions),
            "seconds": table,
            "longer": {rows: asdict(each) for rows, each in longer.items()},
        }
        own = path.with_suffix(f".{os.getpid()}")  # another process may measure the same at this time
        write_text(own, json.dumps(document, indent=1) + "\n")
        own.replace(path)
    except (OSError, ValueError) as error:
        warnings.warn(
            f"The measured costs cannot be kept in {path.parent} ({error}); they will be measured again.", stacklevel=2
        )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _wait(target: Target) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)
