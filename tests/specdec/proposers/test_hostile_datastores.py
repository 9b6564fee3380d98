"""Datastores that a stranger made to run code, to take memory or to reach other files."""

import pickle
import struct
import zipfile

import numpy
import pytest

from specdec.proposers import datastore
from tests.support.hostile import DEEP, HUGE, Touch


@pytest.fixture
def store(tmp_path):
    folder = tmp_path / "store"
    tokens = datastore.join_texts([[1, 2, 3]])
    about = {"tokenizer_fingerprint": "x", "num_texts": 1, "length": 4}
    datastore.write_datastore(folder, tokens, datastore.sort_places(tokens, 4), about)
    assert datastore.read_datastore(folder, "x")
    return folder


def header(shape: str, dtype: str = "<i4") -> bytes:
    text = f"{{'descr': '{dtype}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode()


ARRAYS = {
    "pickle": None,
    "array of objects": None,
    "archive": None,
    "huge shape": header(f"({HUGE},)"),
    "shape that overflows": header(f"({2**62}, {2**62})"),
    "negative shape": header("(-5,)"),
    "object dtype": header("(5,)", "|O"),
    "code in the header": header("(__import__('os').system('true'),)"),
    "deep header": header("(" * 5000 + ")" * 5000),
    "empty": b"",
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays(store, marker, little_memory, kind):
    path = store / "tokens.npy"
    if kind == "pickle":
        path.write_bytes(pickle.dumps(Touch(marker)))
    elif kind == "array of objects":
        numpy.save(path, numpy.array([Touch(marker)] * 5, dtype=object), allow_pickle=True)
    elif kind == "archive":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("tokens.npy", header("(5,)") + bytes(2**25))
    else:
        path.write_bytes(ARRAYS[kind])
    with pytest.raises(ValueError, match="damaged"):
        datastore.read_datastore(store, "x")


@pytest.mark.parametrize("name", ["datastore.json", "tokens.npy", "suffixes.npy"])
def test_links_out_of_a_datastore(store, tmp_path, name):
    (store / name).rename(tmp_path / name)
    (store / name).symlink_to(tmp_path / name)
    with pytest.raises(ValueError, match="Links out of a folder"):
        datastore.read_datastore(store, "x")


@pytest.mark.parametrize("content", [DEEP, "[]", "1e999", '{"length": 1e999}', '{"length": ' + "9" * 10_000 + "}"])
def test_json_of_a_datastore(store, content):
    (store / "datastore.json").write_text(content)
    with pytest.raises(ValueError, match="damaged"):
        datastore.read_datastore(store, "x")
