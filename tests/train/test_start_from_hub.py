"""Tests of start= of train.py: user/name on a stand-in of the Hub (tests/support/hub.py), and a head in another
layout.
"""

import json
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from specdec import checkpoint
from specdec.core.hub import fetch_checkpoint, push_files
from specdec.export.engines import make_form
from specdec.measuring.model_card import write_export
from specdec.target.model import Target
from tests.support.exports import make_provenance
from tests.support.runs import fit_interrupted

pytestmark = pytest.mark.full

NAME = "user/head"
CARD = b"---\nlicense: mit\ntags: []\n---\n"


def share(run: str) -> str:
    """Pushes the best step of a run. -> the commit"""
    folder = checkpoint.resolve(f"checkpoints/{run}")
    contents = {name: folder / name for name in ("drafter.json", "drafter.safetensors", "report.json")}
    commit = push_files(NAME, {**contents, "README.md": CARD}, message="Add a head").oid
    fetch_checkpoint.cache_clear()
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

    def fit_with_a_push_between(name: str, *options: str) -> int:
        if "resume=true" in options:
            newer = share("second")
            with pytest.raises(ValueError, match=rf"start was {NAME}@{commit}, is {NAME}@{newer}"):
                fit(name, f"start={NAME}@{newer}", "resume=true")
        return fit(name, *options)

    fit_interrupted(fit_with_a_push_between, "further", f"start={NAME}")
    assert record("further") == (f"{NAME}@{commit}", {"given": NAME, "used": f"{NAME}@{commit}"})
    assert vocabulary("further") == vocabulary("first") != vocabulary("second")


def test_a_run_starts_from_a_published_head_and_its_head_is_given_back(fit, folder):
    """Its folder is only read; the record of its layout goes from run to run."""
    short = ("train.steps=2", "train.validate_every=2")
    fit("first", "head=eagle3", *short)
    target = Target.load(str(folder / "target"), dtype="float32")
    head = checkpoint.load("checkpoints/first", target)
    write_export(make_form(head, "vllm"), Path("theirs"), dtype=torch.float32, provenance=make_provenance(head))
    before = sorted(path.name for path in Path("theirs").iterdir())
    for run, start in (("second", "theirs"), ("third", "checkpoints/second")):
        fit(run, "head=eagle3", f"start={start}", *short)
        trained = checkpoint.load(f"checkpoints/{run}", target, exact=True)
        layout = make_form(trained, "published").layout
        assert layout.config == json.loads(Path("theirs/config.json").read_text())
        tensors = checkpoint.read_tensors(Path("theirs/model.safetensors"))
        assert {key: (v.dtype, v.shape) for key, v in layout.tensors.items()} == {
            key: (v.dtype, v.shape) for key, v in tensors.items()
        }
        assert any(not torch.equal(value, tensors[key]) for key, value in layout.tensors.items())
    assert sorted(path.name for path in Path("theirs").iterdir()) == before


def test_a_start_that_nobody_has_is_refused_before_anything_is_loaded(fit, hub):
    with pytest.raises(ValueError, match="neither a folder user/none nor a head of that name"):
        fit("further", "head=eagle", "start=user/none", "target.name=nothing/there")
