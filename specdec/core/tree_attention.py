"""Attention of all nodes of a tree over a cache, in two kernels, with lengths and ancestors from the device.

The kernels (tree_kernels.py) cut each row's keys by its own length, so the capacity of a cache costs nothing. All nodes
and query heads of a key head read a key together. Ancestors among the pending entries are bits of 64-bit words.

No library has this for all cases here. FlashInfer's wrappers plan from lengths on the host before each replay of a
graph. Its XQA has lengths on the device, masks and sinks, but needs pages and compute capability 9.0 (no A100), and its
windows count entries, not depths. flash-attn has lengths on the device, but no mask over a tree (its issue 924).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core import fast
from specdec.core.devices import round_up_power

WORD_BITS = 64  # pending entries of a word
MAX_TILE = 64  # queries of a thread block
TILE_VALUES = 8192  # outputs of a thread block in float32, which its registers hold
MAX_BLOCKS = 128  # thread blocks that share the keys of all rows; an H100 has 132 multiprocessors
MAX_PARTS = 64  # of a row's keys; more would fill the registers of the kernel that joins them


def pack_words(seen: Tensor) -> Tensor:
    """Words [..., ceil(P / 64)] int64: bit p % 64 of word p // 64 is seen[..., p]. seen [..., P] bool"""
    num = seen.shape[-1]
    place = torch.arange(num, device=seen.device)
    word = torch.arange(-(-num // WORD_BITS), device=seen.device)[:, None]
    bits = (seen[..., None, :] & (place // WORD_BITS == word)).to(torch.int64)  # [..., W, P]
    return (bits << place % WORD_BITS).sum(-1)


def find_tree_keys(ancestors: Tensor, lengths: Tensor, window: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """Words, firsts and lengths of `attend_tree`.

    ancestors [B, S, P] bool: pending entries that each query sees; lengths [B]: committed entries
    window: positions that a query sees, itself included; None: all. Positions must count entries.
    """
    if window is None:
        return pack_words(ancestors), torch.zeros_like(ancestors[..., 0], dtype=torch.int64), lengths
    depths = ancestors.sum(-1)  # [B, S] from 1
    seen = ancestors
    if ancestors.shape[1] == ancestors.shape[2]:
        seen = ancestors & (depths[:, None] > depths[..., None] - window)
    return pack_words(seen), (lengths[:, None] + depths - window).clamp(min=0), lengths


@torch.library.custom_op("specdec::attend_tree", mutates_args=())
def attend_tree(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    words: Tensor,
    firsts: Tensor,
    lengths: Tensor,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention [B, S, H, E] of queries over a cache's committed and pending entries.

    query [B, H, S, E]; key, value [B, G, C, E]: all entries of the cache
    words [B, S, W] int64: pending entries that each query sees, see `pack_words`; they stand behind the committed ones
    firsts [B, S] int64: first committed entry that each query sees; lengths [B]: committed entries
    sinks [H]: one more score of each head, with a value of zero
    """
    rows, heads, num, width = query.shape
    groups, capacity = key.shape[1:3]
    entry = torch.arange(capacity)
    place = entry - lengths[:, None, None]  # [B, 1, C] among the pending entries
    word = (place // WORD_BITS).clamp(0, words.shape[2] - 1).expand(-1, num, -1)
    in_tree = (words.gather(2, word) >> place % WORD_BITS & 1 == 1) & (place < WORD_BITS * words.shape[2])
    seen = torch.where(place < 0, entry >= firsts[..., None], in_tree)[:, None]  # [B, 1, S, C]
    scores = scale * (query.reshape(rows, groups, -1, width) @ key.mT).view(rows, heads, num, capacity)
    scores = scores.to(torch.promote_types(query.dtype, torch.float32)).masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(scores.dtype).view(1, heads, 1, 1).expand(rows, -1, num, -1)
        scores = torch.cat([scores, column], dim=-1)
    shares = scores.softmax(-1)[..., :capacity].masked_fill(~seen, 0)  # a query may see nothing
    out = shares.to(value.dtype).view(rows, groups, -1, capacity) @ value
    return out.view(query.shape).transpose(1, 2).contiguous()


@attend_tree.register_kernel("cuda")
def _(query, key, value, words, firsts, lengths, scale, sinks=None):
    from specdec.core import tree_kernels  # imported here: needs triton

    cut = cut_queries(query.shape, key.shape[1])
    with torch.cuda.device(query.device):
        return tree_kernels.attend(query, key, value, (words, firsts, lengths), cut=cut, scale=scale, sinks=sinks)


@attend_tree.register_fake
def _(query, key, value, words, firsts, lengths, scale, sinks=None):
    rows, heads, num, width = query.shape
    return query.new_empty(rows, num, heads, width)


def cut_queries(shape: Sequence[int], groups: int) -> tuple[int, int, int]:
    """Queries of a tile, tiles of a key head, and parts of a row's keys. shape: (B, H, S, E); groups: key heads

    They follow from shapes alone, so a CUDA graph holds for all lengths, and a larger capacity changes nothing.
    """
    rows, heads, num, width = shape
    queries = heads // groups * num
    most = min(MAX_TILE, TILE_VALUES // round_up_power(max(width, MAX_TILE)))
    size = min(max(16, round_up_power(queries)), most)
    tiles = -(-queries // size)
    return size, tiles, max(1, min(MAX_PARTS, MAX_BLOCKS // (rows * groups * tiles)))


def check_tree_attention(device: torch.device) -> None:
    """Compares the kernels with float64 on this device. Raises ValueError if they differ beyond rounding."""
    torch.manual_seed(0)
    lengths = torch.tensor([700, 0])
    for num, width, window in ((1, 128, None), (6, 64, 40), (64, 128, None), (70, 256, 3)):
        ancestors = torch.eye(num, dtype=torch.bool).repeat(2, 1, 1)
        for node in range(1, num):  # a chain in row 0, a binary tree in row 1
            for row, parent in enumerate((node - 1, (node - 1) // 2)):
                ancestors[row, node] |= ancestors[row, parent]
        query = torch.randn(2, 8, num, width, dtype=torch.float64)
        key, value = torch.randn(2, 2, 2, 800, width, dtype=torch.float64)
        tree = find_tree_keys(ancestors, lengths, window)
        for sinks in (None, torch.randn(8, dtype=torch.float64)):
            reference = attend_tree(query, key, value, *tree, width**-0.5, sinks)
            operands = [tensor.to(device, torch.bfloat16) for tensor in (query, key, value)]
            low_sinks = None if sinks is None else sinks.to(device, torch.bfloat16)
            result = attend_tree(*operands, *(tensor.to(device) for tensor in tree), width**-0.5, low_sinks)
            fast.compare_with_reference(f"{num} nodes", [result], [reference], 0.02)
