"""The training unroll: the slots of each step, what they read and which goals they guess (slot rule: heads/base.py).

The plan follows from the masks of a batch. It is computed on the CPU, so all sizes are known without a wait.

Column c is slot c + first_slot. A drafter that reads features has first_slot = 1, because slot 0 has none:

    column            0     1     2    ..   T-2
    slot              1     2     3         T-1
    step 1 reads     x1,f0 x2,f1 x3,f2
    step d reads     x_d  x_(d+1) x_(d+2)         token index = column + first_slot + d - 1
    step d guesses   x_(d+1) ...                  goal index = column + first_slot + d
"""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from specdec.core import devices
from specdec.core.cache import UnrollCache
from specdec.core.context_parallel import WHOLE_TEXT, TextShare
from specdec.core.masks import Documents
from specdec.core.span_attention import Span, find_spans
from specdec.heads.base import Drafter

MIN_SLOT_SHARE = 0.2  # lower bound of the share of slots that the deepest steps run on (P-EAGLE, 2602.01469, section 4)
SLOT_MULTIPLE = (
    32  # Numbers of selected slots are multiples of it: libraries prepare each shape of a matrix product once.
)
FIRST_REDUCED_STEP = {"block": 1, "path": 2, "none": 2}  # by context kind: first step whose keys no other slot reads


@dataclass(frozen=True)
class UnrollStep:
    """One step of the unroll, on S slots of each row."""

    kept_slots: Tensor | None  # [B, S] indices of these slots among those of the step before; None: the same slots
    token_indices: Tensor  # [B, S] index of the token that each slot reads
    positions: Tensor  # [B, S] positions of these tokens in their documents
    key_spans: Span | None  # visible keys of each slot: keys of step 1, or of the context; None: no span
    goals: Tensor  # [M] numbers of the goals that this step guesses, increasing
    slot_indices: Tensor  # [M] indices of the slots that guess them, among B * S
    slot_share: float  # share of the slots with a goal that runs; below 1 if slots were sampled

    def list_tensors(self) -> list[Tensor]:
        """All tensors of the step, in the order that `with_tensors` takes."""
        kept_tensors = [] if self.kept_slots is None else [self.kept_slots]
        span_tensors = [] if self.key_spans is None else self.key_spans.tensors()
        return [self.token_indices, self.positions, self.goals, self.slot_indices, *kept_tensors, *span_tensors]

    def with_tensors(
        self, token_indices: Tensor, positions: Tensor, goals: Tensor, slot_indices: Tensor, *optional_tensors: Tensor
    ) -> "UnrollStep":
        """The same step with other tensors, such as copies on a device."""
        num_kept = 0 if self.kept_slots is None else 1
        kept_slots = optional_tensors[0] if num_kept else None
        key_spans = self.key_spans and self.key_spans.with_tensors(*optional_tensors[num_kept:])
        return UnrollStep(kept_slots, token_indices, positions, key_spans, goals, slot_indices, self.slot_share)


@dataclass(frozen=True)
class GoalChunk:
    """Consecutive goals, and their ranges in each step."""

    goals: slice
    step_goals: list[slice]  # for each depth, the range of `UnrollStep.goals`


@dataclass(frozen=True)
class UnrollPlan:
    """The steps of an unroll over B rows of T tokens."""

    first_slot: int  # 1 if step 1 reads a feature, else 0
    num_columns: int  # slots of each row
    goals: Tensor  # [G, 2] row and index of each goal, in order
    positions: Tensor  # [B, columns] positions of this process' slots in their documents
    steps: list[UnrollStep]
    documents: Documents | None  # columns of each document, for draft models, which read whole documents
    goal_numbers: list[list[int]]  # `goals` of each step as Python numbers, which need no wait for a device
    share: TextShare = WHOLE_TEXT  # the slots of this process

    @property
    def columns(self) -> slice:
        """The columns of this process' slots."""
        return self.share.select(self.num_columns)

    def move_to(self, device: torch.device) -> "UnrollPlan":
        """The same plan with its tensors on a device. Nothing waits for the copy."""
        if device.type == "cpu":
            return self
        step_tensors = [step.list_tensors() for step in self.steps]
        tensors = iter(devices.upload_tensors([self.goals, self.positions, *chain(*step_tensors)], device))
        goals, positions = next(tensors), next(tensors)
        steps = [step.with_tensors(*islice(tensors, len(old))) for step, old in zip(self.steps, step_tensors)]
        documents = self.documents and self.documents.move_to(device)
        return replace(self, goals=goals, positions=positions, steps=steps, documents=documents)

    def split_goals(self, size: int) -> Iterator[GoalChunk]:
        """Yields all goals in chunks of `size`."""
        num_goals = len(self.goals)
        for start in range(0, max(1, num_goals), size):  # an empty one without goals, so that all gradients exist
            stop = min(start + size, num_goals)
            bounds = [(bisect_left(numbers, start), bisect_left(numbers, stop)) for numbers in self.goal_numbers]
            yield GoalChunk(slice(start, stop), [slice(*bound) for bound in bounds])


