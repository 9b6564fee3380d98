"""Counts what a device would be given to do, without one: the project's own code runs on tensors that have shapes but no values.

    with torch.device("meta"), Count() as count, Autocast():
        ...
    count.launches, count.moved, count.live, count.waits

A view is no launch, attention of torch is one, and an operation that is several kernels counts as several (KERNELS). Bytes moved are those
of all arguments and results of launches, as caches are small beside them; live bytes are those of the tensors that were made.
Where the host reads a value it waits, and it reads a one.

`count.seconds` is a roofline of one device: a product runs at a share of the peak that depends on its smallest dimension (EFFICIENCY),
attention over texts at ATTENTION, everything else at 80 % of the bandwidth and in at least 2 microseconds.
"""

import contextlib
import weakref
from collections.abc import Sequence

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

aten = torch.ops.aten
PEAK, BANDWIDTH, REACHED = 989e12, 3.35e12, 0.8  # of an H100 in bfloat16; bytes/s; the share of them that kernels reach
EFFICIENCY = ((512, 0.65), (128, 0.5), (32, 0.35), (0, 0.1))  # of a product whose smallest dimension is at least this
ATTENTION = 0.45
LAUNCH, PRODUCT_LAUNCH = 2e-6, 3e-6
GEMMS = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
# Products of queries and keys, of forward ones
TEXTS = {"attend_segments": 1.0, "attend_segments_backward": 2.5, "attend_texts": 1.0}
VIEWS = set(
    "view _unsafe_view t transpose permute expand slice select unsqueeze squeeze alias as_strided split split_with_sizes unbind "
    "detach _reshape_alias diagonal lift_fresh empty empty_like new_empty empty_strided new_empty_strided is_same_size".split()
)
KERNELS = {"logsumexp": 7, "sort": 6, "topk": 3, "cumsum": 2, "cummax": 2, "index_put_": 2, "index_put": 3, "nonzero": 4,
           "_index_put_impl_": 2, "embedding_dense_backward": 6, "argmax": 2, "max": 2,
           "attend_segments_backward": 3}  # fmt: skip
FILLS = set(
    "zeros ones full zeros_like ones_like full_like new_zeros new_full fill_ zero_ arange rand rand_like".split()
)
WRITES = {"index_put_", "_index_put_impl_"}
GATHERS = {"index_select", "gather", "embedding", "index"}
_tensor = torch.Tensor
PRODUCTS = {F.linear, torch.matmul, _tensor.matmul, _tensor.__matmul__, _tensor.__rmatmul__, torch.bmm, torch.mm}


