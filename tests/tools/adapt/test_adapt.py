"""Tests of an adaptation's split, samples and decisions, without a model."""

import dataclasses
import json
import re

import pytest

from specdec.measuring.report import PromptCounts
from specdec.target.fingerprint import Fingerprint
from specdec.tools.adapt.answers import (
    RecordedAnswer,
    TooFewAnswers,
    TrafficSource,
    draw_old_answers,
    read_written,
    split_newest,
    to_lines,
)
from specdec.tools.adapt.folder import AdaptationFolder, AdaptationPlan
from specdec.tools.adapt.judging import (
    MAX_ANSWERS,
    MIN_CONVERSATIONS,
    TauChange,
    compare_groups,
    count_repeats,
    decide_acceptance,
    find_groups,
    make_groups_table,
    predict_gain,
    sample_answers,
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
    with pytest.raises(TooFewAnswers, match="leave nothing to train on"):
        split_newest([dataclasses.replace(each, prompt=[1]) for each in answers], 0.2)


def test_old_rows_are_drawn_in_the_same_order_whatever_is_added(small_tokenizer):
    rows = [{"id": f"o{n}", "category": "a", "prompt": f"Say {n}.", "completion": "one two three"} for n in range(40)]
    drawn = [each.id for each in draw_old_answers(rows, small_tokenizer)]
    assert sorted(drawn) == sorted(row["id"] for row in rows) and drawn != [row["id"] for row in rows]
    more = [each.id for each in draw_old_answers([*rows, {**rows[0], "id": "new"}], small_tokenizer)]
    assert [name for name in more if name != "new"] == drawn


@pytest.fixture
def small_tokenizer():
    from tests.support import small_tokenizer

    return small_tokenizer()


def test_lines_are_read_back():
    row = answer(3)
    (line,) = to_lines([row], "abc").encode().splitlines(keepends=True)
    assert WANTED.parse_row(json.loads(line), location="x:1") == row
    for changes, good in (
        ({"target": "elsewhere/t"}, True),
        ({"target": "u"}, False),
        ({"target": "u", "target_fingerprint": "1234"}, True),
        ({"target": "t", "target_fingerprint": "99"}, False),
        ({"target": "t", "target_fingerprint": "99-int8"}, False),
        ({"target": "t", "target_fingerprint": "99-gguf-q8_0"}, True),
    ):
        parsed = WANTED.parse_row({**json.loads(line), **changes}, location="x:1")
        assert (parsed == "of another target or tokenizer") is not good
    assert WANTED.parse_row({"tokens": 1}, location="x:1") == "without token ids or a time"


@pytest.mark.parametrize("expected", ["v2.abc", "1234"])
def test_rows_of_an_earlier_version_are_told_by_the_targets_files(expected):
    """As many times as there are forms: the files are read only where both differ."""
    read = lambda: Fingerprint(lambda: "v2.abc", lambda: "1234")
    source = TrafficSource("abc", "models/t", expected, read)
    wrote = {
        stored: source.accepts_writer({"target": "t", "target_fingerprint": stored})
        for stored in ("v2.abc", "1234", "v2.99", "99")
    }
    assert [stored for stored, good in wrote.items() if good] == ["v2.abc", "1234"]
    unread = dataclasses.replace(
        source, read_fingerprint=lambda: Fingerprint(lambda: "v2.abc", lambda: "9-layers-unread")
    )
    assert unread.accepts_writer({"target": "t", "target_fingerprint": "99"}) == (
        expected == "v2.abc"
    )  # by the name, where it is not known
    silent = dataclasses.replace(source, read_fingerprint=lambda: pytest.fail("read without need"))
    assert silent.accepts_writer({"target_fingerprint": expected}) and silent.accepts_writer({"target": "t"})


def test_what_is_judged_is_spread_and_fits():
    answers = [answer(n, prompt=[1] * (90 if n == 0 else 5)) for n in range(1 + 4 * MAX_ANSWERS)]
    assert [each.id for each in sample_answers(answers, 50)] == [f"r{n}" for n in range(1, 1 + 4 * MAX_ANSWERS, 4)]
    assert len(sample_answers(answers[:21], 50)) == 20


def test_answers_of_one_launch_are_equally_new(tmp_path):
    """The target answers by temperature and length, so the order of the lines says nothing."""
    row = {"tokens": [1, 2, 3, 4], "prompt_tokens": 2, "tokenizer": "abc", "category": "a", "temperature": 1}
    lines = [{**row, "id": f"p{n % 4}@{n // 4}", "thinking": n % 2 == 0} for n in range(8)]
    lines += [{**row, "id": "p9@0", "tokens": [1, 2, 3]}, {**row, "id": "p7@0"}]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    answers, _ = read_written(tmp_path / "answers.jsonl", WANTED, [6.0])
    assert [recorded.time for recorded in answers] == [6.0] * 6 + [10.0] * 3  # an empty answer is left out
    assert [recorded.conversation for recorded in answers[:5]] == ["p0", "p1", "p2", "p3", "p0"]
    assert (answers[0].category, answers[0].temperature, answers[0].arguments, answers[1].arguments) == (
        "a",
        1.0,
        {"enable_thinking": True},
        {"enable_thinking": False},
    )
    drawn = [answer(n, conversation=f"c{n}") for n in range(100)]
    held = split_newest([dataclasses.replace(each, time=1.0) for each in drawn], 0.2)[1]
    assert len(held) == 20 and {each.id for each in held} != {f"r{n}" for n in range(80, 100)}


ON, OFF = "template.enable_thinking=true", "template.enable_thinking=false"


def test_groups_are_of_enough_conversations():
    kind = lambda n: {"category": "ab"[n > 9] if n < 20 else f"z{n}", "temperature": float(n % 2)}
    answers = [dataclasses.replace(answer(n), **kind(n)) for n in range(24)]
    groups = find_groups(answers)
    sizes = {name: len(places) for name, places in groups.items()}
    wanted = {"all": 24, "category a": 10, "category b": 10, "other category": 4}
    assert sizes == wanted | {"temperature 0": 12, "temperature 1": 12}  # no thinking mode is known
    assert [answers[place].category for place in groups["other category"]] == ["z20", "z21", "z22", "z23"]
    answers = [dataclasses.replace(each, arguments={"enable_thinking": n < 12}) for n, each in enumerate(answers)]
    assert {ON, OFF} < find_groups(answers).keys()
    taus = [PromptCounts(10.0, 20.0 if n < 12 else 30.0) for n in range(24)]
    groups_found = compare_groups(answers, taus, [PromptCounts(10.0, 25.0)] * 24)
    assert groups_found[ON].change == pytest.approx(0.5) and groups_found[OFF].change == pytest.approx(-0.5)
    lines = make_groups_table({"new": groups_found, "old": compare_groups(answers, taus)}).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[0].count("|") == 6
    (line,) = (line for line in lines if f"new: {ON}" in line)
    assert [cell.strip() for cell in line.split("|")[2:5]] == ["12", "2.00 (2.00 .. 2.00)", "2.50 (2.50 .. 2.50)"]
    assert "+0.500 (+0.500 .. +0.500)" in line
    assert (
        "after" not in make_groups_table({"new": compare_groups(answers, taus), "old": {}})
        and compare_groups([], []) == {}
    )


def test_what_is_foreseen():
    """Repeated tokens decide; the gap is to old answers at the same temperatures."""
    text = lambda n, *tokens, **fields: dataclasses.replace(answer(n), answer=list(tokens), **fields)
    training = [text(n, 1, 2, 3, 4, 5, 6, 7, 8) for n in range(3)]
    alike, different = [text(9, 9, 1, 2, 3, 4, 5)], [text(9, 6, 5, 4, 3, 2, 1)]
    assert count_repeats(alike, training) == pytest.approx(2 / 5)  # 4 and 5 of the tokens with three before them
    assert count_repeats(different, training) == count_repeats(alike, []) == 0
    groups = lambda answers, *taus: compare_groups(answers, [PromptCounts(10.0, 10 * tau) for tau in taus])
    old = [text(n, 5, 5, temperature=float(n >= 8)) for n in range(16)]
    prediction = predict_gain(groups(alike, 2.0), groups(old, *[3.0] * 8, *[1.5] * 8), alike, training)
    assert (
        prediction["likely"]
        and prediction["gap"] == pytest.approx(0.5)
        and "Training is likely to pay: 40%" in prediction["said"]
    )
    assert "2.00 here, and 3.00 on old answers at the same temperatures (+50%)" in prediction["said"]
    prediction = predict_gain(groups(different, 2.0), {}, different, training)
    assert not prediction["likely"] and prediction["gap"] is None and "likely to win little" in prediction["said"]


def change(before: float, after: float, num: int = MIN_CONVERSATIONS) -> TauChange:
    """Of `num` conversations with these tau."""
    counts = lambda tau: [PromptCounts(10.0, 10 * tau)] * num
    return TauChange.compare([answer(n) for n in range(num)], counts(before), counts(after))


def test_a_change_is_over_conversations():
    tau_change = change(1.5, 1.8)
    assert (tau_change.conversations, tau_change.answers, tau_change.tokens) == (
        MIN_CONVERSATIONS,
        MIN_CONVERSATIONS,
        10 * MIN_CONVERSATIONS,
    )
    assert (tau_change.before, tau_change.after, tau_change.change) == pytest.approx((1.5, 1.8, 0.3))
    assert tau_change.change_ci == pytest.approx([0.3, 0.3])
    counts = [PromptCounts(1.0, 2.0)] * 6
    tau_change = TauChange.compare([answer(n, conversation="one") for n in range(6)], counts, counts)
    assert tau_change.conversations == 1 and tau_change.answers == 6 and TauChange.compare([], [], []) is None


@pytest.mark.parametrize(
    ("new", "old", "accepted", "reason"),
    [
        (change(1.5, 1.8), change(2.0, 2.0), True, "old answers fall by no more than 3%"),
        (change(1.5, 1.8), change(2.0, 1.98), True, "old answers fall by no more than 3%"),
        (change(1.5, 1.5), change(2.0, 2.0), False, "not surely a rise"),
        (change(1.5, 1.4), change(2.0, 2.0), False, "not surely a rise"),
        (change(1.5, 1.8), change(2.0, 1.9), False, r"old answers falls by 5.0%, .* more than 3% \(tolerance=0.03\)"),
        (change(1.5, 1.8), None, True, "and there are no old answers"),
        (
            change(1.5, 1.8, MIN_CONVERSATIONS - 1),
            change(2.0, 2.0),
            False,
            "7 held-out conversations are too few to judge",
        ),
    ],
)
def test_the_gate(new, old, accepted, reason):
    decision, reasons = decide_acceptance(new, old, tolerance=0.03)
    assert decision is accepted and re.search(reason, " ".join(reasons))


def test_numbers_go_on_beside_what_a_kill_left(tmp_path):
    for name in ("heads/0001", "adaptations"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("0002.json", "0003.json.partial"):
        (tmp_path / "adaptations" / name).write_text("")
    assert AdaptationFolder(tmp_path).next_number() == "0003"


def test_texts_of_users_are_for_their_owner_alone(tmp_path):
    home = AdaptationFolder(tmp_path)
    plan = AdaptationPlan(
        "0002", "heads/0001", [answer(1)], 1, {"new": [answer(2)], "old": [], "validation": [answer(3)]}, {}
    )
    home.save_plan(plan, "abc")
    earlier = json.loads((tmp_path / "training" / "plan.json").read_text()) | {"before": {"mix": []}}
    (tmp_path / "training" / "plan.json").write_text(json.dumps(earlier))  # as earlier versions wrote it
    assert home.read_plan() == plan
    with pytest.raises(ValueError, match="drafter"):
        home.record_decision(plan, tmp_path / "none", {"decision": "accepted"}, "abc")  # the rows are written first
    for name in ("training", "rows", "rows/0002"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700, name
    assert (tmp_path / "rows" / "0002" / "trained.jsonl").exists()
