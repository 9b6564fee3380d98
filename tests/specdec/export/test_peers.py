"""Heads as other projects publish them: names, fields and shapes from their sources.

Each is read, drafts as a reference does, and is given back to the last bit.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import safetensors.torch
import torch

from specdec import checkpoint
from specdec.export import block_drafter
from specdec.export.engines import make_form
from specdec.measuring.model_card import write_export
from tests.support import reference
from tests.support.exports import (
    REFERENCE_MEDUSA,
    SGLANG1,
    SGLANG3,
    assert_given_back,
    assert_same_drafts,
    bring_in,
    make_provenance,
    refuse,
    rewrite,
)
from tests.support.targets import make_target

V, D, F, HEADS, GROUPS, SIZE, W = 61, 32, 48, 4, 2, 8, 40  # of the target; W: draft vocabulary
SIZES = {"hidden_size": D, "intermediate_size": F, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
   "head_dim": SIZE,
         "rms_norm_eps": 1e-6, "hidden_act": "silu", "vocab_size": V, "max_position_embeddings": 512,
         "rope_theta": 500.0,
         "rope_scaling": None, "attention_bias": False, "tie_word_embeddings": False,
         "torch_dtype": "bfloat16"}  # fmt: skip
MODERN = {key: value for key, value in SIZES.items() if "rope" not in key and "dtype" not in key} | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}
}


def layer(prefix: str, *, reads: int = D, width: int = D, qk: bool = False, input_norm: bool = True) -> dict:
    """Shapes of a decoder layer."""
    shapes = {
        f"self_attn.{projection}_proj": (n * SIZE, reads)
        for projection, n in (("q", HEADS), ("k", GROUPS), ("v", GROUPS))
    }
    shapes |= {
        "self_attn.o_proj": (width, HEADS * SIZE),
        "mlp.down_proj": (width, F),
        "post_attention_layernorm": (width,),
    }
    shapes |= {f"mlp.{part}_proj": (F, width) for part in ("gate", "up")}
    shapes |= {"input_layernorm": (width,)} if input_norm else {}
    shapes |= {"self_attn.q_norm": (SIZE,), "self_attn.k_norm": (SIZE,)} if qk else {}
    return {f"{prefix}{name}.weight": shape for name, shape in shapes.items()}


def eagle3(prefix: str, *, width: int = D, output: int = V, **sizes) -> dict:
    shapes = layer(prefix, reads=2 * width, width=width, **sizes) | {f"{prefix}hidden_norm.weight": (width,)}
    return shapes | {"fc.weight": (width, 3 * D), "norm.weight": (width,), "lm_head.weight": (output, width)}


def block(num: int = 2, *, layers: int = 2) -> dict:
    shapes = {"fc.weight": (D, layers * D), "hidden_norm.weight": (D,), "norm.weight": (D,)}
    return shapes | {key: value for number in range(num) for key, value in layer(f"layers.{number}.", qk=True).items()}


MAPS = {"d2t": (W,), "t2d": (V,)}
EMBED = {"embed_tokens.weight": (V, D)}
OUTER = {"block_size": 5, "num_hidden_layers": 2, "num_target_layers": 8, "layer_types": ["full_attention"] * 2}
NESTED = {"mask_token_id": 60, "target_layer_ids": [1, 4]}
ZLAB = {"architectures": ["DFlashDraftModel"], "model_type": "qwen3", **OUTER, **SIZES, "dflash_config": NESTED}
MARKOV = {"markov_rank": 8, "markov_head_type": "vanilla"}
MARKOV_SHAPES = {"markov_w1.weight": (V, 8), "markov_w2.weight": (V, 8)}
GATED_SHAPES = {"gate_proj.weight": (8, D + 8), "gate_proj.bias": (8,)}
SELECTOR = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 5}
ZLAB2 = ZLAB | {"architectures": ["DFlash2DraftModel"], "dflash_config": NESTED | SELECTOR}
SELECTOR_SHAPES = {f"candidate_selector.{name}_codebook": (V, 8) for name in ("predecessor", "successor")} | {
    "candidate_selector.hidden_projection.weight": (8, D),
    **{f"layers.{number}.{part}_conv.{name}": shape for number in range(2) for part in ("attention", "mlp")
       for name, shape in (("base_kernel", (2, 2, D)), ("kernel_projection.weight", (4 * D // 16, D)))},
}  # fmt: skip
LILICORR = {"projector_type": "lilicorr", "lilicorr_enabled": True, **{f"lilicorr_{name}": value for name, value in {
    "candidate_topk": 4, "hidden_size": 16, "factor_dim": 12, "num_layers": 1, "num_heads": 2, "mlp_ratio": 2.0,
    "logit_scale": 8.0,
    "vector_eps": 1e-4}.items()}}  # fmt: skip
LILICORR_SHAPES = {f"lilicorr.{name}.{part}": shape[: 1 + (part == "weight")] for name, shape in {
    "token_proj": (16, D), "pass_hidden_proj": (16, D), "context_proj": (16, D), "feature_mlp.up_proj": (16, 5),
    "feature_mlp.down_proj": (16, 16), "layers.0.attn.out_proj": (16, 16), "layers.0.mlp.up_proj": (32, 16),
    "layers.0.mlp.down_proj": (16, 32), "factor_input_proj": (16, 48), "out_head": (12, 16), "in_head": (12, 16),
    "anchor_out_head": (12, 16)}.items() for part in ("weight", "bias")}  # fmt: skip
LILICORR_SHAPES |= {f"lilicorr.{name}": shape for name, shape in {
    "feature_norm.weight": (5,), "feature_norm.bias": (5,), "slot_embedding": (1, 1, 4, 1, 16), "rank_embedding": (1,
       1, 1, 4, 16),
    "relative_slot_bias": (2, 9), "same_slot_bias": (2,), "layers.0.attn_norm.weight": (16,),
    "layers.0.mlp_norm.weight": (16,),
    "layers.0.attn.in_proj_weight": (48, 16), "layers.0.attn.in_proj_bias": (48,), "output_norm.weight": (16,),
    "anchor_norm.weight": (16,)}.items()}  # fmt: skip
DOMINO = {"projector_type": "domino", "pure_draft_prefix_len": 1, "gru_hidden_dim": 12, "emb_dim": 8}
DOMINO_SHAPES = {"prefix_gru.weight_ih_l0": (36, D), "prefix_gru.weight_hh_l0": (36, 12), "embed_proj.0.weight": (8,
   D + 12),
                 "embed_proj.2.weight": (V, 8)}  # fmt: skip
CONFIDENCE = {"enable_confidence_head": True, "confidence_head_with_markov": True}


def container(kind: str, model_type: str, num_layers: int = 1, **fields) -> dict:
    """config.json as Speculators 0.9 writes it: the layers' fields that have their family's default are not there."""
    inside = {
        key: value for key, value in MODERN.items() if key not in ("rms_norm_eps", "hidden_act", "attention_bias")
    }
    verifier = {"name_or_path": "org/target", "architectures": ["LlamaForCausalLM"]}
    method = {"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1, "accept_tolerance": 0.0}
    return {
        "architectures": ["Speculator"], "speculators_model_type": kind, "speculators_version": "0.9.0",
        "dtype": "bfloat16",
        "speculators_config": {"algorithm": kind, "proposal_methods": [method], "verifier": verifier},
        "transformer_layer_config": {"model_type": model_type, "num_hidden_layers": num_layers, **inside},
        "draft_vocab_size": V, "target_hidden_size": None, **fields,
    }  # fmt: skip


EAGLE3 = {"norm_before_residual": True, "norm_before_fc": False, "fc_norm": False, "norm_output": False,
          "eagle_aux_hidden_state_layer_ids": [2, 4, 5], "embed_requires_grad": False}  # fmt: skip
BLOCKS = {
    "block_size": 5,
    "aux_hidden_state_layer_ids": [2, 5],
    "mask_token_id": 60,
    "sliding_window_non_causal": False,
}
LLAMA3 = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1, **SIZES}
NVIDIA = {"eagle_aux_hidden_state_layer_ids": [0, 3, 5], "use_aux_hidden_state": True, "use_last_layernorm": True,
          "use_mtp_layernorm": False, "use_input_layernorm_in_first_layer": True, "next_layer_regular": True,
          "parallel_draft_step": None}  # fmt: skip

# name: config.json, shapes, what is the target's own, the reference
PUBLISHED = {
    "Speculators EAGLE-3": (
        container("eagle3", "llama", **EAGLE3 | {"draft_vocab_size": W}),
        eagle3("layers.0.", output=W) | EMBED | MAPS, ("embed_tokens.weight",), reference.eagle3),
    "Speculators EAGLE-3, Qwen3 layers": (
        container("eagle3", "qwen3", 2, **EAGLE3), eagle3("layers.0.", qk=True) | layer("layers.1.", qk=True) | EMBED,
        ("embed_tokens.weight", "lm_head.weight"), reference.eagle3),
    "Speculators P-EAGLE, trained embedding": (
        container("peagle", "llama", 2, **EAGLE3 | {"norm_before_residual": False, "mask_token_id": 59}),
        eagle3("layers.0.") | layer("layers.1.") | EMBED | {"mask_hidden": (1, 1, 3 * D)}, (), reference.eagle3),
    "Speculators DFlash": (
        container("dflash", "qwen3", 2, **BLOCKS, sample_from_anchor=False), block(), (), reference.block),
    "Speculators DFlash, reduced": (
        container("dflash", "qwen3", 2, **BLOCKS | {"draft_vocab_size": W}, sample_from_anchor=False),
        block() | MAPS | {"lm_head.weight": (W, D)}, ("lm_head.weight",), reference.block),
    "Speculators DSpark": (
        container("dspark", "qwen3", 2, **BLOCKS, **MARKOV, **CONFIDENCE, sample_from_anchor=True),
        block() | {f"markov_head.{key}": value for key, value in MARKOV_SHAPES.items()}
        | {"confidence_head.proj.weight": (1, D + 8), "confidence_head.proj.bias": (1,)}, (), reference.block),
    "SpecForge EAGLE-3": (
        LLAMA3 | {"draft_vocab_size": W, "fc_norm": True, "norm_output": True},
        eagle3("midlayer.", output=W) | EMBED | MAPS | {f"fc_norm.{number}.weight": (D,) for number in range(3)},
        ("embed_tokens.weight",), reference.eagle3),
    "SpecForge P-EAGLE": (
        LLAMA3 | {"num_hidden_layers": 2, "draft_vocab_size": W, "norm_before_residual": False, "mask_token_id": 7},
        eagle3("layers.0.", output=W) | layer("layers.1.") | EMBED | MAPS | {"mask_hidden": (1, 1, 3 * D)},
        ("embed_tokens.weight",), reference.eagle3),
    "SpecForge DSpark": (
        ZLAB | {"architectures": ["DSparkDraftModel"], "dflash_config": NESTED | MARKOV | {
            "projector_type": "dspark", "enable_confidence_head": True, "confidence_head_with_markov": False,
            "attention_mode": "gqa"}},
        block() | {f"markov_head.{key}": value for key, value in MARKOV_SHAPES.items()}
        | {"confidence_head.proj.weight": (1, D), "confidence_head.proj.bias": (1,)}, (), reference.block),
    "SpecForge DSpark, old names": (
        ZLAB | {"architectures": ["DSparkDraftModel"], "dflash_config": NESTED | MARKOV | {"projector_type": "dspark"}},
        block() | {f"logit_head.markov_head.{key}": value for key, value in MARKOV_SHAPES.items()}, (),
        reference.block),
    "DeepSpec DSpark": (
        {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", **OUTER, **MODERN, **NESTED, **MARKOV,
            **CONFIDENCE,
         "num_anchors": 4, "dtype": "bfloat16"},
        block() | EMBED | {"lm_head.weight": (V, D)} | {f"markov_head.{key}": value for key,
           value in MARKOV_SHAPES.items()}
        | {"confidence_head.proj.weight": (1, D + 8), "confidence_head.proj.bias": (1,)},
        ("embed_tokens.weight", "lm_head.weight"), reference.block),
    "DeepSpec DSpark, trained ends": (
        {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", **OUTER, **MODERN, **NESTED, **MARKOV,
         "enable_confidence_head": False, "num_anchors": 4},
        block() | EMBED | {"lm_head.weight": (V, D)} | {f"markov_head.{key}": value for key,
           value in MARKOV_SHAPES.items()},
        (), reference.block),
    "DeepSpec DFlash with a predicting anchor": (
        {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", **OUTER, **MODERN, **NESTED, "markov_rank": 0,
         "enable_confidence_head": False, "sample_from_anchor": True}, block(), (), reference.block),
    "NVIDIA EAGLE-3": (
        {key: value for key, value in LLAMA3.items() if key != "rope_scaling"}
        | {"draft_vocab_size": W, "eagle_config": NVIDIA, "num_hidden_layers": 2},
        eagle3("layers.0.", output=W) | layer("layers.1.") | {"d2t": (W,)}, (), SGLANG3),
    "NVIDIA DFlash, sinks": (
        ZLAB | {"attention_sink_bias": True, "dflash_config": NESTED | {"attention_sink_bias": True, "causal": False}},
        block() | {f"layers.{number}.self_attn.attention_sink_bias": (HEADS,) for number in range(2)}, (),
        reference.block),
    "NVIDIA DFlash, causal windows and sinks": (
        ZLAB | {"sliding_window": 4, "dflash_config": NESTED | {
            "attention_sink_bias": True, "causal": True, "use_swa": True, "swa_window_size": 4}},
        block() | {f"layers.{number}.self_attn.attention_sink_bias": (HEADS,) for number in range(2)}, (),
        reference.block),
    "NVIDIA DFlash, causal": (ZLAB | {"dflash_config": NESTED | {"causal": True}}, block(), (), reference.block),
    "NVIDIA DSpark": (
        ZLAB | {"dflash_config": NESTED | MARKOV | {
            "projector_type": "dspark", "shift_label": True, "use_confidence_head": True, "causal": False,
            "confidence_head_with_markov": True}},
        block() | MARKOV_SHAPES | {"confidence_proj.weight": (1, D + 8), "confidence_proj.bias": (1,)}, (),
        reference.block),
    "z-lab DFlash 2": (ZLAB2, block() | SELECTOR_SHAPES, (), reference.block),
    "z-lab DFlash 2, causal windows": (
        ZLAB2 | {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4, "is_causal": True},
        {f"model.{key}": value for key, value in (block() | SELECTOR_SHAPES).items()}, (), reference.block),
    "Speculators DFlash 2": (
        container("dflash2", "qwen3", 2, **BLOCKS | {"sliding_window_non_causal": True}, **SELECTOR,
           sample_from_anchor=False),
        block() | SELECTOR_SHAPES, (), reference.block),
    "DeepSpec DSpark, gated": (
        ZLAB | {"architectures": ["Qwen3DSparkModel"], **NESTED, **MARKOV, "markov_head_type": "gated",
           "sample_from_anchor": True},
        block() | {f"markov_head.{key}": value for key, value in (MARKOV_SHAPES | GATED_SHAPES).items()}, (),
        reference.block),
    "NVIDIA DSpark, gated": (
        ZLAB | {"dflash_config": NESTED | MARKOV | {"projector_type": "dspark", "shift_label": True,
           "markov_head_type": "gated"}},
        block() | MARKOV_SHAPES | GATED_SHAPES, (), reference.block),
    "Speculators DSpark, recurrent": (
        container("dspark", "qwen3", 2, **BLOCKS, **MARKOV | {"markov_head_type": "rnn"}, enable_confidence_head=False,
           sample_from_anchor=True),
        block() | {f"markov_head.{key}": value for key, value in
                   (MARKOV_SHAPES | {"joint_proj.weight": (24, D + 16), "joint_proj.bias": (24,)}).items()}, (),
                    reference.block),
    "NVIDIA LiLiCorr": (
        ZLAB | {"architectures": ["LiLiCorrDraftModel"], "dflash_config": NESTED | LILICORR},
        block() | LILICORR_SHAPES, (), reference.block),
    "NVIDIA LiLiCorr, convolution": (
        ZLAB | {"architectures": ["LiLiCorrDraftModel"], "dflash_config": NESTED | LILICORR | {"conv_kernel_size": 2,
           "conv_group_size": 16}},
        block() | LILICORR_SHAPES | {key: value for key, value in SELECTOR_SHAPES.items() if "conv" in key}, (),
        reference.block),
    "SpecForge Domino": (
        ZLAB | {"architectures": ["DominoDraftModel"], "dflash_config": NESTED | DOMINO | {"shift_label": False}},
        block() | DOMINO_SHAPES, (), reference.block),
    "NVIDIA Domino": (
        ZLAB | {"dflash_config": NESTED | DOMINO | {"shift_label": True}}, block() | DOMINO_SHAPES, (),
        reference.block),
    "z-lab DFlash": (
        {key: value for key, value in ZLAB.items() if key != "block_size"}
        | {"dflash_config": NESTED | {"block_size": 5}},
        block(), (), reference.block),
    "transformers' assistant": (
        {"architectures": ["AssistantModel"], "model_type": "assistant", **OUTER, **MODERN, **NESTED,
         "layer_types": ["sliding_attention"] * 2, "sliding_window": 4},
        {{"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(key, key): value
         for key, value in block().items()}, (), reference.block),
    "SGLang, a Speculators container flattened": (
        ZLAB | {"architectures": ["DSparkDraftModel"], **NESTED, **MARKOV, "sample_from_anchor": False,
           "dflash_config": {}},
        block() | {f"markov_head.{key}": value for key, value in MARKOV_SHAPES.items()}, (), partial(reference.block,
           engine="sglang")),
    "SGLang EAGLE-3, old norms": (
        LLAMA3 | {"draft_vocab_size": V, "use_aux_norm": True, "eagle_config": {"norm_before_fc": True}},
        eagle3("midlayer.") | {f"aux_norm_{where}.weight": (D,) for where in ("low", "mid", "high")}
        | {"input_norm.weight": (3 * D,)}, (), SGLANG3),
    "EAGLE-3 of another width": (
        LLAMA3 | {"hidden_size": 24, "target_hidden_size": D, "draft_vocab_size": W},
        eagle3("midlayer.", width=24, output=W) | MAPS | {"embed_tokens.weight": (V, 24)}, (), reference.eagle3),
    "EAGLE-3 with the target's LM head, without fields that have defaults": (
        {key: value for key, value in LLAMA3.items() if key != "head_dim"} | {"draft_vocab_size": V},
         {key: value for key, value in eagle3("midlayer.").items() if "lm_head" not in key}, (),
        reference.eagle3),
    "EAGLE-1, its own embedding": (
        {**LLAMA3, "architectures": ["LlamaForCausalLMEagle"]},
        layer("layers.0.", input_norm=False) | EMBED | {"fc.weight": (D, 2 * D), "fc.bias": (D,)}, (), SGLANG1),
    "Medusa of the reference": (
        {"medusa_num_heads": 4, "medusa_num_layers": 1, "base_model_name_or_path": "org/target", "vocab_size": V},
        {f"{n}.0.linear.weight": (D, D) for n in range(4)} | {f"{n}.0.linear.bias": (D,) for n in range(4)}
        | {f"{n}.1.weight": (V, D) for n in range(4)}, ("2.1.weight",), REFERENCE_MEDUSA),
    "Medusa of vLLM": (
        {"architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": D, "vocab_size": V,
            "truncated_vocab_size": W,
         "num_heads": 4, "num_hidden_layers": 1, "medusa_fc_bias": False, "original_lm_head": True},
        {f"blocks.{n}.layers.0.weight": (D, D) for n in range(4)} | {"lm_head.weight": (W, D), "token_map": (W,)}, (),
        reference.medusa),
}  # fmt: skip


def publish(folder: Path, target, name: str) -> Path:
    """The folder of a head with random values, as its project writes it."""
    torch.manual_seed(2)
    config, shapes, borrowed, reader = PUBLISHED[name]
    vocab = torch.randperm(V)[:W].sort().values
    target_tensors = {
        "embed_tokens.weight": target.embed.weight,
        "d2t": vocab - torch.arange(W),
        "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, vocab, True),
        "token_map": torch.randperm(V)[:W],
    }
    tensors = {}
    for key, shape in shapes.items():
        if key in MAPS or key == "token_map":
            tensors[key] = target_tensors[key]
        elif key in borrowed:
            rows = target.lm_head.weight if shape[0] == V else target.lm_head.weight[vocab]
            tensors[key] = target_tensors.get(key, rows).detach().to(torch.bfloat16)
        else:
            noise = torch.randn(shape)
            value = noise / shape[1] ** 0.5 if len(shape) == 2 else 1 + 0.3 * noise  # of norms, biases and kernels
            tensors[key] = value.to(torch.float32 if "confidence" in key else torch.bfloat16)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    if reader is REFERENCE_MEDUSA:
        torch.save(tensors, folder / "medusa_lm_head.pt")
    else:
        safetensors.torch.save_file(tensors, folder / "model.safetensors")
    if name.startswith("EAGLE-1"):
        torch.save(torch.randperm(V)[:W].tolist(), folder / "token_map.pt")
    return folder


@pytest.fixture(scope="module")
def rounded():
    """A target whose weights have 16 bits, as published ones have, computed in float64."""
    target = make_target(V)
    with torch.no_grad():
        for parameter in target.model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    return target


@pytest.mark.parametrize("name", PUBLISHED)
def test_heads_of_other_projects(rounded, tmp_path, name):
    folder = publish(tmp_path / "published", rounded, name)
    reader = PUBLISHED[name][-1]
    drafter = bring_in(folder, rounded)
    about = checkpoint.read_document(folder)
    assert checkpoint.load_head_class(about["_target_"]) is type(drafter)
    assert about["target"] == ("org/target" if name.startswith("Speculators") or "reference" in name else None)
    assert_same_drafts(folder, reader, drafter.double())
    assert_given_back(folder, rounded, tmp_path)


# What is refused, in every layout

IN_SAFETENSORS = [name for name, (*_, reader) in PUBLISHED.items() if reader is not REFERENCE_MEDUSA]


@pytest.mark.parametrize("name", IN_SAFETENSORS)
def test_damage_and_other_targets(rounded, tmp_path, name):
    """A missing tensor, NaN, weights of zero, and a target of another vocabulary or width."""
    folder = publish(tmp_path / "published", rounded, name)
    tensors = reference.read(folder)[1]
    key = next(key for key in tensors if key.endswith(("q_proj.weight", "blocks.0.layers.0.weight")))
    rewrite(folder, tensors={key: None})
    refuse(folder, rounded, r"Missing key|is missing|size mismatch|named|belongs to no")
    for value in (float("nan"), float("-inf")):
        damaged = tensors[key].clone()
        damaged.view(-1)[3] = value
        rewrite(folder, tensors={key: damaged})
        refuse(folder, rounded, f"{key} has values that are NaN or infinite: the head is damaged")
    zeros = {key: torch.zeros_like(value) for key, value in tensors.items() if value.is_floating_point()}
    rewrite(folder, tensors=zeros)
    refuse(folder, rounded, "gives all tokens the same logit|has no place")
    rewrite(folder, tensors=tensors)
    bring_in(folder, rounded)
    for other in (make_target(59), make_target(V, width=16)):
        refuse(folder, other, r"is the target|fit together|do not make|wide and")


FOREIGN = [
    ({"kv_lora_rank": 512}, {}, "a drafter with latent attention .MLA."),
    ({}, {"layers.0.self_attn.kv_a_proj_with_mqa.weight": torch.ones(2, 2)}, "a drafter with latent attention .MLA."),
    ({"speculators_model_type": "xpress"}, {}, "an xPress drafter"),
    ({"architectures": ["DSpineDraftModel"]}, {}, "a DSpine drafter"),
    ({"architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator"}, {}, "an MLP speculator"),
    ({"quantization_config": {"quant_method": "fp8"}}, {}, "a quantised head"),
    ({}, {"layers.0.mlp.up_proj.weight_scale": torch.ones(1)}, "a quantised head"),
    ({}, {"layers.0.self_attn.q_proj.bias": torch.ones(2)}, "a drafter with biases"),
    ({}, {"layers.0.mlp.experts.0.up_proj.weight": torch.ones(2, 2)}, "a drafter with experts"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "tensors", "kind"), FOREIGN)
def test_heads_that_do_not_exist_here_are_named(rounded, tmp_path, fields, tensors, kind):
    folder = publish(tmp_path / "published", rounded, "z-lab DFlash")
    rewrite(folder, **fields, tensors=tensors)
    refuse(folder, rounded, f"published: it is {kind}.*, which cannot be imported")
    with pytest.raises(ValueError, match=f"it is {kind}"):
        checkpoint.read_document(folder)


MISREAD = [
    ("z-lab DFlash", {"output_multiplier": 0.5}, "it is a drafter that scales its logits, and .* does not do so"),
    ("z-lab DFlash 2", {"final_logit_softcapping": 30.0}, "a drafter that caps its logits, and .* does not do so"),
    ("z-lab DFlash 2", {"conv_group_size": 8}, "conv_group_size=8 cannot be imported; 16 can"),
    ("z-lab DFlash 2", {"selector_top_k": ...}, "selector_top_k is missing"),
    ("SpecForge Domino", {"pure_draft_prefix_len": 0}, "pure_draft_prefix_len=0 cannot be imported; 1 can"),
    ("Speculators DSpark, recurrent", {"sample_from_anchor": False}, "reads the anchor twice where sample_from_anchor"),
    *(("NVIDIA EAGLE-3", {field: value}, f"eagle_config has {field}={value}, which makes another head of it")
      for field, value in (("use_aux_hidden_state", False), ("use_last_layernorm", False), ("use_mtp_layernorm", True),
                           ("parallel_draft_step", 4))),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "message"), MISREAD)
def test_parts_that_would_be_misread(rounded, tmp_path, name, changes, message):
    folder = publish(tmp_path / "published", rounded, name)
    for place, nested in reference.read(folder)[0].items():
        if place in ("dflash_config", "eagle_config"):
            changes = {place: {key: value for key, value in (nested | changes).items() if value is not ...}}
    rewrite(folder, **changes)
    refuse(folder, rounded, message)


# Given back after it was changed


def changed(drafter):
    for parameter in drafter.parameters():
        parameter.data = parameter.data * 1.5
    return drafter


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_trained_head_is_read_again_from_its_layout(rounded, tmp_path, name):
    """Training changes every tensor of the head and none of the target's; the configuration stays."""
    folder = publish(tmp_path / "published", rounded, name)
    drafter = changed(bring_in(folder, rounded))
    write_export(
        make_form(drafter, "published"), tmp_path / "out", dtype=torch.bfloat16, provenance=make_provenance(drafter)
    )
    back = bring_in(tmp_path / "out", rounded)
    for key, value in drafter.state_dict().items():
        if key == "embedding" and hasattr(
            drafter, "mask_embedding"
        ):  # one of its rows holds the mask, which was trained
            value = block_drafter.replace_mask_row(value, drafter.mask_embedding, drafter.published["config"])
        assert torch.equal(back.state_dict()[key].to(torch.bfloat16), value.to(torch.bfloat16)), key
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (folder / "config.json").read_text()
    )


