"""Reads a drafter's folder in any known layout: finds its family, and gives its tensors the names of this project."""

from pathlib import Path

import torch
from torch import Tensor

from specdec import checkpoint
from specdec.core.untrusted import inside, read_json, read_pickle, read_tensors
from specdec.export.layouts import block_drafter, eagle, medusa, mtp
from specdec.target.model import Target

WEIGHTS = ("model.safetensors", "pytorch_model.bin", medusa.FILE, "medusa_lm_head.safetensors")


def read(folder: Path, target: Target) -> tuple[dict, dict[str, Tensor]]:
    """-> the drafter's class and arguments, as checkpoint.save takes them, and its tensors

    Raises ValueError, with what to do, for a folder that holds no drafter of this target. Nothing in it can run code.
    """
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}: give source= a local copy of a published head.")
    path = inside(folder, "config.json")
    config = checkpoint.read_json(path, what="A published head is a folder with config.json and its weights")
    # older versions of transformers saved rotary frequencies, which follow from the configuration
    tensors = {name: value for name, value in _tensors(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    try:
        return _family(folder, config, tensors, target)
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


def _family(folder: Path, config: dict, tensors: dict[str, Tensor], target: Target) -> tuple[dict, dict[str, Tensor]]:
    if "model.embed_tokens.weight" in tensors:
        raise ValueError("This is a whole language model: train it further as a draft model, with model=DIR.")
    if "drafter" in config:
        raise ValueError(
            "This is format=safetensors, which is for other readers: use the checkpoint that it was exported from."
        )
    kind = config.get("speculators_model_type")
    if kind is not None:
        config = {**config.get("transformer_layer_config", {}), **config}
        if kind == "eagle3" and config.get("norm_before_residual") is None:
            raise ValueError(
                "write norm_before_residual, true or false, into config.json: vLLM and Speculators guess differently."
            )
        if kind == "peagle" and config.get("mask_token_id") is None:
            raise ValueError("write mask_token_id, the token whose embedding P-EAGLE's masks have, into config.json.")
        if kind == "dspark" and config.get("sample_from_anchor") is None:
            raise ValueError(
                "write sample_from_anchor, true or false, into config.json: vLLM and Speculators guess differently."
            )
        if kind not in ("eagle3", "peagle", "dflash", "dspark"):
            raise ValueError(f"Speculators of type {kind} cannot be imported; eagle3, peagle, dflash and dspark can.")
    if any("linear" in name or name.startswith("blocks.") for name in tensors):
        return medusa.read(config, tensors, target)
    if any("mtp_layers" in name for name in tensors):
        return mtp.read(config, tensors, target)
    if "layers.0.self_attn.q_norm.weight" in tensors and "hidden_norm.weight" in tensors:
        return block_drafter.read(config, tensors, _mask(folder), target)
    if "norm.weight" in tensors and "fc.weight" in tensors:
        return eagle.read3(config, tensors, target)
    if "fc.weight" in tensors:
        return eagle.read1(config, tensors, _token_map(folder), target)
    raise ValueError(
        f"its tensors ({', '.join(sorted(tensors)[:3])}, ...) belong to none of the known layouts: EAGLE-1, EAGLE-3, P-EAGLE, Medusa, "
        "DFlash, DSpark, MTP in MiMo's layout, and the Speculators container."
    )


def _tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / "model.safetensors.index.json").exists():
        places = read_json(inside(folder, "model.safetensors.index.json")).get("weight_map")
        if not isinstance(places, dict):
            raise ValueError(f"{folder}: model.safetensors.index.json has no weight_map.")
        files = [inside(folder, str(name)) for name in sorted(set(map(str, places.values())))]
        return {key: value for file in files for key, value in read_tensors(file).items()}
    for name in WEIGHTS:
        if (folder / name).exists():
            path = inside(folder, name)
            if name.endswith(".safetensors"):
                return read_tensors(path)
            content = read_pickle(path)
            if isinstance(content, dict) and all(isinstance(value, Tensor) for value in content.values()):
                return content
            raise ValueError(f"{path} holds something other than named tensors.")
    raise ValueError(f"{folder} has no weights: none of {', '.join(WEIGHTS)} is there.")


def _mask(folder: Path) -> Tensor | None:
    """The embedding of the mask, [D], if it has a file."""
    if not (folder / block_drafter.MASK).exists():
        return None
    state = read_pickle(inside(folder, block_drafter.MASK))
    embedding = state.get("embedding") if isinstance(state, dict) else state
    if not isinstance(embedding, Tensor):
        raise ValueError(f"{block_drafter.MASK} holds no embedding.")
    return embedding.reshape(-1) if isinstance(state, dict) else embedding


def _token_map(folder: Path) -> Tensor | None:
    """The ids of the draft vocabulary, [W] increasing, if they have a file."""
    if not (folder / eagle.TOKEN_MAP).exists():
        return None
    tokens = read_pickle(inside(folder, eagle.TOKEN_MAP))
    try:
        return torch.as_tensor(tokens, dtype=torch.long).sort().values
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{eagle.TOKEN_MAP} holds no ids of tokens ({error}).") from error
