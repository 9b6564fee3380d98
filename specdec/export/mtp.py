"""An MTP module in MiMo's layout, which vLLM and SGLang serve with a dense target (docs/file-formats.md, section 9)."""

import copy
from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.export import layout
from specdec.export.layout import Layout
from specdec.heads.blocks import list_fields
from specdec.heads.mtp import MTP
from specdec.target.model import Target

MIMO = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"}
PREFIX = "model.mtp_layers.0."
MODULE_PREFIX = "modules_by_depth.0."  # its name among this project's tensors
NAMES = [(f"{own}.", f"{PREFIX}{public}.") for public, own in MIMO.items()]
NAMES += [("input_layernorm.", f"{PREFIX}input_layernorm."), ("block.", PREFIX)]
FIRST_ROW_NOTE = (
    "The engine's MTP classes set the embedding in the first row of a prompt to zero, which the training of this module did "
    "not (zero_first=false). Later rows attend to that row."
)
TARGET_FIELDS = ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "hidden_act",
            "rope_parameters")  # fmt: skip
TARGET_OVERRIDES = {"num_nextn_predict_layers": 1}  # fields of the target's configuration, where engines read them


def write_mimo(drafter: MTP) -> Layout:
    """Raises ValueError for modules that engines would run in another way than they were trained."""
    if drafter.depth not in (None, 1):
        raise ValueError(
            f"Engines run the first of these {drafter.depth} MTP modules for every draft. Train with num_modules=null, one "
            "module for all depths."
        )
    target, config = drafter.target, drafter.config
    target_fields = {"hidden_act": "silu", **list_fields(target.config)}
    target_fields["head_dim"] = target.width // (target_fields.get("num_attention_heads") or target.width)
    rope = target_fields["rope_parameters"] = dict(target_fields.get("rope_parameters") or {})
    if rope.get("partial_rotary_factor") == 1.0:
        del rope["partial_rotary_factor"]
    differs = [
        f"{name} is {target_fields.get(name)} and not {getattr(config, name)}"
        for name in TARGET_FIELDS
        if getattr(config, name) != target_fields.get(name)
    ]
    if target.recurrent or target.windowed:
        differs.append("layers have windows or a recurrence")
    if differs:
        raise ValueError(
            f"Engines build an MTP module as a layer of {target.name}, where {'; '.join(differs)}. Train with the target's sizes, or "
            "train an EAGLE-1 or EAGLE-3 head, which has its own."
        )
    module = drafter.module(1).state_dict()
    for projection in "qkv":  # engines leave a missing bias uninitialised
        weight = module[f"block.self_attn.{projection}_proj.weight"]
        module.setdefault(f"block.self_attn.{projection}_proj.bias", torch.zeros_like(weight[:, 0]))
    module["eh_proj.weight"] = swap_halves(module["eh_proj.weight"])
    fields = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",  # transformers has no MiMo
        **layout.write_layer_fields(config, target),
        "num_hidden_layers": target.num_layers,
        **TARGET_OVERRIDES,
        "torch_dtype": None,
    }
    return Layout(layout.rename_tensors(module, NAMES), fields)


def map_mtp_names(config: dict, names: Iterable[str]) -> dict[str, str]:
    """This project's name for each public name."""
    return {name: f"{MODULE_PREFIX}{layout.rename_prefix(name, layout.swap_names(NAMES))}" for name in names}


def read_mtp(config: dict, tensors: dict[str, Tensor], side_files: dict, target: Target) -> tuple[dict, dict]:
    """-> the arguments of `heads.mtp.MTP`, its tensors. Raises ValueError if they are no such module of this target."""
    module = layout.rename_tensors(tensors, layout.swap_names(NAMES))
    module["eh_proj.weight"] = swap_halves(module["eh_proj.weight"])
    biases = [f"block.self_attn.{part}_proj.bias" for part in "qkv"]
    biased = any(bool(module[name].any()) for name in biases)
    if not biased:
        module = {name: value for name, value in module.items() if name not in biases}
    sizes = layout.read_layer(config, target)
    if sizes.pop("block"):
        raise ValueError("The MTP module has other heads, norms or rotary embeddings than its target.")
    arguments = {
        "_target_": "specdec.heads.mtp.MTP",
        **sizes,
        "attention_bias": biased,
        "zero_first": True,
    }
    return arguments, {f"{MODULE_PREFIX}{name}": value for name, value in module.items()}


def zero_first_embedding(drafter: MTP) -> MTP:
    """The same module, as vLLM runs it: the embedding in the first slot of a text is zero."""
    drafter = copy.copy(drafter)
    drafter.zero_first = True
    return drafter


def swap_halves(weight: Tensor) -> Tensor:
    """weight [D, 2D] of a join: from MiMo's order (state, embedding) to this project's, or back"""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)
