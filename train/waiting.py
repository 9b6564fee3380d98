"""Waiting for the other processes of a run: not for ever, and with the name of what is waited for."""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch


class ProcessLost(ValueError):
    """Another process of the run has ended, or does not answer."""


@dataclass(frozen=True)
class Waiting:
    """minutes: how long a process waits for the others"""

    minutes: float
    process: int
    num_processes: int

    @contextlib.contextmanager
    def __call__(self, what: str, *, timed: bool = True) -> Iterator[None]:
        """Around work that needs the other processes. Raises ProcessLost, with `what`, if one of them ends.

        timed: whether `minutes` are the limit of all of it; for work that may take longer, they are that of each exchange
        If they do not answer in time, the sentence is printed and this process ends: an exception would not help, because
        the call that waits, a GPU's for one, does not return.
        """
        if self.num_processes == 1:
            yield
            return
        timer = threading.Timer(60 * self.minutes, self._end, [what])
        timer.daemon = True
        if timed:
            timer.start()
        try:
            yield
        except RuntimeError as error:
            if not _of_communication(error):
                raise
            raise ProcessLost(
                f"Process {self.process} waited for {what}, and another process of the run has ended "
                f"({str(error).splitlines()[0].partition('. ')[0]})."
            ) from error
        finally:
            timer.cancel()

    def _end(self, what: str) -> None:
        sys.stderr.write(
            f"error: Process {self.process} has waited {self.minutes:g} minutes for {what}, and another process of the run "
            "does not answer. Raise train.timeout if that may take longer. Then continue with resume=true.\n"
        )
        sys.stderr.flush()
        os._exit(1)


def _of_communication(error: RuntimeError) -> bool:
    """Whether an error is of the connection to other processes. Gloo raises plain RuntimeErrors."""
    return isinstance(error, torch.distributed.DistError) or "gloo" in str(error).lower()
