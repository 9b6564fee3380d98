"""The law of data finds the trend that made its points, counts repeated tokens less, and says little of little."""

import pytest

from train.show import data_law


def make_log(tokens, taus, unique=1e9):
    training = [{"tokens": num_tokens, "unique_tokens": unique} for num_tokens in tokens]
    return [
        {"validation": {"replayed_tau": tau, "training": training_of_report}}
        for tau, training_of_report in zip(taus, training)
    ]


def make_rising_taus(tokens):
    return [data_law.tau_of(0.2 + 0.05 * n, 4) for n, _ in enumerate(tokens)]


def test_more_new_texts_help_more_than_the_same_again():
    tokens = [1e5, 2e5, 4e5, 8e5]
    sentence = data_law.describe_more_data(make_log(tokens, make_rising_taus(tokens), unique=2e5), depth=4)
    assert "4.0 times the 0.2 M of the data" in sentence and "more likely too high" in sentence
    gains = [float(part.split()[0]) for part in sentence.replace("+", " +").split(" +")[1:]]
    assert len(gains) == 4 and gains[0] > gains[1] > 0 and gains[2] > gains[3] and gains[2] > gains[0]


def test_tokens_that_are_read_once_count_whole():
    assert data_law.count_new_tokens(5e5, 1e6) == 5e5 and data_law.count_new_tokens(1e6, 1e6) == 1e6
    assert 1.9e6 < data_law.count_new_tokens(2e6, 1e6) < 2e6 and data_law.count_new_tokens(1e9, 1e6) == pytest.approx(
        16.4e6
    )


def test_a_rate_explains_its_tau():
    assert data_law.rate_of(data_law.tau_of(0.37, 4), 4) == pytest.approx(0.37)


@pytest.mark.parametrize("tokens", [[1e5, 2e5, 4e5], [1e5, 1.1e5, 1.2e5, 1.3e5], []])
def test_too_little_is_known(tokens):
    assert data_law.describe_more_data(make_log(tokens, make_rising_taus(tokens)), depth=4) is None


def test_reports_of_older_runs_are_left_out():
    rows = make_log([1e5, 2e5, 4e5, 8e5], make_rising_taus(range(4)))
    rows[0]["validation"]["training"] = None
    assert data_law.describe_more_data([{"loss": 1.0}, *rows], depth=4) is None
