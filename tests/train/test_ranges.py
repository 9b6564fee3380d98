"""Tests that every option has a range, and that a value outside of it is refused before anything is loaded."""

import copy
import json

import hydra
import pytest
import torch
import yaml
from omegaconf import OmegaConf

from specdec.core.rules import RULES
from specdec.proposers.growth import Children
from tests.support import HEADS_FOLDER, ROOT
from train import optimization, progress, ranges
from train.optimization import GradientNorms

FREE = ("head.",)
WRONG = [
    float("nan"),
    float("inf"),
    float("-inf"),
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
        return OmegaConf.to_container(hydra.compose("train", ["run=some", *overrides]), resolve=True)


@pytest.fixture(scope="module")
def usual() -> dict:
    return compose("head=eagle3")


@pytest.mark.parametrize("head", sorted(path.stem for path in HEADS_FOLDER.glob("*.yaml")))
def test_every_option_of_every_head_has_a_range_that_its_default_fits(head):
    ranges.check(compose(f"head={head}", "decode=tree"))


def test_every_setting_of_every_proposer_has_one():
    for path in (ROOT / "conf" / "proposer").glob("*.yaml"):
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


def test_the_choices_are_those_that_exist():
    assert set(ranges.find("optimizer.name").choices) == set(optimization.OPTIMIZERS)
    assert set(ranges.find("schedule").choices) == set(optimization.SHAPES)
    assert set(ranges.find("tracker").choices) == {"none", "wandb", "tensorboard", "trackio"}
    assert ranges.find("progress").choices == progress.MODES
    assert set(ranges.find("rule").choices) == set(RULES) and ranges.find("children").choices == Children.__args__


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ("train.batch=0", "train.batch=0 must be a whole number from 1 to 65536."),
        ("train.accumulation=0", "train.accumulation=0 must be a whole number from 1 to 65536."),
        ("train.steps=0", "train.steps=0 must be a whole number of 1 or more."),
        ("train.validate_every=-3", "train.validate_every=-3 must be a whole number of 0 or more."),
        ("train.max_grad_norm=-1", "train.max_grad_norm=-1 must be a number of 0 or more."),
        ("train.max_grad_norm=1e400", "train.max_grad_norm=inf must be a number from 0 to 1e+30."),
        ("train.seed=1.5", "train.seed=1.5 must be a whole number from 0 to 4294967295."),
        ("train.ema=1", "train.ema=1 must be a number above 0 and below 1, or null."),
        ("precision=fp16", "precision=fp16 must be one of auto, bf16, fp32."),
        ("head.vocab_size=-5", "head.vocab_size=-5 must be a whole number of 1 or more, or null."),
        ("head.vocab_size=0", "head.vocab_size=0 must be a whole number of 1 or more, or null."),
        ("head.drafter.num_layers=null", "head.drafter.num_layers=null must be a whole number from 1 to 1024."),
        ("head.objective.losses.kl=nan", "head.objective.losses.kl=nan must be a number of 0 or more."),
        ("data.length=-4", "data.length=-4 must be a whole number of 1 or more."),
        ("optimizer.lr=abc", "optimizer.lr=abc must be a number of 0 or more."),
        ("optimizer.lr=true", "optimizer.lr=true must be a number of 0 or more."),
        ("optimizer.betas=0.9", "optimizer.betas=0.9 must be a list of 2, each a number of at least 0 and below 1."),
        ("optimizer.betas=[0.9]", "optimizer.betas=[0.9] must be a list of 2, each a number of at least 0 and below 1."),
        ("optimizer.name=sgd", "optimizer.name=sgd must be one of adamw, adamw8bit, muon."),
        ("threads=-2", "threads=-2 must be a whole number from 1 to 1024, or null."),
        ("decode.depth=0", "decode.depth=0 must be a whole number from 1 to 1024."),
        ("features.layers=3", "features.layers=3 must be a list of values, each a whole number."),
        ("validation.decode=never", "validation.decode=never must be one of best, end, always."),
        ("resume=yes", "resume=yes must be one of true, false, auto."),
        ("run=", "run= must be a text that is not empty."),
        ("start=???", "start: Missing mandatory value: start."),
    ],
)  # fmt: skip
def test_a_run_refuses_before_it_loads_anything(fit, monkeypatch, given, sentence):
    monkeypatch.setattr("train.target_settings.Target.load", lambda *_, **__: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError) as refused:
        fit("wrong", "head=eagle3", given)
    assert str(refused.value) == sentence


def test_zero_means_never(fit, tmp_path):
    """train.max_grad_norm=0 trains as a bound that is never reached, and the other settings leave the last step alone."""
    zeros = [f"train.{name}=0" for name in ("max_grad_norm", "validate_every", "save_every", "log_every")]
    assert fit("zero", *zeros, "head=eagle3") == 0
    assert fit("large", *zeros, "train.max_grad_norm=1e9", "head=eagle3") == 0
    lines = [[json.loads(line) for line in (tmp_path / f"checkpoints/{run}/log.jsonl").read_text().splitlines()] for run in ("zero", "large")]  # fmt: skip
    steps = [row["step"] for row in lines[0] if "loss" in row]
    assert len(steps) == 2 and steps[0] == 1 and {row["step"] for row in lines[0] if "validation" in row} == {steps[1]}
    assert [row.get("loss") for row in lines[0]] == [row.get("loss") for row in lines[1]]
    assert len({row["loss"] for row in lines[0] if "loss" in row}) == 2  # weights changed
    assert all(row["clipped"] == 0 and row["grad_norm"] > 0 for row in lines[0] if "loss" in row)
    assert [path.name for path in (tmp_path / "checkpoints/zero/state").iterdir()] == [f"step_{steps[1]:06d}"]
    norms = GradientNorms(float("inf"))
    norms.add(torch.tensor(3.0))
    assert norms.read() == {"grad_norm": 3.0, "clipped": 0.0}
