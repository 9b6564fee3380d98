"""Requests whose answers follow a grammar: valid answers, together with free ones, and refusals in a sentence."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.tools.server.test_app import post, read_error, read_text, serving

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"sky": {"enum": ["blue", "grey"]}, "number": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["sky", "number"],
    "additionalProperties": False,
}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "sky", "strict": True, "schema": SCHEMA}}
UNMET = {"type": "integer", "minimum": 3, "maximum": 1}
QUESTION = [{"role": "user", "content": "What is the sky?"}]


@pytest.fixture(scope="module")
def url(tiny):
    with serving(tiny) as (url, _):
        yield url


def ask(url: str, **fields):
    return post(url, messages=QUESTION, **{"max_tokens": 60, **fields})


def test_ruled_and_free_requests_are_answered_together(url):
    """Each as it is alone, whatever the others are."""
    kinds = [
        {"response_format": FORMAT},
        {},
        {"structured_outputs": {"regex": "(sky|blue){2,4}"}},
        {"structured_outputs": {"grammar": 'start: "a" | "b" start'}},
        {"response_format": FORMAT, "temperature": 1, "seed": 3},
        {"response_format": FORMAT, "speculate": False},
        {"response_format": {"type": "text"}},
        {"response_format": {"type": "json_object"}},
    ]  # fmt: skip
    answers = [ask(url, **kind) for kind in kinds]
    alone = list(map(read_text, answers))
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda kind: read_text(ask(url, **kind)), kinds * 2))
    assert together == alone * 2 and alone[1] == alone[6] and alone[0] == alone[5]
    assert alone[2].replace("sky", "").replace("blue", "") == "" and alone[7].startswith("{")
    for number in (0, 4):
        assert set(json.loads(alone[number])) == {"sky", "number"}
        assert answers[number].json()["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"response_format": {"type": "json_schema"}}, "needs json_schema"),
        ({"response_format": {"type": "xml"}}, "give a type"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": UNMET}}}, "minimum"),
        ({"structured_outputs": {"regex": "(a"}}, "regex cannot be used"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "give regex or grammar"),
        ({"structured_outputs": {}}, "give regex or grammar"),
        ({"response_format": FORMAT, "structured_outputs": {"regex": "a"}}, "one grammar"),
        ({"response_format": FORMAT, "ignore_eos": True}, "where answers end"),
    ],
)  # fmt: skip
def test_what_cannot_be_followed_is_refused_in_a_sentence(url, fields, sentence):
    assert sentence in read_error(ask(url, **fields))
