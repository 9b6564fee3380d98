"""Seconds of rounds at each load: of a server, of an earlier choice, or timed here and kept in $SPECDEC_CACHE."""

from specdec.options.command_line import split_list

import statistics
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec import loading
from specdec.core import files, progress
from specdec.core.resumable import digest_bytes, open_resumable
from specdec.core.wording import format_count
from specdec.decoding.decoder import Decoder
from specdec.measuring import results
from specdec.measuring.replay import AnsweredPrompt
from specdec.measuring.runs import describe_weights
from specdec.measuring.servers.referee import summarise_pairs
from specdec.measuring.servers.server import TriedServer, find_longest
from specdec.proposers import costs as pass_costs
from specdec.tools.choose import round_costs
from specdec.tools.choose.choice import ShapeAcceptance, read_choice
from specdec.tools.choose.round_costs import CostPoint, RoundCosts
from specdec.tools.choose.task import MIN_REQUESTS, ChoiceTask, ChooseOptions, DrafterShape
from specdec.tools.judge.rows import measure_missing, read_batch_pairs

MAX_COST_RATIO = 1.3  # if a round costs more than 1.3 x tau plain rounds at a load, larger loads are not timed


def read_costs(options: ChooseOptions, contexts: list[int]) -> RoundCosts | None:
    """The costs of costs=; None where they are measured now.

    Raises ValueError where they do not exist, or do not fit to other options.
    """
    other_sources = [options.costs, contexts, options.proposers, options.trees]
    if options.engine and (any(other_sources) or len(split_list(options.checkpoint)) != 1):
        raise ValueError(
            "engine= gives the costs of one head's chain behind its own requests: give that checkpoint=DIR, the one it "
            "serves, and no costs=, contexts=, proposers= or trees=."
        )
    if not options.costs:
        return None
    choice = read_choice("costs", options.costs)
    costs = RoundCosts.from_json(choice["costs"], choice["fingerprint"])
    known_contexts = {point.context for point in costs.points}
    far = any(
        abs(length - context) > round_costs.CONTEXT_TOLERANCE * context
        for length in contexts
        for context in known_contexts
    )
    if len(known_contexts) == 1 and far:
        raise ValueError(
            f"contexts={options.contexts}: costs={options.costs} are known of one context only, so leave it out."
        )
    return costs


def estimate_costs(
    task: ChoiceTask, shapes: list[DrafterShape], acceptance: list[ShapeAcceptance], texts: list[AnsweredPrompt]
) -> RoundCosts:
    """The costs of all shapes: from a server, from an earlier choice, or timed here."""
    if task.tried is not None:
        return measure_server_costs(task, task.tried)
    if task.known_costs is not None:
        return task.known_costs
    points, drafts = list[CostPoint](), {(each.drafter, each.shape): each.drafts for each in acceptance}
    for name in dict.fromkeys(each.costs for each in acceptance):
        highest_tau = max(each.tau for each in acceptance if each.costs == name)
        timed = [shape for shape in shapes if shape.costs == name and shape.timed]
        shapes_by_drafts = {drafts[shape.drafter, shape.shape]: shape for shape in timed}
        points += time_drafter(task, name, shapes_by_drafts, texts, MAX_COST_RATIO * highest_tau)
    machine = loading.describe_machine(task.opened.target)
    threads = format_count(machine["threads"], "thread")
    return RoundCosts(points, f"rounds of this decoder, timed on {machine['machine']}, {threads}, {machine['dtype']}")


