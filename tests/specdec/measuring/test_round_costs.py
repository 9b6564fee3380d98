"""Tests of specdec/measuring/round_costs.py: interpolation, timing, engines' files, rooflines."""

import json
from types import SimpleNamespace

import pytest
import torch
from transformers import DeepseekV3Config, Gemma3TextConfig, Qwen3MoeConfig

from specdec.heads.eagle import Eagle
from specdec.measuring import round_costs
from specdec.measuring.round_costs import ALL, CostPoint, DataSheet, RoundCosts, read_costs
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target
from specdec.target.structure import Experts, count_weights
from tests.support import Scripted, chain_of, greedy, make_drafter, oracle


def test_between_points_costs_are_lines():
    points = [CostPoint("a", 1, 2, 100, 2.0, 1.0), CostPoint("a", 1, 4, 100, 3.0, 1.0), CostPoint("a", 5, 2, 100, 6.0, 3.0),
              CostPoint("a", 1, 2, 300, 4.0, 3.0, error=0.2)]  # fmt: skip
    costs = RoundCosts.from_json(json.loads(json.dumps(RoundCosts(points, "here").to_json())))
    at = lambda *place: costs.at("a", *place)
    assert (at(2, 1, 100).seconds, at(3, 1, 100).seconds, at(1, 1, 100).seconds) == (
        2.0,
        2.5,
        1.5,
    )  # 0 drafts are plain
    assert (at(2, 3, 100).seconds, at(2, 3, 100).plain) == (4.0, 2.0)
    assert (at(2, 1, 200).seconds, at(2, 1, 200).plain, at(2, 1, 200).error) == (3.0, 2.0, 0.1)
    marks = [
        at(2, 5, 100).extrapolated,
        at(2, 7, 100).extrapolated,
        at(8, 1, 100).extrapolated,
        at(3, 5, 100).extrapolated,
    ]
    assert marks == [False, True, True, True] and at(2, 7, 100).seconds == 8.0 and at(8, 1, 100).seconds == 5.0
    assert [at(2, 1, context).extrapolated for context in (70, 80, 370, 380)] == [True, False, False, True]
    assert not at(2, 1, 100).extrapolated and at(1, 1, 100).extrapolated  # nothing is known below 2 drafts
    never = RoundCosts([CostPoint("a", 1, 0.0, 100, 1.1, 1.0)], "")  # a proposer that drafted nothing
    assert never.at("a", 0.0, 1, 100).seconds == 1.1 and not never.at("a", 0.0, 1, 100).extrapolated
    falling = RoundCosts([CostPoint("a", 1, 1, 0, 4.0, 1.0), CostPoint("a", 2, 1, 0, 2.0, 1.0)], "")
    assert falling.at("a", 1, 50, 0).seconds == 1.0  # never less than half of the nearest point
    with pytest.raises(ValueError, match="no costs of b, only of a"):
        costs.at("b", 1, 1, 100)


def test_a_point_is_a_ratio_with_its_error():
    plain = {"seconds": [1.0, 2.0, 1.0, 1.0], "opening": 0.5}
    found = {
        "seconds": [1.5, 3.0, 1.5, 9.0],
        "opening": 0.75,
    }  # the second turn was slow for both, the last one for one
    point = round_costs.summarise_point(CostPoint("a", 4, 2, 100, 0, 0), found, plain, varies=False)
    assert (point.seconds, point.plain, point.opening) == (1.5, 1.0, 0.25) and 0 < point.error < 1
    assert round_costs.summarise_point(point, found, plain, varies=True).seconds == pytest.approx((3 * 1.5 + 9) / 4)
    even = round_costs.summarise_point(point, plain, plain, varies=True)
    assert even.seconds == 1.0 and even.error == 0 and even.opening == 0


def test_rounds_of_the_decoder_are_timed_in_turn(small_target, monkeypatch):
    monkeypatch.setattr(round_costs, "POINT_SECONDS", 0.0)
    head = HeadProposer(make_drafter(small_target, "eagle"), chain_of(2))
    decoders = {0: greedy(small_target, None), 2: greedy(small_target, head)}
    found = round_costs.time_rounds(decoders, [[1, 2, 3], [4, 5]], 2, seed=0)
    assert set(found) == {0, 2} and all(len(each["seconds"]) == round_costs.FEWEST_ROUNDS for each in found.values())
    assert all(min(each["seconds"]) > 0 for each in found.values())


