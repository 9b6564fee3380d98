"""Tests of recorded conversations: the rows, their files, and what the server records for each request."""

import contextlib
import itertools
import json
import logging
import shutil
import stat
from types import SimpleNamespace

import httpx
import pytest

from specdec.core import files, row_files
from specdec.core.sampling import Sampling
from specdec.proposers import datastore_texts
from specdec.text import conversations, reading
from specdec.tools.server.app import ServerContext
from specdec.tools.server.record import Exchange, Recorder
from tests.support.decoding import greedy
from tests.support.runs import load_packs
from tests.support.targets import small_tokenizer, word_tokenizer
from tests.tools.server.test_app import LONG, STOP, await_idle, leave_early, post, read_error, read_text, serving
from train.data import encoding

TARGET = SimpleNamespace(name="tiny", fingerprint=lambda: "0123456789abcdef")
SAMPLING = Sampling(0.5, top_p=0.9)
END = min(STOP)


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.WARNING)


def question(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def chat(text: str, *, messages=None, **changes) -> Exchange:
    """A question and its answer, whose ids are the letters one by one, as no tokenizer would cut them."""
    messages = messages or question(text)
    prompt = conversations.encode_prompt(small_tokenizer(), messages)
    letters = [token for letter in "the sky" for token in small_tokenizer()(letter)["input_ids"]]
    fields = {"id": text, "finish": "stop", "seed": 3, "grammar": None, "head": "run/step_000100"}
    given = {"messages": messages, "text": "the sky"} | changes
    return Exchange([*prompt, *letters, END], len(prompt), SAMPLING, [2, 0], 6, fields, **given)


def make_recorder(folder) -> Recorder:
    recorder = Recorder(folder)
    recorder.set_origin(TARGET, small_tokenizer())
    return recorder


def rows_in(folder) -> list[dict]:
    return [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]


def record(folder, *exchanges: Exchange) -> list[dict]:
    recorder = make_recorder(folder)
    for exchange in exchanges:
        recorder.record(exchange)
    return rows_in(folder)


# Rows


def test_rows_train_as_they_are(tmp_path):
    prompt = small_tokenizer()("Count to")["input_ids"]
    bare = Exchange([*prompt, 7, 8], len(prompt), SAMPLING, [0], 3, {"finish": "length"}, "the")
    rows = record(tmp_path / "t", chat("hi"), bare)
    assert rows[1]["messages"] is None and rows[1]["texts"] == ["Count to", "the"]
    packs = load_packs(
        str(tmp_path / "t"), encoding.Encoding(small_tokenizer(), tmp_path / "cache"), length=64, packed=False
    )
    found = {tuple(each.tokens): each.mask for number in range(2) for each in packs[number]}
    loaded = reading.load_conversations(str(tmp_path / "t"))
    for row, conversation in zip(rows, loaded):
        mask = [False] * row["prompt_tokens"] + [True] * (len(row["tokens"]) - row["prompt_tokens"])
        assert found[tuple(row["tokens"])] == mask
        encoded = conversations.encode(small_tokenizer(), conversation)
        assert (encoded.tokens, encoded.mask, encoded.category) == (row["tokens"], mask, "traffic")
    texts = list(datastore_texts.read_texts(str(tmp_path / "t"), small_tokenizer()))
    answers = [row["tokens"][row["prompt_tokens"] :] for row in rows]
    assert [text[-len(answer) :] for text, answer in zip(texts, answers, strict=True)] == answers
    with pytest.raises(ValueError, match="no prompt"):
        reading.load_prompts(str(tmp_path / "t"))
    with pytest.raises(ValueError, match="no messages, and its token ids are of another tokenizer"):
        conversations.encode(word_tokenizer(20), loaded[1])


def test_turns_of_a_conversation_share_its_id(tmp_path):
    first, system = question("a"), [{"role": "system", "content": "s"}]
    later = [*first, {"role": "assistant", "content": "x"}, {"role": "user", "content": "c"}]
    each = [first, later, question("b"), [*system, *first], system]
    ids = [row["conversation"] for row in record(tmp_path, *(chat("", messages=messages) for messages in each))]
    assert ids[0] == ids[1] and len(set(ids)) == 4


# Files


def test_every_recorder_has_a_file_of_its_own(tmp_path):
    (tmp_path / "traffic-000007.jsonl").write_text('{"id": "half')
    (tmp_path / "traffic-notes.jsonl").touch()
    recorders = [make_recorder(tmp_path) for _ in range(2)]
    for number in range(4):
        recorders[number % 2].record(chat(str(number)))
    rows = [row_files.read_own_lines(recorder.path) for recorder in recorders]
    assert [row["id"] for _, row in itertools.chain(*rows)] == ["0", "2", "1", "3"]
    assert [each.path.name for each in recorders] == ["traffic-000008.jsonl", "traffic-000009.jsonl"]


def full(*_, **__):
    raise ValueError("the disk is full")


def test_a_full_disk_and_a_folder_that_vanishes_stop_recording_and_nothing_else(tmp_path, monkeypatch, caplog):
    recorder = make_recorder(tmp_path / "a")
    recorder.path.unlink()  # moved away: the file is made again
    recorder.record(chat("a"))
    with monkeypatch.context() as patched:
        patched.setattr(files, "append_text", full)
        for _ in range(3):
            recorder.record(chat("b"))
    assert recorder.stopped and caplog.text.count("recording has stopped (ValueError: the disk is full)") == 1
    recorder.record(chat("c"))
    assert [row["id"] for row in rows_in(tmp_path / "a")] == ["a"]
    recorder = make_recorder(tmp_path / "b")
    shutil.rmtree(tmp_path / "b")
    recorder.record(chat("b"))
    assert recorder.stopped and caplog.text.count("recording has stopped") == 2 and not (tmp_path / "b").exists()


def test_a_folder_that_cannot_be_used_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="choose another folder"):
        Recorder(tmp_path / "file")


