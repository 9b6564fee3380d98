"""Tests of the HTTP interface, with OpenAI's own client and with bytes that no client would send."""

import contextlib
import copy
import functools
import json
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.text import conversations as data
from specdec.tools.grammar.grammar import GrammarCompiler
from specdec.tools.server.app import ServerContext, make_app
from specdec.tools.server.engine import Engine
from tests.running import running
from tests.support import chain_of, greedy, make_drafter, small_tokenizer

STOP = {2}
QUESTIONS = [f"Say {word} {number} times." for number, word in enumerate(["sky", "blue", "é 😀", "the", "a b c"] * 4)]


@contextlib.contextmanager
def serving(target, *, rows=4, queue=64, template=None, arguments=None, tokenizer=None, proposer=None, **settings):
    """A server of a tiny target, by default with an untrained EAGLE-3 head -> its URL, and the record it serves"""
    tokenizer = copy.deepcopy(tokenizer or small_tokenizer())
    engine_tokenizer = copy.deepcopy(tokenizer)
    proposer = proposer or HeadProposer(make_drafter(target, "eagle3"), chain_of(3))
    drafted, plain = (Decoder(target, drafter, sampling=Sampling(), stop=STOP) for drafter in (proposer, None))
    engine = Engine(drafted, plain, max_requests=rows, max_waiting=queue)
    grammars = functools.cache(lambda: GrammarCompiler(engine_tokenizer, target.vocab_size, STOP))
    usual = {"stop": frozenset(STOP), "model": "tiny", "head": "run/step", "max_length": 400, "page": "<h1>a page</h1>"}
    tokenizer.chat_template = template or tokenizer.chat_template
    encode = functools.partial(data.encode_chat, tokenizer, arguments or {})
    served = ServerContext(
        engine,
        tokenizer,
        engine_tokenizer,
        encode,
        lambda grammar: grammars().make_constraint(grammar),
        **(usual | settings),
    )
    with running(make_app(served)) as url:
        yield url, served
    assert not engine.alive


@pytest.fixture(scope="module")
def answers(tiny):
    """What the target answers to each question, decoded alone and plainly before any server has the target."""
    tokenizer, decoder = small_tokenizer(), greedy(tiny, None, STOP)
    found = {}
    for question in QUESTIONS:
        prompt = data.encode_prompt(tokenizer, [{"role": "user", "content": question}])
        tokens = decoder.generate([prompt], 24).tokens[0]
        found[question] = tokenizer.decode(tokens, skip_special_tokens=True), len(prompt), len(tokens)
    return found


@pytest.fixture(scope="module")
def server(tiny, answers):
    with serving(tiny) as found:
        yield found


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, question: str, **fields):
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(
        model="tiny", messages=messages, **({"max_tokens": 24, "temperature": 0} | fields)
    )


def test_chat(client, answers):
    for question, (text, num_prompt, num_answer) in list(answers.items())[:4]:
        for speculate in (True, False):
            found = ask(client, question, extra_body={"speculate": speculate})
            assert found.choices[0].message.content == text and found.model == "tiny"
            assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (num_prompt, num_answer)
            assert found.choices[0].finish_reason == ("length" if num_answer == 24 else "stop")
            counts = found.usage.speculation
            assert counts["drafted"] == 3 * speculate * counts["rounds"]
            assert sum(counts["accepted_by_position"]) == counts["accepted"]
            assert counts["accepted"] + counts["rounds"] >= num_answer - 1
            assert counts["tau"] == (num_answer - 1) / counts["rounds"]


