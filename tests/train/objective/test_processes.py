"""Fast paths under DDP, with a target divided by FSDP2: gradients are those of one process without either.

In one process with gloo, in float64. Blocks are traced as for inductor and run as they are (aot_eager).
"""

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from specdec.core import compile, fast
from tests.support.drafters import VARIANTS, make_drafter, name_of
from tests.support.targets import make_target
from tests.train.objective.test_fused import PATHS, make_batch, run_step
from tests.train.objective.test_objective import make_objective
from train.features.outputs import ComputedFeatures

FIRST = {"eagle3-whole", "mtp-whole", "dflash-reduced-fuse"}  # in the first tier
VOCAB = 11


@pytest.fixture(scope="module")
def targets():
    """A target, and the same one with layers that are divided among the processes of a group of one"""
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    target, divided = make_target(VOCAB), make_target(VOCAB)
    mesh = init_device_mesh("cpu", (1,))
    for layer in divided.layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    of_layers = {id(parameter) for layer in divided.layers for parameter in layer.parameters()}
    others = {parameter for parameter in divided.decoder.parameters() if id(parameter) not in of_layers}
    fully_shard(divided.decoder, mesh=mesh, ignored_params=others)
    yield target, divided
    distributed.destroy_process_group()


def mark_variant(variant):
    name = name_of(variant)
    return pytest.param(variant, marks=[] if name in FIRST else pytest.mark.full, id=name)


@pytest.mark.parametrize("variant", map(mark_variant, VARIANTS))
def test_gradients_are_those_of_one_process(targets, variant, use_backend, in_float64):
    use_backend("aot_eager")
    target, divided = targets
    drafter, batch = make_drafter(target, *variant), make_batch(VOCAB)
    losses = {"kl": 1.0} | ({"confidence": 0.2} if drafter.has_confidence else {})
    losses |= {"candidates": 0.5} if drafter.has_candidates else {}
    objective = make_objective(drafter, losses=losses)
    expected, reference = run_step(objective, batch, ())
    assert isinstance(next(divided.layers[0].parameters()), DTensor)
    prepared = DistributedDataParallel(objective, gradient_as_bucket_view=True)
    for paths in (PATHS, (*PATHS, "blocks")):
        for _ in range(2):  # DDP asks at the second step for the gradients of the first
            objective.zero_grad()
            compile.forget_casts()
            divided.__dict__.pop("reads_segments", None)
            with fast.force_paths(*paths):
                loss = prepared(batch, ComputedFeatures(divided, drafter.target_layers)(batch))
                (3 * loss.total).backward()
            torch.testing.assert_close(loss.total, expected.total, atol=1e-10, rtol=1e-10)
            for name, parameter in drafter.named_parameters():
                assert (parameter.grad is None) == (name not in reference), name
                if name in reference:
                    torch.testing.assert_close(parameter.grad, reference[name], atol=1e-9, rtol=1e-9)
    assert not compile._not_compiled and divided.reads_segments
