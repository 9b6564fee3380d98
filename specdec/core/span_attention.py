"""Attention of the training unroll: a span of common keys and few own keys for each slot, in linear memory.

Scores over common keys exist for one chunk of slots at a time. The forward pass keeps the log of each query's sum of
exponents over all of its keys. The backward pass computes the chunk's weights again from it (Dao, 2205.14135, section
3.1). One softmax gives the weights over both kinds of keys: the two parts are joined by their sums of exponents. If the
device has a kernel for texts side by side (varlen.py), common keys need no chunks: each document is a text.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec.core import fast
from specdec.core.varlen import Segments, attend_segments, attend_segments_backward, count_runs

MAX_MASK_ENTRIES = 2**21  # of a chunk on a CPU, whose kernel makes its scores in blocks: 2 MB of mask
MAX_CHUNK_SLOTS = 256  # on a CPU; larger chunks compute slots of one document against keys of others
MAX_CHUNK_SCORES = 2**26  # on other devices: 256 MB in float32
# Types of devices whose products of 16-bit matrices may be 32-bit ones
WIDE_PRODUCT_DEVICES = ("cuda",) if torch.version.cuda else ()
MAX_QUERIES_PER_SLOT = 6  # of the kernel for texts; for slots more scattered, chunks are faster
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Texts:
    """The documents of a span's slots as texts, for the kernel.

    slots, queries [n]: slots, of all rows, and their places among the kernel's
        queries; None: all in order. Queries between them are computed in vain.
    keys [C]: the kernel's keys among the common keys of all rows; None: all in order
    num_queries: number of the kernel's queries
    window_size: keys before its last one that a query sees, too; None: all
    """

    segments: Segments
    slots: Tensor | None
    queries: Tensor | None
    keys: Tensor | None
    num_queries: int
    window_size: int | None = None

    def tensors(self) -> list[Tensor]:
        """The tensors that a device needs"""
        index_tensors = [tensor for tensor in (self.slots, self.queries, self.keys) if tensor is not None]
        return [self.segments.query_starts.long(), self.segments.key_starts.long(), *index_tensors]

    def with_tensors(self, query_starts: Tensor, key_starts: Tensor, *index_tensors: Tensor) -> "Texts":
        """The same texts with a device's copies of `tensors`"""
        slots, queries, keys = index_tensors or (None, None, None)
        return Texts(
            self.segments.with_starts(query_starts, key_starts),
            slots,
            queries,
            keys,
            self.num_queries,
            self.window_size,
        )


@dataclass(frozen=True)
class Span:
    """The common keys that each slot sees: numbers from `first` to `last`, both [B, S]; none if last < first.

    self_key_separate: True if the slot sees its own key, too, but the span leaves it out
    host: first and last on the CPU, to avoid a wait for a device; None: they are there
    texts: the same spans for the kernel, if they are those of documents; None if slots are scattered, or it is unknown
    """

    first: Tensor
    last: Tensor
    self_key_separate: bool = False
    host: tuple[Tensor, Tensor] | None = None
    texts: Texts | None = None

    def select_slots(self, order: Tensor, documents: Tensor | None = None, *, lag: int = 0) -> "Span":
        """The spans of some slots.

        order [B, S'], increasing; documents [B, S], lag: arguments of `find_spans`, to find the texts
        """
        selected = Span(self.first.gather(1, order), self.last.gather(1, order), self.self_key_separate)
        return selected if documents is None else replace(selected, texts=_find_texts(documents, order, lag))

    def tensors(self) -> list[Tensor]:
        """The tensors that a device needs"""
        return [self.first, self.last, *([] if self.texts is None else self.texts.tensors())]

    def with_tensors(self, first: Tensor, last: Tensor, *texts: Tensor) -> "Span":
        """The same spans with a device's copies of `tensors`"""
        moved = None if self.texts is None else self.texts.with_tensors(*texts)
        return Span(first, last, self.self_key_separate, (self.first, self.last), moved)

    def mask(self, num_keys: int) -> Tensor:
        """[B, 1, S, keys] bool: True for the span's keys, and for a separate own key (of all slots in order)"""
        number = torch.arange(num_keys, device=self.first.device)
        seen = (number >= self.first[..., None]) & (number <= self.last[..., None])
        if self.self_key_separate:
            seen = seen | torch.eye(num_keys, dtype=torch.bool, device=seen.device)
        return seen[:, None]


