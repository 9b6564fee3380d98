"""The page of several heads and proposers that were decoded in turn on the same prompts."""

from collections.abc import Mapping

from markupsafe import Markup

from specdec.measuring.report import Report, Training, verdict
from train.pages.charts import ChartCurve, lines, number
from train.pages.page import Section, Table, render_page, write_figure

Columns = Mapping[float, Mapping[str, Report]]  # temperature -> method -> report
Differences = Mapping[float, Mapping[str, tuple[float, list[float]]]]  # the same, of tau minus that of the first method


def render_comparison(
    columns: Columns, differences: Differences, *, first: str, title: str, conditions: str, settings: dict
) -> str:
    """first: the method that `differences` are taken to; settings: of the comparison"""
    data = {
        "settings": settings,
        "reports": {f"{t:g}": {name: each.to_json() for name, each in column.items()} for t, column in columns.items()},
        "differences": {
            f"{t:g}": {name: [each, *span] for name, (each, span) in row.items()} for t, row in differences.items()
        },
    }
    said = {name: verdict(report) for name, report in columns[min(columns)].items() if report.decoded}
    sections = [
        Section(texts=[conditions]),
        Section("All of them", table=tabulate(columns, differences, first)),
        Section("Figures", charts=[chart_speed(t, column) for t, column in columns.items()]),
        Section("Are the answers those of the target?", points=[f"{name}: {each}" for name, each in said.items()]),
    ]
    return render_page(title, data=data, sections=sections)


def tabulate(columns: Columns, differences: Differences, first: str) -> Table:
    """All methods at all temperatures. A column in which nothing is known is left out."""
    rows = []
    for temperature, column in columns.items():
        for name, report in column.items():
            ran, stages, auto = report.training or Training(), report.ms_per_round or {}, report.auto or {}
            rows.append(
                {
                    "method": name,
                    "temperature": number(temperature) if len(columns) > 1 else "",
                    "tau, replayed": write_figure(report.replayed_tau, report.replayed_tau_ci),
                    "tau, decoded": write_figure(report.tau, report.tau_ci),
                    "tau, best candidates": write_figure((report.candidates or {}).get("oracle_tau")),
                    f"tau minus that of {first}": write_figure(*differences[temperature].get(name, (None,)), sign="+"),
                    "speedup": write_figure(report.speedup, report.speedup_ci),
                    "speedup, auto": write_figure(auto.get("speedup"), auto.get("speedup_ci")),
                    "tokens/s": write_figure(report.tokens_per_second),
                    "plain, tokens/s": write_figure(report.baseline_tokens_per_second),
                    "draft, ms": write_figure(stages.get("draft")),
                    "verify, ms": write_figure(stages.get("verify")),
                    "tokens trained on": number(ran.tokens) if ran.tokens else "",
                    "prompts, decoded": str(report.num_prompts or ""),
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
