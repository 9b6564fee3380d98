"""A drafter under the names of a public layout, and what the layouts of several families share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, LlamaConfig

from specdec.heads.base import Drafter
from specdec.heads.blocks import make_block_config, measure_embedding_scale
from specdec.heads.dependence import Dependence, Lattice
from specdec.heads.dflash import BlockDrafter
from specdec.heads.eagle import Eagle3
from specdec.target.model import Target
from specdec.target.structure import FULL, SLIDING

EMBEDDING = "embed_tokens.weight"
CONTAINER_FIELDS = ("num_hidden_layers", "vocab_size", "attention_bias")  # besides the sizes, of a container's layers
SIZE_FIELDS = (
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps".split()
)
DEFAULT_THETA = 10_000.0  # base of rotary angles in all engines, where config.json has none

Tensors = dict[str, Tensor]  # by name
Parsed = tuple[dict, Tensors]  # a reader's result: arguments of the constructor, own tensors
Prefixes = Sequence[tuple[str, str]]  # pairs (old prefix, new prefix); the first one that fits a name applies


@dataclass(frozen=True)
class Layout:
    """A drafter under the names of a public layout."""

    tensors: Tensors
    config: dict
    # files of torch.save with tensors that engines want apart
    pickles: Mapping[str, object] = field(default_factory=dict)
    # writer of further files into the folder, with the number of drafts in a round
    write_companions: Callable[[Path, int], None] | None = None
    fill_folder: Callable[[Path], int] | None = None  # writer of the whole folder instead -> bytes of the head
    weights: str = "model.safetensors"  # name of the file with the tensors
    keeps_dtypes: bool = False  # whether tensors are written in their own dtypes


def make_plain_layout(drafter: Drafter) -> Layout:
    """Any head under this project's own names, with the sizes in config.json."""
    config = {
        "drafter": type(drafter).__name__,
        "reads_layers": list(drafter.target_layers),
        "hidden_size": drafter.target.width,
        "vocab_size": drafter.target.vocab_size,
        "draft_vocab_size": drafter.vocab_size,
        "torch_dtype": None,
    }
    return Layout(list_own_tensors(drafter) | make_vocab_tensors(drafter), config)


# Tensors


def list_own_tensors(drafter: Drafter) -> Tensors:
    """The head's tensors without the draft vocabulary, which layouts write in another form."""
    return {name: value for name, value in drafter.state_dict().items() if name != "draft_to_target"}


def rename_prefix(name: str, prefixes: Prefixes) -> str:
    """The name with the first fitting prefix replaced; a name that no pair fits stays."""
    for old, new in prefixes:
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def rename_tensors(tensors: Tensors, prefixes: Prefixes) -> Tensors:
    """The same tensors under names with other prefixes, as `rename_prefix` gives them."""
    return {rename_prefix(name, prefixes): value for name, value in tensors.items()}


def swap_names(prefixes: Prefixes) -> list[tuple[str, str]]:
    """The pairs for the way back."""
    return [(new, old) for old, new in prefixes]


def is_copy(value: Tensor, original: Tensor) -> bool:
    """Whether a tensor of a file is one of the target's, to the last bit in the file's dtype."""
    return value.shape == original.shape and torch.equal(value.cpu(), original.detach().to(value.dtype).cpu())


def take_own_tensor(tensors: Tensors, name: str, original: Tensor, *, width: int | None = None) -> Tensor | None:
    """The tensor of this name, removed from `tensors`; None if there is none, or a copy of the target's.

    width: width of the head, if it may differ from the target's
    Raises ValueError for another shape than that of `original`.
    """
    public_tensor = tensors.pop(name, None)
    if public_tensor is None or is_copy(public_tensor, original):
        return None
    if tuple(public_tensor.shape) != (len(original), width or original.shape[1]):
        raise ValueError(
            f"{name} is {list(public_tensor.shape)} and the target's is {list(original.shape)}: is the target the "
            "model that the head was trained for?"
        )
    return public_tensor


def add_own_embedding(arguments: dict, head: Tensors, embedding: Tensor | None) -> Parsed:
    """A reader's result with the head's own embedding [V, E]; None: the head reads the target's."""
    if embedding is None:
        return arguments, head
    return {**arguments, "own_embedding": True}, {**head, "embedding": embedding}


# The draft vocabulary


