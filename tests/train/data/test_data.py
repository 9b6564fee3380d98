"""Tests of conversations, masks and batches with the default target's tokenizer, and of files that scripts resume."""

from helpers.loading import TokenizerOptions
from helpers.options import options

import copy
import dataclasses
import json
import os

import datasets
import pytest
import torch
from transformers import AutoTokenizer

from scripts.answer import parse_temperatures
from scripts.show_data import ShowData
from specdec.core import masks
from tests.support import REAL_TARGET
from train.answers.answering import AnswerSettings, OwnDecoder, WrittenAnswer, list_jobs, make_answer
from train.answers.resumable import Resumable, read_rows
from train.data import reading
from train.data import rows as data
from train.data.packing import Packs, Rows

SINGLE = [
    {"role": "user", "content": "Say hello."},
    {"role": "assistant", "content": "Hello \u00e9\U0001f600!\n\nBye."},
]
MULTI = [
    *SINGLE,
    {"role": "user", "content": "Hello \u00e9\U0001f600!"},
    {"role": "assistant", "content": " Again? "},
]
BEGINNING = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
PROMPT = "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
PLAIN = BEGINNING + "{{ message['content'] + '<|im_end|>' }}{{ '\n' }}{% endfor %}" + PROMPT
MARKED = (
    BEGINNING + "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + PROMPT
)


@pytest.fixture(scope="module")
def own_tokenizer():
    return AutoTokenizer.from_pretrained(REAL_TARGET)


@pytest.fixture
def tokenizer(own_tokenizer):
    return copy.deepcopy(own_tokenizer)


def conversation(messages, **fields):
    return {"id": "row 7", "category": "all", "messages": messages, **fields}


def supervised(tokenizer, row):
    """The text of each run of consecutive supervised tokens."""
    runs, previous = [], False
    for token, mask in zip(row.tokens, row.mask, strict=True):
        if mask and not previous:
            runs.append([])
        if mask:
            runs[-1].append(token)
        previous = mask
    return [tokenizer.decode(run) for run in runs]


def write(path, *lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def make_row(num_prompt, num_answer, name="a"):
    num = num_prompt + num_answer
    return data.Row(
        id=name, category="all", tokens=list(range(num)), mask=[index >= num_prompt for index in range(num)]
    )


# The mask


def test_single_answer_is_supervised(tokenizer):
    row = data.encode(tokenizer, conversation(SINGLE))
    assert supervised(tokenizer, row) == [SINGLE[1]["content"] + "<|im_end|>"]
    assert tokenizer.decode(row.tokens) == tokenizer.apply_chat_template(SINGLE, tokenize=False)


def test_every_answer_is_supervised(tokenizer):
    row = data.encode(tokenizer, conversation(MULTI))
    assert supervised(tokenizer, row) == [MULTI[index]["content"] + "<|im_end|>" for index in (1, 3)]


def test_row_begins_with_its_prompt(tokenizer):
    row = data.encode(tokenizer, conversation(SINGLE))
    prompt = data.encode_prompt(tokenizer, SINGLE[:1])
    assert row.tokens[: len(prompt)] == prompt
    assert row.mask.index(True) == len(prompt)


@pytest.mark.parametrize("template", [PLAIN, MARKED])
@pytest.mark.parametrize("content", ["Cut", "Cut \n", "Say hello."])
def test_cut_answer_has_no_end_of_turn(tokenizer, template, content):
    tokenizer.chat_template = template
    messages = [*MULTI[:3], {"role": "assistant", "content": content}]
    row = data.encode(tokenizer, conversation(messages, finish="length"))
    assert supervised(tokenizer, row) == [MULTI[1]["content"] + "<|im_end|>", content]
    assert row.mask[-1]


@pytest.mark.parametrize("messages", [SINGLE, MULTI])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_markers_give_the_same_mask(tokenizer, messages, finish):
    rows = []
    for template in (PLAIN, MARKED):
        tokenizer.chat_template = template
        rows.append(data.encode(tokenizer, conversation(messages, finish=finish)))
    assert rows[0] == rows[1]


def test_supervision_ends_with_the_answer_without_an_end_of_turn(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] + ':\n' + m['content'] + '\n' }}{% endfor %}" + (
        "{% if add_generation_prompt %}{{ 'assistant:\n' }}{% endif %}"
    )
    messages = [{"role": role, "content": text} for role, text in [("user", "a"), ("assistant", "one")] * 2]
    assert supervised(tokenizer, data.encode(tokenizer, conversation(messages))) == ["one", "one"]


def test_token_across_the_border_is_not_supervised(tokenizer):
    messages = [SINGLE[0], {"role": "assistant", "content": "\n Hello"}]  # its newline merges with that of the template
    assert supervised(tokenizer, data.encode(tokenizer, conversation(messages))) == [" Hello<|im_end|>"]


