"""A pretended H100: tensors on cuda:0 that have shapes and no values, on a machine without CUDA.

    with FakeCuda() as device:
        target = device.move_target(make_target(60))
        ...                     # any code that would run on a GPU
    device.launches             # Counter of operations: kernels that the host started one by one, outside of graphs
    device.waits                # Counter of the kinds of waits for the device
    device.graphs               # number of CUDA graphs that were captured

Branches on device.type == "cuda" are taken. Where the host reads a value outside of graphs, it waits and reads `value`.
While a graph is captured, a wait raises, and so does a tensor of the CPU: a replay would read the memory of a tensor
that is gone. torch.cuda's streams, events and graphs are stand-ins, so `core.compile.capture_graph` is the real one.
"""

import contextlib
import ctypes
import functools
import subprocess
import tempfile
import types
import unittest.mock
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map_only

from specdec.core.compile import join_products
from specdec.target.model import Target
from tests.support.compiler import missing
from train.prepare.count_tensors import KERNELS, VIEWS

aten = torch.ops.aten
CUDA = torch.device("cuda", 0)
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
namespace c10::impl { C10_REGISTER_GUARD_IMPL(CUDA, NoOpDeviceGuardImpl<DeviceType::CUDA>); }
"""
# An H100 SXM, in the words of torch.cuda.get_device_properties
PROPERTIES = types.SimpleNamespace(
    name="NVIDIA H100 80GB HBM3", type="cuda", index=0, uuid="", major=9, minor=0, multi_processor_count=132,
    total_memory=80 * 2**30, warp_size=32, regs_per_multiprocessor=65_536, max_threads_per_multi_processor=2_048,
    max_threads_per_block=1_024, shared_memory_per_block=49_152, shared_memory_per_block_optin=232_448,
    L2_cache_size=50 * 2**20, clock_rate=1_980_000, memory_clock_rate=2_619_000, memory_bus_width=5_120,
    gcnArchName="", is_integrated=0,
)  # fmt: skip
# Operations of which the host reads a result, or the size of a result
READS = {"nonzero", "masked_select", "_unique2", "unique_dim", "unique_consecutive", "equal"}


class RefusedInGraph(AssertionError):
    """What a captured function does that CUDA refuses, or that a replay would do with memory that is gone."""


@functools.cache
def load_guard() -> None:
    """Registers a device guard for CUDA. Skips the test where torch has one, or where no compiler is."""
    if torch.version.cuda or torch.version.hip:
        pytest.skip("torch is built for GPUs: what a CPU build pretends is measured there")
    if absent := missing():
        pytest.skip(f"a device guard is compiled, which needs {absent}")
    from torch._inductor import cpp_builder  # slow to import

    folder = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory() as place:
        source, library = Path(place, "guard.cpp"), Path(place, "guard.so")
        source.write_text(GUARD)
        command = [cpp_builder.get_cpp_compiler(), "-shared", "-fPIC", "-std=c++20", f"-I{folder / 'include'}"]
        command += [str(source), "-o", str(library), f"-L{folder / 'lib'}", "-lc10"]
        subprocess.run(command, check=True, capture_output=True, text=True)
        ctypes.CDLL(str(library))


class Stream:
    """Stands in for a stream and for an event: all work is done when it is asked for."""

    def __init__(self, *_, **__):
        self.cuda_stream, self.device = 0, CUDA

    def wait_stream(self, stream) -> None: ...

    def wait_event(self, event) -> None: ...

    def record_event(self, event=None):
        return event or Stream()

    def record(self, stream=None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end) -> float:
        return 1.0  # milliseconds


class FakeCuda(TorchDispatchMode):
    """The context of the module's docstring. move_module, move_target: models without values on the device"""

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.waits, self.graphs = Counter[str](), Counter[str](), 0
        self.value = 1  # what the host reads
        self.capturing = False
        self.pinned: set[int] = set()  # storages of page-locked memory
        self.moved: dict[int, torch.Tensor] = {}  # tensors on the device by the ids of those that they stand for
        self.originals: list[torch.Tensor] = []  # kept, so that ids stay theirs

    def __enter__(self):
        load_guard()
        self.undo = contextlib.ExitStack()
        self.undo.enter_context(_answer_as_device(self))
        self.undo.enter_context(FakeTensorMode())
        return super().__enter__()

    def __exit__(self, *error):
        super().__exit__(*error)
        self.undo.close()

    @contextlib.contextmanager
    def paused(self):
        """Within, tensors have values, and are on the CPU."""
        with _disable_current_modes():
            yield

    def move_target(self, target: Target, *, reads_length: bool) -> Target:
        """The target without values on the device, its products joined as by `Target.load`"""
        self.move_module(target.model)
        target._shapes = [shape and replace(shape, device=CUDA) for shape in target._shapes]
        target.__dict__["reads_length"] = reads_length  # which no comparison of values tells here
        join_products(target.model)
        return target

    def move_module(self, module: nn.Module) -> nn.Module:
        """The module, whose parameters, buffers and other tensors have become tensors without values on the device"""
        for part in module.modules():
            for tensors in (part._parameters, part._buffers, part.__dict__):
                moved = tree_map_only(torch.Tensor, self.move_tensor, dict(tensors))
                tensors.update(moved)
        return module

    def move_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == CUDA:
            return tensor
        if id(tensor) not in self.moved:
            moved = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=CUDA)
            if isinstance(tensor, nn.Parameter):
                moved = nn.Parameter(moved, requires_grad=tensor.requires_grad)
            self.moved[id(tensor)] = moved
            self.originals.append(tensor)
        return self.moved[id(tensor)]

    @contextlib.contextmanager
    def capture(self):
        """Within, a graph is captured."""
        self.capturing = True
        try:
            yield
        finally:
            self.capturing = False

    def wait(self, kind: str) -> None:
        """Counts a wait of the host. Raises RefusedInGraph while a graph is captured."""
        if self.capturing:
            raise RefusedInGraph(f"{kind} in a captured function waits for the device")
        self.waits[kind] += 1

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func.namespace == "prim":  # the device of a tensor
            return func(*args, **kwargs)
        inputs = _list_tensors((args, kwargs))
        answer = self._answer_host(func, inputs)
        if answer is NotImplemented and torch.is_inference_mode_enabled():
            answer = self._run_parts(func, args, kwargs)
        if answer is not NotImplemented:
            return answer
        if any(tensor.device == CUDA for tensor in inputs) and _depends_on_values(func, args, kwargs):
            self.wait(_name_of(func))
        is_pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        outputs = _list_tensors(result)
        if is_pinned:
            self.pinned |= set(map(_find_storage, outputs))
        self._check_outputs(func, outputs)
        self._check_copy(func, args, kwargs, result)
        return result

    def _answer_host(self, func, inputs: list[torch.Tensor]):
        """What the host learns of a tensor, or page-locked memory; NotImplemented for work of a device"""
        name = _name_of(func)
        if name == "_local_scalar_dense":
            return self._read_value(func, inputs[0])
        if name == "_pin_memory":
            self.pinned.add(_find_storage(inputs[0]))
            return inputs[0]
        return _find_storage(inputs[0]) in self.pinned if name == "is_pinned" else NotImplemented

    def _run_parts(self, func, args, kwargs):
        """Runs the parts of an operation, which inference mode does not take apart; NotImplemented without parts"""
        super().__enter__()
        try:
            return func.decompose(*args, **kwargs)
        finally:
            super().__exit__(None, None, None)

    def _read_value(self, func, tensor: torch.Tensor):
        """The value that the host reads: the true one of a tensor that was made on the CPU, else `value`"""
        if tensor.device == CUDA:
            self.wait("a value")
        elif tensor.constant is not None:  # type: ignore[attr-defined]
            return func(tensor)
        return float(self.value) if tensor.dtype.is_floating_point else int(self.value)

    def _check_outputs(self, func, outputs: list[torch.Tensor]) -> None:
        """Counts a kernel outside of graphs. Refuses tensors of the CPU in a graph, but for numbers and empty ones."""
        name = _name_of(func)
        if self.capturing:
            for tensor in outputs:
                if tensor.device != CUDA and tensor.dim() and len(tensor) and _find_storage(tensor) not in self.pinned:
                    raise RefusedInGraph(f"{name} in a captured function makes a tensor of the CPU: {tensor.shape}")
        elif name not in VIEWS and any(tensor.device == CUDA for tensor in outputs):
            self.launches[name] += KERNELS.get(name, 1)

    def _check_copy(self, func, args, kwargs, result) -> None:
        """Counts the wait of a copy between CPU and device; page-locked memory needs none, and a graph needs it."""
        if func not in (aten.copy_.default, aten._to_copy.default):
            return
        source = args[func is aten.copy_.default]
        if source.device == result.device:
            return
        non_blocking = True in args[2:] or kwargs.get("non_blocking")
        uploads = result.device == CUDA
        if _find_storage(source if uploads else result) not in self.pinned and (self.capturing or not uploads):
            non_blocking = False
        if not non_blocking:
            self.wait("a copy")
        elif not (uploads or self.capturing):
            self.launches["copy to the host"] += 1