@dataclass(frozen=True)
class _Selection:
    """The S slots of each row that a step runs on."""

    columns: Tensor  # [B, S] columns of these slots, increasing; rows with fewer are filled up with other columns
    slot_of_column: Tensor  # [B, C] index of each needed column among these slots, -1 for all other columns
    kept_slots: Tensor | None = None  # [B, S] field of the same name of UnrollStep
    share: float = 1.0  # share of the needed slots that was selected


def plan_unroll(
    drafter: Drafter,
    documents: Tensor,
    positions: Tensor,
    goals: Tensor,
    *,
    depth: int,
    max_anchors: int | None = None,
    keep_share: float = 1.0,
    share: TextShare = WHOLE_TEXT,
) -> UnrollPlan:
    """Plans which slots each step runs on, what they read and which goals they guess. All tensors are on the CPU.

    documents [B, T]: document number of each token, -1 for padding
    positions [B, T]: position of each token in its document
    goals [B, T] bool: tokens to be guessed
    depth: number of steps, K
    max_anchors: upper bound of the slots of a row, which are then drawn at random; None: no bound. A part has its share
    keep_share: share of the slots that the next step keeps, drawn at random: step d runs on keep_share^(d - 1) of them
    share: the part of the slots that this process runs, with the goals that they guess

    Steps whose keys no other slot reads run on slots with a goal only.
    Raises ValueError for a window that is no longer than the steps.
    """
    drafter.check_window(depth)
    # Slots: one before the first feature of its document belongs to no document
    first_slot, context_kind = drafter.first_slot, drafter.context_kind
    num_rows, length = documents.shape
    num_columns = length - first_slot
    slot_positions = positions[:, first_slot:]  # [B, C]
    slot_documents = torch.where(slot_positions >= first_slot, documents[:, first_slot:], -1)
    selection = _select_part(share, num_rows, num_columns)

    # Goals: the d-th step guesses those that have d tokens before them in their document
    goal_list = _list_goals(goals, share, first_slot=first_slot, depth=depth)  # [G, 2]
    goal_rows, goal_indices = goal_list.unbind(1)
    has_slot = [positions[goal_rows, goal_indices] >= d + first_slot for d in range(1, depth + 1)]  # [G] each

    def find_guessing_slots(d: int) -> Tensor:
        """Mask [B, C] of the slots whose step d guesses a goal."""
        guessing_mask = torch.zeros(num_rows, num_columns, dtype=torch.bool)
        guessing_mask[goal_rows[has_slot[d - 1]], goal_indices[has_slot[d - 1]] - d - first_slot] = True
        return guessing_mask & (selection.slot_of_column >= 0)

    # Keys: all slots of their document up to the slot; modules of MTP see the keys of their own depth
    all_spans = find_spans(slot_documents) if context_kind in ("block", "path") else None
    key_spans = all_spans and _take_part(all_spans, slot_documents, selection.columns, share)
    steps: list[UnrollStep] = []
    selections = _select_slots(
        selection,
        find_guessing_slots,
        first_reduced_step=FIRST_REDUCED_STEP.get(context_kind, depth + 1),
        depth=depth,
        max_anchors=max_anchors and math.ceil(max_anchors / share.size),
        keep_share=keep_share,
    )
    for d, step_selection in enumerate(selections, start=1):
        columns = step_selection.columns
        if step_selection.kept_slots is not None:
            key_spans = all_spans and all_spans.select_slots(columns, slot_documents)
        elif context_kind == "depth":
            key_spans = _take_part(find_spans(slot_documents, lag=d - 1), slot_documents, columns, share, lag=d - 1)

        # Goals of this step: those whose slot was selected. Step d of a draft model is step 1 of a later slot
        lag = 1 if context_kind == "text" else d
        guessed_goals, slot_indices = _find_guesses(step_selection, goal_list, has_slot[d - 1], lag + first_slot)
        step = UnrollStep(
            kept_slots=step_selection.kept_slots,
            token_indices=(columns + first_slot + lag - 1).clamp(max=length - 1),
            positions=slot_positions.gather(1, columns) + lag - 1,
            key_spans=key_spans,
            goals=guessed_goals,
            slot_indices=slot_indices,
            slot_share=step_selection.share,
        )
        steps.append(step)
    text_documents = Documents.from_index(slot_documents) if context_kind == "text" else None
    goal_numbers = [step.goals.tolist() for step in steps]
    positions = slot_positions[:, share.select(num_columns)]
    return UnrollPlan(first_slot, num_columns, goal_list, positions, steps, text_documents, goal_numbers, share)


