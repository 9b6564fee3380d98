"""Tests of specdec/tools/choose/choice.py: speedups by hand, acceptance at all K from one replay, loads, schedules."""

import functools
import json
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.heads.native import NativeMTP
from specdec.measuring.replay import AnsweredPrompt
from specdec.measuring.report import PromptCounts
from specdec.proposers.heads import HeadProposer
from specdec.text.conversations import Prompt
from specdec.tools.choose import choice, page
from specdec.tools.choose.acceptance import _compare_window, compare_windows, rate_window
from specdec.tools.choose.choice import ShapeAcceptance
from specdec.tools.choose.round_costs import CostPoint, RoundCosts
from specdec.unroll.replay import replay_answers
from tests.support.drafters import make_drafter

PROMPTS = [[1, 2, 3], [4, 5, 3, 1], [0, 3], [2, 5, 1, 4]]


def chain(num, tau, name="head"):
    return ShapeAcceptance(name, f"chain of {num}", name, num, tau, [tau - 0.1, tau + 0.1], [])


def table(*points, name="head"):
    """points: rows, drafts, seconds, plain"""
    return RoundCosts(
        [CostPoint(name, rows, drafts, 100.0, seconds, plain) for rows, drafts, seconds, plain in points], "a test"
    )


def test_a_window_is_advised_or_dismissed_only_where_the_interval_tells():
    rate = functools.partial(rate_window, "decode.window=4")
    assert rate(8, 0.01, 0.3) == "give decode.window=4" and rate(8, -0.3, -0.01) == "it does not pay"
    assert rate(8, -0.1, 0.1) == rate(8, 0.0, 0.1) == "whether it pays is not certain"
    assert "too few" in rate(7, 0.01, 0.3) and "too few" in rate(7, -0.3, -0.01)


def test_modules_with_a_window_of_their_own_are_not_compared_with_another(tmp_path):
    (tmp_path / "drafter.json").write_text(json.dumps({"_target_": "a.head", "trained_length": 4}))
    module = Mock(spec=NativeMTP, windows=[8], layout_window=8, with_window=Mock(side_effect=ValueError))
    drafting = SimpleNamespace(window=None, replayable=lambda *_: True)
    decode = SimpleNamespace(make_drafting=lambda: drafting)
    runs = [SimpleNamespace(name="native", folder=tmp_path, drafter=module)]
    task = SimpleNamespace(runs=runs, options=SimpleNamespace(decode=decode), sampling=Sampling())
    assert compare_windows(task, [SimpleNamespace(length=10)] * 9) == []


def test_a_speedup_is_what_is_computed_by_hand():
    speedup = choice.find_speedup(chain(1, 2.0), table((1, 1, 0.016, 0.010)), 1, 100, 11)
    assert speedup.speedup == pytest.approx(1.25) and not speedup.extrapolated  # 10 ms against 16 ms for two tokens
    assert (speedup.low, speedup.high) == pytest.approx((0.010 * 1.9 / 0.016, 0.010 * 2.1 / 0.016))
    point = CostPoint("head", 1, 1, 100, 0.016, 0.010, error=0.05, opening=0.001)
    speedup = choice.find_speedup(chain(1, 2.0), RoundCosts([point], ""), 1, 100, 11)
    assert speedup.speedup == pytest.approx(0.010 / (0.008 + 0.0001))  # the prompt's ms over ten tokens
    assert speedup.low < 0.010 * 1.9 / 0.016 - 0.05  # the error of the costs is in the interval


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_replay_has_tau_of_every_number_of_drafts(small_target, temperature):
    target, drafter = small_target, make_drafter(small_target, "eagle")
    sampling = Sampling(temperature=temperature)
    plain = Decoder(target, None, sampling=sampling, stop=set())
    answers = [plain.generate([prompt], 20, generator=torch.Generator().manual_seed(0)).tokens[0] for prompt in PROMPTS]
    texts, emitted = list(zip(PROMPTS, answers)), sum(len(answer) - 1 for answer in answers)
    replays = replay_answers(drafter, texts, depth=5, temperature=temperature)
    prompts = [Prompt(str(number), "", prompt) for number, prompt in enumerate(PROMPTS)]
    acceptances = choice.summarise_chains("head", [replayed.acceptance for replayed in replays], prompts)
    assert [acceptance.shape for acceptance in acceptances] == [f"chain of {num}" for num in range(1, 6)]
    for num, acceptance in enumerate(acceptances, start=1):
        replays = replay_answers(drafter, texts, depth=num, temperature=temperature)
        assert acceptance.tau == pytest.approx(emitted / sum(replayed.expected_rounds[0] for replayed in replays))
        assert acceptance.tau == pytest.approx(1 + sum(acceptance.survival))
        assert sum(bucket["emitted"] for bucket in acceptance.contexts["context"]) == pytest.approx(emitted)
        assert acceptance.tau_ci[0] <= acceptance.tau <= acceptance.tau_ci[1]
        if not temperature:
            decoder = Decoder(target, HeadProposer(drafter, TreeShape(num, 1, num)), sampling=sampling, stop=set())
            rounds = sum(len(decoder.generate([prompt], 20).accepted[0]) for prompt in PROMPTS)
            assert acceptance.tau == pytest.approx(emitted / rounds)


