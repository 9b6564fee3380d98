"""What a head takes over from its target's ends: embeddings and the gain of the last norm, for norms of all kinds."""

import torch
from torch import Tensor

from specdec.target.model import Target


@torch.no_grad()
def norm_gain(target: Target) -> Tensor:
    """What the target's last norm multiplies a normalised state by, [D].

    This is the weight of an RMSNorm of Llama's kind. Other norms have none, or add 1 to it, or subtract the mean, so it is
    measured: a vector of +1 and -1 is normalised already.
    """
    ones = torch.ones(target.width, dtype=target.dtype, device=target.device)
    ones[1::2] = -1
    up, down = (target.norm(sign * ones[None, None])[0, 0] for sign in (1, -1))
    gain = (up - down) / 2 * ones  # without the bias that some norms add
    weight = dict(target.norm.named_parameters()).get("weight")
    return weight if weight is not None and torch.allclose(weight, gain, rtol=0.02, atol=0.01) else gain


@torch.no_grad()
def embedding_scale(target: Target) -> float:
    """What the target's embedding module multiplies its rows by: 1 for most families."""
    token = target.embed.weight[:16].float().norm(dim=1).argmax()  # the row of a padding token is zero
    row, out = target.embed.weight[token].float(), target.embed(token).float()
    return 1.0 if torch.equal(out, row) else float(out.norm() / row.norm())


@torch.no_grad()
def embedding_rows(target: Target) -> Tensor:
    """[V, D] what the target's embedding module returns for every token"""
    return torch.cat([target.embed(part) for part in torch.arange(target.vocab_size, device=target.device).split(4096)])


def check_one_width(target: Target) -> None:
    """Raises ValueError for a target whose embeddings are narrower than its hidden states."""
    width = target.embed.weight.shape[1]
    if width != target.width:
        raise ValueError(
            f"{target.name} has embeddings of {width} and hidden states of {target.width}, and this head joins the two: "
            "train a draft model (head=draft)."
        )
