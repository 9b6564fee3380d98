"""Exported folders: the fields of config.json, the model card, and the heads that a format refuses."""

import importlib
import json

import pytest
import torch

from specdec.export.cards import make_card
from specdec.export.folder import write_export
from specdec.measuring.report import Report
from tests import reference
from tests.exports import (
    ALL_NORMS,
    OTHER_BLOCK,
    REPORT,
    SERVED,
    export,
    make_exact,
    make_form,
    make_medusa2,
    make_provenance,
)
from tests.support import make_target

import_script = importlib.import_module("scripts.import")
OTHER_ROPE = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
}
EVERY = ("vllm", "sglang", "speculators", "eagle", "medusa", "gguf", "transformers")


def config_of(drafter, form: str) -> dict:
    return make_form(drafter, form).layout.config


# Refusals


@pytest.mark.parametrize(
    ("head", "reduced", "arguments", "form", "message"),
    [
        *((head, False, {}, "vllm", "vLLM cannot run .* It serves EAGLE-1, EAGLE-3")
          for head in ("hydra", "mtp_parallel")),
        *((head, False, {}, "sglang", "SGLang cannot run .* It serves EAGLE-1 and EAGLE-3")
          for head in ("hydra", "medusa", "mtp_parallel")),
        *((head, False, {}, "sglang", "take format=vllm or gguf, or train an EAGLE-3 head") for head in ("dflash", "dspark")),
        ("eagle3", False, {"norm_features": True, "norm_before_fc": True}, "speculators", "not both: take format=vllm"),
        ("eagle", False, {"block": OTHER_ROPE}, "eagle", "only the rotary embeddings default, linear, dynamic: take format=vllm"),
        *((head, False, {}, "gguf", "cannot run .* It serves EAGLE-3")
          for head in ("eagle", "mtp", "medusa", "hydra")),
        *((head, False, {}, "speculators", "Take format=vllm, or train an EAGLE-3 head")
          for head in ("eagle", "mtp", "medusa", "draft")),
        *((head, False, {}, "eagle", "for EAGLE-1 and EAGLE-3 heads, not for .* try format=vllm")
          for head in ("mtp", "medusa", "dflash")),
        ("eagle", False, {}, "medusa", "is for Medusa heads, not for Eagle: try format=vllm"),
        ("eagle3", False, {}, "transformers", "is for draft models, .* take format=vllm"),
        *((head, False, {"fuse": True}, form, "Train with fuse=false")
          for head in ("dflash", "dspark") for form in ("vllm", "gguf", "speculators")),
        ("dspark", False, {"markov_rank": None}, "vllm", "train with markov_rank=256"),
        *(("mtp", False, {"num_modules": 5}, form, "Train with num_modules=null") for form in ("vllm", "sglang")),
        ("mtp", False, {"intermediate_size": 20}, "vllm", "intermediate_size is 48 and not 20. Train with the target's"),
        *(("eagle3", False, {"target_layers": layers}, form, "Train with other target_layers")
          for layers in ([2, 5, 8], [0, 3, 5]) for form in ("vllm", "sglang", "gguf", "speculators")),
        ("dflash", False, {"target_layers": [2, 8]}, "vllm", "Train with other target_layers"),
        ("eagle", False, {"fc_bias": True}, "vllm", "take format=sglang or eagle"),
        *(("medusa", True, {"own_output": True}, form, "vocab_size=null or own_output=false")
          for form in ("vllm", "medusa")),
        ("medusa", False, {"num_blocks": 2}, "medusa", "num_blocks=1, or take format=vllm"),
        *(("eagle3", False, {switch: True}, "eagle", "which this head was trained with: take format=vllm")
          for switch in ALL_NORMS),
        *(("eagle3", False, {switch: True}, "gguf", "which this head was trained with: take format=vllm")
          for switch in ("norm_features", "norm_output")),
        ("eagle3", False, {"norm_before_residual": True}, "sglang", "take format=vllm"),
        ("eagle3", False, {"target_layers": [1, 4, 6]}, "eagle", "Train with target_layers=null"),
        ("eagle3", False, {"target_layers": [1, 2, 4, 6]}, "gguf", "exactly three hidden states"),
        *(("eagle3", False, {"num_layers": 2}, form, "has no EAGLE-3 of several layers: take format=vllm or speculators")
          for form in ("eagle", "sglang", "gguf")),
        *(("peagle", False, {}, form, "has no P-EAGLE: take format=vllm or speculators") for form in ("eagle", "sglang", "gguf")),
        ("peagle", False, {"norm_output": True}, "speculators", "take format=vllm"),
        ("dflash", False, {"window": 4}, "gguf", "has no sliding layers in drafters: take format=vllm or speculators"),
        ("dflash", False, {"window": 4, "full_layers": [1]}, "speculators", "vLLM takes all layers .* as causal"),
        ("dspark", False, {"window": 4}, "vllm", "A DSpark drafter in an engine has no sliding layers"),
        *(("eagle3", False, {"window": 4}, form, "has no sliding layers in drafters: take format=vllm or speculators")
          for form in ("eagle", "sglang", "gguf")),
    ],
)  # fmt: skip
def test_heads_that_an_engine_cannot_serve_are_refused(target, head, reduced, arguments, form, message):
    with pytest.raises(ValueError, match=message):
        make_form(make_exact(target, head, reduced, arguments), form)


