"""Tests of the proxy: in front of this project's server, of vLLM's answers, and of servers that fail."""

import asyncio
import contextlib
import gzip
import json
import socket
import threading

import httpx
import openai
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from specdec.core.generation import reached
from specdec.server import traffic
from specdec.server.proxy import Proxy, make_proxy
from specdec.server.traffic import Origin, Recorder, Recording
from specdec.target.model import Target
from tests.running import running
from tests.small_server import STOP
from tests.specdec.server.test_app import serving
from tests.support import save_target, small_tokenizer
from train.data import rows as data

QUESTION = [{"role": "user", "content": "Say hello."}]
PROMPT = data.encode_prompt(small_tokenizer(), QUESTION)


def ids(text: str) -> list[int]:
    return small_tokenizer()(text)["input_ids"]


@contextlib.contextmanager
def proxied(upstream: str, folder, *, token_ids: bool = False, **settings):
    """-> the proxy's URL and the recorder"""
    encode = lambda messages, thinking: data.encode_prompt(small_tokenizer(), messages, thinking=thinking)
    recorder = Recorder(
        Recording(folder, **settings), origin=Origin("proxy", "tiny"), tokenizer=small_tokenizer(), encode_chat=encode
    )
    with running(make_proxy(Proxy(upstream, recorder, STOP, STOP, token_ids=token_ids, max_body=20_000))) as url:
        yield url, recorder


def rows_of(recorder: Recorder) -> list[dict]:
    """For a proxy that has ended: it records when a client has its answer already."""
    return list(traffic.read(recorder.settings.folder))


# In front of this project's server


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    save_target(folder)
    with serving(Target.load(str(folder), dtype="float64")) as (url, _):
        yield url


def test_answers_pass_unchanged_and_are_recorded(upstream, tmp_path):
    body = {"messages": QUESTION, "max_tokens": 12, "temperature": 0, "seed": 5, "metadata": {"tags": "a"}}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    with proxied(upstream, tmp_path) as (url, recorder):
        assert httpx.get(f"{url}/v1/models").json() == httpx.get(f"{upstream}/v1/models").json()
        assert httpx.get(f"{url}/nothing?x=1").status_code == 404
        direct, whole = (httpx.post(f"{at}/v1/chat/completions", json=body, timeout=60) for at in (upstream, url))
        assert whole.json()["choices"] == direct.json()["choices"] and whole.json()["usage"] == direct.json()["usage"]
        lines = [httpx.post(f"{at}/v1/chat/completions", json=streamed).text.splitlines() for at in (upstream, url)]
        bare = httpx.post(
            f"{url}/v1/completions", json={"prompt": "Count to", "max_tokens": 6, "temperature": 0}
        ).json()
    rows = rows_of(recorder)
    plain = [[json.loads(line[6:])["choices"] for line in each if line.startswith("data: {")] for each in lines]
    assert plain[0] == plain[1] and len(plain[0]) > 4 and lines[1][-2] == "data: [DONE]"
    counts, said = whole.json()["usage"]["speculation"], whole.json()["choices"][0]
    assert [row["id"] for row in rows[::2]] == [whole.json()["id"], bare["id"]]
    for row in rows[:2]:
        assert row["messages"] == [*QUESTION, said["message"]]
        assert (row["temperature"], row["seed"], row["top_k"], row["tags"]) == (0, 5, None, ["a"])
        assert (row["finish"], row["source"], row["ids"]) == (said["finish_reason"], "proxy", "retokenised")
        end = [STOP] if row["finish"] == "stop" else []
        assert row["tokens"] == PROMPT + ids(said["message"]["content"]) + end
        assert (row["rounds"], row["drafted"]) == (counts["rounds"], counts["drafted"])
        assert len(row["accepted"]) == counts["rounds"]
        assert reached(row["accepted"], max(row["accepted"])) == counts["accepted_by_position"]
        assert data.encode(small_tokenizer(), row).tokens == row["tokens"]
    assert rows[2]["messages"] is None and rows[2]["texts"] == ["Count to", bare["choices"][0]["text"]]