def make_vocab_tensors(drafter: Drafter) -> Tensors:
    """The draft vocabulary as d2t [W] int64 and t2d [V] bool; nothing for a whole vocabulary.

    d2t holds offsets: target id = draft id + d2t[draft id].
    """
    vocab, inverse = drafter.draft_to_target, drafter.target_to_draft
    if vocab is None or inverse is None:
        return {}
    return {"d2t": vocab - torch.arange(len(vocab), device=vocab.device), "t2d": inverse >= 0}


def read_vocab(tensors: Tensors) -> Tensor | None:
    """The target ids [W] of the draft vocabulary d2t; None without one.

    Raises ValueError for absolute ids, ids out of order, or another t2d.
    """
    if "d2t" not in tensors:
        return None
    d2t, t2d = tensors["d2t"], tensors.get("t2d")
    if d2t.dtype != torch.int64 or (t2d is not None and t2d.dtype != torch.bool):
        raise ValueError(f"d2t must be int64 and t2d bool, not {d2t.dtype} and {getattr(t2d, 'dtype', None)}.")
    vocab = d2t + torch.arange(len(d2t), device=d2t.device)
    if int(d2t.min()) < 0 or not bool((vocab[1:] > vocab[:-1]).all()):
        raise ValueError("d2t must hold offsets, target id minus draft id, with target ids increasing.")
    if t2d is not None and (int(vocab[-1]) >= len(t2d) or not torch.equal(t2d.nonzero()[:, 0], vocab)):
        raise ValueError("d2t and t2d name different tokens: d2t must hold offsets, target id minus draft id.")
    return vocab


def drop_vocab_maps(tensors: Tensors) -> Tensors:
    """The tensors without d2t and t2d."""
    return {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}


def select_lm_head(target: Target, vocab: Tensor | None) -> Tensor:
    """The target's LM head [W, D] of a draft vocabulary [W]; None: of all tokens."""
    return target.lm_head.weight if vocab is None else target.lm_head.weight[vocab]


def drop_draft_vocab(drafter: Any) -> Any:
    """A copy of a drafter that borrows the target's LM head; the copy drafts from all V tokens.

    Raises ValueError for a table of the draft vocabulary, which has no rows for other tokens.
    """
    copy, vocab = drafter.frozen_copy(), drafter.draft_to_target
    dependence = getattr(copy, "dependence", None)
    if vocab is not None and dependence is not None:
        _widen_dependence(dependence, vocab, drafter.target.vocab_size)
    copy.draft_to_target = copy.target_to_draft = None
    copy.goal_head = (drafter.target.lm_head.weight, drafter.target.lm_head.bias)
    return copy


def _widen_dependence(dependence: Dependence, vocab: Tensor, vocab_size: int) -> None:
    """Gives a block drafter's dependence a row for each of V tokens.

    Tokens outside `vocab` [W] follow any token alike.
    """
    if set(dependence.token_row_prefixes) - {"after."}:
        raise ValueError(
            "The engine drafts from all tokens, and the selector's table has a draft vocabulary's only: train with "
            "head.vocab_size=null, or with dependence.table=false."
        )
    if isinstance(dependence, Lattice):
        dependence.sizes = replace(dependence.sizes, vocab_size=vocab_size)
    after = getattr(dependence, "after", None)
    if isinstance(after, nn.Linear):
        weight = after.weight.new_zeros(vocab_size, after.in_features).index_copy(0, vocab, after.weight)
        after.weight, after.out_features = nn.Parameter(weight, requires_grad=False), vocab_size


# Decoder layers


def write_layer_fields(config: LlamaConfig, target: Target) -> dict:
    """The fields of config.json for a head's decoder layer, in the spellings of transformers 4 and 5."""
    rope = dict(config.rope_parameters)  # type: ignore[arg-type]
    target_fields = target.config.to_dict()
    rope_type = rope["rope_type"]
    rope_options = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    return {
        **{name: getattr(config, name) for name in SIZE_FIELDS},
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if rope_type == "default" else {"type": rope_type, "rope_type": rope_type, **rope_options},
        "rope_parameters": rope,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": target_fields.get("bos_token_id"),
        "eos_token_id": target_fields.get("eos_token_id"),
        "pad_token_id": target_fields.get("pad_token_id") or 0,
    }


