"""The page of a training run: what was trained, on what, and whether it is worth serving."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from specdec import checkpoint
from specdec.core import files
from specdec.core.resumable import read_rows
from specdec.measuring.charts import ChartCurve, bars, lines, number
from specdec.measuring.page import Section, Table, render_page, write_figure
from specdec.measuring.report import TAU, Report, verdict
from train.show import data_law

PAGE = "report.html"
SMOOTH = 20  # logged losses that are averaged
WORTH = 1.05  # speedup that the whole interval must reach
INTERVALS = "A chain of K drafts can reach K + 1. Intervals are 95 % bootstrap intervals over prompts."


def write(run: Path) -> Path:
    """The page of a run's best checkpoint, beside its report.json. Raises ValueError for a folder without one."""
    path = checkpoint.resolve(run) / PAGE
    files.write_text(path, render_run(read(run)))
    return path


def read(run: Path) -> dict[str, Any]:
    """Everything on the page: {name, report, log, about}. A checkpoint alone has no log, and older runs have no about."""
    best = checkpoint.resolve(run)
    step, log = best.name.startswith("step_"), best.parent / "log.jsonl"
    return {
        "name": best.parent.name if step else best.name,
        "report": checkpoint.read_json(best / "report.json"),
        "log": read_rows(log) if step and log.exists() else [],
        "about": checkpoint.read_facts(best),
    }


def worth(report: Report) -> tuple[str, str]:
    """-> yes, no or unsure, and a sentence: is this head worth serving?"""
    if not report.decoded or report.speedup is None or report.speedup_ci is None:
        return "unsure", (
            f"Not known: tau is {report.replayed_tau:.2f}, but nothing was decoded with the clock running. "
            "specdec evaluate measures the speedup."
        )
    way, speedup, span = f"the {report.shape or 'fixed shape'}", report.speedup, report.speedup_ci
    num = report.num_prompts
    if report.auto and report.auto["speedup"] > speedup:
        way, speedup, span = "proposer=auto", report.auto["speedup"], report.auto["speedup_ci"]
        num = report.auto.get("num_prompts", num)
    said = f"{write_figure(speedup)} times as fast as plain decoding ({span[0]:.2f} .. {span[1]:.2f}) with {way}, on {num} prompts"
    if span[0] >= WORTH:
        return "yes", f"Yes: {said}."
    if span[1] < 1:
        return "no", f"No: {said}."
    return "unsure", f"Not sure: {said}. More prompts would tell (validation.num_prompts, specdec evaluate)."


def render_run(document: dict[str, Any]) -> str:
    """The page of `read`'s document."""
    report, about = Report.from_json(document["report"]), document["about"]
    lossless = [f"The answers: {verdict(report)}."] if report.decoded else []
    groups = {**about, "training": asdict(report.training) if report.training else {}}
    rows = [
        [f"{group}: {name}", number(each) if isinstance(each, int | float) else str(each)]
        for group, part in groups.items()
        if isinstance(part, dict)
        for name, each in part.items()
        if each is not None
    ]
    depth = len(report.replayed_survival or report.survival or [])
    outlook = data_law.outlook(document["log"], depth=depth) if depth else None
    command = Markup("<p>The command that repeats it:</p><pre>{}</pre>").format(about["command"]) if about else ""
    sections = [
        Section(texts=[*lossless, f"tau: {TAU}. {INTERVALS}"], tiles=list_tiles(report)),
        Section("Drafts", charts=chart_drafts(report)),
        Section("By category", table=tabulate("category", report.by_category)),
        Section("By tag", table=tabulate("tag", report.by_tag)),
        Section("The run", texts=[outlook] if outlook else [], charts=chart_log(document["log"])),
        Section("Data, training and environment", table=Table(["fact", "value"], rows), body=command),
    ]
    title = f"{document['name']}, step {report.step}"
    return render_page(title, data=document, verdict=worth(report), sections=sections)


