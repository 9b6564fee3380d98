"""Signals that end a run after the step at hand."""

import signal
from collections.abc import Callable

SCHEDULER = (signal.SIGTERM, signal.SIGUSR1)  # of Slurm and other schedulers, before they end or requeue a job
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}


class Signals:
    """Within, `number` is the signal that has come, or 0. A second Ctrl-C raises KeyboardInterrupt at once.

    say: prints a line
    """

    def __init__(self, say: Callable[[str], None]):
        self.say, self.number = say, 0

    def __enter__(self) -> "Signals":
        self.previous = {number: signal.signal(number, self._receive) for number in NAMES}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def _receive(self, number: int, _) -> None:
        if number == signal.SIGINT:
            if self.number == signal.SIGINT:
                raise KeyboardInterrupt
            more = " Press Ctrl-C again to stop at once and lose the steps since the last save."
        else:
            more = ""
        if not self.number:
            self.say(f"{NAMES[signal.Signals(number)]}: stopping after this step.{more}")
        self.number = number
