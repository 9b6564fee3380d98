"""Seconds of a round by rows, drafts and context, plain and with drafts: measured here, by requests to an engine, or read from an earlier choice.

A table has points. Between them seconds are linear in context, and piecewise linear in rows and in drafts, where 0 drafts are plain
decoding. Beyond them the nearest two go on as a line, and what comes of it is marked as extrapolated.
"""

import bisect
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy
import torch

from specdec.core import devices
from specdec.core.untrusted import read_json
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder

LONGEST = 2.0  # seconds of a round, beyond which no more drafts and no more rows are measured
NEAR = 0.25  # by how much another context may differ, as a share
DRAWS = 200  # of the turns of a point, for its error
POINT_SECONDS, FEWEST_ROUNDS, MOST_ROUNDS = 3.0, 8, 32  # of one point: time, and how often each of its rounds is taken


Curves = dict[float, dict[float, numpy.ndarray]]  # by rows and drafts: seconds, plain, error, opening


@dataclass(frozen=True)
class CostPoint:
    """A round of `rows` rows with `drafts` drafts in each behind `context` tokens.

    drafter: its name, with its shape if that is no chain
    seconds, plain: of such a round, and of a plain one, the drafter's time included
    error: standard error of seconds over plain, as a share of it; opening: seconds in which the drafter reads the rows' prompts
    extrapolated: whether it lies outside of the rows, drafts or contexts (by more than NEAR) of a table's own points
    """

    drafter: str
    rows: float
    drafts: float
    context: float
    seconds: float
    plain: float
    error: float = 0.0
    opening: float = 0.0
    extrapolated: bool = False


class RoundCosts:
    """A table of points. source: where they are from, in words; fingerprint: of the target they were timed with, if known"""

    def __init__(self, points: Iterable[CostPoint], source: str, fingerprint: str | None = None):
        self.points, self.source, self.fingerprint = list(points), source, fingerprint
        self.tables: dict[str, dict[float, Curves]] = {}  # by drafter and context
        for point in self.points:
            curve = self.tables.setdefault(point.drafter, {}).setdefault(point.context, {}).setdefault(point.rows, {})
            curve[0] = numpy.array([point.plain, point.plain, 0.0, 0.0])
            curve[point.drafts] = numpy.array([point.seconds, point.plain, point.error, point.opening])

    def at(self, drafter: str, drafts: float, rows: float, context: float) -> CostPoint:
        """Raises ValueError for a drafter that has no points."""
        table = self.tables.get(drafter)
        if table is None:
            raise ValueError(
                f"There are no costs of {drafter}, only of {', '.join(self.tables)}: give the drafters that were timed."
            )
        of_rows = lambda some: interpolate({num: interpolate(curve, drafts) for num, curve in some.items()}, rows)
        value = interpolate({where: of_rows(some) for where, some in table.items()}, context)
        seconds, plain, error, opening = value.clip(min=0).tolist()
        curves = [(num, curve) for some in table.values() for num, curve in some.items()]
        fewest = min((num for _, curve in curves for num in curve if num), default=0)
        measured = [num for num, curve in curves if max(curve) >= drafts >= fewest]
        inside = bool(measured) and min(measured) <= rows <= max(measured)
        inside &= (1 - NEAR) * min(table) <= context <= (1 + NEAR) * max(table)
        return CostPoint(drafter, rows, drafts, context, seconds, plain, error, opening, not inside)

    def to_json(self) -> dict:
        return {"source": self.source, "points": [asdict(point) for point in self.points]}

    @classmethod
    def from_json(cls, document: dict, fingerprint: str | None = None) -> "RoundCosts":
        return cls([CostPoint(**point) for point in document["points"]], document["source"], fingerprint)


def interpolate(curve: Mapping[float, numpy.ndarray], place: float) -> numpy.ndarray:
    """A piecewise linear curve at a place; outside of it the last line goes on, to half of the last point at least."""
    known = sorted(curve)
    if place in curve or len(known) == 1:
        return curve[place if place in curve else known[0]]
    right = min(max(1, bisect.bisect(known, place)), len(known) - 1)
    low, high = known[right - 1], known[right]
    share = (place - low) / (high - low)
    return numpy.maximum((1 - share) * curve[low] + share * curve[high], curve[low if share < 0.5 else high] / 2)