def list_tiles(report: Report) -> list[tuple[str, str, str]]:
    """The main figures: name, value, interval. What was not measured is left out."""
    auto = report.auto or {}
    found = [
        ("tau, replayed", report.replayed_tau, report.replayed_tau_ci),
        ("tau, best candidates", (report.candidates or {}).get("oracle_tau"), None),
        ("tau, decoded", report.tau, report.tau_ci),
        (f"speedup, {report.shape or 'fixed'}", report.speedup, report.speedup_ci),
        ("speedup, auto", auto.get("speedup"), auto.get("speedup_ci")),
        ("tokens/s with drafts", report.tokens_per_second, report.tokens_per_second_ci),
        ("tokens/s without", report.baseline_tokens_per_second, None),
    ]
    between = lambda span: f"{span[0]:.2f} .. {span[1]:.2f}" if span else ""
    return [(name, f"{value:.2f}", between(span)) for name, value, span in found if value]


def tabulate(name: str, parts: Mapping[str, Report]) -> Table:
    """tau of each category or tag."""
    rows = []
    for part, report in parts.items():
        survival = report.replayed_survival or report.survival
        tau = report.replayed_tau or report.tau, report.replayed_tau_ci or report.tau_ci
        first = f"{100 * survival[0]:.1f} %" if survival else "-"
        prompts = str(report.replayed_prompts or report.num_prompts)
        rows.append([part or "none", prompts, write_figure(*tau), first, write_figure(report.speedup) or "-"])
    return Table([name, "prompts", "tau (95 %)", "first draft accepted", "speedup"], rows)


def chart_log(log: Sequence[dict]) -> list[Markup]:
    """Loss and tau over the steps of the run."""
    logged = lambda name: [(row["step"], row[name]) for row in log if isinstance(row.get(name), int | float)]
    reports = {row["step"]: row["validation"] for row in log if "validation" in row}

    def judged(name: str, title: str) -> ChartCurve:
        known = {step: report for step, report in reports.items() if report.get(name) is not None}
        spans = [tuple(report.get(f"{name}_ci") or [report[name]] * 2) for report in known.values()]
        return ChartCurve(title, [(step, report[name]) for step, report in known.items()], marks=True, spans=spans)

    loss = logged("loss")
    ends = range(SMOOTH, 1 + len(loss))
    means = [(loss[end - 1][0], sum(value for _, value in loss[end - SMOOTH : end]) / SMOOTH) for end in ends]
    taus = [
        judged("replayed_tau", "replayed tau"),
        judged("tau", "decoded tau"),
        ChartCurve("training texts", logged("tau")),
    ]
    title = "tau of held-out prompts (with 95 % intervals) and of training texts"
    losses = [ChartCurve("loss", loss), ChartCurve(f"mean of {SMOOTH}", means)]
    charts = [
        lines(losses, x="step", y="loss", title="Loss of training steps"),
        lines(taus, x="step", y="tau", title=title),
    ]
    return charts if log else []


def chart_drafts(report: Report) -> list[Markup]:
    """What became of the drafts, by depth, and what a round takes."""
    survival, stages, drawn = report.replayed_survival or report.survival or [], report.ms_per_round, []
    depths = [str(depth) for depth in range(1, 1 + len(survival))]
    if survival:
        acceptance = [share / before if before else 0.0 for share, before in zip(survival, [1.0, *survival])]
        groups = [("rounds that accept so many drafts", survival), ("of those that accept one less", acceptance)]
        title = "Survival, and acceptance given the drafts before"
        drawn.append(bars(groups, depths, x="drafts", y="share", title=title))
    if report.candidates:
        groups = [("recall", report.candidates["recall"]), ("the target's mass", report.candidates["mass"])]
        title = "Candidates: share of tokens that are among them, and the target's probability of all of them"
        drawn.append(bars(groups, depths, x="drafts", y="share", title=title))
    if stages:
        times = [("ms", [*stages.values()])]
        drawn.append(bars(times, [*stages], x="part of a round", y="ms", title="Time of a round"))
    return drawn
