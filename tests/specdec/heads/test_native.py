"""Native MTP modules compute what transformers' own classes compute, in replay and in decoding; refusals."""

import json

import pytest
import torch
from torch.nn import functional as F
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
    raw_states: list[torch.Tensor] = []
    target.layers[-1].register_forward_hook(lambda layer, inputs, output: raw_states.append(output))
    output = target.read(tokens, drafter.target_layers)
    has_experts = any("experts" in key for key in drafter.state_dict())  # their grouped products have no float64
    result = run_unroll(drafter if has_experts else drafter.double(), tokens, output.features, 1)
    embedding = target.embed(tokens[:, 1:]).double()
    assert drafter.zero_first == (native.NAMES[name] not in (native.QWEN, native.NEMOTRON, native.STEP))
    if drafter.zero_first:
        embedding[:, 0] = 0
    read_state = raw_states[-1] if name == "step3p5" else output.final
    raw, normed = native.run_reference(name, model.double(), weights, embedding, read_state[:, :-1].double())
    loose = has_experts or drafter.reads_raw  # by a division of a state in float32
    tolerance = {"rtol": 1e-4, "atol": 5e-5} if loose else {"rtol": 1e-5, "atol": 1e-6}  # some norms are float32
    torch.testing.assert_close(result.readouts[0].double(), normed, **tolerance)
    state = normed if drafter.estimates_state else raw
    torch.testing.assert_close(result.states[0].double(), state, **tolerance)
    if "head" in weights:
        logits = drafter.logits(1, result.readouts[0])
        torch.testing.assert_close(logits, normed @ weights["head"].T.double(), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", native.NAMES)
def test_replay_is_decoding_at_every_depth(tmp_path, name):
    save_native(tmp_path, name)
    target, drafter = load(tmp_path)
    prompt = random_tokens(2, 9, 64)
    plain = greedy(target, None).generate([prompt], 24).tokens[0]
    for depth in (1, 2, drafter.depth or 4):
        decoded = greedy(target, HeadProposer(drafter, chain_of(depth))).generate([prompt], 24)
        assert decoded.tokens[0] == plain
        replayed = tau(acceptance(drafter, prompt, plain, depth=depth, temperature=0))
        assert replayed == pytest.approx((len(plain) - 1) / len(decoded.accepted[0]))


@pytest.mark.parametrize("name", native.NAMES)
def test_every_weight_learns(tmp_path, name):
    save_native(tmp_path, name)
    target, drafter = load(tmp_path)
    tokens = torch.tensor([random_tokens(6, LENGTH, 64)])
    features, goals = target.read(tokens, drafter.target_layers).features, tokens[0, 2:]
    depth = drafter.depth or 2
    trained = {key: value for key, value in drafter.train().named_parameters() if value.requires_grad}
    optimizer, losses = torch.optim.Adam(trained.values(), lr=0.01), []
    for _ in range(4):
        readouts = run_unroll(drafter, tokens, features, depth).readouts
        steps = range(1, depth + 1)
        loss = sum(F.cross_entropy(drafter.logits(d, readouts[d - 1])[0, :-d], goals[d - 1 :]) for d in steps)
        optimizer.zero_grad()
        loss.backward()
        assert not [key for key, value in trained.items() if value.grad is None or not value.grad.any()]
        optimizer.step()
        losses.append(float(loss))
    assert losses == sorted(losses, reverse=True)


def test_the_state_that_an_engine_gives_back_is_a_fact_of_the_checkpoint(tmp_path):
    """Checkpoints from before engines were named say which state it is."""
    save_native(tmp_path / "model", "glm4_moe")
    target = load_target(tmp_path / "model")
    spec = {"_target_": "specdec.heads.native.NativeMTP"}
    for engine, reads_raw in (("vllm", True), ("sglang", False)):
        folder = tmp_path / engine
        checkpoint.save(folder, NativeMTP(target, engine=engine), spec)
        document = json.loads((folder / "drafter.json").read_text())
        assert document.pop("engine") == engine
        (folder / "drafter.json").write_text(json.dumps({**document, "recycle_norm": not reads_raw}))
        (folder / "SHA256SUMS").unlink()
        again = checkpoint.load(folder, target)
        assert (again.engine, again.estimates_state) == (engine, not reads_raw)
    other, kept = checkpoint.load_for_training(tmp_path / "sglang", target, {"engine": "vllm"})
    assert not other.estimates_state and kept["engine"] == "vllm" and "recycle_norm" not in kept


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
    f"has {SCALE}, which belongs to nothing": lambda t: t.update({SCALE: torch.ones(1, 1)}),
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


def lie_in_index(folder) -> None:
    path = folder / "model.safetensors.index.json"
    document = json.loads(path.read_text())
    document["weight_map"]["model.layers.4.embed_tokens.weight"] = min(document["weight_map"].values())
    path.write_text(json.dumps(document))


def cut_shard(folder) -> None:
    path = folder / native.list_shards(folder)["model.layers.4.eh_proj.weight"]
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[:-100])


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lie_in_index, r"model-00001-of-\d+.safetensors lacks the tensor model.layers.4.embed_tokens.weight"),
        (cut_shard, r"model-\d+-of-\d+.safetensors is damaged \(.*; it has model.layers.\S+\): take another"),
    ],
)
def test_files_that_do_not_hold_what_they_say_are_refused(tmp_path, damage, sentence):
    save_native(tmp_path / "model", "hy_v3")
    save_native(tmp_path / "base", "hy_v3", shard_size="20KB")
    damage(tmp_path / "base")
    with pytest.raises(ValueError, match=sentence):
        NativeMTP(load_target(tmp_path / "model"), source=str(tmp_path / "base"))


def test_targets_of_other_families_are_refused(tmp_path):
    target = load_target(saved_targets.save(tmp_path))
    with pytest.raises(ValueError, match="whose MTP modules are unknown: use head=mtp"):
        NativeMTP(target, source=None)
