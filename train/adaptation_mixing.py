"""Weights between the head in use and the trained one (WiSE-FT, 2109.01903): a part of what was forgotten comes back.

The share of the trained weights is chosen on old answers that are neither trained on nor judged by the gate. If the gate refuses this
share for nothing but forgetting, the next smaller one is judged.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from train.adaptation_judging import ALL, Table, forgotten

Tensors = dict[str, Tensor]


def mix(start: Tensors, trained: Tensors, share: float) -> Tensors:
    """(1 - share) * start + share * trained, in the types of `trained`. Tensors of integers are those of `trained`.

    Raises ValueError if names or shapes differ.
    """
    if {name: each.shape for name, each in start.items()} != {name: each.shape for name, each in trained.items()}:
        raise ValueError("The trained head has other tensors than the one it comes from: give shares=1.")
    return {
        name: start[name].double().lerp(new.double(), share).to(new.dtype) if new.is_floating_point() else new
        for name, new in trained.items()
    }


def tried(share: float, answers: str, table: Table, tolerance: float) -> dict[str, Any]:
    """What a share forgets, as JSON. answers: whose table it is, for the page; table: {} without old answers"""
    fall = 1 - table[ALL]["after"] / table[ALL]["before"] if table else None
    return {"share": share, "answers": answers, "fall": fall, "forgotten": forgotten(table, tolerance)}


def choose(
    shares: Sequence[float], judge: Callable[[float], Table], *, tolerance: float
) -> tuple[float, list[dict[str, Any]]]:
    """The first share by which nothing is forgotten, or else the last one, and what was tried.

    shares: of the trained weights, the largest first; judge(share) -> the table of the answers to choose by
    tolerance: as the gate's
    """
    looks: list[dict[str, Any]] = []
    for share in shares:
        looks.append(tried(share, "to choose by", judge(share), tolerance))
        if not looks[-1]["forgotten"]:
            break
    return looks[-1]["share"], looks
