"""The training objective: unroll the drafter, judge every goal at every depth, and weigh the results."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specdec.core import fast
from specdec.core.compile import forget_casts
from specdec.core.option_types import (
    Count,
    NonNegative,
    Options,
    Positive,
    PositiveShare,
    SmallCount,
    raise_first,
    read_options,
)
from specdec.heads.base import Drafter, Slots
from specdec.target.adapter import disable_adapter as original_target
from specdec.target.model import Target, TargetOutput
from specdec.unroll.plan import SLOT_MULTIPLE, GoalChunk, UnrollOutput, UnrollPlan, plan_unroll, unroll
from train.data.batches import TrainingBatch
from train.features.outputs import read_outputs
from train.objective import losses
from train.objective.fused import ChunkedLoss, fused_kl, has_kernel
from train.objective.losses import LOSSES

DEPTH_LOSSES = {"lk", "e2e_tv"}  # of several slots or depths together
ORIGINAL_LOSS = "original"  # for a drafter that adapts its target: KL of the adapted target from the original one
FULL_VOCABULARY_LOSSES = {
    "tv",
    "nla",
    "top_k",
    "confidence",
    *DEPTH_LOSSES,
}  # need the target's distribution over all V tokens
# Logits of all depths that exist at a time, if the number of goals is not given; a GPU may have room for more
MIN_LOGITS = 2**27
BYTES_PER_KL_LOGIT = 24  # of free memory for each logit: its derivative is kept, and the step needs most of the memory
BYTES_PER_LOGIT = 64  # the same with losses other than KL, of which autograd keeps distributions in float32
FUSED_LOGITS = 2**27  # the same where no logits are kept: products are large, and a GPU is not filled by what they make
MIN_FUSED_GOALS = (
    512  # but not fewer goals than this, for products and for gradients of the LM head, which are added up
)
TARGET_LOGITS = 2**25  # the same for logits of the target over all V tokens


@dataclass(frozen=True)
class Loss:
    """Sums over the batch's judged slots, so that the mean can be taken over all processes and micro-batches."""

    total: Tensor  # scalar, weighted by depth and by the losses' weights
    num_goals: int  # tokens that were to be guessed, the divisor
    matches: Tensor | None  # [K, B, T] bool: the guess of depth d for token i is the text's; None if nobody asked


# Results for G goals at K depths, [K, G] each, by name:
#   exists    bool: a slot guessed this goal at this depth          matches   bool: the guess is the token of the text
#   pointwise the weighted sum of per-slot losses
# and, where a loss in use needs them, kl, overlap (sum of min(p, q)), probability (q(x))
LossTerms = dict[str, Tensor]


