"""Tests of the command train.py on a tiny target: every head, resuming, two processes, mistakes of a user."""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from specdec import checkpoint
from specdec.target.model import Target, load_tokenizer
from tests.support import ADAPTING, ROOT, before_steps, fit_interrupted, losses_of, train_overrides, write_rows
from train.config import TrainSettings
from train.state import RunFolder
from train.trainer import Trainer
from train.validate import Validation

pytestmark = pytest.mark.slow

HEADS = sorted(path.stem for path in (ROOT / "conf" / "head").glob("*.yaml"))

# The adapted target drafts: no draft vocabulary, and no unroll that could be replayed
DRAFTS_WITH_TARGET = ("consistency",)


@pytest.mark.parametrize("head", HEADS)
def test_every_head_trains_and_its_checkpoint_loads(fit, folder, head):
    before = Target.load(f"{folder}/target", dtype="float32").fingerprint()
    size = "null" if head in DRAFTS_WITH_TARGET else "200"
    assert fit(head, f"head={head}", f"head.vocab_size={size}") == 0
    target = Target.load(f"{folder}/target", dtype="float32")
    drafter = checkpoint.load(f"checkpoints/{head}", target)
    assert target.fingerprint() == before and drafter.vocab_size == (
        target.vocab_size if head in DRAFTS_WITH_TARGET else 200
    )
    report = json.loads(Path(f"checkpoints/{head}/step_000004/report.json").read_text())
    assert report["tau"] >= 1 and ("replayed_tau" in report) == (head not in DRAFTS_WITH_TARGET)
    assert report["adapted_target"] == (head in ADAPTING)
    if head not in DRAFTS_WITH_TARGET:
        assert report["replayed_tau"] == pytest.approx(report["tau"], abs=1e-9)


@pytest.mark.parametrize(
    "settings",
    [["features.mode=online"], ["features.mode=cached"], ["head=consistency", "head.vocab_size=null"]],
    ids=" ".join,
)
def test_an_interrupted_run_resumes_with_the_same_losses(fit, settings):
    fit("whole", *settings)
    fit_interrupted(fit, "died", *settings)
    assert losses_of("died") == losses_of("whole") and len(losses_of("whole")) == 4
    uninterrupted, resumed = (
        checkpoint.read_tensors(Path(f"checkpoints/{run}/step_000004/drafter.safetensors")) for run in ("whole", "died")
    )
    assert all(torch.equal(uninterrupted[name], resumed[name]) for name in uninterrupted)


def test_cached_and_online_features_give_the_same_losses(fit):
    fit("live", "features.mode=online")
    fit("disk", "features.mode=cached", "features.folder=cache")
    assert losses_of("live") == losses_of("disk")


def test_a_cache_of_another_form_or_other_layers_is_refused_and_other_data_are_added(fit, folder):
    fit("first", "features.mode=cached", "features.folder=cache", "head=eagle", "data.limit=7")
    for number, (option, what) in enumerate((("head=eagle3", "layers"), ("features.bits=8", "bits"), ("target.dtype=bfloat16", "dtype"))):  # fmt: skip
        with pytest.raises(ValueError, match=f"another {what}"):
            fit(f"refused{number}", "features.mode=cached", "features.folder=cache", option)
    before = {path.name: path.stat().st_mtime_ns for path in Path("cache").glob("*/*")}
    fit("data", "features.mode=cached", "features.folder=cache", "head=eagle")
    after = {path.name: path.stat().st_mtime_ns for path in Path("cache").glob("*/*")}
    assert len(after) > len(before) and before.items() <= after.items()
    fit("online", "features.mode=online", "head=eagle")
    assert losses_of("data") == losses_of("online")


def test_features_in_8_bits_are_half_as_large_and_nearly_the_same(fit):
    sizes = {}
    for bits in ("null", "8"):
        fit(
            f"of{bits}",
            "features.mode=cached",
            f"features.folder=cache{bits}",
            f"features.bits={bits}",
            "target.dtype=bfloat16",
        )
        sizes[bits] = sum(path.stat().st_size for path in Path(f"cache{bits}").glob("*/*"))
    assert sizes["8"] < 0.8 * sizes["null"]  # the target is so small that scales and headers count
    first, second = losses_of("ofnull"), losses_of("of8")
    assert first != second and all(abs(first[step] - second[step]) < 0.1 * first[step] for step in first)


