"""Tests of what chat templates do with tools, calls and thinking modes, and of tokenizers that do not fit the model."""

import copy
import json
import warnings

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from specdec import loading
from specdec.engines import answers
from specdec.proposers import datastore_texts
from specdec.target.model import load_tokenizer
from specdec.text import chat_template, conversations, reading
from tests.support.commands import write_rows
from tests.support.conversations import HEAD, TAIL, as_row, pair, supervised, with_template
from tests.support.runs import load_packs
from tests.support.targets import save_target, small_tokenizer
from train.data.encoding import Encoding

TOOLS = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for t in tools %}{{ t | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
)
AS_OBJECT = "{% for c in m.tool_calls or [] %}{{ '<call>' ~ (c.function | tojson) ~ '</call>' }}{% endfor %}"
AS_TEXT = AS_OBJECT.replace("(c.function | tojson)", "c.function.name ~ ' ' ~ c.function.arguments")
CALLS = TOOLS + HEAD + "{{ m['content'] }}" + AS_OBJECT + TAIL
TEXT_CALLS = TOOLS + HEAD + "{{ m['content'] }}" + AS_TEXT + TAIL
SPECIAL = CALLS.replace("'<call>'", "'<|endoftext|>'").replace("'</call>'", "'<|endoftext|>'")  # a special token
THINKS = (  # as Qwen3's, with thoughts in the last answer only
    HEAD
    + "{% if m.role == 'assistant' and loop.last %}{{ '<think>\n' ~ (m.reasoning_content or '') ~ '\n</think>\n\n' }}"
    "{% endif %}{{ m['content'] }}" + TAIL[:-11] + "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "get_tide", "parameters": {"type": "object", "properties": {}}}}
HARBOUR = {"harbour": "Sandvik", "day": 3}
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_tide", "arguments": HARBOUR}}
ASKED = [{"role": "user", "content": "Tide?"}, {"role": "assistant", "content": "", "tool_calls": [CALL]}]
MESSAGES = [*ASKED, {"role": "tool", "content": "14:20"}, {"role": "assistant", "content": "At 14:20."}]
SILENT = CALLS.replace(HEAD, HEAD + "{% if m.role != 'tool' %}").replace(
    "{{ m['content'] }}", "{{ m['content'] }}{% endif %}"
)
PLAIN = pair("3+4?", "Seven.")
OFF = {"enable_thinking": False}


# Tools and their calls


@pytest.mark.parametrize(
    "arguments", [CALL["function"]["arguments"], json.dumps(CALL["function"]["arguments"]), None, "{}"]
)
@pytest.mark.parametrize(
    ("template", "open", "close"),
    [(CALLS, "<call>", "</call>"), (TEXT_CALLS, "<call>", "</call>"), (SPECIAL, "<|endoftext|>", "<|endoftext|>")],
    ids=["object", "text", "special"],
)
def test_tools_are_written_and_calls_supervised_to_their_end(template, open, close, arguments):
    tokenizer = with_template(template)
    call = {**CALL, "function": {"name": "get_tide", "arguments": arguments}}
    messages = [MESSAGES[0], {**MESSAGES[1], "tool_calls": [CALL, call]}, *MESSAGES[2:]]
    encoded = conversations.encode(tokenizer, as_row(messages, tools=[TOOL]))
    text = tokenizer.decode(encoded.tokens)
    assert text.startswith(f"<|im_start|>system\n{json.dumps(TOOL)}<|im_end|>\n<|im_start|>user")
    first, second = supervised(tokenizer, encoded)
    whole = json.dumps(CALL["function"]["arguments"])
    num = 1 if arguments in (None, "{}") else 2
    assert first.count(whole) == num and first.count("{}") == 2 - num and second == "At 14:20.<|im_end|>"
    assert first.startswith(open) and first.endswith(f"{close}<|im_end|>") and first.count("get_tide") == 2


@pytest.mark.parametrize(
    ("template", "fields", "lost"),
    [
        (None, {"messages": MESSAGES, "tools": [TOOL]}, "tools and tool_calls"),
        (None, {"messages": PLAIN, "tools": json.dumps([TOOL])}, "tools"),
        (None, {"messages": MESSAGES}, "tool_calls"),
        (CALLS.replace(TOOLS, "{{ 'You have get_tide.' if tools }}"), {"messages": PLAIN, "tools": [TOOL]}, "tools"),
        (CALLS.replace("c.function", "c.function.name"), {"messages": MESSAGES}, "tool_calls"),  # without arguments
        (SILENT, {"messages": MESSAGES}, "messages of the role tool"),
    ],
)  # fmt: skip
def test_what_the_template_leaves_out_is_refused_with_file_and_row(tmp_path, template, fields, lost):
    tokenizer, source = with_template(template), str(tmp_path / "a.jsonl")
    write_rows(tmp_path / "a.jsonl", [{"messages": PLAIN}, {"id": "x", **fields}])
    message = rf"a\.jsonl:2: .*leaves out {lost}, so the target would not read them"
    with pytest.raises(ValueError, match=message):
        load_packs(source, Encoding(tokenizer, tmp_path / "c"), length=99, packed=False)
    with pytest.raises(ValueError, match=message):
        list(datastore_texts.read_texts(source, tokenizer))
    asked = {"id": "x", **fields, "messages": [*fields["messages"], PLAIN[0]]}
    write_rows(tmp_path / "a.jsonl", [{"messages": PLAIN}, asked])
    with pytest.raises(ValueError, match=message):
        conversations.load_prompts(source, tokenizer)


def test_prompts_and_answers_keep_tools_and_mode(tmp_path):
    tokenizer = with_template(CALLS)
    rows = [{"id": "a", "prompt": "Tide?", "tools": json.dumps([TOOL])}, {"prompt": "b", "tools": []}]
    write_rows(tmp_path / "p.jsonl", rows)
    (first, second) = reading.load_prompts(str(tmp_path / "p.jsonl"))
    assert first["tools"] == [TOOL] and "tools" not in second
    jobs = answers.list_jobs(tokenizer, [first, second], [0.0])
    assert json.dumps(TOOL) in tokenizer.decode(jobs[0].tokens) and "get_tide" not in tokenizer.decode(jobs[1].tokens)
    written = answers.WrittenAnswer("Hi", "stop", [3, 4])
    kept = answers.make_row(jobs[0], written, tokenizer="t")
    assert kept["tools"] == [TOOL] and "tools" not in answers.make_row(jobs[1], written, tokenizer="t")
    encoded = conversations.encode(tokenizer, {**kept, "tokens": None})
    assert encoded.tokens[: encoded.mask.index(True)] == jobs[0].tokens


def test_calls_inside_markers_are_supervised():
    says, ends = "{% if m.role == 'assistant' %}{% generation %}{{ m['content'] }}", "{{ '<|im_end|>' }}"
    other = "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}"
    marked = HEAD + says + AS_OBJECT + ends + other + TAIL.replace("<|im_end|>", "")
    plain = HEAD + "{{ m['content'] }}" + AS_OBJECT + TAIL
    assert conversations.encode(with_template(marked), as_row(MESSAGES)) == conversations.encode(
        with_template(plain), as_row(MESSAGES)
    )


# Thinking modes


@pytest.mark.parametrize("turns", [1, 2, 6])
@pytest.mark.parametrize("variable", ["enable_thinking", "thinking"])
def test_what_the_template_writes_before_an_answer_is_not_supervised(variable, turns):
    """Answers of the history stand behind another prompt."""
    tokenizer = with_template(THINKS.replace("enable_thinking", variable))
    for mode in ({}, {"thinking": False}, {"thinking": "I think"}):
        encoded = conversations.encode(tokenizer, as_row(PLAIN * turns, **mode))
        assert supervised(tokenizer, encoded) == ["Seven.<|im_end|>"] * turns and encoded.arguments == OFF
        prompt = conversations.encode_prompt(tokenizer, PLAIN[:1], OFF)
        assert turns > 1 or encoded.tokens[: encoded.mask.index(True)] == prompt
    thoughts = [PLAIN[0], {**PLAIN[1], "reasoning_content": "Add."}]
    encoded = conversations.encode(tokenizer, as_row(thoughts))
    assert supervised(tokenizer, encoded) == ["<think>\nAdd.\n</think>\n\nSeven.<|im_end|>"]
    assert encoded.arguments == {}


# Tokenizers


@pytest.mark.parametrize("marked", [True, False])
@pytest.mark.parametrize(
    "splitter", [pre_tokenizers.Whitespace(), pre_tokenizers.Metaspace()], ids=["drops spaces", "metaspace"]
)
def test_masks_end_with_the_answer_whatever_becomes_of_white_space(splitter, marked):
    words = "the model a head What is it And <user> <bot> <end> <unk>".split()
    entries = [*words, *("\u2581" + word for word in words), "\n", "\u2581\n"]
    vocab = {word: number for number, word in enumerate(entries)}
    fast = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    fast.pre_tokenizer = splitter
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", eos_token="<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<user>", "<bot>"]})
    begin, end = ("{% generation %}", "{% endgeneration %}") if marked else ("", "")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}<bot>\n" + begin + "{{ m.content }}<end>\n" + end +
        "{% else %}<user>\n{{ m.content }}<end>\n{% endif %}{% endfor %}{{ '<bot>\n' if add_generation_prompt }}"
    )  # fmt: skip
    encoded = conversations.encode(tokenizer, as_row([*pair("What is it", "the model"), *pair("And it", "a head")]))
    text = [run.replace("\u2581", "").split("<end>") for run in supervised(tokenizer, encoded)]
    assert len(text) == 2 and all(len(run) == 2 and not run[1].strip() for run in text)
    assert not {"What", "it", "And"} & {word for run in text for word in run[0].split()}


