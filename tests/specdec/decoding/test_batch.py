"""Tests of batches whose rows come and go: each answer is the one that its prompt gets alone."""

import itertools

import pytest
import torch

from specdec.core import cached_keys
from specdec.core.compile import Runner
from specdec.core.generation import Ends
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape, make_root
from specdec.decoding import decoder as decoder_module
from specdec.decoding.batch import Batch, Request
from specdec.decoding.decoder import Decoder
from specdec.decoding.prefill import Prefill
from specdec.proposers.auto import AutoProposer
from specdec.proposers.costs import make_costs
from specdec.proposers.heads import HeadProposer
from specdec.proposers.suffix import Suffix
from specdec.proposers.text import Ngram
from tests.support.decoding import chain_of, greedy, random_tokens
from tests.support.drafters import HEADS, make_drafter
from tests.support.loops import transformers_answer
from tests.support.targets import make_target
from tests.support.texts import repeating_texts

STOP = {2}
TREE = TreeShape(depth=3, width=2, nodes=5)


def prompts_of(target, num_random: int = 4) -> list[list[int]]:
    """More prompts than rows, of many lengths; their answers end at different times."""
    texts = [random_tokens(seed, 3 + 5 * seed % 17, target.vocab_size) for seed in range(num_random)]
    return [*texts, *repeating_texts(3, 12)]


def seeded(number: int) -> torch.Generator:
    return torch.Generator().manual_seed(number)


def answer_alone(target, prompts, num: int, stop=frozenset()) -> list[list[int]]:
    """Plain decoding's answer to each prompt alone."""
    decoder = greedy(target, None, stop)
    return [decoder.generate([prompt], num).tokens[0] for prompt in prompts]


def finish(batch: Batch) -> None:
    while batch.running:
        batch.run_round()


def make_suffix(target) -> Suffix:
    return Suffix(target, num=6, factor=2.0, offset=4, least=0.1, memory=500)


def make_proposer(target, name: str):
    """A proposer by name: of texts, of a head as a chain, or auto."""
    if name in HEADS:
        return HeadProposer(make_drafter(target, name), chain_of(2))
    if name == "auto":
        members = [make_proposer(target, member) for member in ("eagle3", "suffix", "ngram")]
        free = make_costs(dict.fromkeys(range(1, 10), 1.0), plain=1.0, absorb=0.0, step=0.0)
        return AutoProposer(target, members=members, costs=free)
    makers = {
        "none": lambda: None,
        "suffix": lambda: make_suffix(target),
        "ngram": lambda: Ngram(target, min=1, max=3, num=4),
    }
    return makers[name]()


def fix_shapes() -> Runner:
    """A runner whose shapes are fixed, as if they were compiled: finished rows stay."""
    runner = Runner(False, cuda_graphs=True)
    runner.run_whole = lambda name, function, inputs, memory: function(*inputs)
    return runner


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("name", ["none", "suffix", "ngram", "auto"])
def test_greedy_answers_are_those_of_each_prompt_alone(small_target, name, batch_size):
    prompts = prompts_of(small_target)
    plain = answer_alone(small_target, prompts, 30, STOP)
    assert len({len(answer) for answer in plain}) > 3  # they end at different times
    decoder = greedy(small_target, make_proposer(small_target, name), STOP)
    answers = dict(decoder.answers(prompts, 30, batch_size=batch_size))
    assert [answers[number].tokens[0] for number in range(len(prompts))] == plain
    for answer in answers.values():
        assert len(answer.tokens[0]) <= 1 + sum(count + 1 for count in answer.accepted[0])
        assert len(answer.accepted[0]) == len(answer.drafted)


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
    single = [decoder.generate([prompt], 16) for prompt in prompts]
    answers = dict(decoder.answers(prompts, 16, batch_size=3))
    for number, generation in enumerate(single):
        assert answers[number].tokens == generation.tokens and answers[number].accepted == generation.accepted


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
    waiting = list(map(Request, prompts_of(small_target, 7), itertools.cycle([30, 4, 12, 19])))
    joined = checked = 0
    while waiting or batch.running:
        joined += admit_some(batch, waiting)
        texts = {id(request): [*request.prompt, *request.tokens] for request in batch.running}
        if not texts or not batch.run_round().num_drafted:
            continue
        for request, tree in zip(batch.requests, seldom.last.tokens.tolist()):
            if id(request) in texts:
                assert draft_at_once(small_target, HeadProposer(drafter, shape), texts[id(request)]) == tree
                checked += 1
    assert joined > 3 and checked > 10


def admit_some(batch: Batch, waiting: list[Request]) -> bool:
    """Fills the rows, but not at each fourth number of waiting ones -> whether requests joined others"""
    joins = bool(batch.running)
    if joins and len(waiting) % 4 == 0:
        return False
    joining = [waiting.pop() for _ in range(min(batch.count_free(3), len(waiting)))]
    if joining:
        batch.admit(joining)
    return joins and bool(joining)


