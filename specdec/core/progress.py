"""The progress of long work, shown alike by every command (`progress=`):

    rich     on a terminal: one line on stderr for each running task, redrawn
    plain    on stderr: the first and the last line of each task, and one every 30 s, without control characters
    quiet    nothing: only results, warnings and errors are printed
    auto     rich if stdout and stderr are terminals, else plain

The variable SPECDEC_PROGRESS has the default, also for processes that a command starts. Of several processes only the
main one shows something. Results go to stdout through `Results`, apart from the redrawn lines.
"""

import contextlib
import functools
import math
import os
import signal
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, TypeVar

import rich.console
import rich.table
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from specdec.core import token_counts

Item = TypeVar("Item")

MODES = ("auto", "rich", "plain", "quiet")
VARIABLE = "SPECDEC_PROGRESS"
HELP = "of long work: auto, rich (redrawn on the terminal), plain (lines for a log) or quiet (results only)"
LONG_PROMPTS = 1000  # tokens of a unit's prompts; from here on, lines say how many are read
SECONDS_BETWEEN_LINES = 30  # between lines of a task, in mode plain
WIDTH = 100  # characters of tables in files and pipes, unless COLUMNS is set
SHOW_CURSOR = b"\x1b[?25h\n"

_mode = "plain"  # before `choose_mode`
_main = True  # True in the process that shows progress
_live: Progress | None = None  # the redrawn lines, in mode rich
_tasks: list["Task"] = []  # running tasks, the innermost last


