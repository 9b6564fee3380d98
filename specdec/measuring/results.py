"""The record of a measurement: results.json, .md and .html of `evaluate`, `replay`, `judge` and `choose`."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from specdec import checkpoint
from specdec.core.option_types import Options
from specdec.core.wording import format_count
from specdec.measuring.counting import SPECDEC, AnswerCounts, Counting
from specdec.measuring.page import Section, Table, Verdict, format_figure, replace_non_finite
from specdec.measuring.questions import QuestionSet
from specdec.measuring.report import TAU, Report
from specdec.text.messages import describe_arguments

FORM = 1  # version of results.json
RESULTS_FILE = "results.json"
PAGE = "results.html"
MADE_BY = "The folder that evaluate, replay, judge or choose writes has it, so run that command again"
UNRECORDED = ("out", "verbose", "accept_licence")  # options that change no figure of any verb
ADVICE = "Choose another out=FOLDER."  # end of the sentence for a folder with results of other settings


@dataclass(frozen=True)
class Entry:
    """The figures of one method at one temperature and batch size."""

    method: str
    temperature: float
    batch: int  # requests at once
    report: Report
    counts: Sequence[AnswerCounts] = field(
        default=(), repr=False
    )  # counts of each answer; empty if nothing was decoded
    difference: tuple[float, list[float]] | None = None  # tau minus that of the reference, with its interval
    predicted: tuple[float, float, float, bool] | None = None  # predicted speedup, low, high, extrapolated or not
    user_speedup: tuple[float | None, list[float] | None] | None = None  # speedup of a server's user, its interval
    first_token: float | None = None  # seconds until the first token
    remarks: Sequence[str] | None = None  # sentences in place of the one on losslessness

    def to_json(self, countings: Mapping[str, Counting]) -> dict[str, Any]:
        """The entry of results.json. countings: ways to count acceptance length, by name"""
        document: dict[str, Any] = {"method": self.method, "temperature": self.temperature, "batch": self.batch}
        if self.counts:
            lengths = {name: counting.compute_length(self.counts) for name, counting in countings.items()}
            document["acceptance_length"] = lengths
        optional = {
            "difference": self.difference,
            "predicted_speedup": self.predicted,
            "speedup_of_a_user": self.user_speedup,
        }
        document |= {name: value for name, value in optional.items() if value is not None}
        return document | self.report.to_json()


@dataclass(frozen=True)
class Measurement:
    """The results of a verb, before they are written."""

    settings: dict[str, Any]  # options of the verb, with digests of weights, files and questions
    question_set: QuestionSet
    entries: Sequence[Entry]  # in the order in which they are shown
    notes: Sequence[str]
    reference: str | None = None  # method from whose tau the differences are taken
    title: str = ""
    verdicts: Sequence[Verdict] = ()  # in place of those on the speedups of entries
    sections: Sequence[Section] = ()  # further sections of the page, shown before the tables
    checks: Sequence[str] = ()  # sentences on whether the figures mean what they seem to
    facts: Table | None = None  # fields that the figures depend on
    pages: Mapping[str, Path] = field(default_factory=dict)  # pages to link, by title, if they exist
    extra: dict[str, Any] = field(default_factory=dict)  # further keys of results.json, such as `choice` and `server`

    @property
    def countings(self) -> dict[str, Counting]:
        """The ways to count acceptance length, by name."""
        return self.question_set.countings

    @property
    def protocol(self) -> str:
        """A sentence with all that the figures depend on."""
        sentence, name = describe_protocol(self.settings), self.published
        return f"{sentence}; column {name}: {self.countings[name]}" if name else sentence

    @property
    def published(self) -> str:
        """The name of the protocol, if it counts in another way than this project; otherwise empty."""
        name = (self.question_set.protocol or {}).get("name", "")
        return name if name and replace(self.countings[name], behind_end=False) != SPECDEC else ""

    def to_json(self) -> dict[str, Any]:
        """The document of results.json."""
        document = {
            "form": FORM,
            "definition_of_tau": TAU,
            "settings": self.settings,
            "protocol": self.protocol,
            "counting": {name: str(counting) for name, counting in self.countings.items()},
            "notes": list(self.notes),
            "results": [entry.to_json(self.countings) for entry in self.entries],
        }
        return replace_non_finite(document | self.extra)


def list_pages(heads: Mapping[str, Path], **folders: str | None) -> dict[str, Path]:
    """The pages of runs and of earlier results, by title. heads: folders of heads; folders: of results, or None"""
    pages = {f"run of {name}": folder / "report.html" for name, folder in heads.items()}
    return pages | {name: Path(folder) / PAGE for name, folder in folders.items() if folder}


def describe_options(options: Options, *, free_options: Container[str] = ()) -> dict[str, Any]:
    """A verb's options for JSON, without UNRECORDED. free_options: further ones that are left out"""
    recorded = {name: value for name, value in options.model_dump().items() if name not in UNRECORDED}
    return {name: value for name, value in recorded.items() if name not in free_options}


