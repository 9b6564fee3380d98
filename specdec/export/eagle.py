"""EAGLE-1, EAGLE-3 and P-EAGLE: names, config.json, and the way back (docs/file-formats.md, sections 4 to 6)."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from specdec.export import layout
from specdec.export.layout import Layout
from specdec.heads.eagle import Eagle, Eagle3, PEagle
from specdec.target.model import Target

EMBEDDING = layout.EMBEDDING
EAGLE1_NAMES = [("block.", "layers.0."), ("embedding", EMBEDDING)]
SGLANG_NORMS = {
    f"aux_norm_{where}.": f"fc_norm.{number}." for number, where in enumerate(("low", "mid", "high"))
}  # SGLang's names
# Fields inside NVIDIA's `eagle_config` that make another head of it, where they are not this
PLAIN_FIELDS = {"use_aux_hidden_state": True, "use_last_layernorm": True, "use_mtp_layernorm": False,
         "use_input_layernorm_in_first_layer": True, "parallel_draft_step": 1}  # fmt: skip
MASK_TOKENS = ("ptd_token_id", "pard_token", "mask_token_id")  # the names of P-EAGLE's mask token
TOKEN_MAP = "token_map.pt"  # the draft vocabulary of EAGLE-1, which SGLang reads by --speculative-token-map
MIDLAYER = "midlayer."
LAYER = "layers.{}."  # of several layers; SGLang, modelopt and Speculators call a single one so, too


def list_eagle3_names(first_prefix: str, num_layers: int) -> list[tuple[str, str]]:
    """Own and public prefixes, longer public ones first. first_prefix: the public prefix of the first layer"""
    names = [(f"{norm}.", f"{first_prefix}{norm}.") for norm in ("input_layernorm", "hidden_norm")] + [
        ("block.", first_prefix)
    ]
    names.append(("embedding", EMBEDDING))
    return names + [(f"further.{number - 1}.", LAYER.format(number)) for number in range(1, num_layers)]


def find_default_layers(target: Target) -> tuple[int, int, int]:
    """The hidden states that every engine reads if config.json names none."""
    return 2, target.num_layers // 2, target.num_layers - 3


def list_norms(drafter: Eagle3) -> dict[str, bool]:
    """The switches of EAGLE-3, all written: engines differ in the meaning of a missing one."""
    return {
        "fc_norm": len(drafter.fc_norm) > 0,
        "norm_output": drafter.norm_output,
        "norm_before_fc": drafter.input_norm is not None,
        "norm_before_residual": drafter.norm_before_residual,
    }


def find_mask_token(config: dict) -> int | None:
    """P-EAGLE's mask token; None for EAGLE-3."""
    return next((config[name] for name in MASK_TOKENS if config.get(name) is not None), None)


def has_qk_norm(drafter: Eagle3) -> bool:
    return drafter.block.self_attn.q_norm is not None


def check_engine_has(drafter: Eagle3, engine: str, *, lacks: Sequence[str]) -> None:
    """Raises ValueError for an EAGLE-3 head with what an engine lacks, and for masks that only vLLM has.

    engine: the engine's name; lacks: switches, and num_layers where it takes a single layer
    """
    if (drafter.further and "num_layers" in lacks) or isinstance(drafter, PEagle):
        what = "P-EAGLE" if isinstance(drafter, PEagle) else "EAGLE-3 of several layers"
        raise ValueError(f"{engine} has no {what}: take format=vllm or speculators.")
    absent = [name for name, enabled in list_norms(drafter).items() if enabled and name in lacks]
    absent += ["norms of queries and keys"] if has_qk_norm(drafter) else []
    absent += (
        ["place for its embedding"]
        if drafter.embedding is not None and drafter.estimates_state and engine != "SafeAILab's code"
        else []
    )
    if absent:
        raise ValueError(f"{engine} has no {', '.join(absent)}, which this head was trained with: take format=vllm.")


# Export


def write_eagle1(drafter: Eagle, *, architecture: str, bias: bool = False) -> Layout:
    """bias: whether config.json says that `fc` has one. The tensor is always written, because SGLang always has one."""
    layout.check_embedding(drafter.target)
    if drafter.embedding is not None and architecture == "LlamaForCausalLMEagle":
        raise ValueError("SGLang gives EAGLE-1 the target's embedding, and this head has its own: take format=vllm.")
    head = layout.list_own_tensors(drafter)
    head.setdefault("fc.bias", torch.zeros_like(head["fc.weight"][:, 0]))
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "num_hidden_layers": 1,
        **layout.write_layer_fields(drafter.config, drafter.target),
        "bias": bias,
        "torch_dtype": None,
    }
    vocab = drafter.draft_to_target
    pickles = {} if vocab is None else {TOKEN_MAP: vocab.tolist()}
    return Layout(layout.rename_tensors(head, EAGLE1_NAMES), config, pickles)