def draft_at_once(target, proposer, text: list[int]) -> list[int]:
    """The tokens of the first tree after a text."""
    decoder = greedy(target, proposer, STOP)
    batch = decoder.batch()
    batch.admit([Request(text[:-1], 2)])
    return proposer.propose(decoder.sampling, None).tokens[0].tolist()


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("head", [None, "eagle", "medusa", "dflash"])
def test_sampled_answers_are_those_of_each_prompt_alone(small_target, head, rule):
    """With random numbers of its own, an answer depends neither on other rows nor on rows that have ended."""
    proposer = head and HeadProposer(make_drafter(small_target, head), chain_of(2))
    sampling = Sampling(1.2, top_k=4, repetition_penalty=1.1)
    decoder = Decoder(small_target, proposer, sampling=sampling, stop=STOP, rule=rule)
    prompts, single = prompts_of(small_target), []
    for number, prompt in enumerate(prompts):
        ((_, answer),) = decoder.answers([prompt], 20, batch_size=1, generator=lambda _, n=number: seeded(n))
        single.append(answer.tokens)
    assert len(set(map(str, single))) > 8
    for batch_size in (2, 5):
        answers = dict(decoder.answers(prompts, 20, batch_size=batch_size, generator=seeded))
        assert [answers[number].tokens for number in range(len(prompts))] == single


SETTINGS = [
    Sampling(),
    Sampling(1.2),
    Sampling(repetition_penalty=1.3),
    Sampling(0.7, top_k=3),
    Sampling(1.0, top_p=0.8, repetition_penalty=0.8),
]


@pytest.mark.parametrize("name", ["none", "chain", "tree", "suffix", "auto"])
def test_rows_with_settings_of_their_own_are_answered_as_alone(small_target, name):
    """Greedy, sampled, cut and penalised rows that join one another, each with its own stop tokens too."""
    drafter = make_drafter(small_target, "eagle3")

    def make():
        if name in ("chain", "tree"):
            return HeadProposer(drafter, TREE if name == "tree" else chain_of(3))
        if name == "auto":
            return AutoProposer(small_target, members=[make_suffix(small_target), HeadProposer(drafter, TREE)])
        return make_proposer(small_target, name)

    requests, single = [], []
    for number, prompt in enumerate(prompts_of(small_target)):
        ends = Ends(frozenset({number % 6} if number % 3 else ()))
        sampling = SETTINGS[number % len(SETTINGS)]
        decoder = Decoder(small_target, make(), sampling=sampling, stop=set(ends.tokens))
        generation = decoder.generate([prompt], 24, generator=seeded(number))
        single.append(generation.tokens[0])
        requests.append(Request(prompt, 24, seeded(number), sampling, ends))
    batch = Decoder(small_target, make(), sampling=Sampling(), stop=STOP).batch()
    waiting = list(requests)
    while waiting or batch.running:
        if waiting and len(batch.running) < 4:
            batch.admit([waiting.pop(0)])
        if batch.running:
            batch.run_round()
    for request, answer in zip(requests, single):
        # The amount of drafts of these depends on clocks, or on earlier answers, and so do their draws
        if request.sampling.greedy or name not in ("suffix", "auto"):
            assert request.tokens == answer
        assert request.ended == (request.tokens[-1] in request.ends.tokens)
    assert {request.ended for request in requests} == {True, False}


@pytest.mark.parametrize("name", ["none", "ngram", "eagle3"])
def test_a_penalty_applies_to_the_prompt_and_to_every_token_of_the_answer(name):
    """As in transformers; also in a row that joins later, and with tokens that a request names."""
    target = make_target(12)  # more tokens than the prompts have, so that a penalty changes answers
    sampling, prompts = Sampling(repetition_penalty=1.3), repeating_texts(3, 12)[:3]
    batch = Decoder(target, make_proposer(target, name), sampling=sampling, stop=set()).batch()
    named = torch.zeros(target.vocab_size, dtype=torch.bool)
    requests = [Request(prompt, 30) for prompt in prompts] + [Request(prompts[0], 30, penalised=named)]
    batch.admit(requests[:2])
    batch.run_round()
    batch.admit(requests[2:])
    while batch.running:
        batch.run_round()
        for request, marks in zip(batch.requests, batch.penalised_tokens):
            prompt = [] if request is requests[3] else request.prompt
            assert {*prompt, *request.tokens} <= {*marks.nonzero()[:, 0].tolist()} | {request.tokens[-1]}
            assert len(request.tokens) == 30 or set(marks.nonzero()[:, 0].tolist()) == {*prompt, *request.tokens}
    for request in requests[:3]:
        assert request.tokens == transformers_answer(target, request.prompt, 30, 1.3)
    plain = [transformers_answer(target, prompt, 30) for prompt in prompts]
    assert plain != [request.tokens for request in requests[:3]]


