"""Figures of a run for W&B, TensorBoard or trackio, by accelerate, under the same names for all (docs/tracking.md).

A tracker is only a copy: log.jsonl and report.json hold everything. If it fails, one warning names it, and the run goes
on without it.
"""

import contextlib
import importlib.util
import math
import os
import re
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.tracking import GeneralTracker, TensorBoardTracker, TrackioTracker, WandBTracker

from specdec.core import files

PROJECT = "specdec"  # name of the project, unless WANDB_PROJECT or TRACKIO_PROJECT names another
WANDB_ID = "wandb_id"  # file in a run's folder: the number under which a continued run goes on
STEP = "step"  # W&B's axis of charts: its own count shifts where a continued run repeats steps
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")  # names of environment variables whose values are never shown
SERVED = "served"  # figures of an engine
TABLE_KEYS = (SERVED, "by_category", "by_tag", "differences", "samples")  # of a report: tables, not figures


def list_figures(kind: str, values: dict[str, Any]) -> dict[str, float]:
    """Every number of a row of log.jsonl or of a report.json, as KIND/name.

    An interval `tau_ci` becomes tau_low and tau_high. A list by depth becomes survival_1, survival_2 .., and figures
    inside `auto` become auto_speedup and so on. Those of an engine are served/swap_seconds, and by load served/8_tau.
    Texts, true and false, numbers that are not finite, and tables are left out. kind: train, validation or best
    """
    figures: dict[str, float] = {}

    def add_figure(name: str, value: Any) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                add_figure(f"{name}_{key}", item)
        elif isinstance(value, list):
            ends = ("low", "high") if name.endswith("_ci") else range(1, 1 + len(value))
            for end, item in zip(ends, value):
                add_figure(f"{name.removesuffix('_ci')}_{end}", item)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            figures[f"{kind}/{name}"] = value

    for name, value in values.items():
        if name not in TABLE_KEYS:
            add_figure(name, value)
    served = dict(values.get(SERVED) or {})
    served |= served.pop("loads", {})
    return figures | (list_figures(f"{kind}/{SERVED}".removeprefix("validation/"), served) if served else {})


def check_installed(name: str) -> None:
    """Raises ValueError for a tracker that is not installed."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise ValueError(f"tracker={name} needs a package that is not installed: pip install {name}")


def hide_secrets(text: str) -> str:
    """The text without passwords inside addresses and without the values of secret environment variables."""
    for name, value in os.environ.items():
        if SECRET.search(name) and len(value) >= 8:
            text = text.replace(value, "***")
    return re.sub(r"//[^/@\s]+@", "//***@", text)


def open_tracker(name: str, folder: Path, run: str, settings: dict[str, Any]) -> GeneralTracker:
    """Accelerate's tracker of a run, started. run: the run's name, under which trackio continues it"""
    project = os.environ.get(f"{name.upper()}_PROJECT", PROJECT)
    tracker: GeneralTracker
    if name == "wandb":
        if not (folder / WANDB_ID).exists():
            files.write_text(folder / WANDB_ID, uuid.uuid4().hex[:8] + "\n")
        tracker = WandBTracker(
            project,
            name=run,
            dir=os.environ.get("WANDB_DIR", str(folder.resolve())),
            config=settings,
            id=(folder / WANDB_ID).read_text().strip(),
            resume="allow",
            settings={"console": "off"},
        )
    elif name == "tensorboard":
        tracker = TensorBoardTracker("tensorboard", folder)
    else:
        tracker = TrackioTracker(project, name=run, config=settings, embed=False, resume="allow")
    tracker.start()
    if isinstance(tracker, WandBTracker):
        tracker.run.define_metric(STEP)
        tracker.run.define_metric("*", step_metric=STEP)
    return tracker


class Tracking:
    """The tracker of a run, or none. No method raises once training has begun.

    name: none, wandb, tensorboard or trackio; folder: the run's folder
    """

    def __init__(self, name: str, folder: Path):
        self.name, self.folder = name, folder
        self.tracker: GeneralTracker | None = None

    @contextlib.contextmanager
    def running(self, run: str, settings: dict[str, Any]) -> Iterator[None]:
        """Within, the tracker is open. run: the run's name; settings: by dotted name, shown without secrets"""
        numbers = {key: value for key, value in settings.items() if isinstance(value, int | float)}
        shown_settings = {key: numbers.get(key, hide_secrets(str(value))) for key, value in settings.items()}
        if self.name != "none":
            with self._guarded():
                self.tracker = open_tracker(self.name, self.folder, run, shown_settings)
        try:
            yield
        finally:
            if self.tracker is not None:
                with self._guarded():
                    self.tracker.finish()
            self.tracker = None

    def record(self, step: int, row: dict[str, Any]) -> None:
        """Sends a row of log.jsonl: figures of a step, or of a validation."""
        self.log(step, "validation" if "validation" in row else "train", row.get("validation", row))

    def log(self, step: int, kind: str, values: dict[str, Any]) -> None:
        """Sends the numbers of a row or of a report.json. kind: train, validation; best: the best step's report"""
        if self.tracker is not None:
            axis = {STEP: step} if self.name == "wandb" else {}
            with self._guarded():
                self.tracker.log(list_figures(kind, values) | axis, step=step)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Within, an error drops the tracker and becomes one warning."""
        try:
            yield
        except Exception as error:
            self.tracker = None
            reason = hide_secrets(f"{type(error).__name__}: {error}".split("\n")[0])
            warnings.warn(
                f"tracker={self.name} has failed ({reason}). The run goes on without it; "
                f"{self.folder}/log.jsonl has all figures.",
                stacklevel=4,
            )
