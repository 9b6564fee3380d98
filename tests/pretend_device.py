"""A pretended accelerator: values are computed on the CPU, but tensors say that they are elsewhere.

    with PretendDevice() as device:
        target.model.to(ELSEWHERE)
        ...                         # any code that would run on a GPU
    device.waits                    # Counter of (kind, file:line): the places where the host would wait for the device

An operation on tensors of both devices raises, as on a GPU. Counted are the reading of a value (`item`, `tolist`, `bool`),
results whose size depends on values (`nonzero`, boolean indices), copies to the CPU, and copies from the CPU that are not
declared `non_blocking`. The device is called "meta", because a CPU build of torch refuses "cuda" before any mode sees it; so
branches on device.type == "cuda" are not taken.
"""

import collections
import contextlib
import traceback
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

aten = torch.ops.aten
ELSEWHERE = torch.device("meta")
ROOT = Path(__file__).resolve().parents[1]
READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
}
# A CUDA kernel takes these with an index, or a source, on the CPU
MIXES = {aten.copy_.default, aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}  # fmt: skip


class Elsewhere(torch.Tensor):
    """A tensor on the pretended device; `values_here` has its values."""

    values_here: torch.Tensor

    @staticmethod
    def __new__(cls, real: torch.Tensor):
        assert real.device.type == "cpu", "a tensor without values came in: its factory was not seen by the mode"
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            real.size(),
            strides=real.stride(),
            storage_offset=real.storage_offset(),
            dtype=real.dtype,
            layout=real.layout,
            device=ELSEWHERE,
        )
        self.values_here = real
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        assert PretendDevice.current is not None, f"{func} on a pretended tensor outside of the mode"
        return PretendDevice.current.__torch_dispatch__(func, types, args, kwargs)

    def tolist(self):
        PretendDevice.current.wait("tolist")
        return self.values_here.tolist()

    def numpy(self, *_, **__):
        raise TypeError("a tensor on a device cannot become numpy: call .cpu() first")

    def __repr__(self, *_, **__):
        return f"Elsewhere({self.values_here!r})"


class PretendDevice(TorchDispatchMode):
    current: "PretendDevice | None" = None

    def __init__(self):
        super().__init__()
        self.waits: collections.Counter[tuple[str, str]] = collections.Counter()

    def __enter__(self):
        PretendDevice.current = self
        self.undo = contextlib.ExitStack()
        self.undo.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)
        make = torch.tensor
        self._replace(
            torch, "tensor", lambda values, dtype=None, device=None, **_: self._make(make(values, dtype=dtype), device)
        )
        self._replace(
            torch.Tensor,
            "new_tensor",
            lambda like, values, dtype=None, device=None, **_: self._make(make(values, dtype=dtype or like.dtype), device or like.device),
        )  # fmt: skip
        return super().__enter__()

    def __exit__(self, *error):
        self.undo.close()
        PretendDevice.current = None
        return super().__exit__(*error)

    def _replace(self, owner, name: str, function) -> None:
        self.undo.callback(setattr, owner, name, getattr(owner, name))
        setattr(owner, name, function)

    def _make(self, value: torch.Tensor, device) -> torch.Tensor:
        return value if device is None or torch.device(device) != ELSEWHERE else value.to(ELSEWHERE)

    def wait(self, kind: str) -> None:
        ours = [frame for frame in traceback.extract_stack() if _ours(frame.filename)]
        place = f"{Path(ours[-1].filename).relative_to(ROOT)}:{ours[-1].lineno}" if ours else "elsewhere"
        self.waits[kind, place] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        flat, _ = tree_flatten((args, kwargs))
        tensors = [value for value in flat if isinstance(value, torch.Tensor)]
        there = [each for each in tensors if isinstance(each, Elsewhere)]
        device = next((each for each in flat if isinstance(each, torch.device)), None)
        wraps = bool(there) if device is None else device == ELSEWHERE
        if func is aten.copy_.default:
            wraps = isinstance(args[0], Elsewhere)
            if there and not wraps:
                self.wait("copy to the CPU")
        elif device is not None and tensors:
            if there and not wraps:
                self.wait("copy to the CPU")
            if wraps and not there and not kwargs.get("non_blocking"):
                self.wait("copy from the CPU")
        elif there and func not in MIXES:
            mixed = [tuple(each.shape) for each in tensors if not isinstance(each, Elsewhere) and each.dim() > 0]
            if mixed:
                raise RuntimeError(f"{func}: tensors on the device and, of these shapes, on the CPU: {mixed}")
        if there and func in READS:
            self.wait(str(func))
        if there and func is aten.index.Tensor and any(_is_bool(each) for each in args[1]):
            self.wait("boolean index")
        kwargs.pop("pin_memory", None)
        out = func(*tree_map(_real, args), **tree_map(_real, kwargs))
        if func is aten._local_scalar_dense.default:
            return out
        # As of torch, a view of a tensor from outside of inference mode is no inference tensor: it has that one's version
        inference = torch.is_inference_mode_enabled() and all(each.is_inference() for each in there)
        same = {id(each.values_here): each for each in there}  # what was changed in place stays the same tensor

        def wrap(value):
            if not isinstance(value, torch.Tensor) or isinstance(value, Elsewhere):
                return value
            if not wraps:
                return value
            if id(value) in same:
                return same[id(value)]
            with torch.inference_mode(inference):
                return Elsewhere(value)

        return tree_map(wrap, out)


def _ours(filename: str) -> bool:
    return Path(filename).is_relative_to(ROOT) and ".venv" not in filename and filename != __file__


def _is_bool(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _real(value):
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.values_here if isinstance(value, Elsewhere) else value
