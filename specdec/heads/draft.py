"""Draft models: a separate small causal LM, distilled for the target (DistillSpec, 2310.08461)."""

import copy
from typing import cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specdec.core.cache import RowCache
from specdec.core.masks import causal_mask
from specdec.core.option_types import Integer, SmallCount, Text, Width, Window
from specdec.heads.base import Drafter
from specdec.heads.blocks import (
    find_attention_heads,
    find_mlp_width,
    list_fields,
    make_llama_config,
    measure_embedding_scale,
    measure_norm_gain,
    read_embedding_rows,
)
from specdec.target import attention
from specdec.target.adapter import NEEDS_PEFT
from specdec.target.loading import load_tokenizer
from specdec.target.model import Target
from specdec.target.structure import find_experts

DEFAULT_LAYERS = 2


class Draft(Drafter):
    """A small LM of the target's architecture (the default), a small Llama (`width`), or an existing model (`model`).

    num_layers: number of layers; null: as many as copy_layers names, or 2
    width: width of a new Llama with attention heads as wide as those of any other head (blocks.py); null: the target's
        width and architecture. If the target has windows, recurrent layers, experts, or scaled or capped logits, null
        makes a Llama of its width (see `has_copyable_layers`)
    intermediate_size: width of the MLP; null: the target's, in proportion to the width
    copy_layers: for each layer the number of the target's layer (0 .. L-1, or -L .. -1) that it starts from; []: random
        weights; null: layers at equal distances from the first to the last if they have the target's shape, else none
    borrow_embeddings: whether embedding and LM head are the target's, with its scales, frozen and not saved; null: if
        the width is the target's. Its own are trained, and start as copies of the target's if the width is the same
    model: folder or Hub name of an existing causal LM with the target's tokenizer, to distil further in float32; or the
        result of `load_existing`
    lora: arguments of peft.LoraConfig, such as {r: 16, lora_alpha: 32}. Only adapters on `model` or on copied layers
        are trained, and `frozen_copy` merges them
    config: configuration of a checkpoint's model, whose weights are loaded afterwards
    window: positions that a layer sees, its own included; null: all

    Raises ValueError for arguments that exclude each other.
    """

    context_kind = "text"
    reads_pieces = False  # its layers are of transformers: pieces of a prompt are read under masks

    def __init__(
        self,
        target: Target,
        *,
        num_layers: SmallCount | None = None,
        width: Width | None = None,
        intermediate_size: Width | None = None,
        copy_layers: list[Integer] | None = None,
        borrow_embeddings: bool | None = None,
        model: Text | Target | None = None,
        lora: dict | None = None,
        config: dict | None = None,
        window: Window | None = None,
        vocab: Tensor | None = None,
    ):
        super().__init__(target, vocab=vocab)
        self.hold_window(window)
        self.depth, self.target_layers = None, ()
        self.pretrained = model is not None
        if config is not None and (model is not None or lora is not None):
            raise ValueError("A draft of a saved configuration takes neither model nor lora; its weights are merged.")
        sizes = {"num_layers": num_layers, "width": width, "intermediate_size": intermediate_size}
        lm, borrows, copied = _make_first_model(
            target, sizes, copy_layers=copy_layers, borrow_embeddings=borrow_embeddings, model=model, config=config
        )
        self.config = lm.config
        _, num_heads, head_dim = find_attention_heads(list_fields(lm.config), lm.width)
        self.cache_shape = {"num_layers": lm.num_layers, "num_heads": num_heads, "head_dim": head_dim}
        self.body = lm.decoder.requires_grad_(True)  # with adapters, peft's wrapper around it
        self.cache_argument = lm.cache_argument
        self.borrows = borrows
        self.lm_head: nn.Linear | None = None  # trained; None if it is borrowed or tied to the embedding
        if borrows:
            self.body.set_input_embeddings(None)
        else:
            if lm.lm_head.bias is not None:
                raise ValueError(
                    f"model={model} has an LM head with a bias, which a draft model has not: take another."
                )
            if lm.lm_head.weight is not lm.embed.weight:
                self.lm_head = lm.lm_head.requires_grad_(True)
        self.adapted = lora is not None
        if lora is not None:
            if model is None and not copied:
                raise ValueError(
                    "lora= adapts weights that are worth keeping: set model= or copy_layers= of the target, or "
                    "lora=null."
                )
            self._adapt(lora)
        self._rows: Tensor | None = None  # [W, D] the draft vocabulary's rows of its output layer, see `logits`

    def _adapt(self, lora: dict) -> None:
        try:
            from peft import LoraConfig, LoraModel  # for training only; checkpoints hold merged weights
        except ImportError as error:
            raise ValueError(f"lora={lora} {NEEDS_PEFT}.") from error

        self.requires_grad_(False)
        self.body = LoraModel(self.body, LoraConfig(**lora), "default")

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    def cache(self, batch: int) -> RowCache:
        return RowCache.uniform(**self.cache_shape, batch=batch, dtype=self.dtype, device=self.target.device)

    def encode(self, features: Tensor) -> Tensor:
        return features  # [B, S, 0]: the context is in the cache

    def step(self, d, h, tokens, positions, mask, cache):
        embed = self.target.embed if self.borrows else self.body.get_input_embeddings()
        decoding = isinstance(cache, RowCache)  # the unroll reads the whole text at once
        num = tokens.shape[1]
        if mask is None and self.window is not None and self.window < num:
            mask = causal_mask(num, tokens.device).expand(len(tokens), 1, num, num)
        if mask is not None:
            (mask,) = self.narrow_keys(mask, d, positions)
        output = self.body(
            inputs_embeds=embed(tokens).to(self.dtype),
            position_ids=positions,
            attention_mask=mask,
            use_cache=decoding,
            **{self.cache_argument: cache if decoding else None},
        )
        return h, output.last_hidden_state

    def logits(self, d, readout):
        if self.borrows:
            return self.goal_logits(readout)
        weight = (self.lm_head or self.body.get_input_embeddings()).weight  # [V, D]
        if self.draft_to_target is None:
            return nn.functional.linear(readout, weight)
        if self.training or torch.is_grad_enabled():
            return nn.functional.linear(readout, weight[self.draft_to_target])
        if self._rows is None:  # they do not change before the next `train`, so the steps of decoding share one copy
            self._rows = weight[self.draft_to_target]
        return nn.functional.linear(readout, self._rows)

    def train(self, mode=True):
        self._rows = None
        return super().train(mode)

    def frozen_copy(self) -> "Draft":
        frozen = cast(Draft, super().frozen_copy())
        if frozen.adapted:
            frozen.body, frozen.adapted = frozen.body.merge_and_unload(), False
        return frozen

    def arguments(self) -> dict:
        assert not self.adapted, "save what `frozen_copy` returns"
        origin = dict.fromkeys(["num_layers", "width", "intermediate_size", "copy_layers", "model", "lora"])
        return {**origin, "borrow_embeddings": self.borrows, "config": self.config.to_dict()}

    def language_model(self, dtype: torch.dtype) -> PreTrainedModel:
        """A copy as a transformers model: a causal LM over all V tokens that shares no tensors.

        Copies of borrowed embeddings and LM heads hold the scales that the target has outside of its weights. Caps of
        logits are left out, which keeps their order. Raises ValueError for a borrowed LM head with a bias that the
        draft's architecture lacks.
        """
        frozen, target = self.frozen_copy(), self.target
        model = AutoModelForCausalLM.from_config(self.config, dtype=dtype, attn_implementation=attention.IMPLEMENTATION)
        decoder, head = model.get_decoder(), model.get_output_embeddings()
        if self.borrows:
            if target.lm_head.bias is not None and head.bias is None:
                raise ValueError(
                    f"The LM head of {target.name} has a bias, for which a draft of the kind {self.config.model_type} "
                    "has no place. Train with borrow_embeddings=false, or take format=safetensors."
                )
            embedding = decoder.get_input_embeddings()
            name = next(name for name, module in decoder.named_modules() if module is embedding)
            same_class = type(embedding) is type(target.embed)  # then it scales as the target's does
            rows = target.embed.weight if same_class else read_embedding_rows(target)
            decoder.load_state_dict({**frozen.body.state_dict(), f"{name}.weight": rows})
            if head.weight is not embedding.weight:
                head.weight.data.copy_(target.shape_logits.scale * target.lm_head.weight)
            if head.bias is not None:
                head.bias.data.copy_(target.lm_head.bias)
        else:
            decoder.load_state_dict(frozen.body.state_dict())
            if frozen.lm_head is not None:  # else it is the embedding
                head.load_state_dict(frozen.lm_head.state_dict())
        model.generation_config = copy.deepcopy(target.model.generation_config)
        return model.eval()


