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

LONGEST_ROUND = 2.0  # seconds of a round, beyond which no more drafts and no more rows are measured
CONTEXT_TOLERANCE = 0.25  # by how much another context may differ, as a share
BOOTSTRAP_DRAWS = 200  # of the turns of a point, for its error
POINT_SECONDS, MIN_ROUNDS, MAX_ROUNDS = 3.0, 8, 32  # of one point: time, and how often each of its rounds is taken


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

    def estimate(self, drafter: str, drafts: float, batch_size: float, context: float) -> CostPoint:
        """Raises ValueError for a drafter that has no points."""
        table = self.tables.get(drafter)
        if table is None:
            raise ValueError(
                f"There are no costs of {drafter}, only of {', '.join(self.tables)}: give the drafters that were timed."
            )
        of_rows = lambda curves_by_rows: interpolate_curve(
            {num: interpolate_curve(curve, drafts) for num, curve in curves_by_rows.items()}, batch_size
        )
        value = interpolate_curve(
            {point_context: of_rows(curves_by_rows) for point_context, curves_by_rows in table.items()}, context
        )
        seconds, plain, error, opening = value.clip(min=0).tolist()
        curves = [(num, curve) for curves_by_rows in table.values() for num, curve in curves_by_rows.items()]
        fewest = min((num for _, curve in curves for num in curve if num), default=0)
        measured = [num for num, curve in curves if max(curve) >= drafts >= fewest]
        inside = bool(measured) and min(measured) <= batch_size <= max(measured)
        inside &= (1 - CONTEXT_TOLERANCE) * min(table) <= context <= (1 + CONTEXT_TOLERANCE) * max(table)
        return CostPoint(drafter, batch_size, drafts, context, seconds, plain, error, opening, not inside)

    def to_json(self) -> dict:
        return {"source": self.source, "points": [asdict(point) for point in self.points]}

    @classmethod
    def from_json(cls, document: dict, fingerprint: str | None = None) -> "RoundCosts":
        return cls([CostPoint(**point) for point in document["points"]], document["source"], fingerprint)


def interpolate_curve(curve: Mapping[float, numpy.ndarray], position: float) -> numpy.ndarray:
    """A piecewise linear curve at a place; outside of it the last line goes on, to half of the last point at least."""
    positions = sorted(curve)
    if position in curve or len(positions) == 1:
        return curve[position if position in curve else positions[0]]
    right = min(max(1, bisect.bisect(positions, position)), len(positions) - 1)
    low, high = positions[right - 1], positions[right]
    share = (position - low) / (high - low)
    return numpy.maximum((1 - share) * curve[low] + share * curve[high], curve[low if share < 0.5 else high] / 2)


# Measured here


def time_rounds(
    decoders: Mapping[float, Decoder], texts: Sequence[list[int]], batch_size: int, seed: int
) -> dict[float, dict]:
    """Rounds of several decoders over the same texts, in turn, so that other work on the machine slows all alike.

    These are rounds of decoding: rows accept as many drafts as they do, and their texts have different lengths. All texts grow by
    about as many tokens, as far as FEWEST_ROUNDS rounds allow, so that no decoder's rounds lie behind longer ones.
    -> by the decoder's key {seconds: of each round after the first; opening: what the first took more than they, as a median}
    """
    batches, times, grown_tokens = {}, {name: list[float]() for name in decoders}, dict.fromkeys(decoders, 0)
    for name, decoder in decoders.items():
        prompts = list(texts[:batch_size])
        depth = decoder.proposer.depth if decoder.proposer else 0
        max_positions = decoder.target.max_positions or 2**30
        max_new_tokens = max(MAX_ROUNDS, MIN_ROUNDS * (depth + 1)) + 2 * (depth + 1)
        max_new_tokens = min(max_new_tokens, max_positions - max(map(len, prompts)) - depth)
        batch = decoder.batch(torch.Generator(decoder.target.device).manual_seed(seed))
        batch.admit([Request(prompt, max_new_tokens) for prompt in prompts])
        batches[name] = batch
        if batch.running:
            times[name].append(batch.run_round().cost.seconds)  # reads the prompts
    start, sweep, names = time.perf_counter(), 0, list(batches)
    while sweep < MAX_ROUNDS and (sweep < MIN_ROUNDS or time.perf_counter() - start < POINT_SECONDS):
        for name in names[sweep % len(names) :] + names[: sweep % len(names)]:
            if len(batches[name].running) == batch_size and (
                grown_tokens[name] < MAX_ROUNDS or len(times[name]) <= MIN_ROUNDS
            ):
                round_ = batches[name].run_round()
                times[name].append(round_.cost.seconds)
                grown_tokens[name] += max(map(len, round_.tokens))
        sweep += 1
    for batch in batches.values():
        batch.close()
    medians = {name: statistics.median(seconds[1:]) for name, seconds in times.items() if len(seconds) > 1}
    return {
        name: {"seconds": found[1:], "opening": found[0] - medians[name]} for name, found in times.items() if found[1:]
    }


