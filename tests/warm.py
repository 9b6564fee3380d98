"""Commands of Python in processes that have torch and transformers already, which take seconds to import.

On Linux they are forked by a process that has done nothing but import these (multiprocessing's forkserver), and get a working
directory, environment, arguments and output of their own. They differ from `python FILE` in this: an exception that nobody catches ends
them with 1; all of a test process hash strings alike; variables that a library reads when it is imported do not reach it. What
depends on one of these, and processes that must decide alike, are started with subprocess.
"""

import atexit
import contextlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "transformers.modeling_utils", "accelerate", "datasets", "hydra"])


def start(
    arguments: list, *, cwd: Path = ROOT, errors: bool = False, file: Path | None = None, **more: str
) -> "Command | subprocess.Popen":
    """`python ARGUMENTS`, the first of which is a file.

    errors: stdout has what is printed on stderr, too; file: is written in place of `stdout`; more: variables of the environment
    """
    from tests.support import child_environment  # not above: the new process imports this file

    given, env = [str(each) for each in arguments], child_environment(**more)
    if sys.platform == "linux":
        return Command(given, cwd=cwd, env=env, errors=errors, file=file)
    with contextlib.nullcontext(subprocess.PIPE) if file is None else file.open("w") as out:
        merged = subprocess.STDOUT if errors else None
        return subprocess.Popen([sys.executable, *given], cwd=cwd, env=env, stdout=out, stderr=merged, text=True)


class Command:
    """A forked command, used as a subprocess.Popen with text in its stdout."""

    def __init__(self, arguments: list[str], *, cwd: Path, env: dict[str, str], errors: bool, file: Path | None):
        reader, writer = CONTEXT.Pipe(duplex=False)
        self.process = CONTEXT.Process(target=_run, args=(arguments, str(cwd), env, writer, errors, file))
        self.process.start()
        writer.close()
        with reader:
            self.stdout = os.fdopen(os.dup(reader.fileno()), encoding="utf-8", errors="replace")

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired("a command", timeout or 0.0)
        return self.process.exitcode

    def communicate(self, timeout: float) -> tuple[str, None]:
        """All that it prints. Raises TimeoutExpired if it does not end in time; it is killed then."""
        late = threading.Event()

        def end() -> None:
            late.set()
            self.kill()

        timer = threading.Timer(timeout, end)
        timer.start()
        try:
            printed = self.stdout.read()
            self.wait()
        finally:
            timer.cancel()
        if late.is_set():
            raise subprocess.TimeoutExpired("a command", timeout, output=printed)
        return printed, None


@atexit.register  # before multiprocessing's own, which would wait for them
def _kill_what_still_runs() -> None:
    for process in multiprocessing.active_children():
        process.kill()


def _run(
    arguments: list[str], cwd: str, env: dict[str, str], writer: Connection, errors: bool, file: Path | None
) -> None:
    """In the new process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    out = (
        os.dup(writer.fileno()) if file is None else os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOCTTY)
    )
    writer.close()
    os.dup2(out, 1)
    if errors:
        os.dup2(out, 2)
    os.close(out)
    utf8 = {"encoding": "utf-8", "errors": "backslashreplace", "closefd": False}
    sys.stdout, sys.stderr = os.fdopen(1, "w", **utf8), os.fdopen(2, "w", buffering=1, **utf8)
    own = [str(Path(arguments[0]).resolve().parent), *filter(None, env.get("PYTHONPATH", "").split(os.pathsep))]
    sys.path[:] = [*own, *(each for each in sys.path if each and ROOT not in (Path(each), *Path(each).parents[:1]))]
    sys.argv = arguments
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    finally:
        threading._shutdown()  # as Python does, and multiprocessing not before it has ended
        atexit._run_exitfuncs()
        sys.stdout.flush()
