"""The chain that pays for an export, and the interval of a ratio of rates."""

from dataclasses import replace

from specdec.measuring import speed
from specdec.measuring.report import Report


def stages(draft: float, verify: float, other_ms: float = 0.0) -> dict[str, float]:
    return {"draft": draft, "verify": verify, "keep": other_ms, "other": 0.0}


def test_the_best_chain_of_a_mixture_follows_its_experts():
    """One of two experts for each token: passes over 1, 2, 3 tokens use 1, 1.5, 1.75 experts.

    Of the 0.75 that three tokens add, the first draft costs two thirds. With survival .7, .5 and verification of 1 (plain)
    and 1.9 (two drafts), a chain of one emits 1.7 in 1.45 if drafts cost alike (2.2 in 1.9 for two), and in 1.6 here.
    """
    survival = [0.7, 0.5]
    report = reported(survival, verify=1.9e3, baseline=1.0)
    assert 1.7 / 1.45 > 2.2 / 1.9 > 1.7 / 1.6
    assert speed.choose_chain(report) == 1 and speed.choose_chain(replace(report, experts=[2, 1])) == 2


def reported(survival: list[float], *, verify: float, baseline: float) -> Report:
    """verify: ms of the target's pass; baseline: tokens/s"""
    figures = {"temperature": 0.0, "num_prompts": 1, "num_rounds": 1, "tau": 1.0, "tau_ci": [1.0, 1.0],
               "survival": survival, "acceptance": survival, "tokens_per_second": 1.0, "tokens_per_second_ci": [1.0, 1.0],
               "speedup": 1.0, "speedup_ci": [1.0, 1.0]}  # fmt: skip
    return Report(**figures, baseline_tokens_per_second=baseline, ms_per_round=stages(0.0, verify))


def test_reports_keep_the_numbers_of_experts_and_older_ones_load():
    report = reported([0.5], verify=1.0, baseline=1.0)
    assert "experts" not in report.to_json() and Report.from_json(report.to_json()) == report
    mixture = replace(report, experts=[8, 2])
    assert Report.from_json(mixture.to_json()) == mixture
