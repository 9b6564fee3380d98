"""What a GPU gives: training of three heads, plain decoding and verification of a random 8B target, beside the aims.

    python -m benchmarks.gpu_report out=gpu_report             # with CUDA; writes gpu_report.json and gpu_report.md
    python -m benchmarks.gpu_report dry_run=true out=dry_run   # the same steps with a tiny target, without a GPU too

Training: as in training_step.py, the target's pass included. Decoding: the bytes of weights that a token needs, over its
time and the device's bandwidth. Verification: the time of a pass over N nodes behind a prompt. Needs no network and no
file of weights. What has not begun after `minutes` is left out.
"""

import itertools
import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import common, hardware
from benchmarks.training_step import StepOptions, measure_step
from specdec.core import files, masks, rules
from specdec.core.cache import RowCache
from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.core.tree import plant
from specdec.decoding.decoder import Decoder
from specdec.target.model import Target
from specdec.target.verifier import Verifier

AIMS = {"mfu": 0.45, "bandwidth": 0.75, "nodes": 64, "growth": 1.15}
MODES = {  # how passes run: compiled or not, captured as CUDA graphs or not
    "eager": (False, False),
    "graphs": (False, True),
    "compiled": (True, False),
    "compiled+graphs": (True, True),
}


@dataclass(frozen=True)
class GpuReportOptions:
    shape: str = "8b"  # of the random target: 8b, 1b, tiny
    heads: str = "eagle3,mtp,dflash"  # comma list of heads that are trained; empty: none
    lengths: str = "2048,8192"  # comma list of tokens in a pack
    tokens: int = 8192  # of a training step: as many packs as fit, at least one
    together: int = 3  # training steps of each timing
    modes: str = ",".join(MODES)  # comma list of ways to run passes; empty: no decoding
    nodes: str = "1,2,4,8,16,32,64,128"  # comma list of nodes to verify in one pass, not compiled
    compiled_nodes: str = "1,8,64"  # the same for compiled passes, each of which takes long to compile
    prompt: int = 512  # tokens before the answer
    max_new_tokens: int = 96  # of the answer that plain decoding writes
    repeats: int = 15  # timings of each pass; the median counts
    minutes: float = 8.0
    dry_run: bool = False  # shape=tiny and short texts, without a GPU too: its figures mean nothing
    out: str = "gpu_report"  # name of the files that are written, NAME.json and NAME.md


