"""What a GPU gives: training of three heads, plain decoding and verification of a random 8B target, beside the aims.

    python scripts/gpu_report.py out=gpu_report             # on a machine with CUDA; writes gpu_report.json and gpu_report.md
    python scripts/gpu_report.py dry_run=true out=dry_run   # the same steps with a tiny target, without a GPU too

Training: tokens/s, memory above the weights and MFU, as in bench_training.py, the target's pass included. Decoding: the
bytes of weights that a token needs, over its time and the device's bandwidth. Verification: the time of a pass over N
nodes behind a prompt. Needs no network and no file of weights. What has not begun after `minutes` is left out.
"""

from helpers import hardware
from helpers.options import option, options, split
from helpers.options import run as run_command
from helpers.random_target import random_target, read_shape
from helpers.training_step import Work, measure

import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import torch

from specdec.core import files, masks, rules
from specdec.core.cache import RowCache
from specdec.core.compile import Runner
from specdec.core.sampling import Sampling
from specdec.core.tree import Tree
from specdec.decoding.decoder import Decoder
from specdec.measuring import speed
from specdec.target.model import Target
from specdec.target.verifier import Verifier

ROOT = Path(__file__).resolve().parents[1]
AIMS = {"mfu": 0.45, "bandwidth": 0.75, "nodes": 64, "growth": 1.15}
MODES = {  # how passes run: arguments of Runner
    "eager": {"compile": False, "cuda_graphs": False},
    "graphs": {"compile": False, "cuda_graphs": True},
    "compiled": {"compile": True, "cuda_graphs": False},
    "compiled+graphs": {"compile": True, "cuda_graphs": True},
}


@dataclass(frozen=True, kw_only=True)
class GpuReport:
    shape: str = option("8b", "of the random target: 8b, 1b, tiny, or sizes (hidden4096-layers32-...)")
    heads: str = option("eagle3,mtp,dflash", "comma list of heads that are trained; empty: none")
    lengths: str = option("2048,8192", "comma list of tokens in a pack")
    tokens: int = option(8192, "of a training step: as many packs as fit, at least one")
    modes: str = option(",".join(MODES), "comma list of ways to run passes; empty: no decoding")
    nodes: str = option("1,2,4,8,16,32,64,128", "comma list of nodes to verify in one pass, not compiled")
    compiled_nodes: str = option("1,8,64", "the same for compiled passes, each of which takes long to compile")
    prompt: int = option(512, "tokens before the answer")
    max_new_tokens: int = option(96, "of the answer that plain decoding writes")
    repeats: int = option(15, "timings of each pass; the median counts")
    minutes: float = option(8.0, "what has not begun by then is left out")
    dry_run: bool = option(
        False, "shape=tiny and short texts, without a GPU too: tries the steps, and its figures mean nothing"
    )
    out: str = option("gpu_report", "name of the files that are written, NAME.json and NAME.md", folder=None)


@dataclass
class Report:
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


def main() -> None:
    start = time.monotonic()
    chosen = options(GpuReport, __doc__)
    if chosen.dry_run:
        chosen = replace(
            chosen, shape="tiny", prompt=24, lengths="64", tokens=64, max_new_tokens=4, repeats=2, nodes="1,4"
        )
        chosen = replace(chosen, compiled_nodes="1")
    elif not torch.cuda.is_available():
        raise ValueError(
            "There is no CUDA device here, or torch was built without CUDA. dry_run=true tries the report on the CPU."
        )
    check(chosen)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    positions = max(chosen.prompt + chosen.max_new_tokens, *numbers("lengths", chosen.lengths))
    target = random_target(read_shape(chosen.shape), device=device, positions=positions)
    report = begin(target, device)
    print(f"{report.device}; {report.target}, bfloat16", flush=True)
    for name, work in [*training(chosen, report, target), *decoding(chosen, report, target)]:
        if time.monotonic() - start > 60 * chosen.minutes:
            report.problems.append(f"{name}: left out, because {chosen.minutes:g} minutes were over")
            continue
        attempt(name, work, report)
    text = markdown(report)
    print(text)
    document = {**asdict(report), "aims": AIMS, "options": asdict(chosen), "seconds": time.monotonic() - start}
    files.write_text(Path(f"{chosen.out}.json"), json.dumps(document, indent=2) + "\n")
    files.write_text(Path(f"{chosen.out}.md"), text + "\n")


