"""Attention with a penalty for distance (ALiBi, 2108.12409), for texts and for trees of drafts.

transformers makes the penalties from a mask over one text [B, C]: its number of visible tokens so far is a position. In
a tree, neighbours share a position, so a mask [B, 1, S, C] carries the positions of the keys in an attribute.
"""

import functools
import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn

BUILDER = "build_alibi_tensor"  # function of a transformers module: (mask, num_heads, dtype) -> [B * H, 1, C]


def take_positions(decoder: nn.Module) -> bool:
    """Lets the penalties of a decoder's module follow the keys' positions. Returns whether it has such penalties."""
    module = sys.modules[type(decoder).__module__]
    build = getattr(module, BUILDER, None)
    if build is None or not getattr(decoder.config, "alibi", True):  # some Falcons have rotary embeddings
        return False
    if not isinstance(build, functools.partial):
        setattr(module, BUILDER, functools.partial(_build_penalties, build))
    return True


def mark_positions(mask: Tensor, keys: Tensor) -> Tensor:
    """The mask [B, 1, S, C] with the positions [B, C] of its keys."""
    mask.key_positions = keys  # type: ignore[attr-defined]
    return mask


def _build_penalties(build: Callable, mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """The penalties [B * H, 1, C] of the keys that a mask is about, rounded as `build` rounds them."""
    if mask.dim() == 2:
        return build(mask, num_heads, dtype)
    keys = mask.key_positions  # type: ignore[attr-defined]
    ladder = build(torch.ones_like(keys[:1]), num_heads, dtype)[:, 0]  # [H, C], of positions from 0
    return ladder[:, keys.clamp(max=keys.shape[1] - 1)].transpose(0, 1).flatten(0, 1)[:, None]
