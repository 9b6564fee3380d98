"""Tests of an adaptation's split, samples and decisions, without a model."""

import dataclasses
import json
import re

import pytest
import torch

from specdec.measuring.report import PromptCounts
from tests.support import small_tokenizer
from train.adapt import (
    ENOUGH,
    Limits,
    OldRows,
    RecordedAnswer,
    TooFew,
    TrafficSource,
    compare_parts,
    count_tokens,
    decide,
    keep_newest,
    mix_weights,
    split_newest,
    to_lines,
    try_shares,
)
from train.adapt_folder import AdaptationPlan, Home, render_adaptation

WANTED = TrafficSource("abc", "models/t", "1234")


def answer(
    n: int, *, conversation: str | None = None, category: str = "chat", tags=(), size: int = 10, prompt=None
) -> RecordedAnswer:
    return RecordedAnswer(
        id=f"r{n}", conversation=conversation or f"c{n}", time=float(n), category=category, tags=tuple(tags), temperature=0.0,
        prompt=prompt or [1, n], answer=[5] * size, exact=True, messages=[],
    )  # fmt: skip


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


def test_the_newest_tokens_are_kept():
    answers = [answer(n) for n in range(10)]
    assert [each.id for each in keep_newest(answers, 35)] == ["r7", "r8", "r9"]
    assert keep_newest(answers, None) == answers == keep_newest(answers, 1000)


def test_old_rows_are_drawn_from_every_category_and_never_twice():
    rows = [answer(n, category="ab"[n % 4 == 0]) for n in range(40)]
    older = OldRows([], None, split=None, seed=1, further=[])
    older.rows = rows
    held = older.hold_out(10, without=[])
    assert sorted(each.category for each in held) == ["a"] * 5 + ["b"] * 5
    older.further = [answer(n) for n in range(50, 60)]
    assert older.hold_out(10, without=[]) == held and older.sample(0, without=[]) == []
    rest = older.sample(150, without=held)
    assert 150 <= count_tokens(rest) < 160 and not {each.id for each in rest} & {each.id for each in held}


def test_lines_are_read_back():
    row = answer(3, tags=["json"])
    (line,) = to_lines([row], "abc").encode().splitlines(keepends=True)
    again = WANTED.parse(json.loads(line), place="x:1")
    assert again == dataclasses.replace(row, messages=again.messages)
    for key, value in (
        ("top_p", 0.9),
        ("grammar", "{}"),
        ("repetition_penalty", 1.1),
        ("top_k", 5),
        ("ids", "retokenised"),
        ("other_law", True),
    ):
        cut = line.replace(b'"exact": true, ', f'"{key}": {json.dumps(value)}, '.encode())
        assert WANTED.parse(json.loads(cut), place="x:1").exact is False
    for more, good in (
        ({"target": "elsewhere/t"}, True),
        ({"target": "u"}, False),
        ({"target": "u", "target_fingerprint": "1234"}, True),
        ({"target": "t", "target_fingerprint": "99"}, False),
        ({"target": "t", "target_fingerprint": "99-int8"}, True),
    ):
        found = WANTED.parse({**json.loads(line), **more}, place="x:1")
        assert (found == "of another target") is not good
    assert WANTED.parse({"tokens": 1}, place="x:1") == "without token ids"


def test_what_is_judged_is_spread_and_fits():
    answers = [answer(n, prompt=[1] * (90 if n == 0 else 5)) for n in range(21)]
    found = Limits(depth=4, num=5, length=50).choose(answers)
    assert [each.id for each in found] == ["r1", "r5", "r9", "r13", "r17"]
    assert len(Limits(depth=4, num=100, length=50).choose(answers)) == 20


def tables(taus: dict[str, tuple[float, float]], num: int = ENOUGH) -> dict:
    """A table in which each category has tau before and after, and `num` conversations."""
    answers = [answer(n, category=name) for name in taus for n in range(num)]
    answers = [dataclasses.replace(each, conversation=str(n)) for n, each in enumerate(answers)]
    counts = lambda side: [PromptCounts(10.0, 10 * taus[each.category][side]) for each in answers]
    return compare_parts(answers, counts(0), counts(1))


