"""Reads a drafter's folder in any known layout: finds its family, and gives its tensors the names of this project."""

from pathlib import Path

import torch
from torch import Tensor

from specdec import checkpoint
from specdec.layouts import block_drafter, eagle, medusa, mtp
from specdec.target import Target

WEIGHTS = ("model.safetensors", "pytorch_model.bin", medusa.FILE, "medusa_lm_head.safetensors")


def read(folder: Path, target: Target) -> tuple[dict, dict[str, Tensor]]:
    """-> the drafter's class and arguments, as checkpoint.save takes them, and its tensors

    Raises ValueError, with what to do, for a folder that holds no drafter of this target. Nothing in it can run code.
    """
    if not folder.is_dir():
        raise ValueError(f"There is no folder {folder}: give source= a local copy of a published head.")
    path = folder / "config.json"
    config = checkpoint.read_json(path, what="A published head is a folder with config.json and its weights")
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no settings: is this the folder of a drafter?")
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
        if kind not in ("eagle3", "dflash"):
            raise ValueError(f"Speculators of type {kind} cannot be imported; eagle3 and dflash can.")
    if any("linear" in name or name.startswith("blocks.") for name in tensors):
        return medusa.read(config, tensors, target)
    if any("mtp_layers" in name for name in tensors):
        return mtp.read(config, tensors, target)
    if "layers.0.self_attn.q_norm.weight" in tensors and "hidden_norm.weight" in tensors:
        state = _pickle(folder / block_drafter.MASK)
        return block_drafter.read(
            config, tensors, state["embedding"].reshape(-1) if isinstance(state, dict) else state, target
        )
    if "norm.weight" in tensors and "fc.weight" in tensors:
        return eagle.read3(config, tensors, target)
    if "fc.weight" in tensors:
        tokens = _pickle(folder / eagle.TOKEN_MAP)
        return eagle.read1(config, tensors, None if tokens is None else torch.tensor(tokens).sort().values, target)
    raise ValueError(
        f"its tensors ({', '.join(sorted(tensors)[:3])}, ...) belong to none of the known layouts: EAGLE-1, EAGLE-3, Medusa, "
        "DFlash, MTP in MiMo's layout, and the Speculators container of EAGLE-3 and DFlash."
    )


def _tensors(folder: Path) -> dict[str, Tensor]:
    if (folder / "model.safetensors.index.json").exists():
        names = set(checkpoint.read_json(folder / "model.safetensors.index.json")["weight_map"].values())
        return {key: value for name in sorted(names) for key, value in checkpoint.read_tensors(folder / name).items()}
    for name in WEIGHTS:
        if (folder / name).exists():
            if name.endswith(".safetensors"):
                return checkpoint.read_tensors(folder / name)
            content = _pickle(folder / name)
            if isinstance(content, dict) and all(isinstance(value, Tensor) for value in content.values()):
                return content
            raise ValueError(f"{folder / name} holds something other than named tensors.")
    raise ValueError(f"{folder} has no weights: none of {', '.join(WEIGHTS)} is there.")


def _pickle(path: Path):
    """The content of a file of torch.save, tensors and plain values only; None if there is no such file."""
    if not path.exists():
        return None
    try:
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds for a damaged file
        raise ValueError(f"{path} cannot be read as plain tensors ({str(error).splitlines()[0]}).") from error
