"""Engines run a tuned native MTP module, which was written back into its model, as this project does."""

import json

import pytest
import transformers

from benchmarks import check_engines
from benchmarks.check_engines import CheckOptions, ServedHead
from specdec.heads.native import NativeMTP
from specdec.measuring import model_card
from specdec.target.model import Target
from tests.benchmarks import tiny_heads
from tests.benchmarks.test_engines import engines, is_faithful
from tests.native import save_native
from tests.saved_targets import edit
from tests.support import REAL_TARGET, ROOT, load_head

SIZES = {"hidden_size": 128, "head_dim": 32, "initializer_range": 0.15}
FIELDS = {
    "glm4_moe": {"moe_intermediate_size": 64, "first_k_dense_replace": 1},
    "qwen3_5_text": {"linear_key_head_dim": 32, "linear_value_head_dim": 32},
    # the sizes that vLLM's latent attention has on a CPU
    "deepseek_v3": {"head_dim": 64, "moe_intermediate_size": 64, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 64, "v_head_dim": 64},
}  # fmt: skip


def make_head(folder, family: str):
    """A target with an MTP module that drafts its answers without a mistake, and a copy with noise on the weights."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(REAL_TARGET)
    save_native(folder, family, fields={**SIZES, **FIELDS[family], "vocab_size": len(tokenizer)})
    tokenizer.save_pretrained(folder)
    if family == "deepseek_v3":  # what transformers does not write, and vLLM reads
        edit(folder, topk_method="noaux_tc", scoring_func="sigmoid")
    target = Target.load(str(folder), dtype="float32")
    prompts = tiny_heads.make_prompts(target, 4, num_tokens=32)
    drafter = NativeMTP(target)
    document = {"_target_": "specdec.tiny.Tiny", "versions": {"specdec": "0"}, "reads_layers": [target.num_layers]}
    about = (document, target.name, target.fingerprint(), None, {}, "its own answers", "other", tiny_heads.NUM_DRAFTS)
    head = ServedHead(family, drafter, prompts, set(), model_card.Provenance("tiny", *about))
    options = CheckOptions("", max_new_tokens=24)

    def share_right(drafter) -> float:
        decoding = check_engines.decode_here(drafter, head, options)
        right = [check_engines.agree(ids, decoding.answers[row][at:]) for (row, at), ids in decoding.drafted.items()]
        return sum(right) / len(right)

    rows, objective = tiny_heads.answered(target, prompts, 32), load_head("native_mtp")["objective"]
    right = tiny_heads.overfit(drafter, rows, objective, depth=tiny_heads.NUM_DRAFTS, share_right=share_right)
    heads = {"right": right, "noisy": tiny_heads.perturbed(right, share_right=share_right)}
    return {kind: ServedHead(family, each, prompts, set(), head.provenance) for kind, each in heads.items()}, options


@engines
@pytest.mark.parametrize(
    "family, engine, kinds",
    [
        ("glm4_moe", "stitched", ("right", "noisy")),
        # llama.cpp reads one slot more, the first token with a state of zeros, so noisy drafts differ
        ("qwen3_5_text", "stitched.gguf", ("right",)),
    ],
)
def test_a_stitched_module_drafts_as_it_was_trained(tmp_path, monkeypatch, family, engine, kinds):
    monkeypatch.chdir(ROOT)
    heads, chosen = make_head(tmp_path / "model", family)
    for kind in kinds:
        row = check_engines.check_head(heads[kind], engine, tmp_path / kind, chosen)
        assert is_faithful(row, exact=kind == "right"), row
        assert kind == "right" or row["accepted"] < row["offered"]


@engines
def test_vllm_loads_a_stitched_module_with_latent_attention_and_experts(tmp_path, monkeypatch):
    """Its latent attention on a CPU gives other logits than transformers, for the target too, so drafts are not compared."""
    monkeypatch.chdir(ROOT)
    heads, chosen = make_head(tmp_path / "model", "deepseek_v3")
    row = check_engines.check_head(heads["right"], "stitched", tmp_path / "out", chosen)
    assert row["offered"] > 0 and json.loads((tmp_path / "out" / "config.json").read_text())["num_nextn_predict_layers"]
