"""Losses: pure functions of loss slots, [M, .] -> [M]. They see neither padding nor prompts nor masks.

`LOSSES` lists the losses of single slots by name. The losses over several depths of a round follow. The formulas are
in docs/methods.md, section 3. Logits are finite, however large.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

TOP_K = 10  # the target's tokens that the loss top_k looks at: K of HASS (2408.15766)
LOGITS_PER_CHUNK = 2**18  # logits that a CPU works on at a time: 1 MB in float32, which its cache holds


@dataclass(frozen=True)
class Goals:
    """The target's view of M tokens that are to be guessed. W is the size of the draft vocabulary, the list.

    p is the target's distribution over all V tokens, so on a reduced list it sums to less than 1. Several losses and
    depths share the properties, which are computed once.
    """

    state: Tensor  # [M, D] the target's final state at the token before: EAGLE-1's state estimates it
    logits: Tensor  # [M, W] the target's logits, at the objective's temperature
    token_ids: Tensor  # [M] draft id of the text's token; -1: it is not in the draft vocabulary
    log_norm: Tensor  # [M] log-normaliser over V, in the scale of logits: log p = logits - log_norm

    def select_goals(self, indices: Tensor) -> "Goals":
        """The goals at some indices [m]."""
        return Goals(
            *(tensor.index_select(0, indices) for tensor in (self.state, self.logits, self.token_ids, self.log_norm))
        )

    @cached_property
    def log_probs(self) -> Tensor:
        """[M, W] log p on the list, not renormalised. Verification compares it with q."""
        return self.logits - self.log_norm[:, None]

    @cached_property
    def renormalised_probs(self) -> Tensor:
        """[M, W] p, renormalised over the list."""
        return self.logits.softmax(-1)

    @cached_property
    def likeliest_ids(self) -> Tensor:
        """[M] the target's likeliest draft ids."""
        return self.logits.argmax(-1)

    @cached_property
    def entropy(self) -> Tensor:
        """[M] the entropy of p, renormalised over the list."""
        negative_entropies = [
            torch.linalg.vecdot(self.renormalised_probs[rows], self.logits[rows].log_softmax(-1))
            for rows in split_rows(self.renormalised_probs)
        ]
        return -torch.cat(negative_entropies)


