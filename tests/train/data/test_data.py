"""Tests of masks, rows and batches with the default target's tokenizer, and of files that scripts resume."""

import copy
import dataclasses
import itertools
import os
import warnings
from types import SimpleNamespace

import datasets
import numpy
import pyarrow
import pytest
import torch
from transformers import AutoTokenizer

from specdec.core.resumable import Resumable, read_rows
from specdec.engines.answers import AnswerSettings, list_jobs
from specdec.measuring.answer_prompts import read_distinct_temperatures
from specdec.measuring.answers import OwnDecoder
from specdec.measuring.replay import warn_of_writers
from specdec.target.fingerprint import Fingerprint
from specdec.text import conversations, reading
from tests.support.commands import write_rows
from tests.support.conversations import ASKS, as_row, pair, supervised
from tests.support.reference_masks import document_mask
from tests.support.targets import REAL_TARGET
from train.data import batches
from train.data.packing import SCHEMA, EncodedRows, Packs, make_columns, pack_first_fit, pack_rows, take_tokens
from train.features.loader import Material

SINGLE = pair("Say hello.", "Hello \u00e9\U0001f600!\n\nBye.")
MULTI = [*SINGLE, *pair("Hello \u00e9\U0001f600!", " Again? ")]
BEGINNING = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
PLAIN = BEGINNING + "{{ message['content'] + '<|im_end|>' }}{{ '\n' }}{% endfor %}" + ASKS
MARKED = (
    BEGINNING + "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + ASKS
)


@pytest.fixture(scope="module")
def own_tokenizer():
    if not REAL_TARGET.exists():
        pytest.skip("needs make setup")
    return AutoTokenizer.from_pretrained(REAL_TARGET)


@pytest.fixture
def tokenizer(own_tokenizer):
    return copy.deepcopy(own_tokenizer)


def make_row(num_prompt, num_answer, name="a"):
    num = num_prompt + num_answer
    return conversations.Row(name, "all", list(range(num)), [index >= num_prompt for index in range(num)])


# The mask


@pytest.mark.parametrize("messages", [SINGLE, MULTI], ids=["single", "multi"])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_every_answer_is_supervised_with_markers_and_without(tokenizer, messages, finish):
    answers = [message["content"] + "<|im_end|>" for message in messages[1::2]]
    row = conversations.encode(tokenizer, as_row(messages))
    assert supervised(tokenizer, row) == answers
    assert tokenizer.decode(row.tokens) == tokenizer.apply_chat_template(messages, tokenize=False)
    prompt = conversations.encode_prompt(tokenizer, messages[:1])
    assert row.tokens[: len(prompt)] == prompt and row.mask.index(True) == len(prompt)
    shown = conversations.show_row(tokenizer, row)
    assert shown.plain == tokenizer.decode(row.tokens)
    assert [shown.plain[span.start : span.end] for span in shown.spans if "green" in str(span.style)] == answers
    rows = []
    for template in (PLAIN, MARKED):
        tokenizer.chat_template = template
        rows.append(conversations.encode(tokenizer, as_row(messages, finish=finish)))
    assert rows[0] == rows[1]


def test_supervision_begins_behind_a_newline_that_merges(tokenizer):
    across = pair("Say hello.", "\n Hello")  # its newline merges with that of the template, so no token begins with it
    assert supervised(tokenizer, conversations.encode(tokenizer, as_row(across))) == [" Hello<|im_end|>"]


REWRITES = PLAIN.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
EVERYTHING = "{% for m in messages if m.role == 'assistant' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (REWRITES, SINGLE, r"row 7.*rewrites history.*generation %} markers"),
        ("{{ raise_exception('no system role') }}", SINGLE, "roles user, assistant: no system role"),
        (None, SINGLE, r"no chat template.*instruct model.*chat_template\.jinja"),
        (PLAIN, SINGLE[:1], "row 7 has no assistant turn"),
        (PLAIN, SINGLE[1:], "row 7 begins with the assistant's turn"),
        (PLAIN, pair("Say hello.", ""), r"(?s)row 7: nothing would be supervised.*Say hello"),
        (EVERYTHING, SINGLE, r"(?s)row 7: everything would be supervised.*bold green.*Hello"),
    ],
)
def test_rows_whose_mask_cannot_be_told_are_refused(tokenizer, template, messages, message):
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match=message):
        conversations.encode(tokenizer, as_row(messages, finish="length" if template == PLAIN else "stop"))
    if template is None:
        with pytest.raises(ValueError, match="no chat template"):
            conversations.encode_prompt(tokenizer, messages[:1])


