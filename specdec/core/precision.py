"""Which dtype a device computes in: bfloat16 where it has units for it, float32 elsewhere.

A CPU without such units takes bfloat16, too, and converts every number on its way: training is then about ten times slower than
in float32 (results/44-other-machines.md). What the CPU and oneDNN say of themselves decides where it can, one short product where it cannot.
"""

import functools
import os
import time
from dataclasses import dataclass

import torch

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
