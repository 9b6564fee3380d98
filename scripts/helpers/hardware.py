"""What a device can do at best, from its data sheet, and how much memory a stretch of code took on it."""

import contextlib
import gc
import platform
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

SAMPLING = 0.003  # seconds between two looks at the memory of this process


@dataclass(frozen=True)
class Peak:
    """Of one device; None: not known."""

    flops: float | None = None  # FLOP/s of dense products in bfloat16, summed in float32
    bandwidth: float | None = None  # bytes/s of its memory


# By the beginning of what torch.cuda.get_device_name returns, without the maker; the first that fits. Data sheets of the maker.
PEAKS = {
    "B200": Peak(2250e12, 8.0e12),
    "GH200": Peak(989e12, 4.0e12),
    "H200 NVL": Peak(835e12, 4.8e12),
    "H200": Peak(989e12, 4.8e12),
    "H100 PCIe": Peak(756e12, 2.0e12),
    "H100 NVL": Peak(835e12, 3.9e12),
    "H100": Peak(989e12, 3.35e12),
    "A100-SXM4-40GB": Peak(312e12, 1.555e12),
    "A100-PCIE-40GB": Peak(312e12, 1.555e12),
    "A100 80GB PCIe": Peak(312e12, 1.935e12),
    "A100": Peak(312e12, 2.039e12),
    "L40S": Peak(362e12, 864e9),
    "L4": Peak(121e12, 300e9),
    "A10G": Peak(70e12, 600e9),
    "A10": Peak(125e12, 600e9),
    "RTX A6000": Peak(154.8e12, 768e9),
    "RTX 5090": Peak(209.5e12, 1.792e12),
    "RTX 4090": Peak(165.2e12, 1.008e12),
    "RTX 3090": Peak(71e12, 936e9),
}


def peak_of(name: str) -> Peak:
    """name: as torch.cuda.get_device_name returns it, such as NVIDIA H100 80GB HBM3"""
    short = name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    return next((peak for key, peak in PEAKS.items() if re.match(re.escape(key) + r"\b", short)), Peak())


def describe(device: torch.device) -> str:
    """The device's name, and torch's version."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"{platform.machine()} CPU"
    threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
    return f"{name}{threads}, torch {torch.__version__}"


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was given; a CPU always has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def own_memory() -> int:
    """Bytes of this process that no file backs: what it allocated, and not the mapped pages of a target's file."""
    status = Path("/proc/self/status")
    if not status.exists():  # not Linux
        return psutil.Process().memory_info().rss
    return 1024 * int(re.search(r"^RssAnon:\s+(\d+)", status.read_text(), re.MULTILINE)[1])  # type: ignore[index]


class PeakMemory:
    """`bytes`: the most that was in use at once within `measured`, above what was in use at its start."""

    def __init__(self, device: torch.device):
        self.device, self.bytes = device, 0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """On a CPU memory is looked at every few milliseconds, and an allocator may hold what was in use before: for exact
        figures, measure in a new process."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            yield
            torch.cuda.synchronize(self.device)
            self.bytes = torch.cuda.max_memory_allocated(self.device) - before
            return
        before, highest, ended = own_memory(), [0], threading.Event()

        def watch() -> None:
            while not ended.wait(SAMPLING):
                highest[0] = max(highest[0], own_memory())

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            self.bytes = max(highest[0], own_memory()) - before
