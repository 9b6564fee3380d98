"""Exported folders: an engine (reference.py) draws the same drafts from them, and a mistake in a folder is detected."""

import dataclasses

import pytest
import torch

from specdec.export.eagle import shapes3
from specdec.export.folder import write_export
from specdec.export.layout import draft_from_all
from tests import reference
from tests.exports import (
    ALL_NORMS,
    CONTAINED,
    DEPTH,
    OTHER_BLOCK,
    REFERENCE_MEDUSA,
    SAFEAILAB1,
    SGLANG1,
    SGLANG3,
    TOKENS,
    UNBLANKED,
    assert_same_drafts,
    export,
    make_exact,
    make_form,
    make_provenance,
    with_vocabularies,
)
from tests.loops import follow

pytestmark = pytest.mark.slow

# What engines draw from a folder

# head, arguments, format, engine
SERVED = [
    ("eagle", {}, "vllm", reference.eagle1),
    ("eagle", {"block": OTHER_BLOCK}, "vllm", reference.eagle1),
    ("eagle", {}, "sglang", SGLANG1),
    ("eagle", {"fc_bias": True}, "sglang", SGLANG1),
    ("eagle", {}, "eagle", SAFEAILAB1),
    ("eagle", {"fc_bias": True}, "eagle", SAFEAILAB1),
    *(("eagle3", {}, form, reference.eagle3) for form in ("vllm", "eagle", "gguf", "speculators")),
    ("eagle3", {}, "sglang", SGLANG3),
    *(("eagle3", {switch: True}, "vllm", reference.eagle3) for switch in ALL_NORMS),
    *(("eagle3", {switch: True, "norm_output": True}, "sglang", SGLANG3) for switch in ("norm_features", "norm_before_fc")),
    ("eagle3", {"norm_before_fc": True, "norm_before_residual": True}, "gguf", reference.eagle3),
    ("eagle3", {**CONTAINED, "target_layers": [1, 4, 6]}, "speculators", reference.eagle3),
    ("eagle3", {"block": OTHER_BLOCK, "intermediate_size": 20}, "speculators", reference.eagle3),
    ("eagle3", {"block": OTHER_BLOCK, "intermediate_size": 20}, "vllm", reference.eagle3),
    ("eagle3", {"target_layers": [1, 4, 6]}, "vllm", reference.eagle3),
    ("eagle3", {"target_layers": [1, 4, 6]}, "sglang", SGLANG3),
    ("eagle3", {"target_layers": [1, 2, 4, 7], "norm_features": True}, "vllm", reference.eagle3),
    *(("eagle3", {"own_output": False}, form, reference.eagle3) for form in ("vllm", "speculators", "gguf")),
    *(("eagle3", {"num_layers": 3}, form, reference.eagle3) for form in ("vllm", "speculators")),
    *(("peagle", {"mask_token": 5}, form, reference.eagle3) for form in ("vllm", "speculators")),
    ("peagle", {"num_layers": 1, "target_layers": [1, 4]}, "vllm", reference.eagle3),
    *(("eagle3", {"window": 4}, form, reference.eagle3) for form in ("vllm", "speculators")),
    *((head, {"window": 4, "num_layers": 2, "full_layers": [1]}, "speculators", reference.eagle3) for head in ("eagle3", "peagle")),
    ("medusa", {}, "vllm", reference.medusa),
    ("medusa", {"num_blocks": 2}, "vllm", reference.medusa),
    ("medusa", {"num_blocks": 2, "own_output": True}, "vllm", reference.medusa),
    *(("medusa", own, "medusa", reader) for own in ({}, {"own_output": True})
      for reader in (reference.medusa, REFERENCE_MEDUSA)),
    *(("mtp", {"attention_bias": bias}, form, reference.mtp) for bias in (False, True) for form in ("vllm", "sglang")),
    ("mtp", {"zero_first": False}, "vllm", UNBLANKED),
    *(("dflash", {}, form, reference.block) for form in ("vllm", "gguf", "speculators")),
    *(("dflash", {"target_layers": [1, 5], "num_layers": 3}, form, reference.block) for form in ("vllm", "speculators")),
    *(("dflash", {"window": 4, "window_causal": causal}, form, reference.block)
      for causal in (False, True) for form in ("vllm", "speculators")),
    ("dflash", {"window": 4, "num_layers": 3, "full_layers": [1]}, "vllm", reference.block),
    ("dflash", {"window": 2, "full_layers": [1], "window_causal": False}, "speculators", reference.block),
    *(("dspark", {}, form, reference.block) for form in ("vllm", "gguf", "speculators")),
    ("dspark", {"anchor_predicts": False, "confidence": False}, "vllm", reference.block),
    ("dspark", {"markov_table": True}, "gguf", reference.block),
]  # fmt: skip


@pytest.mark.parametrize(("head", "arguments", "form", "reader", "reduced"), with_vocabularies(SERVED))
def test_engines_draw_the_same_drafts(target, tmp_path, head, arguments, form, reader, reduced):
    drafter = make_exact(target, head, reduced, arguments)
    exported = export(drafter, form, tmp_path / "out")
    assert not (exported.whole_vocabulary and not reduced)
    assert_same_drafts(tmp_path / "out", reader, draft_from_all(drafter) if exported.whole_vocabulary else drafter)


