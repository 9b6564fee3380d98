"""What an answer may be: the state of one answer under a constraint, and the drafts that it allows.

A constraint is part of the target's distribution, as top-p is. specdec/tools/grammar implements it for grammars.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.core.tree import Tree

FORMS = "json:SCHEMA, regex:EXPRESSION or lark:GRAMMAR, each written out or the name of a file"  # of grammar=


class Constraint(Protocol):
    """The state of one answer, which `take` moves on."""

    def take(self, tokens: list[int]) -> None:
        """The answer goes on with these tokens, which the constraint allows."""

    @property
    def complete(self) -> bool:
        """Whether the answer so far may end here."""
        ...

    def forced(self) -> list[int]:
        """The tokens that must follow now; empty where there is a choice."""
        ...

    def fits(self, tokens: list[int]) -> bool:
        """Whether the answer may go on with these tokens, spelled in whichever tokens."""
        ...

    def following(self) -> bytes | None:
        """What may follow the answer so far, as of `allowed`."""
        ...

    def allowed(self, tokens: list[int], parents: list[int]) -> list[bytes | None]:
        """What may follow each node of a tree, of which node 0 is the newest token of the answer.

        tokens, parents [N] as in Tree -> of each node a bit for each token id, the lowest bit of the first byte first; b"" where
        everything may follow, behind the end of an answer; None for a node that the constraint does not allow
        """
        ...


class ConstraintSource(Protocol):
    """What makes constraints for a tokenizer, such as specdec.tools.grammar.grammar.Grammar."""

    def compile(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop: set[int]) -> Callable[[], Constraint]:
        """A function that returns the state of an answer that begins. stop: token ids that end an answer"""
        ...


def unpack_masks(masks: Sequence[Sequence[bytes | None]], vocab_size: int, device: torch.device | str) -> Tensor:
    """masks [B][N] as of `Constraint.allowed` -> [B, N, V] bool; everything where a mask is empty or None"""
    width = (vocab_size + 7) // 8
    numbers: dict[bytes, int] = {b"": 0}  # equal masks are unpacked once
    index = torch.tensor([[numbers.setdefault(mask or b"", len(numbers)) for mask in row] for row in masks])
    packed = numpy.frombuffer(b"".join((mask or b"\xff" * width)[:width] for mask in numbers), dtype=numpy.uint8)
    bits = numpy.unpackbits(packed.reshape(len(numbers), width), axis=1, bitorder="little")[:, :vocab_size]
    return torch.from_numpy(bits).to(device).bool()[index.to(device)]


def constrain_tree(
    tree: Tree, constraints: Sequence[Constraint | None], vocab_size: int, *, prune: bool
) -> tuple[Tree, Tensor]:
    """constraints [B]: None for a row without a grammar -> the tree, and what may follow each of its nodes [B, N, V] bool

    prune: whether nodes are left out that cannot be accepted: chosen drafts that the grammar does not allow, and what is
    below. A sampled draft stays where the text before it is allowed, because its refusal changes the distribution of the next token.
    """
    masks, kept_nodes = [], []
    for constraint, tokens, parents in zip(constraints, tree.tokens.tolist(), tree.parents.tolist()):
        allowed: list[bytes | None] = [b""] * len(tokens)
        if constraint is not None:
            allowed = constraint.allowed(tokens, parents)
        decisive = allowed if tree.probs is None else [b"", *[allowed[parent] for parent in parents[1:]]]
        masks.append(allowed)
        kept_nodes.append([node for node, mask in enumerate(decisive) if mask is not None])
    num_nodes = max(map(len, kept_nodes))
    if prune and num_nodes < tree.tokens.shape[1]:
        # A row with fewer nodes is filled up with its first others: parents have lower numbers than children
        numbers = []
        for row_nodes in kept_nodes:
            spare_nodes = [node for node in range(tree.tokens.shape[1]) if node not in row_nodes]
            numbers.append(sorted([*row_nodes, *spare_nodes[: num_nodes - len(row_nodes)]]))
        tree = tree.select_nodes(numbers)
        masks = [[row[node] for node in own] for row, own in zip(masks, numbers)]
    return tree, unpack_masks(masks, vocab_size, tree.tokens.device)
