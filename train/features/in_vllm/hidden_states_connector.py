"""A connector inside vLLM, which imports it by its name: it writes the hidden states of each request to a file.

vLLM's own connector does that on a GPU. This one also runs on a CPU, where there are no streams to wait for. Its files
name their layers, and a full disk loses one answer instead of the engine.
"""

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as of_vllm


class Ready:
    """A CUDA event's substitute: a copy on a CPU is complete when it returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


class HiddenStatesConnector(of_vllm.ExampleHiddenStatesConnector):
    """vLLM's connector, with layers in its files, on CPUs too."""

    def _write_tensors(self, tensors, event, filename, lock_fd) -> None:
        """Writes a file as vLLM's method does, with the numbers of its layers. A thread calls it.

        event: complete when the tensors are; lock_fd: descriptor of the file's lock, which ends the client's wait
        """
        config = self._vllm_config.speculative_config.draft_model_config.hf_config
        layers = sorted(config.eagle_aux_hidden_state_layer_ids)  # vLLM writes them in this order
        try:
            event.synchronize()
            save_file(tensors, filename, metadata={"layers": json.dumps(layers)})
        except Exception:
            Path(filename).unlink(missing_ok=True)
            raise
        finally:
            if lock_fd is not None:
                os.close(lock_fd)

    def _submit_async_write(self, pending) -> None:
        if torch.cuda.is_available():
            super()._submit_async_write(pending)
            return
        if not self._is_tp_rank_zero:
            return
        size = self._block_size
        slots = torch.cat([torch.arange(block * size, (block + 1) * size) for block in pending.block_ids])
        states = of_vllm.extract_from_kv_cache(self._kv_cache, slots, len(pending.token_ids))
        tensors = {"hidden_states": states.contiguous().clone(), "token_ids": pending.token_ids.clone()}
        try:
            os.makedirs(os.path.dirname(pending.filename), exist_ok=True)
            self._write_tensors(tensors, Ready(), pending.filename, self._lock_fds.pop(pending.req_id, None))
        except Exception as error:  # of the disk; the client asks again, and the engine goes on
            of_vllm.logger.error("The hidden states of %s could not be written: %s", pending.req_id, error)
        self._req_copy_events[pending.req_id] = Ready()  # lets vLLM free the blocks
