"""Domino in public layouts: SpecForge's and NVIDIA's names, for SGLang (docs/file-formats.md, section 10)."""

from collections.abc import Mapping

from torch import Tensor

from specdec.experiments.domino.part import Domino
from specdec.export.block_drafter import BlockKind, make_block_family, make_sglang_rules
from specdec.export.family import Clause
from specdec.heads.dflash import BlockDrafter

SHORTER_NOTE = Clause("SGLang leaves out the last draft of a block.", lambda drafter: drafter.anchor_predicts)
GREEDY_NOTE = Clause("SGLang drafts greedily with Domino at any temperature, and takes weights in bfloat16 only.")


def write_fields(drafter: BlockDrafter) -> dict:
    """The fields of `dflash_config`."""
    domino = drafter.dependence
    assert isinstance(domino, Domino)
    return {
        "projector_type": "domino",
        "shift_label": drafter.anchor_predicts,
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": domino.reader.hidden_size,
        "emb_dim": domino.after.in_features,
    }


def read_dependence(head: Mapping[str, Tensor], config: dict) -> dict:
    """The arguments of the dependence. Raises ValueError for a part with more drafts before its correction."""
    if config["pure_draft_prefix_len"] != 1:
        raise ValueError(
            f"A Domino drafter with pure_draft_prefix_len={config['pure_draft_prefix_len']} cannot be imported; 1 can."
        )
    return {"kind": "domino", "hidden": config["gru_hidden_dim"], "rank": config["emb_dim"]}


DOMINO = BlockKind(
    "domino",
    "DFlashDraftModel",
    names={
        "prefix_gru.weight_ih_l0": "reader.weight_ih",
        "prefix_gru.weight_hh_l0": "reader.weight_hh",
        "embed_proj.0.": "join.",
        "embed_proj.2.": "after.",
    },
    write_fields=write_fields,
    is_declared=lambda config: config.get("projector_type") == "domino",
    read_dependence=read_dependence,
    embeds_drafts=True,
    anchor_field="shift_label",
    draft_vocabulary=False,
)
FAMILIES = (
    make_block_family(
        DOMINO,
        {"domino": "Domino"},
        writers={},
        engines={
            "sglang": make_sglang_rules(
                SHORTER_NOTE,
                GREEDY_NOTE,
                options=[Clause(" --speculative-domino-candidate-pool-size 0")],
                drops_last=True,
            )
        },
    ),
)