def spoil(monkeypatch, folder, number: int) -> None:
    """Lets the loss be not a number wherever a text has the number's tokens."""
    from train import objective

    forward = objective.Objective.forward
    mark = str(load_tokenizer(f"{folder}/target").encode(f" {number},", add_special_tokens=False))[1:-1]

    def spoiled(self, batch, output, **settings):
        loss = forward(self, batch, output, **settings)
        bad = any(mark in str(row) for row in batch.tokens.tolist())
        return dataclasses.replace(loss, total=loss.total * float("nan")) if bad else loss

    monkeypatch.setattr(objective.Objective, "forward", spoiled)


def test_a_loss_that_is_not_finite_stops_and_names_step_and_row(fit, folder, monkeypatch):
    settings = ("data.pack=true", "data.length=128", "solve_packs=0", "train.save_every=1")
    with monkeypatch.context() as patch:
        spoil(patch, folder, 9)
        with pytest.raises(
            ValueError, match=r"nan at step (\d) \(row row-8\)\. .*last good state is that of step"
        ) as caught:
            fit("nan", *settings)
        step = int(re.search(r"at step (\d)", str(caught.value))[1])
        assert RunFolder(Path("checkpoints/nan"), {}, {}).saved_step() == step - 1
        assert fit("nan", *settings, "train.skip_not_finite=true", "resume=auto") == 0
    lines = [json.loads(line) for line in Path("checkpoints/nan/log.jsonl").read_text().splitlines()]
    skipped = [line for line in lines if "skipped" in line]
    assert skipped[0] == {"step": step, "skipped": ["row-8"], "num_skipped": 1}
    weights = checkpoint.read_tensors(Path("checkpoints/nan/step_000004/drafter.safetensors"))
    assert all(value.isfinite().all() for value in weights.values())


def test_a_loss_that_is_read_later_changes_no_weights(fit, folder, monkeypatch):
    """As on a GPU: the loss is read when it is shown or saved, and the weights are whole until then."""
    settings = ("data.pack=true", "data.length=128", "solve_packs=0", "train.log_every=100", "train.save_every=100")
    monkeypatch.setattr(Trainer, "reads_at_once", property(lambda self: False, lambda self, value: None), raising=False)
    trainers = []
    with before_steps(trainers.append):
        fit("whole", *settings)
        second = trainers[-1].material.packs[trainers[-1].indices(1, 0)[0]][0].id  # row-8 has the number 9
        spoil(monkeypatch, folder, int(second.removeprefix("row-")) + 1)
        with pytest.raises(ValueError, match=rf"nan at step 2 \(row {second}\)"):
            fit("nan", *settings)
    assert trainers[-1].step == 3  # in the last step, when everything is shown
    assert all(value.isfinite().all() for value in trainers[-1].drafter.state_dict().values())


def test_runs_are_never_overwritten(fit):
    fit("mine")
    with pytest.raises(ValueError, match="finished run"):
        fit("mine", "resume=true")
    (Path("checkpoints/mine/finished")).unlink()
    with pytest.raises(ValueError, match="resume=true"):
        fit("mine")
    with pytest.raises(ValueError, match="batch"):
        fit("mine", "resume=true", "train.batch=2")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("target.name=./nowhere", "does not exist"),
        ("data.train=nowhere.jsonl", "There is no file"),
        ("head.objective.losses={kl: 0, smooth_l1: 0}", "give weights"),
        ("target.dtype=bf16", "must be one of"),
        ("target.device=cuda:1", "must be null"),
        ("decode.nodes=1", "cannot hold a path"),
    ],
)
def test_wrong_settings_are_refused(fit, override, message):
    with pytest.raises(ValueError, match=message):
        fit("wrong", override)


def launch(folder, cwd, run, *more, processes=1):
    """Starts the command in a new process group: one process by accelerate, several by torchrun."""
    accelerate = ["accelerate.commands.launch", "-q", "--cpu", "--num_processes", "1", "--num_machines", "1",
                  "--mixed_precision", "no", "--dynamo_backend", "no"]  # fmt: skip
    torchrun = ["torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    arguments = [
        sys.executable,
        "-m",
        *(accelerate if processes == 1 else torchrun),
        str(ROOT / "train.py"),
        *train_overrides(folder, run, *more),
    ]
    return subprocess.Popen(arguments, cwd=cwd, start_new_session=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                            env={**os.environ, "PYTHONPATH": str(ROOT)})  # fmt: skip


