"""Tiny models with MTP modules, as transformers writes their layers, and the modules computed by its classes."""

import dataclasses
import json
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from specdec.core.untrusted import read_tensors
from tests.support import families
from tests.support.families import FULL, Family, find_family

DEEPSEEK = {
    "enorm": "model.layers.4.enorm",
    "hnorm": "model.layers.4.hnorm",
    "join": "model.layers.4.eh_proj",
    "norm": "model.layers.4.shared_head.norm",
    "layers.0": "model.layers.4",
}
QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "join": "mtp.fc",
    "norm": "mtp.norm",
    "layers.0": "mtp.layers.0",
}
MIMO = {
    "enorm": "model.mtp_layers.0.token_layernorm",
    "hnorm": "model.mtp_layers.0.hidden_layernorm",
    "join": "model.mtp_layers.0.input_proj",
    "norm": "model.mtp_layers.0.final_layernorm",
    "layers.0": "model.mtp_layers.0",
}
NAMES = dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"), QWEN)
NAMES |= {"deepseek_v3": DEEPSEEK, "glm4_moe": DEEPSEEK, "qwen2": MIMO}
COUNTS = {"qwen3_5_text": "mtp_num_hidden_layers", "qwen3_5_moe_text": "mtp_num_hidden_layers"}


def make_one_layer(family: Family, fields: dict) -> torch.nn.Module:
    """A model of the family with one layer of the kind that MTP modules have."""
    layer_fields = {"num_hidden_layers": 1, **fields}
    if "layer_types" in family.fields:
        layer_fields["layer_types"] = [FULL]
    if "first_k_dense_replace" in families.CONFIG_MAPPING[family.model_type]().to_dict():
        layer_fields["first_k_dense_replace"] = 0
    return families.make(dataclasses.replace(family, fields={**family.fields, **layer_fields}))


def save_native(folder: Path, name: str, *, fields: dict | None = None, shard_size: str = "5GB"):
    """Saves a target with an MTP module. Returns a model with its layer, and the module's tensors around the layer."""
    family = dataclasses.replace(find_family(name), fields={**find_family(name).fields, **(fields or {})})
    families.make(family).save_pretrained(folder, max_shard_size=shard_size)
    model = make_one_layer(family, fields or {})
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model.save_pretrained(folder / "layer")
    layer = read_tensors(folder / "layer" / "model.safetensors")
    width = model.config.hidden_size
    mean_weight = 0.0 if NAMES[name] is QWEN else 1.0  # around which the weights of norms are
    weights = {label: mean_weight + 0.3 * torch.randn(width) for label in ("enorm", "hnorm", "norm")}
    weights["join"] = 0.2 * torch.randn(width, 2 * width)
    added = {f"{NAMES[name][label]}.weight": value for label, value in weights.items()}
    stem = "model.layers.0."
    added |= {
        NAMES[name]["layers.0"] + "." + key.removeprefix(stem): value
        for key, value in layer.items()
        if key.startswith(stem)
    }
    for path in (folder / "layer").iterdir():
        path.unlink()
    (folder / "layer").rmdir()
    add_tensors(folder, added)
    config = json.loads((folder / "config.json").read_text())
    config[COUNTS.get(name, "num_nextn_predict_layers")] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return model, weights


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Puts further tensors into the last file of a model."""
    index = folder / "model.safetensors.index.json"
    path = folder / "model.safetensors"
    if index.exists():
        document = json.loads(index.read_text())
        file = max(document["weight_map"].values())
        document["weight_map"] |= dict.fromkeys(tensors, file)
        index.write_text(json.dumps(document))
        path = folder / file
    everything = read_tensors(path) | {key: value.contiguous() for key, value in tensors.items()}
    safetensors.torch.save_file(everything, path, {"format": "pt"})


def run_reference(
    name: str, model, weights: dict[str, Tensor], embedding: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The module's state before and behind its last norm, by transformers' classes. embedding, state [1, S, D]"""
    norm = type(model.model.norm)

    def normed(key: str, x: Tensor) -> Tensor:
        layer = norm(x.shape[-1], eps=model.config.rms_norm_eps)
        layer.weight.data.copy_(weights[key])
        return layer(x)

    inputs = [normed("enorm", embedding), normed("hnorm", state)]
    x = torch.cat(inputs[::-1] if NAMES[name] is MIMO else inputs, -1) @ weights["join"].T
    model.model.norm = torch.nn.Identity()
    raw = model.model(inputs_embeds=x).last_hidden_state
    return raw, normed("norm", raw)


def list_shards(folder: Path) -> dict[str, str]:
    """The file of every tensor."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return json.loads(index.read_text())["weight_map"]
    return dict.fromkeys(read_tensors(folder / "model.safetensors"), "model.safetensors")
