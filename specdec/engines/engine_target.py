"""vLLM as the source of the target's outputs: one request reads a text, and its hidden states come as a file.

in_vllm/hidden_states_connector.py writes the file into a folder that this machine sees under the same path. It is
deleted here after it was read. vLLM numbers hidden states as `Target` does, but the last one is the state before the
final norm. The norm is applied when a step takes the states.
"""

import contextlib
import functools
import json
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.core.sampling import Sampling
from specdec.engines.client import LLAMA_CPP, BadAnswer, EngineClient, check_weights
from specdec.engines.hidden_states import delete_file, discard_states, find_file, load_file
from specdec.engines.start_check import ReadText, make_reference
from specdec.heads.base import Drafter
from specdec.target.model import Target, TargetOutput

SHORTEST_CONTEXT = 256  # tokens that every server reads
RESTART = "Start it again with specdec launch_engine"


class EngineTarget:
    """The target in a server, or in several that are used in turn.

    target: the target without its layers, or whole
    layers: numbers of the hidden states that are needed beside the final one
    Raises ValueError, with what to do, if a server has another model or gives no hidden states, or not these.
    """

    def __init__(self, client: EngineClient, target: Target, layers: tuple[int, ...]):
        self.client, self.target = client, target
        self.layers = tuple(sorted({*layers, target.num_layers}))
        for url, (model, *_) in zip(client.urls, client.describe_models()):
            self._check_weights(url, model)
        self.model = str(model["id"])
        reference = make_reference(target, self.layers, int(model.get("max_model_len") or SHORTEST_CONTEXT))
        for url in client.urls:
            with contextlib.closing(client.select(url)) as single:
                reference.check_server(functools.partial(self._submit_scored, single))
        if gaps := reference.describe_gaps():
            client.say(gaps)

    # Outputs of texts

    def submit(self, tokens: Tensor, layers: tuple[int, ...]) -> "Future[list[Tensor]]":
        """Requests states [t, D] of each layer for tokens [t]: on the CPU, in the target's dtype, before the norm."""
        ids = tokens.tolist()
        body = self.make_body(ids, max_tokens=1)
        return self.client.submit("v1/completions", body, lambda answer: self.read_states(answer, ids, layers)[1])

    def read(self, drafter: Drafter, texts: list[tuple[list[int], list[int]]]) -> TargetOutput:
        """Features [B, T, F*D] and final states [B, T, D] of (prompt, answer), as specdec.unroll.replay reads them."""
        layers = (*drafter.target_layers, self.target.num_layers)
        futures = [self.submit(torch.tensor(prompt + answer), layers) for prompt, answer in texts]
        rows = [torch.cat(future.result(), dim=-1) for future in futures]
        states = apply_final_norm(self.target, pad_sequence(rows, batch_first=True).to(self.target.device), layers)
        return TargetOutput(*states.split([states.shape[-1] - self.target.width, self.target.width], dim=-1))

    def answer(
        self, prompts: Sequence[list[int]], *, sampling: Sampling, max_new_tokens: int, stop: set[int], seed: int
    ) -> list[list[int]]:
        """Plain answers, each with the token that ended it. Prompt n is answered with seed + n."""
        sampled = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or 0}

        def submit(number: int, prompt: list[int]) -> "Future[list[int]]":
            def read(answer: dict) -> list[int]:
                new = _read_new_tokens(answer)
                discard_states(answer, [*prompt, *new])  # the server writes them all the same
                return new

            body = self.make_body(prompt, max_tokens=max_new_tokens, stop=stop) | sampled | {"seed": seed + number}
            return self.client.submit("v1/completions", body, read)

        return [future.result() for future in [submit(*pair) for pair in enumerate(prompts)]]

    # One request

    def make_body(self, prompt: list[int], *, max_tokens: int, stop: Collection[int] = ()) -> dict:
        """stop: tokens that end the answer"""
        return {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,  # only `stop` ends an answer
            "stop_token_ids": sorted(stop),
            "return_token_ids": True,
            "kv_transfer_params": {"include_output_tokens": True},
        }

    def _submit_scored(self, client: EngineClient, tokens: Tensor) -> "Future[ReadText]":
        """Requests the states [t, layers, D] of tokens [t], and the server's log-probabilities of them."""
        ids = tokens.tolist()

        def read(answer: dict) -> ReadText:
            _, states, stored = self._read_file(answer, ids)
            return ReadText(states[:, [stored.index(layer) for layer in self.layers]], _read_log_probs(answer, ids))

        return client.submit("v1/completions", self.make_body(ids, max_tokens=1) | {"prompt_logprobs": 0}, read)

    def read_states(self, answer: dict, prompt: list[int], layers: tuple[int, ...]) -> tuple[list[int], list[Tensor]]:
        """Returns the new tokens, and states [t, D] of each layer for all tokens but the last, which was never read.

        A thread calls this, which must not wait for the work of the device. Raises as `_read_file`.
        """
        new, states, stored = self._read_file(answer, prompt)
        return new, [states[:, stored.index(layer)].to(self.target.dtype) for layer in layers]

    def _read_file(self, answer: dict, prompt: list[int]) -> tuple[list[int], Tensor, list[int]]:
        """The new tokens, the states [t, layers, D] as the server computed them, and the numbers of their layers.

        Raises BadAnswer for an answer that may be right the next time, and ValueError for a server with other settings.
        """
        new, path = _read_new_tokens(answer), find_file(answer)
        if path is None:
            raise ValueError(f"The server at {', '.join(self.client.urls)} gives no hidden states. {RESTART}.")
        tensors, metadata = load_file(path)
        states = _check_tokens(tensors, [*prompt, *new][:-1], path)
        delete_file(path)  # only now is it known to be the engine's
        self._check_states(states)
        stored = json.loads(metadata.get("layers", "[]"))
        if len(stored) != states.shape[1] or not set(self.layers) <= set(stored):
            raise ValueError(
                f"The engine gives layers {stored or 'without their numbers'}, and the head needs {list(self.layers)}. "
                f"{RESTART} 'layers={json.dumps(list(self.layers))}'."
            )
        return new, states, stored

    def _check_states(self, states: Tensor) -> None:
        """Raises BadAnswer for states [t, layers, D] that are not finite or all zero, ValueError for another width."""
        if not bool(states.isfinite().all() and states.flatten(1).any(dim=1).all()):
            raise BadAnswer("the hidden states of some tokens are not finite, or all zero")
        if states.shape[2] != self.target.width:
            raise ValueError(
                f"The engine's hidden states have width {states.shape[2]}, and {self.target.name} has "
                f"{self.target.width}: it serves another model."
            )

    def _check_weights(self, url: str, model: dict) -> None:
        if model.get("owned_by") == LLAMA_CPP:
            raise ValueError(
                f"{url} is llama.cpp's server, which gives answers only (specdec answer engine=) and no hidden states: "
                "use vLLM "
                "(specdec launch_engine) with the same weights, or features.mode=online."
            )
        check_weights(url, model, self.target, advice="give target.name= the folder that is served")


