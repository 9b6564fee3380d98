"""The fast paths of a training step give the loss and the gradients of the reference, in float64."""

import weakref

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from specdec.core import compile, fast
from tests.support.drafters import VARIANTS, make_drafter, name_of
from tests.support.triton_kernels import Recorder, run_in_interpreter
from tests.train.objective.test_objective import make_objective, make_row
from train.data.batches import collate
from train.features.outputs import ComputedFeatures
from train.objective import fused, objective

PATHS = ("varlen", "loss")


def run_step(objective_module, batch, paths: tuple[str, ...]):
    """-> Loss, gradients by name of a backward pass with these fast paths"""
    drafter = objective_module.drafter
    objective_module.zero_grad()
    with fast.force_paths(*paths):
        drafter.target.__dict__.pop("reads_segments", None)
        loss = objective_module(batch, ComputedFeatures(drafter.target, drafter.target_layers)(batch))
        (3 * loss.total).backward()  # the trainer scales it, too
    gradients = {name: value.grad for name, value in drafter.named_parameters() if value.grad is not None}
    return loss, gradients


def compare_paths(objective_module, batch, paths: tuple[str, ...]) -> None:
    """A step with these paths has the loss, the matches and the gradients of the reference."""
    expected, reference = run_step(objective_module, batch, ())
    loss, gradients = run_step(objective_module, batch, paths)
    torch.testing.assert_close(loss.total, expected.total, atol=1e-10, rtol=1e-10)
    assert torch.equal(loss.matches, expected.matches) and loss.num_goals == expected.num_goals
    assert gradients.keys() == reference.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, reference[name], atol=1e-9, rtol=1e-9)


@pytest.fixture
def small_chunks(monkeypatch):
    """A few goals at a time."""
    monkeypatch.setattr(objective, "FUSED_LOGITS", 60)
    monkeypatch.setattr(objective, "MIN_FUSED_GOALS", 1)


def make_batch(vocab_size: int):
    rows = [make_row(seed, *sizes, vocab_size) for seed, sizes in enumerate([(4, 9), (2, 6), (5, 3), (3, 14)])]
    return collate([rows[:2], rows[2:]], length=26, pad_token=0)


@pytest.mark.parametrize("num_logits", [2**27, 60])  # all goals at once, and a few at a time
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_losses_and_gradients_are_those_of_the_reference(target, variant, num_logits, monkeypatch, in_float64):
    monkeypatch.setattr(objective, "FUSED_LOGITS", num_logits)
    monkeypatch.setattr(objective, "MIN_FUSED_GOALS", 1)
    drafter = make_drafter(target, *variant)
    losses = {"kl": 1.0, "ce": 0.5, "tv": 0.7} | ({"smooth_l1": 0.3} if drafter.estimates_state else {})
    losses |= {"confidence": 0.2} if drafter.has_confidence else {}
    compare_paths(make_objective(drafter, losses=losses, decay=0.8), make_batch(target.vocab_size), PATHS)


def test_no_logits_of_all_goals_are_kept(target, monkeypatch, small_chunks):
    """The loss itself saves nothing for the backward pass that has an entry for each goal and token."""
    objective_module = make_objective(make_drafter(target, "eagle3"), losses={"kl": 1.0})
    batch = make_batch(target.vocab_size)
    output = ComputedFeatures(target, objective_module.drafter.target_layers)(batch)
    monkeypatch.setattr(objective_module, "chunk", 10**6)

    def count_saved_logits(paths: tuple[str, ...]) -> int:
        references = []
        with (
            fast.force_paths(*paths),
            torch.autograd.graph.saved_tensors_hooks(lambda x: references.append(weakref.ref(x)) or x, lambda x: x),
        ):
            loss = objective_module(batch, output)
        tensors = [reference() for reference in references]
        assert loss.num_goals > 20
        return sum(tensor is not None and tensor.shape[1:] == (target.vocab_size,) for tensor in tensors)

    assert count_saved_logits(()) and not count_saved_logits(("loss",))


INTERPRETED = """
import torch
from train.objective import fused

fused.has_kernel = lambda device: True
fused.BLOCK = 1024
fused.check(torch.device("cpu"))
"""


WRONG = """
from train.objective import fused

right = fused.fused_kl
fused.fused_kl = lambda logits, goal, goal_rows, temperature: right(logits, goal, goal_rows, 1.0)
"""


@pytest.mark.triton
def test_the_kernel_of_kl_in_tritons_interpreter():
    run_in_interpreter(INTERPRETED)
    with pytest.raises(AssertionError, match="differs from the reference"):
        run_in_interpreter(WRONG + INTERPRETED)


@pytest.mark.triton
@pytest.mark.parametrize("num_warps", [4, 8, 16])
def test_the_kernel_of_kl_spills_nothing(num_warps, monkeypatch):
    """A thread of few warps holds more of a block, and an H100 gives it at most 255 registers."""
    launch = Recorder(fused._kl_kernel)
    monkeypatch.setattr(fused, "_kl_kernel", launch)
    with torch.device("meta"):
        logits, goal = torch.empty(6, 32_000, dtype=torch.bfloat16), torch.empty(4, 32_000)
        fused.fused_kl(logits, goal, torch.zeros(6, dtype=torch.int64), 0.7)
    for aligned in (True, False):
        usage = launch.compile(90, aligned=aligned, num_warps=num_warps)
        print(num_warps, aligned, usage)
        assert usage.spills == 0 and usage.registers <= 128


