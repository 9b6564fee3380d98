"""Tests of the console command `specdec` and of the public interface."""

import re
import subprocess
import sys
import time
import tomllib

import pytest

import specdec
from specdec import command
from tests.support.commands import ROOT, child_environment
from tests.support.drafters import save_eagle
from tests.support.targets import save_target

VERBS = (
    "adapt answer choose datastore demo evaluate export generate get_target judge launch_engine replay report serve "
    "show_data train"
)


def test_help_lists_every_verb_at_once_without_torch():
    code = "import sys; from specdec.command import main; main(['--help']); assert 'torch' not in sys.modules"
    start_time = time.perf_counter()
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=child_environment())
    assert ran.returncode == 0 and time.perf_counter() - start_time < 5, ran.stderr  # about 0.2 s with nothing beside
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in ran.stdout.splitlines() if line.startswith("  ")}
    assert sorted(lines) == VERBS.split()


@pytest.mark.parametrize(
    ("verb", "text"),
    [("show-data", "supervised tokens in green"), ("train", "Options, KEY=VALUE, and their defaults:")],
)
def test_a_verb_prints_its_help(monkeypatch, capsys, verb, text):
    monkeypatch.setattr(sys, "argv", ["specdec"])
    with pytest.raises(SystemExit) as ended:
        command.main([verb, "--help"])
    assert ended.value.code in (0, None) and text in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("report run=nowhere", "^error: "),
        ("show_data dta=x", r"^error: There is no option 'dta'\. Did you mean 'data'"),
        ("evalute", r"^There is no verb 'evalute'\. Did you mean 'evaluate'\? Verbs: adapt, answer"),
        (
            "evaluate proposers=ngram",
            "There is no file data/prompts_heldout.jsonl.*are folders of the clone: work there",
        ),
    ],
)
def test_a_mistake_ends_in_a_sentence(monkeypatch, tmp_path, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(command, "IN_CLONE", False)
    with pytest.raises(SystemExit, match=sentence):
        command.main(arguments.split())


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
    (expected,), (answer,) = plain.generate([scope["prompt"]], 64).tokens, scope["answer"].tokens
    num = 64 if scope["target"].device.type == "cpu" else 1  # a GPU rounds passes of other sizes otherwise
    assert answer[:num] == expected[:num]
    listed = re.findall(r"^\| `(\w+)\(", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(specdec.__all__) and all(getattr(specdec, name) for name in listed)
    with pytest.raises(AttributeError, match="no attribute 'Dekoder'"):
        specdec.Dekoder  # noqa: B018
