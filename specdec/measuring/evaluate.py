"""evaluate: each request by every method in turn, at each temperature and batch size, resumable."""

from specdec.options.command_line import split_list

import itertools
import statistics
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Annotated, Any

from specdec import loading
from specdec.core import progress
from specdec.core.answer_text import TextDecoder
from specdec.core.generation import Generation
from specdec.core.option_types import Text
from specdec.core.resumable import Resumable, digest_folder, resumable
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.loading import Opened
from specdec.measuring import results, served
from specdec.measuring.counting import AnswerCounts
from specdec.measuring.measure import FROZEN, MeasureSettings, Method, PromptResult, check_prompts, measure
from specdec.measuring.questions import MeasureOptions, Question, QuestionSet
from specdec.measuring.report import summarise_by_category, tau_difference
from specdec.measuring.results import Entry, Measurement
from specdec.measuring.results_page import write
from specdec.measuring.runs import Run, describe_weights, find_heads, load_runs, shared_target
from specdec.options import decoding, proposers
from specdec.options.command_types import MEMORY, OutputFolder, ProposerSettings
from specdec.options.decoding import DecodeOptions
from specdec.target.model import Target
from specdec.text.conversations import Prompt

STRIDE = 10**6  # between the numbers of requests of different turns
FREE = ("out", "batch", "predicted", "accept_licence", "proposer_settings")  # options that change no row
Request = tuple[int, Question]  # its slot among those of a turn, and what is asked
Prediction = tuple[float, float, float, bool]  # speedup, low, high, whether it is extrapolated
# (drafter, shape, requests at once, context in tokens) -> its speedup; None where nothing is predicted of it
PredictSpeedup = Callable[[str, str, int, float | None], Prediction | None]
# What is predicted of a target and a sampling; notes take the reason where nothing is
Predict = Callable[[Target, Sampling, list[str]], PredictSpeedup]


class EvaluateOptions(MeasureOptions):
    checkpoint: str
    proposers: str
    proposer_settings: ProposerSettings
    chains: str
    trees: Annotated[str, MEMORY]
    batch: Annotated[Text, MEMORY]
    auto: bool
    predicted: Text | None
    out: OutputFolder
    decode: DecodeOptions


@dataclass(frozen=True)
class Comparison:
    """What is decoded, and how.

    runs: heads by the names of their methods; base: settings that all batch sizes and temperatures share
    settings: as they are recorded; heads: folders of all trained heads, by name
    """

    question_set: QuestionSet
    opened: Opened
    methods: list[Method]
    runs: dict[str, Run]
    samplings: list[Sampling]
    batches: list[int]
    base: MeasureSettings
    settings: dict[str, Any]
    heads: dict[str, Path]

    @cached_property
    def requests(self) -> dict[int, list[list[Request]]]:
        """The requests of each turn, by batch size."""
        return {batch: plan_turns(self.question_set.questions, batch) for batch in self.batches}

    def list_numbers(self, batch: int) -> list[int]:
        """The numbers of all requests of a batch size."""
        turns = enumerate(self.requests[batch])
        return [number_request(turn, slot) for turn, requests in turns for slot, _ in requests]


def predict_nothing(target: Target, sampling: Sampling, notes: list[str]) -> PredictSpeedup:
    """The `Predict` of an evaluation without predictions."""
    return lambda *shape: None


