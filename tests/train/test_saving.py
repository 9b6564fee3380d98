"""Tests of saved states: when they are saved, what they hold, and the thread that writes them."""

import threading
from pathlib import Path

import pytest
import torch
from torch import nn

from specdec import checkpoint
from tests.pretend_device import ELSEWHERE, Elsewhere, PretendDevice
from tests.support import PowerCutError, before_steps, cut_power, losses_of
from train.distributed import gathered_state
from train.state import RunFolder, Saving, pack_state

STATE = {"weights": {"weight": torch.arange(3.0)}, "optimizer": {"state": {}, "param_groups": []}, "document": {}}
QUICK = ("head=eagle", "solve_packs=0", "validation.num_prompts=1", "validation.max_new_tokens=2", "validation.decode=end", "validation.share=0", "validation.auto=never")  # fmt: skip


class Slow(RunFolder):
    """Writes a state when it may."""

    def save_state(self, step, **state):
        vars(self).setdefault("begun", []).append(step)
        assert self.may.wait(5)
        super().save_state(step, **state)


@pytest.fixture
def slow(tmp_path) -> Slow:
    folder = Slow(tmp_path, {}, {})
    vars(folder)["may"] = threading.Event()
    return folder


def test_training_goes_on_while_a_state_is_written_and_the_next_one_waits(slow):
    with Saving(slow.save_state, every=1, minutes=None) as saving:
        document = {"seen": {"tokens": 1}}
        saving.write(1, **{**STATE, "document": document})
        document["seen"]["tokens"] = 2  # counters go on
        assert slow.states() == [] and not saving.overdue()
        threading.Timer(0.05, slow.may.set).start()
        saving.write(2, **STATE)
        assert slow.saved_step() == 1 and checkpoint.read_json(slow.states()[0] / "state.json")["seen"] == {"tokens": 1}
    assert slow.saved_step() == 2 and slow.begun == [1, 2]  # leaving waits


@pytest.mark.parametrize("minutes", [None, 3])
def test_states_are_saved_by_minutes_or_steps(monkeypatch, slow, minutes):
    now = [100.0]
    monkeypatch.setattr("train.state.time.monotonic", lambda: now[0])
    slow.may.set()
    with Saving(slow.save_state, every=4, minutes=minutes) as saving:
        assert [step for step in range(1, 10) if saving.after(step)] == [4, 8]
        now[0] += 179
        assert not saving.overdue()
        now[0] += 1
        assert saving.overdue() is (minutes is not None)
        saving.write(1, **STATE)
        assert not saving.overdue()
    with Saving(slow.save_state, every=None, minutes=minutes) as saving:
        assert not saving.after(4) and not saving.overdue()


@pytest.mark.parametrize("when", ["overdue", "write", "wait", "leave"])
def test_a_state_that_could_not_be_written_is_told_at_the_next_occasion(slow, when):
    def fail(step, **state):
        raise ValueError("state/step_000001 could not be written")

    vars(slow)["save_state"] = fail
    saving = Saving(slow.save_state, every=1, minutes=None)
    with pytest.raises(ValueError, match="could not be written"), saving:
        saving.write(1, **STATE)
        if when == "leave":
            return
        if when == "overdue":
            saving.coming.exception()
        {"overdue": saving.overdue, "wait": saving.wait, "write": lambda: saving.write(2, **STATE)}[when]()
        pytest.fail("it was not told")


def test_an_error_of_training_is_not_hidden_by_one_of_saving(slow):
    def fail(step, **state):
        raise ValueError("could not be written")

    vars(slow)["save_state"] = fail
    with pytest.raises(RuntimeError, match="of training"), Saving(slow.save_state, every=1, minutes=None) as saving:
        saving.write(1, **STATE)
        raise RuntimeError("of training")


def test_a_copy_for_the_disk_takes_no_memory_of_the_device():
    class NoNewTensor(PretendDevice):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = super().__torch_dispatch__(func, types, args, kwargs)
            assert not isinstance(out, Elsewhere) or "detach" in str(func), func  # detach is a view
            return out

    with PretendDevice():
        parameter = nn.Parameter(torch.arange(3.0).to(ELSEWHERE))
        shared = torch.ones(2).to(ELSEWHERE)
        state = {"w": parameter, "state": {0: {"a": shared, "step": torch.tensor(1.0)}, 1: {"a": shared}}, "lr": 0.1}
    with NoNewTensor():
        copied = gathered_state(state, keep=True)
        moments, counts = pack_state(copied["state"])
        assert gathered_state(state, keep=False)["state"] == {0: {"a": None, "step": None}, 1: {"a": None}}
    assert copied["lr"] == 0.1 and not counts and copied["w"].tolist() == [0, 1, 2]
    assert set(moments) == {"0.a", "0.step", "1.a"} and all(type(value) is torch.Tensor for value in moments.values())
    assert moments["0.a"] is copied["state"][0]["a"]  # not copied once more
    assert moments["0.a"].data_ptr() != moments["1.a"].data_ptr()  # safetensors refuses shared memory
    assert copied["state"][0]["step"].data_ptr() != state["state"][0]["step"].data_ptr()  # training goes on


def files_of(run: str) -> dict[str, bytes]:
    folder = Path("checkpoints") / run / "state"
    return {path.parent.name + "/" + path.name: path.read_bytes() for path in folder.glob("*/*.safetensors")}


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


def test_a_run_saves_by_minutes_and_continues_as_one_that_saved_by_steps(fit, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("train.state.time.monotonic", lambda: clock[0])
    saved: list[int] = []
    write = Saving.write
    monkeypatch.setattr(
        Saving, "write", lambda saving, step, **state: saved.append(step) or write(saving, step, **state)
    )

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


@pytest.mark.parametrize("given", ["save_every=-1", "save_minutes=-1", "save_minutes=.nan"])
def test_times_that_cannot_be_are_refused(fit, given):
    with pytest.raises(ValueError, match=rf"^train\.{given.partition('=')[0]}=.* must be"):
        fit("refused", f"train.{given}")
