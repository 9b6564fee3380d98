"""Closed-form starts: EAGLE's are ridge regressions onto the next feature, and each start beats random weights."""

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

from specdec.core.cache import UnrollCache
from specdec.core.span_attention import find_spans
from specdec.heads.base import Slots
from specdec.heads.blocks import RIDGE_SCALE
from specdec.heads.eagle import Eagle
from tests.support import load_head, make_target


def test_solve_against_stacked_least_squares(target):
    torch.manual_seed(0)
    head = Eagle(target).double()
    width, num = target.width, 300
    tokens = torch.randint(0, target.vocab_size, (num,))
    features, goals = torch.randn(num, width).double(), torch.randn(num, width).double()
    parts = (slice(0, 100), slice(100, num))
    assert head.solve([Slots(features[part], features[part], tokens[part, None], goals[part, None]) for part in parts])

    def stacked(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:  # [M, E], [M, D] -> [E, D]
        strength = RIDGE_SCALE * (x**2).sum(0).mean()
        x = torch.cat([x, strength.sqrt() * torch.eye(x.shape[1]).double()])
        return torch.linalg.lstsq(x, nn.functional.pad(y, (0, 0, 0, len(x) - num))).solution

    x = torch.cat([target.embed(tokens), features], dim=-1)  # [M, 2D]
    first = stacked(x, goals)
    torch.testing.assert_close(head.fc.weight, first.T)
    mlp, h = head.block.mlp, x @ first
    normed = head.block.post_attention_layernorm(h)
    units = nn.functional.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed)  # [M, E]
    second = stacked(units, goals - h)
    torch.testing.assert_close(mlp.down_proj.weight, second.T)

    seen = find_spans(torch.zeros(1, num, dtype=torch.long))
    state, _ = head.step(1, features[None], tokens[None], torch.arange(num)[None], seen, UnrollCache().at_step(1))
    torch.testing.assert_close(state[0], h + units @ second)


SOLVED = {
    "eagle": {},
    "hass": {},
    "eagle3": {},
    "peagle": {},
    "hydra": {},
    "mtp": {},
    "dspark": {"fuse": True},
    "dflash": {"fuse": True},
}


@torch.no_grad()
@pytest.mark.parametrize("head", sorted(SOLVED))
def test_a_closed_form_start_is_more_accurate_than_a_random_start(head):
    """The next state is linear in the token and the previous state, so a closed-form start drafts depth 1 correctly."""
    torch.manual_seed(0)
    target, num = make_target(61), 600
    head = load_head(head)["drafter"] | SOLVED[head]
    tokens = torch.randint(61, (num, 3))
    state = torch.randn(num, 32).double()
    turn, move = torch.randn(2, 32, 32).double() / 32**0.5
    goals = [state]
    for d in range(3):
        goals.append(goals[-1] @ turn + 4 * target.embed(tokens[:, d]) @ move)
    choices = [target.logits(goal).argmax(-1) for goal in goals[1:]]
    accuracies = []
    for solve in (False, True):
        drafter = instantiate(head, target, vocab=None).double()
        features = state.repeat(1, len(drafter.target_layers))
        if solve:
            assert drafter.solve([Slots(features, state, tokens, torch.stack(goals[1:], dim=1))])
        cache = drafter.cache(num)
        h, position = drafter.encode(features[:, None]), torch.full((num, 1), 2)  # not the first slot of a text
        cache.reserve(1)
        if drafter.context_kind == "block":
            drafter.context(h, position - 1, cache)
        seen = torch.zeros(num, 1, 1, cache.visible, dtype=torch.bool)
        seen[..., 0] = True
        _, readout = drafter.step(1, h, tokens[:, :1], position, seen, cache)
        accuracies.append(float((drafter.logits(1, readout)[:, 0].argmax(-1) == choices[0]).double().mean()))
    assert accuracies[0] < 0.3 and accuracies[1] > 0.4, accuracies
