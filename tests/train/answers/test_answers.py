"""Tests of answers that servers write: order, token ids, resuming, other interfaces, refusals, prompts of the target's own."""

import copy
import json
import sys
import threading
import types

import pytest
from transformers import LlamaConfig

from scripts import answer
from tests.small_server import STOP, Model, SmallServer
from tests.support import save_target, small_tokenizer, write_rows
from train.answers import answering, self_prompts
from train.answers.engine_answers import in_order
from train.data import rows as data
from train.features import engine_client

PROMPTS = [{"id": f"p{n}", "category": "ab"[n % 2], "prompt": f"Count from {n}.", "tags": ["numbers"] * (n % 2)} for n in range(9)]  # fmt: skip
THINKING = (  # as Qwen3's: the last answer has what thinking=false puts before it
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}{% if m['role'] == 'assistant' and loop.last %}{{ '<none>' }}"
    "{% endif %}{{ m['content'] + '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<none>' }}{% endif %}{% endif %}"
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A target without weights, and prompts."""
    monkeypatch.setattr(engine_client, "LONGEST_PAUSE", 0.01)
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
    rows = run(model, "decode.temperature=0,1", "decode.top_p=0.9", "seed=3", "tag=new,numbers")
    assert [row["id"] for row in rows] == [f"p{n}@{t}" for n in range(9) for t in (0, 1)]
    bodies = [body for path, body in run.server.requests if path == "v1/completions" and body["max_tokens"] > 1]
    by_prompt = {(tuple(body["prompt"]), body["temperature"]): body for body in bodies}
    assert len(by_prompt) == len(rows) == 18 and len({body["seed"] for body in bodies}) == 18
    for row, prompt in zip(rows, [prompt for prompt in PROMPTS for _ in range(2)]):
        asked = data.encode_prompt(model.tokenizer, [{"role": "user", "content": prompt["prompt"]}])
        body = by_prompt[tuple(asked), row["temperature"]]
        assert (
            body["top_p"] == 0.9 and body["top_k"] == 0 and body["repetition_penalty"] == 1
        )  # no default of the model
        choice, _ = model.write(json.dumps(asked), body)
        assert row["tokens"] == asked + choice["ids"] and row["prompt_tokens"] == len(asked)
        assert row["messages"][-1] == {"role": "assistant", "content": choice["text"]}
        assert row["category"] == prompt["category"] and row["finish"] == "stop"
        assert row["tags"] == (["numbers", "new"] if prompt["tags"] else ["new", "numbers"])
        encoded = data.encode(model.tokenizer, row)
        assert encoded.tokens == row["tokens"]
        assert encoded.mask == [n >= len(asked) for n in range(len(row["tokens"]))]
    assert "takes and gives token ids" in run.printed and "0 were cut at 160 tokens, 0 are empty" in run.printed


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
    assert run(model) == whole and model.num == 1 + len(whole) - len(before)
    model = Model()
    assert run(model) == whole and not run.server.requests  # nothing is left to write, so nobody is asked
    for other in ("seed=1", "thinking=true", "tag=x", "engine=vllm", "engine=null"):
        with pytest.raises(ValueError, match=r"was begun with other settings|no thinking mode"):
            run(model, other)


def test_in_order_holds_back_what_came_early():
    jobs = [answering.Job(str(n), "", 0, [], []) for n in range(7)]
    futures = {}

    def submit(job):
        futures[job.id] = answer_of = engine_client.Future()
        return answer_of

    groups = in_order(submit, iter(jobs), ahead=3)
    threading.Timer(0.05, lambda: [futures[name].set_result(name) for name in ("2", "1", "0")]).start()
    assert [(job.id, result) for job, result in next(groups)] == [("0", "0"), ("1", "1"), ("2", "2")]
    assert set(futures) == {"0", "1", "2"}
    threading.Timer(0.05, lambda: futures["3"].set_result("3")).start()
    assert [job.id for job, _ in next(groups)] == ["3"] and set(futures) == {"0", "1", "2", "3", "4", "5"}
    groups.close()
    assert futures["4"].cancelled() and futures["5"].cancelled()


# Servers without token ids


@pytest.mark.parametrize("way", ["text", "deaf", "chat"])
def test_servers_that_give_text(run, way):
    model = Model(way)
    rows = run(model, "limit=4", "decode.temperature=0")
    sent = [body for path, body in run.server.requests if path.endswith("completions") and body["max_tokens"] > 1]
    assert all(("messages" in body) == (way == "chat") and "return_token_ids" not in body for body in sent)
    for row in rows:
        messages = row["messages"][:1]
        asked = json.dumps(messages if way == "chat" else data.encode_prompt(model.tokenizer, messages))
        (body,) = (body for body in sent if json.dumps(body["messages" if way == "chat" else "prompt"]) == asked)
        choice, _ = model.write(asked, body)
        assert row["messages"][-1]["content"] == choice["text"] and "tokens" not in row
        encoded = data.encode(model.tokenizer, row)
        assert model.tokenizer.decode([t for t, m in zip(encoded.tokens, encoded.mask) if m]).startswith(choice["text"])
    assert ("takes messages" if way == "chat" else "gives text") in run.printed


def test_thinking_mode(run, folder):
    tokenizer = copy.deepcopy(small_tokenizer())
    tokenizer.chat_template = THINKING
    tokenizer.save_pretrained(folder / "target")
    rows = {
        mode: run(Model(), f"thinking={mode}", "limit=1", out=f"{mode}.jsonl")[0] for mode in ("true", "false", "null")
    }
    assert [row.get("thinking") for row in rows.values()] == [True, False, None]
    none = tokenizer("<none>")["input_ids"]
    ends = {mode: row["tokens"][: row["prompt_tokens"]][-len(none) :] == none for mode, row in rows.items()}
    assert ends == {"true": False, "false": True, "null": False}
    run(Model("chat"), "thinking=false", "limit=1", out="chat.jsonl")
    assert run.server.requests[-1][1]["chat_template_kwargs"] == {"enable_thinking": False}
    row = {key: value for key, value in rows["false"].items() if key != "tokens"}
    encoded = data.encode(tokenizer, row)  # rendered again in the same mode
    assert encoded.tokens[: encoded.mask.index(True)] == data.encode_prompt(
        tokenizer, row["messages"][:1], thinking=False
    )


# Refusals


@pytest.mark.parametrize(
    ("model", "arguments", "what"),
    [
        (Model(length=100), ["max_new_tokens=90"], r"may need 1\d\d tokens, and the server's max_model_len is 100"),
        (Model(finish_reason="abort"), [], "5 bad answers in a row.* ended because of 'abort'"),
        (Model(token_ids=[5, 6], finish_reason="stop"), [], r"token 6, which is none of the target's stop tokens \[2\]"),
        (Model(token_ids=[5, 6], finish_reason="length"), [], "cut after 2 tokens, not 160"),
        (Model(token_ids=["a"]), [], "has no token ids"),
        (Model("chat", reasoning="Hm."), [], "without a reasoning parser"),
        (Model("deaf"), ["prompts=self", "num_prompts=2"], "prompts=self needs a server that takes and gives token ids"),
        (Model(), ["prompts=self"], "num_prompts= says how many"),
        (Model(), ["num_prompts=2"], "num_prompts= says how many"),
        (Model(), ["thinking=true"], "has no thinking mode"),
        (Model(), ["in_flight=0"], "in_flight=0 must be a whole number from 1 to 65536"),
        (Model(), ["decode.top_p=0"], "decode.top_p=0.0 must be a number above 0 and at most 1"),
        (Model(), ["engine=vllm"], "engine=vllm needs vLLM in this Python"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_a_sentence(run, model, arguments, what, monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", None)
    with pytest.raises(ValueError, match=what):
        run(model, "limit=2", *arguments)


def test_another_tokenizer_is_refused(run):
    model = Model()
    model.tokenizer = copy.deepcopy(model.tokenizer)
    model.tokenizer.add_tokens(["from 0"])
    with pytest.raises(ValueError, match="The server's tokenizer is not the target's"):
        run(model)


def test_another_model_is_named(run):
    with pytest.warns(UserWarning, match=r"The server's model is called models/other, and target\.name="):
        run(Model(name="other"), "limit=1")


def test_servers_of_different_models_are_refused(run):
    what = r"no model in common \(models/target; models/other\)"
    with (
        SmallServer(Model(name="other")) as other,
        SmallServer(Model()) as server,
        pytest.raises(ValueError, match=what),
    ):
        run(Model(), f"engine={server.url},{other.url}")


# Prompts of the target's own

SAID = ["How do I bake a cake with plums?", "how do I bake a cake, with plums!", "Hi", "", "What is the tallest mountain of Peru?",
        "yes yes yes yes yes yes yes yes yes yes yes yes", "Please tell me about the moons of Jupiter."]  # fmt: skip
REASONS = [None, "nearly the same as another", "too short", "empty", None, "repeats itself", None]


class Talkative(Model):
    """Writes the user's turns of SAID, by the number of the request, and answers."""

    def write(self, prompt: str, body: dict) -> tuple[dict, int]:
        if not self.tokenizer.decode(body["prompt"]).endswith("user\n") or body["max_tokens"] == 1:
            return super().write(prompt, body)
        ids = [*self.tokenizer(f"{SAID[self.turns[body['seed']] % 7]} ")["input_ids"], STOP]
        return {"text": "", "ids": ids, "finish_reason": "stop"}, len(ids)

    def __init__(self):
        super().__init__()
        law = answering.Law(frozenset(), 1)
        self.turns = {law.seed_of(self_prompts.name(n), bits=31): n for n in range(100)}


