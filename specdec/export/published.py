"""Published heads in their own layouts: read as heads of ours, and written again as they came (docs/file-formats.md, section 8).

A published head is a folder with config.json and weights that other projects made. `read_published` gives what a checkpoint consists
of, with a record of the layout; from this record `restore_published` gives the same names, dtypes and configuration back.
"""

import hashlib
import math
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.core import hub, masks
from specdec.core.files import hash_file
from specdec.core.untrusted import check_values, find_inside, read_json, read_names, read_pickle, read_tensors
from specdec.export import block_drafter, eagle, layout, medusa, mtp
from specdec.export.layout import Layout
from specdec.heads.base import Drafter, Head
from specdec.heads.dflash import BlockDrafter
from specdec.heads.native import read_native_modules
from specdec.target.model import Target

CONFIG = "config.json"
ROTARY = "rotary_emb.inv_freq"
VOCAB_MAPS = ("d2t", "t2d", "token_map")  # of a draft vocabulary
INDEX = "model.safetensors.index.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin", medusa.HEADS_FILE, "medusa_lm_head.safetensors")
SIDE_FILES = (
    block_drafter.MASK_FILE,
    eagle.TOKEN_MAP,
)  # files of torch.save with tensors that are not among the weights
# Of a Speculators container, by type: a field that it must have, because readers guess differently without it
CONTAINERS = {
    "eagle3": "norm_before_residual",
    "peagle": "mask_token_id",
    "dflash": None,
    "dspark": "sample_from_anchor",
    "dflash2": None,
}
WHOLE = ("dflash2", "lilicorr", "domino")  # layouts without a draft vocabulary


@dataclass(frozen=True)
class Family:
    """A layout. head: the class of the head; read: its reader; own: (config, public names) -> this project's names by public ones"""

    head: str
    read: Callable[[dict, dict[str, Tensor], dict, Target], tuple[dict, dict[str, Tensor]]]
    own: Callable[[dict, list[str]], dict[str, str]]


FAMILIES = {
    "eagle": Family("eagle.Eagle", eagle.read_eagle1, eagle.map_eagle1_names),
    "eagle3": Family("eagle.Eagle3", eagle.read_eagle3, eagle.map_eagle3_names),
    "peagle": Family("eagle.PEagle", eagle.read_eagle3, eagle.map_eagle3_names),
    "medusa": Family("medusa.Medusa", medusa.read_medusa, medusa.map_medusa_names),
    "mtp": Family("mtp.MTP", mtp.read_mtp, mtp.map_mtp_names),
    **dict.fromkeys(
        block_drafter.CLASSES,
        Family("dflash.BlockDrafter", block_drafter.read_block_drafter, block_drafter.map_block_names),
    ),
}


@dataclass(frozen=True)
class PublishedFiles:
    """What a folder holds. config: verbatim; tensors: of the weights; beside: contents of further files, by name"""

    folder: Path
    config: dict
    tensors: dict[str, Tensor]
    side_files: dict[str, Any]
    paths: list[Path]

    @property
    def flat(self) -> dict:
        """The configuration on one level: that of a Speculators container with the fields of its layers."""
        return {**layout.read_container_layers(self.config), **self.config}


def is_published(folder: Path) -> bool:
    """Whether a folder is no checkpoint of this project, and has what a published head has."""
    return (folder / CONFIG).is_file() and not (folder / "drafter.json").exists()


def describe_published(folder: Path) -> dict:
    """What a published head is without its target: `_target_`, its class, and `target`, its target's name or None.

    Raises ValueError as `read_published`.
    """
    if is_whole_model(folder):
        name = hub.pin_commit(folder)
        return {
            "_target_": "specdec.heads.native.NativeMTP",
            "target": name.partition("@")[0] if hub.is_hub_name(name) else name,
        }
    files = open_folder(folder)
    family = _name_folder(folder, lambda: _find_family(files))
    document: dict = {"_target_": f"specdec.heads.{FAMILIES[family].head}", "target": _find_target_name(files.config)}
    num_drafts = block_drafter.flatten_fields(files.config).get("block_size")
    if isinstance(num_drafts, int):  # the most drafts of a round
        document["num_drafts"] = num_drafts
    return document