def test_two_processes_match_one_process_with_accumulation(folder, tmp_path, fit):
    """Losses, weights, and the figures of the validation, of which each process does a part."""
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": f"Count from {number}."} for number in range(11)])
    more = (
        f"data.heldout={tmp_path}/prompts.jsonl",
        "validation.num_prompts=11",
        "validation.share=null",
        "solve_packs=0",
    )
    process = launch(folder, tmp_path, "two", "validation.answers=answers/two", *more, processes=2)
    printed = process.communicate(timeout=300)[0]
    assert process.returncode == 0, printed
    assert printed.count("step     1/4") == 1  # only the main process speaks
    fit("one", "train.accumulation=2", "validation.answers=answers/one", *more)
    two, one = (checkpoint.read_json(Path(f"checkpoints/{run}/step_000004/report.json")) for run in ("two", "one"))
    assert two["num_prompts"] == one["num_prompts"] == 11 and two["replayed_prompts"] == one["replayed_prompts"] == 11
    assert two["replayed_tau"] == pytest.approx(two["tau"], abs=1e-9)
    assert one["auto"]["num_prompts"] >= 2 and two["auto"]["num_prompts"] >= 2
    assert two["tau"] == pytest.approx(one["tau"], rel=0.05) and two["num_rounds"] > 11
    answers = [next(Path("answers", run).iterdir()) for run in ("two", "one")]
    assert answers[0].name == answers[1].name
    assert len({json.dumps(json.loads(path.read_text())["answers"]) for path in answers}) == 1
    assert losses_of("two") == pytest.approx(losses_of("one"), rel=1e-5)
    tensors = [
        checkpoint.read_tensors(Path(f"checkpoints/{run}/step_000004/drafter.safetensors")) for run in ("two", "one")
    ]
    for name, value in tensors[0].items():
        torch.testing.assert_close(value, tensors[1][name], rtol=1e-3, atol=1e-5, msg=name)