def test_texts_grow_alike_while_rounds_are_timed(small_target):
    prompt = [1, 2, 3]
    text = prompt + greedy(small_target, None).generate([prompt], 150).tokens[0]
    decoders = {0: greedy(small_target, None)}
    decoders |= {
        num: greedy(small_target, Scripted([text], num, oracle(num))) for num in (1, 7)
    }  # all drafts are accepted
    found = round_costs.time_rounds(decoders, [prompt], 1, seed=0)
    most, fewest = round_costs.MOST_ROUNDS, round_costs.FEWEST_ROUNDS
    assert {num: len(each["seconds"]) for num, each in found.items()} == {0: most, 1: most // 2, 7: fewest}


def test_loads_are_timed_until_rounds_are_long_and_without_what_cannot_pay(monkeypatch):
    asked = []

    def time_rounds(decoders, texts, rows, seed):
        asked.append((rows, sorted(decoders), [len(text) for text in texts]))
        return {num: {"seconds": [rows * (1 + num)] * 3, "opening": 0.0} for num in decoders}

    monkeypatch.setattr(round_costs, "time_rounds", time_rounds)
    monkeypatch.setattr(round_costs, "LONGEST", 30.0)
    drafted = SimpleNamespace(proposer=SimpleNamespace(varies=False))
    decoders = {0: SimpleNamespace(proposer=None), 1: drafted, 8: drafted}
    texts, loads = [[0] * num for num in (9, 1, 5, 3, 7)], [1, 2, 4, 8, 16, 32]
    known = [CostPoint("a", 2, num, where, 1.0, 1.0) for num, where in ((1, 6.0), (1, 4.9), (1, 50), (8, 5.5))]
    kept = []
    more = {"seed": 0, "keep": kept.append}
    found = round_costs.time_loads("a", decoders, texts, loads, most=4.0, known=known, **more)
    # 2 rows are known; 9 times plain cannot pay; 32 is not reached, as rounds of 16 rows take longer than LONGEST
    assert asked == [
        (1, [0, 1, 8], [5]),
        (4, [0, 1, 8], [1, 3, 7, 9]),
        (8, [0, 1], [1, 1, 3, 5, 5, 7, 9, 9]),
        (16, [0, 1], asked[3][2]),
    ]
    assert {each.context for each in found} == {5} and [each.rows for each in found] == [1, 1, 2, 2, 4, 4, 8, 16]
    assert [[each.rows for each in new] for new in kept] == [[1, 1], [4, 4], [8], [16]]  # at once, and new ones only
    asked.clear()
    monkeypatch.setattr(round_costs, "LONGEST", 100.0)
    round_costs.time_loads("a", decoders, texts, loads, most=10.0, known=sum(kept, known), **more)
    assert [each[:2] for each in asked] == [(8, [0, 8]), (16, [0, 8]), (32, [0, 1])]  # what was hopeless may pay now


def write(path, document):
    path.write_text(json.dumps(document))
    return str(path)


def test_tables_of_sglang_give_passes(tmp_path):
    path = write(
        tmp_path / "sps.json",
        {"sample_batch_tokens": [1, 10], "sample_steps_per_sec": [100.0, 50.0], "max_batch_tokens": 10},
    )
    costs = read_costs([path], [1, 2], 4)
    assert costs.at("any", 4, 1, 999).plain == pytest.approx(0.010) and costs.at(
        "any", 4, 2, 0
    ).seconds == pytest.approx(0.020)
    sums = {
        "bias_seconds": 0.01,
        "bs_probes": [1, 3],
        "alpha_seconds": [0.0, 0.002],
        "m_probes": [1, 11],
        "theta_seconds": [0.0, 0.01],
    }
    costs = read_costs([write(tmp_path / "sum.json", sums)], [1, 2], 4)
    assert costs.at("any", 2, 2, 0).seconds == pytest.approx(0.01 + 0.001 + 0.005)  # 2 requests, 6 tokens
    with pytest.raises(ValueError, match="less than two for each row"):
        read_costs([path], [64], 4)


def test_results_of_serving_benchmarks_give_rounds(tmp_path):
    same = {"max_concurrency": 4, "completed": 10, "total_input_tokens": 500, "total_output_tokens": 400}
    plain = write(tmp_path / "plain.json", {**same, "median_tpot_ms": 20.0})
    drafts = {"spec_decode_acceptance_length": 2.0, "spec_decode_num_drafts": 100, "spec_decode_draft_tokens": 300}
    drafted = write(tmp_path / "drafted.json", {**same, "median_tpot_ms": 15.0, **drafts})
    costs = read_costs([plain, drafted], [4], 16)
    (point,) = costs.points
    assert point == CostPoint(ALL, 4, 3, 70.0, 0.030, 0.020)  # 15 ms a token, two tokens a round
    assert costs.at("any", 1.5, 4, 70).seconds == pytest.approx(0.025) and costs.at("any", 5, 4, 70).extrapolated
    lines = [
        {**same, "median_tpot_ms": 20.0, "accept_length": None},
        {**same, "median_tpot_ms": 15.0, "accept_length": 2.0, "server_info": {"speculative_num_steps": 3}},
    ]
    (tmp_path / "sglang.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in lines)
    )  # as bench_serving writes them
    assert read_costs([str(tmp_path / "sglang.jsonl")], [4], 16).points == [point]
    with pytest.raises(ValueError, match="No load has both"):
        read_costs([drafted], [4], 16)
    with pytest.raises(ValueError, match="are of one head's chains"):
        read_costs([plain, drafted], [4], 16, None)
    write(tmp_path / "drafted.json", {**same, "median_tpot_ms": 0.0, **drafts})
    with pytest.raises(ValueError, match=r"At load 4 a round takes 0 s with drafts and 0\.02 s without"):
        read_costs([plain, drafted], [4], 16)


def test_loads_of_a_server_differ_though_each_has_its_own_context():
    each = {"tau": 2.0, "drafts": 3}
    drafted = [{**each, "rows": 1, "seconds": 1.0, "context": 100}, {**each, "rows": 9, "seconds": 3.0, "context": 140}]
    costs = round_costs.make_served(drafted, {1: 1.0, 9: 2.0}, "")
    assert [costs.at("any", 3, rows, 100).seconds for rows in (1, 5, 9)] == [2.0, 4.0, 6.0]
    assert not costs.at("any", 3, 5, 100).extrapolated


@pytest.mark.parametrize("text", ["[]", "{", "{}", '{"max_concurrency": null}', '{"costs": {}}', '{"costs": {"points": [1], "source": ""}}',
                                  '{"sample_batch_tokens": []}', '{"bias_seconds": 1}', '{"sample_batch_tokens": 3}'])  # fmt: skip
def test_files_of_another_form_are_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(ValueError, match=r"x\.json must be a choice.json of this command"):
        read_costs([str(tmp_path / "x.json")], [1], 4)
    assert round_costs.read_kept(tmp_path / "x.json") == [] == round_costs.read_kept(tmp_path / "no.json")


def test_weights_of_shared_experts_are_read_by_every_token():
    part = lambda: torch.nn.Linear(2, 2, bias=False)
    layer = torch.nn.ModuleDict({"experts": part(), "shared_experts": part(), "norm": torch.nn.LayerNorm(3)})
    decoder = torch.nn.ModuleDict({"layer": layer})
    assert count_weights(decoder, torch.zeros(0), Experts(8, 2)) == (10, 4)
    assert count_weights(decoder, layer["shared_experts"].weight, None, lambda value: value.nbytes) == (40, 0)


def test_windows_and_latents_keep_less():
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}
    kinds = ["sliding_attention", "full_attention"]
    config = Gemma3TextConfig(**sizes, num_hidden_layers=2, num_key_value_heads=1, head_dim=8, sliding_window=6, layer_types=kinds)  # fmt: skip
    assert Target.outline(config, name="tiny").kept() == [(2 * 8 * 2, 6.0), (2 * 8 * 2, float("inf"))]
    config = DeepseekV3Config(**sizes, num_hidden_layers=1, num_key_value_heads=2, kv_lora_rank=4, q_lora_rank=4, qk_rope_head_dim=2,
                              qk_nope_head_dim=4, v_head_dim=4, first_k_dense_replace=1)  # fmt: skip
    assert Target.outline(config, name="tiny").kept() == [(2 * (4 + 2), float("inf"))]


