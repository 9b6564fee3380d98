"""Published heads in their own layouts: read as heads of ours, and written again as they came (docs/file-formats.md, section 8).

A published head is a folder with config.json and weights that other projects made. `read` gives what a checkpoint consists
of, with a record of the layout; from this record `restore` gives the same names, dtypes and configuration back.
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
from specdec.core.untrusted import check_values, inside, read_json, read_names, read_pickle, read_tensors
from specdec.export import block_drafter, eagle, layout, medusa, mtp
from specdec.export.layout import Layout
from specdec.heads.base import Drafter, Head
from specdec.heads.dflash import BlockDrafter
from specdec.heads.native import read_native
from specdec.target.model import Target

CONFIG = "config.json"
ROTARY = "rotary_emb.inv_freq"
MAPS = ("d2t", "t2d", "token_map")  # of a draft vocabulary
INDEX = "model.safetensors.index.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin", medusa.FILE, "medusa_lm_head.safetensors")
BESIDE = (block_drafter.MASK, eagle.TOKEN_MAP)  # files of torch.save with tensors that are not among the weights
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
    "eagle": Family("eagle.Eagle", eagle.read_eagle1, eagle.own_names1),
    "eagle3": Family("eagle.Eagle3", eagle.read_eagle3, eagle.own_names3),
    "peagle": Family("eagle.PEagle", eagle.read_eagle3, eagle.own_names3),
    "medusa": Family("medusa.Medusa", medusa.read_medusa, medusa.own_names),
    "mtp": Family("mtp.MTP", mtp.read_mtp, mtp.own_names),
    **dict.fromkeys(
        block_drafter.CLASSES,
        Family("dflash.BlockDrafter", block_drafter.read_block_drafter, block_drafter.own_names),
    ),
}


@dataclass(frozen=True)
class _Files:
    """What a folder holds. config: verbatim; tensors: of the weights; beside: contents of further files, by name"""

    folder: Path
    config: dict
    tensors: dict[str, Tensor]
    beside: dict[str, Any]
    paths: list[Path]

    @property
    def flat(self) -> dict:
        """The configuration on one level: that of a Speculators container with the fields of its layers."""
        return {**layout.layer_config(self.config), **self.config}


def is_published(folder: Path) -> bool:
    """Whether a folder is no checkpoint of this project, and has what a published head has."""
    return (folder / CONFIG).is_file() and not (folder / "drafter.json").exists()


def describe(folder: Path) -> dict:
    """What a published head is without its target: `_target_`, its class, and `target`, its target's name or None.

    Raises ValueError as `read`.
    """
    if is_whole_model(folder):
        name = hub.pinned(folder)
        return {
            "_target_": "specdec.heads.native.NativeMTP",
            "target": name.partition("@")[0] if hub.is_name(name) else name,
        }
    found = _open(folder)
    family = _guarded(folder, lambda: _find_family(found))
    about: dict = {"_target_": f"specdec.heads.{FAMILIES[family].head}", "target": _verifier(found.config)}
    num = block_drafter.read_fields(found.config).get("block_size")
    if isinstance(num, int):  # the most drafts of a round
        about["num_drafts"] = num
    return about


def read(folder: Path, target: Target) -> tuple[dict, dict[str, Tensor]]:
    """-> what `checkpoint.save` takes as its spec, with the key `published`, and the head's tensors, as they are in the file

    published: {layout, config, tensors: {name: [dtype, shape]}, source, sha256: {file: digest}, copies: {name: digest of a tensor
    that the head does not keep, as it is the target's}, beside: {file: content, of tensors dtype and shape}, order: of a draft
    vocabulary whose ids do not increase}
    Raises ValueError, with what to do, for a folder that holds no drafter of this target. Nothing in it can run code.
    """
    if is_whole_model(folder):
        return _guarded(folder, lambda: read_native(hub.pinned(folder), target))
    found = _open(folder)
    return _guarded(folder, lambda: _read(found, target))


def _read(found: _Files, target: Target) -> tuple[dict, dict[str, Tensor]]:
    name = _find_family(found)
    family = FAMILIES[name]
    check_values(found.tensors)
    check_values(_flatten(found.beside))
    size = found.flat.get("vocab_size")
    if size is not None and size not in (target.vocab_size, len(target.embed.weight)):
        raise ValueError(
            f"The head is for {size} tokens and {target.name} has {target.vocab_size}: is the target the model that the head was "
            "trained for?"
        )
    # older versions of transformers saved rotary frequencies, which follow from the configuration
    tensors = {key: value for key, value in found.tensors.items() if not key.endswith(ROTARY)}
    spec, head = family.read(found.flat, tensors, found.beside, target)
    own = family.own(found.flat, list(found.tensors))
    record = {
        "layout": name,
        "config": found.config,
        "tensors": {key: [_dtype(value), list(value.shape)] for key, value in found.tensors.items()},
        "source": hub.pinned(found.folder) if hub.is_name(hub.pinned(found.folder)) else found.folder.name,
        "sha256": {path.name: hash_file(path) for path in found.paths},
        "copies": {
            key: digest(_without_mask(value, key, found.config))
            for key, value in found.tensors.items()
            if own[key] not in head
        },
        "beside": {file: _outline(content) for file, content in found.beside.items()},
    }
    order = next((value for key, value in found.tensors.items() if key.endswith("token_map")), None)
    if order is not None and not bool((order[1:] > order[:-1]).all()):
        record["order"] = order.tolist()
    return {**spec, "published": record}, head


def is_whole_model(folder: Path) -> bool:
    """Whether the folder holds the weights of a language model, or names them: of one on the Hub only config.json and the index are
    here. Its own MTP modules may then be a drafter."""
    if (folder / INDEX).exists():
        return hub.indexes_whole_model(folder)
    path = folder / WEIGHTS[0]
    return path.exists() and any(map(hub.ENDS.fullmatch, read_names(inside(folder, WEIGHTS[0]))))


# Any layout


def _guarded(folder: Path, work: Callable):
    """The work's result; what goes wrong in it is said in one sentence that names the folder."""
    try:
        return work()
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error
    except Exception as error:  # fields and tensors of a file may fail in any way
        what = error.args[0] if isinstance(error, KeyError) else error
        reason = f"{what} is missing" if isinstance(error, KeyError) else " ".join(str(what).split())
        raise ValueError(f"{folder}: its config.json and weights do not make a drafter ({reason}).") from error


def _find_family(found: _Files) -> str:
    """The name of the layout in FAMILIES. Raises ValueError, which says what the folder holds, if it is none of them."""
    config, names = found.config, found.tensors.keys()
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
    own = block_drafter.own_names(config, names).values()
    if "layers.0.q_norm.weight" in own and "hidden_norm.weight" in own:
        for kind, parts in block_drafter.PARTS.items():
            if any(f"dependence.{part}" in own for part in parts.values() if part != "after.weight"):
                return kind
        return "lilicorr" if "dependence.pass_hidden_proj.weight" in own else "dflash"
    if "norm.weight" in names and "fc.weight" in names:
        return "peagle" if eagle.mask_token(config) is not None else "eagle3"
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
    fields = {**block_drafter.read_fields(config), **layout.layer_config(config)}
    given = " ".join(str(config.get(key)) for key in ("architectures", "model_type", "speculators_model_type"))
    said = f"{given} {fields.get('projector_type')}".lower()
    found = [what for part, what in FOREIGN_NAMES.items() if re.search(part, said)]
    plain = lambda value: not value or (isinstance(value, float) and value == 1)
    found += [what for name, what in FOREIGN_FIELDS.items() if not plain(fields.get(name))]
    if not any("mtp_layers" in name for name in names):
        found += [what for part, what in FOREIGN_TENSORS.items() if any(re.search(part, name) for name in names)]
    if found:
        raise ValueError(f"it is {found[0]}, which cannot be imported.")


def _verifier(config: dict) -> str | None:
    """The name of the target that a Speculators container or a Medusa head names; None if it names none."""
    named = config.get("base_model_name_or_path")
    if isinstance(settings := config.get("speculators_config"), dict) and isinstance(settings.get("verifier"), dict):
        named = settings["verifier"].get("name_or_path")
    return named if isinstance(named, str) and named else None


# Files


def _open(folder: Path) -> _Files:
    path = inside(folder, CONFIG)
    if not path.exists():
        raise ValueError(f"{path} does not exist. A published head is a folder with config.json and its weights.")
    config = read_json(path)
    tensors, paths = _tensors(folder)
    beside = {name: read_pickle(inside(folder, name)) for name in BESIDE if (folder / name).exists()}
    return _Files(folder, config, tensors, beside, [path, *paths, *(folder / name for name in beside)])


def _tensors(folder: Path) -> tuple[dict[str, Tensor], list[Path]]:
    """-> the weights, and the files that hold them"""
    if (folder / INDEX).exists():
        places = read_json(inside(folder, INDEX)).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(f"{folder}: {INDEX} has no weight_map.")
        paths = [inside(folder, str(name)) for name in sorted(set(map(str, places.values())))]
        return {key: value for path in paths for key, value in read_tensors(path).items()}, paths
    for name in WEIGHTS:
        if (folder / name).exists():
            path = inside(folder, name)
            if name.endswith(".safetensors"):
                return read_tensors(path), [path]
            content = read_pickle(path)
            if isinstance(content, dict) and all(isinstance(value, Tensor) for value in content.values()):
                return content, [path]
            raise ValueError(f"{path} holds something other than named tensors.")
    raise ValueError(f"{folder} has no weights: none of {', '.join(WEIGHTS)} is there.")


def digest(value: Tensor) -> str:
    """16 hex digits of a tensor's bytes."""
    flat = value.detach().cpu().contiguous().flatten()
    return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]


