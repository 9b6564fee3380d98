"""What the target says of a batch: computed live (`Online`) or read from disk (`Cached`)."""

import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from specdec import masks
from specdec.target import Target, TargetOutput
from train.data import Batch, Packs


class Online:
    """The target in the same process, run for every batch."""

    def __init__(self, target: Target, layers: tuple[int, ...]):
        self.target, self.layers = target, layers

    def __call__(self, indices: list[int], batch: Batch) -> TargetOutput:
        """indices of the packs, batch of B packs -> features [B, T, F*D], final [B, T, D]"""
        return self.target.read(batch.tokens, self.layers, positions=batch.positions, mask=masks.documents(batch.documents))


class Cached:
    """Target outputs in a folder, one file a pack, made on first use; an interrupted making continues.

    Raises ValueError for a folder made by another target or data set or without these layers, or a disk too small.
    """

    def __init__(self, target: Target, layers: tuple[int, ...], *, packs: Packs, length: int, folder: Path):
        self.folder, self.layers, self.num_layers = folder, layers, target.num_layers
        stored = sorted({*layers, target.num_layers})  # the last is the final state
        self.online = Online(target, tuple(stored))
        self.about = {"target": target.fingerprint(), "data": packs.fingerprint, "length": length, "dtype": str(target.dtype),
                      "layers": stored}
        self.num_bytes = len(packs) * length * len(stored) * target.width * target.embed.weight.element_size()
        known = folder / "about.json"
        if known.exists():
            made = json.loads(known.read_text())
            wrong = [key for key in self.about if key != "layers" and made.get(key) != self.about[key]]
            wrong += [] if set(stored) <= set(made.get("layers", ())) else ["layers"]
            if wrong:
                raise ValueError(
                    f"The cached features in {folder} were made with another {', '.join(wrong)}. Delete the folder, or "
                    "set features.folder to another one, or use features.mode=online."
                )

    def missing(self, num: int) -> list[int]:
        return [index for index in range(num) if not self._path(index).exists()]

    def make(self, indices: list[int], collate: Callable[[list[int]], Batch], progress: Callable[[Iterable], Iterable]) -> None:
        """Writes the packs `indices`; the caller says the size first."""
        free = shutil.disk_usage(self.folder.parent if self.folder.parent.exists() else ".").free
        if free < 1.1 * self.num_bytes and indices:
            raise ValueError(f"Cached features need {self.num_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: "
                             "use features.mode=online, less data, or another features.folder.")
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "about.json").write_text(json.dumps(self.about, indent=2) + "\n")
        for index in progress(indices):
            output = self.online([index], collate([index]).to(self.online.target.device))
            parts = output.features[0].cpu().chunk(len(self.online.layers), dim=-1)
            tensors = {str(layer): part.contiguous() for layer, part in zip(self.online.layers, parts)}
            partial = self._path(index).with_suffix(".partial")
            safetensors.torch.save_file(tensors, partial)
            partial.rename(self._path(index))

    def __call__(self, indices: list[int], batch: Batch) -> TargetOutput:
        def read(layer: int) -> torch.Tensor:
            return torch.stack([file.get_tensor(str(layer)) for file in files]).to(batch.tokens.device)  # [B, T, D]

        files = [safetensors.safe_open(self._path(index), framework="pt") for index in indices]
        return TargetOutput(torch.cat([read(layer) for layer in self.layers], dim=-1), read(self.num_layers))

    def _path(self, index: int) -> Path:
        return self.folder / f"pack_{index:06d}.safetensors"
