"""The target's outputs for a batch, from one of three sources that the trainer cannot tell apart:

    online    the target in this process, run for every batch (`Online`)
    cached    files of a folder, made when a document is first used (`Kept`, which asks one of the others for what is missing)
    engine    an inference server (engine_features.py), through `Kept` with or without a folder

Documents do not see each other, so the outputs of a document depend on its tokens only. Files are found by these.
"""

import hashlib
import json
import shutil
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from specdec.core import devices
from specdec.core.documents import Documents
from specdec.core.files import write_text
from specdec.core.untrusted import read_json
from specdec.target.model import Target, TargetOutput
from train.data.rows import Batch
from train.features import feature_files

AHEAD = 4  # batches that `read_each` has under way
Begun = Callable[[torch.device], TargetOutput | None]  # what comes of reading ahead; None: not all was there


class Features(Protocol):
    """A source."""

    def __call__(self, batch: Batch, ahead: TargetOutput | None = None) -> TargetOutput:
        """batch of B packs -> features [B, T, F*D], final [B, T, D], on the batch's device

        ahead: what `begin` has read
        """
        ...

    def begin(self, batch: Batch) -> Begun | None:
        """Starts to read what a later call needs; None if there is nothing to start. A thread calls this.

        batch: on the CPU
        """
        ...


def read(target: Target, batch: Batch, layers: tuple[int, ...], *, gradient: bool = False) -> TargetOutput:
    """The target's outputs for a batch of B packs -> features [B, T, F*D], final [B, T, D]; documents do not see each other

    gradient: whether to keep the graph, for the training of an adapted target
    """
    documents = Documents.of(batch.on_host.documents).to(target.device)
    keep_up(target, len(documents.groups))

    def states(tokens: Tensor, positions: Tensor) -> Tensor:
        output = target.read(tokens, layers, positions=positions, gradient=gradient)
        return torch.cat([output.features, output.final], dim=-1)

    both = documents.read(batch.tokens.to(target.device), states)
    return TargetOutput(*both.split([both.shape[-1] - target.width, target.width], dim=-1))


def keep_up(target: Target, num: int) -> None:
    """Beside `num` calls of the target: as many more as another process makes that holds a part of its layers."""
    one = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    for _ in range(target.share.behind(num)):
        target.read(one, (), positions=one)


def read_each(
    features: Features, batches: Iterable[Batch], device: torch.device, *, ahead: int = AHEAD
) -> Iterator[tuple[Batch, TargetOutput]]:
    """Batches on the device, in turn, with their outputs, of which those of the next ones are under way."""
    coming: deque[tuple[Batch, Begun | None]] = deque()

    def next_one() -> tuple[Batch, TargetOutput]:
        host, begun = coming.popleft()
        batch = host.to(device)
        return batch, features(batch, begun(device) if begun else None)

    for batch in batches:
        coming.append((batch, features.begin(batch)))
        if len(coming) > ahead:
            yield next_one()
    while coming:
        yield next_one()


class Online:
    """The target in the same process, run for every batch."""

    def __init__(self, target: Target, layers: tuple[int, ...]):
        self.target, self.layers = target, layers

    def __call__(self, batch: Batch, ahead: TargetOutput | None = None) -> TargetOutput:
        return read(self.target, batch, self.layers)

    def begin(self, batch: Batch) -> None:
        return None


@dataclass(frozen=True)
class Document:
    """row, start: where it stands in its batch; tokens [t], on the CPU"""

    row: int
    start: int
    tokens: Tensor

    @property
    def place(self) -> tuple[int, slice]:
        return self.row, slice(self.start, self.start + len(self.tokens))


def cut(batch: Batch) -> list[Document]:
    """The documents of a batch."""
    host, found = batch.on_host, []
    for row, (tokens, numbers) in enumerate(zip(host.tokens, host.documents)):
        _, counts = torch.unique_consecutive(numbers, return_counts=True)
        starts = counts.cumsum(0) - counts
        for start, count in zip(starts.tolist(), counts.tolist()):
            if numbers[start] >= 0:
                found.append(Document(row, start, tokens[start : start + count]))
    return found


