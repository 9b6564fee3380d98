"""Attention of the training unroll: a span of common keys and a few own keys for each slot, in memory linear in their number.

Scores over common keys exist for one chunk of slots at a time. The forward pass keeps the log of each query's sum of
exponents over all of its keys, and the backward pass computes the chunk's weights again from it (Dao, 2205.14135, section
3.1). Weights over both kinds of keys come from one softmax: the two parts are joined by their sums of exponents.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

CHUNK = 2**21  # entries of a chunk's mask on a CPU, whose kernel works through its scores in blocks
SLOTS = 256  # of a chunk on a CPU: with more, slots of one document are computed against keys of others
SCORES = 2**26  # scores of a chunk on other devices
WIDE = ("cuda",) if torch.version.cuda else ()  # kinds of devices whose products of 16-bit matrices may be 32-bit ones
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Span:
    """The common keys that each slot sees: first <= number of the key <= last, both [B, S]; none if last < first.

    apart: the slot's own key is not among them, although it sees that one too
    host: first and last on the CPU, so that nobody has to wait for a device to know them; None: they are there
    """

    first: Tensor
    last: Tensor
    apart: bool = False
    host: tuple[Tensor, Tensor] | None = None

    def of(self, order: Tensor) -> "Span":
        """The spans of chosen slots. order [B, S']"""
        return Span(self.first.gather(1, order), self.last.gather(1, order), self.apart)

    def on(self, first: Tensor, last: Tensor) -> "Span":
        """The same spans, of which a device has copies."""
        return Span(first, last, self.apart, (self.first, self.last))

    def mask(self, num_keys: int) -> Tensor:
        """[B, 1, S, keys] bool: True for the keys of the span, and the slot's own key if it is apart (of all slots in order)."""
        number = torch.arange(num_keys, device=self.first.device)
        seen = (number >= self.first[..., None]) & (number <= self.last[..., None])
        if self.apart:
            seen = seen | torch.eye(num_keys, dtype=torch.bool, device=seen.device)
        return seen[:, None]


Seen = Span | Tensor


def spans(documents: Tensor, *, lag: int = 0) -> Span:
    """Slots see the keys of their document up to `lag` before their own, and their own. documents [B, S], -1: none

    Slots of a document stand one after the other. One of no document sees its own key only.
    """
    number = torch.arange(documents.shape[1], device=documents.device).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    first = torch.where(begins | (documents < 0), number, 0).cummax(1).values
    return Span(first, number - lag, apart=lag > 0)


def within(seen: Seen, window: int | None, *, depth: int, positions: Tensor, first: int) -> Seen:
    """What `window` leaves of it: keys that stand fewer positions than this before the query, which counts; None: all of it.

    depth: of the step, at which the query of column c stands at c + depth - 1; positions [B, S] of the queries; first: the
    position of the first entry of the cache. The queries' own keys stay: drafts of a round are fewer than the window
    """
    if window is None:
        return seen
    if isinstance(seen, Tensor):
        at = torch.arange(seen.shape[-1], device=seen.device) + first
        return seen & (at > positions[:, None, :, None] - window)

    def narrow(first: Tensor, last: Tensor) -> Tensor:
        return torch.maximum(first, last + depth - window)

    host = seen.host and (narrow(*seen.host), seen.host[1])
    return replace(seen, first=narrow(seen.first, seen.last), host=host)


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Seen, *own: Tensor, causal: bool = False) -> Tensor:
    """Softmax over the common keys that a slot sees and its own ones.

    query [B, G, R, S, P, E], scaled: P queries of each of S slots, R heads for each of G heads of keys
    key, value [B, G, C, E]; seen: a Span, or a mask [B, 1, S, C] for passes without gradients
    own: N pairs of a key and a value [B, G, S, n, E] of each slot, with sum(n) own keys for a slot
    causal: whether query p of a slot sees only the first p + 1 of the slot's own keys, not all of them
    -> [B, G, R, S, P, E]
    """
    if isinstance(seen, Tensor):
        own_key, own_value = _join(own, query)
        shared = [_dense(q, k, v, mask[0]) for q, k, v, mask in zip(query, key, value, seen)]
        out, log_sum = (torch.stack(part) for part in zip(*shared))
        return _add_own(query, out, log_sum, own_key, own_value, causal)[0]
    return _Attention.apply(query, key, value, seen, causal, *own)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, seen, causal, *own):
        own_key, own_value = _join(own, query)
        out = torch.zeros_like(query)
        log_sum = out.new_full((*query.shape[:-1], 1), float("-inf"), dtype=_exact(query))
        for row, slots, keys, mask in _chunks(query, key, seen):
            parts = query[row][:, :, slots], key[row][:, keys], value[row][:, keys]
            out[row][:, :, slots], log_sum[row][:, :, slots] = _common(*parts, mask)
        out, log_sum = _add_own(query, out, log_sum, own_key, own_value, causal)
        ctx.save_for_backward(query, key, value, out, log_sum, *own)
        ctx.seen, ctx.causal = seen, causal
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, log_sum, *own = ctx.saved_tensors
        grad_query, *grad_own = _own_backward(grad, query, out, log_sum, own, ctx.causal)
        grad_key, grad_value = (torch.zeros_like(each, dtype=_exact(each)) for each in (key, value))
        for row, slots, keys, mask in _chunks(query, key, ctx.seen):
            given, q, o, total = (each[row][:, :, slots] for each in (grad, query, out, log_sum))
            some = _common_backward(given, q, o, total, key[row][:, keys], value[row][:, keys], mask)
            grad_query[row][:, :, slots] += some[0]
            grad_key[row][:, keys] += some[1]
            grad_value[row][:, keys] += some[2]
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), None, None, *grad_own


