"""Sizes of blocks, default hidden states, norms, embeddings and logits of heads for targets of all families."""

from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig

from specdec.export.eagle import find_default_layers
from specdec.heads.blocks import (
    DEFAULT_POSITIONS,
    Rotary,
    choose_five_layers,
    choose_three_layers,
    make_block_config,
)
from specdec.heads.dflash import BlockDrafter
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle, Eagle3
from specdec.heads.medusa import Medusa
from specdec.heads.mtp import MTP
from specdec.proposers.heads import HeadProposer
from specdec.target import attention
from specdec.target.model import Target
from tests.support.decoding import chain_of, greedy, random_tokens
from tests.support.drafters import disturb, text_logits
from tests.support.families import find_family, make
from tests.support.targets import make_target

V = 61
TEXT = torch.tensor([random_tokens(5, 12, V)])
NESTED = {
    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 32, "long_factor": [2.0] * 32,
        "factor": 2.0, "original_max_position_embeddings": 1024}  # fmt: skip

# (model type, fields, expected fields of the block), with the sizes of published models where they matter
CASES = [
    ("llama", {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 1536},
     {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64, "intermediate_size": 1536}),
    ("gpt2", {"n_embd": 768, "n_head": 12, "n_positions": 1024},
     {"num_attention_heads": 12, "num_key_value_heads": 12, "head_dim": 64, "intermediate_size": 3072,
      "rms_norm_eps": 1e-5, "max_position_embeddings": 1024, "theta": 1e4}),
    ("gpt_bigcode", {"n_embd": 256, "n_head": 4}, {"num_attention_heads": 4, "num_key_value_heads": 1}),
    ("falcon", {"hidden_size": 256, "num_attention_heads": 8, "num_kv_heads": 2, "new_decoder_architecture": True},
     {"num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 1024}),
    ("falcon", {"hidden_size": 256, "num_attention_heads": 8, "multi_query": True}, {"num_key_value_heads": 1}),
    ("bloom", {"hidden_size": 64, "n_head": 4}, {"max_position_embeddings": DEFAULT_POSITIONS, "theta": 1e4}),
    ("mamba", {"hidden_size": 2560},
     {"num_attention_heads": 20, "num_key_value_heads": 5, "head_dim": 128,
      "max_position_embeddings": DEFAULT_POSITIONS}),
    ("deepseek_v3", {"hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 128},
     {"num_attention_heads": 56, "num_key_value_heads": 14, "head_dim": 128, "intermediate_size": 18432}),
    ("qwen3_moe", {"hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768},
     {"intermediate_size": 6144}),
    ("olmoe", {"hidden_size": 2048, "intermediate_size": 1024, "num_experts_per_tok": 8},
     {"intermediate_size": 8192}),
    ("mixtral", {"hidden_size": 4096, "intermediate_size": 14336}, {"intermediate_size": 14336}),
    ("qwen3_5_moe_text", {"hidden_size": 2048, "moe_intermediate_size": 512, "num_experts_per_tok": 8,
                          "shared_expert_intermediate_size": 500}, {"intermediate_size": 4608}),
    ("qwen3_5_text", {"hidden_size": 5120, "num_attention_heads": 24, "num_key_value_heads": 4, "head_dim": 256},
     {"num_attention_heads": 40, "num_key_value_heads": 10, "head_dim": 128}),  # 24 does not divide 5120: Qwen3.6-27B
    ("gemma3_text", {"hidden_size": 64, "num_attention_heads": 4, "head_dim": 256, "rope_parameters": NESTED},
     {"head_dim": 256, "theta": 1e6, "kind": "default"}),
    ("gpt_neox", {"hidden_size": 64, "num_attention_heads": 4, "rotary_pct": 0.25},
     {"kind": "default", "head_dim": 16}),
    ("phi3", {"hidden_size": 256, "num_attention_heads": 4, "max_position_embeddings": 2048, "rope_parameters": LONG},
     {"kind": "longrope"}),
    ("phi3", {"hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 2048,
              "rope_parameters": {**LONG, "partial_rotary_factor": 0.5}}, {"kind": "default", "theta": 1e4}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model_type", "fields", "expected"), CASES, ids=[f"{n}-{case[0]}" for n, case in enumerate(CASES)]
)
def test_every_family_has_a_sensible_block(model_type, fields, expected):
    config = AutoConfig.for_model(model_type, **fields)
    width = config.hidden_size
    limit = getattr(config, "max_position_embeddings", None)
    target = SimpleNamespace(name="tiny", config=config, width=width, max_positions=limit,
                             embed=SimpleNamespace(weight=torch.zeros(2, width)))  # fmt: skip
    block = make_block_config(target, intermediate_size=None)  # type: ignore[arg-type]
    rope = dict(block.rope_parameters)
    found = {**block.to_dict(), "kind": rope["rope_type"], "theta": rope["rope_theta"]}
    assert {name: found[name] for name in expected} == expected
    cos, _ = Rotary(block)(torch.zeros(1, 3, width), torch.arange(3)[None])
    assert cos.shape == (1, 3, block.head_dim) and block.num_attention_heads % block.num_key_value_heads == 0


def test_narrow_embeddings_are_refused():
    target = SimpleNamespace(name="tiny", width=32, embed=SimpleNamespace(weight=torch.zeros(9, 16)))
    with pytest.raises(ValueError, match="embeddings of 16 and hidden states of 32, and this head joins the two"):
        make_block_config(target, intermediate_size=None)  # type: ignore[arg-type]


# Default hidden states


@pytest.mark.parametrize("num", range(3, 40))
def test_default_hidden_states_exist(num):
    target = SimpleNamespace(name="tiny", num_layers=num)
    layers = choose_three_layers(target)  # type: ignore[arg-type]
    assert len(set(layers)) == 3 and sorted(layers) == list(layers)
    assert (1 if num > 3 else 0) <= layers[0] and layers[-1] < num
    engines = find_default_layers(target)  # type: ignore[arg-type]
    assert layers == engines or not engines[0] < engines[1] < engines[2]
    five = choose_five_layers(target)  # type: ignore[arg-type]
    assert sorted(set(five)) == list(five) and five[0] >= 1 and five[-1] < num


def test_targets_of_two_layers_have_no_default():
    target = make_target(V, num_layers=2)
    for head in (Eagle3, BlockDrafter):
        with pytest.raises(ValueError, match="has 2 layers, and the default of target_layers needs three"):
            head(target)
        assert head(target, target_layers=[0, 1]).target_layers == (0, 1)


# Norms, embeddings and logits


@pytest.fixture(scope="module", params=["granite", "cohere", "nanochat", "gemma", "mixtral"])
def shaped(request) -> Target:
    """A target that scales its embeddings or its logits, ties them, or has experts."""
    model = make(find_family(request.param), attention.IMPLEMENTATION).double()
    model.config._experts_implementation = "eager"  # the others have no float64
    return Target(model, name="tiny")


@pytest.mark.parametrize("vocab", [None, torch.arange(0, V, 2)], ids=["whole", "reduced"])
def test_goal_logits_are_those_of_the_target(shaped, vocab):
    final = shaped.read(TEXT, ()).final
    wanted = shaped.logits(final)
    assert torch.allclose(
        Eagle(shaped, vocab=vocab).goal_logits(final), wanted if vocab is None else wanted[..., vocab]
    )


def test_own_lm_heads_start_at_the_targets_logits(shaped):
    final = shaped.read(TEXT, ()).final
    wanted = shaped.logits(final)
    for logits in (Eagle3(shaped).double().logits(1, final), Medusa(shaped, own_output=True).double().logits(1, final)):
        if shaped.shape_logits.cap is None:
            assert torch.allclose(logits, wanted, rtol=1e-4, atol=1e-4)
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("head", [Eagle, Eagle3, MTP, Medusa, BlockDrafter, Draft])
def test_heads_of_every_family_draft_without_changing_answers(shaped, head):
    drafter = disturb(head(shaped)).double().eval()
    prompts = [random_tokens(1, 5, V), random_tokens(2, 3, V)]
    plain, drafted = (greedy(shaped, proposer) for proposer in (None, HeadProposer(drafter, chain_of(3))))
    assert drafted.generate(prompts, 12).tokens == plain.generate(prompts, 12).tokens


# Draft models


@pytest.mark.parametrize("borrow", [True, False])
def test_exported_drafts_carry_the_scales_of_the_target(shaped, borrow):
    draft = disturb(Draft(shaped, borrow_embeddings=borrow)).double().eval()
    model = draft.language_model(torch.float64)
    assert draft.config.model_type == ("gemma" if shaped.config.model_type == "gemma" else "llama")
    wanted, logits = text_logits(draft, TEXT), model(TEXT).logits
    if borrow and shaped.shape_logits.cap is not None:
        wanted = shaped.shape_logits.cap * torch.atanh(wanted / shaped.shape_logits.cap)
    assert torch.allclose(logits, wanted, rtol=1e-3, atol=1e-3)


def test_layers_of_mixtures_and_scaled_targets_are_not_copied(shaped):
    if shaped.config.model_type == "gemma":
        return
    draft = Draft(shaped)
    assert draft.borrows and draft.config.num_hidden_layers == 2
    with pytest.raises(ValueError, match=r"set copy_layers=\[\], as for targets with windows"):
        Draft(shaped, copy_layers=[0])
    checkpoint = Draft(shaped, **draft.arguments())
    assert {name: value.shape for name, value in checkpoint.state_dict().items()} == {
        name: value.shape for name, value in draft.state_dict().items()
    }
