"""Tests of specdec/tools/choose/round_costs.py: interpolation, timing, files of earlier choices."""

import itertools
import json
from types import SimpleNamespace

import pytest
import torch

from specdec.target.structure import Experts, count_weights
from specdec.tools.choose import round_costs
from specdec.tools.choose.round_costs import CostPoint, RoundCosts
from tests.support.decoding import Scripted, greedy, oracle


def make_costs(*points, **fields) -> RoundCosts:
    """points: rows, drafts, context, seconds, plain"""
    return RoundCosts([CostPoint("a", *point) for point in points], "here", **fields)


def test_between_points_costs_are_lines():
    points = [(1, 2, 100, 2.0, 1.0), (1, 4, 100, 3.0, 1.0), (5, 2, 100, 6.0, 3.0), (1, 2, 300, 4.0, 3.0, 0.2)]
    costs = RoundCosts.from_json(json.loads(json.dumps(make_costs(*points).to_json())))

    def estimate(*position):
        return costs.estimate("a", *position)

    for position, seconds, plain, error in (
        ((2, 1, 100), 2.0, 1.0, 0.0),
        ((3, 1, 100), 2.5, 1.0, 0.0),
        ((1, 1, 100), 1.5, 1.0, 0.0),  # 0 drafts are plain
        ((2, 3, 100), 4.0, 2.0, 0.0),
        ((2, 1, 200), 3.0, 2.0, 0.1),
        ((2, 7, 100), 8.0, 4.0, 0.0),
        ((8, 1, 100), 5.0, 1.0, 0.0),
    ):
        point = estimate(*position)
        assert (point.seconds, point.plain, point.error) == (seconds, plain, error), position
    outside = [(2, 7, 100), (8, 1, 100), (3, 5, 100), (1, 1, 100), (2, 1, 70), (2, 1, 380)]  # none is below 2 drafts
    assert all(estimate(*position).extrapolated for position in outside)
    assert not any(estimate(*position).extrapolated for position in [(2, 5, 100), (2, 1, 100), (2, 1, 80), (2, 1, 370)])
    never = make_costs((1, 0.0, 100, 1.1, 1.0)).estimate("a", 0.0, 1, 100)  # a proposer that drafted nothing
    assert never.seconds == 1.1 and not never.extrapolated
    falling = make_costs((1, 1, 0, 4.0, 1.0), (2, 1, 0, 2.0, 1.0))
    assert falling.estimate("a", 1, 50, 0).seconds == 1.0  # never less than half of the nearest point
    with pytest.raises(ValueError, match="no costs of b, only of a"):
        costs.estimate("b", 1, 1, 100)


def test_a_point_is_a_ratio_with_its_error():
    plain = {"seconds": [1.0, 2.0, 1.0, 1.0], "opening": 0.5}
    drafted = {
        "seconds": [1.5, 3.0, 1.5, 9.0],
        "opening": 0.75,
    }  # the second turn was slow for both, the last one for one
    point = round_costs.summarise_point(CostPoint("a", 4, 2, 100, 0, 0), drafted, plain, varies=False)
    assert (point.seconds, point.plain, point.opening) == (1.5, 1.0, 0.25) and 0 < point.error < 1
    assert round_costs.summarise_point(point, drafted, plain, varies=True).seconds == pytest.approx((3 * 1.5 + 9) / 4)
    even = round_costs.summarise_point(point, plain, plain, varies=True)
    assert even.seconds == 1.0 and even.error == 0 and even.opening == 0