def has_copyable_layers(target: Target) -> bool:
    """Whether some of the target's layers make a language model: they are alike and dense, and kept as Llama keeps
    them.

    Drafts for other targets are small Llamas: two layers of a mixture hold all of its experts, and the cache of drafts
    has no place for a window or a recurrent state.
    """
    children = {name for name, _ in target.decoder.named_children()}
    return target.plain and {"layers", "norm"} <= children and find_experts(target.config.to_dict()) is None


def _make_model(config: PreTrainedConfig) -> Target:
    """A model with random weights as a `Target`, with its names of modules and its refusals."""
    model = AutoModelForCausalLM.from_config(
        config, dtype=torch.get_default_dtype(), attn_implementation=attention.IMPLEMENTATION, trust_remote_code=False
    )
    return Target(model, name="the draft")


def _make_config(target: Target, width: int | None, num_layers: int, intermediate_size: int | None) -> PreTrainedConfig:
    """The target's configuration with num_layers layers, or a Llama's if the width differs or layers are not
    copyable.
    """
    same_width = width in (None, target.width)
    if same_width and has_copyable_layers(target):
        tied = target.lm_head.weight is target.embed.weight
        fields = target.config.to_dict() | {"num_hidden_layers": num_layers, "tie_word_embeddings": tied}
        if fields.get("layer_types"):
            fields["layer_types"] = fields["layer_types"][:1] * num_layers  # all equal: the target is plain
        fields.pop("quantization_config", None)
        if intermediate_size:
            fields["intermediate_size"] = intermediate_size
        return AutoConfig.for_model(**fields)
    return _make_llama_config(target, width or target.width, num_layers, intermediate_size)


