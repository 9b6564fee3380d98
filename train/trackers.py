"""One class for each tracker, which only writes: what is written is made in train/tracking.py.

Each takes the folder of the run, its name, its settings (numbers and texts) and the steps done before.
"""

import os
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specdec.core import files

PROJECT = "specdec"
WANDB_ID = "wandb_id"  # a file in the folder of a run


def wandb_logged_in() -> bool:
    """Whether W&B could upload: an API key in the environment or in ~/.netrc."""
    netrc = Path.home() / ".netrc"
    return "WANDB_API_KEY" in os.environ or (netrc.exists() and "api.wandb.ai" in netrc.read_text())


class Wandb:
    """A run of Weights & Biases, continued under the number that the run's folder keeps; offline unless somebody is logged in."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any], step: int):
        import wandb

        self.wandb, self.name = wandb, name
        kept = folder / WANDB_ID
        if not kept.exists():
            files.write_text(kept, uuid.uuid4().hex[:8] + "\n")
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if wandb_logged_in() else "offline")
        self.run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            name=name,
            group=name.rpartition("/")[0] or None,  # of a sweep
            id=kept.read_text().strip(),
            resume="allow" if mode == "online" else None,
            config=settings,
            dir=os.environ.get("WANDB_DIR", str(folder.resolve())),
            mode=mode,
            settings=wandb.Settings(console="off", silent=mode == "offline"),
        )
        self.run.define_metric("step")  # steps that a continued run does again may come twice
        self.run.define_metric("*", step_metric="step")

    def log(self, step: int, figures: dict[str, float]) -> None:
        self.run.log({"step": step, **figures})

    def table(self, step: int, name: str, rows: list[dict[str, Any]]) -> None:
        table = self.wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        self.run.log({"step": step, name: table})

    def page(self, step: int, path: Path, verdict: str) -> None:
        artifact = self.wandb.Artifact(artifact_name(self.name), type="report")
        artifact.add_file(str(path))
        self.run.log_artifact(artifact)
        self.run.summary["verdict"] = verdict

    def close(self, *, failed: bool) -> None:
        self.run.finish(exit_code=int(failed))


class TensorBoard:
    """Event files in tensorboard/ of the run's folder. They hold no files, so of the page they have the place and the verdict."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any], step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)
        self.writer.add_text("settings", markdown([{"setting": key, "value": settings[key]} for key in settings]), 0)

    def log(self, step: int, figures: dict[str, float]) -> None:
        for name, value in figures.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def table(self, step: int, name: str, rows: list[dict[str, Any]]) -> None:
        self.writer.add_text(name, markdown(rows), step)

    def page(self, step: int, path: Path, verdict: str) -> None:
        self.writer.add_text("report", f"{verdict}\n\nThe page of this run: `{path}`", step)

    def close(self, *, failed: bool) -> None:
        self.writer.close()


def markdown(rows: list[dict[str, Any]]) -> str:
    """A table; numbers with four digits."""
    text = lambda value: f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([text(value) for value in row.values()] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


class Trackio:
    """A run of trackio, in the folder TRACKIO_DIR, or on the server or Space that its own variables name."""

    def __init__(self, folder: Path, name: str, settings: dict[str, Any], step: int):
        import trackio

        self.trackio, self.name = trackio, name
        self.run = trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT),
            name=name,
            group=name.rpartition("/")[0] or None,  # of a sweep
            config=settings,
            resume="allow" if step else "never",  # by its name, which an older run may have had
            embed=False,
        )

    def log(self, step: int, figures: dict[str, float]) -> None:
        self.run.log(figures, step=step)

    def table(self, step: int, name: str, rows: list[dict[str, Any]]) -> None:
        self.run.log({name: self.trackio.Table(columns=list(rows[0]), data=rows)}, step=step)

    def page(self, step: int, path: Path, verdict: str) -> None:
        artifact = self.trackio.Artifact(artifact_name(self.name), type="report", description=verdict)
        artifact.add_file(str(path))
        self.run.log_artifact(artifact)

    def close(self, *, failed: bool) -> None:
        self.run.finish()


def artifact_name(run: str) -> str:
    """The name of the artifact that holds the page of a run."""
    return re.sub(r"[^\w.-]", "-", f"{run}-report")


MAKERS: dict[str, Callable[[Path, str, dict[str, Any], int], Any]] = {
    "wandb": Wandb,
    "tensorboard": TensorBoard,
    "trackio": Trackio,
}
