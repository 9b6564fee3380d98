"""What running servers say about their drafts, in this project's terms, and the figures of a server under load.

tau is report.TAU: T tokens of an answer in R rounds are T - 1 emitted ones, as the first token is the prompt's own. Servers count in
other ways, and this is the only place that converts them:

    this server   usage.speculation: all rounds
    SGLang        sglext.spec_tokens_details: spec_verify_ct is all rounds; its accept length also counts the first token
    vLLM          metrics.speculative_decoding of an answer, vllm:spec_decode_* in /metrics: rounds that had drafts, and accepted
                  drafts. Its acceptance length leaves out rounds without drafts
    llama.cpp     timings.draft_n_accepted of an answer, llamacpp:spec_decode_* in /metrics: as vLLM

The last two give R as the larger of the rounds with drafts and of T - 1 - accepted. This is exact where every round has drafts, and
where no draft is accepted behind the end of an answer; else it is too small by at most the last round of an answer.
"""

import itertools
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.measuring import report as figures
from specdec.measuring.report import PromptCounts

MIN_BATCHES = 4  # turns, for an interval over them
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
COUNTER = re.compile(r'(?m)^(?:vllm|llamacpp):(\w+?)(?:_total)?(?:\{(?:.*\bposition="(\d+)")?.*\})? ([\d.eE+]+)$')


@dataclass(frozen=True)
class Speculation:
    """What a server says about the drafts of one answer, or of several.

    rounds: all of them; None: it is not said. drafting: those that had drafts; by_position: those that accepted at least 1, 2, .. drafts
    longest: drafts of a round; steps: accepted drafts of each round of one answer, in order
    """

    accepted: int
    drafted: int
    rounds: int | None = None
    drafting: int = 0
    by_position: list[int] | None = None
    longest: int | None = None
    steps: list[int] | None = None

    def count_rounds(self, emitted: int) -> int:
        """emitted: tokens without the first ones of answers"""
        return max(self.drafting, emitted - self.accepted) if self.rounds is None else self.rounds


def read_answer(events: Sequence[dict]) -> Speculation | None:
    """What the documents of one answer say; None: nothing."""
    rounds_of_stream = [
        event["round"] for event in events if event.get("round") and event["round"]["drafted"] is not None
    ]
    count_reached = lambda histogram: [sum(histogram[least:]) for least in range(1, len(histogram))]
    for event in reversed(events):
        if server_counts := (event.get("usage") or {}).get("speculation"):
            longest, steps = (
                max((round_["drafted"] for round_ in rounds_of_stream), default=None),
                [one["accepted"] for one in rounds_of_stream],
            )
            positions, rounds = server_counts["accepted_by_position"], server_counts["rounds"]
            return Speculation(
                server_counts["accepted"], server_counts["drafted"], rounds, 0, positions, longest, steps or None
            )
        if server_counts := (event.get("metrics") or {}).get("speculative_decoding"):
            positions, steps = (
                count_reached(server_counts["acceptance_histogram"]),
                server_counts.get("per_step_accepted"),
            )
            counts = (
                server_counts["num_accepted_draft_tokens"],
                server_counts["num_draft_tokens"],
                None,
                server_counts["num_spec_steps"],
            )
            return Speculation(*counts, positions, server_counts["num_spec_tokens"], steps)
        if server_counts := (event.get("sglext") or {}).get("spec_tokens_details"):
            drafted, rounds = server_counts["spec_num_proposed_drafts"], server_counts["spec_verify_ct"]
            positions, longest = (
                count_reached(server_counts["spec_correct_drafts_histogram"]),
                drafted // max(1, rounds),
            )
            return Speculation(server_counts["spec_num_correct_drafts"], drafted, rounds, 0, positions, longest)
        if "predicted_n" in (server_counts := event.get("timings") or {}):
            return Speculation(server_counts.get("draft_n_accepted", 0), server_counts.get("draft_n", 0))
    return None


@dataclass(frozen=True)
class Counters:
    """A server's counters since its start. tokens: of all answers; drafts: COUNTERS, None: it does not draft"""

    tokens: int
    drafts: list[int] | None
    by_position: list[int]

    def subtract(self, earlier: "Counters") -> tuple[int, Speculation | None]:
        """-> tokens that were generated since then, and what became of drafts"""
        if self.drafts is None or earlier.drafts is None:
            return self.tokens - earlier.tokens, None
        drafting, drafted, accepted = (current - previous for current, previous in zip(self.drafts, earlier.drafts))
        pairs = itertools.zip_longest(
            self.by_position, earlier.by_position, fillvalue=0
        )  # some positions may come later
        positions = [current - previous for current, previous in pairs] or None
        speculation = Speculation(accepted, drafted, None, drafting, positions, positions and len(positions))
        return self.tokens - earlier.tokens, speculation


