"""Tests of the command train.py on a tiny target: every head, resuming, two processes, mistakes of a user."""

import dataclasses
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from specdec import checkpoint
from specdec.heads.native import NativeMTP
from specdec.measuring import trained_prompts
from specdec.options import config_files
from specdec.target.model import Target, load_tokenizer
from tests.support.commands import ROOT, write_rows
from tests.support.drafters import ADAPTING, NO_SOURCE
from tests.support.native import save_native
from tests.support.runs import (
    before_steps,
    fit_interrupted,
    log_of,
    losses_of,
    report_of,
    same_weights,
    train_overrides,
    weights_of,
)
from tests.support.targets import small_tokenizer
from train.loop.state import RunFolder
from train.loop.trainer import Trainer
from train.objective.objective import Objective

pytestmark = [pytest.mark.full, pytest.mark.gpu]
LONGEST = 49  # tokens of the longest text of the folder's data, whose packs have 64

HEADS = list(config_files.list_files("head"))
SHORT = ("train.steps=2", "train.validate_every=2")


@pytest.mark.parametrize("head", HEADS)
def test_every_head_trains_and_its_checkpoint_loads(fit, folder, head):
    def load() -> Target:
        return Target.load(f"{folder}/target", dtype="float32")

    before = load().fingerprint()
    more = [f"head.drafter.{name}={value or 'null'}" for name, value in NO_SOURCE.get(head, {}).items()]
    assert fit(head, f"head={head}", "head.vocab_size=200", *more) == 0
    target = load()
    drafter, report = checkpoint.load(f"checkpoints/{head}", target), report_of(head)
    assert target.fingerprint() == before and drafter.vocab_size == 200
    assert report["tau"] >= 1 and report["adapted_target"] == (head in ADAPTING)
    assert report["replayed_tau"] == pytest.approx(report["tau"], abs=1e-9)


@pytest.mark.parametrize("rank", ["null", "4"])
@pytest.mark.parametrize("family", ["glm4_moe", "qwen3_5_text"])
def test_a_targets_own_module_is_tuned_and_judged_before(fit, tmp_path, family, rank):
    """Resumed too: a checkpoint has plain weights, a state has the low-rank ones."""
    tokenizer, model = small_tokenizer(), tmp_path / "model"
    save_native(model, family, fields={"vocab_size": len(tokenizer)})
    tokenizer.save_pretrained(model)
    given = ["head=native_mtp", "head.vocab_size=null", f"head.drafter.lora_rank={rank}", f"target.name={model}"]
    assert fit("whole", *given, "head.objective.depth=2") == 0
    fit_interrupted(fit, "died", *given, "head.objective.depth=2")
    assert losses_of("died") == losses_of("whole") and same_weights(weights_of("whole"), weights_of("died"))
    target = Target.load(str(model), dtype="float32")
    shipped, tuned = NativeMTP(target), checkpoint.load("checkpoints/whole/step_000004", target)
    assert min(row["step"] for row in log_of("whole") if "validation" in row) == 0
    changed = {name for name, value in tuned.state_dict().items() if not torch.equal(value, shipped.state_dict()[name])}
    assert changed and not any(name.endswith("mlp.gate.weight") for name in changed)
    assert rank == "null" or not any("experts.gate_up" in name or "norm" in name for name in changed)


BITS = pytest.mark.skipif(not importlib.util.find_spec("bitsandbytes"), reason="bitsandbytes is not installed")


@pytest.mark.parametrize(
    "settings",
    [
        "features.mode=online",
        "features.mode=cached",
        "optimizer.name=muon optimizer.schedule=wsd",
        "train.ema=0.9 optimizer.schedule=constant",
        pytest.param("optimizer.name=adamw8bit", marks=BITS),
    ],
)
def test_an_interrupted_run_resumes_with_the_same_losses_and_weights(fit, settings):
    fit("whole", *settings.split())
    fit_interrupted(fit, "died", *settings.split())
    assert losses_of("died") == losses_of("whole") and len(losses_of("whole")) == 4
    for state in (False, True):
        assert same_weights(weights_of("whole", state=state), weights_of("died", state=state))


