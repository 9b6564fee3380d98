"""The training objective: unroll the drafter, judge every goal at every depth, and weigh the results."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from specdec import masks
from specdec.drafter import Drafter, Slots
from specdec.target import Target, TargetOutput
from specdec.target_adapter import original as original_target
from specdec.unroll import Unrolled, unroll
from train import losses, survival
from train.data import Batch, answers
from train.losses import LOSSES

TEXT_LOSSES = {"lk", "e2e_tv", "rounds"}  # of whole slots or texts: functions of train/survival.py
ADAPTED = "original"  # for a drafter that adapts its target: KL of the adapted target from the original one
WEIGHTINGS = ("decay", "dpace", "vat")
FULL_LAW = {"tv", "nla", "top_k", "confidence", *TEXT_LOSSES}  # need the target's law over all V tokens
NORM_CHUNK = 256  # slots whose [., V] logits exist at a time


@dataclass(frozen=True)
class Loss:
    """Sums over the batch's judged slots, so that the mean can be taken over all processes and micro-batches."""

    total: Tensor  # scalar, weighted by depth and by the losses' weights
    num_goals: Tensor  # scalar: supervised tokens, the divisor
    matches: Tensor  # [K, B, T] bool: the guess of depth d for token i is the token that the text has


# Results for G goals at K depths, [K, G] each, by name:
#   exists    bool: a slot guessed this goal at this depth          matches   bool: the guess is the token of the text
#   pointwise the weighted sum of per-slot losses
# and, where a loss in use needs them, kl, overlap (sum of min(p, q)), accept (min(1, q(x) / p(x))), chance (q(x))
Judgement = dict[str, Tensor]


