"""Losslessness by exact enumeration over three tokens: every draft and every outcome of every draw."""

import collections

import pytest
import torch

from specdec.core import rules
from specdec.core.sampling import Sampling, mark_seen
from specdec.core.tree import Tree, make_chain, make_tree
from tests.support.decoding import random_trees
from tests.support.enumeration import (
    BUSH_PARENTS,
    DEPTH,
    LOSSLESS,
    PREFIXES,
    V,
    at_nodes,
    drafted,
    drafts,
    random_laws,
    rows_of,
    rule_error,
    rule_outcomes,
)

DRAFTINGS = ["chosen", "chain", "with replacement", "without replacement"]
SAMPLINGS = [Sampling(0.6), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.7), Sampling(1.0, repetition_penalty=1.7)]
SAMPLINGS += [Sampling(1.3, top_k=2, top_p=0.9, repetition_penalty=1.3)]
EVERY_RULE = [lambda tree, probs, draws: rules.accept_greedy(tree, probs.argmax(-1)), *rules.RULES.values()]


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("drafting", DRAFTINGS)
@pytest.mark.parametrize("p_allowed, q_allowed", [(V, V), (V, V - 1), (V - 1, V)])
def test_lossless(rule, drafting, p_allowed, q_allowed):
    """q_allowed < V is a reduced draft vocabulary; p_allowed < V is a target that gives some tokens probability 0."""
    for seed in range(3 if drafting != "chosen" else 8):
        p = random_laws(seed, allowed=p_allowed)
        assert rule_error(p, rule, [drafted(drafting, seed + 10, q_allowed)]) < 1e-12


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("drafting", DRAFTINGS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_lossless_for_warped_and_penalised_laws(rule, drafting, sampling):
    """The distribution equals that of the target under temperature, top-k, top-p and a penalty on the tokens before."""
    generator = torch.Generator().manual_seed(3)
    logits = {prefix: 2 * torch.randn(V, generator=generator, dtype=torch.float64) for prefix in PREFIXES}
    prompt, root, p = [1], 0, {}
    for prefix in PREFIXES:
        penalised = logits[prefix].tolist()
        for token in {*prompt, root, *prefix}:
            penalised[token] *= sampling.repetition_penalty ** (1 if penalised[token] < 0 else -1)
        p[prefix] = sampling.distribution(torch.tensor(penalised, dtype=torch.float64))
    tree, weights = drafted(drafting, 10)
    committed = torch.zeros(len(tree.tokens), V, dtype=torch.bool)
    committed[:, [*prompt, root]] = True
    probs = sampling.distribution(sampling.penalise(at_nodes(tree, logits), mark_seen(tree, committed)))
    torch.testing.assert_close(probs, at_nodes(tree, p), rtol=0, atol=1e-14)
    assert rule_error(p, rule, [(tree, weights)], probs) < 1e-12


@pytest.mark.parametrize("rule", LOSSLESS)
def test_chain_sampled_from_the_target_is_never_refused(rule):
    p, (tree, _) = random_laws(0), drafted("chain", 0)
    assert {len(text) for _, _, text in rule_outcomes(rule, tree, at_nodes(tree, p))} == {DEPTH + 1}


@pytest.mark.parametrize("rule", LOSSLESS)
def test_wrong_drafting_is_detected(rule):
    """Negative control: the enumeration detects wrong drafting."""
    p, q = random_laws(0), random_laws(10)
    assert rule_error(p, rule, [drafts(q, BUSH_PARENTS, replacement=False, conditioned=False)]) > 1e-2
    tree, weights = drafts(q, [-1, 0])
    kept = [weight * (weight > 0.3) for weight in weights]  # a draw must not be removed because of its own score
    dropped = [weight * (weight <= 0.3) for weight in weights]
    assert rule_error(p, rule, [(tree, kept), (Tree(tree.tokens[:, :1], tree.parents[:, :1], None), dropped)]) > 1e-2


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_the_same_law_after_a_refusal_is_detected(rule, drafting, monkeypatch):
    monkeypatch.setattr(
        rules, "refuse_node", lambda mass, tree, node: (mass / mass.sum(-1, keepdim=True), mass.sum(-1))
    )
    assert rule_error(random_laws(0), rule, [drafted(drafting, 10)]) > 1e-2


def test_wrong_probabilities_are_detected(monkeypatch):
    p, right = random_laws(0), rules.compute_acceptance

    def not_clipped(mass, *node):
        return 1e9 * right(mass / 1e9, *node)

    def without_parent(mass, *node):
        return right(mass / mass.sum(-1, keepdim=True), *node)  # p / q, without P of the parent

    for wrong in (not_clipped, without_parent):
        monkeypatch.setattr(rules, "compute_acceptance", wrong)
        assert rule_error(p, rules.accept_blocks, [drafted("chain", 10)]) > 1e-2


def direct_block(p: dict, q: dict, drawn: tuple[int, ...]) -> list[float]:
    """The distribution of the number of accepted drafts by block verification (2403.10444)."""
    budgets, probabilities = [1.0], []
    for place, token in enumerate(drawn):
        rest = float((budgets[-1] * p[drawn[:place]] - q[drawn[:place]]).clamp(min=0).sum())
        bottom = rest + 1 - budgets[-1]
        probabilities.append(rest / bottom if bottom > 0 else 1.0)
        budgets.append(min(1.0, budgets[-1] * float(p[drawn[:place]][token] / q[drawn[:place]][token])))
    law, refused = [], 1.0  # from the last node up: each is accepted if all below it were refused
    for probability in reversed([1.0, *probabilities[1:], budgets[-1]]):
        law.append(probability * refused)
        refused *= 1 - probability
    return law[::-1]


@pytest.mark.parametrize("seed", range(5))
def test_block_on_a_chain_is_block_verification(seed):
    p, q = random_laws(seed), random_laws(seed + 10)
    tree, _ = drafted("chain", seed + 10)
    distributions = torch.zeros(len(tree.tokens), DEPTH + 1, dtype=torch.float64)
    for row, weight, emitted in rule_outcomes(rules.accept_blocks, tree, at_nodes(tree, p)):
        distributions[row, len(emitted) - 1] += weight
    direct = [direct_block(p, q, tuple(row)) for row in tree.tokens[:, 1:].tolist()]
    torch.testing.assert_close(distributions, torch.tensor(direct, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("rule, figure", [(rules.accept_tokens, 10 / 9), (rules.accept_blocks, 11 / 9)])
def test_expected_drafts_of_a_small_example(rule, figure):
    """A chain with the same distributions at every depth. The figures are those of docs/methods.md, section 1."""
    p = torch.tensor([1 / 3, 2 / 3, 0], dtype=torch.float64)
    tree, weights = drafts(collections.defaultdict(lambda: p[[1, 0, 2]]), [-1, 0, 1])
    outcomes = rule_outcomes(rule, tree, at_nodes(tree, collections.defaultdict(lambda: p)))
    drafted_tokens = sum(weights[row] * weight * (len(emitted) - 1) for row, weight, emitted in outcomes)
    assert drafted_tokens == pytest.approx(figure, abs=1e-12)


def random_probs(generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(2).softmax(-1)


def longest_path(tree: Tree, row: int, accepted_nodes: torch.Tensor) -> list[int]:
    """The longest path by a walk, the first of equal ones. kept [N, V] is true for tokens allowed after a node."""
    walks = {0: [0]}
    for node, parent in enumerate(tree.parents[row].tolist()):
        if parent in walks and accepted_nodes[parent, tree.tokens[row, node]]:
            walks[node] = [*walks[parent], node]
    return max(walks.values(), key=len)


def test_greedy_equals_the_lossless_rules_with_one_hot_laws():
    """Chosen trees and sampled chains: greedy takes the path of the lossless rules with one-hot distributions."""
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for sampled in (False, True):
        tree = random_trees(generator, 40, 7, V)
        if sampled:
            tree = make_chain(tree.tokens, random_probs(generator, 40, 7, V))
        choices = torch.randint(V, (40, 7), generator=generator)
        onehot = torch.nn.functional.one_hot(choices, V).double()
        verdict = rules.accept_greedy(tree, choices)
        for rule in LOSSLESS:
            for result, reference in zip(verdict, rule(tree, onehot.clone(), rules.Draws(generator)), strict=True):
                assert torch.equal(result, reference)
        for row, (path, num_kept, next_token) in enumerate(zip(*(x.tolist() for x in verdict))):
            walked = longest_path(tree, row, onehot[row])
            assert path == walked + [0] * (7 - len(walked)) and num_kept == len(walked)
            assert next_token == choices[row, walked[-1]]
            lengths.add(num_kept)
    assert {1, 2, 3} <= lengths


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rule", EVERY_RULE)
def test_rows_do_not_depend_on_each_other(rule, sampled):
    """Each row has its outcomes alone. A chosen node equals a draw from a one-hot distribution."""
    generator = torch.Generator().manual_seed(1)
    tree, probs = random_trees(generator, 20, 8, V), random_probs(generator, 20, 8, V)
    distributions = (
        random_probs(generator, 20, 8, V) if sampled else torch.nn.functional.one_hot(tree.tokens, V).double()
    )
    drawn = Tree(tree.tokens, tree.parents, distributions)
    together = [(row, emitted, round(weight, 12)) for row, weight, emitted in rule_outcomes(rule, drawn, probs)]
    alone = []
    for row in range(20):
        outcomes = rule_outcomes(rule, rows_of(drawn if sampled else tree, [row]), probs[[row]])
        alone += [(row, emitted, round(weight, 12)) for _, weight, emitted in outcomes]
    assert sorted(together) == sorted(alone) and len({len(emitted) for _, emitted, _ in alone}) > 2


@pytest.mark.parametrize("rule", LOSSLESS)
def test_no_token_is_drawn_from_a_residual_of_rounding(rule):
    p = torch.tensor([0.5, 0.5, 0.0]).repeat(1, 2, 1)  # float32
    q = torch.tensor([0.5, 0.5 - 2**-25, 2**-25]).repeat(1, 2, 1)
    outcomes = rule_outcomes(rule, make_chain(torch.tensor([[0, 2]]), q), p)
    assert {emitted: weight for _, weight, emitted in outcomes} == {(0,): 0.5, (1,): 0.5}


@pytest.mark.parametrize("sampled", [False, True])
def test_no_value_is_read_from_the_device(sampled):
    """Tensors of the meta device hold no values, so reading a value raises an error."""
    probs = torch.empty(2, 4, V, device="meta")
    tree = make_chain(torch.empty(2, 4, dtype=torch.long, device="meta"), probs if sampled else None)
    for rule in EVERY_RULE:
        assert [tuple(x.shape) for x in rule(tree, probs.clone(), rules.Draws(None))] == [(2, 4), (2,), (2,)]


def test_draws_follow_their_laws():
    draws = rules.Draws(torch.Generator().manual_seed(0))
    distribution = torch.tensor([0.0, 0.7, 0.0, 0.3, 0.0])
    row_mask = torch.ones(20000, dtype=torch.bool)
    drawn = draws.token(3 * distribution.expand(20000, 5), row_mask)  # the sum of the distribution does not matter
    torch.testing.assert_close(drawn.bincount(minlength=5) / 20000, distribution, rtol=0, atol=0.02)
    assert not (drawn.bincount(minlength=5)[distribution == 0]).any()
    row_mask = torch.arange(20000) % 2 == 0
    accepted = draws.accept(torch.full((20000,), 0.3), row_mask)
    assert not accepted[~row_mask].any() and accepted[row_mask].float().mean() == pytest.approx(0.3, abs=0.02)
    assert draws.accept(torch.ones(20000), torch.ones_like(row_mask)).all()
    assert not draws.accept(torch.zeros(20000), torch.ones_like(row_mask)).any()


def test_a_draw_of_0_accepts_no_node_of_probability_0(monkeypatch):
    """Draws come from [0, 1), so one in 2^24 is 0."""
    monkeypatch.setattr(rules, "draw_uniform", lambda num, *arguments: torch.zeros(num))
    for draws in (rules.Draws(None), rules.FixedDraws(torch.zeros(3, 2), torch.zeros(3, 1))):
        assert not draws.accept(torch.zeros(3), torch.ones(3, dtype=torch.bool)).any()
        assert not draws.accept_all(torch.zeros(3, 2)).any() and draws.accept_all(torch.full((3, 2), 1e-9)).all()


class Table(rules.Draws):
    """Given numbers for the nodes [B, N - 1]; keeps the distribution that the last token is drawn from."""

    def __init__(self, numbers: torch.Tensor):
        self.numbers = numbers

    def accept_all(self, probability):
        return self.numbers < probability

    def token(self, distribution, row_mask):
        self.last = distribution
        return distribution.argmax(-1)


def test_a_residual_of_rounding_accepts_no_node_at_once():
    """A refusal that only rounding allows leaves the distribution as it was, as after `refuse_node`."""
    probs = torch.tensor([[[1 - 2**-24, 2**-24, 0.0]] * 3])  # float32
    draws = Table(torch.tensor([[1.0, 0.5]]))
    _, num_kept, _ = rules.accept_tokens_at_once(make_tree([0], [[(0, 0), (1, 0)]], "cpu"), probs, draws)
    assert num_kept.tolist() == [1]


@pytest.mark.parametrize("children", [[(0, 0)], [(0, 0), (1, 0)]])
def test_the_last_token_is_not_drawn_from_a_residual_of_rounding_at_once(children):
    """Behind refused children that leave 2^-24 or nothing, the distribution is as it was."""
    probs = torch.tensor([[[1 - 2**-24, 2**-24, 0.0]] * 3])  # float32
    draws = Table(torch.ones(1, len(children)))
    _, num_kept, _ = rules.accept_tokens_at_once(make_tree([0], [children], "cpu"), probs, draws)
    assert num_kept.tolist() == [1] and draws.last.equal(probs[:, 0])


def drafts_of(kind: str, rows: int, num: int, vocab: int) -> Tree:
    """Random trees of chosen nodes, padded with copies; random chains and trees of drawn nodes"""
    if kind == "chosen":
        generator = torch.Generator().manual_seed(int(torch.randint(1000, ())))
        return random_trees(generator, rows, num, vocab).pad_to(num + 2)
    parents = torch.arange(-1, num - 1) if kind == "chain" else torch.tensor([-1, 0, 0, 1, 1, 1, 2, 3, 3, 7][:num])
    probs, tokens = torch.rand(rows, num, vocab, dtype=torch.float64), torch.zeros(rows, num, dtype=torch.long)
    for row in range(rows):
        for node in range(1, num):
            probs[row, node] /= probs[row, node].sum()
            earlier = [each for each in range(1, node) if parents[each] == parents[node]]
            if earlier:  # without replacement
                probs[row, node] = probs[row, earlier[0]].scatter(0, tokens[row, earlier], 0)
                probs[row, node] /= probs[row, node].sum()
            tokens[row, node] = torch.multinomial(probs[row, node], 1)
    most = max(parents.tolist().count(node) for node in range(num))
    return Tree(tokens, parents.expand(rows, -1), probs, linear=kind == "chain", max_children=most)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("kind", ["chosen", "chain", "drawn"])
def test_all_nodes_at_once_as_one_after_the_other(seed, kind):
    torch.manual_seed(seed)
    rows, num, vocab = 5, 10, 6
    tree = drafts_of(kind, rows, num, vocab)
    probs = (3 * torch.randn(rows, tree.tokens.shape[1], vocab, dtype=torch.float64)).softmax(-1)
    probs[0, :, 0] = 0  # a target that gives a token probability 0
    probs /= probs.sum(-1, keepdim=True)
    draws = Table(torch.rand(rows, tree.tokens.shape[1] - 1, dtype=torch.float64) ** (1 + seed % 3))
    path, num_kept, _ = rules.accept_tokens_at_once(tree, probs.clone(), draws)
    every, end = torch.arange(rows), torch.zeros(rows, dtype=torch.long)
    for node in range(1, tree.tokens.shape[1]):
        parent = tree.parents[:, node]
        accepted = draws.numbers[:, node - 1] < rules.compute_acceptance(probs[every, parent], tree, node)
        probs[every, parent], _ = rules.refuse_node(probs[every, parent], tree, node)
        end = torch.where(accepted & (parent == end), node, end)
    wanted, wanted_num = rules.trace_path(tree.ancestors(), end)
    assert path.equal(wanted) and num_kept.equal(wanted_num)
    torch.testing.assert_close(draws.last, probs[every, end], atol=1e-12, rtol=0)


def test_draws_of_all_nodes_are_those_of_single_answers():
    """Each answer's own generator is asked once a node, in their order."""
    chances = torch.rand(3, 5)
    generators = [torch.Generator().manual_seed(row) for row in range(3)]
    found = rules.Draws(generators).accept_all(chances)
    for row in range(3):
        generator = torch.Generator().manual_seed(row)
        wanted = [bool(torch.rand(1, generator=generator) < chance) for chance in chances[row]]
        assert found[row].tolist() == wanted