Seen = Span | Tensor


def find_spans(documents: Tensor, *, lag: int = 0) -> Span:
    """The spans of slots that see their own key, and keys of their document at least `lag` before it.

    documents [B, S]: document of each slot, -1: none; slots of a
        document are adjacent. A slot of none sees its own key.
    """
    number = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(begins | (documents < 0), number, 0).cummax(1).values
    return Span(first, number - lag, lag > 0, texts=_find_texts(documents, None if lag == 0 else number, lag))


def _find_texts(documents: Tensor, order: Tensor | None, lag: int) -> Texts | None:
    """The texts of slots `order` [B, S], increasing; None if slots are scattered. order None: all slots, without a lag

    A text's queries are all slots from its first selected one to its last one. Its keys are those from
    the document's begin to `lag` before the last slot. Nobody reads what padding sees.
    """
    if documents.device.type != "cpu":
        return None
    num_rows, length = documents.shape
    counts = count_runs(documents)
    if order is None:
        return Texts(Segments.from_counts(counts.tolist(), longest=length), None, None, None, documents.numel())
    # Keep the documents with a slot that sees a key
    stops = counts.cumsum(0)
    real = documents.flatten()[stops - 1] >= 0
    column = (order + torch.arange(num_rows)[:, None] * length).flatten()  # [B * S], increasing
    begins = (stops - counts)[real]
    ends = stops[real]
    # Slots that see a key of their document
    first_slot = torch.searchsorted(column, begins + lag)
    stop_slot = torch.searchsorted(column, ends)
    is_kept = stop_slot > first_slot
    begins = begins[is_kept]
    first_slot = first_slot[is_kept]
    stop_slot = stop_slot[is_kept]
    if not len(first_slot):
        return None
    # Queries from the first to the last of their slots, unless these are scattered
    start = column[first_slot]
    stop = column[stop_slot - 1] + 1
    queries = stop - start
    keys = stop - lag - begins
    if int(queries.sum()) > MAX_QUERIES_PER_SLOT * len(column):
        return None
    slots = torch.cat([torch.arange(a, b) for a, b in zip(first_slot.tolist(), stop_slot.tolist())])
    offset = (queries.cumsum(0) - queries - start).repeat_interleave(stop_slot - first_slot)
    key_indices = torch.cat([torch.arange(a, a + n) for a, n in zip(begins.tolist(), keys.tolist())])
    segments = Segments.from_counts(queries.tolist(), keys.tolist(), longest=length)
    return Texts(segments, slots, column[slots] + offset, key_indices, int(queries.sum()))