class Objective(nn.Module):
    """The module that accelerate prepares, instead of the drafter: gradients are synchronised in its `forward`.

    losses: weights by name, of the functions in train/losses.py, of lk, e2e_tv and rounds in train/survival.py, and
        of `original`, the KL of an adapted target from the original one; losses of weight 0 are not computed
    depth: steps of the unroll (EAGLE-3's training-time test); decay: weight of a step relative to the one before
    weighting: decay alone, or the weights of D-PACE or VAT, which follow the survival along the text (VAT uses decay behind the
        first rejection)
    temperature: of both laws in losses on logits; eta: of the LK hybrid
    noise: half-width of the uniform noise on features, EAGLE-1's augmentation
    anchors: slots of a row that run the steps after the first (of a block drafter: its only step); None: all that have a goal
    chunk: goals whose [., W] logits exist at a time
    """

    def __init__(
        self,
        drafter: Drafter,
        *,
        losses: dict[str, float],
        depth: int,
        decay: float,
        weighting: str,
        temperature: float,
        eta: float,
        noise: float,
        anchors: int | None,
        chunk: int,
    ):
        super().__init__()
        used = {name: weight for name, weight in losses.items() if weight}
        _check(
            drafter,
            losses,
            used,
            depth=depth,
            weighting=weighting,
            temperature=temperature,
            anchors=anchors,
            chunk=chunk,
        )
        self.drafter = drafter
        self.losses, self.depth, self.decay, self.weighting = used, depth, decay, weighting
        self.temperature, self.eta, self.noise, self.anchors, self.chunk = temperature, eta, noise, anchors, chunk
        self.every_slot = anchors is None  # only then can the batch's text be replayed
        weights = [decay**step for step in range(depth)] if weighting == "decay" else [1.0] * depth
        self.shares = [weight / sum(weights) for weight in weights]  # [K]

    def forward(self, batch: Batch, output: TargetOutput | None) -> Loss:
        """output: of the frozen target; None for a drafter that adapts its target, because the target is then read here"""
        original = None
        if output is None:
            output, original = self._read(batch)
        features = output.features
        if self.noise and self.training:
            features = features + (torch.rand_like(features) * 2 - 1) * self.noise
        unrolled = unroll(
            self.drafter,
            batch.tokens,
            features,
            documents=batch.documents,
            positions=batch.positions,
            goals=batch.loss_mask,
            depth=self.depth,
            anchors=self.anchors,
        )
        goals = batch.loss_mask.nonzero()  # [G, 2] row and position
        parts = []
        chunks = goals.split(self.chunk)
        for chunk in chunks:
            # With one chunk its logits are kept for the backward pass; with several they are made again there.
            if len(chunks) > 1 and torch.is_grad_enabled():
                parts.append(checkpoint(self._judge, chunk, batch, output.final, unrolled, use_reentrant=False))
            else:
                parts.append(self._judge(chunk, batch, output.final, unrolled))
        judged = {name: torch.cat([part[name] for part in parts], dim=1) for name in parts[0]}
        matches = torch.zeros(self.depth, *batch.tokens.shape, dtype=torch.bool, device=goals.device)  # [K, B, T]
        matches[:, goals[:, 0], goals[:, 1]] = judged["matches"]
        total = self._weigh(judged, goals, batch, unrolled.share)
        if original is not None and ADAPTED in self.losses:
            rows, position = goals.unbind(1)
            finals = output.final[rows, position - 1], original.final[rows, position - 1]
            total = total + self.losses[ADAPTED] * divergence(
                self.drafter.target, *finals, temperature=self.temperature
            )
        return Loss(total, torch.tensor(len(goals), device=goals.device), matches)

    def _read(self, batch: Batch) -> tuple[TargetOutput, TargetOutput]:
        """The outputs of the adapted target, with gradient, and of the original one."""
        target, layers = self.drafter.target, self.drafter.target_layers
        mask = masks.documents(batch.documents)
        with original_target(target):
            original = target.read(batch.tokens, (), positions=batch.positions, mask=mask)
        output = target.read(batch.tokens, layers, positions=batch.positions, mask=mask, gradient=True)
        return output, original

    def _judge(self, goals: Tensor, batch: Batch, final: Tensor, unrolled: Unrolled) -> Judgement:
        """goals [M, 2] -> [K, M] each"""
        drafter, device = self.drafter, goals.device
        rows, position = goals.unbind(1)
        tokens = batch.tokens[rows, position]  # [M]
        token = tokens if drafter.target_to_draft is None else drafter.target_to_draft[tokens]
        judge = final[rows, position - 1].detach()  # [M, D]
        with torch.no_grad():
            goal_logits = drafter.goal_logits(judge).float() / self.temperature  # [M, W]
            goal_norm = self._norm(judge, goal_logits)
        extra = {}
        if "lk" in self.losses:
            extra["kl"] = losses.kl
        if {"lk", "e2e_tv"} & set(self.losses):
            extra["overlap"] = losses.overlap
        if "rounds" in self.losses:
            extra["accept"] = survival.accept
        if self.weighting == "dpace":
            extra["chance"] = survival.chance
        depths: dict[str, list[Tensor]] = {name: [] for name in ("exists", "matches", "pointwise", *extra)}
        for d in range(1, self.depth + 1):
            readout, exists = unrolled.at(unrolled.readouts, d, rows, position)
            state = unrolled.at(unrolled.states, d, rows, position)[0][exists] if self.drafter.estimates else None
            logits = drafter.logits(d, readout[exists]).float()  # [m, W]
            judged = losses.Judged(
                state,
                logits / self.temperature,
                judge[exists],
                goal_logits[exists],
                token[exists],
                goal_norm[exists],
                drafter.confidence(d, readout[exists]),
            )
            pointwise = torch.zeros(len(logits), device=device)
            for name, weight in self.losses.items():
                if name in LOSSES:
                    pointwise = pointwise + weight * LOSSES[name](judged)

            def spread(values: Tensor, exists: Tensor = exists) -> Tensor:  # [m] -> [M]
                return torch.zeros(len(exists), dtype=values.dtype, device=device).masked_scatter(exists, values)

            depths["exists"].append(exists)
            depths["matches"].append(spread(drafter.to_target(logits.argmax(-1)) == tokens[exists]))
            depths["pointwise"].append(spread(pointwise))
            for name, function in extra.items():
                depths[name].append(spread(function(judged)))
        return {name: torch.stack(values) for name, values in depths.items()}

    def _norm(self, judge: Tensor, goal_logits: Tensor) -> Tensor:
        """[M] log-normaliser of the target's law over all V tokens; over the draft vocabulary where that suffices."""
        if self.drafter.draft_to_target is None or not FULL_LAW & set(self.losses):
            return goal_logits.logsumexp(-1)
        logits = (self.drafter.target.logits(part) / self.temperature for part in judge.split(NORM_CHUNK))
        return torch.cat([part.logsumexp(-1).float() for part in logits])

    def _weigh(self, judged: Judgement, goals: Tensor, batch: Batch, share: list[float]) -> Tensor:
        """The scalar loss; share [K]: of the slots with a goal, how many were run."""
        num_rows, length = batch.tokens.shape
        device, depths = goals.device, torch.arange(1, self.depth + 1, device=goals.device)
        # Where goal g, guessed at depth d, has its slot: d tokens before
        slot = goals[:, 0] * length + goals[:, 1] - depths[:, None]  # [K, G]
        slot = torch.where(judged["exists"], slot, num_rows * length)  # one more for those that do not exist

        def by_slot(values: Tensor) -> Tensor:  # [K, G] -> [K, B*T]
            wide = torch.zeros(self.depth, num_rows * length + 1, dtype=values.dtype, device=device)
            return wide.scatter(1, slot, values)[:, :-1]

        losses_by_goal = judged["pointwise"]
        if "lk" in self.losses:
            hybrid = survival.lk(judged["kl"], judged["overlap"], judged["exists"], eta=self.eta)
            losses_by_goal = losses_by_goal + self.losses["lk"] * hybrid
        factors = torch.tensor([a / b if b else 0.0 for a, b in zip(self.shares, share)], device=device)[:, None]
        weights = factors * judged["exists"]  # [K, G]
        if self.weighting != "decay":
            counted = by_slot(judged["exists"])
            if self.weighting == "dpace":
                by_slots = survival.dpace(by_slot(judged["chance"]), counted)
            else:
                by_slots = survival.vat(by_slot(judged["matches"]), counted, decay=self.decay)
            weights = weights * nn.functional.pad(by_slots, (0, 1)).gather(1, slot)
        total = (weights * losses_by_goal).sum()
        if "e2e_tv" in self.losses:
            slots = survival.e2e_tv(by_slot(judged["overlap"]), by_slot(judged["exists"])) / (share[-1] or 1.0)
            total = total + self.losses["e2e_tv"] * slots.sum()
        if "rounds" in self.losses:
            by_goal = torch.zeros(self.depth, num_rows, length, device=device)
            by_goal = by_goal.index_put((depths[:, None] - 1, goals[:, 0], goals[:, 1]), judged["accept"].float())
            for row in range(num_rows):
                for start, stop in answers(batch, row):
                    total = total + self.losses["rounds"] * survival.rounds(by_start(by_goal[:, row, start:stop]))
        return total


