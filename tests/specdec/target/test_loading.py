"""Loading: low memory, devices, quantised and multimodal checkpoints, fingerprints, and what is refused before training."""

import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec.heads.medusa import Medusa2
from specdec.target import loading as target_loading
from specdec.target.fingerprint import WeightSource
from specdec.target.model import Target
from tests.families import FAMILIES, make
from tests.saved_targets import PROMPT, SIZES, check_decoding, edit, save
from tests.support import child_environment, save_word_model

# Memory

MEASURE = """
import sys, torch
import accelerate, transformers.models.llama.modeling_llama
from specdec.target.model import Target

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

before = peak()
target = Target.load(sys.argv[1], dtype=sys.argv[2])
print(peak() - before)
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_loading_holds_the_weights_once(tmp_path):
    """The file is mapped, so the peak has its size too where the dtype changes; a further copy would exceed the bound."""
    config = LlamaConfig(**{**SIZES, "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 4096})
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="20MB")
    in_file = 4 * sum(parameter.numel() for parameter in model.parameters())
    command = [sys.executable, "-c", MEASURE, str(tmp_path), "bfloat16"]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=True)
    assert 1.5 * in_file < 1.3 * int(done.stdout) and int(done.stdout) < 1.85 * in_file


# Devices


def test_devices_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^device=gpu cannot be used here \(.*\)\. Give cpu, cuda, .* or auto"):
        Target.load(str(save(tmp_path)), dtype="float32", device="gpu")


def test_a_spread_target_computes_the_same(tmp_path, monkeypatch):
    """Two devices by name; a CPU has one memory, so this shows the hooks between the layers and not the transfers."""
    folder = str(save(tmp_path))
    reference = Target.load(folder, dtype="float32")
    monkeypatch.setattr(target_loading, "find_devices", lambda device: [torch.device("cpu"), torch.device("cpu", 0)])
    monkeypatch.setattr("accelerate.utils.modeling.check_device_same", lambda first, second: True)
    target = Target.load(folder, dtype="float32", device="auto")
    devices = target.model.hf_device_map
    assert [devices[f"model.layers.{n}"].index for n in range(4)] == [None, None, 0, 0]
    assert {device.index for module_name, device in devices.items() if "layers" not in module_name} == {None}
    tokens = torch.tensor([PROMPT])
    torch.testing.assert_close(target.read(tokens, (1, 3)).features, reference.read(tokens, (1, 3)).features)
    assert target.fingerprint() == reference.fingerprint()
    check_decoding(target)


# Fingerprints


def test_an_earlier_fingerprint_stays_what_checkpoints_hold():
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2)
    )  # fmt: skip
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_((torch.arange(parameter.numel()) % 97 - 48 + number).view(parameter.shape) / 64)
    made = WeightSource(model, {}, None, None).make_fingerprint()
    assert made.old_text == "b627ab7eb7640233" and made.matches("b627ab7eb7640233") and made.matches(made.text)
    assert not any(map(made.matches, ("v2.b627ab7eb7640233", made.text.removeprefix("v2."), "", None)))


# Multimodal targets

VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 4,
    "out_hidden_size": 128,
    "patch_size": 4,
}
IMAGES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16,
          "patch_size": 8}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}


@pytest.mark.parametrize(
    ("family", "text", "vision"),
    [
        ("Qwen2_5_VL", {"rope_parameters": ROPE}, {**VISION, "fullatt_block_indexes": [0]}),
        (
            "Qwen3VL",
            {"rope_parameters": {**ROPE, "mrope_interleaved": True}},
            {**VISION, "deepstack_visual_indexes": [0]},
        ),
        ("Llava", {"model_type": "llama"}, {"model_type": "clip_vision_model", **IMAGES}),
        ("Mistral3", {"model_type": "mistral", "sliding_window": None}, {"model_type": "pixtral", **IMAGES}),
        ("Gemma3", {"layer_types": ["full_attention"] * 4}, IMAGES),
    ],
)
def test_multimodal_checkpoints_decode_text(tmp_path, family, text, vision):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(text_config={**SIZES, **text}, vision_config=vision)
    getattr(transformers, f"{family}ForConditionalGeneration")(config).save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), dtype="float64")
    check_decoding(target)
    Medusa2(target)  # its adapter is in the text part only
    assert {id(layer) for layer in target.adapted_layers()} <= {id(part) for part in target.decoder.modules()}


# What is no target


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.T5Config(), "is a t5 model; a target must be a causal language model"),
        (transformers.BartConfig(), "is a bart model; a target must be a causal language model"),
        (transformers.ViTConfig(), "is a vit model; a target must be a causal language model"),
        ({"model_type": "newer_than_this"}, r"model type `newer_than_this` .* needs a newer transformers"),
        ({"layer_types": ["telepathic_attention"] * 4}, r"telepathic_attention.* needs a newer transformers"),
        ({"quantization_config": {"quant_method": "newer"}}, r"quantised by a method .* does not know \(newer\)"),
    ],
)
def test_what_cannot_be_a_target_is_refused_by_its_configuration(tmp_path, config, message):
    if isinstance(config, dict):
        LlamaConfig(**SIZES).save_pretrained(tmp_path)
        edit(tmp_path, **config)
    else:
        config.save_pretrained(tmp_path)  # no weights: nothing is read of them
    with pytest.raises(ValueError, match=message):
        Target.load(str(tmp_path), dtype="float32")


def test_kinds_of_layers_without_entries_that_can_be_dropped_are_refused_by_the_configuration(tmp_path):
    make(next(family for family in FAMILIES if str(family) == "deepseek_v4")).save_pretrained(tmp_path)
    command = f"from specdec.target.model import Target; Target.load({str(tmp_path)!r})"  # the family's code is not imported yet
    done = subprocess.run([sys.executable, "-c", command], env=child_environment(), capture_output=True, text=True)
    assert "of a kind that is not known here (heavily_compressed_attention)" in done.stderr.splitlines()[-1]


def test_missing_tensors_are_refused(tmp_path):
    path = save(tmp_path) / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 of its tensors \(model\.layers\.2\.mlp\.up_proj\.weight\)"):
        Target.load(str(tmp_path), dtype="float32")


@pytest.mark.parametrize(
    ("factor", "dtype", "message"),
    [
        (3e5, "float16", "its logits are not finite in float16: use dtype=bfloat16 or float32, whose range is wider"),
        (torch.nan, "float32", "its logits are not finite in float32: its weights are damaged"),
    ],
)
def test_logits_that_are_no_numbers_are_named(tmp_path, factor, dtype, message):
    model = AutoModelForCausalLM.from_pretrained(save_word_model(tmp_path))
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.mul_(factor)
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=message):
        Target.load(str(tmp_path), dtype=dtype)
    if dtype == "float16":
        Target.load(str(tmp_path), dtype="bfloat16")
