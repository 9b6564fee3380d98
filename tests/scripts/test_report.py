"""Tests of scripts/report.py: results side by side, with what differs in their protocols."""

import json

import pytest

from scripts import report
from specdec.measuring import results
from tests.support.records import ABSENCE, write_document

SETTINGS = {
    "suite": {"title": "GSM8K", "digest": "a"},
    "protocol": None,
    "max_new_tokens": 64,
    "machine": "x86_64",
    "fingerprint": "ab",
    "decode": {"temperature": "0", "rule": "token"},
}
ENTRY = {
    "method": "head, chain of 2",
    "temperature": 0.0,
    "batch": 1,
    "tau": 1.5,
    "tau_ci": [1.4, 1.6],
    "speedup": 1.2,
    "speedup_ci": [1.1, 1.3],
    "tokens_per_second": 50.0,
}


def write(folder, **changes) -> str:
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps({"settings": SETTINGS | changes, "results": [ENTRY]}))
    return str(folder)


@pytest.mark.parametrize(
    ("changes", "phrases"),
    [
        ({}, []),
        (
            {
                "max_new_tokens": 128,
                "suite": {"title": "MT-Bench", "digest": "b"},
                "decode": {"temperature": "1", "rule": "token"},
            },
            ["protocols, so acceptance lengths", "suite (GSM8K a, MT-Bench b)", "max_new_tokens (64, 128)", "(0, 1)"],
        ),
        ({"machine": "arm64"}, ["machines, so speeds are not comparable: machine (x86_64, arm64)"]),
    ],
)
def test_differences_of_protocols_and_machines_are_named(tmp_path, changes, phrases):
    folders = [write(tmp_path / "first"), write(tmp_path / "second", **changes)]
    sentences = list(results.find_differences(results.read_all_results(folders)))
    assert len(sentences) == bool(changes)
    for sentence in sentences:
        assert sentence.startswith("These are results of different ") and all(phrase in sentence for phrase in phrases)


def test_report_prints_results_side_by_side(tmp_path, capsys):
    folders = [write(tmp_path / "first"), write(tmp_path / "second", max_new_tokens=128)]
    report.main([f"results={','.join(folders)}"])
    printed = capsys.readouterr().out
    assert printed.count("1.50 (1.40 .. 1.60)") == 2 and "different protocols" in printed
    (tmp_path / "second" / "results.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not of specdec evaluate"):
        report.main([f"results={folders[1]}"])


def test_a_folder_without_results_is_refused_with_the_remedy(tmp_path):
    for read in (results.read_results, lambda folder: results.read_all_results([folder])):
        with pytest.raises(ValueError, match=r"results\.json does not exist\. The folder .* run that command again"):
            read(str(tmp_path))


def test_report_prints_records_side_by_side_with_what_is_not_comparable_first(tmp_path, capsys):
    write_document(tmp_path / "a.json")
    write_document(tmp_path / "b.json", engine__name="llama.cpp", protocol__drafts=5, notes=["A note."])
    write_document(tmp_path / "c.json", ABSENCE)
    (tmp_path / "d.json").write_text("{")
    report.main([f"records={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()
    assert "d.json is no record" in lines[0] and lines[1] == "Records: #1: a.json, #2: b.json."
    assert lines[2] == "No tau may be compared, as K drafts can reach K + 1 at most: drafts 2 (#1), 5 (#2)."
    assert sum("1.75 (1.60 .. 1.90)" in line for line in lines) == 2
    assert lines[-3:] == [
        "all: served = replayed; same template; repeat 8/8; control not checked.",
        "#2: A note.",
        "ours/eagle3 in OpenVINO: It has no form for this head.",
    ]


@pytest.mark.parametrize("arguments", [[], ["results=a", "records=b"]])
def test_report_needs_one_subject(arguments):
    with pytest.raises(ValueError, match=r"Give one of run=, results=, records= and board="):
        report.main(arguments)


def test_report_writes_records_in_the_forms_of_others_and_the_board(tmp_path, capsys):
    write_document(tmp_path / "a.json")
    report.main([f"records={tmp_path}", f"out={tmp_path}/out", "dataset=user/set"])
    assert (tmp_path / "out" / "acceptance_rate.json").exists()
    assert "id: user/set" in (tmp_path / "out" / ".eval_results" / "specdec.yaml").read_text()
    report.main([f"board={tmp_path}"])
    assert capsys.readouterr().out.endswith(f"written: {tmp_path}/board.html and board.md\n")
    assert (tmp_path / "board.html").exists()


@pytest.mark.parametrize(
    ("arguments", "phrase"),
    [
        (["board=a", "out=b"], "out= is of records="),
        (["records=a", "dataset=user/set"], "dataset= is of records= and out="),
        (["records=a", "out=b", "source=c"], "source= is of dataset="),
        (["records=a", "out=b", "dataset=not a name"], "dataset=not a name is no set of .* give its user/name"),
        (["records=a", "out=b", "dataset=gsm8k"], "dataset=gsm8k is no set of"),
        (["records=a", "out=b", "dataset=a/b@main"], "dataset=a/b@main is no set of"),
    ],
)
def test_options_of_forms_need_one_another(arguments, phrase):
    with pytest.raises(ValueError, match=phrase):
        report.main(arguments)
