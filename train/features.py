"""The target's outputs for a batch: computed for every batch (`Online`) or read from disk (`Cached`)."""

import json
import os
import shutil
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from specdec import devices
from specdec.checkpoint import write_text
from specdec.documents import Documents
from specdec.target import Target, TargetOutput
from train.data import Batch
from train.packing import Packs


def read(target: Target, batch: Batch, layers: tuple[int, ...], *, gradient: bool = False) -> TargetOutput:
    """The target's outputs for a batch of B packs -> features [B, T, F*D], final [B, T, D]; documents do not see each other

    gradient: whether to keep the graph, for the training of an adapted target
    """
    documents = Documents.of(batch.on_host.documents).to(target.device)

    def states(tokens: Tensor, positions: Tensor) -> Tensor:
        output = target.read(tokens, layers, positions=positions, gradient=gradient)
        return torch.cat([output.features, output.final], dim=-1)

    both = documents.read(batch.tokens.to(target.device), states)
    return TargetOutput(*both.split([both.shape[-1] - target.width, target.width], dim=-1))


class Online:
    """The target in the same process, run for every batch."""

    def __init__(self, target: Target, layers: tuple[int, ...]):
        self.target, self.layers = target, layers

    def __call__(self, indices: list[int], batch: Batch) -> TargetOutput:
        """indices of the packs, batch of B packs -> features [B, T, F*D], final [B, T, D]"""
        return read(self.target, batch, self.layers)


class Cached:
    """Target outputs in a folder, one file a pack, made when a pack is first used and read from then on.

    extra_layers: further layers to store, so that drafters that read other layers can share the folder.
    Raises ValueError for a folder made by another target or data set or without these layers, or a disk too small.
    """

    def __init__(
        self, target: Target, layers: tuple[int, ...], *, packs: Packs, length: int, folder: Path, extra_layers=()
    ):
        self.folder, self.layers, self.num_layers = folder, layers, target.num_layers
        stored = sorted({*layers, *target.layer_ids(extra_layers), target.num_layers})  # the last is the final state
        self.about: dict = {
            "target": target.fingerprint(),
            "data": packs.fingerprint,
            "length": length,
            "dtype": str(target.dtype),
            "layers": stored,
        }
        if (folder / "about.json").exists():
            made = json.loads((folder / "about.json").read_text())
            wrong = [key for key in self.about if key != "layers" and made.get(key) != self.about[key]]
            wrong += [] if {*layers, target.num_layers} <= set(made.get("layers", ())) else ["layers"]
            if wrong:
                raise ValueError(
                    f"The cached features in {folder} were made with another {', '.join(wrong)}. Delete the folder, give another "
                    "folder=, or use mode=online (layers= lets heads that read other layers share a folder)."
                )
            self.about = made  # every file holds all layers that the folder was made with
        self.online = Online(target, tuple(self.about["layers"]))
        width = len(self.about["layers"]) * target.width
        self.num_bytes = len(packs) * length * width * target.embed.weight.element_size()
        self.num_missing = sum(not self._path(index).exists() for index in range(len(packs)))

    def open(self) -> None:
        """Makes the folder. Raises ValueError if the disk is too small."""
        existing = next(parent for parent in (self.folder, *self.folder.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        if self.num_missing and free < 1.1 * self.num_bytes:
            raise ValueError(
                f"Cached features need {self.num_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: "
                "use mode=online, less data, or another folder=."
            )
        if not (self.folder / "about.json").exists():
            self.folder.mkdir(parents=True, exist_ok=True)
            write_text(self.folder / "about.json", json.dumps(self.about, indent=2) + "\n")

    def __call__(self, indices: list[int], batch: Batch) -> TargetOutput:
        missing = [place for place, index in enumerate(indices) if not self._path(index).exists()]
        if missing:
            self._write([indices[place] for place in missing], batch.select(missing))

        output = self.read(indices, batch.tokens.device)
        assert output is not None
        return output

    def read(self, indices: list[int], device: torch.device) -> TargetOutput | None:
        """The packs' outputs from the disk; None if one of them has not been made. Threads may call this."""
        if not all(self._path(index).exists() for index in indices):
            return None
        files = [safetensors.safe_open(self._path(index), framework="pt") for index in indices]

        def layer(number: int) -> Tensor:
            return devices.send(torch.stack([file.get_tensor(str(number)) for file in files]), device)  # [B, T, D]

        final = layer(self.num_layers)
        return TargetOutput(torch.cat([*map(layer, self.layers), final[..., :0]], dim=-1), final)

    def _write(self, indices: list[int], batch: Batch) -> None:
        layers = self.online.layers
        output = self.online(indices, batch)
        for index, features in zip(indices, output.features.cpu()):
            parts = zip(layers, features.chunk(len(layers), dim=-1))
            partial = self._path(index).with_suffix(f".{os.getpid()}.partial")
            safetensors.torch.save_file({str(layer): part.contiguous() for layer, part in parts}, partial)
            partial.replace(self._path(index))

    def _path(self, index: int) -> Path:
        return self.folder / f"pack_{index:06d}.safetensors"
