"""What only a CUDA device does (captures, compiled kernels, a profiler, waits as errors), and stand-ins for a dry run.

Code of specdec is the same with both: the machine stands in front of captures and inductor, counts their calls, and
gives inductor the options of the mode that is measured.
"""

import contextlib
import gc
import importlib
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from glob import glob
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from specdec.core import compile, devices, fast
from specdec.core.clock import RoundClock
from specdec.core.devices import LateValues

CHECKER = "compute-sanitizer"
CHECKER_PLACES = ("/usr/local/cuda*/bin", "/opt/nvidia/*/bin")


class Machine:
    """A CUDA device.

    `counts`: graphs that were captured and passes that were compiled so far; `options`: of inductor, in place of the
    runner's own; None: those. `stand_in`: what the figures of a dry run are labelled with; "" on a device
    """

    stand_in = ""

    def __init__(self, device: torch.device):
        self.device = device
        self.options: dict | None = None
        self.counts, self.allowed_waits = Counter({"captures": 0, "compiles": 0}), 0

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Within, captures and compiles are counted, and inductor gets the options of `options`."""
        capture_step, compile_module = compile.capture_step, torch._inductor.compile

        def capture(function: Callable[[], None], *arguments: Any, **options: Any) -> Callable[[], None]:
            self.counts["captures"] += 1
            return self.capture_step(capture_step, function, *arguments, **options)

        def build(module: Any, examples: Any, options: dict | None = None) -> Callable:
            self.counts["compiles"] += 1
            return self.compile_module(compile_module, module, examples, {**(options or {}), **(self.options or {})})

        with (
            mock.patch.object(compile, "capture_step", capture),
            mock.patch.object(torch._inductor, "compile", build),
        ):
            yield

    def capture_step(
        self, original: Callable, function: Callable[[], None], *arguments: Any, **options: Any
    ) -> Callable[[], None]:
        return original(function, *arguments, **options)

    def compile_module(self, original: Callable, module: Any, examples: Any, options: dict) -> Callable:
        return original(module, examples, options=options)

    def profile(self, function: Callable[[], object]) -> list[dict]:
        """Kernels that a function runs, by their names: {kernel, count, us}, those with the most time first."""
        with profile(activities=[self.activity]) as profiler:
            function()
            devices.wait_for_device(self.device)
        rows = [
            {"kernel": event.key, "count": event.count, "us": self.read_time(event)}
            for event in profiler.key_averages()
            if self.is_kernel(event)
        ]
        return sorted(rows, key=lambda row: -row["us"])

    activity = ProfilerActivity.CUDA

    def is_kernel(self, event: Any) -> bool:
        return event.device_type == torch.autograd.DeviceType.CUDA

    def read_time(self, event: Any) -> float:
        """Microseconds of an event, without those that it started."""
        return float(event.self_device_time_total)

    def set_waits(self, mode: str) -> None:
        """mode: default, warn or error, for calls that wait for the device"""
        torch.cuda.set_sync_debug_mode(mode)

    @contextlib.contextmanager
    def waits(self, mode: str) -> Iterator[None]:
        """Within, each wait for the device warns, or is an error, but for those that read what a round accepted.

        `allowed_waits` counts these: `RoundClock.read` and `LateValues.read`.
        """
        self.allowed_waits = 0

        def allow(read: Callable) -> Callable:
            def read_accepted(*arguments: Any) -> Any:
                self.allowed_waits += 1
                self.set_waits("default")
                try:
                    return read(*arguments)
                finally:
                    self.set_waits(mode)

            return read_accepted

        devices.wait_for_device(self.device)
        with (
            mock.patch.object(RoundClock, "read", allow(RoundClock.read)),
            mock.patch.object(LateValues, "read", allow(LateValues.read)),
        ):
            self.set_waits(mode)
            try:
                yield
            finally:
                self.set_waits("default")

    def find_waits(self, work: Callable[[], object]) -> dict[str, int]:
        """Places (file:line) where a piece of work waits for the device, by their counts."""
        with warnings.catch_warnings(record=True) as caught, self.waits("warn"):
            warnings.simplefilter("always")
            work()
        waits = [entry for entry in caught if "synchroniz" in str(entry.message)]
        return dict(Counter(f"{entry.filename}:{entry.lineno}" for entry in waits))

    def prove(self, path: str, dtype: torch.dtype) -> str:
        """Whether a fast path agrees with its reference here: agrees, or why it is left out."""
        if fast.allows(path, self.device, dtype):
            return "agrees"
        return (fast.describe_paths(self.device) or {}).get(path, "not for this kind of device")

    def find_memory_checker(self) -> list[str]:
        """The beginning of a command that runs under compute-sanitizer; empty if it is not installed."""
        places = [path for pattern in CHECKER_PLACES for path in sorted(glob(f"{pattern}/{CHECKER}"))]
        checker = shutil.which(CHECKER) or next(iter(places), None)
        return [checker, "--tool", "memcheck", "--print-limit", "20", "--error-exitcode", "99"] if checker else []

    def free_memory(self) -> None:
        """Gives back the memory of graphs and caches that nothing holds."""
        gc.collect()
        torch.cuda.empty_cache()

    def is_alive(self) -> bool:
        """Whether the device still works: a fault ends it for its process."""
        try:
            torch.ones(1, device=self.device).item()
        except RuntimeError:
            return False
        return True


class StandIn(Machine):
    """A CPU in place of a CUDA device, for a dry run: functions are traced, and neither captured nor compiled."""

    stand_in = "a CPU in place of a GPU: nothing is captured or compiled"
    activity = ProfilerActivity.CPU

    @contextlib.contextmanager
    def installed(self):
        def capture_graph(function: Callable, inputs: Any, pool: Any) -> Callable:
            self.counts["captures"] += 1
            return function

        graphs = mock.patch.object(compile, "capture_graph", capture_graph)
        with super().installed(), graphs, fast.force_paths("cache"):  # whole rounds need that path
            yield

    def capture_step(self, original, function, *arguments, **options):
        return function

    def compile_module(self, original, module, examples, options):
        return module

    def is_kernel(self, event):
        return event.key.startswith("aten::")

    def read_time(self, event):
        return float(event.self_cpu_time_total)

    def set_waits(self, mode):
        """A CPU has nothing to wait for."""

    def prove(self, path, dtype):
        module, function = fast.PATHS[path].split(":")
        try:
            with mock.patch.object(compile, "_compile_block", lambda block: block):
                getattr(importlib.import_module(module), function)(self.device)
        except Exception as error:  # what needs CUDA raises errors of any kind here
            return devices.name_cause(error)
        return "agrees"

    def free_memory(self):
        gc.collect()

    def find_memory_checker(self):
        return ["env"]  # runs the command as it is


def make_machine(*, dry_run: bool) -> Machine:
    """The CUDA device, or for a dry run its stand-in. Raises ValueError without a device."""
    if dry_run:
        return StandIn(torch.device("cpu"))
    if not torch.cuda.is_available():
        raise ValueError(
            "There is no CUDA device here, or torch has no CUDA. dry_run=true goes through all parts on a CPU."
        )
    return Machine(torch.device("cuda", torch.cuda.current_device()))