@pytest.mark.parametrize("form", ["vllm", "medusa"])
def test_heads_of_an_adapted_target_need_the_merged_target(form):
    with pytest.raises(ValueError, match="merged_target=DIR"):
        make_form(make_medusa2(make_target(6)), form)


def test_an_existing_folder_is_never_overwritten(target, tmp_path):
    drafter = make_exact(target, "eagle")
    export(drafter, "vllm", tmp_path / "out")
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="exists; choose another out=DIR or delete it"):
        export(make_exact(target, "eagle3"), "vllm", tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before


# Fields of config.json


def test_eagle1_has_bias_false_and_a_zero_bias_tensor(target):
    for form, name in (
        ("vllm", "EagleLlamaForCausalLM"),
        ("sglang", "LlamaForCausalLMEagle"),
        ("eagle", "LlamaForCausalLM"),
    ):
        layout = make_form(make_exact(target, "eagle"), form).layout
        assert layout.config["bias"] is False and layout.config["architectures"] == [name]
        assert layout.tensors["fc.bias"].shape == (32,) and not layout.tensors["fc.bias"].any()
    assert config_of(make_exact(target, "eagle", False, {"fc_bias": True}), "eagle")["bias"] is True


@pytest.mark.parametrize("form", ["vllm", "sglang", "eagle", "gguf"])
@pytest.mark.parametrize("reduced", [False, True])
def test_eagle3_states_every_field_that_engines_would_guess(target, form, reduced):
    layout = make_form(make_exact(target, "eagle3", reduced), form).layout
    config = layout.config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["draft_vocab_size"] == (
        40 if reduced else 61
    )
    assert ("d2t" in layout.tensors) == ("t2d" in layout.tensors) == reduced
    assert not any("layer_ids" in key or key == "eagle_config" for key in config)  # the default layers need no field
    assert {config[name] for name in ("fc_norm", "norm_output", "norm_before_fc", "norm_before_residual")} == {False}
    assert any(name.startswith("midlayer.") for name in layout.tensors)
    for name in ("tie_word_embeddings", "attention_bias", "mlp_bias"):
        assert config[name] is False


def test_layer_ids_are_written_in_both_numberings(target):
    config = config_of(make_exact(target, "eagle3", False, {"target_layers": [1, 4, 6, 7]}), "vllm")
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6, 7] and config["num_aux_hidden_states"] == 4
    assert config["eagle_config"] == {"eagle_aux_hidden_state_layer_ids": [0, 3, 5, 6], "use_aux_hidden_state": True}


BLOCKS = [("eagle", "vllm"), ("eagle3", "vllm"), ("mtp", "vllm"), ("dflash", "vllm"), ("dspark", "vllm")]


