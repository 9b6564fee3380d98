"""The interfaces `Head` and `Drafter`, and the slot rule.

THE SLOT RULE (the only alignment in the project; every other file refers to it):

    Slot j sees token x_j and feature f_(j-1). Its step d sees x_(j+d-1) and the state its previous step returned,
    guesses x_(j+d), and is compared with the target's output at position j+d-1.

    position      0     1     2     3     4
    token         x0    x1    x2    x3    x4
    feature       f0    f1    f2    f3    f4      f_i: computed by the target once it has read x_i
    target        p1    p2    p3    p4    p5      p_i: its distribution for token i, found at position i-1

    slot 2 step 1   (f1, x2) -> h    guesses x3, compared with p3 (position 2)
    slot 2 step 2   (h , x3) -> h'   guesses x4, compared with p4 (position 3)
    slot 2 step 3   (h', x4) -> h''  guesses x5, compared with p5 (position 4)

In decoding the newest committed token is the newest slot. Its later tokens are drafts.

WHAT A STEP SEES (`context_kind`; docs/architecture.md), in training and in decoding alike:

    path    keys of committed slots' first steps, and of its own steps 2..d        EAGLE, shared MTP
    depth   keys of module d at slots whose step d needs committed tokens only     MTP, a module for each depth
    block   the features of slots <= j as keys, and its own block of K states      DFlash, DSpark
    text    the tokens before: step d of slot j is step 1 of slot j+d-1            draft models
    none    nothing                                                                Medusa, Hydra
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.core import precision
from specdec.core.cache import RowCache
from specdec.core.cached_keys import Piece
from specdec.core.span_attention import Seen, narrow_to_window
from specdec.target.model import Target

EXACT_BUFFERS = ("inv_freq", "e_score_correction_bias")  # endings of the names of buffers that stay in float32


@dataclass(frozen=True)
class Slots:
    """M slots of a training text, for `Drafter.solve`: inputs of their steps 1..K, and states to estimate."""

    features: Tensor  # [M, F*D] features f_(j-1)
    state: Tensor  # [M, D] the target's final states at j-1
    tokens: Tensor  # [M, K] tokens x_j .. x_(j+K-1)
    goals: Tensor  # [M, K, D] the target's final states at the positions of `tokens`


class Head(nn.Module, ABC):
    """A trained module beside a frozen target. The same class is used in training, decoding and export.

    vocab [W]: increasing ids of the target's tokens that can be drafted; None: all V of them
    """

    target_layers: tuple[int, ...]  # numbers of the hidden states that it reads, as in Target.read; (): tokens only
    depth: int | None  # upper bound of the drafts along a path; None: no bound
    pretrained = False  # start from trained weights: validation then also runs before training
    # Arguments without weights, which further training from a checkpoint sets anew
    changeable_arguments: tuple[str, ...] = ()
    # Arguments of parts, whose tensors begin with these names. Further training may add or exchange such a part
    exchangeable_parts: tuple[str, ...] = ()
    # Beginnings of the names of tensors with a row for each token that can be drafted
    token_row_prefixes: tuple[str, ...] = ()
    adapts_target = False  # change of the target in place: outputs are then those of the adapted target
    draft_to_target: Tensor | None  # [W] target ids of a reduced draft vocabulary, increasing; None: all V
    target_to_draft: Tensor | None  # [V] its inverse, -1 for tokens that are not drafted
    window: int | None = None  # positions that a layer sees, its own included; None: all
    windows: Sequence[int | None] = ()  # window of each layer; (): the head takes none
    published: dict | None = None  # record of its publication by another project (specdec/export/published.py)

    def __init__(self, target: Target, *, vocab: Tensor | None):
        super().__init__()
        self._target = (target,)  # a tuple, so that frozen weights are not registered, trained, moved or saved here
        self.register_buffer("draft_to_target", vocab)
        inverse = None
        if vocab is not None:
            if not bool((vocab[1:] > vocab[:-1]).all()) or int(vocab[-1]) >= target.vocab_size or int(vocab[0]) < 0:
                raise ValueError("A draft vocabulary must hold increasing token ids of the target.")
            inverse = torch.full((target.vocab_size,), -1)
            inverse[vocab] = torch.arange(len(vocab))
        self.register_buffer("target_to_draft", inverse, persistent=False)

        drafted_rows = slice(None) if vocab is None else vocab
        bias = target.lm_head.bias
        # The target's LM head over the draft vocabulary, frozen: weight [W, D], bias [W] or None
        self.goal_head: tuple[Tensor, Tensor | None]
        self.goal_head = (target.lm_head.weight[drafted_rows], None if bias is None else bias[drafted_rows])

    def _apply(self, fn, recurse=True):
        """Moves and casts all but EXACT_BUFFERS, which stay in float32.

        In bfloat16 rotary frequencies are far off at position 200, and so are the biases that choose experts.
        """
        exact_buffers = {name: buffer for name, buffer in self.named_buffers() if name.endswith(EXACT_BUFFERS)}
        super()._apply(fn, recurse)
        for name, buffer in exact_buffers.items():
            module, _, leaf = name.rpartition(".")
            owner = self.get_submodule(module)
            setattr(owner, leaf, buffer.to(owner.get_buffer(leaf).device))
        return self

    @property
    def target(self) -> Target:
        return self._target[0]

    @property
    def vocab_size(self) -> int:
        """The number W of tokens that can be drafted."""
        return self.target.vocab_size if self.draft_to_target is None else len(self.draft_to_target)

    def goal_logits(self, final: Tensor) -> Tensor:
        """The target's logits [..., W] over the draft vocabulary, scaled and capped. final [..., D]"""
        return self.target.shape_logits(self.goal_scores(final))

    def goal_scores(self, final: Tensor) -> Tensor:
        """The goal logits [..., W] before the target's scale and cap. final [..., D]"""
        weight, bias = self.goal_head
        return precision.multiply_few_rows(final.to(weight.dtype), weight, bias)

    def to_target(self, tokens: Tensor) -> Tensor:
        """Target ids of draft ids, any shape."""
        return tokens if self.draft_to_target is None else self.draft_to_target[tokens]

    def hold_window(self, window: int | None, *, full_layers: Sequence[int] | None = None, num_layers: int = 1) -> None:
        """Sets the window of all layers but `full_layers`, numbers from 0.

        Raises ValueError for a window below 2 positions, and for layers that the head does not have.
        """
        if window is not None and window < 2:
            raise ValueError(f"window={window} must be 2 positions or more; null: all.")
        full_layers = full_layers or ()
        if not set(full_layers) <= set(range(num_layers)):
            raise ValueError(f"full_layers={list(full_layers)} must be layers of this head, 0 .. {num_layers - 1}.")
        self.window = window
        self.windows = [None if layer in full_layers else window for layer in range(num_layers)]

    def with_window(self, window: int | None) -> Self:
        """The same head with this window in all layers; None: as it is. Raises ValueError if it takes none."""
        if window is None:
            return self
        if not self.windows:
            raise ValueError(f"window={window}: {type(self).__name__} has no attention that takes a window: give null.")
        return self._copy_with_window(window)

    def drop_window(self) -> Self:
        """The same head, whose layers see all positions."""
        return self._copy_with_window(None)

    def _copy_with_window(self, window: int | None) -> Self:
        changed = copy.copy(self)
        changed.hold_window(window, num_layers=len(self.windows))
        return changed

    def make_proposer(self, drafting: Any) -> Any:
        """The proposer that drafts with this head, for heads that are no `Drafter`. drafting:
        decoding.drafting.Drafting

        Raises ValueError for a class without its own proposer.
        """
        raise ValueError(
            f"{type(self).__name__} neither drafts by steps (Drafter) nor has a make_proposer: add one of them."
        )

    def frozen_copy(self) -> Self:
        """A frozen copy for decoding and saving. Training can go on undisturbed."""
        shared_values = (self._target, self.goal_head)
        frozen = copy.deepcopy(self, {id(value): value for value in shared_values}).eval().requires_grad_(False)
        for module in frozen.modules():
            if isinstance(module, SizedLinear):
                module.fold()
        return frozen

    def arguments(self) -> dict:
        """Constructor arguments that a checkpoint holds in place of those from training."""
        return {}

    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)


