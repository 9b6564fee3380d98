"""A lock on a folder or file of results, so that no second launch writes into it."""

import contextlib
import datetime
import errno
import os
import socket
import warnings
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)  # errors of file systems without locks


@contextlib.contextmanager
def hold_lock(path: Path, *, resource: Path) -> Iterator[None]:
    """Holds the lock file `path` within. The system frees it when the process ends, by kill -9 too.

    resource: locked path, for the refusal
    Raises ValueError at once, naming the process and its host, if another process holds it. Warns on a file system
    without locks. Between hosts it holds on network file systems with locks: NFS, and Lustre mounted with `flock`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    held = FileLock(path, timeout=0, mode=0o644, fallback_to_soft=False, on_acquired=_sign)
    try:
        held.acquire()
    except Timeout:
        holder = path.read_text(errors="replace")[:500] if path.exists() else ""
        raise ValueError(
            f"{resource} is in use by {holder or 'another process'}: wait until that has ended, or "
            "write to another place."
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warning = (
            f"The file system of {resource} has no locks ({error.strerror}): nothing keeps a second launch out of it."
        )
        warnings.warn(warning, stacklevel=3)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # before the release, as a later file would be another holder's
        held.release()


def _sign(descriptor: int) -> None:
    """Writes the holder of the lock into its file, for the refusal."""
    started = datetime.datetime.now().isoformat(" ", "seconds")
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}, since {started}".encode())
