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
from specdec.target.loading import fingerprint_of_model
from specdec.target.model import Target
from tests.families import FAMILIES, configuration, make
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
@pytest.mark.parametrize(
    ("saved", "loaded"), [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")]
)
def test_loading_holds_the_weights_once(tmp_path, saved, loaded):
    """The file is mapped, so the peak has its size too where the dtype changes; a further copy would exceed the bound."""
    config = LlamaConfig(**{**SIZES, "vocab_size": 8192, "hidden_size": 768, "intermediate_size": 4096})
    model = LlamaForCausalLM(config).to(target_loading.DTYPES[saved])
    model.save_pretrained(tmp_path, max_shard_size="20MB")
    num = sum(parameter.numel() for parameter in model.parameters())
    in_file, in_memory = (num * target_loading.DTYPES[dtype].itemsize for dtype in (saved, loaded))
    command = [sys.executable, "-c", MEASURE, str(tmp_path), loaded]
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, check=True)
    needed = in_file if saved == loaded else in_file + in_memory
    assert needed < 1.3 * int(done.stdout) and int(done.stdout) < needed + min(in_file, in_memory) * 0.7


# Devices


def test_devices_that_are_not_there_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"^device=gpu cannot be used here \(.*\)\. Give cpu, cuda, .* or auto"):
        Target.load(str(save(tmp_path)), dtype="float32", device="gpu")


def test_auto_is_the_same_as_the_only_device(tmp_path):
    folder = str(save(tmp_path))
    target, other = (Target.load(folder, dtype="float32", device=device) for device in ("cpu", "auto"))
    assert target.fingerprint() == other.fingerprint()
    torch.testing.assert_close(
        other.model(torch.tensor([PROMPT])).logits.cpu(), target.model(torch.tensor([PROMPT])).logits
    )


def test_layers_are_spread_in_order_and_all_else_is_on_the_first_device():
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_hidden_layers": 5}))
    first, second = devices = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert target_loading.spread(model, 5, devices) == {
        "model.embed_tokens": first, "model.norm": first, "model.rotary_emb": first, "lm_head": first,
        "model.layers.0": first, "model.layers.1": first, "model.layers.2": first, "model.layers.3": second,
        "model.layers.4": second,
    }  # fmt: skip


def test_blocks_of_two_layers_are_spread():
    family = next(family for family in FAMILIES if family.model_type == "longcat_flash")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(configuration(family))
    places = target_loading.spread(model, 8, ["first", "second"])
    assert [places[f"model.layers.{n}"] for n in range(4)] == ["first", "first", "second", "second"]


def test_a_spread_target_computes_the_same(tmp_path, monkeypatch):
    """Two devices by name; a CPU has one memory, so this shows the hooks between the layers and not the transfers."""
    folder = str(save(tmp_path))
    wanted = Target.load(folder, dtype="float32")
    monkeypatch.setattr(target_loading, "find_devices", lambda device: [torch.device("cpu"), torch.device("cpu", 0)])
    monkeypatch.setattr("accelerate.utils.modeling.check_device_same", lambda first, second: True)
    target = Target.load(folder, dtype="float32", device="auto")
    assert len(set(target.model.hf_device_map.values())) == 2
    tokens = torch.tensor([PROMPT])
    torch.testing.assert_close(target.read(tokens, (1, 3)).features, wanted.read(tokens, (1, 3)).features)
    assert target.fingerprint() == wanted.fingerprint()
    check_decoding(target)


def test_without_accelerate_one_device_works_and_auto_names_the_extra(tmp_path, monkeypatch):
    folder = str(save(tmp_path))
    monkeypatch.setattr(target_loading, "is_accelerate_available", lambda: False)
    assert Target.load(folder, dtype="float32").device == torch.device("cpu")
    monkeypatch.setattr(target_loading, "find_devices", lambda device: [torch.device("cpu"), torch.device("cpu", 0)])
    with pytest.raises(ValueError, match=r"^device=auto needs the package accelerate: pip install 'specdec\[train\]'"):
        Target.load(folder, dtype="float32", device="auto")


# Fingerprints


def test_the_fingerprint_of_an_unquantised_target_stays_what_checkpoints_hold():
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2)
    )  # fmt: skip
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_((torch.arange(parameter.numel()) % 97 - 48 + number).view(parameter.shape) / 64)
    assert fingerprint_of_model(model, model.config, None) == "b627ab7eb7640233"


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
        (transformers.T5Config(), r"is an encoder-decoder \(t5\)"),
        (transformers.BartConfig(), r"is an encoder-decoder \(bart\)"),
        (transformers.ViTConfig(), "is a vit model, which does not write text"),
    ],
)
def test_other_architectures_are_refused_by_their_configuration(tmp_path, config, message):
    config.save_pretrained(tmp_path)  # no weights: nothing is read of them
    with pytest.raises(ValueError, match=message):
        Target.load(str(tmp_path), dtype="float32")


def test_a_model_that_transformers_does_not_know_is_refused(tmp_path):
    folder = edit(save(tmp_path), model_type="newer_than_this")
    with pytest.raises(
        ValueError, match=rf"transformers {transformers.__version__} does not know model_type=newer_than_this"
    ):
        Target.load(str(folder), dtype="float32")


def test_kinds_of_layers_that_nobody_knows_are_refused(tmp_path):
    make(next(family for family in FAMILIES if str(family) == "qwen3")).save_pretrained(tmp_path)
    edit(tmp_path, layer_types=["telepathic_attention"] * 4)
    with pytest.raises(ValueError, match=r"does not take its configuration .*telepathic_attention.* Install a newer"):
        Target.load(str(tmp_path))


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


@pytest.mark.parametrize("what", ["a block", "the LM head"])
def test_logits_that_overflow_in_float16_are_named(tmp_path, what):
    """Whether a state of a block or a logit is too large: in bfloat16 and float32 the target can be read."""
    model = AutoModelForCausalLM.from_pretrained(save_word_model(tmp_path / "large"))
    with torch.no_grad():
        (model.model.layers[1].mlp.down_proj if what == "a block" else model.lm_head).weight.mul_(3e5)
    model.save_pretrained(tmp_path / "large")
    with pytest.raises(ValueError) as refused:
        Target.load(str(tmp_path / "large"), dtype="float16")
    assert str(refused.value) == (
        f"{tmp_path / 'large'}: its logits are not finite in float16: use dtype=bfloat16 or float32, whose range is wider."
    )
    for dtype in ("bfloat16", "float32"):
        Target.load(str(tmp_path / "large"), dtype=dtype)


def test_weights_that_are_no_numbers_are_named(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_word_model(tmp_path / "damaged"))
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path / "damaged")
    with pytest.raises(ValueError, match="its logits are not finite in float32: its weights are damaged"):
        Target.load(str(tmp_path / "damaged"), dtype="float32")
