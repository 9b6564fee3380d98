"""Triton kernels of `tree_attention.attend_tree`: attention over parts of the keys, and their joint softmax.

This file needs triton, so only CUDA devices and tests import it.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LARGE_TILE = 8192  # outputs of a thread block in float32, from which it has 8 warps: 32 registers of a thread
LOG2_E = 1.4426950408889634  # the kernels take exponents of two


@triton.jit
def _add_entries(  # noqa: PLR0913 (Triton has no records)
    query, memory, entry, there, seen, factor, in_width, largest, total, out
):
    """Largest score, sum of exponents and output of each query, with one more block of entries.

    query [Q, E]; memory: pointers to the first key [E, 1] and value [1, E], and the strides of entries
    entry [K]: numbers in the cache; there [K]: entries to be read; seen [Q, K]
    largest, total [Q] and out [Q, E] in float32: of earlier blocks
    """
    key, value, key_stride, value_stride = memory
    keys = tl.load(key + entry[None, :] * key_stride, mask=there[None, :] & in_width[:, None], other=0.0)
    values = tl.load(value + entry[:, None] * value_stride, mask=there[:, None] & in_width[None, :], other=0.0)
    scores = tl.dot(query, keys, input_precision="ieee").to(tl.float32) * factor
    scores = tl.where(seen, scores, -float("inf"))
    larger = tl.maximum(largest, tl.max(scores, 1))
    shift = tl.where(larger == -float("inf"), 0.0, larger)  # a query may have seen no key yet
    weights = tl.exp2(scores - shift[:, None])
    fade = tl.exp2(largest - shift)
    out = tl.dot(weights.to(values.dtype), values, out * fade[:, None], input_precision="ieee").to(tl.float32)
    return larger, total * fade + tl.sum(weights, 1), out


@triton.jit
def _store_part(joined, target, exists, column, largest, total, out, E: tl.constexpr):
    """Stores the results of `_attend_parts`. target, exists [Q]: places of the queries, and whether they exist"""
    outs, log_sums = joined
    used = total > 0
    total = tl.where(used, total, 1.0)
    tl.store(log_sums + target, tl.where(used, largest + tl.log2(total), -float("inf")), mask=exists)
    mask = (exists & used)[:, None] & (column < E)[None, :]
    tl.store(outs + target[:, None] * E + column[None, :], out / total[:, None], mask=mask)


@triton.jit
def _attend_parts(  # noqa: PLR0913 (kernels take strides and sizes)
    query,
    key,
    value,
    tree,
    joined,
    strides,
    sizes,
    factor,
    E: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Output and log of the sum of exponents of a tile of queries over one part of a row's keys.

    tree: pointers to words, firsts and lengths of `attend_tree`; joined: pointers to outputs [B, H, S, parts, E] and
        logs to base 2 [B, H, S, parts] in float32, minus infinity for parts without keys
    strides: three of query (row, head, node), of key and of value (row, group, entry), two of words (row, node)
    sizes: numbers of query heads of a key head, nodes, words, parts; factor: scale of scores times log2 e
    A program has the coordinates (tile * parts + part, key head, row). Parts of committed keys are equally long, and
    the last one goes on with the pending entries.
    """
    words, firsts, lengths = tree
    query_row, query_head, query_node, key_row, key_group, key_entry, value_row, value_group, value_entry = strides[:9]
    num_heads, num_nodes, num_words, num_parts = sizes
    part_number = tl.program_id(0) % num_parts
    group = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64)
    index = tl.program_id(0) // num_parts * QUERIES + tl.arange(0, QUERIES)  # of queries of this row and group
    exists = index < num_heads * num_nodes
    node = index % num_nodes
    column = tl.arange(0, WIDTH)
    in_width = column < E
    query += row * query_row + (group * num_heads + index // num_nodes)[:, None] * query_head
    query += node[:, None] * query_node + column[None, :]
    tile = tl.load(query, mask=exists[:, None] & in_width[None, :], other=0.0)
    words += row * strides[9] + node * strides[10]
    first_key = key + row * key_row + group * key_group + column[:, None]
    memory = first_key, value + row * value_row + group * value_group + column[None, :], key_entry, value_entry

    # The committed entries of this part
    first = tl.load(firsts + row * num_nodes + node, mask=exists, other=2**31 - 1).to(tl.int32)
    length = tl.load(lengths + row).to(tl.int32)
    begin = tl.minimum(tl.min(first, 0), length)
    size = tl.cdiv(tl.cdiv(length - begin + num_words * 64, KEYS), num_parts) * KEYS
    start = begin + part_number * size
    stop = tl.minimum(start + size, length)
    largest = tl.full([QUERIES], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    out = tl.zeros([QUERIES, WIDTH], tl.float32)
    for block in range(start, stop, KEYS):
        entry = block + tl.arange(0, KEYS)
        there = entry < stop
        seen = there[None, :] & (entry[None, :] >= first[:, None])
        largest, total, out = _add_entries(tile, memory, entry, there, seen, factor, in_width, largest, total, out)

    # The pending entries, of which only those are read that a query sees
    if part_number == num_parts - 1:
        bit = tl.arange(0, KEYS // 2)
        for block in range(0, num_words * 64, KEYS // 2):
            bits = (tl.load(words + block // 64, mask=exists, other=0) >> block % 64).to(tl.int32)
            seen = ((bits[:, None] >> bit[None, :]) & 1) != 0
            there = tl.max(seen.to(tl.int32), 0) != 0
            entry = length + block + bit
            largest, total, out = _add_entries(tile, memory, entry, there, seen, factor, in_width, largest, total, out)

    target = ((row * tl.num_programs(1) + group) * num_heads * num_nodes + index) * num_parts + part_number
    _store_part(joined, target, exists, column, largest, total, out, E)


@triton.jit
def _join_parts(
    joined, sinks, out, num_parts, E: tl.constexpr, WIDTH: tl.constexpr, PARTS: tl.constexpr, LOG2_E: tl.constexpr
):
    """The output of one query, from its parts. A program has the coordinates (node, head, row).

    joined: pointers to results of `_attend_parts`; sinks [H], or None; out [B, S, H, E]
    """
    outs, log_sums = joined
    node = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    num_nodes, num_heads = tl.num_programs(0), tl.num_programs(1)
    part = tl.arange(0, PARTS)
    column = tl.arange(0, WIDTH)
    in_width = column < E
    source = ((row * num_heads + head) * num_nodes + node) * num_parts + part
    log_sum = tl.load(log_sums + source, mask=part < num_parts, other=-float("inf"))
    used = log_sum > -float("inf")
    largest = tl.max(log_sum, 0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        largest = tl.maximum(largest, sink)
    shift = tl.where(largest == -float("inf"), 0.0, largest)  # a query may see nothing
    share = tl.exp2(log_sum - shift)
    total = tl.sum(share, 0)
    if sinks is not None:
        total += tl.exp2(sink - shift)
    values = tl.load(outs + source[:, None] * E + column[None, :], mask=used[:, None] & in_width[None, :], other=0.0)
    result = tl.sum(share[:, None] * values, 0) / tl.where(total > 0, total, 1.0)
    target = ((row * num_nodes + node) * num_heads + head) * E + column
    tl.store(out + target, result.to(out.dtype.element_ty), mask=in_width)


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tree: tuple[Tensor, Tensor, Tensor],
    *,
    cut: tuple[int, int, int],
    scale: float,
    sinks: Tensor | None,
) -> Tensor:
    """`attend_tree` by two launches. tree: words, firsts and lengths; cut: result of `cut_queries`"""
    rows, heads, nodes, width = query.shape
    groups = key.shape[1]
    words, firsts, lengths = tree
    num_heads = heads // groups
    size, tiles, num_parts = cut
    if query.stride(-1) != 1:
        query = query.contiguous()
    outs = query.new_empty((rows, heads, nodes, num_parts, width), dtype=torch.float32)
    log_sums = outs.new_empty(outs.shape[:-1])
    out = query.new_empty((rows, nodes, heads, width))
    padded = max(16, triton.next_power_of_2(width))
    _attend_parts[(tiles * num_parts, groups, rows)](
        query,
        key,
        value,
        (words, firsts.contiguous(), lengths),
        (outs, log_sums),
        (*query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *words.stride()[:2]),
        (num_heads, nodes, words.shape[-1], num_parts),
        scale * LOG2_E,
        E=width,
        WIDTH=padded,
        QUERIES=size,
        KEYS=64 if padded <= 128 else 32,
        num_warps=8 if size * padded >= LARGE_TILE else 4,
        num_stages=3,
    )
    most_parts = triton.next_power_of_2(num_parts)
    _join_parts[(nodes, heads, rows)](
        (outs, log_sums),
        sinks,
        out,
        num_parts,
        E=width,
        WIDTH=padded,
        PARTS=most_parts,
        LOG2_E=LOG2_E,
        num_warps=4 if most_parts * padded > 1024 else 1,
    )
    return out
