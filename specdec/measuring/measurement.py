"""Decoding as measurement: every prompt is decoded plainly and with drafts, round by round in turn, under the same settings."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from specdec.core.generation import Generation
from specdec.core.grammar import Constraint, Grammar, Grammars, unpack
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.heads.base import Drafter, Head
from specdec.proposers.base import Proposer
from specdec.target.model import Target
from specdec.unroll import replay

BATCHES = 2  # whose prompts the ways decode side by side, before the next ones begin
Item = TypeVar("Item")


@dataclass(frozen=True)
class Prompt:
    id: str
    category: str
    tokens: list[int]
    tags: tuple[str, ...] = ()
    grammar: Grammar | None = None  # that the answer is to follow


@dataclass(frozen=True)
class PromptReplay:
    """One prompt, replayed along an answer that the target wrote."""

    prompt: Prompt
    replayed_rounds: float  # expected rounds of drafting along the answer
    replayed_accepted: list[float]  # [K] expected rounds that accept at least d drafts


@dataclass(frozen=True)
class PromptResult:
    """One prompt, decoded plainly and with drafts at one temperature."""

    prompt: Prompt
    plain: Generation
    drafted: Generation
    replayed_rounds: float  # expected rounds of drafting along the plain answer; nan if replay does not apply
    replayed_accepted: list[float]  # [K] expected rounds that accept at least d drafts; empty if replay does not apply
    gap: float | None  # at temperature 0, where the answers differ: the target's top-2 logit gap there; else None
    auto: Generation | None = None  # decoded with proposers/auto.py, if that is measured beside

    @property
    def num_rounds(self) -> int:
        return len(self.drafted.accepted[0])

    @property
    def first_difference(self) -> int | None:
        """The first token of the drafted answer that is not the plain one's; None if they are the same."""
        return first_difference(self.plain.tokens[0], self.drafted.tokens[0])

    @property
    def num_emitted(self) -> int:
        """Tokens emitted by drafted rounds."""
        return sum(self.drafted.accepted[0]) + self.num_rounds


def measure(
    target: Target,
    proposer: Proposer,
    drafting: Drafting,
    prompts: list[Prompt],
    *,
    replayed: Head | None,
    sampling: Sampling,
    max_new_tokens: int,
    stop: set[int],
    seed: int,
    batch: int = 1,
    numbers: list[int] | None = None,
    auto: Proposer | None = None,
    grammars: Grammars | None = None,
    progress: Callable[[list], Iterable] = iter,
) -> list[PromptResult]:
    """Decodes each prompt plainly and with drafts, round by round in turn, after a warm-up.

    The time of compiling is not counted. The proposer first forgets what it learned from earlier batches.
    replayed: the drafter to replay along the plain answers, if replay applies to these settings
    batch: prompts decoded at once: when an answer ends, the next prompt takes its place. An answer's times are its share of
        those of the batch
    numbers: of the prompts, for random numbers and the order; None: 0, 1, 2 ..
    auto: decodes the prompts too, if given: how much to draft is then chosen every round
    grammars: compiles those of prompts; None: no answer follows one
    progress: what the groups of prompts are taken from that the ways decode in turn; it may end early
    Raises ValueError for a batch below 1.
    """
    if batch < 1:
        raise ValueError(f"batch={batch} must be at least 1.")
    runner = drafting.runner()
    decoders = {
        "drafted": drafting.decoder(target, proposer, sampling=sampling, stop=stop, runner=runner),
        "plain": Decoder(target, None, sampling=sampling, stop=stop, runner=runner),
    }
    if auto is not None:
        decoders["auto"] = drafting.decoder(target, auto, sampling=sampling, stop=stop, runner=runner)
    check_prompts(decoders["drafted"], prompts, max_new_tokens)
    for name in decoders:
        generator = seeded_generator(target, seed)
        decoders[name].generate([prompts[0].tokens], min(8, max_new_tokens), generator=generator)
    for each in (proposer, *([auto] if auto else [])):
        each.forget()

    replays = isinstance(replayed, Drafter) and drafting.replayable(replayed, sampling)
    # Replay knows the target's free law only; at temperature 0 a draft counts if it is the answer's next token, by any law
    replays = replays and (sampling.greedy or grammars is None)
    numbered = list(zip(numbers or range(len(prompts)), prompts, strict=True))
    results = []
    for pairs in progress(turns(numbered, batch)):
        group, seeds = [prompt for _, prompt in pairs], [seed + number for number, _ in pairs]
        tokens, turn = [prompt.tokens for prompt in group], pairs[0][0] // batch
        constraint = constrain_each(grammars, group)
        generations = answers(
            decoders, tokens, max_new_tokens, rows=batch, seeds=seeds, turn=turn, constraint=constraint
        )
        chosen: Sequence[Generation | None] = generations.get("auto", [None] * len(group))
        for number, (prompt, plain, drafted, by_auto) in enumerate(
            zip(group, generations["plain"], generations["drafted"], chosen)
        ):
            results.append(
                replace(
                    compare(
                        target,
                        prompt,
                        plain,
                        drafted,
                        replayed=replayed if isinstance(replayed, Drafter) and replays else None,
                        depth=drafting.depth,
                        sampling=sampling,
                        constraint=constraint(number),
                    ),
                    auto=by_auto,
                )
            )
    return results


