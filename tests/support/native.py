"""Tiny models with MTP modules, as transformers writes their layers, and the modules computed by its classes."""

import dataclasses
import json
import shutil
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from specdec.core.untrusted import read_tensors
from tests.support import families
from tests.support.families import EXPERTS, FULL, SLIDING, WINDOW, Family, find_family

DEEPSEEK = {
    "enorm": "model.layers.4.enorm",
    "hnorm": "model.layers.4.hnorm",
    "join": "model.layers.4.eh_proj",
    "norm": "model.layers.4.shared_head.norm",
    "layer": "model.layers.4",
}
STEP = DEEPSEEK | {
    "norm": "model.layers.4.transformer.shared_head.norm",
    "head": "model.layers.4.transformer.shared_head.output",
}
HUNYUAN = DEEPSEEK | {"norm": "model.layers.4.final_layernorm"}
QWEN = {
    "enorm": "mtp.pre_fc_norm_embedding",
    "hnorm": "mtp.pre_fc_norm_hidden",
    "join": "mtp.fc",
    "norm": "mtp.norm",
    "layer": "mtp.layers.{}",
}
NEMOTRON = {
    "enorm": "mtp.layers.0.enorm",
    "hnorm": "mtp.layers.0.hnorm",
    "join": "mtp.layers.0.eh_proj",
    "norm": "mtp.layers.1.final_layernorm",
    "layer": "mtp.layers.{}",
}
MIMO = {
    "enorm": "model.mtp_layers.0.token_layernorm",
    "hnorm": "model.mtp_layers.0.hidden_layernorm",
    "join": "model.mtp_layers.0.input_proj",
    "norm": "model.mtp_layers.0.final_layernorm",
    "layer": "model.mtp_layers.{}",
}
NAMES = dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "exaone_moe", "exaone_moe-window"), QWEN)
NAMES |= dict.fromkeys(("deepseek_v3", "glm4_moe", "glm4_moe_lite"), DEEPSEEK)
NAMES |= {"hy_v3": HUNYUAN, "nemotron_h": NEMOTRON, "step3p5": STEP, "qwen2": MIMO}
ZERO_CENTRED = (
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "qwen3_next",
    "step3p5",
)  # weights of their norms are deviations from 1
COUNTS = {"qwen3_5_text": "mtp_num_hidden_layers", "qwen3_5_moe_text": "mtp_num_hidden_layers"}
# Fields of a model, and of one whose layers are those of its module
FIELDS = {"exaone_moe-window": {"mtp_layer_types": [SLIDING]}}
DENSE = {"mlp_layer_types": ["dense"]}
NUM_MODULES = {"step3p5": 3}  # others: one
STEP_FAMILY = Family(  # its layers differ in heads and in the angles of rotations
    "step3p5",
    {
        **EXPERTS,
        **WINDOW,
        "n_routed_experts": 4,
        "share_expert_dim": 24,
        "num_sliding_attention_heads": 6,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "swiglu_limits_shared": [0.0, 0.0, 0.0, 1.0],
        "rope_theta": [1e4, 5e3, 1e4, 5e3],
        "num_nextn_predict_layers": 3,
        "mtp_layer_types": 3 * [SLIDING],
        "mtp_mlp_layer_types": 3 * ["dense"],
    },
)
STEP_VISION = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
LAYERS = {
    "exaone_moe": DENSE,
    "exaone_moe-window": {"layer_types": [SLIDING], **DENSE},
    "step3p5": {
        "layer_types": [SLIDING],
        **DENSE,
        "swiglu_limits_shared": None,
        "rope_theta": [1e4],
        "num_nextn_predict_layers": 0,
    },
    "nemotron_h": {"num_hidden_layers": 2, "layers_block_type": [FULL, "moe"]},
}


def make_one_layer(name: str, family: Family) -> torch.nn.Module:
    """A model of the family with layers of the kinds that its MTP module has."""
    config_fields = families.CONFIG_MAPPING[family.model_type]().to_dict()
    one_layer = {
        "num_hidden_layers": 1,
        "layer_types": [FULL] if "layer_types" in family.fields else None,
        "mlp_layer_types": ["sparse"],
        "first_k_dense_replace": 0,
    }
    layer_fields = {key: value for key, value in one_layer.items() if key in config_fields and value is not None}
    return make_model(dataclasses.replace(family, fields={**family.fields, **layer_fields, **LAYERS.get(name, {})}))


