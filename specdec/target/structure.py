"""The parts of a transformers model, found by a pass over a few tokens, not by the names of its modules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicSlidingWindowLayer
from transformers.cache_utils import LinearAttentionCacheLayerMixin as StateLayer
from transformers.masking_utils import create_masks_for_generate

from specdec.core.cache import find_cache_argument
from specdec.core.cache_memory import EntryShape
from specdec.core.cached_keys import CachedKeys
from specdec.core.devices import name_cause
from specdec.target.attention import make_segment_mask

MAX_TREE_NODES = 256  # upper bound of the nodes of a tree, for targets that count slots of the cache
NUM_TOKENS = 12  # tokens of the text with which a model is examined
FAMILY_ADVICE = "Choose a target of another family (docs/targets.md has the list)."


@dataclass(frozen=True)
class LogitShape:
    """The map from the LM head's output x to the logits: cap * tanh(scale * x / cap), without a cap scale * x."""

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.scale != 1:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    @property
    def plain(self) -> bool:
        """Whether logits are the LM head's own output."""
        return self.scale == 1 and self.cap is None

    @classmethod
    def from_config(cls, config: PreTrainedConfig) -> LogitShape:
        """The map of a configuration, by fields of transformers. `Target` compares the result with the model's
        logits.
        """
        fields = config.to_dict()
        scale = float(fields.get("logit_scale") or 1) * float(fields.get("lm_head_multiplier") or 1)
        scale /= float(fields.get("logits_scaling") or 1)
        if fields.get("dim_model_base"):  # MiniCPM
            scale *= fields["dim_model_base"] / fields["hidden_size"]
        return cls(scale, fields.get("final_logit_softcapping"))


class LayerRecorder(transformers.Cache):
    """A cache for one pass that records the entries of every layer, and the layers that keep a state."""

    def __init__(self, config: PreTrainedConfig):
        super().__init__(layers=make_state_layers(config))
        self.running: list[nn.Module] = []  # running modules inside the layers, innermost last
        self.entries: dict[int, tuple[EntryShape, EntryShape]] = {}  # shapes of K and V by layer
        self.mixers: dict[int, nn.Module] = {}  # module that keeps a state, by layer

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.entries[layer_idx] = _make_entry_shape(key_states), _make_entry_shape(value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def update_conv_state(self, conv_states, layer_idx, *args, **kwargs):
        self.mixers[layer_idx] = self.running[-1]
        return super().update_conv_state(conv_states, layer_idx, *args, **kwargs)

    def update_recurrent_state(self, recurrent_states, layer_idx, *args, **kwargs):
        self.mixers[layer_idx] = self.running[-1]
        return super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)

    def get_linear_cache(self, layer_idx: int) -> None:
        return None

    def set_linear_cache(self, layer_idx: int, linear_cache: Tensor) -> None:
        self.mixers[layer_idx] = self.running[-1]

    def shapes(self) -> list[EntryShape | None]:
        """Shapes of K and V of every layer in turn; None for a layer without entries."""
        num = 1 + max(self.entries, default=-1)
        return [shape for layer_number in range(num) for shape in self.entries.get(layer_number, (None, None))]


def _make_entry_shape(entries: Tensor) -> EntryShape:
    return EntryShape(entries.shape[1], entries.shape[-1], entries.dtype, entries.device)


def find_decoder(model: PreTrainedModel) -> nn.Module:
    """The module that turns tokens into the state that the LM head reads."""
    decoder = model.get_decoder()
    return decoder.model if decoder is model else decoder  # Llama 4's text model returns itself


def find_max_positions(config: PreTrainedConfig) -> int | None:
    """Upper bound of the positions of a text; None: no bound.

    Llama 4 sharpens attention in some layers by the number of the cache's slot, from `floor_scale` on. There a slot is
    no position in a tree or in a batch. Each node of a tree takes a slot.
    """
    limit = getattr(config, "max_position_embeddings", None)
    if getattr(config, "attn_temperature_tuning", False) and getattr(config, "floor_scale", None):
        first = config.floor_scale - MAX_TREE_NODES
        limit = min(limit or first, first)
    return limit


