"""A choice as tables, charts and sentences."""

from collections.abc import Iterator
from typing import Any

from markupsafe import Markup

from specdec.core.wording import format_count
from specdec.measuring.certainty import Gain, rate_gains
from specdec.measuring.charts import ChartCurve, chart_lines
from specdec.measuring.contexts import Contexts, list_context_sections
from specdec.measuring.page import Section, Table, Verdict, format_figure
from specdec.measuring.report import Report
from specdec.measuring.results import Entry
from specdec.tools.choose.choice import ShapeAcceptance
from specdec.tools.choose.engine_flags import SCHEDULE, SCHEDULE_NOTE


def make_entries(acceptance: list[ShapeAcceptance], temperature: float, num_answers: int) -> list[Entry]:
    """The acceptance of each shape as rows of results."""
    entries = []
    for shape in acceptance:
        name = ", ".join(filter(None, (shape.drafter, shape.shape)))
        figures: dict[str, Any] = {"tau": shape.tau, "tau_ci": shape.tau_ci, "survival": shape.survival}
        report = Report(temperature, num_prompts=num_answers, num_rounds=0, **figures)
        entries.append(Entry(name, temperature, 1, report, remarks=[]))
    return entries


def list_verdicts(choice: dict[str, Any]) -> list[Verdict]:
    """Whether the best drafter is certain, for each load of the first context. choice: see `choice` of results.json"""
    verdicts = []
    for row in choice["loads"]:
        if row["context"] != choice["contexts"][0]:
            continue
        gains = []
        for name, best_shape in row["drafters"].items():
            title = ", ".join(filter(None, (name, best_shape["shape"])))
            span = (best_shape["low"], best_shape["high"])
            gains.append(Gain(title, best_shape["speedup"], span, choice["num_answers"]))
        verdict = rate_gains(
            gains, unit="answers", remedy="limit=, prompts=", condition=f" at load {row['load']}", choosing=True
        )
        verdicts.append(verdict)
    return verdicts


def list_sections(choice: dict[str, Any]) -> list[Section]:
    """The sections of the page. choice: see `choice` of results.json"""
    summary = (
        f"{format_count(choice['num_answers'], 'answer')}. Costs: {choice['costs']['source']}. Intervals: 95 %, "
        "of tau over prompts and of timed seconds. *: extrapolated beyond the rows, drafts or contexts that costs "
        "are known of."
    )
    return [
        Section("The choice", texts=[summary], table=make_table(choice), points=[*describe_crossings(choice)]),
        Section("By load", charts=chart_choice(choice)),
        *list_context_sections(find_contexts(choice)),
        Section("Engines", points=[*describe_refusals(choice["flags"])], commands=[*list_commands(choice["flags"])]),
    ]


def find_contexts(choice: dict[str, Any]) -> dict[str, Contexts | None]:
    """tau by context of each drafter's best shape at the first load, by the name of both."""
    best_shapes = choice["loads"][0]["drafters"]
    contexts = {}
    for row in choice["acceptance"]:
        if row["shape"] == best_shapes.get(row["drafter"], {}).get("shape"):
            contexts[", ".join(filter(None, (row["drafter"], row["shape"])))] = row.get("contexts")
    return contexts


def make_table(choice: dict[str, Any]) -> Table:
    """A row for each context and load: the best drafter and its shape, then the best shape of each drafter."""
    rows, names = [], list(choice["loads"][0]["drafters"])
    for row in choice["loads"]:
        drafters = row["drafters"]
        shape = drafters[row["best"]]["shape"] if row["best"] in drafters else ""
        best = ", ".join(filter(None, (row["best"], shape)))
        cells = [write_speedup(drafters[name]) for name in names]
        rows.append([str(row["load"]), f"{row['context']:.0f}", best, *cells])
    return Table(["load", "context", "best", *names], rows)


def write_speedup(best_shape: dict[str, Any]) -> str:
    """The speedup of a drafter's best shape with its interval; * where it is extrapolated."""
    figure = format_figure(best_shape["speedup"], (best_shape["low"], best_shape["high"]))
    figure += " *" * best_shape["extrapolated"]
    return f"{best_shape['shape']}: {figure}" if best_shape["shape"] else figure


def describe_crossings(choice: dict[str, Any]) -> Iterator[str]:
    """Sentences on the load from which plain decoding is faster."""
    last = choice["loads"][-1]["load"]
    for context, crossings in choice["plain_from"].items():
        for name, crossing in crossings.items():
            load = f"from load {crossing[0]}{' *' * crossing[1]}" if crossing else f"at no load up to {last}"
            yield f"behind {context} tokens plain is faster than {'everything' if name == 'all' else name} {load}"


def list_commands(flags: list[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    """The lines that start engines, behind what they are for. flags: see `list_flags`"""
    for flag in flags:
        if "line" in flag:
            yield "{drafter}, {engine}, loads {loads[0]} to {loads[1]}".format(**flag), flag["line"]


def describe_refusals(flags: list[dict[str, Any]]) -> Iterator[str]:
    """The reasons why there is no line for an engine, and what a schedule does. flags: see `list_flags`"""
    for flag in flags:
        if "reason" in flag:
            yield "{drafter}, no line for {engine}: {reason}".format(**flag)
    if any(SCHEDULE in flag.get("line", "") for flag in flags):
        yield SCHEDULE_NOTE


def chart_choice(choice: dict[str, Any]) -> list[Markup]:
    """Speedup and drafts of each drafter's best shape against the load, of the first context."""
    rows = [row for row in choice["loads"] if row["context"] == choice["contexts"][0]]
    titles = {
        "speedup": ("Speedup of each drafter at its best shape", "times plain decoding"),
        "drafts": ("Drafts in a round of that shape", "drafts"),
    }
    charts = []
    for figure, (title, y) in titles.items():
        curves = []
        for name in rows[0]["drafters"]:
            curves.append(ChartCurve(name, [(row["load"], row["drafters"][name][figure]) for row in rows]))
        charts.append(chart_lines(curves, x="answers at once", y=y, title=title))
    return charts
