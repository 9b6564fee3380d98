"""The target's attention: transformers' own sdpa, or matrix products where sdpa is slow on a CPU or lacks a feature.

Measured on two cores (results/02-threads.md) with 32 rows that each read one token: the CPU kernel of
scaled_dot_product_attention takes several times as long as two matrix products, above all in bfloat16.
"""

import functools
import os

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from specdec.core.cache import attend_masked
from specdec.core.cached_keys import CachedKeys, Piece, attend_cached, attend_piece
from specdec.core.varlen import Segments, attend_segments

IMPLEMENTATION = "specdec"
# Sdpa is not slower for at most MAX_SDPA_ROWS rows, or for more than MAX_PRODUCT_TOKENS tokens (results/02-threads.md)
MAX_SDPA_ROWS, MAX_PRODUCT_TOKENS = 3, 16
MAX_SCORES = 2**26  # upper bound of the scores that matrix products make at a time: 256 MiB in float32


def avoid_cudnn() -> None:
    """Lets sdpa use flash attention in all of this process, unless the user sets TORCH_CUDNN_SDPA_*.

    Since torch 2.11 sdpa prefers cuDNN on Hopper GPUs. cuDNN makes a plan, in 25 to 400 ms, for every new shape, and
    texts are read in groups of other sizes at every step.
    """
    if not any(name.startswith("TORCH_CUDNN_SDPA_") for name in os.environ):
        torch.backends.cuda.enable_cudnn_sdp(False)


def choose_implementation(kind: type[PreTrainedModel]) -> str:
    """The attention implementation for a model of this class: this file's, sdpa, or else its own, which adds masks."""
    if kind._can_set_attn_implementation():
        return IMPLEMENTATION
    return "sdpa" if kind._supports_sdpa else "eager"


def make_additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask that is added to scores, of one that is True for visible keys."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def compute_attention(  # noqa: PLR0913  # transformers' signature
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
    text_piece: Piece | None = None,
    **kwargs,
) -> tuple[Tensor, None]:
    """Attention [B, S, H, V] of a layer, for transformers. query [B, H, S, E], key [B, G, C, E], value [B, G, C, V]

    attention_mask [B, 1, S, C] bool: visible keys; None: causal
    s_aux [H]: attention sinks, one more score for each head whose value is zero (gpt-oss)
    softcap: c in c * tanh(score / c), applied before the mask (Gemma 2)
    segments: texts of one row, each of which is read alone; the mask is then a result of `make_segment_mask`
    cached: visible entries of a cache that is read to its length, by the size of dimension 1 of the layer's mask
    text_piece: a part of a text, whose keys are those of a cache; the mask is as for segments
    """
    seen = segments or cached or text_piece
    if seen is not None:
        if softcap is not None or attention_mask is None:
            raise ValueError("the kernel for texts has no cap of scores, and it needs what stands for a mask")
        scale = scaling or query.shape[-1] ** -0.5
        return attend_without_mask(query, key, value, seen, attention_mask, scale=scale, sinks=s_aux), None
    if s_aux is not None or softcap is not None or _is_sdpa_slow(query, attention_mask):
        return multiply_attention(
            query, key, value, attention_mask, scaling=scaling, sinks=s_aux, softcap=softcap
        ), None
    if query.device.type != "cpu" or attention_mask is None:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)
    # Called directly, because transformers would first copy each key for all heads of its group
    return attend_masked(query, key, value, attention_mask, scale=scaling).transpose(1, 2), None


def _is_sdpa_slow(query: Tensor, mask: Tensor | None) -> bool:
    """Whether sdpa is slower than matrix products: on a CPU, under a mask, for few tokens of many rows."""
    many_rows = query.shape[0] > MAX_SDPA_ROWS and query.shape[2] <= MAX_PRODUCT_TOKENS
    return query.device.type == "cpu" and mask is not None and many_rows


def make_segment_mask(window: int | None, device: torch.device) -> Tensor:
    """The mask of a layer that reads segments: an empty tensor whose last dimension is the window, 0 for none."""
    return torch.empty(1, 1, 1, window or 0, dtype=torch.bool, device=device)


def attend_without_mask(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    seen: Segments | Piece | dict[int, CachedKeys],
    stand_in: Tensor,
    *,
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """Attention over what `seen` says. Shapes as of `compute_attention`; stand_in: a tensor in place of a mask"""
    window = stand_in.shape[-1] or None  # see `make_segment_mask`
    if isinstance(seen, Segments):
        return read_segments(query, key, value, seen, scale=scale, window=window, sinks=sinks)
    if isinstance(seen, Piece):
        out, log_sum = attend_piece(query, key, value, seen.num_before, scale=scale, window=window)
        return add_sinks(out, log_sum, sinks).transpose(1, 2)
    cached = seen[stand_in.shape[1]]
    return attend_cached(query, key, value, cached, scale=scale, sinks=sinks).transpose(1, 2).contiguous()


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
    """Attention inside each text of one row. Shapes as of `compute_attention`

    window: positions that a query sees, its own included; None: all
    """
    width = value.shape[-1]
    if width < query.shape[-1]:  # latent attention: the kernel has one width
        value = F.pad(value, (0, query.shape[-1] - width))
    q, k, v = (entries[0].transpose(0, 1) for entries in (query, key, value))  # [T, H or G, E]
    out, log_sum = attend_segments(q, k, v, segments, scale=scale, window=None if window is None else window - 1)
    return add_sinks(out.transpose(0, 1), log_sum, sinks).transpose(0, 1)[None, ..., :width]


def add_sinks(out: Tensor, log_sum: Tensor, sinks: Tensor | None) -> Tensor:
    """out [.., H, S, V] with one more score in each softmax, whose value is zero. log_sum [.., H, S], sinks [H]"""
    if sinks is None:
        return out
    return out * torch.sigmoid(log_sum - sinks[:, None].to(log_sum.dtype))[..., None].to(out.dtype)


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
    """Attention by matrix products. Shapes as of `compute_attention`; mask None: causal"""
    num_rows, num_heads, num_tokens, width = query.shape
    num_keys, groups = key.shape[2], key.shape[1]
    if mask is None:
        causal = torch.ones(num_tokens, num_keys, dtype=torch.bool, device=query.device).tril(num_keys - num_tokens)
        mask = causal[None, None]
    max_tokens = max(1, MAX_SCORES // (num_rows * num_heads * num_keys))
    if num_tokens > max_tokens:
        chunks = zip(query.split(max_tokens, dim=2), mask.split(max_tokens, dim=2))
        attend = functools.partial(multiply_attention, scaling=scaling, sinks=sinks, softcap=softcap)
        return torch.cat([attend(part, key, value, seen) for part, seen in chunks], dim=1)
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
