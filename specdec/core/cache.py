"""Keys and values while decoding (`RowCache`) and while training (`UnrollCache`).

A head's attention calls `cache.attend` in both loops. The cache and the mask decide which keys a query sees
(docs/architecture.md). Only this file uses the cache interface of transformers, and only this file assigns the fields of
a cache (tests/test_imports.py).
"""

import copy
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.cache_utils import LinearAttentionCacheLayerMixin as StateLayer

from specdec.core import masks, span_attention
from specdec.core.cached_keys import MAX_PENDING, CachedKeys, attend_cached, find_cached_keys
from specdec.core.devices import upload_values
from specdec.core.span_attention import Span

# The states of recurrent and convolution layers, row by row, when only a part of the drafts is kept.
#
# Such a layer folds each token into a state, which cannot be cut back. So a pass over S tokens starts from the committed
# states and remembers what each of these layers read. Once it is known how many tokens each row keeps, the layers alone read
# those tokens again, from the states before the pass: two passes of a part of the model where all S are not kept, none
# where they are. Rows that keep equally many tokens are read together.

STATE_FIELDS = ("conv_states", "recurrent_states")
STATE_MARKS = (
    "has_previous_state",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "conv_kernel_size",
)


def copy_states(layer: StateLayer, rows: Tensor | None) -> StateLayer:
    """A copy of a layer's states; rows [M]: of these rows only"""
    copied = copy.copy(layer)
    for name in STATE_FIELDS:
        states = getattr(layer, name).items()
        selected = {
            key: None if state is None else state.clone() if rows is None else state[rows.to(state.device)]
            for key, state in states
        }
        setattr(copied, name, selected)
    for name in STATE_MARKS:
        setattr(copied, name, dict(getattr(layer, name)))
    return copied


