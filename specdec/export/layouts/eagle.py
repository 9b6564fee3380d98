"""The layouts of EAGLE-1, EAGLE-3 and P-EAGLE (docs/file-formats.md, sections 4 to 6)."""

import torch
from torch import Tensor

from specdec.export.layouts import base
from specdec.export.layouts.base import Layout, Shapes
from specdec.heads.dflash import BlockDrafter
from specdec.heads.eagle import Eagle, Eagle3, PEagle
from specdec.target.layer_kinds import FULL, SLIDING
from specdec.target.model import Target

NAMES1 = [("block.", "layers.0.")]
NAMES3 = [
    ("block.", "midlayer."),
    ("input_layernorm.", "midlayer.input_layernorm."),
    ("hidden_norm.", "midlayer.hidden_norm."),
]
BACK1 = [(public, own) for own, public in NAMES1]
# Longer names first. SGLang, modelopt and Speculators call the layer layers.0.
BACK3 = [
    (public.replace("midlayer.", prefix), own)
    for own, public in [*NAMES3[1:], NAMES3[0]]
    for prefix in ("midlayer.", "layers.0.")
]
FURTHER = "layers.{}."  # layers behind the first one; then the first one is called layers.0.
MASK_TOKENS = ("ptd_token_id", "pard_token", "mask_token_id")  # the names of P-EAGLE's mask token
TOKEN_MAP = "token_map.pt"  # the draft vocabulary of EAGLE-1, which SGLang reads by --speculative-token-map


def eagle1(drafter: Eagle, *, architecture: str, bias: bool = False) -> Layout:
    """bias: whether config.json says that `fc` has one. The tensor is always written, because SGLang always has one."""
    base.check_embedding(drafter.target)
    head = {name: value for name, value in drafter.state_dict().items() if name != "draft_to_target"}
    head.setdefault("fc.bias", torch.zeros_like(head["fc.weight"][:, 0]))
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **base.block_fields(drafter.config, drafter.target),
        "bias": bias,
        "torch_dtype": None,
    }
    vocab = drafter.draft_to_target
    pickles = {} if vocab is None else {TOKEN_MAP: vocab.tolist()}
    return Layout(base.rename(head, NAMES1), config, shapes1(config), FIELDS1, pickles)


def shapes1(config: dict) -> Shapes:
    hidden = config["hidden_size"]
    return {
        "fc.weight": (hidden, 2 * hidden),
        "fc.bias": (hidden,),
        **base.block_shapes(config, prefix="layers.0."),
    }


BLOCK_FIELDS = frozenset(
    "hidden_size intermediate_size num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps rope_theta "
    "rope_scaling rope_parameters max_position_embeddings vocab_size attention_bias mlp_bias tie_word_embeddings "
    "bos_token_id eos_token_id pad_token_id architectures model_type num_hidden_layers torch_dtype".split()
)
FIELDS1 = BLOCK_FIELDS | {"bias"}
FIELDS3 = BLOCK_FIELDS | {"draft_vocab_size", "fc_norm", "norm_output", "norm_before_fc", "norm_before_residual"}
LAYER_FIELDS = frozenset({"eagle_aux_hidden_state_layer_ids", "eagle_config", "num_aux_hidden_states"})


def read1(config: dict, tensors: dict[str, Tensor], vocab: Tensor | None, target: Target) -> tuple[dict, dict]:
    """-> the arguments of `heads.eagle.Eagle`, its tensors. Raises ValueError if they are no EAGLE-1 head of this target."""
    tensors = dict(tensors)
    base.drop_copy(tensors, "embed_tokens.weight", target.embed.weight)
    if any(name.endswith("_proj.bias") for name in tensors):
        raise ValueError("Attention biases cannot be imported: this head has some.")
    tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
    arguments = {"_target_": "specdec.heads.eagle.Eagle", **base.read_block(config, target)}
    base.check_tensors(tensors, shapes1(base.complete(config)))
    head = base.rename(tensors, BACK1)
    arguments["fc_bias"] = bool(head["fc.bias"].any())
    if not arguments["fc_bias"]:
        del head["fc.bias"]
    if vocab is not None:
        head["draft_to_target"] = vocab
    return arguments, head


def default_layers(target: Target) -> tuple[int, int, int]:
    """The hidden states that every engine reads if config.json names none."""
    return 2, target.num_layers // 2, target.num_layers - 3


def check_layers(layers: tuple[int, ...], target: Target) -> None:
    """Raises ValueError for hidden states that engines number or normalise in another way."""
    if not 1 <= layers[0] <= layers[-1] < target.num_layers:
        raise ValueError(
            f"The head reads hidden states {list(layers)}. Engines have only 1 .. {target.num_layers - 1} in common with "
            f"training: their hidden state {target.num_layers} is before the final norm. Train with other target_layers=."
        )


