"""Import of published DFlash and DSpark drafters: fields and tensors that our own exports write otherwise, and refusals."""

import pytest
import torch

from tests import reference
from tests.exports import assert_same_drafts, bring_in, export, make_exact, refuse, rewrite

pytestmark = pytest.mark.slow

SLIDING = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 4}
WINDOWS = [  # as vLLM's loader takes them
    (SLIDING, {}, ([4, 4], True)),
    (SLIDING, {"causal": False}, ([4, 4], False)),
    (SLIDING, {"swa_window_size": 3}, ([3, 3], True)),
    ({**SLIDING, "is_causal": False}, {"causal": True}, ([4, 4], False)),
    ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 4}, {}, ([None, 4], True)),
    ({"sliding_window": 4}, {"use_swa": True}, ([4, 4], False)),
    ({"sliding_window": 4}, {"use_swa": True, "causal": True}, ([4, 4], True)),
    ({"sliding_window": 4}, {}, ([None, None], True)),
]


@pytest.mark.parametrize(("changes", "nested", "wanted"), WINDOWS)
def test_windows_of_published_block_drafters(target, tmp_path, changes, nested, wanted):
    exported = export(make_exact(target, "dflash"), "vllm", tmp_path / "out")
    nested = {**exported.layout.config["dflash_config"], **nested}
    rewrite(tmp_path / "out", **changes, dflash_config=nested)
    drafter = bring_in(tmp_path / "out", target)
    assert (drafter.windows, drafter.window_causal) == wanted


def test_dspark_whose_markov_head_is_no_table_becomes_one_with_a_table(target, tmp_path):
    export(make_exact(target, "dspark", True), "speculators", tmp_path / "out")
    table = (
        reference.read(tmp_path / "out")[1]["markov_head.markov_w1.weight"].float().double()
    )  # as checkpoints have it
    rewrite(tmp_path / "out", tensors={"markov_head.markov_w1.weight": table})
    drafter = bring_in(tmp_path / "out", target)
    assert drafter.markov_in.weight.shape == (61, 64)
    assert_same_drafts(tmp_path / "out", reference.block, drafter)


def test_published_dspark_with_the_fields_that_its_trainer_leaves_out(target, tmp_path):
    """Raw: the anchor guesses unless it is said. The confidence head reads the state alone, and its drafts stay the same."""
    export(make_exact(target, "dspark", True, {"markov_table": True}), "vllm", tmp_path / "out")
    _, tensors = reference.read(tmp_path / "out")
    narrow = tensors["confidence_head.proj.weight"][:, :32].clone()
    rewrite(tmp_path / "out", sample_from_anchor=None, markov_head_type=None, confidence_head_with_markov=None,
            tensors={"confidence_head.proj.weight": narrow})  # fmt: skip
    drafter = bring_in(tmp_path / "out", target)
    assert drafter.anchor_predicts and torch.equal(drafter.confidence_head.weight[:, :32], narrow)
    assert not drafter.confidence_head.weight[:, 32:].any()
    rewrite(tmp_path / "out", sample_from_anchor=True)
    assert_same_drafts(tmp_path / "out", reference.block, drafter)


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        ("vllm", {"markov_head_type": "gated"}, "of the type gated cannot be imported; vanilla can"),
        ("speculators", {"sample_from_anchor": None}, "write sample_from_anchor, true or false"),
        (
            "vllm",
            {"tensors": {"markov_head.markov_w1.weight": torch.zeros(60, 64).double()}},
            r"markov_w1.weight is \[60",
        ),
        (
            "vllm",
            {"tensors": {"embed_tokens.weight": torch.zeros(61, 32).double()}},
            "embed_tokens.weight is not the target's",
        ),
    ],
)
def test_dspark_that_cannot_be_imported_is_refused(target, tmp_path, form, changes, message):
    export(make_exact(target, "dspark"), form, tmp_path / "out")
    rewrite(tmp_path / "out", **changes)
    refuse(tmp_path / "out", target, message)
