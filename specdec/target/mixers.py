"""Calls of recurrent and convolution mixers: by document in a pack, token by token behind a state, in a compiled layer.

A mixer folds the tokens before each one into a state, so no mask keeps documents apart. Each document is a row here:

    hidden states of a pack  [1, T, D]      a a a b b b b c c c
    the mixer's rows         [n, L, D]      a a a .  |  b b b b  |  c c c .      similar lengths go together

States begin at zero in every row, and a row's padding lies behind its tokens, so the values are those of each document
alone. The kernels of fla, mamba_ssm and causal_conv1d are not told of documents, and need not be installed.
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten
from transformers import Cache

from specdec.core.masks import Documents


@contextlib.contextmanager
def call_by_document(mixers: Iterable[nn.Module], documents: Documents | None) -> Iterator[None]:
    """A context in which each mixer reads the documents of a pack apart; without documents it changes nothing."""
    stored_forwards = []
    if documents is not None:
        for mixer in dict.fromkeys(mixers):
            stored_forwards.append((mixer, vars(mixer).get("forward")))
            mixer.forward = functools.partial(_read_documents, mixer.forward, documents)
    try:
        yield
    finally:
        for mixer, forward in stored_forwards:
            del mixer.forward
            if forward is not None:
                mixer.forward = forward


def _read_documents(forward: Callable, documents: Documents, *args, **kwargs) -> Any:
    """What `forward` returns for a pack. Tensors [1, T, ..] among its arguments are cut into the documents' rows.

    Arguments of attention are left out: a mixer would take a mask for padding.
    """
    length = documents.token_indices.numel()
    kwargs.pop("segments", None)
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = None
    outputs = []
    for group in documents.groups:
        cut = functools.partial(_take_places, group, length)
        row_args, row_kwargs = tree_map(cut, (args, kwargs))
        outputs.append(forward(*row_args, **row_kwargs))
    if isinstance(outputs[0], Tensor):
        return _join_rows(outputs, documents)
    return _join_rows([output[0] for output in outputs], documents), *[None] * (len(outputs[0]) - 1)


def _take_places(group: Tensor, length: int, value: Any) -> Any:
    """The entries [n, L, ..] of a tensor [1, T, ..] that belong to a group; other values unchanged"""
    if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[:2] != (1, length):
        return value
    return value[0][group.to(value.device)]


def _join_rows(rows: list[Tensor], documents: Documents) -> Tensor:
    """rows [n, L, E] of every group -> [1, T, E]"""
    return torch.cat([part.flatten(0, 1) for part in rows])[documents.token_indices.flatten().to(rows[0].device)][None]


@dataclass(frozen=True)
class MixerCall:
    """The arguments of a mixer without its tensors, so that a compiled layer can give those out.

    leaves: all arguments in order, with TENSOR and CACHE in place of tensors and of the cache
    """

    leaves: tuple
    spec: TreeSpec

    @classmethod
    def from_arguments(cls, args: tuple, kwargs: dict) -> tuple["MixerCall", list[Tensor]]:
        """The call, and its tensors."""
        values, spec = tree_flatten((args, kwargs))
        return cls(tuple(map(_mark_value, values)), spec), [value for value in values if isinstance(value, Tensor)]

    def fill(self, tensors: Iterable[Tensor], cache: Cache) -> tuple[tuple, dict]:
        """The arguments with these tensors and this cache."""
        values, remaining = [], iter(tensors)
        for leaf in self.leaves:
            value = cache if leaf is CACHE else leaf
            values.append(next(remaining) if leaf is TENSOR else value)
        return tree_unflatten(values, self.spec)


TENSOR, CACHE = object(), object()  # marks of tensors and of the cache among the arguments of a call


def _mark_value(value: Any) -> Any:
    """The mark of a tensor or of a cache; other values unchanged"""
    if isinstance(value, Cache):
        return CACHE
    return TENSOR if isinstance(value, Tensor) else value


@contextlib.contextmanager
def record_call(mixer: nn.Module) -> Iterator[list[tuple[MixerCall, list[Tensor]]]]:
    """A context that gives a list, to which each call of the mixer adds its arguments."""
    calls: list[tuple[MixerCall, list[Tensor]]] = []
    hook = mixer.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(MixerCall.from_arguments(args, kwargs)), with_kwargs=True
    )
    try:
        yield calls
    finally:
        hook.remove()


def step_behind_state(mixer: nn.Module, layer: int) -> None:
    """Lets a mixer that goes on from its state by one token only read several tokens one after the other.

    layer: number of its layer in the cache
    """
    mixer.forward = functools.partial(_read_tokens, mixer.forward, layer)


def _read_tokens(forward: Callable, layer: int, hidden_states: Tensor, **kwargs) -> Tensor:
    """What `forward` returns, by one call for each token where the layer has a state."""
    caches = [value for value in kwargs.values() if isinstance(value, Cache)]
    if not any(cache.has_previous_state(layer) for cache in caches):
        return forward(hidden_states, **kwargs)
    return torch.cat([forward(token, **kwargs) for token in hidden_states.split(1, dim=1)], dim=1)
