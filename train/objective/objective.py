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
from specdec.target.adapter import original as original_target
from specdec.target.model import Target, TargetOutput
from specdec.unroll.plan import ROUND_SLOTS, Unrolled, UnrollPart, UnrollPlan, plan_unroll, unroll
from train.data.batches import TrainingBatch
from train.features.outputs import read_outputs
from train.objective import losses
from train.objective.fused import PartsOfGoals, fused_kl, has_kernel
from train.objective.losses import LOSSES

DEPTH_LOSSES = {"lk", "e2e_tv"}  # of several slots or depths together
ADAPTED = "original"  # for a drafter that adapts its target: KL of the adapted target from the original one
ALL_TOKENS = {"tv", "nla", "top_k", "confidence", *DEPTH_LOSSES}  # need the target's distribution over all V tokens
# Logits of all depths that exist at a time, if the number of goals is not given; a GPU may have room for more
LOGITS = 2**27
BYTES = 24  # of free memory for each logit: its derivative is kept, and the step needs most of the memory
BYTES_OF_PROBS = 64  # the same with losses other than KL, of which autograd keeps distributions in float32
AT_ONCE = 2**27  # the same where no logits are kept: products are large, and a GPU is not filled by what they make
LEAST_GOALS = 512  # but not fewer goals than this, for products and for gradients of the LM head, which are added up
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
Judgement = dict[str, Tensor]


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
    def used(self) -> dict[str, float]:
        """The losses that are computed."""
        return {name: weight for name, weight in self.losses.items() if weight}

    def check(self, drafter: Drafter) -> None:
        """Raises ValueError, with what to change, for what does not fit together or to the drafter."""
        used, known = self.used, {*LOSSES, *DEPTH_LOSSES, ADAPTED}
        judging = used.keys() - {"smooth_l1", "confidence", "candidates", ADAPTED}
        steps = drafter.depth not in (None, self.depth)
        later = self.keep < 1 and drafter.attends not in ("path", "none")
        whole_slots = drafter.attends == "block"  # elsewhere step 1 is judged on all slots, sampled or not
        all_depths = not whole_slots and ("e2e_tv" in used or self.weighting != "decay")
        names = "num_heads, num_modules or num_drafts"
        change = (
            f"; the head of start= keeps its {names}" if drafter.pretrained else f", or change the drafter's {names}"
        )
        sampled = (self.anchors is not None or self.keep < 1) and all_depths
        wrong = {
            f"losses={dict(self.losses)}: give weights to some of {', '.join(sorted(known))}.": not used
            or set(used) - known,
            f"losses={used}: one of them must judge the drafted tokens, such as kl.": not judging,
            f"depth={self.depth} must be this drafter's number of steps, {drafter.depth}: more steps do not exist, and fewer "
            f"would leave parts untrained. Set depth={drafter.depth}{change}.": steps,
            f"keep={self.keep}: the later steps of this head run on the slots of its first one: set keep=1.": later,
            "The loss smooth_l1 compares a state with the target's, which only eagle, hass, eagle3 and mtp estimate: set "
            "its weight in losses= to 0.": "smooth_l1" in used and not drafter.estimates,
            "The loss original is for heads that adapt the target, such as medusa2: set its weight in losses= to 0.": ADAPTED
            in used
            and not drafter.adapts_target,
            "The loss confidence and a head with a confidence output, such as dspark, go together: set the head's "
            "confidence to false or the weight in losses= to 0, or set both.": ("confidence" in used)
            != drafter.confident,
            "The loss candidates and a head with a candidate lattice, such as dflash2, go together: give the loss a weight in losses= "
            "for such a head, and 0 for others.": ("candidates" in used) != drafter.has_candidates,
            "The loss confidence would judge the logits without the lattice: set the head's confidence to false.": "confidence"
            in used
            and drafter.has_candidates,
            "e2e_tv, dpace and vat need all depths of a slot: set anchors=null and keep=1.": sampled,
        }
        raise_first(wrong)


