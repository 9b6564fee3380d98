"""The names of native MTP modules in a model's own files, by family (docs/file-formats.md, section 9)."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from specdec.core.shards import Shards
from specdec.target.structure import FULL


@dataclass(frozen=True)
class NativeLayout:
    """How a family names its modules in its checkpoint, and how vLLM 0.33 runs them.

    outer_names: names of the tensors around the layer, with `head` for an LM head of its own; layer_name: name of the
        layer. {number}: the module's number; {layer}: number of its layer, behind the model's own
    inner_names: beginnings of names inside the layer that are others in files than in transformers
    prefix: beginning of all names in a checkpoint without such modules; one that has them may have another
    shares_norms: whether all modules have the same tensors around the layer
    hidden_first: whether the join reads the state before the embedding
    zero_first: whether the embedding in a text's first slot is zero
    copies: endings of further tensors, which are copies of the target's
    kinds_field: field of the configuration with the kinds of a module's layers; None: one with full attention
    chain: whether a module is all of these layers in turn, without rotations; else it is the first
    mlp_kind: kind of its MLP, where a configuration names them; None: that of the model's last layer
    distinct: whether each draft has a module of its own, as many as the configuration counts
    reads_raw: whether the first module reads the target's state before its last norm
    unset_fields: fields of the configuration, by layer, that modules go without
    """

    outer_names: dict[str, str]
    layer_name: str
    inner_names: dict[str, str] = field(default_factory=dict)
    prefix: str = "model."
    shares_norms: bool = False
    hidden_first: bool = False
    zero_first: bool = True
    copies: tuple[str, ...] = ()
    kinds_field: str | None = None
    chain: bool = False
    mlp_kind: str | None = None
    distinct: bool = False
    reads_raw: bool = False
    unset_fields: tuple[str, ...] = ()

    def list_kinds(self, config: PreTrainedConfig) -> list[str]:
        """The kinds of a module's layers."""
        kinds = getattr(config, self.kinds_field or "", None) or [FULL]
        return list(kinds) if self.chain else kinds[:1]

    def tensor_names(self, state: dict[str, Tensor], number: int, layer: int) -> dict[str, str]:
        """The name of each tensor of a module in the checkpoint, without the prefix.

        state: the module's tensors; number: the module's; layer: number of its layer, behind the model's own
        """
        names = {}
        for key in state:
            module_name, _, tensor_name = key.partition(".")
            path = self.outer_names.get(module_name)
            if path is None:
                path, tensor_name = self.layer_name, self._name_inner(tensor_name)
            names[key] = f"{path}.{tensor_name}".format(number=number, layer=layer)
        return names

    def _name_inner(self, name: str) -> str:
        """The name in files of a tensor of the layer."""
        for begin, stored_begin in self.inner_names.items():
            if name.startswith(begin):
                return stored_begin + name.removeprefix(begin)
        return name


