"""Block drafters (DFlash, DSpark, DFlash 2, LiLiCorr, Domino): names, config.json, and the way back (docs/file-formats.md, section 10)."""

import re
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from specdec.export import layout
from specdec.export.layout import Layout
from specdec.heads.convolution import GROUP, BlockConvolution
from specdec.heads.dependence.markov import Markov
from specdec.heads.dependence.selector import Selector
from specdec.heads.dflash import BlockDrafter
from specdec.target.model import Target, load_tokenizer
from specdec.target.structure import FULL, SLIDING

MASK_FILE = "mask_embedding.pt"
NO_OWN_MASK = "take format=vllm, or train with head.drafter.mask_token=ID, a token that no text has"
ATTENTION_NAME = re.compile(r"^(layers\.\d+\.)([qkvo]_proj|[qk]_norm)\b")  # engines have these inside `self_attn`
CONFIDENCE_PREFIX = "confidence_head.proj."
# Of each kind: the class in config.json, and public names of what the dependence holds
CLASSES = {
    "dflash": "DFlashDraftModel",
    "dspark": "Qwen3DSparkModel",
    "dflash2": "DFlash2DraftModel",
    "domino": "DFlashDraftModel",
    "lilicorr": "LiLiCorrDraftModel",
}
PARTS = {
    "dspark": {
        "markov_head.markov_w1.weight": "before.weight",
        "markov_head.markov_w2.weight": "after.weight",
        **{
            f"markov_head.{name}_proj.{part}": f"{name}.{part}"
            for name in ("gate", "joint")
            for part in ("weight", "bias")
        },
    },
    "dflash2": {
        "candidate_selector.predecessor_codebook": "predecessor.weight",
        "candidate_selector.successor_codebook": "successor.weight",
        "candidate_selector.hidden_projection.weight": "hidden.weight",
    },
    "domino": {
        "prefix_gru.weight_ih_l0": "reader.weight_ih",
        "prefix_gru.weight_hh_l0": "reader.weight_hh",
        "embed_proj.0.weight": "join.weight",
        "embed_proj.2.weight": "after.weight",
    },
}
LILICORR_PREFIX = "lilicorr."  # before names that are the same here
# Names of modelopt's training code, which engines do not all know
LILICORR_OLD = {
    "feature_mlp.0.": "feature_norm.",
    "feature_mlp.1.": "feature_mlp.up_proj.",
    "feature_mlp.3.": "feature_mlp.down_proj.",
    ".mlp.0.": ".mlp.up_proj.",
    ".mlp.2.": ".mlp.down_proj.",
}
TOKEN_TABLES = (
    "before",
    "predecessor",
    "successor",
)  # tables of all tokens, which here may be maps of their embeddings
LOGIT_HEAD = "logit_head."  # a part of old names of SpecForge
OTHER_NAMES = {
    layout.EMBEDDING: "embedding",
    **{public: f"dependence.{own}" for names in PARTS.values() for public, own in names.items()},
    **{f"{CONFIDENCE_PREFIX}{part}": f"confidence_head.{part}" for part in ("weight", "bias")},
    # modelopt's names, and those of transformers' assistants
    **{f"confidence_proj.{part}": f"confidence_head.{part}" for part in ("weight", "bias")},
    **{public.removeprefix("markov_head."): f"dependence.{own}" for public, own in PARTS["dspark"].items()},
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}


def kind_of(drafter: BlockDrafter) -> str:
    """dflash, dspark, dflash2, lilicorr or domino"""
    if drafter.dependence is not None:
        return drafter.dependence.head
    return "dspark" if drafter.anchor_predicts else "dflash2" if _find_convolution(drafter) is not None else "dflash"


def _find_convolution(drafter: BlockDrafter) -> BlockConvolution | None:
    return next((part for part in drafter.layers[0].modules() if isinstance(part, BlockConvolution)), None)


def find_target_row(drafter: BlockDrafter) -> int | None:
    """The token whose row of the target's embedding the mask is; None: the mask has an embedding of its own."""
    weight = drafter.target.embed.weight
    rows = (weight == drafter.mask_embedding.to(weight.dtype)).all(dim=1).nonzero()
    return int(rows[0]) if drafter.mask_token is None and len(rows) else drafter.mask_token