def test_template_that_rewrites_history_is_refused(tokenizer):
    tokenizer.chat_template = PLAIN.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>'")
    with pytest.raises(ValueError, match=r"row 7.*rewrites history.*generation %} markers"):
        data.encode(tokenizer, conversation(SINGLE))


def test_message_of_a_template_that_refuses_is_shown(tokenizer):
    tokenizer.chat_template = "{{ raise_exception('no system role') }}"
    with pytest.raises(ValueError, match="roles user, assistant: no system role"):
        data.encode(tokenizer, conversation(SINGLE))


def test_missing_chat_template_is_refused(tokenizer):
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match=r"no chat template.*instruct model.*chat_template\.jinja"):
        data.encode(tokenizer, conversation(SINGLE))
    with pytest.raises(ValueError, match="no chat template"):
        data.encode_prompt(tokenizer, SINGLE[:1])


def test_conversation_without_an_answer_is_refused(tokenizer):
    with pytest.raises(ValueError, match="row 7 has no assistant turn"):
        data.encode(tokenizer, conversation(SINGLE[:1]))


def test_conversation_that_begins_with_an_answer_is_refused(tokenizer):
    with pytest.raises(ValueError, match="row 7 begins with the assistant's turn"):
        data.encode(tokenizer, conversation(SINGLE[1:]))


def test_empty_and_full_masks_are_refused_and_shown(tokenizer):
    with pytest.raises(ValueError, match=r"(?s)row 7: nothing would be supervised.*Say hello"):
        data.encode(tokenizer, conversation([SINGLE[0], {"role": "assistant", "content": ""}], finish="length"))
    tokenizer.chat_template = "{% generation %}{{ messages[0]['content'] }}{% endgeneration %}"
    with pytest.raises(ValueError, match=r"(?s)row 7: everything would be supervised.*bold green.*Say hello"):
        data.encode(tokenizer, conversation(SINGLE))


def test_show_colours_what_is_supervised(tokenizer):
    text = data.show(tokenizer, data.encode(tokenizer, conversation(MULTI)))
    assert text.plain == tokenizer.apply_chat_template(MULTI, tokenize=False)
    green = [text.plain[span.start : span.end] for span in text.spans if "green" in str(span.style)]
    assert green == [MULTI[index]["content"] + "<|im_end|>" for index in (1, 3)]


# Reading


def test_conversations_are_read_from_every_format(tmp_path):
    lines = [json.dumps({"messages": SINGLE}), "", json.dumps({"id": 5, "category": "math", "messages": MULTI})]
    file = write(tmp_path / "b.jsonl", *lines)
    rows = reading.load_conversations(file)
    assert [(row["id"], row["category"]) for row in rows] == [("0", "all"), ("5", "math")]
    assert rows[1]["messages"] == MULTI
    write(tmp_path / "a.jsonl", json.dumps({"id": "first", "messages": SINGLE}))
    assert [row["id"] for row in reading.load_conversations(str(tmp_path))] == ["first", "1", "5"]
    assert len(reading.load_conversations(str(tmp_path), limit=2)) == 2

    saved = datasets.Dataset.from_list([{"messages": SINGLE}])
    saved.save_to_disk(tmp_path / "saved")
    assert reading.load_conversations(str(tmp_path / "saved"))[0]["messages"] == SINGLE
    datasets.DatasetDict({"dev": saved}).save_to_disk(tmp_path / "splits")
    assert len(reading.load_conversations(str(tmp_path / "splits"), split="dev")) == 1
    assert reading.load_conversations(str(tmp_path / "splits"))[0]["messages"] == SINGLE  # the only one
    datasets.DatasetDict({"dev": saved, "test": saved}).save_to_disk(tmp_path / "two")
    for split in (None, "train"):
        with pytest.raises(ValueError, match=r"two has no split 'train'; it has: dev, test\. Choose one with split="):
            reading.load_conversations(str(tmp_path / "two"), split=split)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"messages": [', "not valid JSON"),
        ("[1]", "expected a JSON object"),
        ('{"question": "a"}', "no messages"),
        ('{"messages": []}', "no messages"),
        ('{"messages": [{"role": "user"}]}', "role and a content"),
    ],
)
def test_broken_line_is_named(tmp_path, line, problem):
    file = write(tmp_path / "rows.jsonl", json.dumps({"messages": SINGLE}), line)
    with pytest.raises(ValueError, match=rf"rows\.jsonl:2: .*{problem}"):
        reading.load_conversations(file)


