"""Tests of decoding with CUDA graphs, with stand-ins for them on a CPU."""

import contextlib
import functools
import itertools

import pytest
import torch
import torch._inductor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from specdec.core import compile, fast, rules
from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.core.tree import Nodes, make_tree
from specdec.target.model import Target
from specdec.target.verifier import Verifier
from tests.support.compiled import CHAIN, TREE, check_same, decoder_of, prompts_of
from tests.support.drafters import make_drafter
from tests.support.families import find_family
from tests.support.targets import make_target
from tests.target_table import make_family_target

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def shallow() -> Target:
    return make_target(6, num_layers=3)


def find_address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def list_addresses(*modules) -> set[int]:
    """Where parameters and buffers are in memory"""
    parameters = itertools.chain.from_iterable((*module.parameters(), *module.buffers()) for module in modules)
    return set(map(find_address, parameters))


def find_foreign(graphs: list[list[torch.Tensor]], addresses: set[int]) -> list[torch.Tensor]:
    """Captured tensors that are elsewhere in memory"""
    captured = itertools.chain.from_iterable(graphs)
    return [tensor for tensor in captured if not addresses & {find_address(tensor), tensor.data_ptr()}]


def record(function, inputs, pool=None, *, captured=None):
    """Stands in for capture_graph on a CPU: values from the host are fixed, and tensors stay in place in memory."""
    static_inputs = [value.clone() for value in inputs]
    for _ in range(compile.WARM_UP_CALLS):
        function(*static_inputs)
    graph = make_fx(lambda *inputs: function(*inputs))(*static_inputs)
    if captured is not None:
        captured.append([getattr(graph, node.target) for node in graph.graph.nodes if node.op == "get_attr"])
    outputs = graph(*static_inputs)

    def replay(*arguments):
        for place, value in zip(static_inputs, arguments, strict=True):
            place.copy_(value)
        for place, value in zip(outputs, graph(*static_inputs), strict=True):
            place.copy_(value)
        return tuple(value.clone() for value in outputs)

    return replay


PASSES = [(None, CHAIN, False, 0.0), ("eagle", TREE, True, 0.0), ("medusa", CHAIN, False, 0.0)]
PASSES += [(None, CHAIN, False, 1.0), ("eagle", TREE, False, 1.0), ("eagle3", CHAIN, False, 1.0)]


@pytest.mark.parametrize("head, shape, compiled, temperature", PASSES)
def test_passes_from_graphs_give_the_same_answers(shallow, traced, monkeypatch, head, shape, compiled, temperature):
    """Batches of the same shape with caches at other addresses, and caches that grow while they are used.

    Sampled with the rule that a GPU has: random numbers are inputs, the same ones as without graphs.
    """
    captured = []
    monkeypatch.setattr(compile, "capture_graph", functools.partial(record, captured=captured))
    drafter = head and make_drafter(shallow, head, True)
    runner = Runner(compiled, cuda_graphs=True)
    graphed = decoder_of(shallow, drafter, shape, compiled=compiled, temperature=temperature, runner=runner)
    plain = decoder_of(shallow, drafter, shape, compiled=False, temperature=temperature)
    if temperature:
        for decoder in (graphed, plain):
            decoder.verify.rule = rules.accept_tokens_at_once
    for seed, lengths in enumerate([(5, 9), (7, 3), (250, 9)]):
        check_same(graphed, plain, prompts_of(shallow, seed, lengths), 16)
    assert 4 >= len(captured) == len(runner.graphs) >= 2 and runner.cuda_graphs and graphed.verify.capturable
    locations = itertools.chain.from_iterable(key[1] for key in runner.graphs)  # of K and V
    assert not find_foreign(captured, list_addresses(shallow.model) | {address for address, *_ in locations})


# By what their caches hold: a K and V for each query head, fewer, one for all, K wider than V
CACHES = ["gpt2", "llama", "gpt_bigcode", "deepseek_v3"]
DRAFTS: list[Nodes] = [[(5, 0), (2, 1)], [(5, 0), (2, 0)]]  # a chain, a tree


