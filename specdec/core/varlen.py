"""Attention over texts side by side: one call of a kernel for all of them, without masks and padding.

On a GPU it is flash attention (2205.14135). `torch.nn.attention.varlen` calls the same operators, but its arguments
differ between torch 2.11 and 2.13. The operators have windows, heads in groups and log-sums in both. Elsewhere a loop
over the texts is the reference, in any dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from specdec.core import fast

TEXT_COUNT_MULTIPLE = 64  # empty texts fill up to a multiple, so that few shapes occur


@dataclass(frozen=True)
class Segments:
    """Texts side by side. The last query of a text sees all of its keys, and each query before it one key fewer.

    query_starts, key_starts [N+1] int32: first query and first key of each text, at the end the numbers Q and C of all
    longest: numbers of queries and of keys of the longest text, or larger ones
    """

    query_starts: Tensor
    key_starts: Tensor
    longest: tuple[int, int]

    @classmethod
    def from_counts(
        cls, queries: Sequence[int], keys: Sequence[int] | None = None, *, longest: int | None = None
    ) -> "Segments":
        """The texts with these numbers of queries and keys.

        longest: number for all batches, so that shapes stay the same
        """
        keys = queries if keys is None else keys
        padding = [0] * (-len(queries) % TEXT_COUNT_MULTIPLE)
        starts, key_starts = (torch.tensor([0, *counts, *padding]).cumsum(0).int() for counts in (queries, keys))
        return cls(starts, key_starts, (longest or max(queries, default=0), longest or max(keys, default=0)))

    def with_starts(self, query_starts: Tensor, key_starts: Tensor) -> "Segments":
        """The same texts with a device's copies of the starts, of any integer type"""
        return Segments(query_starts.int(), key_starts.int(), self.longest)


def count_runs(documents: Tensor) -> Tensor:
    """Numbers of tokens of all documents and paddings of packs [B, T], row by row"""
    rows = torch.arange(len(documents))[:, None] * (int(documents.max()) + 2)  # no two rows share a number
    return torch.unique_consecutive(documents + rows, return_counts=True)[1]


def attend_segments(
    query: Tensor, key: Tensor, value: Tensor, segments: Segments, *, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Softmax over the keys that each query sees.

    query [Q, H, E]; key [C, G, E], value [C, G, V]: H / G neighbouring heads share each of the G heads of keys
    window: keys before its last one that a query sees, too; None: all
    -> out [Q, H, V], and the logarithm of each query's sum of exponents [H, Q], at least float32
    """
    return _attend(query, key, value, *_list_arguments(segments), scale, window)


def attend_segments_backward(
    *tensors: Tensor, segments: Segments, scale: float, window: int | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value.

    tensors: gradient of `out`, query, key, value, out, log_sum. The last two may belong to a softmax with further keys.
    """
    return _attend_backward(*tensors, *_list_arguments(segments), scale, window)


def _list_arguments(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    return segments.query_starts, segments.key_starts, *segments.longest


# Operators of torch, so that a compiled block has each of them as one node. On a CPU they are loops over texts.


@torch.library.custom_op("specdec::attend_segments", mutates_args=())
def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor]:
    outs = []
    sums = []
    for queries, keys in _list_texts(query_starts, key_starts):
        scores = _compute_scores(query[queries], key[keys], scale, window)  # [H, q, c]
        sums.append(scores.logsumexp(-1))
        weights = (scores - sums[-1][..., None]).exp().to(value.dtype)
        outs.append((weights @ _repeat_heads(value[keys], query)).transpose(0, 1))
    if not outs:
        return query.new_zeros(0, query.shape[1], value.shape[-1]), query.new_zeros(query.shape[1], 0)
    return torch.cat(outs), torch.cat(sums, dim=-1)


@_attend.register_kernel("cuda")
def _(*arguments):
    *inputs, scale, window = arguments
    options = _kernel_options(scale, window)
    out, log_sum, *_ = torch.ops.aten._flash_attention_forward(*inputs, 0.0, window is None, False, **options)
    return out, log_sum


@_attend.register_fake
def _(query, key, value, *_):
    dtype = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:2], value.shape[-1]), query.new_empty(*query.shape[1::-1], dtype=dtype)


