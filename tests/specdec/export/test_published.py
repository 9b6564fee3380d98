"""Import of published heads as checkpoints: variants of other publishers load, and other folders are refused."""

import json
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.support import reference
from tests.support.exports import (
    OTHER_BLOCK,
    SAFEAILAB1,
    assert_equal_drafters,
    assert_same_drafts,
    bring_in,
    export,
    make_exact,
    refuse,
    rewrite,
)
from tests.support.targets import make_target

pytestmark = pytest.mark.full


def test_import_of_sharded_weights(target, tmp_path):
    drafter = make_exact(target, "eagle3", True)
    export(drafter, "vllm", tmp_path / "out")
    _, tensors = reference.read(tmp_path / "out")
    places = {name: f"model-{n % 2}.safetensors" for n, name in enumerate(tensors)}
    for place in set(places.values()):
        shard = {name: tensors[name] for name in tensors if places[name] == place}
        safetensors.torch.save_file(shard, tmp_path / "out" / place)
    (tmp_path / "out" / "model.safetensors").unlink()
    (tmp_path / "out" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    assert_equal_drafters(bring_in(tmp_path / "out", target), drafter)


# Variants that published heads have and our exports do not


def test_published_eagle1_with_a_bias_and_a_copy_of_the_embedding(target, tmp_path):
    """Its config.json has no field `bias`, which SafeAILab reads as true; its weights are in pytorch_model.bin."""
    out = tmp_path / "out"
    export(make_exact(target, "eagle", False, {"fc_bias": True}), "eagle", out)
    rewrite(out, bias=None, rope_parameters=None, tensors={"embed_tokens.weight": target.embed.weight.clone()})
    drafter = bring_in(out, target)
    assert bool(drafter.fc.bias.any()) and not any("embed" in name for name in drafter.state_dict())
    assert_same_drafts(out, SAFEAILAB1, drafter)
    torch.save(reference.read(out)[1], out / "pytorch_model.bin")
    (out / "model.safetensors").unlink()
    assert_equal_drafters(bring_in(out, target), drafter)


def test_rotary_embeddings_in_the_spelling_of_transformers_4(target, tmp_path):
    export(make_exact(target, "eagle3", True, {"block": OTHER_BLOCK}), "vllm", tmp_path / "out")
    rewrite(tmp_path / "out", rope_parameters=None)
    drafter = bring_in(tmp_path / "out", target)
    assert drafter.config.rope_parameters == OTHER_BLOCK["rope_parameters"]
    assert_same_drafts(tmp_path / "out", reference.eagle3, drafter)


def test_maps_of_a_whole_vocabulary_are_ignored(target, tmp_path):
    export(make_exact(target, "eagle3"), "vllm", tmp_path / "out")
    rewrite(tmp_path / "out", tensors={"d2t": torch.zeros(61, dtype=torch.int64), "t2d": torch.ones(61).bool()})
    assert bring_in(tmp_path / "out", target).draft_to_target is None


# Imports that are refused


class Code:
    def __reduce__(self):
        return os.mkdir, (str(Path.cwd() / "code_ran"),)


@pytest.mark.parametrize("head", ["eagle", "eagle3", "dflash", "mtp", "medusa"])
def test_a_head_of_another_width_is_refused(target, tmp_path, head):
    export(make_exact(target, head), "vllm", tmp_path / "out")
    message = "size mismatch for blocks.0.0.linear.bias" if head == "medusa" else "32 wide and tiny is 16: .*"
    refuse(tmp_path / "out", make_target(61, width=16), message)


def test_folders_that_hold_no_head_are_refused(target, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "out"
    refuse(out, target, "does not exist. A checkpoint is a folder .* a published head .config.json and its weights")
    out.mkdir()
    refuse(out, target, "does not exist. A checkpoint is a folder")
    (out / "config.json").write_text("{")
    refuse(out, target, "not valid JSON .*: take another copy")
    (out / "config.json").write_text("{}")
    refuse(out, target, "has no weights: none of model.safetensors, pytorch_model.bin, medusa_lm_head.pt")
    torch.save({"fc.weight": Code()}, out / "pytorch_model.bin")
    refuse(out, target, "cannot be read as plain tensors")
    assert not (tmp_path / "code_ran").exists()
    torch.save([1, 2], out / "pytorch_model.bin")
    refuse(out, target, "something other than named tensors")


def test_damaged_and_foreign_weights_are_refused(target, tmp_path):
    out = tmp_path / "out"
    export(make_exact(target, "eagle3", True), "vllm", out)
    whole = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(whole[:-100])
    refuse(out, target, "missing, truncated or damaged")
    (out / "model.safetensors").write_bytes(whole)
    _, tensors = reference.read(out)
    for change, message in (
        ({"midlayer.hidden_norm.weight": None}, "do not fit together: .*Missing key.* .hidden_norm.weight"),
        ({"mask_hidden": torch.zeros(96)}, "P-EAGLE has mask_hidden .* one of them is missing"),
        ({"d2t": tensors["d2t"] + torch.arange(40)}, "d2t and t2d name different tokens|d2t must hold offsets"),
        (
            {"model.embed_tokens.weight": target.embed.weight.clone()},
            "ships no MTP modules .*the head `draft` with model: NAME",
        ),
    ):
        rewrite(out, tensors=change)
        refuse(out, target, message)
        (out / "model.safetensors").write_bytes(whole)
    rewrite(out, num_attention_heads=None)
    refuse(out, target, "do not make a drafter .num_attention_heads is missing")
    rewrite(out, num_attention_heads=4, speculators_model_type="peagle")
    refuse(out, target, "write mask_token_id")
    rewrite(out, speculators_model_type="mlp")
    refuse(out, target, "type mlp cannot be imported; peagle, eagle3, dspark, dflash2, dflash can")
    rewrite(out, speculators_model_type=None, tensors={**dict.fromkeys(tensors), "other.weight": torch.zeros(2)})
    refuse(out, target, "none of the known layouts")


MISREAD = [
    *((head, "vllm", {"tensors": {"embed_tokens.weight": torch.zeros(60, 32).double()}},
        "is .60, 32. and the target's is .61, 32.")
      for head in ("eagle", "eagle3", "dflash", "dspark")),
    ("eagle3", "vllm", {"eagle_aux_hidden_state_layer_ids": [2, 4, 8]}, "state 8 is before the final norm"),
    ("eagle3", "vllm", {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 7]}},
        "state 8 is before the final norm"),
    ("eagle3", "vllm", {"eagle_config": {"norm_output": True}}, "eagle_config holds norm_output"),
    ("dflash", "vllm", {"layer_types": ["sliding_attention"] * 2}, "must say how many positions they see"),
    ("dspark", "vllm", {"markov_head_type": "gated"}, "Missing key.*dependence.gate.weight"),
    ("dspark", "vllm", {"markov_head_type": "deep"}, "dependence.form=deep must be plain, gated or rnn"),
    *(("dflash2", "vllm", {"tensors": {name: None}}, "Missing key|has no place") for name in
      ("layers.1.mlp_conv.base_kernel", "layers.0.attention_conv.kernel_projection.weight",
          "candidate_selector.successor_codebook")),
    ("dspark", "speculators", {"sample_from_anchor": None}, "write sample_from_anchor into config.json"),
    ("eagle3", "speculators", {"norm_before_residual": None}, "write norm_before_residual into config.json"),
    ("dspark", "vllm", {"tensors": {"markov_head.markov_w1.weight": torch.zeros(60, 64).double()}},
        "size mismatch for dependence.before.weight"),
    ("dspark", "safetensors", {}, "use the checkpoint"),
]  # fmt: skip


