"""Multi-token prediction: DeepSeek-V3's sequential modules (2412.19437), and FastMTP's shared one (2509.18362)."""

from typing import Any

import torch
from torch import Tensor, nn

from specdec.core.cache import RowCache
from specdec.core.option_types import SmallCount, Width, Window
from specdec.core.span_attention import Seen
from specdec.heads.base import Drafter
from specdec.heads.blocks import Block, RMSNorm, Rotary, make_block_config, make_row_cache, measure_scale, solve_ridge
from specdec.target.model import Target


class MTPModule(nn.Module):
    """Norms of the token's embedding and the state, their join, a Llama layer, and the norm before the shared LM
    head.
    """

    def __init__(self, config, *, layer: int):
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm, self.hnorm, self.input_layernorm, self.norm = (RMSNorm(width, eps=eps) for _ in range(4))
        self.eh_proj = nn.Linear(2 * width, width, bias=False)  # embedding first
        self.block = Block(config, width=width, layer=layer)

    def join(self, embedding: Tensor, h: Tensor) -> Tensor:
        """Input [..., 2D] of `eh_proj`. embedding, h [..., D]"""
        return torch.cat([self.enorm(embedding), self.hnorm(h)], dim=-1)

    def forward(self, embedding: Tensor, h: Tensor, rotary, mask: Seen, cache) -> Tensor:
        """State [B, S, D] for the LM head and for the next step (docs/file-formats.md). embedding, h [B, S, D]"""
        x = self.eh_proj(self.join(embedding, h))
        return self.norm(self.block(self.input_layernorm(x), x, rotary, mask, cache))


class ModuleDrafter(Drafter):
    """The base of MTP heads: one module for each depth, or one for all depths."""

    zero_first: bool  # whether the embedding in the first slot of a text is zero
    modules_by_depth: nn.ModuleList

    def module(self, d: int) -> Any:
        """The module of depth d."""
        return self.modules_by_depth[0 if self.depth is None else d - 1]

    def embed(self, tokens: Tensor) -> Tensor:
        return super().encode(self.target.embed(tokens))

    def embed_inputs(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Embeddings [B, S, D] that a step reads. tokens, positions [B, S]"""
        embedding = self.embed(tokens)
        if self.zero_first:
            embedding = embedding.masked_fill(positions[..., None] == self.first_slot, 0.0)
        return embedding


class MTP(ModuleDrafter):
    """MTP. Module d reads the state of module d - 1 (module 1: the target's last state) and the newest token.

    num_modules: number of modules, one for each depth, which see keys of their own depth; null: one for all depths
    attention_bias: whether q, k and v have biases, as in Qwen2's layers
    zero_first: whether the embedding in the first slot of a text is zero, as vLLM and SGLang run these modules
    window: positions that a module sees, its own included; it must exceed the drafts of a round; null: all
    """

    estimates_state = True
    changeable_arguments = ("zero_first",)

    def __init__(
        self,
        target: Target,
        *,
        num_modules: SmallCount | None = None,
        intermediate_size: Width | None = None,
        attention_bias: bool = False,
        zero_first: bool = False,
        window: Window | None = None,
        vocab: Tensor | None = None,
    ):
        super().__init__(target, vocab=vocab)
        self.hold_window(window)
        self.depth = num_modules
        self.zero_first = zero_first
        self.context_kind = "path" if num_modules is None else "depth"
        self.target_layers = target.layer_ids([-1])
        self.config = config = make_block_config(target, intermediate_size=intermediate_size)
        config.attention_bias = attention_bias
        self.modules_by_depth = nn.ModuleList(MTPModule(config, layer=layer) for layer in range(num_modules or 1))
        self.rotary = Rotary(config)

    def cache(self, batch: int) -> RowCache:
        weight, masked = self.module(1).eh_proj.weight, self.context_kind == "depth"
        return make_row_cache(self.config, weight, layers=self.depth or 1, batch=batch, masked=masked)

    def step(self, d, h, tokens, positions, mask, cache):
        embedding = self.embed_inputs(tokens, positions)
        (seen,) = self.narrow_keys(mask, d, positions)
        h = self.module(d)(embedding, h, self.rotary(h, positions), seen, cache)
        return h, h

    @torch.no_grad()
    def solve(self, slots):
        """Sets `eh_proj` by ridge regression onto the state that each module guesses, and the MLP onto the residual.

        Attention starts at zero. The last norm starts as the constant that gives states the mean size of the target's
        (docs/methods.md, section 5).
        """
        states = [self.encode(text.features) for text in slots]
        for d, module in enumerate(self.modules_by_depth, start=1):
            if d > slots[0].tokens.shape[1]:
                break
            joined = [module.join(self.embed(text.tokens[:, d - 1]), state) for text, state in zip(slots, states)]
            goals = [text.goals[:, d - 1] for text in slots]
            module.eh_proj.weight.copy_(solve_ridge(zip(joined, goals)))
            module.block.start_as_identity()
            module.block.solve_mlp((module.eh_proj(x), goal) for x, goal in zip(joined, goals))
            module.norm.weight.fill_(measure_scale(goals))
            states = [module.norm(module.block.run_without_attention(module.eh_proj(x))) for x in joined]
        return True
