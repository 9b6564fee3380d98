"""The page of a training run: what was trained, on what, and whether it is worth serving."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from specdec import checkpoint
from specdec.core import files
from specdec.core.resumable import read_rows
from specdec.measuring.charts import ChartCurve, chart_bars, chart_lines, format_number
from specdec.measuring.page import Section, Table, format_figure, render_page
from specdec.measuring.report import TAU, Report, describe_losslessness
from train.show import data_law

PAGE = "report.html"
LOSSES_PER_MEAN = 20  # logged losses that are averaged
MIN_SPEEDUP = 1.05  # speedup that the whole interval must reach
INTERVALS = "A chain of K drafts can reach K + 1. Intervals are 95 % bootstrap intervals over prompts."


def write_page(run: Path) -> Path:
    """The page of a run's best checkpoint, beside its report.json. Raises ValueError for a folder without one."""
    path = checkpoint.resolve(run) / PAGE
    files.write_text(path, render_run(read_run(run)))
    return path


def read_run(run: Path) -> dict[str, Any]:
    """Everything on the page: {name, report, log, about}. A checkpoint alone has no log, and older runs have no about."""
    best = checkpoint.resolve(run)
    is_step, log = best.name.startswith("step_"), best.parent / "log.jsonl"
    return {
        "name": best.parent.name if is_step else best.name,
        "report": checkpoint.read_json(best / "report.json"),
        "log": read_rows(log) if is_step and log.exists() else [],
        "about": checkpoint.read_facts(best),
    }


def rate_speedup(report: Report) -> tuple[str, str]:
    """-> yes, no or unsure, and a sentence: is this head worth serving?"""
    if not report.decoded or report.speedup is None or report.speedup_ci is None:
        return "unsure", (
            f"Not known: tau is {report.replayed_tau:.2f}, but nothing was decoded with the clock running. "
            "specdec evaluate measures the speedup."
        )
    shape, speedup, interval = f"the {report.shape or 'fixed shape'}", report.speedup, report.speedup_ci
    num = report.num_prompts
    if report.auto and report.auto["speedup"] > speedup:
        shape, speedup, interval = "proposer=auto", report.auto["speedup"], report.auto["speedup_ci"]
        num = report.auto.get("num_prompts", num)
    sentence = f"{format_figure(speedup)} times as fast as plain decoding ({interval[0]:.2f} .. {interval[1]:.2f}) with {shape}, on {num} prompts"
    if interval[0] >= MIN_SPEEDUP:
        return "yes", f"Yes: {sentence}."
    if interval[1] < 1:
        return "no", f"No: {sentence}."
    return "unsure", f"Not sure: {sentence}. More prompts would tell (validation.num_prompts, specdec evaluate)."


def render_run(document: dict[str, Any]) -> str:
    """The page of `read`'s document."""
    report, facts = Report.from_json(document["report"]), document["about"]
    verdicts = [f"The answers: {describe_losslessness(report)}."] if report.decoded else []
    groups = {**facts, "training": asdict(report.training) if report.training else {}}
    rows = [
        [f"{group}: {name}", format_number(value) if isinstance(value, int | float) else str(value)]
        for group, group_facts in groups.items()
        if isinstance(group_facts, dict)
        for name, value in group_facts.items()
        if value is not None
    ]
    depth = len(report.replayed_survival or report.survival or [])
    more_data = data_law.describe_more_data(document["log"], depth=depth) if depth else None
    command = Markup("<p>The command that repeats it:</p><pre>{}</pre>").format(facts["command"]) if facts else ""
    sections = [
        Section(texts=[*verdicts, f"tau: {TAU}. {INTERVALS}"], tiles=list_tiles(report)),
        Section("Drafts", charts=chart_drafts(report)),
        Section("By category", table=tabulate("category", report.by_category)),
        Section("By tag", table=tabulate("tag", report.by_tag)),
        Section("The run", texts=[more_data] if more_data else [], charts=chart_log(document["log"])),
        Section("Data, training and environment", table=Table(["fact", "value"], rows), body=command),
    ]
    title = f"{document['name']}, step {report.step}"
    return render_page(title, figures=document, verdict=rate_speedup(report), sections=sections)


