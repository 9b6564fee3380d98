"""The safetensors files of a model. Single tensors are read without the rest.

They are the files that transformers reads, in its order: the one that the
configuration names, model.safetensors, then the index with its shards.
"""

import functools
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import safetensors
from torch import Tensor
from transformers.utils import cached_file
from transformers.utils.hub import cached_files, try_to_load_from_cache

from specdec.core import hub, untrusted

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
LENGTH_BYTES = 8  # at the beginning of a safetensors file: the size of its header
METADATA = "__metadata__"  # key of a header that is no tensor


class NoSafetensors(ValueError):
    """A model without safetensors."""


class Shards:
    """The tensors of a model by name. A file on the Hugging Face Hub is fetched when one of its tensors is first read.

    name: folder, or name on the Hub; fetch_all: True to fetch all files now
    `is_local`: True if all files were on this machine from the beginning
    `config`: fields of config.json as it is; empty without that file

    Raises ValueError, with what to do, if there are no safetensors, if one of them is
    missing or damaged, or if the index names a tensor that its file lacks.
    """

    def __init__(self, name: str, *, revision: str | None = None, fetch_all: bool = False):
        self.name = name
        self.revision = revision
        self.open: dict[str, Any] = {}  # opened files by name
        self.files: dict[str, str] = {}  # file of each tensor
        self.is_local = True
        config = fetch_file(name, "config.json", revision=revision)
        self.config = {} if config is None else untrusted.read_json(config)
        weight_file = self.config.get("transformers_weights")
        if config is not None and isinstance(weight_file, str):
            untrusted.find_inside(config.parent, weight_file)  # raises if it leads out of the folder
        for file in [weight_file] if isinstance(weight_file, str) else [SINGLE, INDEX]:
            path = fetch_file(name, file, revision=revision)
            if path is not None:
                if file.endswith(".index.json"):
                    self._read_index(path, fetch_all=fetch_all)
                else:
                    self.files = dict.fromkeys(self._open_file(file).keys(), file)
                return
        raise NoSafetensors(f"{name} has no safetensors ({SINGLE}, or {INDEX} with the files that it names).")

    def __getitem__(self, key: str) -> Tensor:
        """A tensor. Its values are read from the disk at their first use."""
        return self._read(key, lambda file: file.get_tensor(key))

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._read(key, lambda file: file.get_slice(key).get_shape()))

    def dtype(self, key: str) -> str:
        """The dtype in the file's words: BF16, F8_E4M3, I32, .."""
        return str(self._read(key, lambda file: file.get_slice(key).get_dtype()))

    def describe(self, key: str) -> tuple[str, list[int]]:
        """The dtype of a tensor, such as bfloat16, and its shape"""
        return str(self[key].dtype).removeprefix("torch."), list(self.shape(key))

    def close(self) -> None:
        """Closes all files, which may then be replaced. A later read opens them again."""
        self.open.clear()

    def path(self, file: str) -> Path:
        """The path of one of the model's files, fetched if needed"""
        path = self._find_cached(file) or fetch_file(self.name, file, revision=self.revision)
        if path is None:
            raise ValueError(f"{self.name} has no file {file}: take a complete copy of it.")
        return path

    def paths(self) -> list[Path]:
        """All files with tensors, in the order of reading"""
        return [self.path(file) for file in sorted(set(self.files.values()))]

    def find(self, parameter: str, shape: tuple[int, ...]) -> str | None:
        """The tensor of a parameter of the model; None if there is none.

        Checkpoints put other names before the same last parts, such as `language_model.model.` for `model.`.
        """
        if parameter in self.files:
            return parameter
        common = {key: _count_common_parts(key, parameter) for key in self._by_ending.get(_find_ending(parameter), ())}
        longest = max(common.values(), default=0)
        found = [key for key, num in common.items() if num == longest and self.shape(key) == shape]
        return found[0] if len(found) == 1 else None

    @functools.cached_property
    def _by_ending(self) -> dict[str, list[str]]:
        endings: dict[str, list[str]] = {}
        for key in self.files:
            endings.setdefault(_find_ending(key), []).append(key)
        return endings

    def _read_index(self, index: Path, *, fetch_all: bool) -> None:
        files_by_tensor = untrusted.read_json(index).get("weight_map")
        if not isinstance(files_by_tensor, dict) or not all(isinstance(file, str) for file in files_by_tensor.values()):
            raise ValueError(
                f"{index} has no weight_map, which names the file of every tensor: take another copy of it."
            )
        files = sorted(set(files_by_tensor.values()))
        for file in files:
            untrusted.find_inside(index.parent, file)
        self.files = files_by_tensor
        self.is_local = hub.is_folder(self.name) or all(map(self._find_cached, files))
        if fetch_all and not self.is_local:
            self.is_local = _fetch(cached_files, self.name, files, revision=self.revision) is not None
        if not self.is_local:
            return
        present: dict[str, str] = {}
        for file in files:  # like transformers, all tensors of every file
            present |= dict.fromkeys(self._open_file(file).keys(), file)
        for key, file in files_by_tensor.items():
            if key not in present:
                raise ValueError(self._describe_lack(key, file))
        self.files = present

    def _describe_lack(self, key: str, file: str) -> str:
        return f"{self.path(file)} lacks the tensor {key}, which {INDEX} places there: take another copy of both files."

    def _read(self, key: str, read: Callable[[Any], Any]) -> Any:
        file = self.files[key]
        try:
            return read(self._open_file(file))
        except safetensors.SafetensorError as error:
            raise ValueError(self._describe_lack(key, file)) from error

    def _open_file(self, file: str) -> Any:
        if file not in self.open:
            path = self.path(file)
            try:
                self.open[file] = safetensors.safe_open(path, framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                names = [f"; it has {key}" for key, place in self.files.items() if place == file][:1]
                raise ValueError(f"{path} is damaged ({error}{''.join(names)}): take another copy of it.") from error
        return self.open[file]

    def _find_cached(self, file: str) -> Path | None:
        """The file's path in the cache of the Hub, which is not asked; None if it is absent"""
        if hub.is_folder(self.name):
            return None
        path = try_to_load_from_cache(self.name, file, revision=self.revision)
        return Path(path) if isinstance(path, str) else None


def read_header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The entries of a safetensors file's tensors by name, and the place of the first tensor's values in bytes.

    file: a sound file, at its beginning
    """
    size = int.from_bytes(file.read(LENGTH_BYTES), "little")
    header = json.loads(file.read(size))
    header.pop(METADATA, None)
    return header, LENGTH_BYTES + size


def fetch_file(name: str, file: str, *, revision: str | None = None) -> Path | None:
    """A file of a model, fetched from the Hub if needed; None if the model has no such file.

    name: folder, or name on the Hub. Raises ValueError if the Hub cannot answer.
    """
    path = _fetch(cached_file, name, file, revision=revision)
    return None if path is None else Path(path)


def _fetch(fetch: Callable, name: str, files: Any, *, revision: str | None) -> Any:
    local = {} if hub.is_folder(name) or hub.is_hub_reachable() else {"local_files_only": True}
    try:
        return fetch(name, files, revision=revision, _raise_exceptions_for_missing_entries=False, **local)
    except OSError as error:
        raise ValueError(f"{name}: {files} could not be read ({str(error).splitlines()[0]}).") from error


def is_cached(name: str) -> bool:
    """True if the safetensors of a model on the Hub have been fetched, at least in part"""
    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in (INDEX, SINGLE))
    except ValueError:  # a name that the Hub cannot have
        return False


def _find_ending(name: str) -> str:
    """The last two parts of a name"""
    return ".".join(name.split(".")[-2:])


def _count_common_parts(key: str, parameter: str) -> int:
    """The number of last parts that two names share"""
    pairs = zip(reversed(key.split(".")), reversed(parameter.split(".")))
    return len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
