"""The progress of long work, shown alike by every command (`progress=`):

    rich     on a terminal: one line for each task that is under way, redrawn on stderr
    plain    on stderr, the first and the last line of each task, and one every 30 s: no control characters, never wrapped
    quiet    nothing: only results, warnings and errors are printed
    auto     rich where stdout and stderr are terminals, else plain

The variable SPECDEC_PROGRESS has the default, also for processes that a command starts. With several processes only the
main one shows something. Results go to stdout, through `Results`, which keeps them apart from the lines that are redrawn.
"""

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

import rich.console
import rich.table
from rich.progress import BarColumn, Progress, TaskID, TextColumn

Item = TypeVar("Item")

MODES = ("auto", "rich", "plain", "quiet")
VARIABLE = "SPECDEC_PROGRESS"
HELP = "of long work: auto, rich (redrawn on the terminal), plain (lines for a log) or quiet (results only)"
SECONDS_BETWEEN_LINES = 30  # of a task, in mode plain
WIDTH = 200  # of tables in files and pipes, in characters; COLUMNS in the environment replaces it
SHOW_CURSOR = b"\x1b[?25h\n"

_mode, _main = "plain", True  # of a process that has not called `choose`
_live: Progress | None = None  # in mode rich: the lines that are redrawn


class Task:
    """Long work that is under way; `start` makes it."""

    def __init__(self, name: str, total: int | None, unit: str, num_done: int, prints: bool):
        self.name, self.total, self.unit = name, total, unit
        self.num_done = self.num_before = num_done
        self.num_tokens, self.figures = 0, ""
        self.start_time = self.last_line_time = time.perf_counter()
        self.prints = prints  # whether it prints lines, in mode plain
        self.row: tuple[Progress, TaskID] | None = None  # its line, in mode rich

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start_time

    def advance(self, num: int = 1, *, num_tokens: int = 0) -> None:
        """So much more is done. num_tokens: in it, for work whose rate is in tokens/s"""
        self.update(self.num_done + num, num_tokens=self.num_tokens + num_tokens)

    def update(self, num_done: int, *, num_tokens: int = 0, figures: str = "") -> None:
        """done, num_tokens: so far; figures: shown in place of rate and time left"""
        self.num_done, self.num_tokens, self.figures = num_done, num_tokens, figures
        if self.row is not None and self.row[1] in self.row[0].task_ids:
            self.row[0].update(self.row[1], completed=num_done)
        elif time.perf_counter() - self.last_line_time >= SECONDS_BETWEEN_LINES:
            self.print_line(str(self))

    def print_line(self, text: str) -> None:
        """A line of its own, in mode plain."""
        if self.prints:
            self.last_line_time = time.perf_counter()
            print(f"{self.name}: {text}", file=sys.stderr, flush=True)

    def __str__(self) -> str:
        """What is done of it, the rate, and the time left."""
        count, rate = self._measure()
        if self.figures:
            return f"{count}  {self.figures}"
        time_left = ""
        if rate and self.total is not None:
            time_left = f"{format_duration(self.seconds / (self.num_done - self.num_before) * (self.total - self.num_done))} left"
        elif not rate and self.total is None:
            time_left = format_duration(self.seconds)
        return ", ".join(filter(None, (count, rate, time_left)))

    def summary(self) -> str:
        """What was done, in which time, at which rate."""
        count, rate = self._measure()
        tokens = f"{self.num_tokens:,} tokens" if self.num_tokens else ""
        return ", ".join(filter(None, (f"{count} in {format_duration(self.seconds)}".lstrip(), tokens, rate)))

    def _measure(self) -> tuple[str, str]:
        """-> what is done of how much (empty without a unit), and the rate (empty before anything is done)"""
        num_new = self.num_done - self.num_before
        count = f"{self.num_done:,}{'' if self.total is None else f'/{self.total:,}'} {self.unit}" if self.unit else ""
        num, unit = (self.num_tokens, "tokens") if self.num_tokens else (num_new, self.unit)
        rate = num / max(self.seconds, 1e-9)
        text = f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s"
        return count, text if num_new > 0 else ""


def format_duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


def choose_mode(mode: str, *, main: bool) -> None:
    """The mode of this process and of those that it starts. Raises ValueError for a word that is none of MODES.

    main: whether this process shows what all processes of a run do
    """
    global _mode, _main, _live
    if mode not in MODES:
        raise ValueError(f"progress={mode} must be one of {', '.join(MODES)} (or the variable {VARIABLE}).")
    os.environ[VARIABLE] = "auto" if mode == "rich" else mode  # a process whose output is read here has no terminal
    terminals = sys.stdout.isatty() and sys.stderr.isatty()
    if mode == "auto":
        mode = "rich" if terminals else "plain"
    if mode == "rich" and os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        mode = "plain"  # such a terminal cannot go back to an earlier line
    close_display()
    _mode, _main, _live = mode, main, None
    if mode == "rich":
        text = lambda name: TextColumn(name, markup=False, table_column=rich.table.Column(no_wrap=True))
        columns = text("{task.description}"), BarColumn(bar_width=None), text("{task.fields[shown]}")
        screen = rich.console.Console(stderr=True, force_terminal=True)
        _live = Progress(*columns, console=screen, transient=True, refresh_per_second=4, redirect_stdout=terminals)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, _) -> None:
    """Ends the process by the signal, as without this handler, but shows the cursor first."""
    if _live is not None:
        os.write(2, SHOW_CURSOR)  # no lock is taken: the interrupted code may hold it
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
    """Around long work: a task that is shown until the end of the block. Tasks may be nested.

    total: of the work, in `unit`s (a plural); None: not known. done: before it begins
    own_lines: False if the caller prints lines of its own with `note` in mode plain
    any_process: whether a process shows it that is not the main one too, for work that one of them does
    """
    shown, live = _main or any_process, _live
    task = Task(name, total, unit, num_done, prints=shown and own_lines and _mode == "plain")
    if shown and live is not None:
        task.row = live, live.add_task(name, total=total, completed=num_done, shown=task)
        live.start()
    task.print_line(str(task))
    try:
        yield task
    finally:
        task.print_line(task.summary())
        if live is not None and task.row is not None and task.row[1] in live.task_ids:
            live.remove_task(task.row[1])
            if not live.task_ids:
                live.stop()


def track_items(
    items: Iterable[Item],
    name: str,
    *,
    unit: str,
    total: int | None = None,
    size: Callable[[Item], int] = lambda item: 1,
) -> Iterator[Item]:
    """The items, whose number that are done is shown. size: units of an item, if it stands for several"""
    if total is None and isinstance(items, Sized):
        total = sum(map(size, items))
    with start_task(name, total, unit=unit) as task:
        for item in items:
            yield item
            task.advance(size(item))


class Results(rich.console.Console):
    """A console for results, on stdout, of the main process. Only tables on a terminal are fitted to its width."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, quiet=not _main)  # names stay as they are
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = WIDTH

    def print(self, *objects: Any, **settings: Any) -> None:
        """Prints while nothing is redrawn."""
        fitted = self.is_terminal and any(isinstance(each, rich.table.Table) for each in objects)
        redrawn = _live is not None and _live.live.is_started
        if _live is not None and redrawn:
            _live.stop()
        super().print(*objects, **{"soft_wrap": not fitted, **settings})
        if _live is not None and redrawn:
            _live.start()

    def say(self, text: str) -> None:
        """Prints a sentence as it is."""
        self.print(text)


def print_note(text: str) -> None:
    """Prints a line on stdout that is no result, once for all processes; nothing in mode quiet."""
    if _mode != "quiet":
        Results().say(text)
