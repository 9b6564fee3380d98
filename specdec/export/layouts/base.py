"""What the layouts share: the check against a manifest, rotary embeddings in all spellings, the draft vocabulary.

The manifest of a layout (names and shapes of all tensors) is made from its config.json alone, as an engine builds the
module before it reads the weights. The check therefore finds a config and tensors that do not fit together, which most
engines load without an error (docs/file-formats.md, section 13).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import LlamaConfig

from specdec.heads.base import Drafter
from specdec.heads.borrowed import embedding_scale
from specdec.heads.decoder_block import block_config
from specdec.target.model import Target

Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class Layout:
    """A drafter under the names of a public layout.

    shapes: the manifest, every tensor that `config` requires; fields: all fields of config.json
    pickles: further files, written by torch.save, for tensors that engines read from nowhere else
    """

    tensors: dict[str, Tensor]
    config: dict
    shapes: Shapes
    fields: frozenset[str]
    pickles: Mapping[str, object] = field(default_factory=dict)

    def check(self) -> None:
        """Raises ValueError for missing, superfluous or misshapen tensors and fields, mixed dtypes, and a wrong vocabulary map."""
        check_tensors(self.tensors, self.shapes)
        given = set(self.config)
        if given != self.fields:
            raise ValueError(
                f"config.json lacks {sorted(self.fields - given)} and has the superfluous {sorted(given - self.fields)}."
            )
        sizes = {value.dtype for value in self.tensors.values() if value.is_floating_point()}
        if len(sizes) != 1:
            raise ValueError(f"All weights must have one dtype, not {sorted(map(str, sizes))}.")
        if "d2t" in self.tensors:
            check_vocab(self.tensors["d2t"], self.tensors["t2d"])


def check_tensors(tensors: dict[str, Tensor], shapes: Shapes) -> None:
    """Raises ValueError with every tensor that is missing, superfluous or of another shape."""
    wrong = [f"{name} is missing" for name in sorted(shapes.keys() - tensors.keys())]
    wrong += [f"{name} is not part of the layout" for name in sorted(tensors.keys() - shapes.keys())]
    for name in sorted(shapes.keys() & tensors.keys()):
        if tuple(tensors[name].shape) != shapes[name]:
            wrong.append(f"{name} is {list(tensors[name].shape)}, not {list(shapes[name])}")
    if wrong:
        raise ValueError("; ".join(wrong[:8]) + (f" and {len(wrong) - 8} more" if len(wrong) > 8 else ""))


def vocab_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """d2t int64 [W], an offset (target id = draft id + d2t[draft id]), and t2d bool [V]; empty for a whole vocabulary."""
    vocab, inverse = drafter.draft_to_target, drafter.target_to_draft
    if vocab is None or inverse is None:
        return {}
    return {"d2t": vocab - torch.arange(len(vocab), device=vocab.device), "t2d": inverse >= 0}


def vocab_shapes(config: dict) -> Shapes:
    if config["draft_vocab_size"] == config["vocab_size"]:
        return {}
    return {"d2t": (config["draft_vocab_size"],), "t2d": (config["vocab_size"],)}


def check_vocab(d2t: Tensor, t2d: Tensor | None) -> Tensor:
    """The target ids [W] that d2t stands for. Raises ValueError for absolute ids, ids out of order, or another t2d."""
    if d2t.dtype != torch.int64 or (t2d is not None and t2d.dtype != torch.bool):
        raise ValueError(
            f"d2t must be int64 and t2d bool, not {d2t.dtype} and {t2d.dtype if t2d is not None else None}."
        )
    vocab = d2t + torch.arange(len(d2t), device=d2t.device)
    if int(d2t.min()) < 0 or not bool((vocab[1:] > vocab[:-1]).all()):
        raise ValueError("d2t must hold offsets, target id minus draft id, with target ids increasing.")
    if t2d is not None and (int(vocab[-1]) >= len(t2d) or not torch.equal(t2d.nonzero()[:, 0], vocab)):
        raise ValueError("d2t and t2d name different tokens: d2t must hold offsets, target id minus draft id.")
    return vocab


def block_fields(config: LlamaConfig, target: Target) -> dict:
    """The config fields of a head's decoder block, with rotary embeddings in the spellings of transformers 4 and of 5."""
    rope = dict(config.rope_parameters)  # type: ignore[arg-type]
    of_target = target.config.to_dict()
    kind = rope["rope_type"]
    others = {key: value for key, value in rope.items() if key not in ("rope_theta", "rope_type")}
    return {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": config.hidden_act,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if kind == "default" else {"type": kind, "rope_type": kind, **others},
        "rope_parameters": rope,
        "max_position_embeddings": config.max_position_embeddings,
        "vocab_size": target.vocab_size,
        "attention_bias": config.attention_bias,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": of_target.get("bos_token_id"),
        "eos_token_id": of_target.get("eos_token_id"),
        "pad_token_id": of_target.get("pad_token_id") or 0,
    }


