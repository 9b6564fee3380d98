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
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

import rich.console
import rich.progress
import rich.table
import rich.text

Item = TypeVar("Item")

MODES = ("auto", "rich", "plain", "quiet")
VARIABLE = "SPECDEC_PROGRESS"
HELP = "of long work: auto, rich (redrawn on the terminal), plain (lines for a log) or quiet (results only)"
SECONDS_BETWEEN_LINES = 30  # of a task, in mode plain
REDRAWN = 4  # times a second, in mode rich
WIDTH = 200  # of tables in files and pipes, in characters; COLUMNS in the environment replaces it
SHOW_CURSOR = b"\x1b[?25h\n"


class Task:
    """Long work that is under way; `start` makes it."""

    def __init__(self, what: str, total: int | None, unit: str, done: int, own_lines: bool):
        self.what, self.total, self.unit, self.own_lines = what, total, unit, own_lines
        self.done = self.first = done
        self.num_tokens, self.figures = 0, ""
        self.begun = self.newest = time.perf_counter()
        self.said = 0.0  # when the newest line was printed, in mode plain

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.begun

    def advance(self, num: int = 1, *, num_tokens: int = 0) -> None:
        """So much more is done. num_tokens: in it, for work whose rate is in tokens/s"""
        self.update(self.done + num, num_tokens=self.num_tokens + num_tokens)

    def update(self, done: int, *, num_tokens: int = 0, figures: str = "") -> None:
        """done, num_tokens: so far; figures: shown in place of rate and time left"""
        self.done, self.num_tokens, self.figures = done, num_tokens, figures
        self.newest = time.perf_counter()
        DISPLAY.update(self)

    def __str__(self) -> str:
        """What is done of it, the rate, and the time left."""
        count = f"{self.done:,}" + ("" if self.total is None else f"/{self.total:,}") + f" {self.unit}"
        if self.figures:
            return f"{count}  {self.figures}"
        parts = [count] if self.unit else []
        if self.done > self.first:
            parts.append(self._rate(self.newest - self.begun))
            if self.total is not None:
                each = (self.newest - self.begun) / (self.done - self.first)
                left = each * (self.total - self.done) - (time.perf_counter() - self.newest)
                parts.append(f"{duration(max(0.0, left))} left")
        elif self.total is None:
            parts.append(duration(self.seconds))
        return ", ".join(parts)

    def summary(self) -> str:
        """What was done, in which time, at which rate."""
        count = (
            f"{self.done:,}" + ("" if self.total is None else f"/{self.total:,}") + f" {self.unit} "
            if self.unit
            else ""
        )
        parts = [f"{count}in {duration(self.seconds)}"]
        if self.num_tokens:
            parts.append(f"{self.num_tokens:,} tokens")
        if self.done > self.first:
            parts.append(self._rate(self.seconds))
        return ", ".join(parts)

    def _rate(self, seconds: float) -> str:
        num, unit = (self.num_tokens, "tokens") if self.num_tokens else (self.done - self.first, self.unit)
        rate = num / max(seconds, 1e-9)
        return f"{rate:,.0f} {unit}/s" if rate >= 10 else f"{rate:.2g} {unit}/s"


