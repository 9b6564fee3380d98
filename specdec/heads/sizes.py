"""The sizes of a head's Llama block for a target of any family, from the fields of the target's configuration."""

from transformers import PreTrainedConfig

from specdec.target.experts import experts_of

LATENT = ("kv_lora_rank", "q_lora_rank")  # attention that makes keys, values or queries from a narrower vector
ROTARY = ("default", "linear", "dynamic", "yarn", "llama3", "longrope")  # kinds that Llama's block and engines have
THETA = 10_000.0
POSITIONS = 32_768  # of a head whose target has no limit
ROUND = 64  # widths of an MLP that are computed are multiples of it


def fields_of(config: PreTrainedConfig) -> dict:
    """All fields, under the names of the family and under those that families have in common."""
    fields = config.to_dict()
    return fields | {common: fields[own] for common, own in config.attribute_map.items() if own in fields}


def first(fields: dict, *names: str):
    """The first of these fields that is set, or None."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def attention_heads(fields: dict, width: int) -> tuple[int, int, int]:
    """-> number of query heads, number of key heads, width of a head: those of the target, where it has such heads.

    Latent attention, recurrent targets and layers that differ have none that fit a Llama block. Then a head is as wide as
    the greatest power of two, at most 128, that divides the width into four or more heads; four queries share a key.
    """
    queries = fields.get("num_attention_heads")
    if isinstance(queries, int) and first(fields, *LATENT) is None:
        keys, size = _key_heads(fields, queries), fields.get("head_dim") or width // queries
        if isinstance(keys, int) and isinstance(size, int) and queries % keys == 0 and size % 2 == 0:
            return queries, keys, size
    size = next((size for size in (128, 64, 32, 16, 8, 4) if width % size == 0 and width // size >= 4), 2)
    queries = width // size
    return queries, queries // 4 if queries % 4 == 0 else queries, size


def _key_heads(fields: dict, queries: int) -> int:
    if fields.get("multi_query") and not fields.get("new_decoder_architecture"):  # Falcon, GPT-BigCode
        return 1
    return first(fields, "num_key_value_heads", "num_kv_heads") or queries


def mlp_width(fields: dict, width: int) -> int:
    """The width of the target's dense MLP: 4 x width if the configuration names none, the widest if layers differ.

    Of a mixture without a dense MLP it is the width of one expert, and of experts narrower than 2 x width that of all that
    a token uses: one of them alone would be a far smaller network than the MLP that the head stands for.
    """
    dense = first(fields, "intermediate_size_mlp", "intermediate_size", "n_inner", "ffn_hidden_size", "ffn_dim")
    if isinstance(dense, list | tuple):
        dense = max(dense)
    experts = experts_of(fields)
    own = first(fields, "moe_intermediate_size", "expert_ffn_hidden_size")
    # A configuration with one size only means an expert, under either name
    if experts is None or "intermediate_size_mlp" in fields or (own is not None and dense not in (None, own)):
        return dense or 4 * width
    expert = own or dense or 4 * width
    if expert >= 2 * width:
        return expert
    shared = first(
        fields, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"
    )
    if shared is None:
        shared = expert * (first(fields, "n_shared_experts", "num_shared_experts", "moe_num_shared_experts") or 0)
    return -(-(expert * experts.per_token + shared) // ROUND) * ROUND


def rotary_parameters(fields: dict, head_dim: int) -> dict:
    """The target's rotary embedding as `rope_parameters` of a block that turns whole heads of this width.

    Targets with several (by the type of a layer): that of full attention. Targets with none, and kinds that Llama's block
    has not: the plain one. LongRoPE's factors belong to the target's own frequencies and are left out if there are fewer
    or more of these here.
    """
    rope = fields.get("rope_parameters") or {}
    by_type = [value for value in rope.values() if isinstance(value, dict)]
    if by_type:
        rope = rope.get("full_attention") or by_type[0]
    rope = {key: value for key, value in rope.items() if key != "partial_rotary_factor"}
    rope.setdefault("rope_theta", THETA)
    rope.setdefault("rope_type", "default")
    lists = [value for key, value in rope.items() if key in ("short_factor", "long_factor")]
    if rope["rope_type"] not in ROTARY or any(len(factors) != head_dim // 2 for factors in lists):
        return {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    return rope


def norm_epsilon(fields: dict) -> float:
    names = ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "layernorm_epsilon", "norm_eps")
    epsilon = first(fields, *names)
    return 1e-6 if epsilon is None else epsilon
