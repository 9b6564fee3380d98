"""Tests of scripts/answer.py with servers and with this project's decoder: order, token ids, resuming, refusals."""

import copy
import json
import re
import threading

import datasets
import pytest
from transformers import LlamaConfig

from scripts import answer
from specdec.engines import answers, client
from specdec.engines.answers import yield_in_order
from specdec.text import conversations
from tests.support.commands import write_rows
from tests.support.decoding import pretend_graphs
from tests.support.small_server import STOP, Model, SmallServer
from tests.support.targets import save_target, small_tokenizer

CATEGORIES = [("a", []), ("b", ["numbers"])]  # with their tags
PROMPTS = [
    {"id": f"p{n}", "category": category, "prompt": f"Count from {n}.", "tags": tags}
    for n, (category, tags) in enumerate((CATEGORIES * 5)[:9])
]
THINKING = (  # as Qwen3's: the last answer has what thinking=false puts before it
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<none>' }}{% endif %}"
    "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
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


def read_rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def run(folder, run_script):
    """run(model or servers, "key=value", ...) -> rows; what was printed is in run.printed"""

    def run(model, *arguments, out="answers.jsonl"):
        with SmallServer(model) as server:
            run.server = server
            files = [f"prompts={folder}/prompts.jsonl", f"out={folder}/{out}", f"target.name={folder}/target"]
            run.printed = run_script(answer, *files, f"engine={server.url}", "in_flight=4", *arguments)
        return read_rows(folder / out)

    return run


# Rows


def test_rows_are_in_order_and_hold_the_ids_of_the_target(run):
    model = Model()
    rows = run(model, "decode.temperature=0,1", "decode.top_p=0.9", "seed=3")
    assert [row["id"] for row in rows] == [f"p{n}@{t}" for n in range(9) for t in (0, 1)]
    bodies = [body for path, body in run.server.requests if path == "v1/completions"]
    by_prompt = {(tuple(body["prompt"]), body["temperature"]): body for body in bodies}
    assert len(by_prompt) == len(rows) == len({body["seed"] for body in bodies}) == 18
    for number, row in enumerate(rows):
        prompt = PROMPTS[number // 2]
        prompt_tokens = conversations.encode_prompt(model.tokenizer, [{"role": "user", "content": prompt["prompt"]}])
        body = by_prompt[tuple(prompt_tokens), row["temperature"]]
        assert (body["top_p"], body["top_k"], body["repetition_penalty"]) == (0.9, 0, 1)  # no default of the model
        choice, _ = model.write(json.dumps(prompt_tokens), body)
        assert row["tokens"] == prompt_tokens + choice["ids"] and row["prompt_tokens"] == len(prompt_tokens)
        assert row["messages"][-1] == {"role": "assistant", "content": choice["text"]}
        facts = row["category"], row["finish"], row.get("tags", [])
        assert facts == (prompt["category"], "stop", prompt["tags"])
        encoded = conversations.encode(model.tokenizer, row)
        assert encoded.tokens == row["tokens"]
        assert encoded.mask == [False] * len(prompt_tokens) + [True] * len(choice["ids"])
    assert "0 cut at 160 tokens, 0 empty" in run.printed


def test_cut_and_empty_answers_are_counted(run):
    rows = run(Model(), "max_new_tokens=5", "limit=3", "decode.temperature=0")
    assert {row["finish"] for row in rows} == {"length"} and "3 cut at 5 tokens, 0 empty" in run.printed
    assert all(len(row["tokens"]) == row["prompt_tokens"] + 5 for row in rows)
    rows = run(Model(token_ids=[STOP]), "limit=3", "decode.temperature=0", out="empty.jsonl")
    assert [row["messages"][-1]["content"] for row in rows] == [""] * 3 and "3 empty" in run.printed


def test_an_interrupted_run_continues_where_it_was(run, folder):
    complete = run(Model(), out="complete.jsonl")
    model = Model()
    model.fail_after = 8
    with pytest.raises(ValueError, match="that is enough"):
        run(model)
    rows = read_rows(folder / "answers.jsonl")
    assert 0 < len(rows) < len(complete) and rows == complete[: len(rows)]
    model = Model()
    assert run(model) == complete and model.num == len(complete) - len(rows)
    assert run(Model()) == complete and not run.server.requests  # nothing is left to write, so nobody is asked
    for argument in ("seed=1", "template.enable_thinking=true", "engine=null"):
        with pytest.raises(ValueError, match=r"was begun with other settings|no thinking mode"):
            run(model, argument)


def test_in_order_holds_back_what_came_early():
    jobs = [answers.AnswerJob(str(n), "", 0, [], []) for n in range(7)]
    futures = {}

    def submit(job):
        futures[job.id] = future = client.Future()
        return future

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
    expected = run(Model("ids"), "max_new_tokens=9", out="vllm.jsonl")
    rows = run(Model("llama.cpp"), "max_new_tokens=9")
    assert {row["finish"] for row in rows} == {"length"} and not any("target_fingerprint" in row for row in expected)
    assert {re.sub("^[0-9a-f]{16}", "", row.pop("target_fingerprint")) for row in rows} == {"-gguf-q4_k_m"}
    assert rows == expected
    complete = run(Model("llama.cpp"), "max_new_tokens=99", out="complete.jsonl")
    assert {(row["finish"], row["tokens"][-1]) for row in complete} == {("stop", STOP)}  # what follows it is cut off
    assert {path for path, _ in run.server.requests} == {"v1/models", "tokenize", "completion"}
    path = folder / "complete.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="was begun with another target, under the same name"):
        run(Model("llama.cpp", ftype="Q8_0"), "max_new_tokens=99", out="complete.jsonl")


def test_thinking_mode(run, folder):
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(folder / "target")
    modes = {"true": {"enable_thinking": True}, "false": {"enable_thinking": False}, "null": None}
    rows = {m: run(Model(), f"template.enable_thinking={m}", "limit=1", out=f"{m}.jsonl")[0] for m in modes}
    assert {mode: row.get("chat_template_kwargs") for mode, row in rows.items()} == modes
    none = tokenizer("<none>")["input_ids"]
    ends = {mode: row["tokens"][: row["prompt_tokens"]][-len(none) :] == none for mode, row in rows.items()}
    assert ends == {"true": False, "false": True, "null": False}
    row = {key: value for key, value in rows["false"].items() if key != "tokens"}
    encoded = conversations.encode(tokenizer, row)  # rendered again in the same mode
    prompt = conversations.encode_prompt(tokenizer, row["messages"][:1], {"enable_thinking": False})
    assert encoded.tokens[: encoded.mask.index(True)] == prompt


def test_our_own_decoder_keeps_ids_continues_and_captures_on_a_gpu(run, folder, monkeypatch):
    save_target(folder / "target")
    datasets.DatasetDict({"dev": datasets.Dataset.from_list(PROMPTS)}).save_to_disk(folder / "saved")
    source = [f"prompts={folder}/saved", "split=dev", "limit=3"]
    decode = ["decode.temperature=0", "max_new_tokens=8", "batch=8", "target.dtype=float32", "target.device=cpu"]
    rows = run(Model(), "engine=null", *source, *decode)
    assert [row["id"] for row in rows] == ["p0@0", "p1@0", "p2@0"] and not run.server.requests
    assert all(len(row["tokens"]) <= row["prompt_tokens"] + 8 for row in rows)
    path = folder / "answers.jsonl"
    written = path.read_text()
    path.write_text(written.splitlines(keepends=True)[0])  # as after an interruption
    assert run(Model(), "engine=null", *source, *decode) == rows and path.read_text() == written
    captured = pretend_graphs(monkeypatch)
    path.unlink()
    eager = "decode.compile=false", "decode.cuda_graphs=false"
    assert run(Model(), "engine=null", *source, *decode, *eager) == rows and not captured
    path.unlink()
    assert run(Model(), "engine=null", *source, *decode) == rows and captured


# Refusals


@pytest.mark.parametrize(
    ("model", "argument", "sentence"),
    [
        (Model(finish_reason="abort"), "seed=0", "5 bad answers in a row.* ended because of 'abort'"),
        (Model(token_ids=[5, 6], finish_reason="stop"), "seed=0", r"token 6, which is none of .* stop tokens \[2\]"),
        (Model(token_ids=[5, 6], finish_reason="length"), "seed=0", "cut after 2 tokens, not 160"),
        (Model(token_ids=["a"]), "seed=0", "has no token ids"),
        (Model("deaf"), "seed=0", "no token ids, which vLLM and llama.cpp give"),
        (Model("chat"), "seed=0", "refuses the request with status 400: unknown field"),
        (Model(), "template.enable_thinking=true", "has no thinking mode"),
    ],
)
def test_what_cannot_be_is_refused_with_a_sentence(refuse, model, argument, sentence):
    refuse(sentence, model, "limit=2", argument)


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [{"id": "fine", "prompt": "Hi."}, {"id": "long", "prompt": "word " * 3000}],
            r":2, prompt long@0: A prompt of",
        ),
        ([], r"There are no prompts in .*rows\.jsonl"),
        ([{"id": 5, "prompt": "a"}, {"prompt": "b"}, {"id": "5", "prompt": "c"}], r"the same id, 5 \(.*:1; .*:3\)"),
    ],
)
def test_prompts_that_cannot_be_answered_are_named_before_others_are(refuse, folder, rows, sentence):
    save_target(folder / "target")
    write_rows(folder / "rows.jsonl", rows)
    refuse(sentence, Model(), "engine=null", f"prompts={folder}/rows.jsonl", "target.device=cpu")
    assert not (folder / "answers.jsonl").exists() or not (folder / "answers.jsonl").read_text()


def test_another_tokenizer_is_refused(refuse):
    model = Model()
    model.tokenizer = copy.deepcopy(model.tokenizer)
    model.tokenizer.add_tokens(["from 0"])
    refuse("The server's tokenizer is not the target's", model)


def test_another_model_is_named_and_different_ones_are_refused(run, refuse):
    with pytest.warns(UserWarning, match=r"The server's model is called models/other, and target\.name="):
        run(Model(name="other"), "limit=1")
    with SmallServer(Model(name="other")) as other, SmallServer(Model()) as server:
        refuse(r"no model in common \(models/target; models/other\)", Model(), f"engine={server.url},{other.url}")
