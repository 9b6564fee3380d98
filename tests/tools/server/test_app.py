"""Tests of the HTTP interface, with OpenAI's own client and with bytes that no client would send."""

import contextlib
import copy
import functools
import json
import re
import time
import types
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.proposers.heads import HeadProposer
from specdec.text import conversations
from specdec.tools.grammar.grammar import GrammarCompiler
from specdec.tools.server.app import ServerContext, make_app
from specdec.tools.server.drafts import describe_drafter
from specdec.tools.server.engine import Engine
from specdec.tools.server.lane import ServedDrafter
from specdec.tools.server.serve import make_length_note
from tests.support.decoding import chain_of, greedy
from tests.support.drafters import make_drafter
from tests.support.targets import small_tokenizer
from tests.tools.server.running import running

STOP = {2}
QUESTIONS = [f"Say {word} {number} times." for number, word in enumerate(["sky", "blue", "é 😀", "the", "a b c"] * 4)]
LONG = {"max_tokens": 300, "ignore_eos": True}


@contextlib.contextmanager
def serving(target, *, rows=4, queue=64, template=None, arguments=None, tokenizer=None, proposer=None, **settings):
    """A server of a tiny target, by default with an untrained EAGLE-3 head -> its URL, and its context"""
    tokenizer = copy.deepcopy(tokenizer or small_tokenizer())
    engine_tokenizer = copy.deepcopy(tokenizer)
    proposer = proposer or HeadProposer(make_drafter(target, "eagle3"), chain_of(3))
    drafted, plain = (Decoder(target, drafter, sampling=Sampling(), stop=STOP) for drafter in (proposer, None))
    engine = Engine(drafted, plain, max_requests=rows, max_waiting=queue, drafter=ServedDrafter("", "run/step"))
    grammars = functools.cache(lambda: GrammarCompiler(engine_tokenizer, target.vocab_size, STOP))
    usual = {"stop": frozenset(STOP), "model": "tiny", "max_length": 400, "render_page": lambda _: "<h1>a page</h1>"}
    usual |= {"compile_grammar": lambda grammar: grammars().make_constraint(grammar)}
    tokenizer.chat_template = template or tokenizer.chat_template
    encode = functools.partial(conversations.encode_chat, tokenizer, arguments or {})
    served = ServerContext(engine, tokenizer, engine_tokenizer, encode, **(usual | settings))
    with running(make_app(served)) as url:
        yield url, served
    assert not engine.alive


def post(url: str, path: str = "chat/completions", **body) -> httpx.Response:
    """The response to a request; `messages` may be a text."""
    if isinstance(body.get("messages"), str):
        body["messages"] = [{"role": "user", "content": body["messages"]}]
    return httpx.post(f"{url}/v1/{path}", json={"max_tokens": 24, "temperature": 0} | body, timeout=120)


def read_text(response: httpx.Response) -> str:
    """The text of a whole answer."""
    assert response.status_code == 200, response.text
    choice = response.json()["choices"][0]
    return choice["message"]["content"] if "message" in choice else choice["text"]


def read_error(response: httpx.Response, status: int = 400) -> str:
    """The sentence of a refusal."""
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