def find_free_token(target: Target) -> int | None:
    """A token that no text has: one behind those of the tokenizer, or a reserved one; None: there is none, or no tokenizer."""
    try:
        tokenizer = load_tokenizer(target.name, trust_remote_code=target.trust_remote_code)
    except ValueError:
        return None
    if len(tokenizer) < target.vocab_size:
        return target.vocab_size - 1
    names = [
        (id, name) for name, id in tokenizer.get_added_vocab().items() if re.search("reserved|unused", name.lower())
    ]
    return max(names)[0] if names else None


def choose_mask_token(drafter: BlockDrafter) -> int:
    """The token whose row holds the mask's embedding: one that ends answers, so that nothing is drafted behind it."""
    if drafter.mask_token is not None:
        return drafter.mask_token
    fields = drafter.target.config.to_dict()
    end = fields.get("eos_token_id")
    token = end[0] if isinstance(end, list) else end
    return int(token if token is not None else fields.get("pad_token_id") or 0)


def make_mask_file(drafter: BlockDrafter, token: int | None) -> dict[str, dict]:
    """The file with the mask's embedding, which stands in the place of a token."""
    return {MASK_FILE: {"mask_token_id": token, "embedding": drafter.mask_embedding.detach().clone()}}


def _write_layers(drafter: BlockDrafter) -> tuple[dict, dict]:
    """-> tensors of the layers and of the dependence, config fields. Raises ValueError for what no engine has."""
    target, kind = drafter.target, kind_of(drafter)
    if drafter.join is not None:
        raise ValueError(
            "fuse=true adds an input that no engine has. Train with fuse=false, or serve an EAGLE-3 head, which starts in "
            "closed form too."
        )
    if drafter.full_causal or drafter.sinks:
        raise ValueError(
            "Causal full layers and attention sinks are given back in the layout they came in: format=published."
        )
    if _find_convolution(drafter) is not None and kind not in ("dflash2", "lilicorr"):
        raise ValueError("Engines have the convolution with a selector or LiLiCorr only: train with convolution=null.")
    if kind != "dflash" and not target.shape_logits.plain:
        raise ValueError(
            f"{target.name} scales or caps its logits. This head adds its scores behind that, and engines before: "
            "take format=safetensors, or train a DFlash drafter (dependence=null)."
        )
    layout.check_layers(drafter.target_layers, target)
    layout.check_embedding(target)
    head = {
        name: value
        for name, value in drafter.state_dict().items()
        if name.split(".")[0] in ("fc", "hidden_norm", "norm", "layers")
    }
    tensors = {ATTENTION_NAME.sub(r"\1self_attn.\2", name): value for name, value in head.items()}
    if (dependence := drafter.dependence) is not None:
        own_tensors, embedding = (
            dependence.state_dict(),
            target.embed.weight if drafter.embedding is None else drafter.embedding,
        )
        for name in TOKEN_TABLES:
            if isinstance(table := getattr(dependence, name, None), nn.Linear):
                own_tensors[f"{name}.weight"] = nn.functional.linear(
                    embedding.detach().to(table.weight.dtype), table.weight
                )  # [V, rank]
        names = PARTS.get(kind) or {f"{LILICORR_PREFIX}{name}": name for name in own_tensors}
        tensors |= {public: own_tensors[name] for public, name in names.items() if name in own_tensors}
    config = {
        "architectures": [CLASSES[kind]],
        "model_type": "qwen3",
        "num_hidden_layers": len(drafter.layers),
        **layout.write_layer_fields(drafter.config, target),
        "num_target_layers": target.num_layers,
        "layer_types": [FULL] * len(drafter.layers),
        **layout.write_window_fields(drafter),
        "draft_vocab_size": drafter.vocab_size,
        "torch_dtype": None,
    }
    if drafter.lm_head is not None or drafter.draft_to_target is not None:
        output = drafter.goal_head[0] if drafter.lm_head is None else drafter.lm_head.weight
        tensors |= {"lm_head.weight": output, **layout.make_vocab_tensors(drafter)}
        config |= {"has_own_lm_head": True} if kind == "lilicorr" else {}
    return tensors, config