def test_streaming(client, answers):
    for question, (text, _, num_answer) in list(answers.items())[:4]:
        chunks = list(ask(client, question, stream=True, stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant"
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text
        assert [chunk.choices[0].finish_reason for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
        assert chunks[-2].choices[0].finish_reason in ("stop", "length")
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == num_answer
        assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in ask(client, QUESTIONS[0], stream=True))


def test_a_model_without_a_chat_template_continues_prompts(tiny):
    with serving(tiny) as (url, served):
        served.tokenizer.chat_template, served.tokenizer.add_bos_token = None, True
        settings = {"max_tokens": 3, "temperature": 0}
        refused = httpx.post(
            f"{url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "a"}], **settings}
        )
        assert refused.status_code == 400 and "send a prompt to /v1/completions" in refused.json()["error"]["message"]
        ids = [1, *small_tokenizer()("The sky")["input_ids"]]
        prompts = ("The sky", "<|im_start|>The sky", ids)
        found = [httpx.post(f"{url}/v1/completions", json={"prompt": prompt, **settings}).json() for prompt in prompts]
        assert [each["usage"]["prompt_tokens"] for each in found] == [len(ids)] * 3
        assert len({each["choices"][0]["text"] for each in found}) == 1


def test_completions_take_text_or_token_ids(client, tiny):
    tokenizer = small_tokenizer()
    text, ids = "The sky", tokenizer("The sky")["input_ids"]
    first, second = (
        client.completions.create(model="tiny", prompt=prompt, max_tokens=9, temperature=0).choices[0].text
        for prompt in (text, ids)
    )
    assert first == second
    streamed = client.completions.create(model="tiny", prompt=text, max_tokens=9, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == first
    for prompt in ([], "", [10**6], [-1], ["a", "b"]):
        with pytest.raises(openai.BadRequestError, match="prompt"):
            client.completions.create(model="tiny", prompt=prompt)


def test_settings_of_sampling(client):
    def text(**fields) -> str:
        return ask(client, "a", **fields).choices[0].message.content

    assert text(temperature=1, seed=3) == text(temperature=1, seed=3)
    assert len({text(temperature=1) for _ in range(5)}) > 1
    assert {text(temperature=1, extra_body={"top_k": 1}) for _ in range(3)} == {text(temperature=0)}
    free, never = (
        ask(client, "a", max_tokens=30, extra_body={"ignore_eos": True, "repetition_penalty": penalty})
        for penalty in (1.0, 100.0)
    )
    assert free.usage.completion_tokens == never.usage.completion_tokens == 30
    assert free.choices[0].message.content != never.choices[0].message.content


def test_stop_strings_end_the_text_before_them(client, answers):
    text = next(text for text, _, num in answers.values() if len(text) > 8)
    question = next(question for question, found in answers.items() if found[0] == text)
    stop = text[4:6]
    end = text.find(stop)
    found = ask(client, question, stop=[stop, "never there"])
    assert found.choices[0].message.content == text[:end] and found.choices[0].finish_reason == "stop"
    chunks = ask(client, question, stop=stop, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text[:end]


def test_many_at_once_are_not_mixed_up(server, answers):
    """More than there are rows, streamed and whole, drafted and plain, some of which are cut off by their clients."""
    url, served = server

    def answer_one(number: int) -> bool:
        question = QUESTIONS[number % len(QUESTIONS)]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=20) as client:
            more = {"extra_body": {"speculate": number % 5 > 0}}
            if number % 3 == 0:
                return ask(client, question, **more).choices[0].message.content == answers[question][0]
            with ask(client, question, stream=True, **more) as stream:
                text = ""
                for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    if number % 3 == 1 and text:
                        return answers[question][0].startswith(text)
                return text == answers[question][0]

    with ThreadPoolExecutor(40) as pool:
        assert all(pool.map(answer_one, range(120)))
    await_idle(served)


def await_idle(served) -> None:
    deadline = time.monotonic() + 20
    while served.engine.num_running or served.engine.num_waiting:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_clients_that_leave_free_their_rows(server):
    url, served = server
    for stream in (True, False):
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 300, "ignore_eos": True, "stream": stream}
        asking = httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=0.2)
        with contextlib.suppress(httpx.TimeoutException), asking as answer:
            next(answer.iter_lines())
        await_idle(served)


def test_models_health_and_page(server, client):
    url, _ = server
    assert [model.id for model in client.models.list()] == ["tiny"]
    found = httpx.get(f"{url}/health").json()
    assert found["status"] == "ok" and "recording" not in found
    assert httpx.get(url).text == "<h1>a page</h1>"
    missing = httpx.get(f"{url}/v1/chat/completions")
    assert missing.status_code == 405 and "GET" in missing.json()["error"]["message"]
    assert httpx.get(f"{url}/nothing").status_code == 404


BAD = [
    (b"{", 400, "not JSON"),
    (b"[1]", 400, "must be a JSON object"),
    (b'{"messages": []}', 400, "messages"),
    (b"{}", 400, "'messages' is missing"),
    (b'{"messages": "hi"}', 400, "messages"),
    (b'{"messages": [{"role": "boss", "content": "a"}]}', 400, "role"),
    (b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]}', 400, "parts of type text"),
    (b'{"messages": [{"role": "user", "content": "a"}], "temprature": 0}', 400, "Did you mean 'temperature'"),
    (b'{"messages": [{"role": "user", "content": "a"}], "temperature": -1}', 400, "temperature=-1"),
    (b'{"messages": [{"role": "user", "content": "a"}], "n": true}', 400, "n=true"),
    (b'{"messages": [{"role": "user", "content": "a"}], "presence_penalty": false}', 400, "presence_penalty=false"),
    (b'{"messages": [{"role": "user", "content": "a"}], "stop": "a<|im_end|>"}', 400, "special token <|im_end|>"),
    (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', 400, "temperature"),
    (b'{"messages": [{"role": "user", "content": "a"}], "top_p": 0}', 400, "top_p=0"),
    (b'{"messages": [{"role": "user", "content": "a"}], "n": 2}', 400, "cannot do n=2"),
    (b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}', 400, "leaves out tools"),
    (b'{"messages": [{"role": "user", "content": "a"}], "logprobs": true}', 400, "cannot do logprobs"),
    (b'{"messages": [{"role": "user", "content": "a"}], "stop": [""]}', 400, "stop"),
    (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 4000}', 400, "400 tokens"),
    (b'{"messages": [{"role": "user", "content": "a"}], "model": "gpt-9"}', 404, "no model 'gpt-9'"),
    (b'{"messages": [{"role": "user", "content": "' + b"a " * 900 + b'"}]}', 400, "400 tokens"),
    (b'{"messages": [{"role": "user", "content": "' + b"a " * (1 << 21) + b'"}]}', 413, "4194304 bytes"),
    (b"[" * 9000, 400, "not JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("body", "status", "sentence"), BAD, ids=[said for _, _, said in BAD])
def test_what_cannot_be_answered_is_refused_with_a_sentence(server, body, status, sentence):
    headers = {"Content-Type": "application/json"}
    found = httpx.post(f"{server[0]}/v1/chat/completions", content=body, headers=headers)
    assert found.status_code == status
    error = found.json()["error"]
    assert sentence in error["message"] and error["type"] == "invalid_request_error"
    assert error["message"].endswith((".", "?"))


def test_harmless_fields_are_allowed_and_forms_of_other_pages_are_not(server, client):
    harmless = {"n": 1, "user": "me", "frequency_penalty": 0, "response_format": {"type": "text"}}
    assert ask(client, "a", **harmless, logprobs=False).choices[0].message.role == "assistant"
    headers = {"Content-Type": "text/plain"}
    assert httpx.post(f"{server[0]}/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 415


def test_a_round_for_the_page_holds_its_tokens(server, answers):
    question = QUESTIONS[0]
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24}
    body |= {"stream": True, "details": True}
    with httpx.stream("POST", f"{server[0]}/v1/chat/completions", json=body) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    rounds = [chunk["round"] for chunk in map(json.loads, lines[:-1]) if "round" in chunk]
    assert rounds[0]["drafted"] is None and all(each["drafted"] == 3 for each in rounds[1:])
    assert all(len(each["tokens"]) == 1 + each["accepted"] for each in rounds[1:-1])
    assert "".join(token for each in rounds for token in each["tokens"]) == answers[question][0]


def test_a_full_queue_and_a_late_answer(tiny):
    body = {"prompt": "a", "max_tokens": 380, "ignore_eos": True}
    with serving(tiny, rows=1, queue=1) as (url, _), ThreadPoolExecutor(6) as pool:
        post = lambda _: httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code
        codes = sorted(pool.map(post, range(6)))
        assert codes[0] == 200 and codes[-1] == 429
    with serving(tiny, timeout=0.05) as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        start = time.monotonic()
        with pytest.raises(openai.InternalServerError, match="took longer"):
            client.completions.create(model="tiny", prompt="a", max_tokens=380, extra_body={"ignore_eos": True})
        assert time.monotonic() - start < 5  # the client does not ask again


def test_the_end_of_the_server_waits_for_answers(tiny):
    with serving(tiny) as (url, served):
        pool = ThreadPoolExecutor(1)
        body = {"prompt": "a", "max_tokens": 300, "ignore_eos": True}
        found = pool.submit(httpx.post, f"{url}/v1/completions", json=body, timeout=60)
        deadline = time.monotonic() + 20
        while not served.engine.num_running:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    assert found.result().json()["usage"]["completion_tokens"] == 300
