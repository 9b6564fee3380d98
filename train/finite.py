"""Losses that are not finite, and the rows that they come from."""

import math
from collections.abc import Callable, Sequence

import torch
from accelerate.utils import gather_object

from specdec.target.model import TargetOutput
from train.data.rows import Batch
from train.objective import Loss


class NotFiniteLoss(ValueError):
    """A step's loss was not finite. Nothing of the step was kept."""


@torch.no_grad()
def rows_not_finite(
    objective: Callable[[Batch, TargetOutput | None], Loss],
    read: Sequence[tuple[list[list[str]], Batch, TargetOutput | None]],
) -> list[str]:
    """Ids of the rows whose loss, computed alone, is not finite, in all processes; in the order of the packs.

    objective: without the wrapper that synchronises gradients, with the weights before the step
    read: of each micro-batch of this process the ids of each pack's rows, the batch and the target's outputs
    All processes must call this. A loss that depends on random numbers may be finite when it is computed again.
    """
    found = []
    for packs, batch, output in read:
        for place, pack in enumerate(packs):
            for document, row in enumerate(pack):
                part, part_output = _row(batch, output, place, document)
                if part.loss_mask.any() and not math.isfinite(float(objective(part, part_output).total)):
                    found.append(row)
    return list(dict.fromkeys(gather_object(found)))  # once, if several processes read the same


def _row(batch: Batch, output: TargetOutput | None, place: int, document: int) -> tuple[Batch, TargetOutput | None]:
    """A document of a pack as a batch of its own, [1, T of the document]."""
    inside = (batch.on_host.documents[place] == document).nonzero()[:, 0]
    span = (slice(place, place + 1), slice(int(inside[0]), int(inside[-1]) + 1))
    host = batch.on_host
    part = Batch(
        host.tokens[span], host.loss_mask[span], torch.zeros_like(host.documents[span]), host.positions[span]
    ).to(batch.tokens.device)
    return part, output and TargetOutput(output.features[span], output.final[span])


def named(rows: list[str], num: int = 6) -> str:
    """Some of the rows, for a sentence."""
    if not rows:
        return "no row alone gives it, so look at the learning rate first"
    return f"row{'s' * (len(rows) > 1)} {', '.join(rows[:num])}{', ...' if len(rows) > num else ''}"
