"""Devices: their numbers, full memory, exact products, and copies without a wait."""

import contextlib
import functools
import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor

# Messages of torch and the libraries below it about full memory, where they raise a plain RuntimeError
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|_ALLOC_FAILED", re.IGNORECASE)
ALLOCATION = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)


def number_device(device: torch.device | str) -> torch.device:
    """The device with its number: cuda is the current GPU, such as cuda:0.

    A tensor's device equals only such a device.
    """
    return torch.empty(0, device=device).device


def wait_for_device(device: torch.device) -> None:
    """Waits until a device has done its work; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def use_side_stream(device: torch.device) -> contextlib.AbstractContextManager:
    """Within, a GPU works beside its queue, and a wait is for this work only."""
    return torch.cuda.stream(_side_stream(device)) if device.type == "cuda" else contextlib.nullcontext()


def join_side_stream(tensor: Tensor) -> None:
    """Waits for a tensor made in `use_side_stream`. The device's later work may then use it."""
    if tensor.device.type == "cuda":
        _side_stream(tensor.device).synchronize()
        # The side stream must not reuse its memory before the current stream has read it
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """The only side stream of a device: cuBLAS keeps a workspace for each stream that a thread has used."""
    return torch.cuda.Stream(device)


def describe_out_of_memory(error: BaseException | None) -> str | None:
    """The beginning of a sentence about full memory; None if neither the error nor its causes say so"""
    while error is not None:
        text = str(error)
        runs_out = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if runs_out or (isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(text)):
            of_cpu = isinstance(error, MemoryError) or "CPUAllocator" in text
            allocation = ALLOCATION.search(text)
            unit = (
                {"k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}.get(allocation[2][0].lower(), 1) if allocation else 1
            )
            size = f" ({float(allocation[1]) * unit / 1e9:,.3g} GB were asked for)" if allocation else ""
            return f"The memory of {'this machine' if of_cpu else 'the GPU'} is full{size}"
        error = error.__cause__
    return None


def name_cause(error: BaseException) -> str:
    """The first line of an error's message, or its class, as a part of a sentence"""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Within, products of float32 matrices are exact, not rounded to TF32 or bfloat16, whatever the user has set.

    torch has two interfaces for this, and refuses to work where they differ. The older one sets both.
    """
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    precisions = [backend.fp32_precision for backend in backends]
    old_precision = None
    with contextlib.suppress(RuntimeError):  # after the newer interface alone, the older one cannot be read
        old_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if old_precision is not None:
            torch.set_float32_matmul_precision(old_precision)
        for backend, precision in zip(backends, precisions):
            backend.fp32_precision = precision


def upload_tensors(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """The tensors of int64 on the device, copied from the CPU as one; unchanged if the device is the CPU"""
    if device.type == "cpu":
        return tensors
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    parts = upload_tensor(flat, device).split([math.prod(tensor.shape) for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


def upload_values(values: list, device: torch.device | str) -> Tensor:
    """torch.tensor(values, device=device), without a wait of the host"""
    return upload_tensor(torch.tensor(values), torch.device(device))


def upload_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on the device, from page-locked memory if that is a GPU. The host waits for copies of other memory.

    On MPS the host waits: there, torch did not keep a tensor during its copy (pytorch issue 189690).
    """
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=device.type != "mps")


def copy_from_host(destination: Tensor, source: Tensor) -> None:
    """Copies values into a tensor of a device without a wait, also from the CPU."""
    from_host = source.device.type == "cpu" and destination.device.type == "cuda"
    destination.copy_(source.pin_memory() if from_host else source, non_blocking=True)


class LateValues:
    """A copy of a tensor as it is now in the device's work, which the host reads later."""

    def __init__(self, tensor: Tensor):
        self._event = torch.cuda.Event() if tensor.device.type == "cuda" else None
        if self._event is None:
            self._values = tensor.clone()
        else:
            self._values = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            self._values.copy_(tensor, non_blocking=True)
            self._event.record(torch.cuda.current_stream(tensor.device))

    def read(self) -> list:
        """The values as lists, once the device has made them."""
        if self._event is not None:
            self._event.synchronize()
        return self._values.tolist()


def round_up_power(num: int) -> int:
    """The next power of two, so that only few sizes are compiled or captured; 0 for 0."""
    return 1 << (num - 1).bit_length() if num else 0
