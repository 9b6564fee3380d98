"""Writes the quantised forms of a small target that engines and transformers read, rounded to the nearest value.

Layouts: compressed-tensors (github.com/vllm-project/compressed-tensors), AutoAWQ's GEMM version, and GPTQ version 1.
"""

import json
import shutil
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

GROUP = 32  # inputs that share a scale
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of the columns in the four bits of an int32, from the lowest ones
WEIGHTS = {"symmetric": True, "dynamic": False, "observer": "minmax"}
INPUTS = {"symmetric": True, "dynamic": True, "strategy": "token", "observer": None}


def _compressed(form: str, weights: dict, inputs: dict | None = None) -> dict:
    group = {"targets": ["Linear"], "weights": WEIGHTS | weights, "input_activations": inputs and INPUTS | inputs}
    return {"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed",
            "config_groups": {"group_0": group}, "ignore": ["lm_head"]}  # fmt: skip


INT8, FLOAT8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
CONFIGS = {
    "w8a8": _compressed("int-quantized", INT8 | {"strategy": "channel"}, INT8),
    "w4a16": _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
    "fp8": _compressed("float-quantized", FLOAT8 | {"strategy": "channel"}, FLOAT8),
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "lm_head": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}  # fmt: skip


def quantise(source: Path, folder: Path, method: str, *, scale_factor: float = 1.0) -> Path:
    """Writes the target of the folder `source` with quantised layers -> folder. method: one of CONFIGS

    more: a factor for the scales, for another form by the same method
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    tensors = {}
    for name, value in safetensors.torch.load_file(source / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            quantised = _quantise(value.float(), method, scale_factor, value.dtype)
            tensors |= {name.removesuffix("weight") + key: entry.contiguous() for key, entry in quantised.items()}
        else:
            tensors[name] = value
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": CONFIGS[method]}, indent=1))
    return folder


def _quantise(weight: Tensor, method: str, scale_factor: float, dtype: torch.dtype) -> dict[str, Tensor]:
    """weight [out, in] -> the tensors that take its place"""
    if method in ("w8a8", "fp8"):
        largest = 127 if method == "w8a8" else 448
        scale = scale_factor * weight.abs().amax(1, keepdim=True) / largest  # [out, 1]
        values = weight / scale
        stored = values.round().to(torch.int8) if method == "w8a8" else values.to(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale": scale.to(dtype)}
    groups = weight.unflatten(1, (-1, GROUP))
    scale = scale_factor * groups.abs().amax(2) / 7  # [out, in / GROUP]
    values = (groups / scale[..., None]).round().clamp(-8, 7).flatten(1).to(torch.int64) + 8  # [out, in], 0..15
    if method == "w4a16":
        shape = torch.tensor(weight.shape)
        return {"weight_packed": _pack(values), "weight_scale": scale.to(dtype), "weight_shape": shape}
    columns = {"scales": scale.T.half(), "qzeros": torch.full_like(scale.T, 8, dtype=torch.int64)}
    if method == "gptq":  # zero points are stored less one
        index = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
        return columns | {"qweight": _pack(values).T, "qzeros": _pack(columns["qzeros"] - 1), "g_idx": index}
    return columns | {"qweight": _pack(values.T, AWQ_ORDER), "qzeros": _pack(columns["qzeros"], AWQ_ORDER)}


def _pack(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[rows, n] of 0..15 -> int32 [rows, n / 8], the first one of `order` in the lowest bits"""
    digits = values.unflatten(1, (-1, 8))[..., list(order)]
    packed = sum(digits[..., digit] << 4 * digit for digit in range(8))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