def _make_llama_config(target: Target, width: int, num_layers: int, intermediate_size: int | None) -> PreTrainedConfig:
    """The configuration of a Llama of this width, with the target's tokens and attention heads of the target's
    width.
    """
    fields = list_fields(target.config)
    config = make_llama_config(
        target, intermediate_size=intermediate_size or find_mlp_width(fields, target.width) * width // target.width
    )
    queries, keys, head_dim = find_attention_heads(fields, target.width)
    num_heads, group = queries, queries // keys
    if width != target.width:
        if width % head_dim:
            raise ValueError(f"width={width} must be a multiple of {head_dim}, the width of an attention head.")
        num_heads = width // head_dim
    # With a scale the embedding and the LM head are different matrices
    scaled = target.shape_logits.scale != 1 or measure_embedding_scale(target) != 1
    config.update(
        {
            "hidden_size": width,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads // group if num_heads % group == 0 else num_heads,
            "vocab_size": target.vocab_size,
            "tie_word_embeddings": target.lm_head.weight is target.embed.weight and not scaled,
            "bos_token_id": fields.get("bos_token_id"),
            "eos_token_id": fields.get("eos_token_id"),
        }
    )
    return config


def _choose_copied_layers(
    target: Target, num_layers: int | None, copy_layers: list[int] | None, *, possible: bool
) -> list[int]:
    """Numbers of the target's layers from which the draft's start, in order; none: random weights.

    possible: whether the draft's layers have the shape of the target's. Raises ValueError for layers that do not fit.
    """
    if copy_layers is None:
        num = num_layers or DEFAULT_LAYERS
        last = target.num_layers - 1
        possible = possible and target.quantisation is None
        return [round(i * last / max(1, num - 1)) for i in range(num)] if possible else []
    if not copy_layers:
        return []
    if target.quantisation is not None:
        raise ValueError(
            f"{target.name} is quantised ({target.quantisation}), so its layers cannot be copied: set copy_layers=[]."
        )
    if not possible:
        raise ValueError(
            "copy_layers= needs layers of the target's shape: leave width and intermediate_size null, or "
            "set copy_layers=[], as for targets with windows, recurrent layers, experts or scaled logits."
        )
    if num_layers not in (None, len(copy_layers)):
        raise ValueError(
            f"copy_layers={list(copy_layers)} must name a layer for each of num_layers={num_layers}, or leave "
            "num_layers null."
        )
    return _resolve_layers(target, copy_layers)


