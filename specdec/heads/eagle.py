"""EAGLE (2401.15077), EAGLE-3 (2503.01840, with the norms of 3.1) and P-EAGLE (2602.01469).

Each has a decoder layer over features and tokens, `block`. EAGLE-3 and P-EAGLE may have further layers behind it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from specdec.core.cache import RowCache
from specdec.core.compile import training_block
from specdec.core.option_types import Integers, Layers, SmallCount, Whole, Width, Window
from specdec.heads.base import Drafter, SizedLinear, Slots
from specdec.heads.blocks import (
    Block,
    DecoderLayer,
    RMSNorm,
    Rotary,
    choose_fused_layers,
    choose_three_layers,
    make_block_config,
    make_row_cache,
    measure_scale,
    solve_ridge,
)
from specdec.target.model import Target

SELF_ATTENTION = 4.0  # squared scale of EAGLE-3's first queries and keys: the strength of attention to the own position


class _Eagle(Drafter):
    """The base of these heads: a block, its cache and rotary embedding. h and the readout have the block's width."""

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
        window: Window | None = None,
        vocab: Tensor | None = None,
    ):
        """num_inputs: number of vectors of its width that the block reads; other arguments as of `Eagle` and
        `Eagle3`
        """
        super().__init__(target, vocab=vocab)
        self.hold_window(window)
        self.config = make_block_config(target, intermediate_size=intermediate_size, block=block)
        self.hold_embedding(self.config.hidden_size if own_embedding else None)
        self.block = Block(self.config, width=num_inputs * self.config.hidden_size, layer=0)
        self.rotary = Rotary(self.config)
        self.further = nn.ModuleList()  # layers behind the block

    def cache(self, batch: int) -> RowCache:
        return make_row_cache(
            self.config, self.block.self_attn.k_proj.weight, layers=1 + len(self.further), batch=batch
        )

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens).to(self.block.mlp.up_proj.weight.dtype)  # [B, S, D]


