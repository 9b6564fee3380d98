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

FEWEST = 4  # turns, for an interval over them
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
    each = [event["round"] for event in events if event.get("round") and event["round"]["drafted"] is not None]
    reached = lambda histogram: [sum(histogram[least:]) for least in range(1, len(histogram))]
    for event in reversed(events):
        if said := (event.get("usage") or {}).get("speculation"):
            longest, steps = max((one["drafted"] for one in each), default=None), [one["accepted"] for one in each]
            positions, rounds = said["accepted_by_position"], said["rounds"]
            return Speculation(said["accepted"], said["drafted"], rounds, 0, positions, longest, steps or None)
        if said := (event.get("metrics") or {}).get("speculative_decoding"):
            positions, steps = reached(said["acceptance_histogram"]), said.get("per_step_accepted")
            counts = (said["num_accepted_draft_tokens"], said["num_draft_tokens"], None, said["num_spec_steps"])
            return Speculation(*counts, positions, said["num_spec_tokens"], steps)
        if said := (event.get("sglext") or {}).get("spec_tokens_details"):
            drafted, rounds = said["spec_num_proposed_drafts"], said["spec_verify_ct"]
            positions, longest = reached(said["spec_correct_drafts_histogram"]), drafted // max(1, rounds)
            return Speculation(said["spec_num_correct_drafts"], drafted, rounds, 0, positions, longest)
        if "predicted_n" in (said := event.get("timings") or {}):
            return Speculation(said.get("draft_n_accepted", 0), said.get("draft_n", 0))
    return None


@dataclass(frozen=True)
class Counters:
    """A server's counters since its start. tokens: of all answers; drafts: COUNTERS, None: it does not draft"""

    tokens: int
    drafts: list[int] | None
    by_position: list[int]

    def since(self, before: "Counters") -> tuple[int, Speculation | None]:
        """-> tokens that were generated since then, and what became of drafts"""
        if self.drafts is None or before.drafts is None:
            return self.tokens - before.tokens, None
        drafting, drafted, accepted = (now - then for now, then in zip(self.drafts, before.drafts))
        pairs = itertools.zip_longest(
            self.by_position, before.by_position, fillvalue=0
        )  # some positions may come later
        positions = [now - then for now, then in pairs] or None
        found = Speculation(accepted, drafted, None, drafting, positions, positions and len(positions))
        return self.tokens - before.tokens, found


def read_counters(text: str) -> Counters | None:
    """Counters of vLLM or llama.cpp in Prometheus' form, summed over engines; None: there are none."""
    found: dict[tuple[str, int], int] = {}
    for name, position, value in COUNTER.findall(text):
        key = name.removeprefix("spec_decode_"), int(position or 0)
        found[key] = found.get(key, 0) + round(float(value))
    tokens = found.get(("generation_tokens", 0), found.get(("tokens_predicted", 0)))
    if tokens is None:
        return None
    drafts = [found[name, 0] for name in COUNTERS] if all((name, 0) in found for name in COUNTERS) else None
    positions = sorted(key for key in found if key[0] == "num_accepted_tokens_per_pos")
    return Counters(tokens, drafts, [found[key] for key in positions])


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
class Turn:
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
    def others(self) -> int:
        """Tokens that the server generated for others meanwhile, or for requests that were sent again."""
        return 0 if self.generated is None else self.generated - self.tokens

    @property
    def drafts(self) -> bool | None:
        """Whether the server drafted; None: it does not say."""
        said = [each for each in (self.counted, *(answer.said for answer in self.answers)) if each is not None]
        return any(each.drafted for each in said) if said or self.generated is not None else None

    @classmethod
    def from_row(cls, row: dict) -> "Turn":
        """The inverse of dataclasses.asdict."""
        made = lambda said: said and Speculation(**said)
        answers = [ServedAnswer(**{**each, "said": made(each["said"])}) for each in row["answers"]]
        return cls(**{**row, "answers": answers, "counted": made(row["counted"])})


# Figures


def count_answers(turns: Sequence[Turn]) -> list[PromptCounts] | None:
    """What tau of each answer is made of; None where a server does not say enough.

    Without counts of answers, those of the stream count where they are right in sum: a server that sends an event for each
    round then agrees with its own counters.
    """
    answers = [answer for turn in turns for answer in turn.answers]
    rounds = [answer.said.count_rounds(answer.tokens - 1) for answer in answers if answer.said]
    if len(rounds) < len(answers):
        rounds = [len(answer.sizes) - 1 for answer in answers]
        if any(turn.counted is None or turn.others for turn in turns) or sum(rounds) != _count_turns(turns)[0]:
            return None
    return [PromptCounts(num, answer.tokens - 1) for num, answer in zip(rounds, answers)]


def merge(prompts: Sequence[str], counts: Sequence[PromptCounts]) -> list[PromptCounts]:
    """The counts of each prompt, which may have been answered several times: intervals are over prompts."""
    found: dict[str, list[PromptCounts]] = {}
    for prompt, count in zip(prompts, counts, strict=True):
        found.setdefault(prompt, []).append(count)
    total = lambda some, name: sum(getattr(each, name) for each in some)
    return [PromptCounts(total(some, "num_rounds"), total(some, "num_emitted")) for some in found.values()]


