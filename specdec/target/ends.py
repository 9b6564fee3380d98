"""The parts of a target without its layers: their values come from the safetensors files, one tensor at a time."""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.core.shards import Shards

UNREAD = "layers-unread"  # ends the fingerprint of a target whose layers were not compared


@torch.no_grad()
def fill(model: PreTrainedModel, parts: tuple[nn.Module, ...], shards: Shards) -> None:
    """Gives the parameters of some parts of the model their values, in the dtype that they have.

    A matrix that is the same in two parts (a tied LM head) stays so. Raises ValueError for a tensor that is missing.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}  # a shared one has its first name
    modules = {module: name for name, module in model.named_modules()}
    filled: dict[Tensor, nn.Parameter] = {}
    read: set[str] = set()
    for part in parts:
        for parameter in list(part.parameters()):
            if not parameter.is_meta:
                continue
            if parameter not in filled:
                filled[parameter] = _read(names[parameter], parameter, shards, read)
            _replace(model, parameter, filled[parameter])
        for module in part.modules():
            _fill_buffers(model, module, modules[module], shards)


def read_part(model: PreTrainedModel, part: nn.Module, shards: Shards) -> dict[str, Tensor]:
    """The values of a part's parameters, by their names in it, in their dtype. Raises ValueError for a tensor that is missing."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    read: set[str] = set()
    return {name: _read(names[value], value, shards, read).data for name, value in part.named_parameters()}


def _read(name: str, parameter: Tensor, shards: Shards, read: set[str]) -> nn.Parameter:
    """read: the tensors that were read before, to which this one is added"""
    shape = tuple(parameter.shape)
    key = shards.find(name, shape)
    if key is None and len(shape) == 2:  # GPT-NeoX's files have another name for the LM head
        others = [other for other in shards.files if other not in read and shards.shape(other) == shape]
        key = others[0] if len(others) == 1 else None
    if key is None:
        raise ValueError(
            f"{shards.name} has no tensor {name} of shape {list(parameter.shape)}, which is needed where the target is read "
            "part by part. Take a complete copy of it, or load the whole target."
        )
    read.add(key)
    value = shards[key]
    if not value.is_floating_point() or value.element_size() == 1:
        raise ValueError(f"{shards.name}: its tensor {key} is quantised, and heads need plain matrices.")
    return nn.Parameter(value.to(parameter.dtype).clone(), requires_grad=False)  # not the file's own pages


def _fill_buffers(model: PreTrainedModel, module: nn.Module, place: str, shards: Shards) -> None:
    """What no file holds, such as Gemma's scale of embeddings, is computed as transformers does when it loads a model.

    place: the module's name in the model
    """
    missing = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
    for name, buffer in missing.items():
        kept = name not in module._non_persistent_buffers_set
        module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=kept)
    if missing:
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # so that it keeps its values
        model._init_weights(module)
    for name, buffer in missing.items():
        key = (
            None if name in module._non_persistent_buffers_set else shards.find(f"{place}.{name}", tuple(buffer.shape))
        )
        if key is not None:
            module.get_buffer(name).copy_(shards[key])


def _replace(model: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter is old:
                setattr(module, name, new)
