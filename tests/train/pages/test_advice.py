"""Tests of what a run's page advises: each rule speaks about a run that calls for it, and none about a sound one."""

import pytest

from train.pages.advice import RULES, Figures, advice

REPORT = {
    "replayed_tau": 2.0,
    "replayed_tau_ci": [1.9, 2.1],
    "replayed_survival": [0.55, 0.3, 0.15],
    "speedup": 1.5,
    "ms_per_round": {"draft": 6.0, "verify": 40.0, "keep": 0.1, "other": 0.2},
    "training": {"tokens": 4_000_000, "unique_tokens": 3_000_000},
    "by_category": {"code": {"replayed_tau": 2.1}, "prose": {"replayed_tau": 1.9}},
    "ema": {"kept": "average", "plain": 1.99, "average": 2.0},
}
TOKENS = (1e6, 2e6, 3e6, 4e6)


def log(*, taus=(1.7, 1.85, 1.95, 2.0), losses=(2.0, 1.0), text=2.1, clipped=0.2, tokens=TOKENS) -> list[dict]:
    """A run of 400 steps with a validation after every 100."""
    first, last = losses
    rows = [
        {"step": step, "loss": first + (last - first) * step / 400, "tau": text, "clipped": clipped}
        for step in range(10, 401, 10)
    ]
    rows += [
        {"step": 100 * place, "validation": {"tau": None, "replayed_tau": tau, "training": {"tokens": seen}}}
        for place, (tau, seen) in enumerate(zip(taus, tokens), start=1)
    ]
    return sorted(rows, key=lambda row: row["step"])


ABOUT = {"data": {"covered": 0.99}}
CASES = {
    "slower_than_plain": ({"speedup": 0.9, "auto": {"speedup": 1.2}}, {}, {}, "slower than plain decoding (0.90)"),
    "depth_too_long": ({"replayed_survival": [0.4, 0.1, 0.004]}, {}, {}, "Try decode.depth=2"),
    "drafting_too_slow": ({"ms_per_round": {"draft": 30.0, "verify": 40.0}}, {}, {}, "Drafting takes 30.0 ms"),
    "too_little_data": ({}, {"tokens": (1e5, 3e5, 6e5, 4e6)}, {}, "five times the tokens give tau"),
    "read_too_often": ({"training": {"tokens": 40, "unique_tokens": 5}}, {}, {}, "read 8.0 times"),
    "tau_is_flat": ({}, {"taus": (1.8, 2.0, 2.0, 2.0)}, {}, "The loss still falls"),
    "data_unlike": ({}, {"text": 2.6}, {}, "On training texts tau is 2.60, on held-out prompts 2.00"),
    "unequal_categories": ({"by_category": {"code": {"replayed_tau": 2.8}, "prose": {"replayed_tau": 1.3}}}, {}, {}, "1.30 for prose"),
    "vocabulary_too_small": ({}, {}, {"data": {"covered": 0.9}}, "10.0 % of the supervised tokens"),
    "rate_too_high": ({"ema": {"kept": "average", "plain": 1.8, "average": 2.0}}, {}, {}, "learning rate was still high"),
    "too_few_prompts": ({"replayed_tau_ci": [1.7, 2.3]}, {}, {}, "1.70 .. 2.30 only"),
    "clipped_always": ({}, {"clipped": 1.0}, {}, "100 % of the steps were clipped"),
}  # fmt: skip


def figures(report=None, logged=None, about=None) -> Figures:
    sound = {"tokens": (3.9e6, 3.95e6, 3.98e6, 4e6)}  # too near each other for a law of data
    return Figures({**REPORT, **(report or {})}, log(**{**sound, **(logged or {})}), about or ABOUT)


def test_a_sound_run_needs_no_advice():
    assert advice(figures()) == []


def test_each_rule_has_a_case():
    assert {rule.__name__ for rule in RULES} == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_a_run_that_calls_for_advice_gets_it(name):
    report, logged, about, said = CASES[name]
    (rule,) = [rule for rule in RULES if rule.__name__ == name]
    assert said in (rule(figures(report, logged, about)) or "")
    assert rule(figures()) is None


def test_an_empty_run_is_no_error():
    assert advice(Figures({"temperature": 0.0}, [], {})) == []
