"""Tests of acceptance lengths as publications count them, against figures computed by hand."""

import math

import pytest

from specdec.core.generation import Generation
from specdec.measuring.counting import SPECDEC, AnswerCounts, Counting
from specdec.measuring.measure import PromptResult
from specdec.text.conversations import Prompt
from specdec.tools.suites import suites

STOP = 9
# (question, accepted drafts of each round, whether the answer ends with a stop token); tokens: 1 + sum(a + 1)
ANSWERS = [
    ("1", [2, 0, 1], True),
    ("1", [3], False),
    ("2", [0, 0, 0, 0], True),  # the last round emits nothing but the end
    ("3", [4, 4], False),
    ("4", [], False),  # the prompt's own token alone
]
ROUNDS, EMITTED = 3 + 1 + 4 + 2, (3 + 3) + (3 + 1) + 4 + (8 + 2)


@pytest.fixture
def counts() -> list[AnswerCounts]:
    counts = []
    for number, (question, accepted, has_end) in enumerate(ANSWERS):
        tokens = [1] * (sum(accepted) + len(accepted)) + [STOP if has_end else 1]
        generation = Generation([tokens], [accepted])
        prompt = Prompt(f"{question} turn {number}", "a", [5], question=question)
        result = PromptResult(prompt, generation, generation, math.nan, [], None)
        counts.append(AnswerCounts.from_result(result, {STOP}))
    return counts


@pytest.mark.parametrize(
    ("counting", "expected"),
    [
        (Counting(), EMITTED / ROUNDS),
        (Counting(bonus=False), (EMITTED - ROUNDS) / ROUNDS),
        (Counting(first="token"), (EMITTED + 5) / ROUNDS),
        (Counting(first="round"), (EMITTED + 5) / (ROUNDS + 5)),
        (Counting(mean="answers"), (6 / 3 + 4 / 1 + 4 / 4 + 10 / 2) / 4),
        (Counting(mean="questions"), (10 / 4 + 4 / 4 + 10 / 2) / 3),
        # without tokens that end answers: one less of two answers, and a round less of the one that ends with it alone
        (Counting(end=False), (EMITTED - 2) / (ROUNDS - 1)),
        (Counting(mean="questions", first="round", end=False), ((9 + 2) / 6 + (3 + 1) / 4 + 11 / 3 + 1) / 4),
    ],
    ids=str,
)
def test_each_way_of_counting(counts, counting, expected):
    assert counting.compute_length(counts) == pytest.approx(expected)


def test_protocols_count_as_published(counts):
    """The formulas of the publications' own code, written out here."""
    lengths = {
        name: suites.read_protocol(name).counting.compute_length(counts) for name in suites.list_names("protocol")
    }
    assert lengths["deepspec"] == lengths["specbench"] == lengths["eagle"] == pytest.approx(EMITTED / ROUNDS)
    # completion tokens over verifications
    assert lengths["specforge"] == pytest.approx((EMITTED + len(ANSWERS)) / ROUNDS)
    assert lengths["dflash2"] == pytest.approx((2 + 4 + 1 + 5) / 4)
    # streamed chunks of all turns of a question, [1, a + 1, ..], without the end: their mean
    chunks = {"1": [1, 3, 1, 1, 1, 4], "2": [1, 1, 1, 1], "3": [1, 5, 5], "4": [1]}
    means = [sum(chunks_of_question) / len(chunks_of_question) for chunks_of_question in chunks.values()]
    assert lengths["speedbench"] == pytest.approx(sum(means) / 4)


def test_unknown_ways_are_refused_and_nothing_is_nan(counts):
    with pytest.raises(ValueError, match="first=some, mean=rounds: give one of out, token, round, and one of rounds"):
        Counting(first="some")
    assert math.isnan(SPECDEC.compute_length([answer for answer in counts if not answer.rounds]))
    assert "left out here" in str(Counting(behind_end=True)) and "not counted" in str(Counting(end=False))