def evaluate(options: EvaluateOptions, question_set: QuestionSet, predict: Predict, console: progress.Results) -> None:
    """Decodes what has no row yet, and writes the results."""
    out = Path(options.out)
    loading.use_threads(out / "settings.json")
    comparison = prepare(options, question_set)
    notes = question_set.list_notes(comparison.heads)
    for note in notes:
        progress.note(note)
    recorded = {name: value for name, value in comparison.settings.items() if name != "fingerprint"}
    with resumable(out / "settings.json", out / "rows.jsonl", recorded, advice=results.ADVICE) as rows:
        rows.same(comparison.opened.target.identity)
        num_requests = sum(len(comparison.list_numbers(batch)) for batch in comparison.batches)
        num = num_requests * len(comparison.samplings)
        progress.note(f"{len(rows.rows)} of {num} requests x temperatures x batch sizes are in {out}")
        for batch, sampling in itertools.product(comparison.batches, comparison.samplings):
            decode_missing(comparison, replace(comparison.base, batch=batch, sampling=sampling), rows)
        entries = list[Entry]()
        for sampling, batch in itertools.product(comparison.samplings, comparison.batches):
            entries += make_entries(comparison, sampling, batch, rows.rows, predict, notes)
    reference = comparison.methods[0].name
    write(Measurement(comparison.settings, question_set, entries, notes, reference), out, console)


def prepare(options: EvaluateOptions, question_set: QuestionSet) -> Comparison:
    """Loads heads and target. Raises ValueError, before anything is decoded, for what cannot be measured."""
    samplings = sorted(set(options.decode.samplings()), key=lambda sampling: sampling.temperature)
    shapes = decoding.read_shapes(options.chains, options.trees)
    draftings = [options.decode.drafting(shape) for shape in shapes] or [options.decode.drafting()]
    batches = decoding.read_batches(options.batch)
    names = options.proposers
    if not names and not split_list(options.checkpoint):
        raise ValueError(
            "There is nothing to measure: give checkpoint=checkpoints/a,checkpoints/b, or proposers=ngram,suffix, or both."
        )
    runs = load_runs(options.checkpoint, options.target)
    opened = shared_target(runs, options.target, head=options.proposer_settings.get("checkpoint"))
    if options.auto and len(runs) == 1 and not names and not runs[0].drafter.adapts_target and not shapes:
        names = proposers.AUTO
    folders = {run.name: str(run.folder) for run in runs}
    configs = proposers.configure_all(
        names, settings=options.proposer_settings, drafting=draftings[0], checkpoints=folders
    )
    methods, run_of_method = make_methods(runs, configs, opened.target, draftings)
    check_turns(question_set, opened)
    strings = question_set.make_stop_strings(opened.tokenizer)
    stop = set() if options.ignore_stop else opened.stop
    base = MeasureSettings(samplings[0], stop, options.max_new_tokens, options.seed, stop_strings=strings)
    settings = list_settings(options, question_set, runs, configs, opened)
    heads = find_heads(runs, [*configs.values()])
    return Comparison(question_set, opened, methods, run_of_method, samplings, batches, base, settings, heads)


def check_turns(question_set: QuestionSet, opened: Opened) -> None:
    """Raises ValueError for a target that has no form for later turns."""
    question = next((question for question in question_set.questions if len(question.turns) > 1), None)
    if question is not None:
        question_set.make_prompt(question, 1, [""], opened.tokenizer)


def encode_first_turns(question_set: QuestionSet, opened: Opened, max_new_tokens: int) -> list[Prompt]:
    """The prompts of first turns. Raises ValueError, naming the prompt, for one that is too long for the target."""
    prompts = [question_set.make_prompt(question, 0, [], opened.tokenizer) for question in question_set.questions]
    check_prompts(Decoder(opened.target, None, sampling=Sampling(), stop=set()), prompts, max_new_tokens)
    return prompts


def list_settings(
    options: EvaluateOptions,
    question_set: QuestionSet,
    runs: list[Run],
    configs: dict[str, proposers.Config],
    opened: Opened,
) -> dict[str, Any]:
    """The options that all rows have in common, with what they stand for."""
    folders = sorted({folder for config in configs.values() for folder in proposers.drawn_from(config)})
    return {
        **results.describe_options(options, free=FREE),
        **question_set.describe(opened.tokenizer),
        "checkpoint": describe_weights(runs),
        "proposers": configs,
        "files": {folder: digest_folder(Path(folder)) for folder in folders},
        "stop": [] if options.ignore_stop else sorted(opened.stop),
        **loading.describe_target(opened.target),
    }


