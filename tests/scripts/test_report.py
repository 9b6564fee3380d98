"""Tests of scripts/report.py: results side by side, with what differs in their protocols."""

import json

import pytest

from scripts import report
from specdec.measuring import results

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
