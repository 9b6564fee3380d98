"""What commands show of long work: plain lines, nothing, or lines that are redrawn on a terminal."""

import contextlib
import os
import pty
import re
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from scripts import answer
from specdec.core import progress
from tests.support.commands import ROOT, start, write_rows
from tests.support.runs import train_overrides

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"


@pytest.fixture
def choose(monkeypatch):
    """choose(mode): for this test"""
    monkeypatch.setenv(progress.VARIABLE, "auto")
    yield lambda mode, main=True: progress.choose_mode(mode, main=main)
    progress.choose_mode("auto", main=True)


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still; clock[0]: its seconds"""
    seconds = [1000.0]
    monkeypatch.setattr(progress.time, "perf_counter", lambda: seconds[0])
    return seconds


def test_plain_lines_are_the_first_the_last_and_one_in_thirty_seconds(choose, clock, capsys):
    choose("plain")
    with progress.start_task("answering", 100, unit="answers") as task:
        for _ in range(100):
            clock[0] += 1
            task.advance(num_tokens=50)
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.splitlines() == [
        "answering: 0/100 answers",
        "answering: 30/100 answers, 50 tokens/s, 70 s left",
        "answering: 60/100 answers, 50 tokens/s, 40 s left",
        "answering: 90/100 answers, 50 tokens/s, 10 s left",
        "answering: 100/100 answers in 2 min, 5,000 tokens, 50 tokens/s",
    ]


def test_plain_lines_are_never_wrapped_and_have_no_control_characters(choose, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    choose("plain")
    for _ in progress.track_items(range(2), "a" * 100, unit="steps"):
        progress.print_note("b" * 300 + " gradient 4.41, 100% clipped [red]")
        progress.Results().print("c" * 300 + " and more")
    printed = capsys.readouterr()
    assert printed.out.splitlines() == ["b" * 300 + " gradient 4.41, 100% clipped [red]", "c" * 300 + " and more"] * 2
    assert [line.startswith("a" * 100 + ": ") for line in printed.err.splitlines()] == [True, True]
    assert all(character.isprintable() or character == "\n" for character in printed.out + printed.err)


def test_groups_count_as_their_items_and_the_last_line_comes_after_an_error_too(choose, capsys):
    choose("plain")
    assert list(progress.track_items([[1, 2], [3]], "decoding", unit="prompts", size=len)) == [[1, 2], [3]]
    first, last = capsys.readouterr().err.splitlines()
    assert first == "decoding: 0/3 prompts" and last.startswith("decoding: 3/3 prompts in 0 s, ")
    with pytest.raises(KeyError), progress.start_task("decoding", 9, unit="prompts") as task:
        task.advance(4)
        raise KeyError
    assert capsys.readouterr().err.splitlines()[-1].startswith("decoding: 4/9 prompts in ")


@pytest.mark.parametrize(("mode", "main"), [("quiet", True), ("plain", False)])
def test_quiet_and_other_processes_show_nothing_but_work_of_one_alone(mode, main, choose, capsys):
    choose(mode, main)
    for _ in progress.track_items(range(3), "decoding", unit="prompts"):
        progress.print_note("a fact")
    progress.Results().say("a result")
    printed = capsys.readouterr()
    assert printed.err == "" and printed.out == ("a result\n" if main else "")
    with progress.start_task("encoding", 3, unit="rows", any_process=True):
        pass
    assert capsys.readouterr().err == ("" if main else "encoding: 0/3 rows\nencoding: 0/3 rows in 0 s\n")


def test_an_unknown_mode_is_refused_in_one_sentence(monkeypatch, fit):
    sentence = "progress=loud must be one of auto, rich, plain, quiet"
    monkeypatch.setattr(sys, "argv", ["answer.py", "prompts=a", "out=b", "progress=loud"])
    with pytest.raises(ValueError, match=sentence):
        answer.main()
    with pytest.raises(ValueError, match=sentence):
        fit("loud", "progress=loud")


def test_the_variable_is_the_default_of_the_option(monkeypatch, choose, capsys):
    monkeypatch.setenv(progress.VARIABLE, "quiet")
    monkeypatch.setattr(sys, "argv", ["answer.py", "--help"])
    with pytest.raises(SystemExit):
        answer.main()
    assert re.search(r"progress +of long work: .*\(default: quiet\)", capsys.readouterr().out)


def on_terminal(arguments, cwd, *, until=None, number=signal.SIGINT, **environment) -> tuple[str, int]:
    """Runs Python on a pseudo-terminal, and sends a signal when `until` matches. -> its output, its exit status"""
    master, slave = pty.openpty()
    environment = {"TERM": "xterm", "COLUMNS": "150", **environment}
    process = start(arguments, cwd=cwd, errors=True, file=Path(os.ttyname(slave)), **environment)
    printed, sent, end = "", False, time.monotonic() + 300
    while process.poll() is None and time.monotonic() < end:
        if select.select([master], [], [], 0.1)[0]:
            break  # it has opened the terminal, which ends with the last one who has it open
    os.close(slave)
    with contextlib.suppress(OSError):  # Linux's word for the end of a terminal
        while time.monotonic() < end:
            if select.select([master], [], [], 1)[0]:
                printed += os.read(master, 65536).decode(errors="replace")
                if until is not None and not sent and re.search(until, printed):
                    process.send_signal(number)
                    sent = True
    process.kill() if time.monotonic() >= end else None
    os.close(master)
    status = process.wait(10)
    assert sent == (until is not None), printed[-3000:]
    return printed, status


@pytest.fixture(scope="module")
def answering(folder, tmp_path_factory):
    """Arguments of answer.py for work that takes longer than a busy machine needs to send a signal."""
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    write_rows(prompts, [{"prompt": f"Count from {number}."} for number in range(4000)])
    settings = ["batch=4", "max_new_tokens=24", "target.dtype=float32", "decode.temperature=0"]
    return [ROOT / "scripts" / "answer.py", f"prompts={prompts}", f"target.name={folder}/target", *settings]


SHOWN = r"answering.*[\d,]+/[\d,]+ answers, [\d,]+ tokens/s, \d+ (s|min) left"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, -signal.SIGTERM)])
def test_a_script_on_a_terminal_shows_rate_and_time_left_and_then_the_cursor(number, status, answering, tmp_path):
    printed, ended = on_terminal([*answering, f"out={tmp_path}/answers.jsonl"], tmp_path, until=SHOWN, number=number)
    assert ended == status, printed[-2000:]
    assert HIDE in printed and printed.rindex(SHOW) > printed.rindex(HIDE)
    assert number != signal.SIGINT or printed.rstrip().endswith("run the same command again to continue.")


def test_a_terminal_without_cursor_movement_gets_plain_lines(answering, tmp_path):
    small = [*answering, f"out={tmp_path}/answers.jsonl", "limit=8"]
    printed, status = on_terminal(small, tmp_path, TERM="dumb")
    assert status == 0 and "\x1b" not in printed and "answering: 0/8 answers" in printed, printed[-2000:]


@pytest.mark.parametrize("stopped", [False, True])
def test_training_on_a_terminal_shows_loss_rate_and_time_left(stopped, folder, tmp_path):
    steps = 100_000 if stopped else 60
    rare = ["train.log_every=1000", "train.save_every=100000", "validation.auto=never", "validation.max_new_tokens=30"]
    steps = [f"train.steps={steps}", f"train.validate_every={100_000 if stopped else 20}"]
    command = [ROOT / "train.py", *train_overrides(folder, "seen", *steps, *rare)]
    until = r"training.*[\d,]+/[\d,]+ steps  loss [\d.]+  text tau [\d.]+  [\d,]+ tokens/s  \d+ (s|min) left"
    printed, status = on_terminal(command, tmp_path, until=until if stopped else None)
    assert status == (130 if stopped else 0), printed[-3000:]
    assert re.search(until, printed) and printed.rindex(SHOW) > printed.rindex(HIDE)
    if stopped:
        assert "resume=true" in printed
    else:
        assert re.search(r"training[^\n]*steps[^\n]*\n[^\n]*validation: ", printed.replace("\r", ""))
