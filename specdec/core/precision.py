"""The dtype in which a device computes: bfloat16 where it has units for it, float32 elsewhere.

A CPU without such units takes bfloat16, too, but converts every number. Training is then about ten times slower than
in float32 (results/44-other-machines.md).
"""

import functools
import math
import os
import platform
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

AUTO = "auto"


@dataclass(frozen=True)
class DtypeChoice:
    """A dtype by its name in torch, and the reason for it."""

    dtype: str
    reason: str


def choose_dtype(device: torch.device | str) -> DtypeChoice:
    """The dtype of `auto` on a device, by what the device reports"""
    device = torch.device(device)
    if device.type == "cpu":
        return _choose_for_cpu()
    if device.type == "cuda":
        number = torch.cuda.current_device() if device.index is None else device.index
        name = torch.cuda.get_device_name(number)
        if not torch.version.hip and torch.cuda.get_device_capability(number) < (8, 0):
            return DtypeChoice("float32", f"{name} has no bfloat16 units")
        return DtypeChoice("bfloat16", f"{name} computes in it")
    return DtypeChoice("bfloat16", f"devices of type {device.type} usually compute in it")


def resolve_dtype(dtype: str, device: torch.device | str) -> str:
    """The dtype, or that of `auto` on this device"""
    return choose_dtype(device).dtype if dtype == AUTO else dtype


def _choose_for_cpu() -> DtypeChoice:
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "DEFAULT").upper()  # the user's limit of instruction sets
    if limit != "DEFAULT" and not any(name in limit for name in ("BF16", "FP16", "AMX", "AVX10")):
        return DtypeChoice("float32", f"ONEDNN_MAX_CPU_ISA={limit} leaves oneDNN no bfloat16 units")
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        units = {"AMX": "_is_amx_tile_supported", "AVX-512": "_is_avx512_bf16_supported"}
        for what, query in units.items():
            if getattr(torch.cpu, query, lambda: False)():
                return DtypeChoice("bfloat16", f"this CPU computes in it ({what})")
        if platform.machine() in ("aarch64", "arm64"):  # oneDNN takes bfloat16 there only with units
            return DtypeChoice("bfloat16", "this CPU computes in it")
    return DtypeChoice("float32", "this CPU has no bfloat16 units that oneDNN uses")


# Products of few rows with a large matrix in float32 on a CPU take most of the time of decoding there.
#
# A BLAS may have no good kernel for them. On AMD processors, MKL takes two or three times as long for x @ weight.T
# with 2 to 4 rows as with one; weight @ x.T is up to twice as fast (results/44-other-machines.md). The faster product
# depends on the shape, and is measured once for each.

FEW_ROWS = range(2, 5)  # with other numbers of rows, the plain product is as fast or faster
MIN_MATRIX_SIZE = 1 << 18  # numbers of a matrix; reading a smaller one does not dominate the time
MEASURED_SIZE = 6 << 20  # numbers of the measured matrices: 25 MB, more than most caches hold
NUM_REPEATS = 5  # measurements of each product, in turn; the shortest counts
MAX_TIME_RATIO = 0.85  # of the plain product's time; above it, noise of the clock could decide


def prepare_few_rows(model: nn.Module) -> None:
    """Lets the linear layers of a frozen model multiply few rows by the faster of two products."""

    def forward(module: nn.Linear, x: Tensor) -> Tensor:
        return multiply_few_rows(x, module.weight, module.bias)

    for module in model.modules():
        if type(module) is nn.Linear and _is_large(module.weight):
            module.forward = functools.partial(forward, module)  # type: ignore[method-assign]


def multiply_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear: x [.., D], weight [E, D] -> [.., E], by the faster product where no gradient is needed"""
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    # A traced function keeps the plain product, which the compiler knows
    if rows not in FEW_ROWS or not _is_large(weight) or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return F.linear(x, weight, bias)
    # Processes of one run must round alike, but a clock decides here
    if torch.distributed.is_initialized() or not is_transposed_faster(rows, *weight.shape, torch.get_num_threads()):
        return F.linear(x, weight, bias)
    out = torch.mm(weight, x.reshape(rows, -1).t()).t()
    return (out if bias is None else out + bias).reshape(*x.shape[:-1], -1)


def _is_large(weight: Tensor) -> bool:
    plain = type(weight) in (Tensor, nn.Parameter)  # neither quantised nor sharded
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= MIN_MATRIX_SIZE


@functools.cache
def is_transposed_faster(rows: int, outputs: int, inputs: int, threads: int) -> bool:
    """True if weight @ x.T is clearly faster than x @ weight.T, for x [rows, inputs] and weight [outputs, inputs].

    threads: number of threads, on which the measurement depends
    """
    outputs = min(outputs, max(1, MEASURED_SIZE // inputs))  # the time is proportional to it
    weights = [torch.ones(outputs, inputs) for _ in range(max(1, MEASURED_SIZE // (outputs * inputs)))]
    x = torch.ones(rows, inputs)
    products = (lambda weight: F.linear(x, weight)), (lambda weight: torch.mm(weight, x.t()))
    times = [math.inf, math.inf]
    for _ in range(NUM_REPEATS):
        for number, product in enumerate(products):
            start = time.perf_counter()
            for weight in weights:
                product(weight)
            times[number] = min(times[number], time.perf_counter() - start)
    return times[1] < MAX_TIME_RATIO * times[0]
