"""The target's layers, run one after the other without transformers in between, and compiled on request."""

import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from specdec.core.cache import RowCache
from specdec.core.cached_keys import CachedKeys
from specdec.core.compile import Runner
from specdec.core.devices import name_cause
from specdec.core.layer_states import LayerStates, list_state_tensors
from specdec.target.mixers import record_call
from specdec.target.model import Target, TargetOutput
from specdec.target.structure import STATE_KINDS


class CompiledTarget:
    """Passes of the target, or of some of its layers. runner: whether they are compiled"""

    def __init__(self, target: Target, runner: Runner):
        self.target, self.runner = target, runner
        self.groups = _group_layers(target)
        self.checked_shapes: set[tuple] = set()  # shapes of tokens and entries whose first pass was compared

    def embed_tokens(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """The first layer's input [B, S, D], and cos and sin [B, S, head_dim] of positions, if layers take them.

        tokens, positions [B, S]
        """
        h = self.target.embed(tokens)
        return h, *self._embed_positions(h, positions)

    def _embed_positions(self, h: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        """cos and sin [B, S, head_dim], or nothing where layers take no rotary embedding. h [B, S, D]"""
        decoder = self.target.decoder
        embed = getattr(decoder, "rotary_emb", None) or getattr(decoder, "pos_emb", None)  # LFM2 with experts
        return () if embed is None else embed(h, positions)

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
        states = [h]
        if not numbers:
            return states
        layer_inputs = LayerInputs(
            self.target, tuple(rotary), positions, cache, self.target.layer_masks(mask, positions, cache)
        )
        functions = self._find_functions(h, numbers, layer_inputs)
        for number in numbers:
            outputs = functions[number](states[-1], *layer_inputs.list_tensors(number, _list_states(cache, number)))
            if isinstance(outputs, Tensor):
                states.append(outputs)
                continue
            states.append(outputs[0])
            args, kwargs = self.target.mixer_calls[self.groups[number]].fill(outputs[1:], cache)
            cast(LayerStates, cache.states).note_call(cache, number, self.target.mixers[number], args, kwargs)
        return states

    def _find_functions(self, h: Tensor, numbers: Sequence[int], layer_inputs: "LayerInputs") -> dict[int, Callable]:
        """For each layer, its function of h [B, S, D] and of the layer's inputs. Arguments as of `run_layers`

        For a new shape every layer is tried once, each on the K and V of the layer that runs next. Layers that keep a
        state get a copy of that, and begin it without being compiled.
        """
        cache, functions = layer_inputs.cache, dict[int, Callable]()
        for group in {self.groups[number]: None for number in numbers}:
            members = [number for number, name in enumerate(self.groups) if name == group]
            first = next(number for number in numbers if self.groups[number] == group)
            copied_states = [state.clone() for state in _list_states(cache, first)]
            runner = Runner() if first in self.target.mixers and not copied_states else self.runner
            name, inputs = f"the target's layer of {group}", layer_inputs.list_tensors(first, copied_states)
            run_layer = functools.partial(self._run_layer, cache, first, len(layer_inputs.rotary))
            modules = [self.target.layers[number] for number in members]
            functions |= dict(zip(members, runner.compile_layers(name, run_layer, modules, h, *inputs)))
        return functions

    def _run_layer(self, cache: RowCache, number: int, num_rotary: int, module: nn.Module, h: Tensor, *tensors: Tensor):
        """A layer's output; behind it the tensors among its mixer's arguments if it keeps a state.

        number: number of a layer of its group
        tensors: rotary embeddings, positions, slots, K and V, the layer's states, and its mask with entries
        """
        rotary, (positions, slots, keys, values, *rest) = tensors[:num_rotary], tensors[num_rotary:]
        num_states = len(_list_states(cache, number))
        kept_states, cached_parts = rest[:num_states], rest[num_states:]
        seen = cached_parts[0] if cached_parts else None
        view = cache.with_tensors([keys, values], cache.lengths, slots=slots)
        view = view.with_states(number, kept_states) if kept_states else view
        options = {"cached": {cached_parts[0].shape[1]: CachedKeys(*cached_parts)}} if cached_parts[1:] else {}
        call = functools.partial(
            module,
            h,
            attention_mask=seen,
            **options,
            position_ids=positions,
            position_embeddings=rotary or None,
            use_cache=True,
            **{self.target.cache_argument: view},
        )
        if number not in self.target.mixers:
            return call()
        (mixer,) = set(module.modules()) & set(self.target.mixers.values())
        with record_call(mixer) as calls:
            output = call()
        self.target.mixer_calls[self.groups[number]], mixer_inputs = calls[0]
        return output, *mixer_inputs

    def read(
        self,
        tokens: Tensor,
        hidden_states: tuple[int, ...],
        *,
        positions: Tensor,
        mask: Tensor | tuple[CachedKeys, ...],
        cache: RowCache,
    ) -> TargetOutput:
        """As `Target.read`, but by `run_layers`.

        Raises ValueError if the model does more than run its layers, or if compiled layers compute something else: the
        first pass of every shape is compared. Without a request for compiling, compiling then ends instead.
        """
        target, run = self.target, self.runner
        if not run.compile:
            return target.read(tokens, hidden_states, positions=positions, mask=mask, cache=cache)
        seconds = run.seconds
        cache_before = self._keep_states(tokens, cache)
        h, *rotary = run("the target's embedding", self.embed_tokens, tokens, positions)
        numbers = range(target.num_layers)
        states = self.run_layers(h, numbers, rotary=rotary, positions=positions, mask=mask, cache=cache)
        final = run("the target's last norm", target.norm, states[-1])
        ends = [*states[:-1], final]
        features = [ends[k] for k in hidden_states]
        output = TargetOutput(torch.cat(features, dim=-1) if features else h[..., :0], final)
        if run.seconds > seconds and cache_before is not None:
            start = time.perf_counter()
            try:
                arguments = {"rotary": rotary, "positions": positions, "mask": mask, "cache": cache_before}
                self._check_pass(numbers, states, tokens, **arguments)
            except ValueError as error:
                run.stop_compiling(error)
            if not run.compile:
                cache.restore_states(cache_before)
                output = target.read(tokens, hidden_states, positions=positions, mask=mask, cache=cache)
            run.seconds += time.perf_counter() - start
        return output

    def _keep_states(self, tokens: Tensor, cache: RowCache) -> RowCache | None:
        """The cache with copies of its states, with which the first pass of a shape is compared; None: an old shape"""
        if cache.states is None:
            return cache
        shape = tokens.shape, cache.visible
        is_new = shape not in self.checked_shapes
        self.checked_shapes.add(shape)
        return cache.copy_states() if is_new else None

    def _check_pass(
        self, numbers: Sequence[int], states: Sequence[Tensor], tokens: Tensor, *, positions, cache, **arguments
    ) -> None:
        """Compares each compiled layer with the layer itself on the same input, and all layers with `Target.read`.

        Roundings grow from layer to layer: 36 random layers differ by 2 to 6 % in bfloat16, one by less than 1 %.
        numbers, states: arguments and result of `run_layers`; arguments: its other arguments. Raises ValueError
        """
        target, plain, advice = self.target, CompiledTarget(self.target, Runner()), "set compile=false."

        def run(h: Tensor, layer_numbers: Sequence[int]) -> Tensor:
            return plain.run_layers(h, layer_numbers, positions=positions, cache=cache.copy_states(), **arguments)[-1]

        for number, layer_input, layer_output in zip(numbers, states, states[1:]):
            _check_same(
                target.norm(layer_output),
                target.norm(run(layer_input, [number])),
                f"{target.name} gives other values compiled: {advice}",
            )
        final = target.norm(run(plain.embed_tokens(tokens, positions)[0], range(target.num_layers)))
        reference = target.read(
            tokens, (), positions=positions, mask=arguments["mask"], cache=cache.copy_states()
        ).final
        _check_same(final, reference, _MORE_THAN_LAYERS.format(target.name, advice))


@dataclass(frozen=True)
class LayerInputs:
    """What the layers of a pass read besides h. rotary, positions and cache: arguments of `run_layers`

    masks: result of `Target.layer_masks`
    """

    target: Target
    rotary: tuple[Tensor, ...]
    positions: Tensor
    cache: RowCache
    masks: dict

    def list_tensors(self, number: int, kept_states: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The tensors of a layer with these states: arguments of `CompiledTarget._run_layer`"""
        entries = _list_entries(self.cache, number)
        seen = self._list_seen(self.target.layer_types[number])
        return *self.rotary, self.positions, self.cache.slots, *entries, *kept_states, *seen

    def _list_seen(self, kind: str) -> Sequence[Tensor]:
        """The mask of a kind of layer with the entries that it reads to their length; nothing without a mask"""
        masks = self.masks["attention_mask"]
        mask = masks[kind] if isinstance(masks, dict) and kind not in STATE_KINDS else masks
        if not isinstance(mask, Tensor):
            return ()
        return self.masks["cached"][mask.shape[1]] if "cached" in self.masks else (mask,)


_MORE_THAN_LAYERS = "{} does more than its layers one after the other: {}"


def _group_layers(target: Target) -> list[str]:
    """The group of each layer: layers of one kind, with tensors of the same names and shapes."""
    keys = []
    for kind, layer in zip(target.layer_types, target.layers):
        keys.append((kind, tuple((name, value.shape) for name, value in layer.named_parameters())))
    groups = {key: f"{key[0]} {number}" for number, key in enumerate(dict.fromkeys(keys), 1)}
    return [groups[key] for key in keys]


def _list_states(cache: RowCache, number: int) -> list[Tensor]:
    """The states of a layer, as far as it has begun them."""
    return list_state_tensors(cache.layers[number]) if cache.states else []


def _list_entries(cache: RowCache, number: int) -> list[Tensor]:
    """K and V of a layer, empty for a layer without them."""
    entries = cache.keys_and_values[2 * number : 2 * number + 2]
    return entries + [torch.empty(0, device=cache.lengths.device)] * (2 - len(entries))


@torch.no_grad()
def check_layers(target: Target, advice: str) -> None:
    """Raises ValueError with `advice` if the model does more than run its layers one after the other."""
    tokens, cache = torch.ones(1, 2, dtype=torch.long, device=target.device), target.cache(1)
    mask = torch.ones(1, 1, 2, cache.visible, dtype=torch.bool, device=target.device).tril()
    cache.reserve(1, [1])
    target.read(tokens[:, :1], (), positions=cache.slots, mask=mask[:, :, :1], cache=cache)
    cache.commit(torch.ones_like(cache.lengths), [1])
    cache.reserve(1, [1])
    layered = CompiledTarget(target, Runner())
    numbers = range(target.num_layers)
    try:
        h, *rotary = layered.embed_tokens(tokens[:, 1:], cache.slots)
        *_, h = layered.run_layers(h, numbers, rotary=rotary, positions=cache.slots, mask=mask[:, :, 1:], cache=cache)
    except (RuntimeError, TypeError, AttributeError, ValueError, KeyError, IndexError) as error:
        raise ValueError(
            f"{target.name}'s layers take more than a state, one rotary embedding for all layers, a mask and K and V "
            f"({name_cause(error)}): {advice}"
        ) from error
    reference = target.read(tokens, ()).final[:, 1:]
    _check_same(target.norm(h), reference, _MORE_THAN_LAYERS.format(target.name, advice))


def _check_same(states: Tensor, reference: Tensor, message: str) -> None:
    if not (reference - states).float().norm() <= 0.05 * reference.float().norm():
        raise ValueError(message)