def duration(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds > 90 else f"{seconds:.0f} s"


class Figures(rich.progress.ProgressColumn):
    """A task's count, rate and time left."""

    def get_table_column(self) -> rich.table.Column:
        return rich.table.Column(no_wrap=True)

    def render(self, task: rich.progress.Task) -> rich.text.Text:
        return rich.text.Text(str(task.fields["shown"]))


class Display:
    """The tasks that this process shows. mode: rich, plain or quiet; main: whether it shows what all processes do"""

    def __init__(self, mode: str, *, main: bool = True):
        self.mode, self.main = mode, main
        self.lock = threading.RLock()
        self.live: rich.progress.Progress | None = None  # while there is something to redraw
        self.tasks: dict[Task, rich.progress.TaskID] = {}  # under way; numbers are of `live`

    def add(self, task: Task) -> None:
        with self.lock:
            self.tasks[task] = rich.progress.TaskID(0)
            if self.mode == "plain":
                self._say(task, str(task))
            else:
                if self.live is None:
                    self.live = _live()
                    self.live.start()
                self.tasks[task] = self.live.add_task(task.what, total=task.total, completed=task.done, shown=task)

    def update(self, task: Task) -> None:
        if task not in self.tasks:  # another process shows it, or nothing is shown
            return
        if self.live is not None:
            self.live.update(self.tasks[task], completed=task.done)
        elif task.newest - task.said >= SECONDS_BETWEEN_LINES:
            self._say(task, str(task))

    def remove(self, task: Task) -> None:
        with self.lock:
            number = self.tasks.pop(task, None)
            if number is None:
                return
            if self.live is None:
                self._say(task, task.summary())
                return
            self.live.remove_task(number)
            if not self.tasks:
                self.close()

    def close(self) -> None:
        """Takes everything off the terminal and shows the cursor again."""
        with self.lock:
            live, self.live = self.live, None
            self.tasks.clear()
            if live is not None:
                live.stop()

    @contextlib.contextmanager
    def cleared(self) -> Iterator[None]:
        """Within, nothing is redrawn, so that something else can be printed."""
        with self.lock:
            live = self.live
            if live is None:
                yield
                return
            live.stop()
            try:
                yield
            finally:
                live.start()

    def _say(self, task: Task, text: str) -> None:
        if task.own_lines:
            task.said = time.perf_counter()
            sys.stderr.write(f"{task.what}: {text}\n")
            sys.stderr.flush()


def _live() -> rich.progress.Progress:
    columns = (
        rich.progress.TextColumn("{task.description}", markup=False, table_column=rich.table.Column(no_wrap=True)),
        rich.progress.BarColumn(bar_width=None),
        Figures(),
    )
    return rich.progress.Progress(
        *columns,
        console=rich.console.Console(stderr=True, force_terminal=True),
        transient=True,
        refresh_per_second=REDRAWN,
        redirect_stdout=sys.stdout.isatty() and sys.stderr.isatty(),
    )


DISPLAY = Display("plain")  # of a process that has not called `choose`


def choose(mode: str, *, main: bool) -> None:
    """The mode of this process and of those that it starts. Raises ValueError for a word that is none of MODES.

    main: whether this process shows what all processes of a run do
    """
    global DISPLAY
    if mode not in MODES:
        raise ValueError(f"progress={mode} must be one of {', '.join(MODES)} (or the variable {VARIABLE}).")
    os.environ[VARIABLE] = "auto" if mode == "rich" else mode  # a process whose output is read here has no terminal
    if mode == "auto":
        mode = "rich" if sys.stdout.isatty() and sys.stderr.isatty() else "plain"
    if mode == "rich" and os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        mode = "plain"  # such a terminal cannot go back to an earlier line
    DISPLAY.close()
    DISPLAY = Display(mode, main=main)
    if mode == "rich" and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminate)


def _terminate(number: int, _) -> None:
    """Ends the process by the signal, as without this handler, but shows the cursor first."""
    if DISPLAY.live is not None:
        os.write(2, SHOW_CURSOR)  # no lock is taken: the interrupted code may hold it
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def close() -> None:
    """Takes everything off the terminal and shows the cursor again, however the work has ended."""
    DISPLAY.close()


@contextlib.contextmanager
def start(
    what: str,
    total: int | None = None,
    *,
    unit: str = "",
    done: int = 0,
    own_lines: bool = True,
    any_process: bool = False,
) -> Iterator[Task]:
    """Around long work: a task that is shown until the end of the block. Tasks may be nested.

    total: of the work, in `unit`s (a plural); None: not known. done: before it begins
    own_lines: False if the caller prints lines of its own with `note` in mode plain
    any_process: whether a process shows it that is not the main one too, for work that one of them does
    """
    task = Task(what, total, unit, done, own_lines)
    display = DISPLAY
    if display.mode != "quiet" and (display.main or any_process):
        display.add(task)
    try:
        yield task
    finally:
        display.remove(task)


def track(
    items: Iterable[Item],
    what: str,
    *,
    unit: str,
    total: int | None = None,
    size: Callable[[Item], int] = lambda item: 1,
) -> Iterator[Item]:
    """The items, whose number that are done is shown. size: units of an item, if it stands for several"""
    if total is None and isinstance(items, Sized):
        total = sum(map(size, items))
    with start(what, total, unit=unit) as task:
        for item in items:
            yield item
            task.advance(size(item))


class Results(rich.console.Console):
    """A console for results, on stdout, of the main process. Only tables on a terminal are fitted to its width."""

    def __init__(self) -> None:
        super().__init__(highlight=False, markup=False, emoji=False, quiet=not DISPLAY.main)  # names stay as they are
        if not self.is_terminal and "COLUMNS" not in os.environ:
            self.width = WIDTH

    def print(self, *objects: Any, **settings: Any) -> None:
        fitted = self.is_terminal and any(isinstance(each, rich.table.Table) for each in objects)
        with DISPLAY.cleared():
            super().print(*objects, **{"soft_wrap": not fitted, **settings})

    def say(self, text: str) -> None:
        """Prints a sentence as it is."""
        self.print(text)


def note(text: str) -> None:
    """Prints a line on stdout that is no result, once for all processes; nothing in mode quiet."""
    if DISPLAY.mode != "quiet":
        Results().say(text)