def test_offsets_that_go_back_are_refused(monkeypatch):
    tokenizer = with_template(None)
    call = type(tokenizer).__call__

    def wrong(self, text, **options):
        encoding = call(self, text, **options)
        encoding["offset_mapping"] = encoding["offset_mapping"][::-1] if "return_offsets_mapping" in options else None
        return encoding

    monkeypatch.setattr(type(tokenizer), "__call__", wrong)
    with pytest.raises(ValueError, match=r"row 7: the tokenizer .* says wrongly where its tokens begin"):
        conversations.encode(tokenizer, as_row(PLAIN))


def test_a_tokenizer_without_offsets_makes_prompts_and_no_rows(tmp_path):
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = small_tokenizer().chat_template
    write_rows(tmp_path / "p.jsonl", [{"prompt": "é?"}])
    (prompt,) = conversations.load_prompts(str(tmp_path / "p.jsonl"), tokenizer)
    assert "é?" in tokenizer.decode(prompt.tokens)
    with pytest.raises(ValueError, match=r"\(ByT5Tokenizer\) has no fast form"):
        conversations.encode(tokenizer, as_row(PLAIN))


@pytest.mark.parametrize("by_template", [False, True])
def test_ids_without_an_embedding_are_refused_where_a_text_has_them(tmp_path, by_template):
    save_target(tmp_path / "target")
    tokenizer = with_template(None)
    tokenizer.add_tokens(["<|extra|>"], special_tokens=True)
    if by_template:
        tokenizer.chat_template += "{{ '<|extra|>' }}"
    tokenizer.save_pretrained(tmp_path / "target")
    loaded = load_tokenizer(str(tmp_path / "target"))
    said = "Hi" if by_template else "<|extra|>"
    write_rows(tmp_path / "a.jsonl", [{"messages": [{"role": "user", "content": said}, PLAIN[1]]}])
    message = r"a\.jsonl:1: .*has the token <\|extra\|> \(\d+\), and the embedding of .* has \d+ rows"
    for each in (loaded, copy.deepcopy(loaded)):
        with pytest.raises(ValueError, match=message):
            conversations.load_prompts(str(tmp_path / "a.jsonl"), each)
    with pytest.raises(ValueError, match=message):
        load_packs(str(tmp_path / "a.jsonl"), Encoding(loaded, tmp_path / "c"), length=99, packed=True)
    with pytest.raises(ValueError, match=message):
        list(datastore_texts.read_texts(str(tmp_path / "a.jsonl"), loaded))
    assert conversations.find_vocabulary(loaded, len(loaded))[1] == len(small_tokenizer())
    if not by_template:
        assert conversations.encode(loaded, as_row(PLAIN)) == conversations.encode(small_tokenizer(), as_row(PLAIN))


