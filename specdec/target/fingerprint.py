"""What identifies the weights of a target, and how they are quantised."""

import hashlib
import json

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedModel

from specdec.core.shards import Shards
from specdec.target.parallel import whole

SIZES = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "intermediate_size")
NUM_VALUES = 64  # of every tensor, so that nothing is copied or converted as a whole


def quantisation_of(config) -> str | None:
    """The method in a model's configuration and its bits, such as bitsandbytes-4bit or fp8; None: not quantised."""
    fields = config.to_dict().get("quantization_config")
    if not fields:
        return None
    fields = fields if isinstance(fields, dict) else fields.to_dict()
    method = fields.get("quant_method", "unknown")
    bits = 4 if fields.get("load_in_4bit") else 8 if fields.get("load_in_8bit") else fields.get("bits")
    return f"{getattr(method, 'value', method)}{f'-{bits}bit' if bits else ''}"


def fingerprint(model: PreTrainedModel, config, quantisation: str | None) -> str:
    """16 hex digits of the sizes and of some values of every parameter, rounded to bfloat16; `-METHOD` if quantised.

    config: of the text part
    """
    if quantisation is None:
        return _digest(config, model.named_parameters())
    # GPTQ, AWQ and others keep packed weights in buffers
    tensors = [(name, value) for name, value in model.state_dict().items() if isinstance(value, Tensor)]
    return f"{_digest(config, (part for pair in tensors for part in _plain(*pair)))}-{quantisation}"


def fingerprint_of_shards(shards: Shards, model: PreTrainedModel, config, quantisation: str | None) -> str | None:
    """`fingerprint` of a model whose parameters have no values, from its files; None where these have no tensor for each
    parameter (quantised models, and those whose experts are stored one by one), or are not all here."""
    if quantisation is not None or not shards.here:
        return None
    places = {name: shards.find(name, tuple(value.shape)) for name, value in model.named_parameters()}
    keys = [key for key in places.values() if key is not None]
    if len(set(keys)) < len(places):
        return None
    return _digest(config, ((name, shards[str(key)]) for name, key in places.items()))


def embeddings_fingerprint(embed: nn.Module, norm: nn.Module, config) -> str:
    """16 hex digits of the sizes, the embedding and the last norm, which quantisers leave as they are."""
    parts = (("embed", embed), ("norm", norm))
    return _digest(config, [(f"{part}.{name}", p) for part, module in parts for name, p in module.named_parameters()])


def _digest(config, tensors) -> str:
    digest = hashlib.sha256()
    fields = config.to_dict()
    digest.update(json.dumps({key: fields[key] for key in SIZES if key in fields}).encode())
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        flat = whole(tensor.detach()).reshape(-1)
        sample = flat[:: max(1, len(flat) // NUM_VALUES)][:NUM_VALUES].to(torch.bfloat16).float().cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]


def _plain(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The tensor, or those that it is made of: torchao keeps packed values and scales in one."""
    if not is_traceable_wrapper_subclass(tensor):
        return [(name, tensor)]
    parts, _ = tensor.__tensor_flatten__()
    return [pair for part in parts for pair in _plain(f"{name}.{part}", vars(tensor)[part])]