def await_that(condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def leave_early(url: str, timeout: float = 0.2, **body) -> None:
    """Asks for whole and streamed answers, and leaves before their end."""
    for stream in (True, False):
        question = {"messages": [{"role": "user", "content": "a"}], **LONG, **body, "stream": stream}
        asking = httpx.stream("POST", f"{url}/v1/chat/completions", json=question, timeout=timeout)
        with contextlib.suppress(httpx.TimeoutException), asking as answer:
            next(answer.iter_lines())


def await_idle(served) -> None:
    await_that(lambda: not (served.engine.num_running or served.engine.num_waiting))


@pytest.fixture(scope="module")
def answers(tiny):
    """The target's answer to each question, decoded alone and plainly before any server has the target."""
    tokenizer, decoder = small_tokenizer(), greedy(tiny, None, STOP)
    texts = {}
    for question in QUESTIONS:
        prompt = conversations.encode_prompt(tokenizer, [{"role": "user", "content": question}])
        tokens = decoder.generate([prompt], 24).tokens[0]
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        texts[question] = text, len(prompt), len(tokens)
    return texts


@pytest.fixture(scope="module")
def server(tiny, answers):
    with serving(tiny) as url_and_context:
        yield url_and_context


@pytest.fixture
def client(server):
    with openai.OpenAI(base_url=f"{server[0]}/v1", api_key="none", max_retries=0) as client:
        yield client


def ask(client, question: str, **fields):
    messages = [{"role": "user", "content": question}]
    settings = {"max_tokens": 24, "temperature": 0} | fields
    return client.chat.completions.create(model="tiny", messages=messages, **settings)


def join(chunks) -> str:
    """The text of a streamed chat."""
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_chat_whole_and_streamed(client, answers):
    for question, (text, num_prompt, num_answer) in list(answers.items())[:4]:
        reason = "length" if num_answer == 24 else "stop"
        for speculate in (True, False):
            found = ask(client, question, extra_body={"speculate": speculate})
            assert found.choices[0].message.content == text and found.model == "tiny"
            assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (num_prompt, num_answer)
            assert found.choices[0].finish_reason == reason
            counts = found.usage.speculation
            assert counts["drafted"] == 3 * speculate * counts["rounds"]
            assert sum(counts["accepted_by_position"]) == counts["accepted"]
            assert counts["accepted"] + counts["rounds"] >= num_answer - 1
            assert counts["tau"] == (num_answer - 1) / counts["rounds"]
        chunks = list(ask(client, question, stream=True, stream_options={"include_usage": True}))
        assert chunks[0].choices[0].delta.role == "assistant" and join(chunks) == text
        reasons = [chunk.choices[0].finish_reason for chunk in chunks[:-1]]
        assert reasons == [None] * (len(chunks) - 2) + [reason]
        assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == num_answer
        assert len({chunk.id for chunk in chunks}) == 1
    assert all(chunk.usage is None for chunk in ask(client, QUESTIONS[0], stream=True))


def test_completions_take_text_or_token_ids(tiny, client):
    text, ids = "The sky", small_tokenizer()("The sky")["input_ids"]
    settings = {"model": "tiny", "max_tokens": 9, "temperature": 0}
    by_text, by_ids = (client.completions.create(prompt=prompt, **settings).choices[0].text for prompt in (text, ids))
    streamed = client.completions.create(prompt=text, stream=True, **settings)
    assert by_text == by_ids == "".join(chunk.choices[0].text for chunk in streamed)
    for prompt in ([], "", [10**6], [-1], ["a", "b"]):
        with pytest.raises(openai.BadRequestError, match="prompt"):
            client.completions.create(model="tiny", prompt=prompt)
    with serving(tiny) as (url, served):
        served.tokenizer.chat_template, served.tokenizer.add_bos_token = None, True
        assert "send a prompt to /v1/completions" in read_error(post(url, messages="a"))
        continued = [post(url, "completions", prompt=form) for form in (text, f"<|im_start|>{text}", [1, *ids])]
        assert [answer.json()["usage"]["prompt_tokens"] for answer in continued] == [len(ids) + 1] * 3
        assert len(set(map(read_text, continued))) == 1


def test_settings_of_sampling(server):
    def text(**fields) -> str:
        return read_text(post(server[0], messages="a", **fields))

    assert text(temperature=1, seed=3) == text(temperature=1, seed=3)
    assert len({text(temperature=1) for _ in range(5)}) > 1
    assert {text(temperature=1, top_k=1) for _ in range(3)} == {text(temperature=0)}
    assert text(ignore_eos=True, max_tokens=30) != text(ignore_eos=True, max_tokens=30, repetition_penalty=100.0)


def test_stop_strings_end_the_text_before_them(client, answers):
    question = next(question for question, (text, *_) in answers.items() if len(text) > 8)
    text = answers[question][0]
    stop = text[4:6]
    whole = ask(client, question, stop=[stop, "never there"]).choices[0]
    assert whole.message.content == text[: text.find(stop)] and whole.finish_reason == "stop"
    assert join(ask(client, question, stop=stop, stream=True)) == whole.message.content


def test_many_at_once_are_not_mixed_up(server, answers):
    """More than there are rows, streamed and whole, drafted and plain, some of which are cut off by their clients."""
    url, served = server

    def check(number: int) -> bool:
        question = QUESTIONS[number % len(QUESTIONS)]
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=20) as client:
            fields = {"extra_body": {"speculate": number % 5 > 0}}
            if number % 3 == 0:
                return ask(client, question, **fields).choices[0].message.content == answers[question][0]
            with ask(client, question, stream=True, **fields) as stream:
                text = ""
                for chunk in stream:
                    text += chunk.choices[0].delta.content or ""
                    if number % 3 == 1 and text:
                        return answers[question][0].startswith(text)
                return text == answers[question][0]

    with ThreadPoolExecutor(40) as pool:
        assert all(pool.map(check, range(120)))
    await_idle(served)
    leave_early(url)  # their rows are free again
    await_idle(served)


def test_models_health_and_page(server, client):
    url, _ = server
    assert [model.id for model in client.models.list()] == ["tiny"]
    health = httpx.get(f"{url}/health").json()
    assert health["status"] == "ok" and "recording" not in health
    assert httpx.get(url).text == "<h1>a page</h1>"
    assert "GET" in read_error(httpx.get(f"{url}/v1/chat/completions"), 405)
    assert httpx.get(f"{url}/nothing").status_code == 404


