"""Block drafters of targets whose embedding scales its rows (Gemma), with and without a cap of the logits.

vLLM, Speculators and llama.cpp give such a head the rows as they are. SGLang gives it the target's scaled embedding.
"""

import dataclasses
import json

import pytest
import torch

from specdec.heads.blocks import measure_embedding_scale
from specdec.target import attention
from specdec.target.model import Target
from tests.specdec.export.test_layouts import SELECTOR
from tests.support import reference
from tests.support.drafters import TABLE
from tests.support.exports import assert_given_back, assert_same_drafts, bring_in, export, make_exact, make_form
from tests.support.families import FAMILIES, make

HEADS = {
    "dflash": {"mask_token": 7},
    "dspark": {"mask_token": 7, "dependence": TABLE},
    "dflash2": {"mask_token": 7, "dependence": SELECTOR},
}
CASES = [(head, form) for head in HEADS for form in ("vllm", "sglang", "gguf", "speculators")]


@pytest.fixture(scope="module", params=["gemma4_text", "gemma4_text-shared"])
def gemma(request) -> Target:
    (family,) = (family for family in FAMILIES if str(family) == request.param)
    return Target(make(family, attention.IMPLEMENTATION).double(), name="tiny")


def read_as(form: str, target: Target):
    """The engine that reads a format, with the embedding and the logits that it has for this target."""
    scale, engine = (measure_embedding_scale(target), "sglang") if form == "sglang" else (1, "vllm")

    def read(folder, served, *arguments):
        served = dataclasses.replace(served, embed=scale * served.embed)
        drafts = reference.block(folder, served, *arguments, engine=engine)
        config = json.loads((folder / "config.json").read_text())
        if "selector_rank" in config.get("dflash_config", config):
            return drafts
        return dataclasses.replace(drafts, logits=target.shape_logits(drafts.logits))  # a map that keeps the order

    return read


@pytest.mark.parametrize(("head", "form"), CASES)
def test_engines_draw_the_same_drafts(gemma, tmp_path, head, form):
    drafter = make_exact(gemma, head, arguments=HEADS[head])
    assert measure_embedding_scale(gemma) > 3
    if head == "dflash2" and form in ("gguf", "speculators") and not gemma.shape_logits.plain:
        with pytest.raises(ValueError, match="scales or caps its logits"):
            make_form(drafter, form)
        return
    exported = export(drafter, form, tmp_path / "out")
    assert any("scaled embedding" in note for note in exported.notes) == (form == "sglang")
    assert_same_drafts(tmp_path / "out", read_as(form, gemma), drafter)
    back = bring_in(tmp_path / "out", gemma)
    assert back.embedding_scale == pytest.approx(measure_embedding_scale(gemma) if form == "sglang" else 1)
    assert_given_back(tmp_path / "out", gemma, tmp_path)
    for further in ("vllm", "sglang"):  # a head that expects scaled rows, for an engine that gives the plain ones
        if head != "dspark" or further == "sglang":  # its embedding is the target's, but a published one keeps its own
            export(back, further, tmp_path / further)
            assert_same_drafts(tmp_path / further, read_as(further, gemma), drafter)


def test_a_trained_mask_has_no_place_in_sglang(gemma, tmp_path):
    drafter = make_exact(gemma, "dflash")
    with pytest.raises(ValueError, match=r"an embedding of its own\. .*mask_token=ID"):
        make_form(drafter, "sglang")
    export(drafter, "vllm", tmp_path / "out")
    assert_same_drafts(tmp_path / "out", read_as("vllm", gemma), drafter)


def test_scaled_embeddings_are_not_for_parts_that_embed_drafts(gemma):
    with pytest.raises(ValueError, match=r"scales (its embeddings|or caps its logits)"):
        make_form(make_exact(gemma, "lilicorr", arguments={"mask_token": 7}), "vllm")


def test_a_head_drafts_as_it_trains(gemma):
    """Rows of the embedding are read without the target's scale, in training and decoding."""
    drafter = make_exact(gemma, "dflash", arguments=HEADS["dflash"])
    tokens = torch.tensor([[3, 5]])
    assert torch.equal(drafter.embed(tokens), gemma.embed.weight[tokens])
    assert torch.equal(drafter.mask_embedding, gemma.embed.weight[7])
