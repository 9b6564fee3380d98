"""Which dtype a device computes in: bfloat16 where it has units for it, float32 elsewhere.

A CPU without such units takes bfloat16, too, and converts every number on its way: training is then about ten times slower than
in float32 (results/44-other-machines.md). What the CPU and oneDNN say of themselves decides where it can, one short product where it cannot.
"""

import functools
import os
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

AUTO = "auto"
# With one of these, a library uses less than the CPU has.
HIDING = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
TIMED = (64, 512, 1024)  # rows, inputs and outputs of the product: 67 MFLOP, 3 ms at 20 GFLOP/s
TIMES = 5  # of each dtype, in turn; the shortest time counts, because other work on the machine only adds to it


@dataclass(frozen=True)
class Choice:
    """A dtype by its name in torch, and why it was chosen."""

    dtype: str
    reason: str


def choose(device: torch.device | str) -> Choice:
    """What `auto` is on a device. It is found out once in a process."""
    device = torch.device(device)
    if device.type == "cpu":
        return _of_cpu()
    if device.type == "cuda":
        return _of_cuda(torch.cuda.current_device() if device.index is None else device.index)
    if device.type == "meta":
        return Choice("bfloat16", "nothing is computed on meta")
    return _timed(device)


def resolve(dtype: str, device: torch.device | str) -> str:
    """dtype as it is given, or what `auto` is on this device"""
    return choose(device).dtype if dtype == AUTO else dtype


@functools.cache
def _of_cpu() -> Choice:
    mkldnn = torch.backends.mkldnn.is_available()
    if mkldnn and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return Choice("float32", "this CPU has no bfloat16 units that oneDNN uses")
    if mkldnn and not any(os.environ.get(name) for name in HIDING):
        for what, asked in (("AMX", "_is_amx_tile_supported"), ("AVX-512", "_is_avx512_bf16_supported")):
            if getattr(torch.cpu, asked, lambda: False)():
                return Choice("bfloat16", f"this CPU computes in it ({what})")
    return _timed(torch.device("cpu"))


@functools.cache
def _of_cuda(number: int) -> Choice:
    name = torch.cuda.get_device_name(number)
    if torch.version.hip or torch.cuda.get_device_capability(number) >= (8, 0):
        return Choice("bfloat16", f"{name} computes in it")
    return Choice("float32", f"{name} has no bfloat16 units")


@functools.cache
def _timed(device: torch.device) -> Choice:
    """By one product, for devices that cannot be asked."""
    rows, inputs, outputs = TIMED
    best = {torch.bfloat16: float("inf"), torch.float32: float("inf")}
    pairs = {
        dtype: (
            torch.ones(rows, inputs, device=device, dtype=dtype),
            torch.ones(outputs, inputs, device=device, dtype=dtype),
        )
        for dtype in best
    }
    for number in range(TIMES + 1):
        for dtype, pair in pairs.items():
            seconds = _seconds(*pair)
            if number > 0:  # the first call makes plans and fills caches
                best[dtype] = min(best[dtype], seconds)
    ratio = best[torch.float32] / best[torch.bfloat16]
    if ratio >= 1:
        return Choice("bfloat16", f"a product takes {1 / ratio:.2f} of its time in float32 here")
    return Choice("float32", f"a product in bfloat16 takes {1 / ratio:.1f} times as long here")


def _seconds(left: torch.Tensor, right: torch.Tensor) -> float:
    """Of one product, at whose end the device has nothing left to do."""
    begun = time.perf_counter()
    torch.nn.functional.linear(left, right).sum().item()
    return time.perf_counter() - begun


# Products of few rows with a large matrix in float32 on a CPU: what plain decoding and verification spend their time on.
#
# A BLAS may have no good kernel for them. MKL on an AMD processor takes two or three times as long for x @ weight.T with 2 to 4 rows as
# with one, and weight @ x.T is then up to twice as fast (results/44-other-machines.md). Which of the two is faster here depends on the shape, and is
# measured once for each.

FEW_ROWS = range(2, 5)  # with one row or with more than these, the usual way is as fast or faster
FEW_ROWS_LEAST = 1 << 18  # numbers of a matrix: reading a smaller one is not what takes the time
FEW_ROWS_NUMBERS = 6 << 20  # of the matrices that are measured: 25 MB, which few caches hold
FEW_ROWS_TIMES = 5  # of each way, in turn; the shortest counts
CLEARLY = 0.85  # of the time that the usual way takes, from which the other one is used


def prepare_few_rows(model: nn.Module) -> None:
    """Makes the linear layers of a frozen model take the faster way."""
    for module in model.modules():
        if type(module) is nn.Linear and _is_large(module.weight):
            module.forward = functools.partial(_few_rows_forward, module)  # type: ignore[method-assign]


def multiply_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear: x [.., D], weight [E, D] -> [.., E]. The faster way is taken where no gradient is wanted."""
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    # a function that is traced keeps the usual product, which the compiler knows
    if rows not in FEW_ROWS or not _is_large(weight) or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return F.linear(x, weight, bias)
    if (
        torch.distributed.is_initialized()
    ):  # processes that hold a target together must round alike, and a clock decides here
        return F.linear(x, weight, bias)
    if not is_faster_turned(rows, *weight.shape, torch.get_num_threads()):
        return F.linear(x, weight, bias)
    out = torch.mm(weight, x.reshape(rows, -1).t()).t()
    return (out if bias is None else out + bias).reshape(*x.shape[:-1], -1)


def _few_rows_forward(module: nn.Linear, x: Tensor) -> Tensor:
    return multiply_few_rows(x, module.weight, module.bias)


def _is_large(weight: Tensor) -> bool:
    plain = type(weight) in (Tensor, nn.Parameter)  # not one that is quantised or divided
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= FEW_ROWS_LEAST


@functools.cache
def is_faster_turned(rows: int, outputs: int, inputs: int, threads: int) -> bool:
    """Whether weight @ x.T is clearly faster than x @ weight.T, for x [rows, inputs] and weight [outputs, inputs]."""
    outputs = min(outputs, max(1, FEW_ROWS_NUMBERS // inputs))  # the time is in proportion
    weights = [torch.ones(outputs, inputs) for _ in range(max(1, FEW_ROWS_NUMBERS // (outputs * inputs)))]
    x = torch.ones(rows, inputs)
    usual, turned = [], []
    for _ in range(FEW_ROWS_TIMES):
        begun = time.perf_counter()
        for weight in weights:
            F.linear(x, weight)
        between = time.perf_counter()
        for weight in weights:
            torch.mm(weight, x.t())
        usual.append(between - begun)
        turned.append(time.perf_counter() - between)
    return min(turned) < CLEARLY * min(usual)
