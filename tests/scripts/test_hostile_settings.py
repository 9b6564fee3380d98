"""Settings that a stranger made, a run's config.yaml: plain values, or a sentence."""

import os

import pytest

from specdec import loading
from specdec.options.command_defaults import read_group
from specdec.options.target import TargetOptions

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)
FILES = {
    "call": "depth: !!python/object/apply:os.system ['touch code-has-run']\n",
    "object": "!!python/object:specdec.text.conversations.Row {}\n",
    "name": "depth: !!python/name:os.system\n",
    "module": "depth: !!python/module:os\n",
    "tuple": "depth: !!python/tuple [1]\n",
    "aliases": BOMB,
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


def test_code_of_a_target_that_only_a_checkpoint_names():
    with pytest.raises(ValueError, match=r"give target\.name="):
        read_group(TargetOptions, "target", trust_remote_code=True)
