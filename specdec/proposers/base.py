"""The `Proposer` interface."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from specdec.cache import RowCache
from specdec.sampling import Sampling
from specdec.tree import Tree


def last_of(values: Tensor, num: Tensor) -> Tensor:
    """values [B, S, ...], of which the first num[b] count in row b -> [B, ...] the last of those"""
    return values[torch.arange(len(num), device=num.device), num - 1]


class Proposer(ABC):
    """Proposes a tree of drafts for every row of a batch; told after each round what was committed.

    The order of calls: share, begin, commit, then for each round propose, watch (if it watches) and commit; then finish.
    """

    target_layers: tuple[int, ...]  # hidden states it wants in `commit`
    depth: int  # the deepest node it may propose
    watches = False  # whether it wants to know what the target said at every node
    rewinds = False  # whether it has marks, so that it can draft for a cascade (proposers/cascade.py)
    varies = False  # whether trees differ in size from round to round: filled up, they come in few sizes to compile

    @property
    def compile_seconds(self) -> float:
        """What compiling has taken so far."""
        return 0.0

    def share(self, cache: RowCache) -> None:  # noqa: B027  # for most there is nothing to do
        """The target's cache of the next batch, for who drafts with the target itself.

        `propose` may write entries behind the committed ones, and must leave `cache.pending` at 0.
        """

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

    def watch(self, tree: Tree, choices: Tensor) -> None:
        """choices [B, N]: the target's likeliest token after each node of the tree that was just verified.

        tree: the one that was proposed, perhaps with more nodes behind its own. Called before `commit`, if `watches`.
        """
        raise TypeError(f"{type(self).__name__} does not watch.")

    def finish(self, nums: list[int]) -> None:  # noqa: B027  # for most there is nothing to do
        """The batch has ended: row b's answer is the first nums[b] tokens behind its prompt, whatever else was committed."""

    def forget(self) -> None:  # noqa: B027  # for most there is nothing to do
        """What was learned from earlier batches: figures then do not depend on what was decoded before."""

    def mark(self) -> object:
        """The state after a `commit`, for `rewind`, if it `rewinds`."""
        raise TypeError(f"{type(self).__name__} has no marks.")

    def rewind(self, mark: object) -> None:
        """Forgets everything since `mark`, of the same batch; what was proposed since too."""
        raise TypeError(f"{type(self).__name__} has no marks.")
