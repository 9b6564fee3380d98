"""The speedup that an engine would have: its formula, what is timed, and where it is left out."""

import pytest
import torch

from specdec.core import fast
from specdec.core.tree import TreeShape
from specdec.measuring import served
from specdec.measuring.report import make_undecoded_report
from specdec.proposers.heads import HeadProposer
from tests.support.decoding import chain_of
from tests.support.drafters import make_drafter


def test_the_formula_and_reports_without_tau():
    costs = served.CapturedCosts(0.006, 0.0066, 0.0004, nodes=64, steps=6)
    assert costs.speedup(3.0) == pytest.approx(3 * 6 / (6.6 + 6 * 0.4))
    report = make_undecoded_report(0.0)
    assert costs.add_to(report) is report


@pytest.mark.parametrize("shape", [chain_of(1), chain_of(3), TreeShape(3, 2, 5)], ids=str)
def test_what_is_timed_may_run_again_and_again(small_drafter, shape, monkeypatch):
    """A graph is replayed: each call must give the same, read nothing that is gone, and leave the caches alone."""
    if small_drafter.depth is not None and shape.depth > small_drafter.depth:
        pytest.skip("the head has fewer steps")
    results = []

    def capture(function, inputs, pool):
        inputs = [value.clone() for value in inputs]
        return lambda *_: results.append([value.clone() for value in function(*inputs)])

    monkeypatch.setattr(served, "capture_graph", capture)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    assert served.time_step(HeadProposer(small_drafter, shape)) > 0
    assert len(results) == served.REPEATS
    assert all(torch.equal(*pair) for result in results[1:] for pair in zip(results[0], result, strict=True))


def test_times_of_a_pretended_device(small_target, monkeypatch):
    monkeypatch.setattr(served.Verifier, "capturable", True)
    monkeypatch.setattr(served, "time_passes", lambda verifier, nodes, linear: {1: 0.01, nodes: 0.011})
    monkeypatch.setattr(served, "time_step", lambda proposer: 0.001)
    for head, steps in (("eagle", 3), ("dflash", 1)):
        proposer = HeadProposer(make_drafter(small_target, head), TreeShape(3, 2, 5))
        assert served.measure_captured(small_target, proposer) is None  # a CPU
        with fast.force_paths("graphs"):
            costs = served.measure_captured(small_target, proposer)
            assert costs == served.CapturedCosts(0.01, 0.011, 0.001, 6, steps)
            assert served.measure_captured(small_target, None) is None


def test_where_nothing_can_be_captured_it_is_left_out_with_a_sentence(small_target):
    proposer = HeadProposer(make_drafter(small_target, "eagle"), chain_of(2))
    with fast.force_paths("graphs"), pytest.warns(UserWarning, match="CUDA"):
        assert served.measure_captured(small_target, proposer) is None
