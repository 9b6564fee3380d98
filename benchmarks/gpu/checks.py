"""Figures that are not of speed: the device, proofs of fast paths, the memory checker, tests, and the main command."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks import common, hardware
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.options import GpuReportOptions
from specdec import checkpoint
from specdec.core import fast
from specdec.text.conversations import list_stop_tokens

TINY = common.ROOT / "tests/golden/today"  # a random target with its tokenizer, prompts and rows
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) error")
COMMAND_SECONDS = 240.0  # of the main command, the memory checker and the tests
SHARPNESS = 8.0  # factor of a random LM head, without which all tokens are equally likely, and every loss is 0
NO_CHECKER = "compute-sanitizer is not installed: it comes with the CUDA toolkit (/usr/local/cuda/bin)"


def list_first_figures(options: GpuReportOptions) -> list[Figure]:
    """The device, and each fast path. The first proof takes as long as all: one process proves them together."""
    figures = [Figure("device", 1, "proofs", "device", describe_device, 60.0)]
    for path in fast.PATHS:
        figures.append(Figure(f"proof of {path}", 1, "proofs", "proofs", partial(prove_path, path=path), 320.0))
    return figures


def list_last_figures(options: GpuReportOptions) -> list[Figure]:
    figures = [Figure("memory checker", 3, "checks", "checks", check_memory, COMMAND_SECONDS)]
    if options.tests:
        figures.append(Figure("GPU tests", 3, "checks", "checks", run_tests, COMMAND_SECONDS))
    return [*figures, Figure("main command", 3, "checks", "checks", run_command, COMMAND_SECONDS)]


def describe_device(bench: Bench) -> dict:
    """Name, peak figures of the data sheet, and the measured bandwidth."""
    peak = hardware.find_peak(bench.device)
    size = hardware.GPU_READ_BYTES >> (12 if bench.options.dry_run else 0)
    measured = hardware.measure_bandwidth(size, bench.device)
    name = hardware.describe_device(bench.device)
    return {"device": name, "peak_flops": peak.flops, "bandwidth": peak.bandwidth, "measured_bandwidth": measured}


def prove_path(bench: Bench, path: str) -> dict:
    return {"path": path, "result": bench.machine.prove(path, torch.bfloat16)}


def check_memory(bench: Bench) -> dict:
    """Rows that come and go under compute-sanitizer's memcheck. Raises RuntimeError with the first errors it finds."""
    checker = bench.machine.find_memory_checker()
    if not checker:
        return {"check": "memory checker", "result": NO_CHECKER}
    words = [*checker, sys.executable, "-m", "benchmarks.gpu.rows"]
    output = run_child([*words, *(["dry_run=true"] if bench.options.dry_run else [])], common.ROOT)
    figures = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    summary = SUMMARY.search(output)
    result = f"{summary[1]} errors" if summary else "no summary"
    return {"check": "memory checker", "result": result, "captures": figures["captures"], "tokens": figures["tokens"]}


def run_tests(bench: Bench) -> dict:
    """The tests that use a GPU."""
    options = bench.options
    several = ["-n", str(options.processes), "--dist", "worksteal"] if options.processes > 1 else []
    command = [sys.executable, "-m", "pytest", "-q", *several, *shlex.split(options.tests)]
    result = run_child(command, common.ROOT).strip().splitlines()[-1]
    return {"check": "GPU tests", "result": result}


def run_command(bench: Bench) -> dict:
    """Runs accelerate launch train.py with validation, as a user starts it.

    The target is the default one if its weights are here, else a random one.
    """
    options, real = bench.options, common.ROOT / common.TARGET
    uses_real = (real / "config.json").is_file() and not options.dry_run
    with tempfile.TemporaryDirectory() as folder:
        target = real if uses_real else Path(folder) / "target"
        if not uses_real:
            save_random_target(target, "tiny" if options.dry_run else "135m")
        run_child(list_words(options, target, uses_real=uses_real), folder)
        run = Path(folder) / "checkpoints" / "gpu"
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        report = json.loads((checkpoint.resolve(run) / "report.json").read_text())
    keys = "tau replayed_tau speedup baseline_tokens_per_second identical_outputs fast".split()
    figures = {"check": "main command", "target": common.TARGET if uses_real else "random", "steps": options.steps}
    figures |= {"first_loss": losses[0], "last_loss": losses[-1]}
    return figures | {key: report[key] for key in keys if report.get(key) is not None}


def list_words(options: GpuReportOptions, target: Path, *, uses_real: bool) -> list[str]:
    """The words of the main command."""
    words = [sys.executable, "-m", "accelerate.commands.launch"]
    if options.dry_run:
        words.append("--cpu")
    data_folder = common.ROOT / "data" if uses_real else TINY
    prompts = "prompts_heldout.jsonl" if uses_real else "prompts.jsonl"
    words += [str(common.ROOT / "train.py"), "head=eagle3", f"train.steps={options.steps}", f"target.name={target}"]
    words += [f"data.train={data_folder / 'train.jsonl'}", f"data.heldout={data_folder / prompts}", "run=gpu"]
    if options.dry_run:
        words += "data.length=64 validation.num_prompts=2 validation.max_new_tokens=8 solve_packs=4".split()
    return words


def save_random_target(folder: Path, shape: str) -> None:
    """Writes a target of random weights, with the tokenizer of the tests."""
    shutil.copytree(TINY / "target", folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    target = hardware.make_random_target(shape, device=torch.device("cpu"), positions=8192, vocab_size=len(tokenizer))
    target.lm_head.weight.mul_(SHARPNESS)
    target.model.config.eos_token_id = min(list_stop_tokens(tokenizer, target.model.generation_config))
    target.model.save_pretrained(folder)


def run_child(command: list[str], folder: str | Path) -> str:
    """Runs a command, and returns its output. Raises RuntimeError with the last lines if it fails.

    Whoever watches this process (benchmarks/gpu/children.py) ends it with all that it has started.
    """
    process = subprocess.run(command, cwd=folder, env=child_environment(), capture_output=True, text=True, check=False)
    if process.returncode:
        lines = quote_end(process.stdout + process.stderr)
        raise RuntimeError(f"ended with {process.returncode}: {lines}")
    return process.stdout


def child_environment() -> dict[str, str]:
    paths = {"PYTHONPATH": os.pathsep.join([str(common.ROOT), *filter(None, sys.path)]), "SPECDEC_PROGRESS": "plain"}
    return os.environ | paths


def quote_end(output: str) -> str:
    """The last lines of what a process wrote, without a launcher's traceback behind what it ran."""
    lines = output.strip().splitlines()
    if lines and lines[-1].startswith("subprocess.CalledProcessError: "):
        lines = lines[: -1 - lines[::-1].index("Traceback (most recent call last):")]
    return " / ".join(lines[-12:])
