"""Tests of an adaptation's split, samples and decisions, without a model."""

from specdec.options.command_line import read_command

import dataclasses
import json
import re

import pytest

from specdec.measuring.report import PromptCounts
from specdec.tools.adapt import answers, judging
from specdec.tools.adapt.adapt import AdaptOptions, list_recorded_objective, size_training
from specdec.tools.adapt.answers import RecordedAnswer, TooFewAnswers, TrafficSource, split_newest
from specdec.tools.adapt.folder import AdaptationFolder, AdaptationPlan
from specdec.tools.adapt.judging import MAX_ANSWERS, MIN_CONVERSATIONS, TauChange, compare_groups, find_groups
from tests.support.targets import small_tokenizer

SOURCE = TrafficSource("abc", "models/t", "1234")


def answer(n: int, **changes) -> RecordedAnswer:
    usual = RecordedAnswer([1, n], [5] * 10, 0.0, f"r{n}", f"c{n}", float(n))
    return dataclasses.replace(usual, **changes)


def name_all(recorded) -> list[str]:
    return [each.id for each in recorded]


# Rows


def test_the_newest_conversations_and_their_prompts_are_held_out_whole():
    recorded = [answer(n) for n in range(8)] + [answer(8, conversation="c0"), answer(9)]
    training, heldout = split_newest(recorded, 0.2)
    assert name_all(heldout) == ["r0", "r8", "r9"]  # c0 began first, and went on until the end
    assert name_all(training) == [f"r{n}" for n in range(1, 8)]
    recorded = [answer(n, prompt=[7, 7] if n in (2, 9) else [1, n]) for n in range(10)]
    training, heldout = split_newest(recorded, 0.2)
    assert name_all(heldout) == ["r8", "r9"] and "r2" not in name_all(training)
    with pytest.raises(TooFewAnswers, match="Nothing is left to train on"):
        split_newest([answer(n, prompt=[1]) for n in range(10)], 0.2)
    _, heldout = split_newest([answer(n, time=1.0) for n in range(100)], 0.2)  # equally new ones are drawn
    assert len(heldout) == 20 and set(name_all(heldout)) != {f"r{n}" for n in range(80, 100)}


def test_old_rows_are_drawn_in_the_same_order_whatever_is_added_up_to_so_many_tokens():
    rows = [{"id": f"o{n}", "category": "a", "prompt": f"Say {n}.", "completion": "one two three"} for n in range(40)]
    drawn = list(answers.draw_old_answers(rows, small_tokenizer()))
    assert sorted(name_all(drawn)) == sorted(row["id"] for row in rows) != name_all(drawn)
    with_new = name_all(answers.draw_old_answers([*rows, {**rows[0], "id": "new"}], small_tokenizer()))
    assert [name for name in with_new if name != "new"] == name_all(drawn)
    num = answers.count_tokens(drawn[:3])
    assert answers.limit_tokens(drawn, num) == drawn[:3] and answers.limit_tokens(drawn, num - 1) == drawn[:2]


def test_lines_are_read_back_and_other_writers_are_told():
    row = answer(3)
    (line,) = answers.to_lines([row], "abc").encode().splitlines(keepends=True)
    assert SOURCE.parse_row(json.loads(line), location="x:1") == row
    for changes, is_accepted in (
        ({"target": "elsewhere/t"}, True),
        ({"target": "u"}, False),
        ({"target": "u", "target_fingerprint": "1234"}, True),
        ({"target": "t", "target_fingerprint": "99"}, False),
        ({"target": "t", "target_fingerprint": "99-int8"}, False),
        ({"target": "t", "target_fingerprint": "99-gguf-q8_0"}, True),
        ({"tokenizer": "other"}, False),
    ):
        parsed = SOURCE.parse_row({**json.loads(line), **changes}, location="x:1")
        assert (parsed == "of another target or tokenizer") is not is_accepted
    assert SOURCE.parse_row({"tokens": 1}, location="x:1") == "without token ids or a time"


def test_the_form_of_an_earlier_version_accuses_no_row_and_no_head():
    """Names decide, as of rows without a fingerprint."""
    for here, writer in (("v2." + "1" * 16, "1" * 16), ("1" * 16, "v2." + "1" * 16), ("1" * 16 + "-fp8", "v2.0")):
        source = dataclasses.replace(SOURCE, target_fingerprint=here)
        assert source.accepts_writer({"target": "t", "target_fingerprint": writer})
        assert not source.accepts_writer({"target": "u", "target_fingerprint": writer})


