"""vLLM in this process as the source of the target's outputs, without a server: for one machine whose Python has vLLM."""

import os
import queue
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from train.answers import vllm_answers
from train.features.engine_client import SERVER, TRIES, BadAnswer, Result

MODULES = Path(__file__).resolve().parent / "in_vllm"  # what vLLM imports by name
PREFIX = "specdec-states-"  # of the names of folders with hidden states
ENGINE = "vllm"  # what stands in the place of a URL
Request = tuple[dict, Callable[[dict], Any], "Future[Any]"]


def settings(layers: list[int], folder: str) -> dict[str, dict]:
    """vLLM's arguments for hidden states of these layers, as files in a folder."""
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "hidden_states_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": folder},
        },
    }


def search_path() -> str:
    """PYTHONPATH with which vLLM's processes find what they import by name."""
    return os.pathsep.join(filter(None, [str(MODULES), os.environ.get("PYTHONPATH")]))


def memory() -> str | None:
    """A folder that is kept in memory, where the system has one."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


class InProcess:
    """A `Client` whose requests a thread gives to vLLM, as many at once as are waiting.

    layers: of the hidden states; longest: tokens of a text, or of a prompt and its answer; more: further arguments of vllm.LLM
    Raises ValueError if vLLM is not there or does not start.
    """

    def __init__(
        self,
        name: str,
        *,
        dtype: str,
        trust_remote_code: bool,
        layers: list[int],
        longest: int,
        in_flight: int,
        more: dict,
    ):
        self.urls, self.name, self.in_flight = [ENGINE], name, in_flight
        self.folder = tempfile.TemporaryDirectory(
            prefix=PREFIX, dir=memory()
        )  # deleted with this object, or at the end
        self.waiting: queue.Queue[Request | None] = queue.Queue()
        os.environ["PYTHONPATH"] = search_path()  # of vLLM's own processes
        sys.path.append(str(MODULES))  # of this one
        self.engine = vllm_answers.load(
            name, dtype=dtype, trust_remote_code=trust_remote_code, in_flight=in_flight, longest=longest,
            enable_prefix_caching=False, **settings(layers, self.folder.name), **more,
        )  # fmt: skip
        self.thread = threading.Thread(target=self._work, name="vllm", daemon=True)
        self.thread.start()

    def submit(self, path: str, body: dict, read: Callable[[dict], Result]) -> "Future[Result]":
        future: Future[Result] = Future()
        self.waiting.put((body, read, future))
        return future

    def models(self) -> list[list[str]]:
        return [[self.name]]

    def fetch(self, url: str, path: str) -> bytes:
        raise BadAnswer("vLLM wrote no file")

    def delete(self, url: str, path: str) -> None:
        """Nothing is left to delete of a file that is not there."""

    def close(self) -> None:
        self.waiting.put(None)
        self.thread.join()
        self.folder.cleanup()

    def _work(self) -> None:
        while (first := self.waiting.get()) is not None:
            requests = [first]
            while len(requests) < self.in_flight and not self.waiting.empty() and self.waiting.queue[0] is not None:
                requests.append(self.waiting.get_nowait())  # type: ignore[arg-type]  # no other thread takes any
            self._answer(requests)

    def _answer(self, requests: list[Request]) -> None:
        """Sets the results. What has a bad answer is asked again, as servers are."""
        for number in range(TRIES):
            try:
                answers = self._generate([body for body, _, _ in requests])
            except Exception as error:
                for _, _, future in requests:
                    future.set_exception(ValueError(f"vLLM in this process failed: {' '.join(str(error).split())}"))
                return
            again = []
            for request, answer in zip(requests, answers, strict=True):
                _, read, future = request
                try:
                    future.set_result(read(answer))
                except BadAnswer as error:
                    again.append(request)
                    if number == TRIES - 1:
                        future.set_exception(
                            ValueError(f"vLLM gave {TRIES} bad answers in a row. The last one: {error}")
                        )
                except Exception as error:
                    future.set_exception(error)
            requests = again
            if not requests:
                return

    def _generate(self, bodies: list[dict]) -> list[dict]:
        """The answers, in the form of a server's."""
        from vllm import SamplingParams

        outputs = self.engine.generate(
            [{"prompt_token_ids": body["prompt"]} for body in bodies],
            [
                SamplingParams(
                    **{key: body[key] for key in _SAMPLING if key in body},
                    detokenize=False,
                    extra_args={"kv_transfer_params": body["kv_transfer_params"]},
                )
                for body in bodies
            ],
            use_tqdm=False,
        )
        return [
            {
                "choices": [{"token_ids": list(output.outputs[0].token_ids)}],
                "kv_transfer_params": output.kv_transfer_params,
                SERVER: ENGINE,
            }
            for output in outputs
        ]


_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed", "ignore_eos", "stop_token_ids")
