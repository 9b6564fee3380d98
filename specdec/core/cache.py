"""Keys and values in decoding (`RowCache`) and training (`UnrollCache`).

A head's attention calls `cache.attend` in both loops. The cache and the mask decide which keys a query sees
(docs/architecture.md). Only this file and layer_states.py use the cache interface of transformers, and only this one
assigns the fields of a cache (tests/test_imports.py).
"""

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionCacheLayerMixin as StateLayer

from specdec.core import fast, masks, span_attention
from specdec.core.cache_memory import CacheMemory, EntryShape, Groups, count_free_bytes, make_groups
from specdec.core.cached_keys import (
    MAX_PENDING,
    CachedKeys,
    Piece,
    attend_cached,
    attend_lagging,
    check_pieces,
    find_cached_keys,
    fits_kernel,
)
from specdec.core.context_parallel import WHOLE_TEXT, TextShare
from specdec.core.devices import upload_values
from specdec.core.layer_states import LayerStates, copy_states, replace_states
from specdec.core.span_attention import Span

CACHE_ARGUMENTS = ("cache", "past_key_values")  # since transformers 5.24, and before it and in code of checkpoints


def find_cache_argument(forward: Callable) -> str:
    """The name of the argument that takes a cache, of a function of transformers; empty without one"""
    names = inspect.signature(forward).parameters
    return next((name for name in CACHE_ARGUMENTS if name in names), "")


CacheMark = tuple[Tensor, list[int]]  # lengths [B], and the same on the host


