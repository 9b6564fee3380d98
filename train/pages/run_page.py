"""The page of a training run: what was trained, on what, whether it is worth serving, and what to try next."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from specdec import checkpoint
from specdec.core import files
from specdec.measuring.report import TAU
from specdec.measuring.report import Report, verdict
from specdec.measuring.speed import chain_speedups
from train.answers.resumable import read_rows
from train.pages import facts
from train.pages.advice import Figures, advice
from train.pages.charts import Axis, Curve, bars, lines, number
from train.pages.page import render

PAGE, SAMPLES = "report.html", "samples.json"
SMOOTH = 20  # logged losses that are averaged
WORTH = 1.05  # speedup that the whole interval must reach


def write(run: Path) -> Path:
    """The page of a run's best checkpoint, beside its report.json. Raises ValueError for a folder without one."""
    best = checkpoint.resolve(run)
    path = best / PAGE
    files.write_text(path, render_run(read(run)))
    return path


def read(run: Path) -> dict[str, Any]:
    """Everything on the page: {name, report, log, about, samples}. Older runs have no about and no samples."""
    best = checkpoint.resolve(run)
    folder = best.parent if best.name.startswith("step_") else best

    def optional(path: Path, default: Any) -> Any:
        return json.loads(path.read_text()) if path.exists() else default

    return {
        "name": folder.name,
        "report": checkpoint.read_json(best / "report.json"),
        "log": log_of(best),
        "about": facts.read(best),
        "samples": optional(best / SAMPLES, []),
    }


def log_of(best: Path) -> list[dict[str, Any]]:
    """The log of the run that a checkpoint belongs to; nothing for a checkpoint alone."""
    path = best.parent / "log.jsonl"
    return read_rows(path) if best.name.startswith("step_") and path.exists() else []


def worth(report: Report) -> tuple[str, str]:
    """-> yes, no or unsure, and a sentence: is this head worth serving?"""
    if not report.decoded or report.speedup is None or report.speedup_ci is None:
        return "unsure", (
            f"Not known: tau is {report.replayed_tau:.2f}, but nothing was decoded with the clock running. "
            "scripts/evaluate.py measures the speedup."
        )
    way, speedup, interval, num = (
        f"the {report.shape or 'fixed shape'}",
        report.speedup,
        report.speedup_ci,
        report.num_prompts,
    )
    if report.auto and report.auto["speedup"] > speedup:
        way, speedup, interval = "proposer=auto", report.auto["speedup"], report.auto["speedup_ci"]
        num = report.auto.get("num_prompts", num)
    said = f"{speedup:.2f} times as fast as plain decoding ({interval[0]:.2f} .. {interval[1]:.2f}) with {way}, on {num} prompts"
    if report.lossy:
        return "no", f"Not lossless: {said}, with a rule that changes the answers."
    if interval[0] >= WORTH:
        return "yes", f"Yes: {said}."
    if interval[1] < 1:
        return "no", f"No: {said}."
    return "unsure", f"Not sure: {said}. More prompts would tell (validation.num_prompts, scripts/evaluate.py)."


def render_run(document: dict[str, Any]) -> str:
    report, log, about = document["report"], document["log"], document["about"]
    parsed, figures = Report.from_json(report), Figures(report, log, about)
    answer, sentence = worth(parsed)
    return render(
        "run.html.jinja",
        title=f"{document['name']}, step {report.get('step')}",
        data=document,
        answer=answer,
        sentence=sentence,
        setting=setting(about, report),
        tau_means=TAU,
        report=asdict(parsed),
        about=about,
        lossless=verdict(parsed) if parsed.decoded else None,
        curves=curves(figures) if log else [],
        drafts=drafts(report, parsed),
        parts={"category": asdict(parsed)["by_category"], "tag": asdict(parsed)["by_tag"]},
        samples=document["samples"],
        advice=advice(figures),
    )


