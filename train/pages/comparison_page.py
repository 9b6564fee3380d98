"""The page of a comparison: several heads and proposers, decoded in turn on the same prompts."""

from collections.abc import Mapping

from specdec.report import Report, verdict
from train.pages.charts import Axis, Curve, lines
from train.pages.page import render

COSTS = (1.0, 1.25, 1.5, 2.0, 3.0)  # of a round, in plain passes: lines of equal cost
Columns = Mapping[float, Mapping[str, Report]]  # temperature -> method -> report
Differences = Mapping[float, Mapping[str, tuple[float, list[float]]]]  # the same, of tau minus that of the first method


def render_comparison(
    columns: Columns, differences: Differences, *, first: str, title: str, conditions: str, settings: dict
) -> str:
    """first: the method that `differences` are taken to"""
    data = {
        "settings": settings,
        "reports": {f"{t:g}": {name: report.to_json() for name, report in column.items()} for t, column in columns.items()},
        "differences": {f"{t:g}": {name: [value, *span] for name, (value, span) in row.items()} for t, row in differences.items()},
    }  # fmt: skip
    return render(
        "comparison.html.jinja",
        title=title,
        data=data,
        columns=columns,
        differences=differences,
        first=first,
        conditions=conditions,
        fastest=fastest(columns),
        charts=[chart for t, column in columns.items() for chart in charts(t, column)],
        verdicts={name: verdict(report) for name, report in columns[min(columns)].items()},
    )


def fastest(columns: Columns) -> list[dict]:
    """For each temperature the fastest method of all prompts and of each category, with the second, and by how much."""
    rows = []
    for temperature, column in columns.items():
        categories = sorted({name for report in column.values() for name in report.by_category})
        for category in [None, *categories] if len(categories) > 1 else [None]:
            parts = {
                name: report if category is None else report.by_category[category] for name, report in column.items()
            }
            order = sorted(parts, key=lambda name: -(parts[name].speedup or 0.0))
            best = parts[order[0]]
            rows.append({
                "temperature": temperature, "category": category or "all", "method": order[0], "report": best,
                "second": order[1] if len(order) > 1 else None, "why": why(best, parts[order[1]] if len(order) > 1 else None),
            })  # fmt: skip
    return rows


def why(best: Report, second: Report | None) -> str:
    """What makes the best one faster: tokens a round, or the time of a round."""
    if best.speedup is None or best.speedup < 1:
        return "no way is faster than plain decoding here"
    if second is None or best.tau is None or second.tau is None or not second.speedup:
        return ""
    tokens, rounds = best.tau / second.tau, (second.tau / second.speedup) / (best.tau / best.speedup)
    return f"{tokens:.2f} times the tokens a round, rounds {rounds:.2f} times as fast as those of the second"


def charts(temperature: float, column: Mapping[str, Report]) -> list:
    """Speedup against tau with lines of equal cost, and survival by depth."""
    marks = []
    for name, report in column.items():
        assert report.tau is not None and report.speedup is not None and report.speedup_ci is not None
        low, high = report.speedup_ci
        tip = f"{name}: tau {report.tau:.2f}, speedup {report.speedup:.2f}"
        marks.append(Curve(name, [(report.tau, report.speedup)], marks=True, spans=[(low, high)], tips=[tip]))
    most = max(curve.points[0][0] for curve in marks)
    costs = [Curve(f"cost {cost:g}", [(1.0, 1 / cost), (most, most / cost)], guide=True) for cost in COSTS if most > 1]
    survival = [
        Curve(name, list(enumerate(report.survival or [], start=1)), marks=True) for name, report in column.items()
    ]
    depths = list(range(1, 1 + max((len(curve.points) for curve in survival), default=1)))
    return [
        lines([*marks, *costs], x=Axis("tau"), y=Axis("speedup", low=0), title=f"Speedup against tau, T={temperature:g}; dashed: rounds that cost so many plain passes"),
        lines(survival, x=Axis("drafts", ticks=depths), y=Axis("share of rounds", low=0), title=f"Rounds that accept so many drafts, T={temperature:g}"),
    ]  # fmt: skip
