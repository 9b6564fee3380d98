"""What running servers say about their drafts, in this project's terms, and the figures of a server under load.

tau is report.TAU: a request of T tokens in R rounds emitted T - 1 tokens in them, as the first token is the prompt's own. Servers
count in other ways, and this is the only place that converts them:

    this server   usage.speculation: all rounds
    SGLang        sglext.spec_tokens_details: spec_verify_ct is all rounds; its accept length also counts the first token
    vLLM          metrics.speculative_decoding of an answer, vllm:spec_decode_* in /metrics: rounds that had drafts, and accepted
                  drafts. Its acceptance length leaves out rounds without drafts
    llama.cpp     timings.draft_n_accepted of an answer, llamacpp:spec_decode_* in /metrics: as vLLM

The last two give R as the larger of the rounds with drafts and of T - 1 - accepted. This is exact where every round has drafts, and
where no draft is accepted behind the end of an answer; else it is too small by at most the last round of an answer.
"""

import math
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from specdec.measuring import report as figures
from specdec.measuring.report import PromptCounts

COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
FEWEST = 4  # turns, for an interval over them


@dataclass(frozen=True)
class Speculation:
    """What a server says about the drafts of one answer, or of several.

    rounds: all of them; None: it is not said. drafting: those that had drafts
    by_position: rounds that accepted at least 1, 2, .. drafts
    steps: accepted drafts of each round, in order, of one answer
    longest: drafts of a round, as far as is known
    """

    accepted: int
    drafted: int
    rounds: int | None = None
    drafting: int | None = None
    by_position: list[int] | None = None
    steps: list[int] | None = None
    longest: int | None = None

    def count_rounds(self, emitted: int) -> int:
        """emitted: tokens without the first ones of answers"""
        return max(self.drafting or 0, emitted - self.accepted) if self.rounds is None else self.rounds


