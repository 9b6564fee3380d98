"""Block drafters (DFlash, DSpark, DFlash 2): names, config.json, and the way back (docs/file-formats.md, section 10).

Experiments have further ones, by `make_block_family`.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from specdec.export import layout, speculators
from specdec.export.family import (
    LLAMA_CPP,
    SAMPLING_NOTE,
    TARGET_FOLDER,
    Clause,
    EngineRules,
    ExportFamily,
    PublishedFiles,
    RestoredHead,
    Writer,
    note_full_attention,
)
from specdec.export.layout import Layout, Parsed, Tensors
from specdec.heads.blocks import measure_embedding_scale
from specdec.heads.convolution import GROUP, BlockConvolution
from specdec.heads.dependence.markov import Markov
from specdec.heads.dependence.selector import Selector
from specdec.heads.dflash import BlockDrafter
from specdec.target.model import Target, load_tokenizer
from specdec.target.structure import FULL, SLIDING

MASK_FILE = "mask_embedding.pt"
NO_OWN_MASK = "take format=vllm, or train with head.drafter.mask_token=ID, a token that no text has"
ATTENTION_NAME = re.compile(r"^(layers\.\d+\.)([qkvo]_proj|[qk]_norm)\b")  # engines have these inside `self_attn`
# weights of maps into the residual stream, or into a norm
SCALED_WEIGHTS = ("fc.weight", "q_proj.weight", "k_proj.weight", "o_proj.weight", "down_proj.weight")
SCALE_FIELDS = ("output_multiplier", "final_logit_softcapping", "input_embedding_scale")
LAYER_TENSORS = ("fc.", "hidden_norm.", "norm.", "layers.")
# tables of all tokens, which here may be maps of their embeddings
TOKEN_TABLES = (
    "before",
    "predecessor",
    "successor",
)
CONFIDENCE_PREFIX = "confidence_head.proj."
OLD_PREFIXES = re.compile(r"^(model\.)?(logit_head\.)?")  # of some published heads; the second is SpecForge's
# Public prefixes of all block drafters -> own ones. The last three are of modelopt and of transformers' assistants
BLOCK_NAMES = [
    (layout.EMBEDDING, "embedding"),
    (CONFIDENCE_PREFIX, "confidence_head."),
    ("confidence_proj.", "confidence_head."),
    ("encoder.fc.", "fc."),
    ("encoder.output_norm_enc.", "hidden_norm."),
]
RUNNER_NOTE = "Only vLLM's V2 runner (GPU) drafts with this head."
ADAPTIVE_NOTE = "enable_adaptive_verification uses its confidence head."
MASK_NOTE = "mask_embedding.pt has the mask's embedding: keep it beside the weights, where vLLM looks for it."
SCALE_NOTE = "These weights expect the scaled embedding that SGLang's source gives to the head; it was not run."
CONFIDENCE_NOTE = "SGLang uses the confidence head where SGLANG_RAGGED_VERIFY_MODE=compact is in the environment."


@dataclass(frozen=True)
class BlockKind:
    """One kind of block drafter: what its dependence adds to the layout of DFlash."""

    kind: str
    architecture: str  # class in config.json
    names: Mapping[str, str] = field(default_factory=dict)  # public prefixes of the dependence's tensors -> own ones
    old_names: Mapping[str, str] = field(default_factory=dict)  # further public prefixes, for reading
    write_fields: Callable[[BlockDrafter], dict] = lambda drafter: {}  # fields of `dflash_config`
    is_declared: Callable[[dict], Any] = lambda config: False  # whether flat fields name the kind, whatever the tensors
    read_dependence: Callable[[Tensors, dict], dict | None] = lambda head, config: None  # -> its arguments
    anchor_field: str | None = None  # required field with `anchor_predicts`; None: sample_from_anchor, or a default
    convolution: bool = False  # whether engines have the convolution with it
    embeds_drafts: bool = False  # whether its dependence reads embeddings of drafts in engines
    output_fields: Mapping[str, Any] = field(default_factory=dict)  # fields for a head with an LM head of its own
    draft_vocabulary: bool = True

    @property
    def prefixes(self) -> list[tuple[str, str]]:
        """Public prefixes -> own ones, among the drafter's tensors."""
        names = {**self.names, **self.old_names}
        return [(public, f"dependence.{own}") for public, own in names.items()] + BLOCK_NAMES


def find_kind(drafter: BlockDrafter) -> str:
    """The kind of a block drafter: its dependence's, or dspark, dflash2 or dflash without one."""
    if drafter.dependence is not None:
        return drafter.dependence.head
    if drafter.anchor_predicts:
        return "dspark"
    return "dflash" if find_convolution(drafter) is None else "dflash2"


def find_convolution(drafter: BlockDrafter) -> BlockConvolution | None:
    """The first convolution of the first layer, if it has one."""
    return next((module for module in drafter.layers[0].modules() if isinstance(module, BlockConvolution)), None)