def find_rotary_boundary(config: PreTrainedConfig) -> int | None:
    """Number of positions beyond which LongRoPE turns all keys, also in the cache, by other angles; None: no bound."""
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    return rope.get("original_max_position_embeddings") or getattr(config, "original_max_position_embeddings", None)


def find_layers(decoder: nn.Module, num_layers: int, name: str) -> list[nn.Module]:
    """The decoder's layers, first to last: the first list of num_layers modules, or of half as many (LongCat-Flash).

    A module of LongCat-Flash has two attentions. Raises ValueError if there is no such list.
    """
    lists = [module for module in decoder.modules() if isinstance(module, nn.ModuleList)]
    for num in (num_layers, num_layers // 2):
        for modules in lists:
            if len(modules) == num:
                return list(modules)
    raise ValueError(
        f"{name}: {type(decoder).__name__} has no list of {num_layers} blocks, one for each layer of its "
        "configuration. Choose a target whose blocks run one after the other."
    )


def trace_layers(
    decoder: nn.Module,
    layers: list[nn.Module],
    config: PreTrainedConfig,
    tokens: Tensor,
    positions: Tensor,
    masks: object,
) -> tuple[nn.Module, LayerRecorder]:
    """Runs the decoder over a few tokens. Returns its final norm, and a record of the entries that its layers keep.

    tokens, positions [1, T]; masks: the decoder's argument. The norm is the last module whose output is the final
    state; Identity for a decoder without one.
    """
    recorder = LayerRecorder(config)
    outputs: list[tuple[nn.Module, Tensor]] = []
    layer_modules = {module for block in layers for module in block.modules()}

    def record_output(module, args, output):
        if isinstance(output, Tensor):
            outputs.append((module, output))

    def push_module(module, args):
        recorder.running.append(module)

    def pop_module(module, args, output):
        recorder.running.pop()

    outer_modules = set(decoder.modules()) - layer_modules - {decoder}
    hooks = [module.register_forward_hook(record_output) for module in outer_modules]
    hooks += [module.register_forward_pre_hook(push_module) for module in layer_modules]
    hooks += [module.register_forward_hook(pop_module) for module in layer_modules]
    try:
        final = decoder(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=masks,
            use_cache=False,
            **{find_cache_argument(decoder.forward): recorder},
        ).last_hidden_state
    finally:
        for hook in hooks:
            hook.remove()
    return next((module for module, output in reversed(outputs) if _equal(output, final)), nn.Identity()), recorder


def _equal(output: Tensor, final: Tensor) -> bool:
    if output.is_meta:  # it has no values
        return output is final or final._base is output
    return output.numel() == final.numel() and torch.equal(output.reshape(final.shape), final)


@contextlib.contextmanager
def explain_refusals(name: str, decoder: nn.Module, *, advice: str = FAMILY_ADVICE) -> Iterator[None]:
    """A context in which errors of the decoder become a ValueError with advice.

    Raises ValueError for a decoder without a cache.
    """
    kind = type(decoder).__name__
    if not find_cache_argument(decoder.forward):
        raise ValueError(
            f"{name}: {kind} takes no cache of keys and values (past_key_values), as models without any attention do. "
            f"{advice}"
        )
    try:
        yield
    except Exception as error:  # the code of any model runs here
        raise ValueError(
            f"{name}: {kind} does not run with masks and a cache that are given to it ({type(error).__name__}: "
            f"{name_cause(error)}). {advice}"
        ) from error


@contextlib.contextmanager
def use_eager_attention(model: PreTrainedModel) -> Iterator[None]:
    """A context in which the model computes attention by its own code, if its class has some."""
    configs = {id(module.config): module.config for module in model.modules() if isinstance(module, PreTrainedModel)}
    implementations = [config._attn_implementation for config in configs.values()]
    if model._can_set_attn_implementation():
        for config in configs.values():
            config._attn_implementation = "eager"
    try:
        yield
    finally:
        for config, implementation in zip(configs.values(), implementations):
            config._attn_implementation = implementation


# Masks of each kind of layer: all entries, a window of positions, a chunk of positions, or a state.
#
# The cache evicts nothing. A window is a mask over positions, so refused drafts can be dropped, and branches of a tree,
# which share positions, see the right entries.

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
KNOWN_LAYERS = ("DynamicLayer", "DynamicSlidingWindowLayer", "DummyLayer")  # the last: without entries
STATE_KINDS = ("linear_attention", "conv", "mamba", "moe", "mlp")  # layers that take no mask over entries

LayerMasks = Tensor | dict[str, Tensor | None] | None  # attention_mask of a transformers decoder


@dataclass(frozen=True)
class LayerKinds:
    """The masks that a model takes.

    names: kinds of layers of which each takes its own mask, in a dict; None: all take the mask of `default_kind`
    window, chunk: positions that sliding and chunked layers see; None: there are no such layers
    """

    names: tuple[str, ...] | None
    default_kind: str
    window: int | None
    chunk: int | None

    @property
    def windowed(self) -> bool:
        """Whether some layers see only a window or a chunk."""
        return self.window is not None or self.chunk is not None

    @property
    def reach(self) -> int | None:
        """Smallest number of positions that a layer sees; None: all layers see all positions."""
        return min((size for size in (self.window, self.chunk) if size is not None), default=None)

    def masks(self, mask: Tensor, queries: Tensor | None = None, keys: Tensor | None = None) -> LayerMasks:
        """The mask of each kind of layer; None: no layer takes one.

        mask [B, 1, S, C] bool: mask of a layer with full attention
        queries [B, S], keys [B, C]: their positions, needed for windows and chunks
        """
        if set(self.names or [FULL]) <= set(STATE_KINDS):
            return None
        return self._map_kinds(lambda name: self._mask(name, mask, queries, keys))

    def make_segment_masks(self, device: torch.device) -> LayerMasks:
        """Stand-ins for the masks of each kind of layer in a pass over segments (target/attention.py)."""
        return self._map_kinds(
            lambda name: None if name in STATE_KINDS else make_segment_mask(self._window(name), device)
        )

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The different windows of its layers; None: a layer without a window."""
        names = self.names or (self.default_kind,)
        return tuple({self._window(name): None for name in names if name not in STATE_KINDS})

    def masks_of_cached(self, cached: Sequence[CachedKeys]) -> tuple[LayerMasks, dict[int, CachedKeys]]:
        """Masks of the kinds of layers, and the entries that attention reads, for the entries of each of `windows`."""
        seen = dict(zip(self.windows, cached, strict=True))
        masks = self._map_kinds(lambda name: seen[self._window(name)].seen)
        return masks, {keys.seen.shape[1]: keys for keys in cached}

    def _window(self, name: str) -> int | None:
        return self.window if name == SLIDING else None

    def _map_kinds(self, make: Callable[[str], Tensor | None]) -> LayerMasks:
        """Masks of all kinds of layers, as the decoder takes them. make: mask of a kind"""
        return make(self.default_kind) if self.names is None else {name: make(name) for name in self.names}

    def _mask(self, name: str, mask: Tensor, queries: Tensor | None, keys: Tensor | None) -> Tensor | None:
        if name not in (SLIDING, CHUNKED):
            return None if name in STATE_KINDS else mask
        assert queries is not None and keys is not None
        query, key = queries[:, None, :, None], keys[:, None, None]
        if name == SLIDING:
            return mask & (key > query - cast(int, self.window))
        chunk = cast(int, self.chunk)
        return mask & (key // chunk == query // chunk)


def find_layer_kinds(model: PreTrainedModel, config: PreTrainedConfig, name: str) -> LayerKinds:
    """The masks that a model takes. config: configuration of the text part

    Raises ValueError for unknown kinds of layers.
    """
    names = _name_mask_kinds(model, config)
    unknown = set(names or ()) - {FULL, SLIDING, CHUNKED, *STATE_KINDS}
    if unknown:
        raise ValueError(f"{name}: {_refusal(', '.join(sorted(unknown)))}")
    layers = DynamicCache(config=config).layers
    sliding = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    default_kind = FULL
    if names is None and any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers):
        default_kind = SLIDING if sliding is not None else CHUNKED
    used_kinds = {default_kind, *(names or ())}
    window = sliding if SLIDING in used_kinds else None
    return LayerKinds(names, default_kind, window, chunk if CHUNKED in used_kinds else None)


def _name_mask_kinds(model: PreTrainedModel, config: PreTrainedConfig) -> tuple[str, ...] | None:
    """The kinds of layers that take a mask each, by the function that `generate` of transformers prepares masks with.

    None: all layers take the same mask.
    """
    device = cast(nn.Embedding, model.get_input_embeddings()).weight.device
    device = torch.device("cpu") if device.type == "meta" else device  # that function reads its masks
    tokens = torch.ones(1, 2, dtype=torch.long, device=device)
    create_masks: Callable[..., Any] = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    try:
        masks = create_masks(
            config=config,
            inputs_embeds=torch.zeros(1, 2, 1, device=device),
            attention_mask=tokens,
            position_ids=tokens.cumsum(-1) - 1,
            **{find_cache_argument(create_masks): DynamicCache(config=config)},
        )
    except TypeError:  # transformers 5.19 passes an argument that its masks of chunks do not take
        masks = dict.fromkeys(config.layer_types)
    return tuple(masks) if isinstance(masks, dict) else None


def check_supported(config: PreTrainedConfig, name: str) -> None:
    """Raises ValueError unless every layer keeps entries for each token, or a state that can be computed again.

    config: configuration of the text part
    """
    try:
        unknown = {
            type(layer).__name__
            for layer in DynamicCache(config=config).layers
            if not isinstance(layer, StateLayer) and type(layer).__name__ not in KNOWN_LAYERS
        }
    except KeyError as error:  # a kind that transformers' cache does not know before the model's own code is imported
        unknown = {str(error.args[0])}
    if unknown:
        raise ValueError(f"{name}: {_refusal(', '.join(sorted(unknown)))}")


def make_state_layers(config: PreTrainedConfig) -> list[StateLayer | CacheLayerMixin]:
    """Empty states of recurrent and convolution layers, as transformers keeps them, one for each layer."""
    return DynamicCache(config=config).layers


def _refusal(kinds: str) -> str:
    return (
        f"some layers are of a kind that is not known here ({kinds}), so their part of a refused draft cannot be "
        "dropped. Choose a target whose layers use full, sliding or chunked attention, or are recurrent or "
        "convolutional (docs/targets.md has the list)."
    )


# Experts of a mixture that the tokens of one pass use (docs/methods.md, section 8).

NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "num_experts_per_token", "moe_top_k")


@dataclass(frozen=True)
class Experts:
    """The experts of a layer: `num`, of which each token uses `per_token`."""

    num: int
    per_token: int

    def count_used(self, num_tokens: float) -> float:
        """Expected number of different experts that num_tokens tokens use: E (1 - (1 - k/E)^N).

        Tokens choose independently and all experts alike in this formula, as in MoESD (2505.19645). Real tokens prefer
        some experts and neighbours choose alike, so it is an upper bound.
        """
        return self.num * (1 - (1 - self.per_token / self.num) ** num_tokens)


def find_experts(fields: dict) -> Experts | None:
    """The experts of a target with these fields of its text configuration; None: it is dense."""
    num = next((fields[name] for name in NUM_EXPERTS if isinstance(fields.get(name), int)), 1)
    per_token = next((fields[name] for name in EXPERTS_PER_TOKEN if isinstance(fields.get(name), int)), 0)
    # Configurations of Doge and of Nemotron-H have numbers of experts that their dense models do not use
    mixture = fields.get("is_moe", True) and "moe" in (fields.get("layers_block_type") or ["moe"])
    return Experts(num, per_token) if mixture and 0 < per_token < num else None


def count_weights(decoder: nn.Module, embedding: Tensor, experts: Experts | None) -> tuple[int, int]:
    """Number of parameters that every token reads, and number of parameters of chosen experts; without the embedding.

    The outline of a quantised target has its weights in their original size.
    """
    sizes = [0, 0]
    for name, value in decoder.named_parameters():
        if value is not embedding:
            sizes[experts is not None and ".experts." in name] += value.numel()
    return sizes[0], sizes[1]


def interpolate_cost(experts: Experts | None, low: int, num_tokens: int, high: int) -> float:
    """Relative position of a pass's cost: 0 for `low` tokens, 1 for `high` tokens, for num_tokens in between.

    The cost is linear in the number of tokens, or for a mixture in the number of experts that they use.
    """
    at_low, at_tokens, at_high = (experts.count_used(num) if experts else num for num in (low, num_tokens, high))
    return 0.0 if at_low == at_high else (at_tokens - at_low) / (at_high - at_low)
