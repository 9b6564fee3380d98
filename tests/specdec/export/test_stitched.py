"""A tuned native MTP module goes back into the target's own folder, and nothing else changes."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts import export as export_script
from specdec import checkpoint
from specdec.core.untrusted import read_tensors
from specdec.export.stitched import make_stitched_layout, write_stitched
from specdec.heads.native import NativeMTP, read_native_modules
from specdec.target.model import Target
from tests.support import native
from tests.support.native import save_native
from tests.support.saved_targets import edit
from tests.support.targets import word_tokenizer

SHARD = "20KB"


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
    own = tuple(f"{each}." for each in native.NAMES[name].values())
    kept = {key: value.clone() for key, value in tensors.items() if not key.startswith(own)}
    native.safetensors.torch.save_file(kept, folder / "model.safetensors", {"format": "pt"})
    edit(folder, **{native.COUNTS.get(name, "num_nextn_predict_layers"): 0})


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
        model = AutoModelForCausalLM.from_pretrained(source)
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
    assert json.loads((out / "config.json").read_text())[field] == 1
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
    edit(tmp_path / "model", quantization_config={"quant_method": "own"})
    with pytest.raises(
        ValueError, match=r"is quantised \(own\), and where .* is unknown: take one of compressed-tensors"
    ):
        write_stitched(drafter, target, tmp_path / "other")


def test_modules_that_cannot_be_put_back_are_refused(tmp_path):
    save_native(tmp_path / "model", "deepseek_v3")
    target = Target.load(str(tmp_path / "model"), dtype="float32")
    drafter = NativeMTP(target).frozen_copy()
    tensors = read_tensors(tmp_path / "model" / "model.safetensors")
    name = "model.layers.4.self_attn.o_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    native.safetensors.torch.save_file(tensors, tmp_path / "model" / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=r"o_proj.weight is float8_e4m3fn \[32, 48\], so the tuned module cannot"):
        write_stitched(drafter, target, tmp_path / "out")
    few = NativeMTP(target, source=None, vocab=torch.arange(9))
    with pytest.raises(ValueError, match=r"head.vocab_size=null"):
        make_stitched_layout(few)


def test_the_command_writes_a_model_and_how_to_serve_it(tmp_path, capsys):
    source = tmp_path / "model"
    save_native(source, "glm4_moe")
    word_tokenizer(60).save_pretrained(source)
    (source / "README.md").write_text("its own")
    target = Target.load(str(source), dtype="float32")
    drafter = tune(NativeMTP(target))
    checkpoint.save(tmp_path / "head", drafter, {"_target_": "specdec.heads.native.NativeMTP", "source": "target"})
    arguments = [f"checkpoint={tmp_path}/head", "target.dtype=float32", "format=stitched"]
    export_script.main([*arguments, f"out={tmp_path}/out"])
    printed = capsys.readouterr().out
    assert f"vllm serve {tmp_path}/out" in printed and '{"method": "mtp", "num_speculative_tokens": 3}' in printed
    assert "--speculative-algorithm NEXTN" in printed
    assert (tmp_path / "out" / "README.md").read_text() == "its own"
    assert "NativeMTP" in (tmp_path / "out" / "MTP.md").read_text()
    assert tensors_equal(read_native_modules(str(tmp_path / "out"), target)[1], drafter.state_dict())
    with pytest.raises(ValueError, match=r"format=vllm takes .*, and not NativeMTP"):
        export_script.main([arguments[0], arguments[1], "format=vllm", f"out={tmp_path}/other"])
