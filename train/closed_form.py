"""What is done before the first step, from the packs that training reads first: the sizes of what a head reads, and
closed-form weights (docs/methods.md, section 5)."""

from collections.abc import Iterable

import torch

from specdec.heads.base import Drafter, Head, Slots
from train import progress
from train.data.loader import Material
from train.features.outputs import read_each
from train.objective import slots

LEAST_SLOTS = 100_000  # no more are held in memory, unless the target's width needs more


def start(
    drafter: Head,
    material: Material,
    packs: Iterable[int],
    *,
    solve: bool,
    fresh: bool,
    depth: int,
    device: torch.device,
) -> int:
    """Measures what the drafter reads, and sets its weights if it has such a start.

    packs: their numbers; solve: whether to set weights; fresh: they are random
    -> how many packs the weights are from, 0 if nothing was changed, -1 if sizes were only measured
    """
    features = material.features
    if features is None or not isinstance(drafter, Drafter):
        return 0
    solve = solve and type(drafter).solve is not Drafter.solve
    if not solve and type(drafter).measure is Drafter.measure:
        return 0
    depth = 1 if drafter.depth is None else depth  # steps of one module start alike
    texts: list[Slots] = []
    coming = (material.collate([index]) for index in progress.track(packs, "first packs", unit="packs"))
    for batch, output in read_each(features, coming, device):
        texts.append(slots(batch, output, depth))
        if sum(len(text.tokens) for text in texts) > max(LEAST_SLOTS, 6 * drafter.target.width):
            break
    if not texts:
        return 0
    measured = drafter.measure(texts, fresh=fresh)
    if solve and drafter.solve(texts):
        return len(texts)
    return -1 if measured else 0
