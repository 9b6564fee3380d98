"""What an evaluation found: its tables on a terminal, in Markdown and on a page, with the protocol beside the figures."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec import checkpoint
from specdec.measuring.charts import ChartCurve, lines, number
from specdec.measuring.counting import AnswerCounts, Counting, join_equal
from specdec.measuring.page import Section, Table, render_page, write_figure
from specdec.measuring.report import Report, Training, by_depth, verdict

DETAILS = (
    "tau, best",
    "speedup, captured",
    "draft, ms",
    "verify, ms",
    "tokens trained on",
)  # which a terminal leaves out


@dataclass(frozen=True)
class Entry:
    """One method at one temperature and batch size.

    difference: of its tau to that of the first method; predicted: its speedup
    user_speedup: of a user, with its interval, and first_token: seconds, of a server; remarks: instead of a verdict on its answers
    """

    method: str
    temperature: float
    batch: int
    report: Report
    counts: list[AnswerCounts] = field(repr=False)
    difference: tuple[float, list[float]] | None = None
    predicted: tuple[float, float, float, bool] | None = None
    user_speedup: tuple[float | None, list[float] | None] | None = None
    first_token: float | None = None
    remarks: Sequence[str] | None = None

    def to_json(self, countings: Mapping[str, Counting]) -> dict[str, Any]:
        about = {"method": self.method, "temperature": self.temperature, "batch": self.batch}
        lengths = {name: counting.length(self.counts) for name, counting in countings.items()}
        more = {
            "difference": self.difference,
            "predicted_speedup": self.predicted,
            "speedup_of_a_user": self.user_speedup,
        }
        known = {name: value for name, value in more.items() if value is not None}
        return {**about, "acceptance_length": lengths, **known, **self.report.to_json()}


@dataclass(frozen=True)
class ResultsPage:
    """entries: as they are shown; countings: of publications, by name; first: the method of the differences

    own: name of the counting of the protocol that was asked for
    """

    entries: Sequence[Entry]
    countings: Mapping[str, Counting]
    protocol: str
    settings: Mapping[str, Any]
    notes: Sequence[str] = ()
    first: str | None = None
    own: str | None = None

    @property
    def title(self) -> str:
        suite = self.settings["suite"]
        return suite["title"] if suite else f"{len({entry.method for entry in self.entries})} ways to draft"

    def tables(self) -> Iterator[tuple[str, Table]]:
        """With their headings."""
        yield self.title, self._tabulate(self.entries, self._cells)
        if any(entry.report.by_category for entry in self.entries) and len(self._categories()) > 1:
            yield "Acceptance length by category", self._tabulate(self.entries, self._cells_of_categories)
        if any(entry.report.tau for entry in self.entries):
            yield "The same rounds as others count them", self._tabulate(self.entries, self._cells_of_countings)

    def verdicts(self) -> Iterator[str]:
        """Whether answers are the target's: methods of which the same can be said are named together."""
        found: dict[str, list[str]] = {}
        for entry in self.entries:
            for sentence in [verdict(entry.report)] if entry.remarks is None else entry.remarks:
                found.setdefault(sentence, []).append(self._name(entry))
        for sentence, names in found.items():
            yield f"{'all' if len(found) == 1 < len(names) else '; '.join(names)}: {sentence}"

    def to_markdown(self) -> str:
        parts = [f"# {self.title}", f"Protocol: {self.protocol}"]
        parts += [f"## {heading}\n\n{table.to_markdown()}" for heading, table in self.tables()]
        counted = [f"- {name}: {counting}" for name, counting in self.countings.items()]
        parts += ["\n".join(counted), "\n".join(f"- {sentence}" for sentence in [*self.verdicts(), *self.notes])]
        return "\n\n".join(parts) + "\n"

    def to_html(self) -> str:
        (heading, table), *others = self.tables()
        sections = [
            Section(texts=[f"Protocol: {self.protocol}", *self.notes]),
            Section(heading, table=table, charts=[*self._charts()]),
            *(Section(name, table=each) for name, each in others),
            Section("How they count", points=[f"{name}: {each}" for name, each in self.countings.items()]),
            Section("Are the answers those of the target?", points=[*self.verdicts()]),
        ]
        data = {
            "settings": self.settings,
            "protocol": self.protocol,
            "results": [entry.to_json(self.countings) for entry in self.entries],
        }
        return render_page(self.title, data=data, sections=sections)

    # Tables

    def _tabulate(self, entries: Sequence[Entry], cells: Callable[[Entry], dict[str, str]]) -> Table:
        """A row for each entry. A column in which nothing is known is left out."""
        rows = [
            [*self._about(entry).items(), *cells(entry).items()] for entry in entries
        ]  # a category may be called method
        shown = [place for place in range(len(rows[0])) if any(row[place][1] for row in rows)]
        return Table(
            [rows[0][place][0] for place in shown], [[row[place][1] or "-" for place in shown] for row in rows]
        )

    def _about(self, entry: Entry) -> dict[str, str]:
        several = lambda values: len(set(values)) > 1
        return {
            "method": entry.method,
            "T": number(entry.temperature) if several(each.temperature for each in self.entries) else "",
            "batch": str(entry.batch) if several(each.batch for each in self.entries) else "",
        }

    def _name(self, entry: Entry) -> str:
        _, *more = self._about(entry).items()
        return ", ".join([entry.method, *(f"{key} {value}" for key, value in more if value)])

    def _cells(self, entry: Entry) -> dict[str, str]:
        report = entry.report
        ran, stages, auto = report.training or Training(), report.ms_per_round or {}, report.auto or {}
        own = self.countings[self.own].length(entry.counts) if self.own else None
        predicted, measured = entry.predicted, report.speedup
        user, span = entry.user_speedup or (None, None)
        ratio = (user or measured or 0.0) / predicted[0] if predicted and measured else None
        return {
            "tau": write_figure(report.tau, report.tau_ci),
            f"{self.own}": write_figure(own),
            "tau, replayed": write_figure(report.replayed_tau, report.replayed_tau_ci),
            "tau, best candidates": write_figure((report.candidates or {}).get("oracle_tau")),
            "accepted by position": by_depth(report.survival) if entry.remarks is not None and report.survival else "",
            f"tau minus that of {self.first}": write_figure(*(entry.difference or (None,)), sign="+"),
            "speedup": write_figure(report.speedup, report.speedup_ci),
            "speedup of a user": write_figure(user, span),
            "predicted": write_figure(predicted and predicted[0], predicted and predicted[1:3])
            + (" *" if predicted and predicted[3] else ""),
            "measured / predicted": write_figure(ratio),
            "speedup, captured": write_figure(report.served_speedup),
            "speedup, auto": write_figure(auto.get("speedup"), auto.get("speedup_ci")),
            "tokens/s": write_figure(report.tokens_per_second, digits=1),
            "plain": write_figure(report.baseline_tokens_per_second, digits=1),
            "tokens/s of a user": write_figure(report.user_tokens_per_second, digits=1) if entry.batch > 1 else "",
            "plain, of a user": write_figure(report.baseline_user_tokens_per_second, digits=1)
            if entry.batch > 1
            else "",
            "first token, s": write_figure(entry.first_token),
            "draft, ms": write_figure(stages.get("draft")),
            "verify, ms": write_figure(stages.get("verify")),
            "tokens trained on": number(ran.tokens) if ran.tokens else "",
            "requests": str(report.num_prompts or ""),
        }

    def _categories(self) -> list[str]:
        return sorted({name for entry in self.entries for name in entry.report.by_category})

    def _cells_of_categories(self, entry: Entry) -> dict[str, str]:
        parts = entry.report.by_category
        return {name: write_figure(parts[name].tau) if name in parts else "" for name in self._categories()}

    def _cells_of_countings(self, entry: Entry) -> dict[str, str]:
        joined = join_equal(self.countings)
        return {name: write_figure(counting.length(entry.counts), digits=3) for name, counting in joined.items()}

    # Charts

    def _charts(self) -> Iterator[Any]:
        """Speedup against tau; with several batch sizes speedup by batch size instead."""
        batches = sorted({entry.batch for entry in self.entries})
        for temperature in sorted({entry.temperature for entry in self.entries}):
            found = [
                (each, each.report.tau, each.report.speedup, each.report.speedup_ci)
                for each in self.entries
                if each.temperature == temperature
            ]
            known = [(each, tau, speed, span) for each, tau, speed, span in found if tau and speed and span]
            if len(batches) == 1:
                marks = [
                    ChartCurve(each.method, [(tau, speed)], spans=[(span[0], span[1])])
                    for each, tau, speed, span in known
                ]
                yield lines(marks, x="tau", y="speedup", title=f"Speedup against tau, T={temperature:g}")
                continue
            curves = []
            for method in dict.fromkeys(each.method for each, *_ in known):
                points = sorted((float(each.batch), speed) for each, _, speed, _ in known if each.method == method)
                curves.append(ChartCurve(method, points, marks=True))
            yield lines(curves, x="requests at once", y="speedup", title=f"Speedup by load, T={temperature:g}")


