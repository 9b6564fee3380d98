"""Native MTP: modules that a model ships beside its layers, each made of one layer of the model's own class.

They run here as in engines. Training, replay and decoding treat them like any other head. docs/file-formats.md, section
9, has the names of their tensors.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from specdec.core import hub, untrusted
from specdec.core.cache import RowCache
from specdec.core.files import hash_file
from specdec.core.option_types import SmallCount, Text, Width
from specdec.core.shards import Shards
from specdec.heads.blocks import make_row_cache
from specdec.heads.mtp import ModuleDrafter
from specdec.target.model import Target

IMPLEMENTATION = "specdec_head"  # name of `attend_cache` and `run_experts` in transformers
FULL_ATTENTION = "full_attention"
ROUTER = "mlp.gate.weight"  # ending of the weight that chooses experts, which stays as in the model


@dataclass(frozen=True)
class NativeLayout:
    """How a family names its modules in its checkpoint, and how vLLM 0.32 runs them.

    outer_names: names of the tensors around the layer; layer_name: name of the layer. {number}: the module's number;
        {layer}: number of its layer, behind the model's own
    prefix: beginning of all names in a checkpoint without such modules; one that has them may have another
    shares_norms: whether all modules have the same tensors around the layer
    hidden_first: whether the join reads the state before the embedding
    zero_first: whether the embedding in a text's first slot is zero
    copies: endings of further tensors, which are copies of the target's
    """

    outer_names: dict[str, str]
    layer_name: str
    prefix: str = "model."
    shares_norms: bool = False
    hidden_first: bool = False
    zero_first: bool = True
    copies: tuple[str, ...] = ()

    def tensor_names(self, state: dict[str, Tensor], number: int, layer: int) -> dict[str, str]:
        """The name of each tensor of a module in the checkpoint, without the prefix.

        state: the module's tensors; number: the module's; layer: number of its layer, behind the model's own
        """
        names = {}
        for key in state:
            module_name, _, tensor_name = key.partition(".")
            path = self.layer_name if module_name == "block" else self.outer_names[module_name]
            names[key] = f"{path}.{tensor_name}".format(number=number, layer=layer)
        return names


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
UNNORMED_FAMILIES = ("glm4_moe",)  # families whose modules read the state before the last norm in vLLM
FAMILIES = {  # layout of each model type whose modules were compared with an engine's
    "qwen3_next": "qwen",
    "qwen3_5_text": "qwen",
    "qwen3_5_moe_text": "qwen",
    "deepseek_v3": "deepseek",
    "glm4_moe": "deepseek",
}


def attend_cache(module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling=None, *, cache, **kwargs):
    """Output [B, S, heads, V] of a transformers layer's attention over the keys that our cache returns.

    query, key [B, heads, S, E]; value [B, heads, S, V]; scaling: factor of the scores. The cache scales by E**-0.5, and
    has one width for keys and values.
    """
    width, value_width = query.shape[-1], value.shape[-1]
    query = (query * (scaling * width**0.5)).to(value.dtype)
    out = cache.attend(
        module.layer_idx, query, key.to(value.dtype), F.pad(value, (0, width - value_width)), attention_mask
    )
    return out[..., :value_width].transpose(1, 2), None


def run_experts(module, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
    """Output [tokens, D] of a transformers layer's experts, in the dtype of autocast, which omits grouped products.

    x [tokens, D]; expert_ids, weights [tokens, experts per token]
    """
    dtype = torch.bfloat16 if x.is_meta else x.dtype  # an outline has shapes of groups for bfloat16 only
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
    cast_module = copy.copy(module)
    cast_module._parameters = {name: value.to(dtype) for name, value in module._parameters.items()}
    return grouped_mm_experts_forward(cast_module, x.to(dtype), expert_ids, weights.to(dtype)).to(x.dtype)


AttentionInterface.register(IMPLEMENTATION, attend_cache)
ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, run_experts)


class NativeModule(nn.Module):
    """Norms of the token's embedding and the state, their join, a layer of the target's class, and a last norm."""

    def __init__(self, target: Target, layout: NativeLayout, *, number: int):
        super().__init__()
        width, self.hidden_first = target.width, layout.hidden_first
        layer_number = target.num_layers + number if "{layer}" in layout.layer_name else number
        config = make_layer_config(target.config, layer_number)
        norm = type(target.norm)
        self.enorm, self.hnorm, self.norm = (norm(width, eps=config.rms_norm_eps) for _ in range(3))
        self.join = nn.Linear(2 * width, width, bias=False)
        kinds = type(target.layers[-1]).__mro__
        self.block = cast(Any, next(kind for kind in kinds if not issubclass(kind, FSDPModule)))(config, layer_number)
        self.block.self_attn.layer_idx = number  # its layer in our cache

    def forward(self, embedding: Tensor, h: Tensor, rotary, positions: Tensor, mask, cache) -> tuple[Tensor, Tensor]:
        """The state before the last norm and behind it, [B, S, D] each. embedding, h [B, S, D]"""
        inputs = [self.enorm(embedding), self.hnorm(h)]
        x = self.join(torch.cat(inputs[::-1] if self.hidden_first else inputs, dim=-1))
        x = self.block(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions, cache=cache)
        return x, self.norm(x)


def _check_layout(target: Target, layout: str | None, num_modules: int | None) -> NativeLayout:
    """The layout of this name. Raises ValueError for an unknown layout, and for modules that the target cannot have."""
    if layout not in LAYOUTS:
        raise ValueError(
            f"{target.name} is a {target.config.model_type} model, whose MTP modules are unknown: use head=mtp."
        )
    native_layout = LAYOUTS[layout]
    if num_modules is not None and not 1 <= num_modules <= (1 if native_layout.shares_norms else num_modules):
        raise ValueError(
            f"num_modules={num_modules}: MTP modules of this family share their norms, so there is one. Use null."
        )
    if not hasattr(target.layers[-1], "self_attn"):
        raise ValueError(f"The layers of {target.name} are not built as those of MTP modules are: use head=mtp.")
    return native_layout


def make_layer_config(config: PreTrainedConfig, layer_number: int) -> PreTrainedConfig:
    """The configuration of one more layer, with full attention, which runs `attend_cache` and `run_experts`.

    layer_number: number of the layer in the model
    """
    config = copy.deepcopy(config)
    config._attn_implementation = config._experts_implementation = IMPLEMENTATION
    for field in ("layer_types", "mlp_layer_types"):
        kinds = getattr(config, field, None)
        if kinds is not None:
            setattr(config, field, [FULL_ATTENTION if field == "layer_types" else kinds[-1]] * (layer_number + 1))
    return config


class LowRankLinear(nn.Linear):
    """A linear layer with a frozen weight, and the product of two narrow matrices, which starts at zero (LoRA,
    2106.09685).
    """

    down: nn.Parameter  # [rank, in]
    up: nn.Parameter  # [out, rank]

    @classmethod
    def convert(cls, layer: nn.Linear, rank: int) -> None:
        """Turns a linear layer into one of these."""
        layer.__class__ = cls
        layer.down = nn.Parameter(torch.randn(rank, layer.in_features).to(layer.weight) * layer.in_features**-0.5)
        layer.up = nn.Parameter(layer.weight.new_zeros(layer.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + F.linear(F.linear(x, self.down), self.up)

    def fold(self) -> None:
        """Turns it into an ordinary layer with the same map."""
        self.weight.data += self.up @ self.down
        del self.up, self.down
        self.__class__ = nn.Linear  # type: ignore[assignment]


class NativeMTP(ModuleDrafter):
    """The target's own MTP module: it reads the target's last state, then its own, and the newest token.

    source: model whose modules it starts from, a folder or a name on the Hub; "target": the target; null: random
        weights
    num_modules: number of modules, one for each depth; null: module 0 at every depth, as engines run it
    lora_rank: rank of trained matrices beside those of its linear layers, experts excepted; null: all but the router is
        trained
    zero_first: whether the embedding in the first slot of a text is zero; null: as vLLM runs the family
    recycle_norm: whether the next step reads the state behind the last norm, or before it; null: as vLLM runs the
        family
    layout: name in LAYOUTS; null: the source's
    """

    changeable_arguments = ("zero_first", "recycle_norm", "lora_rank")

    def __init__(
        self,
        target: Target,
        *,
        source: Text | None = "target",
        num_modules: SmallCount | None = None,
        lora_rank: Width | None = None,
        zero_first: bool | None = None,
        recycle_norm: bool | None = None,
        layout: Text | None = None,
        vocab: Tensor | None = None,
    ):
        super().__init__(target, vocab=vocab)
        self.published: dict | None = None
        tensors = None
        if source is not None:
            spec, tensors = read_native_modules(
                target.name if source == "target" else source, target, num_modules=num_modules
            )
            layout, self.published = spec["layout"], spec["published"]
        self.layout = layout or FAMILIES.get(target.config.model_type)
        native_layout = _check_layout(target, self.layout, num_modules)
        self.depth, self.context_kind = num_modules, "path" if num_modules is None else "depth"
        self.zero_first = native_layout.zero_first if zero_first is None else zero_first
        self.recycle_norm = target.config.model_type not in UNNORMED_FAMILIES if recycle_norm is None else recycle_norm
        self.estimates_state = self.recycle_norm
        self.target_layers = target.layer_ids([-1])
        self.modules_by_depth = nn.ModuleList(
            NativeModule(target, native_layout, number=k) for k in range(num_modules or 1)
        )
        rotary = cast(Any, target.decoder).rotary_emb
        self.rotary = type(rotary)(config=make_layer_config(target.config, 0))
        self.pretrained = tensors is not None
        if tensors is not None:
            self.load_state_dict(tensors)
        else:
            self.apply(target.model._init_weights)
        self._rank: int | None = None
        self.lora_rank = lora_rank

    @property
    def lora_rank(self) -> int | None:
        return self._rank

    @lora_rank.setter
    def lora_rank(self, rank: int | None) -> None:
        """Sets which parameters are trained, and adds the low-rank matrices once."""
        for name, parameter in self.named_parameters():
            parameter.requires_grad_(rank is None and not name.endswith(ROUTER))
        if rank is not None and self._rank is None:
            for layer in [module for module in self.modules() if isinstance(module, nn.Linear)]:
                LowRankLinear.convert(layer, rank)
        self._rank = rank

    def frozen_copy(self) -> Self:
        """A frozen copy, as of `Head`, with plain weights."""
        frozen = super().frozen_copy()
        for layer in [module for module in frozen.modules() if isinstance(module, LowRankLinear)]:
            layer.fold()
        frozen._rank = None
        return frozen

    def arguments(self) -> dict:
        published = {} if self.published is None else {"published": self.published}
        settings = {"zero_first": self.zero_first, "recycle_norm": self.recycle_norm, "layout": self.layout}
        return {"source": None, "lora_rank": None, **settings, **published}

    def cache(self, batch: int) -> RowCache:
        config = self.target.config
        keys, width = config.num_key_value_heads, getattr(config, "head_dim", None)
        if getattr(config, "kv_lora_rank", None):  # latent attention: keys and values as it expands them
            keys, width = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        heads = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": keys}
        shape = LlamaConfig(
            hidden_size=self.target.width, head_dim=width or self.target.width // config.num_attention_heads, **heads
        )
        masked = self.context_kind == "depth"
        return make_row_cache(shape, self.module(1).enorm.weight, layers=self.depth or 1, batch=batch, masked=masked)

    def step(self, d, h, tokens, positions, mask, cache):
        embedding = self.embed_inputs(tokens, positions)
        # Multimodal models turn by positions in time, height and width, which are equal in a text
        angles = positions.expand(3, -1, -1) if hasattr(self.rotary, "mrope_section") else positions
        raw, normed = self.module(d)(embedding, h, self.rotary(h, angles), positions, mask, cache)
        return normed if self.recycle_norm else raw, normed


# Reading and naming the tensors of a model's own files


def list_expert_places(name: str, shape: torch.Size) -> Iterator[tuple[str, tuple]]:
    """Yields the places of a tensor of all experts in a checkpoint with one tensor for each: (name, index in the
    whole).

    shape: gate_up_proj [experts, 2 * inner, D] or down_proj [experts, D, inner]
    """
    stem, _, kind = name.rpartition(".")
    half = shape[1] // 2
    for expert in range(shape[0]):
        if kind == "down_proj":
            yield f"{stem}.{expert}.down_proj.weight", (expert,)
        else:
            yield f"{stem}.{expert}.gate_proj.weight", (expert, slice(0, half))
            yield f"{stem}.{expert}.up_proj.weight", (expert, slice(half, None))


def list_checkpoint_places(
    drafter: NativeMTP, present: dict[str, str] | None, prefix: str
) -> dict[str, list[tuple[str, tuple]]]:
    """For each tensor of the drafter its names in the checkpoint, each with its index in the tensor; (): the whole
    tensor.

    present: the checkpoint's tensors; None: a new checkpoint, in which each expert has its own tensors
    """
    layout, places = LAYOUTS[str(drafter.layout)], {}
    for number, module in enumerate(drafter.modules_by_depth):
        state = module.state_dict()
        for key, name in layout.tensor_names(state, number, drafter.target.num_layers + number).items():
            name = prefix + name
            is_split = key.endswith(("experts.gate_up_proj", "experts.down_proj")) and name not in (present or ())
            tensor_places = list_expert_places(name, state[key].shape) if is_split else [(name, ())]
            places[f"modules_by_depth.{number}.{key}"] = list(tensor_places)
    return places


def find_layout(shards: Shards, num_layers: int) -> tuple[str, str] | None:
    """The layout of a checkpoint's MTP modules, and the prefix of their names; None: it has none of a known layout."""
    for name, layout in LAYOUTS.items():
        ending = f"{layout.outer_names['join']}.weight".format(number=0, layer=num_layers)
        for key in shards.files:
            if key == ending or key.endswith(f".{ending}"):
                return name, key.removesuffix(ending)
    return None


