"""DFlash and DSpark: names, config.json, and the way back (docs/file-formats.md, section 10)."""

import re
from collections.abc import Container, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from specdec.export import layout
from specdec.export.layout import Layout
from specdec.heads.dependence.markov import Part as Markov
from specdec.heads.dflash import BlockDrafter
from specdec.target.model import Target, load_tokenizer
from specdec.target.structure import FULL, SLIDING

MASK = "mask_embedding.pt"
NO_OWN_MASK = "take format=vllm, or train with head.drafter.mask_token=ID, a token that no text has"
OWN = re.compile(r"^(layers\.\d+\.)([qkvo]_proj|[qk]_norm)\b")  # engines have these inside `self_attn`
MARKOV_IN, MARKOV_OUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
CONFIDENCE = "confidence_head.proj."
OTHERS = {
    layout.EMBEDDING: "embedding",
    MARKOV_IN: "dependence.before.weight",
    MARKOV_OUT: "dependence.after.weight",
    **{f"{CONFIDENCE}{part}": f"confidence_head.{part}" for part in ("weight", "bias")},
    # modelopt's names, and those of transformers' assistants
    **{f"confidence_proj.{part}": f"confidence_head.{part}" for part in ("weight", "bias")},
    "markov_w1.weight": "dependence.before.weight",
    "markov_w2.weight": "dependence.after.weight",
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
LOGIT_HEAD = "logit_head."  # a part of old names of SpecForge


def is_dspark(drafter: BlockDrafter) -> bool:
    return drafter.anchor_predicts or isinstance(drafter.dependence, Markov)


def target_row(drafter: BlockDrafter) -> int | None:
    """The token whose row of the target's embedding the mask is; None: the mask has an embedding of its own."""
    weight = drafter.target.embed.weight
    rows = (weight == drafter.mask_embedding.to(weight.dtype)).all(dim=1).nonzero()
    return int(rows[0]) if drafter.mask_token is None and len(rows) else drafter.mask_token


def free_token(target: Target) -> int | None:
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


def mask_token(drafter: BlockDrafter) -> int:
    """The token whose row holds the mask's embedding: one that ends answers, so that nothing is drafted behind it."""
    if drafter.mask_token is not None:
        return drafter.mask_token
    fields = drafter.target.config.to_dict()
    end = fields.get("eos_token_id")
    token = end[0] if isinstance(end, list) else end
    return int(token if token is not None else fields.get("pad_token_id") or 0)


def _write_layers(drafter: BlockDrafter, *, needs: str) -> tuple[dict, dict]:
    """-> tensors of the layers, config fields; needs: the architecture. Raises ValueError for what no engine has."""
    target = drafter.target
    if drafter.join is not None:
        raise ValueError(
            "fuse=true adds an input that no engine has. Train with fuse=false, or serve an EAGLE-3 head, which starts in "
            "closed form too."
        )
    if drafter.full_causal or drafter.sinks:
        raise ValueError(
            "Causal full layers and attention sinks are given back in the layout they came in: format=published."
        )
    layout.check_layers(drafter.target_layers, target)
    layout.check_embedding(target)
    head = {
        name: value
        for name, value in drafter.state_dict().items()
        if name.split(".")[0] in ("fc", "hidden_norm", "norm", "layers")
    }
    tensors = {OWN.sub(r"\1self_attn.\2", name): value for name, value in head.items()}
    config = {
        "architectures": [needs],
        "model_type": "qwen3",
        "num_hidden_layers": len(drafter.layers),
        **layout.block_fields(drafter.config, target),
        "num_target_layers": target.num_layers,
        "layer_types": [FULL] * len(drafter.layers),
        **layout.window_fields(drafter),
        "draft_vocab_size": drafter.vocab_size,
        "torch_dtype": None,
    }
    if drafter.lm_head is not None or drafter.draft_to_target is not None:
        output = drafter.goal_head[0] if drafter.lm_head is None else drafter.lm_head.weight
        tensors |= {"lm_head.weight": output, **layout.vocab_tensors(drafter)}
    return tensors, config


def dflash(drafter: BlockDrafter) -> Layout:
    """Raises ValueError for anchors that predict and Markov heads, which only DSpark has, and for `fuse`."""
    if is_dspark(drafter):
        raise ValueError("This is a DSpark drafter, not a DFlash one.")
    if drafter.embedding is not None:
        raise ValueError(
            "Engines give a DFlash drafter the target's embedding, and this one has its own: take format=published."
        )
    tensors, config = _write_layers(drafter, needs="DFlashDraftModel")
    mask = mask_token(drafter)
    # engines number layer outputs: one less than hidden states
    nested = {"mask_token_id": mask, "target_layer_ids": [k - 1 for k in drafter.target_layers]}
    if drafter.window is not None and not drafter.window_causal:
        nested["causal"] = False  # of all layers; a missing field: of full ones only
    config |= {"block_size": drafter.num_drafts + 1, "dflash_config": nested}
    return Layout(
        tensors, config, {MASK: {"mask_token_id": mask, "embedding": drafter.mask_embedding.detach().clone()}}
    )


def dspark(drafter: BlockDrafter) -> Layout:
    """With the target's embedding, in which the mask replaces one token's row: engines read DSpark's mask from nowhere else."""
    layout.check_whole(drafter, "A DSpark drafter in an engine")
    tensors, config = _write_layers(drafter, needs="Qwen3DSparkModel")
    markov = drafter.dependence
    if not isinstance(markov, Markov) or markov.form != "plain":
        raise ValueError(
            "Engines have no DSpark without a plain Markov head: train with dependence.kind=markov dependence.form=plain."
        )
    if not drafter.target.shape_logits.plain:
        raise ValueError(
            f"{drafter.target.name} scales or caps its logits. DSpark adds its Markov head behind that, and engines before: "
            "take format=safetensors, or train a DFlash drafter (dependence=null)."
        )
    mask, embedding = mask_token(drafter), drafter.target.embed.weight.detach()
    if drafter.embedding is not None:
        embedding = drafter.embedding
    dtype, table = drafter.fc.weight.dtype, markov.before.weight
    if not isinstance(markov.before, nn.Embedding):
        table = nn.functional.linear(embedding.to(dtype), table)  # [V, rank]
    embedding = embedding.to(dtype).clone()
    embedding[mask] = drafter.mask_embedding.to(dtype)
    tensors |= {
        "embed_tokens.weight": embedding,
        MARKOV_IN: table,
        MARKOV_OUT: markov.after.weight,
    }
    confidence, with_markov = drafter.confidence_head, False
    if confidence is not None:
        with_markov = confidence.in_features > drafter.target.width
        tensors |= {f"{CONFIDENCE}{part}": getattr(confidence, part) for part in ("weight", "bias")}
    config |= {
        "block_size": drafter.num_drafts + (not drafter.anchor_predicts),
        "target_layer_ids": [k - 1 for k in drafter.target_layers],
        "mask_token_id": mask,
        "sample_from_anchor": drafter.anchor_predicts,
        "dspark_bonus_anchor": not drafter.anchor_predicts,
        "markov_rank": table.shape[1],
        "markov_head_type": "vanilla",
        "enable_confidence_head": drafter.confident,
        "confidence_head_with_markov": with_markov,
    }
    return Layout(tensors, config)


def sglang(drafter: BlockDrafter) -> Layout:
    """DFlash or DSpark for SGLang, which drafts from all tokens, and takes the mask from a row of the target's embedding.

    It writes DFlash's mask_embedding.pt into that row, so nothing else may read it. Raises ValueError for masks without such a row.
    """
    target, row, whole = drafter.target, target_row(drafter), layout.draft_from_all(drafter)
    own: dict[str, object] = {}
    if row is None:
        shared = target.lm_head.weight is target.embed.weight
        row = None if shared or is_dspark(drafter) else free_token(target)
        if row is None:
            raise ValueError(
                "The mask of this head has an embedding of its own. SGLang reads none for DSpark, and writes DFlash's over a row of "
                f"the target's embedding, where {target.name} {'has its LM head' if shared else 'has no unused one'}: {NO_OWN_MASK}."
            )
        own = {MASK: {"mask_token_id": row, "embedding": drafter.mask_embedding.detach().clone()}}
    made = (dspark if is_dspark(drafter) else dflash)(whole)  # type: ignore[arg-type]  # a copy of the same class
    tensors, config = dict(made.tensors), dict(made.config)
    if is_dspark(drafter):
        del tensors["embed_tokens.weight"]
        config |= {"mask_token_id": row, "block_size": drafter.num_drafts}  # a block of SGLang's is its drafts
        del config["dspark_bonus_anchor"]
    else:
        nested = config["dflash_config"] = config["dflash_config"] | {"mask_token_id": row}
        if "causal" in nested:
            config["is_causal"] = nested["causal"]  # where SGLang looks for it
    return Layout(tensors, config, own)


def own_names(config: dict, names: Iterable[str]) -> dict[str, str]:
    """This project's name for each public name."""
    plain = {name: name.removeprefix("model.").removeprefix(LOGIT_HEAD) for name in names}
    return {name: OTHERS.get(short, short.replace(".self_attn.", ".")) for name, short in plain.items()}


def read_mask_file(beside: dict) -> Tensor | None:
    """The embedding of the mask, [D], if it has a file."""
    if MASK not in beside:
        return None
    state = beside[MASK]
    if isinstance(state, dict) and (more := state.keys() - {"mask_token_id", "embedding"}):
        raise ValueError(
            f"{MASK} holds {', '.join(sorted(map(str, more)))}, which cannot be imported: one embedding can."
        )
    return (state["embedding"] if isinstance(state, dict) else state).reshape(-1)


def mask_of(config: dict) -> int | None:
    """The mask's token of a published head; None if it names none."""
    return read_fields(config).get("mask_token_id")


def read_fields(config: dict) -> dict:
    """The configuration with what `dflash_config` holds on the same level; older and newer heads have a field here or there."""
    return {**config, **(config.get("dflash_config") or {})}


def with_mask(embedding: Tensor, mask: Tensor, config: dict) -> Tensor:
    """A copy of an embedding [V, D], with this row [D] at the mask's token."""
    changed = embedding.clone()
    changed[mask_of(config)] = mask.detach().to(changed)
    return changed


def place_mask(drafter: BlockDrafter, config: dict, beside: dict, names: Container[str]) -> None:
    """Adds the file of the mask's embedding, where the layout has no place for one that training changed."""
    token, mask = mask_of(config), drafter.mask_embedding.detach()
    row = drafter.target.embed.weight[token]
    if MASK not in beside and layout.EMBEDDING not in names and not torch.equal(mask, row.to(mask)):
        beside[MASK] = {"mask_token_id": token, "embedding": mask.clone()}


def read_block_drafter(config: dict, tensors: dict[str, Tensor], beside: dict, target: Target) -> tuple[dict, dict]:
    """DFlash or DSpark -> the arguments of `heads.dflash.BlockDrafter`, its tensors. Raises ValueError if they are none of this target.

    config: flat; layers in `dflash_config`, beside it, or a container's `aux_hidden_state_layer_ids`
    beside: contents of further files, by name; the mask's embedding may have one
    """
    mask = read_mask_file(beside)
    nested, config = config.get("dflash_config") or {}, read_fields(config)
    layers = config.get("aux_hidden_state_layer_ids") or [k + 1 for k in config.get("target_layer_ids") or ()]
    mask_id = mask_of(config)
    if not layers or (mask is None and mask_id is None):
        raise ValueError("config.json names no hidden states or no mask token: is this a DFlash drafter?")
    has_markov = any("markov_w1" in name for name in tensors)
    anchor_predicts = config.get("sample_from_anchor")
    if anchor_predicts is None:
        anchor_predicts = has_markov or "DSpark" in str(config.get("architectures"))
    if has_markov and config.get("markov_head_type", "vanilla") != "vanilla":
        raise ValueError(f"A Markov head of the type {config['markov_head_type']} cannot be imported; vanilla can.")
    sliding = _read_windows(config, nested)
    layout.check_layers(tuple(layers), target)
    tensors = dict(tensors)
    if mask is None:
        mask = _read_mask(tensors, int(mask_id or 0), target)
    embedding = layout.take_own(tensors, layout.EMBEDDING, target.embed.weight)
    vocab = None
    if "d2t" in tensors:
        vocab = layout.check_vocab(tensors["d2t"], tensors.get("t2d"))
    lm_head = layout.take_own(tensors, "lm_head.weight", layout.lm_head_rows(target, vocab))
    own = own_names(config, tensors)
    head = {own[name]: value for name, value in layout.without_maps(tensors).items()}
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
        **layout.read_block({"head_dim": len(head["layers.0.q_norm.weight"]), **config}, target),
        "num_drafts": config["block_size"] - in_block,
        "num_layers": config["num_hidden_layers"],
        "target_layers": list(layers),
        "own_output": lm_head is not None,
        "anchor_predicts": bool(anchor_predicts),
        "sinks": "layers.0.attention_sink_bias" in head,
        **sliding,
        **({"mask_token": int(mask_id or 0)} if from_row else {}),
        **_read_markov(head, config),
    }
    return layout.with_embedding(arguments, head, embedding)


