"""The counts that servers give of their drafts, in this project's terms, and the figures of a server under load.

tau is report.TAU: T tokens of an answer in R rounds are T - 1 emitted ones, as the first token is the prompt's own.
Servers count in other ways, and this is the only place that converts them:

    this server   usage.speculation: all rounds
    SGLang        sglext.spec_tokens_details: spec_verify_ct is all rounds. Its accept length counts the first
                  token, too.
    vLLM          metrics.speculative_decoding of an answer, vllm:spec_decode_* in /metrics: rounds that had drafts, and
                  accepted drafts. Its acceptance length leaves out rounds without drafts.
    llama.cpp     timings.draft_n_accepted of an answer, llamacpp:spec_decode_* in /metrics: as vLLM

For the last two, R is the larger of the rounds with drafts and of T - 1 - accepted. This is exact where every round
has drafts and no draft is accepted behind the end of an answer. Otherwise it is too small by at most one round of an
answer.
"""

import collections
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

from torch import Tensor

from specdec.measuring import report as figures
from specdec.measuring.contexts import AnswerContexts, count_decoded
from specdec.measuring.report import PromptCounts

BatchPairs = Sequence[tuple["ServedBatch", "ServedBatch | None"]]  # with drafts, and the same requests without
Item = TypeVar("Item")
MIN_BATCHES = 4  # batches below which no interval over batches is given: a bootstrap over fewer says little
COUNTERS = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
COUNTER = re.compile(r'(?m)^(?:vllm|llamacpp):(\w+?)(?:_total)?(?:\{(?:.*\bposition="(\d+)")?.*\})? ([\d.eE+]+)$')


@dataclass(frozen=True)
class Speculation:
    """The drafts of one answer, or of several, by the server's own counts.

    accepted, drafted: drafts; drafted: None where the server does not say
    rounds: all rounds; None where the server does not say
    drafting: rounds that had drafts
    by_position: rounds that accepted at least 1, 2, .. drafts
    longest: most drafts of a round
    steps: accepted drafts of each round of one answer, in order
    """

    accepted: int
    drafted: int | None
    rounds: int | None = None
    drafting: int = 0
    by_position: list[int] | None = None
    longest: int | None = None
    steps: list[int] | None = None

    def count_rounds(self, emitted: int) -> int:
        """The number of rounds. emitted: tokens without the first ones of answers"""
        return max(self.drafting, emitted - self.accepted) if self.rounds is None else self.rounds


def read_answer(events: Sequence[dict]) -> Speculation | None:
    """The counts in the documents of one answer; None without any. Raises KeyError for counts of another form."""
    for event in reversed(events):
        counts = (event.get("usage") or {}).get("speculation")
        if counts:
            return read_own_counts(counts, events)
        counts = (event.get("metrics") or {}).get("speculative_decoding")
        if counts:
            totals = counts["num_accepted_draft_tokens"], counts["num_draft_tokens"], None, counts["num_spec_steps"]
            positions = count_positions(counts["acceptance_histogram"])
            return Speculation(*totals, positions, counts["num_spec_tokens"], counts.get("per_step_accepted"))
        counts = (event.get("sglext") or {}).get("spec_tokens_details")
        if counts:
            drafted, rounds = counts["spec_num_proposed_drafts"], counts["spec_verify_ct"]
            positions = count_positions(counts["spec_correct_drafts_histogram"])
            longest = drafted // max(1, rounds)
            return Speculation(counts["spec_num_correct_drafts"], drafted, rounds, 0, positions, longest)
        counts = event.get("timings") or {}
        if "predicted_n" in counts:
            return Speculation(counts.get("draft_n_accepted", 0), counts.get("draft_n", 0))
    return None


def read_own_counts(counts: dict, events: Sequence[dict]) -> Speculation:
    """The counts of this project's server. counts: `usage.speculation`; events: documents, which may have each round"""
    rounds = [event["round"] for event in events if event.get("round")]
    rounds = [round_ for round_ in rounds if round_["drafted"] is not None]
    longest = max((round_["drafted"] for round_ in rounds), default=None)
    steps = [round_["accepted"] for round_ in rounds] or None
    positions = counts["accepted_by_position"]
    return Speculation(counts["accepted"], counts["drafted"], counts["rounds"], 0, positions, longest, steps)


def count_positions(histogram: list[int]) -> list[int]:
    """Rounds that accepted at least 1, 2, .. drafts. histogram: rounds that accepted exactly 0, 1, .. drafts"""
    return [sum(histogram[least:]) for least in range(1, len(histogram))]


