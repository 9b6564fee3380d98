"""Digests of tensors by all of their values.

Those of a safetensors file are kept in the user's cache until the file changes.
"""

import hashlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
import xxhash
from torch import Tensor

from specdec.core.files import cache_document, find_cache_folder
from specdec.core.untrusted import read_json

LOG = logging.getLogger(__name__)
FORM = 1  # of the digests: another number where they are computed in another way
# Values that are rounded and copied at a time: on a CPU so few that torch starts no threads, which would cost more
NUM_VALUES, NUM_DEVICE_VALUES = 2**15, 2**22
MIN_AGE = 2 * 10**9  # ns since a file was written: in less, it could be written again without another time
FIRST_LINE_SECONDS, SECONDS_BETWEEN_LINES = 2.0, 15.0  # seconds before the first line on the progress, and between two


def digest_tensor(tensor: Tensor) -> str:
    """32 hex digits of a tensor's shape and of all its values.

    Floating-point numbers of 16 bits or more count as they are in bfloat16, so that a copy in float32 has the same
    digest. Of all others, such as packed weights, the bytes and the dtype count.
    """
    rounded = tensor.is_floating_point() and tensor.element_size() > 1
    digest = xxhash.xxh3_128(f"{list(tensor.shape)} {'' if rounded else tensor.dtype}".encode())
    for part in _split(tensor.detach()):
        part = part.to(torch.bfloat16) if rounded else part
        digest.update(part.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _split(tensor: Tensor) -> Iterator[Tensor]:
    """The values in order, in contiguous parts [n], or one row of what is not contiguous."""
    num = NUM_VALUES if tensor.device.type == "cpu" else NUM_DEVICE_VALUES
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(num)
    else:
        for rows in tensor.split(max(1, num * len(tensor) // tensor.numel())):
            yield rows.reshape(-1)


def digest_tensors(tensors: dict[str, Tensor], name: str) -> dict[str, str]:
    """The digests of tensors in memory. A line of the log says how far long work is. name: of the model"""
    progress = DigestProgress(name, sum(tensor.nbytes for tensor in tensors.values()))
    digests = {}
    for key, tensor in tensors.items():
        digests[key] = digest_tensor(tensor)
        progress.advance(tensor.nbytes)
    return digests


def digest_files(paths: list[Path], name: str) -> list[dict[str, str]]:
    """Of each safetensors file the digests of its tensors by name; name as of `digest_tensors`"""
    cached = [_read_cached_digests(path) for path in paths]
    progress = DigestProgress(name, sum(path.stat().st_size for path, digests in zip(paths, cached) if digests is None))
    return [_digest_file(path, progress) if digests is None else digests for path, digests in zip(paths, cached)]


class DigestProgress:
    """Says in the log, once the work takes longer than SILENT, how much of it is done. size: bytes to read"""

    def __init__(self, name: str, num_bytes: int):
        self.name, self.num_bytes, self.num_read = name, num_bytes, 0
        self.start_time = time.perf_counter()
        self.next_line_seconds = FIRST_LINE_SECONDS

    def advance(self, num_bytes: int) -> None:
        self.num_read += num_bytes
        spent = time.perf_counter() - self.start_time
        if spent >= self.next_line_seconds:
            self.next_line_seconds = spent + SECONDS_BETWEEN_LINES
            seconds_left = spent * max(0, self.num_bytes - self.num_read) / self.num_read
            sentence = "%s: its weights are read for its fingerprint: %.1f of %.1f GB, about %.0f s left"
            LOG.warning(sentence, self.name, self.num_read / 1e9, self.num_bytes / 1e9, seconds_left)


def _digest_file(path: Path, progress: DigestProgress) -> dict[str, str]:
    identity, digests = _identify_file(path), {}
    with safetensors.safe_open(path, framework="pt") as file:
        names = file.keys()
        for key in names:
            tensor = file.get_tensor(key)
            digests[key] = digest_tensor(tensor)
            progress.advance(tensor.nbytes)
    if identity == _identify_file(path) and time.time_ns() - identity["mtime_ns"] > MIN_AGE:
        cache_document(
            _find_cache_file(path), {"about": identity, "digests": digests}, "The digests of a target's weights"
        )
    return digests


def _read_cached_digests(path: Path) -> dict[str, str] | None:
    try:
        document = read_json(_find_cache_file(path))
        digests = document.get("digests")
        whole = isinstance(digests, dict) and all(isinstance(digest, str) for digest in digests.values())
        return digests if whole and document.get("about") == _identify_file(path) else None
    except (OSError, ValueError):  # there is none, or it is damaged
        return None


def _identify_file(path: Path) -> dict[str, Any]:
    """By what a file is known again."""
    facts = path.stat()
    inode = {"inode": facts.st_ino, "size": facts.st_size, "mtime_ns": facts.st_mtime_ns}
    return {"form": FORM, "file": str(path.resolve()), **inode}


def _find_cache_file(path: Path) -> Path:
    """The file that keeps its digests, in $SPECDEC_CACHE or `specdec` in the user's cache folder."""
    return find_cache_folder() / "digests" / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
