"""A program in a process of its own that answers each line of JSON with one line of JSON."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

PATIENCE = 20  # seconds that a program has to end by itself


class Child:
    """The program `program`, run by the interpreter `python` with `options` as JSON.

    name: the engine's name for messages; loads: what it loads; environment: variables for its process
    The program writes {} when it has loaded, then one line for each request; {"error": TEXT} says that it failed. Its
    error output goes to a file, whose end is quoted when the program stops. Raises ValueError where the program fails.

    Between requests its processes are stopped (SIGSTOP): the threads of an engine spin for a while after their work and
    would slow down whatever is timed next.
    """

    def __init__(
        self, program: Path, options: dict, *, python: str, name: str, loads: str, environment: dict[str, str]
    ):
        self.name = name
        self.scratch = tempfile.TemporaryDirectory()  # engines leave files behind
        self.log = open(Path(self.scratch.name, "log"), "w+", errors="replace")  # noqa: SIM115  # close() does
        self.process: Any = subprocess.Popen(
            [python, "-P", str(program), json.dumps(options)],  # -P: modules beside the program are not importable
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=os.environ | {"TMPDIR": self.scratch.name} | environment,
            process_group=0,  # all its processes are stopped and ended together; Linux ends stopped orphans
        )
        try:
            self._read(f"cannot load {loads}")
        except ValueError:
            self.close()
            raise
        self._send(signal.SIGSTOP)

    def ask(self, request: dict) -> dict[str, Any]:
        self._send(signal.SIGCONT)
        with contextlib.suppress(BrokenPipeError):  # _read says why
            print(json.dumps(request), file=self.process.stdin, flush=True)
        reply = self._read("cannot answer")
        self._send(signal.SIGSTOP)
        return reply

    def close(self) -> None:
        if self.log.closed:
            return
        self._send(signal.SIGCONT)
        if self.process.poll() is None:
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):
                self.process.stdin.close()  # the end of its input ends it
                self.process.wait(PATIENCE)
        self._send(signal.SIGKILL)  # also what it started itself
        self.process.wait()
        self.process.stdout.close()
        self.log.close()
        self.scratch.cleanup()

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def _read(self, failure: str) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            self.process.wait()
            self.log.seek(0)
            last = " | ".join(self.log.read().strip().splitlines()[-8:])
            status = self.process.returncode
            raise ValueError(f"{self.name} {failure}: its process ended with {status}. Its log: {last}")
        reply = json.loads(line)
        if "error" in reply:
            raise ValueError(f"{self.name} {failure}: {reply['error']}")
        return reply