def setting(about: dict, report: dict) -> str:
    """What was trained, in one sentence."""
    training = report.get("training") or {}
    drafter, target, data = (about.get(name) or {} for name in ("drafter", "target", "data"))
    parts = [
        drafter.get("class", "A drafter"),
        f"with {number(training['parameters'])} trained parameters" if training.get("parameters") else "",
        f"for {target['name']} ({target['dtype']})," if target else "",
        f"trained on {number(training['tokens'])} tokens" if training.get("tokens") else "",
        f"of {number(training['unique_tokens'])} ({data['train']})" if training.get("unique_tokens") and data else "",
        f"in {training['seconds'] / 60:.1f} minutes" if training.get("seconds") else "",
        f"by {training['processes']} processes" if (training.get("processes") or 1) > 1 else "",
        f"and judged by a {report['shape']} at temperature {report['temperature']:g}" if report.get("shape") else "",
    ]
    return " ".join(part for part in parts if part) + "."


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The mean of every SMOOTH points in a row."""
    groups = [points[place : place + SMOOTH] for place in range(len(points) - SMOOTH + 1)]
    return [(group[-1][0], sum(value for _, value in group) / SMOOTH) for group in groups]


def curves(run: Figures) -> list:
    """The run over its steps: charts of everything that its log holds."""
    logged = run.logged

    def judged(name: str, title: str) -> Curve:
        rows = [(row["step"], row["validation"]) for row in run.log if "validation" in row]
        known = {step: report for step, report in rows if report.get(name) is not None}
        spans = [tuple(report.get(f"{name}_ci") or [report[name]] * 2) for report in known.values()]
        tips = [
            f"step {step}: {title} {report[name]:.3f} ({low:.2f} .. {high:.2f})"
            for (step, report), (low, high) in zip(known.items(), spans)
        ]
        return Curve(
            title, [(step, report[name]) for step, report in known.items()], marks=True, tips=tips, spans=spans
        )

    step = Axis("step")
    drawn = [
        lines([Curve("loss", logged("loss")), Curve(f"mean of {SMOOTH}", smooth(logged("loss")))], x=step, y=Axis("loss"), title="Loss of training steps"),
        lines(
            [judged("replayed_tau", "replayed tau"), judged("tau", "decoded tau"), Curve("training texts", logged("tau"))],
            x=step, y=Axis("tau"), title="tau of held-out prompts (with 95 % intervals) and of training texts",
        ),
        lines([Curve("learning rate", logged("learning_rate"))], x=step, y=Axis("learning rate", low=0), title="Learning rate"),
        lines([Curve("tokens/s", logged("tokens_per_second"))], x=step, y=Axis("tokens/s", low=0), title="Speed of training"),
        lines([Curve("GB", [(at, size / 1e9) for at, size in logged("memory")])], x=step, y=Axis("GB", low=0), title="Most memory so far"),
        lines([Curve("norm", logged("grad_norm"))], x=step, y=Axis("norm", low=0), title="Norm of the gradient before clipping"),
    ]  # fmt: skip
    speedup = judged("speedup", "speedup")
    if speedup.points:
        drawn.append(lines([speedup], x=step, y=Axis("speedup"), title="Speedup over plain decoding"))
    return drawn


def drafts(report: dict, parsed: Report) -> list:
    """What became of the drafts, by depth, and what a round takes."""
    survival = report.get("replayed_survival") or report.get("survival") or []
    names = [str(depth) for depth in range(1, 1 + len(survival))]
    drawn = []
    if survival:
        given = [1.0, *survival[:-1]]
        acceptance = [share / before if before else 0.0 for share, before in zip(survival, given)]
        groups = [("rounds that accept so many drafts", survival), ("of those that accept one less", acceptance)]
        drawn.append(
            bars(groups, names, x="drafts", y="share", title="Survival, and acceptance given the drafts before")
        )
    stages = report.get("ms_per_round")
    if stages:
        drawn.append(
            bars(
                [("ms", list(stages.values()))],
                list(stages),
                x="part of a round",
                y="ms",
                title="Where a round's time goes",
            )
        )
        predicted = chain_speedups(parsed)
        shown = [
            Curve("predicted for a chain", list(enumerate(predicted, start=1)), marks=True),
            Curve(
                "measured", [(len(predicted), report["speedup"])], spans=[report["speedup_ci"]], line=False, marks=True
            ),
        ]
        if report.get("auto"):
            auto = report["auto"]
            mean = sum(int(nodes) * count for nodes, count in auto["sizes"].items()) / sum(auto["sizes"].values()) - 1
            shown.append(
                Curve(
                    "auto, at its mean number of drafts",
                    [(mean, auto["speedup"])],
                    spans=[auto["speedup_ci"]],
                    line=False,
                    marks=True,
                )
            )
        ticks = list(range(1 + len(predicted)))
        drawn.append(
            lines(shown, x=Axis("drafts", ticks=ticks), y=Axis("speedup"), title="Speedup by the number of drafts")
        )
    return drawn
