"""Reports: acceptance length (tau), speed and losslessness, overall and by category, as records and as JSON.

Intervals are 95 % bootstrap intervals over prompts (docs/glossary.md).
"""

import functools
import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch

from specdec.core.answer_text import TextDecoder, TextStream
from specdec.core.generation import STAGES, count_rounds_reaching
from specdec.core.untrusted import read_json
from specdec.measuring.certainty import draw_questions, find_bounds
from specdec.measuring.contexts import Contexts, summarise_contexts
from specdec.measuring.measure import PromptReplay, PromptResult
from specdec.text.conversations import Prompt

TAU = "tokens emitted per target pass of a round, bonus or correction token counted; the prompt's own pass is no round"
NUM_SAMPLES = 3  # answers whose text a report keeps, for its page


@dataclass(frozen=True)
class Training:
    """The cost of training until a validation. Reports of older runs lack some figures."""

    parameters: int | None = None  # trained parameters
    tokens: int | None = None  # tokens read in all processes
    seconds: float | None = None  # time without validation and saving
    tokens_per_second: float | None = None
    peak_memory: int | None = None  # bytes of the device, on a CPU those of the process
    processes: int | None = None
    unique_tokens: int | None = None  # tokens of the data set, if all of it is known; `tokens` above it are repeats


@dataclass(frozen=True)
class Report:
    """Figures of drafting on a set of prompts (docs/glossary.md). `*_ci` are 95 % bootstrap intervals over prompts.

    Figures of decoding are None where nothing was decoded, those of replay where replay does not apply. K: depths
    """

    temperature: float
    num_prompts: int  # decoded prompts
    num_rounds: int  # rounds of their drafted answers
    tau: float | None = None
    tau_ci: list[float] | None = None
    survival: list[float] | None = None  # [K] share of rounds that accept at least d drafts
    acceptance: list[float] | None = None  # [K] share of these among the rounds that accept d - 1
    tokens_per_second: float | None = None
    tokens_per_second_ci: list[float] | None = None
    baseline_tokens_per_second: float | None = None
    speedup: float | None = None
    speedup_ci: list[float] | None = None
    ms_per_round: dict[str, float] | None = None  # milliseconds by stage (generation.STAGES)
    adapted_target: bool = False  # the head has changed its target, whose outputs these are
    identical_outputs: float | None = None  # share of answers that equal plain decoding; None at temperature > 0
    largest_gap_at_difference: float | None = None  # largest top-2 logit gap at the first difference of greedy answers
    replayed_prompts: int | None = None
    replayed_tau: float | None = None
    replayed_tau_ci: list[float] | None = None
    replayed_survival: list[float] | None = None  # [K]
    contexts: Contexts | None = None  # tau by the tokens before a round; older reports and those of parts have none
    replayed_contexts: Contexts | None = None  # likewise, by replay
    candidates: dict | None = None  # `summarise_candidates` of a head with a lattice
    by_category: dict[str, "Report"] = field(default_factory=dict)
    shape: str | None = None  # chain or tree of a validation
    step: int | None = None  # training step of a validation
    training: Training | None = None  # cost of training until a validation
    ema: dict | None = None  # validation with train.ema: the better weights, and replayed tau of both
    auto: dict | None = None  # figures of proposers/auto.py (`summarise_auto`, train/loop/validate.py)
    differences: list[dict] = field(default_factory=list)  # greedy answers unlike plain decoding's: prompt, token, gap
    by_tag: dict[str, "Report"] = field(default_factory=dict)  # reports by the tags of the rows of prompts
    samples: list[dict] = field(default_factory=list)  # `write_samples` of a validation that decoded
    fast: dict | None = None  # fast paths of a GPU: used, or the reason why not
    user_tokens_per_second: float | None = None  # median over answers; the rest of the batch costs them time, too
    baseline_user_tokens_per_second: float | None = None
    served: dict | None = None  # figures of an engine (train/loop/served_validation.py)
    experts: list[int] | None = None  # [experts per layer, experts used per token] of a target that is a mixture

    @property
    def decoded(self) -> bool:
        """Whether prompts were decoded; otherwise all figures are by replay."""
        return self.tau is not None

    def to_json(self) -> dict:
        """The report as a document for JSON, without unknown optional figures; `from_json` reads it."""
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
        """The report of a document; unknown keys are ignored. source: file of the document, for messages

        Raises ValueError, naming `source`, if a figure is missing.
        """
        known_names = {item.name for item in fields(cls)}
        values = {key: value for key, value in document.items() if key in known_names}
        try:
            for name in ("by_category", "by_tag"):
                groups = values.get(name, {})
                values[name] = {group: cls.from_json(report) for group, report in groups.items()}
            training = values.get("training")
            values["training"] = training and Training(**training)
            return cls(**values)
        except (TypeError, AttributeError) as error:
            raise ValueError(
                f"{source} is not a report of drafting ({error}). Take another copy of it, or measure again."
            ) from error


