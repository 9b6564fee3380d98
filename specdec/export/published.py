"""Published heads in their own layouts: read as heads of ours, and written again as they came.

docs/file-formats.md, section 8.

A published head is a folder with config.json and weights that other projects made. `read_published` gives the contents
of a checkpoint, with a record of the layout. From this record `restore_published` gives the same names, dtypes and
configuration back.
"""

import hashlib
import math
import re
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.core import hub, masks
from specdec.core.files import hash_file
from specdec.core.untrusted import check_values, find_inside, read_json, read_names, read_pickle, read_tensors
from specdec.export import block_drafter, eagle, layout, medusa
from specdec.export.families import CONTAINERS, FAMILIES
from specdec.export.family import ExportFamily, PublishedFiles, RestoredHead
from specdec.export.layout import Layout, Parsed, Tensors
from specdec.heads.base import Drafter, Head
from specdec.heads.native import read_native_modules
from specdec.target.model import Target

CONFIG = "config.json"
ROTARY = (
    "rotary_emb.inv_freq"  # ending of a tensor that older versions of transformers saved, and the configuration gives
)
VOCAB_MAPS = ("d2t", "t2d", "token_map")  # tensors of a draft vocabulary
INDEX = "model.safetensors.index.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin", medusa.HEADS_FILE, "medusa_lm_head.safetensors")
SIDE_FILES = (block_drafter.MASK_FILE, eagle.TOKEN_MAP)  # files of torch.save with tensors apart from the weights


def is_published(folder: Path) -> bool:
    """Whether a folder is no checkpoint of this project, and has what a published head has."""
    return (folder / CONFIG).is_file() and not (folder / "drafter.json").exists()


def describe_published(folder: Path) -> dict:
    """The facts of a published head that need no target: its class, `_target_`, and the name of its target or None.

    Raises ValueError as `read_published`.
    """
    if is_whole_model(folder):
        name = hub.pin_commit(folder)
        return {
            "_target_": FAMILIES["native"].head,
            "target": name.partition("@")[0] if hub.is_hub_name(name) else name,
        }
    files = open_folder(folder)
    family = _name_folder(folder, lambda: find_layout(files))
    document: dict = {"_target_": family.head, "target": _find_target_name(files.config)}
    num_drafts = block_drafter.flatten_fields(files.config).get("block_size")
    if isinstance(num_drafts, int):  # the most drafts of a round
        document["num_drafts"] = num_drafts
    return document


def read_published(folder: Path, target: Target) -> Parsed:
    """The spec that `checkpoint.save` takes, with the key `published`, and the head's tensors, as they are in the file.

    published: {layout, config, tensors: {name: [dtype, shape]}, source, sha256: {file: digest}, copies: {name: digest
    of a tensor that the head does not keep, as it is the target's}, beside: {file: content, of tensors dtype and
    shape}, order: of a draft vocabulary whose ids do not increase}
    Raises ValueError, with what to do, for a folder that holds no drafter of this target. Nothing in it can run code.
    """
    if is_whole_model(folder):
        return _name_folder(folder, lambda: read_native_modules(hub.pin_commit(folder), target))
    files = open_folder(folder)
    return _name_folder(folder, lambda: _read_head(files, target))


def _read_head(files: PublishedFiles, target: Target) -> Parsed:
    family = find_layout(files)
    assert family.read is not None
    check_values(files.tensors)
    check_values(_flatten_tensors(files.side_files))
    size = files.flat.get("vocab_size")
    if size is not None and size not in (target.vocab_size, len(target.embed.weight)):
        raise ValueError(
            f"The head is for {size} tokens and {target.name} has {target.vocab_size}: is the target the model that "
            "the head was trained for?"
        )
    tensors = {key: value for key, value in files.tensors.items() if not key.endswith(ROTARY)}
    spec, head = family.read(replace(files, tensors=tensors), target)
    return {**spec, "published": make_record(family, files, head)}, head


