"""Threads of a CPU: their waits for each other, and their number.

With GNU's runtime of OpenMP, a waiting thread spins for milliseconds. Beside a busy process it then takes the core of
the thread that it waits for. A pass takes several times as long (results/44-other-machines.md). The runtime reads the
setting when torch loads it. So this module does not import torch, and a command imports it before torch. Intel's and
LLVM's runtimes have other settings, which are left alone.
"""

import os

SPIN = {"GOMP_SPINCOUNT": "2000"}
USER_VARIABLES = ("OMP_WAIT_POLICY",)  # the user's own settings of waits


def limit_spinning() -> None:
    """Sets the variables for this process and its children."""
    if not any(name in os.environ for name in (*SPIN, *USER_VARIABLES)):
        os.environ.update(SPIN)


def count_usable_cores() -> int:
    """The number of cores that this process may use"""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
