"""Loads a target's model and its tokenizer from a folder or the Hugging Face Hub, and refuses what cannot be a
target.
"""

import contextlib
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
from transformers.utils import is_accelerate_available

from specdec import DISTRIBUTION
from specdec.core import files, hub, precision
from specdec.core.dequantise import PARTS, PLAIN_DTYPES
from specdec.core.devices import describe_out_of_memory, name_cause, number_device
from specdec.core.shards import NoSafetensors, Shards
from specdec.target import attention, quantised
from specdec.target.fingerprint import in_mtp_module
from specdec.target.quantised import name_quantisation
from specdec.target.structure import check_supported, find_layers
from specdec.text import token_text

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16, "float64": torch.float64}
DEVICE_ADVICE = "Give cpu, cuda, a numbered one such as cuda:1, or auto (the layers spread over all accelerators)"


def load_model(
    name: str, *, dtype: str, device: str | torch.device, revision: str | None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, str | None, Shards | None]:
    """Loads a model. Returns it, the quantisation of its checkpoint (None: none), and its files (None: no safetensors).

    Each tensor goes from the file to its device. The host never holds a second copy of the weights.
    name: a folder, or a name on the Hugging Face Hub; dtype: a name in DTYPES for weights that are not quantised, or
        auto
    device: a device; or "auto": the layers in equal shares over all accelerators, all else on the first
    trust_remote_code: whether code of the folder may run; it has all rights of the user
    Raises ValueError with advice.
    """
    devices = find_devices(device)
    dtype = choose_dtype(dtype, devices[0])
    origin: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = load_config(name, **origin)
    quantisation = name_quantisation(config)
    obstacle = quantised.find_obstacle(config)
    if obstacle is not None:
        raise ValueError(f"{name} {obstacle}: {quantised.ADVICE}.")
    factory, model_class = _find_class(name, config, **origin)
    with_accelerate = is_accelerate_available()  # in the extra `train`
    if len(devices) > 1 and not with_accelerate:
        raise ValueError(
            f"device=auto needs the package accelerate: pip install '{DISTRIBUTION}[train]', or give one device."
        )
    dequantised = quantised.is_dequantised(config, devices[0])
    shards = _open_all(name, config, revision, required=dequantised)
    placement: Any = (
        {"device_map": _make_device_map(factory, config, devices, trust_remote_code)} if with_accelerate else {}
    )
    try:
        placement["attn_implementation"] = attention.choose_implementation(model_class)
        if shards is not None and dequantised:
            model, loading_info = quantised.load_dequantised(
                model_class, config, shards, dtype=DTYPES[dtype], **placement
            )
        else:
            model, loading_info = _load_pretrained(
                factory.from_pretrained, name, dtype=DTYPES[dtype], output_loading_info=True, **origin, **placement
            )
        model = model if with_accelerate else model.to(devices[0])
    except (ImportError, RuntimeError, MemoryError) as error:
        if describe_out_of_memory(error):
            raise ValueError(
                f"{name} does not fit into the memory of device={device} ({name_cause(error)}). Use device=auto with "
                "more accelerators, or a quantised or smaller target."
            ) from error
        if quantisation is None:
            raise
        raise ValueError(
            f"{name} is quantised ({quantisation}) and cannot be loaded here ({' '.join(str(error).split())}). Install "
            "what it names, use another machine, or choose a target that is not quantised."
        ) from error
    check_complete(model, loading_info, name)
    precision.prepare_few_rows(model)
    return model, quantisation, shards


def _open_all(name: str, config: PreTrainedConfig, revision: str | None, *, required: bool) -> Shards | None:
    try:
        return open_shards(name, config, revision=revision, whole=True)
    except NoSafetensors:
        if required:
            raise
        return None


def load_skeleton(
    name: str, *, dtype: str, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, str | None]:
    """A model with shapes and without values (device meta), and the quantisation of its checkpoint.

    Arguments as of `load_model`; dtype: a name in DTYPES
    """
    origin: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    model, quantisation = make_skeleton(load_config(name, **origin), name, dtype=dtype, **origin)
    with contextlib.suppress(OSError):  # not every folder has one
        model.generation_config = GenerationConfig.from_pretrained(name, revision=revision or "main")
    return model, quantisation


