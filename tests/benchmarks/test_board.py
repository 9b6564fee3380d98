"""board.py: which cells it runs, what it writes for those that an engine cannot serve, and its server's processes."""

import contextlib
import json
import sys

import pytest

from benchmarks import board
from benchmarks.board import BoardOptions, BoardServer, Cell, list_cells
from specdec.engines.start_lines import StartLine
from specdec.measuring.record import Absence, Record, read_record
from specdec.measuring.servers.cpu_share import CpuMeter
from tests.support.together import free_ports

RECORD = {
    "schema": "specdec/record/1",
    "when": "2026-11-28T10:00:00+00:00",
    "target": {"name": "target"},
    "drafter": {"name": "ngram", "method": "ngram"},
    "engine": {"name": "vllm"},
    "machine": {"device": "cpu"},
    "protocol": {"suite": "heldout", "endpoint": "v1/completions", "temperature": 0, "max_tokens": 8, "drafts": 3},
    "counting": {"source": "per_request"},
    "loads": [{"at_once": 1, "prompts": 4, "tau": [1.5, 1.2, 1.8]}],
}
SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def run_board(tmp_path, monkeypatch):
    """run_board(key=value ..) -> (cells that were judged, with the ports of their servers); no server starts"""
    monkeypatch.setattr(board.launch, "exit_at_signals", lambda: None)

    def run(*arguments: str, broken: str = "") -> list[tuple[str, int]]:
        calls: list[tuple[str, int]] = []

        @contextlib.contextmanager
        def open_server(line, port, log):
            yield BoardServer(f"http://127.0.0.1:{port}", line, None)

        def judge_cell(cell, options, servers):
            calls.append((cell.name, len(servers)))
            if cell.name == broken:
                raise ValueError("the server went away")
            return Record.model_validate_json(json.dumps(RECORD))

        monkeypatch.setattr(board, "open_server", open_server)
        monkeypatch.setattr(board, "judge_cell", judge_cell)
        monkeypatch.setattr(board, "measure_idle", lambda servers: 0.5)
        monkeypatch.setattr(board, "make_line", make_line)
        paths = [f"out={tmp_path}/board", f"scratch={tmp_path}/scratch"]
        board.main([*paths, "limit=4", "max_new_tokens=8", *arguments])
        return calls

    return run


def make_line(cell: Cell, options: BoardOptions, port: int, *, plain: bool) -> StartLine:
    if cell.drafter == "suffix" and cell.engine == "llamacpp":
        raise ValueError("llama.cpp has no suffix tree.")
    if cell.engine == "openvino":
        raise ValueError("There is no OpenVINO GenAI: `make engines` sets it up.")
    return StartLine(["true"])


def test_cells_are_judged_once(run_board, tmp_path, capsys):
    cells = "cells=vllm/ngram/*,llamacpp/suffix/*,transformers/ngram/*,llamacpp/plain/*"
    assert run_board(cells) == [
        ("vllm/ngram/heldout", 2),
        ("llamacpp/plain/heldout", 1),
        ("transformers/ngram/heldout", 1),
    ]
    absence = read_record(tmp_path / "board" / "llamacpp-suffix-heldout.json")
    assert isinstance(absence, Absence) and "no suffix tree" in absence.reason
    assert (absence.drafter, absence.engine, absence.suite) == ("suffix", "llamacpp", "prompts_heldout")  # of records
    assert board.name_as_judge(Cell("vllm", "mtp", "gsm8k"))["drafter"] == "shipped/mtp"
    record = read_record(tmp_path / "board" / "vllm-ngram-heldout.json")
    assert "idle ones took 50% of a core" in record.notes[-1]
    assert read_record(tmp_path / "board" / "transformers-ngram-heldout.json").notes == []
    assert "1 of 4, vllm/ngram/heldout, 0 s: tau (1.5, 1.2, 1.8)" in capsys.readouterr().out
    assert run_board(cells) == []


