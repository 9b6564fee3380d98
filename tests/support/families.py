"""Tiny random targets of many model families, one list that tests share."""

import dataclasses
from dataclasses import dataclass, field

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "initializer_range": 0.25,  # the logits are far from uniform
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
SEED = 1234
NOISE = 0.1
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"

WINDOW = {"sliding_window": 6, "layer_types": [SLIDING, FULL, SLIDING, FULL]}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {**EXPERTS, "n_routed_experts": 4}
SHARED = {**EXPERTS, "num_experts": 4, "shared_expert_intermediate_size": 24}
LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
CAPPED = {**WINDOW, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 12}
SIX = {"num_hidden_layers": 6, "sliding_window": 6, "layer_types": 2 * [SLIDING, SLIDING, FULL]}
LATENT_MIXTURE = {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,  # values are narrower than keys
    "num_key_value_heads": 4,
}
GRANITE = {"embedding_multiplier": 1.5, "logits_scaling": 0.5, "residual_multiplier": 0.7, "attention_multiplier": 0.3}
DELTA = {
    "layer_types": [LINEAR, FULL, LINEAR, FULL],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MAMBA2 = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 8,
}


# Why a family is refused, as the error says it
STREAMS = "do not pass on one state of the model's width each"
INDEXED = r"of a kind that is not known here \(DynamicIndexedLayer\)"
COMPRESSED = r"of a kind that is not known here \(DeepseekV4CSACache, DeepseekV4HCACache\)"
NO_CACHE = "takes no cache of keys and values"
OWN_ATTENTION = "computes attention in its own way, which takes no mask over a tree of drafts"
NARROW = "pass on states of 32 numbers, and its LM head reads 16, while heads have one width"
NO_BLOCKS = "has no list of 4 blocks"


@dataclass(frozen=True, eq=False)
class Family:
    """A tiny configuration, and what works with such targets. Tests check every field, docs/targets.md shows them.

    model_type: name in AutoConfig; variant: name that tells apart families of one model type
    fields: fields of the configuration that differ from SIZES
    refused: a regular expression of the sentence that refuses the family; empty for a family that works
    recurrent: whether targets verify chains only
    compiled: whether decode.compile=true works
    """

    model_type: str
    fields: dict = field(default_factory=dict)
    variant: str = ""
    refused: str = ""
    recurrent: bool = False
    compiled: bool = True

    def __str__(self) -> str:
        return "-".join(filter(None, [self.model_type, self.variant]))


