"""Compiled decoding gives the answers of uncompiled decoding, whatever changes from round to round.

Inductor takes seconds for each function, so most tests run the traced graph in place of Inductor's result: the errors
to expect are in the trace (a value that was read once and then stays constant). One test runs Inductor itself.
"""

import time

import pytest
import torch
import torch._inductor
from torch import nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from specdec.core import compile, masks
from specdec.core.compile import Graph, Runner, join_products
from specdec.core.generation import STAGES
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.target import attention
from specdec.target.compiled import CompiledTarget
from specdec.target.model import Target
from tests.support.compiled import KINDS, TREE, check_same, decoder_of, prompts_of
from tests.support.decoding import chain_of, random_tokens
from tests.support.drafters import make_drafter
from tests.support.targets import make_target, scale_forward

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def shallow() -> Target:
    return make_target(6, num_layers=3)


@pytest.fixture(scope="module")
def runner() -> Runner:
    """A runner that many tests of the shallow target share."""
    return Runner(True)


@pytest.fixture
def graphs(monkeypatch) -> list[Graph]:
    """All graphs that are built during the test."""
    built: list[Graph] = []

    class RecordedGraph(Graph):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            built.append(self)

    monkeypatch.setattr(compile, "Graph", RecordedGraph)
    return built


def known_shapes(decoder: Decoder) -> set:
    return {*decoder.runner.compiled, *(decoder.proposer.runner.compiled if decoder.proposer else ())}


SETTINGS = {
    "plain": {},
    "chain": {},
    "tree": {"shape": TREE},
    "sampled tree": {"shape": TREE, "children": "distinct", "temperature": 1.0, "rule": "block"},
}


CASES = [("plain", None), ("chain", "path"), ("chain", "depth"), ("sampled tree", "path")]


@pytest.mark.parametrize("how, attends", CASES + [("tree", kind) for kind in KINDS])
def test_compiled_decoding_equals_uncompiled_decoding(shallow, runner, traced, how, attends):
    """Batches with different caches: the second reuses shapes of the first; in a third, the caches of trees grow."""
    head, arguments = KINDS.get(attends, (None, {}))
    drafter = head and make_drafter(shallow, head, True, arguments)
    assert drafter is None or drafter.context_kind == attends
    compiled = decoder_of(shallow, drafter, compiled=True, runner=runner, **SETTINGS[how])
    plain = decoder_of(shallow, drafter, compiled=False, **SETTINGS[how])
    check_same(compiled, plain, prompts_of(shallow, 0), 16)
    shapes = known_shapes(compiled)
    check_same(compiled, plain, prompts_of(shallow, 7, (12, 3)), 16)
    assert known_shapes(compiled) == shapes
    if how == "tree":
        check_same(compiled, plain, prompts_of(shallow, 3, (248, 9)), 16)
    assert not known_shapes(plain)


def test_later_rounds_reuse_known_shapes(shallow, traced):
    """All shapes are known after two rounds; when the caches grow, new ones are added once."""
    decoder = decoder_of(shallow, make_drafter(shallow, "eagle"), compiled=True)
    counts, visible = [], []
    for _ in decoder.stream(prompts_of(shallow, 0, (220, 20)), 60):
        counts.append(len(known_shapes(decoder)))
        visible.append(decoder.proposer.cache.visible)
    grown = visible.index(512)
    assert counts[0] == 0 and set(counts[2 : grown - 1]) == {7} and set(counts[grown + 3 :]) == {11}
    assert 5 < grown < len(counts) - 5


def test_sampled_trees_that_grow_wider_than_their_width(shallow, traced):
    """The drafter's cache has room for every level: at each length its drafts equal those of a larger cache."""
    shape = TreeShape(depth=4, width=2, nodes=30)  # 2 + 4 + 8 inner nodes enter the cache
    drafter = make_drafter(shallow, "eagle")
    compiled, plain, roomy = (
        HeadProposer(drafter, shape, children="distinct", compile=flag) for flag in (True, False, False)
    )
    for num in (238, 244, 250):
        tokens, trees = torch.tensor([random_tokens(num, num + 5, 6)]), []
        features = torch.randn(1, num + 4, 32, generator=torch.Generator().manual_seed(num), dtype=torch.float64)
        for proposer in (compiled, plain, roomy):
            proposer.begin(tokens[:, :num], torch.tensor([num]))
            if proposer is roomy:
                proposer.cache.make_room(400)
            for first, last in ((1, num), (num, num + 5)):
                count, states = last - first, features[:, first - 1 : last - 1]
                proposer.commit(tokens[:, first:last], states, torch.tensor([count]), [count])
                tree = proposer.propose(Sampling(1.0), torch.Generator().manual_seed(0))
            trees.append(tree)
        for tree in trees[:2]:
            assert torch.equal(tree.tokens, trees[2].tokens) and tree.tokens.shape == (1, 31)
            torch.testing.assert_close(tree.probs, trees[2].probs)


