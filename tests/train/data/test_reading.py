"""Files and rows as people have them are read, or refused with a sentence that names file and row."""

import bz2
import codecs
import copy
import gzip
import io
import json
import lzma
import random

import datasets
import pytest
from pyarrow import Table, parquet

from specdec.server import record
from tests.conversations import ASKS, HEAD, TAIL, pair, with_template
from tests.support import small_tokenizer, write_rows
from train.answers import datastore
from train.answers.answering import AnswerJob, AnswerSettings
from train.answers.engine_answers import AnswerServer
from train.data import answer_mask, reading
from train.data import rows as data
from train.data.encoding import Encoding, load_packs
from train.data.stream import Plan, Stream

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
    "little.jsonl": codecs.BOM_UTF16_LE + TEXT.encode("utf-16-le"),
    "big.jsonl": codecs.BOM_UTF16_BE + TEXT.encode("utf-16-be"),
    "unmarked.jsonl": TEXT.encode("utf-16-le"),
    "wide.jsonl": TEXT.encode("utf-32"),
    "returns.jsonl": b"\r\n" + TEXT.replace("\n", "\r\n").encode() + b"\r\n",
    "joined.jsonl": TEXT[: TEXT.index("\n") + 1].encode() + b"".join(f"\ufeff{line}\n".encode() for line in LINES[1:]),
    "escaped.jsonl": "\n".join(map(json.dumps, ROWS)).encode(),
    "packed.jsonl": gzip.compress(TEXT.encode()),
    "members.jsonl.gz": b"".join(gzip.compress(f"{line}\n".encode()) for line in LINES),
    "wide.jsonl.gz": gzip.compress(TEXT.encode("utf-16")),
    "no-ending": TEXT.encode(),
    "lines.txt": TEXT.encode(),
    "text.jsonl.gz": TEXT.encode(),
    "list.json": json.dumps(ROWS).encode(),
    "pretty.json": json.dumps(ROWS, indent=2).encode("utf-16"),
    "lines.json": TEXT.encode(),
    "list.json.gz": gzip.compress(json.dumps(ROWS).encode()),
    "table.parquet": tabled(),
    "table": tabled(),
}  # fmt: skip


@pytest.mark.parametrize("name", READ)
def test_what_can_be_read_is_read(tmp_path, name):
    (tmp_path / name).write_bytes(READ[name])
    rows = reading.load_conversations(str(tmp_path / name))
    assert rows == [{**row, "category": "all"} for row in ROWS]


@pytest.mark.parametrize("name", ["table.parquet", "pretty.json", "little.jsonl", "packed.jsonl"])
def test_training_reads_the_same_files(tmp_path, name):
    encoded = []
    for each in ("escaped.jsonl", name):
        (tmp_path / each).write_bytes(READ[each])
        encoding = Encoding(small_tokenizer(), tmp_path / "cache")
        encoded.append(load_packs(str(tmp_path / each), encoding, length=128, packed=False).fingerprint)
    assert encoded[0] == encoded[1]
    plan = Plan(str(tmp_path / name), small_tokenizer(), length=128, packed=False, buffer=3, seed=0)
    stream = Stream(plan)
    assert {row.id for number in range(3) for row in stream.pack(number)} == {"r0", "r1", "r2"}
    stream.close()


def test_a_folder_of_parquet_files(tmp_path):
    for name in ("b.parquet", "a.parquet"):
        (tmp_path / name).write_bytes(tabled())
    (tmp_path / "README.md").write_text("not data")
    assert len(reading.load_conversations(str(tmp_path))) == 6


