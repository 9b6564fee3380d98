"""Survival of drafts, for losses that combine several depths of a round (docs/methods.md, section 3).

Tensors by slot are [K, S]: row d - 1 is depth d of the round that starts at a slot. `counted` [K, S] bool is True where
a depth of a slot has a supervised token and a guess; all other entries are ignored.
"""

import torch
from torch import Tensor

from train.losses import Judged

# One depth of M slots, [M]


def accept(judged: Judged) -> Tensor:
    """The probability that the text's token x was accepted, given that the target emitted it: min(1, q(x) / p(x))."""
    token = judged.goal.token
    excess = _of_token(judged.log_law, token) - _of_token(judged.goal.log_probs, token)
    return torch.where(token >= 0, excess.clamp(max=0).exp(), 0)


def chance(judged: Judged) -> Tensor:
    """q of the text's token; 0 if it cannot be drafted."""
    return torch.where(judged.goal.token >= 0, _of_token(judged.log_law, judged.goal.token).exp(), 0)


def _of_token(values: Tensor, token: Tensor) -> Tensor:
    """values [M, W], token [M] -> [M]; some value where the token is -1"""
    return values.gather(-1, token.clamp(min=0)[:, None])[:, 0]


# All depths of S slots, [K, S]


def lk(kl: Tensor, overlap: Tensor, counted: Tensor, *, eta: float) -> Tensor:
    """LK's hybrid (2602.23881) [K, S]: the weight moves from KL to TV as the mean overlap of a depth grows; 0 where not counted."""
    known = torch.where(counted, overlap.detach(), 0)
    mean = known.sum(1, keepdim=True) / counted.sum(1, keepdim=True).clamp(min=1)  # [K, 1]
    share = (-eta * mean).exp()
    return torch.where(counted, share * kl + (1 - share) * (1 - overlap), 0)


def e2e_tv(overlap: Tensor, counted: Tensor) -> Tensor:
    """Bebop (2606.12370) [S]: the share of K drafts that a round is expected to lose.

    A depth that is not counted ends the round, as a rejection does. A slot without any counted depth has loss 0.
    """
    survival = torch.where(counted, overlap, 0).cumprod(0)  # [K, S]
    return torch.where(counted.any(0), 1 - survival.mean(0), 0)


def dpace(chance: Tensor, counted: Tensor, *, smoothing: float = 0.5) -> Tensor:
    """D-PACE's weights (2605.18810) [K, S], detached: how much of the expected accepted length depends on a depth.

    w_k = sum over j >= k of prod over i <= j of s_i, with s = (1 - smoothing) q(x) + smoothing. Where not counted, s is
    1 and the weight is 0, so the survival of the last counted depth is repeated for all deeper ones.
    """
    survival = torch.where(counted, (1 - smoothing) * chance.detach() + smoothing, 1).cumprod(0)  # [K, S]
    return torch.where(counted, survival.flip(0).cumsum(0).flip(0), 0)


def vat(matches: Tensor, counted: Tensor, *, decay: float) -> Tensor:
    """VAT's weights (2608.30135) [K, S]: 1 up to the first rejection, then decay per depth; 0 where not counted."""
    rejected = (counted & ~matches).cumsum(0) > 0  # from the first rejection on
    distance = (rejected.cumsum(0) - 1).clamp(min=0)
    return torch.where(counted, decay**distance, 0)


# A text of n tokens, [K, n]


def rounds(accept: Tensor) -> Tensor:
    """`specdec.unroll.replay.rounds`, differentiable: accept [K, n] as there -> the expected number of rounds, a scalar.

    A round from s emits k tokens with probability w_k(s). With r(s) the chance that a round starts at s and l(t) the
    expected rounds from t on, l(t) = 1 + sum_k w_k(t) l(t + k), the answer is l(1), and its derivative with respect to
    w_k(s) is r(s) l(s + k). So autograd needs a graph for w only, which is one tensor operation for all s.
    """
    depth, num_tokens = accept.shape
    start = torch.arange(num_tokens, device=accept.device)
    last = start + torch.arange(1, depth + 1, device=accept.device)[:, None]  # [K, n] tokens that exist after d drafts
    known = torch.where((start > 0) & (last < num_tokens), accept.double(), 0)
    alive = torch.cat([torch.ones_like(known[:1]), known.cumprod(0)])  # [K+1, n] the first k drafts are accepted
    emits = alive - torch.cat([alive[1:], torch.zeros_like(known[:1])])  # [K+1, n] w_1 to w_(K+1)

    weights = emits.detach().T.tolist()  # [n][K+1]
    starts, ahead = ([0.0] * (num_tokens + depth + 2) for _ in range(2))  # r and l; l is 0 from n on
    starts[1] = 1.0
    for s in range(1, num_tokens):
        for k, weight in enumerate(weights[s], 1):
            starts[s + k] += starts[s] * weight
    for s in range(num_tokens - 1, 0, -1):
        ahead[s] = 1 + sum(weight * ahead[s + k] for k, weight in enumerate(weights[s], 1))

    slopes = [[starts[s] * ahead[s + k] for s in range(num_tokens)] for k in range(1, depth + 2)]
    change = (emits * emits.new_tensor(slopes)).sum()
    return (ahead[1] + (change - change.detach())).to(accept.dtype)  # the value l(1) with the gradient of `change`