def test_decoders_share_a_runner(shallow, traced):
    runner, prompts = Runner(True), prompts_of(shallow, 0)
    answers = decoder_of(shallow, compiled=False).generate(prompts, 20).tokens
    for head in ("eagle", "draft", "medusa"):  # heads that read different layers
        proposer = HeadProposer(make_drafter(shallow, head), chain_of(2))
        decoder = Decoder(shallow, proposer, sampling=Sampling(), stop=set(), runner=runner)
        assert decoder.generate(prompts, 20).tokens == answers
        assert len(runner.compiled) == 5
    assert not Runner().compiled and Runner()("anything", torch.add, torch.ones(1), torch.ones(1)).item() == 2


def test_the_time_of_compiling_is_counted_separately(shallow, monkeypatch):
    def slow(module, inputs, options):
        time.sleep(0.1)
        return module

    monkeypatch.setattr(torch._inductor, "compile", slow)
    decoder = decoder_of(shallow, make_drafter(shallow, "eagle"), chain_of(2), compiled=True)
    start = time.perf_counter()
    generation = decoder.generate(prompts_of(shallow, 0), 12)
    wall = time.perf_counter() - start
    assert len(known_shapes(decoder)) == 7 and generation.compile_seconds > 0.7
    assert generation.compile_seconds == pytest.approx(decoder.runner.seconds + decoder.proposer.compile_seconds)
    assert generation.seconds + generation.prefill_seconds < wall - 0.7
    assert set(generation.stages) == set(STAGES)
    assert sum(generation.stages.values()) == pytest.approx(generation.seconds, abs=1e-3)
    assert decoder.generate(prompts_of(shallow, 1), 12).compile_seconds == 0


# Graphs


def test_products_of_one_tensor_are_packed(traced):
    first, second, third = (nn.Linear(6, width, bias=bias) for width, bias in ((5, True), (3, False), (4, True)))
    other = nn.Linear(6, 2)
    layers = {"first": first, "second": second, "third": third, "other": other}
    names = {layer.weight.data_ptr(): name for name, layer in layers.items()}

    def function(x, y):
        return first(x) + 1, second(x), third(x.relu()), other(x) * y

    for shape in ((7, 6), (2, 3, 6)):
        x, y = torch.randn(shape), torch.randn(*shape[:-1], 2)
        graph = Graph(function, (x, y))
        captured = [names.get(tensor.data_ptr()) for tensor in graph.captured]
        joined, single = (set(map(captured.__getitem__, indices)) for indices in graph.weight_indices)
        assert joined == {"first", "second", "other"} and single == {"third"}
        x, y = torch.randn(shape), torch.randn(*shape[:-1], 2)
        for value, reference in zip(graph.bind(graph.captured, {})(x, y), function(x, y), strict=True):
            torch.testing.assert_close(value, reference)


@pytest.mark.parametrize("head, arguments", [*KINDS.values(), ("dspark", {}), ("hydra", {}), ("eagle3", {})])
def test_no_weight_is_in_a_batched_product(shallow, traced, graphs, head, arguments):
    """Inductor's batched product of a weight is many times slower than the packed one."""
    drafter = make_drafter(shallow, head, arguments=arguments)
    shape = TreeShape(depth=min(3, drafter.depth or 3), width=3, nodes=6)
    decoder_of(shallow, drafter, shape, compiled=True).generate(prompts_of(shallow, 3, (6,)), 12)
    assert graphs
    batched = []
    for graph in graphs:
        batched += graph.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default)
    for product in batched:
        source = product.args[1]
        while len(source.all_input_nodes) == 1:  # expanded, viewed or transposed
            (source,) = source.all_input_nodes
        assert not source.name.startswith("captured"), product