@dataclass
class TokenPace:
    """Tokens that a task reads, or writes.

    total, max_total: expected and largest possible number; seconds: spent on those that are done
    """

    total: int
    max_total: int
    num_done: int = 0
    seconds: float = 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds of the other tokens; infinite before the first one."""
        num_left = max(0, self.total - self.num_done)
        if num_left and not self.num_done:
            return math.inf
        return num_left * self.seconds / max(1, self.num_done)


class Task:
    """Long work that is under way; `start_task` makes it.

    total, num_done: in units; prints: True to print lines (mode plain)
    """

    def __init__(self, name: str, total: int | None, unit: str, num_done: int, prints: bool):
        self.name = name
        self.total = total
        self.unit = unit
        self.num_done = self.num_before = num_done
        self.num_tokens = 0
        self.figures = ""
        self.start_time = self.last_line_time = self.update_time = time.perf_counter()
        self.prints = prints
        self.row: tuple[Progress, TaskID] | None = None  # its redrawn line, in mode rich
        self.reading, self.writing = TokenPace(0, 0), TokenPace(0, 0)
        self.has_long_prompts = False
        self.token_time = self.start_time  # when tokens were counted last

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start_time

    @property
    def seconds_left(self) -> float | None:
        """Seconds that the other units take at the pace of those that are done; None before the first, or the total."""
        num_new = self.num_done - self.num_before
        if self.reading.num_done:
            seconds = self.reading.seconds_left + self.writing.seconds_left
            return None if math.isinf(seconds) else max(0.0, self.token_time + seconds - time.perf_counter())
        if self.total is None or num_new <= 0:
            return None
        end_time = self.update_time + (self.update_time - self.start_time) / num_new * (self.total - self.num_done)
        return max(0.0, end_time - time.perf_counter())

    def advance(self, num: int = 1, *, num_tokens: int = 0) -> None:
        """Adds `num` units, and the tokens in them for work whose rate is in tokens/s."""
        self.update(self.num_done + num, num_tokens=self.num_tokens + num_tokens)

    def update(self, num_done: int, *, num_tokens: int = 0, figures: str = "") -> None:
        """num_done, num_tokens: present totals; figures: text in place of rate and time left"""
        is_first = self.num_done == self.num_before
        self.num_done = num_done
        self.num_tokens = num_tokens
        self.figures = figures
        self.update_time = time.perf_counter()
        self._expect_rest()
        is_first_of_long_work = is_first and (self.seconds_left or 0) >= SECONDS_BETWEEN_LINES
        if self.row is not None and self.row[1] in self.row[0].task_ids:
            self.row[0].update(self.row[1], completed=num_done)
        elif self.update_time - self.last_line_time >= SECONDS_BETWEEN_LINES or is_first_of_long_work:
            self.print_line()

    def _expect_rest(self) -> None:
        """Expects answers as long as those that are done; work behind an answer, such as a replay, reads its prompt."""
        num_new = self.num_done - self.num_before
        if num_new and self.total is not None:
            expected = self.writing.num_done * (self.total - self.num_before) // num_new
            self.writing.total = min(self.writing.max_total, expected)
        self._spend(self.reading)

    def count_tokens(self, pace: TokenPace, num: int) -> None:
        """Adds tokens that were read or written since the last ones."""
        pace.num_done += num
        self._spend(pace)
        if self.row is None and self.token_time - self.last_line_time >= SECONDS_BETWEEN_LINES:
            self.print_line()

    def _spend(self, pace: TokenPace) -> None:
        """Counts the time since tokens were counted last."""
        now = time.perf_counter()
        pace.seconds += now - self.token_time
        self.token_time = now

    def print_line(self, text: str | None = None) -> None:
        """Prints a line of its own in mode plain. text: None: units so far, rate, and time left"""
        if self.prints:
            self.last_line_time = time.perf_counter()
            print(f"{self.name}: {self if text is None else text}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        """Units so far, rate, and time left"""
        count, rate = self._measure()
        if self.figures:
            return f"{count}  {self.figures}"
        time_left = ""
        if self.seconds_left is not None:
            time_left = f"{format_duration(self.seconds_left)} left"
        elif not rate and self.total is None:
            time_left = format_duration(self.seconds)
        read = ""
        if self.reading.num_done and self.has_long_prompts:
            read = f"{self.reading.num_done:,}/{self.reading.total:,} prompt tokens read"
        return ", ".join(filter(None, (count, read, rate, time_left)))

    def summary(self) -> str:
        """Units, time and rate at the end"""
        count, rate = self._measure()
        tokens = f"{self.num_tokens:,} tokens" if self.num_tokens else ""
        return ", ".join(filter(None, (f"{count} in {format_duration(self.seconds)}".lstrip(), tokens, rate)))

    def _measure(self) -> tuple[str, str]:
        """-> units so far (empty without a unit), and the rate (empty before the first one)"""
        num_new = self.num_done - self.num_before
        total = "" if self.total is None else f"/{self.total:,}"
        is_one = self.total == 1 or (self.total is None and self.num_done == 1)
        noun = self.unit.removesuffix("s") if is_one else self.unit
        count = f"{self.num_done:,}{total} {noun}" if noun else ""
        num, unit = (self.num_tokens, "tokens") if self.num_tokens else (num_new, self.unit)
        rate = num / max(self.update_time - self.start_time, 1e-9)
        text = f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s"
        return count, text if num_new > 0 else ""


def format_duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def choose_mode(mode: str, *, main: bool) -> None:
    """Sets the mode of this process and of its children. Raises ValueError for a word that is not in MODES.

    main: True in the process that shows the progress of all processes of a run
    """
    global _mode, _main, _live
    if mode not in MODES:
        raise ValueError(f"progress={mode} must be one of {', '.join(MODES)} (or the variable {VARIABLE}).")
    os.environ[VARIABLE] = "auto" if mode == "rich" else mode  # the output of a child is read here, without a terminal
    terminals = sys.stdout.isatty() and sys.stderr.isatty()
    if mode == "auto":
        mode = "rich" if terminals else "plain"
    if mode == "rich" and os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        mode = "plain"  # such a terminal cannot go back to an earlier line
    close_display()
    _mode = mode
    _main = main
    _live = None
    if mode == "rich":
        _live = Progress(
            _make_column("{task.description}"),
            BarColumn(bar_width=None),
            _make_column("{task.fields[shown]}"),
            console=rich.console.Console(stderr=True, force_terminal=True),
            transient=True,
            refresh_per_second=4,
            redirect_stdout=terminals,
        )
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminate)


def _make_column(text: str) -> TextColumn:
    return TextColumn(text, markup=False, table_column=rich.table.Column(no_wrap=True))


def _terminate(number: int, _) -> None:
    """Shows the cursor, then ends the process by the signal, as without this handler."""
    if _live is not None:
        os.write(2, SHOW_CURSOR)  # without a lock, which the interrupted code may hold
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def close_display() -> None:
    """Takes everything off the terminal and shows the cursor again, however the work has ended."""
    if _live is not None:
        _live.stop()
        for number in _live.task_ids:
            _live.remove_task(number)


@contextlib.contextmanager
def start_task(
    name: str,
    total: int | None = None,
    *,
    unit: str = "",
    num_done: int = 0,
    own_lines: bool = True,
    any_process: bool = False,
) -> Iterator[Task]:
    """A task that is shown until the end of the `with` block. Tasks may be nested.

    total: size of the work in `unit`s (a plural), None if unknown; num_done: part of it done before
    own_lines: False if the caller prints lines of its own with `print_note` in mode plain
    any_process: True if other processes than the main one show it, too: for work of one of them
    """
    shown = _main or any_process
    live = _live
    task = Task(name, total, unit, num_done, prints=shown and own_lines and _mode == "plain")
    if shown and live is not None:
        task.row = live, live.add_task(name, total=total, completed=num_done, shown=task)
        live.start()
    task.print_line()
    _tasks.append(task)
    try:
        yield task
    finally:
        _tasks.remove(task)
        task.print_line(task.summary())
        if live is not None and task.row is not None and task.row[1] in live.task_ids:
            live.remove_task(task.row[1])
            if not live.task_ids:
                live.stop()


def expect_tokens(*, read: int, written: int, times: int = 1) -> None:
    """Tells the innermost task what it reads and at most writes, for the time left while answers are under way.

    times: how often it reads and writes that
    """
    if _tasks:
        task = _tasks[-1]
        task.reading, task.writing = (TokenPace(num * times, num * times) for num in (read, written))
        task.has_long_prompts = read >= LONG_PROMPTS * (task.total or 1)
        task.token_time = time.perf_counter()


def track_tokens(items: Iterable[Item], **expected: int) -> Iterator[Item]:
    """Yields the items of `track_items`, whose task is told what it reads and at most writes: see `expect_tokens`."""
    for index, item in enumerate(items):
        if index == 0:
            expect_tokens(**expected)
        yield item


def count_tokens(*, read: int = 0, written: int = 0) -> None:
    """Counts tokens that decoding has read or written, in the innermost task that expects some."""
    task = next((task for task in reversed(_tasks) if task.reading.total), None)
    if task is not None:
        task.count_tokens(task.reading if read else task.writing, read or written)


token_counts.LISTENERS.append(count_tokens)


def track_items(
    items: Iterable[Item],
    name: str,
    *,
    unit: str,
    total: int | None = None,
    size: Callable[[Item], int] = lambda item: 1,
) -> Iterator[Item]:
    """Yields the items, and shows the number of those done. size: units of an item that stands for several"""
    if total is None and isinstance(items, Sized):
        total = sum(map(size, items))
    with start_task(name, total, unit=unit) as task:
        for item in items:
            yield item
            task.advance(size(item))


class Results(rich.console.Console):
    """A console for results, on stdout, of the main process."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, quiet=not _main)  # names may look like markup
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = WIDTH

    def print(self, *objects: Any, **settings: Any) -> None:
        """Prints while nothing is redrawn. Lines stay as they are, so that commands in them can be copied."""
        redrawn = _live is not None and _live.live.is_started
        if _live is not None and redrawn:
            _live.stop()
        super().print(*objects, **{"soft_wrap": True, **settings})
        if _live is not None and redrawn:
            _live.start()

    def say(self, text: str) -> None:
        """Prints sentences, broken between words at the width of a terminal; elsewhere a line stays one line."""
        if self.is_terminal:
            wrap = functools.partial(textwrap.fill, width=self.width, break_long_words=False, break_on_hyphens=False)
            text = "\n".join(map(wrap, text.split("\n")))
        self.print(text)

    def on_broken_pipe(self) -> None:
        """Raises the BrokenPipeError that rich has caught (`closed_pipe`)."""
        raise


def print_note(text: str) -> None:
    """Prints a line on stdout that is no result, once for all processes; nothing in mode quiet."""
    if _mode != "quiet":
        Results().say(text)
