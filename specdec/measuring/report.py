"""What a measurement says: acceptance length (tau), speed and losslessness, overall and by category, as a record and as JSON.

Intervals are 95 % bootstrap intervals over prompts (docs/glossary.md).
"""

import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal

import torch

from specdec.core.generation import STAGES, count_rounds_reaching
from specdec.measuring.measure import PromptReplay, PromptResult
from specdec.text.conversations import Prompt

TAU = "tokens emitted per target pass of a round, bonus or correction token counted; the prompt's own pass is no round"
RESAMPLES = 1000


@dataclass(frozen=True)
class Training:
    """What training took until a validation. Reports of older runs lack some of it."""

    parameters: int | None = None  # trained ones
    tokens: int | None = None  # read, in all processes
    seconds: float | None = None  # without validation and saving
    tokens_per_second: float | None = None
    peak_memory: int | None = None  # bytes: of the device, on a CPU of the process
    processes: int | None = None
    unique_tokens: int | None = None  # of the data set, if all of it is known; of more, some were read several times


@dataclass(frozen=True)
class Report:
    """Figures of drafting on a set of prompts (docs/glossary.md). `*_ci` are 95 % bootstrap intervals over prompts.

    What is counted or timed by decoding is None where nothing was decoded.
    """

    temperature: float
    num_prompts: int  # decoded ones
    num_rounds: int
    tau: float | None = None
    tau_ci: list[float] | None = None
    survival: list[float] | None = None  # [K] share of rounds that accept at least d drafts
    acceptance: list[float] | None = None  # [K] the same, of the rounds that accept d - 1
    tokens_per_second: float | None = None
    tokens_per_second_ci: list[float] | None = None
    baseline_tokens_per_second: float | None = None
    speedup: float | None = None
    speedup_ci: list[float] | None = None
    ms_per_round: dict[str, float] | None = None  # by decode.STAGES
    adapted_target: bool = False  # whether outputs are those of a target that the head has changed
    identical_outputs: float | None = None  # share of the answers that equal plain decoding; None at temperature > 0
    largest_gap_at_difference: float | None = None  # the largest top-2 logit gap where a greedy answer differs
    replayed_prompts: int | None = None  # None where replay does not apply
    replayed_tau: float | None = None
    replayed_tau_ci: list[float] | None = None
    replayed_survival: list[float] | None = None  # [K]
    candidates: dict | None = None  # of a head with a lattice: `summarise_candidates`
    by_category: dict[str, "Report"] = field(default_factory=dict)
    shape: str | None = None  # of a validation: the chain or tree
    step: int | None = None  # of a validation
    training: Training | None = None  # of a validation
    ema: dict | None = None  # of a validation with train.ema: the weights kept, and replayed tau of both
    served_speedup: float | None = None  # on a GPU: by captured passes and steps (served.py)
    served_ms: dict | None = None  # what it is made of
    auto: dict | None = (
        None  # of proposers/auto.py beside: see _summarise_auto, scripts/evaluate.py and train/loop/validate.py
    )
    differences: list[dict] = field(default_factory=list)  # greedy answers unlike plain decoding's: prompt, token, gap
    by_tag: dict[str, "Report"] = field(default_factory=dict)  # of the tags that rows of prompts have
    by_prompt: list[dict] = field(default_factory=list)  # of a validation: `count_prompts`
    fast: dict | None = None  # on a GPU: of each fast path whether it was used, or why not
    user_tokens_per_second: float | None = None  # the median over answers, in which others of the batch cost time, too
    baseline_user_tokens_per_second: float | None = None
    experts: list[int] | None = None  # of a validation whose target is a mixture: experts of a layer, those of a token

    @property
    def decoded(self) -> bool:
        """Whether prompts were decoded; if not, all figures are by replay."""
        return self.tau is not None

    def to_json(self) -> dict:
        """A document for json.dump; `from_json` reads it."""
        document = {item.name: getattr(self, item.name) for item in fields(self)}
        for group in ("by_category", "by_tag"):
            document[group] = {name: report.to_json() for name, report in getattr(self, group).items()}
        document["training"] = self.training and asdict(self.training)
        if self.temperature > 0:
            del document["largest_gap_at_difference"]
        names = [item.name for item in fields(self)]
        optional = names[names.index("replayed_prompts") :]
        unknown = [key for key in optional if document[key] in (None, {}, [])]
        return {key: value for key, value in document.items() if key not in unknown}

    @classmethod
    def from_json(cls, document: dict, *, source: str = "this document") -> "Report":
        """Ignores keys that it does not know. Raises ValueError, naming `source`, if a figure is missing."""
        known_names = {item.name for item in fields(cls)}
        values = {key: value for key, value in document.items() if key in known_names}
        try:
            by_category, by_tag = (
                {name: cls.from_json(document_of_group) for name, document_of_group in values.pop(group, {}).items()}
                for group in ("by_category", "by_tag")
            )
            training = values.pop("training", None)
            training = training and Training(**training)
            return cls(**values, by_category=by_category, by_tag=by_tag, training=training)
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"{source} is not a report of drafting ({error}). Take another copy of it, or measure again."
            ) from error