@pytest.mark.parametrize(
    ("objective", "changes", "sentence"),
    [
        ({"losses": {"jsd": 1.0}}, {}, "with losses.jsd=1.0, .* give training.head.objective.losses.kl=1, or"),
        ({"losses": {"jsd": 1.0}}, {"head.objective.losses.kl": "1"}, None),
        ({"weighting": "vat"}, {"train.batch": "2"}, "weighting=vat, .* training.head.objective.weighting=decay, or"),
        ({"weighting": "vat"}, {"head.objective.weighting": "dpace"}, None),
    ],
)
def test_what_an_earlier_version_trained_with_is_named_or_replaced(objective, changes, sentence):
    settings = {"head": {"objective": objective}}
    if sentence is None:
        assert "head.objective.losses.jsd" not in list_recorded_objective(settings, "eagle", changes)
        return
    with pytest.raises(ValueError, match=sentence):
        list_recorded_objective(settings, "eagle", changes)


def test_answers_of_one_launch_are_equally_new(tmp_path):
    """The target answers by temperature and length, so the order of the lines says nothing."""
    row = {"tokens": [1, 2, 3, 4], "prompt_tokens": 2, "tokenizer": "abc", "category": "a", "temperature": 1}
    lines = [{**row, "id": f"p{n % 4}@{n // 4}", "thinking": n % 2 == 0} for n in range(8)]
    lines += [{**row, "id": "p9@0", "tokens": [1, 2, 3]}, {**row, "id": "p7@0"}]
    (tmp_path / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recorded, reasons = answers.read_written(tmp_path / "answers.jsonl", SOURCE, [6.0])
    assert [each.time for each in recorded] == [6.0] * 6 + [10.0] * 3 and reasons == "1 shorter than two tokens"
    assert [each.conversation for each in recorded[:5]] == ["p0", "p1", "p2", "p3", "p0"]
    assert (recorded[0].category, recorded[0].temperature) == ("a", 1.0)
    assert [each.arguments["enable_thinking"] for each in recorded[:2]] == [True, False]


# Judging

ON, OFF = "template.enable_thinking=true", "template.enable_thinking=false"


def counts(*taus: float) -> list[PromptCounts]:
    return [PromptCounts(10.0, 10 * tau) for tau in taus]


def test_what_is_judged_is_spread_and_fits():
    recorded = [answer(n, prompt=[1] * (90 if n == 0 else 5)) for n in range(1 + 4 * MAX_ANSWERS)]
    sample = judging.sample_answers(recorded, 50)
    assert name_all(sample) == [f"r{n}" for n in range(1, 1 + 4 * MAX_ANSWERS, 4)]
    assert len(judging.sample_answers(recorded[:21], 50)) == 20
    assert len(answer(1, answer=[5] * 99).cut(50).answer) == 48


def test_groups_are_of_enough_conversations():
    categories = ["ab"[n > 9] if n < 20 else f"z{n}" for n in range(24)]
    recorded = [answer(n, category=name, temperature=float(n % 2)) for n, name in enumerate(categories)]
    groups = find_groups(recorded)
    sizes = {name: len(indices) for name, indices in groups.items()}
    by_category = {"all": 24, "category a": 10, "category b": 10, "other category": 4}
    assert sizes == by_category | {"temperature 0": 12, "temperature 1": 12}  # no thinking mode is known
    assert groups["other category"] == [20, 21, 22, 23]
    recorded = [dataclasses.replace(each, arguments={"enable_thinking": n < 12}) for n, each in enumerate(recorded)]
    taus = counts(*[2.0] * 12, *[3.0] * 12)
    compared = compare_groups(recorded, taus, counts(*[2.5] * 24))
    assert compared[ON].change == pytest.approx(0.5) and compared[OFF].change == pytest.approx(-0.5)
    lines = judging.make_groups_table({"new": compared, "old": compare_groups(recorded, taus)}).splitlines()
    assert len({len(line) for line in lines}) == 1 and lines[0].count("|") == 6
    (line,) = (line for line in lines if f"new: {ON}" in line)
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[2:6] == ["12", "2.00 (2.00 .. 2.00)", "2.50 (2.50 .. 2.50)", "+0.500 (+0.500 .. +0.500)"]
    assert "after" not in judging.make_groups_table({"new": compare_groups(recorded, taus), "old": {}})
    assert compare_groups([], []) == {}


def test_what_is_foreseen():
    """Repeated tokens decide; the gap is to old answers at the same temperatures."""
    training = [answer(n, answer=[1, 2, 3, 4, 5, 6, 7, 8]) for n in range(3)]
    alike, different = [answer(9, answer=[9, 1, 2, 3, 4, 5])], [answer(9, answer=[6, 5, 4, 3, 2, 1])]
    assert judging.count_repeats(alike, training) == pytest.approx(2 / 5)  # 4 and 5 of the tokens behind three others
    assert judging.count_repeats(different, training) == judging.count_repeats(alike, []) == 0
    old = [answer(n, answer=[5, 5], temperature=float(n >= 8)) for n in range(16)]
    old_groups = compare_groups(old, counts(*[3.0] * 8, *[1.5] * 8))
    prediction = judging.predict_gain(compare_groups(alike, counts(2.0)), old_groups, alike, training)
    assert prediction["likely"] and prediction["gap"] == pytest.approx(0.5)
    assert "Training is likely to pay: 40%" in prediction["said"]
    assert "2.00 here, and 3.00 on old answers at the same temperatures (+50%)" in prediction["said"]
    for heldout, groups in ((alike, {}), (different, old_groups)):  # repeats alone, and the gap alone
        assert judging.predict_gain(compare_groups(heldout, counts(2.0)), groups, heldout, training)["likely"]
    prediction = judging.predict_gain(compare_groups(different, counts(2.0)), {}, different, training)
    assert not prediction["likely"] and prediction["gap"] is None and "likely to win little" in prediction["said"]


def change(before: float, after: float, num: int = MIN_CONVERSATIONS) -> TauChange:
    """The change of tau of `num` conversations."""
    return TauChange.compare([answer(n) for n in range(num)], counts(*[before] * num), counts(*[after] * num))


def test_a_change_is_over_conversations():
    found = change(1.5, 1.8)
    assert (found.conversations, found.answers, found.tokens) == (8, 8, 80)
    assert (found.before, found.after, found.change) == pytest.approx((1.5, 1.8, 0.3))
    assert found.change_ci == pytest.approx([0.3, 0.3])
    single = TauChange.compare(
        [answer(n, conversation="one") for n in range(6)], counts(*[2.0] * 6), counts(*[2.0] * 6)
    )
    assert single.conversations == 1 and single.answers == 6 and TauChange.compare([], [], []) is None


@pytest.mark.parametrize(
    ("new", "old", "accepted", "reason"),
    [
        (change(1.5, 1.8), change(2.0, 2.0), True, "old answers fall by no more than 3%"),
        (change(1.5, 1.8), change(2.0, 1.98), True, "old answers fall by no more than 3%"),
        (change(1.5, 1.5), change(2.0, 2.0), False, "not surely a rise"),
        (change(1.5, 1.4), change(2.0, 2.0), False, "not surely a rise"),
        (dataclasses.replace(change(1.5, 1.8), change_ci=[-0.1, 0.7]), change(2.0, 2.0), False, "not surely a rise"),
        (change(1.5, 1.8), change(2.0, 1.9), False, r"old answers falls by 5.0%, .* more than 3% \(tolerance=0.03\)"),
        (change(1.5, 1.8), None, True, "and there are no old answers"),
        (
            change(1.5, 1.8, MIN_CONVERSATIONS - 1),
            change(2.0, 2.0),
            False,
            "8 held-out conversations or more, and there is only 7.",
        ),
    ],
)
def test_the_gate(new, old, accepted, reason):
    decision, reasons = judging.decide_acceptance(new, old, tolerance=0.03)
    assert decision is accepted and re.search(reason, " ".join(reasons))


# The folder and the training


def test_numbers_go_on_beside_what_a_kill_left(tmp_path):
    (tmp_path / "heads" / "0001").mkdir(parents=True)
    (tmp_path / "adaptations").mkdir()
    for name in ("0002.json", "0003.json.partial"):
        (tmp_path / "adaptations" / name).write_text("")
    assert AdaptationFolder(tmp_path).next_number() == "0003"


def test_texts_of_users_are_for_their_owner_alone(tmp_path):
    home, heldout = AdaptationFolder(tmp_path), {"new": [answer(2)], "old": [], "validation": [answer(3)]}
    plan = AdaptationPlan("0002", "heads/0001", [answer(1)], 1, heldout, {})
    home.save_plan(plan, "abc")
    assert home.read_plan() == plan
    with pytest.raises(ValueError, match="drafter"):
        home.record_decision(plan, tmp_path / "none", {"decision": "accepted"}, "abc")  # the rows are written first
    for name in ("training", "rows", "rows/0002"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700, name
    assert (tmp_path / "rows" / "0002" / "trained.jsonl").exists()


@pytest.mark.parametrize(
    ("lengths", "arguments", "tokens", "steps"),
    [
        ([10, 20], [], 512, None),
        ([10, 512], [], 512, None),
        ([10, 513], [], 640, None),
        ([10, 700], [], 768, None),
        ([10, 2000], [], 1024, None),
        ([700], ["length=300"], 512, None),  # as train.py has it
        ([512, 256, 2000], ["epochs=2", "length=512"], 512, 2 * 2.5),
        ([512] * 8, ["epochs=2", "training.train.batch=2", "training.train.accumulation=2"], 512, 4),
    ],
)
def test_packs_hold_the_longest_row_and_steps_read_all_rows(tmp_path, lengths, arguments, tokens, steps):
    training = [answer(n, prompt=[1] * 3, answer=[1] * (num - 3)) for n, num in enumerate(lengths)]
    required = ["checkpoint=a", "traffic=b", f"out={tmp_path}/c"]
    options = read_command("adapt", AdaptOptions, None, [*required, *arguments])
    size = size_training(options, AdaptationPlan("", "", training, 0, {}, {}))
    assert size[0] == tokens and steps in (None, size[1])
