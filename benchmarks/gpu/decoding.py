"""Figures of decoding: passes by nodes, tokens, rounds, kernels by name, trees, and longer contexts."""

import statistics
import time
from functools import partial

import torch

from benchmarks import common, hardware
from benchmarks.gpu import bench as modes
from benchmarks.gpu.bench import WARM_UP, Bench, Mode
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.options import GpuReportOptions
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Batch, Request
from specdec.decoding.drafting import Drafting
from specdec.proposers.costs import PassTimer
from specdec.target.model import Target
from specdec.target.verifier import Verifier

PLAIN_SECONDS, COMPILE_SECONDS = 120.0, 300.0  # limits of a figure; coordinate descent times each kernel many times
PROFILED = 5  # tokens of a table of kernels
GREEDY, SAMPLED = Sampling(), Sampling(temperature=1.0)
TREES = {"tree of 5 x 4": (4, 20), "tree of 63 nodes": (16, 63)}  # width and nodes, at depth 5


def list_figures(options: GpuReportOptions) -> list[Figure]:
    """Figures of decoding in the order of what nobody knows first."""
    figures = []
    for mode in (modes.CAPTURED, modes.TUNED):
        figures.append(make_figure("decoding", 1, "kernels", f"kernels, {mode.name}", profile_tokens, mode))
        figures += list_mode_figures(options, mode)
    return [*figures, *list_mode_figures(options, modes.COMPILED)]


def make_figure(group: str, stage: int, subject: str, name: str, measure, mode: Mode, **arguments) -> Figure:
    limit = COMPILE_SECONDS if mode.compile else PLAIN_SECONDS
    return Figure(name, stage, group, subject, partial(measure, mode=mode, **arguments), limit)


def list_mode_figures(options: GpuReportOptions, mode: Mode) -> list[Figure]:
    """A plain token, passes by nodes, and a round of one mode."""
    conditions = f"{mode.name}, {options.context} tokens"
    make = partial(make_figure, "decoding", 1)
    figures = [
        make("passes", f"pass of {num}, {conditions}", time_pass, mode, nodes=num, context=options.context)
        for num in common.read_numbers("nodes", options.nodes)
    ]
    plain = make("tokens and rounds", f"plain token, {conditions}", time_token, mode, context=options.context)
    name = f"round of {options.depth} drafts, {conditions}"
    return [plain, *figures, make("tokens and rounds", name, time_round, mode, context=options.context)]


def list_tree_figures(options: GpuReportOptions, group: str) -> list[Figure]:
    """Rounds of sampled and of greedy chains and trees."""
    make, depth, context = partial(make_figure, group, 2), options.depth, options.context
    figures = []
    for name, (width, nodes) in {"chain": (1, depth), **TREES}.items():
        for sampling, word in ((SAMPLED, "sampled"), (GREEDY, "greedy")):
            shape = {"width": width, "nodes": nodes, "sampling": sampling, "context": context}
            title = f"round of a {word} {name}, captured"
            figures.append(make("trees", title, time_round, modes.CAPTURED, **shape))
    return figures


def list_context_figures(options: GpuReportOptions, group: str, mode: Mode) -> list[Figure]:
    """A plain token and a round behind longer texts."""
    make, figures = partial(make_figure, group, 2, "longer contexts", mode=mode), []
    for tokens in common.read_numbers("contexts", options.contexts):
        conditions = f"{mode.name}, {tokens} tokens"
        figures.append(make(f"plain token, {conditions}", time_token, context=tokens))
        figures.append(make(f"round of {options.depth} drafts, {conditions}", time_round, context=tokens))
    return figures


# Passes, tokens and rounds


@torch.inference_mode()
def time_pass(bench: Bench, mode: Mode, *, nodes: int, context: int) -> dict:
    """ms of the target's pass over nodes behind a text: a chain, or a tree of more nodes than a chain has."""
    linear = nodes <= 1 + bench.options.depth
    with bench.using(mode):
        runner = mode.make_drafting(bench.options.depth).runner()
        verifier = Verifier(bench.target, sampling=GREEDY, rule="token", runner=runner)
        timer = PassTimer(verifier, GREEDY, 1, linear=linear, context=context)
        seconds = timer.measure([nodes])[nodes]
        check_mode(runner, mode)
    return {"mode": mode.name, "context": context, "nodes": nodes, "ms": 1e3 * seconds}