def test_engines_that_blank_position_0_draw_other_drafts(target, tmp_path):
    """Every later position attends to position 0, so all drafts differ.

    The difference is largest at slot 1, whose own row is position 0, and decreases with the distance.
    """
    drafter = make_exact(target, "mtp", arguments={"zero_first": False})
    export(drafter, "vllm", tmp_path / "out")
    served = reference.serve(target.model, TOKENS)
    differences = []
    for slot in (1, 2, 12):
        unblanked, blanked = (
            reference.mtp(tmp_path / "out", served, TOKENS, slot, 1, blank=blank).logits for blank in (False, True)
        )
        differences.append(float((unblanked - blanked).norm() / unblanked.norm()))
    assert differences[0] > differences[1] > differences[2] > 1e-3


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
    drafter = make_exact(target, "eagle3", True)
    export(drafter, "vllm", tmp_path / "out", dtype=torch.bfloat16)
    config, tensors = reference.read(tmp_path / "out")
    dtypes = {name: value.dtype for name, value in tensors.items() if name in ("d2t", "t2d", "lm_head.weight")}
    assert dtypes == {"d2t": torch.int64, "t2d": torch.bool, "lm_head.weight": torch.bfloat16}
    assert config["torch_dtype"] == "bfloat16"


# Manifests


def spoil(layout, *, without=(), tensors=None, config=None):
    weights = {**layout.tensors, **(tensors(layout.tensors) if tensors else {})}
    fields = {**layout.config, **(config or {})}
    weights, fields = ({k: v for k, v in d.items() if k not in without} for d in (weights, fields))
    return dataclasses.replace(layout, tensors=weights, config=fields)


def absolute(tensors: dict) -> dict:
    return {"d2t": tensors["d2t"] + torch.arange(len(tensors["d2t"]))}


def other_token(tensors: dict) -> dict:
    t2d = tensors["t2d"].clone()
    t2d[[int(t2d.nonzero()[0]), int((~t2d).nonzero()[0])]] = t2d[[int((~t2d).nonzero()[0]), int(t2d.nonzero()[0])]]
    return {"t2d": t2d}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"without": ["midlayer.hidden_norm.weight"]}, "^midlayer.hidden_norm.weight is missing$"),
        ({"without": ["d2t"]}, "d2t is missing"),
        ({"tensors": lambda t: {"fc.bias": t["norm.weight"]}}, "^fc.bias is not part of the layout$"),
        ({"tensors": lambda t: {"fc.weight": t["fc.weight"].T}}, r"fc.weight is \[96, 32\], not \[32, 96\]"),
        ({"tensors": absolute}, "d2t must hold offsets"),
        ({"tensors": lambda t: {"d2t": t["d2t"].flip(0)}}, "d2t must hold offsets"),
        ({"tensors": lambda t: {"d2t": t["d2t"].int()}}, "d2t must be int64"),
        ({"tensors": lambda t: {"d2t": t["d2t"] - 1 - t["d2t"][0]}}, "d2t must hold offsets"),
        ({"tensors": other_token}, "d2t and t2d name different tokens"),
        ({"without": ["rope_theta"]}, r"config.json lacks \['rope_theta'\]"),
        ({"config": {"bias": True}}, r"superfluous \['bias'\]"),
        ({"config": {"draft_vocab_size": 61}}, r"lm_head.weight is \[40, 32\], not \[61, 32\]"),
    ],
)  # fmt: skip
def test_a_mistake_in_a_layout_is_named_and_nothing_is_written(target, tmp_path, change, message):
    drafter = make_exact(target, "eagle3", True)
    form = make_form(drafter, "vllm")
    layout = spoil(form.layout, **change)
    if "config" in change and "draft_vocab_size" in change["config"]:
        layout = dataclasses.replace(layout, shapes=shapes3(layout.config))
    with pytest.raises(ValueError, match=message):
        write_export(dataclasses.replace(form, layout=layout), tmp_path / "out", dtype=torch.float32,
                      provenance=make_provenance(drafter))  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_mixed_dtypes_are_refused(target):
    layout = make_form(make_exact(target, "eagle"), "vllm").layout
    with pytest.raises(ValueError, match=r"one dtype, not \['torch.float32', 'torch.float64'\]"):
        spoil(layout, tensors=lambda t: {"fc.weight": t["fc.weight"].float()}).check()


def test_a_failure_while_writing_leaves_nothing(target, tmp_path):
    form = make_form(make_exact(target, "eagle"), "vllm")

    def full(folder):
        raise OSError("no space left on device")

    with pytest.raises(ValueError, match="Free some disk space"):
        write_export(dataclasses.replace(form, more=full), tmp_path / "out", dtype=torch.float32,
                      provenance=make_provenance(make_exact(target, "eagle")))  # fmt: skip
    assert list(tmp_path.iterdir()) == []
