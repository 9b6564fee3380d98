"""Fixtures of the objective's tests."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding

from specdec.core import compile
from specdec.heads.blocks import Rotary


@pytest.fixture
def in_float64(monkeypatch):
    """Puts Llama's norms and angles, and the weights of depths, into float64.

    In float32, a difference in the last bit would grow on some CPUs.
    """

    def normalise(self, x):
        wide = x.double()
        return (self.weight * wide * (wide.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()).to(x.dtype)

    def turn(self, x, position_ids):
        angles = (position_ids[..., None].double() * self.inv_freq.double()).repeat(1, 1, 2)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)

    monkeypatch.setattr(LlamaRMSNorm, "forward", normalise)
    for kind in (LlamaRotaryEmbedding, Rotary):
        monkeypatch.setattr(kind, "forward", turn)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(default)


@pytest.fixture
def use_backend(monkeypatch):
    """use_backend(backend): blocks are compiled anew, by this backend of torch"""

    def use_backend(backend) -> None:
        monkeypatch.setattr(compile, "BACKEND", backend)
        monkeypatch.setattr(compile, "_not_compiled", set())
        monkeypatch.setattr(compile, "_called_compiled", set())
        compile._compile_block.cache_clear()
        torch._dynamo.reset()

    yield use_backend
    compile._compile_block.cache_clear()
