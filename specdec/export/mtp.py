"""An MTP module in MiMo's layout, which vLLM and SGLang serve with a dense target (docs/file-formats.md, section 9)."""

import torch
from torch import Tensor

from specdec.export import layout
from specdec.export.layout import Layout
from specdec.heads.blocks import fields_of
from specdec.heads.mtp import MTP
from specdec.heads.native import MIMO, swap_halves
from specdec.target.model import Target

PREFIX = "model.mtp_layers.0."
NAMES = [(f"{own}.", f"{PREFIX}{public}.") for public, own in MIMO.items()]
NAMES += [("input_layernorm.", f"{PREFIX}input_layernorm."), ("block.", PREFIX)]
FIRST_ROW = (
    "The engine's MTP classes set the embedding in the first row of a prompt to zero, which the training of this module did "
    "not (zero_first=false). Later rows attend to that row."
)
OVERRIDE = {"num_nextn_predict_layers": 1}  # fields of the target's configuration, where engines read them


def mimo(drafter: MTP) -> Layout:
    """Raises ValueError for modules that engines would run in another way than they were trained."""
    if drafter.depth not in (None, 1):
        raise ValueError(
            f"Engines run the first of these {drafter.depth} MTP modules for every draft. Train with num_modules=null, one "
            "module for all depths."
        )
    target, config = drafter.target, drafter.config
    of_target = fields_of(target.config)
    rope = dict(of_target.get("rope_parameters") or {})
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            "Engines rotate only a part of each attention head of an MTP module, as this target does, and this module rotates all of it."
        )
    if target.recurrent or target.windowed or rope != config.rope_parameters:
        raise ValueError(
            f"Engines build an MTP module as a layer of {target.name}, whose layers have windows, a recurrence or another rotary "
            "embedding than this module. Train an EAGLE-1 or EAGLE-3 head, which has its own."
        )
    of_target["head_dim"] = target.width // (of_target.get("num_attention_heads") or target.width)
    for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps"):
        if getattr(config, key) != of_target.get(key):
            raise ValueError(
                f"Engines build MTP modules by the target's configuration, where {key} is {of_target.get(key)} and not "
                f"{getattr(config, key)}. Train with the target's sizes, or train an EAGLE-1 head, which has its own."
            )
    if of_target.get("hidden_act", "silu") != "silu":
        raise ValueError(f"Engines run MTP modules with the target's {of_target['hidden_act']}, and this one has silu.")
    module = drafter.module(1).state_dict()
    for part in "qkv":  # engines leave a missing bias uninitialised
        weight = module[f"block.self_attn.{part}_proj.weight"]
        module.setdefault(f"block.self_attn.{part}_proj.bias", torch.zeros_like(weight[:, 0]))
    module["eh_proj.weight"] = swap_halves(module["eh_proj.weight"])
    fields = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",  # transformers has no MiMo
        **layout.block_fields(config, target),
        "num_hidden_layers": target.num_layers,
        **OVERRIDE,
        "torch_dtype": None,
    }
    return Layout(layout.rename(module, NAMES), fields)


def read_mtp(config: dict, tensors: dict[str, Tensor], target: Target) -> tuple[dict, dict]:
    """-> the arguments of `heads.mtp.MTP`, its tensors. Raises ValueError if they are no such module of this target."""
    module = layout.rename(tensors, layout.swap(NAMES))
    module["eh_proj.weight"] = swap_halves(module["eh_proj.weight"])
    biases = [f"block.self_attn.{part}_proj.bias" for part in "qkv"]
    biased = any(bool(module[name].any()) for name in biases)
    if not biased:
        module = {name: value for name, value in module.items() if name not in biases}
    sizes = layout.read_block(config, target)
    if sizes.pop("block"):
        raise ValueError("The MTP module has other heads, norms or rotary embeddings than its target.")
    arguments = {
        "_target_": "specdec.heads.mtp.MTP",
        **sizes,
        "native": False,
        "attention_bias": biased,
        "zero_first": True,
    }
    return arguments, {f"modules_by_depth.0.{name}": value for name, value in module.items()}
