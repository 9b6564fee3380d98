"""Tests of drafting that chooses how much to draft: its law, its choices, its costs and its chances."""

import random

import pytest
import yaml

from specdec.core.compile import Runner
from specdec.core.generation import RoundCost
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder
from specdec.measuring.measurement import seeded_generator
from specdec.proposers import auto as auto_module
from specdec.proposers.auto import Auto
from specdec.proposers.chances import Chances, Kind
from specdec.proposers.costs import Costs, told
from specdec.proposers.heads import HeadProposer
from specdec.proposers.ngram import Ngram
from specdec.proposers.pool import Pool
from specdec.proposers.realised import Realised
from specdec.proposers.suffix import Suffix, usual_suffix
from tests.support import ROOT, chain_of, make_drafter, random_tokens
from tests.texts import repeating_texts

FREE = dict.fromkeys(range(1, 10), 1.0)
STEEP = {num: float(num) for num in range(1, 10)}
MIDDLE = {1: 1.0, 2: 1.15, 3: 1.3, 5: 1.6, 8: 2.5}


def suffix(target, num: int = 4) -> Suffix:
    return Suffix(target, num=num, factor=2.0, offset=4, least=0.1, memory=0)


def auto(target, *, head="eagle", text=True, ratios=FREE, absorb=0.0, step=0.0, num=4) -> Auto:
    members = [suffix(target, num)] if text else []
    if head:
        members.append(HeadProposer(make_drafter(target, head, False), chain_of(3)))
    return Auto(target, members=members, costs=told(ratios, plain=1.0, absorb=absorb, step=step))


# Answers at temperature 0


@pytest.mark.parametrize("head", ["eagle", "medusa", "mtp", "dflash", "draft", None])
def test_greedy_answers_are_those_of_plain_decoding(small_target, head):
    """Rows of a batch end at different times and leave it."""
    prompts = [*repeating_texts(3, 12), random_tokens(1, 5, small_target.vocab_size)]
    plain = Decoder(small_target, None, sampling=Sampling(), stop={7}).generate(prompts, 40)
    for ratios in (FREE, MIDDLE):
        proposer = auto(small_target, head=head, ratios=ratios, step=0.05)
        result = Decoder(small_target, proposer, sampling=Sampling(), stop={7}).generate(prompts, 40)
        assert result.tokens == plain.tokens
        alone = [
            Decoder(small_target, None, sampling=Sampling(), stop={7}).generate([p], 40).tokens[0] for p in prompts
        ]
        assert alone == plain.tokens
    assert proposer.account.rounds > 0


@pytest.mark.parametrize("head", ["eagle", None])
def test_a_size_beyond_the_longest_chain_is_not_filled_up_with_a_longer_one(small_target, head):
    """A head that is tried seldom reads what was committed in between, and texts of one token would accept all copies."""
    prompts = [*repeating_texts(3, 12), [5] * 9]
    plain = Decoder(small_target, None, sampling=Sampling(), stop=set()).generate(prompts, 40)
    proposer = auto(small_target, head=head, ratios={1: 1.0, 9: 1.01}, absorb=10.0)
    decoder = Decoder(small_target, proposer, sampling=Sampling(), stop=set())
    for prompt, answer in zip(prompts, plain.tokens):
        assert decoder.generate([prompt], 40).tokens == [answer]
    assert proposer.account.sizes[9] > 10


def test_prompts_join_and_leave(small_target):
    """Three rows at a time; ended answers enter the memory of the suffix tree, and chances are kept."""
    prompts = [*repeating_texts(3, 12), *[random_tokens(seed, 5, small_target.vocab_size) for seed in range(4)]]
    plain = [Decoder(small_target, None, sampling=Sampling(), stop={2}).generate([p], 30).tokens[0] for p in prompts]
    for head in ("eagle", "medusa", None):
        proposer = auto(small_target, head=head, ratios=MIDDLE, step=0.05)
        decoder = Decoder(small_target, proposer, sampling=Sampling(), stop={2})
        found = dict(decoder.answers(prompts, 30, rows=3))
        assert [found[number].tokens[0] for number in range(len(prompts))] == plain
        assert max(proposer.account.sizes) > 1


