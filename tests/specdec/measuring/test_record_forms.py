"""Tests of records in the forms of others, which their own readers take."""

import json
from dataclasses import asdict

import huggingface_hub
import pytest
import yaml

from specdec.measuring import record_forms, records
from specdec.measuring.servers.referee import ServedAnswer, ServedBatch, Speculation
from tests.support.records import GROUP, LOAD, write_document

PLAIN = {"drafter": None, "loads": [LOAD | {"tau": [1.0, 1.0, 1.0], "by_position": []}]}


def read(tmp_path, **changes) -> records.RecordFiles:
    write_document(tmp_path / "record.json", **changes)
    return records.read_records([str(tmp_path)])


def write_eval_results(contents, out, **settings):
    path = record_forms.write_eval_results(contents.records, out, dataset="openai/gsm8k", **settings)
    return yaml.safe_load(path.read_text())


def test_evaluation_results_are_read_by_the_library_of_the_hub(tmp_path):
    document = write_eval_results(read(tmp_path), tmp_path / "out", source="https://huggingface.co/user/head")
    (entry,) = huggingface_hub.parse_eval_result_entries(document)
    assert huggingface_hub.eval_result_entries_to_yaml([entry]) == document
    assert (entry.dataset_id, entry.task_id, entry.value) == ("openai/gsm8k", "acceptance_length", 1.75)
    assert (entry.dataset_revision, entry.source_url) == ("0f" * 20, "https://huggingface.co/user/head")
    for phrase in ("tau 1.75 (1.60 .. 1.90): tokens emitted", "14 questions of GSM8K, 1 at once", "max_tokens 64"):
        assert phrase in entry.notes


def test_evaluation_results_are_of_one_set_and_of_drafts(tmp_path):
    (entry,) = write_eval_results(read(tmp_path, protocol__revision="main"), tmp_path / "out", source=None)
    assert "source" not in entry and "revision" not in entry["dataset"]
    write_document(tmp_path / "plain.json", **PLAIN)
    contents = records.read_records([str(tmp_path)])
    assert len(write_eval_results(contents, tmp_path / "out", source=None)) == 1
    write_document(tmp_path / "other.json", protocol__suite="MT-Bench")
    with pytest.raises(ValueError, match=r"dataset=openai/gsm8k is one set .* of GSM8K, MT-Bench\."):
        write_eval_results(records.read_records([str(tmp_path)]), tmp_path / "out", source=None)
    with pytest.raises(ValueError, match="None of these records has tau"):
        write_eval_results(records.read_records([str(tmp_path / "plain.json")]), tmp_path / "out", source=None)


def make_batch(prompt: str, accepted: list[int]) -> ServedBatch:
    """An answer whose rounds accepted so many of 2 drafts."""
    positions = [len(accepted) - accepted.count(0), accepted.count(2)]
    counts = Speculation(sum(accepted), 2 * len(accepted), len(accepted), 0, positions, 2)
    tokens = 1 + sum(accepted) + len(accepted)
    answer = ServedAnswer(prompt, tokens, 0.1, 1.0, None, [1] * tokens, counts)
    return ServedBatch([answer], [], 1.0, 0.1, None, None)


def write_rows(tmp_path, *batches: tuple[int, int, ServedBatch]):
    """Rows of judge. batches: requests at once, turn, batch"""
    rows = [
        json.dumps({"requests": at_once, "wave": turn, "turn": 0, "drafted": asdict(batch)})
        for at_once, turn, batch in batches
    ]
    repeated = rows[0][:-1] + ', "check": "repeat"}'
    (tmp_path / "rows.jsonl").write_text("\n".join([repeated, *rows]) + '\n{"cut')


def read_rates(tmp_path, contents) -> list[dict]:
    path = record_forms.write_rates(contents.records, contents.folder, tmp_path / "out")
    assert path.name == "acceptance_rate.json"
    return json.loads(path.read_text())


def test_acceptance_rates_have_what_the_record_has(tmp_path):
    contents = read(tmp_path, by__category={"math": GROUP, "none": {"prompts": 1, "tau": None}})
    (rates,) = read_rates(tmp_path, contents)
    assert list(rates) == ["Notes", "Category_AL", "Conditional_Acceptance_Rate", "Joint_Acceptance_Rate"]
    assert rates["Joint_Acceptance_Rate"] == {"1": 1.0, "2": 0.5, "3": 0.25}
    assert rates["Conditional_Acceptance_Rate"] == {"1": 1.0, "2": 0.5, "3": 0.5}
    assert rates["Category_AL"] == {"math": 1.5}
    write_document(tmp_path / "plain.json", **PLAIN)
    write_document(tmp_path / "record.json", loads=[LOAD | {"by_position": [0.5, 0.0]}])
    (rates,) = read_rates(tmp_path, records.read_records([str(tmp_path)]))
    assert rates["Joint_Acceptance_Rate"] == {"1": 1.0, "2": 0.5}


def test_figures_of_requests_come_from_the_rows_beside_the_record(tmp_path):
    contents = read(tmp_path)
    later = make_batch("q turn 2", [2, 2])
    write_rows(tmp_path, (1, 0, make_batch("q turn 1", [0, 1])), (1, 1, later), (8, 0, make_batch("q turn 1", [2])))
    (rates,) = read_rates(tmp_path, contents)
    assert rates["Request_AL"] == {"q": {"0": 1.5, "1": 3.0}} and rates["Average_AL"] == 2.25
    assert rates["Acceptance_Length_Histogram"] == {"1": 1, "2": 1, "3": 2}
    write_rows(tmp_path, (8, 0, later))  # the record's load has no rows
    assert "Request_AL" not in read_rates(tmp_path, contents)[0]
    (tmp_path / "rows.jsonl").write_text('{"requests": 1, "wave": 0, "drafted": {"answers": []}}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: no row of specdec judge"):
        read_rates(tmp_path, contents)


def test_rows_belong_to_the_record_of_their_own_folder(tmp_path):
    """A folder of many records has no rows of them all."""
    write_rows(tmp_path, (1, 0, make_batch("q", [0, 1])))
    write_document(tmp_path / "a.json")
    assert "Request_AL" not in read_rates(tmp_path, records.read_records([str(tmp_path)]))[0]
