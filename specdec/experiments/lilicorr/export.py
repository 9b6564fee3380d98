"""LiLiCorr in public layouts: NVIDIA's names, which vLLM and SGLang read (docs/file-formats.md, section 10)."""

from collections.abc import Iterable, Mapping

from torch import Tensor

from specdec.experiments.lilicorr.part import MLP, LatticeLayer, LiLiCorr
from specdec.export.block_drafter import (
    MASK_NOTE,
    RUNNER_NOTE,
    BlockKind,
    make_block_family,
    make_sglang_rules,
    make_vllm_rules,
    map_block_names,
    write_convolution_fields,
)
from specdec.export.family import Clause
from specdec.heads.dflash import BlockDrafter

# Names of modelopt's training code, which engines do not all know
OLD_NAMES = {
    "feature_mlp.0.": "feature_norm.",
    "feature_mlp.1.": "feature_mlp.up_proj.",
    "feature_mlp.3.": "feature_mlp.down_proj.",
    ".mlp.0.": ".mlp.up_proj.",
    ".mlp.2.": ".mlp.down_proj.",
}
SIZE_FIELDS = {  # arguments of the part -> fields, after "lilicorr_"
    "top": "candidate_topk",
    "hidden": "hidden_size",
    "factor": "factor_dim",
    **{name: name for name in ("num_layers", "num_heads", "mlp_ratio", "logit_scale", "vector_eps")},
}
GREEDY_NOTE = Clause(
    "SGLang drafts greedily with LiLiCorr, unless SGLANG_ENABLE_LILICORR_SAMPLING=1 is in the environment."
)


def write_fields(drafter: BlockDrafter) -> dict:
    """The fields of `dflash_config`. Raises ValueError if the anchor predicts a draft, which no engine has."""
    lilicorr = drafter.dependence
    assert isinstance(lilicorr, LiLiCorr)
    if drafter.anchor_predicts:
        raise ValueError(
            "Engines have LiLiCorr with an anchor that predicts nothing: train with anchor_predicts=false."
        )
    layer = lilicorr.layers[0]
    assert isinstance(layer, LatticeLayer) and isinstance(layer.mlp, MLP)
    width, hidden_width = lilicorr.pass_hidden_proj.out_features, layer.mlp.up_proj.out_features
    ratio = hidden_width / width
    sizes = {
        "top": lilicorr.top,
        "hidden": width,
        "factor": lilicorr.out_head.out_features,
        "num_layers": len(lilicorr.layers),
        "num_heads": len(lilicorr.same_slot_bias),
        "mlp_ratio": ratio if int(width * ratio) == hidden_width else (hidden_width + 0.5) / width,
        "logit_scale": lilicorr.logit_scale,
        "vector_eps": lilicorr.vector_eps,
    }
    fields = {f"lilicorr_{SIZE_FIELDS[name]}": value for name, value in sizes.items()}
    return {"projector_type": "lilicorr", "lilicorr_enabled": True, **fields, **write_convolution_fields(drafter)}


def read_dependence(head: Mapping[str, Tensor], config: dict) -> dict:
    """The arguments of the dependence."""
    sizes = {name: config[f"lilicorr_{public}"] for name, public in SIZE_FIELDS.items()}
    return {"kind": "lilicorr", **sizes, "hidden": sizes["hidden"] or None}


def map_names(config: dict, names: Iterable[str]) -> dict[str, str]:
    """This project's name for each public name, those of modelopt's training code among them."""
    own_names = map_block_names(LILICORR, config, names)
    for public, own in own_names.items():
        if own.startswith("dependence."):
            for old, new in OLD_NAMES.items():
                own = own.replace(old, new)
            own_names[public] = own
    return own_names


LILICORR = BlockKind(
    "lilicorr",
    "LiLiCorrDraftModel",
    names={"lilicorr.": ""},
    write_fields=write_fields,
    is_declared=lambda config: config.get("projector_type") == "lilicorr" or config.get("lilicorr_enabled"),
    read_dependence=read_dependence,
    embeds_drafts=True,
    convolution=True,
    output_fields={"has_own_lm_head": True},
    draft_vocabulary=False,
)
FAMILIES = (
    make_block_family(
        LILICORR,
        {"lilicorr": "LiLiCorr"},
        public_names=map_names,
        writers={},
        engines={"sglang": make_sglang_rules(GREEDY_NOTE), "vllm": make_vllm_rules(RUNNER_NOTE, MASK_NOTE)},
    ),
)
