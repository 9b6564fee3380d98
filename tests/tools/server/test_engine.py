"""Tests of the thread that decodes: every request gets its own answer, whatever the others do."""

import contextlib
import queue

import pytest
import torch

from specdec.core.generation import Ends
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Batch
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.tools.server.engine import Engine
from specdec.tools.server.lane import End, Job, Lane, ServedRound
from tests.support.decoding import chain_of, greedy, random_tokens
from tests.support.drafters import make_drafter

STOP, GREEDY = {2}, Sampling()


class Client:
    """A job, and its events. endless: no token ends the answer"""

    def __init__(self, prompt, num=12, sampling=GREEDY, *, endless: bool = False, **fields):
        self.events: queue.Queue = queue.Queue()
        fields.setdefault("deliver", self.events.put)
        self.job = Job(prompt, num, sampling, Ends(frozenset() if endless else frozenset(STOP)), **fields)
        self.rounds: list[ServedRound] = []

    def ask(self, engine: Engine) -> "Client":
        assert engine.submit(self.job)
        return self

    def wait(self) -> End:
        while not isinstance(event := self.events.get(timeout=60), End):
            self.rounds.append(event)
        assert self.events.empty()
        return event

    def call_after_two_events(self, do) -> None:
        self.job.deliver = lambda event: (self.events.put(event), self.events.qsize() == 2 and do())

    @property
    def tokens(self) -> list[int]:
        return [token for each in self.rounds for token in each.tokens]


def make_clients(samplings: list[Sampling], speculate: bool) -> list[Client]:
    return [Client([3, 4], 6, sampling, speculate=speculate) for sampling in samplings]


def ask_all(engine: Engine, clients: list[Client]) -> None:
    for client in clients:
        client.ask(engine)


@pytest.fixture(scope="module")
def drafter(small_target):
    return make_drafter(small_target, "eagle3")


def decoder(target, drafter=None) -> Decoder:
    proposer = HeadProposer(drafter, chain_of(3)) if drafter else None
    return Decoder(target, proposer, sampling=Sampling(), stop=STOP)


def make_engine(target, drafter, *, rows=3, queue=64, **settings) -> Engine:
    return Engine(decoder(target, drafter), decoder(target), max_requests=rows, max_waiting=queue, **settings)


@contextlib.contextmanager
def at_work(engine: Engine):
    """Within, its thread runs. At the end everything that was submitted has ended."""
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()
    assert not engine.alive and engine.num_running == engine.num_waiting == 0


@pytest.fixture
def engine(small_target, drafter):
    with at_work(make_engine(small_target, drafter)) as engine:
        yield engine


def test_others_go_on_while_a_long_prompt_is_read(small_target, drafter):
    alone = greedy(small_target, None, STOP)
    prompt = random_tokens(1, 90, 6)
    answers = [alone.generate([each], 12).tokens[0] for each in (prompt, [1, 2, 3])]
    lane = Lane(decoder(small_target, drafter), 3, 8)
    short, long, gone, late = Client([1, 2], 200, endless=True), *(Client(p, 12) for p in (prompt, prompt, [1, 2, 3]))
    lane.waiting.append(short.job)
    assert lane.run_round() is not None
    lane.waiting.extend([long.job, gone.job])
    for number in range(23):  # 8 tokens are 4 of each
        assert long.events.empty()
        step = lane.run_round()
        assert short.job.request in step.requests and step.tokens[step.requests.index(short.job.request)]
        lane.deliver_round(step)
        if number == 3:
            lane.give_up(gone.job)
            lane.waiting.append(late.job)  # it waits until they are read
    assert long.events.get().tokens == answers[0][:1] and gone.events.empty() and late.events.empty()
    while lane.jobs:
        if step := lane.run_round():
            lane.deliver_round(step)
    assert long.job.request.tokens == answers[0] and late.job.request.tokens == answers[1]
    lane.waiting.append(long.job)
    lane.waiting[0].request.tokens_left = 5
    lane.run_round()
    lane.give_up(long.job)
    assert lane.reading is None and lane.run_round() is None