def make_methods(
    runs: list[Run], configs: dict[str, proposers.Config], target: Target, draftings: list[Drafting]
) -> tuple[list[Method], dict[str, Run]]:
    """Every head in every shape, no deeper than its steps, and every proposer; the heads' runs by their methods' names."""
    methods: list[Method] = []
    run_of_method: dict[str, Run] = {}
    for run in runs:
        for shape in decoding.cut([drafting.shape for drafting in draftings], run.drafter.depth):
            drafting = replace(draftings[0], depth=shape.depth, width=shape.width, nodes=shape.nodes)
            proposer = drafting.proposer(run.drafter)
            name = f"{run.name}, {name_shape(shape)}"
            methods.append(Method(name, run.drafter.target, proposer, drafting, run.baseline, run.drafter))
            run_of_method[name] = run
    for name, config in configs.items():
        methods.append(Method(name, target, proposers.make(config, target), draftings[0]))
    for method in methods:
        decoding.show_measuring(method.proposer)
    return methods, run_of_method


def name_shape(shape: TreeShape) -> str:
    return str(shape) if shape.chain else f"tree of {shape.depth}x{shape.width}x{shape.nodes}"


# Decoding


def plan_turns(questions: list[Question], batch: int) -> list[list[Request]]:
    """The requests of each turn, which follows when all answers to the turn before are there.

    Questions are repeated for a batch larger than their number.
    """
    slots = [(slot, questions[slot % len(questions)]) for slot in range(max(len(questions), batch))]
    num_turns = max(len(question.turns) for question in questions)
    return [[(slot, each) for slot, each in slots if len(each.turns) > turn] for turn in range(num_turns)]


def number_request(turn: int, slot: int) -> int:
    return turn * STRIDE + slot


def decode_missing(comparison: Comparison, settings: MeasureSettings, rows: Resumable) -> None:
    """Decodes the requests that have no row with this temperature and batch size, turn by turn."""
    key = {"temperature": settings.sampling.temperature, "batch": settings.batch}
    for turn in range(comparison.question_set.num_turns):
        prompts = encode_missing(comparison, settings, turn, [row for row in rows.rows if key.items() <= row.items()])
        if not prompts:
            continue
        label = f"temperature {settings.sampling.temperature:g}, batch {settings.batch}"
        label += f", turn {turn + 1}" * (turn > 0)
        numbers = iter(prompts)
        for group in measure(
            comparison.methods,
            [*prompts.values()],
            settings,
            numbers=[*prompts],
            source=comparison.question_set.source,
            progress=partial(progress.track, what=label, unit="requests", size=len),
        ):
            encoded = [encode_result(comparison.methods, result) for result in group]
            rows.append(*({"number": next(numbers), **key, **row} for row in encoded))


def encode_missing(comparison: Comparison, settings: MeasureSettings, turn: int, rows: list[dict]) -> dict[int, Prompt]:
    """The prompts of a turn by number, without those that have a row.

    A later turn needs the answers to the turns before it, and is left out where it does not fit into the target.
    """
    opened, question_set = comparison.opened, comparison.question_set
    row_of_number = {row["number"]: row for row in rows}
    plain = Decoder(opened.target, None, sampling=settings.sampling, stop=settings.stop)
    longest = settings.max_new_tokens + max(method.proposer.depth for method in comparison.methods)
    prompts: dict[int, Prompt] = {}
    for slot, question in comparison.requests[settings.batch][turn]:
        number = number_request(turn, slot)
        earlier = [row_of_number.get(number_request(each, slot)) for each in range(turn)]
        if number in row_of_number or None in earlier:
            continue
        answers = [read_answer(row, opened, settings.stop) for row in earlier if row is not None]
        prompt = question_set.make_prompt(question, turn, answers, opened.tokenizer)
        if turn == 0 or fits(plain, prompt, longest):  # a first turn that does not fit is refused
            prompts[number] = replace(prompt, question=str(slot % len(question_set.questions)))
    return prompts