def check(chosen: GpuReport) -> None:
    """Raises ValueError for options that cannot be measured."""
    unknown = set(split(chosen.modes)) - set(MODES)
    if unknown:
        raise ValueError(f"modes={chosen.modes} must be a comma list of {', '.join(MODES)}.")
    for name in ("lengths", "nodes", "compiled_nodes"):
        numbers(name, getattr(chosen, name))
    if chosen.max_new_tokens < 2:
        raise ValueError(f"max_new_tokens={chosen.max_new_tokens} must be 2 or more.")


def numbers(name: str, text: str) -> list[int]:
    try:
        values = [int(part) for part in split(text)]
    except ValueError:
        values = []
    if not values or min(values) < 1:
        raise ValueError(f"{name}={text} must be a comma list of numbers from 1 on.")
    return values


def begin(target: Target, device: torch.device) -> Report:
    num_bytes = speed.bytes_per_token(target)
    return Report(
        hardware.describe(device),
        target.name,
        hardware.peak_of(torch.cuda.get_device_name(device)) if device.type == "cuda" else hardware.Peak(),
        speed.memory_bandwidth(num_bytes, device),
        num_bytes,
    )


def attempt(name: str, work: Callable[[], None], report: Report) -> None:
    """Does a part of the report. What it raises is noted, so that the other parts are not lost."""
    print(f".. {name}", flush=True)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            work()
        texts = dict.fromkeys(str(each.message) for each in caught if "CUDA graphs" in str(each.message))
        report.problems += [f"{name}: {text}" for text in texts]
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:  # out of memory is a RuntimeError
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        report.problems.append(f"{name}: {type(error).__name__}: {first}")
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Training


