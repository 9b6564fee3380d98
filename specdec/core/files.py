"""Files and folders that appear whole or not at all, with checksums that show damage."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import safetensors.torch
from torch import Tensor

CHECKSUMS = "SHA256SUMS"  # checksums of the files beside it, in the format of `sha256sum --check`


@contextlib.contextmanager
def replace_folder(folder: Path) -> Iterator[Path]:
    """Yields a folder for new files. It replaces `folder`, with checksums, once all of them are on the disk.

    Raises ValueError, and leaves nothing behind, if the disk is full.
    """
    partial, old = (folder.with_name(folder.name + ending) for ending in (".partial", ".old"))
    shutil.rmtree(partial, ignore_errors=True)  # left behind by a killed process
    try:
        partial.mkdir(parents=True)
        yield partial
        paths = sorted(path for path in partial.iterdir() if path.is_file())
        (partial / CHECKSUMS).write_text(_write_checksums({path.name: hash_file(path) for path in paths}))
        for path in (*partial.iterdir(), partial):
            sync_path(path)
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            folder.rename(old)
        partial.rename(folder)
        sync_path(folder.parent)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError | safetensors.SafetensorError):
            raise describe_write_error(folder, error) from error
        raise


def write_folder(folder: Path, *, tensors: dict[str, dict[str, Tensor]], documents: dict[str, dict]) -> None:
    """Writes `NAME: tensors` as safetensors and `NAME: document` as JSON, by `replace_folder`."""
    with replace_folder(folder) as partial:
        for name, values in tensors.items():
            whole = {key: value.detach().cpu().contiguous() for key, value in values.items()}
            safetensors.torch.save_file(whole, partial / name)
        for name, document in documents.items():
            (partial / name).write_text(json.dumps(document, indent=2) + "\n")


def make_folder_once(folder: Path, make: Callable[[Path], object]) -> None:
    """Makes a folder of files for all processes and later runs, unless it is there and undamaged.

    make: writes files into the folder that it gets. One process calls it, and the others wait. The system frees their
        lock when that process ends, however it ends.
    Raises ValueError, and leaves nothing behind, if the disk is full or the folder cannot be written.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder.with_name(folder.name + ".lock")):
            if folder.exists():
                damage = _find_damage(folder)
                if damage is None:
                    return
                warnings.warn(f"{folder} is damaged ({damage}) and is made again.", stacklevel=2)
                shutil.rmtree(folder)
            with replace_folder(folder) as partial:
                make(partial)
    except OSError as error:
        raise describe_write_error(folder, error) from error


def _find_damage(folder: Path) -> str | None:
    """The damage of a folder by `make_folder_once`; None if there is none"""
    try:
        for name, checksum in _read_checksums(folder / CHECKSUMS).items():
            if hash_file(folder / name) != checksum:
                return f"{name} has other bytes than were written"
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def write_text(path: Path, text: str) -> None:
    """Writes a text in UTF-8 by `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Writes a small file that appears whole or not at all.

    Raises ValueError, and leaves the old file, if the disk is full.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        with partial.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_path(path.parent)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise describe_write_error(path, error) from error


def expand_home(value: Any) -> Any:
    """The setting with a home folder for each `~` or `~user` that begins a path, an item of a list, or a key"""
    if isinstance(value, str | Path):
        return type(value)(os.path.expanduser(value))
    if isinstance(value, list | tuple):
        return [expand_home(item) for item in value]
    if isinstance(value, dict):
        return {expand_home(key): expand_home(item) for key, item in value.items()}
    return value


def find_cache_folder() -> Path:
    """The folder of files that can be made again: $SPECDEC_CACHE, or `specdec` in the user's cache folder"""
    given = os.environ.get("SPECDEC_CACHE")
    usual = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    try:
        return (Path(given) if given else Path(usual) / "specdec").expanduser()
    except RuntimeError:  # a user without a home, as in containers
        return Path(tempfile.gettempdir()) / "specdec"


def cache_document(path: Path, document: dict, name: str) -> None:
    """Writes JSON that can be made again, or warns that it cannot. Other processes may write the same file.

    name: name of the content, for the warning
    """
    partial = path.with_suffix(f".{os.getpid()}")
    try:
        partial.parent.mkdir(parents=True, exist_ok=True)
        write_text(partial, json.dumps(document) + "\n")
        partial.replace(path)
    except (OSError, ValueError) as error:
        warnings.warn(f"{name} cannot be kept in {path.parent} ({error}), and will be made again.", stacklevel=2)


@contextlib.contextmanager
def lock_cached(path: Path | None) -> Iterator[None]:
    """Within, no other process of this machine makes the cached file `path`: it waits, and then reads the file.

    None, a folder that cannot be written, and one without locks: nobody waits, and each makes its own.
    """
    with contextlib.ExitStack() as stack:
        if path is not None:
            with contextlib.suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(filelock.FileLock(path.with_suffix(".lock"), fallback_to_soft=False))
        yield


