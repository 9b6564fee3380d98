"""Budgets of captures and compilations, with stand-ins of CUDA graphs on a CPU."""

import pytest
import torch

from specdec.core import compile, fast
from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.drafting import Drafting
from specdec.measuring.measure import MeasureSettings, Method, measure
from specdec.proposers.auto import AutoProposer
from specdec.proposers.costs import make_costs
from specdec.target.model import Target
from specdec.text.conversations import Prompt
from tests.support.decoding import random_tokens
from tests.support.drafters import make_drafter
from tests.support.targets import make_target

NUM_PROMPTS = 64
MAX_CAPTURES, MAX_COMPILATIONS = 3, 5  # of one number of rows and one shape of drafts
CHAIN, TREE = TreeShape(4, 1, 4), TreeShape(3, 2, 6)
FORMS = [("eagle3", CHAIN), ("eagle", TREE)]


@pytest.fixture
def target() -> Target:
    return make_target(6, num_layers=3)


@pytest.fixture
def captures(monkeypatch) -> list[object]:
    """What was captured so far. A graph is its function."""
    captures: list[object] = []

    def capture_graph(function, inputs, pool):
        captures.append([tensor.shape for tensor in inputs])
        return function

    def capture_step(function, device, pool, *, restore):
        captures.append("a whole round")
        return function

    monkeypatch.setattr(compile, "capture_graph", capture_graph)
    monkeypatch.setattr(compile, "capture_step", capture_step)
    return captures


def make_prompts(num: int) -> list[Prompt]:
    """Prompts of a length of their own each"""
    return [Prompt(str(number), "text", random_tokens(number, 3 + 5 * number, 6)) for number in range(num)]


def decode_all(target: Target, proposer, drafting: Drafting, **options) -> None:
    method, prompts = Method("drafted", target, proposer, drafting), make_prompts(NUM_PROMPTS)
    groups = list(measure([method], prompts, MeasureSettings(Sampling(), set(), 12), **options))
    assert len(groups) == NUM_PROMPTS


def make_drafting(shape: TreeShape, **how) -> Drafting:
    return Drafting(shape.depth, shape.width, shape.nodes, **how)


@pytest.mark.parametrize("head, shape", FORMS)
def test_a_few_captures_serve_prompts_of_all_lengths(target, captures, head, shape):
    """A plain round, and a round with drafts. A twin with other weights needs no further ones."""
    drafting, decoders = make_drafting(shape, compile=False, cuda_graphs=True), {}
    with fast.force_paths("cache"):
        twin = make_drafter(target, head, True)
        proposer = drafting.proposer(twin)
        for seed in range(2):
            torch.manual_seed(seed)
            for parameter in twin.parameters():
                parameter.data.normal_(std=0.2)
            decode_all(target, proposer, drafting, earlier=decoders)
    assert captures == 2 * ["a whole round"]


def test_auto_captures_each_number_of_nodes_once(target, captures):
    """As a chain and as a tree; and a first step, a further step, and the choice of the likeliest tokens."""
    drafting = make_drafting(CHAIN, compile=False, cuda_graphs=True)
    with fast.force_paths("cache"):
        ratios = {num: 1 + num / 50 for num in (1, 2, 4, 6)}
        costs = make_costs(ratios, plain=1.0, absorb=1e-3, step=1e-3)
        head = drafting.proposer(make_drafter(target, "eagle3", True))
        decode_all(target, AutoProposer(target, members=[head], costs=costs), drafting)
    assert len(captures) <= 2 * len(ratios) + MAX_CAPTURES
    heads = [capture for capture in captures if capture != "a whole round" and len(capture) in (1, 4, 6)]
    assert len(heads) == MAX_CAPTURES


@pytest.mark.parametrize("head, shape", FORMS)
def test_a_few_compiled_functions_serve_prompts_of_all_lengths(target, captures, monkeypatch, head, shape):
    """The parts of a pass for each number of nodes; a head's first and further steps, and a tree's growth."""
    compiled: list[object] = []

    class Traced:
        """A stand-in of compiled code"""

        def __init__(self, name, function):
            compiled.append(name)
            self.captured, self.function = [], function

        def bind(self, captured, packed):
            return self.function

    def build(runner, name, function, inputs):
        return Traced(name, function)

    def build_layers(runner, name, function, modules, inputs):
        compiled.append(name)
        return [lambda *tensors, module=module: function(module, *tensors) for module in modules]

    monkeypatch.setattr(Runner, "_build", build)
    monkeypatch.setattr(Runner, "_build_layers", build_layers)
    drafting = make_drafting(shape, compile=True, cuda_graphs=True)
    with fast.force_paths("cache"):
        decode_all(target, drafting.proposer(make_drafter(target, head, True)), drafting)
    names = [name if isinstance(name, str) else name[0] for name in compiled]
    passes = [name for name in names if name.startswith("the target") or name in ("place", "greedy")]
    assert len(passes) <= 2 * MAX_COMPILATIONS  # of one node, and of a tree
    growth = {"absorb": 1, "step": 1} | ({"widen": 3, "rank": 1} if shape == TREE else {})
    assert {name: names.count(name) for name in growth} == growth
