"""board.py: which cells it runs, what it writes for those that an engine cannot serve, and its server's processes."""

import contextlib
import json
import re
import socket

import pytest

from benchmarks import board
from benchmarks.board import BoardOptions, Cell, list_cells
from specdec.engines.start_lines import StartLine
from specdec.measuring.record import Absence, Record, read_record

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


@pytest.fixture
def run_board(tmp_path, monkeypatch):
    """run_board(key=value ..) -> (cells that were judged, with the ports of their servers); no server starts"""
    monkeypatch.setattr(board.launch, "exit_at_signals", lambda: None)

    def run(*arguments: str, broken: str = "") -> list[tuple[str, int]]:
        calls: list[tuple[str, int]] = []

        def open_server(line, host, port, **_):
            return contextlib.nullcontext()

        def judge_cell(cell, options, line, *, has_plain):
            calls.append((cell.name, 1 + has_plain))
            if cell.name == broken:
                raise ValueError("the server went away")
            return Record.model_validate_json(json.dumps(RECORD))

        monkeypatch.setattr(board.launch, "open_server", open_server)
        monkeypatch.setattr(board, "judge_cell", judge_cell)
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
    assert isinstance(record, Record)
    assert "1 of 4, vllm/ngram/heldout, 0 s: tau (1.5, 1.2, 1.8)" in capsys.readouterr().out
    assert run_board(cells, "limit=64") == []
    words = r"vllm/ngram/heldout: has a record of 4 questions with max_new_tokens=8: delete \S+heldout\.json to run it"
    assert re.search(words, capsys.readouterr().out)


def test_a_cell_that_fails_leaves_the_others(run_board, tmp_path):
    cells = "cells=transformers/ngram/*,transformers/plain/*"
    with pytest.raises(ValueError, match=r"1 cells have no record.*transformers/plain/heldout: the server went away"):
        run_board(cells, broken="transformers/plain/heldout")
    assert [file.name for file in (tmp_path / "board").iterdir()] == ["transformers-ngram-heldout.json"]
    assert run_board(cells) == [("transformers/plain/heldout", 1)]
    with pytest.raises(ValueError, match="make engines"):
        run_board("cells=openvino/plain/*")
    assert not (tmp_path / "board" / "openvino-plain-heldout.json").exists()


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


def test_a_port_that_is_taken_is_no_absence_of_the_engine(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"{port} .*choose another port="):
            board.run_cell(Cell("vllm", "plain", "heldout"), BoardOptions(port=port, scratch=str(tmp_path)))


def test_a_cell_is_judged_with_its_servers(tmp_path, monkeypatch):
    def judge_server(arguments: list[str]) -> None:
        (tmp_path / "judged/vllm-mtp-gsm8k").mkdir(parents=True)
        (tmp_path / "judged/vllm-mtp-gsm8k/record.json").write_text(json.dumps(RECORD))
        calls.append(arguments)

    calls: list[list[str]] = []
    monkeypatch.setattr(board.judge, "main", judge_server)
    options = BoardOptions(scratch=str(tmp_path), gsm8k="gsm8k", port=8010)
    board.judge_cell(Cell("vllm", "mtp", "gsm8k"), options, StartLine(["vllm", "serve", "a b"]), has_plain=True)
    expected = {"engine=http://127.0.0.1:8010", "baseline=http://127.0.0.1:8011", "flags=serve 'a b'",
                "suite=gsm8k", "prompts=gsm8k", "checkpoint=checkpoints/shipped/mtp"}  # fmt: skip
    assert expected <= set(calls[0])
