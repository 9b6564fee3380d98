"""Options, targets and heads of the benchmarks: python -m benchmarks.NAME KEY=VALUE ..., in the root of the clone."""

import inspect
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from specdec.core import files

ROOT = Path(__file__).resolve().parents[1]
TARGET = "targets/smollm2-135m"
HELDOUT = "data/prompts_heldout.jsonl"
Options = TypeVar("Options")


def read_options(kind: type[Options], docstring: str | None, arguments: list[str]) -> Options:
    """A frozen dataclass, filled from KEY=VALUE; target.name= is its field target_name.

    A field of type tuple[str, ...] takes every NAME.KEY=VALUE, as KEY=VALUE. Raises ValueError for anything unknown.
    """
    if {"-h", "--help"} & set(arguments):
        print(docstring, inspect.getsource(kind), sep="\n")
        raise SystemExit
    kinds, values = typing.get_type_hints(kind), dict[str, Any]()
    for argument in arguments:
        key, equals, value = argument.partition("=")
        name, (group, _, option) = key.replace(".", "_"), key.partition(".")
        if equals and name in kinds:
            values[name] = parse_value(key, kinds[name], value)
        elif equals and kinds.get(group) == tuple[str, ...]:
            values[group] = (*values.get(group, ()), f"{option}={value}")
        else:
            raise ValueError(f"There is no option {argument}: give KEY=VALUE of {', '.join(kinds)}.")
    try:
        return kind(**values)
    except TypeError as error:
        raise ValueError(f"{error}; --help lists the options.") from None


def parse_value(key: str, kind: Any, text: str) -> Any:
    kinds = typing.get_args(kind) or (kind,)
    if types.NoneType in kinds and text == "null":
        return None
    try:
        return {"true": True, "false": False}[text] if kinds[0] is bool else kinds[0](files.expand_home(text))
    except (KeyError, ValueError):
        raise ValueError(f"{key}={text} must be of type {kinds[0].__name__}.") from None


def split_list(text: str) -> list[str]:
    """The parts of a comma list."""
    return [part.strip() for part in text.split(",") if part.strip()]


def read_numbers(key: str, text: str, least: int = 1) -> list[int]:
    """The whole numbers of a comma list. Raises ValueError for none, and for one below `least`."""
    if not text or not all(part.isdecimal() and int(part) >= least for part in split_list(text)):
        raise ValueError(f"{key}={text} must be a comma list of whole numbers from {least} on.")
    return [int(part) for part in split_list(text)]


def format_rows(rows: list[dict]) -> str:
    """A table in Markdown, with a column for each key; lists are left out."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    columns = [key for key in columns if not all(isinstance(row.get(key, []), list) for row in rows)]
    lines = [columns, ["---"] * len(columns)]
    for row in rows:
        lines.append(["" if row.get(key) is None else format_value(row[key]) for key in columns])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def format_value(value: Any) -> str:
    """A number with four digits, a whole one with commas, or a text."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if type(value) is int else str(value)


def run_main(main: Callable[[list[str]], None]) -> None:
    """Runs a benchmark; a mistake of the user (ValueError) ends it with one sentence."""
    try:
        main(sys.argv[1:])
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
