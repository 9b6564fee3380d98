"""Losslessness by exact enumeration: three tokens, every draft, every outcome of every draw."""

import collections
import functools
import itertools
import math

import pytest
import torch

from conftest import random_tree
from specdec import rules
from specdec.sampling import Sampling, seen
from specdec.tree import Tree, chain

V, DEPTH = 3, 3
TEXTS = list(itertools.product(range(V), repeat=DEPTH + 1))
PREFIXES = [prefix for length in range(DEPTH + 1) for prefix in itertools.product(range(V), repeat=length)]
CHAIN = [-1, 0, 1, 2]
BUSH = [-1, 0, 0, 1, 1, 3]  # neither its order of nodes nor the reverse is a post-order
DRAFTINGS = ["chosen", "chain", "with replacement", "without replacement"]
SAMPLINGS = [Sampling(0.6), Sampling(1.0, top_k=2), Sampling(1.0, top_p=0.7), Sampling(1.0, repetition_penalty=1.7)]
SAMPLINGS += [Sampling(1.3, top_k=2, top_p=0.9, repetition_penalty=1.3)]
LOSSLESS = [rules.sample, rules.block]
EVERY = [lambda tree, probs, draws: rules.greedy(tree, probs.argmax(-1)), *rules.RULES.values()]


class Enumerate:
    """In the place of rules.Draws: a row follows its script, then takes the first possible outcome and notes others."""

    def __init__(self, scripts: list[list[int]]):
        self.scripts, self.others = scripts, []
        self.taken, self.weights = [[] for _ in scripts], [1.0] * len(scripts)

    def token(self, law, where):
        picked = torch.zeros(len(self.scripts), dtype=torch.long)
        for row in where.nonzero()[:, 0].tolist():
            weights, taken = law[row].tolist(), self.taken[row]
            possible = [index for index, weight in enumerate(weights) if weight > 0]
            if len(taken) < len(self.scripts[row]):
                possible = [self.scripts[row][len(taken)]]
            self.others += [(row, [*taken, index]) for index in possible[1:]]
            self.weights[row] *= weights[possible[0]]
            picked[row] = possible[0]
            taken.append(possible[0])
        return picked

    def accept(self, chance, where):
        chance = chance.clamp(max=1)
        return self.token(torch.stack([1 - chance, chance], dim=1), where) == 1


def rows_of(tree: Tree, rows: list[int]) -> Tree:
    return Tree(tree.tokens[rows], tree.parents[rows], None if tree.probs is None else tree.probs[rows])


def at_nodes(tree: Tree, table: dict) -> torch.Tensor:
    """[B, N, V]: what the table holds for each node's prefix, its tokens from the root (which is not in it) down."""
    found = []
    for tokens, parents in zip(tree.tokens[:, 1:].tolist(), tree.parents[:, 1:].tolist()):
        prefixes = [()]
        for token, parent in zip(tokens, parents):
            prefixes.append((*prefixes[parent], token))
        found.append(torch.stack([table[prefix] for prefix in prefixes]))
    return torch.stack(found)


def outcomes(rule, tree: Tree, probs: torch.Tensor):
    """Yields (row, weight, emitted) for every outcome of the rule's draws."""
    pending = [(row, []) for row in range(len(tree.tokens))]
    while pending:
        rows = [row for row, _ in pending]
        draws = Enumerate([script for _, script in pending])
        part = rows_of(tree, rows)
        path, num_kept, next_token = rule(part, probs[rows], draws)
        for place, row in enumerate(rows):
            nodes = path[place, : num_kept[place]]
            assert nodes[0] == 0 and torch.equal(part.parents[place, nodes[1:]], nodes[:-1])
            assert not path[place, num_kept[place] :].any()
            yield row, draws.weights[place], (*part.tokens[place, nodes[1:]].tolist(), int(next_token[place]))
        pending = [(rows[place], script) for place, script in draws.others]