@dataclass(frozen=True)
class Counters:
    """A server's counters since its start.

    tokens: generated tokens; drafts: values of COUNTERS, None where it does not draft
    by_position: rounds that accepted at least 1, 2, .. drafts
    """

    tokens: int
    drafts: list[int] | None
    by_position: list[int]

    def subtract(self, earlier: "Counters") -> tuple[int, Speculation | None]:
        """Tokens generated since the earlier counters, and the counts of drafts."""
        tokens = self.tokens - earlier.tokens
        if self.drafts is None or earlier.drafts is None:
            return tokens, None
        drafting, drafted, accepted = subtract_all(self.drafts, earlier.drafts)
        positions = subtract_all(self.by_position, earlier.by_position) or None
        return tokens, Speculation(accepted, drafted, None, drafting, positions, positions and len(positions))


def subtract_all(current: Sequence[int], earlier: Sequence[int]) -> list[int]:
    """The differences; missing numbers are 0, as some positions may come later."""
    return [after - before for after, before in itertools.zip_longest(current, earlier, fillvalue=0)]


def parse_counters(text: str) -> Counters | None:
    """Counters of vLLM or llama.cpp in Prometheus' form, summed over engines; None without any."""
    values = collections.Counter[tuple[str, int]]()
    for name, position, value in COUNTER.findall(text):
        values[name.removeprefix("spec_decode_"), int(position or 0)] += round(float(value))
    tokens = values.get(("generation_tokens", 0), values.get(("tokens_predicted", 0)))
    if tokens is None:
        return None
    drafts = [values[name, 0] for name in COUNTERS if (name, 0) in values]
    positions = sorted(key for key in values if key[0] == "num_accepted_tokens_per_pos")
    return Counters(tokens, drafts if len(drafts) == len(COUNTERS) else None, [values[key] for key in positions])


@dataclass(frozen=True)
class ServedAnswer:
    """An answer, as a client sees it.

    prompt: id of the prompt; tokens: number of tokens
    first, last: seconds from the request to the first and to the last token
    ids: token ids; None where the server gives none
    sizes: tokens of each event of the stream
    server_counts: the server's own counts of its drafts
    ended: whether the answer ended by itself, not by the limit of tokens
    prompt_tokens: tokens of the prompt by the server's count
    """

    prompt: str
    tokens: int
    first: float
    last: float
    ids: list[int] | None
    sizes: list[int]
    server_counts: Speculation | None
    ended: bool = False
    prompt_tokens: int | None = None

    @property
    def rate(self) -> float:
        """Tokens/s of its user, without the first token."""
        return (self.tokens - 1) / (self.last - self.first) if self.last > self.first else math.nan

    @property
    def counts(self) -> PromptCounts | None:
        """Rounds and emitted tokens by the server's own counts; None without these."""
        emitted = self.tokens - 1
        return PromptCounts(self.server_counts.count_rounds(emitted), emitted) if self.server_counts else None

    def find_emitted(self) -> list[int] | None:
        """Tokens that each round emitted; None where the server's counts and its events do not tell.

        The last round of `steps` may have accepted drafts behind the end of the answer.
        """
        num_rounds = len(self.sizes) - 1 if self.counts is None else self.counts.num_rounds
        steps = (self.server_counts and self.server_counts.steps) or []
        emitted = [step + 1 for step in steps]
        if emitted and len(emitted) == num_rounds:
            emitted[-1] -= sum(emitted) - (self.tokens - 1)
        else:
            emitted = self.sizes[1:]
        is_whole = len(emitted) == num_rounds and sum(emitted) == self.tokens - 1
        return emitted if is_whole and min(emitted, default=1) > 0 else None


AnswerPair = tuple[ServedAnswer, ServedAnswer]  # two answers to one request


