"""Keys and values while decoding (`RowCache`) and while training (`UnrollCache`).

A head's attention calls `cache.attend` in both loops. The cache and the mask decide which keys a query sees
(docs/architecture.md). Only this file uses the cache interface of transformers, and only this file assigns the fields of
a cache (tests/test_imports.py).
"""

import copy
from collections.abc import Sequence

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F

CacheMark = tuple[Tensor, list[int]]  # what `RowCache.mark` returns: lengths [B], and the same on the host


class RowCache(transformers.Cache):
    """K and V of fixed capacity with a length per row.

    Each row holds `lengths[b]` committed entries and, behind them, `pending` entries: those that a draft or a draft tree
    wrote and that are not committed yet. One pass is: `reserve(S)`, the forward pass (which calls `update` once a layer),
    then `commit`, with `keep` before it where the drafts were a tree. A second `reserve` before the `commit` puts the
    next level of a tree behind the first.

    Capacity doubles when it is exceeded, so that few shapes occur. A forward pass reads the whole capacity; its mask
    hides the entries that are not in use.
    """

    def __init__(
        self, *, num_layers: int, batch: int, num_heads: int, head_dim: int, dtype, device, capacity: int = 256
    ):
        super().__init__(layers=[])
        # [layers, 2, B, heads, C, head_dim]: one tensor, so that `keep` moves all layers at once
        self.data = torch.zeros(num_layers, 2, batch, num_heads, capacity, head_dim, dtype=dtype, device=device)
        self.halves = _halves(self.data)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # [B]
        self.skipped = torch.zeros_like(self.lengths)  # [B] earlier positions that have no entry here
        self.rows = torch.arange(batch, device=device)[:, None]  # [B, 1]
        self.pending = 0
        self.known = [0] * batch  # the lengths on the host, so that no shape waits for the device
        self.slots = torch.zeros(batch, 0, dtype=torch.long, device=device)  # [B, S] where the next update writes

    @property
    def visible(self) -> int:
        """C: the entries that a forward pass reads."""
        return self.data.shape[4]

    def make_room(self, num: int) -> None:
        """Raises the capacity, if needed, for `num` more entries behind the committed and pending ones."""
        end, more = self.get_seq_length() + self.pending + num, 0
        while self.visible + more < end:
            more += self.visible + more
        if more:
            self.data = F.pad(self.data, (0, 0, 0, more))
            self.halves = _halves(self.data)

    def reserve(self, num: int) -> None:
        """The next forward pass writes `num` entries behind the committed and pending ones."""
        self.make_room(num)
        offsets = torch.arange(self.pending, self.pending + num, device=self.lengths.device)  # [S]
        self.slots = self.lengths[:, None] + offsets  # [B, S]
        self.pending += num

    def over(
        self,
        halves: Sequence[Tensor],
        lengths: Tensor,
        *,
        slots: Tensor | None = None,
        pending: int | None = None,
    ) -> "RowCache":
        """The same cache over other tensors, for a compiled function, which has these tensors as its arguments.

        halves: K and V of every layer in turn, [B, heads, C, head_dim] each; or those of one layer, whatever its number
        lengths [B]; slots [B, S] and pending: if they differ from this cache's
        """
        cache = copy.copy(self)
        cache.halves, cache.lengths = list(halves), lengths
        cache.slots = self.slots if slots is None else slots
        cache.pending = self.pending if pending is None else pending
        return cache

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args, **kwargs
    ) -> tuple[Tensor, Tensor]:
        """[B, heads, S, head_dim] in; the visible entries [B, heads, visible, head_dim] out."""
        keys, values = self.look(layer_idx)
        keys[self.rows, :, self.slots] = key_states.transpose(1, 2)
        values[self.rows, :, self.slots] = value_states.transpose(1, 2)
        return keys, values

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """query [B, heads, S, head_dim], mask [B, 1, S, visible] bool -> [B, heads, S, head_dim]"""
        keys, values = self.update(key, value, layer)
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)

    def look(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer as they are: [B, heads, visible, head_dim] each"""
        place = 2 * layer if len(self.halves) > 2 else 0
        return self.halves[place], self.halves[place + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The number of committed entries of the longest row."""
        return max(self.known)

    def commit(self, num: Tensor, counts: list[int]) -> None:
        """Commits the first `num[b]` pending entries of row b and drops the rest; counts: `num` on the host."""
        self.lengths = self.lengths + num
        self.known = [known + count for known, count in zip(self.known, counts)]
        self.pending = 0

    def drop_pending(self) -> None:
        """Drops all pending entries; the next pass overwrites them."""
        self.pending = 0

    def keep(self, path: Tensor) -> None:
        """Moves the nodes of a path to the first pending places. path [B, P], node 0 first; `commit` follows."""
        source = self.lengths[:, None] + path  # [B, P]
        goal = self.lengths[:, None] + torch.arange(path.shape[1], device=path.device)  # [B, P]
        moved = self.data[:, :, self.rows, :, source]  # [B, P, layers, 2, heads, head_dim]
        self.data[:, :, self.rows, :, goal] = moved

    def mark(self) -> CacheMark:
        """The committed entries of now, for `rewind`."""
        return self.lengths, self.known

    def rewind(self, mark: CacheMark) -> None:
        """Drops everything that was committed since `mark`, and all pending entries."""
        self.lengths, self.known = mark
        self.pending = 0

    def take_part(self, other: "RowCache", entries: Tensor) -> None:
        """Replaces everything here by copies of chosen entries of another cache of the same layers, rows and heads.

        entries [layers, B, heads, M]: which ones, in any order. A row of `other` with fewer than M committed entries gives
        those; its further places are not read. The capacity here must be at least M.
        """
        num = entries.shape[-1]
        flat = other.data.flatten(0, 4)  # [layers * 2 * B * heads * C, head_dim]
        first = torch.arange(0, len(flat), other.visible, device=flat.device)  # where each K or V of a head begins
        wanted = first.view(*other.data.shape[:4], 1) + entries[:, None]  # [layers, 2, B, heads, M]
        self.data[..., :num, :] = flat.index_select(0, wanted.flatten()).view(*wanted.shape, -1)
        self.lengths = other.lengths.clamp(max=num)
        self.known = [min(known, num) for known in other.known]
        self.skipped = other.lengths - self.lengths
        self.pending = 0


def _halves(data: Tensor) -> list[Tensor]:
    return [half for layer in data.unbind(0) for half in layer.unbind(0)]


class UnrollCache:
    """The keys of a training unroll: append-only and differentiable.

    Step 1 stores the keys of all T slots. Each later step of slot j sees the step-1 keys of slots <= j (its mask) and
    its own keys of steps 2..d. The latter are a diagonal, which is computed directly. Later steps may run on a subset
    of S slots.
    """

    def __init__(self):
        self.base: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> step-1 K, V [B, heads, T, head_dim]
        self.own: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> K, V of steps 2..d [B, heads, S, head_dim]

    def update(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Stores K and V that all steps see: a block drafter's context."""
        self.base[layer] = key, value

    def look(self, layer: int) -> tuple[Tensor, Tensor]:
        """The K and V that `update` stored, [B, heads, T, head_dim] each"""
        return self.base[layer]

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        """query [B, heads, S, head_dim], mask [B, 1, S, T] bool over step-1 keys -> [B, heads, S, head_dim]"""
        if layer not in self.base:
            self.base[layer] = key, value
            self.own[layer] = []
            return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
        self.own[layer].append((key, value))
        groups = query.shape[1] // key.shape[1]
        base_key, base_value = (x.repeat_interleave(groups, dim=1) for x in self.base[layer])  # [B, H, T, head_dim]
        own_keys, own_values = (torch.stack(part, dim=-2) for part in zip(*self.own[layer]))  # [B, heads, S, d-1, .]
        own_key, own_value = (x.repeat_interleave(groups, dim=1) for x in (own_keys, own_values))  # [B, H, S, d-1, .]
        query = query * query.shape[-1] ** -0.5
        past = (query @ base_key.transpose(-1, -2)).masked_fill(~mask, float("-inf"))  # [B, H, S, T]
        own = (own_key @ query[..., None]).squeeze(-1)  # [B, H, S, d-1]
        num_past = past.shape[-1]
        weights = torch.cat([past, own], dim=-1).softmax(dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
        weights = weights.to(query.dtype)  # [B, H, S, T + d-1]
        diagonal = (weights[..., None, num_past:] @ own_value).squeeze(-2)  # [B, H, S, head_dim]
        return weights[..., :num_past] @ base_value + diagonal