def training(chosen: GpuReport, report: Report, target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """The parts of the report that train, by name."""
    for head in split(chosen.heads):
        for length in numbers("lengths", chosen.lengths):
            work = Work(
                head, length, batch=max(1, chosen.tokens // length), together=1 if chosen.dry_run else 3, count=True
            )
            yield f"training {head}, {length} tokens", lambda work=work: train(work, report, target)


def train(work: Work, report: Report, target: Target) -> None:
    cost = measure(ROOT, work, target)
    report.training.append(
        {
            "head": work.head,
            "length": work.length,
            "batch": work.batch,
            "tokens_per_second": cost.tokens_per_second,
            "seconds": cost.seconds,
            "peak_bytes": cost.peak_bytes,
            "state_bytes": cost.state_bytes,
            "parameters": cost.parameters,
            "flops": cost.flops,
            "mfu": cost.mfu(report.peak.flops),
        }
    )


# Decoding


def decoding(chosen: GpuReport, report: Report, target: Target) -> Iterator[tuple[str, Callable[[], None]]]:
    """The parts of the report that decode, by name."""
    for mode in split(chosen.modes):
        runner = Runner(MODES[mode]["compile"], cuda_graphs=MODES[mode]["cuda_graphs"])
        yield f"plain decoding, {mode}", lambda mode=mode, runner=runner: plain(chosen, report, target, mode, runner)
        listed = chosen.compiled_nodes if MODES[mode]["compile"] else chosen.nodes
        sizes = numbers("nodes", listed)
        name = f"verification, {mode}"
        yield name, lambda mode=mode, runner=runner, sizes=sizes: verify(chosen, report, target, mode, runner, sizes)


def plain(chosen: GpuReport, report: Report, target: Target, mode: str, runner: Runner) -> None:
    decoder = Decoder(target, None, sampling=Sampling(), stop=set(), runner=runner)
    prompt = random_prompt(chosen, target)
    decoder.generate([prompt], chosen.max_new_tokens)  # compiles
    generation = decoder.generate([prompt], chosen.max_new_tokens)
    seconds = generation.seconds / len(generation.drafted)
    rate = report.weight_bytes / seconds
    report.decoding.append(
        {
            "mode": mode,
            "tokens_per_second": 1 / seconds,
            "ms": 1e3 * seconds,
            "share_of_bandwidth": rate / report.peak.bandwidth if report.peak.bandwidth else None,
            "share_of_measured_bandwidth": rate / report.read_bandwidth,
            "compile_seconds": runner.seconds,
        }
    )


@torch.inference_mode()
def verify(chosen: GpuReport, report: Report, target: Target, mode: str, runner: Runner, sizes: list[int]) -> None:
    cache = read_prompt(target, random_prompt(chosen, target), room=max(sizes))
    verifier = Verifier(target, sampling=Sampling(), rule="token", runner=runner)
    trees = {num: binary_tree(num, target) for num in sizes}

    def once(num: int) -> float:
        hardware.synchronize(target.device)
        start = time.perf_counter()
        verifier(trees[num], cache, rules.Draws(None)).num_kept.tolist()  # waits, as a round does
        seconds = time.perf_counter() - start
        cache.drop_pending()
        return seconds

    for num in sizes:
        once(num), once(num)  # compiles, and captures
    times: dict[int, list[float]] = {num: [] for num in sizes}
    for _ in range(chosen.repeats):
        for num in sizes:
            times[num].append(once(num))
    medians = {num: statistics.median(values) for num, values in times.items()}
    for num, seconds in medians.items():
        growth = seconds / medians[1] if 1 in medians else None
        report.verification.append({"mode": mode, "nodes": num, "ms": 1e3 * seconds, "times_one": growth})


def random_prompt(chosen: GpuReport, target: Target) -> list[int]:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(target.vocab_size, (chosen.prompt,), generator=generator, device="cpu").tolist()


def read_prompt(target: Target, prompt: list[int], *, room: int) -> RowCache:
    """A cache of one row that has read the prompt, with room for so many entries more."""
    tokens = torch.tensor([prompt], device=target.device)
    cache = target.cache(1)
    cache.make_room(len(prompt) + room)
    cache.reserve(len(prompt))
    mask = masks.pending(masks.causal(len(prompt), target.device), cache.lengths, cache.visible)
    target.read(tokens, (), positions=cache.slots, mask=mask, cache=cache)
    cache.commit(torch.full_like(cache.lengths, len(prompt)), [len(prompt)])
    return cache


def binary_tree(num: int, target: Target) -> Tree:
    """Random tokens; node n is a child of node (n - 1) // 2."""
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(target.vocab_size, (1, num), generator=generator, device="cpu")
    parents = torch.tensor([[(n + 1) // 2 - 1 for n in range(num)]])
    return Tree(tokens.to(target.device), parents.to(target.device), None, linear=num <= 2)


# What is written


def markdown(report: Report) -> str:
    """Tables for a new section in results/."""
    lines = [f"{report.device}; {report.target}, bfloat16. " + bandwidth_line(report), ""]
    if report.training:
        lines += [f"| head | tokens a pack | packs | tokens/s | GB above the weights | MFU (aim: {AIMS['mfu']:.0%}) |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [
            f"| {row['head']} | {row['length']:,} | {row['batch']} | {row['tokens_per_second']:,.0f} | "
            f"{row['peak_bytes'] / 1e9:.1f} | {percent(row['mfu'])} |"
            for row in report.training
        ]
    if report.decoding:
        heading = f"share of the bandwidth (aim: {AIMS['bandwidth']:.0%})"
        lines += ["", f"| plain decoding | tokens/s | ms a token | {heading} | of the measured one | s to compile |"]
        lines += ["|---|---|---|---|---|---|"]
        lines += [
            f"| {row['mode']} | {row['tokens_per_second']:.1f} | {row['ms']:.2f} | {percent(row['share_of_bandwidth'])} | "
            f"{percent(row['share_of_measured_bandwidth'])} | {row['compile_seconds']:.0f} |"
            for row in report.decoding
        ]
    lines += verification_lines(report)
    if report.problems:
        lines += ["", "Not measured, or not as wanted:", "", *(f"- {problem}" for problem in report.problems)]
    return "\n".join(lines)


def bandwidth_line(report: Report) -> str:
    stated = f"{report.peak.bandwidth / 1e12:.2f} TB/s on paper, " if report.peak.bandwidth else ""
    limit = (report.peak.bandwidth or report.read_bandwidth) / report.weight_bytes
    read = f"{report.read_bandwidth / 1e12:.2f} TB/s measured"
    return f"Memory: {stated}{read}; {report.weight_bytes / 1e9:.2f} GB a token, so at most {limit:.0f} tokens/s."


def verification_lines(report: Report) -> list[str]:
    """A row for each way to run passes, a column for each number of nodes."""
    if not report.verification:
        return []
    sizes = sorted({row["nodes"] for row in report.verification})
    aim = f"aim: {AIMS['nodes']} nodes at most {AIMS['growth']:.2f} times one"
    lines = ["", f"| ms of a pass ({aim}) | " + " | ".join(f"{num} nodes" for num in sizes) + " |"]
    lines += ["|---|" + "---|" * len(sizes)]
    for mode in dict.fromkeys(row["mode"] for row in report.verification):
        cells = {row["nodes"]: row for row in report.verification if row["mode"] == mode}
        shown = [
            f"{cells[num]['ms']:.2f}" + (f" ({cells[num]['times_one']:.2f})" if cells[num]["times_one"] else "")
            if num in cells
            else ""
            for num in sizes
        ]
        lines.append(f"| {mode} | " + " | ".join(shown) + " |")
    return lines


def percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


if __name__ == "__main__":
    run_command(main)