def test_ctrl_c_saves_the_state_and_prints_how_to_resume(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    more = ("train.steps=100000", "train.validate_every=100000", "train.save_every=100000")
    process = launch(folder, tmp_path, "stopped", *more)
    printed = ""
    for line in process.stdout:
        printed += line
        if line.startswith("step ") and " 3/" in line:
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does for Ctrl-C
            break
    printed += process.communicate(timeout=120)[0]
    assert "resume=true" in printed, printed
    saved = list(Path("checkpoints/stopped/state").iterdir())
    assert process.returncode != 0 and len(saved) == 1 and checkpoint.read_json(saved[0] / "state.json")["step"] >= 3


EXPERIMENTS = sorted(
    str(path.relative_to(ROOT / "conf" / "experiment").with_suffix(""))
    for path in (ROOT / "conf" / "experiment").rglob("*.yaml")
)


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", overrides=[f"experiment={experiment}", "run=some"])
    settings = OmegaConf.to_container(config, resolve=True)
    # The last step is validated.
    assert TrainSettings(**settings["train"]).steps % settings["train"]["validate_every"] == 0
    drafter, depth = settings["head"]["drafter"], settings["head"]["objective"]["depth"]
    for name in ("num_heads", "num_modules", "num_drafts"):
        assert drafter.get(name) in (None, depth), name
    assert settings["decode"]["nodes"] == settings["decode"]["depth"]  # a chain


@pytest.mark.parametrize("experiment", ["blockwise", "consistency"])
def test_an_experiment_runs(fit, experiment):
    """Trains and validates the published experiment; only target, data and length differ."""
    overrides = ("data.hold_out=0", "data.tokens=null", "features.layers=[]", "head.vocab_size=null",
                 "train.steps=2", "train.validate_every=2")  # fmt: skip
    assert fit("some", f"experiment={experiment}", *overrides) == 0
    report = json.loads(Path("checkpoints/some/step_000002/report.json").read_text())
    assert report["tau"] >= 1 and report["adapted_target"] == (experiment == "consistency")
    assert (
        report["identical_outputs"] == 1 and len(report["survival"]) == {"blockwise": 4, "consistency": 6}[experiment]
    )


def test_validate_first_reports_on_the_start(fit):
    """train.validate_first=true measures the weights at the start, which may come from a trained model."""
    assert fit("first", "train.validate_first=true") == 0
    report = json.loads(Path("checkpoints/first/step_000000/report.json").read_text())
    assert report["replayed_tau"] >= 1 and report["training"]["tokens"] == 0
    assert Path("checkpoints/first/step_000004/report.json").exists()


@pytest.mark.parametrize("head", ["eagle", "draft", "medusa2"])
def test_training_starts_from_a_checkpoint(fit, head):
    fit("first", f"head={head}", "train.steps=2", "train.validate_every=2")
    vocabulary = "head.vocab_size=400"  # ignored: the checkpoint has its own draft vocabulary
    fit(
        "further",
        f"head={head}",
        vocabulary,
        "start=checkpoints/first",
        "train.steps=1",
        "optimizer.lr=0",
        "train.validate_every=1",
    )
    before, after = (next(Path("checkpoints", run).glob("step_*")) for run in ("first", "further"))
    old, new = (checkpoint.read_tensors(folder / "drafter.safetensors") for folder in (before, after))
    assert old.keys() == new.keys()
    for name in old:  # those of fc went into units of their inputs' sizes and back
        torch.testing.assert_close(old[name], new[name], rtol=1e-6, atol=0)
    documents = [checkpoint.read_json(folder / "drafter.json") for folder in (before, after)]
    assert documents[0] == documents[1]
    fit("learning", f"head={head}", "start=checkpoints/first", "train.steps=2", "train.validate_every=2")
    learned = checkpoint.read_tensors(next(Path("checkpoints/learning").glob("step_000002")) / "drafter.safetensors")
    assert any(not torch.equal(old[name], learned[name]) for name in old)


@pytest.mark.parametrize("head", ["mtp", "eagle3"])
def test_training_further_can_draft_other_tokens(fit, folder, head, capsys):
    """Of eagle3, whose output layer has rows of its own, those of tokens that stay are kept, and further ones are the target's."""
    fit("first", f"head={head}", "head.vocab_size=16", "train.steps=2", "train.validate_every=2")
    further = ("start=checkpoints/first", "optimizer.lr=0", "train.steps=1", "train.validate_every=1")
    fit("data", f"head={head}", "head.vocab_size=12", "start_vocab=data", *further)
    fit("more", f"head={head}", "head.vocab_size=16", "start_vocab=more", *further)
    first, data, more = (
        checkpoint.read_tensors(next(Path("checkpoints", run).glob("step_*")) / "drafter.safetensors")
        for run in ("first", "data", "more")
    )
    before, smaller, larger = (set(each["draft_to_target"].tolist()) for each in (first, data, more))
    assert len(before) == 16 and len(smaller) == 12 and smaller < before < larger and len(larger) == 18
    rows = torch.isin(more["draft_to_target"], first["draft_to_target"])
    for name in first.keys() - {"draft_to_target", "lm_head.weight"}:
        torch.testing.assert_close(first[name], more[name], rtol=1e-6, atol=0)
    if head == "eagle3":
        torch.testing.assert_close(more["lm_head.weight"][rows], first["lm_head.weight"], rtol=1e-6, atol=0)
        start = checkpoint.start("checkpoints/more", Target.load(f"{folder}/target", dtype="float32"), {})[0]
        torch.testing.assert_close(start.lm_head.weight[~rows], start.goal_head[0][~rows].float(), rtol=1e-6, atol=0)
    assert "adds no token" not in capsys.readouterr().out
    fit("again", f"head={head}", "head.vocab_size=16", "start_vocab=more", *further[1:], "start=checkpoints/more")
    assert "start_vocab=more adds no token: the head drafts 18" in capsys.readouterr().out
    again = checkpoint.load("checkpoints/again", Target.load(f"{folder}/target", dtype="float32"))
    assert torch.equal(again.draft_to_target, more["draft_to_target"])  # it does not grow again and again
    with pytest.raises(ValueError, match="start_vocab=most must be one of keep, data, more"):
        fit("wrong", f"head={head}", "start=checkpoints/first", "start_vocab=most")
    with pytest.raises(ValueError, match="give start=, too"):
        fit("new", f"head={head}", "start_vocab=data")


def test_a_start_of_another_family_is_refused(fit):
    fit("first", "head=eagle", "train.steps=1", "train.validate_every=1")
    with pytest.raises(ValueError, match="give head= the family of the checkpoint"):
        fit("further", "head=medusa", "start=checkpoints/first")
    with pytest.raises(ValueError, match=r"does not exist\. A checkpoint is a folder"):
        fit("further", "head=eagle", "start=checkpoints/none")


def test_a_run_ends_with_what_more_data_would_bring(fit, monkeypatch, capsys):
    replay = Validation.replay
    taus = iter((1.2, 1.3, 1.4, 1.5, 1.6, 1.7))

    def judged(self, frozen):
        accepted = next(taus) - 1
        return [
            replace(each, replayed_accepted=[accepted] * len(each.replayed_accepted)) for each in replay(self, frozen)
        ]

    monkeypatch.setattr(Validation, "replay", judged)
    fit("more", "train.steps=6", "train.validate_every=1", "decode.depth=3")
    printed = capsys.readouterr().out
    assert "what more data would bring: tau 1." in printed and "fitted to 6 validations" in printed
