"""Tests of the thread that decodes: every request gets its own answer, whatever the others do."""

import gc
import queue
import threading
import time
import weakref
from dataclasses import replace

import pytest
import torch

from specdec.core.generation import Ends, reached
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Batch
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.server.engine import End, Engine, Job, Lane, Round
from tests.support import Scripted, chain_of, greedy, make_drafter, oracle, random_tokens

STOP, GREEDY = {2}, Sampling()


class Client:
    """A job, and its events."""

    def __init__(self, prompt, num=12, sampling=GREEDY, **more):
        self.events: queue.Queue = queue.Queue()
        more.setdefault("deliver", self.events.put)
        self.job = Job(prompt, num, sampling, Ends(frozenset(STOP)), **more)
        self.rounds: list[Round] = []

    def wait(self) -> End:
        while not isinstance(event := self.events.get(timeout=60), End):
            self.rounds.append(event)
        assert self.events.empty()
        return event

    @property
    def tokens(self) -> list[int]:
        return [token for each in self.rounds for token in each.tokens]


@pytest.fixture(scope="module")
def drafter(small_target):
    return make_drafter(small_target, "eagle3")


def make_engine(target, drafter, *, rows=3, queue=64, **more) -> Engine:
    drafted = Decoder(target, HeadProposer(drafter, chain_of(3)), sampling=Sampling(), stop=STOP)
    return Engine(drafted, Decoder(target, None, sampling=Sampling(), stop=STOP), rows=rows, queue=queue, **more)


@pytest.fixture
def engine(small_target, drafter):
    engine = make_engine(small_target, drafter)
    engine.start()
    yield engine
    engine.stop()
    assert not engine.alive


def prompts(num: int) -> list[list[int]]:
    return [random_tokens(seed, 2 + seed % 7, 6) for seed in range(num)]


def test_every_request_gets_the_answer_that_it_gets_alone(small_target, engine):
    decoder = greedy(small_target, None, STOP)  # before the engine uses the target: threads must not share it
    clients = [Client(prompt, 4 + number % 9, speculate=bool(number % 3)) for number, prompt in enumerate(prompts(24))]
    alone = [decoder.generate([each.job.prompt], each.job.max_new_tokens).tokens[0] for each in clients]
    for client in clients:
        assert engine.submit(client.job)
    for number, (client, answer) in enumerate(zip(clients, alone)):
        end = client.wait()
        assert client.tokens == answer
        assert end.reason == ("stop" if answer[-1] in STOP else "length")
        assert client.rounds[0].drafted is None and all(each.rows <= 3 for each in client.rounds)
        assert {each.drafted for each in client.rounds[1:]} <= ({3} if number % 3 else {0})
    assert engine.num_running == engine.num_waiting == 0


def test_drafts_are_replaced_between_rounds_and_no_request_is_dropped(small_target, drafter):
    decoder = greedy(small_target, None, STOP)
    answer = lambda prompt: decoder.generate([prompt], 30).tokens[0]
    pairs = sorted(((prompt, answer(prompt)) for prompt in prompts(60)), key=lambda pair: -len(pair[1]))[:12]
    clients, alone = [Client(prompt, 30) for prompt, _ in pairs], [tokens for _, tokens in pairs]
    clients[2].job.speculate = False
    engine, threads = make_engine(small_target, drafter, rows=2), []
    old = engine.lanes[True]

    def make() -> Decoder:
        threads.append(threading.current_thread())
        proposer = HeadProposer(make_drafter(small_target, "medusa"), chain_of(2))
        return Decoder(small_target, proposer, sampling=Sampling(), stop=STOP)

    def swap_in_the_middle(event) -> None:
        if clients[0].events.qsize() == 2:
            engine.swap(make)
        clients[0].events.put(event)

    clients[0].job.deliver = swap_in_the_middle
    for client in clients[:9]:
        engine.submit(client.job)
    engine.start()
    try:
        ends = [client.wait() for client in clients[1:9]]
        assert threads == [engine.thread] and engine.lanes[True] is not old
        for client in clients[9:]:
            engine.submit(client.job)
        ends += [client.wait() for client in (clients[0], *clients[9:])]
        with pytest.raises(ZeroDivisionError):
            engine.swap(lambda: 1 / 0).result(timeout=60)
        last = Client(pairs[0][0], 30)
        engine.submit(last.job)
        last.wait()
    finally:
        engine.stop()
    assert [client.tokens for client in clients] == alone and last.tokens == alone[0]
    assert {end.reason for end in ends} <= {"stop", "length"}
    drafted = [{each.drafted for each in client.rounds[1:]} for client in clients]
    assert drafted[:3] == [{3}, {3}, {0}]  # what had begun ended with the old drafts
    assert all(each == {2} for each in drafted[3:]) and {each.drafted for each in last.rounds[1:]} == {2}
    assert not engine.leaving and engine.num_running == engine.num_waiting == 0


