"""Native MTP modules compute what transformers' own classes compute, in replay and in decoding; refusals."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from specdec import checkpoint
from specdec.heads.native import NativeMTP, read_native_modules
from specdec.proposers.heads import HeadProposer
from specdec.target.model import Target
from specdec.unroll.plan import plan_unroll, unroll
from tests.support import native, saved_targets
from tests.support.decoding import chain_of, greedy, random_tokens
from tests.support.loops import acceptance, tau
from tests.support.native import save_native

LENGTH = 20


def load_target(folder) -> Target:
    return Target.load(str(folder), dtype="float32")


def load(folder, **arguments):
    """The target in float32, and its own module."""
    target = load_target(folder)
    spec, tensors = read_native_modules(str(folder), target)
    drafter = checkpoint.build({**spec, **arguments}, tensors, target).eval()
    assert isinstance(drafter, NativeMTP)
    return target, drafter


def run_unroll(drafter: NativeMTP, tokens: torch.Tensor, features: torch.Tensor, depth: int):
    positions = torch.arange(LENGTH)[None]
    plan = plan_unroll(drafter, torch.zeros_like(positions), positions, positions > depth, depth=depth)
    return unroll(drafter, tokens, features, plan)


@torch.no_grad()
@pytest.mark.parametrize("name", native.NAMES)
def test_a_module_computes_what_the_classes_of_transformers_compute(tmp_path, name):
    model, weights = save_native(tmp_path, name)
    target, drafter = load(tmp_path)
    tokens = torch.tensor([random_tokens(1, LENGTH, 64)])
    output = target.read(tokens, drafter.target_layers)
    result = run_unroll(drafter, tokens, output.features, 1)
    embedding = target.embed(tokens[:, 1:]).clone()
    assert drafter.zero_first == (native.NAMES[name] is not native.QWEN)
    if drafter.zero_first:
        embedding[:, 0] = 0
    raw, normed = native.run_reference(name, model, weights, embedding, output.final[:, :-1])
    torch.testing.assert_close(result.readouts[0], normed, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(result.states[0], normed if drafter.recycle_norm else raw, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", native.NAMES)
def test_replay_is_decoding_at_every_depth(tmp_path, name):
    save_native(tmp_path, name)
    target, drafter = load(tmp_path)
    prompt = random_tokens(2, 9, 64)
    plain = greedy(target, None).generate([prompt], 24).tokens[0]
    for depth in (1, 2, 4):
        decoded = greedy(target, HeadProposer(drafter, chain_of(depth))).generate([prompt], 24)
        assert decoded.tokens[0] == plain
        replayed = tau(acceptance(drafter, prompt, plain, depth=depth, temperature=0))
        assert replayed == pytest.approx((len(plain) - 1) / len(decoded.accepted[0]))


@torch.no_grad()
@pytest.mark.parametrize("name", ["deepseek_v3", "glm4_moe"])
def test_the_first_draft_is_that_of_transformers_own_mtp(tmp_path, name):
    """It reads the same files by its own mapping, without a zero embedding. It does not draft again with one module."""
    save_native(tmp_path, name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.4.*"]  # its own patterns are of the published depth
    reference = MtpModel.from_pretrained(model)
    target, drafter = load(tmp_path, zero_first=False)
    tokens = torch.tensor([random_tokens(3, LENGTH, 64)])
    output = target.read(tokens, drafter.target_layers)
    embedding, positions = target.embed(tokens[:, 1:]), torch.arange(LENGTH - 1)[None]
    mask = torch.ones(LENGTH - 1, LENGTH - 1, dtype=torch.bool).tril()[None, None]
    rotary = reference.rotary_emb(embedding, positions)
    expected = reference.layers[0](embedding, output.final[:, :-1], rotary, mask, positions, None)
    readouts = run_unroll(drafter, tokens, output.features, 1).readouts[0]
    torch.testing.assert_close(readouts, expected, rtol=1e-4, atol=1e-5)


def test_low_rank_changes_train_and_become_plain_weights(tmp_path):
    save_native(tmp_path, "qwen3_5_moe_text")
    target = load_target(tmp_path)
    whole, drafter = NativeMTP(target), NativeMTP(target, lora_rank=2)
    assert whole.pretrained and 0 < drafter.num_parameters() < whole.num_parameters()
    assert not whole.get_parameter("modules_by_depth.0.block.mlp.gate.weight").requires_grad
    tokens = torch.tensor([random_tokens(4, LENGTH, 64)])
    features = target.read(tokens, drafter.target_layers).features
    plain = {name: value.clone() for name, value in drafter.frozen_copy().state_dict().items()}
    assert plain.keys() == whole.state_dict().keys()
    assert all(map(torch.equal, plain.values(), whole.state_dict().values()))
    optimizer = torch.optim.Adam([value for value in drafter.parameters() if value.requires_grad], lr=0.1)
    for _ in range(2):  # of B, which is zero at first, then of both
        drafter.logits(2, run_unroll(drafter, tokens, features, 2).readouts[1]).logsumexp(-1).sum().backward()
        optimizer.step()
    trained = drafter.frozen_copy()
    readouts, expected = (run_unroll(head, tokens, features, 2).readouts[1] for head in (trained, drafter))
    torch.testing.assert_close(readouts, expected)
    for name, value in trained.state_dict().items():
        changes = name.endswith(("proj.weight", "join.weight", "expert_gate.weight"))
        assert torch.equal(value, plain[name]) != changes, name
    folder = tmp_path / "head"
    checkpoint.save(folder, trained, {"_target_": "specdec.heads.native.NativeMTP", "source": "target", "lora_rank": 2})
    document = json.loads((folder / "drafter.json").read_text())
    assert (document["source"], document["lora_rank"], document["published"]["layout"]) == (None, None, "native")
    again, _ = checkpoint.load_for_training(folder, target, {"lora_rank": 3, "zero_first": True})
    assert again.zero_first and again.lora_rank == 3 and again.num_parameters() > drafter.num_parameters()


def test_a_module_of_another_model_of_the_family_fits(tmp_path):
    save_native(tmp_path / "base", "qwen3_5_text")
    save_native(tmp_path / "mine", "qwen3_5_text")
    target = load_target(tmp_path / "mine")
    drafter = NativeMTP(target, source=str(tmp_path / "base"))
    assert drafter.published["source"] == "base" and set(drafter.published["sha256"]) == {"model.safetensors"}
    assert drafter.published["tensors"]["mtp.fc.weight"] == ["float32", [32, 64]]
    with pytest.raises(ValueError, match=r"num_modules=2: MTP modules of this family share their norms"):
        NativeMTP(target, num_modules=2)


def test_routing_biases_are_not_rounded(tmp_path):
    save_native(tmp_path, "deepseek_v3")
    target = Target.load(str(tmp_path), dtype="bfloat16")
    spec, tensors = read_native_modules(str(tmp_path), target)
    state = checkpoint.build(spec, tensors, target).state_dict()
    kinds = {name.rpartition(".")[2]: value.dtype for name, value in state.items()}
    assert kinds["e_score_correction_bias"] == torch.float32 and kinds["gate_up_proj"] == torch.bfloat16


def drop_module(tensors) -> dict:
    """Takes the module's tensors out."""
    return {key: tensors.pop(key) for key in list(tensors) if ".layers.4." in key}


