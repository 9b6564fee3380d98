"""Counts what a GPU would be given to do, without one: the project's own code runs on tensors that have shapes but no values.

    target = meta_target(config)                     # on the device "meta", so every branch for a device beside the CPU is taken
    with Count() as count, Autocast():
        ...
    count.launches, count.live, count.waits

A view is no launch, attention of torch is one, and an operation that is several kernels counts as several (KERNELS). Live bytes are
those of the tensors that were made.
Where the host reads a value it waits, and it reads a one. What stays the same from run to run is the use: numbers are compared with budgets.
"""

import contextlib
import weakref

import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map
from transformers import AutoModelForCausalLM, PreTrainedConfig

from specdec.target import attention
from specdec.target.model import Target

aten = torch.ops.aten
VIEWS = set(
    "view _unsafe_view t transpose permute expand slice select unsqueeze squeeze alias as_strided split split_with_sizes unbind "
    "detach _reshape_alias diagonal lift_fresh empty empty_like new_empty empty_strided new_empty_strided is_same_size".split()
)
KERNELS = {"logsumexp": 7, "sort": 6, "topk": 3, "cumsum": 2, "cummax": 2, "index_put_": 2, "index_put": 3, "nonzero": 4,
           "_index_put_impl_": 2, "embedding_dense_backward": 6, "argmax": 2, "max": 2}  # fmt: skip
PRODUCTS = {
    F.linear,
    torch.matmul,
    torch.Tensor.matmul,
    torch.Tensor.__matmul__,
    torch.Tensor.__rmatmul__,
    torch.bmm,
    torch.mm,
}


def meta_target(config: PreTrainedConfig, monkeypatch) -> Target:
    """A target without values in bfloat16, of which nothing is checked that values would be needed for"""
    monkeypatch.setattr("specdec.target.model.fingerprint_of_model", lambda *_: "0" * 16)
    monkeypatch.setattr(Target, "_check_logits", lambda self: None)
    with torch.device("meta"), Count():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation=attention.NAME)
        return Target(model, name="meta")


class Count(TorchDispatchMode):
    """live: the most bytes at one time, of what was made within; waits: of the host for the device"""

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.launches = self.live = self.waits = self._now = 0
        self._known: dict[int, weakref.ref] = {}
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
        given = _tensors([*args, *kwargs.values()])
        there = any(each.is_meta for each in given)
        if func is aten._local_scalar_dense.default and there:
            self.waits += 1
            return given[0].dtype.is_floating_point or given[0].dtype == torch.bool or 1
        to = kwargs.get("device")
        if name == "_to_copy" and to is not None and given[0].is_meta != (torch.device(to).type == "meta"):
            self.waits += there or not kwargs.get("non_blocking")
            if there:
                return torch.ones(given[0].shape, dtype=kwargs.get("dtype") or given[0].dtype)
        parts = self._in_parts(func, args, kwargs)
        if parts is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        made = [each for each in _tensors([out]) if each.is_meta]
        if not made and not there:
            return out
        old = {each.untyped_storage()._cdata for each in given}
        for each in made:
            if each.untyped_storage()._cdata not in old:
                self._watch(each.untyped_storage())
        if name not in VIEWS:
            self.launches += KERNELS.get(name, 1)
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


def _tensors(values) -> list[torch.Tensor]:
    """Those among them, and in lists of them"""
    found = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            found += _tensors(value)
    return found


@torch.library.custom_op("specdec_tests::attention", mutates_args=())
def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    raise RuntimeError("it is counted on meta tensors, never computed")


@_attention.register_fake
def _(query, key, value, mask):
    return query.new_empty(query.shape[0], query.shape[2], query.shape[1], value.shape[-1]).transpose(1, 2)


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