def random_laws(seed: int, *, allowed: int = V) -> dict:
    """A law of the next token for every prefix, with nothing on tokens from `allowed` on."""
    generator = torch.Generator().manual_seed(seed)
    laws = {}
    for prefix in PREFIXES:
        law = torch.rand(V, generator=generator, dtype=torch.float64) ** 2
        law[allowed:] = 0
        laws[prefix] = law / law.sum()
    return laws


def drafts(q: dict, parents: list[int], *, replacement: bool = True, conditioned: bool = True):
    """-> a tree [B, N] of every draft, and the drafts' chances [B]

    conditioned=False, which is wrong, hands in q itself for children that were drawn without replacement.
    """
    tokens, laws, weights = [], [], []
    for drawn in itertools.product(range(V), repeat=len(parents) - 1):
        found, given, weight = [()], [torch.zeros(V, dtype=torch.float64)], 1.0
        for node, token in enumerate(drawn, start=1):
            law = q[found[parents[node]]].clone()
            given.append(law if conditioned else law.clone())
            if not replacement:
                law[[drawn[other - 1] for other in range(1, node) if parents[other] == parents[node]]] = 0
                law /= law.sum()
            weight *= float(law[token])
            found.append((*found[parents[node]], token))
        if weight > 0:
            tokens.append([0, *drawn])
            laws.append(torch.stack(given))
            weights.append(weight)
    return Tree(torch.tensor(tokens), torch.tensor(parents).repeat(len(tokens), 1), torch.stack(laws)), weights


@functools.cache
def drafted(name: str, seed: int, allowed: int = V):
    """-> a tree [B, N] of every draft, and the drafts' chances [B]; chosen: one tree of eight nodes"""
    if name != "chosen":
        q = random_laws(seed, allowed=allowed)
        return drafts(q, CHAIN if name == "chain" else BUSH, replacement=name != "without replacement")
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(generator, 8, V)
    while tree.depths().max() > DEPTH:
        tree = random_tree(generator, 8, V)
    tree.tokens[0, 0] = 0  # as the others have it
    return tree, [1.0]


def error(p: dict, rule, parts, probs=None) -> float:
    """The largest difference between the law of texts that begin with what the rule emits and the target's law.

    parts: (tree, chances [B]) that are drafted, all in all with chance 1; probs [B, N, V] stands for p at the nodes
    """

    def continued(text, start):
        return math.prod(float(p[text[:place]][text[place]]) for place in range(start, len(text)))

    begun = collections.Counter()
    for tree, weights in parts:
        for row, weight, emitted in outcomes(rule, tree, at_nodes(tree, p) if probs is None else probs):
            begun[emitted] += weights[row] * weight
    law = {text: sum(begun[text[:n]] * continued(text, n) for n in range(1, len(text) + 1)) for text in TEXTS}
    return max(abs(law[text] - continued(text, 0)) for text in TEXTS)


def expected_drafts(p: dict, rule, tree: Tree, weights) -> float:
    """Accepted drafts a round."""
    found = outcomes(rule, tree, at_nodes(tree, p))
    return sum(weights[row] * weight * (len(emitted) - 1) for row, weight, emitted in found)


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("drafting", DRAFTINGS)
@pytest.mark.parametrize("p_allowed, q_allowed", [(V, V), (V, V - 1), (V - 1, V)])
def test_lossless(rule, drafting, p_allowed, q_allowed):
    """q_allowed < V: a reduced draft vocabulary; p_allowed < V: a target that cuts tokens off."""
    for seed in range(3 if drafting != "chosen" else 8):
        p = random_laws(seed, allowed=p_allowed)
        assert error(p, rule, [drafted(drafting, seed + 10, q_allowed)]) < 1e-12


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("drafting", DRAFTINGS)
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_transformed_target(rule, drafting, sampling):
    """The law is that of the target's texts under temperature, top-k, top-p and a penalty on what stands before."""
    generator = torch.Generator().manual_seed(3)
    logits = {prefix: 2 * torch.randn(V, generator=generator, dtype=torch.float64) for prefix in PREFIXES}
    prompt, root, p = [1], 0, {}
    for prefix in PREFIXES:
        penalised = logits[prefix].tolist()
        for token in {*prompt, root, *prefix}:
            penalised[token] *= sampling.repetition_penalty ** (1 if penalised[token] < 0 else -1)
        p[prefix] = sampling.law(torch.tensor(penalised, dtype=torch.float64))
    tree, weights = drafted(drafting, 10)
    committed = torch.zeros(len(tree.tokens), V, dtype=torch.bool)
    committed[:, [*prompt, root]] = True
    probs = sampling.law(sampling.penalise(at_nodes(tree, logits), seen(tree, committed)))
    torch.testing.assert_close(probs, at_nodes(tree, p), rtol=0, atol=1e-14)
    assert error(p, rule, [(tree, weights)], probs) < 1e-12