@pytest.mark.parametrize("family", [*CACHES, "compiled"])
def test_a_captured_pass_reads_nothing_that_dies_with_its_answer(shallow, traced, monkeypatch, family):
    """Only weights, K and V, and its inputs. With later inputs it gives the results of a pass without a graph."""
    target = shallow if family == "compiled" else make_family_target(find_family(family))
    addresses, captured = list_addresses(target.model), []

    def capture(function, inputs, pool):
        replay = record(function, inputs, captured=captured)

        def compare(*arguments):
            results = replay(*arguments)
            torch.testing.assert_close(results, tuple(function(*arguments)))
            return results

        return compare

    monkeypatch.setattr(compile, "capture_graph", capture)
    runner, cache = Runner(family == "compiled", cuda_graphs=True), target.cache(2)
    verify = Verifier(target, sampling=Sampling(), rule="token", runner=runner, hidden_states=(1, 2))
    for drafts in DRAFTS:
        for counts in ([1, 3], [2, 1]):
            with torch.no_grad():
                verify(make_tree([3, 4], [drafts, drafts], target.device), cache, rules.Draws(None))
            cache.commit(torch.tensor(counts), counts)
        addresses |= {find_address(tensor) for tensor in cache.keys_and_values}
        assert not find_foreign([captured.pop()], addresses) and not captured and runner.cuda_graphs


class OnCuda(torch.Tensor):
    """Says that it is on a GPU; its values are here."""

    device = torch.device("cuda", 0)


class Tape(TorchDispatchMode):
    """Stands in for torch.cuda.CUDAGraph: what was done within the mode is done again, in the same places of one pool.

    Before, everything else in the pool becomes garbage: other graphs may have their intermediate results there."""

    def __init__(self):
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        known = {find_address(value) for value in tree_flatten((args, kwargs))[0] if isinstance(value, torch.Tensor)}
        new = [value for value in tree_flatten(out)[0] if find_address(value) not in known]
        self.calls.append((func, args, kwargs or {}, new))
        self.pool += new
        return out

    def replay(self):
        for value in self.pool:
            value.fill_(-77)
        for func, args, kwargs, new in self.calls:
            again = tree_flatten(func(*args, **kwargs))[0]
            for value, goal in zip(again if new else [], new, strict=True):
                goal.copy_(value)


@pytest.fixture
def pools(monkeypatch) -> list[list[torch.Tensor]]:
    """A stand-in for CUDA graphs in torch.cuda -> the pools that were made"""
    pools, nothing = list[list[torch.Tensor]](), contextlib.nullcontext()

    @contextlib.contextmanager
    def graph(tape, *, pool, stream, capture_error_mode):
        tape.pool, tape.stream = pool, stream
        with tape:
            yield

    class Stream:
        def wait_stream(self, stream):
            pass

    for name, stand_in in {
        "graph_pool_handle": lambda: pools.append([]) or pools[-1], "CUDAGraph": Tape, "graph": graph, "Stream": Stream,
        "current_stream": Stream, "stream": lambda stream: nothing, "device": lambda device: nothing,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, stand_in)
    return pools


def test_graphs_of_a_runner_have_one_pool_and_none_disturbs_another(pools, monkeypatch):
    """In any order, and when others were dropped."""
    monkeypatch.setattr(compile, "MAX_GRAPHS", 3)
    runner = Runner(cuda_graphs=True)

    memories, answers = {num: torch.zeros(num) for num in (3, 4, 5, 6)}, []

    def answer(num: int, last: float) -> None:
        def function(x):
            y = (x * 2).cumsum(0)
            memories[num].copy_(y)
            return y.exp(), y.sum()[None]

        given = torch.linspace(0, last, num)
        results = runner.run_whole("sums", function, [given.as_subclass(OnCuda)], [memories[num]])
        written = memories[num].clone()
        answers.append(([torch.Tensor(value) for value in results], list(function(given))))
        assert written.equal(memories[num])

    lasts = {3: [1.0, 3.0, 1.0], 4: [2.0, 0.5, 1.0], 5: [1.0, 2.0], 6: [1.0, 0.1]}
    for num in (3, 4, 3, 5, 4, 6, 5, 4, 6, 3):
        last = lasts[num].pop(0)
        answer(num, last)
    for found, wanted in answers:  # later replays have not overwritten them
        torch.testing.assert_close(found, wanted)
    assert len(pools) == 1 and len(runner.graphs) == 3 and runner.cuda_graphs and runner.seconds > 0
    del runner
    runner = Runner(cuda_graphs=True)
    answer(3, 1.0)
    torch.testing.assert_close(*answers[-1])
    assert len(pools) == 2  # that of the first runner may be gone with its graphs


def test_decoders_that_share_a_runner_share_no_graph_with_other_features(shallow, monkeypatch):
    monkeypatch.setattr(compile, "capture_graph", record)
    runner, cache = Runner(cuda_graphs=True), shallow.cache(1)
    for layers in ((1,), (0, 2), (1,)):
        verify = Verifier(shallow, sampling=Sampling(), rule="token", runner=runner, hidden_states=layers)
        with torch.no_grad():
            features = verify(make_tree([3], [DRAFTS[0]], "cpu"), cache, rules.Draws(None)).output.features
        cache.drop_pending()
        assert features.shape[-1] == len(layers) * shallow.width
    assert len(runner.graphs) == 2


