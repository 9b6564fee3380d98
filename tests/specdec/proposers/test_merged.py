"""Trees of several proposers as one tree: no path is lost, members get their own inputs, and the target's law."""

import dataclasses
import itertools
import math

import pytest
import torch

from specdec.core.sampling import Sampling
from specdec.core.tree import Tree, TreeShape, plant
from specdec.decoding.decoder import Decoder
from specdec.proposers.base import Proposer
from specdec.proposers.heads import HeadProposer
from specdec.proposers.merged import Merged, beside, union
from specdec.proposers.text import TextProposer
from tests.enumeration import (
    LOSSLESS,
    SAMPLINGS,
    decoder_error,
    drafted,
    random_laws,
    rows_of,
    rule_error,
    sampled_target,
)
from tests.support import HEADS, chain_of, greedy, make_drafter, prompts_of, random_tokens, random_tree

pytestmark = pytest.mark.slow

NUM_NEW = 16
TREE = TreeShape(depth=2, width=2, nodes=4)
SHAPES = [chain_of(3), TreeShape(depth=3, width=2, nodes=5)]


class Copying(TextProposer):
    """Drafts the tokens that followed the previous occurrence of the newest token."""

    def __init__(self, num: int):
        self.depth = num

    def extend(self, row, new):
        pass

    def draft(self, row):
        text = self.texts[row]
        place = max((i for i in range(len(text) - 1) if text[i] == text[-1]), default=len(text) - 1) + 1
        return list(zip(text[place : place + self.depth], range(self.depth)))


def paths(tree: Tree, row: int) -> list[tuple[int, ...]]:
    """The tokens on the path to each node, without the root's token."""
    node_paths = [()]
    for token, parent in zip(tree.tokens[row, 1:].tolist(), tree.parents[row, 1:].tolist()):
        node_paths.append((*node_paths[parent], token))
    return node_paths


def random_batch(generator: torch.Generator, num_rows: int, num_nodes: int) -> Tree:
    """Random trees with the same root token."""
    trees = [random_tree(generator, num_nodes, 3) for _ in range(num_rows)]
    tokens = torch.cat([tree.tokens for tree in trees])
    tokens[:, 0] = 0
    return Tree(tokens, torch.cat([tree.parents for tree in trees]), None)


@pytest.mark.parametrize("sizes", [(4, 6), (6, 1, 4), (1, 5), (1, 1), (2, 2, 2)])
def test_the_trie_holds_every_path_once(sizes):
    generator = torch.Generator().manual_seed(sum(sizes))
    shared = 0
    for _ in range(20):
        trees = [random_batch(generator, 3, size) for size in sizes]
        joined, places = union(trees)
        for row in range(3):
            expected = list(dict.fromkeys(path for tree in trees for path in paths(tree, row)))
            joined_paths = paths(joined, row)
            assert joined_paths[: len(expected)] == expected  # paths are in the order of the members
            shared += len(expected) < 1 + sum(size - 1 for size in sizes)
            for tree, numbers in zip(trees, places):
                assert [joined_paths[number] for number in numbers[row].tolist()] == paths(tree, row)
    assert shared or 1 in sizes


def test_equal_chains_are_one_chain():
    trees = [plant([0, 0], [[(1, 0), (2, 1)], []], "cpu"), plant([0, 0], [[(1, 0)], [(2, 0)]], "cpu")]
    joined, _ = union(trees)
    assert not joined.linear and paths(joined, 0)[:3] == [(), (1,), (1, 2)]
    joined, _ = union([rows_of(tree, [0]) for tree in trees])
    assert joined.linear and joined.tokens.tolist() == [[0, 1, 2]]


# Members


