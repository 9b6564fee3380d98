"""Digests of all values of tensors, and of source code.

Those of a safetensors file are cached until the file changes.
"""

import functools
import hashlib
import importlib.util
import logging
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import safetensors
import torch
import xxhash
from torch import Tensor

from specdec.core.files import cache_document, find_cache_folder
from specdec.core.untrusted import read_json

LOG = logging.getLogger(__name__)
FORM = 1  # version of the digests' computation
NUM_VALUES = 2**15  # rounded and copied at a time on a CPU: so few that torch starts no threads, which cost more
NUM_DEVICE_VALUES = 2**22  # on other devices: 16 MB in float32
MIN_AGE = 2 * 10**9  # ns: a younger file could be written again in the same tick of the clock
FIRST_LINE_SECONDS = 2.0  # before the first line of the log about progress
SECONDS_BETWEEN_LINES = 15.0  # between later ones


def digest_tensor(tensor: Tensor) -> str:
    """32 hex digits of a tensor's shape and of all its values.

    Floating-point numbers of 16 bits or more count in bfloat16, so a copy in float32 has the same digest. For all other
    tensors, such as packed weights, the bytes and the dtype count.
    """
    rounded = tensor.is_floating_point() and tensor.element_size() > 1
    digest = xxhash.xxh3_128(f"{list(tensor.shape)} {'' if rounded else tensor.dtype}".encode())
    for part in _split(tensor.detach()):
        part = part.to(torch.bfloat16) if rounded else part
        digest.update(part.cpu().view(torch.uint8).numpy().data)
    return digest.hexdigest()


@functools.cache
def digest_sources(*names: str) -> str:
    """16 hex digits of the source code of modules, and of all modules of packages, without running them.

    A missing module counts, too: the digest changes when it comes.
    """
    digest = xxhash.xxh3_64()
    for name in names:
        for path in _list_sources(name):
            digest.update(f"{name} {path.name} {path.stat().st_size}".encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _list_sources(name: str) -> list[Path]:
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError:  # its package is missing
        return []
    if spec is None or spec.origin is None:
        return []
    path = Path(spec.origin)
    return sorted(path.parent.rglob("*.py")) if spec.submodule_search_locations else [path]


def _split(tensor: Tensor) -> Iterator[Tensor]:
    """The values in order: contiguous parts [n], or one row of a tensor that is not contiguous"""
    num = NUM_VALUES if tensor.device.type == "cpu" else NUM_DEVICE_VALUES
    if tensor.is_contiguous():
        yield from tensor.view(-1).split(num)
    else:
        for rows in tensor.split(max(1, num * len(tensor) // tensor.numel())):
            yield rows.reshape(-1)


def digest_tensors(tensors: dict[str, Tensor], name: str) -> dict[str, str]:
    """{name: digest} of tensors in memory. The log shows the progress of long work. name: name of the model"""
    progress = DigestProgress(name, sum(tensor.nbytes for tensor in tensors.values()))
    return progress.digest(tensors.items())


def digest_files(paths: list[Path], name: str) -> list[dict[str, str]]:
    """{name: digest} of the tensors of each safetensors file. name: name of the model, for the log"""
    cached = [_read_cached_digests(path) for path in paths]
    progress = DigestProgress(name, sum(path.stat().st_size for path, digests in zip(paths, cached) if digests is None))
    return [_digest_file(path, progress) if digests is None else digests for path, digests in zip(paths, cached)]


class DigestProgress:
    """Logs the progress of work that takes longer than FIRST_LINE_SECONDS. num_bytes: bytes to read"""

    def __init__(self, name: str, num_bytes: int):
        self.name = name
        self.num_bytes = num_bytes
        self.num_read = 0
        self.start_time = time.perf_counter()
        self.next_line_seconds = FIRST_LINE_SECONDS

    def digest(self, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
        """The digests of named tensors"""
        digests = {}
        for name, tensor in tensors:
            digests[name] = digest_tensor(tensor)
            self._advance(tensor.nbytes)
        return digests

    def _advance(self, num_bytes: int) -> None:
        self.num_read += num_bytes
        spent = time.perf_counter() - self.start_time
        if spent >= self.next_line_seconds:
            self.next_line_seconds = spent + SECONDS_BETWEEN_LINES
            seconds_left = spent * max(0, self.num_bytes - self.num_read) / self.num_read
            sentence = "%s: its weights are read for its fingerprint: %.1f of %.1f GB, about %.0f s left"
            LOG.warning(sentence, self.name, self.num_read / 1e9, self.num_bytes / 1e9, seconds_left)


def _digest_file(path: Path, progress: DigestProgress) -> dict[str, str]:
    identity = _identify_file(path)
    with safetensors.safe_open(path, framework="pt") as file:
        digests = progress.digest((name, file.get_tensor(name)) for name in list(file.keys()))
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
    except (OSError, ValueError):  # missing or damaged
        return None


def _identify_file(path: Path) -> dict[str, Any]:
    """Facts that change if the file's content changes"""
    facts = path.stat()
    inode = {"inode": facts.st_ino, "size": facts.st_size, "mtime_ns": facts.st_mtime_ns}
    return {"form": FORM, "file": str(path.resolve()), **inode}


def _find_cache_file(path: Path) -> Path:
    """The file of its digests, in $SPECDEC_CACHE or `specdec` in the user's cache folder"""
    return find_cache_folder() / "digests" / f"{hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:32]}.json"