def summarise(
    results: list[PromptResult],
    *,
    depth: int,
    temperature: float,
    adapted: bool = False,
    seed: int = 0,
) -> Report:
    """Figures over all results. depth: the deepest draft; adapted: `Target.adapted`; seed: of the bootstrap"""
    rounds = sum(result.num_rounds for result in results)
    reaching = count_rounds_reaching([count for result in results for count in result.drafted.accepted[0]], depth)
    survival = [count / rounds if rounds else math.nan for count in reaching]
    previous_survival = [1.0, *survival[:-1]]
    gaps = [result.gap for result in results if result.gap is not None]
    report = Report(
        temperature=temperature,
        adapted_target=adapted,
        num_prompts=len(results),
        num_rounds=rounds,
        tau=compute_tau(results),
        tau_ci=bootstrap_interval(results, compute_tau, seed),
        survival=survival,
        acceptance=[
            share / previous_share if previous_share else math.nan
            for share, previous_share in zip(survival, previous_survival)
        ],
        tokens_per_second=compute_rate(results, "drafted"),
        tokens_per_second_ci=bootstrap_interval(results, lambda drawn: compute_rate(drawn, "drafted"), seed),
        baseline_tokens_per_second=compute_rate(results, "plain"),
        speedup=compute_speedup(results),
        speedup_ci=bootstrap_interval(results, compute_speedup, seed),
        user_tokens_per_second=compute_user_rate(results, "drafted"),
        baseline_user_tokens_per_second=compute_user_rate(results, "plain"),
        ms_per_round={
            name: 1e3 * sum(result.drafted.stages[name] for result in results) / max(1, rounds) for name in STAGES
        },
        identical_outputs=None if temperature > 0 else 1 - len(gaps) / len(results),
        largest_gap_at_difference=None if temperature > 0 else max(gaps, default=None),
        differences=[
            {"prompt": result.prompt.id, "token": result.first_difference, "gap": result.gap}
            for result in results
            if result.gap is not None
        ],
        auto=_summarise_auto(results, temperature, seed) if all(result.auto for result in results) else None,
    )
    replayed = all(result.replayed_accepted for result in results)
    return add_replays(report, results, seed=seed) if replayed else report


def _summarise_auto(results: list[PromptResult], temperature: float, seed: int) -> dict:
    """Figures of drafting that chooses how much to draft. sizes: rounds by the nodes of their trees, the root included"""
    answers = [result.auto for result in results if result.auto is not None]
    rounds = sum(len(answer.accepted[0]) for answer in answers)
    sizes = Counter(1 + num for answer in answers for num in answer.drafted)
    num_identical = sum(result.auto is not None and result.auto.tokens == result.plain.tokens for result in results)
    return {
        "tau": 1 + sum(sum(answer.accepted[0]) for answer in answers) / rounds if rounds else math.nan,
        "speedup": compute_auto_speedup(results),
        "speedup_ci": bootstrap_interval(results, compute_auto_speedup, seed),
        "tokens_per_second": compute_rate(results, "auto"),
        "identical_outputs": None if temperature > 0 else num_identical / len(results),
        "sizes": {str(num): sizes[num] for num in sorted(sizes)},
    }


