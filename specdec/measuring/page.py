"""One HTML file from parts: texts, figures, tables and charts, with the style, the script and the data inside."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Table:
    """rows: texts of the cells, by which a click on a head sorts: by the number that they begin with, if there is one"""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_markdown(self) -> str:
        lines = [self.heads, ["---"] * len(self.heads), *self.rows]
        return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


@dataclass(frozen=True)
class Section:
    """A part of a page. One that has a heading and nothing but texts below it is left out."""

    heading: str = ""
    texts: Sequence[str] = ()
    tiles: Sequence[tuple[str, str, str]] = ()  # name, figure, what belongs to it
    table: Table | None = None
    charts: Sequence[Markup] = ()
    points: Sequence[str] = ()  # a list
    body: str = ""  # Markup, as it is

    def to_markdown(self) -> str:
        """Texts, table and points, with the heading; empty without any of them."""
        points = "\n".join(f"- {point}" for point in self.points)
        parts = [*self.texts, self.table.to_markdown() if self.table else "", points]
        text = "\n\n".join(filter(None, parts))
        return f"## {self.heading}\n\n{text}" if text and self.heading else text

    @property
    def filled(self) -> bool:
        rows = self.table.rows if self.table else ()
        return any((self.tiles, rows, self.charts, self.points, self.body)) or not self.heading


def format_figure(value: float | None, span: Sequence[float] | None = None, *, digits: int = 2, sign: str = "") -> str:
    """A figure with its 95 % interval; empty if it is not known. sign: + to write that of positive numbers"""
    text = lambda number: f"{number:{sign}.{digits}f}"
    return (
        ""
        if value is None or math.isnan(value)
        else text(value) + (f" ({text(span[0])} .. {text(span[1])})" if span else "")
    )


def render_page(
    title: str, *, figures: dict, verdict: tuple[str, str] | None = None, sections: Sequence[Section]
) -> str:
    """A page. data: the figures that it shows, which it holds as JSON too; verdict: yes, no or unsure, and a sentence"""
    filled_sections = [section for section in sections if section.filled]
    return _render("page.html.jinja", title=title, figures=figures, verdict=verdict, sections=filled_sections)


def render_live_page(*, target: str, drafts: str, max_length: int, chat: bool = True) -> str:
    """The page of a server: drafted and plain answers side by side while they are written.

    target: its name; drafts: what drafts, in a few words; max_length: tokens of a prompt and its answer
    chat: whether prompts are a user's messages, not texts to continue
    """
    figures = {"target": target, "drafts": drafts, "max_length": max_length, "chat": chat}
    return _render("live.html.jinja", title="specdec", figures=figures, live_script=read_markup("live.js"))


def _render(template: str, *, figures: dict, **values: Any) -> str:
    loader = jinja2.FileSystemLoader(FOLDER)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    text = Markup(
        json.dumps(replace_non_finite(figures)).replace("<", "\\u003c")
    )  # no answer may end the element that it stands in
    shared = {"style": read_markup("page.css"), "script": read_markup("page.js"), "data": text, "given": figures}
    return environment.get_template(template).render(**shared, **values)


def read_markup(name: str) -> Markup:
    return Markup((FOLDER / name).read_text())


def replace_non_finite(value: Any) -> Any:
    """The same with null for numbers that JSON does not have."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
