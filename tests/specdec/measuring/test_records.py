"""Tests of records side by side: what may not be compared is said, with its consequence, and damage is named."""

import json

import pytest

from specdec.measuring import records
from specdec.measuring.record import Record
from tests.support.records import ABSENCE, LOAD, make_document, write_document


def read(tmp_path, **changes) -> dict[str, Record]:
    """Two records: DOCUMENT, and DOCUMENT with changes."""
    write_document(tmp_path / "a.json")
    write_document(tmp_path / "b.json", **changes)
    return records.read_records([str(tmp_path)]).records


@pytest.mark.parametrize(
    ("changes", "consequence", "phrase"),
    [
        (
            {"target__digest": "ee" * 32},
            records.NO_FIGURE,
            "target digest aaaaaaaaaaaa (a.json), eeeeeeeeeeee (b.json)",
        ),
        ({"target__quantisation": "Q8_0"}, records.NO_FIGURE, "target quantisation none (a.json), Q8_0 (b.json)"),
        (
            {"protocol__ids_sha256": "ee" * 32},
            records.NO_FIGURE,
            "the questions are others: ids_sha256 cccccccccccc (a",
        ),
        (
            {"protocol__temperature": 1.0, "engine__draft_sampling": "greedy"},
            records.NO_FIGURE,
            "temperature 0 (a.json), 1 (b.json)",
        ),
        (
            {"target__dtype": "bfloat16"},
            records.NO_FIGURE,
            "precision: target dtype float32 (a.json), bfloat16 (b.json)",
        ),
        ({"protocol__repetition_penalty": 1.1}, records.NO_FIGURE, "repetition_penalty 1 (a.json), 1.1 (b.json)"),
        ({"protocol__ignore_stop": True}, records.NO_FIGURE, "ignore_stop no (a.json), yes (b.json)"),
        ({"protocol__turns": 2}, records.NO_FIGURE, "turns 1 (a.json), 2 (b.json)"),
        ({"loads": [LOAD | {"prompts": 1300}]}, records.NO_FIGURE, "prompts 14 (a.json), 1300 (b.json)"),
        ({"protocol__max_tokens": 128}, records.NO_FIGURE, "max_tokens 64 (a.json), 128 (b.json)"),
        ({"loads": [LOAD, LOAD | {"at_once": 8}]}, records.NO_FIGURE, "loads 1 (a.json), 1 8 (b.json)"),
        ({"protocol__drafts": 5}, records.NO_TAU, "drafts 2 (a.json), 5 (b.json)"),
        ({"engine__adaptive": True}, records.NO_TAU, "adaptive no (a.json), yes (b.json)"),
        ({"counting__first_token": True}, records.NO_TAU, "first_token no (a.json), yes (b.json)"),
        ({"counting__source": "replay"}, records.NO_TAU, "while it served (a.json), along replayed answers (b.json)"),
        ({"machine__device": "a GPU"}, records.NO_SPEED, "machine device a CPU (a.json), a GPU (b.json)"),
        (
            {"machine__busy": 0.4},
            records.NO_SPEED,
            "share of other programs at most 10% (a.json), more than 10% (b.json)",
        ),
    ],
)
def test_what_may_not_be_compared_is_said_with_its_consequence(tmp_path, changes, consequence, phrase):
    sentences = list(records.describe_differences(read(tmp_path, **changes)))
    assert len(sentences) == 1 and sentences[0].startswith(f"{consequence} may be compared, as ")
    assert phrase in sentences[0]


@pytest.mark.parametrize(
    ("name", "value"), [("endpoint", "v1/chat/completions"), ("template_sha256", "ee" * 32), ("thinking", True)]
)
def test_equal_token_ids_are_equal_prompts_however_they_were_rendered(tmp_path, name, value):
    changes = {f"protocol__{name}": value}
    assert list(records.describe_differences(read(tmp_path, **changes))) == []
    _, sentence = records.describe_differences(read(tmp_path, **changes, protocol__ids_sha256="ee" * 32))
    assert sentence.startswith(records.NO_FIGURE) and f"rendered in other ways: {name} " in sentence


def test_what_is_unknown_is_not_called_equal(tmp_path):
    (sentence,) = records.describe_differences(read(tmp_path, protocol__ids_sha256=None, target__digest=None))
    assert sentence.startswith("Not recorded, so not compared: target digest, ids_sha256 (b.json).")


def test_unknown_ids_and_machines_leave_what_is_known_of_them(tmp_path):
    write_document(tmp_path / "a.json", protocol__ids_sha256=None, machine__parallel=None)
    changes = {"protocol__ids_sha256": None, "loads": [LOAD | {"prompts": 1300}]}
    write_document(tmp_path / "b.json", **changes, machine__parallel="tensor 2")
    difference, unknown = records.describe_differences(records.read_records([str(tmp_path)]).records)
    assert "other numbers of questions or turns were answered: prompts 14 (a.json), 1300 (b.json)." in difference
    assert unknown == "Not recorded, so not compared: ids_sha256 (all); machine parallel (a.json)."


