"""Attention of drafts over committed keys, which are read to the row's length and never copied.

All nodes of a tree, and all query heads of one key head, see the same committed keys. So they are the queries of one
text, and the kernel of varlen.py reads each key once. A text is cut into parts, because few texts leave most of a GPU
idle (split keys of Flash-Decoding). Pending entries are few; a node sees its ancestors among them. They go through a
small masked product. One softmax joins all by their sums of exponents.

Where the path `tree` is allowed, the two kernels of tree_attention.py do all of it.

A piece of a text is read behind the keys before it, in the same way and also on a CPU (`attend_piece`).
"""

import functools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.nn import functional as F

from specdec.core import fast
from specdec.core.tree_attention import attend_tree, find_tree_keys

MAX_PENDING = 256  # entries of the masked product; longer passes, such as prompts, mask all entries
MIN_PART_KEYS = 256  # of a text's part
MIN_TEXTS = 128  # parts that keep a GPU busy (an H100 has 132 multiprocessors)
QUERY_BLOCK = 128  # queries of one thread block of the kernel
CPU_PIECE_TOKENS, DEVICE_PIECE_TOKENS = 1024, 8192  # of each text on a CPU, of all texts elsewhere
WINDOW_QUERIES = 128  # queries of a masked block in layers with a window, on a CPU
_flash_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class CachedKeys(NamedTuple):
    """The keys that the queries of a pass see.

    seen [B, 1, S, M] bool: entries that each query sees in the masked product; in layers with a window [B, 2, S, M]
    entries [B, M]: places of these entries in the cache: pending ones, and those at a window's edge
    table [3, N+1] int32: of N = B * G * parts texts the first query, the first key in the
        flattened cache, the number of keys. In its last column only the first line counts.

    On the path `tree` these are the words [B, 1 or 2, S, W] int64, the firsts and the lengths of `attend_tree`.
    """

    seen: Tensor
    entries: Tensor
    table: Tensor


@dataclass(frozen=True)
class Piece:
    """A pass over tokens of which each sees those before it, without a mask.

    num_before: entries of the cache that all of them see; their own stand behind these, the same places in all rows
    window: positions that a token sees, itself included; None: all
    lag: a token sees itself, and entries from `lag` on to `lag` before it
    """

    num_before: int
    window: int | None = None
    lag: int = 0