@pytest.mark.parametrize("name", ["none", "ngram", "eagle3"])
def test_a_finished_row_that_stays_commits_nothing(small_target, name):
    """Where shapes are fixed, its text, its cache and what the proposer reads of it end with its answer."""
    proposer = make_proposer(small_target, name)
    batch = Decoder(small_target, proposer, sampling=Sampling(), stop=set(), runner=fix_shapes()).batch()
    short, long = (Request(prompt, num) for prompt, num in zip(repeating_texts(3, 12), (4, 40)))
    committed = []
    if proposer:
        commit = proposer.commit
        proposer.commit = lambda *arguments: committed.append(arguments[3]) or commit(*arguments)
    batch.admit([short, long])
    while short.tokens_left:
        batch.run_round()
    length, num_commits = batch.cache.host_lengths[0], len(committed)
    finish(batch)
    assert batch.requests == [short, long] and len(short.tokens) == 4 and len(long.tokens) == 40
    assert batch.cache.host_lengths == batch.cache.lengths.tolist()
    assert batch.cache.host_lengths[0] == length < batch.cache.host_lengths[1]
    assert {counts[0] for counts in committed[num_commits:]} == ({0} if proposer else set())


def test_a_proposer_is_told_when_laws_of_another_kind_are_asked_for(small_target):
    proposer, kinds = make_suffix(small_target), []
    proposer.attach_verifier = lambda verifier, sampling: kinds.append(sampling.kind)
    decoder = greedy(small_target, proposer)
    batch = decoder.batch()
    batch.admit([Request([1, 2, 3], 4), Request([1, 2], 9, sampling=Sampling())])
    batch.run_round()
    assert kinds.pop() == "greedy" and kinds == ["greedy"]  # the decoder told it, and the batch as it began
    batch.admit([Request([3, 4], 3, sampling=Sampling(1.0))])
    batch.admit([Request([3, 4], 2, sampling=Sampling(1.0, top_k=2))])
    assert kinds == ["greedy", "sampled", "cut"]
    finish(batch)
    assert kinds[-1] == "greedy"
    batch.admit([Request([3, 4], 1, sampling=Sampling(1.0))])
    decoder.batch().admit([Request([1, 2, 3], 4)])  # another batch, of the kind that the decoder has
    assert kinds[-2:] == ["sampled", "greedy"]


def test_a_request_that_is_given_up_leaves_its_row(small_target):
    prompts = prompts_of(small_target)[:3]
    plain = answer_alone(small_target, prompts, 20)
    batch = greedy(small_target, None).batch()
    requests = [Request(prompt, 20) for prompt in prompts]
    batch.admit(requests)
    batch.run_round()
    requests[1].tokens_left = 0
    while batch.running:
        assert len(batch.run_round().requests) == 2
    assert [request.tokens for request in requests] == [plain[0], plain[1][:2], plain[2]]


@pytest.mark.parametrize("runner, sizes", [(None, [4] * 3 + [3] * 5 + [2] * 11 + [1] * 10), (fix_shapes(), [4] * 29)])
def test_rows_that_have_ended_leave_unless_shapes_are_compiled(small_target, runner, sizes):
    decoder = Decoder(small_target, None, sampling=Sampling(), stop=set(), runner=runner)
    batch, rows = decoder.batch(), []
    batch.admit([Request([1, 2, 3], num) for num in (4, 9, 20, 30)])
    while batch.running:
        rows.append(len(batch.run_round().tree.tokens))
    assert rows == sizes


def test_the_memory_of_ended_answers_helps_the_prompts_that_follow(small_target):
    """Of equal prompts, the second is drafted from the answer of the first, though a third one runs all the time."""
    text, other_text = (random_tokens(seed, num, small_target.vocab_size) for seed, num in ((5, 8), (6, 9)))
    batch = greedy(small_target, make_suffix(small_target)).batch()
    first, second = Request(text, 20), Request(text, 20)
    third = Request(other_text, 200)
    batch.admit([first, third])
    for request in (first, second):
        if request is second:
            batch.admit([second])
        while request.tokens_left:
            batch.run_round()
    assert third.tokens_left and second.tokens == first.tokens
    assert len(second.generation.accepted[0]) < len(first.generation.accepted[0])
    decoder = greedy(small_target, make_suffix(small_target))
    assert decoder.generate([other_text], len(third.tokens)).tokens[0] == third.tokens