class Objective(nn.Module):
    """The module that accelerate prepares, instead of the drafter: gradients are synchronised in its `forward`.

    settings: of `ObjectiveOptions`
    """

    Options = ObjectiveOptions

    def __init__(self, drafter: Drafter, **settings):
        super().__init__()
        chosen = read_options(ObjectiveOptions, settings)
        chosen.check(drafter)
        self.drafter, self.settings, self.losses = drafter, chosen, chosen.used
        self.depth, self.temperature, self.supervise = chosen.depth, chosen.temperature, chosen.supervise
        self.chunk = chosen.chunk or max(1, num_logits(drafter, self.losses) // (self.depth * drafter.vocab_size))
        self.every_slot = chosen.anchors is None and chosen.keep == 1  # only then can the batch's text be replayed
        weights = [chosen.decay**step for step in range(self.depth)]
        weights = weights if chosen.weighting == "decay" else [1.0] * self.depth
        self.shares = [weight / sum(weights) for weight in weights]  # [K]

    def forward(self, batch: TrainingBatch, output: TargetOutput | None, *, compare: bool = True) -> Loss:
        """output: of the frozen target; None for a drafter that adapts its target, because the target is then read here

        compare: whether to compare guesses with the text
        """
        forget_casts()
        chosen, original = self.settings, None
        if output is None:
            output, original = self._read(batch)
        features = output.features
        if chosen.noise and self.training:
            features = features + (torch.rand_like(features) * 2 - 1) * chosen.noise
        host = batch.on_host
        steps = plan_unroll(
            self.drafter,
            host.documents,
            host.positions,
            batch.goals(self.supervise),
            depth=self.depth,
            anchors=chosen.anchors,
            keep=chosen.keep,
        ).to(batch.tokens.device)
        unrolled = unroll(
            self.drafter, batch.tokens, features, steps, gradient_checkpointing=chosen.gradient_checkpointing
        )
        compare = compare or chosen.weighting == "vat"
        weights_known = chosen.weighting == "decay" and not DEPTH_LOSSES & set(self.losses)  # before the logits are
        if weights_known and torch.is_grad_enabled() and fast.on("loss", batch.tokens.device):
            judged, total = self._judge_at_once(batch, output.final, unrolled, compare)
            return self._finish(judged, total, batch, steps, output, original)
        results = []
        parts = list(steps.parts(self.chunk))
        for part in parts:
            arguments = part, batch, output.final, unrolled, compare
            # With one part its logits are kept for the backward pass; with several they are made again there.
            if len(parts) > 1 and torch.is_grad_enabled():
                results.append(checkpoint(self._judge, *arguments, use_reentrant=False))
            else:
                results.append(self._judge(*arguments))
        judged = {name: torch.cat([result[name] for result in results], dim=1) for name in results[0]}
        return self._finish(judged, self._weigh(judged, batch, steps), batch, steps, output, original)

    def _finish(
        self,
        judged: Judgement,
        total: Tensor,
        batch: TrainingBatch,
        steps: UnrollPlan,
        output: TargetOutput,
        original: TargetOutput | None,
    ) -> Loss:
        rows, position = steps.goals.unbind(1)
        if original is not None and ADAPTED in self.losses:
            finals = output.final[rows, position - 1], original.final[rows, position - 1]
            total = total + self.losses[ADAPTED] * divergence(
                self.drafter.target, *finals, temperature=self.temperature
            )
        matches = None
        if "matches" in judged:
            matches = torch.zeros(self.depth, *batch.tokens.shape, dtype=torch.bool, device=total.device)  # [K, B, T]
            matches[:, rows, position] = judged["matches"]
        return Loss(total, len(rows), matches)

    def _judge_at_once(
        self, batch: TrainingBatch, final: Tensor, unrolled: Unrolled, compare: bool
    ) -> tuple[Judgement, Tensor]:
        """What `_judge` gives for all parts, if it was asked to compare, and the weighted sum of losses, by train/objective/fused.py."""
        steps, kernel = unrolled.plan, self.losses.keys() == {"kl"} and has_kernel(final.device)
        states = unrolled.states if "smooth_l1" in self.losses else []
        parts = list(steps.parts(max(LEAST_GOALS, AT_ONCE // (self.depth * self.drafter.vocab_size))))
        places = [[step.places[at] for step, at in zip(steps.steps, part.steps)] for part in parts]
        results: list[Judgement] = []

        def judge(number: int, values: list[Tensor]) -> tuple[Tensor, Judgement]:
            taken = _Taken(steps, values[: self.depth], values[self.depth :])
            judged = self._judge(
                parts[number], batch, final, taken, compare, together=self.drafter.one_output, kernel=kernel
            )
            total = self._weigh(judged, batch, steps)
            return total, {name: each for name, each in judged.items() if name == "matches"}

        values = [*unrolled.readouts, *states]
        trained = [each for each in self.drafter.parameters() if each.requires_grad]
        rows = [row * (2 if states else 1) for row in places]
        total = PartsOfGoals.apply(judge, rows, results, len(values), *values, *trained)
        return {name: torch.cat([each[name] for each in results], dim=1) for name in results[0]}, total

    def _read(self, batch: TrainingBatch) -> tuple[TargetOutput, TargetOutput]:
        """The outputs of the adapted target, with gradient, and of the original one."""
        target, layers = self.drafter.target, self.drafter.target_layers
        with original_target(target):
            original = read_outputs(target, batch, ())
        return read_outputs(target, batch, layers, gradient=True), original

    def _judge(
        self,
        part: UnrollPart,
        batch: TrainingBatch,
        final: Tensor,
        unrolled: "Unrolled | _Taken",
        compare: bool,
        *,
        together: bool = False,
        kernel: bool = False,
    ) -> Judgement:
        """-> [K, M] each, for the M goals of a part

        together: whether one product makes the logits of all depths; kernel: whether one kernel makes their KL
        """
        drafter = self.drafter
        rows, position = unrolled.plan.goals[part.goals].unbind(1)
        num, tokens = len(rows), batch.tokens[rows, position]  # [M]
        judge = final[rows, position - 1].detach()  # [M, D]
        with torch.no_grad():
            logits = losses.tempered(_rounded(drafter.goal_logits, judge), self.temperature)  # [M, W]
            token = tokens if drafter.target_to_draft is None else drafter.target_to_draft[tokens]
            goal = losses.Goal(judge, logits, token, self._norm(judge, logits))
        extra = self._extra()
        depths: dict[str, list[Tensor]] = {name: [] for name in ("exists", "pointwise", *extra)}
        if compare:
            depths["matches"] = []
        readouts = [unrolled.at(unrolled.readouts, d, part) for d in range(1, self.depth + 1)]  # [m, R] each
        sizes = [len(each) for each in readouts]
        every = _rounded(partial(drafter.judged_logits, 1), torch.cat(readouts)).split(sizes) if together else None
        for d, readout in enumerate(readouts, start=1):
            numbers = unrolled.plan.steps[d - 1].goals[part.steps[d - 1]] - part.goals.start  # [m]
            whole = len(numbers) == num

            def spread(values: Tensor, numbers: Tensor = numbers, whole: bool = whole) -> Tensor:  # [m] -> [M]
                return values if whole else values.new_zeros(num).index_copy(0, numbers, values)

            logits = every[d - 1] if every else _rounded(partial(drafter.judged_logits, d), readout)  # [m, W]
            if compare:
                guess = drafter.to_target(drafter.guess(d, readout, logits.detach()))
                depths["matches"].append(spread(guess == tokens.index_select(0, numbers)))
            if kernel:
                depths["exists"].append(spread(torch.ones_like(numbers, dtype=torch.bool)))
                depths["pointwise"].append(
                    spread(self.losses["kl"] * fused_kl(logits, goal.logits, numbers, self.temperature))
                )
                continue
            judged = losses.Judged(
                goal if whole else goal.of(numbers),
                logits,
                unrolled.at(unrolled.states, d, part) if "smooth_l1" in self.losses else None,
                drafter.confidence(d, readout),
                drafter.candidate_loss(readout, logits, goal.likeliest[numbers])
                if "candidates" in self.losses
                else None,
                self.temperature,
            )
            weighted = [weight * LOSSES[name](judged) for name, weight in self.losses.items() if name in LOSSES]
            depths["exists"].append(spread(torch.ones_like(numbers, dtype=torch.bool)))
            depths["pointwise"].append(spread(sum(weighted, goal.norm.new_zeros(len(numbers)))))
            for name, function in extra.items():
                depths[name].append(spread(function(judged)))
        return {name: torch.stack(values) for name, values in depths.items()}

    def _extra(self) -> dict[str, Callable[[losses.Judged], Tensor]]:
        """What the losses in use need beside their own values: functions by the name of their result."""
        extra: dict[str, Callable[[losses.Judged], Tensor]] = {}
        if "lk" in self.losses:
            extra["kl"] = losses.kl
        if {"lk", "e2e_tv"} & set(self.losses):
            extra["overlap"] = losses.overlap
        if self.settings.weighting == "dpace":
            extra["probability"] = losses.probability
        return extra

    def _norm(self, judge: Tensor, goal_logits: Tensor) -> Tensor:
        """[M] log-normaliser of the target's distribution over all V tokens; over the draft vocabulary where that suffices."""
        if self.drafter.draft_to_target is None or not ALL_TOKENS & set(self.losses):
            return goal_logits.logsumexp(-1)
        target = self.drafter.target
        logits = (target.logits(part) / self.temperature for part in judge.split(_num_slots(target)))
        return torch.cat([part.logsumexp(-1).float() for part in logits])

    def _weigh(self, judged: Judgement, batch: TrainingBatch, steps: UnrollPlan) -> Tensor:
        """The scalar loss"""
        factors = [share / step.share if step.share else 0.0 for share, step in zip(self.shares, steps.steps)]
        losses_by_goal = judged["pointwise"]
        if "lk" in self.losses:
            hybrid = losses.lk(judged["kl"], judged["overlap"], judged["exists"], eta=self.settings.eta)
            losses_by_goal = losses_by_goal + self.losses["lk"] * hybrid
        weights = torch.stack([factor * row for factor, row in zip(factors, judged["exists"])])  # [K, G]
        if self.settings.weighting == "decay" and "e2e_tv" not in self.losses:
            return (weights * losses_by_goal).sum()
        return self._weigh_slots(judged, weights, losses_by_goal, batch, steps)

    def _weigh_slots(
        self, judged: Judgement, weights: Tensor, losses_by_goal: Tensor, batch: TrainingBatch, steps: UnrollPlan
    ) -> Tensor:
        """The scalar loss, with weights or losses that look at several depths of a slot."""
        num_rows, length = batch.tokens.shape
        rows, position = steps.goals.unbind(1)
        depths = torch.arange(1, self.depth + 1, device=rows.device)[:, None]
        # Where goal g, guessed at depth d, has its slot: d tokens before
        slot = rows * length + position - depths  # [K, G]
        slot = torch.where(judged["exists"], slot, num_rows * length)  # one more for those that do not exist

        def by_slot(values: Tensor) -> Tensor:  # [K, G] -> [K, B*T]
            wide = values.new_zeros(self.depth, num_rows * length + 1)
            return wide.scatter(1, slot, values)[:, :-1]

        if self.settings.weighting != "decay":
            counted = by_slot(judged["exists"])
            if self.settings.weighting == "dpace":
                by_slots = losses.dpace(by_slot(judged["probability"]), counted)
            else:
                by_slots = losses.vat(by_slot(judged["matches"]), counted, decay=self.settings.decay)
            weights = weights * nn.functional.pad(by_slots, (0, 1)).gather(1, slot)
        total = (weights * losses_by_goal).sum()
        if "e2e_tv" in self.losses:
            share = steps.steps[-1].share or 1.0
            slots = losses.e2e_tv(by_slot(judged["overlap"]), by_slot(judged["exists"])) / share
            total = total + self.losses["e2e_tv"] * slots.sum()
        return total


@dataclass(frozen=True)
class _Taken:
    """An `Unrolled` of the slots of one part of the goals, [m, .] for each depth."""

    plan: UnrollPlan
    readouts: list[Tensor]
    states: list[Tensor]

    def at(self, values: list[Tensor], d: int, part: UnrollPart) -> Tensor:
        return values[d - 1]


def divergence(target: Target, final: Tensor, wanted: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL of the target's distribution at `final` from that at `wanted`, [M, D] each, over all V tokens, summed over M."""

    def part(final: Tensor, wanted: Tensor) -> Tensor:
        q, p = ((target.logits(values) / temperature).log_softmax(-1) for values in (final, wanted))  # [m, V]
        return (p.exp() * (p - q)).sum()

    return _in_parts(part, target, final, wanted)


def _in_parts(part: Callable[..., Tensor], target: Target, *values: Tensor) -> Tensor:
    """The sum of `part` over chunks of the values, whose logits are made again in the backward pass."""
    chunks = zip(*(each.split(_num_slots(target)) for each in values))
    return torch.stack([checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks]).sum()  # type: ignore[misc]


def _rounded(function: Callable[[Tensor], Tensor], values: Tensor) -> Tensor:
    """function(values [M, E]) -> [M, W], computed on a multiple of ROUND rows"""
    return function(nn.functional.pad(values, (0, 0, 0, -len(values) % ROUND_SLOTS)))[: len(values)]


def num_logits(drafter: Drafter, losses: Collection[str]) -> int:
    """How many logits, of all depths, exist at a time: on a GPU a power of two by the memory that is free, beside what training
    the drafter will take. So a run that is continued beside as much other work has as many."""
    trained = [parameter for parameter in drafter.parameters() if parameter.requires_grad]
    if not trained or trained[0].device.type != "cuda":
        return LOGITS
    free, _ = torch.cuda.mem_get_info(trained[0].device)
    free -= 3 * sum(parameter.nbytes for parameter in trained)  # gradients, and two moments
    fitting = max(1, free // (BYTES if set(losses) == {"kl"} else BYTES_OF_PROBS))
    return max(LOGITS, 1 << (fitting.bit_length() - 1))


def _num_slots(target: Target) -> int:
    """How many slots make TARGET_LOGITS logits."""
    return max(1, TARGET_LOGITS // target.vocab_size)


def by_start(values: Tensor) -> Tensor:
    """values [K, n]: depth d's guess of token i -> [K, n] as in replay.rounds: entry [d-1, s] is that of token s+d-1."""
    num = values.shape[1]
    moved = [nn.functional.pad(row[d:], (1, min(d - 1, num - 1)))[:num] for d, row in enumerate(values, start=1)]
    return torch.stack(moved)


def slots(batch: TrainingBatch, output: TargetOutput, depth: int) -> Slots:
    """All slots of a batch whose steps 1..depth stay inside one document, for `Drafter.solve`."""
    length = batch.tokens.shape[1]
    num = length - depth  # slots 1..length-depth
    at = torch.arange(1, num + 1, device=batch.tokens.device)[:, None] + torch.arange(depth, device=batch.tokens.device)
    real = (batch.positions[:, 1 : num + 1] > 0) & (
        batch.documents[:, 1 : num + 1] == batch.documents[:, depth : num + depth]
    )
    before = output.features[:, :num][real], output.final[:, :num][real]
    return Slots(*before, batch.tokens[:, at][real], output.final[:, at][real])
