"""Tests of specdec/measuring/record.py: documents are read as they were written, others are refused with the field."""

import json

import jsonschema
import pytest

from specdec.measuring import record
from specdec.measuring.record import ABSENCE_SCHEMA, SCHEMA, Absence, Record

DOCUMENT = {
    "schema": SCHEMA,
    "when": "2026-11-28T10:00:00+00:00",
    "target": {"name": "small"},
    "drafter": {"name": "head", "method": "eagle3", "layers": 1},
    "engine": {"name": "specdec", "flags": ["--port 1"]},
    "machine": {"device": "x86_64", "busy": 0.25},
    "protocol": {"suite": "mine", "endpoint": "v1/completions", "temperature": 0, "max_tokens": 16},
    "counting": {"source": "per_request"},
    "loads": [{"at_once": 1, "prompts": 4, "tau": [2.0, 1.5, 2.5], "by_position": [0.5]}],
    "by": {"category": {"a": {"prompts": 4, "tau": [2.0, None, None]}}},
    "checks": {"control": {"plain_plain": [3, 4], "drafted_plain": [2, 4], "p_value": 0.5}, "repeat": [4, 4]},
}


def test_a_document_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "record.json"
    record.write_record(path, Record.model_validate_json(json.dumps(DOCUMENT)))
    written = json.loads(path.read_text())
    jsonschema.validate(written, record.make_schema())
    judged = record.read_record(path)
    assert isinstance(judged, Record) and judged.loads[0].tau == (2.0, 1.5, 2.5)
    assert written["checks"]["control"] == DOCUMENT["checks"]["control"] and written["loads"][0]["speedup"] is None

    document = {"schema": ABSENCE_SCHEMA, "drafter": "mtp", "engine": "llamacpp", "reason": "It has no such module."}
    path.write_text(json.dumps(document))
    assert record.read_record(path) == Absence.model_validate(document)
    jsonschema.validate(document, record.make_schema())


@pytest.mark.parametrize(
    ("keys", "value", "field"),
    [
        (["schema"], "specdec/record/2", "the document"),
        (["loads"], [], "loads"),
        (["loads", 0, "tau"], [2.0, 1.5], "loads.0.tau"),
        (["engine", "verison"], "1", "engine.verison"),
        (["counting", "source"], "guess", "counting.source"),
        (["machine", "busy"], 1.5, "machine.busy"),
    ],
)
def test_another_document_is_refused_with_its_field(tmp_path, keys, value, field):
    document = json.loads(json.dumps(DOCUMENT))
    *outer, last = keys
    place = document
    for key in outer:
        place = place[key]
    place[last] = value
    path = tmp_path / "record.json"
    path.write_text(json.dumps(document))
    with pytest.raises(
        ValueError, match=rf"record\.json is no record of specdec judge \(.*{field}.*: .*record\.schema"
    ):
        record.read_record(path)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, record.make_schema())


def test_no_file_and_no_json_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cannot be read"):
        record.read_record(tmp_path / "none.json")
    (tmp_path / "cut.json").write_text('{"schema": ')
    with pytest.raises(ValueError, match=r"cut\.json is no record of specdec judge \(the document: Invalid JSON"):
        record.read_record(tmp_path / "cut.json")


def test_the_schema_beside_the_module_is_that_of_the_models():
    assert json.loads(record.SCHEMA_FILE.read_text()) == record.make_schema()  # python -m specdec.measuring.record