def test_missing_sources_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no file .*none\.jsonl\. Give a \.jsonl file, a folder"):
        reading.load_conversations(str(tmp_path / "none.jsonl"))
    with pytest.raises(ValueError, match=r"neither \.jsonl files nor a saved dataset"):
        reading.load_conversations(str(tmp_path))


def test_prompts_are_read_from_every_format(tmp_path):
    rows = [{"prompt": "Say hello.", "category": "qa"}, {"id": "x", "messages": MULTI}, {"messages": SINGLE[:1]}]
    prompts = reading.load_prompts(write(tmp_path / "prompts.jsonl", *map(json.dumps, rows)))
    assert [prompt["messages"] for prompt in prompts] == [SINGLE[:1], MULTI[:3], SINGLE[:1]]
    assert [(prompt["id"], prompt["category"]) for prompt in prompts] == [("0", "qa"), ("x", "all"), ("2", "all")]
    rows[0] |= {"tags": ["short"]}
    rows[1] |= {"dropped": "too long"}
    prompts = reading.load_prompts(write(tmp_path / "prompts.jsonl", *map(json.dumps, rows)), limit=2)
    assert [(prompt["messages"], prompt["tags"]) for prompt in prompts] == [(SINGLE[:1], ["short"]), (SINGLE[:1], [])]
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: tags must be a list of texts"):
        reading.load_prompts(write(tmp_path / "prompts.jsonl", '{"prompt": "a", "tags": "b"}'))
    with pytest.raises(ValueError, match=r"prompts\.jsonl:1: no prompt"):
        reading.load_prompts(write(tmp_path / "prompts.jsonl", "{}"))


# Batches


def test_truncation_is_counted():
    rows = [make_row(3, 4), make_row(3, 5), make_row(8, 4), make_row(0, 1)]
    with pytest.warns(UserWarning, match="Of 4 rows, 1 are cut at 7 tokens and 2 are skipped"):
        packs = Packs(Rows.of(rows), length=7)
    assert (packs.num_cut, packs.num_skipped) == (1, 2)
    assert [len(row.tokens) for pack in packs for row in pack] == [7, 7]
    assert data.truncate(make_row(6, 4), 7).mask == [False] * 6 + [True]
    assert data.truncate(make_row(7, 4), 7) is None


def test_packing_is_first_fit():
    rows = [make_row(1, num, str(num)) for num in (5, 4, 3, 2, 1)]  # of 6, 5, 4, 3, 2 tokens
    packs = [*Packs(Rows.of(rows), length=10)]
    assert [[row.id for row in pack] for pack in packs] == [["5", "3"], ["4", "2", "1"]]


def test_collate_and_attention_against_a_loop():
    packs = [*Packs(Rows.of([make_row(2, 3), make_row(0, 4), make_row(3, 1), make_row(1, 2)]), length=10)]
    batch = data.collate(packs, length=12, pad_token=99)
    attention = masks.documents(batch.documents)
    assert attention.shape == (2, 1, 12, 12) and attention.dtype == torch.bool
    for index, rows in enumerate(packs):
        flat = [(document, position, row) for document, row in enumerate(rows) for position in range(len(row.tokens))]
        for place in range(12):
            if place >= len(flat):
                assert batch.tokens[index, place] == 99 and not batch.loss_mask[index, place]
                assert batch.documents[index, place] == -1 and batch.positions[index, place] == 0
                assert attention[index, 0, place].nonzero().tolist() == [[place]]
                continue
            document, position, row = flat[place]
            assert batch.tokens[index, place] == row.tokens[position]
            assert batch.documents[index, place] == document and batch.positions[index, place] == position
            assert batch.loss_mask[index, place] == (row.mask[position] and position > 0)
            attended = [other for other in range(place + 1) if flat[other][0] == document]
            assert attention[index, 0, place].nonzero().flatten().tolist() == attended
    assert torch.equal(batch.to("cpu").tokens, batch.tokens)


def test_packs_count_supervised_tokens_and_have_a_fingerprint():
    rows = [make_row(2, 3), make_row(0, 4), make_row(3, 1)]
    packs = Packs(Rows.of(rows), length=10)
    assert len(packs) == 2 and packs[1] == [rows[2]]
    batch = data.collate([packs[0], packs[1]], length=10, pad_token=0)
    assert packs.num_supervised == batch.loss_mask.sum() == 3 + 3 + 1
    assert packs.fingerprint == Packs(Rows.of(rows), length=10).fingerprint and len(packs.fingerprint) == 16
    assert packs.fingerprint != Packs(Rows.of([*rows[:2], make_row(2, 2)]), length=10).fingerprint
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="Raise the length"):
        Packs(Rows.of(rows[2:]), length=2)


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


