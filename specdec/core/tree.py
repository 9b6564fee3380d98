"""Draft trees: their shape and geometry."""

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core import masks
from specdec.core.devices import round_up_power, upload_values
from specdec.core.wording import format_count

Nodes = list[tuple[int, int]]  # (token, parent) of nodes 1, 2, .. of a row; the root is node 0


def make_one_hot(tokens: Tensor, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """tokens [B, N] -> [B, N, V], the distributions of certain tokens"""
    distributions = torch.zeros(*tokens.shape, vocab_size, dtype=dtype, device=tokens.device)
    return distributions.scatter_(2, tokens[..., None], 1.0)


@dataclass(frozen=True)
class Tree:
    """The drafts of a proposer for the target. Parents come before their children."""

    tokens: Tensor  # [B, N] node 0, the root, is the newest committed token
    parents: Tensor  # [B, N] parents[i] < i; parents[0] = -1
    probs: Tensor | None  # [B, N, V] distribution that node i was sampled from; None for chosen nodes
    linear: bool = False  # True if every row is a chain
    max_children: int | None = None  # upper bound of a node's children, None if unknown

    @property
    def siblings(self) -> int | None:
        return 1 if self.linear else self.max_children

    def ancestors(self) -> Tensor:
        """-> [B, N, N] bool; row i marks node i and its ancestors."""
        num_rows, num_nodes = self.parents.shape
        if self.linear:
            return masks.causal_mask(num_nodes, self.parents.device).expand(num_rows, -1, -1)
        seen = torch.eye(num_nodes, dtype=torch.bool, device=self.parents.device).repeat(num_rows, 1, 1)
        above = self.parents.clamp(min=0)  # [B, N] ancestor 1, 2, 4, .. levels up; the root's own is itself
        for _ in range((num_nodes - 1).bit_length()):
            seen = seen | seen.gather(1, above[..., None].expand_as(seen))
            above = above.gather(1, above)
        return seen

    def pad_to_power(self, depth: int) -> "Tree":
        """This tree with a power of two drafts, or a chain of at most `depth`, so that only few sizes are compiled"""
        num = self.tokens.shape[1] - 1
        size = round_up_power(num)
        return self.pad_to(min(size, depth) if self.linear else size)

    def pad_to(self, num: int) -> "Tree":
        """This tree with `num` drafts; the tree itself if it has as many.

        A chain repeats its last token. A tree repeats its first draft, which no rule accepts twice.
        """
        missing = num + 1 - self.tokens.shape[1]
        if missing <= 0:
            return self
        if self.linear:
            tokens = self.tokens[:, -1:]
            parents = torch.arange(num + 1 - missing, num + 1, device=self.tokens.device) - 1
        else:
            tokens = self.tokens[:, 1:2]
            parents = torch.zeros(missing, dtype=torch.long, device=self.tokens.device)
        tokens, parents = tokens.expand(-1, missing), parents.expand(len(tokens), -1)
        probs = self.probs
        if probs is not None:
            probs = torch.cat([probs, make_one_hot(tokens, probs.shape[-1], probs.dtype)], dim=1)
        return Tree(torch.cat([self.tokens, tokens], 1), torch.cat([self.parents, parents], 1), probs, self.linear)

    def select_nodes(self, nodes: list[list[int]]) -> "Tree":
        """Nodes of each row, equally many, in increasing order, each with its parent"""
        indices = upload_values(nodes, self.tokens.device)  # [B, M]
        new_numbers = torch.zeros_like(self.tokens).scatter_(
            1, indices, torch.arange(indices.shape[1], device=indices.device).expand_as(indices)
        )
        parents = new_numbers.gather(1, self.parents.gather(1, indices).clamp(min=0))
        parents[:, 0] = -1
        probs = self.probs
        if probs is not None:
            probs = probs.gather(1, indices[..., None].expand(-1, -1, probs.shape[-1]))
        return Tree(self.tokens.gather(1, indices), parents, probs, self.linear)


@dataclass(frozen=True)
class TreeShape:
    """The size of a tree. At each depth, `width` nodes get `width` children each; the best `nodes` of all stay.

    A block drafter gives children to all nodes that can stay. Width 1 is a chain.
    """

    depth: int
    width: int
    nodes: int

    def __post_init__(self):
        if min(self.depth, self.width, self.nodes) < 1:
            raise ValueError(f"depth={self.depth}, width={self.width} and nodes={self.nodes} must be at least 1.")
        if self.nodes < self.depth:
            raise ValueError(
                f"nodes={self.nodes} cannot hold a path of depth={self.depth}: raise nodes= or lower depth=."
            )

    @property
    def chain(self) -> bool:
        return self.width == 1

    def __str__(self) -> str:
        if self.chain:
            return f"chain of {self.depth}"
        return f"tree of depth {self.depth}, width {self.width}, {format_count(self.nodes, 'node')}"


def make_root(tokens: Tensor) -> Tree:
    """The tree without drafts. tokens [B]: newest committed tokens"""
    return make_chain(tokens[:, None], None)


def make_chain(tokens: Tensor, probs: Tensor | None) -> Tree:
    """tokens [B, N], root first; probs [B, N, V] for sampled drafts (the root's entry is not read)"""
    parents = torch.arange(-1, tokens.shape[1] - 1, device=tokens.device).expand_as(tokens)
    return Tree(tokens, parents, probs, linear=True)


def make_tree(newest: list[int], drafts: list[Nodes], device) -> Tree:
    """One tree of chosen drafts. newest [B]: root of each row; drafts [B]: drafts of each row

    Rows with fewer drafts are padded as by `Tree.pad_to`.
    """
    linear = all(parent == number for draft in drafts for number, (_, parent) in enumerate(draft))
    num = max(map(len, drafts))
    rows = []
    parents = []
    for root_token, draft in zip(newest, drafts):
        tokens = [root_token]
        owners = [-1]
        for token, parent in draft:
            tokens.append(token)
            owners.append(parent)
        missing = num - len(draft)
        tokens += [tokens[-1] if linear else tokens[min(1, len(draft))]] * missing
        owners += range(len(draft), num) if linear else [0] * missing
        rows.append(tokens)
        parents.append(owners)
    return Tree(upload_values(rows, device), upload_values(parents, device), None, linear)
