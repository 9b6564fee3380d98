"""Which slots every step of a training unroll runs on, what they read, and which goals they guess (slot rule: heads/base.py).

All of it follows from the masks of a batch. It is computed on the CPU, so the sizes of all tensors are known before the
device has done anything.

Column c is slot c + first; a drafter that reads features has first = 1, because slot 0 has none:

    column            0     1     2    ..   T-2
    slot              1     2     3         T-1
    step 1 reads     x1,f0 x2,f1 x3,f2
    step d reads     x_d  x_(d+1) x_(d+2)         token index = column + first + d - 1
    step d guesses   x_(d+1) ...                  goal index = column + first + d, judged at the position before
"""

import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specdec.core import devices
from specdec.core.cache import UnrollCache
from specdec.core.masks import Documents
from specdec.core.span_attention import Span, spans
from specdec.heads.base import Drafter

LEAST_KEPT = 0.2  # share of the slots that the deepest steps run on at least (P-EAGLE, 2602.01469, section 4)
ROUND_SLOTS = 32  # numbers of chosen slots are multiples of it: libraries prepare each shape of a matrix product once, and keep it


@dataclass(frozen=True)
class UnrollStep:
    """One step of the unroll, on S slots of each row."""

    kept: Tensor | None  # [B, S] the places of these slots among those of the step before; None: the same slots
    reads: Tensor  # [B, S] index of the token that each slot reads
    positions: Tensor  # [B, S] of these tokens in their documents
    seen: Span | None  # the step-1 keys, or the context, that each slot sees
    goals: Tensor  # [M] the goals that this step guesses, increasing
    places: Tensor  # [M] the places of the slots that guess them, among B * S
    share: float  # of the slots with a goal, the share that runs; below 1 if they were sampled

    def tensors(self) -> list[Tensor]:
        spans = [] if self.seen is None else self.seen.tensors()
        kept = [] if self.kept is None else [self.kept]
        return [self.reads, self.positions, self.goals, self.places, *spans, *kept]

    def with_tensors(
        self, reads: Tensor, positions: Tensor, goals: Tensor, places: Tensor, *more: Tensor
    ) -> "UnrollStep":
        kept = None if self.kept is None else more[-1]
        seen = None if self.seen is None else self.seen.on(*(more if kept is None else more[:-1]))
        return replace(self, kept=kept, reads=reads, positions=positions, seen=seen, goals=goals, places=places)


@dataclass(frozen=True)
class UnrollPart:
    """Some goals that stand one after the other, and where each step has them."""

    goals: slice
    steps: list[slice]  # of `Step.goals`, for each depth


@dataclass(frozen=True)
class UnrollPlan:
    """first: the first slot; num_columns: slots of each row; goals [G, 2]: row and position of each goal, in order
    positions [B, columns]: of the slots in their documents; steps: K of them
    documents: for draft models, which read whole texts: the documents' columns, in groups of similar length
    """

    first: int
    num_columns: int
    goals: Tensor
    positions: Tensor
    steps: list[UnrollStep]
    documents: Documents | None
    numbers: list[list[int]]  # the goals of each step, as Python numbers

    def to(self, device: torch.device) -> "UnrollPlan":
        """The same plan with its tensors on a device; nothing waits for it."""
        tensors = [self.goals, self.positions]
        counts = []
        for step in self.steps:
            counts.append(len(step.tensors()))
            tensors += step.tensors()
        goals, positions, *rest = devices.move(tensors, device)
        steps = []
        for step, count in zip(self.steps, counts):
            steps.append(step.with_tensors(*rest[:count]) if device.type != "cpu" else step)
            rest = rest[count:]
        documents = self.documents and self.documents.to(device)
        return replace(self, goals=goals, positions=positions, steps=steps, documents=documents)

    def parts(self, size: int) -> Iterator[UnrollPart]:
        """All goals, `size` at a time."""
        num = len(self.goals)
        for start in range(0, num, size):
            stop = min(start + size, num)
            yield UnrollPart(
                slice(start, stop), [slice(bisect_left(n, start), bisect_left(n, stop)) for n in self.numbers]
            )


