"""The figures of a load: of its batches, as an entry of results and as a load of a record."""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.core.sampling import Sampling
from specdec.core.wording import format_count
from specdec.measuring.contexts import (
    Axis,
    Contexts,
    find_bucket,
    find_end,
    name_bucket,
    read_buckets,
    summarise_contexts,
)
from specdec.measuring.counting import AnswerCounts, classify_end
from specdec.measuring.questions import Question, QuestionSet, name_request
from specdec.measuring.record import Figure, RecordedGroup, RecordedGroups, RecordedLoad
from specdec.measuring.report import PromptCounts, Report, compute_tau
from specdec.measuring.results import Entry
from specdec.measuring.servers import referee
from specdec.measuring.servers.referee import ServedBatch

MAX_CLIENT_SHARE = 0.7  # share of the time in which this process computes; above it the client may limit the speed
UNGROUPED = "the server does not say where its rounds begin"


def list_turns(question_set: QuestionSet) -> dict[str, Question]:
    """The question of each prompt, by the prompt's id."""
    return {
        name_request(question, turn): question
        for question in question_set.questions
        for turn in range(len(question.turns))
    }


def count_answers(question_set: QuestionSet, batches: Sequence[ServedBatch]) -> list[AnswerCounts]:
    """The counts that other ways of counting need; none where the server does not say enough."""
    questions, answer_counts = list_turns(question_set), []
    for answer, count in zip(referee.list_answers(batches), referee.count_answers(batches) or ()):
        end = classify_end(answer.ended, answer.sizes[-1] == 1)
        accepted, rounds = round(count.num_emitted - count.num_rounds), round(count.num_rounds)
        answer_counts.append(AnswerCounts(answer.prompt, questions[answer.prompt].id, accepted, rounds, end))
    return answer_counts


def make_entry(
    figures: dict[str, Any], counts: list[AnswerCounts], contexts: Contexts | None, sampling: Sampling
) -> Entry:
    """The figures of a load as a row of results. contexts: see `summarise_batches`"""
    drafted, baseline = figures["drafted"], figures["plain"] or {}
    report = Report(
        sampling.temperature,
        num_prompts=figures["answers"],
        num_rounds=figures["rounds"],
        contexts=contexts,
        **{name: figures[name] for name in ("tau", "tau_ci", "survival", "acceptance")},
        tokens_per_second=drafted["tokens_per_second"],
        tokens_per_second_ci=drafted["tokens_per_second_ci"],
        baseline_tokens_per_second=baseline.get("tokens_per_second"),
        speedup=figures.get("speedup"),
        speedup_ci=figures.get("speedup_ci"),
        user_tokens_per_second=drafted["tokens_per_second_of_a_user"],
        baseline_user_tokens_per_second=baseline.get("tokens_per_second_of_a_user"),
    )
    return Entry(
        "drafts of the server",
        sampling.temperature,
        figures["requests"],
        report,
        counts,
        user_speedup=(figures.get("speedup_of_a_user"), figures.get("speedup_of_a_user_ci")),
        first_token=drafted["first_token_seconds"],
        remarks=[*list_remarks(figures, greedy=sampling.greedy)],
    )


def list_remarks(figures: dict[str, Any], *, greedy: bool) -> Iterator[str]:
    """Sentences on what limits the figures of a load, and the verdict of the replay."""
    failed, foreign_tokens = figures["failed"], figures["tokens_of_others"]
    if failed:
        yield f"{format_count(len(failed), 'request')} failed, first prompt {failed[0]['prompt']}: {failed[0]['error']}"
    if foreign_tokens:
        yield (
            f"the server generated {format_count(foreign_tokens, 'token')} for others, or for requests that were sent "
            "again: its counters then do not count."
        )
    if max(speeds["busy"] for speeds in (figures["drafted"], figures["plain"]) if speeds) > MAX_CLIENT_SHARE:
        yield "this client was busy most of the time, so speeds may be its own: measure from another machine."
    if greedy and figures.get("compared_answers"):
        compared = figures["compared_answers"]
        yield f"{figures['same_answers']} of {compared} answers are the same with drafts and without."
    if "replay" in figures:
        yield figures["replay"]["verdict"]


# In a record


def make_figure(value: float | None, interval: Sequence[float] | None = None) -> Figure:
    """A figure with its interval; None where it is unknown."""
    if value is None or not math.isfinite(value):
        return None
    low, high = interval or (math.nan, math.nan)
    return (value, low, high) if math.isfinite(low) and math.isfinite(high) else (value, None, None)


