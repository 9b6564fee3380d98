"""The diagnosis of MTP modules from files: each test is made to find its damage, and sound files stay sound."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFWriter

from specdec.core.untrusted import read_tensors
from specdec.heads.native_modules.diagnosis import STATES, Diagnosis, diagnose_module
from specdec.heads.native_modules.plain_layers import declare_plain, is_plain_layer
from tests.support import native, quantised
from tests.support.native import save_native
from tests.support.saved_targets import edit, edit_tensors


def diagnose(folder: Path, **arguments) -> Diagnosis:
    diagnosis = diagnose_module(str(folder), **arguments)
    assert json.loads(json.dumps(diagnosis.to_json()))["state"] == diagnosis.state
    return diagnosis


def drop_module(tensors: dict) -> None:
    pattern = "mtp" if any("mtp" in key for key in tensors) else r"\.layers\.[4-6]\."
    for key in [key for key in tensors if re.search(pattern, key)]:
        del tensors[key]


def declare(folder: Path, name: str, count: int) -> None:
    """Writes the number of modules into the configuration."""
    config = json.loads((folder / "config.json").read_text())
    config.get("text_config", config)[native.COUNTS.get(name, "num_nextn_predict_layers")] = count
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", native.NAMES)
def test_sound_modules_and_their_absence(tmp_path, name):
    save_native(tmp_path / "model", name)
    model = tmp_path / "model"
    base = str(shutil.copytree(model, tmp_path / "base"))
    assert diagnose(model).state == diagnose(model, base=base).state == "sound"
    declare(model, name, 0)
    assert diagnose(model).state == "undeclared" and diagnose(model).findings[0].test == 3
    declare(model, name, 1)
    edit_tensors(model, drop_module)
    assert diagnose(model).state == ("never had" if name in ("deepseek_v3", "glm4_moe") else "lost")
    assert diagnose(model, base=base).state == "lost" and diagnose(model).modules == 0
    command = f"`specdec adapt checkpoint={model} source=BASE prompts=FILE old= out=FOLDER`"
    assert command in str(diagnose(model, base=base))
    edit_tensors(Path(base), drop_module)
    assert diagnose(model, base=base).state == "never had"
    declare(model, name, 0)
    assert str(diagnose(model)) == f"MTP module of {model}: none (0 declared, 0 in the files)"


EXPERT, JOIN = "model.layers.4.mlp.experts.3.up_proj.weight", "model.layers.4.eh_proj.weight"
OUTPUT = "model.layers.4.self_attn.o_proj.weight"


def rename_layer(tensors: dict, number: int = 6) -> None:
    for key in [key for key in tensors if ".layers.4." in key]:
        tensors[key.replace(".layers.4.", f".layers.{number}.")] = tensors.pop(key)


def quantise(tensors: dict) -> None:
    tensors[OUTPUT] = tensors[OUTPUT].to(torch.float8_e4m3fn)
    tensors[f"{OUTPUT}_scale_inv"] = torch.ones(1, 1)


def add_copies(tensors: dict, rows: int = 64) -> None:
    tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"][:rows] + 0.5


DAMAGES = {
    "incomplete: 1 tensor is missing (model.layers.4.enorm.weight)": lambda t: t.pop("model.layers.4.enorm.weight"),
    f"incomplete: 1 tensor is missing ({JOIN})": lambda t: t.pop(JOIN),
    f"incomplete: 1 tensor is missing ({OUTPUT})": lambda t: t.pop(OUTPUT),
    f"incomplete: 1 tensor is missing ({EXPERT})": lambda t: t.pop(EXPERT),
    "incomplete: 3 tensors are missing (model.layers.4.mlp.experts.3.down_proj.weight, ": lambda t: [
        t.pop(key) for key in list(t) if "layers.4.mlp.experts.3." in key
    ],
    "incomplete: 4 tensors are missing (model.layers.4.mlp.experts.0.up_proj.weight, ": lambda t: [
        t.pop(key) for key in list(t) if "layers.4.mlp.experts." in key and "up_proj" in key
    ],
    f"incomplete: {EXPERT} has the shape [24, 5], and of this model it would be [24, 32]": lambda t: t.update(
        {EXPERT: t[EXPERT][:, :5]}
    ),
    f"incomplete: {JOIN} has the shape [24, 48], and of this model it would be [32, 64]": lambda t: t.update(
        {JOIN: t[JOIN][:24, :48]}
    ),
    f"dead: {EXPERT} is 0 everywhere.": lambda t: t[EXPERT].zero_(),
    f"dead: {EXPERT} has values that are NaN or infinite.": lambda t: t[EXPERT][0, 0].fill_(torch.nan),
    f"dead: {EXPERT} has a standard deviation of": lambda t: t[EXPERT].mul_(100),
    "dead: model.layers.4.hnorm.weight is 0 everywhere.": lambda t: t["model.layers.4.hnorm.weight"].zero_(),
    f"dead: {JOIN} is 0.5 everywhere": lambda t: t[JOIN].fill_(0.5),
    "misnumbered: model.layers.6.eh_proj.weight is at layer 6, and the model has 4 layers.": rename_layer,
    f"quantised: 2 tensors are packed or scaled ({OUTPUT}: F8_E4M3).": quantise,
    "stale copies: model.layers.4.shared_head.head.weight differs from lm_head.weight by up to 0.5.": add_copies,
    "resized vocabulary: model.layers.4.shared_head.head.weight has 60 rows and lm_head.weight 64.": lambda t: (
        add_copies(t, 60)
    ),
    "incomplete: 30 tensors are left of a module (model.mtp_thing.": lambda t: t.update(
        {key.replace("layers.4", "mtp_thing"): t.pop(key) for key in list(t) if ".layers.4." in key}
    ),
}


@pytest.mark.parametrize("sentence", DAMAGES)
def test_damaged_tensors_are_named(tmp_path, sentence):
    save_native(tmp_path, "deepseek_v3")
    edit_tensors(tmp_path, DAMAGES[sentence])
    diagnosis = diagnose(tmp_path)
    assert sentence in str(diagnosis) and diagnosis.state == sentence.partition(":")[0]
    assert [finding.tensor in sentence for finding in diagnosis.findings] in ([True], [False])
    assert diagnosis.findings[0].tensor in read_tensors(tmp_path / "model.safetensors") or "missing" in sentence


def test_modules_of_other_names_are_shown(tmp_path):
    save_native(tmp_path, "qwen2")
    edit_tensors(
        tmp_path,
        lambda t: t.update({key.replace("mtp_layers", "mtp_thing"): t.pop(key) for key in list(t) if "mtp" in key}),
    )
    assert diagnose(tmp_path).state == "unknown layout"
    assert "named as those of modules (model.mtp_thing.0.final_layernorm.weight, " in str(diagnose(tmp_path))


def test_every_draft_has_its_module(tmp_path):
    save_native(tmp_path, "step3p5")
    declare(tmp_path, "step3p5", 4)
    assert "incomplete: The files have 3 of the 4 modules that config.json counts" in str(diagnose(tmp_path))


def test_an_lm_head_of_its_own_has_the_rows_of_the_model(tmp_path):
    save_native(tmp_path, "step3p5")
    name = "model.layers.4.transformer.shared_head.output.weight"
    edit_tensors(tmp_path, lambda t: t.update({name: t[name][:60].clone()}))
    sentence = f"{name} has the shape [60, 32], and of this model it would be [64, 32]."
    assert f"incomplete: {sentence}" in str(diagnose(tmp_path))


def test_families_without_a_known_layout_are_not_taken_for_others(tmp_path):
    """Some have the join of DeepSeek-V3 and another norm."""
    save_native(tmp_path, "deepseek_v3")
    edit_tensors(edit(tmp_path, model_type="hy_v9"), lambda t: t.pop("model.layers.4.shared_head.norm.weight"))
    assert diagnose(tmp_path).state == "unknown layout"


@pytest.mark.parametrize("method", ["fp8", "fp8_even_blocks", "nvfp4", "modelopt_nvfp4"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "glm4_moe"])
def test_values_of_quantised_modules_are_looked_at(tmp_path, name, method):
    save_native(tmp_path / "plain", name)
    stem = "mtp.layers.0" if name == "qwen3_5_text" else "model.layers.4"
    pattern = rf"{stem}.self_attn.*_proj\.weight"
    model = quantised.quantise(tmp_path / "plain", tmp_path / "model", method, names=pattern)
    assert [finding.state for finding in diagnose(model).findings] == ["quantised"]
    scale = f"{stem}.self_attn.o_proj.weight_scale{'_inv' if 'blocks' in method else ''}"
    edit_tensors(model, lambda t: t[scale].copy_(torch.full_like(t[scale], torch.nan)))
    assert f"dead: {stem}.self_attn.o_proj.weight has values that are NaN" in str(diagnose(model))


def test_fused_experts_are_looked_at_one_by_one(tmp_path):
    save_native(tmp_path, "qwen3_5_moe_text")
    for stem in ("mtp.layers.0", "model.layers.3"):
        edit_tensors(tmp_path, lambda t, stem=stem: fuse(t, f"{stem}.mlp.experts"))
    assert diagnose(tmp_path).state == "sound"
    edit_tensors(tmp_path, lambda t: t["mtp.layers.0.mlp.experts.down_proj"][2].zero_())
    assert "dead: mtp.layers.0.mlp.experts.down_proj (expert 2) is 0 everywhere" in str(diagnose(tmp_path))
    edit_tensors(tmp_path, lambda t: t.pop("mtp.layers.0.mlp.experts.down_proj"))
    assert "1 tensor is missing (mtp.layers.0.mlp.experts.down_proj)" in str(diagnose(tmp_path))


def fuse(tensors: dict, stem: str) -> None:
    """Puts experts that are apart into one tensor for each kind."""
    if f"{stem}.down_proj" in tensors:
        return

    def take(kind: str) -> torch.Tensor:
        return torch.stack([tensors.pop(f"{stem}.{number}.{kind}.weight") for number in range(4)])

    tensors[f"{stem}.gate_up_proj"] = torch.cat([take("gate_proj"), take("up_proj")], 1)
    tensors[f"{stem}.down_proj"] = take("down_proj")


# What a base tells

NORMS = ("norm.weight", "norm_hidden.weight", "norm_embedding.weight")


def shift(tensors: dict, amount: float = 1.0) -> None:
    for key in [key for key in tensors if key.startswith("mtp.") and key.endswith(NORMS)]:
        tensors[key] += amount


def swap(tensors: dict) -> None:
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"].roll(32, 1)


def change(*names: str):
    return lambda t: [t[name].add_(0.05 * torch.randn_like(t[name])) for name in names]


VOTES = ("mtp.norm.weight", "mtp.layers.0.self_attn.q_norm.weight", "mtp.layers.0.self_attn.k_norm.weight")
COMPARISONS = {  # (damage, state without a base, state with one)
    "above": (shift, "shifted norms", "shifted norms"),
    "below": (lambda t: shift(t, -1), "shifted norms", "shifted norms"),
    "one norm": (lambda t: t["mtp.pre_fc_norm_hidden.weight"].add_(1), "sound", "shifted norms"),
    "another amount": (lambda t: shift(t, 0.6), "sound", "tuned"),
    "twice": (lambda t: shift(t, 2), "sound", "tuned"),
    "all but keys": (lambda t: (shift(t), t["mtp.layers.0.self_attn.k_norm.weight"].sub_(1)), "sound", "shifted norms"),
    "no vote of the last": (lambda t: [t[name].add_(1) for name in VOTES], "sound", "shifted norms"),
    "swapped": (swap, "sound", "swapped join"),
    "both": (lambda t: (swap(t), shift(t)), "shifted norms", "swapped join"),
    "trunk": (change("model.layers.3.mlp.down_proj.weight"), "sound", "stale"),
    "module": (change("mtp.layers.0.mlp.down_proj.weight"), "sound", "tuned"),
    "all": (change("model.layers.3.self_attn.o_proj.weight", "mtp.fc.weight"), "sound", "sound"),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_a_base_tells_more(tmp_path, name):
    save_native(tmp_path / "base", "qwen3_5_text")
    shutil.copytree(tmp_path / "base", tmp_path / "model")
    damage, alone, with_base = COMPARISONS[name]
    edit_tensors(tmp_path / "model", damage)
    assert diagnose(tmp_path / "model").state == alone
    assert diagnose(tmp_path / "model", base=str(tmp_path / "base")).state == with_base


# Quantised files


def save_quantised(folder: Path, settings: dict) -> None:
    """A model whose own layers are quantised, and whose module is not."""
    save_native(folder, "qwen3_5_moe_text")

    def quantise_layers(tensors: dict) -> None:
        for key in [key for key in tensors if key.startswith("model.layers.") and key.endswith("_proj.weight")]:
            tensors[key] = tensors[key].to(torch.float8_e4m3fn)
            tensors[f"{key}_scale"] = torch.ones(1)

    edit_tensors(folder, quantise_layers)
    edit(folder, quantization_config=settings)


LINEARS = [f"mtp.layers.0.self_attn.{kind}_proj" for kind in "qkvo"]
LINEARS += [f"mtp.layers.0.mlp.shared_expert.{kind}_proj" for kind in ("gate", "up", "down")]
EXPERTS = [f"mtp.layers.0.mlp.experts.{n}.{kind}_proj" for n in range(4) for kind in ("gate", "up", "down")]
PLAIN_LISTS = {  # settings of the quantisation, and the undeclared layers in words; "": all are declared
    "all missing": ({"quant_method": "compressed-tensors", "ignore": ["lm_head"]}, "20 layers .*mtp.fc, "),
    "fc missing": ({"quant_method": "compressed-tensors", "ignore": [*LINEARS, *EXPERTS]}, "1 layer is .*mtp.fc"),
    "v missing": (
        {"quant_method": "compressed-tensors", "ignore": [*LINEARS[:2], *LINEARS[3:], *EXPERTS]},
        "mtp.fc, .*v_proj",
    ),
    "regular": ({"quant_method": "compressed-tensors", "ignore": ["re:^mtp.*"]}, ""),
    "no part": ({"quant_method": "compressed-tensors", "ignore": ["mtp"]}, "20 layers are"),
    "part": ({"quant_method": "fp8", "modules_to_not_convert": ["mtp"]}, ""),
    "wildcard": ({"quant_method": "modelopt", "ignore": ["lm_head", "mtp*"]}, ""),
    "old": ({"quant_algo": "FP8", "exclude_modules": ["lm_head", "mtp.layers.1*"]}, "20 layers are"),
    "mixed": ({"quant_algo": "MIXED_PRECISION", "quantized_layers": {"model.layers.0.mlp": {}}}, ""),
    "unknown": ({"quant_method": "own"}, ""),
}


@pytest.mark.parametrize("name", PLAIN_LISTS)
def test_plain_modules_in_quantised_files(tmp_path, name):
    settings, words = PLAIN_LISTS[name]
    save_quantised(tmp_path, settings)
    diagnosis = diagnose(tmp_path)
    assert diagnosis.state == ("plain undeclared" if words else "sound")
    layers = [*LINEARS, *EXPERTS, "mtp.fc"]
    if words:
        (finding,) = diagnosis.findings
        assert finding.test == 9 and re.search(words, finding.sentence)
        declare_plain(settings, layers, "model")
        edit(tmp_path, quantization_config=settings)
        assert diagnose(tmp_path).state == "sound"


def test_fused_names_stand_for_single_ones():
    settings = {"quant_method": "fp8", "modules_to_not_convert": ["a.qkv_proj", "a.mlp.experts", "a.gate_up_proj"]}
    for layer in ("a.q_proj", "a.v_proj", "a.up_proj", "a.mlp.experts.3.down_proj", "a.mlp.experts.gate_up_proj"):
        assert is_plain_layer(settings, layer)
    assert is_plain_layer(settings, "a.o_proj") is False
    targets = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["re:model.*"]}}}
    assert is_plain_layer(targets, "mtp.fc") and is_plain_layer(targets, "model.a") is False


def test_the_list_of_modelopt_beside_the_configuration(tmp_path):
    save_quantised(tmp_path, {})
    path = tmp_path / "hf_quant_config.json"
    path.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}))
    assert diagnose(tmp_path).state == "plain undeclared"
    path.write_text(json.dumps({"quantization": {"quant_algo": "FP8", "exclude_modules": ["mtp*"]}}))
    assert diagnose(tmp_path).state == "sound"


# Other folders and files


def test_adapters_have_no_module(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "user/base"}))
    diagnosis = diagnose(tmp_path)
    assert diagnosis.state == "adapter" and "Diagnose user/base instead." in str(diagnosis)


def save_gguf(path: Path, *, count: int | None, module: bool, value: float = 0.1) -> Path:
    writer = GGUFWriter(path, "glm4moe")
    writer.add_block_count(5)
    if count is not None:
        writer.add_uint32("glm4moe.nextn_predict_layers", count)
    names = ["blk.3.attn_output.weight"]
    if module:
        names += [f"blk.4.nextn.{name}.weight" for name in ("enorm", "hnorm", "shared_head_norm", "eh_proj")]
    for name in names:
        matrix = value * np.random.default_rng(0).normal(size=(8, 16)).astype(np.float32)
        writer.add_tensor(name, matrix if name.endswith(("proj.weight", "output.weight")) else matrix[0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("state", "arguments"),
    [
        ("sound", {"count": 1, "module": True}),
        ("none", {"count": None, "module": False}),
        ("lost", {"count": 1, "module": False}),
        ("undeclared", {"count": 0, "module": True}),
        ("dead", {"count": 1, "module": True, "value": 0.0}),
    ],
)
def test_gguf_files(tmp_path, state, arguments):
    path = save_gguf(tmp_path / "model.gguf", **arguments)
    assert diagnose(path).state == state
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(ValueError, match=r"model\.gguf is no whole GGUF file"):
        diagnose(path)


def test_bad_files_are_named(tmp_path):
    save_native(tmp_path, "deepseek_v3", shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    document = json.loads(index.read_text())
    file = document["weight_map"][JOIN]
    document["weight_map"]["model.layers.4.lie.weight"] = file
    index.write_text(json.dumps(document))
    with pytest.raises(ValueError, match=r"lacks the tensor model.layers.4.lie.weight, which .*index.json places"):
        diagnose(tmp_path)
    path = tmp_path / file
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=rf"{file} is damaged .*; it has model.layers"):
        diagnose(tmp_path)
    edit(tmp_path, num_hidden_layers=None)
    path.unlink()
    with pytest.raises(ValueError, match="has no file"):
        diagnose(tmp_path)


def test_every_state_has_a_rank():
    assert len(STATES) == len(set(STATES)) == 16