USER = {"role": "user", "content": "a"}
IMAGE = {"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}
BAD_BODIES = [
    (b"{", 400, "not JSON"),
    (b"[1]", 400, "must be a JSON object"),
    (b"[" * 9000, 400, "not JSON"),
    (b"{}", 400, "'messages' is missing"),
    (b'{"messages": [], "temperature": NaN}', 400, "temperature"),
    (b'{"messages": "' + b"a " * (1 << 21) + b'"}', 413, "4194304 bytes"),
]
BAD_FIELDS = [
    ({"messages": []}, 400, "messages"),
    ({"messages": 3}, 400, "messages"),
    ({"messages": [{"role": "boss", "content": "a"}]}, 400, "role"),
    ({"messages": [IMAGE]}, 400, "parts of type text"),
    ({"temprature": 0}, 400, "Did you mean 'temperature'"),
    ({"temperature": -1}, 400, "temperature=-1"),
    ({"n": True}, 400, "n=true"),
    ({"presence_penalty": False}, 400, "presence_penalty=false"),
    ({"stop": "a<|im_end|>"}, 400, "special token <|im_end|>"),
    ({"top_p": 0}, 400, "top_p=0"),
    ({"n": 2}, 400, "cannot do n=2"),
    ({"logprobs": True}, 400, "cannot do logprobs"),
    ({"logprobs": 0}, 400, "cannot do logprobs=0"),  # of completions 0 asks for those of the tokens that were written
    ({"stop": [""]}, 400, "stop"),
    ({"max_tokens": 4000}, 400, "400 tokens"),
    ({"model": "gpt-9"}, 404, "no model 'gpt-9'"),
    ({"messages": [{"role": "user", "content": "a " * 900}]}, 400, "400 tokens"),
]


@pytest.mark.parametrize(
    ("body", "status", "sentence"),
    BAD_BODIES + [(json.dumps({"messages": [USER], **fields}).encode(), *refusal) for fields, *refusal in BAD_FIELDS],
    ids=[sentence for *_, sentence in BAD_BODIES + BAD_FIELDS],
)
def test_what_cannot_be_answered_is_refused_with_a_sentence(server, body, status, sentence):
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{server[0]}/v1/chat/completions", content=body, headers=headers)
    message = read_error(response, status)
    assert sentence in message and message.endswith((".", "?"))
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_harmless_fields_are_allowed_and_forms_of_other_pages_are_not(server):
    harmless = {"n": 1, "user": "me", "frequency_penalty": 0, "response_format": {"type": "text"}, "logprobs": False}
    read_text(post(server[0], messages="a", **harmless))
    headers = {"Content-Type": "text/plain"}
    assert httpx.post(f"{server[0]}/v1/completions", content=b'{"prompt": "a"}', headers=headers).status_code == 415


def test_a_round_for_the_page_holds_its_tokens(server, answers):
    streamed = post(server[0], messages=QUESTIONS[0], stream=True, details=True).text
    lines = [line.removeprefix("data: ") for line in streamed.split("\n\n")]
    assert lines[-2:] == ["[DONE]", ""]
    rounds = [chunk["round"] for chunk in map(json.loads, lines[:-2]) if "round" in chunk]
    assert rounds[0]["drafted"] is None and all(round_["drafted"] == 3 for round_ in rounds[1:])
    assert all(len(round_["tokens"]) == 1 + round_["accepted"] for round_ in rounds[1:-1])
    assert "".join(token for round_ in rounds for token in round_["tokens"]) == answers[QUESTIONS[0]][0]


def test_a_full_queue_a_late_answer_and_an_end_that_waits(tiny):
    with serving(tiny, rows=1, queue=1) as (url, _), ThreadPoolExecutor(6) as pool:
        statuses = sorted(pool.map(lambda _: post(url, "completions", prompt="a", **LONG).status_code, range(6)))
        assert statuses[0] == 200 and statuses[-1] == 429
    with serving(tiny, timeout=0.05) as (url, _), openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        start = time.monotonic()
        with pytest.raises(openai.InternalServerError, match="took longer"):
            client.completions.create(model="tiny", prompt="a", max_tokens=380, extra_body={"ignore_eos": True})
        assert time.monotonic() - start < 5  # the client does not ask again
    with ThreadPoolExecutor(1) as pool:
        with serving(tiny) as (url, served):
            asking = pool.submit(post, url, "completions", prompt="a", **LONG)
            await_that(lambda: served.engine.num_running)
        assert asking.result().json()["usage"]["completion_tokens"] == 300


def test_the_first_prompt_beyond_the_training_of_each_head_is_named(tiny, tmp_path, capsys):
    proposer, heads = types.SimpleNamespace(drafter=types.SimpleNamespace(windows=[None])), []
    for name, length in (("first", 2), ("second", 3)):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "about.json").write_text(json.dumps({"data": {"length": length}}))
        (folder / "drafter.json").write_text("{}")
        heads.append(describe_drafter("head", proposer, folder, folder))
    present = heads[:1]
    with serving(tiny, note_length=make_length_note(lambda: present[-1])) as (url, _):
        for prompt in ([5, 6], [5, 6, 7, 8], [5, 6, 7]):
            assert post(url, "completions", prompt=prompt).status_code == 200
        present.append(heads[1])  # by POST /v1/draft_weights
        for prompt in ([5, 6, 7], [5, 6, 7, 8], [5, 6, 7, 8]):
            assert post(url, "completions", prompt=prompt).status_code == 200
    first, second = re.findall(r"warning: .*", capsys.readouterr().out)
    assert "A prompt is longer than all texts that" in first and "/first was" in first
    assert "(4 against 2 tokens)" in first and "decode.window=2" in first
    assert "/second was" in second and "(4 against 3 tokens)" in second