def test_openais_client_streams_through_it(upstream, tmp_path):
    with (
        proxied(upstream, tmp_path) as (url, recorder),
        openai.OpenAI(base_url=f"{url}/v1", api_key="secret") as client,
    ):
        stream = client.chat.completions.create(
            model="tiny", messages=QUESTION, max_tokens=8, stream=True, temperature=0
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    (row,) = rows_of(recorder)
    assert row["messages"][-1]["content"] == text and row["rounds"] is row["accepted"] is None
    assert "secret" not in (tmp_path / "traffic-000001.jsonl").read_text()


def test_who_opts_out_or_fails_is_not_recorded(upstream, tmp_path):
    body = {"messages": QUESTION, "max_tokens": 4}
    with proxied(upstream, tmp_path, rate=1.0) as (url, recorder):
        ask = lambda body, **more: httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60, **more).status_code
        assert ask({**body, "store": False}) == ask(body, headers={"X-Record": "false"}) == 200
        assert ask({**body, "temperature": -1}) == 400 and ask({"messages": "x"}) == 400 and ask([1]) == 400
        assert ask({"messages": [{"role": "user", "content": "a " * 20_000}]}) == 413
    assert rows_of(recorder) == []


# In front of a server whose answers the test writes


@contextlib.contextmanager
def scripted(reply):
    """reply: request and its JSON -> a response. -> URL, and the requests (headers, JSON) so far"""
    seen: list[tuple[dict, dict]] = []

    async def answer(request: Request) -> Response:
        body = json.loads(await request.body())
        seen.append((dict(request.headers), body))
        return reply(body)

    with running(Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])) as url:
        yield url, seen


def sent(*documents: dict) -> Response:
    """One document as a whole answer, several as a stream."""
    if len(documents) == 1:
        return Response(json.dumps(documents[0]), media_type="application/json")
    lines = [f"data: {json.dumps(document)}\n\n" for document in documents]

    async def parts():
        for line in [*lines, "data: [DONE]\n\n"]:
            yield line[:9]  # chunks need not end where lines do
            yield line[9:]

    return StreamingResponse(parts(), media_type="text/event-stream")


def choice(finish: str | None = "stop", **more) -> dict:
    return {"index": 0, "finish_reason": finish, **more}


WHOLE = {"id": "w", "prompt_token_ids": [5, 6], "choices": [choice(message={"content": "the"}, token_ids=[7, 8, STOP])]}
CHUNKS = [
    {"id": "c", "prompt_token_ids": [5, 6], "choices": [choice(None, delta={"role": "assistant", "content": ""})]},
    {"id": "c", "choices": [choice(None, delta={"content": "th"}, token_ids=[7])]},
    {"id": "c", "choices": [choice("stop", delta={"content": "e"}, token_ids=[8, STOP], stop_reason=None)]},
]
BARE = {"id": "b", "choices": [choice("length", text="the", prompt_token_ids=[5, 6], token_ids=[7, 8])]}


def test_token_ids_of_vllm_are_taken_as_they_are(tmp_path):
    def reply(body):
        assert body["return_token_ids"] is True
        return sent(BARE) if "prompt" in body else sent(*CHUNKS) if body.get("stream") else sent(WHOLE)

    with scripted(reply) as (upstream, seen), proxied(upstream, tmp_path, token_ids=True) as (url, recorder):
        chat = {"messages": QUESTION, "temperature": 0.5, "model": "m"}
        assert httpx.post(f"{url}/v1/chat/completions", json=chat).json() == WHOLE
        httpx.post(f"{url}/v1/chat/completions", json={**chat, "stream": True})
        httpx.post(f"{url}/v1/completions", json={"prompt": [5, 6]})
        assert seen[0][1] == {**chat, "return_token_ids": True}
    rows = rows_of(recorder)
    assert [row["id"] for row in rows] == ["w", "c", "b"]
    for row in rows:
        assert row["ids"] == "given" and row["tokens"][:4] == [5, 6, 7, 8] and row["prompt_tokens"] == 2
    assert rows[0]["tokens"] == rows[1]["tokens"] and rows[0]["messages"] == rows[1]["messages"]
    assert rows[2]["texts"] == [small_tokenizer().decode([5, 6]), "the"]


def test_requests_reach_the_server_as_they_were(tmp_path):
    body = b'{"messages":  [{"role": "user", "content": "\xc3\xa9"}], "n": 1}'
    headers = {"Authorization": "Bearer secret", "X-Mine": b"\xe9", "Content-Type": "application/json"}
    seen = {}

    async def answer(request: Request) -> Response:
        seen.update(
            body=await request.body(), headers=dict(request.headers), url=str(request.url), raw=request.headers.raw
        )
        return Response(json.dumps(WHOLE), headers={"X-Theirs": "1", "X-Request-Id": "r"})

    app = Starlette(routes=[Route("/{path:path}", answer, methods=["POST"])])
    with running(app) as upstream, proxied(upstream, tmp_path) as (url, recorder):
        found = httpx.post(f"{url}/v1/chat/completions?a=%2Fb", content=body, headers=headers)
    (row,) = rows_of(recorder)
    assert seen["body"] == body and seen["url"] == f"{upstream}/v1/chat/completions?a=%2Fb"
    assert seen["headers"]["authorization"] == "Bearer secret" and (b"x-mine", b"\xe9") in seen["raw"]
    assert found.headers["x-theirs"] == "1" and found.headers["x-request-id"] == "r"
    assert row["ids"] == "given" and "secret" not in json.dumps(row)