def test_a_table_has_parts_with_their_changes():
    found = tables({"chat": (1.5, 1.8), "code": (2.0, 2.0)})
    assert list(found) == ["all", "category chat", "category code"]
    assert found["all"]["before"] == pytest.approx(1.75) and found["all"]["change"] == pytest.approx(0.15)
    assert found["category chat"]["change_ci"] == pytest.approx([0.3, 0.3])
    answers = [answer(n, conversation="one", tags=["x"] * (n < 3)) for n in range(6)]
    counts = [PromptCounts(1.0, 2.0)] * 6
    found = compare_parts(answers, counts, counts)
    assert list(found) == ["all", "tag x"]  # all answers are of the category and the temperature
    assert found["all"]["conversations"] == 1 and found["tag x"]["answers"] == 3
    sampled = [dataclasses.replace(each, temperature=0.7 * (n % 3 == 0)) for n, each in enumerate(answers)]
    shown = compare_parts(sampled, counts, counts)
    assert {name: part["answers"] for name, part in shown.items()} == {
        "all": 6, "tag x": 3, "temperature 0": 4, "temperature 0.7": 2,
    }  # fmt: skip


GATES = [
    (
        {"chat": (1.5, 1.8)},
        {"chat": (2.0, 2.0)},
        True,
        "old answers fall by no more than 3%, and no category of them by more than 6%",
    ),
    ({"chat": (1.5, 1.5)}, {"chat": (2.0, 2.0)}, False, "not surely a rise"),
    ({"chat": (1.5, 1.4)}, {"chat": (2.0, 2.0)}, False, "not surely a rise"),
    ({"chat": (1.5, 1.8)}, {"chat": (2.0, 1.9)}, False, r"old answers \(all\) falls by 5.0%"),
    ({"chat": (1.5, 1.8)}, {"chat": (2.0, 1.8), "code": (2.0, 2.3)}, False, r"\(category chat\) falls by 10.0%"),
    ({"chat": (1.5, 1.8)}, {"chat": (2.0, 1.98)}, True, "old answers fall by no more"),
    ({"chat": (1.5, 1.8)}, {"chat": (2.0, 1.9), "code": (2.0, 2.1)}, True, "old answers fall by no more"),
    (
        {"chat": (1.5, 1.8)},
        {"chat": (2.0, 1.87), "code": (2.0, 2.1)},
        False,
        r"6.5%, .* more than 6% \(tolerance=0.03, 2 times",
    ),
    ({"chat": (1.5, 1.8)}, {}, True, "and there are no old answers"),
]


@pytest.mark.parametrize("new, old, taken, said", GATES)
def test_the_decide(new, old, taken, said):
    decision, reasons = decide(tables(new), tables(old) if old else {}, tolerance=0.03)
    assert decision is taken
    assert re.search(said, " ".join(reasons))


def test_few_conversations_never_let_a_head_through():
    few = tables({"chat": (1.5, 1.8)}, num=ENOUGH - 1)
    decision, reasons = decide(few, tables({"chat": (2.0, 2.0)}), tolerance=0.03)
    assert not decision and "7 held-out conversations are too few to judge a head by" in reasons[0]


def test_weights_are_mixed_in_the_types_of_the_trained_head():
    start = {"w": torch.tensor([1.0, -3.0]), "ids": torch.tensor([4, 5])}
    trained = {"w": torch.tensor([2.0, 5.0]).bfloat16(), "ids": torch.tensor([6, 7])}
    found = mix_weights(start, trained, 0.25)
    assert found["w"].tolist() == [1.25, -1.0] and found["w"].dtype == torch.bfloat16
    assert found["ids"].tolist() == [6, 7]
    assert torch.equal(mix_weights(start, trained, 1.0)["w"], trained["w"])
    with pytest.raises(ValueError, match="other tensors than the one it comes from"):
        mix_weights({"w": torch.zeros(3)}, {"w": torch.zeros(2)}, 0.5)


