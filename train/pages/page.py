"""One HTML file from a template, with its style, its script and its data inside."""

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from train.pages import charts

FOLDER = Path(__file__).parent


@cache
def environment() -> jinja2.Environment:
    """Everything that is written into a page is escaped."""
    found = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    found.filters |= {"number": charts.number, "interval": interval, "percent": lambda value: f"{100 * value:.1f} %"}
    return found


def interval(pair: list[float] | None) -> str:
    """95 % interval as text"""
    return "" if pair is None else f"{pair[0]:.2f} .. {pair[1]:.2f}"


def render(template: str, *, title: str, data: dict, **values: Any) -> str:
    """The page. data: the figures that it shows, which it holds as JSON too"""
    text = json.dumps(finite(data)).replace(
        "<", "\\u003c"
    )  # no text of an answer may end the element that it stands in
    return (
        environment()
        .get_template(template)
        .render(
            title=title,
            data=Markup(text),
            style=Markup((FOLDER / "page.css").read_text()),
            script=Markup((FOLDER / "page.js").read_text()),
            **values,
        )
    )


def finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
