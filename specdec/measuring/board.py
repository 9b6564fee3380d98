"""The board: a page of all records in a folder, drafters beside engines, which says what may not be compared."""

import itertools
import operator
import re
import urllib.parse
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from markupsafe import Markup

from specdec.core import files
from specdec.core.wording import format_count
from specdec.measuring import records
from specdec.measuring.charts import chart_intervals
from specdec.measuring.contexts import AXES
from specdec.measuring.page import Section, Table, write_page
from specdec.measuring.record import Absence, Record, RecordedLoad
from specdec.measuring.records import BUSY, CHECKS, PLAIN, Check, FieldDifference, RecordFiles
from specdec.measuring.report import TAU

PAGE, MARKDOWN = "board.html", "board.md"
TITLE = "Drafters in engines"
LEGEND = (
    f"tau: {TAU}. Figures have 95 % intervals over questions. The speedup is over the same engine without drafts, of a "
    "user, median over answers."
)
KEY = (
    "K: drafts of a round, at most; n: answers",
    f"{PLAIN}: the engine without drafts",
    *(f"{name}: {meaning}" for name, meaning in CHECKS.values()),
    "machine busy: other programs took this share of it, so no speeds may be compared",
    "[1]: the note of this number below the table says what may not be compared with cells without it",
)
RANGE = re.compile(r"(\d*)(?:-(\d*))?")  # first and last number in the name of a bucket
OVERLAP = "Groups overlap, as older records have wider ones: compare rows within the same group only."
MARKUP = {  # of the parts of a cell
    "strong": Markup("<b>{}</b>"),
    "small": Markup("<small>{}</small>"),
    "link": Markup('<a href="{}">record</a>'),
    "text": Markup("{}"),
}
MARKDOWN_FORMS = {"strong": "**{}**", "small": "{}", "link": "[record]({})", "text": "{}"}  # likewise
GROUPS = {
    "category": "category",
    "context": AXES["context"],
    "answer": AXES["answer"],
    "prompt_tokens": "tokens of the prompt",
    "answer_tokens": "tokens of the answer",
}


@dataclass(frozen=True)
class BoardEntry:
    """What a cell of the board says of a record, or in place of one.

    figures: unit, and text of a figure with its interval; marks: numbers of the table's notes
    path: way to the record from the board
    """

    figures: Sequence[tuple[str, str]] = ()
    checks: Sequence[Check] = ()
    remark: str = ""
    marks: Sequence[int] = ()
    path: str = ""

    def to_markup(self) -> Markup:
        """The entry for the page."""
        lines = Markup("<br>").join(Markup(" ").join(parts) for parts in self._list_lines(MARKUP))
        checks = [Markup('<span class="{}">{}</span>').format(answer or "soft", text) for answer, text in self.checks]
        return Markup("<div>{}<div>{}</div></div>").format(lines, Markup(", ").join(checks))

    def to_markdown(self) -> str:
        """The entry for a cell of Markdown."""
        lines = [" ".join(parts) for parts in self._list_lines(MARKDOWN_FORMS)]
        return "<br>".join(filter(None, [*lines, ", ".join(text for _, text in self.checks)]))

    def _list_lines(self, forms: Mapping[str, str]) -> Iterator[list[str]]:
        """Yields the parts of each line above the checks, without empty ones. forms: MARKUP or MARKDOWN_FORMS"""
        lines = []
        for unit, figure in self.figures:
            value, _, interval = figure.partition(" ")
            lines.append([("strong", value), ("text", unit), ("small", interval)])
        marks = [("text", f"[{mark}]") for mark in self.marks]
        lines.append([("text", self.remark), ("link", urllib.parse.quote(self.path)), *marks])
        for line in lines:
            yield [forms[kind].format(text) for kind, text in line if text]


NOTHING = BoardEntry(remark="not run")
Cells = dict[tuple[str, str], list[BoardEntry]]  # entries by the names of drafter and engine


