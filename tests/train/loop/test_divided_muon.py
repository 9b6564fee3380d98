"""Tests of Muon in several processes: each orthogonalises a part of the matrices, and updates are those of one."""

import importlib
import math

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from tests.support.processes import digest_tensors
from tests.support.together import together
from train.loop import optimizer as optimization
from train.loop.optimizer import Muon, count_operations, divide_matrices

SHAPES = [
    (24, 48),
    (16, 24),
    (4, 24),
    (4, 24),
    (24, 16),
    (40, 24),
    (40, 24),
    (24, 40),
]  # fc, q, k, v, o, MLP
DTYPES = (torch.float32, torch.float64)
QWEN3_8B = [(4096, 12288), (4096, 8192), (1024, 8192), (1024, 8192), (4096, 4096)] + 3 * [(12288, 4096)]  # eagle3


def draw_values(dtype: torch.dtype) -> list[torch.Tensor]:
    """A weight and three gradients for each matrix, and a weight without gradients"""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(4, *shape, generator=generator, dtype=dtype) for shape in SHAPES]
    return [*values, torch.ones(1, 3, 3, dtype=dtype)]


def take_steps(values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The weights and momenta after three steps of Muon."""
    weights = [nn.Parameter(value[0].clone()) for value in values]
    muon = Muon([{"params": weights, "weight_decay": 0.1, "lr": 0.01}], lr=0.01)
    for step in (1, 2, 3):
        for weight, value in zip(weights[:-1], values):
            weight.grad = value[step].clone()
        muon.step()
    return [*(weight.detach() for weight in weights), *(state["momentum_buffer"] for state in muon.state.values())]


def run_process() -> dict:
    """In each of several processes: digests of its weights and momenta, and the number of its products."""
    dist.init_process_group("gloo")
    calls, orthogonalise = [], optimization.orthogonalise
    optimization.orthogonalise = lambda *arguments: calls.append(1) or orthogonalise(*arguments)
    return {"digests": [digest_tensors(take_steps(draw_values(dtype))) for dtype in DTYPES], "calls": len(calls)}


@pytest.mark.full
def test_two_processes_divide_the_work_and_update_as_one():
    """Bit for bit, and each process does a part."""
    expected = [digest_tensors(take_steps(draw_values(dtype))) for dtype in DTYPES]
    results = together(2, "tests.train.loop.test_divided_muon:run_process")
    assert [result["digests"] for result in results] == [expected, expected]
    calls = [result["calls"] for result in results]
    assert sum(calls) == 2 * 3 * len(SHAPES) and min(calls) >= 2 * 3


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="LocalTensorMode is used as torch 2.13 has it")
@pytest.mark.parametrize("num", [8, 64])
def test_many_processes_update_as_one(num, monkeypatch):
    """All ranks in one process: what a rank does not compute is not a number, until the exchange fills it."""
    local = importlib.import_module("torch.distributed._local_tensor")
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    values, computing_ranks = draw_values(torch.float32), list[int]()

    def compute_on_one_rank(muon, weight, process, num_processes):
        computing_ranks.append(process)
        update = muon._compute_update(weight, num_processes).contiguous()._local_tensors
        return local.rank_map(lambda rank: update[rank] if rank == process else torch.full_like(update[rank], math.nan))

    monkeypatch.setattr(Muon, "_compute_or_allocate", compute_on_one_rank)
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=num)
    try:
        with local.LocalTensorMode(num):
            tensors = take_steps([local.LocalTensor(dict.fromkeys(range(num), value)) for value in values])
    finally:
        dist.destroy_process_group()
    assert len(set(computing_ranks)) == min(num, len(SHAPES))
    expected = digest_tensors(take_steps(values))
    for rank in range(num):
        assert digest_tensors(tensor._local_tensors[rank] for tensor in tensors) == expected


@pytest.mark.parametrize(("num", "tflop"), [(1, 25.1), (2, 13.1), (4, 8.2), (8, 4.8), (64, 4.8)])
def test_the_dearest_process_has_little_more_than_its_part(num, tflop):
    """The matrices of EAGLE-3 for Qwen3-8B, five Newton-Schulz steps. A matrix is never divided."""
    matrices = [torch.empty(shape, device="meta") for shape in QWEN3_8B]
    shares, loads = divide_matrices(matrices, num)
    assert sorted(number for share in shares for number in share) == list(range(len(matrices)))
    assert max(loads) / 1e12 == pytest.approx(tflop, abs=0.1)
    assert sum(loads) == sum(count_operations(matrix) for matrix in matrices)


def test_counted_operations_are_those_of_orthogonalise():
    with FlopCounterMode(display=False) as counter:
        optimization.orthogonalise(torch.randn(24, 40), torch.float32)
    assert counter.get_total_flops() == count_operations(torch.empty(24, 40))
