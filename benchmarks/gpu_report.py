"""The report of a GPU: whether all parts work on it, and how fast, in under ten minutes and without a network.

    python -m benchmarks.gpu_report out=gpu_report         # as make gpu does; again: the missing and failed parts only
    python -m benchmarks.gpu_report device=cpu tiny=true   # the same parts with a tiny target; its figures mean nothing

Each part runs in a process of its own, which a fault of the device may end, and writes its figures at once. The parts
are the main command, tests, training steps of heads with fast paths on and off, and decoding. Plain decoding,
verification and rounds of a chain are timed captured, compiled and captured, and eager. The target of the figures has
random weights. docs/gpu.md explains them.
"""

import itertools
import json
import os
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from benchmarks import common, hardware
from benchmarks.training_step import StepOptions, compose_settings, measure_step
from specdec import checkpoint
from specdec.core import fast, files
from specdec.core.sampling import Sampling
from specdec.decoding.batch import Request
from specdec.decoding.drafting import Drafting
from specdec.heads.eagle import Eagle3
from specdec.proposers.costs import PassTimer
from specdec.target.model import Target
from specdec.target.verifier import Verifier
from specdec.text.conversations import list_stop_tokens

AIMS = {"mfu of eagle3": 0.45, "share of the bandwidth, plain": 0.70, "64 nodes over 1": 1.1}
# Of decoding, compile and cuda_graphs; what is used first
MODES = {"captured": (False, True), "compiled": (True, True), "eager": (False, False)}
DRAFTED = 32_000  # tokens that heads draft from, as published ones do
TINY = common.ROOT / "tests/golden/today"  # a random target with its tokenizer, prompts and rows
WARM_UP, SECONDS, TEST_SECONDS = 3, 240, 270  # rounds; seconds that a part may take, and the tests


@dataclass(frozen=True)
class GpuReportOptions:
    device: str = "cuda"  # or cpu, which needs tiny=true
    shape: str = "qwen3-8b"  # sizes of the random target: qwen3-8b, 8b, 1b, tiny
    heads: str = "eagle3,mtp,dflash,dspark"  # comma list of heads that are trained; eagle3 without fast paths too
    lengths: str = "8192"  # comma list of tokens in a pack, which holds eight conversations
    contexts: str = "500,3000"  # comma list of tokens before what is decoded
    nodes: str = "1,8,64"  # comma list of nodes to verify in one pass
    depth: int = 5  # drafts of a round
    rounds: int = 40  # timings of rounds and passes; the median counts
    steps: int = 30  # steps of the main command
    tests: str = "-m 'not full and not engines'"  # arguments of pytest; empty: no tests
    processes: int = 8  # processes of the tests
    minutes: float = 10.0  # time of all parts together; then parts are ended, or left out
    redo: bool = False  # whether parts that have figures run again
    only: str | None = None  # one part, in this process
    tiny: bool = False  # a tiny target, few tokens and few tests
    out: str = "gpu_report"  # NAME.json and NAME.md


Measurement = Callable[[], dict]


def list_measurements(options: GpuReportOptions) -> dict[str, Measurement]:
    """The parts by name, the cheapest proof that anything works first."""
    measurements: dict[str, Measurement] = {
        "device": partial(describe_device, options),
        "main command": partial(run_command, options),
    }
    contexts = common.read_numbers("contexts", options.contexts)
    for length, head in itertools.product(
        common.read_numbers("lengths", options.lengths, 32), common.split_list(options.heads)
    ):
        for without in ("", ",".join(fast.PATHS)) if head == "eagle3" else ("",):
            ending = ", fast=off" if without else ""
            measurements[f"training {head}, {length} tokens{ending}"] = partial(
                time_training, options, head, length, without
            )
    for mode, context in itertools.product(MODES, contexts):
        measurements[f"decoding {mode}, {context} tokens"] = partial(time_decoding, options, mode, context)
    if options.tests:
        measurements["tests"] = partial(run_tests, options)
    return measurements


# Parts


def describe_device(options: GpuReportOptions) -> dict:
    device = torch.device(options.device)
    peak, name = hardware.find_peak(device), hardware.describe_device(device)
    measured = hardware.measure_bandwidth(hardware.MAX_READ_BYTES >> (8 if options.tiny else 0), device)
    return {"device": name, "peak_flops": peak.flops, "bandwidth": peak.bandwidth, "measured_bandwidth": measured}


