"""The learning rate's schedule, and which parameters decay."""

import functools
import math

import torch
from torch import nn


def schedule(
    optimizer: torch.optim.Optimizer, *, steps: int, warmup: int, final: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """Linear warm-up, then a cosine down to `final` of the peak. A parameter group with a `delay` waits for so many steps
    with a rate of 0 before its warm-up begins."""

    def factor(step: int, delay: int) -> float:
        if step < warmup + delay:
            return max(0, step - delay + 1) / (warmup + 1)
        progress = (step - warmup - delay) / max(1, steps - warmup - delay)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    delays = [group.get("delay", 0) for group in optimizer.param_groups]
    return torch.optim.lr_scheduler.LambdaLR(optimizer, [functools.partial(factor, delay=delay) for delay in delays])


def parameter_groups(module: nn.Module, weight_decay: float, *, adapter: dict | None = None) -> list[dict]:
    """Matrices decay, norms do not. adapter: lr and delay of the target's adapter, if the drafter has one"""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    own = [p for name, p in trained.items() if not name.startswith("adapter.")]
    groups = [
        {"params": [p for p in own if p.dim() > 1], "weight_decay": weight_decay},
        {"params": [p for p in own if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if adapter is not None:
        adapted = [p for name, p in trained.items() if name.startswith("adapter.")]
        groups.append({"params": adapted, "weight_decay": 0.0, **adapter})
    return groups
