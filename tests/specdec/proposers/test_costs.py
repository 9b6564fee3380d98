"""Tests of what a pass of the target costs: measured, kept on the disk, and corrected by use."""

import itertools
import json
import multiprocessing
import warnings

import pytest

from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.proposers import costs as costs_module
from specdec.proposers.auto import Auto
from specdec.proposers.costs import Conditions, Costs, Longer
from specdec.proposers.suffix import usual_suffix
from specdec.target.verifier import Verifier
from tests.texts import repeating_texts


class Clock:
    """Time that passes only where a test says so."""

    def __init__(self):
        self.now, self.noise = 0.0, itertools.repeat(1.0)


def measured(target) -> Auto:
    """Its costs are measured, or read from the disk."""
    return Auto(target, members=[usual_suffix(target)])


def test_costs_between_numbers_of_rows_and_what_a_pass_teaches():
    costs = Costs({1: {1: 1.0, 4: 2.0}, 4: {1: 4.0, 4: 20.0}}, sizes=(1, 4))
    assert costs.curve(1) == {1: 1.0, 4: 2.0} and costs.curve(2) == pytest.approx({1: 2.0, 4: 8.0})
    assert costs.curve(8) == pytest.approx({1: 8.0, 4: 40.0})
    assert costs.best_size(1, 2) == (4, 2.0)
    for _ in range(40):
        costs.saw(1, 1, 2.0)  # everything takes twice as long
        costs.saw(1, 4, 4.0)
    assert costs.best_size(1, 1)[1] == pytest.approx(2.0, rel=0.1)
    assert costs.best_size(1, 4)[1] == pytest.approx(4.0, rel=0.1)
    costs.saw(1, 1, 100.0)  # a pause of the machine
    assert costs.best_size(1, 1)[1] == pytest.approx(2.0, rel=0.1)


def test_longer_contexts_add_the_same_to_all_sizes_that_read_as_much():
    costs = Costs({1: {1: 1.0, 8: 3.0}, 4: {1: 2.0, 8: 8.0}}, sizes=(1, 8), longer={1: Longer(256, 0.01, 0.02)})
    assert costs.curve(1, 256) == costs.curve(1) == {1: 1.0, 8: 3.0}
    assert costs.curve(1, 1256) == pytest.approx({1: 11.0, 8: 23.0})
    assert costs.curve(4, 1256) == pytest.approx({1: 42.0, 8: 88.0})  # four rows have four caches
    assert costs.best_size(1, 1, 1256) == (1, pytest.approx(11.0))
    for _ in range(40):
        costs.saw(1, 1, 11.0, 1256)
    assert costs.curve(1) == pytest.approx({1: 1.0, 8: 3.0}, rel=0.05)


def test_what_few_passes_show_is_believed_at_once_and_sizes_between_follow():
    costs = Costs({1: {1: 1.0, 4: 2.0, 8: 4.0, 16: 8.0}}, sizes=(1, 4, 8, 16))
    for _ in range(30):
        costs.saw(1, 8, 8.0)
    assert costs.curve(1) == pytest.approx({1: 1.6, 4: 3.2, 8: 8.0, 16: 13.0}, rel=0.05)  # all is slower, it seems
    for _ in range(3):
        costs.saw(1, 1, 1.0)
    curve = costs.curve(1)
    assert curve[1] < 1.2 and curve[8] == pytest.approx(8.0, rel=0.1) and 1.1 < curve[4] / 2.0 < 1.9
    costs.saw(3, 1, 3.0)
    assert costs.curve(3)[8] > 1.5 * 3 * 4.0  # rows of which less is known begin with what others showed


