"""Losses: pure functions of judged slots, [M, .] -> [M]. None of them sees padding, a prompt or a mask."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Judged:
    """M slots and what the target says where they guess. W is the draft vocabulary; logits are at the objective's temperature."""

    state: Tensor  # [M, H] what the step returned
    logits: Tensor  # [M, W]
    goal_state: Tensor  # [M, D] the target's final state one position on: what EAGLE-1's state estimates
    goal_logits: Tensor  # [M, W] the target's, for the drafted tokens
    token: Tensor  # [M] draft id of the token that the text has, -1 if it is not in the draft vocabulary


def kl(judged: Judged) -> Tensor:
    """Forward KL, sum of p log(p / q); p is renormalised over the draft vocabulary (methods, section 3)."""
    goal = judged.goal_logits.log_softmax(-1)
    return (goal.exp() * (goal - judged.logits.log_softmax(-1))).sum(-1)


def ce(judged: Judged) -> Tensor:
    """Hard cross-entropy on the text's token; 0 where that token cannot be drafted."""
    return F.cross_entropy(judged.logits, judged.token, ignore_index=-1, reduction="none")


def smooth_l1(judged: Judged) -> Tensor:
    """EAGLE-1's feature regression (2401.15077, equation 5), the mean over the width."""
    return F.smooth_l1_loss(judged.state.float(), judged.goal_state.float(), reduction="none").mean(-1)
