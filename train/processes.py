"""The processes of a run: which one speaks, and what only the main one computes."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar

from accelerate import PartialState
from accelerate.utils import broadcast_object_list

from train.waiting import Waiting

Result = TypeVar("Result")


def is_main() -> bool:
    """Whether this is the process that speaks; before the accelerator is made, too."""
    return os.environ.get("RANK", "0") == "0"


def say(text: str) -> None:
    """Prints a line, once for all processes: `Accelerator.print` would print it on every machine."""
    if is_main():
        print(text)


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Within, a warning is one line without the place in the code. What all processes would say, only the main one says;
    a RuntimeWarning is of one process."""
    formatwarning, number = warnings.formatwarning, os.environ.get("RANK", "0")
    who = "" if is_main() else f"process {number}: "
    with warnings.catch_warnings():
        if not is_main():
            warnings.simplefilter("ignore", UserWarning)
        warnings.formatwarning = lambda message, *_, **__: f"warning: {who}{message}\n"
        try:
            yield
        finally:
            warnings.formatwarning = formatwarning


def by_main(make: Callable[[], Result], what: str, *, minutes: float) -> Result:
    """The result of `make`, which the main process calls and the others get. They wait so many minutes for it."""
    state = PartialState()
    made = [make() if state.is_main_process else None]
    with Waiting(minutes, state.process_index, state.num_processes)(what):
        return broadcast_object_list(made)[0]
