"""Tests of the options of all scripts: ranges, text that stays as it is written, and how a command ends."""

from specdec.options.command_line import CommandLineOptions, flatten, option, options, run

import errno
import os
import re
import sys
from dataclasses import MISSING, dataclass, field
from pathlib import Path

import pytest

from scripts import evaluate, generate, serve
from specdec.core import files
from specdec.decoding.drafting import Drafting
from specdec.options import proposers
from tests.support import ROOT
from tests.test_docs import option_class

SCRIPTS = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if "options(" in path.read_text())


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_number_has_a_range_that_its_default_fits(script):
    for each in flatten(option_class(f"scripts/{script}.py")):
        if re.search(r"\bint\b|\bfloat\b", str(each.type)):
            assert each.range is not None, f"{script}.py: {each.name} has no range in specdec/core/ranges.py"
        if each.range is not None and each.default is not MISSING:
            assert each.range.fits(each.default), (script, each.name, each.default)


@dataclass(frozen=True)
class Inner:
    temperature: float = option(0.0, "a number")


@dataclass(frozen=True)
class Given:
    prompt: str = option("", "a text")
    out: str | None = option(None, "a text, or none")
    batch: int = option(1, "a number")
    limit: int | None = option(None, "a number, or none")
    decode: Inner = field(default_factory=Inner)
    settings: dict[str, str] = field(default_factory=dict, metadata={"prefix": "proposer."})


@pytest.fixture
def read(monkeypatch):
    def read(*arguments: str) -> Given:
        monkeypatch.setattr(sys, "argv", ["script", *arguments])
        return options(Given, "")

    return read


@pytest.mark.parametrize(
    "text", ["${f%%.*}", 'for f in *; do echo "${f%%.*}"; done', "\\${x}", "???", "${a", "{a: 1}", "[1]", "1e3", "a=b", "${oc.env:HOME}", "数 (1)"]
)  # fmt: skip
def test_text_stays_as_it_is_written(read, text):
    given = read(f"prompt={text}", f"out={text}", f"proposer.model={text}")
    assert (given.prompt, given.out, given.settings) == (text, text, {"model": text})


def test_a_proposer_gets_text_as_it_is_written(tmp_path):
    for text in ("${x}/model", "\\${x}", "数 (1)"):
        assert (
            proposers.configure("draft", settings={"model": text}, drafting=Drafting(), checkpoint=None)["model"]
            == text
        )
    head = tmp_path / "${x}"
    head.mkdir()
    assert proposers.configure("head", settings={}, drafting=Drafting(), checkpoint=str(head))["checkpoint"] == str(
        head
    )
    with pytest.raises(ValueError, match=r"^proposer\.num=0 must be a whole number of 1 or more\.$"):
        proposers.configure("ngram", settings={"num": "0"}, drafting=Drafting(), checkpoint=None)
    with pytest.raises(ValueError, match=r"^proposer\.least=\.nan must be a number of at least 0 and below 1\.$"):
        proposers.configure("suffix", settings={"least": ".nan"}, drafting=Drafting(), checkpoint=None)


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("batch=0", "batch=0 must be a whole number from 1 to 65536."),
        ("limit=0", "limit=0 must be a whole number of 1 or more, or null."),
        ("decode.temperature=nan", "decode.temperature=nan must be a number of 0 or more."),
        ("decode.temperature=1e400", "decode.temperature=inf must be a number from 0 to 1e+30."),
    ],
)
def test_a_number_outside_of_its_range_is_refused(read, argument, sentence):
    with pytest.raises(ValueError) as refused:
        read(argument)
    assert str(refused.value) == sentence


def test_null_is_none_where_that_is_allowed(read):
    given = read("limit=null", "out=null", "prompt=null")
    assert (given.limit, given.out, given.prompt) == (None, None, "null")


# How a command ends


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOENT, "error: no/x.jsonl: No such file or directory: check the path."),
        (errno.EACCES, "error: no/x.jsonl: Permission denied: take a place that you may read and write, or change its permissions."),
        (errno.EISDIR, "error: no/x.jsonl: Is a directory: name a file, not a folder."),
        (errno.ENOSPC, "error: no/x.jsonl: No space left on device: free some disk space, or choose another place."),
        (errno.ENAMETOOLONG, "error: no/x.jsonl: File name too long: choose a shorter name."),
        (errno.EIO, "error: no/x.jsonl: Input/output error."),
    ],
)  # fmt: skip
def test_what_the_system_refuses_is_one_sentence(number, sentence):
    def main():
        raise OSError(number, os.strerror(number), "no/x.jsonl")

    with pytest.raises(SystemExit) as ended:
        run(main)
    assert ended.value.code == sentence


