"""Tests of drafting that chooses how much to draft: its answers, and its choices by given costs and a virtual clock."""

import itertools
import operator
import random
from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
import yaml

from specdec.core.compile import Runner
from specdec.core.generation import RoundCost
from specdec.core.sampling import Sampling
from specdec.core.tree import Tree
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder
from specdec.measuring.measure import seeded_generator
from specdec.proposers import auto as auto_module
from specdec.proposers.auto import AutoProposer
from specdec.proposers.costs import Costs, make_costs
from specdec.proposers.heads import HeadProposer
from specdec.proposers.suffix import Suffix, make_default_suffix
from specdec.proposers.text import Guess, Ngram, TextProposer
from tests.support.commands import ROOT
from tests.support.decoding import chain_of, greedy, random_tokens
from tests.support.drafters import make_drafter
from tests.support.texts import repeating_texts

FREE = dict.fromkeys(range(1, 10), 1.0)
BUSY = {1: 1.0, 2: 2.3, 3: 2.9, 4: 3.1, 5: 3.3, 8: 4.0}
STEEP = {num: float(num) for num in range(1, 10)}
MIDDLE = {1: 1.0, 2: 1.15, 3: 1.3, 5: 1.6, 8: 2.5}


@dataclass
class Account:
    """Sums over all rounds. tokens: emitted in all rows; head: rounds in which the head drafted; sizes: by nodes"""

    rounds: int = 0
    tokens: float = 0.0
    head: int = 0
    sizes: Counter[int] = field(default_factory=Counter)


