"""Tests of the options of all commands, from their models: bounds, texts that stay as they are written, and how a command ends."""

from specdec.options.command_line import read_command

import errno
import os
import re
from pathlib import Path

import pytest

from scripts import generate, serve
from scripts.generate import GenerateOptions
from specdec.core import files
from specdec.core.option_types import list_fields, list_types, read_bounds
from specdec.decoding.drafting import Drafting
from specdec.options import config_files, proposers
from specdec.options.command_defaults import GROUP, REQUIRED, name_option, read_comments, read_defaults
from specdec.options.run_command import run_command
from tests.support import ROOT, find_model

SCRIPTS = {path.stem: path.read_text() for path in sorted((ROOT / "scripts").glob("*.py"))}


VERBS = [verb for verb, text in SCRIPTS.items() if "read_command(" in text]
FIELDS = {verb: list_fields(find_model(verb)) for verb in VERBS}


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(verb: str, *arguments: str):
    """The options of a verb; its required ones are x, unless they are given."""
    given = {argument.partition("=")[0] for argument in arguments}
    required = [name for name, default in read_defaults(verb).items() if default.value == REQUIRED]
    filled = [f"{name}=x" for name in required if name in FIELDS[verb] and name not in given]
    return read_command(verb, find_model(verb), "", [*filled, *arguments])


# Models and conf/command


@pytest.mark.parametrize("verb", VERBS)
def test_every_default_is_that_of_a_field_and_fits_it(verb):
    defaults, fields = read_defaults(verb), FIELDS[verb]
    assert fields.keys() <= defaults.keys() and all(defaults[name].help for name in fields)
    own = read_comments(config_files.list_files(GROUP)[verb].read_text()).keys() - {"defaults"}
    assert {name for name in own if name in defaults} <= fields.keys()
    assert own - fields.keys() <= {name.partition(".")[0] for name in fields if "." in name}  # its groups
    if verb not in EXCLUSIVE:
        read(verb)


def test_every_file_of_shared_options_has_only_options_of_some_verb():
    known = set().union(*FIELDS.values())
    for name in config_files.list_files(GROUP):
        assert name in VERBS or read_defaults(name).keys() <= known, name


# Verbs two of whose options need each other, with a pair that fits
EXCLUSIVE = {"adapt": ["traffic=x"], "export": ["out=x"]}
NUMBERS = [
    pytest.param(verb, name, kind, bounds, id=f"{verb} {name}")
    for verb, fields in FIELDS.items()
    for name, field in fields.items()
    for kind, bounds in map(read_bounds, list_types(field))
    if kind in (int, float)
]


@pytest.mark.parametrize(("verb", "name", "kind", "bounds"), NUMBERS)
def test_a_number_outside_of_its_bounds_is_refused(verb, name, kind, bounds):
    field = FIELDS[verb][name]
    low, high = bounds.get("ge", bounds.get("gt")), bounds.get("le", bounds.get("lt"))
    wrong = [f"{low - (kind is int or 'ge' in bounds)}", "x", "nan"] + [f"{2 * high + 1}"] * (high is not None)
    null = any(kind is type(None) for kind, _ in map(read_bounds, list_types(field)))
    for text in wrong if null else [*wrong, "null"]:
        with pytest.raises(
            ValueError, match=rf"^{re.escape(name)}=\S+ must be {'a whole number' if kind is int else 'a number'}"
        ):
            read(verb, *EXCLUSIVE.get(verb, []), f"{name}={text}")


@pytest.mark.parametrize("verb", VERBS)
def test_a_misspelt_option_is_answered_with_the_right_one(verb):
    for name, field in FIELDS[verb].items():
        if not name_option(name, field).endswith(".KEY") and len(name) > 4:
            with pytest.raises(
                ValueError, match=rf"^There is no option '{name}s'\. Did you mean '{name}'\? See --help\.$"
            ):
                read(verb, f"{name}s=1")
    with pytest.raises(ValueError, match=r"^'x' is not of the form key=value\. See --help\.$"):
        read(verb, "x")


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("max_new_tokens=0", "max_new_tokens=0 must be a whole number of 1 or more."),
        ("decode.nodes=0", "decode.nodes=0 must be a whole number from 1 to 65536, or null."),
        ("decode.top_p=nan", "decode.top_p=nan must be a number above 0 and at most 1, or null."),
        ("decode.repetition_penalty=1e400", "decode.repetition_penalty=inf must be a number above 0 and at most 1e+30."),
        ("decode.children=many", "decode.children=many must be distinct or chosen."),
        ("compare=maybe", "compare=maybe must be true or false."),
        ("settings=1", "There is no option 'settings'. See --help."),
        ("target=x", "There is no option 'target'. Did you mean 'target.name'? See --help."),
    ],
)  # fmt: skip
def test_sentences(argument, sentence):
    with pytest.raises(ValueError) as refused:
        read("generate", argument)
    assert str(refused.value) == sentence