def read_report(folder: Path) -> Report | None:
    """The report of a checkpoint's folder; None without one. Raises ValueError for another document."""
    path = folder / "report.json"
    return Report.from_json(read_json(path), source=str(path)) if path.exists() else None


def summarise(
    results: list[PromptResult],
    *,
    depth: int,
    temperature: float,
    adapted: bool = False,
    seed: int = 0,
) -> Report:
    """The report over all results. depth: deepest draft; adapted: `Target.adapted`; seed: of the bootstrap"""
    num_rounds = sum(result.num_rounds for result in results)
    contexts = summarise_contexts([result.contexts for result in results], seed)
    figures = summarise_acceptance(results, depth, seed) | summarise_speed(results, seed)
    if temperature == 0:
        figures |= summarise_differences(results)
    if all(result.auto for result in results):
        figures["auto"] = summarise_auto(results, temperature, seed)
    report = Report(temperature, len(results), num_rounds, adapted_target=adapted, contexts=contexts, **figures)
    is_replayed = all(result.replayed_accepted for result in results)
    return add_replays(report, results, seed=seed) if is_replayed else report


def summarise_acceptance(results: list[PromptResult], depth: int, seed: int) -> dict[str, Any]:
    """Figures of the drafts that rounds accept, by the names of the report's fields. depth: deepest draft"""
    counts = [count for result in results for count in result.drafted.accepted[0]]
    survival = [num / len(counts) if counts else math.nan for num in count_rounds_reaching(counts, depth)]
    pairs = zip(survival, [1.0, *survival])  # of a depth, and of the one before
    return {
        "tau": compute_tau(results),
        "tau_ci": bootstrap_interval(results, compute_tau, seed),
        "survival": survival,
        "acceptance": [share / previous if previous else math.nan for share, previous in pairs],
    }


def summarise_speed(results: list[PromptResult], seed: int) -> dict[str, Any]:
    """Figures of time, by the names of the report's fields."""
    num_rounds = max(1, sum(result.num_rounds for result in results))
    milliseconds = {}
    for stage in STAGES:
        seconds = sum(result.drafted.stages[stage] for result in results)
        if seconds:  # rounds have other stages if the device makes them alone
            milliseconds[stage] = 1e3 * seconds / num_rounds
    return {
        "tokens_per_second": compute_rate(results),
        "tokens_per_second_ci": bootstrap_interval(results, compute_rate, seed),
        "baseline_tokens_per_second": compute_rate(results, "plain"),
        "speedup": compute_speedup(results),
        "speedup_ci": bootstrap_interval(results, compute_speedup, seed),
        "user_tokens_per_second": compute_user_rate(results, "drafted"),
        "baseline_user_tokens_per_second": compute_user_rate(results, "plain"),
        "ms_per_round": milliseconds,
    }


def summarise_differences(results: list[PromptResult]) -> dict[str, Any]:
    """Figures of greedy answers that differ from plain decoding, by the names of the report's fields."""
    different = [(result, result.gap) for result in results if result.gap is not None]
    differences = [
        {"prompt": result.prompt.id, "token": result.first_difference, "gap": gap} for result, gap in different
    ]
    return {
        "identical_outputs": 1 - len(different) / len(results),
        "largest_gap_at_difference": max((gap for _, gap in different), default=None),
        "differences": differences,
    }


