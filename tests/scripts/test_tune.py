"""Tests of scripts/tune.py on a tiny checkpoint."""

from helpers import decoding

import json

import pytest
import torch

from scripts import tune
from specdec import checkpoint
from specdec.decoding.drafting import Drafting
from specdec.heads.medusa import Medusa
from specdec.measuring import tuning
from tests.support import save_target, write_prompts

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tune")
    target = save_target(folder / "target")
    spec = {"_target_": "specdec.heads.medusa.Medusa", "num_heads": 3}
    checkpoint.save(folder / "head", Medusa(target, num_heads=3, vocab=torch.arange(0, target.vocab_size, 4)), spec)
    write_prompts(folder / "prompts.jsonl", 2)
    return folder


@pytest.fixture
def run(folder, run_script):
    def run(*arguments):
        defaults = [f"checkpoint={folder}/head", f"prompts={folder}/prompts.jsonl", "target.dtype=float32",
                 "max_new_tokens=6", f"out={folder}/tune.json", *arguments]  # fmt: skip
        return run_script(tune, *defaults)

    return run


@pytest.mark.parametrize(("temperature", "batch"), [(0, 1), (1, 2)])
def test_auto_and_fixed_shapes_are_predicted_and_measured(run, folder, temperature, batch):
    printed = run("chains=1,2,4", "trees=2x2x4", f"decode.temperature={temperature}", f"batch={batch}",
                  f"picture={folder}/rounds.png", "picture_prompt=2")  # fmt: skip
    assert "left out: chain of 4; this drafter takes 3 steps" in printed and "tokens expected" in printed
    figures = json.loads((folder / "tune.json").read_text())
    assert figures["conditions"].startswith(f"{folder}/head on {folder}/target, float32, ")
    assert figures["conditions"] in printed and figures["verdict"] in printed
    assert list(figures["ways"]) == ["auto", "chain of 1", "chain of 2", "tree of 2x2x4"]
    costs, choices = figures["costs"], figures["choices"]
    assert set(costs["pass_ms"]) == {"1", str(batch)} and choices["rounds"] == sum(choices["by_nodes"].values())
    assert sum(cell["num"] for cell in figures["chances"]) > 0
    curve = {int(num): ms for num, ms in costs["pass_ms"][str(batch)].items()}
    for way in list(figures["ways"].values())[1:]:
        shape = Drafting(**way["drafting"]).shape
        again = tuning.predict(way["measured"]["tau"], curve, costs["head_ms"], shape)
        assert way["predicted"] == pytest.approx(again) if again is not None else way["predicted"] is None
    assert (folder / "rounds.png").stat().st_size > 10_000
    drafting = decoding.read_drafting(f"{folder}/tune.json", compile=False)
    speeds = {name: way["measured"]["speedup"] for name, way in figures["ways"].items() if name != "auto"}
    assert tuning.name_of(drafting) == max(speeds, key=speeds.get)


def test_given_costs_decide_what_is_chosen(run, folder):
    """Where a second node costs as much as ten passes, nothing is drafted."""
    costs = {"plain_ms": 20, "ratios": {"1": 1, "2": 10, "4": 20}, "absorb_ms": 2, "step_ms": 1}
    (folder / "costs.json").write_text(json.dumps(costs))
    run("chains=", "trees=", f"costs={folder}/costs.json")
    figures = json.loads((folder / "tune.json").read_text())
    assert figures["costs"]["pass_ms"]["1"] == pytest.approx({"1": 20, "2": 200, "4": 400})
    assert figures["choices"]["by_nodes"] == {"1": figures["choices"]["rounds"]} and figures["drafting"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chains=1,two"], "chains=1,two cannot be read: give a comma list of DEPTH, such as 1,2,3"),
        (["trees=4x4"], "DEPTHxWIDTHxNODES"),
        (["chains=0"], "at least 1"),
        (["trees=3x2x2"], "cannot hold a path"),
        (["batch=0"], "batch=0 must be a whole number from 1 to 65536"),
        (["picture_prompt=3"], "picture_prompt=3 must be between 1 and 2"),
        (["costs=nowhere.json"], "costs=nowhere.json must be a JSON file"),
        (["max_new_tokens=1"], "raise max_new_tokens"),
    ],
)
def test_wrong_arguments_are_refused(refuse, arguments, message):
    refuse(message, *arguments)
