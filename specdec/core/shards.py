"""The safetensors files of a model, of which single tensors are read without the rest."""

from pathlib import Path
from typing import Any, cast

import safetensors
from torch import Tensor
from transformers.utils import cached_file
from transformers.utils.hub import try_to_load_from_cache

from specdec.core import untrusted

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"


class Shards:
    """The tensors of a model by name. Files of the Hugging Face Hub are fetched when one of their tensors is first read.

    name: a folder, or a name on the Hub. Raises ValueError, with what to do, if it has no safetensors.
    """

    def __init__(self, name: str, *, revision: str | None = None):
        self.name, self.revision = name, revision
        self.open: dict[str, Any] = {}  # files that tensors were read from
        index = self._fetch(INDEX, optional=True)
        if index is not None:
            places = untrusted.read_json(index).get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
                raise ValueError(
                    f"{index} has no weight_map, which names the file of every tensor: take another copy of it."
                )
            for file in set(places.values()):
                untrusted.inside(index.parent, file)  # raises for a name that leads out of it
            self.files: dict[str, str] = places
            return
        if self._fetch(SINGLE, optional=True) is None:
            raise ValueError(f"{name} has no safetensors ({SINGLE}, or {INDEX} with the files that it names).")
        self.files = dict.fromkeys(self._opened(SINGLE).keys(), SINGLE)

    def __getitem__(self, key: str) -> Tensor:
        """A tensor whose values are read from the disk where they are used."""
        return self._opened(self.files[key]).get_tensor(key)

    def shape(self, key: str) -> tuple[int, ...]:
        return tuple(self._opened(self.files[key]).get_slice(key).get_shape())

    def describe(self, key: str) -> tuple[str, list[int]]:
        """The dtype of a tensor, such as bfloat16, and its shape"""
        return str(self[key].dtype).removeprefix("torch."), list(self.shape(key))

    def path(self, file: str) -> Path:
        """One of the model's files, which is fetched if it is not here."""
        return cast(Path, self._fetch(file))

    @property
    def here(self) -> bool:
        """Whether all files are on this machine."""
        return all(self._is_here(file) for file in set(self.files.values()))

    def find(self, parameter: str, shape: tuple[int, ...]) -> str | None:
        """The tensor of a parameter of the model; None if there is none.

        Checkpoints put other names before the same last part, such as `language_model.model.` for `model.`.
        """
        if parameter in self.files:
            return parameter
        common = {key: _common(key, parameter) for key in self.files}
        longest = max(common.values(), default=0)
        found = [key for key, num in common.items() if num == longest and num > 1 and self.shape(key) == shape]
        return found[0] if len(found) == 1 else None

    def _opened(self, file: str) -> Any:
        if file not in self.open:
            path = self._fetch(file)
            try:
                self.open[file] = safetensors.safe_open(path, framework="pt")
            except (OSError, safetensors.SafetensorError) as error:
                raise ValueError(f"{path} is damaged ({error}): take another copy of it.") from error
        return self.open[file]

    def _is_here(self, file: str) -> bool:
        if Path(self.name).is_dir():
            return (Path(self.name) / file).is_file()
        return isinstance(try_to_load_from_cache(self.name, file, revision=self.revision), str)

    def _fetch(self, file: str, *, optional: bool = False) -> Path | None:
        try:
            path = cached_file(
                self.name, file, revision=self.revision, _raise_exceptions_for_missing_entries=not optional
            )
        except OSError as error:
            raise ValueError(f"{self.name}: {file} could not be read ({str(error).splitlines()[0]}).") from error
        return None if path is None else Path(path)


def is_cached(name: str) -> bool:
    """Whether the safetensors of a model on the Hub have been fetched, or begun to be."""
    try:
        return any(isinstance(try_to_load_from_cache(name, file), str) for file in (INDEX, SINGLE))
    except ValueError:  # no name on the Hub
        return False


def _common(key: str, other: str) -> int:
    """The number of last parts that two names share."""
    parts = zip(reversed(key.split(".")), reversed(other.split(".")))
    return next((num for num, (a, b) in enumerate(parts) if a != b), min(key.count("."), other.count(".")) + 1)
