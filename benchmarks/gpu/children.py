"""Figures one after the other: in this process, or in child processes with limits, which a fault may end."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import IO, Any

from benchmarks import common
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.checks import child_environment, quote_end
from benchmarks.gpu.figures import Figure, FigureFile, digest_code, list_missing
from benchmarks.gpu.options import GpuReportOptions

POLL_SECONDS = 0.2  # seconds between two looks at a child
TOPICS = ("fast path", "CUDA", "compil")  # words of warnings that the page shows
OVER = "cut, because the minutes were over"


# In this process


def run_figures(figures: list[Figure], bench: Bench, file: FigureFile) -> None:
    """Measures figures, and writes each one at once. Ends the process if the device has failed."""
    for figure in figures:
        file.append(figure.name, begun=True)
        with bench.machine.installed():
            file.append(figure.name, **run_figure(figure, bench))
        bench.machine.free_memory()
        if not bench.machine.is_alive():
            raise SystemExit(f"the device failed in {figure.name}")


def run_figure(figure: Figure, bench: Bench) -> dict:
    """The entries of a figure's line: its values, or why it has none; seconds, captures, compiles and warnings."""
    start, before = time.monotonic(), bench.machine.counts.copy()
    entries: dict[str, Any] = {"part": figure.stage, "subject": figure.subject, "code": digest_code()}
    if bench.machine.stand_in:
        entries["stand_in"] = bench.machine.stand_in
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        try:
            entries["values"] = figure.measure(bench)
        except Exception as error:  # kernels, compilers and libraries on a device that nobody has tried: any error
            traceback.print_exc()
            entries["error"] = describe_error(error)
    messages = dict.fromkeys(str(warning.message) for warning in caught)
    if said := [message for message in messages if any(topic in message for topic in TOPICS)]:
        entries["said"] = said
    counts = {kind: count - before[kind] for kind, count in bench.machine.counts.items()}
    return entries | counts | {"seconds": time.monotonic() - start}


def describe_error(error: Exception) -> str:
    """Class, message, and the innermost place in this project."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if str(common.ROOT) in frame.filename]
    frames = [frame for frame in frames if "site-packages" not in frame.filename]
    text = f"{type(error).__name__}: {error}"
    if not frames:
        return text
    return f"{text} ({Path(frames[-1].filename).relative_to(common.ROOT)}:{frames[-1].lineno})"


# In child processes


class Children:
    """Runs groups of figures in child processes, as long as there is time.

    arguments: words of this command, which a child gets too; since: start of the report, in seconds since 1970
    """

    def __init__(self, options: GpuReportOptions, file: FigureFile, arguments: list[str]):
        self.options, self.file, self.arguments = options, file, arguments
        self.since = time.time()
        self.end = self.since + 60 * options.minutes

    def run_group(self, group: str, figures: list[Figure]) -> None:
        """Measures what is missing of a group. A child that has ended early is followed by another for the rest."""
        redo = self.options.redo
        while time.time() < self.end:
            missing = list_missing(figures, self.file, redo=redo, since=self.since)
            if not missing:
                return
            self._run_child(group, {figure.name: figure for figure in missing})

    def _run_child(self, group: str, missing: dict[str, Figure]) -> None:
        """Runs a child until it ends, or must be ended. Writes an error for the figure that it has left."""
        words = [*self.arguments, f"only={group}", f"since={self.since}"]
        command = [sys.executable, "-m", "benchmarks.gpu_report", *words]
        with tempfile.TemporaryFile("w+", errors="replace") as log:
            process = subprocess.Popen(
                command, env=child_environment(), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                reason = self._watch(process, missing)
            finally:
                end_group(process)
            reason = reason or f"its process ended with {process.returncode}: {read_end(log)}"
        unfinished = self.file.find_begun(self.since)
        tried = self.file.list_tried(self.since)
        if unfinished is not None:
            self._fail(missing[unfinished["figure"]], reason)
        elif not tried & set(missing):  # it ended before its first figure
            self._fail(next(iter(missing.values())), reason)

    def _watch(self, process: subprocess.Popen, missing: dict[str, Figure]) -> str | None:
        """Waits for the end of a child. Returns why it must be ended, None if it has ended by itself."""
        shown = ""
        while process.poll() is None:
            line, moment = self.file.find_begun(self.since), time.time()
            if moment > self.end:
                return OVER
            if line is not None:
                limit = missing[line["figure"]].limit
                if line["figure"] != shown:
                    shown = line["figure"]
                    print(f".. {shown}", flush=True)
                if moment - line["time"] > limit:
                    return f"took more than {limit:.0f} s"
            time.sleep(POLL_SECONDS)
        return None

    def _fail(self, figure: Figure, reason: str) -> None:
        self.file.append(figure.name, part=figure.stage, subject=figure.subject, code=digest_code(), error=reason)


def end_group(process: subprocess.Popen) -> None:
    """Ends a child with all that it has started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def read_end(log: IO[str]) -> str:
    log.seek(0)
    return quote_end(log.read())
