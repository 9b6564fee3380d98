"""The closed-form start of EAGLE is ridge regression onto the next feature, and the head begins exactly there."""

import torch

from specdec import masks
from specdec.cache import UnrollCache
from specdec.drafter import Slots
from specdec.heads.block import RIDGE
from specdec.heads.eagle import Eagle


def test_solve_against_stacked_least_squares(target):
    torch.manual_seed(0)
    head = Eagle(target).double()
    width, num = target.width, 300
    tokens = torch.randint(0, target.vocab_size, (num,))
    features, goals = torch.randn(num, width).double(), torch.randn(num, width).double()
    parts = (slice(0, 100), slice(100, num))
    assert head.solve([Slots(features[part], features[part], tokens[part, None], goals[part, None]) for part in parts])

    x = torch.cat([target.embed(tokens), features], dim=-1)  # [M, 2D]
    strength = RIDGE * (x**2).sum(0).mean()
    stacked = torch.cat([x, strength.sqrt() * torch.eye(2 * width).double()])
    wanted = torch.linalg.lstsq(stacked, torch.cat([goals, torch.zeros(2 * width, width).double()])).solution
    torch.testing.assert_close(head.fc.weight, wanted.T)

    mask = masks.causal(num, "cpu")[None, None]
    h, _ = head.step(1, features[None], tokens[None], torch.arange(num)[None], mask, UnrollCache())
    torch.testing.assert_close(h[0], x @ wanted)
