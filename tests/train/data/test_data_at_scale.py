"""Tests of what lets data grow: the cache on disk, memory-mapped packs, weights, streams, reading ahead of the step."""

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
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from specdec.core import files
from tests.conversations import conversations, make_plan, read
from tests.support import REAL_TARGET, ROOT, write_rows
from train.data import packing, reading
from train.data import rows as data
from train.data.encoding import Encoding, load_packs
from train.data.packing import SCHEMA, Packs, Rows, first_fit
from train.data.stream import Stream

pytestmark = pytest.mark.slow

SHIPPED = ROOT / "data" / "train.jsonl"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(REAL_TARGET)


def ids(packs) -> list[str]:
    return [row.id for pack in packs for row in pack]


# The cache


@pytest.mark.parametrize("workers", [1, 2])
def test_rows_from_the_cache_equal_those_encoded_one_by_one(tokenizer, tmp_path, workers):
    rows = reading.load_conversations(str(SHIPPED), limit=50)
    packs = load_packs(
        str(SHIPPED), Encoding(tokenizer, tmp_path, limit=50, workers=workers), length=4096, packed=False
    )
    assert [pack[0] for pack in packs] == [data.encode(tokenizer, row) for row in rows]
    assert sorted(path.name.split("-")[0] for path in tmp_path.iterdir() if path.is_dir()) == ["packs", "rows"]