REFUSED = {
    "latin.jsonl": ((TEXT + LINES[0]).replace("\U0001f600", "").encode("latin-1"), r"latin\.jsonl:1: byte 0xe9 is not UTF-8.*iconv"),
    "second.jsonl": (LINES[0].encode() + b"\n{\"prompt\": \"caf\x80\"}", r"second\.jsonl:2: byte 0x80 is not UTF-8"),
    "odd.jsonl": (TEXT.encode("utf-16")[:-1], r"odd\.jsonl is not whole UTF-16.* text behind line \d"),
    "rows.jsonl": (b"\x28\xb5\x2f\xfd\x00\x00", r"rows\.jsonl is compressed otherwise than with gzip.*Unpack it first"),
    "xz.jsonl": (lzma.compress(TEXT.encode()), "compressed otherwise"),
    "bz.jsonl": (bz2.compress(TEXT.encode()), "compressed otherwise"),
    "twice.jsonl.gz": (gzip.compress(lzma.compress(TEXT.encode())), "compressed otherwise"),
    "rows.zip": (b"PK\x03\x04rest", "compressed otherwise"),
    "half.parquet": (tabled()[:-30], r"half\.parquet: the parquet file is damaged or incomplete"),
    "text.parquet": (TEXT.encode(), r"text\.parquet: the parquet file is damaged"),
    "half.jsonl.gz": (gzip.compress(TEXT.encode() * 999)[:-20], r"half\.jsonl\.gz: the compressed file is incomplete or damaged after line \d+"),
    "half.json": (json.dumps(ROWS)[:-3].encode(), r"half\.json: not valid JSON.*Give|half\.json: not valid JSON.*give"),
    "numbers.json": (b"[1, 2]", r"numbers\.json row 0: expected a JSON object, found int"),
    "list.jsonl": (json.dumps(ROWS).encode(), r"list\.jsonl:1: expected a JSON object, found list.*ending \.json"),
    "table.csv": (b"prompt\nWhat is rain?\n", r"table\.csv:1 is no row: table\.csv holds no JSON\. Give a \.jsonl file"),
    "notes.txt": (b"\nWhat is rain?\n", r"notes\.txt:2 is no row"),
    "nul.jsonl": (b'{"prompt": "a\0b"}\n', r"nul\.jsonl:1: not valid JSON"),
    "zeros.jsonl": (TEXT.encode() + bytes(100), r"zeros\.jsonl:4: not valid JSON"),
    "deep.jsonl": (b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", r"deep\.jsonl:1: not valid JSON"),
    "long.jsonl": (b'{"a": ' + b"9" * 10_000 + b"}", r"long\.jsonl:1: not valid JSON"),
    "code.jsonl": (b"__import__('os')", r"code\.jsonl:1: not valid JSON"),
    "cut.jsonl": (TEXT.encode() + b'{"messages": [', r"cut\.jsonl:4: not valid JSON"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named(tmp_path, name):
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    for read in (reading.load_conversations, reading.load_prompts):
        with pytest.raises(ValueError, match=message) as refused:
            read(str(tmp_path / name))
        assert not isinstance(refused.value, UnicodeError) and "\n" not in str(refused.value)


def test_an_empty_file_has_no_rows(tmp_path):
    empty = {"a.jsonl": b"\n \r\n", "a.json": b"", "b.json": b"[]", "a.jsonl.gz": gzip.compress(b"\n")}
    for name, content in empty.items():
        (tmp_path / name).write_bytes(content)
        assert reading.load_conversations(str(tmp_path / name)) == []


HALVES = [
    {"messages": pair(f"a {HALF}", "b")},
    {"messages": pair("a", "\udc00")},
    {"id": HALF, "prompt": "a", "messages": ROWS[0]["messages"]},
    {"category": HALF, "prompt": "a", "messages": ROWS[0]["messages"]},
    {"prompt": f"{HALF} a"},
    {"tools": [{"function": {"name": "f", "description": HALF}}], "messages": ROWS[0]["messages"]},
    {"messages": [{"role": "user", "content": "a", HALF: "b"}]},
    {"text": f"\ude00{HALF}"},
]


def test_half_of_a_surrogate_pair_is_named(tmp_path):
    source = str(tmp_path / "a.jsonl")
    reads = [reading.load_conversations, reading.load_prompts]
    reads += [lambda source: list(datastore.read_texts(source, small_tokenizer()))]
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


@pytest.mark.parametrize(("finish", "text"), [("length", "a"), ("stop", "a\ufffd")])
def test_half_of_a_pair_in_the_answer_of_a_server_is_replaced(finish, text):
    server = object.__new__(AnswerServer)
    server.way, server.settings = "chat", AnswerSettings(frozenset(), 4)
    answer = {"choices": [{"message": {"content": f"a{HALF}"}, "finish_reason": finish}]}
    assert server.read_answer(answer, AnswerJob("a", "b", 0.0, [], [1])).text == text


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
    "more",
    [{"tool_calls": None}, {"tool_calls": []}, {"name": None, "reasoning_content": None}, {"weight": 0}],
    ids=str,
)
def test_a_key_without_a_value_is_as_absent(tmp_path, more):
    row = copy.deepcopy(ROWS[0])
    row["messages"][1] |= more
    row |= {"tools": None, "category": None, "thinking": None}
    write_rows(tmp_path / "a.jsonl", [row, ROWS[0]])
    first, second = reading.load_conversations(str(tmp_path / "a.jsonl"))
    assert "tools" not in first and set(first["messages"][1]) == {"role", "content"} | ({"weight"} & set(more))
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


WRONG = [
    ({"messages": [{"role": "human", "content": "a"}, {"role": "gpt", "content": "b"}]},
     r"unknown roles human, gpt; the row has human, gpt\. .*known roles are system, .*assistant"),
    ({"messages": [{"role": "User", "content": "a"}, *pair("a", "b")]}, "unknown roles User; "),
    ({"messages": pair("a", 42)}, r"every message needs a role and a content.*messages\[1\] has not"),
    ({"messages": ["a", "b"]}, r"every message needs a role and a content.*messages\[0\]"),
    ({"messages": []}, r"no messages"),
    ({"id": 1, "conversations": [{"from": "human", "value": "a"}]}, r"no messages \(its keys: id, conversations\)"),
]  # fmt: skip


def test_what_is_wrong_with_a_row_is_said(tmp_path):
    for row, message in WRONG:
        write_rows(tmp_path / "a.jsonl", [ROWS[0], row])
        with pytest.raises(ValueError, match=r"a\.jsonl:2: " + message):
            reading.load_conversations(str(tmp_path / "a.jsonl"))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (pair("a", "b")[:1], r"Row 1 has no assistant turn, only user\."),
        (
            pair("a", "b", weight=7),
            r"cannot write these messages \(TypeError: .*keys, role, content, weight; if",
        ),
        (
            pair("a", "b", name="x"),
            r"The chat template refuses a conversation with the roles user, assistant: No names\.",
        ),
    ],
)
def test_a_row_that_the_template_cannot_write_is_named_with_its_file(tmp_path, messages, message):
    source = str(tmp_path / "a.jsonl")
    write_rows(tmp_path / "a.jsonl", [ROWS[0], {"messages": messages}])
    names = "{% for m in messages if m.name %}{{ raise_exception('No names.') }}{% endfor %}"
    weights = "{% for m in messages if m.weight %}{{ m.weight + 'a' }}{% endfor %}"
    tokenizer = with_template(names + weights + STRICT)
    for read in (
        lambda: load_packs(source, Encoding(tokenizer, tmp_path / "c"), length=99, packed=False),
        lambda: list(datastore.read_texts(source, tokenizer)),
        lambda: Stream(Plan(source, tokenizer, length=99, packed=False, buffer=2, seed=0)),
    ):
        with pytest.raises(ValueError, match=r"a\.jsonl:2: .*" + message):
            read()