class Count(TorchDispatchMode):
    """moved, live: bytes; live: the most at one time, of what was made within; waits: of the host for the device

    peak, bandwidth: of the device, FLOP/s in bfloat16 and bytes/s
    seconds, flops: of the roofline; texts: lengths of the documents that attention over texts reads
    filled: the share of a cache's entries that are in use, which is what `attend_texts` reads of them
    """

    supports_higher_order_operators = True
    current: "Count"

    def __init__(
        self, texts: Sequence[int] = (), *, filled: float = 1.0, peak: float = PEAK, bandwidth: float = BANDWIDTH
    ) -> None:
        super().__init__()
        self.peak, self.bandwidth = peak, REACHED * bandwidth
        self.filled = filled
        self.launches = self.moved = self.live = self.waits = self._now = 0
        self.seconds = self.flops = 0.0
        self.pairs = sum(num * (num + 1) / 2 for num in texts)  # of a query and a key that it sees
        self._known: dict[int, weakref.ref] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self):
        Count.current = self
        self._undo.enter_context(_FusedAttention())
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._undo.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "overloadpacket", func).__name__
        given = tensors_in([*args, *kwargs.values()])
        there = any(each.is_meta for each in given)
        if func is aten._local_scalar_dense.default and there:
            self.waits += 1
            return given[0].dtype.is_floating_point or given[0].dtype == torch.bool or 1
        if func in (aten.equal.default, aten.allclose.default) and there:
            return True
        to = kwargs.get("device")
        if name == "_to_copy" and to is not None and given[0].is_meta != (torch.device(to).type == "meta"):
            self.waits += there or not kwargs.get("non_blocking")
            if there:
                return torch.ones(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        parts = self._in_parts(func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        made = [each for each in tensors_in([out]) if each.is_meta]
        if not made and not there:
            return out
        old = {each.untyped_storage()._cdata for each in given}
        for each in made:
            if each.untyped_storage()._cdata not in old:
                self._watch(each.untyped_storage())
        if name not in VIEWS:
            self.add(name, given, made, args)
        return out

    def _in_parts(self, func, args, kwargs):
        """What autograd would take apart comes whole in inference mode."""
        if not torch.is_inference_mode_enabled():
            return NotImplemented
        super().__enter__()
        try:
            return func.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def add(self, name: str, given: list[torch.Tensor], made: list[torch.Tensor], args: Sequence) -> None:
        """One operation that is not a view."""
        self.launches += KERNELS.get(name, 1)
        read, written = [bytes_of(each) for each in given], sum(each.nbytes for each in made)
        if name in FILLS:
            read = []
        elif name in GATHERS:  # of the first argument only what is taken
            read[0] = written
        elif name in WRITES:
            read, written = read[-1:], read[-1]
        elif name == "logsumexp":
            read = 5 * read
        elif name == "attend_texts":
            read[1:3] = [int(self.filled * each) for each in read[1:3]]
        self.moved += sum(read) + written
        self._take_time(name, sum(read) + written, args)

    def _take_time(self, name: str, moved: float, args: Sequence) -> None:
        flops, seconds, least = 0.0, moved / self.bandwidth, LAUNCH * KERNELS.get(name, 1)
        if name in GEMMS:
            left, right = args[GEMMS[name]], args[GEMMS[name] + 1]
            flops, least = 2.0 * left.numel() * right.shape[-1], PRODUCT_LAUNCH
            smallest = min(left.shape[-2], left.shape[-1], right.shape[-1])
            share = next(share for size, share in EFFICIENCY if smallest >= size)
            seconds = max(seconds, flops / (share * self.peak if left.element_size() < 4 else 0.0425 * self.peak))
        elif name == "attend_texts":  # 128 queries at a time, of which a few may be real
            rows = args[0].shape[0] * -(-args[0].shape[1] // 128) * 128
            keys = self.filled * args[1].shape[0] / args[0].shape[0]
            flops = 4.0 * rows * keys * args[0].shape[2]
            seconds = max(seconds, flops / (ATTENTION * self.peak))
        elif name in TEXTS:
            query = args[TEXTS[name] > 1]
            flops = 4.0 * TEXTS[name] * query.shape[1] * query.shape[2] * self.pairs
            seconds = max(seconds, flops / (ATTENTION * self.peak))
        self.flops += flops
        self.seconds += max(seconds, least)

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.size()
        if key in self._known:
            return

        def gone(_) -> None:
            if self._known.pop(key, None) is not None:
                self._now -= size

        self._known[key] = weakref.ref(storage, gone)
        self._now += size
        self.live = max(self.live, self._now)


class _FusedAttention(TorchFunctionMode):
    """torch's attention, which decomposes itself on this device, is one operation."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            query, key, value, mask = (*args, *[None] * 4)[:4]
            return _attention(query, key, value, (kwargs or {}).get("attn_mask", mask))
        return func(*args, **(kwargs or {}))


class Autocast(TorchFunctionMode):
    """As torch.autocast to bfloat16, which there is not for this device: each weight is cast once."""

    def __init__(self) -> None:
        super().__init__()
        self.cast: dict[int, torch.Tensor] = {}

    def __torch_function__(self, func, types, args=(), kwargs=None):
        args, kwargs = (tree_map(self._low, (args, kwargs or {}))) if func in PRODUCTS else (args, kwargs or {})
        return func(*args, **kwargs)

    def _low(self, value):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(torch.bfloat16)
        if id(value) not in self.cast:
            self.cast[id(value)] = value.to(torch.bfloat16)
        return self.cast[id(value)]


def tensors_in(values) -> list[torch.Tensor]:
    """Those among them, and in lists of them"""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += tensors_in(value)
    return found


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes; those of an expanded tensor are read once."""
    return min(tensor.nbytes, tensor.untyped_storage().size()) if 0 in tensor.stride() else tensor.nbytes


@torch.library.custom_op("specdec::counted_attention", mutates_args=())
def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    raise RuntimeError("it is counted on meta tensors, never computed")


@_attention.register_fake
def _(query, key, value, mask):
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]).transpose(1, 2)


def _attention_backward(ctx, grad):
    return *(torch.empty_like(each) for each in ctx.saved_tensors), None


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])


_attention.register_autograd(_attention_backward, setup_context=_save_for_backward)
