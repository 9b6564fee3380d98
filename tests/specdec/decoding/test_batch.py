"""Tests of batches whose rows come and go: each answer is the one that its prompt gets alone."""

import itertools
import random

import pytest
import torch

from specdec.core.compile import Runner
from specdec.core.generation import Ends
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape, make_root
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder
from specdec.experiments.jacobi.proposer import Lookahead
from specdec.proposers.auto import AutoProposer
from specdec.proposers.costs import make_costs
from specdec.proposers.heads import HeadProposer
from specdec.proposers.suffix import Suffix
from specdec.proposers.text import Ngram
from tests.support import HEADS, chain_of, greedy, make_drafter, random_tokens
from tests.texts import repeating_texts

STOP = {2}
TREE = TreeShape(depth=3, width=2, nodes=5)


def prompts_of(target) -> list[list[int]]:
    """More prompts than rows, of many lengths; their answers end at different times."""
    texts = [random_tokens(seed, 3 + 5 * seed % 17, target.vocab_size) for seed in range(7)]
    return [*texts, *repeating_texts(3, 12)]


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def alone(decoder: Decoder, prompts, num: int) -> list[list[int]]:
    """What each prompt is answered alone, with random numbers of its own."""
    answers = []
    for number, prompt in enumerate(prompts):
        ((_, answer),) = decoder.answers([prompt], num, batch_size=1, generator=lambda _, number=number: seeded(number))
        answers.append(answer.tokens[0])
    return answers


def together(decoder: Decoder, prompts, num: int, rows: int) -> list[list[int]]:
    found = dict(decoder.answers(prompts, num, batch_size=rows, generator=seeded))
    assert sorted(found) == list(range(len(prompts)))
    for answer in found.values():
        assert len(answer.tokens[0]) <= 1 + sum(count + 1 for count in answer.accepted[0])
        assert len(answer.accepted[0]) == len(answer.drafted)
    return [found[number].tokens[0] for number in range(len(prompts))]


def text_proposers(target) -> dict:
    suffix = lambda: Suffix(target, num=6, factor=2.0, offset=4, least=0.1, memory=500)
    ngram = lambda: Ngram(target, min=1, max=3, num=4)
    return {
        "none": lambda: None,
        "suffix": suffix,
        "ngram": ngram,
        "lookahead": lambda: Lookahead(target, window=3, ngram=3, guesses=2),
        "auto": lambda: AutoProposer(
            target,
            members=[HeadProposer(make_drafter(target, "eagle3"), chain_of(2)), suffix(), ngram()],
            costs=make_costs(dict.fromkeys(range(1, 10), 1.0), plain=1.0, absorb=0.0, step=0.0),
        ),
    }


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", ["none", "suffix", "ngram", "lookahead", "auto"])
def test_greedy_answers_are_those_of_each_prompt_alone(small_target, name, rows):
    prompts = prompts_of(small_target)
    plain = alone(greedy(small_target, None, STOP), prompts, 30)
    assert len({len(answer) for answer in plain}) > 3  # they end at different times
    decoder = greedy(small_target, text_proposers(small_target)[name](), STOP)
    assert together(decoder, prompts, 30, rows) == plain


@pytest.mark.parametrize(
    ("head", "shape"),
    [(head, shape) for number, head in enumerate(HEADS) for shape in (chain_of(3), TREE)[number % 2 :]],
)
def test_heads_are_joined_and_left(small_target, head, shape):
    """The drafts, too, are those of a batch of one: what is accepted does not depend on the others."""
    small_drafter = make_drafter(small_target, head)
    limit = small_drafter.depth or shape.depth
    shape = TreeShape(min(shape.depth, limit), shape.width, min(shape.depth, limit) if shape.chain else shape.nodes)
    prompts = prompts_of(small_target)
    decoder = greedy(small_target, HeadProposer(small_drafter, shape), STOP)
    single = [decoder.generate([prompt], 24) for prompt in prompts]
    found = dict(decoder.answers(prompts, 24, batch_size=3))
    for number, generation in enumerate(single):
        assert found[number].tokens == generation.tokens
        assert found[number].accepted == generation.accepted


