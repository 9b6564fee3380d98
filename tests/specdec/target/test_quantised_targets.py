"""Quantised checkpoints: loaded, told apart by their fingerprints, or refused."""

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec import checkpoint
from specdec.heads.draft import Draft
from specdec.heads.medusa import Medusa2
from specdec.target import loading as target_loading
from specdec.target.model import Target
from tests.support.drafters import save_eagle
from tests.support.quantised import CONFIGS, quantise
from tests.support.saved_targets import SIZES, check_decoding, edit, edit_tensors, save

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
LABELS = {"w8a8": "compressed-tensors-8bit", "w4a16": "compressed-tensors-4bit", "fp8": "compressed-tensors-fp8",
          "gptq": "gptq-4bit", "awq": "awq-4bit"}  # fmt: skip
ENGINE_ONLY = r"does not know \({}\): let an engine read it \(features.mode=engine\)"
LOADERS = [Target.load, Target.load_ends]


def quantise_blocks(tensors) -> None:
    """Float8 weights with one scale for each block of 128 x 128, as fp8 checkpoints are."""
    for name in [name for name in tensors if "_proj" in name]:
        blocks = tensors[name].split(128)  # of [R, 128]
        scales = torch.stack([block.abs().amax() / 448 for block in blocks])  # [R / 128]
        packed = [(block / scale).to(torch.float8_e4m3fn) for block, scale in zip(blocks, scales)]
        tensors |= {name: torch.cat(packed), f"{name}_scale_inv": scales[:, None]}


def quantise_tensors(tensors) -> None:
    """ModelOpt's FP8: float8 weights with one scale each."""
    for name in [name for name in tensors if "_proj" in name]:
        scale = tensors[name].abs().amax() / 448
        tensors |= {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
        tensors[name.replace("weight", "input_scale")] = torch.tensor(1.0)


@pytest.fixture
def plain(tmp_path) -> Target:
    return Target.load(str(save(tmp_path / "plain")), dtype="float32")


@pytest.fixture
def fp8(tmp_path) -> Target:
    if torch.cuda.is_available():
        pytest.skip("with a GPU, transformers keeps float8 weights")
    folder = edit_tensors(save(tmp_path / "fp8"), quantise_blocks)
    return Target.load(str(edit(folder, quantization_config=FP8)), dtype="float32")


def check_near(target: Target, plain: Target, limit: float) -> None:
    """A weight of a quantised target is near that of the plain one, and decoding with it is exact."""
    weight, reference = (loaded.decoder.layers[1].mlp.down_proj.weight for loaded in (target, plain))
    assert 0 < (weight - reference).norm() < limit * reference.norm()
    assert target.embeddings_fingerprint() == plain.embeddings_fingerprint()
    check_decoding(target)


def test_an_fp8_checkpoint_decodes_and_says_so_in_its_fingerprint(fp8, plain):
    assert fp8.quantisation == "fp8" and re.fullmatch(r"v2\.[0-9a-f]{16}-fp8", fp8.fingerprint())
    check_near(fp8, plain, 0.05)


@pytest.mark.parametrize("method", CONFIGS)
def test_the_fingerprint_covers_quantised_tensors(tmp_path, plain, method):
    folders = [
        quantise(tmp_path / "plain", tmp_path / f"{factor}", method, scale_factor=factor) for factor in (1.0, 1.01)
    ]
    first, second = (Target.load_ends(str(folder), dtype="float32") for folder in folders)
    assert first.fingerprint() != second.fingerprint()
    for ends in (first, second):
        assert re.fullmatch(rf"v2\.[0-9a-f]{{16}}-{LABELS[method]}", ends.fingerprint())
        assert ends.embeddings_fingerprint() == plain.embeddings_fingerprint()
    save_eagle(tmp_path / "head", first)
    sentence = rf"was trained against {LABELS[method]} weights of .*, and the target here has others of that kind \("
    texts = f"{re.escape(second.fingerprint())}, not {re.escape(first.fingerprint())}"
    with pytest.warns(UserWarning, match=rf"{sentence}{texts}\)\. Answers stay"):
        checkpoint.load(tmp_path / "head", second)
    try:
        whole = Target.load(str(folders[0]), dtype="float32")
    except ValueError as error:
        assert re.search(r"is quantised \(.*\) and cannot be loaded here .*pip install", str(error))
        pytest.skip(str(error))
    assert whole.fingerprint() == first.fingerprint()
    check_near(whole, plain, 0.2)


@pytest.mark.parametrize(
    ("bits", "fields"),
    [(4, {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}), (8, {"load_in_8bit": True})],
)
def test_bitsandbytes_computes_the_same_after_its_fingerprint(tmp_path, bits, fields):
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig

    folder, quantised = save(tmp_path / "plain"), tmp_path / "made"
    settings = BitsAndBytesConfig(**fields)
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=settings, dtype=torch.bfloat16)
    model.save_pretrained(quantised)
    target = Target.load(str(quantised), dtype="bfloat16")
    assert re.fullmatch(rf"v2\.[0-9a-f]{{16}}-bitsandbytes-{bits}bit", target.fingerprint())
    assert target.fingerprint() == Target.load_ends(str(quantised)).fingerprint()
    tokens = torch.arange(1, 33)[None]
    other = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.bfloat16)
    with torch.no_grad():
        logits, expected = target.logits(target.read(tokens, ()).final).float(), other(tokens).logits.float()
    assert (logits - expected).norm() < 0.05 * expected.norm()