def count_piece_tokens(device: torch.device, num_rows: int) -> int:
    """The tokens of each of `num_rows` texts that are read at once: it bounds memory, and progress shows between.

    The CPU kernel takes larger blocks of queries from 768 on; pieces of 512 to 2,048 are as fast. On other devices
    launches bound small models, and shards of layers are gathered again for every piece.
    """
    return CPU_PIECE_TOKENS if device.type == "cpu" else max(1, DEVICE_PIECE_TOKENS // num_rows)


def find_cached_keys(
    ancestors: Tensor,
    lengths: Tensor,
    *,
    capacity: int,
    heads: tuple[int, int],
    window: int | None = None,
    tree: bool = False,
) -> CachedKeys:
    """The keys that queries behind the committed entries see.

    ancestors [B, S, P] bool: pending entries that each query sees; lengths [B]: committed entries, all of them seen
    capacity: entries of the cache; heads: numbers of query heads and of key heads
    window: positions that a query sees, itself included; None: all. Positions must count entries.
    tree: whether the path `tree` reads them
    """
    num_kinds = 1 if window is None else 2
    if tree:
        words, firsts, lengths = find_tree_keys(ancestors, lengths, window)
        return CachedKeys(words[:, None].expand(-1, num_kinds, -1, -1), firsts, lengths)
    num_rows, num, pending = ancestors.shape
    queries, groups = heads
    device = lengths.device
    entries = lengths[:, None] + torch.arange(pending, device=device)  # [B, P]
    seen = ancestors
    reach = capacity
    if window is not None:
        # The deepest query sees the fewest committed keys. Keys that only some queries see join the pending ones.
        first = (lengths + 1 - window).clamp(min=0)
        reach = min(capacity, window)
        edge = first[:, None] + torch.arange(pending - 1, device=device)  # [B, P - 1]
        depth = ancestors.sum(-1, keepdim=True) - 1  # [B, S, 1]
        inside = (edge < lengths[:, None])[:, None] & (edge[:, None] > lengths[:, None, None] + depth - window)
        seen = ancestors & (ancestors.sum(-1)[:, None] > depth + 1 - window) if num == pending else ancestors
        entries = torch.cat([edge, entries], dim=1)
        seen = torch.cat([inside, seen], dim=2)
        first = first + pending - 1
    # Cut each text of committed keys into parts by its own length, so that a large capacity costs nothing
    last = lengths + 1 if pending == 1 else lengths  # a single pending entry is a key like the committed ones
    rows = num_rows * groups
    per_text = queries // groups * num
    num_parts = max(1, min(-(-reach // MIN_PART_KEYS), MIN_TEXTS // (rows * -(-per_text // QUERY_BLOCK))))
    # A row of the table from each text's number: inductor of torch 2.11 refuses concatenation and padding here
    text_number = torch.arange(rows * num_parts + 1, device=device)  # the last one ends the text before
    row = (text_number // (groups * num_parts)).clamp(max=num_rows - 1)
    num_keys = last[row] if window is None else last[row] - first[row]
    size = ((num_keys + (num_parts - 1)) // num_parts).clamp(min=MIN_PART_KEYS)
    start = torch.minimum(text_number % num_parts * size, num_keys)
    used = torch.minimum(num_keys - start, size)
    cut = text_number // num_parts * capacity + (start if window is None else first[row] + start)
    kind = torch.arange(3, device=device)[:, None]
    table = torch.where(kind == 0, text_number * per_text, torch.where(kind == 1, cut, used)).to(torch.int32)
    return CachedKeys(seen[:, None].expand(-1, num_kinds, -1, -1), entries, table)


def attend_cached(
    query: Tensor, key: Tensor, value: Tensor, cached: CachedKeys, *, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """query [B, H, S, E]; key, value [B, G, C, E]: all entries of the cache -> [B, H, S, E]

    sinks [H]: one more score of each head, with a value of zero
    """
    num_rows, heads, num, width = query.shape
    groups = key.shape[1]
    seen, entries, table = cached
    if seen.dtype == torch.int64:
        return attend_tree(query, key, value, seen[:, 0], entries, table, scale, sinks).transpose(1, 2)
    grouped = query.reshape(num_rows, groups, -1, width)  # [B, G, Q, E]
    num_parts = (table.shape[1] - 1) // (num_rows * groups)
    texts = grouped[:, :, None].expand(-1, -1, num_parts, -1, -1).reshape(num_rows * groups * num_parts, -1, width)
    out, log_sum = _attend_texts(texts, key.flatten(0, 2), value.flatten(0, 2), table, scale)
    outs = out.view(num_rows, groups, num_parts, -1, width)
    sums = log_sum.view(num_rows, groups, num_parts, -1)
    if num_parts == 1 and entries.shape[1] == 1 and sinks is None:
        return outs.view(num_rows, heads, num, width)
    # Shares: one softmax over the sums of the parts, the scores of the entries, and the sinks
    empty = table[2, :-1].view(num_rows, groups, 1, num_parts) == 0
    shares = [sums.transpose(2, 3).masked_fill(empty, -torch.inf)]  # [B, G, Q, parts]
    if entries.shape[1] > 1:
        rows = torch.arange(num_rows, device=entries.device)[:, None]
        own_key, own_value = (tensor[rows, :, entries].transpose(1, 2) for tensor in (key, value))  # [B, G, M, E]
        scores = (grouped @ own_key.mT).to(sums.dtype).view(num_rows, groups, -1, num, entries.shape[1])
        scores = scores.mul_(scale).masked_fill_(~seen[:, :1, None], -torch.inf)
        shares.append(scores.flatten(2, 3))  # [B, G, Q, M]
    if sinks is not None:
        column = sinks.to(sums.dtype).view(1, groups, -1, 1, 1).expand(num_rows, -1, -1, num, -1)
        shares.append(column.flatten(2, 3))
    share, *entry_shares = softmax_jointly(shares)
    joined = (share.transpose(2, 3)[..., None] * outs).sum(2)  # [B, G, Q, E]
    if entries.shape[1] > 1:
        joined = joined + entry_shares[0].to(value.dtype) @ own_value
    return joined.to(query.dtype).view(num_rows, heads, num, width)


def softmax_jointly(scores: list[Tensor]) -> Sequence[Tensor]:
    """The softmax over the last dimensions of all `scores` together, [..., n_i] each.

    Traced for inductor, it concatenates nothing, because inductor refuses the negative
    places of a concatenation on CUDA. Compiled code is one kernel anyway.
    """
    if len(scores) == 1:
        return [scores[0].softmax(-1)]
    if get_proxy_mode() is None:
        return torch.cat(scores, dim=-1).softmax(-1).split([tensor.shape[-1] for tensor in scores], dim=-1)
    total = functools.reduce(torch.logaddexp, [tensor.logsumexp(-1, keepdim=True) for tensor in scores])
    return [(tensor - total).exp() for tensor in scores]


@torch.library.custom_op("specdec::attend_texts", mutates_args=())
def _attend_texts(query: Tensor, key: Tensor, value: Tensor, table: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """query [N, Q, E]; key, value [K, E]; table of `CachedKeys` -> out [N, Q, E], log of sums [N, Q].

    A text without keys has zeros, and infinity, as from the kernel.
    """
    sums = torch.full(query.shape[:2], torch.inf, dtype=torch.promote_types(query.dtype, torch.float32))
    out = torch.zeros_like(query)
    for text, (start, num) in enumerate(table[1:, :-1].T.tolist()):
        if num:
            scores = scale * (query[text] @ key[start : start + num].T).to(sums.dtype)
            sums[text] = scores.logsumexp(-1)
            out[text] = (scores - sums[text, :, None]).exp().to(value.dtype) @ value[start : start + num]
    return out, sums


@_attend_texts.register_kernel("cuda")
def _(query, key, value, table, scale):
    num, queries, width = query.shape
    starts = table[0]
    key_starts = table[1]
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        query.view(-1, 1, width), key[:, None], value[:, None],
        starts, key_starts, queries, len(key), 0.0, False, False,
        scale=scale, seqused_k=table[2, :num],
    )  # fmt: skip
    return out.view(query.shape), log_sum.view(num, queries)


@_attend_texts.register_fake
def _(query, key, value, table, scale):
    return torch.empty_like(query), query.new_empty(
        query.shape[:2], dtype=torch.promote_types(query.dtype, torch.float32)
    )


def attend_piece(
    query: Tensor, key: Tensor, value: Tensor, num_before: int, *, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax of a piece's queries over the keys before it and its own, which are read to their length.

    query [B, H, S, E]; key [B, G, C, E], value [B, G, C, V]: all entries of the cache, with those of the piece
    num_before: keys before the piece; window: positions that a query sees, itself included; None: all
    -> out [B, H, S, V], logarithm of each query's sum of exponents [B, H, S]
    """
    width, last = value.shape[-1], num_before + query.shape[2]
    query = query if query.stride(-1) == 1 else query.contiguous()  # the kernels read numbers of a head side by side
    if width < query.shape[-1]:  # latent attention: the kernels have one width
        value = F.pad(value, (0, query.shape[-1] - width))
    attend = PIECE_KERNELS.get(query.device.type, _attend_rows)
    out, log_sum = attend(query, key, value, num_before, scale, None if (window or last) >= last else window)
    return out[..., :width], log_sum


def attend_lagging(query: Tensor, key: Tensor, value: Tensor, text_piece: Piece, *, scale: float) -> Tensor:
    """Attention [B, H, S, V] of a piece's queries over what `text_piece` says. Shapes as of `attend_piece`"""
    start, lag, window = text_piece.num_before, text_piece.lag, text_piece.window
    if lag == 0:
        return attend_piece(query, key, value, start, scale=scale, window=window)[0]
    (num_rows, _, num, _), groups = query.shape, key.shape[1]
    own_key, own_value = (entries[:, :, start : start + num, :].unsqueeze(2) for entries in (key, value))
    grouped = query.unflatten(1, (groups, -1))  # [B, G, H / G, S, E]
    exact = torch.promote_types(query.dtype, torch.float32)
    score = scale * (grouped * own_key).sum(-1, dtype=exact)  # [B, G, H / G, S]
    out = query.new_zeros(num_rows, query.shape[1], num, value.shape[-1])
    log_sum = score.new_full(query.shape[:3], -torch.inf)
    alone = max(0, 2 * lag - start)  # the first queries see only themselves
    if alone < num:
        out[:, :, alone:], log_sum[:, :, alone:] = attend_piece(
            query[:, :, alone:], key[:, :, lag:], value[:, :, lag:], max(0, start - 2 * lag),
            scale=scale, window=None if window is None else window - lag,
        )  # fmt: skip
    log_sum, out = log_sum.unflatten(1, (groups, -1)), out.unflatten(1, (groups, -1))
    return _join_softmaxes(out, log_sum, own_value, score)[0].flatten(1, 2)


def _attend_rows(
    query: Tensor, key: Tensor, value: Tensor, num_before: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """`attend_piece` on a GPU: the queries of a key head are a text of the kernel, its keys stand in the cache."""
    num_rows, _, num, width = query.shape
    groups, capacity = key.shape[1:3]
    num_keys = num_before + num
    texts = query.reshape(num_rows * groups, -1, num, width).transpose(1, 2).flatten(0, 1)  # [B * G * S, H / G, E]
    number = torch.arange(num_rows * groups + 1, dtype=torch.int32, device=query.device)
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(
        texts, key.flatten(0, 2)[:, None], value.flatten(0, 2)[:, None],
        number * num, number * capacity, num, num_keys, 0.0, window is None, False,
        scale=scale, window_size_left=-1 if window is None else window - 1, window_size_right=0,
        seqused_k=torch.full_like(number[1:], num_keys),
    )  # fmt: skip
    out = out.unflatten(0, (-1, num)).transpose(1, 2).reshape(query.shape)
    return out, log_sum.unflatten(1, (-1, num)).transpose(0, 1).reshape(query.shape[:3])


def _attend_parts(
    query: Tensor, key: Tensor, value: Tensor, num_before: int, scale: float, window: int | None
) -> tuple[Tensor, Tensor]:
    """`attend_piece` on a CPU: without a mask over keys before the piece, causal inside it; blocks under a window."""
    if window is not None:
        starts = range(num_before, num_before + query.shape[2], WINDOW_QUERIES)
        blocks = zip(starts, query.split(WINDOW_QUERIES, dim=2))
        outs, sums = zip(*(_attend_band(block, key, value, start, scale, window) for start, block in blocks))
        return torch.cat(outs, dim=2), torch.cat(sums, dim=2)
    last = num_before + query.shape[2]
    out, log_sum = _attend_grouped(query, key[:, :, num_before:last], value[:, :, num_before:last], scale, causal=True)
    if num_before == 0:
        return out, log_sum
    before, log_before = _attend_grouped(query, key[:, :, :num_before], value[:, :, :num_before], scale)
    return _join_softmaxes(out, log_sum, before, log_before)


def _join_softmaxes(out: Tensor, log_sum: Tensor, added_out: Tensor, added_log: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [.., V] over two sets of keys, and the logarithm of its sum of exponents [..], from those of each."""
    total = torch.logaddexp(log_sum, added_log)
    share, added_share = ((part - total).exp()[..., None] for part in (log_sum, added_log))
    return (share * out + added_share * added_out).to(out.dtype), total


PIECE_KERNELS = {"cpu": _attend_parts}  # by the type of device; others have the kernel for texts


def _attend_band(
    query: Tensor, key: Tensor, value: Tensor, num_before: int, scale: float, window: int
) -> tuple[Tensor, Tensor]:
    """`_attend_parts` for few queries: under a mask over the keys that one of them sees."""
    num, first = query.shape[2], max(0, num_before + 1 - window)
    last = num_before + num
    distance = torch.arange(num_before, last)[:, None] - torch.arange(first, last)  # [S, C]
    bias = torch.zeros(distance.shape, dtype=query.dtype)
    bias.masked_fill_((distance < 0) | (distance >= window), torch.finfo(query.dtype).min)
    return _attend_grouped(query, key[:, :, first:last], value[:, :, first:last], scale, mask=bias[None, None])


def _attend_grouped(
    query: Tensor, key: Tensor, value: Tensor, scale: float, *, causal: bool = False, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The kernel of a CPU over heads in groups, whose keys it reads without copies. Shapes as of `attend_piece`

    mask [1, 1, S, C]: numbers to add to scores
    """
    grouped = query.reshape(-1, query.shape[1] // key.shape[1], *query.shape[2:])  # [B * G, H / G, S, E]
    repeat = (-1, grouped.shape[1], -1, -1)
    k, v = (entries.flatten(0, 1)[:, None].expand(repeat) for entries in (key, value))
    out, log_sum = _flash_on_cpu(grouped, k, v, 0.0, causal, attn_mask=mask, scale=scale)
    return out.reshape(query.shape), log_sum.reshape(query.shape[:3])


def fits_kernel(key_width: int, value_width: int) -> bool:
    """True if the kernel takes keys and values of these widths"""
    return key_width == value_width and key_width % 8 == 0 and key_width <= 256


def check_cached_keys(device: torch.device) -> None:
    """Compares the kernel with the loop in float64 on this device. Raises ValueError if they differ beyond rounding.

    Pieces of texts are compared apart, by `check_pieces`.
    """
    torch.manual_seed(0)
    lengths = torch.tensor([700, 3])
    heads = (8, 2)
    for num, width, window in ((1, 128, None), (5, 64, None), (5, 128, 40)):
        ancestors = torch.ones(2, num, num, dtype=torch.bool).tril()
        ancestors[:, 2:, 1:2] = num == 1  # a tree
        wide = [
            torch.randn(2, num_heads, count, width, dtype=torch.float64)
            for num_heads, count in ((8, num), (2, 768), (2, 768))
        ]
        options: dict = {"capacity": 768, "heads": heads, "window": window}
        reference = attend_cached(
            wide[0], wide[1], wide[2], find_cached_keys(ancestors, lengths, **options), scale=width**-0.5
        )
        narrow = [tensor.to(device, torch.bfloat16) for tensor in wide]
        cached = find_cached_keys(ancestors.to(device), lengths.to(device), **options)
        result = attend_cached(narrow[0], narrow[1], narrow[2], cached, scale=width**-0.5)
        fast.compare_with_reference(f"{num} nodes", [result], [reference], 0.02)


@functools.cache
def check_pieces(device: torch.device) -> bool:
    """Whether `attend_piece` is on this device as in float64 on a CPU, up to rounding. If not, it warns."""
    if device.type == "cpu":
        return True
    generator = torch.Generator().manual_seed(0)
    try:
        for width, window in ((128, None), (64, 40)):
            wide = [
                torch.randn(2, num_heads, count, width, dtype=torch.float64, generator=generator)
                for num_heads, count in ((8, 100), (2, 768), (2, 768))
            ]
            query, key, value = (tensor.to(device, torch.bfloat16) for tensor in wide)
            result, _ = attend_piece(query, key, value, 500, scale=width**-0.5, window=window)
            reference, _ = attend_piece(wide[0], wide[1], wide[2], 500, scale=width**-0.5, window=window)
            fast.compare_with_reference("a piece of a text", [result], [reference], 0.02)
    except Exception as reason:  # kernels raise errors of any kind
        warnings.warn(f"Heads read texts under masks on {device}, which take more memory: {reason}", stacklevel=2)
        return False
    return True
