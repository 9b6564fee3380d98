"""Attention of a tree over a cache: the operator and its Triton kernels against a mask over all entries."""

import json

import pytest
import torch

from specdec.core import tree_attention
from specdec.core.tree_attention import attend_tree, cut_queries, pack_words
from tests.support.tree_cases import CASES
from tests.support.triton_kernels import Recorder, run_in_interpreter

QWEN3_8B, WIDE = (32, 8, 128), (8, 4, 256)  # numbers of query and key heads, and their width


@pytest.mark.parametrize("name", CASES)
def test_the_operator_against_a_mask(name):
    case = CASES[name]
    operands, tree, sinks, reference = case.make()
    out = attend_tree(*operands, *tree, case.width**-0.5, sinks)
    torch.testing.assert_close(out, reference, atol=1e-12, rtol=0)


def test_bits_of_words():
    seen = torch.zeros(2, 3, 130, dtype=torch.bool)
    seen[0, 1, [0, 63, 64, 129]] = True
    words = pack_words(seen)
    assert words.shape == (2, 3, 3) and words[0, 1].tolist() == [1 - 2**63, 1, 2]
    assert words.sum() == words[0, 1].sum()


def test_the_operator_keeps_its_contract():
    """Shapes without values, no argument changed, none returned."""
    operands, tree, sinks, _ = CASES["a chain in a window"].make()
    torch.library.opcheck(attend_tree, (*operands, *tree, 0.5, sinks), test_utils=("test_schema", "test_faketensor"))


def test_a_query_that_sees_nothing_gives_zeros():
    operands, (words, firsts, lengths), _, _ = CASES["a token, ragged"].make()
    out = attend_tree(*operands, torch.zeros_like(words), firsts, lengths, 0.5)
    assert not out[0].any() and out[1].any()


def test_the_proof_of_the_path_runs_here():
    tree_attention.check_tree_attention(torch.device("cpu"))


@pytest.mark.triton
def test_kernels_in_their_interpreter():
    """Entries that no node sees are NaN there. Errors are roundings of float32, or of float16."""
    triton = pytest.importorskip("triton", reason="Triton is missing: it comes with the extra gpu-code.")
    if triton.__version__ < "3.7":
        pytest.skip("The interpreter of Triton 3.6 has no loops over tensors with NumPy 2.4.")
    lines = run_in_interpreter("from tests.support.tree_cases import main; main()").splitlines()
    errors = dict(map(json.loads, lines))
    assert errors.keys() == {*CASES, "a decoder"}
    limits = {name: 2e-3 if case.dtype == torch.float16 else 1e-6 for name, case in CASES.items()} | {"a decoder": 5e-6}
    assert not {name: error for name, error in errors.items() if not error < limits[name]}


@pytest.mark.triton
@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize(
    "rows, nodes, shape, limit",
    [(1, 1, QWEN3_8B, 168), (1, 6, QWEN3_8B, 216), (1, 64, QWEN3_8B, 255), (32, 65, QWEN3_8B, 255), (1, 64, WIDE, 208)],
)
def test_registers_of_kernels(rows, nodes, shape, limit, capability, monkeypatch):
    """Nothing spills, and blocks fit a GPU with 99 KB of shared memory, such as an RTX 4090. 32 rows have sinks."""
    pytest.importorskip("triton", reason="Triton is missing: it comes with the extra gpu-code.")
    from specdec.core import tree_kernels

    launches = [Recorder(tree_kernels._attend_parts), Recorder(tree_kernels._join_parts)]
    for name, recorder in zip(("_attend_parts", "_join_parts"), launches):
        monkeypatch.setattr(tree_kernels, name, recorder)
    heads, groups, width = shape
    with torch.device("meta"):
        query = torch.empty(rows, heads, nodes, width, dtype=torch.bfloat16)
        key, value = torch.empty(2, rows, groups, 4096, width, dtype=torch.bfloat16)
        words = torch.zeros(rows, nodes, -(-nodes // 64), dtype=torch.int64)
    tree = words, words[..., 0], words[:, 0, 0]
    sinks = query[0, :, 0, 0] if rows > 1 else None
    out = tree_kernels.attend(query, key, value, tree, cut=cut_queries(query.shape, groups), scale=0.1, sinks=sinks)
    assert out.shape == (rows, nodes, heads, width) and out.is_contiguous()
    for launch, most in zip(launches, (limit, 80)):
        usage = launch.compile(capability)
        print(rows, nodes, shape, capability, launch.kernel.__name__, launch.grid, usage)
        assert usage.spills == 0 and usage.registers <= most
        assert usage.shared <= (227 if capability == 90 else 99) * 1024