@pytest.mark.parametrize(("head", "form"), BLOCKS)
def test_fields_of_every_head_with_a_block(target, tmp_path, head, form):
    export(make_exact(target, head), form, tmp_path / "out", dtype=torch.bfloat16)
    config, tensors = reference.read(tmp_path / "out")
    assert (
        config["rope_theta"] == config["rope_parameters"]["rope_theta"] == target.config.rope_parameters["rope_theta"]
    )
    assert "rope_scaling" in config and config["rope_scaling"] is None  # SafeAILab requires the field
    assert config["max_position_embeddings"] == 512 and config["torch_dtype"] == "bfloat16"
    assert config["vocab_size"] == 61 and config["head_dim"] == 8 and isinstance(config["pad_token_id"], int)
    assert config["tie_word_embeddings"] is False
    assert {value.dtype for value in tensors.values()} == {torch.bfloat16}
    with open(tmp_path / "out" / "model.safetensors", "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    assert header["__metadata__"] == {"format": "pt"}


def test_scaled_rotary_embeddings_have_both_spellings(target):
    config = config_of(make_exact(target, "eagle3", False, {"block": OTHER_BLOCK}), "vllm")
    assert config["rope_theta"] == 500.0 and config["rope_parameters"] == OTHER_BLOCK["rope_parameters"]
    assert config["rope_scaling"] == {"type": "linear", "rope_type": "linear", "factor": 4.0}


def test_medusa_states_its_biases_and_its_number_of_heads(target):
    for form, counts in (("vllm", {"num_heads": 4}), ("medusa", {"medusa_num_heads": 4, "medusa_num_layers": 1})):
        layout = make_form(make_exact(target, "medusa"), form).layout
        assert layout.config["medusa_fc_bias"] and layout.config["hidden_size"] == 32
        assert counts.items() <= layout.config.items() and sum(name.endswith("bias") for name in layout.tensors) == 4
        assert [key for key in layout.config if "num" in key and "heads" in key] == list(counts)[:1]


def test_mtp_has_biases_and_the_targets_sizes(target):
    form = make_form(make_exact(target, "mtp"), "vllm")
    layout, prefix = form.layout, "model.mtp_layers.0."
    for part in "qkv":
        assert not layout.tensors[f"{prefix}self_attn.{part}_proj.bias"].any()
    assert layout.config["architectures"] == ["MiMoForCausalLM"] and layout.config["model_type"] == "qwen2"
    assert layout.config["num_nextn_predict_layers"] == 1 and layout.config["num_hidden_layers"] == 8
    assert "--hf-overrides '{\"num_nextn_predict_layers\": 1}'" in form.engines["vLLM"]


@pytest.mark.parametrize("end", [7, [9, 7]])
def test_block_drafters_number_outputs_and_put_their_mask_at_an_end_token(end):
    target = make_target(61)
    target.config.eos_token_id = end
    mask = end if isinstance(end, int) else end[0]
    layers = {"target_layers": [1, 4, 6]}
    plain = make_form(make_exact(target, "dflash", True, layers), "vllm").layout
    assert plain.config["dflash_config"] == {"mask_token_id": mask, "target_layer_ids": [0, 3, 5]}
    assert plain.config["block_size"] == 5 and plain.config["layer_types"] == ["full_attention"] * 2
    assert plain.config["num_target_layers"] == 8 and plain.pickles["mask_embedding.pt"]["mask_token_id"] == mask
    contained = config_of(make_exact(target, "dflash", True, layers), "speculators")
    assert contained["aux_hidden_state_layer_ids"] == [1, 4, 6] and contained["mask_token_id"] == mask
    drafter = make_exact(target, "dspark", True, layers)
    layout = make_form(drafter, "vllm").layout
    assert layout.config["target_layer_ids"] == [0, 3, 5] and layout.config["mask_token_id"] == mask
    moved = (layout.tensors["embed_tokens.weight"] != target.embed.weight).any(dim=1)
    assert moved.nonzero().flatten().tolist() == [mask] and layout.config["block_size"] == 4
    assert torch.equal(layout.tensors["embed_tokens.weight"][mask], drafter.mask_embedding)


def test_speculators_configs_state_the_fields_that_their_readers_guess_differently(target):
    config = config_of(make_exact(target, "eagle3", True), "speculators")
    assert config["norm_before_residual"] is False and config["draft_vocab_size"] == 40
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["architectures"] == ["Eagle3Speculator"] and config["speculators_model_type"] == "eagle3"
    layer = config["transformer_layer_config"]
    assert layer["model_type"] == "llama" and layer["rope_parameters"]["rope_theta"] == 10_000.0
    assert layer["max_position_embeddings"] == 512 and layer["vocab_size"] == 61
    speculators = config["speculators_config"]
    assert speculators["algorithm"] == "eagle3" and speculators["verifier"]["name_or_path"] == "tiny"
    assert [method["proposal_type"] for method in speculators["proposal_methods"]] == [
        speculators["default_proposal_method"]
    ]


# The card


@pytest.mark.parametrize("form", EVERY[:4])
def test_the_card_states_provenance_figures_and_commands(target, tmp_path, form):
    drafter = make_exact(target, "eagle3", True)
    engine_form = make_form(drafter, form)
    provenance = make_provenance(
        drafter,
        report=Report.from_json(REPORT),
        served=SERVED,
        data="answers.jsonl",
        license="apache-2.0",
        num_drafts=2,
    )
    out = tmp_path / "out"
    write_export(engine_form, out, dtype=torch.float32, provenance=provenance)
    card = (out / "README.md").read_text()
    for text in ("license: apache-2.0", "base_model: tiny", "answers.jsonl", "fingerprint f00", "| hidden states read | 2, 4, 5 |",
                 "run/step", "8 prompts, temperature 0, chain of 3 | 1.50 (1.25 .. 1.75)", "| vLLM 0.32.0 | the same | 1.900 (-5.0 %) |",
                 "| drafts a round | 2 |"):  # fmt: skip
        assert text in card
    assert (
        len(engine_form.engines) > 0
        and str(out) in card
        and not any(mark in card for mark in ("<out>", "<num>", "<num+1>"))
    )
    for line in engine_form.engines.values():
        assert line.replace("<out>", str(out)).replace("<num>", "2").replace("<num+1>", "3") in card
    assert engine_form.settings_for("DIR", 2).get("model", "DIR") == "DIR"


def test_the_card_states_missing_measurements_and_differences(target):
    drafter = make_exact(target, "mtp", True, {"zero_first": False})
    form = make_form(drafter, "vllm")
    card = make_card(form, make_provenance(drafter), "DIR", torch.float32)
    assert "Not measured." in card and "from a reduced vocabulary and this engine from the whole one" in card
    assert "first row of a prompt" in card and "--hf-overrides" in card
    assert '"method": "mtp", "model": "DIR", "num_speculative_tokens": 3' in card
    longer = make_exact(target, "medusa")
    assert make_form(longer, "vllm").num_drafts(9) == 4


def test_block_drafters_draft_the_whole_block(target):
    drafter = make_exact(target, "dflash", False)
    for name in ("vllm", "speculators", "gguf"):
        assert make_form(drafter, name).num_drafts(1) == drafter.depth
