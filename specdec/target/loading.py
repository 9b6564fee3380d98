"""Loads a target's model and its tokenizer from a folder or the Hugging Face Hub, and refuses what cannot be a target."""

import contextlib
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.quantizers import AutoHfQuantizer
from transformers.utils import is_accelerate_available

from specdec.core import files, hub, precision, token_text
from specdec.core.devices import name_cause, numbered, out_of_memory
from specdec.core.shards import Shards
from specdec.target import attention
from specdec.target.structure import check_supported, find_blocks

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16, "float64": torch.float64}
DEVICES = "Give cpu, cuda, a numbered one such as cuda:1, or auto (the layers spread over all accelerators)"


def load_model(
    name: str, *, dtype: str, device: str | torch.device, revision: str | None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, str | None]:
    """Each tensor goes from the file to its device; the host never holds a second copy of the weights.

    name: a folder, or a name on the Hugging Face Hub; dtype: one of DTYPES, for what is not quantised, or auto (precision.py)
    trust_remote_code: whether code that the folder brings may run; it has all rights of the user
    device: a device; or "auto": the layers in equal shares over all accelerators, everything else on the first
    -> the model, and how its checkpoint is quantised (None: not). Raises ValueError with what to do.
    """
    devices = find_devices(device)
    dtype = dtype_for(dtype, devices[0])
    origin: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = load_config(name, **origin)
    quantisation = quantisation_of(config)
    if quantisation is not None and not AutoHfQuantizer.supports_quant_method(config.to_dict()["quantization_config"]):
        raise ValueError(
            f"{name} is quantised by a method that transformers {transformers.__version__} does not know ({quantisation}): let an "
            "engine read it (features.mode=engine), or choose a copy that is not quantised, or by another method."
        )
    factory, model_class = _find_class(name, config, **origin)
    with_accelerate = is_accelerate_available()  # in the extra `train`
    if len(devices) > 1 and not with_accelerate:
        raise ValueError("device=auto needs the package accelerate: pip install 'specdec[train]', or give one device.")
    places: Any = {"device_map": _device_map(factory, config, devices, trust_remote_code)} if with_accelerate else {}
    try:
        if quantisation is not None and quantisation.startswith("compressed-tensors"):
            # Otherwise layers are unpacked when the whole model is first called, and here its parts are called
            config.quantization_config = {**config.quantization_config, "dequantize": True}
            places["config"] = config
        model, about = _read(
            factory.from_pretrained, name, dtype=DTYPES[dtype], output_loading_info=True,
            attn_implementation=attention.implementation(model_class), **origin, **places,
        )  # fmt: skip
        model = model if with_accelerate else model.to(devices[0])
    except (ImportError, RuntimeError, MemoryError) as error:
        if out_of_memory(error):
            raise ValueError(
                f"{name} does not fit into the memory of device={device} ({name_cause(error)}). Use device=auto with more "
                "accelerators, or a quantised or smaller target."
            ) from error
        if quantisation is None:
            raise
        raise ValueError(
            f"{name} is quantised ({quantisation}) and cannot be loaded here ({' '.join(str(error).split())}). Install what it "
            "names, use another machine, or choose a target that is not quantised."
        ) from error
    check_complete(model, about, name)
    precision.prepare_few_rows(model)
    return model, quantisation


def load_skeleton(
    name: str, *, dtype: str, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, str | None]:
    """A model whose parameters and buffers have shapes and no values (device meta); arguments and result as of `load_model`.

    dtype: one of DTYPES
    """
    origin: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    model, quantisation = make_skeleton(load_config(name, **origin), name, dtype=dtype, **origin)
    with contextlib.suppress(OSError):  # not every folder has one
        model.generation_config = GenerationConfig.from_pretrained(name, revision=revision or "main")
    return model, quantisation


