"""Options of a run: refusals derived from the models, before anything is loaded; the help; the names of runs."""

import pkgutil
import re
import runpy
import sys
from pathlib import Path

import hydra
import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from pydantic.fields import FieldInfo

from specdec.core import progress
from specdec.core.option_types import find_options, list_choices, list_fields, list_kinds
from specdec.core.precision import AUTO
from specdec.core.rules import RULES
from specdec.decoding.drafting import Drafting
from specdec.heads.dflash import BlockDrafter
from specdec.heads.eagle import Eagle3
from specdec.options import config_files
from specdec.options.config_files import fill, flatten
from specdec.proposers.growth import Children
from tests.support.commands import ROOT
from tests.support.refusals import assert_refused
from tests.support.runs import log_of, losses_of
from tests.train.composing import compose
from train.loop import optimizer
from train.loop.optimizer import read_norms
from train.settings import hydra_text, usage
from train.settings.hydra_text import make_search_path
from train.settings.options import RunConfig, RunDraftingOptions, RunOptions, list_auto_options, read_run

HEADS = list(config_files.list_files("head"))


@pytest.fixture(scope="module")
def default() -> dict:
    return compose("head=eagle3")


@pytest.fixture(scope="module")
def options(default) -> RunOptions:
    return read_run(default)


# Models and YAML


@pytest.mark.parametrize("head", HEADS)
def test_every_key_of_yaml_is_an_option_and_the_reverse(head):
    document = compose(f"head={head}", "decode=tree")
    options = read_run(document)
    assert flatten(options.document()) == flatten(document)
    fields = list_fields(RunOptions)
    in_dicts = ("head.drafter.", "head.objective.", "head.optimizer.", "target.outline.", "data.train.")
    names = {name for name in flatten(document) if not name.startswith(in_dicts)}
    dicts = {name for name, field in fields.items() if dict in list_kinds(field)}
    absent = {"head.adapter.lr", "head.adapter.delay"}  # of some heads only
    assert names <= set(fields) and set(fields) - names <= dicts | absent
    for part in ("drafter", "objective"):
        settings = document["head"][part]
        model = find_options(pkgutil.resolve_name(settings["_target_"]))
        assert settings.keys() - {"_target_"} <= model.model_fields.keys()


def test_every_option_that_may_be_auto_is_decided(options):
    final = list_fields(RunConfig)
    undecided = {name for name, field in final.items() if AUTO in list_choices(field)}
    assert undecided == {"resume", "progress"}
    open_ones = {name for name, value in flatten(options.document()).items() if value == AUTO}
    assert open_ones - {"progress"} <= set(list_auto_options())
    assert list_fields(RunConfig).keys() == list_fields(RunOptions).keys()


# Refusals


def is_read_elsewhere(field: FieldInfo) -> bool:
    """Whether an option holds a dict, which its own reader checks: of a chat template, a class, weights of sources."""
    return dict in list_kinds(field)


@pytest.mark.parametrize("name", list_fields(RunOptions))
def test_no_option_takes_a_wrong_value(default, name):
    """Below and above its bounds, of a wrong type, null, misspelt: the sentence names the option and its bounds."""
    field, document = list_fields(RunOptions)[name], default
    if name.startswith("head.adapter."):
        document = fill(default, {"head.adapter": {"lr": 1.0, "delay": 1}})
    if not is_read_elsewhere(field):
        assert_refused(RunOptions, document, name, field)


@pytest.mark.parametrize("group", ["drafter", "objective"])
@pytest.mark.parametrize("head", HEADS)
def test_no_option_of_a_head_takes_a_wrong_value(head, group):
    document = compose(f"head={head}")
    model = find_options(pkgutil.resolve_name(document["head"][group]["_target_"]))
    for key, field in model.model_fields.items():
        values = [] if is_read_elsewhere(field) else None
        assert_refused(RunOptions, document, f"head.{group}.{key}", field, values)


TOGETHER = {  # what two options may not be together
    "target.device=gpu": "target.device=gpu must be null",
    "features.mode=engine": "features.mode=engine needs the URL of a server",
    "features.mode=online features.engine=http://a": "features.mode=online runs the target in this process",
    "start_vocab=data": "start_vocab=data is for a checkpoint that is trained further: give start=, too.",
    "head=medusa2 head.adapter=null": "A head that adapts the target needs head.adapter: {lr, delay}",
    "head=medusa2 features.engine=http://a": "features.engine=http://a: the head changes the target",
    "target.shard=true features.engine=http://a": "features.engine=http://a: target.shard=true keeps",
    "head=draft train.context_parallel=2": "train.context_parallel=2: head=specdec.heads.draft.Draft reads whole texts",
    "head=medusa2 target.shard=true": "target.shard=true: head=specdec.heads.medusa.Medusa2 changes the target",
    "train.steps=3 train.epochs=2": "train.steps=3 says how long to train, so train.epochs would change nothing",
    "train.tokens=3 train.epochs=2": "train.tokens and train.epochs both say how much to read",
    "+template.messages=3": "template.messages: messages is not a variable of the chat template",
    "+template.thinking=3": "template.thinking=3 must be true or false.",
}


