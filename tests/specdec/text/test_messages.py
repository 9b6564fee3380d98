"""An assistant's turn, whoever wrote it: thoughts, calls, weights, template arguments, ends of turns."""

import json

import pytest

from specdec.engines import answers
from specdec.text import conversations as data
from specdec.text import reading
from specdec.text.messages import normalise_messages, parse_arguments, read_arguments
from tests.support.commands import write_rows
from tests.support.conversations import ASKS, HEAD, TAIL, as_row, pair, supervised, with_template
from tests.support.runs import load_packs
from tests.support.targets import small_tokenizer
from train.data.encoding import Encoding

QUESTION = {"role": "user", "content": "What floats?"}
# as Qwen3's: thoughts of the last answer, under their own key or inline; the prompt has none
THINKS = HEAD + (
    "{% if m.role == 'assistant' %}{% set thoughts = m.reasoning_content or '' %}{% set said = m.content %}"
    "{% if '</think>' in said %}{% set thoughts = said.split('</think>')[0].split('<think>')[-1] %}"
    "{% set said = said.split('</think>')[-1] %}{% endif %}"
    "{% if loop.last and thoughts %}{{ '<think>\n' ~ thoughts.strip() ~ '\n</think>\n\n' }}{% endif %}{{ said }}"
    "{% else %}{{ m.content }}{% endif %}"
) + TAIL  # fmt: skip
# as DeepSeek-R1's: thoughts are never written back
DROPS = HEAD + "{{ m.content.split('</think>')[-1] }}" + TAIL
# as gpt-oss's, with special tokens around channels; other ends for the last turn than for earlier ones
CHANNELS = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% if m.thinking and loop.last %}"
    "{{ '<|im_start|>assistant<|endoftext|>analysis\n' ~ m.thinking ~ '<|im_end|>' }}{% endif %}"
    "{{ '<|im_start|>assistant<|endoftext|>final\n' ~ m.content ~ ('<|endoftext|>' if loop.last else '<|im_end|>') }}"
    "{% else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
)
# as GLM's: the token of the next role ends a turn. <|im_start|> is the user's, <|im_end|> a tool's
ROLES = (
    "{% set roles = {'user': '<|im_start|>', 'tool': '<|im_end|>', 'assistant': '<|endoftext|>'} %}"
    "{% for m in messages %}{{ roles[m.role] ~ '\n' ~ m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '\n<call>' ~ c.function.name ~ ' ' ~ (c.function.arguments | tojson) ~ '</call>' }}{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|endoftext|>\n' }}{% endif %}"
)
# its markers hold the header of the turn, and the newline behind it
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
    "{{ '<|im_start|>assistant\n' ~ m.content ~ '<|im_end|>\n' }}{% endgeneration %}"
    "{% else %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endif %}{% endfor %}" + ASKS
)
# the prompt ends with an open thought
OPENS = (
    HEAD + "{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>\n' ~ (m.reasoning_content or '') ~ '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    + TAIL[: -len(ASKS)]
    + "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '\n</think>\n\n' }}{% endif %}{% endif %}"
)
EFFORT = "{{ 'Effort ' ~ (reasoning_effort or 'medium') ~ '\n' }}" + OPENS
CALL = {"name": "float", "arguments": {"what": "cork"}}
THOUGHTS = "Cork floats on water, so cork."


def answer(content: str, **fields) -> dict:
    return {"role": "assistant", "content": content, **fields}


def encode(template: str | None, messages: list[dict], **fields) -> list[str]:
    tokenizer = with_template(template)
    return supervised(tokenizer, data.encode(tokenizer, as_row(messages, **fields)))