def _exact(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _chunks(query: Tensor, key: Tensor, seen: Span) -> Iterator[tuple[int, slice, slice, Tensor]]:
    """-> a row, some of its slots, the keys that some of them see, and which of these each one sees, bool [slots, keys]"""
    num_rows, groups, heads, num_slots, num_queries, _ = query.shape
    on_cpu = query.device.type == "cpu"
    most = CHUNK // num_queries if on_cpu else SCORES // (groups * heads * num_queries)
    size = max(1, min(most // max(1, key.shape[2]), SLOTS if on_cpu else num_slots))
    number = torch.arange(key.shape[2], device=key.device)
    first, last = (each.tolist() for each in seen.host or (seen.first, seen.last))
    for row in range(num_rows):
        for start in range(0, num_slots, size):
            slots = slice(start, min(start + size, num_slots))
            keys = slice(min(first[row][slots]), min(max(last[row][slots]) + 1, key.shape[2]))
            if keys.stop > keys.start:
                low, high = (each[row, slots, None] for each in (seen.first, seen.last))
                yield row, slots, keys, (number[keys] >= low) & (number[keys] <= high)


# Common keys of one row: query, out [G, R, S, P, E]; log_sum [G, R, S, P, 1]; key, value [G, C, E]; mask [S, C]


def _common(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """-> out, log_sum, of common keys alone. A slot that sees none of them gets a log_sum near the smallest number"""
    if query.device.type != "cpu":
        return _dense(query, key, value, mask)
    out, log_sum = _flash(*_grouped(query, key, value), 0.0, False, attn_mask=_added(query, mask), scale=1.0)
    return out.unflatten(2, query.shape[2:4]), log_sum.unflatten(2, query.shape[2:4])[..., None]


def _common_backward(
    grad: Tensor, query: Tensor, out: Tensor, log_sum: Tensor, key: Tensor, value: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """out, log_sum: of common and own keys. -> gradients of query, key, value"""
    if query.device.type != "cpu":
        return _dense_backward(grad, query, out, log_sum, key, value, mask)
    parts = grad.flatten(2, 3), *_grouped(query, key, value), out.flatten(2, 3), log_sum.flatten(2)
    grads = _flash_backward(*parts, 0.0, False, attn_mask=_added(query, mask), scale=1.0)
    return grads[0].unflatten(2, query.shape[2:4]), grads[1].sum(1), grads[2].sum(1)


def _grouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-> [G, R, S * P, E], and key and value [G, R, C, E] without copies"""
    repeat = (-1, query.shape[1], -1, -1)
    return query.flatten(2, 3), key[:, None].expand(repeat), value[:, None].expand(repeat)


def _added(query: Tensor, mask: Tensor) -> Tensor:
    """The mask as numbers to add to scores, [1, 1, S * P, C]"""
    added = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(~mask, torch.finfo(query.dtype).min)
    return added.repeat_interleave(query.shape[3], dim=0)[None, None]


def _dense(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """`_common` as matrix products"""
    scores = _dense_scores(query, key, mask)
    log_sum = scores.logsumexp(-1, keepdim=True)
    weights = (scores - log_sum.clamp(min=torch.finfo(scores.dtype).min)).exp().to(value.dtype)
    return (weights.flatten(1, 3) @ value).view(query.shape), log_sum


def _dense_backward(grad, query, out, log_sum, key, value, mask) -> tuple[Tensor, Tensor, Tensor]:
    """`_common_backward` as matrix products"""
    weights = (_dense_scores(query, key, mask) - log_sum).exp()  # [G, R, S, P, C]
    flat = grad.flatten(1, 3)
    grad_value = weights.flatten(1, 3).to(grad.dtype).transpose(-1, -2) @ flat
    mean = (grad * out).sum(-1, keepdim=True, dtype=log_sum.dtype)
    scores = _product(flat, value.transpose(-1, -2)).view(weights.shape)
    scores = (weights * (scores - mean)).to(query.dtype).flatten(1, 3)
    return (scores @ key).view(query.shape), scores.transpose(-1, -2) @ query.flatten(1, 3), grad_value


def _dense_scores(query: Tensor, key: Tensor, mask: Tensor) -> Tensor:
    """-> [G, R, S, P, C], minus infinity where a key is not seen"""
    scores = _product(query.flatten(1, 3), key.transpose(-1, -2)).view(*query.shape[:-1], -1)
    return scores.masked_fill(~mask[:, None], float("-inf"))


def _product(left: Tensor, right: Tensor) -> Tensor:
    """left [..., M, K], right [..., K, N] -> [..., M, N] of at least 32 bits, where the device can not rounded to 16 before.

    A softmax over scores that were rounded errs by a percent where they are large.
    """
    if left.device.type in WIDE and left.dtype in (torch.bfloat16, torch.float16):
        wide = torch.bmm(left.flatten(0, -3), right.flatten(0, -3), out_dtype=torch.float32)
        return wide.view(*left.shape[:-1], -1)
    return (left @ right).to(_exact(left))


# Own keys of all rows: query, out [B, G, R, S, P, E]; log_sum [B, G, R, S, P, 1]; own [B, G, S, N, E]


def _join(own: tuple[Tensor, ...] | list[Tensor], query: Tensor) -> tuple[Tensor, Tensor]:
    """All own keys of a slot side by side, and values -> [B, G, S, N, E] each"""
    if not own:
        num_rows, groups, _, num_slots, _, width = query.shape
        return (query.new_zeros(num_rows, groups, num_slots, 0, width),) * 2
    return torch.cat(own[::2], dim=3), torch.cat(own[1::2], dim=3)


def _own_scores(query: Tensor, own_key: Tensor, causal: bool) -> Tensor:
    """-> [B, G, S, R * P, N], minus infinity where a key is not seen"""
    scores = _product(_by_slot(query), own_key.transpose(-1, -2))
    if not causal:
        return scores
    later = torch.ones(query.shape[4], own_key.shape[3], dtype=torch.bool, device=query.device).triu(1)
    return scores.masked_fill(later.repeat(query.shape[2], 1), float("-inf"))


def _add_own(
    query: Tensor, out: Tensor, log_sum: Tensor, own_key: Tensor, own_value: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """out, log_sum: of common keys -> the same of common and own keys"""
    if own_key.shape[3] == 0:
        return out, log_sum
    scores = _by_head(_own_scores(query, own_key, causal), query)
    total = torch.logaddexp(log_sum, scores.logsumexp(-1, keepdim=True))
    weights = (scores - total).exp().to(query.dtype)
    own = _by_head(_by_slot(weights) @ own_value, query)
    return out * (log_sum - total).exp().to(out.dtype) + own, total


def _own_backward(
    grad: Tensor, query: Tensor, out: Tensor, log_sum: Tensor, own: list[Tensor], causal: bool
) -> list[Tensor]:
    """-> gradients of query, by its scores over own keys, and of each of `own`"""
    own_key, own_value = _join(own, query)
    if own_key.shape[3] == 0:
        return [torch.zeros_like(query)]
    by_slot = _by_slot(query)
    weights = (_own_scores(query, own_key, causal) - _by_slot(log_sum)).exp()  # [B, G, S, R * P, N]
    given = _by_slot(grad)
    mean = (given * _by_slot(out)).sum(-1, keepdim=True, dtype=log_sum.dtype)
    grad_value = weights.to(grad.dtype).transpose(-1, -2) @ given
    scores = (weights * (_product(given, own_value.transpose(-1, -2)) - mean)).to(query.dtype)
    sizes = [each.shape[3] for each in own[::2]]
    pairs = zip((scores.transpose(-1, -2) @ by_slot).split(sizes, dim=3), grad_value.split(sizes, dim=3))
    return [_by_head(scores @ own_key, query), *(each for pair in pairs for each in pair)]


def _by_slot(values: Tensor) -> Tensor:
    """[B, G, R, S, P, .] -> [B, G, S, R * P, .]"""
    return values.transpose(2, 3).flatten(3, 4)


def _by_head(values: Tensor, query: Tensor) -> Tensor:
    """[B, G, S, R * P, .] -> [B, G, R, S, P, .]"""
    return values.unflatten(3, (query.shape[2], query.shape[4])).transpose(2, 3)
