"""Self-speculation: some of the target's own layers draft (Draft & Verify, 2309.08168; LayerSkip, 2404.16710)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.core import masks
from specdec.core.compile import Runner
from specdec.core.option_types import Integer, Integers, SmallCount
from specdec.core.sampling import draw_column, pick_tokens
from specdec.core.tree import PartialPass, make_chain
from specdec.proposers.base import Proposer, select_last
from specdec.target.compiled import CompiledTarget, check_layers
from specdec.target.model import Target


def find_layers(target: Target, layers: int | Sequence[int] | None) -> tuple[int, ...]:
    """The numbers of the layers that draft, increasing.

    layers: number of the first layers, or a list of numbers (0 is the first layer, -1 the last); None: two thirds of
    all
    Raises ValueError unless the layers exist and are strictly increasing.
    """
    num_layers = target.num_layers
    if layers is None:
        layers = max(1, 2 * num_layers // 3)
    if isinstance(layers, int) and 1 <= layers <= num_layers:
        return tuple(range(layers))
    chosen_layers = list(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else []
    numbers = [number % num_layers for number in chosen_layers if _is_layer(number, num_layers)]
    if not numbers or len(numbers) < len(chosen_layers):
        raise ValueError(
            f"layers={chosen_layers or layers}: {target.name} has {num_layers} layers; give how many of the first to "
            f"draft with, 1 to {num_layers}, or a list of some, such as [0,1,{num_layers - 1}]."
        )
    if numbers != sorted(set(numbers)):
        raise ValueError(f"layers={chosen_layers}: list every layer once and in the order in which they are run.")
    return tuple(numbers)


def _is_layer(number: Any, num_layers: int) -> bool:
    return isinstance(number, int) and -num_layers <= number < num_layers


class LayerSkip(Proposer):
    """A chain of `depth` drafts, each by a pass through the chosen `layers`, the final norm and the LM head.

    These passes read the committed tokens' K and V in the target's own cache, and write those of the drafts behind
    them. If layers 0 .. E-1 are among the chosen ones, the drafts' K and V there, and the hidden states after them, are
    those of a full pass. Verification continues from these states, and overwrites the drafts' K and V in the other
    layers.

    At temperature > 0 drafts are sampled.
    """

    target_layers = ()
    linear = True

    def __init__(
        self,
        target: Target,
        *,
        layers: Integer | Integers | None,
        depth: SmallCount,
        compile: bool | None = False,
    ):
        self.layers = find_layers(target, layers)
        advice = "it cannot draft with some of them; choose another proposer."
        if target.recurrent:
            raise ValueError(f"{target.name} has layers that keep a state, which their drafts would change: {advice}")
        check_layers(target, advice)
        self.target, self.depth = target, depth
        self.num_shared = sum(number == place for place, number in enumerate(self.layers))  # E
        self.runner = Runner(compile)
        self.compiled = CompiledTarget(target, self.runner)

    @property
    def compile_seconds(self) -> float:
        return self.runner.seconds

    def steady(self):
        return self

    def attach_cache(self, cache):
        self.cache = cache

    def begin(self, tokens, num):
        pass

    def commit(self, tokens, features, num, counts):
        self.last_tokens = select_last(tokens, num)  # [B]

    @torch.no_grad()
    def propose(self, sampling, generator):
        self.cache.make_room(1 + self.depth)  # now, so that every pass and verification read the same capacity
        tokens, distributions, states = [self.last_tokens], [], []
        for _ in range(self.depth):
            shared_states, h = self._run_layers(tokens[-1], self.layers)
            states.append(shared_states)
            logits, best = self.runner("draft", self._read_out, h)
            if not sampling.greedy:
                distributions.append(sampling.distribution(logits))
                best = pick_tokens(distributions[-1], draw_column(len(best), generator, best.device))
            tokens.append(best)
        if self.num_shared:
            states.append(self._run_layers(tokens[-1], self.layers[: self.num_shared])[0])
        self.cache.drop_pending()
        probs = torch.stack([torch.zeros_like(distributions[0]), *distributions], dim=1) if distributions else None
        partial_pass = PartialPass(torch.cat(states, dim=1), self.num_shared) if self.num_shared else None
        return dataclasses.replace(make_chain(torch.stack(tokens, dim=1), probs), partial_pass=partial_pass)

    def _run_layers(self, tokens: Tensor, numbers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Runs layers on one more token of each row [B] -> h [B, 1, D] after the first E layers, and after all."""
        cache, run = self.cache, self.runner
        cache.reserve(1)

        def begin(tokens, slots):
            return *self.compiled.embed_tokens(tokens, slots), masks.committed_mask(slots[:, 0] + 1, cache.visible)

        h, *rotary, mask = run(("begin", cache.visible), begin, tokens[:, None], cache.slots)
        states = self.compiled.run_layers(h, numbers, rotary=rotary, positions=cache.slots, mask=mask, cache=cache)
        return states[self.num_shared], states[-1]

    def _read_out(self, h: Tensor) -> tuple[Tensor, Tensor]:
        """h [B, 1, D] -> logits [B, V], the most likely token [B]"""
        logits = self.target.logits(self.target.norm(h))[:, 0]
        return logits, logits.argmax(-1)