def test_rows_that_have_ended_do_not_count(small_target):
    """Where rows stay because shapes are compiled, an ended one neither asks for drafts nor promises tokens."""
    runner = Runner(False, cuda_graphs=True)
    runner.whole = lambda name, function, inputs, memory: function(*inputs)
    proposer = auto(small_target)
    batch = Decoder(small_target, proposer, sampling=Sampling(), stop=set(), runner=runner).batch()
    batch.admit([Request(prompt, num) for prompt, num in zip(repeating_texts(3, 12), (4, 40))])
    while batch.running:
        batch.step()
        running = len(batch.running)
        assert proposer.num_active in (running, running + 1)
    assert len(proposer.newest) == 2 and len(batch.rows) == 2
    account = proposer.account
    assert account.tokens == pytest.approx(sum(len(request.tokens) - 1 for request in batch.rows), abs=4)


# Choices


def test_nothing_is_drafted_where_every_node_costs_a_pass(small_target):
    proposer = auto(small_target, ratios=STEEP, absorb=0.2)
    decoder = Decoder(small_target, proposer, sampling=Sampling(), stop=set())
    decoder.generate([random_tokens(3, 9, small_target.vocab_size)], 200)
    account = proposer.account
    assert account.sizes[1] > 0.9 * account.rounds
    assert account.head - account.trials < 0.1 * account.rounds  # at first it is not known that the head is never right
    assert account.rounds / 25 < account.trials <= 2 + account.rounds / 20  # so they take a hundredth of the time


# Two threads of float32 beside a spinning process for each core (results/44-other-machines.md): three nodes take 2.9 times as long as one
BUSY = {1: 1.0, 2: 2.3, 3: 2.9, 4: 3.1, 5: 3.3, 8: 4.0}


@pytest.mark.parametrize("copies", [False, True])
def test_beside_busy_processes_it_stays_near_plain_decoding(small_target, copies):
    """By told costs. copies: whether the text repeats, so that a suffix tree is often right."""
    absorb, step = 0.35, 0.3
    proposer = auto(small_target, ratios=BUSY, absorb=absorb, step=step, num=7)
    decoder = Decoder(small_target, proposer, sampling=Sampling(), stop=set())
    prompts = repeating_texts(1, 40) if copies else [random_tokens(3, 9, small_target.vocab_size)]
    for prompt in prompts * 3:
        result = decoder.generate([prompt], 100)
        plain = Decoder(small_target, None, sampling=Sampling(), stop=set()).generate([prompt], 100)
        assert result.tokens == plain.tokens
    account = proposer.account
    seconds = sum(BUSY[size] * num for size, num in account.sizes.items()) + absorb * account.head
    assert account.tokens / seconds >= 0.97  # plain decoding writes a token a second


def test_the_size_is_the_best_of_all(small_target):
    """Against all sizes and all sets of candidates, for random chances and costs."""
    generator = random.Random(0)
    proposer = auto(small_target, head=None)
    for _ in range(50):
        ratios = {1: 1.0}
        for num in range(2, 8):
            ratios[num] = ratios[num - 1] + generator.choice([-0.02, 0.0, 0.1, 0.5])
        proposer.given = proposer.costs = told(ratios, plain=1.0, absorb=0, step=0)
        proposer.newest, proposer.left, proposer.num_rows = [5, 5], [9, 9], 2
        proposer.gained, proposer.spent = 0.0, 0.0
        proposer.pools = [Pool([5]), Pool([5])]
        for pool in proposer.pools:
            for token in range(6):
                parent = generator.randrange(len(pool.tokens))
                pool.add(token, parent, Kind("Suffix", generator.random(), 1), proposer.chances)
            pool.settle()
        proposer._prepare()
        num, seconds, expected = proposer.candidates.best()
        trees = [pool.best(num - 1, chain=False) for pool in proposer.pools]
        for pool, nodes in zip(proposer.pools, trees):
            assert all(pool.parents[node] == 0 or pool.parents[node] in nodes for node in nodes)
        told_value = 2.0 + sum(pool.chances[node] for pool, nodes in zip(proposer.pools, trees) for node in nodes)
        assert expected == pytest.approx(told_value)
        best = max(
            2 + sum(sum(sorted(pool.chances[1:], reverse=True)[: size - 1]) for pool in proposer.pools)
            - proposer.value.rate * 2 * cost for size, cost in ratios.items()
        )  # fmt: skip
        assert expected - proposer.value.rate * seconds == pytest.approx(best)