@dataclass(frozen=True)
class ServedBatch:
    """Answers to requests that ran together.

    failed: {prompt, error} of each failed request
    seconds: wall time of the batch
    busy: share of that time in which this process computed
    generated: tokens by the server's own count
    server_counts: counts of drafts by the server's counters
    repeats: requests that were sent again, whose pauses are part of `seconds`
    """

    answers: list[ServedAnswer]
    failed: list[dict]
    seconds: float
    busy: float
    generated: int | None
    server_counts: Speculation | None
    repeats: int = 0

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers)

    @property
    def foreign_tokens(self) -> int:
        """Tokens that the server generated for others meanwhile, or for requests that were sent again."""
        return 0 if self.generated is None else self.generated - self.tokens

    @property
    def draft_counts(self) -> list[Speculation]:
        """The server's counts of the batch and of its answers, as far as it gives them."""
        return [
            counts
            for counts in (self.server_counts, *(answer.server_counts for answer in self.answers))
            if counts is not None
        ]

    @property
    def drafts(self) -> bool | None:
        """Whether the server drafted; None where it does not say."""
        if not self.draft_counts and self.generated is None:
            return None
        return any(counts.drafted or counts.accepted for counts in self.draft_counts)

    @classmethod
    def from_row(cls, row: dict) -> "ServedBatch":
        """The inverse of dataclasses.asdict."""
        answers = [
            ServedAnswer(**answer | {"server_counts": read_counts(answer["server_counts"])})
            for answer in row["answers"]
        ]
        return cls(**row | {"answers": answers, "server_counts": read_counts(row["server_counts"])})


def read_counts(row: dict | None) -> Speculation | None:
    return None if row is None else Speculation(**row)


# Figures


def list_answers(batches: Sequence[ServedBatch]) -> list[ServedAnswer]:
    """The answers of all batches, in order."""
    return [answer for batch in batches for answer in batch.answers]


def count_answers(batches: Sequence[ServedBatch]) -> list[PromptCounts] | None:
    """The rounds and emitted tokens of each answer; None where a server does not say enough.

    Without counts of answers, the events of the stream are taken as rounds if their sum is right. A server that sends
    an event for each round then agrees with its own counters.
    """
    answers = list_answers(batches)
    counts = [answer.counts for answer in answers if answer.counts]
    if len(counts) < len(answers):
        counts = [PromptCounts(len(answer.sizes) - 1, answer.tokens - 1) for answer in answers]
        if any(batch.server_counts is None or batch.foreign_tokens for batch in batches):
            return None
        if sum(count.num_rounds for count in counts) != count_batches(batches)[0]:
            return None
    return counts


def list_contexts(
    batches: Sequence[ServedBatch], prompt_lengths: Mapping[str, int], questions: Mapping[str, str]
) -> list[AnswerContexts] | None:
    """The rounds of each answer by context; None where a server does not say where they begin.

    prompt_lengths: tokens of prompts by id, where they are known here; questions: see `name_questions`
    """
    contexts = []
    for answer in list_answers(batches) if count_answers(batches) else ():
        emitted = answer.find_emitted()
        if emitted is None:
            return None
        num_prompt = prompt_lengths.get(answer.prompt, answer.prompt_tokens)
        contexts.append(count_decoded(questions.get(answer.prompt, answer.prompt), num_prompt, emitted))
    return contexts or None


def count_batches(batches: Sequence[ServedBatch]) -> tuple[int, int]:
    """Rounds and emitted tokens by the counters of batches in which nobody else was served."""
    clean = [
        (batch.server_counts, batch.tokens - len(batch.answers))
        for batch in batches
        if batch.server_counts and not batch.foreign_tokens
    ]
    return sum(counted.count_rounds(emitted) for counted, emitted in clean), sum(emitted for _, emitted in clean)


def summarise_drafts(batches: Sequence[ServedBatch], seed: int, questions: Mapping[str, str] = {}) -> dict[str, Any]:
    """Rounds, tau, its interval, survival and acceptance by position; tau is None where a server says too little.

    questions: see `name_questions`
    """
    counts = count_answers(batches)
    rounds, emitted = count_batches(batches)
    tau_ci = None
    if counts:
        rounds, emitted = (int(sum(numbers)) for numbers in zip(*map(astuple, counts)))
        names = [name_questions([answer], questions) for answer in list_answers(batches)]
        tau_ci = find_interval(counts, names, figures.compute_tau, seed) if rounds else None
    survival = [num / rounds for num in count_accepted_positions(batches, bool(counts))] if rounds else []
    return {
        "rounds": rounds,
        "tau": emitted / rounds if rounds else None,
        "tau_ci": tau_ci,
        "survival": survival,
        "acceptance": [after / before if before else None for after, before in zip(survival, [1.0, *survival])],
    }