def run_command(options: GpuReportOptions) -> dict:
    """Runs accelerate launch train.py, as a user starts it.

    The target is the default one if its weights are here, else a random one.
    """
    real = common.ROOT / common.TARGET
    uses_real = (real / "config.json").is_file() and not options.tiny
    with tempfile.TemporaryDirectory() as folder:
        target = real if uses_real else Path(folder) / "target"
        if not uses_real:
            save_random_target(target, "tiny" if options.tiny else "135m")
        run_child(list_words(options, target, uses_real=uses_real), folder, min(SECONDS, 60 * options.minutes))
        run = Path(folder) / "checkpoints" / "gpu"
        lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        losses = [line["loss"] for line in lines if "loss" in line]
        report = json.loads((checkpoint.resolve(run) / "report.json").read_text())
    keys = "tau replayed_tau speedup served_speedup baseline_tokens_per_second identical_outputs fast".split()
    figures = {"target": common.TARGET if uses_real else "random", "steps": options.steps}
    figures |= {"losses": [losses[0], losses[-1]]}
    return figures | {key: report[key] for key in keys if report.get(key) is not None}


def list_words(options: GpuReportOptions, target: Path, *, uses_real: bool) -> list[str]:
    """The words of the main command."""
    words = [sys.executable, "-m", "accelerate.commands.launch"]
    if options.device == "cpu":
        words.append("--cpu")
    data_folder = common.ROOT / "data" if uses_real else TINY
    prompts = "prompts_heldout.jsonl" if uses_real else "prompts.jsonl"
    words += [str(common.ROOT / "train.py"), "head=eagle3", f"train.steps={options.steps}", f"target.name={target}"]
    words += [f"data.train={data_folder / 'train.jsonl'}", f"data.heldout={data_folder / prompts}", "run=gpu"]
    if options.tiny:
        words += "data.length=64 validation.num_prompts=2 validation.max_new_tokens=8 solve_packs=4".split()
    return words


def run_child(command: list[str], folder: str | Path, seconds: float) -> str:
    """Runs a command, and returns its output. Raises RuntimeError with the last lines if it fails."""
    paths = {"PYTHONPATH": os.pathsep.join([str(common.ROOT), *filter(None, sys.path)]), "SPECDEC_PROGRESS": "plain"}
    try:
        process = subprocess.run(
            command, cwd=folder, env=os.environ | paths, capture_output=True, text=True, timeout=seconds
        )
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"took more than {seconds:.0f} s") from error
    if process.returncode:
        lines = (process.stdout + process.stderr).strip().splitlines()
        if lines and lines[-1].startswith(
            "subprocess.CalledProcessError: "
        ):  # the launcher's traceback behind what it ran
            lines = lines[: -1 - lines[::-1].index("Traceback (most recent call last):")]
        raise RuntimeError(f"ended with {process.returncode}: {' / '.join(lines[-12:])}")
    return process.stdout


def save_random_target(folder: Path, shape: str) -> None:
    """A target of random weights, with the tokenizer of the tests."""
    shutil.copytree(TINY / "target", folder)
    if shape != "tiny":
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        target = hardware.make_random_target(
            shape, device=torch.device("cpu"), positions=8192, vocab_size=len(tokenizer)
        )
        target.model.config.eos_token_id = min(list_stop_tokens(tokenizer, target.model.generation_config))
        target.model.save_pretrained(folder)


def run_tests(options: GpuReportOptions) -> dict:
    """The first tier of tests, whose scripts and training find the GPU by themselves."""
    several = ["-n", str(options.processes), "--dist", "worksteal"] if options.processes > 1 else []
    command = [sys.executable, "-m", "pytest", "-q", *several, *shlex.split(options.tests)]
    return {"result": run_child(command, common.ROOT, min(TEST_SECONDS, 60 * options.minutes)).strip().splitlines()[-1]}


def time_training(options: GpuReportOptions, head: str, length: int, without: str) -> dict:
    """A training step on ragged conversations, the target's pass included."""
    target = hardware.make_random_target(options.shape, device=torch.device(options.device), positions=length)
    vocab = (f"head.vocab_size={DRAFTED}",)
    step_options = StepOptions(
        document="ragged", without=without, precision="bf16", warmup=2, steps=1 if options.tiny else 5, train=vocab
    )
    cost, peak = measure_step(step_options, head, length, target), hardware.find_peak(target.device)
    row = {
        "head": head,
        "length": length,
        "fast": "off" if without else "on",
        "tokens_per_second": cost.tokens_per_second,
    }
    return row | {"mfu": cost.mfu(peak.flops), **asdict(cost)}


