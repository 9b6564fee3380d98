"""vLLM as the source of the target's outputs: one request reads a text, and its hidden states come as a file.

in_vllm/hidden_states_connector.py writes the file, in_vllm/hidden_states_route.py hands it out over HTTP, and it is deleted
here once it was read. vLLM numbers hidden states as `Target` does, but the last one is the state before the final norm. The
norm is applied where a step takes the states.
"""

import contextlib
import fcntl
import itertools
import json
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.core import devices
from specdec.core.sampling import Sampling
from specdec.heads.base import Drafter
from specdec.target.model import Target, TargetOutput
from train.features.engine_client import SERVER, BadAnswer, EngineClient

ROUTE = "v1/hidden_states"
CHECK_EVERY = 16  # texts of which one is compared with the token that the engine chose
CLOSE = 0.25  # standard deviations of the logits by which that token may fall short of the best one here
RESTART = "Start it again with python scripts/launch_engine.py"
LOST = (
    "The engine's log says why: it may have been stopped, or its disk be full. python scripts/launch_engine.py starts one "
    "that hands them out over HTTP to machines that do not see its folder"
)


class StateFile:
    """The file that came with an answer. It has the tensors token_ids [t] and hidden_states [t, layers, D]."""

    def __init__(self, client: EngineClient, path: Path, server: str):
        self.client, self.path, self.server = client, path, server
        self.lock = path.with_name(path.name + ".lock")  # held until the file is written

    @classmethod
    def of(cls, client: EngineClient, answer: dict) -> "StateFile | None":
        """answer: as `EngineClient.post` has it; None: it comes without hidden states"""
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
            if self.here:
                with contextlib.suppress(FileNotFoundError), self.lock.open() as held:
                    fcntl.flock(held, fcntl.LOCK_SH)
                content = self.path.read_bytes()
            else:
                content = self.client.fetch(self.server, f"{ROUTE}/{self.path.name}")
            tensors = safetensors.torch.load(content)
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            raise BadAnswer(f"the hidden states in {self.path} cannot be read ({error}). {LOST}") from error
        header = content[8 : 8 + int.from_bytes(content[:8], "little")]
        return tensors, json.loads(header).get("__metadata__", {})

    def delete(self) -> None:
        if not self.here:
            self.client.delete(self.server, f"{ROUTE}/{self.path.name}")
        for each in (self.path, self.lock):
            with contextlib.suppress(OSError):
                each.unlink()


def discard_states(client: EngineClient, answer: dict, tokens: list[int]) -> None:
    """Deletes the hidden states of a text that nobody wants, if the server has written them."""
    file = StateFile.of(client, answer)
    if file is not None:
        with contextlib.suppress(BadAnswer, KeyError):
            ids = file.load()[0]["token_ids"].tolist()
            if ids and ids == tokens[: len(ids)]:
                file.delete()