# Thoughts


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking", "thoughts"])
def test_thoughts_are_supervised_under_any_of_their_names(key):
    message = answer("Cork.", **{key: THOUGHTS})
    whole = f"<think>\n{THOUGHTS}\n</think>\n\nCork.<|im_end|>"
    assert encode(THINKS, [QUESTION, message]) == [whole]
    assert encode(THINKS, [QUESTION, answer(f"<think>{THOUGHTS}</think>Cork.")]) == [whole]
    channels = f"<|endoftext|>analysis\n{THOUGHTS}<|im_end|><|im_start|>assistant<|endoftext|>final\nCork.<|endoftext|>"
    assert encode(CHANNELS, [QUESTION, message]) == [channels]
    with pytest.raises(ValueError, match=r"row 7: The chat template has no place for the thoughts"):
        encode(DROPS, [QUESTION, message])
    with pytest.raises(ValueError, match="has no place for the thoughts"):
        data.encode_prompt(small_tokenizer(), [QUESTION, message, QUESTION])


def test_inline_thoughts_that_the_template_drops_are_refused_and_else_kept():
    inline = [QUESTION, answer(f"<think>{THOUGHTS}</think>Cork.")]
    with pytest.raises(
        ValueError, match=r"row 7: The chat template of .* leaves out what the assistant says \(.floats on water"
    ):
        encode(DROPS, inline)
    assert encode(None, inline) == [f"<think>{THOUGHTS}</think>Cork.<|im_end|>"]


@pytest.mark.parametrize("content", ["a", "cork", "Cork floats on water", THOUGHTS])
def test_an_answer_whose_text_occurs_in_the_thoughts_is_supervised_whole(content):
    for template, end in ((CHANNELS, "<|endoftext|>"), (THINKS, "<|im_end|>")):
        (text,) = encode(template, [QUESTION, answer(content, reasoning_content=THOUGHTS)])
        assert text.count(content) >= 2 and text.endswith(content + end)
        assert encode(template, [QUESTION, answer(content)])[0].endswith(content + end)


def test_a_row_that_was_cut_ends_where_its_text_ends():
    for template, before in ((THINKS, "<think>\n"), (CHANNELS, "<|endoftext|>analysis\n")):
        cut = [QUESTION, answer("", reasoning_content=THOUGHTS)]
        assert encode(template, cut, finish="length") == [before + THOUGHTS]
        inline = [QUESTION, answer("<think>\n" + THOUGHTS)]
        assert encode(template, inline, finish="length") == [before + THOUGHTS]
        cut = [QUESTION, answer("Cork", reasoning_content=THOUGHTS)]
        (text,) = encode(template, cut, finish="length")
        assert text.startswith(before) and text.endswith("\nCork")


def test_earlier_answers_that_the_template_changes_are_counted_and_not_supervised(tmp_path):
    rows = [
        [QUESTION, answer("Cork.", reasoning=THOUGHTS)] * 2,
        [QUESTION, answer("Ice.")] * 3,
        [QUESTION, answer("Oil.")],
    ]
    for template, num in ((THINKS, 1), (OPENS, 3)):
        tokenizer = with_template(template)
        write_rows(tmp_path / "a.jsonl", [{"messages": messages} for messages in rows])
        with pytest.warns(UserWarning, match=f"^{num} answers of earlier turns are not supervised"):
            packs = load_packs(str(tmp_path / "a.jsonl"), Encoding(tokenizer, tmp_path / "c"), length=400, packed=False)
        first = next(row for row in packs if row[0].id == "0")[0]
        (text,) = supervised(tokenizer, first)
        assert text.endswith("Cork.<|im_end|>") and THOUGHTS in text
        assert next(data.encode(tokenizer, as_row(messages)).num_left_out for messages in rows) == 1


# Calls


@pytest.mark.parametrize("arguments", [CALL["arguments"], json.dumps(CALL["arguments"])])
def test_the_token_of_the_next_role_ends_a_turn(arguments):
    calls = answer("", tool_calls=[{"type": "function", "function": {**CALL, "arguments": arguments}}])
    said = '\n<call>float {"what": "cork"}</call><|im_end|>'
    messages = [QUESTION, calls, {"role": "tool", "content": "yes"}, answer("It does.")]
    assert encode(ROLES, messages) == [said, "It does."]
    later = encode(ROLES, [*messages, QUESTION, answer("Cork.")])
    assert later == [said, "It does.<|im_start|>", "Cork."]


