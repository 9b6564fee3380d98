"""Tests of scripts/export.py with push=, and of other scripts with heads on the Hub, against a stand-in (tests/hub.py)."""

import json
import shutil

import pytest
import yaml

from scripts import evaluate, export, generate
from specdec import checkpoint
from specdec.core import files
from specdec.core import hub as names
from specdec.measuring import model_card
from specdec.target.model import Target
from tests.exports import REPORT, SERVED
from tests.support import save_eagle, save_target, write_prompts

pytestmark = pytest.mark.full

NAME, BASE = "user/head", "org/Base-1"
TRAINING = {"parameters": 2_500_000, "tokens": 5_700_000, "seconds": 90.0, "processes": 1, "unique_tokens": 1_200_000}
ABOUT = {
    "command": "accelerate launch train.py head=eagle start=user/older",
    "target": {"name": "t", "dtype": "float32"},
    "data": {"train": "rows.jsonl", "conversations": 1234},
    "environment": {"python": "3.11.7", "machine": "x86_64", "threads": 2, "processes": 1},
    "start": {"given": "user/older", "used": "user/older@abc"},
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A target, and the run of an EAGLE-1 head with everything that a run leaves."""
    home = tmp_path_factory.mktemp("push")
    report = {**REPORT, "training": TRAINING}
    extra = {"report.json": report, model_card.SERVED_FILE: SERVED}
    save_eagle(home / "run" / "step_000002", save_target(home / "target"), extra=extra)
    (home / "run" / "best").write_text("step_000002\n")
    (home / "run" / "about.json").write_text(json.dumps(ABOUT))
    (home / "run" / "step_000002" / "report.html").write_text("<p>page</p>")
    write_prompts(home / "prompts.jsonl", 2)
    return home


@pytest.fixture
def arguments(home) -> list[str]:
    return [f"checkpoint={home}/run", f"push={NAME}", f"target.name={home}/target", "target.dtype=float32"]


def dry_run(run, arguments: list[str], path, *further: str) -> tuple[str, str]:
    """-> what was printed, and the card"""
    return run(export, *arguments, "dry_run=true", f"out={path}", *further), (path / "README.md").read_text()


def test_the_card_states_what_is_known(run, hub, arguments, home, tmp_path):
    printed, card = dry_run(run, arguments, tmp_path / "card", f"base_model={BASE}", "license=mit")
    assert hub.requests == [] and "nothing was uploaded" in printed and "others do not have" not in printed
    for name in (
        "README.md",
        "SHA256SUMS",
        "drafter.safetensors",
        *"about.json drafter.json report.html served.json".split(),
    ):
        assert f"\n{name} " in f"\n{printed}"
    metadata = yaml.safe_load(card.split("---")[1])
    tags = ["speculative-decoding", "eagle"]
    assert metadata == {"license": "mit", "base_model": BASE, "library_name": "specdec", "tags": tags}
    for text in (
        "| trained on | rows.jsonl |", "| conversations | 1,234 |", "| tokens read in training | 5.70 M, of 1.20 M different ones |",
        "| minutes of training | 1.5 |", "| machine | x86_64, 2 threads, 1 processes |", "| started from | user/older@abc |",
        "| trained parameters | 2.50 M |", f"| command | `{ABOUT['command']}` |", "python 3.11.7",
        "8 prompts, temperature 0, chain of 3 | 1.50 (1.25 .. 1.75) |", "| vLLM 0.32.0 | the same | 1.900 (-5.0 %) |",
        "0.88 (0.80 .. 0.96) with a chain of 3. 8 prompts, one stream, temperature 0, float32, x86_64, 2 threads.",
        "lossless: all 8 answers equal plain decoding", f'Speculative("{NAME}")', f"start={NAME}",
        f"python scripts/export.py checkpoint={NAME} format=vllm out=exported", f"vllm serve {BASE} --speculative-config",
        f"python -m sglang.launch_server --model {BASE} --speculative-algorithm EAGLE",
    ):  # fmt: skip
        assert text in card, text
    assert str(home) not in card and "not recorded" not in card


def test_the_card_says_what_is_missing(run, hub, home, tmp_path):
    """Of a checkpoint that has no report and no run, for a target that is a folder."""
    shutil.copytree(home / "run" / "step_000002", tmp_path / "bare")
    for name in ("report.json", "report.html", model_card.SERVED_FILE, files.CHECKSUMS):
        (tmp_path / "bare" / name).unlink()
    given = [f"checkpoint={tmp_path}/bare", f"push={NAME}", "target.dtype=float32"]
    printed, card = dry_run(run, given, tmp_path / "card")
    assert "which others do not have: give base_model=" in printed
    assert "base_model" not in yaml.safe_load(card.split("---")[1])
    for row in ("trained on", "conversations", "tokens read in training", "minutes of training", "machine", "command"):
        assert f"| {row} | not recorded |" in card
    assert "Not measured." in card and "Speedup" not in card


def test_a_pushed_head_works_by_name_in_every_script(run, hub, arguments, home, tmp_path, monkeypatch):
    printed = run(export, *arguments, f"base_model={BASE}")
    repository = hub.repositories[NAME]
    commit = repository.refs["main"]
    assert f"pushed: {hub.url}/{NAME}/commit/{commit}" in printed and f"checkpoint={NAME}@{commit}" in printed
    assert len(repository.commits) == 2
    repository.refs["v1"] = commit
    document = json.loads(repository.commits[commit]["drafter.json"])
    assert document["target"] == BASE

    monkeypatch.chdir(tmp_path)
    folder = checkpoint.resolve(NAME)
    target = Target.load(f"{home}/target", dtype="float32")
    checkpoint.load(NAME, target)  # its checksums are those of the changed drafter.json
    common = [f"target.name={home}/target", "target.dtype=float32", "max_new_tokens=4"]
    prompts = [f"prompts={home}/prompts.jsonl", "limit=2"]
    run(generate, f"checkpoint={NAME}", "prompt=Count.", *common)
    printed = run(evaluate, f"checkpoint={NAME}@v1", *common, *prompts, "out=single")
    recorded = json.loads((tmp_path / "single" / "results.json").read_text())["settings"]["checkpoint"]
    assert [each.split()[0] for each in recorded.values()] == [f"{NAME}@{commit}"]
    printed = run(evaluate, f"checkpoint={home}/run,{NAME}", *common, *prompts, "chains=2", "out=compared")
    assert all(f"{name}, chain of 2" in printed for name in ("run", NAME))
    printed = run(export, f"checkpoint={NAME}", *common[:2], "format=vllm", "out=exported")
    card = (tmp_path / "exported" / "README.md").read_text()
    assert f"| checkpoint | {NAME}@{commit} |" in card and "| trained on | rows.jsonl |" in card
    printed, card = dry_run(run, [f"checkpoint={NAME}", "push=user/second", *common[:2]], tmp_path / "card")
    assert f"| command | `{ABOUT['command']}` |" in card  # it is pushed again with the record of its run
    assert names.pin_commit(folder) == f"{NAME}@{commit}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["push=head"], "push=head must be a name on the Hugging Face Hub, such as user/name"),
        (["push=checkpoints/head"], "push=checkpoints/head must be a name"),
        (["push=user/head@v1"], "push=user/head@v1 must be a name"),
        (["base_model=/models/base"], "base_model=/models/base must be a name"),
        (["format=vllm"], "push= shares the checkpoint as it is: leave format= and merged_target= out"),
        (["push=null", "dry_run=true"], "are of push=user/name"),
    ],
)
def test_names_that_are_refused(refuse, hub, arguments, given, message):
    refuse(message, export, *arguments, *given)
    assert hub.requests == []


def test_a_damaged_checkpoint_is_not_pushed(refuse, hub, home, tmp_path):
    shutil.copytree(home / "run" / "step_000002", tmp_path / "bad")
    report = tmp_path / "bad" / "report.json"
    report.write_text(report.read_text().replace("1.25", "1.35"))
    refuse("report.json is damaged", export, f"checkpoint={tmp_path}/bad", f"push={NAME}", f"target.name={home}/target")
    assert hub.requests == []
