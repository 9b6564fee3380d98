"""The speedup that an engine would have: its formula, what is timed, and where it is left out."""

import contextlib

import pytest
import torch

from specdec.core import fast
from specdec.core.tree import TreeShape
from specdec.measuring import served
from specdec.measuring.report import make_undecoded_report
from specdec.proposers.heads import HeadProposer
from tests.support.decoding import chain_of, pretend_graphs
from tests.support.drafters import make_drafter


def test_the_formula_and_reports_without_tau():
    costs = served.CapturedCosts(0.006, 0.0066, 0.0004, nodes=64, steps=6)
    assert costs.speedup(3.0) == pytest.approx(3 * 6 / (6.6 + 6 * 0.4))
    report = make_undecoded_report(0.0)
    assert costs.add_to(report) is report


@pytest.fixture
def events(monkeypatch) -> list[str]:
    """Stands in for a GPU's clock, by which each call takes a millisecond: -> what is recorded, called and awaited."""
    log: list[str] = []

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")
            self.time = log.count("call")

        def synchronize(self):
            log.append("wait")

        def elapsed_time(self, end):
            return float(end.time - self.time)

    for name, number in (("REPEATS", 3), ("TIMINGS", 2)):
        monkeypatch.setattr(served, name, number)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    return log


def test_replays_are_timed_by_the_clock_of_the_gpu_without_a_wait_between_them(events):
    seconds = served.time_repeated(lambda: events.append("call"), torch.device("cuda"))
    assert events == ["call", "record", *["call"] * served.REPEATS, "record", "wait"]
    assert seconds == pytest.approx(1e-3)


@pytest.mark.parametrize("linear", [True, False])
def test_passes_are_timed_in_turn_and_leave_the_cache_as_it_was(small_target, events, monkeypatch, linear):
    caches, outputs = [], {1: [], 4: []}

    def capture(function, inputs, pool):
        def replay(*inputs):
            events.append("call")
            outputs[inputs[0].shape[1]].append(function(*inputs))

        return replay

    make = served.PassTimer.__init__
    monkeypatch.setattr(
        served.PassTimer, "__init__", lambda self, *args, **how: caches.append(make(self, *args, **how) or self.cache)
    )
    monkeypatch.setattr(served, "capture_graph", capture)
    verifier = served.Verifier(small_target, sampling=served.Sampling(), rule="token", runner=served.Runner())
    seconds = served.time_passes(verifier, 4, linear=linear)
    assert seconds == {1: pytest.approx(1e-3), 4: pytest.approx(1e-3)}
    for results in outputs.values():
        assert len(results) == served.TIMINGS * (1 + served.REPEATS)
        assert all(torch.equal(*pair) for result in results[1:] for pair in zip(results[0], result, strict=True))
    (cache,) = caches
    assert cache.lengths.tolist() == [served.CONTEXT] and not cache.pending


@pytest.mark.parametrize("head", ["eagle", "dflash"])
@pytest.mark.parametrize("settled", [False, True])
def test_parts_are_compiled_where_decoding_settled_on_it(small_target, events, monkeypatch, traced, head, settled):
    proposer = HeadProposer(make_drafter(small_target, head), chain_of(3), compile=None, cuda_graphs=None)
    pretend_graphs(monkeypatch, (settled, True))
    monkeypatch.setattr(served, "capture_graph", lambda function, *_: function)
    compiled = []
    build = served.Runner._build
    monkeypatch.setattr(
        served.Runner, "_build", lambda self, name, *args: compiled.append(name) or build(self, name, *args)
    )
    with fast.force_paths("graphs"):
        assert served.measure_captured(small_target, proposer) is not None
    step = "absorb" if head == "dflash" else "step"
    assert any(name[0] == step for name in compiled if isinstance(name, tuple)) == settled
    assert any("greedy" in name for name in compiled) == settled


@pytest.mark.parametrize("shape", [chain_of(1), chain_of(3), TreeShape(3, 2, 5)], ids=str)
def test_what_is_timed_may_run_again_and_again(small_drafter, shape, monkeypatch, events):
    """A graph is replayed: each call must give the same, read nothing that is gone, and leave the caches alone."""
    if small_drafter.depth is not None and shape.depth > small_drafter.depth:
        pytest.skip("the head has fewer steps")
    results = []

    def capture(function, inputs, pool):
        inputs = [value.clone() for value in inputs]
        return lambda *_: results.append([value.clone() for value in function(*inputs)])

    monkeypatch.setattr(served, "capture_graph", capture)
    served.time_step(HeadProposer(small_drafter, shape))
    assert len(results) == 1 + served.REPEATS
    assert all(torch.equal(*pair) for result in results[1:] for pair in zip(results[0], result, strict=True))


def test_times_of_a_pretended_device(small_target, monkeypatch):
    monkeypatch.setattr(served.Verifier, "capturable", True)
    monkeypatch.setattr(served, "time_passes", lambda verifier, nodes, linear: {1: 0.01, nodes: 0.011})
    monkeypatch.setattr(served, "time_step", lambda proposer, compiled: 0.001)
    for head, steps in (("eagle", 3), ("dflash", 1)):
        proposer = HeadProposer(make_drafter(small_target, head), TreeShape(3, 2, 5))
        assert served.measure_captured(small_target, proposer) is None  # a CPU
        with fast.force_paths("graphs"):
            costs = served.measure_captured(small_target, proposer)
            assert costs == served.CapturedCosts(0.01, 0.011, 0.001, 6, steps)
            assert served.measure_captured(small_target, None) is None


def test_where_nothing_can_be_captured_it_is_left_out_with_a_sentence(small_target, events):
    proposer = HeadProposer(make_drafter(small_target, "eagle"), chain_of(2))
    with fast.force_paths("graphs"), pytest.warns(UserWarning, match="CUDA"):
        assert served.measure_captured(small_target, proposer) is None
