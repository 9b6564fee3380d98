"""A target whose layers are divided among the processes of a mesh (FSDP2). Each process reads its own texts.

A process keeps 1/N of every layer. A layer is gathered from all processes before it computes, and dropped behind that.
Embedding, final norm and LM head are whole in every process, because heads read them, and so is all else outside of
layers.

All processes must call the target equally often, or they wait for each other. `Share.count_missing_calls` gives the
calls that a process must add. Texts and their lengths may differ.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from specdec.core.shards import Shards
from specdec.target import quantised, structure
from specdec.target.loading import (
    DTYPES,
    choose_dtype,
    fill_ends,
    find_devices,
    load_skeleton,
    open_shards,
    untie_parameters,
)

UNSHARDED_ADVICE = "Use shard=false; then device=auto or an engine holds a target that is too large for one device."


@dataclass(frozen=True)
class Share:
    """The processes that hold a target together, in the view of one of them."""

    size: int = 1  # number of processes
    mesh: DeviceMesh | None = None  # mesh of these processes; None: one process holds the whole target

    def gather_values(self, value: float) -> list[float]:
        """The values of all these processes, in order. All must call this, in the same order."""
        if self.mesh is None:
            return [value]
        values = torch.zeros(self.size, dtype=torch.float64, device=self.mesh.device_type)
        values[self.mesh.get_local_rank()] = value
        dist.all_reduce(values, group=self.mesh.get_group())
        return values.tolist()

    def count_missing_calls(self, num: int) -> int:
        """Number of calls of the target that another process makes beyond this one's `num`, and that this one must add.

        0 for one process. Otherwise all must call this, in the same order.
        """
        return int(max(self.gather_values(num))) - num


def load_sharded(
    name: str,
    mesh: DeviceMesh,
    *,
    dtype: str,
    device: str | torch.device,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> tuple[PreTrainedModel, Share, Shards]:
    """The model with this process' share of each layer, the processes of the share, and the files of the weights.

    mesh: one-dimensional, of the processes that hold the target together. All of them call this. None holds more than
    one whole layer. Other arguments as of loading.load_model, but one device. Raises ValueError with advice.
    """
    if str(device) == "auto":
        raise ValueError(
            "device=auto spreads a target's layers over the devices of one process, and shard=true keeps a part of "
            "each layer in every process: use device=null with shard=true, or shard=false with auto."
        )
    local_device = find_devices(device)[0]
    share = Share(mesh.size(), mesh)
    dtype_number = list(DTYPES).index(choose_dtype(dtype, local_device))  # the first process decides
    dtype = list(DTYPES)[int(share.gather_values(dtype_number)[0])]
    model, quantisation = load_skeleton(name, dtype=dtype, revision=revision, trust_remote_code=trust_remote_code)
    obstacle = quantised.find_obstacle(model.config)
    if obstacle is None and quantisation is not None and not quantised.is_read_here(model.config):
        obstacle = (
            f"is quantised ({quantisation}), and shard=true divides only plain weights, or ones that become plain"
        )
    if obstacle is not None:
        raise ValueError(f"{name} {obstacle}. {UNSHARDED_ADVICE}")
    shards = open_shards(name, model.config, revision=revision, whole=True)
    quantised.check_forms(model.config, shards)
    _fill_layers(model, shards, mesh, name)
    moved_model: Any = model.to(local_device)  # type: ignore[arg-type]
    return moved_model, share, shards


def _fill_layers(model: PreTrainedModel, shards: Shards, mesh: DeviceMesh, name: str) -> None:
    untie_parameters(model, shards)
    decoder = structure.find_decoder(model)
    layers = structure.find_layers(decoder, model.config.get_text_config(decoder=True).num_hidden_layers, name)
    for layer in layers:
        _fill_modules(model, (layer,), shards)
        try:
            fully_shard(layer, mesh=mesh, reshard_after_forward=True)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise ValueError(
                f"{name}: a layer cannot be divided ({' '.join(str(error).split())}). {UNSHARDED_ADVICE}"
            ) from error
    _fill_modules(model, (model.get_input_embeddings(), model.get_output_embeddings()), shards)
    _fill_modules(model, (model,), shards)
    layer_parameters = {id(parameter) for block in layers for parameter in block.parameters()}
    ignored = {parameter for parameter in decoder.parameters() if id(parameter) not in layer_parameters}
    fully_shard(decoder, mesh=mesh, ignored_params=ignored)  # so that layers share streams, and are gathered ahead


def _fill_modules(model: PreTrainedModel, modules: tuple[nn.Module, ...], shards: Shards) -> None:
    try:
        fill_ends(model, modules, shards)
    except ValueError as error:
        raise ValueError(
            f"shard=true reads a target part by part from its files. {error} {UNSHARDED_ADVICE}"
        ) from error
