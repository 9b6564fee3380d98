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


def find_device(device: str | None, tp: int) -> str:
    """The device to load the target to; null: CUDA if there is one, each process its own GPU.

    Joins the processes that torchrun has started. Raises ValueError if they are not as many as `tp`.
    """
    num = int(os.environ.get("WORLD_SIZE", "1"))
    if num not in (1, tp):
        raise ValueError(
            f"tp={tp} and {num} processes: this command needs torchrun --nproc_per_node {tp}, or set tp={num}."
        )
    usual = "cuda" if torch.cuda.is_available() else "cpu"
    if num == 1:
        return device or usual
    if device not in (None, "auto", "cpu"):
        raise ValueError(
            f"device={device}: with tp={tp}, each process takes the GPU of its number: leave it out, or set cpu."
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo" if (device or usual) == "cpu" else None)
        atexit.register(dist.destroy_process_group)
    if (device or usual) == "cuda":
        torch.cuda.set_device(local := int(os.environ["LOCAL_RANK"]))
        return f"cuda:{local}"
    return device or usual
