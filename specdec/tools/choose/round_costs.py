"""Seconds of a round by rows, drafts and context, plain and with drafts.

They are measured here, by requests to an engine, or read from an earlier choice. A table has points. Between them
seconds are linear in context, and piecewise linear in rows and in drafts, where 0 drafts are plain decoding. Beyond
them the line of the nearest two points goes on, and such values are marked as extrapolated.
"""

import bisect
import statistics
import time
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
import torch

from specdec.core import devices
from specdec.core.untrusted import read_json
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder

LONGEST_ROUND = 2.0  # seconds; beyond a longer round, no more drafts and no more rows are timed
CONTEXT_TOLERANCE = 0.25  # relative difference of contexts up to which a point counts for another context
BOOTSTRAP_DRAWS = 200  # samples for the error of a point: its own error is then about 5 %
POINT_SECONDS = 3.0  # seconds of measuring after which a point gets no more rounds than MIN_ROUNDS
MIN_ROUNDS, MAX_ROUNDS = 8, 32  # rounds of each decoder for a point

Curves = dict[float, dict[float, numpy.ndarray]]  # by rows and drafts: [seconds, plain, error, opening]


@dataclass(frozen=True)
class CostPoint:
    """The cost of a round of `rows` rows with `drafts` drafts in each behind `context` tokens.

    drafter: name of the drafter, with its shape if that is no chain
    seconds, plain: seconds of such a round and of a plain one, with the drafter's time
    error: relative standard error of the ratio seconds / plain
    opening: seconds in which the drafter reads the prompts of the rows
    extrapolated: whether rows, drafts or context lie outside those of the table's points
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
    """A table of points.

    source: their origin in words; fingerprint: fingerprint of the target that was timed, None where it is not known
    """

    def __init__(self, points: Iterable[CostPoint], source: str, fingerprint: str | None = None):
        self.points, self.source, self.fingerprint = list(points), source, fingerprint
        self.tables: dict[str, dict[float, Curves]] = {}  # {drafter: {context: curves}}
        for point in self.points:
            curve = self.tables.setdefault(point.drafter, {}).setdefault(point.context, {}).setdefault(point.rows, {})
            curve[0] = numpy.array([point.plain, point.plain, 0.0, 0.0])
            curve[point.drafts] = numpy.array([point.seconds, point.plain, point.error, point.opening])

    def estimate(self, drafter: str, drafts: float, batch_size: float, context: float) -> CostPoint:
        """The point at these coordinates. Raises ValueError for a drafter without points."""
        table = self.tables.get(drafter)
        if table is None:
            raise ValueError(
                f"There are no costs of {drafter}, only of {', '.join(self.tables)}: give the drafters that were timed."
            )
        by_context = {length: interpolate_curves(curves, drafts, batch_size) for length, curves in table.items()}
        seconds, plain, error, opening = interpolate_curve(by_context, context).clip(min=0).tolist()
        extrapolated = not self.covers(drafter, drafts, batch_size, context)
        return CostPoint(drafter, batch_size, drafts, context, seconds, plain, error, opening, extrapolated)

    def covers(self, drafter: str, drafts: float, batch_size: float, context: float) -> bool:
        """Whether a drafter's points lie around these coordinates."""
        points = [point for point in self.points if point.drafter == drafter]
        fewest = min((point.drafts for point in points if point.drafts), default=0)
        sizes = [point.rows for point in points if point.drafts >= drafts >= fewest]
        shortest = (1 - CONTEXT_TOLERANCE) * min(point.context for point in points)
        longest = (1 + CONTEXT_TOLERANCE) * max(point.context for point in points)
        return bool(sizes) and min(sizes) <= batch_size <= max(sizes) and shortest <= context <= longest

    def to_json(self) -> dict:
        return {"source": self.source, "points": [asdict(point) for point in self.points]}

    @classmethod
    def from_json(cls, document: dict, fingerprint: str | None = None) -> "RoundCosts":
        return cls([CostPoint(**point) for point in document["points"]], document["source"], fingerprint)


def interpolate_curves(curves: Curves, drafts: float, batch_size: float) -> numpy.ndarray:
    """The value of curves over drafts, one for each number of rows."""
    return interpolate_curve({rows: interpolate_curve(curve, drafts) for rows, curve in curves.items()}, batch_size)


def interpolate_curve(curve: Mapping[float, numpy.ndarray], position: float) -> numpy.ndarray:
    """The value of a piecewise linear curve. Outside of its points the last line goes on, to half of the last value."""
    positions = sorted(curve)
    if position in curve or len(positions) == 1:
        return curve[position if position in curve else positions[0]]
    right = min(max(1, bisect.bisect(positions, position)), len(positions) - 1)
    low, high = positions[right - 1], positions[right]
    share = (position - low) / (high - low)
    return numpy.maximum((1 - share) * curve[low] + share * curve[high], curve[low if share < 0.5 else high] / 2)


