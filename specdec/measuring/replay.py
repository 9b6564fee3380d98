"""The verb replay, and its means: tau of a drafter along answers that the target wrote, without decoding."""

from specdec.options.command_line import split_list

import collections
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from transformers import PreTrainedTokenizerBase

from specdec import checkpoint, loading
from specdec.core import progress
from specdec.core.option_types import (
    Count,
    NonNegative,
    Options,
    Seed,
    SmallCount,
    Text,
    Whole,
    Window,
    prefix_option_names,
)
from specdec.core.sampling import Sampling
from specdec.decoding.drafting import Drafting
from specdec.engines.engine_target import EngineTarget
from specdec.heads.base import Drafter
from specdec.measuring import results
from specdec.measuring.measure import make_prompt_replay
from specdec.measuring.questions import QuestionSet, read_answers
from specdec.measuring.report import (
    PromptCounts,
    Report,
    add_categories,
    add_replays,
    describe_candidates,
    make_undecoded_report,
    measure_tau_difference,
)
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
from specdec.options.command_types import MEMORY, OutputFolder, TemplateSettings
from specdec.options.target import TargetOptions
from specdec.target.fingerprint import describe_difference, describe_outdated, is_outdated
from specdec.target.model import Target
from specdec.text import conversations, reading
from specdec.text.conversations import Prompt
from specdec.unroll import replay

BATCH_TOKENS = 4096  # bound of the tokens that are replayed at once, prompts and padding included


@dataclass(frozen=True)
class AnsweredPrompt:
    """A prompt and the target's answer at a temperature, as token ids."""

    prompt: list[int]
    answer: list[int]
    temperature: float

    @property
    def length(self) -> int:
        """Tokens of the prompt and its answer."""
        return len(self.prompt) + len(self.answer)


def encode_answered_prompt(tokenizer: PreTrainedTokenizerBase, row: dict) -> AnsweredPrompt:
    """The last answer of a row of `reading.load_conversations`, with all before it as the prompt."""
    tokens = conversations.encode(tokenizer, row)
    start, stop = conversations.find_last_answer(tokens)
    return AnsweredPrompt(tokens.tokens[:start], tokens.tokens[start:stop], float(row.get("temperature") or 0.0))


def encode_answers(
    question_set: QuestionSet, tokenizer: PreTrainedTokenizerBase, *, temperature: float, length: int
) -> tuple[list[Prompt], list[AnsweredPrompt]]:
    """The prompts of `read_answers`, and their answers of two tokens or more.

    length: tokens of a prompt with its answer; longer answers are cut
    Raises ValueError if no answer has a second token.
    """
    prompts, texts = [], []
    for question in question_set.questions:
        with reading.name_location(question_set.source):
            text = encode_answered_prompt(tokenizer, question.turns[0])
        answer = text.answer[: max(0, length - len(text.prompt))]
        if len(answer) >= 2:
            prompts.append(Prompt(question.id, question.category, text.prompt))
            texts.append(AnsweredPrompt(text.prompt, answer, temperature))
    if not texts:
        raise ValueError(f"No answer has a second token within length={length}: raise it.")
    return prompts, texts


def replay_texts(
    drafter: Drafter, texts: Sequence[AnsweredPrompt], *, depth: int, label: str, engine: EngineTarget | None = None
) -> list[replay.Replay]:
    """The replay of the drafter along each text, in the order of the texts.

    depth: drafts of the chain, at most as many as the drafter can make; label: name of the work, for progress
    engine: server that reads the texts; None: the target in this process
    """
    depth = min(depth, drafter.depth or depth)
    lengths = [text.length for text in texts]
    replay_of_text: dict[int, replay.Replay] = {}
    groups: list[tuple[float, list[int]]] = []  # temperature, and numbers of texts
    for temperature in sorted({text.temperature for text in texts}):
        numbers_of_temperature = [number for number, text in enumerate(texts) if text.temperature == temperature]
        groups += [(temperature, group) for group in batch_texts(numbers_of_temperature, lengths, drafter.target)]
    for temperature, numbers in progress.track_items(groups, label, unit="answers", size=lambda group: len(group[1])):
        pairs = [(texts[number].prompt, texts[number].answer) for number in numbers]
        output = engine.read(drafter, pairs) if engine else None
        replays = replay.replay_answers(drafter, pairs, depth=depth, temperature=temperature, output=output)
        replay_of_text |= dict(zip(numbers, replays, strict=True))
    return [replay_of_text[number] for number in range(len(texts))]


def count_replays(replays: Iterable[replay.Replay]) -> list[PromptCounts]:
    """The numbers behind tau of each text."""
    counts = []
    for text_replay in replays:
        num_rounds, accepted = text_replay.expected_rounds
        counts.append(PromptCounts(num_rounds, num_rounds + float(accepted.sum())))
    return counts


def sort_by_length(numbers: Iterable[int], lengths: Sequence[int]) -> list[int]:
    """The numbers of texts, the longest text first. lengths: tokens of all texts"""
    return sorted(numbers, key=lambda number: (-lengths[number], number))


def batch_texts(numbers: Iterable[int], lengths: Sequence[int], target: Target) -> list[list[int]]:
    """Groups of numbers of texts that are read together, of at most BATCH_TOKENS with padding, the longest first.

    lengths: tokens of all texts. With LongRoPE each text is alone, as a batch has one set of angles.
    """
    max_tokens = BATCH_TOKENS if target.rotary_boundary is None else 0
    batches: list[list[int]] = []
    for number in sort_by_length(numbers, lengths):  # the first of a batch is its longest
        if batches and (1 + len(batches[-1])) * lengths[batches[-1][0]] <= max_tokens:
            batches[-1].append(number)
        else:
            batches.append([number])
    return batches