def test_a_swap_is_done_when_the_engine_has_taken_it(small_target, drafter):
    new = lambda: Decoder(small_target, HeadProposer(drafter, chain_of(2)), sampling=Sampling(), stop=STOP)
    engine = make_engine(small_target, drafter, head="first")
    old = weakref.ref(engine.lanes[True])
    early, late = engine.swap(lambda: 1 / 0), engine.swap(new, "second")
    assert early.cancelled() and not late.done()
    engine.start()
    try:
        late.result(timeout=60)
        clients = [Client(prompts(1)[0]), Client(prompts(1)[0], speculate=False)]
        for client in clients:
            engine.submit(client.job)
            client.wait()
        assert [client.job.head for client in clients] == ["second", None]
        gc.collect()
        assert old() is None
    finally:
        engine.stop()


def test_a_seed_gives_the_same_answer_beside_others(engine):
    def ask(beside: int) -> list[int]:
        clients = [
            Client([1, 3, 5], 20, Sampling(1.0), seed=7),
            *(Client(p, 20, Sampling(1.3)) for p in prompts(beside)),
        ]
        for client in clients:
            engine.submit(client.job)
        for client in clients:
            client.wait()
        return clients[0].tokens

    alone = ask(0)
    assert ask(5) == alone
    others = [Client([1, 3, 5], 20, Sampling(1.0)) for _ in range(6)]
    for client in others:
        engine.submit(client.job)
        client.wait()
    assert len({tuple(client.tokens) for client in others}) > 1  # without a seed, each has another one


def test_trees_are_told_to_those_who_watch(engine):
    client, silent = Client([1, 2, 3], 16, watch=True), Client([1, 2, 3], 16)
    for each in (client, silent):
        engine.submit(each.job)
        each.wait()
    assert all(each.tree is None for each in silent.rounds) and client.tokens == silent.tokens
    for before, each in zip(client.rounds, client.rounds[1:]):
        tokens, parents, accepted = each.tree
        assert tokens[0] == before.tokens[-1] and parents == [-1, 0, 1, 2]
        drafts = [tokens[node] for node in accepted[1:]]
        assert drafts[: each.accepted] == each.tokens[: each.accepted]
        assert len(drafts) == each.accepted or each is client.rounds[-1]


def test_an_accepted_draft_that_ends_the_answer_is_told_as_accepted(small_target):
    """It belongs to the tree's accepted nodes, though the answer has no token behind it."""
    prompt = [1, 2, 3]
    text = prompt + greedy(small_target, None).generate([prompt], 40).tokens[0]
    drafted, plain = greedy(small_target, Scripted([text], 3, oracle(3))), greedy(small_target, None)
    end = text[5]  # the first token is read off the prompt, the next two are drafts
    engine, client = Engine(drafted, plain, rows=1, queue=4), Client(prompt, 20, watch=True)
    client.job.request.ends = Ends(frozenset({end}))
    engine.submit(client.job)
    engine.start()
    assert client.wait().reason == "stop" and end not in text[3:5]
    engine.stop()
    _, last = client.rounds
    tokens, _, accepted = last.tree
    assert last.tokens == text[4:6] and accepted == [0, 1, 2, 3]
    assert [tokens[node] for node in accepted] == text[3:7]


