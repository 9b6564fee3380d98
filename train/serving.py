"""Tau of a checkpoint in vLLM, as scripts/serve_heldout.py measures it, in a process of its own."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Serving:
    """python: an interpreter with vLLM; options: of the script, the prompts and the target; say: prints a sentence

    Raises ValueError if there is no such interpreter.
    """

    python: str
    options: dict
    say: Callable[[str], None]

    def __post_init__(self):
        if shutil.which(self.python) is None:
            raise ValueError(
                f"served={self.python} is no interpreter: give one that has vLLM. `make engines` makes engines/bin/python, for a "
                "CPU."
            )

    def __call__(self, folder: Path) -> dict | None:
        """The figures of a checkpoint; None, with the reason, if it could not be served."""
        with tempfile.TemporaryDirectory() as scratch:
            out = Path(scratch, "served.json")
            chosen = {"checkpoint": folder, "out": out, "python": self.python, **self.options}
            given = [f"{name}={'null' if value is None else value}" for name, value in chosen.items()]
            command = [sys.executable, str(ROOT / "scripts" / "serve_heldout.py"), *given]
            environment = os.environ | {"PYTHONPATH": str(ROOT)}
            done = subprocess.run(command, text=True, capture_output=True, env=environment)
            if done.returncode or not out.exists():
                reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
                self.say(f"vLLM has not served {folder}: {reason}")
                return None
            self.say(done.stdout.strip())
            return json.loads(out.read_text())
