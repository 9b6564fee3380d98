"""Attention modules of transformers in passes over drafts: products, one kernel up to the cache, attention, a product.

Modules are recognised by their layers and by the names in their code. Each is compared with its own forward before it
is replaced.
"""

import inspect
import itertools
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing
from torch.nn import functional as F

from specdec.core import fast
from specdec.core.cache import RowCache
from specdec.core.compile import is_joined, join_weights
from specdec.core.write_keys import write_keys
from specdec.target.attention import compute_attention

PROJECTIONS, NORMS = ("q_proj", "k_proj", "v_proj"), ("q_norm", "k_norm")
# All attributes and functions that the forward of Llama, Mistral, Qwen and gpt-oss uses. One that scales queries by
# their position, or has layers without positions, uses others.
KNOWN_NAMES = frozenset(
    "q_proj k_proj v_proj o_proj q_norm k_norm sinks head_dim layer_idx scaling sliding_window training config "
    "attention_dropout _attn_implementation ALL_ATTENTION_FUNCTIONS eager_attention_forward get_interface "
    "apply_rotary_pos_emb update view transpose reshape contiguous shape getattr".split()
)


def is_fusible(module: nn.Module) -> bool:
    """Whether a module looks like attention that this file computes: Llama's, perhaps with norms of heads, or sinks"""
    layers = [getattr(module, name, None) for name in (*PROJECTIONS, "o_proj")]
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    if not all(isinstance(layer, nn.Module) for layer in layers) or code is None or "forward" in vars(module):
        return False
    return set(code.co_names) <= KNOWN_NAMES and _has_known_norms(module)


def _has_known_norms(module: nn.Module) -> bool:
    """Whether it has no norms of heads, or RMS norms over the head width."""
    norms = [getattr(module, name, None) for name in NORMS]
    if norms == [None, None]:
        return True
    shapes = {getattr(getattr(norm, "weight", None), "shape", None) for norm in norms}
    epsilons = {getattr(norm, "variance_epsilon", None) for norm in norms}
    return shapes == {(getattr(module, "head_dim", None),)} and len(epsilons) == 1 and None not in epsilons


def forward_fused(module: Any, hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, None]:
    """The forward of an attention module, with one kernel in passes that read a cache to its length.

    All modules have this one function, so torch compiles them as one.
    """
    if args or kwargs.get("cached") is None:
        return type(module).forward(module, hidden_states, *args, **kwargs)
    return _read_drafts(module, hidden_states, **kwargs | {"cache": _find_cache(kwargs)}), None


def _find_cache(kwargs: dict) -> RowCache:
    """The cache among the arguments of an attention module, under its name since transformers 5.24 or before it"""
    return kwargs["cache"] if "cache" in kwargs else kwargs["past_key_values"]


def _read_drafts(
    module: Any,
    x: Tensor,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    cache: RowCache,
    attention_mask: Tensor,
    cached: dict,
    **kwargs,
) -> Tensor:
    """Output [B, S, D]. x [B, S, D]; position_embeddings: cos and sin; other arguments as of `compute_attention`"""
    products, biases = _project(module, x)
    keys, values = cache.visible_keys(module.layer_idx)
    norms = [getattr(module, name) for name in NORMS if getattr(module, name, None) is not None]
    query = write_keys(
        products,
        position_embeddings,
        keys,
        values,
        cache.slots,
        [norm.weight for norm in norms],
        biases,
        norms[0].variance_epsilon if norms else 0.0,
    )
    sinks = getattr(module, "sinks", None)
    out, _ = compute_attention(
        module, query, keys, values, attention_mask, scaling=module.scaling, s_aux=sinks, cached=cached
    )
    return module.o_proj(out.flatten(2))


def _project(module: Any, x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The products of q, k and v, [B, S, .] each, or one of all, and the biases that they lack. x [B, S, D]"""
    layers = [getattr(module, name) for name in PROJECTIONS]
    biases = [layer.bias for layer in layers if getattr(layer, "bias", None) is not None]
    if any(type(layer) is not nn.Linear for layer in layers) or len(biases) not in (0, len(layers)):
        return [layer(x) for layer in layers], []
    weights = [layer.weight for layer in layers]
    if is_joined(weights):
        with disable_proxy_modes_tracing():  # a weight of the traced function, not computed in it
            weights = [join_weights(weights)]
    return [F.linear(x, weight) for weight in weights], biases


def _make_comparison(max_error: float) -> Callable:
    """A forward that computes both ways. It raises ValueError if output or entries differ by more than max_error.

    max_error: upper bound of the relative error
    """

    def forward(module: Any, hidden_states: Tensor, *args, **kwargs) -> tuple[Tensor, None]:
        if args or kwargs.get("cached") is None:
            return type(module).forward(module, hidden_states, *args, **kwargs)
        cache = _find_cache(kwargs)
        entries = cache.visible_keys(module.layer_idx)
        copies = [tensor.clone() for tensor in entries]
        reference, _ = type(module).forward(module, hidden_states, **kwargs)
        cos, width = kwargs["position_embeddings"][0], entries[0].shape[-1]
        if cos.shape[-1] not in (width, width // 2):
            raise ValueError(f"its rotary embedding turns {cos.shape[-1]} of {width} columns")
        view = cache.with_tensors(copies, cache.lengths)
        result = _read_drafts(module, hidden_states, **kwargs | {"cache": view})
        place = cache.rows, slice(None), cache.slots
        fast.compare_with_reference(
            type(module).__name__,
            [result, *(tensor[place] for tensor in copies)],
            [reference, *(tensor[place] for tensor in entries)],
            max_error,
        )
        return reference, None

    return forward


def fuse_attention(layers: Iterable[nn.Module], read_drafts: Callable[[], object], *, max_error: float) -> None:
    """Replaces the forward of attention modules, after a pass over drafts that compares both.

    max_error: upper bound of the relative error. Errors of the pass leave all modules as they were.
    """
    modules = [module for module in itertools.chain(*(layer.modules() for layer in layers)) if is_fusible(module)]
    compare = _make_comparison(max_error)
    for module in modules:
        module.forward = types.MethodType(compare, module)
    try:
        with torch.no_grad():
            read_drafts()
    except BaseException:
        for module in modules:
            del module.forward
        raise
    for module in modules:
        module.forward = types.MethodType(forward_fused, module)
