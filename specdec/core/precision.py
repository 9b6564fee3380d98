"""Which dtype a device computes in: bfloat16 where it has units for it, float32 elsewhere.

A CPU without such units takes bfloat16, too, and converts every number on its way: training is then about ten times slower than
in float32 (results/44-other-machines.md).
"""

import functools
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
    """A dtype by its name in torch, and why it was chosen."""

    dtype: str
    reason: str


def choose_dtype(device: torch.device | str) -> DtypeChoice:
    """What `auto` is on a device, by what the device says of itself."""
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
    """dtype as it is given, or what `auto` is on this device"""
    return choose_dtype(device).dtype if dtype == AUTO else dtype


def _choose_for_cpu() -> DtypeChoice:
    limit = os.environ.get(
        "ONEDNN_MAX_CPU_ISA", "DEFAULT"
    ).upper()  # a user's limit of what oneDNN may use of the processor
    if limit != "DEFAULT" and not any(name in limit for name in ("BF16", "FP16", "AMX", "AVX10")):
        return DtypeChoice("float32", f"ONEDNN_MAX_CPU_ISA={limit} leaves oneDNN no bfloat16 units")
    if torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        units = {"AMX": "_is_amx_tile_supported", "AVX-512": "_is_avx512_bf16_supported"}
        for what, query in units.items():
            if getattr(torch.cpu, query, lambda: False)():
                return DtypeChoice("bfloat16", f"this CPU computes in it ({what})")
        if platform.machine() in ("aarch64", "arm64"):  # there oneDNN takes bfloat16 only where it has units
            return DtypeChoice("bfloat16", "this CPU computes in it")
    return DtypeChoice("float32", "this CPU has no bfloat16 units that oneDNN uses")


# Products of few rows with a large matrix in float32 on a CPU: what plain decoding and verification spend their time on.
#
# A BLAS may have no good kernel for them. MKL on an AMD processor takes two or three times as long for x @ weight.T with 2 to 4 rows as
# with one, and weight @ x.T is then up to twice as fast (results/44-other-machines.md). Which of the two is faster here depends on the shape, and is
# measured once for each.

FEW_ROWS = range(2, 5)  # with one row or with more than these, the usual way is as fast or faster
MIN_MATRIX_SIZE = 1 << 18  # numbers of a matrix: reading a smaller one is not what takes the time
MEASURED_SIZE = 6 << 20  # of the matrices that are measured: 25 MB, which few caches hold
NUM_REPEATS = 5  # of each way, in turn; the shortest counts
MAX_TIME_RATIO = 0.85  # of the time that the usual way takes, from which the other one is used


def prepare_few_rows(model: nn.Module) -> None:
    """Makes the linear layers of a frozen model take the faster way."""

    def forward(module: nn.Linear, x: Tensor) -> Tensor:
        return multiply_few_rows(x, module.weight, module.bias)

    for module in model.modules():
        if type(module) is nn.Linear and _is_large(module.weight):
            module.forward = functools.partial(forward, module)  # type: ignore[method-assign]


def multiply_few_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """torch.nn.functional.linear: x [.., D], weight [E, D] -> [.., E]. The faster way is taken where no gradient is wanted."""
    rows = x.numel() // x.shape[-1] if x.numel() else 0
    # a function that is traced keeps the usual product, which the compiler knows
    if rows not in FEW_ROWS or not _is_large(weight) or torch.is_grad_enabled() or torch._C._len_torch_dispatch_stack():
        return F.linear(x, weight, bias)
    # processes of one run must round alike, and a clock decides here
    if torch.distributed.is_initialized() or not is_transposed_faster(rows, *weight.shape, torch.get_num_threads()):
        return F.linear(x, weight, bias)
    out = torch.mm(weight, x.reshape(rows, -1).t()).t()
    return (out if bias is None else out + bias).reshape(*x.shape[:-1], -1)


def _is_large(weight: Tensor) -> bool:
    plain = type(weight) in (Tensor, nn.Parameter)  # not one that is quantised or divided
    return plain and weight.device.type == "cpu" and weight.dtype == torch.float32 and weight.numel() >= MIN_MATRIX_SIZE


@functools.cache
def is_transposed_faster(rows: int, outputs: int, inputs: int, threads: int) -> bool:
    """Whether weight @ x.T is clearly faster than x @ weight.T, for x [rows, inputs] and weight [outputs, inputs]."""
    outputs = min(outputs, max(1, MEASURED_SIZE // inputs))  # the time is in proportion
    weights = [torch.ones(outputs, inputs) for _ in range(max(1, MEASURED_SIZE // (outputs * inputs)))]
    x = torch.ones(rows, inputs)
    plain_times, transposed_times = [], []
    for _ in range(NUM_REPEATS):
        start = time.perf_counter()
        for weight in weights:
            F.linear(x, weight)
        middle = time.perf_counter()
        for weight in weights:
            torch.mm(weight, x.t())
        plain_times.append(middle - start)
        transposed_times.append(time.perf_counter() - middle)
    return min(transposed_times) < MAX_TIME_RATIO * min(plain_times)
