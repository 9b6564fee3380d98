"""Threads of a CPU: how they wait for each other, and how many there are beside other work.

With GNU's runtime of OpenMP, a thread that waits spins for milliseconds. Beside a busy process it then takes the core of the thread that
it waits for, and a pass takes several times as long (results/44-other-machines.md). The runtime reads the setting when torch loads it, so
this module does not import torch, and a command imports it before torch. Intel's and LLVM's runtimes have other settings, which
are left alone.
"""

import os
import sys
import time
from pathlib import Path

SPIN = {"GOMP_SPINCOUNT": "2000"}
OWN = ("OMP_WAIT_POLICY",)  # with this, the user has said how threads wait
STAT = Path("/proc/stat")
IDLE = slice(3, 5)  # of the numbers in its first line: idle, and waiting for a disk
LEAST_SECONDS = 0.2  # of watching, from which the kernel's ticks of 10 ms say enough


def limit_spinning() -> bool:
    """Sets the variables for this process and those that it starts. -> whether they are still in time for this one"""
    if not any(name in os.environ for name in (*SPIN, *OWN)):
        os.environ.update(SPIN)
    return "torch" not in sys.modules


class Watch:
    """How many cores other processes have kept busy since it was made. It says so on Linux only."""

    def __init__(self):
        self.start = self._read()

    def busy_cores(self) -> float | None:
        """None where it is not known."""
        begun, now = self.start, self._read()
        if begun is None or now is None or now[0] - begun[0] < LEAST_SECONDS:
            return None
        seconds, busy, own = (after - before for before, after in zip(begun, now))
        return max(0.0, (busy - own) / seconds)

    @staticmethod
    def _read() -> tuple[float, float, float] | None:
        """Seconds of the clock, those that all cores were busy, and those of this process"""
        try:
            ticks = [int(number) for number in STAT.read_text().split("\n", 1)[0].split()[1:9]]
        except (OSError, ValueError):
            return None
        busy = (sum(ticks) - sum(ticks[IDLE])) / os.sysconf("SC_CLK_TCK")
        return time.monotonic(), busy, time.process_time()


WATCH = Watch()


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def free_cores() -> int:
    """Threads that find a core of their own beside what else has run since this process began; at least one."""
    cores, busy = usable_cores(), WATCH.busy_cores()
    return cores if busy is None else max(1, min(cores, round((os.cpu_count() or cores) - busy)))