def read_published(folder: Path, target: Target) -> tuple[dict, dict[str, Tensor]]:
    """-> what `checkpoint.save` takes as its spec, with the key `published`, and the head's tensors, as they are in the file

    published: {layout, config, tensors: {name: [dtype, shape]}, source, sha256: {file: digest}, copies: {name: digest of a tensor
    that the head does not keep, as it is the target's}, beside: {file: content, of tensors dtype and shape}, order: of a draft
    vocabulary whose ids do not increase}
    Raises ValueError, with what to do, for a folder that holds no drafter of this target. Nothing in it can run code.
    """
    if is_whole_model(folder):
        return _name_folder(folder, lambda: read_native_modules(hub.pin_commit(folder), target))
    found = open_folder(folder)
    return _name_folder(folder, lambda: _read_head(found, target))


def _read_head(files: PublishedFiles, target: Target) -> tuple[dict, dict[str, Tensor]]:
    name = _find_family(files)
    family = FAMILIES[name]
    check_values(files.tensors)
    check_values(_flatten_tensors(files.side_files))
    size = files.flat.get("vocab_size")
    if size is not None and size not in (target.vocab_size, len(target.embed.weight)):
        raise ValueError(
            f"The head is for {size} tokens and {target.name} has {target.vocab_size}: is the target the model that the head was "
            "trained for?"
        )
    # older versions of transformers saved rotary frequencies, which follow from the configuration
    tensors = {key: value for key, value in files.tensors.items() if not key.endswith(ROTARY)}
    spec, head = family.read(files.flat, tensors, files.side_files, target)
    own_names = family.own(files.flat, list(files.tensors))
    record = {
        "layout": name,
        "config": files.config,
        "tensors": {key: [_name_dtype(value), list(value.shape)] for key, value in files.tensors.items()},
        "source": hub.pin_commit(files.folder) if hub.is_hub_name(hub.pin_commit(files.folder)) else files.folder.name,
        "sha256": {path.name: hash_file(path) for path in files.paths},
        "copies": {
            key: hash_tensor(_clear_mask_row(value, key, files.config))
            for key, value in files.tensors.items()
            if own_names[key] not in head
        },
        "beside": {file: _describe_content(content) for file, content in files.side_files.items()},
    }
    order = next((value for key, value in files.tensors.items() if key.endswith("token_map")), None)
    if order is not None and not bool((order[1:] > order[:-1]).all()):
        record["order"] = order.tolist()
    return {**spec, "published": record}, head


def is_whole_model(folder: Path) -> bool:
    """Whether the folder holds the weights of a language model, or names them: of one on the Hub only config.json and the index are
    here. Its own MTP modules may then be a drafter."""
    if (folder / INDEX).exists():
        return hub.indexes_whole_model(folder)
    path = folder / WEIGHTS[0]
    return path.exists() and any(map(hub.WHOLE_MODEL_TENSOR.fullmatch, read_names(find_inside(folder, WEIGHTS[0]))))


# Any layout


def _name_folder(folder: Path, work: Callable):
    """The work's result; what goes wrong in it is said in one sentence that names the folder."""
    try:
        return work()
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    except Exception as error:  # fields and tensors of a file may fail in any way
        cause = error.args[0] if isinstance(error, KeyError) else error
        reason = f"{cause} is missing" if isinstance(error, KeyError) else " ".join(str(cause).split())
        raise ValueError(f"{folder}: its config.json and weights do not make a drafter ({reason}).") from error


def _find_family(files: PublishedFiles) -> str:
    """The name of the layout in FAMILIES. Raises ValueError, which says what the folder holds, if it is none of them."""
    config, names = files.config, files.tensors.keys()
    _refuse_foreign(config, names)
    if "drafter" in config:
        raise ValueError(
            "This is format=safetensors, which is for other readers: use the checkpoint that it was exported from."
        )
    kind = config.get("speculators_model_type")
    if kind is not None:
        if kind not in CONTAINERS:
            raise ValueError(f"Speculators of type {kind} cannot be imported; {', '.join(CONTAINERS)} can.")
        needed = CONTAINERS[kind]
        if needed is not None and config.get(needed) is None:
            raise ValueError(f"write {needed} into config.json: vLLM and Speculators guess differently without it.")
    if any("linear" in name or name.startswith("blocks.") for name in names):
        return "medusa"
    if any("mtp_layers" in name for name in names):
        return "mtp"
    own_names = block_drafter.map_block_names(config, names).values()
    if "layers.0.q_norm.weight" in own_names and "hidden_norm.weight" in own_names:
        for kind, parts in block_drafter.PARTS.items():
            if any(f"dependence.{part}" in own_names for part in parts.values() if part != "after.weight"):
                return kind
        return "lilicorr" if "dependence.pass_hidden_proj.weight" in own_names else "dflash"
    if "norm.weight" in names and "fc.weight" in names:
        return "peagle" if eagle.find_mask_token(config) is not None else "eagle3"
    if "fc.weight" in names:
        return "eagle"
    raise ValueError(
        f"its tensors ({', '.join(sorted(names)[:3])}, ...) belong to none of the known layouts: EAGLE-1, EAGLE-3, P-EAGLE, Medusa, "
        "DFlash, DFlash 2, LiLiCorr, Domino, DSpark, MTP in MiMo's layout, and the Speculators container."
    )


