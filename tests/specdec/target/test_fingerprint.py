"""The fingerprint covers what changes a target's output, and nothing else: however it is stored and loaded."""

import json
import warnings
from pathlib import Path

import pytest
import safetensors.torch
import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from specdec import checkpoint
from specdec.core.files import replace_document
from specdec.target.fingerprint import WeightSource, describe_config
from specdec.target.model import Target
from tests.families import FAMILIES, make
from tests.native import save_native
from tests.saved_targets import SIZES, edit, save
from tests.support import save_eagle

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
CHANGES = [
    {"rope_parameters": YARN},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    {"rms_norm_eps": 0.01},
    {"hidden_act": "gelu"},
    {"max_position_embeddings": 512},
]
IDLE = [
    {"architectures": ["AnotherName"]},
    {"transformers_version": "9.9.9", "_name_or_path": "elsewhere"},
    {"dtype": "bfloat16"},
    {"bos_token_id": 5, "eos_token_id": [1, 2], "pad_token_id": 3},
    {"use_cache": False, "output_hidden_states": True, "attention_dropout": 0.5},
    {"initializer_range": 0.3},
    {"num_nextn_predict_layers": 1},
]


def find_fingerprint(folder: Path, **arguments) -> str:
    """Of the target as all ways to load it find it, in any dtype."""
    texts = {
        Target.load(str(folder), dtype="float32").fingerprint(),
        Target.load(str(folder), dtype="bfloat16").fingerprint(),
        Target.load_ends(str(folder), dtype="float32").fingerprint(),
    }
    (text,) = texts
    return text


def change_weights(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    change(tensors)
    safetensors.torch.save_file(tensors, path, metadata={"format": "pt"})


# The configuration


@pytest.mark.parametrize("fields", CHANGES, ids=lambda fields: next(iter(fields)))
def test_what_changes_the_output_changes_it(tmp_path, fields):
    before = find_fingerprint(save(tmp_path))
    assert find_fingerprint(edit(tmp_path, **fields)) != before


@pytest.mark.parametrize("fields", IDLE, ids=lambda fields: next(iter(fields)))
def test_what_does_not_change_the_output_leaves_it(tmp_path, fields):
    before = find_fingerprint(save(tmp_path))
    assert find_fingerprint(edit(tmp_path, **fields)) == before


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("mistral-window", {"sliding_window": 7}),
        ("gemma2", {"final_logit_softcapping": 7.0}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma3_text", {"layer_types": ["full_attention"] * 4}),
        ("gemma3_text", {"query_pre_attn_scalar": 16}),
        ("cohere2", {"logit_scale": 0.75}),
        ("granitemoe", {"residual_multiplier": 0.5}),
        ("qwen3_moe", {"norm_topk_prob": True}),
        ("opt", {"_remove_final_layer_norm": True}),
        ("glm4_moe", {"routed_scaling_factor": 2.5}),
    ],
)
def test_fields_of_a_family_count(family, fields):
    config = make(next(candidate for candidate in FAMILIES if str(candidate) == family)).config
    before = describe_config(config)
    for key, value in fields.items():
        assert getattr(config, key) != value
        setattr(config, key, value)
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
    theta = [{"rope_type": "default", "rope_theta": value} for value in (500, 500.0)]
    first, second = (describe_config(LlamaConfig(rope_parameters=rope, **SIZES)) for rope in theta)
    assert first == second and first["rope_parameters"]["rope_theta"] == 500
    counted_fields = describe_config(LlamaConfig())
    assert counted_fields.keys() == {
        "model_type",
        "hidden_size",
        "num_hidden_layers",
        "vocab_size",
        "num_attention_heads",
        "intermediate_size",
    }


def test_what_only_images_need_does_not_count(tmp_path):
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "image_size": 16,
              "patch_size": 8}  # fmt: skip
    text = {**SIZES, "model_type": "mistral", "sliding_window": None}
    config = transformers.Mistral3Config(text_config=text, vision_config={"model_type": "pixtral", **vision})
    transformers.Mistral3ForConditionalGeneration(config).save_pretrained(tmp_path)
    before = find_fingerprint(tmp_path)
    document = json.loads((tmp_path / "config.json").read_text())
    edit(tmp_path, image_token_index=11, vision_config={**document["vision_config"], "attention_dropout": 0.2})
    assert find_fingerprint(tmp_path) == before
    edit(tmp_path, text_config={**document["text_config"], "rms_norm_eps": 0.01})
    assert find_fingerprint(tmp_path) != before