class Eagle(_Eagle):
    """EAGLE-1 predicts the target's next feature, its final normed state, and reads it with the target's LM head.

    A reduced `vocab` keeps only its rows of the borrowed LM head: drafting is faster, and fewer tokens can be drafted.
    fc_bias: bias of published heads; train without it, because engines treat it differently (docs/file-formats.md)
    block: fields of published heads, see make_block_config; own_embedding: an embedding that is not the target's
    window: positions that the block sees, its own included; it must exceed the drafts of a round; None: all positions
    """

    def __init__(self, target: Target, *, fc_bias: bool = False, **settings):
        super().__init__(target, num_inputs=1, **settings)
        self.target_layers = target.layer_ids([-1])
        self.fc = SizedLinear(2 * target.width, target.width, bias=fc_bias)  # embedding first

    def step(self, d, h, tokens, positions, mask, cache):
        x = self.fc(torch.cat([self.embed(tokens), h], dim=-1))  # [B, S, D]
        (seen,) = self.narrow_keys(mask, d, positions)
        h = self.block(x, x, self.rotary(x, positions), seen, cache)
        return h, h

    def _join_inputs(self, slots: list[Slots]) -> Iterator[Tensor]:
        """Yields the inputs of `fc` of each text, [M, 2D]."""
        for text in slots:
            yield torch.cat([self.embed(text.tokens[:, 0]), self.encode(text.features)], dim=-1)

    def measure_inputs(self, slots, *, random_weights):
        self.fc.measure_inputs(self._join_inputs(slots), random_weights=random_weights)
        return True

    @torch.no_grad()
    def solve(self, slots):
        """Sets `fc` by ridge regression onto the next feature, and the MLP onto the residual. Attention starts at zero.

        This replaces more than the first hundreds of training steps (results/01-first-search.md; docs/methods.md,
        section 5).
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
    """EAGLE-3 fuses several of the target's layers and recycles its own state.

    own_output: an LM head of its own, which starts as a copy of the target's, as in the paper; false: the target's,
        frozen, and the head's file holds none; None: its own if the target's has a bias, which engines lack
    target_layers: hidden states to fuse; None: (2, L // 2, L - 3), as in published heads; shallow targets: see
        blocks.py
    num_layers: number of layers, the block included; published heads have one
    norm_features, norm_output: norms of EAGLE 3.1 (2605.09992), of each fused state and of the state that is fed back.
        Off by default, because every serving engine loads the plain form
    norm_before_fc: one norm of all fused states; norm_before_residual: the normed state as residual; both in published
        heads
    block: fields of published heads, see make_block_config; hidden_size: width of a head that is not as wide as the
        target
    own_embedding: an embedding that is not the target's, in published heads
    window: positions that a layer sees, its own included, as Speculators trains heads; it must exceed the drafts of a
        round; None: all positions
    full_layers: layers, from 0, without the window; None: no layer
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
        full_layers: Layers | None = None,
        own_embedding: bool = False,
        **settings,
    ):
        super().__init__(target, num_inputs=2, own_embedding=own_embedding, **settings)
        self.further.extend(DecoderLayer(self.config, layer=layer) for layer in range(1, num_layers))
        width, eps = self.config.hidden_size, self.config.rms_norm_eps
        self.target_layers = choose_fused_layers(target, target_layers, choose_three_layers)
        self.norm_output, self.norm_before_residual = bool(norm_output), norm_before_residual
        self.hold_window(self.window, full_layers=full_layers, num_layers=num_layers)
        num = len(self.target_layers)
        self.input_norm = RMSNorm(num * target.width, eps=eps) if norm_before_fc else None
        self.fc_norm = nn.ModuleList([RMSNorm(target.width, eps=eps) for _ in range(num)] if norm_features else [])
        self.fc = SizedLinear(num * target.width, width)
        self.input_layernorm, self.hidden_norm, self.norm = (RMSNorm(width, eps=eps) for _ in range(3))
        if own_output is None:  # engines' heads have no bias
            own_output = target.lm_head.bias is not None
        self.estimates_state = width == target.width
        if not self.estimates_state and not (own_embedding and own_output):
            raise ValueError(
                f"The head is {width} wide and {target.name} is {target.width}: it needs an embedding and an LM head "
                "of its own."
            )
        self.lm_head = self._make_output(width) if own_output else None

    def _make_output(self, width: int) -> nn.Linear:
        """An LM head, which starts as a copy of the target's if the head is as wide as the target."""
        lm_head = nn.Linear(width, self.vocab_size, bias=False)
        if self.estimates_state:
            lm_head.weight.data.copy_(self.target.shape_logits.scale * self.goal_head[0])  # a cap keeps the order
        return lm_head

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
        """The normed state [B, S, D], and query, key and value of the block. h, embedding [B, S, D]"""
        normed, embedding = self.hidden_norm(h), embedding.to(self.norm.weight.dtype)
        x = torch.cat([self.input_layernorm(embedding), normed], dim=-1)
        return normed, *self.block.self_attn.project(x, cos, sin)

    @training_block
    def run_last_norm(self, h: Tensor) -> Tensor:
        """The last norm of h [B, S, D]."""
        return self.norm(h)

    def step(self, d, h, tokens, positions, mask, cache):
        rotary = self.rotary(self.norm.weight, positions)
        normed, *projected = self.project_inputs(h, self.embed(tokens), *rotary)
        first, *further = self.narrow_keys(mask, d, positions)
        h = self.block.attend_projected(projected, normed if self.norm_before_residual else h, first, cache)
        for layer, seen in zip(self.further, further):
            h = layer(h, rotary, seen, cache)
        normed = self.run_last_norm(h)
        return (normed if self.norm_output else h), normed

    def logits(self, d, readout):
        return self.goal_logits(readout) if self.lm_head is None else self.lm_head(readout)

    def measure_inputs(self, slots, *, random_weights):
        if not (self.estimates_state and self._fuses_plain_features):
            return False
        self.fc.measure_inputs([text.features for text in slots], random_weights=random_weights)
        return True

    @property
    def _fuses_plain_features(self) -> bool:
        """Whether `fc` reads the features as they are, without norms."""
        return self.input_norm is None and not self.fc_norm

    @torch.no_grad()
    def solve(self, slots):
        """A start by regression for a head in which features enter by the residual stream and tokens by attention.

        1. `fc` estimates the final state at j-1.
        2. Attention estimates the residual of the final state at j, see `_solve_attention`.
        3. The MLP estimates the remaining residual. Its hidden units stay random.

        The last norm starts as a constant, further layers as the identity (docs/methods.md, section 5).
        """
        if not self.estimates_state:
            return False
        state_scale = measure_scale(text.state for text in slots)
        if self._fuses_plain_features:
            self.fc.set_weight(solve_ridge((text.features, text.state) for text in slots))
        states = [self.encode(text.features) for text in slots]
        normed = [self.hidden_norm(state) for state in states]
        inputs = [
            torch.cat([self.input_layernorm(self.embed(text.tokens[:, 0])), state], dim=-1)
            for text, state in zip(slots, normed)
        ]
        residuals = normed if self.norm_before_residual else states
        goals = [text.goals[:, 0] for text in slots]
        self._solve_attention(inputs, residuals, goals)
        attention = self.block.self_attn
        mlp_inputs = (residual + attention.attend_self(x) for x, residual in zip(inputs, residuals))
        self.block.solve_mlp(zip(mlp_inputs, goals))
        for layer in self.further:
            layer.start_as_identity()
        self.norm.weight.fill_(state_scale)
        return True

    def _solve_attention(self, inputs: list[Tensor], residuals: list[Tensor], goals: list[Tensor]) -> None:
        """Sets attention so that every position attends to itself and adds a ridge regression of its input.

        Values and output are the regression's part of the highest rank that the attention heads allow. Queries and keys
        are the same random map of the embedding.

        inputs [M, 2D], residuals [M, D], goals [M, D] of each text: attention estimates goals - residuals
        """
        attention, config, target_width = self.block.self_attn, self.config, self.target.width
        groups, heads, width = config.num_key_value_heads, config.num_attention_heads, attention.head_dim
        missing = (goal - residual for goal, residual in zip(goals, residuals))
        regression = solve_ridge(zip(inputs, missing))  # [D, 2D]
        device = regression.device
        outputs = (x @ regression.T for x in inputs)
        covariance = sum((y.T @ y for y in outputs), torch.zeros((), device=device))  # [D, D]
        eigenvectors = torch.linalg.eigh(covariance).eigenvectors
        directions = eigenvectors[:, -groups * width :]  # [D, rank] the directions in which the regression varies most
        missing_rank = groups * width - directions.shape[1]  # the heads may be wider than D
        directions = nn.functional.pad(directions, (missing_rank, 0))
        attention.v_proj.weight.copy_(directions.T @ regression)
        shared = directions.unflatten(1, (groups, 1, width)).expand(-1, -1, heads // groups, -1) * (groups / heads)
        attention.o_proj.weight.copy_(shared.flatten(1))  # query heads of a group see the same values
        key = torch.randn(groups, width, target_width, device=device) * (SELF_ATTENTION / target_width) ** 0.5
        key = torch.cat([key, torch.zeros_like(key)], dim=-1)  # [groups, head_dim, 2D], zero for the state
        attention.k_proj.weight.copy_(key.flatten(0, 1))
        attention.q_proj.weight.copy_(key[:, None].expand(-1, heads // groups, -1, -1).flatten(0, 2))


class PEagle(Eagle3):
    """P-EAGLE is an EAGLE-3 whose drafts of a round come from one pass.

    Steps 2..K read neither drafts nor the state before. Each reads a mask token and the same learnt features. It
    attends to the committed slots and to the steps before it:

    position     j-1      j       j+1     j+2
    token        x_(j-1)  x_j     mask    mask
    features     f_(j-2)  f_(j-1) shared  shared
    guesses               x_(j+1) x_(j+2) x_(j+3)

    mask_token: token whose embedding the masks have; None: the last token of the vocabulary
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
        """Sets the first step as in EAGLE-3, and the features of masks to the mean features."""
        self.mask_hidden.copy_(torch.cat([text.features for text in slots]).float().mean(0))
        return super().solve(slots)
