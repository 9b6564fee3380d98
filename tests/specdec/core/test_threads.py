"""Tests of specdec/core/threads.py: how threads wait is said before torch is loaded, and how many there are beside other work."""

import ast
import os
import subprocess
import sys
import time

import pytest

from specdec.core import threads
from tests.support import ROOT

COMMANDS = [ROOT / "train.py", *sorted((ROOT / "scripts").glob("*.py"))]
LIGHT = {*sys.stdlib_module_names, "__future__"}
OWN = {"specdec.core.threads", "helpers"}  # importing one of these imports specdec


def first_imports(path) -> list[str]:
    """Modules that a file imports at its top, in order."""
    found = []
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append(node.module)
    return found


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: path.name)
def test_every_command_says_how_threads_wait_before_it_loads_anything(path):
    heavy = [name for name in first_imports(path) if name.partition(".")[0] not in LIGHT]
    assert not heavy or heavy[0] in OWN or heavy[0].partition(".")[0] in OWN, heavy[:2]


def environment_of(code: str, **given: str) -> str:
    clean = {key: value for key, value in os.environ.items() if key not in (*threads.SPIN, *threads.OWN)}
    command = [sys.executable, "-c", f"import os, sys; {code}"]
    run = subprocess.run(command, env=clean | given | {"PYTHONPATH": f"{ROOT}:{ROOT / 'scripts'}"}, capture_output=True, text=True)  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


@pytest.mark.parametrize("module", ["specdec", "helpers", "specdec.core.threads"])
def test_the_setting_comes_before_torch_and_leaves_a_users_own(module):
    show = f"import {module}; print(os.environ.get('GOMP_SPINCOUNT'), 'torch' in sys.modules)"
    assert environment_of(show) == f"{threads.SPIN['GOMP_SPINCOUNT']} False"
    assert environment_of(show, GOMP_SPINCOUNT="7") == "7 False"
    assert environment_of(show, OMP_WAIT_POLICY="passive") == "None False"


def test_it_says_when_it_is_too_late(monkeypatch):
    for name in (*threads.SPIN, *threads.OWN):
        monkeypatch.delenv(name, raising=False)
    assert "torch" in sys.modules and not threads.limit_spinning()
    monkeypatch.delitem(sys.modules, "torch")
    assert threads.limit_spinning()


@pytest.mark.parametrize(
    ("cores", "busy", "free"),
    [(2, None, 2), (2, 0.2, 2), (2, 1.0, 1), (2, 2.0, 1), (16, 1.0, 15), (16, 30.0, 1), (1, 0.9, 1)],
)
def test_threads_are_as_many_as_cores_are_free(monkeypatch, cores, busy, free):
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    monkeypatch.setattr(threads.WATCH, "busy_cores", lambda: busy)
    assert threads.free_cores() == free


def test_what_other_processes_do_is_what_all_do_but_this_one(monkeypatch, tmp_path):
    ticks = os.sysconf("SC_CLK_TCK")
    stat = tmp_path / "stat"
    monkeypatch.setattr(threads, "STAT", stat)
    clock, own = [100.0], [5.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(time, "process_time", lambda: own[0])
    stat.write_text(f"cpu  {10 * ticks} 0 0 {90 * ticks} 0 0 0 0 0 0\ncpu0 ...\n")
    watch = threads.Watch()
    assert watch.busy_cores() is None  # too soon
    clock[0], own[0] = 104.0, 8.0  # in 4 s this process computed for 3, and all together for 7
    stat.write_text(f"cpu  {17 * ticks} 0 0 {91 * ticks} 0 0 0 0 0 0\ncpu0 ...\n")
    assert watch.busy_cores() == pytest.approx(1.0)
    stat.unlink()
    assert watch.busy_cores() is None and threads.Watch().busy_cores() is None  # not on Linux
