"""vLLM as the source of the target's outputs: one request reads a text, and its hidden states come as a file.

The file is deleted when it was read (engine_states.py). vLLM numbers hidden states as `Target` does, but the last one is the
state before the final norm, which is applied where a step takes them.
"""

import itertools
import json
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from specdec.core import devices
from specdec.core.sampling import Sampling
from specdec.heads.base import Drafter
from specdec.target.model import Target, TargetOutput
from train.features.engine_client import BadAnswer, Client
from train.features.engine_states import StateFile, discard
from train.features.outputs import normed

CHECK_EVERY = 16  # texts of which one is compared with the token that the engine chose
CLOSE = 0.25  # standard deviations of the logits by which that token may fall short of the best one here
RESTART = "Start it again with python scripts/launch_engine.py"
Served = tuple[list[int], Tensor]  # new tokens; the states of the text, [t, layers, D]


class EngineTarget:
    """The target in a server, in several that are used in turn, or in vLLM in this process.

    target: without its layers, or whole
    layers: numbers of the hidden states that are needed beside the final one
    Raises ValueError, with what to do, if a server has another model or gives no hidden states, or not these.
    """

    def __init__(self, client: Client, target: Target, layers: tuple[int, ...]):
        self.client, self.target = client, target
        self.layers = tuple(sorted({*layers, target.num_layers}))
        self.models = dict(zip(client.urls, (names[0] for names in client.models())))
        self.numbers, self.guard = itertools.count(), threading.Lock()
        self.stored: tuple[int, ...] | None = None  # the layers in the server's files, once known
        self._try()

    # Outputs of texts

    def submit(self, tokens: Tensor, layers: tuple[int, ...]) -> "Future[list[Tensor]]":
        """tokens [t] -> [t, D] for each of these layers, as of a `Reader`: on the CPU, before the final norm"""
        ids = tokens.tolist()
        body = self.body(ids, max_tokens=1)
        checked = next(self.numbers) % CHECK_EVERY == 0

        def read(answer: dict) -> list[Tensor]:
            new, states = self.receive(answer, ids)
            return self.select(states, layers, chosen=new[0] if checked else None)

        return self.client.submit("v1/completions", body, read)

    def read(self, drafter: Drafter, texts: list[tuple[list[int], list[int]]]) -> TargetOutput:
        """As specdec.unroll.replay.read: prompts and their answers -> features [B, T, F*D], final [B, T, D]"""
        layers = (*drafter.target_layers, self.target.num_layers)
        futures = [self.submit(torch.tensor(prompt + answer), layers) for prompt, answer in texts]
        rows = [torch.cat(future.result(), dim=-1) for future in futures]
        both = normed(self.target, pad_sequence(rows, batch_first=True).to(self.target.device), layers)
        return TargetOutput(*both.split([both.shape[-1] - self.target.width, self.target.width], dim=-1))

    def answer(
        self, prompts: Sequence[list[int]], *, sampling: Sampling, max_new_tokens: int, stop: set[int], seed: int
    ) -> list[list[int]]:
        """Plain answers, each with the token that ended it. Numbers of prompts are added to the seed."""
        law = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or 0}

        def submit(number: int, prompt: list[int]) -> "Future[list[int]]":
            body = self.body(prompt, max_tokens=max_new_tokens, stop=stop) | law | {"seed": seed + number}
            return self.client.submit("v1/completions", body, lambda answer: self._answered(answer, prompt))

        return [future.result() for future in [submit(*pair) for pair in enumerate(prompts)]]

    # One request

    def body(self, prompt: list[int], *, max_tokens: int, stop: set[int] = frozenset()) -> dict:  # type: ignore[assignment]
        """stop: tokens that end the answer"""
        return {
            "model": next(iter(self.models.values())),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,  # only `stop` ends an answer
            "stop_token_ids": sorted(stop),
            "return_token_ids": True,
            "kv_transfer_params": {"include_output_tokens": True},
        }

    def receive(self, answer: dict, prompt: list[int]) -> Served:
        """The new tokens, and the states of all tokens but the last, [t, layers, D], which the engine never read.

        Raises BadAnswer for what may be right the next time, and ValueError for a server that was started otherwise.
        """
        new = self._new_tokens(answer)
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

    # Checks of the server

    def _try(self) -> None:
        """Reads a short text. Raises ValueError for a server that cannot be used."""
        tokens = torch.arange(1, 9) % self.target.vocab_size
        for _ in self.client.urls:  # they are asked in turn
            self.submit(tokens, self.layers).result()

    def _new_tokens(self, answer: dict) -> list[int]:
        try:
            new = answer["choices"][0]["token_ids"]
        except (KeyError, IndexError, TypeError):
            new = None
        if not isinstance(new, list) or not new:
            raise ValueError("The server does not return token ids (return_token_ids): use vLLM 0.10.2 or newer.")
        return [int(token) for token in new]

    def _answered(self, answer: dict, prompt: list[int]) -> list[int]:
        """The new tokens. Hidden states, which the server writes all the same, are deleted."""
        new = self._new_tokens(answer)
        discard(self.client, answer, [*prompt, *new])
        return new

    def _check_layers(self, states: Tensor, about: dict) -> None:
        num, width = states.shape[1:]
        if width != self.target.width:
            raise ValueError(
                f"The engine's hidden states have width {width}, and {self.target.name} has {self.target.width}: it serves "
                "another model."
            )
        stored = tuple(json.loads(about["layers"])) if "layers" in about else self.layers
        if len(stored) != num or not set(self.layers) <= set(stored):
            raise ValueError(
                f"The engine gives {f'layers {list(stored)}' if 'layers' in about else f'{num} layers'}, and the head needs "
                f"{list(self.layers)}. {RESTART} 'layers={json.dumps(list(self.layers))}'."
            )
        with self.guard:
            first, self.stored = self.stored is None, stored
        if first and "layers" not in about:
            warnings.warn(
                f"The engine's files do not say which layers they hold: {list(stored)}, which the head needs, are assumed. "
                "python scripts/launch_engine.py starts one whose files do.",
                stacklevel=2,
            )