def test_an_mtp_module_beside_a_quantised_target_may_be_tuned(tmp_path):
    folder, texts = quantise(save(tmp_path / "plain"), tmp_path / "made", "w4a16"), set()
    for name in (None, "mtp.fc.weight", "model.layers.4.eh_proj.weight"):
        edit_tensors(folder, lambda tensors, name=name: name and tensors.update({name: torch.ones(2)}))
        texts.add(Target.load_ends(str(folder)).fingerprint())
    assert len(texts) == 1


# Scales that nothing tells of


def save_modelopt(folder: Path) -> Path:
    """The tiny Llama in ModelOpt's FP8. Nothing says so yet. -> folder"""
    return edit_tensors(save(folder), quantise_tensors)


def test_modelopt_is_known_by_its_own_file(tmp_path):
    """Its weights have the shapes of the model, so transformers would read them without their scales."""
    algorithm = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    folders = [save_modelopt(tmp_path / name) for name in ("own", "config")]
    modelopt_file = folders[0] / "hf_quant_config.json"
    modelopt_file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": algorithm}))
    edit(folders[1], quantization_config={"quant_method": "modelopt", "quant_algo": "FP8"})
    for folder in folders:
        with pytest.raises(ValueError, match=ENGINE_ONLY.format("modelopt-fp8")):
            Target.load(str(folder), dtype="float32")
    first, second = (Target.load_ends(str(folder)).fingerprint() for folder in folders)
    assert first == second and first.endswith("-modelopt-fp8")
    plain = save(tmp_path / "plain")
    shutil.copy(modelopt_file, plain)
    with pytest.raises(ValueError, match="modelopt-fp8"):
        Target.load(str(plain))
    copied = plain / modelopt_file.name
    copied.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert Target.load(str(plain)).quantisation is None  # keys and values only
    copied.write_text("[")
    with pytest.raises(ValueError, match=r"hf_quant_config.json is not valid JSON"):
        Target.load(str(plain))


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("method", ["modelopt", *CONFIGS])
def test_packed_weights_of_which_nothing_tells_are_refused(tmp_path, load, method):
    if method == "modelopt":
        folder = save_modelopt(tmp_path)
    else:
        folder = quantise(save(tmp_path / "plain"), tmp_path / "made", method)
        config = json.loads((folder / "config.json").read_text())
        del config["quantization_config"]
        (folder / "config.json").write_text(json.dumps(config))
    sentence = r"has quantised weights \(model\.layers\.\d\..*\), and its config.json does not say how .*: take a copy"
    with pytest.raises(ValueError, match=sentence):
        load(str(folder), dtype="float32")


