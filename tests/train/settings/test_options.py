"""Tests of options: ranges, which are checked before anything is loaded; the help; options in messages; the names of runs."""

import copy
import re
from pathlib import Path

import hydra
import pytest
import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from specdec.core import progress, ranges
from specdec.core.ranges import named
from specdec.core.rules import RULES
from specdec.heads.dflash import BlockDrafter
from specdec.heads.eagle import Eagle3
from specdec.options import config_files
from specdec.proposers.growth import Children
from tests.support import ROOT, log_of
from train.loop import optimizer
from train.loop.optimizer import read_norms
from train.settings import hydra_text as overrides
from train.settings import usage
from train.settings.hydra_text import search_path
from train.settings.options import OPEN_NULL, RunConfig

FREE = ("head.",)
WRONG = [
    *map(float, ("nan", "inf", "-inf")),
    -1,
    -0.5,
    10**400,
    1e300,
    True,
    "abc",
    "",
    [1],
    {"a": 1},
    [],
    [None],
    None,
]


def compose(*overrides: str) -> dict:
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_container(hydra.compose("train", ["run=some", *overrides, search_path()]), resolve=True)


@pytest.fixture(scope="module")
def usual() -> dict:
    return compose("head=eagle3")


@pytest.mark.parametrize("head", config_files.list_files("head"))
def test_every_option_of_every_head_has_a_range_that_its_default_fits(head):
    document = compose(f"head={head}", "decode=tree")
    ranges.check(document)
    config = RunConfig.of(document)
    open_ones = {name for name, value in config_files.flatten(document).items() if value == "auto"} - {
        "progress",
        "precision",
        "target.dtype",
    }
    assert open_ones <= set(config.open) and set(config.open) - open_ones <= set(OPEN_NULL)
    left = {name: config_files.flatten(document)[name] for name in config.open}
    assert {**config_files.flatten(config.document()), **left} == config_files.flatten(document)


def test_every_setting_of_every_proposer_has_one():
    for path in config_files.list_files("proposer").values():
        settings = yaml.safe_load(path.read_text())
        given = {key: value for key, value in settings.items() if "${" not in str(value) and value != "???"}
        ranges.check({"proposer": given})
        assert all(ranges.find(f"proposer.{key}") for key in settings), path


def leaves(settings: dict, prefix: str = ""):
    for key, value in settings.items():
        if isinstance(value, dict) and ranges.find(f"{prefix}{key}") is None:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def test_no_option_takes_what_it_cannot_use(usual):
    """Each option with values of other types and of other sizes: it is refused by its name, or it says that it takes them."""
    refused = 0
    for name in leaves(usual):
        declared = ranges.find(name)
        for value in WRONG:
            changed = copy.deepcopy(usual)
            *groups, key = name.split(".")
            place = changed
            for group in groups:
                place = place[group]
            place[key] = value
            try:
                ranges.check(changed)
            except ValueError as error:
                assert str(error).startswith(f"{name}=") and "must be" in str(error) and str(error).endswith("."), name
                refused += 1
                continue
            number = declared.kind in (int, float) and not declared.choices
            if number and not isinstance(value, list):
                assert value is None or (type(value) in (int, float) and declared.least <= value <= declared.most), (
                    name,
                    value,
                )
            assert value != value or value is None or declared.kind is None or value not in (float("inf"), 10**400), (
                name
            )
    assert refused > 800


def test_an_option_that_does_not_exist_is_refused(usual):
    with pytest.raises(ValueError, match=r"^There is no option 'train\.stepz'\. Did you mean 'steps'\?"):
        ranges.check(usual | {"train": usual["train"] | {"stepz": 3}}, free=FREE)
    for changed in ({"train": usual["train"] | {"lr": 3}}, {"lr": 3}):  # which other groups have
        with pytest.raises(ValueError, match=r"^There is no option '(train\.)?lr'\. See --help\."):
            RunConfig.of(usual | changed)


def test_the_choices_are_those_that_exist():
    assert set(ranges.find("schedule").choices) == set(optimizer.SHAPES)
    assert set(ranges.find("tracker").choices) == {"none", "wandb", "tensorboard", "trackio"}
    assert ranges.find("progress").choices == progress.MODES
    assert set(ranges.find("rule").choices) == set(RULES) and ranges.find("children").choices == Children.__args__


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("train.batch=0", "train.batch=0 must be a whole number from 1 to 65536, or auto."),
        ("train.steps=0", "train.steps=0 must be a whole number of 1 or more, or auto."),
        ("train.max_grad_norm=1e400", "train.max_grad_norm=inf must be a number from 0 to 1e+30."),
        ("train.ema=1", "train.ema=1 must be a number above 0 and below 1, or null."),
        ("precision=fp16", "precision=fp16 must be one of auto, bf16, fp32."),
        ("head.vocab_size=0", "head.vocab_size=0 must be a whole number of 1 or more, or auto, or null."),
        ("head.objective.losses.kl=nan", "head.objective.losses.kl=nan must be a number of 0 or more."),
        ("optimizer.lr=true", "optimizer.lr=true must be a number of 0 or more."),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9] must be a list of 2, each a number of at least 0 and below 1."),
        ("resume=yes", "resume=yes must be one of true, false, auto."),
        ("run=", "run= must be a text that is not empty."),
        ("start=???", "start: Missing mandatory value: start."),
    ],
)  # fmt: skip
def test_a_run_refuses_before_it_loads_anything(fit, monkeypatch, given, sentence):
    monkeypatch.setattr("train.prepare.build.Target.load", lambda *_, **__: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError) as refused:
        fit("wrong", "head=eagle3", given)
    assert str(refused.value) == sentence


