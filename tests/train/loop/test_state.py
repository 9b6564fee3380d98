"""Tests of the folder of a run: its log, its states, when they are saved, and the thread that writes them."""

import json
import re
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec import checkpoint
from specdec.core import files
from tests.support.runs import PowerCutError, before_steps, cut_power, fit_interrupted, losses_of
from train.loop.state import RunFolder, StateSaver

STATE = {"weights": {"weight": torch.arange(3.0)}, "optimizer": {"state": {}, "param_groups": []}, "document": {}}
SHORT_OPTIONS = ("head=eagle", "solve_packs=0", "validation.num_prompts=1", "validation.max_new_tokens=2",
                 "validation.decode=end", "validation.share=0", "validation.auto=never")  # fmt: skip


@pytest.fixture
def run_folder(tmp_path) -> RunFolder:
    return RunFolder(tmp_path, spec={}, settings={"optimizer.lr": 0.1, "head": "eagle"})


def save(run_folder: RunFolder, step: int) -> None:
    optimizer = {"state": {0: {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}
    run_folder.save_state(step, weights={"weight": torch.arange(3.0)}, optimizer=optimizer, document={"seen": 7})


# States


def test_a_state_is_read_back_and_the_newest_two_are_kept(run_folder):
    assert run_folder.read_state() is None and run_folder.find_saved_step() == 0
    for step in (2, 10, 1_000_000):
        save(run_folder, step)
    assert [path.name for path in run_folder.list_states()] == ["step_1000000", "step_000010"]
    assert sorted(path.name for path in (run_folder.path / "state").iterdir()) == ["step_000010", "step_1000000"]
    (run_folder.list_states()[0] / files.CHECKSUMS).unlink()  # earlier versions wrote none
    weights, optimizer, document = run_folder.read_state()
    assert weights["weight"].tolist() == [0, 1, 2] and document["seen"] == 7 and document["step"] == 1_000_000
    assert optimizer["state"][0]["exp_avg"].tolist() == [1, 1] and optimizer["param_groups"] == [{"lr": 0.1}]


@pytest.mark.parametrize("name", ["state.json", "drafter.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_state_is_named_and_the_one_before_it_is_used(run_folder, name, damage):
    save(run_folder, 2)
    save(run_folder, 10)
    for step in (10, 2):
        path = run_folder.path / "state" / f"step_{step:06d}" / name
        content = bytearray(path.read_bytes())
        if damage == "flipped":  # one bit
            content[content.rindex(b'"seen": 7') + 8 if name == "state.json" else -1] ^= 4
        path.write_bytes(content if damage == "flipped" else content[:-5])
        with pytest.warns(UserWarning, match=rf"step_000010/{name} is .*\. The state before it is used\."):
            if step == 10:
                assert run_folder.read_state()[2]["step"] == 2
            else:
                with pytest.raises(ValueError, match=rf"no state that is whole.*step_000002/{name}"):
                    run_folder.read_state()


@pytest.mark.parametrize(
    ("recorded", "current", "refused"),
    [
        ((1, 1, 2), (1, 2, 1), False),  # the same packs in a step
        ((2, 2, 1), (4, 1, 1), False),
        ((1, 1, 2), (1, 1, 1), False),  # fewer, because there are fewer processes
        ((1, 1, 2), (3, 1, 2), True),
    ],
)
def test_another_number_of_processes_may_resume(run_folder, recorded, current, refused):
    names = ("train.batch", "train.accumulation", "processes")
    recorded_folder, current_folder = (
        replace(run_folder, settings=dict(zip(names, values))) for values in (recorded, current)
    )
    save(recorded_folder, 2)
    if refused:
        with pytest.raises(ValueError, match=r"train\.batch was 1, is 3"):
            current_folder.read_state()
    else:
        assert current_folder.read_state()[2]["step"] == 2


def test_a_run_of_an_earlier_version_goes_on_if_it_used_nothing_that_went(run_folder):
    """Losses of weight 0 and other options that are gone do not count; nor can its target be compared."""
    losses = {f"head.objective.losses.{name}": weight for name, weight in (("kl", 1.0), ("jsd", 0.0))}
    folder = replace(run_folder, settings={**run_folder.settings, "head.objective.losses.kl": 1.0, "target": "v2.0"})
    with pytest.warns(UserWarning, match="names its target in the form of an earlier version, .* start another run="):
        folder.refuse_changes({**run_folder.settings, **losses, "head.objective.eta": 3.0, "target": "0" * 16})
    with pytest.raises(ValueError, match=r"other settings: head\.objective\.losses\.jsd was 0\.5, is None\. Resume"):
        folder.refuse_changes({**folder.settings, **losses, "head.objective.losses.jsd": 0.5})


# The log, and which step is the best


@pytest.mark.parametrize("torn", ["", '{"step": 5, "lo'])
def test_log_and_best_go_back_to_the_state(run_folder, torn):
    for step in range(1, 6):
        run_folder.log(step, {"loss": 1.0 / step})
    with (run_folder.path / "log.jsonl").open("a") as log:
        log.write(torn)
    run_folder.mark_best("step_000005")
    run_folder.go_back(3, {"step": 2, "figure": 1.5})
    assert [row["step"] for row in run_folder.read_log()] == [1, 2, 3]
    assert (run_folder.path / "best").read_text() == "step_000002\n"
    run_folder.go_back(-1, {})
    assert run_folder.read_log() == [] and not (run_folder.path / "best").exists()
    (run_folder.path / "log.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl: line 2 is damaged"):
        run_folder.go_back(3, {})


def test_a_begun_or_finished_run_is_not_overwritten(run_folder):
    assert not run_folder.check_start(resume=False) and not run_folder.check_start(resume="auto")
    run_folder.log(1, {})
    run_folder.check_start(resume=True)
    with pytest.raises(ValueError, match="has begun"):
        run_folder.check_start(resume=False)
    run_folder.finish(1)
    assert run_folder.check_start(resume="auto")
    with pytest.raises(ValueError, match=r"finished run \(1 steps\)"):
        run_folder.check_start(resume=True)


@pytest.mark.parametrize("length", [4096, 8192])
def test_long_packs_of_an_earlier_version_are_named_where_the_data_differ(run_folder, length):
    folder = replace(run_folder, settings={"data.length": length, "data": "new"})
    with pytest.raises(ValueError, match=r"the training data \(digest old then, new now\)") as refused:
        folder.refuse_changes({"data.length": length, "data": "old"})
    assert ("an earlier version began it" in str(refused.value)) is (length > 4096)


# The thread that writes states


class Slow:
    """Writes a state when it may, or fails."""

    def __init__(self, run_folder: RunFolder, error: str | None = None):
        self.run_folder, self.error, self.steps, self.may = run_folder, error, [], threading.Event()

    def __call__(self, step, **state):
        self.steps.append(step)
        if self.error:
            raise ValueError(self.error)
        assert self.may.wait(5)
        self.run_folder.save_state(step, **state)


def test_training_goes_on_while_a_state_is_written_and_the_next_one_waits(run_folder):
    slow = Slow(run_folder)
    with StateSaver(slow, every=1, minutes=None) as saving:
        document = {"seen": {"tokens": 1}}
        saving.write(1, **{**STATE, "document": document})
        document["seen"]["tokens"] = 2  # counters go on
        assert run_folder.list_states() == [] and not saving.is_overdue()
        threading.Timer(0.05, slow.may.set).start()
        saving.write(2, **STATE)
        assert run_folder.find_saved_step() == 1
        assert checkpoint.read_json(run_folder.list_states()[0] / "state.json")["seen"] == {"tokens": 1}
    assert run_folder.find_saved_step() == 2 and slow.steps == [1, 2]  # leaving waits


@pytest.mark.parametrize("minutes", [None, 3])
def test_states_are_saved_by_minutes_or_steps(monkeypatch, run_folder, minutes):
    seconds = [100.0]
    monkeypatch.setattr("train.loop.state.time.monotonic", lambda: seconds[0])
    with StateSaver(run_folder.save_state, every=4, minutes=minutes) as saving:
        assert [step for step in range(1, 10) if saving.is_step_due(step)] == [4, 8]
        seconds[0] += 179
        assert not saving.is_overdue()
        seconds[0] += 1
        assert saving.is_overdue() is (minutes is not None)
        saving.write(1, **STATE)
        assert not saving.is_overdue()
    with StateSaver(run_folder.save_state, every=None, minutes=minutes) as saving:
        assert not saving.is_step_due(4) and not saving.is_overdue()


@pytest.mark.parametrize("when", ["overdue", "write", "wait", "leave", "an error of training"])
def test_a_state_that_could_not_be_written_is_told_at_the_next_occasion(run_folder, when):
    """But it does not hide an error of training."""
    saving = StateSaver(Slow(run_folder, "state/step_000001 could not be written"), every=1, minutes=None)
    expected = (RuntimeError, "of training") if when == "an error of training" else (ValueError, "could not be written")
    with pytest.raises(expected[0], match=expected[1]), saving:
        saving.write(1, **STATE)
        if when == "leave":
            return
        if when == "an error of training":
            raise RuntimeError("of training")
        if when == "overdue":
            saving.pending_write.exception()
        {"overdue": saving.is_overdue, "wait": saving.wait, "write": lambda: saving.write(2, **STATE)}[when]()
        pytest.fail("it was not told")


# Of real runs


def files_of(run: str) -> dict[str, bytes]:
    states = Path("checkpoints", run, "state")
    return {f"{path.parent.name}/{path.name}": path.read_bytes() for path in states.glob("*/*.safetensors")}


repeats = pytest.mark.skipif(
    torch.cuda.is_available(), reason="two runs on a GPU differ in their last bits: sums by atomics"
)


@repeats
def test_a_state_that_is_written_later_is_that_of_its_step(fit, monkeypatch):
    """The weights, moments and average of step 2, although they are written when step 3 has changed them."""
    options = (*SHORT_OPTIONS, "train.ema=0.9", "train.save_every=2")
    fit("at-once", *options)
    save_state, may = RunFolder.save_state, threading.Event()

    def late(folder, step, **state):
        assert step != 2 or may.wait(10)
        save_state(folder, step, **state)

    monkeypatch.setattr(RunFolder, "save_state", late)
    with before_steps(lambda trainer: trainer.step == 3 and may.set()):
        fit("late", *options)
    assert files_of("late") == files_of("at-once") and len(files_of("late")) == 4
    assert losses_of("late") == losses_of("at-once")


def test_a_run_that_goes_on_with_fewer_groups_says_what_keeps_the_packs_of_a_step(fit, capsys):
    options = (*SHORT_OPTIONS, "train.save_every=2")
    with before_steps(cut_power(3)), pytest.raises(PowerCutError):
        fit("run", *options)
    (state,) = Path("checkpoints/run/state").iterdir()
    document = checkpoint.read_json(state / "state.json")
    document["about"]["processes"] = 2
    (state / "state.json").write_text(json.dumps(document))
    (state / files.CHECKSUMS).unlink()
    fit("run", *options, "resume=true")
    out = capsys.readouterr().out
    assert "begun by 2 groups of processes and goes on with 1: " in out and "train.context_parallel" in out


def test_the_first_step_of_every_launch_is_shown(fit, capsys):
    fit_interrupted(fit, "run", *SHORT_OPTIONS, "train.steps=5", "train.log_every=0")  # resumes from step 2
    assert re.findall(r"^step +(\d)/5 ", capsys.readouterr().out, re.M) == ["1", "3", "5"]
