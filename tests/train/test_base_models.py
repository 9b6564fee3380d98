"""Tests of targets without a chat template: rows of plain text, prompts, and the beginning-of-text token."""

import copy
import functools
import json
import warnings

import pytest
from transformers import GenerationConfig, LlamaConfig

from scripts import answer, generate, show_data
from specdec.core.answer_text import TextDecoder
from specdec.engines import answers
from specdec.proposers import datastore_texts
from specdec.target.model import load_tokenizer
from specdec.text import conversations as data
from specdec.text import reading, token_text
from tests.support.commands import write_rows
from tests.support.conversations import pair
from tests.support.runs import losses_of
from tests.support.small_server import Model, SmallServer
from tests.support.targets import byte_fallback_tokenizer, save_target, small_tokenizer

BEGIN, END = 1, 2  # ids of small_tokenizer's tokens
TEXT, PROMPT, COMPLETION = "Count to world", "Count to", " hello world"


@pytest.fixture
def tokenizer():
    """Without a chat template, and without anything in front of texts."""
    own = copy.deepcopy(small_tokenizer())
    own.chat_template = None
    return own


def with_first_token(tokenizer):
    tokenizer.add_bos_token = True
    return tokenizer


def save(folder, tokenizer, *, config=(), generation=(), stated=None):
    """A folder of a model without weights. stated: add_bos_token of tokenizer_config.json"""
    LlamaConfig(vocab_size=400, **{"bos_token_id": BEGIN, "eos_token_id": END, **dict(config)}).save_pretrained(folder)
    if generation:
        GenerationConfig(**dict(generation)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if stated is not None:
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"add_bos_token": stated}))
    return str(folder)


def encoded(tokenizer, /, **row):
    """-> what is not supervised, what is"""
    found = data.encode(tokenizer, {"id": "row 7", "category": "all", **row})
    border = found.mask.index(True)
    assert all(found.mask[border:])
    return tokenizer.decode(found.tokens[:border]), tokenizer.decode(found.tokens[border:])


# The beginning of a text


CASES = {  # settings of `save` -> what is put in front, and whether that is said
    "named": ({}, [BEGIN], True),
    "named-for-generation": (
        {"config": {"bos_token_id": None}, "generation": {"bos_token_id": BEGIN, "eos_token_id": [END]}}, [BEGIN], True,
    ),
    "also-the-end": ({"config": {"eos_token_id": BEGIN}}, [], False),
    "also-an-end-of-generation": ({"generation": {"bos_token_id": BEGIN, "eos_token_id": [END, BEGIN]}}, [], False),
    "not-named": ({"config": {"bos_token_id": None}}, [], False),
    "another-named": ({"config": {"bos_token_id": 0}}, [], False),
    "stated": ({"config": {"bos_token_id": None}, "stated": True}, [BEGIN], False),
    "stated-otherwise": ({"stated": False}, [], False),
}  # fmt: skip


@pytest.mark.parametrize("case_name", CASES)
def test_texts_begin_as_the_model_expects(case_name, tmp_path, tokenizer):
    settings, first, is_told = CASES[case_name]
    name = save(tmp_path, tokenizer, **settings)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        loaded = load_tokenizer(name)
    told = [str(each.message) for each in found if "in front of texts" in str(each.message)]
    assert len(told) == is_told and all(name in each and "add_bos_token" in each for each in told)
    text = tokenizer(TEXT)["input_ids"]
    assert token_text.encode_text(loaded, TEXT) == first + text and token_text.encode_text(loaded, "") == first
    if first:  # never twice
        assert token_text.encode_text(loaded, tokenizer.decode(first) + TEXT) == first + text
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert token_text.encode_text(load_tokenizer(save(tmp_path / "again", loaded)), TEXT) == first + text


