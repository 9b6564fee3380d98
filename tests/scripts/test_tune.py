"""Tests of scripts/tune.py on a tiny checkpoint."""

import json

import pytest
import torch

from helpers import decoding
from scripts import tune
from specdec import checkpoint, speed, tuning
from specdec.drafting import Drafting
from specdec.heads.medusa import Medusa
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
                 "max_new_tokens=6", f"out={folder}/tuned.yaml", *arguments]  # fmt: skip
        return run_script(tune, *defaults)

    return run


@pytest.mark.parametrize("temperature", [0, 1])
def test_decoding_reads_the_file_that_tune_writes(run, folder, temperature):
    printed = run("chains=1,2,4", "trees=2x2x4", f"out_json={folder}/tuned.json", f"decode.temperature={temperature}")
    assert "left out: chain of 4; this drafter takes 3 steps" in printed and "tokens a round" in printed
    figures = json.loads((folder / "tuned.json").read_text())
    assert {"chain of 1", "chain of 2", "tree of 2x2x4"} <= set(figures["settings"])
    for setting in figures["settings"].values():
        predicted = speed.predict(setting["tau"], setting["stages"], setting["plain"])
        assert setting["predicted"] == pytest.approx(predicted)
        if temperature == 0:
            assert setting["tau"] == pytest.approx(setting["measured"]["tau"])
    text = (folder / "tuned.yaml").read_text()
    assert text.startswith(f"# {folder}/head on {folder}/target, float32, ") and f"temperature {temperature}" in text
    drafting = decoding.read_drafting(f"{folder}/tuned.yaml", compile=False)
    assert drafting == Drafting(**figures["settings"][figures["chosen"]]["drafting"])
    assert tuning.name_of(drafting) == figures["chosen"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["chains=1,two"], "chains=1,two cannot be read: give a comma list of DEPTH, such as 1,2,3"),
        (["trees=4x4"], "DEPTHxWIDTHxNODES"),
        (["chains=", "trees="], "nothing to try"),
        (["chains=9", "trees="], "nothing to try"),
        (["chains=0"], "at least 1"),
        (["trees=3x2x2"], "cannot hold a path"),
        (["max_new_tokens=1"], "raise max_new_tokens"),
    ],
)
def test_wrong_arguments_are_refused(refuse, arguments, message):
    refuse(message, *arguments)
