"""The target's layers, run one after the other without transformers in between, and compiled on request."""

import functools
import time
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor

from specdec.core.cache import RowCache
from specdec.core.cached_keys import CachedKeys
from specdec.core.compile import Runner
from specdec.core.devices import name_cause
from specdec.core.tree import PartialPass
from specdec.target.model import Target, TargetOutput


class CompiledTarget:
    """Passes of the target, or of some of its layers. runner: whether they are compiled"""

    def __init__(self, target: Target, runner: Runner):
        self.target, self.runner = target, runner

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The first layer's input [B, S, D], and cos and sin [B, S, head_dim] of positions. tokens, positions [B, S]"""
        h = self.target.embed(tokens)
        return h, *self.target.decoder.rotary_emb(h, positions)  # type: ignore[operator]

    def run_layers(
        self,
        h: Tensor,
        numbers: Sequence[int],
        *,
        rotary: Sequence[Tensor],
        positions: Tensor,
        mask: Tensor | tuple[CachedKeys, ...],
        cache: RowCache,
    ) -> list[Tensor]:
        """Runs layers in order. Returns h [B, S, D] before each of them, and behind the last.

        numbers: numbers of the layers, from 0; rotary: cos and sin of the positions, as `embed_tokens` returns them
        mask: argument of `Target.read`

        K and V are written to the entries that `cache.reserve` made. If `check_layers` accepts the target,
        `Target.read` runs the same layers.
        """

        def run_layer(module, h, cos, sin, positions, *tensors):
            slots, keys, values, seen, *cached_parts = tensors
            cached = {"cached": {seen.shape[1]: CachedKeys(seen, *cached_parts)}} if cached_parts else {}
            return module(
                h,
                attention_mask=seen,
                **cached,
                position_ids=positions,
                position_embeddings=(cos, sin),
                past_key_values=cache.with_tensors([keys, values], cache.lengths, slots=slots),
                use_cache=True,
            )

        states = [h]
        if not numbers:
            return states
        kinds, layer_inputs = self.target.layer_types, self.target.layer_masks(mask, positions, cache)

        def seen(kind: str) -> tuple[Tensor, ...]:
            masks = layer_inputs["attention_mask"]
            kind_mask = cast(Tensor, masks[kind] if isinstance(masks, dict) else masks)
            return layer_inputs["cached"][kind_mask.shape[1]] if "cached" in layer_inputs else (kind_mask,)

        functions: dict[int, Callable] = {}
        for kind in {kinds[number]: None for number in numbers}:
            members = [number for number, layer_kind in enumerate(kinds) if layer_kind == kind]
            first = next(number for number in numbers if kinds[number] == kind)
            # For a new shape every layer is tried once, each on the K and V of the layer that runs next.
            inputs = h, *rotary, positions, cache.slots, *_list_entries(cache, first), *seen(kind)
            name = f"the target's layer of {kind}"
            modules = [self.target.layers[number] for number in members]
            functions |= dict(zip(members, self.runner.compile_layers(name, run_layer, modules, *inputs)))
        for number in numbers:
            inputs = *rotary, positions, cache.slots, *_list_entries(cache, number), *seen(kinds[number])
            states.append(functions[number](states[-1], *inputs))
        return states

    def read(
        self,
        tokens: Tensor,
        hidden_states: tuple[int, ...],
        *,
        positions: Tensor,
        mask: Tensor | tuple[CachedKeys, ...],
        cache: RowCache,
        partial_pass: PartialPass | None = None,
    ) -> TargetOutput:
        """As `Target.read`, but by `run_layers`. partial_pass: layers that were run on these tokens before

        Raises ValueError if the model does more than run its layers, or if compiled layers compute something else: the
        first pass of every shape is compared. Without a request for compiling, compiling then ends instead.
        """
        target, run = self.target, self.runner
        if partial_pass is None and not run.compile:
            return target.read(tokens, hidden_states, positions=positions, mask=mask, cache=cache)
        seconds, first = run.seconds, 0
        if partial_pass is None:
            h, *rotary = run("the target's embedding", self.embed_tokens, tokens, positions)
        else:
            first = partial_pass.num_layers
            assert partial_pass.states.shape[:2] == tokens.shape and all(k >= first for k in hidden_states)
            h = partial_pass.states
            rotary = run("the target's rotary embedding", target.decoder.rotary_emb, h, positions)  # type: ignore[arg-type]
        numbers = range(first, target.num_layers)
        states = self.run_layers(h, numbers, rotary=rotary, positions=positions, mask=mask, cache=cache)
        final = run("the target's last norm", target.norm, states[-1])
        ends = [*states[:-1], final]
        features = [ends[k - first] for k in hidden_states]
        output = TargetOutput(torch.cat(features, dim=-1) if features else h[..., :0], final)
        if run.seconds > seconds:
            start = time.perf_counter()
            try:
                self._check_pass(numbers, states, tokens, rotary=rotary, positions=positions, mask=mask, cache=cache)
            except ValueError as error:
                run.stop_compiling(error)
            if not run.compile:
                output = target.read(tokens, hidden_states, positions=positions, mask=mask, cache=cache)
            run.seconds += time.perf_counter() - start
        return output

    def _check_pass(
        self, numbers: Sequence[int], states: Sequence[Tensor], tokens: Tensor, *, positions, **arguments
    ) -> None:
        """Compares each compiled layer with the layer itself on the same input, and all layers with `Target.read`.

        Roundings grow from layer to layer: 36 random layers differ by 2 to 6 % in bfloat16, one by less than 1 %.
        numbers, states: arguments and result of `run_layers`; arguments: its other arguments. Raises ValueError
        """
        target, plain, advice = self.target, CompiledTarget(self.target, Runner()), "set compile=false."
        run: Callable = functools.partial(plain.run_layers, positions=positions, **arguments)
        for number, layer_input, layer_output in zip(numbers, states, states[1:]):
            reference = run(layer_input, [number])[-1]
            _check_same(
                target.norm(layer_output),
                target.norm(reference),
                f"{target.name} gives other values compiled: {advice}",
            )
        final = target.norm(run(plain.embed_tokens(tokens, positions)[0], range(target.num_layers))[-1])
        reference = target.read(tokens, (), positions=positions, mask=arguments["mask"], cache=arguments["cache"]).final
        _check_same(final, reference, _MORE_THAN_LAYERS.format(target.name, advice))


