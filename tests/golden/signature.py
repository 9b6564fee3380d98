"""The kind of machine on which floating-point numbers are the same bit for bit."""

import hashlib
from pathlib import Path

import torch


def name() -> str:
    """Of this process: the processor's instructions that torch uses, a digest of the processor's name, torch,
    threads.
    """
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return ", ".join(
        (
            torch.backends.cpu.get_cpu_capability(),
            hashlib.sha256(model.encode()).hexdigest()[:6],
            f"torch {torch.__version__}",
            f"{torch.get_num_threads()} threads",
        )
    )