class Drafter(Head):
    """A head that drafts step by step.

    `step` returns a state and a readout instead of logits. Both loops make logits where they are needed: the training
    unroll for slots with a goal, in chunks, and the decoder for the frontier of the tree.
    """

    context_kind: Literal["path", "depth", "block", "text", "none"]  # keys that a step sees, see above
    estimates_state = False  # whether its state estimates the target's next final state, which a loss may compare
    has_confidence = False  # whether `confidence` returns logits
    has_candidates = False  # drafts come from a lattice of candidates, see `candidate_loss`
    # Whether the drafts of a round follow from its first pass: no step reads a draft or the state of another step, and
    # `logits` is the same at all depths
    parallel = False
    reads_pieces = True  # whether its attention takes a `Piece` in place of a mask
    shares_output = True  # whether `logits` is the same at all depths
    embedding: Tensor | None  # [V, E] its own frozen embedding, with `own_embedding`; None: the target's

    @property
    def repeats_step(self) -> bool:
        """Whether steps 2, 3, .. are one function of their tensors, so that one compiled function serves all."""
        return self.context_kind in ("path", "text")

    @property
    def first_slot(self) -> int:
        """The first slot whose step 1 has its inputs, 0 or 1: slot 0 has no feature."""
        return 1 if self.target_layers else 0

    def hold_embedding(self, width: int | None) -> None:
        """Registers an embedding [V, width], which a checkpoint holds; None: none, the head reads the target's.

        It starts as a copy of the target's if the width is the same, else as zero.
        """
        rows = None
        if width is not None:
            target_rows = self.target.embed.weight.detach()
            same_width = width == target_rows.shape[1]
            rows = target_rows.clone() if same_width else target_rows.new_zeros(len(target_rows), width)
        self.register_buffer("embedding", rows)

    def check_window(self, depth: int) -> None:
        """Raises ValueError unless all steps of a round of `depth` drafts lie within the window."""
        if self.window is not None and self.window <= depth and self.context_kind != "block":
            raise ValueError(f"window={self.window} must exceed depth={depth}: raise one or lower the other.")

    def narrow_keys(self, mask: Any, d: int, positions: Tensor) -> list[Any]:
        """The keys of `mask` within the window of each layer. Arguments as of `step`"""
        if isinstance(mask, dict):  # see `RowCache.sees`
            return [mask[window] for window in self.windows]
        if isinstance(mask, Piece):
            return [replace(mask, window=window) for window in self.windows]
        narrowed = {
            window: narrow_to_window(mask, window, depth=d, positions=positions, first=self.first_slot)
            for window in set(self.windows)
        }
        return [narrowed[window] for window in self.windows]

    def embed(self, tokens: Tensor) -> Tensor:
        """Embeddings [..., E] of tokens [...], as the head reads them."""
        return self.target.embed(tokens) if self.embedding is None else F.embedding(tokens, self.embedding)

    @abstractmethod
    def cache(self, batch: int) -> RowCache:
        """An empty cache for decoding. batch: number of rows"""

    def encode(self, features: Tensor) -> Tensor:
        """The state h [B, S, H] that step 1 reads, by default the features. features [B, S, F*D]"""
        return features.to(next(self.parameters()).dtype)

    def context(self, h: Tensor, positions: Tensor, cache) -> None:  # most heads have nothing to do
        """Writes keys and values of the features into the cache, if `context_kind` is "block".

        h [B, S, H]: result of `encode`; positions [B, S]: positions of the features
        """

    @abstractmethod
    def step(
        self, d: int, h: Tensor, tokens: Tensor, positions: Tensor, mask: Seen | None, cache
    ) -> tuple[Tensor, Tensor]:
        """Runs step d, in 1..K. Returns h [B, S, H] for the next step, and the readout [B, S, R] for `logits`.

        h [B, S, H]: state of the step before, H may differ from step to step; tokens, positions [B, S]
        mask: visible keys, bool [B, 1, S, keys] in decoding and of draft models, spans in training, None without keys
        cache: RowCache in decoding, a step of UnrollCache in training
        """

    def logits(self, d: int, readout: Tensor) -> Tensor:
        """Logits [..., W] over the draft vocabulary, by default of the target's LM head. readout [..., R]: step d's"""
        return self.goal_logits(readout)

    def loss_logits(self, d: int, readout: Tensor) -> Tensor:
        """Logits [..., W] that losses compare with the target's. readout [..., R]: step d's"""
        return self.logits(d, readout)

    def guess(self, d: int, readout: Tensor, loss_logits: Tensor) -> Tensor:
        """Likeliest draft ids [...]. readout [..., R]: step d's; loss_logits [..., W]: result of that method"""
        return loss_logits.argmax(-1)

    def candidate_loss(self, readout: Tensor, loss_logits: Tensor, token: Tensor) -> Tensor | None:
        """Cross-entropy [M] over candidates; None without candidates. readout [M, R]; loss_logits [M, W]; token [M]:
        goals
        """
        return None

    def blank(self, num_rows: int, num: int) -> tuple[Tensor, Tensor] | None:
        """Inputs of the later steps of a parallel drafter, in place of drafts: h [B, num, H], tokens [B, num].

        Step 1 and they run in one pass. None: the readouts of all steps follow from step 1 alone, see `all_readouts`.
        """
        return None

    def all_readouts(self, h: Tensor) -> Tensor:
        """Readouts [B, S, K, R] of all steps of a parallel drafter without `blank`. h [B, S, H]: after step 1"""
        raise TypeError(
            f"{type(self).__name__} has neither `blank` nor `all_readouts`, of which a parallel drafter needs one."
        )

    def confidence(self, d: int, readout: Tensor) -> Tensor | None:
        """Logit [...] of "this draft is accepted"; None without a confidence head. readout [..., R]: step d's"""
        return None

    def measure_inputs(self, slots: list[Slots], *, random_weights: bool) -> bool:
        """Measures the sizes of its inputs, before `solve` and training. Returns whether it did.

        random_weights: whether its weights are random; if not, its map stays the same
        """
        return False

    @property
    def solves(self) -> bool:
        """Whether `solve` sets weights with the head's settings."""
        return type(self).solve is not Drafter.solve

    def solve(self, slots: list[Slots]) -> bool:
        """Sets weights in closed form before training (docs/methods.md, section 5). Returns whether it did."""
        return False