class RowCache(transformers.Cache):
    """K and V of fixed capacity with a length per row.

    Each row has `lengths[b]` committed entries and, behind them, `pending` entries that a draft or a draft tree wrote.
    One pass is: `reserve(S)`, the forward pass (which calls `update` once a layer), then `commit`. `keep_path` comes
    before it if the drafts were a tree. A second `reserve` before the `commit` puts the next level of a tree behind the
    first.

    Capacity doubles when it is exceeded, so that few shapes occur. A forward pass reads the whole capacity, and its
    mask hides unused entries. Or it reads the entries to their length; then `use_memory` makes room for all at once.

    shapes: shape of K and V of every layer in turn; None for a layer without them
    states: states of recurrent and convolution layers, which follow the committed tokens; None without such layers
    query_heads: query heads of every layer, if passes read to the length (core/cached_keys.py); None: under a mask
    """

    def __init__(
        self,
        shapes: Sequence[EntryShape | None],
        *,
        batch: int,
        device: torch.device,
        capacity: int = 256,
        states: LayerStates | None = None,
        query_heads: int | None = None,
    ):
        super().__init__(layers=states.layers if states else [])
        self.shapes = list(shapes)
        self.states = states
        self.query_heads = query_heads
        self.memory: CacheMemory | None = None  # owner of K and V; None: this cache
        self.room = capacity  # entries that were announced
        self._set_groups(make_groups(self._count_shapes(), batch, capacity), batch, capacity)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # [B]
        self.skipped = torch.zeros_like(self.lengths)  # [B] earlier positions without an entry here
        self.positions: Tensor | None = None  # [B, C] of the entries, after `note_positions`
        self.rows = torch.arange(batch, device=device)[:, None]  # [B, 1]
        self.pending = 0
        self.host_lengths = [0] * batch  # lengths on the host, so that no shape waits for the device
        self.slots = torch.zeros(batch, 0, dtype=torch.long, device=device)  # [B, S] places that the next update writes

    @classmethod
    def uniform(
        cls, *, num_layers: int, batch: int, num_heads: int, head_dim: int, dtype, device, **options: Any
    ) -> "RowCache":
        """A cache of layers of one shape. options: capacity and query_heads of the class"""
        shape = EntryShape(num_heads, head_dim, dtype, torch.device(device))
        return cls([shape] * (2 * num_layers), batch=batch, device=device, **options)

    @property
    def entry_tensor(self) -> Tensor:
        """[layers, 2, B, heads, C, head_dim], if all K and V have one shape"""
        (group,) = self.groups.values()
        return group.unflatten(0, (-1, 2))

    def _count_shapes(self) -> Counter[EntryShape]:
        """Number of K and V of each shape."""
        return Counter(shape for shape in self.shapes if shape is not None)

    def _set_groups(self, groups: Groups, batch: int, capacity: int) -> None:
        """Uses the first `batch` rows of K and V, with `capacity` entries each.

        All layers of one shape share a tensor [n, B, heads, C, width], which `keep_path` moves at once.
        """
        self._allocated = groups
        self.capacity = capacity
        self.groups = {shape: group[:, :batch] for shape, group in groups.items()}
        self.keys_and_values = self._split_groups()

    def use_memory(self, num: int, memory: CacheMemory, *, num_rows: int = 1, masked: bool = False) -> None:
        """Takes K and V for `num` entries from a memory, if passes read only used entries. The cache must be empty.

        num_rows: rows that the batch may come to have; masked: whether a cache that is read under masks has them, too
        """
        assert not any(self.host_lengths) and not self.pending
        if self.query_heads is None and not masked:
            return
        groups = self._take_groups(num, memory, num_rows)
        if groups is not None:
            self._set_groups(groups, len(self.host_lengths), memory.capacity)

    def _take_groups(self, num: int, memory: CacheMemory, num_rows: int) -> Groups | None:
        """K and V of a memory for `num` entries in as many rows as there may be; None if it has none."""
        batch = len(self.host_lengths)
        memory.expect(num, max(batch, num_rows))
        free_bytes = count_free_bytes(self.lengths.device)
        groups = memory.take_groups(self._count_shapes(), num_rows=batch, free_bytes=free_bytes)
        if groups is not None:
            self.memory, self.room = memory, memory.num_entries
        return groups

    def release(self) -> None:
        """Gives K and V back to their memory. This cache is not used any more."""
        if self.memory is not None:
            self.memory.keep_groups(self._allocated)
        self.memory = None

    @property
    def max_rows(self) -> int:
        """Rows that the batch may have without a copy of K and V"""
        return min((group.shape[1] for group in self._allocated.values()), default=len(self.host_lengths))

    @property
    def visible(self) -> int:
        """C: number of entries that a forward pass reads"""
        return self.capacity

    def make_room(self, num: int) -> None:
        """Raises the capacity, if needed, for `num` more entries behind the committed and pending ones."""
        self.grow(self.get_seq_length() + self.pending + num)

    def grow(self, end: int) -> None:
        """Raises the capacity, if needed, to at least `end` entries, within this cache's memory if it has room."""
        if end <= self.capacity:
            return
        memory, capacity = self.memory, max(self.capacity, 1)
        self.release()
        groups = None if memory is None else self._take_groups(end, memory, 1)
        if memory is not None and groups is not None:
            capacity = memory.capacity
        while capacity < end:
            capacity *= 2
        added = capacity - self.capacity
        if groups is None:
            groups = self._make_groups(len(self.host_lengths), self.max_rows, capacity)
        for shape, group in self.groups.items():
            groups[shape][:, : group.shape[1], :, : self.capacity] = group
        self.positions = None if self.positions is None else F.pad(self.positions, (0, added))
        self._set_groups(groups, len(self.host_lengths), capacity)

    def reserve(self, num: int, counts: list[int] | None = None) -> None:
        """Announces `num` entries of the next forward pass, behind the committed and pending ones.

        counts [B]: entries that `commit` will keep, if known
        """
        self.make_room(num)
        offsets = torch.arange(self.pending, self.pending + num, device=self.lengths.device)  # [S]
        self.slots = self.lengths[:, None] + offsets  # [B, S]
        self.pending += num
        if self.states is not None:
            assert self.pending == num, "recurrent layers cannot read a second level of a tree"
            self.states.begin_pass(num, counts)

    def note_positions(self, positions: Tensor) -> Tensor:
        """Notes the positions [B, S] of the next pass's entries -> positions [B, C] of all entries"""
        if self.positions is None:
            self.positions = self.lengths.new_zeros(len(self.lengths), self.capacity)
        self.positions = self.positions.scatter(1, self.slots, positions)
        return self.positions

    def with_tensors(
        self,
        keys_and_values: Sequence[Tensor],
        lengths: Tensor,
        *,
        skipped: Tensor | None = None,
        slots: Tensor | None = None,
    ) -> "RowCache":
        """The same cache over other tensors: the arguments of a compiled or captured function.

        Such a function outlives its cache, so a pass may read no other tensor of the cache.
        keys_and_values: K and V of every layer in turn, [B, heads, C,
            head_dim] each; or of one layer, whatever its number
        lengths [B]; skipped [B] and slots [B, S]: this cache's own if None
        """
        cache = copy.copy(self)
        cache.keys_and_values = list(keys_and_values)
        cache.lengths = lengths
        cache.rows = torch.arange(len(lengths), device=lengths.device)[:, None]
        cache.skipped = self.skipped if skipped is None else skipped
        cache.slots = self.slots if slots is None else slots
        return cache

    def with_states(self, layer_index: int, tensors: Sequence[Tensor]) -> "RowCache":
        """The same cache, in which every layer has the states of a layer over other tensors (`list_state_tensors`)."""
        cache = copy.copy(self)
        cache.layers = [replace_states(cast(StateLayer, self.layers[layer_index]), tensors)] * len(self.layers)
        return cache

    def copy_states(self) -> "RowCache":
        """The same cache with copies of its states, for a pass that is not committed."""
        if self.states is None:
            return self
        cache = copy.copy(self)
        cache.layers = [copy_states(layer, None) if isinstance(layer, StateLayer) else layer for layer in self.layers]
        cache.states = LayerStates(cache.layers)
        return cache

    def restore_states(self, source: "RowCache") -> None:
        """Writes the states of a result of `copy_states` over those of this cache."""
        if self.states is not None and source.states is not None:
            self.states.replace(torch.arange(len(self.host_lengths)), source.states)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """Writes [B, heads, S, width]. Returns the visible entries [B, heads, visible, width]."""
        keys, values = self.visible_keys(layer_idx)
        rows, slots = (place.to(keys.device, non_blocking=True) for place in (self.rows, self.slots))
        keys[rows, :, slots] = key_states.transpose(1, 2)
        values[rows, :, slots] = value_states.transpose(1, 2)
        return keys, values

    def sees(
        self, ancestors: Tensor, windows: Sequence[int | None] = ()
    ) -> Tensor | CachedKeys | dict[int | None, CachedKeys]:
        """The entries that queries behind the committed ones see: a mask [B, 1, S, visible], or `CachedKeys`.

        ancestors [B, S, P] or [S, P] bool: pending entries of the row that each query sees
        windows: windows of layers, each of which gets its own `CachedKeys`; a mask is the same for all
        """
        if self.query_heads is None or ancestors.shape[-1] > MAX_PENDING:
            return masks.pending_mask(ancestors, self.lengths, self.visible)
        if not windows:
            return self.find_cached_keys(ancestors)
        return {window: self.find_cached_keys(ancestors, window=window) for window in set(windows)}

    def find_cached_keys(self, ancestors: Tensor, *, window: int | None = None) -> CachedKeys:
        """`sees`, for entries read to their length. window: positions that a query sees; None: all"""
        ancestors = ancestors.expand(len(self.lengths), -1, -1)
        shape = next(shape for shape in self.shapes if shape is not None)
        return find_cached_keys(
            ancestors,
            self.lengths,
            capacity=self.capacity,
            heads=(cast(int, self.query_heads), shape.num_heads),
            window=window,
            tree=fast.allows("tree", shape.device, shape.dtype),
        )

    @property
    def reads_pieces(self) -> bool:
        """Whether `attend` takes a `Piece`."""
        shapes = [shape for shape in self.shapes if shape is not None]
        return all(
            shape.device.type == "cpu"
            or (
                fits_kernel(shape.width, shape.width)
                and fast.allows("cache", shape.device, shape.dtype)
                and check_pieces(shape.device)
            )
            for shape in shapes
        )

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | CachedKeys | Piece
    ) -> Tensor:
        """query [B, heads, S, head_dim], mask from `sees`, or a piece -> [B, heads, S, head_dim]"""
        keys, values = self.update(key, value, layer)
        if isinstance(mask, Piece):
            return attend_lagging(query, keys, values, mask, scale=query.shape[-1] ** -0.5)
        if isinstance(mask, CachedKeys):
            return attend_cached(query, keys, values, mask, scale=query.shape[-1] ** -0.5)
        return attend_masked(query, keys, values, mask)

    def visible_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer: [B, heads, visible, head_dim] each"""
        index = 2 * layer if len(self.keys_and_values) > 2 else 0
        return self.keys_and_values[index], self.keys_and_values[index + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of committed entries of the longest row"""
        return max(self.host_lengths)

    def commit(self, num: Tensor, counts: list[int]) -> None:
        """Commits the first `num[b]` pending entries of row b, and drops all others. counts: `num` on the host"""
        self.lengths = self.lengths + num
        self.host_lengths = [known + count for known, count in zip(self.host_lengths, counts)]
        self.pending = 0
        if self.states is not None:
            self.states.commit(self, counts)

    def drop_pending(self) -> None:
        """Drops all pending entries. The next pass overwrites them."""
        assert self.states is None, "a recurrent layer's state is set right by `commit` only"
        self.pending = 0

    def keep_path(self, path: Tensor) -> None:
        """Moves the nodes of a path to the first pending places. path [B, P], node 0 first; `commit` follows."""
        source = self.lengths[:, None] + path  # [B, P]
        destination = self.lengths[:, None] + torch.arange(path.shape[1], device=path.device)  # [B, P]
        for group in self.groups.values():
            rows, sources, destinations = (
                place.to(group.device, non_blocking=True) for place in (self.rows, source, destination)
            )
            group[:, rows, :, destinations] = group[:, rows, :, sources]  # [B, P, n, heads, width]
        if self.positions is not None:
            self.positions = self.positions.scatter(1, destination, self.positions.gather(1, source))

    def select(self, rows: list[int]) -> None:
        """Keeps these rows, in this order. Nothing may be pending. A row that comes again only holds a place.

        Only rows that change their places are copied, if each moves to the place of a leaving one.
        """
        index = upload_values(rows, self.lengths.device)
        self._select_groups(rows)
        self.lengths = self.lengths[index]
        self.skipped = self.skipped[index]
        self.positions = None if self.positions is None else self.positions[index]
        self.rows = torch.arange(len(rows), device=self.lengths.device)[:, None]
        self.host_lengths = [self.host_lengths[row] for row in rows]
        self.slots = self.slots[index]
        self.pending = 0
        if self.states is not None:
            self.states.select(index)

    def _make_groups(self, num_rows: int, most_rows: int, capacity: int) -> Groups:
        """Zero K and V for `num_rows` rows; on a CPU for `most_rows`, which take no memory before they are written."""
        num_rows = max(num_rows, most_rows) if self.lengths.device.type == "cpu" else num_rows
        return make_groups(self._count_shapes(), num_rows, capacity)

    def _select_groups(self, rows: list[int]) -> None:
        """Keeps K and V of `rows`. If rows are missing, their number doubles, so that few copies are made."""
        num, num_before = len(rows), len(self.host_lengths)
        moved_rows = {goal: row for goal, row in enumerate(rows) if goal != row and goal < num_before}
        if num > self.max_rows or any(row < num for row in moved_rows.values()):
            groups = self._make_groups(num, 2 * self.max_rows if num > self.max_rows else num, self.capacity)
            for shape, group in self.groups.items():
                for goal, row in enumerate(rows):
                    groups[shape][:, goal] = group[:, row]
            self.release()
            self._set_groups(groups, num, self.capacity)
            return
        for group in self.groups.values():
            for goal, row in moved_rows.items():
                group[:, goal] = group[:, row]
        self._set_groups(self._allocated, num, self.capacity)

    def replace(self, rows: list[int], source: "RowCache") -> None:
        """Writes the rows of another cache of the same layers over these rows. Nothing may be pending in either."""
        num = source.get_seq_length()
        self.grow(num)
        index = upload_values(rows, self.lengths.device)
        for shape, group in self.groups.items():
            group[:, index.to(group.device), :, :num] = source.groups[shape][..., :num, :]
        self.lengths = self.lengths.index_copy(0, index, source.lengths)
        self.skipped = self.skipped.index_copy(0, index, source.skipped)
        if self.positions is not None and source.positions is not None:
            self.positions[index, :num] = source.positions[:, :num]
        new_lengths = dict(zip(rows, source.host_lengths))
        self.host_lengths = [new_lengths.get(row, own) for row, own in enumerate(self.host_lengths)]
        if self.states is not None and source.states is not None:
            self.states.replace(index, source.states)

    def mark(self) -> CacheMark:
        """The present committed entries, for `rewind`"""
        return self.lengths, self.host_lengths

    def rewind(self, mark: CacheMark) -> None:
        """Drops all entries committed since `mark`, and all pending ones."""
        assert self.states is None, "states of recurrent layers cannot be taken back so far"
        self.lengths, self.host_lengths = mark
        self.pending = 0

    def copy_entries(self, source: "RowCache", entries: Tensor) -> None:
        """Replaces all entries by copies of another cache's. Both have the same layers, rows and heads.

        entries [layers, B, heads, M]: places in the source, in any order. A row with fewer than M
            committed entries uses as many of them. The capacity here must be at least M.
        """
        num = entries.shape[-1]
        data = source.entry_tensor
        flat = data.flatten(0, 4)  # [layers * 2 * B * heads * C, head_dim]
        first = torch.arange(0, len(flat), source.visible, device=flat.device)  # where each K or V of a head begins
        indices = first.view(*data.shape[:4], 1) + entries[:, None]  # [layers, 2, B, heads, M]
        self.entry_tensor[..., :num, :] = flat.index_select(0, indices.flatten()).view(*indices.shape, -1)
        self.lengths = source.lengths.clamp(max=num)
        self.host_lengths = [min(known, num) for known in source.host_lengths]
        self.skipped = source.lengths - self.lengths
        self.pending = 0

    # Calls of transformers' recurrent and convolution layers besides `update`; most are in the base class

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The state of one of MiniMax's recurrent layers; None before the first pass"""
        layer = cast(StateLayer, self.layers[layer_idx])
        return layer.recurrent_states[0] if layer.has_previous_state[0] else None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Sets the state of one of MiniMax's recurrent layers."""
        layer = cast(StateLayer, self.layers[layer_idx])
        if layer.has_previous_state[0]:  # in place, as a compiled layer changes its arguments
            cast(Tensor, layer.recurrent_states[0]).copy_(linear_cache)
        else:
            layer.recurrent_states[0], layer.has_previous_state[0] = linear_cache, True

    def _split_groups(self) -> list[Tensor]:
        """K and V of every layer in turn, [B, heads, C, width] each, empty for a layer without them"""
        parts = {shape: iter(group.unbind(0)) for shape, group in self.groups.items()}
        return [torch.empty(0) if shape is None else next(parts[shape]) for shape in self.shapes]


