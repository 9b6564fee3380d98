"""Attention modules of transformers against one kernel between their products and attention."""

import re

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code

from specdec.core import compile, fast, masks, rules
from specdec.core.compile import Graph, Runner, join_products
from specdec.core.sampling import Sampling
from specdec.core.varlen import Segments
from specdec.core.write_keys import write_keys
from specdec.target import fused_attention
from specdec.target.fused_attention import forward_fused
from specdec.target.model import Target
from specdec.target.structure import find_experts
from specdec.target.verifier import Verifier
from tests.support.compiled import CHAIN, TREE, decoder_of, prompts_of
from tests.support.decoding import random_trees
from tests.support.drafters import make_drafter
from tests.support.families import FAMILIES, make
from tests.support.targets import make_target

# By family the largest relative error: norms of transformers, and products of its experts, are in float32
FUSED = dict.fromkeys(("llama", "llama-biases", "qwen2", "qwen2-window", "mistral", "mistral-window"), 1e-12)
FUSED |= dict.fromkeys(("qwen3", "qwen3-window", "gpt_oss", "qwen3_moe", "mixtral"), 1e-5)
LEFT_OUT = {"glm": r"differs from the reference by \d+\.\d+% \(GlmAttention\)", "cohere2": "Cohere2Attention"}
# Queries scaled by their position, layers without positions, norms over all heads, norms that add one to their weights
UNKNOWN = ("ministral3", "smollm3", "olmo2", "gemma3_text", "gpt2")


def make_fusible(name: str) -> Target:
    """A tiny target of a family, in float64 unless it has experts"""
    (family,) = (family for family in FAMILIES if str(family) == name)
    model = make(family, "specdec")
    has_experts = find_experts(model.config.to_dict()) is not None
    return Target(model if has_experts else model.double(), name=name)


def list_fused(target: Target) -> list[nn.Module]:
    forwards = ((module, vars(module).get("forward")) for module in target.model.modules())
    return [module for module, forward in forwards if getattr(forward, "__func__", None) is forward_fused]


def read_trees(target: Target) -> list[torch.Tensor]:
    """Final states, K and V of a pass over a tree in each of two rows, whose texts differ in length."""
    generator = torch.Generator().manual_seed(0)
    tree = random_trees(generator, 2, 5, target.vocab_size)
    text = torch.randint(0, target.vocab_size, (2, 11), generator=generator)
    cache = target.cache(2)
    with torch.no_grad():
        cache.reserve(11)
        mask = masks.pending_mask(masks.causal_mask(11, target.device), cache.lengths, cache.visible)
        target.read(text, (), positions=cache.slots, mask=mask, cache=cache)
        cache.commit(torch.tensor([11, 6]), [11, 6])
        verify = Verifier(target, sampling=Sampling(), rule="token", runner=Runner(), hidden_states=())
        return [verify(tree, cache, rules.Draws(None)).output.final, *cache.keys_and_values]


@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("joins", [False, True], ids=["three products", "one product"])
def test_states_and_entries_are_those_of_the_module(name, joins):
    target = make_fusible(name)
    with fast.force_paths("cache"):
        references = read_trees(target)
        assert not list_fused(target)
    if joins:
        join_products(target.model)
    with fast.force_paths("cache", "write"):
        results = read_trees(target)
    assert len(list_fused(target)) == target.num_layers
    for result, reference in zip(results, references, strict=True):
        assert float((result - reference).norm()) <= FUSED[name] * float(reference.norm())


@pytest.mark.parametrize("name", LEFT_OUT)
def test_a_family_that_differs_is_left_out_by_a_sentence(name):
    target = make_fusible(name)
    with fast.force_paths("cache", "write"):
        with pytest.warns(UserWarning, match=f"write is left out: {name} .*{LEFT_OUT[name]}"):
            results = read_trees(target)
        assert not list_fused(target)
    with fast.force_paths("cache"):
        for result, reference in zip(results, read_trees(make_fusible(name)), strict=True):
            assert torch.equal(result, reference)


@pytest.mark.parametrize("name", UNKNOWN)
@pytest.mark.filterwarnings("error:The fast path")
def test_other_attention_is_not_tried(name):
    target = make_fusible(name)
    assert not any(map(fused_attention.is_fusible, target.model.modules()))
    with fast.force_paths("cache", "write"):
        target.cache(1)