def write_eagle3(drafter: Eagle3, *, hidden_norms: bool = False) -> Layout:
    """The layout that vLLM, SGLang, SafeAILab's code and llama.cpp's converter all read. P-EAGLE: vLLM alone.

    hidden_norms: whether the norm before attention in later layers is written as hidden_norm too, where SGLang looks for it
    """
    target, layers, num_layers = drafter.target, drafter.target_layers, 1 + len(drafter.further)
    layout.check_layers(layers, target)
    head = layout.list_own_tensors(drafter)
    if drafter.lm_head is None:
        weight, bias = drafter.goal_head
        if bias is not None:
            raise ValueError(
                f"The LM head of {target.name} has a bias, and in engines EAGLE-3's LM head has none: train with own_output=true."
            )
        head["lm_head.weight"] = target.shape_logits.scale * weight  # a cap keeps the order
    config = {
        "architectures": ["Eagle3Qwen3ForCausalLM" if has_qk_norm(drafter) else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if has_qk_norm(drafter) else "llama",
        "num_hidden_layers": num_layers,
        **layout.write_layer_fields(drafter.config, target),
        "draft_vocab_size": drafter.vocab_size,
        **list_norms(drafter),
        **({} if drafter.estimates_state else {"target_hidden_size": target.width}),
        **layout.write_window_fields(drafter),
        "torch_dtype": None,
    }
    if layers != find_default_layers(target):
        # vLLM reads the outer numbers. SGLang reads the inner ones, numbers of layer outputs.
        sglang_fields = {"eagle_aux_hidden_state_layer_ids": [k - 1 for k in layers], "use_aux_hidden_state": True}
        config |= {"eagle_aux_hidden_state_layer_ids": list(layers), "num_aux_hidden_states": len(layers)}
        config["eagle_config"] = sglang_fields
    if isinstance(drafter, PEagle):
        config["ptd_token_id"] = drafter.mask_token
    first_prefix = MIDLAYER if num_layers == 1 else LAYER.format(0)
    tensors = layout.rename_tensors(head, list_eagle3_names(first_prefix, num_layers)) | layout.make_vocab_tensors(
        drafter
    )
    for prefix in map(LAYER.format, range(1, num_layers) if hidden_norms else ()):
        tensors[f"{prefix}hidden_norm.weight"] = tensors[f"{prefix}input_layernorm.weight"].clone()
    return Layout(tensors, config)


# Import


def map_eagle1_names(config: dict, names: Iterable[str]) -> dict[str, str]:
    """This project's name for each public name."""
    return {name: layout.rename_prefix(name, layout.swap_names(EAGLE1_NAMES)) for name in names}


def map_eagle3_names(config: dict, names: Iterable[str]) -> dict[str, str]:
    """This project's name for each public name."""
    first_prefix = LAYER.format(0) if any(name.startswith(LAYER.format(0)) for name in names) else MIDLAYER
    num_layers = config.get("num_hidden_layers", 1)
    prefixes = [
        *(
            (f"{LAYER.format(later)}hidden_norm.", f"further.{later - 1}.input_layernorm.")
            for later in range(1, num_layers)
        ),
        *layout.swap_names(list_eagle3_names(first_prefix, num_layers)),
        *SGLANG_NORMS.items(),
        ("input_norm.", "input_norm."),
    ]
    return {name: layout.rename_prefix(name, prefixes) for name in names}


def read_eagle1(config: dict, tensors: dict[str, Tensor], side_files: dict, target: Target) -> tuple[dict, dict]:
    """-> the arguments of `heads.eagle.Eagle`, its tensors. Raises ValueError if they are no EAGLE-1 head of this target."""
    tensors = dict(tensors)
    embedding = layout.take_own_tensor(tensors, EMBEDDING, target.embed.weight)
    tensors.setdefault("fc.bias", torch.zeros_like(tensors["fc.weight"][:, 0]))
    own_names = map_eagle1_names(config, tensors)
    head = {own_names[name]: value for name, value in tensors.items()}
    biased = bool(head["fc.bias"].any())
    if not biased:
        del head["fc.bias"]
    if TOKEN_MAP in side_files:
        head["draft_to_target"] = torch.as_tensor(side_files[TOKEN_MAP], dtype=torch.long).sort().values
    arguments = {"_target_": "specdec.heads.eagle.Eagle", **layout.read_layer(config, target), "fc_bias": biased}
    return layout.add_own_embedding(arguments, head, embedding)


def read_eagle3(config: dict, tensors: dict[str, Tensor], side_files: dict, target: Target) -> tuple[dict, dict]:
    """-> the class and arguments of an Eagle3 or a PEagle, its tensors. Raises ValueError if they are no head of this target.

    config: flat; that of a Speculators container with the fields of its `transformer_layer_config`
    """
    tensors = dict(tensors)
    embedding = layout.take_own_tensor(tensors, EMBEDDING, target.embed.weight, width=config["hidden_size"])
    config, layers = _read_fields(config, target)
    mask_id, num_layers = find_mask_token(config), config.get("num_hidden_layers", 1)
    if (mask_id is None) != ("mask_hidden" not in tensors):
        raise ValueError(
            "P-EAGLE has mask_hidden among its tensors and a mask token in config.json: one of them is missing."
        )
    if mask_id is not None:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    for prefix in map(LAYER.format, range(1, num_layers)):  # vLLM reads the one, SGLang the other
        norm = tensors.pop(f"{prefix}hidden_norm.weight", None)
        if norm is not None and not torch.equal(norm, tensors[f"{prefix}input_layernorm.weight"]):
            raise ValueError(
                f"{prefix}hidden_norm and {prefix}input_layernorm differ, and engines disagree which one counts."
            )
    vocab = None
    if "d2t" in tensors:
        vocab = layout.read_vocab(tensors["d2t"], tensors.get("t2d"))
    public_lm_head = tensors.get("lm_head.weight")
    if public_lm_head is None and config.get("tie_word_embeddings"):
        raise ValueError("its LM head is its embedding (tie_word_embeddings), which cannot be imported.")
    if public_lm_head is not None and len(public_lm_head) == target.vocab_size:  # then the maps are the identity
        vocab = None
    unscaled = target.lm_head.bias is None and target.shape_logits.plain
    borrows = public_lm_head is None or (
        unscaled and layout.is_copy(public_lm_head, layout.select_lm_head(target, vocab))
    )
    if borrows:
        tensors.pop("lm_head.weight", None)
    own_names = map_eagle3_names(config, tensors)
    head = {own_names[name]: value for name, value in layout.drop_vocab_maps(tensors).items()}
    if vocab is not None:
        head["draft_to_target"] = vocab
    layout.check_layers(layers, target)
    arguments = {
        "_target_": f"specdec.heads.eagle.{'Eagle3' if mask_id is None else 'PEagle'}",
        **({} if mask_id is None else {"mask_token": mask_id}),
        **layout.read_layer(config, target, own_width=True, qk_norm="block.self_attn.q_norm.weight" in head),
        "num_layers": num_layers,
        "own_output": not borrows,
        **layout.read_window(config, num_layers),
        "target_layers": list(layers),
        "norm_features": bool(config.get("fc_norm") or config.get("use_aux_norm")),
        **{name: bool(config.get(name, False)) for name in ("norm_output", "norm_before_fc", "norm_before_residual")},
    }
    return layout.add_own_embedding(arguments, head, embedding)


def _read_fields(config: dict, target: Target) -> tuple[dict, tuple[int, ...]]:
    """-> the fields that say what the head is, all on one level, and the hidden states that it reads"""
    nested = config.get("eagle_config") or {}
    misplaced = [name for name in ("norm_output", "norm_before_residual", "fc_norm") if nested.get(name)]
    if misplaced:
        raise ValueError(f"eagle_config holds {', '.join(misplaced)}, which engines read one level up: move it there.")
    for name, expected in PLAIN_FIELDS.items():
        if nested.get(name, expected) not in (expected, None):
            raise ValueError(
                f"eagle_config has {name}={nested[name]}, which makes another head of it: {expected} can be imported."
            )
    layer_outputs = nested.get("eagle_aux_hidden_state_layer_ids")
    layers = config.get("eagle_aux_hidden_state_layer_ids") or (
        [k + 1 for k in layer_outputs] if layer_outputs else None
    )
    norm_before_fc = nested.get("norm_before_fc", config.get("norm_before_fc", False))
    return {**config, "norm_before_fc": norm_before_fc}, tuple(layers or find_default_layers(target))
