"""choose: which drafter, and how many drafts, pay at which load, before anything is served (docs/choosing.md)."""

from specdec.options.command_line import read_numbers, split_list

import math
import statistics
import warnings
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from specdec import checkpoint, loading
from specdec.core import progress
from specdec.core.lock import hold_lock
from specdec.core.resumable import check_settings
from specdec.measuring import results
from specdec.measuring.questions import QuestionSet, read_answers
from specdec.measuring.replay import warn_of_writers
from specdec.measuring.results import Measurement
from specdec.measuring.results_page import write_results
from specdec.measuring.runs import (
    describe_weights,
    find_head_folders,
    list_long_prompts,
    load_heads,
    open_shared_target,
)
from specdec.measuring.servers.server import TriedServer, try_server
from specdec.options import decoding
from specdec.target.fingerprint import describe_outdated, is_outdated
from specdec.target.model import Target
from specdec.tools.choose import choice, page
from specdec.tools.choose.acceptance import compare_windows, find_acceptance, list_shapes, read_texts
from specdec.tools.choose.choice import ShapeAcceptance
from specdec.tools.choose.costs import estimate_costs, read_costs
from specdec.tools.choose.engine_flags import list_flags
from specdec.tools.choose.round_costs import RoundCosts
from specdec.tools.choose.task import MAX_DRAFTS, ChoiceTask, ChooseOptions
from specdec.tools.suites.suites import read_questions

FREE = ("timeout",)  # options that change nothing of a choice
MAX_CONTEXT = 2**20  # tokens; a bound against misspelt numbers: targets have fewer positions


def choose_drafter(options: ChooseOptions, console: progress.Results) -> None:
    """Measures acceptance and costs, and writes the choice. Raises ValueError for drafters that cannot be compared."""
    task, out = prepare_task(options, console), Path(options.out)
    with hold_lock(out / "results.lock", resource=out / results.RESULTS_FILE):
        write_choice(task, out)


def prepare_task(options: ChooseOptions, console: progress.Results) -> ChoiceTask:
    """Loads heads and target, and tries the server.

    Raises ValueError for options that do not fit together, before anything is decoded.
    """
    loads = read_numbers("loads", options.loads, decoding.MAX_REQUESTS)
    contexts = read_numbers("contexts", options.contexts, MAX_CONTEXT) if options.contexts else []
    sampling, known_costs = options.decode.make_sampling(), read_costs(options, contexts)
    heads = split_list(options.checkpoint)
    for folder in heads:
        if checkpoint.read_head_class(folder).adapts_target:
            raise ValueError(f"{folder} adapts its target, so its plain decoding is another: leave it out.")
    question_set = None if options.answers and not options.engine else read_questions(options, heads)
    tried = try_servers(options, question_set, heads[0], console) if options.engine and question_set else None
    runs = load_heads(options.checkpoint, options.target, options.decode.make_drafting())
    opened = open_shared_target(runs, options.target, head=options.proposer_settings.get("checkpoint"))
    check_target(options, contexts, known_costs, opened.target)
    chosen_set = question_set if question_set and not options.answers else read_recorded(options, opened, heads)
    return ChoiceTask(options, chosen_set, loads, contexts, sampling, runs, opened, known_costs, tried, console)


def try_servers(options: ChooseOptions, question_set: QuestionSet, head: str, console: progress.Results) -> TriedServer:
    """The server of engine= with its baseline. Raises ValueError where its costs cannot be measured."""
    target = loading.find_target_name(checkpoint.resolve(head), options.target.name)
    tried = try_server(options, question_set, target, console)
    if tried.notes or tried.baseline is None:
        raise ValueError(" ".join(tried.notes) or "engine= needs more: give baseline=URL of a server without drafts.")
    return tried