def _check(
    drafter: Drafter,
    given: dict[str, float],
    used: dict[str, float],
    *,
    depth: int,
    weighting: str,
    temperature: float,
    anchors: int | None,
    chunk: int,
) -> None:
    """Raises ValueError, with what to change, for settings of an objective that do not fit together or the drafter."""
    known = {*LOSSES, *TEXT_LOSSES, ADAPTED}
    if not used or set(used) - known:
        raise ValueError(f"losses={dict(given)}: give weights to some of {', '.join(sorted(known))}.")
    if min(depth, chunk, 1 if anchors is None else anchors) < 1 or temperature <= 0:
        raise ValueError(
            f"depth={depth}, chunk={chunk} and anchors={anchors} must be at least 1, and temperature={temperature} above 0."
        )
    if not used.keys() - {"smooth_l1", "confidence", ADAPTED}:
        raise ValueError(f"losses={used}: one of them must judge the drafted tokens, such as kl.")
    if weighting not in WEIGHTINGS:
        raise ValueError(f"weighting={weighting} must be one of {', '.join(WEIGHTINGS)}.")
    if drafter.depth not in (None, depth):
        raise ValueError(
            f"depth={depth} must be this drafter's number of steps, {drafter.depth}: more steps do not exist, and fewer would "
            "leave parts untrained. Change it, or the drafter's num_heads, num_modules or num_drafts."
        )
    _check_losses(drafter, used, weighting=weighting, anchors=anchors)