def test_scales_that_a_method_does_not_read_are_refused(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("with a GPU, transformers keeps float8 weights")
    folder = edit(save_modelopt(tmp_path), quantization_config=FP8)  # whose scales have another name
    sentence = r"leaves out 28 of the scales of .* \(model\.layers\.0\.mlp\.down_proj\.weight_scale\), so its weights"
    with pytest.raises(ValueError, match=sentence):
        Target.load(str(folder), dtype="float32")


@pytest.mark.parametrize(
    ("key", "refused"),
    [
        ("model.layers.1.mlp.up_proj.weight_scale_2", True),
        ("model.layers.1.mlp.up_proj.weight_scale_inv", True),
        ("model.layers.1.mlp.experts.gate_up_proj_scales", True),
        ("model.layers.1.mlp.up_proj.pre_quant_scale", True),
        ("model.layers.1.mlp.up_proj.input_scale", False),  # of what a layer reads, which may stay as it is
        ("model.layers.1.self_attn.k_scale", False),
        ("mtp.layers.0.mlp.up_proj.weight_scale_inv", False),
        ("model.layers.4.mlp.up_proj.weight_scale", False),  # of an MTP module
        ("model.layers.1.layer_scale", False),
    ],
)
def test_what_scales_weights_is_told_from_what_does_not(tmp_path, key, refused):
    folder = edit_tensors(save(tmp_path), lambda tensors: tensors.update({key: torch.ones(1)}))
    model, report = LlamaForCausalLM(LlamaConfig(**SIZES)), {"missing_keys": set(), "unexpected_keys": {key}}
    if not refused:
        assert all(load(str(folder)).quantisation is None for load in LOADERS)
        target_loading.check_complete(model, report, "tiny")
        return
    for load in LOADERS:
        with pytest.raises(ValueError, match=f"has quantised weights .{key}"):
            load(str(folder))
    with pytest.raises(ValueError, match="leaves out 1 of the scales"):
        target_loading.check_complete(model, report, "tiny")


def test_an_adapter_beside_the_weights_is_refused(tmp_path):
    """transformers adds it where peft is installed, and engines and targets without their layers do not."""
    peft = pytest.importorskip("peft")
    model = AutoModelForCausalLM.from_pretrained(save(tmp_path))
    peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])).save_pretrained(tmp_path)
    sentence = r"has an adapter beside its weights \(adapter_config.json\).*merge it into them"
    with pytest.raises(ValueError, match=sentence):
        Target.load(str(tmp_path), dtype="float32")


def test_a_head_is_used_with_another_quantisation_of_its_target_with_a_warning(fp8, plain, tmp_path):
    for trained, used, words in (
        (plain, fp8, "unquantised weights .* fp8"),
        (fp8, plain, "fp8 weights .* unquantised"),
    ):
        folder = tmp_path / str(trained.quantisation)
        save_eagle(folder, trained)
        with pytest.warns(UserWarning, match=rf"was trained against {words} weights\. Answers stay the target's own"):
            checkpoint.load(folder, used)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            checkpoint.load(folder, trained)
    other = Target.load(str(save(tmp_path / "other", initializer_range=0.3)), dtype="float32")
    with pytest.raises(ValueError, match="Use it with its own target"):
        checkpoint.load(tmp_path / "fp8", other)


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
    sentence = r"its LM head or its embedding is quantised.* llm_int8_skip_modules=\[\"lm_head\"\]"
    with pytest.raises(ValueError, match=sentence):
        target_loading.check_complete(model, {"missing_keys": set(), "unexpected_keys": set()}, "tiny")


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, "bitsandbytes-8bit"),
        ({"quant_method": "gptq", "bits": 4}, "gptq-4bit"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
    ],
)
def test_a_quantiser_that_is_not_installed_is_named(tmp_path, monkeypatch, fields, label):
    folder = edit(save(tmp_path), quantization_config=fields)

    def fail(*args, **kwargs):
        raise ImportError("Using it requires this: `pip install this`")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ValueError, match=rf"is quantised \({label}\) and cannot be loaded here .*`pip install this`"):
        Target.load(str(folder), dtype="float32")
