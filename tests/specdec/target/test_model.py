"""A target's hidden states, logits and fingerprint, and messages for what is missing (families: test_families.py)."""

import sys

import pytest
import torch

from specdec.heads.medusa import Medusa2
from specdec.target import attention
from specdec.target.model import Target, load_tokenizer
from tests.saved_targets import save
from tests.support import make_target

pytestmark = pytest.mark.full


def test_hidden_states_are_numbered_as_in_transformers(tmp_path):
    target = Target.load(str(save(tmp_path, num_hidden_layers=8)), dtype="float64")
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    states = target.model(tokens, output_hidden_states=True).hidden_states
    output = target.read(tokens, target.layer_ids([0, 3, -1]))
    torch.testing.assert_close(output.features, torch.cat([states[0], states[3], states[8]], dim=-1))
    torch.testing.assert_close(target.logits(output.final), target.model(tokens).logits)


def test_the_fingerprint_depends_on_weights_and_not_on_their_dtype(tmp_path):
    folder = str(save(tmp_path))
    first = Target.load(folder, dtype="float32")
    assert first.fingerprint() == Target.load(folder, dtype="bfloat16").fingerprint()
    with torch.no_grad():
        first.decoder.layers[2].mlp.down_proj.weight[0, 0] += 0.1
    assert first.fingerprint() != Target(first.model, name="changed").fingerprint()


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("sinks", [None, torch.ones(4)])
def test_queries_that_see_nothing_do_not_become_nan(softcap, sinks):
    """As padding before a prompt, whose keys and values later layers compute with."""
    query, key, value = (torch.randn(2, num_heads, 3, 8) for num_heads in (4, 2, 2))
    seen = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    cut = seen.clone()
    cut[1, :, :1] = cut[1, :, :, :1] = False
    whole, cut = (
        attention.multiply_attention(query, key, value, mask, sinks=sinks, softcap=softcap) for mask in (seen, cut)
    )
    assert cut.isfinite().all() and torch.equal(cut[0], whole[0]) and not torch.equal(cut[1], whole[1])


@pytest.mark.parametrize("layers", [[1, 1], [3, 2], [0, 9], [-10]])
def test_layers_out_of_order_or_range_are_refused(target, layers):
    with pytest.raises(ValueError, match="strictly increasing"):
        target.layer_ids(layers)


def test_messages_for_missing_folders_name_the_fix(tmp_path):
    for load in (Target.load, load_tokenizer):
        with pytest.raises(
            ValueError, match=r"^The folder targets/nothing-here does not exist\. Give the folder of a model"
        ):
            load("targets/nothing-here")
    with pytest.raises(ValueError, match="could not be loaded"):
        Target.load(str(tmp_path))


def test_a_missing_peft_names_the_extra_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match=r"needs the package peft: pip install 'specdec\[train\]'\.$"):
        Medusa2(make_target(6, num_layers=2))