def check_prompts(decoder: Decoder, prompts: Iterable[Prompt], max_new_tokens: int, *, source: str = "") -> None:
    """Raises ValueError, naming the prompt, for one that cannot be decoded: now, not after the others were. source: of all"""
    for prompt in prompts:
        try:
            decoder.check([prompt.tokens], max_new_tokens)
        except ValueError as error:
            raise ValueError(f"{f'{source}, ' if source else ''}prompt {prompt.id}: {error}") from None


def constrain_each(grammars: Grammars | None, prompts: list[Prompt]) -> Callable[[int], Constraint | None]:
    """For Decoder.answers: the constraint of each prompt's answer, which is new with every call."""
    return lambda number: grammars.constraint(prompts[number].grammar) if grammars else None


def turns(items: list[Item], batch: int) -> list[list[Item]]:
    """What the ways decode side by side: single items; for a batch several batches, so that its rows are mostly full"""
    size = 1 if batch == 1 else BATCHES * batch
    num = max(1, round(len(items) / size))
    borders = [place * len(items) // num for place in range(num + 1)]
    return [items[start:end] for start, end in zip(borders, borders[1:])]


def answers(
    decoders: Mapping[str, Decoder],
    prompts: list[list[int]],
    max_new_tokens: int,
    *,
    rows: int,
    seeds: list[int],
    turn: int = 0,
    constraint: Callable[[int], Constraint | None] = lambda number: None,
) -> dict[str, list[Generation]]:
    """The answers of several decoders to prompts, at most `rows` of them at once, in the order of the prompts.

    After every round that decoder goes on which has emitted the fewest tokens. So all are at the same place of the same answers
    at nearly the same time, and what else the machine does meets all of them. All hold their caches at once.
    seeds: of each prompt's random numbers; turn: rotates which decoder begins; constraint: see Decoder.answers
    """
    names = list(decoders)
    names = names[turn % len(names) :] + names[: turn % len(names)]

    def begin(decoder: Decoder) -> Iterator[tuple[int, list[tuple[int, Generation]]]]:
        generator = lambda number: seeded_generator(decoder.target, seeds[number])
        return decoder.rounds(prompts, max_new_tokens, rows=rows, generator=generator, constraint=constraint)

    running = {name: begin(decoders[name]) for name in names}
    emitted = dict.fromkeys(names, 0)
    found: dict[str, dict[int, Generation]] = {name: {} for name in decoders}
    while running:
        name = min(running, key=lambda name: emitted[name])
        round_ = next(running[name], None)
        if round_ is None:
            del running[name]
        else:
            emitted[name] += round_[0]
            found[name] |= dict(round_[1])
    return {name: [answer[number] for number in range(len(prompts))] for name, answer in found.items()}


def compare(
    target: Target,
    prompt: Prompt,
    plain: Generation,
    drafted: Generation,
    *,
    replayed: Drafter | None,
    depth: int,
    sampling: Sampling,
    constraint: Constraint | None = None,
) -> PromptResult:
    """One prompt's result from its two answers. replayed: the drafter to replay along the plain answer, a chain of
    `depth`; None if replay does not apply. constraint: of the grammar that they follow, at their beginning"""
    rounds, accepted, gap = float("nan"), [], None
    if replayed is not None:
        chances = replay.acceptance(
            replayed, prompt.tokens, plain.tokens[0], depth=depth, temperature=sampling.temperature
        )
        rounds, counts = replay.rounds(chances)
        accepted = counts.tolist()
    if sampling.greedy:
        gap = top2_gap(target, prompt.tokens, plain.tokens[0], drafted.tokens[0], sampling, constraint)
    return PromptResult(prompt, plain, drafted, rounds, accepted, gap)


def seeded_generator(target: Target, seed: int) -> torch.Generator:
    """Random numbers on the target's device."""
    return torch.Generator(target.device).manual_seed(seed)


def first_difference(answer: list[int], other: list[int]) -> int | None:
    """The place of the first token where two answers differ, from 0; None if they are the same."""
    pairs = enumerate(itertools.zip_longest(answer, other))
    return next((place for place, (own, others) in pairs if own != others), None)


def top2_gap(
    target: Target,
    prompt: list[int],
    answer: list[int],
    other: list[int],
    sampling: Sampling,
    constraint: Constraint | None = None,
) -> float | None:
    """The gap between the target's two largest logits at the first token where two greedy answers differ; None if they
    are the same. A gap as small as the rounding of the dtype means a near tie, which rounding may decide either way."""
    same = first_difference(answer, other)
    if same is None:
        return None
    tokens = torch.tensor([prompt + answer[:same]], device=target.device)
    logits = target.logits(target.read(tokens, ()).final[:, -1:])  # [1, 1, V]
    before = torch.zeros_like(logits, dtype=torch.bool).scatter_(2, tokens[None], True)
    logits = sampling.penalise(logits, before)
    if constraint:
        constraint.take(answer[:same])
        allowed = unpack([[constraint.following()]], logits.shape[-1], logits.device)
        logits = logits.masked_fill(~allowed, -torch.inf)
    top = logits[0, 0].topk(2).values
    return float(top[0] - top[1])
