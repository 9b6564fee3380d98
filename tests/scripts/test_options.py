"""Options of all commands: the table of refusals, texts that stay as they are written, and how a command ends."""

from specdec.options.command_line import read_command

import errno
import importlib
import os
import re
from pathlib import Path

import pytest
from pydantic.fields import FieldInfo

from scripts import generate
from scripts.generate import GenerateOptions
from specdec.command import find_verbs
from specdec.core import files
from specdec.core.option_types import list_fields, list_kinds
from specdec.decoding.drafting import Drafting
from specdec.options import config_files, proposers
from specdec.options.command_defaults import (
    GROUP,
    REQUIRED,
    name_option,
    read_comments,
    read_defaults,
)
from specdec.options.run_command import run_command
from tests.support.commands import ROOT, find_model
from tests.support.refusals import assert_refused, list_refused_values

SCRIPTS = {path.stem.rstrip("_"): path.read_text() for path in sorted((ROOT / "scripts").glob("*.py"))}
VERBS = [verb for verb, text in SCRIPTS.items() if "read_command(" in text]
FIELDS = {verb: list_fields(find_model(verb)) for verb in VERBS}
OPTIONS = [(verb, name) for verb, fields in FIELDS.items() for name in fields]
EXCLUSIVE = {"adapt": ["traffic=x"], "export": ["out=x"]}  # what verbs need besides their required options
PROMPTS = f"prompts={ROOT}/data/prompts_heldout.jsonl"


@pytest.fixture(autouse=True)
def in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def read(verb: str, *arguments: str):
    """The options of a verb; its required ones are x, unless they are given."""
    given_names = {argument.partition("=")[0] for argument in arguments}
    required = [name for name, default in read_defaults(verb).items() if default.value == REQUIRED]
    filled = [f"{name}=x" for name in required if name in FIELDS[verb] and name not in given_names]
    return read_command(verb, find_model(verb), "", [*filled, *arguments])


# Models and conf/command


@pytest.mark.parametrize("verb", VERBS)
def test_every_default_is_that_of_a_field_and_fits_it(verb):
    defaults, fields = read_defaults(verb), FIELDS[verb]
    assert fields.keys() <= defaults.keys() and all(defaults[name].help for name in fields)
    own_names = read_comments(config_files.list_files(GROUP)[verb].read_text()).keys() - {"defaults"}
    assert {name for name in own_names if name in defaults} <= fields.keys()
    assert own_names - fields.keys() <= {name.partition(".")[0] for name in fields if "." in name}  # its groups
    read(verb, *EXCLUSIVE.get(verb, []))


def test_every_file_of_shared_options_has_only_options_of_some_verb():
    all_names = set().union(*FIELDS.values())
    for name in config_files.list_files(GROUP):
        assert name in VERBS or read_defaults(name).keys() <= all_names, name


# The table of refusals


@pytest.mark.parametrize(("verb", "name"), OPTIONS, ids=" ".join)
def test_no_option_takes_what_it_cannot_use(verb, name):
    """Each option below and above its bounds, of wrong types, null, misspelt; numbers also as they are written."""
    field, defaults = FIELDS[verb][name], read_defaults(verb)
    values = {name: defaults[name].value for name in FIELDS[verb]}
    document = config_files.fill({}, {name: "x" if value == REQUIRED else value for name, value in values.items()})
    is_prefix = name_option(name, field).endswith(".KEY")
    if not is_prefix:
        assert_refused(find_model(verb), document, name, field)
    for text in list_refused_texts(field):
        with pytest.raises(ValueError, match=rf"^{re.escape(name)}=\S+ must be a (whole )?number"):
            read(verb, *EXCLUSIVE.get(verb, []), f"{name}={text}")
    if not is_prefix and len(name) > 4 and f"{name}s" not in FIELDS[verb]:
        with pytest.raises(ValueError, match=rf"^There is no option '{name}s'\. Did you mean '{name}'\? See --help\.$"):
            read(verb, f"{name}s=1")


def list_refused_texts(field: FieldInfo) -> list[str]:
    """Texts that an option of a number refuses."""
    kinds = list_kinds(field)
    if not {int, float} & kinds:
        return []
    numbers = [str(value) for value in list_refused_values(field) if isinstance(value, int | float)]
    return ["x", *numbers] if type(None) in kinds else ["x", "null", *numbers]


