"""The training unroll: a drafter's steps over every slot of a text, for training and replay (unroll_plan.py)."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specdec.core.cache import UnrollCache
from specdec.heads.base import Drafter
from specdec.unroll.plan import Part, Plan


@dataclass(frozen=True)
class Unrolled:
    """States and readouts of every step, on the slots that the plan names."""

    states: list[Tensor]  # K of [B, S_d, H]
    readouts: list[Tensor]  # K of [B, S_d, R]
    plan: Plan

    def at(self, values: list[Tensor], d: int, part: Part) -> Tensor:
        """Step d of the slots that guess the goals of a part -> [M, .], in the order of `plan.steps[d - 1].goals`"""
        return values[d - 1].flatten(0, 1).index_select(0, self.plan.steps[d - 1].places[part.steps[d - 1]])


def unroll(
    drafter: Drafter, tokens: Tensor, features: Tensor, plan: Plan, *, gradient_checkpointing: bool = False
) -> Unrolled:
    """tokens [B, T], features [B, T, F*D], and a plan for their masks, on one device

    gradient_checkpointing: whether a step's activations are computed again in the backward pass, instead of being kept
    """
    h = drafter.encode(features[:, : plan.num_columns])  # the feature of column c is that of the slot before it
    if drafter.attends == "text":
        readout = _read_texts(drafter, tokens, plan, gradient_checkpointing)
        return Unrolled([h] * len(plan.steps), [readout] * len(plan.steps), plan)
    cache = UnrollCache()
    drafter.context(h, plan.positions - 1, cache)
    states, readouts = [], []
    for d, step in enumerate(plan.steps, start=1):
        if step.kept is not None:
            h = h.gather(1, step.kept[..., None].expand(-1, -1, h.shape[-1]))
        arguments = h, tokens.gather(1, step.reads), step.positions, step.seen, cache.at_step(d, step.kept)
        if gradient_checkpointing and torch.is_grad_enabled():
            h, readout = checkpoint(partial(drafter.step, d), *arguments, use_reentrant=False)
        else:
            h, readout = drafter.step(d, *arguments)
        states.append(h)
        readouts.append(readout)
    return Unrolled(states, readouts, plan)


def _read_texts(drafter: Drafter, tokens: Tensor, plan: Plan, gradient_checkpointing: bool) -> Tensor:
    """The readouts [B, columns, R] of a draft model, which reads each document from its beginning."""

    def read(tokens: Tensor, positions: Tensor, mask: Tensor | None = None) -> Tensor:
        h = drafter.encode(torch.zeros(*tokens.shape, 0, device=tokens.device))
        arguments = h, tokens, positions, mask, UnrollCache()
        if gradient_checkpointing and torch.is_grad_enabled():
            return checkpoint(partial(drafter.step, 1), *arguments, use_reentrant=False)[1]
        return drafter.step(1, *arguments)[1]

    assert plan.documents is not None
    return plan.documents.read(tokens, read)
