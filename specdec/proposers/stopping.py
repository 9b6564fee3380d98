"""When a trained drafter stops drafting deeper."""

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Stopping:
    """Drafting stops as soon as the estimated chance that a draft is accepted is below `threshold`.

    The chance of one more draft is sigmoid(bias + weight * x + confidence_weight * c), where x is the log-odds of the
    drafter's most likely token and c the logit of its confidence head (0 without one). The chance of a path is the
    product of its drafts' chances. No token that was drawn enters this estimate before it is offered to verification,
    so sampling stays lossless (docs/methods.md, section 1).
    """

    weight: float = 1.0
    bias: float = 0.0
    confidence_weight: float = 0.0
    threshold: float = 0.0

    def log_chance(self, evidence: Tensor) -> Tensor:
        """evidence [B, 2], x and c -> [B]"""
        return F.logsigmoid(self.bias + self.weight * evidence[:, 0] + self.confidence_weight * evidence[:, 1])
