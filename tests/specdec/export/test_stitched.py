"""A tuned native MTP module goes back into the target's own folder, and nothing else changes."""

import json
from pathlib import Path

import pytest
import torch

from scripts import export as export_script
from specdec import checkpoint
from specdec.core.shards import Shards
from specdec.core.untrusted import read_tensors
from specdec.export.engines import make_form
from specdec.export.stitched import copy_model, make_stitched_layout, write_stitched
from specdec.heads.native import NativeMTP, read_native_modules
from specdec.target.model import Target
from tests.support import native
from tests.support.hub import Repository
from tests.support.native import save_native
from tests.support.quantised import quantise
from tests.support.saved_targets import edit
from tests.support.targets import word_tokenizer

SHARD = "20KB"
WIDTHS = {  # of inputs, in whole groups
    "qwen3_5_text": {"intermediate_size": 64, "linear_value_head_dim": 8},
    "glm4_moe_lite": {"intermediate_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 32, "kv_lora_rank": 32,
                      "v_head_dim": 8},
    "nemotron_h": {"intermediate_size": 64, "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32},
}  # fmt: skip


def tune(drafter: NativeMTP) -> NativeMTP:
    """Other values for everything but the router."""
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in drafter.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return drafter.frozen_copy()


def remove_modules(folder: Path, name: str) -> None:
    """The same model as a family without MTP modules has it."""
    tensors = read_tensors(folder / "model.safetensors")
    kept = {key: value.clone() for key, value in tensors.items() if not native.is_inside(name, key)}
    native.safetensors.torch.save_file(kept, folder / "model.safetensors", {"format": "pt"})
    count = {native.COUNTS.get(name, "num_nextn_predict_layers"): 0}
    config = json.loads((folder / "config.json").read_text())
    edit(folder, **({"text_config": config["text_config"] | count} if "text_config" in config else count))


def tensors_equal(first: dict, second: dict) -> bool:
    return first.keys() == second.keys() and all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.parametrize("name", native.NAMES)
def test_only_the_tensors_of_the_module_change(tmp_path, name):
    source, out = tmp_path / "model", tmp_path / "out"
    save_native(source, name, shard_size=SHARD)
    target = Target.load(str(source), dtype="float32")
    drafter = tune(NativeMTP(target))
    before = {path.name: path.read_bytes() for path in source.iterdir()}
    write_stitched(drafter, target, out)
    assert {path.name: path.read_bytes() for path in source.iterdir()} == before
    assert {path.name for path in out.iterdir()} == before.keys()
    files = {file for key, file in native.list_shards(source).items() if key in drafter.published["tensors"]}
    assert len(files) < len(list(source.glob("*.safetensors")))
    for file, content in before.items():
        assert ((out / file).read_bytes() != content) == (file in files)
        assert (out / file).samefile(source / file) == (file.endswith(".safetensors") and file not in files)
    for file in files:
        old, new = read_tensors(source / file), read_tensors(out / file)
        changed = {key for key, value in old.items() if not torch.equal(value, new[key])}
        assert changed <= drafter.published["tensors"].keys() and list(old) == list(new)
    again = Target.load(str(out), dtype="float32")
    assert again.fingerprint() == target.fingerprint()
    assert tensors_equal(read_native_modules(str(out), again)[1], drafter.state_dict())


@pytest.mark.parametrize("name", native.NAMES)
@pytest.mark.parametrize("sharded", [False, True])
def test_a_target_without_a_module_gets_one(tmp_path, name, sharded):
    base, source, out = (tmp_path / each for each in ("base", "model", "out"))
    save_native(base, name)
    save_native(source, name)
    remove_modules(source, name)
    if sharded:
        model = Target.load(str(source), dtype="float32").model
        (source / "model.safetensors").unlink()
        model.save_pretrained(source, max_shard_size=SHARD)
    target = Target.load(str(source), dtype="float32")
    with pytest.raises(ValueError, match="ships no MTP modules"):
        NativeMTP(target)
    drafter = tune(NativeMTP(target, source=str(base)))
    write_stitched(drafter, target, out)
    again = Target.load(str(out), dtype="float32")
    assert again.fingerprint() == target.fingerprint()
    assert tensors_equal(read_native_modules(str(out), again)[1], drafter.state_dict())
    field = native.COUNTS.get(name, "num_nextn_predict_layers")
    config = json.loads((out / "config.json").read_text())
    assert config.get("text_config", config)[field] == native.NUM_MODULES.get(name, 1)
    assert native.list_shards(out).keys() == native.list_shards(base).keys()  # the names that the family has


def test_the_layers_of_a_quantised_target_are_told_from_the_module(tmp_path):
    save_native(tmp_path / "base", "qwen3_5_text")
    save_native(tmp_path / "model", "qwen3_5_text")
    remove_modules(tmp_path / "model", "qwen3_5_text")
    target = Target.load(str(tmp_path / "model"), dtype="float32")
    drafter = NativeMTP(target, source=str(tmp_path / "base")).frozen_copy()
    about = {"quant_method": "compressed-tensors", "ignore": ["lm_head"]}
    edit(tmp_path / "model", quantization_config=about)
    write_stitched(drafter, target, tmp_path / "out")
    ignored = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["ignore"]
    assert ignored[:2] == ["lm_head", "mtp.fc"] and "mtp.layers.0.self_attn.q_proj" in ignored
    edit(tmp_path / "model", quantization_config={"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []})
    settings = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}}
    (tmp_path / "model" / "hf_quant_config.json").write_text(json.dumps(settings))
    write_stitched(drafter, target, tmp_path / "opt")
    old = json.loads((tmp_path / "opt" / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    new = json.loads((tmp_path / "opt" / "config.json").read_text())["quantization_config"]["ignore"]
    assert old[0] == "lm_head" and old[1:] == new and set(new) == set(ignored) - {"lm_head"}
    (tmp_path / "model" / "hf_quant_config.json").unlink()
    edit(tmp_path / "model", quantization_config={"quant_method": "own"})
    with pytest.raises(
        ValueError, match=r"is quantised \(own\), and where .* is unknown: take one of compressed-tensors"
    ):
        write_stitched(drafter, target, tmp_path / "other")


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *(("glm4_moe_lite", method) for method in ("fp8_blocks", "modelopt_fp8", "modelopt_nvfp4", "nvfp4", "w4a16")),
        ("qwen3_5_text", "modelopt_nvfp4"),
        ("nemotron_h", "fp8_blocks"),
    ],
)
def test_a_quantised_module_is_read_plain_and_stays_in_its_form(tmp_path, name, method):
    source, out = tmp_path / "model", tmp_path / "out"
    save_native(tmp_path / "before", name, fields=WIDTHS.get(name))
    quantise(tmp_path / "before", source, method, plain=tmp_path / "plain")
    target = Target.load(str(source), dtype="float32")
    drafter = NativeMTP(target)
    assert tensors_equal(drafter.state_dict(), NativeMTP(target, source=str(tmp_path / "plain")).state_dict())
    stored = read_tensors(source / "model.safetensors")
    write_stitched(drafter.frozen_copy(), target, tmp_path / "same")
    assert tensors_equal(read_tensors(tmp_path / "same" / "model.safetensors"), stored)
    tuned = tune(drafter)
    write_stitched(tuned, target, out)
    written = read_tensors(out / "model.safetensors")
    assert all((value.dtype, value.shape) == (stored[key].dtype, stored[key].shape) for key, value in written.items())
    changed = {key for key, value in written.items() if not torch.equal(value, stored[key])}
    assert len(changed) > 9 and all(native.is_inside(name, key) for key in changed) and written.keys() == stored.keys()
    again, bound = NativeMTP(Target.load(str(out), dtype="float32")), 0.25 if "fp4" in method else 0.08
    for key, value in again.state_dict().items():
        expected, is_linear = tuned.state_dict()[key], "proj" in key or "join" in key
        error = (value - expected).abs().max() / expected.abs().max()
        assert error <= bound * is_linear, key
    write_stitched(again.frozen_copy(), target, tmp_path / "twice")
    assert tensors_equal(read_tensors(tmp_path / "twice" / "model.safetensors"), written)


def test_a_model_on_the_hub_is_copied_whole(tmp_path, hub, monkeypatch):
    monkeypatch.setattr("specdec.core.hub.is_hub_reachable", lambda: True)
    save_native(tmp_path / "model", "qwen3_5_text")
    word_tokenizer(60).save_pretrained(tmp_path / "model")
    contents = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    side_files = {"chat_template.jinja": b"{{ messages }}", "generation_config.json": b"{}"}
    unused = dict.fromkeys(("pytorch_model.bin", "onnx/model.json", "original/consolidated.00.pth"), b"weights")
    hub.repositories["user/model"] = Repository(private=False)
    hub.repositories["user/model"].commit("first", contents | side_files | unused)
    hub.repositories["user/model"].commit("main", contents)
    shards = Shards("user/model", revision="first")
    for out in (tmp_path / "out", tmp_path / "without-the-hub"):
        copy_model(shards, shards.path("config.json").parent, out, changed=set())
        assert {path.name: path.read_bytes() for path in out.iterdir()} == contents | side_files
        monkeypatch.setattr("specdec.core.hub.is_hub_reachable", lambda: False)


def test_modules_that_cannot_be_put_back_are_refused(tmp_path):
    save_native(tmp_path / "model", "deepseek_v3")
    target = Target.load(str(tmp_path / "model"), dtype="float32")
    drafter = NativeMTP(target).frozen_copy()
    tensors = read_tensors(tmp_path / "model" / "model.safetensors")
    name = "model.layers.4.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    native.safetensors.torch.save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{name} is quantised \(F8_E4M3\) and has no scale"):
        write_stitched(drafter, target, tmp_path / "out")
    few = NativeMTP(target, source=None, vocab=torch.arange(9))
    with pytest.raises(ValueError, match=r"head.vocab_size=null"):
        make_stitched_layout(few)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_command_writes_a_model_and_how_to_serve_it(tmp_path, capsys, engine):
    """In the engine that the module was trained for: further drafts of GLM read another state in each."""
    source = tmp_path / "model"
    save_native(source, "glm4_moe_lite")
    word_tokenizer(60).save_pretrained(source)
    (source / "README.md").write_text("its own")
    target = Target.load(str(source), dtype="float32")
    drafter = tune(NativeMTP(target, engine=engine))
    checkpoint.save(tmp_path / "head", drafter, {"_target_": "specdec.heads.native.NativeMTP", "source": "target"})
    arguments = [f"checkpoint={tmp_path}/head", "target.dtype=float32", "format=stitched"]
    export_script.main([*arguments, f"out={tmp_path}/out"])
    printed = capsys.readouterr().out
    card = (tmp_path / "out" / "MTP.md").read_text()
    is_vllm = engine == "vllm"
    assert (
        f"vllm serve {tmp_path}/out" in printed and '{"method": "mtp", "num_speculative_tokens": 3}' in card
    ) == is_vllm
    assert ("--speculative-algorithm NEXTN" in printed) != is_vllm
    first, other = ("vLLM", "SGLang") if is_vllm else ("SGLang", "vLLM")
    assert f"Trained as {first} runs it" in card and f"{other} gives back another state" in card
    assert "No engine has run a module of a glm4_moe_lite model" in card and "NativeMTP" in card
    assert (tmp_path / "out" / "README.md").read_text() == "its own"
    assert tensors_equal(read_native_modules(str(tmp_path / "out"), target)[1], drafter.state_dict())
    with pytest.raises(ValueError, match=r"format=vllm takes .*, and not NativeMTP"):
        export_script.main([arguments[0], arguments[1], "format=vllm", f"out={tmp_path}/other"])


def test_a_window_that_no_engine_reads_is_noted(tmp_path):
    save_native(tmp_path / "model", "glm4_moe")
    drafter = NativeMTP(Target.load(str(tmp_path / "model"), dtype="float32"))
    notes = [" ".join(make_form(head, "stitched").notes) for head in (drafter, drafter.with_window(8))]
    assert ["Layers of this head see 8 positions" in text for text in notes] == [False, True]
