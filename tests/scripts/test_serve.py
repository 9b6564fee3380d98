"""Tests of scripts/serve.py: as a command with signals and recording, and its refusals."""

import json
import re
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from scripts import serve
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


def test_what_cannot_be_served_is_refused(head, monkeypatch, refuse):
    checkpoint = f"checkpoint={head}"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refuse("choose another port=", serve, checkpoint, f"port={taken.getsockname()[1]}")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refuse("pip install specdec-drafters", serve, checkpoint)
