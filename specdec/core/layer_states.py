"""The states of recurrent and convolution layers, row by row, when only a part of the drafts is kept.

Such a layer folds each token into a state, which cannot be cut back. So a pass over S tokens starts from the committed
states and remembers what each of these layers read. Once it is known how many tokens each row keeps, the layers alone read
those tokens again, from the states before the pass: two passes of a part of the model where all S are not kept, none
where they are. Rows that keep equally many tokens are read together.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import LinearAttentionCacheLayerMixin as StateLayer

FIELDS = ("conv_states", "recurrent_states")
MARKS = ("has_previous_state", "is_conv_states_initialized", "is_recurrent_states_initialized", "conv_kernel_size")


def choose(layer: StateLayer, rows: Tensor | None) -> StateLayer:
    """A copy of a layer's states; rows [M]: of these rows only"""
    chosen = copy.copy(layer)
    for name in FIELDS:
        states = getattr(layer, name).items()
        pick = {
            key: None if state is None else state.clone() if rows is None else state[rows.to(state.device)]
            for key, state in states
        }
        setattr(chosen, name, pick)
    for name in MARKS:
        setattr(chosen, name, dict(getattr(layer, name)))
    return chosen


class LayerStates:
    """The states of a cache, as transformers' layers keep them, and what is needed to take tokens back.

    layers: one place for each of the model's layers; those of attention layers stay empty
    """

    def __init__(self, layers: list):
        self.layers = layers
        self.places = [place for place, layer in enumerate(layers) if isinstance(layer, StateLayer)]
        self.before: list[StateLayer] | None = None  # the states before the pass, if tokens of it may be dropped
        self.calls: dict[int, tuple[nn.Module, tuple, dict]] = {}  # by layer: what it read in the pass
        self.num = 0
        self.counts: list[int] | None = None

    def select(self, rows: Tensor) -> None:
        """Goes on with these rows only, in this order. rows [M]"""
        for place in self.places:
            self.layers[place] = choose(self.layers[place], rows)

    def replace(self, rows: Tensor, other: "LayerStates") -> None:
        """The states of another cache's rows take the places of these rows. rows [M]"""
        for place in self.places:
            _write(self.layers[place], rows, other.layers[place])

    def begin(self, num: int, counts: list[int] | None) -> None:
        """A pass over `num` tokens begins. counts [B]: how many each row will keep, if that is known"""
        self.calls = {}
        self.num, self.counts = num, counts
        kept = num == 1 if counts is None else min(counts) == num
        self.before = None if kept else [choose(layer, None) for layer in self.layers_with_states()]

    def layers_with_states(self) -> Iterable[StateLayer]:
        return (self.layers[place] for place in self.places)

    def ran(self, cache, place: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """A layer has read all tokens of the pass. If it is known what to keep, its states are set right at once."""
        if self.before is None:
            return
        if self.counts is not None:
            self._read_again(cache, place, module, args, kwargs, self.counts)
        else:
            self.calls[place] = module, args, kwargs

    def commit(self, cache, counts: list[int]) -> None:
        """Leaves the states after the first counts[b] tokens of the pass in row b."""
        if self.counts is None and self.before is not None:
            for place, (module, args, kwargs) in self.calls.items():
                self._read_again(cache, place, module, args, kwargs, counts)
        self.before, self.calls = None, {}

    @torch.no_grad()
    def _read_again(self, cache, place: int, module: nn.Module, args: tuple, kwargs: dict, counts: list[int]) -> None:
        """The module reads the first counts[b] tokens of row b from the states before the pass."""
        assert self.before is not None
        before = self.before[self.places.index(place)]
        groups: dict[int, list[int]] = defaultdict(list)  # rows by the number of tokens that they keep
        for row, count in enumerate(counts):
            groups[count].append(row)
        for count, members in groups.items():
            if count == self.num:
                continue
            rows = torch.tensor(members)
            part = choose(before, rows)
            if count:
                inner = copy.copy(cache)
                inner.layers = [*cache.layers]
                inner.layers[place] = part
                given = [_cut(value, cache, inner, rows, len(counts), self.num, count) for value in (args, kwargs)]
                module.forward(*given[0], **given[1])
            _write(self.layers[place], rows, part)


def _write(layer: StateLayer, rows: Tensor, part: StateLayer) -> None:
    for name in FIELDS:
        for key, state in getattr(layer, name).items():
            value = getattr(part, name)[key]
            if state is not None:
                state[rows.to(state.device)] = torch.zeros_like(state[:1]) if value is None else value


def _cut(value: Any, cache, inner, rows: Tensor, num_rows: int, num_tokens: int, count: int) -> Any:
    """Some rows, and the first `count` tokens, of all tensors [B, S, ...] or [1, S, ...] in a module's arguments."""
    if value is cache:
        return inner
    if isinstance(value, dict):
        return {key: _cut(part, cache, inner, rows, num_rows, num_tokens, count) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_cut(part, cache, inner, rows, num_rows, num_tokens, count) for part in value)
    if isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == num_tokens:
        if value.shape[0] == num_rows:
            return value[rows.to(value.device), :count]
        if value.shape[0] == 1:
            return value[:, :count]
    return value
