"""Tests of recorded conversations: the rows, their files, and what the server records for each request."""

import contextlib
import logging
import shutil
import stat
import threading
import time
from types import SimpleNamespace

import httpx
import openai
import pytest

from specdec.core import files, row_files
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.server import record as recording
from specdec.server.app import Served
from specdec.server.record import Exchange, Recorder, allows_recording
from tests.specdec.server.test_app import STOP, await_idle, serving
from tests.support import chain_of, greedy, make_drafter, small_tokenizer, word_tokenizer
from train.answers import datastore
from train.data import encoding, reading
from train.data import rows as data

TARGET = SimpleNamespace(name="tiny", fingerprint=lambda: "0123456789abcdef")
SAMPLING = Sampling(0.5, top_p=0.9)
END = min(STOP)


@pytest.fixture(autouse=True)
def heard(caplog):
    caplog.set_level(logging.WARNING)


def question(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def chat(text: str, said: str = "the sky", *, messages=None, **more) -> Exchange:
    """A question and its answer, whose ids are the letters one by one, as no tokenizer would cut them."""
    messages = messages or question(text)
    prompt = data.encode_prompt(small_tokenizer(), messages)
    letters = [token for letter in said for token in small_tokenizer()(letter)["input_ids"]]
    given = {"messages": messages, "text": said, "seed": 3, "head": "run/step_000100", "name": text} | more
    return Exchange([*prompt, *letters, END], len(prompt), END, "stop", SAMPLING, [2, 0], 6, **given)


def make_recorder(folder, **settings) -> Recorder:
    recorder = Recorder(folder, **settings)
    recorder.set_origin("server", TARGET, small_tokenizer())
    return recorder


def record(folder, *exchanges: Exchange, **settings) -> list[dict]:
    recorder = make_recorder(folder, **settings)
    for exchange in exchanges:
        recorder.record(exchange)
    recorder.close()
    assert not recorder.alive
    return list(recording.read_rows(folder))


def names_in(folder) -> list[str]:
    return [row["id"] for row in recording.read_rows(folder)]


# Rows


def test_a_row_holds_the_request_and_what_became_of_the_drafts(tmp_path):
    exchange = chat("hi", metadata={"tags": "x, y", "conversation": "c1"})
    (row,) = record(tmp_path / "a" / "b", exchange, tags=("y", "z"))
    assert row.pop("time") > 1.7e9
    assert row == {
        "id": "hi", "conversation": "c1", "category": "x", "tags": ["x", "y", "z"],
        "messages": [*question("hi"), {"role": "assistant", "content": "the sky"}], "texts": None,
        "tokens": exchange.tokens, "prompt_tokens": exchange.num_prompt, "ids": "given",
        "tokenizer": data.vocabulary(small_tokenizer(), len(small_tokenizer()))[0],
        "target": "tiny", "target_fingerprint": "0123456789abcdef",
        "temperature": 0.5, "top_k": None, "top_p": 0.9, "repetition_penalty": 1.0, "seed": 3, "grammar": None, "other_law": False,
        "finish": "stop", "thinking": None, "rounds": 2, "drafted": 6, "accepted": [2, 0], "head": "run/step_000100",
        "source": "server",
    }  # fmt: skip
    folder = tmp_path / "a" / "b"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "traffic-000001.jsonl").stat().st_mode) == 0o600


def test_rows_train_as_they_are(tmp_path):
    prompt = small_tokenizer()("Count to")["input_ids"]
    bare = Exchange([*prompt, 7, 8], len(prompt), None, "length", SAMPLING, [0], 3, prompt="Count to", text="the")
    rows = record(tmp_path / "t", chat("hi"), bare)
    assert rows[1]["messages"] is None and rows[1]["texts"] == ["Count to", "the"]
    packs = encoding.load_packs(
        str(tmp_path / "t"), encoding.Encoding(small_tokenizer(), tmp_path / "cache"), length=64, packed=False
    )
    found = {tuple(each.tokens): each.mask for number in range(2) for each in packs[number]}
    conversations = reading.load_conversations(str(tmp_path / "t"))
    for row, conversation in zip(rows, conversations):
        mask = [False] * row["prompt_tokens"] + [True] * (len(row["tokens"]) - row["prompt_tokens"])
        assert found[tuple(row["tokens"])] == mask
        encoded = data.encode(small_tokenizer(), conversation)
        assert (encoded.tokens, encoded.mask, encoded.category) == (row["tokens"], mask, "traffic")
    texts = list(datastore.read_texts(str(tmp_path / "t"), small_tokenizer()))
    answers = [row["tokens"][row["prompt_tokens"] :] for row in rows]
    assert [text[-len(answer) :] for text, answer in zip(texts, answers, strict=True)] == answers
    with pytest.raises(ValueError, match="no prompt"):
        reading.load_prompts(str(tmp_path / "t"))
    with pytest.raises(ValueError, match="no messages, and its token ids are of another tokenizer"):
        data.encode(word_tokenizer(20), conversations[1])


