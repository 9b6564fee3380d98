"""Constraints of answers: the state of one answer, and the drafts that it allows.

A constraint is a part of the target's distribution, as top-p is. specdec/tools/grammar implements it for grammars.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.core.tree import Tree

FORMS = "json:SCHEMA, regex:EXPRESSION or lark:GRAMMAR, each written out or the name of a file"  # forms of grammar=


class Constraint(Protocol):
    """The state of one answer under a constraint."""

    def take(self, tokens: list[int]) -> None:
        """Appends tokens, which the constraint allows, to the answer."""

    @property
    def complete(self) -> bool:
        """True if the answer may end here"""
        ...

    def forced(self) -> list[int]:
        """The tokens that must follow now; empty where there is a choice"""
        ...

    def fits(self, tokens: list[int]) -> bool:
        """True if the answer may go on with the text of these tokens, spelled in any tokens"""
        ...

    def following(self) -> bytes | None:
        """The mask of the next token, as from `allowed`"""
        ...

    def allowed(self, tokens: list[int], parents: list[int]) -> list[bytes | None]:
        """The mask of the token after each node of a tree, whose node 0 is the answer's newest token.

        tokens, parents [N]: nodes of one row, in Tree's form
        -> [N] masks: one bit for each token id, the lowest bit of the first byte first. b"": all
            tokens, behind the end of an answer. None: the constraint does not allow the node.
        """
        ...


class ConstraintSource(Protocol):
    """Makes constraints for a tokenizer, such as specdec.tools.grammar.grammar.Grammar."""

    def compile(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, stop: set[int]) -> Callable[[], Constraint]:
        """A function that returns the state of a new answer. stop: token ids that end an answer"""
        ...


def unpack_masks(masks: Sequence[Sequence[bytes | None]], vocab_size: int, device: torch.device | str) -> Tensor:
    """masks [B][N] from `Constraint.allowed` -> [B, N, V] bool; True everywhere for an empty mask or None"""
    width = (vocab_size + 7) // 8
    everything = b"\xff" * width
    node_masks = [mask or everything for row in masks for mask in row]
    numbers = {mask: number for number, mask in enumerate(dict.fromkeys(node_masks))}  # to unpack equal masks once
    index = torch.tensor([numbers[mask] for mask in node_masks]).view(len(masks), -1)
    packed = numpy.frombuffer(b"".join(mask[:width] for mask in numbers), dtype=numpy.uint8)
    bits = numpy.unpackbits(packed.reshape(len(numbers), width), axis=1, bitorder="little")[:, :vocab_size]
    return torch.from_numpy(bits).to(device).bool()[index.to(device)]


def constrain_tree(
    tree: Tree, constraints: Sequence[Constraint | None], vocab_size: int, *, prune: bool
) -> tuple[Tree, Tensor]:
    """The tree, and the tokens that may follow each of its nodes [B, N, V] bool.

    constraints [B]: None for a row without a grammar
    prune: True to drop nodes that cannot be accepted: chosen drafts that the grammar does not allow, and their
        descendants. A sampled draft stays where its parent is allowed, because its refusal changes the next token's
        distribution.
    """
    masks = []  # by row: mask of each node
    acceptable = []  # by row: nodes that can be accepted
    for constraint, tokens, parents in zip(constraints, tree.tokens.tolist(), tree.parents.tolist()):
        allowed: list[bytes | None] = [b""] * len(tokens)
        if constraint is not None:
            allowed = constraint.allowed(tokens, parents)
        decisive = allowed if tree.probs is None else [b"", *[allowed[parent] for parent in parents[1:]]]
        masks.append(allowed)
        acceptable.append([node for node, mask in enumerate(decisive) if mask is not None])
    num_nodes = tree.tokens.shape[1]
    if prune and max(map(len, acceptable)) < num_nodes:
        size = max(map(len, acceptable))
        nodes = []
        for row_nodes in acceptable:  # a shorter row gets its first other nodes: parents come before children
            preferred = sorted(range(num_nodes), key=row_nodes.__contains__, reverse=True)
            nodes.append(sorted(preferred[:size]))
        tree = tree.select_nodes(nodes)
        masks = [list(map(row.__getitem__, row_nodes)) for row, row_nodes in zip(masks, nodes)]
    return tree, unpack_masks(masks, vocab_size, tree.tokens.device)