# What gives away a head that exists elsewhere and not here: a part of its architecture's or type's name, a field of config.json, a
# part of the name of a tensor
FOREIGN_NAMES = {
    "xpress": "an xPress drafter",
    "dspine": "a DSpine drafter",
    "mlp_?speculator": "an MLP speculator",
    "hydra": "Hydra heads of another project",
}
FOREIGN_FIELDS = {
    "kv_lora_rank": "a drafter with latent attention (MLA)",
    "quantization_config": "a quantised head (take its weights before quantisation)",
    "output_multiplier": "a drafter that scales its logits",
    "input_embedding_scale": "a drafter that scales its embeddings",
    "final_logit_softcapping": "a drafter that caps its logits",
    "attention_value_scale": "a drafter that scales its values",
    "use_gemma_norm": "a drafter with the norms of Gemma",
}
FOREIGN_TENSORS = {
    "q_a_proj|kv_a_proj": "a drafter with latent attention (MLA)",
    "parallel_draft_heads": "EAGLE with parallel heads (modelopt)",
    r"\.experts\.": "a drafter with experts",
    r"^(?!.*lilicorr).*(self_attn|mlp)\.\w+_proj\.bias": "a drafter with biases in its attention or MLP",
    "_scale(_inv)?$|weight_packed$": "a quantised head (take its weights before quantisation)",
}


def _refuse_foreign(config: dict, names: Collection[str]) -> None:
    """Raises ValueError, which says what it is, for a head of a kind that does not exist here."""
    fields = {**block_drafter.flatten_fields(config), **layout.read_container_layers(config)}
    type_names = " ".join(str(config.get(key)) for key in ("architectures", "model_type", "speculators_model_type"))
    described = f"{type_names} {fields.get('projector_type')}".lower()
    reasons = [reason for part, reason in FOREIGN_NAMES.items() if re.search(part, described)]
    plain = lambda value: not value or (isinstance(value, float) and value == 1)
    reasons += [reason for name, reason in FOREIGN_FIELDS.items() if not plain(fields.get(name))]
    if not any("mtp_layers" in name for name in names):
        reasons += [reason for part, reason in FOREIGN_TENSORS.items() if any(re.search(part, name) for name in names)]
    if reasons:
        raise ValueError(f"it is {reasons[0]}, which cannot be imported.")


def _find_target_name(config: dict) -> str | None:
    """The name of the target that a Speculators container or a Medusa head names; None if it names none."""
    target_name = config.get("base_model_name_or_path")
    if isinstance(settings := config.get("speculators_config"), dict) and isinstance(settings.get("verifier"), dict):
        target_name = settings["verifier"].get("name_or_path")
    return target_name if isinstance(target_name, str) and target_name else None


# Files


def open_folder(folder: Path) -> PublishedFiles:
    path = find_inside(folder, CONFIG)
    if not path.exists():
        raise ValueError(f"{path} does not exist. A published head is a folder with config.json and its weights.")
    config = read_json(path)
    tensors, paths = _read_weights(folder)
    beside = {name: read_pickle(find_inside(folder, name)) for name in SIDE_FILES if (folder / name).exists()}
    return PublishedFiles(folder, config, tensors, beside, [path, *paths, *(folder / name for name in beside)])


def _read_weights(folder: Path) -> tuple[dict[str, Tensor], list[Path]]:
    """-> the weights, and the files that hold them"""
    if (folder / INDEX).exists():
        places = read_json(find_inside(folder, INDEX)).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(f"{folder}: {INDEX} has no weight_map.")
        paths = [find_inside(folder, str(name)) for name in sorted(set(map(str, places.values())))]
        return {key: value for path in paths for key, value in read_tensors(path).items()}, paths
    for name in WEIGHTS:
        if (folder / name).exists():
            path = find_inside(folder, name)
            if name.endswith(".safetensors"):
                return read_tensors(path), [path]
            content = read_pickle(path)
            if isinstance(content, dict) and all(isinstance(value, Tensor) for value in content.values()):
                return content, [path]
            raise ValueError(f"{path} holds something other than named tensors.")
    raise ValueError(f"{folder} has no weights: none of {', '.join(WEIGHTS)} is there.")


