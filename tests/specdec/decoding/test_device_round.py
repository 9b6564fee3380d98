"""Rounds that a device makes alone give the answers of rounds in which the host takes part."""

import pytest
import torch

from specdec.core import cache_memory, compile, fast, rules
from specdec.core.answer_text import StopStrings, TextDecoder
from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.batch import Request
from specdec.decoding.decoder import Decoder
from specdec.decoding.device_round import DeviceRound
from specdec.heads.draft import Draft
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target
from tests.support.compiled import prompts_of
from tests.support.drafters import make_drafter
from tests.support.graphs import StepRecorder
from tests.support.targets import make_target

CHAIN, TREE = TreeShape(4, 1, 4), TreeShape(3, 2, 6)
END = 3  # token that ends answers
ROUNDS = [
    (None, None, 0.0), ("eagle3", CHAIN, 0.0), ("eagle", TREE, 0.0), ("mtp", TreeShape(3, 1, 3), 0.0),
    (None, None, 1.0), ("eagle3", CHAIN, 1.0), ("eagle", TREE, 1.0), ("peagle", TreeShape(3, 1, 3), 1.0),
    ("medusa", TreeShape(3, 1, 3), 0.0), ("dflash", TreeShape(3, 1, 3), 0.0), ("dflash2", TREE, 1.0),
]  # fmt: skip


@pytest.fixture
def target() -> Target:
    return make_target(6, num_layers=3)


@pytest.fixture
def recorder(monkeypatch) -> StepRecorder:
    """Stands in for CUDA graphs, over caches that are read to their length."""
    with fast.force_paths("cache"):
        yield StepRecorder(monkeypatch)


def make_decoder(target: Target, head: str | None, shape, *, graphs: bool, temperature: float = 0.0, **settings):
    proposer = head and HeadProposer(make_drafter(target, head, True), shape, cuda_graphs=graphs)
    runner = Runner(False, cuda_graphs=graphs)
    decoder = Decoder(target, proposer, sampling=Sampling(temperature), stop={END}, runner=runner, **settings)
    if temperature:
        decoder.verify.rule = rules.accept_tokens_at_once  # that of a GPU
    return decoder


def list_prompts(target: Target) -> list[list[int]]:
    return [prompt for seed in range(4) for prompt in prompts_of(target, seed, (5, 9, 3))]


def answer_all(decoder: Decoder, prompts: list[list[int]], *, batch_size: int) -> list[tuple]:
    """Tokens and accepted drafts of each answer"""

    def make_generator(number: int) -> torch.Generator:
        return torch.Generator().manual_seed(number)

    answers = dict(decoder.answers(prompts, 30, batch_size=batch_size, generator=make_generator))
    return [(answers[number].tokens, answers[number].accepted) for number in range(len(prompts))]


@pytest.mark.parametrize("head, shape, temperature", ROUNDS)
def test_answers_are_those_of_rounds_with_the_host(target, recorder, head, shape, temperature):
    """Rows end and others join. Random numbers are those of each answer, in the order of its rounds."""
    prompts = list_prompts(target)
    settings = {"temperature": temperature}
    answers = answer_all(make_decoder(target, head, shape, graphs=False, **settings), prompts, batch_size=4)
    decoder = make_decoder(target, head, shape, graphs=True, **settings)
    assert answer_all(decoder, prompts, batch_size=4) == answers
    num_rounds = sum(len(accepted) for _, (accepted,) in answers)
    assert num_rounds / 4 <= recorder.num_starts < num_rounds / 2
    graphs = (decoder.proposer or decoder).runner.graphs
    assert len(graphs) == len(recorder.captured) == 1 and isinstance(next(iter(graphs.values())), DeviceRound)


def test_a_shared_generator_gives_the_draws_of_rounds_with_the_host(target, recorder):
    answers = []
    for graphs in (True, False):
        decoder = make_decoder(target, "eagle3", CHAIN, graphs=graphs, temperature=1.0)
        decoder.stop = set()  # of a row that has ended, only the device draws on
        generator = torch.Generator().manual_seed(0)
        generation = decoder.generate(prompts_of(target, 1), 20, generator=generator)
        answers.append([tokens[:14] for tokens in generation.tokens])  # until the first row has ended
    assert answers[0] == answers[1] and recorder.num_starts


