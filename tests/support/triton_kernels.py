"""Kernels of triton without a GPU: their values in its interpreter, and what they need of an H100."""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.commands import ROOT


def run_in_interpreter(code: str) -> None:
    """Runs Python code whose kernels triton interprets, in a process of its own: triton asks once, when imported."""
    command = [sys.executable, "-c", code]
    result = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@dataclass(frozen=True)
class Needs:
    """What ptxas says of a kernel: registers of a thread, bytes that spill to memory"""

    registers: int
    spilled: int


def assemble_kernel(kernel, signature: dict[str, str], constants: dict[str, object], *, num_warps: int) -> Needs:
    """Compiles a kernel for sm_90. signature: triton's types of all arguments, "constexpr" for those in `constants`"""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": num_warps}).asm["ptx"]
    assembler = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.ptx")
        file.write_text(code)
        command = [str(assembler), "-arch=sm_90a", "-v", str(file), "-o", str(file.with_suffix(".cubin"))]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    spilled = [int(num) for num in re.findall(r"(\d+) bytes spill", report)]
    (registers,) = re.findall(r"Used (\d+) registers", report)
    return Needs(int(registers), sum(spilled))