class Witness(Copying):
    """Reads hidden states, and records the features and the choices that it receives."""

    watches = True

    def __init__(self, num: int, layers: tuple[int, ...]):
        super().__init__(num)
        self.target_layers, self.seen = layers, []

    def begin(self, tokens, num):
        super().begin(tokens, num)
        self.features = [[] for _ in self.texts]

    def commit(self, tokens, features, num, counts):
        super().commit(tokens, features, num, counts)
        for own, values, count in zip(self.features, features, counts):
            own.append(values[:count])

    def propose(self, sampling, generator):
        self.tree = super().propose(sampling, generator)
        return self.tree

    def watch(self, tree, choices):
        assert tree is self.tree and choices.shape == tree.tokens.shape
        self.seen += [([*text], tree, row, choices[row].tolist()) for row, text in enumerate(self.texts)]


def test_members_receive_their_own_features_and_choices(small_target):
    """Members receive the features of their own layers in order, and the target's choices after their own nodes."""
    witnesses = [Witness(4, (3, 8)), Witness(2, (1,)), Witness(3, ()), Witness(3, (1, 3, 5))]
    head = HeadProposer(make_drafter(small_target, "eagle3"), SHAPES[1])
    proposer = Merged(small_target, members=[head, *witnesses])  # the nodes of witnesses are not the first ones
    proposer.selects = False  # ended rows stay, so that all texts can be looked at
    assert proposer.target_layers == tuple(sorted({1, 3, 5, 8, *head.target_layers})) and proposer.watches
    prompts = prompts_of(small_target)[:3]
    generation = greedy(small_target, proposer).generate(prompts, NUM_NEW)
    assert generation.tokens == greedy(small_target, None).generate(prompts, NUM_NEW).tokens
    ends = [
        len(prompt) + NUM_NEW for prompt in prompts
    ]  # behind its end a row stands still, and features are of no text
    for witness in witnesses:
        for text, features, end in zip(witness.texts, witness.features, ends):
            expected = small_target.read(torch.tensor([text]), witness.target_layers).features[0, : end - 1]
            torch.testing.assert_close(torch.cat(features)[: end - 1], expected, atol=1e-9, rtol=0)
        for text, tree, row, choices in [seen for seen in witness.seen if len(seen[0]) < ends[seen[2]]][::19]:
            for path, choice in zip(paths(tree, row), choices):
                final = small_target.read(torch.tensor([[*text, *path]]), ()).final[:, -1]
                assert int(small_target.logits(final).argmax()) == choice
        assert len(witness.seen) > 20


class RecordingMember(Proposer):
    """Wraps a member, and records what it receives and what it proposes."""

    def __init__(self, inner: Proposer):
        self.inner, self.target_layers, self.depth, self.rounds = inner, inner.target_layers, inner.depth, []

    def begin(self, tokens, num):
        self.prompts = tokens, num
        self.inner.begin(tokens, num)

    def commit(self, tokens, features, num, counts):
        self.news = tokens, num, counts
        self.inner.commit(tokens, features, num, counts)

    def propose(self, sampling, generator):
        tree = self.inner.propose(sampling, generator)
        self.rounds.append((*self.news, tree))
        return tree


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_answers_equal_the_target_s_and_heads_draft_as_if_alone(head, shape, small_target):
    """Rows differ in length, and every round accepts the longest right path of any member."""
    drafter = make_drafter(small_target, head)
    shape = dataclasses.replace(shape, depth=min(shape.depth, drafter.depth or shape.depth))
    other = HeadProposer(make_drafter(small_target, "eagle3"), chain_of(2))
    member = RecordingMember(HeadProposer(drafter, shape))
    proposer = Merged(small_target, members=[RecordingMember(Copying(5)), member, RecordingMember(other)])
    prompts = prompts_of(small_target)[:4]
    generation = greedy(small_target, proposer).generate(prompts, NUM_NEW)
    texts = [prompt + answer for prompt, answer in zip(prompts, generation.tokens)]
    assert generation.tokens == greedy(small_target, None).generate(prompts, NUM_NEW).tokens

    known, ends = [[tokens[0]] for tokens in prompts], []
    for tokens, _, counts, _ in member.rounds:
        for row, count in enumerate(counts):
            known[row] += tokens[row, :count].tolist()
        ends.append([len(text) - 1 for text in known])
    read = [small_target.read(torch.tensor([text]), drafter.target_layers).features[0] for text in known]
    alone = HeadProposer(drafter, shape)
    alone.begin(*member.prompts)
    for (tokens, num, counts, tree), end in zip(member.rounds, ends):
        features = torch.zeros(*tokens.shape, read[0].shape[-1], dtype=torch.float64)
        for row, count in enumerate(counts):
            features[row, :count] = read[row][end[row] - count : end[row]]
        alone.commit(tokens, features, num, counts)
        own = alone.propose(Sampling(), None)
        running = [row for row, text in enumerate(texts) if end[row] < len(text) - 1]
        assert torch.equal(own.tokens[running], tree.tokens[running])
        assert torch.equal(own.parents[running], tree.parents[running])

    def num_right(tree: Tree, row: int, place: int) -> int:
        """The number of drafts on the longest path that is equal to the next tokens of the text."""
        return max(len(path) for path in paths(tree, row) if texts[row][place : place + len(path)] == list(path))

    copying = guessing = 0
    for row, prompt in enumerate(prompts):
        place = len(prompt) + 1
        for number, count in enumerate(generation.accepted[row]):
            lengths = [num_right(recording.rounds[number][-1], row, place) for recording in proposer.members]
            # the answer ends with a token of the target, which is no draft
            assert count == min(max(lengths), len(texts[row]) - place - 1)
            copying += lengths[0] > max(lengths[1:])
            guessing += lengths[0] < max(lengths[1:])
            place += count + 1
    assert copying and guessing  # each kind had the longest path in some rounds


