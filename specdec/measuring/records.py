"""Records of judgements (record.py) side by side: what they say, and what of it may not be compared."""

import itertools
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.core.hub import RECORDS
from specdec.core.wording import format_count
from specdec.measuring.page import Table, drop_empty_columns, format_figure
from specdec.measuring.record import RECORD_FILE, Absence, Figure, Record, RecordedChecks, RecordedControl, read_record

JUDGE_FILES = ("results.json", "settings.json")  # further files of specdec judge beside its RECORD_FILE
PLAIN = "plain"  # name of a server without drafts
MAX_BUSY = 0.1  # share of the machine for other programs above which speeds are marked
MAX_NAMES = 4  # records that a sentence names
LONG_HASH = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{4,}\b")  # its first digits are shown
NO_FIGURE, NO_TAU, NO_SPEED = "Neither tau nor speeds", "No tau", "No speeds"  # figures that may not be compared
CHECKS = {  # short name and meaning of each check of a record
    "served_is_trained": (
        "replay",
        "whether the trained head, replayed along the served answers, accepts as much as the server does",
    ),
    "template": ("template", "whether the server's prompts have the token ids of the tokenizer's template"),
    "control": ("control", "answers that equal plain ones, with drafts and from a second plain server"),
    "repeat": ("repeat", "answers that are equal when a request is sent again at load 1"),
    "others_traffic": ("traffic", "tokens that the server generated for others meanwhile, by its own counter"),
}
CONTROLS = {  # by RecordedControl.changes_more
    True: "drafts change MORE answers",
    False: "no sign that drafts change more answers",
    None: "too few answers to tell whether drafts change more",
}
Check = tuple[str, str]  # yes, no, unsure or empty (not checked), and its text


@dataclass(frozen=True)
class RecordFiles:
    """What files of records hold.

    folder: where the names of records begin
    refused: sentences on damaged files, and on files of other forms
    """

    folder: Path
    records: dict[str, Record]  # records by the names of their files
    absences: list[Absence]
    refused: list[str]


def read_records(locations: Sequence[str], folder: Path | None = None) -> RecordFiles:
    """The records and absences of files, and of folders. A file that is neither is named in `refused`.

    folder: where the names of the records begin; None: in the folder that they share
    Raises ValueError for a location that does not exist, and where there is no record at all.
    """
    paths = list(itertools.chain.from_iterable(map(_list_files, locations)))
    documents: dict[Path, Record | Absence] = {}
    refused = []
    for path in dict.fromkeys(paths):
        try:
            documents[path] = read_record(path)
        except ValueError as error:
            refused.append(f"Left out: {error}")
    records = {path: document for path, document in documents.items() if isinstance(document, Record)}
    if not records:
        raise ValueError(f"{', '.join(locations)}: there is no record, as specdec judge writes it. {' '.join(refused)}")
    start = folder or Path(os.path.commonpath([path.absolute().parent for path in records]))
    names = {path: Path(os.path.relpath(path, start)).as_posix() for path in records}
    absences = [document for document in documents.values() if isinstance(document, Absence)]
    return RecordFiles(start, {names[path]: record for path, record in records.items()}, absences, refused)


def _list_files(location: str) -> list[Path]:
    """The file, or the files of a folder that may be records: its own *.json, and RECORDS in folders below."""
    path = Path(location)
    if not path.is_dir():
        if not path.exists():
            raise ValueError(f"{location} does not exist: give files of specdec judge, or a folder of them.")
        return [path]
    names = {*path.glob("*.json"), *path.rglob(RECORDS)}
    if path / RECORD_FILE in names:
        names -= {path / name for name in JUDGE_FILES}
    return sorted(file for file in names if file.is_file())


# Conditions of figures


@dataclass(frozen=True)
class Condition:
    """Something that changes figures, whatever the drafter."""

    spoiled: str  # NO_FIGURE, NO_TAU or NO_SPEED
    reason: str
    fields: tuple[str, ...]  # names of READERS, or places in a record


