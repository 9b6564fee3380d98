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
    """[B, ...]: the last value that counts in each row of values [B, S, ...]. num [B]: number of values that count"""
    return values[torch.arange(len(num), device=num.device), num - 1]


class Opening(NamedTuple):
    """R prompts that join a batch, and the first token of each answer."""

    tokens: Tensor  # [R, T] prompts, right-padded
    num: Tensor  # [R] lengths of the prompts
    following: Tensor  # [R, T] token after each of the prompt's tokens
    features: Tensor  # [R, T, F*D] hidden states of the prompt's tokens
    counts: list[int]  # `num` on the host


class Proposer(ABC):
    """Proposes a tree of drafts for every row of a batch.

    The order of calls: attach_cache, begin, commit; for each round limit, constrain, propose and commit;
    then finish.
    """

    target_layers: tuple[int, ...]  # numbers of the hidden states that `commit` needs
    depth: int  # largest depth of a proposed node
    nodes = 64  # nodes for which caches make room; larger trees make them grow
    linear = False  # whether all trees are chains
    rewinds = False  # whether it has `mark` and `rewind`, which drafting for a cascade needs (experiments/cascade)
    selects = False  # whether it has `select` and `replace`, so that rows can leave its batches, and others join
    varies = False  # whether the size of its trees changes from round to round; for compiling, they are padded

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling so far."""
        return 0.0

    def attach_cache(self, cache: RowCache) -> None:  # noqa: B027  # optional
        """Gives the target's cache of the next batch to proposers that draft with the target itself.

        `propose` may write entries behind the committed ones, and must then call `cache.drop_pending`.
        """

    @abstractmethod
    def begin(self, tokens: Tensor, num: Tensor) -> None:
        """Starts a new batch. tokens [B, T]: prompts, right-padded; num [B]: their lengths."""

    @abstractmethod
    def commit(self, tokens: Tensor, features: Tensor, num: Tensor, counts: list[int]) -> None:
        """Takes in newly committed tokens: the first num[b] of S entries count in row b, none in a finished row.

        tokens [B, S], features [B, S, F*D]: each token follows the position of its feature, as the slot rule pairs them
        num [B], `counts` on the host: number of entries that count
        The first call after `begin` brings the prompt from its second token on. The last token that counts is the
        newest one, the root of the next tree.
        """

    def limit(self, tokens_left: list[int], ends: frozenset[int]) -> None:  # noqa: B027  # optional
        """Tells before `propose` the number of tokens that each answer may still have, and the tokens that end it."""

    def constrain(self, constraints: list[Constraint | None]) -> None:  # noqa: B027  # optional
        """Tells before `propose` the state of each answer's grammar, at its newest token; None: it is free.

        Drafts that the grammar refuses may be proposed nevertheless: they are left out, or not accepted.
        """

    @abstractmethod
    def propose(self, sampling: AnySampling, generator: Randomness) -> Tree:
        """A tree whose root is each row's newest committed token."""

    def select(self, rows: list[int], answer_lengths: list[int]) -> None:
        """Goes on with these rows of the batch only, in this order. Called after a `commit`, only if `selects`.

        answer_lengths [B]: tokens of each row's answer so far, as for `finish`; those of the rows that leave have ended
        A row may come several times: then `replace` follows for all but the first.
        """
        raise TypeError(f"{type(self).__name__} does not select rows.")

    def replace(self, rows: list[int], answer_lengths: list[int], opening: Opening) -> None:
        """Puts other prompts into these rows, in their order. Called after a `commit`, only if `selects`.

        answer_lengths [B]: tokens of each row's answer, see `select`; 0 for a row that only held the place
        """
        raise TypeError(f"{type(self).__name__} does not replace rows.")

    def attach_verifier(self, verifier: Verifier, sampling: AnySampling) -> None:  # noqa: B027  # optional
        """Tells which verifier its trees will meet.

        Called when a decoder is made with this proposer, when a batch begins, and between rounds if the kind of the
        distributions (`Sampling.kind`) changes.
        """

    def record_cost(self, cost: RoundCost) -> None:  # noqa: B027  # optional
        """Tells the round's seconds after `commit`, unless something was compiled in it."""

    def finish(self, answer_lengths: list[int]) -> None:  # noqa: B027  # optional
        """Ends the batch. Row b's answer is the first answer_lengths[b] tokens after its prompt.

        More tokens may have been committed. The rows are those of the last `select`.
        """

    def reset_history(self) -> None:  # noqa: B027  # optional
        """Drops all that was learned from earlier batches, so that measurements do not depend on them."""

    def steady(self) -> "Proposer | None":
        """The proposer to use where a row's answer must follow from the row's own random numbers.

        It drafts from the row's text alone, as many drafts in every round, whatever is decoded in other rows. None:
        there is none, so nothing drafts.
        """
        return None

    def mark(self) -> Any:
        """The state after a `commit`, for `rewind`. Only called if `rewinds`."""
        raise TypeError(f"{type(self).__name__} does not rewind.")

    def rewind(self, mark: Any) -> None:
        """Restores the state of `mark`, made in the same batch. Only called if `rewinds`."""
        raise TypeError(f"{type(self).__name__} does not rewind.")
