"""The table of refusals, derived from option models: the values that each option refuses, and their sentences.

`fits` is a second implementation of what pydantic checks. Tests of commands have the words of the sentences.
"""

import re
from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic.fields import FieldInfo

from specdec.core.option_types import (
    HUGE,
    Options,
    describe_bounds,
    format_value,
    list_types,
    read_bounds,
    read_options,
)
from specdec.options.config_files import fill

NUMBERS = [*map(float, ("nan", "inf", "-inf")), -1, -0.5, 10**400, 1e300]
WRONG_VALUES = [*NUMBERS, True, "abc", "", [1], {"a": 1}, [], [None], None]  # each is wrong for most options
LISTS = (list, Sequence)


def list_refused_values(field: FieldInfo) -> list[Any]:
    """Values that an option does not take: at its bounds, below and above them, of other types, and null."""
    values = list(WRONG_VALUES)
    for annotation in list_types(field):
        _, bounds = read_bounds(annotation)
        for limit in [bounds[name] for name in ("ge", "gt", "le", "lt") if name in bounds]:
            values += [limit - 1, limit, limit + 1]
    return [value for value in values if not fits(field, value)]


def fits(field: FieldInfo, value: Any) -> bool:
    """Whether an option takes a value, by its types and bounds."""
    return any(fits_type(*read_bounds(annotation), value) for annotation in list_types(field))


def fits_type(kind: Any, bounds: dict[str, Any], value: Any) -> bool:
    """Whether one type of an option takes a value."""
    origin = get_origin(kind) or kind
    if origin is Literal:
        return (type(value), value) in [(type(choice), choice) for choice in get_args(kind)]
    if origin in (int, float):
        return type(value) in (int, origin) and is_within(value, bounds)
    if origin in LISTS:
        return isinstance(value, list) and fits_items(get_args(kind)[0], bounds, value)
    if origin is str:
        return isinstance(value, str) and len(value) >= bounds.get("min_length", 0)
    return type(value) is (type(None) if kind is None else origin) and value != {}


def fits_items(annotation: Any, bounds: dict[str, Any], values: list[Any]) -> bool:
    """Whether a list option takes these items."""
    item = FieldInfo.from_annotation(annotation)
    sizes = range(bounds.get("min_length", 0), bounds.get("max_length", 99) + 1)
    return len(values) in sizes and all(fits(item, value) for value in values)


def is_within(value: float, bounds: dict[str, Any]) -> bool:
    """Whether a number is between its bounds, which are finite where none is written."""
    is_inside = bounds.get("ge", -HUGE) <= value <= bounds.get("le", HUGE)
    return is_inside and bounds.get("gt", -2 * HUGE) < value < bounds.get("lt", 2 * HUGE)


def assert_refused(
    model: type[Options], document: dict[str, Any], name: str, field: FieldInfo, values: Sequence[Any] | None = None
) -> None:
    """Asserts that each value, and a misspelt name, are refused in a sentence that names the option and what it may be.

    document: accepted by the model, but for this option; values: None: those of `list_refused_values`
    """
    for value in list_refused_values(field) if values is None else values:
        with pytest.raises(ValueError) as refused:
            read_options(model, fill(document, {name: value}))
        assert str(refused.value) == f"{name}={format_value(value)} must be {describe_bounds(field, value)}."
    with pytest.raises(
        ValueError, match=rf"^There is no option '{re.escape(name)}z'\. Did you mean '{re.escape(name)}'"
    ):
        read_options(model, fill(document, {f"{name}z": 1}))
