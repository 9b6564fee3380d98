"""The training objective: it unrolls the drafter, computes the losses of every goal at every depth, and sums them."""

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specdec.core import fast
from specdec.core.compile import forget_casts
from specdec.core.context_parallel import WHOLE_TEXT
from specdec.core.option_types import (
    Auto,
    Count,
    NonNegative,
    Options,
    Positive,
    PositiveShare,
    SmallCount,
    prefix_option_names,
    raise_first,
    read_options,
)
from specdec.heads.base import Drafter, Slots
from specdec.target.adapter import disable_adapter
from specdec.target.model import Target, TargetOutput
from specdec.unroll.plan import SLOT_MULTIPLE, GoalChunk, UnrollOutput, UnrollPlan, plan_unroll, unroll
from train.data.batches import TrainingBatch
from train.features.outputs import read_outputs
from train.objective import losses
from train.objective.fused import ChunkedLoss, fused_kl, has_kernel
from train.objective.losses import LOSSES

ORIGINAL_LOSS = "original"  # for drafters that adapt their target: KL of the adapted target from the original one
# Losses that need the target's distribution over all V tokens, not only over the draft vocabulary
FULL_VOCABULARY_LOSSES = {"tv", "top_k", "confidence"}
MIN_LOGITS = 2**27  # logits of all depths at a time, without chunk=: 512 MB in float32. A GPU may have room for more
BYTES_PER_KL_LOGIT = 24  # free memory for each logit of KL. Its derivative is kept; the step needs most of the memory
BYTES_PER_LOGIT = 64  # free memory for each logit of other losses. Autograd keeps distributions in float32
FUSED_LOGITS = 2**27  # logits of all depths at a time on the fused path, which keeps none: they fill a GPU's products
MIN_FUSED_GOALS = 512  # fewer goals make small products, and add up the LM head's gradient too often
TARGET_LOGITS = 2**25  # the target's logits over all V tokens that exist at a time: 128 MB in float32


@dataclass(frozen=True)
class Loss:
    """Sums over a batch's goals, so that the mean can be taken over all processes and micro-batches."""

    total: Tensor  # scalar, weighted by depth and by the losses' weights
    num_goals: int  # tokens to be guessed, the divisor
    matches: Tensor | None  # [K, B, T] bool: the guess of depth d for token i is the text's; None: not compared


# Results for G goals at K depths, [K, G] each, by name:
#   exists     bool: a slot guesses this goal at this depth
#   pointwise  the weighted sum of the losses of single slots
#   matches    bool: the guess is the token of the text; only where guesses are compared
#   probability  q(x): only where the weights need it
LossTerms = dict[str, Tensor]


