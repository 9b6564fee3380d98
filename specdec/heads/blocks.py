"""Common parts of trained heads: a Llama layer whose attention takes its keys from the cache, and ridge regression."""

from collections.abc import Callable, Iterable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, PreTrainedConfig
from transformers.modeling_rope_utils import dynamic_rope_update
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from specdec.core import cached_keys, fast
from specdec.core.cache import RowCache
from specdec.core.compile import training_block
from specdec.core.devices import exact_products
from specdec.core.span_attention import Seen
from specdec.target.model import Target
from specdec.target.structure import find_experts

RMSNorm = LlamaRMSNorm
RIDGE_SCALE = 0.01  # strength of the regularisation, relative to the mean of the Gram matrix's diagonal


@exact_products()
def solve_ridge(pairs: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
    """The matrix A [D, E], in float32 or wider, for which A x is nearest to y (docs/methods.md, section 5).

    pairs: chunks of inputs x [M, E] and outputs y [M, D]
    """
    gram = cross = torch.zeros(())
    for x, y in pairs:
        x, y = (values.to(torch.promote_types(values.dtype, torch.float32)) for values in (x, y))
        gram = gram.to(x) + x.T @ x
        cross = cross.to(x) + x.T @ y.to(x)
    gram.diagonal().add_(RIDGE_SCALE * gram.diagonal().mean())
    return torch.linalg.solve(gram, cross).T


def measure_scale(values: Iterable[Tensor]) -> Tensor:
    """The root mean square of all entries of some tensors [M, D], as a scalar."""
    return torch.cat(list(values)).float().pow(2).mean().sqrt()


def make_row_cache(config: LlamaConfig, weight: Tensor, *, layers: int, batch: int, masked: bool = False) -> RowCache:
    """An empty cache for attention of these shapes, in the dtype and on the device of `weight`.

    masked: whether attention needs a mask over all entries, as for blocks and for modules of other depths
    """
    width = cast(int, config.head_dim)
    reads_length = (
        not masked and cached_keys.fits_kernel(width, width) and fast.allows("cache", weight.device, weight.dtype)
    )
    return RowCache.uniform(
        query_heads=config.num_attention_heads if reads_length else None,
        num_layers=layers,
        batch=batch,
        num_heads=cast(int, config.num_key_value_heads),
        head_dim=width,
        dtype=weight.dtype,
        device=weight.device,
    )


PUBLISHED_FIELDS = (  # fields of a block in which published heads differ from their target
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "rms_norm_eps",
    "rope_parameters",
    "hidden_act",
    "hidden_size",
    "qk_norm",
)


def make_block_config(target: Target, *, intermediate_size: int | None, block: dict | None = None) -> LlamaConfig:
    """The configuration of a head's block: that of `make_llama_config`, with the fields of `block`.

    block: PUBLISHED_FIELDS of a published head; qk_norm: norms of queries and keys, as in Qwen3
    Raises ValueError for other fields, and for a target whose embeddings have another width than its states.
    """
    if not set(block or ()) <= set(PUBLISHED_FIELDS):
        raise ValueError(f"block={block} may hold {', '.join(PUBLISHED_FIELDS)} and nothing else.")
    check_one_width(target)
    config = make_llama_config(target, intermediate_size=intermediate_size)
    if block:
        config = LlamaConfig(**{**config.to_dict(), **block})
    return config


def make_llama_config(target: Target, *, intermediate_size: int | None) -> LlamaConfig:
    """The configuration of a Llama of the target's width, with its heads and rotary embedding if a Llama can have
    them.
    """
    fields = list_fields(target.config)
    queries, keys, head_dim = find_attention_heads(fields, target.width)
    return LlamaConfig(
        hidden_size=target.width,
        intermediate_size=intermediate_size or find_mlp_width(fields, target.width),
        num_attention_heads=queries,
        num_key_value_heads=keys,
        head_dim=head_dim,
        rms_norm_eps=find_norm_epsilon(fields),
        rope_parameters=make_rotary_parameters(fields, head_dim),
        max_position_embeddings=target.max_positions or DEFAULT_POSITIONS,
        hidden_act="silu",
    )


class Rotary(LlamaRotaryEmbedding):
    """The rotary embedding: cos, sin [B, S, head_dim] of positions [B, S], in the dtype of x. It has no parameters.

    transformers computes them like this since 5.18. Its matrix product of earlier versions is rounded on some GPUs.
    """

    @torch.no_grad()
    @dynamic_rope_update
    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq.to(device=x.device, dtype=torch.float32)
        angles = torch.cat([angles, angles], dim=-1)
        return tuple((values * self.attention_scaling).to(x.dtype) for values in (angles.cos(), angles.sin()))


class Attention(nn.Module):
    """Grouped-query attention over the keys that the cache returns. width: width E of the input"""

    def __init__(self, config: LlamaConfig, *, width: int, layer: int):
        super().__init__()
        self.layer = layer
        self.head_dim = cast(int, config.head_dim)
        queries = config.num_attention_heads * self.head_dim
        keys = cast(int, config.num_key_value_heads) * self.head_dim
        self.q_proj = nn.Linear(width, queries, bias=config.attention_bias)
        self.k_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.v_proj = nn.Linear(width, keys, bias=config.attention_bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        self.q_norm = self.k_norm = None
        if getattr(config, "qk_norm", False):
            self.q_norm, self.k_norm = (RMSNorm(self.head_dim, eps=config.rms_norm_eps) for _ in range(2))

    def attend_cache(self, projected: tuple[Tensor, Tensor, Tensor], mask: Seen, cache) -> Tensor:
        """Output [B, S, heads * head_dim] before the last product. projected: result of `project`

        mask: visible keys, [B, 1, S, keys] bool or spans
        """
        out = cache.attend(self.layer, *projected, mask)  # [B, heads, S, head_dim]
        return out.transpose(1, 2).flatten(2)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [B, heads, S, head_dim]. x [B, S, E]; cos, sin [B, S, head_dim]"""
        shape = (*x.shape[:2], -1, self.head_dim)
        query, key, value = (
            projection(x).view(shape).transpose(1, 2) for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        return query.to(value.dtype), key.to(value.dtype), value

    run_project = training_block(project)

    def attend_self(self, x: Tensor) -> Tensor:
        """Output [M, D] of attention in which every position sees only itself. x [M, E]"""
        value = self.v_proj(x).unflatten(-1, (-1, self.head_dim))  # [M, groups, head_dim]
        heads = self.o_proj.in_features // self.head_dim
        return self.o_proj(value.repeat_interleave(heads // value.shape[-2], dim=-2).flatten(-2))


class Block(nn.Module):
    """Attention and MLP, each with a residual. The head itself applies the norm before attention."""

    def __init__(self, config: LlamaConfig, *, width: int, layer: int):
        super().__init__()
        self.self_attn = Attention(config, width=width, layer=layer)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.mlp = LlamaMLP(config)

    def forward(self, x: Tensor, residual: Tensor, rotary: tuple[Tensor, Tensor], mask: Seen, cache) -> Tensor:
        """Output [B, S, D]. x [B, S, E]: input of attention; residual [B, S, D]; rotary: cos, sin [B, S, head_dim]"""
        return self.attend_projected(self.self_attn.run_project(x, *rotary), residual, mask, cache)

    def attend_projected(self, projected: tuple[Tensor, Tensor, Tensor], residual: Tensor, mask: Seen, cache) -> Tensor:
        """The part of `forward` behind the first products. projected: result of `Attention.project`"""
        return self.finish_layer(self.self_attn.attend_cache(projected, mask, cache), residual)

    @training_block
    def finish_layer(self, attended: Tensor, residual: Tensor) -> Tensor:
        """The part of `forward` behind attention, [B, S, D]. attended [B, S, heads * head_dim]; residual [B, S, D]"""
        h = residual + self.self_attn.o_proj(attended)
        return h + self.mlp(self.post_attention_layernorm(h))

    def run_without_attention(self, h: Tensor) -> Tensor:
        """`forward` without attention, [M, D]. h [M, D]"""
        return h + self.mlp(self.post_attention_layernorm(h))

    @torch.no_grad()
    def start_as_identity(self) -> None:
        """Sets weights so that forward(x, residual) = residual."""
        self.self_attn.o_proj.weight.zero_()
        self.mlp.down_proj.weight.zero_()

    @torch.no_grad()
    def solve_mlp(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Sets the MLP's last matrix by ridge regression on its hidden units, which stay random.

        pairs: chunks of h [M, D] before the MLP, and goals [M, D] of h plus the MLP's output
        """
        self.mlp.down_proj.weight.copy_(solve_ridge((self._hidden_units(h), goal - h) for h, goal in pairs))

    def _hidden_units(self, h: Tensor) -> Tensor:
        """The MLP's hidden units [M, E] of h [M, D]."""
        x = self.post_attention_layernorm(h)
        return self.mlp.act_fn(self.mlp.gate_proj(x)) * self.mlp.up_proj(x)


class DecoderLayer(Block):
    """A whole layer of a Llama, with the norm before its attention."""

    def __init__(self, config: LlamaConfig, *, layer: int):
        super().__init__(config, width=config.hidden_size, layer=layer)
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, h: Tensor, rotary: tuple[Tensor, Tensor], mask: Seen, cache) -> Tensor:  # type: ignore[override]
        """Output [B, S, D] of the layer. h [B, S, D]"""
        return super().forward(self.input_layernorm(h), h, rotary, mask, cache)


# The sizes of a head's Llama block for a target of any family, from the fields of the target's configuration.

LATENT_FIELDS = ("kv_lora_rank", "q_lora_rank")  # fields of attention that makes keys or queries from a narrower vector
ROTARY_TYPES = (
    "default",
    "linear",
    "dynamic",
    "yarn",
    "llama3",
    "longrope",
)  # types that Llama's layer and engines have
DEFAULT_THETA = 10_000.0  # base of rotary angles of targets without a rotary embedding, as in Llama
DEFAULT_POSITIONS = 32_768  # positions of a head whose target has no limit
WIDTH_MULTIPLE = 64  # computed widths of an MLP are rounded up to a multiple of it


def list_fields(config: PreTrainedConfig) -> dict:
    """All fields of a configuration, under the names of the family and under the common names."""
    fields = config.to_dict()
    return fields | {alias: fields[name] for alias, name in config.attribute_map.items() if name in fields}


def find_field(fields: dict, *names: str):
    """The value of the first of these fields that is set, or None."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def find_attention_heads(fields: dict, width: int) -> tuple[int, int, int]:
    """Number of query heads, number of key heads and width of a head: those of the target if a Llama layer can have
    them.

    It cannot have those of latent attention, recurrent targets and layers that differ, and none that do not divide the
    width (LlamaConfig refuses them). Then the width of a head is the greatest power of two, at most 128, that divides
    `width` into four or more heads. Four query heads share a key head.
    """
    queries = fields.get("num_attention_heads")
    if isinstance(queries, int) and find_field(fields, *LATENT_FIELDS) is None:
        keys, size = _key_heads(fields, queries), fields.get("head_dim") or width // queries
        are_numbers = isinstance(keys, int) and isinstance(size, int)
        if are_numbers and not any((width % queries, queries % keys, size % 2)):
            return queries, keys, size
    size = next((size for size in (128, 64, 32, 16, 8, 4) if width % size == 0 and width // size >= 4), 2)
    queries = width // size
    return queries, queries // 4 if queries % 4 == 0 else queries, size


def _key_heads(fields: dict, queries: int) -> int:
    """Number of key heads of a target with `queries` query heads."""
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):  # Falcon, GPT-BigCode
        return 1
    return find_field(fields, "num_key_value_heads", "num_kv_heads") or queries


def find_mlp_width(fields: dict, width: int) -> int:
    """The width of the target's dense MLP: the widest if layers differ, 4 x width if the configuration names none.

    For a mixture without a dense MLP it is the width of one expert. If that is below 2 x width, it is the width of all
    experts of a token, because the head's MLP stands for all of them.
    """
    dense = find_field(fields, "intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
    if isinstance(dense, list | tuple):
        dense = max(dense)
    experts = find_experts(fields)
    expert_width = find_field(fields, "moe_intermediate_size", "expert_ffn_hidden_size")
    # A configuration with one size only means an expert, under either name
    if (
        experts is None
        or "intermediate_size_mlp" in fields
        or (expert_width is not None and dense not in (None, expert_width))
    ):
        return dense or 4 * width
    expert = expert_width or dense or 4 * width
    if expert >= 2 * width:
        return expert
    shared = find_field(
        fields, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"
    )
    if shared is None:
        shared = expert * (find_field(fields, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0)
    return -(-(expert * experts.per_token + shared) // WIDTH_MULTIPLE) * WIDTH_MULTIPLE


def make_rotary_parameters(fields: dict, head_dim: int) -> dict:
    """The target's rotary embedding as `rope_parameters` of a layer that turns whole heads of width head_dim.

    If layers of a target differ, it is that of full attention. It is the plain one for a target without one, for a type
    that Llama's layer lacks, and for LongRoPE's factors of another number of frequencies.
    """
    rope = fields.get("rope_parameters") or {}
    by_type = [value for value in rope.values() if isinstance(value, dict)]
    if by_type:
        rope = rope.get("full_attention") or by_type[0]
    rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    rope.setdefault("rope_theta", DEFAULT_THETA)
    rope.setdefault("rope_type", "default")
    num_factors = {len(rope[name]) for name in ("short_factor", "long_factor") if name in rope}
    if rope["rope_type"] not in ROTARY_TYPES or not num_factors <= {head_dim // 2}:
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return rope


def find_norm_epsilon(fields: dict) -> float:
    """The epsilon of the target's norms; 1e-6 if the configuration names none."""
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon", "norm_eps")
    epsilon = find_field(fields, *names)
    return 1e-6 if epsilon is None else epsilon


# Embeddings and the gain of the last norm of a target, for norms of all kinds.


@torch.no_grad()
def measure_norm_gain(target: Target) -> Tensor:
    """The gain [D] of the target's last norm, by which it multiplies a normalised state.

    This is the weight of an RMSNorm of Llama's kind. Other norms have no weight, add 1 to it, or subtract the mean. So
    the gain is measured with a vector of +1 and -1, which is normalised already.
    """
    ones = torch.ones(target.width, dtype=target.dtype, device=target.device)
    ones[1::2] = -1
    up, down = (target.norm(sign * ones[None, None])[0, 0] for sign in (1, -1))
    gain = (up - down) / 2 * ones  # without the bias that some norms add
    weight = dict(target.norm.named_parameters()).get("weight")
    return weight if weight is not None and torch.allclose(weight, gain, rtol=0.02, atol=0.01) else gain


@torch.no_grad()
def measure_embedding_scale(target: Target) -> float:
    """The factor by which the target's embedding module multiplies its rows: 1 for most families."""
    token = target.embed.weight[:16].float().norm(dim=1).argmax()  # the row of a padding token is zero
    row, out = target.embed.weight[token].float(), target.embed(token).float()
    return 1.0 if torch.equal(out, row) else float(out.norm() / row.norm())


@torch.no_grad()
def read_embedding_rows(target: Target) -> Tensor:
    """The embeddings [V, D] that the target's embedding module returns for all tokens."""
    return torch.cat(
        [target.embed(tokens) for tokens in torch.arange(target.vocab_size, device=target.device).split(4096)]
    )


def check_one_width(target: Target) -> None:
    """Raises ValueError for a target whose embeddings are narrower than its hidden states."""
    width = target.embed.weight.shape[1]
    if width != target.width:
        raise ValueError(
            f"{target.name} has embeddings of {width} and hidden states of {target.width}, and this head joins the "
            "two: train a draft model (head=draft)."
        )


# Defaults of the hidden states that a head reads.

MIN_PUBLISHED_LAYERS = 7  # lower bound of L for which (2, L // 2, L - 3) increases


def choose_three_layers(target: Target) -> tuple[int, ...]:
    """The hidden states of EAGLE-3: (2, L // 2, L - 3), as engines and published heads have them.

    For shallow targets they are the middle and its neighbours; for three layers 0, 1, 2, where 0 is the embedding.
    """
    num = _require_num_layers(target)
    middle = num // 2
    return (middle - 1, middle, middle + 1) if num < MIN_PUBLISHED_LAYERS else (2, middle, num - 3)


def choose_five_layers(target: Target) -> tuple[int, ...]:
    """The hidden states of DFlash: five, evenly from 2 to L - 2 (outputs of layers 1 to L - 3); fewer in shallow
    targets.
    """
    last = _require_num_layers(target) - 2
    return tuple(sorted({2 + round(number * (last - 2) / 4) for number in range(5)}))


def choose_fused_layers(
    target: Target, target_layers: Sequence[int] | None, choose_default: Callable[[Target], tuple[int, ...]]
) -> tuple[int, ...]:
    """The hidden states that a head fuses. target_layers None: the default. Raises ValueError for an empty list."""
    if target_layers is None:
        return target.layer_ids(choose_default(target))
    if not target_layers:
        raise ValueError("target_layers=[] is empty: name the hidden states to read, or give null for the usual ones.")
    return target.layer_ids(list(target_layers))


def _require_num_layers(target: Target) -> int:
    """The target's number of layers. Raises ValueError if it is below three."""
    if target.num_layers < 3:
        raise ValueError(
            f"{target.name} has {target.num_layers} layers, and the default of target_layers needs three: name the "
            f"hidden states to read (0..{target.num_layers}), or train a head that reads the last one only, such as "
            "eagle or mtp."
        )
    return target.num_layers
