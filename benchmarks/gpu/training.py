"""Figures of training: steps by head, depth and optimizer, validations with their captures, and waits as errors."""

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from omegaconf import OmegaConf

from benchmarks import common, hardware
from benchmarks.gpu import bench as modes
from benchmarks.gpu.bench import DRAFTED, MIN_ROUNDS, Bench
from benchmarks.gpu.decoding import GREEDY, list_context_figures, list_tree_figures, open_batch
from benchmarks.gpu.figures import Figure
from benchmarks.gpu.options import GpuReportOptions
from benchmarks.training_step import StepOptions, compose_settings, leave_out, measure_step, prepare_step
from specdec.core import fast
from specdec.core.sampling import Sampling
from specdec.decoding.decoder import Decoder
from specdec.decoding.drafting import Drafting
from specdec.measuring.measure import MeasureSettings
from specdec.text.conversations import Prompt
from train.loop.validate import Validation
from train.settings.options import ValidationConfig

VARIANTS = ((7, "adamw"), (4, "adamw"), (7, "muon"), (4, "muon"))  # depth and optimizer of eagle3
ROUNDS, LAST = "rounds and validation", "compiled contexts and validation"  # groups
SPREAD = (40, 1200)  # tokens of the shortest and the longest prompt of a validation
GPU_DRAFTS, GPU_TOKENS = 4, 256  # what a run on a GPU decides for decode.depth and validation.max_new_tokens
TRAINED_SECONDS = 600.0  # seconds of training before a validation: a run validates every ten minutes


def list_figures(options: GpuReportOptions) -> list[Figure]:
    """Figures of training and validation in the order of what nobody knows first."""
    prompts = common.read_numbers("prompts", options.prompts)
    make = partial(Figure, stage=2, subject="waits")
    figures = [make(f"waits of {MIN_ROUNDS} rounds", group=ROUNDS, measure=check_rounds)]
    figures += [make_validation_figure(num, ROUNDS) for num in prompts[:-1]]
    figures += list_tree_figures(options, ROUNDS)
    figures += list_context_figures(options, ROUNDS, modes.CAPTURED)
    figures += [make("waits of a training step", group="training", measure=check_training_step)]
    for depth, optimizer in VARIANTS:
        settings = (f"head.objective.depth={depth}", f"optimizer.name={optimizer}")
        name = f"training eagle3, depth {depth}, {optimizer}"
        figures.append(make_training_figure(name, head="eagle3", settings=settings))
    figures += [make_training_figure(f"training {head}", head=head) for head in common.split_list(options.heads)]
    figures.append(make_training_figure("training eagle3, fast=off", head="eagle3", without=",".join(fast.PATHS)))
    figures += list_context_figures(options, LAST, modes.TUNED)
    return [*figures, make_validation_figure(prompts[-1], LAST)]


def make_training_figure(name: str, **arguments: Any) -> Figure:
    return Figure(name, 2, "training", "training", partial(time_training, **arguments), 100.0)


def make_validation_figure(num: int, group: str) -> Figure:
    return Figure(f"validation of {num} prompts", 2, group, "validation", partial(time_validation, num=num), 320.0)


# Steps


def make_step_options(bench: Bench, settings: tuple[str, ...] = (), without: str = "") -> StepOptions:
    """A step over eight conversations, as large as an H100 holds."""
    steps = 1 if bench.options.dry_run else 5
    drafted = f"head.vocab_size={DRAFTED}"
    return StepOptions(
        document="ragged", without=without, precision="bf16", warmup=2, steps=steps, train=(drafted, *settings)
    )


def time_training(bench: Bench, head: str, settings: tuple[str, ...] = (), without: str = "") -> dict:
    """Tokens/s, MFU and memory of a step, the target's pass included. Settings are read from what ran."""
    cost = measure_step(make_step_options(bench, settings, without), head, bench.options.length, bench.target)
    row = {"head": head, "fast": "off" if without else "on", **asdict(cost)}
    peak = hardware.find_peak(bench.device).flops
    return row | {"tokens_per_second": cost.tokens_per_second, "mfu": cost.mfu(peak)}


# Waits


def check_training_step(bench: Bench) -> dict:
    """A step after two others, in which a wait for the device is an error."""

    def prepare() -> Callable[[], object]:
        step = prepare_step(make_step_options(bench), "eagle3", bench.options.length, bench.target)
        for _ in range(2):
            step()
        return step

    with leave_out([], bench.target):
        return {"work": "a training step of eagle3"} | refuse_waits(bench, prepare)


