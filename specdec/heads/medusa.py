"""Medusa (2401.10774) and Hydra (2402.05109): a small network for each depth, on the target's last state, without
attention.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from specdec.core.cache import RowCache
from specdec.core.option_types import Names, Positive, SmallCount, Width
from specdec.heads.adapter import AdaptsTarget
from specdec.heads.base import Drafter
from specdec.heads.blocks import make_block_config, make_row_cache, solve_ridge
from specdec.target.model import Target


class ResBlock(nn.Module):
    """x + SiLU(W x + b), the identity at first (Medusa, section 2.1.1)."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class _IndependentHeads(Drafter):
    """The base of Medusa and Hydra: `num_heads` heads without attention, each with `num_blocks` residual blocks.

    own_output: whether each head trains an LM head of its own, which starts as a copy of the target's; else all use the
        target's, frozen
    """

    context_kind = "none"
    token_row_prefixes = ("lm_heads.",)

    def __init__(
        self,
        target: Target,
        *,
        num_heads: SmallCount = 4,
        num_blocks: Annotated[int, Field(ge=0, le=1024)] = 1,
        own_output: bool = False,
        vocab: Tensor | None = None,
    ):
        super().__init__(target, vocab=vocab)
        self.depth, self.shares_output = num_heads, not own_output
        self.target_layers = target.layer_ids([-1])
        self.lm_heads = nn.ModuleList(
            nn.Linear(target.width, self.vocab_size, bias=False) for _ in range(num_heads if own_output else 0)
        )
        for head in self.lm_heads:
            head.weight.data.copy_(target.shape_logits.scale * self.goal_head[0])
        self.blocks = nn.ModuleList(_stack_blocks(target.width, num_blocks) for _ in range(num_heads))

    def cache(self, batch: int) -> RowCache:
        config = make_block_config(self.target, intermediate_size=None)
        return make_row_cache(config, next(self.parameters()), layers=0, batch=batch, masked=True)

    def logits(self, d, readout):
        return self.lm_heads[d - 1](readout) if self.lm_heads else self.goal_logits(readout)


def _stack_blocks(width: int, num: int) -> nn.Sequential:
    """Residual blocks, one after the other."""
    return nn.Sequential(*(ResBlock(width) for _ in range(num)))


class Medusa(_IndependentHeads):
    """Medusa-1. Head d reads the last state only, not the tokens drafted before."""

    def step(self, d, h, tokens, positions, mask, cache):
        return h, self.blocks[d - 1](h)


class Medusa2(AdaptsTarget, Medusa):
    """Medusa-2: the heads and a LoRA adapter of the target, trained together."""

    def __init__(
        self,
        target: Target,
        *,
        lora_rank: Width = 16,
        lora_alpha: Positive = 32,
        lora_modules: Names = ("q_proj", "v_proj"),
        **heads,
    ):
        super().__init__(target, lora_rank=lora_rank, lora_alpha=lora_alpha, lora_modules=lora_modules, **heads)

    def make_merged_heads(self, merged: Target) -> Medusa:
        """Copies these heads, without the adapter, for `merged`, the adapted target as a model of its own."""
        shape = {"num_heads": len(self.blocks), "num_blocks": len(self.blocks[0]), "own_output": len(self.lm_heads) > 0}
        heads = Medusa(merged, **shape, vocab=self.draft_to_target).to(next(self.blocks.parameters()))
        heads.load_state_dict({name: value for name, value in self.state_dict().items() if "adapter." not in name})
        return heads.eval()


class Hydra(_IndependentHeads):
    """Hydra. Head d reads the last state, and the embeddings of the newest token and of the d - 1 drafts behind it.

    The first layer joins them, W x + SiLU(W' x). Residual blocks follow. h grows by one embedding with each step.
    """

    def __init__(self, target: Target, *, num_heads: SmallCount = 4, **heads):
        super().__init__(target, num_heads=num_heads, **heads)
        width = target.width
        self.join = nn.ModuleList(nn.Linear((d + 2) * width, width, bias=False) for d in range(num_heads))
        self.gate = nn.ModuleList(nn.Linear((d + 2) * width, width) for d in range(num_heads))

    def step(self, d, h, tokens, positions, mask, cache):
        h = torch.cat([h, self.target.embed(tokens).to(h.dtype)], dim=-1)  # [B, S, (1 + d) * D]
        return h, self.blocks[d - 1](self.join[d - 1](h) + F.silu(self.gate[d - 1](h)))

    @torch.no_grad()
    def solve(self, slots):
        """Sets `join` by ridge regression onto the state that each head guesses, and `gate` to zero (docs/methods.md,
        5).
        """
        for d, (join, gate) in enumerate(zip(self.join, self.gate), start=1):
            if d > slots[0].tokens.shape[1]:
                break
            embedded = (self.target.embed(text.tokens[:, :d]).flatten(1) for text in slots)  # [M, d * D] each
            inputs = (torch.cat([self.encode(text.features), x], dim=-1) for text, x in zip(slots, embedded))
            pairs = zip(inputs, (text.goals[:, d - 1] for text in slots))
            join.weight.copy_(solve_ridge(pairs))
            nn.init.zeros_(gate.weight)
            nn.init.zeros_(gate.bias)
        return True
