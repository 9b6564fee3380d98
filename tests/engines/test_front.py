"""front.py: OpenAI's completions over an engine that yields rounds, and what the referee reads of its answers."""

import ast
import contextlib
import itertools
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from specdec.engines.front import front
from specdec.engines.front.front import Front, Generator, read_stop_tokens, yield_rounds
from specdec.measuring.servers import referee, server

END = 90


class Counting(Generator):
    """Answers n with n + 1, n + 2, ..; of three drafts in a round, as many are accepted as the round's number mod 3."""

    owner, version, model, stop, vocabulary = "transformers", "5.19", "counting", frozenset([END]), 100
    max_length, longest = 64, 3

    def __init__(self):
        self.running = self.most_running = self.ended = 0
        self.pause, self.error_after = 0.0, 99

    def generate(self, prompt: list[int], max_tokens: int, stop: set[int]) -> Iterator[list[int]]:
        yield from yield_rounds(lambda put: self.run(put, prompt[-1] + 1, max_tokens, 3))

    def generate_plainly(self, prompt: list[int], max_tokens: int, stop: set[int]) -> Iterator[list[int]]:
        yield from yield_rounds(lambda put: self.run(put, prompt[-1] + 1, max_tokens, 0))

    def run(self, put, token: int, max_tokens: int, num_drafts: int) -> None:
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            for number in range(max_tokens):
                time.sleep(self.pause)
                if number == self.error_after:
                    raise RuntimeError("out of memory")
                size = 1 + (number % 3 if num_drafts else 0)
                self.drafted = num_drafts
                put(list(range(token, token + size)))
                token += size
        finally:
            self.running -= 1
            self.ended += 1


@contextlib.contextmanager
def serving(generator: Generator, **limits) -> Iterator[str]:
    with Front(generator, "127.0.0.1", 0, **limits) as running:
        thread = threading.Thread(target=running.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield running.url
        finally:
            running.shutdown()


BODY = {"prompt": [4, 5], "max_tokens": 12, "temperature": 0}


def ask(url: str, path: str = "/v1/completions", **fields) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=BODY | fields, trust_env=False, timeout=20)


def connect(url: str) -> server.Server:
    body = {**BODY, **server.EXTRA_FIELDS["transformers"], "stream": True, "stream_options": {"include_usage": True}}
    return server.Server(url, "counting", "transformers", "None", body, 20.0, print)


def test_the_referee_counts_rounds_and_drafts():
    with serving(Counting()) as url, connect(url).open(in_flight=3) as connection:
        batch = connection.send_requests([("a", {"prompt": [5]}), ("b", {"prompt": [9]}), ("c", {"prompt": [END - 3]})])
        plain = connection.send_requests([("a", {"prompt": [5]})], speculate=False).answers[0]
    long, _, ended = batch.answers
    assert long.ids == list(range(6, 18)) and not long.ended and long.sizes == [1, 2, 3, 1, 2, 3]
    assert referee.summarise_drafts([batch], 0)["tau"] == (11 + 11 + 2) / (5 + 5 + 1)
    assert long.server_counts == referee.Speculation(6, 15, 5, 0, [4, 2], 3, [1, 2, 0, 1, 2])
    assert ended.ids == [END - 2, END - 1, END] and ended.ended
    assert (plain.ids, plain.server_counts.rounds, plain.server_counts.drafted) == (long.ids, 11, 0)


