"""LiLiCorr (NVIDIA Model-Optimizer): a small transformer reads all candidates, and its factors score neighbours.

x[s, k]     e(candidate k of position s) + the state of s + a map of the candidate's log-probability and rank
            + embeddings of s and k
a           the encoded feature before the anchor; the anchor's own token is not read
pair(i, j)  scale * cos(out(f_i), in(f_j)), with f = silu(W [x; a; x * a])
start(j)    scale * cos(anchor_out(a), in(f_j)), the scores of the first position

The scores are these cosines alone: unary logits are read, not added. So no start is the identity. Until the part is
trained, drafts are about as good as random choices among the candidates.
"""

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

from specdec.core.sampling import widen_logits
from specdec.heads.blocks import RMSNorm
from specdec.heads.dependence.base import DrafterSizes, Lattice

NUM_FEATURES = 5  # numbers that describe a candidate, see `LiLiCorr._score_pairs`
INIT_STD = 0.02  # of all linear maps, as published
SIZES_ADVICE = (
    "dependence: hidden, factor, num_layers and hidden * mlp_ratio must be at least 1, logit_scale above 0, and "
    "vector_eps between 0 and 0.5."
)
BLOCKS_PER_PASS = 4096  # blocks whose candidates are read at a time; CUDA's attention takes 65,535 rows at most