class Seldom(HeadProposer):
    """Drafts in every fifth round only, and reads then what was committed in between."""

    varies, number = True, 0

    def propose(self, sampling, generator):
        self.number += 1
        newest = torch.tensor([request.tokens[-1] for request in self.batch.requests])
        self.last = make_root(newest) if self.number % 5 else super().propose(sampling, generator)
        return self.last


@torch.inference_mode()
@pytest.mark.parametrize("head", HEADS)
def test_a_head_that_waits_reads_the_same_whoever_joins_and_leaves(small_target, head):
    """Each row's drafts are those of a head that reads its whole text at once."""
    drafter = make_drafter(small_target, head)
    shape = chain_of(min(3, drafter.depth or 3))
    seldom = Seldom(drafter, shape)
    batch = seldom.batch = greedy(small_target, seldom, STOP).batch()
    waiting = [Request(prompt, num) for prompt, num in zip(prompts_of(small_target), itertools.cycle([30, 4, 12, 19]))]
    joined = checked = 0
    while waiting or batch.running:
        num = min(3 - len(batch.running), len(waiting)) if len(waiting) % 3 or not batch.running else 0
        if num:
            joined += bool(batch.running)
            batch.admit([waiting.pop() for _ in range(num)])
        if batch.running:
            texts = {id(request): [*request.prompt, *request.tokens] for request in batch.running}
            step = batch.run_round()
            if not step.num_drafted:
                continue
            for request, tree in zip(batch.requests, seldom.last.tokens.tolist()):
                if not (text := texts.get(id(request))):
                    continue
                decoder = greedy(small_target, HeadProposer(drafter, shape), STOP)
                other = decoder.batch()
                other.admit([Request(text[:-1], 2)])
                assert other.proposer.propose(decoder.sampling, None).tokens[0].tolist() == tree
                checked += 1
    assert joined > 1 and checked > 10


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("head", [None, "eagle", "medusa", "dflash"])
def test_sampled_answers_are_those_of_each_prompt_alone(small_target, head, rule):
    """With random numbers of its own, an answer does not depend on the others of its batch, nor on rows that have ended."""
    proposer = head and HeadProposer(make_drafter(small_target, head), chain_of(2))
    sampling = Sampling(1.2, top_k=4, repetition_penalty=1.1)
    decoder = Decoder(small_target, proposer, sampling=sampling, stop=STOP, rule=rule)
    prompts = prompts_of(small_target)
    single = alone(decoder, prompts, 20)
    assert len(set(map(tuple, single))) > 8
    for rows in (2, 5):
        assert together(decoder, prompts, 20, rows) == single


SETTINGS = [
    Sampling(),
    Sampling(1.2),
    Sampling(repetition_penalty=1.3),
    Sampling(0.7, top_k=3),
    Sampling(1.0, top_p=0.8, repetition_penalty=0.8),
]


@pytest.mark.parametrize("proposer", ["none", "chain", "tree", "suffix", "auto"])
def test_rows_with_settings_of_their_own_are_answered_as_alone(small_target, proposer):
    """Greedy, sampled, cut and penalised rows that join one another, each with its own stop tokens too."""
    drafter = make_drafter(small_target, "eagle3")

    def make():
        suffix = text_proposers(small_target)["suffix"]
        return {
            "none": lambda: None,
            "chain": lambda: HeadProposer(drafter, chain_of(3)),
            "tree": lambda: HeadProposer(drafter, TREE),
            "suffix": suffix,
            "auto": lambda: AutoProposer(small_target, members=[suffix(), HeadProposer(drafter, TREE)]),
        }[proposer]()

    prompts, single = prompts_of(small_target), []
    ends = [Ends(frozenset({number % 6} if number % 3 else ())) for number in range(len(prompts))]
    settings = [SETTINGS[number % len(SETTINGS)] for number in range(len(prompts))]
    decides = proposer in ("suffix", "auto")  # how much is drafted depends on clocks, or on what was answered before
    for number, (prompt, sampling) in enumerate(zip(prompts, settings)):
        decoder = Decoder(small_target, make(), sampling=sampling, stop=set(ends[number].tokens))
        own = decoder.answers([prompt], 24, batch_size=1, generator=lambda _, number=number: seeded(number))
        single += [answer.tokens[0] for _, answer in own]
    batch = Decoder(small_target, make(), sampling=Sampling(), stop=STOP).batch()
    requests = [
        Request(prompt, 24, seeded(number), sampling, end)
        for number, (prompt, sampling, end) in enumerate(zip(prompts, settings, ends))
    ]
    waiting = list(requests)
    while waiting or batch.running:
        if waiting and len(batch.running) < 4:
            batch.admit([waiting.pop(0)])
        if batch.running:
            batch.run_round()
    for request, answer, sampling in zip(requests, single, settings):
        if sampling.greedy or not decides:
            assert request.tokens == answer
        assert request.ended == (request.tokens[-1] in request.ends.tokens)
    assert {request.ended for request in requests} == {True, False}


