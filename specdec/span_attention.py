"""Attention of the training unroll: a span of common keys and a few own keys for each slot, in memory linear in their number.

Scores exist for one chunk of slots at a time. The forward pass keeps the log of each query's sum of exponents, and the
backward pass computes the chunk's weights again from it (Dao, 2205.14135, section 3.1).
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

SCORES = (
    2**21
)  # scores over common keys that exist at a time: as many as a CPU reads from its caches (RESULTS.md, section 28)
MORE = 32  # times as many on other devices


@dataclass(frozen=True)
class Span:
    """The common keys that each slot sees: first <= number of the key <= last, both [B, S]; none if last < first.

    apart: the slot's own key is not among them, although it sees that one too
    """

    first: Tensor
    last: Tensor
    apart: bool = False

    def of(self, order: Tensor) -> "Span":
        """The spans of chosen slots. order [B, S']"""
        return Span(self.first.gather(1, order), self.last.gather(1, order), self.apart)

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


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Seen, own: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """Softmax over the common keys that a slot sees and all of its own ones.

    query [B, G, R, S, P, E], scaled: P queries of each of S slots, R heads for each of G heads of keys
    key [B, G, C, E], value [B, G, C, V]; seen: a Span, or a mask [B, 1, S, C] for passes without gradients
    own: keys [B, G, S, N, E] and values [B, G, S, N, V] of each slot -> [B, G, R, S, P, V]
    """
    own_key, own_value = own or (
        query.new_zeros(*query.shape[:2], query.shape[3], 0, size) for size in (query.shape[-1], value.shape[-1])
    )
    if isinstance(seen, Tensor):
        out, _ = _chunk(query, key, value, own_key, own_value, seen)
        return out
    return _Attention.apply(query, key, value, own_key, own_value, seen.first, seen.last)


def _scores(query, key, own_key, seen) -> tuple[Tensor, Tensor]:
    """-> over common keys [B, G, R, S, P, C], minus infinity where they are not seen; over own keys [B, G, R, S, P, N]"""
    past = (query.flatten(2, 4) @ key.transpose(-1, -2)).view(*query.shape[:-1], -1)
    own = _by_slot(query) @ own_key.transpose(-1, -2)  # [B, G, S, R * P, N]
    exact = torch.promote_types(query.dtype, torch.float32)
    return past.to(exact).masked_fill(~seen[:, :, None, :, None], float("-inf")), _by_head(own, query).to(exact)


def _by_slot(values: Tensor) -> Tensor:
    """[B, G, R, S, P, .] -> [B, G, S, R * P, .]"""
    return values.transpose(2, 3).flatten(3, 4)


def _by_head(values: Tensor, query: Tensor) -> Tensor:
    """[B, G, S, R * P, .] -> [B, G, R, S, P, .]"""
    return values.unflatten(3, (query.shape[2], query.shape[4])).transpose(2, 3)


def _chunk(query, key, value, own_key, own_value, seen) -> tuple[Tensor, Tensor]:
    """-> attention [B, G, R, S, P, V], the log of the sum of exponents [B, G, R, S, P, 1]"""
    past, own = _scores(query, key, own_key, seen)
    total = torch.logaddexp(past.logsumexp(-1, keepdim=True), own.logsumexp(-1, keepdim=True))
    past, own = ((part - total).exp().to(value.dtype) for part in (past, own))
    out = (past.flatten(2, 4) @ value).view(*query.shape[:-1], -1)
    return out + _by_head(_by_slot(own) @ own_value, query), total


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, own_key, own_value, first, last):
        with torch.autocast(query.device.type, enabled=False):
            outs, totals = [], []
            for slots, keys, seen in _chunks(query, key, first, last):
                out, total = _chunk(
                    query[:, :, :, slots],
                    key[:, :, keys],
                    value[:, :, keys],
                    own_key[:, :, slots],
                    own_value[:, :, slots],
                    seen,
                )
                outs.append(out)
                totals.append(total)
            out, total = torch.cat(outs, dim=3), torch.cat(totals, dim=3)
        ctx.save_for_backward(query, key, value, own_key, own_value, first, last, out, total)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, own_key, own_value, first, last, out, total = ctx.saved_tensors
        exact = total.dtype
        grad_query, grad_own_key, grad_own_value = (torch.empty_like(each) for each in (query, own_key, own_value))
        grad_key, grad_value = (torch.zeros_like(each, dtype=exact) for each in (key, value))
        for slots, keys, seen in _chunks(query, key, first, last):
            part = query[:, :, :, slots]
            past, own = _scores(part, key[:, :, keys], own_key[:, :, slots], seen)
            past, own = ((each - total[:, :, :, slots]).exp() for each in (past, own))
            given = grad[:, :, :, slots]
            mean = (given.to(exact) * out[:, :, :, slots]).sum(-1, keepdim=True)  # of the weighted gradients
            flat, by_slot = given.flatten(2, 4), _by_slot(given)
            grad_value[:, :, keys] += past.to(given.dtype).flatten(2, 4).transpose(-1, -2) @ flat
            grad_own_value[:, :, slots] = _by_slot(own).to(given.dtype).transpose(-1, -2) @ by_slot
            past *= (flat @ value[:, :, keys].transpose(-1, -2)).view(past.shape) - mean
            own = own * (_by_head(by_slot @ own_value[:, :, slots].transpose(-1, -2), part) - mean)
            past, own = past.to(query.dtype), own.to(query.dtype)
            flat, by_slot = past.flatten(2, 4), _by_slot(own)
            grad_key[:, :, keys] += flat.transpose(-1, -2) @ part.flatten(2, 4)
            grad_own_key[:, :, slots] = by_slot.transpose(-1, -2) @ _by_slot(part)
            common = (flat @ key[:, :, keys]).view(part.shape)
            grad_query[:, :, :, slots] = common + _by_head(by_slot @ own_key[:, :, slots], part)
        return grad_query, grad_key.to(key.dtype), grad_value.to(value.dtype), grad_own_key, grad_own_value, None, None


def _chunks(query: Tensor, key: Tensor, first: Tensor, last: Tensor) -> Iterator[tuple[slice, slice, Tensor]]:
    """-> slots, the keys that some of them see, and which of these each one sees, [B, 1, slots, keys]"""
    num_rows, groups, heads, num_slots, num_queries, _ = query.shape
    num_keys = key.shape[2]
    most = SCORES if query.device.type == "cpu" else MORE * SCORES
    size = max(1, most // (num_rows * groups * heads * num_queries * num_keys))
    size = -(-num_slots // -(-num_slots // size)) if num_slots else 1  # chunks of equal size
    for start in range(0, num_slots, size):
        slots = slice(start, min(start + size, num_slots))
        low, high = first[:, slots], last[:, slots]
        keys = slice(0, num_keys)
        if query.device.type == "cpu":  # elsewhere this would wait for the device
            keys = slice(int(low.min().clamp(max=num_keys)), int(high.max().clamp(min=-1)) + 1)
        number = torch.arange(num_keys, device=key.device)[keys]
        yield slots, keys, ((number >= low[..., None]) & (number <= high[..., None]))[:, None]
