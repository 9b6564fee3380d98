"""A lock that a process holds on a folder or file of results, so that a second launch cannot write into it too."""

import contextlib
import datetime
import fcntl
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

_held: set[int] = set()  # descriptors of this process; children that are forked must not keep the locks


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)


os.register_at_fork(after_in_child=_close_in_child)


@contextlib.contextmanager
def lock(path: Path, *, of: Path) -> Iterator[None]:
    """Holds the lock file `path` within. The system frees it when the process ends, by kill -9 too.

    of: what is locked, for the refusal
    Raises ValueError at once, naming the process and its host, if another process holds it. Warns on a file system that has
    no locks. On network file systems the lock holds between hosts where they offer that: NFS does, Lustre if it is mounted
    with `flock`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = _open(path, of)
    _held.add(descriptor)
    try:
        started = datetime.datetime.now().isoformat(" ", "seconds")
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {started}".encode())
        yield
    finally:
        path.unlink(missing_ok=True)  # before it is freed, so that nobody's new file is removed
        _held.discard(descriptor)
        os.close(descriptor)


def _open(path: Path, of: Path) -> int:
    """-> a descriptor of the locked file"""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(descriptor, 500).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise ValueError(
                f"{of} is in use by {holder}: wait until that has ended, or write to another place."
            ) from None
        except OSError as error:
            warnings.warn(
                f"The file system of {of} has no locks ({error.strerror}): nothing keeps a second launch out of it.",
                stacklevel=4,
            )
            return descriptor
        try:
            if os.fstat(descriptor).st_ino == path.stat().st_ino:
                return descriptor
        except FileNotFoundError:
            pass
        os.close(descriptor)  # the holder before removed this file in between: lock the new one
