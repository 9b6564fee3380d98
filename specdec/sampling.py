"""What the target's law is made of: a repetition penalty, then temperature, top-k and top-p, as in transformers' generate."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.tree import Tree


@dataclass(frozen=True)
class Sampling:
    """temperature 0 is greedy; then only the penalty plays a part."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"decode.temperature={self.temperature} must be 0 (greedy) or above.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"decode.top_k={self.top_k} must be at least 1, or null to keep all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"decode.top_p={self.top_p} must be above 0 and at most 1, or null to keep all tokens.")
        if self.repetition_penalty <= 0:
            raise ValueError(f"decode.repetition_penalty={self.repetition_penalty} must be above 0; 1 is no penalty.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def penalise(self, logits: Tensor, seen: Tensor) -> Tensor:
        """logits [B, N, V], seen [B, N, V] bool -> [B, N, V], less likely where seen (if the penalty is above 1)"""
        logits = precise(logits)
        penalty = self.repetition_penalty
        return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def law(self, logits: Tensor) -> Tensor:
        """logits [..., V] -> probabilities at temperature > 0, float32 (or float64, if that is what came in)

        Equal logits at the boundary are all kept by top-k; of those at top-p's, the ones that sort last.
        """
        logits = precise(logits) / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).values[..., -1:]  # [..., 1]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p is not None:
            ascending, order = logits.sort(-1)
            dropped = ascending.softmax(-1).cumsum(-1) <= 1 - self.top_p  # [..., V]
            dropped[..., -1] = False
            logits = logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
        return logits.softmax(-1)


def pick(law: Tensor, uniform: Tensor) -> Tensor:
    """law [B, V], uniform [B, 1] in float64, from [0, 1) -> one index a row [B], distributed as the law"""
    reached = law.cumsum(-1, dtype=torch.float64)  # [B, V] a float32 sum would blur rare tokens
    return torch.searchsorted(reached, uniform * reached[:, -1:], right=True)[:, 0]


def uniforms(num: int, generator: torch.Generator | None, device) -> Tensor:
    """[num, 1] in float64, from [0, 1): what `pick` takes"""
    return torch.rand(num, 1, generator=generator, device=device, dtype=torch.float64)


def precise(logits: Tensor) -> Tensor:
    """In float32, or float64 if that is what came in."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def seen(tree: Tree, committed: Tensor) -> Tensor:
    """committed [B, V] bool: tokens of the prompt and the answer so far -> [B, N, V]: with those from the root to each node"""
    own = tree.tokens[:, :, None]  # [B, N, 1]
    tokens = torch.where(tree.ancestors(), tree.tokens[:, None], own)  # [B, N, N] in the place of others, its own
    return committed[:, None].repeat(1, tokens.shape[1], 1).scatter_(2, tokens, True)
