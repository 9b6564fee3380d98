"""The page of several: heads and proposers decoded in turn on the same prompts, or the runs of a sweep."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from specdec.core import files
from specdec.measuring.report import TAU, PromptCounts, Report, Training, tau_difference, verdict
from train.config import flat
from train.pages import run_page
from train.pages.charts import ChartCurve, lines, number
from train.pages.page import Section, Table, render_page, write_figure

PAGE = "comparison.html"
UNLIKE = ("run", "resume", "tracker", "threads", "head.lr", "features.folder", "data.cache")  # say nothing about a head
JUDGED_BY = ("num_prompts", "max_new_tokens", "temperature")
SAME_PROMPTS = ("target.name", "target.dtype", "data.heldout", *(f"validation.{name}" for name in JUDGED_BY))
Columns = Mapping[float, Mapping[str, Report]]  # temperature -> method -> report
Differences = Mapping[float, Mapping[str, tuple[float, list[float]]]]  # the same, of tau minus that of the first method
Differs = Mapping[str, Mapping[str, str]]  # method -> setting -> value, of settings that are not the same everywhere
Logs = Mapping[str, list[dict[str, Any]]]  # method -> rows of log.jsonl


def render_comparison(
    columns: Columns,
    differences: Differences,
    *,
    first: str,
    title: str,
    conditions: str,
    settings: dict,
    differs: Differs | None = None,
    logs: Logs | None = None,
) -> str:
    """first: the method that `differences` are taken to; they may lack methods; logs: of methods that were trained"""
    every = lambda column: {name: report.to_json() for name, report in column.items()}
    data = {
        "settings": settings,
        "reports": {f"{t:g}": every(column) for t, column in columns.items()},
        "differences": {
            f"{t:g}": {name: [each, *span] for name, (each, span) in row.items()} for t, row in differences.items()
        },
        "differs": differs or {},
        "logs": logs or {},
    }
    said = {name: verdict(report) for name, report in columns[min(columns)].items() if report.decoded}
    answers = [f"{name}: {verdict}" for name, verdict in said.items()]
    sections = [
        Section(texts=[conditions]),
        Section("All of them", table=tabulate(columns, differences, first, differs or {})),
        Section(
            "Figures", charts=[*(chart_speed(t, column) for t, column in columns.items()), *chart_runs(logs or {})]
        ),
        Section("Are the answers those of the target?", points=answers),
    ]
    return render_page(title, data=data, sections=sections)


def tabulate(columns: Columns, differences: Differences, first: str, differs: Differs) -> Table:
    """All methods at all temperatures. A column in which nothing is known is left out."""
    settings = sorted({key for values in differs.values() for key in values})
    rows = []
    for temperature, column in columns.items():
        for name, report in column.items():
            ran, stages, auto = report.training or Training(), report.ms_per_round or {}, report.auto or {}
            num = report.replayed_prompts or 0
            rows.append(
                {
                    "run" if differs else "method": name,
                    **{key: differs.get(name, {}).get(key, "") for key in settings},
                    "temperature": number(temperature) if len(columns) > 1 else "",
                    "tau, replayed": write_figure(report.replayed_tau, report.replayed_tau_ci),
                    "tau, decoded": write_figure(report.tau, report.tau_ci),
                    f"tau minus that of {first}": write_figure(*differences[temperature].get(name, (None,)), sign="+"),
                    "speedup": write_figure(report.speedup, report.speedup_ci),
                    "speedup, auto": write_figure(auto.get("speedup"), auto.get("speedup_ci")),
                    "tokens/s": write_figure(report.tokens_per_second),
                    "plain, tokens/s": write_figure(report.baseline_tokens_per_second),
                    "draft, ms": write_figure(stages.get("draft")),
                    "verify, ms": write_figure(stages.get("verify")),
                    "tokens trained on": number(ran.tokens) if ran.tokens else "",
                    "minutes": number(ran.seconds / 60) if ran.seconds else "",
                    "prompts, replayed": str(num or ""),
                    "prompts, decoded": str(report.num_prompts or ""),
                    "step": str(report.step or ""),
                }
            )
    heads = [key for key in rows[0] if any(row[key] for row in rows)]
    return Table(heads, [[row[key] or "-" for key in heads] for row in rows])


def chart_speed(temperature: float, column: Mapping[str, Report]) -> Markup:
    marks = [
        ChartCurve(name, [(report.tau, report.speedup)], spans=[(report.speedup_ci[0], report.speedup_ci[1])])
        for name, report in column.items()
        if report.tau is not None and report.speedup is not None and report.speedup_ci is not None
    ]
    return lines(marks, x="tau", y="speedup", title=f"Speedup against tau, T={temperature:g}")


def chart_runs(logs: Logs) -> list[Markup]:
    """Runs over the tokens that they read and over their steps: tau of held-out prompts, and the loss."""
    taus, losses = [], []
    for name, rows in logs.items():
        reports = [row["validation"] for row in rows if "validation" in row and not row.get("last")]
        known = [
            ((each.get("training") or {}).get("tokens"), each.get("replayed_tau") or each.get("tau"))
            for each in reports
        ]
        taus.append(ChartCurve(name, [(tokens, tau) for tokens, tau in known if tokens and tau], marks=True))
        losses.append(ChartCurve(name, [(row["step"], row["loss"]) for row in rows if "loss" in row]))
    charts = [
        lines(taus, x="tokens", y="tau", title="tau of held-out prompts over the tokens read"),
        lines(losses, x="step", y="loss", title="Loss of training steps; other objectives cannot be compared by it"),
    ]
    return charts if logs else []


# The runs of a sweep, from their report.json and log.jsonl


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
    settings = {run.name: settings_of(run) for run in runs}
    first, columns = runs[0].name, dict[float, dict[str, Report]]()
    reports = {name: Report.from_json(document["report"], source=name) for name, document in documents.items()}
    for name, report in reports.items():
        columns.setdefault(report.temperature, {})[name] = report
    own = settings[first].items()
    common = {key: value for key, value in own if all(each.get(key) == value for each in settings.values())}
    named = (*SAME_PROMPTS, "train.steps", "train.batch", "data.length")
    known = ", ".join(f"{key}={common[key]}" for key in named if key in common)
    return render_comparison(
        columns,
        {t: pair_runs(column, reports[first], settings, first) for t, column in columns.items()},
        first=first,
        title=title,
        conditions=f"{known}. The best step of each run. tau: {TAU}. Intervals are 95 % bootstrap intervals over prompts. "
        "Runs were decoded at different times: specdec evaluate checkpoint=A,B decodes them in turn.",
        settings=common,
        differs=find_differing(settings),
        logs={name: document["log"] for name, document in documents.items()},
    )


def settings_of(run: Path) -> dict[str, Any]:
    """The settings of a run by dotted name, from its config.yaml."""
    path = run / "config.yaml"
    return flat(yaml.safe_load(path.read_text())) if path.exists() else {}


def find_differing(settings: dict[str, dict[str, Any]]) -> dict[str, dict[str, str]]:
    """run -> setting -> value, of the settings in which runs differ.

    `head` is the class; what belongs to it is shown if it differs between runs of the same class.
    """
    head = "head.drafter._target_"
    found: dict[str, dict[str, str]] = {name: {} for name in settings}
    for key in sorted({key for values in settings.values() for key in values} - {*UNLIKE}):
        kinds: dict[Any, set[str]] = {}
        for values in settings.values():
            kind = values.get(head) if key.startswith("head.") and key != head else None
            kinds.setdefault(kind, set()).add(str(values.get(key)))
        if any(len(values) > 1 for values in kinds.values()):
            for run, values in settings.items():
                if key == head and key in values:
                    found[run]["head"] = str(values[key]).rpartition(".")[2]
                elif key in values:
                    found[run][key] = str(values[key])
    return found


def pair_runs(
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
