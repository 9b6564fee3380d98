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
from specdec.core.span_attention import Span, find_spans
from specdec.heads.base import Drafter

MIN_SLOT_SHARE = 0.2  # share of the slots that the deepest steps run on at least (P-EAGLE, 2602.01469, section 4)
SLOT_MULTIPLE = 32  # numbers of chosen slots are multiples of it: libraries prepare each shape of a matrix product once, and keep it


@dataclass(frozen=True)
class UnrollStep:
    """One step of the unroll, on S slots of each row."""

    kept_slots: Tensor | None  # [B, S] the places of these slots among those of the step before; None: the same slots
    token_indices: Tensor  # [B, S] index of the token that each slot reads
    positions: Tensor  # [B, S] of these tokens in their documents
    key_spans: Span | None  # the step-1 keys, or the context, that each slot sees
    goals: Tensor  # [M] the goals that this step guesses, increasing
    slot_indices: Tensor  # [M] the places of the slots that guess them, among B * S
    slot_share: float  # of the slots with a goal, the share that runs; below 1 if they were sampled

    def list_tensors(self) -> list[Tensor]:
        span_tensors = [] if self.key_spans is None else self.key_spans.tensors()
        kept_tensors = [] if self.kept_slots is None else [self.kept_slots]
        return [self.token_indices, self.positions, self.goals, self.slot_indices, *span_tensors, *kept_tensors]

    def with_tensors(
        self, token_indices: Tensor, positions: Tensor, goals: Tensor, slot_indices: Tensor, *optional_tensors: Tensor
    ) -> "UnrollStep":
        kept_slots = None if self.kept_slots is None else optional_tensors[-1]
        key_spans = (
            None
            if self.key_spans is None
            else self.key_spans.with_tensors(*(optional_tensors if kept_slots is None else optional_tensors[:-1]))
        )
        return replace(
            self,
            kept_slots=kept_slots,
            token_indices=token_indices,
            positions=positions,
            key_spans=key_spans,
            goals=goals,
            slot_indices=slot_indices,
        )


@dataclass(frozen=True)
class GoalChunk:
    """Some goals that stand one after the other, and where each step has them."""

    goals: slice
    step_goals: list[slice]  # of `Step.goals`, for each depth


@dataclass(frozen=True)
class UnrollPlan:
    """first: the first slot; num_columns: slots of each row; goals [G, 2]: row and position of each goal, in order
    positions [B, columns]: of the slots in their documents; steps: K of them
    documents: for draft models, which read whole texts: the documents' columns, in groups of similar length
    """

    first_slot: int
    num_columns: int
    goals: Tensor
    positions: Tensor
    steps: list[UnrollStep]
    documents: Documents | None
    goal_numbers: list[list[int]]  # the goals of each step, as Python numbers

    def move_to(self, device: torch.device) -> "UnrollPlan":
        """The same plan with its tensors on a device; nothing waits for it."""
        tensors = [self.goals, self.positions]
        counts = []
        for step in self.steps:
            counts.append(len(step.list_tensors()))
            tensors += step.list_tensors()
        goals, positions, *step_tensors = devices.upload_tensors(tensors, device)
        steps = []
        for step, count in zip(self.steps, counts):
            steps.append(step.with_tensors(*step_tensors[:count]) if device.type != "cpu" else step)
            step_tensors = step_tensors[count:]
        documents = self.documents and self.documents.move_to(device)
        return replace(self, goals=goals, positions=positions, steps=steps, documents=documents)

    def split_goals(self, size: int) -> Iterator[GoalChunk]:
        """All goals, `size` at a time."""
        num_goals = len(self.goals)
        for start in range(0, num_goals, size):
            stop = min(start + size, num_goals)
            yield GoalChunk(
                slice(start, stop),
                [slice(bisect_left(numbers, start), bisect_left(numbers, stop)) for numbers in self.goal_numbers],
            )


