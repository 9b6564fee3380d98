"""Quantised checkpoints: loaded, told apart by their fingerprints, or refused."""

import dataclasses
import json
import os
import re
import shutil
import threading
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3_5MoeConfig,
)

from scripts import answer
from specdec import checkpoint
from specdec.core.dequantise import Form
from specdec.core.resumable import read_rows
from specdec.core.shards import Shards
from specdec.heads.draft import Draft
from specdec.heads.medusa import Medusa2
from specdec.target import loading as target_loading
from specdec.target import quantised
from specdec.target.model import Target
from tests.support.drafters import save_eagle
from tests.support.families import configuration, find_family, make
from tests.support.quantised import CONFIGS, quantise
from tests.support.saved_targets import SHAPES, SIZES, check_decoding, edit, edit_tensors, save

LABELS = {"w8a8": "compressed-tensors-8bit", "w4a16": "compressed-tensors-4bit", "fp8": "compressed-tensors-fp8",
          "nvfp4": "compressed-tensors-fp4", "fp8_blocks": "fp8", "fp8_even_blocks": "fp8", "mxfp4": "mxfp4",
          "modelopt_fp8": "modelopt-fp8",
          "modelopt_nvfp4": "modelopt-nvfp4", "modelopt_awq": "modelopt-nvfp4_awq",
          "modelopt_mixed": "modelopt-mixed_precision", "gptq": "gptq-4bit", "awq": "awq-4bit"}  # fmt: skip
