"""Starting an engine's server, and ending it with all of its processes."""

import contextlib
import math
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx

from specdec.engines.start_lines import StartLine

# On a CPU only
ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
EVERYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # addresses of all interfaces, with those of this machine
READY = (200, 401)  # 401: it asks for a key
CHANGING_WORDS = re.compile(r"^\(.*?\)\s*|^error: ")  # at the beginning of a line of a log
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def open_folder(folder: str | None) -> Iterator[str]:
    """Gives the folder of hidden states. None: a new one, which is deleted at the end"""
    if folder is not None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        yield str(Path(folder).resolve())
        return
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="specdec-states-", dir=memory, ignore_cleanup_errors=True) as temporary:
        yield temporary


def exit_at_signals() -> None:
    """Lets SIGTERM and SIGHUP raise SystemExit, so that whatever this process started ends, too."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def run_server(line: StartLine, host: str, port: int, sentence: str) -> None:
    """Runs a server until it ends or is stopped. Raises ValueError where it fails, or the port is taken.

    sentence: printed once the server answers
    """
    with open_server(line, host, port) as server:
        print(sentence, flush=True)
        if server.wait():
            raise ValueError(describe_end(server, None))


@contextlib.contextmanager
def open_server(
    line: StartLine, host: str, port: int, *, log: Path | None = None, patience: float = math.inf
) -> Iterator[subprocess.Popen]:
    """A server from the time that it answers. It ends with the context, and all of its processes with it.

    log: file of what it prints; patience: seconds that it has to start
    Raises ValueError where the port is taken, and for a server that ends or is not ready in time.
    """
    open_port(host, port).close()  # another server would be taken for it
    paths = [line.environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment = ENVIRONMENT | dict(os.environ) | line.environment | path
    with contextlib.nullcontext() if log is None else open_log(log) as output:
        # A session of its own: Ctrl-C reaches this process, which then ends the server and all of its processes
        server = subprocess.Popen(line.words, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        wait_for_answer(server, make_url(host, port), patience, log)
        yield server
    finally:
        end_processes(server)


def open_log(path: Path) -> IO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("w")


def wait_for_answer(server: subprocess.Popen, url: str, patience: float, log: Path | None) -> None:
    deadline = time.monotonic() + patience
    while not answers(url):
        if server.poll() is not None:
            break
        if time.monotonic() > deadline:
            raise ValueError(f"The server does not answer at {url} after {patience:.0f} s.")
        time.sleep(0.5)
    if server.poll() is not None:  # another one may answer
        raise ValueError(describe_end(server, log))


def end_processes(server: subprocess.Popen) -> None:
    """Ends a server and all of its processes. Signals that would cut this short are ignored meanwhile."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}
    for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(server.pid, number)
            server.wait(patience)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def describe_end(server: subprocess.Popen, log: Path | None) -> str:
    """The sentence on a server that has ended, with the last line of its log that names an error, or its last line."""
    if log is None:
        return f"The server ended with status {server.returncode}; its last lines above say why."
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"(Error|error): ", line)]
    text = (errors or lines or ["its log is empty"])[-1]
    return f"It did not start: {CHANGING_WORDS.sub('', text)[:400]}"


def answers(url: str) -> bool:
    """Whether a server is ready: llama.cpp's has its models before it has loaded them."""
    try:
        ready = [httpx.get(f"{url}/{path}", trust_env=False).status_code in READY for path in ("health", "v1/models")]
    except httpx.HTTPError:
        return False
    return all(ready)


def make_url(host: str, port: int) -> str:
    """The URL at which this machine reaches a server. host: address that it listens on"""
    name = EVERYWHERE.get(host, host)
    return f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"


def open_port(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises ValueError for an address that cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, OverflowError) as error:
        raise ValueError(f"Nothing can listen at {host}:{port} ({error}): choose another port= or host=.") from error
