"""Who attends to whom. Every mask is boolean, True where a query may see a key (docs/architecture.md)."""

import torch
from torch import Tensor


def causal(num: int, device) -> Tensor:
    """[num, num]: each entry sees itself and those before it."""
    return torch.ones(num, num, dtype=torch.bool, device=device).tril()


def documents(index: Tensor, *, lag: int = 0) -> Tensor:
    """index [B, T], the document of each entry (-1: none) -> [B, 1, T, T]: causal inside each document.

    lag: an entry sees itself, and those that stand at least `lag` before it. An entry of no document sees itself only: a
        row without any key would be a softmax over nothing.
    """
    num = index.shape[1]
    same = (index[:, :, None] == index[:, None, :]) & (index >= 0)[:, None, :]  # [B, T, T]
    mask = same & causal(num, index.device).tril(-lag) | torch.eye(num, dtype=torch.bool, device=index.device)
    return mask[:, None]


def committed(lengths: Tensor, visible: int) -> Tensor:
    """lengths [B] -> [B, 1, 1, visible]: only the committed entries are seen."""
    return (torch.arange(visible, device=lengths.device) < lengths[:, None])[:, None, None]


def pending(ancestors: Tensor, lengths: Tensor, visible: int) -> Tensor:
    """The mask of queries that stand behind each row's committed entries.

    ancestors [B, S, P] (or [S, P]): which of the row's P pending entries each of the S queries sees (itself included)
    lengths [B]: committed entries, all of them seen; visible: entries of the cache that the pass reads
    -> [B, 1, S, visible]
    """
    if ancestors.dim() == 2:
        ancestors = ancestors.expand(lengths.shape[0], -1, -1)
    offset = torch.arange(visible, device=lengths.device) - lengths[:, None]  # [B, C], >= 0 behind the committed
    num_pending = ancestors.shape[2]
    inside = (offset >= 0) & (offset < num_pending)  # [B, C]
    column = offset.clamp(0, num_pending - 1)[:, None].expand(-1, ancestors.shape[1], -1)  # [B, S, C]
    return ((offset < 0)[:, None] | (inside[:, None] & ancestors.gather(2, column)))[:, None]


def jacobi_blocks(index: Tensor, starts: Tensor, num: int) -> Tensor:
    """The mask of M blocks of `num` tokens behind a text of T tokens. Each block continues the text before its start.

    index [B, T]: documents, as in `documents`; starts [B, M]: where in the row each block's first token would stand.
    Token k of block m is entry k * M + m. So the order is the same whether blocks are read at once or token by token:

        keys     x_0 .. x_(T-1)                     | k=0: block 0 .. M-1 | k=1: block 0 .. M-1 | ...
        sees     the block's document before start  | tokens 0 .. k of its own block

    -> [B, 1, num * M, T + num * M]
    """
    length = index.shape[1]
    places = torch.arange(length, device=index.device)
    document = index.gather(1, (starts - 1).clamp(min=0))  # [B, M] of the token before the start
    text = (index[:, None] == document[..., None]) & (places < starts[..., None])  # [B, M, T]
    own = torch.eye(starts.shape[1], dtype=torch.bool, device=index.device)  # [M, M]
    own = (causal(num, index.device)[:, None, :, None] & own[None, :, None]).flatten(2).flatten(0, 1)  # [n*M, n*M]
    return torch.cat([text.repeat(1, num, 1), own.expand(len(index), -1, -1)], dim=-1)[:, None]