def time_token(bench: Bench, mode: Mode, *, context: int) -> dict:
    """ms of a plain token, and its share of the bandwidth."""
    row = time_round(bench, mode, context=context, drafts=False)
    needed = hardware.count_bytes_per_token(bench.target) + context * count_cache_bytes(bench.target)
    bandwidth = hardware.find_peak(bench.device).bandwidth
    share = None if bandwidth is None else needed / (row["ms"] / 1e3) / bandwidth
    return row | {"bytes": needed, "share_of_bandwidth": share}


def count_cache_bytes(target: Target) -> int:
    """Bytes of K and V of one token."""
    config = target.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * target.dtype.itemsize


def time_round(
    bench: Bench,
    mode: Mode,
    *,
    context: int,
    width: int = 1,
    nodes: int | None = None,
    sampling: Sampling = GREEDY,
    drafts: bool = True,
) -> dict:
    """The median ms of a round behind a text, once what is captured is captured. drafts: False for a plain token"""
    with bench.using(mode):
        drafting = mode.make_drafting(bench.options.depth, width=width, nodes=nodes)
        batch = open_batch(bench, drafting, context, sampling=sampling, drafts=drafts)
        times = []
        for _ in range(bench.options.rounds):
            start = time.perf_counter()
            batch.run_round()  # waits for the device
            times.append(time.perf_counter() - start)
        batch.close()
        check_mode(batch.runner, mode)
        graphs = len(batch.runner.graphs) + len(getattr(getattr(batch.proposer, "runner", None), "graphs", ()))
    row = {"mode": mode.name, "context": context, "drafts": drafting.shape.nodes if drafts else 0}
    middle, spread = statistics.median(times), statistics.quantiles(times, n=4)
    return row | {"ms": 1e3 * middle, "ms_quartiles": [1e3 * spread[0], 1e3 * spread[2]], "graphs": graphs}


def open_batch(
    bench: Bench, drafting: Drafting, context: int, *, sampling: Sampling = GREEDY, drafts: bool = True
) -> Batch:
    """A batch of one request behind a random text, after its first rounds."""
    proposer = drafting.proposer(bench.head) if drafts else None
    decoder = drafting.decoder(bench.target, proposer, sampling=sampling, stop=set(), runner=drafting.runner())
    batch = decoder.batch(torch.Generator(bench.device).manual_seed(0))
    batch.admit([Request(bench.random_tokens(context), bench.count_room(drafting.depth))])
    for _ in range(WARM_UP):
        batch.run_round()
    return batch


def check_mode(runner, mode: Mode) -> None:
    """Raises RuntimeError if passes did not run in the mode that the figure is named after."""
    if (runner.compile, runner.cuda_graphs) != (mode.compile, mode.graphs):
        raise RuntimeError(f"passes ran with compile={runner.compile}, cuda_graphs={runner.cuda_graphs}")


# Kernels


def profile_tokens(bench: Bench, mode: Mode) -> dict:
    """The kernels of a few plain tokens by name, and the ms of a token without the profiler."""
    with bench.using(mode):
        batch = open_batch(bench, mode.make_drafting(bench.options.depth), bench.options.context, drafts=False)

        def decode() -> None:
            for _ in range(PROFILED):
                batch.run_round()

        start = time.perf_counter()
        decode()
        seconds = time.perf_counter() - start
        kernels = bench.machine.profile(decode)
        batch.close()
        check_mode(batch.runner, mode)
    total, count = sum(row["us"] for row in kernels), sum(row["count"] for row in kernels)
    figures = {"mode": mode.name, "tokens": PROFILED, "token_ms": 1e3 * seconds / PROFILED}
    figures |= {"kernels_per_token": count / PROFILED, "kernel_ms_per_token": total / 1e3 / PROFILED}
    return figures | {"kernels": kernels}
