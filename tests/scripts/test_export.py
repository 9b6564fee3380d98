"""Tests of scripts/export.py: exported folders, read again, and checkpoints on a stand-in of the Hub
(tests/support/hub.py).
"""

import json
import shutil

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from scripts import evaluate, export, generate
from specdec import checkpoint
from specdec.core import files
from specdec.core import hub as hub_module
from specdec.target.model import Target
from tests.support.commands import write_prompts
from tests.support.decoding import random_tokens
from tests.support.drafters import load_head, make_drafter, save_eagle
from tests.support.exports import REPORT, bring_in, make_medusa2
from tests.support.loops import follow
from tests.support.records import make_document
from tests.support.targets import save_target

pytestmark = pytest.mark.full

NAME, BASE, RECORD = "user/head", "org/Base-1", "record-vllm.json"
SERVED = (
    "| vLLM 0.32.0 | 14 questions of GSM8K, temperature 0, 2 drafts, 1 at once; served = replayed, same template, "
    "repeat 8/8, not checked: control | 1.75 (1.60 .. 1.90); 1.50 (1.40 .. 1.60) times plain |"
)
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
    """A target, and the run of an EAGLE-1 head with all its files; by its report drafts cost almost nothing."""
    home = tmp_path_factory.mktemp("export")
    stages = {"draft": 0.1, "verify": 20.0, "keep": 0.0, "other": 0.0}
    samples = [{"prompt": "a secret", "pieces": [["x", 0]]}]
    report = {**REPORT, "training": TRAINING, "ms_per_round": stages, "samples": samples}
    step = home / "run" / "step_000002"
    save_eagle(
        step, save_target(home / "target"), extra={"report.json": report, RECORD: make_document(drafter__digest=None)}
    )
    (home / "run" / "best").write_text("step_000002\n")
    (home / "run" / "about.json").write_text(json.dumps(ABOUT))
    (step / "report.html").write_text("<p>page</p>")
    write_prompts(home / "prompts.jsonl", 2)
    return home


@pytest.fixture
def target(home) -> Target:
    return Target.load(f"{home}/target", dtype="float32")


@pytest.fixture
def run(run_script):
    """run("key=value", ...) -> what the export printed"""
    return lambda *arguments: run_script(export, "target.dtype=float32", *arguments)


def is_same(head, expected) -> bool:
    return all(torch.equal(value, expected.state_dict()[name]) for name, value in head.state_dict().items())


# Folders for engines