DIGEST = "target.digest"
GGUF = "-gguf-"  # part of the digests of GGUF files, which are of other contents than those of weights
UNQUANTISED = ("F32", "F16", "BF16")  # types of GGUF files
BUSY = "share of other programs"
TOO_BUSY = f"more than {MAX_BUSY:.0%}"
NO_VALUE = (  # fields whose None is a value
    "target.quantisation",
    "target.kv_cache",
    "protocol.effort",
    "protocol.system",
    "protocol.top_p",
    "protocol.top_k",
)
TITLE_FIELDS = ("target.name", "protocol.suite")
USUAL = ("none", "no", "pooled", "greedy", "while it served")  # values that go without saying
QUESTIONS = "the questions are others"
RENDERING = "the prompts are rendered in other ways"
CONDITIONS = [
    Condition(
        NO_FIGURE,
        "other weights of the target give other answers",
        ("target.name", DIGEST, "target.quantisation", "target.kv_cache"),
    ),
    Condition(NO_FIGURE, "the target computes in other precision", ("target.dtype",)),
    Condition(NO_FIGURE, QUESTIONS, ("protocol.suite", "protocol.file", "protocol.revision", "protocol.ids_sha256")),
    Condition(NO_FIGURE, "other numbers of questions or turns were answered", ("prompts", "protocol.turns")),
    Condition(
        NO_FIGURE,
        RENDERING,
        (
            "protocol.endpoint",
            "protocol.template_sha256",
            "protocol.thinking",
            "protocol.effort",
            "protocol.system",
        ),
    ),
    Condition(
        NO_FIGURE,
        "tokens are sampled in other ways",
        ("protocol.temperature", "protocol.top_p", "protocol.top_k", "protocol.repetition_penalty"),
    ),
    Condition(NO_FIGURE, "answers end elsewhere", ("protocol.max_tokens", "protocol.stop", "protocol.ignore_stop")),
    Condition(NO_FIGURE, "only figures of equal loads are comparable", ("loads",)),
    Condition(NO_TAU, "K drafts can reach K + 1 at most", ("protocol.drafts", "engine.adaptive")),
    Condition(NO_TAU, "drafts are sampled in other ways", ("draft sampling",)),
    Condition(
        NO_TAU,
        "rounds are counted in other ways",
        ("counted", "counting.first_token", "counting.prompt_pass", "counting.tail_drafts", "counting.average"),
    ),
    Condition(NO_SPEED, "the machines are others", ("machine.device", "machine.count", "machine.parallel")),
    Condition(NO_SPEED, "other programs took a part of a machine", (BUSY,)),
]


def _read_quantisation(record: Record) -> str | None:
    quantisation = record.target.quantisation
    return None if quantisation in UNQUANTISED else quantisation


def _describe_busy(record: Record) -> str | None:
    busy = record.machine.busy
    if busy is None:
        return None
    return TOO_BUSY if busy > MAX_BUSY else f"at most {MAX_BUSY:.0%}"


def _describe_counted(record: Record) -> str | None:
    source = record.counting.source
    return source and ("along replayed answers" if source == "replay" else "while it served")


READERS: dict[str, Callable[[Record], Any]] = {  # values that follow from several fields
    "loads": lambda record: [load.at_once for load in record.loads],
    "draft sampling": lambda record: record.engine.draft_sampling if record.protocol.temperature else "greedy",
    "prompts": lambda record: max(load.prompts for load in record.loads),
    "target.quantisation": _read_quantisation,
    BUSY: _describe_busy,
    "counted": _describe_counted,
}


@dataclass(frozen=True)
class FieldDifference:
    """A field whose values differ, or that spoils figures. names: records by the text of their value"""

    condition: Condition
    field: str
    names: dict[str, list[str]]

    def __str__(self) -> str:
        values = [f"{value} ({join_names(names)})" for value, names in self.names.items()]
        return f"{shorten_field(self.field)} {', '.join(values)}"


def read_value(record: Record, field: str) -> str | None:
    """The text of a field's value; None where it is unknown."""
    if field in READERS:
        value = READERS[field](record)
    else:
        group, name = field.split(".")
        value = getattr(getattr(record, group), name)
    if value is None:
        return "none" if field in NO_VALUE else None
    return shorten_hashes(format_value(value))