@pytest.mark.parametrize(
    "name",
    [
        "SpecForge EAGLE-3",
        "EAGLE-3 with the target's LM head, without fields that have defaults",
        "z-lab DFlash",
        "Speculators DFlash",
    ],
)
def test_another_draft_vocabulary_is_written(rounded, tmp_path, name):
    folder = publish(tmp_path / "published", rounded, name)
    for vocab in (torch.arange(1, V, 2), None):
        drafter, spec = checkpoint.load_for_training(folder, rounded, {}, lambda before, vocab=vocab: vocab)
        drafter.published = spec["published"]
        form = make_form(drafter, "published")
        write_export(form, tmp_path / "out", dtype=torch.bfloat16, provenance=make_provenance(drafter))
        back = bring_in(tmp_path / "out", rounded)
        assert (back.draft_to_target is None) == (vocab is None) and back.vocab_size == (
            V if vocab is None else len(vocab)
        )
        config = json.loads((tmp_path / "out" / "config.json").read_text())
        assert config.get("draft_vocab_size", V) == back.vocab_size
        shutil.rmtree(tmp_path / "out")


def test_a_target_that_rounds_what_the_head_shares_with_it_is_refused(rounded, tmp_path):
    folder = publish(tmp_path / "published", rounded, "SpecForge EAGLE-3")
    drafter = bring_in(folder, rounded)
    before = rounded.embed.weight.data
    rounded.embed.weight.data = before * 1.1
    try:
        with pytest.raises(
            ValueError, match=r"embed_tokens.weight came as the target's, and the target here has other values"
        ):
            make_form(drafter, "published")
    finally:
        rounded.embed.weight.data = before


def test_masks_that_training_changed_get_their_file(rounded, tmp_path):
    """z-lab's layout has the mask in the target's embedding."""
    drafter = bring_in(publish(tmp_path / "published", rounded, "z-lab DFlash"), rounded)
    assert not make_form(drafter, "published").layout.pickles
    drafter.mask_embedding.data += 1
    (content,) = make_form(drafter, "published").layout.pickles.values()
    assert content["mask_token_id"] == 60 and torch.equal(content["embedding"], drafter.mask_embedding)
