"""A target whose layers are cut over several processes (tensor parallelism), by transformers' plan for its family.

Process 0 .. N-1 hold one target together, N .. 2N-1 the next one, and so on. Each of them computes a part of every layer's
heads and of its MLP; the parts are added up, so hidden states are whole in all of them. Embedding, final norm and LM head
are whole in all of them too, because heads read them.

All processes of a target must call it together, with the same tokens. What a clock or a file system decides may differ
between them: such a decision is made by `Share.all_say`.
"""

import contextlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.distributed import DistributedConfig

HEADS = {  # of a configuration: each process gets an equal part of them
    "num_attention_heads": "heads of attention",
    "num_key_value_heads": "heads of keys and values",
}


@dataclass(frozen=True)
class Share:
    """The processes that hold a target together, seen from one of them."""

    size: int = 1
    mesh: DeviceMesh | None = None  # of these processes; None: one process holds the whole target
    same: bool = True  # whether they read the same data; else each reads its own (target/loading.py)

    @property
    def first(self) -> bool:
        """Whether this is the process that writes what it has read: one of those that read the same."""
        return self.mesh is None or not self.same or self.mesh.get_local_rank() == 0

    def all_say(self, value: float) -> list[float]:
        """The values of all these processes, in order. All must ask, in the same order."""
        if self.mesh is None:
            return [value]
        values = torch.zeros(self.size, dtype=torch.float64, device=self.mesh.device_type)
        values[self.mesh.get_local_rank()] = value
        dist.all_reduce(values, group=self.mesh.get_group())
        return values.tolist()

    def behind(self, num: int) -> int:
        """How many calls of the target more than this one's `num` another process makes, which this one must make too.

        0 where all read the same. Otherwise all must ask, in the same order.
        """
        return 0 if self.same else int(max(self.all_say(num))) - num


def share(tp: int, device: torch.device) -> Share:
    """The processes that share a target with this one. Raises ValueError if the launched processes cannot be divided so."""
    if tp == 1:
        return Share()
    num = dist.get_world_size() if dist.is_initialized() else 1
    if num % tp:
        raise ValueError(
            f"tp={tp} holds a target in {tp} processes together, and {num} run: start a multiple of {tp}, such as "
            f"torchrun --nproc_per_node {tp}, or set tp=1."
        )
    mesh = init_device_mesh(device.type, (num // tp, tp), mesh_dim_names=("data", "tp"))
    return Share(tp, mesh["tp"])


def check(config: PreTrainedConfig, tp: int, name: str, *, device: str, quantisation: str | None) -> None:
    """Raises ValueError for a target that cannot be cut into `tp` parts."""
    if tp < 1:
        raise ValueError(f"tp={tp} must be at least 1, the number of processes that hold a target together.")
    if tp == 1:
        return
    if device == "auto":
        raise ValueError(
            f"device=auto spreads a target's layers over the devices of one process, and tp={tp} cuts every layer over {tp} "
            "processes: use device=null with tp, or tp=1 with auto."
        )
    if quantisation is not None:
        raise ValueError(
            f"{name} is quantised ({quantisation}), and only plain weights are cut over processes: use tp=1, with device=auto "
            "if it needs several devices."
        )
    text = config.get_text_config(decoder=True)
    if not text.base_model_tp_plan:
        raise ValueError(
            f"tp={tp}: transformers has no plan of tensor parallelism for {text.model_type} models such as {name}. Use tp=1, "
            "with device=auto if it needs several devices."
        )
    fields = text.to_dict()
    numbers = {key: fields[key] for key in HEADS if isinstance(fields.get(key), int)}
    if any(number % tp for number in numbers.values()):
        most = math.gcd(*numbers.values())
        possible = " or ".join(str(size) for size in range(1, most + 1) if most % size == 0)
        counts = " and ".join(f"{number} {HEADS[key]}" for key, number in numbers.items())
        raise ValueError(f"tp={tp} does not divide the {counts} of {name}: use tp={possible}.")


@dataclass(frozen=True)
class _Meshes:
    """What transformers keeps its meshes in. There is one here."""

    tp: DeviceMesh

    def get_mesh(self, dims: str | tuple[str, ...]) -> DeviceMesh:
        return self.tp


@contextlib.contextmanager
def cut(model_class: type[PreTrainedModel], shared: Share, device: torch.device) -> Iterator[dict[str, Any]]:
    """Within, from_pretrained of this class with the arguments that are given here loads this process' part of a model.

    transformers itself would make all launched processes hold one model, and cut the LM head too.
    """
    if shared.mesh is None:
        yield {}
        return
    mesh, distribute = shared.mesh, model_class.maybe_distribute_model
    alone = (
        "device_mesh" in inspect.signature(model_class.prepare_distribute_model).parameters
    )  # until transformers 5.17

    def prepare(cls, distributed_config, **places):
        return distributed_config, device, mesh if alone else _Meshes(mesh)

    def leave_ends_whole(cls, model, distributed_config, meshes):
        ends = {id(model.get_input_embeddings()), id(model.get_output_embeddings())}
        whole = {name for name, module in model.named_modules() if id(module) in ends}
        model._tp_plan = {name: style for name, style in model.tp_plan.items() if name not in whole}
        return distribute(model, distributed_config, meshes)

    changed = cast(Any, model_class)
    changed.prepare_distribute_model, changed.maybe_distribute_model = (
        classmethod(prepare),
        classmethod(leave_ends_whole),
    )
    try:
        yield {"distributed_config": DistributedConfig(tp_size=shared.size), "device_map": None}
    finally:
        del changed.prepare_distribute_model, changed.maybe_distribute_model


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which every process holds a part, put together. All must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
