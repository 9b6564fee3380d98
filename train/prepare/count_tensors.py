"""Counts the work of a device without one: the project's own code runs on tensors that have shapes but no values.

    with torch.device("meta"), OperationCount() as count, Autocast():
        ...
    count.live, count.seconds

A view is no launch, attention of torch is one, and an operation of several kernels counts as several (KERNELS). Moved
bytes are those of all arguments and results of launches, because caches are small beside them. Live bytes are those of
the tensors that were made. Where the host reads a value, it reads a one.

`count.seconds` is a roofline of one device. A product's share of the peak depends on its smallest dimension
(PRODUCT_EFFICIENCY). Attention over texts reaches ATTENTION_EFFICIENCY. Everything else runs at 80 % of the bandwidth
and takes at least 2 microseconds.
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
H100_PEAK, H100_BANDWIDTH = 989e12, 3.35e12  # FLOP/s in bfloat16 and bytes/s of an H100, by its data sheet
REACHED_SHARE = 0.8  # share of the bandwidth that kernels reach
# Smallest dimension of a product, at least, and the share of the peak that it reaches
PRODUCT_EFFICIENCY = ((512, 0.65), (128, 0.5), (32, 0.35), (0, 0.1))
ATTENTION_EFFICIENCY = 0.45  # share of the peak that attention over texts reaches
LAUNCH_SECONDS, PRODUCT_LAUNCH_SECONDS = 2e-6, 3e-6  # shortest time of a kernel, and of a product
PRODUCT_INDICES = {"mm": 0, "bmm": 0, "addmm": 1, "baddbmm": 1}
# Work of attention over texts, in forward passes
TEXT_ATTENTION = {"attend_segments": 1.0, "attend_segments_backward": 2.5}
VIEWS = set(
    "view _unsafe_view t transpose permute expand slice select unsqueeze squeeze alias as_strided split "
    "split_with_sizes unbind detach _reshape_alias diagonal lift_fresh empty empty_like new_empty empty_strided "
    "new_empty_strided is_same_size".split()
)
KERNELS = {"logsumexp": 7, "sort": 6, "topk": 3, "cumsum": 2, "cummax": 2, "index_put_": 2, "index_put": 3,
           "nonzero": 4, "_index_put_impl_": 2, "embedding_dense_backward": 6, "argmax": 2, "max": 2,
           "attend_segments_backward": 3, "attend_tree": 2}  # fmt: skip
FILLS = set(
    "zeros ones full zeros_like ones_like full_like new_zeros new_full fill_ zero_ arange rand rand_like".split()
)
HOST_READS = {aten._local_scalar_dense.default, aten.equal.default, aten.allclose.default}
WRITES = {"index_put_", "_index_put_impl_"}
GATHERS = {"index_select", "gather", "embedding", "index"}
_tensor = torch.Tensor
PRODUCTS = {F.linear, torch.matmul, _tensor.matmul, _tensor.__matmul__, _tensor.__rmatmul__, torch.bmm, torch.mm}


class OperationCount(TorchDispatchMode):
    """A context that counts the operations within it.

    live: bytes, the most at one time; seconds: of the roofline
    texts: tokens of the documents that attention over texts reads
    peak, bandwidth: FLOP/s in bfloat16 and bytes/s of the device
    """

    supports_higher_order_operators = True

    def __init__(
        self, texts: Sequence[int] = (), *, peak: float = H100_PEAK, bandwidth: float = H100_BANDWIDTH
    ) -> None:
        super().__init__()
        self.peak, self.bandwidth = peak, REACHED_SHARE * bandwidth
        self.live = self._live_now = 0
        self.seconds = 0.0
        self.pairs = sum(num * (num + 1) / 2 for num in texts)  # pairs of a query and a key that it sees
        self._storages: dict[int, weakref.ref] = {}
        self._undo = contextlib.ExitStack()

    def __enter__(self):
        self._undo.enter_context(_FusedAttention())
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self._undo.close()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(func, "overloadpacket", func).__name__
        inputs = list_tensors([*args, *kwargs.values()])
        on_device = any(tensor.is_meta for tensor in inputs)
        if on_device and func in HOST_READS:
            return self.answer_host_read(func, inputs[0])
        answer = self.answer_device_copy(name, inputs, kwargs)
        if answer is not None:
            return answer
        out = func(*args, **kwargs)
        outputs = [tensor for tensor in list_tensors([out]) if tensor.is_meta]
        if outputs or on_device:
            self._watch_storages(inputs, outputs)
            if name not in VIEWS:
                self.add_operation(name, inputs, outputs, args)
        return out

    def answer_host_read(self, func, tensor: torch.Tensor):
        """The value that the host reads: a one, or true."""
        if func is not aten._local_scalar_dense.default:
            return True
        return tensor.dtype.is_floating_point or tensor.dtype == torch.bool or 1

    def answer_device_copy(self, name: str, inputs: list[torch.Tensor], kwargs: dict) -> torch.Tensor | None:
        """Ones for a copy to the host; None: torch makes the copy, or it is none."""
        device = kwargs.get("device")
        if name != "_to_copy" or device is None or not inputs[0].is_meta or torch.device(device).type == "meta":
            return None
        return torch.ones(inputs[0].shape, dtype=kwargs.get("dtype") or inputs[0].dtype)

    def _watch_storages(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        """Counts the memory that an operation took, until it is free again."""
        input_storages = {tensor.untyped_storage()._cdata for tensor in inputs}
        for tensor in outputs:
            if tensor.untyped_storage()._cdata not in input_storages:
                self._watch_storage(tensor.untyped_storage())

    def add_operation(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], args: Sequence) -> None:
        """Counts an operation that is not a view."""
        minimum = PRODUCT_LAUNCH_SECONDS if name in PRODUCT_INDICES else LAUNCH_SECONDS * KERNELS.get(name, 1)
        flops, peak = self.count_flops(name, args)
        moved = self.count_moved(name, inputs, outputs, args)
        self.seconds += max(moved / self.bandwidth, flops / peak, minimum)

    def count_moved(self, name: str, inputs: list[torch.Tensor], outputs: list[torch.Tensor], args: Sequence) -> int:
        """Bytes that an operation reads and writes."""
        read, written = [count_read_bytes(tensor) for tensor in inputs], sum(tensor.nbytes for tensor in outputs)
        if name in FILLS:
            read = []
        elif name in GATHERS:  # of the first argument only the gathered rows are read
            read[0] = written
        elif name in WRITES:
            read, written = read[-1:], read[-1]
        elif name == "logsumexp":
            read = 5 * read
        return sum(read) + written

    def count_flops(self, name: str, args: Sequence) -> tuple[float, float]:
        """Floating-point operations of a product or of attention, and the FLOP/s that it reaches."""
        if name in PRODUCT_INDICES:
            left, right = args[PRODUCT_INDICES[name]], args[PRODUCT_INDICES[name] + 1]
            smallest = min(left.shape[-2], left.shape[-1], right.shape[-1])
            share = next(share for size, share in PRODUCT_EFFICIENCY if smallest >= size)
            reached = share * self.peak if left.element_size() < 4 else 0.0425 * self.peak
            return 2.0 * left.numel() * right.shape[-1], reached
        if name in TEXT_ATTENTION:
            query = args[TEXT_ATTENTION[name] > 1]
            flops = 4.0 * TEXT_ATTENTION[name] * query.shape[1] * query.shape[2] * self.pairs
            return flops, ATTENTION_EFFICIENCY * self.peak
        return 0.0, self.peak

    def _watch_storage(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.size()
        if key in self._storages:
            return

        def forget_storage(_) -> None:
            if self._storages.pop(key, None) is not None:
                self._live_now -= size

        self._storages[key] = weakref.ref(storage, forget_storage)
        self._live_now += size
        self.live = max(self.live, self._live_now)


class _FusedAttention(TorchFunctionMode):
    """Makes one operation of torch's attention, which decomposes itself on tensors without values."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.scaled_dot_product_attention:
            query, key, value, mask = (*args, *[None] * 4)[:4]
            return _attention(query, key, value, (kwargs or {}).get("attn_mask", mask))
        return func(*args, **(kwargs or {}))


class Autocast(TorchFunctionMode):
    """Acts as torch.autocast to bfloat16, which tensors without values lack. Each weight is cast once."""

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


def list_tensors(values) -> list[torch.Tensor]:
    """The tensors among values and in lists of them."""
    tensors = []
    for value in values:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += list_tensors(value)
    return tensors


def count_read_bytes(tensor: torch.Tensor) -> int:
    """Bytes that an operation reads of a tensor. Those of an expanded one are read once."""
    return min(tensor.nbytes, tensor.untyped_storage().size()) if 0 in tensor.stride() else tensor.nbytes


@torch.library.custom_op("specdec::counted_attention", mutates_args=())
def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    raise RuntimeError("it is counted on meta tensors, never computed")


@_attention.register_fake
def _(query, key, value, mask):
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]).transpose(1, 2)


def _attention_backward(ctx, grad):
    return *(torch.empty_like(tensor) for tensor in ctx.saved_tensors), None


def _save_for_backward(ctx, inputs, output):
    ctx.save_for_backward(*inputs[:3])


_attention.register_autograd(_attention_backward, setup_context=_save_for_backward)
