"""The page of a report: tables by subject, failures, and what was said by warnings."""

import itertools
from collections.abc import Iterator

from benchmarks import common
from benchmarks.gpu.figures import Figure

SHOWN_ROWS, SHOWN_CHARACTERS = 15, 100  # rows of a table inside a figure, such as kernels; characters of their names


def format_page(figures: dict[str, dict], listed: list[Figure]) -> str:
    """figures: lines by name; listed: all figures that there are"""
    measured = {name: line for name, line in figures.items() if "values" in line}
    sections = list(describe_limits(measured))
    for subject in dict.fromkeys(figure.subject for figure in listed):
        sections += list_tables(subject, {name: line for name, line in measured.items() if line["subject"] == subject})
    untried = [figure.name for figure in listed if figure.name not in figures]
    return "\n\n".join([*sections, *list_endings(figures, untried)]) + "\n"


def list_endings(figures: dict[str, dict], untried: list[str]) -> Iterator[str]:
    """Lists of what failed, was not tried, and was said by warnings; none of them where it is empty."""
    failed = [f"{name}: {line['error']}" for name, line in figures.items() if "error" in line]
    messages = dict.fromkeys(itertools.chain.from_iterable(line.get("said", []) for line in figures.values()))
    for title, items in {"Failed": failed, "Not tried yet": untried, "Said by warnings": list(messages)}.items():
        if items:
            yield f"## {title}"
            yield "\n".join(f"- {item}" for item in items)


def describe_limits(measured: dict[str, dict]) -> Iterator[str]:
    """The first lines: the device, its memory, and what the figures are of."""
    device = measured.get("device", {}).get("values", {})
    yield f"# {device.get('device', 'A device that was not described yet')}"
    for label in dict.fromkeys(line["stand_in"] for line in measured.values() if "stand_in" in line):
        yield f"**A dry run, whose figures mean nothing.** Stand-in: {label}."
    if device:
        limit = f"{device['bandwidth'] / 1e12:.2f} TB/s on paper, " if device["bandwidth"] else ""
        yield f"Memory: {limit}{device['measured_bandwidth'] / 1e12:.2f} TB/s measured."
    states = dict.fromkeys(line["code"] for line in measured.values())
    if len(states) > 1:
        yield f"The figures are of {len(states)} states of the code ({', '.join(states)}); redo=true measures again."


def list_tables(subject: str, lines: dict[str, dict]) -> Iterator[str]:
    """The table of a subject, and a table for each figure that has rows of its own."""
    if lines:
        yield f"## {subject[0].upper()}{subject[1:]}"
        yield common.format_rows([make_row(name, line) for name, line in lines.items()])
    for name, line in lines.items():
        for key, rows in line["values"].items():
            if isinstance(rows, list) and rows and isinstance(rows[0], dict):
                cut = f", {SHOWN_ROWS} of {len(rows)} shown" if len(rows) > SHOWN_ROWS else ""
                yield f"### {name}: {key}{cut}"
                yield common.format_rows([shorten_texts(row) for row in rows[:SHOWN_ROWS]])


def make_row(name: str, line: dict) -> dict:
    """A row of a table, without lists and dictionaries, for which it has no place."""
    values = {key: value for key, value in line["values"].items() if not isinstance(value, dict | list)}
    counts = {kind: line[kind] for kind in ("captures", "compiles") if line.get(kind)}
    return {"figure": name, **values, **counts}


def shorten_texts(row: dict) -> dict:
    """A row whose texts fit into a table."""
    return {
        key: value.replace("|", "/")[:SHOWN_CHARACTERS] if isinstance(value, str) else value
        for key, value in row.items()
    }
