"""Geometry of trees, and the trees that HeadProposer proposes."""

from dataclasses import replace

import pytest
import torch

from specdec.core.tree import make_tree
from specdec.proposers.heads import HeadProposer
from tests.support.decoding import chain_of


def test_shapes_deeper_than_the_drafter_are_refused(drafter, monkeypatch):
    monkeypatch.setattr(drafter, "depth", 3)
    HeadProposer(drafter, chain_of(3))
    with pytest.raises(ValueError, match=r"^depth=4 is more than this drafter's 3 steps"):
        HeadProposer(drafter, chain_of(4))


def test_rows_of_different_sizes_are_planted_as_one_tree():
    drafts = [[(7, 0), (8, 1), (9, 0)], [], [(5, 0)]]
    tree = make_tree([1, 2, 3], drafts, "cpu")
    assert not tree.linear and tree.probs is None
    assert tree.tokens.tolist() == [[1, 7, 8, 9], [2, 2, 2, 2], [3, 5, 5, 5]]
    assert tree.parents.tolist() == [[-1, 0, 1, 0], [-1, 0, 0, 0], [-1, 0, 0, 0]]
    chains = make_tree([1, 2], [[(7, 0), (8, 1), (9, 2)], [(5, 0)]], "cpu")
    assert chains.linear and chains.tokens.tolist() == [[1, 7, 8, 9], [2, 5, 5, 5]]
    assert chains.parents.tolist() == [[-1, 0, 1, 2]] * 2
    assert make_tree([1, 2], [[], []], "cpu").tokens.tolist() == [[1], [2]]


@pytest.mark.parametrize("linear", [True, False])
def test_filled_up_trees_keep_their_nodes_and_their_law(linear):
    tree = make_tree([1], [[(7, 0), (8, 1), (9, 2 if linear else 0)]], "cpu")
    sampled = replace(tree, probs=torch.nn.functional.one_hot(tree.tokens, 10).double())
    for unfilled in (tree, sampled):
        assert unfilled.pad_to(3) is unfilled
        filled = unfilled.pad_to(5)
        assert filled.linear == linear and filled.tokens.tolist()[0] == [1, 7, 8, 9] + ([9, 9] if linear else [7, 7])
        assert filled.parents.tolist()[0] == ([-1, 0, 1, 2, 3, 4] if linear else [-1, 0, 1, 0, 0, 0])
        assert unfilled.probs is None or filled.probs.argmax(-1).equal(filled.tokens)
    assert tree.pad_to_power(depth=8).tokens.shape[1] == 1 + 4
    assert tree.pad_to_power(depth=3).tokens.shape[1] == 1 + (3 if linear else 4)
    assert make_tree([1], [[]], "cpu").pad_to_power(depth=3).tokens.tolist() == [[1]]