def read_answer(events: Sequence[dict]) -> Speculation | None:
    """What the documents of one answer say; None: nothing."""
    steps, sizes = [], []
    for event in events:
        if isinstance(each := event.get("round"), dict) and each.get("drafted") is not None:
            steps.append(int(each["accepted"]))
            sizes.append(int(each["drafted"]))
    for event in reversed(events):
        if isinstance(said := (event.get("usage") or {}).get("speculation"), dict):
            return Speculation(said["accepted"], said["drafted"], said["rounds"], said["rounds"] if said["drafted"] else 0,
                               said["accepted_by_position"], steps or None, max(sizes, default=None))  # fmt: skip
        if isinstance(said := (event.get("metrics") or {}).get("speculative_decoding"), dict):
            return Speculation(said["num_accepted_draft_tokens"], said["num_draft_tokens"], None, said["num_spec_steps"],
                               _reached(said["acceptance_histogram"]), said.get("per_step_accepted"), said["num_spec_tokens"])  # fmt: skip
        if isinstance(said := (event.get("sglext") or {}).get("spec_tokens_details"), dict):
            rounds, drafted = said["spec_verify_ct"], said["spec_num_proposed_drafts"]
            return Speculation(said["spec_num_correct_drafts"], drafted, rounds, rounds,
                               _reached(said["spec_correct_drafts_histogram"]), None, drafted // max(1, rounds))  # fmt: skip
        if isinstance(said := event.get("timings"), dict) and "predicted_n" in said:
            return Speculation(said.get("draft_n_accepted", 0), said.get("draft_n", 0))
    return None


def _reached(histogram: list[int]) -> list[int]:
    """Rounds by accepted drafts, from 0 -> rounds that accepted at least 1, 2, .. drafts"""
    return [sum(histogram[least:]) for least in range(1, len(histogram))]


@dataclass(frozen=True)
class Counters:
    """A server's counters since its start. tokens: of all answers; drafts: None: it does not draft"""

    tokens: int
    drafts: tuple[int, ...] | None = None  # COUNTERS
    by_position: tuple[int, ...] = ()

    def since(self, before: "Counters") -> tuple[int, Speculation | None]:
        """-> tokens that were generated since then, and what became of drafts"""
        tokens = self.tokens - before.tokens
        if self.drafts is None or before.drafts is None:
            return tokens, None
        drafting, drafted, accepted = (now - then for now, then in zip(self.drafts, before.drafts))
        positions = [now - then for now, then in zip(self.by_position, before.by_position)]
        return tokens, Speculation(accepted, drafted, None, drafting, positions or None, None, len(positions) or None)


def read_counters(text: str) -> Counters | None:
    """Counters of vLLM or llama.cpp in Prometheus' form, summed over engines; None: there are none."""
    found: dict[tuple[str, int], float] = {}
    pattern = r'^(?:vllm|llamacpp):(\w+?)(?:_total)?(?:\{(?:[^}]*\bposition="(\d+)")?[^}]*\})? ([\d.eE+]+)$'
    for name, position, value in re.findall(pattern, text, re.MULTILINE):
        key = name.removeprefix("spec_decode_"), int(position or 0)
        found[key] = found.get(key, 0) + float(value)
    tokens = found.get(("generation_tokens", 0), found.get(("tokens_predicted", 0)))
    if tokens is None:
        return None
    per_position = sorted(position for name, position in found if name == "num_accepted_tokens_per_pos")
    return Counters(
        int(tokens),
        tuple(int(found[name, 0]) for name in COUNTERS) if (COUNTERS[0], 0) in found else None,
        tuple(int(found["num_accepted_tokens_per_pos", position]) for position in per_position),
    )


# Figures


@dataclass(frozen=True)
class Served:
    """One answer of a server.

    first, last: seconds from the request to its first and to its last token
    sizes: tokens of each event of the stream; ids: all of them; None: it does not give ids
    """

    prompt: str
    tokens: int
    first: float
    last: float
    ids: list[int] | None
    sizes: list[int] | None
    finish: str | None
    said: Speculation | None

    @property
    def rate(self) -> float:
        """Tokens/s of its user, without the first token."""
        return (self.tokens - 1) / (self.last - self.first) if self.last > self.first else math.nan

    @classmethod
    def from_row(cls, row: dict) -> "Served":
        return cls(**{**row, "said": row["said"] and Speculation(**row["said"])})


@dataclass(frozen=True)
class Turn:
    """Answers to requests that ran together. seconds: of all; busy: the share of these that this process computed

    generated: tokens by the server's own count; counted: its counters of drafts
    """

    answers: list[Served]
    failed: list[dict]
    seconds: float
    busy: float
    generated: int | None
    counted: Speculation | None

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def drafts(self) -> bool | None:
        """Whether the server drafted; None: it does not say."""
        said = [each for each in (self.counted, *(answer.said for answer in self.answers)) if each is not None]
        return any(each.drafted for each in said) if said or self.generated is not None else None

    @property
    def others(self) -> int:
        """Tokens that the server generated for others meanwhile, or for requests that were sent again."""
        return 0 if self.generated is None else self.generated - self.tokens

    @property
    def emitted(self) -> int:
        """Tokens of rounds."""
        return self.tokens - len(self.answers)

    @classmethod
    def from_row(cls, row: dict) -> "Turn":
        counted = row["counted"] and Speculation(**row["counted"])
        return cls(**{**row, "answers": [Served.from_row(each) for each in row["answers"]], "counted": counted})


def count_answers(turns: Sequence[Turn]) -> list[PromptCounts] | None:
    """What tau of each answer is made of; None where a server does not say enough.

    Without counts of answers, those of the stream count where they are right in sum: a server that sends an event for each
    round then agrees with its own counters.
    """
    answers = [answer for turn in turns for answer in turn.answers]
    if all(answer.said is not None for answer in answers):
        rounds = [answer.said.count_rounds(answer.tokens - 1) for answer in answers if answer.said is not None]
    else:
        rounds = [len(answer.sizes or []) - 1 for answer in answers]
        if sum(rounds) != _count_turns(turns)[0]:
            return None
    return [PromptCounts(num, answer.tokens - 1) for num, answer in zip(rounds, answers)]


def _count_turns(turns: Sequence[Turn]) -> tuple[int, int]:
    """Rounds and emitted tokens by the counters of the turns that nobody else was served in."""
    clean = [(turn.counted, turn.emitted) for turn in turns if turn.counted is not None and turn.others == 0]
    return sum(counted.count_rounds(emitted) for counted, emitted in clean), sum(emitted for _, emitted in clean)


def summarise_drafts(turns: Sequence[Turn], seed: int = 0) -> dict[str, Any]:
    """tau, its interval, rounds, and survival and acceptance by position; tau is None where the server does not say enough."""
    each = count_answers(turns)
    if each is not None:
        rounds, emitted = int(sum(one.num_rounds for one in each)), int(sum(one.num_emitted for one in each))
    else:
        rounds, emitted = _count_turns(turns)
    answers = [answer.said for turn in turns for answer in turn.answers]
    clean = [turn.counted for turn in turns if turn.counted is not None and turn.others == 0]
    parts = [said.by_position for said in answers if said is not None and said.by_position is not None]
    if len(parts) < len(answers):
        parts = [said.by_position for said in clean if said.by_position] if len(clean) == len(turns) else []
    longest = max(map(len, parts), default=0)
    reached = [sum(part[place] for part in parts if place < len(part)) for place in range(longest)]
    survival = [count / rounds for count in reached] if rounds else []
    return {
        "rounds": rounds,
        "tau": emitted / rounds if rounds else None,
        "tau_ci": figures.interval(each, figures.tau, seed) if each and rounds else None,
        "survival": survival,
        "acceptance": [now / before if before else None for now, before in zip(survival, [1.0, *survival])],
    }


def summarise_speed(turns: Sequence[Turn], seed: int = 0) -> dict[str, Any]:
    """Tokens/s of a user (median over answers), of all together, and the time to the first token; with intervals."""
    answers = [answer for turn in turns for answer in turn.answers if not math.isnan(answer.rate)]
    total = lambda some: sum(turn.tokens for turn in some) / sum(turn.seconds for turn in some)
    user = lambda some: statistics.median(answer.rate for answer in some) if some else math.nan
    return {
        "tokens_per_second_of_a_user": user(answers),
        "tokens_per_second_of_a_user_ci": figures.interval(answers, user, seed) if answers else None,
        "tokens_per_second": total(turns),
        "tokens_per_second_ci": _over_turns(turns, total, seed),
        "first_token_seconds": statistics.median(answer.first for turn in turns for answer in turn.answers),
        "first_token_seconds_longest": max(answer.first for turn in turns for answer in turn.answers),
        "busy": max(turn.busy for turn in turns),
    }


def summarise_speedup(pairs: Sequence[tuple[Turn, Turn]], seed: int = 0) -> dict[str, Any]:
    """Turns with drafts beside the same requests without -> ratios of rates, and how many answers are the same."""
    drafted, plain = ([answer for pair in pairs for answer in pair[place].answers] for place in (0, 1))
    by_prompt: dict[str, list[Served]] = {}
    for answer in plain:
        by_prompt.setdefault(answer.prompt, []).append(answer)
    both = [(answer, by_prompt[answer.prompt][0]) for answer in drafted if answer.prompt in by_prompt]
    ratios = [one.rate / other.rate for one, other in both if other.rate > 0 and not math.isnan(one.rate)]
    rate = lambda turns: sum(turn.tokens for turn in turns) / sum(turn.seconds for turn in turns)
    total = lambda some: rate([one for one, _ in some]) / rate([other for _, other in some])
    with_ids = [(one.ids, other.ids) for one, other in both if one.ids is not None and other.ids is not None]
    return {
        "speedup_of_a_user": statistics.median(ratios) if ratios else None,
        "speedup_of_a_user_ci": figures.interval(ratios, statistics.median, seed) if ratios else None,
        "speedup": total(pairs),
        "speedup_ci": _over_turns(pairs, total, seed),
        "same_answers": sum(one == other for one, other in with_ids),
        "compared_answers": len(with_ids),
    }


def _over_turns(turns: Sequence, statistic: Callable[[list], float], seed: int) -> list[float] | None:
    return figures.interval(turns, statistic, seed) if len(turns) >= FEWEST else None


# Beside what is replayed


def walk(accept: Tensor) -> list[int]:
    """The accepted drafts of each round of a greedy answer. accept: [K, n] of unroll/replay.py, each 0 or 1"""
    (depth, num), right = accept.shape, accept.tolist()
    start, steps = 1, []
    while start < num:
        most = min(depth, num - 1 - start)  # the last token is the target's own
        count = next((d for d in range(most) if not right[d][start]), most)
        steps.append(count)
        start += count + 1
    return steps


def first_difference(served: Sequence[int], own: Sequence[int], num: int) -> tuple[int, int] | None:
    """Accepted drafts of the rounds of the same greedy answer of `num` tokens -> the first round where they differ, and the place
    in the answer of the draft that was accepted only once; None: they are the same. The round that reaches the end is left out."""
    start = 1
    for number, (theirs, ours) in enumerate(zip(served, own)):
        if theirs != ours and start + min(theirs, ours) + 1 < num:
            return number, start + min(theirs, ours)
        start += ours + 1
    return None
