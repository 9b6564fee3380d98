"""Measures a training step by length: tokens/s, memory above the weights, and model FLOPs utilisation.

    python scripts/bench_training.py heads=eagle3,dflash lengths=512,1024,2048,4096 out=after.json picture=after.png
    python scripts/bench_training.py trees=../before,. lengths=512,2048 picture=both.png   # two working trees in turn
    python scripts/bench_training.py compare=before.json lengths=512,2048 picture=both.png  # or an earlier result beside it
    python scripts/bench_training.py shape=8b lengths=2048,8192 features=given             # a random target

Steps are those of train.py (conf, optimizer, losses) on random text. Each cell, which is one head at one length in one
working tree, runs in a process of its own, because allocators keep memory; cells take turns, `rounds` times. Memory is
the most that was in use at once above target and head: activations, gradients and the optimizer's state. MFU is the FLOPs
that a step needs, without what is computed again in backward passes, over its time and the device's peak FLOP/s.
"""

from helpers import hardware, training_table
from helpers.options import option, options, split
from helpers.options import run as run_command
from helpers.training_step import Cost, Work
from helpers.training_table import Cell

import dataclasses
import json
import os
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import torch

from specdec.core import files, precision
from train import progress
from train.overrides import as_written
from train.overrides import check as check_options

CHILD = (  # the helpers are those of this working tree, specdec and train those of the tree that is measured
    "import sys; sys.path.insert(0, {scripts!r}); import helpers; sys.path.insert(0, {tree!r}); "
    "from helpers import training_step; training_step.main()"
)


@dataclass(frozen=True)
class TargetOptions:
    name: str = option("targets/smollm2-135m", "folder or Hub name of the target; not read with shape=")
    dtype: str = option("auto", "bfloat16 or float32; auto: bfloat16 where the device computes in it")


@dataclass(frozen=True, kw_only=True)
class BenchTraining:
    heads: str = option("eagle3", "comma list of heads, by their files in conf/head")
    lengths: str = option("512,1024,2048", "comma list of tokens in a pack")
    document: int | None = option(None, "tokens of a conversation; null: each pack is one, which costs attention most")
    batch: int = option(1, "packs in a step")
    depth: int | None = option(None, "steps of the unroll; null: as the head's file says")
    shape: str | None = option(None, "a random target instead: 8b, 1b, tiny, or sizes (hidden4096-layers32-...)")
    features: str = option("target", "target: the target reads every batch; given: its outputs are known")
    precision: str = option("auto", "bf16 or fp32; auto: bf16 where the device computes in bfloat16")
    threads: int | None = option(None, "of the CPU; null: all cores")
    steps: int = option(2, "timed steps in each process; their median counts")
    warmup: int = option(1, "steps before them")
    rounds: int = option(1, "every cell is measured so many times, all cells in turn")
    most_seconds: float = option(900, "a process that takes longer is ended, and its cell left out")
    most_memory: float | None = option(None, "GB that a process on the CPU may take; null: 90 % of what is free")
    peak_flops: float | None = option(None, "FLOP/s of the device at best, for MFU; null: by its name, if it is known")
    trees: str = option(".", "comma list of working trees of this repository, for commits to compare")
    compare: str = option("", "comma list of JSON files that out= wrote, shown beside the new figures")
    out: str | None = option(None, "JSON file for the figures")
    picture: str | None = option(None, "file for a picture of memory and time by length, such as lengths.png")
    target: TargetOptions = field(default_factory=TargetOptions)
    train: dict[str, str] = field(
        default_factory=dict, metadata={"prefix": "train.", "help": "further options of train.py: train.head.lr=1e-4"}
    )


def decided(chosen: BenchTraining) -> BenchTraining:
    """With what `auto` is here, which trees of older commits do not know."""
    dtype = precision.choose("cuda" if torch.cuda.is_available() else "cpu").dtype
    if chosen.target.dtype == precision.AUTO:
        chosen = dataclasses.replace(chosen, target=dataclasses.replace(chosen.target, dtype=dtype))
    if chosen.precision == precision.AUTO:
        chosen = dataclasses.replace(chosen, precision={"bfloat16": "bf16", "float32": "fp32"}[dtype])
    return chosen


def main() -> None:
    chosen = decided(options(BenchTraining, __doc__))
    works = make_works(chosen)
    trees = {tree_name(path): path for path in map(Path, split(chosen.trees))}
    earlier = [cell for path in split(chosen.compare) for cell in training_table.read(Path(path))]
    if not trees and not earlier:
        raise ValueError("trees is empty: give a working tree, such as trees=., or compare= with earlier results.")
    costs: dict[tuple[str, Work], list[Cost | str]] = {(tree, work): [] for tree in trees for work in works}
    for number in progress.track(range(chosen.rounds), "measuring", unit="rounds"):
        for tree, work in list(costs)[number % max(1, len(costs)) :] + list(costs)[: number % max(1, len(costs))]:
            cost = measure(chosen, trees[tree], work)
            costs[tree, work].append(cost)
            print(f"{tree}, {work.head}, {work.length} tokens: {describe(cost)}", file=sys.stderr, flush=True)
    peak = peak_flops(chosen)
    cells = earlier + [join(tree, work, found, peak) for (tree, work), found in costs.items()]
    print(conditions(chosen))
    print(training_table.markdown(cells))
    if chosen.out:
        document = {"conditions": conditions(chosen), "cells": [asdict(cell) for cell in cells]}
        files.write_text(Path(chosen.out), json.dumps(document, indent=2) + "\n")
    if chosen.picture:
        training_table.draw(cells, Path(chosen.picture), title=conditions(chosen))