def make_record(family: ExportFamily, files: PublishedFiles, head: Collection[str]) -> dict:
    """The record of a layout, as `read_published` describes it. head: names of the head's own tensors"""
    source, own_names = hub.pin_commit(files.folder), family.public_names(files.flat, list(files.tensors))
    record = {
        "layout": family.kind,
        "config": files.config,
        "tensors": {key: [_name_dtype(value), list(value.shape)] for key, value in files.tensors.items()},
        "source": source if hub.is_hub_name(source) else files.folder.name,
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
    return record


def is_whole_model(folder: Path) -> bool:
    """Whether the folder holds the weights of a language model, or names them. Its own MTP modules may be a drafter.

    Of a model on the Hub only config.json and the index are here.
    """
    if (folder / INDEX).exists():
        return hub.indexes_whole_model(folder)
    path = folder / WEIGHTS[0]
    return path.exists() and any(map(hub.WHOLE_MODEL_TENSOR.fullmatch, read_names(find_inside(folder, WEIGHTS[0]))))


# Any layout


def _name_folder(folder: Path, work: Callable):
    """The work's result. Its errors become one sentence that names the folder."""
    try:
        return work()
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    except KeyError as error:
        raise _make_error(folder, f"{error.args[0]} is missing") from error
    except Exception as error:  # fields and tensors of a file may fail in any way
        raise _make_error(folder, " ".join(str(error).split())) from error


def _make_error(folder: Path, reason: str) -> ValueError:
    return ValueError(f"{folder}: its config.json and weights do not make a drafter ({reason}).")


def find_layout(files: PublishedFiles) -> ExportFamily:
    """The family whose layout a folder has. Raises ValueError, with what the folder holds, if it has none of them."""
    config, names = files.config, files.tensors.keys()
    _refuse_foreign(config, names)
    if "drafter" in config:
        raise ValueError(
            "This is format=safetensors, which is for other readers: use the checkpoint that it was exported from."
        )
    kind = config.get("speculators_model_type")
    if kind is not None and kind not in CONTAINERS:
        raise ValueError(f"Speculators of type {kind} cannot be imported; {', '.join(CONTAINERS)} can.")
    needed = None if kind is None else FAMILIES[kind].container_field
    if needed is not None and config.get(needed) is None:
        raise ValueError(f"write {needed} into config.json: vLLM and Speculators guess differently without it.")
    for family in FAMILIES.values():
        if family.recognises(files):
            return family
    raise ValueError(
        f"its tensors ({', '.join(sorted(names)[:3])}, ...) belong to none of the known layouts: EAGLE-1, EAGLE-3, "
        "P-EAGLE, Medusa, DFlash, DFlash 2, LiLiCorr, Domino, DSpark, MTP in MiMo's layout, and the Speculators "
        "container."
    )


# Signs of a head that exists elsewhere and not here: a part of its architecture's or type's name, a field of
# config.json, a part of the name of a tensor
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
    """Raises ValueError, with its description, for a head of a kind that does not exist here."""
    fields = _list_fields(config)
    type_names = [config.get(key) for key in ("architectures", "model_type", "speculators_model_type")]
    described = " ".join(map(str, [*type_names, fields.get("projector_type")])).lower()
    reasons = [reason for pattern, reason in FOREIGN_NAMES.items() if re.search(pattern, described)]
    reasons += [reason for name, reason in FOREIGN_FIELDS.items() if not _has_no_effect(fields.get(name))]
    if not any("mtp_layers" in name for name in names):
        reasons += [reason for pattern, reason in FOREIGN_TENSORS.items() if any(re.search(pattern, n) for n in names)]
    if reasons:
        raise ValueError(f"it is {reasons[0]}, which cannot be imported.")


def _list_fields(config: dict) -> dict:
    """The fields of a head on one level, but for scales of its target that a block drafter may have."""
    fields = {**block_drafter.flatten_fields(config), **layout.read_container_layers(config)}
    scales = block_drafter.SCALE_FIELDS if config.get("dflash_config") else ()  # check_logit_shape reads them
    return fields | dict.fromkeys(scales)


def _has_no_effect(value: Any) -> bool:
    """Whether a field leaves a head as it is: missing, off, or a factor of 1."""
    return not value or (isinstance(value, float) and value == 1)


def _find_target_name(config: dict) -> str | None:
    """The name of the target that a Speculators container or a Medusa head names; None if it names none."""
    target_name = config.get("base_model_name_or_path")
    settings = config.get("speculators_config")
    if isinstance(settings, dict) and isinstance(settings.get("verifier"), dict):
        target_name = settings["verifier"].get("name_or_path")
    return target_name if isinstance(target_name, str) and target_name else None


# Files


def open_folder(folder: Path) -> PublishedFiles:
    """The contents of a published folder. Raises ValueError for a file that is missing or damaged."""
    path = find_inside(folder, CONFIG)
    if not path.exists():
        raise ValueError(f"{path} does not exist. A published head is a folder with config.json and its weights.")
    config = read_json(path)
    tensors, paths = _read_weights(folder)
    side_files = {name: read_pickle(find_inside(folder, name)) for name in SIDE_FILES if (folder / name).exists()}
    return PublishedFiles(folder, config, tensors, side_files, [path, *paths, *(folder / name for name in side_files)])


def _read_weights(folder: Path) -> tuple[Tensors, list[Path]]:
    """The weights, and the files that hold them."""
    if (folder / INDEX).exists():
        return _read_shards(folder)
    name = next((name for name in WEIGHTS if (folder / name).exists()), None)
    if name is None:
        raise ValueError(f"{folder} has no weights: none of {', '.join(WEIGHTS)} is there.")
    path = find_inside(folder, name)
    tensors = read_tensors(path) if name.endswith(".safetensors") else read_pickle(path)
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise ValueError(f"{path} holds something other than named tensors.")
    return tensors, [path]


def _read_shards(folder: Path) -> tuple[Tensors, list[Path]]:
    """The weights in the files that an index names, and these files."""
    files = read_json(find_inside(folder, INDEX)).get("weight_map")
    if not isinstance(files, dict):
        raise ValueError(f"{folder}: {INDEX} has no weight_map.")
    paths = [find_inside(folder, name) for name in sorted(set(map(str, files.values())))]
    return {key: value for path in paths for key, value in read_tensors(path).items()}, paths


def hash_tensor(value: Tensor) -> str:
    """16 hex digits of a tensor's bytes."""
    flat = value.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _name_dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _describe_content(content: Any) -> Any:
    """The content of a file of torch.save as JSON. Of a tensor it has dtype and shape, and values that are integers."""
    if isinstance(content, dict):
        return {str(key): _describe_content(value) for key, value in content.items()}
    if not isinstance(content, Tensor):
        return content
    description = {"dtype": _name_dtype(content), "shape": list(content.shape)}
    return description if content.is_floating_point() else description | {"values": content.tolist()}


# Properties that no head may have


def _flatten_tensors(content: Any, name: str = "") -> Tensors:
    """The tensors of files of torch.save, by the keys that lead to them."""
    tensors = {name.strip(): content} if isinstance(content, Tensor) else {}
    if isinstance(content, dict):
        for key, value in content.items():
            tensors |= _flatten_tensors(value, f"{name} {key}")
    return tensors


@torch.no_grad()
def check_output(drafter: Head) -> None:
    """Raises ValueError for a head that gives all tokens the same logit, as one with weights of zero does."""
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
        visible_keys = cache.sees(masks.causal_mask(1, device), drafter.windows)
    logits = drafter.loss_logits(1, drafter.step(1, h, tokens, tokens, visible_keys, cache)[1]).float()
    if not bool((logits.amax(-1) > logits.amin(-1)).all()):
        raise ValueError(
            "the head gives all tokens the same logit, whatever it reads: its weights are zero or damaged, take "
            "another copy of it."
        )


# Written again as it came


def restore_published(drafter: Drafter) -> Layout:
    """The head in the layout that it was published in: the same names, dtypes and fields. Trained values are new.

    Raises ValueError for a head that was not published by others, and where its layout has no place for a trained
    tensor.
    """
    family = check_record(drafter.published)
    record: dict = drafter.published or {}
    config, shapes = dict(record["config"]), dict(record["tensors"])
    side_files = {name: _restore_side_file(drafter, name, content) for name, content in record["beside"].items()}
    _add_vocab_maps(drafter, family, config, shapes, side_files)
    own_names = family.public_names({**layout.read_container_layers(config), **config}, list(shapes))
    refuse_lost_tensors(drafter, own_names)
    tensors = restore_tensors(drafter, shapes, own_names)
    restored = RestoredHead(drafter, config, tensors, side_files)
    refuse_changed_copies(restored, record, own_names)
    for step in family.restore_steps:
        step(restored)
    weights = next((name for name in WEIGHTS if name in record["sha256"]), WEIGHTS[0])
    return Layout(tensors, config, side_files, weights=weights, keeps_dtypes=True)


def check_record(record: dict | None) -> ExportFamily:
    """The family of a published head. Raises ValueError for a missing or damaged record."""
    family = None if record is None else FAMILIES.get(record["layout"])
    if record is None or family is None or family.read is None:
        raise ValueError(
            "format=published is for heads that other projects published on their own. A model's own MTP module takes "
            "format=stitched."
        )
    dtypes = {getattr(torch, dtype, None) for dtype, _ in record["tensors"].values()}
    if not set(record["beside"]) <= set(SIDE_FILES) or not all(isinstance(dtype, torch.dtype) for dtype in dtypes):
        raise ValueError("The record of how this head was published is damaged or unsafe: take another format.")
    return family


def refuse_lost_tensors(drafter: Drafter, own_names: dict[str, str]) -> None:
    """Raises ValueError for tensors of the head that the layout has no place for. own_names: {public name: own name}"""
    state = drafter.state_dict()
    restorable = {*own_names.values(), "mask_embedding", "draft_to_target"}
    lost = [name for name, value in state.items() if name not in restorable and bool(value.any())]
    if "lm_head.weight" in own_names and "lm_heads.0.weight" in state:  # one for all heads of Medusa
        lost = [name for name in lost if not torch.equal(state[name], state["lm_heads.0.weight"])]
    if lost:
        raise ValueError(f"The layout that this head came in has no place for {', '.join(lost)}: take another format.")


def restore_tensors(drafter: Drafter, shapes: dict, own_names: dict[str, str]) -> Tensors:
    """The public tensors in their recorded dtypes and shapes. shapes: {public name: [dtype, shape]}"""
    state, order, tensors = drafter.state_dict(), _find_vocabulary_order(drafter), {}
    for name, (dtype, shape) in shapes.items():
        value = state.get(own_names[name])
        if value is None:
            value = _borrow_tensor(name, drafter, shape).clone()
        if order is not None and ("lm_head" in own_names[name] or name.endswith("token_map")):
            value = value[order]
        value = value.detach().to(getattr(torch, dtype), copy=True)  # safetensors refuses shared storage
        tensors[name] = value.reshape(shape) if value.numel() == math.prod(shape) else value
    return tensors


def refuse_changed_copies(restored: RestoredHead, record: dict, own_names: dict[str, str]) -> None:
    """Raises ValueError if tensors that came as the target's have other values now.

    A new draft vocabulary may change them.
    """
    tensors, config = restored.tensors, restored.config
    changed = {
        name
        for name, value in record["copies"].items()
        if hash_tensor(_clear_mask_row(tensors[name], name, config)) != value
    }
    maps = set(VOCAB_MAPS)
    if changed & maps or not maps & tensors.keys() <= record["tensors"].keys():
        changed = {name for name in changed if name not in maps and "lm_head" not in own_names[name]}
    if changed:
        raise ValueError(
            f"{', '.join(changed)} came as the target's, and the target here has other values, or rounds them: give "
            "the target that the head was read with, or target.dtype=float32."
        )


def _clear_mask_row(value: Tensor, name: str, config: dict) -> Tensor:
    """The tensor; of an embedding [V, D] with zeros at the mask's token, whose row is not the target's."""
    if name != layout.EMBEDDING or block_drafter.find_mask_token(config) is None:
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


def _add_vocab_maps(drafter: Drafter, family: ExportFamily, config: dict, shapes: dict, side_files: dict) -> None:
    """Makes room for a draft vocabulary that the head did not have when it came.

    shapes: {public name: [dtype, shape]}
    """
    vocab, vocab_size = drafter.draft_to_target, drafter.target.vocab_size
    published_size = shapes["d2t"][1][0] if "d2t" in shapes else vocab_size
    has_place = eagle.TOKEN_MAP in side_files or any(name.endswith(VOCAB_MAPS) for name in shapes)
    if vocab is not None and not has_place:
        if not family.draft_vocabulary:
            raise ValueError("The layout that this head came in has no draft vocabulary: train with start_vocab=keep.")
        if family.vocabulary_file is not None:
            side_files[family.vocabulary_file] = vocab.tolist()
            return
        shapes |= {"d2t": ["int64", [len(vocab)]], "t2d": ["bool", [vocab_size]]}
        shapes.setdefault("lm_head.weight", [next(iter(shapes.values()))[0], list(drafter.goal_head[0].shape)])
    if drafter.vocab_size != published_size and family.kind in CONTAINERS:
        config["draft_vocab_size"] = drafter.vocab_size


def _find_vocabulary_order(drafter: Drafter) -> Tensor | None:
    """The indices of the published order of tokens in the increasing one; None where they are the same."""
    order, vocab = (drafter.published or {}).get("order"), drafter.draft_to_target
    if order is None or vocab is None or sorted(order) != vocab.tolist():
        return None
    return torch.searchsorted(vocab, torch.tensor(order, device=vocab.device))


def _restore_side_file(drafter: Drafter, name: str, content: Any) -> Any:
    """The content of a file of torch.save, from the description that `_describe_content` gave."""
    if name == eagle.TOKEN_MAP:
        return _restore_token_map(drafter, content)
    if not isinstance(content, dict):
        return content
    if "shape" not in content:
        return {key: _restore_side_file(drafter, name, value) for key, value in content.items()}
    mask = drafter.state_dict()["mask_embedding"]
    return mask.to(getattr(torch, content["dtype"])).reshape(content["shape"]).cpu()


def _restore_token_map(drafter: Drafter, content: Any) -> Any:
    """The ids of the draft vocabulary: in the published order, if they are the same, as a list or a tensor."""
    vocab = torch.arange(drafter.target.vocab_size) if drafter.draft_to_target is None else drafter.draft_to_target
    is_tensor = isinstance(content, dict)
    ids = content["values"] if is_tensor else content
    if sorted(ids) != vocab.tolist():
        ids = vocab.tolist()
    return torch.tensor(ids, dtype=getattr(torch, content["dtype"])) if is_tensor else ids
