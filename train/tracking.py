"""What a run tells a tracker. W&B, TensorBoard and trackio get the same names, values and tables (docs/tracking.md).

A tracker is only a copy: log.jsonl and report.json hold everything. One that fails is named in a warning, and the run goes
on without it.
"""

import contextlib
import importlib.util
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from train import trackers

SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")  # names of environment variables whose values are never shown
PARTS = ("by_category", "by_tag", "by_prompt", "differences")  # of a report: tables, not figures
TABLE = (
    *("replayed_prompts", "replayed_tau", "replayed_tau_low", "replayed_tau_high", "num_prompts", "tau", "tau_low", "tau_high"),
    *("speedup", "survival_1", "replayed_survival_1"),
)  # fmt: skip


def figures_of(kind: str, values: dict[str, Any]) -> dict[str, float]:
    """Every number of a row of log.jsonl or of a report.json, as KIND/name.

    An interval `tau_ci` becomes tau_low and tau_high, a list by depth survival_1, survival_2 .., and figures inside `auto`
    auto_speedup and so on. Text, true and false, numbers that are not finite, and parts of the prompts are left out.
    """
    found: dict[str, float] = {}

    def add(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                add(f"{name}_{key}", each)
        elif isinstance(value, list):
            ends = ("low", "high") if name.endswith("_ci") else range(1, 1 + len(value))
            for end, each in zip(ends, value):
                add(f"{name.removesuffix('_ci')}_{end}", each)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            found[f"{kind}/{name}"] = value

    for name, value in values.items():
        if name not in PARTS:
            add(name, value)
    return found


def table_of(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The figures of each category of the prompts; a figure that no category has is left out."""
    rows = {name: figures_of("", part) for name, part in report.get("by_category", {}).items()}
    known = [key for key in TABLE if any(f"/{key}" in row for row in rows.values())]
    return [{"category": name, **{key: row.get(f"/{key}") for key in known}} for name, row in rows.items()]


def check(name: str) -> None:
    """Raises ValueError for a tracker that is not installed."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise ValueError(f"tracker={name} needs a package that is not installed: pip install {name}")


def without_secrets(text: str) -> str:
    """The text without passwords inside addresses and without the values of secret environment variables."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= 8:
            text = text.replace(value, "***")
    return re.sub(r"//[^/@\s]+@", "//***@", text)


class Tracker(Protocol):
    """What `train/trackers.py` has one of for each service. Methods may raise anything."""

    def log(self, step: int, figures: dict[str, float]) -> None: ...

    def table(self, step: int, name: str, rows: list[dict[str, Any]]) -> None: ...

    def page(self, step: int, path: Path, verdict: str) -> None: ...

    def close(self, *, failed: bool) -> None: ...


class Tracking:
    """The tracker of a run, or none. Nothing here raises once training has begun.

    name: none, wandb, tensorboard or trackio
    folder: of the run, which keeps what continues it in the same place
    """

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder
        self.tracker: Tracker | None = None

    @contextlib.contextmanager
    def running(self, run: str, settings: dict[str, Any], *, step: int) -> Iterator[None]:
        """Open within. run: its name; step: those done before, if it is continued"""
        plain = {
            key: value if isinstance(value, int | float) else without_secrets(str(value))
            for key, value in settings.items()
        }
        if self.name != "none":
            with self._guarded():
                self.tracker = trackers.MAKERS[self.name](self.folder, run, plain, step)
        failed = True
        try:
            yield
            failed = False
        finally:
            self._tell(lambda tracker: tracker.close(failed=failed))
            self.tracker = None

    def record(self, step: int, row: dict[str, Any]) -> None:
        """A row of log.jsonl: figures of a step, or of a validation."""
        if "validation" in row:
            self.report(step, "validation", row["validation"])
        else:
            self._tell(lambda tracker: tracker.log(step, figures_of("train", row)))

    def report(self, step: int, kind: str, report: dict[str, Any]) -> None:
        """The figures of a report.json, and its table by category. kind: validation, or best for that of the best step"""
        rows = table_of(report)
        self._tell(lambda tracker: tracker.log(step, figures_of(kind, report)))
        if rows:
            self._tell(lambda tracker: tracker.table(step, f"{kind}/by_category", rows))

    def page(self, step: int, path: Path, verdict: str) -> None:
        """The page of the run, and its first sentence."""
        self._tell(lambda tracker: tracker.page(step, path, verdict))

    def _tell(self, call: Callable[[Tracker], None]) -> None:
        if self.tracker is not None:
            with self._guarded():
                call(self.tracker)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.tracker = None
            reason = without_secrets(f"{type(error).__name__}: {error}".split("\n")[0])
            warnings.warn(
                f"tracker={self.name} has failed ({reason}). The run goes on without it; {self.folder}/log.jsonl has all figures.",
                stacklevel=4,
            )
