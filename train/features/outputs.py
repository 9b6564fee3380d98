"""The target's outputs for a batch, from one of three sources that the trainer cannot tell apart:

    online    the target in this process, which reads every batch (`ComputedFeatures`)
    cached    files of a folder, written when a document is first used (`StoredFeatures`)
    engine    an inference server (specdec/engines/engine_target.py), through `StoredFeatures`, with or without a folder

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
from train.data.batches import TrainingBatch, find_stretches
from train.features.feature_files import FeatureFolder

FeatureRead = Callable[[torch.device], TargetOutput | None]  # ends what `prefetch` began; None: something is missing


def read_outputs(
    target: Target, batch: TrainingBatch, layers: tuple[int, ...], *, gradient: bool = False
) -> TargetOutput:
    """The target's outputs for a batch of B packs: features [B, T, F*D], final [B, T, D].

    layers: numbers of the F hidden states; gradient: whether to keep the graph, for the training of an adapted target
    """

    def read_states(
        tokens: Tensor, positions: Tensor, segments: Segments | None = None, rows: Documents | None = None
    ) -> Tensor:
        output = target.read(tokens, layers, positions=positions, segments=segments, documents=rows, gradient=gradient)
        return torch.cat([output.features, output.final], dim=-1)

    document_ids = batch.on_host.documents
    documents: Documents | Packed
    if target.reads_segments:
        documents = Packed.from_index(document_ids, keeps_states=target.recurrent)
    else:
        documents = Documents.from_index(document_ids)
        equalise_target_calls(target, len(documents.groups))
    joined_states = documents.move_to(target.device).read(batch.tokens.to(target.device), read_states)
    return TargetOutput(*joined_states.split([joined_states.shape[-1] - target.width, target.width], dim=-1))


def equalise_target_calls(target: Target, num_calls: int) -> None:
    """Adds dummy calls to `num_calls`, so that all processes of a sharded target call it equally often."""
    dummy_token = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    for _ in range(target.share.count_missing_calls(num_calls)):
        target.read(dummy_token, (), positions=dummy_token)


class ComputedFeatures:
    """Outputs of the target in this process, which reads every batch."""

    def __init__(self, target: Target, layers: tuple[int, ...]):
        self.target, self.layers = target, layers

    def __call__(self, batch: TrainingBatch, prefetched: TargetOutput | None = None) -> TargetOutput:
        """The outputs of a batch: features [B, T, F*D], final [B, T, D], on the target's device."""
        return read_outputs(self.target, batch, self.layers)

    def prefetch(self, batch: TrainingBatch) -> None:
        """None: nothing is read ahead."""


@dataclass(frozen=True)
class PackedDocument:
    """One document of a batch."""

    row: int  # row of the batch
    start: int  # first position in the row
    tokens: Tensor  # [t], on the CPU

    @property
    def batch_index(self) -> tuple[int, slice]:
        """The document's place in tensors [B, T, ..]."""
        return self.row, slice(self.start, self.start + len(self.tokens))


def cut_documents(batch: TrainingBatch) -> list[PackedDocument]:
    """The documents of a batch."""
    host, documents = batch.on_host, []
    for row, tokens in enumerate(host.tokens):
        for start, stop in find_stretches(host.documents[row]):
            documents.append(PackedDocument(row, start, tokens[start:stop]))
    return documents


class StoredFeatures:
    """Outputs by document: from a folder, from a reader, which fills the folder, or from the target in this process.

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
        """Begins to read a batch's outputs, in a thread; None if the target in this process must compute some.

        batch: on the CPU
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
            # Wait for the reader; a folder takes what it gives, with the final norm
            received = {number: future.result() for number, future in futures.items()}
            if self.folder is not None and received:
                self._store_received([documents[number].tokens for number in received], list(received.values()))
            for number, layer_states in received.items():
                if self.folder is None:
                    document_states[number] = layer_states
                else:
                    document_states[number] = self._read_stored(documents[number].tokens)

            # Put the documents at their places in the batch
            width = self.target.width
            joined = torch.zeros(*batch.tokens.shape, len(self.layers) * width, dtype=self.target.dtype)
            for document, states in zip(documents, document_states):
                if states is None:
                    return None
                for part, state in zip(joined[document.batch_index].split(width, dim=-1), states, strict=True):
                    part.copy_(state)  # layer by layer: files are mapped, so the host holds one copy

            # Copy them beside the training: the device may have many steps to do first
            with devices.use_side_stream(device):
                joined = devices.upload_tensor(joined, device)
                if self.folder is None:
                    joined = apply_final_norm(self.target, joined, self.layers)
            devices.join_side_stream(joined)
            return TargetOutput(*joined.split([joined.shape[-1] - width, width], dim=-1))

        return finish

    def __call__(self, batch: TrainingBatch, prefetched: TargetOutput | None = None) -> TargetOutput:
        """The outputs of a batch: features [B, T, F*D], final [B, T, D], on the batch's device.

        prefetched: the outputs that `prefetch` has read; None: they are read now
        """
        if prefetched is None:
            prefetched = self._read_available(batch)
        if not self._is_everywhere(prefetched is not None):
            self._compute_missing(batch)
            prefetched = self._read_available(batch)
        assert prefetched is not None
        return prefetched

    def _read_available(self, batch: TrainingBatch) -> TargetOutput | None:
        """The outputs from the folder and the reader; None if the target in this process must compute some."""
        feature_read = self.prefetch(batch.on_host)
        return feature_read(batch.tokens.device) if feature_read else None

    def _read_stored(self, tokens: Tensor) -> list[Tensor] | None:
        return self.folder.read(tokens, self.layers) if self.folder else None

    def _store_received(self, documents: list[Tensor], received: list[list[Tensor]]) -> None:
        """Writes a reader's states with the final norm. It waits once for the device, not once for each document.

        documents: tokens [t] of each; received: states [t, D] of each layer
        """
        assert self.folder is not None
        with devices.use_side_stream(self.target.device):  # not behind the training's work
            final_states = torch.cat([states[-1] for states in received]).to(self.target.device)
            final_states = apply_final_norm(self.target, final_states, (self.target.num_layers,)).cpu()
        split_states = final_states.split([len(tokens) for tokens in documents])
        for tokens, states, final_state in zip(documents, received, split_states, strict=True):
            self.folder.write(tokens, [*states[:-1], final_state])

    def _compute_missing(self, batch: TrainingBatch) -> None:
        """Writes the documents that the folder lacks, and all others of their packs. All processes call it at once."""
        assert self.folder is not None
        missing_rows = {document.row for document in cut_documents(batch) if self._read_stored(document.tokens) is None}
        if missing_rows:
            missing_batch = batch.select_packs(sorted(missing_rows))
            stored_layers = self.folder.layers[:-1]  # without the final state
            output = read_outputs(self.target, missing_batch, stored_layers)
            layer_states = [*output.features.cpu().chunk(len(stored_layers), dim=-1)] if stored_layers else []
            layer_states.append(output.final.cpu())
            for document in cut_documents(missing_batch):
                self.folder.write(document.tokens, [state[document.batch_index] for state in layer_states])
        else:
            equalise_target_calls(self.target, 0)  # other processes compute
        self._is_everywhere(True)  # the others read when all is written

    def _is_everywhere(self, is_available: bool) -> bool:
        """Whether all processes that share the target have the outputs. Otherwise they compute together."""
        return min(self.target.share.gather_values(is_available)) > 0


Features = ComputedFeatures | StoredFeatures