def _count_turns(turns: Sequence[Turn]) -> tuple[int, int]:
    """Rounds and emitted tokens by the counters of turns in which nobody else was served."""
    clean = [(turn.counted, turn.tokens - len(turn.answers)) for turn in turns if turn.counted and not turn.others]
    return sum(counted.count_rounds(emitted) for counted, emitted in clean), sum(emitted for _, emitted in clean)


def summarise_drafts(turns: Sequence[Turn], seed: int) -> dict[str, Any]:
    """tau, its interval, rounds, and survival and acceptance by position; tau is None where the server does not say enough."""
    counts, prompts = count_answers(turns), [answer.prompt for turn in turns for answer in turn.answers]
    rounds, emitted = _count_turns(turns)
    if counts:
        rounds = int(sum(count.num_rounds for count in counts))
        emitted = int(sum(count.num_emitted for count in counts))
    survival = [num / rounds for num in _count_positions(turns, bool(counts))] if rounds else []
    return {
        "rounds": rounds,
        "tau": emitted / rounds if rounds else None,
        "tau_ci": figures.interval(merge(prompts, counts), figures.tau, seed) if counts and rounds else None,
        "survival": survival,
        "acceptance": [now / before if before else None for now, before in zip(survival, [1.0, *survival])],
    }


def _count_positions(turns: Sequence[Turn], counted_answers: bool) -> list[int]:
    """Rounds that accept at least 1, 2, .. drafts, over the same turns as the rounds. counted_answers: of `count_answers`"""
    positions = [answer.said and answer.said.by_position for turn in turns for answer in turn.answers]
    if any(each is None for each in positions):
        clean = [turn for turn in turns if not turn.others]
        known = not counted_answers or len(clean) == len(turns)
        positions = [turn.counted and turn.counted.by_position for turn in clean] if known else []
    told = [each for each in positions if each]
    return [sum(column) for column in itertools.zip_longest(*told, fillvalue=0)]


def summarise_speed(turns: Sequence[Turn], seed: int) -> dict[str, Any]:
    """Tokens/s of a user (median over answers) and of all together, and seconds to the first token; with intervals."""
    answers = [answer for turn in turns for answer in turn.answers]
    user = lambda some: statistics.median([answer.rate for answer in some])
    timed = [answer for answer in answers if not math.isnan(answer.rate)]
    return {
        "tokens_per_second_of_a_user": user(timed) if timed else None,
        "tokens_per_second_of_a_user_ci": figures.interval(timed, user, seed) if timed else None,
        "tokens_per_second": _rate(turns),
        "tokens_per_second_ci": figures.interval(turns, _rate, seed) if len(turns) >= FEWEST else None,
        "first_token_seconds": statistics.median(answer.first for answer in answers),
        "first_token_seconds_longest": max(answer.first for answer in answers),
        "busy": max(turn.busy for turn in turns),
    }


def summarise_speedup(pairs: Sequence[tuple[Turn, Turn]], seed: int) -> dict[str, Any]:
    """Turns with drafts beside the same requests without -> ratios of rates, and how many answers are the same."""
    plain = {answer.prompt: answer for _, turn in pairs for answer in turn.answers}
    both = [(answer, plain[answer.prompt]) for turn, _ in pairs for answer in turn.answers if answer.prompt in plain]
    ratios = [one.rate / other.rate for one, other in both if one.rate > 0 and other.rate > 0]
    total = lambda some: _rate([one for one, _ in some]) / _rate([other for _, other in some])
    with_ids = [(one.ids, other.ids) for one, other in both if one.ids and other.ids]
    return {
        "speedup_of_a_user": statistics.median(ratios) if ratios else None,
        "speedup_of_a_user_ci": figures.interval(ratios, statistics.median, seed) if ratios else None,
        "speedup": total(pairs),
        "speedup_ci": figures.interval(pairs, total, seed) if len(pairs) >= FEWEST else None,
        "same_answers": sum(one == other for one, other in with_ids),
        "compared_answers": len(with_ids),
    }


def _rate(turns: Sequence[Turn]) -> float:
    return sum(turn.tokens for turn in turns) / sum(turn.seconds for turn in turns)


# Beside what is replayed


def walk(accept: Tensor) -> list[int]:
    """The accepted drafts of each round of a greedy answer. accept: [K, n] of unroll/replay.py, each 0 or 1"""
    (depth, num), right = accept.shape, accept.tolist()
    start, steps = 1, []
    while start < num:
        most = min(depth, num - 1 - start)  # the last token is the target's own
        steps.append(next((d for d in range(most) if not right[d][start]), most))
        start += steps[-1] + 1
    return steps


def first_difference(served: Sequence[int], own: Sequence[int], num: int) -> tuple[int, int] | None:
    """Accepted drafts of the rounds of a greedy answer of `num` tokens -> the first round where they differ, and the place in the
    answer of the draft that was accepted only once; None: they are the same. What lies behind the end is left out."""
    start = 1
    for number, (theirs, ours) in enumerate(zip(served, own)):
        if theirs != ours and start + min(theirs, ours) + 1 < num:
            return number, start + min(theirs, ours)
        start += ours + 1
    return None
