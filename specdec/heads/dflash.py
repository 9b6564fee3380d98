"""Block drafters: DFlash (2602.06036), DSpark (2607.05147) and those that followed. One pass makes the states of all
drafts.

input    e(x_j)   mask   mask   mask          a block at slot j; keys: features f_0 .. f_(j-1), then the block's own
DFlash            draft1 draft2 draft3        a mask guesses its own position
DSpark   draft1   draft2 draft3               an input guesses the next position, so K inputs make K drafts

A part of the package `dependence` makes a draft depend on those before it. DFlash has none, DSpark a Markov head,
DFlash 2, LiLiCorr and Domino have theirs.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.llama.modeling_llama import LlamaMLP, apply_rotary_pos_emb

from specdec.core import span_attention
from specdec.core.cache import RowCache
from specdec.core.option_types import Integers, Layers, Positive, SmallCount, Whole, Width, Window
from specdec.core.span_attention import Seen, narrow_to_window
from specdec.heads.base import Drafter, SizedLinear
from specdec.heads.blocks import (
    RMSNorm,
    Rotary,
    choose_five_layers,
    choose_fused_layers,
    make_block_config,
    make_row_cache,
    measure_norm_gain,
    measure_scale,
    solve_ridge,
)
from specdec.heads.convolution import BlockConvolution
from specdec.heads.dependence import Dependence, DraftedBlock, DrafterSizes, Lattice, make_dependence
from specdec.target.model import Target


class BlockLayer(nn.Module):
    """A decoder layer over blocks; its attention has the context's keys beside the block's own (Qwen3's q and k
    norms).
    """

    def __init__(self, config, *, layer: int, sinks: bool = False, taps: int | None = None):
        super().__init__()
        width, eps, self.head_dim, self.layer = config.hidden_size, config.rms_norm_eps, config.head_dim, layer
        self.groups = config.num_key_value_heads
        queries, keys = config.num_attention_heads * self.head_dim, self.groups * self.head_dim
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(width, eps=eps) for _ in range(2))
        self.q_norm, self.k_norm = (RMSNorm(self.head_dim, eps=eps) for _ in range(2))
        self.q_proj = nn.Linear(width, queries, bias=False)
        self.k_proj = nn.Linear(width, keys, bias=False)
        self.v_proj = nn.Linear(width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)
        self.mlp = LlamaMLP(config)
        self.attention_sink_bias = nn.Parameter(torch.zeros(config.num_attention_heads)) if sinks else None
        convolutions = [BlockConvolution(width, taps) if taps else None for _ in range(2)]
        self.attention_conv, self.mlp_conv = convolutions

    def keys(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, S, head_dim] of x [B, S, D]."""
        shape = (*x.shape[:2], self.groups, self.head_dim)
        key = self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2)
        value = self.v_proj(x).view(shape).transpose(1, 2)
        return apply_rotary_pos_emb(key, key, *rotary)[0].to(value.dtype), value

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], mask: Seen, cache, *, size: int, causal: bool
    ) -> Tensor:
        """Output [B, S*size, D] of the layer for S blocks one after the other. x [B, S*size, D]

        mask: visible keys of the context, [B, 1, S, C] bool or spans
        causal: whether an input sees only itself and earlier inputs of its block
        """
        num_rows, num = x.shape[:2]
        normed, mix_output = _mix_input(self.attention_conv, self.input_layernorm(x), size)
        query = self.q_norm(self.q_proj(normed).view(num_rows, num, -1, self.head_dim)).transpose(1, 2)
        query = apply_rotary_pos_emb(query, query, *rotary)[0] * self.head_dim**-0.5
        entries = self.keys(normed, rotary)  # K, V [B, G, S*size, head_dim]
        query = query.to(entries[1].dtype).view(num_rows, self.groups, -1, num // size, size, self.head_dim)
        block = tuple(entry.unflatten(2, (-1, size)) for entry in entries)
        out = self._attend(query, cache.visible_keys(self.layer), block, mask, causal=causal)
        out = out.flatten(1, 2).flatten(2, 3).transpose(1, 2).flatten(2)  # [B, S*size, H * head_dim]
        x = x + mix_output(self.o_proj(out))
        normed, mix_output = _mix_input(self.mlp_conv, self.post_attention_layernorm(x), size)
        return x + mix_output(self.mlp(normed))

    def _attend(
        self, query: Tensor, context: tuple[Tensor, ...], block: tuple[Tensor, ...], mask: Seen, *, causal: bool
    ) -> Tensor:
        """Attention [B, G, H/G, S, size, head_dim] of query, of this shape, over the context and the own block.

        context: K, V [B, G, C, head_dim]; block: K, V [B, G, S, size, head_dim]
        With sinks each slot has one more key with the value zero. All queries of a head have the same score for it.
        """
        if self.attention_sink_bias is None:
            return span_attention.attend(query, *context, mask, *block, causal=causal)
        pad = nn.functional.pad
        sinks = self.attention_sink_bias.to(query.dtype).view(1, self.groups, -1, 1, 1, 1)
        query = torch.cat([query, sinks.expand(*query.shape[:-1], 1)], dim=-1)
        context_key, context_value, key, value = (pad(entry, (0, 1)) for entry in (*context, *block))
        sink_value = torch.zeros_like(key[:, :, :, :1])
        entries = pad(sink_value[..., :-1], (0, 1), value=1.0), sink_value, key, value
        return span_attention.attend(query, context_key, context_value, mask, *entries, causal=causal)[..., :-1]


def _mix_input(convolution: BlockConvolution | None, x: Tensor, size: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The mixed input [B, S*size, D] of a sublayer, and the function that mixes its output. x [B, S*size, D]"""
    if convolution is None:
        return x, lambda out: out
    delta = convolution.kernels(x)
    return convolution.mix(x, delta, 0, size), lambda out: convolution.mix(out, delta, 1, size)


def _make_mask(target: Target, mask_token: int | None) -> nn.Parameter:
    """The embedding [D] of masks: a token's, frozen, or the mean of all. Raises ValueError for an unknown token."""
    if mask_token is not None and not 0 <= mask_token < target.vocab_size:
        raise ValueError(f"mask_token={mask_token} must be a token of the target, below {target.vocab_size}.")
    rows = target.embed.weight.detach().float()
    return nn.Parameter(rows.mean(0) if mask_token is None else rows[mask_token], requires_grad=mask_token is None)


def list_causal_layers(windows: Sequence[int | None], *, full_causal: bool, window_causal: bool) -> list[bool]:
    """Whether an input sees only itself and earlier inputs of its block, for each layer."""
    return [full_causal if window is None else window_causal for window in windows]


class BlockDrafter(Drafter):
    """Makes num_drafts drafts in one pass of num_layers layers, with the target's embedding and LM head.

    target_layers: hidden states to fuse; null: five, evenly from 2 to L - 2 (blocks.py)
    anchor_predicts: DSpark's alignment, see above; else DFlash's
    fuse: input fusion beside keys and values: every input gets a linear map of the anchor's embedding and the newest
        feature. No paper and no engine has it. It gives short runs a closed-form start
        (results/08-starts-and-searches.md; docs/methods.md, section 5)
    dependence: part that makes a draft depend on those before it: {kind: a file of specdec/heads/dependence, and its
        arguments}; null: none
    convolution: positions that DFlash 2's convolution around each sublayer reads; null: no convolution
    confidence: DSpark's confidence head, which estimates from a draft's state whether it is accepted
    confidence_markov: whether the confidence head also reads the previous token, as a Markov head reads it
    window: positions before a block that its inputs see, as Speculators trains heads; None: all
    full_layers: layers, from 0, without the window; None: no layer
    window_causal: whether, in layers with a window, an input sees only itself and earlier inputs of its block, which is
        the default of Speculators and vLLM; in other layers all inputs of a block see each other
    mask_token: token whose embedding is the mask, frozen, as DeepSpec and z-lab have it; null: a trained embedding,
        which SGLang and TensorRT-LLM cannot load
    full_causal: causal attention inside a block in layers without a window, too, in published heads
    sinks: a learnt score of each attention head for attending to no key, in published heads
    block: fields of published heads, see make_block_config
    own_embedding, own_output: an embedding and an LM head that are not the target's, in published heads
    embedding_scale: factor of the rows of the embedding, and of the mask, in published heads. Engines give block
        drafters the rows without the scale that Gemma's own embedding has
    """

    context_kind = "block"
    exchangeable_parts = "dependence", "convolution"
    token_row_prefixes: tuple[str, ...] = ("lm_head.",)

    def __init__(
        self,
        target: Target,
        *,
        num_drafts: SmallCount = 4,
        num_layers: SmallCount = 2,
        target_layers: Integers | None = None,
        intermediate_size: Width | None = None,
        anchor_predicts: bool = False,
        fuse: bool = False,
        dependence: dict | None = None,
        convolution: SmallCount | None = None,
        confidence: bool = False,
        confidence_markov: bool = True,
        window: Window | None = None,
        full_layers: Layers | None = None,
        window_causal: bool = True,
        mask_token: Whole | None = None,
        full_causal: bool = False,
        sinks: bool = False,
        block: dict | None = None,
        own_embedding: bool = False,
        own_output: bool = False,
        embedding_scale: Positive = 1.0,
        vocab: Tensor | None = None,
    ):
        super().__init__(target, vocab=vocab)
        self.embedding_scale = embedding_scale
        self.hold_embedding(target.width if own_embedding else None)
        self.hold_window(window, full_layers=full_layers, num_layers=num_layers)
        self.window_causal = window_causal
        self.causal_layers = list_causal_layers(self.windows, full_causal=full_causal, window_causal=window_causal)
        self.depth = self.num_drafts = num_drafts
        self.anchor_predicts, self.full_causal, self.sinks = anchor_predicts, full_causal, sinks

        # The pass over a block: fused features, layers, masks
        width = target.width
        self.target_layers = choose_fused_layers(target, target_layers, choose_five_layers)
        self.config = config = make_block_config(target, intermediate_size=intermediate_size, block=block)
        self.fc = SizedLinear(len(self.target_layers) * width, width)
        self.hidden_norm, self.norm = (RMSNorm(width, eps=config.rms_norm_eps) for _ in range(2))
        self.layers = nn.ModuleList(
            BlockLayer(config, layer=layer, sinks=sinks, taps=convolution) for layer in range(num_layers)
        )
        self.mask_token, self.mask_embedding = mask_token, _make_mask(target, mask_token)
        self.rotary = Rotary(config)
        self.join = nn.Linear(2 * width, num_drafts * width, bias=False) if fuse else None

        # The parts behind it: dependence, LM head, confidence head
        self.dependence: Dependence | None = None
        num_markov = 0
        if dependence is not None:
            sizes = DrafterSizes(width, target.vocab_size, self.vocab_size, num_drafts, config.rms_norm_eps)
            self.dependence = part = make_dependence(sizes, dependence)
            self.token_row_prefixes = ("lm_head.", *(f"dependence.{name}" for name in part.token_row_prefixes))
            num_markov = confidence_markov * part.num_confident
        self.has_confidence, self.has_candidates = confidence, isinstance(self.dependence, Lattice)
        self.lm_head = nn.Linear(width, self.vocab_size, bias=False) if own_output else None
        self.parallel = self.dependence is None and not confidence
        self.confidence_head = nn.Linear(width + num_markov, 1) if confidence else None
        with torch.no_grad():
            self.norm.weight.copy_(measure_norm_gain(target))

    def with_window(self, window):
        changed = super().with_window(window)
        changed.window_causal = self.window_causal if window is None else all(self.causal_layers)
        return changed

    def cache(self, batch: int) -> RowCache:
        return make_row_cache(self.config, self.fc.weight, layers=len(self.layers), batch=batch, masked=True)

    def embed(self, tokens: Tensor) -> Tensor:
        return self._scale_rows(
            F.embedding(tokens, self.target.embed.weight if self.embedding is None else self.embedding)
        )

    def _scale_rows(self, rows: Tensor) -> Tensor:
        return rows if self.embedding_scale == 1 else self.embedding_scale * rows

    def encode(self, features: Tensor) -> Tensor:
        return self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))

    def context(self, h, positions, cache):
        rotary = self.rotary(h, positions)
        for layer in self.layers:
            key, value = layer.keys(h, rotary)
            cache.update(key, value, layer.layer)

    def step(self, d, h, tokens, positions, mask, cache):
        embedding = self.embed(tokens).to(self.fc.weight.dtype)  # [B, S, D] of the token before draft d
        width, dependence = self.target.width, self.dependence
        total = width * self.depth
        if d == 1:
            feature, h = h, self._run_block(embedding, h, positions, mask, cache)
            if dependence is not None:
                states = h.unflatten(-1, (self.depth, width))
                block = DraftedBlock(feature, states, tokens, self.unary, self._embed_drafts, self.to_target)
                h = torch.cat([h, dependence.first_carried(block)], dim=-1)
        states, carried = h[..., :total], h[..., total:]
        state = states[..., (d - 1) * width : d * width]
        if dependence is None:
            return h, state
        readout, following = dependence.advance(d, state.to(embedding.dtype), tokens, embedding, carried)
        h = h if following is carried else torch.cat([states, following], dim=-1)
        return h, torch.cat([state, readout], dim=-1)  # [B, S, D + R]

    def all_readouts(self, h):
        return h.unflatten(-1, (self.num_drafts, -1))

    def _run_block(self, embedding: Tensor, h: Tensor, positions: Tensor, mask: Seen, cache) -> Tensor:
        """States [B, S, K*D] of all drafts. embedding [B, S, D]: anchors' embeddings; h [B, S, D]: encoded features"""
        num_rows, num = positions.shape
        size = self.num_drafts + (not self.anchor_predicts)
        masks = self._scale_rows(self.mask_embedding).to(embedding.dtype).expand(num_rows, num, size - 1, -1)
        x = torch.cat([embedding[:, :, None], masks], dim=2)  # [B, S, size, D]
        if self.join is not None:
            fused = self.join(torch.cat([embedding, h], dim=-1)).unflatten(-1, (self.num_drafts, -1))
            x = x + nn.functional.pad(fused, (0, 0, size - self.num_drafts, 0))
        x = x.flatten(1, 2)  # [B, S*size, D]
        input_positions = (positions[..., None] + torch.arange(size, device=positions.device)).flatten(1)
        rotary = self.rotary(x, input_positions)
        for layer, window, causal in zip(self.layers, self.windows, self.causal_layers):
            # The anchor's own position counts as one more
            limit = None if window is None else window + 1
            seen = narrow_to_window(mask, limit, depth=2, positions=positions, first=0)
            x = layer(x, rotary, seen, cache, size=size, causal=causal)
        return self.norm(x).unflatten(1, (num, size))[:, :, size - self.num_drafts :].flatten(2)

    def logits(self, d, readout):
        if self.dependence is None:
            return self.unary(readout)
        state, rest = readout[..., : self.target.width], readout[..., self.target.width :]
        if self.dependence.before_shape and self.lm_head is None:
            scores = self.dependence.logits(rest, lambda: self._score(state), self._embed_drafts)
            return self.target.shape_logits(scores)
        return self.dependence.logits(rest, lambda: self.unary(state), self._embed_drafts)

    @property
    def lattice(self) -> Lattice | None:
        return self.dependence if isinstance(self.dependence, Lattice) else None

    def loss_logits(self, d, readout):
        return self.logits(d, readout) if self.lattice is None else self.unary(readout[..., : self.target.width])

    def guess(self, d, readout, loss_logits):
        if self.lattice is None:
            return super().guess(d, readout, loss_logits)
        ids, scores = self.lattice.score(readout[..., self.target.width :], self._embed_drafts)
        return ids.gather(-1, scores.argmax(-1, keepdim=True))[..., 0]

    def candidate_loss(self, readout, loss_logits, token):
        if self.lattice is None:
            return None
        return self.lattice.candidate_loss(readout[..., self.target.width :], loss_logits, token, self._embed_drafts)

    def unary(self, state: Tensor) -> Tensor:
        """Logits [..., W] of a state [..., D], independent of the drafts before."""
        scores = self._score(state)
        return self.target.shape_logits(scores) if self.lm_head is None else scores

    def _score(self, state: Tensor) -> Tensor:
        """The LM head's output [..., W] for a state [..., D]."""
        # Contiguous: a part of a wider tensor makes a batched product if it has several rows. `compile` does not pack
        # its weight, and on a CPU it takes ten times as long
        state = state.to(self.fc.weight.dtype).contiguous()
        return self.goal_scores(state) if self.lm_head is None else self.lm_head(state)

    def _embed_drafts(self, ids: Tensor) -> Tensor:
        return self._scale_rows(F.embedding(self.to_target(ids), self.target.embed.weight))

    def confidence(self, d, readout):
        head = self.confidence_head
        return None if head is None else head(readout[..., : head.in_features].detach())[..., 0]

    def measure_inputs(self, slots, *, random_weights):
        self.fc.measure_inputs([text.features for text in slots], random_weights=random_weights)
        return True

    @property
    def solves(self):
        return self.join is not None

    @torch.no_grad()
    def solve(self, slots):
        """Sets `fc` and `join` by ridge regression (docs/methods.md, section 5).

        `fc` estimates the newest final state; `join` estimates the states to guess from this state and the anchor. The
        layers start as the identity and the last norm as a constant, so each draft starts as its own regression.
        """
        if self.join is None:
            return False
        state_scale = measure_scale(text.state for text in slots)
        self.fc.set_weight(solve_ridge((text.features, text.state) for text in slots))
        self.hidden_norm.weight.fill_(state_scale)
        joined = [
            torch.cat([self.embed(text.tokens[:, 0]).float(), self.encode(text.features)], dim=-1) for text in slots
        ]
        num = min(self.num_drafts, slots[0].goals.shape[1])

        def solve_depth(d: int) -> Tensor:
            """The map [D, 2D] onto the states at depth d + 1."""
            return solve_ridge((x, text.goals[:, d]) for x, text in zip(joined, slots))

        maps = [solve_depth(d) for d in range(num)]
        if self.anchor_predicts:
            maps[0] = maps[0] - torch.eye(
                *maps[0].shape, device=state_scale.device
            )  # the embedding is added in any case
        nn.init.zeros_(self.join.weight)
        self.join.weight[: num * self.target.width].copy_(torch.cat(maps))
        if self.mask_token is None:
            self.mask_embedding.zero_()
        self.norm.weight.fill_(state_scale)
        for layer in self.layers:
            nn.init.zeros_(layer.o_proj.weight)
            nn.init.zeros_(layer.mlp.down_proj.weight)
        return True