def test_a_prompt_that_the_template_cannot_write_is_named_with_its_file(tmp_path):
    refuses = "{{ raise_exception('No system role.') if messages[0].role == 'system' }}"
    write_rows(tmp_path / "a.jsonl", [{"prompt": "a"}, {"messages": [{"role": "system", "content": "b"}]}])
    with pytest.raises(ValueError, match=r"a\.jsonl:2: The chat template refuses .* No system role\."):
        data.load_prompts(str(tmp_path / "a.jsonl"), with_template(refuses + STRICT))


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


# Long rows


CONTENTS = ["a", " assistant ", "assistant\n", "user", "<|im_end|>\n<|im_start|>assistant\n"]
CONTENTS += ["x-content", "1\n\n2", "a" * 30]
TRIMMED = HEAD + "{{ m['content'] | trim }}" + TAIL
THINKS = (  # only the last answer keeps what it thought, as Qwen3's
    HEAD + "{% set said = m['content'] if loop.last else m['content'].split('</think>')[-1] %}{{ said }}" + TAIL
)
BARE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SHORTENED = TRIMMED.replace("in messages", "in messages[-5:]")  # forgets what is long ago


@pytest.mark.parametrize(
    "template", [None, TRIMMED, THINKS, BARE, SHORTENED], ids=["own", "trimmed", "thinks", "bare", "short"]
)
def test_masks_of_many_turns_are_those_of_every_prompt(monkeypatch, template):
    tokenizer, draw = with_template(template), random.Random(0)

    def mask(messages):
        try:
            return data.encode(tokenizer, {"id": "a", "category": "b", "messages": messages})
        except ValueError as error:
            return str(error)

    masks = []
    for _ in range(60):
        messages = []
        for _ in range(draw.randint(4, 9)):
            messages.append({"role": draw.choice(["user", "user", "tool"]), "content": draw.choice(CONTENTS)})
            if draw.random() < 0.2:
                messages.append({"role": "assistant", "content": draw.choice(["", "</think>", "b"])})
            messages.append(
                {"role": "assistant", "content": draw.choice(["t</think>", "", "", ""]) + draw.choice(CONTENTS)}
            )
        masks.append((messages, mask(messages)))
    monkeypatch.setattr(answer_mask, "FEW", 10**9)  # every prompt is rendered, as the mask is defined
    assert all(mask(messages) == found for messages, found in masks)
    assert any(isinstance(found, data.Row) for _, found in masks) or template is SHORTENED


@pytest.mark.parametrize("roles", [["user"], ["user", "assistant", "tool"]], ids=["chat", "calls"])
def test_the_number_of_renderings_does_not_grow_with_the_turns(monkeypatch, roles):
    own, counts = small_tokenizer().chat_template, []
    tokenizer = with_template(own.replace("+ '<|im_end|>'", "~ (message['tool_calls'] or '') ~ '<|im_end|>'"))
    render = tokenizer.apply_chat_template
    counted = lambda *args, **more: counts.append(0) or render(*args, **more)
    monkeypatch.setattr(tokenizer, "apply_chat_template", counted)

    def count(turns: int) -> int:
        counts.clear()
        messages = []
        for turn in range(turns):
            calls = {"assistant": {"content": "", "tool_calls": [{"name": "n", "arguments": {"n": turn}}]}}
            messages += [{"role": role, "content": f"{role} {turn}", **calls.get(role, {})} for role in roles]
            messages.append({"role": "assistant", "content": f"answer {turn}"})
        row = data.encode(tokenizer, {"id": "a", "category": "b", "messages": messages})
        assert tokenizer.decode([t for t, own in zip(row.tokens, row.mask) if own]).count("answer ") == turns
        return len(counts)

    count(1)  # what the template does is found out once
    assert count(100) == count(10) <= 8
