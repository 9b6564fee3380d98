"""Files of hidden states that vLLM writes beside its answers (train/features/in_vllm/hidden_states_connector.py)."""

import contextlib
import fcntl
import json
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from specdec.engines.client import BadAnswer

LOST = (
    "The engine's log says why: it may have been stopped, or its disk be full. An engine on another machine needs "
    "folder=, one "
    "that both machines see under the same path"
)


def find_file(answer: dict) -> Path | None:
    """The file that came with an answer; None: the answer has no hidden states."""
    path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
    return Path(path) if isinstance(path, str) and path.endswith(".safetensors") else None


def load_file(path: Path) -> tuple[dict[str, Tensor], dict]:
    """Waits for a file, and reads token_ids [t], hidden_states [t, layers, D] and the metadata. Raises BadAnswer."""
    try:
        with contextlib.suppress(FileNotFoundError), find_lock(path).open() as held:  # held until the file is written
            fcntl.flock(held, fcntl.LOCK_SH)
        content = path.read_bytes()
        tensors = safetensors.torch.load(content)
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise BadAnswer(f"the hidden states in {path} cannot be read ({error}). {LOST}") from error
    header = content[8 : 8 + int.from_bytes(content[:8], "little")]
    return tensors, json.loads(header).get("__metadata__", {})


def find_lock(path: Path) -> Path:
    """The lock that the server holds until a file is written."""
    return path.with_name(path.name + ".lock")


def delete_file(path: Path) -> None:
    """Deletes a file of hidden states and its lock."""
    for file in (path, find_lock(path)):
        with contextlib.suppress(OSError):
            file.unlink()


def discard_states(answer: dict, tokens: list[int]) -> None:
    """Deletes the hidden states of a text that nobody needs, if the server has written them."""
    path = find_file(answer)
    if path is not None:
        with contextlib.suppress(BadAnswer, KeyError):
            ids = load_file(path)[0]["token_ids"].tolist()
            if ids and ids == tokens[: len(ids)]:
                delete_file(path)