def summarise_auto(results: list[PromptResult], temperature: float, seed: int) -> dict:
    """Figures of proposer=auto, which chooses how much to draft. sizes: rounds by nodes of the tree, with its root"""
    compute_auto_speedup = functools.partial(compute_speedup, kind="auto")
    pairs = [(result.auto, result.plain) for result in results if result.auto is not None]
    num_rounds = sum(len(auto.accepted[0]) for auto, _ in pairs)
    num_accepted = sum(sum(auto.accepted[0]) for auto, _ in pairs)
    num_identical = sum(auto.tokens == plain.tokens for auto, plain in pairs)
    sizes = Counter(1 + num for auto, _ in pairs for num in auto.drafted)
    return {
        "tau": 1 + num_accepted / num_rounds if num_rounds else math.nan,
        "speedup": compute_auto_speedup(results),
        "speedup_ci": bootstrap_interval(results, compute_auto_speedup, seed),
        "tokens_per_second": compute_rate(results, "auto"),
        "identical_outputs": None if temperature > 0 else num_identical / len(results),
        "sizes": {str(num): sizes[num] for num in sorted(sizes)},
    }


def write_samples(results: Sequence[PromptResult], decoder: TextDecoder) -> list[dict]:
    """Texts of the first NUM_SAMPLES answers: {prompt: text, pieces: (text, place of the draft in its round or 0)}."""
    samples = []
    for result in results[:NUM_SAMPLES]:
        (tokens,), (accepted,) = result.drafted.tokens, result.drafted.accepted
        stream, places = TextStream(decoder, ()), [0]
        for num in accepted:
            places += [*range(1, num + 1), 0]
        pieces = [(stream.add(token), place) for token, place in zip(tokens, places)]
        samples.append({"prompt": decoder.text(result.prompt.tokens), "pieces": [*pieces, (stream.end(), 0)]})
    return samples


def make_undecoded_report(temperature: float) -> Report:
    """The report of a validation without decoding, before `add_replays`."""
    return Report(temperature, num_prompts=0, num_rounds=0)


def add_replays(report: Report, replays: Sequence[PromptResult | PromptReplay], *, seed: int = 0) -> Report:
    """The report with the figures of replay, which may be over more prompts than were decoded."""
    rounds = sum(prompt.replayed_rounds for prompt in replays)
    reaching = [sum(counts) for counts in zip(*(prompt.replayed_accepted for prompt in replays))]
    contexts = [prompt.contexts for prompt in replays if isinstance(prompt, PromptReplay) and prompt.contexts]
    return replace(
        report,
        replayed_prompts=len(replays),
        replayed_tau=compute_replayed_tau(replays),
        replayed_tau_ci=bootstrap_interval(replays, compute_replayed_tau, seed),
        replayed_survival=[count / rounds if rounds else math.nan for count in reaching],
        replayed_contexts=summarise_contexts(contexts, seed) if contexts else None,
        candidates=summarise_candidates([prompt.candidates for prompt in replays if prompt.candidates]),
    )