def tiny(num_layers: int = 3) -> Target:
    """A small target in float32, with biases and tied embeddings."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"vocab_size": 19, "num_hidden_layers": num_layers, "max_position_embeddings": 512}
    options = {"tie_word_embeddings": True, "attn_implementation": attention.IMPLEMENTATION, "initializer_range": 0.4}
    model = Qwen2ForCausalLM(Qwen2Config(**sizes, **options, bos_token_id=None, eos_token_id=None))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter)
    return Target(model, name="tiny")


def read(target: Target, runner: Runner, num: int = 3):
    """Reads two rows of `num` tokens after a committed prompt. Returns features, logits and the cache's contents."""
    cache = target.cache(2)
    prompt = torch.tensor(prompts_of(target, 0, (6, 6)))
    cache.reserve(6)
    positions = torch.arange(6).expand(2, -1)
    mask = masks.pending_mask(masks.causal_mask(6, None), cache.lengths, cache.visible)
    target.read(prompt, (), positions=positions, mask=mask, cache=cache)
    cache.commit(torch.tensor([6, 4]), [6, 4])
    cache.reserve(num)
    positions = cache.lengths[:, None] + torch.arange(num)
    mask = masks.pending_mask(masks.causal_mask(num, None), cache.lengths, cache.visible)
    tokens = torch.tensor(prompts_of(target, 5, (num, num)))
    states = (1, target.num_layers)
    output = CompiledTarget(target, runner).read(tokens, states, positions=positions, mask=mask, cache=cache)
    return output.features, target.logits(output.final), torch.stack(cache.keys_and_values)


def check_close(values, references) -> None:
    for value, reference in zip(values, references, strict=True):
        assert (value - reference).abs().max() < 1e-4 * reference.abs().max()


@torch.inference_mode()
def test_decoding_with_inductor_equals_uncompiled_decoding(graphs, compiler):
    """Runs Inductor in float32: C++, oneDNN's packed weights, in-place changes of the caches."""
    target = tiny()
    drafter = make_drafter(target, "eagle").float()
    compiled, plain = (decoder_of(target, drafter, chain_of(1), compiled=flag) for flag in (True, False))
    prompts = prompts_of(target, 0)
    generation, reference = (decoder.generate(prompts, 14) for decoder in (compiled, plain))
    assert generation.tokens == reference.tokens and generation.accepted == reference.accepted
    assert generation.compile_seconds > generation.seconds and reference.compile_seconds == 0
    assert len(graphs) == 6 and any(len(places) == 3 for graph in graphs for places in graph.weight_indices)
    check_close(read(target, compiled.runner, 2), read(target, Runner(), 2))
    assert len(graphs) == 6 and len(compiled.runner.packed) >= 4 * target.num_layers
    check_same(compiled, plain, prompts_of(target, 5), 14)


# Refusals


def test_a_model_that_does_more_than_its_layers_is_refused(traced, monkeypatch):
    target = tiny()
    scale_forward(target, monkeypatch)
    sentence = r"^tiny does more than its layers one after the other: set compile=false\.$"
    with pytest.raises(ValueError, match=sentence):
        decoder_of(target, compiled=True).generate(prompts_of(target, 0), 4)
    plain = decoder_of(target, compiled=False).generate(prompts_of(target, 0), 4)
    runner = Runner(None)
    runner.compile, runner.undecided = True, False  # as if this had been measured to be faster
    with pytest.warns(UserWarning, match="without compiling: tiny does more than its layers") as told:
        found = decoder_of(target, compiled=None, runner=runner).generate(prompts_of(target, 0), 4)
    assert found.tokens == plain.tokens
    assert len(told) == 1 and not runner.compile


@torch.inference_mode()
def test_layers_that_give_other_values_compiled_are_refused(traced, monkeypatch):
    """A layer is compared with itself on the same input: the roundings of many layers together may be larger."""
    target, bind = tiny(num_layers=16), Graph.bind
    target.decoder.embed_tokens.weight *= 50  # as in a trained model, a layer changes its input a little

    def rounded(self, *arguments):
        bound = bind(self, *arguments)

        def run(*inputs):
            out = bound(*inputs)
            return out + factor * out.std() * torch.randn_like(out) if len(inputs) > 6 else out

        return run

    monkeypatch.setattr(Graph, "bind", rounded)
    factor = 0.03
    compiled, plain = read(target, Runner(True)), read(target, Runner())
    assert (compiled[1] - plain[1]).norm() > 0.07 * plain[1].norm()
    factor = 0.2
    with pytest.raises(ValueError, match=r"^tiny gives other values compiled: set compile=false\.$"):
        read(target, Runner(True))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("change", ["activation", "parameter", "width"])
