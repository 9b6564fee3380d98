"""Fixtures that run a script in the process of the test, as its command runs it."""

import os
import sys

import pytest

from train import progress


@pytest.fixture
def run_script(monkeypatch, capsys):
    """run_script(module, "key=value", ...) -> what the script printed"""

    def run(script, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["script", *arguments])
        script.main()
        return capsys.readouterr().out

    before = os.environ.get(progress.VARIABLE)
    yield run
    progress.choose(before or "auto", main=True)  # not what a script of this test was told by progress=
    if before is None:
        del os.environ[progress.VARIABLE]


@pytest.fixture
def run(run_script):
    """`run_script`; test files replace it by a function that adds arguments of their own."""
    return run_script


@pytest.fixture
def refuse(run):
    """refuse(message, arguments ...): asserts that `run` with these arguments raises a ValueError with that message."""

    def refuse(message: str, *arguments) -> None:
        with pytest.raises(ValueError, match=message):
            run(*arguments)

    return refuse