def test_rewind_restores_all_members(small_target):
    heads = [HeadProposer(make_drafter(small_target, name), shape) for name, shape in zip(("eagle3", "mtp"), SHAPES)]
    proposer = Merged(small_target, members=heads)
    tokens = torch.tensor([random_tokens(row, 9, 6) for row in range(2)])
    features = small_target.read(tokens, proposer.target_layers).features
    proposer.begin(tokens[:, :6], torch.tensor([6, 6]))
    proposer.commit(tokens[:, 1:7], features[:, :6], torch.tensor([6, 6]), [6, 6])
    mark, before = proposer.mark(), proposer.propose(Sampling(), None)
    proposer.commit(tokens[:, 7:9], features[:, 6:8], torch.tensor([1, 2]), [1, 2])
    proposer.propose(Sampling(), None)
    proposer.rewind(mark)
    again = proposer.propose(Sampling(), None)
    assert torch.equal(before.tokens, again.tokens) and torch.equal(before.parents, again.parents)


def test_one_member_is_refused(target):
    with pytest.raises(ValueError, match=r"^members= must name at least two"):
        Merged(target, members=[Copying(2)])


# At temperature > 0


CHOSEN = {"chain": [(0, 0), (1, 1), (0, 2)], "fork": [(2, 0), (0, 1), (1, 0), (0, 3)]}
KINDS = ("chain", "with replacement", "without replacement")


def mixture(chosen: str, kinds: tuple[str, ...]):
    """A chosen tree beside every possible draw of sampled trees, as a tree [B, N] and the chances of its rows [B]."""
    draws = [drafted(kind, 20 + place) for place, kind in enumerate(kinds)]
    rows, weights = [], []
    for each in itertools.product(*(range(len(tree.tokens)) for tree, _ in draws)):
        rows.append(each)
        weights.append(math.prod(draws[number][1][row] for number, row in enumerate(each)))
    tree = plant([0] * len(rows), [CHOSEN[chosen]] * len(rows), "cpu")
    for number, (drawn, _) in enumerate(draws):
        tree, _ = beside(tree, rows_of(drawn, [each[number] for each in rows]), 3)
    return tree, weights


@pytest.mark.parametrize("rule", LOSSLESS)
@pytest.mark.parametrize("chosen", CHOSEN)
@pytest.mark.parametrize("kind", KINDS)
def test_lossless_by_enumeration(rule, chosen, kind):
    for seed in range(2):
        assert rule_error(random_laws(seed), rule, [mixture(chosen, (kind,))]) < 1e-12