class AccountedAuto(AutoProposer):
    """`auto` with an account of its rounds."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.account = Account()

    def propose(self, sampling, generator):
        tree = super().propose(sampling, generator)
        self.account.rounds += 1
        self.account.sizes[self.round.size] += 1
        self.account.head += self.round.head
        return tree

    def commit(self, tokens, features, num, counts):
        if self.round is not None:  # else the prompts
            for row, count, left in zip(tokens.tolist(), counts, self.tokens_left):
                self.account.tokens += len(self.ends.cut_tokens([], row[:count][:left])[0])
        super().commit(tokens, features, num, counts)


def suffix(target, num: int = 4) -> Suffix:
    return Suffix(target, num=num, factor=2.0, offset=4, least=0.1, memory=0)


def auto(target, *, head="eagle", text=True, ratios=FREE, absorb=0.0, step=0.0, num=4, arguments=None) -> AccountedAuto:
    members = [suffix(target, num)] if text else []
    if head:
        members.append(HeadProposer(make_drafter(target, head, False, arguments), chain_of(3)))
    return AccountedAuto(target, members=members, costs=make_costs(ratios, plain=1.0, absorb=absorb, step=step))


# Answers at temperature 0


PAIR = {"dependence": {"kind": "selector", "rank": 8, "top": 2}}  # fewer candidates than SIBLINGS
RNN = {"dependence": {"kind": "markov", "rank": 8, "form": "rnn"}}


HEADS = ("eagle", "medusa", "mtp", "dflash", "draft", "dflash2", "domino", None)
CASES = [*((head, None) for head in HEADS), ("dflash2", PAIR), ("dspark", RNN)]


@pytest.mark.parametrize("head, arguments", CASES)
def test_greedy_answers_are_those_of_plain_decoding(small_target, head, arguments):
    """Rows of a batch end at different times and leave it. test_batch.py has prompts that join."""
    prompts = [*repeating_texts(3, 12), random_tokens(1, 5, small_target.vocab_size)]
    plain = greedy(small_target, None, {7}).generate(prompts, 40).tokens
    for ratios in (FREE, MIDDLE):
        proposer = auto(small_target, head=head, ratios=ratios, step=0.05, arguments=arguments)
        assert greedy(small_target, proposer, {7}).generate(prompts, 40).tokens == plain
    assert max(proposer.account.sizes) > 1


@pytest.mark.parametrize("head", ["eagle", None])
def test_a_size_beyond_the_longest_chain_is_not_filled_up_with_a_longer_one(small_target, head):
    """A head that is tried seldom reads many tokens then, and texts of one token would accept all copies."""
    prompts = [*repeating_texts(3, 12), [5] * 9]
    plain = greedy(small_target, None).generate(prompts, 40).tokens
    proposer = auto(small_target, head=head, ratios={1: 1.0, 9: 1.01}, absorb=10.0)
    assert [greedy(small_target, proposer).generate([prompt], 40).tokens[0] for prompt in prompts] == plain
    assert proposer.account.sizes[9] > 10


def test_rows_that_have_ended_do_not_count(small_target):
    """Where rows stay because shapes are compiled, an ended one neither asks for drafts nor promises tokens."""
    runner = Runner(False, cuda_graphs=True)
    runner.run_whole = lambda name, function, inputs, memory: function(*inputs)
    proposer = auto(small_target)
    batch = Decoder(small_target, proposer, sampling=Sampling(), stop=set(), runner=runner).batch()
    batch.admit([Request(prompt, num) for prompt, num in zip(repeating_texts(3, 12), (4, 40))])
    while batch.running:
        batch.run_round()
        running = len(batch.running)
        assert len(proposer.running) in (running, running + 1)
    assert len(proposer.newest) == 2 and len(batch.requests) == 2
    account = proposer.account
    assert account.tokens == pytest.approx(sum(len(request.tokens) - 1 for request in batch.requests), abs=4)


# Choices


def test_nothing_is_drafted_where_every_node_costs_a_pass(small_target):
    proposer = auto(small_target, ratios=STEEP, absorb=0.2)
    decoder = greedy(small_target, proposer)
    prompt, account = random_tokens(3, 9, small_target.vocab_size), proposer.account
    decoder.generate([prompt], 100)
    rounds, head = account.rounds, account.head  # at first it is not known that the head is never right
    decoder.generate([prompt], 200)
    assert account.sizes[1] > 0.9 * account.rounds
    rounds, trials = account.rounds - rounds, account.head - head
    assert rounds / 25 < trials <= 2 + rounds / 20  # so they take about 1 % of the time


# Seconds by nodes, of two threads of float32 beside a spinning process for each core (results/44-other-machines.md)


@pytest.mark.full
@pytest.mark.parametrize("copies", [False, True])
def test_beside_busy_processes_it_stays_near_plain_decoding(small_target, copies):
    """copies: whether the text repeats, so that a suffix tree is often right"""
    absorb, step = 0.35, 0.3
    proposer = auto(small_target, ratios=BUSY, absorb=absorb, step=step, num=7)
    decoder = greedy(small_target, proposer)
    prompts = repeating_texts(1, 40) if copies else [random_tokens(3, 9, small_target.vocab_size)]
    for prompt in prompts * 3:
        plain = greedy(small_target, None).generate([prompt], 100)
        assert decoder.generate([prompt], 100).tokens == plain.tokens
    account = proposer.account
    seconds = sum(BUSY[size] * num for size, num in account.sizes.items()) + absorb * account.head
    assert account.tokens / seconds >= 0.97  # plain decoding writes a token a second


def test_members_that_do_not_fit_are_refused(small_target):
    ngram = Ngram(small_target, min=1, max=3, num=4)
    inner = AutoProposer(small_target, members=[ngram], costs=make_costs(FREE, plain=1.0, absorb=0, step=0))
    for members in ([], [ngram, inner]):
        with pytest.raises(ValueError, match="members= of auto must be one trained head"):
            AutoProposer(small_target, members=members)


# Ends of answers, and prompts


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drafted_behind_the_end_of_an_answer(small_target, temperature):
    """Where drafts cost nothing, all are verified but those that cannot add a token to the answer."""
    proposer = auto(small_target, text=False)
    decoder = Decoder(small_target, proposer, sampling=Sampling(temperature), stop=frozenset())
    for num in range(1, 6):
        left = num - 1
        generation = decoder.generate([[1, 2, 3, 1, 2]], num, generator=seeded_generator(small_target, 0))
        for nodes, accepted in zip(generation.drafted, generation.accepted[0]):
            assert (nodes > 0) == (left > 1)
            left -= 1 + accepted
        assert left == 0 and len(generation.tokens[0]) == num


# A virtual clock


class Clock:
    seconds = 0.0

    def perf_counter(self) -> float:
        return self.seconds


class Copies(TextProposer):
    """Guesses one token, which is right with the probability `accuracy`, and takes `looking` seconds for it."""

    depth = 1

    def __init__(self, clock: Clock, accuracy: float, looking: float):
        self.clock, self.accuracy, self.looking, self.looks = clock, accuracy, looking, 0
        self.random = random.Random(0)

    def extend(self, row, new):
        pass

    def draft(self, row):
        return []

    def guess(self, row):
        self.looks += 1
        self.clock.seconds += self.looking
        return [Guess(int(self.random.random() < self.accuracy), 0, 0.5)]


class Weak(HeadProposer):
    """Drafts token 1, right with the probability that it states: `accuracy` on average. Seconds: `steps`."""

    target_layers, compile_seconds, depth = (), 0.0, 4

    def __init__(self, clock: Clock, accuracy: float, steps: dict[str, float]):
        self.clock, self.accuracy, self.steps = clock, accuracy, steps
        self.random, self.probabilities = random.Random(0), []  # probabilities of this round's drafts
        self.drafter, self.cache = SimpleNamespace(vocab_size=4), SimpleNamespace(drop_pending=lambda: None)

    def as_chain(self, deepest):
        return self

    def begin(self, tokens, num):
        pass

    def commit(self, tokens, features, num, counts):
        self.probabilities = []

    def absorb(self):
        self.clock.seconds += self.steps["absorb"]
        return None, (None, None, None)

    def step(self, *arguments):
        self.clock.seconds += self.steps["step"]
        return None, None, None

    def likeliest(self, logits, num):
        probability = self.random.random() * 2 * self.accuracy
        self.probabilities.append(probability)
        return [[probability, 0.001, 0.001]], [[1 if self.random.random() < probability else 2, 0, 3]]

    def expected_tokens(self, num: int) -> float:
        """Expected tokens of a round with `num` drafts."""
        return 1 + sum(itertools.accumulate(self.probabilities[:num], operator.mul))


def count_ones(tree: Tree) -> int:
    """Nodes of the tree's path on which token 1 always follows."""
    children = {int(parent): node for node, parent in enumerate(tree.parents[0]) if tree.tokens[0, node] == 1}
    node, num = 0, 1
    while node in children:
        node, num = children[node], num + 1
    return num