# The mask


def find_target_row(drafter: BlockDrafter) -> int | None:
    """The token whose row of the target's embedding the mask is; None: the mask has an embedding of its own."""
    if drafter.mask_token is not None:
        return drafter.mask_token
    weight = drafter.target.embed.weight
    equal = (weight == drafter.mask_embedding.to(weight.dtype)).all(dim=1).nonzero()
    return int(equal[0]) if len(equal) else None


def find_free_token(target: Target) -> int | None:
    """A token that no text has: one behind those of the tokenizer, or a reserved one. None: there is none."""
    try:
        tokenizer = load_tokenizer(target.name, trust_remote_code=target.trust_remote_code)
    except ValueError:
        return None
    if len(tokenizer) < target.vocab_size:
        return target.vocab_size - 1
    reserved = [
        token for name, token in tokenizer.get_added_vocab().items() if re.search("reserved|unused", name.lower())
    ]
    return max(reserved, default=None)


def choose_mask_token(drafter: BlockDrafter) -> int:
    """The token whose row holds the mask's embedding: one that ends answers, because nothing is drafted behind it."""
    if drafter.mask_token is not None:
        return drafter.mask_token
    fields = drafter.target.config.to_dict()
    end = fields.get("eos_token_id")
    token = end[0] if isinstance(end, list) else end
    return int(token if token is not None else fields.get("pad_token_id") or 0)


def make_mask_file(drafter: BlockDrafter, token: int | None) -> dict[str, dict]:
    """The side file with the mask's embedding [D], which takes the place of a token."""
    return {MASK_FILE: {"mask_token_id": token, "embedding": drafter.mask_embedding.detach().clone()}}


def read_mask_file(side_files: dict) -> Tensor | None:
    """The embedding [D] of the mask, if it has a file."""
    if MASK_FILE not in side_files:
        return None
    state = side_files[MASK_FILE]
    if not isinstance(state, dict):
        return state.reshape(-1)
    unknown = state.keys() - {"mask_token_id", "embedding"}
    if unknown:
        raise ValueError(
            f"{MASK_FILE} holds {', '.join(sorted(map(str, unknown)))}, which cannot be imported: one embedding can."
        )
    return state["embedding"].reshape(-1)


def find_mask_token(config: dict) -> int | None:
    """The mask's token of a published head; None if it names none."""
    return flatten_fields(config).get("mask_token_id")


def flatten_fields(config: dict) -> dict:
    """The configuration with the fields of `dflash_config` on its own level, where some heads have them."""
    return {**config, **(config.get("dflash_config") or {})}


def replace_mask_row(embedding: Tensor, mask: Tensor, config: dict) -> Tensor:
    """A copy of an embedding [V, D] with this row [D] at the mask's token."""
    changed = embedding.clone()
    changed[find_mask_token(config)] = mask.detach().to(changed)
    return changed


def restore_mask(restored: RestoredHead) -> None:
    """Puts a mask that training changed into the embedding's row, or into a side file where there is no embedding."""
    drafter, tensors = restored.drafter, restored.tensors
    if MASK_FILE in restored.side_files:
        return
    assert isinstance(drafter, BlockDrafter)
    mask = drafter.mask_embedding.detach()
    if layout.EMBEDDING in tensors:
        tensors[layout.EMBEDDING] = replace_mask_row(tensors[layout.EMBEDDING], mask, restored.config)
        return
    token = find_mask_token(restored.config)
    if not torch.equal(mask, drafter.target.embed.weight[token].to(mask)):
        restored.side_files |= make_mask_file(drafter, token)


# Export


def refuse_unknown_to_engines(drafter: BlockDrafter, kind: BlockKind) -> None:
    """Raises ValueError for a head with a part that no engine has."""
    if drafter.join is not None:
        raise ValueError(
            "fuse=true adds an input that no engine has. Train with fuse=false, or serve an EAGLE-3 head, which starts "
            "in closed form too."
        )
    if drafter.full_causal or drafter.sinks:
        raise ValueError(
            "Causal full layers and attention sinks are given back in the layout they came in: format=published."
        )
    if find_convolution(drafter) is not None and not kind.convolution:
        raise ValueError("Engines have the convolution with a selector or LiLiCorr only: train with convolution=null.")
    if kind.kind not in ("dflash", "dspark", "dflash2") and not drafter.target.shape_logits.plain:
        raise ValueError(
            f"{drafter.target.name} scales or caps its logits. This head adds its scores behind that, and engines "
            "before: take format=safetensors, or train a DFlash, DSpark or DFlash 2 drafter."
        )
    layout.check_layers(drafter.target_layers, drafter.target)
    if kind.embeds_drafts:
        layout.check_embedding(drafter.target)