LINEAR_METHODS = [method for method in CONFIGS if method != "mxfp4"]
READ_HERE = [method for method in LINEAR_METHODS if method not in ("gptq", "awq")]
EXPERT_SIZES = {"hidden_size": 32, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
DOWN = "model.layers.0.mlp.down_proj.weight"
VISION = {"hidden_size": 64, "intermediate_size": 32, "depth": 1, "num_heads": 4, "patch_size": 8,
          "out_hidden_size": 32}  # fmt: skip
LOADERS = [Target.load, Target.load_ends]


@pytest.fixture
def plain(tmp_path) -> Target:
    return Target.load(str(save(tmp_path / "plain")), dtype="float32")


@pytest.fixture
def fp8(tmp_path) -> Target:
    if torch.cuda.is_available():
        pytest.skip("with a GPU, transformers keeps float8 weights")
    folder = quantise(save(tmp_path / "fp8_source"), tmp_path / "fp8", "fp8_blocks")
    return Target.load(str(folder), dtype="float32")


def check_near(target: Target, plain: Target, limit: float) -> None:
    """A weight of a quantised target is near that of the plain one, and decoding with it is exact."""
    weight, reference = (loaded.decoder.layers[1].mlp.down_proj.weight for loaded in (target, plain))
    assert 0 < (weight - reference).norm() < limit * reference.norm()
    assert target.embeddings_fingerprint() == plain.embeddings_fingerprint()
    check_decoding(target)


def test_an_fp8_checkpoint_decodes_and_says_so_in_its_fingerprint(fp8, plain):
    assert fp8.quantisation == "fp8" and re.fullmatch(r"v2\.[0-9a-f]{16}-fp8", fp8.fingerprint())
    check_near(fp8, plain, 0.05)


@pytest.mark.parametrize("method", LINEAR_METHODS)
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


# Weights that are dequantised here


def save_family(folder: Path, name: str) -> Path:
    """A tiny target of a family, of sizes that groups divide; qwen3_5_moe: with a vision model -> folder"""
    family = find_family("qwen3_5_moe_text" if name == "qwen3_5_moe" else name)
    fields = family.fields | {"eos_token_id": None} | (EXPERT_SIZES if "moe" in name else {"intermediate_size": 64})
    family = dataclasses.replace(family, fields=fields)
    if name != "qwen3_5_moe":
        make(family).save_pretrained(folder)
        return folder
    torch.manual_seed(0)
    text = configuration(family).to_dict()
    config = Qwen3_5MoeConfig(text_config=text, vision_config=VISION, tie_word_embeddings=False)
    AutoModelForImageTextToText.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@torch.no_grad()
def compute_logits(target: Target) -> torch.Tensor:
    """Logits of a text, computed with weights that begin at whole cache lines: the sums of a product depend on that."""
    for parameter in target.model.parameters():
        parameter.data = parameter.data.clone()
    return target.model(torch.arange(1, 30)[None]).logits


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llama", method) for method in READ_HERE),
        ("qwen3_5_moe", "modelopt_mixed"),
        *(("qwen3_5_moe_text", method) for method in ("nvfp4", "fp8_blocks")),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_logits_are_those_of_the_plain_model_with_the_rounded_weights(tmp_path, family, method):
    source = save(tmp_path / "source") if family == "llama" else save_family(tmp_path / "source", family)
    folder = quantise(source, tmp_path / "made", method, plain=tmp_path / "plain")
    target, plain = (Target.load(str(path), dtype="float32") for path in (folder, tmp_path / "plain"))
    logits = compute_logits(target)
    assert torch.equal(logits, compute_logits(plain))
    assert not torch.equal(logits, compute_logits(Target.load(str(source), dtype="float32")))
    assert target.quantisation == LABELS[method] and plain.quantisation is None
    assert re.fullmatch(rf"v2\.[0-9a-f]{{16}}-{LABELS[method]}", target.fingerprint())
    assert target.fingerprint() == Target.load_ends(str(folder), dtype="float32").fingerprint()
    check_decoding(target, shapes=SHAPES[:2] if target.recurrent else SHAPES)


def test_transformers_agrees_where_it_reads_a_form_rightly(tmp_path):
    """FP8 in blocks that divide the matrix, and MXFP4. Its blocks with edges are refused or of another size."""
    if torch.cuda.is_available():
        pytest.skip("with a GPU, transformers keeps these weights")
    for name, method in (("llama", "fp8_even_blocks"), ("gpt_oss", "mxfp4")):
        source = save(tmp_path / name) if name == "llama" else save_family(tmp_path / name, name)
        folder = quantise(source, tmp_path / method, method)
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ours = Target.load(str(folder), dtype="float32").model
        for key, value in theirs.state_dict().items():
            assert torch.equal(value, ours.state_dict()[key]), key


def test_weights_are_dequantised_one_after_the_other(tmp_path, monkeypatch):
    """A weight in float32 takes more memory than in the file and in the model, and transformers reads ahead."""
    threads, compute = [], Form.compute

    def record(form: Form) -> torch.Tensor:
        threads.append(threading.current_thread())
        return compute(form)

    monkeypatch.setattr(Form, "compute", record)
    monkeypatch.setenv(quantised.IN_ORDER, "0")
    target = Target.load(str(quantise(save(tmp_path / "source"), tmp_path / "made", "modelopt_nvfp4")))
    assert len(threads) == len(target.model.state_dict()) and set(threads) == {threading.main_thread()}
    assert os.environ[quantised.IN_ORDER] == "0"


def test_modelopt_is_known_by_its_own_file_and_keeps_its_scales(tmp_path):
    """Its weights have the shapes of the model, so transformers reads them without their scales, after a warning."""
    source = save(tmp_path / "source")
    first = quantise(source, tmp_path / "config", "modelopt_fp8", plain=tmp_path / "plain")
    second = Path(shutil.copytree(first, tmp_path / "own"))
    algorithm = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    shutil.copy(source / "config.json", second / "config.json")
    modelopt_file = second / "hf_quant_config.json"
    modelopt_file.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": algorithm}))
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").state_dict()
    for folder in (first, second):
        target = Target.load(str(folder), dtype="float32")
        assert all(torch.equal(value, expected[key]) for key, value in target.model.state_dict().items())
        weight = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()[DOWN]
        assert weight.norm() > 10 * expected[DOWN].norm()  # the reason why it is not asked
    assert target.fingerprint() == Target.load_ends(str(first)).fingerprint()
    assert target.fingerprint().endswith("-modelopt-fp8")
    modelopt_file.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    with pytest.raises(ValueError, match="has quantised weights"):  # keys and values only
        Target.load(str(second))
    modelopt_file.write_text("[")
    with pytest.raises(ValueError, match=r"hf_quant_config.json is not valid JSON"):
        Target.load(str(second))


@pytest.mark.parametrize("method", ["modelopt_nvfp4", "fp8_blocks"])
def test_a_quantised_head_becomes_a_plain_matrix(tmp_path, method):
    names = r".*(_proj|lm_head|embed_tokens)\.weight"
    folder = quantise(save(tmp_path / "source"), tmp_path / "made", method, names=names, plain=tmp_path / "plain")
    plain = Target.load(str(tmp_path / "plain"), dtype="float32")
    for load in LOADERS:
        target = load(str(folder), dtype="float32")
        assert torch.equal(target.lm_head.weight, plain.lm_head.weight)
        assert torch.equal(target.embed.weight, plain.embed.weight)
    assert torch.equal(Target.load_ends(str(folder), dtype="float32").layer_state(1)["mlp.down_proj.weight"],
                       plain.layer_state(1)["mlp.down_proj.weight"])  # fmt: skip


def test_answers_and_training_name_the_method(folder, fit, run, tmp_path):
    target_folder = quantise(folder / "target", tmp_path / "made", "modelopt_nvfp4")
    arguments = [
        f"target.name={target_folder}",
        f"prompts={folder}/prompts.jsonl",
        "target.device=cpu",
        "target.dtype=float32",
    ]
    run(answer, *arguments, f"out={tmp_path}/rows.jsonl", "max_new_tokens=8", "decode.temperature=0", "limit=4")
    fingerprint = Target.load_ends(str(target_folder)).fingerprint()
    assert fingerprint.endswith("-modelopt-nvfp4")
    assert {row["target_fingerprint"] for row in read_rows(tmp_path / "rows.jsonl")} == {fingerprint}
    fit(
        "run",
        f"target.name={target_folder}",
        f"data.train={tmp_path}/rows.jsonl",
        "train.steps=2",
        "train.validate_every=2",
    )
    record = json.loads((tmp_path / "checkpoints/run/step_000002/drafter.json").read_text())
    assert record["target_fingerprint"] == fingerprint


@pytest.mark.parametrize(
    ("method", "fields", "sentence"),
    [
        ("modelopt_nvfp4", {"quant_algo": "W4A8_AWQ"}, r"is quantised by modelopt with quant_algo=W4A8_AWQ, which is"),
        (
            "modelopt_mixed",
            {"quantized_layers": {"a": {"quant_algo": "NVFP4_SVD"}}},
            "with quant_algo=NVFP4_SVD, which",
        ),
        ("w4a16", {"format": "marlin-24"}, "by compressed-tensors with format=marlin-24, which is not read here: let"),
        ("w4a16", {"transform_config": {"config_groups": {"a": 1}}}, r"with rotations \(transform_config\), which are"),
        ("w4a16", {"quant_method": "new"}, r"transformers [\d.]+ does not know \(new\): let an engine read it"),
    ],
)
def test_what_is_not_read_is_named_with_a_remedy(tmp_path, method, fields, sentence):
    folder = quantise(save(tmp_path / "source"), tmp_path / "made", method)
    edit(folder, quantization_config=CONFIGS[method] | fields)
    with pytest.raises(ValueError, match=sentence) as error:
        Target.load(str(folder))
    config = target_loading.load_config(str(folder))
    told = quantised.describe_reading(config, Shards(str(folder)))
    assert told.removeprefix("The target ") == str(error.value).removeprefix(f"{folder} ")


@pytest.mark.parametrize(
    ("method", "change", "sentence"),
    [
        ("modelopt_fp8", {f"{DOWN}_scale": None}, rf"its tensor {DOWN} is quantised \(F8_E4M3\) and has no scale"),
        ("modelopt_nvfp4", {f"{DOWN}_scale_2": None}, rf"{DOWN} needs one of weight_scale_2"),
        ("nvfp4", {f"{DOWN}_scale": torch.ones(3, 3)}, rf"{DOWN}_packed is of a form that is not read here \(U8\)"),
        ("fp8_blocks", {f"{DOWN}_scale_inv": torch.ones(3, 5)}, rf"{DOWN}_scale_inv has the shape \[3, 5\]"),
        ("modelopt_fp8", {"model.norm.weight_scale": torch.ones(1)}, r"takes its tensor model\.norm\.weight_scale"),
        ("w4a16", {f"{DOWN}_packed": None}, rf"no quantised weight takes its tensor {DOWN}_scale"),
        ("modelopt_fp8", {DOWN: None, f"{DOWN}_scale": None}, rf"lacks 1 of its tensors \({DOWN}\)"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_named(tmp_path, method, change, sentence):
    folder = quantise(save(tmp_path / "source"), tmp_path / "made", method)

    def replace(tensors) -> None:
        tensors |= change
        for key in [key for key, value in change.items() if value is None]:
            del tensors[key]

    edit_tensors(folder, replace)
    with pytest.raises(ValueError, match=sentence):
        Target.load(str(folder))


def test_a_truncated_file_is_named(tmp_path):
    folder = quantise(save(tmp_path / "source"), tmp_path / "made", "modelopt_nvfp4")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged .*take another copy"):
        Target.load(str(folder))


def test_an_adapter_beside_quantised_weights_is_refused(tmp_path):
    folder = quantise(save(tmp_path / "source"), tmp_path / "made", "modelopt_nvfp4")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has an adapter beside its weights \(adapter_config.json\)"):
        Target.load(str(folder))


@pytest.mark.parametrize(
    ("method", "sentence"),
    [
        (
            "modelopt_mixed",
            r"\(modelopt-mixed_precision\) \(16 fp8, 12 nvfp4, 11 plain\); they become plain ones while",
        ),
        ("fp8_blocks", r"\(fp8\) \(28 fp8, 11 plain\); .*; CUDA devices from 8\.9 on compute with them"),
        ("gptq", r"\(gptq-4bit\); transformers reads them with the packages of that method"),
        (None, "Weights are not quantised."),
    ],
)
def test_the_reading_is_described(tmp_path, method, sentence):
    folder = save(tmp_path / "source")
    folder = quantise(folder, tmp_path / "made", method) if method else folder
    told = quantised.describe_reading(target_loading.load_config(str(folder)), Shards(str(folder)))
    assert re.search(sentence, told)


# Scales that nothing tells of


@pytest.mark.parametrize("load", LOADERS)
@pytest.mark.parametrize("method", LINEAR_METHODS)
def test_packed_weights_of_which_nothing_tells_are_refused(tmp_path, load, method):
    folder = quantise(save(tmp_path / "plain"), tmp_path / "made", method)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    sentence = r"has quantised weights \(model\.layers\.\d\..*\), and its config.json does not say how .*: take a copy"
    with pytest.raises(ValueError, match=sentence):
        load(str(folder), dtype="float32")


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
    ],
)
def test_a_quantiser_that_is_not_installed_is_named(tmp_path, monkeypatch, fields, label):
    folder = edit(save(tmp_path), quantization_config=fields)

    def fail(*args, **kwargs):
        raise ImportError("Using it requires this: `pip install this`")

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(ValueError, match=rf"is quantised \({label}\) and cannot be loaded here .*`pip install this`"):
        Target.load(str(folder), dtype="float32")
