"""Threads of a CPU: their waits for each other, their number, and the processes in which inductor compiles.

With GNU's runtime of OpenMP, a waiting thread spins for milliseconds. Beside a busy process it then takes the core of
the thread that it waits for. A pass takes several times as long (results/44-other-machines.md). The runtime reads the
setting when torch loads it. So this module does not import torch, and a command imports it before torch. Intel's and
LLVM's runtimes have other settings, which are left alone.
"""

import os

SPIN = {"GOMP_SPINCOUNT": "2000"}
USER_VARIABLES = ("OMP_WAIT_POLICY",)  # the user's own settings of waits
COMPILERS = "TORCHINDUCTOR_COMPILE_THREADS"
MAX_COMPILERS = 32  # torch's own limit for a process, which it takes on any machine with as many cores
LOCAL_SIZES = ("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")


def limit_spinning() -> None:
    """Sets the variables for this process and its children."""
    if not any(name in os.environ for name in (*SPIN, *USER_VARIABLES)):
        os.environ.update(SPIN)


def divide_compilers() -> None:
    """Gives each process that a launcher has started on this machine its part of the cores to compile with.

    A user's own number stays. Variables of launchers say how many processes there are.
    """
    numbers = [int(os.environ[name]) for name in LOCAL_SIZES if os.environ.get(name, "").isdecimal()]
    if numbers and numbers[0] > 1:
        os.environ.setdefault(COMPILERS, str(max(1, min(MAX_COMPILERS, count_usable_cores() // numbers[0]))))


def count_usable_cores() -> int:
    """The number of cores that this process may use"""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