def _find_guesses(selection: _Selection, goals: Tensor, has_slot: Tensor, distance: int) -> tuple[Tensor, Tensor]:
    """Numbers [M] of the goals that a step guesses, and the indices [M] of the slots that do, among B * S.

    goals [G, 2]: row and index; has_slot [G] bool: goals with tokens enough before them; distance: index of a goal
    minus the column of its slot
    """
    rows, indices = goals.unbind(1)
    slots = selection.slot_of_column[rows, (indices - distance).clamp(min=0)]  # [G]
    guessed_goals = (has_slot & (slots >= 0)).nonzero()[:, 0]
    return guessed_goals, (rows * selection.columns.shape[1] + slots)[guessed_goals]


def _select_part(share: TextShare, num_rows: int, num_columns: int) -> _Selection:
    """The slots of a process."""
    part = share.select(num_columns)
    columns = torch.arange(part.start, part.stop).expand(num_rows, -1)
    slot_of_column = torch.full((num_rows, num_columns), -1)
    slot_of_column[:, part] = torch.arange(part.stop - part.start)
    return _Selection(columns, slot_of_column)


def _list_goals(goals: Tensor, share: TextShare, *, first_slot: int, depth: int) -> Tensor:
    """Row and index [G, 2] of the goals; of a part of the slots only those that its steps reach."""
    goal_list = goals.nonzero()
    if share.size == 1:
        return goal_list
    part = share.select(goals.shape[1] - first_slot)
    distances = goal_list[:, 1] - first_slot - part.start  # from the first slot of the part
    return goal_list[(distances > 0) & (distances < part.stop - part.start + depth)]


def _take_part(spans: Span, documents: Tensor, columns: Tensor, share: TextShare, *, lag: int = 0) -> Span:
    """The spans of a process' slots. documents [B, C], lag: arguments of `find_spans`; columns [B, S]: their columns"""
    return spans if share.size == 1 else spans.select_slots(columns, documents, lag=lag)


def _select_slots(
    selection: _Selection,
    find_guessing_slots: Callable[[int], Tensor],
    *,
    first_reduced_step: int,
    depth: int,
    max_anchors: int | None,
    keep_share: float,
) -> Iterator[_Selection]:
    """Yields the slots of each step: at first `selection`, from first_reduced_step on those that guess a goal then or
    later.

    The other arguments are those of `plan_unroll`.
    """
    max_needed, is_own_column = 0, selection.slot_of_column >= 0  # [B, C]
    for d in range(1, depth + 1):
        if d < first_reduced_step or (d > first_reduced_step and keep_share == 1):
            selection = replace(selection, kept_slots=None)
            yield selection
            continue
        needed_mask = torch.stack([find_guessing_slots(later) for later in range(d, depth + 1)]).any(0)
        max_needed = max_needed or int(needed_mask.sum(1).max())
        bounds = [] if max_anchors is None else [max_anchors]
        if keep_share < 1:
            bounds.append(_raise_to_multiple(max(keep_share ** (d - 1), MIN_SLOT_SHARE) * max_needed))
        previous_slots = selection.slot_of_column
        columns, slot_of_column = _choose_columns(
            needed_mask & (previous_slots >= 0), is_own_column, min(bounds, default=None)
        )
        share = int((slot_of_column >= 0).sum()) / max(1, int(needed_mask.sum()))
        selection = _Selection(columns, slot_of_column, previous_slots.gather(1, columns).clamp(min=0), share)
        yield selection


