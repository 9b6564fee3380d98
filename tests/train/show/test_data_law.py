"""The law of data finds the trend that made its points, counts repeated tokens less, and says little of little."""

import re

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
    assert data_law.describe_data(make_log(tokens, make_rising_taus(tokens)), depth=4) is None


def test_reports_of_older_runs_are_left_out():
    rows = make_log(READS, make_rising_taus(READS))
    rows[0]["validation"]["training"] = None
    assert data_law.describe_data([{"loss": 1.0}, *rows], depth=4) is None


# Too little data


def test_too_little_data_are_named_with_the_tokens_that_a_larger_tau_needs():
    """The points lie on a line: a rate of 1/2 after 1.6 M tokens, and odds that double with four times the tokens."""
    counts = [data_law.count_new_tokens(num, 2e5) for num in READS]
    odds = [(count / 1.6e6) ** 0.5 for count in counts]
    taus = [data_law.tau_of(odd / (1 + odd), 2) for odd in odds]
    assert 1.4 < taus[-1] < 1.65 and data_law.tau_of(0.5, 2) == 1.75
    sentence = data_law.describe_data(make_log(READS, taus, 200_000, text_tau=2.4), depth=2)
    assert sentence.startswith(
        "Too little data, or held-out prompts of another kind: the head drafts its training texts at tau 2.40 and "
        f"held-out prompts at {taus[-1]:.2f}. It has read 200,000 tokens 4.0 times. By the law of its 4 validations, a "
        "tau of 2.0 needs about "
    )
    rate = data_law.rate_of(2.0, 2)
    needed = 1.6e6 * (rate / (1 - rate)) ** 2
    stated = float(re.search(r"about ([\d,]+) different tokens or more", sentence)[1].replace(",", ""))
    assert stated == pytest.approx(needed, rel=0.2) and stated % 1e6 == 0


@pytest.mark.parametrize(
    ("tokens", "taus"), [([1e5, 8e5], [1.2, 1.4]), (READS, [1.42, 1.41, 1.4, 1.4]), (READS, [1.4, 1.4, 1.4, 1.401])]
)
def test_where_no_law_fits_the_sentence_says_what_is_known(tokens, taus):
    sentence = data_law.describe_data(make_log(tokens, taus, 200_000, text_tau=2.4), depth=2)
    assert sentence.startswith("Too little data") and sentence.endswith(
        f"cannot tell how many a larger tau needs. {data_law.KNOWN}"
    )
    assert "law" not in sentence


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
