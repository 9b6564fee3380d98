"""Damaged MTP modules are repaired in a copy of the model's folder, or come from the model's base."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.core.untrusted import read_tensors
from specdec.export.grafted import repair_model
from specdec.heads.native import read_native_modules
from specdec.heads.native_modules.diagnosis import diagnose_module
from specdec.target.model import Target
from tests.support import native
from tests.support.native import save_native
from tests.support.saved_targets import edit, edit_tensors


def repair(folder: Path, out: Path, base: Path | None = None) -> list[str]:
    name = None if base is None else str(base)
    return repair_model(diagnose_module(str(folder), base=name), out, base=name)


def drop_module(tensors: dict) -> None:
    pattern = "mtp" if any("mtp" in key for key in tensors) else r"\.layers\.[4-6]\."
    for key in [key for key in tensors if re.search(pattern, key)]:
        del tensors[key]


def rename_layer(tensors: dict) -> None:
    for key in [key for key in tensors if ".layers.4." in key]:
        tensors[key.replace(".layers.4.", ".layers.7.")] = tensors.pop(key)


def shift(tensors: dict) -> None:
    for key in [key for key in tensors if key.startswith("mtp.") and "norm" in key]:
        tensors[key] += 1


def check_equal(folder: Path, base: Path) -> None:
    """The module of a folder is that of the base, and all other tensors and the count are there."""
    target = Target.load(str(folder), dtype="float32")
    modules = [read_native_modules(str(path), target)[1] for path in (folder, base)]
    assert modules[0].keys() == modules[1].keys()
    for name, value in modules[0].items():
        torch.testing.assert_close(value, modules[1][name])
    assert native.list_shards(folder).keys() == native.list_shards(base).keys()


@pytest.mark.parametrize("name", [name for name in native.NAMES if name != "qwen2"])
def test_a_lost_module_comes_from_the_base(tmp_path, name):
    base, model, out = (tmp_path / part for part in ("base", "model", "out"))
    save_native(base, name)
    shutil.copytree(base, model)
    edit_tensors(model, drop_module)
    before = {path.name: path.read_bytes() for path in model.iterdir()}
    with pytest.raises(ValueError, match="Give source=BASE: the model that it comes from"):
        repair(model, out)
    assert "are the module now" in repair(model, out, base)[0]
    check_equal(out, base)
    assert {path.name: path.read_bytes() for path in model.iterdir()} == before
    assert diagnose_module(str(out), base=str(base)).state == "sound"
    assert repair(out, tmp_path / "again") == [] and not (tmp_path / "again").exists()


REPAIRS = {  # (family, damage of the tensors, fields of config.json, sentence, whether a base is needed)
    "dead": ("qwen3_5_text", lambda t: t["mtp.fc.weight"].zero_(), {}, "are the module now", True),
    "incomplete": ("deepseek_v3", lambda t: t.pop("model.layers.4.enorm.weight"), {}, "are the module now", True),
    "misnumbered": ("deepseek_v3", rename_layer, {}, "renamed from layer 7 to 4", False),
    "undeclared": ("qwen3_5_text", dict.copy, {"mtp_num_hidden_layers": 0}, "config.json counts 1 now", False),
    "shifted": ("qwen3_5_text", shift, {}, "norms are shifted back by 1", False),
    "swapped": (
        "qwen3_5_text",
        lambda t: t.update({"mtp.fc.weight": t["mtp.fc.weight"].roll(32, 1)}),
        {},
        "halves of mtp.fc.weight are swapped back",
        True,
    ),
}


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", REPAIRS)
def test_repairs(tmp_path, name, sharded):
    family, damage, fields, sentence, needs_base = REPAIRS[name]
    base, model, out = (tmp_path / part for part in ("base", "model", "out"))
    save_native(base, family)
    shutil.copytree(base, model)
    edit_tensors(edit(model, **fields), damage)
    if sharded:
        split_model(model)
    changes = repair(model, out, base if needs_base else None)
    assert len(changes) == 1 and sentence in changes[0]
    check_equal(out, base)
    assert json.loads((out / "config.json").read_text()) == json.loads((base / "config.json").read_text())


def split_model(folder: Path) -> None:
    """Puts each half of the tensors into a file of its own."""
    tensors = read_tensors(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        values = {name: value.clone() for name, value in tensors.items() if files[name] == file}
        native.safetensors.torch.save_file(values, folder / file, {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


@pytest.mark.parametrize("rows", [64, 60])
def test_copies_become_the_models_own(tmp_path, rows):
    save_native(tmp_path / "model", "glm4_moe")

    def add_copies(tensors: dict) -> None:
        tensors["model.layers.4.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:rows] + 1
        tensors["model.layers.4.shared_head.head.weight"] = tensors["lm_head.weight"].clone()

    edit_tensors(tmp_path / "model", add_copies)
    changes = repair(tmp_path / "model", tmp_path / "out")
    assert changes == ["model.layers.4.embed_tokens.weight is model.embed_tokens.weight now."]
    shards = native.list_shards(tmp_path / "out")
    tensors = {}
    for file in set(shards.values()):
        tensors |= read_tensors(tmp_path / "out" / file)
    assert torch.equal(tensors["model.layers.4.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    assert diagnose_module(str(tmp_path / "out")).state == "sound"


def test_a_grafted_module_of_a_quantised_model_is_listed(tmp_path):
    base, model, out = (tmp_path / part for part in ("base", "model", "out"))
    save_native(base, "qwen3_5_text")
    shutil.copytree(base, model)

    def quantise(tensors: dict) -> None:
        drop_module(tensors)
        for key in [key for key in tensors if "self_attn" in key and key.endswith("_proj.weight")]:
            tensors[key] = tensors[key].to(torch.float8_e4m3fn)
            tensors[f"{key}_scale"] = torch.ones(1)

    edit_tensors(edit(model, quantization_config={"quant_method": "compressed-tensors", "ignore": []}), quantise)
    (model / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    repair(model, out, base)
    assert diagnose_module(str(out)).state == "sound"
    assert "mtp.fc" in json.loads((out / "config.json").read_text())["quantization_config"]["ignore"]
    assert "mtp.fc" in json.loads((out / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    edit(model, quantization_config={"quant_method": "gptq"})
    with pytest.raises(ValueError, match=r"model is quantised \(gptq\), and where such a model names layers"):
        repair(model, tmp_path / "other", base)
    edit(out, quantization_config={"quant_method": "compressed-tensors", "ignore": []})
    (out / "hf_quant_config.json").unlink()
    assert repair(out, tmp_path / "again") == ["All of its layers are in the list of plain ones."]
    assert diagnose_module(str(tmp_path / "again")).state == "sound"


MISFITS = {
    r"is a glm4_moe model and .* a deepseek_v3 one": {"name": "glm4_moe"},
    "has states of width 48 and .* of 32": {"fields": {"hidden_size": 48}},
    r"does not fit .*experts.0.down_proj.weight has the shape .*, and of this model it would be": {
        "fields": {"moe_intermediate_size": 16}
    },
    r"has no module to give \(dead\): model.layers.4.eh_proj.weight is 0 everywhere": {
        "damage": lambda t: t["model.layers.4.eh_proj.weight"].zero_()
    },
    r"has no module to give \(none\): It has no module": {"damage": drop_module, "count": 0},
}


@pytest.mark.parametrize("sentence", MISFITS)
def test_bases_that_do_not_fit_are_refused(tmp_path, sentence):
    options = MISFITS[sentence]
    save_native(tmp_path / "model", "deepseek_v3")
    save_native(tmp_path / "base", options.get("name", "deepseek_v3"), fields=options.get("fields"))
    edit_tensors(tmp_path / "model", drop_module)
    edit_tensors(tmp_path / "base", options.get("damage", dict.copy))
    edit(tmp_path / "base", num_nextn_predict_layers=options.get("count", 1))
    with pytest.raises(ValueError, match=sentence):
        repair(tmp_path / "model", tmp_path / "out", tmp_path / "base")
    assert not (tmp_path / "out").exists()


def test_a_repaired_model_answers_as_before(tmp_path):
    save_native(tmp_path / "base", "qwen3_5_text")
    shutil.copytree(tmp_path / "base", tmp_path / "model")
    edit_tensors(tmp_path / "model", drop_module)
    repair(tmp_path / "model", tmp_path / "out", tmp_path / "base")
    tokens = torch.arange(9)[None]
    outputs = [AutoModelForCausalLM.from_pretrained(tmp_path / part)(tokens).logits for part in ("model", "out")]
    assert torch.equal(*outputs)
