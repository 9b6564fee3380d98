"""The verb evaluate: each request is decoded by every method, at each temperature and batch size; resumable."""

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
from specdec.core.resumable import Resumable, digest_folder, open_resumable
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.core.wording import format_count
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.loading import OpenTarget
from specdec.measuring import results
from specdec.measuring.counting import AnswerCounts
from specdec.measuring.measure import FROZEN, MeasureSettings, Method, PromptResult, check_prompts, measure
from specdec.measuring.questions import MeasureOptions, Question, QuestionSet
from specdec.measuring.report import measure_tau_difference, summarise_by_category
from specdec.measuring.results import Entry, Measurement
from specdec.measuring.results_page import write_results
from specdec.measuring.runs import (
    ComparedHead,
    describe_weights,
    find_head_folders,
    list_long_prompts,
    load_heads,
    open_shared_target,
)
from specdec.options import decoding, proposers
from specdec.options.command_types import MEMORY, OutputFolder, ProposerSettings
from specdec.options.decoding import DecodeOptions
from specdec.target.model import Target
from specdec.text.conversations import Prompt

TURN_STRIDE = 10**6  # distance of the numbers of a question's turns; more than any number of questions
FREE_OPTIONS = ("batch", "predicted", "proposer_settings")  # options that change no row
Prediction = tuple[float, float, float, bool]  # speedup, low, high, extrapolated or not
# (drafter, shape, requests at once, context in tokens) -> predicted speedup; None: without a prediction
PredictSpeedup = Callable[[str, str, int, float | None], Prediction | None]
# (target, sampling, notes) -> predictions for them; notes: list that gets the reason where there are none
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
    """Questions, methods and settings of an evaluation."""

    question_set: QuestionSet
    opened: OpenTarget
    methods: list[Method]
    head_of_method: dict[str, ComparedHead]  # trained heads, by the names of their methods
    samplings: list[Sampling]  # one for each temperature, increasing
    batches: list[int]  # batch sizes, increasing
    base_settings: MeasureSettings  # settings that all batch sizes and temperatures share
    settings: dict[str, Any]  # settings as they are recorded
    head_folders: dict[str, Path]  # folders of all trained heads, by name

    @cached_property
    def requests(self) -> dict[int, list[dict[int, Question]]]:
        """The requests of each turn, as of `plan_turns`, by batch size."""
        return {batch: plan_turns(self.question_set.questions, batch) for batch in self.batches}

    def list_numbers(self, batch: int) -> list[int]:
        """The numbers of all requests of a batch size."""
        return [number for requests in self.requests[batch] for number in requests]


def predict_nothing(target: Target, sampling: Sampling, notes: list[str]) -> PredictSpeedup:
    """The `Predict` of an evaluation without predictions."""
    return lambda *shape: None


def evaluate(options: EvaluateOptions, question_set: QuestionSet, predict: Predict, console: progress.Results) -> None:
    """Decodes the requests that have no row yet, and writes the results.

    Raises ValueError, before anything is decoded, for what cannot be measured, and for other settings than recorded
    ones.
    """
    out = Path(options.out)
    loading.use_threads(out / "settings.json")
    comparison = prepare_comparison(options, question_set)
    heads = {head.name: head for head in comparison.head_of_method.values()}.values()
    prompts = [
        question_set.make_prompt(question, 0, [], comparison.opened.tokenizer) for question in question_set.questions
    ]
    notes = question_set.list_notes(comparison.head_folders)
    notes += list_long_prompts(heads, [len(prompt.tokens) for prompt in prompts])
    for note in notes:
        progress.print_note(note)
    recorded = {name: value for name, value in comparison.settings.items() if name != "fingerprint"}
    with open_resumable(out / "settings.json", out / "rows.jsonl", recorded, advice=results.ADVICE) as record:
        record.check_inputs(comparison.opened.target.identity)
        num_requests = sum(len(comparison.list_numbers(batch)) for batch in comparison.batches)
        num_expected = num_requests * len(comparison.samplings)
        progress.print_note(f"{out} has {len(record.rows)} of {format_count(num_expected, 'measured request')}")
        for batch, sampling in itertools.product(comparison.batches, comparison.samplings):
            decode_missing(comparison, replace(comparison.base_settings, batch=batch, sampling=sampling), record)
        entries = list[Entry]()
        for sampling, batch in itertools.product(comparison.samplings, comparison.batches):
            entries += make_entries(comparison, sampling, batch, record.rows, predict, notes)
    reference = comparison.methods[0].name
    pages = results.list_pages(comparison.head_folders, prediction=options.predicted)
    measurement = Measurement(comparison.settings, question_set, entries, notes, reference, pages=pages)
    write_results(measurement, out, console, verbose=options.verbose)


