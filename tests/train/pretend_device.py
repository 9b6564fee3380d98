"""A pretended accelerator: values are computed on the CPU, but tensors say that they are elsewhere.

    with PretendDevice() as device:
        target.model.to(ELSEWHERE)
        ...                         # any code that would run on a GPU
    device.waits                    # Counter of (kind, file:line): the places where the host would wait for the device

An operation on tensors of both devices raises, as on a GPU. Counted are the reading of a value (`item`, `tolist`,
`bool`), results whose size depends on values (`nonzero`, boolean indices), copies to the CPU, and copies from the CPU
that are not declared `non_blocking`. The device is called "meta", because a CPU build of torch refuses "cuda" before
any mode sees it; so branches on device.type == "cuda" are not taken.
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
ROOT = Path(__file__).resolve().parents[2]
READS = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten.repeat_interleave.Tensor,
}
# A CUDA kernel takes these with an index, or a source, on the CPU
MIXES = {
    aten.copy_.default,
    aten.index.Tensor,
    aten.index_put_.default,
    aten.index_put.default,
    aten._index_put_impl_.default,
}


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
            lambda like, values, dtype=None, device=None, **_: self._make(
                make(values, dtype=dtype or like.dtype), device or like.device
            ),
        )
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
        tensors = select_instances(flat, torch.Tensor)
        on_device = select_instances(tensors, Elsewhere)
        device = next(iter(select_instances(flat, torch.device)), None)
        wraps = bool(on_device) if device is None else device == ELSEWHERE
        if func is aten.copy_.default:
            wraps = isinstance(args[0], Elsewhere)
            self.count_copies(on_device, wraps, waits_for_upload=False)
        elif device is not None and tensors:
            self.count_copies(on_device, wraps, waits_for_upload=not kwargs.get("non_blocking"))
        elif on_device and func not in MIXES:
            refuse_mixed_devices(func, tensors)
        if on_device:
            self.count_reads(func, args)
        kwargs.pop("pin_memory", None)
        result = func(*tree_map(_real, args), **tree_map(_real, kwargs))
        if func is aten._local_scalar_dense.default or not wraps:
            return result
        return wrap_result(result, on_device)

    def count_copies(self, on_device: list, wraps: bool, waits_for_upload: bool) -> None:
        """Counts the waits of a copy between the device and the CPU."""
        if on_device and not wraps:
            self.wait("copy to the CPU")
        if wraps and not on_device and waits_for_upload:
            self.wait("copy from the CPU")

    def count_reads(self, func, args) -> None:
        """Counts the waits of an operation whose result, or the size of whose result, the host reads."""
        if func in READS:
            self.wait(str(func))
        if func is aten.index.Tensor and any(_is_bool(index) for index in args[1]):
            self.wait("boolean index")


def select_instances(values: list, kind: type) -> list:
    return [value for value in values if isinstance(value, kind)]


def refuse_mixed_devices(func, tensors: list) -> None:
    """Raises RuntimeError where an operation reads tensors of the CPU beside those of the device."""
    mixed = [tuple(tensor.shape) for tensor in tensors if not isinstance(tensor, Elsewhere) and tensor.dim() > 0]
    if mixed:
        raise RuntimeError(f"{func}: tensors on the device and, of these shapes, on the CPU: {mixed}")


def wrap_result(result, on_device: list):
    """The tensors of a result as those of the device; a tensor that was changed in place stays the same object."""
    # As of torch, a view of a tensor from outside of inference mode is no inference tensor: it has that one's version
    inference = torch.is_inference_mode_enabled() and all(tensor.is_inference() for tensor in on_device)
    wrapped_inputs = {id(tensor.values_here): tensor for tensor in on_device}

    def wrap(value):
        if not isinstance(value, torch.Tensor) or isinstance(value, Elsewhere):
            return value
        if id(value) in wrapped_inputs:
            return wrapped_inputs[id(value)]
        with torch.inference_mode(inference):
            return Elsewhere(value)

    return tree_map(wrap, result)


def _ours(filename: str) -> bool:
    return Path(filename).is_relative_to(ROOT) and ".venv" not in filename and filename != __file__


def _is_bool(value) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _real(value):
    if isinstance(value, torch.device):
        return torch.device("cpu")
    return value.values_here if isinstance(value, Elsewhere) else value