def hash_tensor(value: Tensor) -> str:
    """16 hex digits of a tensor's bytes."""
    flat = value.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _name_dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _describe_content(content: Any) -> Any:
    """The content of a file of torch.save as JSON: of a tensor its dtype and shape, and its values if they are whole numbers."""
    if isinstance(content, dict):
        return {str(key): _describe_content(value) for key, value in content.items()}
    if not isinstance(content, Tensor):
        return content
    description = {"dtype": _name_dtype(content), "shape": list(content.shape)}
    return description if content.is_floating_point() else description | {"values": content.tolist()}


# What no head may be


def _flatten_tensors(content: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors of files of torch.save, by the names of their places."""
    if isinstance(content, dict):
        return {
            path: value
            for key, entry in content.items()
            for path, value in _flatten_tensors(entry, f"{name} {key}").items()
        }
    return {name.strip(): content} if isinstance(content, Tensor) else {}


@torch.no_grad()
def check_output(drafter: Head) -> None:
    """Raises ValueError for a head that gives equal logits to all tokens whatever it reads, as one with weights of zero does."""
    assert isinstance(drafter, Drafter)
    target, device, cache = drafter.target, drafter.target.device, drafter.cache(1)
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(1, 1, len(drafter.target_layers) * target.width, generator=generator)
    h, tokens = drafter.encode(features.to(device, target.dtype)), torch.ones(1, 1, dtype=torch.long, device=device)
    cache.reserve(1)
    if drafter.context_kind in ("none", "block"):
        drafter.context(h, tokens - 1, cache)
        visible_keys: Any = masks.committed_mask(cache.lengths + 1, cache.visible)
    else:
        visible_keys = cache.sees(masks.causal_mask(1, device))
    logits = drafter.loss_logits(1, drafter.step(1, h, tokens, tokens, visible_keys, cache)[1]).float()
    if not bool((logits.amax(-1) > logits.amin(-1)).all()):
        raise ValueError(
            "the head gives all tokens the same logit, whatever it reads: its weights are zero or damaged, take another copy of it."
        )


# Written again as it came


def restore_published(drafter: Drafter) -> Layout:
    """The head in the layout that it was published in: the same names, dtypes and fields. What training changed is new.

    Raises ValueError for a head that was not published by others, and where its layout has no place for what training made.
    """
    record = drafter.published
    if record is None or record["layout"] not in FAMILIES:
        raise ValueError(
            "format=published is for heads that other projects published on their own. A model's own MTP module takes format=stitched."
        )
    dtypes = {dtype for dtype, _ in record["tensors"].values()}
    if not set(record["beside"]) <= set(SIDE_FILES) or not all(
        isinstance(getattr(torch, dtype, None), torch.dtype) for dtype in dtypes
    ):
        raise ValueError("The record of how this head was published is damaged or unsafe: take another format.")
    config, names, state = dict(record["config"]), dict(record["tensors"]), drafter.state_dict()
    side_files = {name: _restore_side_file(drafter, name, content) for name, content in record["beside"].items()}
    _add_vocab_maps(drafter, config, names, side_files)
    own_names = FAMILIES[record["layout"]].own({**layout.read_container_layers(config), **config}, list(names))
    restorable = {own_names[name] for name in names} | {"mask_embedding", "draft_to_target"}
    lost = [name for name in state if name not in restorable and bool(state[name].any())]
    if "lm_head.weight" in names:  # one for all heads of Medusa
        lost = [name for name in lost if not torch.equal(state[name], state.get("lm_heads.0.weight", state[name][:0]))]
    if lost:
        raise ValueError(f"The layout that this head came in has no place for {', '.join(lost)}: take another format.")
    if isinstance(drafter, BlockDrafter):
        block_drafter.add_mask_file(drafter, config, side_files, names)
    tensors, vocabulary_order = {}, _find_vocabulary_order(drafter, record)
    for name, (dtype, shape) in names.items():
        value = state[own_names[name]] if own_names[name] in state else _borrow_tensor(name, drafter, shape).clone()
        if own_names[name].endswith("eh_proj.weight"):
            value = mtp.swap_halves(value)
        if vocabulary_order is not None and ("lm_head" in own_names[name] or name.endswith("token_map")):
            value = value[vocabulary_order]
        value = value.detach().to(getattr(torch, dtype), copy=True)  # safetensors refuses shared storage
        tensors[name] = value.reshape(shape) if value.numel() == math.prod(shape) else value
    differs = {
        name
        for name, value in record["copies"].items()
        if hash_tensor(_clear_mask_row(tensors[name], name, config)) != value
    }
    new_vocab = bool(differs & {*VOCAB_MAPS}) or not {*VOCAB_MAPS} & {*names} <= {*record["tensors"]}
    if wrong := [name for name in differs if not (new_vocab and (name in VOCAB_MAPS or "lm_head" in own_names[name]))]:
        raise ValueError(
            f"{', '.join(wrong)} came as the target's, and the target here has other values, or rounds them: give the target that the "
            "head was read with, or target.dtype=float32."
        )
    if isinstance(drafter, BlockDrafter) and layout.EMBEDDING in tensors and block_drafter.MASK_FILE not in side_files:
        tensors[layout.EMBEDDING] = block_drafter.replace_mask_row(
            tensors[layout.EMBEDDING], drafter.mask_embedding, config
        )
    weights = next((name for name in WEIGHTS if name in record["sha256"]), WEIGHTS[0])
    return Layout(tensors, config, side_files, weights=weights, keeps_dtypes=True)


def _clear_mask_row(value: Tensor, name: str, config: dict) -> Tensor:
    """A tensor, of an embedding without the row of a mask, which is not the target's."""
    token = block_drafter.find_mask_token(config)
    if name != layout.EMBEDDING or token is None:
        return value
    return block_drafter.replace_mask_row(value, torch.zeros_like(value[0]), config)


def _borrow_tensor(name: str, drafter: Drafter, shape: list[int]) -> Tensor:
    """A tensor of the file that the head does not keep: the target's own, or one that follows from the head."""
    target, vocab = drafter.target, drafter.draft_to_target
    if name.endswith(layout.EMBEDDING):
        return target.embed.weight
    if name in VOCAB_MAPS:
        ids = torch.arange(target.vocab_size) if vocab is None else vocab.cpu()
        if name == "t2d":
            return torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        return ids - torch.arange(len(ids)) if name == "d2t" else ids
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if name.endswith(ROTARY):
        return drafter.get_submodule("rotary").get_buffer("inv_freq")
    return layout.select_lm_head(target, vocab)


def _add_vocab_maps(drafter: Drafter, config: dict, names: dict, side_files: dict) -> None:
    """Makes room for a draft vocabulary that the head did not have when it came."""
    assert drafter.published is not None
    vocab, kind = drafter.draft_to_target, drafter.published["layout"]
    published_size = names["d2t"][1][0] if "d2t" in names else drafter.target.vocab_size
    if vocab is not None and not (any(name.endswith(VOCAB_MAPS) for name in names) or eagle.TOKEN_MAP in side_files):
        if kind == "eagle":
            side_files[eagle.TOKEN_MAP] = vocab.tolist()
            return
        if kind not in CONTAINERS or kind in WHOLE:
            raise ValueError("The layout that this head came in has no draft vocabulary: train with start_vocab=keep.")
        names |= {"d2t": ["int64", [len(vocab)]], "t2d": ["bool", [drafter.target.vocab_size]]}
        names.setdefault("lm_head.weight", [next(iter(names.values()))[0], list(drafter.goal_head[0].shape)])
    if drafter.vocab_size != published_size and kind in CONTAINERS:
        config["draft_vocab_size"] = drafter.vocab_size


def _find_vocabulary_order(drafter: Drafter, record: dict) -> Tensor | None:
    """The places of the published order of tokens in the increasing one; None where they are the same."""
    order, vocab = record.get("order"), drafter.draft_to_target
    if order is None or vocab is None or sorted(order) != vocab.tolist():
        return None
    return torch.searchsorted(vocab, torch.tensor(order, device=vocab.device))


def _restore_side_file(drafter: Drafter, name: str, content: Any) -> Any:
    """The content of a file of torch.save, from what `_describe_content` recorded of it."""
    if name == eagle.TOKEN_MAP:
        ids = content["values"] if isinstance(content, dict) else content
        vocab = (
            range(drafter.target.vocab_size) if drafter.draft_to_target is None else drafter.draft_to_target.tolist()
        )
        ids = ids if sorted(ids) == list(vocab) else list(vocab)
        return torch.tensor(ids, dtype=getattr(torch, content["dtype"])) if isinstance(content, dict) else ids
    if not isinstance(content, dict):
        return content
    if "shape" not in content:
        return {key: _restore_side_file(drafter, name, value) for key, value in content.items()}
    mask = drafter.state_dict()["mask_embedding"]
    return mask.to(getattr(torch, content["dtype"])).reshape(content["shape"]).cpu()
