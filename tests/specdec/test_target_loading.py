"""Loading: low memory, devices, quantised and multimodal checkpoints, fingerprints, and what is refused before training."""

import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec import checkpoint, target_loading
from specdec.decode import Decoder
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle
from specdec.heads.medusa import Medusa2
from specdec.proposers.heads import HeadProposer
from specdec.sampling import Sampling
from specdec.target import Target
from specdec.target_fingerprint import fingerprint, quantisation_of
from specdec.tree import TreeShape
from tests.families import FAMILIES, Family, configuration, make
from tests.support import REAL_TARGET, child_environment, save_eagle

SIZES = {"vocab_size": 61, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": None,
         "eos_token_id": None, "initializer_range": 0.2}  # fmt: skip
PROMPT = [5, 9, 2, 44, 17]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def save(folder: Path, **arguments) -> Path:
    """A tiny Llama -> folder"""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**SIZES, **arguments})).save_pretrained(folder)
    return folder


def edit(folder: Path, **fields) -> Path:
    """Replaces fields of config.json -> folder"""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def save_fp8(folder: Path) -> Path:
    """The tiny Llama with float8 weights and one scale for each block of 128 x 128, as fp8 checkpoints are. -> folder"""
    tensors = {}
    for name, value in safetensors.torch.load_file(save(folder) / "model.safetensors").items():
        if "_proj" in name:  # [R, 128]
            blocks = value.split(128)
            scales = torch.stack([block.abs().amax() / 448 for block in blocks])  # [R/128]
            packed = [(block / scale).to(torch.float8_e4m3fn) for block, scale in zip(blocks, scales)]
            tensors |= {name: torch.cat(packed), f"{name}_scale_inv": scales[:, None]}
        else:
            tensors[name] = value
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return edit(folder, quantization_config=FP8)


def check_decoding(target: Target) -> None:
    """Plain decoding, a chain and a tree write what the model's own generate writes."""
    mask = torch.ones(1, len(PROMPT), dtype=torch.long)
    written = target.model.generate(torch.tensor([PROMPT]), attention_mask=mask, do_sample=False, max_new_tokens=12)
    head = Eagle(target, vocab=torch.arange(0, 61, 2)).to(target.dtype)
    for shape in (None, TreeShape(3, 1, 3), TreeShape(3, 3, 7)):
        decoder = Decoder(target, HeadProposer(head, shape) if shape else None, sampling=Sampling(0), stop=set())
        assert decoder.generate([PROMPT], 12).tokens[0] == written[0, len(PROMPT) :].tolist()


# Memory

MEASURE = """
import sys, torch
import accelerate, transformers.models.llama.modeling_llama
from specdec.target import Target

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) * 1024

before = peak()
target = Target.load(sys.argv[1], dtype=sys.argv[2])
print(peak() - before)
"""


@pytest.mark.slow
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


# Quantised targets


@pytest.fixture
def fp8(tmp_path) -> Target:
    if torch.cuda.is_available():
        pytest.skip("with a GPU, transformers keeps float8 weights")
    return Target.load(str(save_fp8(tmp_path / "fp8")), dtype="float32")


def test_an_fp8_checkpoint_decodes_and_says_so_in_its_fingerprint(fp8, tmp_path):
    target = Target.load(str(save(tmp_path / "plain")), dtype="float32")
    weight, wanted = (found.decoder.layers[1].mlp.down_proj.weight for found in (fp8, target))
    assert 0 < (weight - wanted).norm() < 0.05 * wanted.norm()
    assert fp8.quantisation == "fp8" and re.fullmatch("[0-9a-f]{16}-fp8", fp8.fingerprint())
    assert fp8.embeddings_fingerprint() == target.embeddings_fingerprint()
    check_decoding(fp8)


