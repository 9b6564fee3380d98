"""Losses without the logits of all goals: a chunk of goals at a time, with gradients made in the forward pass.

Where the weight of each loss is known beforehand, the gradient of a chunk follows as soon as its logits are there. So
nothing of size [goals, W] outlives its chunk, and the backward pass computes no LM head again. liger-kernel's linear
losses (2410.10989) do the same. This one takes any loss and head, and a target over a draft vocabulary.
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
    """The sum of a loss over chunks of goals, as a function of values and parameters.

    compute_loss(number of a chunk, values): the scalar loss, and results without gradients. Its values are the rows of
        the inputs' values [B, S, .] that the chunk needs
    rows_of_chunks: for each chunk and value, the indices [m] of these rows among B * S
    chunk_results: a list that takes the results
    inputs: `num_values` values, then parameters
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
        values, parameters = inputs[:num_values], inputs[num_values:]
        flat_values = [value.detach().flatten(0, 1) for value in values]
        value_grads = [torch.zeros_like(value) for value in flat_values]
        parameter_grads: list[Tensor | None] = [None] * len(parameters)
        total = values[0].new_zeros((), dtype=torch.promote_types(values[0].dtype, torch.float32))
        for number, value_rows in enumerate(rows_of_chunks):
            with torch.enable_grad():
                leaves = [value.index_select(0, rows).requires_grad_() for value, rows in zip(flat_values, value_rows)]
                loss, results = compute_loss(number, leaves)
                grads = torch.autograd.grad(loss, [*leaves, *parameters], allow_unused=True)
            total += loss.detach()
            chunk_results.append(results)

            # A slot guesses one goal at each depth, so chunks write different rows, and add to the same parameters
            for value_grad, rows, grad in zip(value_grads, value_rows, grads):
                if grad is not None:
                    value_grad.index_copy_(0, rows, grad)
            for index, grad in enumerate(grads[num_values:]):
                grad_so_far = parameter_grads[index]
                if grad_so_far is None:
                    parameter_grads[index] = grad
                elif grad is not None:
                    grad_so_far.add_(grad)
        ctx.grads = [*(grad.view_as(value) for grad, value in zip(value_grads, values)), *parameter_grads]
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor):
        grads, ctx.grads = ctx.grads, None
        scaled = [grad if grad is None else grad.mul_(grad_total.to(grad.dtype)) for grad in grads]
        return None, None, None, None, *scaled


class _FusedKL(torch.autograd.Function):
    """`fused_kl`. The kernel overwrites logits with their derivatives, so the backward pass only scales these."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, goal: Tensor, goal_rows: Tensor, temperature: float) -> Tensor:
        losses = torch.empty(len(logits), dtype=torch.promote_types(logits.dtype, torch.float32), device=logits.device)
        slope = logits.detach()  # in place: no operation that makes logits keeps them
        sizes = logits.shape[1], logits.stride(0), goal.stride(0), 1 / temperature
        if len(logits):  # no kernel starts on no rows
            _kl_kernel[(len(logits),)](slope, goal, goal_rows, losses, *sizes, BLOCK=BLOCK)
        # Not among saved tensors: torch counts their changes, and chunks of one tensor share that count
        ctx.slope = slope
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        slope, ctx.slope = ctx.slope, None
        return slope.mul_(grad[:, None].to(slope.dtype)), None, None, None


def fused_kl(logits: Tensor, goal: Tensor, goal_rows: Tensor, temperature: float) -> Tensor:
    """Forward KL as `losses.kl`, in one kernel, [m]. The values of `logits` are lost.

    logits [m, W]: the drafter's logits, before the temperature; goal [M, W]: the target's logits, tempered
    goal_rows [m]: the row of `goal` that each row of `logits` guesses
    """
    return _FusedKL.apply(logits, goal, goal_rows, temperature)


def has_kernel(device: torch.device) -> bool:
    """Whether `fused_kl` runs on this device."""
    return triton is not None and device.type == "cuda"


BLOCK = 4096  # logits that a program of the kernel holds at a time: 16 KB in float32, in its registers

if triton is not None:

    @triton.jit
    def _kl_kernel(  # noqa: PLR0913 (kernels take strides)
        logits, goal, goal_rows, losses, WIDTH: tl.constexpr, stride, goal_stride, factor, BLOCK: tl.constexpr
    ):
        """The loss of one row, and its derivatives in the place of the logits. factor: 1 / temperature

        With q the drafter's logits * factor and p the target's, the loss is the mean of p - q under the target's
        distribution, minus log sum exp p, plus log sum exp q.
        """
        row = tl.program_id(0).to(tl.int64)
        logits += row * stride
        goal += tl.load(goal_rows + row).to(tl.int64) * goal_stride
        # Online softmax: the largest logits so far, and sums relative to them
        max_q = -float("inf")
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