@pytest.mark.parametrize(("kind", "layers"), [("medusa", 0), ("eagle", 1), ("draft", 2)])
def test_a_roofline_has_the_keys_of_each_head(small_target, kind, layers):
    drafters = {"a": make_drafter(small_target, kind)}
    costs = round_costs.sheet_costs(DataSheet("", 1e30, 1.0, 0.0), small_target, drafters, [1], 2, [0.0, 64.0])
    drafted = [costs.at("a", 1, 1, where).seconds - costs.at("a", 1, 1, where).plain for where in (0.0, 64.0)]
    shapes = drafters["a"].cache(1).shapes
    width = sum(each.num_heads * each.width for each in shapes) * small_target.dtype.itemsize
    assert drafted[1] - drafted[0] == pytest.approx(64 * width) and len(shapes) == 2 * layers


def test_a_roofline_drafts_blocks_whole(small_target):
    drafters = {"a": make_drafter(small_target, "dflash")}
    costs = round_costs.sheet_costs(DataSheet("", 1.0, 1e30, 0.0), small_target, drafters, [1], 4, [0.0])
    one, two, three = (costs.at("a", num, 1, 0).seconds for num in (1, 2, 3))
    assert (
        two - one == pytest.approx(three - two) == pytest.approx(costs.at("a", 1, 1, 0).plain)
    )  # the target's pass grows


