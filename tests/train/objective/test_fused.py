"""The fast paths of a training step give the loss and the gradients of the reference, in float64."""

import weakref

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from specdec.core import compile, fast
from specdec.heads.blocks import Rotary
from tests.support import VARIANTS, make_drafter, name_of
from tests.train.objective.test_objective import make_objective, make_row
from train.data.batches import collate
from train.features.outputs import ComputedFeatures
from train.objective import fused, objective

PATHS = ("varlen", "loss")


@pytest.fixture
def in_float64(monkeypatch):
    """Llama's norms and angles too, which are in float32 otherwise: a difference in the last bit of float64 could become one of
    float32 there, on some CPUs."""

    def normalise(self, x):
        wide = x.double()
        return (self.weight * wide * (wide.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()).to(x.dtype)

    def turn(self, x, position_ids):
        angles = (position_ids[..., None].double() * self.inv_freq.double()).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    monkeypatch.setattr(LlamaRMSNorm, "forward", normalise)
    for kind in (LlamaRotaryEmbedding, Rotary):
        monkeypatch.setattr(kind, "forward", turn)


def run_step(objective_module, batch, paths: tuple[str, ...]):
    """-> Loss, gradients by name of a backward pass with these fast paths"""
    objective_module.zero_grad()
    with fast.force_paths(*paths):
        objective_module.drafter.target.__dict__.pop("reads_segments", None)
        loss = objective_module(
            batch, ComputedFeatures(objective_module.drafter.target, objective_module.drafter.target_layers)(batch)
        )
        loss.total.backward()
    grads = {name: each.grad for name, each in objective_module.drafter.named_parameters() if each.grad is not None}
    return loss, grads


def make_batch(vocab_size: int):
    rows = [make_row(seed, *sizes, vocab_size) for seed, sizes in enumerate([(4, 9), (2, 6), (5, 3), (3, 14)])]
    return collate([rows[:2], rows[2:]], length=26, pad_token=0)


@pytest.mark.parametrize("chunk", [2**27, 60])  # all goals at once, and a few at a time
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_losses_and_gradients_are_those_of_the_reference(target, variant, chunk, monkeypatch, in_float64):
    monkeypatch.setattr(objective, "FUSED_LOGITS", chunk)
    monkeypatch.setattr(objective, "MIN_FUSED_GOALS", 1)
    drafter = make_drafter(target, *variant)
    losses = {"kl": 1.0, "ce": 0.5, "tv": 0.7} | ({"smooth_l1": 0.3} if drafter.estimates_state else {})
    losses |= {"confidence": 0.2} if drafter.has_confidence else {}
    objective_module, batch = make_objective(drafter, losses=losses, decay=0.8), make_batch(target.vocab_size)
    expected, reference = run_step(objective_module, batch, ())
    loss, grads = run_step(objective_module, batch, PATHS)
    torch.testing.assert_close(loss.total, expected.total, atol=1e-10, rtol=1e-10)
    assert torch.equal(loss.matches, expected.matches) and loss.num_goals == expected.num_goals
    assert grads.keys() == reference.keys()
    for name in grads:
        torch.testing.assert_close(grads[name], reference[name], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("weighting, losses", [("dpace", {"kl": 1.0}), ("vat", {"ce": 1.0}), ("decay", {"lk": 1.0})])
def test_losses_whose_weights_follow_from_all_goals_keep_their_way(target, weighting, losses, in_float64):
    objective_module, batch = (
        make_objective(make_drafter(target, "eagle3"), losses=losses, weighting=weighting),
        make_batch(target.vocab_size),
    )
    (expected, reference), (loss, grads) = (run_step(objective_module, batch, paths) for paths in ((), PATHS))
    torch.testing.assert_close(loss.total, expected.total, atol=1e-10, rtol=1e-10)
    for name in grads:
        torch.testing.assert_close(grads[name], reference[name], atol=1e-9, rtol=1e-9)


def test_no_logits_of_all_goals_are_kept(target, monkeypatch):
    """What the loss itself saves for the backward pass has no entry for each goal and token."""
    monkeypatch.setattr(objective, "FUSED_LOGITS", 60)
    monkeypatch.setattr(objective, "MIN_FUSED_GOALS", 1)
    objective_module, batch = (
        make_objective(make_drafter(target, "eagle3"), losses={"kl": 1.0}),
        make_batch(target.vocab_size),
    )
    output = ComputedFeatures(target, objective_module.drafter.target_layers)(batch)

    def count_saved_logits(paths: tuple[str, ...]) -> int:
        """How many such tensors the loss holds"""
        references = []
        with (
            fast.force_paths(*paths),
            torch.autograd.graph.saved_tensors_hooks(lambda x: references.append(weakref.ref(x)) or x, lambda x: x),
        ):
            loss = objective_module(batch, output)
        alive = [each() for each in references if each() is not None]
        assert loss.num_goals > 20
        return sum(each.dim() == 2 and each.shape[1] == target.vocab_size for each in alive)

    monkeypatch.setattr(objective_module, "chunk", 10**6)
    assert count_saved_logits(()) and not count_saved_logits(("loss",))


@pytest.mark.skipif(fused.triton is None, reason="needs triton; its interpreter runs on a CPU: TRITON_INTERPRET=1")
def test_the_kernel_of_kl_in_tritons_interpreter(monkeypatch):
    import os

    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET=1 must be set before triton is imported")
    monkeypatch.setattr(fused, "has_kernel", lambda device: True)
    monkeypatch.setattr(fused, "BLOCK", 1024)
    fused.check(torch.device("cpu"))


def test_blocks_compile_once_for_ragged_packs(target, monkeypatch):
    """Twenty packs of other documents: after the first two, which show torch that numbers of slots differ, nothing is compiled."""
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    monkeypatch.setattr(compile, "_not_compiled", set())
    compile._compile_block.cache_clear()
    torch._dynamo.reset()
    objective_module = make_objective(make_drafter(target, "eagle3"), losses={"kl": 1.0})
    vocab_size, counts = target.vocab_size, []
    for number in range(20):
        sizes = [(2 + number % 5, 3 + (7 * number) % 11), (3, 2 + number % 4), (1 + number % 3, 9 - number % 5)]
        rows = [make_row(seed, *size, vocab_size) for seed, size in enumerate(sizes)]
        batch = collate([rows], length=40, pad_token=0)
        expected, reference = run_step(objective_module, batch, ())
        loss, grads = run_step(objective_module, batch, (*PATHS, "blocks"))
        torch.testing.assert_close(loss.total, expected.total, atol=1e-10, rtol=1e-10)
        for name in grads:
            torch.testing.assert_close(grads[name], reference[name], atol=1e-9, rtol=1e-9)
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert not compile._not_compiled and counts[0] > 0
    assert counts[2:] == [counts[2]] * 18, counts


def test_weights_are_cast_once_under_autocast(target, monkeypatch):
    """As autocast does it in a step that is not compiled: one copy in 16 bits, to which all steps of the unroll add gradients."""
    monkeypatch.setattr(objective, "FUSED_LOGITS", 60)
    monkeypatch.setattr(objective, "MIN_FUSED_GOALS", 1)
    monkeypatch.setattr(compile, "BACKEND", "aot_eager")
    monkeypatch.setattr(compile, "_not_compiled", set())
    compile._compile_block.cache_clear()
    target.model.float()
    try:
        drafter = make_drafter(target, "eagle3").float()
        objective_module, results = make_objective(drafter, losses={"kl": 1.0}), []
        for paths in ((), ("blocks",), ("blocks", "loss", "varlen")):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss, grads = run_step(objective_module, make_batch(target.vocab_size), paths)
            results.append([loss.total.detach(), *grads.values()])
            assert len(compile._mirrors) == (2 if paths else 0)
        for expected, *fast_results in zip(*results, strict=True):
            assert all(float((result - expected).norm()) <= 0.02 * float(expected.norm()) for result in fast_results)
        with torch.no_grad():
            drafter.block.mlp.up_proj.weight.zero_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            changed, _ = run_step(objective_module, make_batch(target.vocab_size), ("blocks",))
        assert not torch.isclose(changed.total, results[0][0])
    finally:
        target.model.double()
    assert not compile._not_compiled


def test_a_block_that_cannot_be_compiled_runs_as_it_is(target, monkeypatch):
    """One sentence says so; an error of the block itself stays an error."""

    def no_compiler(graph, inputs):
        raise RuntimeError("no compiler here")

    monkeypatch.setattr(compile, "BACKEND", no_compiler)
    monkeypatch.setattr(compile, "_not_compiled", set())
    compile._compile_block.cache_clear()
    torch._dynamo.reset()
    objective_module, batch = (
        make_objective(make_drafter(target, "eagle3"), losses={"kl": 1.0}),
        make_batch(target.vocab_size),
    )
    expected, _ = run_step(objective_module, batch, ())
    with pytest.warns(
        UserWarning, match=r"blocks is left out: Eagle3\.project_inputs could not be compiled .*no compiler here"
    ):
        loss, _ = run_step(objective_module, batch, ("blocks",))
    torch.testing.assert_close(loss.total, expected.total, atol=1e-10, rtol=1e-10)
    compile._compile_block.cache_clear()
    with fast.force_paths("blocks"), pytest.raises(Exception, match=r"shape|size"):
        objective_module.drafter.block.finish_layer(
            torch.zeros(1, 2, 3, dtype=torch.float64), torch.zeros(1, 2, 4, dtype=torch.float64)
        )