def read_native_modules(
    name: str, target: Target, *, num_modules: SmallCount | None = None
) -> tuple[dict, dict[str, Tensor]]:
    """Reads the MTP modules in a model's own files.

    Returns the class with its arguments, as `checkpoint.save` takes them, and the tensors.
    name: a folder, or a name on the Hub with @revision, of the target or of a model of its family
    Raises ValueError if there are none, or if they are no modules of this target.
    """
    repo, _, revision = (name, "", "") if hub.is_folder(name) else name.partition("@")
    shards = Shards(repo, revision=revision or None)
    layout, prefix = _require_layout(name, shards, target)
    with torch.device("meta"):
        empty = NativeMTP(target, source=None, num_modules=num_modules, layout=layout)
    tensors, names = {}, []
    places = list_checkpoint_places(empty, shards.files, prefix)
    for key, outline in empty.state_dict().items():
        tensors[key] = _read_tensor(name, shards, outline, places[key], target.name)
        names += [stored_name for stored_name, _ in places[key]]
    untrusted.check_values(tensors)
    _check_all_read(name, shards, set(names), empty, prefix)
    config_path = shards.path("config.json")
    pinned = hub.pin_commit(config_path.parent)
    files = sorted({shards.files[stored_name] for stored_name in names})
    published = {
        "layout": "native",
        "config": untrusted.read_json(config_path),
        "tensors": {stored_name: list(shards.describe(stored_name)) for stored_name in names},
        "source": pinned if hub.is_hub_name(pinned) else Path(name).name,
        "sha256": {file: hash_file(shards.path(file)) for file in files},
    }
    spec = {"_target_": "specdec.heads.native.NativeMTP", "num_modules": num_modules, **empty.arguments()}
    return {**spec, "published": published}, tensors


