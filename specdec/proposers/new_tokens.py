"""Tokens that a drafter has not read yet, and the state from which a device makes a round alone."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from specdec.core.devices import round_up_power, upload_values


class NewTokens(NamedTuple):
    """Tokens that a drafter has not read yet: the first num[b] of S entries count in row b."""

    tokens: Tensor  # [B, S]
    features: Tensor  # [B, S, F*D]
    num: Tensor  # [B]
    counts: list[int]  # `num` on the host


@dataclass(frozen=True)
class RoundState:
    """What a round of B rows reads of the drafter's state."""

    lengths: Tensor  # [B] entries of the drafter's cache
    tokens: Tensor  # [B, P] committed tokens that the drafter has not read yet
    features: Tensor  # [B, P, F*D] their features
    num: Tensor  # [B] number of these tokens that count
    carried: list[Tensor]  # see `HeadProposer.begin`

    def list_tensors(self) -> list[Tensor]:
        return [self.lengths, self.tokens, self.features, self.num, *self.carried]

    def clone(self) -> "RoundState":
        lengths, tokens, features, num, *carried = (tensor.clone() for tensor in self.list_tensors())
        return RoundState(lengths, tokens, features, num, carried)

    def copy_(self, source: "RoundState") -> None:
        """Copies the values of another state into these tensors."""
        for tensor, value in zip(self.list_tensors(), source.list_tensors(), strict=True):
            tensor.copy_(value)


class Committed(NamedTuple):
    """The arguments of a `commit`, whose rows may have moved since."""

    new: NewTokens  # P rows
    rows: list[int | None]  # [B] row of `new` for each row of the batch; None: a row that was opened later

    def select(self, rows: list[int]) -> "Committed":
        """The same for these rows of the batch."""
        return self._replace(rows=[self.rows[row] for row in rows])

    def without(self, rows: list[int]) -> "Committed":
        """The same without the tokens of these rows of the batch."""
        return self._replace(rows=[None if row in rows else source for row, source in enumerate(self.rows)])


def join_committed(commits: list[Committed], *, length: int | None) -> NewTokens:
    """Joins the tokens of several commits.

    length: tokens of each row, padded, or a power of two for more, so that few shapes occur; None: the longest row
    """
    first, rows = commits[0]
    in_order = len(commits) == 1 and rows == list(range(len(first.counts)))
    if in_order and length in (None, first.tokens.shape[1]):
        return first
    token_places = [list[int]() for _ in rows]  # places of each row's tokens in the flat tokens of all commits
    start, device = 0, first.tokens.device
    for new, source_rows in commits:
        num_rows, columns = new.tokens.shape
        for places, source_row in zip(token_places, source_rows):
            if source_row is not None:
                places += range(start + source_row * columns, start + source_row * columns + new.counts[source_row])
        start += num_rows * columns
    counts = list(map(len, token_places))
    length = _round_length(max(counts), length)
    token_index = upload_values([places + [0] * (length - len(places)) for places in token_places], device)  # [B, S]
    tokens = torch.cat([new.tokens.flatten() for new, _ in commits])
    features = torch.cat([new.features.flatten(0, 1) for new, _ in commits])
    return NewTokens(tokens[token_index], features[token_index], upload_values(counts, device), counts)


def _round_length(longest: int, length: int | None) -> int:
    """The padded length of rows, see `join_committed`."""
    if length is None:
        return longest
    return length if longest <= length else round_up_power(longest)
