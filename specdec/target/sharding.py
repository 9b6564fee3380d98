"""A target whose layers are kept in parts by all processes of a run (FSDP2). Each process reads its own texts.

A process keeps 1/N of every layer. A layer is gathered from all processes before it computes, and dropped after that. Embedding,
final norm and LM head are whole in every process, because heads read them, and so is all else outside of the layers.

All processes must call the target equally often, or they wait for each other: `Share.behind` says how often another process
calls it more. They may call it with different tokens.
"""

from typing import Any

import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import PreTrainedModel

from specdec.core.shards import Shards
from specdec.target import ends as target_ends
from specdec.target import structure as target_structure
from specdec.target.fingerprint import quantisation_of
from specdec.target.loading import DTYPES, agreed_dtype, find_devices, load_config, load_skeleton
from specdec.target.parallel import Share

WHOLE = "Use shard=false; then tp=N, device=auto or an engine hold a target that is too large for one device."


def load(
    name: str, *, dtype: str, device: str | torch.device, revision: str | None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, Share]:
    """The model with this process' part of each layer, and all processes. All call this; none holds more than one whole layer.

    Arguments as of target_loading.load_model, but one device. Raises ValueError with what to do.
    """
    num = dist.get_world_size() if dist.is_initialized() else 1
    if num == 1:
        raise ValueError(
            "shard=true keeps a part of the target's layers in each process, and there is one process: start several (accelerate "
            "launch --num_processes 8, or torchrun --nproc_per_node 8), or set shard=false."
        )
    if str(device) == "auto":
        raise ValueError(
            "device=auto spreads a target's layers over the devices of one process, and shard=true keeps a part of each layer in "
            "every process: use device=null with shard=true, or shard=false with auto."
        )
    place = find_devices(device)[0]
    origin: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if (quantisation := quantisation_of(load_config(name, **origin))) is not None:
        raise ValueError(f"{name} is quantised ({quantisation}), and shard=true divides only plain weights. {WHOLE}")
    mesh = init_device_mesh(place.type, (num,), mesh_dim_names=("shard",))
    share = Share(num, mesh, same=False)
    dtype = agreed_dtype(dtype, place, share)
    model, _ = load_skeleton(name, dtype=dtype, **origin)
    _check_dtype(model, DTYPES[dtype], name)
    _fill(model, Shards(name, revision=revision), mesh, name)
    return model.to(place), share  # type: ignore[arg-type]


def _check_dtype(model: PreTrainedModel, dtype: torch.dtype, name: str) -> None:
    """Raises ValueError for a model of which transformers keeps some parts in 32 bits."""
    kept = {*(model._keep_in_fp32_modules_strict or ())}
    if dtype == torch.float16:
        kept |= {*(model._keep_in_fp32_modules or ())}
    names = [
        part for part, _ in [*model.named_parameters(), *model.named_buffers()] if any(key in part for key in kept)
    ]
    if names and dtype in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"{name}: {names[0]} and other parts stay in 32 bits beside {dtype}, and shard=true gives all parts one type: use "
            "dtype=float32, or shard=false."
        )


def _fill(model: PreTrainedModel, shards: Shards, mesh: DeviceMesh, name: str) -> None:
    decoder = target_structure.find_decoder(model)
    blocks = target_structure.find_blocks(decoder, model.config.get_text_config(decoder=True).num_hidden_layers, name)
    for block in blocks:
        _read(model, (block,), shards)
        try:
            fully_shard(block, mesh=mesh, reshard_after_forward=True)
        except (ValueError, RuntimeError, AssertionError) as error:
            raise ValueError(f"{name}: a layer cannot be divided ({' '.join(str(error).split())}). {WHOLE}") from error
    _read(model, (model.get_input_embeddings(), model.get_output_embeddings()), shards)
    _read(model, (model,), shards)
    inside = {id(parameter) for block in blocks for parameter in block.parameters()}
    others = {parameter for parameter in decoder.parameters() if id(parameter) not in inside}
    fully_shard(decoder, mesh=mesh, ignored_params=others)  # so that layers share streams, and are gathered ahead


def _read(model: PreTrainedModel, parts: tuple[nn.Module, ...], shards: Shards) -> None:
    try:
        target_ends.fill(model, parts, shards)
    except ValueError as error:
        raise ValueError(f"shard=true reads a target part by part from its files. {error} {WHOLE}") from error
