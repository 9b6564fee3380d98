"""The page of a comparison: heads and proposers decoded in turn on the same prompts, or the runs of a sweep."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec.measuring.report import Report, verdict
from train.pages.charts import Axis, Curve, lines, number
from train.pages.page import interval, render

COSTS = (1.0, 1.25, 1.5, 2.0, 3.0)  # of a round, in plain passes: lines of equal cost
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
    data = {
        "settings": settings,
        "reports": {f"{t:g}": {name: report.to_json() for name, report in column.items()} for t, column in columns.items()},
        "differences": {f"{t:g}": {name: [value, *span] for name, (value, span) in row.items()} for t, row in differences.items()},
        "differs": differs or {},
        "logs": logs or {},
    }  # fmt: skip
    heads, rows = table(columns, differences, first, differs or {})
    return render(
        "comparison.html.jinja",
        title=title,
        data=data,
        heads=heads,
        rows=rows,
        conditions=conditions,
        temperatures=len(columns),
        best=best(columns),
        charts=[chart for t, column in columns.items() for chart in charts(t, column)] + run_charts(logs or {}),
        verdicts={name: verdict(report) for name, report in columns[min(columns)].items() if report.decoded},
    )


def replayed(report: Report) -> bool:
    """Whether replay saw more prompts than decoding, as in a run: its figures are then those to compare."""
    return report.replayed_tau is not None and (report.replayed_prompts or 0) > report.num_prompts


def num_prompts(report: Report) -> int:
    """Of the figures to compare."""
    return (report.replayed_prompts or 0) if replayed(report) else report.num_prompts


def table(
    columns: Columns, differences: Differences, first: str, differs: Differs
) -> tuple[list[str], list[list[dict]]]:
    """-> names of the columns and rows of {text, value, whole}; a column in which nothing is known is left out.

    value: to sort by, if not the text's first number; whole: whether the text stays on one line
    """  # fmt: skip
    figure = lambda key, digits: lambda report: "" if (value := getattr(report, key)) is None else f"{value:.{digits}f}"
    between = lambda key: lambda report: interval(getattr(report, key))
    stage = lambda key: lambda report: f"{report.ms_per_round[key]:.1f}" if report.ms_per_round else ""
    ran = lambda key, scale: (
        lambda report: number(value / scale) if (value := getattr(report.training, key, None)) else ""
    )
    replays = any(replayed(report) for column in columns.values() for report in column.values())
    shown: list[tuple[str, Callable[[Report], str]]] = [
        *([("tau replayed", figure("replayed_tau", 2)), ("95 %", between("replayed_tau_ci"))] if replays else []),
        ("tau decoded" if replays else "tau", figure("tau", 2)),
        ("95 %", between("tau_ci")),
        ("speedup", figure("speedup", 2)),
        ("95 %", between("speedup_ci")),
        ("speedup auto", lambda report: f"{report.auto['speedup']:.2f}" if report.auto else ""),
        ("tokens/s", figure("tokens_per_second", 1)),
        ("plain, tokens/s", figure("baseline_tokens_per_second", 1)),
        ("draft, ms", stage("draft")),
        ("verify, ms", stage("verify")),
        ("tokens trained on", ran("tokens", 1)),
        ("minutes", ran("seconds", 60)),
        ("prompts, decoded", lambda report: f"{num_prompts(report)}, {report.num_prompts}" if replays else ""),
        ("step", lambda report: "" if report.step is None else str(report.step)),
    ]
    reports = [report for column in columns.values() for report in column.values()]
    shown = [(name, cell) for name, cell in shown if any(cell(report) for report in reports)]
    settings = sorted({key for values in differs.values() for key in values})
    paired, several = any(differences.values()), ["temperature"] if len(columns) > 1 else []
    heads = ["run" if differs else "way", *settings, *several, *(name for name, _ in shown)]
    heads += [f"tau minus that of {first}"] if paired else []
    rows = []
    for temperature, column in columns.items():
        for name, report in column.items():
            cells: list[tuple[str, float | None, bool]] = [(name, None, True)]
            cells += [(differs.get(name, {}).get(key, ""), None, False) for key in settings]
            cells += [(number(temperature), None, False)] if several else []
            cells += [(cell(report), None, title == "95 %") for title, cell in shown]
            if paired:
                value, span = differences[temperature].get(name, (None, None))
                text = "" if value is None else f"{value:+.2f} ({interval(span)})"
                cells.append((text, value, True))
            rows.append([{"text": text or "-", "value": value, "whole": whole} for text, value, whole in cells])
    return heads, rows


def best(columns: Columns) -> list[dict]:
    """For each temperature the best method of all prompts and of each category of several, with the second, and why.

    By speedup where all were decoded, else by tau of replay or of decoding, whichever saw more prompts.
    """
    rows = []
    for temperature, column in columns.items():
        categories = sorted({name for report in column.values() for name in report.by_category})
        for category in [None, *categories] if len(categories) > 1 else [None]:
            parts = {
                name: report if category is None else report.by_category[category]
                for name, report in column.items()
                if category is None or category in report.by_category
            }
            if category is not None and min(map(num_prompts, parts.values())) < 2:
                continue
            timed = all(part.speedup is not None for part in parts.values())
            figure = ranked(timed)
            order = sorted(parts, key=lambda name: -(figure(parts[name])[0] or 0.0))
            chosen, second = parts[order[0]], parts[order[1]] if len(order) > 1 else None
            value, span = figure(chosen)
            rows.append({
                "temperature": temperature, "category": category or "all", "method": order[0], "figure": "speedup" if timed else "tau",
                "value": value, "interval": span, "second": order[1] if second else None,
                "why": why(chosen, second) if timed else why_tau(chosen, second),
            })  # fmt: skip
    return rows


def ranked(timed: bool) -> Callable[[Report], tuple[float | None, list[float] | None]]:
    """The figure, with its interval, by which methods are ranked."""
    if timed:
        return lambda report: (report.speedup, report.speedup_ci)
    return lambda report: (
        (report.replayed_tau, report.replayed_tau_ci) if replayed(report) else (report.tau, report.tau_ci)
    )


def why(best: Report, second: Report | None) -> str:
    """What makes the best one faster: tokens a round, or the time of a round."""
    if best.speedup is None or best.speedup < 1:
        return "no way is faster than plain decoding here"
    if second is None or best.tau is None or second.tau is None or not second.speedup:
        return ""
    tokens, rounds = best.tau / second.tau, (second.tau / second.speedup) / (best.tau / best.speedup)
    said = f"{tokens:.2f} times the tokens a round, rounds {rounds:.2f} times as fast as those of the second"
    return said + overlap(best.speedup_ci, second.speedup_ci)


def why_tau(best: Report, second: Report | None) -> str:
    """How much higher its tau is, where not all were decoded."""
    if second is None:
        return ""
    (value, span), (other, others) = (ranked(False)(report) for report in (best, second))
    return "" if value is None or other is None else f"tau {value:.2f} instead of {other:.2f}{overlap(span, others)}"


def overlap(span: list[float] | None, other: list[float] | None) -> str:
    return "; the intervals of the two overlap" if span and other and span[0] <= other[1] else ""


def charts(temperature: float, column: Mapping[str, Report]) -> list:
    """Speedup against tau with lines of equal cost, and survival by depth."""
    marks = []
    for name, report in column.items():
        if report.tau is None or report.speedup is None or report.speedup_ci is None:
            continue
        low, high = report.speedup_ci
        tip = f"{name}: tau {report.tau:.2f}, speedup {report.speedup:.2f}"
        marks.append(Curve(name, [(report.tau, report.speedup)], marks=True, spans=[(low, high)], tips=[tip]))
    most = max((curve.points[0][0] for curve in marks), default=1.0)
    costs = [Curve(f"cost {cost:g}", [(1.0, 1 / cost), (most, most / cost)], guide=True) for cost in COSTS if most > 1]
    survival = [
        Curve(name, list(enumerate((report.replayed_survival if replayed(report) else report.survival) or [], start=1)), marks=True)
        for name, report in column.items()
    ]  # fmt: skip
    depths = list(range(1, 1 + max((len(curve.points) for curve in survival), default=1)))
    return [
        lines([*marks, *costs], x=Axis("tau"), y=Axis("speedup", low=0), title=f"Speedup against tau, T={temperature:g}; dashed: rounds that cost so many plain passes"),
        lines(survival, x=Axis("drafts", ticks=depths), y=Axis("share of rounds", low=0), title=f"Rounds that accept so many drafts, T={temperature:g}"),
    ]  # fmt: skip


def run_charts(logs: Logs) -> list:
    """Runs over their steps and the tokens that they read: tau of held-out prompts, and the loss."""
    if not logs:
        return []

    def judged(rows: Sequence[dict], place: Callable[[dict], float | None]) -> list[tuple[float, float]]:
        found = [(place(row), row["validation"]) for row in rows if "validation" in row and not row.get("last")]
        taus = [(at, report.get("replayed_tau") or report.get("tau")) for at, report in found]
        return [(at, tau) for at, tau in taus if at is not None and tau is not None]

    steps = [Curve(name, judged(rows, lambda row: row["step"]), marks=True) for name, rows in logs.items()]
    read = lambda row: (row["validation"].get("training") or {}).get("tokens")
    tokens = [Curve(name, judged(rows, read), marks=True) for name, rows in logs.items()]
    losses = [Curve(name, [(row["step"], row["loss"]) for row in rows if "loss" in row]) for name, rows in logs.items()]
    tau = Axis("tau")
    return [
        lines(steps, x=Axis("step"), y=tau, title="tau of held-out prompts over the steps"),
        lines(tokens, x=Axis("tokens"), y=tau, title="tau of held-out prompts over the tokens read"),
        lines(losses, x=Axis("step"), y=Axis("loss"), title="Loss of training steps; heads with other losses cannot be compared by it"),
    ]  # fmt: skip