@pytest.mark.parametrize("options", TOGETHER)
def test_what_does_not_go_together(options):
    with pytest.raises(ValueError) as refused:
        read_run(compose(*options.split()))
    assert str(refused.value).startswith(TOGETHER[options])


def test_the_choices_are_those_that_exist():
    choices = {name: list_choices(field) for name, field in list_fields(RunOptions).items()}
    assert set(choices["optimizer.schedule"]) == set(optimizer.SCHEDULE_SHAPES)
    assert tuple(choices["progress"]) == progress.MODES
    assert set(choices["decode.rule"]) == set(RULES) and tuple(choices["decode.children"]) == Children.__args__
    assert {*Drafting.__dataclass_fields__} == {*RunDraftingOptions.model_fields}


WRONG = {
    "train.batch=0": "train.batch=0 must be a whole number from 1 to 65536, or auto.",
    "head.objective.losses.kl=nan": "head.objective.losses.kl=nan must be a number of 0 or more.",
    "start=???": "start: Missing mandatory value: start.",
}


@pytest.mark.parametrize("option", WRONG)
def test_a_run_refuses_before_it_loads_anything(fit, monkeypatch, option):
    monkeypatch.setattr("train.prepare.facts.Target.load", lambda *_, **__: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError) as refused:
        fit("wrong", "head=eagle3", option)
    assert str(refused.value) == WRONG[option]


def test_zero_means_never(fit, tmp_path):
    """train.max_grad_norm=0 trains as a bound that is never reached. The other settings leave the last step alone."""
    zeros = [f"train.{name}=0" for name in ("max_grad_norm", "validate_every", "save_every", "log_every")]
    assert fit("zero", *zeros, "head=eagle3") == 0
    assert fit("large", *zeros, "train.max_grad_norm=1e9", "head=eagle3") == 0
    losses = losses_of("zero")
    first, last = losses
    assert first == 1 and {row["step"] for row in log_of("zero") if "validation" in row} == {last}
    assert losses == losses_of("large") and losses[first] != losses[last]  # weights changed
    assert all(row["clipped"] == 0 < row["grad_norm"] for row in log_of("zero") if "loss" in row)
    assert [path.name for path in (tmp_path / "checkpoints/zero/state").iterdir()] == [f"step_{last:06d}"]
    assert read_norms([torch.tensor(3.0)], float("inf")) == {"grad_norm": 3.0, "clipped": 0.0}


# Help and messages


def test_help_shows_every_option_and_its_comment():
    text = usage.describe_usage()
    config = OmegaConf.load(ROOT / "conf" / "train.yaml")
    keys = [key for key in config if key not in ("defaults", "hydra")]
    assert all(re.search(rf"^{key}:", text, re.M) for key in keys) and "head=dflash|" in text
    for comment in ("# steps", "# continue the run in that folder", "# half-width of the noise", "1 or more, or auto)"):
        assert comment in text
    assert "optional" not in str(config.defaults)  # an experiment that does not exist is refused


KNOWN_OPTIONS = ["head=eagle", "experiment=blockwise", "head.objective.losses.kl=1", "+more.of=1", "template={}"]


