"""Tests of `python train.py -m`: runs in processes and folders of their own; and of a head outside of specdec."""

import os
import subprocess
import sys

import pytest

from specdec import checkpoint
from specdec.core import extensions
from tests.support.commands import ROOT, child_environment
from tests.support.runs import train_overrides
from train.settings import hydra_text, multirun

SHORT = ("train.steps=2", "train.validate_every=2", "data.hold_out=0", "validation.num_prompts=2",
         "validation.auto=never")  # fmt: skip
OWN_HEAD = """
from specdec.heads.medusa import Medusa


class Own(Medusa):
    pass
"""
OWN_YAML = """
defaults: [medusa, _self_]
drafter: {_target_: my_heads.Own}
"""


@pytest.fixture
def train(folder, tmp_path):
    """train(words ...) -> exit status and output of train.py in a new working directory"""

    def run(*words: str) -> tuple[int, str]:
        replaced = {word.partition("=")[0] for word in (*words, "run=")}
        usual = [each for each in train_overrides(folder, "a") if each.partition("=")[0] not in replaced]
        shared = {each.partition("=")[0]: each for each in (*usual, *SHORT)}  # the last one of equal options
        command = [sys.executable, str(ROOT / "train.py"), *words, *shared.values()]
        process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=child_environment())
        return process.returncode, process.stdout + process.stderr

    return run


@pytest.mark.full
def test_a_repeated_sweep_skips_finished_jobs_and_one_failed_job_does_not_end_it(train, tmp_path):
    words = ("-m", "head=eagle,medusa", "optimizer.lr=1e-3,-1")
    status, output = train(*words)
    finished = sorted(path.parent.name for path in tmp_path.glob("checkpoints/*/finished"))
    assert status == 1 and finished == ["eagle-target-optimizer.lr=0.001", "medusa-target-optimizer.lr=0.001"]
    folders = ",".join(f"checkpoints/{name}" for name in finished)
    assert f"specdec evaluate checkpoint={folders}" in output
    assert "Failed, and tried again by the same command: eagle-target-optimizer.lr=-1, medusa" in output
    status, output = train(*words)
    assert output.count("holds a finished run") == 2 and output.count("must be a number of 0 or more") == 2


@pytest.mark.full
def test_a_head_of_ones_own_is_trained_and_loaded_with_trust_code_alone(train, tmp_path):
    (tmp_path / "conf" / "head").mkdir(parents=True)
    (tmp_path / "conf" / "head" / "own.yaml").write_text(OWN_YAML)
    (tmp_path / "my_heads.py").write_text(OWN_HEAD)
    status, output = train("--config-dir", "conf", "head=own", "run=own")
    assert status == 1 and "trust_code=true" in output
    status, output = train("--config-dir", "conf", "head=own", "run=own", "trust_code=true", "head.drafter.nothing=1")
    assert status == 1 and "nothing" in output
    status, output = train("--config-dir", "conf", "head=own", "run=own", "trust_code=true")
    assert status == 0, output
    command = "-m specdec.command generate checkpoint=checkpoints/own prompt=Say max_new_tokens=4"
    words = [sys.executable, *command.split()]
    options = {"capture_output": True, "text": True, "cwd": tmp_path, "env": child_environment()}
    refused, accepted = (subprocess.run([*words, *more], **options) for more in ((), ("trust_code=true",)))
    assert refused.returncode == 1 and "trust_code=true" in refused.stderr and "tau" in accepted.stdout


def test_a_head_from_the_hub_never_names_a_class_of_its_own(tmp_path, monkeypatch):
    folder = tmp_path / "models--user--name" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (folder / "drafter.json").write_text('{"_target_": "my_heads.Own"}')
    monkeypatch.setattr(extensions, "_trusted", [True])
    with pytest.raises(ValueError, match="a head from the Hub has a class of"):
        checkpoint.read_document(folder)


def test_a_job_is_named_by_its_own_overrides():
    swept = ["head=eagle3", "optimizer.lr=0.001", "data.train=a/b c.jsonl"]
    assert multirun.name_run("eagle3-target", swept, is_default=True) == (
        "eagle3-target-optimizer.lr=0.001-data.train=a-b-c.jsonl"
    )
    assert multirun.name_run("b", ["run=b"], is_default=False) == "b"
    assert multirun.name_run("mine", ["head=eagle3"], is_default=False) == "mine-head=eagle3"


def test_a_multirun_under_a_launcher_is_refused_with_the_line(monkeypatch):
    for name in (multirun.LAUNCHER_VARIABLE, "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert multirun.refuse_launcher(["-m", "head=a,b"]) is None
    monkeypatch.setitem(os.environ, multirun.LAUNCHER_VARIABLE, "no")
    assert multirun.refuse_launcher(["-m", "head=a,b"]).endswith("python train.py -m head=a,b")


def test_a_comma_list_is_swept_only_by_a_multirun():
    assert hydra_text.quote_arguments(["target.name=a,b"], multirun=True) == ["target.name=a,b"]
    assert hydra_text.quote_arguments(["target.name=a,b"]) == ["target.name='a,b'"]