def warn_of_writers(writers: Iterable[str | None], target: Target) -> None:
    """Warns of rows that other weights than the target's wrote. writers: fingerprints by row; empty or None: unknown"""
    counts, identity = collections.Counter(writers), target.identity
    comparable_counts = {writer: num for writer, num in counts.items() if writer and identity.is_comparable(writer)}
    other_counts = {writer: num for writer, num in comparable_counts.items() if not identity.matches(writer)}
    if other_counts:
        subject = f"{sum(other_counts.values())} of {counts.total()} rows were written by {{}} weights"
        most_frequent = max(other_counts, key=lambda writer: other_counts[writer])
        clause = describe_difference(subject, most_frequent, identity.text)
        warnings.warn(f"{clause}: let it answer the prompts itself (specdec answer), or expect less.", stacklevel=2)
    num_outdated = sum(num for writer, num in counts.items() if is_outdated(writer))
    if num_outdated:
        clause = describe_outdated(f"{num_outdated} of {counts.total()} rows name their target", "the target here")
        warnings.warn(
            f"{clause}: if it is another, let the target answer the prompts itself (specdec answer).", stacklevel=2
        )


# The verb


class ReplayDecodeOptions(Options):
    temperature: NonNegative
    depth: SmallCount
    window: Window | None


class ReplayOptions(Options):
    checkpoint: Text
    answers: Text
    split: Text | None
    template: TemplateSettings
    limit: Count | None
    hold_out: Whole | None
    length: Annotated[Count, MEMORY]
    seed: Seed
    verbose: bool
    out: OutputFolder
    target: TargetOptions
    decode: ReplayDecodeOptions


def replay_heads(options: ReplayOptions, console: progress.Results) -> None:
    """Replays the chain of each head, and writes the results. Raises ValueError for a head that cannot be replayed."""
    folders, sampling = split_list(options.checkpoint), Sampling(options.decode.temperature)
    for folder in folders:
        if checkpoint.read_head_class(folder).adapts_target:
            raise ValueError(
                f"{folder} adapts its target, which did not write these answers: evaluate decodes with it."
            )
    heads = load_heads(options.checkpoint, options.target, Drafting(window=options.decode.window))
    opened = open_shared_target(heads, options.target)
    question_set = read_answers(
        options.answers,
        arguments=loading.read_template(options.template, opened.tokenizer, folders),
        temperature=sampling.temperature,
        split=options.split,
        limit=options.limit,
        hold_out=options.hold_out,
    )
    warn_of_writers([question.turns[0].get("target_fingerprint") for question in question_set.questions], opened.target)
    prompts, texts = encode_answers(
        question_set, opened.tokenizer, temperature=sampling.temperature, length=options.length
    )
    settings = {
        **results.describe_options(options),
        **question_set.describe(opened.tokenizer),
        "checkpoint": describe_weights(heads),
        **loading.describe_target(opened.target),
    }
    folders_by_name = find_head_folders(heads)
    notes = question_set.list_notes(folders_by_name)
    notes += list_long_prompts(heads, [len(prompt.tokens) for prompt in prompts])
    entries, reference = list[Entry](), list[PromptCounts]()
    for head in heads:
        replays = replay_head(head, texts, options.decode.depth)
        counts = count_replays(replays)
        reference = reference or counts
        difference = measure_tau_difference(counts, reference, seed=options.seed)
        entry = make_entry(head, prompts, replays, sampling, options.seed)
        entries.append(replace(entry, difference=difference))
    pages, reference_name = results.list_pages(folders_by_name), entries[0].method
    measurement = Measurement(settings, question_set, entries, notes, reference_name, pages=pages)
    write_results(measurement, Path(options.out), console, verbose=options.verbose)


def replay_head(head: ComparedHead, texts: list[AnsweredPrompt], depth: int) -> list[replay.Replay]:
    """The replays of one head along all texts. Raises ValueError for a head that does not draft by steps."""
    if not isinstance(head.drafter, Drafter):
        raise ValueError(f"{head.folder} does not draft by steps, so it cannot be replayed: evaluate decodes with it.")
    with prefix_option_names("decode"):
        head.drafter.check_window(depth)
    return replay_texts(head.drafter, texts, depth=depth, label=f"replay of {head.name}")


def make_entry(
    head: ComparedHead, prompts: list[Prompt], replays: list[replay.Replay], sampling: Sampling, seed: int
) -> Entry:
    """The figures of one head, from its replays along the prompts' answers."""

    def summarise(replays_of_prompts: list) -> Report:
        return add_replays(make_undecoded_report(sampling.temperature), replays_of_prompts, seed=seed)

    replayed = [make_prompt_replay(prompt, text_replay) for prompt, text_replay in zip(prompts, replays, strict=True)]
    report = replace(add_categories(summarise(replayed), replayed, summarise), training=head.training)
    remarks = [f"candidates: {describe_candidates(report.candidates)}"] if report.candidates else []
    depth = len(report.replayed_survival or ())
    return Entry(f"{head.name}, chain of {depth}", sampling.temperature, 1, report, remarks=remarks)