def test_prompts_of_its_own_are_filtered_and_answered(run, folder):
    rows = run(Talkative(), "prompts=self", "num_prompts=3", "decode.temperature=0", "batch=2")
    path = folder / "answers.jsonl.prompts.jsonl"
    drawn = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["prompt"] for row in drawn] == SAID and [row.get("dropped") for row in drawn] == REASONS
    assert [row["messages"][0]["content"] for row in rows] == [
        text for text, reason in zip(SAID, REASONS) if not reason
    ]
    assert [row["id"] for row in rows] == ["self-0000000@0", "self-0000004@0", "self-0000006@0"]
    assert "the target wrote 7 prompts, of which 3 are kept (1 " in run.printed
    written = path.read_text()
    lines = written.splitlines(keepends=True)
    path.write_text("".join(lines[:5]))  # as after an interruption
    (folder / "answers.jsonl").unlink()
    assert run(Talkative(), "prompts=self", "num_prompts=3", "decode.temperature=0", "batch=2") == rows
    assert path.read_text() == written
    with pytest.raises(ValueError, match=r"prompts.jsonl was begun with other settings: temperature \(then 1"):
        run(Talkative(), "prompts=self", "num_prompts=3", "self_prompts.temperature=0.5")


def test_a_target_that_cannot_write_prompts_ends_with_a_sentence(run, monkeypatch):
    monkeypatch.setattr(self_prompts, "ENOUGH", 10)
    monkeypatch.setattr(self_prompts, "FEWEST", 0.5)
    with pytest.raises(
        ValueError, match=r"Only 2 of 1\d prompts that the target wrote are good .*self_prompts\.temperature="
    ):
        monkeypatch.setattr(sys.modules[__name__], "SAID", [*SAID[:2], "", "", "What is the tallest river?", "", ""])
        run(Talkative(), "prompts=self", "num_prompts=30", "decode.temperature=0", "in_flight=1")