# Results of several evaluations

ASKED = (
    "suite",
    "protocol",
    "questions_digest",
    "num_questions",
    "template",
    "chat",
    "max_new_tokens",
    "ignore_stop",
    "stop_texts",
    "seed",
)
TARGET = ("fingerprint", "dtype")
DECODED = ("temperature", "top_p", "top_k", "repetition_penalty", "rule", "children")
MACHINE = ("machine", "device", "threads", "torch")


def read(folders: Sequence[str]) -> dict[str, dict]:
    """results.json of each folder. Raises ValueError for a folder without one."""
    found = {}
    for folder in folders:
        document = checkpoint.read_json(Path(folder) / "results.json")
        found[folder] = document
        try:
            list(say_differences(found))
            tabulate_side_by_side(found)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"{folder}/results.json is not of specdec evaluate ({error!r}): measure again.") from None
    return found


def say_differences(found: Mapping[str, dict]) -> Iterator[str]:
    """What of the protocol, and what of the machine, is not the same."""
    settings = [document["settings"] for document in found.values()]
    of = lambda each, name: each["decode"].get(name) if name in DECODED else each.get(name)
    write = lambda value: f"{value['title']} {value['digest']}" if isinstance(value, dict) else str(value)
    for names, what in (((*ASKED, *TARGET, *DECODED), "different protocols, so acceptance lengths are not comparable"),
                        (MACHINE, "different machines, so speeds are not comparable")):  # fmt: skip
        differing = [name for name in names if len({repr(of(each, name)) for each in settings}) > 1]
        if differing:
            listed = (f"{name} ({', '.join(write(of(each, name)) for each in settings)})" for name in differing)
            yield f"These are results of {what}: {'; '.join(listed)}."


def tabulate_side_by_side(found: Mapping[str, dict]) -> Table:
    heads = ["results", "method", "T", "batch", "tau", "speedup", "tokens/s"]
    rows = []
    for folder, document in found.items():
        for each in document["results"]:
            figures = (write_figure(each.get(name), each.get(f"{name}_ci")) for name in ("tau", "speedup"))
            about = [folder, each["method"], f"{each['temperature']:g}", str(each["batch"])]
            rows.append([*about, *figures, write_figure(each.get("tokens_per_second"), digits=1)])
    return Table(heads, rows)