# Measured here


class RoundTimer:
    """Timed rounds of one decoder over some texts.

    seconds: seconds of each round; the first one reads the prompts
    grown: tokens by which the texts have grown since then
    """

    def __init__(self, decoder: Decoder, prompts: Sequence[list[int]], seed: int):
        depth = decoder.proposer.depth if decoder.proposer else 0
        limit = (decoder.target.max_positions or 2**30) - max(map(len, prompts)) - depth
        max_new_tokens = min(limit, max(MAX_ROUNDS, MIN_ROUNDS * (depth + 1)) + 2 * (depth + 1))
        generator = torch.Generator(decoder.target.device).manual_seed(seed)
        self.batch = decoder.batch(generator, max_rows=len(prompts))
        self.batch.admit([Request(prompt, max_new_tokens) for prompt in prompts])
        self.batch_size, self.grown, self.seconds = len(prompts), 0, list[float]()
        if self.batch.running:
            self.seconds.append(self.batch.run_round().cost.seconds)

    def run_round(self) -> None:
        """Times a round, unless a row has ended or the texts have grown enough."""
        complete = len(self.batch.running) == self.batch_size
        if complete and (self.grown < MAX_ROUNDS or len(self.seconds) <= MIN_ROUNDS):
            round_ = self.batch.run_round()
            self.seconds.append(round_.cost.seconds)
            self.grown += max(map(len, round_.tokens))


def time_rounds(
    decoders: Mapping[float, Decoder], texts: Sequence[list[int]], batch_size: int, seed: int
) -> dict[float, dict]:
    """Times rounds of several decoders over the same texts, in turn, so that other work on the machine slows all alike.

    These are rounds of decoding: rows accept different numbers of drafts, and texts have different lengths. All texts
    grow by about as many tokens, as far as MIN_ROUNDS rounds allow, so that no decoder has longer texts than others.

    Returns by the decoder's key {seconds: of each round after the first, opening: by which the first one took longer
    than their median}, for decoders with two rounds or more.
    """
    timers = {num: RoundTimer(decoder, texts[:batch_size], seed) for num, decoder in decoders.items()}
    start, order = time.perf_counter(), list(timers.values())
    for sweep in range(MAX_ROUNDS):
        if sweep >= MIN_ROUNDS and time.perf_counter() - start >= POINT_SECONDS:
            break
        for timer in order:
            timer.run_round()
        order = [*order[1:], order[0]]
    rounds = {}
    for num, timer in timers.items():
        timer.batch.close()
        opening, *seconds = timer.seconds or [0.0]
        if seconds:
            rounds[num] = {"seconds": seconds, "opening": opening - statistics.median(seconds)}
    return rounds


def summarise_point(point: CostPoint, drafted: dict, plain: dict, *, varies: bool) -> CostPoint:
    """The point with its seconds, their error and the opening. drafted, plain: rounds as `time_rounds` returns them

    The lower quartile of the seconds counts, as other work on the machine only adds time. Where drafts vary from round
    to round, it is the mean ratio of a round to the plain one beside it. The error is a bootstrap over rounds.
    """
    num = min(len(drafted["seconds"]), len(plain["seconds"]))
    times = numpy.array([drafted["seconds"][:num], plain["seconds"][:num]])
    resampled = times[:, numpy.random.default_rng(0).integers(num, size=(BOOTSTRAP_DRAWS, num))]  # [2, DRAWS, num]
    plain_seconds = float(numpy.quantile(times[1], 0.25))
    ratio = float(find_ratio(times, varies))
    error = float(numpy.std(find_ratio(resampled, varies))) / ratio
    opening = max(0.0, drafted["opening"] - plain["opening"])
    return replace(point, seconds=ratio * plain_seconds, plain=plain_seconds, error=error, opening=opening)


def find_ratio(times: numpy.ndarray, varies: bool) -> Any:
    """The ratio of drafted rounds to plain ones [..]. times [2, .., num]: seconds"""
    if varies:
        return (times[0] / times[1]).mean(-1)
    drafted, plain = numpy.quantile(times, 0.25, axis=-1)
    return drafted / plain


