"""The target's outputs for a batch, from one of three sources that the trainer cannot tell apart:

    online    the target in this process, run for every batch (`Online`)
    cached    files of a folder, made when a document is first used (`Kept`)
    engine    an inference server (engine_features.py), through `Kept` with or without a folder

Documents do not see each other, so the outputs of a document depend on its tokens only.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core import devices
from specdec.core.masks import Documents, Packed
from specdec.core.varlen import Segments
from specdec.engines.engine_target import EngineTarget, apply_final_norm
from specdec.target.model import Target, TargetOutput
from train.data.batches import TrainingBatch
from train.features.feature_files import FeatureFolder

Begun = Callable[[torch.device], TargetOutput | None]  # the end of reading ahead; None: not all was there


def read_outputs(
    target: Target, batch: TrainingBatch, layers: tuple[int, ...], *, gradient: bool = False
) -> TargetOutput:
    """The target's outputs for a batch of B packs -> features [B, T, F*D], final [B, T, D]; documents do not see each other

    gradient: whether to keep the graph, for the training of an adapted target
    """

    def states(tokens: Tensor, positions: Tensor, segments: Segments | None = None) -> Tensor:
        output = target.read(tokens, layers, positions=positions, segments=segments, gradient=gradient)
        return torch.cat([output.features, output.final], dim=-1)

    index = batch.on_host.documents
    documents: Documents | Packed
    if target.reads_segments:
        documents = Packed.of(index)
    else:
        documents = Documents.of(index)
        keep_up(target, len(documents.groups))
    both = documents.to(target.device).read(batch.tokens.to(target.device), states)
    return TargetOutput(*both.split([both.shape[-1] - target.width, target.width], dim=-1))


def keep_up(target: Target, num: int) -> None:
    """Makes dummy calls behind `num` calls, so that all processes of a sharded target call it equally often."""
    one = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    for _ in range(target.share.behind(num)):
        target.read(one, (), positions=one)


class Online:
    """The target in the same process, run for every batch."""

    def __init__(self, target: Target, layers: tuple[int, ...]):
        self.target, self.layers = target, layers

    def __call__(self, batch: TrainingBatch, ahead: TargetOutput | None = None) -> TargetOutput:
        """batch of B packs -> features [B, T, F*D], final [B, T, D], on the target's device"""
        return read_outputs(self.target, batch, self.layers)

    def begin(self, batch: TrainingBatch) -> None:
        """Nothing is read ahead."""


@dataclass(frozen=True)
class PackedDocument:
    """row, start: its place in its batch; tokens [t], on the CPU"""

    row: int
    start: int
    tokens: Tensor

    @property
    def place(self) -> tuple[int, slice]:
        return self.row, slice(self.start, self.start + len(self.tokens))


def cut_documents(batch: TrainingBatch) -> list[PackedDocument]:
    """The documents of a batch."""
    host, found = batch.on_host, []
    for row, (tokens, numbers) in enumerate(zip(host.tokens, host.documents)):
        _, counts = torch.unique_consecutive(numbers, return_counts=True)
        starts = counts.cumsum(0) - counts
        for start, count in zip(starts.tolist(), counts.tolist()):
            if numbers[start] >= 0:
                found.append(PackedDocument(row, start, tokens[start : start + count]))
    return found


class Kept:
    """Outputs document by document: from a folder, or from a reader, which fills the folder; else from the target here.

    folder: None: nothing is kept; reader: None: the target in this process computes what the folder lacks
    """

    def __init__(
        self,
        target: Target,
        layers: tuple[int, ...],
        *,
        folder: FeatureFolder | None,
        reader: EngineTarget | None = None,
    ):
        assert folder or reader
        self.target, self.folder, self.reader = target, folder, reader
        self.layers = (*layers, target.num_layers)

    def begin(self, batch: TrainingBatch) -> Begun | None:
        """Starts to read what a later call needs; None if the target here must compute it. batch: on the CPU

        A thread calls this.
        """
        documents = cut_documents(batch)
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
            shape = (*batch.tokens.shape, len(self.layers) * self.target.width)
            joined = torch.zeros(shape, dtype=self.target.dtype)  # [B, T, (F+1)*D]
            for each, states in zip(documents, known):
                if states is None:
                    return None
                joined[each.place] = torch.cat(states, dim=-1).to(joined.dtype)
            with devices.aside(device):  # not behind the steps that the device has been given to do
                joined = devices.send(joined, device)
                if self.folder is None:  # as a reader gave them
                    joined = apply_final_norm(self.target, joined, self.layers)
            devices.hand_over(joined)
            return TargetOutput(*joined.split([shape[-1] - self.target.width, self.target.width], dim=-1))

        return finish

    def __call__(self, batch: TrainingBatch, ahead: TargetOutput | None = None) -> TargetOutput:
        """batch of B packs -> features [B, T, F*D], final [B, T, D], on the batch's device. ahead: what `begin` has read"""
        if ahead is None:
            ahead = self._gather(batch)
        if not self._everywhere(ahead is not None):
            self._compute(batch)
            ahead = self._gather(batch)
        assert ahead is not None
        return ahead

    def _gather(self, batch: TrainingBatch) -> TargetOutput | None:
        """What the folder and the reader give; None if the target here must compute something."""
        begun = self.begin(batch.on_host)
        return begun(batch.tokens.device) if begun else None

    def _read(self, tokens: Tensor) -> list[Tensor] | None:
        return self.folder.read(tokens, self.layers) if self.folder else None

    def _keep(self, texts: list[Tensor], received: list[list[Tensor]]) -> None:
        """Writes what a reader gave for some texts, with the final norm. It waits once for the device, not once a text."""
        assert self.folder is not None
        with devices.aside(self.target.device):  # the wait is not for the training
            final = torch.cat([states[-1] for states in received]).to(self.target.device)
            final = apply_final_norm(self.target, final, (self.target.num_layers,)).cpu()
        for tokens, states, last in zip(texts, received, final.split([len(text) for text in texts]), strict=True):
            self.folder.write(tokens, [*states[:-1], last])

    def _compute(self, batch: TrainingBatch) -> None:
        """Writes the documents that the folder lacks, with all documents of their packs. All processes call this together."""
        assert self.folder is not None
        lacking = {each.row for each in cut_documents(batch) if self._read(each.tokens) is None}
        if lacking:
            part, stored = batch.select(sorted(lacking)), self.folder.layers[:-1]  # the last is the final state
            output = read_outputs(self.target, part, stored)
            values = [*output.features.cpu().chunk(len(stored), dim=-1)] if stored else []
            values.append(output.final.cpu())
            for each in cut_documents(part):
                self.folder.write(each.tokens, [value[each.place] for value in values])
        else:
            keep_up(self.target, 0)  # other processes compute
        self._everywhere(True)  # the others read when all is written

    def _everywhere(self, found: bool) -> bool:
        """Whether all processes that hold the target together have found it: else they compute it together."""
        return min(self.target.share.all_say(found)) > 0


Features = Online | Kept
