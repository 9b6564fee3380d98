"""Files and rows as people have them are read, or refused with a sentence that names file and row."""

import copy
import gzip
import io
import json
import lzma
import re

import datasets
import pytest
from pyarrow import Table, parquet

from specdec.proposers import datastore_texts
from specdec.text import conversations as data
from specdec.text import reading
from specdec.tools.server import record
from tests.support.commands import write_rows
from tests.support.conversations import ASKS, pair, with_template
from tests.support.runs import load_packs
from tests.support.targets import small_tokenizer
from train.data.encoding import Encoding

ROWS = [{"id": f"r{n}", "messages": pair(f"Count to {n}. \u00e9", "Hello \U0001f600")} for n in range(3)]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]
TEXT = "\n".join(LINES) + "\n"
CALL = {"type": "function", "function": {"name": "f", "arguments": {"a": None}}}
HALF = "\ud83d"


def tabled() -> bytes:
    file = io.BytesIO()
    parquet.write_table(Table.from_pylist(ROWS), file)
    return file.getvalue()


READ = {
    "mark.jsonl": TEXT.encode("utf-8-sig"),
    "returns.jsonl": b"\r\n" + TEXT.replace("\n", "\r\n").encode() + b"\r\n",
    "joined.jsonl": TEXT[: TEXT.index("\n") + 1].encode() + b"".join(f"\ufeff{line}\n".encode() for line in LINES[1:]),
    "escaped.jsonl": "\n".join(map(json.dumps, ROWS)).encode(),
    "packed.jsonl": gzip.compress(TEXT.encode()),
    "members.jsonl.gz": b"".join(gzip.compress(f"{line}\n".encode()) for line in LINES),
    "no-ending": TEXT.encode(),
    "list.json": json.dumps(ROWS).encode(),
    "pretty.json": json.dumps(ROWS, indent=2).encode(),
    "list.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "table.parquet": tabled(),
    "table": tabled(),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_can_be_read_is_read(tmp_path, name):
    """By training, too."""
    fingerprints, encoding = set(), Encoding(small_tokenizer(), tmp_path / "cache")
    for each in ("escaped.jsonl", name):
        (tmp_path / each).write_bytes(READ[each])
        rows = reading.load_conversations(str(tmp_path / each))
        assert rows == [{**row, "category": "all"} for row in ROWS]
        fingerprints.add(load_packs(str(tmp_path / each), encoding, length=128, packed=False).fingerprint)
    assert len(fingerprints) == 1


def test_a_folder_of_parquet_files(tmp_path):
    for name in ("b.parquet", "a.parquet"):
        (tmp_path / name).write_bytes(tabled())
    (tmp_path / "README.md").write_text("not data")
    assert len(reading.load_conversations(str(tmp_path))) == 6


REFUSED = {
    "latin.jsonl": ((TEXT + LINES[0]).replace("\U0001f600", "").encode("latin-1"), ":1: byte 0xe9 is not UTF-8.*iconv"),
    "second.jsonl": (LINES[0].encode() + b"\n{\"prompt\": \"caf\x80\"}", ":2: byte 0x80 is not UTF-8"),
    "wide.jsonl": (TEXT.encode("utf-16"), ":1: byte 0xff is not UTF-8.*Save the file as UTF-8, compressed with gzip"),
    "rows.jsonl": (b"\x28\xb5\x2f\xfd\x00\x00", ":1: byte 0xb5 is not UTF-8"),
    "twice.jsonl.gz": (gzip.compress(lzma.compress(TEXT.encode())), ".* is not UTF-8"),
    "half.parquet": (tabled()[:-30], ": the parquet file is damaged or incomplete"),
    "half.jsonl.gz": (gzip.compress(TEXT.encode() * 999)[:-20],
                      r": the compressed file is incomplete or damaged after line \d+"),
    "half.json": (json.dumps(ROWS)[:-3].encode(), ": not valid JSON.*[Gg]ive"),
    "list.jsonl": (json.dumps(ROWS).encode(), r":1: expected a JSON object, found list.*ending \.json"),
    "table.csv": (b"prompt\nWhat is rain?\n", r":1 is no row: table\.csv holds no JSON\. Give a \.jsonl file"),
    "notes.txt": (b"\nWhat is rain?\n", ":2 is no row"),
    "nul.jsonl": (b'{"prompt": "a\0b"}\n', ":1: not valid JSON"),
    "deep.jsonl": (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", ":1: not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(tmp_path, name):
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    for read in (reading.load_conversations, reading.load_prompts):
        with pytest.raises(ValueError, match=re.escape(name) + message) as refused:
            read(str(tmp_path / name))
        assert not isinstance(refused.value, UnicodeError) and "\n" not in str(refused.value)


def test_an_empty_file_has_no_rows(tmp_path):
    empty = {"a.jsonl": b"\n \r\n", "a.json": b"", "b.json": b"[]", "a.jsonl.gz": gzip.compress(b"\n")}
    for name, content in empty.items():
        (tmp_path / name).write_bytes(content)
        assert reading.load_conversations(str(tmp_path / name)) == []


HALVES = [
    {"messages": pair(f"a {HALF}", "b")},
    {"id": HALF, "prompt": "a", "messages": ROWS[0]["messages"]},
    {"tools": [{"function": {"name": "f", "description": HALF}}], "messages": ROWS[0]["messages"]},
    {"text": f"\ude00{HALF}"},
]


def test_half_of_a_surrogate_pair_is_named(tmp_path):
    source = str(tmp_path / "a.jsonl")
    reads = [reading.load_conversations, reading.load_prompts]
    reads += [lambda source: list(datastore_texts.read_texts(source, small_tokenizer()))]
    reads += [lambda source: load_packs(source, Encoding(small_tokenizer(), tmp_path / "c"), length=99, packed=False)]
    for row in HALVES:
        write_rows(tmp_path / "a.jsonl", [ROWS[0], row])
        for read in reads:
            with pytest.raises(ValueError, match=r'a\.jsonl:2: "\w+" has half of a surrogate pair') as refused:
                read(source)
            str(refused.value).encode()  # it can be printed


def test_whole_pairs_and_written_escapes_are_text(tmp_path):
    content = "\U0001f600 \\ud83d"  # the second is six characters that somebody wrote
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": content}))
    assert reading.load_prompts(str(tmp_path / "a.jsonl"))[0]["messages"][0]["content"] == content


def test_a_typed_prompt_that_is_no_text_is_refused():
    typed = b"caf\xe9".decode("utf-8", "surrogateescape")  # as sys.argv has it
    with pytest.raises(ValueError, match=r"half of a surrogate pair.*typed in UTF-8"):
        data.encode_prompt(small_tokenizer(), [{"role": "user", "content": typed}])


def test_half_of_a_pair_in_recorded_rows_counts_as_damage(tmp_path):
    write_rows(tmp_path / "traffic-000001.jsonl", [{"id": "a"}, {"id": "b", "messages": [{"content": HALF}]}])
    assert [row for _, row in record.read_lines([tmp_path / "traffic-000001.jsonl"])] == [{"id": "a"}, None]


# Rows


STRICT = (  # fails for keys that are there without a value, as templates of tool models do
    "{% for m in messages %}{% if 'tool_calls' in m %}{{ 'calls' ~ (m.tool_calls | length) }}"
    "{% if m.tool_calls | length == 0 %}{{ raise_exception('Only one call at once.') }}{% endif %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
) + ASKS


@pytest.mark.parametrize(
    "fields",
    [{"tool_calls": None}, {"tool_calls": []}, {"name": None, "reasoning_content": None}, {"weight": 1}],
    ids=str,
)
def test_a_key_without_a_value_is_as_absent(tmp_path, fields):
    row = copy.deepcopy(ROWS[0])
    row["messages"][1] |= fields
    row |= {"tools": None, "category": None, "thinking": None}
    write_rows(tmp_path / "a.jsonl", [row, ROWS[0]])
    first, second = reading.load_conversations(str(tmp_path / "a.jsonl"))
    assert "tools" not in first and set(first["messages"][1]) == {"role", "content"}
    tokenizer = with_template(STRICT)
    assert data.encode(tokenizer, first).tokens == data.encode(tokenizer, second).tokens


def test_a_call_needs_no_content_and_keeps_its_nulls(tmp_path):
    calls = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    bare = {"role": "assistant", "tool_calls": [CALL]}
    write_rows(tmp_path / "a.jsonl", [{"messages": [ROWS[0]["messages"][0], each]} for each in (calls, bare)])
    for row in reading.load_conversations(str(tmp_path / "a.jsonl")):
        assert row["messages"][1] == {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_nulls_of_arrow_are_absent_keys_at_any_depth(tmp_path):
    """Arrow gives every struct of a column all keys that any of them has."""
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": 1}, {"b": "x"})]
    messages = [ROWS[0]["messages"][0], {"role": "assistant", "tool_calls": calls}]
    datasets.Dataset.from_list([{"messages": messages}]).save_to_disk(tmp_path / "saved")
    (row,) = reading.load_conversations(str(tmp_path / "saved"))
    assert row["messages"] == [messages[0], messages[1] | {"content": ""}]


NUMBERED = r"messages\[1\]: "
WRONG = [
    ({"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]},
     r"unknown roles human, gpt; the row has human, gpt\. .*known roles are system, .*assistant"),
    ({"messages": [{"role": "User", "content": "a"}, *pair("a", "b")]}, "unknown roles User; "),
    ({"messages": pair("a", 42)}, r"every message needs a role and a content.*messages\[1\] has not"),
    ({"messages": ["a", "b"]}, r"every message needs a role and a content.*messages\[0\]"),
    ({"messages": []}, r"no messages"),
    ({"id": 1, "conversations": [{"from": "human", "value": "a"}]}, r"no messages \(its keys: id, conversations\)"),
]  # fmt: skip
WRONG_EVERYWHERE = [  # of prompts, too
    ({"messages": pair("a", "b"), "tools": [1]}, "tools must be a list"),
    ({"messages": pair("a", "b"), "tools": "get_tide"}, "tools must be a list"),
    ({"messages": pair("a", "b", tool_calls="x")}, "tool_calls must be a list"),
    ({"messages": pair("a", "b", weight=0.5)}, NUMBERED + r"weight=0\.5 must be 0 or 1"),
    ({"messages": pair("a", "b", train="no")}, NUMBERED + r'train="no" must be 0 or 1'),
    ({"messages": pair("a", "b", weight=1, loss=False)}, NUMBERED + "weight and loss contradict each other"),
    (
        {"messages": pair("a", "b", reasoning="a", thinking="b")},
        NUMBERED + "reasoning and thinking hold different thoughts",
    ),
    ({"messages": pair("a", "b", reasoning={"text": "a"})}, NUMBERED + "reasoning must be a text"),
    (
        {"messages": pair("a", "b", role="user", weight=1)},
        NUMBERED + "weight=1: the assistant's messages alone are trained on",
    ),
    ({"messages": pair("a", "b", function_call=CALL["function"], tool_calls=[CALL])}, ".*function_call and tool_calls"),
]


def test_what_is_wrong_with_a_row_is_said(tmp_path):
    everywhere = [
        (load, *wrong) for wrong in WRONG_EVERYWHERE for load in (reading.load_conversations, reading.load_prompts)
    ]
    for load, row, message in [*((reading.load_conversations, *wrong) for wrong in WRONG), *everywhere]:
        write_rows(tmp_path / "a.jsonl", [ROWS[0], row])
        with pytest.raises(ValueError, match=r"a\.jsonl:2: " + message):
            load(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (pair("a", "b")[:1], r"Row 1 has no assistant turn, only user\."),
        (pair("a", "b", mass=7), r"cannot write these messages \(TypeError: .*keys, role, content, mass; if"),
        (pair("a", "b", name="x"), r"refuses a conversation with the roles user, assistant: No names\."),
    ],
)
def test_a_row_that_the_template_cannot_write_is_named_with_its_file(tmp_path, messages, message):
    source = str(tmp_path / "a.jsonl")
    write_rows(tmp_path / "a.jsonl", [ROWS[0], {"messages": messages}])
    names = "{% for m in messages if m.name %}{{ raise_exception('No names.') }}{% endfor %}"
    masses = "{% for m in messages if m.mass %}{{ m.mass + 'a' }}{% endfor %}"
    tokenizer = with_template(names + masses + STRICT)
    for read in (
        lambda: load_packs(source, Encoding(tokenizer, tmp_path / "c"), length=99, packed=False),
        lambda: list(datastore_texts.read_texts(source, tokenizer)),
    ):
        with pytest.raises(ValueError, match=r"a\.jsonl:2: .*" + message):
            read()
    if len(messages) > 1:
        write_rows(tmp_path / "a.jsonl", [{"prompt": "a"}, {"messages": [*messages, ROWS[0]["messages"][0]]}])
        with pytest.raises(ValueError, match=r"a\.jsonl:2: The chat template .*(No names|cannot write)"):
            data.load_prompts(source, tokenizer)


def test_ids_and_categories_of_any_type_are_texts(tmp_path):
    values = [5, 2.5, True, None, "math", ["a", 1], {"k": 1}, float("nan"), ""]
    source = str(tmp_path / "a.jsonl")
    write_rows(tmp_path / "a.jsonl", [{**ROWS[0], "id": value, "category": value} for value in values])
    for rows in (reading.load_conversations(source), reading.load_prompts(source)):
        assert [row["id"] for row in rows] == ["5", "2.5", "true", "3", "math", '["a", 1]', '{"k": 1}', "NaN", ""]
        assert [row["category"] for row in rows][:5] == ["5", "2.5", "true", "all", "math"]
    packs = load_packs(source, Encoding(small_tokenizer(), tmp_path / "c"), length=99, packed=False)
    assert sorted(row.category for pack in packs for row in pack) == sorted(row["category"] for row in rows)


def test_training_validates_on_a_split_and_on_categories_of_any_type(fit, folder, tmp_path):
    saved = datasets.Dataset.from_list(
        [{"prompt": "Count from 3.", "category": 5}, {"prompt": "Count on.", "category": 7}]
    )
    datasets.DatasetDict({"dev": saved, "test": saved}).save_to_disk(tmp_path / "heldout")
    given = [f"data.heldout={tmp_path}/heldout", "train.steps=1", "validation.auto=never"]
    with pytest.raises(ValueError, match=r"heldout has no split 'train'; it has: dev, test\..*data\.heldout_split="):
        fit("run", *given)
    assert fit("run", *given, "data.heldout_split=dev") == 0
    report = json.loads((tmp_path / "checkpoints" / "run" / "step_000001" / "report.json").read_text())
    assert set(report["by_category"]) == {"5", "7"}


def test_the_split_of_a_dataset_of_the_hub(monkeypatch):
    def load(source, config, *, split):
        if split not in ("train", "test"):
            raise ValueError(f'Unknown split "{split}". Should be one of ["train", "test"].')
        return split

    monkeypatch.setattr(datasets, "load_dataset", load)
    assert [reading.open_dataset("user/data", split) for split in (None, "test")] == ["train", "test"]
    with pytest.raises(ValueError, match=r"Could not read split 'dev' of 'user/data'.*one of ..train., .test"):
        reading.open_dataset("user/data", "dev")