def split_rows(values: Tensor) -> list[slice]:
    """Slices of the rows of values [M, W]: as many rows as a CPU's cache holds.

    Other devices get all rows at once, because one large operation is faster there than many small ones.
    """
    size = max(1, LOGITS_PER_CHUNK // values.shape[1]) if values.device.type == "cpu" else len(values) or 1
    return [slice(start, start + size) for start in range(0, max(1, len(values)), size)]


@dataclass(frozen=True)
class LossSlots:
    """M slots, and the goals that they guess.

    q is the drafter's distribution over the list, at the objective's temperature.
    """

    goals: Goals
    logits: Tensor  # [M, W] the drafter's logits, before the temperature
    state: Tensor | None  # [M, D] the step's states, for drafters whose state estimates the target's
    confidence_logits: Tensor | None  # [M] the drafter's logit for "this draft is accepted"; None: it has none
    candidate_losses: Tensor | None = None  # [M] the drafter's cross-entropy over its candidates; None: it has none
    temperature: float = 1.0

    @cached_property
    def log_probs(self) -> Tensor:
        """[M, W] log q."""
        return apply_temperature(self.logits, self.temperature).log_softmax(-1)


def apply_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits of any dtype, divided by the temperature, in float32 or wider."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1 else logits / temperature


class _KL(torch.autograd.Function):
    """Forward KL. It keeps one number for each logit, in the dtype of the logits: (q - p) / temperature."""

    @staticmethod
    def forward(ctx, logits: Tensor, goals: Goals, temperature: float) -> Tensor:
        slope, losses = torch.empty_like(logits), []
        for rows in split_rows(logits):
            log_q, p = apply_temperature(logits[rows], temperature).log_softmax(-1), goals.renormalised_probs[rows]
            losses.append(-goals.entropy[rows] - torch.linalg.vecdot(p, log_q))
            slope[rows] = log_q.exp_().sub_(p).div_(temperature)
        ctx.save_for_backward(slope)
        return torch.cat(losses)

    @staticmethod
    def backward(ctx, grad: Tensor):
        (slope,) = ctx.saved_tensors
        return slope * grad[:, None].to(slope.dtype), None, None


def kl(slots: LossSlots) -> Tensor:
    """Forward KL, sum of p log(p / q). p is renormalised over the list."""
    return _KL.apply(slots.logits, slots.goals, slots.temperature)


def tv(slots: LossSlots) -> Tensor:
    """Total variation, 1 - sum of min(p, q): the probability that a draft sampled from q is rejected (2211.17192).

    Its gradient all but vanishes while q is far from p, so training should not start with it.
    """
    return 1 - overlap(slots)


def ce(slots: LossSlots) -> Tensor:
    """Cross-entropy of the text's token; 0 where that token cannot be drafted."""
    return F.nll_loss(slots.log_probs, slots.goals.token_ids, ignore_index=-1, reduction="none")


def top_k(slots: LossSlots) -> Tensor:
    """-sum of p log q over the target's TOP_K likeliest tokens of the list (HASS, 2408.15766)."""
    log_p, top_ids = slots.goals.log_probs.topk(min(TOP_K, slots.logits.shape[-1]))  # [M, TOP]
    return -(log_p.exp() * slots.log_probs.gather(-1, top_ids)).sum(-1)


def smooth_l1(slots: LossSlots) -> Tensor:
    """Feature regression of EAGLE-1 (2401.15077, equation 5): the mean of SmoothL1 over the width."""
    assert slots.state is not None
    dtype = slots.goals.logits.dtype  # states may be half precision
    return F.smooth_l1_loss(slots.state.to(dtype), slots.goals.state.to(dtype), reduction="none").mean(-1)


def confidence(slots: LossSlots) -> Tensor:
    """Binary cross-entropy of the confidence against the acceptance (DSpark, 2607.05147). It does not train q."""
    assert slots.confidence_logits is not None
    acceptance = overlap(slots).detach()
    return F.binary_cross_entropy_with_logits(
        slots.confidence_logits.to(acceptance.dtype), acceptance, reduction="none"
    )


def candidates(slots: LossSlots) -> Tensor:
    """Cross-entropy of the target's likeliest token over a lattice's candidates, behind the text's token (DFlash 2)."""
    assert slots.candidate_losses is not None
    return slots.candidate_losses


def overlap(slots: LossSlots) -> Tensor:
    """Sum of min(p, q), p not renormalised: the probability that a draft sampled from q is accepted."""
    return torch.minimum(slots.goals.log_probs.exp(), slots.log_probs.exp()).sum(-1)


LOSSES = {
    "kl": kl,
    "tv": tv,
    "ce": ce,
    "top_k": top_k,
    "smooth_l1": smooth_l1,
    "confidence": confidence,
    "candidates": candidates,
}


# Further figures of single slots [M], for weights over several depths


def probability(slots: LossSlots) -> Tensor:
    """q of the text's token; 0 where that token cannot be drafted."""
    token_ids = slots.goals.token_ids
    token_probs = slots.log_probs.gather(-1, token_ids.clamp(min=0)[:, None])[:, 0].exp()
    return torch.where(token_ids >= 0, token_probs, 0)


# Weights over all depths of S slots, [K, S]. Row d - 1 is depth d of the round that starts at a slot.
# `exists` [K, S] bool: a depth of a slot has a supervised token and a guess. All other entries are ignored.


def dpace(probability: Tensor, exists: Tensor, *, smoothing: float = 0.5) -> Tensor:
    """D-PACE's weights (2605.18810) [K, S], detached: the share of the expected accepted length that needs a depth.

    w_k = sum over j >= k of prod over i <= j of s_i, with s = (1 - smoothing) q(x) + smoothing; probability: q(x).
    Where a depth does not exist, s is 1 and the weight 0. So the last survival is repeated for all deeper depths.
    """
    survival = torch.where(exists, (1 - smoothing) * probability.detach() + smoothing, 1).cumprod(0)  # [K, S]
    return torch.where(exists, survival.flip(0).cumsum(0).flip(0), 0)