@pytest.mark.parametrize("rule", LOSSLESS)
def test_chain_sampled_from_the_target_is_never_refused(rule):
    p, (tree, _) = random_laws(0), drafted("chain", 0)
    assert {len(text) for _, _, text in outcomes(rule, tree, at_nodes(tree, p))} == {DEPTH + 1}


@pytest.mark.parametrize("rule", LOSSLESS)
def test_wrong_drafting_is_found(rule):
    """Negative control: the enumeration is not blind."""
    p, q = random_laws(0), random_laws(10)
    assert error(p, rule, [drafts(q, BUSH, replacement=False, conditioned=False)]) > 1e-2
    tree, weights = drafts(q, [-1, 0])
    kept = [weight * (weight > 0.3) for weight in weights]  # its own score must not prune a draw
    dropped = [weight * (weight <= 0.3) for weight in weights]
    assert error(p, rule, [(tree, kept), (Tree(tree.tokens[:, :1], tree.parents[:, :1], None), dropped)]) > 1e-2


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_same_law_after_a_refusal_is_found(rule, drafting, monkeypatch):
    monkeypatch.setattr(rules, "refuse", lambda mass, tree, node: (mass / mass.sum(-1, keepdim=True), mass.sum(-1)))
    assert error(random_laws(0), rule, [drafted(drafting, 10)]) > 1e-2


def test_wrong_budgets_are_found(monkeypatch):
    p, right = random_laws(0), rules.chance
    not_clipped = lambda mass, *node: 1e9 * right(mass / 1e9, *node)
    forgotten = lambda mass, *node: right(mass / mass.sum(-1, keepdim=True), *node)  # p / q, without P of the parent
    for wrong in (not_clipped, forgotten):
        monkeypatch.setattr(rules, "chance", wrong)
        assert error(p, rules.block, [drafted("chain", 10)]) > 1e-2


def direct_block(p: dict, q: dict, drawn: tuple[int, ...]) -> list[float]:
    """Block verification as 2403.10444 states it (methods, 1.2) -> the law of the number of accepted drafts."""
    budgets, chances = [1.0], []
    for place, token in enumerate(drawn):
        rest = float((budgets[-1] * p[drawn[:place]] - q[drawn[:place]]).clamp(min=0).sum())
        bottom = rest + 1 - budgets[-1]
        chances.append(rest / bottom if bottom > 0 else 1.0)
        budgets.append(min(1.0, budgets[-1] * float(p[drawn[:place]][token] / q[drawn[:place]][token])))
    chances = [1.0, *chances[1:], budgets[-1]]
    return [chance * math.prod(1 - later for later in chances[a + 1 :]) for a, chance in enumerate(chances)]


