"""Tests of bench_training.py and gpu_report.py: what they count, what they write, what they refuse."""

from helpers import hardware, random_target, training_step, training_table
from helpers.training_step import Needed, Work

import json
import math
import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from scripts import bench_training, gpu_report
from tests.support import ROOT

TINY = random_target.SHAPES["tiny"]


@pytest.fixture(scope="module")
def tiny():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return random_target.random_target(TINY, device=device, positions=128)


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
    needed = Needed()
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
    costs = {
        features: training_step.measure(
            ROOT, Work("eagle3", 64, features=features, count=True, steps=1, overrides=("threads=1",)), tiny
        )
        for features in ("target", "given")
    }
    layers = sum(p.numel() for p in tiny.decoder.layers.parameters() if p.dim() == 2)
    attention = 2 * TINY.heads * 64 * 64 * 2 * (TINY.hidden // TINY.heads) * TINY.layers
    assert costs["target"].flops - costs["given"].flops == 2 * layers * 64 + attention
    cost = costs["given"]
    assert cost.tokens == 64 and cost.peak_bytes >= 0 and cost.state_bytes >= 12 * cost.parameters
    assert cost.flops > 6 * 7 * 63 * 3 * 64 * 64  # at least the seven steps of the unroll through a few matrices
    assert cost.mfu(None) is None and cost.mfu(1e12) == pytest.approx(cost.flops / cost.seconds[0] / 1e12)


def test_documents_fill_the_packs(tiny):
    work = Work("eagle", 96, document=32, batch=2)
    rows = training_step.random_rows(work, tiny.vocab_size)
    assert len(rows) == 6 and {len(row.tokens) for row in rows} == {32} and sum(rows[0].mask) == 16


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts memory of the host")
def test_peak_memory_is_that_between_start_and_end():
    memory = hardware.PeakMemory(torch.device("cpu"))
    with memory.measured():
        values = torch.ones(200 * 2**18)  # 200 MiB
        time.sleep(40 * hardware.SAMPLING)  # until it was looked at, on a loaded machine too
        del values
    assert 180 * 2**20 <= memory.bytes < 300 * 2**20


def test_peaks_are_found_by_the_name_of_the_device():
    names = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H100 PCIe": 2.0e12, "NVIDIA H200": 4.8e12, "NVIDIA L4": 300e9,
             "NVIDIA A100-SXM4-80GB": 2.039e12, "NVIDIA GeForce RTX 4090": 1.008e12, "NVIDIA A10": 600e9}  # fmt: skip
    assert {name: hardware.peak_of(name).bandwidth for name in names} == names
    assert hardware.peak_of("NVIDIA A1000").flops is None and hardware.peak_of("x86_64").bandwidth is None


def test_bench_training_measures_in_processes_and_compares(run_script, tmp_path, monkeypatch):
    ran = bench_training.measure
    measured: list[Work] = []

    def measure(chosen, tree, work):
        measured.append(work)
        if len(measured) == 1:
            return ran(chosen, tree, work)
        return "more than 1 s" if work.length == 128 else training_step.Cost(64, 1, [2.0], 300, 0, 1e12)

    monkeypatch.setattr(bench_training, "measure", measure)
    arguments = ["shape=tiny", "threads=1", "steps=1", "peak_flops=1e12", "train.optimizer.lr=1e-4"]
    out = f"out={tmp_path}/one.json"
    run_script(bench_training, "lengths=64", f"trees={ROOT}", "depth=2", "features=given", out, *arguments)
    (cell,) = training_table.read(tmp_path / "one.json")
    assert cell.length == 64 and cell.tokens_per_second == pytest.approx(64 / cell.seconds) and 0 < cell.mfu < 1
    assert "head.objective.depth=2" in measured[0].overrides and "optimizer.lr=1e-4" in measured[0].overrides
    printed = run_script(bench_training, "heads=eagle3,mtp", "lengths=32,64,128", "rounds=2", f"trees={ROOT}", *arguments,
                         f"compare={tmp_path}/one.json", f"picture={tmp_path}/one.png", f"out={tmp_path}/two.json")  # fmt: skip
    assert len(measured) == 1 + 12 and len({(work.head, work.length) for work in measured[-6:]}) == 6
    assert printed.count("more than 1 s") == 2 and "| 32 | 2 | 1.00 |" in printed.replace(" 64 | 32 | 2 |", " 32 | 2 |")
    assert (tmp_path / "one.png").stat().st_size > 10_000
    assert len(training_table.read(tmp_path / "two.json")) == 7


def test_a_process_that_needs_too_much_memory_or_time_is_left_out(monkeypatch):
    chosen = bench_training.decided(bench_training.BenchTraining(shape="tiny", most_seconds=0.01))
    assert bench_training.measure(chosen, ROOT, Work("eagle", 64)) == "more than 0.01 s"
    if not torch.cuda.is_available():
        chosen = bench_training.decided(bench_training.BenchTraining(shape="tiny", most_memory=1.5))
        work = Work(
            "eagle", 64, overrides=("head.vocab_size=null", "threads=1", "head.objective.chunk=100000"), batch=4000
        )
        assert bench_training.measure(chosen, ROOT, work) == "out of memory"


def test_bench_training_refuses(run_script, tmp_path):
    for arguments, message in {
        ("lengths=a",): "lengths=a",
        ("features=cached",): "features=cached",
        (f"trees={tmp_path}",): "no train.py",
        (f"compare={tmp_path}/none.json",): "cannot be used",
        ("shape=8bb", "lengths=64"): "shape=8bb",
    }.items():
        with pytest.raises(ValueError, match=message):
            run_script(bench_training, *arguments)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        random_target.read_shape(str(TINY).replace("kv_heads2", "kv_heads3"))
    assert random_target.read_shape(str(TINY)) == TINY


def test_the_gpu_report_does_all_its_steps(run_script, tmp_path):
    printed = run_script(
        gpu_report, "dry_run=true", "heads=eagle3,dflash", "modes=eager,graphs", f"out={tmp_path}/report"
    )
    document = json.loads((tmp_path / "report.json").read_text())
    assert [row["head"] for row in document["training"]] == ["eagle3", "dflash"]
    assert all(row["tokens_per_second"] > 0 and row["flops"] > 0 for row in document["training"])
    assert [row["mode"] for row in document["decoding"]] == ["eager", "graphs"]
    assert {(row["mode"], row["nodes"]) for row in document["verification"]} == {
        (mode, num) for mode in ("eager", "graphs") for num in (1, 4)
    }
    assert all(math.isfinite(row["ms"]) for row in document["verification"] + document["decoding"])
    if not torch.cuda.is_available():
        assert len(document["problems"]) >= 1 and all("No CUDA graphs" in problem for problem in document["problems"])
    assert (tmp_path / "report.md").read_text().strip() in printed and "aim: 45%" in printed


def test_the_gpu_report_keeps_what_it_has_when_a_part_fails(run_script, tmp_path, monkeypatch):
    def fail(*arguments):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(gpu_report, "measure", fail)
    printed = run_script(gpu_report, "dry_run=true", "heads=eagle", "modes=eager", f"out={tmp_path}/report")
    assert "training eagle, 64 tokens: OutOfMemoryError: CUDA out of memory" in printed and "| eager |" in printed
    printed = run_script(gpu_report, "dry_run=true", "modes=eager", "minutes=1e-9", f"out={tmp_path}/report")
    assert printed.count("left out, because 1e-09 minutes were over") == 5


def test_the_gpu_report_needs_a_gpu(run_script, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"no CUDA device.*dry_run=true"):
        run_script(gpu_report)
