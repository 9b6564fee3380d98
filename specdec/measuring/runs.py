"""The trained heads that are compared, and the target that they share."""

from specdec.options.command_line import split_list

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec import checkpoint, loading
from specdec.core import hub
from specdec.core.resumable import digest
from specdec.heads.base import Head
from specdec.measuring.measure import FROZEN
from specdec.measuring.report import Report, Training
from specdec.options import proposers
from specdec.options.target import TargetOptions
from specdec.target.model import Target


@dataclass(frozen=True)
class Run:
    """One of several checkpoints that are compared."""

    name: str
    folder: Path
    drafter: Head
    baseline: str  # a name of its target's plain decoding: FROZEN, or one of its own if it adapts the target
    training: Training | None  # from its report; None for older checkpoints


def load_runs(listed: str, options: TargetOptions) -> list[Run]:
    """The checkpoints of a comma list beside one frozen target; a drafter that adapts its target gets one of its own.

    Raises ValueError as `load`, and if two have the same name.
    """
    given = [Path(folder) for folder in split_list(listed)]
    names = [checkpoint.name_of(folder) for folder in given]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"Two runs are called {', '.join(twice)}: list each once, or rename a folder.")
    runs: list[Run] = []
    targets: dict[str, Target] = {}
    for name, folder in zip(names, map(checkpoint.resolve, given)):
        baseline = f"the target adapted by {name}" if checkpoint.head_class(folder).adapts_target else FROZEN
        if baseline not in targets:
            targets[baseline] = loading.load_target(options, default=loading.target_of(folder, options.name)).target
        drafter = checkpoint.load(folder, targets[baseline])
        path = folder / "report.json"
        report = Report.from_json(checkpoint.read_json(path), source=str(path)) if path.exists() else None
        runs.append(Run(name, folder, drafter, baseline, report.training if report else None))
    return runs


def shared_target(runs: list[Run], options: TargetOptions, *, head: str | None = None) -> loading.Opened:
    """The frozen target of the runs. Where there is none, it is loaded: that of the first run, or of `head`."""
    frozen = [run.drafter.target for run in runs if run.baseline == FROZEN]
    if frozen:
        return loading.open_target(frozen[0])
    folder = runs[0].folder if runs else head and checkpoint.resolve(head)
    return loading.load_target(options, default=loading.target_of(folder, options.name) if folder else None)


def find_heads(runs: Iterable[Run], configs: Iterable[proposers.Config] = ()) -> dict[str, Path]:
    """The folders of all trained heads, of the runs and inside proposers, by name."""
    folders = [Path(head) for config in configs for head in proposers.heads(config)]
    names = {folder: checkpoint.name_of(folder) for folder in folders} | {run.folder: run.name for run in runs}
    return {name: folder for folder, name in names.items()}


def describe_weights(runs: Sequence[Run]) -> dict[str, str]:
    """Revision and digest of each head's weights, by name."""
    weights = {run.name: digest((run.folder / "drafter.safetensors").read_bytes()) for run in runs}
    return {run.name: f"{hub.pinned(run.folder)} {weights[run.name]}" for run in runs}