def _check_losses(drafter: Drafter, used: dict[str, float], *, weighting: str, anchors: int | None) -> None:
    """The losses that only some drafters, or only some samplings of slots, can have."""
    if "smooth_l1" in used and not drafter.estimates:
        raise ValueError(
            "The loss smooth_l1 compares a state with the target's, which only eagle, hass, eagle3 and mtp estimate: set "
            "its weight in losses= to 0."
        )
    if ADAPTED in used and not drafter.adapts_target:
        raise ValueError(
            "The loss original is for heads that adapt the target, such as medusa2: set its weight in losses= to 0."
        )
    if ("confidence" in used) != drafter.confident:
        raise ValueError(
            "The loss confidence and a head with a confidence output, such as dspark, go together: set the head's "
            "confidence to false or the weight in losses= to 0, or set both."
        )
    whole_slots = drafter.attends == "block"  # elsewhere step 1 is judged on all slots, sampled or not
    if anchors is not None and ("rounds" in used or (not whole_slots and ("e2e_tv" in used or weighting != "decay"))):
        raise ValueError(
            "The loss rounds needs whole texts; e2e_tv, dpace and vat need all depths of a slot: set anchors=null."
        )


def divergence(target: Target, final: Tensor, wanted: Tensor, *, temperature: float = 1.0) -> Tensor:
    """KL of the target's law at `final` from that at `wanted`, [M, D] each, over all V tokens, summed over M."""

    def part(final: Tensor, wanted: Tensor) -> Tensor:
        q, p = ((target.logits(values) / temperature).log_softmax(-1) for values in (final, wanted))  # [m, V]
        return (p.exp() * (p - q)).sum()

    return _in_parts(part, final, wanted)


def cross_entropy(target: Target, final: Tensor, tokens: Tensor) -> Tensor:
    """-log of the target's law at final [M, D] for tokens [M], summed over M"""

    def part(final: Tensor, tokens: Tensor) -> Tensor:
        return nn.functional.cross_entropy(target.logits(final), tokens, reduction="sum")

    return _in_parts(part, final, tokens)


def _in_parts(part: Callable[..., Tensor], *values: Tensor) -> Tensor:
    """The sum of `part` over chunks of the values, whose logits are made again in the backward pass."""
    chunks = zip(*(each.split(NORM_CHUNK) for each in values))
    return torch.stack([checkpoint(part, *chunk, use_reentrant=False) for chunk in chunks]).sum()  # type: ignore[misc]


def by_start(values: Tensor) -> Tensor:
    """values [K, n]: depth d's guess of token i -> [K, n] as in replay.rounds: entry [d-1, s] is that of token s+d-1."""
    num = values.shape[1]
    moved = [nn.functional.pad(row[d:], (1, min(d - 1, num - 1)))[:num] for d, row in enumerate(values, start=1)]
    return torch.stack(moved)


def slots(batch: Batch, output: TargetOutput, depth: int) -> Slots:
    """All slots of a batch whose steps 1..depth stay inside one document, for `Drafter.solve`."""
    length = batch.tokens.shape[1]
    num = length - depth  # slots 1..length-depth
    at = torch.arange(1, num + 1, device=batch.tokens.device)[:, None] + torch.arange(depth, device=batch.tokens.device)
    real = (batch.positions[:, 1 : num + 1] > 0) & (
        batch.documents[:, 1 : num + 1] == batch.documents[:, depth : num + depth]
    )
    before = output.features[:, :num][real], output.final[:, :num][real]
    return Slots(*before, batch.tokens[:, at][real], output.final[:, at][real])