def test_what_is_missing_is_named():
    with pytest.raises(ValueError, match=r"^Give a value for: prompts, out\. See --help\.$"):
        read_command("answer", find_model("answer"), "", ["seed=1"])


# Texts


@pytest.mark.parametrize(
    "text", ["${f%%.*}", 'for f in *; do echo "${f%%.*}"; done', "\\${x}", "???", "${a", "{a: 1}", "[1]", "1e3", "a=b", "${oc.env:HOME}", "数 (1)"]
)  # fmt: skip
def test_text_stays_as_it_is_written(text):
    options = read("generate", f"prompt={text}", f"checkpoint={text}", f"proposer.model={text}")
    assert (options.prompt, options.checkpoint, options.proposer_settings) == (text, text, {"model": text})


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


def test_null_is_none_where_that_is_allowed():
    options = read("generate", "checkpoint=null", "decode.top_k=null", "prompt=null")
    assert (options.checkpoint, options.decode.top_k, options.prompt) == (None, None, "null")


@pytest.mark.parametrize(
    ("verb", "argument"),
    [("serve", "model="), ("serve", "model= "), ("serve", "model=,"), ("report", "results=, ,"), ("serve", "proposer.checkpoint=")],
)  # fmt: skip
def test_an_empty_value_without_a_meaning_is_refused(verb, argument):
    with pytest.raises(ValueError, match=rf"^{argument} is empty: give a value, or leave the option out\.$"):
        read(verb, argument)
    assert read("report", "results=").results == "" and read("generate", "prompt=").prompt == ""


def test_the_home_folder_takes_the_place_of_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/at/home")
    options = read("generate", "checkpoint=~/m", "proposer.datastore=~/store", "prompt=~/x")
    assert (options.checkpoint, options.proposer_settings, options.prompt) == ("/at/home/m", {"datastore": "/at/home/store"}, "~/x")  # fmt: skip
    assert read("report", "results=~,a~b, ~/c,~nobody9/d").results == "/at/home,a~b, /at/home/c,~nobody9/d"
    assert read("serve", "model=~root/m").model == f"{Path('~root').expanduser()}/m"


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
        run_command(main, GenerateOptions)
    assert ended.value.code == sentence


def test_errors_without_a_file_are_told_too():
    assert files.describe_error(ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")) == (
        "Connection refused: start the server, or check its address."
    )
    assert files.describe_error(OSError("a library's\n  own words")) == "a library's own words"


@pytest.mark.parametrize(
    ("error", "said"), [(KeyboardInterrupt(), "Stopped.\n"), (KeyboardInterrupt("Kept."), "Kept.\n"), (KeyError("ours"), None)]
)  # fmt: skip
def test_ctrl_c_is_a_line_and_130_and_a_mistake_of_ours_keeps_its_traceback(capsys, error, said):
    def main():
        raise error

    with pytest.raises(SystemExit if said else KeyError) as ended:
        run_command(main, GenerateOptions)
    assert said is None or (ended.value.code == 130 and capsys.readouterr().err == said)


# Presets


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


@pytest.mark.parametrize("argument", ["decode.temperature=0", "decode.top_p=null", "decode.repetition_penalty=1"])
def test_what_requests_say_is_refused_by_the_server_with_the_usual_value_too(argument):
    pytest.importorskip("uvicorn", reason="needs the extra serve: pip install '.[serve]'")
    name = argument.partition("=")[0].removeprefix("decode.")
    with pytest.raises(ValueError, match=rf"^decode\.{name} is for each request to say: give {name} in the request\.$"):
        serve.main(["checkpoint=no", argument])