LAYOUTS = {
    "qwen": NativeLayout(  # Qwen3-Next, Qwen3.5
        {"enorm": "mtp.pre_fc_norm_embedding", "hnorm": "mtp.pre_fc_norm_hidden", "join": "mtp.fc", "norm": "mtp.norm"},
        "mtp.layers.{number}",
        prefix="",
        shares_norms=True,
        zero_first=False,
    ),
    "deepseek": NativeLayout(  # DeepSeek-V3, GLM-4.5 and their relatives
        {
            "enorm": "layers.{layer}.enorm",
            "hnorm": "layers.{layer}.hnorm",
            "join": "layers.{layer}.eh_proj",
            "norm": "layers.{layer}.shared_head.norm",
        },
        "layers.{layer}",
        copies=("embed_tokens.weight", "shared_head.head.weight"),
    ),
    "mimo": NativeLayout(
        {
            "enorm": "mtp_layers.{number}.token_layernorm",
            "hnorm": "mtp_layers.{number}.hidden_layernorm",
            "join": "mtp_layers.{number}.input_proj",
            "norm": "mtp_layers.{number}.final_layernorm",
        },
        "mtp_layers.{number}",
        hidden_first=True,
    ),
}
LAYOUTS |= {
    "exaone": replace(LAYOUTS["qwen"], kinds_field="mtp_layer_types", mlp_kind="dense"),  # K-EXAONE
    "hunyuan": replace(  # Hy3
        LAYOUTS["deepseek"],
        outer_names={**LAYOUTS["deepseek"].outer_names, "norm": "layers.{layer}.final_layernorm"},
        inner_names={
            "mlp.gate.weight": "mlp.router.gate.weight",
            "mlp.e_score_correction_bias": "mlp.expert_bias",
            "mlp.shared_experts.": "mlp.shared_mlp.",
        },
        copies=("embed_tokens.weight", "shared_head.weight"),
    ),
    "nemotron": NativeLayout(  # Nemotron 3: a layer of attention without rotations, then one of experts
        {
            "enorm": "mtp.layers.0.enorm",
            "hnorm": "mtp.layers.0.hnorm",
            "join": "mtp.layers.0.eh_proj",
            "norm": "mtp.layers.1.final_layernorm",
        },
        "mtp.layers",
        prefix="",
        shares_norms=True,
        zero_first=False,
        kinds_field="mtp_layers_block_type",
        chain=True,
    ),
    "step": NativeLayout(  # Step 3.5, 3.7
        {
            "enorm": "layers.{layer}.enorm",
            "hnorm": "layers.{layer}.hnorm",
            "join": "layers.{layer}.eh_proj",
            "norm": "layers.{layer}.transformer.shared_head.norm",
            "head": "layers.{layer}.transformer.shared_head.output",
        },
        "layers.{layer}",
        zero_first=False,
        copies=("embed_tokens.weight",),
        kinds_field="mtp_layer_types",
        mlp_kind="dense",
        distinct=True,
        reads_raw=True,
        unset_fields=("swiglu_limits", "swiglu_limits_shared"),
    ),
}
FAMILIES = {  # layout of each model type
    "qwen3_next": "qwen",
    "qwen3_5_text": "qwen",
    "qwen3_5_moe_text": "qwen",
    "deepseek_v3": "deepseek",
    "glm4_moe": "deepseek",
    "glm4_moe_lite": "deepseek",
    "hy_v3": "hunyuan",
    "exaone_moe": "exaone",
    "nemotron_h": "nemotron",
    "step3p5": "step",
}
COUNT_FIELDS = {  # field of config.json with the number of modules, by model type; others: num_nextn_predict_layers
    "qwen3_5_text": "mtp_num_hidden_layers",
    "qwen3_5_moe_text": "mtp_num_hidden_layers",
}
RUN_FAMILIES = ("qwen3_next", "qwen3_5_text", "deepseek_v3", "glm4_moe")  # whose modules an engine has loaded
ENGINES = ("vllm", "sglang")
RAW_STATES = {  # engines in which the next step reads the state before the last norm, by model type; others: behind it
    "glm4_moe": ("vllm",),
    "glm4_moe_lite": ("vllm",),
    "step3p5": ENGINES,
}


def find_engine(model_type: str, *, raw_state: bool) -> str:
    """The first engine whose next step reads this state of a family's module. Raises ValueError if none does."""
    for engine in ENGINES:
        if (engine in RAW_STATES.get(model_type, ())) == raw_state:
            return engine
    state = "before" if raw_state else "behind"
    raise ValueError(f"No engine gives modules of {model_type} models back their state {state} the last norm.")


def list_expert_places(name: str, shape: torch.Size) -> Iterator[tuple[str, tuple]]:
    """Yields the places of a tensor of all experts in a checkpoint with one tensor for each: (name, index in the
    whole).

    shape: gate_up_proj [experts, 2 * inner, D], up_proj [experts, inner, D] or down_proj [experts, D, inner]
    """
    stem, _, kind = name.rpartition(".")
    half = shape[1] // 2
    for expert in range(shape[0]):
        if kind == "gate_up_proj":
            yield f"{stem}.{expert}.gate_proj.weight", (expert, slice(0, half))
            yield f"{stem}.{expert}.up_proj.weight", (expert, slice(half, None))
        else:
            yield f"{stem}.{expert}.{kind}.weight", (expert,)


def find_layout(shards: Shards, num_layers: int, model_type: str | None = None) -> tuple[str, str] | None:
    """The layout of a checkpoint's MTP modules, and the prefix of their names; None: it has none of a known layout.

    model_type: the model's, whose layout goes first, as some families differ behind the same names
    """
    first = FAMILIES.get(str(model_type))
    for name in sorted(LAYOUTS, key=lambda name: name != first):
        ending = f"{LAYOUTS[name].outer_names['join']}.weight".format(number=0, layer=num_layers)
        for key in shards.files:
            plain_name = key.removesuffix("_packed")  # as in `specdec.core.dequantise`
            if plain_name == ending or plain_name.endswith(f".{ending}"):
                return name, plain_name.removesuffix(ending)
    return None


def count_modules(shards: Shards, layout: str, prefix: str, num_layers: int) -> int:
    """The number of a checkpoint's modules, by their joins. layout, prefix: result of `find_layout`"""
    join = f"{prefix}{LAYOUTS[layout].outer_names['join']}.weight"
    names = (join.format(number=number, layer=num_layers + number) for number in itertools.count())
    return len(list(itertools.takewhile(shards.files.__contains__, names)))