def read_cached_points(path: Path) -> list[CostPoint]:
    """Points of earlier measurements; none without a file or for a damaged one: they are measured again."""
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
    """Points of one drafter at each load, behind the mean context, as far as rounds are short and memory suffices.

    decoders: {drafts: decoder}, the plain one at 0; cached_points: points that are not measured again
    max_cost_ratio: bound of seconds over plain; larger loads are timed without drafts above it, as they cannot pay
    store_points: called with the new points of each load
    """
    points, context = list[CostPoint](), statistics.mean(map(len, texts))
    for load in loads:
        points_by_drafts = find_cached_points(cached_points, load, context)
        missing = list_missing_drafts(decoders, points_by_drafts, points, max_cost_ratio)
        if not points_by_drafts and not missing:
            break
        blanks = [CostPoint(drafter, load, num, context, 0.0, 0.0) for num in missing]
        try:
            new_points = time_points(blanks, decoders, pick_texts(texts, load), seed)
        except (RuntimeError, MemoryError) as error:
            if devices.describe_out_of_memory(error) is None or not points:
                raise
            break
        if new_points:
            store_points(new_points)
            points_by_drafts |= {point.drafts: point for point in new_points}
        points += share_opening(points_by_drafts, context)
    return points


def list_missing_drafts(
    decoders: Iterable[float], cached: Container[float], points: list[CostPoint], max_cost_ratio: float
) -> list[float]:
    """The numbers of drafts to time at a load: neither cached nor too slow at a smaller load of several rows."""
    slow = {point.drafts for point in points if point.rows > 1 and is_slow(point, max_cost_ratio)}
    return [num for num in decoders if num and num not in cached and num not in slow]


def time_points(
    blanks: list[CostPoint], decoders: Mapping[float, Decoder], texts: list[list[int]], seed: int
) -> list[CostPoint]:
    """The points of one load with their seconds. blanks: points without seconds; texts: a text for each row"""
    if not blanks:
        return []
    timed = time_rounds(
        {0: decoders[0]} | {point.drafts: decoders[point.drafts] for point in blanks}, texts, len(texts), seed
    )
    points = []
    for point in blanks:
        if {0, point.drafts} <= timed.keys():
            proposer = decoders[point.drafts].proposer
            varies = proposer is not None and proposer.varies
            points.append(summarise_point(point, timed[point.drafts], timed[0], varies=varies))
    return points


def share_opening(points_by_drafts: dict[float, CostPoint], context: float) -> list[CostPoint]:
    """The points of a load with this context and their shortest opening: all drafts read the same prompts."""
    opening = min((point.opening for point in points_by_drafts.values()), default=0.0)
    return [replace(points_by_drafts[num], context=context, opening=opening) for num in sorted(points_by_drafts)]


def find_cached_points(cached_points: Sequence[CostPoint], load: int, context: float) -> dict[float, CostPoint]:
    """The points of a load by their drafts, each of the nearest context within CONTEXT_TOLERANCE."""
    distances = [(abs(point.context - context), point) for point in cached_points if point.rows == load]
    near = [(distance, point) for distance, point in distances if distance < CONTEXT_TOLERANCE * context]
    near.sort(key=lambda pair: pair[0], reverse=True)
    return {point.drafts: point for _, point in near}


def is_slow(point: CostPoint, max_cost_ratio: float) -> bool:
    return point.seconds > min(LONGEST_ROUND, max_cost_ratio * point.plain)


def pick_texts(texts: Sequence[list[int]], num: int) -> list[list[int]]:
    """`num` texts of all lengths, repeated where there are fewer."""
    ordered = sorted(texts, key=len)
    return [ordered[int((row + 0.5) * len(texts) / num) % len(texts)] for row in range(num)]


# Of an engine


def make_server_costs(drafted: Sequence[dict], plain: Mapping[int, float], source: str, drafter: str) -> RoundCosts:
    """Costs from servers at each load: a round takes the seconds of a user's token times the tokens of a round.

    drafted: {rows, seconds: of a token, tau, drafts, context} of each load; plain: seconds of a token by load
    All points have the mean context: each load has its own, and a difference of loads is not one of contexts.
    Raises ValueError where no load has both figures and its number of drafts, and for seconds that are not above 0.
    """
    compared = [load for load in drafted if load["rows"] in plain and load["drafts"]]
    if not compared:
        raise ValueError(
            "No load has both a figure with drafts and a plain one, with the number of drafts: serve the same loads "
            "twice, with drafts and without, on a server that counts its drafts."
        )
    context = statistics.mean(load["context"] for load in compared)
    points = []
    for load in compared:
        seconds, plain_seconds = load["seconds"] * load["tau"], plain[load["rows"]]
        if not (seconds > 0 and plain_seconds > 0):
            raise ValueError(
                f"At load {load['rows']} a round takes {seconds:g} s with drafts and {plain_seconds:g} s without: "
                "measure that load again, with longer answers."
            )
        points.append(CostPoint(drafter, load["rows"], load["drafts"], context, seconds, plain_seconds))
    return RoundCosts(points, source)
