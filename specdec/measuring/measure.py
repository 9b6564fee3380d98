"""Decoding as measurement: each prompt is decoded plainly and by each method, in turn, under the same settings."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from specdec.core.answer_text import StopStrings
from specdec.core.compile import Runner
from specdec.core.constraint import Constraint, unpack_masks
from specdec.core.generation import Generation
from specdec.core.progress import track_tokens
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Drafter, Head
from specdec.measuring.contexts import AnswerContexts, count_contexts, count_decoded
from specdec.proposers.base import Proposer
from specdec.target.model import Target
from specdec.text.conversations import Prompt
from specdec.unroll import replay

# Prompts of a group are decoded side by side; a group has GROUP_BATCHES batches, or fewer of batches above LARGE_BATCH.
# Rows are empty only at the end of a group, so larger groups keep batches full, and smaller ones are finished earlier.
GROUP_BATCHES, LARGE_GROUP_BATCHES, LARGE_BATCH = 4, 2, 8
LONG_PROMPT = 2048  # tokens; longer prompts are decoded in smaller groups, which take less memory and end sooner
WARM_UP_PROMPT = 1024  # last tokens of a prompt that warms up
WARM_UP_TOKENS = 8  # tokens of the answer before the first timed one; enough to compile every pass
FROZEN = "the frozen target"  # name of plain decoding with a target that no head has changed
Item = TypeVar("Item")


@dataclass(frozen=True)
class PromptReplay:
    """One prompt, replayed along an answer that the target wrote."""

    prompt: Prompt
    replayed_rounds: float  # expected rounds of drafting along the answer
    replayed_accepted: list[float]  # [K] expected rounds that accept at least d drafts
    candidates: list[list[float]] | None = None  # [4, K] as in replay.Replay
    contexts: AnswerContexts | None = None  # expected rounds by context


def make_prompt_replay(prompt: Prompt, text_replay: replay.Replay) -> PromptReplay:
    """The replay along one text, as numbers for JSON."""
    num_rounds, accepted = text_replay.expected_rounds
    candidates = None if text_replay.candidates is None else text_replay.candidates.tolist()
    contexts = count_contexts(prompt.question_id, len(prompt.tokens), text_replay.rounds.list_starts())
    return PromptReplay(prompt, num_rounds, accepted.tolist(), candidates, contexts)


@dataclass(frozen=True)
class PromptResult:
    """One prompt, decoded plainly and by one method at one temperature."""

    prompt: Prompt
    plain: Generation
    drafted: Generation
    replayed_rounds: float  # expected rounds of drafting along the plain answer; nan if replay does not apply
    replayed_accepted: list[float]  # [K] expected rounds that accept at least d drafts; empty if replay does not apply
    gap: float | None  # at temperature 0, the target's top-2 logit gap where the answers differ; else None
    auto: Generation | None = None  # answer with proposers/auto.py, where that is measured, too
    candidates: list[list[float]] | None = None  # [4, K] as in replay.Replay

    @property
    def num_rounds(self) -> int:
        """Rounds of the drafted answer."""
        return len(self.drafted.accepted[0])

    @property
    def first_difference(self) -> int | None:
        """The index of the first token in which the answers differ; None if they are equal."""
        return find_first_difference(self.plain.tokens[0], self.drafted.tokens[0])

    @property
    def num_emitted(self) -> int:
        """Tokens that the rounds of the drafted answer emitted."""
        return sum(self.drafted.accepted[0]) + self.num_rounds

    @property
    def contexts(self) -> AnswerContexts:
        """Rounds of the drafted answer by context."""
        emitted = [num + 1 for num in self.drafted.accepted[0]]
        return count_decoded(self.prompt.question_id, len(self.prompt.tokens), emitted)


@dataclass(frozen=True)
class Method:
    """One way to draft, compared with plain decoding of its target."""

    name: str
    target: Target
    proposer: Proposer
    drafting: Drafting
    baseline: str = FROZEN  # name of the target's plain decoding, which methods of one target share
    head: Head | None = None  # trained head, which is replayed along plain answers; None for other proposers

    def find_replayable_head(self, sampling: Sampling) -> Drafter | None:
        """The head, if replay gives its tau at this sampling; otherwise None."""
        head = self.head
        return head if isinstance(head, Drafter) and self.drafting.replayable(head, sampling) else None


@dataclass(frozen=True)
class MeasureSettings:
    """How prompts are decoded."""

    sampling: Sampling
    stop: set[int]  # ids of tokens that end an answer
    max_new_tokens: int
    seed: int = 0  # added to the number of a prompt, it seeds the random numbers of its answer
    batch: int = 1  # prompts decoded at once; the times of an answer are its share of those of the batch
    stop_strings: StopStrings | None = None  # texts that end an answer, too


def measure(
    methods: Sequence[Method],
    prompts: list[Prompt],
    settings: MeasureSettings,
    *,
    numbers: list[int] | None = None,
    source: str = "",
    progress: Callable[[list], Iterable] = iter,
    earlier: dict[str, Decoder] | None = None,
    longest: int = 0,
) -> Iterator[list[dict[str, PromptResult]]]:
    """Decodes each prompt plainly and by each method, round by round in turn, after a warm-up.

    Yields the results of each group of prompts: for each prompt a dictionary of results by method. The time of
    compiling is not counted. Proposers first forget what they learned from earlier batches.
    numbers: number of each prompt, for its random numbers and the order of methods; None: 0, 1, 2 ..
    source: name of the prompts' file, for messages
    progress: function that passes on the groups, and may end early
    earlier: decoders of earlier measurements, see `make_decoders`; longest: tokens of the longest prompt of all of them
    Raises ValueError for a prompt that cannot be decoded, and for two methods of one name.
    """
    decoders = make_decoders(methods, settings, earlier=earlier)
    for decoder in decoders.values():
        check_prompts(decoder, prompts, settings.max_new_tokens, source=source)
    lengths = [len(prompt.tokens) for prompt in prompts]
    longest = max(longest, *lengths)
    warm_up(decoders.values(), prompts[0], longest, settings)
    for method in methods:
        method.proposer.reset_history()
    numbered_prompts = list(zip(numbers or range(len(prompts)), prompts, strict=True))
    groups = split_prompts(numbered_prompts, settings.batch, longest=longest)
    num_written = settings.max_new_tokens * len(prompts)
    for pairs in track_tokens(progress(groups), read=sum(lengths), written=num_written, times=len(decoders)):
        group = [prompt for _, prompt in pairs]
        generations = decode_side_by_side(
            decoders,
            [prompt.tokens for prompt in group],
            settings.max_new_tokens,
            batch=settings.batch,
            seeds=[settings.seed + number for number, _ in pairs],
            rotation=pairs[0][0] // settings.batch,
        )
        results: list[dict[str, PromptResult]] = [{} for _ in group]
        for method in methods:
            answers = zip(results, group, generations[method.baseline], generations[method.name], strict=True)
            for result, prompt, plain, drafted in answers:
                result[method.name] = compare_answers(method, prompt, plain, drafted, settings.sampling)
        yield results


def warm_up(decoders: Iterable[Decoder], prompt: Prompt, longest: int, settings: MeasureSettings) -> None:
    """Decodes a little with each decoder, which compiles and captures then. longest: tokens of the longest prompt"""
    for decoder in decoders:
        decoder.expect(longest + settings.max_new_tokens, batch_size=settings.batch)
        generator = seeded_generator(decoder.target, settings.seed)
        tokens = prompt.tokens[-WARM_UP_PROMPT:]
        decoder.generate([tokens], min(WARM_UP_TOKENS, settings.max_new_tokens), generator=generator)


def make_decoders(
    methods: Sequence[Method], settings: MeasureSettings, *, earlier: dict[str, Decoder] | None
) -> dict[str, Decoder]:
    """A decoder for each method, and one of plain decoding for each baseline, by their names.

    earlier: decoders with these settings by name, which are used again with all that they have compiled and captured.
        New ones are added.
    """
    earlier = {} if earlier is None else earlier
    decoders: dict[str, Decoder] = {}
    for method in methods:
        if method.name in decoders:
            raise ValueError(f"Two methods are called {method.name}: give them different names.")
        if method.baseline not in earlier:
            earlier[method.baseline] = make_plain_decoder(method.target, settings, method.drafting.runner())
        plain = earlier[method.baseline]
        if method.name not in earlier or earlier[method.name].proposer is not method.proposer:
            earlier[method.name] = method.drafting.decoder(
                method.target,
                method.proposer,
                sampling=settings.sampling,
                stop=settings.stop,
                stop_strings=settings.stop_strings,
                runner=plain.runner,
            )
        decoders |= {method.baseline: plain, method.name: earlier[method.name]}
    return decoders


def make_plain_decoder(target: Target, settings: MeasureSettings, runner: Runner) -> Decoder:
    """A decoder without drafts. runner: compiler of the target's passes"""
    stops: dict[str, Any] = {"stop": settings.stop, "stop_strings": settings.stop_strings}
    return Decoder(target, None, sampling=settings.sampling, runner=runner, **stops)