def without_repeats(tree: Tree, number: int) -> Tree:
    """Wrong on purpose: removes from a row the nodes that repeat a sibling, and the nodes below them."""
    known, kept, numbers = [], [0], {0: 0}
    tokens, parents = tree.tokens[number].tolist(), tree.parents[number].tolist()
    for node in range(1, len(tokens)):
        if parents[node] in numbers and (parents[node], tokens[node]) not in known:
            known.append((parents[node], tokens[node]))
            numbers[node] = len(kept)
            kept.append(node)
    owners = [-1, *(numbers[parents[node]] for node in kept[1:])]
    return Tree(tree.tokens[number, kept][None], torch.tensor([owners]), tree.probs[number, kept][None])


@pytest.mark.parametrize("rule", LOSSLESS)
def test_removed_draws_are_detected(rule):
    """Negative control: the enumeration detects removed draws."""
    tree, weights = mixture("chain", ("chain",))
    parts = [(without_repeats(tree, number), [weight]) for number, weight in enumerate(weights)]
    assert len({part.tokens.shape[1] for part, _ in parts}) > 1
    assert rule_error(random_laws(0), rule, parts) > 1e-3


def sampled_decoder(rule: str, *, members: int = 2, shape: TreeShape = SHAPES[0], children="chosen") -> Decoder:
    target = sampled_target()
    heads = [HeadProposer(make_drafter(target, "eagle"), shape, children=children)]
    heads += [HeadProposer(make_drafter(target, "medusa"), chain_of(1))] * (members - 2)
    proposer = Merged(target, members=[heads[0], Copying(2), *heads[1:]])
    return Decoder(target, proposer, sampling=SAMPLINGS["warm"], stop=set(), rule=rule)


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize(
    "how",
    [{"shape": chain_of(2)}, {"shape": chain_of(1), "members": 3}, {"shape": TREE, "children": "distinct"}],
    ids=str,
)
def test_lossless_with_a_sampled_head(rule, how, monkeypatch):
    """With three tokens, copied and drawn drafts are often equal. Checks the first round, and the third one."""
    decoder = sampled_decoder(rule, **how)
    assert decoder_error(decoder, 1, monkeypatch=monkeypatch) < 1e-12
    assert decoder_error(decoder, 3, seed=1, monkeypatch=monkeypatch) < 1e-12


def test_a_decoder_with_removed_draws_is_detected(monkeypatch):
    decoder = sampled_decoder("token", shape=chain_of(1))
    original_propose = decoder.proposer.propose
    monkeypatch.setattr(
        decoder.proposer, "propose", lambda *arguments: without_repeats(original_propose(*arguments), 0)
    )
    assert (
        max(decoder_error(decoder, number, seed=1, alone=True, monkeypatch=monkeypatch) for number in (1, 2, 3)) > 1e-3
    )


def test_trees_of_chosen_members_have_no_laws(small_target):
    heads = [HeadProposer(make_drafter(small_target, "eagle"), SHAPES[1]), Copying(3)]
    proposer = Merged(small_target, members=heads)
    trees = []
    propose = proposer.propose
    proposer.propose = lambda *arguments: trees.append(propose(*arguments)) or trees[-1]
    Decoder(small_target, proposer, sampling=Sampling(1.0), stop=set()).generate(prompts_of(small_target), 8)
    assert trees and all(tree.probs is None for tree in trees)


def test_a_single_drafted_chain_keeps_its_laws(small_target):
    """If the other members draft nothing, the head's chain keeps its shape and its laws."""
    head = HeadProposer(make_drafter(small_target, "eagle"), SHAPES[0])
    proposer = Merged(small_target, members=[Copying(3), head])
    tokens = torch.arange(4)[None]
    features = small_target.read(tokens, proposer.target_layers).features
    for sampling in (Sampling(), Sampling(1.0)):
        proposer.begin(tokens, torch.tensor([4]))
        proposer.commit(torch.tensor([[1, 2, 3, 4]]), features, torch.tensor([4]), [4])
        tree = proposer.propose(sampling, torch.Generator().manual_seed(0))
        assert tree.linear and tree.tokens.shape == (1, 4) and (tree.probs is None) == sampling.greedy