def test_a_cell_that_fails_leaves_the_others(run_board, tmp_path):
    cells = "cells=transformers/ngram/*,transformers/plain/*"
    with pytest.raises(ValueError, match=r"1 cells have no record.*transformers/plain/heldout: the server went away"):
        run_board(cells, broken="transformers/plain/heldout")
    assert [file.name for file in (tmp_path / "board").iterdir()] == ["transformers-ngram-heldout.json"]
    assert run_board(cells) == [("transformers/plain/heldout", 1)]
    with pytest.raises(ValueError, match="make engines"):
        run_board("cells=openvino/plain/*")
    assert not (tmp_path / "board" / "openvino-plain-heldout.json").exists()


def test_a_record_of_other_options_is_made_again(run_board, tmp_path, capsys):
    (cell,) = list_cells("vllm/eagle3/*", ["heldout"])
    arguments = {"out": f"{tmp_path}/board", "scratch": "scratch", "limit": 4, "max_new_tokens": 8}
    assert run_board(f"cells={cell.name}") and not run_board(f"cells={cell.name}")
    assert board.find_rows(cell, BoardOptions(**arguments)).name == "vllm-eagle3-heldout"
    num = board.count_questions("heldout", BoardOptions())
    for change, text in (("limit=5", "questions=4, now 5"), ("limit=null", f"questions=4, now {num}"),
                         ("max_new_tokens=9", "max_new_tokens=8, now 9"), ("drafts=5", "drafts=3, now 5")):  # fmt: skip
        assert run_board(f"cells={cell.name}", change) == [(cell.name, 2)]
        assert f"its record has {text}, so it runs again" in capsys.readouterr().out
        name, value = change.split("=")
        changed = BoardOptions(**arguments | {name: None if value == "null" else int(value)})
        assert board.find_rows(cell, changed).name != "vllm-eagle3-heldout"  # those rows stay


def test_a_damaged_record_leaves_the_other_cells(run_board, tmp_path):
    (tmp_path / "board").mkdir()
    (tmp_path / "board" / "vllm-ngram-heldout.json").write_text("{")
    with pytest.raises(ValueError, match=r"1 cells have no record.*vllm-ngram-heldout.json is no record"):
        run_board("cells=vllm/ngram/*,transformers/ngram/*")
    assert (tmp_path / "board" / "transformers-ngram-heldout.json").exists()


def test_which_cells_there_are():
    suites = BoardOptions(spec_bench="a", gsm8k="b").suites
    assert len(list_cells("*", suites)) == 5 * 5 * 2 and len(list_cells("*", BoardOptions().suites)) == 25
    with pytest.raises(ValueError, match=r"cells=sglang/\* fits none of specdec/plain/heldout \.\. openvino"):
        list_cells("sglang/*", ["heldout"])


def test_own_server_and_what_it_cannot(tmp_path):
    options = BoardOptions(drafts=4)
    words = board.make_line(Cell("specdec", "mtp", "heldout"), options, 8010, plain=False).words
    assert {"proposer=head", "decode.depth=4", "checkpoint=checkpoints/shipped/mtp"} <= set(words)
    assert "proposer=suffix" in board.make_line(Cell("specdec", "suffix", "heldout"), options, 1, plain=False).words
    with pytest.raises(ValueError, match="always has a drafter"):
        board.make_line(Cell("specdec", "plain", "heldout"), options, 1, plain=False)


def test_servers_are_watched_and_end(tmp_path, monkeypatch):
    port, log = free_ports(1)[0], tmp_path / "log"
    line = StartLine([sys.executable, "-c", SERVER, str(port)])
    monkeypatch.setattr(board, "IDLE_SECONDS", 0.2)
    with board.open_server(line, int(port), log) as server:
        assert CpuMeter(frozenset({server.process.pid})).read().watched > 0 and board.measure_idle([server]) < 0.5
        monkeypatch.setattr(board, "make_line", lambda *_, **__: line)
        with pytest.raises(ValueError, match=f"Port {port} is in use: give another port="):  # no absence of the engine
            board.run_cell(Cell("vllm", "plain", "heldout"), BoardOptions(port=int(port), scratch=str(tmp_path)))
    assert server.process.poll() is not None
    failing = StartLine([sys.executable, "-c", "import sys; print('(a) ImportError: no tree'); sys.exit(1)"])
    with (
        pytest.raises(ValueError, match=r"^It did not start: ImportError: no tree$"),
        board.open_server(failing, int(port), log),
    ):
        pass
