"""Charts as inline SVG. Colours are classes (c0, c1, ..) of page.css; a mark's `data-tip` is what page.js shows beside it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from markupsafe import Markup, escape

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 80, 14, 12, 40
TICKS = 5


@dataclass(frozen=True)
class Curve:
    """A line through points (x, y), or marks only."""

    name: str
    points: Sequence[tuple[float, float]]
    marks: bool = False  # marks at the points
    line: bool = True
    tips: Sequence[str] = ()  # of each mark; empty: its figures
    spans: Sequence[tuple[float, float]] = ()  # of each mark: an interval of y
    guide: bool = False  # a line to read the others by: its name stands at its end, not in the legend


@dataclass(frozen=True)
class Axis:
    label: str
    low: float | None = None  # None: from the figures
    ticks: Sequence[float] = field(default=())  # empty: round numbers
    names: Sequence[str] = ()  # of the ticks


def number(value: float) -> str:
    """As short as is readable: 1.23, 45.6, 1,234, 12 K, 3.4 M, 2.5e-4."""
    size = abs(value)
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    if size >= 1e6:
        return f"{value / 1e6:.3g} M"
    if size >= 1e4:
        return f"{value / 1e3:.3g} K"
    if size < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    return f"{value:,.4g}" if size >= 100 else f"{value:.3g}"


def round_numbers(low: float, high: float) -> list[float]:
    """At most about TICKS numbers between low and high, in steps of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / TICKS))
    step = next(step * factor for factor in (1, 2, 5, 10) if (high - low) / (step * factor) <= TICKS)
    first = math.ceil(low / step - 1e-9)
    return [step * place for place in range(first, math.floor(high / step + 1e-9) + 1)]


class Scale:
    """From figures of an axis to places in the drawing."""

    def __init__(self, axis: Axis, values: Sequence[float], start: float, end: float):
        known = [value for value in [*values, *axis.ticks] if math.isfinite(value)] or [0.0, 1.0]
        low = min(known) if axis.low is None else axis.low
        high = max(max(known), low)
        margin = 0.05 * (high - low) or abs(high) or 1.0
        self.low, self.high = (low - margin if axis.low is None and not axis.ticks else low), high + margin
        self.start, self.end = start, end
        self.ticks = list(axis.ticks) or round_numbers(self.low, self.high)

    def __call__(self, value: float) -> float:
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 1)


def lines(curves: Sequence[Curve], *, x: Axis, y: Axis, title: str) -> Markup:
    """Curves over common axes; the legend's names switch their curves off and on."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return Markup('<p class="none">Nothing of this was measured.</p>')
    spans = [value for curve in curves for span in curve.spans for value in span]
    across = Scale(x, [point[0] for curve in curves for point in curve.points], LEFT, WIDTH - RIGHT)
    up = Scale(y, [*(point[1] for curve in curves for point in curve.points), *spans], HEIGHT - BOTTOM, TOP)
    parts = [_frame(across, up, x, y)]
    for place, curve in enumerate(curves):
        inside = []
        if curve.line and len(curve.points) > 1:
            path = " ".join(f"{across(a)},{up(b)}" for a, b in curve.points if math.isfinite(b))
            inside.append(f'<polyline points="{path}"/>')
        for number_, (a, b) in enumerate(curve.points if curve.marks or len(curve.points) == 1 else ()):
            if not math.isfinite(b):
                continue
            if curve.spans:
                low, high = curve.spans[number_]
                inside.append(f'<line x1="{across(a)}" x2="{across(a)}" y1="{up(low)}" y2="{up(high)}"/>')
            tip = curve.tips[number_] if curve.tips else f"{curve.name}: {number(b)} at {x.label} {number(a)}"
            inside.append(f'<circle cx="{across(a)}" cy="{up(b)}" r="4" tabindex="0" data-tip="{escape(tip)}"/>')
        if curve.guide:
            a, b = curve.points[-1]
            inside.append(f'<text x="{across(a)}" y="{up(b) - 3}" text-anchor="end">{escape(curve.name)}</text>')
        kind = "guide" if curve.guide else f"c{place % 8}"
        parts.append(f'<g class="curve {kind}" data-curve="{place}">{"".join(inside)}</g>')
    return _figure(parts, title, [curve.name for curve in curves if not curve.guide])


def bars(groups: Sequence[tuple[str, Sequence[float]]], names: Sequence[str], *, x: str, y: str, title: str) -> Markup:
    """Bars beside each other, one for each name and group. groups: by name, [len(names)] heights from 0"""
    num, size = len(names), len(groups)
    places = [place + 0.5 for place in range(num)]
    across = Scale(Axis(x, low=0, ticks=places, names=names), [0, num], LEFT, WIDTH - RIGHT)
    across.high = num
    up = Scale(Axis(y, low=0), [value for _, values in groups for value in values], HEIGHT - BOTTOM, TOP)
    parts = [_frame(across, up, Axis(x, ticks=places, names=names), Axis(y))]
    for place, (group, values) in enumerate(groups):
        drawn = ""
        for index, value in enumerate(values):
            left, right = (across(index + 0.1 + 0.8 * (place + side) / size) for side in (0, 1))
            tip = escape(f"{group}, {names[index]}: {number(value)}")
            drawn += (
                f'<rect x="{left}" width="{right - left:.1f}" y="{up(value)}" height="{up(0) - up(value):.1f}" tabindex="0" '
                f'data-tip="{tip}"/>'
            )
        parts.append(f'<g class="curve filled c{place % 8}" data-curve="{place}">{drawn}</g>')
    return _figure(parts, title, [name for name, _ in groups])


def _frame(across: Scale, up: Scale, x: Axis, y: Axis) -> str:
    """Grid, figures and names of the axes."""
    parts = []
    for value in up.ticks:
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{up(value)}" y2="{up(value)}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{up(value) + 4}" text-anchor="end">{number(value)}</text>')
    names = x.names or [number(value) for value in across.ticks]
    for value, name in zip(across.ticks, names):
        parts.append(f'<text x="{across(value)}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{escape(name)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{HEIGHT - BOTTOM}" y2="{HEIGHT - BOTTOM}"/>')
    parts.append(
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{escape(x.label)}</text>'
    )
    parts.append(f'<text class="label" transform="translate(16 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
                 f"{escape(y.label)}</text>")  # fmt: skip
    return "".join(parts)


def _figure(parts: list[str], title: str, names: list[str]) -> Markup:
    legend = ""
    if len(names) > 1:
        legend = "".join(
            f'<button type="button" class="c{place % 8}" data-curve="{place}" aria-pressed="true">{escape(name)}</button>'
            for place, name in enumerate(names)
        )
        legend = f'<div class="legend">{legend}</div>'
    return Markup(
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{"".join(parts)}</svg>{legend}</figure>'
    )
