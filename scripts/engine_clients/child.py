"""A program in a process of its own that answers each line of JSON with one line of JSON."""

import contextlib
import json
import os
import subprocess
import tempfile
from pathlib import Path


class Child:
    """The program `program`, run by the interpreter `python` with `options` as JSON.

    name: the engine's name for messages; loads: what it loads, likewise; environment: variables for its process
    The program first writes {} when it has loaded, then one line for each request; {"error": TEXT} says that it failed.
    Its error output goes to a file, whose end is quoted when it stops. Raises ValueError where the program fails.
    """

    def __init__(
        self, program: Path, options: dict, *, python: str, name: str, loads: str, environment: dict[str, str]
    ):
        self.name = name
        self.scratch = tempfile.TemporaryDirectory()  # engines leave files behind
        self.log = open(Path(self.scratch.name, "log"), "w+", errors="replace")  # noqa: SIM115  # close() does
        self.process = subprocess.Popen(
            [python, "-P", str(program), json.dumps(options)],  # -P: modules beside the program are not importable
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | {"TMPDIR": self.scratch.name} | environment,
        )
        try:
            self._read(f"cannot load {loads}")
        except ValueError:
            self.close()
            raise

    def ask(self, request: dict) -> dict:
        with contextlib.suppress(BrokenPipeError):  # _read says why
            print(json.dumps(request), file=self.process.stdin, flush=True)
        return self._read("cannot answer")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.communicate()  # the end of its input ends it
        self.log.close()
        self.scratch.cleanup()

    def _read(self, failure: str) -> dict:
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            last = " | ".join(self.log.read().strip().splitlines()[-8:])
            raise ValueError(
                f"{self.name} {failure}: its process ended with {self.process.returncode}. Its log: {last}"
            )
        reply = json.loads(line)
        if "error" in reply:
            raise ValueError(f"{self.name} {failure}: {reply['error']}")
        return reply