def test_without_a_gpu_passes_run_as_before_and_one_warning_says_so(shallow):
    graphed = decoder_of(shallow, compiled=False, runner=Runner(cuda_graphs=True))
    with pytest.warns(UserWarning, match="No CUDA graphs.*CUDA device"):
        generation = graphed.generate(prompts_of(shallow, 0), 8)
    assert generation.tokens == decoder_of(shallow, compiled=False).generate(prompts_of(shallow, 0), 8).tokens
    assert not graphed.runner.graphs and not graphed.runner.cuda_graphs


ROUNDS = [
    ("eagle3", CHAIN, 0.0, ("cache",)), ("eagle3", CHAIN, 1.0, ()), ("eagle", TREE, 0.0, ("cache",)),
    ("eagle", TREE, 1.0, ("cache",)), ("mtp", CHAIN, 1.0, ("cache",)), ("peagle", CHAIN, 0.0, ("cache",)),
    ("medusa", CHAIN, 1.0, ()), ("dflash", CHAIN, 0.0, ("cache",)), ("dflash2", TREE, 0.0, ()),
    ("dflash2", TREE, 1.0, ("cache",)),
]  # fmt: skip


@pytest.mark.parametrize("head, shape, temperature, paths", ROUNDS)
def test_drafts_of_a_round_from_one_graph_give_the_same_answers(shallow, monkeypatch, head, shape, temperature, paths):
    """Its steps read nothing that dies with the answer, and answers of equal size share it."""
    drafter, captured = make_drafter(shallow, head, True), []
    addresses = list_addresses(shallow.model, drafter)
    addresses.add(find_address(drafter.goal_head[0]))  # the target's rows of the head's vocabulary

    monkeypatch.setattr(compile, "capture_graph", functools.partial(record, captured=captured))
    monkeypatch.delitem(shallow.__dict__, "reads_length", raising=False)
    with fast.force_paths(*paths):
        graphed = decoder_of(shallow, drafter, shape, compiled=False, temperature=temperature, cuda_graphs=True)
        plain = decoder_of(shallow, drafter, shape, compiled=False, temperature=temperature)
        runner = graphed.proposer.runner
        for seed, num in enumerate((16, 15, 12)):
            check_same(graphed, plain, prompts_of(shallow, seed, (5, 9)), num)
            addresses |= {find_address(tensor) for tensor in graphed.proposer.cache.keys_and_values}
            addresses.add(find_address(graphed.proposer.numbers))
            assert not find_foreign(captured, addresses)
            captured.clear()
            if seed == 0:
                known = len(runner.graphs)
        assert known >= 1 and runner.cuda_graphs
        kept = graphed.proposer.cache.query_heads  # then answers of equal size have their memory in the same place
        assert not kept or len(runner.graphs) <= known + 2  # other numbers of rows or of new tokens
    shallow.__dict__.pop("reads_length", None)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("fails", ["place", "the target's layer of", "greedy", "step", "rank"])
def test_what_cannot_be_compiled_ends_no_answer_that_did_not_ask_for_it(shallow, traced, monkeypatch, fails, captured):
    """Neither in the target's passes nor in the drafter's steps; where it was asked for, it is an error."""
    monkeypatch.setattr(compile, "capture_graph", record)
    monkeypatch.setattr(Runner, "_build", lambda self, name, *build_inputs: build_unless(name, *build_inputs))
    built = []

    def build_unless(name, function, inputs):
        first = name if isinstance(name, str) else name[0]
        built.append(first)
        if first.startswith(fails):
            raise ValueError(f"{first} could not be compiled (here).")
        return compile.Graph(function, inputs)

    drafter, prompts = make_drafter(shallow, "eagle", True), prompts_of(shallow, 0)
    answers = {}
    for compiling in (False, None, True):
        runner = Runner(compiling, cuda_graphs=captured)
        runner.compile = compiling is not False  # None: as if this had been measured to be faster
        runner.undecided = False
        decoder = decoder_of(shallow, drafter, TREE, compiled=compiling, runner=runner)
        if compiling:
            with pytest.raises(ValueError, match=r"could not be compiled \(here\)"):
                decoder.generate(prompts, 16)
        elif compiling is None:
            with pytest.warns(UserWarning, match="Passes go on without compiling: .* could not be compiled") as told:
                answers[compiling] = decoder.generate(prompts, 16)
            assert len(told) == 1
            assert not (runner.compile and decoder.proposer.runner.compile) and runner.cuda_graphs == captured
        else:
            answers[compiling] = decoder.generate(prompts, 16)
    assert built and answers[None].tokens == answers[False].tokens
    assert answers[None].accepted == answers[False].accepted
