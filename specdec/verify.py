"""Lossless acceptance rules: pure functions of a tree and the target's laws. No model is needed here.

One rule serves sampled chains and chosen trees (Leviathan et al. 2211.17192; Chen et al. 2302.01318; SpecInfer
2305.09781, multi-step): walk down from the root; at a node, try its children in order; accept child x with
probability min(1, r(x) / q(x)), where r starts as the target's law p and becomes norm(max(r - q, 0)) after a refusal.
A child that was chosen, not sampled, has a one-hot q: it is accepted with r(x), else r(x) = 0 and r is normalised.
When every child is refused the next token is drawn from r. Greedy decoding is the case of a one-hot p.
"""

import torch
from torch import Tensor

from specdec.tree import Tree


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """logits [..., V] -> the target's law at temperature > 0, in float32 (or float64, if that is what came in)."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return (logits.to(dtype) / temperature).softmax(-1)


def greedy(tree: Tree, choices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Temperature 0: follow the child that equals the target's choice.

    choices [B, N]: the target's argmax after each node
    -> path [B, P] accepted nodes from node 0 down (P = N; entries past num_kept are 0), num_kept [B], next_token [B]
    """
    num_rows, num_nodes = tree.tokens.shape
    rows = torch.arange(num_rows, device=choices.device)
    # A node is accepted if its token is its parent's choice and its parent is accepted.
    matches = tree.tokens == choices.gather(1, tree.parents.clamp(min=0))  # [B, N]
    path = torch.zeros_like(tree.tokens)
    num_kept = torch.ones_like(path[:, 0])
    last = torch.zeros_like(num_kept)
    for node in range(1, num_nodes):
        accepted = matches[:, node] & (tree.parents[:, node] == last)
        last = torch.where(accepted, node, last)
        path[rows, num_kept.clamp(max=num_nodes - 1)] = torch.where(
            accepted, node, path[rows, num_kept.clamp(max=num_nodes - 1)]
        )
        num_kept = num_kept + accepted
    return path, num_kept, choices[rows, last]


class Draws:
    """Where `sample` gets its chances from; a test puts an enumeration in its place."""

    def __init__(self, generator: torch.Generator | None):
        self.generator = generator

    def accept(self, chance: Tensor) -> bool:
        """True with probability `chance`, a scalar (1 or more: always)."""
        return bool(torch.rand((), generator=self.generator, device=chance.device, dtype=chance.dtype) < chance)

    def token(self, law: Tensor) -> Tensor:
        """One index drawn from law [V]."""
        return torch.multinomial(law, 1, generator=self.generator)[0]


def sample(tree: Tree, probs: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Temperature > 0. probs [B, N, V]: the target's law after each node -> path, num_kept, next_token as in `greedy`."""
    num_rows, num_nodes = tree.tokens.shape
    path = torch.zeros_like(tree.tokens)
    num_kept, next_token = torch.ones_like(path[:, 0]), torch.zeros_like(path[:, 0])
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    for row in range(num_rows):
        last, kept = 0, 1
        residual = probs[row, 0]  # [V] what the next token is drawn from if no child is accepted
        for child in range(1, num_nodes):  # a node's descendants all come after it
            if parents[row][child] != last:
                continue
            token = tokens[row][child]
            law = None if tree.probs is None else tree.probs[row, child]  # [V]
            if draws.accept(residual[token] if law is None else residual[token] / law[token]):
                path[row, kept] = last = child
                kept += 1
                residual = probs[row, child]
            else:
                residual = refuse(residual, token, law)
        num_kept[row] = kept
        next_token[row] = draws.token(residual)
    return path, num_kept, next_token


def refuse(residual: Tensor, token: int, law: Tensor | None) -> Tensor:
    """norm(max(r - q, 0)) [V]; r itself where nothing is left but rounding. law None: q is one-hot at `token`."""
    if law is None:
        rest = residual.clone()
        rest[token] = 0
    else:
        rest = (residual - law).clamp(min=0)
    total = rest.sum()
    return rest / total if total > 0 else residual