def _dtype(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


def _outline(content: Any) -> Any:
    """The content of a file of torch.save as JSON: of a tensor its dtype and shape, and its values if they are whole numbers."""
    if isinstance(content, dict):
        return {str(key): _outline(value) for key, value in content.items()}
    if not isinstance(content, Tensor):
        return content
    about = {"dtype": _dtype(content), "shape": list(content.shape)}
    return about if content.is_floating_point() else about | {"values": content.tolist()}


# What no head may be


def _flatten(content: Any, name: str = "") -> dict[str, Tensor]:
    """The tensors of files of torch.save, by the names of their places."""
    if isinstance(content, dict):
        return {
            place: value for key, part in content.items() for place, value in _flatten(part, f"{name} {key}").items()
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
    if drafter.attends in ("none", "block"):
        drafter.context(h, tokens - 1, cache)
        seen: Any = masks.committed_mask(cache.lengths + 1, cache.visible)
    else:
        seen = cache.sees(masks.causal_mask(1, device))
    logits = drafter.judged_logits(1, drafter.step(1, h, tokens, tokens, seen, cache)[1]).float()
    if not bool((logits.amax(-1) > logits.amin(-1)).all()):
        raise ValueError(
            "the head gives all tokens the same logit, whatever it reads: its weights are zero or damaged, take another copy of it."
        )


# Written again as it came


def restore(drafter: Drafter) -> Layout:
    """The head in the layout that it was published in: the same names, dtypes and fields. What training changed is new.

    Raises ValueError for a head that was not published by others, and where its layout has no place for what training made.
    """
    record = drafter.published
    if record is None or record["layout"] not in FAMILIES:
        raise ValueError(
            "format=published is for heads that other projects published on their own. A model's own MTP module takes format=stitched."
        )
    dtypes = {dtype for dtype, _ in record["tensors"].values()}
    if not set(record["beside"]) <= set(BESIDE) or not all(
        isinstance(getattr(torch, dtype, None), torch.dtype) for dtype in dtypes
    ):
        raise ValueError("The record of how this head was published is damaged or unsafe: take another format.")
    config, names, state = dict(record["config"]), dict(record["tensors"]), drafter.state_dict()
    beside = {name: _restore_beside(drafter, name, content) for name, content in record["beside"].items()}
    _place_vocab(drafter, config, names, beside)
    own = FAMILIES[record["layout"]].own({**layout.layer_config(config), **config}, list(names))
    placed = {own[name] for name in names} | {"mask_embedding", "draft_to_target"}
    lost = [name for name in state if name not in placed and bool(state[name].any())]
    if "lm_head.weight" in names:  # one for all heads of Medusa
        lost = [name for name in lost if not torch.equal(state[name], state.get("lm_heads.0.weight", state[name][:0]))]
    if lost:
        raise ValueError(f"The layout that this head came in has no place for {', '.join(lost)}: take another format.")
    if isinstance(drafter, BlockDrafter):
        block_drafter.place_mask(drafter, config, beside, names)
    tensors, rows = {}, _rows(drafter, record)
    for name, (dtype, shape) in names.items():
        value = state[own[name]] if own[name] in state else _borrow(name, drafter, shape).clone()
        if own[name].endswith("eh_proj.weight"):
            value = mtp.swap_halves(value)
        if rows is not None and ("lm_head" in own[name] or name.endswith("token_map")):
            value = value[rows]
        value = value.detach().to(getattr(torch, dtype), copy=True)  # safetensors refuses shared storage
        tensors[name] = value.reshape(shape) if value.numel() == math.prod(shape) else value
    differs = {
        name for name, value in record["copies"].items() if digest(_without_mask(tensors[name], name, config)) != value
    }
    new_vocab = bool(differs & {*MAPS}) or not {*MAPS} & {*names} <= {*record["tensors"]}
    if wrong := [name for name in differs if not (new_vocab and (name in MAPS or "lm_head" in own[name]))]:
        raise ValueError(
            f"{', '.join(wrong)} came as the target's, and the target here has other values, or rounds them: give the target that the "
            "head was read with, or target.dtype=float32."
        )
    if isinstance(drafter, BlockDrafter) and layout.EMBEDDING in tensors and block_drafter.MASK not in beside:
        tensors[layout.EMBEDDING] = block_drafter.with_mask(tensors[layout.EMBEDDING], drafter.mask_embedding, config)
    weights = next((name for name in WEIGHTS if name in record["sha256"]), WEIGHTS[0])
    return Layout(tensors, config, beside, weights=weights, exact=True)


def _without_mask(value: Tensor, name: str, config: dict) -> Tensor:
    """A tensor, of an embedding without the row of a mask, which is not the target's."""
    token = block_drafter.mask_of(config)
    if name != layout.EMBEDDING or token is None:
        return value
    return block_drafter.with_mask(value, torch.zeros_like(value[0]), config)


def _borrow(name: str, drafter: Drafter, shape: list[int]) -> Tensor:
    """A tensor of the file that the head does not keep: the target's own, or one that follows from the head."""
    target, vocab = drafter.target, drafter.draft_to_target
    if name.endswith(layout.EMBEDDING):
        return target.embed.weight
    if name in MAPS:
        ids = torch.arange(target.vocab_size) if vocab is None else vocab.cpu()
        if name == "t2d":
            return torch.zeros(target.vocab_size, dtype=torch.bool).index_fill_(0, ids, True)
        return ids - torch.arange(len(ids)) if name == "d2t" else ids
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if name.endswith(ROTARY):
        return drafter.get_submodule("rotary").get_buffer("inv_freq")
    return layout.lm_head_rows(target, vocab)


def _place_vocab(drafter: Drafter, config: dict, names: dict, beside: dict) -> None:
    """Makes room for a draft vocabulary that the head did not have when it came."""
    assert drafter.published is not None
    vocab, kind = drafter.draft_to_target, drafter.published["layout"]
    before = names["d2t"][1][0] if "d2t" in names else drafter.target.vocab_size
    if vocab is not None and not (any(name.endswith(MAPS) for name in names) or eagle.TOKEN_MAP in beside):
        if kind == "eagle":
            beside[eagle.TOKEN_MAP] = vocab.tolist()
            return
        if kind not in CONTAINERS or kind in WHOLE:
            raise ValueError("The layout that this head came in has no draft vocabulary: train with start_vocab=keep.")
        names |= {"d2t": ["int64", [len(vocab)]], "t2d": ["bool", [drafter.target.vocab_size]]}
        names.setdefault("lm_head.weight", [next(iter(names.values()))[0], list(drafter.goal_head[0].shape)])
    if drafter.vocab_size != before and kind in CONTAINERS:
        config["draft_vocab_size"] = drafter.vocab_size


def _rows(drafter: Drafter, record: dict) -> Tensor | None:
    """The places of the published order of tokens in the increasing one; None where they are the same."""
    order, vocab = record.get("order"), drafter.draft_to_target
    if order is None or vocab is None or sorted(order) != vocab.tolist():
        return None
    return torch.searchsorted(vocab, torch.tensor(order, device=vocab.device))


def _restore_beside(drafter: Drafter, name: str, content: Any) -> Any:
    """The content of a file of torch.save, from what `_outline` recorded of it."""
    if name == eagle.TOKEN_MAP:
        ids = content["values"] if isinstance(content, dict) else content
        now = range(drafter.target.vocab_size) if drafter.draft_to_target is None else drafter.draft_to_target.tolist()
        ids = ids if sorted(ids) == list(now) else list(now)
        return torch.tensor(ids, dtype=getattr(torch, content["dtype"])) if isinstance(content, dict) else ids
    if not isinstance(content, dict):
        return content
    if "shape" not in content:
        return {key: _restore_beside(drafter, name, value) for key, value in content.items()}
    mask = drafter.state_dict()["mask_embedding"]
    return mask.to(getattr(torch, content["dtype"])).reshape(content["shape"]).cpu()
