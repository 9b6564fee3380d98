"""Times of a device's work, without a wait for the device."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUEUED_DEVICES = ("cuda",)  # types of devices that work behind the host and can record times


@dataclass(frozen=True)
class Moment:
    """A point in a device's work.

    timestamp: seconds of the host, or a CUDA event; excluded_seconds: seconds before it that do not count
    """

    timestamp: Any
    excluded_seconds: float


class RoundClock:
    """Measures the time between points of a device's work.

    count_excluded_seconds: returns the seconds so far that do not count, such as those of compiling
    queued: True if the device works behind the host. Then a point's time is known only after the next `read`.
    """

    def __init__(self, device: torch.device, count_excluded_seconds: Callable[[], float]):
        self.device = device
        self.count_excluded_seconds = count_excluded_seconds
        self.queued = device.type in QUEUED_DEVICES

    def mark(self) -> Moment:
        """The present point in the work"""
        if not self.queued:
            return Moment(time.perf_counter(), self.count_excluded_seconds())
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return Moment(event, self.count_excluded_seconds())

    def read(self, values: Tensor) -> tuple[list, Moment]:
        """values.tolist(), for which it waits, and the point at which the device had them"""
        mark = self.mark() if self.queued else None
        return values.tolist(), mark or self.mark()

    def seconds(self, start: Moment, end: Moment) -> float:
        """Seconds between two points, after the first `read` behind them"""
        spent = start.timestamp.elapsed_time(end.timestamp) / 1e3 if self.queued else end.timestamp - start.timestamp
        return max(0.0, spent - (end.excluded_seconds - start.excluded_seconds))