@pytest.mark.parametrize(
    ("option", "close"),
    [("train.stepz=3", "train.steps"), ("head.objektive.depth=3", "head.objective.depth"), ("heads=mtp", "head")],
)
def test_an_unknown_option_is_named_with_the_one_that_is_like_it(option, close):
    assert usage.find_unknown_option(KNOWN_OPTIONS) is None
    sentence = usage.find_unknown_option([*KNOWN_OPTIONS, option])
    assert sentence.startswith(f"There is no option {option.partition('=')[0]!r}. Did you mean {close!r}?")
    assert usage.find_unknown_option(["xyzzy=1"]) == "There is no option 'xyzzy'. See --help."


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ("experiment=blokwise", "experiment=blokwise. Did you mean experiment=blockwise? There are: "),
        ("head=mtp,egle", "head=egle. Did you mean head=eagle?"),
        ("head=null", "head=null."),
        ("target=Qwen/Qwen3-8B", "target=Qwen/Qwen3-8B. Did you mean target=qwen3-8b?"),
    ],
)
def test_a_choice_without_a_file_is_refused(wrong, sentence):
    known = ["head=eagle,mtp", "head=glob(*)", "decode=chain.yaml", "train.steps=2", "heads=x", "plan=true"]
    assert usage.refuse_choices(known) is None
    assert usage.refuse_choices([*known, wrong]).startswith(f"There is no {sentence}")
    assert usage.refuse_arguments([wrong, "--config-dir=mine"]) is None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("", "Say which head to train, as in: accelerate launch train.py head=eagle. There are: dflash"),
        ("head=consistency", "head=consistency was removed: an earlier version of specdec has it."),
        ("head=eagel", "There is no head=eagel. Did you mean head=eagle? There are: dflash"),
        ("head=[eagle", "There is no head=[eagle. Did you mean head=eagle?"),
        ("head=eagle train.stepz=3", "There is no option 'train.stepz'. Did you mean 'train.steps'? See --help."),
        ("--head eagle", "'--head' is not of the form key=value, such as head=eagle. See --help."),
        ("eagle", "'eagle' is not of the form key=value, such as head=eagle. See --help."),
        ("plan=h100x9", "There is no machine=h100x9. Did you mean machine=h100x8?"),
        # What Hydra alone finds
        ("head=eagle,mtp", "head=eagle,mtp has several values: give one, or -m too, for a run with each"),
        ("head=eagle head.drafter.num_modules=2", "There is no option 'head.drafter.num_modules' beside these choices"),
        ("head=eagle ~nothing", "Could not delete from config. 'nothing' does not exist. See --help."),
        ("--config-dir nowhere head=eagle", "Additional config directory"),
    ],
)
def test_a_wrong_command_line_of_training_gets_one_sentence(words, sentence, monkeypatch, capfd):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", ["train.py", *words.split()])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    assert ended.value.code.startswith(f"error: {sentence}") and "\n" not in ended.value.code
    assert capfd.readouterr() == ("", "")


def test_a_run_stays_in_its_folder():
    for name in ("../x", "a/../../x"):
        with pytest.raises(ValueError, match=rf"^run={name} leaves checkpoints/, where runs are: give a name, or"):
            read_run(compose(f"run={name}"))
    for name in ("a/b", "/elsewhere/x", "a..b"):
        assert read_run(compose(f"run={name}")).run == name


# Names of runs


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], "eagle-smollm2-135m"),
        (["head=eagle3", "target.name=Qwen/Qwen3-8B"], "eagle3-Qwen3-8B"),
        (["target.name='/models/Llama 3 (new)//'"], "eagle-Llama-3-new"),
        (["target.name='models/ä,b=c:$d@1/'"], "eagle-ä-b-c-d-1"),
        (["target.name=."], f"eagle-{Path.cwd().name}"),
        (["target.name=/"], "eagle-target"),
        (["target.name=123"], "eagle-123"),
        (["head=eagle3", "features.folder=checkpoints/features/${run}", "target.name=a/b"], "eagle3-b"),
        (["run=mine", "target.name=a/b"], "mine"),
    ],
)
def test_a_run_and_its_features_are_named_by_the_target(options, name):
    assert hydra_text.make_target_name("targets/smollm2-135m/") == "smollm2-135m"
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = hydra.compose("train", overrides=[*options, make_search_path()], return_hydra_config=True)
    before = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(config)
        assert config.run == name and config.features.folder == f"checkpoints/features/{name}"
    finally:
        HydraConfig.instance().cfg = before


# Empty lists, and paths of the home folder


def test_an_empty_list_stays_where_it_means_something():
    options = read_run(compose("head=draft", "head.drafter.copy_layers=[]"))
    assert options.head.drafter["copy_layers"] == []


@pytest.mark.parametrize("kind", [Eagle3, BlockDrafter])
def test_a_head_that_fuses_no_hidden_state_is_refused(kind, small_target):
    with pytest.raises(ValueError, match=r"^target_layers=\[\] is empty: name the hidden states to read"):
        kind(small_target, target_layers=[])


@pytest.mark.parametrize(
    ("train", "paths"),
    [
        ("~/a.jsonl", "/at/home/a.jsonl"),
        ("[~/a.jsonl,b~.jsonl]", ["/at/home/a.jsonl", "b~.jsonl"]),
        ("{~/a.jsonl: 2, ~/my rows (1).jsonl: 0.5}", {"/at/home/a.jsonl": 2, "/at/home/my rows (1).jsonl": 0.5}),
    ],
)
def test_paths_of_the_home_folder_in_every_form(train, paths, monkeypatch):
    monkeypatch.setenv("HOME", "/at/home")
    names = ("data.heldout", "data.cache", "features.folder", "target.name", "start", "run", "validation.answers")
    given = [f"data.train={train}", "head.drafter.model=~/model", *(f"{name}=~/x" for name in names)]
    config = read_run(compose("head=draft", *hydra_text.quote_arguments(given)))
    known = flatten(config.document())
    assert config.data.train == paths and known["head.drafter.model"] == "/at/home/model"
    assert {known[name] for name in names} == {"/at/home/x"}
    assert read_run(config.document()).data.train == paths
