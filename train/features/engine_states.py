"""Files of hidden states that vLLM has written: in a folder that this machine sees, else fetched from the server.

train/in_vllm/hidden_states_connector.py writes them, hidden_states_route.py beside it hands them out.
"""

import contextlib
import fcntl
import json
import shutil
from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor

from train.features.engine_client import SERVER, BadAnswer, Client

ROUTE = "v1/hidden_states"
ENOUGH = 64 * 2**20  # bytes; a disk with less is called full


class StateFile:
    """The file of an answer. It has the tensors token_ids [t] and hidden_states [t, layers, D]."""

    def __init__(self, client: Client, path: Path, server: str):
        self.client, self.path, self.server = client, path, server
        self.lock = path.with_name(path.name + ".lock")  # held until the file is written

    @classmethod
    def of(cls, client: Client, answer: dict) -> "StateFile | None":
        """answer: as `Client.post` has it; None: it comes without hidden states"""
        path = (answer.get("kv_transfer_params") or {}).get("hidden_states_path")
        if not isinstance(path, str) or not path.endswith(".safetensors"):
            return None
        return cls(client, Path(path), answer[SERVER])

    @property
    def here(self) -> bool:
        """Whether this machine sees the file, or the lock of one that is being written."""
        return self.path.exists() or self.lock.exists()

    def load(self) -> tuple[dict[str, Tensor], dict]:
        """The tensors and the metadata, as soon as they are written. Raises BadAnswer if they cannot be read."""
        try:
            content = self._read() if self.here else self.client.fetch(self.server, self._route)
            return safetensors.torch.load(content), _metadata(content)
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise BadAnswer(f"the hidden states in {self.path} cannot be read ({error}). {self._advice()}") from error

    def delete(self) -> None:
        if not self.here:
            self.client.delete(self.server, self._route)
        for each in (self.path, self.lock):
            with contextlib.suppress(OSError):
                each.unlink()

    @property
    def _route(self) -> str:
        return f"{ROUTE}/{self.path.name}"

    def _read(self) -> bytes:
        with contextlib.suppress(FileNotFoundError), self.lock.open() as held:
            fcntl.flock(held, fcntl.LOCK_SH)
        return self.path.read_bytes()

    def _advice(self) -> str:
        if not self.path.parent.is_dir():
            return (
                "Start the engine with python scripts/launch_engine.py, which hands them out over HTTP, or let both machines "
                "see its folder under the same path"
            )
        free = shutil.disk_usage(self.path.parent).free
        if free < ENOUGH:
            return (
                f"The disk of {self.path.parent} is full ({free / 2**20:.0f} MiB free): make room, or start the engine with "
                "folder="
            )
        return "The engine's log says why; it may have been stopped, or its disk be full"


def discard(client: Client, answer: dict, tokens: list[int]) -> None:
    """Deletes the hidden states of a text that nobody wants, if the server has written them."""
    file = StateFile.of(client, answer)
    if file is not None:
        with contextlib.suppress(BadAnswer, KeyError):
            ids = file.load()[0]["token_ids"].tolist()
            if ids and ids == tokens[: len(ids)]:
                file.delete()


def _metadata(content: bytes) -> dict:
    """Of a safetensors file, which begins with the length of its header and the header."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]).get("__metadata__", {})
