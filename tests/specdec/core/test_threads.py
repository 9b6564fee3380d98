"""Tests of specdec/core/threads.py: how threads wait is said before torch is loaded."""

import ast
import os
import subprocess
import sys

import pytest
from torch._inductor import config as inductor

from specdec.core import threads
from tests.support.commands import ROOT

COMMANDS = [ROOT / "train.py", *sorted((ROOT / "scripts").glob("*.py"))]
LIGHT = {*sys.stdlib_module_names, "__future__"}
OWN = {"specdec.core.threads", "specdec.options.command_line"}  # importing one of these imports specdec


def first_imports(path) -> list[str]:
    """Modules that a file imports at its top, in order."""
    counts = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            counts += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            counts.append(node.module)
    return counts


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_every_command_says_how_threads_wait_before_it_loads_anything(path):
    heavy = [name for name in first_imports(path) if name.partition(".")[0] not in LIGHT]
    assert not heavy or heavy[0] in OWN or heavy[0].partition(".")[0] in OWN, heavy[:2]


def environment_of(code: str, **variables: str) -> str:
    settings = (*threads.SPIN, *threads.USER_VARIABLES, threads.COMPILERS)
    clean = {key: value for key, value in os.environ.items() if key not in settings}
    command = [sys.executable, "-c", f"import os, sys; {code}"]
    environment = clean | variables | {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("module", ["specdec", "specdec.core.threads"])
def test_the_setting_comes_before_torch_and_leaves_a_users_own(module):
    show = f"import {module}; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    assert environment_of(show) == f"{threads.SPIN['GOMP_SPINCOUNT']} False"
    assert environment_of(show, GOMP_SPINCOUNT="7") == "7 False"
    assert environment_of(show, OMP_WAIT_POLICY="passive") == "None False"


def test_processes_of_a_launcher_divide_the_cores_that_inductor_compiles_with(monkeypatch):
    """Torch reads the variable when it is imported; a user's own number stays."""
    name, cores = threads.COMPILERS, threads.count_usable_cores()
    show = f"import specdec; print(os.environ.get('{name}'))"
    assert environment_of(show, LOCAL_WORLD_SIZE="1") == "None"
    assert environment_of(show, LOCAL_WORLD_SIZE="2") == str(max(1, min(32, cores // 2)))
    assert environment_of(show, OMPI_COMM_WORLD_LOCAL_SIZE="9999") == "1"
    assert environment_of(show, LOCAL_WORLD_SIZE="2", **{name: "5"}) == "5"
    monkeypatch.setenv(name, "3")
    assert inductor.decide_compile_threads() == 3
