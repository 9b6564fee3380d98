"""The target's attention: transformers' own sdpa, or matrix products where sdpa is slow on a CPU or lacks a feature.

Measured on two cores (results/02-threads.md): for a batch of 32 rows that each read one token, the CPU kernel of
scaled_dot_product_attention takes several times as long as two matrix products, in bfloat16 above all.
"""

import os
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specdec.core.cached_keys import CachedKeys, attend_cached
from specdec.core.varlen import Segments, attend_segments

IMPLEMENTATION = "specdec"
MAX_SDPA_ROWS, MAX_PRODUCT_TOKENS = 3, 16  # with at most so many rows, or more tokens than this, sdpa is not slower
MAX_SCORES = 2**26  # scores that matrix products make at a time


def avoid_cudnn() -> None:
    """Lets sdpa use flash attention, for all of this process. A user who sets TORCH_CUDNN_SDPA_* is left alone.

    Since torch 2.11 sdpa prefers cuDNN on Hopper GPUs. cuDNN makes a plan, in 25 to 400 ms, for every new shape, and texts are
    read in groups of other sizes at every step.
    """
    if not any(name.startswith("TORCH_CUDNN_SDPA_") for name in os.environ):
        torch.backends.cuda.enable_cudnn_sdp(False)


def choose_implementation(kind: type[PreTrainedModel]) -> str:
    """The attention to load a model of this class with: this file's, or sdpa where the class chooses its attention itself.

    Raises ValueError for a class with neither: its own attention would add a boolean mask to the scores.
    """
    if kind._can_set_attn_implementation():
        return IMPLEMENTATION
    if kind._supports_sdpa:
        return "sdpa"
    raise ValueError(
        f"{kind.__name__} computes attention in its own way, which takes no mask over a tree of drafts. Choose a target "
        "whose model in transformers supports attn_implementation='sdpa'."
    )


def compute_attention(
    module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    segments: Segments | None = None,
    cached: dict[int, CachedKeys] | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """query [B, H, S, E], key [B, G, C, E], value [B, G, C, V], mask [B, 1, S, C] bool -> [B, S, H, V]

    s_aux [H]: attention sinks, one more score per head whose value is zero (gpt-oss)
    softcap: c in c * tanh(score / c), applied before the mask (Gemma 2)
    segments: texts that stand one after the other in one row, each of which is read alone; the mask is then of `make_segment_mask`
    cached: what queries see, where K and V are those of a cache that is read to its length; by the size of the mask's dimension 1
    """
    if cached is not None or segments is not None:
        if softcap is not None or attention_mask is None:
            raise ValueError("the kernel for texts has no cap of scores, and it needs what stands for a mask")
        scale = scaling or query.shape[-1] ** -0.5
        if segments is not None:
            window = attention_mask.shape[-1] - 1 if attention_mask.shape[-1] else None
            return read_segments(query, key, value, segments, scale=scale, window=window, sinks=s_aux), None
        seen = cast(dict[int, CachedKeys], cached)[attention_mask.shape[1]]
        return attend_cached(query, key, value, seen, scale=scale, sinks=s_aux).transpose(1, 2).contiguous(), None
    num_rows, _, num_tokens, _ = query.shape
    if s_aux is not None or softcap is not None:
        return multiply_attention(
            query, key, value, attention_mask, scaling=scaling, sinks=s_aux, softcap=softcap
        ), None
    if query.device.type != "cpu" or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    if num_rows <= MAX_SDPA_ROWS or num_tokens > MAX_PRODUCT_TOKENS:
        # Called directly, because transformers would first copy each key for all heads of its group
        out = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    return multiply_attention(query, key, value, attention_mask, scaling=scaling), None


def make_segment_mask(window: int | None, device: torch.device) -> Tensor:
    """What a layer takes in place of a mask, where it reads segments: no values, but a shape that tells its window."""
    return torch.empty(1, 1, 1, window or 0, dtype=torch.bool, device=device)


def read_segments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    segments: Segments,
    *,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention inside each text of one row; shapes as for `attention`. window: as of `attend_segments`"""
    width = value.shape[-1]
    if width < query.shape[-1]:  # latent attention: the kernel has one width
        value = F.pad(value, (0, query.shape[-1] - width))
    q, k, v = (entries[0].transpose(0, 1) for entries in (query, key, value))  # [T, H or G, E]
    out, log_sum = attend_segments(q, k, v, segments, scale=scale, window=window)
    if sinks is not None:  # one more score takes a share of every softmax, and gives no value
        share = torch.sigmoid(log_sum - sinks[:, None].to(log_sum.dtype))  # [H, T]
        out = out * share.transpose(0, 1)[..., None].to(out.dtype)
    return out[None, ..., :width]


def multiply_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    *,
    scaling: float | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention by matrix products; shapes as for `attention`. mask=None: causal"""
    num_rows, num_heads, num_tokens, width = query.shape
    num_keys, groups = key.shape[2], key.shape[1]
    max_tokens = max(1, MAX_SCORES // (num_rows * num_heads * num_keys))
    if num_tokens > max_tokens:
        causal = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_tokens)
        masks = (causal[None, None] if mask is None else mask).split(max_tokens, dim=2)
        outputs = [
            multiply_attention(tokens_query, key, value, seen, scaling=scaling, sinks=sinks, softcap=softcap)
            for tokens_query, seen in zip(query.split(max_tokens, dim=2), masks)
        ]
        return torch.cat(outputs, dim=1)
    if mask is None:
        mask = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_tokens)
    query = (query * (scaling or width**-0.5)).reshape(num_rows, groups, -1, width)  # [B, G, H/G * S, E]
    scores = query @ key.transpose(-1, -2)  # [B, G, H/G * S, C]
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    # Not minus infinity: a query that sees nothing, such as padding, must not become NaN
    scores = scores.view(num_rows, num_heads, num_tokens, -1).masked_fill(~mask, torch.finfo(scores.dtype).min)
    if sinks is not None:
        column = sinks.to(scores.dtype)[None, :, None, None].expand(num_rows, -1, num_tokens, -1)
        scores = torch.cat([scores, column], dim=-1)
    weights = scores.float().softmax(-1) if scores.element_size() < 4 else scores.softmax(-1)  # [B, H, S, C]
    weights = weights[..., :num_keys].to(value.dtype)
    out = weights.reshape(num_rows, groups, -1, num_keys) @ value  # [B, G, H/G * S, V]
    return out.view(num_rows, num_heads, num_tokens, -1).transpose(1, 2)


AttentionInterface.register(IMPLEMENTATION, compute_attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
