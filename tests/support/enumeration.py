"""Checks of losslessness by exact enumeration over three tokens: every draft, and every outcome of every draw.

The first half checks verification rules alone (docs/methods.md, section 1). The second half checks whole decoders:
target, drafter and rule together.
"""

import collections
import functools
import itertools
import math

import torch
from transformers import (
    LogitsProcessorList,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.core import rules
from specdec.core import sampling as specdec_sampling
from specdec.core.sampling import Sampling
from specdec.core.tree import Tree
from specdec.decoding.decoder import Decoder
from specdec.proposers import auto, growth
from tests.support.decoding import find_depths, random_tree
from tests.support.targets import make_target

V, DEPTH = 3, 3
TEXTS = list(itertools.product(range(V), repeat=DEPTH + 1))
PREFIXES = [prefix for length in range(DEPTH + 1) for prefix in itertools.product(range(V), repeat=length)]
CHAIN_PARENTS = [-1, 0, 1, 2]
BUSH_PARENTS = [-1, 0, 0, 1, 1, 3]  # neither its order of nodes nor the reverse is a post-order
LOSSLESS = [rules.accept_tokens, rules.accept_blocks]


class Enumerate:
    """Replaces rules.Draws. Each row follows its script, then takes the first possible outcome and records the others.

    scripts: for each row, the outcomes of its first draws. others: pairs (row, script) that are still to be run.
    weights: for each row, the probability of the outcomes that it took.
    """

    def __init__(self, scripts: list[list[int]]):
        self.scripts, self.branches = scripts, []
        self.choices, self.weights = [[] for _ in scripts], [1.0] * len(scripts)

    def token(self, distribution, row_mask):
        picked = torch.zeros(len(self.scripts), dtype=torch.long)
        for row in row_mask.nonzero()[:, 0].tolist():
            weights, row_choices = distribution[row].tolist(), self.choices[row]
            possible = [index for index, weight in enumerate(weights) if weight > 0]
            if len(row_choices) < len(self.scripts[row]):
                possible = [self.scripts[row][len(row_choices)]]
            self.branches += [(row, [*row_choices, index]) for index in possible[1:]]
            self.weights[row] *= weights[possible[0]]
            picked[row] = possible[0]
            row_choices.append(possible[0])
        return picked

    def accept(self, probability, row_mask):
        probability = probability.clamp(max=1)
        return self.token(torch.stack([1 - probability, probability], dim=1), row_mask) == 1


def rows_of(tree: Tree, rows: list[int]) -> Tree:
    return Tree(tree.tokens[rows], tree.parents[rows], None if tree.probs is None else tree.probs[rows])


def at_nodes(tree: Tree, table: dict) -> torch.Tensor:
    """[B, N, V]: the entry of `table` for each node's prefix, which is the tokens from below the root to the node."""
    distributions = []
    for tokens, parents in zip(tree.tokens[:, 1:].tolist(), tree.parents[:, 1:].tolist()):
        prefixes = [()]
        for token, parent in zip(tokens, parents):
            prefixes.append((*prefixes[parent], token))
        distributions.append(torch.stack([table[prefix] for prefix in prefixes]))
    return torch.stack(distributions)


def rule_outcomes(rule, tree: Tree, probs: torch.Tensor):
    """Yields (row, probability of the outcome, emitted tokens) for every outcome of the rule's draws."""
    pending = [(row, []) for row in range(len(tree.tokens))]
    while pending:
        rows = [row for row, _ in pending]
        draws = Enumerate([script for _, script in pending])
        rows_tree = rows_of(tree, rows)
        path, num_kept, next_token = rule(rows_tree, probs[rows], draws)
        for place, row in enumerate(rows):
            nodes = path[place, : num_kept[place]]
            assert nodes[0] == 0 and torch.equal(rows_tree.parents[place, nodes[1:]], nodes[:-1])
            assert not path[place, num_kept[place] :].any()
            yield row, draws.weights[place], (*rows_tree.tokens[place, nodes[1:]].tolist(), int(next_token[place]))
        pending = [(rows[place], script) for place, script in draws.branches]


def random_laws(seed: int, *, allowed: int = V) -> dict:
    """A random distribution of the next token for every prefix. Tokens from `allowed` on have probability 0."""
    generator = torch.Generator().manual_seed(seed)
    distributions = {}
    for prefix in PREFIXES:
        distribution = torch.rand(V, generator=generator, dtype=torch.float64) ** 2
        distribution[allowed:] = 0
        distributions[prefix] = distribution / distribution.sum()
    return distributions


def drafts(q: dict, parents: list[int], *, replacement: bool = True, conditioned: bool = True):
    """-> a tree [B, N] of every draft, and the drafts' probabilities [B]

    conditioned=False passes q itself for children that were drawn without replacement. This is wrong on purpose.
    """
    tokens, distributions, weights = [], [], []
    for drafted_tokens in itertools.product(range(V), repeat=len(parents) - 1):
        prefixes, node_laws, weight = [()], [torch.zeros(V, dtype=torch.float64)], 1.0
        for node, token in enumerate(drafted_tokens, start=1):
            distribution = q[prefixes[parents[node]]].clone()
            node_laws.append(distribution if conditioned else distribution.clone())
            if not replacement:
                distribution[
                    [drafted_tokens[other - 1] for other in range(1, node) if parents[other] == parents[node]]
                ] = 0
                distribution /= distribution.sum()
            weight *= float(distribution[token])
            prefixes.append((*prefixes[parents[node]], token))
        if weight > 0:
            tokens.append([0, *drafted_tokens])
            distributions.append(torch.stack(node_laws))
            weights.append(weight)
    return Tree(torch.tensor(tokens), torch.tensor(parents).repeat(len(tokens), 1), torch.stack(distributions)), weights


@functools.cache
def drafted(name: str, seed: int, allowed: int = V):
    """-> a tree [B, N] of every draft, the drafts' probabilities [B]; name="chosen": one random tree of eight nodes"""
    if name != "chosen":
        q = random_laws(seed, allowed=allowed)
        return drafts(q, CHAIN_PARENTS if name == "chain" else BUSH_PARENTS, replacement=name != "without replacement")
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(generator, 8, V)
    while find_depths(tree).max() > DEPTH:
        tree = random_tree(generator, 8, V)
    tree.tokens[0, 0] = 0  # as in the other trees
    return tree, [1.0]


def rule_error(p: dict, rule, drafts, probs=None) -> float:
    """The largest difference, over TEXTS, between the distribution of decoded texts and the target's distribution.

    A decoded text begins with the tokens that the rule emits and continues by the target's distribution.
    p: the target's distribution for every prefix. parts: pairs (tree, probabilities [B] of its drafts), which sum to 1
    over all parts. probs [B, N, V]: given to the rule in place of p at the nodes.
    """

    def continuation(text, start):
        return math.prod(float(p[text[:place]][text[place]]) for place in range(start, len(text)))

    emitted_probability = collections.Counter()
    for tree, weights in drafts:
        for row, weight, emitted in rule_outcomes(rule, tree, at_nodes(tree, p) if probs is None else probs):
            emitted_probability[emitted] += weights[row] * weight
    errors = []
    for text in TEXTS:
        lengths = range(1, len(text) + 1)
        total = sum(emitted_probability[text[:num]] * continuation(text, num) for num in lengths)
        errors.append(abs(total - continuation(text, 0)))
    return max(errors)


# Whole decoders

PROMPT = (1, 1)
THREE_TOKENS = list(itertools.product(range(V), repeat=3))
SAMPLINGS = {
    "warm": Sampling(3.0),
    "top_k": Sampling(3.0, top_k=2),
    "top_p": Sampling(3.0, top_p=0.8),
    "penalty": Sampling(3.0, repetition_penalty=1.5),
    "all": Sampling(4.0, top_k=2, top_p=0.9, repetition_penalty=0.7),
}


@functools.cache
def sampled_target():
    return make_target(V, num_layers=2)


@functools.cache
def next_distribution(sampling: Sampling, text: tuple[int, ...]) -> torch.Tensor:
    """The distribution [V] of the token after `text`, computed by transformers."""
    steps = [
        RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty),
        TemperatureLogitsWarper(sampling.temperature),
    ]
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p else []
    tokens = torch.tensor([text])
    with torch.no_grad():
        logits = sampled_target().model(tokens).logits[:, -1]
    return LogitsProcessorList(steps)(tokens, logits).softmax(-1)[0]


