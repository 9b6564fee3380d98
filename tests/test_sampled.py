"""Losslessness of whole decoders at temperature > 0: a round's draws are enumerated, target, drafter and rule together."""

import collections
import functools
import itertools
import math

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from conftest import chain_of, make_drafter, make_target
from specdec import rules
from specdec import sampling as specdec_sampling
from specdec.decode import Decoder
from specdec.proposers import heads
from specdec.proposers.heads import HeadProposer
from specdec.proposers.stopping import Stopping
from specdec.sampling import Sampling
from specdec.tree import Tree, TreeShape, root
from test_verify import Enumerate

V, PROMPT = 3, (1, 1)
CHAIN, TREE = chain_of(2), TreeShape(depth=2, width=2, nodes=4)
TEXTS = list(itertools.product(range(V), repeat=3))
SAMPLINGS = {
    "warm": Sampling(3.0),
    "top_k": Sampling(3.0, top_k=2),
    "top_p": Sampling(3.0, top_p=0.8),
    "penalty": Sampling(3.0, repetition_penalty=1.5),
    "all": Sampling(4.0, top_k=2, top_p=0.9, repetition_penalty=0.7),
}


@functools.cache
def target_of():
    return make_target(V, num_layers=2)


@functools.cache
def next_law(sampling: Sampling, text: tuple[int, ...]) -> torch.Tensor:
    """[V], by transformers"""
    steps = [
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        TemperatureLogitsWarper(sampling.temperature),
    ]
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []
    tokens = torch.tensor([text])
    with torch.no_grad():
        logits = target_of().model(tokens).logits[:, -1]
    return LogitsProcessorList(steps)(tokens, logits).softmax(-1)[0]


def chance(sampling: Sampling, before: tuple[int, ...], text: tuple[int, ...]) -> float:
    """Of `text` behind `before`."""
    return math.prod(float(next_law(sampling, before + text[:n])[text[n]]) for n in range(len(text)))


class Switch:
    """In the place of rules.Draws: at random, the same for every row, until it is switched on; then an enumeration."""

    def __init__(self, scripts: list[list[int]], seed: int):
        self.enumeration, self.on = Enumerate(scripts), False
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self) -> torch.Tensor:
        return torch.rand(1, 1, generator=self.generator, dtype=torch.float64)

    def token(self, law, where):
        if self.on:
            return self.enumeration.token(law, where)
        return specdec_sampling.pick(law, self.uniform().expand(len(law), 1))

    def accept(self, chance, where):
        return self.enumeration.accept(chance, where) if self.on else where & (self.uniform()[0] < chance)


def outcomes(decoder: Decoder, number: int, *, seed: int, alone: bool, monkeypatch):
    """Round `number` (0: the prompt's own pass), after rounds drawn by `seed`. Yields text before it, weight, what it emits

    alone: a row at a time, for a decoder whose rows mind each other's business
    """
    pending = [[]]
    while pending:
        scripts, pending = (pending[:1], pending[1:]) if alone else (pending, [])
        draws = Switch(scripts, seed)
        everywhere = torch.ones(len(scripts), dtype=torch.bool)
        with monkeypatch.context() as patch:
            patch.setattr(rules, "Draws", lambda generator, draws=draws: draws)
            patch.setattr(heads, "pick", lambda law, uniform, draws=draws, where=everywhere: draws.token(law, where))
            stream, before = decoder.stream([list(PROMPT)] * len(scripts), 50), PROMPT
            for place in range(number + 1):
                draws.on = place == number
                emitted = next(stream).tokens
                if place < number:
                    before += tuple(emitted[0])
            stream.close()
        for tokens, weight in zip(emitted, draws.enumeration.weights):
            yield before, weight, tuple(tokens)
        pending += [script for _, script in draws.enumeration.others]


def error(decoder: Decoder, number: int, *, seed: int = 0, alone: bool = False, monkeypatch) -> float:
    """The largest difference between the law of texts that begin with what the round emits and the target's law."""
    begun = collections.Counter()
    found = list(outcomes(decoder, number, seed=seed, alone=alone, monkeypatch=monkeypatch))
    before = found[0][0]
    for _, weight, emitted in found:
        begun[emitted] += weight
    sampling = decoder.sampling
    law = {
        text: sum(begun[text[:n]] * chance(sampling, before + text[:n], text[n:]) for n in range(1, 4))
        for text in TEXTS
    }
    return max(abs(law[text] - chance(sampling, before, text)) for text in TEXTS)