def apply_final_norm(target: Target, states: Tensor, layers: tuple[int, ...]) -> Tensor:
    """Applies the final norm in place to states [..., layers * D] of an EngineTarget, on the target's device."""
    for layer, layer_states in zip(layers, states.split(target.width, dim=-1), strict=True):
        if layer == target.num_layers:
            layer_states.copy_(target.norm(layer_states))
    return states


def _check_tokens(tensors: dict[str, Tensor], expected_ids: list[int], path: Path) -> Tensor:
    """The hidden states [t, layers, D] of a file. Raises BadAnswer unless they are those of these tokens."""
    ids, states = tensors.get("token_ids"), tensors.get("hidden_states")
    if ids is None or states is None or states.ndim != 3:
        raise BadAnswer(f"{path} has no hidden states of a text")
    if ids.tolist() != expected_ids or len(states) != len(expected_ids):
        raise BadAnswer(
            f"hidden states of {len(states)} tokens came back for a text of {len(expected_ids)}. {RESTART}: prefix "
            "caching must be off (--no-enable-prefix-caching)"
        )
    return states


def _read_log_probs(answer: dict, ids: list[int]) -> Tensor:
    """The log-probability [t - 1] of each token of a text behind the first. Raises ValueError for a server without."""
    try:
        scores = answer["choices"][0]["prompt_logprobs"][1:]
        return torch.tensor([score[str(token)]["logprob"] for score, token in zip(scores, ids[1:], strict=True)])
    except (KeyError, IndexError, TypeError, ValueError):
        raise ValueError(
            "The server gives no log-probabilities of a prompt (prompt_logprobs), so its hidden states cannot be "
            f"checked: use vLLM. {RESTART}."
        ) from None


def _read_new_tokens(answer: dict) -> list[int]:
    """The token ids of an answer. Raises ValueError for a server that gives none."""
    try:
        new = answer["choices"][0]["token_ids"]
    except (KeyError, IndexError, TypeError):
        new = None
    if not isinstance(new, list) or not new:
        raise ValueError("The server does not return token ids (return_token_ids): use vLLM 0.10.2 or newer.")
    return [int(token) for token in new]
