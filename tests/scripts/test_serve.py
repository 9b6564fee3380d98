"""Tests of scripts/serve.py as a command: start, signals, refusals, recording."""

import contextlib
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
from specdec.core import files
from specdec.server import traffic
from specdec.target.model import Target
from tests.support import ROOT, save_eagle, save_target
from tests.warm import start

ADDRESS = r"http://127\.0\.0\.1:\d+"
QUESTION = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("served")
    save_eagle(path / "head", save_target(path / "target"))
    return path


@contextlib.contextmanager
def started(folder, *more: str):
    """-> the process and its URL"""
    head = [f"checkpoint={folder / 'head'}", "proposer=head", "target.dtype=float32", "rows=2"]
    with command("serve", *head, *more) as (child, line):
        yield child, re.search(ADDRESS, line).group()


def line_of(child) -> str:
    """What the process prints next. Raises TimeoutError after two minutes without a line: a test is not to wait for ever."""
    with ThreadPoolExecutor(1) as pool:
        line = pool.submit(child.stdout.readline)
        try:
            return line.result(timeout=120)
        except TimeoutError:
            child.kill()  # the line that is waited for is then the end of the output
            raise


@contextlib.contextmanager
def command(script: str, *arguments: str):
    """-> the process of a script that serves, and the line that it begins with"""
    child = start([ROOT / "scripts" / f"{script}.py", "port=0", *arguments])
    try:
        yield child, line_of(child)
    finally:
        child.kill()
        child.wait()


@pytest.mark.full
def test_sigterm_finishes_what_runs_and_takes_nothing_new(folder):
    with started(folder) as (child, url):
        assert "<h1>specdec</h1>" in httpx.get(url).text
        lines: list[str] = []

        def ask() -> None:
            body = {
                **QUESTION,
                "max_tokens": 600,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
                lines.extend(line for line in answer.iter_lines() if line)

        asking = threading.Thread(target=ask)
        asking.start()
        while (
            "vllm:num_requests_running" not in (text := httpx.get(f"{url}/metrics").text) or 'target"} 1.0' not in text
        ):
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        asking.join(timeout=60)
        assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 600
        assert lines[-1] == "data: [DONE]"
        assert child.wait(timeout=30) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


@pytest.mark.full
def test_the_server_records_conversations(folder, tmp_path):
    with started(folder, f"record={tmp_path / 'server'}", "record_tags=a,b") as (server, url):
        body = {**QUESTION, "max_tokens": 16}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=30)
    (row,) = traffic.read(tmp_path / "server")
    assert row["id"] == answer["id"] and row["tags"] == ["a", "b"] and row["target"] == str(folder / "target")
    assert row["head"] == f"{folder.name}/head" and row["target_fingerprint"] and row["prompt_tokens"]


def test_recording_that_cannot_be_is_refused(folder, run_script):
    def refuse(script, message: str, *arguments: str) -> None:
        with pytest.raises(ValueError, match=message):
            run_script(script, *arguments)

    head = f"checkpoint={folder / 'head'}"
    refuse(serve, "record_rate=2.0 must be a number from 0 to 1", head, "record=x", "record_rate=2")
    refuse(serve, "record_redact=json:x cannot be found", head, "record=x", "record_redact=json:x")
    refuse(serve, "record_max_bytes=1 must be room", head, "record=x", "record_max_bytes=1")


@pytest.mark.full
def test_a_head_that_comes_into_use_is_taken_while_requests_run(folder, tmp_path):
    for number in (1, 2):
        save_eagle(
            tmp_path / "heads" / f"000{number}", Target.load(str(folder / "target"), dtype="float32"), seed=number
        )
    files.write_text(tmp_path / "best", "heads/0001\n")
    body = {**QUESTION, "max_tokens": 300, "ignore_eos": True}
    ask = lambda: httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()["choices"][0]["message"]
    with started(folder, f"checkpoint={tmp_path}", "watch=0.2") as (child, url), ThreadPoolExecutor(2) as pool:
        first = pool.submit(ask)
        files.write_text(tmp_path / "best", "heads/0002\n")
        assert line_of(child).startswith(f"new requests are drafted by {tmp_path / 'heads' / '0002'}")
        assert first.result() == ask()
        files.write_text(tmp_path / "best", "heads/0003\n")
        assert "the drafts were not replaced" in line_of(child)
        assert ask() == first.result()


def test_what_cannot_be_served_is_refused(folder, monkeypatch, run_script):
    def refuse(message: str, *arguments: str) -> None:
        with pytest.raises(ValueError, match=message):
            run_script(serve, f"checkpoint={folder / 'head'}", *arguments)

    refuse("rows=0 must be a whole number of 1 or more", "rows=0")
    refuse("watch=0.0 must be a number above 0", "watch=0")
    with pytest.raises(ValueError, match="watch= looks at checkpoint="):
        run_script(serve, "watch=5")
    refuse("give temperature in the request", "decode.temperature=1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refuse("choose another port=", f"port={taken.getsockname()[1]}")
    refuse("port=70000 must be a whole number from 0 to 65535", "port=70000")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refuse(r"pip install '\.\[serve\]'")
