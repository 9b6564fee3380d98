"""What a model can do as a target, from its configuration alone: layers, trees, packs, and heads by engine."""

import copy
import functools
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedConfig

from specdec import checkpoint
from specdec.core.devices import name_cause
from specdec.core.shards import Shards
from specdec.export.engines import make_form
from specdec.heads.base import Head
from specdec.options import config_files
from specdec.target.loading import fill_buffers
from specdec.target.model import Target
from specdec.target.quantised import ADVICE, find_obstacle
from specdec.target.structure import count_weights, find_experts

# Files of conf/head, of which one stands for each kind of export
HEADS = {
    "eagle3": "EAGLE-3",
    "dflash": "DFlash",
    "eagle": "EAGLE-1",
    "mtp": "MTP",
    "medusa": "Medusa",
}
FORMATS = {"vllm": "vLLM", "sglang": "SGLang", "gguf": "llama.cpp"}
NOT_TRIED = "Not known to load"  # in the notes of a form
TINY_VOCABULARY = 64  # tokens of a model whose embedding has values
TESTED = Path(__file__).with_name("tested_families.yaml")


@dataclass(frozen=True)
class Support:
    """Whether a model can be a target. outline: its shapes; None: it is refused, or a load must tell

    reason: the sentence that refuses it, or that says why a load must tell; empty for a target
    run: result of a load, in words; empty: it was not loaded
    """

    outline: Target | None
    reason: str = ""
    refused: bool = False
    run: str = ""


def examine_config(config: PreTrainedConfig, name: str) -> Support:
    """Whether a model of this configuration can be a target. Nothing is read, and no tensor gets values."""
    refusal = read_tested_families().refused.get(config.get_text_config(decoder=True).model_type)
    obstacle = find_obstacle(config)
    if refusal is None and obstacle is not None:
        refusal = f"It {obstacle}: {ADVICE}."
    if refusal is None and getattr(config, "is_decoder", None) is False and not is_tested(config):
        refusal = f"It is an encoder (is_decoder=false), and a target is a causal language model: {name} cannot be one."
    return examine_shapes(config, name) if refusal is None else Support(None, refusal, refused=True)


def is_tested(config: PreTrainedConfig) -> bool:
    """Whether tests run tiny models of this type."""
    return config.get_text_config(decoder=True).model_type in read_tested_families().working


def examine_shapes(config: PreTrainedConfig, name: str) -> Support:
    """What an outline of the model shows. Faults of results show only in a load."""
    try:
        return Support(Target.outline(config, name=name))
    except ValueError as error:
        if isinstance(error.__cause__, RuntimeError) and "meta" in str(error.__cause__):
            return Support(None, f"Its shapes follow from values ({name_cause(error.__cause__)}).")
        return Support(None, str(error), refused=True)
    except (ZeroDivisionError, AttributeError) as error:
        return Support(None, f"Its configuration cannot be used ({name_cause(error)}).", refused=True)
    except (RuntimeError, TypeError) as error:
        return Support(None, f"Its shapes follow from values ({name_cause(error)}).")


@dataclass(frozen=True)
class TestedFamilies:
    """Model types of which tests run tiny models: with compiled decoding, without, and refused with a sentence.

    refused: model types whose outlines show no fault
    """

    compiled: tuple[str, ...]
    eager: tuple[str, ...]
    refused: dict[str, str]

    @property
    def working(self) -> tuple[str, ...]:
        return self.compiled + self.eager


@functools.cache
def read_tested_families() -> TestedFamilies:
    """The model types that `python -m tests.target_table` has written."""
    document = yaml.safe_load(TESTED.read_text())
    return TestedFamilies(tuple(document["compiled"]), tuple(document["eager"]), document["refused"])