def test_a_proposer_is_told_when_laws_of_another_kind_are_asked_for(small_target):
    proposer = text_proposers(small_target)["suffix"]()
    kinds = []
    proposer.attach_verifier = lambda verifier, sampling: kinds.append(sampling.kind)
    decoder = Decoder(small_target, proposer, sampling=Sampling(), stop=set())
    batch = decoder.batch()
    batch.admit([Request([1, 2, 3], 4), Request([1, 2], 9, sampling=Sampling())])
    batch.run_round()
    assert kinds.pop() == "greedy" and kinds == ["greedy"]  # the decoder told it, and the batch as it began
    batch.admit([Request([3, 4], 3, sampling=Sampling(1.0))])
    batch.admit([Request([3, 4], 2, sampling=Sampling(1.0, top_k=2))])
    assert kinds == ["greedy", "sampled", "cut"]
    while batch.running:
        batch.run_round()
    assert kinds[-1] == "greedy"
    batch.admit([Request([3, 4], 1, sampling=Sampling(1.0))])
    decoder.batch().admit([Request([1, 2, 3], 4)])  # another batch, of the kind that the decoder has
    assert kinds[-2:] == ["sampled", "greedy"]


def test_requests_join_a_batch_that_grows_and_shrinks(small_target):
    """Any number of requests between rounds, into places of ended ones or beside the others."""
    prompts, draw = prompts_of(small_target), random.Random(1)
    plain = alone(greedy(small_target, None), prompts, 16)
    decoder = greedy(small_target, HeadProposer(make_drafter(small_target, "eagle3"), TREE))
    for _ in range(3):
        batch, waiting, sizes = decoder.batch(), [Request(prompt, 16) for prompt in prompts], set()
        requests = list(waiting)
        while waiting or batch.running:
            num = min(len(waiting), draw.choice([0, 0, 1, 1, 2, 4]) if batch.running else 1)
            if num:
                batch.admit(waiting[:num])
                waiting = waiting[num:]
            if batch.running:
                sizes.add(len(batch.run_round().requests))
        batch.close()
        assert [request.tokens for request in requests] == plain
        assert len(sizes) > 3


def test_a_request_that_is_given_up_leaves_its_row(small_target):
    prompts = prompts_of(small_target)[:3]
    plain = alone(greedy(small_target, None), prompts, 20)
    batch = greedy(small_target, None).batch()
    requests = [Request(prompt, 20) for prompt in prompts]
    batch.admit(requests)
    batch.run_round()
    requests[1].tokens_left = 0
    while batch.running:
        assert len(batch.run_round().requests) == 2
    assert [requests[0].tokens, requests[2].tokens] == [plain[0], plain[2]]
    assert requests[1].tokens == plain[1][:2]


def test_rows_that_have_ended_leave_unless_shapes_are_compiled(small_target):
    def rows_of(decoder: Decoder) -> list[int]:
        verify, rows = decoder.verify, []
        batch = decoder.batch()
        batch.verify = lambda tree, *arguments, **named: (
            rows.append(len(tree.tokens)) or verify(tree, *arguments, **named)
        )
        batch.verify.hidden_states = verify.hidden_states
        batch.admit([Request([1, 2, 3], num) for num in (4, 9, 20, 30)])
        while batch.running:
            batch.run_round()
        return rows

    found = rows_of(greedy(small_target, None))
    assert found == [4] * 3 + [3] * 5 + [2] * 11 + [1] * 10
    runner = Runner(False, cuda_graphs=True)
    runner.run_whole = lambda name, function, inputs, memory: function(*inputs)
    kept = rows_of(Decoder(small_target, None, sampling=Sampling(), stop=set(), runner=runner))
    assert kept == [4] * 29


