"""The fingerprint covers what changes a target's output, and nothing else: however it is stored and loaded."""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec.target import fingerprint as target_fingerprint
from specdec.target.adapter import add_adapter
from specdec.target.fingerprint import COUNTED_FIELDS, WeightSource, describe_config
from specdec.target.model import Target
from tests.support.families import find_family, make
from tests.support.native import save_native
from tests.support.saved_targets import IMAGES, SIZES, edit, edit_tensors, save

UP_PROJ, EMBEDDING = "model.layers.{}.mlp.up_proj.weight", "model.embed_tokens.weight"


def find_fingerprint(folder: Path) -> str:
    """The fingerprint of a saved target, equal for all ways to load it, in any dtype."""
    whole, half = (Target.load(str(folder), dtype=dtype) for dtype in ("float32", "bfloat16"))
    (text,) = {whole.fingerprint(), half.fingerprint(), Target.load_ends(str(folder), dtype="float32").fingerprint()}
    return text


def make_fingerprint(model) -> target_fingerprint.Fingerprint:
    return WeightSource(model, {}, None, None).make_fingerprint()


# Files and their configuration


def add_to(name: str, *index):
    """A change of some values of a tensor."""
    return lambda folder: edit_tensors(folder, lambda tensors: tensors[name][index].add_(0.5))


def swap_layers(folder: Path) -> None:
    first, second = UP_PROJ.format(0), UP_PROJ.format(3)
    edit_tensors(folder, lambda tensors: tensors.update({first: tensors[second], second: tensors[first]}))


def rename_as_bare_model(folder: Path) -> None:
    """Names without their beginning, with a table of angles and a layer that was pruned."""
    unused = {"layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16), "layers.7.mlp.up_proj.weight": torch.ones(1)}

    def rename(tensors) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)
        tensors |= unused

    edit_tensors(folder, rename)


def set_fields(**fields):
    return lambda folder: edit(folder, **fields)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CHANGES = [  # of the output, and so of the fingerprint
    set_fields(rope_parameters=YARN),
    set_fields(rope_parameters={"rope_type": "default", "rope_theta": 500.0}),
    set_fields(rms_norm_eps=0.01),
    set_fields(hidden_act="gelu"),
    set_fields(max_position_embeddings=512),
    add_to(EMBEDDING, slice(30, 31), 5),
    add_to("model.layers.2.self_attn.k_proj.weight", slice(13, 14), 5),
    add_to("model.layers.1.post_attention_layernorm.weight", slice(100, 101)),
    add_to("model.norm.weight", slice(3, 4)),
    add_to("lm_head.weight", slice(60, 61), 5),
    swap_layers,
]
IDLE = [
    set_fields(architectures=["AnotherName"]),
    set_fields(transformers_version="9.9.9", _name_or_path="elsewhere"),
    set_fields(dtype="bfloat16"),
    set_fields(bos_token_id=5, eos_token_id=[1, 2], pad_token_id=3),
    set_fields(use_cache=False, output_hidden_states=True, attention_dropout=0.5),
    set_fields(initializer_range=0.3),
    set_fields(num_nextn_predict_layers=1),
    rename_as_bare_model,
]


@pytest.mark.parametrize("change", [*CHANGES, *IDLE])
def test_what_changes_the_output_changes_it(tmp_path, change):
    before = find_fingerprint(save(tmp_path))
    change(tmp_path)
    assert (find_fingerprint(tmp_path) != before) == (change in CHANGES)


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("mistral-window", "sliding_window", 7),
        ("gemma2", "final_logit_softcapping", 7.0),
        ("gemma2", "attn_logit_softcapping", None),
        ("gemma3_text", "layer_types", ["full_attention"] * 4),
        ("gemma3_text", "query_pre_attn_scalar", 16),
        ("cohere2", "logit_scale", 0.75),
        ("granitemoe", "residual_multiplier", 0.5),
        ("qwen3_moe", "norm_topk_prob", True),
        ("opt", "_remove_final_layer_norm", True),
        ("glm4_moe", "routed_scaling_factor", 2.5),
    ],
)
def test_fields_of_a_family_count(family, field, value):
    config = make(find_family(family)).config
    before = describe_config(config)
    assert getattr(config, field) != value
    setattr(config, field, value)
    assert describe_config(config) != before


def test_only_what_differs_from_the_defaults_of_its_class_counts():
    """So that a newer transformers with one more field gives the same fingerprint."""

    class Newer(LlamaConfig):
        model_type = "llama"

        def __init__(self, newer=7, **fields):
            super().__init__(**fields)
            self.newer = newer

    assert describe_config(Newer(**SIZES)) == describe_config(LlamaConfig(**SIZES))
    assert describe_config(Newer(newer=8, **SIZES)) != describe_config(LlamaConfig(**SIZES))
    ropes = [{"rope_type": "default", "rope_theta": value} for value in (500, 500.0)]
    first, second = (describe_config(LlamaConfig(rope_parameters=rope, **SIZES)) for rope in ropes)
    assert first == second and first["rope_parameters"]["rope_theta"] == 500
    assert describe_config(LlamaConfig()).keys() == set(COUNTED_FIELDS)