def probability(sampling: Sampling, before: tuple[int, ...], text: tuple[int, ...]) -> float:
    """The probability that the target continues `before` with `text`."""
    return math.prod(float(next_distribution(sampling, before + text[:n])[text[n]]) for n in range(len(text)))


class Switch:
    """Replaces rules.Draws: while `on` is false, random draws that are the same for every row; then an enumeration."""

    def __init__(self, scripts: list[list[int]], seed: int):
        self.enumeration, self.on = Enumerate(scripts), False
        self.generator = torch.Generator().manual_seed(seed)

    def uniform(self) -> torch.Tensor:
        return torch.rand(1, 1, generator=self.generator, dtype=torch.float64)

    def token(self, distribution, row_mask):
        if self.on:
            return self.enumeration.token(distribution, row_mask)
        return specdec_sampling.pick_tokens(distribution, self.uniform().expand(len(distribution), 1))

    def accept(self, probability, row_mask):
        return (
            self.enumeration.accept(probability, row_mask) if self.on else row_mask & (self.uniform()[0] < probability)
        )


def decoder_outcomes(decoder: Decoder, number: int, *, seed: int, alone: bool, monkeypatch):
    """Yields (text before round `number`, probability of the outcome, emitted tokens) for every outcome of that round.

    Round 0 is the pass over the prompt. The rounds before `number` draw at random by `seed`.
    alone: one row at a time, for a decoder whose rows depend on each other
    """
    pending = [[]]
    while pending:
        scripts, pending = (pending[:1], pending[1:]) if alone else (pending, [])
        draws = Switch(scripts, seed)
        everywhere = torch.ones(len(scripts), dtype=torch.bool)
        with monkeypatch.context() as patch:
            patch.setattr(rules, "Draws", lambda generator, draws=draws: draws)
            for module in (growth, auto):
                patch.setattr(
                    module,
                    "pick_tokens",
                    lambda distribution, uniform, draws=draws, row_mask=everywhere: draws.token(distribution, row_mask),
                )
            stream, before = decoder.stream([list(PROMPT)] * len(scripts), 50), PROMPT
            for place in range(number + 1):
                draws.on = place == number
                emitted = next(stream).tokens
                if place < number:
                    before += tuple(emitted[0])
            stream.close()
        for tokens, weight in zip(emitted, draws.enumeration.weights):
            yield before, weight, tuple(tokens)
        pending += [script for _, script in draws.enumeration.branches]