# Measured here


def time_rounds(
    decoders: Mapping[float, Decoder], texts: Sequence[list[int]], rows: int, seed: int
) -> dict[float, dict]:
    """Rounds of several decoders over the same texts, in turn, so that other work on the machine slows all alike.

    These are rounds of decoding: rows accept as many drafts as they do, and their texts have different lengths. All texts grow by
    about as many tokens, as far as FEWEST_ROUNDS rounds allow, so that no decoder's rounds lie behind longer ones.
    -> by the decoder's key {seconds: of each round after the first; opening: what the first took more than they, as a median}
    """
    batches, times, grown = {}, {name: list[float]() for name in decoders}, dict.fromkeys(decoders, 0)
    for name, decoder in decoders.items():
        prompts = list(texts[:rows])
        depth = decoder.proposer.depth if decoder.proposer else 0
        most = decoder.target.max_positions or 2**30
        left = max(MOST_ROUNDS, FEWEST_ROUNDS * (depth + 1)) + 2 * (depth + 1)
        left = min(left, most - max(map(len, prompts)) - depth)
        batch = decoder.batch(torch.Generator(decoder.target.device).manual_seed(seed))
        batch.admit([Request(prompt, left) for prompt in prompts])
        batches[name] = batch
        if batch.running:
            times[name].append(batch.step().cost.seconds)  # reads the prompts
    begun, sweep, names = time.perf_counter(), 0, list(batches)
    while sweep < MOST_ROUNDS and (sweep < FEWEST_ROUNDS or time.perf_counter() - begun < POINT_SECONDS):
        for name in names[sweep % len(names) :] + names[: sweep % len(names)]:
            if len(batches[name].running) == rows and (grown[name] < MOST_ROUNDS or len(times[name]) <= FEWEST_ROUNDS):
                step = batches[name].step()
                times[name].append(step.cost.seconds)
                grown[name] += max(map(len, step.tokens))
        sweep += 1
    for batch in batches.values():
        batch.close()
    middle = {name: statistics.median(found[1:]) for name, found in times.items() if len(found) > 1}
    return {
        name: {"seconds": found[1:], "opening": found[0] - middle[name]} for name, found in times.items() if found[1:]
    }


def summarise_point(point: CostPoint, found: dict, plain: dict, *, varies: bool) -> CostPoint:
    """The point with its seconds. found, plain: of `time_rounds`

    The lower quartile of each counts, as other work on the machine only adds time; where drafts vary from round to round, the mean
    over turns of the ratio to the plain round. The error is a bootstrap over turns.
    """
    turns = min(len(found["seconds"]), len(plain["seconds"]))
    both = numpy.array([found["seconds"][:turns], plain["seconds"][:turns]])
    drawn = both[:, numpy.random.default_rng(0).integers(turns, size=(DRAWS, turns))]  # [2, DRAWS, turns]
    low = lambda times: numpy.quantile(times, 0.25, axis=-1)
    ratio = (lambda of: (of[0] / of[1]).mean(-1)) if varies else (lambda of: low(of[0]) / low(of[1]))
    base, value, opening = float(low(both[1])), float(ratio(both)), max(0.0, found["opening"] - plain["opening"])
    error = float(numpy.std(ratio(drawn))) / value
    return replace(point, seconds=value * base, plain=base, error=error, opening=opening)