def test_cached_features_are_online_ones_and_a_cache_of_another_form_is_refused(fit):
    """Layers and dtype must be the same; other data are added."""
    cached = ("features.mode=cached", "features.folder=cache")
    fit("first", *cached, "head=eagle", "data.limit=7")
    for option, what in (("head=eagle3", "layers"), ("target.dtype=bfloat16", "dtype")):
        with pytest.raises(ValueError, match=f"another {what}"):
            fit(f"refused-{what}", *cached, option)
    before = {path: path.stat().st_mtime_ns for path in Path("cache").glob("*/*")}
    fit("data", *cached, "head=eagle")
    after = {path: path.stat().st_mtime_ns for path in Path("cache").glob("*/*")}
    assert len(after) > len(before) and before.items() <= after.items()
    fit("online", "features.mode=online", "head=eagle")
    assert losses_of("data") == losses_of("online")


# Losses that are not finite


def spoil(monkeypatch, folder, number: int) -> None:
    """Lets the loss be not a number wherever a text has the number's tokens."""
    forward = Objective.forward
    mark = str(load_tokenizer(f"{folder}/target").encode(f" {number},", add_special_tokens=False))[1:-1]

    def spoiled(self, batch, output, **settings):
        loss = forward(self, batch, output, **settings)
        bad = any(mark in str(row) for row in batch.tokens.tolist())
        return dataclasses.replace(loss, total=loss.total * float("nan")) if bad else loss

    monkeypatch.setattr(Objective, "forward", spoiled)


SPOILED = ("data.pack=true", "data.length=128", "solve_packs=0")


def test_a_loss_that_is_not_finite_stops_and_names_step_and_row(fit, folder, monkeypatch):
    settings, pattern = (
        (*SPOILED, "train.save_every=1"),
        r"nan at step (\d) \(rows? .*row-8.*\)\. .*last good state is that of step",
    )
    with monkeypatch.context() as patch:
        spoil(patch, folder, 9)
        with pytest.raises(ValueError, match=pattern) as caught:
            fit("nan", *settings)
        step = int(re.search(r"at step (\d)", str(caught.value))[1])
        assert RunFolder(Path("checkpoints/nan"), {}, {}).find_saved_step() == step - 1
        assert fit("nan", *settings, "train.skip_not_finite=true", "resume=auto") == 0
    skipped = [row for row in log_of("nan") if "skipped" in row]
    assert skipped[0]["step"] == step and skipped[0]["num_skipped"] == 1 and "row-8" in skipped[0]["skipped"]
    assert all(value.isfinite().all() for value in weights_of("nan").values())


def test_a_loss_that_is_read_later_changes_no_weights(fit, folder, monkeypatch):
    """As on a GPU: the loss is read when it is shown or saved, and the weights are whole until then."""
    settings = (*SPOILED, "train.log_every=100", "train.save_every=100")
    monkeypatch.setattr(
        Trainer, "reads_loss_at_once", property(lambda self: False, lambda self, value: None), raising=False
    )
    trainers = []
    with before_steps(trainers.append):
        fit("whole", *settings)
        second = trainers[-1].material.packs[trainers[-1].order(1, 0)[0]][0].id  # row-8 has the number 9
        spoil(monkeypatch, folder, int(second.removeprefix("row-")) + 1)
        with pytest.raises(ValueError, match=rf"nan at step 2 \(rows? .*{second}"):
            fit("nan", *settings)
    assert trainers[-1].step == 3  # in the last step, when everything is shown
    assert all(value.isfinite().all() for value in trainers[-1].drafter.state_dict().values())


# Processes and signals