def summarise_candidates(counts: Sequence[list[list[float]]]) -> dict | None:
    """The quality of a lattice's candidates; None without any. counts: [4, K] of each answer's replay.Replay

    recall [K]: share of the answers' tokens that are candidates of a depth; mass [K]: mean probability of the
    candidates by the target; oracle_tau: tau of replay if every token that is a candidate were drafted
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
    """The figures of `summarise_candidates` as text."""
    recall, mass = format_by_depth(figures["recall"]), format_by_depth(figures["mass"])
    return f"recall {recall}, mass {mass}, oracle tau {figures['oracle_tau']:.3f}"


def summarise_by_category(results: list[PromptResult], **settings) -> Report:
    """The report over all results, as by `summarise`, with one for each category and tag in it."""
    return add_categories(summarise(results, **settings), results, lambda group: summarise(group, **settings))


def add_categories(report: Report, results: Sequence[Any], summary: Callable[[list[Any]], Report]) -> Report:
    """The report with one for each category and each tag of the prompts. summary: function of some of the results"""

    def summarise_groups(list_names: Callable[[Prompt], Iterable[str]]) -> dict[str, Report]:
        groups: dict[str, list[Any]] = {}
        for result in results:
            for name in set(list_names(result.prompt)):
                groups.setdefault(name, []).append(result)
        reports = {name: summary(groups[name]) for name in sorted(groups)}
        return {name: replace(report, contexts=None, replayed_contexts=None) for name, report in reports.items()}

    by_category = summarise_groups(lambda prompt: (prompt.category,))
    return replace(report, by_category=by_category, by_tag=summarise_groups(lambda prompt: prompt.tags))


def describe_losslessness(report: Report) -> str:
    """A sentence on losslessness. report: with decoded answers"""
    adapted = "; outputs are those of the adapted target, not of the original one" if report.adapted_target else ""
    if report.temperature > 0:
        draws = "answers are draws from the same distribution, not the same draws"
        return f"lossless by the acceptance rule ({draws}){adapted}"
    assert report.identical_outputs is not None
    num = round(report.identical_outputs * report.num_prompts)
    if num == report.num_prompts:
        subject = f"all {num} answers equal" if num > 1 else "the answer equals"
        return f"lossless: {subject} plain decoding{adapted}"
    return (
        f"{num} of {report.num_prompts} answers equal plain decoding; where they differ, the target's two best logits "
        f"are at most {report.largest_gap_at_difference:.3g} apart (rounding, if that is small for the dtype){adapted}"
    )


def format_by_depth(values: list[float]) -> str:
    """Survival or acceptance of at most 8 depths, as text. The last ones below 0.005 are left out."""
    last = max((depth for depth, value in enumerate(values, 1) if value >= 0.005), default=1)
    shown = values[: min(last, 8)]
    return " ".join(f"{value:.2f}" for value in shown) + (" .." if last > len(shown) else "")


# Figures over prompts


@dataclass(frozen=True)
class PromptCounts:
    """The numbers behind tau of one prompt; expected ones, if it was replayed at a temperature."""

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


def compute_rate(results: list[PromptResult], kind: Literal["plain", "drafted", "auto"] = "drafted") -> float:
    """Tokens/s: tokens of all rounds over seconds of all rounds; nan without a second."""
    generations = list(filter(None, (getattr(result, kind) for result in results)))
    seconds = sum(generation.seconds for generation in generations)
    return sum(len(generation.tokens[0]) - 1 for generation in generations) / seconds if seconds else float("nan")


def compute_user_rate(results: list[PromptResult], kind: Literal["plain", "drafted"]) -> float | None:
    """The median over answers of tokens/s, the first token left out; None without a round."""
    answers = [getattr(result, kind) for result in results]
    rates = [(len(answer.tokens[0]) - 1) / answer.elapsed for answer in answers if answer.elapsed]
    return statistics.median(rates) if rates else None


def compute_speedup(results: list[PromptResult], kind: Literal["drafted", "auto"] = "drafted") -> float:
    """The rate of drafted answers over that of plain ones."""
    return compute_rate(results, kind) / compute_rate(results, "plain")


def bootstrap_interval(items: Sequence, statistic: Callable[[list], float], seed: int) -> list[float]:
    """The bounds of the 95 % percentile bootstrap over prompts; [nan, nan] where the statistic is nearly always nan.

    Prompts are drawn whole, as tokens of one prompt are strongly correlated, and so are the turns of one question,
    which are drawn together. items: results of prompts, or pairs of them
    """
    groups: dict[Any, list] = {}
    for index, item in enumerate(items):
        groups.setdefault(_find_question(item) or index, []).append(item)
    questions = list(groups.values())
    estimates = []
    for draw in draw_questions(len(questions), seed):
        sample = itertools.chain.from_iterable(questions[index] for index in draw.tolist())
        estimates.append(statistic(list(sample)))
    return find_bounds(estimates)


def _find_question(item: Any) -> str | None:
    """The question of a result, or of a pair of results; None where it is the only one of its question."""
    prompt = getattr(item[0] if isinstance(item, tuple) and item else item, "prompt", None)
    return prompt.question if isinstance(prompt, Prompt) else None


def measure_tau_difference(
    results: Sequence[PromptResult | PromptCounts], reference: Sequence[PromptResult | PromptCounts], *, seed: int = 0
) -> tuple[float, list[float]]:
    """tau of `results` minus tau of `reference`, the same prompts in the same order, and the paired 95 % interval."""
    pairs = list(zip(results, reference, strict=True))
    return subtract_tau(pairs), bootstrap_interval(pairs, subtract_tau, seed)


def subtract_tau(pairs: Sequence[tuple[PromptResult | PromptCounts, PromptResult | PromptCounts]]) -> float:
    """tau of the first of each pair minus tau of the second."""
    first, second = zip(*pairs)
    return compute_tau(first) - compute_tau(second)
