"""Tests of scripts/serve.py: as a command with signals and recording, and its refusals."""

import json
import queue
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import httpx
import pytest

from scripts import serve
from specdec import loading
from specdec.core.generation import Ends
from specdec.core.sampling import Sampling
from specdec.tools.server import serve as serving
from specdec.tools.server.lane import End, Job, Lane
from tests.support.commands import ROOT, start
from tests.support.drafters import save_eagle
from tests.support.targets import save_target

pytest.importorskip("uvicorn", reason="needs uvicorn")
ADDRESS = r"http://127\.0\.0\.1:\d+"
QUESTION = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}


@pytest.fixture(scope="module")
def head(tmp_path_factory):
    """A head of a target."""
    path = tmp_path_factory.mktemp("served")
    save_eagle(path / "run" / "head", save_target(path / "target"))
    return path / "run" / "head"


def read_line(child) -> str:
    """The next line of a process. Raises TimeoutError after two minutes without one: a test is not to wait for ever."""
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(child.stdout.readline)
        try:
            return line.result(timeout=120)
        except TimeoutError:
            child.kill()  # the line that is waited for is then the end of the output
            raise


def stream_answer(url: str, lines: list[str]) -> None:
    body = {**QUESTION, "max_tokens": 600, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
        lines.extend(line for line in answer.iter_lines() if line)


@pytest.mark.full
def test_the_command_records_and_finishes_what_runs(head, tmp_path):
    options = [f"checkpoint={head}", "proposer=head", "target.dtype=float32", "port=0", f"record={tmp_path / 'rows'}"]
    child = start([ROOT / "scripts" / "serve.py", *options])
    lines: list[str] = []
    try:
        url = re.search(ADDRESS, read_line(child)).group()
        assert "<h1>specdec</h1>" in httpx.get(url).text
        client = threading.Thread(target=stream_answer, args=(url, lines))
        client.start()
        while httpx.get(f"{url}/health").json()["running"] != 1:
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        client.join(timeout=60)
        assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 600
        assert lines[-1] == "data: [DONE]" and child.wait(timeout=30) in (0, -signal.SIGTERM)
    finally:
        child.kill()
        child.wait()
    (row,) = [json.loads(line) for line in (tmp_path / "rows" / "traffic-000001.jsonl").read_text().splitlines()]
    assert row["id"] == json.loads(lines[0].removeprefix("data: "))["id"] and row["head"] == "run/head"
    assert row["target"] == str(head.parents[1] / "target") and row["target_fingerprint"]


def test_one_thread_loads_warms_up_and_decodes(head, monkeypatch):
    """It is not the main one, whose OpenMP threads would compete with its own."""
    contexts, threads = [], []

    def follow(function):
        def record(*arguments, **options):
            threads.append(threading.get_ident())
            return function(*arguments, **options)

        return record

    def answer(server, sockets):
        make_app.call_args.args[0].engine.start()  # as the application does
        contexts.append(make_app.call_args.args[0])
        assert ask(contexts[0])
        contexts[0].engine.stop()

    def ask(served) -> list[int]:
        events: queue.Queue = queue.Queue()
        job = Job([1, 2, 3], 4, Sampling(), Ends(frozenset()), events.put)
        assert served.engine.alive and served.engine.submit(job)
        while not isinstance(events.get(timeout=60), End):
            pass
        return job.request.tokens

    make_app = mock.Mock(return_value=None)
    for module, name in ((loading, "load_proposer"), (serving, "warm_up"), (Lane, "run_round")):
        monkeypatch.setattr(module, name, follow(getattr(module, name)))
    monkeypatch.setattr("specdec.tools.server.app.make_app", make_app)
    monkeypatch.setattr("uvicorn.Server.run", answer)
    serve.main([f"checkpoint={head}", "proposer=head", "target.dtype=float32", "port=0", "decode.depth=1"])
    (thread,) = set(threads)
    assert len(threads) > 2 and thread != threading.get_ident() and not contexts[0].engine.alive


@pytest.mark.parametrize("error", [ValueError("no such head"), KeyboardInterrupt(), MemoryError()])
def test_what_ends_the_loading_ends_the_command(head, monkeypatch, error):
    monkeypatch.setattr(loading, "load_proposer", mock.Mock(side_effect=error))
    with pytest.raises(type(error)) as raised:
        serve.main([f"checkpoint={head}", "port=0"])
    assert raised.value is error


@pytest.mark.full
def test_ctrl_c_ends_the_loading_and_the_server(head):
    """Before the server listens, and with it."""
    options = [f"checkpoint={head}", "proposer=head", "target.dtype=float32", "port=0", "decode.depth=1"]
    slow = (
        "import time; from scripts import serve; from specdec import loading; from specdec.options import run_command"
    )
    slow += "; loading.load_proposer = lambda *_: (print('loading', flush=True), time.sleep(60))"
    slow += "; run_command.run_command(serve.main, serve.ServeOptions)"
    for command in (["-c", slow, *options], [ROOT / "scripts" / "serve.py", *options]):
        child = start(command)
        try:
            read_line(child)
            child.send_signal(signal.SIGINT)
            assert child.wait(timeout=30) in (0, 130)
        finally:
            child.kill()
            child.wait()


def test_what_cannot_be_served_is_refused(head, monkeypatch, refuse):
    checkpoint = f"checkpoint={head}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refuse("choose another port=", serve, checkpoint, f"port={taken.getsockname()[1]}")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refuse("pip install specdec-drafters", serve, checkpoint)
