"""Attention of the training unroll over spans of common keys and own keys, against dense masks."""

import pytest
import torch

from specdec.core import span_attention
from specdec.core.cache import UnrollCache
from specdec.core.span_attention import find_spans
from tests.support.reference_masks import document_mask

INDEX = torch.tensor([[0, 0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0], [-1, 0, 0, -1, 1, 1, 1]])


@pytest.mark.parametrize("lag", [0, 1, 2])
def test_spans_are_the_masks_of_documents(lag):
    assert torch.equal(find_spans(INDEX, lag=lag).mask(7), document_mask(INDEX, lag=lag))


@pytest.mark.parametrize("scores", [1, 60, 10**6])  # one slot at a time, some, all
def test_unroll_attention_against_a_dense_mask(scores, monkeypatch):
    """Keys [S, T + (d-1)*S]: those of step 1, then those of steps 2..d, of which each slot sees only its own."""
    monkeypatch.setattr(span_attention, "MAX_MASK_ENTRIES", scores)
    torch.manual_seed(0)
    rows, heads, kv_heads, size, width = 3, 4, 2, 7, 6
    later_slots = torch.tensor([1, 2, 5])  # the slots of later steps
    cache, keys, values, inputs = UnrollCache(), [], [], []
    attended = expected = torch.zeros((), dtype=torch.float64)
    for d in range(1, 5):
        slots = torch.arange(size) if d == 1 else later_slots
        query = torch.randn(rows, heads, len(slots), width, dtype=torch.float64, requires_grad=True)
        pair = torch.randn(2, rows, kv_heads, len(slots), width, dtype=torch.float64, requires_grad=True)
        inputs += [query, pair]
        out = cache.at_step(d).attend(3, query, *pair, find_spans(INDEX).select_slots(slots.expand(rows, -1)))
        keys.append(pair[0])
        values.append(pair[1])
        own = torch.eye(len(later_slots), dtype=torch.bool).expand(rows, 1, -1, -1)
        mask = torch.cat([document_mask(INDEX)[:, :, slots], *[own] * (d - 1)], dim=-1)  # [B, 1, S, T + (d-1)*S]
        every_key, every_value = (torch.cat(x, dim=2).repeat_interleave(heads // kv_heads, 1) for x in (keys, values))
        weights = (query @ every_key.transpose(2, 3) / width**0.5).masked_fill(~mask, float("-inf")).softmax(-1)
        torch.testing.assert_close(out, weights @ every_value, atol=1e-12, rtol=0)
        attended, expected = attended + out.sin().sum(), expected + (weights @ every_value).sin().sum()
    for grad, wanted in zip(torch.autograd.grad(attended, inputs), torch.autograd.grad(expected, inputs)):
        torch.testing.assert_close(grad, wanted, atol=1e-10, rtol=0)


@pytest.mark.parametrize("scores", [1, 10**6])
@pytest.mark.parametrize("lag", [0, 2])
def test_attention_over_spans_of_blocks_of_queries(lag, scores, monkeypatch):
    """As block drafters use it: several queries and several own keys in each slot."""
    monkeypatch.setattr(span_attention, "MAX_MASK_ENTRIES", scores)
    torch.manual_seed(0)
    shapes = (3, 2, 2, 7, 4, 6), (3, 2, 7, 6), (3, 2, 7, 6), (3, 2, 7, 3, 6), (3, 2, 7, 3, 6)
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    seen = span_attention.Span(*(getattr(find_spans(INDEX, lag=lag), name) for name in ("first", "last")))
    out = span_attention.attend(*inputs[:3], seen, *inputs[3:])
    wanted = span_attention.attend(*inputs[:3], seen.mask(7), *inputs[3:])  # without chunks, by autograd
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=0)
    given = torch.randn_like(out)
    for grad, reference in zip(torch.autograd.grad(out, inputs, given), torch.autograd.grad(wanted, inputs, given)):
        torch.testing.assert_close(grad, reference, atol=1e-10, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_gpu_does_not_round_scores_before_the_softmax(dtype, monkeypatch):
    """Its way, with large scores of both kinds of keys, is as near to float64 as rounded inputs and weights allow."""
    multiply = torch.bmm
    monkeypatch.setattr(
        torch, "bmm", lambda a, b, out_dtype: multiply(a.to(out_dtype), b.to(out_dtype))
    )  # as a GPU adds up
    for name in ("_attend_common", "_attend_common_backward"):
        monkeypatch.setattr(span_attention, name, getattr(span_attention, name.replace("common", "dense")))
    torch.manual_seed(0)
    shapes = {
        "query": (1, 2, 2, 48, 2, 64),
        "key": (1, 2, 48, 64),
        "value": (1, 2, 48, 64),
        "own": (2, 1, 2, 48, 3, 64),
    }
    inputs = [torch.randn(shape).to(dtype) for shape in shapes.values()]
    grad = torch.randn(shapes["query"]).to(dtype)

    def worst(wide: tuple[str, ...]) -> list[float]:
        """Relative errors of the output and of each gradient"""
        monkeypatch.setattr(span_attention, "WIDE_PRODUCT_DEVICES", wide)
        results = []
        for exact in (False, True):
            query, key, value, own = (each.double() if exact else each.clone() for each in inputs)
            leaves = [each.requires_grad_() for each in (query, key, value, own)]
            out = span_attention.attend(query, key, value, find_spans(torch.zeros(1, 48, dtype=torch.long)), *own)
            results.append([out, *torch.autograd.grad(out, leaves, grad.to(out.dtype))])
        return [float(((some - all).norm() / all.norm()).detach()) for some, all in zip(*results)]

    inputs[0] *= 0.75  # scores of a standard deviation of 6
    narrow, wide = worst(()), worst(("cpu",))
    assert max(wide) < 4 * torch.finfo(dtype).eps, wide
    assert all(1.5 * few < many for few, many in zip(wide, narrow)), (wide, narrow)


@pytest.mark.parametrize("dense", [False, True])
def test_causal_queries_see_the_first_of_their_own_keys(dense):
    """Query p alone with the first p + 1 own keys, both ways."""
    torch.manual_seed(0)
    shapes = {"query": (3, 2, 2, 7, 4, 6), "key": (3, 2, 7, 6), "value": (3, 2, 7, 6), "own": (2, 3, 2, 7, 4, 6)}
    query, key, value, own = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes.values())
    seen = find_spans(INDEX, lag=1)
    seen = seen.mask(7) if dense else span_attention.Span(seen.first, seen.last)
    out = span_attention.attend(query, key, value, seen, *own, causal=True)
    alone = [span_attention.attend(query[..., p : p + 1, :], key, value, seen, *own[..., : p + 1, :]) for p in range(4)]
    wanted, given, inputs = torch.cat(alone, dim=-2), torch.randn_like(out), (query, key, value, own)
    torch.testing.assert_close(out, wanted, atol=1e-12, rtol=0)
    for grad, reference in zip(torch.autograd.grad(out, inputs, given), torch.autograd.grad(wanted, inputs, given)):
        torch.testing.assert_close(grad, reference, atol=1e-10, rtol=0)
