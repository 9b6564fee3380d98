"""The `Proposer` interface."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from specdec.sampling import Sampling
from specdec.tree import Tree


class Proposer(ABC):
    """Proposes a tree of drafts for every row of a batch; told after each round what was committed."""

    target_layers: tuple[int, ...]  # hidden states it wants in `commit`
    depth: int  # the deepest node it may propose

    @property
    def compile_seconds(self) -> float:
        """What compiling has taken so far."""
        return 0.0

    @abstractmethod
    def begin(self, tokens: Tensor, num: Tensor) -> None:
        """A new batch. tokens [B, T]: prompts, right-padded; num [B]: their lengths. Forgets the last batch."""

    @abstractmethod
    def commit(self, tokens: Tensor, features: Tensor, num: Tensor, counts: list[int]) -> None:
        """What was committed since: the first num[b] of S entries count in row b; counts: num, on the host.

        tokens [B, S]: each the token that follows the position of features [B, S, F*D], which is the pair that the
        slot rule joins. The first call after `begin` brings the whole prompt; its last token, and every later call's,
        is the newest one, the root of the next tree.
        """

    @abstractmethod
    def propose(self, sampling: Sampling, generator: torch.Generator | None) -> Tree:
        """A tree whose root is each row's newest committed token."""