def test_an_embedding_larger_than_the_tokenizer_is_fine(tmp_path):
    tokenizer = copy.deepcopy(small_tokenizer())
    save_target(tmp_path / "target", tokenizer=tokenizer)
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    (tmp_path / "target" / "config.json").write_text(json.dumps(config | {"vocab_size": config["vocab_size"] + 64}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert conversations.encode(load_tokenizer(str(tmp_path / "target")), as_row(PLAIN)).tokens
    assert chat_template.find_form(tokenizer).mode is None


# A run


def test_a_run_is_judged_in_the_mode_of_its_rows(fit, tmp_path):
    target, rows, prompts = tmp_path / "thinking", tmp_path / "rows.jsonl", tmp_path / "asked.jsonl"
    save_target(target, tokenizer=with_template(THINKS))
    write_rows(rows, [{"messages": PLAIN} for _ in range(8)])
    write_rows(prompts, [{"prompt": "1+1?"}])
    overrides = [
        f"target.name={target}",
        f"data.train={rows}",
        f"data.heldout={prompts}",
        "head=medusa",
        "solve_packs=0",
    ]
    encoded = []
    with pytest.MonkeyPatch.context() as patch:
        encode = conversations.encode_prompts
        patch.setattr(conversations, "encode_prompts", lambda *args: encoded.append(encode(*args)) or encoded[-1])
        assert fit("a", *overrides) == 0
        assert fit("b", *overrides, "template.enable_thinking=true") == 0
    ends = [with_template(None).decode(prompts[0].tokens).endswith("</think>\n\n") for prompts in encoded]
    assert ends == [True, False]
    assert [loading.find_trained_template([f"checkpoints/{run}"]) for run in "ab"] == [OFF, {"enable_thinking": True}]
    assert loading.find_trained_template(["checkpoints/a", "checkpoints/b"]) == {} == loading.find_trained_template([])