def test_the_best_shape_and_the_load_from_which_plain_is_faster():
    costs = RoundCosts(
        [*table((1, 1, 1.1, 1), (1, 4, 1.2, 1), (9, 1, 1.5, 1), (9, 4, 3.0, 1), name="a").points,
         *table((1, 1, 1.8, 1), (9, 1, 2.6, 1), name="b").points], "")  # fmt: skip
    acceptances = [chain(1, 1.6, "a"), chain(4, 2.4, "a"), chain(1, 1.9, "b")]
    table_rows = choice.choose_drafts(acceptances, costs, loads=[1, 5, 9], contexts=[100], tokens=50)
    assert [(row["best"], row["drafters"]["a"]["drafts"]) for row in table_rows] == [("a", 4), ("a", 1), ("a", 1)]
    assert (
        table_rows[0]["drafters"]["a"]["speedup"] == pytest.approx(2.0)
        and table_rows[2]["drafters"]["b"]["speedup"] < 1
    )
    # b: 1.9 tokens in 1.8 + 0.1 (B - 1): even at B = 2; a beyond the table: 1.1 + 0.05 (B - 1) is 1.6 at B = 11
    assert choice.find_crossings(acceptances, costs, max_load=20, context=100, tokens=50) == {
        "a": (11, True), "b": (2, False), "all": (11, True)}  # fmt: skip
    assert choice.find_crossings(acceptances, costs, max_load=10, context=100, tokens=50) == {
        "a": None,
        "b": (2, False),
        "all": None,
    }
    never = choice.find_crossings([chain(1, 1.0, "a")], costs, max_load=9, context=100, tokens=50)
    assert never == {"a": (1, False), "all": (1, False)}


def test_a_schedule_covers_every_load_once():
    def row(load, drafts, speedup):
        return {"load": load, "drafters": {"a": {"drafts": drafts, "speedup": speedup}}}

    table = [row(1, 4, 2.0), row(2, 4, 1.9), row(4, 2, 1.5), row(8, 2, 0.9), row(16, 1, 0.8)]
    assert choice.find_schedule(table, "a") == [(1, 3, 4), (4, 7, 2), (8, 16, 0)]
    assert choice.find_schedule(table[2:3], "a") == [(1, 4, 2)]


def test_a_choice_from_few_answers_or_between_equals_is_not_sure():
    def judge(num, *taus):
        acceptances = [chain(1, tau, name) for name, tau in zip("abc", taus)]
        points = [
            point for acceptance in acceptances for point in table((1, 1, 1.2, 1), name=acceptance.drafter).points
        ]
        loads = choice.choose_drafts(acceptances, RoundCosts(points, ""), loads=[1], contexts=[9, 99], tokens=50)
        verdicts = page.list_verdicts({"loads": loads, "contexts": [9], "num_answers": num})
        assert len(verdicts) == 1  # of the first context
        return verdicts[0]

    figures = " at load 1: 2.00 times as fast as plain decoding (1.92 .. 2.08) with a, chain of 1, on"
    assert judge(12, 2.4, 1.2) == ("yes", f"Yes{figures} 12 answers.")
    assert judge(2, 2.4, 1.2) == (
        "unsure",
        f"Not sure{figures} 2 answers. At least 8 answers would tell (limit=, prompts=).",
    )
    answer, sentence = judge(12, 2.4, 2.3)
    doubt = f"Not sure{figures} 12 answers; whether b, chain of 1 is slower is not sure (1.92 times). About 25 answers"
    assert answer == "unsure" and sentence.startswith(doubt)
    assert judge(12, 0.9, 0.6)[0] == "no" and judge(2, 0.9, 0.6)[0] == "unsure"


def test_predictions_are_read_from_a_document(tmp_path):
    acceptance = choice.add_tau(chain(2, 0.0), [PromptCounts(10, 20.0), PromptCounts(10, 24.0)])
    document = {
        "acceptance": [vars(acceptance)],
        "costs": table((1, 2, 1.1, 1.0)).to_json(),
        "tokens": 50,
        "contexts": [100.0],
    }
    value, low, high, extrapolated = choice.predict_speedup(document, "head", "chain of 2", 1)
    assert not extrapolated and choice.predict_speedup(document, "head", "chain of 2", 1, 200.0)[3]
    assert value == pytest.approx(2.2 / 1.1) and low <= value <= high
    assert (
        choice.predict_speedup(document, "head", "chain of 3", 1) is None
        and choice.predict_speedup(document, "x", "chain of 2", 1) is None
    )
    for wrong in (
        {},
        [],
        {"acceptance": [{"tau": 1}]},
        {**document, "costs": []},
        {**document, "costs": {"points": [1]}},
    ):
        (tmp_path / "results.json").write_text(json.dumps({"choice": wrong}))
        with pytest.raises(ValueError, match=r"predicted=.* must be a folder of specdec choose"):
            choice.read_predictions(str(tmp_path))


@pytest.mark.parametrize("head", ["dflash", "eagle"])
def test_windows_are_compared_with_as_many_drafts_as_a_head_can_make(small_target, head):
    run = SimpleNamespace(name=head, drafter=make_drafter(small_target, head))
    texts = [AnsweredPrompt(prompt, [1, 2, 3, 4, 5, 1], 0.0) for prompt in PROMPTS[:2]]
    task = SimpleNamespace(options=SimpleNamespace(seed=0))
    sentence = _compare_window(task, run, run.drafter.with_window(4), texts)
    assert "2 texts longer than its training: a window of 4 changes tau from" in sentence