def read_layer(config: dict, target: Target, *, own_width: bool = False, qk_norm: bool = False) -> dict:
    """The arguments `intermediate_size` and `block` of a head with this config.json.

    `block` holds the settings that differ from `make_block_config`.
    own_width: whether the head may have another width than its target
    Raises ValueError for a width that it may not have.
    """
    width, num_heads = config["hidden_size"], config["num_attention_heads"]
    if (config.get("target_hidden_size") or target.width) != target.width or (width != target.width and not own_width):
        raise ValueError(
            f"The head is {width} wide and {target.name} is {target.width}: only heads of their target's "
            "width can be imported. Is the target the model that the head was trained for?"
        )
    layer_options = {
        "num_attention_heads": num_heads,
        "num_key_value_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or width // num_heads,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_parameters": _read_rope(config),
        "hidden_act": config.get("hidden_act", "silu"),
        "hidden_size": width,
    }
    target_options = make_block_config(target, intermediate_size=None).to_dict()
    block = {key: value for key, value in layer_options.items() if target_options.get(key) != value}
    if qk_norm:
        block["qk_norm"] = True
    return {"intermediate_size": config["intermediate_size"], "block": block or None}


def _read_rope(config: dict) -> dict:
    """The rotary embedding in the spelling of transformers 5."""
    rope = {"rope_type": "default", "rope_theta": config.get("rope_theta", DEFAULT_THETA)}
    if config.get("rope_parameters"):
        return rope | config["rope_parameters"]
    scaling = dict(config.get("rope_scaling") or {})
    old_type = scaling.pop("type", None)
    rope_type = scaling.pop("rope_type", old_type) or "default"
    return {**rope, "rope_type": rope_type, **scaling, "rope_theta": rope["rope_theta"]}


def read_container_layers(config: dict) -> dict:
    """The fields of a Speculators container's layers, with their model type's defaults, which containers leave out."""
    layer_fields = config.get("transformer_layer_config")
    if not isinstance(layer_fields, dict):
        return {}
    model_type = str(layer_fields.get("model_type", "qwen3"))
    if model_type not in ("llama", "qwen3"):
        raise ValueError(f"The layers of the container are of the type {model_type}: llama and qwen3 can be imported.")
    defaults = CONFIG_MAPPING[model_type]().to_dict()
    return {**{name: defaults[name] for name in (*SIZE_FIELDS, *CONTAINER_FIELDS)}, **layer_fields}


def check_embedding(target: Target) -> None:
    """Raises ValueError for a target that scales its embeddings.

    Engines give this head the unscaled rows.
    """
    if measure_embedding_scale(target) != 1:
        raise ValueError(
            f"{target.name} scales its embeddings, which exports of this head do not tell engines. Train an EAGLE-3 "
            "head, which normalises them, or a DFlash, DSpark or DFlash 2 drafter, which reads them unscaled."
        )


def check_layers(layers: tuple[int, ...], target: Target) -> None:
    """Raises ValueError for hidden states that engines number or normalise in another way."""
    if not 1 <= layers[0] <= layers[-1] < target.num_layers:
        raise ValueError(
            f"The head reads hidden states {list(layers)}. Engines have only 1 .. {target.num_layers - 1} in common "
            f"with training: their hidden state {target.num_layers} is before the final norm. Train with other "
            "target_layers=."
        )


# Sliding layers


def write_window_fields(drafter: Eagle3 | BlockDrafter) -> dict:
    """The fields of config.json for sliding layers; none where every layer sees all positions."""
    if drafter.window is None:
        return {}
    layer_types = [FULL if window is None else SLIDING for window in drafter.windows]
    return {"layer_types": layer_types, "sliding_window": drafter.window, "use_sliding_window": True}


def read_window(config: dict, num_layers: int) -> dict:
    """The arguments `window` and `full_layers` of a head with this config.json; none without sliding layers.

    Raises ValueError for layer types and a window that contradict each other.
    """
    layer_types = list(config.get("layer_types") or ())[:num_layers]
    if SLIDING not in layer_types:
        return {}
    if len(layer_types) < num_layers or not set(layer_types) <= {FULL, SLIDING}:
        raise ValueError(f"layer_types={layer_types} must be {FULL} or {SLIDING} for each of the {num_layers} layers.")
    window = config.get("sliding_window")
    if not isinstance(window, int):
        raise ValueError(
            f"config.json has sliding layers and sliding_window={window}: it must say how many positions they see."
        )
    return {"window": window, "full_layers": [layer for layer, kind in enumerate(layer_types) if kind == FULL]}
