"""Tests of the client of servers: lost and bad answers, several servers, the bound on requests, closing."""

import threading
import time

import pytest

from specdec.engines import client as engine_client
from specdec.engines.client import BadAnswer, EngineClient, Refused
from tests.support.small_server import SmallServer

PATH = "v1/completions"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(engine_client, "LONGEST_PAUSE", 0.02)


@pytest.fixture
def client_of(request):
    """client_of(server, ..., setting=...): a client that is closed at the end; its sentences are in `.said`"""

    def make(*servers: SmallServer, **settings) -> EngineClient:
        sentences: list[str] = []
        client = EngineClient(",".join(server.url for server in servers), say=sentences.append, **settings)
        client.said = sentences
        request.addfinalizer(client.close)
        return client

    return make


def echo(path: str, body: dict | None):
    return 200, {"said": body, "data": [{"id": "model"}]}


def answer_text(answer: dict):
    return answer["said"]["number"]


def ask(client: EngineClient, num: int) -> None:
    """Sends `num` requests at once, and checks that each gets its own answer."""
    futures = [client.submit(PATH, {"number": number}, answer_text) for number in range(num)]
    assert [future.result() for future in futures] == list(range(num))


def in_turn(*replies):
    """Answers the first requests so, and all others with the last one."""
    left, guard = list(replies), threading.Lock()

    def reply(path: str, body: dict | None):
        with guard:
            each = left.pop(0) if len(left) > 1 else left[0]
        return each(path, body) if callable(each) else each

    return reply


def test_answers_come_back_for_their_requests_and_what_is_in_flight_is_bounded(client_of):
    def slow(path, body):
        time.sleep(0.01)
        return echo(path, body)

    with SmallServer(slow) as server:
        client = client_of(server, in_flight=3)
        ask(client, 30)
        assert server.most_running == 3 and client.describe_models() == [[{"id": "model"}]] and not client.said


def test_several_servers_are_used_in_turn_and_one_takes_over(client_of):
    with SmallServer(echo) as first:
        with SmallServer(echo) as second:
            client = client_of(first, second, in_flight=4)
            ask(client, 20)
            assert len(first.requests) == len(second.requests) == 10
            assert client.describe_models() == [[{"id": "model"}]] * 2
        ask(client, 10)
        assert len(first.requests) == 10 + 1 + 10 and len(client.said) == 1 and "does not answer" in client.said[0]


def test_a_server_that_nobody_started_is_named_with_what_to_do(client_of):
    with SmallServer(echo) as server:
        pass
    client = client_of(server, patience=0)
    with pytest.raises(ValueError, match=rf"answers at {server.url} .*specdec launch_engine"):
        client.describe_models()
    with pytest.raises(ValueError, match=r"No server has answered for 0 minutes .*specdec launch_engine"):
        client.post(PATH, {}, answer_text)


def test_a_server_that_dies_and_comes_back_loses_nothing(client_of):
    server = SmallServer(in_turn(echo, None, None, echo))
    with server:
        client = client_of(server, in_flight=1)
        assert client.post(PATH, {"number": 1}, answer_text) == 1
    future = client.submit(PATH, {"number": 2}, answer_text)
    while not client.said:
        time.sleep(0.005)
    with server:  # at the same port; it cuts two connections before it answers
        assert future.result() == 2
    lost, back = client.said
    assert "does not answer" in lost and "answers again" in back


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((500, {"error": {"message": "out of memory"}}), "status 500, out of memory"),
        ((429, "slow down"), "status 429, slow down"),
        ((200, "no JSON"), "no JSON"),
        ((200, [1]), "no JSON object"),
        ((200, {"said": {"number": -1}}), "below 0"),
    ],
)
def test_bad_answers_are_asked_for_again_some_times(client_of, reply, message):
    def read(answer: dict) -> int:
        if answer["said"]["number"] < 0:
            raise BadAnswer("below 0")
        return answer_text(answer)

    with SmallServer(in_turn(*[reply] * (engine_client.TRIES - 1), echo)) as server:
        assert client_of(server).post(PATH, {"number": 7}, read) == 7
    with SmallServer(in_turn(reply)) as server:
        with pytest.raises(ValueError, match=f"gave 5 bad answers in a row. The last one: {message}"):
            client_of(server).post(PATH, {"number": 7}, read)
        assert len(server.requests) == engine_client.TRIES


