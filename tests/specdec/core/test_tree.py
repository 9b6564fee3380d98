"""Geometry of trees, and the trees that HeadProposer proposes."""

from dataclasses import replace

import pytest
import torch

from specdec.core.sampling import Sampling
from specdec.core.tree import Tree, TreeShape, make_tree
from specdec.proposers.heads import HeadProposer
from tests.support.decoding import chain_of, random_tokens, random_tree
from tests.support.drafters import VARIANTS, paired


def walk_up(parents: list[int], node: int) -> list[int]:
    """The node and its ancestors."""
    return [node] if parents[node] < 0 else [node, *walk_up(parents, parents[node])]


def stack(trees: list[Tree]) -> Tree:
    return Tree(torch.cat([tree.tokens for tree in trees]), torch.cat([tree.parents for tree in trees]), None)


def test_depths_and_ancestors_equal_those_of_a_walk_to_the_root():
    generator = torch.Generator().manual_seed(0)
    tree = stack([random_tree(generator, 9, 50) for _ in range(20)])
    for row, parents in enumerate(tree.parents.tolist()):
        for node in range(9):
            path = walk_up(parents, node)
            assert tree.depths()[row, node] == len(path) - 1
            assert tree.ancestors()[row, node].nonzero().flatten().tolist() == sorted(path)


def propose(drafter, shape: TreeShape, temperature: float, seed: int) -> tuple[Tree, torch.Tensor]:
    """The tree proposed after two prompts of different lengths with random features, and the newest tokens [B]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.tensor([random_tokens(seed + row, 7, drafter.target.vocab_size) for row in range(2)])
    num = torch.tensor([7, 4])
    width = len(drafter.target_layers) * drafter.target.width
    proposer = HeadProposer(drafter, shape)
    proposer.begin(tokens, num)
    proposer.commit(tokens, torch.randn(2, 7, width, generator=generator, dtype=torch.float64), num, num.tolist())
    return proposer.propose(Sampling(temperature), generator), tokens[[0, 1], num - 1]


SHAPES = [TreeShape(1, 3, 2), TreeShape(3, 3, 8), TreeShape(4, 2, 30), TreeShape(3, 90, 12)]


@paired("any_drafter, shape", VARIANTS, SHAPES)
def test_proposed_trees(any_drafter, shape):
    for seed in range(3):
        tree, newest = propose(any_drafter, shape, 0.0, seed)
        assert tree.probs is None and torch.equal(tree.tokens[:, 0], newest)
        assert 1 < tree.tokens.shape[1] <= 1 + shape.nodes
        for tokens, parents, depths in zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depths().tolist()):
            assert parents[0] == -1 and all(0 <= parent < node for node, parent in enumerate(parents) if node)
            assert max(depths) <= shape.depth
            drafts = list(zip(parents, tokens))[1:]
            assert len(set(drafts)) == len(drafts)  # siblings differ
            if any_drafter.draft_to_target is not None:
                assert set(tokens[1:]) <= set(any_drafter.draft_to_target.tolist())


def list_paths(tree: Tree, row: int) -> set[tuple[int, ...]]:
    """The tokens from the root's child down to each node."""
    parents = tree.parents[row].tolist()
    walks = [walk_up(parents, node)[-2::-1] for node in range(1, len(parents))]
    return {tuple(tree.tokens[row, walk].tolist()) for walk in walks}


def test_tree_keeps_the_best_nodes(any_drafter):
    """Compares with a naive ranking of all nodes of a complete, wide enough tree by joint log-probability."""
    (whole, _), (smaller, _) = (propose(any_drafter, TreeShape(2, 4, nodes), 0.0, 0) for nodes in (20, 6))
    single, _ = propose(any_drafter, chain_of(1), 1.0, 0)
    distribution = single.probs[:, 1].log()  # of depth 1
    for row in range(2):
        path_sets = [list_paths(tree, row) for tree in (whole, smaller)]
        assert len(path_sets[0]) == 20 and len(path_sets[1]) == 6 and path_sets[1] < path_sets[0]
        firsts = sorted(
            (path[0] for path in path_sets[0] if len(path) == 1), key=lambda token: -distribution[row, token]
        )
        assert firsts == distribution[row].topk(4).indices.tolist()
        chosen = [path[0] for path in path_sets[1] if len(path) == 1]
        assert set(chosen) == set(firsts[: len(chosen)])


def test_impossible_shapes_are_refused():
    for sizes in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(ValueError, match=r"^depth=\d, width=\d and nodes=\d must be at least 1\.$"):
            TreeShape(*sizes)
    with pytest.raises(ValueError, match=r"^nodes=3 cannot hold a path of depth=4"):
        TreeShape(4, 2, 3)
    assert chain_of(3).chain and not TreeShape(3, 2, 3).chain


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
