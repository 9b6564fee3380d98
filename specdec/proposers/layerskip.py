"""Self-speculation: the target drafts with some of its own layers (Draft & Verify, 2309.08168; LayerSkip, 2404.16710)."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec import masks
from specdec.compile import Runner
from specdec.proposers.base import Proposer, last_of
from specdec.sampling import pick, uniforms
from specdec.target import Target
from specdec.tree import chain


def layer_numbers(target: Target, layers: int | Sequence[int] | None) -> tuple[int, ...]:
    """The first so many layers, or chosen ones (0 is the first, -1 the last); None: the first two thirds.

    Raises ValueError unless they are there and strictly increasing.
    """
    num = target.num_layers
    if layers is None:
        layers = max(1, 2 * num // 3)
    if isinstance(layers, int) and 1 <= layers <= num:
        return tuple(range(layers))
    chosen = list(layers) if isinstance(layers, Sequence) and not isinstance(layers, str) else []
    if not chosen or not all(isinstance(k, int) and -num <= k < num for k in chosen):
        raise ValueError(
            f"proposer.layers={chosen or layers}: {target.name} has {num} layers; give how many of the first to draft "
            f"with, 1 to {num}, or a list of some, such as [0,1,{num - 1}]."
        )
    found = tuple(k % num for k in chosen)
    if any(a >= b for a, b in zip(found, found[1:])):
        raise ValueError(f"proposer.layers={chosen}: list every layer once and in order, for so they are run.")
    return found


def num_shared(numbers: tuple[int, ...]) -> int:
    """How many of the first layers are all among these."""
    return sum(number == place for place, number in enumerate(numbers))


class LayerSkip(Proposer):
    """A chain of `depth` drafts, each by a pass through the chosen `layers`, the final norm and the LM head.

    These passes read what the target's own cache says of the committed tokens, which is right for every layer, and write
    the drafts behind them. If the first layers are among the chosen, 0 .. E-1, then for them a draft's K and V are right
    too, and so are the hidden states behind them: verification goes on from there, and overwrites K and V of the others.

    At temperature > 0 drafts are sampled. threshold: the last draft is the first at which the product of the likeliest
    tokens' chances so far, by the drafting layers, is below it in every row (methods, 1.4: laws alone have a say in it).
    """

    target_layers = ()

    def __init__(
        self,
        target: Target,
        *,
        layers: int | Sequence[int] | None,
        depth: int,
        threshold: float = 0.0,
        compile: bool = False,
    ):
        self.layers = layer_numbers(target, layers)
        if depth < 1:
            raise ValueError(f"proposer.depth={depth} must be at least 1.")
        if not 0 <= threshold < 1:
            raise ValueError(f"proposer.threshold={threshold} must be at least 0, which never stops, and below 1.")
        target.check_layers("it cannot draft with some of them; choose another proposer.")
        self.target, self.depth, self.threshold = target, depth, threshold
        self.num_shared = num_shared(self.layers)  # E
        self.varies = threshold > 0
        self.runner = Runner(compile)

    @property
    def compile_seconds(self) -> float:
        return self.runner.seconds

    def share(self, cache):
        self.cache = cache

    def begin(self, tokens, num):
        pass

    def commit(self, tokens, features, num, counts):
        self.newest = last_of(tokens, num)  # [B]

    @torch.no_grad()
    def propose(self, sampling, generator):
        self.cache.make_room(1 + self.depth)  # at once, so that every pass sees what verification will see
        tokens, laws, states = [self.newest], [], []
        certainty = torch.zeros((), device=self.newest.device)
        for _ in range(self.depth):
            before, h = self._run(tokens[-1], self.layers)
            states.append(before)
            logits, best, log_chance = self.runner("draft", self._read_out, h)
            certainty = certainty + log_chance
            if not sampling.greedy:
                laws.append(sampling.law(logits))
                uniform = uniforms(len(best), generator, best.device)
                best = pick(laws[-1], uniform)
            tokens.append(best)
            if self.threshold and bool(certainty.max().exp() < self.threshold):
                break
        if self.num_shared:
            states.append(self._run(tokens[-1], self.layers[: self.num_shared])[0])
        self.cache.pending = 0
        tree = chain(torch.stack(tokens, dim=1), None)
        if laws:
            tree = dataclasses.replace(tree, probs=torch.stack([torch.zeros_like(laws[0]), *laws], dim=1))
        if self.num_shared:
            tree = dataclasses.replace(tree, states=torch.cat(states, dim=1), num_layers=self.num_shared)
        return tree

    def _run(self, tokens: Tensor, numbers: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """tokens [B], each behind its row's last entry -> h [B, 1, D] after the first E layers and after all of `numbers`"""
        cache, run = self.cache, self.runner
        cache.reserve(1)

        def begin(tokens, slots):
            return *self.target.begin(tokens, slots), masks.committed(slots[:, 0] + 1, cache.visible)

        h, *rotary, mask = run(("begin", cache.visible), begin, tokens[:, None], cache.slots)
        states = self.target.run_layers(
            h, numbers, rotary=rotary, positions=cache.slots, mask=mask, cache=cache, runner=run
        )
        return states[self.num_shared], states[-1]

    def _read_out(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """h [B, 1, D] -> logits [B, V], the likeliest token [B] and, if it matters, the logarithm of its chance [B]"""
        logits = self.target.logits(self.target.norm(h))[:, 0]
        top, best = logits.max(-1)
        return logits, best, top - logits.logsumexp(-1) if self.threshold else torch.zeros_like(top)
