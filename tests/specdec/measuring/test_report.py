"""Reports as records and as JSON, against figures computed by hand, and the chain that pays for an export."""

import json
import math
from dataclasses import replace

import pytest

from specdec.core.generation import Generation
from specdec.measuring.measure import PromptResult
from specdec.measuring.model_card import choose_chain, predict_chain_speedups
from specdec.measuring.report import (
    Report,
    Training,
    bootstrap_interval,
    compute_tau,
    measure_tau_difference,
    summarise,
    summarise_by_category,
)
from specdec.text.conversations import Prompt
from tests.support.commands import ROOT

SHIPPED = sorted((ROOT / "checkpoints" / "shipped").glob("*/report.json"))


def make_results(replayed: bool = True) -> list[PromptResult]:
    """Three prompts of two categories: 3, 2 and 1 drafts are accepted in rounds of up to 2."""
    results = []
    for number, accepted in enumerate(([2, 1], [2, 0], [1])):
        tokens = [[0] * (1 + sum(accepted) + len(accepted))]
        drafted = Generation(tokens, [accepted], [2] * len(accepted), seconds=0.5)
        plain = Generation(tokens, [[0] * (len(tokens[0]) - 1)], seconds=1.0)
        rounds, counts = (float(len(accepted)), [1.0, 1.0]) if replayed else (math.nan, [])
        prompt = Prompt(str(number), "ab"[number % 2], [0])
        results.append(PromptResult(prompt, plain, drafted, rounds, counts, None))
    return results


def test_figures_equal_those_computed_by_hand():
    report = summarise(make_results(), depth=2, temperature=0)
    assert (report.num_prompts, report.num_rounds) == (3, 5) and report.tau == (6 + 5) / 5
    assert report.survival == [4 / 5, 2 / 5] and report.acceptance == [4 / 5, 1 / 2]
    assert report.tokens_per_second == 11 / 1.5 and report.speedup == 2
    assert report.replayed_tau == 1 + 6 / 5 and report.identical_outputs == 1
    assert report.replayed_survival == [3 / 5, 3 / 5]


def test_intervals_hold_95_percent_and_turns_of_a_question_are_drawn_together():
    values = [float(number) for number in range(41)]
    low, high = bootstrap_interval(values, lambda drawn: sum(drawn) / len(drawn), 0)
    deviation = (40 * 42 / 12) ** 0.5 / 41**0.5  # of the mean of 41 equally likely values
    assert low == pytest.approx(20 - 1.96 * deviation, abs=0.2) and high == pytest.approx(
        20 + 1.96 * deviation, abs=0.2
    )
    results = [replace(result, prompt=replace(result.prompt, question="q")) for result in make_results()]
    assert bootstrap_interval(results, compute_tau, 0) == [11 / 5, 11 / 5]  # all turns of one question in each draw
    assert measure_tau_difference(results, results) == (0.0, [0.0, 0.0])
    assert all(map(math.isnan, bootstrap_interval(values, lambda drawn: math.nan, 0)))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("replayed", [True, False])
def test_a_report_is_read_back_from_its_json(temperature, replayed):
    report = summarise_by_category(make_results(replayed), depth=2, temperature=temperature)
    training = Training(parameters=5)
    report = replace(report, step=3, shape="chain of 2", training=training, experts=[8, 2] if replayed else None)
    document = json.loads(json.dumps(report.to_json()))
    assert Report.from_json(document) == report
    assert set(report.by_category) == {"a", "b"} and report.by_category["a"].num_prompts == 2
    assert ("replayed_tau" in document) == replayed and ("largest_gap_at_difference" in document) == (temperature == 0)
    assert ("experts" in document) == replayed
    assert "training" not in document["by_category"]["a"] and document["training"]["parameters"] == 5


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.parent.name)
def test_shipped_reports_can_be_read(path):
    rewritten = Report.from_json(json.loads(path.read_text())).to_json()

    def drop_old_fields(values: dict) -> dict:
        return {
            key: value for key, value in values.items() if key not in ("lossy", "training", "settings", "by_prompt")
        }

    document = json.loads(path.read_text(), object_hook=drop_old_fields)
    assert {key: rewritten[key] for key in document} == document


def test_another_document_is_refused():
    with pytest.raises(ValueError, match=r"^some\.json is not a report of drafting"):
        Report.from_json({"tau": 1.0}, source="some.json")


def test_the_best_chain_of_a_mixture_follows_its_experts():
    """One of two experts for each token: passes over 1, 2, 3 tokens use 1, 1.5, 1.75 experts.

    Of the 0.75 that three tokens add, the first draft costs two thirds. With survival .7, .5 and verification of 1
    (plain) and 1.9 (two drafts), a chain of one emits 1.7 in 1.45 if drafts cost alike (2.2 in 1.9 for two), and in 1.6
    here.
    """
    assert 1.7 / 1.45 > 2.2 / 1.9 > 1.7 / 1.6
    stages = {"draft": 0.0, "verify": 1.9e3, "keep": 0.0, "other": 0.0}
    report = Report(0.0, 1, 1, survival=[0.7, 0.5], baseline_tokens_per_second=1.0, ms_per_round=stages)
    assert choose_chain(report) == 1 and choose_chain(replace(report, experts=[2, 1])) == 2
    slower = replace(report, ms_per_round={"draft": 200.0, "verify": 1.9e3, "keep": 50.0, "other": 0.0})
    expected = [1700 / (100 + 1450 + 50), 2200 / (200 + 1900 + 50)]
    assert predict_chain_speedups(slower) == pytest.approx(expected)
    whole = replace(slower, ms_per_round={"round": 2100.0, "other": 50.0})  # the device made it alone
    assert predict_chain_speedups(whole) == pytest.approx(expected)