def run_rounds(
    monkeypatch, clock: Clock, member, costs: Costs, rounds: int, seconds
) -> tuple[AccountedAuto, list[int]]:
    """Rounds in which token 1 always follows -> the proposer, and the size of each round.

    seconds: seconds of a round beside drafting, by its nodes and its number
    """
    monkeypatch.setattr(auto_module, "time", clock)
    share = SimpleNamespace(gather_values=lambda value: [value])
    target = SimpleNamespace(vocab_size=4, recurrent=False, device=torch.device("cpu"), share=share)
    proposer = AccountedAuto(target, members=[member], costs=costs)
    ones, nothing = torch.ones(1, 1, dtype=torch.long), torch.zeros(1, 1, 0)
    proposer.begin(ones, ones[0])
    proposer.commit(ones, nothing, ones[0], [1])
    sizes = []
    for number in range(rounds):
        start = clock.seconds
        proposer.limit([10**6], frozenset())
        tree = proposer.propose(Sampling(), None)
        sizes.append(tree.tokens.shape[1])
        clock.seconds += seconds(sizes[-1], number)
        new = count_ones(tree)
        proposer.commit(ones.repeat(1, new), nothing.repeat(1, new, 1), new * ones[0], [new])
        proposer.record_cost(RoundCost(clock.seconds - start, 0.0, {}))
    return proposer, sizes


def decode_by_clock(
    monkeypatch, *, accuracy, seconds, costs=None, looking=0.0, extra_seconds=0.0, rounds=600
) -> tuple[AccountedAuto, Copies, float, list[int]]:
    """Rounds with `Copies` -> proposer, copies, seconds of all rounds, and the size of each.

    seconds: seconds of a pass, by its nodes and the number of the round
    extra_seconds: seconds of rounds with drafts beside their passes
    costs: measured costs; None: the true ones of the first round
    """
    clock = Clock()
    copies, curve = Copies(clock, accuracy, looking), costs or {1: seconds(1, 0), 2: seconds(2, 0)}
    proposer, sizes = run_rounds(
        monkeypatch,
        clock,
        copies,
        Costs({1: curve}, sizes=curve),
        rounds,
        lambda num, number: seconds(num, number) + extra_seconds * (num > 1),
    )
    return proposer, copies, clock.seconds, sizes


STEPS = [{"absorb": 0.06, "step": 0.05}, {"absorb": 0.3, "step": 0.25}]
CHEAPEST_AT_FOUR = {1: 1.0, 2: 0.92, 3: 0.93, 4: 0.9, 5: 0.98, 8: 1.03}  # as of a CPU with units for bfloat16


