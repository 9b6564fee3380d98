"""EAGLE (2401.15077), EAGLE-3 (2503.01840, with the norms of 3.1) and P-EAGLE (2602.01469).

A decoder block over features and tokens; EAGLE-3 and P-EAGLE may have further layers behind it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdec.core.cache import RowCache
from specdec.core.compile import training_block
from specdec.core.option_types import Integers, Layers, SmallCount, Whole, Width, Window
from specdec.core.span_attention import narrow_to_window
from specdec.heads.base import Drafter, SizedLinear, Slots
from specdec.heads.blocks import (
    Block,
    DecoderLayer,
    RMSNorm,
    Rotary,
    choose_fused_layers,
    choose_three_layers,
    list_layer_windows,
    make_block_config,
    make_row_cache,
    solve_ridge,
)
from specdec.target.model import Target

SELF_ATTENTION = 4.0  # squared scale of EAGLE-3's first queries and keys: how strongly a position attends to itself


class _Eagle(Drafter):
    """What these heads share: a block, its cache and rotary embedding; h and the readout have the target's width."""

    depth = None
    context_kind = "path"
    estimates_state = True

    def __init__(
        self,
        target: Target,
        *,
        num_inputs: int,
        intermediate_size: Width | None = None,
        block: dict | None = None,
        own_embedding: bool = False,
        vocab: Tensor | None = None,
    ):
        """inputs: how many vectors of its width the block reads"""
        super().__init__(target, vocab=vocab)
        self.config = make_block_config(target, intermediate_size=intermediate_size, block=block)
        self.hold_embedding(self.config.hidden_size if own_embedding else None)
        self.block = Block(self.config, width=num_inputs * self.config.hidden_size, layer=0)
        self.rotary = Rotary(self.config)
        self.further = nn.ModuleList()  # layers behind the block

    def cache(self, batch: int) -> RowCache:
        layers = 1 + len(self.further)
        masked = any(window is not None for window in getattr(self, "windows", ()))
        return make_row_cache(
            self.config, self.block.self_attn.k_proj.weight, layers=layers, batch=batch, masked=masked
        )

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens).to(self.block.mlp.up_proj.weight.dtype)  # [B, S, D]


class Eagle(_Eagle):
    """EAGLE-1: predicts the target's next feature (its final, normed state) and reads it with the target's LM head.

    A reduced `vocab` keeps only its rows of the borrowed LM head: drafting is faster, and fewer tokens can be drafted.
    fc_bias: for published heads; train without it, because engines treat it differently (docs/file-formats.md)
    block: for published heads, see make_block_config; own_embedding: for those whose embedding is not the target's
    """

    def __init__(self, target: Target, *, fc_bias: bool = False, **settings):
        super().__init__(target, num_inputs=1, **settings)
        self.target_layers = target.layer_ids([-1])
        self.fc = SizedLinear(2 * target.width, target.width, bias=fc_bias)  # embedding first

    def encode(self, features: Tensor) -> Tensor:
        return features.to(self.fc.weight.dtype)

    def step(self, d, h, tokens, positions, mask, cache):
        x = self.fc(torch.cat([self.embed(tokens), h], dim=-1))  # [B, S, D]
        h = self.block(x, x, self.rotary(x, positions), mask, cache)
        return h, h

    def logits(self, d, readout):
        return self.goal_logits(readout)

    def _join_inputs(self, slots: list[Slots]) -> Iterator[Tensor]:
        """What `fc` reads, [M, 2D] of each text"""
        for text in slots:
            yield torch.cat([self.embed(text.tokens[:, 0]), self.encode(text.features)], dim=-1)

    def measure_inputs(self, slots, *, random_weights):
        self.fc.measure_inputs(self._join_inputs(slots), random_weights=random_weights)
        return True

    @torch.no_grad()
    def solve(self, slots):
        """`fc` by ridge regression onto the next feature, and the MLP onto what this lacks. Attention starts at zero.

        It replaces more than the first hundreds of training steps (results/01-first-search.md; docs/methods.md, section 5).
        """
        inputs = list(self._join_inputs(slots))
        goals = [text.goals[:, 0] for text in slots]
        self.fc.set_weight(solve_ridge(zip(inputs, goals)))
        if self.fc.bias is not None:
            self.fc.bias.zero_()
        self.block.start_as_identity()
        self.block.solve_mlp((self.fc(x), goal) for x, goal in zip(inputs, goals))
        return True


