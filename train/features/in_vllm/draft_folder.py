"""Runs inside vLLM, which imports it by its name: replaces the drafter's weights by those of a folder, while it serves.

    vllm serve ... --worker-extension-cls draft_folder.Registered --weight-transfer-config '{"backend": "draft_folder"}'

vLLM's own transports (nccl, ipc) are for CUDA, and for a trainer that is connected to the server. This one reads an export
of format=vllm, on any device. It is driven by vLLM's routes of development mode (VLLM_SERVER_DEV_MODE=1):

    POST /init_weight_transfer_engine   {"init_info": {"reads": "folders"}}, which other transports refuse
    POST /start_draft_weight_update
    POST /update_weights                {"update_info": {"folder": FOLDER}}
    POST /finish_weight_update          {"weight_version": NAME}
"""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

NAME = "draft_folder"
OF_TARGET = ("embed_tokens", "lm_head")  # modules that vLLM may share between the drafter and the target


class Registered:
    """--worker-extension-cls: importing it is enough."""


@dataclass
class Hello(WeightTransferInitInfo):
    reads: str


@dataclass
class Folder(WeightTransferUpdateInfo):
    folder: str


class DraftFolder(WeightTransferEngine[Hello, Folder]):
    init_info_cls = Hello
    update_info_cls = Folder

    def __init__(self, config, vllm_config, device, model):
        super().__init__(config, vllm_config, device, model)
        draft = vllm_config.speculative_config and vllm_config.speculative_config.draft_model_config
        if draft is None or not Path(draft.model).is_dir():
            raise ValueError("Only a drafter that was read from a folder can be replaced.")
        self.served = _settings(Path(draft.model))
        tensors = _read(Path(draft.model))
        self.shapes = _shapes(tensors)
        self.digests = {name: _digest(tensor) for name, tensor in tensors.items() if _name_of_target(name)}

    def init_transfer_engine(self, init_info: Hello) -> None:
        pass

    def start_weight_update(self) -> None:
        """Hello changes before all is read: a folder that is refused leaves the server as it was."""
        if self.model is self._default_model:
            raise ValueError("Only the drafter can be replaced: begin with /start_draft_weight_update.")

    def receive_weights(self, update_info: Folder) -> None:
        folder = Path(update_info.folder)
        tensors = _read(folder)
        self._check(folder, tensors)
        # The drafter may hold modules of the target. They are whole again after the last line, before the next round.
        initialize_layerwise_reload(self.model)
        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(tensors.items())
        finally:
            finalize_layerwise_reload(self.model, self.model_config)

    def finish_weight_update(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def _check(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        if _settings(folder) != self.served:
            raise ValueError(f"{folder} has another config.json than the drafter that is served.")
        if _shapes(tensors) != self.shapes:
            raise ValueError(f"{folder} has tensors of other names or shapes than the drafter that is served.")
        of_target = {id(module) for module in self._default_model.modules()}
        shared = {name.rpartition(".")[2] for name, module in self.model.named_modules() if id(module) in of_target}
        for name, digest in self.digests.items():
            if _name_of_target(name) in shared and _digest(tensors[name]) != digest:
                raise ValueError(f"{folder} changes {name}, which the drafter that is served shares with its target.")


def _name_of_target(name: str) -> str | None:
    return next((part for part in OF_TARGET if part in name.split(".")), None)


def _settings(folder: Path) -> dict:
    """config.json without the precision: weights are taken into the server's own."""
    settings = json.loads((folder / "config.json").read_text())
    return {key: value for key, value in settings.items() if not key.endswith("dtype")}


def _read(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # it is no dict
    if not tensors:
        raise ValueError(f"{folder} has no tensors.")
    return tensors


def _shapes(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.float().numpy().tobytes()).hexdigest()


WeightTransferEngineFactory.register_engine(NAME, DraftFolder)
