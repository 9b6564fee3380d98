"""MTP modules that a target ships in its own checkpoint, renamed to this project's names (docs/file-formats.md)."""

import re

import torch
from torch import Tensor

from specdec.core.shards import Shards
from specdec.target.model import Target

# This project's names for the tensors outside the block
DEEPSEEK = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"}
MIMO = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"}
COPIES = ("embed_tokens.weight", "shared_head.head.weight")  # copies of the target's own tensors


def read(target: Target) -> list[dict[str, Tensor]]:
    """One dictionary of `heads.mtp.Module` tensors for each module. Raises ValueError if the target ships none.

    Reads DeepSeek's layout (model.layers.L..) and MiMo's (model.mtp_layers.0..), both with a dense block.
    """
    layouts = (
        (re.compile(r"model\.mtp_layers\.(\d+)\.(.+)"), 0, MIMO, True),
        (re.compile(r"model\.layers\.(\d+)\.(.+)"), target.num_layers, DEEPSEEK, False),
    )
    try:
        shards = Shards(target.name)
    except ValueError as error:
        raise ValueError(f"{error} MTP modules are read from there: set native=false.") from error
    for pattern, first, names, hidden_first in layouts:
        modules: dict[int, dict[str, Tensor]] = {}
        for key in shards.files:
            match = pattern.fullmatch(key)
            if match and int(match[1]) >= first and match[2] not in COPIES:
                modules.setdefault(int(match[1]) - first, {})[_rename(match[2], names)] = shards[key]
        if modules:
            for tensors in modules.values():
                if hidden_first and "eh_proj.weight" in tensors:
                    tensors["eh_proj.weight"] = swap_halves(tensors["eh_proj.weight"])
            return [modules[number] for number in sorted(modules)]
    raise ValueError(f"{target.name} ships no MTP modules in the DeepSeek or the MiMo layout: set native=false.")


def swap_halves(weight: Tensor) -> Tensor:
    """weight [D, 2D] of a join: from MiMo's order (state, embedding) to this project's, or back"""
    return torch.cat(weight.chunk(2, dim=1)[::-1], dim=1)


def _rename(name: str, names: dict[str, str]) -> str:
    module, _, kind = name.rpartition(".")
    if module in names:
        return f"{names[module]}.{kind}"
    return name if module == "input_layernorm" else f"block.{name}"