class Folder:
    """Outputs of single documents in a folder, found by their tokens.

    layers: numbers of the hidden states that files hold, the final one included
    bits: 16 or 32 as the target computes them, or 8 with a scale for each token
    Raises ValueError for a folder that was made by another target, in another form, or without these layers.
    """

    def __init__(self, target: Target, layers: tuple[int, ...], path: Path, *, bits: int | None = None):
        if bits not in (None, 8):
            raise ValueError(f"bits={bits} must be 8, or null for what the target computes.")
        self.path, self.target, self.bits = path, target, bits
        self.about: dict = {
            "target": target.fingerprint(),
            "dtype": str(target.dtype),
            "bits": bits,
            "layers": sorted({*layers, target.num_layers}),
            "files": "documents",
        }
        if (path / "about.json").exists():
            made = read_json(path / "about.json")
            wrong = [key for key in self.about if key != "layers" and made.get(key) != self.about[key]]
            wrong += [] if set(self.about["layers"]) <= set(made.get("layers", ())) else ["layers"]
            if wrong:
                raise ValueError(
                    f"The cached features in {path} were made with another {', '.join(wrong)}. Delete the folder, give another "
                    "folder=, or use mode=online (layers= lets heads that read other layers share a folder)."
                )
            self.about = made  # every file holds all layers that the folder was made with
        self.layers: tuple[int, ...] = tuple(self.about["layers"])

    def open(self) -> None:
        """Makes the folder."""
        if not (self.path / "about.json").exists():
            self.path.mkdir(parents=True, exist_ok=True)
            write_text(self.path / "about.json", json.dumps(self.about, indent=2) + "\n")
        feature_files.remove_stale(self.path)

    def num_bytes(self, num_tokens: int) -> int:
        size = 1 if self.bits == 8 else self.target.embed.weight.element_size()
        return num_tokens * len(self.layers) * (self.target.width * size + (4 if self.bits == 8 else 0))

    def check_space(self, num_bytes: int) -> None:
        """Raises ValueError if the disk is too small."""
        existing = next(parent for parent in (self.path, *self.path.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        if free < 1.1 * num_bytes:
            raise ValueError(
                f"Cached features need {num_bytes / 1e9:.1f} GB and {free / 1e9:.1f} GB are free: use mode=online or engine "
                "(which keep nothing), bits=8, fewer steps, less data, or another folder=."
            )

    def has(self, tokens: Tensor) -> bool:
        return self._file(tokens).exists()

    def read(self, tokens: Tensor, layers: tuple[int, ...]) -> list[Tensor] | None:
        """[t, D] for each of these layers; None, with a warning if it is damaged, for a file that must be made."""
        path = self._file(tokens)
        if not path.exists():
            return None
        names = [str(layer) for layer in layers]
        try:
            if self.bits != 8:
                return feature_files.read(path, names)
            values = feature_files.read(path, [*names, *(f"{name}.scale" for name in names)])
        except ValueError as error:
            warnings.warn(f"{error} It is made again.", RuntimeWarning, stacklevel=2)
            path.unlink(missing_ok=True)
            return None
        halves = values[: len(names)], values[len(names) :]
        return [feature_files.from_8_bits(*pair, self.target.dtype) for pair in zip(*halves)]

    def write(self, tokens: Tensor, states: list[Tensor]) -> None:
        """states: [t, D] for each of `layers`"""
        path = self._file(tokens)
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {str(layer): state.cpu().contiguous() for layer, state in zip(self.layers, states, strict=True)}
        feature_files.write(path, feature_files.to_8_bits(tensors) if self.bits == 8 else tensors)

    def _file(self, tokens: Tensor) -> Path:
        name = hashlib.sha256(tokens.to(torch.int32).numpy().tobytes()).hexdigest()[:32]
        return self.path / name[:2] / f"{name[2:]}.safetensors"


class Reader(Protocol):
    """Another process that computes the outputs of documents."""

    def submit(self, tokens: Tensor, layers: tuple[int, ...]) -> "Future[list[Tensor]]":
        """tokens [t] -> [t, D] for each of these layers, on the CPU; that of the last layer before the final norm (`normed`)"""
        ...


def normed(target: Target, states: Tensor, layers: tuple[int, ...]) -> Tensor:
    """states [..., layers * D] of a Reader, on the target's device -> the same with the final norm, which is applied in place"""
    for layer, part in zip(layers, states.split(target.width, dim=-1), strict=True):
        if layer == target.num_layers:
            part.copy_(target.norm(part))
    return states


class Kept:
    """Outputs document by document: from a folder, or from a reader, which fills the folder; else from the target here.

    folder: None: nothing is kept; reader: None: the target in this process computes what the folder lacks
    A truncated or damaged file is named in a warning and made again.
    """

    def __init__(self, target: Target, layers: tuple[int, ...], *, folder: Folder | None, reader: Reader | None = None):
        assert folder or reader
        self.target, self.folder, self.reader = target, folder, reader
        self.layers = (*layers, target.num_layers)

    def begin(self, batch: Batch) -> Begun | None:
        documents = cut(batch)
        if self.reader is None and not all(self.folder and self.folder.has(each.tokens) for each in documents):
            return None
        known = [self._read(each.tokens) for each in documents]
        layers = self.folder.layers if self.folder else self.layers
        coming = {
            number: self.reader.submit(each.tokens, layers)
            for number, each in enumerate(documents)
            if self.reader is not None and known[number] is None
        }

        def finish(device: torch.device) -> TargetOutput | None:
            received = {number: future.result() for number, future in coming.items()}
            if self.folder is not None and received:
                self._keep([documents[number].tokens for number in received], list(received.values()))
            for number, state in received.items():
                known[number] = state if self.folder is None else self._read(documents[number].tokens)
            states = [state for state in known if state is not None]
            if len(states) < len(known):
                return None
            return self._join(batch, documents, states, device, received=self.folder is None)

        return finish

    def __call__(self, batch: Batch, ahead: TargetOutput | None = None) -> TargetOutput:
        if ahead is None:
            begun = self.begin(batch.on_host)
            ahead = begun(batch.tokens.device) if begun else None
        if self._everywhere(ahead is not None) and ahead is not None:
            return ahead
        self._compute(batch)
        documents = cut(batch)
        states = [self._read(each.tokens) for each in documents]
        assert all(state is not None for state in states)
        return self._join(batch, documents, [state for state in states if state is not None], batch.tokens.device)

    def _read(self, tokens: Tensor) -> list[Tensor] | None:
        return self.folder.read(tokens, self.layers) if self.folder else None

    def _keep(self, texts: list[Tensor], received: list[list[Tensor]]) -> None:
        """Writes what a reader gave for some texts, with the final norm: one wait for the device, and not one for each text."""
        assert self.folder is not None
        with devices.aside(self.target.device):  # the wait is not for the training
            final = torch.cat([states[-1] for states in received]).to(
                self.target.device
            )  # the last of the folder's layers
            finals = normed(self.target, final, (self.target.num_layers,)).cpu().split([len(text) for text in texts])
        for tokens, states, last in zip(texts, received, finals, strict=True):
            self.folder.write(tokens, [*states[:-1], last])

    def _compute(self, batch: Batch) -> None:
        """Writes the documents that the folder lacks, with all documents of their packs. All processes call this together."""
        assert self.folder is not None
        lacking = {each.row for each in cut(batch) if self._read(each.tokens) is None}
        if self.target.share.same:
            lacking = {row for row in range(len(batch.tokens)) if not self._everywhere(row not in lacking)}
        if lacking:
            self._write(batch.select(sorted(lacking)))
        else:
            keep_up(self.target, 0)  # other processes compute
        self._everywhere(True)  # the others read when all is written

    def _write(self, part: Batch) -> None:
        assert self.folder is not None
        stored = self.folder.layers[:-1]  # the last is the final state
        output = read(self.target, part, stored)
        values = [*output.features.cpu().chunk(len(stored), dim=-1)] if stored else []
        values.append(output.final.cpu())
        if self.target.share.first:
            for each in cut(part):
                self.folder.write(each.tokens, [value[each.place] for value in values])

    def _everywhere(self, found: bool) -> bool:
        """Whether all processes that hold the target together have found it: else they compute it together."""
        return min(self.target.share.all_say(found)) > 0

    def _join(
        self,
        batch: Batch,
        documents: list[Document],
        states: list[list[Tensor]],
        device: torch.device,
        *,
        received: bool = False,
    ) -> TargetOutput:
        """states: of each document, [t, D] for each layer that is read; received: as a reader gave them"""
        shape = (*batch.tokens.shape, len(self.layers) * self.target.width)
        joined = torch.zeros(shape, dtype=self.target.dtype)  # [B, T, (F+1)*D]
        for each, parts in zip(documents, states):
            joined[each.place] = torch.cat(parts, dim=-1).to(joined.dtype)
        joined = devices.send(joined, device)
        if received:
            joined = normed(self.target, joined, self.layers)
        return TargetOutput(*joined.split([shape[-1] - self.target.width, self.target.width], dim=-1))