FAMILIES = [
    # Like Llama: every layer attends to everything before
    Family("llama"),
    Family("llama", {"attention_bias": True, "mlp_bias": True}, "biases"),
    Family("qwen2"),
    Family("qwen3"),
    Family("mistral", {"sliding_window": None}),
    Family("ministral3", {"sliding_window": None}),
    Family("gemma"),
    Family("phi3"),
    Family(
        "phi3",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0, 1.1, 1.3, 1.6],
                "long_factor": [1.0, 2.0, 4.0, 8.0],
                "original_max_position_embeddings": 128,
                "factor": 2.0,
            },
            "original_max_position_embeddings": 128,
        },
        "longrope",
        compiled=False,
    ),
    Family("olmo"),
    Family("olmo2"),
    Family("glm"),
    Family("glm4"),
    Family("granite", GRANITE, compiled=False),
    Family("cohere", {"logit_scale": 0.5, "use_qk_norm": True}),
    Family("nemotron", {"partial_rotary_factor": 0.5}),
    Family("stablelm", {"use_qkv_bias": True, "qk_layernorm": True}),
    Family("starcoder2"),
    Family("smollm3", {"no_rope_layers": [1, 0, 1, 0]}, compiled=False),
    Family("seed_oss"),
    Family("ernie4_5", {"use_bias": True}),
    Family("hunyuan_v1_dense"),
    Family("arcee"),
    Family("apertus"),
    Family("bitnet"),
    Family("nanochat", {"final_logit_softcapping": 5.0}, compiled=False),
    Family("diffllama", compiled=False),
    Family("helium"),
    Family("jais2"),
    # Windows, caps, sinks
    Family("qwen2", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}, "window"),
    Family("qwen3", {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2}, "window"),
    Family("mistral", {"sliding_window": 6}, "window"),
    Family("ministral", WINDOW),
    Family("phi3", {"sliding_window": 6}, "window"),
    Family("starcoder2", {"sliding_window": 6}, "window"),
    Family("gemma2", CAPPED),
    Family("gemma3_text", {**WINDOW, "query_pre_attn_scalar": 12, "final_logit_softcapping": 5.0}, compiled=False),
    Family("vaultgemma", CAPPED),
    Family("gpt_oss", {**WINDOW, **LOCAL}),
    Family("olmo3", WINDOW, compiled=False),
    Family("cohere2", {**WINDOW, "logit_scale": 0.5}),
    Family("exaone4", WINDOW),
    Family("cwm", WINDOW),
    Family("modernbert-decoder", {"sliding_window": 6}, refused=NO_BLOCKS),
    Family("granite_swa", {**WINDOW, **GRANITE}, compiled=False),
    Family(
        "llama4_text",
        {
            "attention_chunk_size": 6,  # three chunked layers, then a full one without rotations
            "intermediate_size_mlp": 48,
            **LOCAL,
            "interleave_moe_layer_step": 2,
        },
        compiled=False,
    ),
    Family(
        "afmoe", {**WINDOW, **EXPERTS, "num_experts": 4, "num_shared_experts": 1, "mup_enabled": True}, compiled=False
    ),
    Family(
        "mimo_v2_flash",
        {
            **EXPERTS,
            **WINDOW,
            "n_routed_experts": 4,
            "v_head_dim": 12,
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
                SLIDING: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
        },
        compiled=False,
    ),
    # Its choice of keys to keep has no positions in the first layer, so repeated tokens tie: nothing is dropped here
    Family("doge", {"keep_window_size": 256}),
    # Layers that differ in width or share keys and values
    Family(
        "gemma3n_text",
        {
            **SIX,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
            "final_logit_softcapping": 5.0,
        },
        refused=STREAMS,
    ),
    Family("gemma4_text", {**WINDOW, "global_head_dim": 16, "hidden_size_per_layer_input": 0}, compiled=False),
    Family("gemma4_unified_text", {**WINDOW, "global_head_dim": 16}, compiled=False),
    Family(
        "gemma4_text",
        {
            **SIX,
            "global_head_dim": 16,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": 64,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 5.0,
        },
        "shared",
        compiled=False,
    ),
    Family(
        "gemma4_text",
        {
            **WINDOW,
            "global_head_dim": 16,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
        "experts",
        compiled=False,
    ),
    # Experts
    Family("qwen2_moe", {**SHARED}),
    Family("qwen3_moe", {**EXPERTS, "num_experts": 4}),
    Family("mixtral", {**LOCAL}),
    Family("mixtral", {**LOCAL, "sliding_window": 6}, "window"),
    Family("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("glm4_moe", {**ROUTED, "use_qk_norm": True}),
    Family("granitemoe", {**GRANITE, **LOCAL}, compiled=False),
    Family("ernie4_5_moe", {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 24}),
    Family("dots1", {**ROUTED, **WINDOW, "n_shared_experts": 1, "first_k_dense_replace": 1}),
    Family("exaone_moe", {**EXPERTS, **WINDOW, "num_experts": 4}),
    Family("cohere2_moe", {**EXPERTS, **WINDOW, "num_experts": 4}),
    Family("mellum", {**EXPERTS, **WINDOW, "num_experts": 4}, compiled=False),
    Family("laguna", {**EXPERTS, **WINDOW, "num_experts": 4}, compiled=False),
    Family("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    Family("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 24}),
    Family("granitemoeshared", {**GRANITE, **LOCAL, "shared_intermediate_size": 24}, compiled=False),
    Family("granitemoe_swa", {**GRANITE, **WINDOW, **LOCAL}, compiled=False),
    Family("minimax_m2", {**LOCAL}),
    Family("phimoe", {**LOCAL, "lm_head_bias": True}),
    Family("hy_v3", {**EXPERTS, "num_experts": 4}),
    Family("solar_open", {**ROUTED}),
    Family("jetmoe", {"kv_channels": 8, **LOCAL, "num_attention_heads": 4}, compiled=False),
    # Latent attention, indexers
    Family("minicpm3", {**LATENT, "dim_model_base": 16}),
    Family("deepseek_v2", {**LATENT, **ROUTED, "first_k_dense_replace": 1}, compiled=False),
    Family("deepseek_v3", {**LATENT, **ROUTED, **LATENT_MIXTURE}),
    Family("youtu", LATENT),
    Family("glm4_moe_lite", {**LATENT, **ROUTED}),
    Family(
        "longcat_flash",
        {
            **LATENT,
            "num_layers": 4,  # of two attentions each
            "ffn_hidden_size": 48,
            "expert_ffn_hidden_size": 24,
            "moe_topk": 2,
            "n_routed_experts": 4,
            "zero_expert_num": 2,
        },
        compiled=False,
    ),
    Family(
        "deepseek_v32",
        {
            **LATENT,
            **ROUTED,
            **LATENT_MIXTURE,
            "index_topk": 8,
            "index_head_dim": 16,
            "index_n_heads": 8,  # rectified scores of few heads would often tie at zero
        },
        refused=INDEXED,
    ),
    Family(
        "deepseek_v4",
        {
            **EXPERTS,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "partial_rotary_factor": 0.5,
            "q_lora_rank": 16,
            "o_groups": 2,
            "o_lora_rank": 8,
            "n_routed_experts": 4,
            "sliding_window": 6,
            "layer_types": [
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                SLIDING,
                "compressed_sparse_attention",
            ],
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8},
            "index_n_heads": 8,
            "index_head_dim": 16,
            "index_topk": 2,
            "hc_mult": 2,
        },
        refused=COMPRESSED,
    ),
    # Recurrences, convolutions
    Family("qwen3_next", {**DELTA, **SHARED, "partial_rotary_factor": 0.5}, recurrent=True),
    Family("qwen3_5_text", {**DELTA, "partial_rotary_factor": 0.5}, recurrent=True),
    Family("qwen3_5_moe_text", {**DELTA, **SHARED, "partial_rotary_factor": 0.5}, recurrent=True),
    Family("olmo_hybrid", {**DELTA, "linear_num_key_heads": 4}, recurrent=True),
    Family(
        "kimi_linear",
        {
            **LATENT,
            **EXPERTS,
            "num_local_experts": 4,
            "layer_types": [LINEAR, FULL, LINEAR, FULL],
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "linear_head_dim": 8,
            "linear_num_heads": 4,
            "model_max_length": 256,
        },
        recurrent=True,
    ),
    Family(
        "minimax",
        {
            "layer_types": [LINEAR, FULL, LINEAR, FULL],
            **LOCAL,
            "block_size": 8,
            "full_attn_alpha_factor": 1.3,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 1.2,
            "linear_attn_beta_factor": 0.9,
            "mlp_alpha_factor": 1.1,
            "mlp_beta_factor": 0.7,
        },
        recurrent=True,
    ),
    Family(
        "lfm2", {"layer_types": ["conv", FULL, "conv", FULL], "block_multiple_of": 8, "conv_bias": True}, recurrent=True
    ),
    Family(
        "lfm2_moe",
        {**EXPERTS, "layer_types": ["conv", FULL, "conv", FULL], "num_experts": 4, "num_dense_layers": 1},
        recurrent=True,
    ),
    Family(
        "granitemoehybrid",
        {
            **GRANITE,
            **MAMBA2,
            "layer_types": [LINEAR, FULL, LINEAR, FULL],
            **LOCAL,
            "shared_intermediate_size": 24,
            "position_embedding_type": "rope",
        },
        recurrent=True,
        compiled=False,
    ),
    Family("bamba", {**MAMBA2, "attn_layer_indices": [1, 3]}, recurrent=True, compiled=False),
    Family(
        "falcon_h1",
        {
            **MAMBA2,
            "mamba_d_ssm": 64,
            "lm_head_multiplier": 1.5,
            "embedding_multiplier": 1.3,
            "mlp_multipliers": [0.9, 1.2],
            "key_multiplier": 1.4,
            "attention_out_multiplier": 0.8,
            "attention_in_multiplier": 1.1,
            "ssm_multipliers": [0.9, 1.1, 1.2, 0.8, 1.3],
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.9,
        },
        recurrent=True,
        compiled=False,
    ),
    Family(
        "nemotron_h",
        {
            "num_hidden_layers": 6,
            "layers_block_type": [LINEAR, "moe", FULL, "mlp", LINEAR, FULL],
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "n_groups": 2,
            "ssm_state_size": 8,
            "chunk_size": 8,
            "time_step_min": 1e-9,  # transformers applies this bound to several tokens at once, never to one
            "use_mamba_kernels": False,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "moe_shared_expert_intermediate_size": 24,
        },
        recurrent=True,
    ),
    Family(
        "jamba",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "use_mamba_kernels": False,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
        },
        recurrent=True,
    ),
    Family(
        "zamba2",
        {
            "num_key_value_heads": 4,
            "head_dim": 16,  # attention reads the hidden states next to the embeddings
            "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid"],
            "mamba_d_state": 8,
            "n_mamba_heads": 8,
            "chunk_size": 8,
            "use_shared_attention_adapter": True,
            "adapter_rank": 4,
            "use_mem_rope": True,
            "time_step_min": 1e-9,  # transformers applies this bound to several tokens at once, never to one
            "use_mamba_kernels": False,
        },
        recurrent=True,
        compiled=False,
    ),
    Family("mamba", {"state_size": 8}, refused=NO_CACHE),
    Family("gpt_neox", {"rotary_pct": 0.5}, compiled=False),
    Family("gpt2", compiled=False),
    Family("gpt_bigcode", compiled=False),
    Family("gptj", {"rotary_dim": 4}, compiled=False),
    Family("mpt", {"n_layers": 4, "n_heads": 4}, refused=OWN_ATTENTION),  # its ALiBi counts slots of the cache
    Family("biogpt", compiled=False),
    Family("opt", {"ffn_dim": 48, "init_std": 0.25, "word_embed_proj_dim": 32}, compiled=False),
    Family("opt", {"ffn_dim": 48, "init_std": 0.25, "word_embed_proj_dim": 16}, "narrow", refused=NARROW),
    Family("bloom", compiled=False),
    Family("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}, compiled=False),
    Family("falcon", {"alibi": True, "bias": True}, "alibi", compiled=False),
    Family("phi", {"qk_layernorm": True}),
    Family("persimmon"),
]


