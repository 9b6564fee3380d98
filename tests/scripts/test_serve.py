"""Tests of scripts/serve.py: as a command with signals and recording, its watcher, refusals."""

from helpers import loading, proposers

import contextlib
import json
import re
import shutil
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
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.server.engine import Engine
from tests.support import ROOT, save_eagle, save_target
from tests.warm import start

ADDRESS = r"http://127\.0\.0\.1:\d+"
QUESTION = {"messages": [{"role": "user", "content": "Why is the sky blue?"}], "temperature": 0}
STOP = {2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target and two heads."""
    path = tmp_path_factory.mktemp("served")
    target = save_target(path / "target")
    for number in (1, 2):
        save_eagle(path / "heads" / f"000{number}", target, seed=number)
    return path


@pytest.fixture
def run_folder(folder, tmp_path):
    """A folder like a run's, whose `best` names the first head."""
    shutil.copytree(folder / "heads", tmp_path / "run" / "heads")
    files.write_text(tmp_path / "run" / "best", "heads/0001\n")
    return tmp_path / "run"


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
def started(checkpoint, *more: str):
    """-> the process of the command and its URL"""
    given = [f"checkpoint={checkpoint}", "proposer=head", "target.dtype=float32", "rows=2", "port=0"]
    child = start([ROOT / "scripts" / "serve.py", *given, *more])
    try:
        yield child, re.search(ADDRESS, line_of(child)).group()
    finally:
        child.kill()
        child.wait()


@pytest.mark.full
def test_the_command_follows_its_checkpoint_records_and_finishes_what_runs(folder, run_folder, tmp_path):
    body = {**QUESTION, "max_tokens": 300, "ignore_eos": True}
    ask = lambda: httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
    text_of = lambda answer: answer["choices"][0]["message"]["content"]
    more = ("watch=0.2", f"record={tmp_path / 'rows'}")
    with started(run_folder, *more) as (child, url), ThreadPoolExecutor(2) as pool:
        assert "<h1>specdec</h1>" in httpx.get(url).text
        first = pool.submit(ask)
        while httpx.get(f"{url}/health").json()["running"] != 1:
            time.sleep(0.01)
        files.write_text(run_folder / "best", "heads/0002\n")
        assert line_of(child).startswith(f"new requests are drafted by {run_folder / 'heads' / '0002'}")
        assert text_of(first.result()) == text_of(ask())
        files.write_text(run_folder / "best", "heads/0003\n")
        assert "the drafts were not replaced" in line_of(child)
        assert text_of(ask()) == text_of(first.result())
        lines: list[str] = []

        def stream() -> None:
            streamed = {**body, "max_tokens": 600, "stream": True, "stream_options": {"include_usage": True}}
            with httpx.stream("POST", f"{url}/v1/chat/completions", json=streamed, timeout=60) as answer:
                lines.extend(line for line in answer.iter_lines() if line)

        asking = threading.Thread(target=stream)
        asking.start()
        while httpx.get(f"{url}/health").json()["running"] != 1:
            time.sleep(0.01)
        child.send_signal(signal.SIGTERM)
        asking.join(timeout=60)
        assert json.loads(lines[-2].removeprefix("data: "))["usage"]["completion_tokens"] == 600
        assert lines[-1] == "data: [DONE]" and child.wait(timeout=30) in (0, -signal.SIGTERM)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    rows = [json.loads(line) for line in (tmp_path / "rows" / "traffic-000001.jsonl").read_text().splitlines()]
    assert len(rows) == 4 and rows[0]["id"] == first.result()["id"]
    assert rows[0]["target"] == str(folder / "target") and rows[0]["target_fingerprint"]
    assert [row["head"] for row in rows] == ["heads/0001", *["heads/0002"] * 3]


@contextlib.contextmanager
def watched(run_folder, loaded, make_decoder):
    """-> the `look` of a watcher, and the engine whose drafts it replaces"""
    given = proposers.ProposerOptions(checkpoint=str(run_folder), proposer="head")
    decoder = lambda proposer: Decoder(loaded.target, proposer, sampling=Sampling(), stop=STOP)
    engine = Engine(decoder(loaded.proposer), decoder(None), rows=2, queue=4, head="first")
    engine.start()
    try:
        yield serve.Watcher(given, loaded, Drafting(), engine, make_decoder(decoder)).look, engine
    finally:
        engine.stop()


def load(folder, run_folder) -> proposers.Chosen:
    options = loading.TargetOptions(name=str(folder / "target"), dtype="float32")
    given = proposers.ProposerOptions(checkpoint=str(run_folder), proposer="head")
    return proposers.load(given, options, Drafting())


def busy(*_, **__):
    raise OSError("busy")


def test_a_failure_that_passes_is_tried_again(folder, run_folder, monkeypatch, capsys):
    faults = [MemoryError("no room")]

    def failing(decoder):
        def make(proposer) -> Decoder:
            if faults:
                raise faults.pop()
            return decoder(proposer)

        return make

    with watched(run_folder, load(folder, run_folder), failing) as (look, engine):
        look()
        files.write_text(run_folder / "best", "heads/0002\n")
        with monkeypatch.context() as patch, pytest.raises(OSError, match="busy"):
            patch.setattr(proposers, "make", busy)
            look()  # while it is read
        with pytest.raises(MemoryError):
            look()  # while the engine takes it
        assert engine.lanes[True].head == "first" and "drafted by" not in capsys.readouterr().out
        look()
        assert engine.lanes[True].head == "heads/0002"
        assert capsys.readouterr().out == f"new requests are drafted by {run_folder / 'heads' / '0002'}\n"
        taken = engine.lanes[True]
        look()
        assert engine.lanes[True] is taken


def test_a_head_that_comes_into_use_while_the_one_before_is_read_is_taken(folder, run_folder, monkeypatch, capsys):
    make = proposers.make

    def late(*arguments):
        proposer = make(*arguments)
        files.write_text(run_folder / "best", "heads/0002\n")
        return proposer

    with monkeypatch.context() as patch:
        patch.setattr(proposers, "make", late)
        loaded = load(folder, run_folder)
    with watched(run_folder, loaded, lambda decoder: decoder) as (look, engine):
        look()
        assert engine.lanes[True].head == "heads/0002" and "0002" in capsys.readouterr().out


def test_what_cannot_be_served_is_refused(folder, monkeypatch, run_script):
    head = f"checkpoint={folder / 'heads' / '0001'}"

    def refuse(message: str, *arguments: str) -> None:
        with pytest.raises(ValueError, match=message):
            run_script(serve, *arguments)

    refuse("rows=0 must be a whole number of 1 or more", head, "rows=0")
    refuse("watch=0.0 must be a number above 0", head, "watch=0")
    refuse("watch= looks at checkpoint=", "watch=5")
    refuse("give temperature in the request", head, "decode.temperature=1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refuse("choose another port=", head, f"port={taken.getsockname()[1]}")
    refuse("port=70000 must be a whole number from 0 to 65535", head, "port=70000")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    refuse(r"pip install '\.\[serve\]'", head)