def test_a_refusal_is_not_asked_for_again_and_what_is_no_list_of_models_is_refused(client_of):
    for status in (400, 404, 422):
        with SmallServer(in_turn((status, {"message": "too long"}))) as server:
            with pytest.raises(Refused, match=f"refuses the request with status {status}: too long"):
                client_of(server).post(PATH, {}, answer_text)
            assert len(server.requests) == 1
    for document in ({}, {"data": []}, {"data": ["model"]}, "text"):
        with SmallServer(in_turn((200, document))) as server, pytest.raises(ValueError, match="No server with OpenAI"):
            client_of(server).describe_models()


def test_closing_ends_requests_that_wait(client_of):
    release = threading.Event()

    def hang(path, body):
        if body is not None:
            release.wait(20)
        return echo(path, body)

    with SmallServer(hang, protocol="HTTP/1.1") as server:
        client = client_of(server, in_flight=2)
        assert client.describe_models()  # its connection is used again
        futures = [client.submit(PATH, {"number": n}, answer_text) for n in range(5)]
        while server.running < 2:
            time.sleep(0.005)
        began = time.monotonic()
        client.close()
        for future in futures[:2]:
            with pytest.raises(ValueError, match="was closed"):
                future.result(timeout=10)
        assert all(future.cancelled() for future in futures[2:]) and time.monotonic() - began < 5
        release.set()


def test_urls():
    wrong = ["localhost:8000", "http://localhost:8000,", "http://localhost:8000,vllm", "http://localhost:80a"]
    for urls in [*wrong, "http://\x7f", "http://", "http://[::1", "http://localhost:99999"]:
        with pytest.raises(ValueError, match=r"is not the URL of a server.*specdec launch_engine"):
            EngineClient(urls)
    with SmallServer(echo) as server:
        client = EngineClient(f" {server.url}/v1/ ")
        assert client.post(PATH, {"number": 3}, answer_text) == 3 and server.paths() == [PATH]
        client.close()


# Proxies of the environment

LOCAL = (
    "http://localhost:8000 http://127.0.0.1:1 http://127.3.2.1 http://[::1]:80 http://0.0.0.0:1 http://a.localhost/v1"
)
REMOTE = "http://example.org https://10.0.0.1:8000 http://localhost.example.org http://[2001:db8::1]:8000"
VARIABLES = "HTTP_PROXY http_proxy HTTPS_PROXY https_proxy ALL_PROXY all_proxy NO_PROXY no_proxy"


@pytest.fixture
def environment(monkeypatch):
    for name in VARIABLES.split():
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def test_which_addresses_are_of_this_machine():
    assert all(map(engine_client.is_local, LOCAL.split())) and not any(map(engine_client.is_local, REMOTE.split()))


@pytest.mark.parametrize("name", ["HTTP_PROXY", "http_proxy", "ALL_PROXY"])
def test_a_server_on_this_machine_is_asked_directly(client_of, environment, name):
    with SmallServer(in_turn((403, "blocked"))) as proxy, SmallServer(echo) as server:
        for address in (proxy.url, "socks5://nowhere:1"):  # the second would need another package
            environment.setenv(name, address)
            ask(client_of(server), 1)
            assert client_of(server, server).describe_models() == [[{"id": "model"}]] * 2 and not proxy.requests


def test_other_servers_are_asked_through_it_and_errors_say_so(environment):
    with SmallServer(in_turn((403, "blocked"))) as proxy, SmallServer(echo) as server:
        environment.setenv("HTTP_PROXY", f"http://user:password@127.0.0.1:{proxy.port}")
        client = EngineClient(f"http://engine.example:8000,{server.url}")
        through = r"\(through the proxy of HTTP_PROXY; NO_PROXY=engine\.example asks it directly\)"
        nobody = rf"No server with OpenAI's interface answers at http://engine\.example:8000 {through} \(.*403"
        with pytest.raises(ValueError, match=nobody) as refused:
            client.describe_models()
        with pytest.raises(Refused, match=r"/v1/completions \(through the proxy of HTTP_PROXY.*status 403: blocked"):
            client.post(PATH, {"number": 3}, answer_text)
        assert client.post(PATH, {"number": 4}, answer_text) == 4
        assert proxy.requests and "password" not in str(refused.value)
        client.close()
        environment.setenv("NO_PROXY", "engine.example")
        assert not any(map(engine_client.describe_proxy, ("http://engine.example:8000", "https://other.example")))
