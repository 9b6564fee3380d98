"""The MTP module in a GGUF file: what its metadata declares, and the tensors that are there."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from specdec import DISTRIBUTION

OUTER = ("eh_proj", "enorm", "hnorm", "shared_head_norm")  # names behind blk.{layer}.nextn.
MODULE_TENSOR = re.compile(r"blk\.(\d+)\.nextn\.(\w+)\.weight")
ADVICE = "Convert the model again from a folder whose module is sound."
State = tuple[str, str | None, str, str]  # state, tensor, evidence, remedy


def open_gguf(path: str) -> Any:
    """A reader of the file. Raises ValueError without the package gguf, and for a file that is none."""
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ValueError(f"{path} needs the package gguf: pip install '{DISTRIBUTION}[train]'.") from error
    try:
        return GGUFReader(path)
    except Exception as error:  # a damaged file raises errors of many kinds
        raise ValueError(f"{path} is no whole GGUF file ({error}): take another copy of it.") from error


def read_field(reader: Any, name: str) -> Any:
    """The value of a field of the metadata; None: absent."""
    field = reader.get_field(name)
    return None if field is None else field.contents()


def examine_gguf(path: str, describe_dead: Callable[[torch.Tensor], str | None]) -> tuple[int, int, list[State]]:
    """The modules that a file declares, those that it has, and the states that it shows.

    describe_dead: tensor -> what shows that it has no sound values, or None
    Raises ValueError as `open_gguf`.
    """
    reader = open_gguf(path)
    declared = int(read_field(reader, f"{read_field(reader, 'general.architecture')}.nextn_predict_layers") or 0)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    layers = sorted({int(match[1]) for match in map(MODULE_TENSOR.fullmatch, tensors) if match})
    states: list[State] = []
    if declared and not layers:
        states.append(("lost", None, f"The metadata counts {declared} and no tensor is named blk.*.nextn.", ADVICE))
    if layers and not declared:
        sentence = f"blk.{layers[0]}.nextn is there, and the metadata has no nextn_predict_layers."
        states.append(("undeclared", f"blk.{layers[0]}.nextn.eh_proj.weight", sentence, ADVICE))
    for layer in layers:
        states += examine_layer(tensors, layer, describe_dead)
    return declared, len(layers), states


def examine_layer(
    tensors: dict[str, Any], layer: int, describe_dead: Callable[[torch.Tensor], str | None]
) -> Iterator[State]:
    """The states of one module: incomplete, dead. layer: number of its block"""
    names = [f"blk.{layer}.nextn.{name}.weight" for name in OUTER]
    missing = [name for name in names if name not in tensors]
    if missing:
        yield "incomplete", missing[0], f"The file lacks {', '.join(missing)}.", ADVICE
    present = (name for name in tensors if name.startswith(f"blk.{layer}."))
    reasons = ((name, describe_dead(read_tensor(tensors[name]))) for name in present)
    worst = next(((name, reason) for name, reason in reasons if reason is not None), None)
    if worst is not None:
        yield "dead", worst[0], f"{worst[0]} {worst[1]}.", ADVICE


def read_tensor(tensor: Any) -> torch.Tensor:
    """The values of a tensor, dequantised; one zero and one 1 for a form that the package cannot read."""
    from gguf.quants import dequantize

    try:
        return torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
    except NotImplementedError:
        return torch.tensor([0.0, 1.0])