def test_a_second_start_encodes_nothing_and_every_change_is_noticed(tokenizer, tmp_path, monkeypatch):
    calls = []
    encode = data.encode
    monkeypatch.setattr(data, "encode", lambda *given: calls.append(given) or encode(*given))
    path = tmp_path / "rows.jsonl"
    source = conversations(path, 9)

    def encoded(**more) -> int:
        calls.clear()
        load_packs(
            source, Encoding(**{"tokenizer": tokenizer, "cache": tmp_path / "cache", **more}), length=64, packed=True
        )
        return len(calls)

    assert encoded() == 9 and encoded() == 0 and encoded(limit=4) == 4
    before = path.stat()
    path.write_text(path.read_text().replace("Count from 3", "Count from 4"))  # of the same size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert encoded() == 9
    other = AutoTokenizer.from_pretrained(REAL_TARGET)
    other.chat_template = other.chat_template.replace("You are a helpful", "You are an unhelpful")
    assert other.chat_template != tokenizer.chat_template and encoded(tokenizer=other) == 9
    assert encoded() == 0


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"messages": [', r"rows\.jsonl:3: not valid JSON"),
        ('{"messages": []}', r"rows\.jsonl:3: no messages"),
        ('{"id": "seven", "messages": [{"role": "user", "content": "Hi"}]}', "Row seven has no assistant turn"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_row_that_cannot_be_encoded_is_named(tokenizer, tmp_path, line, message, workers):
    path = tmp_path / "rows.jsonl"
    path.write_text(Path(conversations(tmp_path / "two.jsonl", 2)).read_text() + line + "\n")
    encoding = Encoding(tokenizer, tmp_path / "cache", workers=workers)
    with pytest.raises(ValueError, match=message):
        load_packs(str(path), encoding, length=64, packed=True)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_damaged_file_and_an_empty_file_are_refused(tokenizer, tmp_path):
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(SHIPPED.read_bytes())[:-20])
    (tmp_path / "empty.jsonl").write_text("\n")
    encoding = Encoding(tokenizer, tmp_path / "cache")
    for name, message in (("rows.jsonl.gz", r"incomplete or damaged after line \d+"), ("empty.jsonl", "no rows in")):
        with pytest.raises(ValueError, match=message):
            load_packs(str(tmp_path / name), encoding, length=64, packed=True)


def test_datasets_and_files_give_the_same_packs(tokenizer, tmp_path):
    rows = [{key: row[key] for key in ("id", "messages")} for row in reading.load_conversations(str(SHIPPED), limit=12)]
    datasets.Dataset.from_list([{**row, "line": "a column of this name"} for row in rows]).save_to_disk(
        tmp_path / "saved"
    )
    (tmp_path / "files").mkdir()
    write_rows(tmp_path / "files" / "a.jsonl", rows[:5])
    (tmp_path / "files" / "b.jsonl.gz").write_bytes(gzip.compress("\n".join(map(json.dumps, rows[5:])).encode()))
    encoding = Encoding(tokenizer, tmp_path / "cache")
    packs = [load_packs(str(tmp_path / name), encoding, length=512, packed=True) for name in ("saved", "files")]
    assert packs[0].fingerprint == packs[1].fingerprint and ids(packs[0]) == ids(packs[1])
    stream = Stream(make_plan(tokenizer, str(tmp_path / "saved"), length=512, packed=False, buffer=12))
    assert sorted(name for pack in read(stream, range(12)) for name in pack) == sorted(row["id"] for row in rows)


def write_number(folder: Path) -> None:
    (folder / "number.bin").write_bytes(bytes(range(256)))


def keep(folder: Path, make) -> None:
    files.keep_folder(folder, make, option="cache=")


def die(folder: Path) -> None:
    """Makes half a folder and is killed."""
    keep(folder, lambda partial: (write_number(partial), os.kill(os.getpid(), signal.SIGKILL)))


def count(folder: Path, calls: Path) -> None:
    def make(partial: Path) -> None:
        with calls.open("a") as file:
            file.write("made\n")
        time.sleep(0.3)
        write_number(partial)

    keep(folder, make)


def test_a_killed_process_leaves_nothing_wrong_and_of_several_one_makes_the_folder(tmp_path):
    fork, folder = multiprocessing.get_context("fork"), tmp_path / "kept"
    child = fork.Process(target=die, args=(folder,))
    child.start()
    child.join(30)
    assert child.exitcode == -signal.SIGKILL and not folder.exists()
    children = [fork.Process(target=count, args=(folder, tmp_path / "calls")) for _ in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join(30)
    assert [child.exitcode for child in children] == [0] * 3 and (tmp_path / "calls").read_text() == "made\n"
    assert (folder / "number.bin").exists() and not list(tmp_path.glob("*.partial"))


@pytest.mark.parametrize("damage", ["flipped", "truncated", "missing", "sums"])
def test_a_damaged_folder_is_made_again(tmp_path, damage):
    folder = tmp_path / "kept"
    keep(folder, write_number)
    path = folder / "number.bin"
    if damage == "flipped":
        path.write_bytes(bytes([1, *range(1, 256)]))
    elif damage == "truncated":
        os.truncate(path, 100)
    elif damage == "missing":
        path.unlink()
    else:
        (folder / files.CHECKSUMS).unlink()
    with pytest.warns(UserWarning, match="kept is damaged .* made again"):
        keep(folder, write_number)
    assert path.read_bytes() == bytes(range(256))


def test_a_full_disk_is_a_sentence(tmp_path):
    def make(partial: Path) -> None:
        write_number(partial)
        raise OSError(28, "No space left on device")

    with pytest.raises(ValueError, match=r"kept could not be written .*No space.*Free some disk space.*cache="):
        keep(tmp_path / "kept", make)
    assert {path.name for path in tmp_path.iterdir()} <= {"kept.lock"}


# Packs


@pytest.mark.parametrize("seed", range(6))
def test_packing_equals_the_obvious_first_fit(seed):
    generator = numpy.random.default_rng(seed)
    num, capacity = int(generator.integers(1, 400)), 50
    lengths = generator.integers(1, capacity + 1, num).tolist()
    free, expected = [], []
    for length in lengths:
        index = next((index for index, room in enumerate(free) if room >= length), len(free))
        free += [capacity] * (index == len(free))
        free[index] -= length
        expected.append(index)
    assert first_fit(lengths, capacity).tolist() == expected


def test_packs_of_the_shipped_data_are_those_of_earlier_versions(tokenizer, tmp_path):
    """Runs that were begun before can be resumed."""
    with pytest.warns(UserWarning, match="Of 800 rows, 65 are cut at 256 tokens and 0 are skipped"):
        packs = load_packs(str(SHIPPED), Encoding(tokenizer, tmp_path), length=256, packed=True)
    assert (len(packs), packs.fingerprint, packs.num_supervised) == (740, "1015e3d3075e1527", 84963)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_packs_are_mapped_and_not_loaded(tmp_path):
    def anonymous() -> int:
        return int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1]) * 1024

    num, length = 10_000, 1000
    ends = numpy.arange(num + 1, dtype=numpy.int32) * length
    tokens = numpy.arange(num * length, dtype=numpy.int32) % 977
    lists = {"tokens": tokens, "mask": (tokens % 2 == 0).astype(numpy.uint8)}
    columns = {name: pyarrow.ListArray.from_arrays(ends, values) for name, values in lists.items()}
    rest = {"id": ["a"], "category": ["b"], "supervised": [length // 2], "greedy": [False], "thinking": [0]}
    table = pyarrow.table(columns | {name: value * num for name, value in rest.items()}, schema=SCHEMA)
    with pyarrow.ipc.new_stream(tmp_path / "encoded.arrow", SCHEMA) as file:
        file.write_table(table, max_chunksize=1000)
    del tokens, lists, columns, table
    pyarrow.default_memory_pool().release_unused()
    before = anonymous()
    packs = Packs(Rows.load([tmp_path]), length=2048, folder=tmp_path / "packs")
    assert len(packs) == num // 2 and packs[3][0].tokens[:2] == [138, 139]
    assert anonymous() - before < 15e6  # a quarter of the arrays' 50 MB


# Several sources


def test_forms_of_sources():
    one = Fraction(1)
    assert reading.read_sources("a") == [reading.Source("a", one)]
    assert reading.read_sources(["a", "b"]) == [reading.Source("a", one), reading.Source("b", one)]
    assert reading.read_sources({"a": 2, "b": 0.5}) == [reading.Source("a", one * 2), reading.Source("b", one / 2)]
    for wrong in ([], {}, ["a", "a"], {"a": 0}, {"a": -1.0}, {"a": "2"}, {"a": float("inf")}):
        with pytest.raises(ValueError, match="train="):
            reading.read_sources(wrong)
    for weight, counts in ((2, [2] * 6), (0.5, [0, 1] * 3), (1.5, [1, 2] * 3)):
        assert packing.count_copies(6, Fraction(str(weight))).tolist() == counts
    assert reading.order_sources(reading.read_sources({"a": 1, "b": 0.5})) == [0, 0, 1]


def test_weights_say_how_often_rows_occur(tokenizer, tmp_path):
    train = {conversations(tmp_path / "a.jsonl", 6): 2, conversations(tmp_path / "b.jsonl", 4): 0.5}
    encoding = Encoding(tokenizer, tmp_path / "cache")
    packs = load_packs(train, encoding, length=64, packed=False)
    once = [f"a-{n}" for n in range(6)]
    assert ids(packs) == [*once, "b-1", "b-3", *once]
    both = load_packs(list(train), encoding, length=64, packed=True)
    assert sorted(ids(both)) == sorted([*once, *(f"b-{n}" for n in range(4))])
    assert both.fingerprint != packs.fingerprint
    first = load_packs(list(train), encoding, length=64, packed=False, tokens=1)
    assert ids(first) == ["a-0"]
    with pytest.raises(ValueError, match="Only 0 rows"):
        load_packs(list(train), encoding, length=64, packed=False, hold_out=1)


def test_hold_out_equals_that_of_scripts(tokenizer, tmp_path):
    rows = reading.load_conversations(str(SHIPPED), limit=40)
    _, rest = reading.hold_out(rows, 5)
    packs = load_packs(str(SHIPPED), Encoding(tokenizer, tmp_path, limit=40), length=4096, packed=False, hold_out=5)
    assert ids(packs) == [row["id"] for row in rest]


@pytest.mark.parametrize("given", ["[a.jsonl,data/b.jsonl]", "{a.jsonl: 2, data/b.jsonl: 0.5}"])
def test_several_sources_on_the_command_line(given):
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = compose("train", overrides=[f"data.train={given}"])
    found = reading.read_sources(OmegaConf.to_container(config.data)["train"])
    assert [source.name for source in found] == ["a.jsonl", "data/b.jsonl"]
    assert [float(source.weight) for source in found] == ([2, 0.5] if ":" in given else [1, 1])


def test_progress_names_the_source_and_counts_rows_and_tokens(tokenizer, tmp_path, capsys):
    source = conversations(tmp_path / "rows.jsonl", 30)
    encoding = Encoding(tokenizer, tmp_path / "cache")
    packs = load_packs(source, encoding, length=4096, packed=False)
    num_tokens = sum(len(pack[0].tokens) for pack in packs)
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.fullmatch(rf"encoding rows.jsonl: 30/30 rows in \d+ s, {num_tokens:,} tokens, [\d,]+ tokens/s", last)
