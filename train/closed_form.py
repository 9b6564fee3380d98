"""Closed-form weights before the first step, from the packs that training reads first (docs/methods.md, section 5)."""

from collections.abc import Iterable

import torch

from specdec.drafter import Drafter, Head, Slots
from train.features import read_each
from train.loader import Material
from train.objective import slots

LEAST_SLOTS = 30_000  # no more are held in memory, unless the target's width needs more


def solve(drafter: Head, material: Material, packs: Iterable[int], *, depth: int, device: torch.device) -> int:
    """Sets the drafter's weights, if it has such a start. packs: their numbers -> how many were read, 0 if none was"""
    features = material.features
    if features is None or not isinstance(drafter, Drafter) or type(drafter).solve is Drafter.solve:
        return 0
    texts: list[Slots] = []
    for batch, output in read_each(features, (material.collate([index]) for index in packs), device):
        texts.append(slots(batch, output, depth))
        if sum(len(text.tokens) for text in texts) > max(LEAST_SLOTS, 6 * drafter.target.width):
            break
    return len(texts) if texts and drafter.solve(texts) else 0
