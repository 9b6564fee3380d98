"""Who attends to whom. Every mask is boolean, True where a query may see a key (docs/architecture.md)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core import devices
from specdec.core.varlen import Segments


def causal_mask(num: int, device) -> Tensor:
    """[num, num]: each entry sees itself and those before it."""
    return torch.ones(num, num, dtype=torch.bool, device=device).tril()


def document_mask(index: Tensor, *, lag: int = 0) -> Tensor:
    """index [B, T], the document of each entry (-1: none) -> [B, 1, T, T]: causal inside each document.

    lag: an entry sees itself, and those that stand at least `lag` before it. An entry of no document sees itself only: a
        row without any key would be a softmax over nothing.
    """
    num = index.shape[1]
    same = (index[:, :, None] == index[:, None, :]) & (index >= 0)[:, None, :]  # [B, T, T]
    mask = same & causal_mask(num, index.device).tril(-lag) | torch.eye(num, dtype=torch.bool, device=index.device)
    return mask[:, None]


def committed_mask(lengths: Tensor, visible: int) -> Tensor:
    """lengths [B] -> [B, 1, 1, visible]: only the committed entries are seen."""
    return (torch.arange(visible, device=lengths.device) < lengths[:, None])[:, None, None]


def pending_mask(ancestors: Tensor, lengths: Tensor, visible: int) -> Tensor:
    """The mask of queries that stand behind each row's committed entries.

    ancestors [B, S, P] (or [S, P]): which of the row's P pending entries each of the S queries sees (itself included)
    lengths [B]: committed entries, all of them seen; visible: entries of the cache that the pass reads
    -> [B, 1, S, visible]
    """
    if ancestors.dim() == 2:
        ancestors = ancestors.expand(lengths.shape[0], -1, -1)
    offset = torch.arange(visible, device=lengths.device) - lengths[:, None]  # [B, C], >= 0 behind the committed
    num_pending = ancestors.shape[2]
    inside = (offset >= 0) & (offset < num_pending)  # [B, C]
    column = offset.clamp(0, num_pending - 1)[:, None].expand(-1, ancestors.shape[1], -1)  # [B, S, C]
    return ((offset < 0)[:, None] | (inside[:, None] & ancestors.gather(2, column)))[:, None]


def jacobi_mask(index: Tensor, starts: Tensor, num: int) -> Tensor:
    """The mask of M blocks of `num` tokens behind a text of T tokens. Each block continues the text before its start.

    index [B, T]: documents, as in `documents`; starts [B, M]: where in the row each block's first token would stand.
    Token k of block m is entry k * M + m. So the order is the same whether blocks are read at once or token by token:

        keys     x_0 .. x_(T-1)                     | k=0: block 0 .. M-1 | k=1: block 0 .. M-1 | ...
        sees     the block's document before start  | tokens 0 .. k of its own block

    -> [B, 1, num * M, T + num * M]
    """
    length = index.shape[1]
    positions = torch.arange(length, device=index.device)
    document = index.gather(1, (starts - 1).clamp(min=0))  # [B, M] of the token before the start
    text = (index[:, None] == document[..., None]) & (positions < starts[..., None])  # [B, M, T]
    same_block = torch.eye(starts.shape[1], dtype=torch.bool, device=index.device)  # [M, M]
    same_block = (
        (causal_mask(num, index.device)[:, None, :, None] & same_block[None, :, None]).flatten(2).flatten(0, 1)
    )  # [n*M, n*M]
    return torch.cat([text.repeat(1, num, 1), same_block.expand(len(index), -1, -1)], dim=-1)[:, None]


# Packed documents, each in a row of its own, so that plain causal attention reads them without a mask.

MIN_LENGTH_SHARE = 0.75  # documents in one batch have at least this share of the longest one's length


@dataclass(frozen=True)
class Documents:
    """groups: documents of similar length, [n, L] each: the place of every token in the flattened pack; rows shorter than
        L are filled up with place 0, behind their own tokens
    back: [B, T] the place of each token of the packs among the flattened groups; some place for padding
    """

    groups: tuple[Tensor, ...]
    token_indices: Tensor

    @classmethod
    def from_index(cls, index: Tensor) -> "Documents":
        """index [B, T], on the CPU: the document of each token, -1: none. A document's tokens stand one after the other."""
        num_rows, length = index.shape
        flat = index + torch.arange(num_rows)[:, None] * (length + 1)  # no two rows share a number
        flat = torch.where(index < 0, -1, flat).flatten()
        numbers, counts = torch.unique_consecutive(flat, return_counts=True)
        starts = counts.cumsum(0) - counts
        spans = [(n, s) for number, s, n in zip(numbers.tolist(), starts.tolist(), counts.tolist()) if number >= 0]
        batches: list[list[tuple[int, int]]] = []  # length and start of documents of similar length, the longest first
        for document in sorted(spans, key=lambda document: -document[0]):
            if batches and document[0] >= MIN_LENGTH_SHARE * batches[-1][0][0]:
                batches[-1].append(document)
            else:
                batches.append([document])
        groups, token_indices, size = [], torch.zeros(num_rows * length, dtype=torch.long), 0
        for documents in batches:
            longest = documents[0][0]
            group = torch.zeros(len(documents), longest, dtype=torch.long)
            for row, (n, start) in enumerate(documents):
                group[row, :n] = torch.arange(start, start + n)
                token_indices[start : start + n] = size + row * longest + torch.arange(n)
            groups.append(group)
            size += group.numel()
        return cls(tuple(groups), token_indices.view(num_rows, length))

    def move_to(self, device: torch.device) -> "Documents":
        *groups, token_indices = devices.upload_tensors([*self.groups, self.token_indices], device)
        return Documents(tuple(groups), token_indices)

    def read(self, tokens: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Applies function(tokens [n, L], positions [n, L]) -> [n, L, E] to every group. tokens [B, T] -> [B, T, E]"""
        flat = tokens.flatten()
        parts = []
        for group in self.groups:
            positions = torch.arange(group.shape[1], device=flat.device).expand_as(group)
            parts.append(function(flat[group], positions).flatten(0, 1))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[self.token_indices]


@dataclass(frozen=True)
class Packed:
    """The documents of packs, read in one call, one after the other (core/varlen.py). Padding is read too, as one more text.

    positions [1, B * T]: of each token in its document; shape: (B, T)
    """

    segments: Segments
    positions: Tensor
    shape: tuple[int, int]

    @classmethod
    def from_index(cls, index: Tensor) -> "Packed":
        """index [B, T], on the CPU: as of `Documents`"""
        num_rows, length = index.shape
        flat = (
            index + torch.arange(num_rows)[:, None] * (int(index.max()) + 2)
        ).flatten()  # no two rows share a number
        _, counts = torch.unique_consecutive(flat, return_counts=True)
        starts = counts.cumsum(0) - counts
        positions = torch.arange(num_rows * length) - starts.repeat_interleave(counts)
        return cls(Segments.from_counts(counts.tolist(), longest=length), positions[None], (num_rows, length))

    def move_to(self, device: torch.device) -> "Packed":
        moved = devices.upload_tensors([self.segments.query_starts.long(), self.positions], device)
        return Packed(self.segments.with_starts(moved[0], moved[0]), moved[1], self.shape)

    def read(self, tokens: Tensor, function: Callable[[Tensor, Tensor, Segments], Tensor]) -> Tensor:
        """function(tokens [1, B * T], positions [1, B * T], segments) -> [1, B * T, E]. tokens [B, T] -> [B, T, E]"""
        return function(tokens.reshape(1, -1), self.positions, self.segments).unflatten(1, self.shape)[0]