def _resolve_layers(target: Target, numbers: list[int]) -> list[int]:
    """Numbers of layers from 0. Raises ValueError for layers that the target lacks."""
    if any(not -target.num_layers <= number < target.num_layers for number in numbers):
        raise ValueError(
            f"copy_layers={list(numbers)}: {target.name} has layers 0..{target.num_layers - 1} "
            f"(or -{target.num_layers}..-1)."
        )
    return [number % target.num_layers for number in numbers]


def load_existing(target: Target, name: str, *, dtype: str) -> tuple[Target, Tensor | None]:
    """Loads a model whose tokens are the target's, with vocabulary rows cut or padded to the target's V.

    Returns the model, on the target's device, and the increasing ids [W] that it can draft, those of both tokenizers;
    None: all, because the tokenizers are equal. Raises ValueError, beginning with model=, for a model that does not
        fit.
    """
    try:
        lm = Target.load(name, dtype=dtype, device=target.device)
        target_texts = _read_texts(target.name, trust_remote_code=target.trust_remote_code)
        draft_texts = _read_texts(name)
    except ValueError as error:
        raise ValueError(f"model={name}: {error}") from error
    if not lm.plain:
        raise ValueError(
            f"model={name} has {_name_unlike_layers(lm)}, and a draft's layers must keep entries for the whole text. "
            "Take a model whose layers all use full attention, or leave model null, which makes a new draft."
        )
    shared = sorted(target_texts.keys() & draft_texts.keys())
    unlike_ids = [id for id in shared if target_texts[id] != draft_texts[id]]
    if unlike_ids or not shared:
        difference = "no id is in both"
        if unlike_ids:
            id = unlike_ids[0]
            texts = f"{draft_texts[id]!r} and not {target_texts[id]!r}"
            difference = f"{len(unlike_ids)} of its ids mean other texts, such as {id}: {texts}"
        raise ValueError(
            f"model={name} has another tokenizer than {target.name}: {difference}. Take a smaller model of the "
            "target's family, or train the head `draft`."
        )
    lm = _resize_vocabulary(lm, target.vocab_size)
    drafted_ids = torch.tensor([id for id in shared if id < target.vocab_size])
    return lm, None if target_texts.keys() == draft_texts.keys() else drafted_ids


def _read_texts(name: str, *, trust_remote_code: bool = False) -> dict[int, str]:
    """The text of each token id of a model's tokenizer."""
    tokenizer = load_tokenizer(name, trust_remote_code=trust_remote_code)
    return {id: text for text, id in tokenizer.get_vocab().items()}


