"""Tests of sweeps: one command trains several runs one after the other in one process, and ends in one page."""

import json
import re
import runpy
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
from omegaconf import OmegaConf

import train.sweeps as sweeps
from scripts import report as script
from specdec.measuring.report import Report
from tests.support import ROOT, child_environment, losses_of, train_overrides
from train.pages import comparison_page
from train.pages.page import finite
from train.trainer import Trainer

LOCAL = ("train.validate_every=2", "validation.auto=never")


def hydra_of(**job) -> object:
    return OmegaConf.create({"sweep": {"dir": "checkpoints/first"}, "job": {"num": 0, "override_dirname": "", **job}})


def test_a_job_is_named_by_what_it_differs_in():
    assert (
        sweeps.run_of(hydra_of(override_dirname="head-eagle_optimizer.lr-0.1")) == "first/head-eagle_optimizer.lr-0.1"
    )
    assert sweeps.run_of(hydra_of(override_dirname="data.train-[a/b.jsonl,c=d]")) == "first/data.train--a-b.jsonl-c-d"
    long = [sweeps.run_of(hydra_of(override_dirname=f"x-{'y' * 200}{end}")) for end in "12"]
    assert len(set(long)) == 2 and all(len(Path(name).name) == sweeps.LONGEST for name in long)
    assert sweeps.run_of(hydra_of(num="???")) is None  # no sweep


@pytest.fixture
def train(folder, tmp_path, monkeypatch, capsys):
    """train("key=value", ...): the command train.py -m in a new working directory -> exit status and output"""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str]:
        fixed = [each for each in train_overrides(folder, "") if not each.startswith(("run=", "optimizer.lr="))]
        monkeypatch.setattr(sys, "argv", ["train.py", "-m", *fixed, *LOCAL, *arguments])
        status = None
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as ended:
            status = ended.code
        printed = "".join(capsys.readouterr())
        return (1, printed + status) if isinstance(status, str) else (status or 0, printed)

    return run


@pytest.mark.full
def test_a_sweep_ends_in_one_page_of_what_its_reports_say(train, fit, tmp_path, monkeypatch, capsys):
    status, said = train("head=eagle,mtp", "optimizer.lr=1e-3,2e-3", "tracker=tensorboard")
    folder = tmp_path / "checkpoints" / "sweep-head-optimizer.lr"
    assert status == 0, said
    runs = [f"head-{head}_optimizer.lr-{lr}" for head in ("eagle", "mtp") for lr in ("0.001", "0.002")]
    assert [path.name for path in comparison_page.runs_in(folder)] == runs
    assert all(list((folder / run).glob("tensorboard/events*")) for run in runs)
    text = (folder / "comparison.html").read_text()
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    rows = {cells[0]: cells for cells in table(text, "All of them")}
    assert list(rows) == runs == list(data["reports"]["0"])
    for run in runs:
        best = (folder / run / (folder / run / "best").read_text().strip() / "report.json").read_text()
        report = json.loads(best)
        assert data["reports"]["0"][run] == finite(report)
        assert data["logs"][run] == finite(
            [json.loads(line) for line in (folder / run / "log.jsonl").read_text().splitlines()]
        )
        shown = {f"{report[name]:.2f}" for name in ("replayed_tau", "tau", "speedup")}
        assert shown <= {cell.partition(" (")[0] for cell in rows[run]}
        assert {"Eagle" if "eagle" in run else "MTP", run[-5:]} <= set(rows[run])
        pairs = [(each["rounds"], each["emitted"]) for each in report["by_prompt"]]
        assert sum(emitted for _, emitted in pairs) / sum(rounds for rounds, _ in pairs) == pytest.approx(
            report["replayed_tau"]
        )
    assert set(data["differences"]["0"]) == set(runs) and "+0.00 (+0.00 .. +0.00)" in rows[runs[0]]
    assert {each for run in runs for each in data["differs"][run]} == {"head", "optimizer.lr"}
    assert all(
        title in text
        for title in ("tau of held-out prompts over the tokens read", "Loss of training steps", "Speedup against tau")
    )
    about = json.loads((folder / runs[3] / "about.json").read_text())["command"].split()
    assert f"run=sweep-head-optimizer.lr/{runs[3]}" in about and {"head=mtp", "optimizer.lr=0.002"} <= set(about)

    monkeypatch.chdir(tmp_path)  # a job is the run that the same settings give alone
    fit("alone", "head=mtp", "optimizer.lr=2e-3", *LOCAL)
    assert losses_of("alone") == losses_of(f"sweep-head-optimizer.lr/{runs[3]}")

    before = {path: path.stat().st_mtime_ns for path in folder.glob("*/log.jsonl")}
    status, said = train("head=eagle,mtp", "optimizer.lr=1e-3,2e-3", "tracker=tensorboard")
    assert status == 0 and said.count("nothing left to do") == 4
    assert before == {path: path.stat().st_mtime_ns for path in folder.glob("*/log.jsonl")}
    (folder / "comparison.html").unlink()
    monkeypatch.setattr(sys, "argv", ["report.py", f"run={folder}"])
    script.main()
    assert (folder / "comparison.html").read_text() == text and "comparison.html" in capsys.readouterr().out


def table(text: str, title: str) -> list[list[str]]:
    """The cells of the table below a heading."""
    body = text.split(f"<h2>{title}</h2>")[1].split("<tbody>")[1].split("</tbody>")[0]
    return [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in body.split("</tr>") if "<td" in row]