def take_figure(figures: dict[str, Any] | None, name: str) -> Figure:
    """A figure with the interval that stands beside it."""
    return make_figure((figures or {}).get(name), (figures or {}).get(f"{name}_ci"))


def make_load(figures: dict[str, Any], batches: Sequence[ServedBatch]) -> RecordedLoad:
    """The figures of a load for a record. batches: with drafts"""
    survival = [min(1.0, share) for share in figures["survival"]]
    deepest = max((number for number, share in enumerate(survival, 1) if share), default=0)
    return RecordedLoad(
        at_once=figures["requests"],
        prompts=figures["questions"],
        failed=len(figures["failed"]),
        tau=take_figure(figures, "tau"),
        by_position=survival[:deepest],
        drafted=count_drafts(batches),
        user_tok_s=take_figure(figures["drafted"], "tokens_per_second_of_a_user"),
        total_tok_s=take_figure(figures["drafted"], "tokens_per_second"),
        plain_user_tok_s=take_figure(figures["plain"], "tokens_per_second_of_a_user"),
        speedup=take_figure(figures, "speedup_of_a_user"),
    )


def count_drafts(batches: Sequence[ServedBatch]) -> int | None:
    """The drafts of all rounds; None where the server does not say."""
    counts = [answer.server_counts for answer in referee.list_answers(batches)]
    if None in counts:
        counts = [batch.server_counts for batch in batches if not batch.foreign_tokens]
    known = [count.drafted for count in counts if count and count.drafted is not None]
    return sum(known) if len(known) == len(counts) else None


def group_answers(
    question_set: QuestionSet, batches: Sequence[ServedBatch], prompt_lengths: Mapping[str, int], seed: int
) -> RecordedGroups:
    """tau by category, and by context; empty where the server does not count single answers.

    Whole answers are grouped by their lengths where the server does not say where rounds begin.
    prompt_lengths: tokens of each prompt, by its id
    """
    answers, counts = referee.list_answers(batches), referee.count_answers(batches) or []
    questions = list_turns(question_set)

    def split(keys: Sequence[Any]) -> dict[Any, RecordedGroup]:
        groups = collections.defaultdict(list)
        for key, answer, count in zip(keys, answers, counts):
            if key is not None:
                groups[key].append((questions[answer.prompt].id, count))
        return {key: summarise_group(groups[key], seed) for key in sorted(groups)}

    def split_by_size(sizes: Sequence[int | None], axis: Axis) -> dict[str, RecordedGroup]:
        groups = split([None if size is None else find_bucket(size, axis) for size in sizes])
        return {name_bucket(first, find_end(first, axis)): group for first, group in groups.items()}

    by_category = split([questions[answer.prompt].category for answer in answers])
    contexts = summarise_batches(question_set, batches, prompt_lengths, seed)
    if contexts is None:
        prompt_sizes = [prompt_lengths.get(answer.prompt, answer.prompt_tokens) for answer in answers]
        return RecordedGroups(
            category=by_category,
            ungrouped=UNGROUPED,
            prompt_tokens=split_by_size(prompt_sizes, "context"),
            answer_tokens=split_by_size([answer.tokens for answer in answers], "answer"),
        )
    return RecordedGroups(
        category=by_category, context=group_rounds(contexts, "context"), answer=group_rounds(contexts, "answer")
    )


def summarise_batches(
    question_set: QuestionSet, batches: Sequence[ServedBatch], prompt_lengths: Mapping[str, int], seed: int
) -> Contexts | None:
    """tau by context; None where the server does not say where rounds begin. prompt_lengths: see `group_answers`"""
    questions = {name: question.id for name, question in list_turns(question_set).items()}
    answers = referee.list_contexts(batches, prompt_lengths, questions)
    return None if answers is None else summarise_contexts(answers, seed)


def group_rounds(contexts: Contexts, axis: Axis) -> dict[str, RecordedGroup]:
    """The buckets of an axis for a record, by name."""
    groups = {}
    for bucket in read_buckets(contexts, axis):
        tau = make_figure(bucket.tau, bucket.tau_ci)
        groups[bucket.name] = RecordedGroup(prompts=bucket.questions, tau=tau, rounds=round(bucket.rounds))
    return groups


def summarise_group(pairs: Sequence[tuple[str, PromptCounts]], seed: int) -> RecordedGroup:
    """tau over some of the answers. pairs: id of each answer's question, and its counts"""
    names, counts = [{name} for name, _ in pairs], [count for _, count in pairs]
    interval = referee.find_interval(counts, names, compute_tau, seed)
    return RecordedGroup(prompts=len(set().union(*names)), tau=make_figure(compute_tau(counts), interval))
