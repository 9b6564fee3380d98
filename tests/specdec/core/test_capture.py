"""What decoding does on a GPU, on tensors of CUDA without values: captured rounds, and what is left outside of them."""

import itertools
import warnings
from collections.abc import Iterator

import pytest
import torch

from specdec.core import fast
from specdec.core.compile import GraphPool, Runner, capture_graph
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.batch import Batch, Request
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from tests.support.decoding import chain_of
from tests.support.drafters import HEADS, make_drafter
from tests.support.fake_cuda import CUDA, FakeCuda, RefusedInGraph
from tests.support.targets import make_target

SHAPES = {"chain": chain_of(2), "tree": TreeShape(depth=2, width=2, nodes=4)}


@pytest.fixture
def device() -> Iterator[FakeCuda]:
    with FakeCuda() as device, fast.force_paths("cache"):
        yield device


def start_batch(
    device: FakeCuda, head: str | None, shape: TreeShape, temperature: float, penalty: float = 1.0
) -> Batch:
    """A batch of one request behind a prompt of 300 tokens, with a target and a head on the device"""
    with device.paused():
        target = make_target(60, num_layers=3)
        drafter = head and make_drafter(target, head, True).frozen_copy()
    device.move_target(target, reads_length=True)
    proposer = drafter and HeadProposer(device.move_module(drafter), shape, cuda_graphs=True)
    runner = Runner(cuda_graphs=True)
    sampling = Sampling(temperature, repetition_penalty=penalty)
    batch = Decoder(target, proposer, sampling=sampling, stop=set(), runner=runner).batch()
    batch.admit([Request([1] * 300, 50)])
    return batch


ROUNDS = [(None, "chain"), *itertools.product(HEADS, SHAPES)]
# In the first tier
FIRST = {(None, "chain"), ("eagle3", "chain"), ("eagle3", "tree"), ("mtp", "chain"), ("dflash", "tree")}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "head, shape",
    [pytest.param(*case, marks=[] if case in FIRST else pytest.mark.full) for case in ROUNDS],
    ids=str,
)
def test_a_round_is_captured_and_waits_once(device, head, shape, temperature):
    """A wait, or a tensor of the CPU, in what is captured is an error."""
    batch = start_batch(device, head, SHAPES[shape], temperature)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # none says that passes are started one by one
        batch.run_round()
        batch.run_round()
        graphs = device.graphs
        device.waits.clear()
        batch.run_round()
    assert device.waits.total() == 1, device.waits
    assert device.graphs == graphs >= 1  # none is captured after the second round


@pytest.mark.parametrize(
    "head, shape, temperature, budget",
    [
        (None, chain_of(1), 0.0, 1),
        (None, chain_of(1), 1.0, 3),
        ("eagle3", chain_of(5), 0.0, 1),
        ("eagle3", chain_of(5), 1.0, 3),
        ("eagle3", TreeShape(6, 10, 63), 0.0, 1),
        ("eagle3", TreeShape(6, 10, 63), 1.0, 3),
    ],
)
def test_kernels_outside_of_graphs(device, head, shape, temperature, budget):
    """Of a round that the device makes alone: the copy of its result, and random numbers."""
    batch = start_batch(device, head, shape, temperature)
    batch.run_round()
    batch.run_round()
    assert batch.device_loop is not None
    for tokens in (1, 2):
        device.value = tokens
        device.launches.clear()
        batch.run_round()
        assert budget - 1 <= device.launches.total() <= budget, device.launches


def test_kernels_outside_of_the_graphs_of_a_round_with_the_host(device):
    """Of a round with a repetition penalty: copies into graphs and out of them, and what is between."""
    batch = start_batch(device, "eagle3", chain_of(5), 0.0, penalty=1.5)
    batch.run_round()
    batch.run_round()
    device.launches.clear()
    batch.run_round()
    assert batch.device_loop is None and device.graphs == 3  # a first step, further steps, the target's pass
    assert 92 <= device.launches.total() <= 94, device.launches


REFUSED = {
    "item": lambda x: x.sum().item(),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "bool": lambda x: bool(x[0, 0] > 1),
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 1],
    "repeats": lambda x: torch.repeat_interleave(x[0].long()),
    "tensor of the host": lambda x: x[torch.tensor([1, 0])],
    "copy from the host": lambda x: x + torch.tensor([1.0, 2.0], device=CUDA),
    "memory of the host": lambda x: torch.arange(2.0).to(CUDA, non_blocking=True),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_graph_refuses(device, name):
    """As CUDA does, or as a replay would read what is gone. Outside of a graph it is counted, or allowed."""
    x = torch.ones(2, 2, device=CUDA)

    def function(x):
        REFUSED[name](x)
        return (x + 1,)

    with pytest.raises(RefusedInGraph, match="in a captured function"), device.capture():
        function(x)
    assert not device.waits
    capture_graph(lambda x: (x + 1,), [x], GraphPool())(x)
    assert device.graphs == 1 and not device.waits


def test_waits_and_kernels_are_counted(device):
    x = torch.ones(2, 2, device=CUDA)
    device.launches.clear()
    assert (x @ x).softmax(-1).tolist() == [[1.0, 1.0], [1.0, 1.0]] and x.view(4)[0].item() == 1.0
    assert device.launches == {"mm": 1, "_softmax": 1} and device.waits.total() == 2
    pinned, value = torch.empty(4, pin_memory=True), torch.ones(4, device=CUDA)
    device.waits.clear()
    pinned.copy_(value, non_blocking=True)
    assert not device.waits
    pinned.copy_(value)
    torch.ones(4).to(CUDA)
    assert device.waits.total() == 2
    with pytest.raises(Exception, match="device"):
        x + torch.ones(2, 2)
