"""Tests of the records beside a checkpoint, of which its model card has the figures."""

import hashlib

import pytest

from specdec.measuring.model_card import read_records_of_head
from tests.support.records import ABSENCE, write_document

WEIGHTS = b"weights"


def test_records_beside_a_checkpoint_are_of_its_weights(tmp_path):
    (tmp_path / "drafter.safetensors").write_bytes(WEIGHTS)
    digest = hashlib.sha256(WEIGHTS).hexdigest()
    for name, value in {"record.json": digest, "record-vllm.json": None}.items():
        write_document(tmp_path / name, drafter__digest=value)
    write_document(tmp_path / "other.json", drafter__digest="ee" * 32)  # not looked at
    assert list(read_records_of_head(tmp_path)) == ["record-vllm.json", "record.json"]
    (tmp_path / "drafter.safetensors").write_bytes(b"others")
    with pytest.raises(ValueError, match=r"record\.json is of other weights than .*: judge this head again"):
        read_records_of_head(tmp_path)


@pytest.mark.parametrize("document", [ABSENCE, {"schema": 1}])
def test_other_documents_of_that_name_are_refused(tmp_path, document):
    write_document(tmp_path / "record.json", document)
    with pytest.raises(ValueError, match=r"record\.json is (of no drafter|no record)"):
        read_records_of_head(tmp_path)
