"""Tests of the distribution at temperature > 0 where every round chooses its drafts: every draw is enumerated."""

import pytest

from specdec.core.tree import make_root
from specdec.decoding.decoder import Decoder
from specdec.proposers import auto as auto_module
from specdec.proposers.auto import AutoProposer
from specdec.proposers.candidates import Acceptance, Kind, RowCandidates
from specdec.proposers.text import Guess
from tests.specdec.proposers.test_auto import MIDDLE, auto
from tests.support.enumeration import SAMPLINGS, decoder_error, sampled_target

# With such costs the best number of drafts beside a drawn one would depend on the token that was drawn
UNEVEN = {1: 1.0, 2: 1.3, 3: 1.33, 4: 1.63, 5: 1.68, 6: 1.69, 7: 2.69, 8: 2.69, 9: 2.7}


def forgetful(proposer: AutoProposer) -> AutoProposer:
    """Starts every answer with what it knew at first, so that all draws of a round meet the same state."""
    begin = proposer.begin

    def forget_and_begin(tokens, num):
        proposer.reset_history()
        begin(tokens, num)

    proposer.begin = forget_and_begin
    return proposer


PAIR = {"target_layers": [1, 2], "dependence": {"kind": "selector", "rank": 8, "top": 2}}
CASES = {
    "head": {"text": False},
    "head, levels cost": {"text": False, "ratios": MIDDLE, "step": 0.1},
    "head and text": {},
    "head and text, levels cost": {"ratios": MIDDLE, "step": 0.1},
    "lattice of two candidates": {"head": "dflash2", "text": False, "arguments": PAIR},
    "lattice and text": {"head": "dflash2", "arguments": PAIR},
    "domino": {"head": "domino", "text": False, "arguments": {"target_layers": [1, 2]}},
    "text": {"head": None},
    "head and text, no size for a second draft": {"ratios": {1: 1.0, 2: 1.1}},
    "head and text, no size for a draft": {"ratios": {1: 1.0}},
}


@pytest.mark.full
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("sampling", ["warm", "all"])
@pytest.mark.parametrize("member_kind", CASES)
def test_the_distribution_of_the_target_is_kept(member_kind, sampling, rule, monkeypatch):
    """Every draw of a round is enumerated; how much is drafted depends on earlier draws of the same round."""
    target = sampled_target()
    monkeypatch.setattr(auto_module, "MAX_HEAD_STEPS", 2)  # the enumeration knows rounds of up to three tokens
    proposer = forgetful(auto(target, **CASES[member_kind], num=2))
    sizes, propose = set(), proposer.propose

    def watched(*arguments):
        tree = propose(*arguments)
        sizes.add(tree.tokens.shape[1])
        return tree

    proposer.propose = watched
    decoder = Decoder(target, proposer, sampling=SAMPLINGS[sampling], stop=set(), rule=rule)
    for number in (1, 3):
        assert decoder_error(decoder, number, alone=True, monkeypatch=monkeypatch) < 1e-12
    assert max(sizes) >= min(2, max(proposer.costs.sizes))


@pytest.mark.full
def test_what_is_drafted_beside_a_draw_does_not_depend_on_it(monkeypatch):
    monkeypatch.setattr(auto_module, "MAX_HEAD_STEPS", 2)
    proposer = forgetful(auto(sampled_target(), ratios=UNEVEN, num=2))
    decoder = Decoder(sampled_target(), proposer, sampling=SAMPLINGS["warm"], stop=set())
    assert decoder_error(decoder, 3, seed=152, alone=True, monkeypatch=monkeypatch) < 1e-12
    trees = {}
    for token in range(3):
        row = RowCandidates(Acceptance(), [0], ends=frozenset({1}))
        row.add_guesses("text", [Guess(2, 0, 0.4), Guess(0, 1, 0.3), Guess(1, 0, 0.2)])
        row.fix_nodes(2)
        row.add(token, 0, Kind("drawn", 0.5, 1), drawn=True)
        trees[token] = len(row.values(chain=False)), row.probabilities, row.choose(3, chain=False).nodes[:2]
    assert trees[0] == trees[1] == trees[2]


@pytest.mark.full
def test_dropping_a_draft_because_of_what_was_drawn_is_detected(monkeypatch):
    """The negative control: a drawn draft of token 0 is left out, as a chosen one may be."""
    monkeypatch.setattr(auto_module, "MAX_HEAD_STEPS", 1)
    proposer = forgetful(auto(sampled_target(), text=False))
    decoder = Decoder(sampled_target(), proposer, sampling=SAMPLINGS["warm"], stop=set())
    assert decoder_error(decoder, 1, alone=True, monkeypatch=monkeypatch) < 1e-12
    propose = proposer.propose

    def dropping(*arguments):
        tree = propose(*arguments)
        return make_root(tree.tokens[:, 0]) if (tree.tokens[:, 1:] == 0).any() else tree

    proposer.propose = dropping
    assert decoder_error(decoder, 1, alone=True, monkeypatch=monkeypatch) > 1e-3