def count_prompts(results: Sequence[PromptResult | PromptReplay]) -> list[dict]:
    """For each prompt what its tau is made of: {prompt: its id, rounds, emitted: tokens of these rounds}, by decoding or by replay."""
    counts = []
    for result in results:
        if isinstance(result, PromptResult):
            rounds, emitted = float(result.num_rounds), float(result.num_emitted)
        else:
            rounds, emitted = result.replayed_rounds, result.replayed_rounds + sum(result.replayed_accepted)
        counts.append({"prompt": result.prompt.id, "rounds": rounds, "emitted": emitted})
    return counts


def make_undecoded_report(temperature: float) -> Report:
    """The report of a validation that replays only, before `add_replays`."""
    return Report(temperature, num_prompts=0, num_rounds=0)


def add_replays(report: Report, replays: Sequence[PromptResult | PromptReplay], *, seed: int = 0) -> Report:
    """The report with the figures of replay. These may be over more prompts than were decoded."""
    rounds = sum(prompt.replayed_rounds for prompt in replays)
    reaching = [sum(counts) for counts in zip(*(prompt.replayed_accepted for prompt in replays))]
    return replace(
        report,
        replayed_prompts=len(replays),
        replayed_tau=compute_replayed_tau(replays),
        replayed_tau_ci=bootstrap_interval(replays, compute_replayed_tau, seed),
        replayed_survival=[count / rounds if rounds else math.nan for count in reaching],
        candidates=summarise_candidates([prompt.candidates for prompt in replays if prompt.candidates]),
    )


def summarise_candidates(counts: Sequence[list[list[float]]]) -> dict | None:
    """How good candidates are, by [4, K] of each answer's replay.Replay; None without any.

    recall [K]: share of the answers' tokens that are candidates of a depth; mass [K]: the target's probability of the candidates,
    the mean; oracle_tau: of replay, if every token that is a candidate were drafted
    """
    if not counts:
        return None
    num_goals, num_candidates, mass, accepted = torch.tensor(counts, dtype=torch.float64).sum(0)  # [K] each
    rounds = num_goals[0] - accepted.sum()  # every token is accepted, or emitted at the end of a round
    return {
        "recall": (num_candidates / num_goals).tolist(),
        "mass": (mass / num_goals).tolist(),
        "oracle_tau": float(num_goals[0] / rounds),
    }


def describe_candidates(figures: dict) -> str:
    """`summarise_candidates` as text"""
    return f"recall {format_by_depth(figures['recall'])}, mass {format_by_depth(figures['mass'])}, oracle tau {figures['oracle_tau']:.3f}"


def summarise_by_category(results: list[PromptResult], **settings) -> Report:
    """`summarise` over all results, with a report for each category and tag in it."""
    return add_categories(summarise(results, **settings), results, lambda group: summarise(group, **settings))


def add_categories(report: Report, results: Sequence[Any], summary: Callable[[list[Any]], Report]) -> Report:
    """The report with one for each category of the prompts, and for each of their tags. summary: of some of the results"""

    def summarise_groups(names: Callable[[Prompt], Iterable[str]]) -> dict[str, Report]:
        sorted_names = sorted({name for result in results for name in names(result.prompt)})
        return {name: summary([result for result in results if name in names(result.prompt)]) for name in sorted_names}

    return replace(
        report,
        by_category=summarise_groups(lambda prompt: (prompt.category,)),
        by_tag=summarise_groups(lambda prompt: prompt.tags),
    )


def describe_losslessness(report: Report) -> str:
    """One sentence on losslessness, of a report with decoded answers."""
    adapted = "; outputs are those of the adapted target, not of the original one" if report.adapted_target else ""
    if report.temperature > 0:
        return f"lossless by the acceptance rule (answers are draws from the same distribution, not the same draws){adapted}"
    assert report.identical_outputs is not None
    num = round(report.identical_outputs * report.num_prompts)
    if num == report.num_prompts:
        return f"lossless: all {num} answers equal plain decoding{adapted}"
    return (
        f"{num} of {report.num_prompts} answers equal plain decoding; where they differ, the target's two best logits "
        f"are at most {report.largest_gap_at_difference:.3g} apart (rounding, if that is small for the dtype){adapted}"
    )