def list_tiles(report: Report) -> list[tuple[str, str, str]]:
    """The main figures: name, value, interval. What was not measured is left out."""
    auto = report.auto or {}
    figures = [
        ("tau, replayed", report.replayed_tau, report.replayed_tau_ci),
        ("tau, best candidates", (report.candidates or {}).get("oracle_tau"), None),
        ("tau, decoded", report.tau, report.tau_ci),
        (f"speedup, {report.shape or 'fixed'}", report.speedup, report.speedup_ci),
        ("speedup, auto", auto.get("speedup"), auto.get("speedup_ci")),
        ("tokens/s with drafts", report.tokens_per_second, report.tokens_per_second_ci),
        ("tokens/s without", report.baseline_tokens_per_second, None),
    ]
    write_interval = lambda span: f"{span[0]:.2f} .. {span[1]:.2f}" if span else ""
    return [(name, f"{value:.2f}", write_interval(interval)) for name, value, interval in figures if value]


def tabulate(name: str, reports: Mapping[str, Report]) -> Table:
    """tau of each category or tag."""
    rows = []
    for label, report in reports.items():
        survival = report.replayed_survival or report.survival
        tau = report.replayed_tau or report.tau, report.replayed_tau_ci or report.tau_ci
        first = f"{100 * survival[0]:.1f} %" if survival else "-"
        prompts = str(report.replayed_prompts or report.num_prompts)
        rows.append([label or "none", prompts, format_figure(*tau), first, format_figure(report.speedup) or "-"])
    return Table([name, "prompts", "tau (95 %)", "first draft accepted", "speedup"], rows)


def chart_log(log: Sequence[dict]) -> list[Markup]:
    """Loss and tau over the steps of the run."""
    read_series = lambda name: [(row["step"], row[name]) for row in log if isinstance(row.get(name), int | float)]
    reports = {row["step"]: row["validation"] for row in log if "validation" in row}

    def chart_validations(name: str, title: str) -> ChartCurve:
        known_reports = {step: report for step, report in reports.items() if report.get(name) is not None}
        spans = [tuple(report.get(f"{name}_ci") or [report[name]] * 2) for report in known_reports.values()]
        return ChartCurve(
            title, [(step, report[name]) for step, report in known_reports.items()], marks=True, spans=spans
        )

    loss_points = read_series("loss")
    window_ends = range(LOSSES_PER_MEAN, 1 + len(loss_points))
    means = [
        (loss_points[end - 1][0], sum(value for _, value in loss_points[end - LOSSES_PER_MEAN : end]) / LOSSES_PER_MEAN)
        for end in window_ends
    ]
    taus = [
        chart_validations("replayed_tau", "replayed tau"),
        chart_validations("tau", "decoded tau"),
        ChartCurve("training texts", read_series("tau")),
    ]
    title = "tau of held-out prompts (with 95 % intervals) and of training texts"
    losses = [ChartCurve("loss", loss_points), ChartCurve(f"mean of {LOSSES_PER_MEAN}", means)]
    charts = [
        chart_lines(losses, x="step", y="loss", title="Loss of training steps"),
        chart_lines(taus, x="step", y="tau", title=title),
    ]
    return charts if log else []


def chart_drafts(report: Report) -> list[Markup]:
    """What became of the drafts, by depth, and what a round takes."""
    survival, stage_times, charts = report.replayed_survival or report.survival or [], report.ms_per_round, []
    depths = [str(depth) for depth in range(1, 1 + len(survival))]
    if survival:
        acceptance = [
            share / previous_share if previous_share else 0.0
            for share, previous_share in zip(survival, [1.0, *survival])
        ]
        groups = [("rounds that accept so many drafts", survival), ("of those that accept one less", acceptance)]
        title = "Survival, and acceptance given the drafts before"
        charts.append(chart_bars(groups, depths, x="drafts", y="share", title=title))
    if report.candidates:
        groups = [("recall", report.candidates["recall"]), ("the target's mass", report.candidates["mass"])]
        title = "Candidates: share of tokens that are among them, and the target's probability of all of them"
        charts.append(chart_bars(groups, depths, x="drafts", y="share", title=title))
    if stage_times:
        time_groups = [("ms", [*stage_times.values()])]
        charts.append(chart_bars(time_groups, [*stage_times], x="part of a round", y="ms", title="Time of a round"))
    return charts