def test_blocks_compile_once_for_ragged_packs(target, use_backend):
    """Twenty packs of other documents. Two show torch that numbers of slots differ; then nothing is compiled."""
    use_backend("aot_eager")
    objective_module, counts = make_objective(make_drafter(target, "eagle3"), losses={"kl": 1.0}), []
    for number in range(20):
        sizes = [(2 + number % 5, 3 + (7 * number) % 11), (3, 2 + number % 4), (1 + number % 3, 9 - number % 5)]
        rows = [make_row(seed, *size, target.vocab_size) for seed, size in enumerate(sizes)]
        compare_paths(objective_module, collate([rows], length=40, pad_token=0), (*PATHS, "blocks"))
        counts.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert not compile._not_compiled and counts[0] > 0
    assert counts[2:] == [counts[2]] * 18, counts


def test_weights_are_cast_once_under_autocast(target, use_backend, small_chunks):
    """One copy in 16 bits, to which all steps of the unroll add gradients, as with autocast and no compiled blocks."""
    use_backend("aot_eager")
    target.model.float()
    try:
        drafter = make_drafter(target, "eagle3").float()
        objective_module, results = make_objective(drafter, losses={"kl": 1.0}), []
        for paths in ((), ("blocks",), ("blocks", "loss", "varlen")):
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss, gradients = run_step(objective_module, make_batch(target.vocab_size), paths)
            results.append([loss.total.detach(), *gradients.values()])
            assert len(compile._mirrors) == (2 if paths else 0)
        for expected, *fast_results in zip(*results, strict=True):
            for result in fast_results:
                assert float((result - expected).norm()) <= 0.02 * float(expected.norm())
        with torch.no_grad():
            drafter.block.mlp.up_proj.weight.zero_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            changed, _ = run_step(objective_module, make_batch(target.vocab_size), ("blocks",))
        assert not torch.isclose(changed.total, results[0][0])
    finally:
        target.model.double()
    assert not compile._not_compiled


def test_a_block_that_cannot_be_compiled_runs_as_it_is(target, use_backend):
    """One sentence says so; an error of the block itself stays an error."""

    def fail(graph, inputs):
        raise RuntimeError("no compiler here")

    use_backend(fail)
    objective_module = make_objective(make_drafter(target, "eagle3"), losses={"kl": 1.0})
    with pytest.warns(UserWarning, match=r"blocks is left out: Eagle3\.\w+ could not be compiled .*no compiler here"):
        compare_paths(objective_module, make_batch(target.vocab_size), ("blocks",))
    compile._compile_block.cache_clear()
    with fast.force_paths("blocks"), pytest.raises(Exception, match=r"shape|size"):
        objective_module.drafter.block.finish_layer(
            torch.zeros(1, 2, 3, dtype=torch.float64), torch.zeros(1, 2, 4, dtype=torch.float64)
        )


def test_a_block_is_compiled_whole_inside_ddp(use_backend):
    """With small buckets of gradients, too: torch would cut the graph at each."""

    class Block(nn.Sequential):
        @compile.training_block
        def forward(self, x):
            return super().forward(x)

    graphs = []
    use_backend(lambda graph, inputs: graphs.append(graph) or graph.forward)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = DistributedDataParallel(Block(*(nn.Linear(600, 600) for _ in range(3))), bucket_cap_mb=1)
        with fast.force_paths("blocks"):
            module(torch.ones(2, 600)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert len(graphs) == 1 and all(parameter.grad is not None for parameter in module.parameters())


def test_an_error_of_any_class_leaves_a_block_out_at_its_first_compiled_call_only(monkeypatch):
    """The AssertionError of DDPOptimizer is of no class of Dynamo. The function's own errors are never hidden."""
    module, x = torch.nn.Linear(3, 3), torch.randn(2, 3)
    errors: list[Exception] = [AssertionError("buckets")]

    def compile_block(function):
        def run(*inputs):
            if errors:
                raise errors.pop()
            return function(*inputs)

        return run

    def double(module, x):
        return 2 * module(x)

    for name, value in (("_compile_block", compile_block), ("_not_compiled", set()), ("_called_compiled", set())):
        monkeypatch.setattr(compile, name, value)
    with pytest.warns(UserWarning, match=r"blocks is left out: .*double could not be compiled \(buckets\)"):
        assert torch.equal(compile.run_block(double, module, x), 2 * module(x))
    assert double in compile._not_compiled

    compile._not_compiled.clear()
    assert torch.equal(compile.run_block(double, module, x), 2 * module(x))
    errors.append(AssertionError("of a later call"))
    with pytest.raises(AssertionError, match="of a later call"):
        compile.run_block(double, module, x)

    compile._called_compiled.clear()
    errors.append(AssertionError("buckets"))
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        compile.run_block(double, module, torch.randn(2, 4))
    assert double not in compile._not_compiled
