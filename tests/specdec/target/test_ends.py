"""A target without its layers: the same embedding, norm, LM head and facts as the whole one, and no more in memory."""

import json
import warnings

import pytest
import safetensors.torch
import torch

from specdec import checkpoint
from specdec.core.shards import Shards
from specdec.heads.eagle import Eagle3
from specdec.target.model import Target
from tests.families import FAMILIES, make
from tests.support import save_eagle

CHOSEN = ["llama", "gemma3_text", "gpt2", "mistral-window", "qwen3_moe", "deepseek_v3", "qwen3_5_text"]
BY_NAME = {str(family): family for family in FAMILIES}
FACTS = ("plain", "recurrent", "windowed", "layer_types", "num_layers", "width", "vocab_size", "max_positions", "dtype")


@pytest.fixture(params=CHOSEN, scope="module")
def pair(request, tmp_path_factory):
    """A target of a family in several files, whole and without its layers."""
    folder = str(tmp_path_factory.mktemp("family"))
    make(BY_NAME[request.param]).save_pretrained(folder, max_shard_size="10KB")
    return Target.load(folder, dtype="float32"), Target.load_ends(folder, dtype="float32")


def test_ends_are_those_of_the_whole_target(pair):
    whole, ends = pair
    x = torch.randn(2, 3, whole.width)
    tokens = torch.arange(whole.vocab_size)
    assert torch.equal(ends.embed(tokens), whole.embed(tokens))
    assert torch.equal(ends.norm(x), whole.norm(x))
    assert torch.equal(ends.logits(x), whole.logits(x))
    assert {name: getattr(ends, name) for name in FACTS} == {name: getattr(whole, name) for name in FACTS}
    assert (ends.lm_head.weight is ends.embed.weight) == (whole.lm_head.weight is whole.embed.weight)
    assert ends.embeddings_fingerprint() == whole.embeddings_fingerprint()
    assert whole.whole and not ends.whole
    values = {p for part in (ends.embed, ends.norm, ends.lm_head) for p in part.parameters()}
    assert all(p.is_meta for p in ends.model.parameters() if p not in values)


def test_fingerprints_are_equal(pair):
    whole, ends = pair
    assert ends.fingerprint() == whole.fingerprint()
    unread = f"{whole.embeddings_fingerprint()}-layers-unread"
    assert ends.identity.old_text in (whole.identity.old_text, unread) and ends.matches(ends.identity.old_text)


def test_other_values_give_another_fingerprint(tmp_path):
    model = make(BY_NAME["llama"])
    model.save_pretrained(tmp_path)
    before = Target.load_ends(str(tmp_path)).fingerprint()
    with torch.no_grad():
        model.model.layers[2].mlp.up_proj.weight[0, 0] += 1  # a layer that is not read
    model.save_pretrained(tmp_path)
    assert Target.load_ends(str(tmp_path)).fingerprint() != before


def test_heads_are_the_same_beside_both(pair):
    drafters = []
    for target in pair:
        torch.manual_seed(3)
        drafters.append(Eagle3(target, target_layers=[1, 2, 3]))
    first, second = (drafter.state_dict() for drafter in drafters)
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_it_cannot_read_texts(pair):
    with pytest.raises(ValueError, match=r"was loaded without its layers.*load the whole target"):
        pair[1].read(torch.ones(1, 3, dtype=torch.long), ())


def test_checkpoints_are_loaded_beside_either(pair, tmp_path):
    whole, ends = pair
    if whole.embed.weight.shape[1] != whole.width:
        pytest.skip("EAGLE-1 joins the two")
    for trained, loaded in ((ends, whole), (whole, ends)):
        folder = tmp_path / ("ends" if trained is ends else "whole")
        save_eagle(folder, trained)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            assert checkpoint.load(folder, loaded).target is loaded
        partly = [w for w in warned if "only the embedding and the final norm" in str(w.message)]
        assert bool(partly) == (trained.fingerprint() != loaded.fingerprint())


def test_what_is_missing_or_damaged_is_named(tmp_path):
    make(BY_NAME["llama"]).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = safetensors.torch.load_file(path)
    safetensors.torch.save_file({key: value for key, value in tensors.items() if key != "lm_head.weight"}, path)
    with pytest.raises(ValueError, match=r"has no tensor lm_head.weight of shape \[64, 32\]"):
        Target.load_ends(str(tmp_path))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"is damaged .*take another copy"):
        Target.load_ends(str(tmp_path))
    path.unlink()
    with pytest.raises(ValueError, match="has no safetensors"):
        Target.load_ends(str(tmp_path))


@pytest.mark.parametrize("places", [{"a": "../other.safetensors"}, {"a": "/etc/passwd"}, ["a"]])
def test_an_index_leads_nowhere_else(places, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match=r"is not inside it|has no weight_map"):
        Shards(str(tmp_path))
