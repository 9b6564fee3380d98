"""Which targets the engines have: what is refused, what gets a note, and the exports of heads for unusual targets."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specdec.export.engines import SOURCES, check_target
from specdec.heads.dflash import BlockDrafter
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle, Eagle3
from specdec.heads.medusa import Medusa
from specdec.heads.mtp import MTP
from specdec.target import attention
from specdec.target.model import Target
from tests.exports import make_form
from tests.support import make_target

V = 61


def target_of(family: str, *, recurrent: bool = False, plain: bool = True, bias: bool = False):
    return SimpleNamespace(
        config=SimpleNamespace(model_type=family),
        recurrent=recurrent,
        shape_logits=SimpleNamespace(plain=plain),
        lm_head=SimpleNamespace(bias=torch.zeros(1) if bias else None),
    )


@pytest.mark.parametrize("engine", SOURCES)
@pytest.mark.parametrize("kind", ["states", "last", "draft"])
def test_every_engine_has_llama_targets(engine, kind):
    assert check_target(engine, kind, target_of("llama")) == ()


@pytest.mark.parametrize(
    ("engine", "kind", "family", "recurrent"),
    [
        ("SGLang", "states", "gpt2", False),
        ("SGLang", "last", "mixtral", False),
        ("vLLM", "states", "mamba", True),
        ("SafeAILab's code", "last", "gemma", False),
    ],
)
def test_pairs_that_no_engine_loads_are_refused(engine, kind, family, recurrent):
    with pytest.raises(
        ValueError, match=rf"{engine} does not serve .* {family} target .* It does with .*llama.*safetensors"
    ):
        check_target(engine, kind, target_of(family, recurrent=recurrent))


def test_pairs_that_may_load_get_a_note():
    (note,) = check_target("vLLM", "states", target_of("mixtral"))
    assert "Not known to load" in note and "--model-impl transformers" in note
    assert "Not known to load" in check_target("llama.cpp", "states", target_of("qwen2"))[0]
    assert "recurrent layers" in check_target("vLLM", "states", target_of("qwen3_next", recurrent=True))[0]
    assert check_target("vLLM", "draft", target_of("mamba", recurrent=True)) != ()


def test_what_surrounds_the_lm_head_is_noted_for_heads_only():
    for target, words in ((target_of("llama", plain=False), "draft greedily"), (target_of("llama", bias=True), "bias")):
        assert any(words in note for note in check_target("vLLM", "last", target))
        assert check_target("vLLM", "draft", target) == ()


def make(family: str, **fields) -> Target:
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=8,
                                  num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=[1, 2],
                                  pad_token_id=None, **fields)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.NAME)
    return Target(model.double(), name="tiny")


@pytest.fixture(scope="module")
def granite() -> Target:
    return make("granite", logits_scaling=4.0, embedding_multiplier=2.0)


@pytest.mark.parametrize(("head", "form"), [(Eagle, "vllm"), (Eagle3, "vllm"), (Eagle3, "speculators"), (Medusa, "vllm"),
                                            (MTP, "vllm"), (BlockDrafter, "vllm")])  # fmt: skip
def test_heads_of_scaled_targets_are_exported(granite, head, form):
    made = make_form(head(granite).double(), form)
    made.layout.check()
    assert any("scales or caps" in note for note in made.notes)
    if "eos_token_id" in made.layout.config:
        assert made.layout.config["eos_token_id"] == [1, 2] and made.layout.config["pad_token_id"] == 0


def test_exports_that_a_scaled_target_does_not_have(granite):
    dspark = BlockDrafter(granite, markov_rank=4, anchor_predicts=True)
    with pytest.raises(ValueError, match="scales or caps its logits"):
        make_form(dspark, "vllm")
    with pytest.raises(ValueError, match="SGLang does not serve this kind of head with a granite target"):
        make_form(Eagle3(granite), "sglang")
    make_form(dspark, "safetensors").layout.check()


def test_shallow_targets_name_their_hidden_states():
    config = make_form(Eagle3(make_target(V, num_layers=5)).double(), "vllm").layout.config
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    with pytest.raises(ValueError, match=r"reads hidden states \[0, 1, 2\]"):
        make_form(Eagle3(make_target(V, num_layers=3)), "vllm")


def test_stateful_targets_have_no_assisted_generation(granite, monkeypatch):
    monkeypatch.setattr(type(granite.model), "_is_stateful", True)
    with pytest.raises(ValueError, match="no assisted generation for stateful models such as granite"):
        make_form(Draft(granite), "transformers")