def prepare_comparison(options: EvaluateOptions, question_set: QuestionSet) -> Comparison:
    """Loads heads and target. Raises ValueError, before anything is decoded, for what cannot be measured."""
    samplings = sorted(set(options.decode.make_samplings()), key=lambda sampling: sampling.temperature)
    shapes = decoding.read_shapes(options.chains, options.trees)
    draftings = [options.decode.make_drafting(shape) for shape in shapes] or [options.decode.make_drafting()]
    batches = decoding.read_batches(options.batch)
    names = options.proposers
    if not names and not split_list(options.checkpoint):
        raise ValueError(
            "There is nothing to measure: give checkpoint=checkpoints/a,checkpoints/b, or proposers=ngram,suffix, or "
            "both."
        )
    heads = load_heads(options.checkpoint, options.target, draftings[0])
    opened = open_shared_target(heads, options.target, head=options.proposer_settings.get("checkpoint"))
    if options.auto and len(heads) == 1 and not names and not heads[0].drafter.adapts_target and not shapes:
        names = proposers.AUTO
    folders = {head.name: str(head.folder) for head in heads}
    configs = proposers.configure_all(
        names, settings=options.proposer_settings, drafting=draftings[0], checkpoints=folders
    )
    methods, head_of_method = make_methods(heads, configs, opened.target, draftings)
    check_turns(question_set, opened)
    stop_strings = question_set.make_stop_strings(opened.tokenizer)
    stop = set() if options.ignore_stop else opened.stop
    base_settings = MeasureSettings(samplings[0], stop, options.max_new_tokens, options.seed, stop_strings=stop_strings)
    settings = list_settings(options, question_set, heads, configs, opened)
    head_folders = find_head_folders(heads, [*configs.values()])
    return Comparison(
        question_set, opened, methods, head_of_method, samplings, batches, base_settings, settings, head_folders
    )


def check_turns(question_set: QuestionSet, opened: OpenTarget) -> None:
    """Raises ValueError for a target that has no form for later turns."""
    question = next((question for question in question_set.questions if len(question.turns) > 1), None)
    if question is not None:
        question_set.make_prompt(question, 1, [""], opened.tokenizer)


def encode_first_turns(question_set: QuestionSet, opened: OpenTarget, max_new_tokens: int) -> list[Prompt]:
    """The prompts of first turns. Raises ValueError, naming the prompt, for one that is too long for the target."""
    prompts = [question_set.make_prompt(question, 0, [], opened.tokenizer) for question in question_set.questions]
    check_prompts(Decoder(opened.target, None, sampling=Sampling(), stop=set()), prompts, max_new_tokens)
    return prompts


def list_settings(
    options: EvaluateOptions,
    question_set: QuestionSet,
    heads: list[ComparedHead],
    configs: dict[str, proposers.Config],
    opened: OpenTarget,
) -> dict[str, Any]:
    """The settings that all rows share: options, with digests of weights, files and questions."""
    folders = sorted({folder for config in configs.values() for folder in proposers.list_folders(config)})
    return {
        **results.describe_options(options, free_options=FREE_OPTIONS),
        **question_set.describe(opened.tokenizer),
        "checkpoint": describe_weights(heads),
        "proposers": configs,
        "files": {folder: digest_folder(Path(folder)) for folder in folders},
        "stop": [] if options.ignore_stop else sorted(opened.stop),
        **loading.describe_target(opened.target),
    }


