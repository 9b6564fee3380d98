"""Tests of benchmarks/training_step.py: what it counts, what it writes, what it refuses."""

import json

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks import hardware, training_step
from benchmarks.training_step import NeededFlops, StepOptions, measure_step
from specdec.core import fast
from tests.support.targets import OLD_TRANSFORMERS

pytestmark = pytest.mark.gpu
HIDDEN, LAYERS, HEADS, *_ = hardware.SHAPES["tiny"]


@pytest.fixture(scope="module")
def tiny():
    return hardware.make_random_target("tiny", device=hardware.find_device(), positions=128)


@pytest.fixture(scope="module")
def whole(tiny):
    """The cost of a step with one text of 1,024 tokens."""
    return measure_step(StepOptions(warmup=0, steps=1), "eagle3", 1024, tiny)


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
    attention = (
        2 * HEADS * (64 * 65 // 2) * 2 * (HIDDEN // HEADS) * LAYERS
    )  # each token sees itself and those before it
    angles = OLD_TRANSFORMERS * 2 * 64 * len(tiny.decoder.rotary_emb.inv_freq)  # a product of matrices there
    assert costs["target"].flops - costs["given"].flops == 2 * layers * 64 + attention + angles
    cost = costs["given"]
    assert cost.tokens == 64 and cost.peak_bytes >= 0 and cost.state_bytes >= 8 * cost.parameters
    assert (cost.depth, cost.optimizer) == (4, "muon")
    assert cost.flops > 6 * 4 * 63 * 3 * 64 * 64  # at least the four steps of the unroll through a few matrices
    assert cost.mfu(None) is None and cost.mfu(1e12) == pytest.approx(cost.flops / cost.seconds[0] / 1e12)


def test_training_steps_are_measured_and_written(capsys, tmp_path, monkeypatch):
    arguments = ["shape=tiny", "heads=eagle3,mtp", "lengths=32,64", "steps=1", "warmup=0", "peak_flops=1e12"]
    measured = training_step.measure_step

    def measure(options, head, length, target):
        if (head, length) == ("mtp", 64):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return measured(options, head, length, target)

    monkeypatch.setattr(training_step, "measure_step", measure)
    training_step.main([*arguments, "train.head.objective.depth=2", f"out={tmp_path}/steps.json"])
    rows = json.loads((tmp_path / "steps.json").read_text())
    assert [(row["head"], row["length"]) for row in rows] == [
        (head, num) for head in ("eagle3", "mtp") for num in (32, 64)
    ]
    assert rows[3]["error"] == "out of memory" and "out of memory" in capsys.readouterr().out
    for row in rows[:3]:
        assert row["tokens_per_second"] == pytest.approx(row["length"] / row["seconds"][0]) and 0 < row["mfu"] < 1
        assert row["depth"] == 2  # as it was given


@pytest.mark.parametrize("document", ["ragged", "512"])
def test_needed_flops_do_not_depend_on_the_path_that_a_step_takes(tiny, whole, document):
    """Texts in a pack see themselves only: read side by side or one after the other, the same is needed."""
    costs = []
    for without in ("varlen,loss,blocks", ""):
        with fast.force_paths("varlen", "loss"):
            options = StepOptions(document=document, without=without, warmup=0, steps=1)
            costs.append(measure_step(options, "eagle3", 1024, tiny))
    assert costs[0].flops == costs[1].flops and costs[0].tokens == costs[1].tokens
    assert costs[0].tokens == (1024 if document == "512" else sum(num // 8 for num in training_step.RAGGED))
    assert whole.flops / whole.tokens > costs[0].flops / costs[0].tokens  # one text shows more keys


def test_paths_that_are_left_out_are_not_used(tiny, monkeypatch):
    asked_paths, on = [], fast.allows

    def spied(path, *arguments):
        asked_paths.append(path)
        return on(path, *arguments)

    monkeypatch.setattr(fast, "allows", spied)
    with fast.force_paths(*fast.PATHS):
        with training_step.leave_out(["varlen", "loss"], tiny):
            assert (
                not tiny.reads_segments and not fast.allows("loss", tiny.device) and fast.allows("graphs", tiny.device)
            )
        assert "varlen" not in asked_paths and "reads_segments" not in tiny.__dict__
    with pytest.raises(ValueError, match="without=speed must be a comma list of varlen"):
        measure_step(StepOptions(without="speed"), "eagle3", 64, tiny)
