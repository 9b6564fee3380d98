"""DFlash and DSpark: names, config.json, and the way back (docs/file-formats.md, section 10)."""

import re

import torch
from torch import Tensor, nn

from specdec.export import layout
from specdec.export.layout import Layout
from specdec.heads.dflash import BlockDrafter
from specdec.target.model import Target, load_tokenizer
from specdec.target.structure import FULL, SLIDING

MASK = "mask_embedding.pt"
NO_OWN_MASK = "take format=vllm, or train with head.drafter.mask_token=ID, a token that no text has"
OWN = re.compile(r"^(layers\.\d+\.)([qkvo]_proj|[qk]_norm)\b")  # engines have these inside `self_attn`
MARKOV_IN, MARKOV_OUT = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"


def is_dspark(drafter: BlockDrafter) -> bool:
    return drafter.anchor_predicts or drafter.markov_in is not None


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
    if drafter.draft_to_target is not None:
        tensors |= {"lm_head.weight": drafter.goal_head[0], **layout.vocab_tensors(drafter)}
    return tensors, config


def dflash(drafter: BlockDrafter) -> Layout:
    """Raises ValueError for anchors that predict and Markov heads, which only DSpark has, and for `fuse`."""
    if is_dspark(drafter):
        raise ValueError("This is a DSpark drafter, not a DFlash one.")
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
    if drafter.markov_in is None or drafter.markov_out is None:
        raise ValueError("Engines have no DSpark without a Markov head: train with markov_rank=256.")
    if not drafter.target.shape_logits.plain:
        raise ValueError(
            f"{drafter.target.name} scales or caps its logits. DSpark adds its Markov head behind that, and engines before: "
            "take format=safetensors, or train a DFlash drafter (markov_rank=null)."
        )
    mask, embedding = mask_token(drafter), drafter.target.embed.weight.detach()
    dtype, table = drafter.fc.weight.dtype, drafter.markov_in.weight
    if not isinstance(drafter.markov_in, nn.Embedding):
        table = nn.functional.linear(embedding.to(dtype), table)  # [V, rank]
    embedding = embedding.to(dtype).clone()
    embedding[mask] = drafter.mask_embedding.to(dtype)
    tensors |= {
        "embed_tokens.weight": embedding,
        MARKOV_IN: table,
        MARKOV_OUT: drafter.markov_out.weight,
    }
    if drafter.confidence_head is not None:
        tensors["confidence_head.proj.weight"] = drafter.confidence_head.weight
        tensors["confidence_head.proj.bias"] = drafter.confidence_head.bias
    config |= {
        "block_size": drafter.num_drafts + (not drafter.anchor_predicts),
        "target_layer_ids": [k - 1 for k in drafter.target_layers],
        "mask_token_id": mask,
        "sample_from_anchor": drafter.anchor_predicts,
        "dspark_bonus_anchor": not drafter.anchor_predicts,
        "markov_rank": table.shape[1],
        "markov_head_type": "vanilla",
        "enable_confidence_head": drafter.confident,
        "confidence_head_with_markov": drafter.confident,
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


def read_block_drafter(
    config: dict, tensors: dict[str, Tensor], mask: Tensor | None, target: Target
) -> tuple[dict, dict]:
    """DFlash or DSpark -> the arguments of `heads.dflash.BlockDrafter`, its tensors. Raises ValueError if they are none of this target.

    config: flat; layers in `dflash_config`, beside it, or a container's `aux_hidden_state_layer_ids`. mask [H]: its embedding, if it
    has a file of its own
    """
    nested = config.get("dflash_config") or config
    layers = config.get("aux_hidden_state_layer_ids") or [k + 1 for k in nested.get("target_layer_ids", [])]
    mask_id = config.get("mask_token_id", nested.get("mask_token_id"))
    if not layers or (mask is None and mask_id is None):
        raise ValueError("config.json names no hidden states or no mask token: is this a DFlash drafter?")
    has_markov = any("markov_head" in name for name in tensors)
    anchor_predicts = bool(config.get("sample_from_anchor", has_markov))
    if anchor_predicts and not has_markov:
        raise ValueError("DFlash with sample_from_anchor cannot be imported.")
    sliding = _read_windows(config, nested)
    layout.check_layers(tuple(layers), target)
    tensors = dict(tensors)
    if mask is None:
        mask = _read_mask(tensors, int(mask_id or 0), target)
    layout.drop_copy(tensors, "embed_tokens.weight", target.embed.weight)
    vocab = None
    if "d2t" in tensors:
        vocab = layout.check_vocab(tensors["d2t"], tensors.get("t2d"))
    layout.drop_copy(tensors, "lm_head.weight", layout.lm_head_rows(target, vocab))
    if has_markov and config.get("markov_head_type", "vanilla") != "vanilla":
        raise ValueError(f"A Markov head of the type {config['markov_head_type']} cannot be imported; vanilla can.")
    head = {name.replace(".self_attn.", "."): value for name, value in layout.without_maps(tensors).items()}
    head["mask_embedding"] = mask
    from_row = mask_id is not None and torch.equal(mask.to(target.embed.weight), target.embed.weight[int(mask_id)])
    if vocab is not None:
        head["draft_to_target"] = vocab
    sizes = layout.read_block(config, target)
    if sizes.pop("block"):
        raise ValueError(
            "The drafter has other heads, norms or rotary embeddings than its target: it cannot be imported."
        )
    # whether the anchor counts as one of the block; raw DSpark says so itself (not in SGLang's form)
    flat = has_markov and "speculators_model_type" not in config
    in_block = bool(config.get("dspark_bonus_anchor")) if flat else not anchor_predicts
    arguments = {
        "_target_": "specdec.heads.dflash.BlockDrafter",
        **sizes,
        "num_drafts": config["block_size"] - in_block,
        "num_layers": config["num_hidden_layers"],
        "target_layers": list(layers),
        **sliding,
        **({"mask_token": int(mask_id or 0)} if from_row else {}),
    }
    if has_markov:
        arguments |= {"anchor_predicts": anchor_predicts, **_read_markov(head, config)}
    return arguments, head


def _read_mask(tensors: dict[str, Tensor], mask_id: int, target: Target) -> Tensor:
    """The mask's embedding, [D], a row of the embedding in which nothing else may differ from the target's."""
    own = target.embed.weight.detach()
    embedding = tensors.get("embed_tokens.weight")
    if embedding is None or embedding.shape != own.shape:
        return own[mask_id].clone()
    tensors["embed_tokens.weight"] = embedding.clone()
    tensors["embed_tokens.weight"][mask_id] = own[mask_id].to(embedding)
    return embedding[mask_id].clone()


def _read_markov(head: dict[str, Tensor], config: dict) -> dict:
    """The arguments of DSpark's Markov and confidence heads, whose tensors are renamed in `head`."""
    head["markov_in.weight"], head["markov_out.weight"] = head.pop(MARKOV_IN), head.pop(MARKOV_OUT)
    rank = head["markov_in.weight"].shape[-1]
    arguments = {"markov_rank": rank, "markov_table": True}
    if not config.get("enable_confidence_head"):
        return arguments
    weight, head["confidence_head.bias"] = (head.pop(f"confidence_head.proj.{part}") for part in ("weight", "bias"))
    more = config["hidden_size"] + rank - weight.shape[1]  # 0 if it reads the Markov head
    head["confidence_head.weight"] = nn.functional.pad(weight, (0, more))
    return {**arguments, "confidence": True}


def _read_windows(config: dict, nested: dict) -> dict:
    """The arguments `window`, `full_layers` and `window_causal`, as vLLM reads a raw drafter, and Speculators its container.

    nested: `dflash_config`. Raises ValueError for layers that this project has not: full ones whose inputs see earlier ones only.
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
    if causal and not in_container and FULL in kinds:
        raise ValueError("DFlash with causal full layers cannot be imported.")
    sizes = {"layer_types": kinds, "sliding_window": nested.get("swa_window_size", config.get("sliding_window"))}
    found = layout.read_window(sizes, num)
    return {**found, "window_causal": causal is None or bool(causal)} if found else {}
