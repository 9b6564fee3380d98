"""Losses without the logits of all goals: a part of the goals at a time, with their gradients made in the forward pass.

Where the weight of each loss is known beforehand, the gradient of a part follows as soon as its logits are there. So nothing of
size [goals, W] outlives its part, and no LM head is computed again in the backward pass, as in liger-kernel's linear losses
(2410.10989), but for any loss and head, and against a target over a draft vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.core import fast

try:
    import triton
    import triton.language as tl
except ImportError:  # comes with torch for GPUs
    triton = None


class ChunkedLoss(torch.autograd.Function):
    """The sum of a loss over parts of the goals, as a function of values and parameters.

    judge(part, values) -> scalar, and results without gradients; values: for each of `values` [B, S, .] the rows of a part
    places: for each part, for each value, the rows that it needs, [m] of B * S
    """

    @staticmethod
    def forward(
        ctx: Any,
        compute_loss: Callable[[int, list[Tensor]], tuple[Tensor, dict[str, Tensor]]],
        rows_of_chunks: Sequence[Sequence[Tensor]],
        chunk_results: list[dict[str, Tensor]],
        num_values: int,
        *inputs: Tensor,
    ) -> Tensor:
        values, trained_parameters = inputs[:num_values], inputs[num_values:]
        flat_values = [value.detach().flatten(0, 1) for value in values]
        value_gradients = [torch.zeros_like(value) for value in flat_values]
        parameter_gradients: list[Tensor | None] = [None] * len(trained_parameters)
        total = values[0].new_zeros((), dtype=torch.promote_types(values[0].dtype, torch.float32))
        for chunk_number, value_rows in enumerate(rows_of_chunks):
            with torch.enable_grad():
                leaves = [
                    value.index_select(0, row_indices).requires_grad_()
                    for value, row_indices in zip(flat_values, value_rows)
                ]
                loss, chunk_result = compute_loss(chunk_number, leaves)
                gradients = torch.autograd.grad(loss, [*leaves, *trained_parameters], allow_unused=True)
            total += loss.detach()
            chunk_results.append(chunk_result)
            for value_gradient, row_indices, gradient in zip(value_gradients, value_rows, gradients):
                if gradient is not None:
                    value_gradient.index_copy_(0, row_indices, gradient)  # a slot guesses one goal at each depth
            for parameter_number, gradient in enumerate(gradients[num_values:]):
                if gradient is not None:
                    gradient_sum = parameter_gradients[parameter_number]
                    parameter_gradients[parameter_number] = (
                        gradient if gradient_sum is None else gradient_sum.add_(gradient)
                    )
        ctx.slopes = [slope.view_as(value) for slope, value in zip(value_gradients, values)]
        ctx.sums = parameter_gradients
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        slopes = [slope.mul_(grad.to(slope.dtype)) for slope in ctx.slopes]
        sums = [
            None if parameter_gradient is None else parameter_gradient.mul_(grad.to(parameter_gradient.dtype))
            for parameter_gradient in ctx.sums
        ]
        ctx.slopes = ctx.sums = None
        return None, None, None, None, *slopes, *sums


class _FusedKL(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, goal: Tensor, goal_rows: Tensor, temperature: float) -> Tensor:
        losses = torch.empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        slope = logits.detach()  # in place: no operation that makes logits keeps them
        _kl_kernel[(len(logits),)](
            slope,
            goal,
            goal_rows,
            losses,
            logits.shape[1],
            logits.stride(0),
            goal.stride(0),
            1 / temperature,
            BLOCK=BLOCK,
        )
        ctx.slope = (
            slope  # not among saved tensors, which torch counts the changes of: parts of one tensor share that count
        )
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        slope, ctx.slope = ctx.slope, None
        return slope.mul_(grad[:, None].to(slope.dtype)), None, None, None


def fused_kl(logits: Tensor, goal: Tensor, goal_rows: Tensor, temperature: float) -> Tensor:
    """Forward KL of losses.kl in one kernel: logits [m, W], goal [M, W] tempered, rows [m] each one's goal -> [m]

    The values of `logits` are lost.
    """
    return _FusedKL.apply(logits, goal, goal_rows, temperature)


def has_kernel(device: torch.device) -> bool:
    return triton is not None and device.type == "cuda"


BLOCK = 4096  # logits that a program of the kernel holds at a time

if triton is not None:

    @triton.jit
    def _kl_kernel(
        logits, goal, goal_rows, losses, WIDTH: tl.constexpr, stride, goal_stride, factor, BLOCK: tl.constexpr
    ):
        """One row: with q the drafter's logits / temperature and p the target's, the loss is the mean of p - q under the
        target's distribution, minus log sum exp p, plus log sum exp q. The logits become its derivatives."""
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        goal += tl.load(goal_rows + row).to(tl.int64) * goal_stride
        max_q = -float("inf")  # largest so far, and sums of exponents relative to it
        max_p = -float("inf")
        sum_q = 0.0
        sum_p = 0.0
        gap = 0.0
        for start in range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            in_row = columns < WIDTH
            q = tl.load(logits + columns, mask=in_row, other=-float("inf")).to(tl.float32) * factor
            p = tl.load(goal + columns, mask=in_row, other=-float("inf")).to(tl.float32)
            larger_q = tl.maximum(max_q, tl.max(q, 0))
            larger_p = tl.maximum(max_p, tl.max(p, 0))
            weight = tl.exp(p - larger_p)
            sum_q = sum_q * tl.exp(max_q - larger_q) + tl.sum(tl.exp(q - larger_q), 0)
            scale = tl.exp(max_p - larger_p)
            sum_p = sum_p * scale + tl.sum(weight, 0)
            gap = gap * scale + tl.sum(tl.where(in_row, weight * (p - q), 0.0), 0)
            max_q = larger_q
            max_p = larger_p
        log_q = max_q + tl.log(sum_q)
        log_p = max_p + tl.log(sum_p)
        tl.store(losses + row, gap / sum_p - log_p + log_q)
        for start in range(0, WIDTH, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            in_row = columns < WIDTH
            q = tl.load(logits + columns, mask=in_row, other=0.0).to(tl.float32) * factor
            p = tl.load(goal + columns, mask=in_row, other=0.0).to(tl.float32)
            slope = (tl.exp(q - log_q) - tl.exp(p - log_p)) * factor
            tl.store(logits + columns, slope.to(logits.dtype.element_ty), mask=in_row)


def check(device: torch.device) -> None:
    """Compares the kernel with float64 on this device. Raises ValueError where they differ beyond rounding."""
    if not has_kernel(device):
        return
    logits, goal, upstream = torch.randn(5, 9001) * 4, torch.randn(3, 9001) * 4, torch.rand(5)
    rows = torch.tensor([0, 0, 1, 2, 1])
    leaf = logits.double().requires_grad_()
    q, p = (leaf / 0.7).log_softmax(-1), goal.double().log_softmax(-1)[rows]
    expected = (p.exp() * (p - q)).sum(-1)
    leaf32 = logits.to(device).requires_grad_()
    losses = fused_kl(leaf32 * 1.0, goal.to(device), rows.to(device), 0.7)
    fast.compare_with_reference("KL", [losses.cpu()], [expected], 1e-4)
    grads = (
        torch.autograd.grad(losses, leaf32, upstream.to(device)),
        torch.autograd.grad(expected, leaf, upstream.double()),
    )
    fast.compare_with_reference("gradients of KL", [grads[0][0].cpu()], [grads[1][0]], 1e-4)
