"""Peak figures of devices, the memory that code takes on them, and targets with random weights."""

import contextlib
import gc
import platform
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config

from specdec.core import devices
from specdec.core.compile import decodes_joined, join_products
from specdec.target import attention
from specdec.target.model import Target
from specdec.target.structure import find_experts
from train.prepare.count_tensors import H100_BANDWIDTH, H100_PEAK

MAX_READ_BYTES = 2**30  # bytes that a measurement of bandwidth reads on a CPU, at most
GPU_READ_BYTES = 2**33  # the same on a GPU, where the start of a kernel must not count
SAMPLE_SECONDS = 0.003  # seconds between two samples of the memory of this process


@dataclass(frozen=True)
class Peak:
    """Peak figures of one device; None: unknown."""

    flops: float | None = None  # FLOP/s of dense products in bfloat16, summed in float32
    bandwidth: float | None = None  # bytes/s of its memory


# Data sheets of the maker, by the beginning of torch.cuda.get_device_name without the maker's name; the first that fits
PEAKS = {
    "B200": Peak(2250e12, 8.0e12),
    "H200": Peak(989e12, 4.8e12),
    "H100 PCIe": Peak(756e12, 2.0e12),
    "H100": Peak(H100_PEAK, H100_BANDWIDTH),
    "A100": Peak(312e12, 2.039e12),
    "L40S": Peak(362e12, 864e9),
    "L4": Peak(121e12, 300e9),
    "RTX 4090": Peak(165.2e12, 1.008e12),
}


def find_peak(device: torch.device) -> Peak:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""  # such as NVIDIA H100 80GB HBM3
    short = name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    return next((peak for key, peak in PEAKS.items() if re.match(re.escape(key) + r"\b", short)), Peak())


def find_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def describe_device(device: torch.device) -> str:
    """The device's name, and torch's version."""
    cpu = f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else cpu
    return f"{name}, torch {torch.__version__}"


def count_own_memory() -> int:
    """Bytes that this process allocated. Mapped pages of a target's file do not count."""
    match = re.search(r"^RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert match is not None
    return 1024 * int(match[1])


class PeakMemory:
    """The peak memory within `measured`.

    `bytes`: largest number of bytes in use, less those at the start; `total`: the same with the start, on a GPU
    """

    def __init__(self, device: torch.device):
        self.device, self.bytes, self.total = device, 0, 0

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """Measures the code within. On a CPU (Linux) memory is sampled, and an allocator may hold older memory.

        For exact figures on a CPU, measure in a new process.
        """
        gc.collect()
        if self.device.type == "cuda":
            devices.wait_for_device(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            yield
            devices.wait_for_device(self.device)
            self.total = torch.cuda.max_memory_allocated(self.device)
            self.bytes = self.total - before
            return
        before, highest, ended = count_own_memory(), [0], threading.Event()

        def watch() -> None:
            while not ended.wait(SAMPLE_SECONDS):
                highest[0] = max(highest[0], count_own_memory())

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()
            self.bytes = max(highest[0], count_own_memory()) - before


SIZES = "hidden_size num_hidden_layers num_attention_heads num_key_value_heads intermediate_size vocab_size".split()
SHAPES = {
    "8b": (4096, 32, 32, 8, 14336, 128256),  # Llama-3.1-8B
    "qwen3-8b": (4096, 36, 32, 8, 12288, 151936),
    "1b": (2048, 16, 32, 8, 8192, 128256),  # Llama-3.2-1B, but for its tied embedding
    "135m": (576, 30, 9, 3, 1536, 49152),  # SmolLM2-135M
    "tiny": (64, 8, 4, 2, 128, 256),
    "qwen3-tiny": (64, 8, 4, 2, 128, 256),  # with heads as wide as those of published targets
}


def make_random_target(
    shape: str, *, device: torch.device, positions: int, dtype: str = "bfloat16", vocab_size: int | None = None
) -> Target:
    """A Llama or a Qwen3 with random weights, made on the device, for figures of speed and memory.

    On a GPU its products are joined, as those of a loaded target are (`Target.load`).
    shape: a key of SHAPES; positions: the longest text that it has to read; vocab_size: in place of the shape's
    """
    if shape not in SHAPES:
        raise ValueError(f"shape={shape} must be one of {', '.join(SHAPES)}.")
    sizes: Any = dict(zip(SIZES, SHAPES[shape], strict=True)) | ({"vocab_size": vocab_size} if vocab_size else {})
    limits: Any = {"max_position_embeddings": max(positions, 8192), "bos_token_id": None, "eos_token_id": None}
    config = (
        Qwen3Config(**sizes, **limits, head_dim=128) if shape.startswith("qwen3") else LlamaConfig(**sizes, **limits)
    )
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation=attention.IMPLEMENTATION
        )
    if decodes_joined(device):
        join_products(model)
    return Target(model, name=f"random {shape}")


# The limit of plain decoding


def count_bytes_per_token(target: Target) -> int:
    """Bytes of weights that the pass of one token reads.

    An embedding apart from the LM head counts nothing, as only one row is read. A mixture counts the experts that a
    token uses. Other parts of a multimodal model do not count.
    """
    experts = find_experts(target.config.to_dict())
    used = 1.0 if experts is None else experts.per_token / experts.num
    weights = {id(target.lm_head.weight): float(target.lm_head.weight.nbytes)}
    for name, value in [*target.decoder.named_parameters(), *target.decoder.named_buffers()]:
        if value is not target.embed.weight:
            weights[id(value)] = value.nbytes * (used if "experts" in name.split(".") else 1.0)
    return round(sum(weights.values()))


def measure_bandwidth(num_bytes: int, device: torch.device, *, repeats: int = 15) -> float:
    """Bytes/s at which the device reads memory, as a sum of float32; the best of `repeats`.

    num_bytes: number of bytes, of which at most MAX_READ_BYTES are read, on a GPU GPU_READ_BYTES
    """
    limit = GPU_READ_BYTES if device.type == "cuda" else MAX_READ_BYTES
    values = torch.ones(min(num_bytes, limit) // 4, device=device)
    return values.nbytes / min(time_on_device(values.sum, device, repeats))


def time_on_device(function: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Seconds of each call of a function: on a GPU between two events, so without the start of its first kernel."""
    seconds = []
    for _ in range(repeats):
        if device.type == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            function()
            end.record()
            end.synchronize()
            seconds.append(start.elapsed_time(end) / 1e3)
            continue
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return seconds
