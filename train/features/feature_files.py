"""Files of cached features: one for each document, with a checksum for each tensor, so that a damaged one is found and made again."""

import os
import threading
import time
import zlib
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from specdec.core.files import unwritable

STALE = 3600  # seconds after which an unfinished file is one that a killed process has left


def write(path: Path, tensors: dict[str, Tensor]) -> None:
    """The file appears whole or not at all. Raises ValueError, and leaves nothing behind, if the disk is full."""
    partial = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.partial")
    try:
        sums = {name: checksum(name, value) for name, value in tensors.items()}
        safetensors.torch.save_file(tensors, partial, metadata=sums)
        partial.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        partial.unlink(missing_ok=True)
        raise unwritable(path, error) from error


def read(path: Path, names: list[str]) -> list[Tensor]:
    """Some tensors of a file. Raises ValueError if the file is truncated or one of them is damaged."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            sums = file.metadata() or {}  # none in files of earlier versions
            tensors = [file.get_tensor(name) for name in names]
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}).") from error
    for name, value in zip(names, tensors):
        if name in sums and sums[name] != checksum(name, value):
            raise ValueError(f"{path} is damaged: tensor {name} has not the checksum that it was written with.")
    return tensors


def checksum(name: str, value: Tensor) -> str:
    """CRC-32 of a tensor's name, type, shape and bytes: 4 GB/s on one core, next to nothing beside the reading."""
    about = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode())
    return f"{zlib.crc32(value.contiguous().view(torch.uint8).numpy().data, about):08x}"


def remove_stale(folder: Path) -> None:
    """Removes the unfinished files of killed processes. Other processes may be writing: theirs are young."""
    for partial in folder.rglob("*.partial"):
        try:
            if time.time() - partial.stat().st_mtime > STALE:
                partial.unlink()
        except FileNotFoundError:  # its writer was quicker
            pass


# 8 bits


def to_8_bits(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each [t, D] as integers from -127 to 127 and one float32 scale for each token, [t, 1]."""
    packed: dict[str, Tensor] = {}
    for name, value in tensors.items():
        scale = value.float().abs().amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny) / 127
        packed |= {name: (value.float() / scale).round().to(torch.int8), f"{name}.scale": scale}
    return packed


def from_8_bits(value: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (value.float() * scale).to(dtype)