def time_decoding(options: GpuReportOptions, mode: str, context: int) -> dict:
    """Milliseconds of a plain token, of the target's pass over nodes, and of a round of a chain of an untrained
    EAGLE-3.
    """
    room, sizes = options.depth * (options.rounds + WARM_UP) + 128, common.read_numbers("nodes", options.nodes)
    target = hardware.make_random_target(
        options.shape, device=torch.device(options.device), positions=2 * (context + room)
    )
    vocab = torch.arange(min(DRAFTED, target.vocab_size))
    settings = compose_settings(StepOptions(), "eagle3").head.drafter
    layers = {key: settings[key] for key in ("num_layers", "own_output")}
    head = Eagle3(target, vocab=vocab, **layers).to(target.device, target.dtype).eval().requires_grad_(False)
    compile, graphs = MODES[mode]
    drafting = Drafting(depth=options.depth, compile=compile, cuda_graphs=graphs)
    plain = time_rounds(options, drafting, target, None, context)
    medians = time_passes(drafting, target, context, sizes)
    figures = {"mode": mode, "context": context, "plain_ms": plain, "tokens_per_second": 1e3 / plain}
    figures |= {f"verify_{num}_ms": seconds for num, seconds in medians.items()}
    figures |= {f"round_of_{options.depth}_ms": time_rounds(options, drafting, target, head, context)}
    needed = hardware.count_bytes_per_token(target) + context * count_cache_bytes(target)
    bandwidth = hardware.find_peak(target.device).bandwidth
    return figures | {"share_of_bandwidth": bandwidth and needed / (plain / 1e3) / bandwidth, "bytes": needed}


def count_cache_bytes(target: Target) -> int:
    """Bytes of K and V of one token."""
    config = target.config
    return 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * target.dtype.itemsize


def time_rounds(
    options: GpuReportOptions, drafting: Drafting, target: Target, head: Eagle3 | None, context: int
) -> float:
    """The median in ms, once what is captured is captured."""
    proposer = drafting.proposer(head) if head is not None else None
    decoder = drafting.decoder(target, proposer, sampling=Sampling(), stop=set(), runner=drafting.runner())
    batch, times = decoder.batch(), []
    batch.admit([Request(random_tokens(target, context), 1 + (options.depth + 1) * (options.rounds + WARM_UP))])
    for _ in range(options.rounds + WARM_UP):
        start = time.perf_counter()
        batch.run_round()  # waits for the device
        times.append(time.perf_counter() - start)
    batch.close()
    return 1e3 * statistics.median(times[WARM_UP:])


@torch.inference_mode()
def time_passes(drafting: Drafting, target: Target, context: int, sizes: list[int]) -> dict[int, float]:
    """ms of a pass by its nodes, behind a text, in turn."""
    verifier = Verifier(target, sampling=Sampling(), rule="token", runner=drafting.runner())
    medians = PassTimer(verifier, Sampling(), 1, linear=False, context=context).measure(sizes)
    return {num: 1e3 * seconds for num, seconds in medians.items()}


def random_tokens(target: Target, num: int) -> list[int]:
    return torch.randint(target.vocab_size, (num,), generator=torch.Generator().manual_seed(1)).tolist()


# Parts one after the other


def read_figures(options: GpuReportOptions) -> dict[str, dict]:
    path = Path(f"{options.out}.json")
    return json.loads(path.read_text())["parts"] if path.is_file() else {}


def write_figures(options: GpuReportOptions, name: str, figures: dict) -> None:
    """Writes the figures of a part beside those of the others."""
    document = {"aims": AIMS, "parts": read_figures(options) | {name: figures}}
    files.write_text(Path(f"{options.out}.json"), json.dumps(document, indent=1) + "\n")


def run_measurement(options: GpuReportOptions, name: str, measure: Measurement) -> None:
    """Does a part in this process, and keeps what it gave or why it failed."""
    start = time.monotonic()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            figures = measure()
        messages = dict.fromkeys(
            str(warning.message)
            for warning in caught
            if "fast path" in str(warning.message) or "CUDA" in str(warning.message)
        )
        figures |= {"said": list(messages)} if messages else {}
    except (
        Exception
    ) as error:  # kernels, compilers and libraries on a device that nobody has tried: any error can occur
        traceback.print_exc()
        figures = {"error": f"{type(error).__name__}: {error}"}
    write_figures(options, name, figures | {"seconds_of_part": time.monotonic() - start})


