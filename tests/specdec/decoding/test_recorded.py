"""Tests of `custom_generate` with record=: what `generate` answers is written as rows that train."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.decoding.drafting import Drafting
from specdec.hf import Speculative
from tests.small_server import STOP
from tests.support import save_eagle, save_target, small_tokenizer
from train.data import rows as data

PROMPTS = ("Say hello", "Count to the number of the sky")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("recorded")
    save_eagle(path / "run" / "head", save_target(path / "target"))
    return path


@pytest.fixture(scope="module")
def model(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "target", dtype=torch.float32)


def ask(model, speculative, **settings) -> list[list[int]]:
    """-> the answers, without padding"""
    tokenizer = small_tokenizer()
    tokenizer.padding_side = "left"
    inputs = tokenizer(list(PROMPTS), return_tensors="pt", padding=True)
    settings = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": STOP, "pad_token_id": STOP} | settings
    found = model.generate(**inputs, **settings, custom_generate=speculative)
    answers = [row[inputs["input_ids"].shape[1] :].tolist() for row in found]
    return [answer[: answer.index(STOP) + 1] if STOP in answer else answer for answer in answers]


def test_every_row_of_a_batch_is_recorded(model, folder, tmp_path):
    speculative = Speculative(folder / "run" / "head", Drafting(2), record=tmp_path)
    plain = ask(model, Speculative(folder / "run" / "head", Drafting(2)))
    answers = ask(model, speculative)
    assert answers == plain
    ask(model, speculative, do_sample=True, temperature=0.7, top_k=5)
    rows = [json.loads(line) for line in (tmp_path / "traffic-000001.jsonl").read_text().splitlines()]
    tokenizer = small_tokenizer()
    assert len(rows) == 4 and rows[2]["temperature"] == 0.7 and rows[2]["top_k"] == 5
    for row, prompt, answer in zip(rows, PROMPTS, answers):
        ids = tokenizer(prompt)["input_ids"]
        assert row["tokens"] == ids + answer and row["prompt_tokens"] == len(ids)
        stopped = answer[-1] == STOP
        assert row["messages"] is None
        assert row["texts"] == [prompt, tokenizer.decode(answer[:-1] if stopped else answer)]
        assert row["finish"] == ("stop" if stopped else "length")
        assert len(row["accepted"]) == row["rounds"] and row["drafted"] == 2 * row["rounds"]
        assert sum(row["accepted"]) + row["rounds"] + 1 == len(answer)
        assert (row["source"], row["temperature"], row["seed"]) == ("generate", 0, None)
        assert row["head"] == "run/head" and row["target"] == str(folder / "target") and row["target_fingerprint"]
        encoded = data.encode(tokenizer, row)
        assert encoded.tokens == row["tokens"] and sum(encoded.mask) == len(answer)


def test_a_model_without_a_tokenizer_is_refused_before_it_answers(model, folder, tmp_path, monkeypatch):
    speculative = Speculative(folder / "run" / "head", Drafting(2), record=tmp_path / "rows")

    def missing(name):
        raise ValueError(f"{name} has no tokenizer")

    monkeypatch.setattr("specdec.hf.load_tokenizer", missing)
    with pytest.raises(ValueError, match="has no tokenizer"):
        ask(model, speculative)
    assert speculative.last is None and not (tmp_path / "rows").exists()
