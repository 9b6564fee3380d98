"""Fingerprints of targets: digests of configuration and of every weight.

v2.0123456789abcdef                  an unquantised target, in any dtype
v2.0123456789abcdef-fp8              a quantised one, with its method
v2.0123456789abcdef-layers-unread    a target without its layers: the digest is of embedding, last norm and LM head

Fingerprints of earlier versions have no `v2.`, and say nothing about the weights here.
"""

import functools
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from specdec.core.digests import digest_files, digest_tensors
from specdec.core.shards import Shards

VERSION = "v2."
UNREAD = "layers-unread"  # end of the fingerprint of a target whose layers were not read
OLD_FORM = re.compile(r"[0-9a-f]{16}(-(?!gguf-).*)?")  # of earlier versions; llama.cpp's files have their own texts
SIZE_FIELDS = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "intermediate_size")
COUNTED_FIELDS = ("model_type", *SIZE_FIELDS)  # fields that count even with the defaults of their class
# Fields of a configuration that leave the output as it is, or that the fingerprint covers elsewhere: ties and dtypes in
# the weights, the quantisation in the fingerprint's end, the share of rotated dimensions in `rope_parameters`. MTP
# modules are no part of the target. Private fields are paths and the like, except OPT's `_remove_final_layer_norm`.
IDLE_FIELDS = re.compile(
    r"_(?!remove).*|architectures|auto_map|name_or_path|transformers_version|transformers_weights|dtype|torch_dtype|"
    r"tie_word_embeddings|use_cache|return_dict|output_(attentions|hidden_states|router_logits)|attn_implementation|"
    r"quantization_config|.*_token_ids?|id2label|label2id|problem_type|initializer_range|.*(dropout|pdrop).*|"
    r"partial_rotary_factor|mtp_.*|num_mtp_.*|num_nextn_predict_layers"
)


class Fingerprint:
    """A fingerprint, computed at its first use."""

    def __init__(self, make: Callable[[], str]):
        self._make = make

    @classmethod
    def from_text(cls, text: str) -> "Fingerprint":
        """A fingerprint that another process made."""
        return cls(lambda: text)

    @functools.cached_property
    def text(self) -> str:
        return self._make()

    def matches(self, stored: object) -> bool:
        """Whether a stored fingerprint is this target's."""
        return stored == self.text

    def is_comparable(self, stored: str) -> bool:
        """Whether a difference from a stored fingerprint means other weights: both cover the layers, in one form."""
        return UNREAD not in stored + self.text and is_outdated(stored) == is_outdated(self.text)

    def compute(self) -> "Fingerprint":
        """Computes it now, before the weights change."""
        assert self.text
        return self


@dataclass(frozen=True)
class WeightSource:
    """The places of a target's weights.

    ends: modules before and behind the layers: embed, norm and head; quantisation: method, None: none
    shards: files of the weights, which count if all are local; None: the model's own weights count
    whole: whether the model has its layers
    """

    model: PreTrainedModel
    ends: dict[str, nn.Module]
    quantisation: str | None
    shards: Shards | None
    whole: bool = True

    @property
    def config(self) -> PreTrainedConfig:
        """The configuration of the text part."""
        return self.model.config.get_text_config(decoder=True)

    def make_fingerprint(self) -> Fingerprint:
        """The fingerprint of these weights, computed at its first use."""
        return Fingerprint(functools.partial(_compute_fingerprint, self))


def _compute_fingerprint(source: WeightSource) -> str:
    """The text of a target's fingerprint."""
    model, shards, config = source.model, source.shards, source.config
    name = model.name_or_path or type(model).__name__
    if shards is not None and shards.is_local:
        digests: dict[str, str] = {}
        for file_digests in digest_files(shards.paths(), shards.name):
            digests |= file_digests
        digests = _name_as_model(source, shards, digests)
        shards.close()
    elif source.whole:
        digests = digest_tensors(_name_as_saved(source, _list_weights(model)), name)
    else:
        digests = digest_tensors(dict(_list_parameters(source.ends)), name)
        return _join_fingerprint(_hash_content([describe_config(config), digests]), UNREAD, source.quantisation)
    _drop_copies(model, digests)
    return _join_fingerprint(_hash_content([describe_config(config), digests]), source.quantisation)


def _join_fingerprint(digest: str, *ends: str | None) -> str:
    return "-".join([VERSION + digest, *filter(None, ends)])


