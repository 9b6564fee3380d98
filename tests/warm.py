"""Commands of Python in processes that have torch and transformers already, which take seconds to import.

They are forked by a process that has done nothing but import them (multiprocessing's forkserver), and have a new working directory,
environment, arguments and output. What is tested about the start of a process itself starts one (subprocess).
"""

import atexit
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from tests.support import ROOT, child_environment

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "transformers.modeling_utils", "accelerate", "datasets", "hydra"])


class Command:
    """`python FILE ARGUMENTS` or `python -m MODULE ARGUMENTS`, used as a subprocess.Popen with text in its stdout."""

    def __init__(
        self,
        arguments: list,
        *,
        cwd=ROOT,
        env: dict[str, str] | None = None,
        errors: bool = False,
        file: Path | None = None,
    ):
        """errors: stdout has what is printed on stderr, too; file: is written in place of `stdout`"""
        reader, writer = CONTEXT.Pipe(duplex=False)
        given = [str(each) for each in arguments]
        env = child_environment() if env is None else env
        self.process = CONTEXT.Process(target=_run, args=(given, str(cwd), env, writer, errors, file))
        self.process.start()
        writer.close()
        with reader:
            self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace")

    def __enter__(self) -> "Command":
        return self

    def __exit__(self, *_) -> None:
        self.stdout.close()
        self.process.join()

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a command", timeout or 0.0)
        return self.process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """All that it prints. It is killed if it does not end in time."""
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        try:
            printed = self.stdout.read()
            self.wait(timeout)
        finally:
            timer.cancel()
        return printed, None


def _run(
    arguments: list[str], cwd: str, env: dict[str, str], writer: Connection, errors: bool, file: Path | None
) -> None:
    """In the new process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    out = writer.fileno() if file is None else os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOCTTY)
    for number in (1, 2) if errors else (1,):
        os.dup2(out, number)
    os.close(out) if file is not None else None
    writer.close()
    sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", buffering=1, closefd=False)
    sys.path[:] = [*env["PYTHONPATH"].split(os.pathsep), *(each for each in sys.path if each)]
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            sys.path.insert(0, str(Path(arguments[0]).resolve().parent))
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which multiprocessing leaves out
        sys.stdout.flush()
