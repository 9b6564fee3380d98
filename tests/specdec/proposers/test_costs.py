"""Tests of what a pass of the target costs: measured, kept on the disk, and corrected by use."""

import functools
import json
import multiprocessing
import warnings
from types import SimpleNamespace

import pytest

from specdec.core.compile import Runner
from specdec.core.files import cache_document
from specdec.core.sampling import Sampling
from specdec.proposers import costs as costs_module
from specdec.proposers.auto import AutoProposer
from specdec.proposers.costs import Costs, MeasuredCosts, describe_conditions, find_costs_file
from specdec.proposers.suffix import make_default_suffix
from specdec.target.verifier import Verifier
from tests.support.decoding import greedy
from tests.support.texts import repeating_texts


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder of the costs."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "costs"))
    return tmp_path / "costs"


@pytest.fixture
def clock(monkeypatch, cache) -> SimpleNamespace:
    """Time that passes only in the target's passes: clock.cost(tree) seconds of work in each, and clock.pause(tree)."""
    clock, call = (
        SimpleNamespace(seconds=0.0, work=0.0, cost=None, pause=lambda tree: 0.0),
        costs_module.Verifier.__call__,
    )

    def verify(self, tree, *inputs, **arguments):
        clock.work += clock.cost(tree)
        clock.seconds += clock.cost(tree) + clock.pause(tree)
        return call(self, tree, *inputs, **arguments)

    monkeypatch.setattr(costs_module.Verifier, "__call__", verify)
    clocks = SimpleNamespace(perf_counter=lambda: clock.seconds, process_time=lambda: clock.work)
    monkeypatch.setattr(costs_module, "time", clocks)
    return clock


def measured(target) -> AutoProposer:
    """Its costs are measured, or read from the disk."""
    return AutoProposer(target, members=[make_default_suffix(target)])


def test_costs_between_numbers_of_rows_and_what_a_pass_teaches():
    costs = Costs({1: {1: 1.0, 4: 2.0}, 4: {1: 4.0, 4: 20.0}}, sizes=(1, 4))
    assert costs.curve(1) == {1: 1.0, 4: 2.0} and costs.curve(2) == pytest.approx({1: 2.0, 4: 8.0})
    assert costs.curve(8) == pytest.approx({1: 8.0, 4: 40.0}) and min(costs.curve(2).values()) == pytest.approx(2.0)
    for _ in range(40):
        costs.observe(1, 1, 2.0)  # everything takes twice as long
        costs.observe(1, 4, 4.0)
    assert costs.curve(1) == pytest.approx({1: 2.0, 4: 4.0}, rel=0.1)
    costs.observe(1, 1, 100.0)  # a pause of the machine
    assert costs.curve(1)[1] == pytest.approx(2.0, rel=0.1)


def test_what_few_passes_show_is_believed_at_once_and_near_sizes_follow():
    costs = Costs({1: {1: 1.0, 4: 2.0, 8: 4.0, 16: 8.0}}, sizes=(1, 4, 8, 16))
    for _ in range(10):
        costs.observe(1, 8, 8.0)
    curve = costs.curve(1)
    assert curve[8] == pytest.approx(8.0, rel=0.2) and 1.2 < curve[1] < curve[4] / 2 + 0.01 and curve[16] > 11.0
    for _ in range(3):
        costs.observe(1, 1, 1.0)
    curve = costs.curve(1)
    assert curve[1] < 1.2 and curve[8] > 5.5 and 1.1 < curve[4] / 2.0 < 1.9
    costs.observe(3, 1, 3.0)
    assert costs.curve(3)[8] > 1.2 * 3 * 4.0  # rows of which less is known begin with what others showed


def test_what_other_work_on_the_machine_made_expensive_does_not_stay_so():
    """One size is seen only while other work slows the machine down, and another one all the time."""
    costs = Costs({1: {1: 1.0, 2: 1.1, 3: 1.2}}, sizes=(1, 2, 3))
    for number in range(20):
        slow = 1.6 if 5 <= number < 15 else 1.0
        costs.observe(1, 3, 1.2 * slow)
        if slow > 1:
            costs.observe(1, 1, 1.0 * slow)
    for _ in range(200):
        costs.observe(1, 3, 1.2)
    assert costs.curve(1)[3] == pytest.approx(1.2, rel=0.03) and costs.curve(1)[1] < 1.1
    for _ in range(30):  # a size that really is expensive here is so at once when it is seen
        costs.observe(1, 2, 2.2)
    assert costs.curve(1)[2] == pytest.approx(2.2, rel=0.05)