def plan_unroll(
    drafter: Drafter,
    documents: Tensor,
    positions: Tensor,
    goals: Tensor,
    *,
    depth: int,
    max_anchors: int | None = None,
    keep_share: float = 1.0,
) -> UnrollPlan:
    """documents (-1: padding), positions [B, T]; goals [B, T] bool: tokens to be guessed. All of them on the CPU

    Steps whose keys no later slot reads run on slots with a goal only.
    anchors: the number of these slots in each row, drawn at random; None: all of them
    keep: the share of these slots that goes on from step to step, drawn at random: step d runs on keep^(d - 1) of them
    """
    first_slot, context_kind = drafter.first_slot, drafter.context_kind
    num_rows, length = documents.shape
    num_columns = length - first_slot
    slot_positions = positions[:, first_slot:]  # [B, columns]; below `first`: no feature of its own document
    slot_documents = torch.where(slot_positions >= first_slot, documents[:, first_slot:], -1)
    all_columns = torch.arange(num_columns).expand(num_rows, -1)
    goal_list = goals.nonzero()  # [G, 2]
    goal_rows, goal_positions = goal_list.unbind(1)
    lags = (
        [1] * depth if context_kind == "text" else range(1, depth + 1)
    )  # step d of a draft model is a later slot's step 1
    has_slot = [positions[goal_rows, goal_positions] >= d + first_slot for d in range(1, depth + 1)]  # [G]

    def find_guessing_slots(d: int) -> Tensor:
        """[B, columns]: slots whose step d guesses a goal"""
        guessing_mask = torch.zeros(num_rows, num_columns, dtype=torch.bool)
        guessing_mask[goal_rows[has_slot[d - 1]], goal_positions[has_slot[d - 1]] - d - first_slot] = True
        return guessing_mask

    steps: list[UnrollStep] = []
    # The first step that runs on chosen slots only, because no other slot reads its keys
    first_reduced_step = {"block": 1, "path": 2, "none": 2, "depth": depth + 1, "text": depth + 1}[context_kind]
    columns, slot_of_column, slot_share, max_needed = all_columns, all_columns, 1.0, 0
    all_spans = None if context_kind in ("none", "depth", "text") else find_spans(slot_documents)
    key_spans = all_spans
    for d in range(1, depth + 1):
        kept_slots = None
        if d == first_reduced_step or (d > first_reduced_step and keep_share < 1):
            needed_mask = torch.stack([find_guessing_slots(later) for later in range(d, depth + 1)]).any(0)
            max_needed = max_needed or int(needed_mask.sum(1).max())
            max_slots = (
                None if keep_share == 1 else _raise_to_multiple(max(keep_share ** (d - 1), MIN_SLOT_SHARE) * max_needed)
            )
            max_slots = min((bound for bound in (max_anchors, max_slots) if bound is not None), default=None)
            previous_slots = slot_of_column
            columns, slot_of_column = _choose_columns(needed_mask & (previous_slots >= 0), max_slots)
            slot_share = int((slot_of_column >= 0).sum()) / max(1, int(needed_mask.sum()))
            kept_slots = previous_slots.gather(1, columns).clamp(min=0)
            key_spans = all_spans and all_spans.select_slots(columns, slot_documents)
        goal_columns = (goal_positions - lags[d - 1] - first_slot).clamp(min=0)
        goal_slots = slot_of_column[goal_rows, goal_columns]  # [G]
        guessed_goals = (has_slot[d - 1] & (goal_slots >= 0)).nonzero()[:, 0]
        steps.append(
            UnrollStep(
                kept_slots=kept_slots,
                token_indices=(columns + first_slot + (0 if context_kind == "text" else d - 1)).clamp(max=length - 1),
                positions=slot_positions.gather(1, columns) + (0 if context_kind == "text" else d - 1),
                key_spans=find_spans(slot_documents, lag=d - 1) if context_kind == "depth" else key_spans,
                goals=guessed_goals,
                slot_indices=(goal_rows * columns.shape[1] + goal_slots)[guessed_goals],
                slot_share=slot_share,
            )
        )
    text_documents = Documents.from_index(slot_documents) if context_kind == "text" else None
    return UnrollPlan(
        first_slot,
        num_columns,
        goal_list,
        slot_positions,
        steps,
        text_documents,
        [step.goals.tolist() for step in steps],
    )


def _raise_to_multiple(num: float) -> int:
    return math.ceil(num / SLOT_MULTIPLE) * SLOT_MULTIPLE