def test_busy_machines_spoil_speeds_even_where_all_are_busy(tmp_path):
    for name, busy in {"a": 0.5, "b": 0.9}.items():
        write_document(tmp_path / f"{name}.json", machine__busy=busy)
    (sentence,) = records.describe_differences(records.read_records([str(tmp_path)]).records)
    assert sentence.startswith(records.NO_SPEED) and sentence.endswith("more than 10% (a.json, b.json).")


def test_digests_of_other_forms_say_nothing_of_one_another(tmp_path):
    write_document(tmp_path / "c.json")
    unquantised = {"target__digest": "v2.12-gguf-bf16", "target__quantisation": "BF16"}
    (sentence,) = records.describe_differences(read(tmp_path, **unquantised))
    assert sentence == "Not recorded, so not compared: target digest in the form of the others (b.json)."
    write_document(tmp_path / "d.json", target__digest="v2.34-gguf-bf16")
    difference, _ = records.describe_differences(records.read_records([str(tmp_path)]).records)
    assert "target digest v2.12-gguf-bf16 (b.json), v2.34-gguf-bf16 (d.json)" in difference


def test_plain_servers_have_no_tau_to_compare(tmp_path):
    changes = {"drafter": None, "protocol__drafts": None, "counting__first_token": True}
    pair = read(tmp_path, **changes, counting__source=None)
    assert records.find_differences(pair) == []
    assert [records.name_drafter(record, pair) for record in pair.values()] == ["ours/eagle3", records.PLAIN]


def test_drafters_of_one_name_and_other_weights_are_told_apart(tmp_path):
    pair = read(tmp_path, drafter__digest="ee" * 32)
    assert [row[1] for row in records.tabulate_records(pair).rows] == [
        "ours/eagle3 (bbbbbbbbbbbb)",
        "ours/eagle3 (eeeeeeeeeeee)",
    ]


def test_damaged_and_foreign_files_are_named_and_the_others_read(tmp_path):
    write_document(tmp_path / "more" / "record.json")
    for name in ("results.json", "settings.json", "own.json"):
        write_document(tmp_path / "more" / name, {"form": 1})  # beside a record, not looked at
    write_document(tmp_path / "no.json", ABSENCE)
    (tmp_path / "cut.json").write_text('{"schema": ')
    write_document(tmp_path / "foreign.json", {"form": 1})
    write_document(tmp_path / "list.json", [1])
    write_document(tmp_path / "wrong.json", loads__0__tau="fast")
    contents = records.read_records([str(tmp_path)])
    assert list(contents.records) == ["record.json"] and contents.absences[0].engine == "OpenVINO"
    endings = ["cut.json is no record", "foreign.json is no record", "list.json is no record", "loads.0.tau"]
    assert len(contents.refused) == len(endings)
    for sentence, ending in zip(contents.refused, endings, strict=True):
        assert sentence.startswith(f"Left out: {tmp_path}") and ending in sentence
    (sentence,) = records.read_records([str(tmp_path / "more")]).refused
    assert "own.json" in sentence  # files of judge's own go without saying
    (tmp_path / "more" / "record.json").unlink()
    with pytest.raises(ValueError, match=r"there is no record, as specdec judge writes it\. Left out: .*cut\.json"):
        records.read_records([str(tmp_path)])
    with pytest.raises(ValueError, match=r"nowhere does not exist: give files"):
        records.read_records(["nowhere"])


@pytest.mark.parametrize(
    ("changes", "checks"),
    [
        ({}, ["yes served = replayed", "yes same template", "yes repeat 8/8", " not checked: control"]),
        (
            {"checks__served_is_trained": False, "checks__template": "other ids than tokenizer"},
            ["no served is not what replay gives", "no other template"],
        ),
        ({"checks__repeat": [7, 8], "machine__busy": 0.25}, ["unsure repeat 7/8", "unsure machine 25% busy"]),
        (
            {"checks__control": {"plain_plain": [6, 8], "drafted_plain": [6, 8], "p_value": 0.5}},
            ["yes no sign that drafts change more answers: control 6/8 with drafts, 6/8 plain (sign test, p = 0.5)"],
        ),
        (
            {"checks__control": {"plain_plain": [8, 8], "drafted_plain": [2, 8], "p_value": 0.03}},
            ["unsure drafts change MORE answers: control 2/8 with drafts, 8/8 plain (sign test, p = 0.03)"],
        ),
        (
            {"checks__control": {"plain_plain": [4, 8], "drafted_plain": [4, 8], "p_value": 0.5}},
            [
                "unsure too few answers to tell whether drafts change more: control 4/8 with drafts, 4/8 plain "
                "(sign test, p = 0.5)"
            ],
        ),
        (
            {"loads__0__failed": 2, "checks__others_traffic": 9},
            ["unsure 9 tokens for others", "unsure 2 requests failed"],
        ),
        ({"drafter": None, "checks": {}}, [" not checked: template, control, repeat, traffic"]),
    ],
)
def test_checks_say_what_was_found_and_what_was_not_looked_at(changes, checks):
    record = Record.model_validate_json(json.dumps(make_document(**changes)))
    texts = [" ".join(check) for check in records.list_checks(record)]
    assert [text for text in texts if text in checks] == checks
