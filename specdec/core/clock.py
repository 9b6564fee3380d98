"""Times of what a device was given to do, without waiting for the device."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

QUEUED_DEVICES = (
    "cuda",
)  # kinds of devices that work behind the host, and can note when they reach a place in their work


@dataclass(frozen=True)
class Moment:
    """A place in the work. when: the host's seconds, or a CUDA event; apart: seconds before it that do not count"""

    timestamp: Any
    excluded_seconds: float


class RoundClock:
    """apart: gives the seconds so far that do not count, such as those of compiling

    queued: whether the device reaches a mark later than the host. Then its time is known after the next `read` only.
    """

    def __init__(self, device: torch.device, count_excluded_seconds: Callable[[], float]):
        self.device, self.count_excluded_seconds, self.queued = (
            device,
            count_excluded_seconds,
            device.type in QUEUED_DEVICES,
        )

    def mark(self) -> Moment:
        """This place in the work."""
        if not self.queued:
            return Moment(time.perf_counter(), self.count_excluded_seconds())
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self.device))
        return Moment(event, self.count_excluded_seconds())

    def read(self, values: Tensor) -> tuple[list, Moment]:
        """Waits for the device: values.tolist(), and the place where the device had them."""
        if self.queued:
            mark = self.mark()
            return values.tolist(), mark
        return values.tolist(), self.mark()

    def seconds(self, start: Moment, end: Moment) -> float:
        """Between two places, after the first `read` behind them."""
        spent = start.timestamp.elapsed_time(end.timestamp) / 1e3 if self.queued else end.timestamp - start.timestamp
        return max(0.0, spent - (end.excluded_seconds - start.excluded_seconds))
