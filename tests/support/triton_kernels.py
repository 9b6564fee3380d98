"""Kernels of Triton without a GPU: their values in its interpreter, and what ptxas makes of their launches."""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.support.commands import ROOT, child_environment

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64"}


def run_in_interpreter(code: str) -> str:
    """Output of Python code whose kernels Triton interprets, in a process of its own: it asks once, when imported.

    Raises AssertionError with the text of stderr if the process fails.
    """
    environment = child_environment(TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(map(str, [ROOT, *sys.path])))
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@dataclass(frozen=True)
class Usage:
    """What a thread (registers, bytes of spills) and a block (bytes of shared memory) of a kernel take."""

    registers: int
    spills: int  # stores and loads
    shared: int


class Recorder:
    """Stands in for a Triton kernel: it keeps the arguments of its launch, which may be tensors without values."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def record(*arguments, **options) -> None:
            names = self.kernel.arg_names
            self.grid, self.options = grid, {name: options.pop(name) for name in options.keys() - names}
            self.arguments = self.kernel.signature.bind(*arguments, **options).args

        return record

    def compile(self, capability: int, *, aligned: bool = True, **options: int) -> Usage:
        """Compiles the launch for this compute capability (90: an H100), specialised as Triton would.

        aligned: addresses, and strides that are multiples of 16, are known as such; options: replace the launch's
        """
        import triton
        from triton.backends.compiler import GPUTarget

        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(self._specialise(aligned), target=target, options=self.options | options)
        (architecture,) = re.findall(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
        assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(compiled.asm["ptx"])
            file.flush()
            command = [str(assembler), f"-arch={architecture}", "-v", file.name, "-o", "/dev/null"]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        (registers,) = re.findall(r"Used (\d+) registers", report)
        spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", report)
        assert len(spills) >= 2, report
        return Usage(int(registers), sum(map(int, spills)), compiled.metadata.shared)

    def _specialise(self, aligned: bool):
        """The kernel's source with types; ones and missing arguments are constants, and addresses may be aligned."""
        from triton.compiler import ASTSource

        parameters = self.kernel.params
        signature, constants, attributes = {}, {}, {}
        for parameter, value in zip(parameters, self.arguments, strict=True):
            signature[parameter.name] = "constexpr" if parameter.is_constexpr else _name_type(value)
        for path, value in _list_values(self.arguments):
            if parameters[path[0]].is_constexpr or _name_type(value) == "constexpr":
                constants[path] = value
            elif aligned and (isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)):
                attributes[path] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, attributes)


def _name_type(value) -> str | tuple:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, tuple):
        return tuple(map(_name_type, value))
    if isinstance(value, float):
        return "fp32"
    return "constexpr" if value is None or value == 1 else "i32"


def _list_values(arguments: Sequence, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], object]]:
    """Path and value of each argument, those of tuples too"""
    for index, value in enumerate(arguments):
        if isinstance(value, tuple):
            yield from _list_values(value, (*path, index))
        else:
            yield (*path, index), value