def narrow_to_window(seen: Seen, window: int | None, *, depth: int, positions: Tensor, first: int) -> Seen:
    """The part of `seen` inside a window: keys fewer than `window`
    positions before the query, itself included; None: all.

    depth: number of the step; the query of column c stands at c + depth - 1; positions [B, S]: of the queries
    first: position of the cache's first entry. The queries' own keys stay, as a round has fewer drafts than the window.
    """
    if window is None:
        return seen
    if isinstance(seen, Tensor):
        positions_of_keys = torch.arange(seen.shape[-1], device=seen.device) + first
        return seen & (positions_of_keys > positions[:, None, :, None] - window)

    def narrow(first: Tensor, last: Tensor) -> Tensor:
        return torch.maximum(first, last + depth - window)

    host = seen.host and (narrow(*seen.host), seen.host[1])
    texts = seen.texts and replace(seen.texts, window_size=window - depth)
    return replace(seen, first=narrow(seen.first, seen.last), host=host, texts=texts)


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Seen, *slot_keys: Tensor, causal: bool = False) -> Tensor:
    """Softmax over the common keys that a slot sees, and its own keys.

    query [B, G, R, S, P, E], scaled: P queries of each of S slots, R heads for each of G heads of keys
    key, value [B, G, C, E]; seen: a Span, or a mask [B, 1, S, C] for passes without gradients
    slot_keys: pairs of a key and a value [B, G, S, n, E] of each slot; in all, a slot has N = sum(n) own keys
    causal: True if query p of a slot sees only the first N - P + p + 1 of its own keys
    -> [B, G, R, S, P, E]
    """
    if isinstance(seen, Tensor):
        slot_key, slot_value = _join_slot_keys(slot_keys, query)
        shared = [_attend_dense(q, k, v, mask[0]) for q, k, v, mask in zip(query, key, value, seen)]
        out, log_sum = (torch.stack(part) for part in zip(*shared))
        return _add_slot_keys(query, out, log_sum, slot_key, slot_value, causal)[0]
    return _Attention.apply(query, key, value, seen, causal, *slot_keys)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, seen, causal, *slot_keys):
        slot_key, slot_value = _join_slot_keys(slot_keys, query)
        if use_texts(seen, query):
            out, log_sum = _attend_texts(query, key, value, seen.texts)
        else:
            out = torch.zeros_like(query)
            log_sum = out.new_full((*query.shape[:-1], 1), float("-inf"), dtype=_exact_dtype(query))
            for row, slots, keys, mask in _split_chunks(query, key, seen):
                parts = query[row][:, :, slots], key[row][:, keys], value[row][:, keys]
                out[row][:, :, slots], log_sum[row][:, :, slots] = _attend_common(*parts, mask)
        out, log_sum = _add_slot_keys(query, out, log_sum, slot_key, slot_value, causal)
        ctx.save_for_backward(query, key, value, out, log_sum, *slot_keys)
        ctx.seen = seen
        ctx.causal = causal
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, log_sum, *slot_keys = ctx.saved_tensors
        grad_query, *grad_slot_keys = _slot_keys_backward(grad, query, out, log_sum, slot_keys, ctx.causal)
        if use_texts(ctx.seen, query):
            slopes = _attend_texts_backward(grad, query, out, log_sum, key, value, ctx.seen.texts)
            return grad_query + slopes[0], *slopes[1:], None, None, *grad_slot_keys
        grad_key, grad_value = (torch.zeros_like(tensor, dtype=_exact_dtype(tensor)) for tensor in (key, value))
        for row, slots, keys, mask in _split_chunks(query, key, ctx.seen):
            grad_chunk, q, o, total = (tensor[row][:, :, slots] for tensor in (grad, query, out, log_sum))
            chunk_grads = _attend_common_backward(grad_chunk, q, o, total, key[row][:, keys], value[row][:, keys], mask)
            grad_query[row][:, :, slots] += chunk_grads[0]
            grad_key[row][:, keys] += chunk_grads[1]
            grad_value[row][:, keys] += chunk_grads[2]
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, *grad_slot_keys


def use_texts(seen: Span, query: Tensor) -> bool:
    """True if the kernel for texts side by side attends to common keys"""
    return seen.texts is not None and fast.allows("varlen", query.device, query.dtype)