def _read_mask(tensors: dict[str, Tensor], mask_id: int, target: Target) -> Tensor:
    """The mask's embedding, [D], a row of the embedding; if nothing else differs from the target's, this row becomes the target's."""
    own = target.embed.weight.detach()
    embedding = tensors.get(layout.EMBEDDING)
    if embedding is None or embedding.shape != own.shape:
        return own[mask_id].cpu().clone()
    same = embedding.clone()
    same[mask_id] = own[mask_id].to(same)
    tensors[layout.EMBEDDING] = same if layout.is_copy(same, own) else embedding
    return embedding[mask_id].clone()


def _read_markov(head: dict[str, Tensor], config: dict) -> dict:
    """The arguments of DSpark's Markov and confidence heads, if there are any."""
    table, weight = head.get("dependence.before.weight"), head.get("confidence_head.weight")
    arguments: dict[str, Any] = {}
    if table is not None:
        arguments = {"dependence": {"kind": "markov", "rank": table.shape[-1], "table": True}}
    if weight is not None:
        arguments |= {"confidence": True, "confidence_markov": weight.shape[1] > config["hidden_size"]}
    return arguments


def _read_windows(config: dict, nested: dict) -> dict:
    """The arguments `window`, `full_layers`, `window_causal` and `full_causal`, as vLLM reads a raw drafter, and Speculators its
    container. config: `read_fields`; nested: `dflash_config`
    """
    num = config["num_hidden_layers"]
    kinds = list(config.get("layer_types") or [FULL] * num)[:num]
    causal = config.get("is_causal")
    causal = nested.get("causal") if causal is None else causal
    if nested.get("use_swa") and SLIDING not in kinds:  # all layers, and both ways unless it is said
        kinds, causal = [SLIDING] * num, bool(causal)
    in_container = "speculators_model_type" in config
    if in_container:  # of sliding layers alone; without the field, as vLLM takes it
        causal = SLIDING in kinds and not config.get("sliding_window_non_causal", True)
    full = {"full_causal": bool(causal and not in_container and FULL in kinds)}
    sizes = {"layer_types": kinds, "sliding_window": nested.get("swa_window_size", config.get("sliding_window"))}
    found = layout.read_window(sizes, num)
    return full | ({**found, "window_causal": causal is None or bool(causal)} if found else {})
