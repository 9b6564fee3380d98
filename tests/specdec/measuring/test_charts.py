"""Tests of the charts: they have their figures, and nothing of a figure's name becomes markup."""

import math
import re
from xml.etree import ElementTree

import pytest

from specdec.measuring.charts import ChartCurve, chart_bars, chart_intervals, chart_lines, format_number

SVG = "{http://www.w3.org/2000/svg}"
AXES = {"x": "<i>", "y": "y", "title": "<script>"}


def parse(chart) -> ElementTree.Element:
    """The chart as XML, in the namespace that HTML gives to it."""
    text = str(chart)
    return ElementTree.fromstring(text if "xmlns=" in text else text.replace("<svg ", f'<svg xmlns="{SVG[1:-1]}" ', 1))


def test_figures_are_short():
    texts = {
        0: "0",
        1.234: "1.23",
        45.67: "45.7",
        1234.4: "1,234",
        12345: "12.3 K",
        3_400_000: "3.4 M",
        2.5e-4: "2.5e-4",
    }
    assert {value: format_number(value) for value in texts} == texts


def test_marks_stand_where_their_figures_are_and_every_page_has_the_same():
    curve = ChartCurve("tau", [(0, 1.0), (10, 3.0), (20, 2.0)], marks=True)
    charts = [chart_lines([curve], x="step", y="tau", title="tau") for _ in range(2)]
    assert charts[0] == charts[1]
    marks = [mark for mark in parse(charts[0]).iter(f"{SVG}use") if mark.get("style")]
    (x0, y0), (x1, y1), (x2, y2) = ((float(mark.get("x")), float(mark.get("y"))) for mark in marks[-3:])
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2) and x0 < x1
    assert y1 < y2 < y0 and (y0 - y2) == pytest.approx((y0 - y1) / 2, abs=0.2)  # larger figures stand higher


def test_names_are_text_and_curves_have_a_legend():
    names = ["<b>&", "'\"", "$x$"]
    curves = [ChartCurve(name, [(1, 1), (2, 2)], marks=True) for name in names]
    for chart in (
        chart_lines(curves, **AXES),
        chart_bars([(name, [0.5, 1.0]) for name in names], ["<i>", "2"], **AXES),
    ):
        assert not re.search(r"<(b|i|script)>", str(chart))
        figure = parse(chart)
        assert figure[0].text == "<script>"
        assert [key[0].tail for key in figure[1]] == names  # the legend, which stands before the plot
        assert "<i>" in {text.text for text in figure.iter(f"{SVG}text")}
        colours = set(re.findall(r"stroke: (var\(--c\d\))", ElementTree.tostring(figure[1]).decode()))
        assert len(colours) == 3 and all(str(chart).count(colour) > 1 for colour in colours)


def test_intervals_stand_one_above_the_other_beside_the_line_of_the_reference():
    chart = chart_intervals([("<a>", 2.0, (1.5, 2.5)), ("b", 1.0, (1.0, 1.0))], reference=1.0, x="times", title="t")
    figure = parse(chart)
    marks = [mark for mark in figure.iter(f"{SVG}use") if "--c" in mark.get("style")]
    (x0, y0), (x1, y1) = ((float(mark.get("x")), float(mark.get("y"))) for mark in marks)
    assert x1 < x0 and y0 < y1 and {"<a>", "b", "times"} <= {text.text for text in figure.iter(f"{SVG}text")}
    lines = [path.get("d").split() for path in figure.iter(f"{SVG}path") if "opacity: 0.6" in path.get("style", "")]
    assert [float(line[1]) for line in lines] == [pytest.approx(x1, abs=0.1)]


def test_a_series_of_one_point_is_no_chart():
    assert chart_lines([ChartCurve("tau", []), ChartCurve("loss", [(1, 1.0)], marks=True)], **AXES) == ""
    assert chart_bars([("a", [0.5])], ["1"], **AXES) == ""
    assert chart_intervals([("a", 1.0, (1.0, 1.0))], x="x", title="t", reference=1.0) == ""
    curves = [ChartCurve("alone", [(1, 1.0)]), ChartCurve("tau", [(1, 1.0), (2, 2.0)])]
    assert "alone" not in chart_lines(curves, **AXES)
    with_gaps = [ChartCurve("loss", [(1, math.nan), (2, 1.0), (3, math.inf)], marks=True)]
    assert "<svg" in chart_lines(with_gaps, **AXES)