def decoder_of(
    sampling="warm", shape=CHAIN, *, head="eagle", reduced=False, rule="token", wrong=None, **how
) -> Decoder:
    """wrong: what is done to the proposed tree"""
    target = target_of()
    proposer = HeadProposer(make_drafter(target, head, reduced), shape, **how)
    if wrong:
        right = proposer.propose
        proposer.propose = lambda *arguments: wrong(right(*arguments))
    lossy = rule in rules.LOSSY
    return Decoder(target, proposer, sampling=SAMPLINGS[sampling], stop=set(), rule=rule, lossy=lossy)


CASES = {
    "chain": [("top_k", CHAIN, {}), ("top_p", CHAIN, {"reduced": True}), ("penalty", CHAIN, {}), ("all", CHAIN, {})],
    "distinct": [("warm", TREE, {"reduced": True}), ("top_k", TREE, {}), ("penalty", TREE, {"head": "medusa"})],
    "independent": [("top_p", TREE, {}), ("penalty", TREE, {"reduced": True}), ("all", TREE, {})],
    "chosen": [("all", TREE, {"reduced": True})],
}


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "children, sampling, shape, how", [(kind, *case) for kind, cases in CASES.items() for case in cases], ids=str
)
def test_lossless(rule, children, sampling, shape, how, monkeypatch):
    """Of the first round, and of the third after some history."""
    how = {**how, "rule": rule, "children": "chosen" if children == "chain" else children}
    decoder = decoder_of(sampling, shape, **how)
    assert error(decoder, 1, monkeypatch=monkeypatch) < 1e-12
    if children != "independent":
        assert error(decoder, 3, seed=1, monkeypatch=monkeypatch) < 1e-12


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_plain_decoding(sampling, monkeypatch):
    decoder = Decoder(target_of(), None, sampling=SAMPLINGS[sampling], stop=set())
    for number in range(4):
        assert error(decoder, number, monkeypatch=monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("shape, children", [(CHAIN, "chosen"), (TreeShape(2, 2, 3), "distinct")], ids=str)
def test_lossless_where_drafting_stops_now_and_then(rule, shape, children, monkeypatch):
    """By what it knows before the draw: after some first drafts it goes on, after others it does not."""
    probe = decoder_of("warm", shape, children=children, stopping=Stopping())
    depths, chances = {}, set()
    for threshold in (0.0, None):
        if threshold is None:
            threshold = sorted(chances)[len(chances) // 2]
        decoder = decoder_of("warm", shape, rule=rule, children=children, stopping=Stopping(threshold=threshold))
        right, proposer, found = decoder.proposer.propose, decoder.proposer, set()

        def propose(*arguments, right=right, proposer=proposer, found=found):
            tree = right(*arguments)
            found.add(tree.tokens.shape[1])
            chances.add(float(sum(map(proposer.stopping.log_chance, proposer.evidence)).exp()))
            return tree

        proposer.propose = propose
        assert error(decoder, 1, alone=True, monkeypatch=monkeypatch) < 1e-12
        depths[threshold] = found
    assert probe and depths[0.0] == {1 + shape.nodes} and len(depths[threshold]) == 2


# Negative controls: what must be found


def without_temperature(tree: Tree) -> Tree:
    laws = tree.probs ** SAMPLINGS["warm"].temperature
    return Tree(tree.tokens, tree.parents, laws / laws.sum(-1, keepdim=True).clamp(min=1e-9), linear=tree.linear)


def as_if_independent(tree: Tree) -> Tree:
    """Every sibling's law is that of the first."""
    parents = tree.parents[0].tolist()
    first = [parents.index(parent) for parent in parents]
    return Tree(tree.tokens, tree.parents, tree.probs[:, first])


def anticipating(tree: Tree) -> Tree:
    """A last draft that its own law finds unlikely is withdrawn; one row only."""
    law = tree.probs[0, -1]
    if law[tree.tokens[0, -1]] >= law.max():
        return tree
    return Tree(tree.tokens[:, :-1], tree.parents[:, :-1], tree.probs[:, :-1], linear=tree.linear)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_wrong_drafting_is_found(rule, monkeypatch):
    wrong = functools.partial(decoder_of, rule=rule)
    assert error(wrong(wrong=without_temperature), 1, monkeypatch=monkeypatch) > 1e-3
    decoder = wrong("all", shape=TREE, children="distinct", wrong=as_if_independent)
    assert max(error(decoder, number, monkeypatch=monkeypatch) for number in (1, 2, 3)) > 1e-3
    assert error(wrong(wrong=anticipating), 1, alone=True, monkeypatch=monkeypatch) > 1e-3
    assert error(wrong(wrong=lambda tree: root(tree.tokens[:, 0])), 1, monkeypatch=monkeypatch) < 1e-12


def test_a_forgotten_penalty_is_found(monkeypatch):
    """Tokens of the answer count as those of the prompt do."""
    decoder = decoder_of("penalty")
    assert error(decoder, 2, seed=1, monkeypatch=monkeypatch) < 1e-12
    monkeypatch.setattr(
        "specdec.verifier.seen", lambda tree, committed: committed[:, None].expand(-1, tree.tokens.shape[1], -1)
    )
    assert error(decoder_of("penalty"), 1, monkeypatch=monkeypatch) > 1e-3


# The lossy rule


def test_typical_says_what_it_is(monkeypatch):
    target = target_of()
    with pytest.raises(ValueError, match=r"^rule=typical changes what the target says\. .* lossy=true"):
        Decoder(target, None, sampling=Sampling(1.0), stop=set(), rule="typical")
    with pytest.raises(ValueError, match=r"^rule=typical needs temperature= above 0"):
        Decoder(target, None, sampling=Sampling(), stop=set(), rule="typical", lossy=True)
    with pytest.raises(ValueError, match=r"^rule=best must be one of token, block, typical\.$"):
        Decoder(target, None, sampling=Sampling(), stop=set(), rule="best")
    for shape in (CHAIN, TREE):
        assert error(decoder_of(rule="typical", shape=shape), 1, monkeypatch=monkeypatch) > 1e-2
        assert error(decoder_of(shape=shape), 1, monkeypatch=monkeypatch) < 1e-12
    Decoder(target, None, sampling=Sampling(), stop=set(), rule="block", lossy=True)  # allowed, not asked for


# Whole answers


def statistic(decoder: Decoder, num: int) -> tuple[float, int]:
    """Chi-square of the first four tokens of `num` answers to the exact law, and its degrees of freedom"""
    answers = decoder.generate([list(PROMPT)] * num, 4, generator=torch.Generator().manual_seed(0)).tokens
    counts = collections.Counter(map(tuple, answers))
    texts = list(itertools.product(range(V), repeat=4))
    expected = [num * chance(decoder.sampling, PROMPT, text) for text in texts]
    pairs = [(counts[text], e) for text, e in zip(texts, expected) if e >= 5]
    rest = [(counts[text], e) for text, e in zip(texts, expected) if e < 5]
    pairs.append((sum(count for count, _ in rest), sum(e for _, e in rest)))
    assert sum(count for count, _ in pairs) == num
    return sum((count - e) ** 2 / max(e, 1e-9) for count, e in pairs if count or e), len(pairs) - 1


ANSWERS = [
    ("penalty", CHAIN, {"rule": "block", "reduced": True}),
    ("top_p", TREE, {"children": "distinct", "rule": "block"}),
    ("warm", TREE, {"children": "independent", "reduced": True, "stopping": Stopping(threshold=0.3)}),
]


@pytest.mark.parametrize("sampling, shape, how", ANSWERS, ids=str)
def test_whole_answers(sampling, shape, how):
    found, freedom = statistic(decoder_of(sampling, shape, **how), 1000)
    assert freedom > 9 and found < freedom + 4 * (2 * freedom) ** 0.5


def test_whole_answers_of_a_wrong_decoder():
    found, freedom = statistic(decoder_of(wrong=without_temperature), 1000)
    assert found > freedom + 4 * (2 * freedom) ** 0.5
