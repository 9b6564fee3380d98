"""Tests of scripts/find_layers.py: replay equals decoding, and short cuts do not change the search's result."""

import pytest
import torch
import yaml

from scripts import find_layers
from specdec.proposers import layer_search
from specdec.proposers.layerskip import LayerSkip
from specdec.target.model import Target
from specdec.unroll import replay
from tests.loops import logits_of_layers
from tests.support import NUM_NEW, SUBSETS, greedy, prompts_of, save_target, write_prompts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def small_answers(small_target):
    return greedy(small_target, None).generate(prompts_of(small_target), NUM_NEW).tokens


@pytest.mark.parametrize("layers", SUBSETS.values(), ids=SUBSETS)
@torch.inference_mode()
def test_replay_equals_decoding(small_target, small_answers, layers):
    """Equal numbers of rounds and of accepted drafts at every depth; first_step agrees with the first drafts."""
    prompts, depth = prompts_of(small_target), 3
    proposer = LayerSkip(small_target, layers=layers, depth=depth)
    decoder = greedy(small_target, proposer)
    for prompt, answer in zip(prompts[:3], small_answers):
        text = layer_search.AnsweredPrompt(small_target, prompt, answer)
        accept = text.accept(proposer.layers, depth)
        num_rounds, accepted = replay.rounds(accept)
        decoded = decoder.generate([prompt], NUM_NEW).accepted[0]
        assert num_rounds == len(decoded)
        assert accepted.tolist() == [sum(count >= d for count in decoded) for d in (1, 2, 3)]
        for start in (1, 2, 5):  # rounds that begin at other tokens than those of decoding
            logits = logits_of_layers(
                small_target, proposer.layers, prompt + answer[: start - 1], answer[start - 1 : start + 2]
            )
            right = [int(guess) == token for guess, token in zip(logits.argmax(-1), answer[start : start + 3])]
            assert [bool(flag) for flag in accept[:, start]] == right
        assert layer_search.share_right([text], [text.first_step(proposer.layers)[-1]]) == float(
            accept[0, 1:].double().mean()
        )


@torch.inference_mode()
def test_search_removes_the_layer_that_costs_least(small_target, small_answers):
    """The search against the same search without short cuts, which tries every layer at each size."""
    texts = [layer_search.AnsweredPrompt(small_target, p, a) for p, a in zip(prompts_of(small_target), small_answers)]
    right = lambda numbers: layer_search.share_right(texts, (text.first_step(numbers)[-1] for text in texts))
    results = layer_search.search(texts, 8)
    assert sorted(results) == list(range(1, 9)) and results[8] == (tuple(range(8)), 1.0)
    for size in range(1, 8):
        (chosen, share), (larger, _) = results[size], results[size + 1]
        shares = [right(tuple(k for k in larger if k != number)) for number in larger]
        assert set(chosen) < set(larger) and share == right(chosen) == max(shares)
    assert len({share for _, share in results.values()}) > 4
    fewer = layer_search.search(texts, 2)
    assert sorted(fewer) == sorted(results) and fewer[7] == results[7]


def test_the_script_writes_layers_and_refuses_wrong_settings(tmp_path, run_script, refuse):
    save_target(tmp_path / "target", num_layers=4)
    write_prompts(tmp_path / "prompts.jsonl", 3)
    arguments = [
        f"target.name={tmp_path}/target",
        "target.dtype=float32",
        f"prompts={tmp_path}/prompts.jsonl",
        "max_new_tokens=6",
        "depth=2",
        f"out={tmp_path}/layers.yaml",
    ]
    printed = run_script(find_layers, *arguments)
    written = yaml.safe_load((tmp_path / "layers.yaml").read_text())
    numbers = written["layers"]
    assert f"proposer.layers=[{','.join(map(str, numbers))}]" in printed and "predicted speedup" in printed
    assert written["_target_"] == "specdec.proposers.layerskip.LayerSkip" and written["threshold"] == 0
    assert len((tmp_path / "layers.yaml").read_text().splitlines()) == 7 + 4
    target = Target.load(f"{tmp_path}/target", dtype="float32")
    assert LayerSkip(target, layers=numbers, depth=written["depth"]).layers == tuple(numbers)
    for wrong, message in (
        ([*arguments, "depth=0"], "must be a whole number from 1 to 1024"),
        ([*arguments, "max_new_tokens=1"], "No answer has a second token"),
        ([*arguments, "prompts=nowhere.jsonl"], "There is no file"),
    ):
        refuse(message, find_layers, *wrong)


def test_predicted_times_and_speedup(small_target, monkeypatch):
    monkeypatch.setattr(layer_search, "time_pass", lambda target, runner, width, layers: 1.0 + width + 10 * layers)
    clock = layer_search.Clock(small_target, 4, compile=False)
    assert clock(1, 8) == pytest.approx(82) and clock(3, 4) == pytest.approx(44) and clock(1, 0) == pytest.approx(2)
    assert clock.speedup(2.0, 3, (0, 1, 4)) == pytest.approx(2 * 82 / (3 * 32 + 20 + (1 + 4 + 60)))
    assert clock.speedup(2.0, 3, (1, 4)) == pytest.approx(2 * 82 / (3 * 22 + (1 + 4 + 80)))
    assert layer_search.ranges((0, 1, 2, 5)) == "0-2 5"
