"""The comparison page of several training runs, from their report.json and log.jsonl."""

from pathlib import Path
from typing import Any

import yaml

from specdec.core import files
from specdec.measuring.figures import TAU, PromptCounts, tau_difference
from specdec.measuring.report import Report
from train.config import flat
from train.pages import run_page
from train.pages.comparison_page import render_comparison

PAGE = "comparison.html"
UNLIKE = ("run", "resume", "tracker", "threads", "head.lr", "features.folder", "data.cache")  # say nothing about a head
SAME_TARGET = ("target.name", "target.dtype", "data.heldout")
SAME_PROMPTS = (*SAME_TARGET, "validation.num_prompts", "validation.max_new_tokens", "validation.temperature")


def runs_in(folder: Path) -> list[Path]:
    """The runs in the folder of a sweep that have a checkpoint, by name."""
    return sorted(path.parent for path in folder.glob("*/best"))


def write(folder: Path) -> Path:
    """The page of all runs in the folder of a sweep, in that folder. Raises ValueError if there is none."""
    runs = runs_in(folder)
    if not runs:
        raise ValueError(f"{folder} holds no run that has been validated, so there is nothing to compare.")
    path = folder / PAGE
    files.write_text(path, render_runs(runs, title=f"{len(runs)} runs of {folder.name}"))
    return path


def render_runs(runs: list[Path], *, title: str) -> str:
    """runs: their folders. The first one is what the others are compared with."""
    documents = {run.name: run_page.read(run) for run in runs}
    reports = {name: Report.from_json(document["report"], source=name) for name, document in documents.items()}
    settings = {run.name: settings_of(run) for run in runs}
    first = runs[0].name
    columns: dict[float, dict[str, Report]] = {}
    for name, report in reports.items():
        columns.setdefault(report.temperature, {})[name] = report
    common = {
        key: value for key, value in settings[first].items() if all(each.get(key) == value for each in settings.values())
    }  # fmt: skip
    return render_comparison(
        columns,
        {t: paired(column, reports[first], settings, first) for t, column in columns.items()},
        first=first,
        title=title,
        conditions=conditions(common),
        settings=common,
        differs=differing(settings),
        logs={name: document["log"] for name, document in documents.items()},
    )


def settings_of(run: Path) -> dict[str, Any]:
    """The settings of a run by dotted name, from its config.yaml."""
    path = run / "config.yaml"
    return flat(yaml.safe_load(path.read_text())) if path.exists() else {}


def differing(settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """run -> setting -> value, of the settings in which runs differ. `head` is the class; what belongs to it is shown if it differs
    between runs of the same class."""
    head = "head.drafter._target_"
    found: dict[str, dict[str, str]] = {name: {} for name in settings}
    for key in sorted({key for values in settings.values() for key in values} - {*UNLIKE}):
        kinds: dict[Any, set[str]] = {}
        for values in settings.values():
            kind = values.get(head) if key.startswith("head.") and key != head else None
            kinds.setdefault(kind, set()).add(str(values.get(key)))
        if any(len(values) > 1 for values in kinds.values()):
            name = "head" if key == head else key
            for run, values in settings.items():
                if key in values:
                    found[run][name] = str(values[key]).rpartition(".")[2] if key == head else str(values[key])
    return found


def paired(
    column: dict[str, Report], other: Report, settings: dict[str, dict[str, Any]], first: str
) -> dict[str, tuple[float, list[float]]]:
    """tau of each run minus that of the first one, where both were judged on the same prompts in the same way."""
    found = {}
    for name, report in column.items():
        prompts, others = ([each["prompt"] for each in every.by_prompt] for every in (report, other))
        same = all(settings[name].get(key) == settings[first].get(key) for key in SAME_PROMPTS)
        if prompts and prompts == others and same and report.shape == other.shape:
            counts = [
                [PromptCounts(each["rounds"], each["emitted"]) for each in every.by_prompt] for every in (report, other)
            ]
            found[name] = tau_difference(*counts)
    return found


def conditions(common: dict[str, Any]) -> str:
    """What all runs had in common, and how to read the page."""
    known = [
        f"{key}={common[key]}" for key in (*SAME_PROMPTS, "train.steps", "train.batch", "data.length") if key in common
    ]
    return (
        f"{', '.join(known)}. The best step of each run. tau: {TAU}. Intervals are 95 % bootstrap intervals over prompts. The runs were "
        "decoded at different times: scripts/compare.py checkpoint=A,B decodes the best ones in turn, which compares their speed fairly."
    )  # fmt: skip
