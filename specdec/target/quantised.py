"""Quantised targets: the names of their methods, and models whose weights are dequantised while they are read.

Names and dtypes of the tensors say how each weight is stored (core/dequantise.py). The configuration names the method,
which is part of the fingerprint, and forms that are not read here, which are refused by name.
"""

import collections
import contextlib
import copy
import functools
import os
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.quantizers import AutoHfQuantizer

from specdec.core.dequantise import Form, PlainShards
from specdec.core.shards import Shards, fetch_file
from specdec.core.untrusted import read_json
from specdec.target.fingerprint import in_mtp_module

# What is read of ModelOpt (quant_algo), and of compressed-tensors (format)
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_BLOCK_SCALES", "NVFP4", "NVFP4_AWQ", "W4A16_NVFP4",
              "W4A8_MXFP4_FP8", "MXFP8", "MIXED_PRECISION")  # fmt: skip
FORMATS = ("naive-quantized", "float-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized",
           "mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision")  # fmt: skip
# Methods whose weights transformers keeps on CUDA, and the least compute capability
CUDA_METHODS = {"fp8": (8, 9), "mxfp8": (8, 9), "mxfp4": (7, 5)}
IN_ORDER = "HF_DEACTIVATE_ASYNC_LOAD"  # variable of transformers
METHODS = ("modelopt", "compressed-tensors", *CUDA_METHODS)
ADVICE = "let an engine read it (features.mode=engine), or choose a copy that is not quantised, or by another method"


def name_quantisation(config: PreTrainedConfig) -> str | None:
    """The quantisation method of a model's configuration and its bits, such as bitsandbytes-4bit or fp8; None: none."""
    fields = _read_settings(config)
    if not fields:
        return None
    kind = _name_number_type(fields)
    return "-".join(str(word).lower() for word in (_name_method(fields), kind) if word)


def find_modelopt(name: str, revision: str | None) -> dict[str, Any] | None:
    """A `quantization_config` from the file of ModelOpt beside a configuration; None: no file, or no algorithm."""
    path = fetch_file(name, "hf_quant_config.json", revision=revision)
    settings = None if path is None else read_json(path).get("quantization")
    if not isinstance(settings, dict) or settings.get("quant_algo") is None:
        return None
    return {**settings, "quant_method": "modelopt"}


def find_obstacle(config: PreTrainedConfig) -> str | None:
    """Why neither transformers nor the formulas here read a model's weights, as a clause; None: no reason is known."""
    fields = _read_settings(config)
    method = _name_method(fields)
    if method not in METHODS:
        if not fields or AutoHfQuantizer.supports_quant_method(fields):
            return None
        return f"is quantised by a method that transformers {transformers.__version__} does not know ({method})"
    key, known = ("quant_algo", ALGORITHMS) if method == "modelopt" else ("format", FORMATS)
    unknown = _list_values(fields, key) - set(known)
    if unknown:
        return f"is quantised by {method} with {key}={min(unknown)}, which is not read here"
    if (fields.get("transform_config") or {}).get("config_groups"):
        return f"is quantised by {method} with rotations (transform_config), which are not read here"
    return None


def is_read_here(config: PreTrainedConfig) -> bool:
    """Whether formulas here give the plain weights of a model's method."""
    return _name_method(_read_settings(config)) in METHODS


def is_dequantised(config: PreTrainedConfig, device: torch.device) -> bool:
    """Whether the weights of a model become plain while they are read here. device: the model's"""
    method = _name_method(_read_settings(config))
    if device.type == "cuda" and method in CUDA_METHODS:
        return torch.cuda.get_device_capability(device) < CUDA_METHODS[method]
    return is_read_here(config)


def describe_reading(config: PreTrainedConfig, shards: Shards | None) -> str:
    """A sentence on how a target's weights are read in process, or why not.

    shards: files, whose weights are counted by form if all are local. Raises ValueError for files that cannot be read.
    """
    label, obstacle = name_quantisation(config), find_obstacle(config)
    if label is None:
        return "Weights are not quantised."
    if obstacle is not None:
        return f"The target {obstacle}: {ADVICE}."
    if not is_read_here(config):
        return f"Weights are quantised ({label}); transformers reads them with the packages of that method."
    forms = "" if shards is None or not shards.is_local else f" ({_count_forms(list_forms(config, shards))})"
    capability = CUDA_METHODS.get(_name_method(_read_settings(config)))
    exception = (
        "" if capability is None else "; CUDA devices from {}.{} on compute with them as they are".format(*capability)
    )
    return f"Weights are quantised ({label}){forms}; they become plain ones while they are read{exception}."


