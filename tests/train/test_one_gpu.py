"""Needs of a machine with one GPU, tested on a CPU: the device's number, attention, memory, settings of accelerate."""

import functools
import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.generate import GenerateOptions
from specdec.core import devices
from specdec.heads.blocks import Rotary, make_llama_config, solve_ridge
from specdec.options import run_command
from specdec.target.model import Target
from tests.support.commands import ROOT
from tests.support.targets import make_target
from train import processes
from train.features.loader import Loader, Order
from train.objective import objective
from train.prepare import build

GPU = torch.device("cuda", 0)
CUDA_FULL = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.2 GiB is free."
)
ALLOCATOR = "DefaultCPUAllocator: can't allocate memory: you tried to allocate 4000000000 bytes."
CPU_FULL = f"[enforce fail at alloc_cpu.cpp:127] err == 0. {ALLOCATOR}"


@pytest.fixture
def one_gpu(monkeypatch):
    """torch.empty says where `cuda` is, which accelerate does not; -> the devices that threads have chosen"""
    empty, devices_of_threads = torch.empty, []

    def pretended(*sizes, device=None, **keywords):
        cuda = device is not None and torch.device(device).type == "cuda"
        return SimpleNamespace(device=GPU) if cuda else empty(*sizes, device=device, **keywords)

    def set_device(device):
        if torch.device(device).index is None:
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got:{device}")
        devices_of_threads.append((device, threading.current_thread().name))

    monkeypatch.setattr(torch, "empty", pretended)
    monkeypatch.setattr(torch.cuda, "set_device", set_device)
    return devices_of_threads


def test_the_loaders_thread_takes_a_device_without_a_number(one_gpu):
    order = Order(num_packs=1, seed=0, batch=1, accumulation=1, group=0, num_groups=1)
    material = SimpleNamespace(count_prefetched=lambda batch: 1)
    loader = Loader(material, order=order, device=torch.device("cuda"), steps=1)
    assert loader.thread.submit(lambda: 7).result() == 7 and loader.device == GPU
    loader.close()
    assert [(device, name.startswith("loader")) for device, name in one_gpu] == [(GPU, True)]


@pytest.mark.parametrize("flag", ["True", "False"])
def test_the_accelerators_device_has_its_number_and_the_launchers_cpu_is_followed(flag, one_gpu, monkeypatch):
    asked, state = [], SimpleNamespace(device=torch.device("cuda"), num_processes=1)
    monkeypatch.setattr(build, "PartialState", lambda cpu, **_: asked.append(cpu) or state)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("ACCELERATE_USE_CPU", flag)
    options = SimpleNamespace(train=SimpleNamespace(seed=0, timeout=1), threads=1, fast=None)
    assert build.start_processes(options).device == GPU and asked == [flag == "True"]


@pytest.mark.parametrize(("variable", "is_enabled"), [(None, False), ("TORCH_CUDNN_SDPA_AVOID_RECOMPILE", True)])
def test_a_target_does_without_attention_of_cudnn_unless_the_user_chose_how(monkeypatch, variable, is_enabled):
    if variable:
        monkeypatch.setenv(variable, "1")
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(True)
        make_target(11, num_layers=2)
        assert torch.backends.cuda.cudnn_sdp_enabled() is is_enabled
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


# Products that are meant to be exact


@pytest.mark.parametrize("precision", ["highest", "high", "by place"])
def test_ridge_is_not_rounded_and_leaves_the_users_setting(precision):
    """by place: where the newer setting alone was used"""
    backends = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
    untouched = backends[0].fp32_precision
    if precision == "by place":
        backends[0].fp32_precision = "tf32"
    else:
        torch.set_float32_matmul_precision(precision)
    before = [backend.fp32_precision for backend in backends]

    def pairs():
        assert [backend.fp32_precision for backend in backends] == ["ieee", "ieee"]
        assert torch.backends.cuda.matmul.allow_tf32 is False  # torch refuses two answers
        yield torch.randn(9, 3), torch.randn(9, 2)

    try:
        solve_ridge(pairs())
        assert precision == "by place" or torch.get_float32_matmul_precision() == precision
        assert [backend.fp32_precision for backend in backends] == before
    finally:
        backends[0].fp32_precision = untouched
        torch.set_float32_matmul_precision("highest")


