"""Head norm, rotary embedding and the write of K and V in one operator: its proof, and its Triton kernel."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from specdec.core import write_keys
from tests.support.commands import ROOT, child_environment

MAX_REGISTERS = 64  # of a thread: 32 programs of one warp then fit on a multiprocessor
needs_triton = pytest.mark.skipif(write_keys.triton is None, reason="needs triton, which comes with torch for GPUs")


def test_the_proof_of_the_path_runs_here():
    write_keys.check_write_keys(torch.device("cpu"))


def test_the_proof_finds_a_wrong_kernel():
    """It leaves out what one wrong column changes."""

    def write_wrong_key(products, rotary, keys, *arguments):
        query = write_keys.write_keys(products, rotary, keys, *arguments)
        keys[..., 3] = keys[..., 4]
        return query

    with pytest.raises(ValueError, match=r"differs from the reference by \d+\.\d+% \(1 nodes, heads of 128\)"):
        write_keys.compare_kernel(write_wrong_key, torch.device("cpu"), torch.bfloat16, max_error=0.02)


def test_a_gpu_without_triton_is_told_what_it_lacks(monkeypatch):
    monkeypatch.setattr(write_keys, "triton", None)
    with pytest.raises(ValueError, match="needs the package triton"):
        write_keys.check_write_keys(torch.device("cuda"))


@pytest.mark.triton
@needs_triton
@pytest.mark.parametrize("dtype, max_error", [("float32", 1e-5), ("bfloat16", 0.02), ("float16", 0.002)])
def test_the_kernel_in_tritons_interpreter(dtype, max_error):
    code = f"""
import torch
from specdec.core.write_keys import compare_kernel, launch_kernel
compare_kernel(launch_kernel, torch.device("cpu"), torch.{dtype}, max_error={max_error})
print("agrees")
"""
    environment = child_environment(TRITON_INTERPRET="1", PYTHONPATH=os.pathsep.join(map(str, [ROOT, *sys.path])))
    process = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert process.stdout == "agrees\n", process.stderr


@pytest.mark.triton
@needs_triton
@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("has_biases", [False, True], ids=["no biases", "biases"])
def test_registers_at_the_sizes_of_qwen3_8b(capability, has_biases, tmp_path):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = write_keys._write_kernel
    constants: dict = {"HEADS": 32, "GROUPS": 8, "HALF": 64, "LAST": 64, "BLOCK": 64}
    if not has_biases:
        constants |= dict.fromkeys(("query_bias", "key_bias", "value_bias"))
    types = dict.fromkeys(kernel.arg_names, "i32")  # strides and numbers
    types |= {
        name: "*bf16"
        for name in kernel.arg_names
        if re.fullmatch(r"(query|key|value|keys|values|cos|sin|out)|.*_(norm|bias)", name)
    }
    types |= {"epsilon": "fp32", "slots": "*i64"} | dict.fromkeys(constants, "constexpr")
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(ASTSource(kernel, types, constants), target=target, options={"num_warps": 1})
    source = tmp_path / "kernel.ptx"
    source.write_text(compiled.asm["ptx"])
    (architecture,) = re.findall(r"^\.target (\w+)", compiled.asm["ptx"], re.MULTILINE)
    assembler = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    command = [assembler, f"-arch={architecture}", "-v", source, "-o", tmp_path / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    (registers,) = re.findall(r"Used (\d+) registers", report)
    assert re.search(r"\b0 bytes spill stores, 0 bytes spill loads", report) and int(registers) <= MAX_REGISTERS