def make_model(family: Family) -> torch.nn.Module:
    """A random target in float32. Step's text model has a class of its own only inside one that sees."""
    if family.model_type != STEP_FAMILY.model_type:
        return families.make(family)
    text_config = families.configuration(family)
    config = AutoConfig.for_model("step3p7", text_config=text_config, vision_config=STEP_VISION)
    torch.manual_seed(families.SEED)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    add_noise(model, families.SEED + 1)
    return model.eval()


@torch.no_grad()
def add_noise(model: torch.nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.add_(0.1 * torch.randn_like(parameter))


def save_native(folder: Path, name: str, *, fields: dict | None = None, shard_size: str = "5GB"):
    """Saves a target with MTP modules. Returns a model with layers of the first, and its tensors around them."""
    family = STEP_FAMILY if name == "step3p5" else find_family(name.partition("-")[0])
    family = dataclasses.replace(family, fields={**family.fields, **FIELDS.get(name, {}), **(fields or {})})
    make_model(family).save_pretrained(folder, max_shard_size=shard_size)
    modules = []
    for number in range(NUM_MODULES.get(name, 1)):
        model = make_one_layer(name, family)
        add_noise(model, 7 + number)
        model.save_pretrained(folder / "layer")
        layer = read_tensors(folder / "layer" / "model.safetensors")
        weights = make_outer_weights(name, model.config.get_text_config())
        tensors = name_module(name, layer, weights)
        own = {key.replace("layers.4.", f"layers.{4 + number}."): value.clone() for key, value in tensors.items()}
        shutil.rmtree(folder / "layer")
        add_tensors(folder, own)
        modules.append((model, weights))
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)[COUNTS.get(name, "num_nextn_predict_layers")] = len(modules)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    return modules[0]


def make_outer_weights(name: str, config) -> dict[str, Tensor]:
    """Random tensors around a module's layers, by label."""
    width = config.hidden_size
    mean_weight = 0.0 if name in ZERO_CENTRED else 1.0  # around which the weights of norms are
    weights = {label: mean_weight + 0.3 * torch.randn(width) for label in ("enorm", "hnorm", "norm")}
    weights["join"] = 0.2 * torch.randn(width, 2 * width)
    if "head" in NAMES[name]:
        weights["head"] = torch.randn(config.vocab_size, width)
    return weights


def name_module(name: str, layer: dict[str, Tensor], weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A module's tensors by their names in files. layer: tensors of a model with its layers; weights: around them"""
    tensors = {f"{NAMES[name][label]}.weight": value for label, value in weights.items()}
    for key, value in layer.items():
        _, is_inner, inner_name = key.partition(".layers.")
        if is_inner and "vision" not in key:
            number, _, tensor_name = inner_name.partition(".")
            tensors[f"{NAMES[name]['layer'].format(number)}.{tensor_name}"] = value
    return tensors


def is_inside(name: str, key: str) -> bool:
    """Whether a tensor is one of the modules'."""
    stems = (stem.removesuffix(".{}") for stem in NAMES[name].values())
    numbers = range(NUM_MODULES.get(name, 1))
    return key.startswith(tuple(f"{stem}.".replace("layers.4.", f"layers.{4 + k}.") for stem in stems for k in numbers))


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
    decoder = model.get_decoder()
    norm_name = "norm_f" if hasattr(decoder, "norm_f") else "norm"
    norm = getattr(decoder, norm_name)

    def normed(key: str, x: Tensor) -> Tensor:
        norm.weight.data = weights[key].to(x)
        return norm(x)

    decoder.config._experts_implementation = "eager"  # in float64, too
    inputs = [normed("enorm", embedding), normed("hnorm", state)]
    x = torch.cat(inputs[::-1] if NAMES[name] is MIMO else inputs, -1) @ weights["join"].T.to(embedding)
    setattr(decoder, norm_name, torch.nn.Identity())
    raw = decoder(inputs_embeds=x).last_hidden_state
    return raw, normed("norm", raw)


def list_shards(folder: Path) -> dict[str, str]:
    """The file of every tensor."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return json.loads(index.read_text())["weight_map"]
    return dict.fromkeys(read_tensors(folder / "model.safetensors"), "model.safetensors")
