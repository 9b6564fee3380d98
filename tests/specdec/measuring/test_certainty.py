"""Tests of verdicts: what is certain, what is not, and how many answers would tell."""

import json
import math
import shutil
import subprocess

import pytest

from specdec.measuring.certainty import Gain, rate_gains
from specdec.measuring.page import FOLDER

FAST, SLOW = Gain("fast", 1.5, (1.4, 1.6), 12), Gain("slow", 0.8, (0.7, 0.9), 12)
FEW = Gain("few", 1.5, (1.45, 1.55), 2)
NEAR = Gain("near", 1.45, (1.35, 1.55), 12)
BOTH = Gain("both", 1.2, (0.95, 1.5), 12)
LEVEL = Gain("level", 1.05, (1.049, 1.06), 12)
HEAD = "times as fast as plain decoding"


@pytest.mark.parametrize(
    ("gains", "choosing", "answer", "sentence"),
    [
        ([FAST], True, "yes", f"Yes: 1.50 {HEAD} (1.40 .. 1.60) with fast, on 12 prompts."),
        ([SLOW], True, "no", f"No: 0.80 {HEAD} (0.70 .. 0.90) with slow, on 12 prompts."),
        ([SLOW, FAST], True, "yes", f"Yes: 1.50 {HEAD} (1.40 .. 1.60) with fast, on 12 prompts."),
        (
            [FEW, SLOW],
            True,
            "unsure",
            f"Not sure: 1.50 {HEAD} (1.45 .. 1.55) with few, on 2 prompts. At least 8 prompts would tell (limit=).",
        ),
        (
            [BOTH],
            False,
            "unsure",
            f"Not sure: 1.20 {HEAD} (0.95 .. 1.50) with both, on 12 prompts. About 36 prompts would tell (limit=).",
        ),
        (
            [LEVEL],
            False,
            "unsure",
            f"Not sure: 1.05 {HEAD} (1.05 .. 1.06) with level, on 12 prompts. "
            "Even 1,000 prompts may not tell (limit=).",
        ),
        (
            [FAST, NEAR],
            True,
            "unsure",
            f"Not sure: 1.50 {HEAD} (1.40 .. 1.60) with fast, on 12 prompts; whether near is slower is not sure "
            "(1.45 times). About 97 prompts would tell (limit=).",
        ),
        (
            [NEAR, FAST],
            False,
            "yes",
            f"Yes: 1.50 {HEAD} (1.40 .. 1.60) with fast, on 12 prompts; whether near is slower is not sure "
            "(1.45 times). About 97 prompts would tell (limit=).",
        ),
    ],
)
def test_a_verdict_says_whether_it_is_certain(gains, choosing, answer, sentence):
    assert rate_gains(gains, unit="prompts", remedy="limit=", choosing=choosing) == (answer, sentence)


def test_the_answers_that_would_tell_are_those_whose_interval_ends_at_the_bound():
    """Errors fall with the root of the answers."""
    half = math.log(1.5 / 0.95) / 2
    assert half * math.sqrt(12 / 36) == pytest.approx(math.log(1.2 / 1.05), rel=0.02)
    alone = rate_gains([Gain("a", 1.5, (1.5, 1.5), 1)], unit="prompts", remedy="limit=")
    assert alone[0] == "unsure" and ", on 1 prompt. At least 8 prompts would tell" in alone[1]
    unknown = Gain("a", 1.5, (math.nan, math.nan), 12)
    answer, sentence = rate_gains([unknown], unit="prompts", remedy="limit=")
    assert answer == "unsure"
    assert sentence == f"Not sure: 1.50 {HEAD} with a, on 12 prompts. More prompts would tell (limit=)."


@pytest.mark.skipif(shutil.which("node") is None, reason="the script of the server's page runs in node")
def test_the_gain_of_a_session_is_certain_only_with_its_interval_on_one_side():
    """Against intervals by hand: Student's t over the logarithms of the prompts."""
    sessions = [
        [],
        [("a", 1.2), ("a", 1.3)],
        [("a", 1.2), ("b", 1.3)],
        [("a", 1.2), ("b", 1.3), ("c", 1.25)],
        [("a", 1.2), ("b", 1.3), ("c", 1.1), ("c", 1.42)],
        [("a", 0.8), ("b", 0.82), ("c", 0.81)],
        [("a", 0.5), ("b", 2.0), ("c", 1.01)],
    ]
    answers = []
    for session in sessions:
        answers.append([{"prompt": prompt, "speedup": speedup} for prompt, speedup in session])
    program = f"{(FOLDER / 'gain.js').read_text()}console.log(JSON.stringify({json.dumps(answers)}.map(describeGain)))"
    verdicts = json.loads(subprocess.run(["node", "-e", program], capture_output=True, text=True, check=True).stdout)
    assert verdicts == [
        ["unsure", ""],
        ["unsure", "Not sure yet whether drafts pay: 1 of at least 3 prompts."],
        ["unsure", "Not sure yet whether drafts pay: 2 of at least 3 prompts."],
        ["yes", "Certain: with drafts 1.25 times as fast (1.13 .. 1.38) over 3 prompts of this session."],
        ["yes", "Certain: with drafts 1.25 times as fast (1.13 .. 1.38) over 3 prompts of this session."],
        ["no", "Certain: with drafts 0.81 times as fast (0.79 .. 0.84) over 3 prompts of this session."],
        [
            "unsure",
            "Not sure yet: with drafts 1.00 times as fast (0.18 .. 5.61) over 3 prompts of this session. "
            "More than 100 prompts would tell.",
        ],
    ]
