"""The acceptance of drafters in their shapes: chains by one replay of each head, everything else by decoding."""

from specdec.options.command_line import split_list

import itertools
import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from specdec import checkpoint
from specdec.core import progress
from specdec.core.generation import count_rounds_reaching
from specdec.core.group import Group
from specdec.core.resumable import digest_folder
from specdec.core.wording import format_count
from specdec.heads.base import Drafter
from specdec.measuring import evaluate
from specdec.measuring.answers import HeldoutAnswers
from specdec.measuring.certainty import MIN_ANSWERS
from specdec.measuring.contexts import TrainedLength
from specdec.measuring.measure import MeasureSettings, Method, PromptResult, measure
from specdec.measuring.replay import AnsweredPrompt, count_replays, encode_answers, replay_texts
from specdec.measuring.report import PromptCounts, compute_tau, measure_tau_difference
from specdec.measuring.runs import ComparedHead, describe_weights
from specdec.measuring.servers.verdict import draft_as_engine
from specdec.options import decoding, proposers
from specdec.text.conversations import Prompt
from specdec.tools.choose import choice
from specdec.tools.choose.choice import ShapeAcceptance
from specdec.tools.choose.task import MAX_DRAFTS, MIN_REQUESTS, TIMED_DRAFTS, ChoiceTask, DrafterShape


def list_shapes(task: ChoiceTask) -> list[DrafterShape]:
    """Every head's chains and trees, no deeper than its steps, and every proposer. Raises ValueError without any."""
    shapes = [shape for run in task.runs for shape in list_head_shapes(task, run)]
    shapes += list_proposer_shapes(task)
    if not shapes:
        raise ValueError("There is nothing to choose from: give checkpoint=DIR,DIR, proposers=suffix,ngram, or both.")
    return shapes


def list_head_shapes(task: ChoiceTask, run: ComparedHead) -> Iterator[DrafterShape]:
    """The chains and trees of a head. Raises ValueError for a tree that is deeper than the head's steps."""
    options, depth = task.options, run.drafter.depth
    longest = min(depth or MAX_DRAFTS, MAX_DRAFTS)
    chains = ",".join(map(str, range(1, longest + 1)))
    weights = describe_weights([run])[run.name].split()[-1]
    for shape in decoding.read_shapes(chains, options.trees):
        if depth and shape.depth > depth:
            raise ValueError(
                f"trees={options.trees}: {run.name} takes {format_count(depth, 'step')}, so no tree may be deeper."
            )
        drafting = options.decode.make_drafting(shape)
        make_proposer = partial(drafting.proposer, run.drafter)
        num = shape.depth if shape.chain else 0
        timed = num in (0, *TIMED_DRAFTS, longest)
        yield DrafterShape(run.name, evaluate.name_shape(shape), make_proposer, drafting, weights, num, timed)


def list_proposer_shapes(task: ChoiceTask) -> Iterator[DrafterShape]:
    """The proposers of proposers=. Raises ValueError for auto and head, and for settings that a proposer refuses."""
    options, drafting = task.options, task.options.decode.make_drafting()
    if {proposers.AUTO, proposers.HEAD} & set(split_list(options.proposers)):
        raise ValueError(
            "auto chooses in every round by itself, and head is checkpoint=: leave them out of proposers=."
        )
    folders = {run.name: str(run.folder) for run in task.runs}
    configs = proposers.configure_all(
        options.proposers, settings=options.proposer_settings, drafting=drafting, checkpoints=folders
    )
    for name, config in configs.items():
        make_proposer = partial(proposers.make_proposer, config, task.opened.target)
        make_proposer()  # raises ValueError now
        digests = {folder: digest_folder(Path(folder)) for folder in proposers.list_folders(config)}
        yield DrafterShape(name, "", make_proposer, drafting, json.dumps([config, digests]))


def read_texts(task: ChoiceTask) -> tuple[list[Prompt], list[AnsweredPrompt]]:
    """The prompts with the target's own answers, which are recorded, or are written now and kept in `out`.

    Raises ValueError for fewer than two answers of two tokens or more.
    """
    options, opened, temperature = task.options, task.opened, task.sampling.temperature
    if options.answers is not None:
        prompts, texts = encode_answers(
            task.question_set, opened.tokenizer, temperature=temperature, length=options.length
        )
        texts = [replace(text, answer=text.answer[: options.max_new_tokens]) for text in texts]
    else:
        stop = set() if options.ignore_stop else opened.stop
        prompts = evaluate.encode_first_turns(task.question_set, opened, options.max_new_tokens)
        folder = Path(options.out) / "answers"
        stored = HeldoutAnswers(opened.target, task.sampling, options.max_new_tokens, stop, options.seed, folder)
        answers, _ = stored.get(prompts, Group())
        texts = [
            AnsweredPrompt(prompt.tokens, answer, temperature) for prompt, answer in zip(prompts, answers, strict=True)
        ]
    pairs = [(prompt, text) for prompt, text in zip(prompts, texts, strict=True) if len(text.answer) > 1]
    if len(pairs) < 2:
        raise ValueError(
            f"{task.question_set.source} gives {format_count(len(pairs), 'answer')} of two tokens or more at "
            f"decode.temperature={temperature:g}, and an interval over prompts needs two."
        )
    return [prompt for prompt, _ in pairs], [text for _, text in pairs]