def make_skeleton(
    config: PreTrainedConfig, name: str, *, dtype: str, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, str | None]:
    """As `load_skeleton`, for a configuration that `load_config` has read."""
    factory, model_class = _find_class(name, config, revision=revision, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = factory.from_config(
            config, dtype=DTYPES[dtype], attn_implementation=attention.choose_implementation(model_class),
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    for module in model.modules():
        for key, value in module.named_parameters(recurse=False):
            if not value.is_meta:  # DiffLlama draws some by torch.normal, which gives them random values all the same
                setattr(module, key, nn.Parameter(value.to("meta"), requires_grad=False))
    return model, name_quantisation(config)


def _find_class(
    name: str, config: PreTrainedConfig, *, revision: str | None, trust_remote_code: bool
) -> tuple[Any, type[PreTrainedModel]]:
    """The factory of transformers for a model, and the model's class.

    The class may come from the folder's code, which this runs if it is allowed. Raises ValueError for layers that a
    target cannot have.
    """
    check_supported(config.get_text_config(decoder=True), name)
    class_path = (config.to_dict().get("auto_map") or {}).get("AutoModelForCausalLM")
    if trust_remote_code and class_path is not None:
        return AutoModelForCausalLM, get_class_from_dynamic_module(class_path, name, revision=revision)
    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        return AutoModelForCausalLM, cast(type[PreTrainedModel], MODEL_FOR_CAUSAL_LM_MAPPING[type(config)])
    model_class = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)]
    return AutoModelForImageTextToText, cast(type[PreTrainedModel], model_class)


