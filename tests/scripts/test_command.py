"""Tests of the console command `specdec` and of the public interface."""

import importlib
import os
import re
import signal
import subprocess
import sys
import time
import tomllib

import pytest
import torch

import specdec
from specdec import command
from specdec.core.closed_pipe import end_at_closed_pipe
from specdec.text.conversations import encode_prompt
from tests.support.commands import ROOT, child_environment
from tests.support.drafters import save_eagle
from tests.support.targets import save_target

VERBS = (
    "adapt answer choose datastore demo evaluate export generate get_target inspect judge launch_engine replay report "
    "serve show_data train"
)


def test_help_lists_every_verb_at_once_without_torch():
    code = "import sys; from specdec.command import main; main(['--help']); assert 'torch' not in sys.modules"
    start_time = time.perf_counter()
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=child_environment())
    assert ran.returncode == 0 and time.perf_counter() - start_time < 5, ran.stderr  # about 0.2 s with nothing beside
    lines = {line.split()[0]: line.split(maxsplit=1)[1] for line in ran.stdout.splitlines() if line.startswith("  ")}
    assert sorted(lines) == VERBS.split()


def test_the_version_is_said_as_pip_says_it(capsys):
    command.main(["--version"])
    versions = rf"torch {re.escape(torch.__version__)}, python 3\.\d+\.\d+"
    said = rf"specdec {re.escape(specdec.__version__)} from {re.escape(str(ROOT / 'specdec'))} \({versions}\)\n"
    assert re.fullmatch(said, capsys.readouterr().out)


@pytest.mark.parametrize(
    "words",
    [
        ["-m", "specdec.command", "train", "--help"],
        ["train.py", "--help"],
        ["scripts/show_data.py", "data=data/train.jsonl", "num=50"],
    ],
)
def test_a_closed_pipe_ends_a_command_as_other_tools_end(words):
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ran = subprocess.run(
            [sys.executable, *words], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, env=child_environment()
        )
    finally:
        os.close(writer)
    assert ran.returncode == -signal.SIGPIPE and b"Traceback" not in ran.stderr and b"Broken" not in ran.stderr


def test_a_connection_that_breaks_is_no_closed_pipe():
    with pytest.raises(BrokenPipeError, match="the server"), end_at_closed_pipe():
        raise BrokenPipeError("the server")


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


def test_the_distribution_has_one_name_and_warns_of_its_namesake(monkeypatch, tmp_path, capsys):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["name"] == specdec.DISTRIBUTION
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    for name, warnings in ((specdec.DISTRIBUTION, 0), ("specdec", 1)):
        folder = tmp_path / f"{name.replace('-', '_')}-0.2.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.2.0\n")
        importlib.invalidate_caches()
        command.main(["--help"])
        assert capsys.readouterr().err.count("warning: specdec 0.2.0 and specdec-drafters are installed") == warnings


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
    drafter, answer, messages = scope["drafter"], scope["answer"], scope["messages"]
    (tokens,), (counts,) = answer.tokens, answer.accepted
    assert answer.text == drafter.tokenizer.decode(tokens, skip_special_tokens=True) != "" and len(counts) > 1
    assert answer.acceptance_length == (len(tokens) - 1) / len(counts) == 1 + sum(counts) / len(counts)
    assert answer.tokens_per_second == (len(tokens) - 1) / answer.seconds > 0
    assert capsys.readouterr().out == f"{answer.text} {answer.acceptance_length} {answer.tokens_per_second}\n"
    one = drafter.answer(messages, 1)
    assert one.tokens == [tokens[:1]] and one.acceptance_length is one.tokens_per_second is None

    prompt = encode_prompt(drafter.tokenizer, messages)
    plain = specdec.Decoder(drafter.target, None, sampling=specdec.Sampling(), stop=drafter.stop)
    (expected,) = plain.generate([prompt], 64).tokens
    num = 64 if drafter.target.device.type == "cpu" else 1  # a GPU rounds passes of other sizes otherwise
    assert tokens[:num] == expected[:num]
    undrafted = drafter.answer(messages, 64, draft=False)
    assert undrafted.tokens == [expected] and undrafted.acceptance_length == 1
    listed = re.findall(r"^\| `(\w+)\(", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(specdec.__all__) and all(getattr(specdec, name) for name in listed)
    with pytest.raises(AttributeError, match="no attribute 'Dekoder'"):
        specdec.Dekoder  # noqa: B018
