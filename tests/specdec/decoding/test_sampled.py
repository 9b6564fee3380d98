"""Whole decoders (target, drafter and rule) are lossless at temperature > 0: every draw of a round is enumerated."""

import functools

import pytest

from specdec.core.tree import Tree, TreeShape, make_root
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from tests.support.decoding import chain_of
from tests.support.drafters import HEADS, load_head, make_drafter
from tests.support.enumeration import SAMPLINGS, answer_statistic, decoder_error, sampled_target, without_temperature

pytestmark = pytest.mark.full

CHAIN, TREE = chain_of(2), TreeShape(depth=2, width=2, nodes=4)
BUSH = TreeShape(depth=2, width=3, nodes=6)


LAYERS = {"target_layers": [1, 2]}


def layers_of(head: str) -> dict:
    """The default layers of some heads are those of a deeper target."""
    return LAYERS if "target_layers" in load_head(head)["drafter"] else {}


def block(head: str, **dependence) -> dict:
    return {"head": head, "arguments": {**LAYERS, "dependence": dependence}}


PAIR = block("dflash2", kind="selector", rank=8, top=2)  # candidates, of three tokens
LILICORR = block("lilicorr", kind="lilicorr", top=2, hidden=8, factor=4, num_heads=2)
GATED = block("dspark", kind="markov", rank=8, form="gated")
DOMINO, RNN = block("domino", kind="domino", hidden=8, rank=8), block("dspark", kind="markov", rank=8, form="rnn")


def decoder_of(
    sampling="warm", shape=CHAIN, *, head="eagle", reduced=False, arguments=None, rule="token", wrong=None, **how
) -> Decoder:
    """arguments: settings of the drafter; wrong: function that changes the tree, for negative controls"""
    target = sampled_target()
    proposer = HeadProposer(make_drafter(target, head, reduced, arguments), shape, **how)
    if wrong:
        original_propose = proposer.propose
        proposer.propose = lambda *arguments: wrong(original_propose(*arguments))
    return Decoder(target, proposer, sampling=SAMPLINGS[sampling], stop=set(), rule=rule)


CASES = {
    "chain": [("top_k", CHAIN, {}), ("top_p", CHAIN, {"reduced": True}), ("penalty", CHAIN, {}), ("all", CHAIN, {})]
    + [("warm", CHAIN, PAIR), ("top_p", CHAIN, PAIR), ("warm", CHAIN, DOMINO), ("top_k", CHAIN, RNN)]
    + [("warm", CHAIN, LILICORR), ("warm", CHAIN, GATED)]
    + [("warm", CHAIN, {"head": head, "arguments": layers_of(head)}) for head in HEADS if head != "eagle"],
    "distinct": [
        ("warm", TREE, {"reduced": True}),
        ("top_k", TREE, {}),
        ("all", TREE, {}),
        ("penalty", TREE, {"head": "medusa"}),
        ("warm", TREE, PAIR),
        ("warm", BUSH, PAIR),  # a third sibling, for which no candidate is left
        ("all", BUSH, PAIR),
        ("warm", TREE, DOMINO),
        ("all", BUSH, DOMINO),
        ("warm", BUSH, RNN),
        ("warm", BUSH, LILICORR),
        ("all", TREE, LILICORR),
        ("warm", TREE, GATED),
    ],
    "chosen": [
        ("all", TREE, {"reduced": True}),
        ("warm", BUSH, PAIR),
        ("warm", TREE, DOMINO),
        ("warm", TREE, RNN),
        ("warm", TREE, LILICORR),
    ],
}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "children, sampling, shape, how", [(kind, *case) for kind, cases in CASES.items() for case in cases], ids=str
)
def test_lossless(rule, children, sampling, shape, how, monkeypatch):
    """Checks the first round, and the third round, which comes after two others."""
    how = {**how, "rule": rule, "children": "distinct" if children == "chain" else children}
    decoder = decoder_of(sampling, shape, **how)
    assert decoder_error(decoder, 1, monkeypatch=monkeypatch) < 1e-12
    assert decoder_error(decoder, 3, seed=1, monkeypatch=monkeypatch) < 1e-12


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_decoding_is_exact(sampling, monkeypatch):
    decoder = Decoder(sampled_target(), None, sampling=SAMPLINGS[sampling], stop=set())
    for number in range(4):
        assert decoder_error(decoder, number, monkeypatch=monkeypatch) < 1e-12


# Negative controls: the enumeration must detect wrong drafting


def as_if_independent(tree: Tree) -> Tree:
    """Gives every sibling the distribution of the first sibling."""
    parents = tree.parents[0].tolist()
    first = [parents.index(parent) for parent in parents]
    return Tree(tree.tokens, tree.parents, tree.probs[:, first])


def anticipating(tree: Tree) -> Tree:
    """Removes the last draft unless it is the most likely token of its own distribution. One row only."""
    distribution = tree.probs[0, -1]
    if distribution[tree.tokens[0, -1]] >= distribution.max():
        return tree
    return Tree(tree.tokens[:, :-1], tree.parents[:, :-1], tree.probs[:, :-1], linear=tree.linear)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_wrong_drafting_is_detected(rule, monkeypatch):
    wrong = functools.partial(decoder_of, rule=rule)
    assert decoder_error(wrong(wrong=without_temperature), 1, monkeypatch=monkeypatch) > 1e-3
    decoder = wrong("all", shape=TREE, children="distinct", wrong=as_if_independent)
    assert max(decoder_error(decoder, number, monkeypatch=monkeypatch) for number in (1, 2, 3)) > 1e-3
    assert decoder_error(wrong(wrong=anticipating), 1, alone=True, monkeypatch=monkeypatch) > 1e-3
    assert decoder_error(wrong(wrong=lambda tree: make_root(tree.tokens[:, 0])), 1, monkeypatch=monkeypatch) < 1e-12


def test_a_penalty_that_ignores_the_answer_is_detected(monkeypatch):
    """The penalty applies to tokens of the answer as it does to tokens of the prompt."""
    decoder = decoder_of("penalty")
    assert decoder_error(decoder, 2, seed=1, monkeypatch=monkeypatch) < 1e-12
    monkeypatch.setattr(
        "specdec.target.verifier.mark_seen",
        lambda tree, committed: committed[:, None].expand(-1, tree.tokens.shape[1], -1),
    )
    assert decoder_error(decoder_of("penalty"), 1, monkeypatch=monkeypatch) > 1e-3


# Whole answers


ANSWERS = [
    ("penalty", CHAIN, {"rule": "block", "reduced": True}),
    ("top_p", TREE, {"children": "distinct", "rule": "block"}),
]


@pytest.mark.parametrize("sampling, shape, how", ANSWERS, ids=str)
def test_whole_answers_follow_the_target_law(sampling, shape, how):
    statistic, freedom = answer_statistic(decoder_of(sampling, shape, **how), 1000)
    assert freedom > 9 and statistic < freedom + 4 * (2 * freedom) ** 0.5


def test_whole_answers_of_a_wrong_decoder_are_detected():
    statistic, freedom = answer_statistic(decoder_of(wrong=without_temperature), 1000)
    assert statistic > freedom + 4 * (2 * freedom) ** 0.5