def test_an_answer_costs_at_most_one_round_in_vain(target, recorder):
    for end in (set(), {END}):
        decoder = make_decoder(target, "eagle", TREE, graphs=True)
        decoder.stop = end
        recorder.num_starts = 0
        generation = decoder.generate(prompts_of(target, 2)[:1], 24)
        num_rounds = len(generation.accepted[0])
        assert num_rounds <= recorder.num_starts <= num_rounds + 1
        assert generation.stages["round"] == pytest.approx(generation.seconds) and not generation.stages["verify"]


def test_a_round_reads_lasting_memory_only(target, recorder):
    """Weights, K and V, its buffers, and constants. Later answers find them all in their places."""
    decoder = make_decoder(target, "eagle3", CHAIN, graphs=True)
    decoder.generate(prompts_of(target, 3), 20)
    (device_round,) = decoder.proposer.runner.graphs.values()
    buffers = device_round.buffers
    drafter = decoder.proposer.drafter
    lasting = [*target.model.parameters(), *target.model.buffers(), *drafter.parameters(), *drafter.buffers()]
    lasting += [drafter.goal_head[0], decoder.proposer.parents, decoder.proposer.numbers, *buffers.list_state()]
    lasting += [buffers.skipped, buffers.running, buffers.numbers, buffers.result]
    for memory in (*decoder.runner.memories.values(), decoder.proposer.memory):
        lasting += [group for groups in memory.free_groups for group in groups.values()]
    addresses = {tensor.untyped_storage().data_ptr() for tensor in lasting}
    (captured,) = recorder.captured
    foreign = [tensor for tensor in captured if tensor.untyped_storage().data_ptr() not in addresses]
    assert not [tensor for tensor in foreign if tensor.numel() > 1]


def test_requests_that_join_while_a_round_runs_get_their_own_answers(target, recorder):
    """One at a time. K and V are not copied when rows are added."""
    alone = make_decoder(target, "eagle3", CHAIN, graphs=False)
    answers = [alone.generate([prompt], 12).tokens[0] for prompt in list_prompts(target)]
    batch = make_decoder(target, "eagle3", CHAIN, graphs=True).batch(max_rows=4)
    requests = [Request(prompt, 12) for prompt in list_prompts(target)]
    sizes, addresses = [], set()
    for request in requests:
        while not batch.count_free(4):
            batch.run_round()
        batch.admit([request])
        sizes.append(len(batch.requests))
        addresses |= {group.data_ptr() for group in batch.cache.groups.values()}
        batch.run_round()
    while batch.running:
        batch.run_round()
    batch.close()
    assert [request.tokens for request in requests] == answers
    assert recorder.num_starts and len(addresses) == 1 and set(sizes) == {1, 2, 4}


def test_the_host_takes_part_where_it_must(target, recorder, monkeypatch):
    """For penalties, for requests with other settings, and where a round in vain would leave the positions."""
    prompts = prompts_of(target, 5)
    penalised = Sampling(repetition_penalty=1.5)
    for graphs, limit, sampling in ((True, None, penalised), (True, 9 + 16 + 8, Sampling())):
        answers = []
        for uses_graphs in (graphs, False):
            decoder = make_decoder(target, "eagle3", CHAIN, graphs=uses_graphs)
            monkeypatch.setattr(compile, "capture_graph", lambda function, inputs, pool: function)
            monkeypatch.setattr(target, "max_positions", limit)
            batch = decoder.batch()
            requests = [Request(prompt, 16, sampling=sampling) for prompt in prompts]
            batch.admit(requests)
            while batch.running:
                assert batch.run_round().tree is not None
            answers.append([request.tokens for request in requests])
        assert answers[0] == answers[1]
    assert not recorder.num_starts


