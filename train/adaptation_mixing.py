"""Weights between the head in use and the trained one (WiSE-FT, 2109.01903): a part of what was forgotten comes back.

The share of the trained weights is chosen on old answers that are neither trained on nor judged by the gate.
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


def choose(
    shares: Sequence[float], judge: Callable[[float], Table], *, tolerance: float
) -> tuple[float, list[dict[str, Any]]]:
    """Tries shares of the trained weights, the largest first, until nothing is forgotten; else the last one is taken.

    judge(share) -> the table of the answers to choose by, {} if there are none. tolerance: as the gate's
    -> the share, and what was tried, as JSON
    """
    tried: list[dict[str, Any]] = []
    for share in sorted(shares, reverse=True):
        table = judge(share)
        fall = 1 - table[ALL]["after"] / table[ALL]["before"] if table else None
        tried.append({"share": share, "fall": fall, "forgotten": forgotten(table, tolerance)})
        if not tried[-1]["forgotten"]:
            break
    return tried[-1]["share"], tried