def test_layers_that_differ_in_more_than_tensors_are_refused(traced, layer, change):
    target = tiny(num_layers=2)
    mlp = target.decoder.layers[layer].mlp
    if change == "activation":  # not seen in the tensors of a layer
        mlp.act_fn = nn.Tanh()
    elif change == "parameter":
        mlp.up_proj.bias = nn.Parameter(torch.full((48,), 3.0))
    else:
        mlp.up_proj, mlp.gate_proj = nn.Linear(32, 40), nn.Linear(32, 40)
        mlp.down_proj = nn.Linear(40, 32)
    with torch.inference_mode():
        if change == "activation":
            with pytest.raises(ValueError, match=r"set compile=false\.$"):
                read(target, Runner(True))
        else:
            torch.testing.assert_close(read(target, Runner(True))[1], read(target, Runner())[1])


def test_functions_that_cannot_be_traced_or_compiled_are_refused(traced, monkeypatch):
    def undecided(x):
        return x if x.sum() > 0 else -x

    def missing(module, inputs, options):
        raise RuntimeError("no C++ compiler\nat great length")

    with pytest.raises(ValueError, match=r"^undecided could not be compiled \(.*\)\. .* compile=false decodes"):
        Runner(True)("undecided", undecided, torch.ones(2))
    monkeypatch.setattr(torch._inductor, "compile", missing)
    with pytest.raises(ValueError, match=r"^sum could not be compiled \(no C\+\+ compiler\)\. Inductor needs a C\+\+"):
        Runner(True)("sum", torch.sum, torch.ones(2))
    with pytest.raises(ValueError, match=r"compile=false decodes without it\.$"):
        decoder_of(make_target(6, num_layers=2), compiled=True).generate([[1]], 4)


def test_joined_weights_are_one_product_without_a_copy(traced):
    """As on a GPU: in float64 nothing is packed."""
    plain, target = make_target(6, num_layers=3), make_target(6, num_layers=3)
    join_products(target.model)
    for name, value in target.model.state_dict().items():
        assert value.equal(plain.model.state_dict()[name])
    attention = target.layers[0].self_attn
    graph = Graph(
        lambda x: tuple(part(x) for part in (attention.q_proj, attention.k_proj, attention.v_proj)),
        [torch.ones(3, 32).double()],
    )
    products = [node for node in graph.graph.nodes if node.target == torch.ops.aten.mm.default]
    assert len(products) == 1 and [len(places) for places in graph.weight_indices] == [3]
    compiled = decoder_of(target, make_drafter(target, "eagle"), compiled=True)
    check_same(compiled, decoder_of(plain, make_drafter(plain, "eagle"), compiled=False), prompts_of(target, 0), 16)
    assert not compiled.runner.packed


def count_products(graph: Graph) -> int:
    return sum(len(graph.graph.find_nodes(op="call_function", target=operator)) for operator in compile.LINEAR)


@pytest.mark.parametrize("head, counts", [("eagle3", (8, 5)), ("dflash", (20, 14))])
def test_a_joined_head_needs_three_products_fewer_for_each_layer(traced, graphs, head, counts):
    """A layer of EAGLE-3 has four in place of seven; its LM head is one more. DFlash has two layers."""
    target, answers = make_target(6, num_layers=3), []
    for count, joins in zip(counts, (False, True), strict=True):
        drafter = make_drafter(target, head).frozen_copy()
        if joins:
            join_products(drafter)
        proposer = HeadProposer(drafter, chain_of(3), compile=True)
        graphs.clear()
        decoder = Decoder(target, proposer, sampling=Sampling(), stop=set())
        answers.append(decoder.generate(prompts_of(target, 0), 16).tokens)
        assert min(map(count_products, graphs)) == count
        assert not proposer.runner.packed
    assert answers[0] == answers[1]
