"""DFlash 2's convolution inside a block, around a sublayer (Inco and Z Lab, August 2026).

y[t, c] = sum over taps i of (base[i, c] + delta_i[t, group of c]) x[t - i, c]. Positions before the block count as
zero. The changes delta of both kernels, before and behind the sublayer, follow from the sublayer's input.
"""

import math

import torch
from torch import Tensor, nn

GROUP = 16  # channels that share a change of the kernel, as in published heads


class BlockConvolution(nn.Module):
    """The convolutions of a sublayer's input and output. Both start as the identity.

    width: D; taps: positions that an output reads, its own included
    """

    def __init__(self, width: int, taps: int):
        super().__init__()
        self.taps, self.group = taps, math.gcd(width, GROUP)
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, width))  # kernels of input and output
        self.kernel_projection = nn.Linear(width, 2 * taps * (width // self.group), bias=False)
        with torch.no_grad():
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def kernels(self, x: Tensor) -> Tensor:
        """Changes [..., 2, taps, groups] of both kernels, for `mix`. x [..., D]: the sublayer's input"""
        return self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))

    def mix(self, x: Tensor, delta: Tensor, side: int, size: int) -> Tensor:
        """Applies a convolution to x [B, S*size, D], S blocks of `size` positions one after the other.

        delta [B, S*size, 2, taps, groups]: result of `kernels`; side: 0 before the sublayer, 1 behind it
        """
        base = self.base_kernel[side].unflatten(-1, (-1, self.group))  # [taps, groups, channels of a group]
        blocks = x.unflatten(1, (-1, size)).unflatten(-1, (-1, self.group))  # [B, S, size, groups, channels of a group]
        delta = delta.unflatten(1, (-1, size))[..., side, :, :, None]  # [B, S, size, taps, groups, 1]
        out = (base[0] + delta[..., 0, :, :]) * blocks
        for tap in range(1, min(self.taps, size)):
            shifted = nn.functional.pad(blocks[:, :, :-tap], (0, 0, 0, 0, tap, 0))
            out = out + (base[tap] + delta[..., tap, :, :]) * shifted
        return out.flatten(-2).flatten(1, 2)
