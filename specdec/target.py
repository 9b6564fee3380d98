"""The frozen model that is being sped up.

Only this file and the four beside it (target_loading.py, target_fingerprint.py, target_adapter.py, compiled_target.py)
use the inside of a transformers model.
"""

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from specdec.cache import RowCache
from specdec.target_fingerprint import embeddings_fingerprint, fingerprint, quantisation_of
from specdec.target_loading import DTYPES as DTYPES
from specdec.target_loading import check_supported, load_model
from specdec.target_loading import load_tokenizer as load_tokenizer


@dataclass(frozen=True)
class TargetOutput:
    """The target's states at every position. Logits are `Target.logits(final)`, made for a few positions at a time."""

    features: Tensor  # [B, T, F*D] the hidden states asked for, side by side; zero width for none
    final: Tensor  # [B, T, D] after the last norm


class Target:
    """A frozen causal language model.

    Hidden states are numbered as in transformers' `output_hidden_states`: 0 is the embedding, k the residual stream after
    k layers, `num_layers` (or -1) the state after the final norm, which the LM head reads.
    """

    def __init__(self, model: PreTrainedModel, *, name: str, quantisation: str | None = None):
        """quantisation: how the checkpoint is quantised, if that is not in the model's configuration"""
        config = model.config.get_text_config()
        check_supported(config, name)
        self.model = model.eval().requires_grad_(False)
        self.config = config
        self.name = name
        self.decoder = decoder = model.get_decoder()
        try:
            self._points: list[nn.Module] = [*decoder.layers, decoder.norm]  # their inputs are hidden states 0..L
        except AttributeError as error:
            raise ValueError(
                f"{name}: {type(decoder).__name__} does not keep its blocks in `layers` and its last norm in `norm`; "
                "choose a target of the Llama, Qwen, Mistral or a similarly built family."
            ) from error
        self.norm = self._points[-1]  # its output is what the LM head reads
        self.embed = cast(nn.Embedding, model.get_input_embeddings())
        self.lm_head = cast(nn.Linear, model.get_output_embeddings())
        self.width: int = config.hidden_size
        self.num_layers: int = config.num_hidden_layers
        # Configurations may leave out the width of an attention head
        self.head_dim: int = config.to_dict().get("head_dim") or config.hidden_size // config.num_attention_heads
        self.quantisation = quantisation or quantisation_of(model.config)  # such as bitsandbytes-4bit; None: none
        self._fingerprint = fingerprint(model, config, self.quantisation)
        self._check_logits()

    @classmethod
    def load(cls, name: str, *, dtype: str = "bfloat16", device="cpu", revision: str | None = None) -> "Target":
        """name: a folder, or a name on the Hugging Face Hub; device: a device, or "auto" (target_loading.py).

        Raises ValueError with what to do.
        """
        model, quantisation = load_model(name, dtype=dtype, device=device, revision=revision)
        return cls(model, name=name, quantisation=quantisation)

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
        """Whether a drafter has put its adapter into this target (specdec/target_adapter.py)."""
        return bool(self.adapted_layers())

    def adapted_layers(self) -> list[nn.Module]:
        """The layers that have LoRA matrices."""
        return [module for module in self.model.modules() if "lora_A" in vars(module).get("_modules", {})]

    def fingerprint(self) -> str:
        """16 hex digits that identify the weights, the same for every dtype, and not changed by an adapter.

        A quantised target's end in its method: 404cc869e850dcae-bitsandbytes-4bit.
        """
        return self._fingerprint

    def embeddings_fingerprint(self) -> str:
        """16 hex digits of what a target shares with its quantised forms."""
        return embeddings_fingerprint(self.embed, self.norm, self.config)

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

    def cache(self, batch: int) -> RowCache:
        """An empty cache for `batch` rows."""
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
        hidden_states: tuple[int, ...],
        *,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
        cache: RowCache | None = None,
        gradient: bool = False,
    ) -> TargetOutput:
        """tokens, positions [B, S]; mask [B, 1, S, keys] bool, True where a query may attend; None: causal.

        hidden_states: which ones `features` is made of, as `layer_ids` returns them
        cache: `cache.reserve(S)` must have been called
        gradient: whether to keep the graph, for the training of an adapted target
        """
        states: dict[int, Tensor] = {}

        def keep(k):
            return lambda module, args, kwargs: states.__setitem__(k, args[0] if args else kwargs["hidden_states"])

        points = [(k, self._points[k]) for k in hidden_states if k < self.num_layers]
        hooks = [point.register_forward_pre_hook(keep(k), with_kwargs=True) for k, point in points]
        try:
            with torch.set_grad_enabled(gradient and torch.is_grad_enabled()):
                output = self.decoder(
                    input_ids=tokens,
                    position_ids=positions,
                    attention_mask=mask,
                    past_key_values=cache,
                    use_cache=cache is not None,
                )
                states[self.num_layers] = final = output.last_hidden_state  # [B, S, D]
                wanted = [states[k] for k in hidden_states]
                return TargetOutput(torch.cat(wanted, dim=-1) if wanted else final[..., :0], final)
        finally:
            for hook in hooks:
                hook.remove()

    def logits(self, final: Tensor) -> Tensor:
        """[..., D] -> [..., V], float32 (float64 for a float64 target)"""
        logits = nn.functional.linear(final, self.lm_head.weight, self.lm_head.bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _check_logits(self) -> None:
        """Raises ValueError if the model's logits are not lm_head(final), for instance capped or scaled."""
        with torch.no_grad():
            tokens = torch.ones(1, 2, dtype=torch.long, device=self.device)
            wanted = self.model(tokens).logits.float()
            logits = self.logits(self.read(tokens, ()).final).float()
        if (wanted - logits).abs().max() > 0.05 * wanted.abs().max():
            raise ValueError(
                f"{self.name}: its logits are not lm_head(last hidden state) (soft-capped or scaled logits); "
                "such targets are not supported."
            )