def list_forms(config: PreTrainedConfig, shards: Shards) -> dict[str, Form]:
    """The forms of a target's weights by plain name, without MTP modules. Raises ValueError as `PlainShards`."""
    num_layers = config.get_text_config(decoder=True).num_hidden_layers
    return _view(shards).list_forms(lambda name: not in_mtp_module(name, num_layers))


def view_plain(config: PreTrainedConfig, shards: Shards) -> Shards:
    """The files of a model with plain weights, if they are quantised by a method that is read here."""
    return _view(shards) if is_read_here(config) else shards


@functools.lru_cache(maxsize=1)  # a target is read part by part
def _view(shards: Shards) -> PlainShards:
    return PlainShards(shards)


def check_forms(config: PreTrainedConfig, shards: Shards) -> None:
    """Raises ValueError, as `PlainShards`, for quantised weights that cannot be read."""
    if is_read_here(config):
        list_forms(config, shards)


def load_dequantised(
    model_class: type[PreTrainedModel], config: PreTrainedConfig, shards: Shards, **arguments: Any
) -> tuple[Any, dict]:
    """A model with plain weights, and transformers' report on names. arguments: more arguments of `from_pretrained`

    Each weight is dequantised when transformers puts it into the model, by its own names and conversions, and one after
    the other, because a weight in float32 takes more memory than it has in the file and in the model.
    """
    weights = {name: _LazyWeight(form) for name, form in list_forms(config, shards).items()}
    if model_class.config_class == config.sub_configs.get("text_config"):  # the text model of a multimodal one
        config = config.get_text_config(decoder=True)
    config = copy.deepcopy(config)
    vars(config).pop("quantization_config", None)
    with _load_in_order():
        loaded: Any = model_class.from_pretrained(
            None, config=config, state_dict=weights, output_loading_info=True, **arguments
        )
    model, loading_info = loaded
    model.name_or_path = model.config.name_or_path = shards.name
    with contextlib.suppress(OSError):  # not every folder has one
        model.generation_config = GenerationConfig.from_pretrained(shards.name, revision=shards.revision or "main")
    model._hf_peft_config_loaded = fetch_file(shards.name, "adapter_config.json", revision=shards.revision) is not None
    return model, loading_info


@contextlib.contextmanager
def _load_in_order() -> Iterator[None]:
    """Has transformers read no weight before it puts the last one into the model."""
    before = os.environ.get(IN_ORDER)
    os.environ[IN_ORDER] = "1"
    try:
        yield
    finally:
        os.environ.pop(IN_ORDER)
        if before is not None:
            os.environ[IN_ORDER] = before


class _LazyWeight:
    """A weight that is read when transformers takes its values, as from a file of safetensors."""

    def __init__(self, form: Form):
        self.form = form

    def __getitem__(self, index: Any) -> Tensor:
        return self.form.compute()[index]

    def get_shape(self) -> list[int]:
        return list(self.form.plain_shape)

    def get_dtype(self) -> str:
        """The dtype in the words of safetensors."""
        return self.form.plain_dtype


def _count_forms(forms: dict[str, Form]) -> str:
    """Numbers of weights by form, such as 12 nvfp4, 4 fp8, 20 plain."""
    counts = collections.Counter(form.method for form in forms.values())
    return ", ".join(f"{num} {method}" for method, num in counts.most_common())


def _read_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of `quantization_config`; empty: none."""
    settings = config.to_dict().get("quantization_config") or {}
    if not isinstance(settings, dict):
        raise ValueError(f"quantization_config={settings!r} of a config.json must be settings by name.")
    return settings


def _name_method(fields: dict[str, Any]) -> str:
    method = fields.get("quant_method", "unknown")
    return str(getattr(method, "value", method)).lower()


def _list_values(fields: dict[str, Any], key: str) -> set[str]:
    """The values of a field for the whole model, its groups and its layers; algorithms in capital letters."""
    parts = [fields, *(fields.get("config_groups") or {}).values(), *(fields.get("quantized_layers") or {}).values()]
    values = {str(part[key]) for part in parts if isinstance(part, dict) and part.get(key)}
    return {value.upper() for value in values} if key == "quant_algo" else values


def _name_number_type(fields: dict[str, Any]) -> str | None:
    """The type of quantised weights in a `quantization_config`, such as fp8 or 4bit; None: it names none."""
    groups = [group.get("weights") or {} for group in (fields.get("config_groups") or {}).values()]
    weights = groups[0] if groups else {}  # fields of compressed-tensors and ModelOpt
    bits = fields.get("bits") or weights.get("num_bits")
    for number in (8, 4):
        bits = number if fields.get(f"load_in_{number}bit") else bits
    if weights.get("type") == "float":
        return f"fp{bits}"
    return f"{bits}bit" if bits else fields.get("quant_algo")
