"""Figures of a GPU on disk: one JSON line each, on the disk before the next figure begins, so that none is lost.

A line is {"figure", "begun"} when its measurement begins, then {"figure", "values", ..} or {"figure", "error", ..}.
A finished figure stays finished when a later attempt fails.
"""

import functools
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import common

CODE_FOLDERS = ("specdec", "train")  # code that figures depend on


@dataclass(frozen=True)
class Figure:
    """A measurement.

    stage: part of the report; group: name of the figures of one process, which share a target and compiled passes
    subject: table on the page; measure: takes the Bench of the process, and returns values by name
    limit: seconds that it may take
    """

    name: str
    stage: int
    group: str
    subject: str
    measure: Callable[[Any], dict]
    limit: float = 150.0


@functools.cache
def digest_code() -> str:
    """8 hex digits that identify the code which is measured."""
    files = [path for folder in CODE_FOLDERS for path in (common.ROOT / folder).rglob("*.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(files))).hexdigest()[:8]


class FigureFile:
    """Lines of figures, which processes of the report append to."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, name: str, **entries: Any) -> None:
        """Adds a line, and waits until the disk has it."""
        line = json.dumps({"figure": name, "time": time.time(), **entries}) + "\n"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+") as file:
            if file.tell() and not self._ends_with_line(file.tell()):  # a process ended within a line
                line = "\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def _ends_with_line(self, size: int) -> bool:
        with open(self.path, "rb") as file:
            file.seek(size - 1)
            return file.read(1) == b"\n"

    def read_lines(self) -> list[dict]:
        """All whole lines."""
        lines = []
        for text in self.path.read_text().splitlines() if self.path.is_file() else ():
            try:
                lines.append(json.loads(text))
            except ValueError:  # cut
                continue
        return lines

    def read(self) -> dict[str, dict]:
        """The newest line with values of each figure, else its newest error."""
        figures: dict[str, dict] = {}
        for line in self.read_lines():
            if "values" in line or ("error" in line and "values" not in figures.get(line["figure"], {})):
                figures[line["figure"]] = line
        return figures

    def list_tried(self, since: float) -> set[str]:
        """Figures that were measured, or failed, after a time in seconds since 1970."""
        return {line["figure"] for line in self.read_lines() if line["time"] >= since and "begun" not in line}

    def find_begun(self, since: float) -> dict | None:
        """The line of a figure that has begun after a time and has not ended; None: the newest figure has ended."""
        lines = self.read_lines()
        return lines[-1] if lines and "begun" in lines[-1] and lines[-1]["time"] >= since else None

    def take_over(self, path: Path) -> None:
        """Appends the finished figures of another file that this one lacks. Raises ValueError if there is no file."""
        if not path.is_file():
            raise ValueError(f"earlier={path} is not there: name the .jsonl file of an earlier report.")
        finished = {name for name, line in self.read().items() if "values" in line}
        for name, line in FigureFile(path).read().items():
            if "values" in line and name not in finished:
                self.append(name, **{key: value for key, value in line.items() if key != "figure"})


def choose_path(out: str, *, dry_run: bool) -> Path:
    """The file of the figures. Those of a dry run are never among real ones. out: a name, or a folder"""
    folder = Path(out)
    is_folder = out.endswith(os.sep) or folder.is_dir()
    base = folder / "gpu_report" if is_folder else folder
    return base.with_name(f"{base.name}.dry.jsonl" if dry_run else f"{base.name}.jsonl")


def list_missing(
    figures: Iterable[Figure], file: FigureFile, *, redo: bool = False, since: float = 0.0
) -> list[Figure]:
    """The figures that are to be measured: those without values, failed ones last.

    redo: finished ones, too; since: without those that were tried after this time
    """
    results, tried = file.read(), file.list_tried(since) if since else set()
    waiting = [figure for figure in figures if figure.name not in tried]
    if redo:
        return waiting
    missing = [figure for figure in waiting if "values" not in results.get(figure.name, {})]
    return sorted(missing, key=lambda figure: figure.name in results)
