"""Tests of training, evaluation and generation with target.tp: the figures of fewer processes with whole targets."""

import contextlib
import io
import json
import runpy
import sys
import types
from pathlib import Path

import pytest
import torch
from accelerate import Accelerator
from hydra import compose, initialize_config_dir
from transformers import AutoConfig, AutoModelForCausalLM

from specdec import checkpoint
from tests.support import ROOT, PowerCutError, before_steps, cut_power, losses_of, train_command, train_overrides
from tests.together import together

pytestmark = pytest.mark.full  # starts processes

MODULE = "tests.train.test_tensor_parallel"
TOGETHER = "target.tp=2"
SAME = ("validation.num_prompts=2", "validation.max_new_tokens=6", "train.batch=2")
RUNS = {  # by name: settings, beside target.tp
    "online": ("head=eagle3", "decode=tree", "decode.depth=2", "validation.decode=always"),
    "cached": ("head=medusa", "features.mode=cached", "train.accumulation=2"),
    "streamed": ("head=eagle", "data.stream=true", "data.buffer=4"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(folder):
    """The folder of the other tests, with a target of few layers whose logits are not flat."""
    config = AutoConfig.from_pretrained(folder / "target")
    config.initializer_range, config.num_hidden_layers = 0.25, 3
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "target")
    return folder


def settings(folder: str, run: str, name: str, *more: str) -> list[str]:
    cache = f"features.folder=features-{run}"
    return train_overrides(Path(folder), run, *SAME, *RUNS[name], cache, *more)


def fit(runs: list[list[str]]) -> list[int]:
    """Trains runs one after the other -> their exit statuses. Called in several processes."""
    statuses = []
    for overrides in runs:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = compose("train", overrides=overrides)
        Path("checkpoints", str(config.run)).mkdir(parents=True, exist_ok=True)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                Accelerator, "end_training", lambda accelerator: None
            )  # the next run needs the other processes too
            statuses.append(train_command().fit(config))
    return statuses


def figures_of(run: str) -> dict:
    """What validation says that no clock measures."""
    return keep(checkpoint.read_json(checkpoint.resolve(f"checkpoints/{run}") / "report.json"))


def keep(report: dict) -> dict:
    names = ("tau", "replayed_tau", "survival", "num_prompts", "num_rounds", "identical_outputs")
    return {name: report.get(name) for name in names}


def check_same(run: str, other: str) -> None:
    assert list(losses_of(run)) == [1, 2, 3, 4]
    assert losses_of(run) == pytest.approx(losses_of(other), rel=1e-4), run
    assert same(figures_of(run), figures_of(other)), run


def same(figures: dict, others: dict) -> bool:
    """Whether figures are the same but for rounding."""
    return figures == {
        name: None if value is None else pytest.approx(value, rel=1e-3) for name, value in others.items()
    }


def script(name: str, arguments: list[str]) -> str:
    """Runs a command -> what it printed."""
    helpers = str(ROOT / "scripts")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [name, *arguments])
        patch.syspath_prepend(helpers)
        runpy.run_path(f"{helpers}/{name}", run_name="__main__")
    return printed.getvalue()


def fit_and_run(runs: list[list[str]], scripts: list[list]) -> list:
    """Trains runs, then runs commands -> what these printed. Called in several processes."""
    assert fit(runs) == [0] * len(runs)
    return [script(*each) for each in scripts]


@pytest.fixture(scope="module")
def work(folder, tmp_path_factory):
    """A working directory with runs of one process, of two together and of two apart, and what commands printed."""
    place = tmp_path_factory.mktemp("parallel")
    of = lambda run, name, *more: settings(str(folder), run, name, *more)
    given = [f"checkpoint={place}/checkpoints/online-alone", "target.dtype=float32", f"target.name={folder}/target"]
    evaluate = [*given, f"prompts={folder}/prompts.jsonl", "decode.temperature=0,1", "max_new_tokens=8"]
    generate = [*given, "prompt=Count from 5.", "max_new_tokens=12", "compare=false"]
    scripts = lambda tp: [
        ["evaluate.py", [*evaluate, f"target.tp={tp}", f"out={tp}.json"]],
        ["generate.py", [*generate, f"target.tp={tp}"]],
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        alone = fit_and_run([of(f"{name}-alone", name) for name in RUNS], scripts(1))
        begin_and_fail(of("begun", "online"))
        runs = [of(f"{name}-together", name, TOGETHER) for name in RUNS]
        runs += [of("begun", "online", TOGETHER, "resume=true"), of("apart", "cached")]
        both = together(2, f"{MODULE}:fit_and_run", runs, scripts(2), cwd=place)
    return types.SimpleNamespace(place=place, printed=[alone, *both])


def begin_and_fail(overrides: list[str]) -> None:
    """Trains a run that fails before its fourth step."""
    with before_steps(cut_power(3)), pytest.raises(PowerCutError):
        fit([overrides])


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_that_hold_a_target_together_train_as_one(work, monkeypatch, name):
    """Online, from files, from a stream, and on texts of the draft's own."""
    monkeypatch.chdir(work.place)
    check_same(f"{name}-together", f"{name}-alone")


def test_a_run_goes_on_with_a_target_that_is_held_together(work, monkeypatch):
    monkeypatch.chdir(work.place)
    check_same("begun", "online-alone")


@pytest.mark.full
def test_two_groups_of_two_processes_train_as_two_processes(work, folder, monkeypatch):
    monkeypatch.chdir(work.place)
    runs = [settings(str(folder), "groups", "cached", TOGETHER)]
    together(4, f"{MODULE}:fit_and_run", runs, [], cwd=work.place)
    check_same("groups", "apart")
    with pytest.raises(AssertionError):
        check_same("groups", "cached-alone")  # which reads half as many packs in a step
    files = [
        sorted(path.name for path in Path(f"features-{run}").rglob("*.safetensors")) for run in ("groups", "apart")
    ]
    assert files[0] == files[1] != []


def test_evaluation_and_generation_say_what_one_process_says(work):
    alone, first, second = work.printed
    assert second == ["", ""]  # only the main process speaks
    reports = [json.loads((work.place / f"{tp}.json").read_text())["temperatures"] for tp in (1, 2)]
    for one, two in zip(*reports):
        assert same(keep(two), keep(one))
    assert reports[1][0]["identical_outputs"] == 1
    assert first[1].splitlines()[0] == alone[1].splitlines()[0]
