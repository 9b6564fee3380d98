"""Pages: one HTML file of texts, figures, tables and charts, with the style, the script and the figures inside."""

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
    """A table. A click on a head of the page sorts the rows by that column: by leading numbers, or by text."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]  # texts of the cells

    def to_markdown(self) -> str:
        """The table in Markdown, with / for bars inside cells."""
        lines = []
        for row in [self.heads, ["---"] * len(self.heads), *self.rows]:
            cells = [cell.replace("|", "/") for cell in row]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)


@dataclass(frozen=True)
class Section:
    """A section of a page. It is left out if it has a heading, and nothing but texts below it."""

    heading: str = ""
    texts: Sequence[str] = ()
    tiles: Sequence[tuple[str, str, str]] = ()  # name, figure, remark
    table: Table | None = None
    charts: Sequence[Markup] = ()
    points: Sequence[str] = ()  # items of a list
    body: str = ""  # markup at the end

    def to_markdown(self) -> str:
        """The texts, the table and the points, with the heading; empty without any of them."""
        points = "\n".join(f"- {point}" for point in self.points)
        table = self.table.to_markdown() if self.table else ""
        text = "\n\n".join(filter(None, [*self.texts, table, points]))
        return f"## {self.heading}\n\n{text}" if text and self.heading else text

    @property
    def filled(self) -> bool:
        """Whether the section is shown."""
        rows = self.table.rows if self.table else ()
        return any((self.tiles, rows, self.charts, self.points, self.body)) or not self.heading


def format_figure(value: float | None, span: Sequence[float] | None = None, *, digits: int = 2, sign: str = "") -> str:
    """A figure with its 95 % interval; empty if unknown. span: bounds; sign: +: before positive figures, too"""
    if value is None or math.isnan(value):
        return ""
    form = f"{sign}.{digits}f"
    return f"{value:{form}} ({span[0]:{form}} .. {span[1]:{form}})" if span else f"{value:{form}}"


def render_page(
    title: str, *, figures: dict, verdict: tuple[str, str] | None = None, sections: Sequence[Section]
) -> str:
    """A page. figures: shown ones, which it holds as JSON, too; verdict: yes, no or unsure, and a sentence"""
    filled_sections = [section for section in sections if section.filled]
    return _render("page.html.jinja", title=title, figures=figures, verdict=verdict, sections=filled_sections)


def render_live_page(*, target: str, drafts: str, max_length: int, chat: bool = True) -> str:
    """The page of a server, with drafted and plain answers side by side while they are written.

    target: name of the target; drafts: description of what drafts; max_length: tokens of a prompt and its answer
    chat: prompts are a user's messages; otherwise texts to continue
    """
    figures = {"target": target, "drafts": drafts, "max_length": max_length, "chat": chat}
    return _render("live.html.jinja", title="specdec", figures=figures, live_script=read_markup("live.js"))


def _render(template: str, *, figures: dict, **values: Any) -> str:
    """A page by its template, with style, script and figures."""
    document = json.dumps(replace_non_finite(figures))
    text = Markup(document.replace("<", "\\u003c"))  # no answer may end the element that it stands in
    shared = {"style": read_markup("page.css"), "script": read_markup("page.js"), "data": text, "given": figures}
    return render_template(template, autoescape=True, undefined=jinja2.StrictUndefined, **shared, **values)


def render_template(
    name: str, *, autoescape: bool = False, undefined: type[jinja2.Undefined] = jinja2.Undefined, **values: Any
) -> str:
    """A template beside this module, with values. autoescape: texts may not become markup"""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(FOLDER), autoescape=autoescape, undefined=undefined, trim_blocks=True
    )
    return environment.get_template(name).render(**values)


def read_markup(name: str) -> Markup:
    """A file beside this module, to be put into a page as it is."""
    return Markup((FOLDER / name).read_text())


def replace_non_finite(value: Any) -> Any:
    """The value with None for numbers that JSON does not have: nan and infinite ones."""
    if isinstance(value, dict):
        return {key: replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
