"""Charts as inline SVG, drawn by matplotlib. Their colours are those of the page, light or dark.

A series of one point is no chart: its figure stands in a table. Legends stand between title and axes.
"""

import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

# Stand for the colours of the page's text and of a chart's ground, which replace them in the SVG
TEXT, GROUND = "#010203", "#010202"
SERIES = [f"#01020{index + 4}" for index in range(6)]  # stand for the colours --c0 .. --c5 of page.css
PAGE_COLOURS = {
    TEXT: "currentColor",
    GROUND: "var(--card)",
    **{colour: f"var(--c{index})" for index, colour in enumerate(SERIES)},
}
DASHES = ("", "6 2", "2 1.5", "6 1.5 1.5 1.5")  # of successive curves, so that no colour is needed to tell them apart
MAX_LABEL = 55  # characters of a name inside a chart that fit into its width
MIN_POINTS = 2  # points of a series, or bars, that are drawn
COLOURED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "specdec",
    "text.parse_math": False,
    "font.size": 9.5,
    "axes.prop_cycle": f"cycler(color={SERIES})",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.25,
    **dict.fromkeys(COLOURED, TEXT),
}
LEGEND_KEY = Markup(
    '<span><svg viewBox="0 0 24 8" aria-hidden="true"><path d="M0 4H24" style="stroke: var(--c{})" '
    'stroke-width="3" stroke-dasharray="{}"/></svg>{}</span>'
)


@dataclass(frozen=True)
class ChartCurve:
    """A line through points (x, y), or marks with intervals of y."""

    name: str
    points: Sequence[tuple[float, float]]
    marks: bool = False
    spans: Sequence[tuple[float, float]] = ()  # interval of y for each point


def format_number(value: float) -> str:
    """A number as a short text: 1.23, 45.6, 1,234, 12 K, 3.4 M, 2.5e-4."""
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if size >= 1e4:
        return f"{value / 1e6:.3g} M" if size >= 1e6 else f"{value / 1e3:.3g} K"
    if size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:,.4g}" if size >= 100 else f"{value:.3g}"


def chart_lines(
    curves: Sequence[ChartCurve], *, x: str, y: str, title: str, log_ticks: Mapping[float, str] | None = None
) -> Markup:
    """A chart of the curves with MIN_POINTS or more over common axes; empty without any. x, y: names of the axes

    log_ticks: labels by their places on a logarithmic x axis; None: the x axis is linear
    """
    curves = [curve for curve in curves if len(curve.points) >= MIN_POINTS]

    def plot(axes: Any) -> None:
        for index, curve in enumerate(curves):
            xs, ys = zip(*curve.points)
            (line,) = axes.plot(xs, ys, linewidth=1.4, markersize=4, marker="o" if curve.marks else "")
            dashes = [float(length) for length in DASHES[index % len(DASHES)].split()]
            line.set_linestyle((0, dashes) if dashes else "solid")
            if curve.spans:
                axes.vlines(xs, *zip(*curve.spans), color=line.get_color(), linewidth=1.4)
        if log_ticks:
            axes.set_xscale("log", base=2)
            axes.set_xticks([*log_ticks], [*log_ticks.values()])
        else:
            is_whole = all(float(point[0]).is_integer() for curve in curves for point in curve.points)
            axes.xaxis.get_major_locator().set_params(integer=is_whole)
        axes.set(xlabel=x, ylabel=y)

    return _draw_figure(plot, [curve.name for curve in curves], title=title, dashes=DASHES) if curves else Markup()


def chart_bars(
    groups: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], *, x: str, y: str, title: str
) -> Markup:
    """A chart of bars, one for each name and group; empty below MIN_POINTS names.

    groups: name, and heights [len(names)] from 0
    """

    def plot(axes: Any) -> None:
        width = 0.8 / len(groups)
        for group_index, (_, heights) in enumerate(groups):
            positions = [name_index - 0.4 + (group_index + 0.5) * width for name_index in range(len(names))]
            axes.bar(positions, heights, width)
        axes.set_xticks(range(len(names)), names)
        axes.set_ylim(bottom=0)
        axes.grid(False, axis="x")
        axes.set(xlabel=x, ylabel=y)

    legend = [group for group, _ in groups]
    return _draw_figure(plot, legend, title=title) if len(names) >= MIN_POINTS else Markup()


def chart_intervals(
    rows: Sequence[tuple[str, float, Sequence[float]]], *, x: str, title: str, reference: float
) -> Markup:
    """A chart of values with their intervals, one above the other; empty below MIN_POINTS rows.

    rows: name, value and bounds; reference: value that a line marks
    """

    def plot(axes: Any) -> None:
        for place, (name, value, span) in enumerate(rows):
            (mark,) = axes.plot([value], [-place], marker="o", markersize=5)
            axes.hlines(-place, *span, color=mark.get_color(), linewidth=2)
            shown = name if len(name) <= MAX_LABEL else f"..{name[-MAX_LABEL:]}"
            label = axes.text(0.01, 0.2 - place, shown, transform=axes.get_yaxis_transform())
            label.set_bbox({"facecolor": GROUND, "edgecolor": "none", "pad": 1})
        axes.axvline(reference, color=TEXT, linewidth=1, alpha=0.6)
        axes.set(xlabel=x, yticks=[], ylim=(0.4 - len(rows), 0.9))

    if len(rows) < MIN_POINTS:
        return Markup()
    return _draw_figure(plot, [], title=title, height=0.8 + 0.4 * len(rows), margin=0.02)


def _draw_figure(
    plot: Callable[[Any], None],
    names: Sequence[str],
    *,
    title: str,
    dashes: Sequence[str] = ("",),
    height: float = 2.5,
    margin: float = 0.15,
) -> Markup:
    """A figure as SVG below its title and legend. plot: function that draws into the axes

    names: series in the order of their colours, which the legend has from two on; dashes: of successive series
    height: inches; margin: share of the width beside the axes
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.6, height))
        figure.subplots_adjust(left=margin, right=0.97, bottom=0.48 / height, top=1 - 0.1 / height)
        plot(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    markup = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue().partition("<svg")[2], flags=re.DOTALL)
    markup = re.sub(r' id="[\w.]+_\d+"', "", markup)  # such names come in every chart
    for colour, page_colour in PAGE_COLOURS.items():
        markup = markup.replace(colour, page_colour)
    markup = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", markup, count=1)
    svg = Markup(f'<svg role="img" aria-label="{escape(title)}"{markup}')
    keys = [
        LEGEND_KEY.format(index % len(SERIES), dashes[index % len(dashes)], name) for index, name in enumerate(names)
    ]
    legend = Markup('<p class="legend">{}</p>').format(Markup(" ").join(keys)) if len(keys) > 1 else ""
    return Markup("<figure><figcaption>{}</figcaption>{}{}</figure>").format(title, legend, svg)
