"""Tests of trackers: each one, read back from its own files, holds what log.jsonl and report.json hold."""

import gzip
import http.server
import json
import math
import os
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec import checkpoint
from tests.support.runs import fit_interrupted, log_of
from train.show import tracking

SHORT = ("train.steps=4", "train.validate_every=2", "validation.share=null")


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch, tmp_path):
    for name in [*os.environ]:
        if name.startswith(("WANDB_", "TRACKIO_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")


def compare_with_run(tracked: dict[int, dict[str, float]], run: str, *, digits: float = 1e-12) -> None:
    """A tracker's figures by step are those of the run's log and of the report of its best step."""
    folder = Path("checkpoints") / run
    report = json.loads((checkpoint.resolve(folder) / "report.json").read_text())
    steps: dict[int, dict[str, float]] = defaultdict(dict)
    for row in log_of(run):
        if not row.get("last"):
            step, kind = row.pop("step"), "validation" if "validation" in row else "train"
            steps[step] |= tracking.list_figures(kind, row.get("validation", row))
    steps[max(steps)] |= tracking.list_figures("best", report)
    for step, names in {
        1: "train/loss train/learning_rate train/tokens_per_second train/memory train/grad_norm",
        2: "validation/replayed_tau validation/replayed_tau_low validation/replayed_survival_1",
        4: "best/speedup best/speedup_low best/tau best/survival_1 best/auto_speedup",
    }.items():
        assert set(names.split()) <= set(steps[step])
    assert steps[4]["best/speedup"] == report["speedup"] and steps[4]["best/speedup_high"] == report["speedup_ci"][1]
    assert set(tracked) == set(steps)
    for step, figures in steps.items():
        assert {name: tracked[step].get(name) for name in figures} == pytest.approx(figures, rel=digits)
        assert {name for name in tracked[step] if name.startswith(("train/", "validation/", "best/"))} == set(figures)


def test_figures_are_numbers_by_name():
    figures = {"tau": 1.5, "tau_ci": [1.25, 1.75], "survival": [0.5, math.nan], "step": 4}
    figures |= {"auto": {"speedup": 2, "sizes": {"3": 7}}, "shape": "chain of 2", "speedup": None}
    tables = {"by_category": {"all": {"tau": 1}}, "differences": [{"prompt": "a"}]}
    expected = {"tau": 1.5, "tau_low": 1.25, "tau_high": 1.75, "survival_1": 0.5, "step": 4}
    expected |= {"auto_speedup": 2, "auto_sizes_3": 7}
    listed = tracking.list_figures("best", figures | tables)
    assert listed == {f"best/{name}": value for name, value in expected.items()}


def records_of(path: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format behind a header of 7 bytes, in blocks of 32 KiB."""
    content, offset, record = path.read_bytes(), 7, b""
    while offset + 7 <= len(content):
        if 32768 - offset % 32768 < 7:  # the end of a block holds no header
            offset += 32768 - offset % 32768
            continue
        _, size, kind = struct.unpack("<IHB", content[offset : offset + 7])
        record += content[offset + 7 : offset + 7 + size]
        offset += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def read_wandb(folder: Path) -> tuple[dict[int, dict[str, float]], dict]:
    """-> figures by step, settings by run: of all offline runs in the folder"""
    from wandb.proto import wandb_internal_pb2

    steps, runs = defaultdict(dict), {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for content in records_of(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(content)
            if record.HasField("history"):
                items = record.history.item
                row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
                steps[row["_step"]] |= row
            elif record.HasField("run"):
                settings = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                runs.setdefault(record.run.run_id, settings)
    return steps, runs


def read_tensorboard(folder: Path) -> dict[int, dict[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    steps = defaultdict(dict)
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            steps[event.step][name] = event.value
    return steps


@pytest.mark.full
def test_tensorboard_holds_what_the_run_holds(fit):
    assert fit("board", "tracker=tensorboard", *SHORT) == 0
    compare_with_run(read_tensorboard(Path("checkpoints/board")), "board", digits=1e-6)  # float32


@pytest.mark.full
def test_trackio_holds_what_the_run_holds(fit, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its folder when it is imported
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    assert fit("io", "tracker=trackio", *SHORT) == 0
    compare_with_run(join_rows(storage.get_logs("specdec", "io")), "io")


def join_rows(rows: list[dict]) -> dict[int, dict[str, float]]:
    steps = defaultdict(dict)
    for row in rows:
        steps[row["step"]] |= row
    return steps


class WandbServer(http.server.BaseHTTPRequestHandler):
    """A server of W&B for `wandb sync`: it keeps the rows of each run, and counts those of a resumed one."""

    protocol_version = "HTTP/1.1"
    rows: dict[str, list[dict]] = {}

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            content = gzip.decompress(content)
        answer = {}
        if self.path.endswith("/graphql"):
            request = json.loads(content)
            answer = {"data": self.answer(str(request.get("operationName")), request.get("variables") or {})}
        elif self.path.endswith("/file_stream"):
            history = json.loads(content).get("files", {}).get("wandb-history.jsonl")
            if history:
                rows = self.rows[self.path.split("/")[-2]]
                rows[history["offset"] :] = [json.loads(line) for line in history["content"]]
        self.reply(answer)

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.reply({})

    def answer(self, name: str, variables: dict) -> dict:
        project = {"id": "P", "name": "specdec", "entity": {"id": "E", "name": "me"}}
        run = {"id": "R", "name": variables.get("name"), "displayName": "run", "config": "{}", "project": project}
        if name == "RunResumeStatus":
            rows = self.rows.get(variables["name"])
            newest = (rows or [{}])[-1]
            history = {
                "historyLineCount": len(rows or ()),
                "historyTail": json.dumps([json.dumps(newest)][: len(rows or ())]),
            }
            events = {"logLineCount": 0, "eventsLineCount": 0, "eventsTail": "[]", "summaryMetrics": json.dumps(newest)}
            resumed_run = {**run, **history, **events, "tags": [], "wandbConfig": '{"t": 1}'}
            return {"model": {**project, "bucket": None if rows is None else resumed_run}}
        if name == "UpsertBucket":
            self.rows.setdefault(str(variables["name"]), [])
            return {"upsertBucket": {"bucket": run, "inserted": True}}
        if name == "CreateRunFiles":
            url = f"http://127.0.0.1:{self.server.server_address[1]}/file"
            files = [{"name": file_name, "uploadUrl": url} for file_name in variables["files"]]
            return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": files}}
        return {}

    def reply(self, answer: dict) -> None:
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_) -> None:
        pass


@pytest.mark.full
def test_a_continued_run_is_one_run_of_wandb_and_is_synchronised_whole(fit, monkeypatch):
    """By the command of docs/tracking.md; the step behind the last state is done and sent twice."""
    fit_interrupted(fit, "died", "tracker=wandb", *SHORT)
    folder = Path("checkpoints/died")
    number = (folder / tracking.WANDB_ID).read_text().strip()
    offline_steps, runs = read_wandb(folder)
    compare_with_run(offline_steps, "died")
    assert len(list(folder.glob("wandb/offline-run-*"))) == 2
    assert set(runs) == {number} and runs[number]["optimizer.lr"] == 1e-3

    monkeypatch.setattr(WandbServer, "rows", {})
    monkeypatch.delenv("WANDB_MODE")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WandbServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_address[1]}"
        settings = {"WANDB_BASE_URL": address, "WANDB_API_KEY": "0" * 40, "WANDB_RESUME": "allow"}
        command = [sys.executable, "-c", "from wandb.cli.cli import cli; cli()", "sync", str(folder / "wandb")]
        process = subprocess.run(command, env=os.environ | settings, timeout=120, capture_output=True, text=True)
        server.shutdown()
    ((identity, rows),) = WandbServer.rows.items()
    steps = [row["step"] for row in rows]
    assert identity == number, process.stderr
    assert sorted(set(steps)) == [1, 2, 3, 4] and len(steps) > 4
    compare_with_run(join_rows(rows), "died")


class Broken:
    """A tracker that fails at its third call, and is not called again."""

    def __init__(self, *_):
        self.calls, self.tracker = 0, self

    def log(self, values, **_):
        self.calls += 1
        assert self.calls < 4, "called after it had failed"
        if self.calls == 3:
            raise OSError("no route to https://user:hunter22@host, key 0123456789abcdef")

    def finish(self, **_):
        raise AssertionError("called after it had failed")


@pytest.mark.full
def test_a_tracker_that_fails_ends_with_one_warning_and_the_run_goes_on(fit, monkeypatch, recwarn):
    monkeypatch.setattr(tracking, "open_tracker", Broken)
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    assert fit("goes-on", "tracker=tensorboard", *SHORT) == 0
    (warning,) = [str(each.message) for each in recwarn if "tracker=" in str(each.message)]
    assert warning.startswith("tracker=tensorboard has failed (OSError: no route to https://***@host, key ***).")
    assert Path("checkpoints/goes-on/finished").exists()


def test_a_tracker_that_cannot_start_is_named_once(monkeypatch, tmp_path, recwarn):
    def refuse(*_):
        raise RuntimeError("no network")

    monkeypatch.setattr(tracking, "open_tracker", refuse)
    run_tracking = tracking.Tracking("wandb", tmp_path)
    with run_tracking.running("run", {}):
        run_tracking.record(1, {"loss": 1.0})
    assert ["no network" in str(each.message) for each in recwarn] == [True]


def test_an_error_of_the_run_closes_the_tracker_and_settings_have_no_secrets(monkeypatch, tmp_path):
    opened_settings, closed = [], []

    class Opened:
        def __init__(self, name, folder, run, settings):
            opened_settings.append(settings)

        def finish(self):
            closed.append(True)

    monkeypatch.setattr(tracking, "open_tracker", Opened)
    monkeypatch.setenv("SERVICE_TOKEN", "abcdefgh")
    settings = {"lr": 0.1, "url": "http://me:pass@host/", "key": "abcdefgh"}
    with pytest.raises(KeyError), tracking.Tracking("wandb", tmp_path).running("run", settings):
        raise KeyError("power cut")
    assert opened_settings == [{"lr": 0.1, "url": "http://***@host/", "key": "***"}] and closed == [True]


def test_a_tracker_that_is_not_there_is_refused_in_one_sentence(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError) as caught:
        tracking.check_installed("trackio")
    assert str(caught.value) == "tracker=trackio needs a package that is not installed: pip install trackio"
