"""The `Proposer` interface."""

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.core.cache import RowCache
from specdec.core.constraint import Constraint
from specdec.core.generation import RoundCost
from specdec.core.sampling import AnySampling, Randomness
from specdec.core.tree import Tree
from specdec.target.verifier import Verifier


def select_last(values: Tensor, num: Tensor) -> Tensor:
    """values [B, S, ...], of which the first num[b] count in row b -> [B, ...] the last one that counts"""
    return values[torch.arange(len(num), device=num.device), num - 1]


class Opening(NamedTuple):
    """Prompts that begin, and the first token of each answer."""

    tokens: Tensor  # [R, T] the prompts, right-padded
    num: Tensor  # [R] their lengths
    following: Tensor  # [R, T] the token after each of the prompt's
    features: Tensor  # [R, T, F*D] the prompt's own
    counts: list[int]  # `num` on the host


class Proposer(ABC):
    """Proposes a tree of drafts for every row of a batch.

    The order of calls: attach_cache, begin, commit; for each round limit, constrain, propose, watch (only if `watches`) and commit; then finish.
    """

    target_layers: tuple[int, ...]  # the hidden states that `commit` needs
    depth: int  # the largest depth of a proposed node
    nodes = 64  # of a tree, mostly: caches have room for so many
    linear = False  # whether all its trees are chains
    watches = False  # whether `watch` is to be called
    rewinds = False  # whether it has `mark` and `rewind`, which drafting for a cascade needs (proposers/cascade.py)
    selects = False  # whether it has `select` and `replace`: rows leave its batches, and others join
    varies = False  # whether the size of its trees changes from round to round: they are filled up for compiling

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return 0.0

    def attach_cache(self, cache: RowCache) -> None:  # noqa: B027  # most proposers have nothing to do
        """Gives the target's cache of the next batch to proposers that draft with the target itself.

        `propose` may write entries behind the committed ones, and must then call `cache.drop_pending`.
        """

    @abstractmethod
    def begin(self, tokens: Tensor, num: Tensor) -> None:
        """Starts a new batch. tokens [B, T]: prompts, right-padded; num [B]: their lengths."""

    @abstractmethod
    def commit(self, tokens: Tensor, features: Tensor, num: Tensor, counts: list[int]) -> None:
        """Takes in newly committed tokens: the first num[b] of S entries count in row b, none in a row whose answer has
        ended. counts: `num` on the host.

        tokens [B, S], features [B, S, F*D]: each token follows the position of its feature, as the slot rule pairs them.
        The first call after `begin` brings the prompt from its second token on. The last token that counts is the
        newest one, the root of the next tree.
        """

    def limit(self, tokens_left: list[int], ends: frozenset[int]) -> None:  # noqa: B027  # most proposers have nothing to do
        """Tells before `propose` how many tokens each row's answer may still have, and which tokens end it."""

    def constrain(self, constraints: list[Constraint | None]) -> None:  # noqa: B027  # most proposers have nothing to do
        """Tells before `propose` which grammar each row's answer follows, at its newest token; None: it is free.

        What the grammar does not allow may be proposed nevertheless: it is left out, or refused."""

    @abstractmethod
    def propose(self, sampling: AnySampling, generator: Randomness) -> Tree:
        """A tree whose root is each row's newest committed token."""

    def watch(self, tree: Tree, choices: Tensor) -> None:  # noqa: B027  # most proposers have nothing to do
        """Called after a tree was verified, before `commit`, if `watches`.

        tree: the proposed one, perhaps filled up; choices [B, N]: the target's most likely token after each node
        """

    def select(self, rows: list[int], answer_lengths: list[int]) -> None:
        """Goes on with these rows of the batch only, in this order. Called after a `commit`, only if `selects`.

        nums: of each row so far, as for `finish`, the tokens of its answer; those of the rows that leave have ended
        A row may come several times: then `replace` follows for all but the first.
        """
        raise TypeError(f"{type(self).__name__} does not select rows.")

    def replace(self, rows: list[int], answer_lengths: list[int], opening: Opening) -> None:
        """Other prompts take the places of these rows, in their order. Called after a `commit`, only if `selects`.

        nums: of each row, as for `select`; 0 for one that only held the place
        """
        raise TypeError(f"{type(self).__name__} does not replace rows.")

    def attach_verifier(self, verifier: Verifier, sampling: AnySampling) -> None:  # noqa: B027  # most proposers have nothing to do
        """Tells what will verify its trees, once a decoder is made with this proposer, when a batch begins, and between rounds
        when distributions of another kind (`Sampling.kind`) are asked for."""

    def record_cost(self, cost: RoundCost) -> None:  # noqa: B027  # most proposers have nothing to do
        """Tells, after `commit`, what the round took, unless something was compiled in it."""

    def finish(self, answer_lengths: list[int]) -> None:  # noqa: B027  # most proposers have nothing to do
        """Ends the batch: row b's answer is the first nums[b] tokens behind its prompt, even if more were committed.

        The rows are those of the last `select`.
        """

    def reset_history(self) -> None:  # noqa: B027  # most proposers have nothing to do
        """Forgets everything learned from earlier batches, so that measurements do not depend on them."""

    def steady(self) -> "Proposer | None":
        """What drafts in its place where a row's text must follow from the row's random numbers, whatever was or is decoded beside it:
        from the row's text alone, as many drafts in every round. None: nothing that it has, so nothing drafts."""
        return None

    def mark(self) -> Any:
        """The state after a `commit`, for `rewind`. Only called if `rewinds`."""
        raise TypeError(f"{type(self).__name__} does not rewind.")

    def rewind(self, mark: Any) -> None:
        """Restores the state of `mark`, made in the same batch. Only called if `rewinds`."""
        raise TypeError(f"{type(self).__name__} does not rewind.")