# Reading


def test_conversations_are_read_from_every_format(tmp_path):
    write_rows(tmp_path / "b.jsonl", [{"messages": SINGLE}, {"id": 5, "messages": MULTI}])
    write_rows(tmp_path / "a.jsonl", [{"id": "first", "messages": SINGLE}])
    assert [row["id"] for row in reading.load_conversations(str(tmp_path))] == ["first", "1", "5"]
    assert len(reading.load_conversations(str(tmp_path), limit=2)) == 2
    saved = datasets.Dataset.from_list([{"messages": SINGLE}])
    saved.save_to_disk(tmp_path / "saved")
    assert reading.load_conversations(str(tmp_path / "saved"))[0]["messages"] == SINGLE
    datasets.DatasetDict({"dev": saved}).save_to_disk(tmp_path / "splits")
    assert len(reading.load_conversations(str(tmp_path / "splits"), split="dev")) == 1
    datasets.DatasetDict({"dev": saved, "test": saved}).save_to_disk(tmp_path / "two")
    for split in (None, "train"):
        with pytest.raises(ValueError, match=r"two has no split 'train'; it has: dev, test\. Choose one with split="):
            reading.load_conversations(str(tmp_path / "two"), split=split)
    (tmp_path / "empty").mkdir()
    for name, message in (
        ("none.jsonl", r"no file .*none\.jsonl\. Give a \.jsonl file, a folder"),
        ("empty", r"neither \.jsonl files nor a saved dataset"),
    ):
        with pytest.raises(ValueError, match=message):
            reading.load_conversations(str(tmp_path / name))


def test_prompts_are_read_from_every_format(tmp_path):
    def load(*rows, limit=None):
        write_rows(tmp_path / "prompts.jsonl", rows)
        return reading.load_prompts(str(tmp_path / "prompts.jsonl"), limit=limit)

    rows = [{"prompt": "Say hello.", "category": "qa"}, {"id": "x", "messages": MULTI}, {"messages": SINGLE[:1]}]
    prompts = load(*rows)
    assert [prompt["messages"] for prompt in prompts] == [SINGLE[:1], MULTI[:3], SINGLE[:1]]
    assert [(prompt["id"], prompt["category"]) for prompt in prompts] == [("0", "qa"), ("x", "all"), ("2", "all")]
    prompts = load(rows[0] | {"tags": ["short"]}, rows[2], rows[1], limit=2)
    assert [(prompt["messages"], prompt["tags"]) for prompt in prompts] == [(SINGLE[:1], ["short"]), (SINGLE[:1], [])]
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: tags must be a list of texts"):
        load({"prompt": "a", "tags": "b"})
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: no prompt"):
        load({})


# Batches


def make_known_target(fingerprint: str) -> SimpleNamespace:
    return SimpleNamespace(identity=Fingerprint.from_text(fingerprint))


def test_rows_of_other_weights_are_noticed():
    writers = ["f00-awq-4bit"] * 3 + ["f00"] + [None]
    columns = [make_columns(make_row(n, 4), writer=writer) for n, writer in enumerate(writers)]
    packs = Packs(EncodedRows([pyarrow.Table.from_pylist(columns, SCHEMA)]), length=10)
    for here, words in (
        ("f00", "3 of 5 rows were written by awq-4bit weights, and the target here has unquantised weights"),
        ("abc-awq-4bit", r"4 of 5 rows were .* has others of that kind \(abc-awq-4bit, not f00-awq-4bit\)"),
    ):
        with pytest.warns(UserWarning, match=words):
            warn_of_writers(packs.writers, make_known_target(here))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_writers(packs.writers, make_known_target("f00-layers-unread-fp8"))
        warn_of_writers(packs.writers[3:], make_known_target("f00"))
        warn_of_writers(["0123456789abcdef-gguf-q8_0"] * 2, make_known_target("0123456789abcdef-gguf-q8_0"))
    with pytest.warns(UserWarning, match="^2 of 3 rows name their target in the form of an earlier version") as warned:
        warn_of_writers(["0123456789abcdef", "fedcba9876543210-fp8", None], make_known_target("v2.0"))
    assert len(warned) == 1


