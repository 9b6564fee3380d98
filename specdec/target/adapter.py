"""A LoRA adapter (2106.09685), which changes a target in place: outputs are those of the adapted target."""

import contextlib
from pathlib import Path

import torch
from torch import nn

from specdec import DISTRIBUTION
from specdec.target.model import Target

NEEDS_PEFT = f"needs the package peft: pip install '{DISTRIBUTION}[train]'"


def add_adapter(target: Target, *, rank: int, alpha: int, modules: list[str]) -> dict[str, nn.Parameter]:
    """Adds LoRA matrices to the layers that have these names. B starts at 0, so outputs do not change yet.

    Returns the matrices by name, in float32 or wider. Raises ValueError if no layer has such a name, if the target is
    adapted already, quantised or divided, or if peft is not installed.
    """
    check_unadapted(target)
    _check_changeable(target)
    try:
        import peft  # in the extra `train`: only adapted targets need it
    except ImportError as error:
        raise ValueError(f"A head that adapts its target {NEEDS_PEFT}.") from error

    layer_modules = {id(module) for layer in target.layers for module in layer.modules()}
    adapted_modules = [module for name, module in target.decoder.named_modules() if name.split(".")[-1] in modules]
    if not {id(module) for module in adapted_modules} <= layer_modules:
        raise ValueError(f"lora_modules={modules}: only layers inside the decoder's blocks can be adapted.")
    target.identity.compute()
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(modules))
    try:
        peft.inject_adapter_in_model(config, target.decoder)
    except ValueError as error:
        raise ValueError(f"{target.name} has no layers named {', '.join(modules)}: change lora_modules=.") from error
    parameters = {name: value for name, value in target.model.named_parameters() if "lora_" in name}
    for parameter in parameters.values():
        parameter.data = parameter.data.to(torch.promote_types(target.dtype, torch.float32))
    return parameters


def _check_changeable(target: Target) -> None:
    """Raises ValueError for a quantised target, whose weights `merge_adapter` would round again, and for a divided
    one.
    """
    if target.quantisation is None and target.share.size == 1:
        return
    state = f"in parts in {target.share.size} processes"
    if target.quantisation is not None:
        state = f"quantised ({target.quantisation})"
    raise ValueError(
        f"{target.name} is {state}, and a head that adapts its target changes the weights: load the unquantised target "
        "whole, or choose another head."
    )


def check_unadapted(target: Target) -> None:
    """Raises ValueError if the target is adapted already."""
    if target.adapted:
        raise ValueError(f"{target.name} was adapted in place by another drafter: load the target anew for this one.")


def merge_adapter(target: Target) -> None:
    """Adds the adapter to the weights themselves, in the target's dtype, so that decoding costs no more than before."""
    for layer in target.adapted_layers():
        layer.merge()  # type: ignore[operator]


def save_merged(target: Target, folder: str) -> None:
    """Writes the adapted model as a folder of its own, after `merge_adapter`. Raises ValueError if the folder
    exists.
    """
    if Path(folder).exists():
        raise ValueError(f"{folder} exists; choose another folder for the merged target or delete it.")
    state = {
        name.replace(".base_layer.", "."): value
        for name, value in target.model.state_dict().items()
        if ".lora_" not in name
    }
    partial = Path(f"{folder}.partial")
    target.model.save_pretrained(partial, state_dict=state)
    partial.rename(folder)


@contextlib.contextmanager
def disable_adapter(target: Target):
    """A context in which the adapter of a target is off: outputs are those of the original target."""
    layers = target.adapted_layers()
    for layer in layers:
        layer.enable_adapters(False)  # type: ignore[operator]
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)  # type: ignore[operator]