def replace_document(path: Path, document: dict) -> None:
    """Replaces a JSON document in a folder by `write_folder`, and its checksum.

    Raises ValueError as `write_text` does.
    """
    for name, content in encode_files(path.parent, {path.name: encode_document(document)}).items():
        write_text(path.with_name(name), content.decode())


def encode_document(document: dict) -> str:
    """The text of a JSON document."""
    return json.dumps(document, indent=2) + "\n"


def encode_files(folder: Path, texts: dict[str, str]) -> dict[str, bytes]:
    """{name: content} of texts in place of files of a folder, and of the file of checksums with them"""
    contents = {name: text.encode() for name, text in texts.items()}
    sums = folder / CHECKSUMS
    checksums = _read_checksums(sums) if sums.exists() else {}
    for name, content in contents.items():
        checksums.pop(name, None)
        checksums[name] = hashlib.sha256(content).hexdigest()
    return contents | {CHECKSUMS: _write_checksums(checksums).encode()}


def _read_checksums(path: Path) -> dict[str, str]:
    """{name: SHA-256} of a file of checksums"""
    return {line[66:]: line[:64] for line in path.read_text(errors="replace").splitlines()}


def _write_checksums(checksums: dict[str, str]) -> str:
    return "".join(f"{checksum}  {name}\n" for name, checksum in checksums.items())


def append_text(path: Path, text: str, *, synced: bool) -> None:
    """Appends whole lines to a file. Raises ValueError, and appends nothing, if the disk is full.

    synced: True if the lines must be on the disk at the return. Otherwise a power cut may lose them, but no kill.
    """
    content = text.encode()
    try:
        with path.open("ab", buffering=0) as file:  # a buffer would be written again when the file is closed
            length = file.tell()
            try:
                while content:
                    content = content[file.write(content) :]
                if synced:
                    os.fsync(file.fileno())
            except OSError:
                os.truncate(path, length)
                raise
    except OSError as error:
        raise describe_write_error(path, error) from error


def describe_write_error(path: Path, error: Exception) -> ValueError:
    """A ValueError with the cause, and what to do"""
    advice = ADVICE.get(getattr(error, "errno", None))
    reason = error if advice is None else getattr(error, "strerror", None)
    advice = (advice or ADVICE[errno.ENOSPC]).capitalize()
    return ValueError(f"{path} could not be written ({reason}). {advice}; what was saved before is untouched.")


ADVICE: dict[int | None, str] = {
    errno.ENOENT: "check the path",
    errno.EACCES: "take a place that you may read and write, or change its permissions",
    errno.EPERM: "take a place that you may read and write, or change its permissions",
    errno.EROFS: "take a place that can be written to",
    errno.ENOSPC: "free some disk space, or choose another place",
    errno.EDQUOT: "free some disk space, or choose another place",
    errno.EISDIR: "name a file, not a folder",
    errno.ENOTDIR: "a part of this path is a file, so choose another path",
    errno.EEXIST: "choose another name",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EMFILE: "allow more open files (ulimit -n)",
    errno.EADDRINUSE: "choose another port",
    errno.ECONNREFUSED: "start the server, or check its address",
}  # advice by error of the system


def describe_error(error: OSError) -> str:
    """An error of the system as a sentence: the file, the cause, and what to do"""
    if error.errno is None or error.strerror is None:  # raised by a library
        return " ".join(str(error).split())
    names = " -> ".join(str(name) for name in (error.filename, error.filename2) if name is not None)
    what = f"{names}: {error.strerror}" if names else error.strerror
    advice = ADVICE.get(error.errno)
    return f"{what}: {advice}." if advice else f"{what}."


def restore_folders(folder: Path) -> None:
    """Puts back the folders that `write_folder` had moved away when its process was killed."""
    for old in folder.glob("*.old"):
        if old.with_suffix("").exists():
            shutil.rmtree(old)
        else:
            old.rename(old.with_suffix(""))


def remove_folder(folder: Path) -> None:
    """Removes a folder. It is renamed first, so that no half of it has its name."""
    doomed = folder if folder.suffix == ".partial" else folder.with_name(folder.name + ".partial")
    if folder != doomed:
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def sync_path(path: Path) -> None:
    """Waits until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_files(*paths: Path) -> None:
    """Raises ValueError if a file differs from its recorded checksum. Files without one are not checked."""
    for path in paths:
        sums = path.with_name(CHECKSUMS)
        if not sums.exists():
            continue  # written by an earlier version
        recorded = _read_checksums(sums)
        if path.name in recorded and hash_file(path) != recorded[path.name]:
            raise ValueError(
                f"{path} is damaged: it has not the checksum that {sums} records. Take another copy of the folder, or "
                f"another checkpoint of the run. If you changed the file on purpose, delete {CHECKSUMS}."
            )


def hash_file(path: Path) -> str:
    """The SHA-256 of a file, in hex digits"""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def count_free_bytes(path: Path) -> int:
    """Free bytes of the disk that holds, or will hold, a file or folder"""
    return shutil.disk_usage(next(place for place in (path, *path.absolute().parents) if place.exists())).free
