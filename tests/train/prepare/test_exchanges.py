"""Counted exchanges of a step are those of torch.distributed, in a group whose other processes are not there."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.core import fast
from specdec.core.context_parallel import TextShare
from specdec.target.model import Target
from tests.support.drafters import make_drafter
from tests.support.targets import make_target, save_target
from tests.train.objective.test_fused import PATHS, make_batch
from tests.train.objective.test_objective import make_objective
from train.features.outputs import ComputedFeatures
from train.loop.optimizer import Muon, find_compute_dtype, list_hidden_matrices
from train.prepare.exchanges import CountedShare, ExchangeCount, count_exchanges, describe_exchanges
from train.settings.decide import Hardware
from train.settings.options import MachineOptions

NUM, SHARD, TEXTS, VOCAB = 8, 4, 2, 11
HARDWARE = Hardware("cpu", NUM, 8e10, 1e12, group_size=TEXTS)


class SentBytes(TorchDispatchMode):
    """Calls, and bytes of the whole tensors, of collectives."""

    def __init__(self):
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            whole = args["reduce_scatter" in str(func)]
            self.sizes.append((whole[0] if isinstance(whole, list) else whole).nbytes)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def group():
    fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    dist.init_process_group("fake", store=fake.FakeStore(), rank=0, world_size=NUM)
    yield dist.group.WORLD
    dist.destroy_process_group()


def count_gradients(objective, batch, output) -> list[int]:
    """Bytes of each bucket of DDP."""
    sizes: list[int] = []

    def note(_, bucket):
        sizes.append(bucket.buffer().nbytes)
        future = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    prepared = DistributedDataParallel(objective)
    prepared.register_comm_hook(None, note)
    prepared(batch, output).total.backward()
    return sizes


@pytest.mark.parametrize(
    ("head", "arguments", "checkpointing"),
    [("eagle3", {"num_layers": 2}, False), ("mtp", {"num_modules": 3}, True), ("dflash", {}, True)],
)
def test_bytes_of_a_step_are_those_of_torch(group, head, arguments, checkpointing, tmp_path):
    target, batch = make_target(VOCAB), make_batch(VOCAB)
    drafter = make_drafter(target, head, False, arguments).float()
    output = ComputedFeatures(target, drafter.target_layers)(batch)
    objective = make_objective(drafter, losses={"kl": 1.0}, gradient_checkpointing=checkpointing)
    measured = {"gradients": count_gradients(objective, batch, output)}
    find_compute_dtype(torch.device("cpu"), NUM)  # processes agree on it once
    with SentBytes() as sent:
        Muon([{"params": list_hidden_matrices(drafter)}], lr=0.1).step()
    measured["matrices of muon"] = sent.sizes
    mesh = init_device_mesh("cpu", (NUM // SHARD, SHARD), mesh_dim_names=("dp_replicate", "dp_shard"))["dp_shard"]
    save_target(tmp_path, num_layers=3)
    divided = Target.load_sharded(str(tmp_path), mesh, dtype="float32")
    with SentBytes() as sent:
        divided.read(torch.zeros(1, 4, dtype=torch.long), ())
    measured["layers of the target"] = sent.sizes

    # Keys and their gradients, as processes send them, and as they are counted
    counted_share, share = CountedShare(0, TEXTS), TextShare(0, TEXTS, dist.new_group(list(range(TEXTS))))
    for objective.text_share in (counted_share, share):
        with SentBytes() as sent, fast.force_paths(*PATHS):
            objective(batch, output, compare=False).total.backward()
    measured["keys"] = sent.sizes

    drafter._target = (divided,)
    config = SimpleNamespace(
        plans_other_machine=False,
        train=SimpleNamespace(accumulation=1),
        optimizer=SimpleNamespace(name="muon"),
        target=SimpleNamespace(shard=SHARD),
        features=SimpleNamespace(urls="", mode="online"),
        head=SimpleNamespace(objective={"gradient_checkpointing": checkpointing}),
    )
    exchanges = count_exchanges(config, drafter, HARDWARE, counted_share.gathered)
    rounds = {"gradients": 2}  # sums that all get
    for exchange in exchanges:
        sizes = measured[exchange.name]
        sent_bytes = rounds.get(exchange.name, 1) * (exchange.num - 1) / exchange.num * sum(sizes)
        assert exchange.calls in (None, len(sizes)) and exchange.sent == pytest.approx(sent_bytes), exchange.name
    assert [exchange.num for exchange in exchanges] == [NUM, NUM, SHARD, TEXTS]
    config.features.mode, config.plans_other_machine = "cached", True
    _, matrices, layers, _ = count_exchanges(config, drafter, HARDWARE, counted_share.gathered)
    assert layers.name == "layers of the target, while features are made,"
    assert matrices.size == 2 * sum(matrix.numel() for matrix in list_hidden_matrices(drafter))


def test_seconds_follow_from_the_groups_of_nodes():
    """A group inside a node sends nothing out of it. The processes of a node share their networks."""
    exchanges = [ExchangeCount("gradients", None, 32e9, 32, rounds=2), ExchangeCount("layers of the target", 3, 8e9, 8)]
    machine = MachineOptions(name="x", nodes=4, link=100, network=50)
    text = describe_exchanges(exchanges, machine, Hardware("cuda", 32, 8e10, 1e12))
    assert text == (
        "gradients 62.000 GB of 32, layers of the target 7.000 GB in 3 calls of 8; sent by each process in "
        "a step; 0.6900 s inside a node, 0.1550 s for 62.000 GB out of each of 4 nodes at best"
    )


def test_a_group_in_two_nodes_sends_out_of_them():
    machine = MachineOptions(name="x", nodes=2, link=100, network=50)
    text = describe_exchanges([ExchangeCount("keys", 2, 6e9, 2)], machine, Hardware("cuda", 6, 8e10, 1e12))
    assert "3.000 GB out of each of 2 nodes" in text