def check_rounds(bench: Bench) -> dict:
    """Ten captured rounds of a chain, in which a wait is an error, but for the reading of what was accepted."""
    mode = modes.CAPTURED

    def prepare() -> Callable[[], object]:
        batch = open_batch(bench, mode.make_drafting(bench.options.depth), bench.options.context)
        return lambda: [batch.run_round() for _ in range(MIN_ROUNDS)]

    with bench.using(mode):
        return {"work": f"{MIN_ROUNDS} rounds of a captured chain"} | refuse_waits(bench, prepare)


def refuse_waits(bench: Bench, prepare: Callable[[], Callable[[], object]]) -> dict:
    """Runs a piece of work, in which waits are errors. Raises RuntimeError that lists the places of all waits."""
    machine, work = bench.machine, prepare()
    try:
        with machine.waits("error"):
            work()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        places = ", ".join(f"{place} x {count}" for place, count in machine.find_waits(prepare()).items())
        raise RuntimeError(f"the host waits for the device at {places or error}") from error
    return {"waits": 0, "reads_of_accepted_tokens": machine.allowed_waits}


# Validation


def time_validation(bench: Bench, num: int) -> dict:
    """Seconds, captures and compiles of a run's first validation, of the next one, and of its end.

    The weights of the second head are other ones. Prompts have different lengths, and answers all tokens that they may
    have, because the target is random.
    """
    phases = Phases(bench)
    figures: dict[str, Any] = {"prompts": num, "max_new_tokens": count_new_tokens(bench)}
    with tempfile.TemporaryDirectory() as folder:
        validation = make_validation(bench, num, folder)
        with phases.measured("settling"):  # the fastest mode of passes is measured once on a machine
            Decoder(bench.target, None, sampling=GREEDY, stop=set(), runner=validation.drafting.runner())
        for name, scale in (("first", 1.0), ("second", 0.9)):
            head = bench.head.frozen_copy()
            for parameter in head.parameters():
                parameter.data.mul_(scale)
            with phases.measured(name):
                judged = validation({"plain": head}, step=1, trained=TRAINED_SECONDS, best=None, required=False)
            phases.rows[-1]["decoded_prompts"] = judged[1].num_prompts if judged else 0
        if judged is not None:
            with phases.measured("end"):
                report = validation.decode_best(*judged, trained=TRAINED_SECONDS)
            phases.rows[-1]["decoded_prompts"] = report.num_prompts
            figures |= {"speedup": report.speedup}
    figures |= {f"{phase['phase']}_seconds": phase["seconds"] for phase in phases.rows}
    return figures | {f"{kind}_seconds": spent for kind, spent in validation.seconds.items()} | {"phases": phases.rows}


class Phases:
    """Rows of the parts of a validation: seconds, captures and compiles."""

    def __init__(self, bench: Bench):
        self.machine, self.rows = bench.machine, list[dict[str, Any]]()

    @contextlib.contextmanager
    def measured(self, name: str) -> Iterator[None]:
        """Adds a row for the block."""
        start, before = time.perf_counter(), self.machine.counts.copy()
        yield
        counts = {kind: count - before[kind] for kind, count in self.machine.counts.items()}
        self.rows.append({"phase": name, "seconds": time.perf_counter() - start, **counts})


def count_new_tokens(bench: Bench) -> int:
    return 12 if bench.options.dry_run else GPU_TOKENS


def make_validation(bench: Bench, num: int, folder: str) -> Validation:
    """The validation of a run with the settings of conf/train.yaml on a GPU, and random prompts."""
    defaults: Any = OmegaConf.to_container(compose_settings(StepOptions(), "eagle3").validation, resolve=True)
    new_tokens = count_new_tokens(bench)
    settings = ValidationConfig(**defaults | {"num_prompts": num, "max_new_tokens": new_tokens, "answers": folder})
    shortest, longest = (size >> (5 if bench.options.dry_run else 0) for size in SPREAD)
    lengths = torch.linspace(shortest, longest, num).long().tolist()
    prompts = [Prompt(str(seed), "", bench.random_tokens(size, seed=seed)) for seed, size in enumerate(lengths)]
    quiet: Any = SimpleNamespace(say=lambda text: None, print=lambda *objects: None)
    return Validation(
        Accelerator(cpu=bench.device.type == "cpu"),
        bench.head,
        prompts,
        options=settings,
        drafting=Drafting(depth=GPU_DRAFTS, cuda_graphs=True if bench.options.dry_run else None),
        measuring=MeasureSettings(Sampling(settings.temperature), set(), new_tokens),
        console=quiet,
    )