def find_family(name: str) -> Family:
    """The entry of this name: its model type, and its variant behind a hyphen."""
    return next(family for family in FAMILIES if str(family) == name)


def configuration(family: Family) -> PretrainedConfig:
    """SIZES, as far as the family has such fields, and what the family adds."""
    config_class = CONFIG_MAPPING[family.model_type]
    known = {item.name for item in dataclasses.fields(config_class)} | set(config_class.attribute_map)
    taken = {config_class.attribute_map.get(name, name) for name in family.fields}
    shared = {
        name: value
        for name, value in SIZES.items()
        if name in known and config_class.attribute_map.get(name, name) not in taken
    }
    return AutoConfig.for_model(family.model_type, **shared, **family.fields)


@torch.no_grad()
def make(family: Family, attention: str = "sdpa") -> PreTrainedModel:
    """A random target in float32, with eager attention if the family lacks the requested one."""
    config = configuration(family)

    def build(implementation: str) -> PreTrainedModel:
        torch.manual_seed(SEED)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=implementation)

    try:
        model = build(attention)
    except (ValueError, ImportError):
        model = build("eager")
    torch.manual_seed(SEED + 1)
    endings = ("score_correction_bias", "expert_bias")
    routing = [value for name, value in model.named_buffers() if name.endswith(endings)]
    for value in [*model.parameters(), *routing]:
        # Norms, biases, sinks and decays begin as constants: a test would not see that one was left out
        if value.is_floating_point() and (value.dim() < 2 or value.eq(value.flatten()[0]).all()):
            value.add_(NOISE * torch.randn(value.shape))
    return model.eval()


def reference(family: Family) -> PreTrainedModel:
    """The target with its own attention: transformers' sdpa leaves out sinks and soft caps."""
    model = make(family, "eager")
    return model if type(model)._can_set_attn_implementation() else make(family)