def format_by_depth(values: list[float]) -> str:
    """Survival or acceptance as text. Depths that are hardly ever reached (below 0.005) are left out, at most 8 are shown."""
    last = max((depth for depth, value in enumerate(values, 1) if value >= 0.005), default=1)
    shown = values[: min(last, 8)]
    return " ".join(f"{value:.2f}" for value in shown) + (" .." if last > len(shown) else "")


# Figures over prompts


@dataclass(frozen=True)
class PromptCounts:
    """What tau is made of, of one prompt; expected numbers if it was replayed at a temperature."""

    num_rounds: float
    num_emitted: float


def compute_tau(results: Sequence[PromptResult | PromptCounts]) -> float:
    """Tokens emitted per round; nan without a round."""
    rounds = sum(result.num_rounds for result in results)
    return sum(result.num_emitted for result in results) / rounds if rounds else float("nan")


def compute_replayed_tau(results: Sequence[PromptResult | PromptReplay]) -> float:
    """tau by replay along the plain answers; nan without a round."""
    rounds = sum(result.replayed_rounds for result in results)
    return 1 + sum(sum(result.replayed_accepted) for result in results) / rounds if rounds else float("nan")


def compute_rate(results: list[PromptResult], kind: Literal["plain", "drafted", "auto"]) -> float:
    """Tokens/s: the tokens of all rounds over the seconds of all rounds; nan without a second."""
    generations = [generation for result in results if (generation := getattr(result, kind)) is not None]
    seconds = sum(generation.seconds for generation in generations)
    return sum(len(generation.tokens[0]) - 1 for generation in generations) / seconds if seconds else float("nan")


def compute_user_rate(results: list[PromptResult], kind: Literal["plain", "drafted"]) -> float | None:
    """Tokens/s of an answer, without its first token: the median over answers; None without a round."""
    answers = [getattr(result, kind) for result in results]
    rates = [(len(answer.tokens[0]) - 1) / answer.elapsed for answer in answers if answer.elapsed]
    return statistics.median(rates) if rates else None


def compute_speedup(results: list[PromptResult]) -> float:
    return compute_rate(results, "drafted") / compute_rate(results, "plain")


def compute_auto_speedup(results: list[PromptResult]) -> float:
    return compute_rate(results, "auto") / compute_rate(results, "plain")


def bootstrap_interval(items: Sequence, statistic: Callable[[list], float], seed: int) -> list[float]:
    """95 % percentile bootstrap over `items`, which are prompts: tokens of one prompt are strongly correlated, and so are the turns of
    one question, which are drawn together."""
    groups: dict[Any, list] = {}
    for index, item in enumerate(items):
        groups.setdefault(_find_question(item) or index, []).append(item)
    questions = list(groups.values())
    generator = torch.Generator().manual_seed(seed)
    draws = (torch.randint(len(questions), (len(questions),), generator=generator).tolist() for _ in range(RESAMPLES))
    estimates = (statistic([item for question_index in draw for item in questions[question_index]]) for draw in draws)
    values = sorted(value for value in estimates if not math.isnan(value))  # a draw may have no round
    if len(values) < 2:
        return [math.nan, math.nan]
    cuts = statistics.quantiles(values, n=40)
    return [cuts[0], cuts[-1]]


def _find_question(item: Any) -> str | None:
    """Of a result, or of a pair of results; None: it stands for itself."""
    prompt = getattr(item[0] if isinstance(item, tuple) and item else item, "prompt", None)
    return prompt.question if isinstance(prompt, Prompt) else None


def measure_tau_difference(
    results: Sequence[PromptResult | PromptCounts], reference: Sequence[PromptResult | PromptCounts], *, seed: int = 0
) -> tuple[float, list[float]]:
    """tau of `results` minus tau of `others`, the same prompts in the same order, and the paired 95 % interval."""

    def statistic(pairs: Sequence[tuple[PromptResult | PromptCounts, PromptResult | PromptCounts]]) -> float:
        return compute_tau([result for result, _ in pairs]) - compute_tau(
            [reference_result for _, reference_result in pairs]
        )

    pairs = list(zip(results, reference, strict=True))
    return statistic(pairs), bootstrap_interval(pairs, statistic, seed)