def write_layers(drafter: BlockDrafter, kind: BlockKind, engine_scale: float) -> tuple[Tensors, dict]:
    """Public tensors of layers, dependence and output, and the fields of config.json that all kinds have.

    engine_scale: factor of the embedding's rows, and of the mask, that the engine gives to the head
    Raises ValueError for a head with a part that no engine has.
    """
    refuse_unknown_to_engines(drafter, kind)
    state = drafter.state_dict()
    tensors = {
        ATTENTION_NAME.sub(r"\1self_attn.\2", name): value
        for name, value in state.items()
        if name.startswith(LAYER_TENSORS)
    }
    tensors |= write_dependence(drafter, kind)
    config = {
        "architectures": [kind.architecture],
        "model_type": "qwen3",
        "num_hidden_layers": len(drafter.layers),
        **layout.write_layer_fields(drafter.config, drafter.target),
        "num_target_layers": drafter.target.num_layers,
        "layer_types": [FULL] * len(drafter.layers),
        **layout.write_window_fields(drafter),
        "draft_vocab_size": drafter.vocab_size,
        "torch_dtype": None,
    }
    if drafter.lm_head is not None or drafter.draft_to_target is not None:
        output = drafter.goal_head[0] if drafter.lm_head is None else drafter.lm_head.weight
        tensors |= {"lm_head.weight": output, **layout.make_vocab_tensors(drafter)}
        config |= kind.output_fields
    scale_inputs(tensors, config, engine_scale / drafter.embedding_scale)
    return tensors, config


def scale_inputs(tensors: Tensors, config: dict, factor: float) -> None:
    """Gives the layers the same output for inputs of `factor` times the size, in place.

    The residual stream and what enters a norm grow as much. Epsilon grows by the square, so no norm's output changes.
    """
    if factor == 1:
        return
    for name in [name for name in tensors if name.endswith(SCALED_WEIGHTS)]:
        tensors[name] = factor * tensors[name]
    config["rms_norm_eps"] *= factor**2


def write_dependence(drafter: BlockDrafter, kind: BlockKind) -> Tensors:
    """Public tensors of the dependence. Maps of the embedding become tables [V, rank]."""
    if drafter.dependence is None:
        return {}
    tensors = drafter.dependence.state_dict()
    embedding = drafter.target.embed.weight if drafter.embedding is None else drafter.embedding
    for name in TOKEN_TABLES:
        table = getattr(drafter.dependence, name, None)
        if isinstance(table, nn.Linear):
            rows = drafter.embedding_scale * embedding.detach().to(table.weight.dtype)
            tensors[f"{name}.weight"] = nn.functional.linear(rows, table.weight)
    return layout.rename_tensors(tensors, layout.swap_names(list(kind.names.items())))


def find_causality(drafter: BlockDrafter) -> bool | None:
    """Whether an input of a block sees only earlier ones of it, in all layers; None: in sliding layers alone."""
    causal_layers = [] if drafter.window is None else drafter.causal_layers
    if len(set(causal_layers)) < 2:
        return any(causal_layers)
    if causal_layers != [window is not None for window in drafter.windows]:
        raise ValueError(
            "Only some layers of this head are causal in a block, and engines take one window: leave window= out."
        )
    return None


def count_inputs(drafter: BlockDrafter) -> int:
    """The inputs of a block, the anchor included unless it predicts a draft itself."""
    return drafter.num_drafts + (not drafter.anchor_predicts)


def write_dflash(drafter: BlockDrafter, kind: BlockKind, engine_scale: float = 1.0) -> Layout:
    """DFlash, and kinds with its layout.

    Engines have no draft vocabulary for most of these, so all V tokens are drafted.
    engine_scale: see `write_layers`
    Raises ValueError for heads that engines would run otherwise.
    """
    if drafter.embedding is not None:
        raise ValueError(
            "Engines give a DFlash drafter the target's embedding, and this one has its own: take format=published."
        )
    if drafter.has_confidence:
        raise ValueError("Engines have confidence heads for DSpark only: train with confidence=false.")
    if not kind.draft_vocabulary:
        drafter = layout.drop_draft_vocab(drafter)
    fields = kind.write_fields(drafter) | write_scale_field(engine_scale)
    tensors, config = write_layers(drafter, kind, engine_scale)
    mask, causal = choose_mask_token(drafter), find_causality(drafter)
    # engines number layer outputs: one less than hidden states
    outputs = [number - 1 for number in drafter.target_layers]
    nested = {"mask_token_id": mask, "target_layer_ids": outputs, **fields}
    if causal is not None:
        config["is_causal"] = nested["causal"] = causal
    config |= {"block_size": count_inputs(drafter), "dflash_config": nested}
    return Layout(tensors, config, make_mask_file(drafter, mask))


def write_scale_field(engine_scale: float) -> dict:
    """The field of `dflash_config` that says by how much the engine scales the embedding's rows; none for 1"""
    return {} if engine_scale == 1 else {"input_embedding_scale": engine_scale}