def describe_protocol(settings: Mapping[str, Any]) -> str:
    """A sentence with all that figures depend on. settings: the settings in results.json"""
    suite, protocol, decode = settings["suite"], settings["protocol"], settings["decode"]
    clauses = [
        f"{format_count(settings['num_questions'], 'question')} of {suite['title'] if suite else settings['prompts']}"
    ]
    if protocol:
        clauses.append(f"protocol {protocol['name']} ({protocol['title']})")
    fingerprint, dtype = settings.get("fingerprint"), settings.get("dtype")
    clauses.append(f"target {settings['target']}" + (f" ({fingerprint})" if fingerprint else ""))
    if dtype:
        clauses.append(f"in {dtype}")
    clauses += [settings["chat"], describe_arguments(settings["template"]), *_describe_decoding(decode)]
    clauses.append(f"seed {settings['seed']}")
    if "max_new_tokens" in settings:
        clauses.append(f"at most {format_count(settings['max_new_tokens'], 'new token')}")
    if settings.get("ignore_stop"):
        clauses.append("answers go on behind stop tokens")
    if settings["stop_texts"]:
        clauses.append(f"answers end with {', '.join(settings['stop_texts'])}")
    if "rule" in decode:
        clauses.append(f"rule {decode['rule']}")
    clauses.append(f"tau: {SPECDEC}")
    if "machine" in settings:
        clauses.append(
            f"{settings['machine']}, {format_count(settings['threads'], 'thread')}, torch {settings['torch']}"
        )
    if decode.get("compile"):
        clauses.append("compiled")
    return "; ".join(clauses)


def _describe_decoding(decode: Mapping[str, Any]) -> Iterator[str]:
    """The settings of sampling, without those that change nothing."""
    yield f"T={str(decode['temperature']).removesuffix('.0')}"
    for name, default in (("top_p", None), ("top_k", None), ("repetition_penalty", 1)):
        value = decode.get(name, default)
        if value != default:
            yield f"{name}={value}"


# Results that were written

QUESTION_SETTINGS = (
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
    "fingerprint",
    "dtype",
)
DECODING_SETTINGS = ("temperature", "top_p", "top_k", "repetition_penalty", "rule", "children")
MACHINE_SETTINGS = ("machine", "device", "threads", "torch")


def read_results(path: str) -> dict[str, Any]:
    """The document of a results.json, or of the one in a folder. Raises ValueError where there is none."""
    return checkpoint.read_json(Path(path) / RESULTS_FILE if Path(path).is_dir() else Path(path), advice=MADE_BY)


def read_all_results(folders: Sequence[str]) -> dict[str, dict]:
    """The documents of several folders, by folder. Raises ValueError for a folder without one, and for another file."""
    documents: dict[str, dict] = {}
    for folder in folders:
        documents[folder] = checkpoint.read_json(Path(folder) / RESULTS_FILE, advice=MADE_BY)
        try:
            list(find_differences(documents))
            tabulate_side_by_side(documents)
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(
                f"{folder}/{RESULTS_FILE} is not of specdec evaluate ({error!r}): measure again."
            ) from None
    return documents


def find_differences(documents: Mapping[str, dict]) -> Iterator[str]:
    """Yields sentences on different protocols and on different machines. documents: results.json of each folder"""
    flat_settings = []
    for document in documents.values():
        settings = document["settings"]
        decoding = {f"decode.{name}": settings["decode"].get(name) for name in DECODING_SETTINGS}
        flat_settings.append(settings | decoding)
    protocol = (*QUESTION_SETTINGS, *(f"decode.{name}" for name in DECODING_SETTINGS))
    for names, consequence in (
        (protocol, "different protocols, so acceptance lengths are not comparable"),
        (MACHINE_SETTINGS, "different machines, so speeds are not comparable"),
    ):
        differing = []
        for name in names:
            values = [values_of_folder.get(name) for values_of_folder in flat_settings]
            if any(value != values[0] for value in values):
                differing.append(f"{name.removeprefix('decode.')} ({', '.join(map(_format_setting, values))})")
        if differing:
            yield f"These are results of {consequence}: {'; '.join(differing)}."


def _format_setting(value: Any) -> str:
    """A setting as text: a suite or protocol by its title and digest, any other value as it is."""
    return f"{value['title']} {value['digest']}" if isinstance(value, dict) and "digest" in value else str(value)


def tabulate_side_by_side(documents: Mapping[str, dict]) -> Table:
    """A table with the main figures of several results. documents: results.json of each folder"""
    rows = []
    for folder, document in documents.items():
        for entry in document["results"]:
            figures = [format_figure(entry.get(name), entry.get(f"{name}_ci")) for name in ("tau", "speedup")]
            rate = format_figure(entry.get("tokens_per_second"), digits=1)
            rows.append([folder, entry["method"], f"{entry['temperature']:g}", str(entry["batch"]), *figures, rate])
    heads = ["results", "method", "T", "batch", "tau", "speedup", "tokens/s"]
    varied = {head for head, cells in zip(heads, zip(*rows)) if len(set(cells)) > 1}
    columns = [column for column, head in enumerate(heads) if head not in ("T", "batch") or head in varied]
    lines = []
    for row in rows:
        lines.append([row[column] for column in columns])
    return Table([heads[column] for column in columns], lines)
