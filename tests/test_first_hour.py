"""Test of the notebook docs/first_hour.ipynb, whose constants are made small."""

import ast
import json
from pathlib import Path

import pytest

from tests.support.commands import ROOT, child_environment

nbformat = pytest.importorskip("nbformat", reason="needs the extra docs: make test-full installs it")
nbclient = pytest.importorskip("nbclient", reason="needs the extra docs: make test-full installs it")
pytestmark = pytest.mark.full

SMALL = {"TRAINED": 6, "STEPS": 2, "JUDGED": 2, "TOKENS": 6}


def execute(notebook: nbformat.NotebookNode, folder: Path) -> str:
    """What a notebook of docs prints in a folder that has the clone's files."""
    for name in ("train.py", "conf", "data", "targets", "checkpoints/shipped"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(ROOT / name)
    (folder / "docs").mkdir()
    client = nbclient.NotebookClient(notebook, timeout=1200, resources={"metadata": {"path": str(folder / "docs")}})
    client.execute(env=child_environment())
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.text for output in outputs if output.output_type == "stream")


def test_the_notebook_runs(tmp_path):
    notebook = nbformat.read(ROOT / "docs" / "first_hour.ipynb", as_version=4)
    codes = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in codes)  # it is stored as it was written
    assert {statement.targets[0].id for statement in ast.parse(codes[0].source).body} == SMALL.keys()
    codes[0].source = "\n".join(f"{name} = {value}" for name, value in SMALL.items())
    printed = execute(notebook, tmp_path)
    assert printed.count(" tokens/s\n") == 4 and "checkpoints/first_hour: tau " in printed
    work = tmp_path / "build" / "first_hour"
    assert len(json.loads((work / "replay" / "results.json").read_text())["results"]) == 2
    assert {"config.json", "model.safetensors"} <= {path.name for path in (work / "exported").iterdir()}
