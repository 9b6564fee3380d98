"""The mask of packed documents, which training never makes: the reference of spans, texts and packs."""

import torch
from torch import Tensor

from specdec.core import masks


def document_mask(index: Tensor, *, lag: int = 0) -> Tensor:
    """index [B, T], the document of each entry (-1: none) -> [B, 1, T, T]: causal inside each document.

    lag: an entry sees itself, and entries at least `lag` places before it. An entry
        of no document sees itself only, because a softmax needs a key.
    """
    num = index.shape[1]
    same = (index[:, :, None] == index[:, None, :]) & (index >= 0)[:, None, :]  # [B, T, T]
    mask = same & masks.causal_mask(num, index.device).tril(-lag) | torch.eye(
        num, dtype=torch.bool, device=index.device
    )
    return mask[:, None]