def launch(folder, cwd, run, *options, processes=1):
    """Starts the command in a new process group: one process by accelerate, several by torchrun."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    if processes == 1:
        options_of_launcher = "--num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no"
        launcher = ["accelerate.commands.launch", "-q", "--cpu", *options_of_launcher.split()]
    arguments = [sys.executable, "-m", *launcher, str(ROOT / "train.py"), *train_overrides(folder, run, *options)]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(arguments, cwd=cwd, start_new_session=True, env=environment, **streams)


def test_two_processes_match_one_process_with_accumulation(folder, tmp_path, fit):
    """Losses, weights, and the figures of the validation, of which each process does a part."""
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"Count from {number}."} for number in range(11)])
    options = [
        f"data.heldout={tmp_path}/prompts.jsonl",
        "validation.num_prompts=11",
        "validation.share=null",
        "solve_packs=0",
    ]
    process = launch(folder, tmp_path, "two", "validation.answers=answers/two", *options, processes=2)
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    assert printed.count("step     1/4") == 1  # only the main process speaks
    fit("one", "train.accumulation=2", "validation.answers=answers/one", *options)
    two, one = report_of("two"), report_of("one")
    assert two["num_prompts"] == one["num_prompts"] == 11 and two["replayed_prompts"] == one["replayed_prompts"] == 11
    assert two["replayed_tau"] == pytest.approx(two["tau"], abs=1e-9)
    assert one["auto"]["num_prompts"] >= 2 and two["auto"]["num_prompts"] >= 2
    assert two["tau"] == pytest.approx(one["tau"], rel=0.05) and two["num_rounds"] > 11
    answers = [next(Path("answers", run).iterdir()) for run in ("two", "one")]
    assert answers[0].name == answers[1].name
    assert len({json.dumps(json.loads(path.read_text())["answers"]) for path in answers}) == 1
    assert losses_of("two") == pytest.approx(losses_of("one"), rel=1e-5)
    whole = weights_of("one")
    for name, value in weights_of("two").items():
        torch.testing.assert_close(value, whole[name], rtol=1e-3, atol=1e-5, msg=name)


def test_ctrl_c_saves_the_state_and_prints_how_to_resume(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = [f"train.{name}=100000" for name in ("steps", "validate_every", "save_every")]
    process, printed = launch(folder, tmp_path, "stopped", *options), ""
    for line in process.stdout:
        printed += line
        if line.startswith("step ") and " 3/" in line:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does for Ctrl-C
            break
    printed += process.communicate(timeout=120)[0]
    assert "resume=true" in printed, printed
    saved = list(Path("checkpoints/stopped/state").iterdir())
    assert process.returncode != 0 and len(saved) == 1 and checkpoint.read_json(saved[0] / "state.json")["step"] >= 3


# Experiments


@pytest.mark.parametrize(("experiment", "depth"), [("blockwise", 4)])
def test_an_experiment_runs(fit, experiment, depth):
    """Trains and validates the published experiment; only target, data and length differ."""
    more = ("data.hold_out=0", "data.tokens=null", "head.vocab_size=null", *SHORT)
    assert fit("some", f"experiment={experiment}", *more) == 0
    report = report_of("some", 2)
    assert report["tau"] >= 1 and not report["adapted_target"]
    assert report["identical_outputs"] == 1 and len(report["survival"]) == depth


# Training further

ONCE = ("start=checkpoints/first", "optimizer.lr=0", "train.steps=1", "train.validate_every=1")


@pytest.mark.parametrize("head", ["eagle", "draft", "medusa2"])
def test_training_starts_from_a_checkpoint(fit, head):
    fit("first", f"head={head}", *SHORT)
    fit("further", f"head={head}", "head.vocab_size=400", *ONCE)  # ignored: the checkpoint has its own vocabulary
    old, new = weights_of("first", 2), weights_of("further", 1)
    assert old.keys() == new.keys()
    for name in old:  # those of fc went into units of their inputs' sizes and back
        torch.testing.assert_close(old[name], new[name], rtol=1e-6, atol=0)
    documents = [Path("checkpoints", step, "drafter.json") for step in ("first/step_000002", "further/step_000001")]
    assert checkpoint.read_json(documents[0]) == checkpoint.read_json(documents[1])
    fit("learning", f"head={head}", "start=checkpoints/first", *SHORT)
    assert not same_weights(old, weights_of("learning", 2))
    other_head = "head=medusa" if head == "eagle" else "head=eagle"
    for start, sentence in (
        ("first", "give head= the family of the checkpoint"),
        ("none", r"does not exist\. A check"),
    ):
        with pytest.raises(ValueError, match=sentence):
            fit("other", other_head, f"start=checkpoints/{start}")


@pytest.mark.parametrize("head", ["mtp", "eagle3"])
def test_training_further_can_draft_other_tokens(fit, folder, head):
    """Of eagle3's own output layer, rows of tokens that stay are kept, and further rows are the target's."""
    own = ["head.drafter.own_output=true"] if head == "eagle3" else []
    fit("first", f"head={head}", "head.vocab_size=16", *own, *SHORT)
    fit("less", f"head={head}", "head.vocab_size=12", "start_vocab=data", *ONCE)
    fit("more", f"head={head}", "head.vocab_size=24", "start_vocab=data", *ONCE)
    first, larger_weights = weights_of("first", 2), weights_of("more", 1)
    vocabularies = [weights["draft_to_target"].tolist() for weights in (first, weights_of("less", 1), larger_weights)]
    before, smaller, larger = map(set, vocabularies)
    assert [len(before), len(smaller), len(larger)] == [16, 12, 24] and smaller < before < larger
    rows = torch.isin(larger_weights["draft_to_target"], first["draft_to_target"])
    for name in first.keys() - {"draft_to_target", "lm_head.weight"}:
        torch.testing.assert_close(first[name], larger_weights[name], rtol=1e-6, atol=0)
    if head == "eagle3":
        torch.testing.assert_close(larger_weights["lm_head.weight"][rows], first["lm_head.weight"], rtol=1e-6, atol=0)
        target = Target.load(f"{folder}/target", dtype="float32")
        start, _ = checkpoint.load_for_training("checkpoints/more", target, {})
        torch.testing.assert_close(start.lm_head.weight[~rows], start.goal_head[0][~rows].float(), rtol=1e-6, atol=0)


def test_trained_adapters_are_merged_in_the_checkpoint(fit, folder):
    assert fit("lora", "head=draft", "head.drafter.lora={r: 2, target_modules: [q_proj, v_proj]}", *SHORT) == 0
    target = Target.load(f"{folder}/target", dtype="float32")
    assert not any("lora" in name for name in checkpoint.load("checkpoints/lora", target).state_dict())


@pytest.mark.parametrize("head", ["eagle3", "mtp", "dflash"])
def test_an_auto_window_is_the_longest_text_and_changes_no_loss(fit, head):
    for name, window in (("limited", "auto"), ("whole", "null")):
        assert fit(f"{name}-{head}", "train.steps=3", f"head={head}", f"head.drafter.window={window}") == 0
    assert losses_of(f"limited-{head}") == losses_of(f"whole-{head}") and losses_of(f"whole-{head}")
    folders = [Path(f"checkpoints/{name}-{head}/step_000003") for name in ("limited", "whole")]
    documents = [json.loads((folder / "drafter.json").read_text()) for folder in folders]
    assert [document["window"] for document in documents] == [LONGEST, None]
    assert checkpoint.find_trained_length(folders[0]) == LONGEST
    assert documents[0].get("window_causal", False) is False


def test_held_out_prompts_that_are_trained_on_are_named(fit, folder, tmp_path):
    """Also those that only the head was trained on from which a run starts."""
    short = "train.steps=1", "head=eagle"
    with pytest.warns(
        UserWarning, match=r"^1 of 2 prompts of data\.heldout \(first: 0\) are trained on, so tau flatters"
    ):
        fit("copied", *short)
    about = json.loads(Path("checkpoints/copied/about.json").read_text())
    assert about["data"]["held-out prompts trained on"] == 1
    folders = [checkpoint.resolve(f"checkpoints/copied/{step}") for step in ("step_000001", "")]
    assert [checkpoint.find_trained_length(folder) for folder in folders] == [LONGEST, LONGEST]
    assert len(trained_prompts.read_digests(Path("checkpoints/copied/step_000001"))) == 12
    write_rows(tmp_path / "other.jsonl", [{"prompt": "Say w.", "completion": "w is followed by x."}] * 12)
    write_rows(tmp_path / "clean.jsonl", [{"prompt": "Count on."}])
    other_data = f"data.train={tmp_path}/other.jsonl"
    with pytest.warns(UserWarning, match="1 of 2 prompts"):
        fit("further", *short, other_data, "start=checkpoints/copied")
    assert len(trained_prompts.read_digests(Path("checkpoints/further"))) == 13
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit("clean", *short, other_data, f"data.heldout={tmp_path}/clean.jsonl")
    assert "held-out prompts trained on" not in json.loads(Path("checkpoints/clean/about.json").read_text())["data"]
    with pytest.warns(UserWarning, match=r"^12 of 12 prompts of validation\.answers \(first: row-0\) are trained on"):
        fit("recorded", *short, f"validation.answers={folder}/train.jsonl", "validation.num_prompts=12")