@pytest.mark.parametrize("forgets, wanted, tries", [(0.01, 1.0, 1), (0.04, 0.5, 2), (0.5, 0.25, 3)])
def test_the_largest_share_that_forgets_little_is_judged_by_the_gate(forgets, wanted, tries):
    """tau falls by a share `forgets` with all of the trained weights, and in proportion with less."""
    falls = lambda share, kind: tables({"chat": (2.0, 2.0 + 0.1 * (1 if kind == "new" else -20 * forgets * share))})
    share, shown, (good, _), looks = try_shares([1.0, 0.5, 0.25], falls, tolerance=0.03, choosing=True)
    assert share == wanted and good is (forgets < 0.1) and shown["new"]["all"]["change"] == pytest.approx(0.1)
    assert [each["share"] for each in looks] == [*[1.0, 0.5, 0.25][:tries], wanted]
    assert [bool(each["forgotten"]) for each in looks] == [forgets * each["share"] > 0.03 for each in looks]
    assert looks[-1]["fall"] == pytest.approx(forgets * share)


def test_a_head_that_the_gate_refuses_for_forgetting_is_mixed_further():
    """The answers to choose by let everything pass; by those of the gate all shares but the smallest forget."""
    falls = lambda share, kind: tables({"chat": (2.0, {"new": 2.1, "old": 2.0 - share, "mix": 2.0}[kind])})
    share, _, (good, _), looks = try_shares([1.0, 0.5, 0.02], falls, tolerance=0.03, choosing=True)
    assert share == 0.02 and good
    assert [(each["share"], each["answers"]) for each in looks if each["forgotten"]] == [
        (1.0, "the gate's"),
        (0.5, "the gate's"),
    ]
    worse = lambda share, kind: tables({"chat": (2.0, 1.9)})
    assert (
        try_shares([1.0, 0.5], worse, tolerance=0.1, choosing=False)[0] == 1.0
    )  # it does not rise: no share would help


def test_numbers_go_on_beside_what_a_kill_left(tmp_path):
    for name in ("heads/0001", "adaptations"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("0002.json", "0002.html", "0003.json.partial"):
        (tmp_path / "adaptations" / name).write_text("")
    assert Home(tmp_path).next_number() == "0003"


def test_texts_of_users_are_for_their_owner_alone(tmp_path):
    home, tokenizer = Home(tmp_path), small_tokenizer()
    heldout, before = {"new": [answer(2)], "old": [], "mix": []}, {"new": [], "old": [], "mix": []}
    plan = AdaptationPlan("0002", "heads/0001", [answer(1)], 1, heldout, before, {})
    home.save_plan(plan, "abc")
    (tmp_path / "datastores").mkdir(mode=0o755)  # of an earlier version
    home.store("0002", [answer(1)], tokenizer)
    with pytest.raises(ValueError, match="drafter"):
        home.accept(plan, tmp_path / "none", {}, {}, "abc")  # the rows are written first
    for name in ("training", "rows", "rows/0002", "datastores"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o700, name
    assert (tmp_path / "rows" / "0002" / "trained.jsonl").exists()


def test_a_small_category_of_old_answers_does_not_decide():
    small = tables({"chat": (2.0, 1.0), "tools": (2.0, 2.0)}, num=ENOUGH - 1)["category chat"]
    old = {**tables({"code": (2.0, 2.0)}), "category chat": small}
    assert decide(tables({"chat": (1.5, 1.8)}), old, tolerance=0.03)[0]


def test_the_page_escapes_what_traffic_says():
    slices = {"new": tables({"<script>": (1.5, 1.8), "chat": (1.4, 1.4)}), "old": {}}
    document = {
        "number": "0002", "decision": "refused", "reasons": ["<b>"], "start": "heads/0001",
        "in_use": "heads/0001", "slices": slices, "minutes": {"training": 1.0}, "notes": ["a <note>"], "settings": {"lr": 1},
        "training": dict.fromkeys(("new_answers", "new_tokens", "old_answers", "old_tokens", "steps", "lr"), 1),
    }  # fmt: skip
    page = render_adaptation([document, document], title="t")
    assert "category &lt;script&gt;" in page and "<b>" not in page.partition("<h1>")[2].partition('class="figures"')[0]
    assert "a &lt;note&gt;" in page and "1.80" in page and "All adaptations" in page
