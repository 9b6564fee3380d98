"""Texts that several processes read together: each runs the slots of a part, and all see the keys of the whole text.

    process      0                  1                  2
    slots        0 .. w-1           w .. 2w-1          2w .. C-1
    own keys     [B, H, w, E]       [B, H, w, E]       [B, H, C-2w, E]
    seen keys    [B, H, C, E]       the same           the same         (all-gather; its gradient: reduce-scatter)

Only keys and values travel. The sums of the losses over the processes, and of the gradients, are those of one process.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist
from torch.nn import functional as F

# Since torch 2.13, and before it
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class TextShare:
    """The part of each text that one of `size` processes runs.

    group: communicator of these processes; None: nothing travels, for counts
    """

    number: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None

    def count_part(self, num_slots: int) -> int:
        """Slots of each part but the last, which may have fewer."""
        return -(-num_slots // self.size)

    def select(self, num_slots: int) -> slice:
        """The slots of this process."""
        part = self.count_part(num_slots)
        return slice(self.number * part, min((self.number + 1) * part, num_slots))

    def gather(self, key: Tensor, value: Tensor, num_slots: int) -> tuple[Tensor, Tensor]:
        """K and V [B, H, C, E] of all C slots. key, value [B, H, S, E]: K and V of this process' slots

        All processes of the group call it, and run its backward pass.
        """
        if self.size == 1:
            return key, value
        joined = _Gather.apply(torch.stack([key, value]), self, num_slots)
        return joined[0], joined[1]

    def sum(self, values: Tensor) -> Tensor:
        """The sum of the values of all processes of the group, without a gradient."""
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values


class _Gather(torch.autograd.Function):
    """values [2, B, H, S, E] of each process -> [2, B, H, C, E]"""

    @staticmethod
    def forward(ctx, values, share, num_slots):
        ctx.share, ctx.num_own = share, values.shape[3]
        part = _pad(values.movedim(3, 0), share.count_part(num_slots))
        parts = part.new_empty(share.size * len(part), *part.shape[1:])
        if share.group is not None:
            all_gather(parts, part, group=share.group)
        return parts[:num_slots].movedim(0, 3)

    @staticmethod
    def backward(ctx, grad):
        share = ctx.share
        part_size = share.count_part(grad.shape[3])
        parts = _pad(grad.movedim(3, 0), share.size * part_size)
        part = parts.new_empty(part_size, *parts.shape[1:])
        if share.group is not None:
            reduce_scatter(part, parts, group=share.group)
        return part[: ctx.num_own].movedim(0, 3), None, None


def _pad(values: Tensor, num: int) -> Tensor:
    """values [n, ...] with rows of zeros behind them, [num, ...], contiguous."""
    return F.pad(values, (*[0] * (2 * values.dim() - 1), num - len(values))).contiguous()


WHOLE_TEXT = TextShare()
