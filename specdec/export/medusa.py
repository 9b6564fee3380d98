"""Medusa heads: vLLM's names, those of the reference code, and the way back (docs/file-formats.md, section 7)."""

import re
from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.export import layout
from specdec.export.layout import Layout
from specdec.heads.medusa import Medusa
from specdec.target.model import Target

HEADS_FILE = "medusa_lm_head.pt"
ADAPTED_REFUSAL = (
    "Medusa-2 heads were trained with an adapted target and draft badly beside the original one. Export both with "
    "merged_target=DIR, which writes the adapted model for the engine to serve."
)
# The names of both layouts
BLOCK = re.compile(r"(?:(\d+)\.(\d+)\.linear|blocks\.(\d+)\.layers\.(\d+))\.(weight|bias)")
LM_HEAD = re.compile(r"(\d+)\.\d+\.weight|lm_heads\.(\d+)\.weight")


def write_vllm(drafter: Medusa) -> Layout:
    """Borrowed LM heads become one for all, over all V tokens: vLLM 0.32 cannot load a `token_map`.

    Raises ValueError for LM heads of their own over a draft vocabulary.
    """
    has_own_heads = len(drafter.lm_heads) > 0
    _check_vocab(drafter)
    tensors = _write_blocks(drafter, "blocks.{}.layers.{}.")
    if has_own_heads:
        tensors |= {f"lm_heads.{name}": value for name, value in drafter.lm_heads.state_dict().items()}
    else:
        tensors["lm_head.weight"] = drafter.target.lm_head.weight
    counts = {"num_heads": drafter.depth, "num_hidden_layers": len(drafter.blocks[0])}
    config = _make_config(drafter, counts, {"original_lm_head": not has_own_heads})
    return Layout(tensors, config)


def write_reference(drafter: Medusa) -> Layout:
    """FasterDecoding's layout, which vLLM and TGI read too: an LM head for each Medusa head, over the whole vocabulary.

    Raises ValueError for a head of several blocks, which share their weights there, and for LM heads of their own over a
    draft vocabulary.
    """
    if len(drafter.blocks[0]) > 1:
        raise ValueError(
            "The reference code repeats one block where a head has several. Train with num_blocks=1, or take format=vllm."
        )
    _check_vocab(drafter)
    tensors = _write_blocks(drafter, "{}.{}.linear.")
    lm_heads = [head.weight for head in drafter.lm_heads] or [drafter.target.lm_head.weight] * len(drafter.blocks)
    # without clones, safetensors refuses the shared storage
    tensors |= {f"{number}.1.weight": weight.detach().clone() for number, weight in enumerate(lm_heads)}
    counts = {"medusa_num_heads": drafter.depth, "medusa_num_layers": 1}
    config = _make_config(drafter, counts, {"base_model_name_or_path": drafter.target.name})
    return Layout(tensors, config, {HEADS_FILE: tensors})


def _make_config(drafter: Medusa, counts: dict, layout_fields: dict) -> dict:
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": drafter.target.width,
        "vocab_size": drafter.target.vocab_size,
        **counts,
        "medusa_fc_bias": True,
        **layout_fields,
        "torch_dtype": None,
    }


def _check_vocab(drafter: Medusa) -> None:
    if drafter.lm_heads and drafter.draft_to_target is not None:
        raise ValueError(
            "Engines run Medusa's own LM heads over the whole vocabulary only. Train with vocab_size=null or own_output=false."
        )


def _write_blocks(drafter: Medusa, prefix: str) -> dict[str, Tensor]:
    tensors = {}
    for name, value in drafter.blocks.state_dict().items():  # 0.1.linear.weight: head 0, block 1
        number, block, _, kind = name.split(".")
        tensors[prefix.format(number, block) + kind] = value
    return tensors


def map_medusa_names(config: dict, names: Iterable[str]) -> dict[str, str]:
    """This project's name for each public name. One LM head for all is the first one."""
    own_names = {}
    for name in names:
        short_name = name.removeprefix("medusa_heads.")
        if short_name in ("lm_head.weight", "token_map"):
            own_names[name] = {"token_map": "draft_to_target"}.get(short_name, "lm_heads.0.weight")
        elif head := LM_HEAD.fullmatch(short_name):
            own_names[name] = f"lm_heads.{head[1] or head[2]}.weight"
        elif block := BLOCK.fullmatch(short_name):
            own_names[name] = f"blocks.{block[1] or block[3]}.{block[2] or block[4]}.linear.{block[5]}"
        else:
            raise ValueError(f"{name} belongs to no Medusa head.")
    return own_names


def read_medusa(config: dict, tensors: dict[str, Tensor], side_files: dict, target: Target) -> tuple[dict, dict]:
    """-> the arguments of `heads.medusa.Medusa`, its tensors. Raises ValueError if they are no Medusa heads of this target.

    Reads both layouts. LM heads that are copies of the target's are not kept.
    """
    names = map_medusa_names(config, tensors)
    vocab = next((value for name, value in tensors.items() if name.endswith("token_map")), None)
    shared_lm_head = next((value for name, value in tensors.items() if name.endswith("lm_head.weight")), None)
    head_tensors = {names[name]: value for name, value in tensors.items() if names[name].startswith("blocks.")}
    lm_heads = {names[name]: value for name, value in tensors.items() if names[name].startswith("lm_heads.")}
    if not head_tensors:
        raise ValueError("There are no Medusa heads among the tensors.")
    num_heads, num_blocks = (1 + max(int(name.split(".")[place]) for name in head_tensors) for place in (1, 2))
    for name in [name for name in head_tensors if name.endswith(".weight")]:
        head_tensors.setdefault(name.replace("weight", "bias"), torch.zeros_like(head_tensors[name][:, 0]))
    if vocab is not None:  # a draft vocabulary is increasing here
        vocab, order = vocab.sort()
        lm_heads = {name: value[order] for name, value in lm_heads.items()}
    original = layout.select_lm_head(target, vocab)
    borrowed = all(layout.is_copy(value, original) for value in lm_heads.values())
    if not borrowed:
        if shared_lm_head is not None:
            lm_heads = {f"lm_heads.{number}.weight": lm_heads["lm_heads.0.weight"] for number in range(num_heads)}
        head_tensors |= lm_heads
    if vocab is not None:
        head_tensors["draft_to_target"] = vocab
    arguments = {"num_heads": num_heads, "num_blocks": num_blocks, "own_output": not borrowed}
    return {"_target_": "specdec.heads.medusa.Medusa", **arguments}, head_tensors
