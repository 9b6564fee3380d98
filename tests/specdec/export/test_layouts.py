"""Exported folders: an engine (reference.py) draws the same drafts from them, and import gives the head back."""

import dataclasses

import pytest
import safetensors
import torch

from specdec.core.compile import join_products
from specdec.export.engines import FORMATS
from specdec.export.families import FAMILIES
from specdec.export.layout import drop_draft_vocab
from specdec.measuring.model_card import write_export
from tests.specdec.export.test_export import REFUSALS
from tests.support import reference
from tests.support.drafters import TABLE
from tests.support.exports import (
    ALL_NORMS,
    CONTAINED,
    DEPTH,
    OPENVINO3,
    OTHER_BLOCK,
    REFERENCE_MEDUSA,
    SAFEAILAB1,
    SGLANG1,
    SGLANG3,
    SGLANG_BLOCK,
    TOKENS,
    UNBLANKED,
    assert_equal_drafters,
    assert_given_back,
    assert_same_drafts,
    bring_in,
    export,
    make_exact,
    make_form,
    make_provenance,
)
from tests.support.loops import follow

pytestmark = pytest.mark.full

OTHER = {"block": OTHER_BLOCK, "intermediate_size": 20}
LAYERS = {"target_layers": [1, 4, 6]}
EAGLE3, BLOCK = reference.eagle3, reference.block
LILICORR = {"kind": "lilicorr", "top": 4, "hidden": 16, "factor": 12, "num_heads": 2}
SELECTOR = {"kind": "selector", "rank": 8, "top": 5, "table": True}
ALL_BLOCK = (("vllm", BLOCK), ("speculators", BLOCK), ("sglang", SGLANG_BLOCK))