# The weights


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("model.embed_tokens.weight", [7, 30, 58]),
        ("model.layers.2.self_attn.k_proj.weight", [13]),
        ("model.layers.1.post_attention_layernorm.weight", [100]),
        ("model.norm.weight", [3]),
        ("lm_head.weight", [60]),
    ],
)
def test_any_value_changes_it(tmp_path, name, rows):
    before = find_fingerprint(save(tmp_path))

    def change(tensors):
        index = (rows, 5) if tensors[name].dim() == 2 else rows
        tensors[name][index] += 0.5

    change_weights(tmp_path, change)
    assert find_fingerprint(tmp_path) != before


def test_two_layers_in_another_order_change_it(tmp_path):
    before = find_fingerprint(save(tmp_path))

    def swap(tensors):
        first, second = (f"model.layers.{n}.mlp.up_proj.weight" for n in (0, 3))
        tensors[first], tensors[second] = tensors[second], tensors[first]

    change_weights(tmp_path, swap)
    assert find_fingerprint(tmp_path) != before


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt2", "qwen3_moe", "deepseek_v3", "qwen3_5_text", "lfm2"])
def test_the_model_in_memory_and_its_files_have_the_same(tmp_path, family):
    """In one file or several, in float32 or bfloat16, with experts one by one in the files and together in memory."""
    model = make(next(candidate for candidate in FAMILIES if str(candidate) == family))
    texts = {WeightSource(model, {}, None, None).make_fingerprint().text}
    for number, dtype in enumerate((torch.float32, torch.bfloat16)):
        folder = tmp_path / str(number)
        model.to(dtype).save_pretrained(folder, max_shard_size="20KB" if number else "1GB")
        texts.add(find_fingerprint(folder))
    assert len(texts) == 1


def test_names_before_and_tensors_beside_the_model_do_not_count(tmp_path):
    """As in files of the bare model, in old ones with tables of angles, and in those that were pruned."""
    before = find_fingerprint(save(tmp_path, tie_word_embeddings=True))

    def rename(tensors):
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    change_weights(tmp_path, rename)
    assert load_with_equal_heads(tmp_path).fingerprint() == before == find_fingerprint(tmp_path)
    unused = {
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(16),
        "layers.7.mlp.up_proj.weight": torch.ones(128, 128),
    }
    change_weights(tmp_path, lambda tensors: tensors.update(unused))
    assert find_fingerprint(tmp_path) == before
    change_weights(tmp_path, lambda tensors: tensors["layers.0.mlp.up_proj.weight"].mul_(2))
    assert find_fingerprint(tmp_path) != before


def test_a_model_that_was_loaded_elsewhere_is_known_again(tmp_path):
    """As heads beside a model of transformers need it."""
    for family in ("qwen3_moe", "gemma3_text", "deepseek_v3"):
        make(next(candidate for candidate in FAMILIES if str(candidate) == family)).save_pretrained(tmp_path / family)
        model = AutoModelForCausalLM.from_pretrained(tmp_path / family)
        assert WeightSource(model, {}, None, None).make_fingerprint().text == find_fingerprint(tmp_path / family)
        with torch.no_grad():
            model.get_input_embeddings().weight[3] += 0.5
        assert WeightSource(model, {}, None, None).make_fingerprint().text != find_fingerprint(tmp_path / family)


@pytest.mark.parametrize("name", ["deepseek_v3", "qwen3_5_text", "qwen2"])
def test_mtp_modules_do_not_count(tmp_path, name):
    save_native(tmp_path, name)
    before = find_fingerprint(tmp_path)

    def change(tensors, keep):
        modules = [key for key in tensors if "mtp" in key or ".layers.4." in key]
        assert len(modules) > 10
        for key in modules:
            tensors[key].add_(1)
            if not keep:
                del tensors[key]

    for keep in (True, False):
        change_weights(tmp_path, lambda tensors, keep=keep: change(tensors, keep))
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