def summarise_point(point: CostPoint, drafted: dict, plain: dict, *, varies: bool) -> CostPoint:
    """The point with its seconds. found, plain: of `time_rounds`

    The lower quartile of each counts, as other work on the machine only adds time; where drafts vary from round to round, the mean
    over turns of the ratio to the plain round. The error is a bootstrap over turns.
    """
    turns = min(len(drafted["seconds"]), len(plain["seconds"]))
    times = numpy.array([drafted["seconds"][:turns], plain["seconds"][:turns]])
    resampled = times[
        :, numpy.random.default_rng(0).integers(turns, size=(BOOTSTRAP_DRAWS, turns))
    ]  # [2, DRAWS, turns]
    lower_quartile = lambda times: numpy.quantile(times, 0.25, axis=-1)
    find_ratio = (
        (lambda pair: (pair[0] / pair[1]).mean(-1))
        if varies
        else (lambda pair: lower_quartile(pair[0]) / lower_quartile(pair[1]))
    )
    plain_seconds, value, opening = (
        float(lower_quartile(times[1])),
        float(find_ratio(times)),
        max(0.0, drafted["opening"] - plain["opening"]),
    )
    error = float(numpy.std(find_ratio(resampled))) / value
    return replace(point, seconds=value * plain_seconds, plain=plain_seconds, error=error, opening=opening)


def read_cached_points(path: Path) -> list[CostPoint]:
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
    for batch_size in loads:
        points_by_drafts = find_cached_points(cached_points, batch_size, context)
        slow_drafts = {point.drafts for point in points if point.rows > 1 and is_slow(point, max_cost_ratio)}
        missing = [num for num in decoders if num and num not in {*points_by_drafts, *slow_drafts}]
        if not points_by_drafts and not missing:
            break
        if missing:
            batch_texts = pick_texts(texts, batch_size)
            try:
                timed = time_rounds({num: decoders[num] for num in (0, *missing)}, batch_texts, batch_size, seed)
            except (RuntimeError, MemoryError) as error:
                if devices.describe_out_of_memory(error) is None or not points:
                    raise
                break
            blank = CostPoint(drafter, batch_size, 0, context, 0.0, 0.0)
            new_points = [make_point(blank, num, timed, decoders) for num in missing if {0, num} <= timed.keys()]
            store_points(new_points)
            points_by_drafts |= {point.drafts: point for point in new_points}
        opening = min((point.opening for point in points_by_drafts.values()), default=0.0)  # any drafts read the same
        points += [replace(points_by_drafts[num], context=context, opening=opening) for num in sorted(points_by_drafts)]
    return points


def find_cached_points(cached_points: Sequence[CostPoint], rows: int, context: float) -> dict[float, CostPoint]:
    """The points of a load by their drafts, of the nearest context that is not more than NEAR away."""
    near = [
        point
        for point in cached_points
        if point.rows == rows and abs(point.context - context) < CONTEXT_TOLERANCE * context
    ]
    near.sort(key=lambda point: abs(point.context - context), reverse=True)
    return {point.drafts: point for point in near}


def is_slow(point: CostPoint, max_cost_ratio: float) -> bool:
    return point.seconds > min(LONGEST_ROUND, max_cost_ratio * point.plain)


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


def make_server_costs(drafted: Sequence[dict], plain: Mapping[int, float], source: str, drafter: str) -> RoundCosts:
    """Costs from servers at each load: a round takes the seconds of a user's token times the tokens of a round.

    drafted: {rows, seconds: of a token, tau, drafts, context}; plain: by rows the seconds of a token
    All points have the mean context, as each load has one of its own, and a difference of loads must not count as one of contexts.
    Raises ValueError where no load has both figures and its number of drafts, and for seconds that are none.
    """
    compared_loads, points = [load for load in drafted if load["rows"] in plain and load["drafts"]], []
    for load in compared_loads:
        seconds, base = load["seconds"] * load["tau"], plain[load["rows"]]
        if not (seconds > 0 and base > 0):
            raise ValueError(
                f"At load {load['rows']} a round takes {seconds:g} s with drafts and {base:g} s without: measure that load "
                "again, with longer answers."
            )
        context = statistics.mean(load["context"] for load in compared_loads)
        points.append(CostPoint(drafter, load["rows"], load["drafts"], context, seconds, base))
    if not points:
        raise ValueError(
            "No load has both a figure with drafts and a plain one, with the number of drafts: serve the same loads twice, with "
            "drafts and without, on a server that counts its drafts."
        )
    return RoundCosts(points, source)
