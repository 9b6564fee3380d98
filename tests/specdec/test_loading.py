"""What commands load: files of settings that strangers made, the number of threads, and what is printed of a dtype."""

import json
import os

import pytest
import torch

from specdec import loading
from specdec.core import precision, threads
from specdec.options.command_defaults import read_group
from specdec.options.target import TargetOptions

# Settings of strangers: plain values, or a sentence

ALIASES = [f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")]
FILES = {
    "call": "depth: !!python/object/apply:os.system ['touch code-has-run']\n",
    "object": "!!python/object:specdec.text.conversations.Row {}\n",
    "name": "depth: !!python/name:os.system\n",
    "module": "depth: !!python/module:os\n",
    "tuple": "depth: !!python/tuple [1]\n",
    "aliases": "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(ALIASES),
    "deep": "a: " + "[" * 5000 + "]" * 5000,
    "list": "- 1\n",
    "text": "{{{",
    "bytes": b"\xff\xfe\x00\x01\x02",
    "empty": "",
}


@pytest.mark.parametrize("kind", FILES)
def test_yaml(tmp_path, monkeypatch, kind):
    monkeypatch.chdir(tmp_path)
    content = FILES[kind]
    (tmp_path / "config.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"config\.yaml"):
        loading.read_yaml(tmp_path / "config.yaml")
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_yaml_of_any_size(tmp_path):
    (tmp_path / "config.yaml").touch()
    os.truncate(tmp_path / "config.yaml", 2**40)
    with pytest.raises(ValueError, match="larger than"):
        loading.read_yaml(tmp_path / "config.yaml")


def test_a_missing_default_target_is_refused_with_the_command_that_makes_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"targets/smollm2-135m does not exist.*specdec get_target\) makes"):
        loading.load_target(read_group(TargetOptions, "target"))


# Threads and dtypes, which are decided and printed once in a process


@pytest.fixture
def new_process(monkeypatch):
    """The module as a new process has it."""
    monkeypatch.setattr(loading, "_threads", [])
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    num_before = torch.get_num_threads()
    loading.print_dtype.cache_clear()
    yield
    torch.set_num_threads(num_before)


def test_threads_are_decided_once(new_process, monkeypatch):
    for cores in (3, 1):
        monkeypatch.setattr(threads, "count_usable_cores", lambda cores=cores: cores)
        loading.use_threads()
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize(("users_number", "recorded"), [(None, 2), ("2", 1)])
def test_a_users_number_of_threads_wins_and_then_that_of_continued_results(
    new_process, monkeypatch, tmp_path, users_number, recorded
):
    monkeypatch.setattr(threads, "count_usable_cores", lambda: 1)
    if users_number:
        monkeypatch.setenv("OMP_NUM_THREADS", users_number)
    (tmp_path / "settings.json").write_text(json.dumps({"threads": recorded}))
    loading.use_threads(tmp_path / "settings.json")
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize(
    ("option", "dtype", "sentence"),
    [
        ("auto", "float32", "target.dtype=float32 (as asked)"),
        ("bfloat16", "bfloat16", "is slow here (as asked); auto is float32"),
        ("float32", "float32", ""),
    ],
)
def test_what_auto_is_and_what_is_slow_is_said_once(new_process, capsys, option, dtype, sentence):
    for _ in range(2):
        loading.print_dtype(option, dtype, precision.DtypeChoice("float32", "as asked"))
    printed = capsys.readouterr().err
    assert sentence in printed and printed.count("\n") == bool(sentence)