def _name_of(func) -> str:
    return func.overloadpacket.__name__


def _list_tensors(values) -> list[torch.Tensor]:
    return [value for value in tree_flatten(values)[0] if isinstance(value, torch.Tensor)]


def _find_storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _find_address(tensor: torch.Tensor) -> int:
    return _find_storage(tensor) + tensor.storage_offset() * tensor.element_size()


def _read_list(tensor: torch.Tensor):
    """The values of a tensor on the CPU as nested lists"""
    return [_read_list(part) for part in tensor] if tensor.dim() else tensor.item()


def _depends_on_values(func, args, kwargs) -> bool:
    """Whether an operation's result, or its size, is known only once the device has the values"""
    name = _name_of(func)
    if name == "index":
        return any(index is not None and index.dtype == torch.bool for index in args[1])
    if func is aten.repeat_interleave.Tensor:
        return kwargs.get("output_size") is None
    return name in READS


@torch.library.register_fake("aten::_thnn_fused_gru_cell")
def _(input_gates, hidden_gates, state, input_bias=None, hidden_bias=None):
    return torch.empty_like(state), state.new_empty(state.shape[0], 5 * state.shape[1])


@contextlib.contextmanager
def _answer_as_device(device: FakeCuda):
    """Within, torch.cuda answers as on an H100."""

    class Event(Stream):
        def synchronize(self) -> None:
            device.wait("an event")

    class Graph:
        """Stands in for torch.cuda.CUDAGraph."""

        def __init__(self):
            device.graphs += 1

        def replay(self) -> None: ...

    nothing = contextlib.nullcontext
    answers = {
        "get_device_properties": lambda *_: PROPERTIES, "get_device_capability": lambda *_: (9, 0),
        "get_device_name": lambda *_: PROPERTIES.name, "is_bf16_supported": lambda *_, **__: True,
        "current_device": lambda: 0, "device_count": lambda: 1,
        "mem_get_info": lambda *_: (70 * 2**30, 80 * 2**30), "memory_allocated": lambda *_: 0,
        "Stream": Stream, "Event": Event, "current_stream": lambda *_: Stream(), "synchronize": lambda *_: None,
        "stream": lambda *_: nothing(), "device": lambda *_: nothing(), "graph_pool_handle": lambda: (0, 1),
        "CUDAGraph": Graph, "graph": lambda *_, **__: device.capture(),
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for name, answer in answers.items():
            stack.enter_context(unittest.mock.patch.object(torch.cuda, name, answer))
        # One copy for all values, and an address for each memory
        stack.enter_context(unittest.mock.patch.object(FakeTensor, "tolist", lambda tensor: _read_list(tensor.cpu())))
        stack.enter_context(unittest.mock.patch.object(FakeTensor, "data_ptr", _find_address))
        yield
