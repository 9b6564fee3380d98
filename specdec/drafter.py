"""The `Drafter` interface and the slot rule.

THE SLOT RULE (the only alignment in the project; every other file refers to it):

    Slot j sees token x_j and feature f_(j-1). Its step d sees x_(j+d-1) and the state its previous step returned,
    guesses x_(j+d), and is judged by the target's output at position j+d-1.

    position      0     1     2     3     4
    token         x0    x1    x2    x3    x4
    feature       f0    f1    f2    f3    f4      f_i: computed by the target once it has read x_i
    target        p1    p2    p3    p4    p5      p_i: its law for token i, found at position i-1

    slot 2 step 1   (f1, x2) -> h    guesses x3, judged by p3 (position 2)
    slot 2 step 2   (h , x3) -> h'   guesses x4, judged by p4 (position 3)
    slot 2 step 3   (h', x4) -> h''  guesses x5, judged by p5 (position 4)

In decoding the newest committed token is the newest slot; its later tokens are drafted instead of given.

WHAT A STEP SEES (`attends`; architecture, 1.4), in training and in decoding alike:

    path    keys of committed slots' first steps, and of its own steps 2..d        EAGLE, shared MTP, Meta's heads
    depth   keys of module d at slots whose step d needs committed tokens only     MTP, a module for each depth
    block   the features of slots <= j as keys, and its own block of K states      DFlash, DSpark
    text    the tokens before: step d of slot j is step 1 of slot j+d-1            draft models
    none    nothing                                                                Medusa, Hydra
    itself  no step: the (adapted) target guesses by Jacobi iteration              CLLM
"""

import copy
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from specdec.cache import RowCache
from specdec.target import Target


@dataclass(frozen=True)
class Slots:
    """M slots of training texts, for `Drafter.solve`: what their steps 1..K read, and what these estimate."""

    features: Tensor  # [M, F*D] f_(j-1)
    state: Tensor  # [M, D] the target's final state at j-1
    tokens: Tensor  # [M, K] x_j .. x_(j+K-1)
    goals: Tensor  # [M, K, D] the target's final states there