EXPERT, SCALE = "model.layers.4.mlp.experts.1.up_proj.weight", "model.layers.4.self_attn.o_proj.weight_scale_inv"
DAMAGES = {
    f"lacks {EXPERT}": lambda t: t.pop(EXPERT),
    r"up_proj.weight has the shape \[24, 5\], .* it would be \[24, 32\]": lambda t: t.update(
        {EXPERT: t[EXPERT][:, :5]}
    ),
    f"has {SCALE}, .* If it is quantised": lambda t: t.update({SCALE: torch.ones(1, 1)}),
    "ships no MTP modules": drop_module,
    "has MTP modules of an unknown layout": lambda t: t.update(
        {key.replace("layers.4", "mtp_thing"): value for key, value in drop_module(t).items()}
    ),
}


@pytest.mark.parametrize("sentence", DAMAGES)
def test_models_without_a_fitting_module_are_refused(tmp_path, sentence):
    save_native(tmp_path, "deepseek_v3")
    target = load_target(tmp_path)
    saved_targets.edit_tensors(tmp_path, DAMAGES[sentence])
    with pytest.raises(ValueError, match=sentence):
        read_native_modules(str(tmp_path), target)


def test_targets_of_other_families_are_refused(tmp_path):
    target = load_target(saved_targets.save(tmp_path))
    with pytest.raises(ValueError, match="whose MTP modules are unknown: use head=mtp"):
        NativeMTP(target, source=None)
