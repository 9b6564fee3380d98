"""Options of a run: refusals derived from the models, before anything is loaded; the help; the names of runs."""

import copy
import pkgutil
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, get_args, get_origin

import hydra
import pytest
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf
from pydantic.fields import FieldInfo

from specdec.core import progress
from specdec.core.option_types import (
    HUGE,
    describe_bounds,
    find_options,
    format_value,
    list_choices,
    list_fields,
    list_kinds,
    list_types,
    read_bounds,
    read_options,
)
from specdec.core.precision import AUTO
from specdec.core.rules import RULES
from specdec.decoding.drafting import Drafting
from specdec.heads.dflash import BlockDrafter
from specdec.heads.eagle import Eagle3
from specdec.options import config_files
from specdec.options.config_files import flatten
from specdec.proposers.growth import Children
from tests.support import ROOT, log_of
from train.loop import optimizer
from train.loop.optimizer import read_norms
from train.settings import hydra_text as overrides
from train.settings import usage
from train.settings.hydra_text import make_search_path
from train.settings.options import RunConfig, RunDraftingOptions, RunOptions, list_auto_options, read_run

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
HEADS = list(config_files.list_files("head"))
CHECKED_BY_THEIR_READERS = (
    "template",
    "head.drafter",
    "head.objective",
    "head.optimizer",
    "target.outline",
    "data.train",
)


def compose(*overrides: str) -> dict:
    with hydra.initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return OmegaConf.to_container(
            hydra.compose("train", ["run=some", *overrides, make_search_path()]), resolve=True
        )


@pytest.fixture(scope="module")
def usual() -> dict:
    return compose("head=eagle3")


@pytest.fixture(scope="module")
def options(usual) -> RunOptions:
    return read_run(usual)


# Models and YAML


@pytest.mark.parametrize("head", HEADS)
def test_every_key_of_yaml_is_an_option_and_the_reverse(head):
    document = compose(f"head={head}", "decode=tree")
    options = read_run(document)
    assert flatten(options.document()) == flatten(document)
    fields = list_fields(RunOptions)
    names = {
        name
        for name in flatten(document)
        if not name.startswith(("head.drafter.", "head.objective.", "target.outline.", "data.train."))
    }
    groups = {"head.drafter", "head.objective", "target.outline", "template"}
    absent = {"head.optimizer", "head.adapter.lr", "head.adapter.delay", "machine.launch"}  # of some heads only
    assert {re.sub(r"^(head\.optimizer)\..*", r"\1", name) for name in names} <= set(fields)
    assert set(fields) - names - groups <= absent | {"data.train"}
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


def changed(document: dict, name: str, value) -> dict:
    document = copy.deepcopy(document)
    *groups, key = name.split(".")
    place = document
    for group in groups:
        place = place[group] if isinstance(place.get(group), dict) else place.setdefault(f"{group}", {})
    place[key] = value
    return document


def values_of(field) -> list:
    """Values below and above the bounds of an option, and of other types."""
    values = list(WRONG)
    for annotation in list_types(field):
        _, bounds = read_bounds(annotation)
        values += [bounds[name] - 1 for name in ("ge", "gt") if name in bounds] + [
            bounds["gt"] for _ in "g" if "gt" in bounds
        ]
        values += [bounds[name] + 1 for name in ("le", "lt") if name in bounds] + [
            bounds["lt"] for _ in "l" if "lt" in bounds
        ]
    return values


def fits(field, value) -> bool:
    """Whether an option takes a value, by its types and bounds: a second implementation."""
    for annotation in list_types(field):
        kind, bounds = read_bounds(annotation)
        origin = get_origin(kind) or kind
        if origin is Literal:
            fits_one = any(value == choice and type(value) is type(choice) for choice in get_args(kind))
        elif origin is float:
            fits_one = type(value) in (int, float) and bounds.get("ge", -HUGE) <= value <= bounds.get("le", HUGE)
            fits_one = fits_one and bounds.get("gt", -2 * HUGE) < value < bounds.get("lt", 2 * HUGE)
        elif origin is int:
            fits_one = type(value) is int and bounds.get("ge", -HUGE) <= value <= bounds.get("le", HUGE)
        elif origin in (list, Sequence):
            item = FieldInfo.from_annotation(get_args(kind)[0])
            sizes = bounds.get("min_length", 0), bounds.get("max_length", 99)
            fits_one = (
                isinstance(value, list)
                and sizes[0] <= len(value) <= sizes[1]
                and all(fits(item, each) for each in value)
            )
        elif origin is str:
            fits_one = isinstance(value, str) and value != ""
        else:
            fits_one = type(value) is (type(None) if kind is None else origin) and (origin is not dict or value != {})
        if fits_one:
            return True
    return False


def assert_refused(document: dict, name: str, field: FieldInfo, values: list) -> None:
    """Asserts that each of the values, and a misspelt name, are refused in the sentence that names the option."""
    for value in values:
        with pytest.raises(ValueError) as refused:
            read_options(RunOptions, changed(document, name, value))
        assert str(refused.value) == f"{name}={format_value(value)} must be {describe_bounds(field, value)}."
    with pytest.raises(ValueError, match=rf"^There is no option '{name}z'\. Did you mean '{name}'\? See --help\.$"):
        read_options(RunOptions, changed(document, f"{name}z", 1))


@pytest.mark.parametrize("name", [name for name in list_fields(RunOptions) if name not in CHECKED_BY_THEIR_READERS])
def test_no_option_takes_what_it_cannot_use(usual, name):
    """Each option below and above its bounds, of wrong types, null, misspelt: the sentence names it and what it may be."""
    field = list_fields(RunOptions)[name]
    document = changed(usual, "head.adapter", {"lr": 1.0, "delay": 1}) if name.startswith("head.adapter.") else usual
    assert_refused(document, name, field, [value for value in values_of(field) if not fits(field, value)])


