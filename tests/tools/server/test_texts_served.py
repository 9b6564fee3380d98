"""Texts of a server whose target spells rare characters byte by byte: whole, streamed and recorded; and their ends."""

import copy
import json

import pytest

from specdec.target.model import Target
from specdec.tools.server.record import Recorder
from tests.support.decoding import greedy
from tests.support.targets import byte_fallback_tokenizer, save_target, small_tokenizer
from tests.tools.server.test_app import STOP, post, read_error, read_text, serving
from tests.tools.server.test_record import rows_in

TEXT = "春眠不觉晓, é 😀处处!"


@pytest.fixture(scope="module")
def spelled(tmp_path_factory):
    """A target with a byte-fallback vocabulary, served and recorded -> URL, folder of records"""
    pytest.importorskip("llguidance")
    folder = tmp_path_factory.mktemp("spelled")
    save_target(folder / "target", tokenizer=byte_fallback_tokenizer())
    target, recorder = Target.load(str(folder / "target"), dtype="float64"), Recorder(folder / "records")
    recorder.set_origin(target, byte_fallback_tokenizer())
    with serving(target, tokenizer=byte_fallback_tokenizer(), recorder=recorder) as (url, _):
        yield url, folder / "records"


def read_choices(body: str) -> list[dict]:
    """Those of a whole answer, or of the events of a stream."""
    lines = [line.removeprefix("data: ") for line in body.splitlines() if line]
    return [json.loads(line)["choices"][0] for line in lines if line != "[DONE]"]


def ask(spelled, path: str = "chat/completions", **fields) -> tuple[str, dict, dict]:
    """A request, whole and as a stream, which must say the same -> the text, the whole answer, the recorded row"""
    url, records = spelled
    question = {"prompt": "Say"} if path == "completions" else {"messages": "Say"}
    body = {"structured_outputs": {"regex": TEXT}, "max_tokens": 100} | question | fields
    whole = post(url, path, **body)
    text, choices = read_text(whole), read_choices(post(url, path, **body, stream=True).text)
    pieces = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    assert "".join(pieces) == text and not any("\ufffd" in piece for piece in pieces[:-1])
    rows = rows_in(records)[-2:]
    for row in rows:
        assert text == (row["texts"][1] if path == "completions" else row["messages"][-1]["content"])
    return text, whole.json(), rows[0]


@pytest.mark.parametrize("speculate", [True, False])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_characters_of_many_tokens_are_whole(spelled, path, speculate):
    text, whole, row = ask(spelled, path, speculate=speculate)
    assert text == TEXT and whole["choices"][0]["finish_reason"] == "stop"
    assert byte_fallback_tokenizer().decode(row["tokens"][row["prompt_tokens"] :], skip_special_tokens=True) == TEXT


def test_a_text_that_is_cut_inside_a_character_keeps_what_is_whole(spelled):
    for num, expected in ((3, "春"), (4, "春\ufffd"), (5, "春\ufffd"), (6, "春眠")):
        text, whole, _ = ask(spelled, max_tokens=num)
        assert text == expected and whole["choices"][0]["finish_reason"] == "length"


def test_a_prompt_that_is_cut_inside_a_character_is_recorded_as_far_as_it_is_whole(spelled):
    tokens = byte_fallback_tokenizer()("春眠", add_special_tokens=False)["input_ids"]
    read_text(post(spelled[0], "completions", prompt=tokens[:-1], max_tokens=2))
    assert rows_in(spelled[1])[-1]["texts"][0] == "春\ufffd"


@pytest.mark.parametrize("stop", ["不", "晓, é", "眠不觉", "😀"])
@pytest.mark.parametrize("speculate", [True, False])
def test_stop_strings_end_the_answer_at_their_last_byte(spelled, stop, speculate):
    text, whole, row = ask(spelled, stop=[stop, "never"], speculate=speculate)
    assert text == TEXT[: TEXT.index(stop)] and whole["choices"][0]["finish_reason"] == "stop" == row["finish"]
    answer = row["tokens"][row["prompt_tokens"] :]
    said = byte_fallback_tokenizer().decode(answer)
    assert said.endswith(stop) and "\ufffd" in byte_fallback_tokenizer().decode(answer[:-1])[-4:]
    assert whole["usage"]["completion_tokens"] == len(answer)


@pytest.mark.parametrize("ignored", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_a_special_token_ends_the_answer_as_a_stop_string(tiny, ignored, stream):
    """Also where the target's own ends are ignored. One of the answer's tokens is made a special one."""
    tokenizer = copy.deepcopy(small_tokenizer())
    prompt = tokenizer("The sky")["input_ids"]
    answer = greedy(tiny, None, STOP).generate([prompt], 24).tokens[0]
    index = next(n for n, token in enumerate(answer) if n > 2 and token not in answer[:n] and token not in STOP)
    name = tokenizer.convert_ids_to_tokens(answer[index])
    tokenizer.add_special_tokens({"additional_special_tokens": [name]})
    body = {"prompt": prompt, "ignore_eos": ignored, "return_token_ids": True, "stream": stream}
    with serving(tiny, tokenizer=tokenizer) as (url, _):
        choices = read_choices(post(url, "completions", **body, stop=[name]).text)
        refused = post(url, "completions", **body, stop=["x", f"?{name}"])
    assert f"holds the special token {name}" in read_error(refused) and refused.json()["error"]["param"] == "stop"
    assert [token for choice in choices for token in choice["token_ids"]] == answer[: index + 1]
    assert "".join(choice["text"] for choice in choices) == small_tokenizer().decode(answer[:index])
    assert choices[-1]["finish_reason"] == "stop"
