"""Tests of scripts/export.py: printed text, written files, and heads that are read again from them."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts import export as export_script
from specdec import checkpoint
from specdec.measuring import model_card
from specdec.target.model import Target
from tests.exports import REPORT, SERVED, bring_in, make_medusa2
from tests.loops import follow
from tests.support import load_head, make_drafter, random_tokens, save_eagle, save_target

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a target and an EAGLE-1 head; by the report of the head, drafting takes almost no time."""
    home = tmp_path_factory.mktemp("export")
    report = {**REPORT, "ms_per_round": {"draft": 0.1, "verify": 20.0, "keep": 0.0, "other": 0.0}}
    extra = {"report.json": report, model_card.SERVED_FILE: SERVED}
    save_eagle(home / "run" / "step_000001", save_target(home / "target"), extra=extra)
    (home / "run" / "about.json").write_text('{"data": {"train": "some/answers.jsonl"}}')
    return home


def test_export_prints_how_to_serve_and_an_export_is_a_checkpoint(run, home, tmp_path):
    export_arguments = [f"checkpoint={home}/run/step_000001", "target.dtype=float32", "format=vllm"]
    printed = run(export_script, *export_arguments, f"out={tmp_path}/out", "license=mit")
    settings = {"method": "eagle", "model": f"{tmp_path}/out", "num_speculative_tokens": 3}
    assert "vLLM, 3 drafts a round" in printed and f"as a configuration: {json.dumps(settings)}" in printed
    card = (tmp_path / "out" / "README.md").read_text()
    assert "license: mit" in card and "answers.jsonl" in card and "1.900 (-5.0 %)" in card
    printed = run(export_script, *export_arguments, f"out={tmp_path}/fewer", "num_drafts=1", "data=mine")
    assert '"num_speculative_tokens": 1' in printed
    assert "| trained on | mine |" in (tmp_path / "fewer/README.md").read_text()

    target = Target.load(f"{home}/target", dtype="float32")
    imported, original = (checkpoint.load(path, target) for path in (tmp_path / "out", home / "run" / "step_000001"))
    assert same(imported, original)
    assert imported.state_dict().keys() == original.state_dict().keys()
    again = [f"checkpoint={tmp_path}/out", "format=published", f"out={tmp_path}/back"]
    with pytest.raises(ValueError, match=r"out does not say which target it was trained for: give target.name="):
        run(export_script, *again)
    run(export_script, *again, f"target.name={home}/target")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()


def test_a_container_of_speculators_is_flattened_for_sglang_in_one_step(run, refuse, home, tmp_path):
    """Its target's name is that of its verifier, if it can be found."""
    target = Target.load(f"{home}/target", dtype="float32")
    drafter = make_drafter(target, "eagle3", True, {"target_layers": [1, 2]}).float()
    spec = load_head("eagle3")["drafter"] | {"target_layers": [1, 2]}
    checkpoint.save(tmp_path / "run" / "step_000001", drafter, spec)
    arguments = [f"target.name={home}/target", "target.dtype=float32"]
    run(
        export_script,
        f"checkpoint={tmp_path}/run/step_000001",
        *arguments,
        "format=speculators",
        f"out={tmp_path}/theirs",
    )
    before = {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()}
    printed = run(
        export_script, f"checkpoint={tmp_path}/theirs", "target.dtype=float32", "format=sglang", f"out={tmp_path}/flat"
    )
    assert f"--speculative-draft-model-path {tmp_path}/flat" in printed and f"--model {home}/target" in printed
    config = json.loads((tmp_path / "flat" / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and "speculators_config" not in config
    assert same(checkpoint.load(tmp_path / "flat", target, exact=True), drafter)
    assert {path.name: path.read_bytes() for path in (tmp_path / "theirs").iterdir()} == before
    refuse(
        "is a published head in its own layout",
        export_script,
        f"checkpoint={tmp_path}/theirs",
        "push=user/name",
        "dry_run=true",
    )


def same(head, expected) -> bool:
    return all(torch.equal(value, expected.state_dict()[name]) for name, value in head.state_dict().items())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["format=onnx"], "no format 'onnx'; there are: eagle, gguf, medusa, published, safetensors, sglang"),
        (["num_drafts=0"], "num_drafts=0 must be a whole number from 1 to 1024"),
        (["merged_target=x"], "merged_target=x: this drafter does not adapt its target"),
        (["format=gguf"], "Formats that take it: eagle, sglang, vllm"),
    ],
)
def test_refused_exports_write_nothing(refuse, home, tmp_path, given, message):
    refuse(
        message,
        export_script,
        f"checkpoint={home}/run/step_000001",
        "target.dtype=float32",
        f"out={tmp_path}/out",
        *given,
    )
    assert list(tmp_path.iterdir()) == []


def test_medusa2_is_exported_with_its_merged_target(run, home, tmp_path):
    """The merged folder is an ordinary model with the adapted target's logits, and the heads draft the same on it."""
    target = Target.load(f"{home}/target", dtype="float32")
    checkpoint.save(tmp_path / "head", make_medusa2(target).frozen_copy(), load_head("medusa2")["drafter"])
    arguments = [f"checkpoint={tmp_path}/head", "target.dtype=float32", f"out={tmp_path}/out", "format=vllm"]
    with pytest.raises(ValueError, match="merged_target=DIR"):
        run(export_script, *arguments)
    printed = run(export_script, *arguments, f"merged_target={tmp_path}/merged")
    assert f"vllm serve {tmp_path}/merged" in printed

    adapted = Target.load(f"{home}/target", dtype="float32")
    original = adapted.model(torch.tensor([[5, 6, 7]])).logits
    drafter = checkpoint.load(tmp_path / "head", adapted)
    tokens = torch.tensor(random_tokens(2, 12, target.vocab_size))
    with torch.no_grad():
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        torch.testing.assert_close(plain(tokens[None]).logits, adapted.model(tokens[None]).logits, atol=1e-5, rtol=1e-5)
        assert (plain(torch.tensor([[5, 6, 7]])).logits - original).abs().max() > 0.01
    merged = Target.load(f"{tmp_path}/merged", dtype="float32")
    heads = bring_in(tmp_path / "out", merged)
    for drafts in zip(*(follow(d, tokens, d.target.read(tokens[None], d.target_layers).features[0], 8, 4)[1]
                        for d in (drafter, heads))):  # fmt: skip
        torch.testing.assert_close(*drafts, atol=1e-5, rtol=1e-5)