def test_packs_count_and_cut_rows_and_have_a_fingerprint():
    rows = [make_row(3, 4), make_row(3, 5), make_row(8, 4), make_row(0, 1)]
    packs = Packs(EncodedRows.from_rows(rows), length=7)
    with pytest.warns(UserWarning, match="cut at 7 tokens: 1 of 4; .* that long: 2"):
        packs.warn_of_losses()
    assert (packs.num_cut, packs.num_skipped) == (1, 2)
    assert [len(row.tokens) for pack in packs for row in pack] == [7, 7]
    rows = [make_row(1, num, str(num)) for num in (5, 4, 3, 2, 1)]  # of 6, 5, 4, 3, 2 tokens
    first, second = Packs(EncodedRows.from_rows(rows), length=10)
    assert [row.id for row in first] == ["5", "3"] and [row.id for row in second] == ["4", "2", "1"]
    rows = [make_row(2, 3), make_row(0, 4), make_row(3, 1)]
    packs = Packs(EncodedRows.from_rows(rows), length=10)
    assert len(packs) == 2 and packs[1] == [rows[2]]
    assert packs.num_supervised == batches.collate([*packs], length=10, pad_token=0).loss_mask.sum() == 3 + 3 + 1
    again, changed = (
        Packs(EncodedRows.from_rows([*rows[:2], row]), length=10).fingerprint for row in (rows[2], make_row(2, 2))
    )
    assert packs.fingerprint == again != changed and len(again) == 16
    assert packs.num_tokens == 5 + 4 + 4 and packs.supervised_counts.tolist() == [1, 1, 2, 3, 1]
    for num_tokens, row_numbers in ((None, [0, 1, 2]), (3, [0]), (4, [0, 1]), (7, [0, 1]), (8, [0, 1, 2])):
        assert take_tokens(EncodedRows.from_rows(rows), numpy.arange(3), num_tokens).tolist() == row_numbers
    with pytest.raises(ValueError, match="Raise the length"):
        Packs(EncodedRows.from_rows(rows[2:]), length=2)


def test_short_rows_fill_up_what_long_rows_leave():
    lengths = numpy.array([1000] * 40 + [5000] * 10 + [8192])
    packs = pack_rows(lengths, 8192)
    assert numpy.bincount(packs, weights=lengths).max() <= 8192 and packs.max() + 1 == 13  # in their order: 16
    in_order = pack_first_fit([1000] * 40 + [4096] * 11, 4096)
    assert pack_rows(lengths.clip(max=4096), 4096).tolist() == in_order.tolist()


def test_short_packs_are_not_padded_to_the_length_of_long_ones():
    rows = [make_row(1, num) for num in (100, 8191, 3000)]
    material = Material(Packs(EncodedRows.from_rows(rows), length=8192, packed=False), 8192, None)
    for indices, length in (([0], 1024), ([2], 3072), ([0, 1], 8192)):
        assert material.collate([material.packs[index] for index in indices]).tokens.shape[1] == length


def test_collate_and_attention_against_a_loop():
    rows = [make_row(2, 3), make_row(0, 4), make_row(3, 1), make_row(1, 2)]
    packs, length = [*Packs(EncodedRows.from_rows(rows), length=10)], 12
    batch = batches.collate(packs, length=length, pad_token=99)
    expected = []
    for pack in packs:
        columns = []
        for document, row in enumerate(pack):
            for position, (token, is_answer) in enumerate(zip(row.tokens, row.mask)):
                columns.append((token, is_answer and position > 0, document, position))
        expected.append(columns + [(99, False, -1, 0)] * (length - len(columns)))
    tensors = (batch.tokens, batch.loss_mask, batch.documents, batch.positions)
    for tensor, values in zip(tensors, torch.tensor(expected).unbind(-1), strict=True):
        assert tensor.tolist() == values.to(tensor.dtype).tolist()
    attention = document_mask(batch.documents)
    assert attention.shape == (2, 1, length, length) and attention.dtype == torch.bool
    for pack_index, column, other in itertools.product(range(2), range(length), range(length)):
        (_, _, document, _), (_, _, seen, _) = expected[pack_index][column], expected[pack_index][other]
        sees = other == column or (other < column and document == seen >= 0)
        assert attention[pack_index, 0, column, other] == sees
    assert torch.equal(batch.move_to("cpu").tokens, batch.tokens)
    assert [batches.find_answers(batch, row) for row in range(2)] == [[(2, 5), (6, 9)], [(3, 4), (5, 7)]]