def test_turns_of_a_conversation_share_its_id_and_its_fate(tmp_path):
    first, other = question("a"), question("b")
    later = [*first, {"role": "assistant", "content": "x"}, {"role": "user", "content": "c"}]
    system = [{"role": "system", "content": "s"}]
    each = [first, later, other, [*system, *first], system]
    ids = [chat("", messages=messages).conversation for messages in each]
    assert ids[0] == ids[1] and len(set(ids)) == 4
    assert chat("a", metadata={"conversation": "c1"}).conversation == "c1"
    turns = [chat(f"question {n}", said) for n in range(200) for said in ("the sky", "the end")]
    names = [row["conversation"] for row in record(tmp_path, *turns, rate=0.3)]
    assert all(names.count(name) == 2 for name in names) and 30 < len(set(names)) < 90
    assert record(tmp_path / "none", chat("a"), rate=0.0) == []


def test_tags_of_any_form_are_read():
    tags = [chat("a", metadata={"tags": given}).tags for given in ("a,,b ", ["a", "b"], 7, None, {"a": 1})]
    assert tags == [["a", "b"], ["a", "b"], [], [], []] and chat("a", metadata="x").tags == []


def test_half_a_character_drops_the_row_and_no_more(tmp_path, caplog):
    rows = record(tmp_path, chat("a", metadata={"tags": "\ud800"}), chat("b"))
    assert [row["id"] for row in rows] == ["b"] and "A row was not recorded (UnicodeEncodeError" in caplog.text


def test_clients_opt_out():
    assert allows_recording({}, None) and allows_recording({"x-record": "true"}, True)
    assert not allows_recording({}, False) and not allows_recording({"x-record": " False"}, None)


# Files


@pytest.mark.parametrize("damage", [b'{"id": "half', b"\0\0\0\0", b""])
def test_a_damaged_last_line_is_cut_off_and_said(tmp_path, damage, caplog):
    record(tmp_path, chat("a"), chat("b"))
    path = tmp_path / "traffic-000001.jsonl"
    before = path.read_bytes()
    path.write_bytes(before + damage)
    record(tmp_path, chat("c"))
    assert names_in(tmp_path) == ["a", "b", "c"] and path.read_bytes().startswith(before)
    said = f"ended with a damaged line, which was cut off ({len(damage)} bytes)"
    assert said in caplog.text if damage else not caplog.text
    (tmp_path / "empty.jsonl").touch()
    assert row_files.cut_damaged_end(tmp_path / "empty.jsonl") == 0


def test_the_reader_skips_damaged_lines_and_counts_them(tmp_path):
    record(tmp_path, chat("a"))
    path = tmp_path / "traffic-000001.jsonl"
    path.write_bytes(b"{\n" + path.read_bytes() + b"\xff\n")
    (tmp_path / "traffic-notes.jsonl").write_text("{}\n")
    with pytest.warns(UserWarning, match="2 damaged lines were skipped"):
        assert names_in(tmp_path) == ["a"]
    with pytest.raises(ValueError, match="no recorded conversations"):
        names_in(tmp_path / "nothing")


def test_one_recorder_writes_in_a_folder_and_others_may_go_on(tmp_path):
    first = make_recorder(tmp_path)
    with pytest.raises(ValueError, match=r"Another recorder writes in .*choose another folder"):
        Recorder(tmp_path)
    lists = [[chat(f"{name} {n}") for n in range(50)] for name in "ab"]
    threads = [threading.Thread(target=lambda each=each: [first.record(row) for row in each]) for each in lists]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first.close()
    (tmp_path / "traffic-000001.jsonl").rename(tmp_path / "traffic-000002.jsonl")
    record(tmp_path, chat("new"))
    names = names_in(tmp_path)
    assert sorted(names) == sorted([*(each.name for rows in lists for each in rows), "new"]) and names[-1] == "new"
    assert [path.name for path in recording.list_files(tmp_path)] == ["traffic-000002.jsonl"]  # the newest goes on


def test_recording_stops_at_its_limit(tmp_path, caplog):
    recorder = make_recorder(tmp_path, max_bytes=5000)
    for number in range(20):
        recorder.record(chat(f"{number}"))
    recorder.flush()
    kept = names_in(tmp_path)
    assert not recorder.alive and kept == [str(number) for number in range(len(kept))] and 3 < len(kept) < 15
    assert caplog.text.count("Recording has stopped (the folder has record_max_bytes=5000: move its files away)") == 1
    recorder.close()
    assert recorder.path.stat().st_size <= 5000


