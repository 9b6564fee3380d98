"""Commands that torchrun starts in several processes, which hold a target together (target.tp=)."""

import atexit
import contextlib
import os
import time
import warnings
from collections.abc import Iterator

import torch
from torch import distributed as dist

SECONDS_FOR_MAIN = 10  # the main process tells an error first, and the launcher then ends the others
MAIN = os.environ.get("RANK", "0") == "0"  # whether this is the process that speaks and writes


@contextlib.contextmanager
def only_main_speaks() -> Iterator[None]:
    """Within, what the other processes print goes nowhere, and they wait with their errors."""
    if MAIN:
        yield
        return
    warnings.simplefilter("ignore")
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        try:
            yield
        except SystemExit as error:
            if error.code not in (None, 0):
                time.sleep(SECONDS_FOR_MAIN)
            raise


def join(tp: int, device: str) -> str:
    """Joins the processes that torchrun has started. -> the device to load the target to: each process has its own GPU

    Raises ValueError if they are not as many as `tp`, or share a GPU.
    """
    num = int(os.environ.get("WORLD_SIZE", "1"))
    if num not in (1, tp):
        raise ValueError(
            f"tp={tp} and {num} processes: start {tp}, by torchrun --nproc_per_node {tp}, or set tp={num}."
        )
    if num == 1 or device == "auto":
        return device
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device={device}: with tp={tp} each process takes the GPU of its number, so leave it out.")
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("gloo" if device == "cpu" else "nccl")
        atexit.register(dist.destroy_process_group)
    return device