@dataclass(frozen=True)
class BoardTable:
    """The records of one suite and target, by file, as a table of drafters and engines."""

    records: Mapping[str, Record]
    absences: Sequence[Absence]

    @property
    def title(self) -> str:
        record = next(iter(self.records.values()))
        return f"{record.protocol.suite}, {record.target.name}"

    @cached_property
    def load(self) -> int | None:
        """The smallest number of requests at once that all records have; None without one."""
        first, *further = self.records.values()
        shared = {load.at_once for load in first.loads}
        for record in further:
            shared &= {load.at_once for load in record.loads}
        return min(shared, default=None)

    def list_sections(self, render: Callable[[BoardEntry], str]) -> list[Section]:
        """The table, then its records by groups of answers and by load. render: makes the text of an entry"""
        points = [f"[{number}] {note}" for number, note in enumerate(self.notes, start=1)]
        points += records.describe_unknown_fields(self.records)
        points.append(f"The same in all: {records.describe_common(self.records)}.")
        load = f"At {format_count(self.load, 'request')} at once." if self.load else "At the first load of each record."
        sections = [
            Section(self.title, texts=[load], table=self._tabulate(render), points=points, charts=[self._chart()])
        ]
        for kind, name in GROUPS.items():
            table = self._tabulate_groups(kind)
            ranges = [find_range(head) for head in table.heads[3:]]
            overlaps = any(end >= start for (_, end, _), (start, _, _) in itertools.pairwise(ranges))
            if len(ranges) > 1:  # one group alone is the table above
                points = [OVERLAP] if overlaps and kind != "category" else []
                sections.append(Section(f"{self.title}: tau by {name}", table=table, points=points))
        if any(len(record.loads) > 1 for record in self.records.values()):
            sections.append(Section(f"{self.title}: all loads", table=records.tabulate_records(self.records)))
        return [*sections, Section(f"{self.title}: notes", points=[*records.describe_notes(self.records)])]

    def _chart(self) -> Markup:
        """A chart of the speedups over plain decoding, with the notes' numbers."""
        rows = []
        for name, record in self.records.items():
            value, low, high = self._choose_load(record).speedup or (None, None, None)
            if record.drafter and value is not None and low is not None and high is not None:
                subject = f"{records.name_drafter(record, self.records)}, {records.name_engine(record)}"
                marks = "".join(f" [{mark}]" for mark in self._list_marks(name, (records.NO_FIGURE, records.NO_SPEED)))
                rows.append((f"{subject}{marks}", value, (low, high)))
        title = f"Speedup over plain decoding in the same engine, with 95 % intervals: {self.title}"
        return chart_intervals(sorted(rows), x="times as fast as plain decoding", title=title, reference=1.0)

    @cached_property
    def notes(self) -> list["BoardNote"]:
        """What tells records from others, and forbids to compare them.

        A busy machine is among the checks of a cell, and loads are no reason if one is in all.
        """
        skipped = {BUSY, "loads" if self.load else ""}
        notes = []
        for difference in records.find_differences(self.records):
            usual = max(difference.names, key=lambda value: len(difference.names[value]))
            for value, names in difference.names.items():
                if value != usual and difference.field not in skipped:
                    notes.append(BoardNote(difference, value, usual, names))
        return notes

    def _list_marks(self, name: str, spoiled: Container[str]) -> list[int]:
        """Numbers of the notes on a record, from 1. spoiled: figures that are shown"""
        return [
            number
            for number, note in enumerate(self.notes, start=1)
            if name in note.names and note.difference.condition.spoiled in spoiled
        ]

    def _tabulate(self, render: Callable[[BoardEntry], str]) -> Table:
        """The table of drafters and engines, that of plain decoding first."""
        cells = self.fill_cells()
        drafters = sorted({drafter for drafter, _ in cells}, key=lambda name: (name != PLAIN, name))
        engines = sorted({engine for _, engine in cells})
        rows = []
        for drafter in drafters:
            row = []
            for engine in engines:
                texts = [render(entry) for entry in cells.get((drafter, engine), [NOTHING])]
                row.append(type(texts[0])("<br>").join(texts))  # texts of the page are markup
            rows.append([drafter, *row])
        return Table(["drafter", *engines], rows)

    def fill_cells(self) -> Cells:
        """The entries of all cells that are not empty."""
        cells: Cells = {}
        for name, record in self.records.items():
            key = records.name_drafter(record, self.records), records.name_engine(record)
            cells.setdefault(key, []).append(self._describe(name, record))
        for name, record in self.records.items():
            rate = self._choose_load(record).plain_user_tok_s
            key = PLAIN, records.name_engine(record)
            if rate is not None and key not in cells:
                remark = f"beside {records.name_drafter(record, self.records)}:"
                marks = self._list_marks(name, (records.NO_FIGURE, records.NO_SPEED))
                figures, limits = [("tokens/s", records.show_figure(rate, digits=1))], [*records.list_limits(record)]
                cells[key] = [BoardEntry(figures, limits, remark, marks, name)]
        for absence in self.absences:
            for key in self._find_places(absence):
                cells.setdefault(key, [BoardEntry(remark=absence.reason)])
        return cells

    def _find_places(self, absence: Absence) -> Iterator[tuple[str, str]]:
        """Yields drafter and engine of the cells that an absence is of."""
        drafters, engines = set(), set()
        for record in self.records.values():
            if is_of_drafter(absence, record):
                drafters.add(records.name_drafter(record, self.records))
            if is_of_engine(absence, record):
                engines.add(records.name_engine(record))
        yield from itertools.product(sorted(drafters) or [absence.drafter], sorted(engines) or [absence.engine])

    def _choose_load(self, record: Record) -> RecordedLoad:
        """The figures that the table shows of a record."""
        return next((load for load in record.loads if load.at_once == self.load), record.loads[0])

    def _describe(self, name: str, record: Record) -> BoardEntry:
        """The entry of a record."""
        load = self._choose_load(record)
        shown = {"tau": load.tau, "x plain": load.speedup} if record.drafter else {}
        figures = [(unit, records.show_figure(figure)) for unit, figure in shown.items() if figure]
        if load.user_tok_s:
            figures.append(("tokens/s", records.show_figure(load.user_tok_s, digits=1)))
        settings = [f"K {record.protocol.drafts}," if record.protocol.drafts else ""]
        settings.append("" if self.load else f"load {load.at_once},")
        settings.append("the engine gives no counts," if record.drafter and load.tau is None else "")
        marks = self._list_marks(name, (records.NO_FIGURE, records.NO_TAU, records.NO_SPEED))
        return BoardEntry(figures, records.list_checks(record), " ".join(filter(None, settings)), marks, name)

    def _tabulate_groups(self, kind: str) -> Table:
        """tau of the groups of answers, at the first load of a record. kind: key of GROUPS"""
        names = {name for record in self.records.values() for name in getattr(record.by, kind)}
        order = sorted(names, key=find_range)
        rows = []
        for record in filter(operator.attrgetter("drafter"), self.records.values()):
            groups = getattr(record.by, kind)
            cells = [
                f"{records.show_figure(groups[name].tau)}, n {groups[name].prompts}" if name in groups else "-"
                for name in order
            ]
            if any(group.tau for group in groups.values()):
                subject = [records.name_drafter(record, self.records), records.name_engine(record)]
                rows.append([*subject, str(record.loads[0].at_once), *cells])
        return Table(["drafter", "engine", "load", *order], rows)


