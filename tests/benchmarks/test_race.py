"""Tests of benchmarks/race.py: servers answer in turn, one that fails ends alone, and ratios are medians of pairs."""

import json
import subprocess
import sys

import pytest

from benchmarks import board, race
from benchmarks.board import Cell
from benchmarks.race import Entrant
from specdec.engines.client import EngineClient
from specdec.measuring.servers.referee import ServedAnswer, Speculation
from specdec.measuring.servers.server import EXTRA_FIELDS, Connection, Server
from tests.support.commands import write_prompts
from tests.support.targets import save_target
from tests.tools.judge.test_judge import Drafting

NUM = 4


def make_entrant(engine: str, drafter: str, rates: list[float], ids: list[list[int]], rounds: int = 0) -> Entrant:
    counts = Speculation(11 - rounds, 3 * rounds, rounds) if rounds else None
    answers = [ServedAnswer("prompt", 12, 1.0, 1.0 + 11 / rate, text, [], counts) for rate, text in zip(rates, ids)]
    return Entrant(Cell(engine, drafter, "race"), answers=answers)


def test_ratios_are_medians_of_pairs_and_a_failed_cell_has_its_reason():
    plain = make_entrant("vllm", "plain", [10, 20, 30, 40], [[1], [2], [3], [4]])
    drafted = make_entrant("vllm", "eagle3", [20, 20, 90, 80], [[1], [2], [3], [9]], rounds=5)
    reference = make_entrant("specdec", "plain", [20, 10, 10, 10], [[1], [2], [3], [4]])
    failed = Entrant(Cell("openvino", "plain", "race"), failure="It is not installed.")
    figures = race.summarise_race([reference, plain, drafted, failed], NUM)
    assert figures["vllm/eagle3"]["to_plain"] == pytest.approx(2.0) and figures["vllm/eagle3"]["same"] == 3
    assert figures["vllm/eagle3"]["to_specdec"] == pytest.approx((2 + 8) / 2)
    assert figures["vllm/eagle3"]["tau"] == pytest.approx(11 / 5) and figures["vllm/plain"]["tau"] is None
    assert figures["vllm/plain"]["tokens_per_second"] == pytest.approx(25)
    assert figures["openvino/plain"] == {"failure": "It is not installed."}


def test_answers_of_one_token_and_without_ids_are_left_out():
    plain = make_entrant("vllm", "plain", [10, 20, 30], [None, None, None])
    drafted = make_entrant("vllm", "eagle3", [20, 20, 90], [None, None, None])
    drafted.answers[0] = ServedAnswer("prompt", 1, 1.0, 1.0, None, [], None)
    row = race.summarise_race([plain, drafted], 3)["vllm/eagle3"]
    assert row["tokens_per_second"] == pytest.approx(55) and row["to_plain"] == pytest.approx(2)
    assert row["same"] is None


def test_servers_take_turns_and_one_that_dies_ends_alone(monkeypatch):
    monkeypatch.setattr("specdec.engines.client.LONGEST_PAUSE", 0.01)
    words = [sys.executable, "-c", "import time; time.sleep(600)"]
    sleepers = [subprocess.Popen(words, start_new_session=True) for _ in range(2)]
    try:
        with Drafting("specdec") as first, Drafting("specdec") as second:
            entrants = []
            for server, name, sleeper in zip((first, second), ("eagle3", "mtp"), sleepers):
                client = EngineClient(server.url, in_flight=1, patience=0.001, say=lambda sentence: None)
                described = Server(server.url, "small", "specdec", "", EXTRA_FIELDS["specdec"], 10.0, print)
                entrants.append(Entrant(Cell("specdec", name, "race"), sleeper.pid, Connection(described, client)))
            second.spoil = lambda path, body, times: (500, {"error": "out of memory"}) if times > 1 else None
            race.run_race(entrants, [[1, 2], [3, 4, 5]], max_tokens=12, repeats=2)
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()
    assert len(entrants[0].answers) == 4 and entrants[0].failure is None and entrants[0].tau > 1
    assert "out of memory" in entrants[1].failure
    assert race.summarise_race(entrants, 2)["specdec/mtp"] == {"failure": entrants[1].failure}


@pytest.mark.full
def test_the_command_times_our_own_server(tmp_path, monkeypatch, capsys):
    """A cell of an engine that is not there says why."""
    save_target(tmp_path / "target")
    write_prompts(tmp_path / "prompts.jsonl", 2)
    monkeypatch.setattr(board, "LINES", dict.fromkeys(board.LINES, refuse_to_start))
    arguments = [f"target.name={tmp_path / 'target'}", f"prompts={tmp_path / 'prompts.jsonl'}", "repeats=1"]
    arguments += [f"scratch={tmp_path / 'board'}", f"out={tmp_path / 'race.json'}", "target.dtype=float32"]
    race.main([*arguments, "cells=specdec/plain,specdec/ngram,vllm/plain", "max_new_tokens=8", "port=18330"])
    cells = json.loads((tmp_path / "race.json").read_text())["cells"]
    assert cells["specdec/plain"]["to_plain"] == 1 and cells["specdec/ngram"]["same"] == 2
    assert cells["vllm/plain"] == {"failure": "There is no vLLM."}
    assert "specdec/ngram" in capsys.readouterr().out


def refuse_to_start(start) -> None:
    raise ValueError("There is no vLLM.")