class ObjectiveOptions(Options):
    """conf/objective

    losses: weights by name, of the functions in train/objective/losses.py, and of `original`, the KL of an adapted target from the
        original one; losses of weight 0 are not computed
    depth: steps of the unroll (EAGLE-3's training-time test); decay: weight of a step relative to the one before
    weighting: decay alone, or the weights of D-PACE or VAT, which follow the survival along the text (VAT uses decay behind the
        first rejection)
    temperature: of both distributions in losses on logits; eta: of the LK hybrid
    noise: half-width of the uniform noise on features, EAGLE-1's augmentation
    anchors: slots of a row that run the steps after the first (of a block drafter: its only step); None: all that have a goal
    keep: share of these slots that goes on from step to step, so that deep steps cost less (P-EAGLE's conditional drop); no step
        runs on less than a fifth of them. Losses are weighted as if all ran
    supervise: the goals: answers, or text for the tokens of prompts too. The distribution that is learned there is the target's,
        although somebody else wrote the text, so the same answers give more goals
    chunk: goals whose [., W] logits exist at a time, for all depths; None: as many as the device has room for (`num_logits`)
    gradient_checkpointing: whether activations of the unroll are computed again in the backward pass, instead of being kept
    """

    losses: dict[str, NonNegative]
    depth: SmallCount
    decay: NonNegative
    weighting: Literal["decay", "dpace", "vat"]
    temperature: Positive
    eta: NonNegative
    noise: NonNegative
    anchors: Count | None
    chunk: Count | None
    keep: PositiveShare = 1.0
    supervise: Literal["answers", "text"] = "answers"
    gradient_checkpointing: bool = False

    @property
    def used_losses(self) -> dict[str, float]:
        """The losses that are computed."""
        return {name: weight for name, weight in self.losses.items() if weight}

    def check_drafter(self, drafter: Drafter) -> None:
        """Raises ValueError, with what to change, for what does not fit together or to the drafter."""
        used_losses, known_losses = self.used_losses, {*LOSSES, *DEPTH_LOSSES, ORIGINAL_LOSS}
        token_losses = used_losses.keys() - {"smooth_l1", "confidence", "candidates", ORIGINAL_LOSS}
        wrong_depth = drafter.depth not in (None, self.depth)
        drops_slots = self.keep < 1 and drafter.context_kind not in ("path", "none")
        is_block_drafter = drafter.context_kind == "block"  # elsewhere step 1 is judged on all slots, sampled or not
        needs_all_depths = not is_block_drafter and ("e2e_tv" in used_losses or self.weighting != "decay")
        depth_options = "num_heads, num_modules or num_drafts"
        depth_advice = (
            f"; the head of start= keeps its {depth_options}"
            if drafter.pretrained
            else f", or change the drafter's {depth_options}"
        )
        samples_slots = (self.anchors is not None or self.keep < 1) and needs_all_depths
        wrong = {
            f"losses={dict(self.losses)}: give weights to some of {', '.join(sorted(known_losses))}.": not used_losses
            or set(used_losses) - known_losses,
            f"losses={used_losses}: one of them must judge the drafted tokens, such as kl.": not token_losses,
            f"depth={self.depth} must be this drafter's number of steps, {drafter.depth}: more steps do not exist, and fewer "
            f"would leave parts untrained. Set depth={drafter.depth}{depth_advice}.": wrong_depth,
            f"keep={self.keep}: the later steps of this head run on the slots of its first one: set keep=1.": drops_slots,
            "The loss smooth_l1 compares a state with the target's, which only eagle, hass, eagle3 and mtp estimate: set "
            "its weight in losses= to 0.": "smooth_l1" in used_losses and not drafter.estimates_state,
            "The loss original is for heads that adapt the target, such as medusa2: set its weight in losses= to 0.": ORIGINAL_LOSS
            in used_losses
            and not drafter.adapts_target,
            "The loss confidence and a head with a confidence output, such as dspark, go together: set the head's "
            "confidence to false or the weight in losses= to 0, or set both.": ("confidence" in used_losses)
            != drafter.has_confidence,
            "The loss candidates and a head with a candidate lattice, such as dflash2, go together: give the loss a weight in losses= "
            "for such a head, and 0 for others.": ("candidates" in used_losses) != drafter.has_candidates,
            "The loss confidence would judge the logits without the lattice: set the head's confidence to false.": "confidence"
            in used_losses
            and drafter.has_candidates,
            "e2e_tv, dpace and vat need all depths of a slot: set anchors=null and keep=1.": samples_slots,
        }
        raise_first(wrong)