# Scripts


def test_an_incomplete_last_row_is_removed_and_a_damaged_row_is_refused(tmp_path):
    out = tmp_path / "out.jsonl"
    assert read_rows(out) == []
    finished = b'{"id": "a@0"}\n{"id": "b@0", "text": "\xc3\xa9"}\n'
    out.write_bytes(finished + b'{"id": "c@0", "text": "\xc3')
    assert {row["id"] for row in read_rows(out)} == {"a@0", "b@0"}
    assert out.read_bytes() == finished
    assert {row["id"] for row in read_rows(out)} == {"a@0", "b@0"}
    for damaged in (b'{"id', b"[1]", b'"\xc3"'):
        out.write_bytes(b'{"id": "a@0"}\n' + damaged + b'\n{"id": "c@0"}\n')
        with pytest.raises(ValueError, match=r"out\.jsonl: line 2 is damaged"):
            read_rows(out)


def test_results_are_continued_with_the_same_settings_only(tmp_path):
    out = tmp_path / "new" / "out.jsonl"

    def open_results(**settings):
        return Resumable(out.with_name("meta.json"), out, {"sizes": (1, 2), **settings}, advice="Use the same.")

    open_results(seed=0, proposer={"max": 4})
    open_results(seed=1, proposer={"max": 4}).append({"a": 1}, {"a": float("inf")})  # there were no rows yet
    assert open_results(seed=1, proposer={"max": 4}).rows == [{"a": 1}, {"a": float("inf")}]
    message = (
        r"seed \(then 1, now 0\), proposer\.min \(then None, now 3\), proposer\.max \(then 4, now None\)\. Use the same"
    )
    with pytest.raises(ValueError, match=message):
        open_results(seed=0, proposer={"min": 3})
    os.remove(out.with_name("meta.json"))
    with pytest.raises(ValueError, match="its settings are unknown"):
        open_results(seed=1)


def test_jobs_and_their_answers(tokenizer, small_target):
    """The longest prompts of a temperature come first, and an answer depends on its job alone."""
    prompts = [{"id": f"{n}", "category": "qa", "messages": SINGLE[:1] * (n + 1), "tags": []} for n in range(3)]
    jobs = list_jobs(tokenizer, prompts, read_distinct_temperatures("1.0,0"))
    lengths = {job.id: len(job.tokens) % 11 + 2 for job in jobs}
    short = [dataclasses.replace(job, tokens=torch.arange(lengths[job.id]).remainder(6).tolist()) for job in jobs]
    settings = AnswerSettings(frozenset({2}), 16, seed=3)

    def answers(batch: int, finished=()) -> list[tuple[str, list[int]]]:
        writer = OwnDecoder(small_target, tokenizer, settings, batch)
        groups = writer.write(job for job in short if job.id not in finished)
        return [(job.id, answer.tokens) for group in groups for job, answer in group]

    alone = answers(1)
    assert [name.partition("@")[2] for name, _ in alone] == ["0"] * 3 + ["1"] * 3
    assert all(lengths[job_id] >= lengths[next] for (job_id, _), (next, _) in zip(alone[:3], alone[1:3]))
    assert answers(2) == answers(8) == alone
    assert answers(2, {"1@0", "0@1"}) == [pair for pair in alone if pair[0] not in ("1@0", "0@1")]
    for text in ("a", "", "0,0.0", "-1"):
        with pytest.raises(ValueError, match="temperature="):
            read_distinct_temperatures(text)
