"""The frozen model that is being sped up. The only file that knows a transformers model from inside."""

import contextlib
import hashlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from specdec import attention
from specdec.cache import RowCache
from specdec.compile import Runner

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class TargetOutput:
    """What the target says at every position. Logits are `Target.logits(final)`, made for a few positions at a time."""

    features: Tensor  # [B, T, F*D] hidden states of the layers asked for; zero width for none
    final: Tensor  # [B, T, D] after the last norm


class Target:
    """A frozen causal language model.

    Layers are numbered as transformers' `output_hidden_states`: 0 is the embedding, k the residual stream after k
    layers, `num_layers` (or -1) the state after the final norm, which is what the LM head reads.
    """

    def __init__(self, model: PreTrainedModel, *, name: str):
        config = model.config.get_text_config()
        _check_supported(config, name)
        self.model = model.eval().requires_grad_(False)
        self.config = config
        self.name = name
        decoder = model.get_decoder()
        self.decoder = decoder
        try:
            self._points: list[nn.Module] = [*decoder.layers, decoder.norm]  # whose inputs are hidden states 0..L
        except AttributeError as error:
            raise ValueError(
                f"{name}: {type(decoder).__name__} does not keep its blocks in `layers` and its last norm in `norm`; "
                "choose a target of the Llama, Qwen, Mistral or a similarly built family."
            ) from error
        self.embed = cast(nn.Embedding, model.get_input_embeddings())
        self.lm_head = cast(nn.Linear, model.get_output_embeddings())
        self.adapted = False
        self._fingerprint = self._take_fingerprint()
        self._check_logits()

    @classmethod
    def load(
        cls, name: str, *, dtype: str = "bfloat16", device="cpu", revision: str | None = None, option="target.name"
    ) -> "Target":
        """A folder, or a name on the Hugging Face Hub, given by `option`. Raises ValueError with what to do."""
        config = _from_pretrained(AutoConfig, name, option=option, revision=revision)
        _check_supported(config.get_text_config(), name)
        if dtype not in DTYPES:
            raise ValueError(f"target.dtype={dtype} must be one of {', '.join(DTYPES)}.")
        # sdpa is required: under eager attention a boolean mask would be added instead of applied.
        model = _from_pretrained(
            AutoModelForCausalLM,
            name,
            option=option,
            revision=revision,
            dtype=DTYPES[dtype],
            attn_implementation=attention.NAME,
        )
        return cls(model.to(device), name=name)

    @property
    def device(self) -> torch.device:
        return self.embed.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed.weight.dtype

    @property
    def width(self) -> int:
        return self.config.hidden_size

    @property
    def vocab_size(self) -> int:
        return self.lm_head.weight.shape[0]

    @property
    def num_layers(self) -> int:
        return self.config.num_hidden_layers

    @property
    def head_dim(self) -> int:
        """Width of one attention head; configurations may leave it to be derived."""
        return self.config.to_dict().get("head_dim") or self.config.hidden_size // self.config.num_attention_heads

    @property
    def norm(self) -> nn.Module:
        """The final norm, whose output is what the LM head reads."""
        return self._points[-1]

    def layer_ids(self, layers: list[int] | tuple[int, ...]) -> tuple[int, ...]:
        """Resolves negative indices (-1 is the final state); raises ValueError unless strictly increasing and in range."""
        ids = tuple(k if k >= 0 else self.num_layers + 1 + k for k in layers)
        if any(a >= b for a, b in zip(ids, ids[1:])) or any(not 0 <= k <= self.num_layers for k in ids):
            raise ValueError(
                f"target_layers={list(layers)}: {self.name} has hidden states 0..{self.num_layers} "
                f"({self.num_layers} is the final, normed one, also written -1); they must be strictly increasing."
            )
        return ids

    def cache(self, batch: int) -> RowCache:
        return RowCache(
            num_layers=self.num_layers,
            batch=batch,
            num_heads=self.config.num_key_value_heads,
            head_dim=self.head_dim,
            dtype=self.dtype,
            device=self.device,
        )

    def read(
        self,
        tokens: Tensor,
        layers: tuple[int, ...],
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: RowCache | None = None,
        gradient: bool = False,
    ) -> TargetOutput:
        """tokens, positions [B, S]; mask [B, 1, S, keys] bool, True may attend; causal without one.

        layers: indices from `layer_ids`. A cache must have been told with `reserve(S)`. gradient: for an adapted target
        """
        with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
            return self._read(tokens, layers, positions, mask, cache)

    def _read(self, tokens, layers, positions, mask, cache) -> TargetOutput:
        states: dict[int, Tensor] = {}

        def keep(k):
            return lambda module, args, kwargs: states.__setitem__(k, args[0] if args else kwargs["hidden_states"])

        hooks = [
            self._points[k].register_forward_pre_hook(keep(k), with_kwargs=True) for k in layers if k < self.num_layers
        ]
        try:
            output = self.decoder(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=cache is not None,
            )
        finally:
            for hook in hooks:
                hook.remove()
        states[self.num_layers] = final = output.last_hidden_state  # [B, S, D]
        features = torch.cat([states[k] for k in layers], dim=-1) if layers else final[..., :0]
        return TargetOutput(features, final)

    def begin(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """tokens, positions [B, S] -> what the first layer reads, [B, S, D], and what turns keys: cos, sin [B, S, head_dim]"""
        h = self.embed(tokens)
        return h, *self.decoder.rotary_emb(h, positions)

    def run_layers(
        self,
        h: Tensor,
        numbers: Sequence[int],
        *,
        rotary: Sequence[Tensor],
        positions: Tensor,
        mask: Tensor,
        cache: RowCache,
        runner: Runner,
    ) -> list[Tensor]:
        """Chosen layers, the first being 0, one after the other -> h [B, S, D] before each of them and after the last.

        rotary: cos and sin of the positions, as from `begin`. K and V go where `cache.reserve` says. All layers at once
        are what `read` does if `check_layers` finds nothing.
        """

        def layer(module, h, cos, sin, mask, positions, slots, keys, values):
            place = cache.over([keys, values], cache.lengths)
            place.slots = slots
            return module(
                h,
                attention_mask=mask,
                position_ids=positions,
                position_embeddings=(cos, sin),
                past_key_values=place,
                use_cache=True,
            )

        states = [h]
        if not numbers:
            return states
        shared = *rotary, mask, positions, cache.slots
        # Layers that meet a shape for the first time all try it on the K and V of the one that runs next.
        halves = cache.halves[2 * numbers[0] : 2 * numbers[0] + 2]
        functions = runner.layers("the target's layer", layer, self.decoder.layers, h, *shared, *halves)
        for number in numbers:
            states.append(functions[number](states[-1], *shared, *cache.halves[2 * number : 2 * number + 2]))
        return states

    def read_compiled(
        self,
        tokens: Tensor,
        layers: tuple[int, ...],
        *,
        positions: Tensor,
        mask: Tensor,
        cache: RowCache,
        runner: Runner,
        states: Tensor | None = None,
        num_layers: int = 0,
    ) -> TargetOutput:
        """`read`, its layers compiled once and run one after the other without transformers in between.

        states [B, S, D]: where the first `num_layers` layers have been run already, what they made of these tokens; their
        K and V are in the cache. Raises ValueError if the model does more than its layers: the first pass of every shape
        is compared with `read`.
        """
        if states is None and not runner.compile:
            return self.read(tokens, layers, positions=positions, mask=mask, cache=cache)
        seconds = runner.seconds
        if states is None:
            h, *rotary = runner("the target's embedding", self.begin, tokens, positions)
        else:
            assert states.shape[:2] == tokens.shape and all(k >= num_layers for k in layers)
            h, rotary = states, runner("the target's rotary embedding", self.decoder.rotary_emb, states, positions)
        numbers = range(num_layers, self.num_layers)
        found = self.run_layers(h, numbers, rotary=rotary, positions=positions, mask=mask, cache=cache, runner=runner)
        found[-1] = runner("the target's last norm", self.norm, found[-1])
        output = TargetOutput(
            torch.cat([found[k - num_layers] for k in layers], dim=-1) if layers else h[..., :0], found[-1]
        )
        if runner.seconds > seconds:
            start = time.perf_counter()
            wanted = self.read(tokens, (), positions=positions, mask=mask, cache=cache).final
            self._check_same(output.final, wanted, "set decode.compile=false.")
            runner.seconds += time.perf_counter() - start
        return output

    @torch.no_grad()
    def check_layers(self, advice: str) -> None:
        """Raises ValueError, ending in `advice`, if the model does more than its layers one after the other."""
        tokens, cache = torch.ones(1, 2, dtype=torch.long, device=self.device), self.cache(1)
        cache.reserve(2)
        mask = torch.ones(1, 1, 2, cache.visible, dtype=torch.bool, device=self.device).tril()
        h, *rotary = self.begin(tokens, cache.slots)
        numbers, runner = range(self.num_layers), Runner()
        *_, h = self.run_layers(h, numbers, rotary=rotary, positions=cache.slots, mask=mask, cache=cache, runner=runner)
        self._check_same(self.norm(h), self.read(tokens, ()).final, advice)

    def _check_same(self, final: Tensor, wanted: Tensor, advice: str) -> None:
        if not (wanted - final).float().norm() <= 0.05 * wanted.float().norm():
            raise ValueError(f"{self.name} does more than its layers one after the other: {advice}")

    def logits(self, final: Tensor) -> Tensor:
        """[..., D] -> [..., V], float32 (float64 for a float64 target)"""
        logits = nn.functional.linear(final, self.lm_head.weight, self.lm_head.bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def adapt(self, *, rank: int, alpha: int, modules: list[str]) -> dict[str, nn.Parameter]:
        """Puts LoRA (2106.09685) beside the layers named so; B = 0, so nothing changes yet. -> its parameters, float32

        Raises ValueError if no layer has such a name, or the target is adapted already.
        """
        self.check_unadapted()
        import peft  # only an adapted target needs it

        config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(modules))
        try:
            peft.inject_adapter_in_model(config, self.model)
        except ValueError as error:
            raise ValueError(f"{self.name} has no layers named {', '.join(modules)}: change lora_modules.") from error
        self.adapted = True
        found = {name: value for name, value in self.model.named_parameters() if "lora_" in name}
        if not all(".layers." in name for name in found):
            raise ValueError(f"lora_modules={modules}: only layers inside the decoder's blocks can be adapted.")
        for parameter in found.values():
            parameter.data = parameter.data.to(torch.promote_types(self.dtype, torch.float32))
        return found

    def check_unadapted(self) -> None:
        if self.adapted:
            raise ValueError(f"{self.name} was adapted in place by another drafter: load the target anew for this one.")

    def merge(self) -> None:
        """Adds the adapter to the weights themselves, in the target's dtype: decoding is then as fast as the original's."""
        for layer in self._adapted_layers():
            layer.merge()  # type: ignore[operator]

    def save_merged(self, folder: str) -> None:
        """The adapted model as a folder of its own, after `merge`. Raises ValueError if the folder exists."""
        if Path(folder).exists():
            raise ValueError(f"{folder} exists; choose another folder for the merged target or delete it.")
        state = {
            name.replace(".base_layer.", "."): value
            for name, value in self.model.state_dict().items()
            if ".lora_" not in name
        }
        partial = Path(f"{folder}.partial")
        self.model.save_pretrained(partial, state_dict=state)
        partial.rename(folder)

    def _adapted_layers(self) -> list[nn.Module]:
        return [module for module in self.model.modules() if "lora_A" in vars(module).get("_modules", {})]

    @contextlib.contextmanager
    def original(self):
        """Within, an adapted target says what it said before."""
        layers = self._adapted_layers()
        for layer in layers:
            layer.enable_adapters(False)  # type: ignore[operator]
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)  # type: ignore[operator]

    def fingerprint(self) -> str:
        """16 hex digits that name these weights, whatever dtype they were loaded in; adapting does not change it."""
        return self._fingerprint

    def _take_fingerprint(self) -> str:
        digest = hashlib.sha256()
        sizes = ("hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads", "intermediate_size")
        config = self.config.to_dict()
        digest.update(json.dumps({key: config[key] for key in sizes if key in config}).encode())
        for name, parameter in sorted(self.model.named_parameters()):
            flat = parameter.detach().reshape(-1)
            sample = flat[:: max(1, len(flat) // 64)][:64].to(torch.bfloat16).float().cpu()
            digest.update(name.encode() + sample.numpy().tobytes())
        return digest.hexdigest()[:16]

    def _check_logits(self) -> None:
        """Refuses models that do more than lm_head(final), for instance cap or scale their logits."""
        with torch.no_grad():
            tokens = torch.ones(1, 2, dtype=torch.long, device=self.device)
            theirs = self.model(tokens).logits.float()
            ours = self.logits(self.read(tokens, ()).final).float()
        if (theirs - ours).abs().max() > 0.05 * theirs.abs().max():
            raise ValueError(
                f"{self.name}: its logits are not lm_head(last hidden state) (soft-capped or scaled logits); "
                "such targets are not supported."
            )


def load_tokenizer(
    name: str, *, revision: str | None = None, option: str = "target.name"
) -> transformers.PreTrainedTokenizerBase:
    return _from_pretrained(AutoTokenizer, name, option=option, revision=revision)


def _from_pretrained(factory, name: str, *, option: str, **kwargs):
    looks_local = name.startswith((".", "/", "~", "targets/", "checkpoints/")) or name.count("/") > 1
    if looks_local and not Path(name).expanduser().is_dir():
        raise ValueError(
            f"The folder {name} does not exist. Give {option} a folder or a name on the Hugging Face Hub; `make setup` (or "
            "python scripts/get_target.py) makes targets/smollm2-135m, the default target."
        )
    try:
        return factory.from_pretrained(name, **kwargs)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{name} could not be loaded as a causal language model ({_first_line(error)}). Give {option} a folder "
            "saved by save_pretrained (config.json, safetensors, tokenizer), or a Hub name with the network in reach."
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def _check_supported(config, name: str) -> None:
    """Drafting cuts refused tokens out of the cache again, which only full-attention layers allow."""
    kinds = {type(layer) for layer in DynamicCache(config=config).layers} - {DynamicLayer}
    if kinds:
        kinds_seen = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"{name}: some layers keep a state that cannot be cut back after a refused draft ({kinds_seen}: sliding "
            "window, recurrent or compressed attention). Choose a target whose layers all use full attention."
        )
