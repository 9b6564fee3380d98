"""Tests of runs of several processes: their packs, a process that ends, waiting."""

import contextlib
import itertools
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs

from specdec import checkpoint
from tests.support.commands import ROOT, child_environment, start
from tests.support.runs import PowerCutError, before_steps, cut_power, losses_of, train_overrides
from tests.support.together import free_ports, together
from train import processes
from train.features.loader import Order
from train.loop.trainer import StopVote
from train.processes import ProcessGroup, ProcessLost, Waiting


def order_of(settings: list[tuple[int, int, int]], steps: int, num_packs: int) -> list[int]:
    """The packs that are read by launches of (batch, accumulation, processes), each of `steps` steps, in order."""
    read: list[int] = []
    for launch, (batch, accumulation, num_processes) in enumerate(settings):
        first = (launch * steps, len(read))
        for step, micro, process in itertools.product(range(steps), range(accumulation), range(num_processes)):
            order = Order(
                num_packs, 0, batch, accumulation, group=process, num_groups=num_processes, launch_start=first
            )
            assert (micro, process) != (0, 0) or order.count_packs_before(first[0] + step) == len(read)
            read += order(first[0] + step, micro)
    return read


@pytest.mark.parametrize(
    "settings",
    [
        [(1, 1, 2), (1, 2, 1)],
        [(1, 1, 4), (2, 2, 1)],
        [(1, 1, 3), (1, 1, 2), (2, 1, 1)],
        [(1, 3, 1), (1, 1, 5)],
        [(1, 1, 64), (2, 4, 8)],
    ],
)
def test_the_order_of_packs_goes_on_with_other_processes(settings):
    read = order_of(settings, 5, 17)
    assert read == order_of([(1, 1, 1)], len(read), 17)
    for first in range(0, len(read) - 16, 17):
        assert sorted(read[first : first + 17]) == list(range(17))  # an epoch: no pack twice, none left out


def start_processes(folder, cwd, run, *options) -> list[subprocess.Popen]:
    """Two processes of one run without a launcher, which would end the one when the other ends."""
    arguments = [ROOT / "train.py", *train_overrides(folder, run, *options)]
    places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_ports(1)[0], "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    return [start(arguments, cwd=cwd, errors=True, **places, RANK=rank, LOCAL_RANK=rank) for rank in ("0", "1")]


LONG = ("train.steps=100000", "train.validate_every=100000", "train.save_every=5", "train.timeout=1")


@pytest.mark.full
def test_a_process_that_dies_ends_the_run_with_a_sentence_and_one_process_continues_it(folder, tmp_path, fit):
    """One of two processes is killed, and the other says what it waited for. One process goes on with equal steps."""
    processes = start_processes(folder, tmp_path, "run", *LONG)
    for line in processes[0].stdout:
        if line.startswith("step ") and " 7/" in line:
            break
    processes[1].kill()
    printed = [process.communicate(timeout=60)[0] for process in processes]
    assert processes[0].returncode == 1
    assert "error: Process 0 waited for step " in printed[0] and printed[0].strip().endswith(
        "Continue with resume=true."
    )
    assert "step " not in printed[1]  # only the main process speaks
    state = Path("checkpoints/run/state") / sorted(os.listdir("checkpoints/run/state"))[-1] / "state.json"
    saved = checkpoint.read_json(state)["step"]
    with before_steps(cut_power(saved + 2)), pytest.raises(PowerCutError):
        fit("run", "train.accumulation=2", "resume=auto", *LONG)
    assert list(losses_of("run")) == list(range(1, saved + 3))


def test_waiting_names_what_it_waits_for(capsys):
    waiting = Waiting(minutes=1, process=1, num_processes=2)
    sentence = r"Process 1 waited for step 7, and another process .* \(\[gloo\] closed"
    with pytest.raises(ProcessLost, match=sentence), waiting("step 7"):
        raise RuntimeError("[gloo] closed by peer\nmore")
    with pytest.raises(RuntimeError, match=r"^shapes$"), waiting("step 7"):
        raise RuntimeError("shapes")


def test_waiting_ends_the_process_in_time():
    code = "import time\nfrom train.processes import Waiting\n"
    code += "with Waiting(0.001, 0, 2)('the validation of step 5'): time.sleep(60)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 1 and "has waited 0.001 minutes for the validation of step 5, and another" in done.stderr


def test_processes_ask_for_signals_seldom_but_often_enough_for_a_launcher_that_kills():
    """After 20 steps, or after about 5 seconds; the main process says when, and whether a state is overdue."""

    def ask(main: bool, seconds: float, votes: list[list[int]]) -> list[int]:
        asked_steps: list[int] = []

        def gather(own_vote):
            return torch.tensor(own_vote.tolist() + votes if main else votes + own_vote.tolist())

        accelerator = SimpleNamespace(num_processes=2, device=torch.device("cpu"), gather=gather)
        asking = StopVote(accelerator, lambda awaited: asked_steps.append(step) or contextlib.nullcontext())
        for step in range(1, 61):
            answer = asking(0, main, step, seconds, at_once=step == 30)
            assert answer == ((15, main) if asked_steps[-1:] == [step] else (0, False))
        return asked_steps

    quick, slow = ask(True, 0.01, [[15, 0, 1]]), ask(True, 1.0, [[15, 0, 20]])
    assert quick == [1, 21, 30, 50]
    assert slow == [1, 6, 11, 16, 21, 26, 30, 35, 40, 45, 50, 55, 60]
    assert ask(True, 60.0, [[15, 0, 20]]) == list(range(1, 61))
    assert ask(False, 60.0, [[15, 0, 20]]) == quick  # as the main process says


# A process that works alone


def test_others_hear_from_a_process_that_works_alone(monkeypatch):
    messages = []
    monkeypatch.setattr(processes, "HEARTBEAT", 0.01)
    monkeypatch.setattr(processes, "PartialState", lambda: SimpleNamespace(num_processes=2, is_main_process=True))
    monkeypatch.setattr(processes, "broadcast_object_list", lambda values: messages.append(values[0]) or values)
    result = ProcessGroup(0, 1).share_result(lambda: time.sleep(0.1) or "answer")
    assert result == "answer" and messages[-1] == ["answer"] and messages[:-1] == [[]] * (len(messages) - 1)
    assert len(messages) > 2


def answer_slowly() -> list:
    """In each process: what the main one answers after three times the limit of one exchange."""
    processes.HEARTBEAT = 0.3
    Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="gloo", timeout=timedelta(seconds=2))])
    group = ProcessGroup(0, 1)
    return [group.share_result(lambda: time.sleep(6) or "late"), group.share_result(lambda: None)]


@pytest.mark.full
def test_two_processes_wait_for_one_longer_than_the_limit_of_an_exchange():
    assert together(2, "tests.train.test_processes:answer_slowly") == [["late", None]] * 2