# head, arguments, format, engine
CASES = [
    *(("eagle", arguments, "vllm", reference.eagle1) for arguments in ({}, OTHER)),
    *(("eagle", arguments, form, reader) for arguments in ({}, {"fc_bias": True})
      for form, reader in (("sglang", SGLANG1), ("eagle", SAFEAILAB1))),
    *(("eagle3", {}, form, EAGLE3) for form in ("vllm", "eagle", "gguf", "speculators")),
    *(("eagle3", {switch: True}, "vllm", EAGLE3) for switch in ALL_NORMS),
    ("eagle3", ALL_NORMS, "vllm", EAGLE3),
    ("eagle3", {"norm_before_fc": True, "norm_before_residual": True}, "gguf", EAGLE3),
    *(("eagle3", {switch: True, "norm_output": True}, "sglang", SGLANG3) for switch in ("norm_features",
        "norm_before_fc")),
    *(("eagle3", arguments, "sglang", SGLANG3) for arguments in ({}, LAYERS, {"num_layers": 3})),
    ("eagle3", {"window": 4}, "sglang", SGLANG3),
    *(("eagle3", arguments, "openvino", OPENVINO3) for arguments in ({}, LAYERS, OTHER, {"own_output": False})),
    *(("eagle3", {**CONTAINED, **layers}, "speculators", EAGLE3) for layers in ({}, LAYERS)),
    *(("eagle3", arguments, form, EAGLE3) for form in ("vllm", "speculators")
      for arguments in (OTHER, LAYERS, {"own_output": False}, {"num_layers": 3}, {"window": 4})),
    ("eagle3", {"target_layers": [1, 2, 4, 7], "norm_features": True}, "vllm", EAGLE3),
    ("eagle3", {"own_output": False}, "gguf", EAGLE3),
    *(("peagle", {"mask_token": 5, "num_layers": 2}, form, EAGLE3) for form in ("vllm", "speculators")),
    ("peagle", {"num_layers": 1, "target_layers": [1, 4]}, "vllm", EAGLE3),
    *((head, {"window": 4, "num_layers": 2, "full_layers": [1]}, form, EAGLE3)
      for head in ("eagle3", "peagle") for form in ("vllm", "speculators")),
    *(("medusa", arguments, "vllm", reference.medusa) for arguments in ({}, {"num_blocks": 2})),
    ("medusa", {"num_blocks": 2, "own_output": True}, "vllm", reference.medusa),
    *(("medusa", own, "medusa", reader) for own in ({}, {"own_output": True})
      for reader in (reference.medusa, REFERENCE_MEDUSA)),
    *(("mtp", {"attention_bias": bias}, form, reference.mtp) for bias in (False, True) for form in ("vllm", "sglang")),
    ("mtp", {"zero_first": False}, "vllm", UNBLANKED),
    *(("dflash", {}, form, BLOCK) for form in ("vllm", "gguf", "speculators")),
    *(("dflash", arguments, form, BLOCK) for form in ("vllm", "speculators")
      for arguments in ({"target_layers": [1, 5], "num_layers": 3}, {"num_drafts": 6, "num_layers": 1}, {"window": 4},
                        {"window": 4, "window_causal": False}, {"window": 2, "full_layers": [1],
                            "window_causal": False})),
    ("dflash", {"window": 4, "num_layers": 3, "full_layers": [1]}, "vllm", BLOCK),
    *(("dflash", {"mask_token": 7, **arguments}, "sglang", SGLANG_BLOCK)
      for arguments in ({}, {"window": 4}, {"window": 4, "window_causal": False})),
    *(("dspark", {"mask_token": 7, "dependence": TABLE, **arguments}, "sglang", SGLANG_BLOCK)
      for arguments in ({}, {"anchor_predicts": False, "confidence": False})),
    *(("dspark", {}, form, BLOCK) for form in ("vllm", "gguf", "speculators")),
    *(("dspark", {"mask_token": 7, "dependence": TABLE, **arguments}, form, reader) for form, reader in ALL_BLOCK
      for arguments in ({"window": 4}, {"window": 4, "window_causal": False})),
    *(("dspark", {"dependence": TABLE, "anchor_predicts": False, "confidence": False}, form, BLOCK)
      for form in ("vllm", "speculators")),
    *(("dspark", {"dependence": TABLE}, form, BLOCK) for form in ("vllm", "gguf", "speculators")),
    *(("dspark", {"dependence": {"kind": "markov", "rank": 8, "form": kind, "table": True}, "mask_token": 7}, form,
        reader)
      for kind in ("gated", "rnn") for form, reader in (("sglang", SGLANG_BLOCK), ("speculators", BLOCK))),
    *(("dflash2", {"dependence": {**SELECTOR, "table": False}, "mask_token": 7, **arguments}, form, reader)
      for arguments in ({}, {"convolution": 3}) for form, reader in (*ALL_BLOCK, ("gguf", BLOCK))),
    *(("dflash2", {"dependence": SELECTOR, "mask_token": 7}, form, reader) for form,
        reader in (*ALL_BLOCK, ("gguf", BLOCK))),
    *(("dflash2", {"mask_token": 7, **arguments}, form, reader)
      for arguments in ({"window": 4}, {"window": 4, "window_causal": False}) for form, reader in ALL_BLOCK),
    ("dflash2", {"window": 4, "num_layers": 3, "full_layers": [1]}, "vllm", BLOCK),
    *(("lilicorr", {"mask_token": 7, "dependence": {**LILICORR, **changes}, **arguments}, form, reader)
      for changes, arguments in (({}, {}), ({"hidden": None, "num_layers": 1}, {"convolution": 2}),
         ({"mlp_ratio": 1.7}, {"window": 4}))
      for form, reader in (("vllm", BLOCK), ("sglang", SGLANG_BLOCK))),
    *(("domino", {"mask_token": 7, **arguments}, "sglang", SGLANG_BLOCK)
      for arguments in ({}, {"anchor_predicts": True, "num_drafts": 5}, {"window": 4})),
]  # fmt: skip


@pytest.mark.parametrize("reduced", [False, True])
@pytest.mark.parametrize(("head", "arguments", "form", "reader"), CASES)
def test_engines_draw_the_same_drafts_and_import_gives_the_head_back(
    target, tmp_path, head, arguments, form, reader, reduced
):
    if reduced and head == "medusa" and "own_output" in arguments:
        pytest.skip("own LM heads of Medusa have the whole vocabulary only")
    if reduced and arguments.get("dependence") == SELECTOR:
        with pytest.raises(ValueError, match="the selector's table has a draft vocabulary's only"):
            make_form(make_exact(target, head, reduced, arguments), form)
        return
    drafter, out = make_exact(target, head, reduced, arguments), tmp_path / "out"
    exported = export(drafter, form, out)
    assert not (exported.whole_vocabulary and not reduced)
    served = drop_draft_vocab(drafter) if exported.whole_vocabulary else drafter
    assert_same_drafts(out, reader, served)
    if head not in ("dspark", "dflash2") or arguments.get("dependence", {}).get(
        "table"
    ):  # other ones come back with a table
        assert_equal_drafters(bring_in(out, target), drafter if (out / "token_map.pt").exists() else served)
    assert_given_back(out, target, tmp_path)


