"""Loads a target's model and its tokenizer from a folder or the Hugging Face Hub, and refuses what cannot be a target."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import (
    CONFIG_MAPPING,
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

from specdec.core import few_rows, hub, plain_text, precision, token_ids
from specdec.core.devices import numbered, out_of_memory
from specdec.target import attention
from specdec.target import parallel as target_parallel
from specdec.target.fingerprint import quantisation_of
from specdec.target.layer_kinds import check_supported
from specdec.target.parallel import Share
from specdec.target.structure import find_blocks

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16, "float64": torch.float64}
NEWER = "Install a newer transformers that specdec allows (pip install -U specdec), or choose another target."
DEVICES = "Give cpu, cuda, a numbered one such as cuda:1, or auto (the layers spread over all accelerators)"


def load_model(
    name: str,
    *,
    dtype: str,
    device: str | torch.device,
    revision: str | None,
    trust_remote_code: bool = False,
    tp: int = 1,
) -> tuple[PreTrainedModel, str | None, Share]:
    """Each tensor goes from the file to its device; the host never holds a second copy of the weights.

    name: a folder, or a name on the Hugging Face Hub; dtype: one of DTYPES, for what is not quantised, or auto (precision.py)
    trust_remote_code: whether code that the folder brings may run; it has all rights of the user
    device: a device; or "auto": the layers in equal shares over all accelerators, everything else on the first
    tp: processes that hold the model together (target_parallel.py); all of them call this, and each loads its part
    -> the model, how its checkpoint is quantised (None: not), and these processes. Raises ValueError with what to do.
    """
    check_dtype(dtype)
    devices = find_devices(device)
    origin: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = load_config(name, **origin)
    quantisation = quantisation_of(config)
    factory, model_class = _find_class(name, config, **origin)
    with_accelerate = is_accelerate_available()  # in the extra `train`
    if len(devices) > 1 and not with_accelerate:
        raise ValueError("device=auto needs the package accelerate: pip install 'specdec[train]', or give one device.")
    places: Any = {"device_map": _device_map(factory, config, devices, trust_remote_code)} if with_accelerate else {}
    target_parallel.check(config, tp, name, device=str(device), quantisation=quantisation)
    share = target_parallel.share(tp, devices[0])
    dtype = agreed_dtype(dtype, devices[0], share)
    try:
        with target_parallel.cut(model_class, share, devices[0]) as more:
            model, about = _read(
                factory.from_pretrained, name, dtype=DTYPES[dtype], output_loading_info=True,
                attn_implementation=attention.implementation(model_class), **origin, **places | more,
            )  # fmt: skip
        model = model if with_accelerate else model.to(devices[0])
    except (ImportError, RuntimeError, MemoryError) as error:
        if out_of_memory(error):
            raise ValueError(
                f"{name} does not fit into the memory of device={device} ({_first_line(error)}). Use device=auto with more "
                "accelerators, or a quantised or smaller target."
            ) from error
        if quantisation is None:
            raise
        missing = f"pip install {error.name}" if isinstance(error, ModuleNotFoundError) else "install what it names"
        raise ValueError(
            f"{name} is quantised ({quantisation}) and cannot be loaded here: {' '.join(str(error).split())} "
            f"Use another machine, {missing}, or choose a target that is not quantised."
        ) from error
    check_complete(model, about, name)
    few_rows.prepare(model)
    return model, quantisation, share


def load_skeleton(
    name: str, *, dtype: str, revision: str | None, trust_remote_code: bool = False
) -> tuple[PreTrainedModel, str | None]:
    """A model whose parameters and buffers have shapes and no values (device meta); arguments and result as of `load_model`.

    dtype: one of DTYPES
    """
    check_dtype(dtype)
    origin: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = load_config(name, **origin)
    factory, model_class = _find_class(name, config, **origin)
    with torch.device("meta"):
        model = factory.from_config(
            config, dtype=DTYPES[dtype], attn_implementation=attention.implementation(model_class),
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
    for module in model.modules():
        for key, value in module.named_parameters(recurse=False):
            if not value.is_meta:  # DiffLlama draws some by torch.normal, which gives them random values all the same
                setattr(module, key, nn.Parameter(value.to("meta"), requires_grad=False))
    with contextlib.suppress(OSError):  # not every folder has one
        model.generation_config = GenerationConfig.from_pretrained(name, revision=revision or "main")
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
    fields, _ = _read(PreTrainedConfig.get_config_dict, name, revision=revision)
    kind = fields.get("model_type", "")
    own_code = fields.get("auto_map")
    if kind and kind not in CONFIG_MAPPING and not own_code:
        raise ValueError(
            f"{name}: transformers {transformers.__version__} does not know model_type={kind}. The model is newer. {NEWER}"
        )
    config = _read(AutoConfig.from_pretrained, name, revision=revision, trust_remote_code=trust_remote_code)
    if config.to_dict().get("is_encoder_decoder"):
        raise ValueError(
            f"{name} is an encoder-decoder ({kind}); a target must be a causal language model (decoder only), "
            "such as one of the Llama, Qwen or Mistral family."
        )
    own_class = trust_remote_code and "AutoModelForCausalLM" in (own_code or {})
    known = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if not own_class and not known:
        raise ValueError(
            f"{name} is a {kind} model, which does not write text token by token; choose a causal language model."
        )
    if fields.get("quantization_config") and not AutoHfQuantizer.supports_quant_method(fields["quantization_config"]):
        raise ValueError(
            f"{name} is quantised by a method that transformers {transformers.__version__} does not know "
            f"({quantisation_of(config)}); choose a copy of it that is not quantised, or quantised by another method."
        )
    return config


def load_tokenizer(
    name: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> transformers.PreTrainedTokenizerBase:
    """name: a folder, or a name on the Hugging Face Hub. Raises ValueError with what to do.

    Warns of ids that the model has no embedding for (token_ids.py). It puts in front of plain text what the model expects there
    (plain_text.expect_opening).
    """
    origin: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    tokenizer = _read(AutoTokenizer.from_pretrained, name, **origin)
    with contextlib.suppress(ValueError, AttributeError):  # a tokenizer without a model
        config = _read(AutoConfig.from_pretrained, name, **origin).get_text_config(decoder=True)
        token_ids.limit(tokenizer, config.vocab_size, name)
    plain_text.expect_opening(tokenizer, name, **origin)
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


def check_dtype(dtype: str) -> None:
    """Raises ValueError for a dtype that a target cannot have."""
    if dtype not in (*DTYPES, precision.AUTO):
        raise ValueError(f"dtype={dtype} must be auto, or one of {', '.join(DTYPES)}.")


def agreed_dtype(dtype: str, device: torch.device, share: Share) -> str:
    """`precision.resolve`, as the first of the processes finds it that hold a target together."""
    check_dtype(dtype)
    if dtype != precision.AUTO:
        return dtype
    number = list(DTYPES).index(precision.resolve(dtype, device))
    return list(DTYPES)[int(share.all_say(number)[0])]


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
        raise ValueError(f"device={device} cannot be used here ({_first_line(error)}). {DEVICES}.") from error


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
    if hub.looks_local(name) and not Path(name).expanduser().is_dir():
        raise ValueError(
            f"The folder {name} does not exist. Give the folder of a model, or the model's name on the Hugging Face Hub."
        )
    try:
        return load(name, **kwargs)
    except StrictDataclassError as error:  # a field of its configuration has a value that transformers does not know
        reason = " ".join(str(error).split())
        raise ValueError(
            f"{name}: transformers {transformers.__version__} does not take its configuration ({reason}). {NEWER}"
        ) from error
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ValueError(
                f"{name} brings Python code of its own, which would run here with all your rights. Read it, and if you trust "
                "it, give trust_remote_code=true; otherwise choose a target whose code is in transformers."
            ) from error
        raise ValueError(
            f"{name} could not be loaded as a causal language model ({_first_line(error)}). Give a folder "
            "saved by save_pretrained (config.json, safetensors, tokenizer), or a Hub name with the network in reach."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
