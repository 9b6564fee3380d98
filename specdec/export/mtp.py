"""An MTP module in MiMo's layout, which vLLM and SGLang serve with a dense target (docs/file-formats.md, section 9)."""

import copy
import json
from collections.abc import Iterable

import torch
from torch import Tensor

from specdec.export import layout
from specdec.export.family import (
    FIRST_DRAFT,
    SAMPLING_NOTE,
    SGLANG_STEPS,
    SGLANG_WINDOW,
    Clause,
    EngineRules,
    ExportFamily,
    PublishedFiles,
    RestoredHead,
    note_full_attention,
)
from specdec.export.layout import Layout, Parsed
from specdec.heads.blocks import list_fields
from specdec.heads.mtp import MTP
from specdec.target.model import Target

MIMO = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"}
PREFIX = "model.mtp_layers.0."
MODULE_PREFIX = "modules_by_depth.0."  # its name among this project's tensors
NAMES = [(f"{own}.", f"{PREFIX}{public}.") for public, own in MIMO.items()]
NAMES += [("input_layernorm.", f"{PREFIX}input_layernorm."), ("block.", PREFIX)]
BUILT_NOTE = Clause("vLLM builds the module from the target's configuration, which --hf-overrides changes for that.")
BIASES = [f"block.self_attn.{projection}_proj.bias" for projection in "qkv"]
FIRST_ROW_NOTE = Clause(
    "The engine's MTP classes set the embedding in the first row of a prompt to zero, which the training of this "
    "module did not (zero_first=false). Later rows attend to that row.",
    lambda drafter: not drafter.zero_first,
)
TARGET_FIELDS = (  # sizes that engines take from the target's configuration
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "hidden_act",
    "rope_parameters",
)
TARGET_OVERRIDES = {"num_nextn_predict_layers": 1}  # fields of the target's configuration, where engines read them
OVERRIDE_OPTION = Clause(" --hf-overrides '{value}'", lambda drafter: json.dumps(TARGET_OVERRIDES))


def write_mimo(drafter: MTP) -> Layout:
    """One MTP module in MiMo's layout. Raises ValueError for modules that engines would run otherwise."""
    if drafter.depth not in (None, 1):
        raise ValueError(
            f"Engines run the first of these {drafter.depth} MTP modules for every draft. Train with num_modules=null, "
            "one module for all depths."
        )
    differences = list_differences(drafter)
    if differences:
        raise ValueError(
            f"Engines build an MTP module as a layer of {drafter.target.name}, where {'; '.join(differences)}. Train "
            "with the target's sizes, or train an EAGLE-1 or EAGLE-3 head, which has its own."
        )
    module = drafter.module(1).state_dict()
    for name in BIASES:  # engines leave a missing bias uninitialised
        module.setdefault(name, torch.zeros_like(module[name.replace("bias", "weight")][:, 0]))
    module["eh_proj.weight"] = swap_halves(module["eh_proj.weight"])
    fields = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",  # transformers has no MiMo
        **layout.write_layer_fields(drafter.config, drafter.target),
        "num_hidden_layers": drafter.target.num_layers,
        **TARGET_OVERRIDES,
        "torch_dtype": None,
    }
    return Layout(layout.rename_tensors(module, NAMES), fields)


def list_differences(drafter: MTP) -> list[str]:
    """The settings of the module's layer that are not its target's."""
    target, config = drafter.target, drafter.config
    target_fields = {"hidden_act": "silu", **list_fields(target.config)}
    target_fields["head_dim"] = target.width // (target_fields.get("num_attention_heads") or target.width)
    rope = target_fields["rope_parameters"] = dict(target_fields.get("rope_parameters") or {})
    if rope.get("partial_rotary_factor") == 1.0:
        del rope["partial_rotary_factor"]
    differences = [
        f"{name} is {target_fields.get(name)} and not {getattr(config, name)}"
        for name in TARGET_FIELDS
        if getattr(config, name) != target_fields.get(name)
    ]
    if target.recurrent or target.windowed:
        differences.append("layers have windows or a recurrence")
    return differences


def map_mtp_names(config: dict, names: Iterable[str]) -> dict[str, str]:
    """This project's name for each public name."""
    return {name: f"{MODULE_PREFIX}{layout.rename_prefix(name, layout.swap_names(NAMES))}" for name in names}


def read_mtp(files: PublishedFiles, target: Target) -> Parsed:
    """The arguments of `heads.mtp.MTP`, and its tensors.

    Raises ValueError if they are no such module of this target.
    """
    module = layout.rename_tensors(files.tensors, layout.swap_names(NAMES))
    module["eh_proj.weight"] = swap_halves(module["eh_proj.weight"])
    biased = any(bool(module[name].any()) for name in BIASES)
    if not biased:
        module = {name: value for name, value in module.items() if name not in BIASES}
    sizes = layout.read_layer(files.flat, target)
    if sizes.pop("block"):
        raise ValueError("The MTP module has other heads, norms or rotary embeddings than its target.")
    arguments = {"_target_": MTP_FAMILY.head, **sizes, "attention_bias": biased, "zero_first": True}
    return arguments, {f"{MODULE_PREFIX}{name}": value for name, value in module.items()}


def zero_first_embedding(drafter: MTP) -> MTP:
    """The same module as vLLM runs it, with an embedding of zero in the first slot of a text."""
    drafter = copy.copy(drafter)
    drafter.zero_first = True
    return drafter


def swap_halves(weight: Tensor) -> Tensor:
    """The weight [D, 2D] of a join, from MiMo's order (state, embedding) to this project's, or back."""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def restore_halves(restored: RestoredHead) -> None:
    """Puts the halves of the projection back into MiMo's order."""
    name = f"{PREFIX}input_proj.weight"
    restored.tensors[name] = swap_halves(restored.tensors[name])


MTP_FAMILY = ExportFamily(
    kind="mtp",
    head_class=MTP,
    labels={"mtp": "MTP, one module"},
    inputs="last_state",
    recognises=lambda files: any("mtp_layers" in name for name in files.tensors),
    read=read_mtp,
    public_names=map_mtp_names,
    draft_vocabulary=False,
    writers={"": write_mimo},
    engines={
        "sglang": EngineRules(
            options=[SGLANG_STEPS, SGLANG_WINDOW], notes=[FIRST_ROW_NOTE, note_full_attention("SGLang", FIRST_DRAFT)]
        ),
        "vllm": EngineRules(
            options=[OVERRIDE_OPTION], notes=[SAMPLING_NOTE, BUILT_NOTE, FIRST_ROW_NOTE, note_full_attention("vLLM")]
        ),
    },
    restore_steps=(restore_halves,),
)
FAMILIES = (MTP_FAMILY,)
