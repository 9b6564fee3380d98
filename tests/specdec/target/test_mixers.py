"""Recurrent and convolution layers read packs document by document, and go on from their states by several tokens."""

import pytest
import torch

from specdec.core import fast
from specdec.core.masks import Packed
from specdec.heads.eagle import Eagle3
from specdec.target import attention
from specdec.target.model import Target
from specdec.text.conversations import Row
from tests.support.drafters import load_head
from tests.support.families import FAMILIES, Family, find_family, make
from tests.target_table import make_family_target
from train.data.batches import collate
from train.features.outputs import ComputedFeatures
from train.objective.objective import Objective

RECURRENT = [family for family in FAMILIES if family.recurrent]
INDEX = torch.tensor([[0] * 9 + [1] * 20 + [-1] * 3, [2] * 3 + [3] * 14 + [4] * 12 + [-1] * 3])


def make_wide_target(family: Family) -> Target:
    """The target in float64, where transformers' grouped products of experts do not compute."""
    model = make(family, attention.IMPLEMENTATION).double()
    model.set_experts_implementation("eager")
    return Target(model, name=str(family))


@pytest.mark.parametrize("family", RECURRENT, ids=str)
def test_packs_in_one_call_equal_each_document_alone(family):
    """In float64; norms and states of some families stay in float32. Padding and similar lengths are in the packs."""
    target = make_wide_target(family)
    tokens = torch.randint(1, 60, INDEX.shape, generator=torch.Generator().manual_seed(1))
    forwards = [mixer.forward for mixer in target.mixers.values()]
    with fast.force_paths("varlen"):
        assert target.reads_segments
        states = Packed.from_index(INDEX, keeps_states=True).read(
            tokens,
            lambda pack, positions, segments, rows: (
                target.read(pack, (), positions=positions, segments=segments, documents=rows).final
            ),
        )
    for document in range(5):
        inside = document == INDEX
        alone = target.read(tokens[inside][None], ()).final[0]
        torch.testing.assert_close(states[inside], alone, atol=1e-6, rtol=0)
    assert forwards == [mixer.forward for mixer in target.mixers.values()]


@pytest.mark.parametrize("paths", [(), ("varlen",)], ids=["groups", "one call"])
@pytest.mark.parametrize("name", ["qwen3_5_text", "nemotron_h", "lfm2", "falcon_h1"])
def test_packs_give_an_eagle_head_the_losses_of_one_text_a_row(name, paths):
    target = make_family_target(find_family(name))
    rows = []
    for num in (9, 20, 11, 14):
        tokens = [(7 * place + num) % 60 + 1 for place in range(num)]
        rows.append(Row(str(num), "all", tokens, [place > 3 for place in range(num)]))
    torch.manual_seed(0)
    head = Eagle3(target)
    objective = Objective(head, **{**load_head("eagle3")["objective"], "depth": 2})
    results = []
    for packs in ([[row] for row in rows], [rows[:2], rows[2:]]):
        batch = collate(packs, length=32, pad_token=0)
        target.__dict__.pop("reads_segments", None)
        try:
            with fast.force_paths(*(paths if len(packs) == 2 else ())):
                assert target.reads_segments == (len(packs) == 2 and paths != ())
                loss = objective(batch, ComputedFeatures(target, head.target_layers)(batch))
        finally:
            target.__dict__.pop("reads_segments", None)
        gradient = torch.autograd.grad(loss.total, [value for value in head.parameters() if value.requires_grad])
        results.append((loss.total, *gradient))
    for packed, alone in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(packed, alone, atol=1e-3, rtol=1e-4)
