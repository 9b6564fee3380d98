"""Results of a measurement as tables, charts and sentences, on a terminal, in Markdown and on a page."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

from markupsafe import Markup

from specdec.core import files, progress
from specdec.core.wording import format_count
from specdec.measuring.certainty import Gain, rate_gains
from specdec.measuring.charts import ChartCurve, chart_intervals, chart_lines, format_number
from specdec.measuring.contexts import Contexts, list_context_sections
from specdec.measuring.counting import join_equal
from specdec.measuring.page import Section, Table, Verdict, drop_empty_columns, format_figure, write_page
from specdec.measuring.report import Training, describe_losslessness, format_by_depth
from specdec.measuring.results import PAGE, RESULTS_FILE, Entry, Measurement
from specdec.measuring.terminal_table import make_terminal_table

COUNTINGS = "The same rounds as others count them"  # heading of a table
NO_SPEED = (
    "Not known: no speedup was measured. The largest tau is {tau}, of {method}. specdec evaluate measures speedups; "
    "specdec judge with baseline=URL does so for a server."
)
Cells = dict[str, str]  # texts of an entry by the heads of their columns; empty for unknown figures


def write_results(measurement: Measurement, out: Path, console: progress.Results, *, verbose: bool) -> None:
    """Writes results.json, results.md and results.html into the folder, and prints the first table.

    verbose: prints all tables. With protocol= the table of countings is printed, too.
    """
    page, document = ResultsPage(measurement), measurement.to_json()
    sections = page.list_sections()
    out.mkdir(parents=True, exist_ok=True)
    files.write_text(out / RESULTS_FILE, json.dumps(document, indent=1) + "\n")
    files.write_text(out / "results.md", page.to_markdown(sections))
    content: dict = {"verdicts": page.verdicts, "sections": sections, "pages": measurement.pages}
    write_page(out / PAGE, page.title, figures=document, **content)
    tables = {section.heading: section.table for section in sections if section.table is not None}
    for heading, table in tables.items():
        has_published = heading == COUNTINGS and measurement.question_set.protocol is not None
        if verbose or has_published or heading == next(iter(tables)):
            console.print(make_terminal_table(heading, table, console.width))
    for sentence in page.sentences():
        console.say(sentence)
    console.print(f"written: {out}/{RESULTS_FILE}, results.md and {PAGE} (all columns)")


@dataclass(frozen=True)
class ResultsPage:
    """The sections, tables and sentences of a measurement."""

    measurement: Measurement

    @property
    def title(self) -> str:
        """The measurement's own title, else the suite's, else the number of methods."""
        suite = self.measurement.question_set.suite
        return self.measurement.title or (
            suite["title"] if suite else f"{format_count(self._num_methods, 'way')} to draft"
        )

    @property
    def _num_methods(self) -> int:
        return len({entry.method for entry in self.measurement.entries})

    def list_sections(self) -> list[Section]:
        """The sections of the page, in order."""
        tables = [Section(heading, table=table) for heading, table in self.tables()]
        countings = [f"{name}: {counting}" for name, counting in self.measurement.countings.items()]
        entries = self.measurement.entries
        return [
            Section(points=self.measurement.notes),
            *self.measurement.sections,
            *tables[:1],
            Section("Charts", charts=[*self._charts()]),
            *tables[1:],
            *list_context_sections(dict(map(self.name_contexts, entries))),
            Section("How they count", points=countings if self._decoded else ()),
            Section("Are the answers those of the target?", points=[*self.remarks()]),
            Section("Checks", points=self.measurement.checks),
            Section(
                "How it was measured",
                points=[f"Protocol: {self.measurement.protocol}"],
                table=self.measurement.facts,
            ),
        ]

    @cached_property
    def verdicts(self) -> list[Verdict]:
        """The measurement's own verdicts, else one for each temperature and batch size: whether drafts pay."""
        groups: dict[str, list[Gain]] = {}
        for entry in self.measurement.entries:
            report, (_, *settings) = entry.report, self._identify(entry).items()
            if report.speedup:
                span = report.speedup_ci or (math.nan, math.nan)
                num = min(report.num_prompts, self.measurement.settings["num_questions"])
                condition = "".join(f", {key} {value}" for key, value in settings if value)
                gain = Gain(entry.method, report.speedup, span, num)
                groups.setdefault(condition, []).append(gain)
        rate = partial(rate_gains, unit="questions", remedy="limit=, prompts=")
        verdicts = [rate(gains, condition=condition) for condition, gains in groups.items()]
        return [*self.measurement.verdicts] or verdicts or [("unsure", self._describe_longest())]

    def _describe_longest(self) -> str:
        """The sentence of a measurement without speedups."""
        taus = []
        for entry in self.measurement.entries:
            report = entry.report
            figures = (report.tau, report.tau_ci) if report.decoded else (report.replayed_tau, report.replayed_tau_ci)
            taus.append((figures[0] or 0.0, format_figure(*figures), entry.method))
        _, tau, method = max(taus)
        return NO_SPEED.format(tau=tau, method=method)

    def tables(self) -> Iterator[tuple[str, Table]]:
        """Yields the tables of the entries, with their headings."""
        yield "Acceptance" if self.measurement.sections else self.title, self._tabulate(self._cells)
        if len(self._categories()) > 1:
            yield "Acceptance length by category", self._tabulate(self._cells_of_categories)
        if self._decoded:
            yield COUNTINGS, self._tabulate(self._cells_of_countings)

    def remarks(self) -> Iterator[str]:
        """Yields sentences on losslessness, or remarks. Methods with the same sentence are named together."""
        names_by_sentence: dict[str, list[str]] = {}
        for entry in self.measurement.entries:
            sentences = [describe_losslessness(entry.report)] if entry.remarks is None else entry.remarks
            for sentence in sentences:
                names_by_sentence.setdefault(sentence, []).append(self._name(entry))
        for sentence, names in names_by_sentence.items():
            all_the_same = len(names_by_sentence) == 1 < len(names)
            yield f"{'all' if all_the_same else '; '.join(names)}: {sentence}"

    def sentences(self) -> list[str]:
        """The sentences that a terminal shows below the tables."""
        lines = [sentence for _, sentence in self.verdicts]
        for section in self.measurement.sections:
            lines += [*section.points, *(f"{label}: {command}" for label, command in section.commands)]
        lines += [*self.remarks(), *self.measurement.checks, *self.measurement.notes]
        return [*lines, f"protocol: {self.measurement.protocol}"]

    def to_markdown(self, sections: Sequence[Section]) -> str:
        """The content of results.md."""
        paragraphs = [section.to_markdown() for section in sections if section.filled]
        verdicts = [f"**{sentence}**" for _, sentence in self.verdicts]
        return "\n\n".join([f"# {self.title}", *verdicts, *filter(None, paragraphs)]) + "\n"

    # Tables

    @property
    def _decoded(self) -> bool:
        """Whether any entry comes from decoding."""
        return any(entry.counts for entry in self.measurement.entries)

    def _tabulate(self, make_cells: Callable[[Entry], Cells]) -> Table:
        """A table with a row for each entry, without columns in which all figures are unknown."""
        cells = [self._identify(entry) | make_cells(entry) for entry in self.measurement.entries]
        return drop_empty_columns(list(cells[0]), [list(row.values()) for row in cells])

    def _identify(self, entry: Entry) -> Cells:
        """The cells that tell an entry from the others."""
        temperatures = {other_entry.temperature for other_entry in self.measurement.entries}
        batches = {other_entry.batch for other_entry in self.measurement.entries}
        return {
            "method": entry.method,
            "T": format_number(entry.temperature) if len(temperatures) > 1 else "",
            "batch": str(entry.batch) if len(batches) > 1 else "",
        }

    def _name(self, entry: Entry) -> str:
        """The name of an entry in sentences."""
        method, *settings = self._identify(entry).items()
        return ", ".join([method[1], *(f"{key} {value}" for key, value in settings if value)])

    def name_contexts(self, entry: Entry) -> tuple[str, Contexts | None]:
        """tau by context with its name: of all prompts by replay, else of decoded ones."""
        name, replayed = self._name(entry), entry.report.replayed_contexts
        return (f"{name}, replayed", replayed) if replayed else (name, entry.report.contexts)

    def _cells(self, entry: Entry) -> Cells:
        """The cells of the main table."""
        training = entry.report.training or Training()
        return {
            **self._cells_of_acceptance(entry),
            **self._cells_of_speed(entry),
            **self._cells_of_users(entry),
            "tokens trained on": format_number(training.tokens) if training.tokens else "",
            "requests": str(entry.report.num_prompts or entry.report.replayed_prompts or ""),
        }

    def _cells_of_acceptance(self, entry: Entry) -> Cells:
        report = entry.report
        published = self.measurement.published
        length = self.measurement.countings[published].compute_length(entry.counts) if published else None
        survival = report.survival or report.replayed_survival
        acceptance_by_position = format_by_depth(survival) if entry.remarks is not None and survival else ""
        difference = entry.difference if entry.difference and self._num_methods > 1 else (None,)
        return {
            "tau": format_figure(report.tau, report.tau_ci),
            published: format_figure(length),
            "tau, replayed": format_figure(report.replayed_tau, report.replayed_tau_ci),
            "tau, best candidates": format_figure((report.candidates or {}).get("oracle_tau")),
            "accepted by position": acceptance_by_position,
            f"tau minus that of {self.measurement.reference}": format_figure(*difference, sign="+"),
        }

    def _cells_of_speed(self, entry: Entry) -> Cells:
        report = entry.report
        auto, stages = report.auto or {}, report.ms_per_round or {}
        return {
            "speedup": format_figure(report.speedup, report.speedup_ci),
            **_cells_of_prediction(entry),
            "speedup, auto": format_figure(auto.get("speedup"), auto.get("speedup_ci")),
            "tokens/s": format_figure(report.tokens_per_second, digits=1),
            "plain": format_figure(report.baseline_tokens_per_second, digits=1),
            "draft, ms": format_figure(stages.get("draft")),
            "verify, ms": format_figure(stages.get("verify")),
        }

    def _cells_of_users(self, entry: Entry) -> Cells:
        """Speeds of one of several users; at a batch size of 1 they equal the others, and are left out."""
        report = entry.report
        drafted = report.user_tokens_per_second if entry.batch > 1 else None
        plain = report.baseline_user_tokens_per_second if entry.batch > 1 else None
        return {
            "speedup of a user": format_figure(*(entry.user_speedup or (None,))),
            "tokens/s of a user": format_figure(drafted, digits=1),
            "plain, of a user": format_figure(plain, digits=1),
            "first token, s": format_figure(entry.first_token),
        }

    def _categories(self) -> list[str]:
        return sorted({name for entry in self.measurement.entries for name in entry.report.by_category})

    def _cells_of_categories(self, entry: Entry) -> Cells:
        reports = entry.report.by_category
        cells = dict.fromkeys(self._categories(), "")
        for name, report in reports.items():
            cells[name] = format_figure(report.tau if report.decoded else report.replayed_tau)
        return cells

    def _cells_of_countings(self, entry: Entry) -> Cells:
        joined = join_equal(self.measurement.countings)
        return {
            name: format_figure(counting.compute_length(entry.counts), digits=3) for name, counting in joined.items()
        }

    # Charts

    def _charts(self) -> Iterator[Markup]:
        """Yields charts of the methods' speedups, one for each temperature; with several batch sizes, against these."""
        measured = [entry for entry in self.measurement.entries if entry.report.tau and entry.report.speedup_ci]
        batches = {entry.batch for entry in self.measurement.entries}
        for temperature in sorted({entry.temperature for entry in measured}):
            entries = [entry for entry in measured if entry.temperature == temperature]
            yield _chart_methods(entries, temperature) if len(batches) == 1 else _chart_batches(entries, temperature)