class MLP(nn.Module):
    """Two linear maps with SiLU between them."""

    def __init__(self, width: int, hidden_width: int, out: int):
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(width, hidden_width), nn.Linear(hidden_width, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(silu(self.up_proj(x)))


class LatticeAttention(nn.MultiheadAttention):
    """Attention of all candidates of a block to each other, with a bias that all blocks share."""

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:  # type: ignore[override]
        """x [M, L, H], bias [heads, L, L] -> [M, L, H]"""
        projected = nn.functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        query, key, value = projected.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # [M, heads, L, .]
        out = scaled_dot_product_attention(query, key, value, attn_mask=bias.to(query.dtype))
        return self.out_proj(out.transpose(1, 2).flatten(2))


class LatticeLayer(nn.Module):
    """A transformer layer over the candidates of a block."""

    def __init__(self, width: int, num_heads: int, hidden_width: int, eps: float):
        super().__init__()
        self.attn_norm, self.mlp_norm = (RMSNorm(width, eps=eps) for _ in range(2))
        self.attn, self.mlp = LatticeAttention(width, num_heads), MLP(width, hidden_width, width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attn(self.attn_norm(x), bias)
        return x + self.mlp(self.mlp_norm(x))


def _check_sizes(top: int, width: int, num_heads: int, smallest_size: int) -> None:
    """Raises ValueError for sizes that engines, attention or linear maps do not have."""
    if top not in (2, 4, 8, 16):
        raise ValueError(f"dependence.top={top} must be 2, 4, 8 or 16: engines have no other lattice of LiLiCorr.")
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"dependence.num_heads={num_heads} must divide dependence.hidden={width}.")
    if smallest_size < 1:
        raise ValueError(SIZES_ADVICE)


class LiLiCorr(Lattice):
    """The part with its scores of all pairs of candidates.

    top: a power of two up to 16, as engines have it; hidden: width of the transformer, null: the drafter's
    factor: width of the vectors whose cosines are the scores; vector_eps: least length by which these are divided

    `first_carried` scores all pairs. Besides the entries of each lattice it carries the candidates' target ids [K *
    top], the first scores [top], pair matrices [(K-1) * top * top], and whether all tokens so far were candidates [1].
    Behind a token that is no candidate, which only a given text has, all scores are zero. Training keeps about 1.4 MB
    in float32 for each anchor (K = 4, top = 8, hidden = 256), in proportion to K * top * hidden.

    The loss `candidates` is the published cross-entropy without its margin terms (hinge and penalty). A position counts
    if its goal, and all tokens of the text before it in the block, are among the candidates. The goal is the target's
    likeliest token here, and the text's in the publication. The sum is divided by the number of all goals, not of those
    that count. A block that the text's end cuts counts as far as it goes.
    """

    head = "lilicorr"

    def __init__(
        self,
        sizes: DrafterSizes,
        *,
        top: int = 8,
        hidden: int | None = 256,
        factor: int = 128,
        num_layers: int = 2,
        num_heads: int = 4,
        mlp_ratio: float = 2.0,
        logit_scale: float = 8.0,
        vector_eps: float = 1e-4,
    ):
        super().__init__(sizes, top=top)
        width, num = hidden or sizes.width, sizes.num_drafts
        hidden_width = int(width * mlp_ratio)
        _check_sizes(top, width, num_heads, min(width, factor, num_layers, hidden_width))
        if logit_scale <= 0 or not 0 < vector_eps < 0.5:
            raise ValueError(SIZES_ADVICE)
        self.logit_scale, self.vector_eps = logit_scale, vector_eps
        self.token_proj = nn.Identity() if width == sizes.width else nn.Linear(sizes.width, width)
        self.pass_hidden_proj, self.context_proj = (nn.Linear(sizes.width, width) for _ in range(2))
        self.feature_norm, self.feature_mlp = nn.LayerNorm(NUM_FEATURES), MLP(NUM_FEATURES, width, width)
        self.slot_embedding = nn.Parameter(torch.zeros(1, 1, num, 1, width))
        self.rank_embedding = nn.Parameter(torch.zeros(1, 1, 1, self.top, width))
        self.relative_slot_bias = nn.Parameter(torch.zeros(num_heads, 2 * num + 1))  # of distances -num .. num
        self.same_slot_bias = nn.Parameter(torch.zeros(num_heads))
        self.layers = nn.ModuleList(LatticeLayer(width, num_heads, hidden_width, sizes.eps) for _ in range(num_layers))
        self.output_norm, self.anchor_norm = (RMSNorm(width, eps=sizes.eps) for _ in range(2))
        self.factor_input_proj = nn.Linear(3 * width, width)
        self.out_head, self.in_head, self.anchor_out_head = (nn.Linear(width, factor) for _ in range(3))
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=INIT_STD)
                nn.init.zeros_(module.bias)

    def choose_candidates(self, unary, states):
        def run(states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = widen_logits(unary(states))
            best = logits.topk(self.top)
            return best.indices, best.values, logits.logsumexp(-1, keepdim=True)

        if not torch.is_grad_enabled():
            return run(states)
        # The log-probabilities train the states, and the logits of all tokens are made again in the backward pass
        return checkpoint(run, states, use_reentrant=False, preserve_rng_state=False)

    def prepare_carried(self, block, ids, scores, *normalisers):
        leading_shape = ids.shape[:-2]  # [...]
        chunks = (part.reshape(-1, *part.shape[len(leading_shape) :]).split(BLOCKS_PER_PASS) for part in
                 (block.feature, block.states, ids, scores - normalisers[0]))  # fmt: skip
        cosines = torch.cat([self._score_pairs(block.embed, *part) for part in zip(*chunks)]).unflatten(
            0, leading_shape
        )
        return block.to_target(ids).flatten(-2), cosines, torch.ones_like(cosines[..., :1])

    def _score_pairs(self, embed, feature: Tensor, states: Tensor, ids: Tensor, log_probs: Tensor) -> Tensor:
        """The cosines [M, top + (K-1) * top * top] of M blocks.

        feature: [M, D]; states: [M, K, D]; ids, log_probs: [M, K, top]
        """
        dtype, (num, top) = self.pass_hidden_proj.weight.dtype, ids.shape[1:]
        rank = torch.arange(top, device=ids.device).to(log_probs.dtype).expand_as(log_probs)
        best = log_probs - log_probs[..., :1]
        features = torch.stack([log_probs, log_probs.exp(), best, rank / max(top - 1, 1), (rank == 0).to(rank)], -1)
        x = self.token_proj(embed(ids).to(dtype)) + self.pass_hidden_proj(states.to(dtype))[:, :, None]
        x = x + self.feature_mlp(self.feature_norm(features.to(dtype)))
        x = (x[None] + self.slot_embedding + self.rank_embedding)[0].flatten(1, 2)  # [M, K * top, H]
        slots = torch.arange(num, device=ids.device).repeat_interleave(top)
        distance = slots[:, None] - slots
        bias = self.relative_slot_bias[:, distance + num].permute(1, 2, 0)  # [L, L, heads]
        bias = (bias + self.same_slot_bias * (distance == 0)[..., None]).permute(2, 0, 1).contiguous()
        for layer in self.layers:
            x = layer(x, bias)
        x, anchor = self.output_norm(x), self.anchor_norm(self.context_proj(feature.to(dtype)))[:, None]  # [M, 1, H]
        x = silu(self.factor_input_proj(torch.cat([x, anchor.expand_as(x), x * anchor], dim=-1)))
        start, out, into = (
            normalize(head(values), dim=-1, eps=self.vector_eps)
            for head, values in ((self.anchor_out_head, anchor), (self.out_head, x), (self.in_head, x))
        )
        out, into = (part.unflatten(1, (num, top)) for part in (out, into))  # [M, K, top, F]
        first, pairs = start @ into[:, 0].mT, out[:, :-1] @ into[:, 1:].mT  # [M, 1, top], [M, K-1, top, top]
        return torch.cat([first.flatten(1), pairs.flatten(1)], dim=-1)

    def advance(self, d, state, tokens, embedding, carried):
        num, top = self.sizes.num_drafts, self.top
        sizes = [2 * num * top, num * top, top, (num - 1) * top**2, 1]
        _, ids, row, pairs, forced = carried.split(sizes, dim=-1)
        if d > 1:
            previous = ids[..., (d - 2) * top : (d - 1) * top] == tokens[..., None]  # [..., top]
            matrix = pairs.unflatten(-1, (num - 1, top, top))[..., d - 2, :, :]
            row, forced = (previous[..., None] * matrix).sum(-2), forced * previous.any(-1, keepdim=True)
        readout = torch.cat([*self.candidates(d, carried), self.logit_scale * row, forced], dim=-1)
        return readout, torch.cat([carried[..., :-1], forced], dim=-1)

    def pair_scores(self, readout, ids, embed):
        return readout[..., 2 * self.top : 3 * self.top]

    def score(self, readout, embed):
        ids = readout[..., : self.top].long()
        return ids, widen_logits(self.pair_scores(readout, ids, embed))

    def candidate_loss(self, readout, unary, token, embed):
        ids, scores = self.score(readout, embed)
        matches = ids == token[:, None]
        losses = cross_entropy(scores, matches.int().argmax(-1), reduction="none")
        return losses * matches.any(-1) * readout[..., -1]
