"""Trees of block drafters: the best paths of all, as a best-first search finds them, and lattices of few candidates."""

import heapq

import pytest
import torch

from specdec.core.sampling import RowSampling, Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder
from specdec.measuring.measure import seeded_generator
from specdec.proposers import growth
from specdec.proposers.heads import HeadProposer
from tests.support.decoding import greedy, random_tokens
from tests.support.drafters import make_drafter
from tests.support.texts import repeating_texts

RNN = {"dependence": {"kind": "markov", "rank": 8, "form": "rnn"}}
PAIR = {"dependence": {"kind": "selector", "rank": 8, "top": 2}}
SIX = {"dependence": {"kind": "selector", "rank": 8, "top": 6}, "convolution": 2}
BLOCKS = [("dflash", {}), ("dspark", {}), ("dspark", RNN), ("dflash2", SIX), ("dflash2", PAIR), ("domino", {})]
WIDE, NARROW = TreeShape(depth=4, width=40, nodes=24), TreeShape(depth=3, width=3, nodes=20)


def opened(target, head: str, arguments: dict, shape: TreeShape, *, reduced=False) -> HeadProposer:
    """A proposer that has read a text."""
    proposer = HeadProposer(make_drafter(target, head, reduced, arguments), shape)
    torch.manual_seed(2)
    tokens = torch.tensor([random_tokens(5, 9, target.vocab_size)])
    features = torch.randn(1, 8, target.width * len(proposer.target_layers), dtype=torch.float64)
    proposer.begin(tokens[:, :8], torch.tensor([8]))
    proposer.commit(tokens[:, 1:], features, torch.tensor([8]), [8])
    return proposer


@torch.no_grad()
def search(proposer: HeadProposer) -> dict[tuple[int, ...], float]:
    """Best-first with a heap, one path at a time -> log-probabilities of the best paths of probability above 0"""
    shape, drafter = proposer.shape, proposer.drafter
    _, first = proposer.absorb()
    queue, probabilities = [], {}

    def push(score, path, state, logits):
        best = logits[0, 0].log_softmax(-1).topk(min(shape.width, drafter.vocab_size))
        for value, token in zip(best.values.tolist(), drafter.to_target(best.indices).tolist()):
            heapq.heappush(queue, (-(score + value), (*path, token), state))

    push(0.0, (), first.state, first.logits)
    while queue and len(probabilities) < shape.nodes:
        score, path, state = heapq.heappop(queue)
        if score == float("inf"):
            break
        probabilities[path] = -score
        if len(path) < shape.depth:
            seen = torch.ones(1, 1, len(path), dtype=torch.bool)
            state, logits, _ = proposer.step(len(path) + 1, len(path) - 1, state, torch.tensor([[path[-1]]]), seen)
            push(-score, path, state, logits)
    return probabilities


def paths_of(tree, row: int = 0) -> list[tuple[int, ...]]:
    paths = [()]
    for token, parent in zip(tree.tokens[row, 1:].tolist(), tree.parents[row, 1:].tolist()):
        paths.append((*paths[parent], token))
    return paths[1:]


@pytest.mark.parametrize("shape", [WIDE, NARROW, TreeShape(depth=2, width=4, nodes=20)], ids=str)
@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize("head, arguments", BLOCKS, ids=str)
def test_a_tree_has_the_best_paths_of_all(small_target, head, arguments, reduced, shape):
    proposer = opened(small_target, head, arguments, shape, reduced=reduced)
    best = search(proposer)
    paths = paths_of(proposer.propose(Sampling(), None))
    assert len(set(paths)) == len(paths) == shape.nodes and best.keys() <= set(paths)
    candidates = 2 if arguments is PAIR else proposer.drafter.vocab_size
    all_paths = sum(min(candidates, shape.width) ** depth for depth in range(1, shape.depth + 1))
    assert len(best) == min(shape.nodes, all_paths)
    assert (len(best) < shape.nodes) == (arguments is PAIR and shape.depth < 4)  # then useless nodes fill it up


@pytest.mark.parametrize("children", ["distinct", "chosen"])
@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("head, arguments", BLOCKS, ids=str)
def test_greedy_answers_beside_sampled_ones_are_the_target_s(small_target, head, arguments, rule, children):
    """Also those of top_k=1, and all in a batch of their own; a lattice of two has fewer candidates than siblings."""
    prompts = repeating_texts(2, 12)[:3]
    plain = greedy(small_target, None).generate(prompts, 30).tokens
    proposer = HeadProposer(make_drafter(small_target, head, False, arguments), NARROW, children=children)
    decoder = Decoder(small_target, proposer, sampling=Sampling(), stop=set(), rule=rule)
    assert decoder.generate(prompts, 30).tokens == plain
    samplings = [Sampling(), Sampling(0.9), Sampling(0.9, top_k=1)]
    batch = decoder.batch(generator=seeded_generator(small_target, 0))
    batch.admit([Request(prompt, 30, sampling=each) for prompt, each in zip(prompts, samplings)])
    rows = list(batch.requests)
    while batch.running:
        batch.run_round()
    assert [rows[number].tokens == plain[number] for number in range(3)] == [True, False, True]


@pytest.mark.parametrize("head, arguments", [*BLOCKS, ("eagle", {})], ids=str)
def test_a_greedy_row_of_a_sampled_tree_has_the_likeliest_siblings(small_target, head, arguments):
    proposer = opened(small_target, head, arguments, NARROW)
    with torch.no_grad():
        _, first = proposer.absorb()
    sampling = RowSampling((Sampling(), Sampling(1.0)))
    proposer.select([0, 0], [0, 0])
    tree = proposer.propose(sampling, seeded_generator(small_target, 0))
    firsts = []
    for row in range(2):
        firsts.append([path[0] for path in paths_of(tree, row) if len(path) == 1])
    likeliest = proposer.drafter.to_target(first.logits[0, 0].topk(3).indices).tolist()
    count = 2 if arguments is PAIR else 3
    assert firsts[0][:count] == likeliest[:count] and len(firsts[1]) == 3
    assert torch.equal(tree.probs[0, 1:].amax(-1), torch.ones(len(tree.tokens[0]) - 1, dtype=tree.probs.dtype))


def test_a_distribution_whose_rest_is_too_small_to_be_divided_stays_a_distribution():
    """At a low temperature what is left may be a number that float32 holds with a few bits only."""
    logits = torch.tensor([[3.0, 2.0, -9.0]])
    distribution = Sampling(0.01).distribution(logits)
    assert 0 < distribution[0, 1] < 1e-40
    draft = torch.tensor([0])
    rest = growth._without(distribution, draft, logits.scatter(1, draft[:, None], -torch.inf))
    assert torch.equal(rest, torch.tensor([[0.0, 1.0, 0.0]]))