def check_target(options: ChooseOptions, contexts: list[int], known_costs: RoundCosts | None, target: Target) -> None:
    """Raises ValueError for contexts that are too long for the target, and for costs of another target."""
    limit = (target.max_positions or math.inf) - MAX_DRAFTS - 2
    if contexts and contexts[-1] > limit:
        raise ValueError(
            f"contexts={options.contexts}: {target.name} has {target.max_positions} positions, so {limit} is the most."
        )
    fingerprint = known_costs and known_costs.fingerprint
    if is_outdated(fingerprint):
        clause = describe_outdated(f"costs={options.costs} name their target", target.name)
        warnings.warn(f"{clause}: if it is another, choose with that one.", stacklevel=2)
    elif fingerprint and not target.matches(fingerprint):
        raise ValueError(f"costs={options.costs} are of another target than {target.name}: choose with that one.")


def read_recorded(options: ChooseOptions, opened: loading.OpenTarget, heads: list[str]) -> QuestionSet:
    """The rows of answers=. Raises ValueError if there are none."""
    recorded = read_answers(
        str(options.answers),
        arguments=loading.read_template(options.template, opened.tokenizer, heads),
        temperature=options.decode.make_sampling().temperature,
        split=options.split,
        limit=options.limit,
        hold_out=options.hold_out,
    )
    warn_of_writers([question.turns[0].get("target_fingerprint") for question in recorded.questions], opened.target)
    return recorded


def write_choice(task: ChoiceTask, out: Path) -> None:
    """Writes the choice and its page. Raises ValueError where the folder has a choice of other settings."""
    settings = list_settings(task)
    if (out / results.RESULTS_FILE).exists():
        recorded = results.read_results(str(out)).get("settings", {})
        check_settings(out / results.RESULTS_FILE, recorded, settings, advice=results.ADVICE)
    shapes = list_shapes(task)
    prompts, texts = read_texts(task)
    head_folders = find_head_folders(task.runs)
    notes = [*task.question_set.list_notes(head_folders), *compare_windows(task, texts)]
    notes += list_long_prompts(task.runs, [len(prompt.tokens) for prompt in prompts])
    for note in notes:
        progress.print_note(note)
    acceptance = find_acceptance(task, shapes, prompts, texts)
    costs = estimate_costs(task, shapes, acceptance, texts)
    mean_context = statistics.mean(len(text.prompt) + len(text.answer) / 2 for text in texts)
    contexts = [float(length) for length in task.contexts] or [mean_context]
    tokens = statistics.mean(len(text.answer) for text in texts)
    document = make_document(task, acceptance, costs, contexts, tokens) | {"num_answers": len(texts)}
    measurement = Measurement(
        settings,
        task.question_set,
        page.make_entries(acceptance, task.sampling.temperature, len(texts)),
        notes,
        title="Which drafter, and how many drafts",
        verdicts=page.list_verdicts(document),
        sections=page.list_sections(document),
        pages=results.list_pages(head_folders, costs=task.options.costs),
        extra={"choice": document},
    )
    write_results(measurement, out, task.console, verbose=task.options.verbose)


def list_settings(task: ChoiceTask) -> dict[str, Any]:
    """The settings of a choice, with digests of questions, weights and target."""
    return {
        **results.describe_options(task.options, free_options=FREE),
        **task.question_set.describe(task.opened.tokenizer),
        "checkpoint": describe_weights(task.runs),
        **loading.describe_target(task.opened.target),
    }


def make_document(
    task: ChoiceTask, acceptance: list[ShapeAcceptance], costs: RoundCosts, contexts: list[float], tokens: float
) -> dict[str, Any]:
    """`choice` of results.json. contexts: tokens before a round; tokens: mean number of an answer"""
    target, loads = task.opened.target, task.loads
    crossings = partial(choice.find_crossings, acceptance, costs, max_load=loads[-1], tokens=tokens)
    flags = list_flags(task.runs, target.name, acceptance, costs, loads=loads, context=contexts[0], tokens=tokens)
    return {
        "fingerprint": target.fingerprint(),
        "sampling": asdict(task.sampling),
        "tokens": tokens,
        "contexts": contexts,
        "loads": choice.choose_drafts(acceptance, costs, loads=loads, contexts=contexts, tokens=tokens),
        "plain_from": {f"{length:.0f}": crossings(context=length) for length in contexts},
        "flags": list(flags),
        "acceptance": [asdict(shape) for shape in acceptance],
        "costs": costs.to_json(),
    }
