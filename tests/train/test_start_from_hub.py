"""Tests of start=user/name of train.py, against a stand-in of the Hub (tests/hub.py)."""

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from specdec import checkpoint
from specdec.core.hub import fetch, push
from tests.support import fit_interrupted

pytestmark = pytest.mark.full

NAME = "user/head"
CARD = b"---\nlicense: mit\ntags: []\n---\n"


def share(run: str) -> str:
    """Pushes the best step of a run. -> the commit"""
    folder = checkpoint.resolve(f"checkpoints/{run}")
    contents = {
        path.name: path
        for path in folder.iterdir()
        if path.name in ("drafter.json", "drafter.safetensors", "report.json")
    }
    commit = push(NAME, {**contents, "README.md": CARD}, message="Add a head").oid
    fetch.cache_clear()
    return commit


def record(run: str) -> tuple[str, dict]:
    """`start` in the run's config.yaml and about.json"""
    folder = Path("checkpoints", run)
    return OmegaConf.load(folder / "config.yaml").start, json.loads((folder / "about.json").read_text())["start"]


def vocabulary(run: str) -> int:
    """The size of the draft vocabulary of a run's head."""
    tensors = checkpoint.read_tensors(checkpoint.resolve(f"checkpoints/{run}") / "drafter.safetensors")
    return len(tensors["draft_to_target"])


def test_a_run_keeps_the_commit_that_it_started_from(fit, hub):
    """Also if the branch has moved on before the run is resumed; another commit is refused then."""
    short = ("train.steps=2", "train.validate_every=2")
    fit("first", *short)
    fit("second", *short, "head.vocab_size=100")
    commit = share("first")

    def fit_with_a_push_between(name: str, *more: str) -> int:
        if "resume=true" in more:
            newer = share("second")
            with pytest.raises(ValueError, match=rf"start was {NAME}@{commit}, is {NAME}@{newer}"):
                fit(name, f"start={NAME}@{newer}", "resume=true")
        return fit(name, *more)

    fit_interrupted(fit_with_a_push_between, "further", f"start={NAME}")
    assert record("further") == (f"{NAME}@{commit}", {"given": NAME, "used": f"{NAME}@{commit}"})
    assert vocabulary("further") == vocabulary("first") != vocabulary("second")


def test_a_start_that_nobody_has_is_refused_before_anything_is_loaded(fit, hub):
    with pytest.raises(ValueError, match="neither a folder user/none nor a head of that name"):
        fit("further", "head=eagle", "start=user/none", "target.name=nothing/there")