def test_errors_without_a_file_are_told_too():
    assert files.explain(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")) == (
        "Connection refused: start the server, or check its address."
    )
    assert files.explain(OSError("a library's\n  own words")) == "a library's own words"


@pytest.mark.parametrize(
    ("error", "said"), [(KeyboardInterrupt(), "Stopped.\n"), (KeyboardInterrupt("Kept."), "Kept.\n"), (KeyError("ours"), None)]
)  # fmt: skip
def test_ctrl_c_is_a_line_and_130_and_a_mistake_of_ours_keeps_its_traceback(capsys, error, said):
    def main():
        raise error

    with pytest.raises(SystemExit if said else KeyError) as ended:
        run(main)
    assert said is None or (ended.value.code == 130 and capsys.readouterr().err == said)


# What is given counts


@dataclass(frozen=True, kw_only=True)
class Shaped(CommandLineOptions):
    depth: int = option(3, "a number")
    chains: str = option("", "a list; empty: none")
    model: str | None = option(None, "a name")
    prompt: str = option("", "a text", prose=True)
    decode: Inner = field(default_factory=Inner)
    settings: dict[str, str] = field(default_factory=dict, metadata={"prefix": "proposer."})


def test_an_option_was_given_even_where_it_has_the_value_of_its_default():
    given = options(Shaped, "", ["depth=3", "decode.temperature=0", "proposer.num=1"], lambda given: {"chains": "2"})
    assert given.given_names == {"depth", "decode.temperature", "settings"} and given.chains == "2"
    assert options(Shaped, "", []).given_names == frozenset()


@pytest.mark.parametrize("argument", ["model=", "model= ", "model=,", "chains=, ,", "proposer.checkpoint="])
def test_an_empty_value_without_a_meaning_is_refused(argument):
    with pytest.raises(ValueError, match=rf"^{argument} is empty: give a value, or leave the option out\.$"):
        options(Shaped, "", [argument])
    assert options(Shaped, "", ["chains=", "prompt="]).chains == ""


def test_the_home_folder_takes_the_place_of_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/at/home")
    given = options(
        Shaped, "", ["model=~/m", "chains=~,a~b, ~/c,~nobody9/d", "proposer.datastore=~/store", "prompt=~/x"]
    )
    assert (given.model, given.chains, given.settings) == ("/at/home/m", "/at/home,a~b, /at/home/c,~nobody9/d", {"datastore": "/at/home/store"})  # fmt: skip
    assert given.prompt == "~/x" and options(Shaped, "", ["model=~root/m"]).model == f"{Path('~root').expanduser()}/m"


class Loaded(Exception):
    pass


def find_proposer(monkeypatch, tmp_path, *arguments: str) -> str:
    """The proposer that generate chooses, without loading a target."""
    (tmp_path / "drafter.json").write_text('{"_target_": "specdec.heads.eagle.Eagle3", "target": "t"}')

    def configure(name, **settings):
        raise Loaded(name)

    monkeypatch.setattr(proposers, "configure", configure)
    with pytest.raises(Loaded) as chosen:
        generate.main([f"checkpoint={tmp_path}", "prompt=hi", *arguments])
    return str(chosen.value)


@pytest.mark.parametrize("argument", ["decode.depth=2", "decode.depth=3", "decode.width=1", "decode.nodes=null"])
def test_a_shape_that_is_asked_for_is_drafted_where_it_is_the_usual_one_too(argument, monkeypatch, tmp_path):
    assert find_proposer(monkeypatch, tmp_path) == "auto"
    assert find_proposer(monkeypatch, tmp_path, "decode.temperature=0", "decode.rule=token") == "auto"
    assert find_proposer(monkeypatch, tmp_path, argument) == "head"
    assert find_proposer(monkeypatch, tmp_path, "proposer=auto", argument) == "auto"


@pytest.mark.parametrize(
    "arguments", [["batch=1"], ["chains="], ["decode.depth=2"], ["decode.width=1"], ["protocol=eagle", "chains=4"]]
)
def test_what_a_choice_has_no_use_for_is_refused_with_the_usual_value_too(arguments):
    name = arguments[-1].partition("=")[0]
    with pytest.raises(ValueError, match=rf"^choose=true has no use for {name}=: it looks at chains"):
        evaluate.main(["checkpoint=no", "choose=true", *arguments])


@pytest.mark.parametrize("argument", ["decode.temperature=0", "decode.top_p=null", "decode.repetition_penalty=1"])
def test_what_requests_say_is_refused_by_the_server_with_the_usual_value_too(argument):
    pytest.importorskip("uvicorn", reason="needs the extra serve: pip install '.[serve]'")
    name = argument.partition("=")[0].removeprefix("decode.")
    with pytest.raises(ValueError, match=rf"^decode\.{name} is for each request to say: give {name} in the request\.$"):
        serve.main(["checkpoint=no", argument])