def test_chat_models_keep_their_tokenizer_and_prompts_no_end(tmp_path, tokenizer):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert token_text.encode_text(load_tokenizer(save(tmp_path, small_tokenizer())), TEXT)[0] != BEGIN
    text = token_text.encode_text(tokenizer, TEXT)
    tokenizer.add_eos_token = tokenizer.add_bos_token = True
    assert tokenizer(TEXT)["input_ids"] == [BEGIN, *text, END]
    assert token_text.encode_text(tokenizer, TEXT) == [BEGIN, *text]


# Rows


def test_plain_rows_are_supervised(tokenizer):
    start = tokenizer.decode(BEGIN)
    assert encoded(tokenizer, text=TEXT) == ("Count", " to world")  # nothing precedes the first token
    assert encoded(with_first_token(tokenizer), text=TEXT) == (start, TEXT)
    pair = {"prompt": PROMPT, "completion": COMPLETION}
    assert encoded(tokenizer, **pair) == (start + PROMPT, COMPLETION + "<|im_end|>")
    assert encoded(tokenizer, **pair, text=TEXT) == (start + PROMPT, COMPLETION + "<|im_end|>")
    assert encoded(tokenizer, **pair, finish="length") == (start + PROMPT, COMPLETION)
    ended = {"prompt": PROMPT, "completion": COMPLETION + "<|im_end|>"}
    assert encoded(tokenizer, **ended) == (start + PROMPT, COMPLETION + "<|im_end|>")
    assert encoded(tokenizer, prompt="", completion=COMPLETION) == (start, COMPLETION + "<|im_end|>")


def test_a_completion_follows_the_tokens_that_decoding_reads(tokenizer):
    prompt, completion = "Count ", "to world"  # the border is inside of the text's second token
    assert tokenizer(prompt + completion)["input_ids"][:2] != tokenizer(prompt)["input_ids"]
    row = data.encode(tokenizer, {"id": "1", "category": "all", "prompt": prompt, "completion": completion})
    read = data.encode_row(tokenizer, {"id": "1", "prompt": prompt, "messages": []})
    assert row.tokens[: len(read)] == read and row.mask.index(True) == len(read)
    assert tokenizer.decode(row.tokens) == prompt + completion + "<|im_end|>"


def test_chat_models_take_both_kinds_of_rows(tmp_path, tokenizer):
    chat = small_tokenizer()
    forms = ({"prompt": PROMPT, "completion": COMPLETION}, {"messages": pair(PROMPT, COMPLETION)})
    first, second = (data.encode(chat, {"id": "1", "category": "all", **form}) for form in forms)
    assert first == second and encoded(chat, text=TEXT) == ("Count", " to world")
    write_rows(tmp_path / "rows.jsonl", forms[:1])
    (text,) = datastore_texts.read_texts(str(tmp_path / "rows.jsonl"), with_first_token(tokenizer))
    assert tokenizer.decode(text) == "<|im_start|>" + PROMPT + COMPLETION + "<|im_end|>"


def test_rows_that_cannot_be_encoded_are_refused_with_what_to_do(tokenizer):
    for row in ({"text": ""}, {"text": "Count"}, {"prompt": PROMPT, "completion": "", "finish": "length"}):
        with pytest.raises(ValueError, match="row 7: its text or completion is too short"):
            encoded(tokenizer, **row)
    messages = pair(PROMPT, COMPLETION)
    what = r"no chat template.*rows with prompt.*text, or with prompt and completion"
    with pytest.raises(ValueError, match="row 7 has messages.*" + what):
        encoded(tokenizer, messages=messages)
    with pytest.raises(ValueError, match=what):
        data.encode_prompt(tokenizer, messages[:1])


def test_prompts_are_read_as_they_are(tmp_path, tokenizer):
    write_rows(tmp_path / "prompts.jsonl", [{"prompt": PROMPT}, {"prompt": ""}])
    load = functools.partial(data.load_prompts, str(tmp_path / "prompts.jsonl"), limit=None)
    text = tokenizer(PROMPT)["input_ids"]
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2: The prompt is empty"):
        load(tokenizer)
    assert [prompt.tokens for prompt in load(with_first_token(tokenizer))] == [[BEGIN, *text], [BEGIN]]
    assert [prompt.tokens for prompt in load(small_tokenizer())] != [[BEGIN, *text], [BEGIN]]


