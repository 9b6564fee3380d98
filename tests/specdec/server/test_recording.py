"""Tests of the server's recording: what is written for each request, and for which none."""

import contextlib
import time

import httpx
import openai
import pytest

from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.server import traffic
from specdec.server.app import Served
from specdec.server.traffic import Origin, Recorder, Recording
from tests.specdec.server.test_app import STOP, await_idle, serving
from tests.support import chain_of, greedy, make_drafter, small_tokenizer
from train.data import rows as data

QUESTION = [{"role": "user", "content": "Say hello."}]


@contextlib.contextmanager
def recording(tiny, folder, *, serve: dict | None = None, **settings):
    """A server that records -> its URL, and what it serves"""
    tokenizer = small_tokenizer()
    encode = lambda messages, thinking: data.encode_prompt(tokenizer, messages, thinking=thinking)
    origin = Origin("server", "tiny", tiny.fingerprint(), "of nobody")
    recorder = Recorder(Recording(folder, **settings), origin=origin, tokenizer=tokenizer, encode_chat=encode)
    with serving(tiny, recorder=recorder, **(serve or {})) as found:
        yield found


def ask(url: str, headers: dict | None = None, path: str = "chat/completions", **more) -> httpx.Response:
    body = {"max_tokens": 12, "temperature": 0, **({"messages": QUESTION} if path.startswith("chat") else {}), **more}
    answer = httpx.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=60)
    answer.raise_for_status()
    return answer


def rows_of(served: Served) -> list[dict]:
    served.recorder.flush()
    return list(traffic.read(served.recorder.settings.folder))


def test_a_chat_is_recorded_with_the_ids_that_were_written(tiny, tmp_path):
    prompt = data.encode_prompt(small_tokenizer(), QUESTION)
    answer = greedy(tiny, None, STOP).generate([prompt], 12).tokens[0]
    with recording(tiny, tmp_path, tags=("all",)) as (url, served):
        assert httpx.get(f"{url}/health").json()["recording"] is True
        whole = ask(url, metadata={"tags": "code,en", "conversation": "c7"}, seed=4, top_k=3).json()
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            more = {"chat_template_kwargs": {"enable_thinking": False}}
            stream = client.chat.completions.create(
                model="tiny", messages=QUESTION, max_tokens=12, temperature=0, stream=True, extra_body=more
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        first, second = rows_of(served)
    assert first["id"] == whole["id"] and first["conversation"] == "c7"
    assert (first["category"], first["tags"], first["seed"]) == ("code", ["code", "en", "all"], 4)
    assert (second["category"], second["tags"], second["thinking"]) == ("all", ["all"], False)
    assert first["thinking"] is None and second["conversation"] != "c7" and abs(second["time"] - time.time()) < 60
    said = whole["choices"][0]
    counts = whole["usage"]["speculation"]
    for row in (first, second):
        assert row["tokens"] == prompt + answer and row["prompt_tokens"] == len(prompt) and row["ids"] == "given"
        assert row["messages"] == [*QUESTION, {"role": "assistant", "content": said["message"]["content"]}]
        assert (row["finish"], row["temperature"], row["source"]) == (said["finish_reason"], 0, "server")
        assert (row["rounds"], row["drafted"], sum(row["accepted"])) == tuple(
            counts[name] for name in ("rounds", "drafted", "accepted")
        )
        assert len(row["accepted"]) == row["rounds"] and (row["target"], row["head"]) == ("tiny", "run/step")
        encoded = data.encode(small_tokenizer(), row)
        assert encoded.tokens == row["tokens"] and sum(encoded.mask) == len(answer)
    assert text == said["message"]["content"]


def test_a_row_names_the_head_that_its_answer_began_with(tiny, tmp_path):
    new = lambda: Decoder(tiny, HeadProposer(make_drafter(tiny, "medusa"), chain_of(2)), sampling=Sampling(), stop=STOP)
    with recording(tiny, tmp_path) as (url, served):
        body = {"messages": QUESTION, "max_tokens": 200, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=60) as answer:
            chunks = (line for line in answer.iter_lines() if line)
            next(chunks)  # the role, which is sent before the answer begins
            next(chunks)  # of the first round: the answer has begun
            served.engine.swap(new, "run/later").result(timeout=60)
            assert sum(1 for _ in chunks) > 50
        ask(url)
        ask(url, speculate=False)
        assert [row["head"] for row in rows_of(served)] == ["run/step", "run/later", None]


def test_a_completion_is_recorded_with_its_texts(tiny, tmp_path):
    tokens = small_tokenizer()("Count to")["input_ids"]
    with recording(tiny, tmp_path) as (url, served):
        texts = [
            ask(url, path="completions", prompt=prompt).json()["choices"][0]["text"] for prompt in ("Count to", tokens)
        ]
        rows = rows_of(served)
    for row, text in zip(rows, texts):
        assert row["messages"] is None and row["texts"] == ["Count to", text]
        assert row["tokens"][: row["prompt_tokens"]] == tokens and data.encode(small_tokenizer(), row).tokens
    assert rows[0]["conversation"] == rows[1]["conversation"]


def test_sampling_settings_are_those_that_were_used(tiny, tmp_path):
    with recording(tiny, tmp_path) as (url, served):
        ask(url, temperature=0.7, top_p=0.9, top_k=5, repetition_penalty=1.2)
        ask(url, temperature=None, stop=["\u0120never"])
        first, second = rows_of(served)
    names = ("temperature", "top_p", "top_k", "repetition_penalty", "seed", "grammar")
    assert [first[name] for name in names] == [0.7, 0.9, 5, 1.2, None, None]
    assert [second[name] for name in names] == [1.0, None, None, 1.0, None, None]


def test_who_opts_out_fails_or_leaves_is_not_recorded(tiny, tmp_path):
    with recording(tiny, tmp_path) as (url, served):
        ask(url, store=False)
        ask(url, {"X-Record": "false"}, stream=True)
        assert httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION, "n": 2}).status_code == 400
        body = {"messages": QUESTION, "max_tokens": 300, "ignore_eos": True}
        for stream in (True, False):
            asking = httpx.stream("POST", f"{url}/v1/chat/completions", json={**body, "stream": stream}, timeout=0.05)
            with contextlib.suppress(httpx.TimeoutException), asking as answer:
                next(answer.iter_lines())
        await_idle(served)
        ask(url, store=True, metadata={"conversation": "kept"})
        assert [row["conversation"] for row in rows_of(served)] == ["kept"]
    with recording(tiny, tmp_path / "late", serve={"timeout": 0.05}) as (url, served):
        body = {"messages": QUESTION, "max_tokens": 300, "ignore_eos": True}
        assert httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).status_code == 504
        assert rows_of(served) == []