def make_methods(
    heads: list[ComparedHead], configs: dict[str, proposers.Config], target: Target, draftings: list[Drafting]
) -> tuple[list[Method], dict[str, ComparedHead]]:
    """The methods: every head in every shape, no deeper than its steps, and every proposer. And the heads by method."""
    methods: list[Method] = []
    head_of_method: dict[str, ComparedHead] = {}
    for head in heads:
        for shape in decoding.cut_shapes([drafting.shape for drafting in draftings], head.drafter.depth):
            drafting = replace(draftings[0], depth=shape.depth, width=shape.width, nodes=shape.nodes)
            proposer = drafting.proposer(head.drafter)
            name = f"{head.name}, {name_shape(shape)}"
            methods.append(Method(name, head.drafter.target, proposer, drafting, head.baseline, head.drafter))
            head_of_method[name] = head
    for name, config in configs.items():
        methods.append(Method(name, target, proposers.make_proposer(config, target), draftings[0]))
    for method in methods:
        decoding.show_measuring(method.proposer)
    return methods, head_of_method


def name_shape(shape: TreeShape) -> str:
    """A shape as a part of a method's name."""
    return str(shape) if shape.chain else f"tree of {shape.depth}x{shape.width}x{shape.nodes}"


# Decoding


def plan_turns(questions: list[Question], batch: int) -> list[dict[int, Question]]:
    """The requests of each turn: questions by number, which is also that of their random numbers in rows.jsonl.

    A turn follows when the answers to all requests of the turn before are there. Questions are repeated for a batch
    larger than their number.
    """
    turns = []
    for turn in range(max(len(question.turns) for question in questions)):
        requests = {}
        for index in range(max(len(questions), batch)):
            question = questions[index % len(questions)]
            if len(question.turns) > turn:
                requests[turn * TURN_STRIDE + index] = question
        turns.append(requests)
    return turns


def decode_missing(comparison: Comparison, settings: MeasureSettings, record: Resumable) -> None:
    """Decodes the requests that have no row with this temperature and batch size, turn by turn."""
    key = {"temperature": settings.sampling.temperature, "batch": settings.batch}
    for turn in range(comparison.question_set.num_turns):
        prompts = encode_missing(comparison, settings, turn, [row for row in record.rows if key.items() <= row.items()])
        if not prompts:
            continue
        label = f"temperature {settings.sampling.temperature:g}, batch {settings.batch}"
        label += f", turn {turn + 1}" * (turn > 0)
        unwritten_numbers = iter(prompts)
        for group in measure(
            comparison.methods,
            [*prompts.values()],
            settings,
            numbers=[*prompts],
            source=comparison.question_set.source,
            progress=partial(progress.track_items, name=label, unit="requests", size=len),
        ):
            encoded = [encode_result(comparison.methods, result) for result in group]
            record.append(*({"number": next(unwritten_numbers), **key, **row} for row in encoded))


def encode_missing(comparison: Comparison, settings: MeasureSettings, turn: int, rows: list[dict]) -> dict[int, Prompt]:
    """The prompts of a turn by number, without those that have a row.

    rows: finished rows of this temperature and batch size. A later turn needs the answers to the turns before it. It is
    left out where it does not fit into the target; a first turn that does not fit is refused by `measure`.
    """
    opened, question_set = comparison.opened, comparison.question_set
    row_of_number = {row["number"]: row for row in rows}
    plain = Decoder(opened.target, None, sampling=settings.sampling, stop=settings.stop)
    max_tokens = settings.max_new_tokens + max(method.proposer.depth for method in comparison.methods)
    prompts: dict[int, Prompt] = {}
    for number, question in comparison.requests[settings.batch][turn].items():
        earlier = [row_of_number.get(number - distance * TURN_STRIDE) for distance in range(turn, 0, -1)]
        if number in row_of_number or None in earlier:
            continue
        answers = [read_answer(row, opened, settings.stop) for row in earlier if row is not None]
        prompt = question_set.make_prompt(question, turn, answers, opened.tokenizer)
        if turn == 0 or fits_target(plain, prompt, max_tokens):
            prompts[number] = replace(prompt, question=str(number % TURN_STRIDE % len(question_set.questions)))
    return prompts


def fits_target(plain: Decoder, prompt: Prompt, max_new_tokens: int) -> bool:
    """Whether the target has positions for a prompt and its answer."""
    try:
        check_prompts(plain, [prompt], max_new_tokens)
    except ValueError:
        return False
    return True


