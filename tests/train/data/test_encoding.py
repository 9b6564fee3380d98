"""Tests of encoded data sets: the cache on disk, rows that hold token ids, mapped packs, weights."""

import copy
import gzip
import json
import multiprocessing
import os
import re
import signal
import time
from fractions import Fraction
from pathlib import Path

import datasets
import numpy
import pyarrow
import pytest
from transformers import AutoTokenizer

from specdec.core import files
from specdec.text import conversations, reading
from specdec.text.reading import read_sources
from tests.support.commands import ROOT, write_rows
from tests.support.conversations import conversations as write_conversations
from tests.support.conversations import pair
from tests.support.runs import load_packs
from tests.support.small_server import STOP
from tests.support.targets import REAL_TARGET, small_tokenizer
from train.data import packing
from train.data.encoding import Encoding
from train.data.packing import SCHEMA, EncodedRows, Packs, make_columns, pack_first_fit

pytestmark = pytest.mark.full

SHIPPED = ROOT / "data" / "train.jsonl"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REAL_TARGET)


@pytest.fixture
def load(tmp_path):
    """load(train, workers=1, length=64, ...): the packs of a source, with settings of Encoding and of load_packs"""

    def load(train, tokenizer=None, *, limit=None, workers=None, **settings) -> Packs:
        tokenizer = tokenizer or small_tokenizer()
        encoding = Encoding(tokenizer, tmp_path / "cache", limit=limit, workers=workers)
        return load_packs(train, encoding, **{"length": 64, "packed": False, **settings})

    return load


def list_ids(packs) -> list[str]:
    return [row.id for pack in packs for row in pack]


# The cache


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_from_the_cache_equal_those_encoded_one_by_one(load, tokenizer, tmp_path, workers, monkeypatch):
    monkeypatch.setattr("train.data.encoding.ROWS_PER_BATCH", 7)
    rows = reading.load_conversations(str(SHIPPED), limit=50)
    packs = load(str(SHIPPED), tokenizer, limit=50, workers=workers, length=4096)
    assert [pack[0] for pack in packs] == [conversations.encode(tokenizer, row) for row in rows]
    folders = sorted(path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert [folder.name.split("-")[0] for folder in folders] == ["rows"]


def test_a_second_start_encodes_nothing_and_every_change_is_noticed(load, tmp_path, monkeypatch):
    calls = []
    encode = conversations.encode
    monkeypatch.setattr(conversations, "encode", lambda *arguments: calls.append(arguments) or encode(*arguments))
    path = tmp_path / "rows.jsonl"
    source = write_conversations(path, 9)

    def encoded(**settings) -> int:
        calls.clear()
        load(source, **settings)
        return len(calls)

    assert encoded() == 9 and encoded() == 0 and encoded(limit=4) == 4
    before = path.stat()
    path.write_text(path.read_text().replace("Count from 3", "Count from 4"))  # of the same size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert encoded() == 9
    other = copy.deepcopy(small_tokenizer())
    other.chat_template = other.chat_template.replace("You are a helpful", "You are an unhelpful")
    assert other.chat_template != small_tokenizer().chat_template and encoded(tokenizer=other) == 9
    assert encoded() == 0
    for file in (tmp_path / "cache").glob("rows-*/encoded.arrow"):
        file.write_bytes(file.read_bytes()[:-9])
    with pytest.warns(UserWarning, match=r"rows-\w+ is damaged \(encoded.arrow has other bytes .* made again"):
        assert encoded() == 9


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', r"rows\.jsonl:3: not valid JSON"),
        ('{"id": "seven", "messages": [{"role": "user", "content": "Hi"}]}', "Row seven has no assistant turn"),
        (None, r"no rows in .*rows\.jsonl"),
    ],
)
def test_a_row_that_cannot_be_encoded_is_named(load, tmp_path, line, message):
    path = tmp_path / "rows.jsonl"
    rows = Path(write_conversations(tmp_path / "two.jsonl", 2)).read_text()
    path.write_text("\n" if line is None else rows + line + "\n")
    with pytest.raises(ValueError, match=message):
        load(str(path), workers=2)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_process_that_is_killed_is_a_sentence(load, tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "encode", lambda *arguments: os.kill(os.getpid(), signal.SIGKILL))
    with pytest.raises(ValueError, match=r"process that encoded .*rows\.jsonl ended .*lower workers=2"):
        load(write_conversations(tmp_path / "rows.jsonl", 9), workers=2)