def make_skeleton(
    config: PreTrainedConfig, name: str, *, dtype: str, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, str | None]:
    """As `load_skeleton`, of a configuration that has been read."""
    factory, model_class = _find_class(name, config, revision=revision, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = factory.from_config(
            config, dtype=DTYPES[dtype], attn_implementation=attention.implementation(model_class),
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    for module in model.modules():
        for key, value in module.named_parameters(recurse=False):
            if not value.is_meta:  # DiffLlama draws some by torch.normal, which gives them random values all the same
                setattr(module, key, nn.Parameter(value.to("meta"), requires_grad=False))
    return model, quantisation_of(config)


def _find_class(
    name: str, config: PreTrainedConfig, *, revision: str | None, trust_remote_code: bool
) -> tuple[Any, type[PreTrainedModel]]:
    """The factory of transformers for this model, and the class that it makes.

    The class may be of code that the folder brings, if that may run; then this runs it. Raises ValueError for layers that
    cannot be those of a target.
    """
    check_supported(config.get_text_config(decoder=True), name)
    place = (config.to_dict().get("auto_map") or {}).get("AutoModelForCausalLM")
    if trust_remote_code and place is not None:
        return AutoModelForCausalLM, get_class_from_dynamic_module(place, name, revision=revision)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM, cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    found = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return AutoModelForImageTextToText, cast(type[PreTrainedModel], found)


def load_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model that may be a target. Raises ValueError with what to do."""
    config = _read(AutoConfig.from_pretrained, name, revision=revision, trust_remote_code=trust_remote_code)
    fields = config.to_dict()
    own_class = trust_remote_code and "AutoModelForCausalLM" in (fields.get("auto_map") or {})
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if fields.get("is_encoder_decoder") or not (own_class or known):
        raise ValueError(
            f"{name} is a {config.model_type} model; a target must be a causal language model (decoder only), such as one of the "
            "Llama, Qwen or Mistral family."
        )
    return config


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> transformers.PreTrainedTokenizerBase:
    """name: a folder, or a name on the Hugging Face Hub. Raises ValueError with what to do.

    Texts with ids that the model has no embedding for are refused later, and plain text begins as the model expects it (core/token_text.py).
    """
    name = files.expand_home(name)
    origin: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = _read(AutoTokenizer.from_pretrained, name, **origin)
    with contextlib.suppress(ValueError, AttributeError):  # a tokenizer without a model
        config = _read(AutoConfig.from_pretrained, name, **origin).get_text_config(decoder=True)
        token_text.limit_ids(tokenizer, config.vocab_size)
    token_text.expect_opening(tokenizer, name, **origin)
    return tokenizer


def spread(model: PreTrainedModel, num_layers: int, devices: list[torch.device]) -> dict[str, torch.device]:
    """The device of every part of a model: its layers in equal shares and in order, everything else on the first device.

    So tokens go in, and final states and logits come out, on the first device.
    """
    layers = find_blocks(model.get_decoder(), num_layers, type(model).__name__)

    def parts_of(name: str, part: nn.Module) -> dict[str, torch.device]:
        if isinstance(part, nn.ModuleList) and list(part) == layers:
            return {f"{name}.{n}": devices[n * len(devices) // len(layers)] for n in range(len(layers))}
        if all(inside is not layers[0] for inside in part.modules()):
            return {name: devices[0]}
        inner = [parts_of(f"{name}.{child}".lstrip("."), module) for child, module in part.named_children()]
        return {key: device for found in inner for key, device in found.items()}

    return parts_of("", model)


def dtype_for(dtype: str, device: torch.device) -> str:
    """The name of a dtype in DTYPES, or what `auto` is on this device. Raises ValueError for a name that is neither."""
    if dtype not in (*DTYPES, precision.AUTO):
        raise ValueError(f"dtype={dtype} must be auto, or one of {', '.join(DTYPES)}.")
    return precision.resolve(dtype, device)


def find_devices(device: str | torch.device) -> list[torch.device]:
    """The devices to load to. Raises ValueError for one that is not there."""
    if str(device) == "auto":
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if kind is None:
            return [torch.device("cpu")]
        return [torch.device(kind.type, number) for number in range(torch.accelerator.device_count())]
    try:
        return [numbered(device)]
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build of torch without CUDA
        raise ValueError(f"device={device} cannot be used here ({name_cause(error)}). {DEVICES}.") from error


def _device_map(
    factory, config: PreTrainedConfig, devices: list[torch.device], trust_remote_code: bool
) -> dict[str, torch.device]:
    if len(devices) == 1:
        return {"": devices[0]}
    with torch.device("meta"):
        skeleton = factory.from_config(config, trust_remote_code=trust_remote_code)
    return spread(skeleton, config.get_text_config(decoder=True).num_hidden_layers, devices)


def check_complete(model: PreTrainedModel, about: dict, name: str) -> None:
    """Raises ValueError if weights are missing, or if the LM head or the embedding is quantised."""
    if about["missing_keys"]:
        names = sorted(about["missing_keys"])
        raise ValueError(
            f"{name} lacks {len(names)} of its tensors ({', '.join(names[:3])}), which would have random values. Take a "
            "complete copy of it, or one that was saved as a causal language model."
        )
    for part in (model.get_output_embeddings(), model.get_input_embeddings()):
        weight = part.weight if isinstance(part, nn.Linear | nn.Embedding) else None
        if not isinstance(weight, torch.Tensor):
            continue  # `Target` refuses what has no such layer
        if weight.dtype not in DTYPES.values() or is_traceable_wrapper_subclass(weight):
            raise ValueError(
                f"{name}: its LM head or its embedding is quantised, and heads need both as plain matrices. Quantise it "
                'again and leave them alone: modules_to_not_convert=["lm_head"] (fp8, AWQ, torchao, quanto, HQQ), '
                'llm_int8_skip_modules=["lm_head"] (bitsandbytes), lm_head=false (GPTQ), ignore=["lm_head"] '
                "(compressed-tensors)."
            )


def _read(load: Callable, name: str, **kwargs):
    if hub.looks_local(name) and not Path(name).is_dir():
        raise ValueError(
            f"The folder {name} does not exist. Give the folder of a model, or the model's name on the Hugging Face Hub."
        )
    local = {} if hub.is_folder(name) or hub.in_reach() else {"local_files_only": True}
    try:
        return load(name, **kwargs, **local)
    except (OSError, ValueError, StrictDataclassError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{name} brings Python code of its own, which would run here with all your rights. Read it, and if you trust "
                "it, give trust_remote_code=true; otherwise choose a target whose code is in transformers."
            ) from error
        reason = " ".join(str(error).split()) if isinstance(error, StrictDataclassError) else name_cause(error)
        raise ValueError(
            f"{name} could not be loaded as a causal language model by transformers {transformers.__version__} ({reason}). Give a "
            "folder saved by save_pretrained (config.json, safetensors, tokenizer), or a Hub name with the network in reach; a "
            "newer model needs a newer transformers (pip install -U specdec)."
        ) from error


# The parts of a target without its layers: their values come from the safetensors files, one tensor at a time.

UNREAD = "layers-unread"  # ends the fingerprint of a target whose layers were not compared


@torch.no_grad()
def fill_ends(model: PreTrainedModel, parts: tuple[nn.Module, ...], shards: Shards) -> None:
    """Gives the parameters of some parts of the model their values, in the dtype that they have.

    A matrix that is the same in two parts (a tied LM head) stays so. Raises ValueError for a tensor that is missing.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}  # a shared one has its first name
    modules = {module: name for name, module in model.named_modules()}
    filled: dict[Tensor, nn.Parameter] = {}
    for part in parts:
        for parameter in list(part.parameters()):
            if not parameter.is_meta:
                continue
            if parameter not in filled:
                filled[parameter] = _read_parameter(names[parameter], parameter, shards)
            _replace(model, parameter, filled[parameter])
        for module in part.modules():
            _fill_buffers(model, module, modules[module], shards)


def read_ends_part(model: PreTrainedModel, part: nn.Module, shards: Shards) -> dict[str, Tensor]:
    """The values of a part's parameters, by their names in it, in their dtype. Raises ValueError for a tensor that is missing."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {name: _read_parameter(names[value], value, shards).data for name, value in part.named_parameters()}


def _read_parameter(name: str, parameter: Tensor, shards: Shards) -> nn.Parameter:
    key = shards.find(name, tuple(parameter.shape))
    if key is None:
        raise ValueError(
            f"{shards.name} has no tensor {name} of shape {list(parameter.shape)}, which is needed where the target is read "
            "part by part. Take a complete copy of it, or load the whole target."
        )
    value = shards[key]
    if not value.is_floating_point() or value.element_size() == 1:
        raise ValueError(f"{shards.name}: its tensor {key} is quantised, and heads need plain matrices.")
    return nn.Parameter(value.to(parameter.dtype).clone(), requires_grad=False)  # not the file's own pages


def _fill_buffers(model: PreTrainedModel, module: nn.Module, place: str, shards: Shards) -> None:
    """What no file holds, such as Gemma's scale of embeddings, is computed as transformers does when it loads a model.

    place: the module's name in the model
    """
    missing = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
    for name, buffer in missing.items():
        kept = name not in module._non_persistent_buffers_set
        module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=kept)
    if missing:
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # so that it keeps its values
        model._init_weights(module)
    for name, buffer in missing.items():
        key = (
            None if name in module._non_persistent_buffers_set else shards.find(f"{place}.{name}", tuple(buffer.shape))
        )
        if key is not None:
            module.get_buffer(name).copy_(shards[key])


def _replace(model: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter is old:
                setattr(module, name, new)


# What identifies the weights of a target, and how they are quantised.

FINGERPRINT_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "intermediate_size")
NUM_VALUES = 64  # of every tensor, so that nothing is copied or converted as a whole


def quantisation_of(config) -> str | None:
    """The method in a model's configuration and its bits, such as bitsandbytes-4bit or fp8; None: not quantised."""
    fields = config.to_dict().get("quantization_config")
    if not fields:
        return None
    method = fields.get("quant_method", "unknown")
    groups = [group.get("weights") or {} for group in (fields.get("config_groups") or {}).values()]
    first = groups[0] if groups else {}  # of compressed-tensors and ModelOpt
    bits = 4 if fields.get("load_in_4bit") else 8 if fields.get("load_in_8bit") else fields.get("bits")
    bits = bits or first.get("num_bits")
    kind = f"fp{bits}" if first.get("type") == "float" else f"{bits}bit" if bits else fields.get("quant_algo")
    return "-".join(str(each).lower() for each in (getattr(method, "value", method), kind) if each)


def describe_difference(what: str, then: str, here: str) -> str:
    """what: "... {} weights ..."; then, here: fingerprints, of the weights meant and of the target's -> one clause with both"""
    (_, _, before), (_, _, now) = then.partition("-"), here.partition("-")
    both = before or "unquantised", now or "unquantised"
    found = f"{both[1]} weights" if both[0] != both[1] else f"others of that kind ({here}, not {then})"
    return f"{what.format(both[0])}, and the target here has {found}"


def fingerprint_of_model(model: PreTrainedModel, config, quantisation: str | None) -> str:
    """16 hex digits of the sizes and of some values of every parameter, rounded to bfloat16; `-METHOD` if quantised.

    config: of the text part
    """
    if quantisation is None:
        return _digest(config, model.named_parameters())
    # GPTQ, AWQ and others keep packed weights in buffers. `state_dict` is not asked: it spoils 4-bit layers of bitsandbytes 0.50
    # on CPUs with bfloat16 units, once they have run.
    tensors = (*model.named_parameters(), *model.named_buffers())
    return f"{_digest(config, (part for pair in tensors for part in _plain(*pair)))}-{quantisation}"


def fingerprint_of_shards(shards: Shards, model: PreTrainedModel, config, quantisation: str | None) -> str | None:
    """`fingerprint` of a model from its files, whose parameters need no values; `-METHOD` if quantised.

    None where not all files are here, or a model that is not quantised has its experts stored one by one. Of a quantised one every
    tensor counts, wherever and however it is loaded, but not those of MTP modules, which may be tuned beside it.
    """
    if not shards.here:
        return None
    if quantisation is not None:
        keys = [key for key in shards.files if not _in_mtp_module(key, config.num_hidden_layers)]
        return f"{_digest(config, ((key, shards[key]) for key in keys))}-{quantisation}"
    places = {name: shards.find(name, tuple(value.shape)) for name, value in model.named_parameters()}
    found = [key for key in places.values() if key is not None]
    if len(set(found)) < len(places):
        return None
    return _digest(config, ((name, shards[str(key)]) for name, key in places.items()))


def _in_mtp_module(key: str, num_layers: int) -> bool:
    number = re.search(r"\blayers\.(\d+)\.", key)
    return key.startswith("mtp.") or ".mtp." in key or (number is not None and int(number[1]) >= num_layers)


def embeddings_fingerprint(embed: nn.Module, norm: nn.Module, config) -> str:
    """16 hex digits of the sizes, the embedding and the last norm, which quantisers leave as they are."""
    parts = (("embed", embed), ("norm", norm))
    return _digest(config, [(f"{part}.{name}", p) for part, module in parts for name, p in module.named_parameters()])


def whole(tensor: Tensor) -> Tensor:
    """A tensor of which every process holds a part, put together. All must ask."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _digest(config, tensors) -> str:
    digest = hashlib.sha256()
    fields = config.to_dict()
    digest.update(json.dumps({key: fields[key] for key in FINGERPRINT_SIZES if key in fields}).encode())
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        flat = whole(tensor.detach()).reshape(-1)
        sample = flat[:: max(1, len(flat) // NUM_VALUES)][:NUM_VALUES]
        sample = sample.view(torch.uint8) if sample.element_size() == 1 else sample  # not all such types are numbers
        sample = sample.contiguous().to(torch.bfloat16).float().cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def _plain(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The tensor, or those that it is made of: torchao keeps packed values and scales in one."""
    if not is_traceable_wrapper_subclass(tensor):
        return [(name, tensor)]
    parts, _ = tensor.__tensor_flatten__()
    return [pair for part in parts for pair in _plain(f"{name}.{part}", vars(tensor)[part])]