@pytest.mark.parametrize("group", ["drafter", "objective"])
@pytest.mark.parametrize("head", HEADS)
def test_no_option_of_a_head_takes_what_it_cannot_use(head, group):
    document = compose(f"head={head}")
    model = find_options(pkgutil.resolve_name(document["head"][group]["_target_"]))
    for key, field in model.model_fields.items():
        name = f"head.{group}.{key}"
        wrong = [value for value in values_of(field) if not (fits(field, value) or dict in list_kinds(field))]
        assert_refused(document, name, field, wrong)


TOGETHER = {  # what two options may not be together
    "target.device=gpu": "target.device=gpu must be null",
    "features.mode=engine": "features.mode=engine needs the URL of a server",
    "features.mode=online features.engine=http://a": "features.mode=online runs the target in this process",
    "start_vocab=data": "start_vocab=data is for a checkpoint that is trained further: give start=, too.",
    "head=medusa2 head.adapter=null": "A head that adapts the target needs head.adapter: {lr, delay}",
    "head=medusa2 features.engine=http://a": "features.engine=http://a: the head changes the target",
    "target.shard=true features.engine=http://a": "features.engine=http://a: target.shard=true keeps",
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
    fields = list_fields(RunOptions)
    choices = lambda name: list_choices(fields[name])
    assert set(choices("optimizer.schedule")) == set(optimizer.SCHEDULE_SHAPES)
    assert tuple(choices("progress")) == progress.MODES
    assert set(choices("decode.rule")) == set(RULES) and tuple(choices("decode.children")) == Children.__args__
    assert {*Drafting.__dataclass_fields__} == {*RunDraftingOptions.model_fields}


@pytest.mark.parametrize(
    ("option", "sentence"),
    [
        ("train.batch=0", "train.batch=0 must be a whole number from 1 to 65536, or auto."),
        ("train.steps=0", "train.steps=0 must be a whole number of 1 or more, or auto."),
        ("train.max_grad_norm=1e400", "train.max_grad_norm=inf must be a number from 0 to 1e+30."),
        ("precision=fp16", "precision=fp16 must be one of auto, bf16, fp32."),
        ("head.objective.losses.kl=nan", "head.objective.losses.kl=nan must be a number of 0 or more."),
        ("start=???", "start: Missing mandatory value: start."),
    ],
)  # fmt: skip
def test_a_run_refuses_before_it_loads_anything(fit, monkeypatch, option, sentence):
    monkeypatch.setattr("train.prepare.facts.Target.load", lambda *_, **__: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError) as refused:
        fit("wrong", "head=eagle3", option)
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
    text = usage.describe_usage()
    config = OmegaConf.load(ROOT / "conf" / "train.yaml")
    for key in config:
        if key not in ("defaults", "hydra"):
            assert re.search(rf"^{key}:", text, re.M), key
    for comment in (
        "# steps",
        "# continue the run in that folder",
        "# half-width, on features",
        "(a whole number of 1 or more, or auto)",
    ):
        assert comment in text
    assert "head=consistency|dflash" in text


@pytest.mark.parametrize(
    ("option", "close"),
    [("train.stepz=3", "train.steps"), ("head.objektive.depth=3", "head.objective.depth"), ("heads=mtp", "head")],
)
def test_an_unknown_option_is_named_with_the_one_that_is_like_it(option, close):
    known_options = [
        "head=eagle",
        "experiment=blockwise",
        "head.objective.losses.kl=1",
        "+more.of=1",
        "head.drafter.num_layers=2",
    ]
    assert usage.find_unknown_option(known_options) is None
    sentence = usage.find_unknown_option([*known_options, option])
    assert sentence.startswith(f"There is no option {option.partition('=')[0]!r}. Did you mean {close!r}?")
    assert usage.find_unknown_option(["xyzzy=1"]) == "There is no option 'xyzzy'. See --help."


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (
            "experiment=blokwise",
            "There is no experiment 'blokwise'. Did you mean 'blockwise'? Leave experiment= out, or",
        ),
        ("head=mtp,egle", "There is no head 'egle'. Did you mean 'eagle'?"),
        ("head=null", "There is no head 'null'."),
        ("target=Qwen/Qwen3-8B", "There is no target 'Qwen/Qwen3-8B'. Did you mean 'qwen3-8b'?"),
    ],
)
def test_a_choice_without_a_file_is_refused(wrong, sentence):
    known = ["head=eagle,mtp", "head=glob(*)", "decode=chain.yaml", "train.steps=2", "heads=x", "plan=true"]
    assert usage.refuse_choices(known) is None
    assert usage.refuse_choices([*known, wrong]).startswith(f"error: {sentence}")
    assert usage.refuse_choices([wrong, "--config-dir=mine"]) is None


def test_an_experiment_that_does_not_exist_is_not_optional():
    defaults = OmegaConf.load(ROOT / "conf" / "train.yaml").defaults
    assert not [key for entry in defaults if not isinstance(entry, str) for key in entry if "optional" in key]


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
    assert overrides.make_target_name("targets/smollm2-135m/") == "smollm2-135m"
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
    config = read_run(compose("head=draft", *overrides.quote_arguments(given)))
    known = flatten(config.document())
    assert config.data.train == paths and known["head.drafter.model"] == "/at/home/model"
    assert {known[name] for name in names} == {"/at/home/x"}
    assert read_run(config.document()).data.train == paths