def test_what_only_images_need_does_not_count(tmp_path):
    text = {**SIZES, "model_type": "mistral", "sliding_window": None}
    config = transformers.Mistral3Config(text_config=text, vision_config={"model_type": "pixtral", **IMAGES})
    transformers.Mistral3ForConditionalGeneration(config).save_pretrained(tmp_path)
    before = find_fingerprint(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path, image_token_index=11, vision_config={**document["vision_config"], "attention_dropout": 0.2})
    assert find_fingerprint(tmp_path) == before
    edit(tmp_path, text_config={**document["text_config"], "rms_norm_eps": 0.01})
    assert find_fingerprint(tmp_path) != before


# The weights


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "lfm2"])
def test_the_model_in_memory_its_files_and_a_loaded_model_have_the_same(tmp_path, family):
    """In one file or several, in float32 or bfloat16, with experts one by one in the files and together in memory."""
    model = make(find_family(family))
    texts = {make_fingerprint(model).text}
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        folder = tmp_path / str(number)
        model.to(dtype).save_pretrained(folder, max_shard_size="20KB" if number else "1GB")
        texts.add(find_fingerprint(folder))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "0")
    assert texts == {make_fingerprint(loaded).text}
    with torch.no_grad():
        loaded.get_input_embeddings().weight[3] += 0.5
    assert make_fingerprint(loaded).text not in texts


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_text", "qwen2"])
def test_mtp_modules_do_not_count(tmp_path, name):
    save_native(tmp_path, name)
    before = find_fingerprint(tmp_path)

    def list_modules(tensors) -> list[str]:
        modules = [key for key in tensors if "mtp" in key or ".layers.4." in key]
        assert len(modules) > 10
        return modules

    edit_tensors(tmp_path, lambda tensors: [tensors[key].add_(1) for key in list_modules(tensors)])
    assert find_fingerprint(tmp_path) == before
    edit_tensors(tmp_path, lambda tensors: [tensors.pop(key) for key in list_modules(tensors)])
    assert find_fingerprint(tmp_path) == before


# Tied or not: as transformers decides it


def load_with_equal_heads(folder: Path) -> Target:
    """The target with its layers, whose embedding and LM head are those without them."""
    whole, ends = (load(str(folder), dtype="float32") for load in (Target.load, Target.load_ends))
    assert torch.equal(whole.lm_head.weight, ends.lm_head.weight) and torch.equal(whole.embed.weight, ends.embed.weight)
    assert (whole.lm_head.weight is whole.embed.weight) == (ends.lm_head.weight is ends.embed.weight)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert torch.equal(whole.lm_head.weight, model.lm_head.weight)
    return whole


def test_a_second_copy_of_a_tied_matrix_does_not_count_and_a_head_of_its_own_does(tmp_path):
    before = find_fingerprint(save(tmp_path, tie_word_embeddings=True))
    edit_tensors(tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors[EMBEDDING].clone()}))
    assert load_with_equal_heads(tmp_path).lm_head.weight.shape == (61, 128) and find_fingerprint(tmp_path) == before
    edit_tensors(tmp_path, lambda tensors: tensors.pop(EMBEDDING))  # it may have the other's name
    load_with_equal_heads(tmp_path)
    assert find_fingerprint(tmp_path) == before
    edit_tensors(tmp_path, lambda tensors: tensors.update({EMBEDDING: tensors["lm_head.weight"] + 0.5}))
    whole = load_with_equal_heads(tmp_path)
    assert whole.lm_head.weight is not whole.embed.weight and find_fingerprint(tmp_path) != before
    assert find_fingerprint(edit(tmp_path, tie_word_embeddings=False)) == whole.fingerprint()  # the weights say it


def test_it_is_made_when_it_is_asked_for_and_before_the_weights_change(monkeypatch, tmp_path):
    calls: list[str] = []
    digest = target_fingerprint.digest_tensors
    monkeypatch.setattr(
        target_fingerprint, "digest_tensors", lambda *arguments: calls.append("x") or digest(*arguments)
    )
    target = Target(LlamaForCausalLM(LlamaConfig(**SIZES)), name="tiny")
    assert not calls
    expected = Target(LlamaForCausalLM.from_pretrained(save(tmp_path)), name="other").fingerprint()
    assert calls and expected != target.fingerprint()
    second = Target(LlamaForCausalLM.from_pretrained(tmp_path), name="other")
    add_adapter(second, rank=2, alpha=4, modules=["q_proj"])
    with torch.no_grad():
        for layer in second.adapted_layers():
            layer.base_layer.weight.add_(1)
    assert second.fingerprint() == expected