def count_accepted_positions(batches: Sequence[ServedBatch], counted_answers: bool) -> list[int]:
    """Rounds that accepted at least 1, 2, .. drafts, over the same batches as the rounds.

    counted_answers: whether `count_answers` gave counts
    """
    positions = [find_positions(answer.server_counts) for answer in list_answers(batches)]
    if any(rounds is None for rounds in positions):
        clean = [batch for batch in batches if not batch.foreign_tokens]
        comparable = not counted_answers or len(clean) == len(batches)
        positions = [find_positions(batch.server_counts) for batch in clean] if comparable else []
    return sum_columns(positions)


def find_positions(counts: Speculation | None) -> list[int] | None:
    return counts.by_position if counts else None


def sum_columns(rows: Iterable[list[int] | None]) -> list[int]:
    """The sums of the first, second, .. numbers of all rows, which may have different lengths."""
    numbers = [row for row in rows if row]
    return [sum(column) for column in itertools.zip_longest(*numbers, fillvalue=0)]


def name_questions(answers: Sequence[ServedAnswer], questions: Mapping[str, str]) -> set[str]:
    """The questions of answers. questions: ids by the prompt's id; a prompt that is not in it is its own question"""
    return {questions.get(answer.prompt, answer.prompt) for answer in answers}


def group_items(items: Sequence[Item], names: Sequence[set[str]]) -> list[list[Item]]:
    """The items in groups without a common name, in order. names: names of each item"""
    groups: list[tuple[set[str], list[Item]]] = []
    for item, item_names in zip(items, names, strict=True):
        linked = [group for group in groups if group[0] & item_names]
        groups = [group for group in groups if not group[0] & item_names]
        members = itertools.chain.from_iterable(members for _, members in linked)
        groups.append((item_names.union(*(known for known, _ in linked)), [*members, item]))
    return [members for _, members in groups]


def find_interval(
    items: Sequence[Item],
    names: Sequence[set[str]],
    statistic: Callable[[list[Item]], float],
    seed: int,
    fewest: int = 2,
) -> list[float] | None:
    """The 95 % interval of a statistic over questions; None for fewer than `fewest`, as one alone has no spread.

    Turns of a question, and requests that repeat it, are alike, so that the items of a question are drawn together.
    names: questions of each item
    """
    groups = group_items(items, names)
    if len(groups) < fewest:
        return None
    return figures.bootstrap_interval(groups, lambda drawn: statistic([*itertools.chain.from_iterable(drawn)]), seed)


def summarise_speed(batches: Sequence[ServedBatch], seed: int, questions: Mapping[str, str] = {}) -> dict[str, Any]:
    """Tokens/s of a user (median over answers) and of all together, and seconds to the first token; with intervals.

    Batches with requests that were sent again are left out of the rate of all. questions: see `name_questions`
    """
    answers = list_answers(batches)
    timed = [answer for answer in answers if not math.isnan(answer.rate)]
    rates, names = [answer.rate for answer in timed], [name_questions([answer], questions) for answer in timed]
    whole = [batch for batch in batches if not batch.repeats]
    whole_names = [name_questions(batch.answers, questions) for batch in whole]
    return {
        "tokens_per_second_of_a_user": statistics.median(rates) if rates else None,
        "tokens_per_second_of_a_user_ci": find_interval(rates, names, statistics.median, seed),
        "tokens_per_second": find_rate(whole) if whole else None,
        "tokens_per_second_ci": find_interval(whole, whole_names, find_rate, seed, MIN_BATCHES),
        "first_token_seconds": statistics.median(answer.first for answer in answers),
        "busy": max(batch.busy for batch in batches),
    }


def summarise_speedup(
    pairs: Sequence[tuple[ServedBatch, ServedBatch]], seed: int, questions: Mapping[str, str] = {}
) -> dict[str, Any]:
    """The ratios of rates with drafts and without, and the number of equal answers.

    pairs: batches with drafts, each beside the same requests without; questions: see `name_questions`
    Batches with requests that were sent again are left out of the ratio of all.
    """
    answer_pairs = [pair for drafted, plain in pairs for pair in pair_answers(drafted.answers, plain.answers)]
    timed = select_timed(answer_pairs)
    ratios = [drafted.rate / plain.rate for drafted, plain in timed]
    names = [name_questions([drafted], questions) for drafted, _ in timed]
    same = compare_ids(answer_pairs)
    whole = [(drafted, plain) for drafted, plain in pairs if not drafted.repeats and not plain.repeats]
    whole_names = [name_questions(drafted.answers, questions) for drafted, _ in whole]
    return {
        "speedup_of_a_user": statistics.median(ratios) if ratios else None,
        "speedup_of_a_user_ci": find_interval(ratios, names, statistics.median, seed),
        "speedup": find_rate_ratio(whole) if whole else None,
        "speedup_ci": find_interval(whole, whole_names, find_rate_ratio, seed, MIN_BATCHES),
        "same_answers": sum(same),
        "compared_answers": len(same),
    }


