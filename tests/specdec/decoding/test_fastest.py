"""Which way of passes is fastest is measured where nobody has said it."""

import json

import pytest

from specdec.core.compile import Runner
from specdec.decoding import fastest
from specdec.decoding.drafting import Drafting
from specdec.proposers import costs
from tests.support.drafters import make_drafter

NEITHER, GRAPHS, COMPILED, BOTH = (False, False), (False, True), (True, False), (True, True)


@pytest.fixture
def timed(monkeypatch, tmp_path):
    """Stands in for a GPU: seconds of each way -> the ways that were timed"""
    tried, seconds = [], {NEITHER: 1.0, GRAPHS: 0.6, COMPILED: 0.8, BOTH: 0.5}

    class Timer:
        def __init__(self, verifier, sampling, rows, *, linear):
            self.mode = verifier.runner.compile, verifier.runner.cuda_graphs
            tried.append(self.mode)

        def seconds(self, num):
            if isinstance(seconds[self.mode], Exception):
                raise seconds[self.mode]
            return seconds[self.mode]

    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(costs, "PassTimer", Timer)
    monkeypatch.setattr(fastest, "_can_measure", lambda device: True)
    monkeypatch.setattr(fastest.fast, "allows", lambda *_: True)
    monkeypatch.setattr(fastest, "_modes_by_file", {})
    return tried, seconds


@pytest.mark.parametrize(
    "requested, changed, expected",
    [
        ((None, None), {}, BOTH),
        ((None, False), {}, COMPILED),
        ((False, None), {}, GRAPHS),
        ((None, None), {BOTH: 0.59}, GRAPHS),  # within what measurements vary
        ((None, None), {BOTH: ValueError("no compiler"), COMPILED: ValueError("no compiler")}, GRAPHS),
        ((None, True), {BOTH: 0.7}, GRAPHS),
        ((None, None), {mode: RuntimeError("out of memory") for mode in fastest.RUN_MODES}, NEITHER),
    ],
)
@pytest.mark.filterwarnings("ignore:Passes are not tried")
def test_the_fastest_way_is_taken_and_kept_unless_one_failed(
    small_target, timed, requested, changed, expected, tmp_path
):
    tried, seconds = timed
    seconds.update(changed)
    failed = any(isinstance(time, Exception) for time in changed.values())
    for number in range(2):
        runner = Runner(requested[0], cuda_graphs=requested[1])
        fastest.choose_run_mode(runner, small_target)
        assert (runner.compile, runner.cuda_graphs) == expected and not runner.undecided
        modes = [
            mode for mode in fastest.RUN_MODES if all(wish in (None, setting) for wish, setting in zip(requested, mode))
        ]
        assert tried == modes * (1 + failed * number)
        fastest.choose_run_mode(Runner(requested[0], cuda_graphs=requested[1]), small_target)
        assert tried == modes * (1 + failed * number)  # in this process, a failure is not tried again
        fastest._modes_by_file.clear()  # as in another process, which finds the file
    documents = [json.loads(file.read_text()) for file in tmp_path.glob("*.way.json")]
    assert [document["compile"] for document in documents] == ([] if failed else [expected[0]])


def test_a_way_is_of_the_code_that_was_timed(small_target, timed, monkeypatch):
    for number in (1, 1, 2):
        monkeypatch.setattr(costs, "digest_sources", lambda *names, number=number: f"{names} {number}")
        fastest._modes_by_file.clear()
        fastest.choose_run_mode(Runner(None, cuda_graphs=None), small_target)
        assert timed[0] == list(fastest.RUN_MODES) * number


def test_graphs_that_the_target_cannot_have_are_no_failure(small_target, timed, monkeypatch, tmp_path):
    monkeypatch.setattr(fastest.Verifier, "capturable", False)
    fastest.choose_run_mode(Runner(None, cuda_graphs=None), small_target)
    assert timed[0] == [NEITHER, COMPILED] and len(list(tmp_path.glob("*.way.json"))) == 1


def test_what_was_said_is_not_measured(small_target, timed):
    for way in fastest.RUN_MODES:
        runner = Runner(way[0], cuda_graphs=way[1])
        fastest.choose_run_mode(runner, small_target)
        assert (runner.compile, runner.cuda_graphs) == way
    assert not timed[0]


def test_on_a_cpu_nothing_is_compiled_unless_it_is_asked_for(small_target):
    drafting = Drafting()
    runner, proposer = drafting.runner(), drafting.proposer(make_drafter(small_target, "eagle"))
    drafting.decoder(small_target, proposer, sampling=fastest.Sampling(), stop=set(), runner=runner)
    for each in (runner, proposer.runner):
        assert not (each.compile or each.cuda_graphs or each.undecided)


def test_a_head_follows_its_target(small_target, timed):
    drafting = Drafting(cuda_graphs=None, compile=False)
    runner, proposer = drafting.runner(), drafting.proposer(make_drafter(small_target, "eagle"))
    drafting.decoder(small_target, proposer, sampling=fastest.Sampling(), stop=set(), runner=runner)
    assert runner.cuda_graphs and proposer.runner.cuda_graphs and proposer.as_chain(2).runner.cuda_graphs


def test_passes_are_timed_here(small_target):
    """The real timer, in the ways that a CPU has."""
    assert fastest._time_mode(small_target, NEITHER) > 0
    with pytest.warns(UserWarning, match="CUDA"):
        assert fastest._time_mode(small_target, GRAPHS) is None
