"""Commands in other processes, and the files that they read."""

import contextlib
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from specdec.command import find_verbs
from specdec.core.option_types import Options

ROOT = Path(__file__).resolve().parents[2]


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_prompts(path: Path, num: int) -> None:
    """Short prompts of two categories."""
    write_rows(path, [{"id": str(n), "category": "ab"[n % 2], "prompt": f"Count to {n}."} for n in range(num)])


@functools.cache
def train_command():
    """train.py as a module. `import train` imports the package, so the command is loaded by its path."""
    spec = importlib.util.spec_from_file_location("train_command", ROOT / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def child_environment(**variables: str) -> dict[str, str]:
    """The environment of processes that tests start: the packages of this clone, one thread."""
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", **variables}


def start(
    arguments: list, *, cwd: Path = ROOT, errors: bool = False, file: Path | None = None, **variables: str
) -> subprocess.Popen:
    """Starts `python ARGUMENTS`, the first of which is a file.

    errors: stdout has what is printed on stderr, too; file: is written in place of `stdout`; variables: those of the
        environment
    """

    def opener(path, flags: int) -> int:
        return os.open(path, flags | os.O_NOCTTY)  # a terminal does not become that of the tests

    with contextlib.nullcontext(subprocess.PIPE) if file is None else open(file, "w", opener=opener) as out:
        merged = subprocess.STDOUT if errors else None
        command, env = [sys.executable, *map(str, arguments)], child_environment(**variables)
        return subprocess.Popen(command, cwd=cwd, env=env, stdout=out, stderr=merged, text=True)


def find_model(verb: str) -> type[Options]:
    """The options of a verb, which its file passes to `read_command`."""
    path = find_verbs()[verb]
    text = path.read_text()
    name, model = re.search(r'read_command\(\s*"(\w+)", (\w+),', text).groups()
    assert name == verb
    return getattr(importlib.import_module(f"scripts.{path.stem}"), model)