def block_shapes(config: dict, *, prefix: str, width: int | None = None) -> Shapes:
    """Shapes of a block: attention over inputs of `width` (default: the hidden size), MLP, and the norm between them."""
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    width = width or hidden
    return {
        f"{prefix}self_attn.q_proj.weight": (queries, width),
        f"{prefix}self_attn.k_proj.weight": (keys, width),
        f"{prefix}self_attn.v_proj.weight": (keys, width),
        f"{prefix}self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
        f"{prefix}post_attention_layernorm.weight": (hidden,),
    }


def complete(config: dict) -> dict:
    """Adds the defaults of transformers for fields that are not there. Raises ValueError if it describes no decoder block."""
    try:
        heads, hidden = config["num_attention_heads"], config["hidden_size"]
        _ = config["intermediate_size"]
    except KeyError as error:
        raise ValueError(f"config.json has no field {error}: is this the folder of a drafter?") from None
    head_dim = config.get("head_dim") or hidden // heads
    return {**config, "num_key_value_heads": config.get("num_key_value_heads") or heads, "head_dim": head_dim}


def read_block(config: dict, target: Target) -> dict:
    """The arguments `intermediate_size` and `block` of a head with this config.json; `block` holds what differs from block_config.

    Raises ValueError for a head of another width.
    """
    config = complete(config)
    if not (config.get("target_hidden_size") or target.width) == config["hidden_size"] == target.width:
        raise ValueError(
            f"The head is {config['hidden_size']} wide and {target.name} is {target.width}: only heads of their target's "
            "width can be imported. Is the target the model that the head was trained for?"
        )
    rope = config.get("rope_parameters")
    if not rope:
        scaling = dict(config.get("rope_scaling") or {})
        kind = scaling.pop("type", None)
        rope = {"rope_type": scaling.pop("rope_type", kind) or "default", **scaling}
        rope["rope_theta"] = config.get("rope_theta", 10_000.0)  # the default of all engines
    written = {
        "num_attention_heads": config["num_attention_heads"],
        "num_key_value_heads": config["num_key_value_heads"],
        "head_dim": config["head_dim"],
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_parameters": rope,
        "hidden_act": config.get("hidden_act", "silu"),
    }
    own = block_config(target, intermediate_size=None).to_dict()
    block = {key: value for key, value in written.items() if own.get(key) != value}
    return {"intermediate_size": config["intermediate_size"], "block": block or None}


def rename(tensors: dict[str, Tensor], names: list[tuple[str, str]]) -> dict[str, Tensor]:
    """Replaces prefixes of names: the first pair (from, to) whose `from` begins a name applies. Other names stay."""
    renamed = {}
    for name, value in tensors.items():
        before, after = next(((a, b) for a, b in names if name.startswith(a)), ("", ""))
        renamed[after + name.removeprefix(before)] = value
    return renamed


def check_embedding(target: Target) -> None:
    """Raises ValueError for a target that scales its embeddings: engines give a head the unscaled rows."""
    if embedding_scale(target) != 1:
        raise ValueError(
            f"{target.name} scales its embeddings, and engines give this head the unscaled rows. Train an EAGLE-3 or MTP head, "
            "which normalise them."
        )


def is_copy(value: Tensor, original: Tensor) -> bool:
    """Whether they are equal up to rounding to 16 bits."""
    if value.shape != original.shape:
        return False
    return bool((value.to(original) - original).float().norm() <= 0.01 * original.float().norm())


def drop_copy(tensors: dict[str, Tensor], name: str, original: Tensor) -> None:
    """Removes a copy of one of the target's own tensors. Raises ValueError if the tensor is not a copy."""
    copy = tensors.pop(name, None)
    if copy is None:
        return
    if not is_copy(copy, original):
        raise ValueError(
            f"{name} is not the target's: heads with embeddings of their own cannot be imported. Is the target the model "
            "that the head was trained for?"
        )
