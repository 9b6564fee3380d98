"""Products of few rows with a large matrix in float32 on a CPU: what plain decoding and verification spend their time on.

A BLAS may have no good kernel for them. MKL on an AMD processor takes two or three times as long for x @ weight.T with 2 to 4 rows as
with one, and weight @ x.T is then up to twice as fast (results/44-other-machines.md). Which of the two is faster here depends on the shape, and is
measured once for each.
"""

import functools
import time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = range(2, 5)  # with one row or with more than these, the usual way is as fast or faster
LEAST = 1 << 18  # numbers of a matrix: reading a smaller one is not what takes the time
NUMBERS = 6 << 20  # of the matrices that are measured: 25 MB, which few caches hold
TIMES = 5  # of each way, in turn; the shortest counts
CLEARLY = 0.85  # of the time that the usual way takes, from which the other one is used


def prepare(model: nn.Module) -> None:
    """Makes the linear layers of a frozen model take the faster way."""
    for module in model.modules():
        if type(module) is nn.Linear and _concerns(module.weight):
            module.forward = functools.partial(_forward, module)  # type: ignore[method-assign]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear: x [.., D], weight [E, D] -> [.., E]. The faster way is taken where no gradient is wanted."""
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    # a function that is traced keeps the usual product, which the compiler knows
    if rows not in ROWS or not _concerns(weight) or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return F.linear(x, weight, bias)
    if (
        torch.distributed.is_initialized()
    ):  # processes that hold a target together must round alike, and a clock decides here
        return F.linear(x, weight, bias)
    if not is_faster_turned(rows, *weight.shape, torch.get_num_threads()):
        return F.linear(x, weight, bias)
    out = torch.mm(weight, x.reshape(rows, -1).t()).t()
    return (out if bias is None else out + bias).reshape(*x.shape[:-1], -1)


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def _concerns(weight: Tensor) -> bool:
    plain = type(weight) in (Tensor, nn.Parameter)  # not one that is quantised or divided
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= LEAST


@functools.cache
def is_faster_turned(rows: int, outputs: int, inputs: int, threads: int) -> bool:
    """Whether weight @ x.T is clearly faster than x @ weight.T, for x [rows, inputs] and weight [outputs, inputs]."""
    outputs = min(outputs, max(1, NUMBERS // inputs))  # the time is in proportion
    weights = [torch.ones(outputs, inputs) for _ in range(max(1, NUMBERS // (outputs * inputs)))]
    x = torch.ones(rows, inputs)
    usual, turned = [], []
    for _ in range(TIMES):
        begun = time.perf_counter()
        for weight in weights:
            F.linear(x, weight)
        between = time.perf_counter()
        for weight in weights:
            torch.mm(weight, x.t())
        usual.append(between - begun)
        turned.append(time.perf_counter() - between)
    return min(turned) < CLEARLY * min(usual)
