"""Charts as inline SVG, drawn by matplotlib. Texts and axes take the colour of the page's text, light or dark."""

import io
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

TEXT = "#010203"  # stands for the colour of the page's text, which replaces it in the SVG
COLOURED = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color", "grid.color")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "specdec",
    "text.parse_math": False,
    "font.size": 8,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.25,
    "legend.framealpha": 0.0,
    **dict.fromkeys(COLOURED, TEXT),
}


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


def chart_lines(curves: Sequence[ChartCurve], *, x: str, y: str, title: str) -> Markup:
    """A chart of curves over common axes. x, y: names of the axes"""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return Markup('<p class="soft">{}: nothing of this was measured.</p>').format(title)

    def plot(axes: Any) -> None:
        for index, curve in enumerate(curves):
            xs, ys = zip(*curve.points)
            marker = "o" if curve.marks or len(curve.points) == 1 else ""
            axes.plot(xs, ys, color=f"C{index}", label=curve.name, linewidth=1.2, markersize=4, marker=marker)
            if curve.spans:
                axes.vlines(xs, *zip(*curve.spans), color=f"C{index}", linewidth=1.2)
        is_whole = all(float(point[0]).is_integer() for curve in curves for point in curve.points)
        axes.xaxis.get_major_locator().set_params(integer=is_whole)

    return _draw_figure(plot, x=x, y=y, title=title)


def chart_bars(
    groups: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], *, x: str, y: str, title: str
) -> Markup:
    """A chart of bars, one for each name and group. groups: name, and heights [len(names)] from 0"""

    def plot(axes: Any) -> None:
        width = 0.8 / len(groups)
        for group_index, (group, heights) in enumerate(groups):
            positions = [name_index - 0.4 + (group_index + 0.5) * width for name_index in range(len(names))]
            axes.bar(positions, heights, width, label=group, color=f"C{group_index}")
        axes.set_xticks(range(len(names)), names)
        axes.set_ylim(bottom=0)
        axes.grid(False, axis="x")

    return _draw_figure(plot, x=x, y=y, title=title)


def _draw_figure(plot: Callable[[Any], None], *, x: str, y: str, title: str) -> Markup:
    """A figure as SVG with its title. plot: function that draws into the axes"""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.6, 2.5))
        figure.subplots_adjust(left=0.12, right=0.98, bottom=0.18, top=0.96)
        axes = figure.add_subplot()
        axes.set(xlabel=x, ylabel=y)
        plot(axes)
        if len(axes.get_legend_handles_labels()[0]) > 1:
            axes.legend()
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    markup = re.sub(r"<metadata>.*?</metadata>", "", buffer.getvalue().partition("<svg")[2], flags=re.DOTALL)
    markup = re.sub(r' id="[\w.]+_\d+"', "", markup).replace(TEXT, "currentColor")  # such names come in every chart
    markup = re.sub(r'width="[\d.]+pt" height="[\d.]+pt"', "", markup, count=1)
    svg = Markup(f'<svg role="img" aria-label="{escape(title)}"{markup}')
    return Markup("<figure><figcaption>{}</figcaption>{}</figure>").format(title, svg)