def test_calls_without_any_special_token_are_supervised_whole():
    template = (
        "{% for m in messages %}{{ m.role ~ ': ' ~ m.content }}"
        "{% for c in m.tool_calls or [] %}{{ '(' ~ (c.function | tojson) ~ ')' }}{% endfor %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    calls = answer("", tool_calls=[{"type": "function", "function": CALL}])
    messages = [QUESTION, calls, {"role": "tool", "content": "yes"}, answer("It does.")]
    assert encode(template, messages) == [f"({json.dumps(CALL)})", "It does."]


def test_a_function_call_is_a_tool_call():
    said = {"name": "float", "content": "yes"}
    legacy = [QUESTION, answer("", function_call=CALL), {"role": "function", **said}, answer("It does.")]
    calls = [{"type": "function", "function": CALL}]
    modern = [QUESTION, answer("", tool_calls=calls), {"role": "tool", **said}, answer("It does.")]
    assert normalise_messages(legacy) == modern == normalise_messages(modern)
    assert encode(ROLES, legacy) == encode(ROLES, modern)
    with pytest.raises(ValueError, match="leaves out tool_calls"):
        encode(None, legacy)
    for call in ("float", {"arguments": "{}"}):
        with pytest.raises(ValueError, match=r"messages\[1\]: function_call must be"):
            normalise_messages([QUESTION, answer("", function_call=call)])


# Markers


@pytest.mark.parametrize("finish", ["stop", "length"])
def test_what_the_generation_prompt_supplies_is_not_supervised(finish):
    messages = [*pair("What floats?", "Cork."), *pair("And sinks?", "Iron, cork not.")]
    assert encode(MARKED, messages, finish=finish) == encode(None, messages, finish=finish)
    assert encode(MARKED, messages, finish=finish)[0] == "Cork.<|im_end|>"
    assert encode(MARKED, [QUESTION, answer("assistant\n", weight=1)]) == ["assistant\n<|im_end|>"]


# Weights


@pytest.mark.parametrize(
    "flag", [{"weight": 0}, {"weight": 0.0}, {"trainable": False}, {"train": False}, {"loss": False}]
)
@pytest.mark.parametrize("template", [None, MARKED, CHANNELS, ROLES])
def test_a_turn_of_weight_0_is_context(template, flag):
    ends = {"weight": 1} if "weight" in flag else {next(iter(flag)): True}
    messages = [QUESTION, answer("Iron.", **flag), QUESTION, answer("Cork.", **ends)]
    plain = pair("What floats?", "Iron.") + pair("What floats?", "Cork.")
    tokenizer = with_template(template)
    row, both = data.encode(tokenizer, as_row(messages)), data.encode(tokenizer, as_row(plain))
    assert row.tokens == both.tokens and supervised(tokenizer, row) == supervised(tokenizer, both)[1:]
    with pytest.raises(ValueError, match="row 7: all answers that could count have weight 0"):
        data.encode(tokenizer, as_row(messages[:2]))


# Arguments of the template


SAYS_OFF = [
    {"chat_template_kwargs": {"enable_thinking": False}}, {"chat_template_kwargs": '{"enable_thinking": false}'},
    {"chat_template_kwargs": {"thinking": False}}, {"enable_thinking": False}, {"thinking": False},
    {"thinking": False, "enable_thinking": False},
]  # fmt: skip


@pytest.mark.parametrize("row", SAYS_OFF, ids=str)
def test_rows_say_template_arguments_in_many_ways(tmp_path, row):
    tokenizer = with_template(EFFORT)
    write_rows(tmp_path / "p.jsonl", [{"prompt": "What floats?", **row}, {"prompt": "What floats?"}])
    texts = [tokenizer.decode(prompt.tokens) for prompt in data.load_prompts(str(tmp_path / "p.jsonl"), tokenizer)]
    assert [text.endswith("<think>\n\n</think>\n\n") for text in texts] == [True, False]
    (job, _) = answers.list_jobs(tokenizer, reading.load_prompts(str(tmp_path / "p.jsonl")), [0.0])
    written = answers.make_row(job, answers.WrittenAnswer("Cork.", "stop", [3, 4]), tokenizer="t")
    assert written["chat_template_kwargs"] == {"enable_thinking": False}
    encoded = data.encode(tokenizer, {**written, "tokens": None})
    assert encoded.tokens[: encoded.mask.index(True)] == job.tokens and encoded.arguments == {"enable_thinking": False}


def test_arguments_of_a_row_win_over_those_of_the_command(tmp_path):
    tokenizer, path = with_template(EFFORT), str(tmp_path / "p.jsonl")
    high, medium = {"reasoning_effort": "high"}, {"chat_template_kwargs": {"reasoning_effort": "medium"}}
    rows = [{"prompt": "a", **fields} for fields in ({}, high, medium, {"thinking": True})]
    write_rows(tmp_path / "p.jsonl", rows)
    arguments = parse_arguments({"reasoning_effort": "low", "thinking": "FALSE"})
    assert arguments == {"reasoning_effort": "low", "enable_thinking": False}
    texts = [tokenizer.decode(prompt.tokens) for prompt in data.load_prompts(path, tokenizer, arguments=arguments)]
    efforts = ["Effort low", "Effort high", "Effort medium", "Effort low"]
    assert [text.splitlines()[0] for text in texts] == efforts
    assert [text.endswith("</think>\n\n") for text in texts] == [True, True, True, False]
    with pytest.raises(ValueError, match=r"thinking=true: .* has no thinking mode"):
        data.load_prompts(path, small_tokenizer(), arguments={"enable_thinking": True})
    write_rows(tmp_path / "p.jsonl", [{**row, "completion": "b"} for row in rows])
    packs = load_packs(path, Encoding(tokenizer, tmp_path / "c", arguments=arguments), length=99, packed=False)
    texts = [tokenizer.decode(row.tokens) for (row,) in sorted(packs, key=lambda pack: pack[0].id)]
    assert [text.splitlines()[0] for text in texts] == efforts


UNREAD = r'reasoning_efort="?low"?: the chat template .* reads no .*_efort\. Did you mean reasoning_effort \('


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chat_template_kwargs": {"reasoning_efort": "low"}}, UNREAD),
        ({"chat_template_kwargs": ["enable_thinking"]}, "chat_template_kwargs must be an object"),
        ({"chat_template_kwargs": {"messages": []}}, "may not hold messages"),
        ({"enable_thinking": "no"}, "enable_thinking must be true or false"),
        (
            {"enable_thinking": True, "thinking": False},
            "thinking says another enable_thinking than the rest of the row",
        ),
    ],
)
def test_arguments_that_change_nothing_or_contradict_are_refused(tmp_path, row, message):
    tokenizer, source = with_template(EFFORT), tmp_path / "a.jsonl"
    write_rows(source, [{"messages": pair("a", "b")}, {"messages": pair("a", "b"), **row}])
    for load in (
        lambda: load_packs(str(source), Encoding(tokenizer, tmp_path / "c"), length=99, packed=False),
        lambda: data.load_prompts(str(source), tokenizer),
    ):
        with pytest.raises(ValueError, match=rf"a\.jsonl:2: .*{message}"):
            load()


def test_arguments_of_a_command_are_checked():
    written = {"date": "2026-11-27", "num": "3", "flag": "true", "name": "a b"}
    assert parse_arguments(written) == written | {"num": 3, "flag": True}
    for written, message in (
        ({"tools": "[]"}, "template.tools: tools is not a variable"),
        ({"thinking": "maybe"}, "template.thinking=maybe must be true or false"),
        ({"thinking": "true", "enable_thinking": "false"}, "contradict each other"),
    ):
        with pytest.raises(ValueError, match=message):
            parse_arguments(written)
    assert read_arguments({"thinking": "a text of others", "tools": []}) == {}