def format_value(value: object) -> str:
    """A field's value as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return (" ".join(map(str, value)) or "none") if isinstance(value, list) else str(value)


def group_values(records: Mapping[str, Record], condition: Condition, field: str) -> dict[str | None, list[str]]:
    """The names of records by the text of a field's value, None where it is unknown.

    A tau is none of servers without drafts.
    """
    names: dict[str | None, list[str]] = {}
    for name, record in records.items():
        if condition.spoiled != NO_TAU or record.drafter is not None:
            names.setdefault(read_value(record, field), []).append(name)
    return names


def find_differences(records: Mapping[str, Record]) -> list[FieldDifference]:
    """The fields on which figures depend and that differ, in the order of CONDITIONS. A busy machine is one alone."""
    differences = []
    for condition, field in list_compared_fields(records):
        for known in split_forms(field, group_values(records, condition, field)):
            if len(known) > 1 or TOO_BUSY in known:
                differences.append(FieldDifference(condition, field, known))
    return differences


def split_forms(field: str, names: Mapping[str | None, list[str]]) -> list[dict[str, list[str]]]:
    """The known values that can be compared with one another: digests of GGUF files say nothing of other digests.

    names: names of records by value; the result has the form with the most records first
    """
    forms: dict[bool, dict[str, list[str]]] = {}
    for value, group in names.items():
        if value is not None:
            forms.setdefault(field == DIGEST and GGUF in value, {})[value] = group
    return sorted(forms.values(), key=lambda names: -sum(map(len, names.values())))


def list_compared_fields(records: Mapping[str, Record]) -> Iterator[tuple[Condition, str]]:
    """Yields the fields to compare.

    The same token ids are the same prompts, however they were rendered, so what else is said of prompts is left out.
    """
    digests = {record.protocol.ids_sha256 for record in records.values()}
    has_same_ids = len(digests) == 1 and None not in digests
    for condition in CONDITIONS:
        for field in condition.fields:
            if not has_same_ids or condition.reason not in (QUESTIONS, RENDERING):
                yield condition, field


def describe_differences(records: Mapping[str, Record]) -> Iterator[str]:
    """Yields a sentence for each condition that differs, and one on what is unknown."""
    differences = find_differences(records)
    for condition in CONDITIONS:
        fields = [str(difference) for difference in differences if difference.condition is condition]
        if fields:
            yield f"{condition.spoiled} may be compared, as {condition.reason}: {'; '.join(fields)}."
    yield from describe_unknown_fields(records)


def describe_unknown_fields(records: Mapping[str, Record]) -> Iterator[str]:
    """Yields a sentence on fields that some records leave open, so that a difference would not show."""
    unknown: dict[str, list[str]] = {}
    for condition, field in list_compared_fields(records):
        values = group_values(records, condition, field)
        names = values.get(None, [])
        if names:
            unknown.setdefault(join_names(names, total=len(records)), []).append(shorten_field(field))
        for known in split_forms(field, values)[1:]:
            names = list(itertools.chain.from_iterable(known.values()))
            unknown.setdefault(join_names(names), []).append(f"{shorten_field(field)} in the form of the others")
    clauses = [f"{', '.join(fields)} ({names})" for names, fields in unknown.items()]
    if clauses and len(records) > 1:
        yield f"Not recorded, so not compared: {'; '.join(clauses)}."


def describe_common(records: Mapping[str, Record]) -> str:
    """The values on which figures depend and that are equal in all records, as text."""
    values = []
    for condition in CONDITIONS:
        for field in condition.fields:
            known = list(group_values(records, condition, field))
            if len(known) == 1 and known[0] not in (None, *USUAL) and field not in TITLE_FIELDS:
                values.append(f"{shorten_field(field)} {known[0]}")
    return "; ".join(values)


def shorten_field(field: str) -> str:
    """The name of a field in sentences: those of target and machine with their group, others without."""
    return field.replace(".", " ") if field.startswith(("target.", "machine.")) else field.rpartition(".")[2]


def shorten_hashes(text: str) -> str:
    """The text with the first digits of its hashes."""
    return LONG_HASH.sub(r"\1", text)


def join_names(names: Sequence[str], total: int | None = None) -> str:
    """MAX_NAMES names and the number of further ones; `all` if there are as many as `total`."""
    if len(names) == total:
        return "all"
    rest = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {rest} more" if rest > 0 else "")


# What a record says


def name_drafter(record: Record, records: Mapping[str, Record]) -> str:
    """The name of a record's drafter, with digits of its weights where others have the same name."""
    if record.drafter is None:
        return PLAIN
    name, digest = record.drafter.name, record.drafter.digest
    namesakes = [item.drafter for item in records.values() if item.drafter and item.drafter.name == name]
    digests = {drafter.digest for drafter in namesakes if drafter.digest}
    return f"{name} ({shorten_hashes(digest)})" if digest and len(digests) > 1 else name


def name_engine(record: Record) -> str:
    """The name and the version of a record's engine."""
    return " ".join(filter(None, [record.engine.name, record.engine.version]))


def show_figure(figure: Figure, digits: int = 2) -> str:
    """A figure with its interval; empty if it is unknown."""
    if figure is None:
        return ""
    value, low, high = figure
    return format_figure(value, None if low is None or high is None else (low, high), digits=digits)


def tabulate_records(records: Mapping[str, Record]) -> Table:
    """A table with a row for each record and load, without columns that are empty."""
    heads = ["record", "drafter", "engine", "load", "tau", "speedup of a user", "tokens/s of a user"]
    heads += ["plain, of a user", "tokens/s", "drafts", "prompts"]
    rows = []
    for name, record in records.items():
        subject = [name, name_drafter(record, records), name_engine(record)]
        for load in record.loads:
            figures = [show_figure(load.tau if record.drafter else None), show_figure(load.speedup)]
            rates = (load.user_tok_s, load.plain_user_tok_s, load.total_tok_s)
            figures += [show_figure(rate, digits=1) for rate in rates]
            numbers = [str(record.protocol.drafts or ""), str(load.prompts)]
            rows.append([*subject, str(load.at_once), *figures, *numbers])
    return drop_empty_columns(heads, rows)