def make_works(chosen: BenchTraining) -> list[Work]:
    """What to measure: every head at every length. Raises ValueError for options that no head or length can have."""
    if chosen.features not in ("target", "given"):
        raise ValueError(f"features={chosen.features} must be target or given.")
    try:
        lengths = [int(length) for length in split(chosen.lengths)]
    except ValueError:
        lengths = []
    if not lengths or min(lengths) < 32:
        raise ValueError(f"lengths={chosen.lengths} must be a comma list of numbers from 32 on.")
    check_options(chosen.train, "train.")
    more = as_written([f"{key}={value}" for key, value in chosen.train.items()])
    more += [] if chosen.depth is None else [f"head.objective.depth={chosen.depth}"]
    more += [] if chosen.threads is None else [f"threads={chosen.threads}"]
    known = {"document", "batch", "features", "precision", "steps", "warmup"}
    shared = {name: getattr(chosen, name) for name in known}
    count = peak_flops(chosen) is not None
    return [
        Work(head, length, overrides=tuple(more), count=count, **shared)
        for head in split(chosen.heads)
        for length in lengths
    ]


def peak_flops(chosen: BenchTraining) -> float | None:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else ""
    return chosen.peak_flops or hardware.peak_of(name).flops


def conditions(chosen: BenchTraining) -> str:
    """The conditions of measurement, in one line."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(chosen.threads or os.cpu_count() or 1)  # as the processes do
    target = f"a random target ({chosen.shape})" if chosen.shape else chosen.target.name
    outputs = "read in every step" if chosen.features == "target" else "given"
    rows = f"{chosen.batch} x one document" if chosen.document is None else f"{chosen.batch} x {chosen.document} tokens"
    return f"{hardware.describe(device)}; {target} in {chosen.target.dtype}, its outputs {outputs}; {rows}; {chosen.precision}"


def tree_name(path: Path) -> str:
    """Its commit, with + if files are changed. Raises ValueError for what is no working tree of this repository."""
    if not (path / "train.py").exists():
        raise ValueError(f"trees={path} has no train.py: give a working tree of this repository (git worktree add).")
    command = ["git", "-C", str(path), "describe", "--always", "--dirty=+", "--exclude=*"]
    found = subprocess.run(command, capture_output=True, text=True)
    return found.stdout.strip() if found.returncode == 0 else path.resolve().name


def measure(chosen: BenchTraining, tree: Path, work: Work) -> Cost | str:
    """In a process of its own. -> the cost, or why there is none. Raises ValueError for what that process refuses."""
    limit = chosen.most_memory * 1e9 if chosen.most_memory else 0.9 * psutil.virtual_memory().available
    target = {**asdict(chosen.target), "name": find(chosen.target.name), "shape": chosen.shape}
    document = {"work": asdict(work), "target": target, "most_memory": int(limit)}
    code = CHILD.format(scripts=str(Path(__file__).resolve().parent), tree=str(tree.resolve()))
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve()), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-c", code, json.dumps(document)]
    try:
        child = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=chosen.most_seconds
        )
    except subprocess.TimeoutExpired:
        return f"more than {chosen.most_seconds:g} s"
    if child.returncode < 0:
        return f"ended by signal {-child.returncode}"
    if child.returncode:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise ValueError(f"{tree}, {work.head}, {work.length} tokens: {last}")
    found = json.loads(child.stdout.splitlines()[-1])
    return found["error"] if "error" in found else Cost(**found)


def find(name: str) -> str:
    """A folder's whole path, because other working trees may lack it; a Hub name as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name


def describe(cost: Cost | str) -> str:
    if isinstance(cost, str):
        return cost
    return f"{cost.tokens_per_second:.0f} tokens/s, {cost.peak_bytes / 1e9:.2f} GB above the weights"


def join(tree: str, work: Work, found: list[Cost | str], peak: float | None) -> Cell:
    """The rounds of a cell as one: all times, the highest memory. One that failed once has failed."""
    failed = [cost for cost in found if isinstance(cost, str)]
    costs = [cost for cost in found if isinstance(cost, Cost)]
    if failed:
        return Cell(tree, work.head, work.length, error=failed[0])
    cost = dataclasses.replace(
        costs[0],
        seconds=[second for each in costs for second in each.seconds],
        peak_bytes=max(each.peak_bytes for each in costs),
    )
    return Cell(
        tree,
        work.head,
        work.length,
        tokens_per_second=cost.tokens_per_second,
        seconds=statistics.median(cost.seconds),
        seconds_all=cost.seconds,
        peak_bytes=cost.peak_bytes,
        state_bytes=cost.state_bytes,
        parameters=cost.parameters,
        flops=cost.flops,
        mfu=cost.mfu(peak),
    )


if __name__ == "__main__":
    run_command(main)
