"""The inspection of auto: calibration, predictions from costs, verdicts, and the choices of single rounds."""

import math
import random
import re

import pytest
import torch

from specdec.core.generation import Generation
from specdec.core.sampling import Sampling
from specdec.core.tree import TreeShape
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.measuring.measurement import Prompt, PromptResult
from specdec.measuring.report import summarise
from specdec.measuring.tuning import (
    RecordedAcceptance,
    Way,
    candidates,
    name_of,
    pass_seconds,
    predict,
    step_seconds,
    timed_rounds,
    verdict,
)
from specdec.proposers.auto import Auto
from specdec.proposers.candidates import Acceptance, Kind
from specdec.proposers.costs import Costs, told
from specdec.proposers.heads import HeadProposer
from tests.support import chain_of, make_drafter, prompts_of


def test_candidates_are_tried_once_and_no_deeper_than_the_drafter():
    draftings = [Drafting(1), Drafting(3), Drafting(3, 1, 3), Drafting(4, 2, 6), Drafting(3, 2, 5)]
    fitting, left_out = candidates(draftings, 3)
    assert [name_of(drafting) for drafting in fitting] == ["chain of 1", "chain of 3", "tree of 3x2x5"]
    assert left_out == ["tree of 4x2x6"]
    assert len(candidates(draftings, None)[0]) == 4
    stops = Drafting(4, stopping={"threshold": 0.3})
    assert name_of(stops) == "chain of up to 4, stopping below 0.30"


# Acceptance


def test_calibration_counts_what_was_stated_and_what_came():
    recorded, known = RecordedAcceptance(), Acceptance()
    cases = [(0.15, 1, True), (0.15, 1, False), (0.25, 1, False), (0.35, 1, True), (0.25, 2, True), (0.25, 9, False)]
    expected = []
    for estimate, depth, accepted in cases:
        kind = Kind("head", estimate, depth)
        expected.append(known.probability(kind))
        for chances in (recorded, known):
            chances.learn(kind, accepted)
    assert [chance for _, chance, _ in recorded.cases] == expected  # what was believed before it was known
    assert recorded.probability(Kind("head", 0.2, 1)) == known.probability(Kind("head", 0.2, 1))
    first, *_, last = recorded.calibration((0.1, 0.3))
    assert (first.source, first.depth, first.low, first.high, first.num) == ("head", 1, 0.1, 0.3, 3)
    assert first.stated == pytest.approx(0.55 / 3) and first.accepted == pytest.approx(1 / 3)
    assert first.corrected == pytest.approx(sum(expected[:3]) / 3)
    assert (last.depth, last.num, last.accepted) == (4, 1, 0.0)  # and deeper
    assert [(each.depth, each.num) for each in recorded.calibration((0.1, 0.3), by_depth=False)] == [(0, 5), (0, 1)]


def test_a_drafter_that_overstates_is_seen_and_corrected():
    random.seed(0)
    recorded = RecordedAcceptance()
    for _ in range(600):
        recorded.learn(Kind("head", 0.8, 1), random.random() < 0.4)
    (cell,) = recorded.calibration()
    assert cell.stated == pytest.approx(0.8) and abs(cell.accepted - 0.4) < 0.06
    assert abs(cell.corrected - cell.accepted) < 0.05


# Costs


def test_passes_between_and_beyond_known_sizes():
    curve = {1: 1.0, 2: 1.5, 6: 3.5}
    assert [pass_seconds(curve, num) for num in (1, 2, 4, 6, 8)] == pytest.approx([1.0, 1.5, 2.5, 3.5, 4.5])
    assert pass_seconds({1: 2.0}, 5) == 2.0


@pytest.mark.parametrize(
    ("alpha", "cost", "best", "speedup"),
    [(0.7, 0.05, 6, 2.35), (0.8, 0.05, 8, 3.09), (0.9, 0.05, 13, 4.67), (0.7, 0.1, 4, 1.98), (0.9, 0.1, 10, 3.43)],
)
def test_predictions_equal_those_of_the_literature(alpha, cost, best, speedup):
    """Leviathan et al. (2211.17192), equal to the table of docs/methods.md, section 8."""
    steps = {"absorb": cost, "step": cost}
    speedups = {
        num: predict(sum(alpha**d for d in range(num + 1)), {1: 1.0, 32: 1.0}, steps, TreeShape(num, 1, num))
        for num in range(1, 20)
    }
    assert max(speedups, key=speedups.get) == best and speedups[best] == pytest.approx(speedup, abs=0.005)


