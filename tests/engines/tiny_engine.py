"""A server with vLLM's interface for features.engine=, over a tiny target: real hidden states, and faults."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import safetensors.torch
import torch

from specdec.target.model import Target
from tests.support.small_server import Reply, SmallServer


class TinyEngine(SmallServer):
    """Serves `target` while it is used as a context manager. vLLM itself is tested in test_running_engines.py.

    layers: hidden states that are written to `folder`, the last one before the final norm, as vLLM gives it
    spoil(number of the request, {"answer", "tensors", "metadata"}): changes an answer before it is sent
        Without tensors there is no file; without an answer the connection is cut.
    """

    def __init__(self, target: Target, layers: list[int], folder: Path):
        super().__init__(self._reply)
        self.target, self.layers, self.folder = target, layers, folder
        self.spoil: Callable[[int, dict], object] = lambda number, reply: None
        self.one_by_one = threading.Lock()
        self.completions: list[dict] = []  # the bodies of requests

    def _reply(self, path: str, body: dict | None) -> Reply | None:
        if body is None:
            return 200, {"data": [{"id": self.target.name, "max_model_len": 256}]}
        if path != "v1/completions":
            return 404, {"error": {"message": "Not Found"}}
        answer = self.complete(body)
        return None if answer is None else (200, answer)

    def complete(self, body: dict) -> dict | None:
        with self.one_by_one:
            number = len(self.completions)
            self.completions.append(body)
            prompt, new = body["prompt"], []
            stop = body.get("stop_token_ids", [])
            while not new or (len(new) < body["max_tokens"] and new[-1] not in stop):
                states, final = self._read([*prompt, *new])
                new.append(int(self.target.logits(final[-1]).argmax()))
            tensors = {"token_ids": torch.tensor([*prompt, *new][:-1]), "hidden_states": states}
            path = self.folder / f"{number}.safetensors"
            finish = "stop" if new[-1] in stop else "length"
            choice = {"token_ids": new, "text": "", "finish_reason": finish}
            if "prompt_logprobs" in body:
                choice["prompt_logprobs"] = [None, *self._score(prompt)]
            answer = {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}}
            reply = {"answer": answer, "tensors": tensors, "metadata": {"layers": json.dumps(self.layers)}}
            self.spoil(number, reply)
            if reply["tensors"] is not None:
                contiguous = {name: value.contiguous() for name, value in reply["tensors"].items()}
                safetensors.torch.save_file(contiguous, path, metadata=reply["metadata"])
            return reply["answer"]

    def _score(self, prompt: list[int]) -> list[dict]:
        """The log-probability of each token of a prompt behind the first, in vLLM's form."""
        scores = self.target.logits(self._read(prompt)[1]).log_softmax(-1)
        return [{str(token): {"logprob": float(row[token])}} for row, token in zip(scores, prompt[1:])]

    @torch.no_grad()
    def _read(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """-> [t, layers, D], [t, D]"""
        before: list[torch.Tensor] = []
        hook = self.target.norm.register_forward_pre_hook(lambda module, inputs: before.append(inputs[0]))
        inner = tuple(layer for layer in self.layers if layer < self.target.num_layers)
        output = self.target.read(torch.tensor([tokens]), inner)
        hook.remove()
        states = torch.cat([output.features, before[0]], dim=-1)[0].unflatten(-1, (-1, self.target.width))
        return states, output.final[0]
