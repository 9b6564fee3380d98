"""The page of a report: aims, tables by subject, failures, and what was said by warnings."""

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks import common
from benchmarks.gpu.figures import Figure

SHOWN_ROWS, SHOWN_CHARACTERS = 15, 100  # rows of a table inside a figure, such as kernels; characters of their names
AIMED_SHAPE = "qwen3-8b"  # the target that the aims are for
NODES = 64  # nodes of a pass that is compared with a pass of one


@dataclass(frozen=True)
class Aim:
    """A bound of a value. The best of all figures counts whose names begin with `begin` and end with `end`.

    least: whether the bound is the least that is wanted, not the most
    """

    title: str
    bound: float
    key: str  # name of the value
    begin: str
    end: str = ""
    least: bool = False

    def select(self, real: dict[str, dict]) -> dict[str, float]:
        """The values that count, by the names of their figures."""
        names = [name for name in real if name.startswith(self.begin) and name.endswith(self.end)]
        return {name: real[name][self.key] for name in names if real[name].get(self.key) is not None}

    def judge(self, real: dict[str, dict]) -> dict:
        """A row: reached, missed, or not measured."""
        row = {"aim": self.title, "bound": f"{'at least' if self.least else 'at most'} {self.bound:g}"}
        values = self.select(real)
        if not values:
            return row | {"verdict": "not measured"}
        best = (max if self.least else min)(values, key=values.__getitem__)
        is_reached = values[best] >= self.bound if self.least else values[best] <= self.bound
        return row | {"verdict": "reached" if is_reached else "missed", "best": values[best], "figure": best}


def list_aims(context: int, depth: int) -> tuple[Aim, ...]:
    conditions = f", {context} tokens"
    return (
        Aim(f"plain token of Qwen3-8B behind {context} tokens, ms", 6.5, "ms", "plain token", conditions),
        Aim(f"round of a chain of {depth} drafts, ms", 8.5, "ms", f"round of {depth} drafts", conditions),
        Aim(f"pass of {NODES} nodes over that of one, in the fastest mode", 1.1, "ratio", "ratio"),
        Aim("first validation of 64 prompts, s", 60.0, "first_seconds", "validation of 64 prompts"),
        Aim("MFU of a training step of eagle3", 0.45, "mfu", "training eagle3", least=True),
    )


def format_page(figures: dict[str, dict], listed: list[Figure], aims: Iterable[Aim]) -> str:
    """figures: lines by name; listed: all figures that there are; aims: those that a target of this shape has"""
    measured = {name: line for name, line in figures.items() if "values" in line}
    sections = list(describe_limits(measured))
    if rows := judge_aims(measured, aims):
        sections += ["## Aims", common.format_rows(rows)]
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


def judge_aims(measured: dict[str, dict], aims: Iterable[Aim]) -> list[dict]:
    """A row for each aim. Figures of stand-ins do not count."""
    real = {name: line["values"] for name, line in measured.items() if "stand_in" not in line}
    return [aim.judge(real | compare_nodes(real)) for aim in aims]


def compare_nodes(real: dict[str, dict]) -> dict[str, dict]:
    """The pass of many nodes over that of one node, in the mode whose single node is fastest."""
    passes = {(row["mode"], row["nodes"]): row["ms"] for name, row in real.items() if name.startswith("pass of ")}
    single = {mode: ms for (mode, nodes), ms in passes.items() if nodes == 1 and (mode, NODES) in passes}
    if not single:
        return {}
    fastest = min(single, key=single.__getitem__)
    return {f"ratio, {fastest}": {"ratio": passes[fastest, NODES] / single[fastest]}}


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