def test_a_shape_whose_steps_were_never_timed_is_not_predicted():
    assert predict(2.0, {1: 1.0}, {}, TreeShape(1, 1, 1)) is None
    assert predict(2.0, {1: 1.0}, {"absorb": 1.0}, TreeShape(2, 1, 2)) is None
    assert predict(2.0, {1: 1.0}, {"absorb": 1.0}, TreeShape(1, 1, 1)) == 1.0


# Verdicts


def ways(seconds: dict[str, list[float]]) -> list[Way]:
    """Rounds give 10 tokens for every prompt, and plain decoding takes 10 seconds for them. seconds: by way and prompt"""
    prompt, plain = Prompt("", "", [0]), Generation([[0] * 11], [[0] * 10], seconds=10.0)
    found = []
    for name, times in seconds.items():
        results = [
            PromptResult(prompt, plain, Generation([[0] * 11], [[1] * 5], seconds=each), math.nan, [], None)
            for each in times
        ]
        found.append(Way(name, None, None, summarise(results, depth=1, temperature=1.0), results))
    return found


@pytest.mark.parametrize(
    ("seconds", "sentence"),
    [
        ({"auto": [4.0, 4.0], "chain of 1": [5.0, 5.0]}, r"^The fastest way was auto\.$"),
        (
            {"auto": [5.0, 5.0], "chain of 1": [4.0, 4.0]},
            r"fastest way was chain of 1\. The speed of auto was 0\.800 of it \(0\.800 \.\. 0\.800, 95 %\)\.$",
        ),
        ({"auto": [14.0, 14.0]}, r"Plain decoding is faster than auto: .* without this checkpoint\.$"),
    ],
)
def test_the_verdict_names_the_fastest_way_and_where_auto_is(seconds, sentence):
    assert re.search(sentence, verdict(ways(seconds)))


# Single rounds


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_choices_of_rounds_say_who_drafted_what(small_target, temperature):
    head = HeadProposer(make_drafter(small_target, "eagle"), chain_of(3))
    costs = told({1: 1.0, 2: 1.1, 3: 1.2, 6: 1.5, 12: 2.0}, plain=1.0, absorb=0.01, step=0.01)
    auto = Auto.usual(small_target, head, costs=costs)
    decoder = Decoder(small_target, auto, sampling=Sampling(temperature), stop=set())
    generator = torch.Generator(small_target.device).manual_seed(0)
    rounds = [each for prompt in prompts_of(small_target) for each in timed_rounds(decoder, prompt, 30, generator)]
    choices = [each.choice for each in rounds]
    assert choices == list(auto.account.choices) and len(choices) == auto.account.rounds
    assert sum(choice.head for choice in choices) == auto.account.head
    assert sum(choice.trial for choice in choices) == auto.account.trials
    for each in rounds:
        drafts = sum(each.choice.sources.values())
        assert each.accepted <= drafts <= each.choice.size - 1 and each.seconds > 0
        assert each.choice.head or not each.choice.sources.keys() & {"head", "drawn", "both"}
    sources = sum((choice.sources for choice in choices), choices[0].sources.copy()).keys()
    assert {"Suffix", "head" if temperature == 0 else "drawn"} <= sources
    assert step_seconds(auto, 1) == {"absorb": 0.01, "step": 0.01}


def test_the_prediction_of_a_batch_is_that_of_its_rows_as_they_were(small_target):
    """A pass takes the same for five rows as for one. Rows end, and the last prompt is decoded alone: against plain decoding
    of as many rows, drafts gain no more than they do in one row."""
    head = HeadProposer(make_drafter(small_target, "eagle"), chain_of(3))
    curve = {1: 1.0, 2: 1.1, 4: 1.2}
    costs = Costs({1: curve, 5: curve}, sizes=curve, steps={"absorb": 0.0, "step": 0.0})
    auto = Auto(small_target, members=[head], costs=costs)
    decoder = Decoder(small_target, auto, sampling=Sampling(), stop={1})
    for prompts in (prompts_of(small_target), prompts_of(small_target)[4:]):
        decoder.generate(prompts, 40)
    account = auto.account
    assert auto.num_rows == 1
    assert 1 / 1.2 < auto.predicted() < 3 and account.expected / account.seconds > 1.2 * auto.predicted()
