"""Tests of benchmarks/training_step.py and gpu_report.py: what they count, what they write, what they refuse."""

import json
import math
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import gpu_report, hardware, training_step
from benchmarks.training_step import NeededFlops, StepOptions, measure_step

HIDDEN, LAYERS, HEADS, *_ = hardware.SHAPES["tiny"]


@pytest.fixture(scope="module")
def tiny():
    return hardware.make_random_target("tiny", device=hardware.find_device(), positions=128)


class Doubled(torch.autograd.Function):
    """2 x @ weight, whose backward pass computes the product again; the weight is frozen."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return 2 * (x @ weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        _ = x @ weight
        return 2 * grad @ weight.T, None


class Orthogonal(torch.optim.SGD):
    """An optimizer whose step has a product of its own."""

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                _ = parameter @ parameter.mT if parameter.dim() == 2 else parameter
        return super().step(closure)


def test_needed_flops_leave_out_what_is_computed_again_and_the_optimizer():
    trained, frozen = nn.Linear(4, 8), nn.Linear(8, 8).requires_grad_(False)
    optimizer, x = Orthogonal(trained.parameters(), lr=0.1), torch.randn(3, 4)
    needed = NeededFlops()
    with needed.watching(optimizer):
        for _ in range(2):
            with torch.no_grad():
                frozen(torch.randn(3, 8))  # once: its result
            h = checkpoint(lambda x: frozen(trained(x)), x, use_reentrant=False)
            Doubled.apply(h, frozen.weight).sum().backward()
            optimizer.step()
    small, large = 2 * 3 * 4 * 8, 2 * 3 * 8 * 8
    # trained: its result and its weight's gradient; frozen: result and the state's gradient; the same in the function
    assert needed.flops == 2 * (large + 2 * small + 2 * large + 2 * large)
    with needed:
        pass
    x @ x.T  # not watched any more
    assert needed.flops == 2 * (5 * large + 2 * small)


def test_the_target_costs_its_forward_pass(tiny):
    costs = {}
    for features in ("target", "given"):
        costs[features] = measure_step(StepOptions(features=features, warmup=0, steps=1), "eagle3", 64, tiny)
    layers = sum(p.numel() for p in tiny.decoder.layers.parameters() if p.dim() == 2)
    attention = 2 * HEADS * 64 * 64 * 2 * (HIDDEN // HEADS) * LAYERS
    assert costs["target"].flops - costs["given"].flops == 2 * layers * 64 + attention
    cost = costs["given"]
    assert cost.tokens == 64 and cost.peak_bytes >= 0 and cost.state_bytes >= 12 * cost.parameters
    assert cost.flops > 6 * 7 * 63 * 3 * 64 * 64  # at least the seven steps of the unroll through a few matrices
    assert cost.mfu(None) is None and cost.mfu(1e12) == pytest.approx(cost.flops / cost.seconds[0] / 1e12)


def test_documents_fill_the_packs():
    batch = training_step.make_batch(StepOptions(document=32, batch=2), 96, 61)
    assert (
        batch.tokens.shape == (2, 96) and batch.documents.amax().item() == 2 and batch.loss_mask.sum().item() == 6 * 16
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts memory of the host")
def test_peak_memory_is_that_between_start_and_end():
    memory = hardware.PeakMemory(torch.device("cpu"))
    with memory.measured():
        values = torch.ones(200 * 2**18)  # 200 MiB
        time.sleep(40 * hardware.SAMPLING)  # until it was looked at, on a loaded machine too
        del values
    assert 180 * 2**20 <= memory.bytes < 300 * 2**20


def test_peaks_are_found_by_the_name_of_the_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: device.name)
    names = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H100 PCIe": 2.0e12, "NVIDIA H200": 4.8e12, "NVIDIA L4": 300e9,
             "NVIDIA GeForce RTX 4090": 1.008e12, "NVIDIA A100-SXM4-80GB": 2.039e12, "NVIDIA A1000": None}  # fmt: skip
    for name, bandwidth in names.items():
        device = type("Device", (), {"type": "cuda", "name": name})()
        assert hardware.find_peak(device).bandwidth == bandwidth
    assert hardware.find_peak(torch.device("cpu")).flops is None


def test_training_steps_are_measured_and_written(capsys, tmp_path, monkeypatch):
    given = ["shape=tiny", "heads=eagle3,mtp", "lengths=32,64", "steps=1", "warmup=0", "peak_flops=1e12"]
    measured = training_step.measure_step

    def measure(chosen, head, length, target):
        if (head, length) == ("mtp", 64):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return measured(chosen, head, length, target)

    monkeypatch.setattr(training_step, "measure_step", measure)
    training_step.main([*given, "train.head.objective.depth=2", f"out={tmp_path}/steps.json"])
    rows = json.loads((tmp_path / "steps.json").read_text())
    assert [(row["head"], row["length"]) for row in rows] == [
        (head, num) for head in ("eagle3", "mtp") for num in (32, 64)
    ]
    assert rows[3]["error"] == "out of memory" and "out of memory" in capsys.readouterr().out
    for row in rows[:3]:
        assert row["tokens_per_second"] == pytest.approx(row["length"] / row["seconds"][0]) and 0 < row["mfu"] < 1


@pytest.mark.parametrize("argument", ["lengths=a", "lengths=16", "features=cached", "precision=fp8", "shape=8bb"])
def test_training_step_refuses(argument):
    with pytest.raises(ValueError, match=argument):
        training_step.main([argument])


def test_the_gpu_report_does_all_its_steps(capsys, tmp_path):
    gpu_report.main(["dry_run=true", "heads=eagle3,dflash", "modes=eager,graphs", f"out={tmp_path}/report"])
    document = json.loads((tmp_path / "report.json").read_text())
    assert [row["head"] for row in document["training"]] == ["eagle3", "dflash"]
    assert all(row["tokens_per_second"] > 0 and row["flops"] > 0 for row in document["training"])
    assert [row["mode"] for row in document["decoding"]] == ["eager", "graphs"]
    found = {(row["mode"], row["nodes"]) for row in document["verification"]}
    assert found == {(mode, num) for mode in ("eager", "graphs") for num in (1, 4)}
    assert all(math.isfinite(row["ms"]) for row in document["verification"] + document["decoding"])
    if not torch.cuda.is_available():
        assert len(document["problems"]) >= 1 and all("No CUDA graphs" in problem for problem in document["problems"])
    assert (tmp_path / "report.md").read_text().strip() in capsys.readouterr().out


def test_the_gpu_report_keeps_what_it_has_when_a_part_fails(capsys, tmp_path, monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(gpu_report, "measure_step", fail)
    gpu_report.main(["dry_run=true", "heads=eagle", "modes=eager", f"out={tmp_path}/report"])
    printed = capsys.readouterr().out
    assert "training eagle, 64 tokens: OutOfMemoryError: CUDA out of memory" in printed and "| eager |" in printed
    gpu_report.main(["dry_run=true", "modes=eager", "minutes=1e-9", f"out={tmp_path}/report"])
    assert capsys.readouterr().out.count("left out, because 1e-09 minutes were over") == 5


def test_the_gpu_report_needs_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no CUDA device.*dry_run=true"):
        gpu_report.main([])