@pytest.mark.parametrize(("head", "form", "changes", "message"), MISREAD)
def test_folders_that_would_be_misread_are_refused(target, tmp_path, head, form, changes, message):
    export(make_exact(target, head), form, tmp_path / "out")
    rewrite(tmp_path / "out", **changes)
    refuse(tmp_path / "out", target, message)


def test_rotary_frequencies_of_old_files_are_ignored_and_attention_biases_refused(target, tmp_path):
    drafter = make_exact(target, "eagle", True)
    export(drafter, "eagle", tmp_path / "out")
    rewrite(tmp_path / "out", tensors={"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4, dtype=torch.float64)})
    assert_equal_drafters(bring_in(tmp_path / "out", target), drafter)
    rewrite(tmp_path / "out", tensors={"layers.0.self_attn.q_proj.bias": torch.ones(32, dtype=torch.float64)})
    refuse(tmp_path / "out", target, "it is a drafter with biases in its attention")


# DFlash and DSpark

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
WINDOWS = [  # as vLLM's loader takes them
    (SLIDING, {}, ([4, 4], True)),
    (SLIDING, {"causal": False}, ([4, 4], False)),
    (SLIDING, {"swa_window_size": 3}, ([3, 3], True)),
    ({**SLIDING, "is_causal": False}, {"causal": True}, ([4, 4], False)),
    ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}, {}, ([None, 4], True)),
    ({"sliding_window": 4}, {"use_swa": True}, ([4, 4], False)),
    ({"sliding_window": 4}, {"use_swa": True, "causal": True}, ([4, 4], True)),
    ({"sliding_window": 4}, {}, ([None, None], True)),
]


@pytest.mark.parametrize(("changes", "nested", "expected"), WINDOWS)
def test_windows_of_published_block_drafters(target, tmp_path, changes, nested, expected):
    exported = export(make_exact(target, "dflash"), "vllm", tmp_path / "out")
    nested = {**exported.layout.config["dflash_config"], "causal": None, **nested}
    rewrite(tmp_path / "out", **{"is_causal": None, **changes}, dflash_config=nested)
    drafter = bring_in(tmp_path / "out", target)
    assert (drafter.windows, drafter.window_causal) == expected
