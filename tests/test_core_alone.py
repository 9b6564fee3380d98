"""Tests that the core works without tools and experiments: in a copy of the tree, both folders are absent."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, child_environment, write_prompts, write_rows
from tests.support.conversations import as_row, pair
from tests.support.runs import train_overrides
from tests.support.targets import save_target

pytestmark = pytest.mark.full

CORE_VERBS = ("answer", "datastore", "evaluate", "export", "generate", "report", "show_data", "train")
IMPORT_ALL = """
import importlib, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).rglob("specdec/**/*.py")):
    name = ".".join(path.relative_to(sys.argv[1]).with_suffix("").parts).removesuffix(".__init__")
    if name not in ("specdec.core.tree_kernels", "specdec.engines.draft_weights.in_vllm.draft_files"):  # Triton, vLLM
        importlib.import_module(name)
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory) -> Path:
    """A copy of the tree without tools and experiments."""
    folder = tmp_path_factory.mktemp("core")
    for name in ("specdec", "train", "scripts", "conf"):
        shutil.copytree(
            ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", "tools", "experiments")
        )
    shutil.copy(ROOT / "train.py", folder)
    return folder


@pytest.fixture
def run(core, tmp_path):
    """run(words ...) -> what a Python process with the copy as its packages printed"""

    def run(*words: str) -> str:
        environment = {**child_environment(), "PYTHONPATH": str(core), "HF_HUB_OFFLINE": "1"}
        command = [sys.executable, *map(str, words)]
        process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert process.returncode == 0, process.stderr[-3000:]
        return process.stdout

    return run


def test_every_module_of_the_core_imports_alone(core, run):
    run("-c", IMPORT_ALL, core)


@pytest.mark.parametrize("verb", CORE_VERBS)
def test_every_verb_of_the_core_has_its_help(run, verb):
    assert "cascade" not in run("-m", "specdec.command", verb, "--help")


def test_a_head_is_trained_decoded_and_exported(run, tmp_path):
    save_target(tmp_path / "target")
    write_prompts(tmp_path / "prompts.jsonl", 2)
    rows = [as_row(pair("Say", f"Hello world {number}")) for number in range(9)]
    write_rows(tmp_path / "train.jsonl", rows)
    overrides = ("train.steps=2", "train.validate_every=2", "data.hold_out=0", "validation.num_prompts=2")
    run("-m", "specdec.command", "train", "head=eagle", *train_overrides(tmp_path, "run", *overrides))
    head = ["checkpoint=checkpoints/run", "target.name=target", "target.dtype=float32"]
    assert "tau" in run("-m", "specdec.command", "generate", *head, "prompt=Say hello", "max_new_tokens=8")
    run("-m", "specdec.command", "evaluate", *head, "prompts=prompts.jsonl", "max_new_tokens=4", "auto=false")
    assert " tensors, " in run("-m", "specdec.command", "export", *head, "out=exported", "format=vllm")