def test_a_round_that_fails_ends_its_requests_only(small_target, drafter, monkeypatch):
    engine, step, faults = make_engine(small_target, drafter), Batch.run_round, [MemoryError("no memory is left")]
    plain = greedy(small_target, None, STOP).generate([[1, 2]], 30).tokens[0]

    def broken(batch):
        if faults and batch.proposer:
            raise faults.pop()
        return step(batch)

    monkeypatch.setattr(Batch, "run_round", broken)
    clients = [Client([1, 2], 30, speculate=speculate).ask(engine) for speculate in (True, False)]
    with at_work(engine):
        end = clients[0].wait()
        assert end.reason == "error" and "no memory is left" in end.message
        clients[1].wait()
        again = Client([1, 2], 30).ask(engine)
        again.wait()
    assert clients[1].tokens == again.tokens == plain


def test_a_client_whose_events_cannot_be_delivered_disturbs_nobody(engine):
    def raise_it(_):
        raise RuntimeError("the event loop is closed")

    Client([1, 2], 50, deliver=raise_it).ask(engine)
    good = Client([1, 2], 8).ask(engine)
    good.wait()
    assert len(good.tokens) == 8 or good.tokens[-1] in STOP
    with pytest.raises(ValueError, match="at least one token"):
        Client([]).ask(engine)


# Rows whose distributions have no token

NO_TOKENS = [Sampling(t, repetition_penalty=7.0) for t in (0.8, 0.0)]  # `without_numbers` takes their logits
COLD = [Sampling(t) for t in (1e-38, 1e-45, 1e-30, 1e-12)]  # temperatures at which one token is left


def without_numbers(sampling, logits, seen):
    return torch.full_like(logits, torch.nan) if sampling.repetition_penalty == 7.0 else logits


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(0.8), GREEDY], ids=["sampled", "greedy"])
def test_a_row_without_a_token_ends_alone(small_target, drafter, monkeypatch, speculate, sampling):
    monkeypatch.setattr(Sampling, "penalise", without_numbers)
    alone, accompanied = (Client([5, 1, 3], 40, sampling, seed=1, speculate=speculate, endless=True) for _ in range(2))
    bad, tiny, (plain,) = (make_clients(samplings, speculate) for samplings in (NO_TOKENS, COLD, [GREEDY]))
    with at_work(make_engine(small_target, drafter, rows=4)) as engine:
        assert alone.ask(engine).wait().reason == "length"
        plain.ask(engine).wait()
        accompanied.call_after_two_events(lambda: ask_all(engine, [*bad, *tiny]))
        accompanied.ask(engine)
        ends = [client.wait() for client in (*bad, *tiny, accompanied)]
    assert accompanied.tokens == alone.tokens and len(alone.tokens) == 40
    assert [client.tokens for client in tiny] == [plain.tokens] * 4 and [client.tokens for client in bad] == [[], []]
    assert [end.reason for end in ends[:2]] == ["error", "error"] and ends[-1].reason == "length"
    for end in ends[:2]:
        assert end.message.startswith("No token can follow the answer's first 0: ")


def test_prompts_that_cannot_be_read_do_not_end_what_runs(small_target, drafter, monkeypatch):
    read, running, bad = Batch.read, Client([5, 1, 3], 30, endless=True), Client([3, 4], 6)

    def failing(batch, prefill, max_tokens=None):
        if prefill.tokens.tolist() == [bad.job.prompt]:
            raise MemoryError("no room")
        return read(batch, prefill, max_tokens)

    monkeypatch.setattr(Batch, "read", failing)
    with at_work(make_engine(small_target, drafter)) as engine:
        running.call_after_two_events(lambda: bad.ask(engine))
        running.ask(engine)
        assert bad.wait().message == "The server could not decode this (MemoryError: no room)."
        assert running.wait().reason == "length" and len(running.tokens) == 30