class LayerStates:
    """The states of a cache, as transformers' layers keep them, and what is needed to take tokens back.

    layers: one place for each of the model's layers; those of attention layers stay empty
    """

    def __init__(self, layers: list):
        self.layers = layers
        self.layer_indices = [layer_index for layer_index, layer in enumerate(layers) if isinstance(layer, StateLayer)]
        self.states_before: list[StateLayer] | None = None  # the states before the pass, if tokens of it may be dropped
        self.calls: dict[int, tuple[nn.Module, tuple, dict]] = {}  # by layer: what it read in the pass
        self.num_tokens = 0
        self.counts: list[int] | None = None

    def select(self, rows: Tensor) -> None:
        """Goes on with these rows only, in this order. rows [M]"""
        for layer_index in self.layer_indices:
            self.layers[layer_index] = copy_states(self.layers[layer_index], rows)

    def replace(self, rows: Tensor, source: "LayerStates") -> None:
        """The states of another cache's rows take the places of these rows. rows [M]"""
        for layer_index in self.layer_indices:
            _write_rows(self.layers[layer_index], rows, source.layers[layer_index])

    def begin_pass(self, num_tokens: int, counts: list[int] | None) -> None:
        """A pass over `num` tokens begins. counts [B]: how many each row will keep, if that is known"""
        self.calls = {}
        self.num_tokens, self.counts = num_tokens, counts
        keeps_all = num_tokens == 1 if counts is None else min(counts) == num_tokens
        self.states_before = (
            None if keeps_all else [copy_states(self.layers[layer_index], None) for layer_index in self.layer_indices]
        )

    def note_call(self, cache, layer_index: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A layer has read all tokens of the pass. If it is known what to keep, its states are set right at once."""
        if self.states_before is None:
            return
        if self.counts is not None:
            self._read_again(cache, layer_index, module, args, kwargs, self.counts)
        else:
            self.calls[layer_index] = module, args, kwargs

    def commit(self, cache, counts: list[int]) -> None:
        """Leaves the states after the first counts[b] tokens of the pass in row b."""
        if self.counts is None and self.states_before is not None:
            for layer_index, (module, args, kwargs) in self.calls.items():
                self._read_again(cache, layer_index, module, args, kwargs, counts)
        self.states_before, self.calls = None, {}

    @torch.no_grad()
    def _read_again(
        self, cache, layer_index: int, module: nn.Module, args: tuple, kwargs: dict, counts: list[int]
    ) -> None:
        """The module reads the first counts[b] tokens of row b from the states before the pass."""
        assert self.states_before is not None
        before = self.states_before[self.layer_indices.index(layer_index)]
        groups: dict[int, list[int]] = defaultdict(list)  # rows by the number of tokens that they keep
        for row, count in enumerate(counts):
            groups[count].append(row)
        for count, row_numbers in groups.items():
            if count == self.num_tokens:
                continue
            rows = torch.tensor(row_numbers)
            row_states = copy_states(before, rows)
            if count:
                row_cache = copy.copy(cache)
                row_cache.layers = [*cache.layers]
                row_cache.layers[layer_index] = row_states
                cut_arguments = [
                    _cut_argument(value, cache, row_cache, rows, len(counts), self.num_tokens, count)
                    for value in (args, kwargs)
                ]
                module.forward(*cut_arguments[0], **cut_arguments[1])
            _write_rows(self.layers[layer_index], rows, row_states)


def _write_rows(layer: StateLayer, rows: Tensor, source: StateLayer) -> None:
    for name in STATE_FIELDS:
        for key, state in getattr(layer, name).items():
            value = getattr(source, name)[key]
            if state is not None:
                state[rows.to(state.device)] = torch.zeros_like(state[:1]) if value is None else value


def _cut_argument(value: Any, cache, row_cache, rows: Tensor, num_rows: int, num_tokens: int, count: int) -> Any:
    """Some rows, and the first `count` tokens, of all tensors [B, S, ...] or [1, S, ...] in a module's arguments."""
    if value is cache:
        return row_cache
    if isinstance(value, dict):
        return {
            key: _cut_argument(part, cache, row_cache, rows, num_rows, num_tokens, count) for key, part in value.items()
        }
    if isinstance(value, tuple | list):
        return type(value)(_cut_argument(part, cache, row_cache, rows, num_rows, num_tokens, count) for part in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == num_tokens:
        if value.shape[0] == num_rows:
            return value[rows.to(value.device), :count]
        if value.shape[0] == 1:
            return value[:, :count]
    return value


CAPACITY_MULTIPLE = 256  # capacities that are allocated at once are multiples of it, so that few occur
MAX_MEMORY_SHARE = 0.25  # share of a GPU's free memory that is allocated at once
MAX_SPARE = 2  # sets of K and V that are kept for later answers

CacheMark = tuple[Tensor, list[int]]  # what `RowCache.mark` returns: lengths [B], and the same on the host


@dataclass(frozen=True)
class EntryShape:
    """What a layer keeps of a token as its key, or as its value."""

    num_heads: int
    width: int
    dtype: torch.dtype
    device: torch.device


class SpareMemory:
    """Memory of K and V of answers that have ended. The next cache of the same sizes takes it, so CUDA graphs over it stay valid."""

    def __init__(self) -> None:
        self.spare: list[dict[EntryShape, Tensor]] = []

    def take_groups(self, sizes: Mapping[EntryShape, tuple[int, ...]]) -> dict[EntryShape, Tensor] | None:
        """Tensors of these sizes, zeros; None: there are none"""
        for index, groups in enumerate(self.spare):
            if {shape: group.shape for shape, group in groups.items()} == sizes:
                for group in groups.values():
                    group.zero_()  # what is hidden by a mask must be finite
                return self.spare.pop(index)
        return None

    def keep_groups(self, groups: dict[EntryShape, Tensor]) -> None:
        self.spare = [groups, *self.spare[: MAX_SPARE - 1]]


class RowCache(transformers.Cache):
    """K and V of fixed capacity with a length per row.

    Each row holds `lengths[b]` committed entries and, behind them, `pending` entries: those that a draft or a draft tree
    wrote and that are not committed yet. One pass is: `reserve(S)`, the forward pass (which calls `update` once a layer),
    then `commit`, with `keep` before it where the drafts were a tree. A second `reserve` before the `commit` puts the
    next level of a tree behind the first.

    Capacity doubles when it is exceeded, so that few shapes occur. A forward pass reads the whole capacity, and its mask
    hides the entries that are not in use; or it reads the entries to their length, and then `expect` allocates all at once.

    shapes: of the K and V of every layer in turn; None for a layer that keeps none
    states: of recurrent and convolution layers, which follow the committed tokens; None if there are no such layers
    query_heads: of every layer, where passes read the entries to their length (core/cached_keys.py); None: under a mask
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
        self.shapes, self.states, self.query_heads = list(shapes), states, query_heads
        self.spare: SpareMemory | None = None
        self._allocate(batch, capacity)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # [B]
        self.skipped = torch.zeros_like(self.lengths)  # [B] earlier positions that have no entry here
        self.positions: Tensor | None = None  # [B, C] of the entries, once `place` was called
        self.rows = torch.arange(batch, device=device)[:, None]  # [B, 1]
        self.pending = 0
        self.host_lengths = [0] * batch  # the lengths on the host, so that no shape waits for the device
        self.slots = torch.zeros(batch, 0, dtype=torch.long, device=device)  # [B, S] where the next update writes

    @classmethod
    def uniform(
        cls, *, num_layers: int, batch: int, num_heads: int, head_dim: int, dtype, device, **options: Any
    ) -> "RowCache":
        """A cache of layers of one shape. options: capacity and query_heads, as of the class"""
        shape = EntryShape(num_heads, head_dim, dtype, torch.device(device))
        return cls([shape] * (2 * num_layers), batch=batch, device=device, **options)

    @property
    def entry_tensor(self) -> Tensor:
        """[layers, 2, B, heads, C, head_dim], if all K and V have one shape"""
        (group,) = self.groups.values()
        return group.unflatten(0, (-1, 2))

    def _allocate(self, batch: int, capacity: int) -> None:
        """Empty K and V, for all layers that have one shape in one tensor [n, B, heads, C, width], so that `keep` moves them at once"""
        counts = Counter(shape for shape in self.shapes if shape is not None)
        sizes = {shape: (num, batch, shape.num_heads, capacity, shape.width) for shape, num in counts.items()}
        groups = None if self.spare is None else self.spare.take_groups(sizes)
        self.groups = groups or {
            shape: torch.zeros(size, dtype=shape.dtype, device=shape.device) for shape, size in sizes.items()
        }
        self.capacity, self._allocated = capacity, self.groups
        self.keys_and_values = self._split_groups()

    def preallocate(self, num: int, spare: SpareMemory | None = None) -> None:
        """Allocates room for `num` entries at once, where a pass reads no more than are used. The cache must be empty.

        spare: where its memory comes from, and goes to with `release`
        """
        assert not any(self.host_lengths) and not self.pending
        if self.query_heads is None:
            return
        capacity = max(self.capacity, -(-num // CAPACITY_MULTIPLE) * CAPACITY_MULTIPLE)
        needed = sum(group.nbytes for group in self.groups.values()) * capacity // self.capacity
        if needed <= MAX_MEMORY_SHARE * _free_memory(
            self.lengths.device
        ):  # else an answer that ends early would keep too much
            self.spare = spare
            self._allocate(len(self.host_lengths), capacity)

    def release(self) -> None:
        """Leaves the memory to a later cache; this one is not used any more."""
        if self.spare is not None and self.capacity == next(iter(self._allocated.values())).shape[3]:
            self.spare.keep_groups(self._allocated)
        self.spare = None

    @property
    def visible(self) -> int:
        """C: the entries that a forward pass reads."""
        return self.capacity

    def make_room(self, num: int) -> None:
        """Raises the capacity, if needed, for `num` more entries behind the committed and pending ones."""
        self._grow(self.get_seq_length() + self.pending + num)

    def _grow(self, end: int) -> None:
        """Raises the capacity, if needed, to at least `end` entries."""
        added = 0
        while self.capacity + added < end:
            added += self.capacity + added
        if added:
            self.groups = {shape: F.pad(group, (0, 0, 0, added)) for shape, group in self.groups.items()}
            self.positions = None if self.positions is None else F.pad(self.positions, (0, added))
            self.capacity += added
            self._allocated, self.keys_and_values = self.groups, self._split_groups()

    def reserve(self, num: int, counts: list[int] | None = None) -> None:
        """The next forward pass writes `num` entries behind the committed and pending ones.

        counts [B]: how many of them `commit` will keep, if that is known
        """
        self.make_room(num)
        offsets = torch.arange(self.pending, self.pending + num, device=self.lengths.device)  # [S]
        self.slots = self.lengths[:, None] + offsets  # [B, S]
        self.pending += num
        if self.states is not None:
            assert self.pending == num, "recurrent layers cannot read a second level of a tree"
            self.states.begin_pass(num, counts)

    def note_positions(self, positions: Tensor) -> Tensor:
        """Notes the positions [B, S] of the entries that the next pass writes -> those of all entries, [B, C]"""
        if self.positions is None:
            self.positions = self.lengths.new_zeros(len(self.lengths), self.capacity)
        self.positions = self.positions.scatter(1, self.slots, positions)
        return self.positions

    def with_tensors(
        self,
        keys_and_values: Sequence[Tensor],
        lengths: Tensor,
        *,
        slots: Tensor | None = None,
        pending: int | None = None,
    ) -> "RowCache":
        """The same cache over other tensors, for a compiled or captured function, which has these tensors as its arguments.

        Such a function outlives the cache that it was made with, so a pass may read no other tensor of the cache.
        halves: K and V of every layer in turn, [B, heads, C, head_dim] each; or those of one layer, whatever its number
        lengths [B]; slots [B, S] and pending: if they differ from this cache's
        """
        cache = copy.copy(self)
        cache.keys_and_values, cache.lengths = list(keys_and_values), lengths
        cache.rows = torch.arange(len(lengths), device=lengths.device)[:, None]
        cache.slots = self.slots if slots is None else slots
        cache.pending = self.pending if pending is None else pending
        return cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """[B, heads, S, width] in; the visible entries [B, heads, visible, width] out."""
        keys, values = self.visible_keys(layer_idx)
        rows, slots = (place.to(keys.device, non_blocking=True) for place in (self.rows, self.slots))
        keys[rows, :, slots] = key_states.transpose(1, 2)
        values[rows, :, slots] = value_states.transpose(1, 2)
        return keys, values

    def sees(self, ancestors: Tensor) -> Tensor | CachedKeys:
        """What queries behind the committed entries see of all entries: a mask [B, 1, S, visible], or where entries are read to
        their length a `CachedKeys`.

        ancestors [B, S, P] or [S, P] bool: which of the row's P pending entries each query sees
        """
        if self.query_heads is None or ancestors.shape[-1] > MAX_PENDING:
            return masks.pending_mask(ancestors, self.lengths, self.visible)
        return self.find_cached_keys(ancestors)

    def find_cached_keys(self, ancestors: Tensor, *, window: int | None = None) -> CachedKeys:
        """`sees`, where entries are read to their length. window: how many positions a query sees; None: all"""
        ancestors = ancestors.expand(len(self.lengths), -1, -1)
        shape = next(shape for shape in self.shapes if shape is not None)
        heads = cast(int, self.query_heads), shape.num_heads
        return find_cached_keys(ancestors, self.lengths, capacity=self.capacity, heads=heads, window=window)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | CachedKeys) -> Tensor:
        """query [B, heads, S, head_dim], mask as of `sees` -> [B, heads, S, head_dim]"""
        keys, values = self.update(key, value, layer)
        if isinstance(mask, CachedKeys):
            return attend_cached(query, keys, values, mask, scale=query.shape[-1] ** -0.5)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    def visible_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer as they are: [B, heads, visible, head_dim] each"""
        index = 2 * layer if len(self.keys_and_values) > 2 else 0
        return self.keys_and_values[index], self.keys_and_values[index + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of committed entries of the longest row."""
        return max(self.host_lengths)

    def commit(self, num: Tensor, counts: list[int]) -> None:
        """Commits the first `num[b]` pending entries of row b and drops the rest; counts: `num` on the host."""
        self.lengths = self.lengths + num
        self.host_lengths = [known + count for known, count in zip(self.host_lengths, counts)]
        self.pending = 0
        if self.states is not None:
            self.states.commit(self, counts)

    def drop_pending(self) -> None:
        """Drops all pending entries; the next pass overwrites them."""
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
        """Goes on with these rows only, in this order, perhaps several times; called between passes, when nothing is pending.

        Where fewer rows go on, each in its place or in that of one that leaves, only the latter ones are copied.
        """
        index, num = upload_values(rows, self.lengths.device), len(rows)
        moved_rows = {place: row for place, row in enumerate(rows) if place != row}
        if num <= len(self.host_lengths) and all(row >= num for row in moved_rows.values()):
            for group in self.groups.values():
                for place, row in moved_rows.items():
                    group[:, place] = group[:, row]
            self.groups = {shape: group[:, :num] for shape, group in self.groups.items()}
        else:
            self.groups = {shape: group.index_select(1, index.to(group.device)) for shape, group in self.groups.items()}
            self._allocated = self.groups
        self.lengths, self.skipped = self.lengths[index], self.skipped[index]
        self.positions = None if self.positions is None else self.positions[index]
        self.rows = torch.arange(len(rows), device=self.lengths.device)[:, None]
        self.host_lengths = [self.host_lengths[row] for row in rows]
        self.slots = self.slots[index]
        self.pending = 0
        self.keys_and_values = self._split_groups()
        if self.states is not None:
            self.states.select(index)

    def replace(self, rows: list[int], source: "RowCache") -> None:
        """Writes the rows of another cache of the same layers over these rows; called when nothing is pending in either."""
        num = source.get_seq_length()
        self._grow(num)
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
        """The committed entries of now, for `rewind`."""
        return self.lengths, self.host_lengths

    def rewind(self, mark: CacheMark) -> None:
        """Drops everything that was committed since `mark`, and all pending entries."""
        assert self.states is None, "states of recurrent layers cannot be taken back so far"
        self.lengths, self.host_lengths = mark
        self.pending = 0

    def copy_entries(self, source: "RowCache", entries: Tensor) -> None:
        """Replaces everything here by copies of chosen entries of another cache of the same layers, rows and heads.

        entries [layers, B, heads, M]: which ones, in any order. A row of `other` with fewer than M committed entries gives
        those; its further places are not read. The capacity here must be at least M.
        """
        num, data = entries.shape[-1], source.entry_tensor
        flat = data.flatten(0, 4)  # [layers * 2 * B * heads * C, head_dim]
        first = torch.arange(0, len(flat), source.visible, device=flat.device)  # where each K or V of a head begins
        indices = first.view(*data.shape[:4], 1) + entries[:, None]  # [layers, 2, B, heads, M]
        self.entry_tensor[..., :num, :] = flat.index_select(0, indices.flatten()).view(*indices.shape, -1)
        self.lengths = source.lengths.clamp(max=num)
        self.host_lengths = [min(known, num) for known in source.host_lengths]
        self.skipped = source.lengths - self.lengths
        self.pending = 0

    # What transformers' recurrent and convolution layers call beside `update`; most of it is in the base class

    def get_linear_cache(self, layer_idx: int) -> Tensor | None:
        """The state of one of MiniMax's recurrent layers; None before the first pass."""
        layer = cast(StateLayer, self.layers[layer_idx])
        return layer.recurrent_states[0] if layer.has_previous_state[0] else None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        """Sets the state of one of MiniMax's recurrent layers."""
        layer = cast(StateLayer, self.layers[layer_idx])
        layer.recurrent_states[0], layer.has_previous_state[0] = linear_cache, True

    def _split_groups(self) -> list[Tensor]:
        """K and V of every layer in turn, [B, heads, C, width] each, empty for a layer that keeps none"""
        parts = {shape: iter(group.unbind(0)) for shape, group in self.groups.items()}
        return [torch.empty(0) if shape is None else next(parts[shape]) for shape in self.shapes]


def _free_memory(device: torch.device) -> float:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf


class UnrollCache:
    """The keys of a training unroll: differentiable, and never changed once they are there.

    Step 1 stores the keys of all T slots. Each later step of slot j sees the step-1 keys of slots <= j of its document (its
    span) and its own keys of steps 2..d. Later steps may run on a subset of S slots.
    """

    def __init__(self) -> None:
        self.common_keys: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # layer -> K, V that all steps see [B, heads, T, head_dim]
        self.step_keys: dict[
            int, dict[int, tuple[Tensor, Tensor]]
        ] = {}  # layer -> step d -> K, V [B, heads, S, 1, head_dim]
        # step d -> earlier step -> where the slots of step d are among those of the earlier one; None: in the same places
        self.slot_indices: dict[int, dict[int, Tensor | None]] = {}

    def at_step(self, d: int, kept_slots: Tensor | None = None) -> "CachedStep":
        """kept [B, S]: the places of the slots of step d among those of the step before; None: the same slots"""
        earlier = self.slot_indices.get(d - 1, {})
        earlier_indices = {
            e: at if kept_slots is None or at is None else at.gather(1, kept_slots) for e, at in earlier.items()
        }
        self.slot_indices[d] = {e: kept_slots if at is None else at for e, at in earlier_indices.items()} | {
            d - 1: kept_slots
        }
        return CachedStep(self, d)

    def update(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Stores K and V that all steps see: a block drafter's context."""
        self.common_keys[layer] = key, value


@dataclass(frozen=True)
class CachedStep:
    """What step d sees of an `UnrollCache`. A step that is computed again, in the backward pass, sees what it saw before."""

    cache: UnrollCache
    d: int

    def visible_keys(self, layer: int) -> tuple[Tensor, Tensor]:
        """The K and V that `update` stored, [B, heads, T, head_dim] each"""
        return self.cache.common_keys[layer]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, seen: Span) -> Tensor:
        """query [B, heads, S, head_dim], seen: which common keys -> [B, heads, S, head_dim]"""
        steps = self.cache.step_keys.setdefault(layer, {})
        pair = key[..., None, :], value[..., None, :]
        first = min([*steps, self.d])  # the step whose keys are common: 1, or of a module for one depth its own
        if self.d == first:
            self.cache.common_keys.setdefault(layer, (key, value))
            common_pair = key, value
            own_keys = [*pair] if seen.self_key_separate else []
        else:
            common_pair = self.cache.common_keys[layer]
            slot_indices = self.cache.slot_indices[self.d]
            own_keys = [
                _gather_slots(part, slot_indices[d])
                for d, earlier in steps.items()
                if first < d < self.d
                for part in earlier
            ]
            own_keys += pair
        steps.setdefault(self.d, pair)
        grouped = (query * query.shape[-1] ** -0.5).unflatten(1, (key.shape[1], -1))[..., None, :]  # [B, G, R, S, 1, .]
        return span_attention.attend(grouped, *common_pair, seen, *own_keys)[..., 0, :].flatten(1, 2)


def _gather_slots(values: Tensor, indices: Tensor | None) -> Tensor:
    """values [B, heads, S, 1, head_dim], places [B, S'] -> [B, heads, S', 1, head_dim]"""
    if indices is None:
        return values
    return values.gather(2, indices[:, None, :, None, None].expand(-1, values.shape[1], -1, -1, values.shape[-1]))
