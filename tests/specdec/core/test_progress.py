"""What commands show of long work: plain lines, nothing, or lines that are redrawn on a terminal."""

import contextlib
import os
import pty
import re
import select
import signal
import sys
import threading
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
        "answering: 1/100 answers, 50 tokens/s, 2 min left",  # of long work, as soon as it is known
        "answering: 31/100 answers, 50 tokens/s, 69 s left",
        "answering: 61/100 answers, 50 tokens/s, 39 s left",
        "answering: 91/100 answers, 50 tokens/s, 9 s left",
        "answering: 100/100 answers in 2 min, 5,000 tokens, 50 tokens/s",
    ]


def test_the_time_left_is_that_of_the_units_done_and_falls_between_them(choose, clock):
    choose("quiet")
    with progress.start_task("decoding", 3, unit="requests") as task:
        assert str(task) == "0/3 requests"
        clock[0] += 20
        task.advance()
        assert str(task) == "1/3 requests, 0.05 requests/s, 40 s left"
        clock[0] += 10  # within the second unit
        assert str(task) == "1/3 requests, 0.05 requests/s, 30 s left"
        clock[0] += 60
        assert str(task) == "1/3 requests, 0.05 requests/s, 0 s left"
    with progress.start_task("decoding", 1, unit="requests") as task:
        assert str(task) == "0/1 request"


def test_the_time_left_follows_from_tokens_to_read_and_to_write(choose, clock, capsys):
    choose("plain")
    with progress.start_task("decoding", 2, unit="requests") as task:
        progress.expect_tokens(read=20_000, written=400)
        for read in (5_000, 5_000):  # one prompt in pieces, 20 s each
            clock[0] += 20
            progress.count_tokens(read=read)
        assert str(task) == "0/2 requests, 10,000/20,000 prompt tokens read"
        clock[0] += 10
        progress.count_tokens(written=100)
        assert str(task).endswith("70 s left")  # 10,000 tokens to read in 40 s, at most 300 to write in 30 s
        clock[0] += 20
        assert str(task).endswith("50 s left")
        task.advance()
        assert str(task).endswith("70 s left")  # as long as the first one: 100 tokens and 20 s behind them are expected
    assert "decoding: 0/2 requests, 10,000/20,000 prompt tokens read" in capsys.readouterr().err.splitlines()
    progress.count_tokens(read=5)  # outside of every task
    with progress.start_task("answering", 3, unit="answers") as task:  # by a server, whose tokens are not counted
        progress.expect_tokens(read=20_000, written=400)
        clock[0] += 20
        task.advance()
        assert str(task) == "1/3 answers, 0.05 answers/s, 40 s left"


def test_a_first_answer_unlike_the_rest_is_soon_outweighed(choose, clock):
    choose("quiet")
    with progress.start_task("decoding", 100, unit="requests") as task:
        progress.expect_tokens(read=100 * 4000, written=100 * 256)
        for num_tokens in (5, 255, 255):
            clock[0] += 8
            progress.count_tokens(read=4000)
            clock[0] += num_tokens / 10
            progress.count_tokens(written=num_tokens)
            task.advance()
    assert str(task) == "3/100 requests, 12,000/400,000 prompt tokens read, 0.04 requests/s, 41 min left"


def test_short_prompts_of_several_methods_do_not_count_as_long(choose, clock):
    choose("quiet")
    with progress.start_task("decoding", 2, unit="requests") as task:
        progress.expect_tokens(read=800, written=40, times=4)
        progress.count_tokens(read=1600)
        assert str(task) == "0/2 requests"


def test_nothing_is_formatted_that_is_not_printed(choose, clock, monkeypatch):
    choose("quiet")
    monkeypatch.setattr(progress.Task, "__str__", lambda task: pytest.fail("formatted"))
    with progress.start_task("decoding", 2, unit="requests") as task:
        progress.expect_tokens(read=800, written=40)
        clock[0] += 40
        progress.count_tokens(read=400)
        task.advance()


def test_sentences_are_broken_between_words_on_a_terminal_only(monkeypatch, capsys):
    text = "first line\n" + "word " * 30 + "a/path/that/is/longer/than/the/terminal"
    progress.Results().say(text)
    assert capsys.readouterr().out == text + "\n"
    console = progress.Results()
    monkeypatch.setattr(type(console), "is_terminal", True)
    console.width = 30
    console.say(text)
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["first line", *["word word word word word word"] * 5, "a/path/that/is/longer/than/the/terminal"]


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


@contextlib.contextmanager
def own_terminal(monkeypatch, **environment):
    """Within, this process writes on a pseudo-terminal. -> the pieces of all that it wrote, complete at the end"""
    master, slave = pty.openpty()
    printed: list[str] = []

    def read():
        with contextlib.suppress(OSError):  # Linux's word for the end of a terminal
            while True:
                printed.append(os.read(master, 65536).decode(errors="replace"))

    reader = threading.Thread(target=read)
    reader.start()
    with open(slave, "w") as terminal, monkeypatch.context() as patch:
        for name in ("stdout", "stderr"):
            patch.setattr(sys, name, terminal)
        for name, value in {"TERM": "xterm", "COLUMNS": "150", **environment}.items():
            patch.setenv(name, value)
        yield printed
        progress.close_display()
    reader.join()
    os.close(master)


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


def test_a_terminal_without_cursor_movement_gets_plain_lines(answering, tmp_path, monkeypatch):
    with own_terminal(monkeypatch, TERM="dumb") as printed:
        answer.main([*map(str, answering[1:]), f"out={tmp_path}/answers.jsonl", "limit=8"])
    text = "".join(printed)
    assert "\x1b" not in text and "answering: 0/8 answers" in text, text[-2000:]


RARE = ("train.log_every=1000", "train.save_every=100000", "validation.auto=never", "validation.max_new_tokens=30")
TRAINING = r"training.*[\d,]+/[\d,]+ steps  loss [\d.]+  text tau [\d.]+  [\d,]+ tokens/s  \d+ (s|min) left"


def test_training_on_a_terminal_shows_loss_rate_and_time_left_until_ctrl_c(folder, tmp_path):
    steps = ["train.steps=100000", "train.validate_every=100000"]
    command = [ROOT / "train.py", *train_overrides(folder, "seen", *steps, *RARE)]
    printed, status = on_terminal(command, tmp_path, until=TRAINING)
    assert status == 130 and "resume=true" in printed, printed[-3000:]
    assert re.search(TRAINING, printed) and printed.rindex(SHOW) > printed.rindex(HIDE)


def test_training_on_a_terminal_shows_its_validation(fit, monkeypatch):
    with own_terminal(monkeypatch) as printed:
        assert fit("seen", "train.steps=60", "train.validate_every=20", *RARE) == 0
    text = "".join(printed).replace("\r", "")
    assert re.search(TRAINING, text) and text.rindex(SHOW) > text.rindex(HIDE)
    assert re.search(r"training[^\n]*steps[^\n]*\n[^\n]*validation: ", text)