def test_a_norm_with_another_epsilon_is_found(monkeypatch):
    """The comparison of a pass finds what recognition takes for the same."""
    target = make_fusible("qwen3")
    for layer in target.layers:
        norm = layer.self_attn.k_norm
        monkeypatch.setattr(norm, "forward", lambda x, norm=norm: type(norm).forward(norm, x) * 1.01)
    with fast.force_paths("cache", "write"), pytest.warns(UserWarning, match=r"write is left out: .* by \d\.\d+%"):
        target.cache(1)
    assert not list_fused(target)


@pytest.mark.parametrize(
    "head, shape, compiled, joins, temperature",
    [
        (None, CHAIN, False, False, 1.0),
        ("eagle3", CHAIN, False, True, 1.0),
        ("eagle", TREE, False, False, 0.0),
        (None, CHAIN, True, True, 0.0),
        pytest.param("eagle", TREE, True, False, 0.0, marks=pytest.mark.full),
        pytest.param("eagle3", CHAIN, True, True, 0.0, marks=pytest.mark.full),
    ],
)
def test_decoding_gives_the_same_answers(head, shape, compiled, joins, temperature, traced):
    """Compiled: as traced. With joined weights each layer has a part of its memory in place of three weights."""
    target = make_target(6, num_layers=3)
    drafter = head and make_drafter(target, head, True)
    prompts = prompts_of(target, 0)
    plain = decoder_of(target, drafter, shape, compiled=False, temperature=temperature)
    expected = plain.generate(prompts, 24, generator=torch.Generator().manual_seed(1))
    if joins:
        join_products(target.model)
    with fast.force_paths("cache", "write"):
        target.__dict__.pop("reads_length")
        fused = decoder_of(target, drafter, shape, compiled=compiled, temperature=temperature)
        answer = fused.generate(prompts, 24, generator=torch.Generator().manual_seed(1))
    assert len(list_fused(target)) == 3 and bool(fused.runner.compiled) == compiled
    assert answer.tokens == expected.tokens and answer.accepted == expected.accepted


@pytest.mark.full
def test_inductor_writes_k_and_v_in_place():
    """K and V of all layers are parts of one memory. Code that copies one of them copies all of it."""
    shapes = [(2, 5, 4 * 8), (2, 5, 2 * 8), (2, 5, 2 * 8), (2, 5, 8), (2, 5, 8)]
    inputs = [torch.randn(shape) for shape in shapes]
    slots = torch.tensor([[3], [9]]) + torch.arange(5)
    memory = torch.randn(6, 2, 2, 32, 8)

    def write(q, k, v, cos, sin, keys, values, slots):
        return write_keys([q, k, v], [cos, sin], keys, values, slots, [], [], 0.0) + keys[:, :1, :5] + values[:, :1, :5]

    expected_memory = memory.clone()
    expected = write(*inputs, *expected_memory[2:4], slots)
    with config.patch(fx_graph_cache=False):
        graph, (code,) = run_and_get_code(Graph, write, [*inputs, *memory[2:4], slots])
    assert "write_keys" in code and not re.search(r"clone|(?<!_to)_copy", code)
    result = graph.bind(graph.captured, {})(*inputs, *memory[2:4], slots)
    torch.testing.assert_close(result, expected)
    assert torch.equal(memory, expected_memory)


def test_layers_of_a_training_pass_stay_one_compiled_function(monkeypatch):
    """Before and after their attention is fused for decoding. A function for each layer would pass torch's limit."""
    target, graphs = make_fusible("llama"), []

    def record_graph(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(compile, "BACKEND", record_graph)
    compile._compile_block.cache_clear()
    torch._dynamo.reset()
    tokens = torch.arange(1, 13)[None]
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    segments = Segments.from_counts([5, 7])
    with fast.force_paths("varlen", "blocks", "cache", "write"):
        before = target.read(tokens, (), positions=positions, segments=segments).final
        num_before = len(graphs)
        target.cache(1)
        after = target.read(tokens, (), positions=positions, segments=segments).final
    compile._compile_block.cache_clear()
    assert list_fused(target) and num_before == 1 and len(graphs) <= 2 and len(target.layers) > 1
    torch.testing.assert_close(after, before)