def read_answer(row: dict, opened: OpenTarget, stop: set[int]) -> str:
    """The plain answer of the frozen target in a row, as text; of an adapted target where no other was decoded."""
    plain = row["plain"].get(FROZEN) or next(iter(row["plain"].values()))
    tokens = [token for token in plain["tokens"][0] if token not in stop]
    return TextDecoder.from_tokenizer(opened.tokenizer).text(tokens)


def encode_result(methods: list[Method], results_by_method: dict[str, PromptResult]) -> dict:
    """The results of one request for JSON. `decode_results` is the inverse."""
    cells, plain = {}, {}
    for method in methods:
        result = results_by_method[method.name]
        plain[method.baseline] = asdict(result.plain)
        cells[method.name] = {
            "drafted": asdict(result.drafted),
            "replayed_rounds": result.replayed_rounds,
            "replayed_accepted": result.replayed_accepted,
            "gap": result.gap,
            "candidates": result.candidates,
        }
    return {"prompt": asdict(results_by_method[methods[0].name].prompt), "plain": plain, "methods": cells}


def decode_results(rows: Iterable[dict], method: Method) -> list[PromptResult]:
    """The results of one method, for each row."""
    results = []
    for row in rows:
        cell = {**row["methods"][method.name]}
        plain = Generation(**row["plain"][method.baseline])
        drafted = Generation(**cell.pop("drafted"))
        results.append(PromptResult(Prompt(**row["prompt"]), plain, drafted, **cell))
    return results


# Results


def make_entries(
    comparison: Comparison,
    sampling: Sampling,
    batch: int,
    rows: list[dict],
    predict: Predict,
    notes: list[str],
) -> list[Entry]:
    """The figures of every method at one temperature and batch size, by tau, decreasing.

    rows: finished rows of all temperatures and batch sizes; notes: list that gets sentences on what was left out
    """
    key = {"temperature": sampling.temperature, "batch": batch}
    row_of_number = {row["number"]: row for row in rows if key.items() <= row.items()}
    numbers = comparison.list_numbers(batch)
    finished_rows = [row_of_number[number] for number in numbers if number in row_of_number]
    if len(finished_rows) < len(numbers):
        missing = len(numbers) - len(finished_rows)
        notes.append(
            f"T={sampling.temperature:g}, batch {batch}: {format_count(missing, 'later turn')} did not fit: left out"
        )
    if comparison.question_set.has_right_answers:
        stop = comparison.base_settings.stop
        answers = {row["prompt"]["id"]: read_answer(row, comparison.opened, stop) for row in finished_rows}
        counts = comparison.question_set.count_right_answers(answers)
        notes.append(f"T={sampling.temperature:g}, batch {batch}: expected values in the target's answers: {counts}")
    results_by_method = {method.name: decode_results(finished_rows, method) for method in comparison.methods}
    reference = results_by_method[comparison.methods[0].name]
    context = statistics.mean(len(result.prompt.tokens) + len(result.plain.tokens[0]) / 2 for result in reference)
    predict_speedup = predict(comparison.opened.target, sampling, notes)
    entries = []
    for method in comparison.methods:
        entry = make_entry(comparison, method, sampling, batch, results_by_method[method.name])
        drafter, _, shape = method.name.partition(", ")
        difference = measure_tau_difference(results_by_method[method.name], reference)
        predicted = predict_speedup(drafter, shape, batch, context)
        entries.append(replace(entry, difference=difference, predicted=predicted))
    return sorted(entries, key=lambda entry: -(entry.report.tau or 0.0))


def make_entry(
    comparison: Comparison, method: Method, sampling: Sampling, batch: int, results: list[PromptResult]
) -> Entry:
    """The figures of one method at one temperature and batch size."""
    temperature, head = sampling.temperature, comparison.head_of_method.get(method.name)
    report = summarise_by_category(
        results, depth=method.proposer.depth, temperature=temperature, adapted=method.target.adapted
    )
    if head is not None:
        report = replace(report, training=head.training)
    counts = [AnswerCounts.from_result(result, comparison.base_settings.stop) for result in results]
    return Entry(method.name, temperature, batch, report, counts)