def write_convolution_fields(drafter: BlockDrafter) -> dict:
    """The fields of `dflash_config` for the convolution; none without one."""
    convolution = find_convolution(drafter)
    if convolution is None:
        return {}
    return {"conv_kernel_size": convolution.taps, "conv_group_size": convolution.group}


def write_selector_fields(drafter: BlockDrafter) -> dict:
    """The fields of DFlash 2. Raises ValueError for a head that is none in engines."""
    selector, convolution = drafter.dependence, write_convolution_fields(drafter)
    if not isinstance(selector, Selector) or not convolution or drafter.anchor_predicts:
        raise ValueError(
            "Engines have DFlash 2 with a selector, a convolution, and an anchor that predicts nothing: train with "
            "dependence.kind=selector convolution=2 anchor_predicts=false."
        )
    shape, shape_fields = drafter.target.shape_logits, {}
    if not shape.plain:
        shape_fields = {"output_multiplier": shape.scale, "final_logit_softcapping": shape.cap}
    return {
        **convolution,
        **shape_fields,
        "selector_rank": selector.hidden.out_features,
        "selector_top_k": selector.top,
        "sample_from_anchor": False,
    }


def write_dspark(drafter: BlockDrafter, engine_scale: float = 1.0) -> Layout:
    """DSpark with the target's embedding, in which the mask replaces one token's row: engines read the mask there only.

    engine_scale: see `write_layers`
    Raises ValueError for a head without a Markov head, and for parts that no engine has.
    """
    tensors, config = write_layers(drafter, DSPARK, engine_scale)
    markov, confidence = drafter.dependence, drafter.confidence_head
    if not isinstance(markov, Markov):
        raise ValueError("Engines have no DSpark without a Markov head: train with dependence.kind=markov.")
    mask = choose_mask_token(drafter)
    embedding = drafter.target.embed.weight.detach() if drafter.embedding is None else drafter.embedding
    embedding = embedding.to(drafter.fc.weight.dtype).clone()
    embedding[mask] = drafter.mask_embedding.to(embedding)
    tensors["embed_tokens.weight"] = embedding
    if confidence is not None:
        tensors |= {f"{CONFIDENCE_PREFIX}{name}": value for name, value in confidence.named_parameters()}
    config |= {
        "block_size": count_inputs(drafter),
        "target_layer_ids": [number - 1 for number in drafter.target_layers],
        "mask_token_id": mask,
        "sample_from_anchor": drafter.anchor_predicts,
        "dspark_bonus_anchor": not drafter.anchor_predicts,
        "markov_rank": markov.after.in_features,
        "markov_head_type": "vanilla" if markov.form == "plain" else markov.form,
        "enable_confidence_head": drafter.has_confidence,
        "confidence_head_with_markov": confidence is not None and confidence.in_features > drafter.target.width,
    }
    causal = find_causality(drafter)
    if drafter.window is not None and causal is not None:  # where DFlash's classes look, from which DSpark's derive
        places = {name: config[name] for name in ("mask_token_id", "target_layer_ids")}
        config |= {"is_causal": causal, "dflash_config": places | {"causal": causal}}
    if scale_field := write_scale_field(engine_scale):
        config["dflash_config"] = config.get("dflash_config", {}) | scale_field
    return Layout(tensors, config)


def write_sglang_dflash(drafter: BlockDrafter, kind: BlockKind) -> Layout:
    """A block drafter for SGLang, which drafts from all tokens.

    SGLang takes the mask from a row of the target's embedding, and writes DFlash's mask_embedding.pt into that row. So
    no text may have this token. It embeds by the target's own module, which scales Gemma's rows.
    Raises ValueError for masks without such a row.
    """
    target, row, side_files = drafter.target, find_target_row(drafter), {}
    copy = layout.drop_draft_vocab(drafter)
    if row is None:
        row = None if target.lm_head.weight is target.embed.weight else find_free_token(target)
        if row is None:
            raise ValueError(describe_missing_row(target))
        side_files = make_mask_file(drafter, row)
    plain_layout = write_dflash(copy, kind, measure_embedding_scale(target))
    nested = plain_layout.config["dflash_config"] | {"mask_token_id": row}
    return Layout(plain_layout.tensors, plain_layout.config | {"dflash_config": nested}, side_files)


def write_sglang_dspark(drafter: BlockDrafter) -> Layout:
    """DSpark for SGLang, which drafts from all tokens, and reads the mask from the target's embedding only.

    Raises ValueError for a mask that is no row of it.
    """
    row, copy = find_target_row(drafter), layout.drop_draft_vocab(drafter)
    if row is None:
        raise ValueError(describe_missing_row(drafter.target))
    plain_layout = write_dspark(copy, measure_embedding_scale(drafter.target))
    config = plain_layout.config | {
        "mask_token_id": row,
        "block_size": drafter.num_drafts,
    }  # SGLang counts drafts alone
    del config["dspark_bonus_anchor"]
    tensors = {name: value for name, value in plain_layout.tensors.items() if name != layout.EMBEDDING}
    return Layout(tensors, config)


