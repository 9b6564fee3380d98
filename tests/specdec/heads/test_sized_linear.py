"""Weights in units of the sizes of their inputs: the same map, other steps."""

import torch
from torch import nn

from specdec.heads.base import SizedLinear
from specdec.heads.eagle import Eagle3
from tests.support import make_target

SIZES = torch.tensor([0.01, 1.0, 2.0, 5000.0])


def make_inputs() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(64, 4).double() * SIZES


def test_measuring_and_folding_do_not_change_the_map():
    x, linear = make_inputs(), SizedLinear(4, 3, bias=True).double()
    before = linear(x)
    linear.measure_inputs([x[:20], x[20:]], random_weights=False)
    torch.testing.assert_close(linear.size, x.pow(2).mean(0).sqrt(), check_dtype=False)
    torch.testing.assert_close(linear(x), before)
    assert "size" in linear.state_dict()
    linear.fold()
    torch.testing.assert_close(linear(x), before)
    plain = nn.Linear(4, 3).double()
    plain.load_state_dict(linear.state_dict())  # without sizes
    torch.testing.assert_close(plain(x), before)
    again = SizedLinear(4, 3, bias=True).double()
    again.measure_inputs([x], random_weights=True)
    again.load_state_dict(linear.state_dict())
    torch.testing.assert_close(again(x), before)


def test_a_head_is_saved_and_decoded_with_ordinary_weights():
    target = make_target(61)
    head = Eagle3(target).double()
    torch.manual_seed(0)
    features = torch.randn(1, 9, head.fc.in_features).double() * torch.logspace(-2, 3, head.fc.in_features).double()
    head.fc.measure_inputs([features[0]], random_weights=True)
    frozen = head.frozen_copy()
    assert "fc.size" in head.state_dict() and "fc.size" not in frozen.state_dict()
    torch.testing.assert_close(frozen.encode(features), head.encode(features))
    torch.testing.assert_close(nn.functional.linear(features, frozen.fc.weight), head.encode(features))
