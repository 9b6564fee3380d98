"""The page of a training run: the head, its training, its data, and whether it is worth serving."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from markupsafe import Markup

from specdec import checkpoint
from specdec.core.resumable import read_rows
from specdec.measuring.certainty import Gain, rate_gains
from specdec.measuring.charts import ChartCurve, chart_bars, chart_lines, format_number
from specdec.measuring.contexts import list_context_sections
from specdec.measuring.page import KEY, Section, Table, Verdict, format_figure, write_page
from specdec.measuring.report import TAU, Report, describe_losslessness
from train.show import data_law
from train.show.served import chart_served, list_texts, tabulate_served

PAGE = "report.html"
LOSSES_PER_MEAN = 20  # logged losses in a point of the smoothed curve, which then shows its trend
MAX_PROMPT = 300  # characters of a prompt's end that stand above its answer
INTERVALS = "A chain of K drafts can reach K + 1. Intervals are 95 % bootstrap intervals over prompts."
FACT_UNITS = {"seconds": "s", "peak_memory": "GB", "tokens_per_second": "tokens/s", "tokens": "tokens"}
NEXT = {
    "Compare it with other ways to draft:": "specdec evaluate checkpoint={run} proposers=suffix",
    "See at which load it pays:": "specdec choose checkpoint={run} proposers=suffix",
    "Try it, with drafts and without, in a browser:": "specdec serve checkpoint={run}",
}


def write_run_page(run: Path) -> Path:
    """Writes the page of a run's best checkpoint beside its report.json, and returns its path.

    Raises ValueError for a folder without a checkpoint.
    """
    path, document = checkpoint.resolve(run) / PAGE, read_run(run)
    report = Report.from_json(document["report"])
    sections = list_sections(report, document["log"], document["about"], run)
    title = f"{document['name']}, step {report.step}"
    write_page(path, title, figures=document, verdicts=[rate_speedup(report)], sections=sections)
    return path


def read_run(run: Path) -> dict[str, Any]:
    """The page's figures: {name, report, log, about}.

    A checkpoint alone has no log, and older runs have no about.
    """
    best = checkpoint.resolve(run)
    is_step, log = best.name.startswith("step_"), best.parent / "log.jsonl"
    return {
        "name": best.parent.name if is_step else best.name,
        "report": checkpoint.read_json(best / "report.json"),
        "log": read_rows(log) if is_step and log.exists() else [],
        "about": checkpoint.read_facts(best),
    }


def rate_speedup(report: Report) -> Verdict:
    """Whether this head is worth serving: yes, no or unsure, and a sentence."""
    if not report.decoded or report.speedup is None or report.speedup_ci is None:
        return "unsure", (
            f"Not known: tau is {report.replayed_tau:.2f}, but nothing was decoded with the clock running. "
            "specdec evaluate measures the speedup."
        )
    gain = Gain(f"the {report.shape or 'fixed shape'}", report.speedup, report.speedup_ci, report.num_prompts)
    if report.auto and report.auto["speedup"] > report.speedup:
        num = report.auto.get("num_prompts", report.num_prompts)
        gain = Gain("proposer=auto", report.auto["speedup"], report.auto["speedup_ci"], num)
    return rate_gains([gain], unit="prompts", remedy="validation.num_prompts, validation.share, specdec evaluate")


def list_sections(report: Report, log: Sequence[dict], facts: dict[str, Any], run: Path) -> list[Section]:
    """The sections of the page. log, facts: parts of `read_run`; run: the run's folder"""
    verdicts = [f"The answers: {describe_losslessness(report)}."] if report.decoded else []
    more_data = data_law.describe_data(log, depth=len(report.replayed_survival or report.survival or []))
    commands = [(label, command.format(run=run)) for label, command in NEXT.items()]
    repeat = [("The command that repeats it:", facts["command"])] if facts else []
    return [
        Section(texts=[*verdicts, f"tau: {TAU}. {INTERVALS}"], tiles=list_tiles(report)),
        Section(
            "In an engine",
            points=list_texts(report.served),
            table=tabulate_served(report.served),
            charts=chart_served(find_validations(log)),
        ),
        Section("Answers", body=colour_answers(report.samples)),
        Section("Drafts", charts=chart_drafts(report)),
        *list_context_sections({"replayed": report.replayed_contexts, "decoded": report.contexts}),
        Section("By category", table=tabulate("category", report.by_category)),
        Section("By tag", table=tabulate("tag", report.by_tag)),
        Section("The run", texts=[more_data] if more_data else [], charts=chart_log(log)),
        Section("Next", commands=commands),
        Section("Data, training and environment", table=tabulate_facts(report, facts), commands=repeat),
    ]


def colour_answers(samples: Sequence[dict]) -> Markup:
    """Texts of prompts, each above its answer with the accepted drafts coloured. samples: see `write_samples`"""
    blocks = [KEY] if samples else []
    for sample in samples:
        pieces = []
        for text, place in sample["pieces"]:
            pieces.append(Markup('<span class="d{}">{}</span>' if place else "{1}").format(min(place, 4), text))
        prompt = sample["prompt"].strip()
        shown = "... " * (len(prompt) > MAX_PROMPT) + prompt[-MAX_PROMPT:]
        answer = Markup("").join(pieces)
        blocks.append(Markup('<p class="soft">{}</p><div class="answer">{}</div>').format(shown, answer))
    return Markup("").join(blocks)


