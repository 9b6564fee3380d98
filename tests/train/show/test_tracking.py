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
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec import checkpoint
from tests.support import fit_interrupted
from train.show import tracking

SHORT = ("train.steps=4", "train.validate_every=2", "validation.share=null")


@pytest.fixture(autouse=True)
def _nobody_is_logged_in(monkeypatch, tmp_path):
    for name in [*os.environ]:
        if name.startswith(("WANDB_", "TRACKIO_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_MODE", "offline")


def read_expected(run: str) -> tuple[dict[int, dict[str, float]], dict]:
    """What a run should have told: figures by step, and the report of its best step."""
    folder = Path("checkpoints") / run
    steps: dict[int, dict[str, float]] = {}
    rows = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    for row in rows:
        if row.get("last"):
            continue
        kind, values = ("validation", row["validation"]) if "validation" in row else ("train", row)
        step = row.pop("step")
        steps.setdefault(step, {}).update(tracking.list_figures(kind, values))
    report = json.loads((checkpoint.resolve(folder) / "report.json").read_text())
    steps[max(steps)].update(tracking.list_figures("best", report))
    return steps, report


def compare_with_run(tracked: dict[int, dict[str, float]], run: str, *, digits: float = 1e-12) -> None:
    steps, report = read_expected(run)
    assert {"train/loss", "train/learning_rate", "train/tokens_per_second", "train/memory", "train/grad_norm"} <= set(
        steps[1]
    )
    assert {"validation/replayed_tau", "validation/replayed_tau_low", "validation/replayed_survival_1"} <= set(steps[2])
    assert {"best/speedup", "best/speedup_low", "best/tau", "best/survival_1", "best/auto_speedup"} <= set(steps[4])
    assert steps[4]["best/speedup"] == report["speedup"] and steps[4]["best/speedup_high"] == report["speedup_ci"][1]
    assert set(tracked) == set(steps)
    for step, figures in steps.items():
        assert {name: tracked[step].get(name) for name in figures} == pytest.approx(figures, rel=digits)
        assert {name for name in tracked[step] if name.startswith(("train/", "validation/", "best/"))} == set(figures)


def test_figures_are_numbers_by_name():
    report = {"tau": 1.5, "tau_ci": [1.25, 1.75], "survival": [0.5, math.nan], "auto": {"speedup": 2, "sizes": {"3": 7}}, "step": 4,
              "shape": "chain of 2", "speedup": None, "by_category": {"all": {"tau": 1}}, "differences": [{"prompt": "a"}]}  # fmt: skip
    assert tracking.list_figures("best", report) == {
        "best/tau": 1.5, "best/tau_low": 1.25, "best/tau_high": 1.75, "best/survival_1": 0.5, "best/auto_speedup": 2,
        "best/auto_sizes_3": 7, "best/step": 4,
    }  # fmt: skip


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

    steps: dict[int, dict[str, float]] = {}
    runs = {}
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records_of(path):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("history"):
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                steps.setdefault(row["_step"], {}).update(row)
            elif record.HasField("run"):
                runs.setdefault(record.run.run_id, {item.key: json.loads(item.value_json) for item in record.run.config.update})  # fmt: skip
    return steps, runs


@pytest.mark.full
def test_wandb_offline_holds_what_the_run_holds(fit):
    assert fit("wandb", "tracker=wandb", *SHORT) == 0
    folder = Path("checkpoints/wandb")
    steps, runs = read_wandb(folder)
    compare_with_run(steps, "wandb")
    ((identity, config),) = runs.items()
    assert identity == (folder / tracking.WANDB_ID).read_text().strip() and config["optimizer.lr"] == 1e-3


@pytest.mark.full
def test_a_continued_run_is_the_same_run_of_wandb(fit):
    fit_interrupted(fit, "died", "tracker=wandb", *SHORT)
    steps, runs = read_wandb(Path("checkpoints/died"))
    assert len(list(Path("checkpoints/died/wandb").glob("offline-run-*"))) == 2
    assert set(runs) == {Path("checkpoints/died", tracking.WANDB_ID).read_text().strip()}
    assert sorted(steps) == [1, 2, 3, 4]


class WandbServer(http.server.BaseHTTPRequestHandler):
    """What a server of W&B answers to `wandb sync`: it keeps the rows of each run, and says how many it has of a resumed one."""

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
            rows, is_known = self.rows.get(variables["name"], []), variables["name"] in self.rows
            counts = {"logLineCount": 0, "historyLineCount": len(rows), "eventsLineCount": 0, "eventsTail": "[]"}
            tail = {"historyTail": json.dumps([json.dumps(rows[-1])] if rows else []), "summaryMetrics": json.dumps(rows[-1] if rows else {})}  # fmt: skip
            resumed_run = {**run, **counts, **tail, "tags": [], "wandbConfig": '{"t": 1}'}
            return {"model": {**project, "bucket": resumed_run if is_known else None}}
        if name == "UpsertBucket":
            self.rows.setdefault(str(variables["name"]), [])
            return {"upsertBucket": {"bucket": run, "inserted": True}}
        if name == "CreateRunFiles":
            place = f"http://127.0.0.1:{self.server.server_address[1]}/file"
            return {"createRunFiles": {"runID": "R", "uploadHeaders": [], "files": [{"name": file_name, "uploadUrl": place} for file_name in variables["files"]]}}  # fmt: skip
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
def test_a_continued_run_is_synchronised_whole(fit, monkeypatch):
    """By the command of docs/tracking.md; the step behind the last state is done and told twice."""
    fit_interrupted(fit, "died", "tracker=wandb", *SHORT)
    monkeypatch.setattr(WandbServer, "rows", {})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), WandbServer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        given = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.server_address[1]}", "WANDB_API_KEY": "0" * 40}
        command = [sys.executable, "-c", "from wandb.cli.cli import cli; cli()", "sync", "checkpoints/died/wandb"]
        kept = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
        environment = kept | given | {"WANDB_RESUME": "allow"}
        done = subprocess.run(command, env=environment, timeout=120, capture_output=True, text=True)
        server.shutdown()
    ((identity, rows),) = WandbServer.rows.items()
    assert identity == Path("checkpoints/died", tracking.WANDB_ID).read_text().strip(), done.stderr
    figures_by_step, _ = read_wandb(Path("checkpoints/died"))
    steps = [row["step"] for row in rows]
    assert sorted(set(steps)) == sorted(figures_by_step) == [1, 2, 3, 4] and len(steps) > 4
    tracked: dict[int, dict[str, float]] = {}
    for row in rows:
        tracked.setdefault(row["step"], {}).update(row)
    compare_with_run(tracked, "died")


@pytest.mark.full
def test_tensorboard_holds_what_the_run_holds(fit):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert fit("board", "tracker=tensorboard", *SHORT) == 0
    events = EventAccumulator("checkpoints/board/tensorboard", size_guidance={"tensors": 0, "scalars": 0})
    events.Reload()
    steps: dict[int, dict[str, float]] = {}
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            steps.setdefault(event.step, {})[name] = event.value
    compare_with_run(steps, "board", digits=1e-6)  # float32


@pytest.mark.full
def test_trackio_holds_what_the_run_holds(fit, tmp_path, monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, name)  # it reads its folder when it is imported
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    assert fit("io", "tracker=trackio", *SHORT) == 0
    steps: dict[int, dict[str, float]] = {}
    for row in storage.get_logs("specdec", "io"):
        steps.setdefault(row["step"], {}).update(row)
    compare_with_run(steps, "io")


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
