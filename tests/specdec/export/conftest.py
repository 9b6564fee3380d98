import pytest
import torch

from specdec.heads.blocks import RMSNorm, Rotary


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Computes norms and rotary angles in float64.

    This project and the engines number slots differently (j and j - 1), so in float32 their angles differ by 1e-7.
    """

    def angles(self, x, positions):
        radians = positions[..., None].double() * self.inv_freq.double()
        return tuple(torch.cat([part, part], dim=-1) for part in (radians.cos(), radians.sin()))

    def norm(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    monkeypatch.setattr(Rotary, "forward", angles)
    monkeypatch.setattr(RMSNorm, "forward", norm)