def test_what_other_work_on_the_machine_made_dear_does_not_stay_so():
    """One size is seen only while other work slows the machine down, and another one all the time."""
    costs = Costs({1: {1: 1.0, 2: 1.1, 3: 1.2}}, sizes=(1, 2, 3))
    for number in range(20):
        slow = 1.6 if 5 <= number < 15 else 1.0
        costs.saw(1, 3, 1.2 * slow)
        if slow > 1:
            costs.saw(1, 1, 1.0 * slow)
    assert costs.curve(1)[1] > 1.2
    for _ in range(200):
        costs.saw(1, 3, 1.2)
    curve = costs.curve(1)
    assert curve[3] == pytest.approx(1.2, rel=0.03) and curve[1] < 1.1
    for _ in range(30):  # a size that really is dear here is dear at once when it is seen
        costs.saw(1, 2, 2.2)
    assert costs.curve(1)[2] == pytest.approx(2.2, rel=0.05)


def test_a_size_that_seemed_cheap_is_corrected_by_its_use():
    true = {1: 1.0, 4: 2.0, 12: 6.0}
    costs = Costs({1: true | {12: 0.5}}, sizes=(1, 4, 12))
    chosen = []
    for _ in range(300):
        num, _ = costs.best_size(1, 1)
        chosen.append(num)
        costs.saw(1, num, true[num])
    assert chosen[0] == 12 and set(chosen[200:]) == {1}


def test_what_longer_contexts_cost_is_measured(target, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(costs_module, "SIZES", (1, 8))
    monkeypatch.setattr(costs_module, "LONG", 300)
    monkeypatch.setattr(target, "max_positions", 4096)
    proposer = measured(target)
    Decoder(target, proposer, sampling=Sampling(), stop=set()).generate([[1, 2, 3]], 4)
    (path,) = tmp_path.glob("*.json")
    assert set(json.loads(path.read_text())["longer"]) == {"1"}
    assert proposer.entries == 256 and proposer.costs.longer[1].entries == 256


def test_costs_are_measured_once_and_kept(small_target, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "costs"))
    monkeypatch.setattr(costs_module, "SIZES", (1, 2, 4))
    monkeypatch.setattr(costs_module, "SECONDS", 0.01)
    monkeypatch.setattr(costs_module, "DRIFT", 1000)  # a tiny target's times vary
    monkeypatch.setattr(costs_module, "BUSY", 1e6)

    def decode() -> Auto:
        proposer = measured(small_target)
        Decoder(small_target, proposer, sampling=Sampling(), stop=set()).generate(repeating_texts(3, 12)[:2], 10)
        return proposer

    seen = []
    measure = costs_module.measure
    monkeypatch.setattr(costs_module, "measure", lambda *a, **k: seen.append(a[3]) or measure(*a, **k))
    decode()
    assert seen == [1, 2]
    first = decode()
    assert seen == [1, 2, 2] and set(first.costs.table[2]) == {1, 2, 4}  # a look at whether they still hold
    seen.clear()
    (path,) = (tmp_path / "costs").glob("*.json")
    assert json.loads(path.read_text())["conditions"]["law"] == "greedy"
    path.write_text("{")
    decode()
    assert seen == [1, 2]


def conditions(target, temperature: float = 0.0, **how) -> Conditions:
    sampling = Sampling(temperature)
    return Conditions.of(Verifier(target, sampling=sampling, rule="token", runner=Runner(**how)), sampling)