def count_layers(target: Target) -> dict[str, int]:
    """The number of layers of each kind, in the order of their first one."""
    kinds = target.layer_types
    return {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a target. experts: numbers of experts, of a layer and of a token; None: dense

    entry_bytes: bytes of K and V of a token
    """

    parameters: int
    active_parameters: int
    entry_bytes: int
    experts: tuple[int, int] | None


def measure_size(target: Target) -> ModelSize:
    """Parameters of the text part and of its embedding, and the bytes of a token in the cache."""
    experts = find_experts(target.config.to_dict())
    dense, mixed = count_weights(target.decoder, target.embed.weight, experts)
    ends = {id(part.weight): part.weight.numel() for part in (target.embed, target.lm_head)}
    active = dense + (mixed * experts.per_token // experts.num if experts else 0)
    size = sum(ends.values())
    return ModelSize(
        dense + mixed + size,
        active + size,
        target.entry_bytes,
        None if experts is None else (experts.num, experts.per_token),
    )


def find_misfit(target: Target, shards: Shards) -> str | None:
    """The tensor that the files lack, or that has another shape than the configuration says, as a sentence.

    target: outline. Weights that the files store in another form, such as experts one by one, are not compared.
    """
    tied = set(target.model.get_expanded_tied_weights_keys(all_submodels=True))
    ends = {id(value) for part in (target.embed, target.norm, target.lm_head) for value in part.parameters()}
    names = {name: value for name, value in list_text_parameters(target).items() if name not in tied}
    stored = {name: is_stored_as(shards, name, tuple(value.shape)) for name, value in names.items()}
    stored_roles = {drop_layer_number(name) for name, is_stored in stored.items() if is_stored}
    for name, value in names.items():
        if not stored[name] and (id(value) in ends or drop_layer_number(name) in stored_roles):
            return f"{shards.name} has no tensor {name} of shape {list(value.shape)}, as its config.json says it has."
    return None


def is_stored_as(shards: Shards, name: str, shape: tuple[int, ...]) -> bool:
    """Whether the files have a parameter in this shape."""
    key = shards.find(name, shape)
    return key is not None and shards.shape(key) == shape


def list_text_parameters(target: Target) -> dict[str, Tensor]:
    """The parameters of the text part by name."""
    prefixes = tuple(f"{path}." for path, module in target.model.named_modules() if module is target.decoder)
    head = {id(value) for value in target.lm_head.parameters()}
    parameters = target.model.named_parameters()
    return {name: value for name, value in parameters if name.startswith(prefixes) or id(value) in head}


def drop_layer_number(name: str) -> str:
    """The name of a parameter without the number of its layer."""
    return re.sub(r"\.\d+\.", ".N.", name)


# Heads by engine


@dataclass(frozen=True)
class HeadSupport:
    """A kind of head for a target. refusal: why it cannot be trained; empty: it can

    engines: answer by engine: "yes", "not known to load", or the sentence that refuses the export
    """

    head: str
    refusal: str = ""
    engines: dict[str, str] = field(default_factory=dict)


def make_vocabulary_twin(config: PreTrainedConfig, name: str) -> Target:
    """A target of these shapes with TINY_VOCABULARY tokens, and with random values before and behind its layers.

    Layouts ask for the scale of its embedding and of its norm.
    """
    config = copy.deepcopy(config)
    text_config = config.get_text_config(decoder=True)
    text_config.vocab_size, text_config.pad_token_id = TINY_VOCABULARY, None
    target = Target.outline(config, name=name)
    names = {module: path for path, module in target.model.named_modules()}
    for part in (target.embed, target.lm_head, target.norm):
        for key, parameter in part.named_parameters():
            value = torch.rand(parameter.shape, dtype=target.dtype, device="cpu")
            setattr(part, key, nn.Parameter(value, requires_grad=False))
        for module in part.modules():
            fill_buffers(target.model, module, names.get(module, ""), None)
    return target


class PlainValues(TorchDispatchMode):
    """A context in which a tensor without values is 1 where the host reads it, as the factors of a new head are."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            return 1
        return func(*args, **(kwargs or {}))


def list_heads(target: Target) -> list[HeadSupport]:
    """Each head of HEADS for a target, and whether engines of FORMATS serve its export."""
    return [_try_head(target, head) for head in HEADS]


def _try_head(target: Target, head: str) -> HeadSupport:
    try:
        with torch.device("meta"), PlainValues():
            drafter = make_drafter(target, head).to("meta")
            return HeadSupport(head, engines={engine: _try_export(drafter, name) for name, engine in FORMATS.items()})
    except ValueError as error:
        return HeadSupport(head, str(error))


def make_drafter(target: Target, head: str) -> Head:
    """A drafter with random values and the settings of conf/head, with the plain choice of each `auto`."""
    settings: dict[str, Any] = yaml.safe_load(config_files.list_files("head")[head].read_text())["drafter"]
    plain = {key: value for key, value in settings.items() if value != "auto" and key != "_target_"}
    if head == "dflash":
        plain["mask_token"] = 0  # a mask of its own needs more of a target than a family tells
    return checkpoint.load_head_class(settings["_target_"])(target, vocab=None, **plain)


def _try_export(drafter: Any, format_name: str) -> str:
    """Whether the engine of a format serves the head."""
    try:
        form = make_form(drafter, format_name)
    except ValueError as error:
        return str(error)
    return "not known to load" if any(NOT_TRIED in note for note in form.notes) else "yes"