def _raise_to_multiple(num: float) -> int:
    """The least multiple of SLOT_MULTIPLE that is not below `num`."""
    return math.ceil(num / SLOT_MULTIPLE) * SLOT_MULTIPLE


def _choose_columns(needed_mask: Tensor, is_own_column: Tensor, max_slots: int | None) -> tuple[Tensor, Tensor]:
    """Chooses needed columns, at random if there are more than max_slots in a row.

    needed_mask [B, C] bool; max_slots: upper bound, or None
    is_own_column [B, C] bool: columns of this process, among them all needed ones, which also fill rows up
    Returns `columns` and `slot_of_column` of the selection.
    """
    num_slots = max(1, int(needed_mask.sum(1).max()))
    score = torch.where(is_own_column, needed_mask.float(), -1.0)
    if max_slots is not None and num_slots > max_slots:
        num_slots, score = max_slots, score + torch.rand_like(score) * score
    else:
        num_slots = min(_raise_to_multiple(num_slots), int(is_own_column.sum(1).max()))
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
        """Values [M, .] of step d at the slots that guess a chunk's goals, in the order of the step's `goals`."""
        slot_indices = self.plan.steps[d - 1].slot_indices[chunk.step_goals[d - 1]]
        return values[d - 1].flatten(0, 1).index_select(0, slot_indices)


def unroll(
    drafter: Drafter, tokens: Tensor, features: Tensor, plan: UnrollPlan, *, gradient_checkpointing: bool = False
) -> UnrollOutput:
    """Runs all steps of a plan. Returns their states and readouts.

    tokens [B, T], features [B, T, F*D], plan: all on one device
    gradient_checkpointing: memory for time, by computing the activations of a step again in the backward pass
    """
    h = drafter.encode(features[:, plan.columns])  # the feature of column c is that of the slot before it
    if drafter.context_kind == "text":
        readout = _read_documents(drafter, tokens, plan, gradient_checkpointing)
        return UnrollOutput([h] * len(plan.steps), [readout] * len(plan.steps), plan)
    cache = UnrollCache(plan.share, plan.num_columns)
    drafter.context(h, plan.positions - 1, cache)
    states, readouts = [], []
    for d, step in enumerate(plan.steps, start=1):
        if step.kept_slots is not None:
            h = h.gather(1, step.kept_slots[..., None].expand(-1, -1, h.shape[-1]))
        step_tokens, step_cache = tokens.gather(1, step.token_indices), cache.at_step(d, step.kept_slots)
        arguments = h, step_tokens, step.positions, step.key_spans, step_cache
        h, readout = _take_step(drafter, d, *arguments, recompute=gradient_checkpointing)
        # No loss reads the states of blocks, which are large
        states.append(h[..., :0].clone() if drafter.context_kind == "block" else h)
        readouts.append(readout)
    return UnrollOutput(states, readouts, plan)


def _take_step(drafter: Drafter, d: int, *arguments, recompute: bool) -> tuple[Tensor, Tensor]:
    """Runs `drafter.step`. recompute: whether the backward pass computes its activations again"""
    if recompute and torch.is_grad_enabled():
        return checkpoint(partial(drafter.step, d), *arguments, use_reentrant=False)
    return drafter.step(d, *arguments)


def _read_documents(drafter: Drafter, tokens: Tensor, plan: UnrollPlan, gradient_checkpointing: bool) -> Tensor:
    """Readouts [B, columns, R] of a draft model, which reads each document from its beginning."""

    def read_group(tokens: Tensor, positions: Tensor) -> Tensor:
        h = drafter.encode(torch.zeros(*tokens.shape, 0, device=tokens.device))
        return _take_step(drafter, 1, h, tokens, positions, None, UnrollCache(), recompute=gradient_checkpointing)[1]

    assert plan.documents is not None
    return plan.documents.read(tokens, read_group)