def test_an_mxfp4_checkpoint_of_gpt_oss_decodes(tmp_path):
    """Its experts are stored as blocks of 32 weights of four bits with one exponent; on a CPU they become bfloat16."""
    given = next(family for family in FAMILIES if str(family) == "gpt_oss")
    wide = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    make(Family("gpt_oss", {**given.fields, **wide})).bfloat16().save_pretrained(tmp_path)
    tensors = {}
    for name, value in safetensors.torch.load_file(tmp_path / "model.safetensors").items():
        if name.endswith(("gate_up_proj", "down_proj")):  # [experts, in, out]
            shape = (value.shape[0], value.shape[2], value.shape[1] // 32)
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
            tensors[f"{name}_scales"] = torch.full(shape, 124, dtype=torch.uint8)  # 2**-3
        else:
            tensors[name] = value
    safetensors.torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    edit(tmp_path, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": kept})
    target = Target.load(str(tmp_path))
    assert target.fingerprint().endswith("-mxfp4")
    decoder = Decoder(target, HeadProposer(Eagle(target), TreeShape(2, 2, 4)), sampling=Sampling(0), stop=set())
    assert len(decoder.generate([PROMPT], 8).tokens[0]) == 8


def test_a_head_is_used_with_another_quantisation_of_its_target_with_a_warning(fp8, tmp_path):
    target = Target.load(str(save(tmp_path / "plain")), dtype="float32")
    for trained, used, words in (
        (target, fp8, "unquantised weights .* fp8"),
        (fp8, target, "fp8 weights .* unquantised"),
    ):
        folder = tmp_path / str(trained.quantisation)
        save_eagle(folder, trained)
        with pytest.warns(UserWarning, match=rf"was trained against {words} weights\. Answers stay the target's own"):
            checkpoint.load(folder, used)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint.load(folder, trained)


def test_a_quantised_form_of_another_target_is_refused(fp8, tmp_path):
    save_eagle(tmp_path / "head", fp8)
    other = Target.load(str(save(tmp_path / "other", initializer_range=0.3)), dtype="float32")
    with pytest.raises(ValueError, match="Use it with its own target"):
        checkpoint.load(tmp_path / "head", other)
    document = json.loads((tmp_path / "head" / "drafter.json").read_text())
    del document["target_embeddings"]
    (tmp_path / "head" / "drafter.json").write_text(json.dumps(document))
    same = Target.load(str(save(tmp_path / "plain")), dtype="float32")
    with pytest.raises(ValueError, match=r'add "target_embeddings": "[0-9a-f]{16}" to its drafter\.json'):
        checkpoint.load(tmp_path / "head", same)


def test_heads_that_need_plain_weights_of_a_quantised_target_are_refused(fp8):
    with pytest.raises(
        ValueError, match=r"is quantised \(fp8\), and a head that adapts its target changes the weights"
    ):
        Medusa2(fp8)
    with pytest.raises(ValueError, match=r"is quantised \(fp8\), so its layers cannot be copied: set copy_layers=\[\]"):
        Draft(fp8, copy_layers=[0, 3])
    assert Draft(fp8, num_layers=1).config.to_dict().get("quantization_config") is None


def test_a_quantised_lm_head_is_refused():
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(
        ValueError, match=r"its LM head or its embedding is quantised.* llm_int8_skip_modules=\[\"lm_head\"\]"
    ):
        target_loading.check_complete(model, {"missing_keys": set()}, "tiny")


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (
            ImportError("Using `bitsandbytes` requires bitsandbytes: `pip install bitsandbytes`"),
            "`pip install bitsandbytes`",
        ),
        (ModuleNotFoundError("No module named 'torchao'", name="torchao"), "pip install torchao"),
        (RuntimeError("No GPU found."), "Use another machine"),
    ],
)
def test_a_quantiser_that_is_not_installed_is_named(tmp_path, monkeypatch, error, advice):
    folder = edit(save(tmp_path), quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ValueError, match=rf"is quantised \(bitsandbytes-4bit\) and cannot be loaded here: .*{advice}"):
        Target.load(str(folder), dtype="float32")


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "bitsandbytes-8bit"),
        ({"quant_method": "gptq", "bits": 4}, "gptq-4bit"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        (None, None),
    ],
)
def test_the_quantisation_is_read_from_the_configuration(fields, label):
    config = LlamaConfig(**SIZES, **({"quantization_config": fields} if fields else {}))
    assert quantisation_of(config) == label


@pytest.mark.slow
def test_bitsandbytes_on_the_real_target(tmp_path):
    pytest.importorskip("bitsandbytes")
    how = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_compute_dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(
        REAL_TARGET, dtype=torch.float32, device_map="cpu", quantization_config=how
    )
    model.save_pretrained(tmp_path)
    target = Target.load(str(tmp_path), dtype="float32")
    assert target.fingerprint().endswith("-bitsandbytes-4bit") and target.dtype == torch.float32
    tokens = torch.tensor([PROMPT])
    wanted, logits = target.model(tokens).logits, target.logits(target.read(tokens, ()).final)
    assert (logits - wanted).norm() < 0.1 * wanted.norm()  # on some CPUs these layers compute in bfloat16
    assert len(Decoder(target, None, sampling=Sampling(0), stop=set()).generate([PROMPT], 8).tokens[0]) == 8


# Fingerprints


def test_the_fingerprint_of_an_unquantised_target_stays_what_checkpoints_hold():
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                    num_key_value_heads=2)
    )  # fmt: skip
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_((torch.arange(parameter.numel()) % 97 - 48 + number).view(parameter.shape) / 64)
    assert fingerprint(model, model.config, None) == "b627ab7eb7640233"


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
    command = (
        f"from specdec.target import Target; Target.load({str(tmp_path)!r})"  # the family's code is not imported yet
    )
    done = subprocess.run([sys.executable, "-c", command], env=child_environment(), capture_output=True, text=True)
    assert "of a kind that is not known here (heavily_compressed_attention)" in done.stderr.splitlines()[-1]


def test_a_quantiser_that_transformers_does_not_know_is_refused(tmp_path):
    folder = edit(save(tmp_path), quantization_config={"quant_method": "newer"})
    with pytest.raises(ValueError, match=r"quantised by a method that transformers .* does not know \(newer\)"):
        Target.load(str(folder), dtype="float32")


def test_missing_tensors_are_refused(tmp_path):
    path = save(tmp_path) / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    del tensors["model.layers.2.mlp.up_proj.weight"]
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lacks 1 of its tensors \(model\.layers\.2\.mlp\.up_proj\.weight\)"):
        Target.load(str(tmp_path), dtype="float32")
