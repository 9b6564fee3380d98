"""Runs of four processes in groups that divide target or texts: losses and weights are those of one process."""

from pathlib import Path

import pytest

from specdec import checkpoint
from tests.support.commands import write_rows
from tests.support.processes import fit_float64, fit_together
from tests.support.runs import losses_of, train_overrides
from tests.train.test_two_processes import SETTINGS, check_same

pytestmark = pytest.mark.full

SHORT = ("validation.num_prompts=2", "data.length=128", "features.mode=online")
RUNS = {  # by name: settings, and the packs of a step, which one process accumulates
    "parts": (["head=eagle3", "target.shard=2"], 4),
    "texts": (["head=eagle3", "train.context_parallel=2", "optimizer.name=muon"], 2),
    "modules": (["head=mtp", "head.drafter.num_modules=2", "head.objective.depth=2", "train.context_parallel=4"], 1),
    "both": (["head=eagle3", "target.shard=true", "train.context_parallel=2", "features.mode=cached"], 2),
}


@pytest.fixture(scope="module")
def cwd(folder, tmp_path_factory):
    """A folder with each run, by one process and by four."""
    cwd = tmp_path_factory.mktemp("runs")
    write_rows(cwd / "prompts.jsonl", [{"prompt": f"Count from {number}."} for number in range(3)])

    def run(name: str, kind: str, *options: str) -> dict:
        files = f"data.heldout={cwd}/prompts.jsonl", f"features.folder=features-{name}-{kind}"
        overrides = train_overrides(folder, f"{name}-{kind}", *SETTINGS, *SHORT, *files, *options)
        return {"run": f"{name}-{kind}", "overrides": overrides}

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(cwd)
        for name, (options, packs) in RUNS.items():
            plain = [option for option in options if "shard" not in option and "parallel" not in option]
            fit_float64(**run(name, "one", *plain, f"train.accumulation={packs}"))
        fit_together(cwd, [run(name, "four", *options) for name, (options, _) in RUNS.items()], 4)
    return cwd


@pytest.mark.parametrize("name", RUNS)
def test_four_processes_train_as_one(cwd, monkeypatch, name):
    monkeypatch.chdir(cwd)
    one, four = f"{name}-one", f"{name}-four"
    assert len(losses_of(one)) == 4 and losses_of(four) == pytest.approx(losses_of(one), rel=1e-10, abs=1e-10)
    folders = [Path("checkpoints", run, "state/step_000004") for run in (one, four)]
    check_same(*folders, "drafter.safetensors", "optimizer.safetensors")
    assert len({checkpoint.read_json(folder / "state.json")["packs"] for folder in folders}) == 1
