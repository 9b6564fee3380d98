"""Starting an engine's server, and ending it with all of its processes."""

import contextlib
import math
import os
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
            raise ValueError(describe_end(server))


@contextlib.contextmanager
def open_server(
    line: StartLine, host: str, port: int, *, output: IO | None = None, patience: float = math.inf
) -> Iterator[subprocess.Popen]:
    """A server from the time that it answers. It ends with the context, and all of its processes with it.

    output: file of what it prints; patience: seconds that it has to start
    Raises ValueError where the port is taken, and for a server that ends or is not ready in time.
    """
    check_address(host, port)
    paths = [line.environment.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]
    path = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    environment = ENVIRONMENT | dict(os.environ) | line.environment | path
    # A session of its own: Ctrl-C reaches this process, which then ends the server and all of its processes
    server = subprocess.Popen(line.words, stdout=output, stderr=output, env=environment, start_new_session=True)
    try:
        wait_for_answer(server, make_url(host, port), patience)
        yield server
    finally:
        end_processes(server)


def wait_for_answer(server: subprocess.Popen, url: str, patience: float) -> None:
    deadline = time.monotonic() + patience
    while not answers(url):
        if server.poll() is not None:
            break
        if time.monotonic() > deadline:
            raise ValueError(f"The server does not answer at {url} after {patience:.0f} s.")
        time.sleep(0.5)
    if server.poll() is not None:  # another one may answer
        raise ValueError(describe_end(server))


def end_processes(server: subprocess.Popen) -> None:
    """Ends a server and all of its processes. Signals that would cut this short are ignored meanwhile."""
    handlers = {number: signal.signal(number, signal.SIG_IGN) for number in STOPS}
    for number, patience in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(server.pid, number)
            server.wait(patience)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def describe_end(server: subprocess.Popen) -> str:
    return f"The server ended with status {server.returncode}; its last lines above say why."


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


def check_address(host: str, port: int) -> None:
    """Raises ValueError where no server can listen: another one would be taken for it."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        raise ValueError(f"No server can listen at port={port} of host={host}: {error.strerror or error}.") from None
