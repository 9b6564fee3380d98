"""Losslessness by exact enumeration: three tokens, every draft, every outcome of every draw."""

import itertools

import pytest
import torch
from conftest import random_tree

from specdec import verify
from specdec.tree import Tree, chain

V, DEPTH = 3, 3
TEXTS = list(itertools.product(range(V), repeat=DEPTH + 1))


class Enumerate:
    """In the place of verify.Draws: follows `script`, then takes the first possible outcome and notes the others."""

    def __init__(self, script: list[int]):
        self.script, self.taken, self.others, self.weight = script, [], [], 1.0

    def choose(self, weights: list[float]) -> int:
        place = len(self.taken)
        possible = [index for index, weight in enumerate(weights) if weight > 0]
        if place < len(self.script):
            possible = [self.script[place]]
        self.others += [[*self.taken, index] for index in possible[1:]]
        self.taken.append(possible[0])
        self.weight *= weights[possible[0]]
        return possible[0]

    def accept(self, chance) -> bool:
        chance = min(1.0, float(chance))
        return self.choose([1 - chance, chance]) == 1

    def token(self, law):
        return torch.tensor(self.choose(law.tolist()))


def explore(run):
    """Yields (weight, run(draws)) for every outcome of the draws that `run` makes."""
    scripts = [[]]
    while scripts:
        draws = Enumerate(scripts.pop())
        result = run(draws)
        scripts += draws.others
        yield draws.weight, result


def random_laws(seed: int, *, allowed: int = V) -> dict:
    """A law of the next token for every prefix, with nothing on tokens from `allowed` on."""
    generator = torch.Generator().manual_seed(seed)
    laws = {}
    for length in range(DEPTH + 1):
        for prefix in itertools.product(range(V), repeat=length):
            law = torch.rand(V, generator=generator, dtype=torch.float64) ** 2
            law[allowed:] = 0
            laws[prefix] = law / law.sum()
    return laws


def node_laws(tree: Tree, p: dict) -> torch.Tensor:
    """[1, N, V]: the target's law after each node; the root's token is in no prefix."""
    prefixes = [()]
    for node in range(1, tree.tokens.shape[1]):
        prefixes.append((*prefixes[tree.parents[0, node]], int(tree.tokens[0, node])))
    return torch.stack([p[prefix] for prefix in prefixes])[None]


def verified(tree: Tree, p: dict, draws) -> tuple[int, ...]:
    path, num_kept, next_token = verify.sample(tree, node_laws(tree, p), draws)
    nodes = path[0, : num_kept[0]]
    assert nodes[0] == 0 and torch.equal(tree.parents[0, nodes[1:]], nodes[:-1])
    return (*tree.tokens[0, nodes[1:]].tolist(), int(next_token[0]))


def error(p: dict, run) -> float:
    """The largest difference between the law of texts that begin with what `run(draws)` emits and the target's law."""

    def continued(text, start):
        weight = 1.0
        for place in range(start, len(text)):
            weight *= float(p[text[:place]][text[place]])
        return weight

    law = dict.fromkeys(TEXTS, 0.0)
    for weight, emitted in explore(run):
        for text in TEXTS:
            if text[: len(emitted)] == emitted:
                law[text] += weight * continued(text, len(emitted))
    return max(abs(law[text] - continued(text, 0)) for text in TEXTS)


def sampled_chain(q: dict, draws, keep=lambda chance: True) -> Tree:
    """Every draft is drawn from its law; drafting ends at the first that is not to be kept."""
    drafts, laws = (), [torch.zeros(V, dtype=torch.float64)]
    for _ in range(DEPTH):
        law = q[drafts]
        token = int(draws.token(law))
        if not keep(float(law[token])):
            break
        drafts += (token,)
        laws.append(law)
    return chain(torch.tensor([[0, *drafts]]), torch.stack(laws)[None])


def bush(q: dict, draws) -> Tree:
    """Drafts drawn with replacement: two for the root, two for its first child."""
    first = [draws.token(q[()]) for _ in range(2)]
    second = [draws.token(q[(int(first[0]),)]) for _ in range(2)]
    laws = torch.stack([torch.zeros(V, dtype=torch.float64), q[()], q[()], *[q[(int(first[0]),)]] * 2])
    return Tree(torch.tensor([[0, *first, *second]]), torch.tensor([[-1, 0, 0, 1, 1]]), laws[None])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("p_allowed, q_allowed", [(V, V), (V, V - 1), (V - 1, V)])
def test_sampled_chain(seed, p_allowed, q_allowed):
    p, q = random_laws(seed, allowed=p_allowed), random_laws(seed + 10, allowed=q_allowed)
    assert error(p, lambda draws: verified(sampled_chain(q, draws), p, draws)) < 1e-12


