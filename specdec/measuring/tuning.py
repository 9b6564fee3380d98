"""The inspection of proposer=auto: its chances, its choices and its prediction, beside those of fixed shapes.

Everything is read from the `Auto` that decoded, and predicted from its costs (docs/methods.md, section 8).
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from specdec.core.generation import Generation
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.measuring.figures import rate_ratio_interval
from specdec.measuring.measurement import PromptResult
from specdec.measuring.report import Report
from specdec.proposers.auto import Auto, AutoRound
from specdec.proposers.candidates import BOUNDS, DEEPEST, Acceptance, Kind
from specdec.proposers.growth import Stopping


def name_of(drafting: Drafting) -> str:
    """A short name of the shape: chain of 3, tree of 4x3x8 (depth x width x nodes)."""
    shape = drafting.shape
    if drafting.stopping is not None:
        return f"chain of up to {shape.depth}, stopping below {Stopping(**drafting.stopping).threshold:.2f}"
    return str(shape) if shape.chain else f"tree of {shape.depth}x{shape.width}x{shape.nodes}"


def candidates(draftings: Iterable[Drafting], limit: int | None) -> tuple[list[Drafting], list[str]]:
    """Those for a drafter with `limit` steps (None: any number), each once, and the names of those that are too deep."""
    named = {name_of(drafting): drafting for drafting in draftings}
    fitting = {name: each for name, each in named.items() if limit is None or each.depth <= limit}
    return list(fitting.values()), [name for name in named if name not in fitting]


# Acceptance


@dataclass(frozen=True)
class Calibration:
    """Drafts of one kind whose parents were right, verified or not: what was stated of them, and what came.

    Of all these drafts, in the order of the fields: the mean of the drafter's own estimates, the mean of the chances that
    auto made of them before it saw the text, and the share that the text had.
    """

    source: str
    depth: int  # DEEPEST: or deeper
    low: float  # the estimates are between low and high
    high: float
    num: int
    stated: float
    corrected: float
    accepted: float


class RecordedAcceptance(Acceptance):
    """Acceptance that keeps every case from which it learns."""

    def __init__(self) -> None:
        super().__init__()
        self.cases: list[tuple[Kind, float, bool]] = []  # with the chance before it was learned from

    def learn(self, kind: Kind, accepted: bool) -> None:
        self.cases.append((kind, self.probability(kind), accepted))
        super().learn(kind, accepted)

    def calibration(self, bounds: tuple[float, ...] = BOUNDS, *, by_depth: bool = True) -> list[Calibration]:
        """By source, depth and estimate. bounds: between the groups of estimates; by_depth=False: all depths as one"""
        groups: dict[tuple[str, int, int], list[tuple[Kind, float, bool]]] = {}
        for case in self.cases:
            kind = case[0]
            level = sum(kind.estimate >= bound for bound in bounds)
            groups.setdefault((kind.source, min(kind.depth, DEEPEST) * by_depth, level), []).append(case)
        edges = (0.0, *bounds, 1.0)
        return [
            Calibration(
                source,
                depth,
                edges[level],
                edges[level + 1],
                len(cases),
                sum(kind.estimate for kind, _, _ in cases) / len(cases),
                sum(chance for _, chance, _ in cases) / len(cases),
                sum(accepted for _, _, accepted in cases) / len(cases),
            )
            for (source, depth, level), cases in sorted(groups.items())
        ]


# Costs


def pass_seconds(curve: dict[int, float], num: int) -> float:
    """Of a pass of `num` nodes. curve: by nodes; between known sizes in proportion, beyond them along the last two"""
    if num in curve:
        return curve[num]
    known = sorted(curve)
    if len(known) == 1:
        return curve[known[0]]
    high = next((place for place, size in enumerate(known) if size > num and place), len(known) - 1)
    left, right = known[high - 1], known[high]
    return curve[left] + (num - left) / (right - left) * (curve[right] - curve[left])


def step_seconds(auto: Auto, rows: int) -> dict[str, float]:
    """Of the head's first step of a round ("absorb") and of each further one ("step"); without those it never made."""
    assert auto.costs is not None
    if auto.costs.steps is not None:
        return auto.costs.steps
    names = [name for name in ("absorb", "step") if (name, rows) in auto.times.recent]
    return {name: auto.times.seconds(name, rows) for name in names}


def predict(tau: float, curve: dict[int, float], steps: dict[str, float], shape: TreeShape) -> float | None:
    """The speedup of a fixed shape over plain decoding; None if the head's steps are not known.

    tau: tokens a round; curve: seconds of a pass by nodes; steps: as step_seconds. A step of a tree counts as one of a chain.
    """
    if "absorb" not in steps or (shape.depth > 1 and "step" not in steps):
        return None
    drafting = steps["absorb"] + (shape.depth - 1) * steps.get("step", 0.0)
    return tau * pass_seconds(curve, 1) / (pass_seconds(curve, 1 + shape.nodes) + drafting)


