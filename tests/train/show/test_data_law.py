"""The law of data finds the trend that made its points, counts repeated tokens less, and says little of little."""

import statistics

import pytest

from tests.support.commands import write_rows
from tests.support.runs import log_of
from train.show import data_law
from train.show.display import NEXT_COMMANDS

READS = [1e5, 2e5, 4e5, 8e5]


def make_log(tokens, taus, unique=1e9, *, text_tau=None, margin=0.1):
    """Rows of a log. text_tau: text tau of the last step; margin: half of the intervals of held-out prompts"""
    validations = []
    for num_tokens, tau in zip(tokens, taus):
        training = {"tokens": num_tokens, "unique_tokens": unique}
        interval = [tau - margin, tau + margin]
        validations.append({"validation": {"replayed_tau": tau, "replayed_tau_ci": interval, "training": training}})
    steps = [] if text_tau is None else [{"step": 1, "tau": 9.0}, {"step": 2, "tau": text_tau}]
    return [*steps, *validations]


def make_rising_taus(tokens):
    return [data_law.tau_of(0.2 + 0.05 * n, 4) for n, _ in enumerate(tokens)]


def test_more_new_texts_help_more_than_the_same_again():
    sentence = data_law.describe_data(make_log(READS, make_rising_taus(READS), unique=2e5), depth=4)
    assert "4.0 times the 0.2 M of the data" in sentence and sentence.endswith(data_law.RECORD)
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
    assert data_law.describe_data(make_log(tokens, make_rising_taus(tokens)), depth=4) is None


# Millions of tokens and tau of validations, with 2.15 M tokens of data: MTP of results/34-mtp-4m-tokens-server.md,
# EAGLE-3 of results/33-eagle3-6m-tokens.md
MTP = {
    0.48: 1.651, 0.96: 1.759, 1.44: 1.808, 1.92: 1.896, 2.40: 1.907, 2.88: 1.940, 3.36: 1.972, 3.85: 2.020, 4.33: 2.011,
    4.81: 2.003,
}  # fmt: skip
EAGLE3 = {
    0.23: 1.568, 0.46: 1.660, 0.82: 1.706, 1.36: 1.752, 1.90: 1.765, 2.44: 1.847, 2.99: 1.838, 3.53: 1.874, 4.07: 1.881,
    4.62: 1.886, 5.16: 1.894, 5.71: 1.899, 6.25: 1.889,
}  # fmt: skip


@pytest.mark.parametrize("curve", [MTP, EAGLE3], ids=["mtp", "eagle3"])
def test_the_first_validations_of_recorded_runs_tell_the_later_ones(curve):
    errors, changes = [], []
    points = [data_law.Point(1e6 * read, 2.15e6, tau, tau) for read, tau in curve.items()]
    for num in range(data_law.MIN_POINTS, len(points)):
        law, last = data_law.fit_law(points[:num], depth=4), points[num - 1]
        for point in points[num:]:
            if point.num_read > 1.2 * last.num_read:
                predicted = law.predict_tau(data_law.count_new_tokens(point.num_read, point.num_unique))
                errors.append(abs(predicted - point.tau))
                changes.append(abs(last.tau - point.tau))
    assert max(errors) < 0.06 and statistics.fmean(errors) < 0.026
    assert statistics.fmean(changes) > 2.5 * statistics.fmean(errors)


def test_validations_of_the_warm_up_are_left_out():
    tokens = [*READS, 1.6e6]
    rising = make_rising_taus(tokens)
    late = data_law.describe_data(make_log(tokens, rising), depth=4)
    assert data_law.describe_data(make_log([1e4, 2e4, *tokens], [1.4, 1.41, *rising]), depth=4) == late


def test_reports_of_older_runs_are_left_out():
    rows = make_log(READS, make_rising_taus(READS))
    rows[0]["validation"]["training"] = None
    assert data_law.describe_data([{"loss": 1.0}, *rows], depth=4) is None


# Too little data


def test_too_little_data_are_named_with_what_is_known_of_more():
    sentence = data_law.describe_data(make_log(READS, [1.2, 1.3, 1.4, 1.5], 200_000, text_tau=2.4), depth=2)
    assert sentence == (
        "Too little data, or held-out prompts of another kind: the head drafts its training texts at tau 2.40 and "
        f"held-out prompts at 1.50. It has read 200,000 tokens 4.0 times. {data_law.KNOWN}"
    )


@pytest.mark.parametrize(
    "difference",
    [{"text_tau": 1.7}, {"text_tau": None}, {"margin": 0.75}, {"unique": 6.1e5}],
    ids=["text tau is near", "text tau is not known", "the interval is wide", "texts are new"],
)
def test_enough_data_are_not_called_too_little(difference):
    settings = {"unique": 2e5, "text_tau": 2.2}
    taus = [1.2, 1.3, 1.4, 1.5]
    assert data_law.describe_data(make_log(READS, taus, **settings), depth=2).startswith("Too little data")
    assert data_law.describe_data(make_log(READS, taus, **{**settings, **difference}), depth=2).startswith("More data")


def test_the_last_lines_of_a_run_say_that_its_data_are_too_few(fit, folder, tmp_path, capsys):
    """A head learns one answer by heart."""
    rows = [{"messages": [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "a b c d e f g h"}]}]
    write_rows(tmp_path / "one.jsonl", rows)
    steps = ("train.steps=40", "train.validate_every=10", "optimizer.lr=1e-2")
    losses = "head.objective.losses={ce: 1.0}"
    assert fit("short", "head=eagle3", f"data.train={tmp_path}/one.jsonl", *steps, losses) == 0
    lines = capsys.readouterr().out.splitlines()
    (best,) = [number for number, line in enumerate(lines) if line.startswith("best replayed tau")]
    text_tau = [row["tau"] for row in log_of("short") if "tau" in row][-1]
    assert f"drafts its training texts at tau {text_tau:.2f} and held-out prompts at " in lines[best + 2]
    texts = {"run": "checkpoints/short", "heldout": folder / "prompts.jsonl", "others": " proposers=suffix,auto"}
    assert [line[6:] for line in lines[best + 3 :]] == [command.format(**texts) for command in NEXT_COMMANDS]
    report = (tmp_path / "checkpoints/short/best").read_text().strip()
    assert "Too little data" in (tmp_path / "checkpoints/short" / report / "report.html").read_text()