def test_chain_sampled_from_the_target_is_never_refused():
    p = random_laws(0)
    assert {len(text) for _, text in explore(lambda draws: verified(sampled_chain(p, draws), p, draws))} == {DEPTH + 1}


@pytest.mark.parametrize("seed", range(6))
def test_chosen_tree(seed):
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(generator, 8, V)
    while tree.depths().max() > DEPTH:
        tree = random_tree(generator, 8, V)
    p = random_laws(seed)
    assert error(p, lambda draws: verified(tree, p, draws)) < 1e-12


def test_tree_sampled_with_replacement():
    p, q = random_laws(0), random_laws(10, allowed=V - 1)
    assert error(p, lambda draws: verified(bush(q, draws), p, draws)) < 1e-12


def test_wrong_rules_are_found(monkeypatch):
    """Negative control: the enumeration is not blind."""
    p, q = random_laws(0), random_laws(10)
    tree = Tree(torch.tensor([[0, 0, 1]]), torch.tensor([[-1, 0, 0]]), None)
    by_score = lambda draws: sampled_chain(q, draws, keep=lambda chance: chance > 0.3)
    assert error(p, lambda draws: verified(by_score(draws), p, draws)) > 1e-2  # its own score must not prune a draw
    monkeypatch.setattr(verify, "refuse", lambda residual, token, law: residual)  # the same p after a refusal
    assert error(p, lambda draws: verified(tree, p, draws)) > 1e-2
    assert error(p, lambda draws: verified(sampled_chain(q, draws), p, draws)) > 1e-2


@pytest.mark.parametrize("alpha, depth, tau", [(0.5, 3, 1.875), (0.8, 3, 2.952), (0.5, 5, 1.969), (0.8, 5, 3.689)])
def test_expected_length(alpha, depth, tau):
    """Independent, equal acceptance at every depth; the figures are those of methods, section 2."""
    low = (1 - alpha) / 2
    p = torch.tensor([0.5 + low, 0.5 - low, 0.0], dtype=torch.float64)
    q = p[[1, 0, 2]]
    alpha_here = float(torch.minimum(p, q).sum())

    def run(draws):
        drafts = torch.stack([torch.tensor(0), *[draws.token(q) for _ in range(depth)]])[None]
        tree = chain(drafts, q.expand(1, depth + 1, V))
        return int(verify.sample(tree, p.expand(1, depth + 1, V), draws)[1])

    found = sum(weight * num_kept for weight, num_kept in explore(run))
    assert found == pytest.approx((1 - alpha_here ** (depth + 1)) / (1 - alpha_here), abs=1e-12)
    assert alpha_here == pytest.approx(alpha) and found == pytest.approx(tau, abs=5e-4)


def test_greedy_is_the_case_of_a_certain_target():
    """Rows of a batch, chosen trees and sampled chains: the same path as by `sample` with one-hot laws."""
    generator = torch.Generator().manual_seed(0)
    num_nodes, lengths = 7, set()
    for sampled in (False, True):
        trees = [random_tree(generator, num_nodes, V) for _ in range(40)]
        tokens, parents = (torch.cat([getattr(tree, name) for tree in trees]) for name in ("tokens", "parents"))
        tree = Tree(tokens, parents, None)
        if sampled:
            tree = chain(tokens, torch.rand(40, num_nodes, V, generator=generator, dtype=torch.float64).softmax(-1))
        choices = torch.randint(V, (40, num_nodes), generator=generator)
        onehot = torch.nn.functional.one_hot(choices, V).double()
        path, num_kept, next_token = verify.greedy(tree, choices)
        for ours, theirs in zip((path, num_kept, next_token), verify.sample(tree, onehot, verify.Draws(generator))):
            assert torch.equal(ours, theirs)
        for row in range(40):  # and the walk as one would do it by hand
            node, walked = 0, [0]
            while node is not None:
                last = node
                children = [child for child in range(1, num_nodes) if tree.parents[row, child] == node]
                node = next((child for child in children if tokens[row, child] == choices[row, last]), None)
                walked += [node] if node is not None else []
            assert path[row, : num_kept[row]].tolist() == walked and num_kept[row] == len(walked)
            assert not path[row, num_kept[row] :].any() and next_token[row] == choices[row, walked[-1]]
        lengths |= set(num_kept.tolist())
    assert {1, 2, 3} <= lengths


def test_probabilities():
    logits = torch.tensor([[1.0, 2.0, 4.0]], dtype=torch.float64)
    for temperature in (0.5, 1.0, 2.0):
        naive = (logits / temperature).exp()
        torch.testing.assert_close(verify.probabilities(logits, temperature), naive / naive.sum())
    assert verify.probabilities(logits.bfloat16(), 1.0).dtype == torch.float32
