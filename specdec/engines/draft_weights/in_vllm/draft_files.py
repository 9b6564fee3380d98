"""A transport of vLLM's weight updates: a new head from a folder, in vLLM 0.32, on CPUs too.

vLLM finds `register` by its entry point in each of its processes. This file runs in vLLM's Python and needs nothing
else of this project.

vLLM repacks linear weights when it loads them, on a CPU also those of plain float32. So a new head goes through vLLM's
own layerwise reload, which repacks it and copies it to where the old one was.
"""

import contextlib
from dataclasses import dataclass
from pathlib import Path

from head_layout import read_layout, read_tensors
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory


def register() -> None:
    """Makes the transport "files" known to vLLM, once a process."""
    with contextlib.suppress(ValueError):  # it is already, by another entry point
        WeightTransferEngineFactory.register_engine("files", DraftFiles)


@dataclass
class NoInitInfo(WeightTransferInitInfo):
    """What the transport needs to know before its first update: nothing."""


@dataclass
class FolderInfo(WeightTransferUpdateInfo):
    """folder: an export with format=vllm, at a path that the engine sees"""

    folder: str


class DraftFiles(WeightTransferEngine[NoInitInfo, FolderInfo]):
    """Loads whole heads, each in one call, so that no pass of the engine sees a part of one.

    A head must have the layout of the one that vLLM was started with. Whatever is known to be wrong is refused before
    the served head is touched.
    """

    init_info_cls = NoInitInfo
    update_info_cls = FolderInfo

    def __init__(self, config, vllm_config, device, model) -> None:
        super().__init__(config, vllm_config, device, model)
        speculative = vllm_config.speculative_config
        self.draft = None if speculative is None else speculative.draft_model_config
        self.layout = None if self.draft is None else read_layout(find_folder(self.draft.model, self.draft.revision))

    def init_transfer_engine(self, init_info: NoInitInfo) -> None:
        if self.layout is None:
            raise ValueError("this vLLM has no head that could get weights")

    def start_weight_update(self) -> None:
        """Nothing: `receive_weights` does it all, so a client that dies between the calls leaves nothing half done."""

    def finish_weight_update(self) -> None:
        pass

    def receive_weights(self, update_info: FolderInfo) -> None:
        """Loads the head. Raises ValueError, with the served head unchanged, for a folder that does not fit."""
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        if self.model is self._default_model:
            raise ValueError('the transport "files" is for draft weights: POST /start_draft_weight_update first')
        folder = Path(update_info.folder)
        read_layout(folder).check(folder, self.layout)
        weights = list(read_tensors(folder))  # in memory before the served head is touched
        initialize_layerwise_reload(self.model)
        try:
            with disable_mtp_completeness_check():
                self.model.load_weights(iter(weights))
        except BaseException as error:
            raise RuntimeError(
                f"{folder} could not be loaded ({error}), and parts of it are in the served head: put another in, or "
                "start vLLM again"
            ) from error
        finally:
            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        pass


def find_folder(model: str, revision: str | None) -> Path:
    """The folder of the head that vLLM was started with, a path or a name on the Hub."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, local_files_only=True))