def fits(plain: Decoder, prompt: Prompt, max_new_tokens: int) -> bool:
    try:
        check_prompts(plain, [prompt], max_new_tokens)
    except ValueError:
        return False
    return True


def read_answer(row: dict, opened: Opened, stop: set[int]) -> str:
    """What the frozen target answered plainly, as text."""
    plain = row["plain"].get(FROZEN) or next(iter(row["plain"].values()))
    tokens = [token for token in plain["tokens"][0] if token not in stop]
    return TextDecoder.of(opened.tokenizer).text(tokens)


def encode_result(methods: list[Method], results_by_method: dict[str, PromptResult]) -> dict:
    """The results of one request for JSON. `decode_results` is the inverse."""
    figures = ("replayed_rounds", "replayed_accepted", "gap", "candidates")
    cells = {
        name: {"drafted": asdict(result.drafted), **{figure: getattr(result, figure) for figure in figures}}
        for name, result in results_by_method.items()
    }
    plain = {method.baseline: asdict(results_by_method[method.name].plain) for method in methods}
    return {"prompt": asdict(results_by_method[methods[0].name].prompt), "plain": plain, "methods": cells}


def decode_results(rows: Iterable[dict], method: Method) -> list[PromptResult]:
    """The results of one method, by request."""
    decoded = []
    for row in rows:
        cell = {**row["methods"][method.name]}
        plain, drafted = Generation(**row["plain"][method.baseline]), Generation(**cell.pop("drafted"))
        decoded.append(PromptResult(Prompt(**row["prompt"]), plain, drafted, **cell))
    return decoded


# Results


def make_entries(
    comparison: Comparison,
    sampling: Sampling,
    batch: int,
    rows: list[dict],
    predict: Predict,
    notes: list[str],
) -> list[Entry]:
    """The figures of every method at one temperature and batch size, by tau. notes: takes what is to be known of them"""
    key = {"temperature": sampling.temperature, "batch": batch}
    row_of_number = {row["number"]: row for row in rows if key.items() <= row.items()}
    numbers = comparison.list_numbers(batch)
    answered = [row_of_number[number] for number in numbers if number in row_of_number]
    if len(answered) < len(numbers):
        missing = len(numbers) - len(answered)
        notes.append(f"T={sampling.temperature:g}, batch {batch}: {missing} later turns did not fit: left out")
    results_by_method = {method.name: decode_results(answered, method) for method in comparison.methods}
    reference = results_by_method[comparison.methods[0].name]
    context = statistics.mean(len(each.prompt.tokens) + len(each.plain.tokens[0]) / 2 for each in reference)
    predict_speedup = predict(comparison.opened.target, sampling, notes)
    entries = []
    for method in comparison.methods:
        entry = make_entry(comparison, method, sampling, batch, results_by_method[method.name])
        drafter, _, shape = method.name.partition(", ")
        difference = tau_difference(results_by_method[method.name], reference)
        predicted = predict_speedup(drafter, shape, batch, context)
        entries.append(replace(entry, difference=difference, predicted=predicted))
    return sorted(entries, key=lambda entry: -(entry.report.tau or 0.0))


def make_entry(
    comparison: Comparison, method: Method, sampling: Sampling, batch: int, results: list[PromptResult]
) -> Entry:
    """The figures of one method."""
    temperature, run = sampling.temperature, comparison.runs.get(method.name)
    report = summarise_by_category(
        results, depth=method.proposer.depth, temperature=temperature, adapted=method.target.adapted
    )
    if run is not None:
        report = replace(report, training=run.training)
        captured = served.measure(method.target, method.proposer)
        report = captured.add_to(report) if captured else report
    counts = [AnswerCounts.of(result, comparison.base.stop) for result in results]
    return Entry(method.name, temperature, batch, report, counts)
