"""Lookahead decoding against plain forward passes, a naive Jacobi decoder, and a target that reads one token only."""

import copy
import itertools
import operator

import pytest
import torch

from specdec.experiments.jacobi.proposer import Lookahead
from tests.support.decoding import LENGTHS, NUM_NEW, check_counters, find_depths, greedy, prompts_of
from tests.support.targets import make_target

pytestmark = pytest.mark.full

SETTINGS = [(1, 2, 0), (5, 2, 0), (3, 2, 2), (1, 4, 3), (4, 3, 0), (4, 3, 4), (3, 5, 2)]  # window, ngram, guesses


class Recorded(Lookahead):
    """Records each round: texts, columns before and after it, the tree, and the target's choices at its nodes."""

    selects = False  # so that the rows of a round are those of the round before

    def begin(self, tokens, num):
        self.rounds = []
        super().begin(tokens, num)

    def propose(self, sampling, generator):
        tree = super().propose(sampling, generator)
        self.rounds.append([copy.deepcopy((self.texts, *self.read_states("columns", "ends", "pool"))), tree])
        return tree

    def watch(self, tree, choices):
        super().watch(tree, choices)
        self.rounds[-1] += [choices, copy.deepcopy(self.read_states("columns", "pool"))]

    def read_states(self, *names: str) -> tuple:
        return tuple(list(map(operator.attrgetter(name), self.states)) for name in names)


def make_recorded(target, window, ngram, guesses, *, prompts=None):
    proposer = Recorded(target, window=window, ngram=ngram, guesses=guesses)
    generation = greedy(target, proposer).generate(prompts or prompts_of(target), NUM_NEW)
    return proposer, generation


@torch.no_grad()
def greedy_choices(target, text: list[int], guesses: list[int]) -> list[int]:
    """The target's choices after the text and after each guess that follows it, from a plain forward pass."""
    return target.model(torch.tensor([text + guesses])).logits[0, len(text) - 1 :].argmax(-1).tolist()


@pytest.fixture(scope="module")
def small():
    """A target with so few tokens that guesses are often right, and whose answers do not repeat one token."""
    return make_target(12, num_layers=2)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_drafting_does_not_change_the_answers(small, setting):
    """Answers stay plain ones. A row, and the next run, have the same drafts, as no random number is drawn."""
    plain = greedy(small, None).generate(prompts_of(small), NUM_NEW).tokens
    proposer, together = make_recorded(small, *setting)
    window, ngram, guesses = setting
    assert together.tokens == plain
    check_counters(together)
    assert {0, 1} <= set(itertools.chain(*together.accepted))  # some were refused and some accepted
    assert all(len(set(answer)) > 6 for answer in plain)
    assert max(together.drafted) <= (window + guesses) * (ngram - 1)
    depths = [int(find_depths(tree).max()) for _, tree, *_ in proposer.rounds]
    assert max(depths) <= proposer.depth == window + ngram - 2
    for row, prompt in enumerate(prompts_of(small)[:2]):  # a row does not depend on the other rows
        _, alone = make_recorded(small, *setting, prompts=[prompt])
        assert alone.accepted[0] == together.accepted[row]


@pytest.mark.parametrize("setting", [(4, 3, 0), (3, 5, 2)], ids=str)
def test_a_node_attends_to_the_text_to_level_0_and_to_its_column(setting):
    """A node attends to the text, level 0 up to its column, and its column: its choice is that of a plain pass."""
    target = make_target(61, num_layers=2)
    proposer, _ = make_recorded(target, *setting)
    levels = set()
    for (texts, columns, ends, _), tree, choices, _ in proposer.rounds[:8]:
        for row, text in enumerate(texts[:3]):
            assert len(columns[row]) == len(ends[row]) == setting[0]
            firsts = [first for first, *_ in columns[row]]
            for number, (column, end) in enumerate(zip(columns[row], ends[row])):
                path, node = [], end
                while node:
                    path.insert(0, node)
                    node = int(tree.parents[row, node])
                tokens = firsts[: number + 1] + column[1:]
                assert tree.tokens[row, path].tolist() == tokens
                assert choices[row, [0, *path]].tolist() == greedy_choices(target, text, tokens)
                levels.add(len(column))
    assert levels == set(range(1, setting[1]))  # columns grow by one token in each round, up to ngram - 1