_MORE_THAN_LAYERS = "{} does more than its layers one after the other: {}"


def _list_entries(cache: RowCache, number: int) -> list[Tensor]:
    """K and V of a layer."""
    return cache.keys_and_values[2 * number : 2 * number + 2]


@torch.no_grad()
def check_layers(target: Target, advice: str) -> None:
    """Raises ValueError with `advice` if the model does more than run its layers one after the other."""
    if target.recurrent:
        raise ValueError(f"{target.name} has layers that keep a state, so they do more than read entries: {advice}")
    tokens, cache = torch.ones(1, 2, dtype=torch.long, device=target.device), target.cache(1)
    cache.reserve(2)
    mask = torch.ones(1, 1, 2, cache.visible, dtype=torch.bool, device=target.device).tril()
    layered = CompiledTarget(target, Runner())
    numbers = range(target.num_layers)
    try:
        h, *rotary = layered.embed_tokens(tokens, cache.slots)
        *_, h = layered.run_layers(h, numbers, rotary=rotary, positions=cache.slots, mask=mask, cache=cache)
    except (RuntimeError, TypeError, AttributeError, ValueError, KeyError, IndexError) as error:
        raise ValueError(
            f"{target.name}'s layers take more than a state, one rotary embedding for all layers, a mask and K and V "
            f"({name_cause(error)}): {advice}"
        ) from error
    _check_same(target.norm(h), target.read(tokens, ()).final, _MORE_THAN_LAYERS.format(target.name, advice))


def _check_same(states: Tensor, reference: Tensor, message: str) -> None:
    if not (reference - states).float().norm() <= 0.05 * reference.float().norm():
        raise ValueError(message)
