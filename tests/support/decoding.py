"""Decoders, texts and scripted proposers."""

import torch

from specdec.core import compile
from specdec.core.sampling import Sampling
from specdec.core.tree import Tree, TreeShape, make_chain
from specdec.decoding import fastest
from specdec.decoding.decoder import Decoder
from specdec.proposers.base import Proposer

LENGTHS = (5, 12, 2, 9, 1)  # of prompts; more rows than specdec.target.attention leaves to sdpa


NUM_NEW = 24


def chain_of(depth: int) -> TreeShape:
    return TreeShape(depth=depth, width=1, nodes=depth)


def random_tokens(seed: int, num: int, vocab_size: int) -> list[int]:
    return torch.randint(vocab_size, (num,), generator=torch.Generator().manual_seed(seed)).tolist()


def random_tree(generator: torch.Generator, num_nodes: int, vocab_size: int) -> Tree:
    """A tree of one row with random parents; siblings have distinct tokens."""

    def pick(num: int) -> int:
        return int(torch.randint(num, (), generator=generator))

    tokens, parents = [pick(vocab_size)], [-1]
    while len(tokens) < num_nodes:
        parent, token = pick(len(tokens)), pick(vocab_size)
        if (parent, token) not in list(zip(parents, tokens)):
            parents.append(parent)
            tokens.append(token)
    return Tree(torch.tensor([tokens]), torch.tensor([parents]), None)


def random_trees(generator: torch.Generator, num_rows: int, num_nodes: int, vocab_size: int) -> Tree:
    trees = [random_tree(generator, num_nodes, vocab_size) for _ in range(num_rows)]
    return Tree(torch.cat([tree.tokens for tree in trees]), torch.cat([tree.parents for tree in trees]), None)


def find_depths(tree: Tree) -> torch.Tensor:
    """The depths [B, N] of a tree's nodes; the root has depth 0."""
    return tree.ancestors().sum(-1) - 1


def greedy(target, proposer, stop=frozenset()) -> Decoder:
    return Decoder(target, proposer, sampling=Sampling(0.0), stop=set(stop))


def pretend_graphs(monkeypatch, mode: fastest.RunMode = (False, True)) -> list:
    """A GPU on which this mode is fastest: -> the functions that are captured from now on, which run as they are."""
    captured: list = []
    monkeypatch.setattr(fastest, "_can_measure", lambda device: True)
    monkeypatch.setattr(fastest, "_modes_by_file", {})
    monkeypatch.setattr(fastest, "_read_mode", lambda file: mode)
    monkeypatch.setattr(compile, "capture_graph", lambda function, *_: captured.append(function) or function)
    return captured


def prompts_of(target) -> list[list[int]]:
    return [random_tokens(seed, num, target.vocab_size) for seed, num in enumerate(LENGTHS)]


def check_counters(generation) -> None:
    for tokens, accepted in zip(generation.tokens, generation.accepted):
        assert len(tokens) == 1 + sum(count + 1 for count in accepted)


class Scripted(Proposer):
    """A proposer that is given the text of every row. drafts(text, place of the newest token) -> Tree of one row

    ends: how long prompt and answer of each row are, if the text goes on; what is committed behind them is not looked
        at
    """

    target_layers = (3, 8)

    def __init__(self, texts: list[list[int]], depth: int, drafts, *, ends: list[int] | None = None):
        self.texts, self.depth, self.drafts = texts, depth, drafts
        self.ends = ends or [sum(map(len, texts))] * len(texts)

    def begin(self, tokens, num):
        self.places = [0] * len(num)
        self.features = [[] for _ in num]

    def commit(self, tokens, features, num, counts):
        for row, count in enumerate(num.tolist()):
            first, self.places[row] = self.places[row] + 1, self.places[row] + count
            text = self.texts[row][first : first + count] if first < self.ends[row] else []
            assert tokens[row, : len(text)].tolist() == text  # the committed tokens are those of the text, in order
            self.features[row] += features[row, : len(text)]

    def propose(self, sampling, generator):
        trees = [self.drafts(text, min(place, len(text) - 1)) for text, place in zip(self.texts, self.places)]
        return Tree(torch.cat([tree.tokens for tree in trees]), torch.cat([tree.parents for tree in trees]), None)


def oracle(depth: int):
    """Drafts chains of the next tokens of the text."""

    def drafts(text, position):
        known = [*text[position : position + 1 + depth], *[0] * (1 + depth)][: 1 + depth]
        return make_chain(torch.tensor([known]), None)

    return drafts
