"""What trained heads share: Llama's decoder block, whose attention takes its keys from the cache, and ridge regression."""

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from specdec.core.cache import RowCache
from specdec.core.devices import exact_products
from specdec.core.span_attention import Seen
from specdec.heads.borrowed import check_one_width
from specdec.heads.sizes import (
    POSITIONS,
    attention_heads,
    fields_of,
    mlp_width,
    norm_epsilon,
    rotary_parameters,
)
from specdec.target.model import Target

RMSNorm = LlamaRMSNorm
RIDGE = 0.01  # relative to the mean of the Gram matrix's diagonal


@exact_products()
def ridge(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The matrix A [D, E] for which A x is nearest to y over all chunks of pairs x [M, E], y [M, D]; at least float32

    See docs/methods.md, section 5.
    """
    gram = cross = torch.zeros(())
    for x, y in pairs:
        x, y = (part.to(torch.promote_types(part.dtype, torch.float32)) for part in (x, y))
        gram = gram.to(x) + x.T @ x
        cross = cross.to(x) + x.T @ y.to(x)
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    return torch.linalg.solve(gram, cross).T


def row_cache(config: LlamaConfig, weight: Tensor, *, layers: int, batch: int) -> RowCache:
    """An empty cache for attention of these shapes, in the dtype and on the device of `weight`."""
    return RowCache.alike(
        num_layers=layers,
        batch=batch,
        num_heads=cast(int, config.num_key_value_heads),
        head_dim=cast(int, config.head_dim),
        dtype=weight.dtype,
        device=weight.device,
    )


IMPORTED = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "rope_parameters", "hidden_act")


def block_config(target: Target, *, intermediate_size: int | None, block: dict | None = None) -> LlamaConfig:
    """The configuration of a head's block: `llama_config`, with the fields of `block` in which published heads differ.

    Raises ValueError for fields outside IMPORTED, and for a target whose embeddings have another width than its states.
    """
    if not set(block or ()) <= set(IMPORTED):
        raise ValueError(f"block={block} may hold {', '.join(IMPORTED)} and nothing else.")
    check_one_width(target)
    config = llama_config(target, intermediate_size=intermediate_size)
    if block:
        config = LlamaConfig(**{**config.to_dict(), **block})
    return config


def llama_config(target: Target, *, intermediate_size: int | None) -> LlamaConfig:
    """A Llama of the target's width, with its heads and rotary embedding as far as a Llama has such (sizes.py)."""
    fields = fields_of(target.config)
    queries, keys, head_dim = attention_heads(fields, target.width)
    return LlamaConfig(
        hidden_size=target.width,
        intermediate_size=intermediate_size or mlp_width(fields, target.width),
        num_attention_heads=queries,
        num_key_value_heads=keys,
        head_dim=head_dim,
        rms_norm_eps=norm_epsilon(fields),
        rope_parameters=rotary_parameters(fields, head_dim),
        max_position_embeddings=target.max_positions or POSITIONS,
        hidden_act="silu",
    )


class Rotary(LlamaRotaryEmbedding):
    """h (for its dtype and device), positions [B, S] -> cos, sin [B, S, head_dim]; has no parameters."""


class Attention(nn.Module):
    """Grouped-query attention over the keys that the cache returns. width: of the input, E"""

    def __init__(self, config: LlamaConfig, *, width: int, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = cast(int, config.head_dim)
        queries = config.num_attention_heads * self.head_dim
        keys = cast(int, config.num_key_value_heads) * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Seen, cache) -> Tensor:
        """x [B, S, E], rotary cos and sin [B, S, head_dim], mask [B, 1, S, keys] or spans -> [B, S, D]"""
        shape = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (p(x).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        query, key = apply_rotary_pos_emb(query, key, *rotary)  # [B, heads, S, head_dim]
        query, key = query.to(value.dtype), key.to(value.dtype)
        out = cache.attend(self.layer, query, key, value, mask)  # [B, heads, S, head_dim]
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def alone(self, x: Tensor) -> Tensor:
        """What it gives where every position attends to itself only: x [M, E] -> [M, D]"""
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [M, groups, head_dim]
        heads = self.o_proj.in_features // self.head_dim
        return self.o_proj(value.repeat_interleave(heads // value.shape[-2], dim=-2).flatten(-2))


class Block(nn.Module):
    """Attention and MLP, each with a residual; the head itself applies the norm before attention."""

    def __init__(self, config: LlamaConfig, *, width: int, layer: int):
        super().__init__()
        self.self_attn = Attention(config, width=width, layer=layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor], mask: Seen, cache) -> Tensor:
        """x [B, S, E] into attention, residual [B, S, D] -> [B, S, D]"""
        h = residual + self.self_attn(x, rotary, mask, cache)
        return h + self.mlp(self.post_attention_layernorm(h))

    def alone(self, h: Tensor) -> Tensor:
        """`forward` without attention: h [M, D] -> [M, D]"""
        return h + self.mlp(self.post_attention_layernorm(h))

    @torch.no_grad()
    def start_as_identity(self) -> None:
        """Sets weights so that forward(x, residual) = residual."""
        self.self_attn.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()

    @torch.no_grad()
    def solve_mlp(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets the MLP's last matrix by ridge regression on its hidden units, which stay random.

        pairs: h [M, D] before the MLP, and what h and the MLP's output together are to be nearest to, [M, D]
        """
        self.mlp.down_proj.weight.copy_(ridge((self._units(h), goal - h) for h, goal in pairs))

    def _units(self, h: Tensor) -> Tensor:
        x = self.post_attention_layernorm(h)
        return self.mlp.act_fn(self.mlp.gate_proj(x)) * self.mlp.up_proj(x)


class DecoderLayer(Block):
    """A whole layer of a Llama, with the norm before its attention."""

    def __init__(self, config: LlamaConfig, *, layer: int):
        super().__init__(config, width=config.hidden_size, layer=layer)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, h: Tensor, rotary: tuple[Tensor, Tensor], mask: Seen, cache) -> Tensor:  # type: ignore[override]
        """h [B, S, D] -> [B, S, D]"""
        return super().forward(self.input_layernorm(h), h, rotary, mask, cache)