def _cells_of_prediction(entry: Entry) -> Cells:
    if entry.predicted is None:
        return {"predicted": "", "measured / predicted": ""}
    speedup, low, high, extrapolated = entry.predicted
    measured = entry.report.speedup
    if entry.user_speedup is not None:
        measured = entry.user_speedup[0] or measured
    return {
        "predicted": format_figure(speedup, (low, high)) + " *" * extrapolated,
        "measured / predicted": format_figure(measured / speedup if measured else None),
    }


def _chart_methods(entries: Sequence[Entry], temperature: float) -> Markup:
    rows = []
    for entry in entries:
        speedup, span = entry.report.speedup, entry.report.speedup_ci
        assert speedup is not None and span is not None
        rows.append((f"{entry.method}, tau {entry.report.tau:.2f}", speedup, span))
    title = f"Speedup of each method with its 95 % interval, T={temperature:g}"
    return chart_intervals(rows, x="times as fast as plain decoding", title=title, reference=1.0)


def _chart_batches(entries: Sequence[Entry], temperature: float) -> Markup:
    points: dict[str, list[tuple[float, float]]] = {}
    for entry in entries:
        assert entry.report.speedup is not None
        points.setdefault(entry.method, []).append((float(entry.batch), entry.report.speedup))
    curves = [ChartCurve(method, sorted(speeds), marks=True) for method, speeds in points.items()]
    return chart_lines(
        curves, x="requests at once", y="times plain decoding", title=f"Speedup by load, T={temperature:g}"
    )
