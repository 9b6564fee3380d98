"""Signals that end a run soon, with a saved state."""

import signal
import threading
from collections.abc import Callable

SCHEDULER = (signal.SIGTERM, signal.SIGUSR1)  # of Slurm and other schedulers, before they end or requeue a job
NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGUSR1: "SIGUSR1"}


class Signals:
    """Within, `number` is the signal that has come, or 0. A second Ctrl-C raises KeyboardInterrupt at once.

    within: steps after which the run ends
    say: prints a line; called in a thread of its own, as a signal may come in the middle of another print to the same
        file, which Python refuses ("reentrant call")
    """

    def __init__(self, say: Callable[[str], None], *, within: int = 1):
        self.say, self.number = say, 0
        self.when = "after this step" if within == 1 else f"within {within} steps"
        self.saying: threading.Thread | None = None

    def __enter__(self) -> "Signals":
        self.previous = {number: signal.signal(number, self._receive) for number in NAMES}
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)
        if self.saying:
            self.saying.join()

    def _receive(self, number: int, _) -> None:
        if number == signal.SIGINT:
            if self.number == signal.SIGINT:
                raise KeyboardInterrupt
            more = " Press Ctrl-C again to stop at once and lose the steps since the last save."
        else:
            more = ""
        if not self.number:
            text = f"{NAMES[signal.Signals(number)]}: stopping {self.when}.{more}"
            self.saying = threading.Thread(target=self.say, args=(text,))
            self.saying.start()
        self.number = number
