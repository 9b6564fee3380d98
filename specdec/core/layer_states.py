"""States of recurrent and convolution layers, row by row, if only some drafts of a pass are kept.

Such a layer folds each token into a state, which cannot be cut back. So a pass over S tokens starts from the committed
states and remembers the layers' inputs. Once the numbers of kept tokens are known, these layers alone read them again,
from the states before the pass. Rows that keep all S are not read again. Rows with equal numbers are read together.
"""

import copy
import functools
import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from transformers.cache_utils import LinearAttentionCacheLayerMixin as StateLayer

STATE_FIELDS = ("conv_states", "recurrent_states")
STATE_MARKS = (
    "has_previous_state",
    "is_conv_states_initialized",
    "is_recurrent_states_initialized",
    "conv_kernel_size",
)


def list_state_tensors(layer: Any) -> list[Tensor]:
    """The states that a layer has; none for attention layers, and before the first pass"""
    states = itertools.chain(*(getattr(layer, name, {}).values() for name in STATE_FIELDS))
    return [state for state in states if state is not None]


def replace_states(layer: StateLayer, tensors: Iterable[Tensor]) -> StateLayer:
    """The layer over other tensors in place of `list_state_tensors(layer)`"""
    replaced, remaining = copy.copy(layer), iter(tensors)
    for name in STATE_FIELDS:
        states = getattr(layer, name)
        setattr(replaced, name, {key: None if value is None else next(remaining) for key, value in states.items()})
    for name in STATE_MARKS:
        setattr(replaced, name, dict(getattr(layer, name)))
    return replaced


def copy_states(layer: StateLayer, rows: Tensor | None) -> StateLayer:
    """A copy of a layer's states. rows [M]: rows of the copy; None: all"""
    tensors = list_state_tensors(layer)
    return replace_states(layer, [state.clone() if rows is None else state[rows.to(state.device)] for state in tensors])


class LayerStates:
    """The states of a cache, in transformers' layers, and the means to take tokens back.

    layers: one entry for each of the model's layers; entries of attention layers stay empty
    """

    def __init__(self, layers: list):
        self.layers = layers
        self.layer_indices = [layer_index for layer_index, layer in enumerate(layers) if isinstance(layer, StateLayer)]
        self.states_before: list[StateLayer] | None = None  # before the pass, if some of its tokens may be dropped
        self.calls: dict[int, tuple[nn.Module, tuple, dict]] = {}  # module and arguments of each layer in the pass
        self.num_tokens = 0
        self.counts: list[int] | None = None

    def select(self, rows: Tensor) -> None:
        """Keeps these rows, in this order. rows [M]"""
        for layer_index in self.layer_indices:
            self.layers[layer_index] = copy_states(self.layers[layer_index], rows)

    def replace(self, rows: Tensor, source: "LayerStates") -> None:
        """Overwrites these rows by the rows of another cache. rows [M]"""
        for layer_index in self.layer_indices:
            _write_rows(self.layers[layer_index], rows, source.layers[layer_index])

    def begin_pass(self, num_tokens: int, counts: list[int] | None) -> None:
        """Begins a pass over `num_tokens` tokens. counts [B]: tokens that each row will keep, if known"""
        self.calls = {}
        self.num_tokens = num_tokens
        self.counts = counts
        keeps_all = num_tokens == 1 if counts is None else min(counts) == num_tokens
        self.states_before = (
            None if keeps_all else [copy_states(self.layers[layer_index], None) for layer_index in self.layer_indices]
        )

    def note_call(self, cache, layer_index: int, module: nn.Module, args: tuple, kwargs: dict) -> None:
        """Notes that a layer has read all tokens of the pass. With known counts, its states are corrected at once."""
        if self.states_before is None:
            return
        if self.counts is not None:
            self._read_again(cache, layer_index, module, args, kwargs, self.counts)
        else:
            self.calls[layer_index] = module, args, kwargs

    def commit(self, cache, counts: list[int]) -> None:
        """Leaves the states after the first counts[b] tokens of the pass in row b."""
        if self.counts is None and self.states_before is not None:
            for layer_index, (module, args, kwargs) in self.calls.items():
                self._read_again(cache, layer_index, module, args, kwargs, counts)
        self.states_before = None
        self.calls = {}

    @torch.no_grad()
    def _read_again(
        self, cache, layer_index: int, module: nn.Module, args: tuple, kwargs: dict, counts: list[int]
    ) -> None:
        """Lets the module read the first counts[b] tokens of row b, from the states before the pass."""
        assert self.states_before is not None
        before = self.states_before[self.layer_indices.index(layer_index)]
        groups: dict[int, list[int]] = defaultdict(list)  # rows by their number of kept tokens
        for row, count in enumerate(counts):
            groups[count].append(row)
        for count, row_numbers in groups.items():
            if count == self.num_tokens:
                continue
            rows = torch.tensor(row_numbers)
            row_states = copy_states(before, rows)
            if count:
                row_cache = copy.copy(cache)
                row_cache.layers = [*cache.layers]
                row_cache.layers[layer_index] = row_states
                shape = len(counts), self.num_tokens
                cut = functools.partial(_cut_value, caches=(cache, row_cache), rows=rows, shape=shape, count=count)
                row_args, row_kwargs = tree_map(cut, (args, kwargs))
                module.forward(*row_args, **row_kwargs)
            _write_rows(self.layers[layer_index], rows, row_states)


def _write_rows(layer: StateLayer, rows: Tensor, source: StateLayer) -> None:
    """Writes the rows of `source` over `rows` of a layer's states."""
    for name in STATE_FIELDS:
        for key, state in getattr(layer, name).items():
            value = getattr(source, name)[key]
            if state is not None:
                state[rows.to(state.device)] = torch.zeros_like(state[:1]) if value is None else value


def _cut_value(value: Any, *, caches: tuple, rows: Tensor, shape: tuple[int, int], count: int) -> Any:
    """Rows, and the first `count` tokens, of a tensor [B, S, ...] or [1, S, ...]; most other values unchanged.

    caches: a cache, and the one that replaces it; shape: (B, S)
    """
    if value is caches[0]:
        return caches[1]
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != shape[1]:
        return value
    if value.shape[0] == shape[0]:
        return value[rows.to(value.device), :count]
    return value[:, :count] if value.shape[0] == 1 else value
