"""Candidate settings, and the choice among them after they are measured."""

import math
import re

import pytest

from specdec.drafting import Drafting
from specdec.generation import Generation
from specdec.measurement import Prompt, PromptResult
from specdec.report import summarise
from specdec.tuning import Choice, Setting, candidates, name_of

PLAIN = {"draft": 0.0, "verify": 1.0, "keep": 0.0, "other": 0.0}


def test_candidates_are_tried_once_and_no_deeper_than_the_drafter():
    draftings = [Drafting(1), Drafting(3), Drafting(3, 1, 3), Drafting(4, 2, 6), Drafting(3, 2, 5)]
    fitting, left_out = candidates(draftings, 3)
    assert [name_of(drafting) for drafting in fitting] == ["chain of 1", "chain of 3", "tree of 3x2x5"]
    assert left_out == ["tree of 4x2x6"]
    assert len(candidates(draftings, None)[0]) == 4
    stops = Drafting(4, stopping={"threshold": 0.3})
    assert name_of(stops) == "chain of up to 4, stopping below 0.30"


def choose(predicted: dict[int, float], seconds: dict[int, list[float]]) -> Choice:
    """The choice among chains, from predicted speedups and measured seconds of each prompt, both by chain length.

    Rounds give 10 tokens for every prompt, and plain decoding takes 10 seconds for them.
    """
    settings = [Setting(Drafting(depth), tau, PLAIN, PLAIN) for depth, tau in predicted.items()]
    prompt, plain = Prompt("", "", [0]), Generation([[0] * 11], [[0] * 10], seconds=10.0)
    results = {
        name_of(Drafting(depth)): [
            PromptResult(prompt, plain, Generation([[0] * 11], [[1] * 5], seconds=each), math.nan, [], None)
            for each in times
        ]
        for depth, times in seconds.items()
    }
    reports = {name: summarise(rows, depth=1, temperature=1.0) for name, rows in results.items()}
    return Choice.of(settings, results, reports)


@pytest.mark.parametrize(
    ("seconds", "final", "sentence"),
    [
        ({1: [6.0, 6.0], 2: [5.0, 5.0]}, 2, r"^chain of 2 was predicted to be the fastest, and was\.$"),
        ({1: [4.0, 4.0], 2: [5.0, 5.0]}, 1, r"0\.800 \.\. 0\.800 of the fastest .* The fastest measured one is chosen"),
        ({1: [4.0, 5.4], 2: [5.0, 5.0]}, 2, r"within the noise: the predicted one is chosen"),
        (
            {1: [14.0, 14.0], 2: [12.0, 12.0]},
            2,
            r"Plain decoding is faster than chain of 2: .* without this checkpoint",
        ),
    ],
)
def test_the_predicted_setting_is_chosen_unless_another_is_faster_beyond_chance(seconds, final, sentence):
    choice = choose({1: 1.5, 2: 2.0}, seconds)
    assert choice.final.drafting == Drafting(final)
    assert re.search(sentence, choice.explain())