class EngineTarget:
    """The target in a server, or in several that are used in turn.

    target: without its layers, or whole
    layers: numbers of the hidden states that are needed beside the final one
    Raises ValueError, with what to do, if a server has another model or gives no hidden states, or not these.
    """

    def __init__(self, client: EngineClient, target: Target, layers: tuple[int, ...]):
        self.client, self.target = client, target
        self.layers = tuple(sorted({*layers, target.num_layers}))
        self.model = str(client.describe_models()[0][0]["id"])
        self.numbers = itertools.count()
        self.stored: tuple[int, ...] | None = None  # the layers in the server's files, once known
        tokens = torch.arange(1, 9) % target.vocab_size
        for _ in client.urls:  # they are asked in turn
            self.submit(tokens, self.layers).result()

    # Outputs of texts

    def submit(self, tokens: Tensor, layers: tuple[int, ...]) -> "Future[list[Tensor]]":
        """tokens [t] -> [t, D] for each of these layers, on the CPU, before the final norm"""
        ids = tokens.tolist()
        checked = next(self.numbers) % CHECK_EVERY == 0

        def read(answer: dict) -> list[Tensor]:
            new, states = self.receive(answer, ids)
            return self.select(states, layers, chosen=new[0] if checked else None)

        return self.client.submit("v1/completions", self.make_body(ids, max_tokens=1), read)

    def read(self, drafter: Drafter, texts: list[tuple[list[int], list[int]]]) -> TargetOutput:
        """As specdec.unroll.replay.read: prompts and their answers -> features [B, T, F*D], final [B, T, D]"""
        layers = (*drafter.target_layers, self.target.num_layers)
        futures = [self.submit(torch.tensor(prompt + answer), layers) for prompt, answer in texts]
        rows = [torch.cat(future.result(), dim=-1) for future in futures]
        both = apply_final_norm(self.target, pad_sequence(rows, batch_first=True).to(self.target.device), layers)
        return TargetOutput(*both.split([both.shape[-1] - self.target.width, self.target.width], dim=-1))

    def answer(
        self, prompts: Sequence[list[int]], *, sampling: Sampling, max_new_tokens: int, stop: set[int], seed: int
    ) -> list[list[int]]:
        """Plain answers, each with the token that ended it. Numbers of prompts are added to the seed."""
        sampled = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or 0}

        def submit(number: int, prompt: list[int]) -> "Future[list[int]]":
            def read(answer: dict) -> list[int]:
                new = _new_tokens(answer)
                discard_states(self.client, answer, [*prompt, *new])  # the server writes them all the same
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

    def receive(self, answer: dict, prompt: list[int]) -> tuple[list[int], Tensor]:
        """-> the new tokens, and the states of all tokens but the last, [t, layers, D], which the engine never read

        Raises BadAnswer for what may be right the next time, and ValueError for a server that was started otherwise.
        """
        new = _new_tokens(answer)
        file = StateFile.of(self.client, answer)
        if file is None:
            raise ValueError(f"The server at {', '.join(self.client.urls)} gives no hidden states. {RESTART}.")
        tensors, about = file.load()
        ids, states = tensors.get("token_ids"), tensors.get("hidden_states")
        wanted = [*prompt, *new][:-1]
        if ids is None or states is None or states.ndim != 3:
            raise BadAnswer(f"{file.path} has no hidden states of a text")
        if ids.tolist() != wanted or len(states) != len(wanted):
            raise BadAnswer(
                f"hidden states of {len(states)} tokens came back for a text of {len(wanted)}. {RESTART}: prefix caching must "
                "be off (--no-enable-prefix-caching)"
            )
        file.delete()  # now that it is known to be the engine's
        if not bool(states.isfinite().all()):
            raise BadAnswer("some hidden states are not finite")
        if not bool(states.flatten(1).any(dim=1).all()):
            raise BadAnswer(
                "the hidden states of some tokens are all zero, as those of hybrid targets before vLLM 0.23"
            )
        self._check_layers(states, about)
        return new, states

    def select(self, states: Tensor, layers: tuple[int, ...], *, chosen: int | None = None) -> list[Tensor]:
        """states [t, layers, D] -> [t, D] for each layer, before the final norm, on the CPU in the target's dtype

        chosen: the token that the engine chose behind the text at temperature 0, which is then compared. None: it is not
        A thread calls this, which must not wait for what the device has been given to do.
        """
        target = self.target
        assert self.stored is not None
        if chosen is not None:
            with devices.aside(target.device), torch.no_grad():
                last = states[-1:, self.stored.index(target.num_layers)]  # [1, D]
                logits = target.logits(target.norm(last.to(target.device, target.dtype)))[0]
                short = float((logits.max() - logits[chosen]) / logits.std())
            if not short <= CLOSE:
                raise BadAnswer(
                    f"the engine chose token {chosen}, whose logit by its own hidden state falls {short:.1f} standard "
                    f"deviations short of the best. It serves another model than {target.name}, or other layers"
                )
        return [states[:, self.stored.index(layer)].to(target.dtype) for layer in layers]

    def _check_layers(self, states: Tensor, about: dict) -> None:
        num, width = states.shape[1:]
        if width != self.target.width:
            raise ValueError(
                f"The engine's hidden states have width {width}, and {self.target.name} has {self.target.width}: it serves "
                "another model."
            )
        stored = tuple(json.loads(about.get("layers", "[]")))
        if len(stored) != num or not set(self.layers) <= set(stored):
            raise ValueError(
                f"The engine gives layers {list(stored) or 'without their numbers'}, and the head needs {list(self.layers)}. "
                f"{RESTART} 'layers={json.dumps(list(self.layers))}'."
            )
        self.stored = stored


def apply_final_norm(target: Target, states: Tensor, layers: tuple[int, ...]) -> Tensor:
    """states [..., layers * D] of an EngineTarget, on the target's device -> the same with the final norm, applied in place"""
    for layer, part in zip(layers, states.split(target.width, dim=-1), strict=True):
        if layer == target.num_layers:
            part.copy_(target.norm(part))
    return states


def _new_tokens(answer: dict) -> list[int]:
    try:
        new = answer["choices"][0]["token_ids"]
    except (KeyError, IndexError, TypeError):
        new = None
    if not isinstance(new, list) or not new:
        raise ValueError("The server does not return token ids (return_token_ids): use vLLM 0.10.2 or newer.")
    return [int(token) for token in new]