class SizedLinear(nn.Linear):
    """nn.Linear with weights in units of the sizes of its inputs: y = W (x / size) + b.

    One entry of a hidden state may be a thousand times as large as the others (massive activations, 2402.17762). Adam
    moves all weights of a matrix by as much. So its first steps would change the result by that entry alone. In units
    of the sizes all inputs count alike. `fold` makes the weights ordinary ones.
    """

    size: Tensor  # [in_features] root mean squares of the inputs; all ones: ordinary weights, state_dict has no sizes

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False):
        super().__init__(in_features, out_features, bias=bias)
        self.register_buffer("size", torch.ones(in_features))
        self._register_load_state_dict_pre_hook(self._add_size)
        self.register_state_dict_post_hook(_drop_ones)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / self.size)

    @torch.no_grad()
    def measure_inputs(self, inputs: Iterable[Tensor], *, random_weights: bool) -> None:
        """Sets the sizes to those of these inputs [M, in_features].

        random_weights: whether the weights are random, and stay as they are in the new units; else the map stays the
            same
        """
        squares, num = torch.zeros_like(self.size, dtype=torch.float32), 0
        for x in inputs:
            squares, num = squares + x.float().pow(2).sum(0), num + len(x)
        size = (squares / num).sqrt().clamp(min=1e-6)
        if random_weights:
            self.size.copy_(size)
        else:
            self._change_units(size)

    def fold(self) -> None:
        """Makes the weights ordinary ones. The map stays the same."""
        self._change_units(torch.ones_like(self.size))

    def set_weight(self, weight: Tensor) -> None:
        """Sets the map to that of an ordinary weight [out_features, in_features]."""
        self.weight.data.copy_(weight * self.size)

    def _change_units(self, size: Tensor) -> None:
        self.weight.data.mul_(size / self.size)
        self.size.copy_(size)

    def _add_size(self, state, prefix, *_):
        state.setdefault(prefix + "size", torch.ones_like(self.size))


def _drop_ones(module, state, prefix, *_):
    if bool((module.size == 1).all()):
        del state[prefix + "size"]
