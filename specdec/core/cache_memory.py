"""Memory of K and V that outlives an answer, so that compiled functions and CUDA graphs over it stay valid."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core.devices import round_up_power

MIN_CAPACITY = 256  # entries of a row; larger capacities are powers of two, so that few shapes occur
MAX_MEMORY_SHARE = 0.25  # of a GPU's free memory; an answer that ends early would waste more


@dataclass(frozen=True)
class EntryShape:
    """The shape of one token's key, or value, in a layer."""

    num_heads: int
    width: int
    dtype: torch.dtype
    device: torch.device

    @property
    def num_bytes(self) -> int:
        return self.num_heads * self.width * self.dtype.itemsize


Groups = dict[EntryShape, Tensor]  # [n, rows, heads, capacity, width]: K and V of all layers of one shape


class CacheMemory:
    """The K and V of caches of the same layers, which use them one after the other.

    All have the capacity and the number of rows of the largest announced so far. A batch uses the first of its rows.
    """

    def __init__(self) -> None:
        self.num_entries = 0  # of the longest row that was announced
        self.num_rows = 1
        self.row_limit: int | None = None  # rows that the device has memory for; None: not known
        self.free_groups: list[Groups] = []
        self.num_used, self.most_used = 0, 0  # sets of K and V in use now, and at most so far

    @property
    def capacity(self) -> int:
        return max(MIN_CAPACITY, round_up_power(self.num_entries))

    def expect(self, num_entries: int, num_rows: int) -> None:
        """Announces caches of so many entries in so many rows."""
        capacity = self.capacity
        self.num_entries = max(self.num_entries, num_entries)
        if self.capacity > capacity:
            self.row_limit = None
        self.num_rows = max(self.num_rows, num_rows)
        if self.row_limit is not None:
            self.num_rows = min(self.num_rows, self.row_limit)

    def take_groups(self, counts: Mapping[EntryShape, int], *, num_rows: int, free_bytes: float) -> Groups | None:
        """Zero K and V for at least `num_rows` rows; None if they need more than a share of the free memory.

        counts: number of K and V of each shape; num_rows: rows needed now; free_bytes: free memory of the device
        """
        self.num_rows = max(self.num_rows, num_rows)
        self.free_groups = [groups for groups in self.free_groups if self._fits(groups)]
        groups = self.free_groups.pop() if self.free_groups else self._make_groups(counts, num_rows, free_bytes)
        if groups is not None:
            self.num_used += 1
            self.most_used = max(self.most_used, self.num_used)
            for group in groups.values():
                group.zero_()  # hidden entries must be finite, too
        return groups

    def _make_groups(self, counts: Mapping[EntryShape, int], num_rows: int, free_bytes: float) -> Groups | None:
        """New K and V for as many rows as fit, but at least `num_rows`; None if not even these fit."""
        row_bytes = self.capacity * sum(num * shape.num_bytes for shape, num in counts.items())
        while self.num_rows > num_rows and self.num_rows * row_bytes > MAX_MEMORY_SHARE * free_bytes:
            self.row_limit = self.num_rows = max(num_rows, self.num_rows // 2)
        if self.num_rows * row_bytes > MAX_MEMORY_SHARE * free_bytes:
            return None
        return make_groups(counts, self.num_rows, self.capacity)

    def keep_groups(self, groups: Groups) -> None:
        """Keeps K and V of an ended answer for a later one: as many sets as were in use at once."""
        self.num_used -= 1
        if self._fits(groups):
            self.free_groups = [*self.free_groups, groups][-self.most_used :]

    def _fits(self, groups: Groups) -> bool:
        """Whether they have the present number of rows and capacity."""
        sizes = {(group.shape[1], group.shape[3]) for group in groups.values()}
        return sizes == {(self.num_rows, self.capacity)}


def make_groups(counts: Mapping[EntryShape, int], num_rows: int, capacity: int) -> Groups:
    """Zero K and V. counts: number of K and V of each shape; capacity: entries of a row"""
    return {
        shape: torch.zeros(
            num, num_rows, shape.num_heads, capacity, shape.width, dtype=shape.dtype, device=shape.device
        )
        for shape, num in counts.items()
    }


def count_free_bytes(device: torch.device) -> float:
    """Free memory of a GPU; infinite elsewhere"""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
