"""A target without its layers: the same embedding, norm, LM head and facts as the whole one, and no more in memory."""

import json

import pytest
import torch

from specdec.core.shards import Shards
from specdec.heads.eagle import Eagle3
from specdec.target.first_layers import read_first_states
from specdec.target.model import Target
from tests.support.families import find_family, make
from tests.support.saved_targets import edit_tensors

CHOSEN = ["llama", "gemma3_text", "gpt2", "mistral-window", "qwen3_moe", "deepseek_v3", "qwen3_5_text"]
FACTS = ("plain", "recurrent", "windowed", "layer_types", "num_layers", "width", "vocab_size", "max_positions", "dtype")


@pytest.fixture(params=CHOSEN, scope="module")
def pair(request, tmp_path_factory):
    """A target of a family in several files, whole and without its layers."""
    folder = str(tmp_path_factory.mktemp("family"))
    make(find_family(request.param)).save_pretrained(folder, max_shard_size="10KB")
    return Target.load(folder, dtype="float32"), Target.load_ends(folder, dtype="float32")


def test_ends_and_heads_beside_them_are_those_of_the_whole_target(pair):
    whole, ends = pair
    x, tokens = torch.randn(2, 3, whole.width), torch.arange(whole.vocab_size)
    for first, second in zip(*((t.embed(tokens), t.norm(x), t.logits(x)) for t in pair)):
        assert torch.equal(first, second)
    assert {name: getattr(ends, name) for name in FACTS} == {name: getattr(whole, name) for name in FACTS}
    assert (ends.lm_head.weight is ends.embed.weight) == (whole.lm_head.weight is whole.embed.weight)
    assert whole.whole and not ends.whole
    values = {p for module in (ends.embed, ends.norm, ends.lm_head) for p in module.parameters()}
    assert all(p.is_meta for p in ends.model.parameters() if p not in values)
    states = []
    for target in pair:
        torch.manual_seed(3)
        states.append(Eagle3(target, target_layers=[1, 2, 3]).state_dict())
    assert states[0].keys() == states[1].keys() and all(map(torch.equal, states[0].values(), states[1].values()))
    with pytest.raises(ValueError, match=r"was loaded without its layers.*load the whole target"):
        ends.read(torch.ones(1, 3, dtype=torch.long), ())


def test_first_layers_compute_the_states_of_the_whole_target(pair):
    whole, ends = pair
    text = torch.randint(whole.vocab_size, (20,), generator=torch.Generator().manual_seed(0))
    expected = whole.read(text[None], (1, 2)).features[0].split(whole.width, dim=-1)
    merged = whole.model.config.model_type in ("qwen3_moe", "deepseek_v3")  # experts that transformers joins
    for target in (whole,) if merged else pair:
        states = read_first_states(target, text, 2)
        assert len(states) == 3
        for state, reference in zip(states[1:], expected):
            torch.testing.assert_close(state, reference, rtol=1e-5, atol=1e-6)
    assert all(p.is_meta for layer in ends.layers for p in layer.parameters())
    if merged:
        with pytest.raises(ValueError, match=r"has no tensor .*experts"):
            read_first_states(ends, text, 2)


def test_fingerprints_are_those_of_the_whole_target_or_leave_out_its_layers(pair):
    whole, ends = pair
    assert ends.fingerprint() == whole.fingerprint()
    assert ends.embeddings_fingerprint() == whole.embeddings_fingerprint()


def test_what_is_missing_or_damaged_is_named(tmp_path):
    make(find_family("llama")).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    edit_tensors(tmp_path, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(ValueError, match=r"has no tensor lm_head.weight of shape \[64, 32\]"):
        Target.load_ends(str(tmp_path))
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"is damaged .*take another copy"):
        Target.load_ends(str(tmp_path))


@pytest.mark.parametrize("places", [{"a": "../other.safetensors"}, {"a": "/etc/passwd"}, ["a"]])
def test_an_index_leads_nowhere_else(places, tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match=r"is not inside it|has no weight_map"):
        Shards(str(tmp_path))
