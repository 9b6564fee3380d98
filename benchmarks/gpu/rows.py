"""Decodes with rows that come and go, captured, with a tiny random target: what the memory checker runs.

    python -m benchmarks.gpu.rows [dry_run=true]

Requests of several lengths join between rounds, and leave. Chains, chosen trees and sampled trees are drafted.
"""

import json
from dataclasses import dataclass

import torch

from benchmarks import common
from benchmarks.gpu.bench import CAPTURED, Bench, Mode
from benchmarks.gpu.machine import make_machine
from benchmarks.gpu.options import GpuReportOptions, make_tiny
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Request

ARRIVALS = ((9, 5), (30, 12), (17, 20), (5, 7), (64, 9))  # tokens of each prompt, and of its answer
ROUNDS_BETWEEN = 2  # rounds between two arrivals
SHAPES = {"chain": (3, 1, 3), "tree": (3, 2, 6)}  # depth, width and nodes


@dataclass(frozen=True)
class RowOptions:
    dry_run: bool = False  # on a CPU, without captures


def decode_rows(bench: Bench, mode: Mode, name: str, sampling: Sampling) -> list[list[int]]:
    """The answers to all arrivals. name: shape of the drafts, in SHAPES"""
    depth, width, nodes = SHAPES[name]
    drafting = mode.make_drafting(depth, width=width, nodes=nodes)
    proposer = drafting.proposer(bench.head)
    decoder = drafting.decoder(bench.target, proposer, sampling=sampling, stop=set(), runner=drafting.runner())
    batch = decoder.batch(torch.Generator(bench.device).manual_seed(0))
    requests = [Request(bench.random_tokens(size, seed=size), num) for size, num in ARRIVALS]
    for request in requests:
        batch.admit([request])
        for _ in range(ROUNDS_BETWEEN):
            if batch.running:
                batch.run_round()
    while batch.running:
        batch.run_round()
    batch.close()
    if batch.runner.cuda_graphs != mode.graphs:
        raise RuntimeError("passes were not captured")
    return [request.tokens for request in requests]


def main(arguments: list[str]) -> None:
    options = common.read_options(RowOptions, __doc__, arguments)
    machine = make_machine(dry_run=options.dry_run)
    bench, figures = Bench(make_tiny(GpuReportOptions()), machine), {}
    with machine.installed():
        for name in SHAPES:
            for word, sampling in (("greedy", Sampling()), ("sampled", Sampling(temperature=1.0))):
                answers = decode_rows(bench, CAPTURED, name, sampling)
                figures[f"{word} {name}"] = sum(map(len, answers))
    print(json.dumps({"tokens": figures, "captures": machine.counts["captures"]}), flush=True)


if __name__ == "__main__":
    common.run_main(main)