def test_times_are_shared_by_the_rows_that_ran(small_target):
    decoder, prompts = greedy(small_target, None), [[1, 2, 3]] * 3
    answers = [answer for _, answer in decoder.answers(prompts, 12, batch_size=2)]
    assert all(answer.seconds == pytest.approx(sum(answer.stages.values())) for answer in answers)
    assert all(answer.prefill_seconds > 0 and len(answer.accepted[0]) == 11 for answer in answers)
    single = decoder.generate([[1, 2, 3]], 2)  # a CPU knows the times of a round at its end
    assert len(single.drafted) == 1 and all(single.stages[name] > 0 for name in ("draft", "verify", "keep", "other"))


@pytest.mark.parametrize("name", ["none", "eagle3"])
def test_no_more_rows_run_than_asked_for(small_target, name):
    decoder = greedy(small_target, make_proposer(small_target, name), STOP)
    batch = decoder.batch()
    decoder.batch = lambda **options: batch
    sizes = {len(batch.running) for _ in decoder.rounds(prompts_of(small_target), 30, batch_size=3)}
    assert max(sizes) == 3


@pytest.mark.parametrize("name", ["eagle3", "suffix", "auto"])
def test_long_prompts_are_read_in_fewer_rows_and_in_pieces(small_target, name, monkeypatch):
    prompts, sizes = prompts_of(small_target), []
    advance = Prefill.advance
    monkeypatch.setattr(decoder_module, "READ_TOGETHER", 24)
    monkeypatch.setattr(cached_keys, "CPU_PIECE_TOKENS", 5)

    def record(prefill, max_tokens=None):
        start = prefill.num_read
        advance(prefill, max_tokens)
        sizes.append((len(prefill.counts), max(prefill.counts), prefill.num_read - start))

    monkeypatch.setattr(Prefill, "advance", record)
    decoder = greedy(small_target, make_proposer(small_target, name), STOP)
    answers = dict(decoder.answers(prompts, 20, batch_size=4))
    assert [answers[number].tokens[0] for number in range(len(prompts))] == answer_alone(
        small_target, prompts, 20, STOP
    )
    recorded = sizes[: -len(prompts)]  # without the last decoder's
    if decoder.batch().joins:
        assert all(rows == 1 or rows * longest <= 24 for rows, longest, _ in recorded)
    assert max(size for *_, size in recorded) == 5


def test_bad_input_is_refused(small_target):
    decoder = greedy(small_target, None)
    with pytest.raises(ValueError, match="rows=0 must be at least 1"):
        list(decoder.answers([[1]], 4, batch_size=0))
    with pytest.raises(ValueError, match="every prompt at least one token"):
        list(decoder.answers([[1], []], 4, batch_size=2))


@pytest.mark.parametrize("name", ["none", "suffix", "eagle3", "draft", "medusa", "auto"])
def test_prompts_read_in_pieces_are_answered_as_read_whole(small_target, name):
    """Greedy answers and seeded ones, with what heads drafted; rounds of the others are between the pieces."""
    samplings = itertools.cycle([Sampling(), Sampling(1.0)])
    prompts = [*enumerate(zip(prompts_of(small_target), samplings))]

    def answer(max_tokens: int | None) -> list:
        batch = greedy(small_target, make_proposer(small_target, name), STOP).batch()
        requests = [Request(prompt, 16, seeded(number), sampling) for number, (prompt, sampling) in prompts]
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
        finish(batch)
        return [(request.tokens, request.generation.accepted) for request in requests]

    whole, pieces = answer(None), answer(4)  # of four prompts: a token of each
    assert [tokens for tokens, _ in pieces[::2]] == [tokens for tokens, _ in whole[::2]]
    assert [tokens[0] for tokens, _ in pieces] == [tokens[0] for tokens, _ in whole]
    if name not in ("suffix", "auto"):  # they draft from earlier answers
        assert pieces == whole


def test_prompts_whose_pieces_would_be_read_otherwise_are_read_whole(small_target, monkeypatch):
    batch = greedy(small_target, None).batch()
    for boundary in (100, None):
        monkeypatch.setattr(small_target, "rotary_boundary", boundary)
        prefill = batch.prefill([Request([1, 2, 3, 4], 4)])
        batch.read(prefill, 2)
        assert prefill.complete == (boundary is not None) and small_target.divisible == (boundary is None)


def test_an_error_before_the_first_round_is_told_as_it_is(small_target, monkeypatch):
    """Not as that of a proposer that is closed before it has begun."""
    decoder = greedy(small_target, make_proposer(small_target, "eagle3"))

    def run_out(self, requests, prefill):
        raise MemoryError("no memory is left")

    monkeypatch.setattr(Batch, "_start_answers", run_out)
    with pytest.raises(MemoryError, match="no memory is left"):
        decoder.generate([[1, 2, 3]], 8)
