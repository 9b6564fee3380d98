"""Rates of functions that are timed in alternation."""

from types import SimpleNamespace

import pytest

from specdec.core.generation import STAGES, Generation
from specdec.measuring import benchmark
from specdec.measuring.benchmark import TimedDecoder


def test_functions_alternate_and_every_prompt_has_a_rate():
    calls = []

    def function(name: str, seconds: float):
        return lambda prompt: (calls.append((name, len(prompt))), (prompt, seconds))[1]

    prompts = [[0] * 4, [0] * 2, [0] * 6]
    rates, answers = benchmark.measure({"a": function("a", 2.0), "b": function("b", 1.0)}, prompts, repeats=2)
    assert answers == {"a": prompts, "b": prompts}
    assert rates == {"a": [2.0, 1.0, 3.0] * 2, "b": [4.0, 2.0, 6.0] * 2}
    assert calls[:4] == [("a", 2), ("a", 6), ("b", 2), ("b", 6)]  # the warm-up
    assert [name for name, _ in calls[4:]] == [*"abbaabbaabba"]
    assert benchmark.median_ratio(rates["b"], rates["a"]) == 2.0


def test_a_timed_decoder_keeps_its_generations_and_clears_its_proposer_before_each_repeat():
    events = []

    def generate(prompts, max_new_tokens):
        events.append(len(prompts[0]))
        stages = dict.fromkeys(STAGES, 0.01)
        return Generation([[7] * max_new_tokens], [[2, 1]], [2, 2], compile_seconds=-1.0, stages=stages)

    proposer = SimpleNamespace(forget=lambda: events.append("forget"))
    timed = TimedDecoder(SimpleNamespace(generate=generate, proposer=proposer), 6)
    rates, _ = benchmark.measure({"timed": timed}, [[0], [0, 0]], repeats=2)
    assert events == [1, 2, "forget", 1, 2, "forget", 1, 2]
    assert len(timed.generations) == 4 and all(0 < rate < 6 for rate in rates["timed"])  # compiling is left out
    figures = timed.figures()
    assert figures["tau"] == 2.5 and figures["ms_per_round"] == pytest.approx(dict.fromkeys(STAGES, 5.0))
