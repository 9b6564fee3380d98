"""The files at a model's name, without its weights: a folder, a name on the Hub, an adapter, or a GGUF file."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from huggingface_hub import HfApi

from specdec.core import hub, untrusted
from specdec.core.devices import name_cause
from specdec.core.shards import INDEX, LENGTH_BYTES, METADATA, SINGLE, fetch_file, is_cached
from specdec.core.wording import format_count
from specdec.heads.native_modules.gguf import open_gguf
from specdec.options import config_files

LFS_POINTER = b"version https://git-lfs"  # beginning of a file in place of which Git LFS has the weights
MAX_NAMED = 3  # tensors or files that a sentence names


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. dtype: name in the file's words, such as BF16"""

    file: str
    dtype: str
    shape: tuple[int, ...]


@dataclass
class StoredModel:
    """What stands at a model's name.

    problems: sentences on files that are missing or damaged; num_bytes: of all weights; None: not known
    remote: whether the weights are on the Hub, and not here
    """

    name: str
    kind: Literal["folder", "Hub", "adapter", "GGUF"]
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    num_bytes: int | None = None
    remote: bool = False
    fields: dict[str, Any] = field(default_factory=dict)  # settings of adapter_config.json, or fields of a GGUF file

    @property
    def dtypes(self) -> dict[str, int]:
        """The number of tensors of each dtype."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            if tensor.dtype:
                counts[tensor.dtype] = counts.get(tensor.dtype, 0) + 1
        return counts


def find_model_files(name: str, revision: str | None = None) -> StoredModel:
    """The files of a model. Raises ValueError for a name at which there is nothing that can be inspected."""
    path = Path(name)
    if path.suffix == ".gguf":
        return _read_gguf(path)
    if not hub.is_folder(name):
        return _find_hub_files(name, revision)
    if not path.is_dir():
        raise ValueError(f"{name} is no folder: give the folder of a model, its Hub name, or a GGUF file.")
    adapter = path / "adapter_config.json"
    if adapter.exists() and not (path / "config.json").exists():
        return StoredModel(name, "adapter", fields=untrusted.read_json(adapter))
    if not (path / "config.json").exists():
        quantised = sorted(path.glob("*.gguf"))
        advice = f"give one of its GGUF files ({quantised[0]})" if quantised else "take a complete copy of the model"
        raise ValueError(f"{name} has no config.json: {advice}.")
    return _find_folder_files(path)


def _find_folder_files(folder: Path) -> StoredModel:
    """The safetensors of a folder, by their headers alone."""
    files = StoredModel(str(folder), "folder", num_bytes=0)
    if (folder / SINGLE).exists():
        _read_header(folder, SINGLE, files)
        return files
    places = _read_places(folder, files)
    names = sorted(set(places.values()))
    missing = [name for name in names if not (folder / name).exists()]
    for name in sorted(set(names) - set(missing)):
        _read_header(folder, name, files)
    lost = [key for key, file in places.items() if file in missing]
    if missing:
        files.problems.append(
            f"The download is incomplete: {format_count(len(missing), 'file')} of {len(names)} missing "
            f"({', '.join(missing[:MAX_NAMED])}), with {lost[0]} and others. Fetch the model again."
        )
    absent = sorted(places.keys() - files.tensors.keys() - set(lost))
    if absent and not files.problems:
        files.problems.append(
            f"{folder / places[absent[0]]} lacks the tensor {absent[0]}, which {INDEX} places there: take another copy "
            "of both files."
        )
    return files


def _read_places(folder: Path, files: StoredModel) -> dict[str, str]:
    """The file of each tensor by the index; {} without one. A problem is noted where there are no weights at all."""
    index = folder / INDEX
    if index.exists():
        places = untrusted.read_json(index).get("weight_map")
        if isinstance(places, dict) and places and all(isinstance(file, str) for file in places.values()):
            for file in set(places.values()):
                untrusted.find_inside(folder, file)
            return places
        files.problems.append(f"{index} has no weight_map, which names the file of every tensor: take another copy.")
    else:
        others = [path.name for pattern in ("*.bin", "*.pt", "*.gguf") for path in sorted(folder.glob(pattern))]
        advice = f"it has {others[0]}: save it as safetensors (save_pretrained)" if others else "fetch the model again"
        files.problems.append(f"{folder} has no safetensors ({SINGLE}, or {INDEX} with its files): {advice}.")
    return {}


def _read_header(folder: Path, name: str, files: StoredModel) -> None:
    """Adds the tensors of a safetensors file, or the problem that its header or its size shows."""
    path, size = folder / name, (folder / name).stat().st_size
    files.num_bytes = (files.num_bytes or 0) + size
    with path.open("rb") as file:
        beginning = file.read(LENGTH_BYTES)
        if beginning == LFS_POINTER[:LENGTH_BYTES]:
            files.problems.append(f"{path} is a pointer of Git LFS, not the weights: run git lfs pull in {folder}.")
            return
        length = int.from_bytes(beginning, "little")
        if not 2 <= length <= min(size, untrusted.MAX_HEADER_BYTES):
            files.problems.append(f"{path} is truncated or no safetensors file: fetch it again.")
            return
        content = file.read(length)
    try:
        ends = _add_tensors(files, name, json.loads(content))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        files.problems.append(f"{path} is damaged ({name_cause(error)}): fetch it again.")
        return
    beginning_of_tensors = LENGTH_BYTES + length
    cut = [key for key, end in ends.items() if beginning_of_tensors + end > size]
    if cut:
        files.problems.append(
            f"{path} is truncated: it has {size:,} bytes of {beginning_of_tensors + max(ends.values()):,}, and "
            f"{format_count(len(cut), 'tensor')} ({', '.join(cut[:MAX_NAMED])}) are cut off. Fetch it again."
        )


def _add_tensors(files: StoredModel, name: str, header: dict[str, Any]) -> dict[str, int]:
    """Adds the tensors of a header, and returns the place behind the last byte of each. name: the file's"""
    entries = {key: value for key, value in header.items() if key != METADATA}
    ends = {key: int(value["data_offsets"][1]) for key, value in entries.items()}
    files.tensors |= {
        key: StoredTensor(name, str(value["dtype"]), tuple(value["shape"])) for key, value in entries.items()
    }
    return ends