def test_others_go_on_while_a_long_prompt_is_read(small_target, drafter):
    alone = greedy(small_target, None, STOP)
    prompt = random_tokens(1, 90, 6)
    answers = [alone.generate([each], 12).tokens[0] for each in (prompt, [1, 2, 3])]
    lane = Lane(Decoder(small_target, HeadProposer(drafter, chain_of(3)), sampling=Sampling(), stop=STOP), 3, 8)
    short, long, gone = Client([1, 2], 200), Client(prompt, 12), Client(prompt, 12)
    late = Client([1, 2, 3], 12)
    short.job.request.ends = Ends(frozenset())
    lane.waiting.append(short.job)
    assert lane.advance() is not None
    lane.waiting.extend([long.job, gone.job])
    for number in range(23):  # 8 tokens are 4 of each
        assert long.events.empty()
        step = lane.advance()
        assert short.job.request in step.requests and step.tokens[step.requests.index(short.job.request)]
        lane.hand_out(step)
        if number == 3:
            lane.give_up(gone.job)
            lane.waiting.append(late.job)  # it waits until they are read
    assert long.events.get().tokens == answers[0][:1] and gone.events.empty() and late.events.empty()
    while lane.jobs:
        if step := lane.advance():
            lane.hand_out(step)
    assert long.job.request.tokens == answers[0] and late.job.request.tokens == answers[1]
    lane.waiting.append(long.job)
    lane.waiting[0].request.left = 5
    lane.advance()
    lane.give_up(long.job)
    assert lane.reading is None and lane.advance() is None


def test_requests_that_are_given_up_leave_their_rows(small_target, drafter):
    engine = make_engine(small_target, drafter, rows=1)
    first, waits, second = Client([1, 2], 400), Client([3, 4], 400), Client([5, 1], 6)
    for client in (first, waits, second):
        engine.submit(client.job)
    engine.start()
    first.events.get(timeout=60)
    engine.give_up(waits.job)
    engine.give_up(first.job)
    assert second.wait().reason in ("stop", "length")
    engine.stop()
    assert waits.events.empty() and len(first.job.request.tokens) < 400
    assert engine.num_running == engine.num_waiting == 0


def test_a_full_queue_refuses(small_target, drafter):
    engine = make_engine(small_target, drafter, rows=1, queue=2)
    clients = [Client([1, 2], 5) for _ in range(4)]
    assert [engine.submit(client.job) for client in clients] == [True, True, False, False]
    engine.start()
    for client in clients[:2]:
        client.wait()
    assert engine.submit(clients[2].job)
    clients[2].wait()
    engine.stop()
    assert not engine.submit(clients[3].job)  # it is stopping


def test_late_requests_end_and_the_others_go_on(small_target, drafter):
    engine = make_engine(small_target, drafter, rows=2)
    late = Client([1, 2], 400, deadline=time.monotonic() + 0.3)
    waits = Client([1, 2], 5, deadline=time.monotonic() - 1)
    good = Client([1, 2], 5)
    for client in (late, waits, good):
        engine.submit(client.job)
    engine.start()
    assert waits.wait().reason == "timeout" and not waits.rounds
    assert good.wait().reason in ("stop", "length")
    end = late.wait()
    assert end.reason in ("timeout", "stop")
    engine.stop()


def test_a_round_that_fails_ends_its_requests_only(small_target, drafter, monkeypatch):
    engine = make_engine(small_target, drafter)
    lane, fail = engine.lanes[True], threading.Event()
    step = type(lane.batch).step

    def broken(batch):
        if fail.is_set() and batch.proposer:
            fail.clear()
            raise MemoryError("no memory is left")
        return step(batch)

    monkeypatch.setattr(type(lane.batch), "step", broken)
    plain = greedy(small_target, None, STOP).generate([[1, 2]], 30).tokens[0]
    fail.set()
    clients = [Client([1, 2], 30), Client([1, 2], 30, speculate=False)]
    for client in clients:
        engine.submit(client.job)
    engine.start()
    end = clients[0].wait()
    assert end.reason == "error" and "no memory is left" in end.message
    assert clients[1].wait().reason in ("stop", "length") and clients[1].tokens == plain
    again = Client([1, 2], 30)
    engine.submit(again.job)
    again.wait()
    assert again.tokens == plain
    engine.stop()


def test_a_client_whose_events_cannot_be_delivered_disturbs_nobody(engine):
    def raise_it(_):
        raise RuntimeError("the event loop is closed")

    gone, good = Client([1, 2], 50, deliver=raise_it), Client([1, 2], 8)
    engine.submit(gone.job)
    engine.submit(good.job)
    good.wait()
    assert len(good.tokens) == 8 or good.tokens[-1] in STOP


def test_stopping_finishes_what_was_submitted(small_target, drafter):
    engine = make_engine(small_target, drafter, rows=1)
    clients = [Client(prompt, 9) for prompt in prompts(4)]
    for client in clients:
        engine.submit(client.job)
    engine.start()
    engine.stop()
    assert [client.wait().reason in ("stop", "length") for client in clients] == [True] * 4


def test_what_cannot_be_decoded_is_refused_at_once(engine):
    with pytest.raises(ValueError, match="at least one token"):
        engine.submit(Client([]).job)


