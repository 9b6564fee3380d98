"""The frozen model whose decoding is accelerated.

A target without its layers has the embedding, the final norm and the LM head. Heads and losses need no more beside
features that another process computes (an engine, or files). It has no `read`.

Only the files of this folder and core/cache.py use the inside of a transformers model.
"""

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedConfig, PreTrainedModel

from specdec.core import cached_keys, fast, files, masks, precision
from specdec.core.cache import RowCache, find_cache_argument
from specdec.core.cached_keys import CachedKeys, Piece
from specdec.core.compile import decodes_joined, join_products, run_block
from specdec.core.devices import name_cause, upload_values
from specdec.core.layer_states import LayerStates
from specdec.core.shards import Shards
from specdec.core.varlen import Segments
from specdec.target import alibi, attention, fused_attention, loading, mixers, sharding
from specdec.target import structure as target_structure
from specdec.target.fingerprint import UNREAD, Fingerprint, WeightSource, fingerprint_embeddings
from specdec.target.loading import DTYPES as DTYPES
from specdec.target.loading import (
    choose_dtype,
    find_devices,
    gather_tensor,
    load_model,
    load_skeleton,
)
from specdec.target.loading import load_tokenizer as load_tokenizer
from specdec.target.quantised import name_quantisation
from specdec.target.sharding import Share
from specdec.target.structure import LogitShape, check_supported

MAX_DIFFERENCE = 0.05  # upper bound of the relative difference of results in 16 bits between two attention paths


def _run_layer(forward: Callable, layer: nn.Module, *args, **kwargs):
    """A layer's own `forward`, compiled in a pass over segments."""
    if kwargs.get("segments") is None or torch.is_grad_enabled():
        return forward(layer, *args, **kwargs)
    return run_block(forward, layer, *args, **kwargs)


@dataclass(frozen=True)
class TargetOutput:
    """The target's states at every position. `Target.logits(final)` makes logits, for a few positions at a time."""

    features: Tensor  # [B, T, F*D] requested hidden states, side by side; zero width for none
    final: Tensor  # [B, T, D] states behind the last norm


