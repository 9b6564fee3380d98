"""Devices: their numbers, memory that does not suffice, products that are not rounded, and copies that nobody waits for."""

import contextlib
import functools
import math
import re
from collections.abc import Iterator

import torch
from torch import Tensor

# How torch and the libraries below it say that memory does not suffice, where they raise a plain RuntimeError
OUT_OF_MEMORY = re.compile(r"out of memory|can't allocate memory|not enough memory|_ALLOC_FAILED", re.IGNORECASE)
ALLOCATION = re.compile(r"tried to allocate ([\d.]+) ?(bytes|[KMGT]iB)", re.IGNORECASE)


def number_device(device: torch.device | str) -> torch.device:
    """A device with its number: cuda is the current GPU, such as cuda:0. Only such a device equals that of a tensor on it."""
    return torch.empty(0, device=device).device


def wait_for_device(device: torch.device) -> None:
    """Waits until a device has done what it was given to do; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type != "cpu":
        torch.accelerator.synchronize(device)


def use_side_stream(device: torch.device) -> contextlib.AbstractContextManager:
    """Within, a GPU works beside what it has been given to do, and a wait is for what is given to it here only."""
    return torch.cuda.stream(_side_stream(device)) if device.type == "cuda" else contextlib.nullcontext()


def join_side_stream(tensor: Tensor) -> None:
    """Waits until a tensor that was made `aside` is there; what the device is given from now on may use it."""
    if tensor.device.type == "cuda":
        _side_stream(tensor.device).synchronize()
        # Its memory is not given to others aside before that has run
        tensor.record_stream(torch.cuda.current_stream(tensor.device))


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for a device: cuBLAS keeps a workspace for each stream that a thread has used."""
    return torch.cuda.Stream(device)


def describe_out_of_memory(error: BaseException | None) -> str | None:
    """The beginning of a sentence, if an error says that memory did not suffice, or comes from one that does; else None."""
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
    """The first line of an error's message, as a part of a sentence; its class where it has none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


@contextlib.contextmanager
def exact_products() -> Iterator[None]:
    """Within, products of float32 matrices are not rounded to TF32 (or bfloat16), whatever the user or a container has set.

    The older of torch's two interfaces sets both, and torch refuses to work where they differ.
    """
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    precisions, old_precision = [place.fp32_precision for place in backends], None
    with contextlib.suppress(RuntimeError):  # where the newer one alone was used, the older one cannot be read
        old_precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        if old_precision is not None:
            torch.set_float32_matmul_precision(old_precision)
        for place, precision in zip(backends, precisions):
            place.fp32_precision = precision


def upload_tensors(tensors: list[Tensor], device: torch.device) -> list[Tensor]:
    """Copies tensors of int64 from the CPU, as one; as they are if the device is the CPU."""
    if device.type == "cpu":
        return tensors
    flat = torch.cat([each.flatten() for each in tensors])
    parts = upload_tensor(flat, device).split([math.prod(each.shape) for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors)]


def upload_values(values: list, device: torch.device | str) -> Tensor:
    """torch.tensor(values, device=device), but the host does not wait."""
    return upload_tensor(torch.tensor(values), torch.device(device))


def upload_tensor(tensor: Tensor, device: torch.device) -> Tensor:
    """One tensor; from page-locked memory where the device is a GPU, because other memory is copied while the host waits

    On MPS the host waits: there, torch did not keep a tensor whose copy was under way (pytorch issue 189690).
    """
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=device.type != "mps")