def tabulate_facts(report: Report, facts: dict[str, Any]) -> Table:
    """The recorded facts of a run, and figures of its training."""
    groups = {**facts, "training": asdict(report.training) if report.training else {}}
    rows = []
    for group, values in groups.items():
        for name, value in values.items() if isinstance(values, dict) else ():
            if value is not None:
                unit = FACT_UNITS.get(name, "")
                size = value / 1e9 if unit == "GB" else value
                text = format_number(size) if isinstance(size, int | float) else str(size)
                rows.append([f"{group}: {name.replace('_', ' ')}", f"{text} {unit}".strip()])
    return Table(["fact", "value"], rows)


def list_tiles(report: Report) -> list[tuple[str, str, str]]:
    """The main figures that were measured: name, value, interval."""
    auto = report.auto or {}
    figures = [
        ("tau, replayed", report.replayed_tau, report.replayed_tau_ci),
        ("tau, best candidates", (report.candidates or {}).get("oracle_tau"), None),
        ("tau, decoded", report.tau, report.tau_ci),
        (f"times plain, {report.shape or 'fixed'}", report.speedup, report.speedup_ci),
        ("times plain, auto", auto.get("speedup"), auto.get("speedup_ci")),
        ("tokens/s with drafts", report.tokens_per_second, report.tokens_per_second_ci),
        ("tokens/s without", report.baseline_tokens_per_second, None),
    ]
    return [
        (name, f"{value:.2f}", "{:.2f} .. {:.2f}".format(*interval) if interval else "")
        for name, value, interval in figures
        if value
    ]


def tabulate(name: str, reports: Mapping[str, Report]) -> Table:
    """tau and speedup of each category or tag. name: the heading of the first column"""
    rows = []
    for label, report in reports.items():
        survival = report.replayed_survival or report.survival
        tau = report.replayed_tau or report.tau, report.replayed_tau_ci or report.tau_ci
        first = f"{100 * survival[0]:.1f} %" if survival else "-"
        prompts = str(report.replayed_prompts or report.num_prompts)
        rows.append([label or "none", prompts, format_figure(*tau), first, format_figure(report.speedup) or "-"])
    return Table([name, "prompts", "tau (95 %)", "first draft accepted", "speedup"], rows)


def chart_log(log: Sequence[dict]) -> list[Markup]:
    """Charts of loss and tau over the steps of a run."""
    if not log:
        return []
    losses = read_series(log, "loss")
    reports = find_validations(log)
    means = []
    for end in range(LOSSES_PER_MEAN, 1 + len(losses)):
        window = losses[end - LOSSES_PER_MEAN : end]
        means.append((window[-1][0], statistics.fmean(loss for _, loss in window)))
    loss_curves = [ChartCurve("loss", losses), ChartCurve(f"mean of {LOSSES_PER_MEAN}", means)]
    tau_curves = [
        draw_validations(reports, "replayed_tau", "replayed tau"),
        draw_validations(reports, "tau", "decoded tau"),
        ChartCurve("training texts", read_series(log, "tau")),
    ]
    title = "tau of held-out prompts (with 95 % intervals) and of training texts"
    return [
        chart_lines(loss_curves, x="step", y="loss", title="Loss of training steps"),
        chart_lines(tau_curves, x="step", y="tau, tokens a round", title=title),
    ]


def read_series(log: Sequence[dict], name: str) -> list[tuple[int, float]]:
    """A figure of the log's steps: pairs of step and value."""
    return [(row["step"], row[name]) for row in log if isinstance(row.get(name), int | float)]


def find_validations(log: Sequence[dict]) -> dict[int, dict]:
    """The reports of validations by step. The last one of a step counts."""
    return {row["validation"].get("step", row["step"]): row["validation"] for row in log if "validation" in row}


def draw_validations(reports: Mapping[int, dict], name: str, title: str) -> ChartCurve:
    """A figure of validations, with its intervals. reports: reports of validations by step"""
    points, spans = [], []
    for step, report in reports.items():
        value = report.get(name)
        if value is not None:
            points.append((step, value))
            spans.append(tuple(report.get(f"{name}_ci") or (value, value)))
    return ChartCurve(title, points, marks=True, spans=spans)


def chart_drafts(report: Report) -> list[Markup]:
    """Charts of the drafts that were accepted, by depth, and of a round's time."""
    survival, stage_times, charts = report.replayed_survival or report.survival or [], report.ms_per_round, []
    depths = [str(depth) for depth in range(1, 1 + len(survival))]
    if survival:
        acceptance = [
            share / previous_share if previous_share else 0.0
            for share, previous_share in zip(survival, [1.0, *survival])
        ]
        groups = [("rounds that accept so many drafts", survival), ("of those that accept one less", acceptance)]
        title = "Survival, and acceptance given the drafts before"
        charts.append(chart_bars(groups, depths, x="draft", y="share", title=title))
    if report.candidates:
        groups = [("recall", report.candidates["recall"]), ("the target's mass", report.candidates["mass"])]
        title = "Candidates: share of tokens that are among them, and the target's probability of all of them"
        charts.append(chart_bars(groups, depths, x="draft", y="share", title=title))
    if stage_times:
        time_groups = [("ms", [*stage_times.values()])]
        charts.append(chart_bars(time_groups, [*stage_times], x="part of a round", y="ms", title="Time of a round"))
    return charts
