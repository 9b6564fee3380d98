"""Tests of results side by side: what differs in their protocols is said."""

import json

import pytest

from scripts import report
from specdec.measuring import results


def write(folder, **changed):
    folder.mkdir()
    settings = {"suite": {"title": "GSM8K", "digest": "a"}, "protocol": None, "max_new_tokens": 64, "machine": "x86_64", "fingerprint": "ab",
                "decode": {"temperature": "0", "rule": "token"}} | changed  # fmt: skip
    entry = {"method": "head, chain of 2", "temperature": 0.0, "batch": 1, "tau": 1.5, "tau_ci": [1.4, 1.6], "speedup": 1.2,
             "speedup_ci": [1.1, 1.3], "tokens_per_second": 50.0}  # fmt: skip
    (folder / "results.json").write_text(json.dumps({"settings": settings, "results": [entry]}))
    return str(folder)


def test_differences_of_protocols_and_machines_are_named(tmp_path):
    folder, same_folder = write(tmp_path / "one"), write(tmp_path / "same")
    assert list(results.find_differences(results.read_all_results([folder, same_folder]))) == []
    other_folder = write(
        tmp_path / "other",
        max_new_tokens=128,
        suite={"title": "MT-Bench", "digest": "b"},
        decode={"temperature": "1", "rule": "token"},
    )
    (said,) = results.find_differences(results.read_all_results([folder, other_folder]))
    assert said.startswith("These are results of different protocols, so acceptance lengths are not comparable: ")
    assert "suite (GSM8K a, MT-Bench b)" in said and "max_new_tokens (64, 128)" in said and "temperature (0, 1)" in said
    moved = write(tmp_path / "moved", machine="arm64")
    (said,) = results.find_differences(results.read_all_results([folder, moved]))
    assert "different machines, so speeds are not comparable: machine (x86_64, arm64)" in said


def test_report_prints_results_side_by_side(tmp_path, capsys):
    folder, other_folder = write(tmp_path / "one"), write(tmp_path / "other", max_new_tokens=128)
    report.main([f"results={folder},{other_folder}"])
    printed = capsys.readouterr().out
    assert printed.count("1.50 (1.40 .. 1.60)") == 2 and "different protocols" in printed
    with pytest.raises(ValueError, match="Give run=FOLDER of a training run, or results="):
        report.main([])
    with pytest.raises(ValueError, match=r"nowhere/results\.json"):
        report.main(["results=nowhere"])
    (tmp_path / "other" / "results.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is not of specdec evaluate"):
        report.main([f"results={other_folder}"])


def test_a_folder_without_results_is_refused_with_the_remedy(tmp_path):
    for read in (results.read_results, lambda folder: results.read_all_results([folder])):
        with pytest.raises(ValueError, match=r"results\.json does not exist\. The folder .* run that command again"):
            read(str(tmp_path))