def test_datasets_and_files_give_the_same_packs(load, tmp_path):
    shipped = reading.load_conversations(str(SHIPPED), limit=12)
    rows = [{"id": row["id"], "messages": row["messages"]} for row in shipped]
    saved = [{**row, "line": "a column of this name"} for row in rows]
    datasets.Dataset.from_list(saved).save_to_disk(tmp_path / "saved")
    (tmp_path / "files").mkdir()
    write_rows(tmp_path / "files" / "a.jsonl", rows[:5])
    (tmp_path / "files" / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows[5:])).encode()))
    packs = [load(str(tmp_path / name), length=512, packed=True) for name in ("saved", "files")]
    assert packs[0].fingerprint == packs[1].fingerprint and list_ids(packs[0]) == list_ids(packs[1])
    assert len(list_ids(load(str(tmp_path / "saved"), length=512, limit=5))) == 5


def test_progress_names_the_source_and_counts_rows_and_tokens(load, tmp_path, capsys):
    packs = load(write_conversations(tmp_path / "rows.jsonl", 30), length=4096)
    num_tokens = sum(len(pack[0].tokens) for pack in packs)
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"encoding rows.jsonl: 30/30 rows in \d+ s, {num_tokens:,} tokens, [\d,]+ tokens/s", last)


# Folders that are kept


def write_number(folder: Path) -> None:
    (folder / "number.bin").write_bytes(bytes(range(256)))


def keep(folder: Path, make=write_number) -> None:
    files.make_folder_once(folder, make)


def die(folder: Path) -> None:
    """Makes half a folder and is killed."""
    keep(folder, lambda partial: (write_number(partial), os.kill(os.getpid(), signal.SIGKILL)))


def count(folder: Path) -> None:
    def write_slowly(partial: Path) -> None:
        with (folder.parent / "calls").open("a") as file:
            file.write("made\n")
        time.sleep(0.3)
        write_number(partial)

    keep(folder, write_slowly)


def test_a_killed_process_leaves_nothing_wrong_and_of_several_one_makes_the_folder(tmp_path):
    fork, folder = multiprocessing.get_context("fork"), tmp_path / "kept"
    for jobs, status in (([die], -signal.SIGKILL), ([count] * 3, 0)):
        children = [fork.Process(target=job, args=(folder,)) for job in jobs]
        for child in children:
            child.start()
        for child in children:
            child.join(30)
        assert {child.exitcode for child in children} == {status} and folder.exists() == (status == 0)
    assert (tmp_path / "calls").read_text() == "made\n" and not list(tmp_path.glob("*.partial"))


def test_a_damaged_folder_is_made_again_and_a_full_disk_is_a_sentence(tmp_path):
    folder, path = tmp_path / "kept", tmp_path / "kept" / "number.bin"
    keep(folder)
    for damage in (
        lambda: path.write_bytes(bytes([1, *range(1, 256)])),
        lambda: path.write_bytes(bytes(range(100))),
        path.unlink,
        (folder / files.CHECKSUMS).unlink,
    ):
        damage()
        with pytest.warns(UserWarning, match="kept is damaged .* made again"):
            keep(folder)
        assert path.read_bytes() == bytes(range(256))

    def fill_disk(partial: Path) -> None:
        write_number(partial)
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"full could not be written .*No space.*Free some disk space"):
        keep(tmp_path / "full", fill_disk)
    assert {path.name for path in tmp_path.iterdir()} <= {"kept", "kept.lock", "full.lock"}


# Rows that hold the token ids that the target read and wrote


def make_kept_row(**changes) -> dict:
    tokenizer = small_tokenizer()
    digest, _ = conversations.find_vocabulary(tokenizer, len(tokenizer))
    messages = pair("a", "the the")
    prompt = conversations.encode_prompt(tokenizer, messages[:1])
    letters = [
        token for letter in "the the" for token in tokenizer(letter)["input_ids"]
    ]  # not as the tokenizer cuts it
    ids = {"tokens": [*prompt, *letters, STOP], "prompt_tokens": len(prompt), "tokenizer": digest}
    return {"id": "x", "category": "c", "messages": messages, **ids, **changes}


def test_ids_of_another_tokenizer_are_not_used():
    tokenizer = small_tokenizer()
    for row in (make_kept_row(tokenizer="0" * 16), make_kept_row(tokenizer=None)):
        with pytest.warns(UserWarning, match="Row x and perhaps others have token ids of another tokenizer"):
            assert conversations.encode(tokenizer, row) == conversations.encode(tokenizer, {**row, "tokens": None})
    longer = copy.deepcopy(tokenizer)
    longer.add_tokens(["something"])
    with pytest.warns(UserWarning, match="another tokenizer"):
        conversations.encode(longer, make_kept_row())
    others = make_kept_row(prompt_tokens=None, tokens=17, thinking="I think")  # fields of these names, but of others
    assert conversations.encode(tokenizer, others).tokens