class ObjectiveOptions(Options):
    """The settings of conf/objective.

    losses: weights by name: functions of train/objective/losses.py, and `original`, the KL of an adapted target from
        the original one. Losses of weight 0 are not computed
    depth: steps of the unroll (EAGLE-3's training-time test)
    decay: weight of a step relative to the one before
    weighting: decay alone, or the weights of D-PACE, which follow the survival along the text
    temperature: temperature of both distributions in losses on logits
    noise: half-width of the uniform noise on features, EAGLE-1's augmentation
    anchors: slots of a row that run the steps after the first (of a block drafter: its only step); None: all slots
        with a goal
    keep: share of these slots that goes on from step to step (P-EAGLE's conditional drop, which makes deep steps
        cheap). No step runs on less than a fifth of them. Losses are weighted as if all slots ran
    supervise: the goals: answers, or text for the tokens of prompts too. The target's distribution is learned there,
        although somebody else wrote the text, so the same answers give more goals
    chunk: goals whose [., W] logits exist at a time, for all depths; None: `count_logits` decides
    gradient_checkpointing: True: the backward pass computes activations of the unroll again, instead of keeping them;
        auto, before a run has decided: they are kept
    """

    losses: dict[str, NonNegative]
    depth: SmallCount
    decay: NonNegative
    weighting: Literal["decay", "dpace"]
    temperature: Positive
    noise: NonNegative
    anchors: Count | None
    chunk: Count | None
    keep: PositiveShare = 1.0
    supervise: Literal["answers", "text"] = "answers"
    gradient_checkpointing: bool | Auto = False

    @property
    def used_losses(self) -> dict[str, float]:
        """The losses that are computed."""
        return {name: weight for name, weight in self.losses.items() if weight}

    def check_drafter(self, drafter: Drafter) -> None:
        """Raises ValueError, with the setting to change, if settings do not fit together or do not fit the drafter."""
        used, known_losses = self.used_losses, {*LOSSES, ORIGINAL_LOSS}
        token_losses = used.keys() - {"smooth_l1", "confidence", "candidates", ORIGINAL_LOSS}
        is_block_drafter = drafter.context_kind == "block"  # elsewhere step 1 runs on all slots, sampled or not
        depth_options = "num_heads, num_modules or num_drafts"
        depth_advice = f", or change the drafter's {depth_options}"
        if drafter.pretrained:
            depth_advice = f"; the head of start= keeps its {depth_options}"
        wrong = {
            f"losses={dict(self.losses)}: give weights to some of {', '.join(sorted(known_losses))}.": (
                not used or set(used) - known_losses
            ),
            f"losses={used}: one of them must judge the drafted tokens, such as kl.": not token_losses,
            f"depth={self.depth} must be this drafter's number of steps, {drafter.depth}: more steps do not exist, and "
            f"fewer would leave parts untrained. Set depth={drafter.depth}{depth_advice}.": (
                drafter.depth not in (None, self.depth)
            ),
            f"keep={self.keep}: the later steps of this head run on the slots of its first one: set keep=1.": (
                self.keep < 1 and drafter.context_kind not in ("path", "none")
            ),
            "The loss smooth_l1 compares a state with the target's, which only eagle, hass, eagle3 and mtp estimate: "
            "set its weight in losses= to 0.": "smooth_l1" in used and not drafter.estimates_state,
            "The loss original is for heads that adapt the target, such as medusa2: set its weight in losses= to 0.": (
                ORIGINAL_LOSS in used and not drafter.adapts_target
            ),
            "The loss confidence and a head with a confidence output, such as dspark, go together: set the head's "
            "confidence to false or the weight in losses= to 0, or set both.": (
                ("confidence" in used) != drafter.has_confidence
            ),
            "The loss candidates and a head with a candidate lattice, such as dflash2, go together: give the loss a "
            "weight in losses= for such a head, and 0 for others.": ("candidates" in used) != drafter.has_candidates,
            "The loss confidence would judge the logits without the lattice: set the head's confidence to false.": (
                "confidence" in used and drafter.has_candidates
            ),
            "dpace needs all depths of a slot: set anchors=null and keep=1.": (
                self.weighting == "dpace" and not is_block_drafter and (self.anchors is not None or self.keep < 1)
            ),
        }
        raise_first(wrong)
        with prefix_option_names("head.drafter", only={"window"}):
            drafter.check_window(self.depth)


@dataclass(frozen=True)
class ChunkOutputs:
    """The drafter's outputs for the slots of one chunk of goals. m is the number of slots at a depth."""

    chunk: GoalChunk
    plan: UnrollPlan
    readouts: list[Tensor]  # K of [m, R]
    states: list[Tensor]  # K of [m, H]; empty: no loss needs them


