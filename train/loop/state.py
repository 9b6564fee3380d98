"""The files of a run: its log, its checkpoints, and the states from which it resumes."""

import copy
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from specdec import checkpoint
from specdec.core import files, untrusted
from specdec.core.resumable import read_rows
from specdec.heads.base import Head
from specdec.measuring.report import Report
from specdec.target.fingerprint import describe_outdated, is_outdated
from train.data.packing import LONG_PACK
from train.settings.options import list_fixed_settings, read_settings

NUM_STATES = 2  # states that are kept: if the newest is damaged, the one before it is used
STEP_OPTIONS = ("train.batch", "train.accumulation", "processes")  # settings whose product is the packs of a step
LOSS_PREFIX = "head.objective.losses."  # a loss of weight 0 may be one that only one of two versions has
INPUT_NAMES = {  # digests among the settings of a run
    "data": "the training data",
    "target": "the target",
    "embeddings": "the target's embeddings",
    "heldout": "the held-out prompts",
}


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run. Only the main process writes to it.

    spec: drafter's class and arguments, as `checkpoint.save` writes them
    settings: settings that a resumed run may not change, by dotted name; `read_state` has the exceptions

        log.jsonl                         one line for each logged step and each validation
        step_000500/                      a checkpoint, with report.json
        best                              the name of the best checkpoint
        state/step_000500/                weights, optimizer and counters; the newest two are kept
        finished                          written after the last step
        served/step-500/                  the head of the last validation, for an engine
        lock                              while a process writes here
    """

    path: Path
    spec: dict
    settings: dict

    def check_start(self, *, resume: bool | str) -> bool:
        """Whether the run has finished, for resume="auto".

        Raises ValueError rather than overwrite a run, or take one with other settings for this one.
        """
        finished = self.path / "finished"
        if finished.exists() and resume != "auto":
            raise ValueError(
                f"{self.path} holds a finished run ({finished.read_text().strip()} steps). Choose another run=NAME, or "
                "delete the folder to repeat it."
            )
        for path in (*self.path.glob("*"), *(self.path / "state").glob("*")):  # a log could be a link to another file
            untrusted.check_link(path, self.path)
        has_begun = (self.path / "log.jsonl").exists() or (self.path / "state").exists()
        if has_begun and not resume:
            raise ValueError(
                f"{self.path} holds a run that has begun. Continue it with resume=true, choose another run=NAME, or "
                "delete the folder."
            )
        if finished.exists() and (self.path / "config.yaml").exists():
            recorded_settings = list_fixed_settings(read_settings(self.path / "config.yaml"))
            of_step = {key: self.settings.get(key) for key in STEP_OPTIONS if key in self.settings}
            self.refuse_changes(recorded_settings | of_step)  # batch, accumulation and processes may differ
        return finished.exists()

    # The log

    def log(self, step: int, figures: dict) -> None:
        files.append_text(self.path / "log.jsonl", json.dumps({"step": step, **figures}) + "\n", synced=False)

    def read_log(self) -> list[dict]:
        return read_rows(self.path / "log.jsonl")

    def log_last(self, step: int, figures: dict) -> None:
        """Logs what follows the last state of a run. A run that died there does it again, and replaces this line."""
        kept_rows = [row for row in self.read_log() if not row.get("last")]
        rows = [*kept_rows, {"step": step, "last": True, **figures}]
        files.write_text(self.path / "log.jsonl", "".join(json.dumps(row) + "\n" for row in rows))

    def go_back(self, step: int, best: dict) -> None:
        """Restores log and best step as they were when the state of `step` was saved; -1 for a run without a state.

        Later steps will be done again, and logged again.
        """
        files.restore_folders(self.path)
        if best:
            self.mark_best(_name_step(best["step"]))
        else:
            (self.path / "best").unlink(missing_ok=True)
        log = self.path / "log.jsonl"
        if log.exists():
            kept = [row for row in self.read_log() if row["step"] <= step]
            files.write_text(log, "".join(json.dumps(row) + "\n" for row in kept))

    def finish(self, step: int) -> None:
        files.write_text(self.path / "finished", f"{step}\n")

    # Checkpoints

    def save_checkpoint(self, drafter: Head, report: Report) -> str:
        """Saves a checkpoint of the report's step. -> its name, as `mark_best` takes it"""
        assert report.step is not None
        name = _name_step(report.step)
        checkpoint.save(self.path / name, drafter, self.spec, extra={"report.json": report.to_json()})
        return name

    def write_report(self, name: str, report: Report) -> None:
        """Replaces the report of a checkpoint whose drafts have been decoded."""
        files.replace_document(self.path / name / "report.json", report.to_json())

    def mark_best(self, name: str) -> None:
        files.write_text(self.path / "best", name + "\n")

    def read_best(self) -> tuple[str, Report, dict[str, Tensor]] | None:
        """Name, report and weights of the checkpoint that `mark_best` named; None if there is none."""
        if not (self.path / "best").exists():
            return None
        best = checkpoint.resolve(self.path / "best")
        report = best / "report.json"
        weights = checkpoint.read_tensors(best / "drafter.safetensors")
        files.check_files(report, best / "drafter.safetensors")
        return best.name, Report.from_json(checkpoint.read_json(report), source=str(report)), weights

    # States

    def list_states(self) -> list[Path]:
        """The folders of the states, the newest first."""
        found = [path for path in (self.path / "state").glob("step_*") if path.name.removeprefix("step_").isdigit()]
        return sorted(found, key=_read_step, reverse=True)

    def find_saved_step(self) -> int:
        """The step of the newest state; 0 if there is none."""
        return max(map(_read_step, self.list_states()), default=0)

    def save_state(self, step: int, *, weights: dict[str, Tensor], optimizer: dict, document: dict) -> None:
        """Writes a state as safetensors and JSON. Older states are removed only when the new one is complete.

        optimizer: state_dict; document: counters, as JSON
        """
        moments, counts = pack_state(optimizer["state"])
        if (self.path / "log.jsonl").exists():
            files.sync_path(self.path / "log.jsonl")  # a resumed run does not log these steps again
        counters = {"step": step, "groups": optimizer["param_groups"], "counts": counts, "about": self.settings}
        files.write_folder(
            self.path / "state" / _name_step(step),
            tensors={"drafter.safetensors": weights, "optimizer.safetensors": moments},
            documents={"state.json": counters | document},
        )
        kept_states = [path for path in self.list_states() if _read_step(path) <= step][:NUM_STATES]
        for old in (self.path / "state").iterdir():
            if old not in kept_states:
                files.remove_folder(old)

    def read_state(self) -> tuple[dict[str, Tensor], dict, dict] | None:
        """Reads weights, optimizer state_dict and document of the newest state; None without a state.

        A damaged state is named in a warning, and the one before it is used. Another number of processes may continue a
        run, with as many packs in a step or with others; while it is the same, so must be the packs of a step.
        Raises ValueError if the run was begun with other settings, or if every state is damaged.
        """
        for folder in self.list_states():
            try:
                state = _read_state(folder)
            except ValueError as error:
                if folder == self.list_states()[-1]:
                    raise ValueError(
                        f"{self.path} has no state that is whole, so the run cannot be continued. The last one: {error}"
                    ) from error
                warnings.warn(f"{error} The state before it is used.", stacklevel=2)
            else:
                self.refuse_changes(state[2]["about"])
                return state
        return None

    def refuse_changes(self, recorded: dict) -> None:
        """Raises ValueError for settings or inputs that differ from the run's start. recorded: the state's settings"""
        recorded = {key: checkpoint.MOVED_CLASSES.get(str(value), value) for key, value in recorded.items()}
        changes = self.find_changes(recorded)
        settings = [f"{key} was {old}, is {new}" for key, old, new in changes if key not in INPUT_NAMES]
        if settings:
            raise ValueError(
                f"{self.path} was begun with other settings: {'; '.join(settings)}. Resume with the settings it was "
                "begun with, or start another run=NAME."
            )
        self.refuse_inputs([change for change in changes if change[0] in INPUT_NAMES], recorded)

    def refuse_inputs(self, changes: list[tuple[str, Any, Any]], recorded: dict) -> None:
        """Raises ValueError for other inputs. changes: see `find_changes`; recorded: the state's settings"""
        if is_outdated(recorded.get("target")):
            clause = describe_outdated(f"{self.path} names its target", "the target here")
            warnings.warn(f"{clause}: if it is another, start another run=NAME.", stacklevel=2)
            changes = [change for change in changes if change[0] != "target"]
        inputs = {key: f"{INPUT_NAMES[key]} (digest {old} then, {new} now)" for key, old, new in changes if old and new}
        if not inputs:
            return
        is_reordered = "data" in inputs and recorded.get("data.length", 0) > LONG_PACK
        older = " Or an earlier version began it, which packed long rows in another order: finish it with that."
        raise ValueError(
            f"{self.path} was begun with other inputs: {'; '.join(inputs.values())}. Put them back as they were, or "
            f"start another run=NAME.{older if is_reordered else ''}"
        )

    def find_changes(self, recorded: dict) -> list[tuple[str, Any, Any]]:
        """Name, recorded value and value of each setting that differs and may not. recorded: the state's settings"""
        same_packs = count_step_packs(recorded) == count_step_packs(self.settings)
        is_free = same_packs or recorded.get("processes") != self.settings.get("processes")
        free_names = STEP_OPTIONS if is_free else ()
        gone_losses = [key for key in recorded if key.startswith(LOSS_PREFIX) and key not in self.settings]
        changes = []
        for key in [*self.settings, *gone_losses]:
            old, new = recorded.get(key), self.settings.get(key)
            is_unused_loss = key.startswith(LOSS_PREFIX) and not (old or new)
            if old != new and key not in free_names and not is_unused_loss:
                changes.append((key, old, new))
        return changes