def read_kept(path: Path) -> list[CostPoint]:
    """Points that were measured before; none without a file or for a damaged one: they are measured again."""
    try:
        return [CostPoint(**point) for point in read_json(path)["points"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def time_loads(
    drafter: str,
    decoders: Mapping[float, Decoder],
    texts: Sequence[list[int]],
    loads: Iterable[int],
    *,
    max_cost_ratio: float,
    seed: int,
    cached_points: Sequence[CostPoint],
    store_points: Callable[[list[CostPoint]], object],
) -> list[CostPoint]:
    """Points of one drafter at these numbers of rows, as far as rounds are short and memory suffices, all behind the mean context.

    decoders: by their drafts, the plain one at 0; cached_points: of earlier measurements, which are not measured again
    max_cost_ratio: seconds over plain, above which drafts cannot pay: larger loads are then measured without them
    store_points: is given the new points of each load, as measured
    """
    points, context = list[CostPoint](), statistics.mean(map(len, texts))
    for rows in loads:
        points_by_drafts = find_cached_points(cached_points, rows, context)
        slow = {each.drafts for each in points if each.rows > 1 and is_slow(each, max_cost_ratio)}
        missing = [num for num in decoders if num and num not in {*points_by_drafts, *slow}]
        if not points_by_drafts and not missing:
            break
        if missing:
            some = pick_texts(texts, rows)
            try:
                timed = time_rounds({num: decoders[num] for num in (0, *missing)}, some, rows, seed)
            except (RuntimeError, MemoryError) as error:
                if devices.out_of_memory(error) is None or not points:
                    raise
                break
            blank = CostPoint(drafter, rows, 0, context, 0.0, 0.0)
            new = [make_point(blank, num, timed, decoders) for num in missing if {0, num} <= timed.keys()]
            store_points(new)
            points_by_drafts |= {each.drafts: each for each in new}
        opening = min((each.opening for each in points_by_drafts.values()), default=0.0)  # any drafts read the same
        points += [replace(points_by_drafts[num], context=context, opening=opening) for num in sorted(points_by_drafts)]
    return points


def find_cached_points(cached_points: Sequence[CostPoint], rows: int, context: float) -> dict[float, CostPoint]:
    """The points of a load by their drafts, of the nearest context that is not more than NEAR away."""
    near = [point for point in cached_points if point.rows == rows and abs(point.context - context) < NEAR * context]
    near.sort(key=lambda point: abs(point.context - context), reverse=True)
    return {point.drafts: point for point in near}


def is_slow(point: CostPoint, max_cost_ratio: float) -> bool:
    return point.seconds > min(LONGEST, max_cost_ratio * point.plain)


def pick_texts(texts: Sequence[list[int]], rows: int) -> list[list[int]]:
    """As many texts as rows, of all lengths."""
    ordered = sorted(texts, key=len)
    return [ordered[int((row + 0.5) * len(texts) / rows) % len(texts)] for row in range(rows)]


def make_point(blank: CostPoint, num: float, timed: dict[float, dict], decoders: Mapping[float, Decoder]) -> CostPoint:
    """The point of a number of drafts. timed: of `time_rounds`"""
    proposer = decoders[num].proposer
    varies = proposer is not None and proposer.varies
    return summarise_point(replace(blank, drafts=num), timed[num], timed[0], varies=varies)


# Of an engine


def make_served(drafted: Sequence[dict], plain: Mapping[int, float], source: str, drafter: str) -> RoundCosts:
    """Costs from servers at each load: a round takes the seconds of a user's token times the tokens of a round.

    drafted: {rows, seconds: of a token, tau, drafts, context}; plain: by rows the seconds of a token
    All points have the mean context, as each load has one of its own, and a difference of loads must not count as one of contexts.
    Raises ValueError where no load has both figures and its number of drafts, and for seconds that are none.
    """
    both, points = [each for each in drafted if each["rows"] in plain and each["drafts"]], []
    for each in both:
        seconds, base = each["seconds"] * each["tau"], plain[each["rows"]]
        if not (seconds > 0 and base > 0):
            raise ValueError(
                f"At load {each['rows']} a round takes {seconds:g} s with drafts and {base:g} s without: measure that load "
                "again, with longer answers."
            )
        context = statistics.mean(each["context"] for each in both)
        points.append(CostPoint(drafter, each["rows"], each["drafts"], context, seconds, base))
    if not points:
        raise ValueError(
            "No load has both a figure with drafts and a plain one, with the number of drafts: serve the same loads twice, with "
            "drafts and without, on a server that counts its drafts."
        )
    return RoundCosts(points, source)
