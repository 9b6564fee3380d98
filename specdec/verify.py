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


def sample(tree: Tree, probs: Tensor, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Temperature > 0. probs [B, N, V]: the target's law after each node -> path, num_kept, next_token as in `greedy`."""
    num_rows, num_nodes = tree.tokens.shape
    path = torch.zeros_like(tree.tokens)
    num_kept, next_token = torch.ones_like(path[:, 0]), torch.zeros_like(path[:, 0])
    tokens, parents = tree.tokens.tolist(), tree.parents.tolist()
    for row in range(num_rows):
        last, kept = 0, 1
        residual = probs[row, 0]  # [V]
        child = 1
        while child < num_nodes:
            if parents[row][child] != last:
                child += 1
                continue
            token = tokens[row][child]
            law = None if tree.probs is None else tree.probs[row, child]  # [V]
            draw = torch.rand((), generator=generator, device=probs.device, dtype=probs.dtype)
            if draw * (1.0 if law is None else law[token]) < residual[token]:
                path[row, kept] = last = child
                kept += 1
                residual = probs[row, child]
            else:
                residual = _refuse(residual, token, law)
            child += 1  # a node's children and descendants all come after it
        num_kept[row] = kept
        next_token[row] = torch.multinomial(residual, 1, generator=generator)
    return path, num_kept, next_token


def _refuse(residual: Tensor, token: int, law: Tensor | None) -> Tensor:
    """norm(max(r - q, 0)); r itself where nothing is left but rounding."""
    if law is None:
        rest = residual.clone()
        rest[token] = 0
    else:
        rest = (residual - law).clamp(min=0)
    total = rest.sum()
    return rest / total if total > 0 else residual
