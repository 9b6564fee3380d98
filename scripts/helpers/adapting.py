"""How adapt.py trains: train.py in a process of its own, with the settings of the head."""

from helpers import loading
from helpers.options import split
from helpers.settings_file import read_yaml

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import train.overrides as overrides
from specdec import checkpoint
from train import progress
from train.config import flat
from train.data.sources import read_sources

TRAIN = Path(__file__).resolve().parents[2] / "train.py"
SHIPPED = "data/answers.jsonl.gz"  # answers of the default target, on which the shipped heads were trained
ROUND = 128  # tokens: packs have a multiple of it, so that the target's passes have few shapes
LOWER = 1 / 3  # of the learning rate that the head was trained with
OWN = {"run", "start", "resume", "head", "data.train"}  # options of train.py that are not the user's
SHOWN = re.compile(r"step +\d+/\d+|Resumed|Ctrl-C|SIGTERM")  # lines of train.py
child: subprocess.Popen | None = None  # that trains now


def settings_of(head: Path) -> dict[str, Any]:
    """config.yaml beside the head, of the run that it comes from; {} without one"""
    path = head / "config.yaml"
    return read_yaml(path) if path.exists() else {}


def family(head: Path, given: str | None) -> str:
    """The file of conf/head for a checkpoint. Of several with its class that one whose sizes are most like its own."""
    names = sorted(path.stem for path in (loading.CONF / "head").glob("*.yaml"))
    if given is not None:
        if given not in names:
            raise ValueError(f"There is no head {given!r}; there are: {', '.join(names)}.")
        return given
    document = checkpoint.read_json(head / "drafter.json")
    module = str(document["_target_"]).split(".")[-2]
    unlike = {}
    for name in names:
        drafter = OmegaConf.to_container(OmegaConf.load(loading.CONF / "head" / f"{name}.yaml").drafter, resolve=False)
        if drafter["_target_"] == document["_target_"]:
            unlike[name] = sum(document.get(key) != value for key, value in drafter.items()), name != module
    if not unlike:
        raise ValueError(f"{head} holds {document['_target_']}, for which conf/head has no file: give head=NAME.")
    return min(unlike, key=lambda name: unlike[name])


def rate(head: Path, name: str) -> float:
    """A third of the learning rate that the head was trained with, or that conf/head/NAME.yaml has."""
    trained = settings_of(head).get("optimizer", {}).get("lr")
    return LOWER * float(trained or OmegaConf.load(loading.CONF / "head" / f"{name}.yaml").lr)


def vocab(head: Path) -> dict[str, Any]:
    """Options by which the draft vocabulary grows with the traffic: in all adaptations together by an eighth of the first head's."""
    found = checkpoint.read_tensors(head / "drafter.safetensors").get("draft_to_target")
    return {} if found is None else {"start_vocab": "more", "head.vocab_size": len(found)}


def old_sources(given: str | None, head: Path, target: str) -> list[str]:
    """Files of the rows that the head was trained on. given: None: those of its config.yaml, or the shipped ones"""
    if given is not None:
        return split(given)
    recorded = settings_of(head).get("data", {}).get("train")
    if recorded is not None:
        return [source.name for source in read_sources(recorded)]
    if Path(target).name == Path(str(OmegaConf.load(loading.CONF / "target" / "smollm2-135m.yaml").name)).name:
        return [SHIPPED]
    raise ValueError(
        f"It is not recorded what {head} was trained on: give old=FILE with such rows, or old= for none (then nothing "
        "keeps the head from forgetting, and nothing shows it)."
    )


def pack_length(lengths: list[int], most: int) -> int:
    """data.length that holds the longest row, a multiple of ROUND: at least the usual one, and at most `most` if that is more.

    lengths: tokens of each row
    """
    usual = OmegaConf.load(loading.CONF / "data" / "shipped.yaml").length
    return max(usual, min(most, ROUND * math.ceil(max(lengths) / ROUND)))


def num_steps(lengths: list[int], epochs: float, more: dict[str, str], *, length: int) -> int:
    """Steps that read all rows so often. lengths: tokens of each row; more: options of train.py, perhaps with the steps

    length: of packs, unless `more` has it
    """
    if "train.steps" in more:
        return int(more["train.steps"])
    length = int(more.get("data.length", length))
    packs = sum(min(each, length) for each in lengths) / length
    together = int(more.get("train.batch", 1)) * int(more.get("train.accumulation", 1))
    return max(1, math.ceil(epochs * packs / together))


def arguments(
    folder: Path,
    *,
    start: Path,
    head: str,
    first: Path,
    lr: float,
    steps: int,
    length: int,
    target: dict[str, Any],
    vocab: dict[str, Any],
    more: dict[str, str],
) -> list[str]:
    """Arguments of train.py.

    folder: of the rows, and of the run; start: the head that is trained further; first: the one whose settings are used
    vocab: options of the draft vocabulary
    target: options of the target; more: further options, which have the last word
    """
    objective = settings_of(first).get("head", {}).get("objective", {})
    # train.py resumes a run only with the same paths, but out= may be relative in one launch and absolute in the next
    folder, start = folder.resolve(), start.resolve()
    values: dict[str, Any] = {
        **{f"head.objective.{key}": value for key, value in flat(objective).items() if key != "_target_"},
        "run": folder / "run",
        "start": start,
        **vocab,
        "resume": "auto",
        "features.folder": folder / "features",
        "data.cache": folder / "data-cache",
        "data.length": length,
        "optimizer.lr": lr,
        "optimizer.warmup": min(20, steps // 10),
        "train.steps": steps,
        "train.validate_every": steps,  # what is chosen is not the best step but the last one: adapt.py judges it
        "train.save_every": max(1, min(100, steps // 5)),
        "train.log_every": max(1, min(20, steps // 10)),
        "validation.num_prompts": 2,
        "validation.max_new_tokens": 8,
        "validation.decode": "end",
        "validation.auto": "never",
        "validation.answers": folder / "answers",
        **{f"target.{key}": value for key, value in target.items()},
        **more,
    }
    train = f"data.train=[{quoted(folder / 'train.jsonl')}]"
    return [f"head={head}", train, *(f"{key}={quoted(value)}" for key, value in values.items())]


def quoted(value: Any) -> str:
    """A value as Hydra reads it back."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return overrides.quoted(str(value)) if isinstance(value, Path) else str(value)


def train(arguments: list[str]) -> int:
    """Runs train.py, and shows its steps: what else it says is of a run that ends with this command. -> its exit status

    A signal is passed on to it, so that it saves its state.
    """
    global child
    command = [sys.executable, str(TRAIN), *arguments]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        for line in child.stdout or ():
            if SHOWN.match(line):
                progress.note(line.rstrip())
        return child.wait()
    finally:
        child = None


@contextlib.contextmanager
def signals() -> Iterator[None]:
    """Within, Ctrl-C and SIGTERM end training after its step, and everything else at once (KeyboardInterrupt)."""

    def receive(number: int, _: Any) -> None:
        if child is None:
            raise KeyboardInterrupt
        os.kill(child.pid, number)

    before = {number: signal.signal(number, receive) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
