"""Draft trees: their shape and their geometry."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from specdec import masks

Nodes = list[tuple[int, int]]  # one row's drafts, nodes 1, 2, .. of a tree: (token, parent), the root being node 0


@dataclass(frozen=True)
class Tree:
    """What a proposer puts before the target. Nodes stand in an order in which parents come first."""

    tokens: Tensor  # [B, N] node 0 is the newest committed token
    parents: Tensor  # [B, N] parents[i] < i; parents[0] = -1
    probs: Tensor | None  # [B, N, V] the law that node i was sampled from; None if nodes were chosen, not sampled
    linear: bool = False  # whether every row is a chain
    # What a proposer that drafts with the target's first `num_layers` layers has done of the target's pass already: the
    # nodes' hidden states, while their K and V are in the target's cache, in order, behind the committed entries.
    states: Tensor | None = None  # [B, N, D]
    num_layers: int = 0

    def depths(self) -> Tensor:
        """-> [B, N]; the root has depth 0."""
        return self.ancestors().sum(-1) - 1

    def ancestors(self) -> Tensor:
        """-> [B, N, N] bool; row i marks i and its ancestors."""
        num_rows, num_nodes = self.parents.shape
        if self.linear:
            return masks.causal(num_nodes, self.parents.device).expand(num_rows, -1, -1)
        seen = torch.eye(num_nodes, dtype=torch.bool, device=self.parents.device).repeat(num_rows, 1, 1)
        rows = torch.arange(num_rows, device=self.parents.device)
        for node in range(1, num_nodes):
            seen[:, node] |= seen[rows, self.parents[:, node]]
        return seen

    def rounded(self, depth: int) -> "Tree":
        """Filled up to a power of two drafts, a chain to no more than `depth`, so that few sizes need compiling."""
        num = self.tokens.shape[1] - 1
        few = 1 << (num - 1).bit_length() if num else 0
        return self.filled(min(few, depth) if self.linear else few)

    def filled(self, num: int) -> "Tree":
        """With `num` drafts, if it has fewer: a chain guesses its last token again, a tree repeats its first draft, which
        no rule accepts twice. What was filled up has no states."""
        missing = num + 1 - self.tokens.shape[1]
        if missing <= 0:
            return self
        if self.linear:
            tokens, parents = (
                self.tokens[:, -1:],
                torch.arange(num + 1 - missing, num + 1, device=self.tokens.device) - 1,
            )
        else:
            tokens, parents = self.tokens[:, 1:2], torch.zeros(missing, dtype=torch.long, device=self.tokens.device)
        tokens, parents = tokens.expand(-1, missing), parents.expand(len(tokens), -1)
        probs = self.probs
        if probs is not None:
            probs = torch.cat([probs, F.one_hot(tokens, probs.shape[-1]).to(probs.dtype)], dim=1)
        return Tree(torch.cat([self.tokens, tokens], 1), torch.cat([self.parents, parents], 1), probs, self.linear)


@dataclass(frozen=True)
class TreeShape:
    """How much to draft: `width` nodes a depth are widened, the best `nodes` of all are kept. Width 1 is a chain."""

    depth: int
    width: int
    nodes: int

    def __post_init__(self):
        if min(self.depth, self.width, self.nodes) < 1:
            raise ValueError(f"decode.depth, decode.width and decode.nodes must be at least 1, not {self}.")
        if self.nodes < self.depth:
            raise ValueError(
                f"decode.nodes={self.nodes} cannot hold a path of decode.depth={self.depth}: raise nodes or lower depth."
            )

    @property
    def chain(self) -> bool:
        return self.width == 1

    def __str__(self) -> str:
        return (
            f"chain of {self.depth}"
            if self.chain
            else f"tree of depth {self.depth}, width {self.width}, {self.nodes} nodes"
        )


def root(tokens: Tensor) -> Tree:
    """The tree of no draft. tokens [B]: the newest committed ones."""
    return chain(tokens[:, None], None)


def chain(tokens: Tensor, probs: Tensor | None) -> Tree:
    """tokens [B, N], root first; probs [B, N, V] if the drafts were sampled (the root's entry is not read)."""
    parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
    return Tree(tokens, parents, probs, linear=True)


def plant(newest: list[int], drafts: list[Nodes], device) -> Tree:
    """A tree of chosen drafts for each row; rows with fewer than the largest are filled up as by `Tree.filled`."""
    linear = all(parent == number for draft in drafts for number, (_, parent) in enumerate(draft))
    num = max(map(len, drafts))
    rows, parents = [], []
    for root_token, draft in zip(newest, drafts):
        tokens, owners = [root_token], [-1]
        for token, parent in draft:
            tokens.append(token)
            owners.append(parent)
        missing = num - len(draft)
        tokens += [tokens[-1] if linear else tokens[min(1, len(draft))]] * missing
        owners += range(len(draft), num) if linear else [0] * missing
        rows.append(tokens)
        parents.append(owners)
    return Tree(torch.tensor(rows, device=device), torch.tensor(parents, device=device), None, linear)