EVALUATE = f"evaluate proposers=ngram {PROMPTS}"
REFUSALS = {  # sentences for single options, for options together, and for texts that a command reads itself
    "generate prompt=x max_new_tokens=0": "max_new_tokens=0 must be a whole number of 1 or more.",
    "generate prompt=x settings=1": "There is no option 'settings'. See --help.",
    "generate prompt=x target=x": "There is no option 'target'. Did you mean 'target.name'? See --help.",
    "generate x": "'x' is not of the form key=value. See --help.",
    "answer seed=1": "Give a value for: prompts, out. See --help.",
    "answer prompts=x out=x": "target.name= must name the model that answers",
    "answer prompts=x out=x target.name=x decode.temperature=0,0": "decode.temperature=0,0: give each temperature",
    f"evaluate {PROMPTS}": "There is nothing to measure: give checkpoint=checkpoints/a,checkpoints/b, or proposers=",
    f"{EVALUATE} decode.temperature=hot": "decode.temperature=hot: give numbers, such as 0 or 0,1.",
    f"{EVALUATE} chains=1,two": "chains=1,two cannot be read: give a comma list of DEPTH, such as 1,2,3.",
    f"{EVALUATE} chains=0": "depth=0, width=1 and nodes=0 must be at least 1.",
    f"{EVALUATE} trees=4x3": "trees=4x3 cannot be read: give a comma list of DEPTHxWIDTHxNODES, such as",
    f"{EVALUATE} trees=3x2x2": "nodes=2 cannot hold a path of depth=3: raise nodes= or lower depth=.",
    f"{EVALUATE} batch=1,x": "batch=1,x: give numbers from 1 to 4096, such as 1,4,16.",
    f"{EVALUATE} batch=0": "batch=0: give numbers from 1 to 4096",
    f"{EVALUATE} lengths=2048": "subset=, lengths= and accept_licence= are of suite=: give it, too.",
    "answer prompts=x out=x target.name=x subset=counting": "subset= and lengths= are of suite=ruler: leave them out.",
    "answer suite=ruler out=x target.name=x split=test": "split= is of prompts=: leave it out, as suite=ruler has its",
    f"{EVALUATE} suite=gsm": "There is no suite=gsm. Did you mean suite=gsm8k?",
    f"{EVALUATE} protocol=dflash": "There is no protocol=dflash. Did you mean protocol=dflash2?",
    f"{EVALUATE} predicted=nowhere.json": "predicted=nowhere.json must be a folder of specdec choose",
    "evaluate temperature=1": "There is no option 'temperature'. Did you mean 'decode.temperature'? See --help.",
    "export checkpoint=x": "Give a value for: out. See --help.",
    "export checkpoint=x out=x format=vlm": "There is no format=vlm. Did you mean format=vllm? There are: eagle,",
    "export checkpoint=x push=user/name format=vllm": "push= shares the checkpoint as it is: leave format= and",
    "export checkpoint=x out=x dry_run=true": "base_model=, private= and dry_run= are of push=user/name",
    "export checkpoint=x push=head": "push=head must be a name on the Hugging Face Hub, such as user/name.",
    "export checkpoint=x push=a/b/head": "push=a/b/head must be a name on the Hugging Face Hub",
    "export checkpoint=x push=user/head@v1": "push=user/head@v1 must be a name on the Hugging Face Hub",
    "export checkpoint=x push=user/head base_model=/m/base": "base_model=/m/base must be a name on the",
    "generate prompt=x decode.temperature=0,1": "decode.temperature=0,1: give one, and run this again for each",
    "generate prompt=x target.trust_remote_code=true": "target.trust_remote_code=true runs code of a model that",
    "report": "Give one of run=, results=, records= and board=. See --help.",
    "serve decode.temperature=0": "decode.temperature is for each request to say: give temperature in the request.",
    "serve decode.top_p=null": "decode.top_p is for each request to say: give top_p in the request.",
}


@pytest.mark.parametrize("command", REFUSALS)
def test_sentences(command):
    verb, *arguments = command.split()
    with pytest.raises(ValueError) as refused:
        importlib.import_module(f"scripts.{find_verbs()[verb].stem}").main(arguments)
    assert str(refused.value).startswith(REFUSALS[command])


# Texts


@pytest.mark.parametrize(
    "text",
    '${f%%.*}|for f in *; do echo "${f%%.*}"; done|\\${x}|???|${a|{a: 1}|[1]|1e3|a=b|${oc.env:HOME}|数 (1)'.split("|"),
)
def test_text_stays_as_it_is_written(text):
    options = read("generate", f"prompt={text}", f"checkpoint={text}", f"proposer.model={text}")
    assert (options.prompt, options.checkpoint, options.proposer_settings) == (text, text, {"model": text})


def configure(name: str, settings: dict[str, str], checkpoint: str | None = None) -> proposers.Config:
    return proposers.configure(name, settings=settings, drafting=Drafting(), checkpoint=checkpoint)


def test_a_proposer_gets_text_as_it_is_written(tmp_path):
    for text in ("${x}/model", "\\${x}", "数 (1)"):
        assert configure("draft", {"model": text})["model"] == text
    head = tmp_path / "${x}"
    head.mkdir()
    assert configure("head", {}, str(head))["checkpoint"] == str(head)


def test_null_is_none_where_that_is_allowed():
    options = read("generate", "checkpoint=null", "decode.top_k=null", "prompt=null")
    assert (options.checkpoint, options.decode.top_k, options.prompt) == (None, None, "null")