def make_context(text: AnsweredPrompt, length: int | None) -> list[int]:
    """A prompt with half of its answer, the mean context of its rounds; with a length, repeated and cut to it."""
    tokens = text.prompt + text.answer[: len(text.answer) // 2]
    return tokens if length is None else (tokens * -(-length // len(tokens)))[:length]


def time_drafter(
    task: ChoiceTask,
    name: str,
    shapes: Mapping[float, DrafterShape],
    texts: list[AnsweredPrompt],
    max_cost_ratio: float,
) -> list[CostPoint]:
    """The points of one drafter, timed now or read from the file of earlier measurements.

    shapes: {drafts: shape}; max_cost_ratio: see `time_loads`
    """
    first = next(iter(shapes.values()))
    common: dict[str, Any] = {"sampling": task.sampling, "stop": set(), "runner": first.drafting.runner()}
    plain = Decoder(task.opened.target, None, **common)
    decoders = {0.0: plain}
    for num, shape in shapes.items():
        decoders[num] = shape.drafting.decoder(plain.target, shape.make_proposer(), **common)
    conditions = pass_costs.describe_conditions(plain.verify, task.sampling) | {"drafter": first.source}
    conditions |= {f"{name} {shape.shape}": asdict(shape.drafting) for shape in shapes.values()}
    if not first.shape:  # how much a proposer drafts depends on what it reads
        conditions["texts"] = digest_bytes(repr(texts).encode())
    path = pass_costs.find_costs_file(conditions).with_suffix(".rounds.json")
    cached_points = round_costs.read_cached_points(path)

    def store_points(points: list[CostPoint]) -> None:
        cached_points.extend(points)
        document = {"conditions": conditions, "points": [asdict(point) for point in cached_points]}
        files.cache_document(path, document, "Seconds of rounds")

    points = list[CostPoint]()
    lengths: list[int | None] = [*task.contexts] or [None]
    for length in lengths:
        points += round_costs.time_loads(
            name,
            decoders,
            [make_context(text, length) for text in texts],
            progress.track_items(task.loads, f"rounds of {name}", unit="loads"),
            max_cost_ratio=max_cost_ratio,
            seed=task.options.seed,
            cached_points=cached_points,
            store_points=store_points,
        )
    return points


def measure_server_costs(task: ChoiceTask, tried: TriedServer) -> RoundCosts:
    """Costs from a few requests at each load to a server with drafts and to a plain one.

    Raises ValueError, which names the load, where the figures are missing.
    """
    (run,), out = task.runs, Path(task.options.out)
    settings = tried.settings | {"checkpoint": describe_weights(task.runs), "drafts": tried.longest}
    drafted, seconds_plain = [], {}
    with open_resumable(out / "settings.json", out / "rows.jsonl", settings, advice=results.ADVICE) as rows:
        for load in task.loads:
            servers, requests = {"drafted": tried.server, "plain": tried.baseline}, tried.first
            key = {"requests": load, "wave": 0}
            measure_missing(servers, requests[: max(MIN_REQUESTS, load)], key, rows)
            point, seconds_plain[load] = summarise_load(task, tried, load, rows.rows)
            drafted.append(point)
    source = f"{tried.server.model} of {tried.server.kind}, requests at each load"
    return round_costs.make_server_costs(drafted, seconds_plain, source, run.name)


def summarise_load(task: ChoiceTask, tried: TriedServer, load: int, rows: list[dict]) -> tuple[dict[str, Any], float]:
    """The entry of a load for `make_server_costs`, and the seconds of a plain token. Raises ValueError without them."""
    pairs = read_batch_pairs(rows, load)
    turns = [turn for turn, _ in pairs]
    figures, drafts = summarise_pairs(pairs, task.options.seed), find_longest(turns)
    speeds = [figures[name]["tokens_per_second_of_a_user"] for name in ("drafted", "plain")]
    if not (figures["tau"] and drafts and all(speeds)):
        lacks = "how many drafts the server accepts" if all(speeds) else "the seconds of a user's token"
        raise ValueError(
            f"At load {load} {lacks} cannot be told from {figures['answers']} answers: see that nobody else asks the "
            f"server, raise max_new_tokens=. {results.ADVICE}"
        )
    prompts, answers = dict(tried.first), [answer for turn in turns for answer in turn.answers]
    context = statistics.mean(len(prompts[each.prompt]["prompt"]) + each.tokens / 2 for each in answers)
    seconds, seconds_plain = (1 / speed for speed in speeds)
    point = {"rows": load, "seconds": seconds, "tau": figures["tau"], "drafts": drafts, "context": context}
    return point, seconds_plain