def find_causality(drafter: BlockDrafter) -> bool | None:
    """Whether, in all layers, an input sees only earlier ones of its block; None: in sliding layers alone, as engines take it"""
    if drafter.window is None or not drafter.window_causal:
        return False
    return None if None in drafter.windows else True


def write_dflash(drafter: BlockDrafter) -> Layout:
    """DFlash, and DFlash 2, LiLiCorr or Domino over all tokens: engines have no draft vocabulary for these. The causality is where each looks.

    Raises ValueError for DSpark, and for heads that engines would run in another way.
    """
    kind = kind_of(drafter)
    if kind == "dspark":
        raise ValueError("This is a DSpark drafter, not a DFlash one.")
    if drafter.embedding is not None:
        raise ValueError(
            "Engines give a DFlash drafter the target's embedding, and this one has its own: take format=published."
        )
    if drafter.has_confidence:
        raise ValueError("Engines have confidence heads for DSpark only: train with confidence=false.")
    if kind != "dflash":
        drafter = layout.drop_draft_vocab(drafter)  # type: ignore[assignment]  # a copy of the same class
    fields = _write_dependence_fields(drafter)
    tensors, config = _write_layers(drafter)
    mask, causal = choose_mask_token(drafter), find_causality(drafter)
    # engines number layer outputs: one less than hidden states
    nested = {"mask_token_id": mask, "target_layer_ids": [k - 1 for k in drafter.target_layers], **fields}
    if causal is not None:
        config["is_causal"] = nested["causal"] = causal
    config |= {"block_size": drafter.num_drafts + (not drafter.anchor_predicts), "dflash_config": nested}
    return Layout(tensors, config, make_mask_file(drafter, mask))


def _write_dependence_fields(drafter: BlockDrafter) -> dict:
    """The fields of DFlash 2, of LiLiCorr and of Domino."""
    dependence, convolution = drafter.dependence, _find_convolution(drafter)
    convolution_fields = (
        {} if convolution is None else {"conv_kernel_size": convolution.taps, "conv_group_size": convolution.group}
    )
    if dependence is not None and (fields := dependence.engine_fields(drafter.anchor_predicts)) is not None:
        return fields | convolution_fields
    if dependence is None and convolution is None:
        return {}
    if not isinstance(dependence, Selector) or convolution is None or drafter.anchor_predicts:
        raise ValueError(
            "Engines have DFlash 2 with a selector, a convolution, and an anchor that predicts nothing: train with "
            "dependence.kind=selector convolution=2 anchor_predicts=false."
        )
    return {
        **convolution_fields,
        "selector_rank": dependence.hidden.out_features,
        "selector_top_k": dependence.top,
        "sample_from_anchor": False,
    }


def write_dspark(drafter: BlockDrafter) -> Layout:
    """With the target's embedding, in which the mask replaces one token's row: engines read DSpark's mask from nowhere else."""
    tensors, config = _write_layers(drafter)
    markov = drafter.dependence
    if not isinstance(markov, Markov):
        raise ValueError("Engines have no DSpark without a Markov head: train with dependence.kind=markov.")
    mask, embedding = choose_mask_token(drafter), drafter.target.embed.weight.detach()
    if drafter.embedding is not None:
        embedding = drafter.embedding
    embedding = embedding.to(drafter.fc.weight.dtype).clone()
    embedding[mask] = drafter.mask_embedding.to(embedding)
    tensors["embed_tokens.weight"] = embedding
    confidence, with_markov = drafter.confidence_head, False
    if confidence is not None:
        with_markov = confidence.in_features > drafter.target.width
        tensors |= {f"{CONFIDENCE_PREFIX}{part}": getattr(confidence, part) for part in ("weight", "bias")}
    config |= {
        "block_size": drafter.num_drafts + (not drafter.anchor_predicts),
        "target_layer_ids": [k - 1 for k in drafter.target_layers],
        "mask_token_id": mask,
        "sample_from_anchor": drafter.anchor_predicts,
        "dspark_bonus_anchor": not drafter.anchor_predicts,
        "markov_rank": markov.after.in_features,
        "markov_head_type": "vanilla" if markov.form == "plain" else markov.form,
        "enable_confidence_head": drafter.has_confidence,
        "confidence_head_with_markov": with_markov,
    }
    causal = find_causality(drafter)
    if drafter.window is not None and causal is not None:  # where DFlash's classes look, from which DSpark's derive
        places = {name: config[name] for name in ("mask_token_id", "target_layer_ids")}
        config |= {"is_causal": causal, "dflash_config": places | {"causal": causal}}
    return Layout(tensors, config)


