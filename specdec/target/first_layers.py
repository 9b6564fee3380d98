"""The first layers of a target that was loaded without its layers: what they compute for a text."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdec.target.loading import fill_ends
from specdec.target.model import Target


class LayerReached(Exception):
    """The pass has come to the layer before which it ends."""


@torch.no_grad()
def read_first_states(target: Target, tokens: Tensor, num: int) -> list[Tensor]:
    """The hidden states 0 to `num` [t, D] of a text, which need the first `num` layers alone.

    tokens: [t] token ids; num: number of a hidden state before the last one
    Layers that are not here are read from the target's files, and dropped afterwards. Raises ValueError for a missing
    tensor.
    """
    states: dict[int, Tensor] = {}

    def store_input(number: int):
        def hook(module, args, kwargs):
            states[number] = (args[0] if args else kwargs["hidden_states"])[0]
            if number == num:
                raise LayerReached

        return hook

    hooks = [
        target.layers[number].register_forward_pre_hook(store_input(number), with_kwargs=True)
        for number in range(num + 1)
    ]
    try:
        with _hold_layers(target, num), contextlib.suppress(LayerReached):
            target.decoder(
                input_ids=tokens[None].to(target.device), **target.layer_masks(None, None, None), use_cache=False
            )
    finally:
        for hook in hooks:
            hook.remove()
    return [states[number] for number in range(num + 1)]


@contextlib.contextmanager
def _hold_layers(target: Target, num: int) -> Iterator[None]:
    """Within, the first `num` layers have their values, and so has all that stands before them."""
    if target.whole or target.shards is None:
        yield
        return
    unread = [*list_outer_modules(target), *target.layers[:num]]
    unread = [module for module in unread if any(value.is_meta for value in (*module.parameters(), *module.buffers()))]
    try:
        fill_ends(target.model, tuple(unread), target.shards)
        for module in unread:
            module.to(target.device)
        target.shards.close()
        yield
    finally:
        for module in unread:
            module.to("meta")


def list_outer_modules(target: Target) -> list[nn.Module]:
    """The largest modules of the decoder that hold none of its layers, such as position embeddings."""
    layers, outer_modules = set(target.layers), []
    parents: list[nn.Module] = [target.decoder]
    while parents:
        for module in parents.pop().children():
            if module in layers:
                continue
            if layers.isdisjoint(module.modules()):
                outer_modules.append(module)
            else:
                parents.append(module)
    return outer_modules
