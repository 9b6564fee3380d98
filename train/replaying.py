"""Replay of many answers: those of similar lengths in one batch."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import Tensor

from specdec.heads.base import Drafter
from specdec.measuring.report import PromptCounts
from specdec.target.model import Target
from specdec.unroll import replay
from train import progress

BATCH_TOKENS = 4096  # of prompts and answers that are replayed at once, padding included


@dataclass(frozen=True)
class Written:
    """What the target wrote to a prompt, at a temperature: token ids."""

    prompt: list[int]
    answer: list[int]
    temperature: float


def rounds(drafter: Drafter, texts: Sequence[Written], *, depth: int, what: str) -> list[tuple[float, Tensor]]:
    """For each text what `specdec.unroll.replay.rounds` gives: the number of rounds, and accepted [K]. what: is shown

    depth: of the chain, or as many drafts as the drafter can make
    """
    depth = min(depth, drafter.depth or depth)
    lengths = [len(text.prompt) + len(text.answer) for text in texts]
    found: dict[int, tuple[float, Tensor]] = {}
    groups: list[tuple[float, list[int]]] = []  # of one temperature
    for temperature in sorted({text.temperature for text in texts}):
        same = [number for number, text in enumerate(texts) if text.temperature == temperature]
        groups += [(temperature, group) for group in batches(same, lengths, drafter.target)]
    for temperature, numbers in progress.track(groups, what, unit="answers", size=lambda group: len(group[1])):
        pairs = [(texts[number].prompt, texts[number].answer) for number in numbers]
        for number, accept in zip(
            numbers, replay.acceptances(drafter, pairs, depth=depth, temperature=temperature), strict=True
        ):
            found[number] = replay.rounds(accept)
    return [found[number] for number in range(len(texts))]


def prompt_counts(judged: Sequence[tuple[float, Tensor]]) -> list[PromptCounts]:
    """What tau of each text is made of. judged: by `rounds`"""
    return [PromptCounts(number, number + float(accepted.sum())) for number, accepted in judged]


def by_length(numbers: Iterable[int], lengths: Sequence[int]) -> list[int]:
    """The longest first"""
    return sorted(numbers, key=lambda number: (-lengths[number], number))


def batches(numbers: Iterable[int], lengths: Sequence[int], target: Target) -> list[list[int]]:
    """Numbers of texts that are read together, of at most BATCH_TOKENS with the padding. lengths: of all texts, in tokens"""
    most = BATCH_TOKENS if target.rotary_boundary is None else 0  # of LongRoPE one: a batch has one set of angles
    found: list[list[int]] = []
    for number in by_length(numbers, lengths):  # the first of a batch is its longest
        if found and (1 + len(found[-1])) * lengths[found[-1][0]] <= most:
            found[-1].append(number)
        else:
            found.append([number])
    return found
