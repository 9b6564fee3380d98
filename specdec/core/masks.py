"""Attention masks: boolean, True where a query may see a key (docs/architecture.md)."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core import devices
from specdec.core.varlen import Segments, count_runs


def causal_mask(num: int, device) -> Tensor:
    """[num, num]: each entry sees itself and the entries before it."""
    return torch.ones(num, num, dtype=torch.bool, device=device).tril()


def committed_mask(lengths: Tensor, visible: int) -> Tensor:
    """lengths [B] -> [B, 1, 1, visible]: committed entries only"""
    return (torch.arange(visible, device=lengths.device) < lengths[:, None])[:, None, None]


def pending_mask(ancestors: Tensor, lengths: Tensor, visible: int) -> Tensor:
    """The mask of queries behind each row's committed entries.

    ancestors [B, S, P] or [S, P]: pending entries of the row that each query sees, itself included
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


# A group's documents have at least this share of its longest one's length: a quarter of padding at most
MIN_LENGTH_SHARE = 0.75


@dataclass(frozen=True)
class Documents:
    """Packed documents in groups of similar length, so that plain causal attention reads them without a mask.

    groups [n, L] each: place of every token in the flattened packs. Shorter rows end with place 0.
    token_indices [B, T]: place of each token of the packs among the flattened groups; any place for padding
    """

    groups: tuple[Tensor, ...]
    token_indices: Tensor

    @classmethod
    def from_index(cls, index: Tensor) -> "Documents":
        """index [B, T], on the CPU: document of each token, -1: none. The tokens of a document are adjacent."""
        # Group documents of similar length, the longest first
        counts = count_runs(index)
        starts = counts.cumsum(0) - counts
        real = index.flatten()[starts] >= 0
        spans = zip(counts[real].tolist(), starts[real].tolist())
        batches: list[list[tuple[int, int]]] = []  # (length, start) of documents of similar length, longest first
        for document in sorted(spans, key=lambda document: -document[0]):
            if batches and document[0] >= MIN_LENGTH_SHARE * batches[-1][0][0]:
                batches[-1].append(document)
            else:
                batches.append([document])
        # Place every token of a group, and note where each token of the packs went
        groups = []
        token_indices = torch.zeros(index.numel(), dtype=torch.long)
        size = 0
        for documents in batches:
            longest = documents[0][0]
            group = torch.zeros(len(documents), longest, dtype=torch.long)
            for row, (n, start) in enumerate(documents):
                group[row, :n] = torch.arange(start, start + n)
                token_indices[start : start + n] = size + row * longest + torch.arange(n)
            groups.append(group)
            size += group.numel()
        return cls(tuple(groups), token_indices.view(index.shape))

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
    """Packed documents read in one call, one after the other (core/varlen.py). Padding is one more text.

    positions [1, B * T]: position of each token in its document; shape: (B, T)
    documents: the same documents as rows, for layers that keep a state; None: there are no such layers
    """

    segments: Segments
    positions: Tensor
    shape: tuple[int, int]
    documents: Documents | None = None

    @classmethod
    def from_index(cls, index: Tensor, *, keeps_states: bool = False) -> "Packed":
        """index [B, T], on the CPU, as for `Documents`; keeps_states: whether some layers keep a state"""
        num_rows, length = index.shape
        counts = count_runs(index)
        starts = counts.cumsum(0) - counts
        positions = torch.arange(num_rows * length) - starts.repeat_interleave(counts)
        documents = Documents.from_index(index) if keeps_states else None
        segments = Segments.from_counts(counts.tolist(), longest=length)
        return cls(segments, positions[None], (num_rows, length), documents)

    def move_to(self, device: torch.device) -> "Packed":
        moved = devices.upload_tensors([self.segments.query_starts.long(), self.positions], device)
        documents = None if self.documents is None else self.documents.move_to(device)
        return Packed(self.segments.with_starts(moved[0], moved[0]), moved[1], self.shape, documents)

    def read(self, tokens: Tensor, function: Callable[[Tensor, Tensor, Segments, Documents | None], Tensor]) -> Tensor:
        """Applies function(tokens [1, B * T], positions [1, B * T], segments, documents) -> [1, B * T, E].

        tokens [B, T] -> [B, T, E]
        """
        states = function(tokens.reshape(1, -1), self.positions, self.segments, self.documents)
        return states.unflatten(1, self.shape)[0]
