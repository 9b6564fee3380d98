"""Settings that a stranger made, for decode.file= and the model card of an export: plain values, or a sentence."""

from helpers import loading
from helpers.decoding import read_drafting

import os

import pytest

from tests.support import save_target

BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi")
)
FILES = {
    "call": "depth: !!python/object/apply:os.system ['touch code-has-run']\n",
    "object": "!!python/object:train.data.rows.Row {}\n",
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
    (tmp_path / "tuned.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=r"tuned\.yaml"):
        read_drafting("tuned.yaml", compile=None)
    (tmp_path / "tuned.yaml").rename(tmp_path / "config.yaml")
    with pytest.raises(ValueError, match=r"config\.yaml"):
        loading.trained_on(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_yaml_of_any_size(tmp_path):
    (tmp_path / "config.yaml").touch()
    os.truncate(tmp_path / "config.yaml", 2**40)
    with pytest.raises(ValueError, match="larger than"):
        loading.read_yaml(tmp_path / "config.yaml")


def test_variables_of_the_environment_do_not_reach_a_model_card(tmp_path, monkeypatch):
    monkeypatch.setenv("SECRET", "hunter2")
    (tmp_path / "config.yaml").write_text("data:\n  train: data/${oc.env:SECRET}.jsonl\n")
    assert loading.trained_on(tmp_path) == "${oc.env:SECRET}.jsonl"


def test_code_of_a_target_that_only_a_checkpoint_names(tmp_path):
    save_target(tmp_path / "target")
    with pytest.raises(ValueError, match=r"give target\.name="):
        loading.load_target(loading.TargetOptions(trust_remote_code=True), default=str(tmp_path / "target"))