def run_in_process(options: GpuReportOptions, name: str, arguments: list[str], seconds: float) -> None:
    """Does a part in a process of its own, whose start counts too."""
    start = time.monotonic()
    write_figures(options, name, {"error": "its process ended before it wrote anything"})
    try:
        run_child([sys.executable, "-m", "benchmarks.gpu_report", *arguments, f"only={name}"], Path.cwd(), seconds)
    except RuntimeError as error:
        write_figures(options, name, {"error": str(error)})
    write_figures(options, name, read_figures(options)[name] | {"seconds_of_part": time.monotonic() - start})


def format_report(figures: dict[str, dict]) -> str:
    """The page: tables, failures, and messages."""
    sections = [*describe_limits(figures.get("device", {}))]
    failed = {name: f"{name}: {row['error']}" for name, row in figures.items() if "error" in row}
    shown = {name: drop_lists(row) for name, row in figures.items() if name not in failed}
    for title in ("main command", "training", "decoding", "tests"):
        rows = [row for name, row in shown.items() if name.startswith(title)]
        if rows:
            sections += [f"## {title}", common.format_rows(rows)]
    if failed:
        sections += ["## Failed, or left out", format_items(failed.values())]
    messages = dict.fromkeys(itertools.chain.from_iterable(row.get("said", []) for row in figures.values()))
    if messages:
        sections += ["## Said on the way", format_items(messages)]
    return "\n\n".join(sections) + "\n"


def describe_limits(device: dict) -> Iterator[str]:
    """The first lines of the page: the device, its memory and the aims."""
    limit = f"{device['bandwidth'] / 1e12:.2f} TB/s on paper, " if device.get("bandwidth") else ""
    yield f"# {device.get('device', 'unknown device')}"
    yield f"Memory: {limit}{device.get('measured_bandwidth', 0) / 1e12:.2f} TB/s measured."
    aims = ", ".join(f"{name} {value:g}" for name, value in AIMS.items())
    yield f"Aims: {aims}. Measured on this device:"


def drop_lists(row: dict) -> dict:
    """A row without lists and dictionaries, which a table has no place for."""
    return {key: value for key, value in row.items() if not isinstance(value, dict | list)}


def format_items(items: Iterable[str]) -> str:
    return "\n".join(f"- {item}" for item in items)


def measure_missing(options: GpuReportOptions, arguments: list[str]) -> None:
    """Runs the measurements that have no figures yet, as long as there is time."""
    start = time.monotonic()
    for name in list_measurements(options):
        figures = read_figures(options).get(name, {"error": "never run"})
        if "error" not in figures and not options.redo:
            continue
        print(f".. {name}", flush=True)
        seconds_left = 60 * options.minutes - (time.monotonic() - start)
        if seconds_left <= 0:
            write_figures(options, name, {"error": f"left out, because {options.minutes:g} minutes were over"})
        elif options.device == "cpu" or name in ("main command", "tests"):  # these have processes of their own
            run_measurement(options, name, list_measurements(replace(options, minutes=seconds_left / 60))[name])
        else:
            run_in_process(options, name, arguments, min(SECONDS, seconds_left))


def main(arguments: list[str]) -> None:
    options = common.read_options(GpuReportOptions, __doc__, arguments)
    if options.tiny:
        sizes: Any = {"shape": "tiny", "heads": "eagle3,mtp", "lengths": "128", "contexts": "24", "nodes": "1,4"}
        options = replace(options, **sizes, rounds=2, steps=3, processes=1, tests="tests/specdec/core/test_tree.py")
    elif options.device == "cpu" or not torch.cuda.is_available():
        raise ValueError(
            "There is no CUDA device here, or torch has no CUDA. device=cpu tiny=true tries the parts on the CPU."
        )
    if options.only is not None:
        run_measurement(options, options.only, list_measurements(options)[options.only])
        return
    measure_missing(options, arguments)
    text = format_report(read_figures(options))
    print(text)
    files.write_text(Path(f"{options.out}.md"), text)
    if failed := sum("error" in row for row in read_figures(options).values()):
        raise SystemExit(f"{failed} parts failed or were left out. The same command tries them again.")


if __name__ == "__main__":
    common.run_main(main)