def decoder_error(decoder: Decoder, number: int, *, seed: int = 0, alone: bool = False, monkeypatch) -> float:
    """The largest difference between the distribution of texts that begin with the tokens of this round and the
    target's distribution.
    """
    emitted_probability = collections.Counter()
    outcomes = list(decoder_outcomes(decoder, number, seed=seed, alone=alone, monkeypatch=monkeypatch))
    before = outcomes[0][0]
    for _, weight, emitted in outcomes:
        emitted_probability[emitted] += weight
    sampling = decoder.sampling
    errors = []
    for text in THREE_TOKENS:
        total = 0.0
        for num in range(1, 4):
            total += emitted_probability[text[:num]] * probability(sampling, before + text[:num], text[num:])
        errors.append(abs(total - probability(sampling, before, text)))
    return max(errors)


def without_temperature(tree: Tree) -> Tree:
    distributions = tree.probs ** SAMPLINGS["warm"].temperature
    return Tree(
        tree.tokens,
        tree.parents,
        distributions / distributions.sum(-1, keepdim=True).clamp(min=1e-9),
        linear=tree.linear,
    )


def answer_statistic(decoder: Decoder, num: int) -> tuple[float, int]:
    """-> chi-square of the first four tokens of `num` answers against the exact distribution, its degrees of freedom"""
    answers = decoder.generate([list(PROMPT)] * num, 4, generator=torch.Generator().manual_seed(0)).tokens
    counts = collections.Counter(map(tuple, answers))
    texts = list(itertools.product(range(V), repeat=4))
    expected = [num * probability(decoder.sampling, PROMPT, text) for text in texts]
    pairs = [(counts[text], e) for text, e in zip(texts, expected) if e >= 5]
    rest = [(counts[text], e) for text, e in zip(texts, expected) if e < 5]
    pairs.append((sum(count for count, _ in rest), sum(e for _, e in rest)))
    assert sum(count for count, _ in pairs) == num
    return sum((count - e) ** 2 / max(e, 1e-9) for count, e in pairs if count or e), len(pairs) - 1
