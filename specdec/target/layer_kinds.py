"""Which entries each kind of layer sees: all of them, a window of positions, a chunk of positions, or a state instead.

Nothing is evicted from the cache: a window is a mask over positions, so that refused drafts can be dropped, and branches
of a tree, which share positions, see the right entries.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer
from transformers.cache_utils import LinearAttentionCacheLayerMixin as StateLayer
from transformers.masking_utils import create_masks_for_generate

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
STATES = ("linear_attention", "conv", "mamba", "moe", "mlp")  # layers that take no mask over entries

LayerMasks = Tensor | dict[str, Tensor | None] | None  # what a decoder of transformers takes as attention_mask


@dataclass(frozen=True)
class LayerKinds:
    """How a model wants its masks.

    names: the kinds of layers that its decoder takes a mask for each, in a dict; None: one mask for all layers, of `one`
    window, chunk: numbers of positions that sliding and chunked layers see; None where there are none
    """

    names: tuple[str, ...] | None
    one: str
    window: int | None
    chunk: int | None

    @property
    def windowed(self) -> bool:
        """Whether some layer sees a window or a chunk only."""
        return self.window is not None or self.chunk is not None

    @property
    def reach(self) -> int | None:
        """The number of positions that the layer with the shortest view sees; None: all layers see everything."""
        return min((size for size in (self.window, self.chunk) if size is not None), default=None)

    def masks(self, mask: Tensor, queries: Tensor | None = None, keys: Tensor | None = None) -> LayerMasks:
        """The mask of each kind of layer; None if no layer takes one.

        mask [B, 1, S, C] bool: what a layer with full attention sees
        queries [B, S], keys [B, C]: their positions, needed if some layers are windowed
        """
        if set(self.names or [FULL]) <= set(STATES):
            return None
        if self.names is None:
            return self._mask(self.one, mask, queries, keys)
        return {name: self._mask(name, mask, queries, keys) for name in self.names}

    def _mask(self, name: str, mask: Tensor, queries: Tensor | None, keys: Tensor | None) -> Tensor | None:
        if name not in (SLIDING, CHUNKED):
            return None if name in STATES else mask
        assert queries is not None and keys is not None
        query, key = queries[:, None, :, None], keys[:, None, None]
        if name == SLIDING:
            return mask & (key > query - cast(int, self.window))
        chunk = cast(int, self.chunk)
        return mask & (key // chunk == query // chunk)


def find(model: PreTrainedModel, config: PreTrainedConfig, name: str) -> LayerKinds:
    """How this model wants its masks, from the function that transformers' own `generate` prepares them with.

    config: of the text part. Raises ValueError for kinds of layers that are not known here.
    """
    device = cast(nn.Embedding, model.get_input_embeddings()).weight.device
    embeddings = torch.zeros(1, 2, 1, device=device)
    tokens = torch.ones(1, 2, dtype=torch.long, device=device)
    own = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    try:
        wanted = own(
            config=config,
            inputs_embeds=embeddings,
            attention_mask=tokens,
            past_key_values=None,
            position_ids=tokens.cumsum(-1) - 1,
        )
    except TypeError:  # transformers 5.19 passes an argument that its masks of chunks do not take
        wanted = dict.fromkeys(config.layer_types)
    names = tuple(wanted) if isinstance(wanted, dict) else None
    unknown = set(names or ()) - {FULL, SLIDING, CHUNKED, *STATES}
    if unknown:
        raise ValueError(f"{name}: {_refusal(', '.join(sorted(unknown)))}")
    layers = DynamicCache(config=config).layers
    sliding = getattr(config, "sliding_window", None)
    one = FULL
    if names is None and any(isinstance(layer, DynamicSlidingWindowLayer) for layer in layers):
        one = SLIDING if sliding is not None else CHUNKED
    used = {one, *(names or ())}
    chunk = getattr(config, "attention_chunk_size", None)
    return LayerKinds(names, one, sliding if SLIDING in used else None, chunk if CHUNKED in used else None)


def check_supported(config: PreTrainedConfig, name: str) -> None:
    """Raises ValueError unless every layer keeps entries for each token, or a state that can be computed again.

    config: of the text part
    """
    try:
        unknown = {
            type(layer).__name__
            for layer in DynamicCache(config=config).layers
            if not isinstance(layer, StateLayer) and type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer)
        }
    except KeyError as error:  # a kind that transformers' cache does not know before the model's own code is imported
        unknown = {str(error.args[0])}
    if unknown:
        raise ValueError(f"{name}: {_refusal(', '.join(sorted(unknown)))}")


def state_layers(config: PreTrainedConfig) -> list[StateLayer | CacheLayerMixin]:
    """Empty places for the states of recurrent and convolution layers, as transformers keeps them; one for each layer."""
    return DynamicCache(config=config).layers


def _refusal(kinds: str) -> str:
    return (
        f"some layers are of a kind that is not known here ({kinds}), so their part of a refused draft cannot be dropped. "
        "Choose a target whose layers use full, sliding or chunked attention, or are recurrent or convolutional "
        "(docs/targets.md has the list)."
    )
