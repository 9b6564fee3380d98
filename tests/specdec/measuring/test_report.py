"""Reports as records and as JSON, and the order in which compared functions run."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from specdec.core.generation import Generation
from specdec.measuring.measure import PromptResult
from specdec.measuring.report import Report, Training, summarise, summarise_by_category
from specdec.text.conversations import Prompt
from tests.support import ROOT

SHIPPED = sorted((ROOT / "checkpoints" / "shipped").glob("*/report.json"))


def results(replayed: bool = True) -> list[PromptResult]:
    """Three prompts of two categories: 3, 2 and 1 drafts are accepted in rounds of up to 2."""
    rows = []
    for number, accepted in enumerate(([2, 1], [2, 0], [1])):
        tokens = [[0] * (1 + sum(accepted) + len(accepted))]
        drafted = Generation(tokens, [accepted], [2] * len(accepted), seconds=0.5)
        plain = Generation(tokens, [[0] * (len(tokens[0]) - 1)], seconds=1.0)
        rounds, counts = (float(len(accepted)), [1.0, 1.0]) if replayed else (math.nan, [])
        rows.append(PromptResult(Prompt(str(number), "ab"[number % 2], [0]), plain, drafted, rounds, counts, None))
    return rows


def test_figures_equal_those_computed_by_hand():
    report = summarise(results(), depth=2, temperature=0)
    assert (report.num_prompts, report.num_rounds) == (3, 5) and report.tau == (6 + 5) / 5
    assert report.survival == [4 / 5, 2 / 5] and report.acceptance == [4 / 5, 1 / 2]
    assert report.tokens_per_second == 11 / 1.5 and report.speedup == 2
    assert report.replayed_tau == 1 + 6 / 5 and report.identical_outputs == 1


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("replayed", [True, False])
def test_a_report_is_read_back_from_its_json(temperature, replayed):
    report = summarise_by_category(results(replayed), depth=2, temperature=temperature)
    report = replace(report, step=3, shape="chain of 2", training=Training(parameters=5))
    document = json.loads(json.dumps(report.to_json()))
    assert Report.from_json(document) == report
    assert set(report.by_category) == {"a", "b"} and report.by_category["a"].num_prompts == 2
    assert ("replayed_tau" in document) == replayed and ("largest_gap_at_difference" in document) == (temperature == 0)
    assert "training" not in document["by_category"]["a"] and document["training"]["parameters"] == 5


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_shipped_reports_can_be_read(path: Path):
    document = json.loads(path.read_text())
    rewritten = Report.from_json(document).to_json()
    of_today = lambda values: {key: value for key, value in values.items() if key != "lossy"}  # a field of before
    document = json.loads(path.read_text(), object_hook=of_today)
    assert {key: rewritten[key] for key in document if key not in ("training", "settings")} == {
        key: value for key, value in document.items() if key not in ("training", "settings")
    }


def test_another_document_is_refused():
    with pytest.raises(ValueError, match=r"^some\.json is not a report of drafting"):
        Report.from_json({"tau": 1.0}, source="some.json")
