"""Top-p by a threshold: the tokens that a sort of all of them keeps, whatever the logits, without a sort or a wait."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from specdec.core import fast, nucleus
from specdec.core.nucleus import keep_nucleus_by_sort, keep_nucleus_by_threshold, order_by_integers
from specdec.core.sampling import Sampling

KINDS = {
    "peaked": lambda noise: 12 * noise,
    "usual": lambda noise: 2.5 * noise,
    "flat": lambda noise: 0.01 * noise,
    "ties": lambda noise: (2.5 * noise).round(),
    "two values": lambda noise: torch.where(noise > 0, 3.0, -3.0).to(noise),
    "bfloat16": lambda noise: (2.5 * noise).bfloat16().to(noise),
    "forbidden": lambda noise: noise.masked_fill(noise < 1, -torch.inf),
    "one token": lambda noise: torch.full_like(noise, -torch.inf).index_fill(1, torch.tensor([7]), -3.0),
    "huge": lambda noise: 1e30 * noise,
    "signed zeros": lambda noise: torch.where(noise > 0.5, noise, torch.where(noise > 0, 0.0, -0.0)),
}
SHARES = [1e-6, 0.1, 0.5, 0.9, 0.999, 1 - 1e-7]


@pytest.mark.parametrize("bits", [1, 3, 5])  # 32 and 64 bits end with a whole digit, or with a part of one
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_the_tokens_are_those_of_a_sort(kind, dtype, bits, monkeypatch):
    """In both dtypes, and without a difference of one bit in the kept logits."""
    monkeypatch.setattr(nucleus, "DIGIT_BITS", bits)
    logits = KINDS[kind](torch.randn(9, 2003, generator=torch.Generator().manual_seed(0), dtype=dtype))
    for top_p in SHARES:
        kept = keep_nucleus_by_threshold(logits, top_p)
        assert torch.equal(kept, keep_nucleus_by_sort(logits, top_p)), top_p


def test_of_equal_logits_at_the_boundary_the_highest_token_ids_are_kept():
    """All sums are exact: the last of the kept ones is where the sum passes 1 - top_p, not where it reaches it."""
    logits = torch.tensor([[0.0, -0.0, 0.0, 0.0], [1.0, 1.0, -torch.inf, 1.0]])
    for top_p, kept in ((0.75, [1, 2, 3]), (0.74, [1, 2, 3]), (0.5, [2, 3]), (0.25, [3]), (1e-9, [3])):
        assert keep_nucleus_by_threshold(logits, top_p)[0].isfinite().nonzero().flatten().tolist() == kept
    assert keep_nucleus_by_threshold(logits, 0.5)[1].isfinite().tolist() == [False, True, False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_integers_have_the_order_of_logits(dtype):
    info = torch.finfo(dtype)
    values = [-torch.inf, info.min, -1.5, -1.0, -info.tiny, -0.0, 0.0, info.tiny, 1.0, 1.5, info.max, torch.inf]
    integers = order_by_integers(torch.tensor([values], dtype=dtype))[0].tolist()
    assert integers == sorted(integers) and integers[5] == integers[6] and len(set(integers)) == len(values) - 1


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_logits_without_a_distribution_give_none(value):
    logits = torch.zeros(2, 50)
    logits[0] = value
    logits[1, 3] = torch.nan
    with fast.force_paths("nucleus"):
        assert Sampling(1.0, top_p=0.9).distribution(logits).isnan().all()


def test_a_device_with_the_path_takes_it_and_rows_have_any_shape(monkeypatch):
    monkeypatch.setattr(nucleus, "_keep_nucleus_of_few", None)
    logits = torch.randn(3, 4, 1000, generator=torch.Generator().manual_seed(0))
    sampling = Sampling(0.7, top_k=300, top_p=0.8)
    with fast.force_paths("nucleus"):
        result = sampling.distribution(logits)
    monkeypatch.undo()
    assert torch.equal(result, sampling.distribution(logits)) and result.shape == logits.shape


def test_the_search_neither_sorts_nor_waits():
    """Tracing by make_fx stops at a wait. Traced code gives the same tokens for other logits of the shape."""
    logits = 3 * torch.randn(2, 4, 500, generator=torch.Generator().manual_seed(0))
    traced = make_fx(lambda logits: keep_nucleus_by_threshold(logits, 0.9))(logits[0])
    assert torch.equal(traced(logits[1]), keep_nucleus_by_sort(logits[1], 0.9))
    names = {str(node.target) for node in traced.graph.nodes}
    assert not any(word in name for name in names for word in ("sort", "topk", "nonzero", "_local_scalar_dense"))


def test_the_compiled_search_has_one_function_for_all_numbers_of_rows():
    torch._dynamo.reset()
    graphs = []

    def record_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    search = torch.compile(nucleus.search_nucleus, fullgraph=True, backend=record_graph)
    for num_rows in (5, 2, 9):
        logits = (2.5 * torch.randn(num_rows, 700, generator=torch.Generator().manual_seed(num_rows))).round()
        torch._dynamo.maybe_mark_dynamic(logits, 0)
        for top_p in (0.3, 0.9):
            kept = keep_nucleus_by_threshold(logits, top_p, search)
            assert torch.equal(kept, keep_nucleus_by_sort(logits, top_p))
    assert len(graphs) == 1


def test_the_proof_of_a_device_finds_a_wrong_search(monkeypatch):
    cpu = torch.device("cpu")
    nucleus.check_nucleus(cpu)
    monkeypatch.setattr(nucleus, "_choose_search", lambda device: lambda logits, limit: logits)
    with pytest.raises(ValueError, match=r"keeps other tokens than a sort \(top_p=0.1\)"):
        nucleus.check_nucleus(cpu)
