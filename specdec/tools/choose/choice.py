"""Which drafter, and how many drafts, pay at which load (docs/choosing.md). Functions of figures; no model runs here.

Acceptance does not depend on the load, and seconds of a round hardly depend on the prompts. So they are measured apart.
The speedup at B rows and a context of C tokens is

    plain(B, C) / (seconds(B, K, C) / tau(K) + opening / (N - 1))

with the seconds of a plain round and of a round with K drafts, and N tokens of an answer. `opening` is the time in
which a drafter reads the prompts. Intervals join the errors of tau over prompts (bootstrap) and of the measured ratio
of seconds, as independent ones.
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from specdec.core.sampling import Sampling
from specdec.measuring import results
from specdec.measuring.contexts import AnswerContexts, Contexts, count_contexts, summarise_contexts
from specdec.measuring.evaluate import Predict, PredictSpeedup
from specdec.measuring.report import PromptCounts, bootstrap_interval, compute_tau
from specdec.target.fingerprint import is_outdated
from specdec.target.model import Target
from specdec.text.conversations import Prompt
from specdec.tools.choose.round_costs import RoundCosts
from specdec.unroll.replay import trace_rounds

STANDARD_ERRORS = 1.96  # half of a 95 % interval in standard errors, of a normal distribution


@dataclass(frozen=True)
class ShapeAcceptance:
    """The tokens that a round of a drafter in one shape emits.

    shape: the shape in words; costs: name of its points in RoundCosts; drafts: mean number of a round
    tau_ci: 95 % interval over prompts; survival: share of rounds that accept at least 1, 2, .. drafts
    contexts: tau by the tokens before a round; None in older choices
    """

    drafter: str
    shape: str
    costs: str
    drafts: float
    tau: float
    tau_ci: list[float]
    survival: list[float]
    contexts: Contexts | None = None


class Speedup(NamedTuple):
    """The speedup over plain decoding, with its 95 % interval. extrapolated: whether the costs are"""

    speedup: float
    low: float
    high: float
    extrapolated: bool


def summarise_chains(
    drafter: str, accepts: Sequence[Tensor], prompts: Sequence[Prompt], *, seed: int = 0
) -> list[ShapeAcceptance]:
    """The acceptance of chains of 1, 2, .. K drafts, from one replay.

    accepts: acceptance [K, n] of the answer to each prompt, as unroll/replay.py gives it
    A draft does not depend on the drafts behind it, so the first k rows are those of a replay of k drafts.
    """
    acceptances = []
    for num in range(1, accepts[0].shape[0] + 1):
        traces = [trace_rounds(accept[:num]) for accept in accepts]
        rounds_by_answer = [trace.totals for trace in traces]
        counts = [PromptCounts(number, number + float(accepted.sum())) for number, accepted in rounds_by_answer]
        pairs = zip(prompts, traces, strict=True)
        contexts = [count_contexts(prompt.id, len(prompt.tokens), trace.list_starts()) for prompt, trace in pairs]
        total = sum(count.num_rounds for count in counts)
        survival = [sum(column) / total for column in zip(*(accepted.tolist() for _, accepted in rounds_by_answer))]
        acceptance = ShapeAcceptance(drafter, f"chain of {num}", drafter, num, 0.0, [], survival)
        acceptances.append(add_tau(acceptance, counts, contexts, seed=seed))
    return acceptances


def add_tau(
    acceptance: ShapeAcceptance,
    counts: Sequence[PromptCounts],
    contexts: Sequence[AnswerContexts] = (),
    *,
    seed: int = 0,
) -> ShapeAcceptance:
    """The acceptance with its tau. counts, contexts: rounds and emitted tokens of each prompt, in all and by context"""
    interval = bootstrap_interval(counts, compute_tau, seed)
    buckets = summarise_contexts(contexts, seed)
    return replace(acceptance, tau=compute_tau(counts), tau_ci=interval, contexts=buckets)


def find_speedup(
    acceptance: ShapeAcceptance, costs: RoundCosts, batch_size: float, context: float, tokens: float
) -> Speedup:
    """The speedup of a shape at a load. tokens: mean number of an answer"""
    cost = costs.estimate(acceptance.costs, acceptance.drafts, batch_size, context)

    def speedup_at(tokens_per_round: float) -> float:
        return cost.plain / (cost.seconds / tokens_per_round + cost.opening / max(1.0, tokens - 1))

    value, (low, high) = speedup_at(acceptance.tau), map(speedup_at, acceptance.tau_ci)
    error = STANDARD_ERRORS * cost.error
    below, above = (math.hypot(math.log(value / end), error) if end > 0 else error for end in (low, high))
    return Speedup(value, value * math.exp(-below), value * math.exp(above), cost.extrapolated)


def choose_drafts(
    acceptances: Sequence[ShapeAcceptance],
    costs: RoundCosts,
    *,
    loads: Sequence[int],
    contexts: Sequence[float],
    tokens: float,
) -> list[dict]:
    """The best shape of every drafter, and the best of all, for each context and load.

    Each row is {load, context, best, drafters}. best: a drafter, or "plain" where nothing is faster. drafters: by name
    {shape, drafts, tau, speedup, low, high, extrapolated}.
    """
    table = []
    for context, load in itertools.product(contexts, loads):
        drafters: dict[str, dict] = {}
        for acceptance in acceptances:
            speedup = find_speedup(acceptance, costs, load, context, tokens)
            best_shape = drafters.get(acceptance.drafter)
            if best_shape is None or speedup.speedup > best_shape["speedup"]:
                facts = {"shape": acceptance.shape, "drafts": acceptance.drafts, "tau": acceptance.tau}
                drafters[acceptance.drafter] = facts | speedup._asdict()
        best = max(drafters, key=lambda name: drafters[name]["speedup"])
        if drafters[best]["speedup"] <= 1:
            best = "plain"
        table.append({"load": load, "context": context, "best": best, "drafters": drafters})
    return table


def find_crossings(
    acceptances: Sequence[ShapeAcceptance], costs: RoundCosts, *, max_load: int, context: float, tokens: float
) -> dict[str, tuple[int, bool] | None]:
    """The smallest load from which plain decoding is faster at every load up to `max_load`.

    Returns it for each drafter, and for "all", with whether costs there are extrapolated; None where drafts still pay
    at `max_load`.
    """
    crossings: dict[str, tuple[int, bool] | None] = {}
    for name in dict.fromkeys(acceptance.drafter for acceptance in acceptances):
        shapes = [acceptance for acceptance in acceptances if acceptance.drafter == name]
        crossings[name] = None
        for load in range(max_load, 0, -1):
            speedups = [find_speedup(shape, costs, load, context, tokens) for shape in shapes]
            best = max(speedups, key=lambda speedup: speedup.speedup)
            if best.speedup > 1:
                break
            crossings[name] = load, best.extrapolated
    loads = [crossing for crossing in crossings.values() if crossing]
    return crossings | {"all": max(loads) if len(loads) == len(crossings) else None}


def find_schedule(table: Iterable[dict], drafter: str) -> list[tuple[int, int, int]]:
    """The drafts of one drafter's chains by load: (first load, last load, drafts), where 0 is plain, as vLLM has it.

    table: rows of `choose_drafts` with one context
    """
    steps: list[tuple[int, int, int]] = []
    for row in sorted(table, key=lambda row: row["load"]):
        best_shape, first = row["drafters"][drafter], row["load"] if steps else 1
        drafts = round(best_shape["drafts"]) if best_shape["speedup"] > 1 else 0
        if steps:  # a number of drafts counts up to the next load of the table
            steps[-1] = steps[-1][0], first - 1, steps[-1][2]
        if steps and steps[-1][2] == drafts:
            first = steps.pop()[0]
        steps.append((first, row["load"], drafts))
    return steps


# An earlier choice


def read_choice(option: str, path: str) -> dict[str, Any]:
    """Reads `choice` of the results.json of specdec choose. option: name of the option, for messages; path: its folder

    Raises ValueError for a folder in which specdec choose has written nothing.
    """
    try:
        document = results.read_results(path)["choice"]
        predict_speedup(document, "", "", 1)
        return document
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{option}={path} must be a folder of specdec choose ({type(error).__name__}: {error}): make it again."
        ) from None


def read_predictions(path: str | None) -> Predict:
    """A function that gives the predictions of a choice for a target and a sampling.

    path: folder of specdec choose; None: nothing is predicted
    Raises ValueError as `read_choice`.
    """
    document = read_choice("predicted", path) if path else None

    def predict(target: Target, sampling: Sampling, notes: list[str]) -> PredictSpeedup:
        differing = find_mismatch(document, target, sampling) if document else []
        note = f"T={sampling.temperature:g}: nothing is predicted, as predicted= is of {', '.join(differing)}"
        if differing and note not in notes:
            notes.append(note)
        return partial(predict_speedup, None if differing else document)

    return predict


def find_mismatch(document: dict[str, Any], target: Target, sampling: Sampling) -> list[str]:
    """The target and the settings of a choice that differ from these, in words."""
    recorded = {"fingerprint": document["fingerprint"], **document["sampling"]}
    differing = [name for name, value in asdict(sampling).items() if recorded.get(name) != value]
    if not target.matches(recorded["fingerprint"]):
        differing.insert(0, "fingerprint")
        if is_outdated(recorded["fingerprint"]):
            recorded["fingerprint"] += " (of an earlier version, not to be compared: choose again)"
    return [f"{name} {recorded.get(name)}" for name in differing]


def predict_speedup(
    document: dict[str, Any] | None, drafter: str, shape: str, batch_size: float, context: float | None = None
) -> Speedup | None:
    """The speedup of a drafter at a load by a choice; None where the choice has no such drafter or shape.

    document: `choice` of a results.json; None: nothing is predicted
    shape: words of the file, such as "chain of 3" or "tree of 4x3x8"; "" of a proposer without one
    context: tokens before a round; None: the choice's first
    """
    if document is None:
        return None
    acceptances = [ShapeAcceptance(**row) for row in document["acceptance"]]
    costs, tokens = RoundCosts.from_json(document["costs"]), float(document["tokens"])
    context = float(document["contexts"][0]) if context is None else context
    for acceptance in acceptances:
        if (acceptance.drafter, acceptance.shape) == (drafter, shape):
            return find_speedup(acceptance, costs, batch_size, context, tokens)
    return None