def test_angles_are_not_products_of_matrices():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            assert not any(name in str(func) for name in ("mm", "matmul", "einsum", "addr")), func
            return func(*args, **(kwargs or {}))

    rotary = Rotary(make_llama_config(make_target(11, num_layers=2), intermediate_size=None))
    with Watch():
        cos, _ = rotary(torch.zeros(1, 1), torch.tensor([[0, 30_001]]))
    assert cos[0, 1, 0] == torch.tensor(30_001.0).cos()


# Logits by free memory


def drafter(device: torch.device, num_bytes: int) -> SimpleNamespace:
    weight = SimpleNamespace(requires_grad=True, device=device, nbytes=num_bytes)
    return SimpleNamespace(parameters=lambda: iter([weight]))


@pytest.mark.parametrize(
    ("losses", "free", "expected"),
    [
        (["kl"], 66.5e9, 2**31),  # of 80 GB, beside a target of 8 B
        (["kl"], 66.2e9, 2**31),  # a little less does not matter: a resumed run computes the same parts
        (["kl"], 22e9, 2**29),
        (["kl", "ce"], 66.5e9, 2**29),
        (["kl"], 1e9, objective.MIN_LOGITS),  # at least what a CPU takes
    ],
)
def test_logits_follow_the_free_memory_of_a_gpu(monkeypatch, losses, free, expected):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), 85 * 10**9))
    assert objective.count_logits(drafter(GPU, int(1.6e9)), losses) == expected
    assert objective.count_logits(drafter(torch.device("cpu"), int(1.6e9)), losses) == objective.MIN_LOGITS


# Full memory


FULL = {
    "GPU": (torch.OutOfMemoryError(CUDA_FULL), "The memory of the GPU is full (2.15 GB were asked for)"),
    "CPU": (RuntimeError(CPU_FULL), "The memory of this machine is full (4 GB were asked for)"),
    "Windows": (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 512 bytes."),
                "The memory of this machine is full"),
    "cuBLAS": (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
               "The memory of the GPU is full"),
    "Python": (MemoryError(), "The memory of this machine is full"),
}  # fmt: skip


@pytest.mark.parametrize("name", FULL)
def test_full_memory_is_told_from_other_errors(name):
    error, sentence = FULL[name]
    assert devices.describe_out_of_memory(error).startswith(sentence)
    outer = ValueError("around it")
    outer.__cause__ = error
    assert devices.describe_out_of_memory(outer).startswith(sentence)
    assert devices.describe_out_of_memory(RuntimeError("shapes cannot be multiplied")) is None
    assert devices.describe_out_of_memory(ValueError(str(error) + " out of memory")) is None


@pytest.mark.parametrize("name", ["GPU", "CPU"])
def test_full_memory_ends_training_with_the_options_that_lower_it(fit, monkeypatch, name):
    def fail(*_, **__):
        raise FULL[name][0]

    monkeypatch.setattr(objective.Objective, "forward", fail)
    with pytest.raises(ValueError) as caught:
        fit("full", "head=eagle3", "train.batch=2", "solve_packs=0")
    said = str(caught.value)
    assert said.startswith(FULL[name][1]) and "\n" not in said
    remedies = (
        "lower data.length=64 or train.batch=2 (raise train.accumulation=1 as much) or head.objective.depth=4, or give "
    )
    assert remedies + "head.objective.gradient_checkpointing=true" in said
    with pytest.raises(ValueError) as caught:
        fit("full2", "head=mtp", "solve_packs=0", "head.objective.gradient_checkpointing=true")
    assert "train.batch" not in str(caught.value) and "head.objective" not in str(caught.value)


def test_full_memory_ends_a_command_with_its_options():
    def main(error):
        raise error

    with pytest.raises(SystemExit) as caught:
        run_command.run_command(functools.partial(main, FULL["GPU"][0]), GenerateOptions)
    assert str(caught.value).startswith(f"error: {FULL['GPU'][1]}")
    assert str(caught.value).endswith(
        ": lower max_new_tokens=, decode.nodes=, or use target.dtype=bfloat16, or target.device=auto with more GPUs, "
        "or a smaller or quantised target."
    )
    with pytest.raises(RuntimeError, match="shapes"):
        run_command.run_command(functools.partial(main, RuntimeError("shapes")), GenerateOptions)


