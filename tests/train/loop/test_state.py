"""Tests of the folder of a run: its log, its states, when they are saved, and the thread that writes them."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from specdec import checkpoint
from specdec.core import files
from tests.support import PowerCutError, before_steps, cut_power, losses_of
from train.loop.state import RunFolder, Saving

STATE = {"weights": {"weight": torch.arange(3.0)}, "optimizer": {"state": {}, "param_groups": []}, "document": {}}
QUICK = ("head=eagle", "solve_packs=0", "validation.num_prompts=1", "validation.max_new_tokens=2", "validation.decode=end", "validation.share=0", "validation.auto=never")  # fmt: skip


@pytest.fixture
def own(tmp_path) -> RunFolder:
    return RunFolder(tmp_path, spec={}, settings={"optimizer.lr": 0.1, "head": "eagle"})


def save(own: RunFolder, step: int) -> None:
    optimizer = {"state": {0: {"exp_avg": torch.ones(2), "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]}
    own.save_state(step, weights={"weight": torch.arange(3.0)}, optimizer=optimizer, document={"seen": 7})


# States


def test_a_state_is_read_back_and_the_newest_two_are_kept(own):
    assert own.read_state() is None and own.saved_step() == 0
    for step in (2, 10, 1_000_000):
        save(own, step)
    assert [path.name for path in own.states()] == ["step_1000000", "step_000010"]
    assert sorted(path.name for path in (own.path / "state").iterdir()) == ["step_000010", "step_1000000"]
    (own.states()[0] / files.CHECKSUMS).unlink()  # earlier versions wrote none
    weights, optimizer, document = own.read_state()
    assert weights["weight"].tolist() == [0, 1, 2] and document["seen"] == 7 and document["step"] == 1_000_000
    assert optimizer["state"][0]["exp_avg"].tolist() == [1, 1] and optimizer["param_groups"] == [{"lr": 0.1}]


@pytest.mark.parametrize("name", ["state.json", "drafter.safetensors", "optimizer.safetensors"])
@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_state_is_named_and_the_one_before_it_is_used(own, name, damage):
    save(own, 2)
    save(own, 10)
    for step in (10, 2):
        path = own.path / "state" / f"step_{step:06d}" / name
        content = bytearray(path.read_bytes())
        if damage == "flipped":  # one bit
            content[content.rindex(b'"seen": 7') + 8 if name == "state.json" else -1] ^= 4
        path.write_bytes(content if damage == "flipped" else content[:-5])
        with pytest.warns(UserWarning, match=rf"step_000010/{name} is .*\. The state before it is used\."):
            if step == 10:
                assert own.read_state()[2]["step"] == 2
            else:
                with pytest.raises(ValueError, match=rf"no state that is whole.*step_000002/{name}"):
                    own.read_state()


def test_a_state_of_other_settings_is_refused(own):
    save(own, 2)
    other = replace(own, settings={"optimizer.lr": 0.2, "head": "eagle"})
    with pytest.raises(ValueError, match=r"optimizer.lr was 0.1, is 0.2\. Resume with the settings"):
        other.read_state()


@pytest.mark.parametrize(
    ("then", "now", "refused"),
    [
        ((1, 1, 2), (1, 2, 1), False),  # the same packs in a step
        ((2, 2, 1), (4, 1, 1), False),
        ((1, 1, 2), (1, 1, 1), False),  # fewer, because there are fewer processes
        ((1, 1, 2), (3, 1, 2), True),
    ],
)
def test_another_number_of_processes_may_resume(own, then, now, refused):
    names = ("train.batch", "train.accumulation", "processes")
    before, after = (replace(own, settings=dict(zip(names, values))) for values in (then, now))
    save(before, 2)
    if refused:
        with pytest.raises(ValueError, match=r"train\.batch was 1, is 3"):
            after.read_state()
    else:
        assert after.read_state()[2]["step"] == 2


# The log, and which step is the best


@pytest.mark.parametrize("torn", ["", '{"step": 5, "lo'])
def test_log_and_best_go_back_to_the_state(own, torn):
    for step in range(1, 6):
        own.log(step, {"loss": 1.0 / step})
    with (own.path / "log.jsonl").open("a") as log:
        log.write(torn)
    own.mark_best("step_000005")
    own.go_back(3, {"step": 2, "figure": 1.5})
    steps = lambda: [row["step"] for row in map(json.loads, (own.path / "log.jsonl").read_text().splitlines())]
    assert steps() == [1, 2, 3] and (own.path / "best").read_text() == "step_000002\n"
    own.go_back(-1, {})
    assert steps() == [] and not (own.path / "best").exists()
    (own.path / "log.jsonl").write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"log\.jsonl: line 2 is damaged"):
        own.go_back(3, {})


def test_a_begun_or_finished_run_is_not_overwritten(own):
    assert not own.check(resume=False) and not own.check(resume="auto")
    own.log(1, {})
    own.check(resume=True)
    with pytest.raises(ValueError, match="has begun"):
        own.check(resume=False)
    own.finish(1)
    assert own.check(resume="auto")
    with pytest.raises(ValueError, match=r"finished run \(1 steps\)"):
        own.check(resume=True)


# The thread that writes states


class Slow:
    """Writes a state when it may, or fails."""

    def __init__(self, own: RunFolder, error: str | None = None):
        self.own, self.error, self.begun, self.may = own, error, [], threading.Event()

    def __call__(self, step, **state):
        self.begun.append(step)
        if self.error:
            raise ValueError(self.error)
        assert self.may.wait(5)
        self.own.save_state(step, **state)


def test_training_goes_on_while_a_state_is_written_and_the_next_one_waits(own):
    slow = Slow(own)
    with Saving(slow, every=1, minutes=None) as saving:
        document = {"seen": {"tokens": 1}}
        saving.write(1, **{**STATE, "document": document})
        document["seen"]["tokens"] = 2  # counters go on
        assert own.states() == [] and not saving.overdue()
        threading.Timer(0.05, slow.may.set).start()
        saving.write(2, **STATE)
        assert own.saved_step() == 1
        assert checkpoint.read_json(own.states()[0] / "state.json")["seen"] == {"tokens": 1}
    assert own.saved_step() == 2 and slow.begun == [1, 2]  # leaving waits


@pytest.mark.parametrize("minutes", [None, 3])
def test_states_are_saved_by_minutes_or_steps(monkeypatch, own, minutes):
    now = [100.0]
    monkeypatch.setattr("train.loop.state.time.monotonic", lambda: now[0])
    with Saving(own.save_state, every=4, minutes=minutes) as saving:
        assert [step for step in range(1, 10) if saving.after(step)] == [4, 8]
        now[0] += 179
        assert not saving.overdue()
        now[0] += 1
        assert saving.overdue() is (minutes is not None)
        saving.write(1, **STATE)
        assert not saving.overdue()
    with Saving(own.save_state, every=None, minutes=minutes) as saving:
        assert not saving.after(4) and not saving.overdue()


@pytest.mark.parametrize("when", ["overdue", "write", "wait", "leave", "an error of training"])
def test_a_state_that_could_not_be_written_is_told_at_the_next_occasion(own, when):
    """But it does not hide an error of training."""
    saving = Saving(Slow(own, "state/step_000001 could not be written"), every=1, minutes=None)
    wanted = (RuntimeError, "of training") if when == "an error of training" else (ValueError, "could not be written")
    with pytest.raises(wanted[0], match=wanted[1]), saving:
        saving.write(1, **STATE)
        if when == "leave":
            return
        if when == "an error of training":
            raise RuntimeError("of training")
        if when == "overdue":
            saving.coming.exception()
        {"overdue": saving.overdue, "wait": saving.wait, "write": lambda: saving.write(2, **STATE)}[when]()
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
    more = (*QUICK, "train.ema=0.9", "train.save_every=2")
    fit("at-once", *more)
    save_state, may = RunFolder.save_state, threading.Event()

    def late(folder, step, **state):
        assert step != 2 or may.wait(10)
        save_state(folder, step, **state)

    monkeypatch.setattr(RunFolder, "save_state", late)
    with before_steps(lambda trainer: trainer.step == 3 and may.set()):
        fit("late", *more)
    assert files_of("late") == files_of("at-once") and len(files_of("late")) == 4
    assert losses_of("late") == losses_of("at-once")


@repeats
def test_a_run_saves_by_minutes_and_continues_as_one_that_saved_by_steps(fit, monkeypatch):
    clock, saved, write = [0.0], [], Saving.write
    monkeypatch.setattr("train.loop.state.time.monotonic", lambda: clock[0])
    monkeypatch.setattr(Saving, "write", lambda self, step, **state: saved.append(step) or write(self, step, **state))

    def tick(trainer):
        clock[0] += 240.0  # 4 minutes a step

    more = (*QUICK, "train.save_every=null", "train.steps=8", "train.validate_every=8")
    with before_steps(tick):
        fit("whole", *more)
        assert saved == [3, 6, 8]  # the default is 10 minutes, and the last step
        with before_steps(cut_power(5)), pytest.raises(PowerCutError):
            fit("died", *more)
        fit("died", *more, "resume=true", "train.save_every=100")
    assert saved == [3, 6, 8, 3, 6, 8] and losses_of("died") == losses_of("whole")
    assert files_of("died") == files_of("whole")
