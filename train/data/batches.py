"""Packed conversations as tensors, and the supervised stretches in them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core import devices
from specdec.text.conversations import Row


@dataclass(frozen=True)
class TrainingBatch:
    """Packed conversations. What follows from masks alone is computed on the host, without waiting for a device."""

    tokens: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool, True where the token is supervised, never at the start of a document
    documents: Tensor  # [B, T] int64, which packed document, -1 for padding
    positions: Tensor  # [B, T] int64, position inside its own document, 0 for padding

    host: "TrainingBatch | None" = None  # the same on the CPU; None: it is there

    @property
    def on_host(self) -> "TrainingBatch":
        return self.host or self

    def move_to(self, device: torch.device | str) -> "TrainingBatch":
        device = torch.device(device)
        if device.type == "cpu":
            return self.on_host
        tokens, loss_mask, documents, positions = (
            devices.upload_tensor(tensor, device)
            for tensor in (self.tokens, self.loss_mask, self.documents, self.positions)
        )
        return TrainingBatch(tokens, loss_mask, documents, positions, host=self.on_host)

    def goal_mask(self, supervise: str) -> Tensor:
        """[B, T] bool on the CPU: the tokens that a drafter is trained to guess.

        supervise: answers, or text for prompts too
        """
        host = self.on_host
        return host.positions > 0 if supervise == "text" else host.loss_mask

    def select_packs(self, pack_indices: list[int]) -> "TrainingBatch":
        """Some of the batch's packs, on the CPU."""
        host = self.on_host
        return TrainingBatch(
            host.tokens[pack_indices],
            host.loss_mask[pack_indices],
            host.documents[pack_indices],
            host.positions[pack_indices],
        )


def collate(packs: list[list[Row]], *, length: int, pad_token: int) -> TrainingBatch:
    """Lays each pack's rows one after the other and pads to `length`."""
    tokens = torch.full((len(packs), length), pad_token)  # [B, T]
    loss_mask = torch.zeros_like(tokens, dtype=torch.bool)  # [B, T]
    documents = torch.full_like(tokens, -1)  # [B, T]
    positions = torch.zeros_like(tokens)  # [B, T]
    for pack_index, rows in enumerate(packs):
        start = 0
        for document, row in enumerate(rows):
            columns = slice(start, start + len(row.tokens))
            tokens[pack_index, columns] = torch.tensor(row.tokens)
            loss_mask[pack_index, columns] = torch.tensor(row.mask)
            loss_mask[pack_index, start] = False  # nothing precedes it in its document, so nothing can guess it
            documents[pack_index, columns] = document
            positions[pack_index, columns] = torch.arange(len(row.tokens))
            start = columns.stop
    return TrainingBatch(tokens=tokens, loss_mask=loss_mask, documents=documents, positions=positions)


def find_answers(batch: TrainingBatch, row: int) -> list[tuple[int, int]]:
    """Supervised stretches [start, stop) of one row of a batch."""
    answer_keys = torch.where(batch.loss_mask[row], batch.documents[row], -1).tolist()
    cuts = [i for i in range(len(answer_keys)) if i == 0 or answer_keys[i] != answer_keys[i - 1]] + [len(answer_keys)]
    return [(start, stop) for start, stop in zip(cuts, cuts[1:]) if answer_keys[start] >= 0]