class Eagle3(_Eagle):
    """EAGLE-3: fuses several of the target's layers and recycles its own state.

    own_output: whether it trains an LM head of its own, which starts as a copy of the target's, as in the paper; if not, it uses
        the target's, frozen, and its file holds none
    target_layers: hidden states to fuse; None: (2, L // 2, L - 3), as in published heads; for shallow targets see blocks.py
    num_layers: the block and the layers behind it; published heads have one layer
    norm_features, norm_output: the norms of EAGLE 3.1 (2605.09992): each fused state is normed, and the state that is
        fed back is the normed one. Off by default, because every serving engine loads the plain form
    norm_before_fc, norm_before_residual, block: for published heads: one norm of all fused states; the residual is the
        normed state; see make_block_config, where hidden_size is the width of a head that has another one than the target
    own_embedding: for published heads whose embedding is not the target's
    window: positions that a layer sees, its own included, as Speculators trains heads; None: all. More than the drafts of a round
    full_layers: the layers, from 0, that see all of them all the same; None: no layer does
    """

    token_row_prefixes = ("lm_head.",)

    def __init__(
        self,
        target: Target,
        *,
        target_layers: Integers | None = None,
        num_layers: SmallCount = 1,
        own_output: bool | None = True,
        norm_features: bool = False,
        norm_output: bool = False,
        norm_before_fc: bool = False,
        norm_before_residual: bool = False,
        window: Window | None = None,
        full_layers: Layers | None = None,
        own_embedding: bool = False,
        **settings,
    ):
        super().__init__(target, num_inputs=2, own_embedding=own_embedding, **settings)
        self.further.extend(DecoderLayer(self.config, layer=layer) for layer in range(1, num_layers))
        width, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.target_layers = choose_fused_layers(target, target_layers, choose_three_layers)
        self.norm_output, self.norm_before_residual = bool(norm_output), norm_before_residual
        self.window, self.windows = window, list_layer_windows(window, full_layers, num_layers)
        num = len(self.target_layers)
        self.input_norm = RMSNorm(num * target.width, eps=eps) if norm_before_fc else None
        self.fc_norm = nn.ModuleList([RMSNorm(target.width, eps=eps) for _ in range(num)] if norm_features else [])
        self.fc = SizedLinear(num * target.width, width)
        self.input_layernorm, self.hidden_norm, self.norm = (RMSNorm(width, eps=eps) for _ in range(3))
        if own_output is None:  # engines' heads have no bias
            own_output = target.lm_head.bias is not None
        self.lm_head = nn.Linear(width, self.vocab_size, bias=False) if own_output else None
        self.estimates_state = width == target.width
        if not self.estimates_state and not (own_embedding and own_output):
            raise ValueError(
                f"The head is {width} wide and {target.name} is {target.width}: it needs an embedding and an LM head of its own."
            )
        if self.lm_head is not None and self.estimates_state:
            self.lm_head.weight.data.copy_(target.shape_logits.scale * self.goal_head[0])  # a cap keeps the order

    def encode(self, features: Tensor) -> Tensor:
        features = features.to(self.fc.weight.dtype)
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm:
            states = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(state) for norm, state in zip(self.fc_norm, states)], dim=-1)
        return self.fc(features)

    @training_block
    def project_inputs(
        self, h: Tensor, embedding: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """h, embedding [B, S, D] -> the normed state, and query, key and value of the block, which read [B, S, 2D]"""
        normed, embedding = self.hidden_norm(h), embedding.to(self.norm.weight.dtype)
        x = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        return normed, *self.block.self_attn.project(x, cos, sin)

    @training_block
    def run_last_norm(self, h: Tensor) -> Tensor:
        """The last norm"""
        return self.norm(h)

    def step(self, d, h, tokens, positions, mask, cache):
        rotary = self.rotary(self.norm.weight, positions)
        normed, *projected = self.project_inputs(h, self.embed(tokens), *rotary)
        first, *further = (
            narrow_to_window(mask, window, depth=d, positions=positions, first=self.first_slot)
            for window in self.windows
        )
        h = self.block.attend_projected(projected, normed if self.norm_before_residual else h, first, cache)
        for layer, seen in zip(self.further, further):
            h = layer(h, rotary, seen, cache)
        normed = self.run_last_norm(h)
        return (normed if self.norm_output else h), normed

    def logits(self, d, readout):
        return self.goal_logits(readout) if self.lm_head is None else self.lm_head(readout)

    def measure_inputs(self, slots, *, random_weights):
        if self.input_norm is not None or self.fc_norm or not self.estimates_state:
            return False
        self.fc.measure_inputs((text.features for text in slots), random_weights=random_weights)
        return True

    @torch.no_grad()
    def solve(self, slots):
        """A start by regression for a head in which features enter by the residual stream and tokens by attention.

        `fc` estimates the final state at j-1. What this lacks of the final state at j is estimated by a second ridge
        regression; values and output are its part of the highest rank that the attention heads allow. Attention looks at
        its own position, because queries and keys are the same random map of the embedding. What is still missing is
        estimated by the MLP: its last matrix by a third regression, on hidden units that stay random. The last norm starts
        as a constant, further layers as the identity (docs/methods.md, section 5).
        """
        if not self.estimates_state:
            return False
        attention, config = self.block.self_attn, self.config
        state_scale = torch.cat([text.state for text in slots]).float().pow(2).mean().sqrt()
        if not self.fc_norm and self.input_norm is None:
            self.fc.set_weight(solve_ridge((text.features, text.state) for text in slots))
        states = [self.encode(text.features) for text in slots]
        inputs = [
            torch.cat([self.input_layernorm(self.embed(text.tokens[:, 0])), self.hidden_norm(state)], dim=-1)
            for text, state in zip(slots, states)
        ]
        residuals = [self.hidden_norm(state) for state in states] if self.norm_before_residual else states
        missing = [text.goals[:, 0] - residual for text, residual in zip(slots, residuals)]
        regression = solve_ridge(zip(inputs, missing))  # [D, 2D]
        covariance = sum(
            ((x @ regression.T).T @ (x @ regression.T) for x in inputs), torch.zeros((), device=state_scale.device)
        )  # [D, D]
        groups, heads, width = config.num_key_value_heads, config.num_attention_heads, attention.head_dim
        eigenvectors = torch.linalg.eigh(covariance).eigenvectors
        directions = eigenvectors[:, -groups * width :]  # [D, rank] the directions in which the regression varies most
        directions = nn.functional.pad(
            directions, (groups * width - directions.shape[1], 0)
        )  # the heads may be wider than D
        attention.v_proj.weight.copy_(directions.T @ regression)
        shared = directions.unflatten(1, (groups, 1, width)).expand(-1, -1, heads // groups, -1) * (groups / heads)
        attention.o_proj.weight.copy_(shared.flatten(1))  # query heads of a group see the same values
        key = (
            torch.randn(groups, width, self.target.width, device=state_scale.device)
            * (SELF_ATTENTION / self.target.width) ** 0.5
        )
        key = torch.cat([key, torch.zeros_like(key)], dim=-1)  # [groups, head_dim, 2D], zero for the state
        attention.k_proj.weight.copy_(key.flatten(0, 1))
        attention.q_proj.weight.copy_(key[:, None].expand(-1, heads // groups, -1, -1).flatten(0, 2))
        mlp_inputs = (residual + attention.attend_self(x) for x, residual in zip(inputs, residuals))
        self.block.solve_mlp((mlp_input, text.goals[:, 0]) for mlp_input, text in zip(mlp_inputs, slots))
        for layer in self.further:
            layer.start_as_identity()
        self.norm.weight.fill_(state_scale)
        return True


class PEagle(Eagle3):
    """P-EAGLE: an EAGLE-3 whose drafts of a round come from one pass.

    Steps 2..K read neither drafts nor the state before. Each reads a mask token and the same learnt features, and attends to
    the committed slots and to the steps before it:

    position     j-1      j       j+1     j+2
    token        x_(j-1)  x_j     mask    mask
    features     f_(j-2)  f_(j-1) shared  shared
    guesses               x_(j+1) x_(j+2) x_(j+3)

    mask_token: the token whose embedding the masks have; None: the last one of the vocabulary
    """

    estimates_state = False
    parallel = True

    def __init__(self, target: Target, *, mask_token: Whole | None = None, **settings):
        super().__init__(target, **settings)
        self.mask_token = target.vocab_size - 1 if mask_token is None else mask_token
        if not 0 <= self.mask_token < target.vocab_size:
            raise ValueError(f"mask_token={mask_token} must be a token of the target, 0 .. {target.vocab_size - 1}.")
        self.mask_hidden = nn.Parameter(torch.randn(1, 1, len(self.target_layers) * target.width))

    def blank(self, num_rows: int, num: int) -> tuple[Tensor, Tensor]:
        h = self.encode(self.mask_hidden).expand(num_rows, num, -1)
        return h, torch.full((num_rows, num), self.mask_token, device=h.device)

    def step(self, d, h, tokens, positions, mask, cache):
        if d > 1:
            h, tokens = self.blank(*tokens.shape)
        return super().step(d, h, tokens, positions, mask, cache)

    @torch.no_grad()
    def solve(self, slots):
        """The first step as in EAGLE-3. The features of masks start as the mean ones."""
        self.mask_hidden.copy_(torch.cat([text.features for text in slots]).float().mean(0))
        return super().solve(slots)