@dataclass
class GpuFigures:
    """What was measured, as it is written; rows of figures by name."""

    device: str
    target: str
    peak: hardware.Peak
    read_bandwidth: float  # bytes/s, measured
    weight_bytes: int  # that the pass of one token reads
    training: list[dict] = field(default_factory=list)
    decoding: list[dict] = field(default_factory=list)
    verification: list[dict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def list_parts(
    chosen: GpuReportOptions, figures: GpuFigures, target: Target
) -> Iterator[tuple[str, Callable[[], None]]]:
    """The parts of the report, by name."""
    for head, length in itertools.product(common.split(chosen.heads), common.read_numbers("lengths", chosen.lengths)):
        yield f"training {head}, {length} tokens", partial(train, chosen, figures, target, head, length)
    for mode in common.split(chosen.modes):
        compiled, graphs = MODES[mode]
        runner = Runner(compiled, cuda_graphs=graphs)
        yield f"plain decoding, {mode}", partial(decode, chosen, figures, target, mode, runner)
        sizes = common.read_numbers("nodes", chosen.compiled_nodes if compiled else chosen.nodes)
        yield f"verification, {mode}", partial(verify, chosen, figures, target, mode, runner, sizes)


def attempt(name: str, part: Callable[[], None], figures: GpuFigures) -> None:
    """Does a part of the report. What it raises is noted, so that the other parts are not lost."""
    print(f".. {name}", flush=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            part()
        texts = dict.fromkeys(str(each.message) for each in caught if "CUDA graphs" in str(each.message))
        figures.problems += [f"{name}: {text}" for text in texts]
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:  # out of memory is a RuntimeError
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        figures.problems.append(f"{name}: {type(error).__name__}: {first}")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def train(chosen: GpuReportOptions, figures: GpuFigures, target: Target, head: str, length: int) -> None:
    options = StepOptions(batch=max(1, chosen.tokens // length), together=chosen.together, precision="bf16")
    cost = measure_step(options, head, length, target)
    derived = {"tokens_per_second": cost.tokens_per_second, "mfu": cost.mfu(figures.peak.flops)}
    figures.training.append({"head": head, "length": length, "batch": options.batch, **asdict(cost), **derived})


def decode(chosen: GpuReportOptions, figures: GpuFigures, target: Target, mode: str, runner: Runner) -> None:
    decoder = Decoder(target, None, sampling=Sampling(), stop=set(), runner=runner)
    prompt = random_tokens(target, chosen.prompt)
    decoder.generate([prompt], chosen.max_new_tokens)  # compiles
    generation = decoder.generate([prompt], chosen.max_new_tokens)
    seconds = generation.seconds / len(generation.drafted)
    rate, stated = figures.weight_bytes / seconds, figures.peak.bandwidth
    row = {"mode": mode, "tokens_per_second": 1 / seconds, "ms": 1e3 * seconds, "compile_seconds": runner.seconds}
    shares = {"share_of_bandwidth": stated and rate / stated, "share_of_measured": rate / figures.read_bandwidth}
    figures.decoding.append({**row, **shares})


@torch.inference_mode()
def verify(
    chosen: GpuReportOptions, figures: GpuFigures, target: Target, mode: str, runner: Runner, sizes: list[int]
) -> None:
    cache = read_prompt(target, random_tokens(target, chosen.prompt), room=max(sizes))
    verifier = Verifier(target, sampling=Sampling(), rule="token", runner=runner)
    trees = {}
    for num in sizes:  # node n is a child of node (n - 1) // 2
        first, *others = random_tokens(target, num)
        trees[num] = plant([first], [[(token, (n - 1) // 2) for n, token in enumerate(others, start=1)]], target.device)

    def time_pass(num: int) -> float:
        hardware.synchronize(target.device)
        start = time.perf_counter()
        verifier(trees[num], cache, rules.Draws(None)).num_kept.tolist()  # waits, as a round does
        seconds = time.perf_counter() - start
        cache.drop_pending()
        return seconds

    for num in sizes:
        time_pass(num), time_pass(num)  # compiles, and captures
    times: dict[int, list[float]] = {num: [] for num in sizes}
    for _ in range(chosen.repeats):
        for num in sizes:
            times[num].append(time_pass(num))
    medians = {num: statistics.median(values) for num, values in times.items()}
    for num, seconds in medians.items():
        growth = seconds / medians[1] if 1 in medians else None
        figures.verification.append({"mode": mode, "nodes": num, "ms": 1e3 * seconds, "times_one": growth})


def random_tokens(target: Target, num: int) -> list[int]:
    return torch.randint(target.vocab_size, (num,), generator=torch.Generator().manual_seed(1)).tolist()


def read_prompt(target: Target, prompt: list[int], *, room: int) -> RowCache:
    """A cache of one row that has read the prompt, with room for so many entries more."""
    tokens, cache = torch.tensor([prompt], device=target.device), target.cache(1)
    cache.make_room(len(prompt) + room)
    cache.reserve(len(prompt))
    mask = masks.pending_mask(masks.causal_mask(len(prompt), target.device), cache.lengths, cache.visible)
    target.read(tokens, (), positions=cache.slots, mask=mask, cache=cache)
    cache.commit(torch.full_like(cache.lengths, len(prompt)), [len(prompt)])
    return cache


def format_report(figures: GpuFigures) -> str:
    """Tables for a new section in results/."""
    stated = f"{figures.peak.bandwidth / 1e12:.2f} TB/s on paper, " if figures.peak.bandwidth else ""
    limit = (figures.peak.bandwidth or figures.read_bandwidth) / figures.weight_bytes
    parts = [
        f"{figures.device}; {figures.target}, bfloat16. Memory: {stated}{figures.read_bandwidth / 1e12:.2f} TB/s measured; "
        f"{figures.weight_bytes / 1e9:.2f} GB a token, so at most {limit:.0f} tokens/s.",
        f"Aims: MFU {AIMS['mfu']:.0%}; plain decoding at {AIMS['bandwidth']:.0%} of the bandwidth; a pass over "
        f"{AIMS['nodes']} nodes at most {AIMS['growth']:.2f} times one over one node.",
    ]
    for rows in (figures.training, figures.decoding, figures.verification):
        parts += [common.format_rows(rows)] if rows else []
    if figures.problems:
        parts.append("Not measured, or not as wanted:\n\n" + "\n".join(f"- {problem}" for problem in figures.problems))
    return "\n\n".join(parts)


def main(arguments: list[str]) -> None:
    start, chosen = time.monotonic(), common.read_options(GpuReportOptions, __doc__, arguments)
    if unknown := set(common.split(chosen.modes)) - set(MODES):
        raise ValueError(f"modes={','.join(unknown)} must be a comma list of {', '.join(MODES)}.")
    if chosen.dry_run:
        sizes: Any = {"shape": "tiny", "prompt": 24, "lengths": "64", "tokens": 64, "together": 1, "max_new_tokens": 4}
        chosen = replace(chosen, **sizes, repeats=2, nodes="1,4", compiled_nodes="1")
    elif not torch.cuda.is_available():
        raise ValueError(
            "There is no CUDA device here, or torch has no CUDA. dry_run=true tries the report on the CPU."
        )
    device = hardware.find_device()
    longest = max(chosen.prompt + chosen.max_new_tokens, *common.read_numbers("lengths", chosen.lengths))
    target = hardware.make_random_target(chosen.shape, device=device, positions=longest)
    num_bytes = hardware.bytes_per_token(target)
    bandwidth = hardware.memory_bandwidth(num_bytes, device)
    figures = GpuFigures(
        hardware.describe_device(device), target.name, hardware.find_peak(device), bandwidth, num_bytes
    )
    print(f"{figures.device}; {figures.target}, bfloat16", flush=True)
    for name, part in list_parts(chosen, figures, target):
        if time.monotonic() - start > 60 * chosen.minutes:
            figures.problems.append(f"{name}: left out, because {chosen.minutes:g} minutes were over")
        else:
            attempt(name, part, figures)
    text = format_report(figures)
    print(text)
    document = {**asdict(figures), "aims": AIMS, "options": asdict(chosen), "seconds": time.monotonic() - start}
    files.write_text(Path(f"{chosen.out}.json"), json.dumps(document, indent=2) + "\n")
    files.write_text(Path(f"{chosen.out}.md"), text + "\n")


if __name__ == "__main__":
    common.run(main)