def describe_missing_row(target: Target) -> str:
    """The sentence for a mask that SGLang has no row for."""
    shared = target.lm_head.weight is target.embed.weight
    return (
        "The mask of this head has an embedding of its own. SGLang reads none for DSpark, and writes DFlash's over a "
        f"row of the target's embedding, where {target.name} {'has its LM head' if shared else 'has no unused one'}: "
        f"{NO_OWN_MASK}."
    )


def write_llama_cpp_dflash(drafter: BlockDrafter, kind: BlockKind) -> Layout:
    """DFlash or DFlash 2 for llama.cpp, which drafts from all tokens.

    Raises ValueError for a lattice that is too large.
    """
    lattice, width = drafter.lattice, drafter.target.width
    if lattice is not None and not drafter.target.shape_logits.plain:
        raise ValueError(describe_shaped_candidates(drafter.target, "llama.cpp's build 11434"))
    if lattice is not None and lattice.top * (lattice.top + 1) > width:
        raise ValueError(
            "llama.cpp carries a selector's candidates and scores in a state, and "
            f"{lattice.top * (lattice.top + 1)} numbers do not fit into {width}: train with a smaller dependence.top."
        )
    return write_dflash(layout.drop_draft_vocab(drafter), kind)


def describe_shaped_candidates(target: Target, engine: str) -> str:
    """The sentence for DFlash 2 and a target that scales or caps its logits."""
    return (
        f"{target.name} scales or caps its logits, and {engine} has no place for that beside a selector: take "
        "format=vllm or sglang, or train a DFlash or DSpark drafter."
    )


CONTAINER_FIELDS = {  # fields that the container has from the layout outside of it
    "dspark": (
        "block_size",
        "mask_token_id",
        "sample_from_anchor",
        "markov_rank",
        "markov_head_type",
        "enable_confidence_head",
        "confidence_head_with_markov",
    ),
    "dflash2": ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"),
}


def write_layer_container_fields(drafter: BlockDrafter) -> dict:
    """The fields of hidden states and windows. Raises ValueError for layers that vLLM would run otherwise."""
    causal = find_causality(drafter)
    if causal is None:
        raise ValueError(
            "vLLM takes all layers of a block drafter in this container as causal if the sliding ones are: take "
            "format=vllm, or train without full_layers or with window_causal=false."
        )
    # vLLM takes the second field for full layers, too
    return {"aux_hidden_state_layer_ids": list(drafter.target_layers), "sliding_window_non_causal": not causal}


def write_dflash_container(drafter: BlockDrafter, kind: BlockKind, architecture: str) -> Layout:
    """DFlash or DFlash 2 in a Speculators container.

    Raises ValueError for heads that its readers would run otherwise.
    """
    if drafter.lattice is not None and not drafter.target.shape_logits.plain:
        raise ValueError(describe_shaped_candidates(drafter.target, "a Speculators container"))
    plain_layout = write_dflash(drafter, kind)
    nested = plain_layout.config["dflash_config"]
    fields = {
        "block_size": plain_layout.config["block_size"],
        **write_layer_container_fields(drafter),
        "mask_token_id": choose_mask_token(drafter),
        "sample_from_anchor": False,
        **{name: nested[name] for name in CONTAINER_FIELDS.get(kind.kind, ())},
    }
    return speculators.write_container(drafter, kind.kind, architecture, plain_layout, "qwen3", fields)


def write_dspark_container(drafter: BlockDrafter) -> Layout:
    """DSpark in a Speculators container. Raises ValueError for heads that its readers would run otherwise."""
    plain_layout = write_dspark(drafter)
    layer_fields = write_layer_container_fields(drafter)
    if plain_layout.config["markov_head_type"] == "rnn" and not drafter.anchor_predicts:
        raise ValueError(
            "Speculators' recurrent Markov head reads the anchor twice where anchor_predicts=false: take format=sglang."
        )
    fields = {name: plain_layout.config[name] for name in CONTAINER_FIELDS["dspark"]} | layer_fields
    return speculators.write_container(drafter, "dspark", "DSparkSpeculator", plain_layout, "qwen3", fields)


# Import


def map_block_names(kind: BlockKind, config: dict, names: Iterable[str]) -> dict[str, str]:
    """This project's name for each public name."""
    return {
        name: layout.rename_prefix(OLD_PREFIXES.sub("", name), kind.prefixes).replace(".self_attn.", ".")
        for name in names
    }


def is_block_kind(family: ExportFamily, kind: BlockKind, files: PublishedFiles) -> bool:
    """Whether the tensors are those of a block drafter, and those or the fields of the kind's dependence are there."""
    own = set(family.public_names(files.flat, files.tensors).values())
    if "hidden_norm.weight" not in own:
        return False
    fields = flatten_fields(files.flat)
    return (
        kind.kind == "dflash" or bool(kind.is_declared(fields)) or any(name.startswith("dependence.") for name in own)
    )


