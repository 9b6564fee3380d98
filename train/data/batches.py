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

    def to(self, device: torch.device | str) -> "TrainingBatch":
        device = torch.device(device)
        if device.type == "cpu":
            return self.on_host
        tokens, loss_mask, documents, positions = (
            devices.send(each, device) for each in (self.tokens, self.loss_mask, self.documents, self.positions)
        )
        return TrainingBatch(tokens, loss_mask, documents, positions, host=self.on_host)

    def goals(self, supervise: str) -> Tensor:
        """[B, T] bool on the CPU: the tokens that a drafter is trained to guess.

        supervise: answers, or text for prompts too
        """
        host = self.on_host
        return host.positions > 0 if supervise == "text" else host.loss_mask

    def select(self, places: list[int]) -> "TrainingBatch":
        """Some of the batch's packs, on the CPU."""
        host = self.on_host
        return TrainingBatch(
            host.tokens[places], host.loss_mask[places], host.documents[places], host.positions[places]
        )


def collate(packs: list[list[Row]], *, length: int, pad_token: int) -> TrainingBatch:
    """Lays each pack's rows one after the other and pads to `length`."""
    tokens = torch.full((len(packs), length), pad_token)  # [B, T]
    loss_mask = torch.zeros_like(tokens, dtype=torch.bool)  # [B, T]
    documents = torch.full_like(tokens, -1)  # [B, T]
    positions = torch.zeros_like(tokens)  # [B, T]
    for index, rows in enumerate(packs):
        start = 0
        for document, row in enumerate(rows):
            place = slice(start, start + len(row.tokens))
            tokens[index, place] = torch.tensor(row.tokens)
            loss_mask[index, place] = torch.tensor(row.mask)
            loss_mask[index, start] = False  # nothing precedes it in its document, so nothing can guess it
            documents[index, place] = document
            positions[index, place] = torch.arange(len(row.tokens))
            start = place.stop
    return TrainingBatch(tokens=tokens, loss_mask=loss_mask, documents=documents, positions=positions)


def answers(batch: TrainingBatch, row: int) -> list[tuple[int, int]]:
    """Supervised stretches [start, stop) of one row of a batch."""
    keys = torch.where(batch.loss_mask[row], batch.documents[row], -1).tolist()
    cuts = [i for i in range(len(keys)) if i == 0 or keys[i] != keys[i - 1]] + [len(keys)]
    return [(a, b) for a, b in zip(cuts, cuts[1:]) if keys[a] >= 0]