def test_other_conditions_have_other_files(small_target, tmp_path, monkeypatch):
    """Those with and without CUDA graphs too, where a pass can be one: sampled ones are not."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    different = [
        conditions(small_target), conditions(small_target, 1.0), conditions(small_target, compile=True),
        conditions(small_target, cuda_graphs=True), conditions(small_target, compile=True, cuda_graphs=True),
    ]  # fmt: skip
    assert len({each.path for each in different}) == len(different)
    assert conditions(small_target, 1.0, cuda_graphs=True) == different[1] and different[1].law == "sampled"
    for each in different:
        costs_module._write(each.path, each, {1: {1: 1.0}}, {})
        document = json.loads(each.path.read_text())
        assert document["conditions"]["cuda_graphs"] == each.cuda_graphs
        del document["conditions"]["cuda_graphs"]  # as in files written before there was such a field
        each.path.write_text(json.dumps(document))
        assert costs_module._read(each.path) == ({1: {1: 1.0}}, {})


def test_a_machine_that_is_too_slow_for_a_long_pass_is_measured_without_it(target, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(costs_module, "SECONDS", 0.0)
    monkeypatch.setattr(costs_module, "BUSY", 0.0)  # every pass but the first is left out
    proposer = measured(target)
    Decoder(target, proposer, sampling=Sampling(), stop=set()).generate([[1, 2, 3]], 4)
    assert set(proposer.costs.table[1]) == {1} and not proposer.costs.longer


def test_costs_that_no_longer_hold_are_measured_again(small_target, tmp_path, monkeypatch):
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(costs_module, "SIZES", (1, 4))
    now = {1: 1.0, 4: 2.0}
    asked = []
    monkeypatch.setattr(
        costs_module,
        "measure",
        lambda t, v, law, rows, sizes, **how: asked.append(rows) or ({num: now[num] for num in sizes}, 256),
    )

    def table() -> dict:
        proposer = measured(small_target)
        Decoder(small_target, proposer, sampling=Sampling(), stop=set())
        proposer.costs.prepare(2)
        return proposer.costs.table

    assert table() == {1: now, 2: now} and asked == [1, 2]
    now[4] = 2.5  # within DRIFT
    assert table()[2][4] == 2.0 and asked == [1, 2, 2]
    now[4] = 2.7
    assert table() == {1: now, 2: now} and asked == [1, 2, 2, 2, 1, 2]
    assert table() == {1: now, 2: now}  # from the disk
    assert asked[6:] == [2]


def test_processes_that_measure_the_same_at_once_do_not_disturb_each_other(tmp_path, small_target):
    given = conditions(small_target)

    def write_often() -> None:
        warnings.simplefilter("error")
        for _ in range(50):
            costs_module._write(tmp_path / "costs.json", given, {1: {1: 1.0}}, {})

    children = [multiprocessing.get_context("fork").Process(target=write_often) for _ in range(2)]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert costs_module._read(tmp_path / "costs.json") == ({1: {1: 1.0}}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["costs.json"]


def test_an_unreadable_cache_folder_is_no_obstacle(small_target, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(costs_module, "SIZES", (1, 2))
    monkeypatch.setattr(costs_module, "SECONDS", 0.01)
    proposer = measured(small_target)
    with pytest.warns(UserWarning, match="measured costs cannot be kept"):
        Decoder(small_target, proposer, sampling=Sampling(), stop=set()).generate(repeating_texts(3, 12)[:1], 5)


def test_the_first_start_makes_few_passes(small_target, tmp_path, monkeypatch):
    """On a machine whose passes take as long as their tokens say: 2 of each size, for the first and the last number of rows."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    clock = Clock()
    monkeypatch.setattr(costs_module.time, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(costs_module, "SECONDS", 1.5)
    passes = []
    call = costs_module.Verifier.__call__

    def verify(self, tree, *inputs, **more):
        passes.append(tree.tokens.shape)
        clock.now += 0.02 + 0.002 * tree.tokens.numel() * next(clock.noise)
        return call(self, tree, *inputs, **more)

    monkeypatch.setattr(costs_module.Verifier, "__call__", verify)
    proposer = measured(small_target)
    Decoder(small_target, proposer, sampling=Sampling(), stop=set())
    proposer.costs.prepare(8)
    sizes = [(1, num) for num in costs_module.SIZES] + [(8, num) for num in costs_module.BATCH_SIZES]
    assert sorted(passes) == sorted(2 * sizes)
    for rows in (1, 2, 5, 8):  # what was not measured is between
        curve = proposer.costs.curve(rows)
        assert curve == pytest.approx({num: 0.02 + 0.002 * rows * num for num in costs_module.SIZES})
        proposer.costs.prepare(rows)
    assert len(passes) == 2 * len(sizes)
    clock.noise = itertools.cycle([1.0, 3.0, 2.0, 4.0, 1.5])  # other work on the machine
    proposer.costs.table.clear()
    proposer.costs.prepare(8)
    assert 2 * len(sizes) < len(passes) - 2 * len(sizes) <= 3 * len(sizes)
