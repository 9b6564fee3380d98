"""Texts side by side in one call, against dense masks: the reference loop, texts of spans, the target's pass."""

import pytest
import torch

from specdec.core import fast, masks, span_attention, varlen
from specdec.core.span_attention import find_spans
from specdec.core.varlen import Segments, attend_segments, attend_segments_backward
from specdec.text.conversations import Row
from tests.support.families import FAMILIES
from tests.target_table import make_family_target
from train.data.batches import collate
from train.features.outputs import read_outputs

# Families whose attention takes a mask apart, or caps its scores
CANNOT = {"nemotron", "stablelm", "gemma2", "vaultgemma", "doge", "falcon"}
INDEX = torch.tensor([[0, 0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 0, 0, 0], [-1, 0, 0, -1, 1, 1, 1]])


@pytest.mark.parametrize("window", [None, 0, 2])
def test_texts_side_by_side_against_each_alone(window):
    torch.manual_seed(0)
    queries, keys = [5, 1, 7], [8, 1, 7]
    parts = [torch.randn(num, heads, 4, dtype=torch.float64) for num, heads in ((13, 4), (16, 2), (16, 2))]
    query, key, value = leaves = [part.requires_grad_() for part in parts]
    segments = Segments.from_counts(queries, keys)
    out, log_sum = attend_segments(query, key, value, segments, scale=0.5, window=window)
    expected = []
    for q, k, v in zip(query.split(queries), key.split(keys), value.split(keys)):
        mask = torch.ones(len(q), len(k), dtype=torch.bool).tril(len(k) - len(q))
        mask = mask if window is None else mask & mask.triu(len(k) - len(q) - window)
        scores = 0.5 * torch.einsum("qhe,khe->hqk", q, k.repeat_interleave(2, dim=1)).masked_fill(~mask, float("-inf"))
        expected.append(torch.einsum("hqk,khe->qhe", scores.softmax(-1), v.repeat_interleave(2, dim=1)))
        torch.testing.assert_close(log_sum[:, sum(map(len, expected)) - len(q) :][:, : len(q)], scores.logsumexp(-1))
    torch.testing.assert_close(out, torch.cat(expected), atol=1e-12, rtol=0)
    given = torch.randn_like(out)
    grads = attend_segments_backward(given, *leaves, out, log_sum, segments=segments, scale=0.5, window=window)
    for grad, reference in zip(grads, torch.autograd.grad(torch.cat(expected), leaves, given)):
        torch.testing.assert_close(grad, reference, atol=1e-10, rtol=0)


def random_packs(seed: int) -> torch.Tensor:
    """[B, T] documents of packs, some of which end in padding"""
    torch.manual_seed(seed)
    rows, length = int(torch.randint(1, 4, ())), int(torch.randint(4, 40, ()))
    counts = torch.randint(1, 12, (rows, length))
    packs = torch.stack([torch.arange(length).repeat_interleave(count)[:length] for count in counts])
    return packs.masked_fill(torch.arange(length) >= length - torch.randint(0, 4, (rows, 1)), -1)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("lag, share", [(0, 1.0), (0, 0.6), (2, 1.0)])
@pytest.mark.parametrize("window", [None, 3])
def test_texts_of_random_packs_against_a_dense_mask(seed, lag, share, window):
    """Values and gradients of slots inside documents, of all of them and of chosen ones, with own keys beside."""
    index = random_packs(seed)
    num_rows, length = index.shape
    seen = find_spans(index, lag=lag)
    if share < 1:
        order = torch.stack([torch.rand(length).argsort()[: max(1, int(share * length))].sort().values for _ in index])
        seen = seen.select_slots(order, index)
    else:
        order = torch.arange(length).expand(num_rows, -1)
    seen = span_attention.narrow_to_window(seen, window, depth=1, positions=order, first=0)
    shapes = (
        (num_rows, 2, 3, order.shape[1], 2, 4),
        *[(num_rows, 2, length, 4)] * 2,
        *[(num_rows, 2, order.shape[1], 2, 4)] * 2,
    )
    inputs = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    real = (index.gather(1, order) >= 0)[:, None, None, :, None, None]
    grad = torch.randn(shapes[0], dtype=torch.float64) * real  # nobody reads what padding gives
    results = []
    for paths in ((), ("varlen",)):
        with fast.force_paths(*paths):
            assert span_attention.use_texts(seen, inputs[0]) == (paths != () and seen.texts is not None)
            out = span_attention.attend(*inputs[:3], seen, *inputs[3:])
            results.append([out * real, *torch.autograd.grad(out, inputs, grad)])
    for found, wanted in zip(*results):
        torch.testing.assert_close(found, wanted, atol=1e-10, rtol=0)


def test_scattered_slots_are_left_to_chunks():
    index = torch.zeros(1, 64, dtype=torch.long)
    assert find_spans(index).select_slots(torch.tensor([[3, 60]]), index).texts is None
    assert find_spans(index).select_slots(torch.tensor([[3, 5]]), index).texts is not None


def test_packed_documents_are_a_number_of_texts_that_stays():
    segments = masks.Packed.from_index(INDEX).segments
    assert len(segments.query_starts.diff()) == varlen.TEXT_COUNT_MULTIPLE and segments.longest == (7, 7)


@pytest.mark.full
@pytest.mark.parametrize("family", [family for family in FAMILIES if not family.refused], ids=str)
def test_targets_read_packs_in_one_call_as_text_by_text(family, recwarn):
    """With windows, sinks and latent attention. A family that cannot says so in one sentence, and reads groups."""
    target = make_family_target(family)
    rows = []
    for num in (9, 20, 3, 14):
        tokens = [(7 * position + num) % 60 + 1 for position in range(num)]
        rows.append(Row(str(num), "all", tokens, [False] * num))
    batch = collate([rows[:2], rows[2:]], length=32, pad_token=0)
    expected = read_outputs(target, batch, (0, 2))
    target.__dict__.pop("reads_segments")
    try:
        with fast.force_paths("varlen"):
            outputs = read_outputs(target, batch, (0, 2))
            can = target.reads_segments
    finally:
        target.__dict__.pop("reads_segments")
    num_warnings = sum("fast path varlen" in str(warning.message) for warning in recwarn)
    must_read_groups = target.adds_masks or target.penalises_distance or bool(target.layer_kinds.chunk)
    assert can != (must_read_groups or num_warnings == 1)
    real = batch.documents >= 0
    for name in ("features", "final"):
        result, reference = getattr(outputs, name), getattr(expected, name)
        torch.testing.assert_close(result[real], reference[real], atol=1e-4, rtol=1e-4)
    assert can or str(family) in CANNOT or must_read_groups
