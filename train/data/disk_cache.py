"""Folders of files that are made once and read by every process and every later run.

A folder appears whole: it is written as NAME.partial, synced and renamed. about.json holds the size and the CRC-32 of each
file, which are compared at every start; a damaged folder is made again. A lock lets one process make the folder while the
others wait, and the system releases it when that process ends, however it ends.
"""

import contextlib
import fcntl
import json
import shutil
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from specdec.core.files import sync

CHUNK = 2**22  # bytes read at a time for a checksum


def keep(folder: Path, make: Callable[[Path], dict]) -> dict:
    """The facts about a folder, which is made if it does not exist or is damaged.

    make: writes files into the folder that it is given -> facts about them, as JSON
    Raises ValueError if the disk is full or the folder cannot be written; nothing is left behind then.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with locked(folder.with_name(folder.name + ".lock")):
            if folder.exists():
                damaged = find_damage(folder)
                if damaged is None:
                    return json.loads((folder / "about.json").read_text())["facts"]
                warnings.warn(f"{folder} is damaged ({damaged}) and is made again.", stacklevel=2)
                shutil.rmtree(folder)
            return write(folder, make)
    except OSError as error:
        raise ValueError(
            f"{folder} could not be written ({error}). Free some disk space or choose another folder with cache=."
        ) from error


def write(folder: Path, make: Callable[[Path], dict]) -> dict:
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed
    partial.mkdir()
    try:
        facts = make(partial)
        files = {path.name: [path.stat().st_size, checksum(path)] for path in sorted(partial.iterdir())}
        (partial / "about.json").write_text(json.dumps({"facts": facts, "files": files}, indent=1) + "\n")
        for path in [*partial.iterdir(), partial]:
            sync(path)
        partial.rename(folder)
        sync(folder.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return facts


def find_damage(folder: Path) -> str | None:
    """What is wrong with a folder that `keep` made; None if nothing is."""
    try:
        files = json.loads((folder / "about.json").read_text())["files"]
        for name, (size, crc) in files.items():
            if (folder / name).stat().st_size != size or checksum(folder / name) != crc:
                return f"{name} has other bytes than were written"
    except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within, this process alone holds the lock file."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