def read_block_drafter(family: ExportFamily, kind: BlockKind, files: PublishedFiles, target: Target) -> Parsed:
    """The arguments of `heads.dflash.BlockDrafter`, and its tensors.

    Raises ValueError if they are none of this target.
    """
    config, tensors = flatten_fields(files.flat), dict(files.tensors)
    check_logit_shape(config, target)
    mask = read_mask_file(files.side_files)
    mask_id = config.get("mask_token_id")
    layers = _read_layer_numbers(config)
    if not layers or (mask is None and mask_id is None):
        raise ValueError("config.json names no hidden states or no mask token: is this a DFlash drafter?")
    layout.check_layers(layers, target)
    windows = _read_windows(config, files.flat.get("dflash_config") or {})
    if mask is None:
        mask = _take_mask_row(tensors, int(mask_id or 0), target)
    vocab = layout.read_vocab(tensors)
    embedding = layout.take_own_tensor(tensors, layout.EMBEDDING, target.embed.weight)
    lm_head = layout.take_own_tensor(tensors, "lm_head.weight", layout.select_lm_head(target, vocab))
    own_names = family.public_names(files.flat, tensors)
    head = {own_names[name]: value for name, value in layout.drop_vocab_maps(tensors).items()}
    extra = {"mask_embedding": mask, "lm_head.weight": lm_head, "draft_to_target": vocab}
    head |= {name: value for name, value in extra.items() if value is not None}
    anchor_predicts, num_drafts = _read_anchor(kind, config, tensors)
    arguments = {
        "_target_": family.head,
        **layout.read_layer({"head_dim": len(head["layers.0.q_norm.weight"]), **config}, target),
        "num_drafts": num_drafts,
        "num_layers": config["num_hidden_layers"],
        "target_layers": list(layers),
        "own_output": lm_head is not None,
        "anchor_predicts": anchor_predicts,
        "sinks": "layers.0.attention_sink_bias" in head,
        **windows,
        **_read_fixed_mask(mask, mask_id, target),
        **_read_parts(kind, head, config),
    }
    if config.get("input_embedding_scale"):
        arguments["embedding_scale"] = float(config["input_embedding_scale"])
    return layout.add_own_embedding(arguments, head, embedding)


def check_logit_shape(config: dict, target: Target) -> None:
    """Raises ValueError for a head that scales or caps its logits otherwise than its target."""
    multiplier, cap = config.get("output_multiplier") or 1, config.get("final_logit_softcapping") or None
    if (multiplier, cap) not in ((1, None), (target.shape_logits.scale, target.shape_logits.cap)):
        change = "scales" if multiplier != 1 else "caps"
        raise ValueError(
            f"it is a drafter that {change} its logits, and {target.name} does not do so, which cannot be imported."
        )


def _read_layer_numbers(config: dict) -> tuple[int, ...]:
    """The numbers of the hidden states: of a container as they are, elsewhere as numbers of layer outputs."""
    outputs = config.get("target_layer_ids") or ()
    return tuple(config.get("aux_hidden_state_layer_ids") or [number + 1 for number in outputs])


def _read_anchor(kind: BlockKind, config: dict, tensors: Iterable[str]) -> tuple[bool, int]:
    """Whether the anchor predicts a draft, and the number of drafts of a block."""
    has_markov = any("markov_w1" in name for name in tensors)
    predicts = config[kind.anchor_field] if kind.anchor_field else config.get("sample_from_anchor")
    if predicts is None:
        predicts = has_markov or "DSpark" in str(config.get("architectures"))
    # Raw DSpark says itself whether the anchor counts as one of the block (not in SGLang's form)
    raw = has_markov and "speculators_model_type" not in config
    in_block = bool(config.get("dspark_bonus_anchor")) if raw else not predicts
    return bool(predicts), config["block_size"] - in_block


def _read_fixed_mask(mask: Tensor, mask_id: int | None, target: Target) -> dict:
    """The argument `mask_token`, if the mask is a row of the target's embedding."""
    weight = target.embed.weight
    if mask_id is None or not torch.equal(mask.to(weight.device, weight.dtype), weight[int(mask_id)]):
        return {}
    return {"mask_token": int(mask_id or 0)}


def _take_mask_row(tensors: Tensors, mask_id: int, target: Target) -> Tensor:
    """The mask's embedding [D], a row of the embedding.

    If all others are the target's, the row becomes the target's, too.
    """
    original = target.embed.weight.detach()
    embedding = tensors.get(layout.EMBEDDING)
    if embedding is None or embedding.shape != original.shape:
        return original[mask_id].cpu().clone()
    without_mask = embedding.clone()
    without_mask[mask_id] = original[mask_id].to(without_mask)
    if layout.is_copy(without_mask, original):
        tensors[layout.EMBEDDING] = without_mask
    return embedding[mask_id].clone()