@pytest.mark.parametrize("opening", [True, False])
def test_the_text_of_an_answer_goes_on_from_its_prompt(opening):
    """With tokenizers that drop the space before a text's first word, or not. The last answer is cut."""
    tokenizer = byte_fallback_tokenizer(opening=opening)
    ids = tokenizer("Count to \u5929 then \u00e9\u00e9", add_special_tokens=False)["input_ids"]
    for place in range(1, len(ids) - 2):
        before = TextDecoder.from_tokenizer(tokenizer).text(ids[:place]).rstrip("\ufffd")
        whole, part = (answers.make_answer(tokenizer, ids[place:end], set(), ids[:place]) for end in (None, -1))
        assert before + whole.text == tokenizer.decode(ids) and before + part.text == tokenizer.decode(ids)[:-1]


# Commands


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny base model that expects a token in front of texts, with rows and prompts."""
    folder = tmp_path_factory.mktemp("base")
    own = copy.deepcopy(small_tokenizer())
    own.chat_template = None
    save_target(folder / "target", num_layers=8, tokenizer=with_first_token(own))
    rows = [{"prompt": f"Count from {n}", "completion": f" to {n + 3}, then to {n + 7}."} for n in range(12)]
    write_rows(folder / "train.jsonl", rows)
    write_rows(folder / "text.jsonl", [{"text": row["prompt"] + row["completion"]} for row in rows])
    write_rows(folder / "chats.jsonl", [{"messages": pair("a", "b")}])
    write_rows(folder / "prompts.jsonl", [{"prompt": "Count from 3"}, {"prompt": "Count on"}])
    return folder


def test_a_head_is_trained_on_completions_and_on_texts(fit, folder, run_script):
    both = f"data.train=[{folder}/text.jsonl,{folder}/train.jsonl]"
    assert fit("completions", "head=eagle3", "solve_packs=0", "validation.auto=never") == 0
    assert fit("texts", "head=mtp", both, "validation.auto=never") == 0
    for run in ("completions", "texts"):
        assert sorted(losses_of(run)) == [1, 2, 3, 4]
    given = ["checkpoint=checkpoints/completions", "prompt=Count", "max_new_tokens=6", "target.dtype=float32"]
    assert "Both answers are the same" in run_script(generate, *given)
    for more in ([f"data.train={folder}/chats.jsonl"], [f"data.heldout={folder}/chats.jsonl"]):
        with pytest.raises(ValueError, match="no chat template"):
            fit("chats", *more)


def test_answers_are_completions(folder, tmp_path, run_script):
    out, tokenizer = tmp_path / "answers.jsonl", load_tokenizer(str(folder / "target"))
    name = f"target.name={folder}/target"
    shared = [f"prompts={folder}/prompts.jsonl", name, "max_new_tokens=5"]
    run_script(answer, *shared, f"out={out}", "target.dtype=float32")
    rows = reading.load_conversations(str(out))
    assert len(rows) == 4 and rows[0]["prompt"] == "Count from 3" and "messages" not in rows[0]
    for row in rows:
        prompt = tokenizer(row["prompt"], add_special_tokens=False)["input_ids"]
        assert row["tokens"][: row["prompt_tokens"]] == [BEGIN, *prompt]
        said = row["tokens"][row["prompt_tokens"] :]
        assert row["completion"] == tokenizer.decode(said, skip_special_tokens=True).rstrip("\ufffd")
        assert data.encode(tokenizer, row).tokens == row["tokens"]
    assert "supervised" in run_script(show_data, f"data={out}", name)
    model = Model()
    with SmallServer(model) as server:
        run_script(answer, *shared, f"out={tmp_path}/served.jsonl", f"engine={server.url}")
    asked = [body for path, body in server.requests if path == "v1/completions"]
    assert asked and all(body["prompt"][0] == BEGIN for body in asked)
