"""Tests of requests with tools, calls and results, and of messages that a chat template refuses: status 400."""

import json

import httpx
import pytest

from specdec.text import conversations as data
from tests.specdec.text.test_chat_template import CALL, CALLS, HEAD, MESSAGES, TAIL, THINKS, TOOL, with_template
from tests.tools.server.test_app import post, read_error, serving
from tests.tools.server.test_record import recorded, rows_of

NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
NO_SYSTEM += HEAD + "{{ m['content'] }}" + TAIL
ASKED = MESSAGES[:3]


def ask(url: str, messages, **fields) -> httpx.Response:
    body = {"max_tokens": 4, "temperature": 0, "messages": messages, **fields}
    # httpx would refuse half of a surrogate pair itself
    headers = {"Content-Type": "application/json"}
    return httpx.post(f"{url}/v1/chat/completions", content=json.dumps(body), headers=headers)


def test_tools_calls_and_results_are_rendered_and_recorded(tiny, tmp_path):
    openai_form = [ASKED[0], {**ASKED[1], "content": None, "refusal": None}, {**ASKED[2], "tool_call_id": "call00001"}]
    as_text = {**CALL, "function": {"name": "get_tide", "arguments": json.dumps(CALL["function"]["arguments"])}}
    openai_form[1]["tool_calls"] = [as_text]
    tokenizer = with_template(CALLS)
    with recorded(tiny, tmp_path, serve={"template": CALLS}) as (url, served):
        answers = [
            ask(url, openai_form, tools=[TOOL], tool_choice="auto", parallel_tool_calls=True),
            ask(url, openai_form, tools=[TOOL], tool_choice="none"),
        ]
        rows = rows_of(served)
    for answer, row, tools in zip(answers, rows, ([TOOL], None)):
        assert answer.status_code == 200 and answer.json()["choices"][0]["message"]["role"] == "assistant"
        prompt = data.encode_prompt(tokenizer, ASKED, {"tools": tools} if tools else {})
        assert row["tokens"][: row["prompt_tokens"]] == prompt and row.get("tools") == tools
        again = data.encode(tokenizer, row | {"tokens": None})
        assert again.tokens[: len(prompt)] == prompt  # its messages say the same


BAD = [
    (None, {"tools": [TOOL]}, "leaves out tools"),
    (None, {"messages": ASKED}, "leaves out tool_calls"),
    (NO_SYSTEM, {"messages": [{"role": "system", "content": "a"}]}, "System role not"),
    (CALLS, {"tools": [TOOL], "tool_choice": "required"}, "cannot force a call"),
    (CALLS, {"tools": ["get_tide"]}, "tools"),
    (CALLS, {"messages": [{"role": "assistant", "content": None}]}, "content"),
    (CALLS, {"messages": [{"role": "user", "content": "\ud800"}]}, "half of a surrogate pair"),
    ("{{ 1 / 0 }}", {}, "cannot write these messages"),
]  # fmt: skip


@pytest.mark.parametrize(
    "template", dict.fromkeys(template for template, _, _ in BAD), ids=["own", "no system", "calls", "fails"]
)
def test_what_the_template_refuses_is_a_bad_request(tiny, template):
    with serving(tiny, template=template) as (url, served):
        for _, body, said in [each for each in BAD if each[0] == template]:
            assert said in read_error(ask(url, **{"messages": [{"role": "user", "content": "a"}], **body}))
        assert post(url, "completions", prompt="a").status_code == 200
        assert post(url, "completions", prompt=[len(served.tokenizer)]).status_code == 400


def test_the_thinking_mode_of_the_server_is_that_of_requests_without_one(tiny, tmp_path):
    with recorded(tiny, tmp_path, serve={"template": THINKS, "arguments": {"enable_thinking": False}}) as (url, served):
        question = [{"role": "user", "content": "a"}]
        for more in ({}, {"chat_template_kwargs": {"enable_thinking": True}}):
            assert ask(url, question, **more).status_code == 200
        rows = rows_of(served)
    prompts = [with_template(THINKS).decode(row["tokens"][: row["prompt_tokens"]]) for row in rows]
    assert [row["chat_template_kwargs"] for row in rows] == [{"enable_thinking": False}, {"enable_thinking": True}]
    assert [prompt.endswith("</think>\n\n") for prompt in prompts] == [True, False]