def plan_unroll(
    drafter: Drafter,
    documents: Tensor,
    positions: Tensor,
    goals: Tensor,
    *,
    depth: int,
    anchors: int | None = None,
    keep: float = 1.0,
) -> UnrollPlan:
    """documents (-1: padding), positions [B, T]; goals [B, T] bool: tokens to be guessed. All of them on the CPU

    Steps whose keys no later slot reads run on slots with a goal only.
    anchors: the number of these slots in each row, drawn at random; None: all of them
    keep: the share of these slots that goes on from step to step, drawn at random: step d runs on keep^(d - 1) of them
    """
    first, kind = drafter.first_slot, drafter.attends
    num_rows, length = documents.shape
    num = length - first
    at_slots = positions[:, first:]  # [B, columns]; below `first`: no feature of its own document
    index = torch.where(at_slots >= first, documents[:, first:], -1)
    every = torch.arange(num).expand(num_rows, -1)
    listed = goals.nonzero()  # [G, 2]
    rows, at = listed.unbind(1)
    offset = [1] * depth if kind == "text" else range(1, depth + 1)  # step d of a draft model is a later slot's step 1
    exists = [positions[rows, at] >= d + first for d in range(1, depth + 1)]  # [G]

    def judged(d: int) -> Tensor:
        """[B, columns]: slots whose step d guesses a goal"""
        wanted = torch.zeros(num_rows, num, dtype=torch.bool)
        wanted[rows[exists[d - 1]], at[exists[d - 1]] - d - first] = True
        return wanted

    steps: list[UnrollStep] = []
    # The first step that runs on chosen slots only, because no other slot reads its keys
    chosen_from = {"block": 1, "path": 2, "none": 2, "depth": depth + 1, "text": depth + 1}[kind]
    order, place, share, most = every, every, 1.0, 0
    everywhere = None if kind in ("none", "depth", "text") else spans(index)
    seen = everywhere
    for d in range(1, depth + 1):
        kept = None
        if d == chosen_from or (d > chosen_from and keep < 1):
            wanted = torch.stack([judged(e) for e in range(d, depth + 1)]).any(0)
            most = most or int(wanted.sum(1).max())
            limit = None if keep == 1 else _rounded_up(max(keep ** (d - 1), LEAST_KEPT) * most)
            limit = min((each for each in (anchors, limit) if each is not None), default=None)
            before = place
            order, place = _choose(wanted & (before >= 0), limit)
            share = int((place >= 0).sum()) / max(1, int(wanted.sum()))
            kept = before.gather(1, order).clamp(min=0)
            seen = everywhere and everywhere.of(order, index)
        column = (at - offset[d - 1] - first).clamp(min=0)
        found = place[rows, column]  # [G]
        known = (exists[d - 1] & (found >= 0)).nonzero()[:, 0]
        steps.append(
            UnrollStep(
                kept=kept,
                reads=(order + first + (0 if kind == "text" else d - 1)).clamp(max=length - 1),
                positions=at_slots.gather(1, order) + (0 if kind == "text" else d - 1),
                seen=spans(index, lag=d - 1) if kind == "depth" else seen,
                goals=known,
                places=(rows * order.shape[1] + found)[known],
                share=share,
            )
        )
    texts = Documents.of(index) if kind == "text" else None
    return UnrollPlan(first, num, listed, at_slots, steps, texts, [step.goals.tolist() for step in steps])


def _rounded_up(num: float) -> int:
    return math.ceil(num / ROUND_SLOTS) * ROUND_SLOTS


def _choose(wanted: Tensor, limit: int | None) -> tuple[Tensor, Tensor]:
    """Chooses wanted columns, at most `limit` of each row, at random. wanted [B, C] bool

    -> order [B, S] of chosen columns, in rows with fewer filled up with others; place [B, C] of each wanted column in
    it, -1 if it was not chosen
    """
    num = max(1, int(wanted.sum(1).max()))
    score = wanted.float()
    if limit is not None and num > limit:
        num, score = limit, score + torch.rand_like(score) * score
    else:
        num = min(_rounded_up(num), wanted.shape[1])
    order = score.sort(dim=1, descending=True, stable=True).indices[:, :num].sort(dim=1).values  # [B, S]
    place = torch.full_like(wanted, -1, dtype=torch.long)
    place.scatter_(1, order, torch.arange(num).expand_as(order))
    return order, torch.where(wanted, place, -1)


# The training unroll: a drafter's steps over every slot of a text, for training and replay.


@dataclass(frozen=True)
class Unrolled:
    """States and readouts of every step, on the slots that the plan names."""

    states: list[Tensor]  # K of [B, S_d, H]; of a block drafter [B, S_d, 0]
    readouts: list[Tensor]  # K of [B, S_d, R]
    plan: UnrollPlan

    def at(self, values: list[Tensor], d: int, part: UnrollPart) -> Tensor:
        """Step d of the slots that guess the goals of a part -> [M, .], in the order of `plan.steps[d - 1].goals`"""
        return values[d - 1].flatten(0, 1).index_select(0, self.plan.steps[d - 1].places[part.steps[d - 1]])


def unroll(
    drafter: Drafter, tokens: Tensor, features: Tensor, plan: UnrollPlan, *, gradient_checkpointing: bool = False
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
        h, readout = _take_step(drafter, d, *arguments, again=gradient_checkpointing)
        # Nobody reads those of blocks, and they are large
        states.append(h[..., :0].clone() if drafter.attends == "block" else h)
        readouts.append(readout)
    return Unrolled(states, readouts, plan)


def _take_step(drafter: Drafter, d: int, *arguments, again: bool) -> tuple[Tensor, Tensor]:
    """again: whether its activations are computed again in the backward pass, instead of being kept"""
    if again and torch.is_grad_enabled():
        return checkpoint(partial(drafter.step, d), *arguments, use_reentrant=False)
    return drafter.step(d, *arguments)


def _read_texts(drafter: Drafter, tokens: Tensor, plan: UnrollPlan, gradient_checkpointing: bool) -> Tensor:
    """The readouts [B, columns, R] of a draft model, which reads each document from its beginning."""

    def read(tokens: Tensor, positions: Tensor) -> Tensor:
        h = drafter.encode(torch.zeros(*tokens.shape, 0, device=tokens.device))
        return _take_step(drafter, 1, h, tokens, positions, None, UnrollCache(), again=gradient_checkpointing)[1]

    assert plan.documents is not None
    return plan.documents.read(tokens, read)