def test_whole_answers_and_the_model():
    with serving(Counting()) as url:
        whole = ask(url, prompt=[80], return_token_ids=True).json()
        longer = ask(url, prompt=[80], ignore_eos=True, return_token_ids=True).json()
        (model,) = httpx.get(f"{url}/v1/models", trust_env=False).json()["data"]
        assert httpx.get(f"{url}/health", trust_env=False).json() == {"status": "ok", "waiting": 0}
    choice = whole["choices"][0]
    assert choice["token_ids"] == list(range(81, END + 1)) and choice["finish_reason"] == "stop"
    assert longer["choices"][0]["token_ids"] == list(range(81, 93))
    counts = {"rounds": 5, "drafted": 15, "accepted": 4, "accepted_by_position": [3, 1], "tau": 9 / 5}
    assert whole["usage"]["speculation"] == counts and whole["usage"]["completion_tokens"] == 10
    assert (model["owned_by"], model["max_model_len"], model["draft"]["drafts"]) == ("transformers", 64, 3)
    assert model["version"] == "5.19"


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"prompt": "a text"}, 400, "prompt must be the token ids of one prompt, from 0 to 99; texts are not read"),
        ({"prompt": [100]}, 400, "from 0 to 99"),
        ({"max_tokens": 0}, 400, "max_tokens=0 beside"),
        ({"max_tokens": False}, 400, "max_tokens=False beside"),
        ({"max_tokens": []}, 400, "max_tokens=[] beside"),
        ({"temperature": False}, 400, "cannot do temperature=False"),
        ({"stream": True, "stream_options": "x"}, 400, "stream_options='x' must be an object"),
        ({"max_tokens": 63}, 400, "max_tokens=63 beside a prompt of 2 tokens: the target has room for 64"),
        ({"temperature": 1}, 400, "answers greedily and cannot do temperature=1"),
        ({"temperature": None}, 400, "give temperature 0"),
        ({"stop": ["."]}, 400, "cannot do stop="),
        ({"modle": "counting"}, 400, "no field 'modle'"),
        ({"stream": 1}, 400, "stream=1 must be true or false"),
        ({"model": "gpt"}, 404, "no model 'gpt' here, but 'counting'"),
        ({"path": "/v1/chat/completions"}, 400, "takes token ids, and no messages"),
        ({"path": "/v1/embeddings"}, 404, "There is no POST /v1/embeddings here"),
    ],
)
def test_requests_are_refused_with_a_sentence(fields, status, message):
    with serving(Counting()) as url:
        answer = ask(url, **fields)
        assert answer.status_code == status and message in answer.json()["error"]["message"]
        assert httpx.post(f"{url}/v1/completions", content=b"[", trust_env=False).status_code == 400
        assert ask(url).status_code == 200


def test_one_answer_at_a_time_and_a_full_queue():
    generator = Counting()
    generator.pause = 0.02
    with serving(generator, max_waiting=2) as url, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda _: ask(url), range(6)))
    assert generator.most_running == 1
    refused = [answer for answer in answers if answer.status_code == 429]
    assert 1 <= len(refused) < 6 and refused[0].headers["retry-after"] == "1"
    assert all(answer.status_code in (200, 429) for answer in answers)


def test_an_engine_that_fails_and_a_client_that_leaves():
    generator = Counting()
    generator.error_after = 2
    with serving(generator) as url:
        assert ask(url).json()["error"]["message"] == "The engine failed: RuntimeError: out of memory"
        events = ask(url, stream=True).text.split("\n\n")
        assert "out of memory" in events[-2] and "[DONE]" not in events[-2]
        generator.error_after, generator.pause, generator.ended = 99, 0.02, 0
        with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}, trust_env=False) as answer:
            next(answer.iter_raw())
        generator.pause = 0.0
        assert ask(url).status_code == 200 and generator.ended == 2


def test_clients_that_neither_send_nor_read_are_left(monkeypatch):
    """An idle one, one with half a request, and one that stops reading in the middle of a stream."""
    monkeypatch.setattr(front.Handler, "timeout", 0.3)
    generator = Counting()
    generator.max_length, generator.model = 1 << 20, "counting" * 1000  # long events fill the buffers
    head = "POST /v1/completions HTTP/1.1\r\nContent-Length: "
    body = json.dumps({**BODY, "max_tokens": 4000, "ignore_eos": True, "stream": True})
    with serving(generator) as url, contextlib.ExitStack() as stack:
        address = ("127.0.0.1", int(url.rpartition(":")[2]))
        idle, half, full = (stack.enter_context(socket.create_connection(address, 20)) for _ in range(3))
        half.sendall(f"{head}99\r\n\r\n{{".encode())
        full.sendall(f"{head}{len(body)}\r\n\r\n{body}".encode())
        assert idle.recv(1) == half.recv(1) == b""
        assert ask(url).status_code == 200 and generator.ended == 2


def test_a_generator_that_cannot_leave_out_drafts():
    class Drafting(Counting):
        generate_plainly = Generator.generate_plainly

    with serving(Drafting()) as url:
        assert "cannot leave out drafts" in ask(url, speculate=False).json()["error"]["message"]


def test_stop_tokens_and_imports(tmp_path):
    assert read_stop_tokens(tmp_path) == frozenset()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    assert read_stop_tokens(tmp_path) == {2}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 4]}))
    assert read_stop_tokens(tmp_path) == {3, 4}
    with open(front.__file__) as source:
        nodes = list(ast.walk(ast.parse(source.read())))
    imports = [node for node in nodes if isinstance(node, ast.Import)]
    names = list(itertools.chain.from_iterable(node.names for node in imports))
    modules = {name.name for name in names} | {str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {module.partition(".")[0] for module in modules} <= sys.stdlib_module_names
