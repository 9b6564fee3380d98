"""Tests of scripts/datastore.py: the proposer reads the folder that the script writes."""

import functools
import json
from pathlib import Path

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

from scripts import datastore as script
from specdec.proposers import datastore as store
from specdec.proposers import text as retrieval
from specdec.target.model import Target, load_tokenizer
from specdec.text import token_text
from tests.support.commands import ROOT, write_rows
from tests.support.targets import save_target

load_once = functools.cache(load_tokenizer)
TALK = [("user", "Say hello."), ("assistant", "Hello, world!"), ("user", "Bye."), ("assistant", "See you")]
ROWS = [
    {"messages": [{"role": role, "content": text} for role, text in TALK], "finish": "length"},
    {"text": "Plain text, as it stands."},
    {"text": ""},
]
ANSWERS = ["<|im_start|>assistant\nHello, world!<|im_end|>", "<|im_start|>assistant\nSee you", ROWS[1]["text"]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datastore")
    save_target(folder / "target")
    for name, rows in {"rows": ROWS, "none": ROWS[2:], "wrong": [{"prompt": "?"}]}.items():
        write_rows(folder / f"{name}.jsonl", rows)
    return folder


@pytest.fixture
def run(folder, monkeypatch, run_script):
    """run(file, out, "key=value", ...) -> what the script printed"""
    monkeypatch.setattr(script, "load_tokenizer", load_once)

    def run(source, out, *arguments):
        return run_script(script, f"data={folder}/{source}", f"out={out}", f"target.name={folder}/target", *arguments)

    return run


def read_texts(folder: Path, tokenizer) -> list[str]:
    tokens = list(store.read_datastore(folder, token_text.digest_vocabulary(tokenizer)).tokens)
    starts = [place for place, token in enumerate(tokens) if token == store.SEPARATOR]
    return [tokenizer.decode(tokens[start + 1 : end]) for start, end in zip(starts, starts[1:])]


def test_the_proposer_reads_the_datastore_of_the_script(run, folder, tmp_path, monkeypatch):
    tokenizer = load_once(f"{folder}/target")
    printed = run("rows.jsonl", tmp_path / "d", "length=8")
    assert "tokens in 3 texts" in printed and "MB" in printed and " s" in printed
    assert read_texts(tmp_path / "d", tokenizer) == ANSWERS
    document = json.loads((tmp_path / "d" / "datastore.json").read_text())
    assert document["source"] == "rows.jsonl" and str(folder) not in json.dumps(document)
    run("rows.jsonl", tmp_path / "first", "limit=1")
    assert read_texts(tmp_path / "first", tokenizer) == ANSWERS[:2]

    monkeypatch.setattr(retrieval, "load_tokenizer", load_once)
    target = Target.load(f"{folder}/target", dtype="float32")
    shipped = OmegaConf.load(ROOT / "conf" / "proposer" / "retrieval.yaml")
    proposer = instantiate(OmegaConf.merge(shipped, {"datastore": str(tmp_path / "first")}), target)
    proposer.texts = [tokenizer("<|im_end|>\n<|im_start|>assistant\nHello")["input_ids"]]
    assert tokenizer.decode([token for token, _ in proposer.draft(0)][:3]) == ", world!"


@pytest.mark.parametrize(
    ("source", "out", "argument", "message"),
    [
        ("none.jsonl", "d", "length=8", "holds no text, so there is nothing to retrieve"),
        ("wrong.jsonl", "d", "length=8", "wrong.jsonl:1: neither messages nor text"),
        ("nowhere.jsonl", "d", "length=8", "There is no file"),
        ("rows.jsonl", "d", "target.name=./nowhere", "does not exist"),
        ("rows.jsonl", ".", "length=8", "exists; choose another out=FOLDER or delete it"),
    ],
)
def test_what_cannot_be_made_is_refused(refuse, tmp_path, source, out, argument, message):
    refuse(message, source, tmp_path / out, argument.replace("length=8", "length=8"))
    assert not list(tmp_path.iterdir())
