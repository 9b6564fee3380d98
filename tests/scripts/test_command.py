"""Tests of the console command `specdec` and of the public interface."""

import re
import subprocess
import sys
import time
import tomllib

import pytest

import specdec
from specdec import command
from tests.support import ROOT, child_environment, save_eagle, save_target

VERBS = ("adapt", "answer", "choose", "datastore", "demo", "evaluate", "export", "generate", "get_target", "judge",
         "launch_engine", "replay", "report", "serve", "show_data", "train")  # fmt: skip


def test_help_lists_every_verb_at_once_without_torch():
    code = "import sys; from specdec.command import main; main(['--help']); assert 'torch' not in sys.modules"
    begun = time.perf_counter()
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=child_environment())
    assert ran.returncode == 0 and time.perf_counter() - begun < 5, ran.stderr  # about 0.2 s with nothing beside
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in ran.stdout.splitlines() if line.startswith("  ")}
    assert sorted(lines) == sorted(VERBS)


def test_a_verb_runs_with_its_arguments(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        command.main(["show-data", "--help"])
    assert ended.value.code == 0 and "supervised tokens in green" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"^error: "):
        command.main(["report", f"run={tmp_path}/none"])
    with pytest.raises(SystemExit, match=r"There is no option 'dta'\. Did you mean 'data'"):
        command.main(["show_data", "dta=x"])


def test_a_wrong_verb_is_answered_with_the_right_one():
    with pytest.raises(
        SystemExit, match=r"There is no verb 'evalute'\. Did you mean 'evaluate'\? Verbs: adapt, answer"
    ):
        command.main(["evalute"])


def test_files_of_the_clone_are_explained_outside_of_it(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "IN_CLONE", False)
    with pytest.raises(
        SystemExit, match=r"There is no file data/prompts_heldout.jsonl.*are folders of the clone: work there"
    ):
        command.main(["evaluate", "proposers=ngram"])


def test_training_prints_its_help(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["specdec"])
    with pytest.raises(SystemExit):
        command.main(["train", "--help"])
    assert "Options, KEY=VALUE, and their defaults:" in capsys.readouterr().out


def test_the_wheel_lists_every_package():
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "specdec").rglob("*.py")}
    core = {folder for folder in folders if not {"tools", "experiments"} & set(folder.parts)}  # those come by a pattern
    assert set(listed) - {"specdec._clone"} == {".".join(folder.parts) for folder in core}


def test_the_example_of_the_page_runs(tmp_path, monkeypatch, capsys):
    """docs/api.md, with a tiny target and head of the same names."""
    save_eagle(tmp_path / "checkpoints" / "shipped" / "mtp", save_target(tmp_path / "targets" / "smollm2-135m"))
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    scope: dict = {}
    exec(code, scope)
    assert len(scope["answer"].tokens[0]) > 1 and "acceptance length: " in capsys.readouterr().out
    plain = specdec.Decoder(scope["target"], None, sampling=specdec.Sampling(), stop={scope["tokenizer"].eos_token_id})
    (wanted,), (found,) = plain.generate([scope["prompt"]], 64).tokens, scope["answer"].tokens
    num = 64 if scope["target"].device.type == "cpu" else 1  # a GPU rounds passes of other sizes otherwise
    assert found[:num] == wanted[:num]
    listed = re.findall(r"^\| `(\w+)\(", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(specdec.__all__) and all(getattr(specdec, name) for name in listed)
    with pytest.raises(AttributeError, match="no attribute 'Dekoder'"):
        specdec.Dekoder  # noqa: B018