def test_a_roofline_counts_the_experts_that_are_hit():
    config = Qwen3MoeConfig(vocab_size=50, hidden_size=16, intermediate_size=32, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
                            num_key_value_heads=1, head_dim=8, num_experts=8, num_experts_per_tok=2, tie_word_embeddings=False)  # fmt: skip
    target = Target.outline(config, name="tiny")
    with torch.device("meta"):
        drafter = Eagle(target, vocab=None).to(torch.bfloat16)
    sheet = DataSheet("test", peak=1e30, bandwidth=1.0, launch=0.0)  # seconds are bytes
    costs = round_costs.sheet_costs(sheet, target, {"head": drafter}, [1, 4], 3, [0.0, 100.0])
    experts = 2 * 3 * 16 * 8 * 2  # bytes of an expert in both layers
    hit = lambda num: 8 * (1 - 0.75**num)
    one, four = costs.at("head", 1, 1, 0).plain, costs.at("head", 1, 4, 0).plain
    assert four - one == pytest.approx(experts * (hit(4) - hit(1)))
    keys = 2 * 2 * 2 * 8  # bytes of a token's keys and values in both layers
    assert costs.at("head", 1, 4, 100).plain - four == pytest.approx(4 * 100 * keys)
    each = 2 * (
        sum(value.numel() for value in drafter.parameters() if value.shape[0] != 50) + 50 * 16
    )  # of a step: the head and the LM head
    assert costs.at("head", 3, 1, 0).seconds == pytest.approx(one + experts * (hit(4) - hit(1)) + 3 * each)
    small = DataSheet("test", peak=1e30, bandwidth=1.0, launch=0.0, memory=one + experts * 8 + 250 * keys)
    tight = round_costs.sheet_costs(small, target, {"head": drafter}, [1, 4], 3, [100.0])
    assert {each.rows for each in tight.points} == {1} and tight.at("head", 1, 4, 100).extrapolated
    with pytest.raises(ValueError, match="do not fit into the memory of one test"):
        round_costs.sheet_costs(small, target, {"head": drafter}, [1, 4], 3, [1000.0])
    slow = DataSheet("test", peak=1.0, bandwidth=1e30, launch=0.0)
    assert slow.seconds(1e9, 65.0, 7) == pytest.approx(100.0) and DataSheet("", 1e30, 1e30, 2.0).seconds(
        1, 1, 7
    ) == pytest.approx(14.0)
