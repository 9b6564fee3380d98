"""What a run tells W&B, TensorBoard or trackio: the same names and values for all three (docs/tracking.md).

A tracker is only a copy: log.jsonl and report.json hold everything. If it fails, one warning names it, and the run goes
on without it.
"""

import contextlib
import importlib
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

PROJECT = "specdec"  # or WANDB_PROJECT, TRACKIO_PROJECT
WANDB_ID = "wandb_id"  # file in the folder of a run: the number under which a continued run goes on
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD")  # names of environment variables whose values are never shown
PARTS = ("by_category", "by_tag", "by_prompt", "differences")  # of a report: tables, not figures
TABLE = (
    *("replayed_prompts", "replayed_tau", "replayed_tau_low", "replayed_tau_high", "num_prompts", "tau", "tau_low"),
    *("tau_high", "speedup", "survival_1", "replayed_survival_1"),
)


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
    """The figures of each category of the prompts. Figures that no category has are left out."""
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


def open_tracker(name: str, folder: Path, run: str, settings: dict[str, Any], step: int) -> GeneralTracker:
    """Accelerate's tracker of a run. run: its name; step: those done before, if the run is continued"""
    group = run.rpartition("/")[0] or None  # of a sweep
    tracker: GeneralTracker
    if name == "wandb":
        if not (folder / WANDB_ID).exists():
            files.write_text(folder / WANDB_ID, uuid.uuid4().hex[:8] + "\n")
        netrc = Path.home() / ".netrc"
        logged_in = "WANDB_API_KEY" in os.environ or (netrc.exists() and "api.wandb.ai" in netrc.read_text())
        mode = os.environ.get("WANDB_MODE") or ("online" if logged_in else "offline")
        tracker = WandBTracker(
            os.environ.get("WANDB_PROJECT", PROJECT),
            name=run,
            group=group,
            mode=mode,
            config=settings,
            id=(folder / WANDB_ID).read_text().strip(),
            resume="allow" if mode == "online" else None,
            dir=os.environ.get("WANDB_DIR", str(folder.resolve())),
            settings={"console": "off", "silent": mode == "offline"},
        )
    elif name == "tensorboard":
        tracker = TensorBoardTracker("tensorboard", folder, purge_step=step + 1 if step else None)
    else:
        tracker = TrackioTracker(
            os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=run,
            group=group,
            config=settings,
            embed=False,
            resume="allow" if step else "never",  # by its name, which an older run may have had
        )
    tracker.start()
    if name == "wandb":  # steps that a continued run does again may come twice
        tracker.tracker.define_metric("step")
        tracker.tracker.define_metric("*", step_metric="step")
    elif name == "tensorboard":
        tracker.log({"settings": markdown([{"setting": key, "value": settings[key]} for key in settings])}, step=0)
    return tracker


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table; numbers with four digits."""
    text = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([text(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Tracking:
    """The tracker of a run, or none. Nothing here raises once training has begun.

    name: none, wandb, tensorboard or trackio; folder: of the run
    """

    def __init__(self, name: str, folder: Path):
        self.name, self.folder, self.run = name, folder, ""
        self.tracker: GeneralTracker | None = None

    @contextlib.contextmanager
    def running(self, run: str, settings: dict[str, Any], *, step: int) -> Iterator[None]:
        """Open within. run: its name; step: those done before, if it is continued"""
        self.run = run
        numbers = {key: each for key, each in settings.items() if isinstance(each, int | float)}
        plain = {key: numbers.get(key, without_secrets(str(each))) for key, each in settings.items()}
        if self.name != "none":
            with self._guarded():
                self.tracker = open_tracker(self.name, self.folder, run, plain, step)
        failed = True
        try:
            yield
            failed = False
        finally:
            if self.tracker is not None:
                with self._guarded():
                    if self.name == "wandb":
                        self.tracker.tracker.finish(exit_code=int(failed))
                    else:
                        self.tracker.finish()
            self.tracker = None

    def record(self, step: int, row: dict[str, Any]) -> None:
        """A row of log.jsonl: figures of a step, or of a validation."""
        if "validation" in row:
            self.report(step, "validation", row["validation"])
        else:
            self._log(step, figures_of("train", row))

    def report(self, step: int, kind: str, report: dict[str, Any]) -> None:
        """The figures of a report.json, and its table by category. kind: validation, or best for that of the best step"""
        self._log(step, figures_of(kind, report))
        rows = table_of(report)
        if rows and self.name == "tensorboard":
            self._log(step, {f"{kind}/by_category": markdown(rows)})
        elif rows and self.tracker is not None:
            with self._guarded():
                data = [[*row.values()] for row in rows] if self.name == "wandb" else rows
                table = importlib.import_module(self.name).Table(columns=[*rows[0]], data=data)
                self._log(step, {f"{kind}/by_category": table})

    def page(self, step: int, path: Path, verdict: str) -> None:
        """The page of the run, and its first sentence. TensorBoard holds no files, so it gets the path."""
        if self.name == "tensorboard":
            self._log(step, {"report": f"{verdict}\n\nThe page of this run: `{path}`"})
        elif self.tracker is not None:
            with self._guarded():
                name = re.sub(r"[^\w.-]", "-", f"{self.run}-report")
                artifact = importlib.import_module(self.name).Artifact(name, type="report", description=verdict)
                artifact.add_file(str(path))
                self.tracker.tracker.log_artifact(artifact)
                if self.name == "wandb":
                    self.tracker.tracker.summary["verdict"] = verdict

    def _log(self, step: int, values: dict[str, Any]) -> None:
        if self.tracker is not None:
            with self._guarded():
                if self.name == "wandb":  # whose own steps may not come twice
                    self.tracker.log({"step": step, **values})
                else:
                    self.tracker.log(values, step=step)

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
