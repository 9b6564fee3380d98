"""What Triton and ptxas make of a kernel for a GPU, on a machine without one."""

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int64: "i64"}


@dataclass(frozen=True)
class Usage:
    """What a thread (registers, bytes of spills) and a block (bytes of shared memory) of a kernel take."""

    registers: int
    spills: int
    shared: int


class Recorder:
    """Stands in for a Triton kernel: it keeps the arguments of its launch, which may be tensors without values."""

    def __init__(self, kernel):
        self.kernel = kernel

    def __getitem__(self, grid):
        def record(*arguments, **options) -> None:
            self.grid, self.arguments, self.options = grid, arguments, options

        return record

    def compile(self, capability: int) -> Usage:
        """Compiles the launch for this compute capability (90: an H100), specialised as Triton would."""
        import triton
        from triton.backends.compiler import GPUTarget

        options = {name: value for name, value in self.options.items() if name.startswith("num_")}
        compiled = triton.compile(self._specialise(), target=GPUTarget("cuda", capability, 32), options=options)
        assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
        architecture = f"sm_{capability}a" if capability >= 90 else f"sm_{capability}"
        with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
            file.write(compiled.asm["ptx"])
            file.flush()
            command = [assembler, f"-arch={architecture}", "-v", file.name, "-o", "/dev/null"]
            report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        registers, spills = (re.search(rf"(\d+) {unit}", report) for unit in ("registers", "bytes spill stores"))
        assert registers and spills, report
        return Usage(int(registers[1]), int(spills[1]), compiled.metadata.shared)

    def _specialise(self):
        """The kernel's source with types; ones and missing arguments are constants, and addresses are aligned."""
        from triton.compiler import ASTSource

        names = self.kernel.arg_names
        constants = {name: value for name, value in self.options.items() if name in names}
        signature = dict(zip(names, map(_name_type, self.arguments))) | dict.fromkeys(constants, "constexpr")
        aligned = {}
        for path, value in _list_values(self.arguments):
            if _name_type(value) == "constexpr":
                constants[path] = value
            elif isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0):
                aligned[path] = [["tt.divisibility", 16]]
        return ASTSource(self.kernel, signature, constants, aligned)


def _name_type(value) -> str | tuple:
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    if isinstance(value, tuple):
        return tuple(map(_name_type, value))
    if value is None or value == 1:
        return "constexpr"
    return "fp32" if isinstance(value, float) else "i32"


def _list_values(arguments: Sequence, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], object]]:
    """Path and value of each argument, those of tuples too"""
    for index, value in enumerate(arguments):
        if isinstance(value, tuple):
            yield from _list_values(value, (*path, index))
        else:
            yield (*path, index), value
