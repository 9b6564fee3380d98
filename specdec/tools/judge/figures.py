"""The figures of a load: of its batches, as an entry of results and as a load of a record."""

import collections
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from specdec.core.sampling import Sampling
from specdec.core.wording import format_count
from specdec.measuring.counting import AnswerCounts, classify_end
from specdec.measuring.questions import Question, QuestionSet, name_request
from specdec.measuring.record import Figure, RecordedGroup, RecordedGroups, RecordedLoad
from specdec.measuring.report import PromptCounts, Report, compute_tau
from specdec.measuring.results import Entry
from specdec.measuring.servers import referee
from specdec.measuring.servers.referee import ServedBatch
from specdec.tools.judge.rows import BatchPairs

MAX_CLIENT_SHARE = 0.7  # share of the time in which this process computes; above it the client may limit the speed
FIRST_BUCKET, BUCKET_RATIO = 256, 4  # buckets of lengths: 0-255, 256-1023, 1024-4095, .. tokens


def summarise_pairs(pairs: BatchPairs, seed: int, questions: Mapping[str, str] = {}) -> dict[str, Any]:
    """The figures of a load. Raises ValueError where nothing was answered. questions: see referee.name_questions"""
    compared = [(drafted, baseline) for drafted, baseline in pairs if baseline is not None]
    drafted = [batch for batch, _ in pairs]
    baseline = [batch for _, batch in compared]
    batches = drafted + baseline
    failed = [failure for batch in batches for failure in batch.failed]
    for batches_of_server in (drafted, baseline):
        if batches_of_server and not referee.list_answers(batches_of_server):
            raise ValueError(f"None of the requests was answered. {failed[0]['error']}")
    figures = {
        "answers": len(referee.list_answers(drafted)),
        "questions": len(referee.name_questions(referee.list_answers(drafted), questions)),
        "failed": failed,
        "tokens_of_others": sum(max(0, batch.foreign_tokens) for batch in batches),
        **referee.summarise_drafts(drafted, seed, questions),
        "drafted": referee.summarise_speed(drafted, seed, questions),
        "plain": None,
    }
    if compared:
        figures["plain"] = referee.summarise_speed(baseline, seed, questions)
        figures |= referee.summarise_speedup(compared, seed, questions)
    return figures


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


def make_entry(figures: dict[str, Any], counts: list[AnswerCounts], sampling: Sampling) -> Entry:
    """The figures of a load as a row of results."""
    drafted, baseline = figures["drafted"], figures["plain"] or {}
    report = Report(
        sampling.temperature,
        num_prompts=figures["answers"],
        num_rounds=figures["rounds"],
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
    question_set: QuestionSet, batches: Sequence[ServedBatch], prompt_lengths: dict[str, int], seed: int
) -> RecordedGroups:
    """tau by category and by lengths; empty where the server does not count single answers.

    prompt_lengths: tokens of each prompt, by its id
    """
    answers, counts = referee.list_answers(batches), referee.count_answers(batches) or []
    questions = list_turns(question_set)
    prompt_sizes = [prompt_lengths.get(answer.prompt, answer.prompt_tokens) for answer in answers]

    def split(keys: Sequence[Any]) -> dict[Any, RecordedGroup]:
        groups = collections.defaultdict(list)
        for key, answer, count in zip(keys, answers, counts):
            if key is not None:
                groups[key].append((questions[answer.prompt].id, count))
        return {key: summarise_group(groups[key], seed) for key in sorted(groups)}

    by_prompt = split([None if size is None else find_bucket(size) for size in prompt_sizes])
    by_answer = split([find_bucket(answer.tokens) for answer in answers])
    return RecordedGroups(
        category=split([questions[answer.prompt].category for answer in answers]),
        prompt_tokens={name_bucket(least): group for least, group in by_prompt.items()},
        answer_tokens={name_bucket(least): group for least, group in by_answer.items()},
    )


def summarise_group(pairs: Sequence[tuple[str, PromptCounts]], seed: int) -> RecordedGroup:
    """tau over some of the answers. pairs: id of each answer's question, and its counts"""
    names, counts = [{name} for name, _ in pairs], [count for _, count in pairs]
    interval = referee.find_interval(counts, names, compute_tau, seed)
    return RecordedGroup(prompts=len(set().union(*names)), tau=make_figure(compute_tau(counts), interval))


def find_bucket(num: int) -> int:
    """The least number of the bucket that a number of tokens belongs to."""
    least, end = 0, FIRST_BUCKET
    while num >= end:
        least, end = end, end * BUCKET_RATIO
    return least


def name_bucket(least: int) -> str:
    """The name of a bucket: 0-255, 256-1023, .."""
    return f"{least}-{(least * BUCKET_RATIO or FIRST_BUCKET) - 1}"
