"""How much drafts gain at each batch size: groups of prompts, and the figures of their decodings."""

import itertools
import statistics
from dataclasses import asdict, dataclass
from typing import TypeVar

from specdec.core.generation import Generation

Item = TypeVar("Item")


@dataclass(frozen=True)
class BatchFigures:
    """Decodings of groups of one size, added up. The prompts' passes, with the first token of each answer, and compiling
    are left out."""

    tokens_per_second: float  # of all rows together
    ms_per_round: float
    ms_per_token: float  # of one row
    tau: float

    @classmethod
    def of(cls, generations: list[Generation]) -> "BatchFigures":
        seconds = sum(generation.seconds for generation in generations)
        num_tokens = sum(len(row) - 1 for generation in generations for row in generation.tokens)
        num_rounds = sum(len(accepted) for generation in generations for accepted in generation.accepted)
        return cls(
            tokens_per_second=num_tokens / seconds,
            ms_per_round=1e3 * seconds / sum(len(generation.drafted) for generation in generations),
            ms_per_token=1e3 * seconds * len(generations[0].tokens) / num_tokens,
            tau=num_tokens / num_rounds,
        )


@dataclass(frozen=True)
class BatchComparison:
    """Plain and drafted decoding of the same groups."""

    plain: BatchFigures
    drafted: BatchFigures
    ratios: list[float]  # of tokens/s, drafted over plain, of each group
    speedup: float  # their median

    @classmethod
    def of(cls, plain: list[Generation], drafted: list[Generation]) -> "BatchComparison":
        """plain, drafted: the decodings of each group, next to each other in time.

        Groups in which an answer saw no round are left out. Raises ValueError if none is left.
        """
        pairs = [pair for pair in zip(plain, drafted, strict=True) if all(generation.drafted for generation in pair)]
        if not pairs:
            raise ValueError("All answers ended with their first tokens, before any round.")
        ratios = [
            BatchFigures.of([with_drafts]).tokens_per_second / BatchFigures.of([without]).tokens_per_second
            for without, with_drafts in pairs
        ]
        return cls(
            plain=BatchFigures.of([without for without, _ in pairs]),
            drafted=BatchFigures.of([with_drafts for _, with_drafts in pairs]),
            ratios=ratios,
            speedup=statistics.median(ratios),
        )

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, document: dict) -> "BatchComparison":
        sums = {name: BatchFigures(**document[name]) for name in ("plain", "drafted")}
        return cls(**document | sums)


def group_prompts(prompts: list[Item], size: int) -> list[list[Item]]:
    """Groups of `size` prompts, each spread over the list, which is repeated if it is shorter than one group."""
    num = max(1, len(prompts) // size)
    rows = list(itertools.islice(itertools.cycle(prompts), num * size))
    return [rows[first::num] for first in range(num)]