def test_texts_grow_alike_while_rounds_are_timed(small_target):
    prompt = [1, 2, 3]
    text = prompt + greedy(small_target, None).generate([prompt], 150).tokens[0]
    decoders = {0: greedy(small_target, None)}
    for num in (1, 7):
        decoders[num] = greedy(small_target, Scripted([text], num, oracle(num)))  # all drafts are accepted
    timed = round_costs.time_rounds(decoders, [prompt], 1, seed=0)
    upper, lower = round_costs.MAX_ROUNDS, round_costs.MIN_ROUNDS
    assert {num: len(each["seconds"]) for num, each in timed.items()} == {0: upper, 1: upper // 2, 7: lower}


def test_loads_are_timed_until_rounds_are_long_and_without_what_cannot_pay(monkeypatch):
    calls = []

    def time_rounds(decoders, texts, rows, seed):
        calls.append((rows, sorted(decoders), [len(text) for text in texts]))
        return {num: {"seconds": [rows * (1 + num)] * 3, "opening": float(num)} for num in decoders}

    monkeypatch.setattr(round_costs, "time_rounds", time_rounds)
    monkeypatch.setattr(round_costs, "LONGEST_ROUND", 30.0)
    drafted = SimpleNamespace(proposer=SimpleNamespace(varies=False))
    decoders = {0: SimpleNamespace(proposer=None), 1: drafted, 8: drafted}
    texts, loads = [[0] * num for num in (9, 1, 5, 3, 7)], [1, 2, 4, 8, 16, 32]
    cached = [CostPoint("a", 2, num, context, 1.0, 1.0) for num, context in ((1, 6.0), (1, 4.9), (1, 50), (8, 5.5))]
    stored = []
    common = {"seed": 0, "store_points": stored.append}
    points = round_costs.time_loads("a", decoders, texts, loads, max_cost_ratio=4.0, cached_points=cached, **common)
    # 2 rows are known; 9 times plain cannot pay; 32 is not reached, as rounds of 16 rows take longer than LONGEST
    assert calls == [
        (1, [0, 1, 8], [5]),
        (4, [0, 1, 8], [1, 3, 7, 9]),
        (8, [0, 1], [1, 1, 3, 5, 5, 7, 9, 9]),
        (16, [0, 1], calls[3][2]),
    ]
    assert {point.context for point in points} == {5} and [each.rows for each in points] == [1, 1, 2, 2, 4, 4, 8, 16]
    assert [point.opening for point in points] == [1, 1, 0, 0, 1, 1, 1, 1]  # any drafts read the same prompts
    stored_rows = [(point.rows, point.drafts) for point in itertools.chain(*stored)]  # at once, and new ones only
    assert len(stored) == 4 and stored_rows == [(1, 1), (1, 8), (4, 1), (4, 8), (8, 1), (16, 1)]
    calls.clear()
    monkeypatch.setattr(round_costs, "LONGEST_ROUND", 100.0)
    round_costs.time_loads(
        "a", decoders, texts, loads, max_cost_ratio=10.0, cached_points=sum(stored, cached), **common
    )
    assert [call[:2] for call in calls] == [(8, [0, 8]), (16, [0, 8]), (32, [0, 1])]  # what was hopeless may pay now


def test_loads_of_a_server_differ_though_each_has_its_own_context():
    common = {"tau": 2.0, "drafts": 3}
    drafted = [{**common, "rows": rows, "seconds": rows / 4 + 0.75, "context": 95 + 5 * rows} for rows in (1, 9)]
    costs = round_costs.make_server_costs(drafted, {1: 1.0, 9: 2.0}, "", "a")
    assert [costs.estimate("a", 3, rows, 100).seconds for rows in (1, 5, 9)] == [2.0, 4.0, 6.0]
    assert not costs.estimate("a", 3, 5, 100).extrapolated
    with pytest.raises(ValueError, match="No load has both"):
        round_costs.make_server_costs(drafted, {4: 1.0}, "", "a")
    with pytest.raises(ValueError, match=r"At load 1 a round takes 0 s with drafts and 1 s without"):
        round_costs.make_server_costs([{**drafted[0], "seconds": 0.0}], {1: 1.0}, "", "a")


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"costs": {}}', '{"costs": {"points": [1], "source": ""}}'])
def test_files_of_another_form_are_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    assert (
        round_costs.read_cached_points(tmp_path / "x.json")
        == []
        == round_costs.read_cached_points(tmp_path / "no.json")
    )


def test_weights_of_shared_experts_are_read_by_every_token():
    experts, shared = (torch.nn.Linear(2, 2, bias=False) for _ in range(2))
    layer = torch.nn.ModuleDict({"experts": experts, "shared_experts": shared, "norm": torch.nn.LayerNorm(3)})
    decoder = torch.nn.ModuleDict({"layer": layer})
    assert count_weights(decoder, torch.zeros(0), Experts(8, 2)) == (10, 4)
    assert count_weights(decoder, shared.weight, None) == (10, 0)
