"""Runs of train.py in float64 by several processes, one run after the other: starting Python takes longer than a tiny run.

python -m tests.processes '[{"run": "name", "overrides": ["key=value", ...], "stop": 3}, ...]'    in each process
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from hydra import compose, initialize_config_dir

from tests.support import ROOT, PowerCutError, before_steps, child_environment, train_command
from train import build
from train.objective import Objective
from train.trainer import Trainer


def fit_float64(
    run: str, overrides: list[str], stop: int | None = None, spoil: int | None = None, end: int | None = None
) -> None:
    """Trains a run in the working directory, with target, head and optimizer in float64.

    stop: the step before which the run dies; spoil: the step whose loss is not a number; end: the step within which the second
    process gets SIGTERM
    """
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", overrides=[*overrides, f"run={run}", "target.dtype=float64"])
    Path("checkpoints", run).mkdir(parents=True, exist_ok=True)
    before, forward, number = torch.get_default_dtype(), Objective.forward, [0]

    def act(trainer):
        number[0] = trainer.step + 1
        if number[0] == stop:
            raise PowerCutError
        if number[0] == end and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    def spoiled(objective, *arguments, **settings):
        loss = forward(objective, *arguments, **settings)
        return replace(loss, total=loss.total * float("nan")) if number[0] == spoil else loss

    with pytest.MonkeyPatch.context() as patch, before_steps(act):
        patch.setattr(Objective, "forward", spoiled)
        torch.set_default_dtype(torch.float64)
        try:
            assert train_command().fit(config) == 0 and stop is None
        except PowerCutError:
            torch.distributed.is_initialized() and torch.distributed.destroy_process_group()
        finally:
            torch.set_default_dtype(before)
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()


def free_ports(num: int) -> list[str]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(num)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [str(each.getsockname()[1]) for each in sockets]


def fit_by_two(cwd: Path, runs: list[dict]) -> list[str]:
    """Trains the runs by two processes without a launcher. -> what each has printed"""
    for run, port in zip(runs, free_ports(len(runs))):  # each has its own: the one before may not have closed yet
        run["port"] = port
    places = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    processes, outputs = [], [cwd / f"printed-{rank}" for rank in range(2)]
    for rank, output in enumerate(outputs):
        environment = child_environment(**places, RANK=str(rank), LOCAL_RANK=str(rank))
        command = [sys.executable, "-m", "tests.processes", json.dumps(runs)]
        with output.open("w") as file:
            processes.append(subprocess.Popen(command, cwd=cwd, stdout=file, stderr=file, env=environment))
    try:
        codes = [process.wait(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    printed = [output.read_text() for output in outputs]
    assert codes == [0, 0], "\n\n".join(f"ended with {code}:\n{text[-4000:]}" for code, text in zip(codes, printed))
    return printed


def tell() -> None:
    """Lets the process print what it computes itself."""
    start, count = Trainer._measure_and_solve, build.draft_vocab

    def telling(what, function):
        def told(*arguments, **settings):
            print(f"computed {what}")
            return function(*arguments, **settings)

        return told

    Trainer._measure_and_solve = telling("start", start)
    build.draft_vocab = telling("vocabulary", count)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "10000"
    torch.set_num_threads(1)
    tell()
    for each in json.loads(sys.argv[1]):
        os.environ["MASTER_PORT"] = each.pop("port")
        print(f"# {each['run']}", flush=True)
        fit_float64(**each)