def test_zero_means_never(fit, tmp_path):
    """train.max_grad_norm=0 trains as a bound that is never reached, and the other settings leave the last step alone."""
    zeros = [f"train.{name}=0" for name in ("max_grad_norm", "validate_every", "save_every", "log_every")]
    assert fit("zero", *zeros, "head=eagle3") == 0
    assert fit("large", *zeros, "train.max_grad_norm=1e9", "head=eagle3") == 0
    lines = [log_of(run) for run in ("zero", "large")]
    steps = [row["step"] for row in lines[0] if "loss" in row]
    assert len(steps) == 2 and steps[0] == 1 and {row["step"] for row in lines[0] if "validation" in row} == {steps[1]}
    assert [row.get("loss") for row in lines[0]] == [row.get("loss") for row in lines[1]]
    assert len({row["loss"] for row in lines[0] if "loss" in row}) == 2  # weights changed
    assert all(row["clipped"] == 0 and row["grad_norm"] > 0 for row in lines[0] if "loss" in row)
    assert [path.name for path in (tmp_path / "checkpoints/zero/state").iterdir()] == [f"step_{steps[1]:06d}"]
    assert read_norms([torch.tensor(3.0)], float("inf")) == {"grad_norm": 3.0, "clipped": 0.0}


# Help and messages


def test_help_shows_every_option_and_its_comment():
    text = usage.usage()
    config = OmegaConf.load(ROOT / "conf" / "train.yaml")
    for key in config:
        if key not in ("defaults", "hydra"):
            assert re.search(rf"^{key}:", text, re.M), key
    for comment in ("# steps", "# continue the run in that folder", "# half-width, on features"):
        assert comment in text
    assert "head=consistency|dflash" in text


@pytest.mark.parametrize(
    ("given", "close"),
    [("train.stepz=3", "train.steps"), ("head.objektive.depth=3", "head.objective.depth"), ("heads=mtp", "head")],
)
def test_an_unknown_option_is_named_with_the_one_that_is_like_it(given, close):
    known = [
        "head=eagle",
        "experiment=blockwise",
        "head.objective.losses.kl=1",
        "+more.of=1",
        "head.drafter.num_layers=2",
    ]
    assert usage.unknown(known) is None
    said = usage.unknown([*known, given])
    assert said.startswith(f"There is no option {given.partition('=')[0]!r}. Did you mean {close!r}?")
    assert usage.unknown(["xyzzy=1"]) == "There is no option 'xyzzy'. python train.py --help lists them all."


@pytest.mark.parametrize(
    ("message", "wanted"),
    [
        ("depth=5 is more than 4: lower depth=", "decode.depth=5 is more than 4: lower decode.depth="),
        ("other.depth=5 stays, and so does {lr=1}", "other.depth=5 stays, and so does {decode.lr=1}"),
        ("nodes=null and width=1", "decode.nodes=null and decode.width=1"),
        ("no option here", "no option here"),
    ],
)
def test_messages_name_the_option(message, wanted):
    with pytest.raises(ValueError) as caught, named("decode"):
        raise ValueError(message)
    assert str(caught.value) == wanted


def test_only_messages_of_value_errors_are_renamed():
    with pytest.raises(TypeError, match=r"^depth=5$"), named("decode"):
        raise TypeError("depth=5")


# Names of runs


@pytest.mark.parametrize(
    ("given", "wanted"),
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
def test_a_run_and_its_features_are_named_by_the_target(given, wanted):
    assert overrides.target_name("targets/smollm2-135m/") == "smollm2-135m"
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        config = hydra.compose("train", overrides=[*given, search_path()], return_hydra_config=True)
    before = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(config)
        assert config.run == wanted and config.features.folder == f"checkpoints/features/{wanted}"
    finally:
        HydraConfig.instance().cfg = before


# Empty lists, and paths of the home folder


@pytest.mark.parametrize(
    "option",
    [
        "head.drafter.target_layers=[]",
        "data.train=[]",
        "data.train={}",
        "features.engine=[]",
        "fast=[]",
        "optimizer.betas=[]",
    ],
)
def test_an_empty_list_is_not_null(option):
    name = option.partition("=")[0]
    with pytest.raises(ValueError, match=rf"^{re.escape(name)}=[\[{{]\]?}}? must be .*\.$"):
        RunConfig.of(compose("head=eagle3", option))


def test_an_empty_list_stays_where_it_means_something():
    config = RunConfig.of(compose("head=draft", "head.drafter.copy_layers=[]"))
    assert config.head["drafter"]["copy_layers"] == []
    with pytest.raises(ValueError, match=r"^head\.drafter\.lora_modules=\[\] must be a list of one or more texts"):
        RunConfig.of(compose("head=medusa2", "head.drafter.lora_modules=[]"))


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
    config = RunConfig.of(compose("head=draft", *overrides.as_written(given)))
    known = config_files.flatten(config.document())
    assert config.data.train == paths and known["head.drafter.model"] == "/at/home/model"
    assert {known[name] for name in names} == {"/at/home/x"}
    assert RunConfig.of(config.document()).data.train == paths
