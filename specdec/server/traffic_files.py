"""Files of recorded rows: traffic-000001.jsonl, traffic-000002.jsonl, ... in one folder, oldest first.

Each writer appends to a file of its own and holds a lock on it (flock), so that several processes can share a folder. The
system frees the lock when the process ends, by kill -9 too.
"""

import contextlib
import fcntl
import logging
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path

from specdec.core import files, row_files

LOG = logging.getLogger(__name__)
NAME = re.compile(r"traffic-(\d{6,})\.jsonl")


class TrafficFiles:
    """The files of a folder, for one writer.

    max_file_bytes: a file that would become longer is followed by the next one
    max_bytes: of all files together; the oldest ones that nobody writes are deleted

    The folder is made, readable for its owner only. A damaged last line, which a killed writer leaves behind, is cut off, and
    that is logged. Raises ValueError, with what to do, if the folder cannot be used. Use it from one thread at a time.
    """

    def __init__(self, folder: Path, *, max_file_bytes: int, max_bytes: int):
        self.folder, self.max_file_bytes, self.max_bytes = folder, max_file_bytes, max_bytes
        self.path: Path | None = None  # the file that is written
        self._held: int | None = None  # a descriptor, for its lock
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._begin()
        except OSError as error:
            raise ValueError(f"Nothing can be recorded in {folder} ({error}): choose another folder.") from error

    def append(self, line: str) -> bool:
        """Adds a line -> whether there was room for it. Raises OSError or ValueError if it could not be written."""
        length = len(line.encode())
        if length > self.max_file_bytes:
            return False
        if self.path is None or not _is_file(self._held, self.path) or _size(self.path) + length > self.max_file_bytes:
            self._next()
        if not self._make_room(length):
            return False
        assert self.path is not None
        files.append(self.path, line, synced=False)
        return True

    def close(self) -> None:
        self._hold(None, None)

    def _begin(self) -> None:
        """Heals the files that nobody writes, and takes the newest one if it has room."""
        paths = list_files(self.folder)
        for path in paths:
            descriptor = _lock(path)
            if descriptor is None:
                continue
            if cut := row_files.cut_damaged_end(path):
                LOG.warning("%s ended with a damaged line, which was cut off (%d bytes).", path, cut)
            if path == paths[-1] and _size(path) < self.max_file_bytes:
                self._hold(path, descriptor)
            else:
                os.close(descriptor)
        if self.path is None:
            self._next()

    def _next(self) -> None:
        """Goes on in a new file."""
        while True:
            number = max((_number(path) for path in list_files(self.folder)), default=0) + 1
            path = self.folder / f"traffic-{number:06}.jsonl"
            try:
                descriptor = _lock(path, new=True)
            except FileExistsError:
                continue  # another writer was faster
            if descriptor is not None:
                self._hold(path, descriptor)
                return

    def _make_room(self, length: int) -> bool:
        """Deletes the oldest files that nobody writes, until `length` bytes can be added -> whether they can."""
        paths = list_files(self.folder)
        excess = sum(map(_size, paths)) + length - self.max_bytes
        for path in paths:
            if excess <= 0:
                break
            if path == self.path or (descriptor := _lock(path)) is None:
                continue
            excess -= _size(path)
            path.unlink()
            os.close(descriptor)
        return excess <= 0

    def _hold(self, path: Path | None, descriptor: int | None) -> None:
        if self._held is not None:
            os.close(self._held)
        self.path, self._held = path, descriptor


def list_files(folder: Path) -> list[Path]:
    """The files of recorded rows in a folder, oldest first."""
    return sorted((path for path in folder.glob("traffic-*.jsonl") if NAME.fullmatch(path.name)), key=_number)


def read(folder: str | Path) -> Iterator[dict]:
    """Yields the rows of all files, oldest first. Damaged lines are skipped, with a warning at the end that counts them.

    Raises ValueError if the folder has no such files.
    """
    paths, damaged = list_files(Path(folder)), 0
    if not paths:
        raise ValueError(
            f"{folder} has no recorded conversations (traffic-000001.jsonl, ...): give the folder of record=."
        )
    for _, row in read_lines(paths):
        damaged += row is None
        if row is not None:
            yield row
    if damaged:
        warnings.warn(f"{folder}: {damaged} damaged lines were skipped.", stacklevel=2)


def read_lines(paths: list[Path]) -> Iterator[tuple[str, dict | None]]:
    """Yields where a line is and its row, None for a damaged one. A last line without its end is being written: it is left out."""
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # the writer may delete the oldest file
            yield from ((f"{path.name}:{number}", row) for number, row in row_files.read_own_lines(path))


def _number(path: Path) -> int:
    match = NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # another writer made room
        return 0


def _lock(path: Path, *, new: bool = False) -> int | None:
    """-> a descriptor of the locked file; None if another writer has it. Raises OSError for a file that cannot be locked."""
    try:
        more = os.O_CREAT | os.O_EXCL if new else 0
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | more, 0o600)
    except FileNotFoundError:
        if new:
            raise
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError as error:
        os.close(descriptor)
        raise OSError(error.errno, f"its file system has no locks: {error.strerror}") from error
    if _is_file(descriptor, path):
        return descriptor
    os.close(descriptor)  # it was deleted in between
    return None


def _is_file(descriptor: int | None, path: Path) -> bool:
    """Whether `path` still names the open file."""
    try:
        return descriptor is not None and os.fstat(descriptor).st_ino == path.stat().st_ino
    except FileNotFoundError:
        return False