def test_members_that_do_not_fit_are_refused(small_target):
    ngram = Ngram(small_target, min=1, max=3, num=4)
    inner = Auto(small_target, members=[ngram], costs=told(FREE, plain=1.0, absorb=0, step=0))
    for members in ([], [ngram, inner]):
        with pytest.raises(ValueError, match="members= of auto must be one trained head"):
            Auto(small_target, members=members)


# Chances


def test_chances_become_what_is_seen_and_follow_changes():
    chances, generator = Chances(), random.Random(1)
    kind = Kind("head", 0.55, 2)
    for truth in (0.15, 0.9):
        for _ in range(1500):
            chances.learn(kind, generator.random() < truth)
        assert abs(chances.of(kind) - truth) < 0.08
    assert chances.of(Kind("head", 0.05, 1)) == pytest.approx(0.05)  # nothing is known of this kind
    assert abs(chances.typical("head", 2) - 0.9) < 0.08 and chances.typical("head", 3) == 0.5


def test_candidates_that_were_not_verified_teach_too(small_target):
    proposer = auto(small_target, head=None, ratios=STEEP)
    kind = Kind("Suffix", 0.9, 1, 0, 4)
    for _ in range(60):
        pool = Pool([5])
        pool.add(9, 0, kind, proposer.chances)
        pool.teach(proposer.chances, [8])
    assert proposer.chances.of(kind) < 0.15


# Costs