def full(*_, **__):
    raise ValueError("the disk is full")


def test_a_full_disk_and_a_folder_that_vanishes_stop_recording_and_nothing_else(tmp_path, monkeypatch, caplog):
    recorder = make_recorder(tmp_path / "a")
    recorder.path.unlink()  # moved away: the file is made again
    recorder.record(chat("a"))
    recorder.flush()
    with monkeypatch.context() as patched:
        patched.setattr(files, "append", full)
        for _ in range(3):
            recorder.record(chat("b"))
            recorder.flush()
    assert not recorder.alive and caplog.text.count("Recording has stopped (the disk is full)") == 1
    recorder.record(chat("c"))
    recorder.close()
    assert names_in(tmp_path / "a") == ["a"]
    recorder = make_recorder(tmp_path / "b")
    shutil.rmtree(tmp_path / "b")
    recorder.record(chat("b"))
    recorder.close()
    assert recorder.stopped and caplog.text.count("Recording has stopped") == 2 and not (tmp_path / "b").exists()


def test_rows_that_come_too_fast_are_dropped(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(recording, "MOST_WAITING", 2)
    going, append = threading.Event(), files.append
    monkeypatch.setattr(files, "append", lambda *a, **k: going.wait(20) and append(*a, **k))
    recorder = make_recorder(tmp_path)
    for number in range(5):
        recorder.record(chat(f"{number}"))
    going.set()
    recorder.close()
    assert len(names_in(tmp_path)) in (2, 3) and "faster than they are written" in caplog.text


def test_settings_and_folders_that_cannot_be_are_refused(tmp_path, monkeypatch):
    for settings, what in (({"rate": 1.5}, "record_rate=1.5"), ({"max_bytes": 0}, "record_max_bytes=0")):
        with pytest.raises(ValueError, match=what):
            Recorder(tmp_path, **settings)
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="choose another folder"):
        Recorder(tmp_path / "file")

    def flock(*_):
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(ValueError, match=r"not supported.*choose another folder"):
        Recorder(tmp_path)


# The server


@contextlib.contextmanager
def recorded(tiny, folder, *, serve: dict | None = None, **settings):
    """A server that records -> its URL, and what it serves"""
    recorder = Recorder(folder, **settings)
    recorder.set_origin("server", tiny, small_tokenizer())
    with serving(tiny, recorder=recorder, **(serve or {})) as found:
        yield found


def ask(url: str, headers: dict | None = None, path: str = "chat/completions", **more) -> httpx.Response:
    body = {
        "max_tokens": 12,
        "temperature": 0,
        **({"messages": question("Say hello.")} if path.startswith("chat") else {}),
    }
    answer = httpx.post(f"{url}/v1/{path}", json=body | more, headers=headers, timeout=60)
    answer.raise_for_status()
    return answer


def rows_of(served: Served) -> list[dict]:
    served.recorder.flush()
    return list(recording.read_rows(served.recorder.folder))


