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
from tests.support import ROOT, save_target, write_rows

load_once = functools.cache(load_tokenizer)


ROWS = [
    {"messages": [{"role": "user", "content": "Say hello."}, {"role": "assistant", "content": "Hello, world!"},
                  {"role": "user", "content": "Bye."}, {"role": "assistant", "content": "See you"}], "finish": "length"},
    {"text": "Plain text, as it stands."},
    {"text": ""},
]  # fmt: skip
ANSWERS = [
    "<|im_start|>assistant\nHello, world!<|im_end|>",
    "<|im_start|>assistant\nSee you",
    "Plain text, as it stands.",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("datastore")
    save_target(folder / "target")
    write_rows(folder / "rows.jsonl", ROWS)
    write_rows(folder / "none.jsonl", ROWS[2:])
    write_rows(folder / "wrong.jsonl", [{"prompt": "?"}])
    return folder


@pytest.fixture
def run(folder, monkeypatch, run_script):
    def run(source, out, *arguments):
        monkeypatch.setattr(script, "load_tokenizer", load_once)
        return run_script(script, f"data={folder}/{source}", f"out={out}", f"target.name={folder}/target", *arguments)

    return run


def texts_in(folder: Path, tokenizer) -> list[str]:
    datastore = store.read_datastore(folder, token_text.digest_vocabulary(tokenizer))
    texts: list[list[int]] = []
    for token in list(datastore.tokens)[:-1]:
        if token == store.SEPARATOR:
            texts.append([])
        else:
            texts[-1].append(token)
    return [tokenizer.decode(text) for text in texts]


def test_the_proposer_reads_the_datastore_of_the_script(run, folder, tmp_path, monkeypatch):
    tokenizer = load_once(f"{folder}/target")
    printed = run("rows.jsonl", tmp_path / "d", "length=8")
    assert "tokens in 3 texts" in printed and "MB" in printed and " s" in printed
    assert texts_in(tmp_path / "d", tokenizer) == ANSWERS
    document = json.loads((tmp_path / "d" / "datastore.json").read_text())
    assert document["source"] == "rows.jsonl" and str(folder) not in json.dumps(document)
    run("rows.jsonl", tmp_path / "first", "limit=1")
    assert texts_in(tmp_path / "first", tokenizer) == ANSWERS[:2]

    monkeypatch.setattr(retrieval, "load_tokenizer", load_once)
    target = Target.load(f"{folder}/target", dtype="float32")
    shipped = OmegaConf.load(ROOT / "conf" / "proposer" / "retrieval.yaml")
    proposer = instantiate(OmegaConf.merge(shipped, {"datastore": str(tmp_path / "first")}), target)
    proposer.texts = [tokenizer("<|im_end|>\n<|im_start|>assistant\nHello")["input_ids"]]
    assert tokenizer.decode([token for token, _ in proposer.draft(0)][:3]) == ", world!"


@pytest.mark.parametrize(
    ("data", "arguments", "message"),
    [
        ("none.jsonl", [], "holds no text, so there is nothing to retrieve"),
        ("rows.jsonl", ["limit=0"], "limit=0 must be a whole number of 1 or more, or null"),
        ("wrong.jsonl", [], "wrong.jsonl:1: neither messages nor text"),
        ("nowhere.jsonl", [], "There is no file"),
        ("rows.jsonl", ["length=0"], "length=0 must be a whole number of 1 or more"),
        ("rows.jsonl", ["target.name=./nowhere"], "does not exist"),
    ],
)
def test_wrong_arguments_are_refused(refuse, tmp_path, data, arguments, message):
    refuse(message, data, tmp_path / "d", *arguments)
    assert not list(tmp_path.iterdir())


def test_an_existing_folder_is_not_overwritten(refuse, tmp_path):
    (tmp_path / "d").mkdir()
    refuse("exists; choose another out=FOLDER or delete it", "rows.jsonl", tmp_path / "d")
