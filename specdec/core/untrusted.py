"""Checks of a file before it is read, if a stranger may have made it (docs/file-formats.md, section 14)."""

import json
import math
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specdec.core.devices import name_cause

MAX_JSON_BYTES = 64 * 2**20  # larger than any tokenizer.json
MAX_HEADER_BYTES = 16 * 2**20  # of a safetensors header, which is JSON; one of 100,000 tensors has 10 MiB
MIN_ELEMENTS = 8192  # least count of a tensor, because a million tiny layers take memory, too


def find_inside(folder: Path, name: str) -> Path:
    """The path of a file that a folder names. Raises ValueError if the name, or a link, leads out of the folder.

    In the cache of the Hugging Face Hub every file is a link to ../../blobs; these links are followed.
    """
    parts = Path(name).parts
    if not parts or "\0" in name or Path(name).is_absolute() or ".." in parts:
        raise ValueError(f"{folder} names the file {name!r}, which is not inside it: the folder is damaged or unsafe.")
    return check_link(folder / name, folder)


def check_link(path: Path, folder: Path) -> Path:
    """-> path. Raises ValueError if it, or a folder above it, is a link out of `folder`."""
    root = folder.resolve()
    blobs = [parent.parents[1] / "blobs" for parent in (root, *root.parents) if parent.parent.name == "snapshots"]
    real = path.resolve()
    if not any(real.is_relative_to(allowed) for allowed in (root, *blobs)):
        raise ValueError(
            f"{path} is a link to {real}, outside of {folder}. Links out of a folder are not followed: put a copy of "
            "the file there, if you trust it."
        )
    return path


def read_json(path: Path) -> dict:
    """The JSON object of a file. Raises ValueError, with what to do, for other files."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ValueError(f"{path} is larger than {MAX_JSON_BYTES >> 20} MiB: it is damaged or unsafe.")
    try:
        document = json.loads(path.read_text())
    except (ValueError, RecursionError) as error:  # also for numbers of thousands of digits, and bytes that are no text
        raise ValueError(f"{path} is not valid JSON ({error}): take another copy of it.") from error
    if not isinstance(document, dict):
        raise ValueError(f"{path} is not a JSON object but a {type(document).__name__}: take another copy of it.")
    return document


def is_text(value: Any) -> bool:
    """True if no text in a value of JSON has half of a surrogate pair, which is no character"""
    try:
        return bool(json.dumps(value, ensure_ascii=False, default=str).encode())
    except UnicodeEncodeError:
        return False


def read_tensors(path: Path) -> dict[str, Tensor]:
    """{name: tensor} of a file of safetensors. Raises ValueError, with what to do, for other files."""
    return _read_safetensors(path, safetensors.torch.load_file)


def read_names(path: Path) -> list[str]:
    """The names of the tensors, which are not read. Raises ValueError as `read_tensors` does."""
    return _read_safetensors(path, lambda file: list(safetensors.safe_open(file, framework="pt").keys()))


def _read_safetensors(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
        if size > MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size} bytes")
        return read(path)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"{path} is missing, truncated or damaged ({error}). Take another copy of it, or another checkpoint of the "
            "run."
        ) from error


def read_pickle(path: Path) -> Any:
    """A file of torch.save with tensors and plain values only. Runs no code. Raises ValueError for all other files.

    Refused are files of PyTorch before 1.6, which are no archives, and compressed ones: they state their own memory.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("it is compressed, which torch.save never does")
        return torch.load(path, weights_only=True, map_location="cpu")
    except Exception as error:  # a damaged file raises errors of many kinds
        raise ValueError(
            f"{path} cannot be read as plain tensors ({name_cause(error)}). Take a copy in safetensors, or have "
            "somebody who trusts the file save its tensors again."
        ) from error


def check_values(tensors: dict[str, Tensor]) -> None:
    """Raises ValueError for tensors with NaN or infinite values."""
    for name, value in tensors.items():
        if value.is_floating_point() and not bool(torch.isfinite(value).all()):
            raise ValueError(
                f"{name} has values that are NaN or infinite: the head is damaged, take another copy of it."
            )


class Allowance(TorchDispatchMode):
    """Within, new tensors have at most `elements` elements in all. Raises ValueError before there are more.

    For constructors whose sizes come from a file: a width of 10^12 must take no memory before it meets the tensors.
    """

    def __init__(self, elements: int):
        super().__init__()
        self.elements = self.elements_left = elements

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        sizes = args[0] if args and isinstance(args[0], list | tuple) else ()
        if not any(isinstance(value, Tensor) for value in (*args, *sizes)):
            self.elements_left -= max(MIN_ELEMENTS, _count_elements(func, args))
            if self.elements_left < 0:
                raise ValueError(
                    f"its sizes ask for more than the {self.elements} numbers that its tensors explain: the file is "
                    "damaged or unsafe."
                )
        return func(*args, **(kwargs or {}))


def _count_elements(function: Any, args: tuple) -> int:
    """The elements that a factory function makes: torch.empty([2, 3]), torch.arange(5); 0 for other functions"""
    if function.overloadpacket is torch.ops.aten.arange:
        return int(max(abs(bound) for bound in args[:2]))
    return math.prod(args[0]) if args and isinstance(args[0], list | tuple) else 0