def count_step_packs(settings: dict) -> int:
    """Packs of a step, in all processes and micro-batches."""
    return math.prod(settings.get(key, 1) for key in STEP_OPTIONS)


def _name_step(step: int) -> str:
    return f"step_{step:06d}"


def _read_step(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _read_state(folder: Path) -> tuple[dict[str, Tensor], dict, dict]:
    """Raises ValueError if a file is missing or damaged."""
    names = ("state.json", "drafter.safetensors", "optimizer.safetensors")
    document = checkpoint.read_json(folder / names[0], advice="The state of a run has it")
    weights, moments = (checkpoint.read_tensors(folder / name) for name in names[1:])
    files.check_files(*(folder / name for name in names))
    optimizer = {"state": unpack_state(moments, document.get("counts", {})), "param_groups": document["groups"]}
    return weights, optimizer, document


def pack_state(state: dict) -> tuple[dict[str, Tensor], dict]:
    """The tensors of an optimizer's state by their keys, joined by dots, and its other values, which JSON can hold.

    state: `state` of a state_dict, after `copy_state`. No two tensors share memory, which safetensors would refuse.
    """
    leaves = dict(_iterate_leaves(state))
    tensors = {place: value for place, value in leaves.items() if isinstance(value, Tensor)}
    return tensors, {place: value for place, value in leaves.items() if place not in tensors}


def unpack_state(tensors: dict[str, Tensor], values: dict) -> dict:
    """The inverse of `pack_state`."""
    state: dict = {}
    for place, value in {**tensors, **values}.items():
        number, *inner, key = place.split(".")
        entry = state.setdefault(int(number), {})
        for name in inner:
            entry = entry.setdefault(name, {})
        entry[key] = value
    return state


def _iterate_leaves(state: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _iterate_leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


class StateSaver:
    """Decides when states are saved, and writes them in a thread. Leaving the context waits for the thread.

    save: `RunFolder.save_state`; every, minutes: steps and minutes between two states, None or 0 for no such rule
    """

    def __init__(self, save: Callable[..., None], *, every: int | None, minutes: float | None):
        self.save, self.every, self.minutes = save, every, minutes
        self.thread = ThreadPoolExecutor(1, "saving")
        self.pending_write: Future[None] | None = None
        self.saved_at = time.monotonic()

    def __enter__(self) -> "StateSaver":
        self.saved_at = time.monotonic()
        return self

    def __exit__(self, kind, *_) -> None:
        try:
            self.wait()
        except Exception:
            if kind is None:  # else training ends by an error already
                raise
        finally:
            self.thread.shutdown()

    def is_step_due(self, step: int) -> bool:
        """Whether the state of a step is to be saved; the same in all processes."""
        return step % self.every == 0 if self.every else False

    def is_overdue(self) -> bool:
        """Whether a state is due by minutes. Raises ValueError if the last state could not be written."""
        if self.pending_write is not None and self.pending_write.done():
            self.wait()
        return time.monotonic() - self.saved_at >= 60 * self.minutes if self.minutes else False

    def write(self, step: int, *, weights: dict[str, Tensor], optimizer: dict, document: dict) -> None:
        """Starts to write a state, once the previous one is written. Training must not change the tensors.

        Raises ValueError if the previous state could not be written.
        """
        self.wait()
        self.saved_at = time.monotonic()
        arguments = {"weights": weights, "optimizer": optimizer, "document": copy.deepcopy(document)}
        self.pending_write = self.thread.submit(self.save, step, **arguments)

    def wait(self) -> None:
        """Waits until the last state is written. Raises ValueError if it could not be written."""
        coming, self.pending_write = self.pending_write, None
        if coming is not None:
            coming.result()