def test_nothing_is_recorded_unless_asked_for(tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with serving(tiny) as (url, served):
        ask(url, store=True, metadata={"tags": "a"})
        assert served.recorder is None and "recording" not in httpx.get(f"{url}/health").json()
    assert list(tmp_path.iterdir()) == []


def refuse(row: dict) -> dict:
    raise RuntimeError("no")


def test_trouble_with_recording_ends_no_answer(tiny, tmp_path, monkeypatch):
    with recording(tiny, tmp_path / "hook", redact=refuse) as (url, served):
        assert ask(url).json()["choices"] and rows_of(served) == []
    with recording(tiny, tmp_path / "full") as (url, served):
        with monkeypatch.context() as patched:
            patched.setattr("specdec.core.files.append", full)
            assert ask(url).json()["choices"]
            served.recorder.flush()
        assert httpx.get(f"{url}/health").json()["recording"] is False
        assert ask(url).json()["choices"] and rows_of(served) == []


def full(*_, **__):
    raise ValueError("the disk is full")


def test_the_end_of_the_server_writes_what_is_left(tiny, tmp_path):
    slow = lambda row: time.sleep(0.05) or row
    with recording(tiny, tmp_path, redact=slow) as (url, served):
        for number in range(4):
            ask(url, max_tokens=1, metadata={"conversation": str(number)})
    assert [row["conversation"] for row in traffic.read(tmp_path)] == list("0123")
    assert not served.recorder.alive


@pytest.mark.parametrize("field", ["metadata", "store"])
def test_fields_of_another_form_are_refused(tiny, tmp_path, field):
    with recording(tiny, tmp_path) as (url, _):
        found = httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION, field: "no"})
    assert found.status_code == 400 and field in found.json()["error"]["message"]
