"""Head norm, rotary embedding and the write of K and V in one operator: its proof, and its Triton kernel."""

import pytest
import torch

from specdec.core import write_keys
from tests.support.triton_kernels import Recorder, run_in_interpreter

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
    assert run_in_interpreter(code) == "agrees\n"


@pytest.mark.triton
@needs_triton
@pytest.mark.parametrize("capability", [90, 80])
@pytest.mark.parametrize("has_biases", [False, True], ids=["no biases", "biases"])
def test_registers_at_the_sizes_of_qwen3_8b(capability, has_biases, monkeypatch):
    """Nothing spills in the launch for a tree of 7 nodes, with aligned addresses and without."""
    launch = Recorder(write_keys._write_kernel)
    monkeypatch.setattr(write_keys, "_write_kernel", launch)
    sizes = [32 * 128, 8 * 128, 8 * 128]
    with torch.device("meta"):
        products = torch.empty(1, 7, sum(sizes), dtype=torch.bfloat16).split(sizes, dim=-1)
        rotary = torch.empty(2, 1, 7, 128, dtype=torch.bfloat16).unbind()
        keys, values = torch.empty(2, 1, 8, 4096, 128, dtype=torch.bfloat16)
        norms = torch.empty(2, 128, dtype=torch.bfloat16).unbind()
        biases = torch.empty(sum(sizes), dtype=torch.bfloat16).split(sizes) if has_biases else ()
        slots = torch.zeros(1, 7, dtype=torch.int64)
    out = write_keys.launch_kernel(products, rotary, keys, values, slots, norms, biases, 1e-6)
    assert out.shape == (1, 32, 7, 128)
    for aligned in (True, False):
        usage = launch.compile(capability, aligned=aligned)
        print(capability, has_biases, launch.grid, aligned, usage)
        assert usage.spills == 0 and usage.registers <= MAX_REGISTERS