@pytest.mark.parametrize(
    ("key", "values", "message"),
    [
        ("tokens", [[1, 2, 10**6], [1, 2, -1], [1, 2, True], "abc"], "tokens must be a list of ids from 0 to"),
        ("prompt_tokens", [0, 1.5, [3], 10**6], "and prompt_tokens=.* at least 1 and below their number"),
    ],
)
def test_ids_that_cannot_be_right_are_refused(key, values, message):
    for value in values:
        with pytest.raises(ValueError, match=f"Row x: .*{message}"):
            conversations.encode(small_tokenizer(), make_kept_row(**{key: value}))


# Packs


def test_packing_equals_the_obvious_first_fit():
    generator, capacity = numpy.random.default_rng(0), 50
    for num in (1, 2, 63, 64, 400):
        lengths = generator.integers(1, capacity + 1, num).tolist()
        free, expected = [], []
        for length in lengths:
            index = next((index for index, room in enumerate(free) if room >= length), len(free))
            free += [capacity] * (index == len(free))
            free[index] -= length
            expected.append(index)
        assert pack_first_fit(lengths, capacity).tolist() == expected


def test_packs_of_the_shipped_data_are_those_of_earlier_versions(load, tokenizer):
    """Runs that were begun before can be resumed."""
    with pytest.warns(UserWarning, match="cut at 256 tokens: 65 of 800; .* that long: 0"):
        packs = load(str(SHIPPED), tokenizer, length=256, packed=True)
    assert (len(packs), packs.fingerprint, packs.num_supervised) == (740, "1015e3d3075e1527", 84963)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_packs_are_mapped_and_not_loaded(tmp_path):
    def anonymous() -> int:
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    row = conversations.Row("a", "b", [*range(1000)], [False, True] * 500)
    table = pyarrow.Table.from_pylist([make_columns(row)] * 1000, SCHEMA)
    with pyarrow.ipc.new_stream(tmp_path / packing.ENCODED_FILE, SCHEMA) as file:
        for _ in range(10):
            file.write_table(table)
    del table
    pyarrow.default_memory_pool().release_unused()
    before = anonymous()
    packs = Packs(EncodedRows.load([tmp_path]), length=2048)
    assert len(packs) == 10_000 // 2 and packs[3][0] == row
    assert anonymous() - before < 15e6  # a quarter of the arrays' 50 MB


# Several sources


def test_forms_of_sources():
    one = Fraction(1)
    assert read_sources("a") == {"a": one} and read_sources(["a", "b"]) == {"a": one, "b": one}
    assert read_sources({"a": 2, "b": 0.5}) == {"a": one * 2, "b": one / 2}
    for wrong in ([], {}, ["a", "a"], {"a": 0}, {"a": -1.0}, {"a": "2"}, {"a": float("inf")}):
        with pytest.raises(ValueError, match="train="):
            read_sources(wrong)
    for weight, counts in ((2, [2] * 6), (0.5, [0, 1] * 3), (1.5, [1, 2] * 3)):
        assert packing.count_copies(6, Fraction(str(weight))).tolist() == counts


def test_weights_say_how_often_rows_occur(load, tmp_path):
    train = {write_conversations(tmp_path / "a.jsonl", 6): 2, write_conversations(tmp_path / "b.jsonl", 4): 0.5}
    packs = load(train, length=256)
    once = [f"a-{n}" for n in range(6)]
    assert list_ids(packs) == [*once, "b-1", "b-3", *once]
    both = load(list(train), length=256, packed=True)
    assert sorted(list_ids(both)) == sorted([*once, *(f"b-{n}" for n in range(4))])
    assert both.fingerprint != packs.fingerprint
    assert list_ids(load(list(train), tokens=1)) == ["a-0"]
    with pytest.raises(ValueError, match="Only 0 rows"):
        load(list(train), hold_out=1)


def test_hold_out_equals_that_of_scripts(load, tokenizer):
    rows = reading.load_conversations(str(SHIPPED), limit=40)
    held = reading.choose_held_out([row["temperature"] == 0 for row in rows], 5)
    rest = [row for index, row in enumerate(rows) if index not in held]
    packs = load(str(SHIPPED), tokenizer, limit=40, length=4096, hold_out=5)
    assert list_ids(packs) == [row["id"] for row in rest]
