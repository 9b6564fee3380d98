"""Top-p, the nucleus of a distribution: the likeliest tokens that together reach a probability.

The rule, in the order of ascending logits, and of ascending token ids among equal ones: a token is dropped while the
sum of the probabilities up to it, computed in float64 and rounded to the logits' dtype, is at most 1 - top_p. The last
token is never dropped. `keep_nucleus_by_sort` says this in torch's own sums, and is the reference.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from specdec.core import fast
from specdec.core.devices import name_cause

# Bits of the boundary that one pass over the tokens finds, by 2^bits - 1 sums in float64. A generated kernel with 7
# sums needs 98 to 184 registers of sm_90 and no spills; most ones with 15 sums spill (counted by ptxas).
DIGIT_BITS = 3
INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


def keep_nucleus(logits: Tensor, top_p: float) -> Tensor:
    """Top-p: logits [M, V] in float32 or float64 -> the same, with -inf for dropped tokens. top_p: below 1

    A sort of all tokens costs 4 to 10 ms a row on a CPU, so a CPU sorts few. A GPU searches a threshold instead.
    """
    if logits.device not in _unable_devices and fast.allows("nucleus", logits.device):
        try:
            return keep_nucleus_by_threshold(logits, top_p, _choose_search(logits.device))
        except Exception as error:  # compilers raise errors of any kind, at a width that the proof did not have
            _unable_devices.add(logits.device)
            fast.leave_out("nucleus", f"it could not be compiled ({name_cause(error)})")
    if logits.device.type == "cpu":
        return _keep_nucleus_of_few(logits, top_p)
    return keep_nucleus_by_sort(logits, top_p)


_unable_devices: set[torch.device] = set()


def keep_nucleus_by_sort(logits: Tensor, top_p: float) -> Tensor:
    """`keep_nucleus` by a sort of all tokens"""
    ascending, order = logits.sort(dim=-1, stable=True)
    dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p  # [M, V]
    dropped[..., -1] = False
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


def _keep_nucleus_of_few(logits: Tensor, top_p: float) -> Tensor:
    """`keep_nucleus` by a sort of the tokens above (1 - top_p) / V.

    All others together have at most 1 - top_p, so they are dropped. Counting tokens makes the host wait.
    """
    probs = logits.softmax(-1)
    above = probs > 0.999 * (1 - top_p) / logits.shape[1]  # all rows at once, as these operations start threads
    nums = above.sum(-1).tolist()
    totals = probs.sum(-1, dtype=torch.float64).tolist()
    indices = above.flatten().nonzero()[:, 0]  # of the flattened logits
    kept_indices = []
    kept_logits = []
    for row, distribution, row_indices, total in zip(
        logits.take(indices).split(nums), probs.take(indices).split(nums), indices.split(nums), totals
    ):
        ascending, order = row.sort(stable=True)
        tail = max(0.0, total - float(distribution.sum(dtype=torch.float64)))
        # Sums in float64 and then rounded, like a CPU's cumsum of the sorted tokens
        reached = (tail + distribution[order].cumsum(0, dtype=torch.float64)).to(distribution.dtype)
        num_dropped = int((reached[:-1] <= 1 - top_p).sum())
        kept_indices.append(row_indices[order[num_dropped:]])
        kept_logits.append(ascending[num_dropped:])
    return torch.full_like(logits, -torch.inf).put_(torch.cat(kept_indices), torch.cat(kept_logits))


# By a threshold: a fixed number of passes over the tokens, without a sort or a wait of the host
#
# Of 64 x 151,936 logits, inductor's code for CUDA has 36 kernels that move 76 bytes a logit (counted, float32). Without
# inductor the same passes would move more than a sort does, so the path needs it.


def search_nucleus(logits: Tensor, limit: Tensor) -> Tensor:
    """Logits [M, V] -> the same, with -inf for dropped tokens. limit [1]: 1 - top_p, in the logits' dtype

    First comes the smallest logit that is not dropped. Among the tokens of that logit, a running count says which ones
    are dropped. Inductor makes two kernels of each pass.
    """
    keys, probs = order_by_integers(logits), logits.softmax(-1)
    boundary = torch.minimum(_find_boundary(keys, probs, limit), keys.amax(-1, keepdim=True))  # [M, 1]
    below, equal = keys < boundary, keys == boundary
    num_equal = equal.cumsum(-1, dtype=torch.int32)  # [M, V] equal tokens up to each one
    prob = torch.where(equal, probs, 0).amax(-1, keepdim=True).double()  # [M, 1] probability of each equal token
    reached = (_sum_where(below, probs) + num_equal * prob).to(logits.dtype)
    dropped = equal & (reached <= limit) & (num_equal < num_equal[:, -1:])
    return logits.masked_fill(below | dropped, -torch.inf)


def keep_nucleus_by_threshold(
    logits: Tensor, top_p: float, search: Callable[[Tensor, Tensor], Tensor] = search_nucleus
) -> Tensor:
    """`keep_nucleus` by a search of the threshold. search: `search_nucleus`, compiled or not"""
    return search(logits, logits.new_full((1,), 1 - top_p))


def order_by_integers(logits: Tensor) -> Tensor:
    """Integers [M, V] in the order of the logits; equal ones for equal logits."""
    integer = INTEGERS[logits.dtype]
    bits = torch.where(logits == 0, 0, logits).view(integer)  # -0.0 equals 0.0
    return torch.where(bits < 0, bits ^ torch.iinfo(integer).max, bits)  # magnitudes of negative numbers turn round


def _find_boundary(keys: Tensor, probs: Tensor, limit: Tensor) -> Tensor:
    """The largest integer [M, 1] below which the probabilities sum to `limit` or less, digit by digit.

    keys [M, V]: result of `order_by_integers`; probs [M, V]. The result is the key of the first token that is not
    dropped, or larger than all keys.
    """
    boundary = keys.new_zeros(len(keys), 1)
    shift, lowest = torch.iinfo(keys.dtype).bits, -(2 ** (DIGIT_BITS - 1))  # the first digit has the sign
    while shift:
        num_bits = min(DIGIT_BITS, shift)
        shift -= num_bits
        digit = torch.full_like(boundary, lowest)
        for higher in range(lowest + 1, lowest + 2**num_bits):
            reached = _sum_where(keys < boundary + (higher << shift), probs).to(limit.dtype)
            digit = digit + (reached <= limit)
        boundary, lowest = boundary + (digit << shift), 0
    return boundary


def _sum_where(mask: Tensor, probs: Tensor) -> Tensor:
    """[M, 1] in float64: the sum of the probabilities [M, V] where the mask is true."""
    return torch.where(mask, probs, 0).sum(-1, keepdim=True, dtype=torch.float64)


@functools.cache
def _choose_search(device: torch.device) -> Callable[[Tensor, Tensor], Tensor]:
    """`search_nucleus`, compiled once for all numbers of rows on a GPU. torch would compile a single row apart."""
    if device.type != "cuda":
        return search_nucleus
    compiled = torch.compile(search_nucleus, fullgraph=True)

    def search(logits: Tensor, limit: Tensor) -> Tensor:
        rows = logits.expand(2, -1).contiguous() if len(logits) == 1 else logits
        torch._dynamo.maybe_mark_dynamic(rows, 0)
        return compiled(rows, limit)[: len(logits)]

    return search


def check_nucleus(device: torch.device) -> None:
    """Compares the search with a sort in float64 on this device. Raises ValueError if it keeps other tokens.

    Sums that lie within 1e-6 of the boundary may differ by rounding.
    """
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(6, 9001, generator=generator)
    logits[3:] = logits[3:].round()  # ties
    logits[4] = -torch.inf
    logits[4, 5:900] = 0
    for top_p in (0.1, 0.9, 0.999):
        parts = [keep_nucleus_by_threshold(rows.to(device), top_p, _choose_search(device)) for rows in logits.split(5)]
        kept = torch.cat(parts).cpu().isfinite()
        least, most = (
            keep_nucleus_by_sort(logits.double(), share).isfinite() for share in (top_p - 1e-6, top_p + 1e-6)
        )
        if not (bool((least <= kept).all()) and bool((kept <= most).all())):
            raise ValueError(f"keeps other tokens than a sort (top_p={top_p})")
