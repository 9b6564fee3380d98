"""Writes the quantised forms of a small target, rounded to the nearest value, and the plain target with those weights.

Layouts: compressed-tensors (github.com/vllm-project/compressed-tensors), AutoAWQ's GEMM version, GPTQ version 1, and
those of ModelOpt, DeepSeek and gpt-oss as shared/targets-2026.md gives them.
"""

import json
import re
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


def _modelopt(algorithm: str, **fields) -> dict:
    return {"quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            "ignore": ["lm_head", "model.layers.1*"], **fields}  # fmt: skip


INT8, FLOAT8 = {"num_bits": 8, "type": "int"}, {"num_bits": 8, "type": "float"}
FLOAT4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
BLOCKS = {"fp8_blocks": 48, "fp8_even_blocks": 32}  # rows and inputs; 48 divides no matrix of the tests
CONFIGS = {
    "w8a8": _compressed("int-quantized", INT8 | {"strategy": "channel"}, INT8),
    "w4a16": _compressed("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}),
    "fp8": _compressed("float-quantized", FLOAT8 | {"strategy": "channel"}, FLOAT8),
    "nvfp4": _compressed("nvfp4-pack-quantized", FLOAT4, FLOAT4),
    "fp8_blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 48]},
    "fp8_even_blocks": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]},
    "modelopt_fp8": _modelopt("FP8"),
    "modelopt_nvfp4": _modelopt("NVFP4", group_size=16),
    "modelopt_awq": _modelopt("NVFP4_AWQ", group_size=16),
    "modelopt_mixed": _modelopt("MIXED_PRECISION", quantized_layers={
        "model.layers.0.mlp.up_proj": {"quant_algo": "NVFP4", "group_size": 16},
        "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"}}),
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False, "lm_head": False},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"},
}  # fmt: skip
SERVED = ("w8a8", "w4a16", "fp8", "gptq", "awq")  # methods that vLLM's CPU build runs
LINEARS, EXPERTS = r".*_proj\.weight", r".*\.experts\.(gate_up|down)_proj"
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def quantise(
    source: Path,
    folder: Path,
    method: str,
    *,
    scale_factor: float = 1.0,
    names: str = LINEARS,
    plain: Path | None = None,
) -> Path:
    """Writes the target of the folder `source` with quantised layers -> folder. method: one of CONFIGS

    scale_factor: factor of the scales, for another form by the same method; names: pattern of the quantised weights
    plain: a folder for the target with the same rounded weights, plain in float32
    """
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    stored, rounded = {}, {}
    for name, value in safetensors.torch.load_file(source / "model.safetensors").items():
        stored[name], rounded[name] = value, value.float()
        if re.fullmatch(EXPERTS if method == "mxfp4" else names, name):
            del stored[name]
            entries, rounded[name] = _quantise(name, value.float(), method, scale_factor, value.dtype)
            stored |= {key: entry.contiguous() for key, entry in entries.items()}
    _save(stored, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": CONFIGS[method]}, indent=1))
    if plain is not None:
        shutil.copytree(source, plain, ignore=shutil.ignore_patterns("*.safetensors*"))
        _save({name: value.contiguous() for name, value in rounded.items()}, plain)
    return folder


def _save(tensors: dict[str, Tensor], folder: Path) -> None:
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def _quantise(
    name: str, weight: Tensor, method: str, scale_factor: float, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """weight [out, in], or experts [E, in, out] -> the tensors that take its place by name, and their rounded weight"""
    if method == "mxfp4":
        values, rounded = _round_mxfp4(weight.transpose(1, 2))
        return {name + key: value for key, value in values.items()}, rounded.transpose(1, 2)
    if method == "modelopt_mixed":
        method = "modelopt_fp8" if "self_attn" in name else "modelopt_nvfp4"
    if method.startswith("modelopt") or method in ("nvfp4", *BLOCKS):
        entries, rounded = _quantise_floats(weight, method, scale_factor)
    else:
        entries, rounded = _quantise_layer(weight, method, scale_factor, dtype)
    stem = name.removesuffix("weight")
    if method.startswith("modelopt"):
        entries["input_scale"] = torch.tensor(0.01)  # of what a layer reads: no part of the weight
        if "k_proj" in name:
            entries["k_scale"] = torch.tensor(0.02)
    return {stem + key: entry for key, entry in entries.items()}, rounded


def _quantise_floats(weight: Tensor, method: str, scale_factor: float) -> tuple[dict[str, Tensor], Tensor]:
    """weight [out, in] in float8 or E2M1"""
    if method == "modelopt_fp8":
        scale = scale_factor * weight.abs().amax() / 448
        values = (weight / scale).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale": scale}, _multiply(values, scale)
    if method in BLOCKS:
        size = BLOCKS[method]
        rows = -(-weight.shape[0] // size)
        blocks = [block.abs().amax() for row in weight.split(size) for block in row.split(size, 1)]
        scale = scale_factor * torch.stack(blocks).reshape(rows, -1) / 448
        wide = scale.repeat_interleave(size, 0).repeat_interleave(size, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
        values = (weight / wide).to(torch.float8_e4m3fn)
        return {"weight": values, "weight_scale_inv": scale}, _multiply(values, wide)
    smooth = torch.linspace(0.5, 2, weight.shape[1]) if method == "modelopt_awq" else torch.ones(weight.shape[1])
    whole = scale_factor * weight.abs().amax() / (6 * 448)
    global_scale = 1 / whole if method == "nvfp4" else whole
    multiplier = 1 / global_scale.double() if method == "nvfp4" else whole.double()
    groups = (weight / smooth).unflatten(1, (-1, 16))
    scale = (groups.abs().amax(2) / 6 / whole).to(torch.float8_e4m3fn)  # [out, in / 16]
    step = scale.float()[..., None] * whole
    codes = _round_e2m1(torch.where(step > 0, groups / step, 0.0))
    rounded = (_read_e2m1(codes).double() * scale.double()[..., None] * multiplier).flatten(1).float() * smooth
    entries = {"weight_packed" if method == "nvfp4" else "weight": _pair(codes.flatten(1)), "weight_scale": scale}
    if method == "nvfp4":
        return entries | {"weight_global_scale": global_scale[None]}, rounded
    extras = {"pre_quant_scale": smooth} if method == "modelopt_awq" else {}
    return entries | {"weight_scale_2": whole} | extras, rounded


def _round_mxfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    """weight [E, out, in] -> blocks and scales of gpt-oss, and the rounded weight"""
    groups = weight.unflatten(2, (-1, 32))
    exponents = torch.log2(groups.abs().amax(3) / 6).ceil()  # [E, out, in / 32]
    codes = _round_e2m1(groups / 2 ** exponents[..., None])
    entries = {"_blocks": _pair(codes), "_scales": (exponents + 127).to(torch.uint8)}
    return entries, (_read_e2m1(codes) * 2 ** exponents[..., None]).flatten(2)


def _round_e2m1(values: Tensor) -> Tensor:
    """Codes 0..15 of the nearest values"""
    nearest = (values.abs()[..., None] - E2M1).abs().argmin(-1)
    return nearest + 8 * (values < 0)


def _read_e2m1(codes: Tensor) -> Tensor:
    return torch.where(codes < 8, 1, -1) * E2M1[codes % 8]


def _pair(codes: Tensor) -> Tensor:
    """Codes [.., n] -> bytes [.., n / 2], the first code of a pair in the low bits"""
    pairs = codes.unflatten(-1, (-1, 2))
    return (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)


def _multiply(values: Tensor, scale: Tensor) -> Tensor:
    return (values.double() * scale.double()).float()


def _quantise_layer(
    weight: Tensor, method: str, scale_factor: float, dtype: torch.dtype
) -> tuple[dict[str, Tensor], Tensor]:
    """weight [out, in] in integers or, with a scale for each row, float8"""
    if method in ("w8a8", "fp8"):
        largest = 127 if method == "w8a8" else 448
        scale = scale_factor * weight.abs().amax(1, keepdim=True) / largest  # [out, 1]
        values = weight / scale
        stored = values.round().to(torch.int8) if method == "w8a8" else values.to(torch.float8_e4m3fn)
        return {"weight": stored, "weight_scale": scale.to(dtype)}, _multiply(stored, scale.to(dtype))
    groups = weight.unflatten(1, (-1, GROUP))
    scale = scale_factor * groups.abs().amax(2) / 7  # [out, in / GROUP]
    values = (groups / scale[..., None]).round().clamp(-8, 7).flatten(1).to(torch.int64) + 8  # [out, in], 0..15
    rounded = _multiply(values - 8, scale.to(dtype).repeat_interleave(GROUP, 1))
    if method == "w4a16":
        shape = torch.tensor(weight.shape)
        return {"weight_packed": _pack(values), "weight_scale": scale.to(dtype), "weight_shape": shape}, rounded
    columns = {"scales": scale.T.half(), "qzeros": torch.full_like(scale.T, 8, dtype=torch.int64)}
    if method == "gptq":  # zero points are stored less one
        index = torch.arange(weight.shape[1], dtype=torch.int32) // GROUP
        zeros = _pack(columns["qzeros"] - 1)
        return columns | {"qweight": _pack(values).T, "qzeros": zeros, "g_idx": index}, rounded
    return columns | {"qweight": _pack(values.T, AWQ_ORDER), "qzeros": _pack(columns["qzeros"], AWQ_ORDER)}, rounded


def _pack(values: Tensor, order: tuple[int, ...] = tuple(range(8))) -> Tensor:
    """[rows, n] of 0..15 -> int32 [rows, n / 8], the first one of `order` in the lowest bits"""
    digits = values.unflatten(1, (-1, 8))[..., list(order)]
    packed = sum(digits[..., digit] << 4 * digit for digit in range(8))
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
