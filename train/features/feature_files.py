"""Cached features in a folder: one file for each document, with a checksum for each tensor.

A warning names a truncated or damaged file, which is then made again.
"""

import hashlib
import json
import os
import threading
import warnings
import zlib
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from specdec.core.files import count_free_bytes, describe_write_error, write_text
from specdec.core.untrusted import read_json
from specdec.target.fingerprint import describe_outdated, is_outdated
from specdec.target.model import Target


class FeatureFolder:
    """The target's outputs for single documents, found by the documents' tokens.

    layers: numbers of the hidden states that are needed; files hold these or more, and the final state
    Raises ValueError for a folder that another target made, in another form, or without these layers.
    """

    def __init__(self, target: Target, layers: tuple[int, ...], path: Path):
        self.path, self.target = path, target
        self.has_record = False
        self.record: dict = {
            "target": target.fingerprint(),
            "dtype": str(target.dtype),
            "layers": sorted({*layers, target.num_layers}),
            "files": "documents",
        }
        if (path / "about.json").exists():
            stored_record = read_json(path / "about.json")
            if is_outdated(stored_record.get("target")):
                clause = describe_outdated(f"The cached features in {path} name their target", target.name)
                raise ValueError(f"{clause}: delete the folder.")
            differences = [] if target.matches(stored_record.get("target")) else ["target"]
            differences += [key for key in ("dtype", "files") if stored_record.get(key) != self.record[key]]
            if not set(self.record["layers"]) <= set(stored_record.get("layers", ())):
                differences.append("layers")
            if differences:
                raise ValueError(
                    f"The cached features in {path} were made with another {', '.join(differences)}. "
                    "Delete the folder, give another folder=, or use mode=online."
                )
            self.record = stored_record | {"target": target.fingerprint()}  # every file holds all layers of the folder
            self.has_record = self.record == stored_record
        self.layers: tuple[int, ...] = tuple(self.record["layers"])

    def create(self) -> None:
        """Makes the folder, with its record."""
        if not self.has_record:
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.path / "about.json", json.dumps(self.record, indent=2) + "\n")

    def count_bytes(self, num_tokens: int) -> int:
        """Bytes of the outputs of `num_tokens` tokens."""
        return num_tokens * len(self.layers) * self.target.width * self.target.embed.weight.element_size()

    def check_space(self, num_bytes: int) -> None:
        """Raises ValueError if the disk has less free space than `num_bytes` and a tenth."""
        num_free = count_free_bytes(self.path)
        if num_free < 1.1 * num_bytes:
            raise ValueError(
                f"Cached features need {num_bytes / 1e9:.1f} GB and {num_free / 1e9:.1f} GB are free: use mode=online "
                "or engine (which keep nothing), fewer steps, less data, or another folder=."
            )

    def contains(self, tokens: Tensor) -> bool:
        """Whether there is a file for a document. tokens [t]"""
        return self._find_path(tokens).exists()

    def read(self, tokens: Tensor, layers: tuple[int, ...]) -> list[Tensor] | None:
        """A document's states [t, D] at each of these layers; None if its file is missing or damaged.

        A warning names a damaged file, which is removed.
        """
        path = self._find_path(tokens)
        if not path.exists():
            return None
        try:
            return read_tensors(path, [str(layer) for layer in layers])
        except ValueError as error:
            warnings.warn(f"{error} It is made again.", RuntimeWarning, stacklevel=2)
            path.unlink(missing_ok=True)
            return None

    def write(self, tokens: Tensor, states: list[Tensor]) -> None:
        """Writes a document's states: [t, D] for each of `self.layers`."""
        path = self._find_path(tokens)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {str(layer): state.cpu().contiguous() for layer, state in zip(self.layers, states, strict=True)}
        write_tensors(path, tensors)

    def _find_path(self, tokens: Tensor) -> Path:
        name = hashlib.sha256(tokens.to(torch.int32).numpy().tobytes()).hexdigest()[:32]
        return self.path / name[:2] / f"{name[2:]}.safetensors"


# One file


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """Writes a file, whole or not at all. Raises ValueError if the disk is full, and removes what it has written."""
    partial_path = path.with_suffix(f".{os.getpid()}-{threading.get_ident()}.partial")
    try:
        checksums = {name: compute_checksum(name, value) for name, value in tensors.items()}
        safetensors.torch.save_file(tensors, partial_path, metadata=checksums)
        partial_path.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        partial_path.unlink(missing_ok=True)
        raise describe_write_error(path, error) from error


def read_tensors(path: Path, names: list[str]) -> list[Tensor]:
    """Some tensors of a file. Raises ValueError if the file is truncated or one of these tensors is damaged."""
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            checksums = file.metadata() or {}
            tensors = [file.get_tensor(name) for name in names]
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}).") from error
    for name, value in zip(names, tensors):
        if checksums.get(name) != compute_checksum(name, value):
            raise ValueError(f"{path} is damaged: tensor {name} has not the checksum that it was written with.")
    return tensors


def compute_checksum(name: str, value: Tensor) -> str:
    """CRC-32 of a tensor's name, type, shape and bytes. One core computes 4 GB/s, so reading takes far longer."""
    header_crc = zlib.crc32(f"{name} {value.dtype} {tuple(value.shape)}".encode())
    return f"{zlib.crc32(value.contiguous().view(torch.uint8).numpy().data, header_crc):08x}"
