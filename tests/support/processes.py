"""Runs of train.py in float64 by several processes, one run after the other: starting Python takes longer than a tiny
run.
"""

import hashlib
import os
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState, PartialState
from hydra import compose, initialize_config_dir

from tests.support.commands import ROOT, train_command
from tests.support.runs import PowerCutError, before_steps
from tests.support.together import free_ports, printed_by
from train.loop.trainer import Trainer
from train.objective.objective import Objective
from train.prepare import facts
from train.settings.hydra_text import make_search_path


def fit_float64(
    run: str, overrides: list[str], stop: int | None = None, spoil: int | None = None, end: int | None = None
) -> None:
    """Trains a run in the working directory, with target, head and optimizer in float64. Prints digests of buffers.

    stop: the step before which the run dies; spoil: the step whose loss is not a number; end: the step within which the
    second process gets SIGTERM
    """
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", overrides=[*overrides, f"run={run}", "target.dtype=float64", make_search_path()])
    Path("checkpoints", run).mkdir(parents=True, exist_ok=True)
    before, forward, number = torch.get_default_dtype(), Objective.forward, [0]

    def act(trainer):
        number[0] = trainer.step + 1
        buffers = dict(trainer.drafter.named_buffers())
        print(f"# buffers {run} {number[0]} {sorted(buffers)} {digest_tensors(buffers.values())}")
        if trainer.num_processes > 1:
            assert not trainer.objective.broadcast_buffers and trainer.objective.gradient_as_bucket_view
        if number[0] == stop:
            raise PowerCutError
        if number[0] == end and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGTERM)

    def spoiled(objective, *arguments, **settings):
        loss = forward(objective, *arguments, **settings)
        return replace(loss, total=loss.total * float("nan")) if number[0] == spoil else loss

    with pytest.MonkeyPatch.context() as patch, before_steps(act):
        patch.setattr(Objective, "forward", spoiled)
        patch.delenv("ACCELERATE_USE_FSDP", raising=False)  # accelerate sets it
        torch.set_default_dtype(torch.float64)
        try:
            assert train_command().fit(config) == 0 and stop is None
        except PowerCutError:
            torch.distributed.is_initialized() and torch.distributed.destroy_process_group()
        finally:
            torch.set_default_dtype(before)
            for state in (AcceleratorState, GradientState, PartialState):
                state._reset_state()


def digest_tensors(tensors: Iterable[torch.Tensor]) -> str:
    """Of their bytes, in order"""
    contents = [value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes() for value in tensors]
    return hashlib.sha256(b"".join(contents)).hexdigest()[:16]


def fit_together(cwd: Path, runs: list[dict], num: int = 2) -> list[str]:
    """Trains the runs by two processes, or `num`, without a launcher. -> what each has printed"""
    for run, port in zip(runs, free_ports(len(runs))):  # each has its own: the one before may not have closed yet
        run["port"] = port
    return printed_by(num, "tests.support.processes:fit_all", runs, cwd=cwd)


def fit_all(runs: list[dict]) -> None:
    """In each process."""
    os.environ["COLUMNS"] = "10000"
    tell()
    for each in runs:
        os.environ["MASTER_PORT"] = each.pop("port")
        print(f"# {each['run']}", flush=True)
        fit_float64(**each)


def tell() -> None:
    """Lets the process print what it computes itself."""
    start, count = Trainer._measure_and_solve, facts.choose_draft_vocab

    def telling(event, function):
        def print_and_call(*arguments, **settings):
            print(f"computed {event}")
            return function(*arguments, **settings)

        return print_and_call

    Trainer._measure_and_solve = telling("start", start)
    facts.choose_draft_vocab = telling("vocabulary", count)
