"""Losses: pure functions of judged slots, [M, .] -> [M]. None of them sees padding, a prompt or a mask.

`LOSSES` lists them by name. The formulas are in docs/methods.md, section 3. Logits are finite, however large.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

TOP = 10  # HASS's K
LEAST_OVERLAP = 1e-5


@dataclass(frozen=True)
class Judged:
    """M slots and what the target says where they guess. W is the draft vocabulary, the list.

    q is the drafter's law over the list; p the target's over all V tokens, so on a reduced list it sums to less than 1.
    Logits are at the objective's temperature.
    """

    state: Tensor | None  # [M, D] what the step returned, for a drafter whose state estimates the target's
    logits: Tensor  # [M, W]
    goal_state: Tensor  # [M, D] the target's final state one position on: what EAGLE-1's state estimates
    goal_logits: Tensor  # [M, W] the target's, for the drafted tokens
    token: Tensor  # [M] draft id of the token that the text has, -1 if it is not in the draft vocabulary
    goal_norm: Tensor  # [M] log-normaliser over V, in the scale of goal_logits: log p = goal_logits - goal_norm
    confidence: Tensor | None  # [M] the drafter's logit for "this draft is accepted"; None if it has none


def kl(judged: Judged) -> Tensor:
    """Forward KL, sum of p log(p / q); p is renormalised over the list."""
    goal, guess = both_log_laws(judged)
    return (goal.exp() * (goal - guess)).sum(-1)


def reverse_kl(judged: Judged) -> Tensor:
    """Reverse KL, sum of q log(q / p); p is renormalised over the list. Mode seeking."""
    goal, guess = both_log_laws(judged)
    return (guess.exp() * (guess - goal)).sum(-1)


def jsd(judged: Judged) -> Tensor:
    """Jensen-Shannon divergence: the mean KL of p and of q to their mean; p is renormalised over the list."""
    goal, guess = both_log_laws(judged)
    mean = torch.logaddexp(goal, guess) - math.log(2)
    return (goal.exp() * (goal - mean) + guess.exp() * (guess - mean)).sum(-1) / 2


def tv(judged: Judged) -> Tensor:
    """Total variation, the probability that a draft sampled from q is rejected (2211.17192): 1 - sum of min(p, q).

    Its gradient all but vanishes while q is far from p: not a loss to start with.
    """
    return 1 - overlap(judged)


def nla(judged: Judged) -> Tensor:
    """-log of the acceptance (2602.23881); constant, without a gradient, where that is below LEAST_OVERLAP."""
    return -overlap(judged).clamp(min=LEAST_OVERLAP).log()


def ce(judged: Judged) -> Tensor:
    """Hard cross-entropy on the text's token; 0 where that token cannot be drafted."""
    return F.cross_entropy(judged.logits, judged.token, ignore_index=-1, reduction="none")


def top_k(judged: Judged) -> Tensor:
    """HASS (2408.15766): -sum of p log q over the TOP tokens of the list that the target likes best."""
    goal, tokens = goal_log_probs(judged).topk(min(TOP, judged.logits.shape[-1]))  # [M, TOP]
    return -(goal.exp() * judged.logits.log_softmax(-1).gather(-1, tokens)).sum(-1)


def smooth_l1(judged: Judged) -> Tensor:
    """EAGLE-1's feature regression (2401.15077, equation 5), the mean over the width."""
    assert judged.state is not None
    dtype = judged.logits.dtype  # states may be half precision, logits are not
    return F.smooth_l1_loss(judged.state.to(dtype), judged.goal_state.to(dtype), reduction="none").mean(-1)


def confidence(judged: Judged) -> Tensor:
    """Binary cross-entropy of the confidence against the acceptance (DSpark); it does not train q."""
    assert judged.confidence is not None
    accepted = overlap(judged).detach()
    return F.binary_cross_entropy_with_logits(judged.confidence.to(accepted.dtype), accepted, reduction="none")


def goal_log_probs(judged: Judged) -> Tensor:
    """[M, W] log p on the list, not renormalised: what verification will hold against q."""
    return judged.goal_logits - judged.goal_norm[:, None]


def both_log_laws(judged: Judged) -> tuple[Tensor, Tensor]:
    """[M, W] log p renormalised over the list, log q"""
    return judged.goal_logits.log_softmax(-1), judged.logits.log_softmax(-1)


def overlap(judged: Judged) -> Tensor:
    """Sum of min(p, q), p not renormalised: the probability that a draft sampled from q is accepted, [M]."""
    return torch.minimum(goal_log_probs(judged).exp(), judged.logits.softmax(-1)).sum(-1)


LOSSES = {
    "kl": kl,
    "reverse_kl": reverse_kl,
    "jsd": jsd,
    "tv": tv,
    "nla": nla,
    "ce": ce,
    "top_k": top_k,
    "smooth_l1": smooth_l1,
    "confidence": confidence,
}