@dataclass(frozen=True)
class BoardNote:
    """What tells some records of a table from others.

    value, usual: texts of the field's value, there and in the largest group of records; names: those of the records
    """

    difference: FieldDifference
    value: str
    usual: str
    names: Sequence[str]

    def __str__(self) -> str:
        condition, field = self.difference.condition, records.shorten_field(self.difference.field)
        spoiled = condition.spoiled[0].lower() + condition.spoiled[1:]
        return f"{field} {self.value} against {self.usual}: {spoiled} may be compared, as {condition.reason}."


def find_range(name: str) -> tuple[float, float, str]:
    """First and last number of a group of answers, and its name, by which groups are ordered."""
    numbers = RANGE.match(name)
    assert numbers is not None  # it may be empty
    return float(numbers[1] or 0), float(numbers[2] or "inf"), name


def is_of_drafter(absence: Absence, record: Record) -> bool:
    """Whether an absence is of a record's drafter."""
    return absence.drafter == (record.drafter.name if record.drafter else PLAIN)


def is_of_engine(absence: Absence, record: Record) -> bool:
    """Whether an absence is of a record's engine: of all its versions, or of the one that it names."""
    return absence.engine in (record.engine.name, records.name_engine(record))


def make_tables(contents: RecordFiles) -> list[BoardTable]:
    """A table for each suite and target. An absence is in those of its drafter, or in all if there is none."""
    groups: dict[tuple[str, str], dict[str, Record]] = {}
    for name, record in sorted(contents.records.items()):
        groups.setdefault((record.protocol.suite, record.target.name), {})[name] = record
    tables = []
    for (suite, _), group in sorted(groups.items()):
        absences = [
            absence
            for absence in contents.absences
            if absence.suite in (None, suite) and concerns_group(absence, contents.records, group)
        ]
        tables.append(BoardTable(group, absences))
    return tables


def concerns_group(absence: Absence, contents: Mapping[str, Record], group: Mapping[str, Record]) -> bool:
    """Whether an absence concerns a group of the records: one of its drafters, or a drafter that has no record."""
    with_drafter = {name for name, record in contents.items() if is_of_drafter(absence, record)}
    return not with_drafter or not with_drafter.isdisjoint(group)


def write_board(folder: Path) -> list[str]:
    """Writes the page and its Markdown into a folder of records, and returns sentences on files that it leaves out.

    Raises ValueError without a record, and for a file.
    """
    if folder.is_file():
        raise ValueError(f"board={folder} is a file: give the folder of the records.")
    contents = records.read_records([str(folder)], folder)
    tables = make_tables(contents)
    refused = [sentence.removeprefix("Left out: ").replace(f"{folder}/", "") for sentence in contents.refused]
    page, markdown = [Section(texts=[LEGEND])], [Section(texts=[LEGEND])]
    for table in tables:
        page += table.list_sections(BoardEntry.to_markup)
        markdown += table.list_sections(BoardEntry.to_markdown)
    for sections in (page, markdown):
        sections += [Section("How to read a cell", points=KEY), Section("Left out", points=refused)]
    document = {name: record.model_dump(mode="json", by_alias=True) for name, record in contents.records.items()}
    write_page(folder / PAGE, TITLE, figures=document, verdicts=[], sections=page)
    lines = [f"# {TITLE}", *(section.to_markdown() for section in markdown if section.filled)]
    files.write_text(folder / MARKDOWN, "\n\n".join(filter(None, lines)) + "\n")
    return contents.refused
