"""Tests of the law of data: tau against the tokens read, fitted and continued."""

import pytest

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