def write_sglang(drafter: BlockDrafter) -> Layout:
    """A block drafter for SGLang, which drafts from all tokens, and takes the mask from a row of the target's embedding.

    It writes DFlash's mask_embedding.pt into that row, so nothing else may read it. Raises ValueError for masks without such a row.
    """
    target, row, whole = drafter.target, find_target_row(drafter), layout.drop_draft_vocab(drafter)
    dspark_like = kind_of(drafter) == "dspark"
    side_files: dict[str, dict] = {}
    if row is None:
        shared = target.lm_head.weight is target.embed.weight
        row = None if shared or dspark_like else find_free_token(target)
        if row is None:
            raise ValueError(
                "The mask of this head has an embedding of its own. SGLang reads none for DSpark, and writes DFlash's over a row of "
                f"the target's embedding, where {target.name} {'has its LM head' if shared else 'has no unused one'}: {NO_OWN_MASK}."
            )
        side_files = make_mask_file(drafter, row)
    full_layout = (write_dspark if dspark_like else write_dflash)(whole)  # type: ignore[arg-type]  # a copy of the same class
    tensors, config = dict(full_layout.tensors), dict(full_layout.config)
    if dspark_like:
        del tensors["embed_tokens.weight"]
        config |= {"mask_token_id": row, "block_size": drafter.num_drafts}  # a block of SGLang's is its drafts
        del config["dspark_bonus_anchor"]
    else:
        config["dflash_config"] = config["dflash_config"] | {"mask_token_id": row}
    return Layout(tensors, config, side_files)


def map_block_names(config: dict, names: Iterable[str]) -> dict[str, str]:
    """This project's name for each public name."""
    short_names = {name: name.removeprefix("model.").removeprefix(LOGIT_HEAD) for name in names}
    return {
        name: _map_lilicorr_name(short) or OTHER_NAMES.get(short, short.replace(".self_attn.", "."))
        for name, short in short_names.items()
    }


def _map_lilicorr_name(name: str) -> str | None:
    if not name.startswith(LILICORR_PREFIX):
        return None
    for old, new in LILICORR_OLD.items():
        name = name.replace(old, new)
    return f"dependence.{name.removeprefix(LILICORR_PREFIX)}"


def read_mask_file(side_files: dict) -> Tensor | None:
    """The embedding of the mask, [D], if it has a file."""
    if MASK_FILE not in side_files:
        return None
    state = side_files[MASK_FILE]
    if isinstance(state, dict) and (unknown_keys := state.keys() - {"mask_token_id", "embedding"}):
        raise ValueError(
            f"{MASK_FILE} holds {', '.join(sorted(map(str, unknown_keys)))}, which cannot be imported: one embedding can."
        )
    return (state["embedding"] if isinstance(state, dict) else state).reshape(-1)


def find_mask_token(config: dict) -> int | None:
    """The mask's token of a published head; None if it names none."""
    return flatten_fields(config).get("mask_token_id")


def flatten_fields(config: dict) -> dict:
    """The configuration with what `dflash_config` holds on the same level; older and newer heads have a field here or there."""
    return {**config, **(config.get("dflash_config") or {})}


