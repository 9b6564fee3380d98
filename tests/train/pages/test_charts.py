"""Tests of the charts: places follow figures, and nothing of a figure's name becomes markup."""

import math
import re
from xml.etree import ElementTree

import pytest

from train.pages.charts import Axis, Curve, bars, lines, number, round_numbers


def parse(chart) -> ElementTree.Element:
    return ElementTree.fromstring(str(chart))


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1.234, "1.23"),
        (45.67, "45.7"),
        (1234.4, "1,234"),
        (12345, "12.3 K"),
        (3_400_000, "3.4 M"),
        (2.5e-4, "2.5e-4"),
    ],
)
def test_figures_are_short(value, text):
    assert number(value) == text


@pytest.mark.parametrize(("low", "high"), [(0, 1), (1.31, 1.74), (0, 6000), (-3, 900), (1e-6, 5e-4)])
def test_ticks_are_round_and_few(low, high):
    ticks = round_numbers(low, high)
    assert 2 <= len(ticks) <= 6 and all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
    steps = {f"{b - a:.3g}" for a, b in zip(ticks, ticks[1:])}
    assert len(steps) == 1 and float(next(iter(steps))) / 10 ** math.floor(math.log10(float(next(iter(steps))))) in (
        1,
        2,
        5,
        10,
    )


def test_marks_stand_where_their_figures_are():
    points = [(0, 1.0), (10, 3.0), (20, 2.0)]
    chart = parse(lines([Curve("tau", points, marks=True)], x=Axis("step"), y=Axis("tau"), title="tau"))
    marks = [(float(mark.get("cx")), float(mark.get("cy"))) for mark in chart.iter("circle")]
    (x0, y0), (x1, y1), (x2, y2) = marks
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and x0 < x1
    assert y1 < y2 < y0 and (y0 - y2) == pytest.approx((y0 - y1) / 2, abs=0.2)  # larger figures stand higher
    assert [mark.get("data-tip") for mark in chart.iter("circle")][1] == "tau: 3 at step 10"


def test_bars_are_as_high_as_their_figures():
    chart = parse(bars([("a", [0.5, 0.25]), ("b", [1.0, 0.0])], ["1", "2"], x="depth", y="share", title="survival"))
    heights = [float(bar.get("height")) for bar in chart.iter("rect")]
    assert heights[0] == pytest.approx(2 * heights[1], abs=0.2) and heights[2] == pytest.approx(2 * heights[0], abs=0.2)
    assert heights[3] == 0
    assert [button.text for button in chart.iter("button")] == ["a", "b"]


def test_names_are_text():
    chart = lines(
        [Curve("<b>&", [(1, 1), (2, 2)], marks=True), Curve("'\"", [(1, 2)])],
        x=Axis("<i>"),
        y=Axis("y"),
        title="<script>",
    )
    assert not re.search(r"<(b|i|script)>", str(chart))
    assert parse(chart).find("figcaption").text == "<script>"


def test_what_was_not_measured_is_said():
    assert "Nothing of this was measured" in lines([Curve("tau", [])], x=Axis("x"), y=Axis("y"), title="t")
    with_gaps = [Curve("loss", [(1, math.nan), (2, 1.0), (3, math.inf)], marks=True)]
    assert len(list(parse(lines(with_gaps, x=Axis("x"), y=Axis("y"), title="t")).iter("circle"))) == 1