@pytest.mark.parametrize("setting", [(5, 2, 0), (5, 4, 2)], ids=str)
def test_columns_advance_by_one_position_in_every_round(small, setting):
    """By absolute positions, a full column that begins at s begins at s + 1 in the next round with a new token."""
    window, ngram, _ = setting
    proposer, _ = make_recorded(small, *setting)
    moved = set()
    for before, after in itertools.pairwise(proposer.rounds):
        for row, (text, columns) in enumerate(zip(before[0][0], before[0][1])):
            later = dict(enumerate(after[0][1][row], start=len(after[0][0][row])))  # by the first token's position
            for number, column in enumerate(columns):
                start = len(text) + number
                if len(column) == ngram - 1 and start + 1 in later:
                    assert later[start + 1] == column[1:] + [int(before[2][row, before[0][2][row][number]])]
                    moved.add(len(after[0][0][row]) - len(text))
            assert len(later) == window
    assert {1, 2} <= moved  # with and without accepted drafts


@pytest.mark.parametrize("window", [1, 3, 6])
def test_ngrams_of_two_tokens_give_jacobi_decoding(small, window):
    """Every round accepts as many drafts as a naive Jacobi decoder does."""

    def naive(prompt: list[int], fresh) -> list[int]:
        text, guesses, accepted = prompt + greedy_choices(small, prompt, []), [], []
        while len(text) < len(prompt) + NUM_NEW:
            guesses += fresh[len(accepted)][len(guesses) :]  # the arbitrary first tokens of columns
            choices = greedy_choices(small, text, guesses)
            count = next((n for n in range(window) if guesses[n] != choices[n]), window)
            text, guesses = text + choices[: count + 1], choices[count + 1 :]
            accepted.append(count)
        accepted[-1] -= len(text) - len(prompt) - NUM_NEW  # the answer is cut
        return accepted

    proposer, generation = make_recorded(small, window, 2, 0)
    assert all(tree.linear for _, tree, *_ in proposer.rounds) and set(generation.drafted) == {window}
    for row, prompt in enumerate(prompts_of(small)):
        fresh = [list(itertools.chain(*state[1][row])) for state, *_ in proposer.rounds]
        assert generation.accepted[row] == naive(prompt, fresh)
    assert max(itertools.chain(*generation.accepted)) >= min(window, 2)


def test_the_pool_holds_the_latest_ngrams_of_full_columns(small):
    """For each first token the pool holds the latest n-grams, at most `guesses` of them."""
    proposer, _ = make_recorded(small, 4, 3, 2)
    largest = 0
    for row in range(len(LENGTHS)):
        latest: dict[int, list[tuple[int, ...]]] = {}  # {first token: guesses}, the latest last
        for (_, columns, ends, _), _, choices, (_, pools) in proposer.rounds:
            for (first, *later), end in zip(columns[row], ends[row]):
                if later:  # a full column
                    guess = (*later, int(choices[row, end]))
                    latest[first] = [other for other in latest.get(first, []) if other != guess] + [guess]
            assert {first: list(pool) for first, pool in pools[row].items()} == {
                first: guesses[-2:] for first, guesses in latest.items()
            }
        largest = max(largest, *map(len, latest.values()))
    assert largest > 2


def make_cyclic_target(cycle: int):
    """A target whose next token depends on the newest one only: the next token of the newest token's cycle."""
    target = make_target(8 * cycle, num_layers=2)
    for layer in target.model.model.layers:
        layer.self_attn.o_proj.weight.detach().zero_()
        layer.mlp.down_proj.weight.detach().zero_()
    weight = torch.nn.functional.normalize(target.embed.weight.detach())
    tokens = torch.arange(8 * cycle)
    target.embed.weight.detach().copy_(weight)
    target.lm_head.weight.detach()[tokens // cycle * cycle + (tokens + 1) % cycle] = weight
    return target


@pytest.mark.parametrize("ngram", [2, 3, 5])
def test_trajectories_become_drafts(ngram):
    """If the newest token determines the next one, every n-gram of the window is right and is accepted completely."""
    target = make_cyclic_target(7)
    prompts, num = [[3, 9, 2], [50, 15], [22]], 80
    proposer = Lookahead(target, window=4, ngram=ngram, guesses=1)
    generation = greedy(target, proposer).generate(prompts, num)
    for answer, (*_, token) in zip(generation.tokens, prompts):
        assert answer == [token // 7 * 7 + (token + step) % 7 for step in range(1, num + 1)]
    for accepted in generation.accepted:
        assert min(accepted[len(accepted) // 2 : -1]) >= ngram - 1
