"""Tests of an adaptation's split, samples and decisions, without a model."""

import dataclasses
import json
import re

import pytest

from specdec.measuring.report import PromptCounts
from train.adapt import RecordedAnswer, TooFew, TrafficSource, draw_old, split_newest, to_lines
from train.adapt_folder import AdaptationPlan, Home
from train.adapt_judging import (
    ENOUGH,
    JUDGED,
    TauChange,
    choose_judged,
    decide,
)

WANTED = TrafficSource("abc", "models/t", "1234")


def answer(n: int, *, conversation: str | None = None, prompt=None) -> RecordedAnswer:
    return RecordedAnswer(prompt or [1, n], [5] * 10, 0.0, f"r{n}", conversation or f"c{n}", float(n))


def test_the_newest_conversations_are_held_out_whole():
    answers = [answer(n) for n in range(8)] + [answer(8, conversation="c0"), answer(9, conversation="c9")]
    training, heldout = split_newest(answers, 0.2)
    assert {each.conversation for each in heldout} == {"c0", "c9"}  # c0 began first, and went on until the end
    assert {each.conversation for each in training} == {f"c{n}" for n in range(1, 8)}
    assert len(training) + len(heldout) == len(answers)


def test_prompts_that_are_held_out_are_not_trained_on():
    answers = [answer(n, prompt=[7, 7] if n in (2, 9) else None) for n in range(10)]
    training, heldout = split_newest(answers, 0.2)
    assert [each.id for each in heldout] == ["r8", "r9"] and "r2" not in [each.id for each in training]
    with pytest.raises(TooFew, match="leave nothing to train on"):
        split_newest([dataclasses.replace(each, prompt=[1]) for each in answers], 0.2)


def test_old_rows_are_drawn_in_the_same_order_whatever_is_added(small_tokenizer):
    rows = [{"id": f"o{n}", "category": "a", "prompt": f"Say {n}.", "completion": "one two three"} for n in range(40)]
    drawn = [each.id for each in draw_old(rows, small_tokenizer)]
    assert sorted(drawn) == sorted(row["id"] for row in rows) and drawn != [row["id"] for row in rows]
    more = [each.id for each in draw_old([*rows, {**rows[0], "id": "new"}], small_tokenizer)]
    assert [name for name in more if name != "new"] == drawn


@pytest.fixture
def small_tokenizer():
    from tests.support import small_tokenizer

    return small_tokenizer()


def test_lines_are_read_back():
    row = answer(3)
    (line,) = to_lines([row], "abc").encode().splitlines(keepends=True)
    assert WANTED.parse(json.loads(line), place="x:1") == row
    for more, good in (
        ({"target": "elsewhere/t"}, True),
        ({"target": "u"}, False),
        ({"target": "u", "target_fingerprint": "1234"}, True),
        ({"target": "t", "target_fingerprint": "99"}, False),
        ({"target": "t", "target_fingerprint": "99-int8"}, True),
    ):
        found = WANTED.parse({**json.loads(line), **more}, place="x:1")
        assert (found == "of another target or tokenizer") is not good
    assert WANTED.parse({"tokens": 1}, place="x:1") == "without token ids or a time"


def test_what_is_judged_is_spread_and_fits():
    answers = [answer(n, prompt=[1] * (90 if n == 0 else 5)) for n in range(1 + 4 * JUDGED)]
    assert [each.id for each in choose_judged(answers, 50)] == [f"r{n}" for n in range(1, 1 + 4 * JUDGED, 4)]
    assert len(choose_judged(answers[:21], 50)) == 20


def change(before: float, after: float, num: int = ENOUGH) -> TauChange:
    """Of `num` conversations with these tau."""
    counts = lambda tau: [PromptCounts(10.0, 10 * tau)] * num
    return TauChange.of([answer(n) for n in range(num)], counts(before), counts(after))


def test_a_change_is_over_conversations():
    found = change(1.5, 1.8)
    assert (found.conversations, found.answers, found.tokens) == (ENOUGH, ENOUGH, 10 * ENOUGH)
    assert (found.before, found.after, found.change) == pytest.approx((1.5, 1.8, 0.3))
    assert found.change_ci == pytest.approx([0.3, 0.3])
    counts = [PromptCounts(1.0, 2.0)] * 6
    found = TauChange.of([answer(n, conversation="one") for n in range(6)], counts, counts)
    assert found.conversations == 1 and found.answers == 6 and TauChange.of([], [], []) is None


@pytest.mark.parametrize(
    ("new", "old", "taken", "said"),
    [
        (change(1.5, 1.8), change(2.0, 2.0), True, "old answers fall by no more than 3%"),
        (change(1.5, 1.8), change(2.0, 1.98), True, "old answers fall by no more than 3%"),
        (change(1.5, 1.5), change(2.0, 2.0), False, "not surely a rise"),
        (change(1.5, 1.4), change(2.0, 2.0), False, "not surely a rise"),
        (change(1.5, 1.8), change(2.0, 1.9), False, r"old answers falls by 5.0%, .* more than 3% \(tolerance=0.03\)"),
        (change(1.5, 1.8), None, True, "and there are no old answers"),
        (change(1.5, 1.8, ENOUGH - 1), change(2.0, 2.0), False, "7 held-out conversations are too few to judge"),
    ],
)
def test_the_gate(new, old, taken, said):
    decision, reasons = decide(new, old, tolerance=0.03)
    assert decision is taken and re.search(said, " ".join(reasons))


def test_numbers_go_on_beside_what_a_kill_left(tmp_path):
    for name in ("heads/0001", "adaptations"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("0002.json", "0003.json.partial"):
        (tmp_path / "adaptations" / name).write_text("")
    assert Home(tmp_path).next_number() == "0003"


def test_texts_of_users_are_for_their_owner_alone(tmp_path):
    home = Home(tmp_path)
    plan = AdaptationPlan(
        "0002", "heads/0001", [answer(1)], 1, {"new": [answer(2)], "old": [], "validation": [answer(3)]}, {}
    )
    home.save_plan(plan, "abc")
    earlier = json.loads((tmp_path / "training" / "plan.json").read_text()) | {"before": {"mix": []}}
    (tmp_path / "training" / "plan.json").write_text(json.dumps(earlier))  # as earlier versions wrote it
    assert home.read_plan() == plan
    with pytest.raises(ValueError, match="drafter"):
        home.decide(plan, tmp_path / "none", {"decision": "accepted"}, "abc")  # the rows are written first
    for name in ("training", "rows", "rows/0002"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700, name
    assert (tmp_path / "rows" / "0002" / "trained.jsonl").exists()