def test_other_settings_are_refused(tmp_path):
    out = tmp_path / "new" / "out.jsonl"

    def begin(settings):
        return Resumable(out.with_name("out.jsonl.meta.json"), out, settings, advice="Use the same.")

    begin({"seed": 0, "top_p": 1.0, "dtype": "float32"})
    # Another seed is accepted, since no row has been written yet.
    begin({"seed": 1, "top_p": 1.0, "dtype": "float32"}).append({"id": "a@0"})
    assert begin({"seed": 1, "top_p": 1.0, "dtype": "float32"}).rows == [{"id": "a@0"}]
    with pytest.raises(ValueError, match=r"seed \(then 1, now 0\), top_p \(then 1.0, now 0.9\)\. Use the same"):
        begin({"seed": 0, "top_p": 0.9, "dtype": "float32"})
    os.remove(tmp_path / "new" / "out.jsonl.meta.json")
    with pytest.raises(ValueError, match="its settings are unknown"):
        begin({"seed": 1})


def test_continuing_adds_rows_and_names_nested_settings(tmp_path):
    def begin(**proposer):
        settings = {"sizes": (1, 2), "proposer": proposer}
        return Resumable(tmp_path / "settings.json", tmp_path / "rows.jsonl", settings, advice="")

    results = begin(max=4)
    results.append({"a": 1}, {"a": float("inf")})
    results.append({"a": 3})
    with (tmp_path / "rows.jsonl").open("a") as file:
        file.write('{"a": 4')
    results = begin(max=4)
    results.append({"a": 4})
    assert [row["a"] for row in results.rows] == [1, float("inf"), 3, 4] and begin(max=4).rows == results.rows
    with pytest.raises(ValueError, match=r"proposer\.min \(then None, now 3\), proposer\.max \(then 4, now None\)"):
        begin(min=3)


def test_jobs_and_their_answers(tokenizer, small_target):
    """The longest prompts of a temperature come first, and an answer depends on its job alone."""
    prompts = [
        {"id": str(index), "category": "qa", "messages": SINGLE[:1] * (index + 1), "tags": []} for index in range(3)
    ]
    jobs = list_jobs(tokenizer, prompts, parse_temperatures("1.0,0"))
    short = [
        dataclasses.replace(job, tokens=[number % 6 for number in range(len(job.tokens) % 11 + 2)]) for job in jobs
    ]
    settings = AnswerSettings(frozenset({2}), 16, seed=3)

    def answers(batch: int, finished=()) -> list[tuple[str, list[int]]]:
        writer = OwnDecoder(small_target, tokenizer, settings, batch)
        return [
            (job.id, answer.tokens)
            for group in writer.write(job for job in short if job.id not in finished)
            for job, answer in group
        ]

    alone = answers(1)
    lengths = {job.id: len(job.tokens) for job in short}
    assert [name.partition("@")[2] for name, _ in alone] == ["0"] * 3 + ["1"] * 3
    assert all(lengths[one] >= lengths[next] for (one, _), (next, _) in zip(alone[:3], alone[1:3]))
    assert answers(2) == answers(8) == alone
    assert answers(2, {"1@0", "0@1"}) == [pair for pair in alone if pair[0] not in ("1@0", "0@1")]
    for text in ("a", "", "0,0.0", "-1"):
        with pytest.raises(ValueError, match="temperature="):
            parse_temperatures(text)


def test_an_answer_is_trimmed_at_its_end(tokenizer):
    hello, end = tokenizer("Hello")["input_ids"], tokenizer.eos_token_id
    assert make_answer(tokenizer, [*hello, end], {end}) == WrittenAnswer("Hello", "stop", [*hello, end], len(hello) + 1)
    assert make_answer(tokenizer, hello, {end}) == WrittenAnswer("Hello", "length", hello, len(hello))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["data=b", "rows=3"],
            "no option 'rows'. Did you mean 'row'. Known options: data, row, num, max_length, split, thinking, target.name",
        ),
        (["target.name=a"], "Give a value for: data"),
        (["target.name=a", "data=b", "row=x"], "row: Value 'x'"),
        (["target"], "not of the form key=value"),
    ],
)
def test_wrong_options_are_refused(monkeypatch, arguments, message):
    monkeypatch.setattr("sys.argv", ["script", *arguments])
    with pytest.raises(SystemExit, match=message):
        options(ShowData, "doc")


def test_options(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["script", "target.name=0,1", "data=2", "row=3"])
    assert options(ShowData, "doc") == ShowData(data="2", row=3, target=TokenizerOptions("0,1"))
    monkeypatch.setattr("sys.argv", ["script", "--help"])
    with pytest.raises(SystemExit):
        options(ShowData, "python scripts/show_data.py")
    printed = capsys.readouterr().out
    assert "python scripts/show_data.py" in printed and "index of the first row to print (default: 0)" in printed