def check_prompts(decoder: Decoder, prompts: Iterable[Prompt], max_new_tokens: int, *, source: str = "") -> None:
    """Raises ValueError, naming the prompt, for one that cannot be decoded. source: name of the prompts' file"""
    prefix = f"{source}, " if source else ""
    for prompt in prompts:
        try:
            decoder.check([prompt.tokens], max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{prefix}prompt {prompt.id}: {error}") from None


def limit_rows(batch: int, length: int) -> int:
    """The rows of a batch of prompts of `length` tokens: all, or the power of two that keeps to LONG_PROMPT a row."""
    num_rows = max(1, batch * LONG_PROMPT // length)
    return batch if num_rows >= batch else 1 << (num_rows.bit_length() - 1)


def fill_batch(items: list[Item], batch: int) -> list[Item]:
    """The items, repeated where there are fewer than run at once."""
    return list(itertools.islice(itertools.cycle(items), max(len(items), batch)))


def split_prompts(items: list[Item], batch: int, *, longest: int = 0) -> list[list[Item]]:
    """Groups of items for `decode_side_by_side`: single items, or several batches, nearly equal in size.

    longest: tokens of the longest prompt
    """
    num_batches = LARGE_GROUP_BATCHES if batch > LARGE_BATCH else GROUP_BATCHES
    if longest > LONG_PROMPT:
        num_batches = 1
    size = 1 if batch == 1 else num_batches * batch
    num_groups = max(1, round(len(items) / size))
    borders = [index * len(items) // num_groups for index in range(num_groups + 1)]
    return [items[start:end] for start, end in zip(borders, borders[1:])]


def decode_side_by_side(
    decoders: Mapping[str, Decoder],
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    batch: int,
    seeds: list[int],
    rotation: int = 0,
) -> dict[str, list[Generation]]:
    """The answers of several decoders to prompts, at most `batch` of them at once, in the order of the prompts.

    After every round the decoder with the fewest emitted tokens goes on. So all decoders are at the same position of
    the same answers at nearly the same time, and other load of the machine affects all alike. All hold their caches at
    once.
    seeds: seed of each prompt's random numbers; rotation: index of the decoder that begins, modulo their number
    """
    names = list(decoders)
    names = names[rotation % len(names) :] + names[: rotation % len(names)]

    def start_rounds(decoder: Decoder) -> Iterator[tuple[int, list[tuple[int, Generation]]]]:
        def make_generator(number: int) -> torch.Generator:
            return torch.Generator().manual_seed(seeds[number])  # of the host: its numbers are copied together

        return decoder.rounds(prompts, max_new_tokens, batch_size=batch, generator=make_generator)

    rounds_of_decoder = {name: start_rounds(decoders[name]) for name in names}
    emitted = dict.fromkeys(names, 0)
    answers_of_decoder: dict[str, dict[int, Generation]] = {name: {} for name in decoders}
    while rounds_of_decoder:
        name = min(rounds_of_decoder, key=lambda name: emitted[name])
        round_ = next(rounds_of_decoder[name], None)
        if round_ is None:
            del rounds_of_decoder[name]
        else:
            emitted[name] += round_[0]
            answers_of_decoder[name] |= dict(round_[1])
    return {name: list(dict(sorted(answers.items())).values()) for name, answers in answers_of_decoder.items()}


def compare_answers(
    method: Method, prompt: Prompt, plain: Generation, drafted: Generation, sampling: Sampling
) -> PromptResult:
    """The result of one prompt from its two answers, with replay and the gap at the first difference."""
    replayed, gap = PromptReplay(prompt, float("nan"), []), None
    head, text = method.find_replayable_head(sampling), (prompt.tokens, plain.tokens[0])
    if head is not None:
        (text_replay,) = replay.replay_answers(
            head, [text], depth=method.drafting.depth, temperature=sampling.temperature
        )
        replayed = make_prompt_replay(prompt, text_replay)
    if sampling.greedy:
        gap = compute_top2_gap(method.target, *text, drafted.tokens[0], sampling)
    counts = replayed.replayed_rounds, replayed.replayed_accepted
    return PromptResult(prompt, plain, drafted, *counts, gap, candidates=replayed.candidates)


def seeded_generator(target: Target, seed: int) -> torch.Generator:
    """A generator of random numbers on the target's device."""
    return torch.Generator(target.device).manual_seed(seed)


def find_first_difference(answer: list[int], other_answer: list[int]) -> int | None:
    """The index of the first token in which two answers differ; None if they are equal."""
    pairs = enumerate(itertools.zip_longest(answer, other_answer))
    return next((index for index, (token, other_token) in pairs if token != other_token), None)


def compute_top2_gap(
    target: Target,
    prompt: list[int],
    answer: list[int],
    other_answer: list[int],
    sampling: Sampling,
    constraint: Constraint | None = None,
) -> float | None:
    """The gap between the target's two largest logits where two greedy answers first differ; None if they are equal.

    A gap as small as the rounding of the dtype is a near tie, which rounding may decide either way.
    constraint: at the beginning of the answer; it is advanced
    """
    num_equal = find_first_difference(answer, other_answer)
    if num_equal is None:
        return None
    tokens = torch.tensor([prompt + answer[:num_equal]], device=target.device)
    logits = target.logits(target.read(tokens, ()).final[:, -1:])  # [1, 1, V]
    seen_tokens = torch.zeros_like(logits, dtype=torch.bool).scatter_(2, tokens[None], True)
    logits = sampling.penalise(logits, seen_tokens)
    if constraint:
        constraint.take(answer[:num_equal])
        allowed = unpack_masks([[constraint.following()]], logits.shape[-1], logits.device)
        logits = logits.masked_fill(~allowed, -torch.inf)
    top = logits[0, 0].topk(2).values
    return float(top[0] - top[1])
