"""Short runs of training: their arguments, logs, weights and interruptions."""

import contextlib
import json
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from specdec import checkpoint
from tests.support.commands import ROOT, train_command
from train.data.encoding import load_rows
from train.data.packing import Packs
from train.loop.trainer import Trainer
from train.settings.hydra_text import make_search_path, quote_arguments


def load_packs(train, encoding, *, length: int, packed: bool, **settings):
    """The packs of one or several sources, as train/prepare/build.py makes them"""
    rows, numbers = load_rows(train, encoding, **settings)
    packs = Packs(rows, length=length, packed=packed, row_numbers=numbers)
    packs.warn_of_losses()
    return packs


def train_overrides(folder: Path, run: str, *overrides: str) -> list[str]:
    """Arguments of train.py for a short run with the target and data in `folder`."""
    return [
        f"run={run}",
        f"target.name={folder}/target",
        "target.dtype=float32",
        f"data.train={folder}/train.jsonl",
        f"data.heldout={folder}/prompts.jsonl",
        f"data.cache={folder}/data-cache",
        "data.length=64",
        "precision=fp32",
        "features.mode=online",
        "threads=1",
        "validation.max_new_tokens=4",
        "train.steps=4",
        "train.batch=1",
        "train.accumulation=1",
        "train.validate_every=4",
        "train.save_every=2",
        "train.log_every=1",
        "optimizer.lr=1e-3",
        "optimizer.warmup=1",
        "head.vocab_size=200",
        *overrides,
    ]


def train_in_process(arguments: list[str]) -> int:
    """Runs train.py in the test's process, without lines of progress. -> its exit status"""
    arguments = [argument for argument in arguments if not argument.startswith("hydra.")]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", overrides=[*quote_arguments(arguments), "progress=quiet", make_search_path()])
    Path(config.run).mkdir(parents=True, exist_ok=True)
    return train_command().fit(config)


def log_of(run: str) -> list[dict]:
    """The rows of the log of a run in the working directory, as are the next ones."""
    return [json.loads(line) for line in Path("checkpoints", run, "log.jsonl").read_text().splitlines()]


def losses_of(run: str) -> dict[int, float]:
    """The logged loss of each step."""
    return {row["step"]: row["loss"] for row in log_of(run) if "loss" in row}


def report_of(run: str, step: int = 4) -> dict:
    return json.loads(Path("checkpoints", run, f"step_{step:06d}", "report.json").read_text())


def weights_of(run: str, step: int = 4, *, state: bool = False) -> dict[str, torch.Tensor]:
    """Of a checkpoint, or of a state."""
    place = Path("checkpoints", run, *(["state"] if state else []), f"step_{step:06d}")
    return checkpoint.read_tensors(place / "drafter.safetensors")


def same_weights(weights: dict[str, torch.Tensor], other_weights: dict[str, torch.Tensor]) -> bool:
    """Bit for bit"""
    return weights.keys() == other_weights.keys() and all(
        torch.equal(value, other_weights[name]) for name, value in weights.items()
    )


@contextlib.contextmanager
def before_steps(act):
    """Within, act(trainer) is called before each step of training."""
    take_step = Trainer.take_step

    def acting(trainer, **settings):
        act(trainer)
        return take_step(trainer, **settings)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "take_step", acting)
        yield


class PowerCutError(Exception):
    pass


def cut_power(step: int):
    """For `before_steps`: a run dies when so many steps are done."""

    def act(trainer):
        if trainer.step == step:
            raise PowerCutError

    return act


def fit_interrupted(fit, name: str, *overrides: str) -> None:
    """Trains a run that fails before its fourth step, and resumes it."""
    with before_steps(cut_power(3)), pytest.raises(PowerCutError):
        fit(name, *overrides)
    assert fit(name, *overrides, "resume=true") == 0
