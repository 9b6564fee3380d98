"""The Speculators container (0.9; docs/file-formats.md, section 11), which vLLM serves too: EAGLE-3, P-EAGLE, DFlash, DSpark, DFlash 2."""

from specdec.export import block_drafter, eagle, layout
from specdec.export.layout import SIZE_FIELDS, Layout
from specdec.heads.dflash import BlockDrafter
from specdec.heads.eagle import Eagle3, PEagle

VERSION = "0.9.0"
LAYER_FIELDS = [
    *SIZE_FIELDS,
    "rope_parameters",
    "max_position_embeddings",
    "vocab_size",
    "attention_bias",
    "num_hidden_layers",
]
ARCHITECTURES = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator", "dflash": "DFlashSpeculator",
                 "dspark": "DSparkSpeculator", "dflash2": "DFlash2DraftModel"}  # fmt: skip
DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
DSPARK = ("block_size", "mask_token_id", "sample_from_anchor", "markov_rank", "markov_head_type", "enable_confidence_head",
          "confidence_head_with_markov")  # fmt: skip


def write_container(drafter: Eagle3 | BlockDrafter, kind: str) -> Layout:
    """kind: eagle3, peagle, dflash, dspark or dflash2. Raises ValueError for heads that readers of the container would run otherwise."""
    if isinstance(drafter, Eagle3):
        kind_fields, plain_layout = _write_eagle3_fields(drafter), eagle.write_eagle3(drafter)
        model_type = plain_layout.config["model_type"]
        tensors = layout.rename_tensors(plain_layout.tensors, [(eagle.MIDLAYER, eagle.LAYER.format(0))])
    else:
        plain_layout = block_drafter.write_dspark(drafter) if kind == "dspark" else block_drafter.write_dflash(drafter)
        kind_fields, model_type = _write_block_fields(drafter, kind, plain_layout.config), "qwen3"
        tensors = plain_layout.tensors
    target = drafter.target
    method = {"proposal_type": "greedy", "speculative_tokens": "<num>", "verifier_accept_k": 1, "accept_tolerance": 0.0}
    config = {
        "architectures": [ARCHITECTURES[kind]],
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [method],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": target.name, "architectures": [type(target.model).__name__]},
        },
        "transformer_layer_config": {
            "model_type": model_type,
            **{name: plain_layout.config[name] for name in LAYER_FIELDS},
            **layout.write_window_fields(drafter),
        },
        "draft_vocab_size": plain_layout.config["draft_vocab_size"],
        "target_hidden_size": target.width,
        "torch_dtype": None,
        **kind_fields,
    }
    return Layout(tensors, config, plain_layout.pickles)


def _write_eagle3_fields(drafter: Eagle3) -> dict:
    """The fields of EAGLE-3 and P-EAGLE."""
    if len(drafter.fc_norm) and drafter.input_norm is not None:
        raise ValueError("Speculators takes fc_norm or norm_before_fc, not both: take format=vllm.")
    fields = {
        **eagle.list_norms(drafter),
        "eagle_aux_hidden_state_layer_ids": list(drafter.target_layers),
        "embed_requires_grad": False,
    }
    if not isinstance(drafter, PEagle):
        return fields
    if len(drafter.fc_norm) or drafter.norm_output:
        raise ValueError("vLLM reads no fc_norm and norm_output of a P-EAGLE head in this container: take format=vllm.")
    return {**fields, "mask_token_id": drafter.mask_token}


def _write_block_fields(drafter: BlockDrafter, kind: str, plain_config: dict) -> dict:
    """The fields of DFlash, DSpark and DFlash 2. plain: those outside the container"""
    layers: dict = {"aux_hidden_state_layer_ids": list(drafter.target_layers)}
    causal = block_drafter.find_causality(drafter)
    if causal is None:
        raise ValueError(
            "vLLM takes all layers of a block drafter in this container as causal if the sliding ones are: take "
            "format=vllm, or train without full_layers or with window_causal=false."
        )
    layers["sliding_window_non_causal"] = not causal  # vLLM takes it for full layers, too
    if kind == "dspark":
        if plain_config["markov_head_type"] == "rnn" and not drafter.anchor_predicts:
            raise ValueError(
                "Speculators' recurrent Markov head reads the anchor twice where anchor_predicts=false: take format=sglang."
            )
        return {**{name: plain_config[name] for name in DSPARK}, **layers}
    return {
        "block_size": plain_config["block_size"],
        **layers,
        "mask_token_id": block_drafter.choose_mask_token(drafter),
        "sample_from_anchor": False,
        **{name: plain_config["dflash_config"][name] for name in DFLASH2 if kind == "dflash2"},
    }