def parse_counters(text: str) -> Counters | None:
    """Counters of vLLM or llama.cpp in Prometheus' form, summed over engines; None: there are none."""
    values: dict[tuple[str, int], int] = {}
    for name, position, value in COUNTER.findall(text):
        key = name.removeprefix("spec_decode_"), int(position or 0)
        values[key] = values.get(key, 0) + round(float(value))
    tokens = values.get(("generation_tokens", 0), values.get(("tokens_predicted", 0)))
    if tokens is None:
        return None
    drafts = [values[name, 0] for name in COUNTERS] if all((name, 0) in values for name in COUNTERS) else None
    positions = sorted(key for key in values if key[0] == "num_accepted_tokens_per_pos")
    return Counters(tokens, drafts, [values[key] for key in positions])


@dataclass(frozen=True)
class ServedAnswer:
    """An answer, as a client sees it.

    first, last: seconds from the request to its first and to its last token; sizes: tokens of each event of the stream
    ids: all of them; None: the server does not give ids
    """

    prompt: str
    tokens: int
    first: float
    last: float
    ids: list[int] | None
    sizes: list[int]
    said: Speculation | None
    ended: bool = False  # by itself, not by the limit of tokens

    @property
    def rate(self) -> float:
        """Tokens/s of its user, without the first token."""
        return (self.tokens - 1) / (self.last - self.first) if self.last > self.first else math.nan


@dataclass(frozen=True)
class ServedBatch:
    """Answers to requests that ran together.

    failed: prompt and error; seconds: of all; busy: the share of them that this process computed
    generated: tokens by the server's own count; counted: its counters of drafts
    """

    answers: list[ServedAnswer]
    failed: list[dict]
    seconds: float
    busy: float
    generated: int | None
    counted: Speculation | None

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def foreign_tokens(self) -> int:
        """Tokens that the server generated for others meanwhile, or for requests that were sent again."""
        return 0 if self.generated is None else self.generated - self.tokens

    @property
    def drafts(self) -> bool | None:
        """Whether the server drafted; None: it does not say."""
        server_counts = [
            counts for counts in (self.counted, *(answer.said for answer in self.answers)) if counts is not None
        ]
        return any(each.drafted for each in server_counts) if server_counts or self.generated is not None else None

    @classmethod
    def from_row(cls, row: dict) -> "ServedBatch":
        """The inverse of dataclasses.asdict."""
        read_speculation = lambda counts: counts and Speculation(**counts)
        answers = [ServedAnswer(**{**each, "said": read_speculation(each["said"])}) for each in row["answers"]]
        return cls(**{**row, "answers": answers, "counted": read_speculation(row["counted"])})


# Figures


def count_answers(served_batches: Sequence[ServedBatch]) -> list[PromptCounts] | None:
    """What tau of each answer is made of; None where a server does not say enough.

    Without counts of answers, those of the stream count where they are right in sum: a server that sends an event for each
    round then agrees with its own counters.
    """
    answers = [answer for turn in served_batches for answer in turn.answers]
    rounds = [answer.said.count_rounds(answer.tokens - 1) for answer in answers if answer.said]
    if len(rounds) < len(answers):
        rounds = [len(answer.sizes) - 1 for answer in answers]
        if (
            any(turn.counted is None or turn.foreign_tokens for turn in served_batches)
            or sum(rounds) != _count_batches(served_batches)[0]
        ):
            return None
    return [PromptCounts(num, answer.tokens - 1) for num, answer in zip(rounds, answers)]


def merge_counts(prompts: Sequence[str], counts: Sequence[PromptCounts]) -> list[PromptCounts]:
    """The counts of each prompt, which may have been answered several times: intervals are over prompts."""
    counts_by_prompt: dict[str, list[PromptCounts]] = {}
    for prompt, count in zip(prompts, counts, strict=True):
        counts_by_prompt.setdefault(prompt, []).append(count)
    sum_field = lambda counts_of_prompt, name: sum(getattr(answer_count, name) for answer_count in counts_of_prompt)
    return [
        PromptCounts(sum_field(counts_of_prompt, "num_rounds"), sum_field(counts_of_prompt, "num_emitted"))
        for counts_of_prompt in counts_by_prompt.values()
    ]


def _count_batches(served_batches: Sequence[ServedBatch]) -> tuple[int, int]:
    """Rounds and emitted tokens by the counters of turns in which nobody else was served."""
    clean = [
        (turn.counted, turn.tokens - len(turn.answers))
        for turn in served_batches
        if turn.counted and not turn.foreign_tokens
    ]
    return sum(counted.count_rounds(emitted) for counted, emitted in clean), sum(emitted for _, emitted in clean)


def summarise_drafts(served_batches: Sequence[ServedBatch], seed: int) -> dict[str, Any]:
    """tau, its interval, rounds, and survival and acceptance by position; tau is None where the server does not say enough."""
    counts, prompts = (
        count_answers(served_batches),
        [answer.prompt for turn in served_batches for answer in turn.answers],
    )
    rounds, emitted = _count_batches(served_batches)
    if counts:
        rounds = int(sum(count.num_rounds for count in counts))
        emitted = int(sum(count.num_emitted for count in counts))
    survival = [num / rounds for num in _count_accepted_positions(served_batches, bool(counts))] if rounds else []
    return {
        "rounds": rounds,
        "tau": emitted / rounds if rounds else None,
        "tau_ci": figures.bootstrap_interval(merge_counts(prompts, counts), figures.compute_tau, seed)
        if counts and rounds
        else None,
        "survival": survival,
        "acceptance": [now / before if before else None for now, before in zip(survival, [1.0, *survival])],
    }