def eagle3(drafter: Eagle3) -> Layout:
    """The layout that vLLM, SGLang, SafeAILab's code and llama.cpp's converter all read.

    Of several layers, and of P-EAGLE: vLLM alone.
    """
    target, layers = drafter.target, drafter.target_layers
    check_layers(layers, target)
    head = {name: value for name, value in drafter.state_dict().items() if name != "draft_to_target"}
    if drafter.lm_head is None:
        head["lm_head.weight"] = _borrowed_lm_head(drafter)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1 + len(drafter.further),
        **base.block_fields(drafter.config, target),
        "draft_vocab_size": drafter.vocab_size,
        **norms(drafter),
        **window_fields(drafter),
        "torch_dtype": None,
    }
    fields = FIELDS3 | set(window_fields(drafter))
    if layers != default_layers(
        target
    ):  # vLLM reads the outer numbers; SGLang reads the inner ones, numbers of layer outputs
        inner = {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in layers], "use_aux_hidden_state": True}
        config |= {"eagle_aux_hidden_state_layer_ids": list(layers), "num_aux_hidden_states": len(layers)}
        config["eagle_config"] = inner
        fields = fields | LAYER_FIELDS
    if isinstance(drafter, PEagle):
        config["ptd_token_id"] = drafter.mask_token
        fields = fields | {"ptd_token_id"}
    names, prefix = NAMES3, "midlayer."
    if config["num_hidden_layers"] > 1:
        prefix = FURTHER.format(0)
        names = [(own, public.replace("midlayer.", prefix)) for own, public in NAMES3]
        names += [(f"further.{number}.", FURTHER.format(number + 1)) for number in range(len(drafter.further))]
    tensors = base.rename(head, names) | base.vocab_tensors(drafter)
    return Layout(tensors, config, shapes3(config, prefix=prefix), fields)


def _borrowed_lm_head(drafter: Eagle3) -> Tensor:
    """The target's rows [W, D] as a head's own, as engines want it. Raises ValueError for an LM head with a bias."""
    weight, bias = drafter.goal_head
    if bias is not None:
        raise ValueError(
            f"The LM head of {drafter.target.name} has a bias, and in engines EAGLE-3's LM head has none: train with own_output=true."
        )
    return drafter.target.shape_logits.scale * weight  # a cap keeps the order


def window_fields(drafter: Eagle3 | BlockDrafter) -> dict:
    """What config.json says of sliding layers; nothing where every layer sees all positions."""
    if drafter.window is None:
        return {}
    kinds = [FULL if window is None else SLIDING for window in drafter.windows]
    return {"layer_types": kinds, "sliding_window": drafter.window, "use_sliding_window": True}


def read_window(config: dict, num_layers: int) -> dict:
    """The arguments `window` and `full_layers` of a head with this config.json. Raises ValueError if it contradicts itself."""
    kinds = list(config.get("layer_types") or ())[:num_layers]
    if SLIDING not in kinds:
        return {}
    if len(kinds) < num_layers or not set(kinds) <= {FULL, SLIDING}:
        raise ValueError(f"layer_types={kinds} must be {FULL} or {SLIDING} for each of the {num_layers} layers.")
    window = config.get("sliding_window")
    if not isinstance(window, int):
        raise ValueError(
            f"config.json has sliding layers and sliding_window={window}: it must say how many positions they see."
        )
    return {"window": window, "full_layers": [layer for layer, kind in enumerate(kinds) if kind == FULL]}


def norms(drafter: Eagle3) -> dict[str, bool]:
    """The switches of EAGLE-3, all written: engines differ in the meaning of a missing one."""
    return {
        "fc_norm": len(drafter.fc_norm) > 0,
        "norm_output": drafter.norm_output,
        "norm_before_fc": drafter.input_norm is not None,
        "norm_before_residual": drafter.norm_before_residual,
    }


def check_plain(drafter: Eagle3, whose: str, *, lacks: tuple[str, ...]) -> None:
    """Raises ValueError for an EAGLE-3 head with switches that an engine ignores, and for layers and masks that only vLLM has.

    whose: the engine's name
    """
    if drafter.further or isinstance(drafter, PEagle):
        what = "P-EAGLE" if isinstance(drafter, PEagle) else "EAGLE-3 of several layers"
        raise ValueError(f"{whose} has no {what}: take format=vllm or speculators.")
    check_whole(drafter, whose)
    on = [name for name, given in norms(drafter).items() if given and name in lacks]
    if on:
        raise ValueError(f"{whose} has no {', '.join(on)}, which this head was trained with: take format=vllm.")


def check_whole(drafter: Eagle3 | BlockDrafter, whose: str) -> None:
    """Raises ValueError for a head whose layers see a window only, in an engine that knows no such heads."""
    if drafter.window is not None:
        raise ValueError(f"{whose} has no sliding layers in drafters: take format=vllm or speculators.")