@torch.library.custom_op("specdec::attend_segments_backward", mutates_args=())
def _attend_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    log_sum: Tensor,
    query_starts: Tensor,
    key_starts: Tensor,
    longest_query: int,
    longest_key: int,
    scale: float,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:
    grads = torch.zeros_like(query), *(torch.zeros_like(tensor, dtype=log_sum.dtype) for tensor in (key, value))
    for queries, keys in _list_texts(query_starts, key_starts):
        scores = _compute_scores(query[queries], key[keys], scale, window)
        weights = (scores - log_sum[:, queries, None]).exp()  # [H, q, c]
        grad_out, q = (tensor[queries].transpose(0, 1) for tensor in (grad, query))  # [H, q, .]
        mean = (grad_out * out[queries].transpose(0, 1)).sum(-1, keepdim=True, dtype=log_sum.dtype)
        grad_weights = (grad_out @ _repeat_heads(value[keys], query).transpose(-1, -2)).to(log_sum.dtype)
        slope = scale * weights * (grad_weights - mean)
        grads[0][queries] = (slope.to(key.dtype) @ _repeat_heads(key[keys], query)).transpose(0, 1)
        for sums, product in zip(grads[1:], (slope.mT @ q.to(slope.dtype), weights.mT @ grad_out.to(weights.dtype))):
            sums[keys] += product.unflatten(0, (key.shape[1], -1)).sum(1).transpose(0, 1)
    return grads[0], grads[1].to(key.dtype), grads[2].to(value.dtype)


@_attend_backward.register_kernel("cuda")
def _(grad, *arguments):
    *inputs, scale, window = arguments
    unused = (
        grad.new_zeros(2, dtype=torch.uint64),
        grad.new_empty(0, dtype=torch.float32),
    )  # random numbers of a dropout
    options = _kernel_options(scale, window)
    return torch.ops.aten._flash_attention_backward(grad.contiguous(), *inputs, 0.0, window is None, *unused, **options)


@_attend_backward.register_fake
def _(grad, query, key, value, *_):
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep_inputs(ctx, inputs, output) -> None:
    query, key, value, query_starts, key_starts, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, query_starts, key_starts)


def _backward(ctx, grad, _):
    return *_attend_backward(grad, *ctx.saved_tensors, *ctx.options), *[None] * 6


_attend.register_autograd(_backward, setup_context=_keep_inputs)


def _kernel_options(scale: float, window: int | None) -> dict:
    window_left, window_right = (-1, 0) if window is None else (window, 0)
    return {"scale": scale, "window_size_left": window_left, "window_size_right": window_right}


def _list_texts(query_starts: Tensor, key_starts: Tensor) -> list[tuple[slice, slice]]:
    """The ranges of each text's queries and keys, without empty texts"""
    starts = [pairwise(tensor.tolist()) for tensor in (query_starts, key_starts)]
    return [(slice(*queries), slice(*keys)) for queries, keys in zip(*starts) if queries[1] > queries[0]]


def _repeat_heads(values: Tensor, query: Tensor) -> Tensor:
    """[c, G, E] -> [H, c, E]"""
    return values.transpose(0, 1).repeat_interleave(query.shape[1] // values.shape[1], dim=0)


def _compute_scores(query: Tensor, key: Tensor, scale: float, window: int | None) -> Tensor:
    """query [q, H, E], key [c, G, E] of a text -> [H, q, c], minus infinity for keys that are not seen"""
    scores = query.transpose(0, 1) @ _repeat_heads(key, query).transpose(-1, -2)
    scores = scale * scores.to(torch.promote_types(scores.dtype, torch.float32))
    num = query.shape[0]
    num_earlier_keys = key.shape[0] - query.shape[0]
    seen = torch.ones(scores.shape[1:], dtype=torch.bool, device=query.device).tril(num_earlier_keys)
    if window is not None:
        seen &= seen.triu(num_earlier_keys - window) if num else seen
    return scores.masked_fill(~seen, float("-inf"))


def check_varlen(device: torch.device) -> None:
    """Compares the kernel with the loop in float64 on this device. Raises ValueError if they differ beyond rounding."""
    segments = Segments.from_counts([70, 1, 200], [90, 1, 200])
    device_segments = segments.with_starts(segments.query_starts.to(device), segments.key_starts.to(device))
    for window, width in ((None, 128), (40, 64)):
        shapes = (271, 8, width), (291, 2, width), (291, 2, width), (271, 8, width)
        wide = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
        narrow = [tensor.to(device, torch.bfloat16) for tensor in wide]
        options: dict = {"scale": width**-0.5, "window": window}
        reference, total = attend_segments(wide[0], wide[1], wide[2], segments, **options)
        out, log_sum = attend_segments(narrow[0], narrow[1], narrow[2], device_segments, **options)
        fast.compare_with_reference("outputs", [out, log_sum], [reference, total], 0.02)
        slopes = attend_segments_backward(wide[3], *wide[:3], reference, total, segments=segments, **options)
        grads = attend_segments_backward(narrow[3], *narrow[:3], out, log_sum, segments=device_segments, **options)
        fast.compare_with_reference("gradients", grads, slopes, 0.03)