def test_a_step_that_was_slow_once_is_not_taken_for_slow(small_target, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(auto_module.time, "perf_counter", lambda: clock[0])
    proposer = auto(small_target)
    proposer.num_rows, proposer.costs = 1, None
    for seconds in (8.0, 1.0, 1.0, 1.0, 1.0):
        clock[0] += seconds
        proposer._time("step", clock[0] - seconds, 0.0)
    assert proposer._step_seconds("step") < 1.5
    proposer._time("step", clock[0] - 100.0, 0.0)
    assert proposer._step_seconds("step") < 1.65
    proposer._time("step", clock[0] - 0.1, 5.0)  # it was compiled
    assert proposer._step_seconds("step") > 1.4


@pytest.mark.parametrize("advantage, least, most", [(1.0, 8, 8), (1.1, 20, 20), (3.0, 400, 400)])
def test_rounds_without_drafts_are_checked_seldom(small_target, advantage, least, most):
    proposer = auto(small_target, head=None)
    proposer.costs = Costs({1: {1: 1.0, 4: 1.1}}, sizes=(1, 4))
    proposer.rhythm.advantage = advantage
    rounds = next(num for num in range(1000) if setattr(proposer.rhythm, "drafted", num) or proposer._checks_plain())
    assert least <= rounds <= most + 1 and proposer.account.checks == 1
    proposer.costs.steps = {"absorb": 0.0, "step": 0.0}  # told costs are believed
    assert not proposer._checks_plain()


def test_where_looking_at_texts_takes_long_and_never_pays_it_is_done_seldom(small_target, monkeypatch):
    looks = []
    look = Auto._look
    monkeypatch.setattr(Auto, "_look", lambda self: looks.append(1) or look(self))
    for seconds in (0.0, 1.0):
        proposer = auto(small_target, head=None, ratios=STEEP)
        proposer._step_seconds = lambda name, seconds=seconds: seconds if name == "texts" else 0.0
        decoder = Decoder(small_target, proposer, sampling=Sampling(), stop=set())
        looks.clear()
        decoder.generate([random_tokens(3, 9, small_target.vocab_size)], 200)
        idle = proposer.account.sizes[1] / proposer.account.rounds
        assert idle > 0.9 and (len(looks) == proposer.account.rounds if not seconds else len(looks) < 60)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nothing_is_drafted_behind_the_end_of_an_answer(small_target, temperature):
    """Where drafts cost nothing, all are verified but those that cannot add a token to the answer."""
    proposer = auto(small_target, text=False)
    decoder = Decoder(small_target, proposer, sampling=Sampling(temperature), stop=frozenset())
    for num in range(1, 6):
        drafted, left = [], num - 1
        generation = decoder.generate([[1, 2, 3, 1, 2]], num, generator=seeded_generator(small_target, 0))
        for nodes, accepted in zip(generation.drafted, generation.accepted[0]):
            drafted.append((nodes > 0, left))
            left -= 1 + accepted
        assert left == 0 and all(some == (before > 1) for some, before in drafted)
        assert len(generation.tokens[0]) == num


@pytest.mark.parametrize("reading, num, drafts", [(0.0, 8, True), (0.5, 8, False), (0.05, 8, True), (0.5, 80, True)])
def test_a_head_reads_a_prompt_if_the_answer_is_long_enough(small_target, reading, num, drafts):
    """reading: passes that one token of the prompt takes the head; num: tokens of the answer"""
    proposer = auto(small_target, text=False)
    proposer.costs.steps["reading"] = reading
    Decoder(small_target, proposer, sampling=Sampling(), stop=frozenset()).generate([[1, 2, 3, 4] * 3], num)
    assert proposer.account.choices[0].head == drafts


def test_prompts_that_join_in_every_round_have_to_be_read(small_target):
    """A head that would pay does not where answers are short and prompts long."""
    proposer = auto(small_target, text=False)
    proposer.costs.steps["reading"] = 0.1
    decoder = Decoder(small_target, proposer, sampling=Sampling(), stop=frozenset())
    decoder.generate([[1, 2, 3, 4] * 3], 8)
    batch = decoder.batch()
    prompts = [Request([1, 2, 3, 4] * 3, 60) for _ in range(2)] + [Request([4, 3, 2] * 10, 2) for _ in range(30)]
    batch.admit([prompts.pop(0) for _ in range(3)])
    drafts = []
    while prompts:
        batch.step()
        drafts.append(proposer.account.choices[-1].head)
        batch.admit([prompts.pop(0) for _ in range(3 - len(batch.running))])
    assert drafts[0] and not any(drafts[-5:])


def test_rounds_that_take_longer_than_expected_are_expected_to(small_target):
    """Where rounds with drafts take longer than their parts tell, drafting stops."""
    lasting = Realised(trust=10.0)
    for number in range(2000):
        lasting.saw_ratio(1.5 if number % 100 else 60.0)  # a pause counts as little as a slow round
    assert lasting.ratio == pytest.approx((10 + 200 * 1.505) / 210, abs=0.01)
    curve = {1: 1.0, 2: 1.2, 3: 1.25, 4: 1.3}
    proposer = Auto(small_target, members=[suffix(small_target)], costs=Costs({1: curve}, sizes=tuple(curve)))
    proposer.newest, proposer.left, proposer.num_rows = [5], [9], 1
    sizes = set()
    for slow in (1.0, 2.0):
        for _ in range(100):
            proposer.pools = [Pool([5])]
            proposer.pools[0].add(1, 0, Kind("Suffix", 0.45, 1), proposer.chances)
            proposer._prepare()
            tree = proposer._plant([], 0.0, plain=False)
            drafted = tree.tokens.shape[1] > 1
            proposer.lasting[drafted].saw_ratio(slow if drafted else 1.0)
        sizes.add(tree.tokens.shape[1])
    assert sizes == {2, 1}


def test_what_drafting_takes_beside_the_head_and_the_pass_counts(small_target):
    proposer = auto(small_target, head=None)
    proposer.costs = Costs({1: {1: 1.0, 4: 1.5}}, sizes=(1, 4))
    proposer.num_rows, proposer.newest, proposer.left = 1, [3], [9]
    for size, rest in ((4, 0.4), (1, 0.1)):
        proposer._prepare()
        assert proposer.value.curve[4] - proposer.value.curve[1] == pytest.approx(0.5)  # one of them is not known
        proposer.size, proposer.stepped = size, 0.2
        verifying = {1: 1.0, 4: 1.5}[size]
        proposer.expected_seconds = verifying + 0.2 + rest * (size > 1)  # what all rounds take beside is not counted
        proposer.timed(RoundCost(verifying + 0.2 + rest, 0.0, {"verify": verifying}))
    proposer._prepare()
    assert proposer.value.curve[4] - proposer.value.curve[1] == pytest.approx(0.8)


def test_the_usual_suffix_tree_has_the_settings_of_its_configuration(small_target):
    config = yaml.safe_load((ROOT / "conf" / "proposer" / "suffix.yaml").read_text())
    usual = usual_suffix(small_target)
    assert {name: getattr(usual, name) for name in config if name != "_target_"} == {
        name: value for name, value in config.items() if name != "_target_"
    }
