"""From logits to the law (the distribution) of the next token, as in transformers' generate: a repetition penalty, then
temperature, top-k and top-p."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.tree import Tree


@dataclass(frozen=True)
class Sampling:
    """The settings of the law. Temperature 0 is greedy; then only the penalty has an effect."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    repetition_penalty: float = 1.0

    def __post_init__(self):
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature} must be 0 (greedy) or above.")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k={self.top_k} must be at least 1, or null to keep all tokens.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be above 0 and at most 1, or null to keep all tokens.")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty={self.repetition_penalty} must be above 0; 1 is no penalty.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    def penalise(self, logits: Tensor, seen: Tensor) -> Tensor:
        """logits [B, N, V], seen [B, N, V] bool -> [B, N, V]; a penalty above 1 makes seen tokens less likely"""
        logits = precise(logits)
        penalty = self.repetition_penalty
        return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)

    def law(self, logits: Tensor) -> Tensor:
        """logits [..., V] -> probabilities at temperature > 0, in float32 (float64 for logits in float64)

        Top-k keeps all logits that equal the k-th. Of equal logits at the boundary, top-p keeps those that sort last.
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
    """law [B, V], uniform [B, 1] in float64 from [0, 1) -> one index for each row [B], distributed as the law"""
    reached = law.cumsum(-1, dtype=torch.float64)  # [B, V] in float32 the chances of rare tokens would be rounded away
    return torch.searchsorted(reached, uniform * reached[:, -1:], right=True)[:, 0]


def uniforms(num: int, generator: torch.Generator | None, device) -> Tensor:
    """[num, 1] random numbers from [0, 1) in float64, for `pick`"""
    return torch.rand(num, 1, generator=generator, device=device, dtype=torch.float64)


def precise(logits: Tensor) -> Tensor:
    """The logits in float32; float64 stays."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def seen(tree: Tree, committed: Tensor) -> Tensor:
    """committed [B, V] bool: tokens of the prompt and of the answer so far

    -> [B, N, V] bool: those, and the tokens on the path from the root to each node
    """
    own = tree.tokens[:, :, None]  # [B, N, 1]
    tokens = torch.where(
        tree.ancestors(), tree.tokens[:, None], own
    )  # [B, N, N] a node's own token stands where a node is no ancestor
    return committed[:, None].repeat(1, tokens.shape[1], 1).scatter_(2, tokens, True)
