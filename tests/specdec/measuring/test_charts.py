"""Tests of the charts: they have their figures, and nothing of a figure's name becomes markup."""

import math
import re
from xml.etree import ElementTree

import pytest

from specdec.measuring.charts import ChartCurve, chart_bars, chart_lines, format_number

SVG = "{http://www.w3.org/2000/svg}"


def parse(chart) -> ElementTree.Element:
    return ElementTree.fromstring(str(chart).replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
                                  if "xmlns=" not in str(chart) else str(chart))  # fmt: skip


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (1.234, "1.23"), (45.67, "45.7"), (1234.4, "1,234"), (12345, "12.3 K"), (3_400_000, "3.4 M"), (2.5e-4, "2.5e-4")],
)  # fmt: skip
def test_figures_are_short(value, text):
    assert format_number(value) == text


def marks_of(chart) -> list[tuple[float, float]]:
    return [
        (float(mark.get("x")), float(mark.get("y"))) for mark in parse(chart).iter(f"{SVG}use") if mark.get("style")
    ]


def test_marks_stand_where_their_figures_are_and_every_page_has_the_same():
    draw = lambda: chart_lines(
        [ChartCurve("tau", [(0, 1.0), (10, 3.0), (20, 2.0)], marks=True)], x="step", y="tau", title="tau"
    )
    places = marks_of(draw())[-3:]
    (x0, y0), (x1, y1), (x2, y2) = places
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and x0 < x1
    assert y1 < y2 < y0 and (y0 - y2) == pytest.approx((y0 - y1) / 2, abs=0.2)  # larger figures stand higher
    assert draw() == draw()


def test_names_are_text_and_curves_have_a_legend():
    names = ["<b>&", "'\"", "$x$"]
    for chart in (
        chart_lines(
            [ChartCurve(name, [(1, 1), (2, 2)], marks=True) for name in names], x="<i>", y="y", title="<script>"
        ),
        chart_bars([(name, [0.5, 1.0]) for name in names], ["<i>", "2"], x="depth", y="share", title="<script>"),
    ):
        assert not re.search(r"<(b|i|script)>", str(chart))
        found = parse(chart)
        assert found[0].text == "<script>"
        assert {*names, "<i>"} <= {text.text for text in found.iter(f"{SVG}text")}


def test_what_was_not_measured_is_said():
    assert "nothing of this was measured" in chart_lines([ChartCurve("tau", [])], x="x", y="y", title="t")
    with_gaps = [ChartCurve("loss", [(1, math.nan), (2, 1.0), (3, math.inf)], marks=True)]
    assert "<svg" in chart_lines(with_gaps, x="x", y="y", title="t")