# The best fixed shape


def rank_chances(cases: Iterable[tuple[Kind, float, bool]], source: str) -> list[list[float]]:
    """How often a source's draft of each rank (0: its likeliest) was right if its parent was, for each depth from 1.

    cases: of RecordedAcceptance. Depths end with the first that has no case.
    """
    counts: dict[int, Counter[int]] = {}
    right: dict[int, Counter[int]] = {}
    for kind, _, accepted in cases:
        if kind.source == source:
            counts.setdefault(kind.depth, Counter())[kind.rank] += 1
            right.setdefault(kind.depth, Counter())[kind.rank] += accepted
    depths = itertools.takewhile(counts.__contains__, itertools.count(1))
    return [[right[depth][rank] / counts[depth][rank] for rank in range(1 + max(counts[depth]))] for depth in depths]


def best_paths(chances: list[list[float]], num: int) -> list[tuple[tuple[int, ...], float]]:
    """The `num` nodes of the tree that is expected to have the most accepted drafts: (ranks from the root, chance of the path).

    chances: as rank_chances. With chances by depth and rank alone, as in Sequoia (2402.12374, section 4.1), the likeliest paths
    are what its dynamic programme finds, since no path is likelier than its own beginning.
    """
    waiting: list[tuple[float, tuple[int, ...]]] = [(-1.0, ())]
    found: list[tuple[tuple[int, ...], float]] = []
    while waiting and len(found) <= num:
        chance, path = heapq.heappop(waiting)
        found.append((path, -chance))
        following = chances[len(path)] if len(path) < len(chances) else []
        for rank, each in enumerate(following):
            heapq.heappush(waiting, (chance * each, (*path, rank)))
    return found[1:]


def best_shape(
    chances: list[list[float]], curve: dict[int, float], steps: dict[str, float]
) -> tuple[TreeShape, float, float] | None:
    """The fixed shape that is expected to be the fastest, its tokens a round and its speedup; None without chances or steps.

    curve: seconds of a pass by nodes; steps: as step_seconds
    """
    found = []
    for depth in range(1, 1 + len(chances)):
        for nodes in (num - 1 for num in curve if num > depth):
            paths = best_paths(chances[:depth], nodes)
            if len(paths) < nodes or max(len(path) for path, _ in paths) < depth:
                continue
            children = Counter(path[:-1] for path, _ in paths)
            widths = [*children.values(), *Counter(map(len, children)).values()]
            shape, tau = TreeShape(depth, max(widths), nodes), 1 + sum(chance for _, chance in paths)
            speedup = predict(tau, curve, steps, shape)
            if speedup is not None:
                found.append((speedup, tau, shape))
    if not found:
        return None
    speedup, tau, shape = max(found, key=lambda each: each[0])
    return shape, tau, speedup


# Predicted against measured


@dataclass(frozen=True)
class Way:
    """One way to draft: auto, or a fixed shape."""

    name: str
    drafting: Drafting | None  # None: auto
    predicted: float | None  # speedup
    report: Report
    results: list[PromptResult]

    @property
    def measured(self) -> float:
        """Speedup over plain decoding."""
        assert self.report.speedup is not None
        return self.report.speedup


def verdict(ways: list[Way]) -> str:
    """Which way was the fastest, and how far auto, the first of `ways`, was from it."""
    auto, best = ways[0], max(ways, key=lambda way: way.measured)
    assert best.report.speedup_ci is not None
    text = f"The fastest way was {best.name}."
    if best is not auto:
        interval = rate_ratio_interval(auto.results, best.results)
        text += " The speed of {} was {:.3f} of it ({:.3f} .. {:.3f}, 95 %).".format(
            auto.name, auto.measured / best.measured, *interval
        )
    if best.report.speedup_ci[1] < 1:
        text += f" Plain decoding is faster than {best.name}: on this device, decode without this checkpoint."
    return text


# Single rounds


@dataclass(frozen=True)
class TimedRound:
    choice: AutoRound
    accepted: int  # drafts
    seconds: float


def timed_rounds(
    decoder: Decoder, prompt: list[int], max_new_tokens: int, generator: torch.Generator
) -> list[TimedRound]:
    """The rounds of one answer. The decoder drafts with Auto."""
    auto, result = decoder.proposer, Generation([[]], [[]])
    assert isinstance(auto, Auto)
    rounds, before = list[TimedRound](), 0.0
    for emitted in decoder.stream([prompt], max_new_tokens, generator=generator, result=result):
        if len(result.drafted) > len(rounds):  # false for the prompt's own pass, which is no round
            rounds.append(TimedRound(auto.account.choices[-1], emitted.accepted[0], result.seconds - before))
        before = result.seconds
    return rounds
