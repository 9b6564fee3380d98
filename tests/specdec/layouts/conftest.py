import pytest
import torch

from specdec.heads.decoder_block import RMSNorm, Rotary


@pytest.fixture(autouse=True)
def exact(monkeypatch):
    """Norms and angles in float64: a float32 angle of slot j, as we number them, is 1e-7 from that of j-1, as engines do."""

    def angles(self, x, positions):
        turned = positions[..., None].double() * self.inv_freq.double()
        return tuple(torch.cat([part, part], dim=-1) for part in (turned.cos(), turned.sin()))

    def norm(self, x):
        return self.weight * x * (x.square().mean(-1, keepdim=True) + self.variance_epsilon).rsqrt()

    monkeypatch.setattr(Rotary, "forward", angles)
    monkeypatch.setattr(RMSNorm, "forward", norm)
