"""Inductor's code for CUDA, generated on a machine without CUDA, and its kernels.

    with FakeCuda() as device, generate_code() as functions:
        ...                     # decoding with Runner(True), on tensors without values (fake_cuda.py)
    functions[0].kernels        # what one call of the first compiled function starts

Inductor lowers, fuses and writes code as for an H100. Then it stops: nothing becomes machine code, and what was to be
compiled runs as it was traced. Without triton it stops behind the fusion, so there are refusals and no kernels.
"""

import contextlib
import importlib.util
import re
import types
import unittest.mock
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, fx
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import config
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from specdec.core import compile
from tests.support.fake_cuda import CUDA, PROPERTIES
from train.prepare.count_tensors import H100_BANDWIDTH, H100_PEAK

HAS_TRITON = importlib.util.find_spec("triton") is not None
# Kernels of operators that inductor calls as they are, by name; others are one kernel
OPERATOR_KERNELS = {"specdec.attend_tree": 2}
patch = unittest.mock.patch.object


@dataclass(frozen=True)
class Function:
    """A function as inductor generated it.

    name: the runner's name of it; code: the module that starts its kernels, None without triton
    refusal: the reason why there is no code; "" for none
    """

    name: object
    code: str | None
    refusal: str = ""

    @property
    def kernels(self) -> list[str]:
        """The kernels that one call starts, in order"""
        assert self.code is not None, self.refusal or "triton is absent"
        return list_kernels(self.code)


def list_kernels(code: str) -> list[str]:
    """Names of the kernels that generated code starts: inductor's, users' of triton, and those of operators"""
    body = re.split(r"^ *def call\((?:self, )?args\):$", code, maxsplit=1, flags=re.MULTILINE)[1]
    body = re.split(r"^ {0,4}(?:def |runner = )", body, maxsplit=1, flags=re.MULTILINE)[0]
    names = list[str]()
    for call in re.findall(r"^ +(?:\w+ = )?([\w.]+)\(", body, re.MULTILINE):
        if call.endswith(".run"):
            names.append(call.removesuffix(".run"))
        elif call.startswith(("extern_kernels.", "torch.ops.", "aten.")) or call.endswith(".copy_"):
            name = call.removeprefix("torch.ops.").removesuffix(".default")
            names += [name] * OPERATOR_KERNELS.get(name, 1)
    return names


@contextlib.contextmanager
def generate_code(options: dict | None = None) -> Iterator[list[Function]]:
    """Within FakeCuda, generates what a Runner compiles. -> its functions, to which each further one is added

    options: inductor's options in place of those of core/compile.py
    """
    functions: list[Function] = []
    real_compile, build = torch._inductor.compile, compile.Runner._build

    chosen = options

    def generate(module: fx.GraphModule, examples: Sequence[Tensor], options: dict):
        functions.append(_generate(real_compile, module, examples, options if chosen is None else chosen))
        return lambda *inputs: module(*inputs)

    def build_named(runner, name, function, inputs):
        graph = build(runner, name, function, inputs)
        functions[-1] = replace(functions[-1], name=name)
        return graph

    with (
        _answer_inductor(),
        patch(torch._inductor, "compile", generate),
        patch(compile, "FakeTensorMode", lambda **_: _SameTensors()),
        patch(compile.Runner, "_build", build_named),
    ):
        yield functions


_generated: dict[tuple, Function] = {}  # results by code, arguments and options, for targets that are alike


def _generate(compile_module, module: fx.GraphModule, examples: Sequence[Tensor], options: dict) -> Function:
    shapes = tuple((example.shape, example.stride(), example.dtype) for example in examples)
    key = module.code, shapes, tuple(options.items())
    if key not in _generated:
        code, refusal = None, ""
        with _disable_current_modes():
            with FakeTensorMode(shape_env=ShapeEnv()):
                tensors = [torch.empty_strided(*shape, dtype=dtype, device=CUDA) for *shape, dtype in shapes]
            try:
                with config.patch(fx_graph_cache=False, joint_graph_constant_folding=False, compile_threads=1):
                    compile_module(module, tensors, options=options)
            except Exception as error:  # inductor wraps what it does not know
                cause = getattr(error, "inner_exception", error)
                code, refusal = (cause.code, "") if isinstance(cause, _Generated) else (None, str(error))
        _generated[key] = Function(None, code, refusal)
    return _generated[key]


class _Generated(Exception):
    """Ends inductor's work. code: the module that inductor has written; None without triton"""

    def __init__(self, code: str | None):
        super().__init__()
        self.code = code


class _SameTensors(contextlib.nullcontext):
    """Stands in for the mode that takes values away before inductor sees tensors: here they have none."""

    def from_tensor(self, tensor: Tensor, **_) -> Tensor:
        return tensor


@contextlib.contextmanager
def _answer_inductor() -> Iterator[None]:
    """Within, inductor and triton see an H100, and stop once code is there."""
    from torch._inductor import graph, scheduler, utils  # slow to import
    from torch._inductor.fx_passes import joint_graph, post_grad

    answers = {
        "get_device_properties": PROPERTIES,
        "get_compute_capability": 90,
        "current_device": 0,
        "device_count": 1,
        "is_available": True,
        "is_triton_capable": True,
        "raise_if_triton_unavailable": None,
        "is_bf16_supported": True,
    }
    codegen = graph.GraphLowering.codegen

    def write(lowering):
        raise _Generated(codegen(lowering)[0].value)

    def end(_):
        raise _Generated(None)

    with contextlib.ExitStack() as stack:

        def replace_attribute(owner, name: str, value) -> None:
            stack.enter_context(patch(owner, name, value))

        for name, answer in answers.items():
            for owner in (CudaInterface, CudaInterface.Worker):
                if hasattr(owner, name):
                    replace_attribute(owner, name, staticmethod(lambda *_, answer=answer, **__: answer))
        for module in (utils, scheduler):  # inductor pads products that are bound by arithmetic
            replace_attribute(module, "get_device_tflops", lambda _: H100_PEAK / 1e12)
            replace_attribute(module, "get_gpu_dram_gbps", lambda: H100_BANDWIDTH / 1e9)
        for passes in (joint_graph, post_grad):  # patterns are traced with values, on a device that is here
            replace_attribute(passes, "lazy_init", lambda *_, init=passes.lazy_init: init(torch.device("cpu")))
        replace_attribute(scheduler, "has_triton", lambda *_: True)
        if HAS_TRITON:
            import triton

            replace_attribute(triton.runtime.driver, "_active", make_driver())
            replace_attribute(graph.GraphLowering, "codegen", write)
        else:
            replace_attribute(scheduler.Scheduler, "codegen", end)
        yield


def make_driver() -> types.SimpleNamespace:
    """A stand-in for triton's driver of an H100"""
    from triton.backends.compiler import GPUTarget

    sizes = {
        "max_shared_mem": PROPERTIES.shared_memory_per_block_optin,
        "multiprocessor_count": PROPERTIES.multi_processor_count,
        "max_num_regs": PROPERTIES.regs_per_multiprocessor,
        "warpSize": PROPERTIES.warp_size,
    }
    return types.SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, PROPERTIES.warp_size),
        get_current_device=lambda: 0,
        get_current_stream=lambda _=0: 0,
        get_active_torch_device=lambda: CUDA,
        get_device_interface=lambda: torch.cuda,
        utils=types.SimpleNamespace(get_device_properties=lambda _: sizes),
    )