def test_a_target_that_does_not_fit_into_a_cpu_is_named(folder, monkeypatch):
    def fail(*_, **__):
        raise RuntimeError(CPU_FULL)

    monkeypatch.setattr("transformers.PreTrainedModel.from_pretrained", fail)
    with pytest.raises(ValueError, match=r"does not fit into the memory of device=cpu"):
        Target.load(str(folder / "target"))


# Settings of accelerate


REFUSED = {"DYNAMO_BACKEND": "INDUCTOR", "USE_FSDP": "true", "USE_DEEPSPEED": "true", "USE_MEGATRON_LM": "true",
           "USE_PARALLELISM_CONFIG": "true", "GRADIENT_ACCUMULATION_STEPS": "4"}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_settings_of_accelerate_that_training_does_not_take_are_refused(monkeypatch, name):
    harmless = {"DYNAMO_BACKEND": "NO", "USE_FSDP": "false", "GRADIENT_ACCUMULATION_STEPS": "1"}
    for variable, value in harmless.items():  # what the launcher always sets
        monkeypatch.setenv(f"ACCELERATE_{variable}", value)
    processes.check_launcher()
    monkeypatch.setenv(f"ACCELERATE_{name}", REFUSED[name])
    asked = rf"^accelerate launch asks for --{name.lower()} {REFUSED[name]}"
    with pytest.raises(ValueError, match=rf"{asked}, which train\.py does not follow, as .*: leave the flag out"):
        processes.check_launcher()


def test_they_are_refused_before_anything_is_loaded(fit, monkeypatch):
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "INDUCTOR")
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("the target was loaded"))
    with pytest.raises(ValueError, match="--dynamo_backend INDUCTOR"):
        fit("run")


LAUNCHED = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", "ACCELERATE_USE_CPU": "True"}
SEVERAL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "precision", "num", "sentences"),
    [
        ({}, "bf16", 1, []),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "bf16", 1, []),
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, "fp32", 1, ["--mixed_precision bf16, and precision=fp32 decides"]),
        ({"ACCELERATE_MIXED_PRECISION": "fp16"}, "bf16", 1, ["--mixed_precision fp16, and precision=bf16 decides"]),
        (SEVERAL, "bf16", 1, ["asked for several processes and has started one"]),
        (SEVERAL | {"WORLD_SIZE": "1"}, "bf16", 1, []),
        (SEVERAL | {"OMPI_COMM_WORLD_SIZE": "2"}, "bf16", 2, []),
        (SEVERAL | {"ACCELERATE_MIXED_PRECISION": "fp8"}, "fp32", 1, ["--mixed_precision fp8", "several processes"]),
    ],
)
def test_flags_of_the_launcher_that_are_not_followed_are_named(variables, precision, num, sentences, monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in (LAUNCHED | variables).items():
        monkeypatch.setenv(name, value)
    said = list(processes.find_ignored_flags(precision, num))
    assert len(said) == len(sentences) and all(part in sentence for part, sentence in zip(sentences, said))
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION")  # not accelerate's launcher: a scheduler may set an address
    assert not list(processes.find_ignored_flags(precision, num))


@pytest.mark.parametrize(("number", "threads"), [("1", 4), ("6", 6), ("", 4), ("4,2", 4)])
def test_the_launchers_threads_are_taken(number, threads, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    monkeypatch.setenv("OMP_NUM_THREADS", number)
    assert processes.count_threads(2) == threads


@pytest.mark.full
def test_the_launcher_itself_passes_what_is_named(monkeypatch, tmp_path):
    script = tmp_path / "script.py"
    script.write_text("from train import processes\nprint(*processes.find_ignored_flags('bf16', 1), sep='\\n')\n")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--mixed_precision", "fp16"]
    process = subprocess.run(
        [*command, "--num_processes", "2", str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    lines = process.stdout.splitlines()
    assert "--mixed_precision fp16" in lines[0] and "several processes" in lines[1], process.stderr
