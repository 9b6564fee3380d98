"""Pages: one HTML file of texts, figures, tables and charts, with the style, the script and the figures inside."""

import contextlib
import functools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from specdec.core import files

FOLDER = Path(__file__).parent
EXAMPLE_PROMPTS = (
    "Why is the sky blue?",
    "Write a Python function that tells whether a number is prime.",
    "List the planets of the solar system, each with one fact.",
    "Write a JSON object that describes a book: title, author, year, tags.",
)
EXAMPLE_TEXTS = ("The sky is blue because", "def is_prime(number: int) -> bool:", "The planets of the solar system are")
LINKS_END = "<!-- links of other pages -->"  # place of a page before which `link_pages` adds links
UNITS = {  # second lines of the heads of columns
    "T": "temperature",
    "batch": "requests at once",
    "load": "requests at once",
    "context": "tokens before a round",
    "accepted by position": "share of rounds",
    "plain": "tokens/s",
    "plain, of a user": "tokens/s",
    **dict.fromkeys(("tau", "tau (95 %)", "tau, replayed", "tau, best candidates"), "tokens a round"),
    **dict.fromkeys(("speedup", "speedup, auto", "speedup of a user", "predicted"), "times plain"),
}
KEY = Markup(  # of the colours of accepted drafts
    '<p class="key"><span class="d1">1st</span><span class="d2">2nd</span><span class="d3">3rd</span>'
    '<span class="d4">4th or later draft, accepted</span></p>'
)
LINK = re.compile(r'<a href="([^"]*)">([^<]*)</a>')
Verdict = tuple[str, str]  # yes, no or unsure, and a sentence


@dataclass(frozen=True)
class Table:
    """A table. A click on a head of the page sorts the rows by that column: by leading numbers, or by text."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]  # texts of the cells

    def to_markdown(self) -> str:
        """The table in Markdown, with / for bars inside cells, and without their ends of lines."""
        lines = []
        for row in [self.heads, ["---"] * len(self.heads), *self.rows]:
            cells = [_join_lines(cell).replace("|", "/") for cell in row]
            lines.append(f"| {' | '.join(cells)} |")
        return "\n".join(lines)


def _join_lines(text: str) -> str:
    """The text in one line."""
    return " ".join(text.splitlines())


def drop_empty_columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """The table with - for empty cells, without the columns of empty cells alone."""
    columns = [column for column in range(len(heads)) if any(row[column] for row in rows)]
    lines = []
    for row in rows:
        lines.append([row[column] or "-" for column in columns])
    return Table([heads[column] for column in columns], lines)


@dataclass(frozen=True)
class Section:
    """A section of a page. It is left out if it has a heading, and nothing but texts below it."""

    heading: str = ""
    texts: Sequence[str] = ()
    tiles: Sequence[tuple[str, str, str]] = ()  # name, figure, remark
    table: Table | None = None
    charts: Sequence[Markup] = ()
    points: Sequence[str] = ()  # items of a list
    commands: Sequence[tuple[str, str]] = ()  # purpose of a command, and the command
    body: str = ""  # markup at the end

    def to_markdown(self) -> str:
        """The texts, the table, the points and the commands, with the heading; empty without any of them."""
        points = "\n".join(f"- {_join_lines(point)}" for point in self.points)
        table = self.table.to_markdown() if self.table else ""
        commands = [f"{label}\n\n```\n{command}\n```" for label, command in self.commands]
        text = "\n\n".join(filter(None, [*self.texts, table, points, *commands]))
        return f"## {_join_lines(self.heading)}\n\n{text}" if text and self.heading else text

    @property
    def filled(self) -> bool:
        """Whether the section is shown."""
        rows = self.table.rows if self.table else ()
        parts = (self.tiles, rows, *self.charts, self.points, self.commands, self.body)
        return any(parts) or not self.heading


def format_figure(value: float | None, span: Sequence[float] | None = None, *, digits: int = 2, sign: str = "") -> str:
    """A figure with its 95 % interval; empty if unknown. span: bounds; sign: +: before positive figures, too"""
    if value is None or math.isnan(value):
        return ""
    form = f"{sign}.{digits}f"
    return f"{value:{form}} ({span[0]:{form}} .. {span[1]:{form}})" if span else f"{value:{form}}"


def write_page(
    path: Path,
    title: str,
    *,
    figures: dict,
    verdicts: Sequence[Verdict],
    sections: Sequence[Section],
    pages: Mapping[str, Path] | None = None,
) -> None:
    """Writes a page, which keeps the links that other pages have added.

    figures: shown ones, which it holds as JSON, too; pages: pages to link, by title; missing ones are left out
    """
    links = list_links(path.read_text() if path.exists() else "")
    for name, page in (pages or {}).items():
        if page.exists():
            links[os.path.relpath(page, path.parent)] = name
            with contextlib.suppress(OSError):  # the folder of a head may be read-only
                link_page(page, path, title)
    filled_sections = [section for section in sections if section.filled]
    content = {"verdicts": verdicts, "links": links, "sections": filled_sections, "units": UNITS}
    files.write_text(path, _render("page.html.jinja", title=title, figures=figures, end=Markup(LINKS_END), **content))


def list_links(text: str) -> dict[str, str]:
    """The links of a page to other pages: titles by address. text: its HTML"""
    links = text.partition(LINKS_END)[0].rpartition("<nav")[2]
    return {Markup(address).unescape(): Markup(name).unescape() for address, name in LINK.findall(links)}


def link_page(page: Path, linked_page: Path, title: str) -> None:
    """Adds a link to another page to a page, unless it is there. title: title of that page"""
    text, address = page.read_text(), os.path.relpath(linked_page, page.parent)
    if LINKS_END in text and address not in list_links(text):
        link = Markup('<a href="{}">{}</a>').format(address, title)
        files.write_text(page, text.replace(LINKS_END, f"{link}\n{LINKS_END}", 1))


def render_live_page(*, target: str, drafts: str, max_length: int, chat: bool = True) -> str:
    """The page of a server, with drafted and plain answers side by side while they are written.

    target: name of the target; drafts: description of what drafts; max_length: tokens of a prompt and its answer
    chat: prompts are a user's messages; otherwise texts to continue
    """
    examples = EXAMPLE_PROMPTS if chat else EXAMPLE_TEXTS
    figures = {"target": target, "drafts": drafts, "max_length": max_length, "chat": chat, "examples": examples}
    script = read_markup("gain.js") + read_markup("live.js")
    return _render("live.html.jinja", title="specdec", figures=figures, key=KEY, live_script=script)


def _render(template: str, *, figures: dict, **values: Any) -> str:
    """A page by its template, with style, script and figures."""
    document = json.dumps(replace_non_finite(figures))
    text = Markup(document.replace("<", "\\u003c"))  # no answer may end the element that it stands in
    shared = {"style": read_markup("page.css"), "script": read_markup("page.js"), "data": text, "given": figures}
    return render_template(template, strict=True, **shared, **values)


def render_template(name: str, *, strict: bool = False, **values: Any) -> str:
    """A template beside this module, with values.

    strict: texts may not become markup, and a name without a value is an error
    """
    return _make_environment(strict).get_template(name).render(**values)


@functools.cache
def _make_environment(strict: bool) -> jinja2.Environment:
    """An environment, which keeps the templates that it has compiled."""
    undefined = jinja2.StrictUndefined if strict else jinja2.Undefined
    loader = jinja2.FileSystemLoader(FOLDER)
    return jinja2.Environment(loader=loader, autoescape=strict, undefined=undefined, trim_blocks=True)


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
