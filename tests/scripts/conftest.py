"""How tests run a script: in this process, as its command does."""

import sys

import pytest


@pytest.fixture
def run_script(monkeypatch, capsys):
    """run_script(module, "key=value", ...) -> what the script printed"""

    def run(script, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["script", *arguments])
        script.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def run(run_script):
    """Test files put their own arguments before those that are given."""
    return run_script


@pytest.fixture
def refuse(run):
    """refuse(message, arguments ...): `run` with these arguments ends with a ValueError that says the message."""

    def refuse(message: str, *arguments) -> None:
        with pytest.raises(ValueError, match=message):
            run(*arguments)

    return refuse