def _require_layout(name: str, shards: Shards, target: Target) -> tuple[str, str]:
    """The result of `find_layout`. Raises ValueError for files without modules of a known layout."""
    layout_and_prefix = find_layout(shards, target.num_layers)
    if layout_and_prefix is not None:
        return layout_and_prefix
    mtp_names = sorted(key for key in shards.files if "mtp" in key or "nextn" in key)
    finding = "ships no MTP modules"
    if mtp_names:
        finding = f"has MTP modules of an unknown layout ({', '.join(mtp_names[:3])}, ...)"
    raise ValueError(
        f"{name} {finding} for a target of {target.num_layers} layers ({', '.join(LAYOUTS)} are known). "
        "Train a module (the head `mtp`), or the whole model as a drafter (the head `draft` with model: NAME)."
    )


def _read_tensor(
    name: str, shards: Shards, outline: Tensor, places: list[tuple[str, tuple]], target_name: str
) -> Tensor:
    """A tensor of a module, put together from its places in the files. Raises ValueError if one is missing or unfit.

    outline: a tensor of its shape; places: names in the files, each with its index in the tensor
    """
    for stored_name, _ in places:
        if stored_name not in shards.files:
            raise ValueError(f"{name} lacks {stored_name}, which its MTP module needs: take a complete copy of it.")
    tensor = torch.empty(outline.shape, dtype=shards[places[0][0]].dtype)
    for stored_name, index in places:
        if shards.shape(stored_name) != tensor[index].shape:
            raise ValueError(
                f"{name}: {stored_name} has the shape {list(shards.shape(stored_name))}, and for {target_name} it "
                f"would be {list(tensor[index].shape)}. Take a model of the target's family and width, that is not "
                "quantised."
            )
        tensor[index] = shards[stored_name]
    return tensor


def _check_all_read(name: str, shards: Shards, read: set[str], drafter: NativeMTP, prefix: str) -> None:
    """Raises ValueError for tensors of these modules that the drafter lacks, such as scales of quantised weights."""
    layout = LAYOUTS[str(drafter.layout)]
    for number in range(len(drafter.modules_by_depth)):
        block = prefix + layout.layer_name.format(number=number, layer=drafter.target.num_layers + number) + "."
        unread = sorted(
            key for key in shards.files.keys() - read if key.startswith(block) and not key.endswith(layout.copies)
        )
        if unread:
            raise ValueError(
                f"{name}: its MTP module has {unread[0]}, which a layer of {drafter.target.name} has not. If it is "
                "quantised, take the module of a model that is not: checkpoint=MODEL target.name=THIS."
            )
