"""Native MTP: modules that a model ships beside its layers, each made of one layer of the model's own class.

They run here as in engines. Training, replay and decoding treat them like any other head. docs/file-formats.md, section
9, has the names of their tensors.
"""

import copy
from pathlib import Path
from typing import Any, Literal, Self, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional as F
from transformers import AttentionInterface, LlamaConfig, PreTrainedConfig
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from specdec.core import dequantise, hub, untrusted
from specdec.core.cache import RowCache
from specdec.core.files import hash_file
from specdec.core.option_types import SmallCount, Text, Width
from specdec.core.shards import Shards
from specdec.heads.blocks import make_row_cache
from specdec.heads.mtp import ModuleDrafter
from specdec.heads.native_modules.layouts import (
    FAMILIES,
    LAYOUTS,
    RAW_STATES,
    NativeLayout,
    count_modules,
    find_layout,
    list_expert_places,
)
from specdec.target.model import Target
from specdec.target.structure import SLIDING

IMPLEMENTATION = "specdec_head"  # name of `attend_cache` and `run_experts` in transformers
EXPERTS = ("experts.gate_up_proj", "experts.up_proj", "experts.down_proj")  # endings of the tensors of all experts
ROUTER = ".gate.weight"  # ending of the weight that chooses experts, which stays as in the model


def attend_cache(
    module, query: Tensor, key: Tensor, value: Tensor, attention_mask, scaling=None, *, head_cache, **kwargs
):
    """Output [B, S, heads, V] of a transformers layer's attention over the keys that our cache returns.

    query, key [B, heads, S, E]; value [B, heads, S, V]; scaling: factor of the scores. The cache scales by E**-0.5, and
    has one width for keys and values.
    """
    width, value_width = query.shape[-1], value.shape[-1]
    query = (query * (scaling * width**0.5)).to(value.dtype)
    out = head_cache.attend(
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


class LayerChain(nn.ModuleList):
    """Layers that run one after the other."""

    def forward(self, x: Tensor, **arguments) -> Tensor:
        for layer in self:
            x = layer(x, **arguments)
        return x


class NativeModule(nn.Module):
    """Norms of the token's embedding and the state, their join, layers of the target's class, and a last norm."""

    def __init__(self, target: Target, layout: NativeLayout, *, number: int):
        super().__init__()
        width, self.hidden_first = target.width, layout.hidden_first
        layer_number = target.num_layers + number if "{layer}" in layout.layer_name else number
        config = make_layer_config(target.config, layout, layer_number)
        norm, eps = type(target.norm), getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        self.enorm, self.hnorm, self.norm = (norm(width, eps=eps) for _ in range(3))
        self.join = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, target.vocab_size, bias=False) if "head" in layout.outer_names else None
        kinds = type(target.layers[-1]).__mro__
        make_layer = cast(Any, next(kind for kind in kinds if not issubclass(kind, FSDPModule)))
        if layout.chain:
            self.block = LayerChain(make_layer(config, k) for k in range(len(layout.list_kinds(config))))
        else:
            self.block = make_layer(config, layer_number)
        for part in self.block.modules():
            if hasattr(part, "layer_idx"):
                cast(Any, part).layer_idx = number  # its layer in our cache

    def forward(self, embedding: Tensor, h: Tensor, rotary, positions: Tensor, mask, cache) -> tuple[Tensor, Tensor]:
        """The state before the last norm and behind it, [B, S, D] each. embedding, h [B, S, D]"""
        inputs = [self.enorm(embedding), self.hnorm(h)]
        x = self.join(torch.cat(inputs[::-1] if self.hidden_first else inputs, dim=-1))
        x = self.block(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions, head_cache=cache)
        return x, self.norm(x)


def _check_layout(target: Target, layout: str | None, num_modules: int | None, vocab: Tensor | None) -> NativeLayout:
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
    if "head" in native_layout.outer_names and vocab is not None:
        raise ValueError("Modules of this family have LM heads of their own, for all tokens: set head.vocab_size=null.")
    if not (native_layout.chain or hasattr(target.layers[-1], "self_attn")):
        raise ValueError(f"The layers of {target.name} are not built as those of MTP modules are: use head=mtp.")
    return native_layout


