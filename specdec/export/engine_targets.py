"""Which targets the engines have beside which kind of head, read from their sources; format=safetensors is for any target.

kind      heads                     what the engine's class of the target has to give
states    EAGLE-3, DFlash, DSpark   hidden states of inner layers
last      EAGLE-1, MTP, Medusa      its last state, its embedding and its LM head
draft     draft models              nothing

Families are transformers' model types of the text part.
"""

from specdec.target.model import Target

SOURCES = {
    "vLLM": "vLLM 0.32.0",
    "SGLang": "SGLang 0.5.23",
    "llama.cpp": "llama.cpp, build 11434",
    "SafeAILab's code": "SafeAILab/EAGLE, eagle/model/ea_model.py",
}

# vLLM: classes with SupportsEagle3, its classes for transformers' own models among them
VLLM_STATES = frozenset(
    "afmoe apertus arcee cohere2_moe cwm deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 ernie4_5 flex_olmo gemma4_text glm "
    "glm_moe_dsa gpt_bigcode gpt_neox gpt_oss granite granite_swa hunyuan_v1_dense hunyuan_v1_moe jais2 kimi_linear laguna "
    "llama llama4_text mellum mimo_v2_flash minicpm3 minimax_m2 ministral3 mistral nemotron_h olmo olmo2 olmo3 phi phi3 qwen2 "
    "qwen2_5_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text seed_oss smollm3 "
    "starcoder2 vaultgemma".split()
)
# SGLang: classes with get_embed_and_head, and of these the ones with set_eagle3_layers_to_capture
SGLANG_STATES = frozenset(
    "apertus deepseek_v2 deepseek_v3 deepseek_v32 exaone_moe gemma3_text gemma4_text glm4_moe glm4_moe_lite glm_moe_dsa gpt_oss "
    "llama llama4_text longcat_flash mellum minimax_m2 ministral3 mistral phi3 qwen2 qwen2_5_vl_text qwen3 qwen3_5_moe_text "
    "qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text".split()
)
SGLANG_LAST = SGLANG_STATES | frozenset(
    "deepseek_v4 ernie4_5_moe exaone4 falcon_h1 glm4 hy_v3 hy_v4 laguna mimo_v2_flash nemotron_h opt".split()
)
# llama.cpp: graphs that set t_layer_inp
LLAMA_CPP_STATES = frozenset(
    "deepseek_v4 gemma4_text gpt_oss hunyuan_v1_dense lfm2 lfm2_moe llama mimo_v2_flash minimax minimax_m2 mistral mixtral "
    "nemotron_h qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next".split()
)
SAFEAILAB = frozenset("llama mixtral qwen2 qwen3".split())  # it reads all others with Mixtral's class

# By engine and kind of head: the families; kinds that are left out are open to all families
TARGETS = {
    "vLLM": {"states": VLLM_STATES},
    "SGLang": {"states": SGLANG_STATES, "last": SGLANG_LAST},
    "llama.cpp": {"states": LLAMA_CPP_STATES},
    "SafeAILab's code": {"states": SAFEAILAB, "last": SAFEAILAB},
}
SURE = ("SGLang", "SafeAILab's code")  # they stop, or read the target wrongly, if the family is not listed
ADVICE = {
    "vLLM": "its class for transformers' own models does, with --model-impl transformers, which was not tried",
    "llama.cpp": "other builds may",
}


def notes(engine: str, kind: str, target: Target) -> tuple[str, ...]:
    """What the model card says about this pair. Raises ValueError where the engine does not serve it.

    engine: of SOURCES; kind: states, last or draft, see above
    """
    family, source = target.config.model_type, SOURCES[engine]
    families = TARGETS[engine].get(kind)
    found = [*_about_logits(kind, target)]
    if families is not None and family not in families:
        if engine in SURE or (engine == "vLLM" and target.recurrent):
            raise ValueError(
                f"{engine} does not serve this kind of head with a {family} target ({source}). It does with "
                f"{', '.join(sorted(families))}. Take another format, or a draft model (head=draft), which needs nothing of the "
                "target; format=safetensors takes every head."
            )
        found.append(f"Not known to load: {source} gives no hidden states of {family} targets; {ADVICE[engine]}.")
    if target.recurrent:
        found.append(f"Speculative decoding of targets with recurrent layers, as this one, was not tried in {engine}.")
    return tuple(found)


def _about_logits(kind: str, target: Target) -> list[str]:
    """Heads that borrow the target's LM head get it from engines without what surrounds its weight."""
    if kind == "draft":
        return []
    found = []
    if not target.shape_logits.plain:
        found.append(
            "The target scales or caps its logits, and engines do not where this head borrows its LM head. The order of tokens "
            "is the same, the probabilities of drafts are not: draft greedily."
        )
    if target.lm_head.bias is not None:
        found.append(
            "The target's LM head has a bias, which engines leave out for drafters: they draft worse than measured here."
        )
    return found