def _exact_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _split_chunks(query: Tensor, key: Tensor, seen: Span) -> Iterator[tuple[int, slice, slice, Tensor]]:
    """Yields (row, slots, keys that some of these slots see, mask [slots, keys] of the keys that each one sees)."""
    num_rows, groups, heads, num_slots, num_queries, _ = query.shape
    on_cpu = query.device.type == "cpu"
    max_scores = MAX_MASK_ENTRIES // num_queries if on_cpu else MAX_CHUNK_SCORES // (groups * heads * num_queries)
    size = max(1, min(max_scores // max(1, key.shape[2]), MAX_CHUNK_SLOTS if on_cpu else num_slots))
    number = torch.arange(key.shape[2], device=key.device)
    first, last = (tensor.tolist() for tensor in seen.host or (seen.first, seen.last))
    for row in range(num_rows):
        for start in range(0, num_slots, size):
            slots = slice(start, min(start + size, num_slots))
            keys = slice(min(first[row][slots]), min(max(last[row][slots]) + 1, key.shape[2]))
            if keys.stop > keys.start:
                low, high = (tensor[row, slots, None] for tensor in (seen.first, seen.last))
                yield row, slots, keys, (number[keys] >= low) & (number[keys] <= high)


# Common keys of one row: query, out [G, R, S, P, E]; log_sum [G, R, S, P, 1]; key, value [G, C, E]; mask [S, C]


def _attend_common(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """-> out, log_sum, of common keys alone. log_sum of a slot without any is near the smallest number."""
    if query.device.type != "cpu":
        return _attend_dense(query, key, value, mask)
    out, log_sum = _flash(*_repeat_heads(query, key, value), 0.0, False, attn_mask=_make_bias(query, mask), scale=1.0)
    return out.unflatten(2, query.shape[2:4]), log_sum.unflatten(2, query.shape[2:4])[..., None]


def _attend_common_backward(
    grad: Tensor, query: Tensor, out: Tensor, log_sum: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """out, log_sum: results over common and own keys -> gradients of query, key, value"""
    if query.device.type != "cpu":
        return _attend_dense_backward(grad, query, out, log_sum, key, value, mask)
    inputs = *_repeat_heads(query, key, value), out.flatten(2, 3), log_sum.flatten(2)
    grads = _flash_backward(grad.flatten(2, 3), *inputs, 0.0, False, attn_mask=_make_bias(query, mask), scale=1.0)
    return grads[0].unflatten(2, query.shape[2:4]), grads[1].sum(1), grads[2].sum(1)


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> [G, R, S * P, E], and key and value [G, R, C, E] without copies"""
    repeat = (-1, query.shape[1], -1, -1)
    return query.flatten(2, 3), key[:, None].expand(repeat), value[:, None].expand(repeat)


def _make_bias(query: Tensor, mask: Tensor) -> Tensor:
    """The mask as numbers to add to scores, [1, 1, S * P, C]"""
    bias = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return bias.repeat_interleave(query.shape[3], dim=0)[None, None]


def _attend_dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`_attend_common` as matrix products"""
    scores = _score_dense(query, key, mask)
    log_sum = scores.logsumexp(-1, keepdim=True)
    weights = (scores - log_sum.clamp(min=torch.finfo(scores.dtype).min)).exp().to(value.dtype)
    return (weights.flatten(1, 3) @ value).view(query.shape), log_sum


def _attend_dense_backward(grad, query, out, log_sum, key, value, mask) -> tuple[Tensor, Tensor, Tensor]:
    """`_attend_common_backward` as matrix products"""
    weights = (_score_dense(query, key, mask) - log_sum).exp().flatten(1, 3)  # [G, R * S * P, C]
    grads = _softmax_backward(grad.flatten(1, 3), weights, query.flatten(1, 3), out.flatten(1, 3), key, value)
    return grads[0].view(query.shape), *grads[1:]


def _softmax_backward(
    grad: Tensor, weights: Tensor, query: Tensor, out: Tensor, key: Tensor, value: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """grad, query, out [..., M, E]; weights [..., M, N]; key, value [..., N, E] -> gradients of query, key, value"""
    mean = (grad * out).sum(-1, keepdim=True, dtype=weights.dtype)
    grad_value = weights.to(grad.dtype).transpose(-1, -2) @ grad
    scores = (weights * (_multiply(grad, value.transpose(-1, -2)) - mean)).to(query.dtype)
    return scores @ key, scores.transpose(-1, -2) @ query, grad_value


def _score_dense(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """-> [G, R, S, P, C], minus infinity for keys that are not seen"""
    scores = _multiply(query.flatten(1, 3), key.transpose(-1, -2)).view(*query.shape[:-1], -1)
    return scores.masked_fill(~mask[:, None], float("-inf"))


def _multiply(first: Tensor, second: Tensor) -> Tensor:
    """first [..., M, K], second [..., K, N] -> [..., M, N] of at least
    32 bits, not rounded to 16 before if the device can.

    A softmax over rounded scores errs by a percent where they are large.
    """
    if first.device.type in WIDE_PRODUCT_DEVICES and first.dtype in (torch.bfloat16, torch.float16):
        wide = torch.bmm(first.flatten(0, -3), second.flatten(0, -3), out_dtype=torch.float32)
        return wide.view(*first.shape[:-1], -1)
    return (first @ second).to(_exact_dtype(first))


# Common keys of all rows as texts: query, out [B, G, R, S, P, E]; log_sum [B, G, R, S, P, 1]; key, value [B, G, C, E]


def _attend_texts(query: Tensor, key: Tensor, value: Tensor, texts: Texts) -> tuple[Tensor, Tensor]:
    """`_attend_common` of all rows; zero, and minus infinity, for slots without a key"""
    out, log_sum = attend_segments(
        _to_texts(query, texts),
        _gather_keys(key, texts),
        _gather_keys(value, texts),
        texts.segments,
        scale=1.0,
        window=texts.window_size,
    )
    log_sum = log_sum.transpose(0, 1)[..., None]  # [Q, H, 1]
    return _from_texts(out, query, texts, 0.0), _from_texts(log_sum, query, texts, float("-inf"))


def _attend_texts_backward(grad, query, out, log_sum, key, value, texts: Texts) -> tuple[Tensor, Tensor, Tensor]:
    """`_attend_common_backward` of all rows"""
    grad_texts, q, o = (_to_texts(tensor, texts) for tensor in (grad, query, out))
    total = _to_texts(log_sum, texts, 0.0)[..., 0].transpose(0, 1).contiguous()  # [H, Q]
    k = _gather_keys(key, texts)
    v = _gather_keys(value, texts)
    slopes = attend_segments_backward(
        grad_texts, q, k, v, o, total, segments=texts.segments, scale=1.0, window=texts.window_size
    )
    grads = []
    for slope, part in zip(slopes[1:], (key, value)):
        if texts.keys is not None:
            slope = slope.new_zeros(part.shape[0] * part.shape[2], *slope.shape[1:]).index_copy(0, texts.keys, slope)
        grads.append(slope.unflatten(0, (part.shape[0], -1)).transpose(1, 2))
    return _from_texts(slopes[0], query, texts, 0.0), *grads


def _to_texts(values: Tensor, texts: Texts, fill: float = 0.0) -> Tensor:
    """[B, G, R, S, P, .] -> [Q, G * R * P, .]. fill: value of queries without a slot"""
    flat = values.permute(0, 3, 1, 2, 4, 5).flatten(2, 4).flatten(0, 1)
    if texts.slots is None or texts.queries is None:
        return flat
    empty = flat.new_full((texts.num_queries, *flat.shape[1:]), fill)
    return empty.index_copy(0, texts.queries, flat.index_select(0, texts.slots))


def _from_texts(values: Tensor, query: Tensor, texts: Texts, fill: float) -> Tensor:
    """[Q, G * R * P, .] -> [B, G, R, S, P, .]. fill: value of slots without a query"""
    num_rows, groups, heads, num_slots, num_queries, _ = query.shape
    if texts.slots is not None and texts.queries is not None:
        empty = values.new_full((num_rows * num_slots, *values.shape[1:]), fill)
        values = empty.index_copy(0, texts.slots, values.index_select(0, texts.queries))
    return values.view(num_rows, num_slots, groups, heads, num_queries, -1).permute(0, 2, 3, 1, 4, 5)


def _gather_keys(values: Tensor, texts: Texts) -> Tensor:
    """[B, G, C, E] -> [C', G, E]"""
    flat = values.transpose(1, 2).flatten(0, 1)
    return flat if texts.keys is None else flat.index_select(0, texts.keys)


# Own keys of all rows: query, out [B, G, R, S, P, E]; log_sum [B, G, R, S, P, 1]; own [B, G, S, N, E]


def _join_slot_keys(slot_keys: tuple[Tensor, ...] | list[Tensor], query: Tensor) -> tuple[Tensor, Tensor]:
    """The own keys of a slot side by side, and their values -> [B, G, S, N, E] each"""
    if not slot_keys:
        num_rows, groups, _, num_slots, _, width = query.shape
        return (query.new_zeros(num_rows, groups, num_slots, 0, width),) * 2
    if len(slot_keys) == 2:  # inductor and torch order such a concatenation differently in memory
        return slot_keys[0], slot_keys[1]
    return torch.cat(slot_keys[::2], dim=3), torch.cat(slot_keys[1::2], dim=3)


def _score_slot_keys(query: Tensor, slot_key: Tensor, causal: bool) -> Tensor:
    """-> [B, G, S, R * P, N], minus infinity for keys that are not seen"""
    scores = _multiply(_group_by_slot(query), slot_key.transpose(-1, -2))
    if not causal:
        return scores
    later = torch.ones(query.shape[4], slot_key.shape[3], dtype=torch.bool, device=query.device)
    later = later.triu(1 + slot_key.shape[3] - query.shape[4])
    return scores.masked_fill(later.repeat(query.shape[2], 1), float("-inf"))


def _add_slot_keys(
    query: Tensor, out: Tensor, log_sum: Tensor, slot_key: Tensor, slot_value: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """out, log_sum of common keys -> those of common and own keys"""
    if slot_key.shape[3] == 0:
        return out, log_sum
    scores = _group_by_head(_score_slot_keys(query, slot_key, causal), query)
    total = torch.logaddexp(log_sum, scores.logsumexp(-1, keepdim=True))
    weights = (scores - total).exp().to(query.dtype)
    slot_out = _group_by_head(_group_by_slot(weights) @ slot_value, query)
    return out * (log_sum - total).exp().to(out.dtype) + slot_out, total


def _slot_keys_backward(
    grad: Tensor, query: Tensor, out: Tensor, log_sum: Tensor, slot_keys: list[Tensor], causal: bool
) -> list[Tensor]:
    """-> gradients of query, by its scores over own keys, and of each of `slot_keys`"""
    slot_key, slot_value = _join_slot_keys(slot_keys, query)
    if slot_key.shape[3] == 0:
        return [torch.zeros_like(query)]
    weights = (_score_slot_keys(query, slot_key, causal) - _group_by_slot(log_sum)).exp()  # [B, G, S, R * P, N]
    inputs = weights, _group_by_slot(query), _group_by_slot(out), slot_key, slot_value
    grad_query, *grads = _softmax_backward(_group_by_slot(grad), *inputs)
    sizes = [tensor.shape[3] for tensor in slot_keys[::2]]
    pairs = zip(*(tensor.split(sizes, dim=3) for tensor in grads))
    return [_group_by_head(grad_query, query), *itertools.chain.from_iterable(pairs)]


def _group_by_slot(values: Tensor) -> Tensor:
    """[B, G, R, S, P, .] -> [B, G, S, R * P, .]"""
    return values.transpose(2, 3).flatten(3, 4)


def _group_by_head(values: Tensor, query: Tensor) -> Tensor:
    """[B, G, S, R * P, .] -> [B, G, R, S, P, .]"""
    return values.unflatten(3, (query.shape[2], query.shape[4])).transpose(2, 3)