def _name_unlike_layers(lm: Target) -> str:
    """The property of a model that keeps it from being a draft, for a message."""
    if lm.recurrent:
        return "recurrent layers"
    if lm.adds_masks or lm.penalises_distance:
        return "an attention of its own"
    return "windows" if lm.windowed else "scaled logits or unlike layers"


def _resize_vocabulary(lm: Target, num_rows: int) -> Target:
    """A model with this number of vocabulary rows. An added row is the mean of all others, so its logit is no
    maximum.
    """
    old_rows = lm.vocab_size
    if old_rows == num_rows:
        return lm
    lm.model.resize_token_embeddings(num_rows, mean_resizing=False)
    for layer in (lm.model.get_input_embeddings(), lm.model.get_output_embeddings()):
        weight = cast(nn.Embedding, layer).weight.data
        weight[old_rows:] = weight[:old_rows].mean(0)
    return Target(lm.model, name=lm.name)


def _make_first_model(
    target: Target,
    sizes: dict[str, int | None],
    *,
    copy_layers: list[int] | None,
    borrow_embeddings: bool | None,
    model: str | Target | None,
    config: dict | None,
) -> tuple[Target, bool, list[int]]:
    """The language model of a draft: of a saved configuration, an existing one, or a new one. Arguments as of `Draft`

    Returns the model, whether it borrows the target's embeddings, and the numbers of the target's copied layers.
    """
    if config is not None:
        return _make_model(AutoConfig.for_model(**config)), bool(borrow_embeddings), []
    if model is not None:
        if borrow_embeddings or any(argument is not None for argument in (*sizes.values(), copy_layers)):
            raise ValueError(
                f"model={model} brings its layers and embeddings: leave num_layers, width, "
                "intermediate_size, copy_layers and borrow_embeddings null."
            )
        return load_existing(target, model, dtype="float32")[0] if isinstance(model, str) else model, False, []
    return _make_new_model(target, *sizes.values(), copy_layers=copy_layers, borrow_embeddings=borrow_embeddings)


def _make_new_model(
    target: Target,
    num_layers: int | None,
    width: int | None,
    intermediate_size: int | None,
    *,
    copy_layers: list[int] | None,
    borrow_embeddings: bool | None,
) -> tuple[Target, bool, list[int]]:
    """A new language model. Arguments as of `Draft`, result as of `_make_first_model`"""
    same_width = width in (None, target.width) and target.embed.weight.shape[1] == target.width
    copies = same_width and has_copyable_layers(target)
    copied = _choose_copied_layers(target, num_layers, copy_layers, possible=copies and intermediate_size is None)
    lm = _make_model(_make_config(target, width, num_layers or len(copied) or DEFAULT_LAYERS, intermediate_size))
    borrows = same_width if borrow_embeddings is None else borrow_embeddings
    if borrows and not same_width:
        raise ValueError(
            f"width={width}: the target's embeddings have {target.embed.weight.shape[1]}, so they cannot be "
            "borrowed; set borrow_embeddings=false, or width=null."
        )
    for layer, number in zip(lm.layers, copied):
        layer.load_state_dict(target.layer_state(number))
    if same_width:
        _copy_ends(target, lm, same_class=copies)
    return lm, borrows, copied


def _copy_ends(target: Target, lm: Target, *, same_class: bool) -> None:
    """Starts a model's embedding, last norm and LM head as the target's. same_class: whether they are built alike"""
    if same_class:
        lm.norm.load_state_dict(target.norm.state_dict())
        lm.embed.load_state_dict(target.embed.state_dict())
        lm.lm_head.load_state_dict(target.lm_head.state_dict())
        return
    lm.norm.weight.data.copy_(measure_norm_gain(target))  # type: ignore[operator]
    lm.embed.weight.data.copy_(read_embedding_rows(target))
    lm.lm_head.weight.data.copy_(target.shape_logits.scale * target.lm_head.weight)
