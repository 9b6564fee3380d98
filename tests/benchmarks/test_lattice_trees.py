"""Tests of the comparison of trees: what a block drafter's bare marginals are."""

import pytest

from benchmarks.lattice_trees import LatticeTreesOptions, make_methods, tabulate, without_dependence
from specdec.core.sampling import Sampling
from specdec.measuring.measure import MeasureSettings, Prompt, measure
from tests.specdec.proposers.test_trees import SIX, WIDE, opened
from tests.support import make_drafter
from tests.texts import repeating_texts


def test_the_marginals_are_those_of_the_same_head_without_a_selector(small_target):
    lattice = opened(small_target, "dflash2", SIX, WIDE)
    plain = opened(small_target, "dflash", {"convolution": 2}, WIDE)
    tensors = lattice.drafter.state_dict()
    plain.drafter.load_state_dict({name: tensors[name] for name in plain.drafter.state_dict()})
    bare = opened(small_target, "dflash2", SIX, WIDE)
    bare.drafter = without_dependence(bare.drafter)
    trees = [each.propose(Sampling(), None) for each in (bare, plain, lattice)]
    assert trees[0].tokens.equal(trees[1].tokens) and trees[0].parents.equal(trees[1].parents)
    assert not trees[0].tokens.equal(trees[2].tokens)
    with pytest.raises(ValueError, match=r"^checkpoint= must be a block drafter whose drafts depend on each other"):
        without_dependence(plain.drafter)


def test_all_methods_are_measured_beside_each_other(small_target):
    drafter = make_drafter(small_target, "dflash2", False, SIX)
    methods = make_methods(drafter, LatticeTreesOptions("a head", nodes="6,9", width=3))
    prompts = [Prompt(str(place), "", text) for place, text in enumerate(repeating_texts(2, 12)[:3])]
    for temperature in (0.0, 1.0):
        settings = MeasureSettings(Sampling(temperature), set(), 12)
        results = [each for group in measure(methods, prompts, settings) for each in group]
        rows = tabulate({method.name: [each[method.name] for each in results] for method in methods}, temperature, 0)
        assert [row["method"] for row in rows] == ["chain", *(f"{kind}, {num} nodes" for num in (6, 9) for kind in ("marginals", "dependence"))]  # fmt: skip
        assert [row.get("minus") for row in rows[1:]] == ["chain", "marginals, 6 nodes", "chain", "marginals, 9 nodes"]
        assert all(row["tau"] >= 1 and (temperature or row["answers as plain"] == len(prompts)) for row in rows)
    assert [method.proposer.drafter.dependence is None for method in methods[:3]] == [False, True, False]
