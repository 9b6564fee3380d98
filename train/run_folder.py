"""The folder of a run: its log, its checkpoints, and the state that a resumed run continues from."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from specdec import checkpoint, untrusted
from specdec.drafter import Head
from specdec.report import Report


@dataclass(frozen=True)
class RunFolder:
    """Only the main process writes.

    spec: what `checkpoint.save` writes of the drafter
    settings: what must not change between a run and its resumption, by dotted name

        log.jsonl                         one line for each logged step and each validation
        step_000500/                      a checkpoint, with report.json
        best                              the name of the best checkpoint
        state/step_000500/                weights, optimizer and counters; only the newest is kept
        finished                          written after the last step
    """

    path: Path
    spec: dict
    settings: dict

    def check(self, *, resume: bool) -> None:
        """Raises ValueError rather than overwrite a run, finished or begun."""
        finished = self.path / "finished"
        if finished.exists():
            raise ValueError(
                f"{self.path} holds a finished run ({finished.read_text().strip()} steps). Choose another run=NAME, or "
                "delete the folder to repeat it."
            )
        for path in self.path.rglob("*"):  # a stranger's run could have its log written to another file
            untrusted.check_link(path, self.path)
        begun = (self.path / "log.jsonl").exists() or (self.path / "state").exists()
        if begun and not resume:
            raise ValueError(
                f"{self.path} holds a run that has begun. Continue it with resume=true, choose another run=NAME, or delete "
                "the folder."
            )

    def log(self, step: int, figures: dict) -> None:
        with (self.path / "log.jsonl").open("a") as log:
            log.write(json.dumps({"step": step, **figures}) + "\n")

    def cut_log(self, step: int) -> None:
        """Removes the lines behind `step`, whose work will be done again."""
        log = self.path / "log.jsonl"
        if log.exists():
            kept = [line for line in log.read_text().splitlines() if line and json.loads(line)["step"] <= step]
            log.write_text("".join(line + "\n" for line in kept))

    def save_checkpoint(self, drafter: Head, report: Report) -> str:
        """-> the checkpoint's name, as `mark_best` takes it"""
        name = f"step_{report.step:06d}"
        checkpoint.save(self.path / name, drafter, self.spec, extra={"report.json": report.to_json()})
        return name

    def mark_best(self, name: str) -> None:
        checkpoint.write_text(self.path / "best", name + "\n")

    def finish(self, step: int) -> None:
        checkpoint.write_text(self.path / "finished", f"{step}\n")

    def saved_step(self) -> int:
        """The step of the newest state; 0 if there is none."""
        saved = sorted((self.path / "state").glob("step_??????"))
        return int(saved[-1].name.removeprefix("step_")) if saved else 0

    def save_state(self, step: int, *, weights: dict[str, Tensor], optimizer: dict, document: dict) -> None:
        """Safetensors and JSON. The previous state is removed only when the new one is complete.

        optimizer: its state_dict; document: counters, as JSON
        """
        moments = {
            f"{number}.{key}": torch.as_tensor(value)
            for number, state in optimizer["state"].items()
            for key, value in state.items()
        }
        goal = self.path / "state" / f"step_{step:06d}"
        checkpoint.write_folder(
            goal,
            tensors={"drafter.safetensors": weights, "optimizer.safetensors": moments},
            documents={
                "state.json": {"step": step, "groups": optimizer["param_groups"], "about": self.settings, **document}
            },
        )
        for old in (self.path / "state").iterdir():
            if old != goal:
                checkpoint.remove(old)

    def read_state(self) -> tuple[dict[str, Tensor], dict, dict] | None:
        """-> the newest state's weights, optimizer state_dict and document; None without a state.

        Raises ValueError if the run was begun with other settings.
        """
        folder = self.path / "state" / f"step_{self.saved_step():06d}"
        if not folder.exists():
            return None
        document = checkpoint.read_json(folder / "state.json")
        before = document["about"]
        changed = [
            f"{key} was {before.get(key)}, is {value}"
            for key, value in self.settings.items()
            if before.get(key) != value
        ]
        if changed:
            raise ValueError(
                f"{self.path} was begun with other settings: {'; '.join(changed)}. Resume with the settings it was begun "
                "with, or start another run=NAME."
            )
        state: dict[int, dict] = {}
        for name, value in checkpoint.read_tensors(folder / "optimizer.safetensors").items():
            number, key = name.split(".", 1)
            state.setdefault(int(number), {})[key] = value
        optimizer = {"state": state, "param_groups": document["groups"]}
        return checkpoint.read_tensors(folder / "drafter.safetensors"), optimizer, document