def find_acceptance(
    task: ChoiceTask, shapes: list[DrafterShape], prompts: list[Prompt], texts: list[AnsweredPrompt]
) -> list[ShapeAcceptance]:
    """The acceptance of all chains by one replay of each head, and of shapes that replay does not cover by decoding."""
    acceptance, decoded = list[ShapeAcceptance](), [shape for shape in shapes if not shape.chain]
    for run in task.runs:
        chains = [shape for shape in shapes if shape.chain and shape.drafter == run.name]
        drafter = draft_as_engine(run.drafter, task.tried.server.kind) if task.tried else run.drafter
        if chains[0].drafting.replayable(drafter, task.sampling):
            assert isinstance(drafter, Drafter)
            replays = replay_texts(drafter, texts, depth=chains[-1].chain, label=f"replay of {run.name}")
            accepts = [replay.acceptance for replay in replays]
            acceptance += choice.summarise_chains(run.name, accepts, prompts, seed=task.options.seed)
        else:
            decoded += [shape for shape in chains if shape.timed]
    return acceptance + decode_shapes(task, decoded, prompts)


def compare_windows(task: ChoiceTask, texts: list[AnsweredPrompt]) -> list[str]:
    """Sentences on heads that were trained on shorter texts: tau with those texts' length as a window, and without.

    Only texts that are longer count. Heads that replay does not cover, and fewer than two such texts, give none.
    """
    sentences = []
    for run in task.runs:
        trained = TrainedLength.from_head(run.name, checkpoint.find_trained_length(run.folder), run.drafter)
        drafting, length = task.options.decode.make_drafting(), trained.tokens if trained.takes_window else None
        longer = [text for text in texts if length is not None and text.length > length]
        if drafting.window is not None or len(longer) < 2:
            continue
        if isinstance(run.drafter, Drafter) and drafting.replayable(run.drafter, task.sampling):
            sentences.append(_compare_window(task, run, run.drafter.with_window(length), longer))
    return sentences


def _compare_window(task: ChoiceTask, run: ComparedHead, limited: Drafter, longer: list[AnsweredPrompt]) -> str:
    """The sentence on one head. limited: the head with the window; longer: texts that are longer than its training"""
    assert isinstance(run.drafter, Drafter)
    heads = {f"a window of {limited.window}": limited, "none": run.drafter}
    depth = min(run.drafter.depth or MAX_DRAFTS, MAX_DRAFTS, max(1, (limited.window or MAX_DRAFTS) - 1))
    counts = [
        count_replays(replay_texts(head, longer, depth=depth, label=f"replay of {run.name} with {name}"))
        for name, head in heads.items()
    ]
    difference, (low, high) = measure_tau_difference(*counts, seed=task.options.seed)
    verdict = rate_window(f"decode.window={limited.window}", len(longer), low, high)
    return (
        f"{run.name}, {format_count(len(longer), 'text')} longer than its training: a window of {limited.window:,} "
        f"changes tau from {compute_tau(counts[1]):.2f} by {difference:+.2f} ({low:+.2f} .. {high:+.2f}): {verdict}."
    )


def rate_window(option: str, num: int, low: float, high: float) -> str:
    """Whether a window pays. option: the option that sets it; num: texts; low, high: interval of the change of tau"""
    if num < MIN_ANSWERS:
        return f"{num} texts are too few to tell, give {MIN_ANSWERS} or more"
    if low > 0:
        return f"give {option}"
    return "it does not pay" if high < 0 else "whether it pays is not certain"


def decode_shapes(task: ChoiceTask, shapes: list[DrafterShape], prompts: list[Prompt]) -> list[ShapeAcceptance]:
    """The acceptance of shapes by decoding the prompts with each of them."""
    if not shapes:
        return []
    options, target = task.options, task.opened.target
    methods = [
        Method(f"{shape.drafter} {shape.shape}", target, shape.make_proposer(), shape.drafting) for shape in shapes
    ]
    stop, batch = set() if options.ignore_stop else task.opened.stop, min(MIN_REQUESTS, len(prompts))
    settings = MeasureSettings(task.sampling, stop, options.max_new_tokens, options.seed, batch)
    track = partial(progress.track_items, name="decoding", unit="prompts", size=len)
    groups = measure(methods, prompts, settings, source=task.question_set.source, progress=track)
    results = list(itertools.chain.from_iterable(groups))
    acceptance = []
    for shape, method in zip(shapes, methods):
        results_of_shape = [result[method.name] for result in results if result[method.name].num_rounds]
        acceptance.append(summarise_shape(shape, results_of_shape, method.proposer.depth, options.seed))
    return acceptance


def summarise_shape(shape: DrafterShape, results: list[PromptResult], depth: int, seed: int) -> ShapeAcceptance:
    """The acceptance of a decoded shape. results: results of prompts with a round or more; depth: deepest draft"""
    counts = [PromptCounts(result.num_rounds, result.num_emitted) for result in results]
    accepted = [num for result in results for num in result.drafted.accepted[0]]
    drafts = shape.chain or statistics.mean(num for result in results for num in result.drafted.drafted)
    survival = [num / len(accepted) for num in count_rounds_reaching(accepted, depth)]
    acceptance = ShapeAcceptance(shape.drafter, shape.shape, shape.costs, drafts, 0.0, [], survival)
    return choice.add_tau(acceptance, counts, [result.contexts for result in results], seed=seed)
