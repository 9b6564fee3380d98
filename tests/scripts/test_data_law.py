"""Tests of the law of data: tau against the tokens read, fitted and continued."""

import json

import pytest

from scripts import data_law
from specdec import checkpoint
from specdec.measuring.report import Report
from train.data.data_law import DataLaw, Point, acceptance, fit, outlook, points_of, tau_of

LAW = DataLaw(level=-4.0, slope=0.25, depth=4, error=0.0)


def points(*tokens: float) -> list[Point]:
    return [Point(num, LAW.tau(num)) for num in tokens]


def test_the_acceptance_that_explains_tau():
    assert tau_of(0.5, 3) == 1 + 0.5 + 0.25 + 0.125
    assert acceptance(1.875, 3) == pytest.approx(0.5)


def test_a_fit_finds_the_law_and_predicts_what_it_has_not_seen():
    law = fit(points(1e5, 2e5, 5e5, 1e6), depth=4)
    assert law is not None and law.slope == pytest.approx(0.25) and law.error < 1e-6
    assert law.tau(1e7) == pytest.approx(LAW.tau(1e7)) and law.tau(1e30) < 5


def test_its_error_is_the_largest_miss():
    wrong = [*points(1e5, 2e5, 5e5), Point(1e6, LAW.tau(1e6) + 0.1)]
    law = fit(wrong, depth=4)
    assert law is not None and law.error == max(abs(law.tau(point.tokens) - point.tau) for point in wrong) > 0.01


@pytest.mark.parametrize("tokens", [(1e5, 1e6, 1e7), (1e6, 2e6, 3e6, 3.9e6), (1e5, 1e5, 1e6, 1e7)])
def test_too_few_points_or_a_narrow_range_say_nothing(tokens):
    assert fit(points(*tokens), depth=4) is None and outlook(points(*tokens), depth=4, unique=None) is None


def test_what_the_trainer_says():
    said = outlook(points(1e5, 3e5, 1e6, 2e6), depth=4, unique=500_000)
    assert said is not None and f"tau {LAW.tau(2e6):.2f} with the 2 M tokens read (each was read 4.0 times" in said
    assert f"{LAW.tau(4e6):.2f} with 2 times as many" in said and f"{LAW.tau(2e7):.2f} with 10 times" in said
    assert "each was read" not in str(outlook(points(1e5, 3e5, 1e6, 2e6), depth=4, unique=2_000_000))


def validation(tokens: int, tau: float, **more) -> dict:
    return {"validation": {"tau": None, "replayed_tau": tau, "training": {"tokens": tokens}}, **more}


def test_points_are_the_validations_of_a_log():
    log = [{"step": 1, "loss": 2.0}, validation(0, 1.1), validation(10, 1.2), validation(20, 1.3, last=True)]
    assert points_of(log) == [Point(10, 1.2)]


def make_run(folder, tokens: int, survival: list[float]) -> str:
    """A run's folder, with what the script reads."""
    report = {
        **Report.from_json(REPORT).to_json(),
        "replayed_tau": LAW.tau(tokens),
        "replayed_survival": survival,
        "training": {"tokens": tokens, "parameters": 2_000_000},
    }
    best = folder / "step_000001"
    best.mkdir(parents=True)
    (folder / "best").write_text("step_000001\n")
    (best / "report.json").write_text(json.dumps(report))
    (best / "drafter.json").write_text(json.dumps({"_target_": "specdec.heads.eagle.Eagle3"}))
    return str(folder)


UNDECODED = (
    "tau",
    "tau_ci",
    "survival",
    "acceptance",
    "tokens_per_second",
    "tokens_per_second_ci",
    "speedup",
    "speedup_ci",
)
REPORT = dict.fromkeys((*UNDECODED, "baseline_tokens_per_second", "ms_per_round")) | {
    "temperature": 0.0,
    "num_prompts": 0,
    "num_rounds": 0,
}


def test_the_script_predicts_the_largest_run_and_draws(tmp_path, run):
    runs = [
        make_run(tmp_path / f"run-{num}", num, [0.5] * 4) for num in (100_000, 200_000, 400_000, 800_000, 3_200_000)
    ]
    printed = run(data_law, f"runs={','.join(runs)}", f"out={tmp_path / 'out'}")
    assert printed.count(f"{LAW.tau(3.2e6):.2f}") == 2  # measured and predicted
    (curve,) = checkpoint.read_json(tmp_path / "out" / "data_law.json")["curves"]
    assert curve["name"] == "Eagle3, 2.0 M parameters" and len(curve["points"]) == 5
    assert curve["law"]["slope"] == pytest.approx(0.25)
    assert (tmp_path / "out" / "data_law.png").read_bytes()[:4] == b"\x89PNG"


def test_the_script_refuses_what_holds_no_run_and_runs_that_do_not_compare(tmp_path, refuse):
    runs = [make_run(tmp_path / f"run-{num}", 100, [0.5] * num) for num in (2, 4)]
    refuse("holds no validated run", data_law, f"runs={tmp_path}", f"out={tmp_path / 'out'}")
    refuse(r"drafts of \[2, 4\] tokens", data_law, f"runs={','.join(runs)}", f"out={tmp_path / 'out'}")


def test_a_run_that_was_continued_counts_the_tokens_of_its_start(tmp_path, run):
    taus = {100_000: LAW.tau(1e5), 200_000: LAW.tau(2e5), 400_000: LAW.tau(4e5), 900_000: 1.0}
    for name, tokens in (("first", 400_000), ("second", 2_800_000)):
        make_run(tmp_path / name, tokens, [0.5] * 4)
    (tmp_path / "first" / "log.jsonl").write_text(
        "".join(json.dumps(validation(*each)) + "\n" for each in taus.items())
    )
    (tmp_path / "second" / "log.jsonl").write_text(json.dumps(validation(2_800_000, LAW.tau(3.2e6))) + "\n")
    (tmp_path / "second" / "config.yaml").write_text(f"start: {tmp_path}/first\n")
    run(data_law, f"runs={tmp_path}/second", f"out={tmp_path / 'out'}")
    (curve,) = checkpoint.read_json(tmp_path / "out" / "data_law.json")["curves"]
    # what the first run did behind its best step did not lead to the second
    assert [point["tokens"] for point in curve["points"]] == [100_000, 200_000, 400_000, 3_200_000]
    assert curve["law"] is None and curve["points"][-1]["tau"] == LAW.tau(3.2e6)