def make_layer_config(config: PreTrainedConfig, layout: NativeLayout, layer_number: int) -> PreTrainedConfig:
    """The configuration of a module's layers, which run `attend_cache` and `run_experts`.

    layer_number: number of the layer in the model
    """
    config, kinds = copy.deepcopy(config), layout.list_kinds(config)
    if getattr(config, "is_heterogeneous", False):  # the module is as the model's first layer of its kind
        pattern = config.per_layer_config[config.layer_types.index(kinds[0])]
        config.per_layer_config = None
        config.num_attention_heads, config.num_hidden_layers = pattern.num_attention_heads, layer_number + 1
    for field in layout.unset_fields:
        setattr(config, field, None)
    config._attn_implementation = config._experts_implementation = IMPLEMENTATION
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = kinds if layout.chain else kinds * (layer_number + 1)
    mlp_kinds = getattr(config, "mlp_layer_types", None)
    if mlp_kinds is not None:
        config.mlp_layer_types = [layout.mlp_kind or mlp_kinds[-1]] * (layer_number + 1)
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
    num_modules: number of modules, one for each depth; null: module 0 at every depth, or all modules of a family whose
        engines run one for each depth
    lora_rank: rank of trained matrices beside those of its linear layers, experts excepted; null: all but the router is
        trained
    zero_first: whether the embedding in the first slot of a text is zero; null: as vLLM runs the family
    engine: engine that will run it: by RAW_STATES, the next step reads the state before the last norm, or behind it
    layout: name in LAYOUTS; null: the source's
    """

    changeable_arguments = ("zero_first", "engine", "lora_rank")

    def __init__(
        self,
        target: Target,
        *,
        source: Text | None = "target",
        num_modules: SmallCount | None = None,
        lora_rank: Width | None = None,
        zero_first: bool | None = None,
        engine: Literal["vllm", "sglang"] = "vllm",
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
            layout, self.published, num_modules = spec["layout"], spec["published"], spec["num_modules"]
        self.layout = layout or FAMILIES.get(target.config.model_type)
        native_layout = _check_layout(target, self.layout, num_modules, vocab)
        if native_layout.distinct:
            num_modules = num_modules or max(1, getattr(target.config, "num_nextn_predict_layers", 1))
        self.depth, self.context_kind = num_modules, "path" if num_modules is None else "depth"
        self.zero_first = native_layout.zero_first if zero_first is None else zero_first
        self.engine, self.reads_raw = engine, native_layout.reads_raw
        self.shares_output = "head" not in native_layout.outer_names
        self.target_layers = target.layer_ids([-1])
        self.modules_by_depth = nn.ModuleList(
            NativeModule(target, native_layout, number=k) for k in range(num_modules or 1)
        )
        self.layer_config = make_layer_config(target.config, native_layout, 0)
        self.kinds = native_layout.list_kinds(target.config)
        self.hold_window(self.layout_window)
        rotary = getattr(target.decoder, "rotary_emb", None)
        self.rotary = None if native_layout.chain else type(cast(Any, rotary))(config=self.layer_config)
        self.pretrained = tensors is not None
        if tensors is not None:
            self.load_state_dict(tensors)
        else:
            self.apply(target.model._init_weights)
        self._rank: int | None = None
        self.lora_rank = lora_rank

    @property
    def layout_window(self) -> int | None:
        """Positions that a module of this family sees; None: all."""
        return self.layer_config.sliding_window if SLIDING in self.kinds else None

    def with_window(self, window):
        if window is not None and self.layout_window is not None:
            raise ValueError(
                f"window={window}: {self.target.name}'s own modules see {self.layout_window:,} positions: give null."
            )
        return super().with_window(window)

    @property
    def estimates_state(self) -> bool:  # type: ignore[override]
        """Whether the next step reads the state behind the last norm, as the module does first."""
        return not self.reads_raw_states(self.engine)

    def reads_raw_states(self, engine: str) -> bool:
        """Whether the next step reads the state before the last norm in this engine."""
        return engine in RAW_STATES.get(self.target.config.model_type, ())

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
        settings = {"zero_first": self.zero_first, "engine": self.engine, "layout": self.layout}
        return {"source": None, "lora_rank": None, "num_modules": self.depth, **settings, **published}

    def cache(self, batch: int) -> RowCache:
        config = self.layer_config
        keys, width = config.num_key_value_heads, getattr(config, "head_dim", None)
        if getattr(config, "kv_lora_rank", None):  # latent attention: keys and values as it expands them
            keys, width = config.num_attention_heads, config.qk_nope_head_dim + config.qk_rope_head_dim
        width = width or self.target.width // config.num_attention_heads
        heads = {"num_attention_heads": config.num_attention_heads, "num_key_value_heads": keys}
        shape = LlamaConfig(hidden_size=width * config.num_attention_heads, head_dim=width, **heads)
        masked = self.context_kind == "depth"
        return make_row_cache(shape, self.module(1).enorm.weight, layers=self.depth or 1, batch=batch, masked=masked)

    def encode(self, features):
        h = super().encode(features)
        if not self.reads_raw:
            return h
        weight = self.target.norm(torch.ones_like(h[:1, :1]))  # the module's own norm makes the size of h equal again
        return h / torch.where(weight == 0, 1.0, weight)

    def logits(self, d, readout):
        head = self.module(d).head
        return super().logits(d, readout) if head is None else head(readout)

    def step(self, d, h, tokens, positions, mask, cache):
        embedding = self.embed_inputs(tokens, positions)
        # Multimodal models turn by positions in time, height and width, which are equal in a text
        angles = positions.expand(3, -1, -1) if hasattr(self.rotary, "mrope_section") else positions
        kind = self.kinds if hasattr(self.rotary, "layer_types") else []  # angles may differ by kind of layer
        rotary = None if self.rotary is None else self.rotary(h, angles, *kind)
        (seen,) = self.narrow_keys(mask, d, positions)
        raw, normed = self.module(d)(embedding, h, rotary, positions, seen, cache)
        return normed if self.estimates_state else raw, normed


# Reading and naming the tensors of a model's own files


def list_checkpoint_places(
    drafter: NativeMTP, shards: Shards | None, prefix: str
) -> dict[str, list[tuple[str, tuple]]]:
    """For each tensor of the drafter its plain names in the checkpoint, each with its index in the tensor; (): the
    whole tensor.

    shards: the checkpoint; None: a new one, in which each expert has its own tensors
    """
    layout, places = LAYOUTS[str(drafter.layout)], {}
    for number, module in enumerate(drafter.modules_by_depth):
        state = module.state_dict()
        for key, name in layout.tensor_names(state, number, drafter.target.num_layers + number).items():
            name = prefix + name
            is_split = key.endswith(EXPERTS) and (shards is None or dequantise.find_form(shards, name) is None)
            tensor_places = list_expert_places(name, state[key].shape) if is_split else [(name, ())]
            places[f"modules_by_depth.{number}.{key}"] = list(tensor_places)
    return places


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
    if LAYOUTS[layout].distinct and num_modules is None:
        num_modules = count_modules(shards, layout, prefix, target.num_layers)
    with torch.device("meta"):
        empty = NativeMTP(target, source=None, num_modules=num_modules, layout=layout)
    tensors: dict[str, Tensor] = {}
    names: list[str] = []
    places = list_checkpoint_places(empty, shards, prefix)
    for key, outline in empty.state_dict().items():
        tensors[key], stored_names = _read_tensor(name, shards, outline, places[key], target.name)
        names += stored_names
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
    spec = {"_target_": "specdec.heads.native.NativeMTP", **empty.arguments()}
    return {**spec, "published": published}, tensors


def _require_layout(name: str, shards: Shards, target: Target) -> tuple[str, str]:
    """The result of `find_layout`. Raises ValueError for files without modules of a known layout."""
    layout_and_prefix = find_layout(shards, target.num_layers, target.config.model_type)
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
) -> tuple[Tensor, list[str]]:
    """A tensor of a module, put together from its places in the files, and its names there.

    outline: a tensor of its shape; places: plain names, each with its index in the tensor
    A quantised one is in float32. Raises ValueError if one is missing or unfit.
    """
    tensor, names = torch.empty(0), cast(list[str], [])
    for plain_name, index in places:
        form = dequantise.find_form(shards, plain_name)
        if form is None:
            raise ValueError(f"{name} lacks {plain_name}, which its MTP module needs: take a complete copy of it.")
        value = form.compute()
        if not tensor.numel():
            tensor = torch.empty(outline.shape, dtype=value.dtype)
        if value.shape != tensor[index].shape:
            raise ValueError(
                f"{name}: {plain_name} has the shape {list(value.shape)}, and for {target_name} it would be "
                f"{list(tensor[index].shape)}. Take a model of the target's family and width."
            )
        tensor[index] = value
        names += form.stored.values()
    return tensor, names


def _check_all_read(name: str, shards: Shards, read: set[str], drafter: NativeMTP, prefix: str) -> None:
    """Raises ValueError for tensors of these modules that belong to no tensor of the drafter."""
    layout = LAYOUTS[str(drafter.layout)]
    for number in range(len(drafter.modules_by_depth)):
        block = prefix + layout.layer_name.format(number=number, layer=drafter.target.num_layers + number) + "."
        inside = (key for key in shards.files.keys() - read if key.startswith(block))
        unread = sorted(
            key for key in inside if not key.endswith(layout.copies) and not dequantise.ACTIVATION_SCALES.fullmatch(key)
        )
        if unread:
            raise ValueError(
                f"{name}: its MTP module has {unread[0]}, which belongs to nothing in a layer of "
                f"{drafter.target.name}. Take the module of another model: checkpoint=MODEL target.name=THIS."
            )