def _count_accepted_positions(served_batches: Sequence[ServedBatch], counted_answers: bool) -> list[int]:
    """Rounds that accept at least 1, 2, .. drafts, over the same turns as the rounds. counted_answers: of `count_answers`"""
    positions = [answer.said and answer.said.by_position for turn in served_batches for answer in turn.answers]
    if any(each is None for each in positions):
        clean = [turn for turn in served_batches if not turn.foreign_tokens]
        comparable = not counted_answers or len(clean) == len(served_batches)
        positions = [turn.counted and turn.counted.by_position for turn in clean] if comparable else []
    known_positions = [each for each in positions if each]
    return [sum(column) for column in itertools.zip_longest(*known_positions, fillvalue=0)]


def summarise_speed(served_batches: Sequence[ServedBatch], seed: int) -> dict[str, Any]:
    """Tokens/s of a user (median over answers) and of all together, and seconds to the first token; with intervals."""
    answers = [answer for turn in served_batches for answer in turn.answers]
    find_median_rate = lambda sample: statistics.median([answer.rate for answer in sample])
    timed = [answer for answer in answers if not math.isnan(answer.rate)]
    return {
        "tokens_per_second_of_a_user": find_median_rate(timed) if timed else None,
        "tokens_per_second_of_a_user_ci": figures.bootstrap_interval(timed, find_median_rate, seed) if timed else None,
        "tokens_per_second": _find_rate(served_batches),
        "tokens_per_second_ci": figures.bootstrap_interval(served_batches, _find_rate, seed)
        if len(served_batches) >= MIN_BATCHES
        else None,
        "first_token_seconds": statistics.median(answer.first for answer in answers),
        "first_token_seconds_longest": max(answer.first for answer in answers),
        "busy": max(turn.busy for turn in served_batches),
    }


def summarise_speedup(pairs: Sequence[tuple[ServedBatch, ServedBatch]], seed: int) -> dict[str, Any]:
    """Turns with drafts beside the same requests without -> ratios of rates, and how many answers are the same."""
    baseline = {answer.prompt: answer for _, turn in pairs for answer in turn.answers}
    answer_pairs = [
        (answer, baseline[answer.prompt]) for turn, _ in pairs for answer in turn.answers if answer.prompt in baseline
    ]
    ratios = [
        drafted.rate / baseline_answer.rate
        for drafted, baseline_answer in answer_pairs
        if drafted.rate > 0 and baseline_answer.rate > 0
    ]
    find_ratio = lambda sample: (
        _find_rate([drafted for drafted, _ in sample]) / _find_rate([baseline_batch for _, baseline_batch in sample])
    )
    with_ids = [
        (drafted.ids, baseline_answer.ids)
        for drafted, baseline_answer in answer_pairs
        if drafted.ids and baseline_answer.ids
    ]
    return {
        "speedup_of_a_user": statistics.median(ratios) if ratios else None,
        "speedup_of_a_user_ci": figures.bootstrap_interval(ratios, statistics.median, seed) if ratios else None,
        "speedup": find_ratio(pairs),
        "speedup_ci": figures.bootstrap_interval(pairs, find_ratio, seed) if len(pairs) >= MIN_BATCHES else None,
        "same_answers": sum(drafted_ids == baseline_ids for drafted_ids, baseline_ids in with_ids),
        "compared_answers": len(with_ids),
    }


def _find_rate(served_batches: Sequence[ServedBatch]) -> float:
    return sum(turn.tokens for turn in served_batches) / sum(turn.seconds for turn in served_batches)


# Beside what is replayed


def count_greedy_rounds(accept: Tensor) -> list[int]:
    """The accepted drafts of each round of a greedy answer. accept: [K, n] of unroll/replay.py, each 0 or 1"""
    (depth, num), right = accept.shape, accept.tolist()
    start, accepted_by_round = 1, []
    while start < num:
        max_drafts = min(depth, num - 1 - start)  # the last token is the target's own
        accepted_by_round.append(next((d for d in range(max_drafts) if not right[d][start]), max_drafts))
        start += accepted_by_round[-1] + 1
    return accepted_by_round


def find_first_difference(served: Sequence[int], replayed: Sequence[int], num: int) -> tuple[int, int] | None:
    """Accepted drafts of the rounds of a greedy answer of `num` tokens -> the first round where they differ, and the place in the
    answer of the draft that was accepted only once; None: they are the same. What lies behind the end is left out."""
    start = 1
    for number, (served_drafts, replayed_drafts) in enumerate(zip(served, replayed)):
        if served_drafts != replayed_drafts and start + min(served_drafts, replayed_drafts) + 1 < num:
            return number, start + min(served_drafts, replayed_drafts)
        start += replayed_drafts + 1
    return None