def tabulate_protocol(record: Record) -> Table:
    """The parts of a record that its figures depend on, without unknown fields."""
    rows = []
    for part in ("target", "drafter", "engine", "machine", "protocol", "counting"):
        fields = getattr(record, part)
        for name, value in (fields.model_dump() if fields else {"name": "none"}).items():
            if value not in (None, []):
                rows.append([part, name.replace("_", " "), format_value(value)])
    return Table(["part", "field", "value"], rows)


def list_checks(record: Record) -> list[Check]:
    """The checks of a record, what limits its figures, and the checks that were not made."""
    results = [*_rate_checks(record.checks).values(), *list_limits(record)]
    missing = ", ".join(CHECKS[name][0] for name in list_missing_checks(record))
    return [*results, ("", f"not checked: {missing}")] if missing else results


def _rate_checks(checks: RecordedChecks) -> dict[str, Check]:
    """The checks that were made, by their names in a record."""
    ratings: dict[str, Check] = {}
    if checks.served_is_trained is not None:
        is_same = checks.served_is_trained
        ratings["served_is_trained"] = (
            ("yes", "served = replayed") if is_same else ("no", "served is not what replay gives")
        )
    if checks.template is not None:
        is_same = checks.template.startswith("same")
        ratings["template"] = ("yes", "same template") if is_same else ("no", "other template")
    if checks.control is not None:
        ratings["control"] = _rate_control(checks.control)
    if checks.repeat is not None:
        equal, compared = checks.repeat
        ratings["repeat"] = ("yes" if equal == compared else "unsure", f"repeat {equal}/{compared}")
    return ratings


def list_limits(record: Record) -> Iterator[Check]:
    """Yields what limits the figures of a record."""
    busy, num_failed = record.machine.busy, sum(load.failed for load in record.loads)
    if record.checks.others_traffic:
        yield "unsure", f"{format_count(record.checks.others_traffic, 'token')} for others"
    if busy is not None and busy > MAX_BUSY:
        yield "unsure", f"machine {busy:.0%} busy"
    if num_failed:
        yield "unsure", f"{format_count(num_failed, 'request')} failed"


def _rate_control(control: RecordedControl) -> Check:
    """Whether answers with drafts equal plain ones as often as those of two plain servers equal one another."""
    pairs = {"with drafts": control.drafted_plain, "plain": control.plain_plain}
    text = f"control {', '.join(f'{pair[0]}/{pair[1]} {name}' for name, pair in pairs.items() if pair)}"
    if control.p_value is not None:
        text += f" (sign test, p = {control.p_value:.2g})"
    return "yes" if control.changes_more is False else "unsure", f"{CONTROLS[control.changes_more]}: {text}"


def list_missing_checks(record: Record) -> dict[str, str]:
    """The reasons of the checks that were not made, by their names; empty where the record does not say."""
    names = [name for name in CHECKS if getattr(record.checks, name) is None]
    if record.drafter is None and "served_is_trained" in names:
        names.remove("served_is_trained")
    return {name: record.checks.unchecked.get(name, "") for name in names}


def describe_checks(record: Record, *, with_meanings: bool) -> Iterator[str]:
    """Yields a sentence for each check, for what limits figures, and for each check that was not made.

    with_meanings: behind the results of the checks
    """
    for name, (_, text) in _rate_checks(record.checks).items():
        yield f"{text} ({CHECKS[name][1]})" if with_meanings else text
    for _, text in list_limits(record):
        yield text
    for name, reason in list_missing_checks(record).items():
        yield f"{CHECKS[name][0]} not checked: {reason}" if reason else f"{CHECKS[name][0]} not checked"


def describe_common_checks(records: Mapping[str, Record]) -> Iterator[str]:
    """Yields a sentence on the checks of records. Records with the same ones are named together."""
    names: dict[str, list[str]] = {}
    for name, record in records.items():
        names.setdefault("; ".join(describe_checks(record, with_meanings=False)), []).append(name)
    for text, group in names.items():
        yield f"{join_names(group, total=len(records))}: {text}."


def describe_notes(records: Mapping[str, Record]) -> Iterator[str]:
    """Yields the notes of records, each once, with the records that have it."""
    names: dict[str, list[str]] = {}
    for name, record in records.items():
        for note in record.notes:
            names.setdefault(note, []).append(name)
    for note, group in names.items():
        yield f"{join_names(group, total=len(records))}: {note}"
