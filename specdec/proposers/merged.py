"""Several proposers' trees joined into one (SpecInfer, 2305.09781)."""

import dataclasses

import torch
from torch import Tensor

from specdec.core.devices import given
from specdec.core.tree import Nodes, Tree, certain, plant, root
from specdec.proposers.base import Proposer
from specdec.target.model import Target


class Merged(Proposer):
    """Joins the trees of several proposers at the root.

    Chosen nodes become one trie: equal paths are joined, and siblings stand in the order of the members. Sampled trees
    stand behind the trie as they were drawn, each node with its own law. To drop a draw, or to join it with an equal node,
    would be a decision that depends on the drawn token, and would change the law of the answer (docs/methods.md, section 1).
    """

    varies = True

    def __init__(self, target: Target, *, members: list[Proposer]):
        if len(members) < 2:
            raise ValueError(f"members= must name at least two proposers to join, not {len(members)}.")
        self.members = members
        self.width, self.vocab_size = target.width, target.vocab_size
        self.target_layers = tuple(sorted({layer for member in members for layer in member.target_layers}))
        self.depth = max(member.depth for member in members)
        self.watches = any(member.watches for member in members)
        self.selects = all(member.selects for member in members)
        self.rewinds = all(member.rewinds for member in members)
        self.shown: list[
            tuple[Tree, Tensor]
        ] = []  # each member's last tree, and the numbers of its nodes in the joined one

    @property
    def compile_seconds(self) -> float:
        return sum(member.compile_seconds for member in self.members)

    def finish(self, nums):
        for member in self.members:
            member.finish(nums)

    def forget(self):
        for member in self.members:
            member.forget()

    def select(self, rows, nums):
        for member in self.members:
            member.select(rows, nums)

    def replace(self, rows, nums, opening):
        layers = dict(zip(self.target_layers, opening.features.split(self.width, dim=-1)))
        for member in self.members:
            member.replace(rows, nums, opening._replace(features=self._own(member, layers, opening.features)))

    def meet(self, verifier, sampling):
        for member in self.members:
            member.meet(verifier, sampling)

    def constrain(self, constraints):
        for member in self.members:
            member.constrain(constraints)

    def share(self, cache):
        for member in self.members:
            member.share(cache)

    def begin(self, tokens, num):
        for member in self.members:
            member.begin(tokens, num)

    def commit(self, tokens, features, num, counts):
        layers = dict(zip(self.target_layers, features.split(self.width, dim=-1)))  # [B, S, D] each
        for member in self.members:
            member.commit(tokens, self._own(member, layers, features), num, counts)

    def _own(self, member: Proposer, layers: dict[int, Tensor], features: Tensor) -> Tensor:
        own = [layers[layer] for layer in member.target_layers]
        return torch.cat(own, dim=-1) if own else features[..., :0]

    def propose(self, sampling, generator):
        trees = [member.propose(sampling, generator) for member in self.members]
        chosen = [number for number, tree in enumerate(trees) if tree.probs is None]
        joined, places = root(trees[0].tokens[:, 0]), {}  # by member: the numbers of its nodes in the joined tree
        if chosen:
            joined, numbers = union([trees[number] for number in chosen])
            places = dict(zip(chosen, numbers))
        for number, tree in enumerate(trees):
            if tree.probs is not None:
                joined, places[number] = beside(joined, tree, self.vocab_size)
        self.shown = [(tree, places[number]) for number, tree in enumerate(trees)]
        done = joined.done
        if done is not None and any(layer < done.num_layers for layer in self.target_layers):
            joined = dataclasses.replace(
                joined, done=None
            )  # a member needs hidden states from before these layers' end
        return joined

    def watch(self, tree, choices):
        for member, (own, places) in zip(self.members, self.shown):
            if member.watches:
                member.watch(own, choices.gather(1, places))

    def mark(self):
        return [member.mark() for member in self.members]

    def rewind(self, mark):
        for member, own in zip(self.members, mark):
            member.rewind(own)


def union(trees: list[Tree]) -> tuple[Tree, list[Tensor]]:
    """The trie of chosen trees, its rows filled up as by `plant`; for each tree the numbers of its nodes there, [B, N]"""
    device, num_rows = trees[0].tokens.device, len(trees[0].tokens)
    largest = max(trees, key=lambda tree: tree.tokens.shape[1])
    if sum(tree.tokens.shape[1] > 1 for tree in trees) < 2:  # nothing to join, so no need to wait for the device
        return largest, [torch.arange(tree.tokens.shape[1], device=device).expand(num_rows, -1) for tree in trees]
    drafts: list[Nodes] = [[] for _ in range(num_rows)]
    numbers_of: list[dict[tuple[int, int], int]] = [{} for _ in drafts]  # (token, parent) -> number
    places = []
    for tree in trees:
        numbers = []
        for row, (tokens, parents) in enumerate(zip(tree.tokens.tolist(), tree.parents.tolist())):
            numbers.append([0])
            for token, parent in zip(tokens[1:], parents[1:]):
                node = token, numbers[row][parent]
                if node not in numbers_of[row]:
                    drafts[row].append(node)
                    numbers_of[row][node] = len(drafts[row])
                numbers[row].append(numbers_of[row][node])
        places.append(given(numbers, device))
    return plant(largest.tokens[:, 0].tolist(), drafts, device), places


def beside(first: Tree, second: Tree, vocab_size: int) -> tuple[Tree, Tensor]:
    """Both trees under one root, the nodes of the second, which was sampled, last; and their numbers there [B, N]"""
    assert second.probs is not None
    numbers = torch.arange(second.tokens.shape[1], device=second.tokens.device).expand_as(second.tokens)
    more = first.tokens.shape[1] - 1
    if more == 0:
        return second, numbers
    probs = first.probs
    if probs is None:
        probs = certain(first.tokens, vocab_size, second.probs.dtype)
    parents = second.parents[:, 1:]
    joined = Tree(
        torch.cat([first.tokens, second.tokens[:, 1:]], dim=1),
        torch.cat([first.parents, torch.where(parents > 0, parents + more, 0)], dim=1),
        torch.cat([probs, second.probs[:, 1:]], dim=1),
    )
    return joined, torch.where(numbers > 0, numbers + more, 0)
