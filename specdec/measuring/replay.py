"""tau of a drafter along answers that the target wrote, without decoding: texts in batches, and their counts."""

import collections
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from specdec.core import progress
from specdec.engines.engine_target import EngineTarget
from specdec.heads.base import Drafter
from specdec.measuring.report import PromptCounts
from specdec.target.fingerprint import describe_difference
from specdec.target.model import Target
from specdec.text import conversations
from specdec.unroll import replay

BATCH_TOKENS = 4096  # of prompts and answers that are replayed at once, padding included


@dataclass(frozen=True)
class Written:
    """What the target wrote to a prompt, at a temperature: token ids."""

    prompt: list[int]
    answer: list[int]
    temperature: float

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.answer)


def encode_written(tokenizer: PreTrainedTokenizerBase, row: dict) -> Written:
    """The last answer of a row of `reading.load_conversations`."""
    tokens = conversations.encode(tokenizer, row)
    start, stop = conversations.last_answer(tokens)
    return Written(tokens.tokens[:start], tokens.tokens[start:stop], float(row.get("temperature") or 0.0))


def replay_texts(
    drafter: Drafter, texts: Sequence[Written], *, depth: int, what: str, engine: EngineTarget | None = None
) -> list[replay.Replay]:
    """What the drafter does along each text. what: is shown

    depth: of the chain, or as many drafts as the drafter can make; engine: reads the texts in place of the target
    """
    depth = min(depth, drafter.depth or depth)
    lengths = [text.length for text in texts]
    found: dict[int, replay.Replay] = {}
    groups: list[tuple[float, list[int]]] = []  # of one temperature
    for temperature in sorted({text.temperature for text in texts}):
        same = [number for number, text in enumerate(texts) if text.temperature == temperature]
        groups += [(temperature, group) for group in batch_texts(same, lengths, drafter.target)]
    for temperature, numbers in progress.track(groups, what, unit="answers", size=lambda group: len(group[1])):
        pairs = [(texts[number].prompt, texts[number].answer) for number in numbers]
        output = engine.read(drafter, pairs) if engine else None
        done = replay.replays(drafter, pairs, depth=depth, temperature=temperature, output=output)
        found |= dict(zip(numbers, done, strict=True))
    return [found[number] for number in range(len(texts))]


def count_replays(judged: Iterable[replay.Replay]) -> list[PromptCounts]:
    """What tau of each text is made of. judged: by `replay_texts`"""
    return [
        PromptCounts(number, number + float(accepted.sum())) for number, accepted in (each.counted for each in judged)
    ]


def sort_by_length(numbers: Iterable[int], lengths: Sequence[int]) -> list[int]:
    """The longest first"""
    return sorted(numbers, key=lambda number: (-lengths[number], number))


def batch_texts(numbers: Iterable[int], lengths: Sequence[int], target: Target) -> list[list[int]]:
    """Numbers of texts that are read together, of at most BATCH_TOKENS with the padding. lengths: of all texts, in tokens"""
    most = BATCH_TOKENS if target.rotary_boundary is None else 0  # of LongRoPE one: a batch has one set of angles
    found: list[list[int]] = []
    for number in sort_by_length(numbers, lengths):  # the first of a batch is its longest
        if found and (1 + len(found[-1])) * lengths[found[-1][0]] <= most:
            found[-1].append(number)
        else:
            found.append([number])
    return found


def warn_of_writers(writers: Iterable[str | None], target: Target) -> None:
    """Warns of rows that were written by other weights than the target's.

    writers: fingerprints of what wrote each row; empty or None: not known
    """
    counts, identity = collections.Counter(writers), target.identity
    known = {writer: num for writer, num in counts.items() if writer and identity.compares(writer)}
    others = {writer: num for writer, num in known.items() if not identity.matches(writer)}
    if others:
        what = f"{sum(others.values())} of {counts.total()} rows were written by {{}} weights"
        clause = describe_difference(what, max(others, key=lambda each: others[each]), identity.text)
        warnings.warn(f"{clause}: let it answer the prompts itself (specdec answer), or expect less.", stacklevel=2)