def _hash_content(content: list[dict]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def describe_config(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a text model's configuration that may change its output and are not the defaults of their class."""
    fields = _read_fields(config)
    try:
        defaults = _read_fields(type(config)())
    except Exception:  # a class of the model's own code may need arguments, and fail in any way without them
        defaults = {}
    return {
        key: value
        for key, value in fields.items()
        if not IDLE_FIELDS.fullmatch(key) and (key in COUNTED_FIELDS or key not in defaults or value != defaults[key])
    }


def _read_fields(config: PreTrainedConfig) -> dict[str, Any]:
    """The fields of a configuration as JSON holds them, with 1 as 1.0."""
    return json.loads(json.dumps(config.to_dict(), default=str), parse_int=float)


def _list_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """Parameters and buffers that files hold, by the first of their names.

    It avoids `state_dict`, which spoils 4-bit layers of bitsandbytes 0.50 that have run, on CPUs with bfloat16 units.
    """
    tensors = {name: value.detach() for name, value in model.named_parameters()}
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                tensors[f"{module_name}.{name}".removeprefix(".")] = buffer
    return {name: value for name, value in tensors.items() if name not in (model._keys_to_ignore_on_save or ())}


def _name_as_saved(source: WeightSource, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a model as its class saves them, such as experts one by one; a quantised model's as they are."""
    if source.quantisation is not None:
        return dict(pair for name, value in tensors.items() for pair in _flatten_tensor(name, value))
    conversions = vars(source.model).pop(
        "_weight_conversions", None
    )  # other names, of the files that it was loaded from
    try:
        return revert_weight_conversion(source.model, tensors)
    finally:
        if conversions is not None:
            source.model._weight_conversions = conversions


def _name_as_model(source: WeightSource, shards: Shards, digests: dict[str, str]) -> dict[str, str]:
    """Digests of a model's tensors in the files, by the names under which its class saves them.

    Files of a quantised model, and files in another form than the class saves, keep their own names.
    """
    num_layers = source.config.num_hidden_layers
    plain = {key: digest for key, digest in digests.items() if not in_mtp_module(key, num_layers)}
    file_names = {} if source.quantisation is not None else _find_file_names(source, shards)
    if not file_names or len(set(file_names.values()) & plain.keys()) < len(file_names):
        return plain
    return {name: plain[str(place)] for name, place in file_names.items()}


def _find_file_names(source: WeightSource, shards: Shards) -> dict[str, str | None]:
    """The name in the files of each tensor that the model's class saves; None: it is missing and not tied."""
    ties = source.model.get_expanded_tied_weights_keys(all_submodels=True)
    shapes = {name: tuple(value.shape) for name, value in _list_weights(source.model).items()}
    for pair in ties.items():
        for tied_name in set(pair) & shapes.keys():
            shapes |= dict.fromkeys(pair, shapes[tied_name])
    file_names: dict[str, str | None] = {}
    saved_tensors = _name_as_saved(source, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    for name, value in saved_tensors.items():
        file_name = shards.find(name, tuple(value.shape))
        if file_name is not None or name not in {*ties, *ties.values()}:
            file_names[name] = file_name
    return file_names


def _flatten_tensor(name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """The tensor, or its components: torchao keeps packed values and scales in one tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        return [(name, tensor)]
    attributes, _ = tensor.__tensor_flatten__()
    return [
        pair for attribute in attributes for pair in _flatten_tensor(f"{name}.{attribute}", vars(tensor)[attribute])
    ]


def _drop_copies(model: PreTrainedModel, digests: dict[str, str]) -> None:
    """Drops the second name of two tied weights, if both have the same values or the first is missing."""
    for copy, first in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if copy in digests and digests.setdefault(first, digests[copy]) == digests[copy]:
            del digests[copy]


def in_mtp_module(name: str, num_layers: int) -> bool:
    """Whether a tensor belongs to an MTP module, which is no part of the target. num_layers: the target's"""
    number = re.search(r"\blayers\.(\d+)\.", name)
    return any(word.startswith("mtp") for word in name.split(".")) or (
        number is not None and int(number[1]) >= num_layers
    )


def is_outdated(stored: object) -> bool:
    """Whether an earlier version made a stored fingerprint."""
    return OLD_FORM.fullmatch(str(stored)) is not None


def describe_outdated(subject: str, target: str) -> str:
    """A clause on a fingerprint of an earlier version. subject: with its verb, such as "rows name their target\""""
    return f"{subject} in the form of an earlier version, which cannot be compared with {target}"


def describe_difference(template: str, expected: str, actual: str) -> str:
    """A clause on the difference between two fingerprints, those of the expected and of the actual weights.

    template: its first half, "... {} weights ..."
    """
    (_, _, expected_method), (_, _, actual_method) = expected.partition("-"), actual.partition("-")
    methods = expected_method or "unquantised", actual_method or "unquantised"
    actual_weights = (
        f"{methods[1]} weights" if methods[0] != methods[1] else f"others of that kind ({actual}, not {expected})"
    )
    return f"{template.format(methods[0])}, and the target here has {actual_weights}"


# The embeddings' fingerprint: 16-bit forms of a target may differ in a few values

NUM_VALUES = 64  # upper bound of the values of a tensor that count


def fingerprint_embeddings(ends: dict[str, nn.Module], config: PreTrainedConfig) -> str:
    """16 hex digits of the sizes and samples of the embedding and the last norm, which quantisers leave as they are."""
    return _digest_samples(config, _list_parameters({name: ends[name] for name in ("embed", "norm")}))


def _list_parameters(modules: dict[str, nn.Module]) -> list[tuple[str, Tensor]]:
    return [
        (f"{module_name}.{name}", value)
        for module_name, module in modules.items()
        for name, value in module.named_parameters()
    ]


def _digest_samples(config: PreTrainedConfig, tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    fields = config.to_dict()
    digest.update(json.dumps({key: fields[key] for key in SIZE_FIELDS if key in fields}).encode())
    for name, tensor in sorted(tensors, key=lambda pair: pair[0]):
        flat = tensor.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // NUM_VALUES)][:NUM_VALUES]
        sample = sample.view(torch.uint8) if sample.element_size() == 1 else sample  # not all such types are numbers
        sample = sample.contiguous().to(torch.bfloat16).float().cpu()
        digest.update(name.encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
