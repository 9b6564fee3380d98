"""Tests that text on the command line of train.py stays as it is written."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from specdec.text.reading import read_sources
from train.settings.hydra_text import check_options, quote_arguments

TEXTS = [
    "data/x.jsonl", "数据/rows.jsonl", "my data (1)/rows.jsonl", "lr=1e-4,bs=2/rows.jsonl", "a#b:c", "it's", 'say "hi',
    " x ", "a\\", "\\", "${x}", "\\${x}", "\\\\${x}y\\", "${f%%.*}", "{a}", "{", "[a", "$HOME", "%{}^&*()!@~`;<>?|",
    "a\tb", "a\nb", "\udce4b", "1e3", "1", "0x1f", "true", "False", "nan", "a, b", "é.jsonl", "C:\\data\\rows.jsonl",
    "a=b", "(a)", "'a' b", "choice(a,b)", "@x", "~/rows.jsonl", "x" * 400,
]  # fmt: skip


def read(argument: str):
    """The value of an argument, as Hydra and then OmegaConf read it."""
    override = OverridesParser.create().parse_override(quote_arguments([argument])[0])
    assert not override.is_sweep_override()
    config = OmegaConf.create({"value": override.value()})
    return OmegaConf.to_container(config, resolve=True)["value"]


@pytest.mark.parametrize("text", TEXTS, ids=ascii)
def test_text_stays_as_it_is_written(text):
    for key in ("data.train", "data.heldout", "target.name", "run", "start", "features.folder", "+target.revision"):
        assert read(f"{key}={text}") == text, key
    once = quote_arguments([f"run={text}"])
    assert quote_arguments(once) == once  # the command that about.json repeats


def test_an_option_that_may_be_null_still_can_be():
    assert read("start=null") is None and read("target.revision=null") is None
    assert read("run=null") == "null" and read("data.train=null") == "null"


def test_lists_dicts_and_numbers_are_what_the_documents_say(tmp_path, monkeypatch):
    assert read("data.train=[a.jsonl,b.jsonl]") == ["a.jsonl", "b.jsonl"]
    assert read("data.train=[数据/a.jsonl, my data (1)/b.jsonl]") == ["数据/a.jsonl", "my data (1)/b.jsonl"]
    assert read("data.train={a.jsonl: 2, b.jsonl: 0.5}") == {"a.jsonl": 2, "b.jsonl": 0.5}
    weighted = read_sources(read("data.train={a.jsonl: 2, data/b.jsonl: 0.5}"))
    assert weighted == {"a.jsonl": 2, "data/b.jsonl": 0.5}
    assert read("features.engine=[http://a:1,http://b:2]") == ["http://a:1", "http://b:2"]
    assert read("optimizer.lr=1e-3") == 1e-3 and read("optimizer.betas=[0.9,0.95]") == [0.9, 0.95]
    assert read('data.train="two words (1)"') == "two words (1)"  # quoted for Hydra already
    assert read("head.drafter.lora={r: 8}") == {"r": 8}
    assert read("data.train=[a${b}.jsonl,c.jsonl]") == ["a${b}.jsonl", "c.jsonl"]
    assert quote_arguments(["head=eagle", "~data", "hydra.verbose=true"]) == [
        "head=eagle",
        "~data",
        "hydra.verbose=true",
    ]
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[a,b]").mkdir()
    (tmp_path / "'a'").touch()
    assert read("data.train=[a,b]") == "[a,b]" and read("data.train='a'") == "'a'"  # what exists wins


@pytest.mark.parametrize("text", ["{a: 2", "{a}.jsonl", "{"])
def test_what_only_looks_like_a_dict_is_one_name(text):
    assert list(read_sources(text)) == [text]


def test_options_of_another_command_are_checked():
    check_options({"train.steps": "3", "optimizer.lr": "1e-3", "head": "eagle", "data.heldout": "数"}, "training.")
    with pytest.raises(ValueError, match=r"^training\.train\.steps=x must be a whole number of 1 or more, or auto\.$"):
        check_options({"train.steps": "x"}, "training.")
