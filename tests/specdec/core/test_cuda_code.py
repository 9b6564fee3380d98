"""Inductor's code for CUDA of compiled decoding: nothing is refused, and a layer is few kernels.

Kernels may only become fewer. The counts are of torch 2.13; a torch that fuses less may need its own.
"""

import pytest
import torch
from torch._inductor.graph import GraphLowering
from transformers import Qwen3Config

from specdec.core import fast, rules
from specdec.core.cached_keys import attend_cached, find_cached_keys
from specdec.core.compile import CUDA_OPTIONS, Graph, Runner
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape, make_tree
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.target import fused_attention
from specdec.target.model import Target
from specdec.target.verifier import Verifier
from tests.support.cuda_code import Function, generate_code
from tests.support.decoding import chain_of
from tests.support.drafters import HEADS, make_drafter
from tests.support.fake_cuda import CUDA, FakeCuda
from tests.support.targets import QWEN3_8B, make_target

PDL = {"triton.enable_pdl": True}  # kernels that start before the one before them has ended; since Hopper


@pytest.fixture
def device():
    with FakeCuda() as device, fast.force_paths("cache"):
        yield device


def generate_pass(device: FakeCuda, nodes: int, options: dict | None = None) -> list[Function]:
    """The functions of a pass over so many nodes behind 500 tokens: a chain up to 6, else a binary tree.

    Of Qwen3-8B with three layers: all are one function.
    """
    layers = {"num_hidden_layers": 3, "layer_types": None}
    with device.paused():
        target = Target.outline(Qwen3Config.from_dict(QWEN3_8B.to_dict() | layers), name="qwen")
    device.move_target(target, reads_length=True)
    if fast.allows("write", CUDA):
        fused_attention.fuse_attention(target.layers, lambda: None, max_error=1.0)
    cache = target.cache(1)
    cache.make_room(580)
    cache.commit(torch.full_like(cache.lengths, 500), [500])
    verify = Verifier(target, sampling=Sampling(), rule="token", runner=Runner(True), hidden_states=(1, 2))
    tree = make_tree([1], [[(1, num - 1 if nodes <= 6 else (num + 1) // 2 - 1) for num in range(1, nodes)]], CUDA)
    with generate_code(options) as functions, torch.inference_mode():
        verify(tree, cache, rules.Draws(None))
    assert not any(function.refusal for function in functions)
    return functions


def find_layer(functions: list[Function]) -> Function:
    (layer,) = (function for function in functions if "layer of" in str(function.name))
    return layer


@pytest.mark.triton
@pytest.mark.parametrize("nodes, budget, outside", [(1, 13, 9), (6, 19, 12), (64, 18, 18)])
def test_kernels_of_a_layer_of_qwen3_8b(device, nodes, budget, outside):
    """outside: kernels of a pass besides its layers"""
    functions = generate_pass(device, nodes)
    kernels = find_layer(functions).kernels
    assert budget - 1 <= len(kernels) <= budget, kernels
    others = sum(len(function.kernels) for function in functions) - len(kernels)
    assert outside - 1 <= others <= outside
    assert (nodes == 1) == (not any(name.startswith("extern_kernels") for name in kernels))  # no call of cuBLAS


@pytest.mark.triton
@pytest.mark.parametrize("nodes, budget", [(1, 9), (6, 11), (64, 11)])
def test_kernels_of_a_layer_with_the_kernels_of_this_project(device, nodes, budget):
    """Of norm, rotary embedding and the write of keys (1), and of attention (2)"""
    with fast.force_paths("cache", "tree", "write"):
        kernels = find_layer(generate_pass(device, nodes)).kernels
    assert budget - 1 <= len(kernels) <= budget, kernels


@pytest.mark.triton
def test_the_options_of_cuda_save_three_kernels_of_a_layer(device):
    tuned, plain = (find_layer(generate_pass(device, 1, options)).kernels for options in (None, {}))
    assert len(tuned) == len(plain) - 3, (tuned, plain)


@pytest.mark.triton
@pytest.mark.skipif(not hasattr(torch._inductor.config.triton, "enable_pdl"), reason="torch has no such option")
def test_dependent_launches_change_no_kernel(device):
    """TORCHINDUCTOR_ENABLE_PDL=1 generates: each kernel waits for the one before it behind its own start."""
    tuned, early = (find_layer(generate_pass(device, 1, options)) for options in (None, CUDA_OPTIONS | PDL))
    assert len(early.kernels) == len(tuned.kernels)
    kernels = early.code.count("@triton.jit")
    assert early.code.count("gdc_wait()") >= kernels - 1 and "gdc_wait" not in tuned.code


SHAPES = {"chain": chain_of(2), "tree": TreeShape(depth=2, width=2, nodes=4)}


@pytest.mark.triton
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("head", HEADS)
def test_nothing_that_heads_do_is_refused(device, head, shape):
    """Greedy and sampled rounds, behind a prompt of 9 tokens"""
    with device.paused():
        target = make_target(60, num_layers=3)
        drafter = make_drafter(target, head, True).frozen_copy()
    device.move_target(target, reads_length=True)
    device.move_module(drafter)
    for temperature in (0.0, 1.0):
        proposer = HeadProposer(drafter, SHAPES[shape], compile=True)
        batch = Decoder(target, proposer, sampling=Sampling(temperature), stop=set()).batch()
        batch.admit([Request([1] * 9, 50)])
        with generate_code() as functions:
            batch.run_round()
            batch.run_round()
        assert functions and not [function for function in functions if function.refusal]
        assert all(function.kernels for function in functions)


@pytest.mark.parametrize("num, window, sinks", [(2, None, False), (5, None, True), (3, 40, True)])
def test_inductor_fuses_attention_over_committed_keys(device, num, window, sinks):
    """torch 2.11 to 2.13 refuse loops on CUDA that read a view of a part of a concatenation. Needs no triton."""
    ancestors, lengths = torch.ones(1, num, num, dtype=torch.bool, device=CUDA).tril(), torch.tensor([300]).to(CUDA)

    def attend(query, key, value, ancestors, lengths, column):
        cached = find_cached_keys(ancestors, lengths, capacity=512, heads=(32, 8), window=window)
        return attend_cached(query, key, value, cached, scale=0.25, sinks=column if sinks else None)

    key, value = torch.randn(2, 1, 8, 512, 16, device=CUDA)
    inputs = [torch.randn(1, 32, num, 16, device=CUDA), key, value, ancestors, lengths, torch.randn(32, device=CUDA)]
    with generate_code() as functions:
        Graph(attend, inputs)
    assert [function.refusal for function in functions] == [""]


def test_a_refusal_is_seen(device, monkeypatch):
    def refuse(lowering, *inputs):
        raise ValueError("loops of this kind")

    monkeypatch.setattr(GraphLowering, "run", refuse)
    with generate_code() as functions:
        Graph(torch.square, [torch.ones(3, device=CUDA)])
    assert ["loops of this kind" in function.refusal for function in functions] == [True]
