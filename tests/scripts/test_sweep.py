"""Tests of scripts/sweep.py and of the choice of a batch size, on tiny checkpoints."""

import json
from pathlib import Path

import pytest

from scripts import evaluate, sweep
from specdec.core.timing import fastest_batch
from tests.support import save_eagle, save_target, write_prompts
from train.data import rows as data

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sweep")
    target = save_target(folder / "target")
    for seed, name in enumerate(("one", "two")):
        save_eagle(folder / "heads" / name, target, seed=seed)
    write_prompts(folder / "prompts.jsonl", 4)
    return folder


@pytest.fixture
def run(folder, tmp_path, run_script):
    def run(*arguments, script=sweep):
        values = {"checkpoint": f"{folder}/heads/one", "prompts": f"{folder}/prompts.jsonl", "out": f"{tmp_path}/out",
                 "target.dtype": "float32", "max_new_tokens": "6"}  # fmt: skip
        values |= {"batches": "1,2", "repeats": "1"} if script is sweep else {}
        values |= dict(argument.split("=", 1) for argument in arguments)
        return run_script(script, *(f"{key}={value}" for key, value in values.items()))

    return run


def batches(tmp_path: Path) -> dict:
    lines = (tmp_path / "out" / "cells.jsonl").read_text().splitlines()
    return {row["batch"]: row["runs"] for row in map(json.loads, lines)}


def test_every_batch_size_and_checkpoint_is_measured(run, folder, tmp_path):
    printed = run(f"checkpoint={folder}/heads/one,{folder}/heads/two", "batches=4,1,2,8", "groups=2", "repeats=2")
    assert (tmp_path / "out" / "sweep.png").stat().st_size > 10_000
    assert "stop tokens ignored" in printed and "faster at batch sizes" in printed
    assert list(batches(tmp_path)) == [1, 2, 4, 8]
    for batch, column in batches(tmp_path).items():
        assert list(column) == ["heads/one", "heads/two"]
        for figures in column.values():
            assert len(figures["ratios"]) == 2 * (2 if batch <= 2 else 1)
            assert min(figures["ratios"]) <= figures["speedup"] <= max(figures["ratios"])
            assert figures["plain"]["tau"] == 1 <= figures["drafted"]["tau"]
            plain = figures["plain"]
            assert plain["ms_per_token"] == pytest.approx(plain["ms_per_round"])
            assert plain["tokens_per_second"] == pytest.approx(1e3 * batch / plain["ms_per_token"])


def test_stop_tokens_are_ignored_unless_ignore_stop_is_false(run, refuse, tmp_path, monkeypatch):
    """Every token is a stop token here."""
    monkeypatch.setattr(data, "stop_tokens", lambda *_: set(range(100_000)))
    assert "stop tokens ignored" in run("batches=2")
    refuse("before any round: set ignore_stop=true", "batches=2", "ignore_stop=false", f"out={tmp_path}/other")


def test_measured_batch_sizes_are_kept(run, tmp_path, monkeypatch):
    run()
    before = batches(tmp_path)
    decode = sweep.decode
    monkeypatch.setattr(sweep, "decode", None)
    assert "batch sizes 1, 2 are in" in run()  # all figures are read from the file
    assert "batch sizes 1, 2 are in" in run("batches=2")
    assert batches(tmp_path) == before

    def interrupted(*arguments):
        if 4 in arguments:
            raise KeyboardInterrupt
        return decode(*arguments)

    monkeypatch.setattr(sweep, "decode", interrupted)
    (tmp_path / "out" / "sweep.png").unlink()
    with pytest.raises(KeyboardInterrupt):
        run("batches=3,4")
    assert list(batches(tmp_path)) == [1, 2, 3] and (tmp_path / "out" / "sweep.png").exists()
    assert {batch: batches(tmp_path)[batch] for batch in before} == before


def test_other_settings_are_refused(run, refuse, folder):
    run("batches=1")
    refuse(r"max_new_tokens \(then 6, now 7\).*another out=", "max_new_tokens=7")
    refuse("checkpoint", f"checkpoint={folder}/heads/two")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["batches=1,x"], "batches=1,x: give numbers"),
        (["batches=0"], "at least 1"),
        (["groups=0"], "must be a whole number of 1 or more"),
        (["max_new_tokens=1"], "max_new_tokens at least 2"),
        (["decode.temperature=0,1"], "give one"),
        (["checkpoint=nowhere"], "does not exist"),
    ],
)
def test_wrong_arguments_are_refused(refuse, arguments, message):
    refuse(message, *arguments)


def test_fastest_batch_chooses_by_tokens_per_second():
    prompts = [[n] for n in range(20)]
    rates = {1: 10.0, 4: 30.0, 16: 20.0}
    assert fastest_batch(lambda group: rates[len(group)], prompts) == 4
    assert fastest_batch(lambda group: rates[len(group)], prompts, sizes=(1, 16)) == 16
    assert fastest_batch(lambda group: float(len(group)), prompts[:15]) == 4  # fewer than 16 prompts

    calls: list[list[list[int]]] = []

    def slow_at_first(group):
        calls.append(group)
        return 0.0 if [len(call) for call in calls].count(len(group)) == 1 else 1.0 / len(group)

    assert fastest_batch(slow_at_first, prompts, sizes=(4, 1)) == 1
    assert calls == [prompts[:4], prompts[:4], prompts[4:8], prompts[8:12], [[0]], [[0]], [[1]], [[2]]]


def test_evaluate_chooses_a_batch_size(run, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluate, "fastest_batch", lambda decode, prompts: 3 if decode(prompts) > 0 else 0)
    printed = run("batch=null", f"out={tmp_path}/report.json", script=evaluate)
    assert "decoding 3 prompts at once, which is fastest here" in printed
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["settings"]["batch"] == 3 and report["identical_outputs"] == 1