class Objective(nn.Module):
    """The module that accelerate prepares, instead of the drafter: gradients are synchronised in its `forward`.

    settings: the fields of `ObjectiveOptions`
    """

    Options = ObjectiveOptions

    def __init__(self, drafter: Drafter, **settings):
        super().__init__()
        options = read_options(ObjectiveOptions, settings)
        options.check_drafter(drafter)
        self.drafter, self.settings, self.losses = drafter, options, options.used_losses
        self.depth, self.temperature, self.supervise = options.depth, options.temperature, options.supervise
        self.chunk = options.chunk or max(1, count_logits(drafter, self.losses) // (self.depth * drafter.vocab_size))
        self.every_slot = options.anchors is None and options.keep == 1  # only then can the batch's text be replayed
        decay = options.decay if options.weighting == "decay" else 1.0
        weights = [decay**step for step in range(self.depth)]
        self.shares = [weight / sum(weights) for weight in weights]  # [K]
        self.text_share = WHOLE_TEXT  # the slots of each text that this process runs

    def forward(self, batch: TrainingBatch, output: TargetOutput | None, *, compare: bool = True) -> Loss:
        """The loss of a batch.

        output: outputs of the frozen target; None for a drafter that adapts its target, which is then read here
        compare: whether to compare guesses with the text
        """
        forget_casts()

        # Outputs of the target, and the drafter's steps on them
        original = None
        if output is None:
            output, original = self._read_adapted(batch)
        unrolled = self._unroll(batch, output.features)

        # The losses, on the fused path where the weight of each loss is known before its logits
        has_fixed_weights = self.settings.weighting == "decay"
        if has_fixed_weights and torch.is_grad_enabled() and fast.allows("loss", batch.tokens.device):
            terms, total = self._compute_fused(batch, output.final, unrolled, compare)
        else:
            terms = self._compute_chunks(batch, output.final, unrolled, compare)
            total = self._weigh_losses(terms, batch, unrolled.plan)

        # The penalty for an adapted target that leaves the original one
        goal_rows, goal_positions = unrolled.plan.goals.unbind(1)
        if original is not None and ORIGINAL_LOSS in self.losses:
            finals = output.final[goal_rows, goal_positions - 1], original.final[goal_rows, goal_positions - 1]
            divergence = sum_divergence(self.drafter.target, *finals, temperature=self.temperature)
            total = total + self.losses[ORIGINAL_LOSS] * divergence

        # The comparison with the text, at its place in the batch
        matches = None
        if "matches" in terms:
            matches = torch.zeros(self.depth, *batch.tokens.shape, dtype=torch.bool, device=total.device)  # [K, B, T]
            matches[:, goal_rows, goal_positions] = terms["matches"]
            if self.text_share.size > 1:
                matches = self.text_share.sum(matches.byte()).bool()
        return Loss(total, len(goal_rows), matches)

    def _read_adapted(self, batch: TrainingBatch) -> tuple[TargetOutput, TargetOutput]:
        """The outputs of the adapted target, with gradient, and of the original one."""
        target, layers = self.drafter.target, self.drafter.target_layers
        with disable_adapter(target):
            original = read_outputs(target, batch, ())
        return read_outputs(target, batch, layers, gradient=True), original

    def _unroll(self, batch: TrainingBatch, features: Tensor) -> UnrollOutput:
        """The drafter's steps on a batch. features [B, T, F*D]; in training, with noise where it is set."""
        options, host = self.settings, batch.on_host
        if options.noise and self.training:
            features = features + (torch.rand_like(features) * 2 - 1) * options.noise
        plan = plan_unroll(
            self.drafter,
            host.documents,
            host.positions,
            batch.goal_mask(self.supervise),
            depth=self.depth,
            max_anchors=options.anchors,
            keep_share=options.keep,
            share=self.text_share,
        ).move_to(batch.tokens.device)
        recompute = options.gradient_checkpointing is True
        return unroll(self.drafter, batch.tokens, features, plan, gradient_checkpointing=recompute)

    def _compute_chunks(self, batch: TrainingBatch, final: Tensor, unrolled: UnrollOutput, compare: bool) -> LossTerms:
        """The results of all goals, [K, G] each. They are computed `self.chunk` goals at a time."""
        chunks = list(unrolled.plan.split_goals(self.chunk))
        # The logits of one chunk are kept for the backward pass; those of several are made again there.
        repeats = len(chunks) > 1 and torch.is_grad_enabled()
        terms_of_chunks = []
        for chunk in chunks:
            arguments = chunk, batch, final, unrolled, compare
            if repeats:
                terms_of_chunks.append(checkpoint(self._compute_chunk, *arguments, use_reentrant=False))
            else:
                terms_of_chunks.append(self._compute_chunk(*arguments))
        return _join_terms(terms_of_chunks, partial(torch.cat, dim=1))

    def _compute_chunk(
        self, chunk: GoalChunk, batch: TrainingBatch, final: Tensor, unrolled: UnrollOutput, compare: bool
    ) -> LossTerms:
        """The results of one chunk, [K, M] each."""
        depths = range(1, self.depth + 1)
        readouts = [unrolled.select(unrolled.readouts, d, chunk) for d in depths]
        states = [unrolled.select(unrolled.states, d, chunk) for d in depths] if "smooth_l1" in self.losses else []
        return self._compute_losses(ChunkOutputs(chunk, unrolled.plan, readouts, states), batch, final, compare)

    def _compute_fused(
        self, batch: TrainingBatch, final: Tensor, unrolled: UnrollOutput, compare: bool
    ) -> tuple[LossTerms, Tensor]:
        """The comparison with the text, if it is asked for, and the weighted sum of losses, by `ChunkedLoss`."""
        plan, states = unrolled.plan, unrolled.states if "smooth_l1" in self.losses else []
        num_goals = max(MIN_FUSED_GOALS, FUSED_LOGITS // (self.depth * self.drafter.vocab_size))
        chunks = list(plan.split_goals(num_goals))
        value_rows = []
        for chunk in chunks:
            slots = [step.slot_indices[goals] for step, goals in zip(plan.steps, chunk.step_goals)]
            value_rows.append(slots * (2 if states else 1))
        terms_of_chunks: list[LossTerms] = []

        def compute_chunk(number: int, values: list[Tensor]) -> tuple[Tensor, LossTerms]:
            outputs = ChunkOutputs(chunks[number], plan, values[: self.depth], values[self.depth :])
            terms = self._compute_losses(outputs, batch, final, compare, fused=True)
            return self._weigh_losses(terms, batch, plan), {"matches": terms["matches"]} if compare else {}

        values = [*unrolled.readouts, *states]
        trained = [parameter for parameter in self.drafter.parameters() if parameter.requires_grad]
        total = ChunkedLoss.apply(compute_chunk, value_rows, terms_of_chunks, len(values), *values, *trained)
        return _join_terms(terms_of_chunks, partial(torch.cat, dim=1)), total

    def _compute_losses(
        self, outputs: ChunkOutputs, batch: TrainingBatch, final: Tensor, compare: bool, *, fused: bool = False
    ) -> LossTerms:
        """The results of M goals, [K, M] each. final [B, T, D]

        fused: whether one product may make the logits of all depths, and one kernel their KL
        """
        chunk, plan = outputs.chunk, outputs.plan
        goal_tokens, goals = self._read_goals(plan.goals[chunk.goals], batch, final)
        use_kernel = fused and self.losses.keys() == {"kl"} and has_kernel(final.device)
        logits_of_depths = self._make_logits(outputs.readouts, together=fused and self.drafter.shares_output)
        terms_of_depths = []
        for depth, logits in enumerate(logits_of_depths):
            readout = outputs.readouts[depth]
            goal_indices = plan.steps[depth].goals[chunk.step_goals[depth]] - chunk.goals.start  # [m]
            terms = {"exists": torch.ones_like(goal_indices, dtype=torch.bool)}  # [m] each
            if compare:
                guesses = self.drafter.to_target(self.drafter.guess(depth + 1, readout, logits.detach()))
                terms["matches"] = guesses == goal_tokens.index_select(0, goal_indices)
            if use_kernel:
                kl = fused_kl(logits, goals.logits, goal_indices, self.temperature)
                terms["pointwise"] = self.losses["kl"] * kl
            else:
                candidate_losses = None
                if "candidates" in self.losses:
                    likeliest_ids = goals.likeliest_ids[goal_indices]
                    candidate_losses = self.drafter.candidate_loss(readout, logits, likeliest_ids)
                slots = losses.LossSlots(
                    goals if len(goal_indices) == len(goal_tokens) else goals.select_goals(goal_indices),
                    logits,
                    outputs.states[depth] if outputs.states else None,
                    self.drafter.confidence(depth + 1, readout),
                    candidate_losses,
                    self.temperature,
                )
                terms |= self._compute_slot_terms(slots)
            terms_of_depths.append(
                {name: _spread_values(values, goal_indices, len(goal_tokens)) for name, values in terms.items()}
            )
        return _join_terms(terms_of_depths, torch.stack)

    def _read_goals(self, places: Tensor, batch: TrainingBatch, final: Tensor) -> tuple[Tensor, losses.Goals]:
        """The text's tokens [M] at M goals, and the target's view of these. places [M, 2]: row and position"""
        rows, positions = places.unbind(1)
        tokens = batch.tokens[rows, positions]
        states = final[rows, positions - 1].detach()  # [M, D]
        with torch.no_grad():
            logits = losses.apply_temperature(_compute_padded(self.drafter.goal_logits, states), self.temperature)
            ids = tokens if self.drafter.target_to_draft is None else self.drafter.target_to_draft[tokens]
            return tokens, losses.Goals(states, logits, ids, self._compute_log_norm(states, logits))

    def _compute_log_norm(self, states: Tensor, logits: Tensor) -> Tensor:
        """Log-normaliser [M] of the target's distribution over all V tokens; over the draft vocabulary if it suffices.

        states [M, D]: the target's final states; logits [M, W]: its tempered logits over the draft vocabulary
        """
        if self.drafter.draft_to_target is None or not FULL_VOCABULARY_LOSSES & set(self.losses):
            return logits.logsumexp(-1)
        target = self.drafter.target
        chunks = (target.logits(chunk) / self.temperature for chunk in states.split(_count_chunk_slots(target)))
        norms = torch.cat([chunk.logsumexp(-1) for chunk in chunks])
        return norms.to(torch.promote_types(norms.dtype, torch.float32))

    def _make_logits(self, readouts: list[Tensor], *, together: bool) -> Iterator[Tensor]:
        """Yields the logits [m, W] of each depth.

        together: one product makes the logits of all depths, instead of one for each depth
        """
        if together:
            logits = _compute_padded(partial(self.drafter.loss_logits, 1), torch.cat(readouts))
            yield from logits.split([len(readout) for readout in readouts])
            return
        for d, readout in enumerate(readouts, start=1):
            yield _compute_padded(partial(self.drafter.loss_logits, d), readout)

    def _compute_slot_terms(self, slots: losses.LossSlots) -> LossTerms:
        """The weighted sum of the losses of single slots, and what the weights need, [m] each."""
        weighted = [weight * LOSSES[name](slots) for name, weight in self.losses.items() if name in LOSSES]
        terms = {"pointwise": sum(weighted, slots.goals.log_norm.new_zeros(len(slots.logits)))}
        if self.settings.weighting == "dpace":
            terms["probability"] = losses.probability(slots)
        return terms

    def _weigh_losses(self, terms: LossTerms, batch: TrainingBatch, plan: UnrollPlan) -> Tensor:
        """The scalar loss of goals: sums over goals and depths, as if all slots had run."""
        factors = [share / step.slot_share if step.slot_share else 0.0 for share, step in zip(self.shares, plan.steps)]
        weights = torch.stack([factor * exists for factor, exists in zip(factors, terms["exists"])])  # [K, G]
        if self.settings.weighting == "dpace":
            weights = weights * self._follow_survival(terms, batch, plan)
        return (weights * terms["pointwise"]).sum()

    def _follow_survival(self, terms: LossTerms, batch: TrainingBatch, plan: UnrollPlan) -> Tensor:
        """D-PACE's weights [K, G]."""
        # The slot of goal g at depth d is d tokens before it; one more slot collects goals without one
        num_rows, length = batch.tokens.shape
        goal_rows, goal_positions = plan.goals.unbind(1)
        depths = torch.arange(1, self.depth + 1, device=goal_rows.device)[:, None]
        slot_indices = goal_rows * length + goal_positions - depths  # [K, G]
        slot_indices = torch.where(terms["exists"], slot_indices, num_rows * length)

        def sort_by_slot(values: Tensor) -> Tensor:  # [K, G] -> [K, B*T]
            padded = values.new_zeros(self.depth, num_rows * length + 1)
            return padded.scatter(1, slot_indices, values)[:, :-1]

        slot_weights = losses.dpace(sort_by_slot(terms["probability"]), sort_by_slot(terms["exists"]))
        return nn.functional.pad(slot_weights, (0, 1)).gather(1, slot_indices)


def _join_terms(groups: list[LossTerms], join: Callable[[list[Tensor]], Tensor]) -> LossTerms:
    """The results of several depths or chunks as one, by name."""
    terms = {}
    for name in groups[0]:
        terms[name] = join([group[name] for group in groups])
    return terms


def _spread_values(values: Tensor, goal_indices: Tensor, num_goals: int) -> Tensor:
    """Values [m] of some goals -> [num_goals], 0 for other goals."""
    if len(goal_indices) == num_goals:
        return values
    return values.new_zeros(num_goals).index_copy(0, goal_indices, values)


def sum_divergence(target: Target, final: Tensor, original_final: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL of the target's distribution at `final` from that at `original_final`, over all V tokens, summed over M.

    final, original_final [M, D]. The backward pass makes the logits again.
    """

    def sum_chunk(final: Tensor, original_final: Tensor) -> Tensor:
        q, p = ((target.logits(states) / temperature).log_softmax(-1) for states in (final, original_final))  # [m, V]
        return (p.exp() * (p - q)).sum()

    size = _count_chunk_slots(target)
    chunks = zip(final.split(size), original_final.split(size))
    return torch.stack([checkpoint(sum_chunk, *chunk, use_reentrant=False) for chunk in chunks]).sum()  # type: ignore[misc]


def _compute_padded(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """function(values [M, E]) -> [M, W], computed on a multiple of SLOT_MULTIPLE rows."""
    return function(nn.functional.pad(values, (0, 0, 0, -len(values) % SLOT_MULTIPLE)))[: len(values)]


def count_logits(drafter: Drafter, losses: Collection[str]) -> int:
    """The number of logits, of all depths, that exist at a time.

    On a GPU it is a power of two, by the memory that training the drafter leaves free. So a run that continues beside
    a little more or less other work has as many.
    """
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    if not trained or trained[0].device.type != "cuda":
        return MIN_LOGITS
    free_bytes, _ = torch.cuda.mem_get_info(trained[0].device)
    free_bytes -= 3 * sum(parameter.nbytes for parameter in trained)  # gradients, and two moments
    num_fitting = max(1, free_bytes // (BYTES_PER_KL_LOGIT if set(losses) == {"kl"} else BYTES_PER_LOGIT))
    return max(MIN_LOGITS, 1 << (num_fitting.bit_length() - 1))


def _count_chunk_slots(target: Target) -> int:
    """The number of slots that make TARGET_LOGITS logits."""
    return max(1, TARGET_LOGITS // target.vocab_size)


def order_by_start(values: Tensor) -> Tensor:
    """Guesses by the round that starts before them, as `replay.count_rounds` reads them.

    values [K, n]: depth d's guess of token i -> [K, n]: entry [d - 1, s] is the guess of token s + d - 1
    """
    num = values.shape[1]
    shifted_rows = [nn.functional.pad(row[d:], (1, min(d - 1, num - 1)))[:num] for d, row in enumerate(values, start=1)]
    return torch.stack(shifted_rows)


def list_slots(batch: TrainingBatch, output: TargetOutput, depth: int) -> Slots:
    """All slots of a batch whose steps 1 to depth stay inside one document, for `Drafter.solve`."""
    device, num_columns = batch.tokens.device, batch.tokens.shape[1] - depth  # slots 1 to T - depth of each row
    # [columns, depth]
    token_indices = torch.arange(1, num_columns + 1, device=device)[:, None] + torch.arange(depth, device=device)
    is_slot = (batch.positions[:, 1 : num_columns + 1] > 0) & (
        batch.documents[:, 1 : num_columns + 1] == batch.documents[:, depth : num_columns + depth]
    )
    return Slots(
        output.features[:, :num_columns][is_slot],
        output.final[:, :num_columns][is_slot],
        batch.tokens[:, token_indices][is_slot],
        output.final[:, token_indices][is_slot],
    )
