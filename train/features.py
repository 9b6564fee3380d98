"""The target's outputs for a batch: computed for every batch (`Online`) or read from disk (`Cached`)."""

import json
import shutil
import warnings
from pathlib import Path

import torch
from torch import Tensor

from specdec import devices
from specdec.documents import Documents
from specdec.files import write_text
from specdec.target import Target, TargetOutput
from specdec.untrusted import read_json
from train import pack_files
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

    A truncated or damaged file is named in a warning and made again.

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
            made = read_json(folder / "about.json")
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
        pack_files.remove_stale(self.folder)

    def __call__(self, indices: list[int], batch: Batch) -> TargetOutput:
        packs = [self._read(index) for index in indices]
        missing = [place for place, parts in enumerate(packs) if not self.everywhere(parts is not None)]
        if missing:
            made = self._make([indices[place] for place in missing], batch.select(missing))
            for place, parts in zip(missing, made):
                packs[place] = [parts[name] for name in self._names()]
        return self._join(packs, batch.tokens.device)

    def everywhere(self, found: bool) -> bool:
        """Whether all processes that hold the target together have found it: if one has not, they compute it together."""
        return min(self.online.target.share.all_say(found)) > 0

    def read(self, indices: list[int], device: torch.device) -> TargetOutput | None:
        """The packs' outputs from the disk; None if one of them must be made. A thread calls this."""
        if not all(self._path(index).exists() for index in indices):
            return None
        packs = [self._read(index) for index in indices]
        return None if any(pack is None for pack in packs) else self._join(packs, device)

    def _join(self, packs: list, device: torch.device) -> TargetOutput:
        """packs: of each the layers that are read, [T, D]"""
        layers = [devices.send(torch.stack(parts), device) for parts in zip(*packs)]  # [B, T, D] each
        final = layers.pop()
        return TargetOutput(torch.cat([*layers, final[..., :0]], dim=-1), final)

    def _names(self) -> list[str]:
        return [str(layer) for layer in (*self.layers, self.num_layers)]

    def _read(self, index: int) -> list[torch.Tensor] | None:
        """The layers that are read, [T, D] each; None if the file must be made."""
        path = self._path(index)
        if not path.exists():
            return None
        try:
            return pack_files.read(path, self._names())
        except ValueError as error:
            warnings.warn(f"{error} It is made again.", RuntimeWarning, stacklevel=2)
            return None

    def _make(self, indices: list[int], batch: Batch) -> list[dict[str, Tensor]]:
        """Computes packs, and writes their files, in one of the processes that hold the target. -> of each its layers, [T, D]"""
        layers, made = self.online.layers, []
        output = self.online(indices, batch)
        for index, features in zip(indices, output.features.cpu()):
            parts = zip(layers, features.chunk(len(layers), dim=-1))
            made.append({str(layer): part.contiguous() for layer, part in parts})
            if self.online.target.share.first:
                pack_files.write(self._path(index), made[-1])
        return made

    def _path(self, index: int) -> Path:
        return self.folder / f"pack_{index:06d}.safetensors"