@pytest.mark.parametrize("steps", STEPS, ids=["cheap", "dear"])
@pytest.mark.parametrize("ratios", [CHEAPEST_AT_FOUR, MIDDLE, STEEP], ids=["four", "middle", "steep"])
@pytest.mark.parametrize("accuracy", [0.02, 0.1, 0.2, 0.3, 0.5])
@pytest.mark.parametrize("measured", [False, True])
def test_with_a_weak_head_it_is_as_fast_as_the_best_fixed_way(monkeypatch, measured, accuracy, ratios, steps):
    """Expected tokens over seconds, from a process's first round on. measured: head of unknown seconds"""
    clock, expected = Clock(), 0.0
    head = Weak(clock, accuracy, steps)
    costs = Costs({1: ratios}, sizes=ratios) if measured else make_costs(ratios, plain=1.0, **steps)

    def verify(num: int, _) -> float:
        nonlocal expected
        expected += head.expected_tokens(num - 1)
        return ratios[num]

    run_rounds(monkeypatch, clock, head, costs, 300, verify)
    speeds = [1.0]
    for depth in (1, 2, 4):
        tokens = sum(accuracy**level for level in range(depth + 1))
        speeds.append(tokens / (ratios[depth + 1] + steps["absorb"] + (depth - 1) * steps["step"]))

    assert expected / clock.seconds >= 0.98 * max(speeds)


def linear_seconds(slope: float):
    """Seconds of a pass that takes one second for a node, and `slope` for each further one."""
    return lambda num, _: 1.0 + slope * (num - 1)


def steps_at(change: int, before: float, after: float):
    """Seconds of a pass whose drafts take other times from a round on."""
    return lambda num, number: 1.0 if num == 1 else (before, after)[number >= change]


def test_rounds_without_drafts_cost_little(monkeypatch):
    """Drafts always pay. The passes without drafts stay known, and such rounds cost less than 1 % of the speed."""
    proposer, _, spent, _ = decode_by_clock(monkeypatch, accuracy=0.8, seconds=linear_seconds(0.1))
    account = proposer.account
    assert 3 <= account.sizes[1] < account.rounds / 40
    with_drafts = account.tokens / account.rounds  # about 1.8
    assert account.tokens / spent > 0.99 * with_drafts / 1.1


class Alternating(Copies):
    """Guesses that are always right in every second round, and in one of five of the others."""

    def guess(self, row):
        self.looks += 1
        probability = 0.9 if self.looks % 2 else 0.2
        return [Guess(int(probability > 0.5 or self.random.random() < probability), 0, probability)]


def test_a_round_with_a_good_guess_is_not_spent_on_the_plain_pass(monkeypatch):
    clock, costs = Clock(), Costs({1: {1: 1.0, 2: 1.05}}, sizes=(1, 2))
    member = Alternating(clock, 0.0, 0.0)
    _, sizes = run_rounds(monkeypatch, clock, member, costs, 600, linear_seconds(0.05))
    assert sizes[::2].count(1) == 0 and sizes[1::2].count(1) > 3


def test_drafting_stops_where_its_passes_take_longer_than_measured(monkeypatch):
    *_, sizes = decode_by_clock(monkeypatch, accuracy=0.6, seconds=steps_at(300, 1.2, 2.2))
    assert sizes[100:300].count(2) > 180 and sizes[400:].count(1) > 180


def test_drafting_begins_again_where_its_passes_take_as_long_as_measured(monkeypatch):
    """An expensive size is tried again, because its correction fades."""
    slow = steps_at(200, 2.5, 1.1)
    *_, sizes = decode_by_clock(monkeypatch, accuracy=0.7, seconds=slow, costs={1: 1.0, 2: 1.1}, rounds=900)
    assert sizes[50:200].count(1) > 130 and sizes[600:].count(2) > 250


@pytest.mark.parametrize("extra_seconds, size", [(0.0, 2), (0.5, 1)])
def test_what_drafting_takes_beside_the_pass_counts(monkeypatch, extra_seconds, size):
    settings = {"accuracy": 0.5, "seconds": linear_seconds(0.2), "looking": 0.001}
    *_, sizes = decode_by_clock(monkeypatch, extra_seconds=extra_seconds, **settings)
    assert sizes[300:].count(size) > 250


@pytest.mark.parametrize("looking, lower, upper", [(0.001, 600, 600), (0.5, 75, 150)])
def test_where_looking_at_texts_takes_long_and_never_pays_it_is_done_seldom(monkeypatch, looking, lower, upper):
    _, copies, *_ = decode_by_clock(monkeypatch, accuracy=0.02, seconds=linear_seconds(1.0), looking=looking)
    assert lower <= copies.looks <= upper


def test_the_default_suffix_tree_has_the_settings_of_its_configuration(small_target):
    config = yaml.safe_load((ROOT / "conf" / "proposer" / "suffix.yaml").read_text())
    config.pop("_target_")
    default = make_default_suffix(small_target)
    assert config.pop("datastore") is None and not default.initial_texts
    assert {name: getattr(default, name) for name in config} == config