@pytest.mark.parametrize(
    ("verb", "argument"),
    [
        ("serve", "model="),
        ("serve", "model= "),
        ("serve", "model=,"),
        ("report", "results=, ,"),
        ("serve", "proposer.checkpoint="),
    ],
)
def test_an_empty_value_without_a_meaning_is_refused(verb, argument):
    with pytest.raises(ValueError, match=rf"^{argument} is empty: give a value, or leave the option out\.$"):
        read(verb, argument)
    assert read("report", "results=").results == "" and read("generate", "prompt=").prompt == ""


def test_the_home_folder_takes_the_place_of_a_tilde(monkeypatch):
    monkeypatch.setenv("HOME", "/at/home")
    options = read("generate", "checkpoint=~/m", "proposer.datastore=~/store", "prompt=~/x")
    assert options.proposer_settings == {"datastore": "/at/home/store"}
    assert (options.checkpoint, options.prompt) == ("/at/home/m", "~/x")
    assert read("report", "results=~,a~b, ~/c,~nobody9/d").results == "/at/home,a~b, /at/home/c,~nobody9/d"
    assert read("serve", "model=~root/m").model == f"{Path('~root').expanduser()}/m"


# What is written


@pytest.mark.parametrize(("verb", "is_folder"), [("answer", False), ("evaluate", True)])
def test_the_folder_of_a_result_is_made_before_anything_is_loaded(tmp_path, verb, is_folder):
    assert read(verb, f"out={tmp_path}/a/b/name").out == f"{tmp_path}/a/b/name"
    assert list((tmp_path / "a" / "b").iterdir()) == []
    (tmp_path / "file").write_text("")
    for out in ("/proc/none/name", f"{tmp_path}/file/name", f"{tmp_path}/{'x' * 300}/name"):
        with pytest.raises(ValueError, match=r"out=.* cannot be written .*Choose another"):
            read(verb, f"out={out}")
    wrong, sentence = ("file", "is a file: give the name of a folder") if is_folder else ("a", "is a folder: give")
    with pytest.raises(ValueError, match=rf"out=.* {sentence}"):
        read(verb, f"out={tmp_path}/{wrong}")


# How a command ends


@pytest.mark.parametrize(
    ("number", "sentence"),
    [
        (errno.ENOENT, "No such file or directory: check the path."),
        (errno.EACCES, "Permission denied: take a place that you may read and write, or change its permissions."),
        (errno.EISDIR, "Is a directory: name a file, not a folder."),
        (errno.ENOSPC, "No space left on device: free some disk space, or choose another place."),
        (errno.ENAMETOOLONG, "File name too long: choose a shorter name."),
        (errno.EIO, "Input/output error."),
    ],
)
def test_what_the_system_refuses_is_one_sentence(number, sentence):
    def main():
        raise OSError(number, os.strerror(number), "no/x.jsonl")

    with pytest.raises(SystemExit) as ended:
        run_command(main, GenerateOptions)
    assert ended.value.code == f"error: no/x.jsonl: {sentence}"


def test_errors_without_a_file_are_told_too():
    refused = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    assert files.describe_error(refused) == "Connection refused: start the server, or check its address."
    assert files.describe_error(OSError("a library's\n  own words")) == "a library's own words"


@pytest.mark.parametrize(
    ("error", "line"),
    [(KeyboardInterrupt(), "Stopped.\n"), (KeyboardInterrupt("Kept."), "Kept.\n"), (KeyError("ours"), None)],
)
def test_ctrl_c_is_a_line_and_130_and_a_mistake_of_ours_keeps_its_traceback(capsys, error, line):
    def main():
        raise error

    with pytest.raises(SystemExit if line else KeyError) as ended:
        run_command(main, GenerateOptions)
    assert line is None or (ended.value.code == 130 and capsys.readouterr().err == line)


# Presets


class ConfiguredError(Exception):
    """Raised where a proposer would be made, with its name."""


def find_proposer(monkeypatch, tmp_path, *arguments: str) -> str:
    """The proposer that generate chooses, without loading a target."""
    (tmp_path / "drafter.json").write_text('{"_target_": "specdec.heads.eagle.Eagle3", "target": "t"}')

    def configure(name, **settings):
        raise ConfiguredError(name)

    monkeypatch.setattr(proposers, "configure", configure)
    with pytest.raises(ConfiguredError) as raised:
        generate.main([f"checkpoint={tmp_path}", "prompt=hi", *arguments])
    return str(raised.value)


@pytest.mark.parametrize("argument", ["decode.depth=2", "decode.depth=3", "decode.width=1", "decode.nodes=null"])
def test_a_shape_that_is_asked_for_is_drafted_where_it_is_the_usual_one_too(argument, monkeypatch, tmp_path):
    assert find_proposer(monkeypatch, tmp_path) == "auto"
    assert find_proposer(monkeypatch, tmp_path, "decode.temperature=0", "decode.rule=token") == "auto"
    assert find_proposer(monkeypatch, tmp_path, argument) == "head"
    assert find_proposer(monkeypatch, tmp_path, "proposer=auto", argument) == "auto"
