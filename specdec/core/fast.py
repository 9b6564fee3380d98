"""Fast paths: the devices that may use them, the user's choice, and the proof that they agree with the reference.

A device uses a fast path if the table below allows it and a small case agreed with the reference on this device. The
case runs once on each kind of device, in its own process, because a fault of a GPU would end this one. A path that
differs or fails is left out with one sentence, and the reference runs. A CPU uses none: its reference is as fast.

Proofs are kept on disk, each with a digest of the code that it proves. Failures are not: the next process tries again.
"""

import contextlib
import hashlib
import importlib
import importlib.metadata
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import filelock
import torch

from specdec.core.devices import name_cause
from specdec.core.digests import digest_sources
from specdec.core.files import find_cache_folder, write_text
from specdec.core.untrusted import read_json

# By path: the function that compares it with the reference on a device. It raises an error where they differ.
PATHS = {
    "varlen": "specdec.core.varlen:check_varlen",  # packed texts in one call
    "cache": "specdec.core.cached_keys:check_cached_keys",  # committed keys read to their length
    "tree": "specdec.core.tree_attention:check_tree_attention",  # the same in two kernels of triton
    "write": "specdec.core.write_keys:check_write_keys",  # norm, rotary embedding and cache in one kernel
    "loss": "train.objective.fused:check",  # LM head and loss without logits of all goals
    "blocks": "specdec.core.compile:check_blocks",  # torch.compile of decoder blocks in training
    "graphs": "specdec.core.compile:check_graphs",  # passes and steps of decoding as CUDA graphs
    "nucleus": "specdec.core.nucleus:check_nucleus",  # top-p without a sort of all tokens
}
# Modules with code that a proof covers, besides that of its function
PROVED_CODE = {"tree": ["specdec.core.tree_kernels"]}
PROOF_SECONDS = 300  # limit for the proof of one path: compiling takes up to a minute


@dataclass(frozen=True)
class DeviceKind:
    """A row of the table: devices, and the paths that they may use. min_capability: compute capability"""

    name: str
    paths: tuple[str, ...]
    min_capability: tuple[int, int] = (0, 0)


HIP = DeviceKind("AMD GPU (MI300), where the kernel for packed texts has no windows", ("loss", "blocks", "graphs"))
CUDA = (
    DeviceKind("NVIDIA GPU since Ampere (A100, L40S, RTX 4090, H100, H200, B200)", tuple(PATHS), min_capability=(8, 0)),
    DeviceKind("NVIDIA GPU before Ampere (T4, V100), without the kernel for packed texts", ("loss", "graphs")),
)
OTHER = DeviceKind("CPU, Apple GPU and others", ())

_turned_off: dict[str, str] = {}  # reason for each path
_forced: set[str] = set()
_proved: dict[torch.device, dict[str, str]] = {}  # reason for each failed path, "" for a proved one
_used: set[str] = set()


def find_device_kind(device: torch.device) -> DeviceKind:
    """The row of the table for a device"""
    if device.type != "cuda":
        return OTHER
    if torch.version.hip:
        return HIP
    return next(kind for kind in CUDA if torch.cuda.get_device_capability(device) >= kind.min_capability)


def allows(path: str, device: torch.device, dtype: torch.dtype | None = None) -> bool:
    """True if a fast path is to be used. The first question on a kind of device proves its paths, in up to a minute.

    dtype: dtype of the operands. The kernels of attention have 16 bits only.
    """
    if path in _turned_off:
        return False
    if path not in _forced:
        if path not in find_device_kind(device).paths or (
            path in ("varlen", "cache", "tree") and dtype not in (torch.bfloat16, torch.float16)
        ):
            return False
        if _prove_paths(device)[path]:
            return False
    _used.add(path)
    return True


def turn_off(names: str | Sequence[str]) -> None:
    """Turns off the paths in a comma list, or all for "off". Raises ValueError for other names."""
    paths = names.split(",") if isinstance(names, str) else list(names)
    paths = list(PATHS) if paths == ["off"] else paths
    if unknown := set(paths) - set(PATHS):
        raise ValueError(
            f"fast={names}: {', '.join(sorted(unknown))} is no fast path; there are {', '.join(PATHS)}, or off."
        )
    _turned_off.update(dict.fromkeys(paths, "turned off by fast="))


def leave_out(path: str, reason: str) -> bool:
    """Warns that a path is not used for one object, such as a target. Returns False."""
    warnings.warn(f"The fast path {path} is left out: {reason}. The reference is used.", stacklevel=2)
    return False


def describe_paths(device: torch.device) -> dict[str, str] | None:
    """{path: "used", or why not}, for reports; None on devices without fast paths"""
    if not find_device_kind(device).paths:
        return None
    reasons = {path: reason for results in _proved.values() for path, reason in results.items()}
    return {
        path: "used" if path in _used else _turned_off.get(path) or reasons.get(path) or "not used" for path in PATHS
    }


