"""The trained heads that are compared, and the target that they share."""

from specdec.options.command_line import split

from dataclasses import dataclass
from pathlib import Path

from specdec import checkpoint, loading
from specdec.heads.base import Head
from specdec.measuring.measure import FROZEN
from specdec.measuring.report import Report, Training
from specdec.target.model import Target


@dataclass(frozen=True)
class Run:
    """One of several checkpoints that are compared."""

    name: str
    folder: Path
    drafter: Head
    baseline: str  # a name of its target's plain decoding: FROZEN, or one of its own if it adapts the target
    training: Training | None  # from its report; None for older checkpoints


def load_runs(listed: str, options: loading.TargetOptions) -> list[Run]:
    """The checkpoints of a comma list beside one frozen target; a drafter that adapts its target gets one of its own.

    Raises ValueError as `load`, and if two have the same name.
    """
    given = [Path(folder) for folder in split(listed)]
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


def shared_target(runs: list[Run], options: loading.TargetOptions, *, head: str | None = None) -> loading.Opened:
    """The frozen target of the runs. Where there is none, it is loaded: that of the first run, or of `head`."""
    frozen = [run.drafter.target for run in runs if run.baseline == FROZEN]
    if frozen:
        return loading.open_target(frozen[0])
    folder = runs[0].folder if runs else head and checkpoint.resolve(head)
    return loading.load_target(options, default=loading.target_of(folder, options.name) if folder else None)