def _find_hub_files(name: str, revision: str | None) -> StoredModel:
    """The tensors of a model on the Hub: from the cache if they are here, else from headers that the Hub sends."""
    config = fetch_file(name, "config.json", revision=revision)
    if config is None:
        adapter = fetch_file(name, "adapter_config.json", revision=revision)
        if name in config_files.list_files("target"):
            known_name = config_files.read_file("target", name)["name"]
            raise ValueError(f"{name} is a file of conf/target: give the model's name, target.name={known_name}.")
        if adapter is None and not hub.is_hub_reachable():
            raise ValueError(
                f"There is no folder {name}, and the Hugging Face Hub cannot be reached: check the name, or try again "
                "with the Hub in reach."
            )
        if adapter is None:
            raise ValueError(f"{name} on the Hugging Face Hub has no config.json: it is no model of transformers.")
        return StoredModel(name, "adapter", fields=untrusted.read_json(adapter))
    if is_cached(name) or not hub.is_hub_reachable():
        files = _find_folder_files(config.parent)
        files.name, files.kind = name, "Hub"
        return files
    files = StoredModel(name, "Hub", remote=True)
    try:
        metadata = HfApi().get_safetensors_metadata(name, revision=revision)
    except Exception as error:  # of the Hub's library and of the HTTP library
        files.problems.append(f"The headers of its weights could not be read ({name_cause(error)}).")
        return files
    files.num_bytes = 0
    for file, part in metadata.files_metadata.items():
        for key, tensor in part.tensors.items():
            files.tensors[key] = StoredTensor(file, tensor.dtype, tuple(tensor.shape))
        files.num_bytes += max((tensor.data_offsets[1] for tensor in part.tensors.values()), default=0)
    return files


def _read_gguf(path: Path) -> StoredModel:
    """The fields of a GGUF file. Raises ValueError for a missing or damaged file."""
    if not path.is_file():
        raise ValueError(f"There is no file {path}: give the path of a GGUF file, a folder, or a Hub name.")
    reader = open_gguf(str(path))
    fields = {key: reader.fields[key].contents() for key in reader.fields if not key.startswith("tokenizer.ggml")}
    files = StoredModel(str(path), "GGUF", num_bytes=path.stat().st_size, fields=fields)
    for tensor in reader.tensors:
        shape = tuple(int(size) for size in reversed(tensor.shape))
        files.tensors[tensor.name] = StoredTensor(path.name, tensor.tensor_type.name, shape)
    return files
