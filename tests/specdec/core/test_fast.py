"""Fast paths: devices that may use them, their proof in a process of its own, the sentence if one is left out."""

import itertools
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from specdec.core import fast

GPU = torch.device("cuda:0")


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A GPU that is told; its proofs run on the CPU, where kernels are loops."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    for name, value in (("_turned_off", {}), ("_proved", {}), ("_used", set())):
        monkeypatch.setattr(fast, name, value)
    return monkeypatch


def answers(monkeypatch, *lines: str, code: int = 0) -> list[list[str]]:
    """Children that print these lines. -> their command lines"""
    started = []

    def run(command, **_):
        started.append(command)
        known = {next(iter(json.loads(line))): line for line in lines}
        printed = itertools.takewhile(bool, map(known.get, command[4:]))  # it dies at the first path without a line
        return SimpleNamespace(stdout="\n".join(["noise", *printed]), returncode=code)

    monkeypatch.setattr(subprocess, "run", run)
    return started


def test_proofs_run_once_and_are_kept(gpu):
    started = answers(gpu, *(json.dumps({path: ""}) for path in fast.PATHS))
    assert all(fast.allows(path, GPU, torch.bfloat16) for path in fast.PATHS) and len(started) == 1
    gpu.setattr(fast, "_proved", {})
    assert fast.allows("loss", GPU) and len(started) == 1  # another process reads the file
    assert fast.describe_paths(GPU)["loss"] == "used"


def test_only_the_path_whose_code_has_changed_is_proved_again(gpu):
    started = answers(gpu, *(json.dumps({path: ""}) for path in fast.PATHS))
    assert fast.allows("loss", GPU)
    gpu.setattr(fast, "_proved", {})
    digest = fast.digest_sources
    gpu.setattr(fast, "digest_sources", lambda *names: digest(*names) + "new" * names[0].startswith("train"))
    assert fast.allows("blocks", GPU)
    gpu.setattr(fast, "_proved", {})
    gpu.setattr(fast, "digest_sources", digest)  # another version of the code beside this one
    assert fast.allows("blocks", GPU)
    assert [command[4:] for command in started] == [list(fast.PATHS), ["loss"]]


def test_a_failure_is_tried_again_by_the_next_process_and_proofs_stay(gpu):
    proofs = {path: json.dumps({path: ""}) for path in fast.PATHS}
    failed = proofs | {"graphs": json.dumps({"graphs": "took more than 300 s"})}
    answers(gpu, *failed.values())
    for _ in range(2):  # a sentence in each process
        gpu.setattr(fast, "_proved", {})
        with pytest.warns(UserWarning, match="graphs is left out: on a GPU took more than 300 s"):
            assert not fast.allows("graphs", GPU) and fast.allows("loss", GPU)
    gpu.setattr(fast, "_proved", {})
    started = answers(gpu, *proofs.values())
    assert fast.allows("graphs", GPU) and [command[4:] for command in started] == [["graphs"]]


def test_processes_that_wait_together_share_a_failure(gpu, tmp_path):
    """Eight processes of a run would otherwise fail one after the other, each in up to PROOF_SECONDS."""
    failed = {path: json.dumps({path: ""}) for path in fast.PATHS} | {"graphs": json.dumps({"graphs": "fails"})}
    started = answers(gpu, *failed.values())
    times = iter([100.0, 101.0, 150.0, 160.0])  # start and end of the first process, and of a later one
    gpu.setattr(fast.time, "time", lambda: next(times))
    for num_started in (1, 2):
        gpu.setattr(fast, "_proved", {})
        with pytest.warns(UserWarning, match="graphs is left out"):
            assert not fast.allows("graphs", GPU)
        assert len(started) == num_started
    gpu.setattr(fast.time, "time", lambda: 155.0)  # start of a process that waited for the second one
    gpu.setattr(fast, "_proved", {})
    with pytest.warns(UserWarning, match="graphs is left out"):
        assert not fast.allows("graphs", GPU) and len(started) == 2


@pytest.mark.parametrize("content", ["{", "[]", '{"proofs": {}}', '{"proofs": ["loss 1"], "failures": 0}'])
def test_a_damaged_file_of_proofs_proves_nothing(gpu, tmp_path, content):
    started = answers(gpu, *(json.dumps({path: ""}) for path in fast.PATHS))
    for _ in range(2):
        gpu.setattr(fast, "_proved", {})
        assert fast.allows("loss", GPU)
        (file,) = tmp_path.glob("fast/*.json")
        file.write_text(content)
    assert len(started) == 2


def test_a_child_that_dies_fails_one_path_and_the_next_goes_on(gpu):
    failure = "differs from the reference by 12.00% (outputs)"
    results = dict.fromkeys(fast.PATHS, "") | {"blocks": failure}
    del results["loss"]
    started = answers(gpu, *(json.dumps({path: result}) for path, result in results.items()), code=-11)
    with pytest.warns(UserWarning) as warned:
        assert fast.allows("varlen", GPU, torch.float16)
        assert not fast.allows("loss", GPU) and not fast.allows("blocks", GPU)
    texts = "\n".join(str(warning.message) for warning in warned)
    assert "loss is left out: on a GPU ended its process with -11. The reference is used." in texts
    assert f"blocks is left out: on a GPU {failure}" in texts
    assert len(started) == 2 and fast.describe_paths(GPU)["loss"] == "ended its process with -11"


def test_paths_by_device_dtype_and_wish(gpu):
    answers(gpu, *(json.dumps({path: ""}) for path in fast.PATHS))
    cpu = torch.device("cpu")
    assert not any(fast.allows(path, cpu) for path in fast.PATHS) and fast.describe_paths(cpu) is None
    assert not fast.allows("varlen", GPU, torch.float32)
    fast.turn_off("loss,blocks")
    assert not fast.allows("loss", GPU) and fast.allows("varlen", GPU, torch.bfloat16)
    assert fast.describe_paths(GPU)["loss"] == "turned off by fast="
    fast.turn_off("off")
    assert not any(fast.allows(path, GPU, torch.bfloat16) for path in fast.PATHS)
    with pytest.raises(ValueError, match="fast=los: los is no fast path; there are varlen, cache"):
        fast.turn_off("los")
    gpu.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert "varlen" not in fast.find_device_kind(GPU).paths


@pytest.mark.full
def test_a_real_child_proves_what_a_cpu_can_run():
    """The same command as for a GPU: kernels are their references there, and CUDA graphs do not exist."""
    command = [sys.executable, "-m", "specdec.core.fast", "cpu", "varlen", "loss", "graphs"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    found = {}
    for line in done.stdout.splitlines():
        found |= json.loads(line)
    assert found["varlen"] == "" and found["loss"] == "" and "only what runs on a CUDA device" in found["graphs"]
