"""Packed conversations as tensors, and the supervised stretches in them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from specdec.core import devices
from specdec.text.conversations import Row


@dataclass(frozen=True)
class TrainingBatch:
    """Packed conversations.

    Its masks stay on the host, too, so that computations with masks alone wait for no device.
    """

    tokens: Tensor  # [B, T] int64
    loss_mask: Tensor  # [B, T] bool: the token is supervised; False at the start of a document
    documents: Tensor  # [B, T] int64: number of the document in its pack; -1: padding
    positions: Tensor  # [B, T] int64: position in the document; 0 for padding

    host: "TrainingBatch | None" = None  # the same batch on the CPU; None: this one is there

    @property
    def on_host(self) -> "TrainingBatch":
        """The batch on the CPU."""
        return self.host or self

    def move_to(self, device: torch.device | str) -> "TrainingBatch":
        """The batch on a device, without a wait for it."""
        device = torch.device(device)
        if device.type == "cpu":
            return self.on_host
        return replace(self._apply(partial(devices.upload_tensor, device=device)), host=self.on_host)

    def select_packs(self, pack_indices: list[int]) -> "TrainingBatch":
        """Some of the batch's packs, on the CPU."""
        return self.on_host._apply(lambda tensor: tensor[pack_indices])

    def _apply(self, function: Callable[[Tensor], Tensor]) -> "TrainingBatch":
        return TrainingBatch(
            function(self.tokens), function(self.loss_mask), function(self.documents), function(self.positions)
        )

    def goal_mask(self, supervise: str) -> Tensor:
        """[B, T] bool on the CPU: the tokens that a drafter is trained to guess.

        supervise: answers; text: tokens of prompts, too
        """
        host = self.on_host
        return host.positions > 0 if supervise == "text" else host.loss_mask


def collate(packs: list[list[Row]], *, length: int, pad_token: int) -> TrainingBatch:
    """Packs as a batch: the rows of each pack one after the other, then padding up to `length` tokens."""
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
    """The supervised stretches [start, stop) of one row of a batch."""
    return find_stretches(torch.where(batch.loss_mask[row], batch.documents[row], -1))


def find_stretches(numbers: Tensor) -> list[tuple[int, int]]:
    """The stretches [start, stop) of equal numbers of 0 or more. numbers [T]"""
    values, lengths = torch.unique_consecutive(numbers, return_counts=True)
    stretches = zip(values.tolist(), lengths.tolist(), lengths.cumsum(0).tolist())
    return [(stop - length, stop) for value, length, stop in stretches if value >= 0]