def test_accepted_drafts_by_position():
    assert reached([0, 2, 1, 2], 2) == [3, 2]
    assert reached([], 0) == []


# Rows whose laws have no token

NOTHING = Sampling(0.8, repetition_penalty=7.0)  # `without_numbers` takes its logits


def without_numbers(sampling, logits, seen):
    return torch.full_like(logits, torch.nan) if sampling.repetition_penalty == 7.0 else logits


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("sampling", [Sampling(0.8), GREEDY], ids=["sampled", "greedy"])
def test_a_row_without_a_token_ends_alone(small_target, drafter, monkeypatch, speculate, sampling):
    monkeypatch.setattr(Sampling, "penalise", without_numbers)
    engine = make_engine(small_target, drafter, rows=4)
    long = lambda: Client([5, 1, 3], 40, sampling, seed=1, speculate=speculate)
    alone, beside = long(), long()
    bad = [Client([3, 4], 6, replace(NOTHING, temperature=t), speculate=speculate) for t in (0.8, 0.0)]
    tiny = [Client([3, 4], 6, Sampling(t), speculate=speculate) for t in (1e-38, 1e-45, 1e-30, 1e-12)]
    plain = Client([3, 4], 6, speculate=speculate)
    for client in (alone, beside):
        client.job.ends = client.job.request.ends = Ends(frozenset())
    engine.start()
    try:
        engine.submit(alone.job)
        assert alone.wait().reason == "length"
        engine.submit(plain.job)
        plain.wait()
        beside.job.deliver = lambda event: (beside.events.put(event), [engine.submit(each.job) for each in (*bad, *tiny) if beside.events.qsize() == 2])  # fmt: skip
        engine.submit(beside.job)
        ends = [client.wait() for client in bad]
        for client in tiny:
            assert client.wait().reason in ("stop", "length") and client.tokens == plain.tokens
        assert beside.wait().reason == "length" and len(beside.tokens) == 40 and beside.tokens == alone.tokens
    finally:
        engine.stop()
    assert {end.reason for end in ends} == {"error"} and not any(client.tokens for client in bad)
    assert all(end.message.startswith("No token can follow the answer's first 0: ") for end in ends)


def test_a_row_that_fails_in_the_middle_ends_alone(small_target, drafter, monkeypatch):
    """Its grammar refuses its third token."""

    class Refusing:
        taken = 0

        def following(self):
            return None

        def take(self, new):
            self.taken += len(new)
            if self.taken > 2:
                raise ValueError("the grammar stopped")

    engine = make_engine(small_target, drafter)
    monkeypatch.setattr("specdec.decoding.batch.grammar.constrain", lambda tree, *_, **__: (tree, None))
    monkeypatch.setattr(
        "specdec.decoding.batch.grammar.unpack",
        lambda states, size, device: torch.ones(len(states), 1, size, dtype=torch.bool),
    )
    bad, others = (
        Client([3, 4], 9, constraint=Refusing(), speculate=False),
        [Client([5, 1], 9, speculate=False) for _ in range(2)],
    )
    bad.job.ends = bad.job.request.ends = Ends(frozenset())
    for client in (bad, *others):
        engine.submit(client.job)
    engine.start()
    try:
        end = bad.wait()
        assert (end.reason, end.message) == ("error", "the grammar stopped") and len(bad.tokens) == 2
        assert [client.wait().reason in ("stop", "length") for client in others] == [True, True]
    finally:
        engine.stop()


def test_prompts_that_cannot_be_read_do_not_end_what_runs(small_target, drafter, monkeypatch):
    engine = make_engine(small_target, drafter)
    read, running, bad = Batch.read, Client([5, 1, 3], 30), Client([3, 4], 6)
    running.job.ends = running.job.request.ends = Ends(frozenset())

    def failing(batch, prefill, most=None):
        if prefill.tokens.tolist() == [bad.job.prompt]:
            raise MemoryError("no room")
        return read(batch, prefill, most)

    monkeypatch.setattr(Batch, "read", failing)
    running.job.deliver = lambda event: (
        running.events.put(event),
        running.events.qsize() == 2 and engine.submit(bad.job),
    )
    engine.submit(running.job)
    engine.start()
    try:
        assert bad.wait().message == "The server could not decode this (MemoryError: no room)."
        assert running.wait().reason == "length" and len(running.tokens) == 30
    finally:
        engine.stop()
