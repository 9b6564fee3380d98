"""Loading: memory, devices, multimodal checkpoints, numbers of hidden states, and refusals before training."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec.heads.medusa import Medusa2
from specdec.target import attention
from specdec.target import loading as target_loading
from specdec.target.model import Target, load_tokenizer
from tests.support.commands import child_environment
from tests.support.families import find_family, make
from tests.support.saved_targets import IMAGES, PROMPT, SIZES, check_decoding, edit, edit_tensors, save
from tests.support.targets import make_target, save_word_model

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
    """The file is mapped, so the peak has its size too if the dtype changes. A further copy would exceed the bound."""
    config = LlamaConfig(**{**SIZES, "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 4096})
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path, max_shard_size="20MB")
    in_file = 4 * sum(parameter.numel() for parameter in model.parameters())
    command = [sys.executable, "-c", MEASURE, str(tmp_path), "bfloat16"]
    process = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=True)
    assert 1.5 * in_file < 1.3 * int(process.stdout) and int(process.stdout) < 1.85 * in_file


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


# Multimodal targets

VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 4,
    "out_hidden_size": 128,
    "patch_size": 4,
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
MULTIMODAL = {
    "Qwen2_5_VL": ({"rope_parameters": ROPE}, {**VISION, "fullatt_block_indexes": [0]}),
    "Qwen3VL": ({"rope_parameters": {**ROPE, "mrope_interleaved": True}}, {**VISION, "deepstack_visual_indexes": [0]}),
    "Llava": ({"model_type": "llama"}, {"model_type": "clip_vision_model", **IMAGES}),
    "Mistral3": ({"model_type": "mistral", "sliding_window": None}, {"model_type": "pixtral", **IMAGES}),
    "Gemma3": ({"layer_types": ["full_attention"] * 4}, IMAGES),
}


@pytest.mark.parametrize("family", MULTIMODAL)
def test_multimodal_checkpoints_decode_text(tmp_path, family):
    torch.manual_seed(0)
    text, vision = MULTIMODAL[family]
    config = getattr(transformers, f"{family}Config")(text_config={**SIZES, **text}, vision_config=vision)
    getattr(transformers, f"{family}ForConditionalGeneration")(config).save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), dtype="float64")
    check_decoding(target)
    Medusa2(target)  # its adapter is in the text part only
    assert {id(layer) for layer in target.adapted_layers()} <= {id(module) for module in target.decoder.modules()}


# Hidden states


def test_hidden_states_are_numbered_as_in_transformers(tmp_path):
    target = Target.load(str(save(tmp_path, num_hidden_layers=8)), dtype="float64")
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    states = target.model(tokens, output_hidden_states=True).hidden_states
    output = target.read(tokens, target.layer_ids([0, 3, -1]))
    torch.testing.assert_close(output.features, torch.cat([states[0], states[3], states[8]], dim=-1))
    torch.testing.assert_close(target.logits(output.final), target.model(tokens).logits)
    for layers in ([1, 1], [3, 2], [0, 9], [-10]):
        with pytest.raises(ValueError, match="strictly increasing"):
            target.layer_ids(layers)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, torch.ones(4)])
def test_queries_that_see_nothing_do_not_become_nan(softcap, sinks):
    """As padding before a prompt, whose keys and values later layers compute with."""
    query, key, value = (torch.randn(2, num_heads, 3, 8) for num_heads in (4, 2, 2))
    seen = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    cut = seen.clone()
    cut[1, :, :1] = cut[1, :, :, :1] = False
    settings = {"sinks": sinks, "softcap": softcap}
    whole, cut = (attention.multiply_attention(query, key, value, mask, **settings) for mask in (seen, cut))
    assert cut.isfinite().all() and torch.equal(cut[0], whole[0]) and not torch.equal(cut[1], whole[1])


# Refusals


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (transformers.T5Config(), "is a t5 model; a target must be a causal language model"),
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
    make(find_family("deepseek_v4")).save_pretrained(tmp_path)
    code = (
        f"from specdec.target.model import Target; Target.load({str(tmp_path)!r})"  # the family's is not imported yet
    )
    process = subprocess.run([sys.executable, "-c", code], env=child_environment(), capture_output=True, text=True)
    assert "of a kind that is not known here (heavily_compressed_attention)" in process.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", ["model.layers.2.mlp.up_proj.weight", "lm_head.weight"])
def test_missing_tensors_are_refused(tmp_path, name):
    """Also an LM head that the configuration does not tie."""
    edit_tensors(save(tmp_path), lambda tensors: tensors.pop(name))
    with pytest.raises(ValueError, match=rf"lacks 1 of its tensors \({name}\)"):
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


def test_messages_for_what_is_not_there_name_the_fix(tmp_path, monkeypatch):
    for load in (Target.load, load_tokenizer):
        with pytest.raises(ValueError, match=r"^The folder targets/nothing-here does not exist\. Give the folder of a"):
            load("targets/nothing-here")
    with pytest.raises(ValueError, match="could not be loaded"):
        Target.load(str(tmp_path))
    with pytest.raises(
        ValueError,
        match=r"^device=gpu cannot be used here \(torch has no device of this name\)\. Give cpu,",
    ):
        Target.load(str(save(tmp_path)), dtype="float32", device="gpu")
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"needs the package peft: pip install 'specdec-drafters\[train\]'\.$"):
        Medusa2(make_target(6, num_layers=2))