def test_costs_are_measured_once_and_kept(small_target, cache, monkeypatch):
    monkeypatch.setattr(costs_module, "SIZES", (1, 2, 4))
    monkeypatch.setattr(costs_module, "SECONDS", 0.01)

    def decode() -> AutoProposer:
        proposer = measured(small_target)
        greedy(small_target, proposer).generate(repeating_texts(3, 12)[:2], 10)
        return proposer

    seen = []
    measure = costs_module.MeasuredCosts._measure
    monkeypatch.setattr(costs_module.MeasuredCosts, "_measure", lambda *a: seen.append(a[1]) or measure(*a))
    decode()
    assert seen == [1, 2]
    again = decode()
    assert seen == [1, 2] and {1} <= set(again.costs.table[1]) <= {1, 2, 3, 4}
    (path,) = cache.glob("*.json")
    assert json.loads(path.read_text())["conditions"]["sampling"] == "greedy"
    path.write_text("{")
    decode()
    assert seen == [1, 2, 1, 2]


def verifier(target, sampling: Sampling, **how) -> Verifier:
    return Verifier(target, sampling=sampling, rule="token", runner=Runner(**how))


def test_other_conditions_have_other_files(small_target, cache):
    """Those with and without CUDA graphs too, where a pass can be one: sampled ones are not."""

    def conditions(temperature: float = 0.0, **how) -> dict:
        sampling = Sampling(temperature)
        return describe_conditions(verifier(small_target, sampling, **how), sampling)

    different = [conditions(), conditions(1.0), conditions(compile=True), conditions(cuda_graphs=True),
                 conditions(compile=True, cuda_graphs=True), conditions(1.0, cuda_graphs=True)]  # fmt: skip
    files = {find_costs_file(document) for document in different}
    assert len(files) == len(different) and {file.parent for file in files} == {cache}
    assert different[1]["sampling"] == "sampled"


def test_costs_are_of_the_code_that_was_timed(small_target, monkeypatch):
    known = describe_conditions(verifier(small_target, Sampling()), Sampling())
    monkeypatch.setattr(costs_module, "digest_sources", lambda *names: " ".join(names))
    changed = describe_conditions(verifier(small_target, Sampling()), Sampling())
    assert changed["code"] == "specdec.core specdec.target specdec.proposers.costs"
    assert find_costs_file(changed) != find_costs_file(known)


def test_a_machine_that_is_too_slow_for_a_long_pass_is_measured_without_it(target, clock, monkeypatch):
    monkeypatch.setattr(costs_module, "SECONDS", -1.0)  # the budget is spent before the first pass
    clock.cost = lambda tree: tree.tokens.shape[1]
    proposer = measured(target)
    greedy(target, proposer).generate([[1, 2, 3]], 4)
    assert set(proposer.costs.table[1]) == {1, 2}  # the first that is too slow is the last


def test_the_first_start_keeps_to_its_time(small_target, clock, monkeypatch):
    """On a machine whose passes take as long as their tokens say, for the first and the last number of rows."""
    monkeypatch.setattr(costs_module, "SECONDS", 3.0)
    clock.cost = lambda tree: 0.02 + 0.002 * tree.tokens.numel()
    proposer = measured(small_target)
    greedy(small_target, proposer)
    proposer.costs.prepare(8)
    spent = clock.seconds
    assert 6.0 <= spent < 10.0
    for rows in (1, 2, 5, 8):  # unmeasured batch sizes are between
        curve = proposer.costs.curve(rows)
        assert curve == pytest.approx({num: 0.02 + 0.002 * rows * num for num in proposer.costs.sizes})
        assert set(costs_module.SIZES) <= set(curve)
        proposer.costs.prepare(rows)
    assert clock.seconds == spent


def test_other_processes_change_the_level_and_not_the_ratios(small_target, clock):
    """One thread measures by its own work, whatever sizes meet the pauses, and scales that by the seconds of all."""
    clock.cost = lambda tree: 0.02 + 0.002 * tree.tokens.numel()
    clock.pause = lambda tree: 0.05 * (tree.tokens.numel() in (1, 6))
    proposer = measured(small_target)
    greedy(small_target, proposer)
    proposer.costs.prepare(1)
    curve = proposer.costs.curve(1)
    assert {num: curve[num] / curve[1] for num in curve} == pytest.approx({num: (10 + num) / 11 for num in curve})
    assert 1.2 * 0.022 < curve[1] < 1.6 * 0.022


def test_processes_that_measure_the_same_at_once_do_not_disturb_each_other(small_target, cache):
    settings = {"linear": False}
    make = functools.partial(MeasuredCosts, verifier(small_target, Sampling()), Sampling(), **settings)

    def write_often() -> None:
        warnings.simplefilter("error")
        costs = make()
        for _ in range(50):
            cache_document(costs.path, {"seconds": {1: {1: 1.0}}}, "The costs")

    children = [multiprocessing.get_context("fork").Process(target=write_often) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert make().table == {1: {1: 1.0}} and len(list(cache.iterdir())) == 1


def test_an_unreadable_cache_folder_is_no_obstacle(small_target, cache, monkeypatch):
    cache.write_text("a file")
    monkeypatch.setattr(costs_module, "SIZES", (1, 2))
    monkeypatch.setattr(costs_module, "SECONDS", 0.01)
    proposer = measured(small_target)
    with pytest.warns(UserWarning, match="measured costs cannot be kept"):
        greedy(small_target, proposer).generate(repeating_texts(3, 12)[:1], 5)