def test_near_duplicates_are_found_and_others_are_not():
    judge = self_prompts.Filter(small_tokenizer())
    long = "Write a short story about a lighthouse keeper who finds a letter in a bottle, and what he does with it."
    other = "Explain in simple words how a lighthouse works, and why ships need them on dark and stormy nights."
    assert judge.judge(long, "stop") is None and judge.judge(other, "stop") is None
    assert judge.judge(long.replace("short ", "brief "), "stop") == "nearly the same as another"
    assert judge.judge(long.upper() + "!!", "stop") == "nearly the same as another"
    assert judge.judge(long, "length") == "unfinished" and judge.judge("x" * 9000, "stop") == "too long"
    assert judge.judge("\u4f60\u597d\uff0c\u8bf7\u95ee\u4eca\u5929\u5929\u6c14\u600e\u4e48\u6837\uff1f", "stop") is None


def test_the_opening_of_the_users_turn():
    tokenizer = copy.deepcopy(small_tokenizer())
    opening = self_prompts.find_opening(tokenizer, {STOP})
    whole = data.encode_prompt(tokenizer, [{"role": "user", "content": "Hi"}])
    assert whole[: len(opening.tokens)] == opening.tokens and tokenizer.decode(opening.tokens).endswith("user\n")
    assert opening.ends == {STOP}
    for template in ("{% for m in messages %}{{ 'Q: ' + m['content'] + ' A: ' }}{% endfor %}", "{{ messages|length }}"):
        tokenizer.chat_template = template
        with pytest.raises(ValueError, match=r"prompts=self: the chat template .* no special token behind"):
            self_prompts.find_opening(tokenizer, {STOP})


# Other writers


def test_our_own_decoder_writes_prompts_and_keeps_ids(run, tmp_path):
    save_target(tmp_path / "target")
    arguments = ["engine=null", "prompts=self", "num_prompts=3", "decode.temperature=0", "max_new_tokens=8", "batch=8",
                 "self_prompts.max_tokens=200", "target.dtype=float32", "target.device=cpu"]  # fmt: skip
    rows = run(Model(), *arguments)
    assert len(rows) == 3 and not run.server.requests
    assert all(len(row["tokens"]) <= row["prompt_tokens"] + 8 for row in rows)
    path = tmp_path / "answers.jsonl.prompts.jsonl"
    first, written = path.read_text().splitlines(keepends=True)[0], path.read_text()
    path.write_text(first)
    assert run(Model(), *arguments, out="answers.jsonl") == rows and path.read_text() == written


def test_vllm_in_this_process(run, folder, monkeypatch):
    """With a module in vLLM's place; vLLM itself is tried with `engines/bin/python`."""
    model, made = Model(), {}

    class LLM:
        def __init__(self, **settings):
            made.update(settings)

        def generate(self, prompts, sampling, use_tqdm):
            outputs = []
            for prompt, law in zip(prompts, sampling, strict=True):
                assert law.stop_token_ids == [STOP] and law.ignore_eos and not law.detokenize
                choice, _ = model.write(json.dumps(prompt["prompt_token_ids"]), vars(law))
                outputs.append(types.SimpleNamespace(outputs=[types.SimpleNamespace(token_ids=tuple(choice["ids"]))]))
            return outputs

    module = types.ModuleType("vllm")
    module.LLM, module.SamplingParams = LLM, types.SimpleNamespace
    monkeypatch.setitem(sys.modules, "vllm", module)
    served = run(Model(), out="served.jsonl")
    assert run(Model(), "engine=vllm", "in_flight=1") == served
    assert made["max_num_seqs"] == 1 and made["generation_config"] == "vllm"
    assert made["max_model_len"] == max(row["prompt_tokens"] for row in served) + 160
