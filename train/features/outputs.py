"""The target's outputs for a batch, from one of three sources that the trainer cannot tell apart:

    online    the target in this process, run for every batch (`ComputedFeatures`)
    cached    files of a folder, made when a document is first used (`StoredFeatures`)
    engine    an inference server (engine_features.py), through `StoredFeatures` with or without a folder

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

FeatureRead = Callable[[torch.device], TargetOutput | None]  # the end of reading ahead; None: not all was there


def read_outputs(
    target: Target, batch: TrainingBatch, layers: tuple[int, ...], *, gradient: bool = False
) -> TargetOutput:
    """The target's outputs for a batch of B packs -> features [B, T, F*D], final [B, T, D]; documents do not see each other

    gradient: whether to keep the graph, for the training of an adapted target
    """

    def read_states(tokens: Tensor, positions: Tensor, segments: Segments | None = None) -> Tensor:
        output = target.read(tokens, layers, positions=positions, segments=segments, gradient=gradient)
        return torch.cat([output.features, output.final], dim=-1)

    document_ids = batch.on_host.documents
    documents: Documents | Packed
    if target.reads_segments:
        documents = Packed.from_index(document_ids)
    else:
        documents = Documents.from_index(document_ids)
        equalise_target_calls(target, len(documents.groups))
    joined_states = documents.move_to(target.device).read(batch.tokens.to(target.device), read_states)
    return TargetOutput(*joined_states.split([joined_states.shape[-1] - target.width, target.width], dim=-1))


def equalise_target_calls(target: Target, num_calls: int) -> None:
    """Makes dummy calls behind `num` calls, so that all processes of a sharded target call it equally often."""
    dummy_token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    for _ in range(target.share.count_missing_calls(num_calls)):
        target.read(dummy_token, (), positions=dummy_token)


class ComputedFeatures:
    """The target in the same process, run for every batch."""

    def __init__(self, target: Target, layers: tuple[int, ...]):
        self.target, self.layers = target, layers

    def __call__(self, batch: TrainingBatch, prefetched: TargetOutput | None = None) -> TargetOutput:
        """batch of B packs -> features [B, T, F*D], final [B, T, D], on the target's device"""
        return read_outputs(self.target, batch, self.layers)

    def prefetch(self, batch: TrainingBatch) -> None:
        """Nothing is read ahead."""


@dataclass(frozen=True)
class PackedDocument:
    """row, start: its place in its batch; tokens [t], on the CPU"""

    row: int
    start: int
    tokens: Tensor

    @property
    def batch_index(self) -> tuple[int, slice]:
        return self.row, slice(self.start, self.start + len(self.tokens))


def cut_documents(batch: TrainingBatch) -> list[PackedDocument]:
    """The documents of a batch."""
    host, documents = batch.on_host, []
    for row, (tokens, document_ids) in enumerate(zip(host.tokens, host.documents)):
        _, counts = torch.unique_consecutive(document_ids, return_counts=True)
        starts = counts.cumsum(0) - counts
        for start, count in zip(starts.tolist(), counts.tolist()):
            if document_ids[start] >= 0:
                documents.append(PackedDocument(row, start, tokens[start : start + count]))
    return documents


class StoredFeatures:
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

    def prefetch(self, batch: TrainingBatch) -> FeatureRead | None:
        """Starts to read what a later call needs; None if the target here must compute it. batch: on the CPU

        A thread calls this.
        """
        documents = cut_documents(batch)
        if self.reader is None and not all(
            self.folder and self.folder.contains(document.tokens) for document in documents
        ):
            return None
        document_states = [self._read_stored(document.tokens) for document in documents]
        layers = self.folder.layers if self.folder else self.layers
        futures = {
            number: self.reader.submit(document.tokens, layers)
            for number, document in enumerate(documents)
            if self.reader is not None and document_states[number] is None
        }

        def finish(device: torch.device) -> TargetOutput | None:
            received_states = {number: future.result() for number, future in futures.items()}
            if self.folder is not None and received_states:
                self._store_received(
                    [documents[number].tokens for number in received_states], list(received_states.values())
                )
            for number, state in received_states.items():
                document_states[number] = state if self.folder is None else self._read_stored(documents[number].tokens)
            joined_shape = (*batch.tokens.shape, len(self.layers) * self.target.width)
            joined = torch.zeros(joined_shape, dtype=self.target.dtype)  # [B, T, (F+1)*D]
            for document, states in zip(documents, document_states):
                if states is None:
                    return None
                joined[document.batch_index] = torch.cat(states, dim=-1).to(joined.dtype)
            with devices.use_side_stream(device):  # not behind the steps that the device has been given to do
                joined = devices.upload_tensor(joined, device)
                if self.folder is None:  # as a reader gave them
                    joined = apply_final_norm(self.target, joined, self.layers)
            devices.join_side_stream(joined)
            return TargetOutput(*joined.split([joined_shape[-1] - self.target.width, self.target.width], dim=-1))

        return finish

    def __call__(self, batch: TrainingBatch, prefetched: TargetOutput | None = None) -> TargetOutput:
        """batch of B packs -> features [B, T, F*D], final [B, T, D], on the batch's device. ahead: what `begin` has read"""
        if prefetched is None:
            prefetched = self._read_available(batch)
        if not self._is_everywhere(prefetched is not None):
            self._compute_missing(batch)
            prefetched = self._read_available(batch)
        assert prefetched is not None
        return prefetched

    def _read_available(self, batch: TrainingBatch) -> TargetOutput | None:
        """What the folder and the reader give; None if the target here must compute something."""
        feature_read = self.prefetch(batch.on_host)
        return feature_read(batch.tokens.device) if feature_read else None

    def _read_stored(self, tokens: Tensor) -> list[Tensor] | None:
        return self.folder.read(tokens, self.layers) if self.folder else None

    def _store_received(self, documents: list[Tensor], received: list[list[Tensor]]) -> None:
        """Writes what a reader gave for some texts, with the final norm. It waits once for the device, not once a text."""
        assert self.folder is not None
        with devices.use_side_stream(self.target.device):  # the wait is not for the training
            final_states = torch.cat([states[-1] for states in received]).to(self.target.device)
            final_states = apply_final_norm(self.target, final_states, (self.target.num_layers,)).cpu()
        for tokens, states, final_state in zip(
            documents, received, final_states.split([len(text) for text in documents]), strict=True
        ):
            self.folder.write(tokens, [*states[:-1], final_state])

    def _compute_missing(self, batch: TrainingBatch) -> None:
        """Writes the documents that the folder lacks, with all documents of their packs. All processes call this together."""
        assert self.folder is not None
        missing_rows = {document.row for document in cut_documents(batch) if self._read_stored(document.tokens) is None}
        if missing_rows:
            missing_batch, stored_layers = (
                batch.select_packs(sorted(missing_rows)),
                self.folder.layers[:-1],
            )  # the last is the final state
            output = read_outputs(self.target, missing_batch, stored_layers)
            layer_states = [*output.features.cpu().chunk(len(stored_layers), dim=-1)] if stored_layers else []
            layer_states.append(output.final.cpu())
            for document in cut_documents(missing_batch):
                self.folder.write(document.tokens, [state[document.batch_index] for state in layer_states])
        else:
            equalise_target_calls(self.target, 0)  # other processes compute
        self._is_everywhere(True)  # the others read when all is written

    def _is_everywhere(self, is_available: bool) -> bool:
        """Whether all processes that hold the target together have found it: else they compute it together."""
        return min(self.target.share.gather_values(is_available)) > 0


Features = ComputedFeatures | StoredFeatures