def test_the_end_of_a_turn_is_added_only_where_the_model_wrote_it(tmp_path):
    plain = {"choices": [choice(message={"content": "the"})]}
    stopped = {"choices": [choice(message={"content": "the"}, stop_reason="x")]}
    cut = {"choices": [choice("length", message={"content": "the"})]}
    answers = [plain, cut, plain, stopped]
    with (
        scripted(lambda body: sent(answers[body["user"]])) as (upstream, _),
        proxied(upstream, tmp_path) as (url, recorder),
    ):
        for number, more in enumerate([{}, {}, {"stop": "x"}, {"stop": "x"}]):
            httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION, "user": number, **more})
    rows = rows_of(recorder)
    ends = [row["tokens"][len(PROMPT) + len(ids("the")) :] for row in rows]
    assert ends == [[STOP], [], [], []]


NOT_RECORDED = [
    ({"choices": [choice(message={"content": "a"}), choice(message={"content": "b"}) | {"index": 1}]}, {"n": 2}),
    ({"choices": [choice("tool_calls", message={"content": None, "tool_calls": [{}]})]}, {}),
    ({"choices": [choice(message={"content": "a", "reasoning_content": "hm"})]}, {}),
    ({"choices": [choice("content_filter", message={"content": "a"})]}, {}),
    ({"choices": [choice(message={"content": ""})]}, {}),
    ({"choices": [choice(message={"content": "a"})]}, {"tools": [{"type": "function"}]}),
    (
        {"choices": [choice(message={"content": "a"})]},
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    ),
    ({"error": {"message": "no"}}, {}),
    ({"choices": "what"}, {}),
    ([1], {}),
]


@pytest.mark.parametrize(("document", "more"), NOT_RECORDED, ids=range(len(NOT_RECORDED)))
def test_what_cannot_be_a_row_passes_and_is_not_recorded(tmp_path, document, more):
    with scripted(lambda _: sent(document)) as (upstream, _), proxied(upstream, tmp_path) as (url, recorder):
        found = httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION, **more})
        assert found.json() == document
    assert rows_of(recorder) == []


OWN_PROMPTS = [
    {"continue_final_message": True}, {"add_generation_prompt": False}, {"documents": [{"text": "x"}]},
    {"chat_template": "{{ messages }}"}, {"chat_template_kwargs": {"tone": "short"}},
    {"chat_template_kwargs": {"enable_thinking": "no"}},
]  # fmt: skip


def test_prompts_that_are_not_made_of_their_texts_alone_need_ids(tmp_path):
    text = {"id": "t", "choices": [choice(message={"content": "the"})]}
    reply = lambda body: sent(WHOLE if body["user"] else text)
    plain = {"echo": False, "add_generation_prompt": True, "chat_template_kwargs": {"enable_thinking": False}}
    with scripted(reply) as (upstream, _), proxied(upstream, tmp_path) as (url, recorder):
        for given in (False, True):
            for more in (*OWN_PROMPTS, plain, {"echo": True}):
                body = {"messages": QUESTION, "user": given, **more}
                assert httpx.post(f"{url}/v1/chat/completions", json=body).status_code == 200
    rows = rows_of(recorder)
    assert [row["ids"] for row in rows] == ["retokenised"] + ["given"] * (len(OWN_PROMPTS) + 1)


def test_what_changes_the_law_of_an_answer_is_marked(tmp_path):
    other = [
        {"guided_json": {}, "guided_regex": "a+"},
        {"min_p": 0.1},
        {"presence_penalty": 1},
        {"frequency_penalty": -1},
    ]
    other += [{"response_format": {"type": "of another kind"}}]
    usual = [{}, {"min_p": 0, "presence_penalty": 0.0, "typical_p": 1}, {"response_format": {"type": "json_object"}}]
    with scripted(lambda _: sent(WHOLE)) as (upstream, _), proxied(upstream, tmp_path) as (url, recorder):
        for more in (*other, *usual, {"logit_bias": {"5": 9}}):
            httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION, **more})
    assert [row["other_law"] for row in rows_of(recorder)] == [True] * len(other) + [False] * len(usual)


