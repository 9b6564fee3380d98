"""Tests of decoding with CUDA graphs, with stand-ins for them on a CPU."""

import pytest
import torch
import torch._inductor
from torch.fx.experimental.proxy_tensor import make_fx

from specdec import compile, cuda_graph
from specdec.compile import Runner
from specdec.target import Target
from tests.compiled import CHAIN, TREE, check_same, decoder_of, prompts_of
from tests.support import make_drafter, make_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def shallow() -> Target:
    return make_target(6, num_layers=3)


def record(function, inputs):
    """Stands in for cuda_graph.capture on a CPU, with the same rules: whatever `function` takes from the host is as it was
    now, and tensors are read and written where they are in memory now."""
    own = [value.clone() for value in inputs]
    for _ in range(cuda_graph.WARM_UP):
        function(*own)
    graph = make_fx(lambda *inputs: function(*inputs))(*own)
    outputs = graph(*own)

    def replay(*given):
        for place, value in zip(own, given, strict=True):
            place.copy_(value)
        for place, value in zip(outputs, graph(*own), strict=True):
            place.copy_(value)
        return tuple(value.clone() for value in outputs)

    return replay


@pytest.mark.parametrize(
    "head, shape, compiled", [(None, CHAIN, False), ("eagle", TREE, True), ("medusa", CHAIN, False)]
)
def test_passes_from_graphs_give_the_same_answers(shallow, traced, monkeypatch, head, shape, compiled):
    """Batches of the same shape with caches at other addresses, and caches that grow while they are used."""
    captured = []
    monkeypatch.setattr(cuda_graph, "capture", lambda *arguments: captured.append(1) or record(*arguments))
    drafter = head and make_drafter(shallow, head, True)
    runner = Runner(compiled, cuda_graphs=True)
    graphed = decoder_of(shallow, drafter, shape, compiled=compiled, runner=runner)
    plain = decoder_of(shallow, drafter, shape, compiled=False)
    for seed, lengths in enumerate([(5, 9), (7, 3), (250, 9)]):
        check_same(graphed, plain, prompts_of(shallow, seed, lengths), 16)
    assert 4 >= len(captured) == len(runner.graphs) >= 2 and runner.cuda_graphs


def test_a_graph_for_each_cache_and_not_too_many(monkeypatch):
    captured = []
    monkeypatch.setattr(cuda_graph, "capture", lambda function, inputs: captured.append(function) or function)
    monkeypatch.setattr(compile, "MOST_GRAPHS", 2)
    runner, caches = Runner(cuda_graphs=True), [torch.zeros(2), torch.ones(2), torch.ones(2)]
    for cache in (*caches, caches[2], caches[0]):
        (result,) = runner.whole("sum", lambda x, cache=cache: (x + cache,), [torch.ones(2)], [cache])
        assert result.equal(1 + cache)
    assert len(captured) == 4 and len(runner.graphs) == 2 and runner.seconds > 0


def test_without_a_gpu_passes_run_as_before_and_one_warning_says_so(shallow):
    graphed = decoder_of(shallow, compiled=False, runner=Runner(cuda_graphs=True))
    with pytest.warns(UserWarning, match="No CUDA graphs.*CUDA device"):
        generation = graphed.generate(prompts_of(shallow, 0), 8)
    assert generation.tokens == decoder_of(shallow, compiled=False).generate(prompts_of(shallow, 0), 8).tokens
    assert not graphed.runner.graphs and not graphed.runner.cuda_graphs
