"""Medusa-2 adapts its target in place: decoding uses the adapted target, and the original can still be read."""

import pytest
import torch
from hydra.utils import instantiate

from specdec import checkpoint
from specdec.core.tree import TreeShape
from specdec.heads.eagle import Eagle
from specdec.heads.medusa import Medusa2
from specdec.proposers.heads import HeadProposer
from specdec.target.adapter import disable_adapter
from specdec.text.conversations import Row
from tests.support.decoding import chain_of, greedy, random_tokens
from tests.support.drafters import load_head
from tests.support.loops import follow
from tests.support.targets import make_target
from train.data.batches import collate
from train.objective.objective import Objective

pytestmark = pytest.mark.full

CONFIG = load_head("medusa2")
ROW = Row("0", "all", random_tokens(0, 14, 6), [False] * 4 + [True] * 10)


def make():
    """A drafter with random heads and a random adapter, and the target's final states before the adapter."""
    target = make_target(6)
    before = target.read(torch.tensor([ROW.tokens]), ()).final
    drafter = instantiate(CONFIG["drafter"], target, vocab=None).double()
    assert torch.equal(target.read(torch.tensor([ROW.tokens]), ()).final, before)  # B = 0: nothing changed yet
    torch.manual_seed(1)
    for parameter in drafter.parameters():
        parameter.data = torch.randn_like(parameter) * 0.3
    return drafter, before


def test_the_adapter_changes_the_target_and_not_its_fingerprint():
    drafter, before = make()
    target, tokens = drafter.target, torch.tensor([ROW.tokens])
    assert (target.read(tokens, ()).final - before).abs().max() > 0.1
    with disable_adapter(target):
        assert torch.equal(target.read(tokens, ()).final, before)
    assert target.fingerprint() == make_target(6).fingerprint()


@pytest.mark.parametrize("shape", [chain_of(4), TreeShape(depth=3, width=2, nodes=8)], ids=str)
def test_drafting_does_not_change_the_answers_of_the_adapted_target(shape):
    drafter, _ = make()
    prompts = [random_tokens(seed, 3 + seed, 6) for seed in range(4)]
    plain, drafted = (
        greedy(drafter.target, proposer).generate(prompts, 24) for proposer in (None, HeadProposer(drafter, shape))
    )
    with disable_adapter(drafter.target):
        unadapted = greedy(drafter.target, None).generate(prompts, 24)
    assert drafted.tokens == plain.tokens != unadapted.tokens
    assert sum(map(sum, drafted.accepted)) > 0


def test_the_loss_equals_a_naive_sum_and_trains_only_heads_and_adapter():
    """The total is the weighted head losses against the adapted target + KL(original, adapted), summed naively here."""
    drafter, before = make()
    target, objective = drafter.target, Objective(drafter, **CONFIG["objective"])
    loss = objective(collate([[ROW]], length=16, pad_token=0), None)
    loss.total.backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in drafter.parameters())
    trained = {id(parameter) for parameter in drafter.parameters()}
    assert all(parameter.grad is None for parameter in target.model.parameters() if id(parameter) not in trained)

    tokens = torch.tensor([ROW.tokens])
    output = target.read(tokens, drafter.target_layers)
    expected = 0.0
    for goal in range(4, 14):
        states = torch.stack([output.final[0, goal - 1], before[0, goal - 1]])
        p, original_law = target.logits(states).log_softmax(-1)
        expected += float((original_law.exp() * (original_law - p)).sum())
        for d in range(1, 5):
            if goal - d >= 1:
                _, logits = follow(drafter, tokens[0], output.features[0], goal - d, d)
                kl = (p.exp() * (p - logits[-1].log_softmax(-1))).sum()
                expected += 0.2 * objective.shares[d - 1] * float(kl)
    assert loss.total.item() == pytest.approx(expected, rel=1e-4)


def test_the_adapter_is_saved_with_the_head(tmp_path):
    drafter, _ = make()
    prompt = [random_tokens(5, 6, 6)]
    expected = greedy(drafter.target, None).generate(prompt, 20).tokens
    checkpoint.save(tmp_path / "step", drafter.frozen_copy(), CONFIG["drafter"])
    fresh = make_target(6)
    assert greedy(fresh, None).generate(prompt, 20).tokens != expected
    loaded = checkpoint.load(tmp_path / "step", fresh)
    assert greedy(fresh, HeadProposer(loaded, chain_of(4))).generate(prompt, 20).tokens == expected
    with pytest.raises(ValueError, match="adapted in place by another drafter"):
        checkpoint.load(tmp_path / "step", fresh)


def test_wrong_options_are_refused():
    with pytest.raises(ValueError, match=r"no layers named w_q: change lora_modules"):
        Medusa2(make_target(6), lora_modules=("w_q",))
    with pytest.raises(ValueError, match=r"original is for heads that adapt the target"):
        Objective(Eagle(make_target(6)), **CONFIG["objective"])
