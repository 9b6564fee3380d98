"""Tests of scripts/token_answers.py: answers come back as they were, and nothing is made of what does not belong together."""

import json

import numpy
import pytest

from scripts import token_answers as script
from specdec.target.model import load_tokenizer
from tests.support import save_target, write_rows
from train.answers import answering
from train.data import rows as data

PROMPTS = [
    {"id": f"p{number}", "category": "small", "prompt": text} for number, text in enumerate(("Say hello.", "Count."))
]

QUESTIONS = {each["id"]: each["prompt"] for each in PROMPTS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("token_answers")
    save_target(folder / "target")
    write_rows(folder / "prompts.jsonl", PROMPTS)
    write_rows(folder / "other.jsonl", PROMPTS[::-1])
    tokenizer = load_tokenizer(str(folder / "target"))
    digest, _ = data.vocabulary(tokenizer, len(tokenizer))
    stop, rows = tokenizer.eos_token_id, []
    for prompt, text, temperature, ended in (
        ("p0", "Hello, you.", 0.0, True),
        ("p0", "Hi", 1.0, False),
        ("p1", "1, 2", 0.7, True),
    ):
        messages = [{"role": "user", "content": QUESTIONS[prompt]}]
        tokens = tokenizer(text, add_special_tokens=False)["input_ids"] + [stop] * ended
        job = answering.Job(
            f"{prompt}@{temperature:g}", "small", temperature, messages, data.encode_prompt(tokenizer, messages)
        )
        rows.append(answering.conversation(job, answering.written(tokenizer, tokens, {stop}), tokenizer=digest))
    write_rows(folder / "answers.jsonl", rows)
    return folder


@pytest.fixture
def run(folder, run_script):
    def run(answers, out, prompts="prompts.jsonl"):
        arguments = {"answers": answers, "out": out, "prompts": prompts, "target.name": "target"}
        return run_script(script, *(f"{key}={folder / value}" for key, value in arguments.items()))

    return run


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_come_back_as_they_were(run, folder):
    assert "3 answers" in run("answers.jsonl", "kept.npz")
    run("kept.npz", "again.jsonl")
    assert rows_of(folder / "again.jsonl") == rows_of(folder / "answers.jsonl")


def test_other_prompts_and_damaged_files_are_refused(run, folder):
    run("answers.jsonl", "checked.npz")
    with pytest.raises(ValueError, match=r"made with another prompts\. Give the prompts= that were answered"):
        run("checked.npz", "never.jsonl", prompts="other.jsonl")
    with pytest.raises(ValueError, match=r"one of them must be a \.npz file"):
        run("answers.jsonl", "never.jsonl")
    with pytest.raises(ValueError, match=r"checked\.npz exists; choose another out="):
        run("answers.jsonl", "checked.npz")
    write_rows(folder / "foreign.jsonl", [rows_of(folder / "answers.jsonl")[0] | {"tokenizer": "other"}])
    with pytest.raises(ValueError, match="p0@0 has no token ids of this tokenizer"):
        run("foreign.jsonl", "never.npz")
    content = (folder / "checked.npz").read_bytes()
    for damaged in (content[: len(content) // 2], b"no archive"):
        (folder / "checked.npz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"checked\.npz is damaged or not a file of token ids"):
            run("checked.npz", "never.jsonl")
    numpy.savez(folder / "lacks.npz", prompt=numpy.zeros(1))
    (folder / "checked.npz").write_bytes((folder / "lacks.npz").read_bytes())
    with pytest.raises(ValueError, match=r"checked\.npz is damaged or not a file of token ids"):
        run("checked.npz", "never.jsonl")