class Drafter(nn.Module, ABC):
    """What is trained, decoded with and exported: one class for all three.

    `step` returns a state and a readout rather than logits, so that both loops make logits only where they are
    needed: the training unroll for judged slots, in chunks, the decoder for the frontier of the tree.
    """

    target_layers: tuple[int, ...]  # hidden states it reads (indices as in Target.read); () reads tokens only
    depth: int | None  # the deepest step it can take; None: any
    attends: Literal["path", "depth", "block", "text", "none", "itself"]  # what a step sees
    pretrained = (
        False  # whether it starts from weights that were trained before: validation then comes before training too
    )
    estimates = False  # whether its state estimates the target's next final state, so that the two can be compared
    confident = False  # whether `confidence` says something
    adapts_target = False  # whether it changes the target in place, so that outputs are those of an adapted target
    draft_to_target: Tensor | None  # [W] target ids of a reduced draft vocabulary, increasing; None: all V
    target_to_draft: Tensor | None  # [V] the inverse, -1 where a token is not drafted

    def __init__(self, target: Target, *, vocab: Tensor | None):
        super().__init__()
        self._target = (target,)  # a tuple, so that frozen weights are not registered, trained, moved or saved as ours
        self.register_buffer("draft_to_target", vocab)
        inverse = None
        if vocab is not None:
            if not bool((vocab[1:] > vocab[:-1]).all()) or int(vocab[-1]) >= target.vocab_size or int(vocab[0]) < 0:
                raise ValueError("A draft vocabulary must hold increasing token ids of the target.")
            inverse = torch.full((target.vocab_size,), -1)
            inverse[vocab] = torch.arange(len(vocab))
        self.register_buffer("target_to_draft", inverse, persistent=False)

        rows = slice(None) if vocab is None else vocab
        bias = target.lm_head.bias
        self._goal_head: tuple[Tensor, Tensor | None]  # frozen [W, D], [W]
        self._goal_head = (target.lm_head.weight[rows], None if bias is None else bias[rows])

    def _apply(self, fn, recurse=True):
        """Moves and casts, but leaves rotary frequencies in float32: rounded to bfloat16 they are far off at position 200."""
        exact = {name: buffer for name, buffer in self.named_buffers() if name.endswith("inv_freq")}
        super()._apply(fn, recurse)
        for name, buffer in exact.items():
            module, _, leaf = name.rpartition(".")
            owner = self.get_submodule(module)
            setattr(owner, leaf, buffer.to(owner.get_buffer(leaf).device))
        return self

    @property
    def target(self) -> Target:
        return self._target[0]

    def goal_logits(self, final: Tensor) -> Tensor:
        """The target's logits over the draft vocabulary: final [..., D] -> [..., W]"""
        weight, bias = self._goal_head
        return nn.functional.linear(final.to(weight.dtype), weight, bias)

    @property
    def goal_head(self) -> tuple[Tensor, Tensor | None]:
        """The target's LM head over the draft vocabulary, frozen: weight [W, D], bias [W] if the target has one"""
        return self._goal_head

    @goal_head.setter
    def goal_head(self, head: tuple[Tensor, Tensor | None]) -> None:
        self._goal_head = head

    @property
    def vocab_size(self) -> int:
        """W: what `logits` are over."""
        return self.target.vocab_size if self.draft_to_target is None else len(self.draft_to_target)

    @property
    def first_slot(self) -> int:
        """The first slot that has what step 1 reads: a drafter of features begins behind the first of them."""
        return 1 if self.target_layers else 0

    @abstractmethod
    def cache(self, batch: int) -> RowCache:
        """An empty cache for decoding `batch` rows."""

    @abstractmethod
    def encode(self, features: Tensor) -> Tensor:
        """features [B, S, F*D] -> h [B, S, H]: what step 1 takes."""

    def context(self, h: Tensor, positions: Tensor, cache) -> None:
        """`attends="block"` only: keys and values of the features in h [B, S, H], at their positions [B, S], into the cache."""
        raise TypeError(f"{type(self).__name__} has no context: it attends {self.attends}.")

    @abstractmethod
    def step(
        self, d: int, h: Tensor, tokens: Tensor, positions: Tensor, mask: Tensor | None, cache
    ) -> tuple[Tensor, Tensor]:
        """Step d in 1..K. h [B, S, H]; tokens, positions [B, S]; mask bool [B, 1, S, keys], True may attend.

        -> h [B, S, H] for the next step, readout [B, S, R] for `logits`. H may differ from step to step. The mask is not
        to be read where `attends` says that a step sees nothing: there it may be None.
        """

    @abstractmethod
    def logits(self, d: int, readout: Tensor) -> Tensor:
        """readout [..., R] of step d -> [..., W], over the draft vocabulary"""

    def confidence(self, d: int, readout: Tensor) -> Tensor | None:
        """readout [..., R] of step d -> [...], the logit of "this draft is accepted"; None for a head that does not say"""
        return None

    def solve(self, slots: list[Slots]) -> bool:
        """Sets weights in closed form before training; a head that knows how overrides this. -> whether it did"""
        return False

    def decodable(self) -> "Drafter":
        """A frozen copy to decode with and to save, so that training goes on undisturbed."""
        shared = (self._target, self._goal_head)
        return copy.deepcopy(self, {id(part): part for part in shared}).eval().requires_grad_(False)

    def arguments(self) -> dict:
        """Arguments that a checkpoint needs instead of those that training was given."""
        return {}

    def to_target(self, tokens: Tensor) -> Tensor:
        """Draft ids -> target ids, any shape."""
        return tokens if self.draft_to_target is None else self.draft_to_target[tokens]

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)