class UnrollCache:
    """The keys of a training unroll: differentiable, and never changed once stored.

    Step 1 stores the keys of all T slots. A later step of slot j sees the step-1 keys of its document's slots up to j
    (its span), and its own keys of steps 2..d. Later steps may run on a subset of S slots.

    share, num_slots: this process' part of the slots, and the slots of all; K and V that all steps see are of all slots
    """

    def __init__(self, share: TextShare = WHOLE_TEXT, num_slots: int = 0) -> None:
        self.share, self.num_slots = share, num_slots
        # By layer: K and V [B, heads, T, head_dim] that all steps see
        self.common_keys: dict[int, tuple[Tensor, Tensor]] = {}
        # By layer and step d: K and V [B, heads, S, 1, head_dim]
        self.step_keys: dict[int, dict[int, tuple[Tensor, Tensor]]] = {}
        # By step d and earlier step: places of d's slots among those of the earlier one; None: the same slots
        self.slot_indices: dict[int, dict[int, Tensor | None]] = {}

    def at_step(self, d: int, kept_slots: Tensor | None = None) -> "CachedStep":
        """The view of step d.

        kept_slots [B, S]: its slots' places among those of the step before; None: the same slots
        """
        indices = {d - 1: kept_slots}
        for step, earlier in self.slot_indices.get(d - 1, {}).items():
            if earlier is not None and kept_slots is not None:
                earlier = earlier.gather(1, kept_slots)
            indices[step] = kept_slots if earlier is None else earlier
        self.slot_indices[d] = indices
        return CachedStep(self, d)

    def update(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Stores K and V that all steps see: a block drafter's context."""
        self.common_keys[layer] = self.gather(key, value)

    def gather(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """K and V of all slots, from those of this process' slots"""
        return self.share.gather(key, value, self.num_slots)


@dataclass(frozen=True)
class CachedStep:
    """Step d's view of an `UnrollCache`. A step computed again, in the backward pass, sees the same keys as before."""

    cache: UnrollCache
    d: int

    def visible_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """The K and V that `update` stored, [B, heads, T, head_dim] each"""
        return self.cache.common_keys[layer]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, seen: Span) -> Tensor:
        """query [B, heads, S, head_dim], seen: common keys -> [B, heads, S, head_dim]"""
        steps = self.cache.step_keys.setdefault(layer, {})
        pair = key[..., None, :], value[..., None, :]
        first = min([*steps, self.d])  # the step of the common keys: 1, or that of a module for one depth
        if self.d == first:
            common_pair = self.cache.gather(key, value)
            self.cache.common_keys.setdefault(layer, common_pair)
            own_keys = [*pair] if seen.self_key_separate else []
        else:
            common_pair = self.cache.common_keys[layer]
            slot_indices = self.cache.slot_indices[self.d]
            own_keys = []
            for d, earlier in steps.items():
                if first < d < self.d:
                    own_keys += [_gather_slots(values, slot_indices[d]) for values in earlier]
            own_keys += pair
        steps.setdefault(self.d, pair)
        grouped = (query * query.shape[-1] ** -0.5).unflatten(1, (key.shape[1], -1))[..., None, :]  # [B, G, R, S, 1, .]
        return span_attention.attend(grouped, *common_pair, seen, *own_keys)[..., 0, :].flatten(1, 2)


def _gather_slots(values: Tensor, indices: Tensor | None) -> Tensor:
    """values [B, heads, S, 1, head_dim], indices [B, S'] -> [B, heads, S', 1, head_dim]"""
    if indices is None:
        return values
    return values.gather(2, indices[:, None, :, None, None].expand(-1, values.shape[1], -1, -1, values.shape[-1]))


MAX_GROUPED_TOKENS = 8  # above, sdpa is as fast on heads one by one


def attend_masked(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scale: float | None = None) -> Tensor:
    """query [B, H, S, E], key [B, G, C, E], value [B, G, C, V], mask [B, 1 or H, S, C] -> [B, H, S, V]

    On a CPU, sdpa multiplies the few queries of a head as a product of so few rows, which is slow in bfloat16. So all
    queries that share keys become the rows of one product. In 9 heads of 64 over 1,024 keys one query takes a seventh
    of the time, 4 and 8 queries three quarters.
    """
    heads, groups, num = query.shape[1], key.shape[1], query.shape[2]
    few_rows = num <= MAX_GROUPED_TOKENS and mask.shape[1] == 1 and groups < heads
    if few_rows and query.dtype == torch.bfloat16 and query.device.type == "cpu":
        rows = query.reshape(query.shape[0], groups, -1, query.shape[-1])  # [B, G, H / G * S, E]
        mask = mask.repeat(1, 1, heads // groups, 1)
        out = F.scaled_dot_product_attention(rows, key, value, attn_mask=mask, scale=scale)
        return out.reshape(query.shape[0], heads, num, value.shape[-1])
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale, enable_gqa=True)