def test_texts_that_end_an_answer_are_found_one_round_late(target, recorder):
    decoder = TextDecoder(lambda tokens: "".join("abcdef"[token] for token in tokens))
    answers = []
    for graphs in (True, False):
        drafted = make_decoder(target, "eagle", TREE, graphs=graphs, stop_strings=StopStrings(("ab", "cac"), decoder))
        drafted.stop = set()
        generations = [drafted.generate([prompt], 24) for prompt in prompts_of(target, 6)]
        answers.append([(generation.tokens, generation.accepted) for generation in generations])
    assert answers[0] == answers[1] and recorder.num_starts
    assert any(len(tokens) < 24 for (tokens,), _ in answers[0])


def answer_in_turn(decoder: Decoder, requests: list[Request], *, max_rows: int) -> list[list[int]]:
    """Tokens of requests of which each joins when the one before it has had a round."""
    batch = decoder.batch(max_rows=max_rows)
    for request in requests:
        batch.admit([request])
        if batch.running:
            batch.run_round()
    while batch.running:
        batch.run_round()
    batch.close()
    return [request.tokens for request in requests]


def test_a_longer_request_that_joins_gets_larger_memory(target, recorder):
    """Of target and head; the rows that run go on in it."""
    prompts = prompts_of(target, 8, (5, 9))
    answers = []
    for graphs in (True, False):
        decoder = make_decoder(target, "eagle3", CHAIN, graphs=graphs)
        decoder.stop = set()
        requests = [Request(prompts[0], 40), Request(prompts[1], 300)]
        answers.append(answer_in_turn(decoder, requests, max_rows=2))
    assert answers[0] == answers[1] and [len(tokens) for tokens in answers[0]] == [40, 300]
    assert len(recorder.captured) == 2  # one row, and two rows in larger memory


@pytest.mark.parametrize("shape", [TreeShape(6, 1, 6), TREE, TreeShape(1, 4, 8)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_in_vain_stay_within_memory_that_is_just_large_enough(target, recorder, monkeypatch, shape, temperature):
    """A row that has ended writes drafts in vain, as long as another one runs."""
    monkeypatch.setattr(cache_memory, "MIN_CAPACITY", 8)
    prompts, answers = prompts_of(target, 9, (5, 6)), []
    for graphs in (True, False):
        decoder = make_decoder(target, "eagle", shape, graphs=graphs, temperature=temperature)
        decoder.stop = set()
        num = 64 - len(prompts[0]) - decoder.batch().reserve
        generators = [torch.Generator().manual_seed(seed) for seed in range(2)]
        requests = [Request(*request) for request in zip(prompts, (num, num - 9), generators)]
        answers.append(answer_in_turn(decoder, requests, max_rows=2))
    assert answers[0] == answers[1] and recorder.num_starts
    assert {memory.capacity for memory in decoder.runner.memories.values()} <= {8, 64}


def test_a_row_that_ends_with_full_rounds_has_room_for_those_in_vain(target, recorder, monkeypatch):
    """The drafts are always right, so two rounds go past the end, and the row drafts on behind them."""
    monkeypatch.setattr(cache_memory, "MIN_CAPACITY", 8)
    drafter = Draft(target, model=make_target(6, num_layers=3)).to(target.dtype).eval().requires_grad_(False)
    runner = Runner(False, cuda_graphs=True)
    proposer = HeadProposer(drafter, TreeShape(6, 1, 6), cuda_graphs=True)
    decoder = Decoder(target, proposer, sampling=Sampling(), stop=set(), runner=runner)
    prompts = prompts_of(target, 9, (5, 6))
    for tokens_left in range(1, 8):  # of the first row before its last round
        num = 64 - len(prompts[0]) - decoder.batch().reserve
        requests = [Request(prompts[0], num), Request(prompts[1], num - 1 - tokens_left)]
        answers = answer_in_turn(decoder, requests, max_rows=2)
        assert [len(tokens) for tokens in answers] == [num, num - 1 - tokens_left]
        assert all(sum(request.generation.accepted[0]) > num / 2 for request in requests)
    assert recorder.num_starts
