"""What the processes of a run send each other in a step: counts, bytes, and the shortest time that they can take.

Bytes are those that each process sends by a ring: a sum that all get sends its tensors nearly twice, a gather, its
gradient or a broadcast nearly once. A group of several nodes sends as much out of each node, over the network of all of
its processes. Exchanges of single numbers are left out.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from specdec.core.context_parallel import TextShare
from specdec.heads.base import Head
from specdec.target.model import Target
from train.loop.optimizer import find_compute_dtype, list_hidden_matrices
from train.settings.decide import GB, Hardware
from train.settings.options import CHECKPOINTING, MachineOptions, RunConfig


@dataclass(frozen=True)
class CountedShare(TextShare):
    """A part of texts without other processes. gathered: bytes of each gather, of the whole texts"""

    gathered: list[int] = field(default_factory=list)

    def gather(self, key: Tensor, value: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
        if self.size > 1:
            bytes_per_slot = (key.nbytes + value.nbytes) // key.shape[2]
            self.gathered.append(bytes_per_slot * self.size * self.count_part(num_slots))
        return super().gather(key, value, num_slots)


@dataclass(frozen=True)
class ExchangeCount:
    """The exchanges of one kind in a step.

    calls: number of collectives; None: DDP chooses it in the first step; size: bytes of their whole tensors
    num: processes of a group, with consecutive numbers; rounds: how often a ring carries these bytes
    """

    name: str
    calls: int | None
    size: float
    num: int
    rounds: float = 1.0

    @property
    def sent(self) -> float:
        """Bytes that each process sends."""
        return self.rounds * (self.num - 1) / self.num * self.size


def count_exchanges(
    config: RunConfig, drafter: Head, hardware: Hardware, gathered: Sequence[int]
) -> list[ExchangeCount]:
    """The exchanges of a step. gathered: bytes of the gathers of keys in a micro-batch, see `CountedShare`"""
    num, times = hardware.num_processes, config.train.accumulation
    exchanges = [ExchangeCount("gradients", None, 4.0 * drafter.num_parameters(), num, rounds=2)]
    if config.optimizer.name == "muon":
        matrices = list_hidden_matrices(drafter)
        dtype = torch.bfloat16 if config.plans_other_machine else find_compute_dtype(torch.device(hardware.device))
        size = sum(matrix.numel() for matrix in matrices) * dtype.itemsize
        exchanges.append(ExchangeCount("matrices of muon", len(matrices), size, num))
    shard = config.target.shard
    if shard and not config.features.urls:
        size = num if shard is True else shard
        layers = list_layer_bytes(drafter.target, size)
        name = "layers of the target" + (", while features are made," if config.features.mode == "cached" else "")
        exchanges.append(ExchangeCount(name, times * len(layers), times * sum(layers), size))
    if gathered:
        # Behind each gather of a forward pass is a sum of its gradients. Checkpointing gathers again, but not a context
        is_repeated = config.head.objective.get(CHECKPOINTING) and getattr(drafter, "context_kind", None) != "block"
        rounds = 1.5 if is_repeated else 2.0
        calls = round(rounds * times * len(gathered))
        exchanges.append(ExchangeCount("keys", calls, times * sum(gathered), hardware.group_size, rounds))
    return exchanges


def list_layer_bytes(target: Target, size: int) -> list[int]:
    """The bytes of each layer as `size` processes gather it. Its first dimension is filled up to a multiple."""
    totals = []
    for layer in target.layers:
        totals.append(sum(count_padded_bytes(weight, size) for weight in layer.parameters()))
    return totals


def count_padded_bytes(weight: nn.Parameter, size: int) -> int:
    return math.ceil(len(weight) / size) * size * (weight.numel() // len(weight)) * weight.element_size()


def describe_exchanges(exchanges: Sequence[ExchangeCount], machine: MachineOptions, hardware: Hardware) -> str:
    """The bytes of a step, by kind, and the shortest time that they take where the machine's figures are known."""
    parts = []
    for exchange in exchanges:
        calls = "" if exchange.calls is None else f"in {exchange.calls:,} calls "
        parts.append(f"{exchange.name} {exchange.sent / GB:,.3f} GB {calls}of {exchange.num}")
    text = f"{', '.join(parts)}; sent by each process in a step"
    if machine.link:
        text += f"; {sum(each.sent for each in exchanges) / (GB * machine.link):.4f} s inside a node"
    node_size = hardware.num_processes // machine.nodes
    outside = sum(each.sent for each in exchanges if node_size % each.num)  # its groups are in several nodes
    if machine.nodes > 1 and machine.network:
        seconds = outside / (GB * machine.network * node_size)
        text += f", {seconds:.4f} s for {outside / GB:,.3f} GB out of each of {machine.nodes} nodes"
    return text + (" at best" if machine.link else "")
