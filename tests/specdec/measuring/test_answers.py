"""Tests of answers that servers write: order, token ids, resuming, other interfaces, refusals."""

import copy
import json
import re
import sys
import threading

import pytest
from transformers import LlamaConfig

from scripts import answer
from specdec.engines import answers, client
from specdec.engines.answers import yield_in_order
from specdec.text import conversations as data
from tests.small_server import STOP, Model, SmallServer
from tests.support import save_target, small_tokenizer, write_rows

PROMPTS = [{"id": f"p{n}", "category": "ab"[n % 2], "prompt": f"Count from {n}.", "tags": ["numbers"] * (n % 2)} for n in range(9)]  # fmt: skip
THINKING = (  # as Qwen3's: the last answer has what thinking=false puts before it
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.last %}{{ '<none>' }}"
    "{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<none>' }}{% endif %}{% endif %}"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A target without weights, and prompts."""
    monkeypatch.setattr(client, "LONGEST_PAUSE", 0.01)
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(tmp_path / "target")
    LlamaConfig(vocab_size=len(tokenizer), eos_token_id=STOP).save_pretrained(tmp_path / "target")
    write_rows(tmp_path / "prompts.jsonl", PROMPTS)
    return tmp_path


@pytest.fixture
def run(folder, monkeypatch, capsys):
    """run(model or servers, "key=value", ...) -> rows; what was printed is in run.printed"""

    def run(model, *arguments, out="answers.jsonl"):
        with SmallServer(model) as server:
            run.server = server
            given = {"prompts": f"{folder}/prompts.jsonl", "out": f"{folder}/{out}", "target.name": f"{folder}/target",
                     "engine": server.url, "in_flight": "4"}  # fmt: skip
            given |= dict(argument.split("=", 1) for argument in arguments)
            monkeypatch.setattr(sys, "argv", ["answer", *(f"{key}={value}" for key, value in given.items())])
            try:
                answer.main()
            finally:
                run.printed = capsys.readouterr().out
        return [json.loads(line) for line in (folder / out).read_text().splitlines()]

    return run


# Rows


def test_rows_are_in_order_and_hold_the_ids_of_the_target(run):
    model = Model()
    rows = run(model, "decode.temperature=0,1", "decode.top_p=0.9", "seed=3")
    assert [row["id"] for row in rows] == [f"p{n}@{t}" for n in range(9) for t in (0, 1)]
    bodies = [body for path, body in run.server.requests if path == "v1/completions"]
    by_prompt = {(tuple(body["prompt"]), body["temperature"]): body for body in bodies}
    assert len(by_prompt) == len(rows) == 18 and len({body["seed"] for body in bodies}) == 18
    for row, prompt in zip(rows, [prompt for prompt in PROMPTS for _ in range(2)]):
        prompt_tokens = data.encode_prompt(model.tokenizer, [{"role": "user", "content": prompt["prompt"]}])
        body = by_prompt[tuple(prompt_tokens), row["temperature"]]
        assert (body["top_p"], body["top_k"], body["repetition_penalty"]) == (0.9, 0, 1)  # no default of the model
        choice, _ = model.write(json.dumps(prompt_tokens), body)
        assert row["tokens"] == prompt_tokens + choice["ids"] and row["prompt_tokens"] == len(prompt_tokens)
        assert row["messages"][-1] == {"role": "assistant", "content": choice["text"]}
        assert row["category"] == prompt["category"] and row["finish"] == "stop"
        assert row.get("tags", []) == prompt["tags"]
        encoded = data.encode(model.tokenizer, row)
        assert encoded.tokens == row["tokens"]
        assert encoded.mask == [n >= len(prompt_tokens) for n in range(len(row["tokens"]))]
    assert "0 were cut at 160 tokens, 0 are empty" in run.printed


def test_cut_and_empty_answers_are_counted(run):
    rows = run(Model(), "max_new_tokens=5", "limit=3", "decode.temperature=0")
    assert {row["finish"] for row in rows} == {"length"} and "3 were cut at 5 tokens, 0 are empty" in run.printed
    assert all(len(row["tokens"]) == row["prompt_tokens"] + 5 for row in rows)
    rows = run(Model(token_ids=[STOP]), "limit=3", "decode.temperature=0", out="empty.jsonl")
    assert [row["messages"][-1]["content"] for row in rows] == [""] * 3 and "3 are empty" in run.printed


def test_an_interrupted_run_continues_where_it_was(run, folder):
    whole = run(Model(), out="whole.jsonl")
    model = Model()
    model.fail_after = 8
    with pytest.raises(ValueError, match="that is enough"):
        run(model)
    before = [json.loads(line) for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert 0 < len(before) < len(whole) and before == whole[: len(before)]
    model = Model()
    assert run(model) == whole and model.num == len(whole) - len(before)
    model = Model()
    assert run(model) == whole and not run.server.requests  # nothing is left to write, so nobody is asked
    for other in ("seed=1", "template.enable_thinking=true", "engine=null"):
        with pytest.raises(ValueError, match=r"was begun with other settings|no thinking mode"):
            run(model, other)


def test_in_order_holds_back_what_came_early():
    jobs = [answers.AnswerJob(str(n), "", 0, [], []) for n in range(7)]
    futures = {}

    def submit(job):
        futures[job.id] = answer_of = client.Future()
        return answer_of

    groups = yield_in_order(submit, iter(jobs), max_waiting=3)
    threading.Timer(0.05, lambda: [futures[name].set_result(name) for name in ("2", "1", "0")]).start()
    assert [(job.id, result) for job, result in next(groups)] == [("0", "0"), ("1", "1"), ("2", "2")]
    assert set(futures) == {"0", "1", "2"}
    threading.Timer(0.05, lambda: futures["3"].set_result("3")).start()
    assert [job.id for job, _ in next(groups)] == ["3"] and set(futures) == {"0", "1", "2", "3", "4", "5"}
    futures["4"].set_result("4")
    futures["5"].set_exception(ValueError("lost"))
    assert [job.id for job, _ in next(groups)] == ["4"]  # what came before a failure is not lost with it
    with pytest.raises(ValueError, match="lost"):
        next(groups)
    assert futures["6"].cancelled()


def test_llama_cpp_gives_the_same_rows_and_says_what_it_serves(run, folder):
    wanted = run(Model("ids"), "max_new_tokens=9", out="vllm.jsonl")
    rows = run(Model("llama.cpp"), "max_new_tokens=9")
    assert {row["finish"] for row in rows} == {"length"} and not any("target_fingerprint" in row for row in wanted)
    assert {re.sub("^[0-9a-f]{16}", "", row.pop("target_fingerprint")) for row in rows} == {"-gguf-q4_k_m"}
    assert rows == wanted
    whole = run(Model("llama.cpp"), "max_new_tokens=99", out="whole.jsonl")
    assert {(row["finish"], row["tokens"][-1]) for row in whole} == {("stop", STOP)}  # what comes behind it is cut off
    assert {path for path, _ in run.server.requests} == {"v1/models", "tokenize", "completion"}
    path = folder / "whole.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="was begun with another target, under the same name"):
        run(Model("llama.cpp", ftype="Q8_0"), "max_new_tokens=99", out="whole.jsonl")


def test_thinking_mode(run, folder):
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(folder / "target")
    ask = lambda mode: run(Model(), f"template.enable_thinking={mode}", "limit=1", out=f"{mode}.jsonl")[0]
    rows = {mode: ask(mode) for mode in ("true", "false", "null")}
    assert [row.get("chat_template_kwargs") for row in rows.values()] == [
        {"enable_thinking": True},
        {"enable_thinking": False},
        None,
    ]
    none = tokenizer("<none>")["input_ids"]
    ends = {mode: row["tokens"][: row["prompt_tokens"]][-len(none) :] == none for mode, row in rows.items()}
    assert ends == {"true": False, "false": True, "null": False}
    row = {key: value for key, value in rows["false"].items() if key != "tokens"}
    encoded = data.encode(tokenizer, row)  # rendered again in the same mode
    prompt = data.encode_prompt(tokenizer, row["messages"][:1], {"enable_thinking": False})
    assert encoded.tokens[: encoded.mask.index(True)] == prompt


# Refusals


@pytest.mark.parametrize(
    ("model", "arguments", "what"),
    [
        (Model(finish_reason="abort"), [], "5 bad answers in a row.* ended because of 'abort'"),
        (Model(token_ids=[5, 6], finish_reason="stop"), [], r"token 6, which is none of the target's stop tokens \[2\]"),
        (Model(token_ids=[5, 6], finish_reason="length"), [], "cut after 2 tokens, not 160"),
        (Model(token_ids=["a"]), [], "has no token ids"),
        (Model("deaf"), [], "no token ids, which vLLM and llama.cpp give"),
        (Model("chat"), [], "refuses the request with status 400: unknown field"),
        (Model(), ["template.enable_thinking=true"], "has no thinking mode"),
        (Model(), ["in_flight=0"], "in_flight=0 must be a whole number from 1 to 65536"),
        (Model(), ["decode.top_p=0"], "decode.top_p=0.0 must be a number above 0 and at most 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_a_sentence(run, model, arguments, what):
    with pytest.raises(ValueError, match=what):
        run(model, "limit=2", *arguments)


def test_another_tokenizer_is_refused(run):
    model = Model()
    model.tokenizer = copy.deepcopy(model.tokenizer)
    model.tokenizer.add_tokens(["from 0"])
    with pytest.raises(ValueError, match="The server's tokenizer is not the target's"):
        run(model)


def test_another_model_is_named_and_different_ones_are_refused(run):
    with pytest.warns(UserWarning, match=r"The server's model is called models/other, and target\.name="):
        run(Model(name="other"), "limit=1")
    what = r"no model in common \(models/target; models/other\)"
    with (
        SmallServer(Model(name="other")) as other,
        SmallServer(Model()) as server,
        pytest.raises(ValueError, match=what),
    ):
        run(Model(), f"engine={server.url},{other.url}")


# Other writers


def test_our_own_decoder_keeps_ids_and_continues(run, folder):
    save_target(folder / "target")
    arguments = ["engine=null", "limit=3", "decode.temperature=0", "max_new_tokens=8", "batch=8", "target.dtype=float32",
                 "target.device=cpu"]  # fmt: skip
    rows = run(Model(), *arguments)
    assert len(rows) == 3 and not run.server.requests
    assert all(len(row["tokens"]) <= row["prompt_tokens"] + 8 for row in rows)
    path = folder / "answers.jsonl"
    written = path.read_text()
    path.write_text(written.splitlines(keepends=True)[0])  # as after an interruption
    assert run(Model(), *arguments) == rows and path.read_text() == written
