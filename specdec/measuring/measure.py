"""Decoding as measurement: every prompt is decoded plainly and by each method, round by round in turn, under the same settings."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from specdec.core.answer_text import StopStrings
from specdec.core.constraint import Constraint, unpack_masks
from specdec.core.generation import Generation
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Drafter, Head
from specdec.proposers.base import Proposer
from specdec.target.model import Target
from specdec.text.conversations import Prompt
from specdec.unroll import replay

# Batches that are decoded side by side before the next ones begin: with more of them fewer rows are empty at their ends
GROUP_BATCHES, LARGE_GROUP_BATCHES, LARGE_BATCH = 4, 2, 8
WARM_UP_TOKENS = 8  # tokens
FROZEN = "the frozen target"
Item = TypeVar("Item")


@dataclass(frozen=True)
class PromptReplay:
    """One prompt, replayed along an answer that the target wrote."""

    prompt: Prompt
    replayed_rounds: float  # expected rounds of drafting along the answer
    replayed_accepted: list[float]  # [K] expected rounds that accept at least d drafts
    candidates: list[list[float]] | None = None  # [4, K] of replay.Replay


def make_prompt_replay(prompt: Prompt, text_replay: replay.Replay) -> PromptReplay:
    num_rounds, accepted = text_replay.expected_rounds
    candidates = text_replay.candidates
    return PromptReplay(prompt, num_rounds, accepted.tolist(), None if candidates is None else candidates.tolist())


@dataclass(frozen=True)
class PromptResult:
    """One prompt, decoded plainly and by one method at one temperature."""

    prompt: Prompt
    plain: Generation
    drafted: Generation
    replayed_rounds: float  # expected rounds of drafting along the plain answer; nan if replay does not apply
    replayed_accepted: list[float]  # [K] expected rounds that accept at least d drafts; empty if replay does not apply
    gap: float | None  # at temperature 0, where the answers differ: the target's top-2 logit gap there; else None
    auto: Generation | None = None  # decoded with proposers/auto.py, if that is measured beside
    candidates: list[list[float]] | None = None  # as of PromptReplay

    @property
    def num_rounds(self) -> int:
        return len(self.drafted.accepted[0])

    @property
    def first_difference(self) -> int | None:
        """The first token of the drafted answer that is not the plain one's; None if they are the same."""
        return find_first_difference(self.plain.tokens[0], self.drafted.tokens[0])

    @property
    def num_emitted(self) -> int:
        """Tokens emitted by drafted rounds."""
        return sum(self.drafted.accepted[0]) + self.num_rounds


@dataclass(frozen=True)
class Method:
    """One way to draft, which is measured beside plain decoding of its target."""

    name: str
    target: Target
    proposer: Proposer
    drafting: Drafting
    baseline: str = FROZEN  # a name of the target's plain decoding; methods of one target share it
    head: Head | None = None  # to replay along plain answers; None for a proposer that is not trained

    def find_replayable_head(self, sampling: Sampling) -> Drafter | None:
        """The head, if replay applies."""
        head = self.head
        return head if isinstance(head, Drafter) and self.drafting.replayable(head, sampling) else None


@dataclass(frozen=True)
class MeasureSettings:
    """How prompts are decoded. stop_strings: beside the tokens of `stop`; seed: with the number of a prompt that of its random numbers

    batch: prompts decoded at once: when an answer ends, the next prompt takes its place. An answer's times are its share of
        those of the batch
    """

    sampling: Sampling
    stop: set[int]
    max_new_tokens: int
    seed: int = 0
    batch: int = 1
    stop_strings: StopStrings | None = None