def _read_parts(kind: BlockKind, head: Tensors, config: dict) -> dict:
    """The arguments of the dependence, the convolution and the confidence head, as far as there are any."""
    arguments: dict[str, Any] = {}
    dependence = kind.read_dependence(head, config)
    if dependence is not None:
        arguments["dependence"] = dependence
    if config.get("conv_kernel_size"):
        group = config["conv_group_size"]
        if group != BlockConvolution(config["hidden_size"], 1).group:
            raise ValueError(f"A convolution with conv_group_size={group} cannot be imported; {GROUP} can.")
        arguments["convolution"] = config["conv_kernel_size"]
    weight = head.get("confidence_head.weight")
    if weight is not None:
        arguments |= {"confidence": True, "confidence_markov": weight.shape[1] > config["hidden_size"]}
    return arguments


def _read_markov(head: Tensors, config: dict) -> dict:
    """The arguments of a Markov head. Raises ValueError for a recurrent one that reads the anchor twice."""
    form = config.get("markov_head_type") or "vanilla"
    if form == "rnn" and "speculators_model_type" in config and not config["sample_from_anchor"]:
        raise ValueError(
            "Speculators' recurrent Markov head reads the anchor twice where sample_from_anchor=false, and engines and "
            "this project once: take one with sample_from_anchor=true."
        )
    rank = head["dependence.before.weight"].shape[-1]
    return {"kind": "markov", "table": True, "rank": rank, "form": "plain" if form == "vanilla" else form}


def _read_selector(head: Tensors, config: dict) -> dict:
    """The arguments of DFlash 2's selector."""
    return {"kind": "selector", "rank": config["selector_rank"], "top": config["selector_top_k"], "table": True}


def _read_windows(config: dict, nested: dict) -> dict:
    """The arguments `window`, `full_layers`, `window_causal` and `full_causal`.

    They are read as vLLM reads a raw drafter, and Speculators its container. nested: `dflash_config`
    """
    num_layers = config["num_hidden_layers"]
    layer_types = list(config.get("layer_types") or [FULL] * num_layers)[:num_layers]
    causal = config.get("is_causal")
    causal = nested.get("causal") if causal is None else causal
    if nested.get("use_swa") and SLIDING not in layer_types:  # all layers, and both ways unless it is said
        layer_types, causal = [SLIDING] * num_layers, bool(causal)
    in_container = "speculators_model_type" in config
    if in_container:  # of sliding layers alone; without the field, as vLLM takes it
        causal = SLIDING in layer_types and not config.get("sliding_window_non_causal", True)
    full_causal = bool(causal and not in_container and FULL in layer_types)
    window = nested.get("swa_window_size", config.get("sliding_window"))
    windows = layout.read_window({"layer_types": layer_types, "sliding_window": window}, num_layers)
    if windows:
        windows["window_causal"] = causal is None or bool(causal)
    return {"full_causal": full_causal, **windows}


# Engines

NVIDIA = EngineRules(
    [
        Clause("let all inputs of a block see each other", lambda drafter: drafter.window and drafter.window_causal),
        Clause(
            "have no draft vocabulary: train with head.vocab_size=null",
            lambda drafter: drafter.dependence is not None and drafter.draft_to_target is not None,
        ),
        Clause(
            f"take the mask from the target's embedding, and this head has its own: {NO_OWN_MASK}",
            lambda drafter: find_target_row(drafter) is None,
        ),
        Clause(
            "are not known to leave out the scale of the target's embedding, as vLLM does",
            lambda drafter: measure_embedding_scale(drafter.target) != 1,
        ),
    ],
    notes=[
        Clause(
            "Layers of this head see {value:,} positions; whether NVIDIA's engine reads the window was not run.",
            lambda drafter: drafter.window,
        )
    ],
)


def make_gguf_rules(*refusals: Clause, **changes: Any) -> EngineRules:
    """The rules of llama.cpp, with further refusals behind that for all block drafters."""
    causal = Clause(
        "llama.cpp lets all inputs of a block see each other, and layers with a window do not: train with "
        "window_causal=false, or take format=vllm or speculators.",
        lambda drafter: drafter.window and drafter.window_causal,
    )
    notes = [note_full_attention(LLAMA_CPP)]
    return EngineRules([causal, *refusals], options=[TARGET_FOLDER], notes=notes, **changes)


def reads_state(drafter: BlockDrafter) -> bool:
    """Whether it has a gated or recurrent Markov head, which reads the draft's state."""
    return getattr(drafter.dependence, "form", "plain") != "plain"


def refuse_state(engine: str) -> Clause:
    """The refusal of an engine with plain Markov heads only."""
    return Clause(
        f"{engine} has plain Markov heads only, and this one reads the draft's state: take format=sglang or "
        "speculators, or train with dependence.form=plain.",
        reads_state,
    )


