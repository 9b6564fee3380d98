"""The figures of validations in an engine: printed lines, a table, and curves over the steps of a run."""

from collections.abc import Iterator, Mapping
from typing import Any

from markupsafe import Markup

from specdec.core.wording import format_count
from specdec.measuring.charts import ChartCurve, chart_lines
from specdec.measuring.page import Table, format_figure

HEADS = ["load", "answers", "tau, served (95 %)", "tau, replayed", "difference (95 %)", "tokens/s of a user",
         "plain, of a user", "speedup of a user"]  # fmt: skip


def list_lines(served: dict[str, Any]) -> Iterator[str]:
    """Yields a line on the engine, one for each load, and one on an error. served: see `ServedValidation`"""
    yield describe_engine(served)
    for load, level in served["loads"].items():
        _, _, tau, replayed, difference, rate, _, speedup = list_cells(load, level)
        num, answers = level.get("prompts", level["answers"]), level["answers"]
        figures = [
            f"tau {tau or 'unknown'}" + f" of {format_count(num, 'prompt')}, {answers} answers" * (num < answers),
            f"replayed {replayed}, difference {difference}" * bool(replayed),
            f"{rate} tokens/s of a user" * bool(rate),
            f"{speedup} times plain" * bool(speedup),
            f"{format_count(len(level['failed']), 'request')} failed" * bool(level["failed"]),
        ]
        part = f" ({level.get('rows')} of them, and others wait)" * ("rows" in level)
        yield f"served, {load} at once{part}: {'; '.join(filter(None, figures))}"


def describe_engine(served: dict[str, Any]) -> str:
    """A clause on the engine, the version and the time, and on what ended the validation."""
    error = f"; the engine is left out until the next validation: {served['error']}" if "error" in served else ""
    if "version" not in served:
        return f"served: nothing{error}"
    return (
        f"served by {served['kind']} at {served['url']}: {served['version']}, put in within "
        f"{served['swap_seconds']:.2f} s, {format_count(served['prompts'], 'prompt')}, "
        f"{format_count(served['drafts'], 'draft')} a round, {served['seconds']:.1f} s{error}"
    )


def list_cells(load: str, level: dict[str, Any]) -> list[str]:
    """The figures of a load below HEADS, as text; empty where they are not known."""

    def write_figure(name: str, **settings: Any) -> str:
        return format_figure(level.get(name), level.get(f"{name}_ci"), **settings)

    return [
        f"{load}, {level['rows']} together" if "rows" in level else load,
        str(level["answers"]),
        write_figure("tau"),
        format_figure(level.get("replayed_tau")),
        write_figure("difference", digits=3, sign="+"),
        write_figure("user_tokens_per_second", digits=1),
        write_figure("plain_user_tokens_per_second", digits=1),
        write_figure("user_speedup"),
    ]


def tabulate_served(served: dict[str, Any] | None) -> Table | None:
    """The figures by load."""
    if served is None:
        return None
    return Table(HEADS, [list_cells(load, level) for load, level in served["loads"].items()])


def list_texts(served: dict[str, Any] | None) -> list[str]:
    """Sentences on the engine, and the verdict of each load."""
    if served is None:
        return []
    verdicts = [f"{load} at once: {level['verdict']}" for load, level in served["loads"].items() if "verdict" in level]
    return [f"{describe_engine(served)}.", *verdicts]


def chart_served(reports: Mapping[int, dict]) -> list[Markup]:
    """A chart of `draw_served`."""
    title = "tau in the engine (with 95 % intervals)"
    return [chart_lines(draw_served(reports), x="step", y="tau, tokens a round", title=title)]


def draw_served(reports: Mapping[int, dict]) -> list[ChartCurve]:
    """tau of the smallest load over the steps of a run, as served and replayed along the same answers.

    reports: reports of validations by step
    """
    loads_of_step = {step: (report.get("served") or {}).get("loads", {}) for step, report in reports.items()}
    load = min(set[str]().union(*loads_of_step.values()), key=int, default="")
    levels = {step: loads[load] for step, loads in loads_of_step.items() if loads.get(load, {}).get("tau")}
    points = [(step, level["tau"]) for step, level in levels.items()]
    spans = [tuple(level["tau_ci"] or (level["tau"], level["tau"])) for level in levels.values()]
    replayed = [(step, level["replayed_tau"]) for step, level in levels.items() if level.get("replayed_tau")]
    return [
        ChartCurve(f"served tau, {load} at once", points, marks=True, spans=spans),
        ChartCurve("replayed along the same answers", replayed, marks=True),
    ]