def replace_mask_row(embedding: Tensor, mask: Tensor, config: dict) -> Tensor:
    """A copy of an embedding [V, D], with this row [D] at the mask's token."""
    changed = embedding.clone()
    changed[find_mask_token(config)] = mask.detach().to(changed)
    return changed


def add_mask_file(drafter: BlockDrafter, config: dict, side_files: dict, names: Container[str]) -> None:
    """Adds the file of the mask's embedding, where the layout has no place for one that training changed."""
    token, mask = find_mask_token(config), drafter.mask_embedding.detach()
    row = drafter.target.embed.weight[token]
    if MASK_FILE not in side_files and layout.EMBEDDING not in names and not torch.equal(mask, row.to(mask)):
        side_files |= make_mask_file(drafter, token)


def read_block_drafter(config: dict, tensors: dict[str, Tensor], side_files: dict, target: Target) -> tuple[dict, dict]:
    """A block drafter -> the arguments of `heads.dflash.BlockDrafter`, its tensors. Raises ValueError if they are none of this target.

    config: flat; layers in `dflash_config`, beside it, or a container's `aux_hidden_state_layer_ids`
    beside: contents of further files, by name; the mask's embedding may have one
    """
    mask = read_mask_file(side_files)
    nested, config = config.get("dflash_config") or {}, flatten_fields(config)
    layers = config.get("aux_hidden_state_layer_ids") or [k + 1 for k in config.get("target_layer_ids") or ()]
    mask_id = find_mask_token(config)
    if not layers or (mask is None and mask_id is None):
        raise ValueError("config.json names no hidden states or no mask token: is this a DFlash drafter?")
    has_markov = any("markov_w1" in name for name in tensors)
    anchor_predicts = config.get("sample_from_anchor")
    if config.get("projector_type") == "domino":
        anchor_predicts = config["shift_label"]
    if anchor_predicts is None:
        anchor_predicts = has_markov or "DSpark" in str(config.get("architectures"))
    sliding = _read_windows(config, nested)
    layout.check_layers(tuple(layers), target)
    tensors = dict(tensors)
    if mask is None:
        mask = _take_mask_row(tensors, int(mask_id or 0), target)
    embedding = layout.take_own_tensor(tensors, layout.EMBEDDING, target.embed.weight)
    vocab = None
    if "d2t" in tensors:
        vocab = layout.read_vocab(tensors["d2t"], tensors.get("t2d"))
    lm_head = layout.take_own_tensor(tensors, "lm_head.weight", layout.select_lm_head(target, vocab))
    own_names = map_block_names(config, tensors)
    head = {own_names[name]: value for name, value in layout.drop_vocab_maps(tensors).items()}
    head["mask_embedding"] = mask
    from_row = mask_id is not None and torch.equal(mask.to(target.embed.weight), target.embed.weight[int(mask_id)])
    if lm_head is not None:
        head["lm_head.weight"] = lm_head
    if vocab is not None:
        head["draft_to_target"] = vocab
    # whether the anchor counts as one of the block; raw DSpark says so itself (not in SGLang's form)
    flat = has_markov and "speculators_model_type" not in config
    in_block = bool(config.get("dspark_bonus_anchor")) if flat else not anchor_predicts
    arguments = {
        "_target_": "specdec.heads.dflash.BlockDrafter",
        **layout.read_layer({"head_dim": len(head["layers.0.q_norm.weight"]), **config}, target),
        "num_drafts": config["block_size"] - in_block,
        "num_layers": config["num_hidden_layers"],
        "target_layers": list(layers),
        "own_output": lm_head is not None,
        "anchor_predicts": bool(anchor_predicts),
        "sinks": "layers.0.attention_sink_bias" in head,
        **sliding,
        **({"mask_token": int(mask_id or 0)} if from_row else {}),
        **_read_dependence(head, config),
    }
    return layout.add_own_embedding(arguments, head, embedding)