def make_vllm_rules(*notes: str, refusals: Sequence[Clause] = ()) -> EngineRules:
    """The rules of vLLM, with further notes before those for all block drafters."""
    return EngineRules(refusals, notes=[*map(Clause, notes), note_window("vLLM"), SAMPLING_NOTE])


def make_sglang_rules(*notes: Clause, **changes: Any) -> EngineRules:
    """The rules of SGLang, with further notes behind those for all block drafters."""
    further = [
        Clause(CONFIDENCE_NOTE, lambda drafter: drafter.has_confidence),
        Clause(SCALE_NOTE, lambda drafter: measure_embedding_scale(drafter.target) != 1),
    ]
    return EngineRules(notes=[note_window("SGLang"), *further, *notes], **changes)


def note_window(engine: str) -> Clause:
    """The note on how the engine counts the window."""
    return Clause(
        f"{engine} counts the window of a sliding layer from each input of a block, training from the first one.",
        lambda drafter: drafter.window is not None,
    )


def make_block_family(
    kind: BlockKind, labels: Mapping[str, str], *, writers: Mapping[str, Writer], **fields: Any
) -> ExportFamily:
    """The record of a kind of block drafter.

    writers: writers that differ from DFlash's; fields: further fields of ExportFamily
    """
    usual: dict[str, Writer] = {"": partial(write_dflash, kind=kind), "sglang": partial(write_sglang_dflash, kind=kind)}
    family = ExportFamily(
        kind=kind.kind,
        head_class=BlockDrafter,
        labels=labels,
        inputs="states",
        selects=lambda drafter: find_kind(drafter) == kind.kind,
        public_names=fields.pop("public_names", partial(map_block_names, kind)),
        writers=usual | {**writers},
        draft_vocabulary=kind.draft_vocabulary,
        whole_block=True,
        restore_steps=(restore_mask,),
        **fields,
    )
    return replace(
        family, recognises=partial(is_block_kind, family, kind), read=partial(read_block_drafter, family, kind)
    )


PLAIN = BlockKind("dflash", "DFlashDraftModel")
MARKOV_NAMES = {"markov_w1.": "before.", "markov_w2.": "after.", "gate_proj.": "gate.", "joint_proj.": "joint."}
DSPARK = BlockKind(
    "dspark",
    "Qwen3DSparkModel",
    names={f"markov_head.{public}": own for public, own in MARKOV_NAMES.items()},
    old_names=MARKOV_NAMES,
    read_dependence=_read_markov,
)
SELECTOR = BlockKind(
    "dflash2",
    "DFlash2DraftModel",
    names={
        "candidate_selector.predecessor_codebook": "predecessor.weight",
        "candidate_selector.successor_codebook": "successor.weight",
        "candidate_selector.hidden_projection.": "hidden.",
    },
    write_fields=write_selector_fields,
    is_declared=lambda config: config.get("selector_rank"),
    read_dependence=_read_selector,
    convolution=True,
    draft_vocabulary=False,
)
FAMILIES = [
    make_block_family(
        DSPARK,
        {"dspark": "DSpark", "markov": "DSpark with gated and recurrent Markov heads"},
        container_field="sample_from_anchor",
        writers={"": write_dspark, "sglang": write_sglang_dspark, "speculators": write_dspark_container},
        engines={
            "gguf": make_gguf_rules(refuse_state("llama.cpp's converter")),
            "sglang": make_sglang_rules(draft_vocabulary=False),
            "speculators": EngineRules(unfit_engines=[Clause("vLLM", reads_state)]),
            "vllm": make_vllm_rules(RUNNER_NOTE, ADAPTIVE_NOTE, refusals=[refuse_state("vLLM 0.32")]),
            "nvidia": NVIDIA,
        },
    ),
    make_block_family(
        SELECTOR,
        {"dflash2": "DFlash 2"},
        writers={
            "gguf": partial(write_llama_cpp_dflash, kind=SELECTOR),
            "speculators": partial(write_dflash_container, kind=SELECTOR, architecture="DFlash2DraftModel"),
        },
        engines={
            "gguf": make_gguf_rules(),
            "sglang": make_sglang_rules(),
            "vllm": make_vllm_rules(RUNNER_NOTE, MASK_NOTE),
        },
    ),
    make_block_family(
        PLAIN,
        {"dflash": "DFlash"},
        writers={
            "gguf": partial(write_llama_cpp_dflash, kind=PLAIN),
            "speculators": partial(write_dflash_container, kind=PLAIN, architecture="DFlashSpeculator"),
        },
        engines={
            "gguf": make_gguf_rules(draft_vocabulary=False),
            "sglang": make_sglang_rules(draft_vocabulary=False),
            "vllm": make_vllm_rules(MASK_NOTE),
            "nvidia": NVIDIA,
        },
    ),
]