def summarise_pairs(pairs: BatchPairs, seed: int, questions: Mapping[str, str] = {}) -> dict[str, Any]:
    """The figures of a load, `plain` and the speedups as far as there are plain answers. questions: `name_questions`

    Without any answer there are counts alone.
    """
    drafted, figures = [batch for batch, _ in pairs], count_requests(pairs, questions)
    if not figures["answers"]:
        return figures
    figures |= summarise_drafts(drafted, seed, questions)
    figures["drafted"] = summarise_speed(drafted, seed, questions)
    compared = [(batch, plain) for batch, plain in pairs if plain is not None and plain.answers and batch.answers]
    if compared:
        figures["plain"] = summarise_speed([plain for _, plain in compared], seed, questions)
        figures |= summarise_speedup(compared, seed, questions)
    return figures


def count_requests(pairs: BatchPairs, questions: Mapping[str, str]) -> dict[str, Any]:
    """The answers with drafts, and what failed or came from others at both servers. questions: `name_questions`"""
    answers = list_answers([batch for batch, _ in pairs])
    batches = [batch for batch in itertools.chain.from_iterable(zip(*pairs)) if batch is not None]
    return {
        "answers": len(answers),
        "questions": len(name_questions(answers, questions)),
        "failed": [failure for batch in batches for failure in batch.failed],
        "tokens_of_others": sum(max(0, batch.foreign_tokens) for batch in batches),
        "plain": None,
    }


def pair_answers(drafted: Sequence[ServedAnswer], plain: Sequence[ServedAnswer]) -> list[AnswerPair]:
    """The answers of two batches to the same requests: those to one prompt in order, as it may be asked repeatedly."""
    waiting = collections.defaultdict[str, list[ServedAnswer]](list)
    for answer in reversed(plain):
        waiting[answer.prompt].append(answer)
    return [(answer, waiting[answer.prompt].pop()) for answer in drafted if waiting[answer.prompt]]


def select_timed(pairs: Iterable[AnswerPair]) -> list[AnswerPair]:
    """The pairs of answers that both have a rate: an answer of one token has none."""
    return [(first, second) for first, second in pairs if first.rate > 0 and second.rate > 0]


def compare_ids(pairs: Iterable[AnswerPair]) -> list[bool]:
    """Whether the answers of a pair are equal, for each pair with token ids."""
    return [first.ids == second.ids for first, second in pairs if first.ids and second.ids]


def find_rate(batches: Sequence[ServedBatch]) -> float:
    """Tokens/s of all requests together."""
    return sum(batch.tokens for batch in batches) / sum(batch.seconds for batch in batches)


def find_rate_ratio(pairs: Sequence[tuple[ServedBatch, ServedBatch]]) -> float:
    """Tokens/s with drafts over tokens/s without."""
    drafted, baseline = zip(*pairs)
    return find_rate(drafted) / find_rate(baseline)


# Beside what is replayed


def count_greedy_rounds(accept: Tensor) -> list[int]:
    """The accepted drafts of each round of a greedy answer. accept: [K, n] of unroll/replay.py, each 0 or 1"""
    depth, num = accept.shape
    right = accept.tolist()
    start, accepted_by_round = 1, []
    while start < num:
        max_drafts = min(depth, num - 1 - start)  # the last token is the target's own
        accepted_by_round.append(next((d for d in range(max_drafts) if not right[d][start]), max_drafts))
        start += accepted_by_round[-1] + 1
    return accepted_by_round


def find_first_difference(served: Sequence[int], replayed: Sequence[int], num: int) -> tuple[int, int] | None:
    """The first round in which two counts of accepted drafts differ, and the token of the draft that was accepted once.

    served, replayed: accepted drafts of each round of a greedy answer; num: tokens of the answer
    None where the rounds are equal. Drafts behind the end of the answer are left out.
    """
    start = 1
    for number, (served_drafts, replayed_drafts) in enumerate(zip(served, replayed)):
        accepted = min(served_drafts, replayed_drafts)
        if served_drafts != replayed_drafts and start + accepted + 1 < num:
            return number, start + accepted
        start += replayed_drafts + 1
    return None