class Objective(nn.Module):
    """The module that accelerate prepares, instead of the drafter: gradients are synchronised in its `forward`.

    settings: of `ObjectiveOptions`
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
        weights = [options.decay**step for step in range(self.depth)]
        weights = weights if options.weighting == "decay" else [1.0] * self.depth
        self.shares = [weight / sum(weights) for weight in weights]  # [K]

    def forward(self, batch: TrainingBatch, output: TargetOutput | None, *, compare: bool = True) -> Loss:
        """output: of the frozen target; None for a drafter that adapts its target, because the target is then read here

        compare: whether to compare guesses with the text
        """
        forget_casts()
        options, original_output = self.settings, None
        if output is None:
            output, original_output = self._read_adapted(batch)
        features = output.features
        if options.noise and self.training:
            features = features + (torch.rand_like(features) * 2 - 1) * options.noise
        host = batch.on_host
        plan = plan_unroll(
            self.drafter,
            host.documents,
            host.positions,
            batch.goal_mask(self.supervise),
            depth=self.depth,
            max_anchors=options.anchors,
            keep_share=options.keep,
        ).move_to(batch.tokens.device)
        unrolled = unroll(
            self.drafter, batch.tokens, features, plan, gradient_checkpointing=options.gradient_checkpointing
        )
        compare = compare or options.weighting == "vat"
        has_fixed_weights = options.weighting == "decay" and not DEPTH_LOSSES & set(
            self.losses
        )  # before the logits are
        if has_fixed_weights and torch.is_grad_enabled() and fast.allows("loss", batch.tokens.device):
            terms, total = self._compute_fused(batch, output.final, unrolled, compare)
            return self._make_loss(terms, total, batch, plan, output, original_output)
        terms_of_chunks = []
        chunks = list(plan.split_goals(self.chunk))
        for chunk in chunks:
            arguments = chunk, batch, output.final, unrolled, compare
            # With one part its logits are kept for the backward pass; with several they are made again there.
            if len(chunks) > 1 and torch.is_grad_enabled():
                terms_of_chunks.append(checkpoint(self._compute_losses, *arguments, use_reentrant=False))
            else:
                terms_of_chunks.append(self._compute_losses(*arguments))
        terms = {
            name: torch.cat([chunk_terms[name] for chunk_terms in terms_of_chunks], dim=1)
            for name in terms_of_chunks[0]
        }
        return self._make_loss(terms, self._weigh_losses(terms, batch, plan), batch, plan, output, original_output)

    def _make_loss(
        self,
        terms: LossTerms,
        total: Tensor,
        batch: TrainingBatch,
        plan: UnrollPlan,
        output: TargetOutput,
        original_output: TargetOutput | None,
    ) -> Loss:
        goal_rows, goal_positions = plan.goals.unbind(1)
        if original_output is not None and ORIGINAL_LOSS in self.losses:
            finals = output.final[goal_rows, goal_positions - 1], original_output.final[goal_rows, goal_positions - 1]
            total = total + self.losses[ORIGINAL_LOSS] * sum_divergence(
                self.drafter.target, *finals, temperature=self.temperature
            )
        matches = None
        if "matches" in terms:
            matches = torch.zeros(self.depth, *batch.tokens.shape, dtype=torch.bool, device=total.device)  # [K, B, T]
            matches[:, goal_rows, goal_positions] = terms["matches"]
        return Loss(total, len(goal_rows), matches)

    def _compute_fused(
        self, batch: TrainingBatch, final: Tensor, unrolled: UnrollOutput, compare: bool
    ) -> tuple[LossTerms, Tensor]:
        """What `_compute_losses` gives for all parts, if it was asked to compare, and the weighted sum of losses, by train/objective/fused.py."""
        plan, kernel = unrolled.plan, self.losses.keys() == {"kl"} and has_kernel(final.device)
        states = unrolled.states if "smooth_l1" in self.losses else []
        chunks = list(plan.split_goals(max(MIN_FUSED_GOALS, FUSED_LOGITS // (self.depth * self.drafter.vocab_size))))
        slot_rows = [[step.slot_indices[at] for step, at in zip(plan.steps, part.step_goals)] for part in chunks]
        terms_of_chunks: list[LossTerms] = []

        def compute_chunk(chunk_number: int, values: list[Tensor]) -> tuple[Tensor, LossTerms]:
            chunk_outputs = ChunkOutputs(plan, values[: self.depth], values[self.depth :])
            terms = self._compute_losses(
                chunks[chunk_number],
                batch,
                final,
                chunk_outputs,
                compare,
                one_output=self.drafter.shares_output,
                use_kernel=kernel,
            )
            total = self._weigh_losses(terms, batch, plan)
            return total, {name: term for name, term in terms.items() if name == "matches"}

        values = [*unrolled.readouts, *states]
        trained_parameters = [each for each in self.drafter.parameters() if each.requires_grad]
        value_rows = [step_rows * (2 if states else 1) for step_rows in slot_rows]
        total = ChunkedLoss.apply(compute_chunk, value_rows, terms_of_chunks, len(values), *values, *trained_parameters)
        return {
            name: torch.cat([chunk_terms[name] for chunk_terms in terms_of_chunks], dim=1)
            for name in terms_of_chunks[0]
        }, total

    def _read_adapted(self, batch: TrainingBatch) -> tuple[TargetOutput, TargetOutput]:
        """The outputs of the adapted target, with gradient, and of the original one."""
        target, layers = self.drafter.target, self.drafter.target_layers
        with original_target(target):
            original = read_outputs(target, batch, ())
        return read_outputs(target, batch, layers, gradient=True), original

    def _compute_losses(
        self,
        chunk: GoalChunk,
        batch: TrainingBatch,
        final: Tensor,
        unrolled: "UnrollOutput | ChunkOutputs",
        compare: bool,
        *,
        one_output: bool = False,
        use_kernel: bool = False,
    ) -> LossTerms:
        """-> [K, M] each, for the M goals of a part

        together: whether one product makes the logits of all depths; kernel: whether one kernel makes their KL
        """
        drafter = self.drafter
        goal_rows, goal_positions = unrolled.plan.goals[chunk.goals].unbind(1)
        num_goals, text_tokens = len(goal_rows), batch.tokens[goal_rows, goal_positions]  # [M]
        goal_states = final[goal_rows, goal_positions - 1].detach()  # [M, D]
        with torch.no_grad():
            logits = losses.apply_temperature(
                _compute_padded(drafter.goal_logits, goal_states), self.temperature
            )  # [M, W]
            token_ids = text_tokens if drafter.target_to_draft is None else drafter.target_to_draft[text_tokens]
            goals = losses.Goals(goal_states, logits, token_ids, self._compute_log_norm(goal_states, logits))
        extra_terms = self._list_extra_terms()
        values_by_name: dict[str, list[Tensor]] = {name: [] for name in ("exists", "pointwise", *extra_terms)}
        if compare:
            values_by_name["matches"] = []
        readouts = [unrolled.select(unrolled.readouts, d, chunk) for d in range(1, self.depth + 1)]  # [m, R] each
        sizes = [len(depth_readout) for depth_readout in readouts]
        logits_by_depth = (
            _compute_padded(partial(drafter.loss_logits, 1), torch.cat(readouts)).split(sizes) if one_output else None
        )
        for d, readout in enumerate(readouts, start=1):
            goal_indices = unrolled.plan.steps[d - 1].goals[chunk.step_goals[d - 1]] - chunk.goals.start  # [m]
            has_all_goals = len(goal_indices) == num_goals

            def spread(
                values: Tensor, goal_indices: Tensor = goal_indices, has_all_goals: bool = has_all_goals
            ) -> Tensor:  # [m] -> [M]
                return values if has_all_goals else values.new_zeros(num_goals).index_copy(0, goal_indices, values)

            logits = (
                logits_by_depth[d - 1] if logits_by_depth else _compute_padded(partial(drafter.loss_logits, d), readout)
            )  # [m, W]
            if compare:
                guesses = drafter.to_target(drafter.guess(d, readout, logits.detach()))
                values_by_name["matches"].append(spread(guesses == text_tokens.index_select(0, goal_indices)))
            if use_kernel:
                values_by_name["exists"].append(spread(torch.ones_like(goal_indices, dtype=torch.bool)))
                values_by_name["pointwise"].append(
                    spread(self.losses["kl"] * fused_kl(logits, goals.logits, goal_indices, self.temperature))
                )
                continue
            loss_slots = losses.LossSlots(
                goals if has_all_goals else goals.select_goals(goal_indices),
                logits,
                unrolled.select(unrolled.states, d, chunk) if "smooth_l1" in self.losses else None,
                drafter.confidence(d, readout),
                drafter.candidate_loss(readout, logits, goals.likeliest_ids[goal_indices])
                if "candidates" in self.losses
                else None,
                self.temperature,
            )
            weighted_losses = [
                weight * LOSSES[name](loss_slots) for name, weight in self.losses.items() if name in LOSSES
            ]
            values_by_name["exists"].append(spread(torch.ones_like(goal_indices, dtype=torch.bool)))
            values_by_name["pointwise"].append(
                spread(sum(weighted_losses, goals.log_norm.new_zeros(len(goal_indices))))
            )
            for name, function in extra_terms.items():
                values_by_name[name].append(spread(function(loss_slots)))
        return {name: torch.stack(values) for name, values in values_by_name.items()}

    def _list_extra_terms(self) -> dict[str, Callable[[losses.LossSlots], Tensor]]:
        """What the losses in use need beside their own values: functions by the name of their result."""
        functions: dict[str, Callable[[losses.LossSlots], Tensor]] = {}
        if "lk" in self.losses:
            functions["kl"] = losses.kl
        if {"lk", "e2e_tv"} & set(self.losses):
            functions["overlap"] = losses.overlap
        if self.settings.weighting == "dpace":
            functions["probability"] = losses.probability
        return functions

    def _compute_log_norm(self, goal_states: Tensor, goal_logits: Tensor) -> Tensor:
        """[M] log-normaliser of the target's distribution over all V tokens; over the draft vocabulary where that suffices."""
        if self.drafter.draft_to_target is None or not FULL_VOCABULARY_LOSSES & set(self.losses):
            return goal_logits.logsumexp(-1)
        target = self.drafter.target
        target_logits = (
            target.logits(chunk) / self.temperature for chunk in goal_states.split(_count_chunk_slots(target))
        )
        return torch.cat([chunk.logsumexp(-1).float() for chunk in target_logits])

    def _weigh_losses(self, terms: LossTerms, batch: TrainingBatch, plan: UnrollPlan) -> Tensor:
        """The scalar loss"""
        factors = [
            share / unroll_step.slot_share if unroll_step.slot_share else 0.0
            for share, unroll_step in zip(self.shares, plan.steps)
        ]
        goal_losses = terms["pointwise"]
        if "lk" in self.losses:
            hybrid = losses.lk(terms["kl"], terms["overlap"], terms["exists"], eta=self.settings.eta)
            goal_losses = goal_losses + self.losses["lk"] * hybrid
        weights = torch.stack([factor * row for factor, row in zip(factors, terms["exists"])])  # [K, G]
        if self.settings.weighting == "decay" and "e2e_tv" not in self.losses:
            return (weights * goal_losses).sum()
        return self._weigh_slots(terms, weights, goal_losses, batch, plan)

    def _weigh_slots(
        self, terms: LossTerms, weights: Tensor, goal_losses: Tensor, batch: TrainingBatch, plan: UnrollPlan
    ) -> Tensor:
        """The scalar loss, with weights or losses that look at several depths of a slot."""
        num_rows, length = batch.tokens.shape
        goal_rows, goal_positions = plan.goals.unbind(1)
        depths = torch.arange(1, self.depth + 1, device=goal_rows.device)[:, None]
        # Where goal g, guessed at depth d, has its slot: d tokens before
        slot_indices = goal_rows * length + goal_positions - depths  # [K, G]
        slot_indices = torch.where(
            terms["exists"], slot_indices, num_rows * length
        )  # one more for those that do not exist

        def by_slot(values: Tensor) -> Tensor:  # [K, G] -> [K, B*T]
            padded = values.new_zeros(self.depth, num_rows * length + 1)
            return padded.scatter(1, slot_indices, values)[:, :-1]

        if self.settings.weighting != "decay":
            exists = by_slot(terms["exists"])
            if self.settings.weighting == "dpace":
                slot_weights = losses.dpace(by_slot(terms["probability"]), exists)
            else:
                slot_weights = losses.vat(by_slot(terms["matches"]), exists, decay=self.settings.decay)
            weights = weights * nn.functional.pad(slot_weights, (0, 1)).gather(1, slot_indices)
        total = (weights * goal_losses).sum()
        if "e2e_tv" in self.losses:
            share = plan.steps[-1].slot_share or 1.0
            slot_losses = losses.e2e_tv(by_slot(terms["overlap"]), by_slot(terms["exists"])) / share
            total = total + self.losses["e2e_tv"] * slot_losses.sum()
        return total