def test_export_prints_how_to_serve_and_an_export_is_a_checkpoint(run, refuse, home, target, tmp_path):
    arguments = [f"checkpoint={home}/run/step_000002", "format=vllm"]
    printed = run(*arguments, f"out={tmp_path}/out", "license=mit")
    settings = {"method": "eagle", "model": f"{tmp_path}/out", "num_speculative_tokens": 3}
    assert "vLLM, 3 drafts a round" in printed and f"as a configuration: {json.dumps(settings)}" in printed
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in card and "| trained on | rows.jsonl |" in card and SERVED in card
    printed = run(*arguments, f"out={tmp_path}/fewer", "num_drafts=1", "data=mine")
    assert '"num_speculative_tokens": 1' in printed
    assert "| trained on | mine |" in (tmp_path / "fewer/README.md").read_text()

    imported, original = (checkpoint.load(path, target) for path in (tmp_path / "out", home / "run" / "step_000002"))
    assert is_same(imported, original) and imported.state_dict().keys() == original.state_dict().keys()
    again = [f"checkpoint={tmp_path}/out", "format=published", f"out={tmp_path}/back"]
    refuse(r"out does not say which target it was trained for: give target.name=", *again)
    run(*again, f"target.name={home}/target")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_a_container_of_speculators_is_flattened_for_sglang_in_one_step(run, refuse, home, target, tmp_path):
    """Its target's name is that of its verifier, if it can be found."""
    drafter = make_drafter(target, "eagle3", True, {"target_layers": [1, 2]}).float()
    spec = load_head("eagle3")["drafter"] | {"target_layers": [1, 2]}
    checkpoint.save(tmp_path / "run" / "step_000001", drafter, spec)
    own, theirs = f"checkpoint={tmp_path}/run/step_000001", f"checkpoint={tmp_path}/theirs"
    run(own, f"target.name={home}/target", "format=speculators", f"out={tmp_path}/theirs")
    before = {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    printed = run(theirs, "format=sglang", f"out={tmp_path}/flat")
    assert f"--speculative-draft-model-path {tmp_path}/flat" in printed and f"--model {home}/target" in printed
    config = json.loads((tmp_path / "flat" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and "speculators_config" not in config
    assert is_same(checkpoint.load(tmp_path / "flat", target, exact=True), drafter)
    assert {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()} == before
    refuse("is a published head in its own layout", theirs, "push=user/name", "dry_run=true")


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("merged_target=x", "merged_target=x: this drafter does not adapt its target"),
        ("format=gguf", "Formats that take it: eagle, sglang, vllm"),
    ],
)
def test_refused_exports_write_nothing(refuse, home, tmp_path, argument, sentence):
    refuse(sentence, f"checkpoint={home}/run", f"out={tmp_path}/out", argument)
    assert list(tmp_path.iterdir()) == []


def test_medusa2_is_exported_with_its_merged_target(run, refuse, home, target, tmp_path):
    """The merged folder is an ordinary model with the adapted target's logits, and the heads draft the same on it."""
    checkpoint.save(tmp_path / "head", make_medusa2(target).frozen_copy(), load_head("medusa2")["drafter"])
    arguments = [f"checkpoint={tmp_path}/head", f"out={tmp_path}/out", "format=vllm"]
    refuse("merged_target=DIR", *arguments)
    assert f"vllm serve {tmp_path}/merged" in run(*arguments, f"merged_target={tmp_path}/merged")

    adapted = Target.load(f"{home}/target", dtype="float32")
    original = adapted.model(torch.tensor([[5, 6, 7]])).logits
    drafter = checkpoint.load(tmp_path / "head", adapted)
    tokens = torch.tensor(random_tokens(2, 12, target.vocab_size))
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(plain(tokens[None]).logits, adapted.model(tokens[None]).logits, atol=1e-5, rtol=1e-5)
        assert (plain(torch.tensor([[5, 6, 7]])).logits - original).abs().max() > 0.01
    heads = [drafter, bring_in(tmp_path / "out", Target.load(f"{tmp_path}/merged", dtype="float32"))]
    features = [head.target.read(tokens[None], head.target_layers).features[0] for head in heads]
    drafts = [follow(head, tokens, of_head, 8, 4)[1] for head, of_head in zip(heads, features)]
    for pair in zip(*drafts):
        torch.testing.assert_close(*pair, atol=1e-5, rtol=1e-5)


# Repositories of the Hub


@pytest.fixture
def arguments(home) -> list[str]:
    return [f"checkpoint={home}/run", f"push={NAME}", f"target.name={home}/target"]


def write_card(run, path, *arguments: str) -> tuple[str, str]:
    """What a dry run printed, and its card."""
    return run(*arguments, "dry_run=true", f"out={path}"), (path / "README.md").read_text()


def test_the_card_states_what_is_known(run, hub, arguments, home, tmp_path):
    printed, card = write_card(run, tmp_path / "card", *arguments, f"base_model={BASE}", "license=mit")
    assert hub.requests == [] and "nothing was uploaded" in printed and "others do not have" not in printed
    names = "README.md SHA256SUMS drafter.safetensors about.json drafter.json report.json record-vllm.json"
    assert all(f"\n{name} " in f"\n{printed}" for name in names.split()) and "report.html" not in printed
    metadata = yaml.safe_load(card.split("---")[1])
    tags = ["speculative-decoding", "eagle"]
    assert metadata == {"license": "mit", "base_model": BASE, "library_name": "specdec", "tags": tags}
    for text in (
        "| trained on | rows.jsonl |",
        "| conversations | 1,234 |",
        "| tokens read in training | 5.70 M, of 1.20 M different ones |",
        "| minutes of training | 1.5 |",
        "| machine | x86_64, 2 threads, 1 process |",
        "| started from | user/older@abc |",
        "| trained parameters | 2.50 M |",
        f"| command | `{ABOUT['command']}` |",
        "python 3.11.7",
        "8 prompts, temperature 0, chain of 3 | 1.50 (1.25 .. 1.75) |",
        SERVED,
        "0.88 (0.80 .. 0.96) with a chain of 3. 8 prompts, one stream, temperature 0, float32, x86_64, 2 threads.",
        "lossless: all 8 answers equal plain decoding",
        f'Speculative("{NAME}")',
        f"start={NAME}",
        f"specdec export checkpoint={NAME} format=vllm out=exported",
        f"vllm serve {BASE} --speculative-config",
        f"python -m sglang.launch_server --model {BASE} --speculative-algorithm EAGLE",
    ):
        assert text in card, text
    assert str(home) not in card and "not recorded" not in card


def test_the_card_says_what_is_missing(run, hub, home, tmp_path):
    """Of a checkpoint that has no report and no run, for a target that is a folder."""
    shutil.copytree(home / "run" / "step_000002", tmp_path / "bare")
    for name in ("report.json", "report.html", RECORD, files.CHECKSUMS):
        (tmp_path / "bare" / name).unlink()
    printed, card = write_card(run, tmp_path / "card", f"checkpoint={tmp_path}/bare", f"push={NAME}")
    assert "which others do not have: give base_model=" in printed
    assert "base_model" not in yaml.safe_load(card.split("---")[1])
    for row in ("trained on", "conversations", "tokens read in training", "minutes of training", "machine", "command"):
        assert f"| {row} | not recorded |" in card
    assert "Not measured." in card and "Speedup" not in card


def test_a_pushed_head_works_by_name_in_every_script(
    run, run_script, hub, arguments, home, target, tmp_path, monkeypatch
):
    printed = run(*arguments, f"base_model={BASE}")
    repository = hub.repositories[NAME]
    commit = repository.refs["main"]
    assert f"pushed: {hub.url}/{NAME}/commit/{commit}" in printed and f"checkpoint={NAME}@{commit}" in printed
    assert len(repository.commits) == 2
    repository.refs["v1"] = commit
    assert json.loads(repository.commits[commit]["drafter.json"])["target"] == BASE
    assert not any(b"a secret" in content or b"<p>page" in content for content in repository.commits[commit].values())

    monkeypatch.chdir(tmp_path)
    checkpoint.load(NAME, target)  # its checksums are those of the changed drafter.json
    name_of_target = f"target.name={home}/target"
    common = [name_of_target, "target.dtype=float32", "max_new_tokens=4"]
    prompts = [f"prompts={home}/prompts.jsonl", "limit=2"]
    run_script(generate, f"checkpoint={NAME}", "prompt=Count.", *common)
    run_script(evaluate, f"checkpoint={NAME}@v1", *common, *prompts, "out=single")
    recorded = json.loads((tmp_path / "single" / "results.json").read_text())["settings"]["checkpoint"]
    assert [text.split()[0] for text in recorded.values()] == [f"{NAME}@{commit}"]
    printed = run_script(evaluate, f"checkpoint={home}/run,{NAME}", *common, *prompts, "chains=2", "out=compared")
    assert all(f"{name}, chain of 2" in printed for name in ("run", NAME))
    run(f"checkpoint={NAME}", name_of_target, "format=vllm", "out=exported")
    card = (tmp_path / "exported" / "README.md").read_text()
    assert f"| checkpoint | {NAME}@{commit} |" in card and "| trained on | rows.jsonl |" in card
    printed, card = write_card(run, tmp_path / "card", f"checkpoint={NAME}", "push=user/second", name_of_target)
    assert f"| command | `{ABOUT['command']}` |" in card  # it is pushed again with the record of its run
    assert hub_module.pin_commit(checkpoint.resolve(NAME)) == f"{NAME}@{commit}"


def test_a_damaged_checkpoint_is_not_pushed(refuse, hub, home, tmp_path):
    shutil.copytree(home / "run" / "step_000002", tmp_path / "bad")
    report = tmp_path / "bad" / "report.json"
    report.write_text(report.read_text().replace("1.25", "1.35"))
    refuse("report.json is damaged", f"checkpoint={tmp_path}/bad", f"push={NAME}", f"target.name={home}/target")
    assert hub.requests == []


def test_help_lists_every_option_with_its_default(run, capsys):
    with pytest.raises(SystemExit) as end:
        run("--help")
    printed = capsys.readouterr().out
    assert end.value.code == 0 and printed.startswith("Exports a drafter for an engine")
    lines = {line.split()[0]: line for line in printed.splitlines() if line.startswith("  ")}
    assert lines["license"].endswith("for the model card (default: other)")
    assert lines["checkpoint"].endswith("(required)")
    assert lines["target.dtype"].endswith("; default: bfloat16)")  # this command replaces the general default