FIRST_CASES = {(head, form): arguments for head, arguments, form, _ in reversed(CASES)}


@pytest.mark.parametrize(("head", "form"), FIRST_CASES)
def test_a_joined_head_is_exported_as_before(target, tmp_path, head, form):
    """Parts of one memory, as heads have them that decode on CUDA, are written one by one."""
    drafter, contents = make_exact(target, head, arguments=FIRST_CASES[head, form]), []
    for out in (tmp_path / "plain", tmp_path / "joined"):
        exported = export(drafter, form, out)
        contents.append((out / exported.layout.weights).read_bytes())
        join_products(drafter)
    assert contents[0] == contents[1]


@pytest.mark.parametrize("form", ["vllm", "speculators"])
def test_engines_compute_the_same_confidence(target, tmp_path, monkeypatch, form):
    drafter, confidences = make_exact(target, "dspark"), []
    export(drafter, form, tmp_path / "out")
    logits = drafter.logits
    monkeypatch.setattr(drafter, "logits", lambda d, x: confidences.append(drafter.confidence(d, x)) or logits(d, x))
    follow(drafter, TOKENS, target.read(TOKENS[None], drafter.target_layers).features[0], 6, DEPTH)
    drafts = reference.block(tmp_path / "out", reference.serve(target.model, TOKENS), TOKENS, 6, DEPTH)
    torch.testing.assert_close(drafts.confidence, torch.cat(confidences).flatten(), atol=1e-9, rtol=1e-9)


def test_weights_are_cast_to_the_dtype_and_vocabulary_maps_are_not(target, tmp_path):
    export(make_exact(target, "eagle3", True), "vllm", tmp_path / "out", dtype=torch.bfloat16)
    config, tensors = reference.read(tmp_path / "out")
    dtypes = {value.dtype for name, value in tensors.items() if name not in ("d2t", "t2d")}
    assert dtypes == {torch.bfloat16} and config["torch_dtype"] == "bfloat16"
    assert (tensors["d2t"].dtype, tensors["t2d"].dtype) == (torch.int64, torch.bool)
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}  # without it, older transformers load nothing


def test_a_failure_while_writing_leaves_nothing(target, tmp_path):
    drafter = make_exact(target, "eagle")

    def full(folder, num_drafts):
        raise OSError("no space left on device")

    form = make_form(drafter, "vllm")
    form = dataclasses.replace(form, layout=dataclasses.replace(form.layout, write_companions=full))
    with pytest.raises(ValueError, match="Free some disk space"):
        write_export(form, tmp_path / "out", dtype=torch.float32, provenance=make_provenance(drafter))
    assert list(tmp_path.iterdir()) == []


def test_every_family_is_tried_in_every_format_that_takes_it():
    tried = {(head, form) for head, _, form, _ in CASES} | {(head, form) for head, _, _, form, _ in REFUSALS}
    takes = {(kind, name) for name, facts in FORMATS.items() for kind in facts.takes}
    elsewhere = {"native", "draft"}  # test_stitched.py, tests/specdec/heads/test_draft.py
    assert {(kind, name) for kind, name in takes if kind not in elsewhere} <= tried
    assert {kind for kind, family in FAMILIES.items() if family.read} <= {kind for kind, _ in takes}


def test_a_table_of_a_draft_vocabulary_gets_rows_for_all_tokens(target):
    """`drop_draft_vocab` makes both sides of the comparison above, so its rows are compared here."""
    drafter = make_exact(target, "dspark", True, {"mask_token": 7, "dependence": TABLE})
    rows = make_form(drafter, "sglang").layout.tensors["markov_head.markov_w2.weight"]
    own = drafter.dependence.after.weight
    assert torch.equal(rows[drafter.draft_to_target], own) and rows.count_nonzero() == own.count_nonzero()