def test_a_chat_is_recorded_with_the_ids_that_were_written(tiny, tmp_path):
    messages = question("Say hello.")
    prompt = data.encode_prompt(small_tokenizer(), messages)
    answer = greedy(tiny, None, STOP).generate([prompt], 12).tokens[0]
    with recorded(tiny, tmp_path, tags=("all",)) as (url, served):
        assert httpx.get(f"{url}/health").json()["recording"] is True
        whole = ask(url, metadata={"tags": "code,en", "conversation": "c7"}, seed=4, top_k=3).json()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            more = {"chat_template_kwargs": {"enable_thinking": False}}
            stream = client.chat.completions.create(
                model="tiny", messages=messages, max_tokens=12, temperature=0, stream=True, extra_body=more
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        first, second = rows_of(served)
    assert not served.recorder.alive
    Recorder(tmp_path).close()  # the server has left the folder
    assert first["id"] == whole["id"] and first["conversation"] == "c7"
    assert (first["category"], first["tags"], first["seed"]) == ("code", ["code", "en", "all"], 4)
    assert (second["category"], second["tags"], second["thinking"]) == ("all", ["all"], False)
    assert first["thinking"] is None and second["conversation"] != "c7" and abs(second["time"] - time.time()) < 60
    said, counts = whole["choices"][0], whole["usage"]["speculation"]
    for row in (first, second):
        assert row["tokens"] == prompt + answer and row["prompt_tokens"] == len(prompt)
        assert row["messages"] == [*messages, {"role": "assistant", "content": said["message"]["content"]}]
        assert (row["finish"], row["temperature"], row["source"]) == (said["finish_reason"], 0, "server")
        found = row["rounds"], row["drafted"], sum(row["accepted"])
        assert found == tuple(counts[name] for name in ("rounds", "drafted", "accepted"))
        assert len(row["accepted"]) == row["rounds"] and row["head"] == "run/step"
        assert (row["target"], row["target_fingerprint"]) == (tiny.name, tiny.fingerprint())
        encoded = data.encode(small_tokenizer(), row)
        assert encoded.tokens == row["tokens"] and sum(encoded.mask) == len(answer)
    assert text == said["message"]["content"]


def test_a_row_names_the_head_that_its_answer_began_with(tiny, tmp_path):
    new = lambda: Decoder(tiny, HeadProposer(make_drafter(tiny, "medusa"), chain_of(2)), sampling=Sampling(), stop=STOP)
    with recorded(tiny, tmp_path) as (url, served):
        body = {"messages": question("a"), "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            chunks = (line for line in answer.iter_lines() if line)
            next(chunks)  # the role, which is sent before the answer begins
            next(chunks)  # of the first round: the answer has begun
            served.engine.swap(new, "run/later").result(timeout=60)
            assert sum(1 for _ in chunks) > 50
        ask(url)
        ask(url, speculate=False)
        assert [row["head"] for row in rows_of(served)] == ["run/step", "run/later", None]


def test_completions_are_recorded_with_their_texts_and_sampling(tiny, tmp_path):
    tokens = small_tokenizer()("Count to")["input_ids"]
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "repetition_penalty": 1.2}
    with recorded(tiny, tmp_path) as (url, served):
        answers = [ask(url, path="completions", prompt=prompt, **sampling).json() for prompt in ("Count to", tokens)]
        ask(url, temperature=None, stop=["\u0120never"])
        *rows, last = rows_of(served)
    for row, answer in zip(rows, answers):
        assert row["messages"] is None and row["texts"] == ["Count to", answer["choices"][0]["text"]]
        assert row["tokens"][: row["prompt_tokens"]] == tokens and data.encode(small_tokenizer(), row).tokens
        assert sampling.items() <= row.items() and row["seed"] is row["grammar"] is None
    assert rows[0]["conversation"] == rows[1]["conversation"]
    assert [last[name] for name in sampling] == [1.0, None, None, 1.0]


def test_who_opts_out_fails_or_leaves_is_not_recorded(tiny, tmp_path):
    messages = question("Say hello.")
    with recorded(tiny, tmp_path) as (url, served):
        ask(url, store=False)
        ask(url, {"X-Record": "false"}, stream=True)
        for more in ({"n": 2}, {"metadata": "no"}, {"store": "no"}):
            found = httpx.post(f"{url}/v1/chat/completions", json={"messages": messages, **more})
            assert found.status_code == 400 and next(iter(more)) in found.json()["error"]["message"]
        body = {"messages": messages, "max_tokens": 300, "ignore_eos": True}
        for stream in (True, False):
            asking = httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": stream}, timeout=0.05)
            with contextlib.suppress(httpx.TimeoutException), asking as answer:
                next(answer.iter_lines())
        await_idle(served)
        ask(url, store=True, metadata={"conversation": "kept"})
        assert [row["conversation"] for row in rows_of(served)] == ["kept"]
    with recorded(tiny, tmp_path / "late", serve={"timeout": 0.05}) as (url, served):
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 504
        assert rows_of(served) == []


def test_nothing_is_recorded_unless_asked_for(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(tiny) as (url, served):
        ask(url, store=True, metadata={"tags": "a"})
        assert served.recorder is None and "recording" not in httpx.get(f"{url}/health").json()
    assert list(tmp_path.iterdir()) == []


def test_trouble_with_recording_ends_no_answer_and_the_end_writes_what_is_left(tiny, tmp_path, monkeypatch):
    append = files.append
    with recorded(tiny, tmp_path / "full") as (url, served):
        with monkeypatch.context() as patched:
            patched.setattr(files, "append", full)
            assert ask(url).json()["choices"]
            served.recorder.flush()
        assert httpx.get(f"{url}/health").json()["recording"] is False
        assert ask(url).json()["choices"] and rows_of(served) == []
    monkeypatch.setattr(files, "append", lambda *a, **k: time.sleep(0.05) or append(*a, **k))
    with recorded(tiny, tmp_path / "slow") as (url, _):
        for number in range(4):
            ask(url, max_tokens=1, metadata={"conversation": str(number)})
    assert [row["conversation"] for row in recording.read_rows(tmp_path / "slow")] == list("0123")
