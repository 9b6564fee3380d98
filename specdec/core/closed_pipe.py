"""Output that nobody reads any more: the end of a command whose pipe was closed, such as by `head`."""

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def end_at_closed_pipe() -> Iterator[None]:
    """Within, a closed pipe of stdout or stderr ends the process by SIGPIPE, as other tools end: a shell shows 141.

    What is written last is flushed here, so that Python finds nothing to flush, and to complain of, at its end.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not (is_closed(1) or is_closed(2)):  # the connection to a server, say
            raise
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGPIPE)


def is_closed(descriptor: int) -> bool:
    """Whether the reader of a pipe has closed it."""
    poll = select.poll()
    poll.register(descriptor, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))