def shapes3(config: dict, *, prefix: str = "midlayer.") -> Shapes:
    hidden = config["hidden_size"]
    num = len(config.get("eagle_aux_hidden_state_layer_ids") or [None] * 3)
    shapes = {
        "fc.weight": (hidden, num * hidden),
        f"{prefix}input_layernorm.weight": (hidden,),
        f"{prefix}hidden_norm.weight": (hidden,),
        **base.block_shapes(config, prefix=prefix, width=2 * hidden),
        "norm.weight": (hidden,),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        **base.vocab_shapes(config),
    }
    for number in range(1, config.get("num_hidden_layers", 1)):
        layer = FURTHER.format(number)
        shapes |= {f"{layer}input_layernorm.weight": (hidden,), **base.block_shapes(config, prefix=layer)}
    if mask_token(config) is not None:
        shapes["mask_hidden"] = (1, 1, num * hidden)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{number}.weight": (hidden,) for number in range(num)}
    if config.get("norm_before_fc"):
        shapes["input_norm.weight"] = (num * hidden,)
    return shapes


def _borrows_lm_head(weight: Tensor, vocab: Tensor | None, target: Target) -> bool:
    """Whether a head has the target's own LM head [W, D], to the last bit, so that it need not be kept. vocab [W]; None: all"""
    if target.lm_head.bias is not None or not target.shape_logits.plain:
        return False
    original = target.lm_head.weight if vocab is None else target.lm_head.weight[vocab]
    return torch.equal(weight, original.to(weight))


def mask_token(config: dict) -> int | None:
    """P-EAGLE's mask token; None for EAGLE-3."""
    return next((config[name] for name in MASK_TOKENS if config.get(name) is not None), None)


def read3(config: dict, tensors: dict[str, Tensor], target: Target) -> tuple[dict, dict]:
    """-> the class and arguments of an Eagle3 or a PEagle, its tensors. Raises ValueError if they are no head of this target.

    config: flat; that of a Speculators container with the fields of its `transformer_layer_config`
    """
    tensors = dict(tensors)
    base.drop_copy(tensors, "embed_tokens.weight", target.embed.weight)
    nested = config.get("eagle_config") or {}
    inside = [name for name in ("norm_output", "norm_before_residual", "fc_norm") if nested.get(name)]
    if inside:
        raise ValueError(f"eagle_config holds {', '.join(inside)}, which engines read one level up: move it there.")
    inner = nested.get("eagle_aux_hidden_state_layer_ids")
    layers = config.get("eagle_aux_hidden_state_layer_ids") or ([k + 1 for k in inner] if inner else None)
    config = {
        **base.complete(config),
        "eagle_aux_hidden_state_layer_ids": layers,
        "norm_before_fc": nested.get("norm_before_fc", config.get("norm_before_fc", False)),
        "vocab_size": target.vocab_size,
    }
    config["draft_vocab_size"] = config.get("draft_vocab_size") or len(tensors.get("lm_head.weight", ())) or None
    if config.get("attention_bias"):
        raise ValueError("Only EAGLE-3 heads without attention biases can be imported.")
    mask, num_layers = mask_token(config), config.get("num_hidden_layers", 1)
    if (mask is None) != ("mask_hidden" not in tensors):
        raise ValueError(
            "P-EAGLE has mask_hidden among its tensors and a mask token in config.json: one of them is missing."
        )
    if mask is not None:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    vocab = None
    if "d2t" in tensors:
        vocab = base.check_vocab(tensors["d2t"], tensors.get("t2d"))
        tensors.setdefault("t2d", torch.zeros(target.vocab_size, dtype=torch.bool))
    if config["draft_vocab_size"] == target.vocab_size:  # then the maps are the identity
        tensors = {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}
        vocab = None
    prefix = "layers.0." if any(name.startswith("layers.0.") for name in tensors) else "midlayer."
    base.check_tensors(tensors, shapes3(config, prefix=prefix))
    borrows = _borrows_lm_head(tensors["lm_head.weight"], vocab, target)
    if borrows:
        del tensors["lm_head.weight"]
    further = [(FURTHER.format(number), f"further.{number - 1}.") for number in range(1, num_layers)]
    head = base.rename(
        {name: value for name, value in tensors.items() if name not in ("d2t", "t2d")}, [*further, *BACK3]
    )
    if vocab is not None:
        head["draft_to_target"] = vocab
    check_layers(tuple(layers or default_layers(target)), target)
    arguments = {
        "_target_": f"specdec.heads.eagle.{'Eagle3' if mask is None else 'PEagle'}",
        **({} if mask is None else {"mask_token": mask}),
        **base.read_block(config, target),
        "num_layers": num_layers,
        "own_output": not borrows,
        **read_window(config, num_layers),
        "target_layers": list(layers or default_layers(target)),
        "norm_features": bool(config.get("fc_norm", False)),
        "norm_output": bool(config.get("norm_output", False)),
        "norm_before_fc": bool(config["norm_before_fc"]),
        "norm_before_residual": bool(config.get("norm_before_residual", False)),
    }
    return arguments, head
