"""Packed documents, each in a row of its own, so that plain causal attention reads them without a mask."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core import devices, masks

ALIKE = 0.75  # documents in one batch have at least this share of the longest one's length


def group_alike(lengths: Sequence[int], joins: Callable[[int, int, int], bool]) -> list[list[int]]:
    """Numbers of texts in groups of similar length, the longest texts first.

    joins(longest, length, num): whether a text of this length joins a group of `num` texts
    """
    groups: list[list[int]] = []
    for number in sorted(range(len(lengths)), key=lambda number: (-lengths[number], number)):
        if groups and joins(lengths[groups[-1][0]], lengths[number], len(groups[-1])):
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


@dataclass(frozen=True)
class Documents:
    """groups: documents of similar length, [n, L] each: the place of every token in the flattened pack; rows shorter than
        L are filled up with place 0, behind their own tokens
    back: [B, T] the place of each token of the packs among the flattened groups; some place for padding
    """

    groups: tuple[Tensor, ...]
    back: Tensor

    @classmethod
    def of(cls, index: Tensor) -> "Documents":
        """index [B, T], on the CPU: the document of each token, -1: none. A document's tokens stand one after the other."""
        num_rows, length = index.shape
        flat = index + torch.arange(num_rows)[:, None] * (length + 1)  # no two rows share a number
        flat = torch.where(index < 0, -1, flat).flatten()
        numbers, counts = torch.unique_consecutive(flat, return_counts=True)
        starts = counts.cumsum(0) - counts
        found = [(n, s) for number, s, n in zip(numbers.tolist(), starts.tolist(), counts.tolist()) if number >= 0]
        groups, back, size = [], torch.zeros(num_rows * length, dtype=torch.long), 0
        for numbers in group_alike([n for n, _ in found], lambda longest, length, num: length >= ALIKE * longest):
            longest = found[numbers[0]][0]
            group = torch.zeros(len(numbers), longest, dtype=torch.long)
            for row, (n, start) in enumerate(found[number] for number in numbers):
                group[row, :n] = torch.arange(start, start + n)
                back[start : start + n] = size + row * longest + torch.arange(n)
            groups.append(group)
            size += group.numel()
        return cls(tuple(groups), back.view(num_rows, length))

    def to(self, device: torch.device) -> "Documents":
        *groups, back = devices.move([*self.groups, self.back], device)
        return Documents(tuple(groups), back)

    def read(self, tokens: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """Applies function(tokens [n, L], positions [n, L]) -> [n, L, E] to every group. tokens [B, T] -> [B, T, E]"""
        flat = tokens.flatten()
        parts = []
        for group in self.groups:
            positions = torch.arange(group.shape[1], device=flat.device).expand_as(group)
            parts.append(function(flat[group], positions).flatten(0, 1))
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[self.back]


@dataclass(frozen=True)
class Together:
    """The documents of packs, read in one call whatever they are, with a mask [B, 1, T, T]: for a module that all processes of
    a run must call equally often.

    index, positions [B, T]: the document of each token, -1: none; its position there
    """

    index: Tensor
    positions: Tensor

    def to(self, device: torch.device) -> "Together":
        return Together(*devices.move([self.index, self.positions], device))

    def read(self, tokens: Tensor, function: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """function(tokens, positions [B, T], mask) -> [B, T, E]"""
        return function(tokens, self.positions, masks.documents(self.index))
