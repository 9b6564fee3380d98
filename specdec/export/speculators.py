"""The Speculators container (0.9; docs/file-formats.md, section 11), which vLLM serves too: EAGLE-3, P-EAGLE, DFlash, DSpark, DFlash 2."""

from specdec.export import block_drafter, eagle, layout
from specdec.export.layout import SIZES, Layout
from specdec.heads.dflash import BlockDrafter
from specdec.heads.eagle import Eagle3, PEagle

VERSION = "0.9.0"
LAYER_FIELDS = [
    *SIZES,
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


def container(drafter: Eagle3 | BlockDrafter, kind: str) -> Layout:
    """kind: eagle3, peagle, dflash, dspark or dflash2. Raises ValueError for heads that readers of the container would run otherwise."""
    if isinstance(drafter, Eagle3):
        own, plain = _eagle3(drafter), eagle.eagle3(drafter)
        model_type = plain.config["model_type"]
        tensors = layout.rename(plain.tensors, [(eagle.MIDLAYER, eagle.LAYER.format(0))])
    else:
        plain = block_drafter.dspark(drafter) if kind == "dspark" else block_drafter.dflash(drafter)
        own, model_type = _block(drafter, kind, plain.config), "qwen3"
        tensors = plain.tensors
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
            **{name: plain.config[name] for name in LAYER_FIELDS},
            **layout.window_fields(drafter),
        },
        "draft_vocab_size": plain.config["draft_vocab_size"],
        "target_hidden_size": target.width,
        "torch_dtype": None,
        **own,
    }
    return Layout(tensors, config, plain.pickles)


def _eagle3(drafter: Eagle3) -> dict:
    """The fields of EAGLE-3 and P-EAGLE."""
    if len(drafter.fc_norm) and drafter.input_norm is not None:
        raise ValueError("Speculators takes fc_norm or norm_before_fc, not both: take format=vllm.")
    fields = {
        **eagle.norms(drafter),
        "eagle_aux_hidden_state_layer_ids": list(drafter.target_layers),
        "embed_requires_grad": False,
    }
    if not isinstance(drafter, PEagle):
        return fields
    if len(drafter.fc_norm) or drafter.norm_output:
        raise ValueError("vLLM reads no fc_norm and norm_output of a P-EAGLE head in this container: take format=vllm.")
    return {**fields, "mask_token_id": drafter.mask_token}


def _block(drafter: BlockDrafter, kind: str, plain: dict) -> dict:
    """The fields of DFlash, DSpark and DFlash 2. plain: those outside the container"""
    layers: dict = {"aux_hidden_state_layer_ids": list(drafter.target_layers)}
    causal = block_drafter.causality(drafter)
    if causal is None:
        raise ValueError(
            "vLLM takes all layers of a block drafter in this container as causal if the sliding ones are: take "
            "format=vllm, or train without full_layers or with window_causal=false."
        )
    layers["sliding_window_non_causal"] = not causal  # vLLM takes it for full layers, too
    if kind == "dspark":
        if plain["markov_head_type"] == "rnn" and not drafter.anchor_predicts:
            raise ValueError(
                "Speculators' recurrent Markov head reads the anchor twice where anchor_predicts=false: take format=sglang."
            )
        return {**{name: plain[name] for name in DSPARK}, **layers}
    return {
        "block_size": plain["block_size"],
        **layers,
        "mask_token_id": block_drafter.mask_token(drafter),
        "sample_from_anchor": False,
        **{name: plain["dflash_config"][name] for name in DFLASH2 if kind == "dflash2"},
    }