def _take_mask_row(tensors: dict[str, Tensor], mask_id: int, target: Target) -> Tensor:
    """The mask's embedding, [D], a row of the embedding; if nothing else differs from the target's, this row becomes the target's."""
    target_embedding = target.embed.weight.detach()
    embedding = tensors.get(layout.EMBEDDING)
    if embedding is None or embedding.shape != target_embedding.shape:
        return target_embedding[mask_id].cpu().clone()
    target_copy = embedding.clone()
    target_copy[mask_id] = target_embedding[mask_id].to(target_copy)
    tensors[layout.EMBEDDING] = target_copy if layout.is_copy(target_copy, target_embedding) else embedding
    return embedding[mask_id].clone()


def _read_dependence(head: dict[str, Tensor], config: dict) -> dict:
    """The arguments of the dependence, the convolution and the confidence head, where there are any."""
    arguments: dict[str, Any] = {}
    if "dependence.before.weight" in head:
        form = config.get("markov_head_type") or "vanilla"
        if form == "rnn" and "speculators_model_type" in config and not config["sample_from_anchor"]:
            raise ValueError(
                "Speculators' recurrent Markov head reads the anchor twice where sample_from_anchor=false, and engines and this project "
                "once: take one with sample_from_anchor=true."
            )
        dependence_options = {
            "rank": head["dependence.before.weight"].shape[-1],
            "form": "plain" if form == "vanilla" else form,
        }
        arguments = {"dependence": {"kind": "markov", "table": True, **dependence_options}}
    if config.get("conv_kernel_size"):
        width, group = config["hidden_size"], config["conv_group_size"]
        if group != BlockConvolution(width, 1).group:
            raise ValueError(f"A convolution with conv_group_size={group} cannot be imported; {GROUP} can.")
        arguments = {"convolution": config["conv_kernel_size"]}
    if config.get("selector_rank"):
        dependence_options = {"rank": config["selector_rank"], "top": config["selector_top_k"], "table": True}
        arguments |= {"dependence": {"kind": "selector", **dependence_options}}
    if config.get("projector_type") == "lilicorr" or config.get("lilicorr_enabled"):
        names = {"top": "candidate_topk", "hidden": "hidden_size", "factor": "factor_dim"}
        names |= {name: name for name in ("num_layers", "num_heads", "mlp_ratio", "logit_scale", "vector_eps")}
        sizes = {own: config[f"lilicorr_{name}"] for own, name in names.items()}
        arguments |= {"dependence": {"kind": "lilicorr", **sizes, "hidden": sizes["hidden"] or None}}
    if config.get("projector_type") == "domino":
        if config["pure_draft_prefix_len"] != 1:
            raise ValueError(
                f"A Domino drafter with pure_draft_prefix_len={config['pure_draft_prefix_len']} cannot be imported; 1 can."
            )
        arguments = {"dependence": {"kind": "domino", "hidden": config["gru_hidden_dim"], "rank": config["emb_dim"]}}
    if (weight := head.get("confidence_head.weight")) is not None:
        arguments |= {"confidence": True, "confidence_markov": weight.shape[1] > config["hidden_size"]}
    return arguments


def _read_windows(config: dict, nested: dict) -> dict:
    """The arguments `window`, `full_layers`, `window_causal` and `full_causal`, as vLLM reads a raw drafter, and Speculators its
    container. config: `flatten_fields`; nested: `dflash_config`
    """
    num = config["num_hidden_layers"]
    layer_types = list(config.get("layer_types") or [FULL] * num)[:num]
    causal = config.get("is_causal")
    causal = nested.get("causal") if causal is None else causal
    if nested.get("use_swa") and SLIDING not in layer_types:  # all layers, and both ways unless it is said
        layer_types, causal = [SLIDING] * num, bool(causal)
    in_container = "speculators_model_type" in config
    if in_container:  # of sliding layers alone; without the field, as vLLM takes it
        causal = SLIDING in layer_types and not config.get("sliding_window_non_causal", True)
    full = {"full_causal": bool(causal and not in_container and FULL in layer_types)}
    sizes = {"layer_types": layer_types, "sliding_window": nested.get("swa_window_size", config.get("sliding_window"))}
    windows = layout.read_window(sizes, num)
    return full | ({**windows, "window_causal": causal is None or bool(causal)} if windows else {})