class Target:
    """A frozen causal language model, with one interface for all families of transformers.

    Hidden states are numbered as in transformers' `output_hidden_states`: 0 is the embedding, k the residual stream
    after k layers, `num_layers` (or -1) the state after the final norm, which the LM head reads.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        name: str,
        quantisation: str | None = None,
        trust_remote_code: bool = False,
        share: Share | None = None,
        shards: Shards | None = None,
        outline: bool = False,
    ):
        """Takes a model, examines it, and checks its logits. Raises ValueError for a model that cannot be a target.

        quantisation: method of the checkpoint, if the model's configuration does not name it
        trust_remote_code: whether the user allowed code that comes with the model, which its tokenizer may have too
        share: processes that hold the model together; None: this process alone
        shards: files of its weights, from which parameters before and behind the layers get missing values
        outline: whether parameters get no values: checks that need values are left out
        """
        self.config = config = model.config.get_text_config(decoder=True)
        check_supported(config, name)
        attention.avoid_cudnn()
        self.model = model.eval().requires_grad_(False)
        self.name, self.trust_remote_code, self.share = name, trust_remote_code, share or Share()
        self.decoder = target_structure.find_decoder(model)
        self.cache_argument = find_cache_argument(self.decoder.forward)
        self.embed = cast(nn.Embedding, model.get_input_embeddings())
        self.lm_head = cast(nn.Linear, model.get_output_embeddings())
        self.width: int = config.hidden_size
        self.max_positions = target_structure.find_max_positions(config)
        self.rotary_boundary = target_structure.find_rotary_boundary(config)
        self.adds_masks = attention.choose_implementation(type(model)) == "eager"
        self.mixer_calls: dict[str, mixers.MixerCall] = {}  # calls of mixers, by the group of layers
        self.penalises_distance = alibi.take_positions(self.decoder)
        self.quantisation = quantisation or name_quantisation(
            model.config
        )  # method, such as bitsandbytes-4bit; None: not quantised
        self.shards = shards
        self._compiles = self._fuses = False
        self.whole = shards is None or not any(parameter.is_meta for parameter in model.parameters())
        self.shape_logits = LogitShape.from_config(config)
        self.layers = target_structure.find_layers(self.decoder, config.num_hidden_layers, name)
        self.num_layers = len(self.layers)
        unread_shards = None if self.whole else shards
        if unread_shards is not None:
            loading.fill_ends(model, (self.embed, self.lm_head), unread_shards)
        self.layer_kinds = target_structure.find_layer_kinds(model, config, name)
        self._find_norm_and_entries()
        if unread_shards is not None:
            loading.fill_ends(model, (self.norm,), unread_shards)
        ends: dict[str, nn.Module] = {"embed": self.embed, "norm": self.norm, "head": self.lm_head}
        source = WeightSource(model, ends, self.quantisation, shards, whole=self.whole)
        self.identity = Fingerprint.from_text(UNREAD) if outline else source.make_fingerprint()
        if shards is not None:
            shards.close()
        if self.whole and not outline:
            self._check_logits()

    @classmethod
    def load(
        cls,
        name: str,
        *,
        dtype: str = "auto",
        device="cpu",
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> "Target":
        """Loads a target. Raises ValueError with advice.

        name: a folder, or a name on the Hugging Face Hub; device: a device, or "auto" (target/loading.py)
        dtype: a name in loading.DTYPES for weights that are not quantised; "auto": the device's (core/precision.py)
        """
        name = files.expand_home(name)
        model, quantisation, shards = load_model(
            name, dtype=dtype, device=device, revision=revision, trust_remote_code=trust_remote_code
        )
        if decodes_joined(model.device) and getattr(model, "hf_quantizer", None) is None:  # plain weights
            join_products(model)
        return cls(model, name=name, quantisation=quantisation, trust_remote_code=trust_remote_code, shards=shards)

    @classmethod
    def load_ends(cls, name: str, *, dtype: str = "auto", device="cpu", **origin: Any) -> "Target":
        """A target without its layers, read from its safetensors files; arguments as of `load`, but one device."""
        name, dtype = files.expand_home(name), choose_dtype(dtype, find_devices(device)[0])
        model, quantisation = load_skeleton(name, dtype=dtype, **origin)
        shards = loading.open_shards(name, model.config, revision=origin.get("revision"))
        loading.untie_parameters(model, shards)
        trusted = origin.get("trust_remote_code", False)
        target = cls(model, name=name, quantisation=quantisation, trust_remote_code=trusted, shards=shards)
        for module in (target.embed, target.lm_head, target.norm):
            module.to(device)
        return target

    @classmethod
    def outline(
        cls, config: PreTrainedConfig, *, name: str, dtype: str = "bfloat16", trust_remote_code: bool = False
    ) -> "Target":
        """A target with shapes and without values (device meta), for counting. config: result of `load_config`"""
        model, quantisation = loading.make_skeleton(config, name, dtype=dtype, trust_remote_code=trust_remote_code)
        return cls(model, name=name, quantisation=quantisation, outline=True)

    @classmethod
    def load_sharded(cls, name: str, mesh: DeviceMesh, *, dtype: str = "auto", device="cpu", **origin: Any) -> "Target":
        """A target whose layers are divided among the processes of a mesh (target/sharding.py). All of them call this.

        Other arguments as of `load`, but one device.
        """
        name = files.expand_home(name)
        model, share, shards = sharding.load_sharded(name, mesh, dtype=dtype, device=device, **origin)
        trusted = origin.get("trust_remote_code", False)
        target = cls(model, name=name, trust_remote_code=trusted, share=share, shards=shards)
        if target.recurrent:
            raise ValueError(
                f"{name} has recurrent or convolution layers, which decoding runs alone again to take back drafts; "
                "with shard=true their weights are gone by then. Use shard=false."
            )
        return target

    def layer_state(self, number: int) -> dict[str, Tensor]:
        """The parameters of a layer, from the files if the target has no layers."""
        layer = self.layers[number]
        if self.shards is not None and not self.whole:
            return loading.read_module(self.model, layer, self.shards)
        return {name: gather_tensor(value) for name, value in layer.state_dict().items()}

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def vocab_size(self) -> int:
        return self.lm_head.weight.shape[0]

    @property
    def adapted(self) -> bool:
        """Whether a drafter has put its adapter into this target (specdec/target/adapter.py)."""
        return bool(self.adapted_layers())

    def adapted_layers(self) -> list[nn.Module]:
        """The layers that have LoRA matrices."""
        return [module for module in self.model.modules() if "lora_A" in vars(module).get("_modules", {})]

    def fingerprint(self) -> str:
        """A text that identifies weights and configuration (target/fingerprint.py), in every dtype and with an adapter.

        It is v2. with 16 hex digits, and the method of a quantised target: v2.0123456789abcdef-bitsandbytes-4bit.
        """
        return self.identity.text

    def matches(self, stored: object) -> bool:
        """Whether a stored fingerprint is this target's."""
        return self.identity.matches(stored)

    def embeddings_fingerprint(self) -> str:
        """16 hex digits that identify the parts which a target shares with its quantised forms."""
        return fingerprint_embeddings({"embed": self.embed, "norm": self.norm}, self.config)

    def layer_ids(self, layers: list[int] | tuple[int, ...]) -> tuple[int, ...]:
        """Numbers of hidden states with the negative ones resolved (-1 is the final state).

        Raises ValueError unless they are strictly increasing and in range.
        """
        ids = tuple(k if k >= 0 else self.num_layers + 1 + k for k in layers)
        if any(a >= b for a, b in zip(ids, ids[1:])) or any(not 0 <= k <= self.num_layers for k in ids):
            raise ValueError(
                f"target_layers={list(layers)}: {self.name} has hidden states 0..{self.num_layers} "
                f"({self.num_layers} is the final, normed one, also written -1); they must be strictly increasing."
            )
        return ids

    @property
    def recurrent(self) -> bool:
        """Whether some layers keep a state, which no mask can cut: such a target verifies chains only."""
        return bool(self.mixers)

    @property
    def windowed(self) -> bool:
        """Whether some layers see only a window or a chunk of positions."""
        return self.layer_kinds.windowed

    @property
    def masks_positions(self) -> bool:
        """Whether what a query sees of a key depends on positions: windows, penalties for distance"""
        return self.windowed or self.penalises_distance

    @property
    def plain(self) -> bool:
        """Whether all layers have full attention under a mask alone, entries of one shape, and plain logits."""
        shapes = {shape and (shape.num_heads, shape.width, shape.dtype) for shape in self._shapes}
        alike = len(shapes) == 1 and len(self._shapes) == 2 * self.num_layers
        unlike = self.recurrent or self.masks_positions or self.adds_masks
        return alike and not unlike and self.shape_logits.plain

    @property
    def on_several_devices(self) -> bool:
        """Whether its layers are on several devices."""
        return len({shape.device for shape in self._shapes if shape is not None}) > 1

    @property
    def entry_bytes(self) -> int:
        """Bytes of K and V of one token, in all layers."""
        return sum(shape.num_bytes for shape in self._shapes if shape is not None)

    @property
    def layer_types(self) -> list[str]:
        """The kind of every layer, as target/structure.py names them."""
        if self.layer_kinds.names is None:
            return [self.layer_kinds.default_kind] * self.num_layers
        return list(self.config.layer_types)[: self.num_layers]

    def cache(self, batch: int, *, masked: bool = False) -> RowCache:
        """An empty cache for `batch` rows. masked: whether all passes read it under a mask"""
        states = LayerStates(target_structure.make_state_layers(self.config)) if self.recurrent else None
        heads = None if masked or not self.reads_length else self.config.num_attention_heads
        if heads is not None:
            self._fuse_attention()
        return RowCache(self._shapes, batch=batch, device=self.device, states=states, query_heads=heads)

    def make_draft_mask(self, ancestors: Tensor, cache: RowCache) -> "Tensor | tuple[CachedKeys, ...]":
        """The mask of a pass over drafts, for `read`. ancestors [B, S, S] or [S, S] bool: visible drafts of each
        draft
        """
        if cache.query_heads is None:
            return masks.pending_mask(ancestors, cache.lengths, cache.visible)
        return tuple(cache.find_cached_keys(ancestors, window=window) for window in self.layer_kinds.windows)

    def read(
        self,
        tokens: Tensor,
        hidden_states: tuple[int, ...],
        *,
        positions: Tensor | None = None,
        mask: Tensor | tuple[CachedKeys, ...] | Piece | None = None,
        cache: RowCache | None = None,
        segments: Segments | None = None,
        documents: masks.Documents | None = None,
        gradient: bool = False,
    ) -> TargetOutput:
        """Reads tokens [B, S] at positions [B, S]. Returns the final states, and the features that hidden_states name.

        hidden_states: numbers of the hidden states of `features`, as `layer_ids` returns them
        mask [B, 1, S, keys] bool: True where a query may attend, or as of `make_draft_mask`, or a piece; None: causal
        cache: a cache with `cache.reserve(S)` called
        segments: texts of one row that do not see each other, in place of a mask (where `reads_segments`)
        documents: the same texts as rows, for layers that keep a state
        gradient: whether to keep the graph, for the training of an adapted target
        """
        if not self.whole:
            raise ValueError(
                f"{self.name} was loaded without its layers, so it cannot read texts: load the whole target."
            )
        states: dict[int, Tensor] = {}
        hooks = self._add_hooks(hidden_states, states, cache)
        mask_arguments = self.layer_masks(mask, positions, cache)
        if segments is not None:
            self._compile_blocks()
            mask_arguments = {"attention_mask": self.layer_kinds.make_segment_masks(self.device), "segments": segments}
        try:
            with (
                torch.set_grad_enabled(gradient and torch.is_grad_enabled()),
                mixers.call_by_document(self.mixers.values(), documents),
            ):
                output = self.decoder(
                    input_ids=tokens,
                    position_ids=positions,
                    **mask_arguments,
                    **{self.cache_argument: cache},
                    use_cache=False,  # a cache that is given is used all the same; only a new one would not be made
                )
                states[self.num_layers] = final = output.last_hidden_state.to(self.device)  # [B, S, D]
                features = [states[k].to(self.device) for k in hidden_states]
                return TargetOutput(torch.cat(features, dim=-1) if features else final[..., :0], final)
        finally:
            for hook in hooks:
                hook.remove()

    @property
    def divisible(self) -> bool:
        """Whether texts that are read in pieces have the same states as texts that are read at once.

        Recurrent states and LongRoPE's angles need the whole text.
        """
        return not self.recurrent and self.rotary_boundary is None

    def read_piece(
        self,
        tokens: Tensor,
        hidden_states: tuple[int, ...],
        cache: RowCache,
        counts: list[int] | None = None,
        *,
        maskless: bool | None = None,
    ) -> TargetOutput:
        """Reads tokens [B, S] of all rows behind the entries of the longest one, and commits `counts[b]` of row b.

        counts: None: all; tokens behind them are padding, as the row's text ends in this piece or has ended before
        maskless: whether attention has no mask; None: where it can
        """
        start, (num_rows, length) = cache.get_seq_length(), tokens.shape
        counts = [length] * num_rows if counts is None else counts
        cache.reserve(length, counts)
        positions = torch.arange(start, start + length, device=self.device).expand(num_rows, -1)
        mask: Tensor | Piece = Piece(start)
        if not (self.reads_pieces if maskless is None else maskless):
            mask = masks.pending_mask(masks.causal_mask(length, self.device), cache.lengths, cache.visible)
        output = self.read(tokens, hidden_states, positions=positions, mask=mask, cache=cache)
        cache.commit(upload_values(counts, self.device), counts)
        return output

    def _add_hooks(self, hidden_states: tuple[int, ...], states: dict[int, Tensor], cache: RowCache | None) -> list:
        """Adds hooks that put the inputs of layers into `states`, and those of recurrent layers into the cache."""

        def store_input(k):
            return lambda module, args, kwargs: states.__setitem__(k, args[0] if args else kwargs["hidden_states"])

        points = [(k, self.layers[k]) for k in hidden_states if k < self.num_layers]
        hooks = [point.register_forward_pre_hook(store_input(k), with_kwargs=True) for k, point in points]
        if isinstance(cache, RowCache) and cache.states is not None:
            hooks += [self._watch_mixer(number, mixer, cache) for number, mixer in self.mixers.items()]
        return hooks

    @functools.cached_property
    def reads_segments(self) -> bool:
        """Whether it reads packed texts in one call with equal results, on devices with the kernel: two texts are
        tried.
        """
        if not self._may_try("varlen"):
            return False
        index = torch.tensor([[0] * 3 + [1] * (target_structure.NUM_TOKENS - 3)])
        packed = masks.Packed.from_index(index, keeps_states=self.recurrent).move_to(self.device)
        tokens = self._sample_text()

        def read_pack(pack: Tensor, positions: Tensor, segments: Segments, rows: masks.Documents | None) -> Tensor:
            return self.read(pack, (), positions=positions, segments=segments, documents=rows).final

        def read(together: bool) -> Tensor:
            if together:
                return packed.read(tokens, read_pack)
            texts = tokens.split([3, tokens.shape[1] - 3], dim=1)
            return torch.cat([self.read(text, ()).final for text in texts], dim=1)

        return self._agrees_with_reference("varlen", "several texts in one call", read)

    @functools.cached_property
    def reads_length(self) -> bool:
        """Whether passes over drafts read the cache to its length, with results as under a mask: a tree is tried."""
        shapes = {shape for shape in self._shapes if shape is not None}
        alike = len({shape.num_heads for shape in shapes}) == 1 and self.share.size == 1
        if not (alike and self._may_try("cache")):
            return False
        widths = zip(self._shapes[::2], self._shapes[1::2])
        if not all(cached_keys.fits_kernel(key.width, value.width) for key, value in widths if key and value):
            return False
        heads = self.config.num_attention_heads
        return self._agrees_with_reference(
            "cache", "a cache to its length", lambda lean: self._try_tree(heads if lean else None)
        )

    def _fuse_attention(self) -> None:
        """Lets passes over drafts use one kernel between products and attention, if a tree gives the same results."""
        if self._fuses or not self._may_try("write"):
            return
        self._fuses = True
        max_error = MAX_DIFFERENCE if self._rounds else 1e-5
        try:
            fused_attention.fuse_attention(
                self.layers, lambda: self._try_tree(self.config.num_attention_heads), max_error=max_error
            )
        except Exception as reason:  # models and kernels raise errors of any kind
            fast.leave_out("write", f"{self.name} cannot write its keys by the kernel ({name_cause(reason)})")

    @property
    def _rounds(self) -> bool:
        """Whether it computes in at most 16 bits."""
        return torch.finfo(self.dtype).bits < 32 or self.quantisation is not None

    @functools.cached_property
    def reads_pieces(self) -> bool:
        """Whether texts are read without masks, in pieces behind the keys before them: two pieces are tried."""
        path = None if self.device.type == "cpu" else "cache"
        if self.recurrent or not self._takes_entries() or not (path is None or self._may_try(path)):
            return False
        return self._agrees_with_reference(path, "a piece of a text without a mask", self._try_pieces)

    @torch.no_grad()
    def _try_pieces(self, in_pieces: bool) -> Tensor:
        """States [1, S, D] of a text in two pieces, or at once."""
        text = self._sample_text()
        if not in_pieces:  # under a mask, SmolLM2 in bfloat16 differs by 6 % from this and from pieces
            return self.read(text, ()).final
        parts, cache = text.split(2 * target_structure.NUM_TOKENS // 3, dim=1), self.cache(1)
        return torch.cat([self.read_piece(part, (), cache, maskless=True).final for part in parts], dim=1)

    def _may_try(self, path: str) -> bool:
        """Whether a fast path of attention is worth a trial."""
        unlike = self.recurrent and path != "varlen"
        return self._takes_entries() and not unlike and fast.allows(path, self.device, self.dtype)

    def _takes_entries(self) -> bool:
        """Whether attention of its layers may have what stands for a mask: entries that are seen, or texts."""
        unlike = self.on_several_devices or self.layer_kinds.chunk or self.adds_masks or self.penalises_distance
        return self.whole and not unlike

    def _agrees_with_reference(self, path: str | None, task: str, read: Callable[[bool], Tensor]) -> bool:
        """Whether a fast path's states, read(True), are those of the reference, read(False). If not, it prints why.

        path: None: it is no fast path of a device; task: the object of "cannot read"
        """
        try:
            states, reference = read(True).float(), read(False).float()
        except Exception as reason:  # models and kernels raise errors of any kind
            return self._leave_out(path, f"{self.name} cannot read {task} ({name_cause(reason)})")
        error = float((states - reference).norm() / reference.norm())
        if not error <= (MAX_DIFFERENCE if self._rounds else 1e-3):
            return self._leave_out(path, f"{self.name} reads {task} differently, by {error:.1%}")
        return True

    def _leave_out(self, path: str | None, reason: str) -> bool:
        """Warns that a path is not used. path: None: pieces on a CPU. Returns False."""
        if path is not None:
            return fast.leave_out(path, reason)
        warnings.warn(f"{reason}. It reads under masks, which take more memory and time in long texts.", stacklevel=2)
        return False

    @torch.no_grad()
    def _try_tree(self, query_heads: int | None) -> Tensor:
        """States [1, 3, D] of a tree of three nodes behind a few tokens."""
        cache = RowCache(self._shapes, batch=1, device=self.device, query_heads=query_heads)
        *text, drafts = self._sample_text().split([target_structure.NUM_TOKENS - 3, 3], dim=1)
        self.read_piece(text[0], (), cache, maskless=False)
        cache.reserve(3)
        ancestors = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool, device=self.device)
        positions = text[0].shape[1] + ancestors.sum(-1)[None] - 1
        return self.read(
            drafts, (), positions=positions, mask=self.make_draft_mask(ancestors, cache), cache=cache
        ).final

    def _compile_blocks(self) -> None:
        """Lets layers run compiled in passes over segments without gradients, whose shapes are equal at every call."""
        if self._compiles or not fast.allows("blocks", self.device):
            return
        self._compiles = True
        for layer in self.layers:
            if not set(layer.modules()) & set(self.mixers.values()):  # a mixer's rows have other shapes every time
                layer.forward = functools.partial(_run_layer, type(layer).forward, layer)

    def layer_masks(
        self, mask: Tensor | tuple[CachedKeys, ...] | Piece | None, positions: Tensor | None, cache: RowCache | None
    ) -> dict:
        """Arguments of the decoder: the mask, or one for each kind of layer, and `cached`. Arguments as of `read`"""
        if mask is None:
            return {"attention_mask": None}
        if isinstance(mask, Piece):
            if cache is not None and self.masks_positions and positions is not None:
                cache.note_positions(positions)
            return {"attention_mask": self.layer_kinds.make_segment_masks(self.device), "text_piece": mask}
        if isinstance(mask, tuple):
            masks, cached = self.layer_kinds.masks_of_cached(mask)
            return {"attention_mask": masks, "cached": cached}
        keys = None
        if self.masks_positions:
            assert positions is not None, "windows and penalties follow positions"
            keys = positions if cache is None else cache.note_positions(positions)
        mask = attention.make_additive(mask, self.dtype) if self.adds_masks else mask
        if keys is not None and self.penalises_distance:
            mask = alibi.mark_positions(mask, keys)
        return {"attention_mask": self.layer_kinds.masks(mask, positions, keys)}

    def logits(self, final: Tensor) -> Tensor:
        """Logits [..., V] of final states [..., D], in float32 (float64 for a float64 target)."""
        weight = self.lm_head.weight
        logits = self.shape_logits(precision.multiply_few_rows(final.to(weight.device), weight, self.lm_head.bias))
        return logits.to(self.device, torch.promote_types(logits.dtype, torch.float32))

    def _watch_mixer(self, layer_number: int, mixer: nn.Module, cache: RowCache):
        """A hook that reports the input of a recurrent layer to the cache."""
        states = cast(LayerStates, cache.states)

        def record_input(module, args, kwargs, output):
            states.note_call(cache, layer_number, module, args, kwargs)

        return mixer.register_forward_hook(record_input, with_kwargs=True)

    @torch.no_grad()
    def _find_norm_and_entries(self) -> None:
        """Finds the final norm and the entries of every layer, by a pass over a few tokens.

        Without the layers' values the pass computes shapes. Raises ValueError if the model cannot run.
        """
        decoder, layers, device = self.decoder, self.layers, self.device
        if not self.whole:
            decoder = copy.deepcopy(decoder).to("meta", torch.bfloat16)  # experts' products take no other there
            device = torch.device("meta")
            layers = target_structure.find_layers(decoder, len(layers), self.name)
        tokens = self._sample_text().to(device)
        positions = torch.arange(tokens.shape[1], device=device)[None]
        seen = self.layer_masks(masks.causal_mask(tokens.shape[1], device)[None, None], positions, None)[
            "attention_mask"
        ]
        advice = target_structure.FAMILY_ADVICE if self.whole else "Load the whole target, which can be examined."
        with target_structure.explain_refusals(self.name, decoder, advice=advice):
            norm, recorder = target_structure.trace_layers(decoder, layers, self.config, tokens, positions, seen)
        names = {module: name for name, module in decoder.named_modules()}
        if not self.whole and norm not in names:
            raise ValueError(f"{self.name}: its final norm was not found. {advice}")
        self.norm = self.decoder.get_submodule(names[norm]) if norm in names else norm
        self.mixers, self._shapes = recorder.mixers, recorder.shapes()

    @torch.no_grad()
    def _check_logits(self) -> None:
        """Compares logits with the model's own, from a cache that gets two thirds of a short text, then the rest.

        Raises ValueError if they differ, or if hidden states have another width than the model.
        """
        with target_structure.use_eager_attention(self.model):
            reference = self.model(self._sample_text()).logits.float()
        final = self._read_in_parts()
        if not reference.isfinite().all():
            cause = (
                "use dtype=bfloat16 or float32, whose range is wider"
                if self.dtype == torch.float16
                else "its weights are damaged"
            )
            raise ValueError(
                f"{self.name}: its logits are not finite in {str(self.dtype).removeprefix('torch.')}: {cause}."
            )
        logits_fault = (
            "its logits are not its LM head's output of its final state, scaled or capped as its configuration says"
        )
        cache_fault = "it does not go on from its cache by several tokens as it reads a text at once"
        goals = reference.split(len(final[0][0]), dim=1)
        if self.recurrent and not self._has_logits(final[1], goals[1]):
            for number, mixer in self.mixers.items():
                mixers.step_behind_state(mixer, number)
            final = self._read_in_parts()
        for goal, state, fault in zip(goals, final, (logits_fault, cache_fault)):
            if not self._has_logits(state, goal):
                raise ValueError(
                    f"{self.name}: {fault}, so drafts could not be verified. {target_structure.FAMILY_ADVICE}"
                )
        if (self.adds_masks or self.penalises_distance) and not self.recurrent:
            self._check_tree()

    def _check_tree(self) -> None:
        """Raises ValueError unless the second branch of a tree is read as a text that ends in it."""
        tokens = self._sample_text()
        text = torch.cat([tokens[:, :-2], tokens[:, -1:]], dim=1)
        branch, reference = self._try_tree(None)[:, -1].float(), self.read(text, ()).final[:, -1].float()
        if not (branch - reference).norm() <= (MAX_DIFFERENCE if self._rounds else 1e-3) * reference.norm():
            raise ValueError(
                f"{self.name}: {type(self.model).__name__} computes attention in its own way, which takes no mask over "
                f"a tree of drafts. {target_structure.FAMILY_ADVICE}"
            )

    def _has_logits(self, state: Tensor, goal: Tensor) -> bool:
        """Whether the logits of a state are `goal`, up to rounding."""
        # Two ways to compute attention differ in 16 bits, and quantised layers compute with at most as many
        tolerance = 0.3 if self._rounds else 0.02
        return bool((goal - self.logits(state).float()).norm() <= tolerance * goal.norm())

    def _read_in_parts(self) -> list[Tensor]:
        """Final states of two thirds of a short text, and of the rest, which is read from the cache.

        Raises ValueError if the model cannot run, or if hidden states have another width than it.
        """
        tokens, cache = self._sample_text(), self.cache(1, masked=True)
        features, final = [], []
        for chunk in tokens.split(2 * tokens.shape[1] // 3, dim=1):
            with target_structure.explain_refusals(self.name, self.decoder):
                output = self.read_piece(chunk, tuple(range(self.num_layers)), cache, maskless=False)
            features.append(output.features)
            final.append(output.final)
        if final[0].shape[-1] != self.width:
            raise ValueError(
                f"{self.name}: the blocks of {type(self.decoder).__name__} pass on states of {self.width} numbers, and "
                f"its LM head reads {final[0].shape[-1]}, while heads have one width. {target_structure.FAMILY_ADVICE}"
            )
        if [*features[0].shape[1:]] != [2 * tokens.shape[1] // 3, self.num_layers * self.width]:
            raise ValueError(
                f"{self.name}: the blocks of {type(self.decoder).__name__} do not pass on one state of the model's "
                "width each. " + target_structure.FAMILY_ADVICE
            )
        return final

    def _sample_text(self) -> Tensor:
        num = target_structure.NUM_TOKENS
        return (7 * torch.arange(num, device=self.device) + 1)[None] % self.vocab_size
