"""Keys and values while decoding (`RowCache`) and while training (`UnrollCache`).

A head's attention calls `cache.attend` and never learns which loop it is in: who is visible is the cache's and the
mask's business (architecture, 1.4). Only this file touches the cache interface of transformers.
"""

import copy
from collections.abc import Sequence

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F


class RowCache(transformers.Cache):
    """K and V of fixed capacity with a length per row.

    Each row holds `lengths[b]` committed entries and, behind them, `pending` entries that a draft or a draft tree wrote
    and that are not committed yet. Usage: `reserve(S)`, one forward pass (which calls `update` once a layer), then
    `commit` or `keep`; or `reserve` again, to read the next level of a tree behind the last.

    Capacity doubles when it is exceeded, so that few shapes occur; a forward pass sees all of it and masks what is not there.
    """

    def __init__(
        self, *, num_layers: int, batch: int, num_heads: int, head_dim: int, dtype, device, capacity: int = 256
    ):
        super().__init__(layers=[])
        # [layers, 2, B, heads, C, head_dim]: one tensor, so that `keep` moves all layers at once
        self.data = torch.zeros(num_layers, 2, batch, num_heads, capacity, head_dim, dtype=dtype, device=device)
        self.halves = _halves(self.data)
        self.lengths = torch.zeros(batch, dtype=torch.long, device=device)  # [B]
        self.skipped = torch.zeros_like(
            self.lengths
        )  # [B] positions without an entry here, all before the next token's
        self.rows = torch.arange(batch, device=device)[:, None]  # [B, 1]
        self.pending = 0
        self.known = [0] * batch  # on the host: bounds of the lengths, so that no shape waits for the device
        self.slots = torch.zeros(batch, 0, dtype=torch.long, device=device)  # [B, S] where the next update writes

    @property
    def longest(self) -> int:
        return max(self.known)

    @property
    def visible(self) -> int:
        """Entries that a forward pass sees."""
        return self.data.shape[4]

    def make_room(self, num: int) -> None:
        """Capacity for `num` entries behind everything that is there."""
        end, more = self.longest + self.pending + num, 0
        while self.visible + more < end:
            more += self.visible + more
        if more:
            self.data = F.pad(self.data, (0, 0, 0, more))
            self.halves = _halves(self.data)

    def reserve(self, num: int) -> None:
        """Makes the next forward pass write `num` entries behind everything that is there."""
        self.make_room(num)
        offsets = torch.arange(self.pending, self.pending + num, device=self.lengths.device)  # [S]
        self.slots = self.lengths[:, None] + offsets  # [B, S]
        self.pending += num

    def over(self, halves: Sequence[Tensor], lengths: Tensor) -> "RowCache":
        """The same place in other tensors: what a compiled function, to which they are arguments, works on.

        halves: K and V of every layer in turn, [B, heads, C, head_dim] each; two for one layer, whatever its number
        """
        cache = copy.copy(self)
        cache.halves, cache.lengths = list(halves), lengths
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
        """What `update` wrote, without writing: K, V [B, heads, visible, head_dim]"""
        place = 2 * layer if len(self.halves) > 2 else 0
        return self.halves[place], self.halves[place + 1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.longest

    def commit(self, num: Tensor, counts: list[int]) -> None:
        """The first `num[b]` pending entries of row b are committed, the rest dropped; counts: the same on the host."""
        self.lengths = self.lengths + num
        self.known = [known + count for known, count in zip(self.known, counts)]
        self.pending = 0

    def keep(self, path: Tensor) -> None:
        """Moves the nodes of a path, path [B, P], in order and node 0 first, to the first pending places; `commit` follows."""
        source = self.lengths[:, None] + path  # [B, P]
        goal = self.lengths[:, None] + torch.arange(path.shape[1], device=path.device)  # [B, P]
        moved = self.data[:, :, self.rows, :, source]  # [B, P, layers, 2, heads, head_dim]
        self.data[:, :, self.rows, :, goal] = moved


def _halves(data: Tensor) -> list[Tensor]:
    return [half for layer in data.unbind(0) for half in layer.unbind(0)]


class UnrollCache:
    """The keys of a training unroll: append-only and differentiable (architecture, 1.4).

    Step 1 stores the keys of all T slots. Each later step of slot j sees the step-1 keys of slots <= j (its mask) and
    its own keys of steps 2..d: a diagonal, computed directly. Later steps may run on a subset of S slots.
    """

    def __init__(self):
        self.base: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> step-1 K, V [B, heads, T, head_dim]
        self.own: dict[int, list[tuple[Tensor, Tensor]]] = {}  # layer -> K, V of steps 2..d [B, heads, S, head_dim]

    def update(self, key: Tensor, value: Tensor, layer: int) -> None:
        """Stores K and V that nothing differs from later: a block drafter's context."""
        self.base[layer] = key, value

    def look(self, layer: int) -> tuple[Tensor, Tensor]:
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
        own_key = torch.stack([k for k, _ in self.own[layer]], dim=-2).repeat_interleave(
            groups, dim=1
        )  # [B, H, S, d-1, .]
        own_value = torch.stack([v for _, v in self.own[layer]], dim=-2).repeat_interleave(groups, dim=1)
        query = query * query.shape[-1] ** -0.5
        past = (query @ base_key.transpose(-1, -2)).masked_fill(~mask, float("-inf"))  # [B, H, S, T]
        own = (own_key @ query[..., None]).squeeze(-1)  # [B, H, S, d-1]
        num_past = past.shape[-1]
        weights = torch.cat([past, own], dim=-1).softmax(dim=-1, dtype=torch.promote_types(query.dtype, torch.float32))
        weights = weights.to(query.dtype)  # [B, H, S, T + d-1]
        diagonal = (weights[..., None, num_past:] @ own_value).squeeze(-2)  # [B, H, S, head_dim]
        return weights[..., :num_past] @ base_value + diagonal