def measure(
    methods: Sequence[Method],
    prompts: list[Prompt],
    settings: MeasureSettings,
    *,
    numbers: list[int] | None = None,
    source: str = "",
    progress: Callable[[list], Iterable] = iter,
) -> Iterator[list[dict[str, PromptResult]]]:
    """Decodes each prompt plainly and by each method, round by round in turn, after a warm-up.

    Yields the results of each group of prompts: for each prompt those of the methods, by name. The time of compiling is not
    counted. Proposers first forget what they learned from earlier batches.
    numbers: of the prompts, for random numbers and the order; None: 0, 1, 2 ..
    source: of the prompts, for messages
    progress: what the groups are taken from; it may end early
    Raises ValueError for a prompt that cannot be decoded, and for two methods of one name.
    """
    decoders = make_decoders(methods, settings)
    for decoder in decoders.values():
        check_prompts(decoder, prompts, settings.max_new_tokens, source=source)
    for decoder in decoders.values():
        generator = seeded_generator(decoder.target, settings.seed)
        decoder.generate([prompts[0].tokens], min(WARM_UP_TOKENS, settings.max_new_tokens), generator=generator)
    for method in methods:
        method.proposer.reset_history()
    numbered_prompts = list(zip(numbers or range(len(prompts)), prompts, strict=True))
    for pairs in progress(split_prompts(numbered_prompts, settings.batch)):
        group = [prompt for _, prompt in pairs]
        generations = decode_side_by_side(
            decoders,
            [prompt.tokens for prompt in group],
            settings.max_new_tokens,
            batch=settings.batch,
            seeds=[settings.seed + number for number, _ in pairs],
            rotation=pairs[0][0] // settings.batch,
        )
        yield [
            {
                method.name: compare_answers(
                    method,
                    prompt,
                    generations[method.baseline][index],
                    generations[method.name][index],
                    settings.sampling,
                )
                for method in methods
            }
            for index, prompt in enumerate(group)
        ]


def make_decoders(methods: Sequence[Method], settings: MeasureSettings) -> dict[str, Decoder]:
    """A decoder for each method, and one of plain decoding for each baseline, by their names."""
    decoders: dict[str, Decoder] = {}
    for method in methods:
        if method.name in decoders:
            raise ValueError(f"Two methods are called {method.name}: give them different names.")
        runner = decoders[method.baseline].runner if method.baseline in decoders else method.drafting.runner()
        decoder_options: dict[str, Any] = {"sampling": settings.sampling, "stop": settings.stop, "runner": runner}
        decoder_options["stop_strings"] = settings.stop_strings
        if method.baseline not in decoders:
            decoders[method.baseline] = Decoder(method.target, None, **decoder_options)
        decoders[method.name] = method.drafting.decoder(method.target, method.proposer, **decoder_options)
    return decoders


def check_prompts(decoder: Decoder, prompts: Iterable[Prompt], max_new_tokens: int, *, source: str = "") -> None:
    """Raises ValueError, naming the prompt, for one that cannot be decoded: before the others are. source: of all"""
    for prompt in prompts:
        try:
            decoder.check([prompt.tokens], max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{f'{source}, ' if source else ''}prompt {prompt.id}: {error}") from None


def split_prompts(items: list[Item], batch: int) -> list[list[Item]]:
    """What the methods decode side by side: single items; for a batch several batches, so that its rows are mostly full"""
    size = 1 if batch == 1 else (LARGE_GROUP_BATCHES if batch > LARGE_BATCH else GROUP_BATCHES) * batch
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
    """The answers of several decoders to prompts, at most `rows` of them at once, in the order of the prompts.

    After every round the decoder that has emitted the fewest tokens goes on. So all are at the same place of the same answers
    at nearly the same time, and other load of the machine affects all alike. All hold their caches at once.
    seeds: of each prompt's random numbers; turn: rotates which decoder begins
    """
    names = list(decoders)
    names = names[rotation % len(names) :] + names[: rotation % len(names)]

    def start_rounds(decoder: Decoder) -> Iterator[tuple[int, list[tuple[int, Generation]]]]:
        generator = lambda number: seeded_generator(decoder.target, seeds[number])
        return decoder.rounds(prompts, max_new_tokens, batch_size=batch, generator=generator)

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
    return {
        name: [generations[number] for number in range(len(prompts))]
        for name, generations in answers_of_decoder.items()
    }


def compare_answers(
    method: Method, prompt: Prompt, plain: Generation, drafted: Generation, sampling: Sampling
) -> PromptResult:
    """One prompt's result from its two answers."""
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
    """Random numbers on the target's device."""
    return torch.Generator(target.device).manual_seed(seed)


def find_first_difference(answer: list[int], other_answer: list[int]) -> int | None:
    """The place of the first token where two answers differ, from 0; None if they are the same."""
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
    """The gap between the target's two largest logits at the first token where two greedy answers differ; None if they
    are the same. A gap as small as the rounding of the dtype means a near tie, which rounding may decide either way."""
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