@pytest.mark.parametrize("seed", range(5))
def test_block_on_a_chain_is_block_verification(seed):
    p, q = random_laws(seed), random_laws(seed + 10)
    tree, _ = drafted("chain", seed + 10)
    found = torch.zeros(len(tree.tokens), DEPTH + 1, dtype=torch.float64)
    for row, weight, emitted in outcomes(rules.block, tree, at_nodes(tree, p)):
        found[row, len(emitted) - 1] += weight
    direct = [direct_block(p, q, tuple(row)) for row in tree.tokens[:, 1:].tolist()]
    torch.testing.assert_close(found, torch.tensor(direct, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("drafting", DRAFTINGS)
def test_who_accepts_more(drafting):
    """Whole paths never less than token by token, and as much where nothing was sampled; the lossy rule more."""
    totals = torch.zeros(3, dtype=torch.float64)
    for seed in range(5):
        p, parts = random_laws(seed), drafted(drafting, seed + 10)
        token, block, typical = (expected_drafts(p, rule, *parts) for rule in (*LOSSLESS, rules.typical))
        assert block >= token - 1e-12 and (drafting != "chosen" or block == pytest.approx(token, abs=1e-12))
        assert error(p, rules.typical, [parts]) > 1e-3
        totals += torch.tensor([token, block, typical], dtype=torch.float64)
    assert totals[2] > totals[1] and (drafting == "chosen" or totals[1] > totals[0] + 0.1)
    assert {name for name, rule in rules.RULES.items() if rule not in LOSSLESS} == rules.LOSSY


def independent(p: torch.Tensor, q: torch.Tensor, depth: int, rule) -> float:
    """Accepted drafts a round of a chain whose laws are the same at every depth."""
    tree, weights = drafts(collections.defaultdict(lambda: q), list(range(-1, depth)))
    return expected_drafts(collections.defaultdict(lambda: p), rule, tree, weights)


@pytest.mark.parametrize("rule, figure", [(rules.sample, 10 / 9), (rules.block, 11 / 9)])
def test_toy_figures(rule, figure):
    """methods, section 1.2"""
    p = torch.tensor([1 / 3, 2 / 3, 0], dtype=torch.float64)
    assert independent(p, p[[1, 0, 2]], 2, rule) == pytest.approx(figure, abs=1e-12)


@pytest.mark.parametrize("alpha, depth, tau", [(0.5, 3, 1.875), (0.8, 3, 2.952), (0.5, 5, 1.969), (0.8, 5, 3.689)])
def test_expected_length(alpha, depth, tau):
    """Independent, equal acceptance at every depth; the figures are those of methods, section 2."""
    p = torch.tensor([1 - alpha / 2, alpha / 2, 0], dtype=torch.float64)
    found = 1 + independent(p, p[[1, 0, 2]], depth, rules.sample)
    assert found == pytest.approx((1 - alpha ** (depth + 1)) / (1 - alpha), abs=1e-12)
    assert found == pytest.approx(tau, abs=5e-4)


def random_trees(generator, num_rows: int, num_nodes: int, vocab_size: int) -> Tree:
    trees = [random_tree(generator, num_nodes, vocab_size) for _ in range(num_rows)]
    return Tree(torch.cat([tree.tokens for tree in trees]), torch.cat([tree.parents for tree in trees]), None)


def random_probs(generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(2).softmax(-1)


def longest(tree: Tree, row: int, kept: torch.Tensor) -> list[int]:
    """The longest path by hand, the first of equals; kept [N, V]: which tokens may come after each node"""
    walks = {0: [0]}
    for node, parent in enumerate(tree.parents[row].tolist()):
        if parent in walks and kept[parent, tree.tokens[row, node]]:
            walks[node] = [*walks[parent], node]
    return max(walks.values(), key=len)


def test_greedy_is_the_case_of_a_certain_target():
    """Rows of a batch, chosen trees and sampled chains: the same path as by the lossless rules with one-hot laws."""
    generator = torch.Generator().manual_seed(0)
    lengths = set()
    for sampled in (False, True):
        tree = random_trees(generator, 40, 7, V)
        if sampled:
            tree = chain(tree.tokens, random_probs(generator, 40, 7, V))
        choices = torch.randint(V, (40, 7), generator=generator)
        onehot = torch.nn.functional.one_hot(choices, V).double()
        found = rules.greedy(tree, choices)
        for rule in LOSSLESS:
            for ours, theirs in zip(found, rule(tree, onehot.clone(), rules.Draws(generator)), strict=True):
                assert torch.equal(ours, theirs)
        for row, (path, num_kept, next_token) in enumerate(zip(*(x.tolist() for x in found))):
            walked = longest(tree, row, onehot[row])
            assert path == walked + [0] * (7 - len(walked)) and num_kept == len(walked)
            assert next_token == choices[row, walked[-1]]
            lengths.add(num_kept)
    assert {1, 2, 3} <= lengths


def test_typical_keeps_the_longest_acceptable_path():
    generator = torch.Generator().manual_seed(0)
    tree, probs = random_trees(generator, 40, 7, 4), random_probs(generator, 40, 7, 4)
    path, num_kept, _ = rules.typical(tree, probs, rules.Draws(generator), epsilon=0.2, delta=0.5)
    bounds = (0.5 * (probs * probs.log()).sum(-1, keepdim=True).exp()).clamp(max=0.2)
    for row in range(40):
        best = longest(tree, row, probs[row] > bounds[row])
        assert path[row].tolist() == best + [0] * (7 - len(best)) and num_kept[row] == len(best)
    assert bounds.min() < 0.2 == bounds.max() and len(set(num_kept.tolist())) > 2


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("rule", EVERY)
def test_rows_do_not_see_one_another(rule, sampled):
    """A batch of trees of different shapes: each row as if it were alone; chosen ones as if drawn from certain laws."""
    generator = torch.Generator().manual_seed(1)
    tree, probs = random_trees(generator, 20, 8, V), random_probs(generator, 20, 8, V)
    laws = random_probs(generator, 20, 8, V) if sampled else torch.nn.functional.one_hot(tree.tokens, V).double()
    drawn = Tree(tree.tokens, tree.parents, laws)
    together = [(row, emitted, round(weight, 12)) for row, weight, emitted in outcomes(rule, drawn, probs)]
    alone = []
    for row in range(20):
        every = outcomes(rule, rows_of(drawn if sampled else tree, [row]), probs[[row]])
        alone += [(row, emitted, round(weight, 12)) for _, weight, emitted in every]
    assert sorted(together) == sorted(alone) and len({len(emitted) for _, emitted, _ in alone}) > 2


@pytest.mark.parametrize("rule", LOSSLESS)
def test_a_residual_of_rounding_is_not_drawn_from(rule):
    p = torch.tensor([0.5, 0.5, 0.0]).repeat(1, 2, 1)  # float32
    q = torch.tensor([0.5, 0.5 - 2**-25, 2**-25]).repeat(1, 2, 1)
    found = outcomes(rule, chain(torch.tensor([[0, 2]]), q), p)
    assert {emitted: weight for _, weight, emitted in found} == {(0,): 0.5, (1,): 0.5}


@pytest.mark.parametrize("sampled", [False, True])
def test_nothing_waits_for_the_device(sampled):
    """Tensors of the meta device hold no values: to read one is an error."""
    probs = torch.empty(2, 4, V, device="meta")
    tree = chain(torch.empty(2, 4, dtype=torch.long, device="meta"), probs if sampled else None)
    for rule in EVERY:
        assert [tuple(x.shape) for x in rule(tree, probs.clone(), rules.Draws(None))] == [(2, 4), (2,), (2,)]


def test_draws():
    draws = rules.Draws(torch.Generator().manual_seed(0))
    law = torch.tensor([0.0, 0.7, 0.0, 0.3, 0.0])
    where = torch.ones(20000, dtype=torch.bool)
    drawn = draws.token(3 * law.expand(20000, 5), where)  # its sum does not matter
    torch.testing.assert_close(drawn.bincount(minlength=5) / 20000, law, rtol=0, atol=0.02)
    assert not (drawn.bincount(minlength=5)[law == 0]).any()
    where = torch.arange(20000) % 2 == 0
    accepted = draws.accept(torch.full((20000,), 0.3), where)
    assert not accepted[~where].any() and accepted[where].float().mean() == pytest.approx(0.3, abs=0.02)
    assert draws.accept(torch.ones(20000), torch.ones_like(where)).all()
    assert not draws.accept(torch.zeros(20000), torch.ones_like(where)).any()