def test_the_memory_of_ended_answers_helps_the_prompts_that_follow(small_target):
    """Of equal prompts, the second is drafted from the answer of the first, though a third one runs all the time."""
    text = random_tokens(5, 8, small_target.vocab_size)
    other_prompt = random_tokens(6, 9, small_target.vocab_size)
    proposer = Suffix(small_target, num=6, factor=2.0, offset=4, least=0.1, memory=500)
    batch = greedy(small_target, proposer).batch()
    first, second, third = Request(text, 20), Request(text, 20), Request(other_prompt, 200)
    batch.admit([first, third])
    for request in (first, second):
        if request is second:
            batch.admit([second])
        while request.tokens_left:
            batch.run_round()
    assert third.tokens_left and second.tokens == first.tokens
    assert len(second.generation.accepted[0]) < len(first.generation.accepted[0])
    fresh = greedy(small_target, Suffix(small_target, num=6, factor=2.0, offset=4, least=0.1, memory=500))
    assert fresh.generate([other_prompt], len(third.tokens)).tokens[0] == third.tokens


def test_times_are_shared_by_the_rows_that_ran(small_target):
    decoder, prompts = greedy(small_target, None), [[1, 2, 3]] * 3
    answers = [answer for _, answer in decoder.answers(prompts, 12, batch_size=2)]
    assert all(answer.seconds == pytest.approx(sum(answer.stages.values())) for answer in answers)
    assert all(answer.prefill_seconds > 0 and len(answer.accepted[0]) == 11 for answer in answers)


def test_bad_input_is_refused(small_target):
    decoder = greedy(small_target, None)
    with pytest.raises(ValueError, match="rows=0 must be at least 1"):
        list(decoder.answers([[1]], 4, batch_size=0))
    with pytest.raises(ValueError, match="every prompt at least one token"):
        list(decoder.answers([[1], []], 4, batch_size=2))


@pytest.mark.parametrize("name", ["none", "suffix", "eagle3", "draft", "medusa", "auto"])
def test_prompts_read_in_pieces_are_answered_as_read_whole(small_target, name):
    """Greedy answers and seeded ones, with what heads drafted; rounds of the others are between the pieces."""
    made = text_proposers(small_target)
    make = made.get(name) or (lambda: HeadProposer(make_drafter(small_target, name), chain_of(2)))
    prompts, distributions = prompts_of(small_target), [Sampling(), Sampling(1.0)]

    def answer(max_tokens: int | None) -> list:
        batch = greedy(small_target, make(), STOP).batch()
        requests = [Request(prompt, 16, seeded(n), distributions[n % 2]) for n, prompt in enumerate(prompts)]
        batch.admit(requests[:2])
        for joining in (requests[2:6], requests[6:]):
            prefill, pieces = batch.prefill(joining), 0
            while not prefill.complete:
                batch.read(prefill, max_tokens)
                pieces += 1
                if batch.running and max_tokens:
                    batch.run_round()
            assert pieces == (1 if max_tokens is None else max(prefill.counts))
            batch.admit(joining, prefill)
        while batch.running:
            batch.run_round()
        return [(request.tokens, request.generation.accepted) for request in requests]

    whole, pieces = answer(None), answer(4)  # of four prompts: a token of each
    assert [tokens for tokens, _ in pieces[::2]] == [tokens for tokens, _ in whole[::2]]
    assert [tokens[0] for tokens, _ in pieces] == [tokens[0] for tokens, _ in whole]
    if name not in ("suffix", "auto"):  # they draft from what was answered before
        assert pieces == whole


def test_prompts_whose_pieces_would_be_read_otherwise_are_read_whole(small_target, monkeypatch):
    batch = greedy(small_target, None).batch()
    for name, value in (("rotary_boundary", 100), ("rotary_boundary", None)):
        monkeypatch.setattr(small_target, name, value)
        prefill = batch.prefill([Request([1, 2, 3, 4], 4)])
        batch.read(prefill, 2)
        assert prefill.complete == (value is not None) and prefill.divisible == (value is None)