def load_config(name: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PreTrainedConfig:
    """The configuration of a model that may be a target. Raises ValueError with advice."""
    config = _load_pretrained(AutoConfig.from_pretrained, name, revision=revision, trust_remote_code=trust_remote_code)
    fields = config.to_dict()
    own_class = trust_remote_code and "AutoModelForCausalLM" in (fields.get("auto_map") or {})
    known_class = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if fields.get("is_encoder_decoder") or not (own_class or known_class):
        raise ValueError(
            f"{name} is a {config.model_type} model; a target must be a causal language model (decoder only), such as "
            "one of the Llama, Qwen or Mistral family."
        )
    modelopt = None if fields.get("quantization_config") else quantised.find_modelopt(name, revision)
    if modelopt is not None:
        config.quantization_config = modelopt
    return config


def open_shards(name: str, config: PreTrainedConfig, *, revision: str | None = None, whole: bool = False) -> Shards:
    """The files of a model's weights. Arguments as of `Shards`; config: result of `load_config`

    Raises ValueError as `Shards`, and for quantised weights that the configuration does not mention.
    """
    shards, num_layers = (
        Shards(name, revision=revision, fetch_all=whole),
        config.get_text_config(decoder=True).num_hidden_layers,
    )
    if name_quantisation(config) is None:
        for key in shards.files:
            packed = shards.is_local and key.endswith("weight") and shards.dtype(key) not in PLAIN_DTYPES
            if (packed or PARTS.fullmatch(key)) and not in_mtp_module(key, num_layers):
                raise ValueError(
                    f"{name} has quantised weights ({key}), and its config.json does not say how "
                    "(quantization_config): take a copy that says it, or one that is not quantised."
                )
    return shards


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> transformers.PreTrainedTokenizerBase:
    """A target's tokenizer. name: a folder, or a name on the Hugging Face Hub. Raises ValueError with advice.

    Texts with ids beyond the model's embedding are refused later. Plain text begins as the model expects it
    (text/token_text.py).
    """
    name = files.expand_home(name)
    origin: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = _load_pretrained(AutoTokenizer.from_pretrained, name, **origin)
    with contextlib.suppress(ValueError, AttributeError):  # a tokenizer without a model
        config = _load_pretrained(AutoConfig.from_pretrained, name, **origin).get_text_config(decoder=True)
        token_text.limit_ids(tokenizer, config.vocab_size)
    token_text.expect_opening(tokenizer, name, **origin)
    return tokenizer


def assign_devices(model: PreTrainedModel, num_layers: int, devices: list[torch.device]) -> dict[str, torch.device]:
    """The device of every module: layers in equal shares and in order, all else on the first device.

    So tokens go in, and final states and logits come out, on the first device.
    """
    layers = find_layers(model.get_decoder(), num_layers, type(model).__name__)

    def assign_part(name: str, module: nn.Module) -> dict[str, torch.device]:
        if isinstance(module, nn.ModuleList) and list(module) == layers:
            return {f"{name}.{n}": devices[n * len(devices) // len(layers)] for n in range(len(layers))}
        if all(submodule is not layers[0] for submodule in module.modules()):
            return {name: devices[0]}
        child_devices = [
            assign_part(f"{name}.{child}".lstrip("."), child_module) for child, child_module in module.named_children()
        ]
        return {key: device for devices_of_child in child_devices for key, device in devices_of_child.items()}

    return assign_part("", model)


def choose_dtype(dtype: str, device: torch.device) -> str:
    """The name of a dtype in DTYPES; for `auto` that of the device. Raises ValueError for other names."""
    if dtype not in (*DTYPES, precision.AUTO):
        raise ValueError(f"dtype={dtype} must be auto, or one of {', '.join(DTYPES)}.")
    return precision.resolve_dtype(dtype, device)


def find_devices(device: str | torch.device) -> list[torch.device]:
    """The devices to load to. Raises ValueError for a device that does not exist."""
    if str(device) == "auto":
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        if kind is None:
            return [torch.device("cpu")]
        return [torch.device(kind.type, number) for number in range(torch.accelerator.device_count())]
    try:
        return [number_device(device)]
    except (RuntimeError, AssertionError) as error:  # AssertionError: a build of torch without CUDA
        cause = re.sub("^Expected one of .*", "torch has no device of this name", name_cause(error))
        raise ValueError(f"device={device} cannot be used here ({cause}). {DEVICE_ADVICE}.") from error


def _make_device_map(
    factory, config: PreTrainedConfig, devices: list[torch.device], trust_remote_code: bool
) -> dict[str, torch.device]:
    if len(devices) == 1:
        return {"": devices[0]}
    with torch.device("meta"):
        skeleton = factory.from_config(config, trust_remote_code=trust_remote_code)
    return assign_devices(skeleton, config.get_text_config(decoder=True).num_hidden_layers, devices)


def check_complete(model: PreTrainedModel, loading_info: dict, name: str) -> None:
    """Raises ValueError for missing weights or scales, for an adapter, and for a quantised LM head or embedding."""
    if loading_info["missing_keys"]:
        names = sorted(loading_info["missing_keys"])
        raise ValueError(
            f"{name} lacks {len(names)} of its tensors ({', '.join(names[:3])}), which would have random values. Take "
            "a complete copy of it, or one that was saved as a causal language model."
        )
    num_layers = model.config.get_text_config(decoder=True).num_hidden_layers
    unread = [
        key for key in loading_info["unexpected_keys"] if PARTS.fullmatch(key) and not in_mtp_module(key, num_layers)
    ]
    if unread:
        raise ValueError(
            f"transformers {transformers.__version__} leaves out {len(unread)} of the scales of {name} "
            f"({min(unread)}), so its weights would be wrong: {quantised.ADVICE}."
        )
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ValueError(
            f"{name} has an adapter beside its weights (adapter_config.json), which engines do not read: merge it into "
            "them, or remove that file."
        )
    for module in (model.get_output_embeddings(), model.get_input_embeddings()):
        weight = module.weight if isinstance(module, nn.Linear | nn.Embedding) else None
        if not isinstance(weight, torch.Tensor):
            continue  # `Target` refuses what has no such layer
        if weight.dtype not in DTYPES.values() or is_traceable_wrapper_subclass(weight):
            raise ValueError(
                f"{name}: its LM head or its embedding is quantised, and heads need both as plain matrices. Quantise "
                "it "
                'again and leave them alone: modules_to_not_convert=["lm_head"] (fp8, AWQ, torchao, quanto, HQQ), '
                'llm_int8_skip_modules=["lm_head"] (bitsandbytes), lm_head=false (GPTQ), ignore=["lm_head"] '
                "(compressed-tensors)."
            )


def _load_pretrained(load: Callable, name: str, **kwargs):
    if hub.looks_local(name) and not Path(name).is_dir():
        raise ValueError(
            f"The folder {name} does not exist. Give the folder of a model, or the model's name on the Hugging Face "
            "Hub."
        )
    local = {} if hub.is_folder(name) or hub.is_hub_reachable() else {"local_files_only": True}
    try:
        return load(name, **kwargs, **local)
    except (OSError, ValueError, StrictDataclassError, ZeroDivisionError, AttributeError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{name} brings Python code of its own, which would run here with all your rights. Read it, and if you "
                "trust it, give trust_remote_code=true; otherwise choose a target whose code is in transformers."
            ) from error
        reason = " ".join(str(error).split()) if isinstance(error, StrictDataclassError) else name_cause(error)
        raise ValueError(
            f"{name} could not be loaded as a causal language model by transformers {transformers.__version__} "
            f"({reason}). Give a folder saved by save_pretrained (config.json, safetensors, tokenizer), or a Hub name "
            f"with the network in reach; a newer model needs a newer transformers (pip install -U {DISTRIBUTION})."
        ) from error


# Values of the modules of a target without its layers, from the safetensors files, one tensor at a time.


@torch.no_grad()
def fill_ends(model: PreTrainedModel, modules: tuple[nn.Module, ...], shards: Shards) -> None:
    """Gives the parameters of some modules their values, in their dtype.

    A matrix that is the same in two modules (a tied LM head) stays so. Raises ValueError for a missing tensor.
    """
    shards = quantised.view_plain(model.config, shards)
    names = _list_names(model)
    module_names = {module: name for name, module in model.named_modules()}
    filled: dict[Tensor, nn.Parameter] = {}
    for module in modules:
        for parameter in list(module.parameters()):
            if not parameter.is_meta:
                continue
            if parameter not in filled:
                filled[parameter] = _read_parameter(names[parameter], parameter, shards)
            _replace(model, parameter, filled[parameter])
        for submodule in module.modules():
            fill_buffers(model, submodule, module_names[submodule], shards)


def read_module(model: PreTrainedModel, module: nn.Module, shards: Shards) -> dict[str, Tensor]:
    """The values of a module's parameters by their names in it, in their dtype. Raises ValueError for a missing
    tensor.
    """
    shards = quantised.view_plain(model.config, shards)
    names = _list_names(model)
    return {name: _read_parameter(names[value], value, shards).data for name, value in module.named_parameters()}


def untie_parameters(model: PreTrainedModel, shards: Shards) -> None:
    """Separates two parameters that the configuration ties and that differ in the files, as transformers does.

    model: a model without values (device meta)
    """
    shards = quantised.view_plain(model.config, shards)
    for copy, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        parameter = model.get_parameter(source)
        source_key, copy_key = (shards.find(name, tuple(parameter.shape)) for name in (source, copy))
        if source_key is None or copy_key is None or source_key == copy_key:
            continue
        if not torch.equal(*(shards[key].to(parameter.dtype) for key in (source_key, copy_key))):
            module_name, _, name = copy.rpartition(".")
            setattr(
                model.get_submodule(module_name), name, nn.Parameter(torch.empty_like(parameter), requires_grad=False)
            )
            model.all_tied_weights_keys.pop(copy, None)


def _list_names(model: PreTrainedModel) -> dict[Tensor, list[str]]:
    """The names of each parameter. A shared one has several."""
    names: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return names


def _read_parameter(names: list[str], parameter: Tensor, shards: Shards) -> nn.Parameter:
    keys = (shards.find(name, tuple(parameter.shape)) for name in names)
    key = next((key for key in keys if key is not None), None)
    if key is None:
        raise ValueError(
            f"{shards.name} has no tensor {names[0]} of shape {list(parameter.shape)}, which is needed where the "
            "target is read part by part. Take a complete copy of it, or load the whole target."
        )
    value = shards[key]
    if not value.is_floating_point() or value.element_size() == 1:
        raise ValueError(f"{shards.name}: its tensor {key} is quantised, and heads need plain matrices.")
    return nn.Parameter(value.to(parameter.dtype).clone(), requires_grad=False)  # not the file's own pages


def fill_buffers(model: PreTrainedModel, module: nn.Module, module_name: str, shards: Shards | None) -> None:
    """Gives buffers that no file holds, such as Gemma's scale of embeddings, the values of a new model of transformers.

    module_name: name of the module in the model; shards: files of the other buffers; None: there are none
    """
    missing = {name: buffer for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta}
    for name, buffer in missing.items():
        persistent = name not in module._non_persistent_buffers_set
        module.register_buffer(name, torch.empty_like(buffer, device="cpu"), persistent=persistent)
    if missing:
        for parameter in module.parameters(recurse=False):
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # so that it keeps its values
        model._init_weights(module)
    for name, buffer in missing.items():
        key = (
            None
            if shards is None or name in module._non_persistent_buffers_set
            else shards.find(f"{module_name}.{name}", tuple(buffer.shape))
        )
        if shards is not None and key is not None:
            module.get_buffer(name).copy_(shards[key])


def _replace(model: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter is old:
                setattr(module, name, new)


def gather_tensor(tensor: Tensor) -> Tensor:
    """A tensor of which every process holds a part, put together. All processes must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