def test_a_second_copy_of_a_tied_matrix_does_not_count(tmp_path):
    before = find_fingerprint(save(tmp_path, tie_word_embeddings=True))
    change_weights(
        tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    assert load_with_equal_heads(tmp_path).lm_head.weight.shape == (61, 128) and find_fingerprint(tmp_path) == before
    change_weights(tmp_path, lambda tensors: tensors.pop("model.embed_tokens.weight"))  # it may have the other's name
    load_with_equal_heads(tmp_path)
    assert find_fingerprint(tmp_path) == before


def test_a_head_of_its_own_counts_although_the_configuration_ties_it(tmp_path):
    before = find_fingerprint(save(tmp_path, tie_word_embeddings=True))
    change_weights(
        tmp_path, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"] + 0.5})
    )
    whole = load_with_equal_heads(tmp_path)
    assert whole.lm_head.weight is not whole.embed.weight and find_fingerprint(tmp_path) != before
    assert find_fingerprint(edit(tmp_path, tie_word_embeddings=False)) == whole.fingerprint()  # the weights say it


def test_a_head_that_is_missing_is_named_in_both(tmp_path):
    save(tmp_path, tie_word_embeddings=True)
    edit(tmp_path, tie_word_embeddings=False)
    for load, sentence in (
        (Target.load, r"lacks 1 of its tensors \(lm_head.weight\)"),
        (Target.load_ends, "has no tensor lm_head"),
    ):
        with pytest.raises(ValueError, match=sentence):
            load(str(tmp_path), dtype="float32")


# Fingerprints of earlier versions


def test_a_head_with_an_earlier_fingerprint_loads_silently_and_is_saved_with_the_new_one(tmp_path):
    save(tmp_path / "target")
    for load in (Target.load, Target.load_ends):
        target = load(str(tmp_path / "target"), dtype="float32")
        save_eagle(tmp_path / "head", target)
        path = tmp_path / "head" / "drafter.json"
        document = json.loads(path.read_text())
        assert document["target_fingerprint"] == target.fingerprint() and target.fingerprint().startswith("v2.")
        replace_document(path, document | {"target_fingerprint": target.identity.old_text})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            head, spec = checkpoint.load_for_training(tmp_path / "head", target, {})
        checkpoint.save(tmp_path / "again", head, spec)
        assert (
            json.loads((tmp_path / "again" / "drafter.json").read_text())["target_fingerprint"] == target.fingerprint()
        )
        change_weights(tmp_path / "target", lambda tensors: tensors["model.embed_tokens.weight"].mul_(2))
        with pytest.raises(ValueError, match="Use it with its own target"):
            checkpoint.load(tmp_path / "head", load(str(tmp_path / "target"), dtype="float32"))


def test_an_earlier_fingerprint_that_files_do_not_give_costs_a_warning(tmp_path):
    """Of experts, which files have one by one and an earlier version read as they are in memory."""
    make(next(candidate for candidate in FAMILIES if str(candidate) == "qwen3_moe")).save_pretrained(
        tmp_path / "target"
    )
    whole, ends = (load(str(tmp_path / "target"), dtype="float32") for load in (Target.load, Target.load_ends))
    assert whole.fingerprint() == ends.fingerprint() and whole.identity.old_text != ends.identity.old_text
    save_eagle(tmp_path / "head", whole)
    path = tmp_path / "head" / "drafter.json"
    replace_document(path, json.loads(path.read_text()) | {"target_fingerprint": whole.identity.old_text})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        checkpoint.load(tmp_path / "head", whole)
    with pytest.warns(UserWarning, match="only the embedding and the final norm"):
        checkpoint.load(tmp_path / "head", ends)


def test_it_is_made_when_it_is_asked_for_and_before_the_weights_change(monkeypatch, tmp_path):
    from specdec.target import fingerprint as module
    from specdec.target.adapter import add_adapter

    calls: list[str] = []
    digest = module.digest_tensors
    monkeypatch.setattr(module, "digest_tensors", lambda *arguments: calls.append("x") or digest(*arguments))
    model = LlamaForCausalLM(LlamaConfig(**SIZES))
    target = Target(model, name="tiny")
    assert not calls
    expected = Target(LlamaForCausalLM.from_pretrained(save(tmp_path)), name="other").fingerprint()
    assert calls and expected != target.fingerprint()
    second = Target(LlamaForCausalLM.from_pretrained(tmp_path), name="other")
    add_adapter(second, rank=2, alpha=4, modules=["q_proj"])
    with torch.no_grad():
        for layer in second.adapted_layers():
            layer.base_layer.weight.add_(1)
    assert second.fingerprint() == expected