@dataclass(frozen=True)
class ChunkOutputs:
    """An `UnrollOutput` of the slots of one part of the goals, [m, .] for each depth."""

    plan: UnrollPlan
    readouts: list[Tensor]
    states: list[Tensor]

    def select(self, values: list[Tensor], d: int, chunk: GoalChunk) -> Tensor:
        return values[d - 1]


def sum_divergence(target: Target, final: Tensor, original_final: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL of the target's distribution at `final` from that at `wanted`, [M, D] each, over all V tokens, summed over M."""

    def chunk_divergence(final: Tensor, original_final: Tensor) -> Tensor:
        q, p = ((target.logits(values) / temperature).log_softmax(-1) for values in (final, original_final))  # [m, V]
        return (p.exp() * (p - q)).sum()

    return _sum_chunks(chunk_divergence, target, final, original_final)


def _sum_chunks(chunk_function: Callable[..., Tensor], target: Target, *values: Tensor) -> Tensor:
    """The sum of `part` over chunks of the values, whose logits are made again in the backward pass."""
    chunks = zip(*(tensor.split(_count_chunk_slots(target)) for tensor in values))
    return torch.stack([checkpoint(chunk_function, *chunk, use_reentrant=False) for chunk in chunks]).sum()  # type: ignore[misc]


def _compute_padded(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """function(values [M, E]) -> [M, W], computed on a multiple of ROUND rows"""
    return function(nn.functional.pad(values, (0, 0, 0, -len(values) % SLOT_MULTIPLE)))[: len(values)]


def count_logits(drafter: Drafter, losses: Collection[str]) -> int:
    """How many logits, of all depths, exist at a time: on a GPU a power of two by the memory that is free, beside what training
    the drafter will take. So a run that is continued beside as much other work has as many."""
    trained_parameters = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    if not trained_parameters or trained_parameters[0].device.type != "cuda":
        return MIN_LOGITS
    free_bytes, _ = torch.cuda.mem_get_info(trained_parameters[0].device)
    free_bytes -= 3 * sum(parameter.nbytes for parameter in trained_parameters)  # gradients, and two moments
    num_fitting = max(1, free_bytes // (BYTES_PER_KL_LOGIT if set(losses) == {"kl"} else BYTES_PER_LOGIT))
    return max(MIN_LOGITS, 1 << (num_fitting.bit_length() - 1))


def _count_chunk_slots(target: Target) -> int:
    """How many slots make TARGET_LOGITS logits."""
    return max(1, TARGET_LOGITS // target.vocab_size)


def order_by_start(values: Tensor) -> Tensor:
    """values [K, n]: depth d's guess of token i -> [K, n] as in replay.count_rounds: entry [d-1, s] is that of token s+d-1."""
    num = values.shape[1]
    shifted_rows = [nn.functional.pad(row[d:], (1, min(d - 1, num - 1)))[:num] for d, row in enumerate(values, start=1)]
    return torch.stack(shifted_rows)


def list_slots(batch: TrainingBatch, output: TargetOutput, depth: int) -> Slots:
    """All slots of a batch whose steps 1..depth stay inside one document, for `Drafter.solve`."""
    length = batch.tokens.shape[1]
    num_slots = length - depth  # slots 1..length-depth
    token_indices = torch.arange(1, num_slots + 1, device=batch.tokens.device)[:, None] + torch.arange(
        depth, device=batch.tokens.device
    )
    is_slot = (batch.positions[:, 1 : num_slots + 1] > 0) & (
        batch.documents[:, 1 : num_slots + 1] == batch.documents[:, depth : num_slots + depth]
    )
    previous_states = output.features[:, :num_slots][is_slot], output.final[:, :num_slots][is_slot]
    return Slots(*previous_states, batch.tokens[:, token_indices][is_slot], output.final[:, token_indices][is_slot])