@pytest.mark.full
def test_a_job_that_fails_does_not_lose_the_others_and_is_named_at_the_end(train, tmp_path):
    status, said = train("run=mixed", "train.best_by=oops,tau,speedup")
    folder = tmp_path / "checkpoints" / "mixed"
    why = "train.best_by=oops must be tau or speedup."
    assert status == 1 and f"failed, and tried again by the same command (1):\n  train.best_by-oops: {why}" in said
    assert [path.name for path in comparison_page.runs_in(folder)] == ["train.best_by-speedup", "train.best_by-tau"]
    assert "train.best_by-oops" not in (folder / "comparison.html").read_text()
    assert train("run=mixed", "train.best_by=tau,speedup", "train.steps=5")[0] == 1  # finished with other settings
    assert "train.steps was 4, is 5" in (folder / "train.best_by-tau" / "failed").read_text()


@pytest.mark.full
def test_two_processes_share_every_job_of_a_sweep(folder, tmp_path):
    fixed = [each for each in train_overrides(folder, "two") if not each.startswith("optimizer.lr=")]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*launcher, str(ROOT / "train.py"), "-m"]
    done = subprocess.run([*command, *fixed, *LOCAL, "optimizer.lr=1e-3,2e-3"], cwd=tmp_path, env=child_environment(),
                          capture_output=True, text=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(comparison_page.runs_in(tmp_path / "checkpoints" / "two")) == 2
    assert done.stdout.count("comparison: ") == 1


@pytest.mark.full
def test_what_a_job_held_is_given_back(fit, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    held = []
    fit_all = Trainer.fit

    def watch(trainer, record):
        held.extend(weakref.ref(each) for each in (trainer, trainer.drafter, trainer.drafter.target, trainer.optimizer))
        return fit_all(trainer, record)

    monkeypatch.setattr(Trainer, "fit", watch)
    jobs = OmegaConf.create({"run": "held"})
    sweeps.run_job(lambda config: fit(config.run, "precision=bf16"), jobs)
    assert len(held) == 4 and [each() for each in held] == [None] * 4
    sweeps.run_job(
        lambda config: fit("other", "precision=fp32"), OmegaConf.create({"run": "other"})
    )  # accelerate takes another precision
    assert not (tmp_path / "checkpoints/other/failed").exists()


@pytest.mark.parametrize("error", [KeyboardInterrupt(), None])
def test_an_interrupted_job_ends_the_sweep(monkeypatch, tmp_path, capsys, error):
    monkeypatch.chdir(tmp_path)

    def interrupted(config):
        if error:
            raise error
        return 130

    with pytest.raises(SystemExit) as ended:
        sweeps.run_job(interrupted, OmegaConf.create({"run": "one"}))
    assert ended.value.code == 130
    assert capsys.readouterr().err == ("Stopped at once. The same command continues the sweep.\n" if error else "")


# The page


def report_of(tau: float, **more) -> Report:
    document = dict.fromkeys(("tau", "tau_ci", "survival", "acceptance", "tokens_per_second", "tokens_per_second_ci", "speedup",
                              "baseline_tokens_per_second", "speedup_ci", "ms_per_round"))  # fmt: skip
    return Report.from_json({**document, "temperature": 0.0, "num_prompts": 0, "num_rounds": 0, "replayed_tau": tau, "shape": "chain of 2",
                             "replayed_tau_ci": [tau - 0.1, tau + 0.1], "replayed_prompts": 2, "replayed_survival": [0.5], **more})  # fmt: skip


def test_differences_are_taken_on_the_same_prompts_only():
    counts = lambda *emitted: [{"prompt": str(n), "rounds": 10.0, "emitted": each} for n, each in enumerate(emitted)]
    one, two = report_of(1.5, by_prompt=counts(10, 20)), report_of(2.0, by_prompt=counts(15, 25))
    same = {"validation.max_new_tokens": 48}
    settings = {"one": same, "two": same, "three": {"validation.max_new_tokens": 64}}
    found = comparison_page.pair_runs(
        {"one": one, "two": two, "three": two, "four": report_of(1.0)}, one, {**settings, "four": same}, "one"
    )
    assert set(found) == {"one", "two"} and found["one"] == (0.0, [0.0, 0.0])
    assert found["two"][0] == pytest.approx(0.5) and found["two"][1] == pytest.approx(
        [0.5, 0.5]
    )  # unpaired, it would be wide


def test_settings_that_differ_are_named_and_those_of_a_head_only_within_the_head():
    kinds = {"head.drafter._target_": "specdec.heads.eagle.Eagle", "head.lr": 1, "optimizer.lr": 1, "run": "a"}
    mtp = {**kinds, "head.drafter._target_": "specdec.heads.mtp.MTP", "head.drafter.num_modules": 2, "run": "c"}
    found = comparison_page.find_differing(
        {"a": {**kinds, "head.lr": 2}, "b": {**kinds, "optimizer.lr": 2, "run": "b"}, "c": mtp}
    )
    assert found == {
        "a": {"head": "Eagle", "optimizer.lr": "1"},
        "b": {"head": "Eagle", "optimizer.lr": "2"},
        "c": {"head": "MTP", "optimizer.lr": "1"},
    }
