"""A linear map whose weights are trained in units of the sizes of its inputs."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn


class SizedLinear(nn.Linear):
    """The same map as nn.Linear.

    One entry of a hidden state may be a thousand times as large as the others (massive activations, 2402.17762). Adam moves all
    weights of a matrix by as much, so its first steps would change the result by that entry alone. Here a weight is what it adds
    to the result where its input has its usual size. `fold` gives the ordinary weights.
    """

    size: Tensor  # [in_features], usual sizes of the inputs; ones: the weights are ordinary ones, and state_dict has no sizes

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False):
        super().__init__(in_features, out_features, bias=bias)
        self.register_buffer("size", torch.ones(in_features))
        self._register_load_state_dict_pre_hook(self._add_size)
        self.register_state_dict_post_hook(_drop_ones)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / self.size)

    @torch.no_grad()
    def measure(self, inputs: Iterable[Tensor], *, fresh: bool) -> None:
        """Takes the sizes of these inputs [M, in_features].

        fresh: the weights are random ones, and stay so in the new units; else the map is not changed
        """
        squares, num = torch.zeros_like(self.size, dtype=torch.float32), 0
        for x in inputs:
            squares, num = squares + x.float().pow(2).sum(0), num + len(x)
        size = (squares / num).sqrt().clamp(min=1e-6)
        if fresh:
            self.size.copy_(size)
        else:
            self._count_in(size)

    def fold(self) -> None:
        """Makes the weights ordinary ones."""
        self._count_in(torch.ones_like(self.size))

    def set(self, weight: Tensor) -> None:
        """weight [out_features, in_features]: an ordinary one"""
        self.weight.data.copy_(weight * self.size)

    def _count_in(self, size: Tensor) -> None:
        self.weight.data.mul_(size / self.size)
        self.size.copy_(size)

    def _add_size(self, state, prefix, *_):
        state.setdefault(prefix + "size", torch.ones_like(self.size))


def _drop_ones(module, state, prefix, *_):
    if bool((module.size == 1).all()):
        del state[prefix + "size"]