# The server

QUESTION = question("Say hello.")


@contextlib.contextmanager
def recorded(tiny, folder, *, serve: dict | None = None):
    """A server that records -> its URL, and its context"""
    recorder = Recorder(folder)
    recorder.set_origin(tiny, small_tokenizer())
    with serving(tiny, recorder=recorder, **(serve or {})) as url_and_context:
        yield url_and_context


def ask(url: str, **fields) -> dict:
    response = post(url, messages=QUESTION, **{"max_tokens": 12, **fields})
    assert response.status_code == 200, response.text
    return response.json() if not fields.get("stream") else {}


def rows_of(served: ServerContext) -> list[dict]:
    return rows_in(served.recorder.folder)


def test_a_chat_is_recorded_with_the_ids_that_were_written(tiny, tmp_path):
    prompt = conversations.encode_prompt(small_tokenizer(), QUESTION)
    answer = greedy(tiny, None, STOP).generate([prompt], 12).tokens[0]
    folder = tmp_path / "a" / "b"
    with recorded(tiny, folder) as (url, served):
        assert httpx.get(f"{url}/health").json()["recording"] is True
        whole = ask(url, metadata={"conversation": "c7"}, seed=4, top_k=3)
        ask(url, stream=True, chat_template_kwargs={"enable_thinking": False})
        first, second = rows_of(served)
    assert first["id"] == whole["id"] and first["conversation"] == "c7" != second["conversation"]
    assert first["seed"] == 4 and "chat_template_kwargs" not in first
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and first["time"] > 1.7e9
    assert stat.S_IMODE((folder / "traffic-000001.jsonl").stat().st_mode) == 0o600
    assert second["chat_template_kwargs"] == {"enable_thinking": False}
    choice, counts = whole["choices"][0], whole["usage"]["speculation"]
    for row in (first, second):
        assert row["tokens"] == prompt + answer and row["prompt_tokens"] == len(prompt)
        assert row["messages"] == [*QUESTION, {"role": "assistant", "content": choice["message"]["content"]}]
        assert (row["finish"], row["temperature"], row["source"]) == (choice["finish_reason"], 0, "server")
        assert (row["rounds"], row["drafted"]) == (counts["rounds"], counts["drafted"])
        assert sum(row["accepted"]) == counts["accepted"] and len(row["accepted"]) == row["rounds"]
        assert (row["head"], row["target"], row["category"]) == ("run/step", tiny.name, "traffic")
        assert (row["texts"], row["top_p"], row["repetition_penalty"]) == (None, None, 1.0)
        assert row["target_fingerprint"] == tiny.fingerprint()
        encoded = conversations.encode(small_tokenizer(), row)
        assert encoded.tokens == row["tokens"] and sum(encoded.mask) == len(answer)


def test_completions_are_recorded_with_their_texts_and_sampling(tiny, tmp_path):
    tokens = small_tokenizer()("Count to")["input_ids"]
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.2}
    with recorded(tiny, tmp_path) as (url, served):
        texts = [read_text(post(url, "completions", prompt=prompt, **sampling)) for prompt in ("Count to", tokens)]
        ask(url, temperature=None, stop=["\u0120never"])
        *rows, last = rows_of(served)
    for row, text in zip(rows, texts):
        assert row["messages"] is None and row["texts"] == ["Count to", text]
        assert row["tokens"][: row["prompt_tokens"]] == tokens and conversations.encode(small_tokenizer(), row).tokens
        assert sampling.items() <= row.items() and row["seed"] is row["grammar"] is None
    assert rows[0]["conversation"] == rows[1]["conversation"]
    assert [last[name] for name in sampling] == [1.0, None, None, 1.0]


def test_who_opts_out_fails_or_leaves_is_not_recorded(tiny, tmp_path):
    with recorded(tiny, tmp_path) as (url, served):
        ask(url, store=False)
        ask(url, store=False, stream=True)
        for fields in ({"n": 2}, {"metadata": "no"}, {"store": "no"}):
            assert next(iter(fields)) in read_error(post(url, messages=QUESTION, **fields))
        leave_early(url, 0.05)
        await_idle(served)
        ask(url, store=True, metadata={"conversation": "kept"})
        assert [row["conversation"] for row in rows_of(served)] == ["kept"]
    with recorded(tiny, tmp_path / "late", serve={"timeout": 0.05}) as (url, served):
        read_error(post(url, messages=QUESTION, **LONG), 504)
        assert rows_of(served) == []


def test_nothing_is_recorded_unless_asked_for(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(tiny) as (url, served):
        ask(url, store=True, metadata={"conversation": "a"})
        assert served.recorder is None and "recording" not in httpx.get(f"{url}/health").json()
    assert list(tmp_path.iterdir()) == []


def test_trouble_with_recording_ends_no_answer(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "append_text", full)
    with recorded(tiny, tmp_path) as (url, served):
        for _ in range(2):
            assert ask(url)["choices"]
            assert httpx.get(f"{url}/health").json()["recording"] is False and rows_of(served) == []
