"""Tests of training with target.shard=true: losses and figures of two processes with whole targets."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdec import checkpoint
from tests.support.processes import fit_together
from tests.support.runs import losses_of, train_overrides

pytestmark = pytest.mark.full  # starts processes

SHARD = "target.shard=true"
SAME = ("data.length=128", "train.batch=2", "validation.share=null")
RUNS = {  # by name: settings, beside target.shard
    "online": ("head=eagle3", "decode=tree", "decode.depth=2", "validation.decode=always"),
    "cached": ("head=medusa", "features.mode=cached", "train.accumulation=2"),
}  # fmt: skip
FIGURES = ("tau", "replayed_tau", "survival", "num_prompts", "num_rounds", "identical_outputs")


@pytest.fixture(scope="module")
def folder(folder):
    """The folder of the other tests, with a target of few layers whose logits are not flat."""
    config = AutoConfig.from_pretrained(folder / "target")
    config.initializer_range, config.num_hidden_layers = 0.25, 3
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "target")
    return folder


@pytest.fixture(scope="module")
def work(folder, tmp_path_factory):
    """A working directory with each run with whole targets and with one in parts."""
    cwd = tmp_path_factory.mktemp("sharded")

    def run(name: str, kind: str, *options: str, **faults: int) -> dict:
        own = (f"features.folder=features-{name}-{kind}", f"validation.answers=answers-{kind}")
        overrides = train_overrides(folder, f"{name}-{kind}", *SAME, *RUNS[name], *own, *options)
        return {"run": f"{name}-{kind}", "overrides": overrides, **faults}

    runs = [run(name, kind, *options) for name in RUNS for kind, options in (("whole", ()), ("parts", (SHARD,)))]
    short = "validation.num_prompts=1"
    begun = [run("online", "resumed", short, stop=4), run("online", "resumed", short, SHARD, "resume=true")]
    spoiled = run("online", "spoiled", short, SHARD, "train.skip_not_finite=true", spoil=2)
    fit_together(cwd, [*runs, *begun, spoiled])
    return cwd


def check_same(run: str, second: str) -> None:
    assert losses_of(run) == pytest.approx(losses_of(second), rel=1e-10, abs=1e-10)
    report, second_report = (
        checkpoint.read_json(checkpoint.resolve(f"checkpoints/{each}") / "report.json") for each in (run, second)
    )
    for name in FIGURES:
        assert report.get(name) == (
            None if second_report.get(name) is None else pytest.approx(second_report[name], rel=1e-9)
        ), name


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_train_as_with_whole_targets(work, monkeypatch, name):
    """Online with decoding of trees, and from files."""
    monkeypatch.chdir(work)
    assert losses_of(f"{name}-parts")
    check_same(f"{name}-parts", f"{name}-whole")


def test_the_same_documents_are_kept(work):
    whole, parts = (work / f"features-cached-{kind}" for kind in ("whole", "parts"))
    names = sorted(path.name for path in whole.rglob("*.safetensors"))
    assert names and names == sorted(path.name for path in parts.rglob("*.safetensors"))


def test_a_run_goes_on_with_its_target_in_parts(work, monkeypatch):
    monkeypatch.chdir(work)
    assert losses_of("online-resumed") == pytest.approx(losses_of("online-whole"), rel=1e-10, abs=1e-10)


def test_a_step_that_is_not_finite_is_left_out_by_all(work, monkeypatch):
    monkeypatch.chdir(work)
    assert list(losses_of("online-spoiled")) == [1, 2, 3, 4]
    assert '"skipped"' in Path("checkpoints/online-spoiled/log.jsonl").read_text()