@contextlib.contextmanager
def force_paths(*paths: str) -> Iterator[None]:
    """Within, these paths are used on every device, by their references where there is no kernel (for tests)."""
    old_forced = set(_forced)
    old_used = set(_used)
    _forced.update(paths)
    try:
        yield
    finally:
        _forced.clear()
        _forced.update(old_forced)
        _used.intersection_update(old_used)


def _prove_paths(device: torch.device) -> dict[str, str]:
    """{path: why it failed, or ""}, from proofs of this machine, else from one child process for all processes"""
    if device not in _proved:
        machine = {
            "device": torch.cuda.get_device_name(device),
            "torch": torch.__version__,
            "cuda": str(torch.version.cuda or torch.version.hip),
            "triton": find_version("triton"),
        }
        file = find_cache_folder() / "fast" / f"{hashlib.sha256(json.dumps(machine).encode()).hexdigest()[:16]}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        start_time = time.time()
        with filelock.FileLock(file.with_suffix(".lock")):
            _proved[device] = _complete_proofs(file, machine, device, start_time)
        for path, why in _proved[device].items():
            if why:
                leave_out(path, f"on {machine['device']} {why}")
    return _proved[device]


def find_version(package: str) -> str | None:
    """The version of an installed package; None without it"""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


# Beginnings of reasons that stay true for the same packages and code
LASTING_REASONS = "needs the package", "No module named"


def _is_lasting(why: str) -> bool:
    """Whether a proof, or the reason of a failure, holds for all processes."""
    return not why or why.startswith(LASTING_REASONS)


def _complete_proofs(file: Path, machine: dict, device: torch.device, start_time: float) -> dict[str, str]:
    """{path: why it failed, or ""}. Proves the paths whose code has no proof in `file`, and writes the new proofs.

    start_time: time since when this process waits. Failures of another process since then count for this one, too.
    """
    modules = {path: [check.partition(":")[0], *PROVED_CODE.get(path, [])] for path, check in PATHS.items()}
    proof_of_path = {path: f"{path} {digest_sources(*names)}" for path, names in modules.items()}
    proofs, results = _read_proofs(file, start_time)
    results |= {path: proofs[proof] for path, proof in proof_of_path.items() if proof in proofs}
    missing = [path for path in PATHS if path not in results]
    if missing:
        results |= _run_checks(device, missing)
        proofs |= {proof_of_path[path]: results[path] for path in missing if _is_lasting(results[path])}
        failures = {path: why for path, why in results.items() if why}
        document = {"machine": machine, "proofs": proofs, "failures": failures, "time": time.time()}
        write_text(file, json.dumps(document, indent=1))
    return results


def _read_proofs(file: Path, start_time: float) -> tuple[dict[str, str], dict[str, str]]:
    """Earlier proofs, and failures since `start_time`; none if the file is damaged.

    Proofs are {path and digest: "", or why it cannot be used with these packages}.
    """
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        document = read_json(file)
        failures = document["failures"] if document["time"] >= start_time else {}
        proofs = {str(proof): str(why) for proof, why in document["proofs"].items()}
        return proofs, {path: str(failures[path]) for path in PATHS if path in failures}
    return {}, {}


def _run_checks(device: torch.device, paths: Sequence[str]) -> dict[str, str]:
    """The proof of each path in a child process. If one dies, another goes on with the paths behind it."""
    results: dict[str, str] = {}
    while missing := [path for path in paths if path not in results]:
        command = [sys.executable, "-m", "specdec.core.fast", str(device), *missing]
        try:
            folders = {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
            process = subprocess.run(
                command, capture_output=True, text=True, timeout=PROOF_SECONDS, check=False, env=os.environ | folders
            )
            lines = process.stdout.splitlines()
            end = f"ended its process with {process.returncode}"
        except subprocess.TimeoutExpired as late:
            lines = _read_lines(late.stdout)
            end = f"took more than {late.timeout:.0f} s"
        for line in lines:
            if line.startswith("{"):
                results |= json.loads(line)
        results.setdefault(next((path for path in missing if path not in results), missing[0]), end)
    return results


def _read_lines(output: bytes | str | None) -> list[str]:
    """Lines of a process that was ended: bytes, or a text on Windows"""
    text = output.decode(errors="replace") if isinstance(output, bytes) else output
    return (text or "").splitlines()


def compare_with_reference(
    name: str, results: Iterable[torch.Tensor], references: Iterable[torch.Tensor], max_error: float
) -> None:
    """Raises ValueError if a result differs from its reference by more than `max_error` of the reference's norm."""
    for result, reference in zip(results, references, strict=True):
        exact = reference.double().cpu()
        error = float((result.double().cpu() - exact).norm() / exact.norm().clamp(min=1e-9))
        if not error <= max_error:
            raise ValueError(f"differs from the reference by {error:.2%} ({name})")


def main(device: str, *paths: str) -> None:
    """Prints one line for each path: {path: why it failed, or ""}."""
    for path in paths:
        module, function = PATHS[path].split(":")
        try:
            getattr(importlib.import_module(module), function)(torch.device(device))
            why = ""
        except Exception as error:  # compilers and kernels raise errors of any kind
            why = name_cause(error)
        print(json.dumps({path: why}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
