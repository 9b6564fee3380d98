"""Tests of specdec/core/precision.py: the other way to multiply gives the same, and is taken where it is measured to be faster."""

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from specdec.core import precision


@pytest.fixture(params=[True, False])
def faster(monkeypatch, request):
    """Whether the other way is told to be faster. -> the shapes that were asked for"""
    asked = []
    monkeypatch.setattr(precision, "is_transposed_faster", lambda *shape: asked.append(shape[:3]) or request.param)
    return asked


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1,), (2,), (1, 3), (2, 2), (5,), (0,)])
def test_both_ways_give_the_same(faster, shape, bias):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 512, bias=bias), nn.Linear(512, 8))
    x = torch.randn(*shape, 512)
    wanted = model(x)
    precision.prepare_few_rows(model)
    with torch.no_grad():
        found = model(x)
    torch.testing.assert_close(found, wanted.detach())
    rows = x.numel() // 512
    assert faster == ([(rows, 512, 512)] if 2 <= rows <= 4 else [])  # the small matrix is left alone


def test_gradients_other_dtypes_and_traces_keep_the_usual_product(faster):
    layer = nn.Linear(512, 512)
    precision.prepare_few_rows(layer)
    layer(torch.randn(3, 512, requires_grad=True)).sum().backward()
    with torch.no_grad():
        precision.multiply_few_rows(torch.randn(3, 512).double(), layer.weight.double())
        precision.multiply_few_rows(torch.randn(3, 512).bfloat16(), layer.weight.bfloat16())
        graph = make_fx(lambda x: precision.multiply_few_rows(x, layer.weight.detach()))(torch.randn(3, 512)).graph
    assert faster == []
    assert not any("mm" in str(node.target) and node.args[0].op == "get_attr" for node in graph.nodes)


def test_processes_of_one_run_multiply_alike(faster, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with torch.no_grad():
        precision.multiply_few_rows(torch.randn(3, 512), torch.randn(512, 512))
    assert faster == []


def test_what_is_faster_is_measured():
    assert precision.is_transposed_faster.__wrapped__(3, 512, 512, 1) in (True, False)
