"""Exported folders: the heads and targets that a format refuses, the fields of config.json, and the model card."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.candidate_generator import AssistedCandidateGenerator

from specdec.export import block_drafter
from specdec.export.engines import ENGINES, check_target
from specdec.export.families import FAMILIES
from specdec.export.layout import drop_draft_vocab
from specdec.heads.dflash import BlockDrafter
from specdec.heads.draft import Draft
from specdec.heads.eagle import Eagle, Eagle3
from specdec.heads.medusa import Medusa
from specdec.heads.mtp import MTP
from specdec.measuring.model_card import make_card, write_export
from specdec.measuring.record import Record
from specdec.measuring.report import Report
from specdec.target import attention
from specdec.target.model import Target
from tests.support.drafters import make_drafter
from tests.support.exports import (
    ALL_NORMS,
    REPORT,
    export,
    make_exact,
    make_form,
    make_medusa2,
    make_provenance,
)
from tests.support.records import make_document
from tests.support.targets import make_target, save_target

OTHER_ROPE = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    }
}


# Refusals


REFUSALS = [
    *((head, False, {}, form, f"format={form} takes .*Formats that take it: {others}")
      for head, form, others in (
           ("hydra", "vllm", "safetensors, which takes all"),
           ("medusa", "sglang", "medusa, vllm"), ("mtp", "gguf", "sglang, vllm"),
           ("eagle", "speculators", "eagle, sglang, vllm"), ("dspark", "eagle", "gguf, sglang, speculators, vllm"),
          ("eagle", "medusa", "eagle, sglang, vllm"), ("eagle3", "transformers", "eagle, gguf, openvino, sglang"))),
    *(("medusa2", False, {}, form, "merged_target=DIR") for form in ("vllm", "medusa")),
    ("medusa2", False, {}, "sglang", r"and not Medusa2 \(medusa2\)"),
    ("eagle3", False, {}, "published", "format=published is for heads that other projects published"),
    ("eagle3", False, {"norm_features": True, "norm_before_fc": True}, "speculators", "not both: take format=vllm"),
    ("eagle", False, {"block": OTHER_ROPE}, "eagle", "no rotary embedding of the type llama3: take format=vllm"),
    *((head, False, {"fuse": True}, form, "Train with fuse=false")
      for head in ("dflash", "dspark") for form in ("vllm", "gguf", "speculators")),
    ("dspark", False, {"dependence": None}, "vllm", "without a Markov head"),
    *(("dspark", False, {"dependence": {"kind": "markov", "rank": 4, "form": kind}}, form,
        f"{engine} has plain Markov heads only")
      for kind in ("gated", "rnn") for form, engine in (("vllm", "vLLM 0.32"), ("gguf", "llama.cpp's converter"))),
    ("dspark", False, {"dependence": {"kind": "markov", "rank": 4, "form": "rnn"}, "anchor_predicts": False},
        "speculators",
     "reads the anchor twice where anchor_predicts=false: take format=sglang"),
    ("dspark", False, {"convolution": 2}, "vllm", "the convolution with a selector or LiLiCorr only"),
    *(("dflash2", False, changes, "vllm", "train with dependence.kind=selector convolution=2 anchor_predicts=false")
      for changes in ({"convolution": None}, {"dependence": None}, {"anchor_predicts": True})),
    ("dflash2", False, {"confidence": True}, "vllm", "confidence heads for DSpark only"),
    ("dflash2", False, {}, "gguf", "272 numbers do not fit into 32: train with a smaller dependence.top"),
    ("lilicorr", False, {"anchor_predicts": True}, "vllm", "LiLiCorr with an anchor that predicts nothing"),
    *(("lilicorr", False, {}, form, "Formats that take it: sglang, vllm") for form in ("gguf", "speculators")),
    ("domino", False, {}, "vllm", "format=vllm takes .*Formats that take it: sglang"),
    *(("mtp", False, {"num_modules": 5}, form, "Train with num_modules=null") for form in ("vllm", "sglang")),
    ("mtp", False, {"intermediate_size": 20}, "vllm",
        "intermediate_size is 48 and not 20. Train with the target's sizes"),
    *(("eagle3", False, {"target_layers": layers}, form, "Train with other target_layers")
      for layers in ([2, 5, 8], [0, 3, 5]) for form in ("vllm", "sglang", "gguf", "speculators", "openvino")),
    ("dflash", False, {"target_layers": [2, 8]}, "vllm", "Train with other target_layers"),
    ("eagle", False, {"fc_bias": True}, "vllm", "take format=sglang or eagle"),
    *(("medusa", True, {"own_output": True}, form, "vocab_size=null or own_output=false")
      for form in ("vllm", "medusa")),
    ("medusa", False, {"num_blocks": 2}, "medusa", "num_blocks=1, or take format=vllm"),
    *(("eagle3", False, {switch: True}, form, "which this head was trained with: take format=vllm")
      for switch in ALL_NORMS for form in ("eagle", "openvino")),
    ("eagle3", False, {"own_embedding": True}, "openvino", "gives a head the target's embedding, and this head has"),
    ("eagle3", False, {"block": {"qk_norm": True}}, "openvino", "has no norms of queries and keys"),
    ("eagle3", False, {"block": {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 2.0}}},
        "openvino", "no rotary embedding of the type dynamic"),
    *(("eagle3", False, {switch: True}, "gguf", "which this head was trained with: take format=vllm")
      for switch in ("norm_features", "norm_output")),
    ("eagle3", False, {"norm_before_residual": True}, "sglang", "take format=vllm"),
    ("eagle3", False, {"target_layers": [1, 4, 6]}, "eagle", "Train with target_layers=null"),
    *(("eagle3", False, {"target_layers": [1, 2, 4, 6]}, form, "exactly three hidden states")
      for form in ("gguf", "openvino")),
    *(("eagle3", False, {"num_layers": 2}, form,
        "has no EAGLE-3 of several layers: take format=vllm or speculators")
      for form in ("eagle", "gguf", "openvino")),
    ("dspark", False, {}, "sglang", "reads none for DSpark, .*train with head.drafter.mask_token=ID"),
    ("dflash", False, {}, "sglang",
        "over a row of the target's embedding, where .* has no unused one: take format=vllm"),
    *(("peagle", False, {}, form, "has no P-EAGLE: take format=vllm or speculators") for form in ("eagle",
        "sglang", "gguf", "openvino")),
    ("peagle", False, {"norm_output": True}, "speculators", "take format=vllm"),
    *((head, False, {"window": 4, "window_causal": True}, "gguf", "layers with a window do not: train with")
      for head in ("dflash", "dspark")),
    ("dflash", False, {"window": 4, "full_layers": [1]}, "speculators", "vLLM takes all layers .* as causal"),
    ("eagle3", False, {"window": 4, "num_layers": 2, "full_layers": [1]}, "sglang",
        "one window for all layers of a head"),
]  # fmt: skip


@pytest.mark.parametrize(("head", "reduced", "arguments", "form", "message"), REFUSALS)
def test_heads_that_an_engine_cannot_serve_are_refused(target, head, reduced, arguments, form, message):
    drafter = make_medusa2(make_target(6)) if head == "medusa2" else make_exact(target, head, reduced, arguments)
    with pytest.raises(ValueError, match=message):
        make_form(drafter, form)


def test_an_existing_folder_is_never_overwritten(target, tmp_path):
    out = tmp_path / "out"
    export(make_exact(target, "eagle"), "vllm", out)
    before = (out / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match="exists; choose another out=DIR or delete it"):
        export(make_exact(target, "eagle3"), "vllm", out)
    assert (out / "model.safetensors").read_bytes() == before


# Targets that engines have not


def target_of(family: str, *, recurrent: bool = False, plain: bool = True, bias: bool = False):
    return SimpleNamespace(
        config=SimpleNamespace(model_type=family),
        recurrent=recurrent,
        shape_logits=SimpleNamespace(plain=plain),
        lm_head=SimpleNamespace(bias=torch.zeros(1) if bias else None),
    )


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kind", FAMILIES)
def test_every_engine_has_llama_targets(engine, kind):
    assert check_target(engine, kind, target_of("llama")) == ()


@pytest.mark.parametrize(
    ("engine", "kind", "family"),
    [("SGLang", "eagle3", "gpt2"), ("SGLang", "eagle3", "lfm2"), ("SGLang", "dflash", "qwen2"), ("SGLang", "dspark",
        "qwen2"),
     ("SGLang", "eagle", "mixtral"), ("vLLM", "eagle3", "mamba"), ("SafeAILab's code", "eagle", "gemma")],
)  # fmt: skip
def test_pairs_that_no_engine_loads_are_refused(engine, kind, family):
    message = rf"{engine} does not serve .* {family} target .* It does with .*llama.*safetensors"
    with pytest.raises(ValueError, match=message):
        check_target(engine, kind, target_of(family, recurrent=family == "mamba"))


def test_pairs_that_may_load_and_what_surrounds_the_lm_head_get_a_note():
    (note,) = check_target("vLLM", "eagle3", target_of("mixtral"))
    assert "Not known to load" in note
    assert "Not known to load" in check_target("llama.cpp", "dflash", target_of("qwen2"))[0]
    for kind, family in (("dflash", "lfm2"), ("dspark", "kimi_linear")):  # SGLang has lists of its own for these
        assert check_target("SGLang", kind, target_of(family)) == ()
    assert "recurrent layers" in check_target("vLLM", "peagle", target_of("qwen3_next", recurrent=True))[0]
    assert check_target("vLLM", "draft", target_of("mamba", recurrent=True)) != ()
    for target, words in ((target_of("llama", plain=False), "draft greedily"), (target_of("llama", bias=True), "bias")):
        assert any(words in note for note in check_target("vLLM", "mtp", target))
        assert check_target("vLLM", "draft", target) == ()  # it has an LM head of its own


def test_a_mask_for_sglang_has_a_row_that_nothing_else_reads(monkeypatch):
    target = make_target(61)
    drafter = make_exact(target, "dflash")

    class Tokenizer(list):
        def get_added_vocab(self):
            return {"<|end|>": 60, "<|reserved_7|>": 59, "<|reserved_6|>": 58}

    for length, row in ((60, 60), (61, 59)):  # a row behind the tokenizer's, or a reserved token
        monkeypatch.setattr(
            block_drafter, "load_tokenizer", lambda *args, length=length, **kwargs: Tokenizer(range(length))
        )
        layout = make_form(drafter, "sglang").layout
        assert (
            layout.config["dflash_config"]["mask_token_id"]
            == layout.pickles["mask_embedding.pt"]["mask_token_id"]
            == row
        )
    monkeypatch.setattr(target.lm_head, "weight", target.embed.weight)
    with pytest.raises(ValueError, match=r"where .* has its LM head"):  # SGLang would change the target's own answers
        make_form(drafter, "sglang")
    drafter = make_exact(target, "dflash", arguments={"mask_token": 7})
    assert torch.equal(drafter.mask_embedding, target.embed.weight[7]) and not drafter.mask_embedding.requires_grad
    frozen = make_form(drafter, "sglang").layout
    assert frozen.config["dflash_config"]["mask_token_id"] == 7 and not frozen.pickles
    with pytest.raises(ValueError, match="mask_token=61 must be a token of the target, below 61"):
        BlockDrafter(target, mask_token=61)


def test_engines_that_were_not_run_get_lines_where_nothing_speaks_against_it(target):
    """TensorRT-LLM: a chain of 3, hidden states by number of output, and no line where it would draft otherwise."""
    settings, other_arguments = {}, {"norm_before_residual": True}
    cases = (
        ("eagle3", {}),
        ("eagle3", {"target_layers": [1, 4, 6]}),
        ("dflash", {"mask_token": 7}),
        ("dflash", {}),
        ("eagle3", other_arguments),
    )
    for head, arguments in cases:
        form = make_form(make_exact(target, head, arguments=arguments), "vllm")
        line = form.launch_lines(target="T", out="D", num=3).get("TensorRT-LLM, not run")
        assert (line is None) == any("No line for TensorRT-LLM: engines of NVIDIA" in note for note in form.notes)
        settings[head, *arguments] = line and json.loads(line.split("'")[1])["speculative_config"]
    plain = {"decoding_type": "Eagle3", "max_draft_len": 3, "speculative_model": "D"}
    assert settings["eagle3",] == plain
    assert settings["eagle3", "target_layers"] == {**plain, "eagle3_layers_to_capture": [0, 3, 5]}
    assert settings["dflash", "mask_token"] == {**plain, "decoding_type": "DFlash"}
    assert settings["dflash",] is settings["eagle3", "norm_before_residual"] is None


@pytest.fixture(scope="module")
def granite() -> Target:
    torch.manual_seed(0)
    config = AutoConfig.for_model("granite", vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=8,
                                  num_attention_heads=4, num_key_value_heads=2, bos_token_id=None, eos_token_id=[1, 2],
                                  pad_token_id=None, logits_scaling=4.0, embedding_multiplier=2.0)  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention.IMPLEMENTATION)
    return Target(model.double(), name="tiny")


@pytest.mark.parametrize(("head", "form"), [(Eagle, "vllm"), (Eagle3, "vllm"), (Eagle3, "speculators"), (Medusa,
   "vllm"),
                                            (MTP, "vllm"), (BlockDrafter, "vllm")])  # fmt: skip
def test_heads_of_scaled_targets_are_exported(granite, head, form):
    made = make_form(head(granite).double(), form)
    assert any("scales or caps" in note for note in made.notes)
    if "eos_token_id" in made.layout.config:
        assert made.layout.config["eos_token_id"] == [1, 2] and made.layout.config["pad_token_id"] == 0


def test_exports_that_a_target_does_not_have(granite):
    arguments = {"dependence": {"kind": "selector", "rank": 4, "top": 3}, "convolution": 2, "mask_token": 7}
    for form in ("gguf", "speculators"):
        with pytest.raises(ValueError, match=r"scales or caps its logits, and .* has no place for that"):
            make_form(BlockDrafter(granite, **arguments), form)
    with pytest.raises(ValueError, match=r"scales or caps its logits\. This head adds its scores behind that"):
        make_form(make_exact(granite, "lilicorr", arguments={"mask_token": 7}), "vllm")
    with pytest.raises(ValueError, match="SGLang does not serve this kind of head with a granite target"):
        make_form(Eagle3(granite), "sglang")


def test_shallow_targets_name_their_hidden_states():
    config = make_form(Eagle3(make_target(61, num_layers=5)).double(), "vllm").layout.config
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]
    with pytest.raises(ValueError, match=r"reads hidden states \[0, 1, 2\]"):
        make_form(Eagle3(make_target(61, num_layers=3)), "vllm")


def test_targets_that_scale_their_embeddings_or_rotate_a_part_of_each_attention_head(monkeypatch):
    target = make_target(11)
    heads = {head: make_exact(target, head) for head in ("eagle", "eagle3", "lilicorr")}
    unscaled = target.embed
    monkeypatch.setattr(target, "embed", lambda tokens: 2 * unscaled(tokens))
    monkeypatch.setattr(target.embed, "weight", unscaled.weight, raising=False)
    make_form(heads["eagle3"], "vllm")
    for head in ("eagle", "lilicorr"):
        with pytest.raises(ValueError, match="scales its embeddings"):
            make_form(heads[head], "vllm")
    monkeypatch.undo()
    target.config.rope_parameters = {**target.config.rope_parameters, "partial_rotary_factor": 0.5}
    assert "partial_rotary_factor" not in make_exact(target, "eagle").config.rope_parameters
    with pytest.raises(ValueError, match=r"rope_parameters is .*partial_rotary_factor"):
        make_form(make_exact(target, "mtp"), "vllm")


# Fields of config.json; all of them are in the golden record, and tests/support/reference.py reads them as engines do

LAYERS = {"target_layers": [1, 4, 6]}


@pytest.mark.parametrize("end", [7, [9, 7]])
def test_block_drafters_number_outputs_and_put_their_mask_at_an_end_token(end):
    target = make_target(61)
    target.config.eos_token_id = end
    mask = end if isinstance(end, int) else end[0]
    plain = make_form(make_exact(target, "dflash", True, LAYERS), "vllm").layout
    assert plain.config["dflash_config"] == {
        "mask_token_id": mask, "target_layer_ids": [0, 3, 5], "causal": False}  # fmt: skip
    assert plain.config["block_size"] == 5 and plain.config["layer_types"] == ["full_attention"] * 2
    assert plain.config["num_target_layers"] == 8 and plain.pickles["mask_embedding.pt"]["mask_token_id"] == mask
    contained = make_form(make_exact(target, "dflash", True, LAYERS), "speculators").layout.config
    assert contained["aux_hidden_state_layer_ids"] == [1, 4, 6] and contained["mask_token_id"] == mask
    drafter = make_exact(target, "dspark", True, LAYERS)
    layout = make_form(drafter, "vllm").layout
    assert layout.config["target_layer_ids"] == [0, 3, 5] and layout.config["mask_token_id"] == mask
    moved = (layout.tensors["embed_tokens.weight"] != target.embed.weight).any(dim=1)
    assert moved.nonzero().flatten().tolist() == [mask] and layout.config["block_size"] == 4
    assert torch.equal(layout.tensors["embed_tokens.weight"][mask], drafter.mask_embedding)


def test_a_markov_head_of_a_draft_vocabulary_gets_a_row_for_every_token():
    """Its rows are at their tokens, and all other rows are zero."""
    drafter = make_drafter(make_target(61), "dspark", True)
    vocab, rows = drafter.draft_to_target, drafter.dependence.after.weight.clone()
    after = drop_draft_vocab(drafter).dependence.after
    assert len(vocab) == len(rows) < 61 and after.out_features == len(after.weight) == 61
    assert torch.equal(after.weight[vocab], rows) and rows.any(dim=1).all()
    assert after.weight.any(dim=1).sum() == len(vocab)
    assert torch.equal(drafter.dependence.after.weight, rows)


# The card


@pytest.mark.parametrize("form", ["vllm", "sglang", "speculators", "eagle"])
def test_the_card_states_provenance_figures_and_commands(target, tmp_path, form):
    drafter = make_exact(target, "eagle3", True)
    engine_form, out = make_form(drafter, form), tmp_path / "out"
    served = Record.model_validate_json(json.dumps(make_document()))
    given = {"training_data": "answers.jsonl", "license": "apache-2.0", "num_drafts": 2}
    provenance = make_provenance(drafter, report=Report.from_json(REPORT), records={"": served}, **given)
    write_export(engine_form, out, dtype=torch.float32, provenance=provenance)
    card = (out / "README.md").read_text()
    for text in ("license: apache-2.0", "base_model: tiny", "answers.jsonl", "fingerprint f00",
       "| hidden states read | 2, 4, 5 |",
                 "| checkpoint | run/step |", "8 prompts, temperature 0, chain of 3 | 1.50 (1.25 .. 1.75)",
                 "repeat 8/8, not checked: control | 1.75 (1.60 .. 1.90); 1.50 (1.40 .. 1.60) times plain |",
                 "With 2 drafts a round:", str(out)):  # fmt: skip
        assert text in card
    lines = engine_form.launch_lines(target="tiny", out=str(out), num=2)
    assert lines and all(f"{engine}:\n\n```\n{line}\n```" in card for engine, line in lines.items())
    assert not any(mark in card for mark in ("<target>", "<out>", "<num>", "<num+1>"))
    assert not any(mark in line for mark in ("<target>", "<out>", "<num>", "<num+1>") for line in lines.values())
    assert engine_form.engine_settings("DIR", 2).get("model", "DIR") == "DIR"


def test_the_card_states_missing_measurements_and_differences(target):
    drafter = make_exact(target, "mtp", True, {"zero_first": False})
    card = make_card(make_provenance(drafter), {"vllm": make_form(drafter, "vllm")}, out="DIR")
    for text in ("Not measured.", "from a reduced vocabulary and this engine from the whole one",
       "first row of a prompt",
                 "--hf-overrides", '"method": "mtp", "model": "DIR", "num_speculative_tokens": 3'):  # fmt: skip
        assert text in card


def test_the_number_of_drafts_is_one_that_the_head_has(target):
    assert make_form(make_exact(target, "medusa"), "vllm").limit_drafts(9) == 4
    drafter = make_exact(target, "dflash")
    assert {make_form(drafter, name).limit_drafts(1) for name in ("vllm", "speculators", "gguf")} == {drafter.depth}


@pytest.mark.parametrize("num", [2, 5])
def test_generate_of_transformers_drafts_as_many_tokens_as_the_launch_line_says(tmp_path, monkeypatch, num):
    """An assistant that is the target itself accepts all; its own schedule and threshold would change the number."""
    target = save_target(tmp_path / "target")
    drafter = Draft(target, num_layers=1).eval()
    form = make_form(drafter, "transformers")
    provenance = replace(make_provenance(drafter), num_drafts=num)
    write_export(form, tmp_path / "out", dtype=torch.float32, provenance=provenance)
    line = form.launch_lines(target=target.name, out=str(tmp_path / "out"), num=num)["transformers"]
    drafted, draft = [], AssistedCandidateGenerator.get_candidates

    def note(self, input_ids, *arguments, **options):
        found = draft(self, input_ids, *arguments, **options)
        drafted.append(found[0].shape[1] - input_ids.shape[1])
        return found

    monkeypatch.setattr(AssistedCandidateGenerator, "get_candidates", note)
    model = AutoModelForCausalLM.from_pretrained(target.name)
    inputs = {"input_ids": torch.tensor([[5, 6, 7]]), "do_sample": False, "max_new_tokens": 24, "eos_token_id": None}
    exec(line, {"AutoModelForCausalLM": AutoModelForCausalLM, "model": model, "inputs": inputs})
    assert len(drafted) > 3 and set(drafted[:-2]) == {num} and max(drafted) == num


@pytest.mark.parametrize("window, option", [(None, ""), (4, " --speculative-draft-window-size 4")])
@pytest.mark.parametrize("head", ["eagle", "eagle3", "mtp"])
def test_sglang_is_told_of_a_window_by_a_flag(target, head, window, option):
    form = make_form(make_exact(target, head, False, {"window": window}), "sglang")
    line = form.launch_lines(target="T", out="O", num=3)["SGLang"]
    assert line.endswith(f"--speculative-num-steps 3 --speculative-eagle-topk 1{option}")
    noted = "Layers of this head see 4 positions, and the first draft of a round sees all in SGLang" in str(form.notes)
    assert noted == (window is not None and head != "eagle3")


@pytest.mark.parametrize(
    "head, form",
    [
        *(("eagle3", form) for form in ("eagle", "gguf", "openvino")),
        *((head, "vllm") for head in ("eagle", "mtp")),
        ("dflash", "gguf"),
    ],
)
def test_an_engine_without_windows_serves_the_head_and_says_what_that_costs(target, head, form):
    """With the folder that it had without a window."""
    arguments = {"window_causal": False} if head == "dflash" else {}
    limited, whole = (
        make_form(make_exact(target, head, False, {"window": window, **arguments}), form) for window in (4, None)
    )
    (note,) = [note for note in limited.notes if note not in whole.notes]
    assert note.startswith("Layers of this head see 4 positions, and every draft sees all in ")
    assert limited.engines == whole.engines and limited.layout.config.keys() >= whole.layout.config.keys()