def test_parts_of_text_are_joined(tmp_path):
    parts = [{"role": "user", "content": [{"type": "text", "text": "Say "}, {"type": "text", "text": "hello."}]}]
    with scripted(lambda _: sent(WHOLE)) as (upstream, _), proxied(upstream, tmp_path) as (url, recorder):
        httpx.post(f"{url}/v1/chat/completions", json={"messages": parts})
    assert rows_of(recorder)[0]["messages"][0] == QUESTION[0]


def test_compressed_answers_elsewhere_pass_as_they_are(tmp_path):
    packed = gzip.compress(b"hello")
    reply = lambda _: Response(packed, headers={"Content-Encoding": "gzip"})
    accept = {"Accept-Encoding": "gzip"}
    with scripted(reply) as (upstream, seen), proxied(upstream, tmp_path) as (url, recorder):
        assert httpx.post(f"{url}/v1/embeddings", json={}, headers=accept).text == "hello"
        httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION}, headers=accept)
    assert [headers["accept-encoding"] for headers, _ in seen] == ["gzip", "identity"] and rows_of(recorder) == []


def test_a_server_that_is_down_is_a_sentence(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        upstream = f"http://127.0.0.1:{free.getsockname()[1]}"
    with proxied(upstream, tmp_path) as (url, recorder):
        found = httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION})
        assert (
            found.status_code == 502 and "does not answer (ConnectError): start it" in found.json()["error"]["message"]
        )
    assert rows_of(recorder) == []


def test_cookies_of_one_client_are_not_sent_with_anothers(tmp_path):
    def reply(body):
        return Response(json.dumps(WHOLE), headers={"Set-Cookie": f"session={body['user']}; Path=/"})

    with scripted(reply) as (upstream, seen), proxied(upstream, tmp_path) as (url, _):
        ask = lambda name, **more: httpx.post(f"{url}/v1/embeddings", json={"user": name}, **more)
        assert ask("alice").headers["set-cookie"] == "session=alice; Path=/"
        ask("bob")
        ask("bob", headers={"Cookie": "session=bob"})
    assert [headers.get("cookie") for headers, _ in seen] == [None, None, "session=bob"]


@pytest.mark.parametrize("size", [b"Transfer-Encoding: chunked", b"Content-Length: 1000"])
def test_a_server_that_dies_in_the_middle_is_a_sentence(tmp_path, caplog, size):
    """The client sees that the answer is not whole, and nothing is recorded."""
    said = b"data: " + json.dumps({"id": "c", "choices": [choice("stop", delta={"content": "the"})]}).encode() + b"\n\n"
    part = b"%x\r\n%s\r\n" % (len(said), said) if b"chunked" in size else said

    def die(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        connection.recv(1 << 16)
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n" + size + b"\r\n\r\n" + part)
        connection.close()

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=die, args=(listening,), daemon=True).start()
        upstream = f"http://127.0.0.1:{listening.getsockname()[1]}"
        with proxied(upstream, tmp_path) as (url, recorder):
            asking = httpx.stream("POST", f"{url}/v1/chat/completions", json={"messages": QUESTION, "stream": True})
            with pytest.raises(httpx.RemoteProtocolError), asking as answer:
                assert answer.status_code == 200
                answer.read()
    assert rows_of(recorder) == [] and "The server has not ended an answer" in caplog.text
    assert "Traceback" not in caplog.text


@pytest.mark.parametrize("begun", [True, False])
def test_a_client_that_leaves_closes_the_request_to_the_server(tmp_path, begun):
    asked, closed = threading.Event(), threading.Event()

    async def app(scope, receive, send):
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        asked.set()
        if begun:
            await send(
                {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
            )
            await send({"type": "http.response.body", "body": b"data: {}\n\n", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            await asyncio.sleep(0.01)
        closed.set()

    with running(app) as upstream, proxied(upstream, tmp_path) as (url, recorder):
        asking = httpx.stream(
            "POST", f"{url}/v1/chat/completions", json={"messages": QUESTION, "stream": True}, timeout=0.5
        )
        with contextlib.suppress(httpx.TimeoutException), asking as answer:
            next(answer.iter_lines())
        assert asked.wait(10) and closed.wait(10)
    assert rows_of(recorder) == []


def test_a_server_on_this_machine_is_not_asked_through_a_proxy_of_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # where nobody listens
    with scripted(lambda _: sent(WHOLE)) as (upstream, _), proxied(upstream, tmp_path) as (url, recorder):
        answer = httpx.post(f"{url}/v1/chat/completions", json={"messages": QUESTION}, trust_env=False)
    assert answer.json() == WHOLE and len(rows_of(recorder)) == 1
