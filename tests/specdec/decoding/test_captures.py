"""Budgets of captures and compilations, with a stand-in of capture_graph on a CPU."""

import pytest
import torch

from specdec.core import compile, fast
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.drafting import Drafting
from specdec.measuring.measure import MeasureSettings, Method, measure
from specdec.target.model import Target
from specdec.text.conversations import Prompt
from tests.support.decoding import random_tokens
from tests.support.drafters import make_drafter
from tests.support.targets import make_target

NUM_PROMPTS = 64
MAX_CAPTURES, MAX_COMPILATIONS = 3, 5  # of one number of rows and one shape of drafts


@pytest.fixture
def target() -> Target:
    return make_target(6, num_layers=3)


@pytest.fixture
def captures(monkeypatch) -> list[list[torch.Size]]:
    """Shapes of the inputs of each capture. A graph is its function."""
    captures = []

    def capture(function, inputs, pool):
        captures.append([tensor.shape for tensor in inputs])
        return function

    monkeypatch.setattr(compile, "capture_graph", capture)
    return captures


def make_prompts(num: int) -> list[Prompt]:
    """Prompts of other lengths each"""
    return [Prompt(str(number), "text", random_tokens(number, 3 + 5 * number, 6)) for number in range(num)]


@pytest.mark.parametrize("head, shape", [("eagle3", TreeShape(4, 1, 4)), ("eagle", TreeShape(3, 2, 6))])
def test_a_few_captures_serve_prompts_of_all_lengths(target, captures, head, shape):
    drafting = Drafting(shape.depth, shape.width, shape.nodes, compile=False, cuda_graphs=True)
    with fast.force_paths("cache"):
        proposer = drafting.proposer(make_drafter(target, head, True))
        method = Method("drafted", target, proposer, drafting)
        settings = MeasureSettings(Sampling(), set(), 12)
        groups = list(measure([method], make_prompts(NUM_PROMPTS), settings))
    assert len(groups) == NUM_PROMPTS and len(captures) <= MAX_CAPTURES