def _choose_columns(needed_mask: Tensor, max_slots: int | None) -> tuple[Tensor, Tensor]:
    """Chooses wanted columns, at most `limit` of each row, at random. wanted [B, C] bool

    -> order [B, S] of chosen columns, in rows with fewer filled up with others; place [B, C] of each wanted column in
    it, -1 if it was not chosen
    """
    num_slots = max(1, int(needed_mask.sum(1).max()))
    score = needed_mask.float()
    if max_slots is not None and num_slots > max_slots:
        num_slots, score = max_slots, score + torch.rand_like(score) * score
    else:
        num_slots = min(_raise_to_multiple(num_slots), needed_mask.shape[1])
    columns = score.sort(dim=1, descending=True, stable=True).indices[:, :num_slots].sort(dim=1).values  # [B, S]
    slot_of_column = torch.full_like(needed_mask, -1, dtype=torch.long)
    slot_of_column.scatter_(1, columns, torch.arange(num_slots).expand_as(columns))
    return columns, torch.where(needed_mask, slot_of_column, -1)


# The training unroll: a drafter's steps over every slot of a text, for training and replay.


@dataclass(frozen=True)
class UnrollOutput:
    """States and readouts of every step, on the slots that the plan names."""

    states: list[Tensor]  # K of [B, S_d, H]; of a block drafter [B, S_d, 0]
    readouts: list[Tensor]  # K of [B, S_d, R]
    plan: UnrollPlan

    def select(self, values: list[Tensor], d: int, chunk: GoalChunk) -> Tensor:
        """Step d of the slots that guess the goals of a part -> [M, .], in the order of `plan.steps[d - 1].goals`"""
        return values[d - 1].flatten(0, 1).index_select(0, self.plan.steps[d - 1].slot_indices[chunk.step_goals[d - 1]])


def unroll(
    drafter: Drafter, tokens: Tensor, features: Tensor, plan: UnrollPlan, *, gradient_checkpointing: bool = False
) -> UnrollOutput:
    """tokens [B, T], features [B, T, F*D], and a plan for their masks, on one device

    gradient_checkpointing: whether a step's activations are computed again in the backward pass, instead of being kept
    """
    h = drafter.encode(features[:, : plan.num_columns])  # the feature of column c is that of the slot before it
    if drafter.context_kind == "text":
        readout = _read_documents(drafter, tokens, plan, gradient_checkpointing)
        return UnrollOutput([h] * len(plan.steps), [readout] * len(plan.steps), plan)
    cache = UnrollCache()
    drafter.context(h, plan.positions - 1, cache)
    states, readouts = [], []
    for d, step in enumerate(plan.steps, start=1):
        if step.kept_slots is not None:
            h = h.gather(1, step.kept_slots[..., None].expand(-1, -1, h.shape[-1]))
        arguments = (
            h,
            tokens.gather(1, step.token_indices),
            step.positions,
            step.key_spans,
            cache.at_step(d, step.kept_slots),
        )
        h, readout = _take_step(drafter, d, *arguments, recompute=gradient_checkpointing)
        # Nobody reads those of blocks, and they are large
        states.append(h[..., :0].clone() if drafter.context_kind == "block" else h)
        readouts.append(readout)
    return UnrollOutput(states, readouts, plan)


def _take_step(drafter: Drafter, d: int, *arguments, recompute: bool) -> tuple[Tensor, Tensor]:
    """again: whether its activations are computed again in the backward pass, instead of being kept"""
    if recompute and torch.is_grad_enabled():
        return checkpoint(partial(drafter.step, d), *arguments, use_reentrant=False)
    return drafter.step(d, *arguments)


def _read_documents(drafter: Drafter, tokens: Tensor, plan: UnrollPlan, gradient_checkpointing: bool) -> Tensor:
    """The readouts [B, columns, R] of a draft model, which reads each document from its beginning."""

    def read_group(tokens: Tensor, positions: Tensor) -> Tensor:
        h = drafter.encode(torch.zeros(*tokens.shape, 0, device=tokens.device))
        return _take_step(drafter, 1, h, tokens, positions, None, UnrollCache(), recompute=gradient_checkpointing)[1]

    assert plan.documents is not None
    return plan.documents.read(tokens, read_group)
